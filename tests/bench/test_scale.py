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
from bench.engine import app
from holdfast.clock import SystemClock
from holdfast.core.events import RunStatus
from holdfast.core.keys import event_id
from holdfast.engine.observe.doctor import examine
from holdfast.store.health import Bounds
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
    assert {"runs/s", "CPU µs/run", "signals/s", "newest, CPU ms", "counts, CPU ms", "GB"} <= largest.keys()
    assert len(results["sqlite bursts"]) == 4
    figures = [row[name] for rows in results.values() for row in rows.values() for name in row if name[:4] != "idle"]
    assert all(figure > 0 for figure in figures)
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"], "nothing is left behind"


async def test_copies_in_a_file_are_what_the_engine_would_have_written(tmp_path: Path) -> None:
    """Their histories are whole and belong to them, they differ from their model in ids and instants alone."""
    path = tmp_path / "filled.db"
    store = await SqliteStore.open(path)
    await store.migrate()
    model = await filled.finished_model(store)
    await store.close()
    filled.fill_file(path, model, "first-", 1, 30)
    filled.fill_file(path, model, "second-", 1, 20)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    store = await SqliteStore.open(path)
    try:
        report = await examine(store, SystemClock(), bounds=Bounds(sample_runs=100))
        runs = await store.find(RunQuery(limit=100))
        shapes = {run.run_id: await shape(store, run.run_id) for run in runs}
    finally:
        await store.close()
    assert report.runs_read == 51
    assert [finding for finding in report.findings if finding.subject == "runs" and finding.level != "fine"] == []
    assert set(shapes) == {model} | {
        f"{prefix}-{n:012}" for prefix, of in (("first", 30), ("second", 20)) for n in range(1, of + 1)
    }
    assert all(each == shapes[model] for each in shapes.values())


async def shape(store: SqliteStore, run_id: str) -> list[object]:
    """Return what is the same in all copies of a run, with the instants as they lie to each other."""
    events = await store.read_events(run_id)
    begun = events[0].emitted_at
    for event in events:
        assert event.event_id == event_id(event.idempotency_key)
    places = {event.event_id: place for place, event in enumerate(events)}
    return [
        (event.event_type, event.step_id, event.data, event.emitted_at - begun, places.get(event.parent_event_id or ""))
        for event in events
    ]


async def test_copies_of_a_run_that_waits_can_be_signalled(tmp_path: Path) -> None:
    path = tmp_path / "filled.db"
    _, waits = await scale.models(f"sqlite:///{path}")
    filled.fill_file(path, waits, scale.WAITING, 1, 5)
    async with app.node(f"sqlite:///{path}"):
        run = app.run(filled.copy_id(scale.WAITING, 4))
        await run.signal("go", True)
        assert await run.result() is True
        ended = await app.runtime().store.find(RunQuery(status=RunStatus.COMPLETED, limit=10))
    assert {head.plan_id for head in ended} == {"steps", "waiting"}
    assert [head.run_id for head in ended if head.plan_id == "waiting"] == ["waiting-000000000004"]


async def test_what_has_no_known_rule_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "filled.db"
    store = await SqliteStore.open(path)
    await store.migrate()
    model = await filled.finished_model(store)
    await store.close()
    with closing(sqlite3.connect(path)) as db:
        changes = {
            "mentioned within": "UPDATE events SET data = json_object('run', :run) WHERE run_seq = 4",
            "the key of event 4": "UPDATE events SET idempotency_key = x'00' WHERE run_seq = 4",
            "rows in messages": "INSERT INTO messages SELECT run_no, 'a', 1, '' FROM runs",
            "is not at rest": "UPDATE runs SET ready_at = 1",
        }
        for number, (problem, change) in enumerate(changes.items()):
            copy = tmp_path / f"{number}.db"
            db.execute("VACUUM INTO ?", (str(copy),))
            with closing(sqlite3.connect(copy)) as changed:
                changed.execute(change, {"run": model} if ":run" in change else ())
                changed.commit()
            with pytest.raises(filled.NotCopied, match=problem):
                filled.fill_file(copy, model, "copy-", 1, 1)
