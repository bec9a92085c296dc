"""What follows when a message reaches a run, or when its program issues commands.

`decide` takes a state and a message from outside; `apply_commands` takes a state and the commands of the program. Both
return a `Decision`: the events to append, the messages to leave in the run's own inbox, and the steps whose activities
are dispatched after the commit; or a `Refusal` with the error, which changes nothing.

A stale message (its step is closed, or its token old) gets an empty `Decision`: it has been handled, and nothing
follows. Duplicates are harmless for the same reason.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any, get_args

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.core import codec, debounce, reconciliation, run_timeouts, tasks
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import messages as m
from holdfast.core.event_writer import NOTHING, Decision, EventWriter, Refusal, start_message, starts_run
from holdfast.core.events import Body, EngineRunRef
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import LOST
from holdfast.core.keys import event_id, event_key
from holdfast.core.messages import SignalRequest, is_deadline
from holdfast.core.operator_commands import control, definition_found, message_dead_lettered
from holdfast.core.state import APPROVED, PENDING, RUNNING, OpenStep, RunState, carried, fold, retry_token
from holdfast.core.timing import Retry, StepOptions, deadline_token, overdue_text, retry_delay_ms, step_options
from holdfast.errors import CallerError, Conflict, InvalidInput, RunTerminal

Input = (
    m.Message
    | m.Signal
    | m.ActivitySucceeded
    | m.ActivityErrored
    | m.ActivityDetached
    | m.ReportedOutcome
    | m.NodeLost
    | m.ActivityReturned
    | m.DefinitionFound
    | m.MessageDeadLettered
    | m.Control
    | m.Update
    | m.TaskOperation
)


def queue_run(run_id: str, queued: e.RunQueued, now: Instant, by: EngineRunRef) -> Decision:
    """Create a new run, and leave it the message that will start it."""
    state = RunState(run_id=run_id, plan_version=queued.plan_version)
    writer = EventWriter(state, now, by)
    writer.write(queued)
    if queued.timeouts is not None:
        run_timeouts.schedule_execution(fold(state, writer.events), writer)
    if queued.requires_approval:  # the approval leaves it that message
        return writer.decision()
    return writer.decision(messages=(start_message(run_id, now),))


def decide(state: RunState, message: Input, now: Instant, by: EngineRunRef) -> Decision | Refusal:
    """Return what follows from a message to the run."""
    if state.is_finished:
        problem = f"run {state.run_id} is {state.status}"
        return Refusal(RunTerminal(problem, run_id=state.run_id, status=str(state.status)))
    try:
        writer = EventWriter(state, now, by)
        writer.caller = getattr(message, "by", None)
        return _DECIDERS[type(message)](state, message, writer)
    except InvalidInput as problem:
        return Refusal(problem)


def _on_message(state: RunState, message: m.Message, writer: EventWriter) -> Decision | Refusal:
    if message.expected_version is not None and message.expected_version > state.version:
        problem = f"the message expects version {message.expected_version}, the run is at {state.version}"
        return Refusal(Conflict(problem))
    if message.type == "ExternalSignal":
        return Refusal(InvalidInput("a signal is decided as a Signal, with its name and its place in the mailbox"))
    if message.type not in _MESSAGE_TYPES:
        return Refusal(InvalidInput(f"unknown message type {message.type!r}", field="type"))
    if message.type == "InternalContinue":
        if (state.status is PENDING or state.status is APPROVED) and starts_run(message):
            later = None if state.debounce is None else debounce.put_off(state, message, writer.now)
            if later is not None:
                return Decision(messages=(later,))
            if state.timeouts is not None:
                run_timeouts.start(state, writer)
            else:
                writer.write(e.RunStarted())
        return writer.decision()
    if message.type == "ActivityCompleted":
        return _on_outcome(state, message, writer)
    if message.step_id is None and message.type == "TimerDue":
        return run_timeouts.on_due(state, message, writer)
    step = state.open_steps.get(message.step_id or "")
    if step is not None and step.kind == "task" and message.type == "TimerDue":
        return tasks.on_timer(step, message, writer)
    if step is not None and step.kind == "activity" and is_deadline(message):
        return _on_deadline(step, message, writer)
    if step is None or step.token is None or step.token != message.waiting_token:
        return NOTHING
    decider, kinds = _MESSAGE_DECIDERS[message.type]
    return decider(step, message, writer) if step.kind in kinds else NOTHING


def _is_early(step: OpenStep, writer: EventWriter) -> bool:
    """Return whether the step is not due yet at the time of this turn."""
    return step.due_at is not None and step.due_at > writer.now


def _on_timer(step: OpenStep, message: m.Message, writer: EventWriter) -> Decision | Refusal:
    """Fire a timer or a time-out, but never early: a message that is not due at this turn's time is left for later."""
    if step.due_at is None or (step.kind == "activity" and not step.is_detached):
        return NOTHING
    if _is_early(step, writer):
        return Decision(messages=(message,))
    if step.kind == "activity":
        _fail_unreported(step, writer)
    elif step.kind == "timer":
        writer.close(step, e.TimerFired())
    else:
        writer.close(step, e.SignalTimedOut(step.name))
    return writer.decision()


