"""What follows when a program asks for something."""

import pytest
from msgspec import Raw

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.decide import apply_commands
from holdfast.core.event_writer import NOTHING, Decision, Refusal
from holdfast.core.keys import event_id, event_key
from holdfast.core.messages import SignalRequest
from holdfast.core.state import RUNNING, RunStatus
from holdfast.errors import Conflict, InvalidInput
from tests.core.driver import BY, START, Driver, activity, child, done, task, timer, wait
from tests.core.event_bodies import ERROR, run_in

COMMANDS: list[tuple[c.Command, str]] = [
    (activity("s"), "StepStarted"),
    (timer("s"), "TimerStarted"),
    (wait("s"), "SignalWaiting"),
    (task("s"), "TaskCreated"),
    (child("s"), "ChildStarted"),
    (c.RecordMarker(step_id="s", name="seed"), "MarkerRecorded"),
    (c.SendSignal(step_id="s", run_id="run-2", name="go", signal_id="click-1"), "SignalSent"),
    (c.SetAttributes(step_id="s", values={"cents": 1}), "AttributesSet"),
    (c.CancelStep(step_id="timer"), "StepCancelled"),
    (c.CompleteUpdate(step_id="update"), "UpdateCompleted"),
    (c.PauseRun(error=ERROR), "RunPaused"),
    (c.ContinueAsNew(), "ContinuedAsNew"),
    (c.CompleteRun(), "RunCompleted"),
    (c.FailRun(error=ERROR), "RunFailed"),
    (c.CancelRun(), "RunCancelled"),
]


@pytest.mark.contract("WF-7")
@pytest.mark.parametrize(("command", "event_type"), COMMANDS, ids=[event_type for _, event_type in COMMANDS])
@pytest.mark.parametrize("status", list(RunStatus))
def test_every_command_is_answered_in_every_status(status: RunStatus, command: c.Command, event_type: str) -> None:
    run = run_in(status)
    answer = run.try_ask(command)
    if status is RUNNING:
        assert isinstance(answer, Decision)
        assert [event.event_type for event in answer.events] == [event_type]
    else:
        assert isinstance(answer, Refusal)
        assert isinstance(answer.error, Conflict)
        assert status in answer.error.message


@pytest.mark.contract("ATT-2", "EVT-4")
@pytest.mark.parametrize("command", [command for command, _ in COMMANDS if getattr(command, "step_id", "") == "s"])
def test_whatever_a_program_begins_is_the_first_logical_attempt(command: c.Command) -> None:
    [event] = Driver().start().ask(command).events
    assert (event.step_id, event.logical_attempt_id) == ("s", 1)
    assert event.idempotency_key == event_key("run-1", "s", 1, event.event_type, "1")


def test_the_commands_are_of_every_type() -> None:
    assert {type(command) for command, _ in COMMANDS} == set(c.Command.__args__)


def test_asking_for_nothing_gives_nothing() -> None:
    assert Driver().start().ask() == NOTHING


# --- what each command says


def test_an_activity_is_recorded_and_dispatched() -> None:
    run = Driver().start()
    command = c.RunActivity(
        step_id="s", name="charge", input=Raw(b"[1]"), queue="fast", idempotency_key="k", options=Raw(b"{}")
    )
    answer = run.ask(command)
    [event] = answer.events
    assert event.data == e.StepStarted("charge", Raw(b"[1]"), "fast", "k", Raw(b"{}"))
    assert (event.step_id, event.logical_attempt_id, event.engine_attempt_id) == ("s", 1, 1)
    assert (answer.dispatch, answer.messages) == (("s",), ())


@pytest.mark.contract("TSK-1")
def test_a_task_carries_everything_that_was_asked_for_and_an_id_that_a_retry_would_find_again() -> None:
    run = Driver().start()
    command = c.AskHuman(
        step_id="s",
        name="approve",
        task_type="form",
        route="/a",
        payload=Raw(b"1"),
        form=Raw(b"2"),
        roles=("boss", "deputy"),
        assignee="ann",
        due_at=START + 9,
    )
    [event] = run.ask(command).events
    body = event.data
    assert isinstance(body, e.TaskCreated)
    assert body.task_id == event.event_id == event_id(event_key("run-1", "s", 1, "TaskCreated", "1"))
    assert (body.name, body.task_type, body.route, body.payload, body.form) == (
        "approve",
        "form",
        "/a",
        Raw(b"1"),
        Raw(b"2"),
    )
    assert (body.roles, body.assignee, body.due_at) == (("boss", "deputy"), "ann", START + 9)
    assert run.ask(c.CancelStep(step_id="s")).messages == ()


