"""`App`: where workflows and activities are registered, and where runs are started.

An app is a plain object; nothing is global. Calling a registered activity inside a workflow is durable; outside,
the coroutine that it returns only calls the function, async or not, so unit tests need nothing.
"""

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import update_wrapper
from types import FrameType
from typing import Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from msgspec.structs import replace

from holdfast.clock import Ids, Rng, SystemIds, SystemRng
from holdfast.core.attributes import declared_types
from holdfast.core.bus import Sink, SinkKind
from holdfast.core.dead_letters import DeadLetter, Reason
from holdfast.core.events import ArtifactRef
from holdfast.core.graph import Graph
from holdfast.core.index_rows import Wait
from holdfast.core.keys import check_name, check_signal_name, require_step_name
from holdfast.core.messages import AcceptedSignalResult
from holdfast.core.plans import PlanRef, RegisteredPlan, is_plan
from holdfast.core.schedules import Overlap, Schedule, check_schedule
from holdfast.core.timing import Retry
from holdfast.engine.activities.secrets import open_provider
from holdfast.engine.activities.slots import DaemonExecutor
from holdfast.engine.inbox.authorization import Authoriser
from holdfast.engine.inbox.dead_letters import DeadLetterHandle
from holdfast.engine.inbox.signals import FirstSignal, Outgoing, result_of
from holdfast.engine.inbox.tasks import Tasks
from holdfast.engine.node import Node, logger
from holdfast.engine.observe.logs import describe_store, describe_work, logger_of
from holdfast.engine.observe.metrics import observed
from holdfast.engine.options import NodeOptions
from holdfast.engine.plan_sources import PlanSources
from holdfast.engine.plans import body_of
from holdfast.engine.retention import Retention
from holdfast.engine.schedules import Schedules, instant_of, spec_of
from holdfast.engine.start.admission import Dequeued
from holdfast.engine.start.runtime import Runtime, StartOptions
from holdfast.engine.ticks import check_calendar
from holdfast.errors import CallerError, InvalidInput, NotDurable
from holdfast.limits import SECRETS, Limits
from holdfast.program.coroutine import CoroutineProgram, current_program, refuse_inside
from holdfast.program.definitions import (
    PLAIN_CALL,
    PLAIN_CHILD,
    ActivityDefinition,
    ActivityOptions,
    CallOptions,
    CancelPolicy,
    ChildOptions,
    ClosePolicy,
    LimitOptions,
    OnError,
    StartRequest,
    WorkflowDefinition,
    WorkflowLimit,
    call_options,
    child_options,
    encode_options,
    error_policy,
    failure_policy,
    milliseconds,
)
from holdfast.program.flow.definition import FlowDefinition
from holdfast.program.flow.steps import Step
from holdfast.program.plan.definition import PlanDefinition, check_plan
from holdfast.program.plan.text import PlanProblem
from holdfast.program.secrets import Secret, SecretProvider
from holdfast.program.values import Converter, Values
from holdfast.registry import Registry, RunHook
from holdfast.run import RunHandle, run_from_inside
from holdfast.settings import Settings, load_settings
from holdfast.store import port
from holdfast.store.artifacts import Artifacts
from holdfast.store.decisions import LIFE
from holdfast.store.open import open_store
from holdfast.store.payloads import PayloadCodec, SealingStore, sealed
from holdfast.store.types import DeadLetterQuery, PlanQuery, ScheduleQuery
from holdfast.store.validation import check_node_name, check_ownership

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
W = TypeVar("W")

ENDING = (signal.SIGTERM, signal.SIGINT)

PlanDocument = dict[str, Any] | str | bytes
"""A plan: its text, the bytes of it, or a plain value."""

Failures = type[Exception] | tuple[type[Exception], ...]
"""Exceptions that fail a run."""
ProjectionFunction = TypeVar("ProjectionFunction", bound=Callable[[list[dict[str, Any]]], Any])

LIFE_DIGITS = 12
"""How many characters of a new id distinguish one life of a node from others of the same name."""


class ChildCall(TypedDict, total=False):
    """How a child is called, and what it is started with."""

    name: str
    """What its step is called, instead of its workflow."""
    cancel: CancelPolicy
    """What a cancellation does while it is awaited: give it up at once, or cancel it and `wait` for its outcome."""
    close_policy: ClosePolicy
    """What becomes of it when its parent ends."""
    attributes: Mapping[str, Any]
    """Its search attributes."""
    run_id: str
    tags: tuple[str, ...]
    priority: int
    """The order in which it is admitted, if its workflow has limits."""
    retry: Retry | None
    """How often it is started again, as another child, when it has failed."""


class Workflow(Generic[P, R]):
    """A registered workflow. Start it with `App.start`; call it inside another workflow to run it as a child."""

    def __init__(self, definition: WorkflowDefinition, call: ChildOptions = PLAIN_CHILD) -> None:
        self.definition = definition
        self.call = call
        """How children are called."""
        update_wrapper(self, definition.function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run it as a child inside a workflow, and wait for it. Outside of one it raises `NotDurable`: see `plain`."""
        return self._program().run_child(self.definition, args, kwargs, self.call)

    def child(self, *args: P.args, **kwargs: P.kwargs) -> "ChildRun[R]":
        """Start it as a child inside a workflow, without waiting: await what this returns for the result."""
        run_id, waiting = self._program().start_child(self.definition, args, kwargs, self.call)
        return ChildRun(run_id, waiting)

    def _program(self) -> CoroutineProgram:
        program = current_program()
        if program is None:
            name = self.definition.name
            raise NotDurable(
                f"workflow {name!r} is called outside of a run, where nothing is durable: start it with "
                f"app.start({name}, …); a unit test calls {name}.plain(…)"
            )
        return program

    def plain(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the function itself, for unit tests: activities are only called, and nothing is recorded.

        What needs a run raises `NotDurable` there: sleeping, waiting for signals, children. For those there is
        `holdfast.testing.TestNode`.
        """
        refuse_inside("plain", "call the workflow to run it as a child")
        return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]

    def options(self, **call: Unpack[ChildCall]) -> "Workflow[P, R]":
        """Return the same workflow with other options for children.

        `close_policy` is what becomes of one when its parent ends; `attributes`, `tags`, `priority` and `run_id` are
        what it is started with, and `name` is what its step is called. With `retry` another child is started when it
        has failed. With `cancel="wait"` a cancellation of the parent while it waits for the child cancels the child,
        waits until it has ended, and only then goes on: what the child returns is not lost.
        """
        return Workflow(self.definition, child_options(self.call, {**call}))