def _on_deadline(step: OpenStep, message: m.Message, writer: EventWriter) -> Decision | Refusal:
    """End a step whose deadline has passed."""
    options = _options(step)
    deadline = options.deadline_of(step)
    if deadline is None or message.waiting_token != deadline_token(step.step_id, step.logical_attempt_id):
        return NOTHING
    if writer.now < deadline:
        return Decision(messages=(message,))
    error = e.ErrorInfo("TimeoutError", overdue_text(step, options.schedule_to_close_ms))
    if step.key is not None:
        if step.is_unresolved or (step.effect is not None and step.effect.is_last_look):
            return NOTHING  # an operator or the verifier decides
        if reconciliation.may_have_begun(step, writer.now):
            return reconciliation.look_once_more(step, error, "failed", writer)
    return _give_up(step, error, writer)


def _on_retry(step: OpenStep, message: m.Message, writer: EventWriter) -> Decision | Refusal:
    if step.is_detached:
        return NOTHING
    return Decision(messages=(message,)) if _is_early(step, writer) else Decision(dispatch=(step.step_id,))


def _on_child(step: OpenStep, message: m.Message, writer: EventWriter) -> Decision | Refusal:
    outcome = codec.decode(message.payload, m.ChildOutcome)
    writer.close(step, e.ChildFailed(outcome.error) if outcome.error else e.ChildCompleted(outcome.result))
    return writer.decision()


def _on_signal(state: RunState, signal: m.Signal, writer: EventWriter) -> Decision | Refusal:
    """Deliver the signal to the oldest matching wait; without one it stays in the mailbox."""
    if state.status is not RUNNING:
        return NOTHING
    step = wait_for(state, signal)
    if step is None:
        return NOTHING
    if signal.misfit is not None:
        dead = e.SignalDeadLettered(signal.name, signal.signal_id, signal.suffix, signal.step_id, signal.misfit)
        writer.write(dead, cause=signal.id)
        return writer.decision()
    received = e.SignalReceived(
        signal.name,
        signal.signal_id,
        signal.suffix,
        signal.step_id,
        signal.payload,
        signal.state_after,
        signal.error,
    )
    writer.close(step, received, cause=signal.id)
    return writer.decision()


