"""A turn of a run: the run in memory, its program, and the messages that it handles.

A `CachedRun` is a run's state and its program at the same version. It may be dropped at any time: `rebuild` restores it
by replaying the history since the last rotation. `RunCache` keeps the runs of a node that took a turn most recently, up
to a limit. `take_turn` lets a run handle everything that waits for it.

If a program cannot continue (its code does not match its history, its version is missing, it does not become idle), the
run does not fail. The turn records the incoming messages and pauses the run for an operator.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.admission import AdmissionRequest
from holdfast.core.commands import Command, PauseRun, with_one_rotation
from holdfast.core.decide import Input, wait_for
from holdfast.core.event_writer import Decision, Refusal, starts_run
from holdfast.core.events import Event, FormerRun
from holdfast.core.instants import Instant
from holdfast.core.messages import (
    ENGINE_SIGNALS,
    Control,
    DeadSignal,
    DefinitionFound,
    Message,
    MessageDeadLettered,
    NodeLost,
    ReportedOutcome,
    Signal,
    Update,
    controls_of,
    is_deadline,
    outcomes_of,
    updates_of,
)
from holdfast.core.plans import HELD_LEVEL, is_plan
from holdfast.core.run_timeouts import is_timeout
from holdfast.core.state import PAUSED, RUNNING, OpenStep, RunState, state_of
from holdfast.core.streams import StreamChunks
from holdfast.core.tasks import task_operations
from holdfast.core.timing import step_options
from holdfast.engine.history import read_histories, read_since_rotation
from holdfast.engine.plans import load_plan_of
from holdfast.engine.turns.draft import LIMITS, TurnDraft
from holdfast.engine.turns.poison import is_suspect
from holdfast.errors import (
    Conflict,
    InvalidInput,
    RunawayWorkflow,
    RunError,
    StoreCorrupt,
    VersionMismatch,
)
from holdfast.limits import ROTATIONS_IN_ONE_BREATH, Limits
from holdfast.program.coroutine import CoroutineProgram, RunAbout
from holdfast.program.flow.definition import FlowDefinition
from holdfast.program.flow.program import FlowProgram
from holdfast.program.outcomes import error_info
from holdfast.program.plan.definition import PlanDefinition
from holdfast.program.plan.program import PlanProgram
from holdfast.program.port import EndDeferred, Program, WritesStreams
from holdfast.program.replay import CONCERN_PROGRAM, Replay
from holdfast.program.streams import chunks_of
from holdfast.program.tasks import answer_check
from holdfast.registry import Registry
from holdfast.store.payloads import refuse_sealed
from holdfast.store.port import LoadedRun, NewRun, RunHead, Store

MOST_CALLBACKS = 1_000_000
"""How many callbacks a program may run in one turn before it counts as a runaway."""

READ_AHEAD_RUNS = 200
"""The maximum number of histories in one query: all of them are in memory at once."""


class CachedRun:
    """A run's state and program."""

    __slots__ = ("ahead", "is_closed", "registry", "replay", "state")

    def __init__(self, state: RunState, replay: Replay, registry: Registry) -> None:
        self.state = state
        self.replay = replay
        self.registry = registry
        self.ahead: tuple[TurnDraft, RunError | None] | None = None
        """The turn that the program has taken and that is not durable yet, with the reason if it cannot continue."""
        self.is_closed = False

    def settle(self, state: RunState) -> None:
        """Note that the turn that has led to this state is durable."""
        self.state = state
        self.ahead = None

    def close(self) -> None:
        """Close the program."""
        self.is_closed = True
        self.replay.close()


