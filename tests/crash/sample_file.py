"""A file with a bit of everything in it, and how to read it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.store.sqlite import SqliteStore
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import (
    SampleNode,
    complete,
    marker,
    message,
    new_run,
    read_picture,
    record,
    signal,
    task,
    timer,
    wait,
)

RUNS = 40
NODE = "node-a"


async def make_file(path: Path) -> dict[str, Any]:
    """Make a store of some hundred pages, close it, and return everything that is in it."""
    clock = VirtualClock()
    store = await SqliteStore.open(path, clock=clock)
    await store.migrate()
    node = SampleNode(store, NODE)
    for number in range(RUNS):
        run_id = f"run-{number:03}"
        clock.advance(ms=1)
        await node.start(
            run_id, wait(), timer(START + 10**12), task(), tags=("sample",), reference_key=f"order-{number}"
        )
        await node.step(run_id, marker("small", number), marker("large", "x" * 3_000), records=[record(run_id)])
        await store.deliver([signal(run_id, value="y" * 2_000, signal_id="click"), message(run_id)])
        if number % 4 == 0:
            await node.step(run_id, complete("z" * 10_000))
    await store.create([new_run(f"waiting-{number}") for number in range(RUNS)])
    picture = await read_picture(store, [NODE])
    await store.close()
    return picture


async def read_file(path: Path) -> dict[str, Any]:
    """Return everything that is in a store, at the same instant as `make_file` did."""
    clock = VirtualClock()
    clock.advance(ms=RUNS)
    store = await SqliteStore.open(path, clock=clock)
    try:
        return await read_picture(store, [NODE])
    finally:
        await store.close()
