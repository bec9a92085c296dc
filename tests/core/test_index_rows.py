"""The rows of waits and tasks that a turn changes."""

import pytest
from hypothesis import given
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import commands
from holdfast.core import events as e
from holdfast.core.event_writer import Decision
from holdfast.core.index_rows import ActivityRecord, IndexChanges, Task, Wait, index_changes
from holdfast.core.state import RUNNING, RunState, fold
from tests.core.driver import SECOND, START, Driver, activity, answered, done, made, task, timer, wait
from tests.core.event_bodies import ERROR, run_in
from tests.core.random_histories import Plan, carry_out, plans

ENDS: list[e.Body] = [e.RunCompleted(), e.RunFailed(ERROR), e.RunCancelled(), e.ContinuedAsNew()]


def changes(before: RunState, answer: Decision) -> IndexChanges:
    """Return how a decision changes the rows."""
    return index_changes(before, fold(before, answer.events), answer.events)


def appended(run: Driver, *bodies: tuple[e.Body, str | None]) -> IndexChanges:
    """Return how these events, in one turn, change the rows."""
    before, state, events = run.state, run.state, []
    for body, step_id in bodies:
        event = made(state, body, step_id, now=run.now)
        state = fold(state, [event])
        events.append(event)
    return index_changes(before, state, events)


# --- waits


@pytest.mark.contract("SIG-9")
def test_an_opened_wait_is_a_row_with_all_that_a_sender_needs() -> None:
    run = Driver().start()
    before = run.state
    found = changes(before, run.ask(wait("w", "go", until=START + SECOND)))
    token = run.state.open_steps["w"].token or ""
    expected = Wait(run_id="run-1", step_id="w", name="go", token=token, since=START, until=START + SECOND)
    assert found == IndexChanges(waits_opened=(expected,))


@pytest.mark.contract("SIG-9")
@pytest.mark.parametrize(
    "body", [e.SignalReceived("go", "s", "x"), e.SignalTimedOut("go"), e.StepCancelled(), e.StepSkipped()]
)
def test_a_wait_that_ends_in_any_way_is_closed(body: e.Body) -> None:
    assert appended(run_in(RUNNING), (body, "signal")) == IndexChanges(waits_closed=("signal",))


@pytest.mark.contract("SIG-9", "INV")
@pytest.mark.parametrize("end", ENDS, ids=lambda body: type(body).__name__)
def test_an_end_or_a_rotation_closes_every_wait_and_cancels_every_task(end: e.Body) -> None:
    run = run_in(RUNNING)
    run.ask(wait("second"))
    run.now += SECOND
    found = appended(run, (end, None))
    assert found.waits_closed == ("signal", "second")
    [cancelled] = found.tasks
    assert (cancelled.step_id, cancelled.status) == ("task", "CANCELLED")
    assert (cancelled.completed_at, cancelled.completed_by) == (START + SECOND, None)
    assert found.waits_opened == ()


@pytest.mark.contract("SIG-9")
def test_a_wait_that_is_opened_and_over_in_one_turn_is_never_a_row() -> None:
    run = Driver().start()
    before = run.state
    assert changes(before, run.ask(wait("w"), commands.CancelStep(step_id="w"))).waits_opened == ()
    before = run.state
    assert changes(before, run.ask(wait("v"), commands.CompleteRun())) == IndexChanges()


def test_one_wait_closes_and_the_next_opens_in_one_turn() -> None:
    run = run_in(RUNNING)
    found = appended(run, (e.SignalReceived("go", "s", "x"), "signal"), (e.SignalWaiting("go", "t"), "next"))
    assert found.waits_closed == ("signal",)
    assert [row.step_id for row in found.waits_opened] == ["next"]


def test_a_wait_after_a_rotation_in_the_same_turn_is_a_row() -> None:
    found = appended(run_in(RUNNING), (e.ContinuedAsNew(), None), (e.SignalWaiting("go", "t"), "next"))
    assert found.waits_closed == ("signal",)
    assert [row.step_id for row in found.waits_opened] == ["next"]


def test_steps_of_other_kinds_are_not_rows() -> None:
    run = Driver().start()
    before = run.state
    assert changes(before, run.ask(activity("a"), timer("b"))) == IndexChanges()
    before = run.state
    assert changes(before, run.tell(done("a"))) == IndexChanges()


# --- tasks


