"""The functions that a workflow can use, besides activities, children and plain asyncio."""

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar
from warnings import warn

from msgspec import Struct, structs

from holdfast.clock import Random
from holdfast.core import commands as c
from holdfast.core.events import RunOrigin
from holdfast.core.instants import datetime_of
from holdfast.core.keys import require_step_name
from holdfast.core.plans import PlanRef
from holdfast.core.restarts import number_of_id
from holdfast.errors import InvalidInput
from holdfast.limits import DURATION_MS
from holdfast.program.coroutine import CoroutineProgram, current_program, require_program, scoped
from holdfast.program.definitions import (
    CallOptions,
    ClosePolicy,
    encode_options,
    failure_types,
    milliseconds,
    step_definition,
)
from holdfast.program.fan_out import awaitable
from holdfast.program.loop import ProgramClosed
from holdfast.program.outcomes import Rotate

T = TypeVar("T")
P = ParamSpec("P")


async def sleep(duration: timedelta | float, *, name: str = "sleep") -> None:
    """Sleep durably, for seconds or for months. It holds no thread, memory or connection. `name` names the step."""
    program = require_program("sleep")
    require_step_name("name", name)
    seconds: Any = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds <= 0:
        await asyncio.sleep(0)  # nothing to wait for
        return
    if duration is None:
        raise InvalidInput("sleep takes a timedelta or a number of seconds, not None", field="duration")
    due_at = program.now() + (milliseconds(duration) or 0) * 1_000
    await program.step(c.StartTimer(step_id=program.name_step(name), due_at=due_at))


def scope(name: str) -> "Scope":
    """Name a part of the work: `async with hf.scope("item 17"):`. Its step ids begin with it: `item 17/charge`.

    They appear like this in the history, on the page and in traces. A scope also applies to asyncio tasks created in
    it.
    """
    require_program("scope")
    require_step_name("name", name)
    return Scope(name)


class Scope:
    """The context of `scope`."""

    def __init__(self, name: str) -> None:
        self._context = scoped(name)

    async def __aenter__(self) -> None:
        self._context.__enter__()

    async def __aexit__(self, *problem: Any) -> None:
        self._context.__exit__(None, None, None)


class RunInfo(Struct, frozen=True, kw_only=True):
    """What a workflow can read about its run. It is the same on every replay."""

    run_id: str
    """The id of the run."""
    workflow: str
    """The name of the workflow."""
    version: str
    """The version of the workflow with which it was started."""
    parent_run_id: str | None
    """The run that started it as a child."""
    tenant: str
    """Its tenant."""
    project: str
    """Its project."""
    environment: str
    """Its environment."""
    request_id: str
    """The request id of its start, or empty."""
    reference_key: str | None
    """Your own key for finding the run."""
    tags: tuple[str, ...]
    """The tags given at the start."""
    rotation: int
    """How many times its history was rotated, by `continue_as_new` or `continue_as_new_if_long`."""
    attempt: int
    """1, plus one for each RETRY_RUN and each reuse of its id (`reuse`). A rotation or a fork keeps it."""
    retry_of: str | None
    """The finished run that an operator retried with this one."""
    created_at: datetime | None
    """When it was requested. Unknown if the run was rotated by a version without this field."""
    started_at: datetime | None
    """When its first turn began."""
    schedule_id: str | None
    """The schedule that started it."""
    tick: datetime | None
    """The planned time of the schedule's tick. The run may have started later."""


def run_info() -> RunInfo:
    """Return what is known about this run: ids, parent, version, tags, attempt, times, and schedule."""
    program = require_program("run_info")
    about = program.about
    origin = about.origin or RunOrigin(0)
    schedule, run_id = origin.schedule, about.run_id or program.run_id
    return RunInfo(
        run_id=run_id,
        workflow=program.definition.name,
        version=program.definition.version,
        parent_run_id=about.parent_run_id,
        tenant=origin.tenant,
        project=origin.project,
        environment=origin.environment,
        request_id=origin.request_id,
        reference_key=origin.reference_key,
        tags=origin.tags,
        rotation=program.rotation,
        attempt=origin.attempt or number_of_id(run_id),
        retry_of=origin.retry_of,
        created_at=_moment(origin.queued_at),
        started_at=_moment(about.started_at),
        schedule_id=None if schedule is None else schedule.schedule_id,
        tick=None if schedule is None else _moment(schedule.tick),
    )


def _moment(instant: int) -> datetime | None:
    return datetime_of(instant) if instant else None


def now() -> datetime:
    """Return the current time of the workflow. It is the same on every replay."""
    return datetime_of(require_program("now").now())


def uuid4() -> uuid.UUID:
    """Return a new UUID that is the same on every replay."""
    return require_program("uuid4").new_uuid()


def random() -> Random:
    """Return a random generator seeded by the run: it draws the same values on every replay."""
    return require_program("random").random