def make_program(
    registry: Registry,
    run_id: str,
    plan_id: str,
    plan_version: str,
    depth: int,
    input: Raw,
    rotation: int,
    plan: PlanDefinition | None = None,
) -> Program:
    """Make the program of a run; raise `VersionMismatch` if the version with which it was started is missing."""
    definition = registry.workflows.get((plan_id, plan_version))
    if definition is None and plan is not None:
        return PlanProgram(plan, run_id, input, rotation, depth, registry.limits, registry)
    if definition is None and is_plan(plan_id):
        raise VersionMismatch(f"run {run_id} needs the body of {plan_id!r} {plan_version!r}: it is not here")
    if definition is None:
        known = sorted(version for name, version in registry.workflows if name == plan_id)
        raise VersionMismatch(f"run {run_id} needs version {plan_version!r} of {plan_id!r}; known are {known}")
    if isinstance(definition, FlowDefinition):
        return FlowProgram(definition, run_id, input, rotation, depth, registry.limits, registry.turn_s)
    bounds = registry.limits, MOST_CALLBACKS, registry.turn_s
    return CoroutineProgram(definition, run_id, input, rotation, depth, *bounds)


class _Beginning(Struct, eq=False):  # the garbage collector tracks it: through the registry it can reach its own node
    """Makes the programs of a run: one for each rotation that it goes through.

    It does not hold the state, which becomes outdated as the run continues.
    """

    registry: Registry
    run_id: str
    plan_id: str
    plan_version: str
    plan: PlanDefinition | None
    depth: int
    input: Raw
    rotation: int
    seed: str
    about: RunAbout
    formers: tuple[FormerRun, ...]
    own: RunAbout

    def reach(self, run_seq: int | None, program: Program | None) -> None:
        """Give the program what the run knew about itself when it recorded this event."""
        former = next((each for each in self.formers if run_seq is not None and run_seq <= each.last_event), None)
        about = self.own if former is None else _about_former(former, self.own)
        self.about = replace(about, started_at=self.about.started_at)
        if isinstance(program, CoroutineProgram):
            program.about = self.about

    def replace_input(self, event: Event) -> None:
        """Take the input of a later start, for a program that has not begun."""
        assert isinstance(event.data, e.InputReplaced)
        self.input = event.data.input

    def __call__(self, event: Event) -> Program:
        if isinstance(event.data, e.ContinuedAsNew):
            self.rotation += 1
            self.input = event.data.input
        elif self.about.started_at != event.emitted_at:
            self.about = replace(self.about, started_at=event.emitted_at)
        run = self.run_id, self.plan_id, self.plan_version, self.depth
        program = make_program(self.registry, *run, self.input, self.rotation, self.plan)
        if self.seed:  # a fork: it draws the random values of the run whose results it has
            program.seed = f"{self.seed}|{self.rotation}"
        if isinstance(program, CoroutineProgram):
            program.about = self.about
        return program


def _about_former(former: FormerRun, own: RunAbout) -> RunAbout:
    origin = own.origin
    if origin is not None:
        origin = replace(origin, attempt=former.attempt, retry_of=former.retry_of, schedule=former.schedule)
    return replace(own, run_id=former.run_id, parent_run_id=former.parent_run_id, origin=origin)


def _beginning(registry: Registry, state: RunState, input: Raw, rotation: int) -> _Beginning:
    about = RunAbout(state.parent_run_id, state.origin, state.started_at, state.context)
    return _Beginning(
        registry,
        state.run_id,
        state.plan_id,
        state.plan_version,
        None if state.plan is None else registry.plans.get(state.plan.sha256),
        state.depth,
        input,
        rotation,
        "" if state.forked_from is None else state.forked_from.seed,
        about,
        () if state.forked_from is None else state.forked_from.formers,
        about,
    )


def rebuild(
    run_id: str, history: Sequence[Event], registry: Registry, before: Replay | None = None
) -> tuple[CachedRun, RunError | None]:
    """Rebuild a run from its history, whole or since a rotation. Also return why its program cannot continue, or None.

    `before` is the replay that kept it in step before, if the end of a stretch was deferred.
    """
    state = state_of(run_id, history)
    first = history[0].data
    if isinstance(first, e.ContinuedAsNew):
        rotation = state_of(run_id, history[:1]).occurrences["ContinuedAsNew"] - 1
        begin = _beginning(registry, state, first.input, rotation)
    else:
        assert isinstance(first, e.RunQueued)
        begin = _beginning(registry, state, first.input, 0)
    cached = CachedRun(state, Replay(begin), registry)
    if before is not None:
        cached.replay.deferred = before.deferred
    if len(history) == 1 and isinstance(first, e.RunQueued):  # nothing has begun
        return cached, None
    try:
        cached.replay.replay(history)
        return cached, None
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        cached.close()
        return cached, _stuck(problem)


