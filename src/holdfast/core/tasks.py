"""The operations on a task, and their effects. This module does not deal with the storage of tasks.

A person is *effective* for a task that is assigned to them, that names one of their roles, or that has neither a role
nor an assignee. It follows that:

* the assignee may claim, release and complete; without an assignee, every effective person may;
* every effective person, and every administrator, may assign, reassign and comment.

Every decision is recorded: the operation, or `TaskRefused` with the reason. A task that several people answer loses its
assignee after each answer, so that the next person can answer.
"""

from collections.abc import Callable, Iterable, Iterator

from msgspec import Raw, UnsetType

from holdfast.core import codec, reconciliation
from holdfast.core import events as e
from holdfast.core import messages as m
from holdfast.core.event_writer import NOTHING, Decision, EventWriter, Refusal
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import is_of_engine
from holdfast.core.state import APPROVED, NO_PROGRESS, PENDING, GivenAnswer, OpenStep, RunState, TaskProgress
from holdfast.errors import CallerError, Conflict, InvalidInput, NotPermitted

ENGINE = "holdfast"
"""The actor of the engine's own operations on a task."""

DECISIONS = e.recording("task")
"""The bodies that record the decision about an operation, as its first event."""

Check = Callable[[Raw, Raw], None]
"""Raises `InvalidInput` if an answer (the second) does not fit a form (the first)."""

CheckResult = Callable[[e.Body, Raw], None]
"""Raises `InvalidInput` if a result does not fit the activity of a step, if the activity is known."""


def task_operations(
    signals: Iterable[m.Signal], state: RunState, check: Check | None, check_result: CheckResult | None = None
) -> Iterator[m.TaskOperation]:
    """Return the operations on the tasks of a run. Without a check, answers are left for later."""
    for signal in signals:
        if signal.name == m.TASK_SIGNAL:
            request = codec.decode(signal.payload, m.TaskRequest)
            problem = None
            if request.action == "complete":
                if check is None and not is_of_engine(request.step_id):  # no program knows it
                    continue
                problem = _misfit(state, request, check, check_result)
            yield m.TaskOperation(
                id=signal.id, request=request, problem=problem, inbox_seq=signal.inbox_seq, by=signal.by
            )


def _misfit(
    state: RunState, request: m.TaskRequest, check: Check | None, check_result: CheckResult | None = None
) -> str | None:
    step = _open_task(state, request)
    try:
        if step is None:
            return None
        if is_of_engine(step.step_id):
            about, given = reconciliation.step_of(state, step.step_id), reconciliation.read_answer(request.answer)
            if about is not None and check_result is not None and given.answer == "happened":
                check_result(about.body, e.NULL if isinstance(given.result, UnsetType) else given.result)
        elif check is not None:
            check(_created(step).form, request.answer)
    except InvalidInput as unfit:
        return unfit.message
    return None


def operate(state: RunState, operation: m.TaskOperation, writer: EventWriter) -> Decision | Refusal:
    """Perform an operation on a task, or record why it is refused."""
    if state.status is PENDING or state.status is APPROVED:
        return NOTHING
    request = operation.request
    step = _open_task(state, request)
    objection = Conflict("the task is not open") if step is None else _objection(step, operation)
    if step is None or objection is not None:
        _refuse(request, objection, writer, operation.id)
    elif request.action == "complete":
        _answer(step, request.actor.name, request.answer, writer, operation.id)
    elif request.action == "comment":
        _write(step, e.TaskCommented(request.actor.name, request.text), writer, operation.id)
    else:
        assignee = {"claim": request.actor.name, "release": None}.get(request.action, request.assignee)
        roles = request.roles if request.action == "reassign" else None
        _write(step, e.TaskAssigned(request.action, request.actor.name, assignee, roles), writer, operation.id)
    return writer.decision()


