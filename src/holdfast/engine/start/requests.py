"""Start requests: what a caller asks for, and the run that is created for it.

`StartOptions` are the options of a start besides the workflow and its input. `StartRequests` checks them, asks the
authoriser, makes the run (`NewRun`) and has it created: by the node's `Starter`, or for any node if the run starts
later, or within a transaction of the caller. How runs are created and begin is in `starter.py`; how they are admitted
is in `admission.py`.
"""

from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, Literal, get_args
from weakref import ref

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.clock import Ids
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.attributes import Attributes, to_parts, to_values
from holdfast.core.audit import Caller, audit_entry
from holdfast.core.debounce import Debounce, check_debounce, debounced_id
from holdfast.core.instants import Instant
from holdfast.core.keys import ANY_VERSION, check_name, check_tag
from holdfast.core.plans import workflow_of
from holdfast.core.restarts import check_reused_id
from holdfast.core.schedules import Schedule
from holdfast.engine.activities.context import CONTEXT, activity_context
from holdfast.engine.history import head_of
from holdfast.engine.inbox.authorization import Permissions
from holdfast.engine.inbox.declarations import declared_by
from holdfast.engine.inbox.operator_commands import CommandSender, OperatorCommand
from holdfast.engine.inbox.signals import FirstSignal, SignalSender, audited, first_signal
from holdfast.engine.node import Node
from holdfast.engine.plans import Plans
from holdfast.engine.run_context import BOUND, context_of_start
from holdfast.engine.schedules import tags_of
from holdfast.engine.turns.draft import debounced, held_until, prepare_run, renamed, start_key
from holdfast.errors import (
    CallerError,
    InvalidInput,
    NotFound,
    RunTerminal,
    StoreUnavailable,
)
from holdfast.limits import DURATION_MS, PRIORITY, TAGS
from holdfast.program.definitions import (
    START_RUN,
    ActivityDefinition,
    ExternalWorkflow,
    StartRequest,
    WorkflowDefinition,
    built_in,
)
from holdfast.program.middleware import ClientCall, call_through
from holdfast.program.plan.definition import PlanDefinition
from holdfast.registry import Registry
from holdfast.store import port
from holdfast.store.joined import JoinedStore
from holdfast.store.validation import id_of_request, require_for_signals


