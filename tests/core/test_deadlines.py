"""How long all attempts of an activity together may take: what follows when that time is over."""

from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec, commands
from holdfast.core import events as e
from holdfast.core.event_writer import NOTHING, Decision, Refusal
from holdfast.core.invariants import check
from holdfast.core.messages import ActivityDetached, ActivityErrored, Message, NodeLost
from holdfast.core.snapshot import project_run
from holdfast.core.state import RunStatus, state_of
from holdfast.core.timing import Retry
from holdfast.limits import ERROR_TEXT_CHARS
from holdfast.store.validation import check_message
from tests.core.driver import BROKEN, FATAL, SECOND, START, Driver, done, outcome

LATE = "activity 'charge' was not done within 1000 ms of being scheduled"


def begun(queue: str = "", *, initial_ms: int = 400, **options: Any) -> Driver:
    """Return a run whose activity is to be done within a second."""
    retry = {"max_attempts": 0, "initial_ms": initial_ms, "factor": 1.0, "jitter": 0.0}
    run = Driver().start()
    encoded = codec.encode({"retry": retry, "schedule_to_close_ms": 1_000, **options})
    run.ask(commands.RunActivity(step_id="charge", name="charge", queue=queue, options=encoded))
    return run


def failed(run: Driver, error: e.ErrorInfo = BROKEN) -> Decision:
    """Let the present attempt fail."""
    step = run.state.open_steps["charge"]
    retry = codec.decode(codec.encode(codec.decode(_options(step.body), dict[str, Any])["retry"]), Retry)
    return run.tell(ActivityErrored("charge", step.logical_attempt_id, step.engine_attempt_id, error, retry))


def _options(body: e.Body) -> Raw:
    assert isinstance(body, e.StepStarted)
    return body.options


def deadline(run: Driver, logical: int = 1) -> Message:
    """Return the message that ends the step."""
    return run.inbox[f"TimerDue:charge!close{logical}"]


def types(answer: Decision | Refusal) -> list[str]:
    assert isinstance(answer, Decision), answer
    return [event.event_type for event in answer.events]


def failure(answer: Decision) -> e.ErrorInfo:
    """Return why the step was given up."""
    body = answer.events[-1].data
    assert isinstance(body, e.StepFailed), body
    return body.error


@pytest.mark.contract("ACT-1", "TMR-1")
def test_a_step_whose_time_is_bounded_is_opened_with_a_message_for_then() -> None:
    run = begun()
    message = deadline(run)
    assert check_message(message) is None
    assert (message.type, message.step_id, message.due_at) == ("TimerDue", "charge", START + SECOND)


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize(
    "options",
    [
        e.NULL,
        Raw(b"{}"),
        Raw(b'{"timeout_ms":1000}'),
        Raw(b'{"queue":"\\"schedule_to_close_ms\\""}'),
        Raw(b'{"schedule_to_close_ms":null}'),
        Raw(b'{"schedule_to_close_ms":"soon"}'),
    ],
)
def test_nothing_is_scheduled_for_an_activity_without_the_option(options: Raw) -> None:
    asked = Driver().start().ask(commands.RunActivity(step_id="charge", name="charge", options=options))
    assert asked.messages == ()
    assert asked.dispatch == ("charge",)


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("queue", ["", "far"])
def test_an_attempt_that_would_come_too_late_is_not_waited_for(queue: str) -> None:
    run = begun(queue, initial_ms=1_000)
    gone = failed(run)
    assert types(gone) == ["StepFailed"]
    assert failure(gone) == BROKEN
    assert (gone.messages, gone.dispatch) == ((), ())


@pytest.mark.contract("ACT-1")
def test_the_attempts_before_the_time_is_over_are_made() -> None:
    run = begun(initial_ms=400)
    assert types(failed(run)) == ["StepRetried"]
    run.now += 400_000
    assert types(failed(run)) == ["StepRetried"]
    run.now += 400_000
    last = e.ErrorInfo("Last", "the last error", retryable=True)
    assert failure(failed(run, last)) == last


@pytest.mark.contract("ACT-1")
def test_an_attempt_that_is_due_right_before_the_end_is_made() -> None:
    run = begun(initial_ms=999)
    assert types(failed(run)) == ["StepRetried"]


@pytest.mark.contract("ACT-1", "TMR-1")
@pytest.mark.parametrize("queue", ["", "far"])
def test_a_step_that_nobody_has_done_ends_when_its_time_is_over(queue: str) -> None:
    run = begun(queue)
    run.now = START + SECOND
    ended = run.tell(deadline(run))
    assert types(ended) == ["StepFailed"]
    assert failure(ended) == e.ErrorInfo("TimeoutError", LATE)
    assert run.state.open_steps == {}
    assert state_of(run.run_id, run.events) == run.state
    assert check(run.view()) == []
    assert project_run(run.run_id, run.events).steps[0].status == "FAILED"


