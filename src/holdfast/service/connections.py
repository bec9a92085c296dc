"""One connection, as uvicorn has it, with bounds for what is not a request yet.

A caller has so long for the head of a request, and so many bytes. Of the two parsers that uvicorn may use, h11 counts
by itself; httptools keeps whatever comes until a head is whole.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from holdfast.service.origin import HEAD_BYTES


def connection_class(head_s: float, parser: type[Any] = AutoHTTPProtocol) -> type[Any]:
    """Return the class of connections whose callers have so many seconds for the head of a request."""
    bases = (_Counted, _Patient) if hasattr(parser, "on_headers_complete") else (_Patient,)
    return type("Connection", (*bases, parser), {"HEAD_S": head_s})


class _Patient:
    """Waits for the head of a request, and no longer than it should."""

    HEAD_S: float
    _patience: asyncio.TimerHandle | None

    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._patience = self.loop.call_later(self.HEAD_S, transport.close)

    def data_received(self: Any, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]
        is_asking = self.cycle is not None and not self.cycle.response_complete
        if is_asking and self._patience is not None:
            self._patience.cancel()
            self._patience = None
        elif not is_asking and self._patience is None:
            self._patience = self.loop.call_later(self.HEAD_S, self.transport.close)

    def connection_lost(self: Any, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)  # type: ignore[misc]


class _Counted:
    """Counts what comes since the parser last had a whole head or a part of a body to show for it.

    It reads nothing as long as whole requests wait for an answer to the one before them.
    """

    _unread = 0

    def data_received(self: Any, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)  # type: ignore[misc]
        if self._unread > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self: Any) -> None:
        self._unread = 0
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self: Any, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)  # type: ignore[misc]

    def on_response_complete(self: Any) -> None:
        super().on_response_complete()  # type: ignore[misc]
        if self.pipeline:  # which is answered before more is read: each answer would let in hundreds of requests
            self.flow.pause_reading()

    def connection_lost(self: Any, exc: Exception | None) -> None:
        super().connection_lost(exc)  # type: ignore[misc]
        self.pipeline.clear()  # what was asked behind the request under way: nobody is there to be answered
