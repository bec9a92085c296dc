"""The benchmark of scale runs with small numbers, and what it measures is what it says."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from bench import filled, scale
from holdfast.store.port import RunQuery
from holdfast.store.sqlite import SqliteStore

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.process
def test_every_figure_is_measured(tmp_path: Path) -> None:
    sizes = ("--finished", "2000", "--parked", "400", "--timers", "60", "--signals", "60", "--fan-out", "30")
    command = [sys.executable, "-m", "bench.scale", *sizes, "--runs", "60", "--nodes", "1", "--store", "sqlite"]
    where = ("--json", str(tmp_path / "figures.json"), "--dir", str(tmp_path))
    done = subprocess.run([*command, *where], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["results"]
    assert list(results["sqlite by size"]) == [
        f"{finished:,} finished, {waiting:,} wait" for finished, waiting in scale.stages(2_000, 400)
    ]
    largest = results["sqlite by size"]["2,000 finished, 400 wait"]
    assert {"runs/s", "CPU µs/run", "signals/s", "list ms", "counts ms", "resident MB", "GB"} <= largest.keys()
    assert len(results["sqlite bursts"]) == 4
    figures = [row[name] for rows in results.values() for row in rows.values() for name in row if name != "idle CPU %"]
    assert all(figure > 0 for figure in figures)
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"], "nothing is left behind"


async def test_a_filled_file_holds_finished_runs_with_their_events_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "filled.db"
    store = await SqliteStore.open(path)
    await store.migrate()
    try:
        filled.fill_file(path, 1, 30)
        filled.fill_file(path, 31, 50)
        runs = await store.find(RunQuery(limit=100))
        events = [await store.read_events(run.run_id) for run in runs]
    finally:
        await store.close()

    assert {run.run_id for run in runs} == {f"filled-{number}" for number in range(1, 51)}
    assert all(len(of_run) == 9 for of_run in events)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
