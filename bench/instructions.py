"""Instructions per run, counted by valgrind: a figure that other work on the machine does not change.

`python -m bench.instructions` measures this checkout on SQLite, and `--source PATH …` others beside it, such as the
`src` of an older one. Runs of three steps, and runs that wait for a signal, are started a hundred at a time; what the
process does before its first run is left out, because a short load is subtracted from a longer one.
"""

import argparse
import asyncio
import gc
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.report import Rows, progress, table

AT_ONCE = 100
SHORT, LONG = 2, 6
"""How many batches the two loads have."""

OWN = Path(__file__).parents[1] / "src"


async def load(kind: str, address: str, batches: int) -> None:
    """Take that many batches of runs to their end."""
    import holdfast as hf

    app = hf.App("bench")

    @app.activity
    async def nothing(number: int) -> int:
        return number

    @app.workflow
    async def steps() -> None:
        for number in range(3):
            await nothing(number)

    @app.workflow
    async def parked() -> int:
        return await hf.wait_signal("go", int)

    async def signalled(run: Any, number: int) -> None:
        await run.signal("go", number, signal_id=f"signal-{number}")
        await run.result()

    async def of_steps() -> None:
        runs = await asyncio.gather(*(app.start(steps) for _ in range(AT_ONCE)))
        await asyncio.gather(*(run.result() for run in runs))

    async def of_signals() -> None:
        runs = await asyncio.gather(*(app.start(parked) for _ in range(AT_ONCE)))
        await asyncio.gather(*(signalled(run, number) for number, run in enumerate(runs)))

    batch: Callable[[], Awaitable[None]] = of_steps if kind == "steps" else of_signals
    gc.disable()
    async with app.node(address, options=hf.NodeOptions(lease_ms=600_000)):
        for _ in range(batches):
            await batch()
    gc.enable()


def counted(source: Path, kind: str, batches: int) -> int:
    """Return the instructions of a process that carries out a load."""
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={folder}/counts"]
        here = [sys.executable, "-m", "bench.instructions", "--load", kind, f"sqlite:///{folder}/runs.db", str(batches)]
        environment = {"PYTHONHASHSEED": "0", "PYTHONPATH": f"{source}:{Path(__file__).parents[1]}"}
        done = subprocess.run([*valgrind, *here], env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if done.returncode or found is None:
        raise SystemExit(f"valgrind did not count the instructions of {source}:\n{done.stderr}")
    return int(found[1].replace(",", ""))


def measured(sources: list[Path]) -> Rows:
    """Return the instructions per run, by source."""
    rows: Rows = {}
    for source in sources:
        counted(source, "steps", 1)  # which compiles what is not compiled yet
        rows[str(source)] = {}
        for kind in ("steps", "signals"):
            progress(f"instructions: {kind}, {source}")
            more = counted(source, kind, LONG) - counted(source, kind, SHORT)
            rows[str(source)][f"{kind}, millions/run"] = more / (LONG - SHORT) / AT_ONCE / 1e6
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, nargs="*", default=[], help="the folder `src` of another checkout")
    parser.add_argument("--load", nargs=3, metavar=("KIND", "ADDRESS", "BATCHES"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        asyncio.run(load(given.load[0], given.load[1], int(given.load[2])))
    else:
        print(table("instructions", measured([*(each.resolve() for each in given.source), OWN])))