def wait_for(state: RunState, signal: m.Signal, but: Container[str] = ()) -> OpenStep | None:
    """Return the open wait that would take the signal: the one that it is addressed to, or the oldest of its name.

    A wait takes no signal that was accepted after its deadline: it is about to time out. Only the store's time of
    acceptance decides, not the time of the turn or the clock of the node. `but` are waits that take other signals.
    """
    if signal.step_id is None and signal.suffix <= state.cursors.get(signal.name, ""):
        return None
    for step_id in state.waits.get(signal.name, ()):
        if (signal.step_id is None or signal.step_id == step_id) and step_id not in but:
            step = state.open_steps[step_id]
            if step.due_at is None or step.due_at >= signal.accepted_at:
                return step
    return None


def is_taken(state: RunState, step: OpenStep, signals: Iterable[m.Signal]) -> bool:
    """Return whether one of these unconsumed signals was accepted in time for this wait."""
    taken: set[str] = set()
    for signal in signals:
        taker = wait_for(state, signal, but=taken)
        if taker is not None:
            taken.add(taker.step_id)
    return step.step_id in taken


def _on_update(state: RunState, update: m.Update, writer: EventWriter) -> Decision | Refusal:
    """Accept an update. A run that has not started, or is paused, answers it later.

    The step is named by the store's id, because the sender's is unique only as long as its acceptance is kept.
    """
    step_id = update_step_id(update.id)
    if state.status is RUNNING and step_id not in state.open_steps:
        refusal = update.refusal
        was_refused = None if refusal is UNSET else refusal is not None
        writer.write(e.UpdateAccepted(update.name, update.input, was_refused), step_id, 1, cause=update.id)
        if isinstance(refusal, e.ErrorInfo):  # the cause shows replay that the program did not answer
            writer.write(e.UpdateCompleted(error=refusal), step_id, 1, cause=update.id)
    return writer.decision()


def update_step_id(id: str) -> str:
    """Return the step in which an update is answered, by the store's id of the signal that carried it."""
    return f"update:{id}"


def _on_success(state: RunState, outcome: m.ActivitySucceeded, writer: EventWriter) -> Decision | Refusal:
    step = _running(state, outcome.step_id, outcome.logical_attempt_id)
    if step is None:
        return NOTHING
    if step.effect is not None:
        return reconciliation.on_success(step, step.engine_attempt_id, outcome, writer, None, writer.node)
    writer.close(step, e.StepCompleted(outcome.result, outcome.artifacts))
    return writer.decision()


def _on_error(state: RunState, outcome: m.ActivityErrored, writer: EventWriter) -> Decision | Refusal:
    step = _running(state, outcome.step_id, outcome.logical_attempt_id)
    if step is None or step.engine_attempt_id != outcome.engine_attempt_id or step.is_unresolved:
        return NOTHING
    return _fail(step, outcome.error, outcome.retry, outcome.fraction, writer, writer.node)


def _on_detached(state: RunState, outcome: m.ActivityDetached, writer: EventWriter) -> Decision | Refusal:
    step = _running(state, outcome.step_id, outcome.logical_attempt_id)
    if step is None or step.engine_attempt_id != outcome.engine_attempt_id:
        return NOTHING
    return _detach(step, outcome, writer)


def _on_outcome(state: RunState, message: m.Message, writer: EventWriter) -> Decision | Refusal:
    """Record an outcome from another node: a success of any attempt; anything else only of the current or a later one.

    A job that is acquired again counts attempts without a message to the run, so the step moves on to that attempt.
    """
    step = state.open_steps.get(message.step_id or "")
    if step is not None and message.opened_at not in (0, step.opened_at):
        return NOTHING  # it belongs to a deleted run that had this id
    return _conclude(state, message.step_id or "", codec.decode(message.payload, m.ActivityOutcome), writer, None)


def _on_reported(state: RunState, reported: m.ReportedOutcome, writer: EventWriter) -> Decision | Refusal:
    if reported.step_id == m.INPUT_STEP:
        return debounce.replace_input(state, reported, writer)
    return _conclude(state, reported.step_id, reported.outcome, writer, reported.id)


