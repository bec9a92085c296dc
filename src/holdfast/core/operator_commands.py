"""Operators' commands: pause, resume, cancel, approve, retry, skip, terminate.

The contract fixes the order (SIG-13): the authoriser has decided before; here the decision is recorded first, as
SignalAccepted or SignalRejected with actor and reason, and then applied.

A failed step can be retried or skipped until the program gets the failure, that is, while the run is paused. If the
failure itself paused the run, the run resumes when the last such step is settled. RESUME raises the failure in the
workflow, which may end the run, so it requires `raise_failure`.

A plan continues after a failed step (`on_failure: continue`), and knows what it skipped because of the failure. So a
failed step of a plan can also be retried or skipped later: the program gets the decision (`Replay`) and reconsiders
what it had skipped. The command is refused once the run is being cancelled or compensated.

APPROVE of a run that requires approval leaves the run the message that starts it; until then the run waits, along with
its signals. APPROVE of a run that has started, or of a step, answers the task in which a plan asks for the approval,
unless the task names who may answer it.

RETRY_STEP of an unresolved step (see `reconciliation.py`) asks its verifier again. For a failed activity that is to be
retried later, it begins the next attempt immediately, and no additional attempt counts toward the policy's limit.

A task or a wait is skipped without a result: only the people or senders it asks may answer it. Skipping requires a
separate permission (`may_override`), and the workflow gets None.
"""

from collections.abc import Callable, Sequence

from msgspec import Raw

from holdfast.core import events as e
from holdfast.core import messages as m
from holdfast.core import reconciliation
from holdfast.core.event_writer import Decision, EventWriter, Refusal, start_message
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import is_of_engine
from holdfast.core.keys import RESERVED_PREFIX, is_lock
from holdfast.core.plans import APPROVAL_PART, COMPENSATE_PART, STORE_PLAN, is_own_step, is_plan
from holdfast.core.state import APPROVED, PAUSED, PENDING, RUNNING, OpenStep, RunState
from holdfast.core.timing import pauses


def control(state: RunState, command: m.Control, writer: EventWriter) -> Decision | Refusal:
    """Record the decision, then its effects."""
    why_not = _objection(state, command, writer.now) if command.is_allowed else command.refusal or "not permitted"
    verdict = e.SignalRejected if why_not else e.SignalAccepted
    reason = why_not or command.reason
    writer.write(verdict(command.name, command.signal_id, command.actor, reason, command.step_id), cause=command.id)
    if not why_not:
        _CONTROLS[command.name](state, command, writer)
    return writer.decision()


def _objection(state: RunState, command: m.Control, now: Instant) -> str:
    has_begun = state.status is RUNNING or state.status is PAUSED
    match command.name:
        case "PAUSE" | "RESUME" if not has_begun:
            return "the run has not started"
        case "APPROVE" if has_begun or command.step_id is not None:
            return _objection_to_approval(state, command)
        case "APPROVE" if state.status is PENDING and not state.requires_approval:
            return "the run requires no approval"
        case "RESUME" if not command.raise_failure:
            return objection_to_resume(failures_to_settle(state))
        case "RETRY_STEP":
            return _objection_to_retry(state, command.step_id or "", now)
        case "SKIP_STEP":
            return _objection_to_skip(state, command, command.step_id or "", now)
        case "RETRY_RUN":
            return "the run has not finished"
    return "" if command.name in _CONTROLS else "the command cannot be read"


def failures_to_settle(state: RunState) -> tuple[str, ...]:
    """Return the failed steps that wait for an operator: `on_failure="pause"`, failure not yet delivered."""
    return tuple(
        step_id
        for step_id, failed in state.failed_steps.items()
        if not failed.is_delivered and pauses(failed.started, failed.error)
    )


def objection_to_resume(failed: Sequence[str]) -> str:
    """Return why a plain RESUME is refused while these failed steps wait for an operator; empty if it is not."""
    if not failed:
        return ""
    return (
        f"step {failed[0]!r} has failed, and to resume would raise its error in the workflow; retry the step "
        "(RETRY_STEP) or skip it (SKIP_STEP), or resume with raise_failure to let the workflow have the error"
    )


def _awaits_retry(step: OpenStep, now: Instant) -> bool:
    """Return whether an attempt of an activity has failed, and the next one is due later."""
    return step.kind == "activity" and not step.is_detached and step.due_at is not None and step.due_at > now


