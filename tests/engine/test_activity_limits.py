"""Limits on activities: over all nodes, whatever asks for them, and freed however a call ends."""

import asyncio
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from obstore.store import MemoryStore as ObjectsInMemory

import holdfast as hf
from holdfast.core import codec
from holdfast.errors import CheckpointOwnershipCapabilityError, InvalidInput, RunFailed
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from tests.engine.harness import EngineVariant, wait_for_event
from tests.engine.limited_process import OPTIONS, VISIBLE_MS, make_app

pytestmark = pytest.mark.contract("ACT-7")

PATIENT: dict[str, Any] = {"safety_poll_s": 600.0, "lease_ms": 30_000}
"""Nodes that learn of nothing by looking again."""


class Bank:
    """What calls are under way, and how many have been at most, over all apps of a test."""

    def __init__(self) -> None:
        self.inside: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.begun: list[str] = []
        self.doors: dict[str, asyncio.Event] = {}
        self.changed = asyncio.Event()

    async def work(self, user: str, work_s: float = 0.01) -> str:
        """Count what is under way, in all and for a user."""
        for key in ("all", user):
            self.inside[key] += 1
            self.most[key] = max(self.most[key], self.inside[key])
        self.begun.append(user)
        self.changed.set()
        try:
            if user in self.doors:
                await self.doors[user].wait()
            await asyncio.sleep(work_s)
        finally:
            for key in ("all", user):
                self.inside[key] -= 1
        return user

    async def has_begun(self, count: int) -> None:
        """Wait until so many calls have begun."""
        async with asyncio.timeout(60):
            while len(self.begun) < count:
                self.changed.clear()
                await self.changed.wait()


def shop(bank: Bank, limit: hf.ActivityLimit | None, **options: Any) -> tuple[hf.App, Any]:
    """Return an app whose workflow asks the bank so often for a user."""
    app = hf.App("shop")

    @app.activity(limit=limit, **options)
    async def ask(user: str) -> str:
        return await bank.work(user)

    @app.workflow(failures=Exception, signals={"go": str})
    async def order(user: str, times: int = 1) -> int:
        return len(await asyncio.gather(*(ask(user) for _ in range(times))))

    return app, order


@pytest.fixture(params=["memory", "sqlite"])
def stored_in(request: pytest.FixtureRequest) -> str:
    """Return a kind of store that has limits on activities. What a bucket answers is below."""
    return str(request.param)


async def test_bounds_hold_over_all_nodes_and_nobody_waits_for_a_look(variant: EngineVariant) -> None:
    """Nothing polls: the nodes look again by themselves only after ten minutes."""
    bank, limit = Bank(), hf.ActivityLimit(at_once=3, per_key=2, key=lambda user: user)
    async with variant.opened() as store, AsyncExitStack() as stack:
        apps = [shop(bank, limit) for _ in range(3)]
        for app, _ in apps:
            await stack.enter_async_context(variant.node(app, store, **PATIENT))
        runs = [await app.start(order, user, 6) for app, order in apps for user in ("ann", "bob")]
        assert [await run.result() for run in runs] == [6] * 6
        assert (await store.stats()).jobs == 0
    assert bank.most["all"] == 3
    assert max(bank.most["ann"], bank.most["bob"]) == 2
    assert len(bank.begun) == 36


async def test_call_that_waits_holds_no_slot(variant: EngineVariant) -> None:
    """The one slot of the node is free for others while ninety-nine calls wait."""
    bank = Bank()
    bank.doors["ann"] = asyncio.Event()
    app, order = shop(bank, hf.ActivityLimit(at_once=1))

    @app.activity
    async def other() -> str:
        return "done"

    @app.workflow
    async def beside() -> str:
        return await other()

    async with variant.node(app, activities_at_once=2, **PATIENT) as node:
        run = await app.start(order, "ann", 100)
        await bank.has_begun(1)
        assert await (await app.start(beside)).result() == "done"
        assert node.activities_running == 1
        bank.doors["ann"].set()
        assert await run.result() == 100
    assert bank.most["all"] == 1


