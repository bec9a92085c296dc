"""Calls that are coalesced: in order, never two at a time, and no caller is left without an answer."""

import asyncio
import gc
from contextvars import ContextVar

import pytest

from holdfast.engine.batcher import Batcher

MOST = 3
user: ContextVar[str] = ContextVar("user", default="the maker")


class Scene:
    """A batcher that doubles numbers when it may, and notes the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.users: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.problem: Exception | None = None
        self.batcher: Batcher[int, int] = Batcher(
            self._answer, lambda number: RuntimeError(f"stopped before {number}"), MOST, "double"
        )

    async def _answer(self, numbers: list[int]) -> list[int | Exception]:
        self.batches.append(numbers)
        self.users.append(user.get())
        await self.may_answer.wait()
        if self.problem is not None:
            raise self.problem
        return [ValueError("odd one out") if number < 0 else 2 * number for number in numbers]

    def ask(self, *numbers: int) -> "list[asyncio.Future[int]]":
        """Ask about numbers, all at once."""
        return [self.batcher.ask(number) for number in numbers]

    async def begun(self, *numbers: int) -> "list[asyncio.Future[int]]":
        """Ask about numbers, and return when they are asked, and a batch is under way."""
        self.may_answer.clear()
        tasks = self.ask(*numbers)
        for _ in range(3):
            await asyncio.sleep(0)
        return tasks


async def test_calls_at_the_same_time_share_batches_in_order_and_none_is_too_large() -> None:
    scene = Scene()
    assert await asyncio.gather(*scene.ask(*range(7))) == [0, 2, 4, 6, 8, 10, 12]
    assert scene.batches == [[0, 1, 2], [3, 4, 5], [6]]


async def test_calls_that_come_while_one_is_under_way_share_the_next() -> None:
    scene = Scene()
    tasks = await scene.begun(1)
    tasks += await scene.begun(2)
    tasks += await scene.begun(3)
    assert scene.batches == [[1]]
    scene.may_answer.set()
    assert await asyncio.gather(*tasks) == [2, 4, 6]
    assert scene.batches == [[1], [2, 3]]


async def test_a_call_after_all_are_answered_begins_again() -> None:
    scene = Scene()
    assert await scene.batcher.ask(1) == 2
    assert await scene.batcher.ask(2) == 4
    assert scene.batches == [[1], [2]]


async def test_a_caller_that_is_cancelled_changes_nothing_for_the_others() -> None:
    scene = Scene()
    tasks = await scene.begun(1, 2, 3)
    waiting = await scene.begun(4, 5)
    tasks[1].cancel()
    waiting[0].cancel()
    await asyncio.sleep(0)
    scene.may_answer.set()
    answers = await asyncio.gather(*tasks, *waiting, return_exceptions=True)
    assert [answers[variant] for variant in (0, 2, 4)] == [2, 6, 10]
    assert tasks[1].cancelled()
    assert waiting[0].cancelled()


async def test_an_exception_among_the_answers_is_raised_in_its_caller_alone() -> None:
    scene = Scene()
    answers = await asyncio.gather(*scene.ask(1, -1, 2), return_exceptions=True)
    assert (answers[0], answers[2]) == (2, 4)
    assert isinstance(answers[1], ValueError)


async def test_what_the_call_raises_is_raised_in_every_caller_of_its_batch_and_in_none_after() -> None:
    scene = Scene()
    scene.problem = OSError("down")
    assert await asyncio.gather(*scene.ask(1, 2), return_exceptions=True) == [scene.problem] * 2
    scene.problem = None
    assert await scene.batcher.ask(3) == 6


@pytest.mark.parametrize("waits", [True, False])
async def test_a_stop_raises_in_every_caller_whether_its_batch_has_begun_or_not(waits: bool) -> None:
    scene = Scene()
    tasks = await scene.begun(1, 2, 3, 4)
    async with asyncio.timeout(60):
        if waits:
            await scene.batcher.stop()
        else:
            scene.batcher.close()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(answer) for answer in answers] == [f"stopped before {number}" for number in (1, 2, 3, 4)]
    await scene.batcher.stop()


async def test_a_stop_before_the_first_batch_has_begun_raises_too() -> None:
    scene = Scene()
    task = scene.batcher.ask(1)
    assert scene.batches == []
    async with asyncio.timeout(60):
        await scene.batcher.stop()
        with pytest.raises(RuntimeError, match="stopped before 1"):
            await task
        assert await scene.batcher.ask(2) == 4, "a caller that comes later waits for nothing that was cancelled"


async def test_what_comes_after_the_answers_comes_once_a_batch_and_before_the_next() -> None:
    scene = Scene()
    seen: list[tuple[int, list[bool]]] = []
    tasks: list[asyncio.Future[int]] = []
    scene.batcher = Batcher(
        scene._answer,
        lambda number: RuntimeError(f"stopped before {number}"),
        MOST,
        "double",
        lambda: seen.append((len(scene.batches), [task.done() for task in tasks])),
    )
    tasks += scene.ask(1, 2, 3, 4)
    assert await asyncio.gather(*tasks) == [2, 4, 6, 8]
    assert seen == [(1, [True, True, True, False]), (2, [True] * 4)]


async def test_a_failure_after_the_answers_leaves_no_caller_without_one() -> None:
    scene, problem, failures = Scene(), OSError("after the answers"), []

    def fail() -> None:
        raise problem

    scene.batcher = Batcher(scene._answer, lambda number: RuntimeError("stopped"), MOST, "double", fail)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    tasks = scene.ask(1, 2, 3, 4)
    async with asyncio.timeout(60):
        assert await asyncio.gather(*tasks, return_exceptions=True) == [2, 4, 6, problem]
        scene.batcher = Batcher(scene._answer, lambda number: RuntimeError("stopped"), MOST, "double")
        gc.collect()  # the task that has failed
    assert failures == [problem], "and it is logged"


async def test_batches_run_in_the_context_of_the_maker() -> None:
    scene = Scene()
    user.set("a caller")
    await scene.batcher.ask(1)
    assert scene.users == ["the maker"]
