"""Keyed steps: what follows when it is not known whether their effect has happened. The contract's outcome matrix."""

from copy import deepcopy
from typing import Any

import pytest
from msgspec import UNSET, Raw

from holdfast.core import codec, commands
from holdfast.core import events as e
from holdfast.core import reconciliation as r
from holdfast.core.event_writer import NOTHING, Decision, Refusal
from holdfast.core.index_rows import Task
from holdfast.core.invariants import check
from holdfast.core.keyed_steps import Effect
from holdfast.core.messages import ActivityErrored as Errored
from holdfast.core.messages import (
    ActivityReturned,
    ActivitySucceeded,
    Actor,
    NodeLost,
    TaskOperation,
    TaskRequest,
)
from holdfast.core.snapshot import project_run
from holdfast.core.state import OpenStep, state_of
from holdfast.core.timing import Retry
from tests.core.driver import SECOND, Driver, outcome

BROKEN = e.ErrorInfo("Broken", "it broke", retryable=True)
FATAL = e.ErrorInfo("Fatal", "it cannot be done")
LATE = e.ErrorInfo("TimeoutError", "took too long", retryable=True)
ANN = Actor("ann", ("operator",))


def begun(queue: str = "", key: str | None = "order-1", **options: Any) -> Driver:
    """Return a run whose keyed activity is under way."""
    run = Driver().start()
    encoded = codec.encode(options) if options else e.NULL
    run.ask(commands.RunActivity(step_id="charge", name="charge", queue=queue, idempotency_key=key, options=encoded))
    return run


def step(run: Driver) -> OpenStep:
    return run.state.open_steps["charge"]


def effect(run: Driver) -> Effect:
    found = step(run).effect
    assert found is not None
    return found


def record(run: Driver) -> tuple[str, object, str | None]:
    """Return what the record says: status, result and error."""
    known = run.records["charge"]
    result = None if known.result is UNSET else codec.decode(known.result, Any)
    return known.status, result, None if known.error is None else known.error.code


def types(answer: Decision | Refusal) -> list[str]:
    assert isinstance(answer, Decision), answer
    return [event.event_type for event in answer.events]


def errored(run: Driver, error: e.ErrorInfo, retry: Retry | None = None) -> Decision:
    return run.tell(Errored("charge", 1, step(run).engine_attempt_id, error, retry or Retry(max_attempts=3), 0.0))


def due(run: Driver) -> None:
    """Let the next attempt become due, and begin."""
    message = run.message("charge")
    run.now = max(run.now, message.due_at or 0)
    assert run.tell(message).dispatch == ("charge",)


def open_tasks(run: Driver) -> list[Task]:
    return [task for task in run.tasks.values() if task.status == "OPEN"]


def answer(run: Driver, actor: Actor = ANN, **given: Any) -> Decision | Refusal:
    """Answer the operator's task."""
    [task] = open_tasks(run)
    request = TaskRequest(
        task_id=task.task_id, step_id=task.step_id, action="complete", actor=actor, answer=codec.encode(given)
    )
    return run.try_tell(TaskOperation(id=f"op-{len(run.events)}", request=request))


def unresolved(**fields: Any) -> Driver:
    """Return a run whose keyed step waits for an operator: its node was lost, and the verifier cannot say."""
    run = begun(**fields)
    run.tell(NodeLost("charge"))
    errored(run, r.indeterminate("the bank is closed"))
    return run


def finish(run: Driver) -> None:
    """Check that the whole history is sound."""
    assert state_of(run.run_id, run.events) == run.state
    assert check(run.view()) == []


# --- the record


@pytest.mark.contract("ACT-3")
def test_the_record_is_claimed_as_indeterminate_with_the_step() -> None:
    run = begun()
    known = run.records["charge"]
    assert (known.version, known.run_id, known.activity_name, known.step_id) == (1, "run-1", "charge", "charge")
    assert (known.idempotency_key, known.created_at, known.updated_at) == ("order-1", run.now, run.now)
    assert record(run) == ("indeterminate", None, None)
    finish(run)


