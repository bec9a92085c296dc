"""How long it takes to get a run back: its head and inbox, and all its events, a page at a time."""

import gc
import statistics
import time
from pathlib import Path

from bench.effort import Effort
from bench.report import Rows, progress
from bench.stores import opened
from bench.workload import Sleeper, batches, create_all, new_runs
from holdfast.core.events import Event
from holdfast.store.port import Committed, Store

TURNS_PER_COMMIT = 500


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure runs with short and long histories."""
    rows: Rows = {}
    runs = new_runs(len(effort.history_lengths))
    async with opened(folder / "history.db") as store:
        await create_all(store, runs)
        for new, length in zip(runs, effort.history_lengths, strict=True):
            progress(f"history: writing {length:,} events")
            sleeper = Sleeper(new)
            turns = [sleeper.next_turn() for _ in range(length // 2)]
            for batch in batches(turns, TURNS_PER_COMMIT):
                assert all(isinstance(answer, Committed) for answer in await store.commit(batch))
            progress(f"history: reading {length:,} events")
            loads: list[float] = []
            reads: list[float] = []
            events: list[Event] = []
            for _ in range(effort.rounds):
                gc.collect()
                began = time.perf_counter()
                (loaded,) = await store.load([new.run_id])
                loads.append(time.perf_counter() - began)
                events = await _read_all(store, new.run_id)
                reads.append(time.perf_counter() - began - loads[-1])
                assert loaded is not None
                assert loaded.head.version == len(events)
            rows[f"{length:,} events"] = {
                "load ms": statistics.median(loads) * 1e3,
                "read ms": statistics.median(reads) * 1e3,
                "events/s": len(events) / statistics.median(reads),
            }
    return rows


async def _read_all(store: Store, run_id: str) -> list[Event]:
    events: list[Event] = []
    while page := await store.read_events(run_id, after=len(events)):
        events += page
    return events
