"""Middleware: functions of the app around workflows, activities, and requests to runs.

Each gets the call and `call_next`, and continues with `return await call_next(call)`. It may inspect the call, pass a
changed call to `call_next`, change the result, raise instead, or call again. The first registered one is the outermost.
Without middleware nothing is called.

Middleware around a workflow is code of the workflow: it runs at every replay, with the rules of workflow code.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from msgspec import Raw, Struct, field
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.audit import Caller
from holdfast.errors import InvalidInput

MiddlewareKind = Literal["workflow", "activity", "client"]
"""What the middleware wraps."""

ClientVerb = Literal["start", "signal", "query", "update", "command"]
"""The kind of request to a run, through this process."""


class WorkflowCall(Struct, frozen=True, kw_only=True):
    """The call of a workflow's function: at the start of its run, after each rotation, and at every replay."""

    workflow: str
    """The name of the workflow."""
    version: str
    """The version of the workflow whose code runs."""
    run_id: str
    """The run."""
    arguments: dict[str, Any]
    """The arguments, by name."""


class ActivityCall(Struct, frozen=True, kw_only=True):
    """One attempt of an activity. `hf.activity_context()` has more."""

    activity: str
    """The name of the activity."""
    run_id: str
    """The run that the step belongs to."""
    step_id: str
    """The step."""
    attempt: int
    """The number of the attempt, from 1."""
    arguments: dict[str, Any]
    """The arguments, by name."""


class ClientCall(Struct, frozen=True, kw_only=True):
    """A call about a run, by code of this process or by a caller of its service."""

    verb: ClientVerb
    """The request: a start, a signal, a query, an update, or an operator's command."""
    workflow: str = ""
    """The workflow, or `plan:ID`, to start."""
    run_id: str | None = None
    """The run, or the id that the new run will have."""
    name: str = ""
    """The name of the signal, query or update, or the operator's command, such as `PAUSE`."""
    context: dict[str, str] = {}
    """The context that was passed to the start. What is bound around it is not included."""
    caller: Caller | None = None
    """The caller of the service; None for code of this process."""
    raw_input: Raw = field(default=Raw(b"null"))
    """The input of the start, or the payload, as JSON."""

    @property
    def input(self) -> Any:
        """The arguments or the payload, as they are stored. They cannot be changed here."""
        return codec.decode(self.raw_input, Any)

    def with_context(self, **texts: str) -> "ClientCall":
        """Return this call with more context for the run that it starts."""
        return replace(self, context={**self.context, **texts})


C = TypeVar("C")
CallNext = Callable[[C], Awaitable[Any]]
"""Continues a call: to the next middleware, or to the wrapped function."""
Middleware = Callable[[C, CallNext[C]], Awaitable[Any]]


class Middlewares(Struct, frozen=True):
    """The middleware of an app, the outermost first. The lists are shared by all holders, and only grow."""

    workflow: list[Middleware[WorkflowCall]] = field(default_factory=list)
    activity: list[Middleware[ActivityCall]] = field(default_factory=list)
    client: list[Middleware[ClientCall]] = field(default_factory=list)

    def of(self, kind: Any) -> list[Any]:
        """Return the middleware of this kind."""
        if kind not in ("workflow", "activity", "client"):
            raise InvalidInput(f'middleware is around "workflow", "activity" or "client", not {kind!r}', field="kind")
        found: list[Any] = getattr(self, kind)
        return found


async def call_through(middleware: Sequence[Middleware[C]], call: C, then: CallNext[C]) -> Any:
    """Make a call through middleware, and return what the outermost returns."""
    if not middleware:
        return await then(call)
    outer, inner = middleware[0], middleware[1:]

    async def call_next(call: C) -> Any:
        return await call_through(inner, call, then)

    return await outer(call, call_next)