@pytest.mark.contract("ACT-2")
def test_without_a_key_there_is_no_record_and_no_verification() -> None:
    run = begun(key=None)
    run.tell(NodeLost("charge"))
    assert run.records == {}
    assert step(run).effect is None
    run.tell(ActivitySucceeded("charge", 1, Raw(b"1")))
    assert run.types[-1] == "StepCompleted"


# --- the outcome matrix


@pytest.mark.contract("ACT-5")
def test_success_is_recorded_with_its_result() -> None:
    run = begun()
    assert types(run.tell(ActivitySucceeded("charge", 1, Raw(b'"receipt"')))) == ["StepCompleted"]
    assert record(run) == ("completed", "receipt", None)
    finish(run)


@pytest.mark.contract("ACT-5")
def test_a_failure_that_is_not_retryable_is_the_functions_own_word() -> None:
    run = begun()
    assert types(errored(run, FATAL)) == ["StepFailed"]
    assert record(run) == ("failed", None, "Fatal")
    finish(run)


@pytest.mark.contract("ACT-4", "ACT-5")
@pytest.mark.parametrize("before", ["lost", "timed out", "failed", "acquired again"])
def test_a_failure_that_is_not_retryable_does_not_settle_an_attempt_before_it(before: str) -> None:
    """It is the word of one attempt. The former may have been slower than the verifier, which was asked in between."""
    run = begun("far" if before == "acquired again" else "")
    if before == "lost":
        run.tell(NodeLost("charge"))
    elif before != "acquired again":
        errored(run, LATE if before == "timed out" else BROKEN)
        due(run)
    answer = run.tell(outcome(run, attempt=2, error=FATAL))
    assert (types(answer), answer.dispatch) == (["StepRetried"], ("charge",))
    assert effect(run).is_last_look
    assert effect(run).was_in_doubt
    late = ActivitySucceeded("charge", 1, Raw(b'"receipt"'), confirmed_by="verifier")
    assert types(deepcopy(run).tell(late)) == ["StepCompleted"]
    assert types(errored(run, r.not_completed(effect(run).error))) == ["StepFailed"]
    assert record(run) == ("failed", None, "Fatal")
    finish(run)


@pytest.mark.contract("ACT-4", "ACT-5")
def test_after_an_operator_has_settled_the_attempts_before_an_error_is_final_again() -> None:
    run = unresolved()
    answer(run, answer="did-not-happen")
    assert types(errored(run, FATAL)) == ["StepFailed"]
    finish(run)


@pytest.mark.contract("ACT-5", "ACT-4")
def test_a_retryable_failure_is_verified_before_the_next_attempt() -> None:
    run = begun()
    assert types(errored(run, BROKEN)) == ["StepRetried"]
    assert record(run) == ("failed", None, "Broken")
    assert effect(run).must_verify
    assert not effect(run).is_last_look
    due(run)
    run.tell(ActivitySucceeded("charge", 1, Raw(b"1"), confirmed_by="verifier"))
    done = run.events[-1].data
    assert isinstance(done, e.StepCompleted)
    assert done.confirmed_by == "verifier"
    assert record(run) == ("completed", 1, None)
    finish(run)


@pytest.mark.contract("ACT-5", "ACT-4")
def test_a_timeout_is_recorded_as_such_and_verified() -> None:
    run = begun()
    errored(run, LATE)
    assert record(run) == ("timed-out", None, "TimeoutError")
    assert effect(run).must_verify
    finish(run)


@pytest.mark.contract("ACT-5", "ACT-4", "ATT-1")
def test_a_lost_attempt_leaves_the_effect_indeterminate_and_is_verified() -> None:
    run = begun()
    answer = run.tell(NodeLost("charge"))
    assert (types(answer), answer.dispatch) == (["StepRetried"], ("charge",))
    assert record(run) == ("indeterminate", None, "NodeLost")
    assert effect(run).must_verify
    assert (step(run).engine_attempt_id, step(run).logical_attempt_id) == (2, 1)
    [ended] = effect(run).attempts
    assert (ended.engine_attempt_id, ended.how, ended.node) == (1, "lost", "node-a")
    finish(run)


