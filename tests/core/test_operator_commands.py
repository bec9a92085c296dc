"""Operators' commands: each in each status, decided and recorded before they take effect."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import commands
from holdfast.core import events as e
from holdfast.core.event_writer import Decision, Refusal
from holdfast.core.index_rows import Retrying, runtime_snapshot
from holdfast.core.messages import ControlName
from holdfast.core.plans import STORE_PLAN
from holdfast.core.state import APPROVED, CANCELLED, PAUSED, PENDING, RUNNING, TERMINAL, RunStatus
from holdfast.core.timing import Retry
from holdfast.errors import RunTerminal
from tests.core.driver import BROKEN, FATAL, Driver, activity, done, failed, timer
from tests.core.event_bodies import run_in

NAMES: tuple[ControlName, ...] = get_args(ControlName)

# What each command appends in each status, with step "activity" open where there are steps.
A, R = "SignalAccepted", "SignalRejected"
EXPECTED: dict[RunStatus, dict[str, str]] = {
    PENDING: {
        "PAUSE": R,
        "RESUME": R,
        "CANCEL": f"{A} RunCancelled",
        "APPROVE": f"{A} RunApproved",
        "RETRY_STEP": R,
        "SKIP_STEP": R,
        "RETRY_RUN": R,
        "EMERGENCY_STOP": f"{A} RunCancelled",
    },
    APPROVED: {
        "PAUSE": R,
        "RESUME": R,
        "CANCEL": f"{A} RunCancelled",
        "APPROVE": A,
        "RETRY_STEP": R,
        "SKIP_STEP": R,
        "RETRY_RUN": R,
        "EMERGENCY_STOP": f"{A} RunCancelled",
    },
    RUNNING: {
        "PAUSE": f"{A} RunPaused",
        "RESUME": A,
        "CANCEL": f"{A} RunCancelRequested",
        "APPROVE": R,
        "RETRY_STEP": R,
        "SKIP_STEP": f"{A} StepSkipped",
        "RETRY_RUN": R,
        "EMERGENCY_STOP": f"{A} RunCancelled",
    },
    PAUSED: {
        "PAUSE": A,
        "RESUME": f"{A} RunResumed",
        "CANCEL": f"{A} RunCancelRequested RunResumed",
        "APPROVE": R,
        "RETRY_STEP": R,
        "SKIP_STEP": f"{A} StepSkipped",
        "RETRY_RUN": R,
        "EMERGENCY_STOP": f"{A} RunCancelled",
    },
}


def types(answer: Decision | Refusal) -> str:
    """Return the event types of a decision."""
    assert isinstance(answer, Decision), answer
    return " ".join(event.event_type for event in answer.events)


@pytest.mark.contract("SIG-13", "WF-7")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", list(RunStatus))
def test_every_command_in_every_status_has_a_defined_answer(status: RunStatus, name: ControlName) -> None:
    run = run_in(status)
    answer = run.control(name, "activity" if name in ("RETRY_STEP", "SKIP_STEP") else None)
    if status in TERMINAL:
        assert isinstance(answer, Refusal)
        assert isinstance(answer.error, RunTerminal)
    else:
        assert types(answer) == EXPECTED[status][name]


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("status", [PENDING, APPROVED, RUNNING, PAUSED])
def test_the_approval_of_a_step_releases_no_run(status: RunStatus) -> None:
    run = run_in(status)
    answer = run.control("APPROVE", "activity")
    assert isinstance(answer, Decision)
    [event] = answer.events
    assert isinstance(event.data, e.SignalRejected)
    assert event.data.reason == "step 'activity' awaits no approval"
    assert run.state.status is status


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", [PENDING, APPROVED, RUNNING, PAUSED])
def test_a_command_that_is_not_permitted_is_recorded_and_changes_nothing(status: RunStatus, name: ControlName) -> None:
    run = run_in(status)
    before = run.state
    answer = run.control(name, "activity", is_allowed=False)
    assert isinstance(answer, Decision)
    [event] = answer.events
    assert isinstance(event.data, e.SignalRejected)
    assert (event.data.name, event.data.actor, event.data.reason) == (name, "ann", "not permitted")
    assert event.data.target_step_id == "activity"
    assert (run.state.status, run.state.open_steps) == (before.status, before.open_steps)
    assert (answer.dispatch, answer.messages) == ((), ())


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize(
    ("status", "name", "step_id", "reason"),
    [
        (PENDING, "PAUSE", None, "the run has not started"),
        (RUNNING, "APPROVE", None, "the run has started already"),
        (RUNNING, "RETRY_STEP", "activity", "step 'activity' has not failed"),
        (RUNNING, "SKIP_STEP", "nowhere", "step 'nowhere' is neither open nor failed"),
        (RUNNING, "SKIP_STEP", None, "step '' is neither open nor failed"),
        (RUNNING, "RETRY_RUN", None, "the run has not finished"),
    ],
)
def test_a_command_that_does_not_apply_is_recorded_with_the_reason(
    status: RunStatus, name: ControlName, step_id: str | None, reason: str
) -> None:
    answer = run_in(status).control(name, step_id)
    assert isinstance(answer, Decision)
    [event] = answer.events
    assert isinstance(event.data, e.SignalRejected)
    assert (event.data.reason, event.data.actor) == (reason, "ann")


@pytest.mark.contract("SIG-13", "EVT-2")
def test_the_decision_stands_before_its_effect_and_both_name_the_signal() -> None:
    run = run_in(RUNNING)
    answer = run.control("PAUSE", reason="lunch")
    assert isinstance(answer, Decision)
    accepted, paused = answer.events
    assert isinstance(accepted.data, e.SignalAccepted)
    assert (accepted.data.actor, accepted.data.reason) == ("ann", "lunch")
    assert paused.data == e.RunPaused("lunch")
    assert accepted.caused_by_signal_id == paused.caused_by_signal_id != accepted.data.signal_id
    assert run.state.last_signal_id == accepted.caused_by_signal_id


@pytest.mark.contract("SIG-13")
def test_pausing_twice_works_twice() -> None:
    run = run_in(RUNNING)
    answers = [types(run.control(name)) for name in ("PAUSE", "PAUSE", "RESUME", "RESUME", "PAUSE")]
    assert answers == [f"{A} RunPaused", A, f"{A} RunResumed", A, f"{A} RunPaused"]
    keys = [event.idempotency_key for event in run.events]
    assert len(set(keys)) == len(keys)


# --- cancelling


@pytest.mark.contract("WF-4")
def test_cancelling_twice_asks_the_program_once() -> None:
    run = run_in(RUNNING)
    assert types(run.control("CANCEL")) == f"{A} RunCancelRequested"
    assert run.state.is_cancelling
    assert types(run.control("CANCEL")) == A


@pytest.mark.contract("WF-4")
def test_cancelling_a_run_that_was_paused_while_it_cleaned_up_lets_it_go_on() -> None:
    run = run_in(RUNNING)
    run.control("CANCEL")
    run.control("PAUSE")
    assert types(run.control("CANCEL")) == f"{A} RunResumed"
    assert (run.state.status, run.state.is_cancelling) == (RUNNING, True)


@pytest.mark.contract("WF-4", "SIG-13")
@pytest.mark.parametrize("status", [PENDING, APPROVED, RUNNING, PAUSED])
def test_an_emergency_stop_ends_the_run_at_once(status: RunStatus) -> None:
    run = run_in(status)
    run.control("EMERGENCY_STOP", reason="")
    assert run.state.status is CANCELLED
    assert run.events[-1].data == e.RunCancelled("terminated")
    assert run.inbox == {}


# --- steps


@pytest.mark.contract("ATT-1", "ATT-2", "EVT-4")
def test_a_step_can_be_retried_past_nine_times_and_every_key_is_its_own() -> None:
    run = Driver().start()
    run.ask(activity(on_failure="pause"))
    for attempt in range(1, 13):
        run.tell(failed(attempt=attempt, engine_attempt=attempt))
        answer = run.control("RETRY_STEP", "charge")
        assert isinstance(answer, Decision)
        assert types(answer) == f"{A} StepStarted RunResumed"
        started = answer.events[1]
        assert (started.logical_attempt_id, started.engine_attempt_id) == (attempt + 1, attempt + 1)
        assert started.data == run.events[2].data
        assert answer.dispatch == ("charge",)
    assert types(run.tell(done(attempt=13))) == "StepCompleted"
    keys = [event.idempotency_key for event in run.events]
    assert len(set(keys)) == len(keys)
    attempts = [event.logical_attempt_id for event in run.events if event.event_type == "StepStarted"]
    assert attempts == list(range(1, 14))


@pytest.mark.contract("ATT-2")
def test_only_a_failed_step_can_be_retried_and_only_once_for_each_failure() -> None:
    run = Driver().start()
    run.ask(activity(on_failure="pause"))
    assert types(run.control("RETRY_STEP", "charge")) == R
    run.tell(failed())
    assert types(run.control("RETRY_STEP", "charge")) == f"{A} StepStarted RunResumed"
    assert types(run.control("RETRY_STEP", "charge")) == R
    run.tell(done(attempt=2))
    assert types(run.control("RETRY_STEP", "charge")) == R


@pytest.mark.contract("ATT-2", "SIG-13")
@pytest.mark.parametrize("on_failure", ["raise", "pause"])
def test_what_failed_while_an_operator_held_the_run_is_retried_and_the_run_stays_paused(on_failure: str) -> None:
    run = Driver().start()
    run.ask(activity(on_failure=on_failure))
    run.control("PAUSE")
    assert types(run.tell(failed())) == "StepFailed"
    assert types(run.control("RETRY_STEP", "charge")) == f"{A} StepStarted"
    assert types(run.tell(done(attempt=2))) == "StepCompleted"
    assert run.state.status is PAUSED


@pytest.mark.contract("ATT-2", "SIG-13")
@pytest.mark.parametrize("name", ["RETRY_STEP", "SKIP_STEP"])
def test_a_failure_that_the_program_was_told_of_is_not_taken_back(name: ControlName) -> None:
    told = Driver().start()
    told.ask(activity())
    told.tell(failed())
    told.control("PAUSE")
    resumed = Driver().start()
    resumed.ask(activity(on_failure="pause"))
    resumed.tell(failed())
    resumed.control("RESUME", raise_failure=True)
    for run in (told, resumed):
        answer = run.control(name, "charge")
        assert types(answer) == R
        assert run.events[-1].data.reason == "the workflow has gone on since step 'charge' failed"  # type: ignore[attr-defined]


@pytest.mark.contract("ATT-2", "SIG-13")
def test_a_resumption_that_came_to_nothing_tells_the_program_nothing() -> None:
    run = Driver().start()
    run.ask(activity(on_failure="pause"))
    run.tell(failed())
    assert types(run.control("RESUME")) == R
    run.control("RESUME", raise_failure=True)
    run.ask(commands.PauseRun(error=FATAL))
    assert not run.state.failed_steps["charge"].is_delivered
    assert (
        types(run.control("RETRY_STEP", "charge")) == f"{A} StepStarted"
    )  # what stopped the program is another matter


@pytest.mark.contract("ATT-2", "SIG-13")
@pytest.mark.parametrize("names", [("RETRY_STEP", "SKIP_STEP"), ("SKIP_STEP", "RETRY_STEP"), ("SKIP_STEP",) * 2])
def test_a_run_goes_on_when_the_last_of_its_failed_steps_is_settled(names: tuple[ControlName, ...]) -> None:
    run = Driver().start()
    run.ask(activity("a", on_failure="pause"), activity("b", on_failure="pause"), timer())
    assert types(run.tell(failed("a"))) == "RunPaused StepFailed"
    assert types(run.tell(failed("b"))) == "StepFailed"
    first, last = names
    assert types(run.control("SKIP_STEP", "sleep")) == f"{A} StepSkipped"
    assert not types(run.control(first, "b")).endswith("RunResumed")
    assert types(run.control(last, "a")).endswith("RunResumed")
    assert run.state.status is RUNNING


@pytest.mark.contract("SIG-13")
def test_an_operator_who_pauses_a_run_that_a_failure_has_paused_holds_it() -> None:
    run = Driver().start()
    run.ask(activity(on_failure="pause"))
    run.tell(failed())
    assert run.state.is_held
    assert types(run.control("PAUSE")) == A
    assert types(run.control("RETRY_STEP", "charge")) == f"{A} StepStarted"
    assert types(run.control("RESUME")) == f"{A} RunResumed"
    assert types(run.tell(failed(attempt=2, engine_attempt=2))) == "RunPaused StepFailed"
    assert run.state.last_error == BROKEN


@pytest.mark.contract("SIG-13")
def test_an_update_is_not_skipped_because_somebody_waits_for_its_answer() -> None:
    assert types(run_in(RUNNING).control("SKIP_STEP", "update")) == R


@pytest.mark.contract("SIG-13")
def test_a_step_that_stores_the_plan_of_code_is_not_skipped_because_the_run_could_not_go_on() -> None:
    run = Driver().start()
    run.ask(commands.RunActivity(step_id="plan:store", name=STORE_PLAN))
    assert types(run.control("SKIP_STEP", "plan:store")) == R
    assert "plan:store" in run.state.open_steps


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("kind", ["activity", "timer", "signal", "task", "child"])
def test_an_open_step_of_any_kind_can_be_skipped(kind: str) -> None:
    run = run_in(RUNNING)
    answer = run.control("SKIP_STEP", kind, reason="not needed")
    assert isinstance(answer, Decision)
    skipped = answer.events[1]
    assert (skipped.step_id, skipped.data) == (kind, e.StepSkipped("not needed"))
    assert kind not in run.state.open_steps
    assert types(run.control("SKIP_STEP", kind)) == R


@pytest.mark.contract("SIG-13")
def test_a_failed_step_can_be_skipped_and_then_no_longer_retried() -> None:
    run = Driver().start()
    run.ask(activity(on_failure="pause"))
    run.tell(failed())
    assert types(run.control("SKIP_STEP", "charge")) == f"{A} StepSkipped RunResumed"
    assert run.state.failed_steps == {}
    assert types(run.control("RETRY_STEP", "charge")) == R


@pytest.mark.contract("SIG-13", "TMR-1")
def test_a_skipped_timer_is_a_no_op_when_it_comes() -> None:
    run = Driver().start()
    run.ask(timer("sleep"))
    message = run.message("sleep")
    run.control("SKIP_STEP", "sleep")
    run.now += 10**9
    assert run.tell(message).events == ()


@pytest.mark.contract("SIG-13", "EVT-4", "INV")
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=25))
def test_any_series_of_commands_is_recorded_one_by_one_with_unique_keys(
    series: list[tuple[ControlName, bool]],
) -> None:
    run = run_in(RUNNING)
    for name, is_allowed in series:
        before = len(run.events)
        answer = run.control(name, "activity", is_allowed=is_allowed)
        if isinstance(answer, Refusal):
            assert run.state.is_finished
            break
        verdict = run.events[before].data
        assert isinstance(verdict, (e.SignalAccepted, e.SignalRejected))
        assert verdict.name == name
        if isinstance(verdict, e.SignalRejected):
            assert len(run.events) == before + 1
    keys = [event.idempotency_key for event in run.events]
    assert len(set(keys)) == len(keys)


@pytest.mark.contract("SIG-13", "ATT-1")
def test_an_activity_that_is_tried_again_later_can_be_tried_at_once_and_no_attempt_is_lost() -> None:
    run = Driver().start()
    run.ask(activity())
    retry = Retry(max_attempts=3, initial_ms=60_000)
    run.tell(failed(retry=retry))
    later = run.message("charge")
    seen = runtime_snapshot(run.state).retrying
    assert seen == Retrying("charge", "charge", 1, BROKEN.code, later.due_at)
    answer = run.control("RETRY_STEP", "charge")
    assert isinstance(answer, Decision)
    assert (types(answer), answer.dispatch) == (f"{A} StepRetried", ("charge",))
    assert run.state.open_steps["charge"].attempt == 2
    assert types(run.control("RETRY_STEP", "charge")) == R  # it is being tried
    run.now = later.due_at or 0
    assert run.tell(later) == Decision()  # what was due later is of an attempt that was replaced
    run.tell(failed(engine_attempt=3, retry=retry))
    seen = runtime_snapshot(run.state).retrying
    assert seen is not None
    assert seen.failures == 2
    assert types(run.tell(done())) == "StepCompleted"
    assert runtime_snapshot(run.state).retrying is None


@pytest.mark.contract("PRJ-4", "SIG-13")
def test_a_run_says_who_has_paused_it_and_why() -> None:
    run = Driver().start()
    run.ask(activity(on_failure="pause"), timer())
    run.control("PAUSE", reason="the bank is down")
    seen = runtime_snapshot(run.state).pause
    assert seen is not None
    assert (seen.since, seen.reason, seen.actor) == (run.now, "the bank is down", "ann")
    run.control("RESUME")
    assert runtime_snapshot(run.state).pause is None
    run.tell(failed())
    seen = runtime_snapshot(run.state).pause
    assert seen is not None
    assert (seen.reason, seen.actor) == ("step 'charge' failed", "")
