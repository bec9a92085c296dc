"""Relays that are killed, and a sink that fails three times in ten: every event arrives, in order for each run.

`TEST_RELAY_KILLS` and `TEST_RELAY_RUNS` make it a long play: 100 kills and 2,000 runs before a release.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from holdfast.engine.options import NodeOptions
from holdfast.store.sqlite import SqliteStore
from holdfast.store.types import BusDeadLetterQuery
from tests.bus.test_relay import hook, make_app, status_of
from tests.bus.webhook_server import Receiver, until

KILLS = int(os.environ.get("TEST_RELAY_KILLS", "3"))
RUNS = int(os.environ.get("TEST_RELAY_RUNS", "20"))
ROOT = Path(__file__).parents[2]


@pytest.mark.process
@pytest.mark.contract("BUS-1", "OWN-3")
async def test_every_event_arrives_in_order_although_relays_are_killed(tmp_path: Path) -> None:
    """Duplicates have equal ids, and what was given up on the way can be requeued."""
    address = f"sqlite:///{tmp_path}/bus.db"
    store = await SqliteStore.open(tmp_path / "bus.db")
    await store.migrate()
    async with Receiver(failing=0.3, seed=7).serve() as receiver:
        await store.put_sink(hook(receiver, max_attempts=4, first_ms=2, most_ms=20))
        app, order = make_app()
        async with app.node(store, options=NodeOptions(relays=False)):
            runs = [await app.start(order, number) for number in range(RUNS)]
            for run in runs:
                await run.result()
            histories = {run.run_id: [event.run_seq for event in await run.events()] for run in runs}
        expected = sum(map(len, histories.values()))
        given_up: set[str] = set()
        for number in range(KILLS + 1):
            seen = len(receiver.events)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.bus.relay_process", address),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                if number < KILLS:
                    most = seen + max(1, expected // (2 * KILLS))
                    await until(lambda most=most: len(receiver.events) >= most)  # type: ignore[misc]
                else:
                    async with asyncio.timeout(300):
                        given_up = await _requeue_until_sent(store)
            finally:
                process.kill()
                await process.wait()
        got = {run_id: receiver.of(run_id) for run_id in histories}
        assert {run_id: sorted(found) for run_id, found in got.items()} == histories
        for run_id, found in got.items():
            assert found == histories[run_id] or run_id in given_up  # whose later events had gone on
        assert all(len(ids) == 1 for ids in receiver.ids().values())
        assert receiver.unsigned == 0
    await store.close()


async def _requeue_until_sent(store: SqliteStore) -> set[str]:
    """Wait until nothing is left, and put back what was given up; return the runs that this concerned."""
    given_up: set[str] = set()
    while True:
        letters = await store.find(BusDeadLetterQuery())
        given_up.update(letter.run_id for letter in letters)
        await store.settle_bus_dead_letters([letter.letter_id for letter in letters], "requeue")
        if not letters and not (await status_of(store)).backlog:
            return given_up
        await asyncio.sleep(0.02)
