"""How many signals a second are accepted, each with an id of its sender's."""

import gc
import statistics
import time
from pathlib import Path

from bench.effort import Effort
from bench.report import Rows, progress
from bench.stores import opened
from bench.workload import batches, create_all, new_runs
from holdfast.core import codec
from holdfast.core.messages import SignalRequest
from holdfast.store.port import Accepted

RUNS = 1_000


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure deliveries, in batches of several sizes. Signals are spread over the runs."""
    runs = new_runs(RUNS)
    payload = codec.encode({"approved": True, "by": "ann"})
    rows: Rows = {}
    async with opened(folder / "deliver.db") as store:
        await create_all(store, runs)
        for size, count in effort.deliveries_per_round.items():
            rates = []
            for round_number in range(effort.rounds):
                progress(f"deliver: batches of {size}, round {round_number + 1} of {effort.rounds}")
                requests = [
                    SignalRequest(
                        run_id=runs[index % RUNS].run_id,
                        name="approval",
                        signal_id=f"click-{size}-{round_number}-{index}",
                        payload=payload,
                    )
                    for index in range(count)
                ]
                gc.collect()
                began = time.perf_counter()
                answers = [await store.deliver(batch) for batch in batches(requests, size)]
                rates.append(count / (time.perf_counter() - began))
                assert all(isinstance(answer, Accepted) for batch in answers for answer in batch)
            row: dict[str, float | list[float]] = {
                "signals/s": statistics.median(rates),
                "lowest": min(rates),
                "highest": max(rates),
            }
            rows[f"batch {size}"] = row
    return rows