@pytest.mark.contract("ACT-1", "ACT-4")
def test_an_attempt_that_never_began_leaves_nothing_unknown() -> None:
    run = begun()
    run.tell(ActivityReturned("charge", 1, 1))
    assert step(run).effect is None
    run.tell(run.message("charge"))
    run.tell(NodeLost("charge"))
    run.tell(ActivityReturned("charge", 1, 3))
    assert effect(run).must_verify  # of the attempt before
    assert record(run)[0] == "indeterminate"
    finish(run)


@pytest.mark.contract("ACT-4", "ACT-5")
def test_completed_without_a_result_fails_and_is_never_dispatched_again() -> None:
    run = begun(retry={"max_attempts": 9})
    run.tell(NodeLost("charge"))
    answer = errored(run, r.without_result("charged, and the receipt is lost"))
    assert (types(answer), answer.dispatch, answer.messages) == (["StepFailed"], (), ())
    assert record(run) == ("completed", None, "ReconciliationFailed")
    finish(run)


@pytest.mark.contract("ACT-4", "ACT-5")
def test_indeterminate_leaves_the_step_to_an_operator() -> None:
    run = unresolved()
    assert run.types[-2:] == ["StepUnresolved", "TaskCreated"]
    assert step(run).is_unresolved
    assert record(run) == ("indeterminate", None, "Indeterminate")
    [task] = open_tasks(run)
    assert (task.task_type, task.roles) == ("reconciliation", ("operator",))
    facts = codec.decode(task.payload, dict[str, Any])
    assert (facts["activity"], facts["idempotency_key"], facts["problem"]) == (
        "charge",
        "order-1",
        "the bank is closed",
    )
    assert [(each["attempt"], each["how"]) for each in facts["attempts"]] == [(1, "lost"), (2, "unresolved")]
    for nothing in (NodeLost("charge"), ActivityReturned("charge", 1, 2)):
        assert run.tell(nothing) == NOTHING  # no node executes it
    finish(run)


@pytest.mark.contract("ACT-5")
@pytest.mark.parametrize("last", [BROKEN, LATE])
def test_exhaustion_asks_the_verifier_once_more_before_the_step_fails(last: e.ErrorInfo) -> None:
    run = begun(retry={"max_attempts": 2, "initial_ms": 1})
    retry = Retry(max_attempts=2, initial_ms=1)
    errored(run, BROKEN, retry)
    due(run)
    answer = errored(run, last, retry)
    assert (types(answer), answer.dispatch) == (["StepRetried"], ("charge",))
    assert effect(run).is_last_look
    answer = errored(run, r.not_completed(effect(run).error), retry)
    assert types(answer) == ["StepFailed"]
    assert record(run) == ("timed-out" if last is LATE else "failed", None, last.code)
    finish(run)


@pytest.mark.contract("ACT-5")
def test_a_last_look_that_finds_a_result_is_a_success() -> None:
    run = begun(retry={"max_attempts": 1})
    errored(run, LATE, Retry(max_attempts=1))
    run.tell(ActivitySucceeded("charge", 1, Raw(b"7"), confirmed_by="verifier"))
    assert record(run) == ("completed", 7, None)
    finish(run)


@pytest.mark.contract("ACT-1", "ACT-5")
def test_the_last_lost_attempt_is_looked_at_once_more() -> None:
    run = begun(retry={"max_attempts": 1})
    answer = run.tell(NodeLost("charge"))
    assert types(answer) == ["StepRetried"]
    assert effect(run).is_last_look
    errored(run, r.not_completed(effect(run).error), Retry(max_attempts=1))
    failure = run.events[-1].data
    assert isinstance(failure, e.StepFailed)
    assert (failure.error.code, failure.error.retryable) == ("NodeLost", False)
    assert record(run) == ("failed", None, "NodeLost")
    finish(run)


