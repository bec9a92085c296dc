"""Locks between runs beside all else that can happen to a holder, and to a run that waits."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import RunStatus
from holdfast.errors import Conflict, InvalidInput, NotFound, RunCancelled
from holdfast.settings import load_settings
from holdfast.store.copy import copy_store
from holdfast.store.open import open_store
from holdfast.store.port import PurgePolicy, RunQuery
from holdfast.store.sqlite import SqliteStore
from tests.engine.harness import MOST_SECONDS, EngineVariant, wait_for_event, wait_for_status
from tests.engine.locked_process import LEASE_MS, make_app
from tests.engine.test_locks import Seen, bank, holders, inside, transfer_of

pytestmark = pytest.mark.contract("WF-9")

NOW = PurgePolicy(finished_run_ms=0, task_ms=0, runtime_state_ms=0, dead_letter_ms=0, outbox_ms=0, sink_hold_ms=0)


async def freed(app: hf.App, run_id: str) -> None:
    """Wait until the lock that a run had is free: the lock's own run ends after the run that held it."""
    with suppress(RunCancelled):
        await app.run(f"{run_id}/lock:account").result()


async def test_a_paused_holder_keeps_it_and_a_paused_run_that_waits_gets_it(variant: EngineVariant) -> None:
    app, transfer, seen = bank()
    async with variant.opened() as store, variant.node(app, store):
        first = await app.start(transfer, 1)
        await inside(seen, 1)
        second = await app.start(transfer, 2)
        await wait_for_event(second, "SignalWaiting")
        for run in (first, second):
            await run.pause(actor="ann")
            await wait_for_status(run, RunStatus.PAUSED)
        await first.signal("go", "a")
        await second.signal("go", "b")
        assert await holders(store, RunStatus.RUNNING) == [first.run_id]
        await first.resume(actor="ann")
        assert await first.result() == "a"
        await wait_for_status(app.run(f"{second.run_id}/lock:account"), RunStatus.RUNNING)
        third = await app.start(transfer, 3)
        await wait_for_event(third, "SignalWaiting")
        assert await holders(store, RunStatus.RUNNING) == [second.run_id]
        assert seen == ["in 1", "out 1"]
        await second.resume(actor="ann")
        await third.signal("go", "c")
        assert (await second.result(), await third.result()) == ("b", "c")
        assert seen == ["in 1", "out 1", "in 2", "out 2", "in 3", "out 3"]


async def test_a_run_that_waits_and_is_terminated_leaves_the_line(variant: EngineVariant) -> None:
    """Also where it is paused."""
    app, transfer, seen = bank()
    async with variant.opened() as store, variant.node(app, store):
        first = await app.start(transfer, 1)
        await inside(seen, 1)
        late = [await app.start(transfer, number) for number in (2, 3)]
        for run in late:
            await wait_for_event(run, "SignalWaiting")
        await late[0].pause(actor="ann")
        await wait_for_status(late[0], RunStatus.PAUSED)
        for run in late:
            await run.terminate()
            await wait_for_status(run, RunStatus.CANCELLED)
        last = await app.start(transfer, 4)
        await first.signal("go", "a")
        await last.signal("go", "d")
        assert (await first.result(), await last.result()) == ("a", "d")
        assert seen == ["in 1", "out 1", "in 4", "out 4"]
        assert await holders(store, RunStatus.PENDING) == []


async def test_a_holder_that_cleans_up_after_its_cancellation_keeps_it_until_it_has(variant: EngineVariant) -> None:
    app, seen = hf.App("bank"), Seen()
    accounts, done = app.lock("account"), asyncio.Event()

    @app.activity
    async def undo(number: int) -> None:
        seen.add(f"in {number}")
        await done.wait()
        seen.add(f"undone {number}")

    @app.workflow
    async def careful(number: int) -> None:
        async with accounts("17"):
            try:
                await undo(number)
                await hf.wait_signal("never")
            finally:
                await undo(-number)

    async with variant.node(app):
        done.set()
        first = await app.start(careful, 1)
        await wait_for_event(first, "SignalWaiting", 2)
        done.clear()
        second = await app.start(careful, 2)
        await wait_for_event(second, "SignalWaiting")
        await first.cancel()
        await inside(seen, 2)
        await wait_for_event(first, "SignalAccepted")
        assert seen == ["in 1", "undone 1", "in -1"]
        done.set()
        with pytest.raises(RunCancelled):
            await first.result()
        await inside(seen, 3)
        await second.terminate()
        assert seen[:5] == ["in 1", "undone 1", "in -1", "undone -1", "in 2"]