def problem_of_resuming(cached: CachedRun) -> RunError | None:
    """Return why a run that is paused for its code would be paused again if it were resumed now. This uses the run up.

    Events recorded during the pause are delivered then, and the code may still raise an error that it does not handle.
    """
    if not cached.state.awaits_definition:
        return None
    state = cached.state
    resumed = Event(
        run_id=state.run_id,
        run_seq=state.version + 1,
        event_id="",
        event_type="RunResumed",
        step_id=None,
        engine_attempt_id=None,
        logical_attempt_id=None,
        data=e.RunResumed("to see whether it can go on"),
        idempotency_key="",
        emitted_at=state.last_executed_on,
        persisted_at=0,
        adapter_version="",
        engine_run_ref=e.EngineRunRef(state.last_executed_by),
        caused_by_signal_id=None,
        parent_event_id=None,
        schema_version=1,
    )
    try:
        cached.replay.advance(resumed)
        return None
    except EndDeferred:  # it continues, and its end waits for updates
        return None
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        return _stuck(problem)


def at_rest(run_id: str, history: Sequence[Event], registry: Registry) -> CachedRun:
    """Return a run with a program that is not begun, to record facts about a run without running its code."""
    state = state_of(run_id, history)
    cached = CachedRun(state, Replay(_beginning(registry, state, e.NULL, 0)), registry)
    cached.close()
    return cached


def _stuck(problem: BaseException) -> RunError:
    if isinstance(problem, RunError):
        return problem
    stuck = RunError(f"the program cannot continue: {type(problem).__name__}: {error_info(problem).message}")
    stuck.__cause__ = problem
    return stuck


def take_turn(
    cached: CachedRun,
    loaded: LoadedRun,
    inputs: Sequence[Input],
    now: Instant,
    node: str,
    limits: Limits = LIMITS,
    begun: Sequence[str] = (),
    admission: AdmissionRequest | None = None,
) -> tuple[TurnDraft, RunError | None]:
    """Let a run handle everything that waits for it; if its program cannot continue, pause the run instead.

    `begun` are steps that an earlier process of the node has begun before their start was durable: see `fail_open.py`.
    With `admission` the run is queued for admission, and does not start.

    Raises `EndDeferred`, and then nothing has happened: the run must be rebuilt (`rebuild`) for the same turn.
    """
    if cached.ahead is not None:  # by a turn to be committed first: messages that came since wait for the next
        return cached.ahead
    draft = TurnDraft(cached.state, loaded, now, node, limits)
    try:
        turn = _Turn(cached, draft)
        messages = loaded.messages
        if admission is not None:
            draft.enqueue([message for message in messages if starts_run(message)], admission)
            messages = tuple(message for message in messages if not starts_run(message))
        turn.run([*messages, *inputs])
        if begun:
            turn.lose(begun)
        if cached.registry.refuse_records is not None and any(map(_has_key, draft.events)):
            cached.registry.refuse_records()
        program = cached.replay.program
        if program is not None and program.stream_writes is not None:
            draft.streams = _written(program, cached.registry)
        cached.ahead = draft, None
        return cached.ahead
    except EndDeferred as deferred:
        cached.replay.defer(deferred)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # user code that raises where no task catches it must not end the node
        stuck = _stuck(problem)
        cached.ahead = pause_turn(cached.state, loaded, inputs, stuck, now, node, limits), stuck
        return cached.ahead


def _has_key(event: Event) -> bool:
    return isinstance(event.data, e.StepStarted) and event.data.idempotency_key is not None


