"""Locks between runs: one at a time, in order, freed however the holder ends."""

import asyncio
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import RunStatus
from holdfast.errors import ChildFailed, Conflict, InvalidInput, RunFailed
from holdfast.run import RunHandle
from holdfast.store.port import RunQuery, Store
from holdfast.testing import explore
from tests.engine.harness import (
    MOST_SECONDS,
    EngineVariant,
    store_with_virtual_time,
    wait_for_event,
    wait_for_status,
)
from tests.s3_server import Endpoint

pytestmark = pytest.mark.contract("WF-9")


class Seen(list[str]):
    """What happened, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def add(self, what: str) -> None:
        """Note what happened."""
        self.append(what)
        self.changed.set()


def bank(**options: Any) -> tuple[hf.App, Any, Seen]:
    """Return an app with a workflow that holds a lock until it gets a signal, and what happens, in order."""
    app, seen = hf.App("bank", **options), Seen()
    return app, transfer_of(app, app.lock("account"), seen), seen


def transfer_of(app: hf.App, accounts: Any, seen: Seen) -> Any:
    """Return a workflow that holds a lock until it gets a signal."""

    @app.activity
    async def note(what: str) -> None:
        seen.add(what)

    @app.workflow(signals={"go": str}, failures=ValueError)
    async def transfer(number: int, key: str = "17", timeout_s: float | None = None, how: str = "") -> str:
        async with accounts(key, timeout=timeout_s):
            await note(f"in {number}")
            word = await hf.wait_signal("go")
            if how == "fail":
                raise ValueError("no money")
            if how == "rotate":
                hf.continue_as_new(number, "other")
            await note(f"out {number}")
        return str(word)

    return transfer


async def holders(store: Store, status: RunStatus) -> list[str | None]:
    """Return whose runs hold the lock, or wait for it."""
    found = await store.find(RunQuery(workflow="lock:account", status=status, limit=100))
    return [head.parent_run_id for head in found]


async def inside(seen: Seen, count: int) -> None:
    """Wait until so many have entered."""
    async with asyncio.timeout(60):
        while len([each for each in seen if each.startswith("in")]) < count:
            seen.changed.clear()
            await seen.changed.wait()


async def test_one_run_at_a_time_in_order_and_other_keys_beside_it(variant: EngineVariant) -> None:
    app, transfer, seen = bank()
    async with variant.opened() as store, variant.node(app, store):
        runs = []
        for number in range(4):
            runs.append(await app.start(transfer, number))
            await wait_for_event(runs[-1], "ChildStarted")
        await inside(seen, 1)
        other = await app.start(transfer, 9, "18")
        await inside(seen, 2)
        assert seen == ["in 0", "in 9"]
        waiting = [run.run_id for run in runs[1:]]
        assert sorted(filter(None, await holders(store, RunStatus.PENDING))) == sorted(waiting)
        assert set(await holders(store, RunStatus.RUNNING)) == {runs[0].run_id, other.run_id}
        for number, run in enumerate(runs):
            await run.signal("go", f"w{number}")
            assert await run.result() == f"w{number}"
        assert [each for each in seen if each != "in 9"] == [f"{way} {n}" for n in range(4) for way in ("in", "out")]
        await other.signal("go", "x")
        await other.result()


@pytest.mark.parametrize("how", ["fail", "cancel", "terminate", "timeout", "rotate"])
async def test_it_is_free_however_its_holder_ends(variant: EngineVariant, how: str) -> None:
    app, transfer, seen = bank()
    async with variant.node(app):
        bounds: Any = {"execution_timeout": 0.3} if how == "timeout" else {}
        first = await app.start(transfer, 1, how=how, **bounds)
        await inside(seen, 1)
        second = await app.start(transfer, 2)
        if how in ("fail", "rotate"):
            await first.signal("go", "now")
        elif how != "timeout":
            await getattr(first, how)()
        await inside(seen, 2 if how != "rotate" else 3)
        await second.signal("go", "done")
        assert await second.result() == "done"
        assert seen[0] == "in 1"
        if how == "rotate":
            assert await first.status() == RunStatus.RUNNING
            await first.signal("go", "again")
            await first.result()


async def test_a_holder_keeps_it_over_the_loss_of_its_node(variant: EngineVariant) -> None:
    app, transfer, seen = bank()
    async with variant.opened() as store:
        async with variant.node(app, store):
            first = await app.start(transfer, 1)
            await inside(seen, 1)
            second = await app.start(transfer, 2)
            await wait_for_event(second, "ChildStarted")
        async with variant.node(app, store):
            assert await holders(store, RunStatus.PENDING) == [second.run_id]
            await app.run(first.run_id).signal("go", "a")
            await app.run(second.run_id).signal("go", "b")
            assert await app.run(first.run_id).result() == "a"
            assert await app.run(second.run_id).result() == "b"
    assert seen.index("out 1") < seen.index("in 2")


async def test_who_waits_too_long_leaves_the_line(variant: EngineVariant) -> None:
    app, transfer, seen = bank()
    async with variant.opened() as store, variant.node(app, store):
        first = await app.start(transfer, 1)
        await inside(seen, 1)
        late = await app.start(transfer, 2, timeout_s=0.05)
        with pytest.raises(RunFailed, match=r"TimeoutError: lock .* of key .* was not free in time"):
            await late.result()
        third = await app.start(transfer, 3)
        await wait_for_event(third, "ChildStarted")
        await first.signal("go", "a")
        await inside(seen, 2)
        await third.signal("go", "c")
        assert await third.result() == "c"
        assert seen == ["in 1", "out 1", "in 3", "out 3"]
        assert await holders(store, RunStatus.PENDING) == []


async def test_a_run_that_waits_can_be_cancelled_and_leaves_the_line(variant: EngineVariant) -> None:
    app, transfer, seen = bank()
    async with variant.opened() as store, variant.node(app, store):
        first = await app.start(transfer, 1)
        await inside(seen, 1)
        second = await app.start(transfer, 2)
        await wait_for_event(second, "SignalWaiting")
        await second.cancel()
        await wait_for_status(second, RunStatus.CANCELLED)
        await first.signal("go", "a")
        assert await first.result() == "a"
        assert await holders(store, RunStatus.PENDING) == []


async def test_an_operator_may_let_a_run_in_without_the_lock(variant: EngineVariant) -> None:
    app, transfer, seen = bank()
    async with variant.opened() as store, variant.node(app, store):
        first = await app.start(transfer, 1)
        await inside(seen, 1)
        second = await app.start(transfer, 2)
        await wait_for_event(second, "SignalWaiting")
        await second.skip_step("holdfast.lock:account", actor="ann")
        await inside(seen, 2)
        for run in (second, first):
            await run.signal("go", "x")
            assert await run.result() == "x"
        assert await holders(store, RunStatus.PENDING) == []


async def test_a_rate_bounds_how_many_enter(variant: EngineVariant) -> None:
    app, seen = hf.App("bank"), Seen()
    calls = app.lock("calls", at_once=100, rate=(2, timedelta(milliseconds=200)))

    @app.workflow
    async def call(number: int) -> float:
        async with calls(str(number)):
            return hf.now().timestamp()

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store, safety_poll_s=0.005):
        runs = [await app.start(call, number) for number in range(4)]
        await _completed(runs, 2)
        clock.advance(ms=200)
        await _completed(runs, 4)
        times = sorted([await run.result() for run in runs])
    assert [round(time - times[0], 3) for time in times] == [0.0, 0.0, 0.2, 0.2]
    assert seen == []


async def _completed(runs: list[RunHandle[float]], count: int) -> None:
    """Wait until so many of these runs have completed."""
    async with asyncio.timeout(MOST_SECONDS):
        while [await run.status() for run in runs].count(RunStatus.COMPLETED) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_tenants_do_not_wait_for_each_other(variant: EngineVariant) -> None:
    app, transfer, seen = bank()
    async with variant.node(app):
        runs = [await app.start(transfer, n, tenant=tenant) for n, tenant in enumerate(("a", "b"))]
        await inside(seen, 2)
        for run in runs:
            await run.signal("go", "x")
            await run.result()


async def test_several_may_hold_it_together_if_it_says_so(variant: EngineVariant) -> None:
    app, seen = hf.App("bank"), Seen()
    gpus = app.lock("gpu", at_once=2)

    @app.activity
    async def note(what: str) -> None:
        seen.add(what)

    @app.workflow
    async def train(number: int) -> None:
        async with gpus():
            await note(f"in {number}")
            await hf.wait_signal("go")

    async with variant.node(app):
        runs = [await app.start(train, number) for number in range(3)]
        await inside(seen, 2)
        await wait_for_event(runs[2], "SignalWaiting")
        assert len(seen) == 2
        held = [int(each.split()[1]) for each in seen]
        await runs[held[0]].signal("go")
        await inside(seen, 3)
        for run in runs:
            await run.signal("go") if run is not runs[held[0]] else None
            await run.result()


async def test_what_would_wait_for_itself_or_for_nothing_is_refused(variant: EngineVariant) -> None:
    app = hf.App("bank")
    accounts = app.lock("account")

    @app.workflow
    async def twice() -> str:
        async with accounts("17"), accounts("18"):
            try:
                async with accounts("17"):
                    return "in"
            except InvalidInput as problem:
                return problem.message

    @app.workflow
    async def broken() -> str:
        try:
            async with accounts("17"):
                return "in"
        except ChildFailed as problem:
            return str(problem.info.code)

    async with variant.opened() as store, variant.node(app, store):
        assert "would wait for itself" in await (await app.start(twice)).result()
        blocker = await app.start(broken)
        assert await blocker.result() == "in"
        with pytest.raises(InvalidInput, match="at_once"):
            app.lock("other", at_once=0)
        with pytest.raises(InvalidInput):
            accounts("x" * 300)
        with pytest.raises(hf.errors.NotDurable):
            async with accounts("17"):
                pass


async def test_nobody_outside_can_say_that_a_lock_is_free(variant: EngineVariant) -> None:
    app, transfer, seen = bank()
    async with variant.node(app):
        first = await app.start(transfer, 1)
        await inside(seen, 1)
        second = await app.start(transfer, 2)
        await wait_for_event(second, "SignalWaiting")
        holding = f"{first.run_id}/lock:account"
        with pytest.raises(Conflict, match="its parent holds"):
            await app.run(holding).signal("release")
        [refused] = await app.signal_many([{"run_id": holding, "name": "release"}])
        assert isinstance(refused, Conflict)
        assert await app.run(holding).mailbox() == []
        with pytest.raises(InvalidInput, match="the engine's own"):
            await second.signal("holdfast.lock:account")
        direct: hf.RunHandle[Any] = await app.start(
            hf.Workflow(app.registry.workflow("lock:account")), "default|default|default", "18", ""
        )
        with pytest.raises(RunFailed, match="enter it inside a workflow"):
            await direct.result()
        assert seen == ["in 1"]


@pytest.mark.parametrize("key", ["schedule:nightly", "retry_of:o-1"])
async def test_any_name_may_be_a_key(key: str) -> None:
    """The key is a tag too, unless the engine makes decisions by such tags."""
    app, transfer, _ = bank()
    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        run = await app.start(transfer, 1, key)
        await run.signal("go", "done")
        assert await run.result() == "done"


async def check_two_nodes(address: str) -> None:
    """Let runs of two nodes on one store go through a lock, and see that they never meet."""
    apps = [bank() for _ in range(2)]
    options = hf.NodeOptions(safety_poll_s=1)
    one, two = apps[0][0], apps[1][0]
    async with asyncio.timeout(60), one.node(address, options=options), two.node(address, options=options):
        runs = [await app.start(workflow, n) for n, (app, workflow, _) in enumerate(apps * 2)]
        for number, run in enumerate(runs):
            await run.signal("go", str(number))
        assert sorted([await run.result() for run in runs]) == ["0", "1", "2", "3"]
        inner = [[event for event in await run.events() if event.event_type == "StepCompleted"] for run in runs]
        times = sorted((events[0].persisted_at, events[-1].persisted_at) for events in inner)
        assert all(before[1] < after[0] for before, after in pairwise(times)), times
        assert sum(len(seen) for _, _, seen in apps) == 8


async def test_runs_of_several_nodes_on_postgresql(postgres_url: str) -> None:
    await check_two_nodes(postgres_url)


async def test_runs_of_several_nodes_in_a_bucket(s3_server: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    await check_two_nodes(f"s3://{s3_server.make_bucket()}/bank")


def test_a_crash_at_any_commit_neither_loses_nor_doubles_it() -> None:
    app = hf.App("bank")
    accounts = app.lock("account")

    @app.workflow
    async def order() -> str:
        async with accounts("17"):
            await hf.sleep(1)
        async with accounts("17", timeout=60):
            return "done"

    found = explore(app, order)
    assert {play.ending for play in found.plays} == {"result 'done'"}
