"""REST, derived from the operations: one address for each of them, and HTTP's rules for everything else.

Addresses are matched against the undecoded path, segment by segment: an id may contain an encoded slash. A router that
sees the decoded path, like Starlette's, cannot distinguish it from a separator.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from holdfast.errors import MalformedRequest, MethodNotAllowed, NotFound
from holdfast.service.context import UNAUTHENTICATED, Service
from holdfast.service.http.downloads import Downloads
from holdfast.service.http.exchange import Exchange, HeaderList
from holdfast.service.live.sse import MEDIA_TYPE, EventStreams
from holdfast.service.operations.artifacts import MEDIA_TYPE as OCTETS
from holdfast.service.registry import Operation, binder_of, path_segment


class Endpoint:
    """One operation at its address."""

    __slots__ = ("binder", "fields", "has_body", "is_download", "is_stream", "operation")

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.binder = binder_of(operation)
        self.fields = operation.path_fields
        self.has_body = operation.has_body
        self.is_stream = operation.media == MEDIA_TYPE
        self.is_download = operation.media == OCTETS

    @property
    def has_head(self) -> bool:
        """Whether it supports HEAD: its response is short, and known before it is sent."""
        return not self.is_stream and not self.is_download


class _Node:
    """A segment of addresses: the segments that may follow, and the endpoints of the address that ends here."""

    __slots__ = ("any", "endpoints", "named")

    def __init__(self) -> None:
        self.named: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.endpoints: dict[str, Endpoint] = {}

    def child(self, segment: str) -> "_Node":
        if not segment.startswith("{"):
            return self.named.setdefault(segment, _Node())
        if self.any is None:
            self.any = _Node()
        return self.any


class OperationRouter:
    """Finds the endpoints of a path, in a tree of segments."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self._root = _Node()
        for operation in operations.values():
            node = self._root
            for segment in operation.path.removeprefix("/").split("/"):
                node = node.child(segment)
            node.endpoints[operation.verb] = Endpoint(operation)

    def match(self, path: bytes) -> tuple[dict[str, Endpoint], list[str]]:
        """Return the endpoints of a path by method, and the segments of it that are values, in order."""
        node = self._root
        values: list[str] = []
        for segment in path[1:].split(b"/"):
            text = _decoded(segment)
            following = node.named.get(text)
            if following is None and text:
                following = node.any
                values.append(text)
            if following is None:
                raise NotFound("there is nothing at this address")
            node = following
        if not node.endpoints:
            raise NotFound("there is nothing at this address")
        return node.endpoints, values


def _decoded(segment: bytes) -> str:
    if b"%" not in segment and segment.isascii():
        return segment.decode()
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError as problem:
        raise MalformedRequest("the address is not valid UTF-8") from problem


class Rest:
    """Handles requests at the addresses of the operations."""

    def __init__(self, service: Service, operations: Mapping[str, Operation]) -> None:
        self._service = service
        self._router = OperationRouter(operations)
        self._streams = EventStreams(service)
        self._downloads = Downloads(service)

    async def answer(self, exchange: Exchange) -> None:
        """Handle one request, or raise the error that refuses it."""
        endpoints, values = self._router.match(exchange.path)
        if exchange.method == "OPTIONS":
            await exchange.send_nothing(204, [(b"allow", _allowed(endpoints).encode())])
            return
        found = endpoints.get("GET" if exchange.method == "HEAD" else exchange.method)
        if found is None or (exchange.method == "HEAD" and not found.has_head):
            raise MethodNotAllowed(f"{exchange.method} is not for this address", allow=_allowed(endpoints))
        operation = found.operation
        exchange.operation = operation.name
        in_path = dict(zip(found.fields, values, strict=True))
        if found.is_stream:
            await self._streams.answer(exchange, found, in_path)
            return
        if found.is_download:
            await self._downloads.answer(exchange, found, in_path)
            return
        principal = UNAUTHENTICATED if operation.scope is None else await exchange.principal()
        exchange.check_accept()
        context = self._service.context(principal, exchange.correlation_id)
        operation.check_caller(context)
        if found.has_body:
            request = found.binder.from_body(in_path, await exchange.body())
        else:
            request = found.binder.from_query(in_path, exchange.query)
        context.disconnected = exchange.disconnected
        response = await operation.execute(context, request)
        headers = _location(exchange, response) if operation.status == 201 else ()
        await exchange.answer(operation.status, response, headers)


def _allowed(endpoints: Mapping[str, Endpoint]) -> str:
    has_head = "GET" in endpoints and endpoints["GET"].has_head
    return ", ".join(sorted({*endpoints, "OPTIONS", *(("HEAD",) if has_head else ())}))


def _location(exchange: Exchange, response: Any) -> HeaderList:
    run_id = getattr(getattr(response, "run", response), "run_id", None)
    if run_id is None:
        return []
    return [(b"location", f"{exchange.mount}/v1/runs/{path_segment(run_id)}".encode())]
