"""What an operation is: declared once, and everything about it follows.

From the function's name and types, and from one line above it, the transports derive theirs: the method of JSON-RPC,
verb and path of REST (fields that the path names come from it; of a GET the rest comes from the query string,
otherwise from the body), the JSON Schemas and the description of the whole.
"""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable
from types import ModuleType
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from holdfast.errors import (
    AnswerTooLarge,
    Conflict,
    EngineError,
    HoldfastError,
    InternalError,
    InvalidInput,
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

LARGE = frozenset({"runs.snapshot", "tasks.history", "system.stats", "system.queues", "system.nodes"})
"""Operations that have no pages, and read much all the same."""

_FIELD = re.compile(r"\{(\w+)\}")
_BODILESS = frozenset({"GET", "DELETE"})


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
    str, Meta(max_length=NAME_BYTES, description="Who does this, where access is open; else it is who asks.")
]
ActorRoles = Annotated[
    tuple[Name, ...], Meta(max_length=100, description="The roles of who does this, where access is open.")
]
Reason = Annotated[str, Meta(max_length=1_000, description="Why, for the run's history.")]
WaitSeconds = Annotated[float, Meta(ge=0, le=60, description="How long to wait for it, in seconds.")]

OF_A_RUN: tuple[type[HoldfastError], ...] = (NotFound,)
TO_A_RUN: tuple[type[HoldfastError], ...] = (NotFound, Conflict, RunTerminal, NotPermitted, RateLimited)


def given(value: str | UnsetType) -> str | None:
    """Return a text that may have been left out."""
    return None if value is UNSET else str(value)


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operation is asked. A field that it does not have is refused."""


class Operation(Struct, frozen=True, kw_only=True):
    """One operation: what it is called, what it takes and gives, and who may ask for it."""

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
    """How it answers."""

    audit: AuditedWith = "nothing"
    """Whether what it does is in the audit log: by the commit that does it, or by one after that."""

    @property
    def noun(self) -> str:
        """What the operation is about: `runs` for `runs.start`."""
        return self.name.partition(".")[0]

    @property
    def summary(self) -> str:
        """The first sentence of what it does."""
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
        """Every error that it may answer with, whatever the transport: its own, and those of every operation."""
        common: Errors = (InvalidInput, AnswerTooLarge, EngineError, RequestTimedOut, InternalError)
        is_limited = (self.is_counted or self.is_list) and RateLimited not in self.errors
        limited: Errors = (RateLimited,) if is_limited else ()
        return (*self.errors, *limited, *common, *(() if self.scope is None else (NotPermitted, NotAuthenticated)))

    @property
    def is_counted(self) -> bool:
        """Whether a run hears of refusals: who has been refused too often is not heard any more."""
        return self.scope in COUNTED or self.name == UPDATE

    @property
    def is_list(self) -> bool:
        """Whether it reads much, or may: it is bounded by how much a caller may read."""
        return self.scope is not None and ("limit" in self.request_type.__struct_fields__ or self.name in LARGE)

    def cost_of(self, request: Any) -> int:
        """Return what it costs to read what is asked."""
        return SEARCH_COST if getattr(request, "text", None) is not None else 1

    def check_caller(self, context: RequestContext) -> None:
        """Refuse a caller who may not ask for this, before anything that they send is read."""
        principal = context.principal
        if self.audit != "nothing":
            context.principal = replace(principal, operation=self.name, correlation_id=context.correlation_id)
        if self.is_counted:
            context.service.refusals.check(principal.token_id or principal.name)
        with context.logging_refusals(self.name):
            principal.require(self.scope)

    async def execute(self, context: RequestContext, request: Any) -> Any:
        """Do it for a caller who may, within the time that the service allows. Every transport comes through here."""
        self.check_caller(context)
        try:
            with context.service.watchdog.doing(self.name):
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
            raise RequestTimedOut(f"{self.name} took too long; it may still be done") from problem

    async def _read(self, context: RequestContext, request: Any) -> Any:
        """Read a list for a caller who has not read too much already, when it is their turn."""
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
) -> Callable[[Handler], Operation]:
    """Declare a function, from a call and what is asked to an answer, as an operation: `POST /v1/runs` is its address.

    `scope` is what a caller needs, None if nothing; `errors` are those that it may answer with beside the usual ones.
    What is no GET is in the audit log, by a commit after it, unless `audit` says otherwise.
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
        )
        unknown = set(declared.path_fields) - set(declared.request_type.__struct_fields__)
        if unknown or not declared.doc:
            raise InvalidInput(
                f"operation {name}: no docstring, or the path names fields that are not asked: {unknown}"
            )
        return declared

    return declare


def collect(modules: Iterable[ModuleType]) -> dict[str, Operation]:
    """Return the operations that modules declare, by their names and in the order of declaration."""
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
