"""Streams beside all else that can happen to a run: what readers get of it, and who may write."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import RunStatus
from holdfast.errors import NotFound, PayloadUnreadable, RunFailed
from holdfast.store.copy import copy_store
from holdfast.store.port import PurgePolicy, Store
from holdfast.store.sqlite import SqliteStore
from tests.engine.harness import MOST_SECONDS, EngineVariant, wait_for_event, wait_for_status
from tests.engine.test_streams import read, values

pytestmark = pytest.mark.contract("STR-1")

ONCE = hf.Retry(max_attempts=1)
NOW = PurgePolicy(finished_run_ms=0, task_ms=0, runtime_state_ms=0, dead_letter_ms=0, outbox_ms=0, sink_hold_ms=0)


class Press:
    """An app whose activity writes lines, and then waits until it may end."""

    def __init__(self, retry: hf.Retry = ONCE, **options: Any) -> None:
        self.app = app = hf.App("press", **options)
        self.may_end = asyncio.Event()
        self.is_broken = False

        @app.activity(retry=retry)
        async def write(what: str, count: int) -> str:
            out = hf.stream("tokens")
            for number in range(count):
                await out.write(f"{what} {number}")
            if self.is_broken:
                raise ValueError("no paper")
            await self.may_end.wait()
            return what

        @app.workflow(failures=Exception)
        async def paper(what: str, rounds: int = 0) -> str:
            progress = hf.stream("progress")
            await progress.write(f"{what} begins")
            written = await write(what, 3)
            await progress.write(f"{what} is written")
            if rounds:
                hf.continue_as_new(f"{what}'", rounds - 1)
            return written

        self.write, self.paper = write, paper

    async def writing(self, *args: Any, **options: Any) -> hf.RunHandle[str]:
        """Start a run, and wait until its lines are durable and its activity is under way."""
        run = await self.app.start(self.paper, *args, **options)
        await has(run, 3)
        return run


async def has(run: hf.RunHandle[Any], count: int) -> None:
    """Wait until so many lines of a run are durable."""
    async with asyncio.timeout(MOST_SECONDS):
        async for chunk in run.stream("tokens"):
            if chunk.seq == count:
                return
    raise AssertionError("the stream has ended")


@pytest.mark.contract("CAN-1")
async def test_each_stretch_of_a_run_adds_to_its_streams(store: Store) -> None:
    """Though the steps of all stretches are named alike, and each is a first attempt."""
    press = Press()
    press.may_end.set()
    options = hf.NodeOptions(cached_runs=0)
    async with asyncio.timeout(60), press.app.node(store, options=options):
        run = await press.app.start(press.paper, "a", 2)
        assert await run.result() == "a''"
        chunks = await read(run)
        assert values(chunks) == [f"{what} {number}" for what in ("a", "a'", "a''") for number in range(3)]
        assert {chunk.restarted_from for chunk in chunks} == {None}
        told = values(await read(run, "progress"))
        assert told == [f"{what} {how}" for what in ("a", "a'", "a''") for how in ("begins", "is written")]


@pytest.mark.contract("CAN-1")
@pytest.mark.parametrize("how", ["rotate", "cancel", "skip"])
async def test_an_activity_whose_step_is_closed_writes_no_more(variant: EngineVariant, how: str) -> None:
    """Neither on its way out nor later: its run goes on, on the same node."""
    app, endings = hf.App("press"), list[str]()
    ended = asyncio.Event()

    @app.activity
    async def write(what: str) -> None:
        out = hf.stream("tokens")
        await out.write(what)
        if what == "new":
            return
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await out.write("late")
                endings.append("written")
            except asyncio.CancelledError:
                endings.append("refused")
                raise
            finally:
                ended.set()

    @app.workflow
    async def turning(what: str) -> str:
        call = asyncio.ensure_future(write(what))
        if what == "old":
            await hf.wait_signal("turn")
            if how == "rotate":
                hf.continue_as_new("new")
            if how == "cancel":
                call.cancel()
            await asyncio.wait({call})
            await write("new")
        else:
            await call
        return "done"

    async with variant.node(app):
        run = await app.start(turning, "old")
        await has(run, 1)
        if how == "skip":
            await run.skip_step("write", actor="ann")
        await run.signal("turn")
        assert await run.result() == "done"
        async with asyncio.timeout(MOST_SECONDS):
            await ended.wait()
        assert endings == ["refused"]
        assert values(await read(run)) == ["old", "new"]


@pytest.mark.contract("WF-4")
async def test_a_fork_and_a_run_that_is_tried_again_begin_without(variant: EngineVariant) -> None:
    press = Press()
    press.is_broken = True
    async with variant.node(press.app):
        run = await press.app.start(press.paper, "a")
        with pytest.raises(RunFailed):
            await run.result()
        press.is_broken = False
        press.may_end.set()
        fork = await run.fork()
        assert await fork.result() == "a"
        assert values(await read(fork)) == ["a 0", "a 1", "a 2"]
        assert values(await read(fork, "progress")) == ["a is written"]
        kept = await run.retry_run(actor="ann")
        assert await kept.result() == "a"
        assert values(await read(kept)) == ["a 0", "a 1", "a 2"]
        assert values(await read(kept, "progress")) == ["a is written"]
        again = await run.retry_run(from_start=True, actor="ann")
        assert await again.result() == "a"
        assert values(await read(again, "progress")) == ["a begins", "a is written"]
        assert values(await read(run)) == ["a 0", "a 1", "a 2"]
        assert values(await read(run, "progress")) == ["a begins"]


@pytest.mark.contract("SIG-13")
async def test_a_step_that_an_operator_has_tried_again_begins_anew(variant: EngineVariant) -> None:
    press = Press()
    press.is_broken = True
    careful = press.write.options(on_failure="pause")

    @press.app.workflow
    async def letter() -> str:
        return await careful("a", 3)

    async with variant.node(press.app):
        run = await press.app.start(letter)
        await wait_for_status(run, RunStatus.PAUSED)
        press.is_broken = False
        press.may_end.set()
        await run.retry_step("write", actor="ann")
        assert await run.result() == "a"
        chunks = await read(run)
        assert values(chunks) == [f"a {number}" for number in (0, 1, 2, 0, 1, 2)]
        assert [chunk.restarted_from for chunk in chunks] == [None, None, None, 1, None, None]


@pytest.mark.contract("FMT-2")
async def test_retention_deletes_streams_with_their_run_and_leaves_others(variant: EngineVariant) -> None:
    """Also where the id is used again: that run's streams begin at 1."""
    press = Press()
    async with variant.opened() as store, variant.node(press.app, store):
        press.may_end.set()
        done = await press.app.start(press.paper, "a", run_id="one")
        await done.result()
        press.may_end.clear()
        live = await press.writing("b")
        assert (await store.purge(NOW)).runs == 1
        with pytest.raises(NotFound):
            await read(done)
        press.may_end.set()
        assert await live.result() == "b"
        assert values(await read(live)) == ["b 0", "b 1", "b 2"]
        again = await press.app.start(press.paper, "c", run_id="one")
        await again.result()
        assert values(await read(again)) == ["c 0", "c 1", "c 2"]


