"""`App`: where workflows and activities are registered, and where runs are started.

An app is a plain object; nothing is global. Calling a registered activity inside a workflow is durable; outside,
the coroutine that it returns only calls the function, async or not, so unit tests need nothing.
"""

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from inspect import iscoroutinefunction
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

from msgspec.structs import replace

from holdfast.activity import Activity, activity_options
from holdfast.app_plans import AppPlans
from holdfast.app_schedules import AppSchedules, ScheduleOptions
from holdfast.clock import Ids, Rng, SystemIds, SystemRng
from holdfast.core.attributes import declared_types
from holdfast.core.bus import Sink, SinkKind
from holdfast.core.dead_letters import DeadLetter, Reason
from holdfast.core.debounce import Debounce
from holdfast.core.events import ArtifactRef
from holdfast.core.index_rows import Wait
from holdfast.core.keys import check_name, check_signal_name, require_step_name
from holdfast.core.messages import AcceptedSignalResult
from holdfast.core.plans import is_plan
from holdfast.core.timing import Retry
from holdfast.engine.activities.secrets import open_provider
from holdfast.engine.inbox.authorization import Authoriser
from holdfast.engine.inbox.dead_letters import DeadLetterHandle
from holdfast.engine.inbox.signals import FirstSignal, Outgoing, result_of
from holdfast.engine.inbox.tasks import Tasks
from holdfast.engine.node import Node, logger
from holdfast.engine.observe.logs import describe_store, describe_work, logger_of
from holdfast.engine.observe.metrics import observed
from holdfast.engine.options import NodeOptions
from holdfast.engine.plan_sources import PlanSources
from holdfast.engine.retention import Retention
from holdfast.engine.schedules import instant_of
from holdfast.engine.start.admission import Dequeued
from holdfast.engine.start.runtime import OpenRuntimes, Runtime, StartOptions
from holdfast.errors import CallerError, InvalidInput
from holdfast.limits import Limits
from holdfast.lock import LOCK_PREFIX, Lock, hold, limit_key
from holdfast.program.activity_limits import ActivityLimit, limited_calls
from holdfast.program.coroutine import current_program, refuse_inside
from holdfast.program.definitions import (
    NO_TIMEOUTS,
    PLAIN_CALL,
    RUN_TIMEOUTS,
    ActivityDefinition,
    ActivityOptions,
    ExternalWorkflow,
    LimitOptions,
    OnError,
    WorkflowDefinition,
    WorkflowLimit,
    call_options,
    error_policy,
    milliseconds,
    run_timeouts,
)
from holdfast.program.flow.definition import FlowDefinition
from holdfast.program.flow.steps import Step
from holdfast.program.middleware import ActivityCall, ClientCall, Middleware, MiddlewareKind, WorkflowCall
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
from holdfast.store.queries import DeadLetterQuery
from holdfast.store.types import ReusePolicy
from holdfast.store.validation import check_node_name, check_ownership
from holdfast.termination import termination_signal
from holdfast.workflow import Flow, Workflow

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
W = TypeVar("W")


Failures = type[Exception] | tuple[type[Exception], ...]
"""Exceptions that fail a run."""
ProjectionFunction = TypeVar("ProjectionFunction", bound=Callable[[list[dict[str, Any]]], Any])

LIFE_DIGITS = 12
"""How many characters of a new id distinguish one life of a node from others of the same name."""