def _objection_to_retry(state: RunState, step_id: str, now: Instant) -> str:
    failed = state.failed_steps.get(step_id)
    if failed is None:
        step = state.open_steps.get(step_id)
        if step is None or (step.error is None and not step.is_unresolved):
            return f"step {step_id!r} has not failed"
        return "" if step.is_unresolved or _awaits_retry(step, now) else f"step {step_id!r} is being tried right now"
    if not failed.is_delivered:
        return ""
    if not is_plan(state.plan_id) or not is_own_step(step_id):
        return f"the workflow has gone on since step {step_id!r} failed"
    oldest = next(iter(state.open_steps), "")
    is_undone = state.is_cancelling or oldest.endswith(COMPENSATE_PART)
    return f"the run is being undone since step {step_id!r} failed" if is_undone else ""


def _approval(state: RunState, command: m.Control) -> OpenStep | None:
    """Return the open task in which a plan asks to approve the step, or the run if no step is named."""
    task = state.open_steps.get(f"{command.step_id or ''}{APPROVAL_PART}") if is_plan(state.plan_id) else None
    return task if task is not None and isinstance(task.body, e.TaskCreated) else None


def _objection_to_approval(state: RunState, command: m.Control) -> str:
    task = _approval(state, command)
    if task is None:
        return (
            "the run has started already" if command.step_id is None else f"step {command.step_id!r} awaits no approval"
        )
    assert isinstance(task.body, e.TaskCreated)
    if task.body.roles or task.body.assignee is not None:
        return f"the approval is for others to give: answer task {task.body.task_id}"
    return ""


def certain_objection_to_retry(state: RunState, step_id: str) -> str:
    """Return why a retry of a step is refused, whatever the run's inbox contains; empty if that is not certain.

    An open step may fail before the run decides.
    """
    return "" if step_id in state.open_steps else _objection_to_retry(state, step_id, 0)


OVERRIDES = frozenset(kind for body, kind in e.OPENING.items() if body.ASKS_OTHERS)
"""Kinds of steps that wait for an answer from outside: skipping one requires a separate permission."""

_WITHOUT_RESULT: frozenset[str] = OVERRIDES | {"timer"}


def _objection_to_skip(state: RunState, command: m.Control, step_id: str, now: Instant) -> str:
    step = state.open_steps.get(step_id)
    if step is not None:
        if is_of_engine(step_id):
            return f"step {step_id!r} asks about another step: answer its task, or skip that step"
        if step.kind == "update":
            return f"step {step_id!r} is an update, and somebody waits for its answer"
        kind = _KINDS.get(step.kind, step.kind)
        if step.kind in _WITHOUT_RESULT and command.result != e.NULL:
            return f"step {step_id!r} is a {kind}: it is skipped without a result"
        if step.kind in OVERRIDES and not command.may_override:
            return f"step {step_id!r} is a {kind}: to skip it takes a permission of its own, runs:override"
        return _objection_to_lock(step_id, step.body) or _objection_to_no_plan(state, step_id, step.body)
    failed = state.failed_steps.get(step_id)
    if failed is None:
        return f"step {step_id!r} is neither open nor failed"
    return _objection_to_retry(state, step_id, now) or _objection_to_no_plan(state, step_id, failed.started.body)


def _objection_to_lock(step_id: str, body: e.Body) -> str:
    """Return why the run of a lock is not skipped: its parent would continue without the lock, or fail."""
    if isinstance(body, e.ChildStarted) and is_lock(body.plan_id):
        scope, name, count = step_id.rpartition(body.plan_id)
        return (
            f"step {step_id!r} is a lock, which the run has or waits for: to let it in without the lock, skip the wait "
            f"{scope}{RESERVED_PREFIX}{name}{count}; to take the lock away, terminate run {body.child_run_id!r}"
        )
    return ""


def _objection_to_no_plan(state: RunState, step_id: str, body: e.Body) -> str:
    """Return why a step that stores a plan for code to run cannot be skipped; empty for any other step."""
    if isinstance(body, e.StepStarted) and body.name == STORE_PLAN and not is_plan(state.plan_id):
        return f"step {step_id!r} stores the plan that the workflow runs next, which cannot go on without it"
    return ""


_KINDS = {"signal": "wait for a signal"}
"""The names of step kinds in texts, where they differ from the kind."""


def _pause(state: RunState, command: m.Control, writer: EventWriter) -> None:
    if state.status is RUNNING:
        writer.write(e.RunPaused(command.reason), cause=command.id)


