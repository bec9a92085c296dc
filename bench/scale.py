"""`python -m bench.scale`: what a store costs that holds ten million finished runs and a million waiting ones; bursts.

A store is filled in stages (`--finished`, `--parked` are its last). At each stage a new process opens it, as a node
would, and measures: how long until it has done something, runs of three steps, signals to waiting runs at random, what
operators and housekeeping ask (`bench/looks.py`), and what it does with nothing to do. Figures of CPU time are of the
processes that are measured, so a machine that is busy with something else changes them little.

The runs are copies of runs that a node has executed (`bench/filled.py`). Then, in stores of their own: `--timers` that
are due at one instant, `--signals` to one run, a `--fan-out`, fleets of `--nodes`.
"""

import argparse
import asyncio
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import asyncpg

import holdfast as hf
from bench import figures, filled
from bench.disk import default_folder
from bench.engine import STARTS_AT_ONCE, app, elsewhere, nothing, resident_bytes, steps
from bench.fleet import cpu_s, node_processes
from bench.looks import ServerCpu, looked_at
from bench.postgres import SCHEMA, server
from bench.report import Row, Rows, percentile, progress, table
from bench.stores import as_the_command
from holdfast.store.port import WaitQuery

WARM_RUNS = 300
ONE_BY_ONE = 50
IDLE_S = 5.0
FLEETS = [1, 2, 4, 8]
WAITING = "waiting-"
TIMERS_WAIT_S = 5.0
TIMES_SLOWER = 2
"""How much slower than the first ones all timers may be set, and how long after the last one they are due."""
DAY_S = 86_400


@app.workflow
async def waiting() -> bool:
    """Wait for a signal, and complete."""
    return await hf.wait_signal("go", bool)


@app.workflow(entity=True)
async def counting(count: int, counted: int = 0) -> int:
    """Take so many signals, one after the other."""
    async for _ in hf.signals("add", int):
        counted += 1
        if counted == count:
            return counted
        hf.continue_as_new_if_long(count, counted)
    raise AssertionError("signals without a timeout do not end")


@app.workflow
async def fanned_out(count: int) -> int:
    """Call many activities at once."""
    return len(await asyncio.gather(*(nothing(number) for number in range(count))))


@app.workflow
async def sleeper(until: float) -> float:
    """Sleep until an instant, and return how much later it woke up."""
    await hf.sleep(max(0.0, until - hf.now().timestamp()))
    return hf.now().timestamp() - until


# --- the stores


Keep = Callable[[], None]
"""Writes down what has been measured so far."""


class Place(Protocol):
    """Where a store is: its address, what it has on disk, and how finished runs get into it."""

    address: str

    async def fill(self, run_id: str, prefix: str, first: int, last: int) -> None:
        """Put copies of a run with these numbers into it."""
        ...

    async def size_gb(self) -> float:
        """Return what it has on disk."""
        ...

    async def empty(self) -> None:
        """Remove everything."""
        ...


class OnSqlite:
    """A file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "scale.db"
        self.address = f"sqlite:///{self._path}"

    async def fill(self, run_id: str, prefix: str, first: int, last: int) -> None:
        await asyncio.to_thread(filled.fill_file, self._path, run_id, prefix, first, last)

    async def size_gb(self) -> float:
        return self._path.stat().st_size / 1e9

    async def empty(self) -> None:
        for path in self._path.parent.glob(f"{self._path.name}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


class OnPostgres:
    """A schema of a server."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.address = f"{dsn}{'&' if '?' in dsn else '?'}schema={SCHEMA}"

    async def fill(self, run_id: str, prefix: str, first: int, last: int) -> None:
        connection = await asyncpg.connect(self._dsn)
        try:
            await filled.fill_schema(connection, SCHEMA, run_id, prefix, first, last)
        finally:
            await connection.close()

    async def size_gb(self) -> float:
        connection = await asyncpg.connect(self._dsn)
        try:
            size = await connection.fetchval("SELECT pg_database_size(current_database())")
        finally:
            await connection.close()
        return float(size) / 1e9

    async def empty(self) -> None:
        connection = await asyncpg.connect(self._dsn)
        try:
            await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
        finally:
            await connection.close()


@contextmanager
def _place(store: str, folder: Path) -> Iterator[Place]:
    if store == "sqlite":
        yield OnSqlite(folder)
    else:
        with server() as dsn:
            yield OnPostgres(dsn)


# --- by size


