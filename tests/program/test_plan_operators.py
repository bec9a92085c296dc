"""Operators on plans: failed steps are retried or skipped after the plan has gone on, and approvals are given."""

from typing import Any

import pytest
from msgspec import Raw

from holdfast.core import events as e
from holdfast.limits import Limits
from tests.program.core_run import SECOND
from tests.program.plan_run import PlanRun, plan_of

pytestmark = pytest.mark.contract("SIG-13", "ATT-2")

FAILS: dict[str, Any] = {"id": "a", "activity": "x", "on_failure": "continue"}
AGAIN = e.ErrorInfo("Broken", "it broke", retryable=True)
BESIDE: dict[str, Any] = {"id": "beside", "activity": "x"}


def after(id: str, *others: str, **fields: Any) -> dict[str, Any]:
    return {"id": id, "activity": "x", "depends_on": list(others), **fields}


def verdict(run: PlanRun) -> e.SignalAccepted | e.SignalRejected:
    """Return the last decision about a command."""
    decisions = [event.data for event in run.events if isinstance(event.data, e.SignalAccepted | e.SignalRejected)]
    return decisions[-1]


def same_again(run: PlanRun) -> None:
    """Check that a replay of the history, whole and since the last rotation, goes on as the run does."""
    for part in (True, False):
        again = run.again(part)
        assert again.open == run.open


@pytest.mark.parametrize("paused", [False, True])
def test_what_was_skipped_because_of_a_step_is_reconsidered_when_it_is_retried(paused: bool) -> None:
    body = plan_of(
        FAILS,
        BESIDE,
        {"id": "early", "activity": "x"},
        after("b", "a", input={"v": "${steps.a.output}", "e": "${steps.early.output}"}),
        after("c", "b"),
        after("d", "beside"),
        output={"b": "${steps.b.output}", "c": "${steps.c.output}", "d": "${steps.d.output}"},
    )
    run = PlanRun(body)
    run.complete("early", 7)
    run.fail("a")
    assert set(run.markers()) == {"b:skipped", "c:skipped"}
    same_again(run)
    if paused:
        run.ask("PAUSE")
    run.ask("RETRY_STEP", "a")
    assert run.attempt_of("a") == 2
    if paused:
        assert run.open == ["beside", "a"]
        run.complete("beside", 0)
        run.ask("RESUME")
    else:
        run.complete("beside", 0)
    assert run.open == ["a", "d"], "the run goes on beside it, and does not end before it"
    same_again(run)
    run.complete("d", 4)
    assert run.open == ["a"]
    run.complete("a", 1)
    assert run.input_of("b") == {"v": 1, "e": 7}
    run.complete("b", 2)
    run.complete("c", 3)
    assert run.result == {"b": 2, "c": 3, "d": 4}
    same_again(run)


def test_a_step_that_fails_again_skips_them_again_and_can_be_retried_past_nine() -> None:
    run = PlanRun(plan_of(FAILS, after("b", "a"), BESIDE))
    run.fail("a")
    for attempt in range(2, 13):
        run.ask("RETRY_STEP", "a")
        assert (run.open, run.attempt_of("a")) == (["beside", "a"], attempt)
        run.fail("a")
        same_again(run)
    keys = [event.idempotency_key for event in run.events]
    assert len(set(keys)) == len(keys)
    assert len([marker for marker in run.markers() if marker.startswith("b:skipped")]) == 12
    run.complete("beside", 1)
    assert run.result == {"b": None, "beside": 1}


def test_a_failed_step_that_is_skipped_is_given_and_what_was_skipped_goes_on() -> None:
    run = PlanRun(plan_of(FAILS, BESIDE, after("b", "a", input={"v": "${steps.a.output}"})))
    run.fail("a")
    run.ask("SKIP_STEP", "a", result=Raw(b"5"))
    assert run.open == ["beside", "b"]
    assert run.input_of("b") == {"v": 5}
    same_again(run)
    run.complete("b", 6)
    run.complete("beside", 1)
    assert run.result == {"b": 6, "beside": 1}


def test_only_what_no_other_failure_blocks_goes_on() -> None:
    other = {**FAILS, "id": "o"}
    run = PlanRun(plan_of(FAILS, other, BESIDE, after("b", "a", "o"), after("c", "o"), after("d", "a")))
    run.fail("a")
    run.fail("o")
    run.ask("RETRY_STEP", "a")
    run.complete("a", 1)
    assert run.open == ["beside", "d"], "b and c need the other step"
    run.ask("RETRY_STEP", "o")
    run.complete("o", 1)
    assert run.open == ["beside", "d", "b", "c"]
    same_again(run)