@pytest.mark.contract("ACT-4")
@pytest.mark.parametrize(("most", "losses"), [(0, 3), (1, 3), (2, 3), (5, 6)])
def test_a_verifier_or_function_that_ends_its_nodes_is_left_to_an_operator(most: int, losses: int) -> None:
    run = begun(retry={"max_attempts": most})
    for _ in range(losses - 1):
        assert types(run.tell(NodeLost("charge"))) == ["StepRetried"]
    assert types(run.tell(NodeLost("charge"))) == ["StepUnresolved", "TaskCreated"]
    assert record(run)[0] == "indeterminate"
    finish(run)


@pytest.mark.contract("ACT-1")
def test_a_lost_attempt_costs_what_the_policy_says() -> None:
    free = begun(key=None, retry={"max_attempts": 1, "count_lost": False})
    for _ in range(9):
        assert types(free.tell(NodeLost("charge"))) == ["StepRetried"]
    assert step(free).attempt == 1
    assert types(errored(free, BROKEN, Retry(max_attempts=1, count_lost=False))) == ["StepFailed"]
    keyed = begun(retry={"max_attempts": 1, "count_lost": False})
    for _ in range(2):
        assert types(keyed.tell(NodeLost("charge"))) == ["StepRetried"]
        assert not effect(keyed).is_last_look
    assert types(keyed.tell(NodeLost("charge"))) == ["StepUnresolved", "TaskCreated"]
    finish(free)
    finish(keyed)


@pytest.mark.contract("ACT-1", "ACT-5")
def test_the_deadline_of_a_step_is_verified_too() -> None:
    run = begun(schedule_to_close_ms=5_000)
    [deadline] = run.inbox.values()
    run.now += 5 * SECOND
    assert types(run.tell(deadline)) == ["StepRetried"]
    assert record(run) == ("timed-out", None, "TimeoutError")
    errored(run, r.not_completed(effect(run).error))
    assert run.types[-1] == "StepFailed"
    finish(run)


@pytest.mark.contract("ACT-1")
def test_the_deadline_of_a_step_that_never_began_fails_it_and_nothing_was_done() -> None:
    run = begun(schedule_to_close_ms=5_000)
    [deadline] = run.inbox.values()
    run.tell(ActivityReturned("charge", 1, 1, is_lacking=True))
    run.now += 5 * SECOND
    assert types(run.tell(deadline)) == ["StepFailed"]
    finish(run)


@pytest.mark.contract("ACT-4")
def test_the_deadline_does_not_take_the_step_from_the_operator() -> None:
    run = unresolved(schedule_to_close_ms=5_000)
    deadline = next(message for message in run.inbox.values() if message.type == "TimerDue")
    run.now += 5 * SECOND
    assert run.tell(deadline) == NOTHING
    assert len(open_tasks(run)) == 1


# --- the operator's three answers


@pytest.mark.contract("ACT-4", "TSK-2")
def test_it_happened_with_this_result() -> None:
    run = unresolved()
    assert types(answer(run, answer="happened", result={"id": 9})) == ["TaskCompleted", "StepCompleted"]
    done = run.events[-1].data
    assert isinstance(done, e.StepCompleted)
    assert done.confirmed_by == "operator"
    assert record(run) == ("completed", {"id": 9}, None)
    assert open_tasks(run) == []
    finish(run)


@pytest.mark.contract("ACT-4")
def test_it_did_not_happen_so_it_is_dispatched_once_without_verification() -> None:
    run = unresolved()
    decision = answer(run, answer="did-not-happen", reason="I looked")
    assert types(decision) == ["TaskCompleted", "StepRetried"]
    assert isinstance(decision, Decision)
    assert decision.dispatch == ("charge",)
    assert not effect(run).must_verify
    assert record(run)[0] == "indeterminate"
    run.tell(NodeLost("charge"))
    assert effect(run).must_verify  # the next one again
    finish(run)