@pytest.mark.contract("WF-4")
def test_a_child_is_recorded_with_its_id_plan_and_policy() -> None:
    run = Driver().start()
    command = c.StartChild(
        step_id="s", child_run_id="run-2", plan_id="ship", plan_version="3", input=Raw(b"4"), close_policy="cancel"
    )
    [event] = run.ask(command).events
    assert event.data == e.ChildStarted("run-2", "ship", "3", "s@3", Raw(b"4"), "cancel")


@pytest.mark.contract("SIG-5", "SIG-9")
def test_a_signal_to_a_run_is_recorded_and_goes_with_the_decision() -> None:
    command = c.SendSignal(
        step_id="s", run_id="run-2", name="go", signal_id="x", payload=Raw(b"4"), addressed_to="wait#2"
    )
    decision = Driver().start().ask(command)
    [event] = decision.events
    assert event.data == e.SignalSent("run-2", "go", "x", Raw(b"4"), "wait#2")
    [request] = decision.sends
    assert request == SignalRequest(run_id="run-2", name="go", payload=Raw(b"4"), signal_id="x", step_id="wait#2")


@pytest.mark.parametrize(
    ("command", "body"),
    [
        (c.RecordMarker(step_id="s", name="seed", value=Raw(b"7")), e.MarkerRecorded("seed", Raw(b"7"))),
        (c.PauseRun(error=ERROR), e.RunPaused("Broken", ERROR)),
        (c.CompleteRun(result=Raw(b"9")), e.RunCompleted(Raw(b"9"))),
        (c.FailRun(error=ERROR), e.RunFailed(ERROR)),
        (c.CancelRun(reason="enough"), e.RunCancelled("enough")),
    ],
)
def test_a_command_is_recorded_with_what_it_says(command: c.Command, body: e.Body) -> None:
    [event] = Driver().start().ask(command).events
    assert event.data == body


@pytest.mark.contract("EVT-4", "ATT-1")
def test_step_keys_are_of_the_logical_attempt_and_not_of_the_engines() -> None:
    run = Driver().start()
    run.ask(activity("s"))
    started, completed = run.events[-1], run.tell(done("s")).events[0]
    assert started.idempotency_key == event_key("run-1", "s", 1, "StepStarted", "1")
    assert completed.idempotency_key == event_key("run-1", "s", 1, "StepCompleted", "1")


@pytest.mark.contract("EVT-5")
def test_asking_again_for_what_was_not_committed_gives_the_same_events() -> None:
    run = run_in(RUNNING)
    todo = (activity("a"), timer("b"), wait("c", until=START), task("d"), child("e"))
    assert apply_commands(run.state, todo, START, BY) == apply_commands(run.state, todo, START, BY)


# --- giving up


@pytest.mark.contract("WF-4")
@pytest.mark.parametrize("kind", ["activity", "timer", "signal", "task", "child", "update"])
def test_an_open_step_of_any_kind_can_be_given_up(kind: str) -> None:
    run = run_in(RUNNING)
    [event] = run.ask(c.CancelStep(step_id=kind, reason="late")).events
    assert (event.step_id, event.data) == (kind, e.StepCancelled("late"))
    assert kind not in run.state.open_steps
    assert run.ask(c.CancelStep(step_id=kind)) == NOTHING


@pytest.mark.contract("WF-4")
def test_a_step_that_is_given_up_in_the_turn_that_opened_it_is_never_dispatched() -> None:
    run = Driver().start()
    answer = run.ask(activity("a"), activity("b"), c.CancelStep(step_id="a"))
    assert [event.event_type for event in answer.events] == ["StepStarted", "StepStarted", "StepCancelled"]
    assert answer.events[2].parent_event_id == answer.events[0].event_id
    assert answer.dispatch == ("b",)
    assert list(run.state.open_steps) == ["b"]


