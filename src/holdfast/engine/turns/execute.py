"""A run in memory, and how it takes its turn.

A cached run is a run's state and its program at the same version. It can be dropped at any time, and is
made again by replaying the history since the last rotation.

A program that cannot go on (its code and its history differ, its version is not known, it does not come to rest) is
never guessed at and never fails its run: the turn records what came in and pauses the run, to be looked at.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.commands import Command, PauseRun
from holdfast.core.decide import Input, wait_for
from holdfast.core.event_writer import Decision, Refusal
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.messages import (
    CONTROL_SIGNAL,
    ENGINE_SIGNALS,
    OUTCOME_SIGNAL,
    UPDATE_SIGNAL,
    ActivityOutcome,
    Control,
    ControlPayload,
    DeadSignal,
    DefinitionFound,
    Message,
    MessageDeadLettered,
    NodeLost,
    ReportedOutcome,
    Signal,
    Update,
    UpdatePayload,
    is_deadline,
)
from holdfast.core.state import PAUSED, RUNNING, OpenStep, RunState, state_of
from holdfast.core.tasks import task_operations
from holdfast.core.timing import step_options
from holdfast.engine.turns.draft import LIMITS, TurnDraft
from holdfast.errors import Conflict, InvalidInput, RunawayWorkflow, RunError, VersionMismatch
from holdfast.limits import ROTATIONS_IN_ONE_BREATH, Limits
from holdfast.program.outcomes import error_info
from holdfast.program.port import EndDeferred, Program
from holdfast.program.replay import CONCERN_PROGRAM, Replay
from holdfast.program.tasks import answer_check
from holdfast.registry import Registry
from holdfast.store.port import LoadedRun

T = TypeVar("T")


class CachedRun:
    """A run's state and program."""

    __slots__ = ("is_ahead", "is_closed", "replay", "state")

    def __init__(self, state: RunState, replay: Replay) -> None:
        self.state = state
        self.replay = replay
        self.is_ahead = False
        """Whether the program has taken a turn that is not durable yet."""
        self.is_closed = False

    def settle(self, state: RunState) -> None:
        """Take note that the turn is durable which has led to this state."""
        self.state = state
        self.is_ahead = False

    def close(self) -> None:
        """Let go of the program."""
        self.is_closed = True
        self.replay.close()


class _Beginning:
    """Makes the programs of a run: one for each rotation that it goes through.

    It does not hold the state: that grows old while the run goes on.
    """

    __slots__ = ("_depth", "_input", "_plan_id", "_plan_version", "_registry", "_rotation", "_run_id")

    def __init__(self, registry: Registry, state: RunState, input: Raw, rotation: int) -> None:
        self._registry = registry
        self._run_id = state.run_id
        self._plan_id = state.plan_id
        self._plan_version = state.plan_version
        self._depth = state.depth
        self._input = input
        self._rotation = rotation

    def __call__(self, event: Event) -> Program:
        if isinstance(event.data, e.ContinuedAsNew):
            self._rotation += 1
            self._input = event.data.input
        run = self._run_id, self._plan_id, self._plan_version, self._depth
        return self._registry.begin(*run, self._input, self._rotation)


def rebuild(
    run_id: str, history: Sequence[Event], registry: Registry, before: Replay | None = None
) -> tuple[CachedRun, RunError | None]:
    """Rebuild a run from its history, whole or since a rotation; with the reason if its program cannot go on.

    `before` is what kept it in step before, if the end of a stretch was deferred.
    """
    state = state_of(run_id, history)
    first = history[0].data
    if isinstance(first, e.ContinuedAsNew):
        rotation = state_of(run_id, history[:1]).occurrences["ContinuedAsNew"] - 1
        begin = _Beginning(registry, state, first.input, rotation)
    else:
        assert isinstance(first, e.RunQueued)
        begin = _Beginning(registry, state, first.input, 0)
    cached = CachedRun(state, Replay(begin))
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


def at_rest(run_id: str, history: Sequence[Event], registry: Registry) -> CachedRun:
    """Return a run whose program is not begun: to record what is known of a run without running its code."""
    state = state_of(run_id, history)
    cached = CachedRun(state, Replay(_Beginning(registry, state, e.NULL, 0)))
    cached.close()
    return cached


def _stuck(problem: BaseException) -> RunError:
    if isinstance(problem, RunError):
        return problem
    stuck = RunError(f"the program cannot go on: {type(problem).__name__}: {error_info(problem).message}")
    stuck.__cause__ = problem
    return stuck


