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
"""What the state of a connection says that is there for questions about health only."""

FEW = 8
"""How many connections an address may have of those that are kept for addresses with few."""

KEPT = 10
"""The share of the connections that is kept for addresses with few: one of so many."""

SPARE = 64
SPARE_PER_ADDRESS = 2
SPARE_S = 5.0
"""How many connections beyond the bound answer questions about health, how many for one address, and for how long."""


class ConnectionLimits:
    """Who has how many connections. What one address has too many of, others still have."""

    def __init__(self, most: int, per_address: int) -> None:
        self._most = most
        self._per_address = min(per_address, most)
        self._by_address: Counter[str] = Counter()
        self._spare_by_address: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """How many connections there are, without those that are spare."""
        return self._by_address.total()

    def acquire(self, address: str) -> str:
        """Return what a new connection is for: "requests", "health", or "" if it is closed at once."""
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
        """Count a connection no longer."""
        counts = self._by_address if purpose == "requests" else self._spare_by_address
        counts[address] -= 1
        if counts[address] <= 0:
            del counts[address]


def connection_class(
    head_s: float, parser: type[Any] = AutoHTTPProtocol, limits: ConnectionLimits | None = None
) -> type[Any]:
    """Return a class of connections with this time limit for the head of a request."""
    bases = (_Counted, _Patient) if hasattr(parser, "on_headers_complete") else (_Patient,)
    if limits is not None:
        bases = (_Limited, *bases)
    return type("Connection", (*bases, parser), {"HEAD_S": head_s, "LIMITS": limits})


class _Limited:
    """One of the connections of its address, or one for questions about health only."""

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
        if self.pipeline:  # read no more before it is answered: each answer would admit hundreds of requests
            self.flow.pause_reading()

    def connection_lost(self: Any, exc: Exception | None) -> None:
        super().connection_lost(exc)  # type: ignore[misc]
        self.pipeline.clear()  # requests behind the present one: their caller is gone
