"""The runtime: what callers ask of runs while an app has a node open. Each verb has its one path here.

`App`, `RunHandle`, the service's operations (and with them REST, JSON-RPC, the client and the command line) call these
methods. None of them reaches into the node. A caller of a service is one argument, `caller`: it is shown to the
authoriser, recorded in the run, and named in the audit log. Without one, the request comes from code in this process.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, get_args
from weakref import ref

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.clock import Ids, Rng, SystemRng
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.attributes import Attributes, to_parts, to_values
from holdfast.core.audit import AuditEntry, Caller, audit_entry
from holdfast.core.dead_letters import Settlement
from holdfast.core.debounce import Debounce, check_debounce, debounced_id
from holdfast.core.decide import update_step_id
from holdfast.core.events import Event
from holdfast.core.index_rows import Wait
from holdfast.core.instants import Instant
from holdfast.core.keys import (
    ANY_VERSION,
    CALLBACK,
    ActivityToken,
    check_name,
    check_signal_name,
    prefixed,
    read_activity_token,
    require_step_name,
    signal_uuid,
)
from holdfast.core.messages import UPDATE_SIGNAL, AcceptedSignalResult, SignalRequest
from holdfast.core.plans import ANY_PLAN, STORE_PLAN, definition_of, workflow_of
from holdfast.core.restarts import check_reused_id
from holdfast.core.schedules import Schedule
from holdfast.core.state import TERMINAL
from holdfast.engine.activities.async_completion import report_error, report_heartbeat, report_result
from holdfast.engine.activities.context import CONTEXT, activity_context
from holdfast.engine.bus.relays import Relays
from holdfast.engine.history import head_of, read_history, wait_for_event
from holdfast.engine.host_locks import HeldLock
from holdfast.engine.inbox.authorization import Authoriser, Permissions
from holdfast.engine.inbox.dead_letters import DeadLetterHandle, find_dead_letters, settle_dead_letter
from holdfast.engine.inbox.declarations import declared_by
from holdfast.engine.inbox.operator_commands import CommandSender, OperatorCommand
from holdfast.engine.inbox.receipts import Receipt, Unconsumed, mailbox_of, open_waits, receipt_of
from holdfast.engine.inbox.signals import FirstSignal, Outgoing, SignalSender, audited, first_signal, request_of
from holdfast.engine.inbox.tasks import Tasks
from holdfast.engine.node import Node
from holdfast.engine.plan_sources import PlanSources
from holdfast.engine.plans import Plans
from holdfast.engine.remote_queries import RemoteQueries
from holdfast.engine.retention import LOCK as RETENTION_LOCK
from holdfast.engine.retention import Retention, RetentionDuty, archive_at
from holdfast.engine.run_context import BOUND, context_of_start
from holdfast.engine.schedules import Declaration, Schedules, tags_of
from holdfast.engine.start.admission import Dequeued
from holdfast.engine.start.forks import Forks
from holdfast.engine.stream_reading import StreamHub
from holdfast.engine.turns.draft import debounced, held_until, prepare_run, renamed, start_key
from holdfast.errors import (
    ArtifactMissing,
    CallerError,
    EngineError,
    HoldfastError,
    InvalidInput,
    NotFound,
    RunTerminal,
    StoreUnavailable,
    UpdateFailed,
    VersionMismatch,
)
from holdfast.limits import DURATION_MS, PRIORITY, TAGS, Limits
from holdfast.program.callbacks import CallbackTerms
from holdfast.program.definitions import (
    START_RUN,
    UPDATE_RUN,
    ActivityDefinition,
    ExternalWorkflow,
    StartRequest,
    UpdateRequest,
    WorkflowDefinition,
    built_in,
)
from holdfast.program.middleware import ClientCall, call_through
from holdfast.program.plan.definition import PlanDefinition
from holdfast.program.values import Signature
from holdfast.registry import Registry
from holdfast.store import port
from holdfast.store.artifacts import Artifacts
from holdfast.store.decisions import no_such_run
from holdfast.store.joined import JoinedStore
from holdfast.store.queries import DeadLetterQuery
from holdfast.store.types import STREAMS
from holdfast.store.validation import RECONCILIATION, id_of_request, require_conditional_batch, require_for_signals

logger = logging.getLogger("holdfast.node")


class StartOptions(Struct, frozen=True, gc=False):
    """How a run is started, beside its workflow and input.

    A request with the same `request_id` gives the same run, within tenant, project, environment and workflow; with
    `names_version` the version of the workflow is a part of the request too. `with_signal` is in the run's mailbox from
    its beginning. `priority` is the order in which runs of a workflow with limits are admitted, higher first.
    With `at`, or `after_ms` from now, the run exists at once and starts then. `timeouts` bound how long it may take.
    `reuse` is what becomes of a `run_id` that is taken (QUE-5); without it, the id stands in for the `request_id`.
    With `debounce` a start of a key whose run has not begun is a later input of that run.
    `context` is carried to all that follows from the run, with what is bound around the start (`bind_context`).
    """

    request_id: str | None = None
    run_id: str | None = None
    tenant: str = "default"
    project: str = "default"
    environment: str = "default"
    reference_key: str | None = None
    tags: tuple[str, ...] = ()
    priority: int = 0
    with_signal: FirstSignal | None = None
    names_version: bool = False
    reference_parts: Mapping[str, str] = {}
    attributes: Mapping[str, Any] = {}
    at: Instant | None = None
    after_ms: int | None = None
    timeouts: e.RunTimeouts | None = None
    reuse: port.ReusePolicy | None = None
    context: Mapping[str, str] = {}
    debounce: Debounce | None = None

    def check(self) -> None:
        """Raise `InvalidInput` if a run cannot be started so, before anything is made of it."""
        if self == PLAIN:
            return
        problem = None
        if self.tenant != "default":
            problem = check_name("tenant", self.tenant)
        if problem is None and self.project != "default":
            problem = check_name("project", self.project)
        if problem is None and self.environment != "default":
            problem = check_name("environment", self.environment)
        if problem is None and self.request_id is not None and self.request_id != "":
            problem = check_name("request_id", self.request_id)
        if problem is None and self.run_id is not None:
            problem = check_name("run_id", self.run_id)
        if problem is not None:
            raise problem
        if self.run_id is not None and "/" in self.run_id:
            raise InvalidInput("run_id: a slash is for the ids of children", field="run_id")
        tags: Any = self.tags
        if isinstance(tags, tuple) and len(tags) > TAGS:
            raise InvalidInput(f"a run is started with at most {TAGS} tags, not {len(tags)}", field="tags")
        if type(self.priority) is not int or not -PRIORITY <= self.priority <= PRIORITY:
            raise InvalidInput(f"priority is a whole number from -{PRIORITY} to {PRIORITY}", field="priority")
        if self.run_id is not None:
            unfit = check_reused_id(self.run_id, is_reused=self.reuse is not None)
            if unfit is not None:
                raise unfit
        elif self.reuse is not None:
            raise InvalidInput("reuse is what becomes of a run_id that is taken: give one", field="reuse")
        if self.reuse is not None and self.reuse not in get_args(port.ReusePolicy):
            raise InvalidInput(f"reuse is one of {', '.join(get_args(port.ReusePolicy))}", field="reuse")
        if self.debounce is not None:
            self._check_debounce(self.debounce)
        given: Any = self.context
        if not isinstance(given, Mapping):
            raise InvalidInput(f"a context has texts by name, unlike {given!r}", field="context")
        if self.at is not None and self.after_ms is not None:
            raise InvalidInput("a run starts at an instant, or after a while, not both", field="at")
        if self.at is None and self.after_ms is None:
            return
        for field, most in (("at", 2**53), ("after_ms", DURATION_MS)):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or not 0 <= value <= most):
                raise InvalidInput(f"{field} is a whole number from 0 to {most}, not {value!r}", field=field)

    def _check_debounce(self, debounce: Debounce) -> None:
        """Raise `InvalidInput` if a start cannot be debounced so."""
        beside = {
            "run_id": "the key makes the run's id",
            "reuse": "the key makes the run's id",
            "at": "the quiet time says when it starts",
            "after_ms": "the quiet time says when it starts",
            "with_signal": "send the signal to the run",
        }
        for field, why in beside.items():
            if getattr(self, field) is not None:
                raise InvalidInput(f"a debounced start has no {field.removesuffix('_ms')}: {why}", field="debounce")
        problem = check_debounce(debounce)
        if problem is not None:
            raise problem


PLAIN = StartOptions()


class Started(Struct, frozen=True):
    """A run that exists now, by this request or by an earlier one, and how its first signals were answered."""

    run_id: str
    workflow_version: str
    """The version that it was started with, which is that of the earlier request, if there was one."""
    signals: tuple[port.Delivered, ...] = ()
    is_reused: bool = False
    """Whether another request for the same id has started it."""


class Runtime:
    """An app's store, node and registry while they are open, and every verb that callers have."""

    def __init__(
        self,
        store: port.Store,
        node: Node,
        registry: Registry,
        authoriser: Authoriser | None,
        ids: Ids,
        artifacts: Artifacts | None = None,
        plan_sources: PlanSources | None = None,
        retention: Retention | None = None,
        rng: Rng | None = None,
        app: str = "",
    ) -> None:
        self._rng = rng or SystemRng()
        self.store = store
        self.registry = registry
        self.ids = ids
        self._node = node
        self._published = -1
        self._middleware = registry.middleware.client
        self.artifacts = artifacts
        """Where artifacts and large values are kept, if there is such a place."""
        self.plans = Plans(store, registry, plan_sources or PlanSources())
        """The plans of the installation."""
        registry.built_in[STORE_PLAN] = self.plans.activity()
        registry.built_in[START_RUN] = _starting_activity(ref(self))
        registry.built_in[UPDATE_RUN] = _updating_activity(ref(self))
        registry.built_in[CALLBACK] = built_in(_await_callback, CALLBACK)
        poll_s = node.options.safety_poll_s
        registry.lacks_streams = STREAMS in store.capabilities.lacking
        if not store.capabilities.conditional_batch:
            registry.refuse_records = partial(require_conditional_batch, store, RECONCILIATION)
        self.streams = StreamHub(store, poll_s)
        """The streams that are read in this process."""
        self._remote = RemoteQueries(store, node.name, poll_s, self._answer_for_others, ids)
        if node.options.takes_runs:
            node.background.append(self._remote.serve)
        self.relays: Relays | None = None
        """The relays of the event bus, if this node has them."""
        self._permissions = Permissions(authoriser, store, ids)
        self._signals = SignalSender(store, registry, self._permissions, node.turn_loop.expect)
        self._commands = CommandSender(store, registry, self._permissions, ids)
        self._forks = Forks(store, registry, self._commands, ids, self._create_again)
        policy = retention or Retention()
        archive = archive_at(policy.archive, store)
        self.retention = RetentionDuty(node.name, store, policy, ids, archive, self._cancel_stale)
        """What deletes what is past its window. Without a policy nothing but expired acceptance records."""
        if retention is not None and node.options.takes_runs:
            node.add_duty(RETENTION_LOCK, self.retention.run)
        self.schedules = Schedules(
            app,
            store,
            registry,
            self.plans,
            ids,
            self._prepare_tick,
            self._cancel_for_tick,
            self.wait_finished,
            self._permit_start,
            node.options.safety_poll_s,
        )
        """The schedules of the app."""
        if node.options.takes_runs:
            node.add_duty(prefixed("schedules of ", app), self.schedules.fire, self.schedules.until_needed)
            if artifacts is not None:
                node.add_duty(prefixed("artifacts of ", app), partial(self._sweep_artifacts, artifacts))

    async def open(self) -> None:
        """Publish what the workflows declare, and start the node."""
        await self._publish()
        self._node.turn_processor.declarations = self._signals.declarations
        if self.artifacts is not None and self._node.works:
            await self._node.use_artifacts(self.artifacts)
        if self._node.options.takes_runs:
            for declared in self.registry.schedules.values():
                await self.schedules.declare(Declaration(declared))
        relays = await self._declared_relays()
        await self._node.start()
        if relays is not None:  # nothing that can fail comes after the start: who gets an error has no node
            relays.start()
            self.relays = relays

    async def _declared_relays(self) -> Relays | None:
        """Store the sinks that the app declares, and return what relays to them here, if this node does."""
        node = self._node
        has_relays = node.options.takes_runs if node.options.relays is None else node.options.relays
        if not has_relays:
            return None
        relays = Relays(node.name, self.store, self.registry, self._rng, node.options, lambda: node.is_at_rest)
        await relays.declare(list(self.registry.sinks.values()))
        return relays

    async def _sweep_artifacts(self, artifacts: Artifacts, held: HeldLock) -> None:
        """Delete what no run owns any more, now and then, for as long as this node has the lock.

        It is safe on several nodes at once: the lock is for economy, because each sweep lists the whole artifact store.
        """
        while True:
            await asyncio.sleep(self._node.options.artifact_sweep_s)
            try:
                count = await artifacts.sweep(self.store)
            except HoldfastError:
                logger.exception("artifacts without a run could not be deleted; trying again later")
            else:
                logger.info("%d artifacts and values without a run were deleted", count)

    async def _publish(self) -> None:
        """Publish what the workflows declare of their signals. A larger number of workflows means that one is new."""
        workflows = len(self.registry.workflows)
        await self._signals.declarations.publish(self.registry.workflow_limits)
        self._published = workflows

    async def close(self) -> None:
        """Stop sending signals, and the node."""
        self.streams.close()
        if self.relays is not None:
            self.relays.cancel()
        try:
            await self._signals.stop()
        except (Exception, asyncio.CancelledError):  # not GeneratorExit: a coroutine that is dropped awaits nothing
            await self._node.stop()
            raise
        await self._node.stop()
        if self.relays is not None:  # not before: a close that is abandoned here must not be resumed by its end
            await self.relays.stop()

    # --- the node

    @property
    def node_name(self) -> str:
        """The node's name, with what distinguishes this life of it from others."""
        return self._node.name

    @property
    def failure(self) -> EngineError | None:
        """The error with which the node has failed, or None."""
        return self._node.failure

    @property
    def limits(self) -> Limits:
        """The bounds of this installation."""
        return self._node.limits

    @property
    def activities_running(self) -> int:
        """How many activities are under way on the node."""
        return self._node.activities_running

    @property
    def runs_awaited(self) -> int:
        """How many runs callers of this process wait for."""
        return self._node.completion_waiters.runs_awaited

    def audit(
        self, caller: Caller | None, *, actor: str = "", subject: str = "", detail: str = ""
    ) -> AuditEntry | None:
        """Return the audit log's entry about what a caller does; None for code in this process."""
        return audit_entry(caller, self.ids.new_id, actor=actor, subject=subject, detail=detail)

    # --- starting runs

    def start(
        self,
        definition: WorkflowDefinition | PlanDefinition,
        input: Raw,
        options: StartOptions = PLAIN,
        caller: Caller | None = None,
        uri: str = "",
        connection: Any = None,
    ) -> Coroutine[Any, Any, Started]:
        """Start a run with this input, which fits the definition. When this returns it is durable.

        The body of a plan is in the store already; `uri` is where it came from. With a `connection` the run is written
        in the transaction that the caller has begun there: it is durable, and begins, when that is committed.
        """
        # A nested function here would give each start seven cells, and what waits is walked through by the collector.
        start = self._start_through_middleware if self._middleware else self._start
        return start(definition, input, options, caller, uri, connection)

    async def _start_through_middleware(
        self,
        definition: WorkflowDefinition | PlanDefinition,
        input: Raw,
        options: StartOptions,
        caller: Caller | None,
        uri: str,
        connection: Any,
    ) -> Started:
        name = workflow_of(definition.name) if isinstance(definition, PlanDefinition) else definition.name
        call = ClientCall(
            verb="start",
            workflow=name,
            run_id=options.run_id,
            context=dict(options.context),
            caller=caller,
            raw_input=input,
        )

        def then(call: ClientCall) -> Awaitable[Started]:
            given = replace(options, context=call.context)
            return self._start(definition, input, given, caller, uri, connection)

        started: Started = await call_through(self._middleware, call, then)
        return started

    async def _start(
        self,
        definition: WorkflowDefinition | PlanDefinition,
        input: Raw,
        options: StartOptions,
        caller: Caller | None,
        uri: str,
        connection: Any,
    ) -> Started:
        node, joined = self._node, None if connection is None else self.store.joined(connection)
        if node.failure is not None:
            raise node.failure
        options.check()
        codec.bounded(input, node.limits.value_bytes, f"the input of {definition.name!r}")
        queued = self._queued(definition, input, options, caller, uri)
        if self._permissions.is_needed:
            await self._permissions.check_start(queued, options.run_id, caller)
        if len(self.registry.workflows) != self._published and joined is None:  # one was registered after the opening
            await self._publish()  # not beside a transaction of the caller's, which may have locked the store
        now = await self.store.now()
        debounce = options.debounce
        run_id = options.run_id or (self.ids.new_id() if debounce is None else debounced_id(debounce.key, queued))
        key = self._key(run_id, queued, options)
        new = prepare_run(
            run_id, queued, now, node.name, reference_key=options.reference_key, tags=options.tags, key=key
        )
        if caller is not None:
            new = replace(new, audit=audit_entry(caller, self.ids.new_id, subject=queued.plan_id))
        warning = None
        if options.with_signal is not None:
            new, warning = await self._with_signal(new, queued, definition, options, caller)
        if isinstance(definition, ExternalWorkflow):
            new = await self._external(new, options.priority)
        elif self.registry.workflow_limits or self.registry.approvals:
            new = node.run_queue.with_admission(new, options.priority)
        start_at = options.at if options.after_ms is None else now + options.after_ms * 1_000
        start_at = start_at if start_at is not None and start_at > now else None
        if debounce is not None:
            again = debounced(new, debounce.terms, input, now)
            answer = await self._create_reusing(again, "debounce", caller, None, joined)
        elif options.reuse is not None:
            answer = await self._create_reusing(new, options.reuse, caller, start_at, joined)
        elif joined is None and start_at is None and not isinstance(definition, ExternalWorkflow):
            is_unheard_of = options.run_id is None and not options.request_id
            answer = await node.starter.create(new, now, is_unheard_of=is_unheard_of)
        else:
            answer = await self._create_for_others(new, start_at, joined)
        if isinstance(answer, port.Refused):
            raise answer.error
        if new.admission is not None:
            node.run_queue.notice_start(new)
        version = definition.version if options.names_version else await self._version_of(answer, definition.version)
        signals = answer.signals
        if new.signals:
            signals = await self._answers_to_signals(new, answer, warning, caller, joined)
        return Started(answer.run_id, version, signals, isinstance(answer, port.Existing) and answer.is_reused)

    def _queued(
        self,
        definition: WorkflowDefinition | PlanDefinition,
        input: Raw,
        options: StartOptions,
        caller: Caller | None,
        uri: str,
    ) -> e.RunQueued:
        """Return the first event of a run, with what its start asks for."""
        has_context = options.context or BOUND.get() is not None or CONTEXT.get(None) is not None
        return e.RunQueued(
            workflow_of(definition.name) if isinstance(definition, PlanDefinition) else definition.name,
            definition.version,
            options.tenant,
            options.project,
            options.environment,
            run_request_id=options.request_id or "",
            input=input,
            plan=e.PlanSource(definition.sha256, uri) if isinstance(definition, PlanDefinition) else None,
            by=None if caller is None else caller.ref,
            attributes=self._attributes(options),
            timeouts=options.timeouts,
            context=context_of_start(options.context) if has_context else e.NULL,
        )

    async def _answers_to_signals(
        self,
        new: port.NewRun,
        answer: port.Created | port.Existing,
        warning: str | None,
        caller: Caller | None,
        joined: JoinedStore | None,
    ) -> tuple[port.Delivered, ...]:
        """Return how the signals of a start were answered, which are sent if the run did not take them."""
        if not answer.signals:  # the run is of another version, and what that declares decides
            sent = [replace(signal, run_id=answer.run_id) for signal in new.signals]
            return tuple([port.Accepted(await self._signals.send(signal, None, caller, joined)) for signal in sent])
        return tuple(_with_warning(each, warning) for each in answer.signals) if warning else answer.signals

    def _key(self, run_id: str, queued: e.RunQueued, options: StartOptions) -> str | None:
        """Return what recognises a retry of a start; None if it is what the version and the run's id say.

        Where the id may be taken it does not stand in for the request: each call without a `request_id` is another one.
        """
        if options.reuse is not None or options.debounce is not None:
            run_id = self.ids.new_id()
        elif options.names_version:
            return None
        return start_key(run_id, queued, (options.names_version and queued.plan_version) or ANY_VERSION)

    async def _create_reusing(
        self,
        new: port.NewRun,
        policy: port.ReusePolicy | Literal["debounce"],
        caller: Caller | None,
        start_at: Instant | None,
        joined: JoinedStore | None,
    ) -> port.Created | port.Existing | port.Refused:
        """Create a run whose id may be taken. The store decides, and says which id the next run has."""
        reuse = port.Reuse(run_id=new.run_id, policy=policy)
        while True:
            answer = await self._create_for_others(replace(new, reuse=reuse), start_at, joined)
            details = answer.error.details if isinstance(answer, port.Refused) else {}
            is_sent_now = policy != "debounce" and new.signals
            if isinstance(answer, port.Existing) and answer.is_reused and is_sent_now and not answer.signals:
                sent = [replace(signal, run_id=answer.run_id) for signal in new.signals]
                try:
                    results = [await self._signals.send(signal, None, caller, joined) for signal in sent]
                except RunTerminal:
                    if policy == "return":
                        raise
                    continue  # it has finished meanwhile
                return replace(answer, signals=tuple(map(port.Accepted, results)))
            if "restart_as" not in details:
                return answer
            new = renamed(new, details["restart_as"])
            if policy == "terminate-and-restart" and details["run_id"] is not None:
                signal_id = f"replaced {new.request_key}"
                command = OperatorCommand(
                    name="EMERGENCY_STOP", reason=f"replaced by run {new.run_id}", signal_id=signal_id
                )
                reuse = replace(reuse, stop=await self._commands.permitted(details["run_id"], command, caller))

    async def _create_for_others(
        self, new: port.NewRun, start_at: Instant | None, joined: JoinedStore | None
    ) -> port.Created | port.Existing | port.Refused:
        """Create a run that no node has yet: it starts later, or when the caller commits their transaction.

        Of which workflow it is cannot be looked up before that commit.
        """
        new = new if start_at is None else held_until(new, start_at)
        if joined is None:
            [answer] = await self.store.create([new])
            return answer
        [answer] = await joined.create([new])
        if isinstance(answer, port.Created):
            self._signals.declarations.remember(new)
        return answer

    async def _version_of(self, answer: port.Created | port.Existing, version: str) -> str:
        """Return this version, or that of the run that exists: an earlier release may have started it."""
        if isinstance(answer, port.Created):
            return version
        [existing] = await self.store.load([answer.run_id])
        return version if existing is None else existing.head.plan_version

    async def _external(self, new: port.NewRun, priority: int) -> port.NewRun:
        """Return a run of a workflow that only other apps have, as that declares; raise if no node ever had it."""
        [declared] = await self.store.find_definitions([(new.plan_id, new.plan_version)])
        if declared is None:
            problem = f"no node has published version {new.plan_version!r} of workflow {new.plan_id!r}"
            raise NotFound(problem, workflow=new.plan_id, version=new.plan_version)
        [new] = await self._node.run_queue.as_declared([new], {new.run_id: priority})
        return new

    async def start_for_run(self, request: StartRequest) -> str:
        """Start a run that a workflow asks for: of the same tenant, project and environment, and on its own."""
        head = await head_of(self.store, activity_context().run_id)
        options = StartOptions(
            request_id=request.request_id,
            run_id=request.run_id,
            tenant=head.tenant,
            project=head.project,
            environment=head.environment,
            reference_key=request.reference_key,
            tags=request.tags,
            priority=request.priority,
            names_version=request.version is not None,
            attributes=request.attributes or {},
            timeouts=request.timeouts,
            reuse=request.reuse,
            debounce=request.debounce,
        )
        if request.plan is not None:
            plan, uri = await self.plans.resolve(head.tenant, request.plan)
            given = plan.check_inputs(codec.decode(request.input, dict[str, Any]))
            return (await self.start(plan, self.registry.values.encode(given), options, uri=uri)).run_id
        version = request.version
        is_here = version is None or (request.workflow, version) in self.registry.workflows
        if version is not None and not is_here:
            values = self.registry.values
            definition: WorkflowDefinition = ExternalWorkflow(request.workflow, None, version, values)
        else:
            definition = self.registry.workflow(request.workflow, version)
        definition.signature.unpack(request.input)
        return (await self.start(definition, request.input, options)).run_id

    async def update_for_run(self, request: UpdateRequest) -> Raw:
        """Update a run for a workflow: one of the same tenant, project and environment."""
        own = await head_of(self.store, activity_context().run_id)
        other = await head_of(self.store, request.run_id)
        place = own.tenant, own.project, own.environment
        is_near = (other.tenant, other.project, other.environment) == place
        if not is_near and not self.registry.allow_cross_tenant_signals:
            raise no_such_run(request.run_id)
        return await self.update(request.run_id, request.name, request.arguments, request.update_id)

    def _attributes(self, options: StartOptions) -> Attributes:
        """Return the search attributes of a run, with the parts of its reference."""
        if not options.attributes and not options.reference_parts:
            return {}
        return {**to_values(options.attributes, self.registry.attributes), **to_parts(options.reference_parts)}

    def _prepare_tick(self, queued: e.RunQueued, schedule: Schedule, tick: Instant) -> port.NewRun:
        """Return the run of a tick of a schedule."""
        run_id = self.ids.new_id()
        new = prepare_run(
            run_id,
            queued,
            tick,
            self._node.name,
            reference_key=schedule.reference_key,
            tags=tags_of(schedule),
            key=start_key(run_id, queued, ANY_VERSION),
        )
        return self._node.run_queue.with_admission(new, schedule.priority)

    async def _permit_start(self, queued: e.RunQueued, caller: Caller | None) -> None:
        """Ask the authoriser whether the caller may have such runs started."""
        if self._permissions.is_needed:
            await self._permissions.check_start(queued, None, caller)

    async def _cancel_for_tick(self, run_id: str, signal_id: str) -> None:
        """Cancel a run of a schedule because its next tick is due."""
        command = OperatorCommand(name="CANCEL", reason="the next tick of its schedule is due", signal_id=signal_id)
        try:
            await self._commands.send(run_id, command, None, wait=False)
        except CallerError:  # it has finished, or is gone
            logger.debug("run %s is not cancelled", run_id, exc_info=True)

    async def _with_signal(
        self,
        new: port.NewRun,
        queued: e.RunQueued,
        definition: WorkflowDefinition | PlanDefinition,
        options: StartOptions,
        caller: Caller | None,
    ) -> tuple[port.NewRun, str | None]:
        """Return the run with its first signal, and a warning for the sender.

        The signal has an id, so that it can be sent again after an error. If it does not fit what this version
        declares, no run is created with it; a run that the same request has started in another version may take it.
        """
        assert options.with_signal is not None
        signal = first_signal(new.run_id, options.with_signal, self.registry.values)
        if isinstance(definition, ExternalWorkflow):
            plans = {new.run_id: (new.plan_id, new.plan_version)}
            declared = (await self._signals.declarations.of_runs(plans, plans))[new.run_id]
        else:
            declared = None if isinstance(definition, PlanDefinition) else declared_by(definition)
        warning, unfit = None, None
        try:
            warning = None if declared is None else declared.check(signal.name, signal.payload)
        except CallerError as problem:
            unfit = problem
        require_for_signals(self.store, [signal])  # before it shares a transaction with starts that need nothing
        signal_id = id_of_request(self.store, signal.signal_id, self.ids)
        is_unlimited = declared is not None and declared.is_entity
        signal = audited(replace(signal, signal_id=signal_id, is_unlimited=is_unlimited), caller, self.ids)
        if self._permissions.is_needed:
            await self._permissions.check_first_signal(signal, queued, options.run_id, caller)
        return replace(new, signals=(signal,), unfit=unfit), warning

    async def _create_again(self, new: port.NewRun, now: Instant) -> port.Created | port.Existing | port.Refused:
        """Create a run that does another one again: here, or for a node that has its definition."""
        node = self._node
        new = node.run_queue.with_admission(new)
        if not node.definition_filter.has(new.plan_id, new.plan_version):
            [answer] = await self.store.create([new])
            return answer
        created = await node.starter.create(new, now)
        node.run_queue.notice_start(new)
        return created

    async def dequeue_and_start(self) -> list[Dequeued]:
        """Admit queued runs, start them here if the node takes runs, and return what happened to each."""
        return await self._node.run_queue.dequeue_and_start()

    # --- signals

    async def signal(
        self,
        request: SignalRequest,
        definition: WorkflowDefinition | None = None,
        caller: Caller | None = None,
        connection: Any = None,
    ) -> AcceptedSignalResult:
        """Send a signal. When this returns it is durable. `definition` is the run's workflow, if it is known.

        With a `connection` it is sent in the transaction that the caller has begun there.
        """
        check_signal_name(request.name)
        if caller is not None:
            request = audited(request, caller, self.ids)
        joined = None if connection is None else self.store.joined(connection)
        if not self._middleware:
            return await self._signals.send(request, definition, caller, joined)
        call = ClientCall(
            verb="signal", run_id=request.run_id, name=request.name, caller=caller, raw_input=request.payload
        )
        then = partial(self._send_after, request, definition, caller, joined)
        accepted: AcceptedSignalResult = await call_through(self._middleware, call, then)
        return accepted

    def _send_after(
        self,
        request: SignalRequest,
        definition: WorkflowDefinition | None,
        caller: Caller | None,
        joined: JoinedStore | None,
        _: ClientCall,
    ) -> Awaitable[AcceptedSignalResult]:
        return self._signals.send(request, definition, caller, joined)

    async def signal_many(
        self, items: Sequence[Outgoing], caller: Caller | None = None
    ) -> list[AcceptedSignalResult | CallerError]:
        """Send signals. Each is answered by itself, in order: with its result, or with the error that refuses it."""
        given: Any = items
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            raise InvalidInput(f"signals is a list of signals to send, not {given!r}", field="signals")
        if not self._middleware:
            return await self._signals.send_many(items, caller, self.ids)
        return [await self._send_one(item, caller) for item in items]

    async def _send_one(self, item: Outgoing, caller: Caller | None) -> AcceptedSignalResult | CallerError:
        """Send one of many signals through middleware."""

        async def then(_: Any) -> AcceptedSignalResult:
            [answer] = await self._signals.send_many([item], caller, self.ids)
            if isinstance(answer, CallerError):
                raise answer
            return answer

        try:
            asked = request_of(item, self.registry.values)
            call = ClientCall(
                verb="signal", run_id=asked.run_id, name=asked.name, caller=caller, raw_input=asked.payload
            )
            accepted: AcceptedSignalResult = await call_through(self._middleware, call, then)
            return accepted
        except CallerError as refusal:
            return refusal

    async def receipt(self, run_id: str, name: str, signal_id: str, storage_key: str | None = None) -> Receipt:
        """Return what happened to a signal: the one with this storage key, else the last with this name and id."""
        return await receipt_of(self.store, run_id, name, signal_id, storage_key)

    async def mailbox(self, run_id: str) -> list[Unconsumed]:
        """Return the signals that no wait has taken, oldest first, with their age."""
        return await mailbox_of(self.store, run_id)

    def waits(self, run_id: str | None = None, name: str | None = None) -> AsyncIterator[Wait]:
        """Iterate over the open waits: of a run, for a signal's name, or all."""
        return open_waits(self.store, run_id, name)

    # --- questions

    async def query(self, run_id: str, name: str, arguments: Raw, caller: Caller | None = None) -> Raw:
        """Ask a run about its present state. The node answers it from the run's program; nothing is recorded."""
        require_step_name("query name", name)
        if self._middleware:
            call = ClientCall(verb="query", run_id=run_id, name=name, caller=caller, raw_input=arguments)
            answer: Raw = await call_through(
                self._middleware, call, lambda _: self._query(run_id, name, arguments, caller)
            )
            return answer
        return await self._query(run_id, name, arguments, caller)

    async def _query(self, run_id: str, name: str, arguments: Raw, caller: Caller | None) -> Raw:
        if self._permissions.is_needed:
            await self._permissions.check_query(run_id, name, arguments, caller)
        cache = self._node.run_cache
        head = await cache.started(await head_of(self.store, run_id))
        if self._has_code(head):
            return await cache.query(head, name, arguments)
        try:
            return await self._remote.ask(head, name, arguments)
        except VersionMismatch:
            with suppress(VersionMismatch):
                return await cache.query(head, name, arguments)  # which is a Conflict if the run has not started
            raise

    async def handlers(self, run_id: str) -> Raw:
        """Return which queries and updates a run answers, with JSON Schemas: `{"queries": …, "updates": …}`."""
        head = await head_of(self.store, run_id)
        return await self._handlers(head) if self._has_code(head) else await self._remote.ask(head, "", e.NULL)

    async def _handlers(self, head: port.RunHead) -> Raw:
        definition = self.registry.workflows.get((head.plan_id, head.plan_version))
        if definition is None:
            return codec.encode({"queries": {}, "updates": {}})
        if not definition.queries and not definition.updates:
            await self._node.run_cache.examine(head)
        known = {"queries": definition.queries, "updates": definition.updates}
        return codec.encode({kind: _schemas(handlers) for kind, handlers in known.items()})

    def _has_code(self, head: port.RunHead) -> bool:
        """Return whether this process has what a run executes; of a plan the store has it."""
        plan = head.plan_id, head.plan_version
        return plan in self.registry.workflows or definition_of(*plan) == ANY_PLAN

    async def _answer_for_others(self, run_id: str, name: str, arguments: Raw) -> Raw:
        """Answer what another process asks; it has asked the authoriser."""
        head = await head_of(self.store, run_id)
        return await self._node.run_cache.query(head, name, arguments) if name else await self._handlers(head)

    async def update(
        self, run_id: str, name: str, arguments: Any, update_id: str | None = None, caller: Caller | None = None
    ) -> Raw:
        """Send an update to a run and wait for its answer. With an `update_id` a retry gets the first answer."""
        require_step_name("update name", name)
        if self._middleware:
            given = self.registry.values.encode(arguments)
            call = ClientCall(verb="update", run_id=run_id, name=name, caller=caller, raw_input=given)
            answer: Raw = await call_through(
                self._middleware, call, lambda _: self._update(run_id, name, arguments, update_id, caller)
            )
            return answer
        return await self._update(run_id, name, arguments, update_id, caller)

    async def _update(
        self, run_id: str, name: str, arguments: Any, update_id: str | None, caller: Caller | None
    ) -> Raw:
        request = SignalRequest(
            run_id=run_id,
            name=UPDATE_SIGNAL,
            payload=self.registry.values.encode({"name": name, "input": arguments}),
            signal_id=id_of_request(self.store, update_id, self.ids),
            audit=audit_entry(caller, self.ids.new_id, subject=name),
        )
        before = await head_of(self.store, run_id)
        if self._permissions.is_needed:
            await self._permissions.check_signal(request, caller)
        [answer] = await self.store.deliver([request])
        if isinstance(answer, port.Refused):
            raise answer.error
        assert answer.result is not None
        after = before.version if isinstance(answer, port.Accepted) else 0
        step_id = update_step_id(signal_uuid(answer.result.signal_storage_key))

        def is_answer(event: Event) -> bool:
            return event.step_id == step_id and isinstance(event.data, e.UpdateCompleted)

        body = (await wait_for_event(self.store, run_id, after, is_answer)).data
        assert isinstance(body, e.UpdateCompleted)
        if body.error is not None and body.error.code == RunTerminal.code:
            raise RunTerminal(f"run {run_id} ended before it had answered", run_id=run_id)
        if body.error is not None:
            raise UpdateFailed(f"update {name!r}: {body.error.code}: {body.error.message}", body.error)
        return body.result

    async def head(self, run_id: str) -> port.RunHead:
        """Return a run without its history."""
        return await head_of(self.store, run_id)

    async def events(self, run_id: str) -> list[Event]:
        """Return the whole history of a run."""
        events = await read_history(self.store, run_id)
        if not events:
            await head_of(self.store, run_id)  # raises: there is no run without events
        return events

    async def wait_finished(self, run_id: str, *, is_known: bool = False) -> Event:
        """Wait for a run to finish, on any node, and return its last event.

        With `is_known` this process has started it, so that whether it exists need not be looked up before.
        """
        node, waiters = self._node, self._node.completion_waiters
        if waiters.problem is not None and node.failure is None:
            return await self._last_event_after_close(run_id, waiters.problem)
        finished = waiters.wait(run_id)
        try:
            if not node.owned_runs.owns(run_id):
                finish = await waiters.end_of(run_id, is_known=is_known) or await finished
            else:
                finish = await finished
        finally:
            waiters.let_go(run_id, finished)
        return await self._event_at(run_id, finish.version) if finish.last is None else finish.last

    async def _last_event_after_close(self, run_id: str, problem: EngineError) -> Event:
        """Return the last event of a finished run after the node was stopped, if the store is still open."""
        try:
            head = await head_of(self.store, run_id)
        except StoreUnavailable as closed:
            none_open = f"no node is open: ask `app.run({run_id!r})` inside `async with app.node(...)`"
            raise EngineError(none_open) from closed
        if head.status not in TERMINAL:
            raise problem
        return await self._event_at(run_id, head.version)

    async def _event_at(self, run_id: str, version: int) -> Event:
        [event] = await self.store.read_events(run_id, version - 1)
        return event

    # --- artifacts

    def open_artifact(self, artifact: e.ArtifactRef) -> AsyncIterator[bytes]:
        """Yield the bytes of an artifact. `ArtifactCorrupt` is raised at the end, if they are not what was stored."""
        if self.artifacts is None:
            raise ArtifactMissing("this process has no artifact store", uri=artifact.uri)
        return self.artifacts.open(artifact)

    # --- operators and people

    async def command(
        self, run_id: str, command: OperatorCommand, caller: Caller | None = None, *, wait: bool = False
    ) -> None:
        """Send an operator's command. It is durable when this returns; with `wait`, the run has decided.

        A rejection by the run is `Conflict`, with the reason; one by the authoriser is `NotPermitted`.
        """
        if not self._middleware:
            await self._commands.send(run_id, command, caller, wait=wait)
            return
        call = ClientCall(verb="command", run_id=run_id, name=command.name, caller=caller)
        await call_through(self._middleware, call, lambda _: self._commands.send(run_id, command, caller, wait=wait))

    async def _cancel_stale(self, run_id: str, reason: str) -> None:
        await self.command(run_id, OperatorCommand(name="CANCEL", reason=reason, actor="retention"))

    async def retry_run(
        self, run_id: str, command: OperatorCommand, caller: Caller | None = None, *, from_start: bool = False
    ) -> str:
        """Do a finished run again, as a new run; return its id. An unfinished one: `Conflict`.

        A failed run goes on from the step that failed, unless `from_start`.
        """
        return await self._forks.retry_run(run_id, command, caller, self._node.name, from_start=from_start)

    async def fork_run(
        self,
        run_id: str,
        command: OperatorCommand,
        caller: Caller | None = None,
        *,
        at: int | None = None,
        input: Raw | None = None,
        request_id: str = "",
    ) -> tuple[str, int]:
        """Start a run with the recorded results of another up to an event; return its id, and which event that is."""
        return await self._forks.fork_run(
            run_id, at, caller, self._node.name, request_id=request_id, input=input, command=command
        )

    def tasks(self, caller: Caller | None = None, store: port.Store | None = None) -> Tasks:
        """Return the tasks of all runs; with a `store`, of the runs that are seen through it."""
        return Tasks(store or self.store, self.registry, self._permissions, self.ids, caller)

    async def dead_letters(self, query: DeadLetterQuery) -> list[DeadLetterHandle]:
        """Return the dead letters that a query names, the oldest first."""
        return await find_dead_letters(self.store, query)

    async def settle_dead_letter(
        self, letter_id: str, action: Settlement, *, actor: str = "", caller: Caller | None = None
    ) -> None:
        """Requeue a dead letter, or drop it."""
        audit = audit_entry(caller, self.ids.new_id, actor=actor)
        await settle_dead_letter(self.store, letter_id, action, actor, audit)

    # --- activities that are completed later

    def activity_token(self, token: str) -> ActivityToken:
        """Return what a completion token stands for; raise `InvalidInput` if it was not made here."""
        return read_activity_token(token, self._node.completion_key)

    async def complete_activity(
        self, token: str, result: Any, *, actor: str = "", caller: Caller | None = None
    ) -> None:
        """Report the result of an activity that ended by `complete_later`. When this returns it is durable."""
        audit = self._audit_outcome(token, actor, caller)
        await report_result(self.store, self._node.completion_key, token, result, self.limits, self.registry, audit)

    async def fail_activity(
        self, token: str, error: BaseException | str, *, actor: str = "", caller: Caller | None = None
    ) -> None:
        """Report that such an activity has failed. When this returns it is durable."""
        audit = self._audit_outcome(token, actor, caller)
        await report_error(self.store, self._node.completion_key, token, error, self.registry, audit)

    async def heartbeat_activity(self, token: str) -> None:
        """Report that who answers a callback is still at it."""
        await report_heartbeat(self.store, self._node.completion_key, token)

    def _audit_outcome(self, token: str, actor: str, caller: Caller | None) -> AuditEntry | None:
        if caller is None:
            return None
        return audit_entry(caller, self.ids.new_id, actor=actor, subject=self.activity_token(token).step_id)


