"""The declaration of operations: each is declared once, and everything about it is derived.

The transports are derived from the function's name and types, and from one line above it: the method of JSON-RPC, verb
and path of REST (fields that the path names come from it; the others come from the query string of a GET, otherwise
from the body), the JSON Schemas and the description of the whole.
"""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import cache
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, quote

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from holdfast.core.codec import NO_CHOICE, explain_unfit
from holdfast.errors import (
    AnswerTooLarge,
    Conflict,
    EngineError,
    HoldfastError,
    InternalError,
    InvalidInput,
    MalformedRequest,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    RateLimited,
    RequestTimedOut,
    RunTerminal,
)
from holdfast.limits import NAME_BYTES, SIGNAL_ID_BYTES
from holdfast.service.auth.throttle import COUNTED, SEARCH_COST, UPDATE
from holdfast.service.context import RequestContext

Handler = Callable[[RequestContext, Any], Awaitable[Any]]
Errors = tuple[type[HoldfastError], ...]
AuditedWith = Literal["nothing", "its commit", "a commit after"]

FIELD_CHARS = 100
"""How much of the name of an unknown field is quoted."""

_FIELD = re.compile(r"\{(\w+)\}")
_BODILESS = frozenset({"GET", "DELETE"})
_NUMBERS = (int, float, bool)
_object = msgspec.json.Decoder(dict[str, Any])


# --- fields that many requests have

Name = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES)]
RunId = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES, description="The run's id.")]
StepId = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES, description="The step's id, which is its path.")]
SignalId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=SIGNAL_ID_BYTES,
        description="The sender's id, of 1 to 128 UTF-8 bytes: a retry with the same id is answered as the first time.",
    ),
]
ActorName = Annotated[
    str, Meta(max_length=NAME_BYTES, description="Who does this, where access is open; else it is the caller.")
]
ActorRoles = Annotated[
    tuple[Name, ...], Meta(max_length=100, description="The roles of who does this, where access is open.")
]
Reason = Annotated[str, Meta(max_length=1_000, description="Why, for the run's history.")]
WaitSeconds = Annotated[float, Meta(ge=0, le=60, description="How long to wait for it, in seconds.")]

OF_A_RUN: tuple[type[HoldfastError], ...] = (NotFound,)
TO_A_RUN: tuple[type[HoldfastError], ...] = (NotFound, Conflict, RunTerminal, NotPermitted, RateLimited)