@pytest.mark.contract("TSK-1")
def test_an_opened_task_is_a_row_with_all_that_was_asked_for() -> None:
    run = Driver().start()
    before = run.state
    command = commands.AskHuman(
        step_id="s",
        name="approve",
        task_type="form",
        route="/a",
        payload=Raw(b"1"),
        form=Raw(b"2"),
        roles=("boss",),
        assignee="ann",
        due_at=START + 9,
        approvals=2,
        of=3,
    )
    [row] = changes(before, run.ask(command)).tasks
    body = run.state.open_steps["s"].body
    assert isinstance(body, e.TaskCreated)
    assert row == Task(
        task_id=body.task_id,
        run_id="run-1",
        step_id="s",
        name="approve",
        status="OPEN",
        created_at=START,
        task_type="form",
        route="/a",
        payload=Raw(b"1"),
        form=Raw(b"2"),
        roles=("boss",),
        assignee="ann",
        due_at=START + 9,
        workflow="order",
        approvals=2,
        of=3,
    )


@pytest.mark.contract("TSK-1")
def test_an_assignment_changes_the_row_and_leaves_it_open() -> None:
    [row] = appended(run_in(RUNNING), (e.TaskAssigned("claim", "bob", "bob"), "task")).tasks
    assert (row.status, row.assignee) == ("OPEN", "bob")


@pytest.mark.contract("TSK-2")
def test_an_answered_task_says_who_and_when() -> None:
    run = run_in(RUNNING)
    run.now += SECOND
    before = run.state
    [row] = changes(before, run.tell(answered(run, "task", "TaskCompleted", {"actor": "ann"}))).tasks
    assert (row.status, row.completed_by, row.completed_at) == ("COMPLETED", "ann", START + SECOND)


@pytest.mark.contract("TSK-2")
@pytest.mark.parametrize("end", ENDS, ids=lambda body: type(body).__name__)
def test_a_task_that_is_answered_in_the_turn_that_ends_the_run_is_completed_and_not_cancelled(end: e.Body) -> None:
    [row] = appended(run_in(RUNNING), (e.TaskCompleted("ann"), "task"), (end, None)).tasks
    assert (row.status, row.completed_by) == ("COMPLETED", "ann")


@pytest.mark.contract("TSK-2")
@pytest.mark.parametrize("body", [e.StepCancelled(), e.StepSkipped()])
def test_a_task_that_is_given_up_is_cancelled(body: e.Body) -> None:
    [row] = appended(run_in(RUNNING), (body, "task")).tasks
    assert (row.status, row.completed_by) == ("CANCELLED", None)


def test_a_task_that_is_opened_and_over_in_one_turn_is_never_a_row() -> None:
    run = Driver().start()
    before = run.state
    assert changes(before, run.ask(task("t"), commands.CompleteRun())) == IndexChanges()


# --- both


@pytest.mark.contract("SIG-9", "TSK-2", "INV")
@given(plans)
def test_rows_changed_turn_by_turn_are_the_open_steps_of_the_fold(plan: Plan) -> None:
    run = carry_out(plan)
    open_steps = run.state.open_steps.values()
    assert {row.step_id for row in run.waits.values()} == {s.step_id for s in open_steps if s.kind == "signal"}
    rows = {row.step_id: row for row in run.tasks.values() if row.status == "OPEN"}
    assert {step.step_id for step in open_steps if step.kind == "task"} == set(rows)
    for step in open_steps:
        if isinstance(step.body, e.TaskCreated):
            assert rows[step.step_id].assignee == step.body.assignee
    answers = [event for event in run.events if event.event_type == "TaskCompleted"]
    assert sum(row.status == "COMPLETED" for row in run.tasks.values()) == len(answers)


@given(plans)
def test_rows_changed_in_one_turn_are_those_changed_turn_by_turn(plan: Plan) -> None:
    run = carry_out(plan)
    first = [replace(event, run_seq=0) for event in run.events[:1]]
    begun = fold(RunState(run_id=run.run_id), first)
    found = index_changes(begun, run.state, run.events[1:])
    assert {row.step_id: row for row in found.waits_opened} == run.waits
    assert found.waits_closed == ()
    opened = {row.task_id: row for row in found.tasks}
    assert opened == {key: row for key, row in run.tasks.items() if row.status == "OPEN"}


@pytest.mark.contract("ACT-3", "ACT-2")
def test_an_activity_record_has_the_fields_of_the_contract() -> None:
    assert set(ActivityRecord.__struct_fields__) == {
        "version",
        "run_id",
        "activity_name",
        "step_id",
        "idempotency_key",
        "status",
        "result",
        "error",
        "created_at",
        "updated_at",
    }
