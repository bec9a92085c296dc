"""Transports of a client: over HTTP, or within its own process. Both have the same interface."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from holdfast import errors
from holdfast.app import App
from holdfast.engine.run_context import context
from holdfast.errors import CallerError, EngineError, HoldfastError, InvalidInput
from holdfast.program.values import PLAIN, Values
from holdfast.service.context import Principal, make_service
from holdfast.service.http.exchange import BODY_DEPTH
from holdfast.service.http.problems import Problem, unexpected
from holdfast.service.live.sse import Stream
from holdfast.service.operations.artifacts import Download
from holdfast.service.registry import Operation, binder_of, path_segment
from holdfast.settings import without_password

_reader = msgspec.json.Decoder(Problem)


class Unreachable(EngineError):
    """The service did not answer: it is down, or the network is."""


class Transport(Protocol):
    """Carries requests to the service that answers them."""

    async def call(self, operation: Operation, fields: dict[str, Any]) -> bytes:
        """Return the answer as JSON, or raise the error in the answer."""
        ...

    def stream(self, operation: Operation, fields: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Return an event stream, or a download, in chunks."""
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


class InProcess:
    """Calls an app that has a node or a connection open in this event loop."""

    def __init__(self, app: App, principal: Principal) -> None:
        self._service = make_service(app)
        self._values = app.registry.values
        self._principal = principal

    async def call(self, operation: Operation, fields: dict[str, Any]) -> bytes:
        request = self._read(operation, fields)
        correlation_id = self._service.ids.new_id()
        try:
            answer = await operation.execute(self._service.context(self._principal, correlation_id), request)
        except HoldfastError as error:
            error.details = {**error.details, "correlation_id": correlation_id}
            raise
        except Exception as problem:
            raise unexpected(problem, correlation_id) from problem
        return msgspec.json.encode(answer)

    async def stream(self, operation: Operation, fields: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        self._principal.require(operation.scope)
        context = self._service.context(self._principal, self._service.ids.new_id())
        stream: Stream | Download = await operation.handle(context, self._read(operation, fields))
        pieces = stream.pieces()
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    async def close(self) -> None:
        self._service.stopping.set()

    def _read(self, operation: Operation, fields: dict[str, Any]) -> Any:
        return binder_of(operation).from_json(encoded(fields, self._values))


class Http:
    """Calls a service by its address. The timeout is added to the time that a request asks to wait."""

    def __init__(
        self, address: str, token: str | None, timeout_s: float, transport: Any = None, values: Values = PLAIN
    ) -> None:
        import httpx  # imported here, so that a caller in process does not pay for it

        try:
            is_address = address.startswith(("http://", "https://")) and bool(httpx.URL(address).host)
        except httpx.InvalidURL:
            is_address = False
        if "://" not in address:
            raise InvalidInput(
                "the address of a service begins with http:// or https://, such as http://127.0.0.1:8321",
                field="address",
            )
        if not is_address:
            raise InvalidInput(
                f"the service {without_password(address)!r} is not an address such as http://127.0.0.1:8321",
                field="address",
            )
        if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
            raise InvalidInput(
                "the token is empty, or no token: is HOLDFAST_TOKEN what `holdfast token create` has printed?",
                field="token",
            )
        self._values = values
        self._address = address
        self._timeout_s = timeout_s
        self._failure = httpx.HTTPError
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        is_secret = address.startswith("https://")  # certificates are loaded only where they are checked
        self._http = httpx.AsyncClient(
            base_url=address, headers=headers, timeout=timeout_s, transport=transport, verify=is_secret
        )

    async def call(self, operation: Operation, fields: dict[str, Any]) -> bytes:
        if "context" in operation.request_type.__struct_fields__ and (bound := context()):
            fields = {**fields, "context": {**bound, **(fields.get("context") or {})}}
        wait_s = fields.get("wait_s") or 0.0
        timeout_s = self._timeout_s + (wait_s if isinstance(wait_s, int | float) else 0.0)
        try:
            response = await self._http.request(**_request(operation, fields, self._values), timeout=timeout_s)
        except self._failure as problem:
            raise self._unreachable(problem) from problem
        if not response.is_success:
            raise error_of(response.status_code, response.content)
        return bytes(response.content)

    async def stream(self, operation: Operation, fields: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        try:
            async with self._http.stream(**_request(operation, fields, self._values)) as response:
                if not response.is_success:
                    raise error_of(response.status_code, await response.aread())
                async for chunk in response.aiter_raw():
                    yield chunk
        except self._failure as problem:
            raise self._unreachable(problem) from problem

    async def close(self) -> None:
        await self._http.aclose()

    def _unreachable(self, problem: Exception) -> Unreachable:
        shown = without_password(self._address)
        why = f"{type(problem).__name__}: {problem}".removesuffix(": ")
        return Unreachable(f"no server answers at {shown}: {why}", address=shown)


def _request(operation: Operation, fields: dict[str, Any], values: Values) -> dict[str, Any]:
    """Return the request in its REST form."""
    text = encoded(fields, values)
    if not operation.has_body:  # an address has no types: as a text, a value may fit that otherwise does not
        binder_of(operation).from_json(text)
    rest, path = dict(fields), operation.path
    for field in operation.path_fields:
        if field not in rest:
            raise InvalidInput(f"Object missing required field `{field}`")
        given = rest.pop(field)
        if not isinstance(given, str) or not given:
            raise InvalidInput(f"{field}: Expected `str` of length >= 1", field=field)
        path = path.replace(f"{{{field}}}", path_segment(given))
    asked: dict[str, Any] = {"method": operation.verb, "url": path}
    if operation.has_body:
        content = encoded(rest, values) if operation.path_fields else text
        return {**asked, "content": content, "headers": {"content-type": "application/json"}}
    return {**asked, "params": {field: _text(value) for field, value in rest.items() if value is not None}}


def encoded(fields: dict[str, Any], values: Values = PLAIN) -> bytes:
    """Return a request as JSON; raise `InvalidInput` for a value that JSON cannot express, such as NaN."""
    return values.encode_request(fields, BODY_DEPTH)


def _text(value: Any) -> str | list[str]:
    """Return a value as a query parameter; for several values, one parameter each."""
    plain = msgspec.to_builtins(value)
    if isinstance(plain, list | tuple):
        return [each if isinstance(each, str) else msgspec.json.encode(each).decode() for each in plain]
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def error_of(status: int, body: bytes) -> HoldfastError:
    """Return the error in the answer of a service, as its own type; an unknown one by its status."""
    try:
        problem = _reader.decode(body)
    except msgspec.MsgspecError:
        message = f"what answers is no Holdfast server, or something stands before it: it says {status}"
        if status == 404:
            message += "; if the service is mounted below a path, that path belongs to the address"
        return Unreachable(message) if status >= 500 else CallerError(message)
    kind: Any = getattr(errors, problem.code, None)
    if not (isinstance(kind, type) and issubclass(kind, HoldfastError)):
        kind = CallerError if status < 500 else EngineError
    error: HoldfastError = kind(problem.detail)
    error.details = {**problem.details, "correlation_id": problem.correlation_id}
    return error