def _written(program: Program, registry: Registry) -> tuple[StreamChunks, ...]:
    """Return what the code has written to streams in this turn."""
    assert isinstance(program, WritesStreams)
    assert program.stream_writes is not None
    if registry.lacks_streams:
        raise RunError("the workflow writes to a stream, and the store keeps none: use another store for it")
    writes, program.stream_writes = program.stream_writes, None
    return chunks_of(writes)


def pause_turn(
    state: RunState,
    loaded: LoadedRun,
    inputs: Sequence[Input],
    problem: RunError,
    now: Instant,
    node: str,
    limits: Limits = LIMITS,
    *,
    is_poisoned: bool = False,
) -> TurnDraft:
    """Return a turn that records the inputs and leaves the run paused, without advancing its program.

    If the inputs cannot be recorded (`is_poisoned`), messages are deferred instead. The same happens if the run's
    definition is missing: a node that has it handles them, otherwise they become dead letters.
    """
    is_missing = isinstance(problem, VersionMismatch)
    is_poisoned = is_poisoned or is_missing
    # A run that has begun does not start again; one that needs admission first starts where its limits are known.
    is_no_start = is_missing and (
        state.status is RUNNING or state.status is PAUSED or state.needs == HELD_LEVEL or state.debounce is not None
    )
    draft = TurnDraft(state, loaded, now, node, limits)
    pause = PauseRun(error=error_info(problem))
    starts = [message for message in loaded.messages if _is_start(message) and not is_no_start]
    timeouts = [message for message in loaded.messages if is_timeout(message)]  # which end a run even without its code
    others = [message for message in loaded.messages if message not in starts and message not in timeouts]
    # Before the commands, which may close their steps: the senders know that they count.
    reported = [] if is_poisoned and not is_missing else list(outcomes_of(loaded.signals))
    for given in (*starts, None, *reported, *controls_of(loaded.signals), *timeouts):
        if given is not None:
            draft.handle(given)
        if draft.state.status is RUNNING:  # right after the cause: so a replay knows that it had no effect
            draft.apply_commands([pause])
    lost = [given for given in inputs if is_missing and isinstance(given, NodeLost)]  # a node that has it repeats it
    inputs = [given for given in inputs if given not in lost]
    for later in (*sorted((*others, *inputs), key=_place), *task_operations(loaded.signals, draft.state, None)):
        if is_poisoned and isinstance(later, Message):
            draft.defer(later, problem)
        else:
            draft.handle(later)
    if isinstance(problem, VersionMismatch) and not others and (lost or _has_paused(draft)):
        draft.look_again(problem)
    return draft


def _has_paused(draft: TurnDraft) -> bool:
    return draft.state.status is PAUSED and any(isinstance(event.data, e.RunPaused) for event in draft.events)