def _conclude(
    state: RunState, step_id: str, outcome: m.ActivityOutcome, writer: EventWriter, cause: str | None
) -> Decision:
    step = _running(state, step_id, outcome.logical_attempt_id)
    is_success, attempt = outcome.error is None and not outcome.is_detached, outcome.engine_attempt_id
    if step is None and is_success and state.closed_effects:
        logical, node = outcome.logical_attempt_id, outcome.node
        return reconciliation.on_success_of_closed(state, step_id, logical, attempt, outcome.result, writer, node)
    if step is None or (attempt < step.engine_attempt_id and not is_success):
        return NOTHING
    if step.is_unresolved and not is_success:  # no known attempt is under way
        return reconciliation.on_stray_outcome(step, attempt, outcome.error, writer)
    lost = max(attempt - step.engine_attempt_id, 0)
    if lost:
        step = replace(step, engine_attempt_id=attempt, is_detached=False)
    if outcome.is_detached:
        return _detach(step, outcome, writer)
    if outcome.error is not None:
        return _fail(step, outcome.error, _options(step).retry, outcome.fraction, writer, outcome.node, cause, lost)
    if step.effect is not None or (step.key is not None and attempt < step.engine_attempt_id):
        return reconciliation.on_success(step, attempt, outcome, writer, cause, outcome.node)
    writer.close(step, e.StepCompleted(outcome.result, outcome.artifacts, outcome.confirmed_by), cause)
    return writer.decision()


def _running(state: RunState, step_id: str, logical_attempt_id: int) -> OpenStep | None:
    """Return the step of an outcome, unless it is closed or in a later logical attempt."""
    step = state.open_steps.get(step_id)
    is_it = step is not None and step.kind == "activity" and step.logical_attempt_id == logical_attempt_id
    return step if is_it else None


def _options(step: OpenStep) -> StepOptions:
    return step_options(getattr(step.body, "options", e.NULL))


def _fail(
    step: OpenStep,
    error: e.ErrorInfo,
    retry: Retry,
    fraction: float,
    writer: EventWriter,
    node: str,
    cause: str | None = None,
    lost: int = 0,
) -> Decision:
    """Retry by the policy and before the deadline, or fail the step. A job is requeued now and visible when due.

    `lost` is how often nodes that never reported had acquired the job before. `node` made the attempt.
    """
    deadline = _options(step).deadline_of(step)
    uncounted = 0 if retry.count_lost else lost
    delay_ms = retry_delay_ms(retry, step.attempt - uncounted, error, fraction)
    if delay_ms is None or (deadline is not None and writer.now + delay_ms * 1_000 >= deadline):
        doubt = None
        if step.key is not None:
            doubt = reconciliation.on_failure(step, error, retry, writer, node, cause, lost)
        return doubt if doubt is not None else _give_up(step, error, writer, cause)
    due_at = writer.now + delay_ms * 1_000
    made_by = "" if step.key is None else node
    writer.retry(step, e.StepRetried("failed", due_at, error, uncounted, node=made_by), cause)
    if step.queue:
        writer.dispatch.append(step.step_id)
    else:
        writer.schedule("RetryDue", step.step_id, retry_token(step.step_id, step.engine_attempt_id + 1), due_at)
    return writer.decision()


def _give_up(step: OpenStep, error: e.ErrorInfo, writer: EventWriter, cause: str | None = None) -> Decision:
    writer.fail(step, error, cause)
    return writer.decision()


def _detach(step: OpenStep, outcome: m.ActivityDetached | m.ActivityOutcome, writer: EventWriter) -> Decision:
    """Leave the step open until its outcome is reported, within a time limit."""
    if step.is_detached:
        return NOTHING
    attempt, until = step.engine_attempt_id, outcome.until
    body = e.StepDetached(until, outcome.result_schema)
    writer.write(body, step.step_id, step.logical_attempt_id, attempt, None, step.opened_event_id)
    if until is not None:
        writer.schedule("TimerDue", step.step_id, retry_token(step.step_id, attempt), until)
    return writer.decision()