class OpenRuntimes:
    """The runtimes of an app that are open, each with the event loop in which it was opened."""

    def __init__(self) -> None:
        self._open: list[tuple[asyncio.AbstractEventLoop, Runtime]] = []
        self.tested: port.Store | None = None
        """The store of the `TestNode` that is open, if one is. No other store is opened meanwhile."""

    def check_store(self, store: object) -> None:
        """Refuse to open another store than that of the open `TestNode`: the test would leave it unnoticed."""
        if self.tested is not None and store is not self.tested:
            text = "a TestNode of this app is open, and calls would go to another store: open one or the other"
            raise InvalidInput(text, field="store")

    def add(self, runtime: Runtime) -> None:
        """Note that a runtime was opened in the running event loop."""
        self._open.append((asyncio.get_running_loop(), runtime))

    def remove(self, runtime: Runtime) -> None:
        """Note that a runtime is being closed."""
        self._open = [each for each in self._open if each[1] is not runtime]

    def has(self, runtime: Runtime) -> bool:
        """Return whether this runtime is still open."""
        return any(opened is runtime for _, opened in self._open)

    def current(self) -> Runtime | None:
        """Return the runtime that was opened last in the running event loop; without such a loop, the last of all."""
        if len(self._open) > 1:
            running = asyncio._get_running_loop()
            for loop, runtime in reversed(self._open):
                if loop is running:
                    return runtime
        return self._open[-1][1] if self._open else None


