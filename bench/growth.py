"""What a turn costs when more and more runs are stored. Turns go to random runs, in batches of 100."""

from pathlib import Path

from bench.contest import contest
from bench.effort import Effort
from bench.report import Rows, progress
from bench.workload import new_runs

BATCH = 100


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure at several sizes. `growth` is the cost of a turn relative to the smallest size."""
    rows: Rows = {}
    first_us = first_floor_us = 0.0
    for stored in effort.stored_runs:
        progress(f"growth: {stored:,} runs")
        async with contest(folder, new_runs(stored), seed=7) as rivals:
            row = await rivals.play(BATCH, effort.growth_turns_per_round, effort.rounds)
        turn_us, floor_us = (1e6 / rate for rate in (row["turns/s"], row["floor turns/s"]) if isinstance(rate, float))
        first_us, first_floor_us = first_us or turn_us, first_floor_us or floor_us
        rows[f"{stored:,} runs"] = {
            "µs/turn": turn_us,
            "growth": turn_us / first_us,
            "floor µs/turn": floor_us,
            "floor growth": floor_us / first_floor_us,
            "ratio to floor": row["ratio"],
        }
    return rows