def _fail_unreported(step: OpenStep, writer: EventWriter) -> None:
    """Fail an attempt whose outcome was not reported in time."""
    options = _options(step)
    deadline = options.deadline_of(step)
    has_time_left = deadline is None or writer.now < deadline
    unreported = f"the outcome of activity {step.name!r} was not reported in time"
    problem = unreported if has_time_left else overdue_text(step, options.schedule_to_close_ms)
    _fail(step, e.ErrorInfo("TimeoutError", problem, retryable=has_time_left), options.retry, 0.0, writer, "")


def _on_node_lost(state: RunState, lost: m.NodeLost, writer: EventWriter) -> Decision | Refusal:
    """Dispatch the activity again, unless it was waiting for its next attempt: then no node was executing it.

    The lost attempt may have begun, so it counts toward the limit of the policy. An attempt that waited for a node with
    the activity has not begun, and begins now.
    """
    step = state.open_steps.get(lost.step_id)
    if step is None or step.kind != "activity" or step.is_detached or step.is_unresolved or _is_early(step, writer):
        return NOTHING
    if step.is_unbegun:
        writer.retry(step, e.StepRetried(e.NOT_BEGUN, writer.now))
        writer.dispatch.append(step.step_id)
        return writer.decision()
    retry = _options(step).retry
    problem = f"the node was lost that ran attempt {step.attempt} of activity {step.name!r}; its outcome is not known"
    error = e.ErrorInfo("NodeLost", problem, retryable=True)
    is_last = retry_delay_ms(retry, step.attempt if retry.count_lost else 0, error, 0.0) is None
    if step.key is not None:
        return reconciliation.on_loss(step, error, is_last, retry, writer, state.last_executed_by)
    if is_last:
        return _give_up(step, replace(error, retryable=False), writer)
    writer.retry(step, e.StepRetried(LOST, uncounted=0 if retry.count_lost else 1))
    writer.dispatch.append(step.step_id)
    return writer.decision()


def _on_returned(state: RunState, returned: m.ActivityReturned, writer: EventWriter) -> Decision | Refusal:
    """Leave an attempt that has not begun to the next node, now or when one has the activity. It does not count."""
    step = _running(state, returned.step_id, returned.logical_attempt_id)
    if step is None or step.engine_attempt_id != returned.engine_attempt_id or step.is_detached:
        return NOTHING
    if returned.is_lacking:
        writer.retry(step, e.StepRetried(e.NOT_BEGUN))
        return writer.decision()
    writer.retry(step, e.StepRetried(e.NOT_BEGUN, writer.now))
    writer.schedule("RetryDue", step.step_id, retry_token(step.step_id, step.engine_attempt_id + 1), writer.now)
    return writer.decision()


_DECIDERS: dict[type, Callable[[RunState, Any, EventWriter], Decision | Refusal]] = {
    m.Message: _on_message,
    m.Signal: _on_signal,
    m.ActivitySucceeded: _on_success,
    m.ActivityErrored: _on_error,
    m.ActivityDetached: _on_detached,
    m.ReportedOutcome: _on_reported,
    m.NodeLost: _on_node_lost,
    m.ActivityReturned: _on_returned,
    m.DefinitionFound: definition_found,
    m.MessageDeadLettered: message_dead_lettered,
    m.Control: control,
    m.Update: _on_update,
    m.TaskOperation: tasks.operate,
}

RECORDED_AS: dict[str, tuple[type[e.Body], ...]] = {
    m.CONTROL_SIGNAL: e.recording("control"),
    m.UPDATE_SIGNAL: e.recording("update"),
    m.TASK_SIGNAL: e.recording("task"),
    m.OUTCOME_SIGNAL: e.recording("outcome"),
}
"""The first event of the decision about an engine signal, by the signal's name."""