class StartOptions(Struct, frozen=True, gc=False):
    """How a run is started, besides its workflow and input.

    A request with the same `request_id` gives the same run, within tenant, project, environment and workflow; with
    `names_version` the version of the workflow is a part of the request too. `with_signal` is in the run's mailbox from
    its beginning. `priority` is the order in which runs of a workflow with limits are admitted, higher first. With
    `at`, or `after_ms` from now, the run is created immediately and starts then. `timeouts` limit how long it may take.
    `reuse` decides what happens if a `run_id` is taken (QUE-5); without it, the id is used as the `request_id`. With
    `debounce`, a start for a key that has a run which has not begun gives that run a new input. `context` is passed on
    to everything that the run starts, together with what is bound around the start (`bind_context`).
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
        """Raise `InvalidInput` if these options are malformed or contradict each other."""
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
        for tag in tags if isinstance(tags, tuple) else ():
            problem = check_tag(tag)
            if problem is not None:
                raise problem
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
        """Raise `InvalidInput` if a start with these options cannot be debounced."""
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
    """A run that exists now, through this request or an earlier one, and the answers to its first signals."""

    run_id: str
    workflow_version: str
    """The version that it was started with: that of the earlier request, if there was one."""
    signals: tuple[port.Delivered, ...] = ()
    is_reused: bool = False
    """Whether another request for the same id has started it."""


class StartRequests:
    """Starts runs for callers, for workflows, for schedules, and for commands that retry a run."""

    def __init__(
        self,
        store: port.Store,
        node: Node,
        registry: Registry,
        permissions: Permissions,
        signals: SignalSender,
        commands: CommandSender,
        plans: Plans,
        ids: Ids,
    ) -> None:
        self._store = store
        self._node = node
        self._registry = registry
        self._middleware = registry.middleware.client
        self._permissions = permissions
        self._signals = signals
        self._commands = commands
        self._plans = plans
        self._ids = ids
        self._published = -1

    async def publish(self) -> None:
        """Publish the signal declarations of the workflows. A change in their number means that one is new."""
        workflows = len(self._registry.workflows)
        await self._signals.declarations.publish(self._registry.workflow_limits)
        self._published = workflows

    def start(
        self,
        definition: WorkflowDefinition | PlanDefinition,
        input: Raw,
        options: StartOptions = PLAIN,
        caller: Caller | None = None,
        uri: str = "",
        connection: Any = None,
    ) -> Coroutine[Any, Any, Started]:
        """Start a run with this input, which matches the definition. It is durable when this returns.

        The body of a plan is in the store already; `uri` is its source. With a `connection` the run is written in the
        transaction that the caller has begun there: it is durable, and begins, when that is committed.
        """
        # A nested function here would give each start seven cells, and the garbage collector traverses everything that
        # waits.
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
        node, joined = self._node, None if connection is None else self._store.joined(connection)
        if node.failure is not None:
            raise node.failure
        if options != PLAIN:
            options.check()
        codec.bounded(input, node.limits.value_bytes, f"the input of {definition.name!r}")
        queued = self._queued(definition, input, options, caller, uri)
        if self._permissions.is_needed:
            await self._permissions.check_start(queued, options.run_id, caller)
        if len(self._registry.workflows) != self._published and joined is None:  # one was registered after the opening
            await self.publish()  # not within a transaction of the caller, which may have locked the store
        now = await self._store.now()
        debounce = options.debounce
        run_id = options.run_id or (self._ids.new_id() if debounce is None else debounced_id(debounce.key, queued))
        key = self._key(run_id, queued, options)
        new = prepare_run(
            run_id, queued, now, node.name, reference_key=options.reference_key, tags=options.tags, key=key
        )
        if caller is not None:
            new = replace(new, audit=audit_entry(caller, self._ids.new_id, subject=queued.plan_id))
        warning = None
        if options.with_signal is not None:
            new, warning = await self._with_signal(new, queued, definition, options, caller)
        if isinstance(definition, ExternalWorkflow):
            new = await self._external(new, options.priority)
        elif self._registry.workflow_limits or self._registry.approvals:
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
        """Return the first event of a run, with the options of its start."""
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
        """Return the answers to the signals of a start. Signals that the run did not take are sent now."""
        if not answer.signals:  # the run has another version, and the declaration of that version decides
            sent = [replace(signal, run_id=answer.run_id) for signal in new.signals]
            return tuple([port.Accepted(await self._signals.send(signal, None, caller, joined)) for signal in sent])
        return tuple(_with_warning(each, warning) for each in answer.signals) if warning else answer.signals

    def _key(self, run_id: str, queued: e.RunQueued, options: StartOptions) -> str | None:
        """Return the key that recognises a retry of a start; None if it follows from the version and the run's id.

        If the id may be reused, it does not replace the request id: each call without a `request_id` is a new request.
        """
        if options.reuse is not None or options.debounce is not None:
            run_id = self._ids.new_id()
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
        """Create a run with an id that may be taken. The store decides, and returns the id of the next run."""
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
        """Create a run that no node owns yet: it starts later, or when the caller commits their transaction.

        Its workflow cannot be looked up before that commit.
        """
        new = new if start_at is None else held_until(new, start_at)
        if joined is None:
            [answer] = await self._store.create([new])
            return answer
        [answer] = await joined.create([new])
        if isinstance(answer, port.Created):
            self._signals.declarations.remember(new)
        return answer

    async def _version_of(self, answer: port.Created | port.Existing, version: str) -> str:
        """Return this version, or the version of the existing run: an earlier release may have started it."""
        if isinstance(answer, port.Created):
            return version
        [existing] = await self._store.load([answer.run_id])
        return version if existing is None else existing.head.plan_version

    async def _external(self, new: port.NewRun, priority: int) -> port.NewRun:
        """Return a run of a workflow that only other apps have, as that workflow declares; raise if no node ever had
        it.
        """
        [declared] = await self._store.find_definitions([(new.plan_id, new.plan_version)])
        if declared is None:
            problem = f"no node has published version {new.plan_version!r} of workflow {new.plan_id!r}"
            raise NotFound(problem, workflow=new.plan_id, version=new.plan_version)
        [new] = await self._node.run_queue.as_declared([new], {new.run_id: priority})
        return new

    async def start_for_run(self, request: StartRequest) -> str:
        """Start a run on behalf of a workflow, in the same tenant, project and environment, as an independent run."""
        head = await head_of(self._store, activity_context().run_id)
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
            plan, uri = await self._plans.resolve(head.tenant, request.plan)
            given = plan.check_inputs(codec.decode(request.input, dict[str, Any]))
            return (await self.start(plan, self._registry.values.encode(given), options, uri=uri)).run_id
        version = request.version
        is_here = version is None or (request.workflow, version) in self._registry.workflows
        if version is not None and not is_here:
            values = self._registry.values
            definition: WorkflowDefinition = ExternalWorkflow(request.workflow, None, version, values)
        else:
            definition = self._registry.workflow(request.workflow, version)
        definition.signature.unpack(request.input)
        return (await self.start(definition, request.input, options)).run_id

    def _attributes(self, options: StartOptions) -> Attributes:
        """Return the search attributes of a run, including the parts of its reference."""
        if not options.attributes and not options.reference_parts:
            return {}
        return {**to_values(options.attributes, self._registry.attributes), **to_parts(options.reference_parts)}

    def prepare_tick(self, queued: e.RunQueued, schedule: Schedule, tick: Instant) -> port.NewRun:
        """Return the run for a tick of a schedule."""
        run_id = self._ids.new_id()
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

    async def permit_start(self, queued: e.RunQueued, caller: Caller | None) -> None:
        """Ask the authoriser whether the caller may have such runs started later."""
        if self._permissions.is_needed:
            await self._permissions.check_start(queued, None, caller)

    async def _with_signal(
        self,
        new: port.NewRun,
        queued: e.RunQueued,
        definition: WorkflowDefinition | PlanDefinition,
        options: StartOptions,
        caller: Caller | None,
    ) -> tuple[port.NewRun, str | None]:
        """Return the run with its first signal, and a warning for the sender.

        The signal has an id, so that it can be sent again after an error. If it does not match the declarations of this
        version, no run is created with it; an existing run of the same request with another version may take it.
        """
        assert options.with_signal is not None
        signal = first_signal(new.run_id, options.with_signal, self._registry.values)
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
        require_for_signals(self._store, [signal])  # before it shares a transaction with starts that need no support
        signal_id = id_of_request(self._store, signal.signal_id, self._ids)
        is_unlimited = declared is not None and declared.is_entity
        signal = audited(replace(signal, signal_id=signal_id, is_unlimited=is_unlimited), caller, self._ids)
        if self._permissions.is_needed:
            await self._permissions.check_first_signal(signal, queued, options.run_id, caller)
        return replace(new, signals=(signal,), unfit=unfit), warning

    async def create_again(self, new: port.NewRun, now: Instant) -> port.Created | port.Existing | port.Refused:
        """Create a run that retries another one: here, or for a node that has its definition."""
        node = self._node
        new = node.run_queue.with_admission(new)
        if not node.definition_filter.has(new.plan_id, new.plan_version):
            [answer] = await self._store.create([new])
            return answer
        created = await node.starter.create(new, now)
        node.run_queue.notice_start(new)
        return created


def starting_activity(requests: "ref[StartRequests]") -> ActivityDefinition:
    """Return the activity that starts runs on behalf of workflows. It does not keep the requests alive."""

    async def start_run(request: StartRequest) -> str:
        found = requests()
        if found is None:
            raise StoreUnavailable("the node was closed before the run was started")
        return await found.start_for_run(request)

    return built_in(start_run, START_RUN)


def _with_warning(delivered: port.Delivered, warning: str) -> port.Delivered:
    """Return the answer to a signal with a warning for its sender, if it was accepted."""
    if isinstance(delivered, port.Refused) or delivered.result is None:
        return delivered
    return replace(delivered, result=replace(delivered.result, warning=warning))
