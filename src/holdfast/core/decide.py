"""What follows when a run is told something, or asks for something.

`decide` looks at a state and a message from the world, `enact` at a state and the commands of the program. Both
answer with a `Decision`: the events to append, the messages to leave in the run's own inbox, and the steps whose
activities are to be dispatched once all that is durable. A `Refusal` says whose fault it is; nothing changes then.

A message that is stale (its step is closed, its token old) is decided with an empty `Decision`: it has been handled,
and nothing follows. Duplicates are harmless for the same reason.
"""

from collections.abc import Callable, Iterable
from typing import Any, get_args

from msgspec import Struct

from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import messages as m
from holdfast.core.events import ADAPTER_VERSION, Body, EngineRunRef, Event
from holdfast.core.idempotency import event_id, event_key
from holdfast.core.instants import Instant
from holdfast.core.retry import retry_delay_ms
from holdfast.core.state import APPROVED, PAUSED, PENDING, RUNNING, OpenStep, RunState, retry_token
from holdfast.errors import CallerError, Conflict, InvalidInput, RunTerminal


class Decision(Struct, frozen=True):
    """What follows: events, messages to the run itself, and steps to dispatch after the commit."""

    events: tuple[Event, ...] = ()
    messages: tuple[m.Message, ...] = ()
    dispatch: tuple[str, ...] = ()


class Refusal(Struct, frozen=True):
    """Nothing follows; the error says why."""

    error: CallerError


NOTHING = Decision()

Input = m.Message | m.Signal | m.ActivitySucceeded | m.ActivityErrored | m.NodeLost | m.Control


def queue_run(run_id: str, queued: e.RunQueued, now: Instant, by: EngineRunRef) -> Decision:
    """Decide that a new run exists, and leave it the message that will start it."""
    state = RunState(run_id=run_id, plan_version=queued.plan_version)
    pen = _Pen(state, now, by)
    pen.write(queued)
    first = m.Message(signal_id="start", run_id=run_id, type="InternalContinue", occurred_at=now, expected_version=1)
    return pen.decision(messages=(first,))


def decide(state: RunState, message: Input, now: Instant, by: EngineRunRef) -> Decision | Refusal:
    """Answer what the world tells the run."""
    if state.is_finished:
        problem = f"run {state.run_id} is {state.status}"
        return Refusal(RunTerminal(problem, run_id=state.run_id, status=str(state.status)))
    try:
        return _DECIDERS[type(message)](state, message, _Pen(state, now, by))
    except InvalidInput as problem:
        return Refusal(problem)


def enact(state: RunState, commands: Iterable[c.Command], now: Instant, by: EngineRunRef) -> Decision | Refusal:
    """Answer what the program asks for. Only a running program asks for anything."""
    if state.status is not RUNNING:
        return Refusal(Conflict(f"run {state.run_id} is {state.status}; its program is not running"))
    pen = _Pen(state, now, by)
    try:
        for command in commands:
            if pen.has_ended:
                raise Conflict(f"run {state.run_id}: its program asks for more after its end: {command!r}")
            _ENACTORS[type(command)](state, command, pen)
    except CallerError as problem:
        return Refusal(problem)
    return pen.decision()