def on_answer(step: OpenStep, message: m.Message, writer: EventWriter) -> Decision | Refusal:
    """Accept an answer that arrived as a message; a second one by the same person changes nothing."""
    given = codec.decode(message.payload, m.Answer)
    if any(earlier.actor == given.actor for earlier in _progress(step).answers):
        return NOTHING
    _answer(step, given.actor, given.answer, writer, None)
    return writer.decision()


def _open_task(state: RunState, request: m.TaskRequest) -> OpenStep | None:
    step = state.open_steps.get(request.step_id)
    is_it = step is not None and isinstance(step.body, e.TaskCreated) and step.body.task_id == request.task_id
    return step if is_it else None


def _created(step: OpenStep) -> e.TaskCreated:
    assert isinstance(step.body, e.TaskCreated)
    return step.body


def _progress(step: OpenStep) -> TaskProgress:
    return step.task or NO_PROGRESS


# --- who may do what


def is_effective(assignee: str | None, roles: Iterable[str], actor: m.Actor) -> bool:
    """Return whether the actor is effective for a task with this assignee and these roles."""
    roles = set(roles)
    return assignee == actor.name or not roles.isdisjoint(actor.roles) or (not roles and assignee is None)


def _without_role(roles: Iterable[str], actor: m.Actor) -> str:
    names = ", ".join(sorted(roles))
    if not names:
        return f"{actor.name!r} is not the task's assignee"
    return f"{actor.name!r} has none of the task's roles ({names}), and it is not assigned to them"


def _objection(step: OpenStep, operation: m.TaskOperation) -> CallerError | None:
    request, task = operation.request, _created(step)
    actor, action, holder = request.actor, request.action, task.assignee
    concerns = is_effective(holder, task.roles, actor)
    if action in ("assign", "reassign", "comment"):
        if not concerns and not actor.is_admin:
            return NotPermitted(f"{_without_role(task.roles, actor)}, and is not an administrator")
        if action == "assign" and holder:
            return Conflict(f"the task is {holder!r}'s; reassign it", by=holder)
        return None if action == "comment" else _objection_to_person(step, request.assignee)
    if holder != actor.name:
        if not concerns:
            return NotPermitted(_without_role(task.roles, actor))
        if holder is not None and action == "claim":
            return Conflict(f"the task is {holder!r}'s", by=holder)
        if holder is not None or action == "release":
            return NotPermitted("the task has no assignee" if holder is None else f"the task is {holder!r}'s")
    if action == "release":
        return None
    objection = _objection_to_person(step, actor.name, operation.by if action == "complete" else None)
    if objection is None and action == "complete" and operation.problem is not None:
        return InvalidInput(operation.problem, field="answer")
    return objection


def _objection_to_person(step: OpenStep, name: str | None, by: e.CallerRef | None = None) -> CallerError | None:
    """Return why a person who has answered may not answer again. A caller counts as one person for all its actors."""
    for given in _progress(step).answers:
        if given.actor == name:
            return Conflict(f"{name!r} has answered already", by=name, at=given.at)
        if by is not None and by.token_id and given.token_id == by.token_id:
            problem = f"{by.name!r} has answered already, for {given.actor!r}: one caller counts as one person"
            return Conflict(problem, by=given.actor, at=given.at)
    return None


def _refuse(request: m.TaskRequest, error: CallerError | None, writer: EventWriter, cause: str) -> None:
    assert error is not None
    info = e.ErrorInfo(error.code, error.message)
    by, at = error.details.get("by"), error.details.get("at")
    writer.write(e.TaskRefused(request.action, request.actor.name, info, by, at), request.step_id, 1, None, cause)


# --- answers


def takes_several(task: e.TaskCreated) -> bool:
    """Return whether the answer of a task is a list of answers by different people."""
    return task.approvals > 1 or task.of is not None


