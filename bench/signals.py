"""Signals through the whole engine: many parked runs that are signalled at once, and one at a time.

The cost of the disk is not hidden: the store is on it, and every answer is durable.
"""

import asyncio
import gc
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import holdfast as hf
from bench.effort import Effort
from bench.report import Row, Rows, progress
from bench.stores import as_the_command, opened
from holdfast.store.port import Store, WaitQuery

app = hf.App("signals")


@app.workflow
async def parked() -> int:
    """Wait for a number, and return it."""
    return await hf.wait_signal("go", int)


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure from the first send to the last completion, and from one send to its completion."""
    rows: Rows = {}
    progress(f"signals: {effort.signalled_runs:,} runs at once")
    rounds = [await _at_once(folder, effort.signalled_runs) for _ in range(effort.engine_rounds)]
    rows[f"{effort.signalled_runs:,} runs at once"] = {
        column: statistics.median([row[column] for row in rounds]) for column in rounds[0]
    }
    progress("signals: one at a time")
    rows["one at a time"] = await _one_by_one(folder, effort.engine_sequential)
    return rows


@asynccontextmanager
async def _parked(folder: Path, count: int) -> AsyncIterator[tuple[Store, list[Any]]]:
    path = folder / "signals.db"
    async with opened(path) as store, app.node(store, options=as_the_command()):
        runs = await asyncio.gather(*(app.start(parked) for _ in range(count)))
        await _until_parked(store, runs[-1].run_id)
        gc.collect()
        yield store, runs
    path.unlink()


async def _until_parked(store: Store, run_id: str) -> None:
    listener = store.wakeups.listen()
    while not await store.find(WaitQuery(run_id=run_id)):
        await listener.wait(1.0)
    listener.close()


async def _at_once(folder: Path, count: int) -> dict[str, float]:
    async with _parked(folder, count) as (_, runs):
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(_signalled(run, number) for number, run in enumerate(runs)))
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return {"signals/s": count / took_s, "CPU µs/signal": cpu_s / count * 1e6}


async def _signalled(run: Any, number: int) -> None:
    await run.signal("go", number, signal_id=f"signal-{number}")
    assert await run.result() == number


async def _one_by_one(folder: Path, count: int) -> Row:
    taken: list[float] = []
    async with _parked(folder, count) as (_, runs):
        cpu = time.process_time()
        for number, run in enumerate(runs):
            began = time.perf_counter()
            await _signalled(run, number)
            taken.append(time.perf_counter() - began)
        cpu_s = time.process_time() - cpu
    return {"median ms": statistics.median(taken) * 1e3, "CPU µs/signal": cpu_s / count * 1e6}
