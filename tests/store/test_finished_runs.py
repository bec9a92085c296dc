"""What operators, charts and housekeeping ask costs as much with many finished runs as with few."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bench import filled
from holdfast.clock import SystemClock
from holdfast.core.events import RunStatus
from holdfast.engine.observe.doctor import examine
from holdfast.engine.observe.samples import take_sample
from holdfast.store import port, search
from holdfast.store.health import Bounds
from holdfast.store.port import RunCountQuery, RunQuery
from holdfast.store.sqlite import SqliteStore

FEW, MANY = 1_500, 15_000
STEPS = 100
MINUTE_US = 60_000_000


async def filled_store(path: Path, runs: int) -> SqliteStore:
    store = await SqliteStore.open(path)
    await store.migrate()
    model = await filled.finished_model(store)
    await store.close()
    filled.fill_file(path, model, filled.prefix_of(model), 1, runs - 1)
    return await SqliteStore.open(path)


async def effort_of(store: SqliteStore) -> dict[str, int]:
    """Return how many steps of SQLite's machine each question takes, in hundreds."""
    store._list = store._read  # type: ignore[method-assign]  # on the connection that is looked at
    taken = [0]

    def note() -> int:
        taken[0] += 1
        return 0

    async def sample() -> None:
        now = await store.now() + 2 * MINUTE_US  # what has ended since the sample before is counted, and costs that
        await take_sample(store, now - MINUTE_US, now)

    await store.renew("looking", 60_000)
    asks: dict[str, Callable[[], Awaitable[object]]] = {
        "stats": store.stats,
        "health": lambda: store.health(Bounds(sample_runs=20)),
        "health sample": sample,
        "doctor": lambda: examine(store, SystemClock(), bounds=Bounds(sample_runs=0)),
        "orphaned": lambda: store.find_orphaned(0),
        "claim": lambda: store.claim("looking", 100),
        "next due": lambda: store.next_due("looking"),
        "newest": lambda: store.find(RunQuery(newest=True, limit=50)),
        "failed": lambda: store.find(RunQuery(newest=True, limit=50, status=RunStatus.FAILED)),
        "counts": lambda: store.find(RunCountQuery(runs=RunQuery(), look=500, limit=50)),
    }
    effort: dict[str, int] = {}
    store._database.connection.set_progress_handler(note, STEPS)
    for name, ask in asks.items():
        taken[0] = 0
        await ask()
        effort[name] = taken[0]
    store._database.connection.set_progress_handler(None, 0)
    return effort


@pytest.mark.contract("STO-1")
async def test_what_is_asked_costs_the_same_with_ten_times_the_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "COUNTED_RUNS", 1_000)
    monkeypatch.setattr(search, "FEW", 100)
    few, many = await filled_store(tmp_path / "few.db", FEW), await filled_store(tmp_path / "many.db", MANY)
    try:
        effort, effort_of_many = await effort_of(few), await effort_of(many)
    finally:
        await few.close()
        await many.close()
    grown = {name: (effort[name], taken) for name, taken in effort_of_many.items() if taken > 1.3 * effort[name] + 10}
    assert grown == {}


@pytest.mark.contract("STO-1")
async def test_many_completed_runs_are_estimated_and_few_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    store = await filled_store(path, MANY)
    try:
        counted = await store.stats()
        assert (counted.runs, counted.completed_is_estimated) == ({"COMPLETED": MANY}, False)
        monkeypatch.setattr(port, "COUNTED_RUNS", 1_000)
        estimated = await store.stats()
        assert (estimated.runs, estimated.completed_is_estimated) == ({"COMPLETED": MANY}, True)
        await store._write(lambda db, now: db.execute("DELETE FROM runs WHERE run_no % 3 = 0"))
        thinned = (await store.stats()).runs["COMPLETED"]
        assert thinned == pytest.approx(MANY * 2 / 3, rel=0.1)
        await store._write(lambda db, now: db.execute("DELETE FROM runs WHERE run_no BETWEEN 2 AND ?", (MANY // 2,)))
        assert (await store.stats()).runs["COMPLETED"] == pytest.approx(MANY / 3, rel=0.1)
    finally:
        await store.close()