def _sink(**given: Any) -> Sink:
    fields: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        return Sink(**fields)
    except TypeError as problem:
        raise InvalidInput(f"a sink has no such option: {problem}", field="options") from None


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
        self.plans = AppPlans(self.registry, self.runtime)
        """The plans that can be run: documents instead of code."""
        self.schedules = AppSchedules(name, self.registry, self._known, self.runtime)
        """Its schedules, while a node is open."""
        self.runtimes = OpenRuntimes()
        """The runtimes of the nodes and connections that are open."""

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

    def lock(self, name: str, *, at_once: int = 1, rate: tuple[int, timedelta] | None = None) -> Lock:
        """Declare a lock between runs: `async with accounts("17"):` lets one run at a time go on there, by key.

        With `at_once` so many hold a key together. A `rate` of (10, timedelta(seconds=1)) lets so many enter in that
        time, all keys together. Apps on the same store that declare the same name share the lock. It
        is freed when its holder leaves the block or ends, however that ends. Runs of the workflow `lock:NAME` show who
        has it and who waits (docs/locks.md).
        """
        if type(at_once) is not int or at_once < 1:
            raise InvalidInput(f"at_once is a whole number from 1, not {at_once!r}", field="at_once")
        limits = LimitOptions(per_key=at_once, key=limit_key)
        if rate is not None:
            limits["rate"] = rate
        return Lock(name, self.workflow(name=f"{LOCK_PREFIX}{name}", **limits)(hold))

    @overload
    def external_workflow(self, workflow: str, /, *, version: str = "1") -> Workflow[..., Any]: ...
    @overload
    def external_workflow(
        self, workflow: Callable[P, Coroutine[Any, Any, R]], /, *, name: str | None = None, version: str = "1"
    ) -> Workflow[P, R]: ...

    def external_workflow(self, workflow: Any, /, *, name: str | None = None, version: str = "1") -> Any:
        """Return a workflow of another app on the same store, to run it as a child or to start it.

        By its name it takes arguments by name. Given an async function without a body, which has the same parameters
        and result, calls are checked and typed. This process needs none of its code, and never runs it; its approval
        and its limits hold. A child waits until a node has that version.
        """
        _check_version(version)
        definition = ExternalWorkflow(workflow, name, version, self.registry.values)
        require_step_name("a workflow's name", definition.name)
        if is_plan(definition.name):
            raise InvalidInput("a plan is run by hf.plan, and started by a PlanRef", field="name")
        definition.attributes = self.registry.attributes
        return Workflow(self.registry.workflows.get((definition.name, version), definition))

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
        limit: ActivityLimit | None = None,
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
        limit: ActivityLimit | None = None,
        **options: Any,
    ) -> Any:
        """Register a function as an activity. Use as `@app.activity` or `@app.activity(retry=…, timeout=…)`.

        `idempotency_key` computes the key of a call from arguments, by their names. A call with a key is reconciled:
        before it is dispatched again, `verify`, a function of the same arguments, is asked whether it has happened. It
        returns `NotCompleted`, `Completed`, `CompletedWithoutResult` or `Indeterminate`, within `verify_timeout`.
        One that raises or takes too long is asked again as `verify_retry` says, before an operator is asked.
        `raises` are exceptions that a workflow can catch around a call by their own classes: what it gets is both an
        `ActivityFailed` and that. `retry_if`, a plain function of the exception, returns whether it is retried at all.
        With `cancel="wait"` in `options` a cancellation waits for the outcome of a call that is under way.
        `limit` bounds how many calls are under way, and how often they begin, over all nodes: see `ActivityLimit`.
        """
        call = call_options(PLAIN_CALL, options)

        def register(function: Callable[P, Any]) -> Activity[P, Any]:
            chosen = function.__name__ if name is None else name
            definition = ActivityDefinition(
                function,
                chosen,
                activity_options(ActivityOptions(), **options),
                idempotency_key,
                verify,
                milliseconds(verify_timeout),
                verify_retry,
                self.registry.values,
                raises,
                retry_if,
            )
            require_step_name("an activity's name", definition.name)
            definition.limited = limited_calls(limit, definition)
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

    @overload
    def middleware(
        self, kind: Literal["workflow"], /
    ) -> Callable[[Middleware[WorkflowCall]], Middleware[WorkflowCall]]: ...
    @overload
    def middleware(
        self, kind: Literal["activity"], /
    ) -> Callable[[Middleware[ActivityCall]], Middleware[ActivityCall]]: ...
    @overload
    def middleware(self, kind: Literal["client"], /) -> Callable[[Middleware[ClientCall]], Middleware[ClientCall]]: ...

    def middleware(self, kind: MiddlewareKind, /) -> Callable[[Any], Any]:
        """Register an async function around every `workflow`, every attempt of an `activity`, or what a `client` asks.

        It gets the call and `call_next`, and returns what `await call_next(call)` returns, or something else. The one
        that is registered first is the outermost. See docs/middleware.md.
        """
        registered = self.registry.middleware.of(kind)

        def register(function: Any) -> Any:
            if not iscoroutinefunction(function) and not iscoroutinefunction(type(function).__call__):
                raise InvalidInput("middleware is an async function of the call and call_next", field="function")
            registered.append(function)
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
            self.registry.add_schedule(self.schedules.declared(workflow, cron, schedule_id, **rest))
            return workflow

        if "workflow" in options:
            declare(options["workflow"])
        return declare

    def run(self, run_id: str | None = None) -> RunHandle[Any]:
        """Return the handle of a run that is there already. Inside a workflow it can be signalled, durably.

        There, without an id, it is the run itself.
        """
        program = current_program()
        if program is not None:
            return run_from_inside(run_id or program.run_id)
        if self.runtimes.current() is None or run_id is None:
            raise InvalidInput("no node is open: look at runs inside `async with app.node(...)`, by their id")
        return RunHandle(self.runtime(), run_id)

    async def signal_many(self, signals: Sequence[Outgoing]) -> list[AcceptedSignalResult | CallerError]:
        """Send signals, each a dict of run_id, name and what else `RunHandle.signal` takes.

        Each is answered by itself, in order: with its result, or with the error that refuses it.
        """
        if self.runtimes.current() is None or current_program() is not None:
            raise InvalidInput("no node is open: send signals inside `async with app.node(...)`, outside of workflows")
        return await self.runtime().signal_many(signals)

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

    async def heartbeat_activity(self, token: str) -> None:
        """Report that who answers a callback is still at it: its `heartbeat_timeout` begins anew.

        Too late, or a callback without such a time-out: `Conflict`.
        """
        await self.runtime().heartbeat_activity(token)

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

    def _known(self, workflow: Any, version: str | None = None) -> WorkflowDefinition:
        """Return a workflow of this app; with a version, that one of it."""
        if not isinstance(workflow, Workflow):
            name = getattr(workflow, "__qualname__", repr(workflow))
            raise InvalidInput(f"{name} is not a workflow: register the function with @app.workflow, and start that")
        definition = workflow.definition
        if definition.is_external:
            if version not in (None, definition.version):
                what = f"{definition.name!r} is version {definition.version!r} of another app's workflow"
                raise InvalidInput(f"{what}: name the version in external_workflow", field="workflow_version")
            return definition
        if self.registry.workflows.get((definition.name, definition.version)) is not definition:
            raise InvalidInput(
                f"workflow {definition.name!r} belongs to another app than {self.name!r}; start it there"
            )
        if version is not None:
            if (problem := check_name("workflow_version", version)) is not None:
                raise problem
            return self.registry.workflow(definition.name, version)
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
            self.runtimes.add(runtime)
            try:
                yield node
            finally:
                self.runtimes.remove(runtime)
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
        async with self.node(store, options=NodeOptions(takes_runs=False, relays=False, sample_s=None)):
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
        execution_timeout: timedelta | float | None = None,
        run_timeout: timedelta | float | None = None,
        cleanup_timeout: timedelta | float | None = None,
        context: Mapping[str, str] | None = None,
        connection: Any = None,
        reuse: ReusePolicy | None = None,
        debounce: Debounce | None = None,
        **kwargs: Any,
    ) -> RunHandle[R]:
        """Start a run with these arguments. The same request again gives the run that is there.

        So it does after a deployment: only with `workflow_version`, of one that is here, is that a part of the request.
        `tenant`, `project` and `environment` are its owner; a request is the same only within them. If the workflow has
        limits, the run may be queued, fairly between tenants and by `priority` (higher first), or be `Overloaded`.
        `with_signal`, a dict of name, payload and signal_id, is in its mailbox from the start, or is sent to the run
        that is there. By `reference_key`, `reference_parts` and declared `attributes` runs are found (docs/search.md).
        With `at`, a datetime with a time zone, or `after`, it is PENDING until then. `execution_timeout` bounds the
        whole run, `run_timeout` a stretch: it cleans up for `cleanup_timeout`, and fails with `RunTimedOut`.
        `reuse` and `debounce` (docs/starting.md) say what becomes of an id that is taken, or of many starts of a key.
        `context` are texts for all that follows (docs/middleware.md); `connection`: see docs/transactions.md.
        """
        refuse_inside("start", "call the workflow to run it as a child, or hf.start to start it on its own")
        runtime, definition = self.runtime(), self._known(workflow, workflow_version)
        bounds = (execution_timeout, run_timeout, cleanup_timeout)
        options = StartOptions(  # by position: see `runtime_snapshot`
            request_id,
            run_id,
            tenant,
            project,
            environment,
            reference_key,
            tags,
            priority,
            with_signal,
            workflow_version is not None or definition.is_external,
            reference_parts or {},
            attributes or {},
            None if at is None else instant_of("at", at),
            None if after is None else milliseconds(after),
            None if bounds == NO_TIMEOUTS else run_timeouts(*bounds),
            reuse,
            context or {},
            debounce,
        )
        if not _START_OPTIONS.isdisjoint(definition.signature.names):
            _refuse_ambiguous(definition, options, connection)
        packed = definition.signature.pack(args, kwargs)
        started = await runtime.start(definition, packed, options, connection=connection)
        for delivered in started.signals:
            result_of(delivered)
        started_as = self.registry.workflows.get((definition.name, started.workflow_version))
        return RunHandle(runtime, started.run_id, started_as, None, started.is_reused, connection is None)

    def runtime(self) -> Runtime:
        """Return the runtime of the node that is open: every verb, by definition and for a caller. For services."""
        runtime = self.runtimes.current()
        if runtime is None:
            raise InvalidInput("no node is open: use `async with app.node(...)` or `app.connect(...)`")
        return runtime


_OTHER_OPTIONS = {"after", "connection", "workflow_version", *RUN_TIMEOUTS}
_START_OPTIONS = frozenset({*StartOptions.__struct_fields__, *_OTHER_OPTIONS} - {"timeouts"})
_PLAIN_START = StartOptions()


def _refuse_ambiguous(definition: WorkflowDefinition, options: StartOptions, connection: Any) -> None:
    """Raise if an option was given that could be meant as an argument: the workflow has a parameter of that name."""
    fields = {"after": "after_ms", "workflow_version": "names_version", **dict.fromkeys(RUN_TIMEOUTS, "timeouts")}
    for name in _START_OPTIONS.intersection(definition.signature.names):
        field = fields.get(name, name)
        given = connection if name == "connection" else getattr(options, field)
        if given != getattr(_PLAIN_START, field, None):
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
