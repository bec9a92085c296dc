"""Nodes that have nothing to do share what there is: none takes most of it while others go without."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from holdfast.store.port import RunQuery, Store
from holdfast.store.postgres import PostgresStore
from holdfast.store.wakeups import LocalWakeups
from tests.store.postgres import sharing_node

ROOT = Path(__file__).parents[3]
NODES = 4
RUNS = 2_000
PATIENCE_S = 60.0


@contextmanager
def node(address: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process with a node, which is gone at the end."""
    command = [sys.executable, "-m", "tests.store.postgres.sharing_node", address, name]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def shares(store: Store) -> Counter[str]:
    """Return how many runs each node has finished."""
    counts: Counter[str] = Counter()
    after = ""
    while heads := await store.find(RunQuery(after=after, limit=500)):
        for head in heads:
            assert head.snapshot is not None
            counts[str(head.snapshot.last_executed_by)] += 1
        after = heads[-1].run_id
    return counts


@pytest.mark.slow
@pytest.mark.contract("OWN-1", "MSG-4")
async def test_idle_nodes_that_are_woken_at_once_share_what_is_ready(address: str) -> None:
    silent = await PostgresStore.open(address, wakeups=LocalWakeups())
    await silent.migrate()
    store = await PostgresStore.open(address)
    with ExitStack() as stack:
        nodes = [stack.enter_context(node(address, f"node-{number}")) for number in range(NODES)]
        async with asyncio.timeout(PATIENCE_S):
            for process in nodes:
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
            async with sharing_node.app.connect(silent):
                runs = await asyncio.gather(
                    *(sharing_node.app.start(sharing_node.parcel, number) for number in range(RUNS))
                )
            async with sharing_node.app.connect(store):
                store.wakeups.notify()
                results = await asyncio.gather(*(sharing_node.app.run(run.run_id).result() for run in runs))
        counts = await shares(store)
    await store.close()
    await silent.close()
    assert results == list(range(RUNS))
    assert len(counts) == NODES, counts
    assert max(counts.values()) <= 0.6 * RUNS, counts