def _schemas(handlers: Mapping[str, Signature]) -> dict[str, dict[str, Any]]:
    """Return what handlers take and give, by their names."""
    found = {name: signature.schemas() for name, signature in sorted(handlers.items())}
    return {name: {"input": input, "result": result} for name, (input, result) in found.items()}


def _starting_activity(runtime: "ref[Runtime]") -> ActivityDefinition:
    """Return the activity that starts runs for workflows. It does not keep its runtime alive."""

    async def start_run(request: StartRequest) -> str:
        found = runtime()
        if found is None:
            raise StoreUnavailable("the node was closed before the run was started")
        return await found.start_for_run(request)

    return built_in(start_run, START_RUN)


async def _await_callback(terms: CallbackTerms) -> Any:
    """End without an outcome: that of a callback is reported by its token."""
    activity_context().complete_later()


def _updating_activity(runtime: "ref[Runtime]") -> ActivityDefinition:
    """Return the activity that updates runs for workflows."""

    async def update_run(request: UpdateRequest) -> Any:
        found = runtime()
        if found is None:
            raise StoreUnavailable("the node was closed before the update was answered")
        return codec.decode(await found.update_for_run(request), Any)

    return built_in(update_run, UPDATE_RUN)


def _with_warning(delivered: port.Delivered, warning: str) -> port.Delivered:
    """Return the answer to a signal with a warning for its sender, if it was accepted."""
    if isinstance(delivered, port.Refused) or delivered.result is None:
        return delivered
    return replace(delivered, result=replace(delivered.result, warning=warning))