@pytest.mark.parametrize("how", ["fail", "cancel", "terminate", "timeout", "schedule_to_close"])
async def test_place_is_free_however_its_holder_ends(variant: EngineVariant, how: str) -> None:
    bank, seen = Bank(), list[int]()
    app = hf.App("shop")
    once = hf.Retry(max_attempts=1)
    bounds: dict[str, Any] = {"timeout": 0.05} if how == "timeout" else {}
    bounds |= {"schedule_to_close": 0.1} if how == "schedule_to_close" else {}

    @app.activity(limit=hf.ActivityLimit(at_once=1), retry=once)
    async def ask(number: int) -> int:
        seen.append(number)
        bank.begun.append("x")
        bank.changed.set()
        if number == 1 and how == "fail":
            raise ValueError("no")
        if number == 1:
            await asyncio.Event().wait()
        return number

    @app.workflow(failures=Exception)
    async def order(number: int) -> int:
        return await (ask.options(**bounds) if number == 1 else ask)(number)

    async with variant.node(app, **PATIENT):
        first = await app.start(order, 1)
        await bank.has_begun(1)
        second = await app.start(order, 2)
        if how in ("cancel", "terminate"):
            await getattr(first, how)()
        assert await second.result() == 2
        assert seen == [1, 2]


async def test_each_attempt_takes_a_place_anew(variant: EngineVariant) -> None:
    """While one waits for its retry, others have the place."""
    seen, failed = list[str](), asyncio.Event()
    app = hf.App("shop")

    @app.activity(limit=hf.ActivityLimit(at_once=1), retry=hf.Retry(initial_ms=500, jitter=0.0))
    async def ask(who: str) -> str:
        seen.append(who)
        if who == "first" and len(seen) == 1:
            failed.set()
            raise ValueError("again")
        return who

    @app.workflow
    async def order(who: str) -> str:
        return await ask(who)

    async with variant.node(app, **PATIENT):
        first = await app.start(order, "first")
        async with asyncio.timeout(60):
            await failed.wait()
        second = await app.start(order, "second")
        assert await second.result() == "second"
        assert await first.result() == "first"
    assert seen == ["first", "second", "first"]


async def test_rate_spreads_calls(variant: EngineVariant) -> None:
    """Five begin in any fifth of a second, so sixteen take three of them."""
    bank = Bank()
    app, order = shop(bank, hf.ActivityLimit(rate=(5, timedelta(milliseconds=200))))
    async with variant.node(app, **PATIENT):
        began = time.monotonic()
        assert await (await app.start(order, "ann", 16)).result() == 16
        assert time.monotonic() - began >= 0.6


async def test_queue_of_a_limited_activity_is_worked_on_by_its_nodes_alone(variant: EngineVariant) -> None:
    bank, limit = Bank(), hf.ActivityLimit("gpus", at_once=2)
    app, order = shop(bank, limit, queue="gpu")
    far, _ = shop(bank, limit, queue="gpu")
    async with variant.opened() as store, variant.node(app, store, **PATIENT):
        run = await app.start(order, "ann", 5)
        await wait_for_event(run, "StepStarted")
        await asyncio.sleep(0.05)
        assert bank.begun == []
        async with variant.node(far, store, queues=("gpu",), takes_runs=False, **PATIENT) as worker:
            assert await run.result() == 5
            assert worker.options.queues == ("gpu",)
    assert bank.most["all"] == 2


async def test_limit_is_shared_by_activities_that_name_it(variant: EngineVariant) -> None:
    bank = Bank()
    app = hf.App("shop")
    limit = hf.ActivityLimit("bank API", at_once=1)

    @app.activity(limit=limit)
    async def read(user: str) -> str:
        return await bank.work(user)

    @app.activity(limit=limit)
    async def write(user: str) -> str:
        return await bank.work(user)

    @app.workflow
    async def order() -> None:
        await asyncio.gather(*(each("ann") for each in (read, write) for _ in range(4)))

    async with variant.node(app, **PATIENT):
        await (await app.start(order)).result()
    assert bank.most["all"] == 1


async def test_flows_and_plans_have_the_same_limits(variant: EngineVariant) -> None:
    bank = Bank()
    app = hf.App("shop")

    @app.activity(limit=hf.ActivityLimit(at_once=1, per_key=1, key=lambda user: user))
    async def ask(user: str) -> str:
        return await bank.work(user)

    class Order(msgspec.Struct, frozen=True):
        user: str = "ann"

    asks: Any = (
        hf.Act(ask, step=f"ask-{name}", input=lambda order: order.user, apply=lambda order, user: order)
        for name in "abc"
    )
    flow = app.flow("asks", Order, hf.Chorus(*asks))
    steps = [{"id": f"ask{number}", "activity": "ask", "input": {"user": "bob"}} for number in range(3)]
    plan = {"plan": "asks-too", "version": "1", "steps": steps}
    async with variant.node(app, **PATIENT):
        first = await app.start(flow, Order())
        second = await app.plans.start(plan)
        await first.result()
        await second.result()
        for run in (first, second):
            [event, *_] = [each for each in await run.events() if each.event_type == "StepStarted"]
            assert event.data.queue == "limited:"  # type: ignore[attr-defined]
    assert bank.most["all"] == 1
    assert len(bank.begun) == 6


