"""`hf.map`, `hf.parallel` and `hf.poll`."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import InvalidInput, RunFailed
from holdfast.testing import TestNode
from tests.engine.harness import EngineVariant, wait_for_event

pytestmark = pytest.mark.contract("WF-1")

app = hf.App("fan out")
at_work: set[int] = set()
most_at_work: list[int] = []


@app.activity(retry=hf.Retry(max_attempts=1))
async def double(number: int) -> int:
    """Double a number; one that ends in 3 fails."""
    at_work.add(number)
    most_at_work.append(len(at_work))
    await asyncio.sleep(0.01)
    at_work.discard(number)
    if number % 10 == 3:
        raise ValueError(f"{number} is bad")
    return 2 * number


@app.workflow
async def maps(count: int, bounds: dict[str, int]) -> list[Any]:
    """Double many numbers."""
    try:
        found = await hf.map(double, range(count), **bounds)
    except hf.errors.ActivityFailed as problem:
        return ["raised", problem.info.message]
    except ExceptionGroup as group:
        return ["raised", *(str(each).rpartition(": ")[2] for each in group.exceptions)]
    return [list(found), sorted(found.failures), found.reason]


@pytest.mark.parametrize(
    ("count", "bounds", "expected"),
    [
        (3, {}, [[0, 2, 4], [], "all done"]),
        (0, {}, [[], [], "all done"]),
        (12, {"at_once": 2}, ["raised", "3 is bad"]),
        (5, {"tolerated_failures": 1, "at_once": 2}, [[0, 2, 4, None, 8], [3], "all done"]),
        (15, {"tolerated_failures": 1, "at_once": 1}, ["raised", "3 is bad", "13 is bad"]),
        (9, {"min_successful": 4, "at_once": 1}, [[0, 2, 4, None, 8, *[None] * 4], [3], "enough succeeded"]),
        (4, {"min_successful": 4}, ["raised", "3 is bad"]),
        (9, {"min_successful": 0}, [[None] * 9, [], "enough succeeded"]),
    ],
)
async def test_map_ends_as_its_bounds_say(
    variant: EngineVariant, count: int, bounds: dict[str, int], expected: list[Any]
) -> None:
    most_at_work.clear()
    async with variant.node(app):
        assert await (await app.start(maps, count, bounds)).result() == expected
    assert max(most_at_work, default=0) <= bounds.get("at_once", count)


async def test_what_is_not_needed_any_more_is_cancelled(variant: EngineVariant) -> None:
    other = hf.App("shop")

    @other.activity
    async def answers(number: int) -> int:
        if number != 1:
            await asyncio.sleep(3_600)
        return number

    @other.workflow
    async def first() -> list[Any]:
        found = await hf.map(answers, range(3), min_successful=1)
        both = await hf.parallel(lambda: answers(1), lambda: asyncio.sleep(0, "slept"))
        return [*found, found.reason, *both]

    async with variant.node(other):
        run = await other.start(first)
        assert await run.result() == [None, 1, None, "enough succeeded", 1, "slept"]
        given_up = sorted(event.step_id or "" for event in await run.events() if event.event_type == "StepCancelled")
    assert given_up == ["answers", "answers#3"]


async def test_a_mistake_is_no_tolerated_failure(variant: EngineVariant) -> None:
    other = hf.App("shop")

    async def stumbles(number: int) -> int:
        return [1][number]

    @other.workflow
    async def maps_badly() -> None:
        await hf.map(stumbles, range(3), tolerated_failures=3)

    async with variant.node(other):
        run = await other.start(maps_badly)
        assert "IndexError" in str((await wait_for_event(run, "RunPaused")).data)


async def test_bounds_that_make_no_sense_are_refused() -> None:
    bounds: list[dict[str, Any]] = [{"at_once": 0}, {"min_successful": 4}, {"tolerated_failures": -1}, {"at_once": 1.5}]
    for each in bounds:
        with pytest.raises(InvalidInput):
            await hf.map(asyncio.sleep, [0, 0, 0], **each)
    coroutine: Any = asyncio.sleep(0)
    with pytest.raises(InvalidInput, match="a branch is a function"):
        await hf.parallel(coroutine)
    coroutine.close()


async def test_poll_looks_until_something_is_there() -> None:
    other = hf.App("parcels")
    looks: list[str] = []

    @other.activity
    async def look(parcel: str) -> str:
        looks.append(parcel)
        return "door" if len(looks) >= 5 else ""

    @other.workflow
    async def follow(timeout: float) -> str:
        return await hf.poll(lambda: look("p-1"), every=60, backoff=2, most=240, timeout=timeout)

    async with TestNode(other) as node:
        begun = node.now
        run = await other.start(follow, 3_600)
        assert await run.result() == "door"
        assert (node.now - begun).total_seconds() == pytest.approx(60 + 120 + 240 + 240, abs=1)
        names = [event.step_id for event in await run.events() if event.event_type == "TimerStarted"]
        assert [name for name in names if name and name.startswith("poll")] == ["poll", "poll#2", "poll#3", "poll#4"]
        looks.clear()
        with pytest.raises(RunFailed, match="TimeoutError"):
            await (await other.start(follow, 100)).result()
        assert len(looks) == 2
