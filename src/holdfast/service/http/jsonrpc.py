"""JSON-RPC 2.0, derived from the operations: the method is the operation's name, and parameters are passed by name.

A response carries the id of its own request. The calls of a batch are executed concurrently, so that they share
commits. A call that depends on another one belongs in a later request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.errors import HoldfastError, MalformedRequest, MethodNotAllowed
from holdfast.service.context import Principal, ResponseBudget, Service
from holdfast.service.http.exchange import Exchange
from holdfast.service.http.problems import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    problem_of,
    rpc_code_of,
    unexpected,
)
from holdfast.service.registry import Operation, binder_of

NO_ID = Raw(b"null")
ENVELOPE_BYTES = 1_024
"""How many bytes of a response are reserved for the envelope of each result, and for refusals."""

_ID_STARTS = frozenset(b'"-0123456789n')


class RpcError(Struct, frozen=True):
    """The error of a call. `data` is the problem as REST returns it, if there is one."""

    code: int
    message: str
    data: Any = None


class Response(Struct, frozen=True, kw_only=True):
    """The response to one call: a result, or an error."""

    jsonrpc: Literal["2.0"] = "2.0"
    id: Raw = NO_ID
    result: Any = UNSET
    error: RpcError | UnsetType = UNSET


class _Request(Struct, frozen=True, kw_only=True):
    jsonrpc: Literal["2.0"]
    method: str
    params: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET


_encoder = msgspec.json.Encoder()
_request = msgspec.json.Decoder(_Request)
_batch = msgspec.json.Decoder(list[Raw])
_id = msgspec.json.Decoder(dict[str, Raw])


class _Caller(NamedTuple):
    """The caller, the correlation id for logs, what completes when they disconnect, and the bytes left to send."""

    principal: Principal
    correlation_id: str
    disconnected: Callable[[], Awaitable[None]]
    budget: ResponseBudget
    list_turn: asyncio.Lock


class JsonRpc:
    """Answers requests at `/rpc`."""

    def __init__(self, service: Service, operations: Mapping[str, Operation]) -> None:
        self._service = service
        self._methods = {name: (operation, binder_of(operation)) for name, operation in operations.items()}

    async def answer(self, exchange: Exchange) -> None:
        """Handle one HTTP request: a call, or a batch of them."""
        exchange.operation = "rpc"
        if exchange.method == "OPTIONS":
            await exchange.send_nothing(204, [(b"allow", b"OPTIONS, POST")])
            return
        if exchange.method != "POST":
            raise MethodNotAllowed(f"{exchange.method} is not for this address", allow="OPTIONS, POST")
        principal = await exchange.principal()
        exchange.check_accept()
        try:
            text = await exchange.body()
        except MalformedRequest as problem:
            await exchange.answer(200, _failed(PARSE_ERROR, problem.message))
            return
        most = self._service.options.answer_bytes
        budget = ResponseBudget(max(most // 2, most - ENVELOPE_BYTES * self._service.options.batch_calls))
        caller = _Caller(principal, exchange.correlation_id, exchange.disconnected, budget, asyncio.Lock())
        answer = await self._answer_text(caller, text)
        if answer is None:
            await exchange.send_nothing(204)
        else:
            await exchange.answer(200, answer)

    async def _answer_text(self, caller: "_Caller", text: bytes) -> Response | list[Response] | None:
        try:
            msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return _failed(PARSE_ERROR, "the body is not JSON, or it is truncated")
        if not text.lstrip().startswith(b"["):
            return await self._call(caller, Raw(text))
        calls = _batch.decode(text)
        if not 1 <= len(calls) <= self._service.options.batch_calls:
            return _failed(INVALID_REQUEST, f"a batch has 1 to {self._service.options.batch_calls} calls")
        answers = await asyncio.gather(*(self._call(caller, each) for each in calls))
        return [answer for answer in answers if answer is not None] or None

    async def _call(self, caller: "_Caller", text: Raw) -> Response | None:
        """Execute one call. A notification, which has no id, gets no response whatever its result."""
        try:
            request = _request.decode(text)
            if request.id is not UNSET and not _is_id(request.id):
                return _failed(INVALID_REQUEST, "an id is a string, a number or null")
        except msgspec.ValidationError:
            return _failed(
                INVALID_REQUEST, "a call is an object of jsonrpc: '2.0', method, params and id", _id_of(text)
            )
        try:
            answer = await self._carry_out(caller, request)
        except HoldfastError as error:
            answer = _refused(error, caller.correlation_id)
        except Exception as problem:
            failure = unexpected(problem, caller.correlation_id, self._service.stopping.is_set())
            answer = _refused(failure, caller.correlation_id)
        return None if request.id is UNSET else msgspec.structs.replace(answer, id=request.id)

    async def _carry_out(self, caller: "_Caller", request: _Request) -> Response:
        found = self._methods.get(request.method)
        if found is None:
            return _failed(METHOD_NOT_FOUND, "there is no such method")
        operation, binder = found
        params = b"{}" if request.params is UNSET or bytes(request.params) == b"[]" else request.params
        if bytes(params)[:1] != b"{":
            return _failed(INVALID_PARAMS, "parameters go by name, in an object")
        context = self._service.context(caller.principal, caller.correlation_id)
        context.disconnected, context.budget, context.list_turn = caller.disconnected, caller.budget, caller.list_turn
        result = Raw(_encoder.encode(await operation.execute(context, binder.from_json(params))))
        caller.budget.take(len(result))
        return Response(result=result)


def _is_id(id: Any) -> bool:
    return bytes(id)[0] in _ID_STARTS


def _id_of(text: Raw) -> Raw:
    """Return the id of an invalid call, if it has one anyway."""
    try:
        id = _id.decode(text).get("id", NO_ID)
    except msgspec.ValidationError:
        return NO_ID
    return id if _is_id(id) else NO_ID


def _failed(code: int, message: str, id: Raw = NO_ID) -> Response:
    return Response(id=id, error=RpcError(code, message))


def _refused(error: HoldfastError, correlation_id: str) -> Response:
    problem = problem_of(error, correlation_id)
    return Response(error=RpcError(rpc_code_of(type(error)), problem.detail, problem))