def _answer(step: OpenStep, actor: str, answer: Raw, writer: EventWriter, cause: str | None) -> None:
    task = _created(step)
    if takes_several(task):
        _write(step, e.TaskAnswered(actor, answer), writer, cause)
        answers = (
            *_progress(step).answers,
            GivenAnswer(actor, writer.now, answer),
        )  # the event has the token
        if len(answers) < task.approvals:
            return
        answer = Raw(b"[" + b",".join(bytes(given.answer) for given in answers) + b"]")
    writer.close(step, e.TaskCompleted(actor, answer), cause)
    if is_of_engine(step.step_id):
        reconciliation.settle(step, actor, answer, writer, cause)


def _write(step: OpenStep, body: e.Body, writer: EventWriter, cause: str | None) -> None:
    writer.write(body, step.step_id, step.logical_attempt_id, None, cause, step.opened_event_id)


# --- reminders and escalation


def schedule(step_id: str, task: e.TaskCreated, writer: EventWriter) -> None:
    """Schedule the reminder and the escalation of a new task."""
    if task.remind_ms is not None:
        _schedule(step_id, _reminder(task, 1), writer.now + task.remind_ms * 1_000, writer)
    if task.escalation is not None:
        _schedule(step_id, _escalation(task), writer.now + task.escalation.after_ms * 1_000, writer)


def schedule_again(step: OpenStep, writer: EventWriter) -> None:
    """Schedule the next reminder and the escalation of a task that is already open."""
    task, remind_at, escalate_at = _created(step), _remind_at(step), _escalate_at(step)
    if remind_at is not None:
        _schedule(step.step_id, _reminder(task, _progress(step).reminders + 1), remind_at, writer)
    if escalate_at is not None:
        _schedule(step.step_id, _escalation(task), escalate_at, writer)


def next_instants(step: OpenStep) -> list[Instant]:
    """Return when the next reminder and the escalation of an open task are due; empty for any other step."""
    if not isinstance(step.body, e.TaskCreated):
        return []
    return [due_at for due_at in (_remind_at(step), _escalate_at(step)) if due_at is not None]


def on_timer(step: OpenStep, message: m.Message, writer: EventWriter) -> Decision | Refusal:
    """Remind or escalate, but never early. The token determines which of the two; an old token does nothing."""
    task, count = _created(step), _progress(step).reminders + 1
    remind_at, escalate_at = _remind_at(step), _escalate_at(step)
    if remind_at is not None and message.waiting_token == _reminder(task, count):
        if remind_at > writer.now:
            return Decision(messages=(message,))
        _write(step, e.TaskReminded(count), writer, None)
        _schedule(step.step_id, _reminder(task, count + 1), writer.now + (task.remind_ms or 0) * 1_000, writer)
    elif escalate_at is not None and message.waiting_token == _escalation(task):
        assert task.escalation is not None
        if escalate_at > writer.now:
            return Decision(messages=(message,))
        to = task.escalation
        assignee = to.assignee if _objection_to_person(step, to.assignee) is None else None
        _write(step, e.TaskAssigned("escalate", ENGINE, assignee, to.roles or None), writer, None)
    return writer.decision()


def _remind_at(step: OpenStep) -> Instant | None:
    """Return when the next reminder is due, counted from the last one, so that missed reminders are not repeated."""
    task, reminded_at = _created(step), _progress(step).reminded_at
    since = step.opened_at if reminded_at is None else reminded_at
    return None if task.remind_ms is None else since + task.remind_ms * 1_000


def _escalate_at(step: OpenStep) -> Instant | None:
    to = _created(step).escalation
    return None if to is None or _progress(step).is_escalated else step.opened_at + to.after_ms * 1_000


def _reminder(task: e.TaskCreated, count: int) -> str:
    return f"{task.token}!remind{count}"


def _escalation(task: e.TaskCreated) -> str:
    return f"{task.token}!escalate"


def _schedule(step_id: str, token: str, due_at: Instant, writer: EventWriter) -> None:
    writer.schedule("TimerDue", step_id, token, due_at)