@pytest.mark.contract("WF-4", "EVT-4")
@pytest.mark.parametrize("before", [(), (activity("s"),)], ids=["open before", "opened in the same turn"])
def test_giving_up_twice_in_one_turn_is_recorded_once(before: tuple[c.Command, ...]) -> None:
    run = Driver().start()
    if not before:
        run.ask(activity("s"))
    answer = run.ask(*before, c.CancelStep(step_id="s"), c.CancelStep(step_id="s"))
    assert [event.event_type for event in answer.events][-1] == "StepCancelled"
    assert [event.event_type for event in answer.events].count("StepCancelled") == 1


def test_giving_up_a_marker_or_an_unknown_step_changes_nothing() -> None:
    run = Driver().start()
    answer = run.ask(c.RecordMarker(step_id="m", name="seed"), c.CancelStep(step_id="m"), c.CancelStep(step_id="x"))
    assert [event.event_type for event in answer.events] == ["MarkerRecorded"]


# --- programs with a mistake


@pytest.mark.contract("WF-7", "INV")
@pytest.mark.parametrize("again", [activity("s"), timer("s"), wait("s"), task("s"), child("s")])
@pytest.mark.parametrize("is_open_before", [True, False])
def test_a_step_that_is_there_already_is_refused_and_nothing_of_the_turn_stays(
    again: c.Command, is_open_before: bool
) -> None:
    run = Driver().start()
    if is_open_before:
        run.ask(activity("s"))
    version = run.state.version
    answer = run.try_ask(timer("other"), *([] if is_open_before else [activity("s")]), again)
    assert isinstance(answer, Refusal)
    assert isinstance(answer.error, Conflict)
    assert answer.error.details == {"step_id": "s"}
    assert run.state.version == version


@pytest.mark.contract("WF-7")
@pytest.mark.parametrize("end", [c.CompleteRun(), c.FailRun(error=ERROR), c.CancelRun(), c.PauseRun(error=ERROR)])
@pytest.mark.parametrize("more", [activity("s"), c.CompleteRun(), c.CancelStep(step_id="s")])
def test_a_program_that_asks_for_more_after_its_end_is_refused(end: c.Command, more: c.Command) -> None:
    answer = Driver().start().try_ask(end, more)
    assert isinstance(answer, Refusal)
    assert isinstance(answer.error, Conflict)


@pytest.mark.contract("CAN-1")
def test_a_program_may_go_on_after_a_rotation() -> None:
    run = Driver().start()
    run.ask(activity("a"), c.ContinueAsNew(), activity("b"))
    assert list(run.state.open_steps) == ["b"]


@pytest.mark.contract("WF-7", "CAN-1")
@pytest.mark.parametrize("end", [c.CompleteRun(), c.FailRun(error=ERROR), c.CancelRun(), c.ContinueAsNew()])
def test_what_was_begun_in_the_turn_that_ends_it_is_not_dispatched(end: c.Command) -> None:
    run = Driver().start()
    assert run.ask(activity("a"), end).dispatch == ()
    assert run.state.open_steps == {}


@pytest.mark.contract("API-2")
def test_a_step_id_that_is_not_unicode_is_refused() -> None:
    answer = Driver().start().try_ask(activity("\ud800"))
    assert isinstance(answer, Refusal)
    assert isinstance(answer.error, InvalidInput)


@pytest.mark.contract("CAN-1")
def test_of_several_rotations_that_carry_steps_the_last_one_counts_unless_the_run_ends() -> None:
    first, second = c.ContinueAsNew(steps=("a",)), c.ContinueAsNew(steps=("b",))
    step, end, code = c.CancelStep(step_id="a"), c.CancelRun(), c.ContinueAsNew()
    assert c.with_one_rotation([first, step, second]) == [step, second]
    assert c.with_one_rotation([first, step, end]) == [step, end], "the run was cancelled after it"
    assert c.with_one_rotation([step, first]) == [step, first]
    assert c.with_one_rotation([code, step]) == [code, step], "code never goes on after it"
