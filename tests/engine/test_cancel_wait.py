"""`cancel="wait"`: a cancellation does not lose the outcome of what is under way."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import ChildFailed, InvalidInput, RunCancelled
from holdfast.run import RunHandle
from holdfast.testing import explore
from tests.engine.harness import EngineVariant, wait_for_event

pytestmark = pytest.mark.contract("WF-4")


class Town:
    """What is booked, and workflows that book it."""

    def __init__(self) -> None:
        self.booked: set[str] = set()
        self.app = app = hf.App("town")

        @app.activity(cancel="wait")
        async def book(what: str) -> str:
            await asyncio.sleep(1)
            self.booked.add(what)
            return what

        @app.activity
        async def give_back(what: str) -> None:
            self.booked.discard(what)

        @app.workflow
        async def trip() -> str:
            async with hf.Saga() as saga:
                saga.undo(give_back, await book("hotel"))
                async with asyncio.TaskGroup() as both:
                    for what in ("flight", "car"):
                        both.create_task(booked(saga, what))
                await hf.sleep(1)
            return "gone"

        async def booked(saga: hf.Saga, what: str) -> None:
            saga.undo(give_back, await book(what))

        @app.workflow
        async def family() -> str:
            async with hf.Saga() as saga:
                saga.undo(give_back, await trip.options(cancel="wait")())
                await hf.sleep(1)
            return "all gone"

        self.trip, self.family = trip, family


def cancel_at(version: int) -> Any:
    """Return a driver that cancels a run once it has so many events."""

    async def drive(run: RunHandle[Any]) -> None:
        while len(await run.events()) < version:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.05)
        await run.cancel("it rains")

    return drive


@pytest.mark.parametrize("version", range(1, 12))
def test_nothing_stays_booked_wherever_a_run_is_cancelled_and_its_process_crashes(version: int) -> None:
    town = Town()
    found = explore(
        town.app,
        town.trip,
        drive=cancel_at(version),
        before=town.booked.clear,
        check=lambda: sorted(town.booked),
    )
    assert len(found.plays) > 4
    for play in found.plays:
        if play.ending.startswith("result"):  # it had ended before the cancellation
            assert (play.ending, play.checked) == ("result 'gone'", ["car", "flight", "hotel"]), play
        else:
            assert (play.ending, play.checked) == ("RunCancelled: run explore was cancelled: it rains", []), play


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_a_parent_waits_for_what_its_cancelled_child_gives_back(version: int) -> None:
    town = Town()
    found = explore(
        town.app,
        town.family,
        drive=cancel_at(version),
        before=town.booked.clear,
        check=lambda: sorted(town.booked - {"gone"}),
    )
    kept = {"RunCancelled: run explore was cancelled: it rains": [], "result 'all gone'": ["car", "flight", "hotel"]}
    for play in found.plays:
        # A trip that was over is the trip's own: the parent gives back only what the trip has returned.
        is_over = play.ending in kept and play.checked == ["car", "flight", "hotel"]
        assert is_over or play.checked == kept.get(play.ending), play


async def test_a_result_is_returned_and_the_code_is_cancelled_where_it_waits_next(variant: EngineVariant) -> None:
    app = hf.App("shop")
    go, begun = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    @app.activity
    async def slow() -> str:
        begun.set()
        await go.wait()
        return "done"

    @app.workflow
    async def waits() -> None:
        seen.append(await slow.options(cancel="wait", name="the slow one")())
        try:
            await hf.sleep(3_600)
        except asyncio.CancelledError as asked:
            seen.append(f"cancelled: {asked}")
            raise

    async with variant.node(app):
        run = await app.start(waits)
        await begun.wait()
        await run.cancel("no time", wait=True)
        go.set()
        with pytest.raises(RunCancelled, match="was cancelled: no time") as cancelled:
            await run.result()
        assert cancelled.value.details["reason"] == "no time"
        types = [(event.event_type, event.step_id) for event in await run.events()]
    assert seen[-2:] == ["done", "cancelled: no time"]
    assert ("StepCompleted", "the slow one") in types
    assert not [each for each in types if each[0] == "StepCancelled"]


async def test_a_timeout_that_ended_meanwhile_cancels_nothing_later(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.activity
    async def slow() -> str:
        await asyncio.sleep(0.05)
        return "late"

    @app.workflow
    async def waits() -> list[str]:
        found = []
        async with asyncio.timeout(0.01):
            found.append(await slow.options(cancel="wait")())
        try:
            async with asyncio.timeout(0.01):
                found.append(await slow.options(cancel="wait")())
                await hf.sleep(60)
        except TimeoutError:
            found.append("too late")
        return [*found, await slow()]

    async with variant.node(app):
        assert await (await app.start(waits)).result() == ["late", "late", "too late", "late"]


async def test_a_failure_gives_way_to_the_cancellation(variant: EngineVariant) -> None:
    app = hf.App("shop")
    go, begun = asyncio.Event(), asyncio.Event()

    @app.activity(cancel="wait", retry=hf.Retry(max_attempts=1))
    async def fails() -> None:
        begun.set()
        await go.wait()
        raise ValueError("it broke")

    @app.workflow
    async def waits() -> None:
        await fails()

    async with variant.node(app):
        run = await app.start(waits)
        await begun.wait()
        await run.cancel(wait=True)
        go.set()
        with pytest.raises(RunCancelled):
            await run.result()


async def test_a_parent_learns_why_its_child_was_cancelled(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def child() -> None:
        await hf.sleep(3_600)

    @app.workflow
    async def parent() -> str:
        try:
            await child.options(name="the child")()
        except ChildFailed as problem:
            return problem.info.message  # type: ignore[no-any-return]
        return "it was not cancelled"

    async with variant.node(app):
        run = await app.start(parent, run_id="p")
        await wait_for_event(run, "ChildStarted")
        await wait_for_event(app.run("p/the child"), "RunStarted")
        await app.run("p/the child").cancel("out of stock")
        assert await run.result() == "run p/the child was cancelled: out of stock"


@pytest.mark.contract("API-2")
def test_unknown_options_of_calls_are_refused() -> None:
    town = Town()
    for change in ({"cancel": "later"}, {"name": "x#2"}):
        with pytest.raises(InvalidInput):
            town.trip.options(**change)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="unknown option of a child 'retry_all'"):
        town.trip.options(retry_all=True)  # type: ignore[call-arg]


async def test_scopes_stand_in_the_ids_of_steps(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.activity
    async def pack(item: int) -> int:
        return item

    @app.workflow
    async def child() -> None: ...

    @app.workflow
    async def order() -> int:
        async def one(item: int) -> int:
            async with hf.scope(f"item {item}"):
                await hf.sleep(0.01, name="cool down")
                return await pack(item) + await pack(item)

        await child.options(name="first child")()
        total = sum(await asyncio.gather(*(one(item) for item in (17, 18))))
        async with hf.scope("the end"), hf.scope("of it"):
            return total + await pack(0)

    async with variant.node(app):
        run = await app.start(order, run_id="o")
        assert await run.result() == 70
        opened = [
            event.step_id
            for event in await run.events()
            if event.event_type in ("StepStarted", "TimerStarted", "ChildStarted")
        ]
    expected = ["first child", "the end/of it/pack"]
    for item in ("item 17", "item 18"):
        expected += [f"{item}/cool down", f"{item}/pack", f"{item}/pack#2"]
    assert sorted(opened, key=str) == sorted(expected)