@pytest.mark.parametrize("how", ["cancel", "terminate"])
async def test_streams_of_a_run_that_is_ended_stay_as_they_are(variant: EngineVariant, how: str) -> None:
    press = Press()
    async with variant.node(press.app):
        run = await press.writing("a")
        await getattr(run, how)()
        await wait_for_status(run, RunStatus.CANCELLED)
        assert values(await read(run)) == ["a 0", "a 1", "a 2"]


async def test_what_is_written_while_a_run_is_paused_is_read(variant: EngineVariant) -> None:
    press = Press()
    async with variant.node(press.app):
        run = await press.writing("a", 0)
        await run.pause(actor="ann")
        await wait_for_status(run, RunStatus.PAUSED)
        press.may_end.set()
        await wait_for_event(run, "StepCompleted")
        await has(run, 3)
        await run.resume(actor="ann")
        assert await run.result() == "a"
        assert values(await read(run, "progress")) == ["a begins", "a is written"]


@pytest.mark.contract("API-4")
async def test_a_run_of_the_same_name_in_another_tenant_has_streams_of_its_own(variant: EngineVariant) -> None:
    press = Press()
    press.may_end.set()
    async with variant.node(press.app):
        tenants = ("acme", "zeta")
        runs = [await press.app.start(press.paper, tenant, tenant=tenant, request_id="r") for tenant in tenants]
        for run, tenant in zip(runs, tenants, strict=True):
            assert await run.result() == tenant
            assert values(await read(run)) == [f"{tenant} {number}" for number in range(3)]


@pytest.mark.contract("SEC-2")
async def test_chunks_are_sealed_and_read_by_who_has_their_key(tmp_path: Path) -> None:
    """Those of activities and of workflows, also where another key seals new ones."""
    address = f"sqlite:///{tmp_path / 'press.db'}"
    k1, both = {"k1": b"1" * 32}, {"k2": b"2" * 32, "k1": b"1" * 32}
    word = "Kaninchenstall"

    def is_there(text: str) -> bool:
        return any(text.encode() in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())

    for keys in (k1, both):
        press = Press(codecs=[hf.Encryption(keys)])
        async with asyncio.timeout(60), press.app.node(address, options=hf.NodeOptions(cached_runs=0)):
            run = await press.writing(word, run_id=f"sealed with {len(keys)}")
            assert not is_there(word)
            press.may_end.set()
            await run.result()
            for run_id in {"sealed with 1", run.run_id}:
                assert values(await read(press.app.run(run_id))) == [f"{word} {number}" for number in range(3)]
                told = [f"{word} begins", f"{word} is written"]
                assert values(await read(press.app.run(run_id), "progress")) == told
    assert not is_there(word)
    stranger = hf.App("stranger")
    async with asyncio.timeout(60), stranger.connect(address):
        with pytest.raises(PayloadUnreadable):
            await read(stranger.run("sealed with 1"))


@pytest.mark.contract("STO-1")
async def test_a_copy_has_the_streams_and_readers_go_on_there(tmp_path: Path) -> None:
    """The next attempt, there, begins anew, and says from where on."""
    press = Press(hf.Retry(initial_ms=1))
    here, there = [await SqliteStore.open(tmp_path / f"{name}.db") for name in ("here", "there")]
    options = hf.NodeOptions(drain_s=0.0)
    try:
        for store in (here, there):
            await store.migrate()
        async with asyncio.timeout(60), press.app.node(here, options=options):
            run_id = (await press.writing("a")).run_id
        await copy_store(here, there)
        async with asyncio.timeout(60), press.app.connect(there):
            async with asyncio.timeout(5):
                async for chunk in press.app.run(run_id).stream("tokens", after=1):
                    if chunk.seq == 3:
                        break
        press.may_end.set()
        async with asyncio.timeout(60), press.app.node(there, options=options):
            run = press.app.run(run_id)
            assert (await run.result(), values(await read(run, "progress"))) == ("a", ["a begins", "a is written"])
            chunks = await read(run)
            assert values(chunks) == [f"a {number}" for number in (0, 1, 2, 0, 1, 2)]
            assert [chunk.restarted_from for chunk in chunks] == [None, None, None, 1, None, None]
    finally:
        await here.close()
        await there.close()
