"""Tests of the tools that users test with: virtual time, fakes, and what is said when a run waits for the test."""

import asyncio
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast as hf
from holdfast.errors import InvalidInput, RunFailed
from holdfast.store.port import RunQuery
from holdfast.testing import NothingDue, TestNode, explore

DAY = timedelta(days=1)


class Shop:
    """An app with an order that waits, charges, sleeps and ships."""

    def __init__(self) -> None:
        app = self.app = hf.App("shop")
        self.charged: list[str] = []

        @app.activity(retry=hf.Retry(max_attempts=3, initial_ms=60_000))
        async def charge(order_id: str, cents: int) -> str:
            self.charged.append(order_id)
            return f"receipt {order_id}"

        @app.activity
        def pack(order_id: str) -> int:
            return len(order_id)

        @app.activity(queue="vans")
        async def ship(order_id: str) -> None: ...

        @app.workflow
        async def order(order_id: str, cents: int) -> str:
            try:
                approved = await hf.wait_signal("approval", bool, timeout=2 * DAY)
            except TimeoutError:
                return "too late"
            if not approved:
                return "rejected"
            receipt = await charge(order_id, cents)
            await hf.sleep(30 * DAY)
            await pack(order_id)
            await ship(order_id)
            return receipt

        @app.workflow
        async def family(order_ids: list[str]) -> list[str]:
            return list(await asyncio.gather(*(order(order_id, 1) for order_id in order_ids)))

        @app.workflow
        async def hourly(count: int) -> list[str]:
            seen = []
            for _ in range(count):
                await hf.sleep(timedelta(hours=1))
                seen.append(hf.now().isoformat())
            return seen

        self.charge, self.pack, self.ship = charge, pack, ship
        self.order, self.family, self.hourly = order, family, hourly


async def test_time_jumps_to_the_next_timer_while_a_result_is_awaited() -> None:
    shop = Shop()
    async with TestNode(shop.app, at=datetime(2026, 3, 1, tzinfo=UTC)) as node:
        run = await shop.app.start(shop.order, "o-1", 100)
        assert await run.result() == "too late"
        assert node.now == datetime(2026, 3, 3, tzinfo=UTC)
        assert node.calls() == []


async def test_time_stands_still_while_nothing_is_awaited() -> None:
    shop = Shop()
    async with TestNode(shop.app) as node:
        before = node.now
        run = await shop.app.start(shop.order, "o-1", 100)
        await node.settle()
        await asyncio.sleep(0.02)
        assert node.now == before
        await run.signal("approval", False)
        assert await run.result() == "rejected"
        assert node.now == before


async def test_advance_lets_each_timer_fire_at_its_time() -> None:
    shop = Shop()
    async with TestNode(shop.app) as node:
        begun = node.now
        run = await shop.app.start(shop.hourly, 48)
        await node.advance(days=1)
        assert [event.event_type for event in await run.events()].count("TimerFired") == 24
        await node.advance(DAY, seconds=1)
        assert node.now == begun + 2 * DAY + timedelta(seconds=1)
        assert await run.result() == [(begun + timedelta(hours=n)).isoformat() for n in range(1, 49)]


async def test_activities_in_threads_and_queues_are_called_and_their_calls_noted() -> None:
    shop = Shop()
    async with TestNode(shop.app) as node:
        run = await shop.app.start(shop.order, "o-1", 100)
        await run.signal("approval", True)
        assert await run.result() == "receipt o-1"
        assert [call.activity for call in node.calls()] == ["charge", "pack", "ship"]
        [call] = node.calls(shop.charge)
        assert call.arguments == {"order_id": "o-1", "cents": 100}
        assert call.run_id == run.run_id
    assert shop.charged == ["o-1"]


async def test_fakes_return_raise_and_follow_a_list_and_are_gone_afterwards() -> None:
    shop = Shop()
    async with TestNode(shop.app) as node:
        node.fake(shop.charge, side_effect=[ConnectionError("away"), "fine"])
        node.fake(shop.pack, side_effect=lambda order_id: 7)
        node.fake("ship")
        before = node.now
        run = await shop.app.start(shop.order, "o-1", 100)
        await run.signal("approval", True)
        assert await run.result() == "fine"
        assert [call.attempt for call in node.calls(shop.charge)] == [1, 2]
        assert node.now > before + timedelta(days=30, seconds=30), "the pause before the retry is virtual too"
        node.fake(shop.charge, raises=ConnectionError("away"))
        failing = await shop.app.start(shop.order, "o-2", 100)
        await failing.signal("approval", True)
        with pytest.raises(RunFailed, match="away"):
            await failing.result()
        assert len(node.calls(shop.charge)) == 5
    assert shop.charged == []
    assert await shop.charge("o-3", 1) == "receipt o-3"