class _Turn:
    """Passes inputs to the core and outcomes to the program, until nothing changes any more."""

    __slots__ = ("_draft", "_engine_signals", "_live", "_mailbox", "_updates")

    def __init__(self, cached: CachedRun, draft: TurnDraft) -> None:
        self._live = cached
        self._draft = draft
        self._mailbox: list[Signal] = []
        self._engine_signals: Sequence[Signal] = ()
        self._updates: list[Update] = []
        if draft.signals:
            self._mailbox = [signal for signal in draft.signals if signal.name not in ENGINE_SIGNALS]
            if len(self._mailbox) != len(draft.signals):
                self._engine_signals = draft.signals
                self._updates = list(updates_of(draft.signals))

    def run(self, inputs: Sequence[Input]) -> None:
        """Handle the inputs. Once the run has started, operators' commands come first: a pause holds back the rest."""
        signals = self._engine_signals
        commands = self._report(signals) if signals else []
        if self._live.state.awaits_definition:
            while commands:  # before its code continues: operators' decisions made meanwhile apply
                self._absorb(self._draft.handle(commands.pop(0)))
            if self._draft.state.awaits_definition:
                self._absorb(self._draft.handle(DefinitionFound()))
        if signals:
            starts = [given for given in inputs if _is_start(given)]
            others = sorted((given for given in inputs if not _is_start(given)), key=_place)
            live = self._live
            check, check_result = answer_check(live.replay.program), live.registry.check_result
            asked = task_operations(signals, live.state, check, check_result)
            inputs = [*starts, *commands, *others, *asked]
        else:
            inputs = sorted(inputs, key=_place) if len(inputs) > 1 else inputs
        for given in inputs:
            if self._mailbox and type(given) is Message and given.type == "TimerDue":
                self._offer_signals(until=given.due_at)  # a signal in time is not late because no turn was taken
            if type(given) is Message and given.type == "ExternalSignal":
                self._offer_requeued(given)
            else:
                self._absorb(self._draft.handle(given))
            if self._mailbox:
                self._offer_signals()
        if self._mailbox:
            self._offer_signals()
        while self._updates and self._offer_updates():
            self._offer_signals()
        if self._draft.should_pause:
            self._absorb(self._draft.handle(MessageDeadLettered()))

    def lose(self, begun: Sequence[str]) -> None:
        """Record that the attempts of these steps, which the turn starts, were lost before."""
        for step_id in begun:
            if step_id in self._draft.dispatch and step_id in self._draft.state.open_steps:
                self._absorb(self._draft.handle(NodeLost(step_id)))
        self._draft.dispatch = list(dict.fromkeys(self._draft.dispatch))

    def _report(self, signals: Sequence[Signal]) -> list[Control]:
        """Record the outcomes that were reported by token, and return the commands that are left to handle.

        Their senders know that they count, so they come before everything that may close their steps: all of them are
        recorded before the program gets the first. Only a pause that was requested before comes earlier. Failures come
        last: a success is known before a failure abandons it, and can be compensated.
        """
        commands = list(controls_of(signals))
        reported = sorted(outcomes_of(signals), key=self._place_of)
        if not reported:
            return commands
        while commands and commands[0].name == "PAUSE":
            self._absorb(self._draft.handle(commands.pop(0)))
        answers = [self._draft.handle(outcome) for outcome in reported]
        events = [event for answer in answers if isinstance(answer, Decision) for event in answer.events]
        asked = with_one_rotation([command for event in events for command in self._hand(event)])
        if asked:
            self._absorb(self._apply(asked))
        return commands

    def _place_of(self, reported: ReportedOutcome) -> tuple[bool, bool]:
        return not self._may_pause(reported), reported.outcome.error is not None

    def _may_pause(self, reported: ReportedOutcome) -> bool:
        """Return whether the run is paused if this fails: before the program issues any command, or else after it."""
        step = self._draft.state.open_steps.get(reported.step_id)
        options = step_options(getattr(step.body, "options", e.NULL)) if step is not None else None
        return reported.outcome.error is not None and options is not None and options.on_failure == "pause"

    def _offer_updates(self) -> bool:
        """Let the program answer the waiting updates, in order; return whether it has taken one."""
        left = []
        for update in self._updates:
            program = self._live.replay.program
            if program is None or not program.takes_updates or self._draft.state.status is not RUNNING:
                left.append(update)
                continue
            answer = self._draft.handle(replace(update, refusal=program.refusal_of(update.name, update.input)))
            if isinstance(answer, Decision) and answer.events:
                self._absorb(answer)
                self._offer_signals()
            else:
                left.append(update)
        has_taken = len(left) < len(self._updates)
        self._updates = left
        return has_taken

    def _offer_requeued(self, message: Message) -> None:
        """Offer a signal that was a dead letter to the wait that it addresses, otherwise to the oldest of its name."""
        state = self._draft.state
        dead = _requeued(message)
        program = self._live.replay.program
        takes_signals = state.status is RUNNING and (program is None or program.takes_signals)
        waits = state.waits.get(dead.name, ()) if dead is not None and takes_signals else ()
        step_id = message.step_id or next(iter(waits), None)
        if dead is None or step_id not in waits or (program is not None and step_id in program.lost_waits):
            problem = Conflict("there is no open wait for this signal")
            self._draft.defer(message, problem if dead is not None else InvalidInput("the dead letter is not a signal"))
            return
        signal = Signal(
            id=dead.id,
            run_id=state.run_id,
            name=dead.name,
            signal_id=dead.signal_id,
            inbox_seq=0,  # it has left the mailbox
            suffix=dead.suffix,
            accepted_at=dead.accepted_at,
            payload=dead.payload,
            step_id=step_id,  # so it moves no cursor: others of its name were taken before it
        )
        heard = self._heard(signal)
        self._absorb(
            self._draft.handle_requeued(message, replace(heard, step_id=message.step_id) if heard.misfit else heard)
        )

    def _heard(self, signal: Signal) -> Signal:
        """Return a signal with the result of the wait for it: that it does not match, or what a handler returned."""
        program = self._live.replay.program
        step = wait_for(self._draft.state, signal) if program is not None else None
        return signal if program is None or step is None else _heard_by(program, step, signal)

    def _absorb(self, answer: Decision | Refusal) -> None:
        """Pass events to the program, apply the commands that it issues, and repeat."""
        if type(answer) is not Decision:
            return
        events, rotations, advance = list(answer.events), 0, self._live.replay.advance
        for event in events:  # the list grows during the loop
            kind = type(event.data)
            if kind not in CONCERN_PROGRAM:
                continue
            if kind is e.ContinuedAsNew:
                rotations += 1
                if rotations > ROTATIONS_IN_ONE_BREATH:
                    raise RunawayWorkflow(f"the workflow began again {rotations} times without waiting for anything")
            commands = advance(event)
            if commands:
                events += self._apply(commands).events

    def _hand(self, event: Event) -> Sequence[Command]:
        return self._live.replay.advance(event) if type(event.data) in CONCERN_PROGRAM else ()

    def _apply(self, commands: Sequence[Command]) -> Decision:
        applied = self._draft.apply_commands(commands)
        if isinstance(applied, Refusal):
            raise RunError(f"the program issued an invalid command: {applied.error.message}")
        return applied

    def _offer_signals(self, until: Instant | None = None) -> None:
        """Give each waiting signal, in order, to the wait that it has by now; with `until`, only those that came by
        then.
        """
        position, mailbox, draft, replay = 0, self._mailbox, self._draft, self._live.replay
        while position < len(mailbox):
            state, program, signal = draft.state, replay.program, mailbox[position]
            if state.status is not RUNNING or (program is not None and not program.takes_signals):
                return
            position += 1
            step = wait_for(state, signal) if signal.name in state.waits else None
            if step is None or (program is not None and step.step_id in program.lost_waits):
                continue
            if until is not None and signal.accepted_at > until:
                return
            answer = draft.handle(signal if program is None else _heard_by(program, step, signal))
            if isinstance(answer, Decision) and answer.events:
                del mailbox[position - 1]
                self._absorb(answer)
                position = 0