@pytest.mark.contract("CAN-1")
async def test_a_stretch_that_ends_leaves_the_line_and_the_next_one_asks_anew(variant: EngineVariant) -> None:
    """Behind those that have come meanwhile."""
    app, seen = hf.App("bank"), Seen()
    accounts = app.lock("account")
    transfer = transfer_of(app, accounts, seen)

    @app.activity
    async def come(what: str) -> None:
        seen.add(what)

    @app.workflow(signals={"turn": str})
    async def turning(stretch: int) -> str:
        async def enter() -> None:
            async with accounts("17"):
                await come(f"in turning {stretch}")

        entry = asyncio.ensure_future(enter())
        if stretch == 0:
            await hf.wait_signal("turn", str)
            hf.continue_as_new(1)
        await entry
        return "done"

    async with variant.opened() as store, variant.node(app, store):
        first = await app.start(transfer, 1)
        await inside(seen, 1)
        run = await app.start(turning, 0)
        await wait_for_event(run, "SignalWaiting", 2)
        second = await app.start(transfer, 2)
        await wait_for_event(second, "SignalWaiting")
        await run.signal("turn", "now")
        await wait_for_event(run, "ContinuedAsNew")
        for number, each in enumerate((first, second)):
            await each.signal("go", f"{number}")
            await each.result()
        assert await run.result() == "done"
        assert seen == ["in 1", "out 1", "in 2", "out 2", "in turning 1"]
        assert await holders(store, RunStatus.PENDING) == []


@pytest.mark.contract("WF-4")
async def test_a_fork_of_a_holder_stands_in_line(variant: EngineVariant) -> None:
    """It is cut before the lock was asked for; one from behind the block has no lock."""
    app, transfer, seen = bank()
    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(transfer, 1)
        await inside(seen, 1)
        await wait_for_event(run, "StepCompleted")
        fork = await run.fork()
        await wait_for_event(fork, "SignalWaiting")
        assert await holders(store, RunStatus.RUNNING) == [run.run_id]
        assert seen == ["in 1"]
        await run.signal("go", "a")
        assert await run.result() == "a"
        await inside(seen, 2)
        assert await holders(store, RunStatus.RUNNING) == [fork.run_id]
        await fork.signal("go", "b")
        assert await fork.result() == "b"
        assert seen == ["in 1", "out 1", "in 1", "out 1"]


@pytest.mark.contract("SIG-13")
async def test_no_one_forks_or_retries_a_lock(variant: EngineVariant) -> None:
    """A fork of one that was held would run for ever, for a run that does not know of it."""
    app, transfer, seen = bank()
    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(transfer, 1)
        await inside(seen, 1)
        lock = app.run(f"{run.run_id}/lock:account")
        with pytest.raises(Conflict, match="retry or fork that run"):
            await lock.fork()
        await run.signal("go", "a")
        await run.result()
        await freed(app, run.run_id)
        for again in (lock.fork, lock.retry_run):
            with pytest.raises(Conflict, match="retry or fork that run"):
                await again()
        assert len(await store.find(RunQuery(workflow="lock:account", limit=100))) == 1


def test_no_workflow_has_the_name_of_a_lock() -> None:
    app = hf.App("bank")

    @app.activity
    async def book(account: str) -> str:
        return account

    with pytest.raises(InvalidInput, match=r"app\.lock"):

        @app.workflow(name="lock:account")
        async def transfer() -> None: ...

    with pytest.raises(InvalidInput, match=r"app\.lock"):
        app.flow("lock:account", str, hf.Scene(hf.Act(book)))


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("is_held", [False, True], ids=["waits", "held"])
async def test_a_lock_is_not_skipped_as_a_child(is_held: bool, variant: EngineVariant) -> None:
    """Its parent would fail, or go on inside while others enter: the wait is skipped, by who may override it."""
    app, transfer, seen = bank()
    async with variant.opened() as store, variant.node(app, store):
        first = await app.start(transfer, 1)
        await inside(seen, 1)
        second = await app.start(transfer, 2)
        await wait_for_event(second, "SignalWaiting")
        with pytest.raises(Conflict, match=r"skip the wait holdfast\.lock:account"):
            await (first if is_held else second).skip_step("lock:account", actor="ann", wait=True)
        assert await holders(store, RunStatus.RUNNING) == [first.run_id]
        await first.signal("go", "a")
        await second.signal("go", "b")
        assert (await first.result(), await second.result()) == ("a", "b")
        assert seen == ["in 1", "out 1", "in 2", "out 2"]


@pytest.mark.contract("SIG-13")
async def test_who_skips_a_lock_in_a_scope_is_told_which_wait_to_skip(variant: EngineVariant) -> None:
    app = hf.App("bank")
    accounts = app.lock("other")

    @app.workflow
    async def waits() -> str:
        async with hf.scope("item"), accounts(), hf.scope("again"):
            return await hf.wait_signal("go", str)

    async with variant.opened() as store, variant.node(app, store):
        first = await app.start(waits)
        await wait_for_event(first, "SignalWaiting", 2)
        second = await app.start(waits)
        await wait_for_event(second, "SignalWaiting")
        with pytest.raises(Conflict, match=r"skip the wait item/holdfast\.lock:other;"):
            await second.skip_step("item/lock:other", wait=True)
        await second.skip_step("item/holdfast.lock:other", wait=True)
        for run in (first, second):
            await run.signal("go", "on")
            assert await run.result() == "on"