def stages(finished: int, parked: int) -> list[tuple[int, int]]:
    """Return the sizes at which is measured: a thousandth, a hundredth, a tenth, and all."""
    return [(max(1, finished // part), max(1, parked // part)) for part in (1_000, 100, 10, 1)]


async def by_size(rows: Rows, keep: Keep, place: Place, finished: int, parked: int, runs: int) -> None:
    """Fill a store in stages, and measure at each."""
    has_finished = has_parked = 0
    await place.empty()
    for to_finish, to_park in stages(finished, parked):
        ended, waits = await asyncio.to_thread(elsewhere, models, place.address)
        progress(f"scale: up to {to_park:,} runs that wait")
        await place.fill(waits, WAITING, has_parked + 1, to_park)
        progress(f"scale: up to {to_finish:,} finished runs")
        await place.fill(ended, filled.prefix_of(ended), has_finished + 1, to_finish)
        had_parked, has_finished, has_parked = has_parked, to_finish, to_park
        progress(f"scale: measuring with {has_finished:,} finished runs")
        row: Row = await asyncio.to_thread(elsewhere, measure_stage, place.address, had_parked, to_park, runs)
        rows[f"{has_finished:,} finished, {has_parked:,} wait"] = {**row, "GB": await place.size_gb()}
        keep()


async def models(address: str) -> tuple[str, str]:
    """Execute a run of each kind; return the ids of the one that has finished, and of the one that waits."""
    finished = await filled.finished_model(address)
    async with app.node(address, options=as_the_command()):
        run = await app.start(waiting)
        while not await app.runtime().store.find(WaitQuery(run_id=run.run_id)):  # noqa: ASYNC110 - it has no waiter
            await asyncio.sleep(0.01)
    return finished, run.run_id  # the node has let go of it


async def measure_stage(address: str, first: int, last: int, runs: int) -> Row:
    """Measure with what is stored. Of the runs that wait, those behind the first number were not signalled yet."""
    chance = random.Random(7)
    sample = chance.sample(range(first + 1, last + 1), min(last - first, runs // 2 + ONE_BY_ONE))
    one_by_one, at_once = sample[:ONE_BY_ONE], sample[ONE_BY_ONE:]
    server, cpu_began, began = await ServerCpu.of(address), time.process_time(), time.perf_counter()
    async with app.node(address, options=as_the_command()):
        await (await app.start(steps, 3)).result()
        first_s, first_cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        await _finish(WARM_RUNS)
        of_runs = await _timed("run", runs, _finish(runs), server)
        of_signals = await _timed("signal", len(at_once), _signal_all(at_once), server) if at_once else {}
        delays_ms = [await _signal_ms(number) for number in one_by_one]
        looks = await looked_at(app.runtime().store, server)
        idle_cpu_s = time.process_time()
        await asyncio.sleep(IDLE_S)
        idle = (time.process_time() - idle_cpu_s) / IDLE_S
    return {
        "load": os.getloadavg()[0],
        "first result s": first_s,
        "first result CPU s": first_cpu_s,
        **of_runs,
        **of_signals,
        "signal to result ms": statistics.median(delays_ms),
        "p99 ms": percentile(delays_ms, 99),
        **looks,
        "idle CPU %": 100 * idle,
        "resident MB": resident_bytes() / 1e6,
    }


async def _timed(what: str, count: int, work: Awaitable[object], server: ServerCpu) -> Row:
    began, cpu_began, at_server = time.perf_counter(), time.process_time(), server.used_s()
    await work
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    at_server = server.used_s() - at_server
    row: Row = {f"{what}s/s": count / took_s, f"CPU µs/{what}": cpu_s / count * 1e6}
    return {**row, f"server CPU µs/{what}": at_server / count * 1e6} if at_server else row


async def _finish(count: int) -> None:
    for first in range(0, count, STARTS_AT_ONCE):
        runs = await asyncio.gather(*(app.start(steps, 3) for _ in range(min(STARTS_AT_ONCE, count - first))))
        await asyncio.gather(*(run.result() for run in runs))


async def _signal_all(numbers: list[int]) -> None:
    await asyncio.gather(*map(_signal_ms, numbers))


async def _signal_ms(number: int) -> float:
    run = app.run(filled.copy_id(WAITING, number))
    began = time.perf_counter()
    await run.signal("go", True)
    assert await run.result()
    return (time.perf_counter() - began) * 1e3


# --- bursts


async def bursts(
    rows: Rows, keep: Keep, place: Place, timers: int, signals: int, width: int, runs: int, fleets: list[int]
) -> None:
    """Measure fleets; then each burst in a store of its own, in a new process."""
    for nodes in fleets:
        progress(f"scale: {nodes} nodes")
        await place.empty()
        rows[f"runs of 3 steps, {nodes} node{'s' if nodes > 1 else ''}"] = await _fleet(place.address, nodes, runs)
        keep()
    for label, work, count in (
        (f"a fan-out of {width:,}", _fan_out, width),
        (f"{signals:,} signals to one run", _signals_to_one, signals),
        (f"{timers:,} timers due at once", _timers, timers),
    ):
        progress(f"scale: {label}")
        await place.empty()
        rows[label] = await asyncio.to_thread(elsewhere, work, place.address, count)
        keep()
    await place.empty()


async def _timers(address: str, count: int) -> Row:
    async with app.node(address, options=as_the_command(cached_runs=1)):
        began, trials = time.time(), min(count, STARTS_AT_ONCE)  # how fast they start says when they can all be due
        await asyncio.gather(*(app.start(sleeper, began + DAY_S, run_id=f"trial-{number}") for number in range(trials)))
        due = time.time() + (time.time() - began) / trials * count * TIMES_SLOWER + TIMERS_WAIT_S
        for start in range(0, count, STARTS_AT_ONCE):
            numbers = range(start, min(start + STARTS_AT_ONCE, count))
            await asyncio.gather(*(app.start(sleeper, due, run_id=f"timer-{number}") for number in numbers))
        early_s = due - time.time()
        assert early_s > 0, f"the last timer was set {-early_s:.1f} s after it was due"
        await asyncio.sleep(early_s)
        cpu_began, server = time.process_time(), await ServerCpu.of(address)
        server_began = server.used_s()
        late: list[float] = []
        for start in range(0, count, STARTS_AT_ONCE):
            numbers = range(start, min(start + STARTS_AT_ONCE, count))
            late += await asyncio.gather(*(app.run(f"timer-{number}").result() for number in numbers))
        took_s, used_s = time.time() - due, time.process_time() - cpu_began
        server_s = server.used_s() - server_began
    assert len(late) == count
    assert min(late) >= 0, "a timer fired before it was due"
    return {
        **_burst(count, took_s, used_s, server_s),
        "median s late": statistics.median(late),
        "p99 s late": percentile(late, 99),
    }


async def _signals_to_one(address: str, count: int) -> Row:
    async with app.node(address, options=as_the_command()):
        run, server = await app.start(counting, count), await ServerCpu.of(address)
        began, cpu_began, server_began = time.perf_counter(), time.process_time(), server.used_s()
        for start in range(0, count, STARTS_AT_ONCE):
            numbers = range(start, min(start + STARTS_AT_ONCE, count))
            await asyncio.gather(*(run.signal("add", number, signal_id=f"signal-{number}") for number in numbers))
        accepted_s = time.perf_counter() - began
        assert await run.result() == count
        took_s, used_s = time.perf_counter() - began, time.process_time() - cpu_began
        server_s = server.used_s() - server_began
    return {**_burst(count, took_s, used_s, server_s), "accepted/s": count / accepted_s}


async def _fan_out(address: str, count: int) -> Row:
    async with app.node(address, options=as_the_command()):
        server = await ServerCpu.of(address)
        began, cpu_began, server_began = time.perf_counter(), time.process_time(), server.used_s()
        assert await (await app.start(fanned_out, count)).result() == count
        took_s, used_s = time.perf_counter() - began, time.process_time() - cpu_began
        server_s = server.used_s() - server_began
    return _burst(count, took_s, used_s, server_s)


async def _fleet(address: str, nodes: int, runs: int) -> Row:
    options = as_the_command(takes_runs=False)
    async with app.node(address, options=options), node_processes(address, nodes) as others:
        await _finish(WARM_RUNS)
        server = await ServerCpu.of(address)
        before_s, server_began, began = cpu_s(others), server.used_s(), time.perf_counter()
        await _finish(runs)
        took_s, used_s = time.perf_counter() - began, cpu_s(others) - before_s
        server_s = server.used_s() - server_began
    return _burst(runs, took_s, used_s, server_s)


def _burst(count: int, took_s: float, used_s: float, server_s: float) -> Row:
    row: Row = {"load": os.getloadavg()[0], "all done after s": took_s, "per s": count / took_s}
    row["CPU µs each"] = used_s / count * 1e6
    return {**row, "server CPU µs each": server_s / count * 1e6} if server_s else row


def main() -> int:
    """Measure with as much as is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--finished", type=int, default=10_000_000)
    parser.add_argument("--parked", type=int, default=1_000_000)
    parser.add_argument("--timers", type=int, default=100_000)
    parser.add_argument("--signals", type=int, default=100_000)
    parser.add_argument("--fan-out", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=4_000, help="runs of three steps for each figure")
    parser.add_argument("--nodes", type=int, nargs="*", default=FLEETS, help="the sizes of the fleets")
    parser.add_argument("--store", choices=["sqlite", "postgres"], action="append")
    parser.add_argument("--only", choices=["size", "bursts"], action="append")
    parser.add_argument("--json", type=Path, help="add the figures to this file, after each row")
    parser.add_argument("--dir", dest="folder", type=Path, default=default_folder(), help="where files are made")
    given = parser.parse_args()
    results, measured = figures.Results(), figures.Measured()
    if given.json and given.json.exists():
        before = figures.read(given.json)
        results, measured = before.results, before.measured

    def keep() -> None:
        if given.json:
            figures.write(given.json, results, measured)

    for store in given.store or ["sqlite", "postgres"]:
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=given.folder) as folder,
            _place(store, Path(folder)) as place,
        ):
            if "size" in (given.only or ["size"]):
                rows = results[f"{store} by size"] = {}
                measured[f"{store} by size"] = figures.environment()
                asyncio.run(by_size(rows, keep, place, given.finished, given.parked, given.runs))
            if "bursts" in (given.only or ["bursts"]):
                rows = results[f"{store} bursts"] = {}
                measured[f"{store} bursts"] = figures.environment()
                counts = (given.timers, given.signals, given.fan_out, given.runs)
                asyncio.run(bursts(rows, keep, place, *counts, given.nodes))
    sys.stdout.write("\n\n".join(table(title, rows) for title, rows in results.items()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