_MESSAGE_DECIDERS: dict[
    str, tuple[Callable[[OpenStep, m.Message, EventWriter], Decision | Refusal], tuple[str, ...]]
] = {
    "TimerDue": (_on_timer, ("timer", "signal", "activity")),
    "RetryDue": (_on_retry, ("activity",)),
    "TaskCompleted": (tasks.on_answer, ("task",)),
    "SubWorkflowCompleted": (_on_child, ("child",)),
}
_MESSAGE_TYPES = frozenset(get_args(m.MessageType))


# --- commands of the program


_NO_OPTIONS = len(e.NULL)


def apply_commands(
    state: RunState, commands: Iterable[c.Command], now: Instant, by: EngineRunRef
) -> Decision | Refusal:
    """Return what follows from these commands. Only a running program issues commands."""
    if state.status is not RUNNING:
        return Refusal(Conflict(f"run {state.run_id} is {state.status}; its program is not running"))
    writer = EventWriter(state, now, by)
    try:
        for command in commands:
            if writer.has_ended:
                raise Conflict(f"run {state.run_id}: its program issues a command after its end: {command!r}")
            _APPLIERS[type(command)](state, command, writer)
    except CallerError as problem:
        return Refusal(problem)
    return writer.decision()


def _run_activity(state: RunState, command: c.RunActivity, writer: EventWriter) -> None:
    body = e.StepStarted(command.name, command.input, command.queue, command.idempotency_key, command.options)
    failed = state.failed_steps.get(command.step_id) if command.logical_attempt_id > 1 else None
    engine_attempt_id = 1 if failed is None else failed.started.engine_attempt_id + 1
    writer.open(body, command.step_id, engine_attempt_id, command.logical_attempt_id)
    if len(command.options) > _NO_OPTIONS:
        writer.schedule_deadline(command.step_id, command.logical_attempt_id, command.options)
    writer.dispatch.append(command.step_id)


def _start_timer(state: RunState, command: c.StartTimer, writer: EventWriter) -> None:
    token = writer.token(command.step_id)
    writer.open(e.TimerStarted(token, command.due_at), command.step_id)
    writer.schedule("TimerDue", command.step_id, token, command.due_at)


def _wait_signal(state: RunState, command: c.WaitSignal, writer: EventWriter) -> None:
    token = writer.token(command.step_id)
    writer.open(e.SignalWaiting(command.name, token, command.until), command.step_id)
    if command.until is not None:
        writer.schedule("TimerDue", command.step_id, token, command.until)


def _send_signal(state: RunState, command: c.SendSignal, writer: EventWriter) -> None:
    sent = e.SignalSent(command.run_id, command.name, command.signal_id, command.payload, command.addressed_to)
    writer.write(sent, command.step_id, 1)
    request = SignalRequest(
        run_id=sent.run_id,
        name=sent.name,
        payload=sent.payload,
        signal_id=sent.signal_id,
        step_id=sent.addressed_to,
    )
    writer.sends.append(request)


def _ask_human(state: RunState, command: c.AskHuman, writer: EventWriter) -> None:
    key = event_key(state.run_id, command.step_id, 1, "TaskCreated", state.plan_version)
    body = e.TaskCreated(
        event_id(key),
        command.name,
        writer.token(command.step_id),
        command.task_type,
        command.route,
        command.payload,
        command.form,
        command.roles,
        command.assignee,
        command.due_at,
        command.remind_ms,
        command.escalation,
        command.approvals,
        command.of,
    )
    writer.open(body, command.step_id)
    tasks.schedule(command.step_id, body, writer)


def _start_child(state: RunState, command: c.StartChild, writer: EventWriter) -> None:
    body = e.ChildStarted(
        command.child_run_id,
        command.plan_id,
        command.plan_version,
        writer.token(command.step_id),
        command.input,
        command.close_policy,
        command.plan,
        command.attributes,
        command.tags,
        command.priority,
        command.timeouts,
    )
    writer.open(body, command.step_id)


