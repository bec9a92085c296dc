"""A process with many runs in flight. `hold` keeps every one of them in its second activity; `finish` lets them end."""

from __future__ import annotations

import asyncio
import sys
import time

import holdfast as hf

RUNS = 500
LEASE_MS = 2_000
OPTIONS = hf.NodeOptions(lease_ms=LEASE_MS, activities_at_once=RUNS)

app = hf.App("in-flight")
held = asyncio.Semaphore(0)


@app.activity
async def begin(number: int) -> int:
    """Do something quickly."""
    return number


@app.activity
async def go_on(number: int) -> int:
    """Do something that does not end in the first life."""
    if sys.argv[2] == "hold":
        held.release()
        await asyncio.Event().wait()
    return number


@app.workflow
async def job(number: int) -> int:
    """Two activities, one after the other."""
    return await go_on(await begin(number))


async def main() -> None:
    """Start every job, unless it is there, and say how far it is."""
    began = time.monotonic()
    async with app.node(f"sqlite:///{sys.argv[1]}", options=OPTIONS):
        runs = [await app.start(job, number, request_id=f"job-{number}") for number in range(RUNS)]
        if sys.argv[2] == "hold":
            for _ in range(RUNS):
                await held.acquire()
            print("in flight", flush=True)
        results = await asyncio.gather(*(run.result() for run in runs))
    assert results == list(range(RUNS))
    print(time.monotonic() - began, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
