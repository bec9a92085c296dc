"""One file under several names, callers that are cancelled, and work that is interrupted."""

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.bus import Sink
from holdfast.core.dead_letters import Settled
from holdfast.engine.inbox.receipts import receipt_of
from holdfast.errors import InvalidInput, StoreCorrupt, StoreUnavailable, StoreUnsafe
from holdfast.store.port import Accepted, Created, Duplicate, Refused, RunQuery
from holdfast.store.queries import DeadLetterQuery
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, activity, job, message, new_run, signal, wait
from holdfast.testing.store_suite.jobs import put


async def opened(path: Path, clock: VirtualClock | None = None) -> SqliteStore:
    store = await SqliteStore.open(path, clock=clock)
    await store.migrate()
    return store


def change(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(script)


@pytest.mark.contract("STO-1")
async def test_a_hard_link_is_refused(tmp_path: Path) -> None:
    await (await opened(tmp_path / "a.db")).close()
    os.link(tmp_path / "a.db", tmp_path / "b.db")
    for name in ("a.db", "b.db"):
        with pytest.raises(StoreUnsafe, match="hard link"):
            await SqliteStore.open(tmp_path / name)


@pytest.mark.contract("STO-1", "STO-3")
async def test_a_symbolic_link_is_the_same_store(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    store = await opened(tmp_path / "real" / "a.db")
    await store.create([new_run("run-1")])
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "a.db")
    linked = await opened(tmp_path / "link.db")
    assert (await linked.load(["run-1"])) == (await store.load(["run-1"]))
    listener = store.wakeups.listen()
    await linked.deliver([signal("run-1")])
    assert await listener.wait(2.0)
    await linked.close()
    await store.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link.db", "real"]


@pytest.mark.contract("STO-1")
@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
async def test_an_impossible_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreUnavailable):
        await SqliteStore.open(tmp_path / name)


@pytest.mark.contract("SIG-3")
async def test_a_delivery_whose_caller_was_cancelled_still_notifies(tmp_path: Path) -> None:
    store = await opened(tmp_path / "a.db")
    await store.create([new_run("run-1")])
    listener = store.wakeups.listen()
    await asyncio.sleep(0)
    await listener.wait(0.01)
    sending = asyncio.create_task(store.deliver([signal("run-1")]))
    await asyncio.sleep(0)
    sending.cancel()
    assert await listener.wait(2.0)
    [run] = await store.load(["run-1"])
    assert run is not None
    assert len(run.signals) == 1
    await store.close()


@pytest.mark.contract("STO-3")
async def test_an_interrupt_in_the_middle_of_work_leaves_the_store_usable(tmp_path: Path) -> None:
    class Interrupting(VirtualClock):
        interrupts = False

        def now(self) -> int:
            if self.interrupts:
                self.interrupts = False
                raise KeyboardInterrupt
            return super().now()

    clock = Interrupting()
    store = await opened(tmp_path / "a.db", clock)
    database = store._database
    database._flusher = asyncio.ensure_future(asyncio.sleep(0))  # flushed by hand: an interrupt would end the loop
    writing = asyncio.ensure_future(store.create([new_run("lost")]))
    await asyncio.sleep(0)
    clock.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        await database._flush_once()
    with pytest.raises(StoreUnavailable, match="interrupted"):
        await writing
    database._flusher = None
    assert not database.connection.in_transaction
    [created] = await store.create([new_run("run-1")])
    assert isinstance(created, Created)
    assert await store.load(["lost"]) == [None]
    await store.close()


OOPS = b"{oops \xff"