async def test_calls_go_on_when_the_limit_is_taken_out_of_the_code(variant: EngineVariant) -> None:
    """Those that wait, and the retries of those that were under way."""
    bank = Bank()
    bank.doors["ann"] = asyncio.Event()
    before, order = shop(bank, hf.ActivityLimit(at_once=1))
    after, _ = shop(bank, None)
    async with variant.opened() as store:
        async with variant.node(before, store, drain_s=0.0, visible_ms=200):
            run = await before.start(order, "ann", 5)
            await bank.has_begun(1)
        bank.doors["ann"].set()
        async with variant.node(after, store, visible_ms=200):
            assert await after.run(run.run_id).result() == 5
    assert 1 < bank.most["all"] <= 5


async def test_numbers_are_those_of_the_code_that_takes_the_call(variant: EngineVariant) -> None:
    bank = Bank()
    before, order = shop(bank, hf.ActivityLimit(at_once=1))
    after, _ = shop(bank, hf.ActivityLimit(at_once=4))
    async with variant.opened() as store:
        async with variant.node(before, store, takes_runs=True, activities_at_once=1):
            bank.doors["ann"] = asyncio.Event()
            run = await before.start(order, "ann", 9)
            await bank.has_begun(1)
            bank.doors["ann"].set()
        async with variant.node(after, store):
            assert await after.run(run.run_id).result() == 9
    assert 1 < bank.most["all"] <= 4


async def test_call_that_is_completed_later_gives_its_place_back_when_its_function_returns(
    variant: EngineVariant,
) -> None:
    """What completes it may take days."""
    bank, tokens = Bank(), list[str]()
    app = hf.App("shop")

    @app.activity(limit=hf.ActivityLimit(at_once=1))
    async def ask(user: str) -> str:
        tokens.append(hf.activity_context().token)
        bank.begun.append(user)
        bank.changed.set()
        hf.activity_context().complete_later()
        return ""

    @app.workflow
    async def order(user: str) -> str:
        return await ask(user)

    async with variant.node(app, **PATIENT):
        runs = [await app.start(order, user) for user in ("ann", "bob")]
        await bank.has_begun(2)
        for token in tokens:
            await app.complete_activity(token, "paid")
        assert [await run.result() for run in runs] == ["paid", "paid"]


async def test_operators_skip_and_pause_what_waits(variant: EngineVariant) -> None:
    """A call that waits while its run is paused begins, as any activity does; one that is skipped leaves the line."""
    bank = Bank()
    bank.doors["ann"] = asyncio.Event()
    app, order = shop(bank, hf.ActivityLimit(at_once=1))
    async with variant.opened() as store, variant.node(app, store, **PATIENT):
        first = await app.start(order, "ann")
        await bank.has_begun(1)
        skipped, paused = await app.start(order, "bob"), await app.start(order, "eve")
        for run in (skipped, paused):
            await wait_for_event(run, "StepStarted")
        await skipped.skip_step("ask", result="skipped")
        assert await skipped.result() == 1
        await paused.pause()
        bank.doors["ann"].set()
        assert await first.result() == 1
        await bank.has_begun(2)
        await paused.resume()
        assert await paused.result() == 1
    assert bank.begun == ["ann", "eve"]


async def test_graceful_stop_leaves_places_to_others(variant: EngineVariant) -> None:
    """A node that stops gives back what has not begun, and frees what it gives up, without using up an attempt."""
    bank = Bank()
    app, order = shop(bank, hf.ActivityLimit(at_once=2), retry=hf.Retry(max_attempts=1))
    async with variant.opened() as store:
        async with variant.node(app, store, activities_at_once=1, drain_s=5.0):
            run = await app.start(order, "ann", 8)
            await bank.has_begun(1)
        async with variant.node(app, store, **PATIENT):
            assert await app.run(run.run_id).result() == 8
    assert bank.most["all"] <= 2
    assert len(bank.begun) == 8


async def test_time_of_the_step_goes_on_while_it_waits_for_a_place(variant: EngineVariant) -> None:
    """That of an attempt begins with the attempt."""
    bank = Bank()
    bank.doors["ann"] = asyncio.Event()
    app = hf.App("shop")

    @app.activity(limit=hf.ActivityLimit(at_once=1), timeout=50)
    async def ask(user: str) -> str:
        return await bank.work(user)

    @app.workflow(failures=Exception)
    async def order(user: str, bound_s: float) -> str:
        return await ask.options(schedule_to_close=bound_s)(user)

    async with variant.node(app, **PATIENT):
        first = await app.start(order, "ann", 50.0)
        await bank.has_begun(1)
        second = await app.start(order, "bob", 0.2)
        with pytest.raises(RunFailed, match="TimeoutError"):
            await second.result()
        bank.doors["ann"].set()
        assert await first.result() == "ann"
    assert bank.begun == ["ann"]