def _heard_by(program: Program, step: OpenStep, signal: Signal) -> Signal:
    if not (program.kinds or program.handlers):
        return signal
    misfit = program.misfit_of(step.step_id, signal.payload)
    if misfit is not None:
        return replace(signal, misfit=misfit)
    received = program.receive(step.step_id, signal.payload) if program.handlers else None
    return signal if received is None else replace(signal, state_after=received.state_after, error=received.error)


def _requeued(message: Message) -> DeadSignal | None:
    try:
        return codec.decode(message.payload, DeadSignal)
    except InvalidInput:
        return None


def _is_start(given: Input) -> bool:
    return isinstance(given, Message) and given.type == "InternalContinue"


def _place(given: Input) -> int:
    """Return the rank of an input. An outcome that is available counts before the step's time is over."""
    if not isinstance(given, Message):
        return 1
    return 0 if _is_start(given) else 2 if is_deadline(given) else 3 if is_timeout(given) else 1


# --- which of them are kept


class RunCache:
    """The runs of one node that are in memory."""

    def __init__(self, store: Store, registry: Registry, most: int) -> None:
        self._store = store
        self._registry = registry
        self._most = most
        self._runs: OrderedDict[str, CachedRun] = OrderedDict()
        self._deferred: dict[str, tuple[int, Replay]] = {}  # by run, with the epoch of its lease
        self._read_ahead: dict[str, list[Event]] = {}

    def get(self, head: RunHead) -> CachedRun | None:
        """Return a run if it is in memory at this version."""
        cached = self._runs.get(head.run_id)
        if cached is None or cached.state.version != head.version:
            return None
        self._runs.move_to_end(head.run_id)
        return cached

    async def read_ahead(self, heads: Sequence[RunHead]) -> None:
        """Read the histories of runs that are about to be rebuilt, many by one query. A damaged one is read alone."""
        self._read_ahead = {}
        missing = [head for head in heads if self.get(head) is None]
        with suppress(StoreCorrupt):
            for start in range(0, len(missing), READ_AHEAD_RUNS):
                self._read_ahead |= await read_histories(self._store, missing[start : start + READ_AHEAD_RUNS])

    async def make(self, loaded: LoadedRun) -> tuple[CachedRun, RunError | None]:
        """Return a run, from memory or rebuilt. Also return why its program cannot continue, or None."""
        cached = self.get(loaded.head)
        if cached is not None:
            return cached, None
        epoch, before = self._deferred.pop(loaded.head.run_id, (0, None))
        self.forget(loaded.head.run_id)
        history = self._read_ahead.pop(loaded.head.run_id, None)
        if history is None or history[-1].run_seq < loaded.head.version:
            history = await read_since_rotation(self._store, loaded.head)
        else:
            refuse_sealed(history)
        await load_plan_of(self._registry, self._store, loaded.head, history)
        before = before if epoch == loaded.head.lease_epoch else None  # otherwise another node owned it in between
        cached, problem = rebuild(loaded.head.run_id, history, self._registry, before)
        if problem is None:
            self.keep(cached)
        return cached, problem

    async def fits(self, head: RunHead) -> bool:
        """Return whether a run waits for code that matches its history, and the code here does. Nothing is written."""
        if is_suspect(head):  # it could end this process
            return False
        try:
            history = await read_since_rotation(self._store, head)
            if not history or not state_of(head.run_id, history).awaits_definition:
                return False
            await load_plan_of(self._registry, self._store, head, history)
            cached, problem = rebuild(head.run_id, history, self._registry)
            problem = problem or problem_of_resuming(cached)
        except (RunError, StoreCorrupt):
            return False
        cached.close()
        return problem is None

    def beginning(self, new: NewRun) -> CachedRun | None:
        """Return a run that is about to be created, or just was; None if its plan is not in memory.

        Its history is known without reading the store.
        """
        if new.plan_sha256 is not None and self._registry.plans.get(new.plan_sha256) is None:
            return None
        return rebuild(new.run_id, new.events, self._registry)[0]

    def keep(self, cached: CachedRun) -> None:
        """Keep a run in memory."""
        self._runs[cached.state.run_id] = cached

    def make_again(self, cached: CachedRun, loaded: LoadedRun) -> None:
        """Release a run whose stretch has ended too early. It is rebuilt, and the end then waits for updates."""
        self.forget(cached.state.run_id)
        self._deferred[cached.state.run_id] = loaded.head.lease_epoch, cached.replay

    def trim(self) -> None:
        """Drop the least recently used runs."""
        while len(self._runs) > self._most:
            self._runs.popitem(last=False)[1].close()

    def forget(self, run_id: str) -> None:
        """Drop a run."""
        cached = self._runs.pop(run_id, None)
        self._deferred.pop(run_id, None)
        if cached is not None:
            cached.close()

    def close(self) -> None:
        """Drop all runs."""
        for cached in self._runs.values():
            cached.close()
        self._runs.clear()

    async def at_rest(self, loaded: LoadedRun) -> CachedRun:
        """Return a run with a program that is not begun."""
        self.forget(loaded.head.run_id)
        return at_rest(loaded.head.run_id, await read_since_rotation(self._store, loaded.head), self._registry)