def _record_marker(state: RunState, command: c.RecordMarker, writer: EventWriter) -> None:
    writer.write(e.MarkerRecorded(command.name, command.value), command.step_id, 1)


def _set_attributes(state: RunState, command: c.SetAttributes, writer: EventWriter) -> None:
    writer.write(e.AttributesSet(command.values), command.step_id, 1)


def _cancel_step(state: RunState, command: c.CancelStep, writer: EventWriter) -> None:
    step_id, body = command.step_id, e.StepCancelled(command.reason)
    opened = writer.opened.get(step_id)
    if opened is not None:  # opened and cancelled in one turn
        writer.write(body, step_id, opened.logical_attempt_id or 1, opened.engine_attempt_id, parent=opened.event_id)
        writer.dispatch[:] = [other for other in writer.dispatch if other != step_id]
    elif step_id in state.open_steps and step_id not in writer.opened:
        writer.close(state.open_steps[step_id], body)
    else:
        return
    writer.opened[step_id] = None


def _complete_update(state: RunState, command: c.CompleteUpdate, writer: EventWriter) -> None:
    step = state.open_steps.get(command.step_id)
    if step is not None:
        writer.close(step, e.UpdateCompleted(command.result, command.error))


def _pause_run(state: RunState, command: c.PauseRun, writer: EventWriter) -> None:
    writer.write(e.RunPaused(command.error.code, command.error))
    writer.has_ended = True


def _continue_as_new(state: RunState, command: c.ContinueAsNew, writer: EventWriter) -> None:
    so_far = fold(state, writer.events)  # with the events of this decision so far
    lost = [each for each in command.steps or () if each not in so_far.open_steps and each not in so_far.failed_steps]
    if lost:
        problem = f"run {state.run_id}: step {lost[0]!r} is neither open nor failed, and cannot be carried over"
        raise Conflict(problem, step_id=lost[0])
    known = carried(so_far, command.updates, command.steps)
    rotated = writer.write(e.ContinuedAsNew(command.input, codec.encode(known)))
    if state.timeouts is not None:
        run_timeouts.schedule_stretch(state, writer)
    if command.steps is None:
        writer.events[-1] = replace(rotated, schema_version=1)  # every version can read it
        writer.dispatch.clear()
    else:
        kept = frozenset(command.steps)
        writer.dispatch[:] = [step_id for step_id in writer.dispatch if step_id in kept]


def _end(make: Callable[[Any], Body]) -> Callable[[RunState, Any, EventWriter], None]:
    def end(state: RunState, command: Any, writer: EventWriter) -> None:
        writer.write(make(command))
        writer.dispatch.clear()
        writer.has_ended = True

    return end


def _end_cancelled(state: RunState, command: c.CancelRun, writer: EventWriter) -> None:
    """End a run that was cancelled: by a caller, or because it took too long."""
    reason = command.reason or state.cancel_reason
    body = e.RunCancelled(reason) if not state.timed_out else run_timeouts.failure(state, state.timed_out)
    _end(lambda _: body)(state, command, writer)


_APPLIERS: dict[type, Callable[[RunState, Any, EventWriter], None]] = {
    c.RunActivity: _run_activity,
    c.StartTimer: _start_timer,
    c.WaitSignal: _wait_signal,
    c.SendSignal: _send_signal,
    c.AskHuman: _ask_human,
    c.StartChild: _start_child,
    c.RecordMarker: _record_marker,
    c.SetAttributes: _set_attributes,
    c.CancelStep: _cancel_step,
    c.CompleteUpdate: _complete_update,
    c.PauseRun: _pause_run,
    c.ContinueAsNew: _continue_as_new,
    c.CompleteRun: _end(lambda command: e.RunCompleted(command.result)),
    c.FailRun: _end(lambda command: e.RunFailed(command.error)),
    c.CancelRun: _end_cancelled,
}