@pytest.mark.contract("MSG-3", "INV")
@pytest.mark.parametrize("kind", ["TEXT", "BLOB"])
async def test_a_message_that_cannot_be_read_becomes_a_dead_letter_with_its_bytes(tmp_path: Path, kind: str) -> None:
    store = await opened(tmp_path / "a.db", clock=VirtualClock())
    await store.create([new_run("bad"), new_run("good")])
    await store.deliver([message("bad", "m-1")])
    oops = f"CAST(x'{OOPS.hex()}' AS {kind})"
    change(tmp_path / "a.db", f"UPDATE messages SET message = {oops} WHERE signal_id = 'm-1'")
    claimed = await SampleNode(store).claim()
    assert [run.head.run_id for run in claimed] == ["bad", "good"]
    assert [waiting.signal_id for waiting in claimed[0].messages] == ["start"]
    [letter] = await store.find(DeadLetterQuery())
    assert (letter.run_id, letter.envelope, letter.reason, letter.node) == ("bad", OOPS, "undecodable", "node-a")
    assert (letter.detail, letter.died_at) == ("message 'm-1' cannot be read", await store.now())
    [refused] = await store.settle_dead_letters([letter.letter_id], "requeue")
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, InvalidInput)
    assert await store.settle_dead_letters([letter.letter_id], "drop") == [Settled(letter.letter_id, "drop")]
    await store.close()


@pytest.mark.contract("MSG-3", "SIG-12", "INV")
async def test_a_signal_that_cannot_be_read_becomes_a_dead_letter_and_its_sender_can_find_out(tmp_path: Path) -> None:
    store = await opened(tmp_path / "a.db", clock=VirtualClock())
    await store.create([new_run("bad")])
    request = signal("bad", "go", "payload", signal_id="s-1")
    [accepted] = await store.deliver([request])
    assert isinstance(accepted, Accepted)
    assert accepted.result is not None
    sent = ("bad", "go", "s-1", accepted.result.signal_storage_key)
    assert (await receipt_of(store, *sent)).status == "accepted"
    change(tmp_path / "a.db", "UPDATE signals SET payload = '{oops'")
    [run] = await SampleNode(store).claim()
    assert run.signals == ()
    receipt = await receipt_of(store, *sent)
    assert (receipt.status, receipt.consumed_at_event) == ("dead-lettered", None)
    assert receipt.reason == "undecodable: the payload of signal 'go', 's-1' cannot be read"
    assert isinstance((await store.deliver([request]))[0], Duplicate)  # what was promised stands
    await store.close()


@pytest.mark.contract("MSG-3", "INV")
async def test_a_run_whose_own_row_makes_no_sense_is_put_aside(tmp_path: Path) -> None:
    store = await opened(tmp_path / "a.db", clock=VirtualClock())
    await store.create([new_run("bad"), new_run("good")])
    change(tmp_path / "a.db", "UPDATE runs SET tags = '{oops' WHERE run_id = 'bad'")
    node = SampleNode(store)
    assert [run.head.run_id for run in await node.claim(1)] == []
    assert [run.head.run_id for run in await node.claim(1)] == ["good"]
    change(tmp_path / "a.db", "UPDATE runs SET tags = '[]' WHERE run_id = 'bad'")
    [head] = [head for head in await store.find(RunQuery()) if head.run_id == "bad"]
    assert (head.lease_owner, head.ready_at) == (None, await store.now() + 60_000_000)
    await store.close()


@pytest.mark.contract("MSG-3", "INV")
async def test_a_job_that_makes_no_sense_is_put_aside(tmp_path: Path) -> None:
    store = await opened(tmp_path / "a.db", clock=VirtualClock())
    await put(SampleNode(store), job("bad"), job("good"))
    change(tmp_path / "a.db", "UPDATE jobs SET job = '{oops' WHERE run_no = 1")
    assert await store.acquire_jobs("node-b", ["mail"], ["charge"], 1, 1_000) == []
    assert await store.acquire_jobs("node-b", ["mail"], ["charge"], 1, 1_000) == [job("good")]
    assert (await store.stats()).jobs == 2
    await store.close()