def given(value: str | UnsetType) -> str | None:
    """Return a text that may have been omitted."""
    return None if value is UNSET else str(value)


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of an operation. Unknown fields are refused."""


class Operation(Struct, frozen=True, kw_only=True):
    """One operation: its name, its request and response, and who may call it."""

    name: str
    verb: str
    path: str
    scope: str | None
    status: int
    errors: Errors
    request_type: type[Request]
    response_type: type[Any]
    doc: str
    handle: Handler
    media: str = "application/json"
    """The media type of its response."""

    audit: AuditedWith = "nothing"
    """Whether it is recorded in the audit log: by its own commit, or by one after that."""

    reads_much: bool = False
    """Whether it reads much although it has no pages."""

    is_answered_by_run: bool = False
    """Whether it waits for a turn of a run, which a node must take."""

    @property
    def resource(self) -> str:
        """The subject of the operation: `runs` for `runs.start`."""
        return self.name.partition(".")[0]

    @property
    def summary(self) -> str:
        """The first sentence of its description."""
        return self.doc.split("\n\n", 1)[0].split(". ", 1)[0].rstrip(".")

    @property
    def path_fields(self) -> tuple[str, ...]:
        """The fields that come from the path."""
        return tuple(_FIELD.findall(self.path))

    @property
    def has_body(self) -> bool:
        """Whether fields come from the body of a request."""
        return self.verb not in _BODILESS and len(self.path_fields) < len(self.request_type.__struct_fields__)

    @property
    def all_errors(self) -> Errors:
        """Every error that it may return, whatever the transport: its own, and those of every operation."""
        common: Errors = (InvalidInput, AnswerTooLarge, EngineError, RequestTimedOut, InternalError)
        is_limited = (self.is_counted or self.is_list) and RateLimited not in self.errors
        limited: Errors = (RateLimited,) if is_limited else ()
        return (*self.errors, *limited, *common, *(() if self.scope is None else (NotPermitted, NotAuthenticated)))

    @property
    def is_counted(self) -> bool:
        """Whether a run records refusals: a caller who was refused too often gets `RateLimited`."""
        return self.scope in COUNTED or self.name == UPDATE

    @property
    def is_list(self) -> bool:
        """Whether it may read much, and therefore counts towards the caller's limit on reads."""
        return self.scope is not None and ("limit" in self.request_type.__struct_fields__ or self.reads_much)

    def cost_of(self, request: Any) -> int:
        """Return the cost of the reads of a request."""
        return SEARCH_COST if getattr(request, "text", None) is not None else 1

    def check_caller(self, context: RequestContext) -> None:
        """Refuse a caller who may not call this operation, before their request is read."""
        principal = context.principal
        if self.audit != "nothing":
            context.principal = replace(principal, operation=self.name, correlation_id=context.correlation_id)
        if self.is_counted:
            context.service.refusals.check(principal.token_id or principal.name)
        with context.logging_refusals(self.name):
            principal.require(self.scope)

    async def execute(self, context: RequestContext, request: Any) -> Any:
        """Execute the operation for a permitted caller, within the time limit. Every transport calls this."""
        self.check_caller(context)
        try:
            with context.service.in_flight.doing(self.name):
                async with asyncio.timeout(context.service.options.request_s + getattr(request, "wait_s", 0.0)):
                    answer = await (self._read(context, request) if self.is_list else self.handle(context, request))
                    if self.audit == "a commit after":
                        entry = context.audit(subject=getattr(request, "name", ""))
                        await context.store.append_audit([] if entry is None else [entry])
                    return answer
        except NotPermitted as refusal:
            context.log_refusal(self.name, refusal, is_counted=True)
            raise
        except TimeoutError as problem:
            why = "; no node may be running, or the run is paused" if self.is_answered_by_run else ""
            raise RequestTimedOut(f"{self.name} took too long; it may still be done{why}") from problem

    async def _read(self, context: RequestContext, request: Any) -> Any:
        """Read a list in turn, for a caller who has not read too much already."""
        principal, read_limiter = context.principal, context.service.read_limiter
        caller = principal.token_id or principal.name
        read_limiter.charge(caller, principal.tenant, self.cost_of(request))
        async with (
            context.list_turn,
            read_limiter.slot(caller if principal.tenant is None else f"{principal.tenant} *"),
        ):
            context.check_budget()
            return await self.handle(context, request)


def operation(
    name: str,
    address: str,
    *,
    scope: str | None,
    status: int = 200,
    errors: Errors = (),
    media: str = "application/json",
    audit: AuditedWith | None = None,
    reads_much: bool = False,
    is_answered_by_run: bool = False,
) -> Callable[[Handler], Operation]:
    """Declare a function of a context and a request as an operation. `address` is for example `POST /v1/runs`.

    `scope` is the scope that a caller needs, None if there is none; `errors` are those that it may return in addition
    to the usual ones. Every operation but a GET is in the audit log, by a commit after it, unless `audit` says
    otherwise. An operation without pages that reads much (`reads_much`) is limited like a list.
    """
    verb, path = address.split(" ")
    audited: AuditedWith = audit or ("nothing" if verb == "GET" else "a commit after")

    def declare(function: Handler) -> Operation:
        hints = get_type_hints(function)
        declared = Operation(
            name=name,
            verb=verb,
            path=path,
            scope=scope,
            status=status,
            errors=errors,
            request_type=hints["request"],
            response_type=hints["return"],
            doc=inspect.getdoc(function) or "",
            handle=function,
            media=media,
            audit=audited,
            reads_much=reads_much,
            is_answered_by_run=is_answered_by_run,
        )
        unknown = set(declared.path_fields) - set(declared.request_type.__struct_fields__)
        if unknown or not declared.doc:
            raise InvalidInput(
                f"operation {name}: no docstring, or the path names fields that are not asked: {unknown}"
            )
        return declared

    return declare


def collect(modules: Iterable[ModuleType]) -> dict[str, Operation]:
    """Return the operations that modules declare, by name, in the order of declaration."""
    found: dict[str, Operation] = {}
    addresses: set[tuple[str, str]] = set()
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Operation):
                address = (value.verb, _FIELD.sub("{}", value.path))
                if value.name in found or address in addresses:
                    raise InvalidInput(f"operation {value.name}: its name or its address is taken")
                found[value.name] = value
                addresses.add(address)
    return found


# --- requests, from what came over a wire: the words of a refusal are made from the types, not from the values


