"""Instructions of the interpreter per run, by function: `python -m bench.opcodes`.

Most of a run's time is the interpreter's. Other work on the machine does not change this count; it measures no time.
`--source PATH` counts another checkout's `src` beside this one. Runs have three steps, on SQLite.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

OWN = Path(__file__).parents[1] / "src"
RUNS = 200
SHOWN = 25


async def counted(runs: int) -> Counter[str]:
    """Return how many instructions a run takes, by function."""
    import holdfast as hf

    app, counts = hf.App("bench"), Counter[CodeType]()

    @app.activity
    async def nothing(number: int) -> int:
        return number

    @app.workflow
    async def steps(count: int) -> int:
        for number in range(count):
            await nothing(number)
        return count

    async def batch() -> None:
        started = await asyncio.gather(*(app.start(steps, 3) for _ in range(runs)))
        await asyncio.gather(*(run.result() for run in started))

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            counts[frame.f_code] += 1
        return count

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count

    with tempfile.TemporaryDirectory() as folder:
        async with app.node(f"sqlite:///{folder}/runs.db", options=hf.NodeOptions(lease_ms=600_000)):
            await batch()  # what is made once is not counted
            sys.settrace(begin)
            await batch()
            sys.settrace(None)
    return Counter({f"{Path(code.co_filename).name} {code.co_qualname}": n // runs for code, n in counts.items()})


def measured(source: Path, runs: int) -> Counter[str]:
    """Count with the package of a source, in a process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": f"{source}:{Path(__file__).parents[1]}"}
    command = [sys.executable, "-m", "bench.opcodes", "--count", str(runs)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Counter(json.loads(done.stdout))


def main() -> None:
    """Carry out what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.opcodes", description=__doc__)
    parser.add_argument("--source", type=Path, nargs="*", default=[], help="the folder `src` of another checkout")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs at once (%(default)s)")
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.count:
        print(json.dumps(asyncio.run(counted(given.count))))
        return
    for source in [*(each.resolve() for each in given.source), OWN]:
        counts = measured(source, given.runs)
        print(f"{counts.total():8,} a run  {source}")
        for name, number in counts.most_common(SHOWN):
            print(f"{number:8,}   {name}")


if __name__ == "__main__":
    main()
