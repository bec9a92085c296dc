"""One connection of uvicorn, with limits on what arrives before a request is complete.

The time for the head of a request is bounded, and so is its size. Of the two parsers that uvicorn may use, h11 limits
the size itself; httptools buffers whatever arrives until a head is complete.
"""

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from holdfast.service.http.exchange import HEAD_BYTES

IS_SPARE = "holdfast.is_spare"
"""The key in a connection's state that marks it as reserved for health checks."""

FEW = 8
"""How many of the connections that are reserved for addresses with few connections one address may have."""

KEPT = 10
"""The divisor for the share of connections that is reserved for addresses with few connections."""

SPARE = 64
SPARE_PER_ADDRESS = 2
SPARE_S = 5.0
"""How many connections beyond the limit may do health checks, how many per address, and for how long."""


class ConnectionLimits:
    """Counts connections by address. An address at its limit does not take connections from others."""

    def __init__(self, most: int, per_address: int) -> None:
        self._most = most
        self._per_address = min(per_address, most)
        self._by_address: Counter[str] = Counter()
        self._spare_by_address: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """How many connections there are, without the spare ones."""
        return self._by_address.total()

    def acquire(self, address: str) -> str:
        """Return the purpose of a new connection: "requests", "health", or "" if it must be closed immediately."""
        is_scarce = self._most - self.taken <= self._most // KEPT
        bound = min(FEW, self._per_address) if is_scarce else self._per_address
        if self.taken < self._most and self._by_address[address] < bound:
            self._by_address[address] += 1
            return "requests"
        if self._spare_by_address.total() < SPARE and self._spare_by_address[address] < SPARE_PER_ADDRESS:
            self._spare_by_address[address] += 1
            return "health"
        return ""

    def release(self, address: str, purpose: str) -> None:
        """Stop counting a connection."""
        counts = self._by_address if purpose == "requests" else self._spare_by_address
        counts[address] -= 1
        if counts[address] <= 0:
            del counts[address]


def connection_class(
    head_s: float, parser: type[Any] = AutoHTTPProtocol, limits: ConnectionLimits | None = None
) -> type[Any]:
    """Return a connection class with this time limit for the head of a request."""
    bases = (_Counted, _Patient) if hasattr(parser, "on_headers_complete") else (_Patient,)
    if limits is not None:
        bases = (_Limited, *bases)
    return type("Connection", (*bases, parser), {"HEAD_S": head_s, "LIMITS": limits})


class _Limited:
    """A connection that counts towards the limit of its address, or is reserved for health checks."""

    LIMITS: ConnectionLimits
    _purpose = ""
    _life: asyncio.TimerHandle | None = None

    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._from = str((transport.get_extra_info("peername") or ("",))[0])
        self._purpose = self.LIMITS.acquire(self._from)
        if self._purpose == "health":
            self.app_state = {**self.app_state, IS_SPARE: True}
            self._life = self.loop.call_later(SPARE_S, transport.close)
        elif not self._purpose:
            transport.close()

    def connection_lost(self: Any, exc: Exception | None) -> None:
        if self._life is not None:
            self._life.cancel()
        if self._purpose:
            self.LIMITS.release(self._from, self._purpose)
            self._purpose = ""
        super().connection_lost(exc)  # type: ignore[misc]


class _Patient:
    """Waits for the head of a request, up to the time limit."""

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
    """Counts the bytes since the parser last completed a head or a part of a body.

    It reads nothing while complete requests wait for the response to the previous one.
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
        if self.pipeline:  # stop reading until it is answered: otherwise each response would admit hundreds of requests
            self.flow.pause_reading()

    def connection_lost(self: Any, exc: Exception | None) -> None:
        super().connection_lost(exc)  # type: ignore[misc]
        self.pipeline.clear()  # requests behind the current one: their caller has disconnected
