"""REST, derived from the catalogue: one address for each operation, and what HTTP says about everything else.

Addresses are read from the path as it came, part by part, because an id may hold an encoded slash.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from starlette.types import Receive, Scope, Send

from holdfast.errors import HoldfastError, MalformedRequest, MethodNotAllowed, NotFound
from holdfast.service.context import UNAUTHENTICATED, Service
from holdfast.service.http.binding import RequestBinder
from holdfast.service.http.exchange import ClientGone, Exchange, HeaderList
from holdfast.service.registry import Operation


class Endpoint:
    """One operation at its address."""

    __slots__ = ("fields", "has_body", "operation", "reader")

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.binder = RequestBinder(operation)
        self.fields = operation.path_fields
        self.has_body = operation.has_body


class _Place:
    """A part of an address: what may follow it, and what can be asked here."""

    __slots__ = ("any", "endpoints", "named")

    def __init__(self) -> None:
        self.named: dict[str, _Place] = {}
        self.any: _Place | None = None
        self.endpoints: dict[str, Endpoint] = {}

    def at(self, part: str) -> "_Place":
        if not part.startswith("{"):
            return self.named.setdefault(part, _Place())
        if self.any is None:
            self.any = _Place()
        return self.any


class Addresses:
    """Finds what is meant by a path."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self._root = _Place()
        for operation in operations.values():
            place = self._root
            for part in operation.path.removeprefix("/").split("/"):
                place = place.at(part)
            place.endpoints[operation.verb] = Endpoint(operation)

    def find(self, path: bytes) -> tuple[dict[str, Endpoint], list[str]]:
        """Return what can be asked at a path, and the parts of it that are values, in order."""
        place = self._root
        values: list[str] = []
        for part in path[1:].split(b"/"):
            text = _decoded(part)
            following = place.named.get(text)
            if following is None and text:
                following = place.any
                values.append(text)
            if following is None:
                raise NotFound("there is nothing at this address")
            place = following
        if not place.endpoints:
            raise NotFound("there is nothing at this address")
        return place.endpoints, values


def _decoded(part: bytes) -> str:
    if b"%" not in part and part.isascii():
        return part.decode()
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError as problem:
        raise MalformedRequest("the address is not valid UTF-8") from problem


class Rest:
    """An ASGI application that answers for the catalogue."""

    def __init__(self, service: Service, operations: Mapping[str, Operation]) -> None:
        self._service = service
        self._addresses = Addresses(operations)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(self._service, scope, receive, send)
        try:
            await self._answer(exchange)
        except ClientGone:
            return
        except HoldfastError as error:
            await exchange.refuse(error)
        except Exception as problem:
            await exchange.refuse(exchange.unexpected(problem))

    async def _answer(self, exchange: Exchange) -> None:
        endpoints, values = self._addresses.find(exchange.path)
        if exchange.method == "OPTIONS":
            await exchange.send_nothing(204, [(b"allow", _allowed(endpoints).encode())])
            return
        found = endpoints.get("GET" if exchange.method == "HEAD" else exchange.method)
        if found is None:
            raise MethodNotAllowed(f"{exchange.method} is not for this address", allow=_allowed(endpoints))
        operation = found.operation
        exchange.operation = operation.name
        principal = UNAUTHENTICATED if operation.scope is None else await exchange.principal()
        exchange.check_accept()
        context = self._service.context(principal, exchange.correlation_id)
        operation.check_caller(context)
        in_path = dict(zip(found.fields, values, strict=True))
        if found.has_body:
            request = found.binder.from_body(in_path, await exchange.body())
        else:
            request = found.binder.from_query(in_path, exchange.query)
        context.disconnected = exchange.disconnected
        answer = await operation.execute(context, request)
        await exchange.answer(operation.status, answer, _location(answer) if operation.status == 201 else ())


def _allowed(endpoints: Mapping[str, Endpoint]) -> str:
    verbs = {*endpoints, "OPTIONS", *(("HEAD",) if "GET" in endpoints else ())}
    return ", ".join(sorted(verbs))


def _location(answer: Any) -> HeaderList:
    run_id = getattr(getattr(answer, "run", answer), "run_id", None)
    return [] if run_id is None else [(b"location", f"/v1/runs/{quote(run_id, safe='')}".encode())]