@pytest.mark.contract("FMT-2")
async def test_retention_deletes_what_has_ended_and_leaves_holders_and_the_line(variant: EngineVariant) -> None:
    app, seen = hf.App("bank"), Seen()
    accounts = app.lock("account")
    transfer = transfer_of(app, accounts, seen)

    @app.workflow(signals={"go": str})
    async def often() -> str:
        for _ in range(3):
            async with accounts("17"):
                await hf.wait_signal("go", str)
        return "done"

    async with variant.opened() as store, variant.node(app, store):
        done = await app.start(transfer, 9)
        await done.signal("go", "x")
        await done.result()
        await freed(app, done.run_id)
        run = await app.start(often)
        await wait_for_event(run, "SignalWaiting", 2)
        await run.signal("go", "1")
        await wait_for_event(run, "SignalWaiting", 4)
        second = await app.start(transfer, 2)
        await wait_for_event(second, "SignalWaiting")
        await store.purge(NOW)
        with pytest.raises(NotFound):
            await done.status()
        with pytest.raises(NotFound):
            await app.run(f"{done.run_id}/lock:account").status()
        assert await holders(store, RunStatus.RUNNING) == [run.run_id]
        assert await holders(store, RunStatus.PENDING) == [second.run_id]
        await run.signal("go", "2")
        await second.signal("go", "b")
        assert await second.result() == "b"
        await run.signal("go", "3")
        assert await run.result() == "done"


@pytest.mark.contract("STO-1")
async def test_a_copy_is_made_once_no_lock_is_held(tmp_path: Path) -> None:
    """Who copies learns which run holds the lock, or waits for it. Nothing is written before."""
    app, transfer, seen = bank()
    options = hf.NodeOptions(drain_s=0.0)
    here = await SqliteStore.open(tmp_path / "here.db")
    there = await SqliteStore.open(tmp_path / "there.db")
    try:
        for store in (here, there):
            await store.migrate()
        async with asyncio.timeout(MOST_SECONDS), app.node(here, options=options):
            await app.start(transfer, 1, run_id="first")
            await inside(seen, 1)
            await app.start(transfer, 2, run_id="second")
            await wait_for_event(app.run("second"), "SignalWaiting")
        with pytest.raises(Conflict, match="a child of run first, is queued"):
            await copy_store(here, there)
        assert await there.find(RunQuery()) == []
        async with asyncio.timeout(MOST_SECONDS), app.node(here, options=options):
            for run_id in ("first", "second"):
                await app.run(run_id).signal("go", run_id)
                assert await app.run(run_id).result() == run_id
                await freed(app, run_id)
        assert (await copy_store(here, there)).unfinished_runs == 0
        async with asyncio.timeout(MOST_SECONDS), app.node(there, options=options):
            third = await app.start(transfer, 3)
            await third.signal("go", "c")
            assert await third.result() == "c"
    finally:
        await here.close()
        await there.close()


@pytest.mark.process
@pytest.mark.contract("OWN-3")
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_who_waits_gets_nothing_by_the_death_of_the_holders_node(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It is killed while another node has the run that waits. That takes the holder too, and lets it end first."""
    address = f"sqlite:///{tmp_path / 'bank.db'}" if store == "sqlite" else request.getfixturevalue("postgres_url")
    diary = tmp_path / "diary"
    app, transfer = make_app(diary)
    opened = await open_store_of(address)
    async with app.connect(opened):
        first = await app.start(transfer, 1)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.engine.locked_process", address, str(diary)), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(MOST_SECONDS):
            assert (await process.stdout.readline()).strip() == b"in 1"
    options = hf.NodeOptions(lease_ms=LEASE_MS, drain_s=0.1)
    async with asyncio.timeout(MOST_SECONDS), app.node(opened, name="here", options=options):
        second = await app.start(transfer, 2)
        await wait_for_event(second, "ChildStarted")
        process.kill()
        await process.wait()
        await app.run(first.run_id).signal("go", "a")
        await second.signal("go", "b")
        assert await app.run(first.run_id).result() == "a"
        assert await second.result() == "b"
    await opened.close()
    assert diary.read_text().split("\n")[:-1] == ["in 1", "out 1", "in 2", "out 2"]


async def open_store_of(address: str) -> Any:
    """Open a store by its address."""
    store = await open_store(load_settings({}, store=address))
    await store.migrate()
    return store