class ChildRun(Generic[R]):
    """A child that was started without waiting for it. Await it for its result."""

    def __init__(self, run_id: str, waiting: "asyncio.Task[R]") -> None:
        self.run_id = run_id
        """Its id; with a retry policy, that of the first attempt."""
        self._waiting = waiting

    def __await__(self) -> Generator[Any, None, R]:
        return self._waiting.__await__()

    def done(self) -> bool:
        """Return whether its outcome is known."""
        return self._waiting.done()

    def cancel(self, reason: str = "") -> None:
        """Give it up: it is cancelled too, unless it is abandoned."""
        self._waiting.cancel(reason or None)

    async def signal(self, name: str, payload: Any = None, *, signal_id: str | None = None) -> None:
        """Send it a signal, with the turn."""
        await run_from_inside(self.run_id).signal(name, payload, signal_id=signal_id)

    async def update(self, name: str, /, *, update_id: str | None = None, **arguments: Any) -> Any:
        """Send it an update, and wait for its answer."""
        return await run_from_inside(self.run_id).update(name, update_id=update_id, **arguments)


class Flow(Workflow[[S], S], Generic[S]):
    """A registered flow: a workflow that is written as a tree of steps around a state. See `App.flow`."""

    definition: FlowDefinition

    def options(self, **call: Unpack[ChildCall]) -> "Flow[S]":
        """Return the same flow with other options for children: see `Workflow.options`."""
        return Flow(self.definition, child_options(self.call, {**call}))

    def graph(self) -> Graph:
        """Return the tree as it is drawn."""
        return self.definition.graph()

    def mermaid(self) -> str:
        """Return the tree as a flowchart of Mermaid."""
        return self.definition.graph().mermaid()


def _sink(**given: Any) -> Sink:
    fields: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        return Sink(**fields)
    except TypeError as problem:
        raise InvalidInput(f"a sink has no such option: {problem}", field="options") from None


