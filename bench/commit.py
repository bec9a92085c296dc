"""How many turns a second are committed, and how near that is to the floor.

The runs of a batch were created one after the other, as those that a node is busy with usually were, so their rows
share pages and the disk is at its best. That is the hardest case for the store: what it does itself shows most.
"""

from pathlib import Path

from bench.contest import contest
from bench.effort import Effort
from bench.report import Rows, progress
from bench.workload import new_runs


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure commits, in batches of several sizes."""
    rows: Rows = {}
    async with contest(folder, new_runs(effort.commit_runs)) as rivals:
        for batch, turns in effort.turns_per_round.items():
            progress(f"commit: batches of {batch}")
            rows[f"batch {batch}"] = await rivals.play(batch, turns, effort.rounds)
    return rows
