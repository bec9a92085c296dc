"""What a crash costs: runs in flight, SIGKILL, and how long until the next process has finished them all."""

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import holdfast as hf
from bench.effort import Effort
from bench.report import Row, Rows, progress
from bench.stores import as_the_command, opened

app = hf.App("bench-recovery")
_held: asyncio.Semaphore | None = None
"""Counts those that are held; in the first life only."""


@app.activity
async def begin(number: int) -> int:
    """Do nothing."""
    return number


@app.activity
async def go_on(number: int) -> int:
    """Do nothing, and in the first life never come to an end."""
    if _held is not None:
        _held.release()
        await asyncio.Event().wait()
    return number


@app.workflow
async def job(number: int) -> int:
    """Two activities, one after the other."""
    return await go_on(await begin(number))


async def measure(effort: Effort, folder: Path) -> Rows:
    """Kill a process that has all its runs in the middle of an activity, and start another one at once."""
    count, path = effort.recovered_runs, folder / "recovery.db"
    options = as_the_command(lease_ms=effort.lease_ms, activities_at_once=count)
    progress(f"recovery: {count:,} runs in flight")
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    lives = [spawning.Process(target=life, args=(path, options, count, sender)) for life in (_first, _second)]
    lives[0].start()
    receiver.recv()
    lives[0].kill()
    killed_at = time.perf_counter()
    lives[0].join()
    lives[1].start()
    receiver.recv()
    took_s = time.perf_counter() - killed_at
    lives[1].join()
    async with opened(path) as store:
        completed = (await store.stats()).runs.get("COMPLETED", 0)
    path.unlink()
    figures: Row = {"lease s": effort.lease_ms / 1e3, "all finished after s": took_s, "completed": completed}
    return {f"{count:,} runs in flight": figures}


def _first(path: Path, options: hf.NodeOptions, count: int, sender: Connection) -> None:
    async def live() -> None:
        global _held
        _held = asyncio.Semaphore(0)
        async with opened(path) as store, app.node(store, options=options):
            await asyncio.gather(*(app.start(job, number, run_id=f"job-{number}") for number in range(count)))
            for _ in range(count):
                await _held.acquire()
            sender.send(count)
            await asyncio.Event().wait()

    asyncio.run(live())


def _second(path: Path, options: hf.NodeOptions, count: int, sender: Connection) -> None:
    async def live() -> None:
        async with opened(path) as store, app.node(store, options=options):
            results = await asyncio.gather(*(app.run(f"job-{number}").result() for number in range(count)))
            sender.send(len(results))

    asyncio.run(live())
