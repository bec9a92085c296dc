"""Many processes on one file: they wait for each other, and nobody is told that the database is locked."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.admission import RunLimit
from holdfast.core.invariants import check
from holdfast.store.port import Created, RunQuery
from holdfast.testing import system_view
from holdfast.testing.samples import SampleNode, new_run, timer
from tests.races import contenders
from tests.races.parallel import run_in_parallel
from tests.races.stores import HOUR_MS, opened, prepare

pytestmark = pytest.mark.slow


@pytest.mark.contract("STO-3", "INV")
async def test_processes_that_write_hard_never_see_a_lock_and_everything_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path)

    played = run_in_parallel(contenders.write_hard, processes=4, threads=2, path=path, seconds=3.0)

    print(played)
    assert all(counts["runs"] for counts in played), "nobody starves"
    total = {name: sum(counts[name] for counts in played) for name in played[0]}
    async with opened(path) as store:
        stats = await store.stats()
        view = await system_view(store)
    assert len(view.runs) == sum(stats.runs.values()) == total["runs"]
    assert stats.runs.get("COMPLETED", 0) == total["finished"]
    assert sum(len(run.signals) for run in view.runs) == total["signals"]
    assert sum(len(run.events) for run in view.runs) == total["events"]
    assert check(view) == []


@pytest.mark.contract("QUE-2", "QUE-3", "STO-3")
@pytest.mark.parametrize("limit", [RunLimit(at_once=3), RunLimit(at_once=5, per_key=1)])
async def test_no_more_runs_are_inside_than_allowed_and_nobody_waits_for_ever(tmp_path: Path, limit: RunLimit) -> None:
    path = tmp_path / "store.db"
    await prepare(path)

    played = run_in_parallel(contenders.pass_admission, processes=4, path=path, runs=25, limit=limit)

    most = max(count for counts in played for count in counts)
    assert 1 <= most <= (limit.at_once or 0)
    async with opened(path) as store:
        stats = await store.stats()
        assert (stats.runs, stats.queued) == ({"COMPLETED": 100}, 0)
        assert await store.admit({"order": limit}, 9) == ([], None)


@pytest.mark.contract("STO-1", "MSG-2")
async def test_a_run_is_never_seen_in_the_middle_of_a_turn(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path)
    async with opened(path) as store:
        await SampleNode(store, "node-0", HOUR_MS).start("run-1", timer(1))

    _, *looks = run_in_parallel(contenders.turn_or_look, processes=3, path=path, run_id="run-1", turns=120)

    assert all(looks)


@pytest.mark.contract("STO-3")
async def test_a_fresh_file_is_migrated_once_whoever_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    versions = run_in_parallel(contenders.migrate, processes=8, path=path)

    assert len(versions) == 8
    assert len(set(versions)) == 1
    async with opened(path) as store:
        heads = await store.find(RunQuery())
        (again,) = await store.create([new_run("run-8")])
    assert [head.run_id for head in heads] == [f"run-{number}" for number in range(8)]
    assert isinstance(again, Created)