class _Pen:
    """Writes the events of one decision: envelope, idempotency key, and what goes with them.

    `opened` holds the steps that this decision has opened, by their first event, or None once it has given them up.
    """

    __slots__ = ("_by", "dispatch", "events", "has_ended", "messages", "now", "opened", "state")

    def __init__(self, state: RunState, now: Instant, by: EngineRunRef) -> None:
        self.state = state
        self.now = now
        self._by = by
        self.events: list[Event] = []
        self.messages: list[m.Message] = []
        self.dispatch: list[str] = []
        self.opened: dict[str, Event | None] = {}
        self.has_ended = False

    def write(
        self,
        body: Body,
        step_id: str | None = None,
        logical_attempt_id: int | None = None,
        engine_attempt_id: int | None = None,
        cause: str | None = None,
        parent: str | None = None,
    ) -> Event:
        event_type = type(body).__name__
        state = self.state
        if body.KEYED_BY == "step":
            position, attempt = step_id or "", logical_attempt_id or 1
        else:
            position, attempt = cause or self._occurrence(event_type), 0
        key = event_key(state.run_id, position, attempt, event_type, state.plan_version)
        event = Event(
            state.run_id,
            0,
            event_id(key),
            event_type,
            step_id,
            engine_attempt_id,
            logical_attempt_id,
            body,
            key,
            self.now,
            0,
            ADAPTER_VERSION,
            self._by,
            cause,
            parent,
            codec.schema_version(event_type),
        )
        self.events.append(event)
        return event

    def open(self, body: Body, step_id: str, engine_attempt_id: int | None = None) -> None:
        """Write the event that opens a step which the program has not used before."""
        if step_id in self.opened or step_id in self.state.open_steps:
            raise Conflict(f"run {self.state.run_id}: step {step_id!r} is there already", step_id=step_id)
        self.opened[step_id] = self.write(body, step_id, 1, engine_attempt_id)

    def close(self, step: OpenStep, body: Body, cause: str | None = None) -> None:
        """Write the event that closes a step."""
        self.write(body, step.step_id, step.logical_attempt_id, step.engine_attempt_id, cause, step.opened_event_id)

    def token(self, step_id: str) -> str:
        """Return a waiting token that no other wait of this run has had."""
        return f"{step_id}@{self.state.version + len(self.events) + 1}"

    def schedule(self, kind: m.MessageType, step_id: str, token: str, due_at: Instant) -> None:
        """Leave the run a message for later."""
        self.messages.append(
            m.Message(
                signal_id=f"{kind}:{token}",
                run_id=self.state.run_id,
                type=kind,
                occurred_at=self.now,
                due_at=due_at,
                expected_version=self.state.version,
                waiting_token=token,
                step_id=step_id,
            )
        )

    def decision(self, messages: tuple[m.Message, ...] = ()) -> Decision:
        return Decision(tuple(self.events), messages + tuple(self.messages), tuple(self.dispatch))

    def _occurrence(self, event_type: str) -> str:
        written = sum(event.event_type == event_type for event in self.events)
        return str(self.state.occurrences.get(event_type, 0) + written + 1)


# --- what the world tells ------------------------------------------------------------------------------------------


def _on_message(state: RunState, message: m.Message, pen: _Pen) -> Decision | Refusal:
    if message.expected_version is not None and message.expected_version > state.version:
        problem = f"the message expects version {message.expected_version}, the run is at {state.version}"
        return Refusal(Conflict(problem))
    if message.type == "ExternalSignal":
        return Refusal(InvalidInput("a signal is decided as a Signal, with its name and its place in the mailbox"))
    if message.type not in _MESSAGE_TYPES:
        return Refusal(InvalidInput(f"unknown message type {message.type!r}", field="type"))
    if message.type == "InternalContinue":
        if state.status is PENDING or state.status is APPROVED:
            pen.write(e.RunStarted())
        return pen.decision()
    step = state.open_steps.get(message.step_id or "")
    if step is None or step.token is None or step.token != message.waiting_token:
        return NOTHING
    decider, kinds = _MESSAGE_DECIDERS[message.type]
    return decider(step, message, pen) if step.kind in kinds else NOTHING


def _is_early(step: OpenStep, pen: _Pen) -> bool:
    """Say whether the step's time is still to come, by the time of this turn."""
    return step.due_at is not None and step.due_at > pen.now


def _on_timer(step: OpenStep, message: m.Message, pen: _Pen) -> Decision | Refusal:
    """Fire, but never early: what was handed out too soon by this turn's time is left for later."""
    if step.due_at is None:
        return NOTHING
    if _is_early(step, pen):
        return Decision(messages=(message,))
    if step.kind == "timer":
        pen.close(step, e.TimerFired())
    else:
        pen.close(step, e.SignalTimedOut(step.name))
    return pen.decision()


