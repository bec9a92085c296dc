"""Workflows written as `async def`: outcomes in, commands out.

A `CoroutineProgram` is one run of one workflow function, on its own deterministic loop. It takes one outcome at a time
(an event that something has ended), runs until nothing is ready, and returns the commands that were issued on the way.
It knows nothing of histories, stores or nodes: a replay gives it the same outcomes again.

A step is named by what it does and a count: `charge`, `charge#2`. After a rotation the names start again under a
prefix, because a step's name is unique in the whole run.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from types import MappingProxyType
from typing import Any

from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from holdfast.clock import Random, seeded
from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import messages as m
from holdfast.core.attributes import to_changes, to_values
from holdfast.core.events import NULL, ErrorInfo, Event
from holdfast.core.instants import Instant
from holdfast.core.keys import fitting_id
from holdfast.core.plans import STORE_PLAN, PlanRef, workflow_of
from holdfast.core.state import carried_updates
from holdfast.core.timing import retry_delay_ms
from holdfast.errors import (
    ActivityFailed,
    ChildFailed,
    InvalidInput,
    NondeterminismError,
    NotDurable,
    NotFound,
    PayloadTooLarge,
    QueryFailed,
    RunError,
    StartRefused,
)
from holdfast.limits import (
    DURATION_MS,
    ERROR_TEXT_CHARS,
    EVENT_BYTES,
    NESTED_RUNS,
    PUBLISHED_BYTES,
    SIGNAL_ID_BYTES,
    Limits,
)
from holdfast.program.definitions import (
    PLAIN_CALL,
    START_RUN,
    STARTING_A_RUN,
    STORING_A_PLAN,
    UPDATE_RUN,
    ActivityDefinition,
    CallOptions,
    ChildOptions,
    StartRequest,
    UpdateRequest,
    WorkflowDefinition,
    decode_options,
    encode_options,
    note_handler,
    scoped_child_run_id,
)
from holdfast.program.loop import DeterministicLoop, StepFuture, Timer, Watch, current_loop, running, settle
from holdfast.program.middleware import WorkflowCall, call_through
from holdfast.program.outcomes import (
    Handler,
    Received,
    UpdateHandler,
    answer_of,
    error_bytes,
    error_info,
    fails_on_none,
    is_failure,
    raised_outcome,
    recorded,
    rotates,
    stuck,
    unhandled,
)
from holdfast.program.port import EndDeferred
from holdfast.program.read_only import read_only
from holdfast.program.source import awaiting_line, calling_line, first_line, waiting_line
from holdfast.program.values import Signature

Query = Callable[..., Any]

DEFERRED = "deferred"
"""The name of the marker that records where the end of a function waits for updates."""

_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_NO_STEPS: frozenset[str] = frozenset()

_ANSWERING: ContextVar[str | None] = ContextVar("_ANSWERING", default=None)
"""The update whose handler is running, or whose handler created the running task."""

_SCOPE: ContextVar[str] = ContextVar("_SCOPE", default="")
"""The prefix of step names, set by `hf.scope`."""


class RunAbout(Struct, frozen=True, gc=False):
    """What a program can ask about its run, in addition to its constructor arguments."""

    parent_run_id: str | None = None
    origin: e.RunOrigin | None = None
    started_at: Instant = 0
    context: Raw = NULL
    run_id: str = ""
    """The id of another run, while a fork replays what that run recorded."""


_UNKNOWN = RunAbout()


class CoroutineProgram:
    """One run of a workflow function."""

    __slots__ = (
        "_answering",
        "_awaited_children",
        "_bytes",
        "_commands",
        "_counts",
        "_deferred",
        "_input",
        "_is_cancelling",
        "_is_done",
        "_is_given_up",
        "_late",
        "_main",
        "_noted",
        "_owned",
        "_patches",
        "_prefix",
        "_random",
        "_reason",
        "_rotating",
        "_rotation_points",
        "_signatures",
        "_steps",
        "_stopped",
        "_timers",
        "_waiting",
        "about",
        "accepts_end",
        "conditions",
        "definition",
        "depth",
        "handlers",
        "is_replaying",
        "kinds",
        "known_markers",
        "limits",
        "loop",
        "lost_waits",
        "open_sagas",
        "problem",
        "queries",
        "run_id",
        "seed",
        "skipped",
        "stream_names",
        "stream_writes",
        "updates",
        "watch",
    )

    def __init__(
        self,
        definition: WorkflowDefinition,
        run_id: str,
        input: Raw,
        rotation: int,
        depth: int,
        limits: Limits,
        most_callbacks: int,
        turn_s: float | None,
    ) -> None:
        self.definition = definition
        self.run_id = run_id
        self.depth = depth
        self.seed = f"{run_id}|{rotation}"
        self.watch = Watch(turn_s, run_id, definition.name)
        number = codec.number_of(self.seed)
        self.loop = DeterministicLoop(self, most_callbacks, number, self.watch)  # type: ignore[abstract]
        self.queries: Mapping[str, Query] = _NOTHING  # rarely used, so created on first use
        self.updates: Mapping[str, UpdateHandler] = _NOTHING
        self.conditions: list[tuple[Callable[[], bool], asyncio.Future[None]]] | None = None
        self.known_markers: Mapping[str, Raw] = _NOTHING
        self.is_replaying = False
        self.accepts_end = False
        self.problem: RunError | None = None
        self.open_sagas = 0
        self.lost_waits = _NO_STEPS
        self.stream_names: set[str] | None = None
        self.stream_writes: list[tuple[str, bytes, bool]] | None = None
        self.skipped: tuple[str, ...] = ()
        """Tasks and waits that operators have skipped: the workflow got None instead of an answer."""
        self.limits = limits
        self.about = _UNKNOWN
        self.handlers: dict[str, Handler] = {}
        self.kinds: dict[str, Any] = {}
        self._rotation_points = 0
        self._steps = 0
        self._bytes = 0
        self._random: Random | None = None
        self._patches: Mapping[str, bool] = _NOTHING
        self._input = input
        self._prefix = f"{rotation}/" if rotation else ""
        self._counts: dict[str, int] = {}
        self._commands: dict[str, c.Command] = {}
        self._waiting: dict[str, StepFuture] = {}
        self._timers: dict[str, Timer] = {}
        self._answering: Mapping[str, asyncio.Task[Any]] = _NOTHING
        self._awaited_children: set[str] | None = None
        self._main: asyncio.Task[Any] | None = None
        self._is_done = False
        self._is_cancelling = False
        self._is_given_up = False
        self._reason = ""
        self._stopped: Mapping[asyncio.Future[None], RunError] = _NOTHING
        self._rotating: asyncio.Task[Any] | None = None
        self._late: Mapping[str, asyncio.Task[Any]] = _NOTHING
        self._owned: dict[str, tuple[str, bool]] | None = None
        self._deferred: Mapping[int, bool] = _NOTHING
        self._noted = 0
        self._signatures: dict[str, Signature] | None = None

    # --- called by the engine

    def handle(self, event: Event) -> list[c.Command]:
        """Take an outcome, run until nothing is ready, and return the commands that were issued."""
        self.loop.now = event.emitted_at
        take = ON_EVENT.get(type(event.data))
        if take is not None and not self._is_done:
            take(self, event)
            self._run()
        commands, self._commands = list(self._commands.values()), {}
        return commands

    def arranged(self, outcomes: list[Event]) -> list[Event]:
        """Return outcomes in the order in which they were recorded."""
        return outcomes

    def query(self, name: str, arguments: Raw) -> Raw:
        """Answer a query, without changing anything."""
        handler = self.queries.get(name)
        if handler is None:
            raise NotFound(f"run {self.run_id} answers no query {name!r}; it answers {sorted(self.queries) or 'none'}")
        unpacked = Signature(handler, f"query {name!r}", values=self.definition.values).unpack(arguments)
        try:
            with read_only(f"query {name!r}"):
                answer = self.watch.run(lambda: self.definition.values.encode(handler(**unpacked)))
            self.bounded(answer, f"the answer of query {name!r}")
        except (RunError, PayloadTooLarge):
            raise
        except Exception as problem:
            raise QueryFailed(
                f"query {name!r} raised {type(problem).__qualname__}: {str(problem)[:ERROR_TEXT_CHARS]}",
                run_id=self.run_id,
                error=type(problem).__qualname__,
            ) from problem
        if self._commands or self.loop.is_stirred:
            raise NotDurable(f"query {name!r} changed something; a query is read-only")
        return answer

    def misfit_of(self, step_id: str, payload: Raw) -> str | None:
        """Return why a wait does not accept this payload, or None. The text reveals nothing of the payload."""
        if step_id not in self.kinds:
            return None
        try:
            self.definition.values.decode(payload, self.kinds[step_id])
            return None
        except InvalidInput as problem:
            where, reason = codec.explain_unfit(problem.__cause__ or problem)
            return f"payload{where}: {reason}"

    def receive(self, step_id: str, payload: Raw) -> Received | None:
        """Apply the handler of a wait to a signal, and return its result; None if the wait has no handler."""
        handler = self.handlers.get(step_id)
        if handler is None:
            return None
        with read_only(f"the handler of step {step_id!r}"):
            received = handler.apply(payload, self.watch)
        if self._commands or self.loop.is_stirred:
            raise NotDurable(f"the handler of step {step_id!r} changed something; a handler is read-only")
        return received

    def refusal_of(self, name: str, input: Raw) -> ErrorInfo | None:
        """Return why an update is not accepted, or None. Called once, before it is recorded; never at replay."""
        handler = self.updates.get(name)
        if handler is None:
            return error_info(self._unknown_update(name))
        with read_only(f"the validator of update {name!r}"):
            refusal = handler.refusal_of(input, self.watch)
        if self._commands or self.loop.is_stirred:
            raise NotDurable(f"the validator of update {name!r} changed something; a validator is read-only")
        return refusal

    def _unknown_update(self, name: str) -> NotFound:
        return NotFound(f"run {self.run_id} takes no update {name!r}; it takes {sorted(self.updates)}")

    def has_recorded_input(self, command: c.RunActivity | c.StartChild, recorded: Raw) -> bool:
        """Return whether a step has the recorded input, regardless of its JSON formatting; at replay only.

        Both are decoded with the current parameters: omitted ones have their defaults, and sets have no order.
        """
        signature = self._signatures.pop(command.step_id, None) if self._signatures else None
        if bytes(command.input) == bytes(recorded):
            return True
        if signature is None:
            asked, known = codec.decode(command.input, Any), codec.decode(recorded, Any)
            return bool(asked == known) or self._is_request_of_original(command, asked, known)
        try:
            return signature.unpack(command.input) == signature.unpack(recorded)
        except InvalidInput:  # parameters that were removed, or now have another type
            return False

    def _is_request_of_original(self, command: c.RunActivity | c.StartChild, asked: Any, known: Any) -> bool:
        """Return whether a start or an update differs only by the id that its run gave it, as in the history of a fork.

        A fork has the recorded calls of its original, with the ids that the original assigned.
        """
        field, own_id = self._own_id(command.step_id, getattr(command, "name", ""))
        if not field or asked["request"].pop(field, "") != own_id:
            return False
        given = known["request"].pop(field, "")
        is_given_by_a_run = len(given) == len(own_id) and given.rpartition(":")[0] == own_id.rpartition(":")[0]
        return is_given_by_a_run and bool(asked == known)

    def _own_id(self, step_id: str, activity: str) -> tuple[str, str]:
        """Return the field and the id that this run gives a start or an update: by its step, the same on replay."""
        digest = codec.digest(f"{self.run_id}/{step_id}".encode())
        named = {START_RUN: ("request_id", f"{START_RUN}:{digest}"), UPDATE_RUN: ("update_id", digest)}
        return named.get(activity, ("", ""))

    def where(self, command: c.Command | None, event: Event | None = None) -> str:
        """Return the line of source that opened a step; for any other command, the line where the program waits."""
        step_id = getattr(command, "step_id", "")
        future, timer = self._waiting.get(step_id), self._timers.get(step_id)
        line = timer.asked_at if timer is not None else awaiting_line(future) if future is not None else None
        return f" at {line or waiting_line(self._main) or first_line(self.definition.function)}"

    def close(self) -> None:
        """Close the coroutines without running them any further."""
        self.loop.dispose()
        self.loop = _CLOSED  # leaves nothing to the garbage collector; code that still runs finds its own loop closed
        self._main = self._rotating = None
        self._waiting = {}
        self._timers = {}
        self.conditions = None
        self.queries = self.updates = self._answering = self._late = _NOTHING
        self.handlers, self.kinds = {}, {}

    # --- called by the workflow, through `holdfast.program.api`

    async def run_activity(
        self,
        activity: ActivityDefinition,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        queue: str,
        options: Raw,
        call: CallOptions = PLAIN_CALL,
    ) -> Any:
        """Run an activity as a step, and return its result."""
        input = activity.signature.pack(args, kwargs)
        if len(input) > self.limits.value_bytes:  # checked here first, because most are small
            self.bounded(input, f"the input of activity {activity.name!r}")
        self._bytes += len(input)
        step_id = self.name_step(call.name or activity.name)
        idempotency_key = call.idempotency_key
        if self.is_replaying:
            self._note_signature(step_id, activity.signature)
        if idempotency_key is None and activity.key_function is not None and step_id not in self.known_markers:
            idempotency_key = activity.key_of(input)  # computed once: if the history has the step, it has its key
        if activity.limited is not None:
            limited = activity.limited.applied(decode_options(options), input)
            queue, options = limited.queue, encode_options(limited)
        command = c.RunActivity(
            name=activity.name,
            input=input,
            step_id=step_id,
            queue=queue,
            idempotency_key=idempotency_key,
            options=options,
        )
        future = self.step(command)
        if activity.raises:
            return activity.signature.result_of(await self._declared(activity, future, call))
        return activity.signature.result_of(await (future if call.cancel == "now" else self._outcome_of(future)))

    async def _declared(self, activity: ActivityDefinition, future: StepFuture, call: CallOptions) -> Raw | None:
        """Wait for the outcome of a step whose failure can be caught by its declared class."""
        try:
            return await (future if call.cancel == "now" else self._outcome_of(future))
        except ActivityFailed as problem:
            declared = activity.as_declared(problem)
            if declared is problem:
                raise
            raise declared from None

    async def _outcome_of(self, future: StepFuture, cancel: Callable[[str], None] | None = None) -> Raw | None:
        """Wait for the outcome of a step even if the wait is cancelled; then continue the cancellation.

        A result is returned, and the task is cancelled where the code waits next. A failure gives way to the
        cancellation. `cancel` is called once, with the reason, when the cancellation is requested.
        """
        asked: asyncio.CancelledError | None = None
        while not future.done():
            waiter: asyncio.Future[None] = self.loop.create_future()
            wake = partial(_wake, waiter)
            future.add_done_callback(wake)
            try:
                await waiter
            except asyncio.CancelledError as problem:
                if asked is None and cancel is not None and not future.done():
                    cancel(str(problem.args[0]) if problem.args else "")
                asked = problem
            finally:
                future.remove_done_callback(wake)
        if asked is None:
            return future.result()  # type: ignore[no-any-return]
        problem_of_step = future.exception()
        if problem_of_step is not None:
            raise asked from problem_of_step
        task = asyncio.current_task()
        assert task is not None
        self.loop.call_soon(_cancel_again, task, asked.args[0] if asked.args else None)
        return future.result()  # type: ignore[no-any-return]

    async def run_child(
        self, child: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any], call: ChildOptions
    ) -> Any:
        """Start another run, and return its result."""
        command, future = self._open_child(child, child.signature.pack(args, kwargs), call, 1)
        return await self._child_result(child, command, future, call)

    def start_child(
        self, child: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any], call: ChildOptions
    ) -> tuple[str, asyncio.Task[Any]]:
        """Start another run; return its id, and the task that waits for its result."""
        command, future = self._open_child(child, child.signature.pack(args, kwargs), call, 1)
        waiting = self._child_result(child, command, future, call)
        return command.child_run_id, self.loop.create_task(waiting, name=f"child {command.step_id}")

    def _open_child(
        self, child: WorkflowDefinition, input: Raw, call: ChildOptions, attempt: int
    ) -> tuple[c.StartChild, StepFuture]:
        self.bounded(input, f"the input of {child.name!r}")
        if self.depth >= NESTED_RUNS:
            raise InvalidInput(f"runs are nested at most {NESTED_RUNS} deep")
        step_id = self.name_step(call.name or child.name)
        if self.is_replaying:
            self._note_signature(step_id, child.signature)
        self._bytes += len(input)
        if call.close_policy == "await":
            self._awaited_children = self._awaited_children or set()
            self._awaited_children.add(step_id)
        run_id = call.run_id and (call.run_id if attempt == 1 else f"{call.run_id}-{attempt}")
        command = c.StartChild(
            step_id=step_id,
            child_run_id=run_id or self._child_run_id(step_id),
            plan_id=child.name,
            plan_version=child.version,
            input=input,
            close_policy=call.close_policy,
            attributes=to_values(call.attributes, child.attributes) if call.attributes else {},
            tags=call.tags,
            priority=call.priority,
            timeouts=call.timeouts,
        )
        return command, self.step(command)

    def _child_run_id(self, step_id: str) -> str:
        """Return the id of the run that a step starts. A run that is in the history keeps its recorded id."""
        recorded = self.known_markers.get(step_id, NULL)
        if recorded != NULL:
            return codec.decode(recorded, str)
        return scoped_child_run_id(self.run_id, self._prefix, step_id.removeprefix(self._prefix))

    async def _child_result(
        self, child: WorkflowDefinition, command: c.StartChild, future: StepFuture, call: ChildOptions
    ) -> Any:
        """Return the result of a child; if it has failed, start another one as the policy allows."""
        attempt = 1
        while True:
            try:
                if call.cancel == "now":
                    return child.signature.result_of(await future)
                return child.signature.result_of(await self._outcome_of(future, partial(self._cancel_child, command)))
            except ChildFailed as problem:
                if call.retry is None or problem.info.code == "RunCancelled":
                    raise
                error = replace(problem.info, retryable=True)
                delay_ms = retry_delay_ms(call.retry, attempt, error, self.random.random())
                if delay_ms is None:
                    raise
            attempt += 1
            if delay_ms:
                due_at = self.now() + delay_ms * 1_000
                await self.step(c.StartTimer(step_id=self.name_step(f"retry:{child.name}"), due_at=due_at))
            command, future = self._open_child(child, command.input, call, attempt)

    def _cancel_child(self, child: c.StartChild, reason: str) -> None:
        """Request the cancellation of a child while its outcome is awaited; one that has not started is not started."""
        step_id, run_id = child.step_id, child.child_run_id
        if self._commands.pop(step_id, None) is not None:
            self._steps -= 1
            future = self._waiting.pop(step_id)
            error = ErrorInfo("RunCancelled", f"run {run_id} was cancelled before it was started")
            future.set_exception(ChildFailed(f"child {step_id}: {error}", error))
            return
        asked_as = fitting_id(f"cancel asked by {self.run_id}", SIGNAL_ID_BYTES)
        signal = m.cancel_request(run_id, f"parent:{self.run_id}", reason or "the parent was cancelled", asked_as)
        self.note(
            c.SendSignal(
                step_id=self.name_step(f"cancel:{child.plan_id}"),
                run_id=run_id,
                name=signal.name,
                signal_id=asked_as,
                payload=signal.payload,
            )
        )

    async def run_plan(self, given: dict[str, Any], inputs: Raw, close_policy: str) -> Any:
        """Have a plan stored, run it as a child, and return its result."""
        if self.depth >= NESTED_RUNS:
            raise InvalidInput(f"runs are nested at most {NESTED_RUNS} deep")
        if b'"$done"' in bytes(inputs):
            raise InvalidInput("the inputs of a plan are named by letters, digits, _ and -", field="inputs")
        step_id = self.name_step("plan")
        input = self.bounded(codec.encode(given), "the plan")
        self._bytes += len(input) + len(inputs)
        stored = await self.step(
            c.RunActivity(
                step_id=f"{step_id}:store", name=STORE_PLAN, input=input, options=encode_options(STORING_A_PLAN)
            )
        )
        if stored is None:
            raise InvalidInput(f"the plan of step {step_id!r} was not stored: an operator has skipped it")
        ref = codec.decode(stored, PlanRef)
        if close_policy == "await":
            self._awaited_children = self._awaited_children or set()
            self._awaited_children.add(step_id)
        result = await self.step(
            c.StartChild(
                step_id=step_id,
                child_run_id=self._child_run_id(step_id),
                plan_id=workflow_of(ref.plan_id),
                plan_version=ref.plan_version,
                input=self.bounded(inputs, "the inputs of the plan"),
                close_policy=close_policy,
                plan=e.PlanSource(ref.sha256, ref.uri),
            )
        )
        return None if result is None else codec.decode(result, object)

    async def start_run(self, request: StartRequest) -> str:
        """Start an independent run, and return its id; raise `StartRefused`."""
        name = request.workflow or (request.plan.plan_id if request.plan is not None else "") or "plan"
        step_id = self.name_step(f"start:{name}")
        if not request.request_id:
            request = replace(request, request_id=self._own_id(step_id, START_RUN)[1])
        input = self.bounded(codec.encode({"request": request}), f"the input of {name!r}")
        self._bytes += len(input)
        options = encode_options(STARTING_A_RUN)
        try:
            result = await self.step(c.RunActivity(step_id=step_id, name=START_RUN, input=input, options=options))
        except ActivityFailed as problem:
            raise StartRefused(f"step {step_id}: {problem.info}", problem.info) from None
        if result is None:
            raise InvalidInput(f"no run was started by step {step_id!r}: an operator has skipped it")
        return codec.decode(result, str)

    async def update_run(self, run_id: str, name: str, arguments: dict[str, Any], update_id: str | None) -> Any:
        """Send an update to a run, wait for its answer, and return it; a refusal raises `ActivityFailed`."""
        step_id = self.name_step(f"update_run:{name}")
        chosen = update_id or self._own_id(step_id, UPDATE_RUN)[1]
        request = UpdateRequest(run_id=run_id, name=name, update_id=chosen, arguments=arguments)
        input = self.bounded(self.definition.values.encode({"request": request}), f"the input of update {name!r}")
        self._bytes += len(input)
        options = encode_options(STARTING_A_RUN)
        result = await self.step(c.RunActivity(step_id=step_id, name=UPDATE_RUN, input=input, options=options))
        return None if result is None else codec.decode(result, Any)

    def _note_signature(self, step_id: str, signature: Signature) -> None:
        self._signatures = self._signatures or {}
        self._signatures[step_id] = signature

    def bounded(self, raw: Raw, what: str) -> Raw:
        """Return an encoded value, or raise `PayloadTooLarge`."""
        return codec.bounded(raw, self.limits.value_bytes, what)

    def step(self, command: Any) -> StepFuture:
        """Issue a command that opens a step, and return the future of its outcome."""
        self.loop.check_open()
        step_id = command.step_id
        kind = type(command)
        future = StepFuture(self.loop, self.give_up_waiting, step_id, kind is c.RunActivity)
        self._waiting[step_id] = future
        self._commands[step_id] = command
        self._steps += 1
        if self._answering:
            self._note_owner(step_id, kind is c.WaitSignal or kind is c.AskHuman)
        return future

    def give_up_waiting(self, step_id: str) -> None:
        """Close a step whose outcome is no longer awaited."""
        if self._waiting.pop(step_id, None) is not None:
            if self._awaited_children:
                self._awaited_children.discard(step_id)
            self._give_up(step_id)

    def name_step(self, name: str) -> str:
        """Return the id of the next step of this name."""
        name = _SCOPE.get() + name
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return f"{self._prefix}{name}" if count == 1 else f"{self._prefix}{name}#{count}"

    def on_query(self, name: str, handler: Query) -> None:
        """Answer queries of this name with this function."""
        note_handler(self.definition.queries, name, handler, "query", self.definition.values)
        self.queries = {**self.queries, name: handler}

    def on_update(self, name: str, handler: Query, validator: Query | None) -> None:
        """Answer updates of this name with this function."""
        note_handler(self.definition.updates, name, handler, "update", self.definition.values)
        self.updates = {**self.updates, name: UpdateHandler(name, handler, validator, self.definition.values)}

    def when(self, condition: Callable[[], bool]) -> "asyncio.Future[None]":
        """Return a future that is done when the condition holds."""
        future: asyncio.Future[None] = self.loop.create_future()
        self.conditions = self.conditions or []
        self.conditions.append((condition, future))
        return future

    def is_patched(self, patch_id: str) -> bool:
        """Return whether to run the new code: in new runs, and in runs that have recorded it."""
        if patch_id not in self._patches:
            step_id = f"{self._prefix}patched:{patch_id}"
            is_new = not self.is_replaying or step_id in self.known_markers
            self._patches = {**self._patches, patch_id: is_new}
            if self._patches[patch_id]:
                self.note(c.RecordMarker(step_id=step_id, name="patched", value=codec.encode(patch_id)))
        return self._patches[patch_id]

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        """Change search attributes of the run."""
        changes = to_changes(values, self.definition.attributes)
        if changes:
            self.note(c.SetAttributes(step_id=self.name_step("attributes:set"), values=changes))

    def publish(self, values: Mapping[str, Any]) -> None:
        """Record values that are shown with the run; None removes a value."""
        raw = codec.bounded(self.definition.values.encode(dict(values)), PUBLISHED_BYTES, "what is published", "")
        self._bytes += len(raw)
        self.note(c.RecordMarker(step_id=self.name_step("publish:set"), name=e.PUBLISHED, value=raw))

    def note(self, command: c.RecordMarker | c.SendSignal | c.SetAttributes) -> None:
        """Issue a command that is only recorded: it has no outcome to wait for."""
        self._commands[c.command_key(type(command), command.step_id)] = command

    def continues_here(self) -> bool:
        """Return whether to rotate here: the history has the marker, or is long and a rotation would lose nothing."""
        self._rotation_points += 1
        step_id = f"{self._prefix}cut:{self._rotation_points}"
        continues = step_id in self.known_markers if self.is_replaying else self._is_long() and not self._is_at_work()
        if continues:  # recorded, because the code may clean up over many turns before the rotation
            self.note(c.RecordMarker(step_id=step_id, name="cut"))
        return continues

    def _is_long(self) -> bool:
        if self._steps >= self.limits.rotation_steps:
            return True
        return self._bytes + 2 * EVENT_BYTES * self._steps >= self.limits.rotation_bytes

    def _is_at_work(self) -> bool:
        """Return whether a rotation would lose anything. Any other open step or update has its own task."""
        return bool(self._timers) or self.open_sagas > 0 or self.loop.has_tasks_beside(self._main)

    @property
    def rotation(self) -> int:
        """How often the run has rotated its history."""
        return int(self._prefix.rstrip("/") or 0)

    def now(self) -> Instant:
        """Return the instant of the outcome that is being handled."""
        return self.loop.now

    @property
    def random(self) -> Random:
        """The generator seeded by the run: it draws the same values on every replay."""
        if self._random is None:
            self._random = seeded(self.seed)
        return self._random

    def new_uuid(self) -> uuid.UUID:
        """Return a UUID that is the same on every replay."""
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    # --- timers of the loop

    def start_timer(self, timer: Timer, due_at: Instant) -> None:
        if due_at - self.loop.now > DURATION_MS * 1_000:
            raise InvalidInput("a timer is set for at most a thousand years")
        timer.step_id = self.name_step("timer")
        self._timers[timer.step_id] = timer
        self._steps += 1
        if self._answering:
            self._note_owner(timer.step_id, False)
        if self.is_replaying:
            timer.asked_at = calling_line()
        self._commands[timer.step_id] = c.StartTimer(step_id=timer.step_id, due_at=due_at)

    def cancel_timer(self, timer: Timer) -> None:
        if self._timers.pop(timer.step_id, None) is not None:
            self._give_up(timer.step_id)

    def _give_up(self, step_id: str) -> None:
        """Close an open step. A step that was opened in the same turn leaves no trace."""
        if self._commands.pop(step_id, None) is None:
            self._commands[c.command_key(c.CancelStep, step_id)] = c.CancelStep(step_id=step_id)
        else:
            self._steps -= 1

    # --- running

    def _run(self) -> None:
        """Run until nothing is ready and no other condition holds."""
        loop = self.loop
        loop.run_until_idle()
        while (self.conditions and self._settle_conditions()) or (
            loop.deferred_callback is not None and self._run_deferred()
        ):
            loop.run_until_idle()
        if self._rotating is not None:
            self._forget_stray_rotation()
        if self._answering:
            for step_id, task in self._answering.items():
                if task.done():
                    answer = self._commands[c.command_key(c.CompleteUpdate, step_id)] = answer_of(
                        step_id, task, self.definition.values, self.bounded
                    )
                    self._bytes += len(answer.result) + error_bytes(answer.error)
            self._answering = self._in_progress() or _NOTHING
            if not self._answering:
                self._owned = self.loop.after_each = None
        if self.problem is not None and not self._stopped:
            self.problem = None  # it continues: an operator has cancelled it, or the same outcome has a successor
        if self._main is not None and self._main.done():
            self._end(self._main)
        elif not self._waiting and not self._timers:
            self._check_wakeable()

    def _check_wakeable(self) -> None:
        """Pause the run if nothing can wake its code any more: no step is open, and it takes no update.

        An endless sleep is what its author wants, and so is a wait in code that answers queries, unless a task that was
        to end it has failed.
        """
        if self._main is None or self.is_replaying or self.updates or self._stopped or self.loop.sleeps_forever:
            return
        failed = self.loop.unretrieved()
        if failed or not self.queries:
            line = waiting_line(self._main) or first_line(self.definition.function)
            self.problem = stuck(line, failed)

    def _settle_conditions(self) -> bool:
        """Resolve the futures whose condition holds. An exception of a condition is raised where it is awaited."""
        assert self.conditions is not None
        waiting = [(condition, future) for condition, future in self.conditions if not future.done()]
        with running(self.loop):
            self.watch.run(lambda: settle(waiting))
        self.conditions = [(condition, future) for condition, future in waiting if not future.done()]
        return len(self.conditions) < len(waiting)

    def _end(self, main: asyncio.Task[Any]) -> None:
        """Note how the function has ended, unless its end has to wait."""
        outcome, raised = self._outcome(main)
        if isinstance(outcome, c.CancelRun) or self._is_given_up:
            outcome = c.CancelRun(reason=self._reason)
        if self._is_given_up:
            self.problem = None
        elif not self.accepts_end:
            found = self._unhandled(main, outcome, raised)
            if found is not None or isinstance(outcome, c.CancelRun):
                self.problem = found
            if self.problem is not None:
                return
        if isinstance(outcome, c.ContinueAsNew):
            if self._answering:
                return  # only in a history from before updates were carried over
            outcome = replace(outcome, updates=tuple(self._late))
        else:
            for step_id in (*self._late, *self._answering):
                error = ErrorInfo("RunTerminal", "the run ended before it had answered")
                answer = c.CompleteUpdate(step_id=step_id, error=error)
                self._commands[c.command_key(c.CompleteUpdate, step_id)] = answer
            self._late = self._answering = _NOTHING
        if not isinstance(outcome, c.CancelRun) and self._awaited_children:
            return  # every end except a cancellation waits for the awaited children
        self._is_done = True
        self._commands[c.OF_THE_RUN] = outcome

    def _outcome(self, main: asyncio.Task[Any]) -> tuple[c.Command, BaseException | None]:
        """Return the command for the end of the function, and the exception if it failed."""
        if main.cancelled() or main.exception() is not None:
            return raised_outcome(main, is_cancelling=self._is_cancelling)
        signature = self.definition.signature
        try:
            result = self.bounded(signature.values.encode(main.result()), "the result of the run")
            signature.result_of(result)
            return c.CompleteRun(result=result), None
        except (InvalidInput, PayloadTooLarge) as unfit:
            return c.FailRun(error=error_info(unfit)), unfit

    # --- exceptions that the code does not handle
    #
    # They pause the run where they leave the code: at the end of the function, or at the end of a saga, which must not
    # undo what was done because of a mistake that can be fixed. Of the turn only its inputs are recorded, so the
    # fixed code takes the same outcomes. If the run is cancelled instead, the program continues from there.

    def _unhandled(self, main: asyncio.Task[Any], outcome: c.Command, raised: BaseException | None) -> RunError | None:
        """Return why the run is paused instead of ending this way, or None."""
        if raised is not None:
            if self.skipped and fails_on_none(main):  # skipping a step must not make the run fail, whatever its policy
                what = f"the workflow needs the answer of {self.skipped[-1]!r}, which was skipped, and"
                return unhandled(raised, what, "deploy code that handles None, or terminate the run")
            if is_failure(raised, self.definition, is_cancelling=self._is_cancelling):
                return None
            return unhandled(raised)
        if isinstance(outcome, c.CancelRun) or self.is_replaying or self.definition.on_error == "fail":
            return None
        for task in self.loop.unretrieved():
            problem = task._exception  # without marking it as retrieved
            if problem is not None and not is_failure(problem, self.definition):
                return unhandled(problem, f"{task.get_name()!r}, a task that nothing has awaited,")
        return None

    def is_mistake(self, problem: BaseException, failures: tuple[type[BaseException], ...]) -> bool:
        """Return whether an exception that leaves a saga pauses the run, so that nothing is undone."""
        if self.accepts_end or isinstance(problem, (asyncio.CancelledError, *failures)):
            return False
        if isinstance(problem, BaseExceptionGroup) and rotates(problem):
            return False
        return not is_failure(problem, self.definition, is_cancelling=True)

    async def stop_for(self, problem: BaseException, what: str) -> None:
        """Pause the run, and wait until it is cancelled. Code that has been fixed does not get here."""
        future: asyncio.Future[None] = self.loop.create_future()
        self.problem = unhandled(problem, what)
        self._stopped = {**self._stopped, future: self.problem}
        try:
            await future
        finally:
            self._stopped = {other: found for other, found in self._stopped.items() if other is not future}
            self.problem = next(iter(self._stopped.values()), None)

    # --- updates at the end of a stretch
    #
    # The end of a workflow's function, its result or the arguments of `continue_as_new`, decides what is kept of its
    # state. An update that is answered later would change a state that is lost. So once the function has ended, no
    # update is accepted, and the end waits for those that are being answered: the program is rebuilt, and the callback
    # in which the function ended runs after them. An update that only that callback could answer is not waited for: a
    # rotation carries it over, and it begins again; any other end refuses it.

    @property
    def takes_updates(self) -> bool:
        """Whether an update would be answered before the next rotation or end, and its effect kept."""
        return self.takes_signals and self._rotating is None and self.loop.deferred_callback is None

    @property
    def takes_signals(self) -> bool:
        """Whether the effect of a signal received now would be kept."""
        return self._main is None or not self._main.done()

    def defer(self, deferred: Mapping[int, bool]) -> None:
        """Defer these callbacks, with whether each returned, and those in the history, until updates are answered."""
        start = f"{self._prefix}cut:{DEFERRED}:"
        named = [marker.removeprefix(start).split(":") for marker in self.known_markers if marker.startswith(start)]
        known = {int(callback): how == "return" for callback, how in named}
        self._deferred = {**known, **deferred}
        self.loop.to_defer = frozenset(self._deferred)

    def _marker(self, callback: int, returns: bool) -> str:
        return f"{self._prefix}cut:{DEFERRED}:{callback}:{'return' if returns else 'rotate'}"

    def rotate(self) -> None:
        """Note that the code rotates the history."""
        if _ANSWERING.get() is not None:
            raise InvalidInput("continue_as_new: the handler of an update cannot rotate the history")
        self._rotating = asyncio.current_task()
        self.lost_waits = frozenset(self._waiting)

    def after_callback(self, number: int) -> None:
        """Defer the end of the function, if it has ended while updates are being answered that can still finish."""
        assert self._main is not None
        if not self._answering or (self._rotating is None and not self._main.done()):
            return
        in_progress = self._in_progress()
        returns = self._rotating is None
        if returns and (self._main.cancelled() or self._main.exception() is not None):
            returns = False  # it has failed: nothing of its state is kept
        elif in_progress and self._can_finish(in_progress, returns):
            if self.is_replaying:
                return  # the history has a marker for each end that was deferred, and none for this one
            raise EndDeferred(self.seed, number, returns)
        self._late = {**self._late, **in_progress}
        self._answering = {step_id: task for step_id, task in self._answering.items() if step_id not in in_progress}

    def _run_deferred(self) -> bool:
        """Run the deferred end once the updates before it are answered, or if only the function could answer them."""
        callback = self.loop.deferred_callback
        if callback is None:
            return False
        in_progress = self._in_progress()
        returns = self._deferred[callback]
        if self._noted != callback:
            self._noted = callback
            self.note(c.RecordMarker(step_id=self._marker(callback, returns), name=DEFERRED))
        if in_progress and self._can_finish(in_progress, returns):
            return False
        self.loop.run_deferred()
        return True

    def _in_progress(self) -> dict[str, asyncio.Task[Any]]:
        return {step_id: task for step_id, task in self._answering.items() if not task.done()}

    def _can_finish(self, in_progress: Mapping[str, object], returns: bool) -> bool:
        """Return whether updates can still be answered without the function.

        That is so if one has its own open step, or if another task awaits an activity. A run that returns does not wait
        for signals and people.
        """
        if self._is_cancelling:
            return False
        for step_id, (owner, is_endless) in (self._owned or {}).items():
            is_open = step_id in self._waiting or step_id in self._timers
            if is_open and owner in in_progress and not (returns and is_endless):
                return True
        return any(future.is_work for future in self._waiting.values())

    def _note_owner(self, step_id: str, is_endless: bool) -> None:
        owner = _ANSWERING.get()
        if owner is not None:
            self._owned = self._owned or {}
            self._owned[step_id] = owner, is_endless

    def _forget_stray_rotation(self) -> None:
        """Discard a rotation requested by a task that has ended, if the function continued."""
        task = self._rotating
        if task is None or task is self._main or not task.done() or self._main is None or self._main.done():
            return
        self._rotating, self.lost_waits = None, _NO_STEPS
        self._answering, self._late = {**self._answering, **self._late}, _NOTHING

    # --- outcomes

    def _begin(self, event: Event) -> None:
        try:
            arguments = self.definition.signature.unpack(self._input)
        except InvalidInput as problem:
            reason = problem.__cause__ or problem
            raise NondeterminismError(
                f"event {event.run_seq}: the recorded arguments do not fit {self.definition.name!r}: {reason}",
                run_seq=event.run_seq,
                expected=bytes(self._input).decode(errors="replace")[:ERROR_TEXT_CHARS],
                found=f"async def {self.definition.name}{self.definition.signature}",
            ) from problem
        definition = self.definition
        function = self._through_middleware(arguments) if definition.middleware else definition.function(**arguments)
        self._main = self.loop.create_task(function, name=definition.name)
        if isinstance(event.data, e.ContinuedAsNew):
            for update in carried_updates(event.data):  # they start after the function, which registers their handlers
                accepted = e.UpdateAccepted(update.name, update.input, update.was_refused)
                self._answer(update.step_id, self._update(accepted, validates=False))

    def _through_middleware(self, arguments: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        definition = self.definition
        call = WorkflowCall(
            workflow=definition.name, version=definition.version, run_id=self.run_id, arguments=arguments
        )
        return call_through(definition.middleware, call, lambda call: definition.function(**call.arguments))

    def _cancel(self, event: Event) -> None:
        self._is_cancelling = True
        self._reason = getattr(event.data, "reason", "")
        self._is_given_up = self.problem is not None and self._main is not None and self._main.done()
        if self._main is not None and not self._main.cancel(getattr(event.data, "reason", "") or None):
            for child in (
                self._awaited_children or _NO_STEPS
            ) & self._waiting.keys():  # it has ended, and is only waiting for them
                self._waiting[child].cancel()
        self.loop.run_deferred()

    def _fire(self, event: Event) -> None:
        timer = self._timers.pop(event.step_id or "", None)
        if timer is not None:
            self.loop.fire(timer)
        else:
            given = getattr(event.data, "result", NULL)  # from an operator who skipped the step
            self._resolve(event, None if given == NULL else given)

    def _resolve(self, event: Event, value: Any) -> None:
        if value is not None:
            self._bytes += len(value)
        future = self._waiting.pop(event.step_id or "", None)
        if self._awaited_children:
            self._awaited_children.discard(event.step_id or "")
        if future is not None and not future.done():
            future.set_result(value)

    def _reject(self, event: Event, error: BaseException) -> None:
        self._bytes += error_bytes(getattr(error, "info", None))
        future = self._waiting.pop(event.step_id or "", None)
        if self._awaited_children:
            self._awaited_children.discard(event.step_id or "")
        if future is not None and not future.done():
            future.set_exception(error)

    def _answer_update(self, event: Event) -> None:
        assert isinstance(event.data, e.UpdateAccepted)
        assert event.step_id is not None
        self._steps += 1
        self._bytes += len(event.data.input)
        is_old = event.data.was_refused is None
        answering = self._update(event.data, validates=True) if is_old else self._accepted(event, event.data)
        self._answer(event.step_id, answering)

    def _answer(self, step_id: str, answering: Coroutine[Any, Any, Any]) -> None:
        context = copy_context()
        context.run(_ANSWERING.set, step_id)
        task = self.loop.create_task(answering, name=step_id, context=context)
        self._answering = {**self._answering, step_id: task}
        self.loop.after_each = self.after_callback

    def _accepted(self, event: Event, update: e.UpdateAccepted) -> Coroutine[Any, Any, Any]:
        """Return the coroutine that answers a validated update; raise if the code no longer accepts it."""
        handler = self.updates.get(update.name)
        try:
            if handler is None:
                raise self._unknown_update(update.name)
            return _answer(handler.function, handler.unpack(update.input))
        except (InvalidInput, NotFound) as problem:
            raise NondeterminismError(
                f"event {event.run_seq}: the recorded update {update.name!r} cannot be applied: {problem}",
                run_seq=event.run_seq,
                expected=f"UpdateAccepted ({update.name})",
                found=problem.message,
                source=self.where(None).removeprefix(" at "),
            ) from problem

    async def _update(self, update: e.UpdateAccepted, *, validates: bool) -> Any:
        """Answer an update that was carried over, or one from an older history, which is not validated yet."""
        handler = self.updates.get(update.name)
        if handler is None:
            raise self._unknown_update(update.name)
        arguments = handler.unpack(update.input)
        if validates and handler.validator is not None:
            handler.validator(**arguments)
        return await _answer(handler.function, arguments)


def _wake(waiter: "asyncio.Future[None]", _: object) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _cancel_again(task: "asyncio.Task[Any]", reason: Any) -> None:
    """Cancel a task where it waits now, unless it has ended, or what was cancelled in it (such as a timeout) has."""
    if task.cancelling() and not task.done():
        task.uncancel()
        task.cancel(reason)


async def _answer(function: Query, arguments: dict[str, Any]) -> Any:
    result = function(**arguments)
    return await result if asyncio.iscoroutine(result) else result


def _completed(program: CoroutineProgram, event: Event) -> None:
    program._resolve(event, getattr(event.data, "result", NULL))


def _failed(program: CoroutineProgram, event: Event) -> None:
    assert isinstance(event.data, e.StepFailed)
    error = event.data.error
    program._reject(event, ActivityFailed(f"step {event.step_id}: {error}", error))


def _child_failed(program: CoroutineProgram, event: Event) -> None:
    assert isinstance(event.data, e.ChildFailed)
    error = event.data.error
    program._reject(event, ChildFailed(f"child {event.step_id}: {error}", error))


def _signalled(program: CoroutineProgram, event: Event) -> None:
    assert isinstance(event.data, e.SignalReceived)
    body, handler = event.data, program.handlers.get(event.step_id or "")
    if handler is None and body.state_after is UNSET and body.error is None:
        program._resolve(event, body.payload)
        return
    outcome = recorded(event, body, handler)
    program._reject(event, outcome) if isinstance(outcome, Exception) else program._resolve(event, outcome)


def _timed_out(program: CoroutineProgram, event: Event) -> None:
    assert isinstance(event.data, e.SignalTimedOut)
    program._reject(event, TimeoutError(f"no signal {event.data.name!r} came in time"))


def _answered(program: CoroutineProgram, event: Event) -> None:
    assert isinstance(event.data, e.TaskCompleted)
    program._resolve(event, event.data.answer)


ON_EVENT: dict[type[e.Body], Callable[[CoroutineProgram, Event], None]] = {
    e.RunStarted: CoroutineProgram._begin,
    e.ContinuedAsNew: CoroutineProgram._begin,
    e.RunCancelRequested: CoroutineProgram._cancel,
    e.StepCompleted: _completed,
    e.StepFailed: _failed,
    e.StepSkipped: CoroutineProgram._fire,
    e.TimerFired: CoroutineProgram._fire,
    e.SignalReceived: _signalled,
    e.SignalTimedOut: _timed_out,
    e.TaskCompleted: _answered,
    e.ChildCompleted: _completed,
    e.ChildFailed: _child_failed,
    e.UpdateAccepted: CoroutineProgram._answer_update,
}
"""What a program does with each event that it receives: those that start it, and outcomes."""


_CLOSED = DeterministicLoop(None, 0, 0)  # type: ignore[abstract,arg-type]
_CLOSED.dispose()


def current_program() -> CoroutineProgram | None:
    """Return the program whose code is running, or None outside a workflow."""
    loop = current_loop()
    return None if loop is None else loop.host  # type: ignore[return-value]


def refuse_inside(what: str, instead: str) -> None:
    """Raise `NotDurable` inside a workflow."""
    if current_program() is not None:
        raise NotDurable(f"{what}: it would be done again on every replay; inside a workflow {instead}")


@contextmanager
def scoped(name: str) -> Iterator[None]:
    """Prefix the names of steps while the context is open, including steps of tasks that are created in it."""
    token = _SCOPE.set(f"{_SCOPE.get()}{name}/")
    try:
        yield
    finally:
        _SCOPE.reset(token)


def require_program(what: str) -> CoroutineProgram:
    """Return the program whose code is running; `what` can only be used inside a workflow."""
    program = current_program()
    if program is None:
        raise NotDurable(f"{what} can only be used inside a workflow")
    return program
