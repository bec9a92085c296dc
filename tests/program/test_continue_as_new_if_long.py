"""continue_as_new_if_long: a workflow begins again where it may, once its history is long, and loses nothing by it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.engine.check_histories import check_histories
from holdfast.engine.history import since_rotation
from holdfast.errors import InvalidInput, NondeterminismError, NotDurable
from holdfast.limits import EVENT_BYTES
from tests.program.core_run import CoreRun

Workflow = Callable[..., Any]

NEVER = hf.Limits(rotation_steps=1_000_000, rotation_bytes=1 << 60)
AT_ONCE = hf.Limits(rotation_steps=1)


def made(function: Workflow, limits: hf.Limits) -> tuple[hf.App, Any]:
    app = hf.App("cuts", limits=limits, on_error="fail")
    return app, app.workflow(function)


def staged(function: Workflow, *args: Any, steps: int = 3, **limits: Any) -> CoreRun:
    return CoreRun(*made(function, hf.Limits(rotation_steps=steps, **limits)), *args).start()


def rotations(run: CoreRun) -> int:
    return sum(event.event_type == "ContinuedAsNew" for event in run.events)


activities = hf.App("activities")


@activities.activity
async def act(value: Any = None) -> Any:
    return value


async def loop(number: int) -> None:
    while True:
        await act(number)
        number += 1
        hf.continue_as_new_if_long(number)


@pytest.mark.contract("CAN-1")
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_workflow_begins_again_when_its_steps_have_reached_the_limit(steps: int) -> None:
    run = staged(loop, 0, steps=steps)
    for number in range(3 * steps):
        assert rotations(run) == number // steps
        run.complete(run.open[0], None)
        assert run.replayed().open == run.open
    assert rotations(run) == 3
    [*_, rotated] = [event.data for event in run.events if isinstance(event.data, e.ContinuedAsNew)]
    assert bytes(rotated.input) == b'{"number":%d}' % (3 * steps)
    assert check_histories(run.app.registry, [run.events]) == []
    assert len(since_rotation(run.events)) == 2


@pytest.mark.contract("CAN-1")
def test_the_limits_are_those_of_the_contract() -> None:
    assert (hf.Limits().rotation_steps, hf.Limits().rotation_bytes) == (50, 1_048_576)
    run = CoreRun(*made(loop, hf.Limits()), 0).start()
    for _ in range(49):
        run.complete(run.open[0])
    assert rotations(run) == 0
    run.complete(run.open[0])
    assert rotations(run) == 1


LARGE = "x" * 5_000


async def takes_much() -> None:
    while True:
        await act(LARGE)
        hf.continue_as_new_if_long()


async def gets_much() -> None:
    while True:
        await act()
        hf.continue_as_new_if_long()


async def fails_much() -> None:
    while True:
        try:
            await act()
        except Exception:
            hf.continue_as_new_if_long()


async def hears_much() -> None:
    while True:
        await hf.wait_signal("go", str)
        hf.continue_as_new_if_long()


async def answers_much() -> None:
    hf.on_update("echo", lambda text: text)
    while True:
        await hf.wait_signal("go", str)
        hf.continue_as_new_if_long()


def fail(run: CoreRun) -> None:
    run.fail(run.open[0], e.ErrorInfo("Broken", "", traceback=LARGE[:2_500], cause=e.ErrorInfo("", LARGE[:2_500])))


def update(run: CoreRun) -> None:
    run.update(f"u-{run.state.version}", "echo", text=LARGE[:2_500])
    run.send("go", "")


@pytest.mark.contract("CAN-1")
@pytest.mark.parametrize(
    ("function", "happen"),
    [
        (takes_much, lambda run: run.complete(run.open[0])),
        (gets_much, lambda run: run.complete(run.open[0], LARGE)),
        (fails_much, fail),
        (hears_much, lambda run: run.send("go", LARGE)),
        (answers_much, update),
    ],
)
def test_a_workflow_begins_again_when_its_history_is_large(
    function: Workflow, happen: Callable[[CoreRun], None]
) -> None:
    run = staged(function, steps=1_000, rotation_bytes=3 * 5_000)
    for number in (0, 0, 1, 1, 1, 2):
        happen(run)
        assert rotations(run) == number, [event.event_type for event in run.events]


@pytest.mark.contract("CAN-1")
def test_many_small_events_are_a_large_history_too() -> None:
    run = staged(loop, 0, steps=1_000, rotation_bytes=20 * EVENT_BYTES)
    for _ in range(9):
        run.complete(run.open[0])
    assert rotations(run) == 0
    run.complete(run.open[0])
    assert rotations(run) == 1


@pytest.mark.contract("CAN-1", "API-2")
@pytest.mark.parametrize("wrong", [("text",), (), (1, 2), (object(),)])
def test_arguments_that_do_not_fit_show_at_the_first_call(wrong: tuple[Any, ...]) -> None:
    async def careless(number: int) -> None:
        hf.continue_as_new_if_long(*wrong)

    assert staged(careless, 0).error.code == "InvalidInput"


def test_it_belongs_into_a_workflow() -> None:
    with pytest.raises(NotDurable, match="continue_as_new_if_long"):
        hf.continue_as_new_if_long()


def test_the_former_name_works_and_warns() -> None:
    async def former(number: int) -> None:
        await act(number)
        hf.cut(number + 1)
        await act("second")

    run = staged(former, 0, steps=1)
    with pytest.warns(DeprecationWarning, match="continue_as_new_if_long"):
        run.complete(run.open[0], None)
    assert rotations(run) == 1


# --- nothing is lost


async def with_a_gathered_step() -> None:
    await act("first")
    other = asyncio.ensure_future(act("held"))
    await asyncio.sleep(0)
    hf.continue_as_new_if_long()
    await other
    hf.continue_as_new_if_long()


async def with_a_timeout() -> None:
    async with asyncio.timeout(60):
        await act("first")
        hf.continue_as_new_if_long()
        await act("held")
    hf.continue_as_new_if_long()


async def with_a_saga() -> None:
    async with hf.Saga() as saga:
        await act("first")
        saga.undo(act, "undo")
        hf.continue_as_new_if_long()
        await act("held")
    hf.continue_as_new_if_long()


async def with_a_task_that_has_not_begun() -> None:
    await act("first")
    other = asyncio.ensure_future(act("held"))
    hf.continue_as_new_if_long()
    await other
    hf.continue_as_new_if_long()


async def with_a_task_that_waits_for_another() -> None:
    event = asyncio.Event()

    async def wait() -> None:
        await event.wait()

    waiting = asyncio.ensure_future(wait())
    await act("first")
    hf.continue_as_new_if_long()
    await act("held")
    event.set()
    await waiting
    hf.continue_as_new_if_long()


async def in_a_task_whose_end_nobody_may_see() -> None:
    async def work() -> None:
        await act("first")
        hf.continue_as_new_if_long()
        await act("held")

    await asyncio.ensure_future(work())
    hf.continue_as_new_if_long()


@pytest.mark.contract("CAN-1", "INV")
@pytest.mark.parametrize(
    "function",
    [
        with_a_gathered_step,
        with_a_timeout,
        with_a_saga,
        with_a_task_that_has_not_begun,
        with_a_task_that_waits_for_another,
        in_a_task_whose_end_nobody_may_see,
    ],
)
def test_a_history_does_not_rotate_while_something_would_be_lost(function: Workflow) -> None:
    run = staged(function, steps=1)
    run.complete("act", None)
    assert rotations(run) == 0
    assert "act#2" in run.replayed().open
    run.complete("act#2", None)
    assert rotations(run) == 1
    assert run.replayed().open == run.open
    assert "1/act" in run.open


@pytest.mark.contract("CAN-1", "WF-6")
def test_it_waits_for_an_update_that_is_being_answered() -> None:
    async def serve(answered: int) -> None:
        async def add() -> int:
            nonlocal answered
            await act("update")
            answered += 1
            return answered

        hf.on_update("add", add)
        while True:
            await hf.wait_signal("go", str)
            hf.continue_as_new_if_long(answered)

    run = staged(serve, 0, steps=1)
    run.update("u-1", "add")
    run.send("go", "")
    assert rotations(run) == 0
    run.complete("act", None)
    run.send("go", "")
    assert rotations(run) == 1
    run.update("u-2", "add")
    run.complete("1/act", None)
    answers = [bytes(event.data.result) for event in run.events if isinstance(event.data, e.UpdateCompleted)]
    assert answers == [b"1", b"2"]


@pytest.mark.contract("CAN-1", "SIG-3")
def test_signals_that_nobody_took_are_there_after_a_rotation() -> None:
    async def collect(seen: list[int]) -> list[int]:
        while len(seen) < 10:
            seen.append(await hf.wait_signal("go", int))
            hf.continue_as_new_if_long(seen)
        return seen

    run = staged(collect, [], steps=2)
    run.control("PAUSE")
    for number in range(10):
        run.send("go", number)
    run.control("RESUME")
    assert run.result == list(range(10))
    assert rotations(run) == 5


@pytest.mark.contract("CAN-1", "WF-4")
def test_a_cancellation_that_a_rotation_did_not_heed_ends_the_next_stretch() -> None:
    async def stubborn(number: int) -> None:
        try:
            await hf.sleep(10)
        except asyncio.CancelledError:
            await act(number)
            hf.continue_as_new_if_long(number + 1)
            raise

    run = staged(stubborn, 0, steps=2)
    run.control("CANCEL")
    run.complete("act", None)
    assert rotations(run) == 1
    assert run.replayed().open == ["1/act"]
    again = run.replayed(made(stubborn, NEVER)[0])
    again.complete("1/act", None)
    assert again.events[-1].event_type == "RunCancelled"


@pytest.mark.contract("CAN-1", "WF-7")
def test_what_ended_during_a_pause_holds_a_rotation_back() -> None:
    async def both() -> list[Any]:
        first, second = asyncio.ensure_future(act("a")), asyncio.ensure_future(act("b"))
        results = [await first]
        hf.continue_as_new_if_long()
        return [*results, await second]

    run = staged(both, steps=1)
    run.control("PAUSE")
    run.complete("act", "a")
    run.complete("act#2", "b")
    run.control("RESUME")
    assert run.result == ["a", "b"]
    assert run.replayed().state == run.state


# --- where a call may be, and what its rotation may pass through


@pytest.mark.contract("CAN-1", "WF-4")
def test_a_call_in_a_task_group_or_in_a_function_is_a_rotation() -> None:
    async def deeper(number: int) -> None:
        hf.continue_as_new_if_long(number)

    async def rounds(number: int) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(act("a"))
            await act("b")
            await asyncio.sleep(1)
            await deeper(number + 1)

    run = staged(rounds, 0, steps=3)
    for prefix in ("", "1/", "2/"):
        run.complete(f"{prefix}act", None)
        run.complete(f"{prefix}act#2", None)
        run.fire(f"{prefix}timer")
        again = run.replayed()
        assert again.open == run.open
        again.close()
    assert rotations(run) == 3
    run.close()


async def tidies_up(number: int) -> int:
    if number:
        return number
    try:
        await act("first")
        hf.continue_as_new_if_long(number + 1)
        await act("not cut")
    finally:
        await act("tidy")
    return number


@pytest.mark.contract("CAN-1", "WF-2")
@pytest.mark.parametrize("limits", [NEVER, AT_ONCE])
def test_a_rotation_that_tidies_up_first_is_remembered_whatever_the_limits_are_by_then(limits: hf.Limits) -> None:
    run = staged(tidies_up, 0, steps=1)
    run.complete("act", None)
    assert run.open == ["act#2"]
    assert rotations(run) == 0
    again = run.replayed(made(tidies_up, limits)[0])
    again.complete("act#2", None)
    assert again.result == 1
    assert check_histories(again.app.registry, [again.events]) == []


@pytest.mark.contract("CAN-1", "WF-2")
@pytest.mark.parametrize(
    ("first", "then"), [(NEVER, AT_ONCE), (AT_ONCE, NEVER), (hf.Limits(rotation_steps=2), AT_ONCE)]
)
def test_other_limits_never_make_a_history_diverge(first: hf.Limits, then: hf.Limits) -> None:
    run = CoreRun(*made(loop, first), 0).start()
    others = [made(loop, then)[0], run.app]
    for number in range(7):
        run.complete(run.open[0], None)
        assert check_histories(others[0].registry, [run.events]) == []
        run = run.replayed(others[number % 2])
    assert [bytes(event.data.input) for event in run.events if isinstance(event.data, e.StepStarted)] == [
        b'{"value":%d}' % number for number in range(8)
    ]


@pytest.mark.contract("WF-2")
def test_code_without_the_call_that_rotated_diverges() -> None:
    async def changed(number: int) -> None:
        await act("first")
        await act("tidy")

    run = staged(tidies_up, 0, steps=1)
    run.complete("act", None)
    app = hf.App("cuts")
    app.workflow(name="tidies_up")(changed)
    with pytest.raises(NondeterminismError, match=r"MarkerRecorded of step 'cut:1' \(cut\)"):
        run.replayed(app)


# --- counting


async def busy() -> None:
    gone = asyncio.ensure_future(act("given up at once"))
    await asyncio.sleep(0)
    gone.cancel()
    try:
        async with asyncio.timeout(5):
            await asyncio.gather(act(1), act(2))
    except TimeoutError:
        pass
    await hf.sleep(1)
    await hf.wait_signal("go", str)


@pytest.mark.contract("CAN-1")
@pytest.mark.parametrize("is_in_time", [True, False])
def test_what_is_counted_are_the_steps_of_the_history(is_in_time: bool) -> None:
    run = staged(busy, steps=1_000)

    def check() -> None:
        assert run.program._steps == run.state.steps_since_rotation
        assert run.replayed().program._steps == run.program._steps
        assert run.replayed().program._bytes == run.program._bytes

    check()
    if is_in_time:
        for step_id in [step_id for step_id in run.open if step_id.startswith("act")]:
            run.complete(step_id, "result")
            check()
    else:
        run.fire("timer")
        check()
    run.update("u-1", "unknown")
    check()
    run.fire("sleep")
    check()
    assert run.program._steps == 6
    run.send("go", "now")


def test_limits_are_at_least_one() -> None:
    with pytest.raises(InvalidInput, match="rotation_steps"):
        hf.Limits(rotation_steps=0)