@pytest.mark.contract("ACT-4")
@pytest.mark.parametrize(("on_failure", "pauses"), [("raise", []), ("pause", ["RunPaused"])])
def test_fail_the_step(on_failure: str, pauses: list[str]) -> None:
    run = unresolved(on_failure=on_failure)
    assert types(answer(run, answer="fail", reason="too old")) == ["TaskCompleted", *pauses, "StepFailed"]
    failure = run.events[-1].data
    assert isinstance(failure, e.StepFailed)
    assert failure.error.code == "ReconciliationFailed"
    assert "too old" in failure.error.message
    assert record(run) == ("indeterminate", None, "ReconciliationFailed")
    finish(run)


@pytest.mark.contract("ACT-4", "TSK-1")
def test_only_operators_answer() -> None:
    run = unresolved()
    assert types(answer(run, Actor("bob", ("clerk",)), answer="happened")) == ["TaskRefused"]
    assert step(run).is_unresolved


@pytest.mark.contract("ACT-4", "SIG-13")
def test_retry_step_asks_the_verifier_again() -> None:
    run = unresolved()
    decision = run.control("RETRY_STEP", "charge")
    assert types(decision) == ["SignalAccepted", "StepCancelled", "StepRetried"]
    assert isinstance(decision, Decision)
    assert decision.dispatch == ("charge",)
    assert effect(run).must_verify
    assert open_tasks(run) == []
    errored(run, r.indeterminate("still closed"))
    assert len(open_tasks(run)) == 1
    finish(run)


@pytest.mark.contract("ACT-4", "SIG-13", "ATT-2")
def test_retry_step_of_a_failed_keyed_step_is_verified_and_keeps_its_record() -> None:
    run = begun(on_failure="pause")
    errored(run, FATAL)
    run.now += SECOND
    run.control("RETRY_STEP", "charge")
    assert (step(run).logical_attempt_id, step(run).engine_attempt_id) == (2, 2)
    assert effect(run).must_verify
    assert record(run) == ("indeterminate", None, "Fatal")
    assert run.records["charge"].created_at == run.now - SECOND
    finish(run)


@pytest.mark.contract("ACT-4", "SIG-13")
def test_skipping_the_step_closes_the_task_and_the_task_itself_cannot_be_skipped() -> None:
    run = unresolved()
    [task] = open_tasks(run)
    refused = run.control("SKIP_STEP", task.step_id)
    assert types(refused) == ["SignalRejected"]
    assert types(run.control("SKIP_STEP", "charge")) == ["SignalAccepted", "StepSkipped", "StepCancelled"]
    assert open_tasks(run) == []
    assert record(run)[0] == "indeterminate"
    finish(run)


@pytest.mark.contract("ACT-4", "WF-4")
@pytest.mark.parametrize("end", ["cancel step", "complete", "rotate", "terminate"])
def test_whatever_ends_the_step_closes_the_task(end: str) -> None:
    run = unresolved()
    if end == "cancel step":
        run.ask(commands.CancelStep(step_id="charge"))
    elif end == "complete":
        run.ask(commands.CompleteRun())
    elif end == "rotate":
        run.ask(commands.ContinueAsNew())
    else:
        run.control("EMERGENCY_STOP")
    assert run.state.open_steps == {}
    assert open_tasks(run) == []
    assert record(run)[0] == "indeterminate"
    finish(run)


@pytest.mark.contract("ACT-4")
def test_an_operator_answers_while_the_run_is_paused() -> None:
    run = unresolved()
    run.control("PAUSE")
    assert types(answer(run, answer="happened", result=1)) == ["TaskCompleted", "StepCompleted"]
    finish(run)


# --- cancelling


