"""What the whole engine does: many short runs, one run step by step, runs that are parked, and a very long history.

Activities and workflows do nothing by themselves, so that what is measured is the engine and its store.
"""

import asyncio
import gc
import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import holdfast as hf
from bench import engine_floor
from bench.effort import Effort
from bench.metered import MeteredStore
from bench.report import Row, Rows, progress, ratios
from bench.stores import as_the_command, opened
from holdfast.store.port import WaitQuery

T = TypeVar("T")

STARTS_AT_ONCE = 2_000
WARM_RUNS = 500
LONG_CHUNK = 100
SIGNALS = 20

app = hf.App("bench")


@app.activity
async def nothing(number: int) -> int:
    """Do nothing."""
    return number


@app.workflow
async def steps(count: int) -> int:
    """Take steps one after the other."""
    for number in range(count):
        await nothing(number)
    return count


@app.workflow
async def parked() -> None:
    """Wait for something that does not come."""
    await hf.wait_signal("go", bool)


@app.workflow
async def long(count: int) -> None:
    """Take very many steps, and then wait for signals without end."""
    for start in range(0, count, LONG_CHUNK):
        await asyncio.gather(*(nothing(number) for number in range(start, min(count, start + LONG_CHUNK))))
    while True:
        await hf.wait_signal("go", bool)


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure many short runs, and one at a time."""
    rows: Rows = {}
    for count in effort.engine_runs:
        progress(f"engine: {count:,} runs of 3 steps")
        rows[f"{count:,} runs of 3 steps"] = await _short_runs(folder, count, effort.engine_rounds)
    progress("engine: one run at a time")
    rows["one run of 10 steps at a time"] = await _sequential(folder, effort.engine_sequential)
    return rows


async def measure_parked(effort: Effort, folder: Path) -> Rows:
    """Measure runs that wait, with many and with hardly any of them kept in memory."""
    rows: Rows = {}
    many, most = hf.NodeOptions().cached_runs, effort.more_parked_runs
    for count, cached_runs in ((effort.parked_runs, many), (effort.parked_runs, 1), (most, many), (most, 1)):
        progress(f"parked: {count:,} runs")
        label = f"{count:,} runs, at most {cached_runs:,} cached"
        rows[label] = elsewhere(_parked, folder, count, cached_runs, effort.idle_s)
    return rows


async def measure_long(effort: Effort, folder: Path) -> Rows:
    """Measure a run with a very long history."""
    progress(f"long: a run of {effort.engine_long_steps:,} steps")
    return {f"{effort.engine_long_steps:,} steps": await _long_history(folder, effort.engine_long_steps)}


# --- many short runs


async def _short_runs(folder: Path, count: int, rounds: int) -> Row:
    """Measure the engine and its floor in turns, each in a new process."""
    run_rates: list[float] = []
    row_rates: list[float] = []
    floor_rates: list[float] = []
    noted = folder / "transactions"
    rows, transactions = elsewhere(_note, folder, count, noted)
    for _ in range(rounds):
        took_s = elsewhere(_timed_runs, folder, count)
        floor_s = elsewhere(_timed_floor, folder, noted)
        run_rates.append(count / took_s)
        row_rates.append(rows / took_s)
        floor_rates.append(rows / floor_s)
    noted.unlink()
    return {
        "runs/s": statistics.median(run_rates),
        "rows/s": statistics.median(row_rates),
        "floor rows/s": statistics.median(floor_rates),
        "rows per transaction": rows / transactions,
        **ratios(row_rates, floor_rates),
    }


async def _note(folder: Path, count: int, noted: Path) -> tuple[int, int]:
    """Note what the engine writes, and which of it shares a transaction: once, so that noting costs no time."""
    path = folder / "noted.db"
    async with opened(path) as store:
        metered = MeteredStore(store)
        await _run_all(metered, count)
    transactions = engine_floor.rows_of(path, metered.transactions)
    path.unlink()
    _keep(noted, transactions)
    return sum(map(len, transactions)), len(transactions)


def _keep(noted: Path, transactions: list[engine_floor.Rows]) -> None:
    noted.write_bytes(pickle.dumps(transactions))


def _kept(noted: Path) -> list[engine_floor.Rows]:
    transactions: list[engine_floor.Rows] = pickle.loads(noted.read_bytes())
    return transactions


async def _timed_runs(folder: Path, count: int) -> float:
    for warm_up in (True, False):
        path = folder / "engine.db"
        async with opened(path) as store:
            gc.collect()
            seconds = await _run_all(store, min(count, WARM_RUNS) if warm_up else count)
        path.unlink()
    return seconds


async def _timed_floor(folder: Path, noted: Path) -> float:
    transactions = _kept(noted)
    path = folder / "floor.db"
    async with opened(path):
        pass
    gc.collect()
    gc.freeze()
    seconds = await engine_floor.write(path, transactions)
    path.unlink()
    return seconds


async def _run_all(store: Any, count: int) -> float:
    async with app.node(store, options=as_the_command()):
        return await run_all_here(count)


async def run_all_here(count: int) -> float:
    """Start runs on the node that is open, and return how many seconds it took until all had finished."""
    began = time.perf_counter()
    for first in range(0, count, STARTS_AT_ONCE):
        number = min(STARTS_AT_ONCE, count - first)
        runs = await asyncio.gather(*(app.start(steps, 3) for _ in range(number)))
        await asyncio.gather(*(run.result() for run in runs))
    return time.perf_counter() - began


async def _sequential(folder: Path, times: int) -> Row:
    path, taken = folder / "sequential.db", []
    async with opened(path) as store, app.node(store, options=as_the_command()):
        for _ in range(times):
            began = time.perf_counter()
            await (await app.start(steps, 10)).result()
            taken.append((time.perf_counter() - began) / 10)
    path.unlink()
    return {"median ms/step": statistics.median(taken) * 1e3}


# --- parked runs


def elsewhere(work: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Measure in a new process, whose memory nothing else has used."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        result: T = pool.submit(_run, work, *args).result()
        return result


def _run(work: Callable[..., Any], *args: Any) -> Any:
    return asyncio.run(work(*args))


async def _parked(folder: Path, count: int, cached_runs: int, idle_s: float) -> Row:
    path = folder / "parked.db"
    async with opened(path) as store:
        metered = MeteredStore(store)
        async with app.node(metered, options=as_the_command(cached_runs=1)):
            await _park(metered, STARTS_AT_ONCE)  # what the starting needs for a while, and caches, are not counted
        before = resident_bytes()
        async with app.node(metered, options=as_the_command(cached_runs=cached_runs)):
            await _park(metered, count)
            added = resident_bytes() - before
            metered.calls.clear()
            began = time.process_time()
            await asyncio.sleep(idle_s)
            busy_s = time.process_time() - began
            calls: Row = {f"idle {verb}/s": number / idle_s for verb, number in sorted(metered.calls.items())}
    path.unlink()
    return {
        "resident KB": max(added / 1024, 1.0),
        "KB/run": max(added / 1024, 1.0) / count,
        "idle CPU %": 100 * busy_s / idle_s,
        **calls,
    }


async def _park(store: Any, count: int) -> None:
    for first in range(0, count, STARTS_AT_ONCE):
        await asyncio.gather(*(app.start(parked) for _ in range(min(STARTS_AT_ONCE, count - first))))
        await _until(store, lambda: _is_free(store))
        store.transactions.clear()
    gc.collect()


async def _is_free(store: Any) -> bool:
    return not (await store.stats()).leased


async def _until(store: Any, condition: Callable[[], Awaitable[object]]) -> None:
    """Wait until a condition holds; it is looked at after each commit."""
    while True:
        store.committed.clear()
        if await condition():
            return
        await store.committed.wait()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- a long history


async def _long_history(folder: Path, count: int) -> Row:
    path = folder / "long.db"
    async with opened(path) as store:
        metered = MeteredStore(store)
        async with app.node(metered, options=as_the_command()):
            began = time.perf_counter()
            run = await app.start(long, count)
            await _until(metered, lambda: store.find(WaitQuery(run_id=run.run_id)))
            made_s = time.perf_counter() - began
            live_s = statistics.median([await _turn_s(metered, run) for _ in range(SIGNALS)])
        metered = MeteredStore(store)
        async with app.node(metered, options=as_the_command()):
            replay_s = await _turn_s(metered, app.run(run.run_id))
    path.unlink()
    return {"steps/s": count / made_s, "live turn ms": live_s * 1e3, "turn with replay ms": replay_s * 1e3}


async def _turn_s(store: Any, run: Any) -> float:
    """Wake the run with a signal; return the seconds from its claim to its commit."""
    store.committed.clear()
    await run.signal("go", True)
    await store.committed.wait()
    seconds: float = store.turn_s[-1]
    return seconds
