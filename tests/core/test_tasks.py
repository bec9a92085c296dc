"""Tasks: who may do what, what is recorded of it, several answers, and what happens by itself."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.event_writer import NOTHING, Decision, Refusal
from holdfast.core.index_rows import Task, index_changes
from holdfast.core.invariants import check
from holdfast.core.messages import TASK_SIGNAL, Actor, TaskAction, TaskOperation, TaskRequest
from holdfast.core.state import COMPLETED, PAUSED, RUNNING, TERMINAL, RunStatus, state_of
from holdfast.core.tasks import is_effective, task_operations
from holdfast.errors import InvalidInput, RunTerminal
from tests.core.driver import SECOND, START, Driver, answered, task
from tests.core.event_bodies import run_in

ANN = Actor("ann", ("clerk",))
BOB = Actor("bob", ("clerk",))
EVE = Actor("eve")
ROOT = Actor("root", is_admin=True)


def asking(**fields: Any) -> Driver:
    """Return a run with one open task, for clerks unless something else is said."""
    run = Driver().start()
    run.ask(replace(task(), **{"roles": ("clerk",), **fields}))
    return run


def operation(
    run: Driver, action: TaskAction, actor: Actor, *, problem: str | None = None, **what: Any
) -> TaskOperation:
    """Return an operation on the run's task, as a turn is given it."""
    task_id = next(event.data.task_id for event in run.events if isinstance(event.data, e.TaskCreated))
    request = TaskRequest(task_id=task_id, step_id="approve", action=action, actor=actor, **what)
    return TaskOperation(id=f"op-{len(run.events)}", request=request, problem=problem)


def do(run: Driver, action: TaskAction, actor: Actor, **what: Any) -> e.Body:
    """Do something to the task, and return the first event of the decision."""
    decision = run.tell(operation(run, action, actor, **what))
    assert check(run.view()) == []
    return decision.events[0].data


def row(run: Driver) -> Task:
    """Return the row of the run's task."""
    [found] = run.tasks.values()
    return found


def refusal(body: e.Body) -> str:
    """Return the code of a refusal, or nothing."""
    return body.error.code if isinstance(body, e.TaskRefused) else ""


# --- who may do what


@pytest.mark.contract("TSK-1")
@pytest.mark.parametrize(
    ("action", "assignee", "actor", "code"),
    [
        ("claim", None, ANN, ""),
        ("claim", None, EVE, "NotPermitted"),
        ("claim", None, ROOT, "NotPermitted"),
        ("claim", "bob", ANN, "Conflict"),
        ("claim", "bob", BOB, ""),
        ("claim", "bob", EVE, "NotPermitted"),
        ("release", "bob", BOB, ""),
        ("release", "eve", EVE, ""),
        ("release", "bob", ANN, "NotPermitted"),
        ("release", None, ANN, "NotPermitted"),
        ("complete", None, ANN, ""),
        ("complete", None, EVE, "NotPermitted"),
        ("complete", "eve", EVE, ""),
        ("complete", "bob", ANN, "NotPermitted"),
        ("complete", "bob", ROOT, "NotPermitted"),
        ("assign", None, ANN, ""),
        ("assign", None, ROOT, ""),
        ("assign", None, EVE, "NotPermitted"),
        ("assign", "bob", ANN, "Conflict"),
        ("reassign", "bob", ANN, ""),
        ("reassign", "bob", ROOT, ""),
        ("reassign", "bob", EVE, "NotPermitted"),
        ("comment", "bob", ANN, ""),
        ("comment", "bob", ROOT, ""),
        ("comment", "bob", EVE, "NotPermitted"),
    ],
)
def test_each_operation_is_for_those_whom_the_rule_names(
    action: TaskAction, assignee: str | None, actor: Actor, code: str
) -> None:
    run = asking(assignee=assignee)
    before = row(run)
    body = do(run, action, actor, assignee="zoe")
    assert refusal(body) == code
    if code:
        assert row(run) == before


@pytest.mark.contract("TSK-1")
def test_a_task_without_roles_is_for_everybody_while_it_is_nobodys() -> None:
    assert is_effective(None, (), EVE)
    assert not is_effective("ann", (), EVE)
    assert not is_effective(None, ("clerk",), EVE)
    assert is_effective("eve", ("clerk",), EVE)
    refused = do(asking(roles=(), assignee="bob"), "claim", EVE)
    assert isinstance(refused, e.TaskRefused)
    assert (refused.error.code, refused.error.message) == ("NotPermitted", "'eve' is not the task's assignee")


