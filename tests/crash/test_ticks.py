"""Ticks of every second on a real server, fired by processes that are killed: each starts one run.

`TEST_TICK_SECONDS=60 TEST_TICK_SCHEDULES=50` plays for a minute, as `make soak` does.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast.store.port import RunQuery, ScheduleQuery
from holdfast.store.postgres import PostgresStore

SECONDS = int(os.environ.get("TEST_TICK_SECONDS", "4"))
SCHEDULES = int(os.environ.get("TEST_TICK_SCHEDULES", "5"))
NODES = 3
FROZEN = 0.3
"""How often a process is frozen instead of killed."""

TOP = Path(__file__).parents[2]


def node(address: str) -> subprocess.Popen[bytes]:
    """Start a process with a node."""
    command = [sys.executable, "-m", "tests.crash.tick_node", address, str(SCHEDULES)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=TOP)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.contract("TMR-2", "OWN-3", "OWN-4")
async def test_each_second_has_one_run_however_often_nodes_are_killed(postgres_url: str) -> None:
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    nodes = [node(postgres_url) for _ in range(NODES)]
    kills = 0
    store = await PostgresStore.open(postgres_url)
    try:
        async with asyncio.timeout(60):
            while len(await store.find(ScheduleQuery())) < SCHEDULES:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        end = await store.now() + SECONDS * 1_000_000
        while await store.now() < end:
            await asyncio.sleep(rng.uniform(0.5, 1.0))
            kills += 1
            victim = rng.randrange(len(nodes))
            for process in nodes:
                if rng.random() < FROZEN:
                    process.send_signal(signal.SIGCONT)
            if rng.random() < FROZEN:  # for longer than its lease, mostly; then it comes back
                nodes[victim].send_signal(signal.SIGSTOP)
                continue
            nodes[victim].kill()
            nodes[victim].wait()
            nodes[victim] = node(postgres_url)
        for process in nodes:
            process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(120):
            while any(found.watermark < end for found in await store.find(ScheduleQuery())):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        ticks: Counter[tuple[str, int]] = Counter()
        query = RunQuery()
        while page := await store.find(query):
            for head in page:
                schedule_id, tick = head.run_request_id.removeprefix("schedule:").rsplit(":", 1)
                ticks[schedule_id, int(tick)] += 1
            query = RunQuery(after=page[-1].run_id)
        print(f"{len(ticks)} ticks of {SCHEDULES} schedules, {kills} kills and freezes")
        assert max(ticks.values()) == 1, seed
        for number in range(SCHEDULES):
            seen = sorted(tick for schedule_id, tick in ticks if schedule_id == f"s-{number}")
            assert seen == list(range(seen[0], seen[-1] + 1, 1_000_000)), seed
            assert seen[-1] >= end - 1_000_000, seed
    finally:
        for process in nodes:
            process.kill()
            process.wait()
        await store.close()