async def test_key_that_cannot_be_computed_stops_the_workflow(variant: EngineVariant) -> None:
    bank = Bank()
    app, order = shop(bank, hf.ActivityLimit(per_key=1, key=lambda user: user["name"]))
    async with variant.node(app):
        run = await app.start(order, "ann")
        with pytest.raises(RunFailed, match="could not be computed"):
            await run.result()
    assert bank.begun == []


@pytest.mark.contract("STO-2", "ACT-7")
async def test_bucket_refuses_a_node_with_limits_before_it_claims_anything() -> None:
    app, _ = shop(Bank(), hf.ActivityLimit(at_once=1))
    store = S3Store(Bucket(ObjectsInMemory()))
    await store.migrate()
    with pytest.raises(CheckpointOwnershipCapabilityError, match="limits on activities") as refused:
        async with app.node(store):
            pass
    assert (refused.value.details["capability"], refused.value.details["store"]) == ("limits on activities", "S3Store")
    assert await store.bucket.list("nodes") == []
    await store.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "needs at_once"),
        ({"at_once": 0}, "from 1"),
        ({"at_once": True}, "from 1"),
        ({"per_key": 1}, "belongs with"),
        ({"at_once": 1, "key": lambda user: user}, "belongs with"),
        ({"rate": 5}, "a number of calls and a period"),
        ({"rate": (0, 1)}, "from 1"),
        ({"rate": (5, 0)}, "more than 0"),
    ],
)
def test_limit_that_makes_no_sense_is_refused_where_it_is_declared(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        hf.ActivityLimit(**options)


def test_limit_that_does_not_fit_its_activity_is_refused_where_it_is_registered() -> None:
    app = hf.App("shop")
    with pytest.raises(InvalidInput, match="takes 'who'"):
        app.activity(limit=hf.ActivityLimit(per_key=1, key=lambda who: who))(len_of)
    with pytest.raises(InvalidInput, match="limit is an ActivityLimit"):
        app.activity(limit=5)(len_of)  # type: ignore[call-overload]
    app.activity(limit=hf.ActivityLimit("api", at_once=1))(len_of)
    with pytest.raises(InvalidInput, match="other numbers"):
        app.activity(name="other", limit=hf.ActivityLimit("api", at_once=2))(len_of)
    with pytest.raises(InvalidInput, match="limit"):
        hf.NodeOptions(queues=("limited:gpu",))


def len_of(user: str) -> int:
    """Be an activity."""
    return len(user)


async def test_limits_hold_where_payloads_are_encrypted(variant: EngineVariant) -> None:
    """What the store decides by is not sealed."""
    bank = Bank()
    app, order = shop(bank, hf.ActivityLimit(per_key=1, key=lambda user: user))
    app.codecs = (hf.Encryption({"k1": b"1" * 32}),)
    async with variant.node(app, **PATIENT):
        runs = [await app.start(order, user, 3) for user in ("ann", "bob")]
        assert [await run.result() for run in runs] == [3, 3]
    assert (bank.most["ann"], bank.most["bob"]) == (1, 1)


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "name"), [("code", "other"), ("code", "killed"), ("queue", "other"), ("flow", "other"), ("plan", "other")]
)
async def test_place_of_a_killed_process_is_free_again(tmp_path: Path, kind: str, name: str) -> None:
    """After its time-out; at once if the node comes back under its name. Whatever has asked for the call."""
    address = f"sqlite:///{tmp_path / 'limits.db'}"
    app, start = make_app(kind, hangs=False)
    async with app.connect(address):
        runs = [await start(user) for user in ("ann", "bob")]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.engine.limited_process", "killed", address, kind),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert (await process.stdout.readline()).strip() == b"began"
        process.kill()
        await process.wait()
    visible_ms = VISIBLE_MS if name == "other" else 60_000
    options = hf.NodeOptions(**{**OPTIONS, "visible_ms": visible_ms})
    async with asyncio.timeout(60), app.node(address, name=name, options=options):
        ended = [await wait_for_event(app.run(run.run_id), "StepCompleted") for run in runs]
        for run in runs:
            await app.run(run.run_id).result()
    results = [codec.decode(event.data.result, str) for event in ended]  # type: ignore[attr-defined]
    assert sorted(results) == ["ann at attempt 2", "bob at attempt 1"]