async def test_time_stands_still_while_a_verifier_in_a_thread_is_asked() -> None:
    app, asked = hf.App("shop"), threading.Event()

    def find(order_id: str) -> hf.Completed:
        asked.wait(0.2)  # in real time
        return hf.Completed("parcel")

    @app.activity(idempotency_key=lambda order_id: order_id, verify=find)
    async def ship(order_id: str) -> str:
        raise ConnectionError("the answer was lost")

    @app.workflow
    async def order(order_id: str) -> str:
        return await ship(order_id)

    async with TestNode(app) as node:
        begun = node.now
        assert await (await app.start(order, "o-1")).result() == "parcel"
        assert node.now - begun < timedelta(seconds=29)  # the time of a verifier


async def test_a_fake_of_a_function_in_a_thread_may_be_async() -> None:
    shop = Shop()

    async def packed(order_id: str) -> int:
        await asyncio.sleep(0)
        return 5

    async with TestNode(shop.app) as node:
        node.fake(shop.pack, side_effect=packed)
        run = await shop.app.start(shop.order, "o-1", 100)
        await run.signal("approval", True)
        await run.result()
        assert len(node.calls(shop.pack)) == 1


async def test_a_run_that_waits_for_the_test_is_named_instead_of_waited_for() -> None:
    app = hf.App("shop")

    @app.workflow
    async def waits() -> bool:
        return await hf.wait_signal("approval", bool)

    @app.workflow
    async def parent() -> bool:
        return await waits()

    async with TestNode(app) as node:
        run = await app.start(parent)
        with pytest.raises(NothingDue, match=r"\(waits\) waits for the signal 'approval'"):
            await run.result()
        assert "RunStarted" in await node.describe()
        await app.run(f"{run.run_id}/waits").signal("approval", True)
        assert await run.result() is True


async def test_children_and_several_results_at_once() -> None:
    shop = Shop()
    async with TestNode(shop.app) as node:
        family = await shop.app.start(shop.family, ["a", "b"])
        single = await shop.app.start(shop.order, "c", 1)
        assert list(await asyncio.gather(family.result(), single.result())) == [["too late", "too late"], "too late"]
        assert node.calls() == []


async def test_a_limited_workflow_is_admitted_in_virtual_time() -> None:
    app = hf.App("shop")

    @app.workflow(at_once=1)
    async def slow() -> None:
        await hf.sleep(DAY)

    async with TestNode(app) as node:
        begun = node.now
        runs = [await app.start(slow) for _ in range(3)]
        for run in runs:
            await run.result()
        assert node.now - begun >= 3 * DAY


@pytest.mark.contract("TMR-2")
async def test_schedules_have_their_ticks_and_late_starts_begin_in_virtual_time() -> None:
    app = hf.App("shop")

    @app.schedule("0 9 * * *", tz="Europe/Sofia")
    @app.workflow
    async def daily() -> str:
        return hf.now().isoformat()

    @app.workflow
    async def waits() -> None:
        await hf.wait_signal("never", str)

    async with TestNode(app, at=datetime(2026, 3, 27, 12, tzinfo=UTC)) as node:
        await node.advance(days=3)
        heads = await node.store.find(RunQuery(workflow="daily"))
        results = [await app.run(head.run_id).result() for head in heads]
        days = ["2026-03-28T07:00", "2026-03-29T06:00", "2026-03-30T06:00"]  # the clocks change on the 29th
        assert sorted(result[:16] for result in results) == days
        begun = node.now
        later = await app.start(daily, after=timedelta(hours=1))
        assert await later.result() == (begun + timedelta(hours=1)).isoformat()
        with pytest.raises(NothingDue):
            await (await app.start(waits)).result()


async def test_mistakes_are_named() -> None:
    shop = Shop()
    with pytest.raises(InvalidInput, match="time zone"):
        TestNode(shop.app, at=datetime(2026, 1, 1))  # noqa: DTZ001
    node = TestNode(shop.app)
    with pytest.raises(InvalidInput, match="not open"):
        await node.settle()
    async with node:
        with pytest.raises(InvalidInput, match="no activity 'chrage'"):
            node.fake("chrage")
        with pytest.raises(InvalidInput, match="one of them"):
            node.fake(shop.charge, returns=1, raises=ValueError)
        with pytest.raises(InvalidInput, match="forwards"):
            await node.advance(-DAY)


