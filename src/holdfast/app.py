"""`App`: where workflows and activities are registered, and where runs are started.

An app is a plain object; there is no global state. Inside a workflow, a call of a registered activity is a durable
step. Elsewhere it only calls the function, async or not, so unit tests need no setup.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from inspect import isclass, iscoroutinefunction
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
from holdfast.core.keys import (
    check_name,
    check_signal_name,
    require_step_name,
    require_workflow_name,
    workflow_of_lock,
)
from holdfast.core.messages import AcceptedSignalResult
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
from holdfast.engine.runtime import Runtime
from holdfast.engine.schedules import instant_of
from holdfast.engine.start.admission import Dequeued
from holdfast.engine.start.requests import StartOptions
from holdfast.errors import CallerError, InvalidInput
from holdfast.limits import Limits
from holdfast.lock import Lock, hold, limit_key
from holdfast.program.activity_limits import ActivityLimit, limited_calls
from holdfast.program.coroutine import current_program, refuse_inside
from holdfast.program.definitions import (
    NO_TIMEOUTS,
    PLAIN_CALL,
    PLAIN_CHILD,
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
from holdfast.program.values import Converter, Values, keywords_are_options, named
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
from holdfast.workflow import Flow, Workflow, refuse_child_options

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
W = TypeVar("W")


Failures = type[Exception] | tuple[type[Exception], ...]
"""Exceptions that fail a run."""
ProjectionFunction = TypeVar("ProjectionFunction", bound=Callable[[list[dict[str, Any]]], Any])

LIFE_DIGITS = 12
"""How many characters of a new id distinguish a process from others with the same node name."""


def _sink(**given: Any) -> Sink:
    fields: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        return Sink(**fields)
    except TypeError as problem:
        raise InvalidInput(f"a sink has no such option: {problem}", field="options") from None


class RegistersWorkflow(Protocol):
    """What `@app.workflow(...)` returns: a decorator that preserves the types of the decorated function."""

    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Workflow[P, R]: ...


class RegistersActivity(Protocol):
    """What `@app.activity(...)` returns: a decorator that preserves the types of the decorated function."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Activity[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> Activity[P, R]: ...


