"""SQLite commits turns without reading their runs first, and is never wrong about them because of it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.store.port import CommitConflict, Committed, Turn
from holdfast.store.sqlite import SqliteStore
from holdfast.store.sqlite.commit import BATCHES_AROUND, NUMBERS_KEPT
from holdfast.testing.samples import SampleNode, activity, complete, read_history, signal, timer, wait

LOOK = "SELECT run_id, run_no, version"


class Scene:
    """A store, a node, and the statements that were executed."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.node = SampleNode(store)
        self.statements: list[str] = []
        self.database: sqlite3.Connection = store._database.connection
        self.database.set_trace_callback(self.statements.append)

    async def commit(self, *turns: Turn) -> tuple[list[bool], bool]:
        """Commit turns; return which of them won, and whether their runs were read first."""
        self.statements.clear()
        answers = await self.store.commit(turns)
        has_looked = any(statement.startswith(LOOK) for statement in self.statements)
        return [isinstance(answer, Committed) for answer in answers], has_looked

    async def next_turn(self, run_id: str) -> Turn:
        """Return a turn of a run as it is now."""
        return await self.node.turn(await self.node.load(run_id), activity(f"more-{run_id}"))

    async def events(self, run_id: str) -> int:
        """Return how many events a run has."""
        return len(await read_history(self.store, run_id))


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    store = await SqliteStore.open(tmp_path / "store.db")
    await store.migrate()
    yield Scene(store)
    await store.close()


@pytest.mark.contract("STO-1", "OWN-1")
async def test_turns_that_are_expected_are_committed_without_a_look(scene: Scene) -> None:
    for run_id in ("a", "b"):
        await scene.node.start(run_id, activity("charge"))
    assert await scene.commit(await scene.next_turn("a"), await scene.next_turn("b")) == ([True, True], False)
    last = await scene.node.turn(await scene.node.load("a"), complete())
    assert await scene.commit(last) == ([True], False)
    assert (await scene.node.load("a")).head.finished_at is not None


@pytest.mark.contract("OWN-1", "OWN-3", "MSG-2")
async def test_a_turn_that_lost_its_run_leaves_nothing_and_others_win(scene: Scene) -> None:
    for run_id in ("a", "b"):
        await scene.node.start(run_id, activity("charge"))
    turns = [await scene.next_turn(run_id) for run_id in ("a", "b")]
    await scene.store.release("node-a", ["a"])
    before = await scene.events("a")
    other = SampleNode(scene.store, "node-b")
    assert await other.claim() != []
    [lost, won] = await scene.store.commit(turns)
    assert isinstance(lost, CommitConflict)
    assert lost.reason == "epoch"
    assert isinstance(won, Committed)
    assert await scene.events("a") == before
    assert (await scene.node.load("a")).head.lease_owner == "node-b"


@pytest.mark.contract("OWN-1", "MSG-2")
async def test_a_turn_that_is_committed_again_is_recognised_and_a_stale_one_is_not(scene: Scene) -> None:
    await scene.node.start("a", activity("charge"))
    turn, stale = await scene.next_turn("a"), await scene.node.turn(await scene.node.load("a"), timer(5))
    assert await scene.commit(turn) == ([True], False)
    assert await scene.commit(turn) == ([True], True)
    assert await scene.commit(stale) == ([False], True)
    assert await scene.events("a") == turn.expected_version + len(turn.events)


@pytest.mark.contract("SIG-1", "MSG-2")
async def test_a_signal_that_came_meanwhile_keeps_its_run_ready(scene: Scene) -> None:
    await scene.node.start("a", wait("go"), activity("charge"))
    turn = await scene.next_turn("a")
    await scene.store.deliver([signal("a", "go")])
    assert await scene.commit(turn) == ([True], True)
    [claimed] = await scene.node.claim()
    assert [waiting.name for waiting in claimed.signals] == ["go"]


@pytest.mark.contract("TMR-1")
async def test_a_run_with_a_timer_stays_due(scene: Scene) -> None:
    due_at = await scene.store.now() + 3_600_000_000
    await scene.node.start("a", timer(due_at), activity("charge"))
    assert (await scene.commit(await scene.next_turn("a")))[0] == [True]
    assert (await scene.node.load("a")).head.ready_at == due_at


@pytest.mark.contract("OWN-1", "STO-1")
async def test_a_number_that_is_another_runs_by_now_harms_nobody(scene: Scene) -> None:
    """A creation was rolled back, or a run was purged, and its number was given to another run."""
    for run_id in ("a", "b"):
        await scene.node.start(run_id, activity("charge"))
    numbers = dict(scene.database.execute("SELECT run_id, run_no FROM runs"))
    scene.store._short_cut._numbers["a"] = numbers["b"]
    before = await scene.events("b")
    turn = await scene.next_turn("a")
    assert await scene.commit(turn) == ([True], True)
    assert await scene.events("b") == before
    assert await scene.events("a") == turn.expected_version + len(turn.events)


@pytest.mark.contract("OWN-1")
async def test_two_turns_of_one_run_in_a_batch_take_the_long_way(scene: Scene) -> None:
    await scene.node.start("a", activity("charge"))
    first, second = await scene.next_turn("a"), await scene.node.turn(await scene.node.load("a"), timer(5))
    assert await scene.commit(first, second) == ([True, False], True)


async def test_after_a_batch_that_had_to_be_undone_some_take_the_long_way(scene: Scene) -> None:
    await scene.node.start("a", activity("charge"))
    turn = await scene.next_turn("a")
    await scene.commit(turn)
    assert await scene.commit(turn) == ([True], True)
    looks = [(await scene.commit(await _empty_turn(scene, "a")))[1] for _ in range(BATCHES_AROUND + 1)]
    assert looks == [True] * BATCHES_AROUND + [False]


async def _empty_turn(scene: Scene, run_id: str) -> Turn:
    return await scene.node.turn(await scene.node.load(run_id))


async def test_not_all_numbers_are_kept(scene: Scene) -> None:
    for run_id in ("a", "b"):
        await scene.node.start(run_id, activity("charge"))
    await scene.commit(await scene.next_turn("a"))
    numbers = scene.store._short_cut._numbers
    del numbers["b"]
    numbers.update({f"run-{number}": number for number in range(NUMBERS_KEPT)})
    assert await scene.commit(await scene.next_turn("b")) == ([True], False)
    assert set(numbers) == {"b"}
    assert await scene.commit(await scene.node.turn(await scene.node.load("b"), complete())) == ([True], False)
    assert not numbers
