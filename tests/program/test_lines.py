"""When code and history differ, the line is named in which the differing step was asked for."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import NondeterminismError
from holdfast.program.source import waiting_line
from tests.program.core_run import CoreRun

LINES = Path(__file__).read_text(encoding="utf-8").splitlines()

activities = hf.App("activities")


@activities.activity
async def act(value: Any = None) -> Any:
    return value


@activities.activity
async def other(value: Any = None) -> Any:
    return value


@activities.workflow
async def child() -> None: ...


async def original() -> None:
    await act(1)
    await act(2)
    await hf.wait_signal("go", str)


def problem_of(function: Callable[..., Any], completed: int = 1) -> NondeterminismError:
    """Record a run of the original, and replay it with another function."""
    old, new = hf.App("old"), hf.App("new")
    run = CoreRun(old, old.workflow(name="order")(original)).start()
    for step_id in ("act", "act#2")[:completed]:
        run.complete(step_id, 1)
    new.workflow(name="order")(function)
    with pytest.raises(NondeterminismError) as caught:
        run.replayed(new)
    return caught.value


def line_of(problem: NondeterminismError) -> str:
    """Return the line of this file that a problem names."""
    file, _, line = problem.message.rpartition(" at ")[2].rpartition(":")
    assert file == __file__
    return LINES[int(line) - 1]


async def helper(value: int) -> Any:
    return await other(value)  # HERE: in a helper


async def in_a_helper() -> None:
    await act(1)
    await helper(2)


async def an_activity() -> None:
    await act(1)
    await other(2)  # HERE: an activity


async def with_options() -> None:
    await act(1)
    await other.options(timeout=5)(2)  # HERE: with options


async def a_child() -> None:
    await act(1)
    await child()  # HERE: a child


async def a_sleep() -> None:
    await act(1)
    await hf.sleep(5)  # HERE: a sleep


async def a_signal() -> None:
    await act(1)
    await hf.wait_signal("go", str)  # HERE: a signal


async def an_asyncio_sleep() -> None:
    await act(1)
    await asyncio.sleep(5)  # HERE: asyncio.sleep


async def a_timeout() -> None:
    await act(1)
    async with asyncio.timeout(5):  # HERE: asyncio.timeout
        await act(2)


async def a_timeout_on_a_stack() -> None:
    await act(1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(5))  # HERE: on a stack
        await act(2)


async def a_wait_for() -> None:
    await act(1)
    await asyncio.wait_for(act(2), 5)  # HERE: wait_for


async def a_condition() -> None:
    await act(1)
    await hf.wait_until(lambda: False, timeout=5)  # HERE: wait_until


async def gathered() -> None:
    await act(1)
    await asyncio.gather(
        act(2),
        other(3),  # HERE: gathered
    )


async def gathered_sleep() -> None:
    await act(1)
    await asyncio.gather(
        act(2),
        asyncio.sleep(5),  # HERE: a gathered asyncio.sleep
    )


async def grouped() -> None:
    await act(1)
    async with asyncio.TaskGroup() as group:
        group.create_task(act(2))
        group.create_task(other(3))  # HERE: grouped


async def grouped_function() -> None:
    async def work() -> None:
        await hf.sleep(5)  # HERE: in a function of a group

    await act(1)
    async with asyncio.TaskGroup() as group:
        group.create_task(act(2))
        group.create_task(work())


async def in_a_context() -> None:
    @asynccontextmanager
    async def context() -> AsyncIterator[None]:
        await other(2)  # HERE: in a context manager
        yield

    await act(1)
    async with context():
        pass


async def in_a_generator() -> None:
    async def numbers() -> AsyncIterator[int]:
        await other(2)  # HERE: in a generator
        yield 1

    await act(1)
    async for _ in numbers():
        pass


DIFFERENT = [
    an_activity,
    with_options,
    in_a_helper,
    a_child,
    a_sleep,
    a_signal,
    an_asyncio_sleep,
    a_timeout,
    a_timeout_on_a_stack,
    a_wait_for,
    a_condition,
    gathered,
    gathered_sleep,
    grouped,
    grouped_function,
    in_a_context,
    in_a_generator,
]


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize("function", DIFFERENT, ids=lambda function: function.__name__)
def test_the_line_that_asked_for_the_step_is_named(function: Callable[..., Any]) -> None:
    problem = problem_of(function)
    assert "  # HERE" in line_of(problem), problem
    first, last = function.__code__.co_firstlineno, max(line or 0 for *_, line in function.__code__.co_lines())
    named = int(problem.message.rpartition(":")[2])
    assert first < named <= last or function is in_a_helper or function is grouped_function
    assert problem.message.startswith(f"event {problem.details['run_seq']}: ")
    assert problem.details["expected"] in problem.message
    assert problem.details["found"] in problem.message


@pytest.mark.contract("WF-2")
def test_a_step_that_the_history_lacks_is_named_where_it_was_asked_for() -> None:
    async def more() -> None:
        extra = asyncio.ensure_future(helper(3))
        await asyncio.gather(act(1), asyncio.sleep(0))
        await act(2)
        await extra

    problem = problem_of(more, completed=2)
    assert "in a helper" in line_of(problem)
    source = problem.details.pop("source")
    assert problem.message.endswith(f" at {source}")
    assert problem.details == {
        "run_seq": 4,
        "expected": "no such step before event 4",
        "found": "RunActivity for step 'other' (other)",
    }


@pytest.mark.contract("WF-2")
def test_a_step_that_nobody_asks_for_is_shown_where_the_program_waits() -> None:
    async def waits_elsewhere() -> None:
        async def deeper() -> None:
            await asyncio.Event().wait()  # HERE: where it waits

        await act(1)
        await deeper()

    problem = problem_of(waits_elsewhere)
    assert problem.details["found"] == "nothing"
    assert "where it waits" in line_of(problem)


@pytest.mark.contract("WF-2")
def test_a_patch_is_shown_where_the_program_waits() -> None:
    async def before() -> None:
        hf.patched("new")
        await act(1)

    async def after() -> None:
        await act(1)  # HERE: without the patch

    old, new = hf.App("old"), hf.App("new")
    run = CoreRun(old, old.workflow(name="order")(before)).start()
    new.workflow(name="order")(after)
    with pytest.raises(NondeterminismError, match="MarkerRecorded") as caught:
        run.replayed(new)
    assert "without the patch" in line_of(caught.value)


def test_replaying_leaves_the_interpreter_as_it_was() -> None:
    assert sys.get_coroutine_origin_tracking_depth() == 0
    problem_of(gathered)
    assert sys.get_coroutine_origin_tracking_depth() == 0
    assert waiting_line(None) is None