@pytest.mark.contract("TMR-1")
def test_it_never_ends_early_and_the_message_is_left_for_later() -> None:
    run = begun()
    run.now = START + SECOND - 1
    early = run.tell(deadline(run))
    assert early.events == ()
    assert early.messages == (deadline(run),)


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("is_lost", [False, True])
def test_the_failure_names_the_last_error(is_lost: bool) -> None:
    run = begun()
    failed(run)
    run.now += 400_000
    if is_lost:
        run.tell(NodeLost("charge"))
    run.now = START + SECOND
    assert failure(run.tell(deadline(run))) == e.ErrorInfo(
        "TimeoutError", f"{LATE}; its last error was Broken: it broke"
    )


def test_the_failure_is_bounded_text() -> None:
    run = begun()
    failed(run, replace(BROKEN, message="x" * ERROR_TEXT_CHARS))
    run.now = START + SECOND
    assert len(failure(run.tell(deadline(run))).message) == ERROR_TEXT_CHARS


@pytest.mark.contract("ACT-1", "TMR-1")
@pytest.mark.parametrize("first", ["deadline", "detached"])
def test_an_outcome_that_is_reported_later_is_waited_for_until_then(first: str) -> None:
    run = begun()
    run.tell(ActivityDetached("charge", 1, 1, START + SECOND))
    messages = [deadline(run), run.message("charge")]
    run.now = START + SECOND
    one, other = messages if first == "deadline" else messages[::-1]
    assert failure(run.tell(one)) == e.ErrorInfo("TimeoutError", LATE)
    assert run.tell(other) == NOTHING


@pytest.mark.contract("ACT-1")
def test_what_comes_after_the_end_changes_nothing() -> None:
    run = begun("far")
    run.now = START + SECOND
    message = deadline(run)
    run.tell(message)
    assert run.tell(message) == NOTHING
    assert run.tell(done()) == NOTHING
    assert run.tell(outcome(run, result="ok")) == NOTHING
    assert run.tell(NodeLost("charge")) == NOTHING


@pytest.mark.contract("ACT-1", "TMR-1")
@pytest.mark.parametrize("how", ["done", "failed", "cancelled", "rotated"])
def test_the_message_of_a_step_that_has_closed_is_not_recorded(how: str) -> None:
    run = begun()
    message = deadline(run)
    if how == "done":
        run.tell(done())
    elif how == "failed":
        failed(run, FATAL)
    elif how == "cancelled":
        run.ask(commands.CancelStep(step_id="charge"))
    else:
        run.ask(commands.ContinueAsNew())
    run.now = START + SECOND
    assert run.tell(message) == NOTHING


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("early", [True, False])
def test_a_failure_for_want_of_time_pauses_the_run_like_any_other(early: bool) -> None:
    run = begun(on_failure="pause", initial_ms=5_000)
    if early:
        answer = failed(run)
    else:
        run.now = START + SECOND
        answer = run.tell(deadline(run))
    assert types(answer) == ["RunPaused", "StepFailed"]
    assert run.state.is_held


@pytest.mark.contract("ACT-1", "SIG-13")
def test_the_time_begins_anew_when_an_operator_has_the_step_tried_again() -> None:
    run = begun(on_failure="pause")
    failed(run)
    run.now = START + SECOND
    first = deadline(run)
    run.tell(first)
    run.now += 10 * SECOND
    run.control("RETRY_STEP", "charge")
    second = deadline(run, 2)
    assert second.due_at == run.now + SECOND
    assert run.state.open_steps["charge"].error is None
    assert run.tell(first) == NOTHING
    assert types(failed(run)) == ["StepRetried"]
    run.now += SECOND
    assert types(run.tell(second)) == ["RunPaused", "StepFailed"]


@pytest.mark.contract("ACT-1")
def test_a_paused_run_does_not_stop_the_time() -> None:
    run = begun(on_failure="pause")
    run.control("PAUSE")
    run.now = START + SECOND
    assert types(run.tell(deadline(run))) == ["StepFailed"]
    assert run.state.status is RunStatus.PAUSED
    run.control("RETRY_STEP", "charge")
    assert deadline(run, 2).due_at == run.now + SECOND


def test_a_message_for_a_step_of_which_the_history_knows_no_end_changes_nothing() -> None:
    run = Driver().start()
    run.ask(commands.RunActivity(step_id="charge", name="charge"))
    odd = replace(deadline(begun()), signal_id="odd")
    run.now = START + SECOND
    assert run.tell(odd) == NOTHING