class Activity(Generic[P, R]):
    """A registered activity."""

    def __init__(
        self,
        definition: ActivityDefinition,
        options: ActivityOptions | None = None,
        call: CallOptions = PLAIN_CALL,
    ) -> None:
        self.definition = definition
        self.call = call
        """How it is called: the name of the step, its idempotency key, what a cancellation does."""
        self.call_options = options or definition.options
        """The options of the calls made through it."""
        self._encoded_options = encode_options(self.call_options)
        update_wrapper(self, definition.function)

    def options(self, **changes: Any) -> "Activity[P, R]":
        """Return the same activity with other options for the calls made through it.

        Those of `@app.activity`, and of the call itself: `name` is what its step is called; `idempotency_key`, a text,
        is its key, whatever the definition computes. With `cancel="wait"` a cancellation while it is awaited waits for
        its outcome: a result is returned, and the code is cancelled where it waits next.
        """
        call = call_options(self.call, changes)
        return Activity(self.definition, _options(self.call_options, **changes), call)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run it as a durable step inside a workflow; outside one only call the function. Either is to be awaited."""
        program = current_program()
        if program is None:
            return self._plain(args, kwargs)
        return program.run_activity(
            self.definition, args, kwargs, self.call_options.queue, self._encoded_options, self.call
        )

    async def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        result = self.definition.function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result  # type: ignore[no-any-return]


class AppPlans:
    """The plans of an app's installation: documents that are run. See docs/plans.md."""

    def __init__(self, app: "App") -> None:
        self._app = app

    def validate(self, document: PlanDocument) -> list[PlanProblem]:
        """Return every problem of a plan, with its place: in the document, and with what is registered here."""
        return check_plan(body_of(document), self._app.registry)[1]

    async def register(self, document: PlanDocument, *, tenant: str = "default", uri: str = "") -> RegisteredPlan:
        """Keep a plan under its id and version, and return it as it is registered.

        The hash is over the exact bytes of a text. The same version with other bytes raises `Conflict`, and a plan that
        is wrong raises `PlanInvalid` with every problem.
        """
        return await self._app.runtime().plans.register(tenant, body_of(document), uri=uri)

    async def show(self, plan_id: str, version: str | None = None, *, tenant: str = "default") -> PlanDefinition:
        """Return a registered plan; without a version, the one that was registered last."""
        return (await self._app.runtime().plans.show(tenant, plan_id, version))[1]

    async def list(
        self,
        plan_id: str | None = None,
        *,
        tenant: str = "default",
        after: RegisteredPlan | None = None,
        limit: int = 100,
    ) -> Sequence[RegisteredPlan]:
        """Return registered versions, ordered by id and version, from after one that was returned before."""
        place = ("", "", "") if after is None else (after.tenant, after.plan_id, after.plan_version)
        return await self._app.runtime().plans.find(PlanQuery(tenant=tenant, plan_id=plan_id, after=place, limit=limit))

    async def start(
        self,
        plan: PlanDocument | PlanRef,
        inputs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RunHandle[Any]:
        """Start a run of a plan: of a registered one by its id, of one that a `PlanRef` names, or of a document.

        A document is a dict, bytes, or a text that has several lines or begins with `{`. `options` are those of
        `App.start`.
        """
        refuse_inside("plans.start", "call hf.plan to run it as a child")
        runtime = self._app.runtime()
        chosen = StartOptions(**options)
        chosen.check()
        uri = ""
        if isinstance(plan, str) and "\n" not in plan and not plan.lstrip().startswith("{"):
            plan = PlanRef(plan_id=plan)
        if isinstance(plan, PlanRef):
            definition, uri = await runtime.plans.resolve(chosen.tenant, plan)
        else:
            definition = await runtime.plans.put(chosen.tenant, body_of(plan))
        given = definition.check_inputs(dict(inputs or {}))
        started = await runtime.start(definition, self._app.registry.values.encode(given), chosen, uri=uri)
        for delivered in started.signals:
            result_of(delivered)
        return RunHandle(runtime, started.run_id)


class SchedulePlace(TypedDict, total=False):
    """Whose a schedule is; `default` where it is left out."""

    tenant: str
    project: str
    environment: str


class ScheduleOptions(SchedulePlace, total=False):
    """When a schedule starts runs, of what, and with what."""

    workflow: "Workflow[..., Any] | str"
    """A workflow or flow, its name, or `plan:ID` for a registered plan."""
    input: Mapping[str, Any]
    """The arguments of the workflow by name, or the inputs of the plan."""
    every: timedelta
    at: datetime
    tz: str
    start_at: datetime
    end_at: datetime
    overlap: Overlap
    """While an earlier run is not finished: `skip` (the default), `queue`, `cancel-running` or `allow`."""
    jitter: timedelta
    """Each tick is put off by up to this, always by the same for the same tick."""
    catch_up: timedelta
    """Ticks that no node could fire for longer than this are missed: a day, unless you say otherwise."""
    workflow_version: str
    reference_key: str
    tags: tuple[str, ...]
    priority: int


class AppSchedules:
    """The schedules of an app, at run time. Each belongs to a tenant, project and environment."""

    def __init__(self, app: "App") -> None:
        self._app = app

    async def create(self, schedule_id: str, cron: str = "", **options: Unpack[ScheduleOptions]) -> Schedule:
        """Make a schedule. The options are those of `App.schedule`; `workflow` is needed."""
        given: dict[str, Any] = {**options}
        workflow = given.pop("workflow", None)
        if workflow is None:
            raise InvalidInput("a schedule starts a workflow: name it", field="workflow")
        return await self._schedules.create(self._app.scheduled(workflow, cron, schedule_id, **given))

    async def get(
        self, schedule_id: str, *, tenant: str = "default", project: str = "default", environment: str = "default"
    ) -> Schedule:
        """Return a schedule."""
        return await self._schedules.get((tenant, project, environment, schedule_id))

    async def pause(self, schedule_id: str, note: str = "", **place: Unpack[SchedulePlace]) -> Schedule:
        """Fire no ticks until it is resumed; those of the meantime are not run."""
        return await self._schedules.pause(_place(schedule_id, place), note)

    async def resume(self, schedule_id: str, note: str = "", **place: Unpack[SchedulePlace]) -> Schedule:
        """Fire the ticks from now on."""
        return await self._schedules.resume(_place(schedule_id, place), note)

    async def trigger(
        self, schedule_id: str, *, request_id: str = "", **place: Unpack[SchedulePlace]
    ) -> RunHandle[Any]:
        """Start a run of it now, beside its ticks and whatever runs."""
        run_id = await self._schedules.trigger(_place(schedule_id, place), request_id)
        return RunHandle(self._app.runtime(), run_id)

    async def backfill(
        self,
        schedule_id: str,
        since: datetime,
        until: datetime,
        *,
        overlap: Overlap = "queue",
        **place: Unpack[SchedulePlace],
    ) -> int:
        """Run the ticks of a period that is over; return how many there are. What has run already is not run again."""
        period = (instant_of("since", since), instant_of("until", until))
        return await self._schedules.backfill(_place(schedule_id, place), *period, overlap)

    async def delete(self, schedule_id: str, **place: Unpack[SchedulePlace]) -> None:
        """Delete a schedule. Its runs go on. One that is declared in code is made again by the next node that opens."""
        await self._schedules.delete(_place(schedule_id, place))

    def next_ticks(self, schedule: Schedule, count: int = 5) -> list[datetime]:
        """Return when the next ticks are due; none while it is paused."""
        ticks = self._schedules.next_ticks(schedule, count)
        return [datetime.fromtimestamp(tick / 1_000_000, UTC) for tick in ticks]

    @property
    def _schedules(self) -> Schedules:
        return self._app.runtime().schedules

    async def list(self, *, tenant: str | None = None, workflow: str | None = None) -> list[Schedule]:
        """Return the schedules of this app, by tenant, project, environment and id."""
        query = ScheduleQuery(app=self._app.name, tenant=tenant, workflow=workflow)
        found: Sequence[Schedule] = ()
        while page := await self._app.runtime().store.find(query):
            found = [*found, *page]
            query = replace(query, after=page[-1].place)
        return [*found]


def _place(schedule_id: str, place: "SchedulePlace") -> tuple[str, str, str, str]:
    tenant, project = place.get("tenant", "default"), place.get("project", "default")
    return (tenant, project, place.get("environment", "default"), schedule_id)


class RegistersWorkflow(Protocol):
    """What `@app.workflow(...)` gives: a decorator that keeps the types of what it decorates."""

    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Workflow[P, R]: ...


class RegistersActivity(Protocol):
    """What `@app.activity(...)` gives: a decorator that keeps the types of what it decorates."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Activity[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> Activity[P, R]: ...


class App:
    """A set of workflows and activities, and the node that runs them."""

    def __init__(
        self,
        name: str,
        *,
        limits: Limits | None = None,
        ids: Ids | None = None,
        rng: Rng | None = None,
        authoriser: Authoriser | None = None,
        allow_cross_tenant_signals: bool = False,
        codecs: Sequence[PayloadCodec] = (),
        artifacts: Artifacts | None = None,
        converters: Sequence[Converter[Any]] = (),
        secrets: SecretProvider | str | None = None,
        plan_sources: Sequence[str] | PlanSources = (),
        attributes: Mapping[str, Any] | None = None,
        retention: Retention | None = None,
        on_error: OnError = "pause",
    ) -> None:
        """`codecs` seal what goes to the store, such as `Encryption`; without them, those that the settings name.

        `artifacts` is where artifacts and large values are kept; without it, what the settings name.
        `allow_cross_tenant_signals` lets workflows signal runs of other tenants, projects and environments.
        `converters` store values of types of your own: see docs/types.md.
        `secrets` is where the values of secrets come from, a provider or the address of one; otherwise the settings.
        `plan_sources` are prefixes of addresses from which plans may be fetched, such as `https://plans.example.com/`.
        `attributes` are the types of the search attributes of runs, by name: see docs/search.md.
        `retention` is how long what is over is kept; without it, what the settings say, and otherwise for ever.
        `on_error` is what an exception does that a workflow does not handle, where the workflow does not say: `pause`
        the run until the code is mended, or `fail` it. See docs/workflows.md.
        """
        self.name = name
        self.on_error = error_policy(on_error)
        """What an exception does that a workflow does not handle, unless the workflow says otherwise."""
        self.logger = logger_of(name)
        """The app's log. Its records carry the run and the step; it is silent while a history is replayed."""
        self._given_limits = limits
        self.codecs = tuple(codecs)
        """What seals payloads on their way to the store, in this order."""
        self.artifacts = artifacts
        """Where artifacts and large values are kept, unless it is what the settings name."""
        self.retention = retention
        """How long what is over is kept, unless it is what the settings say."""
        self._ids = ids or SystemIds()
        self._rng = rng or SystemRng()
        self.authoriser = authoriser
        """Decides what may be asked of runs, for nodes that are opened from now on; None permits everything."""
        self.registry = Registry(
            limits, allow_cross_tenant_signals=allow_cross_tenant_signals, values=Values(converters)
        )
        """The workflows, activities and limits of this app."""
        self.registry.attributes = declared_types(attributes or {})
        self.registry.secrets = None if secrets is None else open_provider(secrets)
        self._plan_sources = plan_sources if isinstance(plan_sources, PlanSources) else PlanSources(plan_sources)
        self.plans = AppPlans(self)
        self.schedules = AppSchedules(self)
        """Its schedules, while a node is open."""
        """The plans that can be run: documents instead of code."""
        self._runtime: Runtime | None = None

    # --- registering

    @overload
    def workflow(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Workflow[P, R]: ...
    @overload
    def workflow(
        self,
        *,
        name: str | None = None,
        version: str = "1",
        signals: Mapping[str, Any] | None = None,
        allow_other_signals: bool = False,
        failures: Failures = (),
        on_error: OnError | None = None,
        requires_approval: bool = False,
        entity: bool = False,
        **limits: Unpack[LimitOptions],
    ) -> RegistersWorkflow: ...

    def workflow(
        self,
        function: Any = None,
        *,
        name: str | None = None,
        version: str = "1",
        signals: Mapping[str, Any] | None = None,
        allow_other_signals: bool = False,
        failures: Failures = (),
        on_error: OnError | None = None,
        requires_approval: bool = False,
        entity: bool = False,
        **limits: Unpack[LimitOptions],
    ) -> Any:
        """Register an async function as a workflow. Use as `@app.workflow` or `@app.workflow(version="2")`.

        `signals` declares the types of signals by name: a signal that does not fit is refused before it is stored, and
        so is one of another name, unless `allow_other_signals`; then its sender gets a warning.
        `failures` are exceptions that fail a run, beside `WorkflowFailed` and what steps and waits raise. Any other one
        that the code does not handle pauses the run until the code is mended; with `on_error="fail"` it fails the run.
        With `requires_approval` a run does not start before an operator has approved it (`RunHandle.approve`).
        An `entity` lives on signals: its runs take more than `Limits.signals_per_run_per_minute`, without a bound.
        `limits` (at_once, per_key, key, rate, overload) bound its runs, of all versions: the last one's hold.
        """
        for signal_name in signals or ():
            check_signal_name(signal_name)
        _check_version(version)

        def register(function: Callable[P, Coroutine[Any, Any, R]]) -> Workflow[P, R]:
            definition = WorkflowDefinition(
                function,
                function.__name__ if name is None else name,
                version,
                signals,
                allows_other_signals=allow_other_signals,
                values=self.registry.values,
                failures=failures,
                on_error=self.on_error if on_error is None else on_error,
                requires_approval=requires_approval,
                is_entity=entity,
            )
            require_step_name("a workflow's name", definition.name)
            self.registry.add_workflow(definition, WorkflowLimit(limits, definition.signature) if limits else None)
            return Workflow(definition)

        return register if function is None else register(function)

    def flow(
        self,
        name: str,
        state: type[S],
        root: Step[S],
        *,
        version: str = "1",
        doc: str = "",
        allow_other_signals: bool = False,
        failures: Failures = (),
        on_error: OnError | None = None,
        requires_approval: bool = False,
        entity: bool = False,
        **limits: Unpack[LimitOptions],
    ) -> Flow[S]:
        """Register a flow: a tree of steps around a state of this type (a dataclass, a Struct, a model of pydantic).

        It is started with the state, and its result is the last one. The signals in the tree are declared with it.
        `doc` says what it is for. The other arguments are those of `workflow`; `key` is a function of `state`.
        """
        require_step_name("a flow's name", name)
        _check_version(version)
        definition = FlowDefinition(
            name,
            state,
            root,
            version,
            doc=doc,
            allows_other_signals=allow_other_signals,
            values=self.registry.values,
            failures=failures,
            on_error=self.on_error if on_error is None else on_error,
            requires_approval=requires_approval,
            is_entity=entity,
        )
        self.registry.add_workflow(definition, WorkflowLimit(limits, definition.signature) if limits else None)
        return Flow(definition)

    @overload
    def activity(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Activity[P, R]: ...
    @overload
    def activity(self, function: Callable[P, R], /) -> Activity[P, R]: ...
    @overload
    def activity(
        self,
        *,
        name: str | None = None,
        idempotency_key: Callable[..., str] | None = None,
        verify: Callable[..., Any] | None = None,
        verify_timeout: timedelta | float | None = None,
        verify_retry: Retry | None = None,
        raises: Failures = (),
        retry_if: Callable[[Exception], bool] | None = None,
        **options: Any,
    ) -> RegistersActivity: ...

    def activity(
        self,
        function: Any = None,
        *,
        name: str | None = None,
        idempotency_key: Callable[..., str] | None = None,
        verify: Callable[..., Any] | None = None,
        verify_timeout: timedelta | float | None = None,
        verify_retry: Retry | None = None,
        raises: Failures = (),
        retry_if: Callable[[Exception], bool] | None = None,
        **options: Any,
    ) -> Any:
        """Register a function as an activity. Use as `@app.activity` or `@app.activity(retry=…, timeout=…)`.

        `idempotency_key` computes the key of a call from arguments, by their names. A call with a key is reconciled:
        before it is dispatched again, `verify`, a function of the same arguments, is asked whether it has happened. It
        returns `NotCompleted`, `Completed`, `CompletedWithoutResult` or `Indeterminate`, within `verify_timeout`.
        One that raises or takes too long is asked again as `verify_retry` says, before an operator is asked.
        `raises` are exceptions that a workflow can catch around a call by their own classes: what it gets is both an
        `ActivityFailed` and that. `retry_if`, a plain function of the exception, says whether it is tried again at all.
        With `cancel="wait"` in `options` a cancellation waits for the outcome of a call that is under way.
        """
        call = call_options(PLAIN_CALL, options)

        def register(function: Callable[P, Any]) -> Activity[P, Any]:
            chosen = function.__name__ if name is None else name
            definition = ActivityDefinition(
                function,
                chosen,
                _options(ActivityOptions(), **options),
                idempotency_key,
                verify,
                milliseconds(verify_timeout),
                verify_retry,
                self.registry.values,
                raises,
                retry_if,
            )
            require_step_name("an activity's name", definition.name)
            self.registry.add_activity(definition)
            return Activity(definition, None, call)

        return register if function is None else register(function)

    def sink(self, name: str, address: str, *, secret: Secret | str = "", **options: Any) -> Sink:
        """Declare a sink of the event bus: where events of runs go. Nodes of this app store it when they start.

        `address` is the URL of a webhook, `nats://host:4222/SUBJECT`, or `redis://host:6379/STREAM`. `secret` is what a
        webhook is signed with, or the password of a broker. Other options are the fields of `Sink`.
        """
        kinds: dict[str, SinkKind] = {"http": "webhook", "nats": "nats", "tls": "nats", "redis": "redis"}
        scheme = str(address).partition("://")[0]
        kind = kinds.get(scheme if scheme in kinds else scheme.removesuffix("s"))
        if kind is None:
            raise InvalidInput("the address of a sink begins with https://, nats:// or redis://", field="address")
        reference = secret.name if isinstance(secret, Secret) else secret
        sink = _sink(name=name, kind=kind, address=address, secret=reference, **options)
        self.registry.add_sink(sink)
        return sink

    def projection(self, name: str, **options: Any) -> Callable[[ProjectionFunction], ProjectionFunction]:
        """Register a function that gets the events of runs, as CloudEvents, in order for each run.

        What it has not got yet is kept in the store: after a crash it goes on there. It may get an event twice, with
        the same id. It is called on one node at a time, with events of one run, and may be async; what raises is
        retried. Options are the fields of `Sink`.
        """

        def register(function: ProjectionFunction) -> ProjectionFunction:
            self.registry.add_sink(_sink(name=name, kind="projection", **options), function)
            return function

        return register

    def on_failed(self, hook: RunHook) -> RunHook:
        """Register a function that is called with the id of a run that has failed, and why. It may be async.

        The node that has committed the failure calls it, once, and not again if it is lost meanwhile: what must not be
        missed is a projection. What it raises is logged.
        """
        self.registry.on_failed.append(hook)
        return hook

    def on_paused(self, hook: RunHook) -> RunHook:
        """Register a function that is called with the id of a run that is paused, and why. See `on_failed`."""
        self.registry.on_paused.append(hook)
        return hook

    def schedule(
        self, cron: str = "", *, schedule_id: str | None = None, **options: Unpack[ScheduleOptions]
    ) -> Callable[[W], W]:
        """Declare a schedule, as a decorator of a workflow or with `workflow=`.

        `@app.schedule("0 9 * * MON-FRI", tz="Europe/Sofia")`, or with `every=` a timedelta, or once `at=` a datetime.
        It is stored when a node opens, under `schedule_id` or the workflow's name. What operators did to it stays when
        the code is deployed again: see docs/schedules.md.
        """

        def declare(workflow: W) -> W:
            rest: dict[str, Any] = {key: value for key, value in options.items() if key != "workflow"}
            self.registry.add_schedule(self.scheduled(workflow, cron, schedule_id, **rest))
            return workflow

        if "workflow" in options:
            declare(options["workflow"])
        return declare

    def scheduled(
        self,
        workflow: Any,
        cron: str,
        schedule_id: str | None = None,
        *,
        input: Mapping[str, Any] | None = None,
        tenant: str = "default",
        project: str = "default",
        environment: str = "default",
        workflow_version: str | None = None,
        reference_key: str | None = None,
        tags: tuple[str, ...] = (),
        priority: int = 0,
        **when: Any,
    ) -> Schedule:
        """Return a schedule of this app, as `schedule` declares it and `schedules.create` makes it."""
        name = workflow if isinstance(workflow, str) else self._known(workflow).name
        if is_plan(name):
            packed = self.registry.values.encode(dict(input or {}))
        else:
            packed = self.registry.workflow(name, workflow_version).signature.pack((), dict(input or {}))
        schedule = Schedule(
            schedule_id=schedule_id or name,
            app=self.name,
            workflow=name,
            workflow_version=workflow_version,
            input=packed,
            spec=spec_of(cron, **when),
            tenant=tenant,
            project=project,
            environment=environment,
            reference_key=reference_key,
            tags=tags,
            priority=priority,
        )
        if (problem := check_schedule(schedule)) is not None:
            raise problem
        check_calendar(schedule.spec)
        return schedule

    def run(self, run_id: str | None = None) -> RunHandle[Any]:
        """Return the handle of a run that is there already. Inside a workflow it can be signalled, durably.

        There, without an id, it is the run itself.
        """
        program = current_program()
        if program is not None:
            return run_from_inside(run_id or program.run_id)
        if self._runtime is None or run_id is None:
            raise InvalidInput("no node is open: look at runs inside `async with app.node(...)`, by their id")
        return RunHandle(self._runtime, run_id)

    async def signal_many(self, signals: Sequence[Outgoing]) -> list[AcceptedSignalResult | CallerError]:
        """Send signals, each a dict of run_id, name and what else `RunHandle.signal` takes.

        Each is answered by itself, in order: with its result, or with the error that refuses it.
        """
        if self._runtime is None or current_program() is not None:
            raise InvalidInput("no node is open: send signals inside `async with app.node(...)`, outside of workflows")
        return await self._runtime.signal_many(signals)

    def waits(self, *, run_id: str | None = None, name: str | None = None) -> AsyncIterator[Wait]:
        """Iterate over the open waits: of a run, for a signal's name, or all."""
        return self.runtime().waits(run_id, name)

    def signal_schemas(self, workflow: Workflow[..., Any]) -> dict[str, dict[str, Any]]:
        """Return the JSON Schema of each signal that the workflow declares, by its name."""
        definition = self._known(workflow)
        return {name: definition.values.schema(kind) for name, kind in definition.signals.items()}

    def open_artifact(self, artifact: ArtifactRef) -> AsyncIterator[bytes]:
        """Iterate over the bytes of an artifact, outside of workflows.

        A missing one raises `ArtifactMissing`. `ArtifactCorrupt` is raised at the end, if they are not what was stored.
        """
        return self.runtime().open_artifact(artifact)

    async def complete_activity(self, token: str, result: Any = None) -> None:
        """Report the result of an activity that ended by `complete_later`. When this returns it is durable.

        Each attempt takes one outcome, and the first stands: a second one gets `Conflict`, and so does one that comes
        after the step was closed by other means. The same outcome again is answered as the first time, so after an
        error of the store the call can be repeated. A token that is none: `InvalidInput`; a run that has finished:
        `RunTerminal`. A success counts even when it comes after the attempt's time, as long as the step is open.
        """
        await self.runtime().complete_activity(token, result)

    async def fail_activity(self, token: str, error: BaseException | str) -> None:
        """Report that such an activity has failed: it is tried again by its policy, unless it is `NonRetryable`.

        Answers like `complete_activity`; once the step has come to a later attempt, with `Conflict`.
        """
        await self.runtime().fail_activity(token, error)

    async def dead_letters(
        self,
        *,
        run_id: str | None = None,
        reason: Reason | None = None,
        settled: bool = False,
        after: DeadLetter | None = None,
        limit: int = 100,
    ) -> list[DeadLetterHandle]:
        """Return dead letters, the oldest first, from after one that was returned before."""
        start = (0, "") if after is None else (after.died_at, after.letter_id)
        query = DeadLetterQuery(run_id=run_id, reason=reason, settled=settled, after=start, limit=limit)
        return await self.runtime().dead_letters(query)

    async def dequeue_and_start(self) -> list[Dequeued]:
        """Admit queued runs, start them here if the node takes runs, and return what happened to each.

        Nodes call it when a run has finished, and periodically. Calling it at any other time is safe (QUE-3).
        """
        return await self.runtime().dequeue_and_start()

    def _known(self, workflow: Any) -> WorkflowDefinition:
        if not isinstance(workflow, Workflow):
            name = getattr(workflow, "__qualname__", repr(workflow))
            raise InvalidInput(f"{name} is not a workflow: register the function with @app.workflow, and start that")
        definition = workflow.definition
        if self.registry.workflows.get((definition.name, definition.version)) is not definition:
            raise InvalidInput(
                f"workflow {definition.name!r} belongs to another app than {self.name!r}; start it there"
            )
        return definition

    @property
    def tasks(self) -> Tasks:
        """The tasks that runs give to people, and what people can do with them."""
        return self.runtime().tasks()

    # --- running

    @asynccontextmanager
    async def node(
        self, store: str | port.Store | None = None, *, name: str | None = None, options: NodeOptions | None = None
    ) -> AsyncIterator[Node]:
        """Run this app's workflows while the context is open. The store: an address, a store, or `HOLDFAST_STORE`.

        A node that comes back under its name takes over what its former life held; without one it gets one of its own.
        The signals of the process are left alone: who ends the context decides when the node stops. See `serve`.
        """
        options = options or NodeOptions()
        if options.fail_open and name is None:
            raise InvalidInput("a node that fails open has a name, so that it finds its journal again", field="name")
        before = self._runtime
        async with self._open(store) as (unobserved, limits):
            check_ownership(unobserved, _settings(None, None).checkpoint_ownership)
            works = options.takes_runs or bool(options.queues)
            artifacts = self.artifacts or Artifacts.from_settings(_settings(None, None).artifacts)
            codecs = (*self.codecs, *(() if artifacts is None else artifacts.codecs))
            opened = await sealed(unobserved, codecs, takes_runs=works)
            if artifacts is not None and isinstance(opened, SealingStore):
                artifacts = artifacts.passed_through(opened.codecs)
            opened = observed(opened, options.write_latency_budget_ms)
            registry = self.registry.bounded(limits, options.turn_s)
            if registry.secrets is None and (address := _settings(None, None).secrets):
                registry.secrets = open_provider(address)
            if works and registry.secrets is None and (lacking := registry.activities_with_secrets()):
                logger.warning("there is no provider of secrets, and these activities need one: %s", ", ".join(lacking))
            node = Node(self._life_of(name), opened, registry, self._rng, options, limits)
            retention = self.retention or Retention.from_settings(_settings(None, None).retention)
            runtime = Runtime(
                *(opened, node, registry, self.authoriser, self._ids, artifacts, self._plan_sources, retention),
                rng=self._rng,
                app=self.name,
            )
            await runtime.open()
            self._runtime = runtime
            try:
                yield node
            finally:
                self._runtime = before
                await runtime.close()
        if node.failure is not None:
            raise node.failure

    def _life_of(self, name: str | None) -> str:
        """Return the name of a node with what distinguishes this life of it from others."""
        if name is not None and (problem := check_node_name(name)) is not None:
            raise problem
        name = name or f"{self.name}-{self._ids.new_id()}".replace(LIFE, "-")
        return f"{name}{LIFE}{self._ids.new_id()[-LIFE_DIGITS:]}"

    @asynccontextmanager
    async def _open(self, store: str | port.Store | None) -> AsyncIterator[tuple[port.Store, Limits]]:
        """Open a store, and close it again if it was not open before."""
        if store is not None and not isinstance(store, str):
            yield store, self._given_limits or Limits()
            return
        settings = _settings(store, self._given_limits)
        opened = await open_store(settings)
        try:
            yield opened, settings.limits
        finally:
            await opened.close()

    @asynccontextmanager
    async def connect(self, store: str | port.Store | None = None) -> AsyncIterator[None]:
        """Start runs, send to them and wait for them while the context is open, and leave the work to others' nodes."""
        async with self.node(store, options=NodeOptions(takes_runs=False, relays=False)):
            yield

    async def serve(
        self, store: str | port.Store | None = None, *, name: str | None = None, options: NodeOptions | None = None
    ) -> None:
        """Run a node until SIGTERM or SIGINT, then let it finish what is under way, for at most `drain_s`.

        A second signal ends the process at once. A node that comes back under its name takes over what its former life
        held. Works on the main thread only; an error of the node itself is raised.
        """
        with termination_signal() as asked:
            work = describe_work(self.registry.workflow_names(), options or NodeOptions())
            place = describe_store(_settings(store, None).store if store is None else store)  # before it is made
            async with self.node(store, name=name, options=options) as node:
                logger.info("node %s works on %s; store: %s", node.name, work, place)
                await node.run_until(asked)
                logger.info("node %s stops because of %s; a second signal ends it at once", node.name, asked.result())
            logger.info("node %s has stopped", node.name)

    async def start(
        self,
        workflow: Workflow[..., R],
        *args: Any,
        request_id: str | None = None,
        run_id: str | None = None,
        reference_key: str | None = None,
        tags: tuple[str, ...] = (),
        tenant: str = "default",
        project: str = "default",
        environment: str = "default",
        priority: int = 0,
        with_signal: FirstSignal | None = None,
        workflow_version: str | None = None,
        reference_parts: Mapping[str, str] | None = None,
        attributes: Mapping[str, Any] | None = None,
        at: datetime | None = None,
        after: timedelta | None = None,
        **kwargs: Any,
    ) -> RunHandle[R]:
        """Start a run with these arguments. The same request again gives the run that is there.

        So it does after a deployment: the run of the version that was started first. Only with `workflow_version`, for
        a version that is registered here, the version is a part of the request.
        `tenant`, `project` and `environment` are its owner; a request is the same only within them. If the workflow has
        limits, the run may be queued, fairly between tenants and by `priority` (higher first), or be `Overloaded`.
        `with_signal`, a dict of name, payload and signal_id, is in the run's mailbox from its beginning; if the run is
        there already, it is sent to it, in the same transaction, and raises why if it is refused.
        `reference_key` and `reference_parts` are what the business calls it, and `attributes` are of the types that the
        app declares: runs are found by them (docs/search.md).
        With `at`, a datetime with a time zone, or `after` a timedelta, the run is there at once and PENDING, can be
        cancelled, and starts then by the store's clock, never earlier.
        """
        refuse_inside("start", "call the workflow to run it as a child, or hf.start to start it on its own")
        runtime = self.runtime()  # it may be closed while this waits
        definition = self._known(workflow)
        if workflow_version is not None:
            if (problem := check_name("workflow_version", workflow_version)) is not None:
                raise problem
            definition = self.registry.workflow(definition.name, workflow_version)
        options = StartOptions(
            request_id=request_id,
            run_id=run_id,
            reference_key=reference_key,
            tags=tags,
            tenant=tenant,
            project=project,
            environment=environment,
            priority=priority,
            with_signal=with_signal,
            names_version=workflow_version is not None,
            reference_parts=reference_parts or {},
            attributes=attributes or {},
            at=None if at is None else instant_of("at", at),
            after_ms=None if after is None else milliseconds(after),
        )
        if not _START_OPTIONS.isdisjoint(definition.signature.names):
            _refuse_ambiguous(definition, options)
        started = await runtime.start(definition, definition.signature.pack(args, kwargs), options)
        for delivered in started.signals:
            result_of(delivered)
        started_as = self.registry.workflows.get((definition.name, started.workflow_version))
        return RunHandle(runtime, started.run_id, started_as)

    def is_open_with(self, runtime: Runtime) -> bool:
        """Return whether this runtime is still the one that is open."""
        return self._runtime is runtime

    def runtime(self) -> Runtime:
        """Return the runtime of the node that is open: every verb, by definition and for a caller. For services."""
        if self._runtime is None:
            raise InvalidInput("no node is open: use `async with app.node(...)` or `app.connect(...)`")
        return self._runtime


async def start(
    workflow: Workflow[..., R] | PlanRef | str,
    *args: Any,
    request_id: str | None = None,
    run_id: str | None = None,
    reference_key: str | None = None,
    tags: tuple[str, ...] = (),
    priority: int = 0,
    attributes: Mapping[str, Any] | None = None,
    workflow_version: str | None = None,
    **kwargs: Any,
) -> RunHandle[R]:
    """Start a run from inside a workflow that is no child: nothing waits for it, and it goes on when this one ends.

    A workflow or a flow, with its arguments; by its name with keyword arguments; or a plan, by a `PlanRef`, with its
    inputs. The run is of the same tenant, project and environment. It is started once, whatever crashes: by its
    `request_id`, as with `App.start`, or by the step. A start that is refused raises `StartRefused`.
    """
    program = current_program()
    if program is None:
        raise NotDurable("hf.start can only be used inside a workflow; outside of one call app.start")
    request = StartRequest(
        request_id=request_id or "",
        run_id=run_id,
        reference_key=reference_key,
        tags=tuple(tags),
        priority=priority,
        attributes=None if attributes is None else dict(attributes),
        version=workflow_version,
    )
    values = program.definition.values
    if isinstance(workflow, PlanRef):
        if len(args) > 1 or kwargs:
            raise InvalidInput("a plan is started with its inputs: hf.start(PlanRef(…), {…})", field="inputs")
        request = replace(request, plan=workflow, input=values.encode(dict(args[0]) if args else {}))
    elif isinstance(workflow, str):
        if args:
            problem = f"workflow {workflow!r} is started by its name: give its arguments by name too"
            raise InvalidInput(problem, field="args")
        require_step_name("workflow", workflow)
        request = replace(request, workflow=workflow, input=values.encode(kwargs))
    else:
        definition = workflow.definition
        request = replace(request, workflow=definition.name, input=definition.signature.pack(args, kwargs))
    return run_from_inside(await program.start_run(request))


@contextmanager
def termination_signal() -> Iterator["asyncio.Future[str]"]:
    """Yield a future that gets the name of the first SIGTERM or SIGINT. A second one ends the process at once.

    Nor does the end of the process wait for threads: those that `asyncio.to_thread` makes are daemons from now on.

    At once means even if the event loop is stuck: what was acknowledged is durable, and other nodes take over the rest
    when the lease has expired. Afterwards the former handlers are back. Only a process that is nothing but a node uses
    this; a node inside another program leaves the signals of the operating system alone.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InvalidInput("only the main thread receives SIGTERM: elsewhere use `async with app.node(...)`")
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[str] = loop.create_future()
    is_asked = False

    # Handlers of the interpreter and not of the loop: they are called while a callback of the loop does not return.
    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            os._exit(128 + number)
        is_asked = True
        loop.call_soon_threadsafe(asked.set_result, signal.Signals(number).name)

    loop.set_default_executor(DaemonExecutor())
    before = {ending: signal.signal(ending, ask) for ending in ENDING}
    try:
        yield asked
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler if handler is not None else signal.SIG_DFL)


_START_OPTIONS = frozenset({*StartOptions.__struct_fields__, "after", "workflow_version"})
_PLAIN_START = StartOptions()


def _refuse_ambiguous(definition: WorkflowDefinition, options: StartOptions) -> None:
    """Raise if an option was given that could be meant as an argument: the workflow has a parameter of that name."""
    fields = {"after": "after_ms", "workflow_version": "names_version"}
    for name in _START_OPTIONS.intersection(definition.signature.names):
        field = fields.get(name, name)
        if getattr(options, field) != getattr(_PLAIN_START, field):
            problem = (
                f"{name} is an option of start, and workflow {definition.name!r} has a parameter of that name: "
                "give the argument by position; to give the option, rename the parameter"
            )
            raise InvalidInput(problem, field=name)


def _check_version(version: str) -> None:
    problem = check_name("version", version)
    if problem is not None or "|" in version:
        raise problem or InvalidInput(f"version may not contain '|': {version!r}", field="version")


def _settings(address: str | None, limits: Limits | None) -> Settings:
    settings = load_settings(os.environ) if address is None else load_settings(os.environ, store=address)
    return settings if limits is None else replace(settings, limits=limits)


def _options(base: ActivityOptions, **changes: Any) -> ActivityOptions:
    """Return options with some of them changed; durations are given as timedeltas or seconds."""
    known: dict[str, Callable[[Any], dict[str, Any]]] = {
        "retry": lambda value: {"retry": _retry(value)},
        "queue": lambda value: {"queue": value},
        "timeout": lambda value: {"timeout_ms": milliseconds(value)},
        "schedule_to_close": lambda value: {"schedule_to_close_ms": milliseconds(value)},
        "heartbeat_timeout": lambda value: {"heartbeat_timeout_ms": milliseconds(value)},
        "on_failure": lambda value: {"on_failure": failure_policy(value)},
        "secrets": lambda value: {"secrets": _secrets(value)},
    }
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in known:
            raise InvalidInput(f"unknown activity option {name!r}; known are {', '.join(sorted(known))}")
        fields |= known[name](value)
    if fields.get("queue", "") != "":  # the empty one is none
        require_step_name("queue", fields["queue"])
    return replace(base, **fields)


def _secrets(value: Any) -> tuple[Secret, ...]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidInput(f'secrets is a list such as ["stripe/key"], not {value!r}', field="secrets")
    found = {each.name: each for each in (one if isinstance(one, Secret) else Secret(one) for one in value)}
    if len(found) > SECRETS:
        raise InvalidInput(f"an activity has {len(found)} secrets; the most is {SECRETS}", field="secrets")
    return tuple(found[name] for name in sorted(found))


def _retry(value: Any) -> Retry:
    if not isinstance(value, Retry):
        raise InvalidInput(f"retry is a Retry, such as Retry(max_attempts=5), not {value!r}", field="retry")
    return value
