"""Event streams over HTTP: server-sent events, with `Last-Event-ID`.

A reader that does not read is dropped after a while, and costs nothing until then: what it has not taken is in the
store. A reader that comes back with the last id that it got misses nothing, whoever answers.
"""

import asyncio
import re
from contextlib import ExitStack

from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from holdfast.errors import HoldfastError, InvalidInput, MethodNotAllowed
from holdfast.service.context import RequestContext, Service
from holdfast.service.http.exchange import Exchange
from holdfast.service.http.rest import Addresses, Endpoint
from holdfast.service.live.sse import HEARTBEAT
from holdfast.service.operations import streams
from holdfast.service.operations.streams import Stream
from holdfast.service.registry import Operation, collect

STREAMS: dict[str, Operation] = collect((streams,))
"""What can be streamed, by name. It is in no other transport: JSON-RPC has nothing like it."""

CONTENT_TYPE = b"text/event-stream"
LAST_ID = b"last-event-id"

_IS_STREAM = re.compile(rb"/v1/(runs/[^/]+/)?stream")
_ID = re.compile(rb"(\d{1,16})(-end)?")


def is_stream(path: bytes) -> bool:
    """Say whether an event stream is at this path, as it came: an id may hold an encoded slash."""
    return _IS_STREAM.fullmatch(path) is not None


class Streams:
    """An ASGI application that answers with event streams."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._addresses = Addresses(STREAMS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, for as long as its reader reads."""
        exchange = Exchange(self._service, scope, receive, send)
        try:
            with ExitStack() as held:
                stream = await self._open(exchange, held)
                holding = held.pop_all()
        except HoldfastError as error:
            await exchange.refuse(error)
        except Exception as problem:
            await exchange.refuse(exchange.unexpected(problem))
        else:
            with holding:
                if stream is not None:
                    await self._send_all(stream, exchange, receive, send)

    async def _open(self, exchange: Exchange, held: ExitStack) -> Stream | None:
        """Return the stream that is asked for, or None if the answer is given."""
        endpoints, values = self._addresses.find(exchange.path)
        if exchange.method == "OPTIONS":
            await exchange.send_nothing(204, [(b"allow", b"GET, OPTIONS")])
            return None
        found = endpoints.get(exchange.method)
        if found is None:
            raise MethodNotAllowed(f"{exchange.method} is not for this address", allow="GET, OPTIONS")
        exchange.operation = found.operation.name
        context = self._service.context(await exchange.principal(), exchange.correlation_id)
        with context.logging_refusals(found.operation.name):
            context.principal.require(found.operation.scope)
            held.enter_context(self._service.streams.hold(_bounds(context)))
            return await self._stream(exchange, context, found, values)

    async def _stream(
        self, exchange: Exchange, context: RequestContext, found: Endpoint, values: list[str]
    ) -> Stream | None:
        request = found.binder.from_query(dict(zip(found.fields, values, strict=True)), exchange.query)
        last_id = exchange.headers.get(LAST_ID)
        if last_id and "after" in request.__struct_fields__:
            number, is_over = _last_id(last_id)
            if is_over:  # how browsers are told not to come back again
                await exchange.send_nothing(204)
                return None
            request = replace(request, after=number)
        stream: Stream = await found.operation.handle(context, request)
        return stream

    async def _send_all(self, stream: Stream, exchange: Exchange, receive: Receive, send: Send) -> None:
        self._service.requests[exchange.operation, 200] += 1
        gone = asyncio.create_task(_close_when_gone(stream, receive), name="reader")
        pieces = stream.pieces()
        opening = await anext(pieces)  # from here on it is let go when it is closed
        try:
            headers = [(b"content-type", CONTENT_TYPE), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": opening, "more_body": True})
            loop = asyncio.get_running_loop()
            checked_at = loop.time()
            async for piece in pieces:
                if piece is HEARTBEAT or loop.time() - checked_at >= self._service.options.tokens_s:
                    await exchange.principal()  # before anything is sent to one who may have lost the right to it
                    checked_at = loop.time()
                async with asyncio.timeout(self._service.options.stall_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)  # neither sending nor reading need have given way to others
            await send({"type": "http.response.body", "body": b""})
        except (TimeoutError, HoldfastError):
            return  # it reads too slowly, or may not read on: the connection is cut, and it may come back
        finally:
            gone.cancel()
            await pieces.aclose()  # type: ignore[attr-defined]


def _bounds(context: RequestContext) -> dict[str, int]:
    """Return how many streams the caller may have, and how many their tenant."""
    principal, options = context.principal, context.service.options
    most = options.streams if principal.is_open else options.streams_per_token  # nobody is told apart there
    bounds = {f"token {principal.token_id or principal.name}": most}
    if principal.tenant is not None:
        bounds[f"tenant {principal.tenant}"] = options.streams_per_tenant
    return bounds


async def _close_when_gone(stream: Stream, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.is_closed = True
    stream.wake.set()


def _last_id(given: bytes) -> tuple[int, bool]:
    found = _ID.fullmatch(given)
    if found is None:
        raise InvalidInput("Last-Event-ID: this was not given out by this service", field="Last-Event-ID")
    return int(found[1]), found[2] is not None