@pytest.mark.contract("TSK-1")
@pytest.mark.parametrize(
    ("action", "what", "assignee", "roles"),
    [
        ("claim", {}, "ann", ("clerk",)),
        ("release", {}, None, ("clerk",)),
        ("assign", {"assignee": "zoe"}, "zoe", ("clerk",)),
        ("assign", {"assignee": "zoe", "roles": ("boss",)}, "zoe", ("clerk",)),
        ("reassign", {"assignee": "zoe"}, "zoe", ("clerk",)),
        ("reassign", {"roles": ("boss",)}, None, ("boss",)),
        ("reassign", {"roles": ()}, None, ()),
    ],
)
def test_a_change_of_hands_is_recorded_and_shown(
    action: TaskAction, what: dict[str, Any], assignee: str | None, roles: tuple[str, ...]
) -> None:
    run = asking(assignee="ann" if action in ("release", "reassign") else None)
    body = do(run, action, ANN, **what)
    assert isinstance(body, e.TaskAssigned)
    assert (body.action, body.actor, body.assignee) == (action, "ann", assignee)
    assert (row(run).assignee, row(run).roles, row(run).status) == (assignee, roles, "OPEN")


@pytest.mark.contract("TSK-1", "EVT-4")
def test_events_of_a_task_name_their_step_their_cause_and_the_task_they_follow() -> None:
    run = asking()
    asked = operation(run, "claim", ANN)
    [event] = run.tell(asked).events
    created = next(event for event in run.events if isinstance(event.data, e.TaskCreated))
    assert (event.step_id, event.caused_by_signal_id) == ("approve", asked.id)
    assert event.parent_event_id == created.event_id


@pytest.mark.contract("TSK-1")
def test_a_comment_is_recorded_and_changes_nothing_else() -> None:
    run = asking()
    before = row(run)
    assert do(run, "comment", ANN, text="soon") == e.TaskCommented("ann", "soon")
    assert row(run) == before


# --- completing


@pytest.mark.contract("TSK-2")
def test_the_first_completion_stands_and_the_second_is_refused_and_recorded() -> None:
    run = asking()
    assert do(run, "complete", ANN, answer=Raw(b"1")) == e.TaskCompleted("ann", Raw(b"1"))
    closed = row(run)
    assert refusal(do(run, "complete", BOB, answer=Raw(b"2"))) == "Conflict"
    assert row(run) == closed
    assert (closed.status, closed.completed_by, closed.completed_at) == ("COMPLETED", "ann", START)


@pytest.mark.contract("TSK-2", "PRJ-4")
def test_what_happens_in_one_turn_gives_the_row_that_it_gives_in_several() -> None:
    run = asking(approvals=2)
    before, first = run.state, len(run.events)
    for actor in (ANN, BOB):
        do(run, "claim", actor)
        do(run, "complete", actor, answer=Raw(b"true"))
    do(run, "complete", EVE)
    [at_once] = index_changes(before, run.state, run.events[first:]).tasks
    assert at_once == row(run)
    assert (at_once.status, at_once.answered_by, at_once.completed_by) == ("COMPLETED", ("ann", "bob"), "bob")


@pytest.mark.contract("TSK-2")
@pytest.mark.parametrize("end", [c.CompleteRun(), c.CancelRun(), c.ContinueAsNew(), c.CancelStep(step_id="approve")])
def test_a_task_that_is_given_up_in_the_turn_in_which_it_changes_hands_is_cancelled(end: c.Command) -> None:
    run = asking()
    before, first = run.state, len(run.events)
    do(run, "claim", ANN)
    run.now += SECOND
    run.ask(end)
    [at_once] = index_changes(before, run.state, run.events[first:]).tasks
    assert at_once == row(run)
    assert (at_once.status, at_once.assignee, at_once.completed_at) == ("CANCELLED", "ann", START + SECOND)
    assert check(run.view()) == []


@pytest.mark.contract("TSK-2")
def test_an_answer_that_does_not_fit_is_refused_and_the_task_stays_open() -> None:
    run = asking()
    body = do(run, "complete", ANN, answer=Raw(b"1"), problem="expected a bool")
    assert isinstance(body, e.TaskRefused)
    assert (body.error.code, body.error.message) == ("InvalidInput", "expected a bool")
    assert row(run).status == "OPEN"


