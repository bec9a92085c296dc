"""Updates: accepted once by their id, answered once, and never taken by a run that cannot answer them yet."""

import pytest
from msgspec import Raw

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.event_writer import NOTHING, Decision, Refusal
from holdfast.core.messages import Update
from holdfast.core.state import PAUSED, RUNNING, TERMINAL, RunStatus
from holdfast.errors import RunTerminal
from tests.core.driver import Driver, activity, done
from tests.core.event_bodies import ERROR, run_in

RENAME = Update(id="0001", update_id="u-1", name="rename", input=Raw(b'{"to":"x"}'), inbox_seq=1)


@pytest.mark.contract("WF-6")
def test_an_update_is_recorded_with_what_it_says_and_what_caused_it() -> None:
    run = Driver().start()
    [event] = run.tell(RENAME).events
    assert event.data == e.UpdateAccepted("rename", Raw(b'{"to":"x"}'))
    assert (event.step_id, event.caused_by_signal_id) == ("update:0001", "0001")
    assert run.state.open_steps["update:0001"].kind == "update"


@pytest.mark.contract("WF-6", "WF-7")
@pytest.mark.parametrize("status", list(RunStatus))
def test_an_update_has_an_answer_in_every_status(status: RunStatus) -> None:
    answer = run_in(status).try_tell(RENAME)
    if status in TERMINAL:
        assert isinstance(answer, Refusal)
        assert isinstance(answer.error, RunTerminal)
    elif status is RUNNING:
        assert isinstance(answer, Decision)
        assert [event.event_type for event in answer.events] == ["UpdateAccepted"]
    else:
        assert answer == NOTHING  # it stays in the mailbox


@pytest.mark.contract("WF-6")
def test_an_update_that_is_being_answered_is_not_accepted_again() -> None:
    run = Driver().start()
    run.tell(RENAME)
    assert run.tell(RENAME) == NOTHING
    assert run.types.count("UpdateAccepted") == 1


@pytest.mark.contract("WF-6")
@pytest.mark.parametrize(("result", "error"), [(Raw(b"7"), None), (Raw(b"null"), ERROR)])
def test_an_answer_closes_the_update_with_its_result_or_its_error(result: Raw, error: e.ErrorInfo | None) -> None:
    run = Driver().start()
    accepted = run.tell(RENAME).events[0]
    [event] = run.ask(c.CompleteUpdate(step_id="update:0001", result=result, error=error)).events
    assert event.data == e.UpdateCompleted(result, error)
    assert event.parent_event_id == accepted.event_id
    assert run.state.open_steps == {}
    assert run.state.last_error == error


@pytest.mark.contract("WF-6")
def test_answering_what_is_not_open_changes_nothing() -> None:
    run = Driver().start()
    assert run.ask(c.CompleteUpdate(step_id="update:0001")) == NOTHING
    run.tell(RENAME)
    run.ask(c.CompleteUpdate(step_id="update:0001"))
    assert run.ask(c.CompleteUpdate(step_id="update:0001")) == NOTHING


@pytest.mark.contract("WF-2")
def test_a_program_that_cannot_go_on_pauses_its_run_and_says_why() -> None:
    run = Driver().start()
    run.ask(activity("a"))
    [event] = run.ask(c.PauseRun(error=ERROR)).events
    assert event.data == e.RunPaused("Broken", ERROR)
    assert run.state.status is PAUSED
    assert run.state.last_error == ERROR
    assert list(run.state.open_steps) == ["a"]


@pytest.mark.contract("WF-2", "EVT-4")
def test_a_run_can_be_paused_for_an_error_again_after_it_was_resumed() -> None:
    run = Driver().start()
    keys = set()
    for _ in range(3):
        keys.add(run.ask(c.PauseRun(error=ERROR)).events[0].idempotency_key)
        run.control("RESUME")
    assert len(keys) == 3


@pytest.mark.contract("WF-2")
def test_results_are_recorded_while_a_run_is_paused_for_an_error() -> None:
    run = Driver().start()
    run.ask(activity("a"))
    run.ask(c.PauseRun(error=ERROR))
    assert [event.event_type for event in run.tell(done("a")).events] == ["StepCompleted"]
