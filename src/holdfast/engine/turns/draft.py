"""The decisions of one turn of a run, and the `Turn` that a store commits.

`TurnDraft` collects the decisions of a turn. It keeps the state current, so that each decision sees the effects of the
previous ones. `prepare_run` and the functions after it make runs that are about to be created.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.admission import AdmissionRequest
from holdfast.core.commands import Command
from holdfast.core.dead_letters import DeadLetter, Reason, defer, signal_to_dead_letter
from holdfast.core.debounce import offer
from holdfast.core.decide import Input, apply_commands, decide, is_taken, queue_run
from holdfast.core.event_writer import NOTHING, Decision, Refusal, admitted_message, starts_run
from holdfast.core.events import DebounceTerms, EngineRunRef, Event, RunQueued
from holdfast.core.index_rows import (
    APPROVAL,
    CONCERN_INDEX,
    NO_CHANGES,
    START,
    ActivityRecord,
    RuntimeSnapshot,
    index_changes,
    record_changes,
    runtime_snapshot,
)
from holdfast.core.instants import Instant
from holdfast.core.keys import event_id, event_key, fitting_id, request_key
from holdfast.core.messages import (
    MAILBOX,
    ChildOutcome,
    Message,
    Signal,
    SignalRequest,
    cancel_request,
    cancelled_text,
    child_outcome,
    with_arrival_times,
)
from holdfast.core.plans import DEBOUNCE_LEVEL, HELD_LEVEL, level_needed
from holdfast.core.run_timeouts import put_off
from holdfast.core.state import CANCELLED, PAUSED, PENDING, OpenStep, RunState, fold_onto, own_copy
from holdfast.core.streams import StreamChunks
from holdfast.errors import HoldfastError, InvalidInput, VersionMismatch
from holdfast.limits import NAME_BYTES, Limits
from holdfast.store.port import Job, LoadedRun, NewRun, Turn

LIMITS = Limits()

DEFINITION = "definition"
"""The id of the message that a run without its definition sends to itself, so that it is looked at again."""


_GIVING_UP = e.CLOSING_ALL | {e.StepCancelled}
"""The bodies of events by which a turn abandons steps."""

_PLAIN = frozenset({e.RunStarted, e.StepStarted, e.StepCompleted, e.RunCompleted})
"""The bodies of the events that most turns consist of: a turn with no others can be plain."""


class TurnDraft(Struct, gc=False, eq=False):
    """One turn of one run, while it is being decided."""

    state: RunState
    _loaded: LoadedRun
    _now: Instant
    _node: str
    _limits: Limits = LIMITS
    _by: EngineRunRef = EngineRunRef("")
    _before: RunState = RunState(run_id="")
    signals: tuple[Signal, ...] = ()
    events: list[Event] = []  # as decided: without their numbers and times in the store
    dispatch: list[str] = []
    received: tuple[tuple[int, int], ...] = ()
    kinds: set[type[e.Body]] = set()
    snapshot: RuntimeSnapshot | None = None
    _queued: list[str] = []
    _messages: tuple[Message, ...] = ()
    _consumed: tuple[str, ...] = ()
    _sent: tuple[Message | SignalRequest, ...] = ()
    _dead: tuple[DeadLetter, ...] = ()
    _has_keys: bool = False
    _admission: AdmissionRequest | None = None
    _touched: dict[str, OpenStep] = {}
    streams: tuple[StreamChunks, ...] = ()

    def __post_init__(self) -> None:
        self._before = self.state
        self._by = EngineRunRef(self._node, self._loaded.head.lease_epoch)
        if self._loaded.signals:
            self.signals = tuple(with_arrival_times(self._loaded.signals))

    def handle(self, message: Input) -> Decision | Refusal:
        """Decide the effect of a message or an outcome on the run, and note that it has been handled."""
        if type(message) is Message:
            answer = self._decide_message(message)
            if type(answer) is Refusal:
                self.defer(message, answer.error)
            else:
                self._consumed += (message.signal_id,)
            return self._take(answer)
        answer = decide(self.state, message, self._now, self._by)
        if type(answer) is Decision and answer.events:
            inbox_seq = getattr(message, "inbox_seq", None)  # set if it came through the mailbox
            if inbox_seq:
                self.received += ((inbox_seq, len(self.events)),)
            if type(message) is Signal and message.misfit is not None:
                self._dead += (signal_to_dead_letter(message, self._by.node, self._now),)
        return self._take(answer)

    def _decide_message(self, message: Message) -> Decision | Refusal:
        step = self._timed_wait(message)
        if step is not None:
            if self.state.status is PAUSED and self._is_held(step):
                return NOTHING
            if not self._loaded.is_whole and self._may_be_in_time(step):
                return Decision(messages=(message,))
        return decide(self.state, message, self._now, self._by)

    def handle_requeued(self, message: Message, signal: Signal) -> Decision | Refusal:
        """Let a wait take a signal that was a dead letter. If it still does not match, it becomes one again."""
        self._consumed += (message.signal_id,)
        if signal.misfit is None:
            return self.handle(signal)
        self._dead += (signal_to_dead_letter(signal, self._by.node, self._now),)
        return NOTHING

    def _is_held(self, step: OpenStep) -> bool:
        """Return whether a wait must not time out, because a signal came in time and a pause delays it.

        When the run is resumed the wait takes the signal; if it does not, it times out then.
        """
        if not self.signals:
            return False
        taken = {inbox_seq for inbox_seq, _ in self.received}  # an addressed signal that does not match is used up
        return is_taken(self.state, step, [signal for signal in self.signals if signal.inbox_seq not in taken])

    def _may_be_in_time(self, step: OpenStep) -> bool:
        """Return whether a signal that was not loaded may have come in time for a wait that would now time out.

        This is only so if the turn has taken signals of that name: the oldest ones were loaded.
        """
        return any(isinstance(event.data, e.SignalReceived) and event.data.name == step.name for event in self.events)

    def _timed_wait(self, message: Message) -> OpenStep | None:
        if message.type != "TimerDue":
            return None
        step = self.state.open_steps.get(message.step_id or "")
        return step if step is not None and step.kind == "signal" else None

    def _read_on(self) -> None:
        """Schedule another turn for the rest of the mailbox, if a wait may find more in it."""
        if (e.SignalWaiting in self.kinds and self.state.waits) or (self.received and not self.state.is_finished):
            word = Message(signal_id=MAILBOX, run_id=self.state.run_id, type="InternalContinue", occurred_at=self._now)
            self._messages += (word,)

    def defer(self, message: Message, problem: HoldfastError) -> None:
        """Defer a message, or after too many times leave it to an operator: accepted messages are not dropped."""
        self._consumed += (message.signal_id,)
        reason: Reason = "definition missing" if isinstance(problem, VersionMismatch) else "retries exhausted"
        left = defer(message, self._limits, reason, _detail(problem), self._by.node, self._now)
        if isinstance(left, DeadLetter):
            self._dead += (left,)
        else:
            self._messages += (left,)

    def enqueue(self, starts: Sequence[Message], request: AdmissionRequest) -> None:
        """Queue the run for admission instead of starting it: its start messages are held back until it is admitted."""
        self._consumed += tuple(message.signal_id for message in starts)
        self._messages += (admitted_message(self.state.run_id, self._now),)
        self._admission = request

    def look_again(self, problem: VersionMismatch) -> None:
        """Send the run a message to itself, so that it continues or becomes a dead letter if nothing else arrives."""
        word = Message(
            signal_id=DEFINITION,
            run_id=self.state.run_id,
            type="InternalContinue",
            occurred_at=self._now,
            expected_version=1,
        )
        self.defer(word, problem)

    @property
    def should_pause(self) -> bool:
        """Return whether the run must be paused because a message of it is now a dead letter."""
        return bool(self._dead) and self._limits.dead_letters.pauses_run

    def apply_commands(self, commands: Iterable[Command]) -> Decision | Refusal:
        """Decide the commands of the program."""
        return self._take(apply_commands(self.state, commands, self._now, self._by))

    def finish(self, *, release: bool = False) -> Turn:
        """Return the turn to commit. With `release` the same commit releases the run."""
        if self.dispatch:
            steps = self.state.open_steps  # a later part of the turn may have closed a step, or detached it
            self.dispatch = [each for each in self.dispatch if each in steps and not steps[each].is_detached]
        is_plain = self._look_over()
        if not self._loaded.is_whole:
            self._read_on()
        self.snapshot = runtime_snapshot(self.state)
        head, changes, sends = self._loaded.head, NO_CHANGES, self._sent
        if is_plain and not (self._dead or sends or self._queued or self.streams or self._admission is not None):
            return Turn(
                run_id=head.run_id,
                expected_version=self._before.version,
                epoch=head.lease_epoch,
                snapshot=self.snapshot,
                events=tuple(self.events),
                consumed=self._consumed,
                received=self.received,
                messages=self._messages,
                seen_inbox_seq=head.inbox_seq,
                release=release,
            )
        admission = None if self.state.is_finished else self._admission
        records: tuple[ActivityRecord, ...] = ()
        jobs_closed: tuple[str, ...] = ()
        if not is_plain:
            if not CONCERN_INDEX.isdisjoint(self.kinds):
                changes = index_changes(self._before, self.state, self.events)
            if self._concerns_keys():
                records = record_changes(self._before, self.events)
            if self.state.parent_run_id is not None or self._has_children():
                sends = (*sends, *self._sends())
            jobs_closed = self._jobs_closed()
        return Turn(
            run_id=head.run_id,
            expected_version=self._before.version,
            epoch=head.lease_epoch,
            snapshot=self.snapshot,
            events=tuple(self.events),
            consumed=self._consumed,
            received=self.received,
            messages=self._messages,
            seen_inbox_seq=head.inbox_seq,
            release=release or admission is not None,
            waits_opened=changes.waits_opened,
            waits_closed=changes.waits_closed,
            tasks=changes.tasks,
            records=records,
            starts=tuple(self._children()) if e.ChildStarted in self.kinds else (),
            sends=sends,
            jobs=tuple(self._jobs()) if self._queued else (),
            jobs_closed=jobs_closed,
            dead=self._dead,
            attributes=self.state.attributes if e.AttributesSet in self.kinds else None,
            admission=admission,
            streams=self.streams,
        )

    def _look_over(self) -> bool:
        """Note the kinds of the turn's events, and the steps that it concerns, in their state before the turn.

        All open steps are included only if the run ends. Return whether the turn is plain: its steps are activities
        without a key or a queue, so it writes events and no other rows.
        """
        before, kinds, touched = self._before.open_steps, self.kinds, self._touched
        for event in self.events:
            kinds.add(type(event.data))
            if event.step_id in before:
                touched[event.step_id] = before[event.step_id]
        if not kinds <= _PLAIN or self._has_keys or self._loaded.details or self.state.parent_run_id is not None:
            if not e.CLOSING_ALL.isdisjoint(kinds):
                self._touched = before
            return False
        if e.RunCompleted in kinds:
            self._touched = touched = before
            if e.StepStarted in kinds:  # a step that the turn opens and abandons is not dispatched, and may have a key
                return False
        for step in touched.values():
            body = step.body
            if type(body) is not e.StepStarted or body.queue or body.idempotency_key is not None:
                return False
        return True

    def closed(self) -> Iterator[str]:
        """Return the steps that were open before this turn, and are not after it."""
        return (step.step_id for step in self._touched.values() if step.step_id not in self.state.open_steps)

    def _concerns_keys(self) -> bool:
        """Return whether the turn concerns steps with idempotency keys, which have records."""
        if self._has_keys:
            return True
        for step in self._touched.values():
            if step.key is not None:
                return True
        if e.StepStarted not in self.kinds or _GIVING_UP.isdisjoint(self.kinds):
            return False
        # Steps that the turn opens and abandons are not dispatched.
        return any(getattr(event.data, "idempotency_key", None) is not None for event in self.events)

    def _jobs(self) -> Iterator[Job]:
        """Return the jobs that this turn adds to queues: activities for some node to execute, now or when due."""
        for step_id in dict.fromkeys(self._queued):
            step = self.state.open_steps.get(step_id)
            if step is not None and isinstance(step.body, e.StepStarted) and not step.is_detached:
                yield Job(
                    run_id=self.state.run_id,
                    step_id=step_id,
                    queue=step.queue,
                    activity=step.body.name,
                    input=step.body.input,
                    options=step.body.options,
                    logical_attempt_id=step.logical_attempt_id,
                    engine_attempt_id=step.engine_attempt_id,
                    first_engine_attempt_id=step.first_engine_attempt_id,
                    scheduled_at=step.opened_at,
                    due_at=step.due_at,
                    tenant=self._loaded.head.tenant,
                    environment=self._loaded.head.environment,
                    queued_attempt_id=step.engine_attempt_id,
                    idempotency_key=step.body.idempotency_key,
                    effect=step.effect,
                    context=self.state.context,
                )

    def _jobs_closed(self) -> tuple[str, ...]:
        """Return the steps that queues and stored progress need no longer keep."""
        after, closed = self.state.open_steps, list[str]()
        for step in self._touched.values():
            if step.queue and step.step_id not in after:
                closed.append(step.step_id)
        if self._loaded.details:
            closed += [step_id for step_id in self._loaded.details if step_id not in after]
        leaves = e.StepDetached in self.kinds or e.StepUnresolved in self.kinds
        for event in self.events if leaves else ():
            if type(event.data) in (e.StepDetached, e.StepUnresolved):  # no node should execute it any more
                left = after.get(event.step_id or "")
                closed += [left.step_id] if left is not None and left.queue and left.is_detached else []
        return tuple(dict.fromkeys(closed)) if closed else ()

    def _children(self) -> Iterator[NewRun]:
        """Return the runs that this turn starts, in the same tenant, project and environment.

        Their request keys cannot collide with those of callers: they are derived from the events that start the runs.
        """
        head = self._loaded.head
        for event in self.events:
            body = event.data
            if isinstance(body, e.ChildStarted):
                queued = RunQueued(
                    body.plan_id,
                    body.plan_version,
                    head.tenant,
                    head.project,
                    head.environment,
                    run_request_id=body.child_run_id,
                    input=body.input,
                    parent_run_id=event.run_id,
                    parent_step_id=event.step_id,
                    parent_token=body.token,
                    depth=self.state.depth + 1,
                    plan=body.plan,
                    attributes=body.attributes,
                    timeouts=body.timeouts,
                    context=self.state.context,
                )
                key = event.idempotency_key
                yield prepare_run(body.child_run_id, queued, self._now, self._by.node, tags=body.tags, key=key)

    def _sends(self) -> Iterator[Message | SignalRequest]:
        """Return the messages of this turn to other runs: its outcome to the parent, cancellations to children."""
        state = self.state
        if state.is_finished and not self._before.is_finished and state.parent_run_id is not None:
            yield _to_parent(state, self.events[-1], self._now)
        given_up = {e_.step_id for e_ in self.events if isinstance(e_.data, e.StepCancelled | e.StepSkipped)}
        has_ended = state.is_finished or e.ContinuedAsNew in self.kinds
        is_stopped = state.status is CANCELLED or any(getattr(e_.data, "timeout", "") for e_ in self.events)
        for step_id, child in self._known_children():
            is_cancelled = step_id in given_up
            if step_id not in state.open_steps and _is_given_up(child, is_cancelled, has_ended, is_stopped):
                reason = state.cancel_reason or _reason_of_end(self.events)
                why = f"the parent was cancelled: {reason}" if reason else "the parent gave it up"
                yield cancel_request(child.child_run_id, f"parent:{state.run_id}", why)

    def _has_children(self) -> bool:
        if e.ChildStarted in self.kinds:
            return True
        for step in self._touched.values():  # noqa: SIM110 - a generator would take longer than the loop
            if type(step.body) is e.ChildStarted:
                return True
        return False

    def _known_children(self) -> Iterator[tuple[str, e.ChildStarted]]:
        """Return the children that were open before this turn and are affected by it, and those that it starts."""
        for step in self._touched.values():
            if isinstance(step.body, e.ChildStarted):
                yield step.step_id, step.body
        for event in self.events:
            if isinstance(event.data, e.ChildStarted):
                yield event.step_id or "", event.data

    def _take(self, answer: Decision | Refusal) -> Decision | Refusal:
        if type(answer) is Decision:
            state = self.state
            if state is self._before:
                state = self.state = own_copy(state)
            fold_onto(state, answer.events)
            self.events += answer.events
            if answer.messages:
                self._messages += answer.messages
            if answer.sends:
                self._sent += answer.sends
            for step_id in answer.dispatch:
                step = state.open_steps.get(step_id)
                body = None if step is None else step.body
                if type(body) is e.StepStarted:
                    if body.idempotency_key is not None:
                        self._has_keys = True
                    if body.queue:
                        self._queued.append(step_id)
                        continue
                self.dispatch.append(step_id)
        return answer


def aside_turn(
    loaded: LoadedRun,
    now: Instant,
    node: str,
    damage: HoldfastError,
    limits: Limits,
    reason: Reason = "history irreparable",
) -> Turn:
    """Return a turn that changes nothing and defers everything, for a run whose state is not known."""
    head = loaded.head
    snapshot = head.snapshot or RuntimeSnapshot(status=head.status, state_version=head.version)
    left = [defer(message, limits, reason, _detail(damage), node, now) for message in loaded.messages]
    return Turn(
        run_id=head.run_id,
        expected_version=head.version,
        epoch=head.lease_epoch,
        snapshot=snapshot,
        consumed=tuple(message.signal_id for message in loaded.messages),
        messages=tuple(later for later in left if isinstance(later, Message)),
        seen_inbox_seq=head.inbox_seq,
        release=True,
        dead=tuple(letter for letter in left if isinstance(letter, DeadLetter)),
    )


def _detail(problem: HoldfastError) -> str:
    return f"{problem.code}: {problem.message}"


def _to_parent(state: RunState, last: Event, now: Instant) -> Message:
    body = last.data
    if isinstance(body, e.RunCompleted):
        outcome = ChildOutcome(body.result)
    elif isinstance(body, e.RunFailed):
        outcome = ChildOutcome(error=body.error)
    else:
        text = cancelled_text(state.run_id, getattr(body, "reason", ""))
        outcome = ChildOutcome(error=e.ErrorInfo("RunCancelled", text))
    parent_run_id = state.parent_run_id or ""
    return child_outcome(state.run_id, parent_run_id, state.parent_step_id, state.parent_token, outcome, now)


def _reason_of_end(events: Iterable[Event]) -> str:
    """Return the reason with which an operator or a time-out ended a run, or ""."""
    for event in events:
        if isinstance(event.data, e.RunCancelled):
            return event.data.reason
        if isinstance(event.data, e.RunFailed) and event.data.timeout:
            return event.data.error.message
    return ""


def _is_given_up(child: e.ChildStarted, is_cancelled: bool, has_ended: bool, is_stopped: bool) -> bool:
    """Return whether a child must be cancelled because its parent stopped waiting, finished, or was ended."""
    if is_cancelled:
        return child.close_policy != "abandon"
    return (has_ended and child.close_policy == "cancel") or (
        has_ended and is_stopped and child.close_policy != "abandon"
    )


def prepare_run(
    run_id: str,
    queued: RunQueued,
    now: Instant,
    node: str,
    *,
    reference_key: str | None = None,
    tags: tuple[str, ...] = (),
    key: str | None = None,
) -> NewRun:
    """Return the run to create. `key` recognises a retry of the request; the default is the key of this version."""
    problem = codec.check(queued.input, "input")
    if problem is None and codec.holds_sealed(queued.input):
        problem = InvalidInput(f"input: the key {codec.SEAL!r} of an object is reserved", field="input")
    if problem is not None:
        raise problem
    if tags or reference_key is not None:
        queued = replace(queued, tags=tags, reference_key=reference_key)
    decision = queue_run(run_id, queued, now, EngineRunRef(node))
    return NewRun(
        run_id=run_id,
        tenant=queued.tenant,
        project=queued.project,
        environment=queued.environment,
        plan_id=queued.plan_id,
        plan_version=queued.plan_version,
        run_request_id=queued.run_request_id or run_id,
        request_key=key or start_key(run_id, queued, queued.plan_version),
        input_sha256=codec.value_digest(queued.input),
        snapshot=RuntimeSnapshot(
            status=PENDING,
            state_version=1,
            last_executed_by=node,
            last_executed_on=now,
            attributes=queued.attributes,
            needs=0 if queued.timeouts is None and queued.context is e.NULL else _level(queued),
        ),
        events=decision.events,
        messages=decision.messages,
        parent_run_id=queued.parent_run_id,
        reference_key=reference_key,
        tags=tags,
    )


def _level(queued: RunQueued) -> int:
    return level_needed(is_bounded=queued.timeouts is not None, has_context=queued.context != e.NULL)


def held_for_approval(new: NewRun) -> NewRun:
    """Return a run that does not start before an operator has approved it."""
    new = _held(new, requires_approval=True)
    messages = tuple(message for message in new.messages if not starts_run(message))
    return replace(new, messages=messages, snapshot=replace(new.snapshot, waiting_kind=APPROVAL))


def held_until(new: NewRun, start_at: Instant) -> NewRun:
    """Return a run that does not start before this instant."""
    new = _held(new, start_at=start_at)
    new = replace(new, messages=tuple(put_off(message, start_at) for message in new.messages))
    if not any(map(starts_run, new.messages)):  # its approval sends it the message
        return new
    return replace(
        new,
        messages=tuple(replace(each, due_at=start_at) if starts_run(each) else each for each in new.messages),
        snapshot=replace(new.snapshot, waiting_kind=START, waiting_until=start_at),
    )


def debounced(new: NewRun, terms: DebounceTerms, input: Raw, now: Instant) -> NewRun:
    """Return a run with an input that a later start of the same key may replace, and its offer to replace another's.

    Where payloads are encrypted, the replacing input is bound to the request, so all runs of the key share one request
    id.
    """
    later = replace(offer(new.run_id, input, f"start {new.request_key}"), audit=new.audit)
    new = held_until(new, now + terms.quiet_ms * 1_000)
    first, *others = new.events
    assert isinstance(first.data, RunQueued)
    return replace(
        new,
        run_request_id=fitting_id(f"debounce:{new.run_id}", NAME_BYTES),
        events=(replace(first, data=replace(first.data, debounce=terms, needs=DEBOUNCE_LEVEL)), *others),
        snapshot=replace(new.snapshot, needs=DEBOUNCE_LEVEL),
        signals=(later,),
    )


def _held(new: NewRun, **why: Any) -> NewRun:
    """Return a run that is not in its admission queue yet; the priority for later is kept."""
    first, *others = new.events
    assert isinstance(first.data, RunQueued)
    priority = first.data.priority if new.admission is None else new.admission.priority
    needs = first.data.needs if new.admission is None else HELD_LEVEL
    body = replace(first.data, priority=priority, needs=needs, **why)
    snapshot = replace(new.snapshot, needs=max(needs, new.snapshot.needs))
    return replace(new, events=(replace(first, data=body), *others), snapshot=snapshot, admission=None)


def renamed(new: NewRun, run_id: str) -> NewRun:
    """Return a run that has not been created yet, with another id."""
    [first] = new.events
    key = event_key(run_id, "1", 0, first.event_type, new.plan_version)
    return replace(
        new,
        run_id=run_id,
        run_request_id=run_id if new.run_request_id == new.run_id else new.run_request_id,
        events=(replace(first, run_id=run_id, event_id=event_id(key), idempotency_key=key),),
        messages=tuple(replace(message, run_id=run_id) for message in new.messages),
    )


def start_key(run_id: str, queued: RunQueued, version: str) -> str:
    """Return the key that recognises a retry of a start of this version. Without a request id, the run's own id is
    used.
    """
    request_id = queued.run_request_id or run_id
    return request_key(queued.tenant, queued.project, queued.environment, queued.plan_id, version, request_id)