@pytest.mark.contract("FMT-1", "INV")
async def test_jobs_that_a_node_without_queues_left_behind_are_not_taken(tmp_path: Path) -> None:
    """Code of format 1 neither deletes the jobs of a run that it finishes, nor those of one that it purges."""
    store = await opened(tmp_path / "a.db", clock=VirtualClock())
    node = SampleNode(store)
    await put(node, job("living"), job("finished"), job("finished", "other"), job("purged"))
    change(
        tmp_path / "a.db",
        """
        UPDATE runs SET finished_at = updated_at, status = 'COMPLETED' WHERE run_id = 'finished';
        DELETE FROM events WHERE run_no = (SELECT run_no FROM runs WHERE run_id = 'purged');
        DELETE FROM waits WHERE run_no = (SELECT run_no FROM runs WHERE run_id = 'purged');
        DELETE FROM runs WHERE run_id = 'purged';
        """,
    )
    assert (await node.start("next", wait("go"))).head.run_id == "next"
    assert await store.acquire_jobs("node-b", ["mail"], ["charge"], 10, 1_000) == [job("living")]
    assert (await store.stats()).jobs == 1
    await store.close()


@pytest.mark.contract("STO-3")
async def test_only_sockets_are_removed_from_the_wake_folder(tmp_path: Path) -> None:
    store = await opened(tmp_path / "a.db")
    folder = tmp_path / "a.db-wake"
    folder.mkdir()
    (folder / "note.txt").write_text("mine")
    await store.create([new_run("run-1")])
    await SampleNode(store).start("run-2", activity("charge"))
    await asyncio.sleep(0)
    assert (folder / "note.txt").read_text() == "mine"
    await store.close()


@pytest.mark.contract("STO-3")
async def test_a_damaged_row_that_was_met_does_not_keep_the_store_from_writing(tmp_path: Path) -> None:
    """Even while the error is kept, and another process writes: what was being read is let go of."""
    path = tmp_path / "a.db"
    store = await SqliteStore.open(path, busy_ms=500)
    await store.migrate()
    node = SampleNode(store)
    for name in ("a", "b", "c"):
        await node.create(name)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE runs SET snapshot = '{oops' WHERE run_id = 'b'")
    with pytest.raises(StoreCorrupt) as kept:
        await store.load(["a", "b", "c"])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE runs SET updated_at = 1 WHERE run_id = 'a'")
    assert await store.renew("node-2", 1_000) > 0
    assert kept.value is not None
    await store.close()


async def test_other_connections_of_the_process_bind_values_as_before(tmp_path: Path) -> None:
    await (await opened(tmp_path / "a.db")).close()
    with closing(sqlite3.connect(":memory:")) as db:
        bound = db.execute("SELECT ?1, ?2, typeof(?2), ?3", (None, True, b"\0")).fetchone()
    assert bound == (None, 1, "integer", b"\0")


async def test_an_adapter_that_the_process_has_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters: dict[Any, Any] = sqlite3.adapters
    monkeypatch.setitem(adapters, (bool, sqlite3.PrepareProtocol), str)
    store = await opened(tmp_path / "a.db")
    with closing(sqlite3.connect(":memory:")) as db:
        assert db.execute("SELECT ?", (True,)).fetchone() == ("True",)
    await store.close()


@pytest.mark.contract("BUS-1")
async def test_without_a_sink_no_trigger_stands_in_the_way_of_turns(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"

    def triggers() -> set[str]:
        with closing(sqlite3.connect(path)) as db:
            named = db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'outbox%'")
            return {name for (name,) in named} - {"outbox_purge"}

    store = await SqliteStore.open(path)
    await store.migrate()
    assert triggers() == set()
    await store.put_sink(Sink(name="orders", kind="nats", address="nats://bus.test/events"))
    await store.put_sink(Sink(name="audit", kind="nats", address="nats://bus.test/events"))
    assert triggers() == {"outbox_turn", "outbox_run"}
    await store.remove_sink("orders")
    assert triggers() == {"outbox_turn", "outbox_run"}
    await store.remove_sink("audit")
    assert triggers() == set()
    await store.close()
