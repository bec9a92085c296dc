"""How long a claim takes when nearly all runs are parked: they wait for a signal and nobody owns them."""

import random
import time
from pathlib import Path

from bench.effort import Effort
from bench.report import Rows, percentile, progress
from bench.stores import opened
from bench.workload import NODE, batches, create_all, new_runs, park
from holdfast.core.messages import SignalRequest
from holdfast.core.state import state_of
from holdfast.store.port import Committed, Store, Turn

WAVE = 500
"""How many parked runs are woken at a time."""


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure claims of one run and of many."""
    runs = new_runs(effort.parked_runs)
    states = {new.run_id: state_of(new.run_id, new.events) for new in runs}
    chance = random.Random(7)
    rows: Rows = {}
    async with opened(folder / "claim.db") as store:
        progress(f"claim: parking {len(runs):,} runs")
        await create_all(store, runs)
        for batch in batches([new.run_id for new in runs], 1_000):
            await _commit(store, park([run for run in await store.load(batch) if run], states))
        for size, count in effort.claims.items():
            taken: list[float] = []
            while len(taken) < count:
                progress(f"claim: batches of {size}, {len(taken)} of {count}")
                ready = min(max(WAVE, size), size * (count - len(taken)), len(runs) // size * size)
                woken = chance.sample(list(states), ready)
                signals = [SignalRequest(run_id=run_id, name="go") for run_id in woken]
                await store.deliver(signals)
                claimed = []
                for _ in range(ready // size):
                    began = time.perf_counter()
                    loaded = await store.claim(NODE, size)
                    taken.append((time.perf_counter() - began) * 1e3)
                    assert len(loaded) == size, (len(loaded), size)
                    claimed += loaded
                await _commit(store, park(claimed, states))
            rows[f"batch {size}"] = {
                "p50 ms": percentile(taken, 50),
                "p99 ms": percentile(taken, 99),
                "runs/s": size * len(taken) / sum(taken) * 1e3,
            }
    return rows


async def _commit(store: Store, turns: list[Turn]) -> None:
    for batch in batches(turns, 1_000):
        assert all(isinstance(answer, Committed) for answer in await store.commit(batch))
