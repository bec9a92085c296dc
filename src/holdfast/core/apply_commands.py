"""What follows from the commands of a program."""

from collections.abc import Callable, Iterable
from typing import Any

from holdfast.core import codec, tasks
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.event_writer import Decision, EventWriter, Refusal
from holdfast.core.events import Body, EngineRunRef
from holdfast.core.instants import Instant
from holdfast.core.keys import event_id, event_key
from holdfast.core.messages import SignalRequest
from holdfast.core.state import RUNNING, RunState, carried, fold
from holdfast.errors import CallerError, Conflict

_NO_OPTIONS = len(e.NULL)


def apply_commands(
    state: RunState, commands: Iterable[c.Command], now: Instant, by: EngineRunRef
) -> Decision | Refusal:
    """Return what follows from these commands. Only a running program issues any."""
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
    writer.open(body, command.step_id, 1)
    if len(command.options) > _NO_OPTIONS:
        writer.schedule_deadline(command.step_id, 1, command.options)
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
    )
    writer.open(body, command.step_id)


def _record_marker(state: RunState, command: c.RecordMarker, writer: EventWriter) -> None:
    writer.write(e.MarkerRecorded(command.name, command.value), command.step_id, 1)


def _cancel_step(state: RunState, command: c.CancelStep, writer: EventWriter) -> None:
    step_id, body = command.step_id, e.StepCancelled(command.reason)
    opened = writer.opened.get(step_id)
    if opened is not None:  # opened and given up in one turn
        writer.write(body, step_id, 1, opened.engine_attempt_id, parent=opened.event_id)
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
    writer.write(e.ContinuedAsNew(command.input, codec.encode(carried(so_far, command.updates))))
    writer.dispatch.clear()


def _end(make: Callable[[Any], Body]) -> Callable[[RunState, Any, EventWriter], None]:
    def end(state: RunState, command: Any, writer: EventWriter) -> None:
        writer.write(make(command))
        writer.dispatch.clear()
        writer.has_ended = True

    return end


_APPLIERS: dict[type, Callable[[RunState, Any, EventWriter], None]] = {
    c.RunActivity: _run_activity,
    c.StartTimer: _start_timer,
    c.WaitSignal: _wait_signal,
    c.SendSignal: _send_signal,
    c.AskHuman: _ask_human,
    c.StartChild: _start_child,
    c.RecordMarker: _record_marker,
    c.CancelStep: _cancel_step,
    c.CompleteUpdate: _complete_update,
    c.PauseRun: _pause_run,
    c.ContinueAsNew: _continue_as_new,
    c.CompleteRun: _end(lambda command: e.RunCompleted(command.result)),
    c.FailRun: _end(lambda command: e.RunFailed(command.error)),
    c.CancelRun: _end(lambda command: e.RunCancelled(command.reason)),
}
