"""Two checkouts of Holdfast beside each other: `python -m bench.compare --base PATH`.

Each round takes the same load through the base and through this checkout, one right after the other, each in a process
of its own and on a store of its own, on SQLite and on a PostgreSQL server (`bench/postgres.py` says which). The order
alternates. Reported are the median of each side, and the median of the ratios of the rounds: other work on the machine
falls upon both sides of a round. CPU and the volume of the write-ahead log are steadier than the clock.

`engine` are runs of three steps, 2,000 at once; `signals` are 2,000 parked runs that are signalled at once. The garbage
collector's thresholds are those of the `holdfast` command in both; with `--default-gc`, those of Python.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg

from bench.disk import default_folder
from bench.report import Rows, progress, table

LOADS = ("engine", "signals")
STORES = ("sqlite", "postgres")
AT_ONCE = 2_000
WARM_RUNS = 500
SCHEMA = "holdfast_compared"
Figures = dict[str, float]

OWN = Path(__file__).parents[1]
TUNED, DEFAULT = (100_000, 10, 10), (700, 10, 10)


# --- one side of a round: a process of its own


async def load(kind: str, address: str, runs: int, thresholds: tuple[int, int, int]) -> Figures:
    """Take runs to their end, and measure it."""
    import holdfast as hf

    app = hf.App("compared")

    @app.activity
    async def nothing(number: int) -> int:
        return number

    @app.workflow
    async def steps(count: int) -> int:
        for number in range(count):
            await nothing(number)
        return count

    @app.workflow
    async def parked() -> int:
        return await hf.wait_signal("go", int)

    async def signalled(run: Any, number: int) -> None:
        await run.signal("go", number, signal_id=f"signal-{number}")
        assert await run.result() == number

    async def of_steps(count: int) -> None:
        started = await asyncio.gather(*(app.start(steps, 3) for _ in range(count)))
        await asyncio.gather(*(run.result() for run in started))

    async def started_parked(count: int) -> list[Any]:
        started = await asyncio.gather(*(app.start(parked) for _ in range(count)))
        while await store_waits(address) < count:  # noqa: ASYNC110 - which any version can be asked
            await asyncio.sleep(0.05)
        return started

    async def of_signals(started: list[Any]) -> None:
        await asyncio.gather(*(signalled(run, number) for number, run in enumerate(started)))

    async with app.node(address, options=hf.NodeOptions(lease_ms=60_000)), _server(address) as server:
        gc.set_threshold(*thresholds)
        await of_steps(WARM_RUNS)
        measured = Measured(server)
        for first in range(0, runs, AT_ONCE):
            count = min(AT_ONCE, runs - first)
            work = partial(of_steps, count) if kind == "engine" else partial(of_signals, await started_parked(count))
            gc.collect()
            await measured.during(work)
        return measured.per_run(runs)


async def store_waits(address: str) -> int:
    """Count the waits of a store, by whatever schema it has: both sides have the same table."""
    if address.startswith("sqlite"):
        import sqlite3

        connection = sqlite3.connect(address.removeprefix("sqlite:///"))
        try:
            return int(connection.execute("SELECT count(*) FROM waits").fetchone()[0])
        finally:
            connection.close()
    async with _server(address) as server:
        return int(await server.fetchval(f"SELECT count(*) FROM {SCHEMA}.waits"))


@asynccontextmanager
async def _server(address: str) -> AsyncIterator[Any]:
    """Give a connection to the server of an address; None if it has none."""
    if address.startswith("sqlite"):
        yield None
        return
    connection = await asyncpg.connect(address.partition("schema=")[0].rstrip("?&"))
    try:
        yield connection
    finally:
        await connection.close()


class Measured:
    """Adds up what several stretches of work took: time, CPU here and in the server, collections, and log written."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._sums: dict[str, float] = {}
        self._gc_began = 0.0
        gc.callbacks.append(self._collected)
        self._is_on = False

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        elif self._is_on:
            self._add("gc µs/run", (time.perf_counter() - self._gc_began) * 1e6)
            self._add("collections", 1)
            del info

    def _add(self, name: str, much: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + much

    async def during(self, work: Callable[[], Awaitable[None]]) -> None:
        before = await self._now()
        self._is_on = True
        await work()
        self._is_on = False
        after = await self._now()
        for name, value in after.items():
            self._add(name, value - before[name])

    async def _now(self) -> dict[str, float]:
        found = {"s": time.perf_counter(), "CPU µs/run": time.process_time() * 1e6}
        if self._server is not None:
            found["log bytes/run"] = float(await self._server.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'"))
            text = await self._server.fetchval("SELECT pg_read_file('postmaster.pid')")
            found["server CPU µs/run"] = _cpu_us(int(text.split()[0]))
            found["s"] = time.perf_counter()
        return found

    def per_run(self, runs: int) -> Figures:
        """Return the rate, and everything else per run."""
        gc.callbacks.remove(self._collected)
        sums = {"gc µs/run": 0.0, "collections": 0.0, **self._sums}
        row: Figures = {"runs/s": runs / sums.pop("s")}
        row["collections"] = sums.pop("collections")
        return row | {name: value / runs for name, value in sums.items()}


def _cpu_us(postmaster: int) -> float:
    """Return the CPU time of a PostgreSQL server with all its processes, also those that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        if int(name.split()[0]) == postmaster:
            ticks += sum(map(int, fields[11:15]))
        elif int(fields[1]) == postmaster:
            ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK") * 1e6


# --- both sides, in turns


def measured(checkout: Path, kind: str, address: str, runs: int, *, default_gc: bool) -> Figures:
    """Measure a load with the package of a checkout, in a new process."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{OWN}", "PYTHONHASHSEED": "0"}
    arguments = ["--load", kind, address, str(runs), *(["--default-gc"] if default_gc else [])]
    done = subprocess.run(
        [sys.executable, "-m", "bench.compare", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    row: Figures = json.loads(done.stdout.splitlines()[-1])
    return row


def compared(base: Path, kind: str, store: str, given: argparse.Namespace) -> Rows:
    """Measure both checkouts, round by round."""
    sides = {"base": base, "this": OWN}
    rows: dict[str, list[Figures]] = {name: [] for name in sides}
    for number in range(given.rounds):
        for name in list(sides) if number % 2 else reversed(sides):
            progress(f"compare: {kind} on {store}, round {number + 1} of {given.rounds}, {name}")
            with tempfile.TemporaryDirectory(prefix="holdfast-compare-", dir=given.folder) as folder:
                address = f"sqlite:///{folder}/runs.db" if store == "sqlite" else asyncio.run(_emptied(given.dsn))
                rows[name].append(measured(sides[name], kind, address, given.runs, default_gc=given.default_gc))
    columns = rows["base"][0]
    found: Rows = {
        name: {column: _median([row[column] for row in of]) for column in columns} for name, of in rows.items()
    }
    pairs = list(zip(rows["base"], rows["this"], strict=True))
    found["this / base"] = {
        column: _median([this[column] / before[column] if before[column] else 1.0 for before, this in pairs])
        for column in columns
    }
    ratios = [this["runs/s"] / before["runs/s"] for before, this in pairs]
    found["this / base"] |= {"least runs/s": min(ratios), "most": max(ratios)}
    return found


def _median(values: list[float]) -> float:
    return statistics.median(values)


async def _emptied(dsn: str) -> str:
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    await connection.execute("CHECKPOINT")
    await connection.close()
    return f"{dsn}{'&' if '?' in dsn else '?'}schema={SCHEMA}"


def main() -> None:
    """Carry out what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--base", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=4_000, help="runs of each round (%(default)s)")
    parser.add_argument("--only", default=",".join(LOADS), help="loads, with commas between (%(default)s)")
    parser.add_argument("--stores", default=",".join(STORES), help="stores, with commas between (%(default)s)")
    parser.add_argument("--default-gc", action="store_true", help="leave the garbage collector as Python has it")
    parser.add_argument(
        "--dir", dest="folder", type=Path, default=default_folder(), help="where SQLite's files are made"
    )
    parser.add_argument("--load", nargs=3, metavar=("KIND", "ADDRESS", "RUNS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        kind, address, runs = given.load
        print(json.dumps(asyncio.run(load(kind, address, int(runs), DEFAULT if given.default_gc else TUNED))))
        return
    if given.base is None:
        parser.error("--base names the checkout to compare with")
    from bench.postgres import server

    stores = given.stores.split(",")
    with server() if "postgres" in stores else nullcontext("") as given.dsn:
        for store in stores:
            for kind in given.only.split(","):
                rows = compared(given.base.resolve(), kind, store, given)
                progress("")
                print(f"\n{table(f'{kind} on {store}', rows)}", flush=True)


if __name__ == "__main__":
    main()