def take_turn(
    cached: CachedRun,
    loaded: LoadedRun,
    inputs: Sequence[Input],
    now: Instant,
    node: str,
    limits: Limits = LIMITS,
) -> tuple[TurnDraft, RunError | None]:
    """Let a run take everything that waits for it; if its program cannot go on, pause the run instead.

    Raises `EndDeferred`, and nothing has happened then: the run is to be made again (`rebuild`) for the same turn.
    """
    draft = TurnDraft(cached.state, loaded, now, node, limits)
    cached.is_ahead = True
    try:
        _Turn(cached, draft).run([*loaded.messages, *inputs])
        return draft, None
    except EndDeferred as deferred:
        cached.replay.defer(deferred)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # user code that raised where no task could take it must not end the node
        stuck = _stuck(problem)
        return pause_turn(cached.state, loaded, inputs, stuck, now, node, limits), stuck


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
    """Return a turn that records what came in and leaves the run paused, without advancing its program.

    If what came in cannot be recorded (`is_poisoned`), messages are deferred instead. So they are if the run's
    definition is missing: a node that has it handles them, or else they become dead letters.
    """
    is_missing = isinstance(problem, VersionMismatch)
    is_poisoned = is_poisoned or is_missing
    has_begun = state.status is RUNNING or state.status is PAUSED
    draft = TurnDraft(state, loaded, now, node, limits)
    pause = PauseRun(error=error_info(problem))
    starts = [message for message in loaded.messages if _is_start(message) and not (is_missing and has_begun)]
    others = [message for message in loaded.messages if message not in starts]
    # Before the commands, which may close their steps: their senders know that they count.
    reported = [] if is_poisoned and not is_missing else list(_outcomes(loaded.signals))
    for given in (*starts, None, *reported, *controls_of(loaded.signals)):
        if given is not None:
            draft.handle(given)
        if draft.state.status is RUNNING:  # directly after what made it so: that is how replay knows it came to nothing
            draft.apply_commands([pause])
    lost = [given for given in inputs if is_missing and isinstance(given, NodeLost)]  # a node that has it does it again
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
    """Hands inputs to the core and outcomes to the program, until nothing moves any more."""

    __slots__ = ("_draft", "_engine_signals", "_live", "_mailbox", "_updates")

    def __init__(self, cached: CachedRun, draft: TurnDraft) -> None:
        self._live = cached
        self._draft = draft
        signals = draft.signals
        self._mailbox = [signal for signal in signals if signal.name not in ENGINE_SIGNALS] if signals else []
        self._engine_signals = signals if len(self._mailbox) != len(signals) else ()
        self._updates = list(_updates(signals)) if self._engine_signals else []

    def run(self, inputs: Sequence[Input]) -> None:
        """Take the inputs. Operators' commands come first, once the run has started: a pause holds what follows."""
        signals = self._engine_signals
        commands = self._report(signals) if signals else []
        if self._live.state.awaits_definition:
            self._absorb(self._draft.handle(DefinitionFound()))
        if signals:
            starts = [given for given in inputs if _is_start(given)]
            others = sorted((given for given in inputs if not _is_start(given)), key=_place)
            asked = task_operations(signals, self._live.state, answer_check(self._live.replay.program))
            inputs = [*starts, *commands, *others, *asked]
        else:
            inputs = sorted(inputs, key=_place) if len(inputs) > 1 else inputs
        for given in inputs:
            if self._mailbox and isinstance(given, Message) and given.type == "TimerDue":
                self._offer_signals(until=given.due_at)  # what came in time is not too late because no turn was taken
            if isinstance(given, Message) and given.type == "ExternalSignal":
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

    def _report(self, signals: Sequence[Signal]) -> list[Control]:
        """Record the outcomes that were reported by token, and return the commands that are left to take.

        Their senders know that they count, so they come before everything that may close their steps: all of them
        are recorded before the program hears of the first. Only a pause that was asked for before comes earlier.
        """
        commands = list(controls_of(signals))
        reported = sorted(_outcomes(signals), key=lambda reported: not self._may_pause(reported))
        if not reported:
            return commands
        while commands and commands[0].name == "PAUSE":
            self._absorb(self._draft.handle(commands.pop(0)))
        answers = [self._draft.handle(outcome) for outcome in reported]
        events = [event for answer in answers if isinstance(answer, Decision) for event in answer.events]
        asked = [command for event in events for command in self._hand(event)]
        if asked:
            self._absorb(self._apply(asked))
        return commands

    def _may_pause(self, reported: ReportedOutcome) -> bool:
        """Return whether the run is paused if this fails: before the program asks for anything, or else after it."""
        step = self._draft.state.open_steps.get(reported.step_id)
        options = step_options(getattr(step.body, "options", e.NULL)) if step is not None else None
        return reported.outcome.error is not None and options is not None and options.on_failure == "pause"

    def _offer_updates(self) -> bool:
        """Let the program answer the updates that wait, in order; return whether it has taken one."""
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
        """Offer a signal that was a dead letter to the wait that it is for, or else the oldest of its name."""
        state = self._draft.state
        dead = _requeued(message)
        program = self._live.replay.program
        takes_signals = state.status is RUNNING and (program is None or program.takes_signals)
        waits = state.waits.get(dead.name, ()) if dead is not None and takes_signals else ()
        step_id = message.step_id or next(iter(waits), None)
        if dead is None or step_id not in waits or (program is not None and step_id in program.lost_waits):
            problem = Conflict("there is no open wait for this signal")
            self._draft.defer(message, problem if dead is not None else InvalidInput("it is no signal"))
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
            step_id=step_id,  # so it moves no cursor: others of its name have gone before
        )
        heard = self._heard(signal)
        self._absorb(
            self._draft.handle_requeued(message, replace(heard, step_id=message.step_id) if heard.misfit else heard)
        )

    def _heard(self, signal: Signal) -> Signal:
        """Return a signal with what the wait for it makes of it: that it does not fit, or what a handler returned."""
        program = self._live.replay.program
        step = wait_for(self._draft.state, signal) if program is not None else None
        return signal if program is None or step is None else _heard_by(program, step, signal)

    def _absorb(self, answer: Decision | Refusal) -> None:
        """Hand events to the program, apply the commands that it issues, and repeat."""
        if isinstance(answer, Refusal):
            return
        events, rotations, advance = list(answer.events), 0, self._live.replay.advance
        for event in events:  # which grow on the way
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
            raise RunError(f"the program asks for what cannot be: {applied.error.message}")
        return applied

    def _offer_signals(self, until: Instant | None = None) -> None:
        """Give each waiting signal, in order, to the wait that it has by now; only those that came `until` then."""
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
    """Say in which order inputs are taken. An outcome that is at hand counts before the step's time is over."""
    if not isinstance(given, Message):
        return 1
    return 0 if _is_start(given) else 2 if is_deadline(given) else 1