class App:
    """A set of workflows and activities. Open it with `node`, `connect` or `serve` to run them on a store."""

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
        """Options that are not given here come from the settings, if they have them.

        - `limits`: the limits of the installation.
        - `codecs`: they encode payloads on their way to the store, such as `Encryption`.
        - `artifacts`: where artifacts and large values are kept.
        - `secrets`: the source of the values of secrets, a provider or its address.
        - `retention`: how long finished data is kept. Without it, and without settings, nothing is deleted.
        - `attributes`: the types of search attributes, by name. See docs/search.md.
        - `converters`: how values of your own types are stored. See docs/types.md.
        - `plan_sources`: prefixes of addresses from which plans may be read, such as `https://plans.example.com/`.
        - `authoriser`: decides who may perform which operation on which run. See docs/access.md.
        - `allow_cross_tenant_signals`: workflows may signal runs of other tenants, projects and environments.
        - `on_error`: what an unhandled exception of a workflow does: `pause` the run until the code is fixed, or `fail`
          it.
        - `ids`, `rng`: replaced in tests.
        """
        given: list[Any] = [name, limits]
        if not isinstance(given[0], str) or not given[0]:
            raise InvalidInput(f"an app has a name, a string that is not empty, and not {name!r}", field="name")
        if limits is not None and not isinstance(given[1], Limits):
            raise InvalidInput(f"limits are an hf.Limits, not {limits!r}", field="limits")
        self.name = name
        self.on_error = error_policy(on_error)
        """The effect of an unhandled exception of a workflow, unless the workflow overrides it."""
        self.logger = logger_of(name)
        """The app's log. Its records carry the run and the step; it is silent while a history is replayed."""
        self._given_limits = limits
        self.codecs = tuple(codecs)
        """The codecs that seal payloads on their way to the store, in this order."""
        self.artifacts = artifacts
        """Where artifacts and large values are kept, instead of where the settings name."""
        self.retention = retention
        """How long finished data is kept, instead of what the settings define."""
        self._ids = ids or SystemIds()
        self._rng = rng or SystemRng()
        self.authoriser = authoriser
        """Authorises operations on runs, for nodes that are opened from now on; None permits everything."""
        self.registry = Registry(
            limits, allow_cross_tenant_signals=allow_cross_tenant_signals, values=Values(converters)
        )
        """The workflows, activities and limits of this app."""
        self.registry.attributes = declared_types(attributes or {})
        self.registry.secrets = None if secrets is None else open_provider(secrets)
        self._plan_sources = plan_sources if isinstance(plan_sources, PlanSources) else PlanSources(plan_sources)
        self.plans = AppPlans(self.registry, self.runtime)
        """The plans that can be executed: documents instead of code."""
        self.schedules = AppSchedules(name, self.registry, self._known, self.runtime)
        """The schedules of the app, while a node is open."""
        self.runtimes = OpenRuntimes()
        """The runtimes of the open nodes and connections."""

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
        """Register an async function as a workflow: `@app.workflow` or `@app.workflow(version="2")`.

        - `signals`: the types of signals, by name. A signal that does not fit is refused when it is sent. So is a
          signal of another name, unless `allow_other_signals`; then its sender gets a warning.
        - `failures`: exceptions that fail a run, in addition to `WorkflowFailed` and to failures of steps and waits.
          Any other unhandled exception pauses the run until the code is fixed, or fails it with `on_error="fail"`.
        - `requires_approval`: a run does not start before an operator has approved it (`RunHandle.approve`).
        - `entity`: its runs may get more than `Limits.signals_per_run_per_minute`.
        - `at_once`, `per_key`, `key`, `rate`, `overload`: limits on its runs, for all versions together. Those of the
          version that was registered last apply. See docs/limits.md.
        """
        if signals is not None and not isinstance(signals, Mapping):
            raise InvalidInput(f'signals is a dict of types by name, such as {{"paid": bool}}, not {signals!r}')
        for signal_name in signals or ():
            check_signal_name(signal_name)
        _check_version(version)

        def register(function: Callable[P, Coroutine[Any, Any, R]]) -> Workflow[P, R]:
            definition = WorkflowDefinition(
                function,
                _name_of(function, "workflow") if name is None else name,
                version,
                signals,
                allows_other_signals=allow_other_signals,
                values=self.registry.values,
                failures=failures,
                on_error=self.on_error if on_error is None else on_error,
                requires_approval=requires_approval,
                is_entity=entity,
            )
            require_workflow_name("a workflow's name", definition.name)
            self.registry.add_workflow(definition, WorkflowLimit(limits, definition.signature) if limits else None)
            return Workflow(definition)

        return register if function is None else register(function)

    def lock(self, name: str, *, at_once: int = 1, rate: tuple[int, timedelta] | None = None) -> Lock:
        """Declare a lock between runs. `async with accounts("17"):` admits one run at a time for each key.

        With `at_once`, that many runs may hold a key concurrently. A `rate` of `(10, timedelta(seconds=1))` admits that
        many in that period, for all keys together. Apps on the same store that declare the same name share the lock.
        The lock is released when its holder leaves the block or ends, even after a crash. Runs of the workflow
        `lock:NAME` show who holds it and who waits. See docs/locks.md.
        """
        if type(at_once) is not int or at_once < 1:
            raise InvalidInput(f"at_once is a whole number from 1, not {at_once!r}", field="at_once")
        workflow = workflow_of_lock(name)
        limits = LimitOptions(per_key=at_once, key=limit_key)
        if rate is not None:
            limits["rate"] = rate
        definition = WorkflowDefinition(hold, workflow, "1", values=self.registry.values, on_error=self.on_error)
        self.registry.add_workflow(definition, WorkflowLimit(limits, definition.signature))
        return Lock(name, Workflow(definition))

    @overload
    def external_workflow(self, workflow: str, /, *, version: str = "1") -> Workflow[..., Any]: ...
    @overload
    def external_workflow(
        self, workflow: Callable[P, Coroutine[Any, Any, R]], /, *, name: str | None = None, version: str = "1"
    ) -> Workflow[P, R]: ...

    def external_workflow(self, workflow: Any, /, *, name: str | None = None, version: str = "1") -> Any:
        """Return a workflow of another app on the same store, to call it as a child or to start it.

        If you pass a name, the workflow takes arguments by name. If you pass an async function without a body, with the
        same parameters and result, calls are checked and typed. This process does not need the workflow's code and
        never executes it. Its approval and its limits apply. A child waits until a node has that version.
        """
        _check_version(version)
        definition = ExternalWorkflow(workflow, name, version, self.registry.values)
        require_workflow_name("a workflow's name", definition.name)
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
        """Register a flow: a tree of steps around a state of this type (a dataclass, a Struct, a pydantic model).

        It is started with a state, and its result is the last state. This also declares the signals in the tree.
        `doc` is its description. The other arguments are those of `workflow`; `key` is a function of `state`. See
        docs/flows.md.
        """
        require_workflow_name("a flow's name", name)
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
        """Register a function as an activity: `@app.activity` or `@app.activity(retry=…, timeout=…)`.

        - `idempotency_key`: computes the key of a call from its arguments, by their names. Before a call with a key is
          repeated, `verify`, a function of the same arguments, returns whether it has happened: `NotCompleted`,
          `Completed`, `CompletedWithoutResult` or `Indeterminate`, within `verify_timeout`. A verifier that raises or
          times out is retried as `verify_retry` says, before an operator is asked. See docs/reconciliation.md.
        - `raises`: exceptions that a workflow can catch by their own classes. They are also `ActivityFailed` errors.
        - `retry_if`: a function of the exception that returns whether it is retried at all.
        - `cancel="wait"`: a cancellation waits for the outcome of a running call.
        - `limit`: bounds concurrent calls and calls per period, over all nodes. See `ActivityLimit`.

        Further options are those of `Activity.options`. See docs/activities.md.
        """
        call = call_options(PLAIN_CALL, options)

        def register(function: Callable[P, Any]) -> Activity[P, Any]:
            chosen = _name_of(function, "activity") if name is None else name
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
        """Declare a sink of the event bus, which gets events of runs. Nodes of this app store it when they start.

        `address` is the URL of a webhook, `nats://host:4222/SUBJECT`, or `redis://host:6379/STREAM`. `secret` signs
        requests to a webhook, or is the password of a broker. Other options are the fields of `Sink`. See docs/bus.md.
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

        The store keeps the events that the function has not handled yet, and continues there after a crash. It may get
        an event twice, with the same id. It is called on one node at a time, with events of one run, and may be async.
        If it raises, it is called again. Options are the fields of `Sink`.
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
        """Register an async function around each `workflow`, each attempt of an `activity`, or each `client` call.

        It gets the call and `call_next`, and returns the result of `await call_next(call)`, or another result. The
        middleware that is registered first is the outermost. See docs/middleware.md.
        """
        registered = self.registry.middleware.of(kind)

        def register(function: Any) -> Any:
            if not iscoroutinefunction(function) and not iscoroutinefunction(type(function).__call__):
                raise InvalidInput("middleware is an async function of the call and call_next", field="function")
            registered.append(function)
            return function

        return register

    def on_failed(self, hook: RunHook) -> RunHook:
        """Register a function that is called with the id of a failed run and the reason. It may be async.

        The node that committed the failure calls it once. If that node is lost, it is not called again: use a
        projection if no call may be missed. Its exceptions are logged.
        """
        self.registry.on_failed.append(_checked_hook("on_failed", hook))
        return hook

    def on_paused(self, hook: RunHook) -> RunHook:
        """Register a function that is called with the id of a paused run and the reason. See `on_failed`."""
        self.registry.on_paused.append(_checked_hook("on_paused", hook))
        return hook

    def schedule(
        self, cron: str = "", *, schedule_id: str | None = None, **options: Unpack[ScheduleOptions]
    ) -> Callable[[W], W]:
        """Declare a schedule, as a decorator of a workflow or with `workflow=`.

        `@app.schedule("0 9 * * MON-FRI", tz="Europe/Sofia")`, or with `every=` a timedelta, or once with `at=` a
        datetime. It is stored when a node opens, under `schedule_id` or the workflow's name. Operators' changes survive
        when the code is deployed again. See docs/schedules.md.
        """

        def declare(workflow: W) -> W:
            rest: dict[str, Any] = {key: value for key, value in options.items() if key != "workflow"}
            self.registry.add_schedule(self.schedules.declared(workflow, cron, schedule_id, **rest))
            return workflow

        if "workflow" in options:
            declare(options["workflow"])
        return declare

    def run(self, run_id: str | None = None) -> RunHandle[Any]:
        """Return the handle of an existing run. Inside a workflow you can signal it durably.

        Inside a workflow, without an id, it is the workflow's own run.
        """
        program = current_program()
        if program is not None:
            return run_from_inside(run_id or program.run_id)
        if run_id is None:
            raise InvalidInput("outside of a workflow a run is named by its id, `app.run(run_id)`: this one is None")
        if self.runtimes.current() is None:
            raise InvalidInput(
                f"no node is open: use `app.run({run_id!r})` inside `async with app.node(...)` or `app.connect(...)`; "
                "in a web application, inside its lifespan"
            )
        return RunHandle(self.runtime(), run_id)

    async def signal_many(self, signals: Sequence[Outgoing]) -> list[AcceptedSignalResult | CallerError]:
        """Send signals, each a dict of `run_id`, `name` and other arguments of `RunHandle.signal`.

        Return the result of each, in order, or the error that refuses it.
        """
        if self.runtimes.current() is None or current_program() is not None:
            raise InvalidInput("no node is open: send signals inside `async with app.node(...)`, outside of workflows")
        return await self.runtime().signal_many(signals)

    def waits(self, *, run_id: str | None = None, name: str | None = None) -> AsyncIterator[Wait]:
        """Iterate over the open waits: of one run, for one signal name, or all."""
        return self.runtime().waits(run_id, name)

    def signal_schemas(self, workflow: Workflow[..., Any]) -> dict[str, dict[str, Any]]:
        """Return the JSON Schema of each signal that the workflow declares, by name."""
        definition = self._known(workflow)
        return {name: definition.values.schema(kind) for name, kind in definition.signals.items()}

    def open_artifact(self, artifact: ArtifactRef) -> AsyncIterator[bytes]:
        """Iterate over the bytes of an artifact, outside workflows.

        If it does not exist, it raises `ArtifactMissing`. At the end it raises `ArtifactCorrupt` if the bytes are not
        those that were stored.
        """
        return self.runtime().open_artifact(artifact)

    async def complete_activity(self, token: str, result: Any = None) -> None:
        """Report the result of an activity that ended with `complete_later`. It is durable on return.

        Each attempt takes one outcome, and the first counts. A second one raises `Conflict`, and so does one after the
        step was closed in another way. Repeating the same outcome has the same result, so you can repeat the call after
        a store error. An invalid token raises `InvalidInput`, a finished run `RunTerminal`. While the step is open, a
        success counts even after the attempt's time-out.
        """
        await self.runtime().complete_activity(token, result)

    async def fail_activity(self, token: str, error: BaseException | str) -> None:
        """Report that such an activity has failed. It is retried by its policy, unless the error is `NonRetryable`.

        Errors are those of `complete_activity`. If the step is in a later attempt, it raises `Conflict`.
        """
        await self.runtime().fail_activity(token, error)

    async def heartbeat_activity(self, token: str) -> None:
        """Report that the holder of a callback is still working: its `heartbeat_timeout` starts again.

        If it is too late, or the callback has no such time-out, it raises `Conflict`.
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
        """Return dead letters, oldest first, after the given one."""
        start = (0, "") if after is None else (after.died_at, after.letter_id)
        query = DeadLetterQuery(run_id=run_id, reason=reason, settled=settled, after=start, limit=limit)
        return await self.runtime().dead_letters(query)

    async def dequeue_and_start(self) -> list[Dequeued]:
        """Admit queued runs, start them here if the node executes workflows, and return what happened to each.

        Nodes call it when a run has finished, and periodically. You may call it at any time (QUE-3).
        """
        return await self.runtime().dequeue_and_start()

    def _known(self, workflow: Any, version: str | None = None) -> WorkflowDefinition:
        """Return a workflow of this app, in this version if one is given."""
        if not isinstance(workflow, Workflow):
            name = getattr(workflow, "__qualname__", repr(workflow))
            hint = f"; by its name it is app.external_workflow({name})" if isinstance(workflow, str) else ""
            what = f"{name} is not a workflow: register the function with @app.workflow, and start that{hint}"
            raise InvalidInput(what, field="workflow")
        if workflow.call != PLAIN_CHILD:  # checked here, so that a plain start does not call another module
            refuse_child_options(workflow)
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
        """The tasks of people: list, claim, complete and comment on them."""
        return self.runtime().tasks()

    # --- running

    @asynccontextmanager
    async def node(
        self, store: str | port.Store | None = None, *, name: str | None = None, options: NodeOptions | None = None
    ) -> AsyncIterator[Node]:
        """Run this app's workflows while the context is open. The store is an address, a store, or `HOLDFAST_STORE`.

        A node that restarts under the same name takes over its former runs. Without a name it gets a new one. It does
        not handle process signals: the node stops when the context ends. See `serve`.
        """
        refuse_inside("node", "nothing is opened: the run has its node already")
        options = options or NodeOptions()
        if options.fail_open and name is None:
            raise InvalidInput(
                "a node that fails open needs a name, by which it finds its journal after a restart", field="name"
            )
        self.runtimes.check_store(store)
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
        """Return the name of a node with a suffix that distinguishes this process from others with the same name."""
        if name is not None and (problem := check_node_name(name)) is not None:
            raise problem
        name = name or f"{self.name}-{self._ids.new_id()}".replace(LIFE, "-")
        return f"{name}{LIFE}{self._ids.new_id()[-LIFE_DIGITS:]}"

    @asynccontextmanager
    async def _open(self, store: str | port.Store | None) -> AsyncIterator[tuple[port.Store, Limits]]:
        """Open a store, and close it again if it was not open before."""
        if store is not None and not isinstance(store, str):
            if not hasattr(store, "capabilities"):
                problem = f"a store is an address such as sqlite:///orders.db, or an opened store, not {store!r}"
                raise InvalidInput(problem, field="store")
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
        """Start runs, send to them and wait for them while the context is open. Nodes elsewhere execute them."""
        async with self.node(store, options=NodeOptions(takes_runs=False, relays=False, sample_s=None)):
            yield

    async def serve(
        self, store: str | port.Store | None = None, *, name: str | None = None, options: NodeOptions | None = None
    ) -> None:
        """Run a node until SIGTERM or SIGINT, then let running activities finish, for at most `drain_s`.

        A second signal ends the process immediately. A node that restarts under the same name takes over its former
        runs. This works only in the main thread. If the node itself fails, its error is raised.
        """
        with termination_signal() as asked:
            work = describe_work(self.registry.workflow_names(), options or NodeOptions())
            place = describe_store(_settings(store, None).store if store is None else store)  # before it is made
            async with self.node(store, name=name, options=options) as node:
                logger.info("node %s works on %s; store: %s", node.name, work, place)
                await node.run_until(asked)
                logger.info("node %s stops because of %s; a second signal ends it at once", node.name, asked.result())
            logger.info("node %s has stopped", node.name)

    @keywords_are_options
    async def start(
        self,
        workflow: Workflow[..., R],
        *args: Any,
        arguments: Mapping[str, Any] | None = None,
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
        """Start a run with these arguments, and return its handle. The same request again returns the same run.

        - `request_id` makes the start idempotent within `tenant`, `project` and `environment`, the owner of the run;
          `workflow_version` is part of the request if it is given. `reuse` decides what happens if `run_id` is in use.
        - `arguments`: the arguments by name, if a parameter has the name of an option.
        - `with_signal`: a dict of `name`, `payload` and `signal_id`, for the new run or the existing one.
        - `reference_key`, `reference_parts`, `attributes`, `tags`: used to find the run. See docs/search.md.
        - `at`, a datetime with a time zone, or `after`: PENDING until then. `priority`: higher is admitted first.
        - `execution_timeout` bounds the whole run, `run_timeout` the time since its last rotation. Then it cleans up
          for `cleanup_timeout` and fails with `RunTimedOut`.

        `debounce`: docs/starting.md. `context`: docs/middleware.md. `connection`: docs/transactions.md.
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
            {} if context is None else context,
            debounce,
        )
        packed = definition.signature.pack(args, kwargs if arguments is None else named(arguments, args, kwargs))
        started = await runtime.start(definition, packed, options, connection=connection)
        for delivered in started.signals:
            result_of(delivered)
        started_as = self.registry.workflows.get((definition.name, started.workflow_version))
        return RunHandle(runtime, started.run_id, started_as, None, started.is_reused, connection is None)

    def runtime(self) -> Runtime:
        """Return the runtime of the open node. Services use it for operations by definition and for a caller."""
        runtime = self.runtimes.current()
        if runtime is None:
            raise InvalidInput("no node is open: use `async with app.node(...)` or `app.connect(...)`")
        return runtime


class OpenRuntimes:
    """The open runtimes of an app, each with the event loop in which it was opened."""

    def __init__(self) -> None:
        self._open: list[tuple[asyncio.AbstractEventLoop, Runtime]] = []
        self.tested: port.Store | None = None
        """The store of the open `TestNode`, if there is one. No other store is opened in the meantime."""

    def check_store(self, store: object) -> None:
        """Refuse to open a store other than that of the open `TestNode`: the test would use it unnoticed."""
        if self.tested is not None and store is not self.tested:
            text = "a TestNode of this app is open, and calls would go to another store: open one or the other"
            raise InvalidInput(text, field="store")

    def add(self, runtime: Runtime) -> None:
        """Add a runtime that was opened in the running event loop."""
        self._open.append((asyncio.get_running_loop(), runtime))

    def remove(self, runtime: Runtime) -> None:
        """Remove a runtime that is being closed."""
        self._open = [each for each in self._open if each[1] is not runtime]

    def has(self, runtime: Runtime) -> bool:
        """Return whether this runtime is still open."""
        return any(opened is runtime for _, opened in self._open)

    def current(self) -> Runtime | None:
        """Return the runtime that was opened last in the running event loop, or else the last one of all."""
        if len(self._open) > 1:
            running = asyncio._get_running_loop()
            for loop, runtime in reversed(self._open):
                if loop is running:
                    return runtime
        return self._open[-1][1] if self._open else None


def _checked_hook(field: str, hook: Any) -> RunHook:
    if not callable(hook):
        raise InvalidInput(f"{field} registers a function of a run's id and the reason, not {hook!r}", field=field)
    return hook  # type: ignore[no-any-return]


def _name_of(function: Any, kind: str) -> str:
    """Return the name of a function to register; raise if it is not a function."""
    if isinstance(function, str):
        raise InvalidInput(f"to give it another name, register it with @app.{kind}(name={function!r})", field="name")
    if not callable(function) or isclass(function):
        raise InvalidInput(f"@app.{kind} registers a function, not {function!r}", field="function")
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise InvalidInput(f"{function!r} has no name: register it with @app.{kind}(name=…)", field="name")
    return name


def _check_version(version: str) -> None:
    problem = check_name("version", version)
    if problem is not None or "|" in version:
        raise problem or InvalidInput(f"version may not contain '|': {version!r}", field="version")


def _settings(address: str | None, limits: Limits | None) -> Settings:
    settings = load_settings(os.environ) if address is None else load_settings(os.environ, store=address)
    return settings if limits is None else replace(settings, limits=limits)