def _on_retry(step: OpenStep, message: m.Message, pen: _Pen) -> Decision | Refusal:
    return Decision(messages=(message,)) if _is_early(step, pen) else Decision(dispatch=(step.step_id,))


def _on_answer(step: OpenStep, message: m.Message, pen: _Pen) -> Decision | Refusal:
    answer = codec.decode(message.payload, m.Answer)
    pen.close(step, e.TaskCompleted(answer.actor, answer.answer))
    return pen.decision()


def _on_child(step: OpenStep, message: m.Message, pen: _Pen) -> Decision | Refusal:
    outcome = codec.decode(message.payload, m.ChildOutcome)
    pen.close(step, e.ChildFailed(outcome.error) if outcome.error else e.ChildCompleted(outcome.result))
    return pen.decision()


def _on_signal(state: RunState, signal: m.Signal, pen: _Pen) -> Decision | Refusal:
    """Give the signal to the oldest wait that it fits; if there is none it stays in the mailbox."""
    if state.status is not RUNNING:
        return NOTHING
    step = _wait_for(state, signal)
    if step is None:
        return NOTHING
    received = e.SignalReceived(signal.name, signal.signal_id, signal.suffix, signal.step_id, signal.payload)
    pen.close(step, received, cause=signal.id)
    return pen.decision()


def _wait_for(state: RunState, signal: m.Signal) -> OpenStep | None:
    if signal.step_id is not None:
        step = state.open_steps.get(signal.step_id)
        return step if step is not None and step.kind == "signal" and step.name == signal.name else None
    if signal.suffix <= state.cursors.get(signal.name, ""):
        return None
    return next((s for s in state.open_steps.values() if s.kind == "signal" and s.name == signal.name), None)


def _on_success(state: RunState, outcome: m.ActivitySucceeded, pen: _Pen) -> Decision | Refusal:
    step = _running(state, outcome)
    if step is None:
        return NOTHING
    pen.close(step, e.StepCompleted(outcome.result))
    return pen.decision()


def _on_error(state: RunState, outcome: m.ActivityErrored, pen: _Pen) -> Decision | Refusal:
    step = _running(state, outcome)
    if step is None or step.engine_attempt_id != outcome.engine_attempt_id:
        return NOTHING
    delay_ms = retry_delay_ms(outcome.retry, step.attempt, outcome.error, outcome.fraction)
    if delay_ms is None:
        pen.close(step, e.StepFailed(outcome.error))
        return pen.decision()
    due_at = pen.now + delay_ms * 1_000
    _retry(step, pen, e.StepRetried("failed", due_at, outcome.error))
    pen.schedule("RetryDue", step.step_id, retry_token(step.step_id, step.engine_attempt_id + 1), due_at)
    return pen.decision()


def _running(state: RunState, outcome: m.ActivitySucceeded | m.ActivityErrored) -> OpenStep | None:
    """Return the activity that this is the outcome of, unless it is closed or in a later logical attempt."""
    step = state.open_steps.get(outcome.step_id)
    is_it = step is not None and step.kind == "activity" and step.logical_attempt_id == outcome.logical_attempt_id
    return step if is_it else None


def _on_node_lost(state: RunState, lost: m.NodeLost, pen: _Pen) -> Decision | Refusal:
    """Dispatch the activity again, unless it was waiting for its next attempt: then no node was running it."""
    step = state.open_steps.get(lost.step_id)
    if step is None or step.kind != "activity" or _is_early(step, pen):
        return NOTHING
    _retry(step, pen, e.StepRetried("node lost"))
    pen.dispatch.append(step.step_id)
    return pen.decision()


def _retry(step: OpenStep, pen: _Pen, body: e.StepRetried) -> None:
    next_attempt = step.engine_attempt_id + 1
    pen.write(body, step.step_id, step.logical_attempt_id, next_attempt, None, step.opened_event_id)