@pytest.mark.contract("CAN-1")
def test_a_failed_step_is_carried_over_rotations_and_can_still_be_retried() -> None:
    chain = [after(f"s{n}", f"s{n - 1}") if n else {"id": "s0", "activity": "x"} for n in range(30)]
    run = PlanRun(plan_of(FAILS, after("b", "a"), *chain), limits=Limits(rotation_steps=5))
    run.fail("a")
    for number in range(20):
        run.complete(f"s{number}", 1)
    assert run.rotations > 2
    assert list(run.state.failed_steps) == ["a"]
    same_again(run)
    run.ask("RETRY_STEP", "a")
    step = run.state.open_steps["a"]
    assert (step.logical_attempt_id, step.engine_attempt_id) == (2, 2)
    for number in range(20, 29):
        run.complete(f"s{number}", 1)
    same_again(run)
    run.complete("a", 1)
    run.complete("b", 2)
    run.complete("s29", 3)
    assert run.result == {"b": 2, "s29": 3}


def test_an_operator_does_not_wait_for_the_policy_of_the_plan() -> None:
    retry = {"max_attempts": 3, "initial_ms": 60_000, "jitter": 0}
    run = PlanRun(plan_of({"id": "a", "activity": "x", "on_failure": "continue"}, BESIDE, retry=retry))
    run.fail("a", AGAIN)
    assert run.open == ["beside", "a:retry2"]
    run.ask("RETRY_STEP", "a")
    assert (run.open, run.attempt_of("a")) == (["beside", "a"], 2)
    same_again(run)
    run.fail("a", AGAIN)
    run.now += 200 * SECOND
    run.fire("a:retry3")
    assert run.attempt_of("a") == 3
    same_again(run)
    run.fail("a", AGAIN)
    assert run.open == ["beside"]
    run.ask("RETRY_STEP", "a")
    assert run.attempt_of("a") == 4
    same_again(run)


@pytest.mark.parametrize("command", ["RETRY_STEP", "SKIP_STEP"])
def test_a_failure_is_settled_only_where_the_plan_can_take_it_back(command: str) -> None:
    undo = {"compensate": {"activity": "y"}}
    body = plan_of(
        {"id": "first", "activity": "x", **undo},
        FAILS,
        {"id": "many", "activity": "x", "for_each": [1, 2], "on_failure": "continue"},
        {"id": "last", "activity": "x", "on_failure": "compensate"},
    )
    run = PlanRun(body)
    run.complete("first", 1)
    run.fail("a")
    run.fail("many[0]")
    for step_id in ("many[0]", "first", "nowhere"):
        run.ask(command, step_id)
        assert isinstance(verdict(run), e.SignalRejected), step_id
    run.fail("last")
    assert run.open == ["first:compensate"]
    run.ask(command, "a")
    refused = verdict(run)
    assert isinstance(refused, e.SignalRejected)
    assert "undone" in refused.reason or command == "SKIP_STEP"
    same_again(run)
    run.complete("first:compensate")
    assert run.status == "FAILED"


# --- approvals


def test_a_step_is_approved_by_a_command() -> None:
    run = PlanRun(plan_of({"id": "a", "activity": "x", "requires_approval": True}, BESIDE))
    assert run.open == ["a:approval", "beside"]
    run.ask("APPROVE", "beside")
    assert isinstance(verdict(run), e.SignalRejected)
    run.ask("APPROVE")
    assert isinstance(verdict(run), e.SignalRejected), "the run itself awaits none"
    run.ask("APPROVE", "a")
    assert isinstance(verdict(run), e.SignalAccepted)
    assert run.open == ["beside", "a"]
    [answered] = [event.data for event in run.events if isinstance(event.data, e.TaskCompleted)]
    assert answered.actor == "ann"
    run.ask("APPROVE", "a")
    assert isinstance(verdict(run), e.SignalRejected), "it was approved before"
    same_again(run)


def test_a_run_of_a_plan_is_approved_by_a_command() -> None:
    run = PlanRun(plan_of(BESIDE, requires_approval=True))
    run.ask("APPROVE")
    assert run.open == ["beside"]
    same_again(run)


def test_an_approval_that_is_for_others_is_given_by_its_task() -> None:
    run = PlanRun(plan_of({"id": "a", "activity": "x", "requires_approval": {"roles": ["boss"]}}))
    run.ask("APPROVE", "a")
    refused = verdict(run)
    assert isinstance(refused, e.SignalRejected)
    assert "task" in refused.reason
    run.answer("a:approval", {"approved": True})
    assert run.open == ["a"]


