"""What the event bus costs runs: `python -m bench.bus` measures them without a sink, with one, and with a relay.

Each round takes all of them once, each in a new process and on a new file, so that what else the machine does concerns
all alike. CPU is that of the process, the relay's included. The sink is a function that does nothing: what is measured
is the outbox and the relay, not a network.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import holdfast as hf
from bench import engine
from bench.engine import _elsewhere, run_all_here
from bench.report import Rows, progress, table
from bench.stores import as_the_command, opened

KINDS = ("no sink", "a sink, relayed elsewhere", "a sink, relayed here")


async def timed(folder: Path, kind: str, count: int) -> tuple[float, float]:
    """Return how many seconds the runs took, and how much of the processor."""
    async with opened(folder / "bus.db") as store:
        if kind != KINDS[0]:
            await store.put_sink(hf.Sink(name="nothing", kind="projection"))
            engine.app.projection("nothing")(lambda events: None)
        options = replace(as_the_command(), relays=kind == KINDS[2])
        async with engine.app.node(store, options=options):
            await run_all_here(200)
            began = time.process_time()
            took_s = await run_all_here(count)
            used_s = time.process_time() - began
    return took_s, used_s


def measure(folder: Path, count: int, rounds: int) -> Rows:
    """Return the figures of each kind: medians over the rounds."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for kind in KINDS:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                found[kind].append(_elsewhere(timed, Path(place), kind, count))
    bare = found[KINDS[0]]
    return {kind: _row(each, bare, count) for kind, each in found.items()}


def _row(found: Sequence[tuple[float, float]], bare: Sequence[tuple[float, float]], count: int) -> dict[str, Any]:
    return {
        "runs/s": statistics.median(count / took for took, _ in found),
        "of no sink": statistics.median(without / took for (took, _), (without, _) in zip(found, bare, strict=True)),
        "CPU ms/run": statistics.median(1_000 * used / count for _, used in found),
        "CPU of no sink": statistics.median(used / least for (_, used), (_, least) in zip(found, bare, strict=True)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(table("Runs of three steps, beside the event bus", measure(Path(place), asked.runs, asked.rounds)))