@pytest.mark.contract("TSK-2", "WF-7")
@pytest.mark.parametrize("status", list(RunStatus))
def test_an_operation_has_an_answer_in_every_status(status: RunStatus) -> None:
    run = run_in(status)
    request = TaskRequest(task_id="?", step_id="task", action="claim", actor=ANN)
    answer = run.try_tell(TaskOperation(id="op", request=request))
    if status in TERMINAL:
        assert isinstance(answer, Refusal)
        assert isinstance(answer.error, RunTerminal)
    elif status in (RUNNING, PAUSED):
        assert isinstance(answer, Decision)
        assert [event.event_type for event in answer.events] == ["TaskRefused"]
    else:
        assert answer == NOTHING  # it stays in the mailbox


@pytest.mark.contract("TSK-2")
def test_an_answer_is_recorded_while_the_run_is_paused() -> None:
    run = asking()
    run.control("PAUSE")
    assert do(run, "complete", ANN, answer=Raw(b"1")) == e.TaskCompleted("ann", Raw(b"1"))
    assert run.state.status is PAUSED


# --- several answers


@pytest.mark.contract("TSK-1", "TSK-2")
def test_so_many_different_people_answer_and_the_answers_come_as_a_list() -> None:
    run = asking(approvals=2, of=3)
    assert do(run, "complete", ANN, answer=Raw(b'"yes"')) == e.TaskAnswered("ann", Raw(b'"yes"'))
    again = do(run, "complete", ANN, answer=Raw(b'"no"'))
    assert isinstance(again, e.TaskRefused)
    assert (again.error.code, again.stands_by, again.stands_at) == ("Conflict", "ann", START)
    assert (row(run).status, row(run).answered_by) == ("OPEN", ("ann",))
    do(run, "complete", BOB, answer=Raw(b'"no"'))
    assert run.types[-2:] == ["TaskAnswered", "TaskCompleted"]
    assert run.events[-1].data == e.TaskCompleted("bob", Raw(b'["yes","no"]'))
    assert (row(run).status, row(run).answered_by) == ("COMPLETED", ("ann", "bob"))


@pytest.mark.contract("TSK-1")
def test_a_task_is_nobodys_again_after_an_answer_that_is_not_the_last() -> None:
    run = asking(approvals=2)
    do(run, "claim", ANN)
    do(run, "complete", ANN)
    assert row(run).assignee is None
    assert refusal(do(run, "claim", BOB)) == ""


@pytest.mark.contract("TSK-1", "TSK-2")
@pytest.mark.parametrize("action", ["claim", "assign", "reassign"])
def test_a_task_does_not_become_theirs_who_have_answered_it(action: Any) -> None:
    run = asking(approvals=2)
    do(run, "complete", ANN)
    again = do(run, action, ANN, assignee="ann")
    assert isinstance(again, e.TaskRefused)
    assert (again.error.code, again.stands_by, again.stands_at) == ("Conflict", "ann", START)
    assert refusal(do(run, "complete", BOB)) == ""  # else nobody could


@pytest.mark.contract("TSK-1", "TSK-2")
def test_a_task_is_escalated_to_nobody_who_has_answered_it() -> None:
    run = asking(approvals=2, escalation=e.EscalationRule(1_000, assignee="ann"))
    do(run, "complete", ANN)
    due(run)
    assert run.events[-1].data == e.TaskAssigned("escalate", "holdfast", None)
    assert refusal(do(run, "complete", BOB)) == ""


@pytest.mark.contract("TSK-2", "MSG-2")
def test_answers_that_come_as_messages_count_once_for_each_person() -> None:
    run = asking(approvals=2)
    for actor in ("ann", "ann", "bob"):
        run.tell(answered(run, "approve", "TaskCompleted", {"actor": actor, "answer": actor}))
    assert run.types.count("TaskAnswered") == 2
    assert run.events[-1].data == e.TaskCompleted("bob", Raw(b'["ann","bob"]'))


# --- by itself


def due(run: Driver) -> int:
    """Let time pass until the next message, and handle it; return the instant."""
    message = min(run.inbox.values(), key=lambda message: message.due_at or 0)
    run.now = message.due_at or 0
    run.tell(message)
    assert check(run.view()) == []
    return run.now