def controls_of(signals: Iterable[Signal]) -> Iterable[Control]:
    """Return the operators' commands among signals."""
    for signal in signals:
        if signal.name == CONTROL_SIGNAL:
            command = _payload(signal, ControlPayload, _UNREADABLE_COMMAND)
            yield Control(
                id=signal.id,
                name=f"{command.name} {command.subject}".rstrip(),
                signal_id=signal.signal_id,
                actor=command.actor,
                reason=command.reason,
                step_id=command.step_id,
                is_allowed=command.refusal is None,
                inbox_seq=signal.inbox_seq,
                refusal=command.refusal or "",
                result=command.result,
                by=signal.by,
                raise_failure=command.raise_failure,
                may_override=command.may_override,
            )


def _outcomes(signals: Iterable[Signal]) -> Iterable[ReportedOutcome]:
    for signal in signals:
        if signal.name == OUTCOME_SIGNAL:
            outcome = _payload(signal, ActivityOutcome, _UNREADABLE_OUTCOME)
            yield ReportedOutcome(
                id=signal.id, step_id=signal.step_id or "", outcome=outcome, inbox_seq=signal.inbox_seq
            )


def _updates(signals: Iterable[Signal]) -> Iterable[Update]:
    for signal in signals:
        if signal.name == UPDATE_SIGNAL:
            update = _payload(signal, UpdatePayload, _UNREADABLE_UPDATE)
            yield Update(
                id=signal.id,
                update_id=signal.signal_id,
                name=update.name,
                input=update.input,
                inbox_seq=signal.inbox_seq,
                by=signal.by,
            )


_UNREADABLE_COMMAND = ControlPayload("", "", refusal="the command cannot be read")  # type: ignore[arg-type]
_UNREADABLE_UPDATE = UpdatePayload("", e.NULL)
_UNREADABLE_OUTCOME = ActivityOutcome(logical_attempt_id=0, engine_attempt_id=0)


def _payload(signal: Signal, kind: type[T], otherwise: T) -> T:
    """Return what a signal of the engine's own carries. One that was damaged is refused or answered like any other."""
    try:
        return codec.decode(signal.payload, kind)
    except InvalidInput:
        return otherwise
