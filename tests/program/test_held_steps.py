"""Steps whose failure pauses their run: tried again, skipped, or raised after all; and every history replays."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.core.events import ErrorInfo
from holdfast.core.keys import inbox_uuid
from holdfast.core.messages import ActivityErrored, ActivitySucceeded, Control, ControlName
from holdfast.core.state import PAUSED, RUNNING
from holdfast.core.timing import NO_RETRY
from holdfast.errors import ActivityFailed
from tests.program.core_run import BROKEN, CoreRun, start_core_run

app = hf.App("held")


@app.activity(on_failure="pause")
async def charge(number: int) -> int:
    return number


@app.activity
async def ship() -> str:
    return "shipped"


def command(run: CoreRun, name: ControlName, step_id: str | None = None, result: Any = None, **more: Any) -> None:
    """Send an operator's command to a step."""
    run._sent += 1
    id_ = inbox_uuid(run.state.run_id, run._sent)
    given = codec.encode(result)
    run.handle(Control(id=id_, name=name, signal_id=id_, actor="ann", step_id=step_id, result=given, **more))


def fail(run: CoreRun, step_id: str, error: ErrorInfo = BROKEN) -> None:
    """Let the present attempt of a step fail for good."""
    step = run.state.open_steps[step_id]
    run.handle(ActivityErrored(step_id, step.logical_attempt_id, step.engine_attempt_id, error, NO_RETRY))


def succeed(run: CoreRun, step_id: str, value: Any) -> None:
    """Let the present attempt of a step succeed."""
    step = run.state.open_steps[step_id]
    run.handle(ActivitySucceeded(step_id, step.logical_attempt_id, codec.encode(value)))


async def pay() -> list[Any]:
    return [await charge(1), await ship()]


async def pay_carefully() -> str:
    try:
        return f"paid {await charge(1)}"
    except ActivityFailed as problem:
        return f"not paid: {problem.info.code}"


@pytest.mark.contract("ATT-2", "SIG-13", "WF-2")
def test_a_step_that_is_tried_again_gives_its_result_to_the_same_await_after_more_than_nine_failures() -> None:
    run = start_core_run(pay)
    for attempt in range(1, 13):
        fail(run, "charge")
        assert (run.state.status, run.open) == (PAUSED, [])
        run = run.replayed()
        command(run, "RETRY_STEP", "charge")
        assert (run.state.status, run.open) == (RUNNING, ["charge"])
        run = run.replayed()
        assert run.state.open_steps["charge"].logical_attempt_id == attempt + 1
    succeed(run, "charge", 7)
    assert run.replayed().open == run.open == ["ship"]
    run.complete("ship", "shipped")
    assert run.result == [7, "shipped"]
    assert run.replayed().state == run.state


@pytest.mark.contract("SIG-13", "WF-2")
@pytest.mark.parametrize("given", [None, 5])
def test_a_failed_step_that_is_skipped_gives_none_or_what_the_operator_gave(given: int | None) -> None:
    run = start_core_run(pay)
    fail(run, "charge")
    command(run, "SKIP_STEP", "charge", given)
    assert run.replayed().open == run.open == ["ship"]
    run.complete("ship", "shipped")
    assert run.result == [given, "shipped"]
    assert run.replayed().state == run.state


@pytest.mark.contract("SIG-13", "WF-2")
def test_a_run_that_is_resumed_raises_the_error_after_all() -> None:
    run = start_core_run(pay_carefully)
    fail(run, "charge")
    run = run.replayed()
    command(run, "RESUME", raise_failure=True)
    assert run.result == "not paid: Broken"
    assert run.replayed().state == run.state


@pytest.mark.contract("SIG-13", "WF-2", "WF-4")
def test_a_run_that_is_cancelled_instead_cleans_up() -> None:
    async def careful() -> None:
        try:
            await charge(1)
        finally:
            await ship()

    run = start_core_run(careful)
    fail(run, "charge")
    command(run, "CANCEL")
    assert run.replayed().open == run.open == ["ship"]


@pytest.mark.contract("ATT-2", "WF-2")
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_two_failed_steps_each_is_settled_by_itself(order: str) -> None:
    async def both() -> list[int]:
        return list(await asyncio.gather(charge(1), charge(2)))

    run = start_core_run(both)
    fail(run, "charge")
    fail(run, "charge#2")
    steps = {"a": "charge", "b": "charge#2"}
    for place, letter in enumerate(order):
        assert run.state.status is PAUSED
        command(run, "RETRY_STEP", steps[letter])
        if place == 0:
            succeed(run, steps[letter], 10)
        run = run.replayed()
    assert run.state.status is RUNNING
    succeed(run, steps[order[1]], 20)
    assert sorted(run.result) == [10, 20]
    assert run.replayed().state == run.state


@pytest.mark.contract("ATT-2", "WF-2")
def test_a_step_that_is_tried_again_may_be_given_up_by_what_else_ended_meanwhile() -> None:
    async def hurried() -> str:
        try:
            async with asyncio.timeout(10):
                return f"paid {await charge(1)}"
        except TimeoutError:
            return f"too late, {await ship()}"

    run = start_core_run(hurried)
    fail(run, "charge")
    run.fire("timer")
    command(run, "RETRY_STEP", "charge")
    assert [event.event_type for event in run.events[-3:]] == ["RunResumed", "StepCancelled", "StepStarted"]
    assert run.replayed().open == run.open == ["ship"]


@pytest.mark.contract("SIG-13", "WF-2")
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_timer_that_is_skipped_has_fired(is_plain: bool) -> None:
    async def sleepy() -> str:
        await (asyncio.sleep(10) if is_plain else hf.sleep(10))
        return "awake"

    run = start_core_run(sleepy)
    command(run, "SKIP_STEP", run.open[0])
    assert run.result == "awake"
    assert run.replayed().state == run.state


@pytest.mark.contract("CAN-1", "ATT-2")
def test_a_run_rotates_after_a_step_was_tried_again() -> None:
    async def rounds(number: int) -> int:
        paid = await charge(number)
        if number < 2:
            hf.continue_as_new(number + 1)
        return paid

    run = start_core_run(rounds, 1)
    fail(run, "charge")
    command(run, "RETRY_STEP", "charge")
    succeed(run, "charge", 1)
    assert (run.open, run.state.failed_steps) == (["1/charge"], {})
    fail(run, "1/charge")
    run = run.replayed()
    command(run, "RETRY_STEP", "1/charge")
    succeed(run, "1/charge", 2)
    assert run.result == 2


def test_an_activity_either_raises_or_pauses() -> None:
    with pytest.raises(hf.errors.InvalidInput, match="on_failure is one of raise, pause"):
        charge.options(on_failure="explode")