@pytest.mark.contract("ACT-5", "WF-4")
def test_cancelled_only_if_no_attempt_can_have_begun() -> None:
    begun_one = begun()
    begun_one.ask(commands.CancelStep(step_id="charge"))
    assert record(begun_one)[0] == "indeterminate"
    waits = begun()
    waits.tell(ActivityReturned("charge", 1, 1, is_lacking=True))
    waits.ask(commands.CancelStep(step_id="charge"))
    assert record(waits)[0] == "cancelled"
    backoff = begun()
    errored(backoff, BROKEN)
    backoff.ask(commands.CancelStep(step_id="charge"))
    assert record(backoff)[0] == "indeterminate"


# --- late successes and contradictions


@pytest.mark.contract("ACT-4")
def test_a_late_success_counts_while_no_later_attempt_can_have_begun() -> None:
    run = begun("far", retry={"max_attempts": 3, "initial_ms": 9_000})
    run.tell(outcome(run, error={"code": "TimeoutError", "message": "", "retryable": True}))
    assert types(run.tell(outcome(run, attempt=1, result="ok"))) == ["StepCompleted"]
    assert record(run) == ("completed", "ok", None)


@pytest.mark.contract("ACT-4")
def test_a_late_success_counts_if_the_attempt_after_it_only_verified() -> None:
    run = begun("far")
    run.tell(outcome(run, attempt=2, error={"code": "Indeterminate", "message": "", "category": "indeterminate"}))
    assert step(run).is_unresolved
    assert types(run.tell(outcome(run, attempt=1, result="ok"))) == ["StepCompleted", "StepCancelled"]
    assert open_tasks(run) == []
    finish(run)


def overtaken() -> Driver:
    """Return a run of which the first attempt has succeeded after the second one may have begun."""
    run = begun("far", retry={"max_attempts": 5, "initial_ms": 1, "jitter": 0.0})
    run.tell(outcome(run, error={"code": "TimeoutError", "message": "", "retryable": True}))
    run.now += SECOND
    assert types(run.tell(outcome(run, attempt=1, result="first"))) == ["StepSucceededLate"]
    assert record(run)[0] == "timed-out"
    return run


@pytest.mark.contract("ACT-4")
def test_a_late_success_is_kept_and_the_same_result_completes() -> None:
    run = overtaken()
    assert types(run.tell(outcome(run, attempt=2, result="first"))) == ["StepCompleted"]
    finish(run)


@pytest.mark.contract("ACT-4")
def test_two_different_results_contradict_and_an_operator_sees_both() -> None:
    run = overtaken()
    assert types(run.tell(outcome(run, attempt=2, result="second"))) == ["StepUnresolved", "TaskCreated"]
    [task] = open_tasks(run)
    facts = codec.decode(task.payload, dict[str, Any])
    assert facts["results"] == [{"attempt": 1, "result": "first"}, {"attempt": 2, "result": "second"}]
    assert record(run)[0] == "indeterminate"
    for attempt, result in ((1, "first"), (2, "second")):  # delivered once more
        assert run.tell(outcome(run, attempt=attempt, result=result)) == NOTHING
    finish(run)


@pytest.mark.contract("ACT-4")
def test_a_second_success_after_the_step_was_closed_is_kept_as_a_diagnostic_once() -> None:
    run = begun("far")
    run.tell(outcome(run, attempt=1, result="first"))
    assert run.tell(outcome(run, attempt=2, result="first")) == NOTHING
    assert types(run.tell(outcome(run, attempt=3, result="second"))) == ["StepSucceededLate"]
    assert run.tell(outcome(run, attempt=3, result="second")) == NOTHING
    assert record(run) == ("completed", "first", None)
    finish(run)


@pytest.mark.contract("ACT-4")
def test_a_late_success_beside_an_unresolved_attempt_that_was_called_is_a_comment() -> None:
    run = overtaken()
    run.tell(outcome(run, attempt=2, result="second"))
    assert types(run.tell(outcome(run, attempt=3, result="third")))[0] == "StepSucceededLate"
    assert "TaskCommented" in run.types
    finish(run)