def definition_found(state: RunState, found: m.DefinitionFound, writer: EventWriter) -> Decision | Refusal:
    """Resume a run that is paused only because its definition, or code that fits, was missing."""
    if state.awaits_definition and not failures_to_settle(state):
        is_missing = state.last_error is None or state.last_error.code == "VersionMismatch"
        go_on_for(state, "a node has its definition" if is_missing else "a node has code that fits", None, writer)
    return writer.decision()


def message_dead_lettered(state: RunState, died: m.MessageDeadLettered, writer: EventWriter) -> Decision | Refusal:
    """Pause the run until an operator has settled the dead letter."""
    if state.status is RUNNING:
        writer.write(e.RunPaused("a message of the run has become a dead letter"))
    return writer.decision()


def _resume(state: RunState, command: m.Control, writer: EventWriter) -> None:
    if state.status is PAUSED:
        go_on_for(state, command.reason, command.id, writer)


def go_on_for(state: RunState, reason: str, cause: str | None, writer: EventWriter) -> None:
    """Resume a paused run."""
    writer.write(e.RunResumed(reason), cause=cause)
    for step in state.open_steps.values():
        if step.kind == "signal" and step.due_at is not None:  # a signal may have delayed its message
            writer.schedule("TimerDue", step.step_id, step.token or "", step.due_at)


def _cancel(state: RunState, command: m.Control, writer: EventWriter) -> None:
    """Cancel the program. A run that has not started ends immediately; a paused one resumes to clean up."""
    if state.status in (PENDING, APPROVED):
        writer.write(e.RunCancelled(command.reason), cause=command.id)
        return
    if not state.is_cancelling:
        writer.write(e.RunCancelRequested(command.reason), cause=command.id)
    _resume(state, command, writer)


def _approve(state: RunState, command: m.Control, writer: EventWriter) -> None:
    task = _approval(state, command)
    if task is not None:
        writer.close(task, e.TaskCompleted(command.actor, _APPROVED), command.id)
    elif state.status is PENDING:
        writer.write(e.RunApproved(command.actor), cause=command.id)
        writer.messages.append(start_message(state.run_id, writer.now, state.start_at))


_APPROVED = Raw(b'{"approved":true}')


def _retry_step(state: RunState, command: m.Control, writer: EventWriter) -> None:
    step = state.open_steps.get(command.step_id or "")
    if step is not None and step.is_unresolved:
        reconciliation.ask_again(step, writer, command.id)
        return
    if step is not None:  # the attempt that was due later never began and does not count
        writer.retry(step, e.StepRetried(e.NOT_BEGUN, writer.now), command.id)
        writer.dispatch.append(step.step_id)
        return
    started = state.failed_steps[command.step_id or ""].started
    writer.write(
        started.body,
        started.step_id,
        started.logical_attempt_id + 1,
        started.engine_attempt_id + 1,
        command.id,
        started.opened_event_id,
    )
    if isinstance(started.body, e.StepStarted):
        writer.schedule_deadline(started.step_id, started.logical_attempt_id + 1, started.body.options)
    writer.dispatch.append(started.step_id)
    _go_on(state, command, writer)


def _skip_step(state: RunState, command: m.Control, writer: EventWriter) -> None:
    step_id = command.step_id or ""
    failed = state.failed_steps.get(step_id)
    step = failed.started if failed else state.open_steps[step_id]
    writer.close(step, e.StepSkipped(command.reason, command.result), command.id)
    _go_on(state, command, writer)


def _go_on(state: RunState, command: m.Control, writer: EventWriter) -> None:
    """Once the last failed step is settled, resume a run paused only by such steps, or also by a missing definition."""
    left = [step_id for step_id, failed in state.failed_steps.items() if not failed.is_delivered]
    if (state.is_held or state.awaits_definition) and left == [command.step_id]:
        _resume(state, command, writer)


def _terminate(state: RunState, command: m.Control, writer: EventWriter) -> None:
    writer.write(e.RunCancelled(command.reason or "terminated"), cause=command.id)


_CONTROLS: dict[str, Callable[[RunState, m.Control, EventWriter], None]] = {
    "PAUSE": _pause,
    "RESUME": _resume,
    "CANCEL": _cancel,
    "APPROVE": _approve,
    "RETRY_STEP": _retry_step,
    "SKIP_STEP": _skip_step,
    "EMERGENCY_STOP": _terminate,
}