@pytest.mark.contract("TSK-1", "TMR-1")
def test_reminders_come_again_and_again_until_the_task_is_closed() -> None:
    run = asking(remind_ms=1_000)
    assert [due(run) for _ in range(3)] == [START + SECOND, START + 2 * SECOND, START + 3 * SECOND]
    counts = [event.data.count for event in run.events if isinstance(event.data, e.TaskReminded)]
    assert (counts, row(run).reminders) == ([1, 2, 3], 3)
    do(run, "complete", ANN)
    [late] = run.inbox.values()
    run.now += SECOND
    assert run.tell(late) == NOTHING


@pytest.mark.contract("TSK-1", "TMR-1")
def test_a_reminder_is_never_early_and_never_given_twice() -> None:
    run = asking(remind_ms=1_000)
    [message] = run.inbox.values()
    run.now += SECOND - 1
    assert run.tell(message) == Decision(messages=(message,))
    run.now += 1
    assert len(run.tell(message).events) == 1
    assert run.tell(message) == NOTHING


@pytest.mark.contract("TSK-1", "TMR-1")
def test_a_node_that_was_down_reminds_once_and_not_for_every_time_that_it_missed() -> None:
    run = asking(remind_ms=1_000)
    [message] = run.inbox.values()
    run.now += 100 * SECOND
    run.tell(message)
    [following] = run.inbox.values()
    assert following.due_at == run.now + SECOND


@pytest.mark.contract("TSK-1", "TMR-1")
@pytest.mark.parametrize(
    ("escalation", "assignee", "roles"),
    [
        (e.EscalationRule(1_000, ("boss",)), None, ("boss",)),
        (e.EscalationRule(1_000, (), "zoe"), "zoe", ("clerk",)),
        (e.EscalationRule(1_000, ("boss",), "zoe"), "zoe", ("boss",)),
    ],
)
def test_an_open_task_is_escalated_once(
    escalation: e.EscalationRule, assignee: str | None, roles: tuple[str, ...]
) -> None:
    run = asking(escalation=escalation, assignee="ann")
    [message] = run.inbox.values()
    run.now += SECOND - 1
    assert run.tell(message) == Decision(messages=(message,))
    run.now += 1
    [event] = run.tell(message).events
    assert event.data == e.TaskAssigned("escalate", "holdfast", assignee, escalation.roles or None)
    assert (row(run).assignee, row(run).roles, row(run).is_escalated) == (assignee, roles, True)
    assert run.tell(message) == NOTHING


@pytest.mark.contract("TSK-1")
def test_a_due_date_is_only_shown() -> None:
    run = asking(due_at=START + SECOND)
    assert (run.inbox, row(run).due_at) == ({}, START + SECOND)


# --- from the mailbox


@pytest.mark.contract("TSK-2")
def test_operations_come_from_their_own_signals_and_answers_are_checked_against_the_form() -> None:
    run = asking(form=Raw(b'"a form"'))
    made = operation(run, "complete", ANN, answer=Raw(b"1"))
    run.sent("go")
    run.sent(TASK_SIGNAL, made.request)
    run.sent(TASK_SIGNAL, replace(made.request, action="comment", text="soon"))
    seen: list[tuple[bytes, bytes]] = []

    def refuse(form: Raw, answer: Raw) -> None:
        seen.append((bytes(form), bytes(answer)))
        raise InvalidInput("unfit")

    found = list(task_operations(run.mailbox, run.state, refuse))
    assert [(one.request.action, one.problem, one.inbox_seq) for one in found] == [
        ("complete", "unfit", 2),
        ("comment", None, 3),
    ]
    assert seen == [(b'"a form"', b"1")]
    unchecked = task_operations(run.mailbox, run.state, None)
    assert [one.request.action for one in unchecked] == ["comment"]  # the answer waits for somebody who can check it


@pytest.mark.contract("TSK-2", "EVT-5")
@given(st.lists(st.tuples(st.sampled_from(["claim", "release", "complete", "comment", "due"]), st.integers(0, 2))))
def test_whatever_people_do_the_row_is_that_of_the_history(doings: list[tuple[Any, int]]) -> None:
    run = asking(approvals=2, remind_ms=1_000, escalation=e.EscalationRule(2_500, assignee="ann"))
    for action, number in doings:
        if action != "due":
            do(run, action, (ANN, BOB, EVE)[number])
        elif run.inbox:
            due(run)
    assert state_of(run.run_id, run.events) == run.state
    assert row(run).status == ("OPEN" if "approve" in run.state.open_steps else "COMPLETED")
    assert run.state.status is not COMPLETED