PLAYED = """
import holdfast as hf

app = hf.App("shop")

@app.workflow
async def order() -> str:
    return await hf.wait_signal("approval", str)

async def test_order(holdfast_node):
    async with holdfast_node(app) as node:
        run = await app.start(order)
        await run.signal("approval", "yes")
        assert await run.result() == "no"
"""


@pytest.mark.process
def test_the_fixture_of_the_plugin_shows_the_histories_of_a_failed_test(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(PLAYED)
    command = [sys.executable, "-m", "pytest", "-q", "-o", "asyncio_mode=auto", "test_shop.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "holdfast runs" in done.stdout
    assert "SignalReceived" in done.stdout


@pytest.mark.contract("WF-2")
async def test_a_fork_keeps_what_was_recorded_although_time_stands_still() -> None:
    app = hf.App("shop")

    @app.activity
    async def price(item: str) -> int:
        raise AssertionError("it is faked")

    @app.workflow
    async def order() -> int:
        return await price("lamp") + await price("desk") + await hf.wait_signal("discount", int)

    async with TestNode(app) as node:
        node.fake(price, returns=10)
        run = await app.start(order)
        await node.settle()
        fork = await run.fork()
        await fork.signal("discount", -5)
        assert await fork.result() == 15
        assert len(node.calls(price)) == 2


async def test_an_update_that_waits_for_time_ends_the_test_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    app = hf.App("shop")

    @app.workflow
    async def basket() -> int:
        async def add() -> str:
            await hf.sleep(60)
            return "added"

        hf.on_update("add", add)
        return await hf.wait_signal("end", int)

    async with TestNode(app) as node:
        run = await app.start(basket)
        with monkeypatch.context() as impatient:
            impatient.setattr("holdfast.testing.test_node.PATIENCE_S", 0.2)
            with pytest.raises(NothingDue, match=r"update 'add'.*advance"):
                await run.update("add", update_id="u-1")
        again = asyncio.ensure_future(run.update("add", update_id="u-1"))
        await node.advance(seconds=60)
        assert await again == "added"


async def test_no_other_store_is_opened_meanwhile(tmp_path: Path) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        return "done"

    url = f"sqlite:///{tmp_path}/production.db"
    async with TestNode(app) as node:
        with pytest.raises(InvalidInput, match="a TestNode of this app is open"):
            async with app.connect(url):
                await app.start(order)
        with pytest.raises(InvalidInput, match="a TestNode of this app is open"):
            async with TestNode(app):
                pass
        assert list(tmp_path.iterdir()) == []
        async with app.connect(node.store):
            await app.start(order)
        assert await (await app.start(order)).result() == "done"
    async with app.node(url):
        assert await (await app.start(order)).result() == "done"


async def test_the_line_that_is_named_is_the_callers_and_not_that_of_a_library() -> None:
    app = hf.App("shop")

    @app.workflow
    async def fetches() -> str:
        async with httpx.AsyncClient() as client:
            return (await client.get("http://127.0.0.1:1/")).text  # the network belongs into an activity

    async with TestNode(app):
        run = await app.start(fetches)
        with pytest.raises(NothingDue, match=r"make the call an activity at \S*test_test_node\.py:\d+;"):
            await run.result()


async def test_what_is_no_app_no_activity_and_no_time_is_refused_by_name() -> None:
    shop = Shop()
    wrong: Any = test_the_line_that_is_named_is_the_callers_and_not_that_of_a_library
    with pytest.raises(InvalidInput, match="TestNode takes the App whose workflows are tested, not 'shop'"):
        TestNode("shop")  # type: ignore[arg-type]
    async with TestNode(shop.app) as node:
        with pytest.raises(InvalidInput, match=f"{wrong.__name__} is not an activity: register it"):
            node.fake(wrong, returns=1)
        with pytest.raises(InvalidInput, match="is not an activity"):
            node.calls(wrong)
        with pytest.raises(InvalidInput, match=r"time advances by a timedelta, or by days=.*, not 5"):
            await node.advance(5)  # type: ignore[arg-type]


def test_an_activity_that_is_said_to_be_repeatable_must_exist() -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> None: ...

    with pytest.raises(InvalidInput, match="repeatable: there is no activity 'chrage'"):
        explore(app, order, repeatable=["chrage"])
