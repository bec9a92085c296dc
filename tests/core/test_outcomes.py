"""What follows when the outcome of an activity comes from elsewhere, or is to come later."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec, commands
from holdfast.core import events as e
from holdfast.core.event_writer import NOTHING, Decision, Refusal
from holdfast.core.invariants import check
from holdfast.core.keys import ACTIVITY_TOKEN_CHARS, ActivityToken, read_activity_token, write_activity_token
from holdfast.core.messages import ActivityDetached, ActivityReturned, NodeLost
from holdfast.core.snapshot import project_run
from holdfast.core.state import state_of
from holdfast.errors import InvalidInput
from holdfast.store.validation import check_message
from tests.core.driver import SECOND, START, Driver, outcome

TWICE = Raw(b'{"retry":{"max_attempts":2,"initial_ms":5000,"jitter":0.5}}')
BROKEN = {"code": "Broken", "message": "it broke", "retryable": True}

KEY = "0123456789abcdef" * 4


def begun(queue: str = "far", options: Raw = TWICE) -> Driver:
    """Return a run whose activity is under way."""
    run = Driver().start()
    run.ask(commands.RunActivity(step_id="charge", name="charge", queue=queue, options=options))
    return run


def types(answer: Decision | Refusal) -> list[str]:
    assert isinstance(answer, Decision), answer
    return [event.event_type for event in answer.events]


# --- outcomes from elsewhere


@pytest.mark.contract("ACT-1", "MSG-1")
def test_the_message_is_an_envelope_like_the_others() -> None:
    message = outcome(begun(), result=1)
    assert check_message(message) is None
    assert (message.type, message.expected_version, message.waiting_token) == ("ActivityCompleted", 1, "charge~1")
    assert outcome(begun(), is_detached=True).signal_id != message.signal_id
    assert outcome(begun(), attempt=2).signal_id != message.signal_id


@pytest.mark.contract("ACT-1", "ATT-1")
@pytest.mark.parametrize("attempt", [1, 2, 9])
def test_a_success_of_any_attempt_counts_once(attempt: int) -> None:
    run = begun()
    run.tell(outcome(run, error=BROKEN))  # the step has come to its second attempt
    [event] = run.tell(outcome(run, attempt=attempt, result="ok")).events
    assert event.data == e.StepCompleted(Raw(b'"ok"'))
    assert event.engine_attempt_id == max(attempt, 2)
    assert run.tell(outcome(run, attempt=attempt, result="again")) == NOTHING


@pytest.mark.contract("ACT-1", "ATT-2")
def test_nothing_of_another_logical_attempt_counts() -> None:
    run = begun()
    for fields in ({"result": 1}, {"error": BROKEN}, {"is_detached": True}):
        assert run.tell(outcome(run, logical=2, **fields)) == NOTHING


@pytest.mark.contract("ACT-1")
def test_an_error_is_retried_through_the_queue_by_the_policy_of_the_step() -> None:
    run = begun()
    answer = run.tell(outcome(run, error=BROKEN, fraction=0.5))
    [event] = answer.events
    assert event.data == e.StepRetried("failed", START + 3_750_000, e.ErrorInfo(**BROKEN))  # type: ignore[arg-type]
    assert answer.messages == ()  # the queue knows when it is due
    assert answer.dispatch == ("charge",)
    assert types(run.tell(outcome(run, attempt=2, error=BROKEN))) == ["StepFailed"]


@pytest.mark.contract("ACT-1")
def test_a_step_of_the_runs_owner_is_retried_by_a_message() -> None:
    run = begun(queue="")
    answer = run.tell(outcome(run, error=BROKEN))
    assert [message.type for message in answer.messages] == ["RetryDue"]
    assert answer.dispatch == ()


@pytest.mark.contract("ACT-1")
def test_without_recorded_options_the_usual_policy_holds() -> None:
    run = begun(options=e.NULL)
    assert types(run.tell(outcome(run, error=BROKEN))) == ["StepRetried"]
    assert types(run.tell(outcome(run, attempt=2, error={**BROKEN, "retryable": False}))) == ["StepFailed"]


@pytest.mark.contract("ACT-1", "ATT-1")
def test_an_error_of_an_earlier_attempt_is_stale_and_one_of_a_later_moves_the_step_there() -> None:
    run = begun(options=Raw(b'{"retry":{"max_attempts":9,"initial_ms":0}}'))
    [event] = run.tell(outcome(run, attempt=4, error=BROKEN)).events
    assert event.engine_attempt_id == 5
    assert run.state.open_steps["charge"].attempt == 5
    for stale in (1, 4):
        assert run.tell(outcome(run, attempt=stale, error=BROKEN)) == NOTHING
    assert project_run(run.run_id, run.events).steps[0].engine_attempt_id == 5


@pytest.mark.contract("ATT-1", "ATT-2")
def test_the_attempts_of_a_step_that_failed_elsewhere_are_counted_on_when_an_operator_retries_it() -> None:
    run = begun()
    run.control("PAUSE")
    assert types(run.tell(outcome(run, attempt=7, error=BROKEN))) == ["StepFailed"]
    assert project_run(run.run_id, run.events).steps[0].engine_attempt_id == 7
    run.control("RETRY_STEP", "charge")
    step = run.state.open_steps["charge"]
    assert (step.engine_attempt_id, step.logical_attempt_id, step.attempt) == (8, 2, 1)
    assert run.dispatched[-1] == "charge"


@pytest.mark.contract("MSG-3")
def test_an_outcome_that_cannot_be_read_is_refused() -> None:
    run = begun()
    answer = run.try_tell(replace(outcome(run), payload=Raw(b"[]")))
    assert isinstance(answer, Refusal)
    assert isinstance(answer.error, InvalidInput)


# --- outcomes that come later


def detached(queue: str = "", until: int | None = START + SECOND, options: Raw = TWICE) -> Driver:
    """Return a run whose activity has ended without an outcome."""
    run = begun(queue, options)
    run.tell(outcome(run, is_detached=True, until=until) if queue else ActivityDetached("charge", 1, 1, until))
    return run


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("queue", ["", "far"])
def test_a_detached_step_waits_for_its_outcome_and_is_dispatched_to_nobody(queue: str) -> None:
    run = detached(queue)
    step = run.state.open_steps["charge"]
    assert step.is_detached
    assert (step.due_at, step.token) == (START + SECOND, "charge~1")
    assert run.tell(NodeLost("charge")) == NOTHING
    assert run.tell(ActivityDetached("charge", 1, 1, None)) == NOTHING
    assert run.tell(outcome(run, is_detached=True)) == NOTHING
    run.is_owned = False
    assert check(run.view()) == []
    assert types(run.tell(outcome(run, result=1))) == ["StepCompleted"]


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("queue", ["", "far"])
@pytest.mark.parametrize("fields", [{"result": 1}, {"error": BROKEN}])
def test_an_outcome_that_came_before_leaves_nothing_to_detach(queue: str, fields: dict[str, Any]) -> None:
    run = begun(queue)
    run.tell(outcome(run, **fields))
    assert run.tell(ActivityDetached("charge", 1, 1, None)) == NOTHING
    assert run.tell(outcome(run, is_detached=True)) == NOTHING


@pytest.mark.contract("ACT-1", "TMR-1")
@pytest.mark.parametrize("queue", ["", "far"])
def test_an_attempt_whose_time_is_over_is_retried_by_the_policy(queue: str) -> None:
    run = detached(queue)
    due = run.message("charge")
    assert (due.type, due.due_at) == ("TimerDue", START + SECOND)
    assert run.tell(due) == Decision(messages=(due,))  # never early
    run.now = START + SECOND
    answer = run.tell(due)
    [event] = answer.events
    assert isinstance(event.data, e.StepRetried)
    assert event.data.error is not None
    assert (event.data.error.code, event.engine_attempt_id) == ("TimeoutError", 2)
    assert answer.dispatch == (("charge",) if queue else ())
    assert not run.state.open_steps["charge"].is_detached
    assert run.tell(due) == NOTHING
    run.now += 5 * SECOND
    if not queue:
        assert run.tell(run.message("charge")).dispatch == ("charge",)
    run.tell(outcome(run, attempt=2, is_detached=True, until=run.now))
    assert types(run.tell(run.message("charge"))) == ["StepFailed"]


@pytest.mark.contract("ACT-1")
def test_when_the_time_of_the_whole_step_is_over_nothing_is_tried_again() -> None:
    run = detached(options=Raw(b'{"retry":{"max_attempts":0},"schedule_to_close_ms":1000}'))
    run.now = START + SECOND
    assert types(run.tell(run.message("charge"))) == ["StepFailed"]


@pytest.mark.contract("TMR-1")
def test_a_timer_means_nothing_to_an_activity_that_is_not_detached() -> None:
    run = begun(queue="")
    run.tell(outcome(run, error=BROKEN))
    due = run.message("charge")
    run.now += 60 * SECOND
    assert run.tell(replace(due, type="TimerDue", signal_id="odd")) == NOTHING
    run.tell(ActivityDetached("charge", 1, 2, None))
    assert run.tell(replace(due, signal_id="late")) == NOTHING  # the attempt was made


@pytest.mark.contract("EVT-4", "EVT-5", "PRJ-2")
def test_detachments_recur_and_the_events_fold_to_the_same_state() -> None:
    run = begun(options=Raw(b'{"retry":{"max_attempts":0,"initial_ms":0}}'))
    for attempt in range(1, 12):
        run.tell(outcome(run, attempt=attempt, is_detached=True))
        run.tell(outcome(run, attempt=attempt, error=BROKEN))
    assert len({event.idempotency_key for event in run.events}) == len(run.events)
    assert state_of(run.run_id, run.events) == run.state
    assert check(run.view()) == []


# --- tokens


@given(st.text(min_size=1), st.text(min_size=1), st.integers(1, 2**53), st.integers(1, 2**53))
def test_a_token_names_its_attempt_in_letters_that_are_safe_everywhere(
    run_id: str, step_id: str, logical: int, engine: int
) -> None:
    token = ActivityToken(run_id, step_id, logical, engine)
    try:
        text = write_activity_token(token, KEY)
    except InvalidInput:
        assert any("\ud800" <= character <= "\udfff" for character in run_id + step_id)
        return
    assert len(text) > ACTIVITY_TOKEN_CHARS or read_activity_token(text, KEY) == token
    assert text.replace("-", "").replace("_", "").replace(".", "", 1).isalnum()


@pytest.mark.contract("API-4")
@given(st.integers(0, 10_000), st.sampled_from("Aa0-_."), st.integers(1, 3))
def test_a_token_cannot_be_made_up_or_changed(place: int, letter: str, attempt: int) -> None:
    token = ActivityToken("run-1", "charge", 1, attempt)
    text = write_activity_token(token, KEY)
    changed = text[: place % len(text)] + letter + text[place % len(text) + 1 :]
    other = write_activity_token(token, "f" * 64)
    unsigned = text.partition(".")[0]
    body = write_activity_token(ActivityToken("run-1", "charge", 1, attempt + 1), KEY).partition(".")[0]
    forged = [other, unsigned, f"{unsigned}.", f"{body}.{text.partition('.')[2]}", text + "A", f"{text}="]
    for value in [*forged, *([changed] if changed != text else [])]:
        with pytest.raises(InvalidInput, match="not the token"):
            read_activity_token(value, KEY)


@pytest.mark.contract("API-2")
@given(st.text() | st.integers() | st.binary() | st.none())
def test_whatever_is_given_as_a_token_is_answered(value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:  # the odds of hitting upon a real one are nil
        read_activity_token(value, KEY)
    assert caught.value.details == {"field": "token"}


def test_a_message_of_the_future_is_set_aside() -> None:
    run = begun()
    answer = run.try_tell(replace(outcome(run), expected_version=99))
    assert isinstance(answer, Refusal)


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize(("on_failure", "last"), [("raise", ["StepFailed"]), ("pause", ["RunPaused", "StepFailed"])])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_bound_of_a_policy_is_the_bound_attempts_that_were_lost_included(
    on_failure: str, last: list[str], most: int
) -> None:
    run = begun("", codec.encode({"retry": {"max_attempts": most}, "on_failure": on_failure}))
    for _ in range(most - 1):
        assert types(run.tell(NodeLost("charge"))) == ["StepRetried"]
    answer = run.tell(NodeLost("charge"))
    assert isinstance(answer, Decision)
    assert types(answer) == last
    failure = answer.events[-1].data
    assert isinstance(failure, e.StepFailed)
    assert (failure.error.code, failure.error.retryable) == ("NodeLost", False)
    assert f"attempt {most}" in failure.error.message


@pytest.mark.contract("ACT-1")
def test_without_a_bound_lost_nodes_fail_nothing() -> None:
    run = begun("", codec.encode({"retry": {"max_attempts": 0}}))
    for attempt in range(2, 60):
        [event] = run.tell(NodeLost("charge")).events
        assert (event.event_type, event.engine_attempt_id) == ("StepRetried", attempt)


@pytest.mark.contract("ACT-1")
def test_a_policy_may_name_lost_nodes_as_not_retryable() -> None:
    run = begun("", codec.encode({"retry": {"max_attempts": 9, "non_retryable": ["NodeLost"]}}))
    assert types(run.tell(NodeLost("charge"))) == ["StepFailed"]


@pytest.mark.contract("ACT-1", "ATT-1")
def test_an_attempt_that_never_began_is_made_again_and_does_not_count() -> None:
    run = begun("", codec.encode({"retry": {"max_attempts": 1}}))
    for attempt in range(1, 25):
        answer = run.tell(ActivityReturned("charge", 1, attempt))
        [event] = answer.events
        assert (event.event_type, event.engine_attempt_id) == ("StepRetried", attempt + 1)
        assert answer.dispatch == ()
        assert run.state.open_steps["charge"].attempt == 1
        assert run.tell(ActivityReturned("charge", 1, attempt)) == NOTHING  # it is the next one's by now
        assert run.tell(run.message("charge")).dispatch == ("charge",)
    assert state_of(run.run_id, run.events) == run.state
    assert types(run.tell(NodeLost("charge"))) == ["StepFailed"]


@pytest.mark.contract("FMT-2", "ACT-1")
def test_outcome_of_a_step_that_was_opened_at_another_time_changes_nothing() -> None:
    """It is of a deleted run that had this id; one without the time is of an older node, and counts."""
    run = begun()
    opened_at = run.state.open_steps["charge"].opened_at
    assert run.tell(replace(outcome(run, result="late"), opened_at=opened_at - 1)) == NOTHING
    assert run.tell(replace(outcome(run, result="ok"), opened_at=opened_at)).events
    assert begun().tell(outcome(run, result="old")).events