# --- operators' commands --------------------------------------------------------------------------------------------


def _on_control(state: RunState, control: m.Control, pen: _Pen) -> Decision | Refusal:
    """Record the decision first, then what it changes."""
    why_not = "not permitted" if not control.is_allowed else _objection(state, control)
    verdict = e.SignalRejected if why_not else e.SignalAccepted
    reason = why_not or control.reason
    pen.write(verdict(control.name, control.signal_id, control.actor, reason, control.step_id), cause=control.id)
    if not why_not:
        _CONTROLS[control.name](state, control, pen)
    return pen.decision()


def _objection(state: RunState, control: m.Control) -> str:
    has_begun = state.status is RUNNING or state.status is PAUSED
    step_id = control.step_id or ""
    match control.name:
        case "PAUSE" | "RESUME" if not has_begun:
            return "the run has not started"
        case "APPROVE" if has_begun:
            return "the run has started already"
        case "RETRY_STEP" if step_id not in state.failed_steps:
            return f"step {step_id!r} has not failed"
        case "SKIP_STEP" if step_id not in state.failed_steps and step_id not in state.open_steps:
            return f"step {step_id!r} is neither open nor failed"
        case "RETRY_RUN":
            return "the run has not finished"
    return ""


def _pause(state: RunState, control: m.Control, pen: _Pen) -> None:
    if state.status is RUNNING:
        pen.write(e.RunPaused(control.reason), cause=control.id)


def _resume(state: RunState, control: m.Control, pen: _Pen) -> None:
    if state.status is PAUSED:
        pen.write(e.RunResumed(control.reason), cause=control.id)


def _cancel(state: RunState, control: m.Control, pen: _Pen) -> None:
    """Ask the program to stop; a run that has not started simply ends, and a paused one goes on to clean up."""
    if state.status in (PENDING, APPROVED):
        pen.write(e.RunCancelled(control.reason), cause=control.id)
        return
    if not state.is_cancelling:
        pen.write(e.RunCancelRequested(control.reason), cause=control.id)
    _resume(state, control, pen)


def _approve(state: RunState, control: m.Control, pen: _Pen) -> None:
    if state.status is PENDING:
        pen.write(e.RunApproved(control.actor), cause=control.id)


def _retry_step(state: RunState, control: m.Control, pen: _Pen) -> None:
    started = state.failed_steps[control.step_id or ""].started
    pen.write(
        started.body,
        started.step_id,
        started.logical_attempt_id + 1,
        started.engine_attempt_id + 1,
        control.id,
        started.opened_event_id,
    )
    pen.dispatch.append(started.step_id)


def _skip_step(state: RunState, control: m.Control, pen: _Pen) -> None:
    step_id = control.step_id or ""
    failed = state.failed_steps.get(step_id)
    pen.close(failed.started if failed else state.open_steps[step_id], e.StepSkipped(control.reason), control.id)


def _emergency_stop(state: RunState, control: m.Control, pen: _Pen) -> None:
    pen.write(e.RunCancelled(control.reason or "emergency stop"), cause=control.id)


_CONTROLS: dict[str, Callable[[RunState, m.Control, _Pen], None]] = {
    "PAUSE": _pause,
    "RESUME": _resume,
    "CANCEL": _cancel,
    "APPROVE": _approve,
    "RETRY_STEP": _retry_step,
    "SKIP_STEP": _skip_step,
    "EMERGENCY_STOP": _emergency_stop,
}


# --- what the program asks for ---------------------------------------------------------------------------------------


def _run_activity(state: RunState, command: c.RunActivity, pen: _Pen) -> None:
    body = e.StepStarted(command.name, command.input, command.queue, command.idempotency_key)
    pen.open(body, command.step_id, 1)
    pen.dispatch.append(command.step_id)


def _start_timer(state: RunState, command: c.StartTimer, pen: _Pen) -> None:
    token = pen.token(command.step_id)
    pen.open(e.TimerStarted(token, command.due_at), command.step_id)
    pen.schedule("TimerDue", command.step_id, token, command.due_at)