class RequestBinder:
    """Reads the requests of one operation."""

    def __init__(self, operation: Operation) -> None:
        self._kind = operation.request_type
        self._decoder = msgspec.json.Decoder(operation.request_type)
        hints = get_type_hints(operation.request_type, include_extras=True)
        self._many = {field for field, hint in hints.items() if get_origin(_bare(hint)) in (tuple, list)}
        self._numbers = {field: kind for field, hint in hints.items() if (kind := _number(hint)) is not None}

    def from_json(self, text: bytes | msgspec.Raw) -> Any:
        """Read all fields from a JSON object."""
        try:
            return self._decoder.decode(text or b"{}")
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
            raise refusal(problem, self._kind) from problem

    def from_body(self, values: dict[str, str], body: bytes) -> Any:
        """Read the fields that the path names from the path, and the others from the body."""
        if not values:
            return self.from_json(body)
        try:
            fields = _object.decode(body or b"{}")
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
            raise refusal(problem, self._kind) from problem
        for field in values:
            if field in fields:
                raise InvalidInput(f"{field}: the path says it already", field=field)
        return self._convert({**fields, **values})

    def from_query(self, values: dict[str, str], query: bytes) -> Any:
        """Read the fields that the path names from the path, and the others from the query string."""
        fields: dict[str, Any] = dict(values)
        for field, text in _parameters(query):
            if field in self._many:
                fields.setdefault(field, []).append(text)
                continue
            if field in fields:
                raise InvalidInput(f"{field[:FIELD_CHARS]}: this is said more than once", field=field[:FIELD_CHARS])
            fields[field] = self._number(field, text)
        return self._convert(fields)

    def _number(self, field: str, text: str) -> Any:
        kind = self._numbers.get(field)
        if kind is None:
            return text
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError:
            return text  # not a number: the check of all fields will report it

    def _convert(self, fields: dict[str, Any]) -> Any:
        try:
            return msgspec.convert(fields, self._kind)
        except (msgspec.MsgspecError, RecursionError) as problem:
            raise refusal(problem, self._kind) from problem


def path_segment(text: str) -> str:
    """Return a value as a segment of an address. The dots of `.` and `..` are encoded: libraries would resolve them."""
    segment = quote(text, safe="")
    return segment.replace(".", "%2E") if segment in (".", "..") else segment


@cache
def binder_of(operation: Operation) -> RequestBinder:
    """Return the binder for requests of an operation. It is cached, because inspecting all types takes milliseconds."""
    return RequestBinder(operation)


def refusal(problem: Exception, kind: type[Request] | None = None) -> InvalidInput | MalformedRequest:
    """Return the error for a request of this kind that cannot be read."""
    if not isinstance(problem, msgspec.ValidationError):
        return MalformedRequest("the body is not JSON, or it is truncated")
    where, reason = explain_unfit(problem)
    if kind is not None and not where and (unknown := _UNKNOWN.fullmatch(str(problem))):
        name = unknown[1][:FIELD_CHARS]  # the name of a field, which is not payload
        fields = ", ".join(kind.__struct_fields__) or "none"
        return InvalidInput(f"{name}: there is no such field; the fields are: {fields}", field=name)
    field = where.removeprefix(".")
    if kind is not None and reason == NO_CHOICE and (choices := _choices(kind, field)):
        reason = f"this is not one of {', '.join(choices)}"
    return InvalidInput(f"{field}: {reason}" if field else reason, **({"field": field} if field else {}))


def _choices(kind: type[Request], field: str) -> list[str]:
    """Return the values that a field, or each of its items, may have, if they are declared as words."""
    name = re.split(r"[.\[]", field, maxsplit=1)[0]
    found = {str(choice) for part in _parts_of(get_type_hints(kind).get(name)) for choice in get_args(part)}
    return sorted(found)


def _parts_of(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Literal:
        yield kind
    for part in () if get_origin(kind) is Literal else get_args(kind):
        yield from _parts_of(part)


_UNKNOWN = re.compile("Object contains unknown field `(.*)`", re.DOTALL)


def _parameters(query: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100)
    except ValueError as problem:
        raise MalformedRequest("the query string cannot be read") from problem


def _number(hint: Any) -> type | None:
    """Return which kind of number a field takes, or None: texts and names are left as they are."""
    kinds = [_bare(part) for part in (get_args(_bare(hint)) or (hint,))]
    return next((kind for kind in kinds if kind in _NUMBERS), None)


def _bare(hint: Any) -> Any:
    return _bare(get_args(hint)[0]) if get_origin(hint) is Annotated else hint
