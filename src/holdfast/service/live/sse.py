"""Server-sent events: writing a stream, reading it, and serving it over HTTP.

A client that does not read is disconnected after a while. It costs no memory until then, because the events that it has
not read are in the store. A client that reconnects with `Last-Event-ID` misses nothing, whichever node answers.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.events import Event
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.service.views import TASK_CONTENTS, event_view

if TYPE_CHECKING:  # the context of a request holds the change feed, which writes frames
    from holdfast.service.context import RequestContext, Service
    from holdfast.service.http.exchange import Exchange
    from holdfast.service.http.rest import Endpoint

MEDIA_TYPE = "text/event-stream"
HEARTBEAT = b": still here\n\n"
OPENING = b"retry: 1000\n\n"
"""Sent first, so that a client knows immediately that the stream is open; it should reconnect after a second."""

EVENT_BYTES = 4 * 1024 * 1024
"""The maximum size of an event's data in a stream; for larger data only the size is sent."""

LAST_EVENT_ID = b"last-event-id"
_ID = re.compile(rb"(\d{1,16})(-end)?")
_encode = msgspec.json.Encoder().encode


# --- writing


class Frame(Struct, frozen=True, gc=False):
    """One event of a run in wire format; `is_last` if it ends the history.

    The frame of an event with the contents of a task names its step; callers whom the task does not concern get
    `redacted` instead.
    """

    seq: int
    text: bytes
    is_last: bool = False
    task_step_id: str | None = None
    redacted: bytes = b""


def frame(data: Any, *, event: str = "", id: str = "") -> bytes:
    """Return one event of a stream, encoded."""
    head = (f"id: {id}\n" if id else "") + (f"event: {event}\n" if event else "")
    # In JSON a line break only occurs between tokens, where a space is equivalent.
    return head.encode() + b"data: " + _encode(data).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n\n"


def event_frame(event: Event, is_last: bool = False) -> Frame:
    """Return the frame of a run's event. Its id is its `run_seq`, which a client returns as `Last-Event-ID`."""
    id = str(event.run_seq)
    text = frame(event_view(event, (), EVENT_BYTES), id=id)
    if not isinstance(event.data, TASK_CONTENTS) or event.step_id is None:
        return Frame(event.run_seq, text, is_last)
    return Frame(
        event.run_seq, text, is_last, event.step_id, frame(event_view(event, (event.step_id,), EVENT_BYTES), id=id)
    )


# --- reading


class Piece(Struct, frozen=True):
    """One event as a client reads it; a comment has no data."""

    event: str = ""
    data: bytes = b""
    id: str = ""


class Parser:
    """Splits an event stream into events, regardless of how its bytes are chunked."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Piece]:
        """Return the events that are now complete."""
        *whole, self._rest = (self._rest + chunk).split(b"\n\n")
        for text in whole:
            fields = dict(line.partition(b": ")[::2] for line in text.split(b"\n"))
            yield Piece(fields.get(b"event", b"").decode(), fields.get(b"data", b""), fields.get(b"id", b"").decode())


# --- answering


class Stream(Protocol):
    """The stream for one client. The client may disconnect at any time."""

    wake: asyncio.Event
    is_closed: bool

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield what to send, until the end of the stream."""
        ...


class EventStreams:
    """Answers requests with event streams."""

    def __init__(self, service: "Service") -> None:
        self._service = service

    async def answer(self, exchange: "Exchange", endpoint: "Endpoint", values: dict[str, str]) -> None:
        """Handle one request, for as long as the client reads."""
        with ExitStack() as held:
            stream = await self._open(exchange, endpoint, values, held)
            if stream is not None:
                await self._send_all(stream, exchange)

    async def _open(
        self, exchange: "Exchange", endpoint: "Endpoint", values: dict[str, str], held: ExitStack
    ) -> Stream | None:
        """Return the requested stream, or None if the response is complete without one."""
        operation = endpoint.operation
        context = self._service.context(await exchange.principal(), exchange.correlation_id)
        with context.logging_refusals(operation.name):
            context.principal.require(operation.scope)
            held.enter_context(self._service.streams.hold(stream_bounds(context)))
            request = endpoint.binder.from_query(values, exchange.query)
            last_id = exchange.headers.get(LAST_EVENT_ID)
            if last_id and "after" in request.__struct_fields__:
                number, is_end = parse_last_id(last_id)
                if is_end:  # after a 204 a browser does not reconnect
                    await exchange.send_nothing(204)
                    return None
                request = replace(request, after=number)
            stream: Stream = await operation.handle(context, request)
            return stream

    async def _send_all(self, stream: Stream, exchange: "Exchange") -> None:
        options = self._service.options
        closing = asyncio.create_task(_close_when_disconnected(stream, exchange), name="reader")
        pieces = stream.pieces()
        opening = await anext(pieces)  # from here on closing the generator releases its subscription
        try:
            await exchange.start_stream(MEDIA_TYPE.encode(), [(b"x-accel-buffering", b"no")])
            await exchange.send_piece(opening)
            loop = asyncio.get_running_loop()
            checked_at = loop.time()
            async for piece in pieces:
                if piece is HEARTBEAT or loop.time() - checked_at >= options.tokens_s:
                    await exchange.principal()  # a revoked token receives nothing more
                    checked_at = loop.time()
                async with asyncio.timeout(options.stall_s):
                    await exchange.send_piece(piece)
                await asyncio.sleep(0)  # sending and reading may both have returned without suspending
            await exchange.end_stream()
        except (TimeoutError, HoldfastError):
            return  # the client is too slow, or has lost its permission: the connection is closed
        finally:
            closing.cancel()
            await pieces.aclose()  # type: ignore[attr-defined]


def stream_bounds(context: "RequestContext") -> dict[str, int]:
    """Return how many streams the caller may have open, and how many the caller's tenant may."""
    principal, options = context.principal, context.service.options
    most = options.streams if principal.is_open else options.streams_per_token  # open access has one caller for all
    bounds = {"the service": options.streams, f"token {principal.token_id or principal.name}": most}
    if principal.tenant is not None:
        bounds[f"tenant {principal.tenant}"] = options.streams_per_tenant
    return bounds


async def _close_when_disconnected(stream: Stream, exchange: "Exchange") -> None:
    await exchange.disconnected()
    stream.is_closed = True
    stream.wake.set()


def parse_last_id(given: bytes) -> tuple[int, bool]:
    """Return the `run_seq` of a `Last-Event-ID`, and whether it is the id of the end of a stream."""
    found = _ID.fullmatch(given)
    if found is None:
        raise InvalidInput("Last-Event-ID: it was not issued by this service", field="Last-Event-ID")
    return int(found[1]), found[2] is not None