async def wait_until(condition: Callable[[], bool], *, timeout: timedelta | float | None = None) -> None:
    """Wait until the condition is true. It is evaluated after each event. Raise `TimeoutError` after `timeout`."""
    program = require_program("wait_until")
    _require_function("wait_until: the condition", condition)
    if inspect.iscoroutinefunction(condition):
        raise InvalidInput("wait_until: a condition is read-only; pass a plain function, not an async one")
    if condition():
        return
    future = program.when(condition)
    limit_ms = milliseconds(timeout)
    async with _timeout(limit_ms, "wait_until: the condition did not become true"):
        await future


@asynccontextmanager
async def _timeout(limit_ms: int | None, failure: str) -> AsyncIterator[None]:
    """Raise `TimeoutError` with this message after this time."""
    try:
        async with asyncio.timeout(None if limit_ms is None else limit_ms / 1_000) as bound:
            yield
    except TimeoutError:
        if limit_ms is None or not bound.expired():
            raise
        raise TimeoutError(f"{failure} within {limit_ms / 1_000:g} s") from None


def _require_function(what: str, given: Any) -> None:
    if not callable(given):
        kind = type(given).__qualname__
        raise InvalidInput(f"{what} is a function, such as one after `lambda:`, not a {kind}")


async def step(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """Call a function of a module as a durable step: recorded, retried, and not called again once it has a result.

    It needs no registration, has the default options of an activity, and its step has the function's name. After a
    crash the node finds it by the workflow's code, so it must be a function of a module, not a lambda.
    """
    program = require_program("step")
    definition = step_definition(program.definition.activities, function, program.definition.values)
    call = CallOptions(name=function.__name__)
    return await program.run_activity(definition, args, kwargs, "", encode_options(definition.options), call)


async def poll(
    check: Callable[[], Awaitable[T]],
    *,
    every: timedelta | float,
    backoff: float = 1.0,
    most: timedelta | float | None = None,
    timeout: timedelta | float | None = None,
) -> T:
    """Call `check`, such as `lambda: look(parcel)`, until it returns a true value, and return that value.

    Between calls it sleeps for `every`, multiplied by `backoff` each time, up to `most`. It raises `TimeoutError` after
    `timeout`.
    """
    require_program("poll")
    _require_function("poll: what is called", check)
    pause_ms, most_ms = milliseconds(every) or 0, milliseconds(most)
    if not 1 <= backoff <= 100:
        raise InvalidInput(f"poll: backoff is a factor from 1 to 100, not {backoff!r}", field="backoff")
    limit_ms = milliseconds(timeout)
    async with _timeout(limit_ms, "poll: nothing true was returned"):
        while not (found := await awaitable("poll", check())):
            await sleep(pause_ms / 1_000, name="poll")
            pause_ms = min(round(pause_ms * backoff), DURATION_MS if most_ms is None else max(most_ms, 1))
    return found


def continue_as_new(*args: Any, **kwargs: Any) -> NoReturn:
    """Rotate the history: the workflow starts over with these arguments, as the same run with the same mailbox."""
    program = require_program("continue_as_new")
    input = program.bounded(program.definition.signature.pack(args, kwargs), "the input of continue_as_new")
    program.rotate()
    raise Rotate(input)


def continue_as_new_if_long(*args: Any, **kwargs: Any) -> None:
    """Start over with these arguments, as `continue_as_new` does, if the history is long; otherwise return.

    `Limits.rotation_steps` and `Limits.rotation_bytes` define what is long. It also returns if a rotation would lose
    something: an open step or timer, an unanswered update, a saga, or another asyncio task of the workflow. Then the
    next call tries again.
    """
    program = require_program("continue_as_new_if_long")
    # Checked on each call, so that a mistake shows at the first one.
    input = program.bounded(program.definition.signature.pack(args, kwargs), "the input of continue_as_new_if_long")
    if program.continues_here():
        program.rotate()
        raise Rotate(input)


def cut(*args: Any, **kwargs: Any) -> None:
    """Call `continue_as_new_if_long`, the new name of this function."""
    warn("hf.cut is deprecated: call hf.continue_as_new_if_long", DeprecationWarning, stacklevel=2)
    continue_as_new_if_long(*args, **kwargs)


def patched(patch_id: str) -> bool:
    """Return whether to run the new code: True in runs that first reach this point now, False in older runs."""
    require_step_name("patch_id", patch_id)
    return require_program("patched").is_patched(patch_id)


def set_attributes(**values: Any) -> None:
    """Change search attributes of this run, from the commit of this turn on. None removes an attribute.

    The app declares their names and types. A value that does not fit raises `InvalidInput`.
    """
    require_program("set_attributes").set_attributes(values)


def publish(**values: Any) -> None:
    """Show values with this run from the commit of this turn on: `hf.publish(stage="packing", done=0.4)`.

    Lists, live updates and the page show the last values. `done`, from 0 to 1, is drawn as progress. None removes a
    value. They are for people: at most 4 KB, not searched, and, like search attributes, not encrypted.
    """
    program = require_program("publish")
    if values:
        program.publish(values)


def on_query(name: str, handler: Callable[..., Any]) -> None:
    """Answer queries of this name with this function. It may only read."""
    require_step_name("query name", name)
    if inspect.iscoroutinefunction(handler):
        raise InvalidInput(f"query {name!r}: a query is read-only; its handler is a plain function, not an async one")
    require_program("on_query").on_query(name, handler)


def on_update(name: str, handler: Callable[..., Any], *, validator: Callable[..., Any] | None = None) -> None:
    """Answer updates of this name with this function. The validator may refuse an update by raising an exception."""
    require_step_name("update name", name)
    if inspect.iscoroutinefunction(validator):
        raise InvalidInput(f"update {name!r}: a validator is read-only; pass a plain function, not an async one")
    require_program("on_update").on_update(name, handler, validator)


async def plan(
    document: dict[str, Any] | str | PlanRef,
    inputs: Mapping[str, Any] | None = None,
    *,
    close_policy: ClosePolicy = "await",
) -> Any:
    """Run a plan as a child, and return its output. A plan is a document (a dict or a text), or a reference to one.

    The document is checked and stored before the run is started. If it is invalid, `ActivityFailed` is raised.
    """
    program = require_program("plan")
    if isinstance(document, PlanRef):
        given: dict[str, Any] = structs.asdict(document)
    elif isinstance(document, dict | str):
        given = {"document": document}
    else:
        raise InvalidInput(
            f"a plan is a dict, a text or a PlanRef, not {type(document).__qualname__}", field="document"
        )
    values = program.definition.values
    return await program.run_plan(given, values.encode({} if inputs is None else dict(inputs)), close_policy)


class Saga:
    """Compensates completed work, in reverse order, when a later part fails or is cancelled.

    An exception that pauses the run instead of failing it undoes nothing. That is any exception that is neither a
    failure of the run (`WorkflowFailed`, what steps and waits raise, `failures` of the workflow) nor one of `failures`
    given here.

    ::

        async with Saga() as saga:
            saga.undo(release, await reserve.options(cancel="wait")(order))
            await charge(order)

    A run that is cancelled while `reserve` is running waits for it, and then releases what was reserved. Without
    `cancel="wait"` the result of `reserve` is lost, and with it what would have to be released.
    """

    def __init__(self, *, failures: Any = ()) -> None:
        """`failures` are exceptions that trigger the compensation and that code around the saga handles."""
        self._failures = failure_types(failures)
        self._undo: list[tuple[Callable[..., Awaitable[Any]], tuple[Any, ...]]] = []
        self._program: CoroutineProgram | None = None
        self._is_open = False

    def undo(self, compensate: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Register how to compensate what has just been done: a function and its arguments."""
        if not self._is_open:
            raise InvalidInput("undo: the saga is not open, and would undo nothing: async with hf.Saga() as saga")
        _require_function("undo: what compensates", compensate)
        try:
            inspect.signature(compensate).bind(*args)
        except TypeError as problem:  # raised here, not later when it is needed
            name = getattr(compensate, "__qualname__", repr(compensate))
            raise InvalidInput(f"undo: {name} cannot be called with {len(args)} arguments: {problem}") from None
        self._undo.append((compensate, args))

    async def _undo_all(self) -> list[BaseException]:
        failures: list[BaseException] = []
        for compensate, args in reversed(self._undo):
            try:
                await awaitable("undo", compensate(*args))
            except (Exception, asyncio.CancelledError) as failure:  # reported with the first error; the rest is undone
                failures.append(failure)
        return failures

    async def __aenter__(self) -> Self:
        self._program = current_program()
        self._is_open = True
        if self._program is not None:
            self._program.open_sagas += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._end(problem)
        finally:
            self._is_open = False
            if self._program is not None:
                self._program.open_sagas -= 1

    async def _end(self, problem: BaseException | None) -> None:
        if problem is None or isinstance(problem, (Rotate, ProgramClosed, GeneratorExit)):
            return
        asked: asyncio.CancelledError | None = None
        if self._program is not None and self._program.is_mistake(problem, self._failures):
            try:
                await self._program.stop_for(problem, "the code in a saga")
            except asyncio.CancelledError as cancelled:
                asked = cancelled
        undoing = asyncio.ensure_future(self._undo_all())
        while not undoing.done():
            with suppress(asyncio.CancelledError):  # another cancellation does not stop it
                await asyncio.shield(undoing)
        failures = undoing.result()
        if failures:
            raise BaseExceptionGroup("what was done could not all be undone", [asked or problem, *failures])
        if asked is not None:
            raise asked
