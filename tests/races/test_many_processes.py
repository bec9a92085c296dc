"""Many processes on one file: they wait for each other, and nobody is told that the database is locked."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.snapshot import runtime_snapshot
from holdfast.core.state import state_of
from holdfast.store.port import RunQuery
from tests.races import players
from tests.races.builders import GENEROUS, history, opened, prepare
from tests.races.stage import play

pytestmark = pytest.mark.slow


@pytest.mark.contract("STO-3")
async def test_processes_that_write_hard_never_see_a_lock_and_everything_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path)

    played = play(players.write_hard, processes=4, threads=2, path=path, seconds=3.0)

    assert all(counts["runs"] for counts in played), "nobody starves"
    total = {name: sum(counts[name] for counts in played) for name in played[0]}
    async with opened(path) as store:
        stats = await store.stats()
        assert sum(stats.runs.values()) == total["runs"]
        assert stats.runs.get("COMPLETED", 0) == total["finished"]
        signals = events = 0
        after = ""
        while heads := await store.find_runs(RunQuery(after=after, limit=GENEROUS.page_items)):
            after = heads[-1].run_id
            signals += sum(head.inbox_seq for head in heads)
            events += sum(head.version for head in heads)
            head = heads[0]
            state = state_of(head.run_id, await history(store, head.run_id))
            assert head.snapshot == runtime_snapshot(state)
    assert (signals, events) == (total["signals"], total["events"])


@pytest.mark.contract("STO-3")
def test_a_fresh_file_is_migrated_once_whoever_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    versions = play(players.migrate, processes=8, path=path)

    assert len(versions) == 8
    assert len(set(versions)) == 1
    assert versions[0] >= 1


@pytest.mark.contract("STO-3")
async def test_what_processes_wrote_during_a_simultaneous_migration_is_there(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    play(players.migrate, processes=4, threads=2, path=path)

    async with opened(path) as store:
        heads = await store.find_runs(RunQuery())
    assert [head.run_id for head in heads] == [f"run-{number}" for number in range(8)]