@pytest.mark.contract("ACT-4")
def test_an_outcome_after_the_step_is_unresolved_changes_nothing_and_the_operator_hears_of_it() -> None:
    run = begun("far")
    doubt = {"code": "Indeterminate", "message": "closed", "category": "indeterminate"}
    run.tell(outcome(run, attempt=2, error=doubt))
    assert run.tell(outcome(run, attempt=2, error=doubt)) == NOTHING  # delivered twice
    for late in ({"error": doubt}, {"is_detached": True}):  # the job was acquired once more meanwhile
        assert types(run.tell(outcome(run, attempt=3, **late))) == ["TaskCommented"]
    assert len(open_tasks(run)) == 1
    finish(run)


# --- views


@pytest.mark.contract("PRJ-1")
def test_operators_see_that_a_step_is_unresolved_until_it_is_settled() -> None:
    run = unresolved()
    [seen] = [each for each in project_run(run.run_id, run.events).steps if each.step_id == "charge"]
    assert seen.status == "RUNNING"
    assert seen.error is not None
    assert (seen.error.code, seen.error.message) == ("Unresolved", "the bank is closed")
    answer(run, answer="happened", result=1)
    [seen] = [each for each in project_run(run.run_id, run.events).steps if each.step_id == "charge"]
    assert (seen.status, seen.error) == ("SUCCESS", None)


@pytest.mark.contract("ACT-4")
def test_an_answer_that_cannot_be_read_is_refused() -> None:
    run = unresolved()
    for given in ({"answer": "perhaps"}, {"answer": "fail", "result": 1}, {}):
        refusal = answer(run, **given)
        assert isinstance(refusal, Refusal), given
    assert step(run).is_unresolved


@pytest.mark.contract("ACT-4", "MSG-3")
@pytest.mark.parametrize("attempt", [2, 3], ids=["the same report again", "of a job that was acquired again"])
def test_an_unresolved_step_has_one_question_whatever_else_is_reported(attempt: int) -> None:
    unsure = r.indeterminate("the bank is still closed")
    run = unresolved(queue="payments")
    heard = ["TaskCommented"] if attempt == 3 else []  # the operator is notified of an attempt that was under way
    assert types(run.tell(outcome(run, "charge", attempt, error=unsure))) == heard
    assert types(run.tell(outcome(run, "charge", attempt, error=BROKEN))) == heard
    assert run.tell(NodeLost("charge")) == NOTHING
    run.tell(Errored("charge", 1, attempt, unsure, Retry(), 0.0))
    assert len(open_tasks(run)) == 1
    finish(run)


# --- rotations that carry steps over


@pytest.mark.contract("ACT-4", "WF-4")
@pytest.mark.parametrize("known", ["in doubt", "last look", "late result", "unresolved"])
def test_a_rotation_that_carries_a_keyed_step_over_carries_what_is_known_of_its_effect(known: str) -> None:
    run = unresolved() if known == "unresolved" else begun("far" if known == "late result" else "")
    if known == "late result":
        run.tell(outcome(run, attempt=2, error=BROKEN))
        due_at = step(run).due_at
        assert due_at is not None
        run.now = due_at
        run.tell(outcome(run, attempt=1, result="late"))
        assert effect(run).late is not None
    elif known != "unresolved":
        run.tell(NodeLost("charge"))
    if known == "last look":
        run.tell(outcome(run, attempt=2, error=FATAL))
        assert effect(run).is_last_look
    before, attempt = effect(run), step(run).engine_attempt_id
    run.ask(commands.ContinueAsNew(steps=("charge",)))
    assert run.types[-1] == "ContinuedAsNew"
    assert (effect(run), step(run).engine_attempt_id) == (before, attempt)
    assert [task.name for task in open_tasks(run)] == (["reconcile charge"] if known == "unresolved" else [])
    if known == "unresolved":
        answer(run, answer="happened", result="receipt")
    else:
        result = Raw(b'"late"')
        run.tell(ActivitySucceeded("charge", 1, result, confirmed_by="verifier"))
    assert run.types[-1] in ("StepCompleted", "TaskCompleted")
    assert record(run)[0] == "completed"
    finish(run)
