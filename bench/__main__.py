"""`python -m bench`: measure, print tables, and write the same figures as JSON."""

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec.structs import replace

from bench import (
    analysts,
    artifacts,
    claim,
    commit,
    core,
    deliver,
    disk,
    engine,
    fleet,
    flows,
    growth,
    history,
    open_steps,
    paths,
    plans,
    postgres,
    recovery,
    retention,
    search,
    signals,
    streams,
)
from bench.effort import FULL, QUICK, Effort
from bench.report import Rows, progress, table

ON_DISK: dict[str, tuple[str, Callable[[Effort, Path], Awaitable[Rows]]]] = {
    "fleet": ("Runs of three steps, started by one process and executed by others", fleet.measure),
    "commit": (
        "Turns committed (1 run, 2 events, 1 message consumed, 1 created), beside the floor",
        commit.measure,
    ),
    "artifacts": ("Memory with an artifact of 100 MB, and results of 1 MB beside the store", artifacts.measure),
    "growth": ("Cost of a turn by the number of runs stored, batches of 100", growth.measure),
    "open": ("Cost of a turn by the number of open steps of its run, each committed on its own", open_steps.measure),
    "deliver": ("Signals accepted, each with a signal_id", deliver.measure),
    "claim": ("Claims while nearly all runs are parked", claim.measure),
    "history": ("Loading a run, and reading all its events", history.measure),
    "engine": ("The whole engine, beside the floor for the same rows in transactions of the same size", engine.measure),
    "flows": ("Runs of three steps as a flow, beside the same as code", flows.measure),
    "signals": ("Parked runs that are signalled: from the send to the completed run", signals.measure),
    "parked": (
        "Runs that wait: what they cost in memory, and what a node does with nothing to do",
        engine.measure_parked,
    ),
    "postgres": ("The whole engine on a PostgreSQL server", postgres.measure),
    "analysts": ("Claims on PostgreSQL while long transactions are open (--analysts-s for how long)", analysts.measure),
    "streams": ("Short runs while event streams are open, beside the same without", streams.measure),
    "recovery": ("Runs in flight when their process is killed, finished by one that is started then", recovery.measure),
    "paths": ("Runs of three steps with each special path switched off, beside all on", paths.measure),
    "plans": ("Plans of many steps: a chain, a fan-out, and layers", plans.measure),
    "retention": (
        "Commits of a node while retention deletes finished runs beside it (--retention-runs for how many there are)",
        retention.measure,
    ),
    "search": ("Searches over a million runs of a thousand tenants, ms", search.measure),
    "long": ("A turn of a run with a long history, in memory and after a restart", engine.measure_long),
}
CORE_TITLE = "The core alone"
NAMES = (*ON_DISK, "core")


def main() -> int:
    """Run what was asked for."""
    options = _options()
    filesystem = disk.filesystem(options.folder)
    if filesystem in disk.IN_MEMORY and not options.allow_memory:
        print(f"{options.folder} is in memory ({filesystem}); name a folder on a disk with --dir", file=sys.stderr)
        return 2
    effort = QUICK if options.quick else FULL
    effort = replace(effort, analysts_s=options.analysts_s or effort.analysts_s)
    effort = replace(effort, retention_runs=options.retention_runs or effort.retention_runs)
    names = [name for name in NAMES if name in (options.only or NAMES)]
    results: dict[str, Rows] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.folder) as folder:
        environment = _environment(Path(folder), filesystem, options.quick)
        shown = sys.stderr if options.json == "-" else sys.stdout
        print("\n".join(f"{name}: {value}" for name, value in environment.items()), file=shown)
        for name in names:
            results[name] = _measure(name, effort, Path(folder))
            progress("")
            title = ON_DISK[name][0] if name in ON_DISK else CORE_TITLE
            print(f"\n{table(f'{name}: {title}', results[name])}", file=shown)
    text = json.dumps({"environment": environment, "results": results}, indent=2)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return 0


def _measure(name: str, effort: Effort, folder: Path) -> Rows:
    if name not in ON_DISK:
        return core.measure(effort)
    measure = ON_DISK[name][1]

    async def run() -> Rows:
        return await measure(effort, folder)

    return asyncio.run(run())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--json", metavar="PATH", help="write the figures there; - is stdout, tables go to stderr")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that everything runs")
    parser.add_argument("--only", action="append", choices=NAMES, help="measure this; may be given several times")
    parser.add_argument(
        "--dir", dest="folder", type=Path, default=disk.default_folder(), help="where the files are made (%(default)s)"
    )
    parser.add_argument("--analysts-s", type=float, help="for how long transactions are kept open")
    parser.add_argument("--retention-runs", type=int, help="how many finished runs there are for retention to delete")
    parser.add_argument("--allow-memory", action="store_true", help="accept a file system in memory")
    return parser.parse_args()


def _environment(folder: Path, filesystem: str, is_quick: bool) -> dict[str, str | float | int]:
    return {
        "file system": filesystem,
        "fsync µs": round(disk.fsync_us(folder), 1),
        "cores": os.cpu_count() or 0,
        "load at the start": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": platform.platform(),
        "effort": "quick" if is_quick else "full",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


if __name__ == "__main__":
    sys.exit(main())