def _wait_signal(state: RunState, command: c.WaitSignal, pen: _Pen) -> None:
    token = pen.token(command.step_id)
    pen.open(e.SignalWaiting(command.name, token, command.until), command.step_id)
    if command.until is not None:
        pen.schedule("TimerDue", command.step_id, token, command.until)


def _ask_human(state: RunState, command: c.AskHuman, pen: _Pen) -> None:
    key = event_key(state.run_id, command.step_id, 1, "TaskCreated", state.plan_version)
    body = e.TaskCreated(
        event_id(key),
        command.name,
        pen.token(command.step_id),
        command.task_type,
        command.route,
        command.payload,
        command.form,
        command.roles,
        command.assignee,
        command.due_at,
    )
    pen.open(body, command.step_id)


def _start_child(state: RunState, command: c.StartChild, pen: _Pen) -> None:
    body = e.ChildStarted(
        command.child_run_id,
        command.plan_id,
        command.plan_version,
        pen.token(command.step_id),
        command.input,
        command.close_policy,
    )
    pen.open(body, command.step_id)


def _record_marker(state: RunState, command: c.RecordMarker, pen: _Pen) -> None:
    pen.write(e.MarkerRecorded(command.name, command.value), command.step_id, 1)


def _cancel_step(state: RunState, command: c.CancelStep, pen: _Pen) -> None:
    step_id, body = command.step_id, e.StepCancelled(command.reason)
    opened = pen.opened.get(step_id)
    if opened is not None:  # opened and given up in one turn
        pen.write(body, step_id, 1, opened.engine_attempt_id, parent=opened.event_id)
        pen.dispatch[:] = [other for other in pen.dispatch if other != step_id]
    elif step_id in state.open_steps and step_id not in pen.opened:
        pen.close(state.open_steps[step_id], body)
    else:
        return
    pen.opened[step_id] = None


def _continue_as_new(state: RunState, command: c.ContinueAsNew, pen: _Pen) -> None:
    pen.write(e.ContinuedAsNew(command.input))
    pen.dispatch.clear()


def _end(make: Callable[[Any], Body]) -> Callable[[RunState, Any, _Pen], None]:
    def end(state: RunState, command: Any, pen: _Pen) -> None:
        pen.write(make(command))
        pen.dispatch.clear()
        pen.has_ended = True

    return end


_ENACTORS: dict[type, Callable[[RunState, Any, _Pen], None]] = {
    c.RunActivity: _run_activity,
    c.StartTimer: _start_timer,
    c.WaitSignal: _wait_signal,
    c.AskHuman: _ask_human,
    c.StartChild: _start_child,
    c.RecordMarker: _record_marker,
    c.CancelStep: _cancel_step,
    c.ContinueAsNew: _continue_as_new,
    c.CompleteRun: _end(lambda command: e.RunCompleted(command.result)),
    c.FailRun: _end(lambda command: e.RunFailed(command.error)),
    c.CancelRun: _end(lambda command: e.RunCancelled(command.reason)),
}

_DECIDERS: dict[type, Callable[[RunState, Any, _Pen], Decision | Refusal]] = {
    m.Message: _on_message,
    m.Signal: _on_signal,
    m.ActivitySucceeded: _on_success,
    m.ActivityErrored: _on_error,
    m.NodeLost: _on_node_lost,
    m.Control: _on_control,
}

_MESSAGE_DECIDERS: dict[str, tuple[Callable[[OpenStep, m.Message, _Pen], Decision | Refusal], tuple[str, ...]]] = {
    "TimerDue": (_on_timer, ("timer", "signal")),
    "RetryDue": (_on_retry, ("activity",)),
    "TaskCompleted": (_on_answer, ("task",)),
    "SubWorkflowCompleted": (_on_child, ("child",)),
}
_MESSAGE_TYPES = frozenset(get_args(m.MessageType))
