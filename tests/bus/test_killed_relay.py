"""Relays that are killed, and a sink that fails three times in ten: every event arrives, in order for each run.

`TEST_RELAY_KILLS` and `TEST_RELAY_RUNS` make it a long play: 100 kills and 2,000 runs, as `make soak` does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from holdfast.engine.options import NodeOptions
from holdfast.store.port import Store
from holdfast.store.postgres import PostgresStore
from holdfast.store.queries import BusDeadLetterQuery
from holdfast.store.sqlite import SqliteStore
from tests.bus.test_relay import hook, make_app, status_of
from tests.bus.webhook_server import Receiver, until

KILLS = int(os.environ.get("TEST_RELAY_KILLS", "3"))
RUNS = int(os.environ.get("TEST_RELAY_RUNS", "20"))
ROOT = Path(__file__).parents[2]


@pytest.mark.process
@pytest.mark.contract("BUS-1", "OWN-3")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_every_event_arrives_in_order_although_relays_are_killed(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Duplicates have equal ids, and what was given up on the way can be requeued."""
    store: Store
    if kind == "sqlite":
        address = f"sqlite:///{tmp_path}/bus.db"
        store = await SqliteStore.open(tmp_path / "bus.db")
    else:
        address = request.getfixturevalue("postgres_url")
        store = await PostgresStore.open(address)
    await store.migrate()
    async with Receiver(failing=0.3, seed=7).serve() as receiver:
        await store.put_sink(hook(receiver, max_attempts=4, first_ms=2, most_ms=20))
        app, order = make_app()
        async with app.node(store, options=NodeOptions(relays=False)):
            runs = []
            for first in range(0, RUNS, 100):
                numbers = range(first, min(first + 100, RUNS))
                runs += await asyncio.gather(*(app.start(order, number) for number in numbers))
                await asyncio.gather(*(run.result() for run in runs[first:]))
            histories = {run.run_id: [event.run_seq for event in await run.events()] for run in runs}
        expected = sum(map(len, histories.values()))
        given_up: set[str] = set()
        for number in range(KILLS + 1):
            seen = len(receiver.events)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.bus.relay_process", address),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
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
        got = receiver.by_run()
        print(
            f"{kind}: {expected} events of {RUNS} runs in {receiver.requests} requests, {KILLS} kills, "
            f"{len(receiver.events) - expected} duplicates, {len(given_up)} runs with dead letters"
        )
        assert {run_id: sorted(found) for run_id, found in got.items()} == histories
        for run_id, found in got.items():
            assert found == histories[run_id] or run_id in given_up  # whose later events had gone on
        assert all(len(ids) == 1 for ids in receiver.ids().values())
        assert receiver.unsigned == 0
    await store.close()


async def _requeue_until_sent(store: Store) -> set[str]:
    """Wait until nothing is left, and put back what was given up; return the runs that this concerned."""
    given_up: set[str] = set()
    while True:
        letters = await store.find(BusDeadLetterQuery())
        given_up.update(letter.run_id for letter in letters)
        await store.settle_bus_dead_letters([letter.letter_id for letter in letters], "requeue")
        if not letters and not (await status_of(store)).backlog:
            return given_up
        await asyncio.sleep(0.02)