@pytest.mark.parametrize("command", ["RETRY_STEP", "SKIP_STEP"])
def test_what_a_failed_step_refers_to_is_kept_for_it_and_for_others(command: str) -> None:
    body = plan_of(
        {"id": "early", "activity": "x"},
        {
            **FAILS,
            "input": {"v": "${steps.early.output}"},
            "compensate": {"activity": "undo", "input": {"v": "${steps.early.output}"}},
        },
        after("b", "a", input={"v": "${steps.early.output}"}),
        BESIDE,
    )
    run = PlanRun(body)
    run.complete("early", 7)
    run.fail("a")
    run.ask(command, "a")
    if command == "RETRY_STEP":
        run.fail("a")
        run.ask(command, "a")
        run.complete("a", 1)
    same_again(run)
    run.ask("CANCEL")
    inputs = {each.step_id: bytes(each.data.input) for each in run.events if isinstance(each.data, e.StepStarted)}
    assert inputs["b"] == b'{"v":7}'
    assert inputs.get("a:compensate") == (b'{"v":7}' if command == "RETRY_STEP" else None)


@pytest.mark.contract("CAN-1", "WF-5", "EVT-4")
@pytest.mark.parametrize("command", ["RETRY_STEP", "SKIP_STEP"])
@pytest.mark.parametrize("rotation_steps", [1, 50])
def test_what_a_failure_has_begun_is_not_begun_again_when_the_failure_is_settled(
    command: str, rotation_steps: int
) -> None:
    handler = after("handler", "a", when="${steps.a.status == 'FAILED'}")
    other = after("other", "a", when="${steps.a.status == 'SUCCESS'}")
    run = PlanRun(plan_of(FAILS, BESIDE, handler, other), limits=Limits(rotation_steps=rotation_steps))
    run.fail("a")
    run.complete("handler")
    run.ask(command, "a")
    if command == "RETRY_STEP":
        run.complete("a")
    assert run.open == ["beside"]
    assert bool(run.rotations) == (rotation_steps == 1)
    same_again(run)
    run.complete("beside")
    assert run.status == "COMPLETED"
    keys = [event.idempotency_key for event in run.events]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("is_skipped", [False, True])
@pytest.mark.parametrize("command", ["RETRY_STEP", "SKIP_STEP"])
def test_a_step_that_is_settled_in_a_pause_is_not_begun_by_the_policy_of_the_plan(
    command: str, is_skipped: bool
) -> None:
    run = PlanRun(plan_of(FAILS, BESIDE, retry={"max_attempts": 3}))
    run.fail("a", AGAIN)
    run.ask("PAUSE")
    if is_skipped:
        run.ask("SKIP_STEP", "a:retry2")
    else:
        run.fire("a:retry2")
    run.ask(command, "a")
    run.ask("RESUME")
    same_again(run)
    assert run.open == (["beside", "a"] if command == "RETRY_STEP" else ["beside"])
    if command == "RETRY_STEP":
        run.complete("a")
    run.complete("beside")
    assert run.status == "COMPLETED"
    begun = [
        each.logical_attempt_id for each in run.events if isinstance(each.data, e.StepStarted) and each.step_id == "a"
    ]
    assert begun == ([1, 2] if command == "RETRY_STEP" else [1])


@pytest.mark.contract("WF-2")
def test_a_step_that_is_begun_anew_and_given_up_in_one_turn_is_replayed() -> None:
    run = PlanRun(plan_of(FAILS, BESIDE, retry={"max_attempts": 3}))
    run.fail("a", AGAIN)
    run.ask("PAUSE")
    run.fire("a:retry2")
    run.ask("CANCEL")
    assert [type(event.data) for event in run.events if event.step_id == "a"][-2:] == [e.StepStarted, e.StepCancelled]
    run.again(since_rotation=False)


@pytest.mark.contract("WF-4")
@pytest.mark.parametrize("for_each", [None, [1, 2]])
def test_what_has_ended_in_a_pause_after_a_failure_is_undone(for_each: Any) -> None:
    undo = {"activity": "undo", "input": {"v": "${output}"}}
    fails = {"id": "a", "activity": "x", "on_failure": "compensate", "compensate": undo, "for_each": for_each}
    run = PlanRun(plan_of(fails, {**BESIDE, "compensate": undo}))
    run.ask("PAUSE")
    run.fail("a[0]" if for_each else "a")
    run.complete("beside", 7)
    if for_each:
        run.complete("a[1]", 8)
    run.ask("RESUME")
    same_again(run)
    undone = []
    while run.open:
        [step_id] = run.open
        undone.append((step_id, run.input_of(step_id)["v"]))
        run.complete(step_id)
    assert sorted(undone) == ([("a[1]:compensate", 8)] if for_each else []) + [("beside:compensate", 7)]
    assert run.status == "FAILED"
