"""Processes are killed at any moment, again and again, on one file: what they were told stays true."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.store.port import Accepted, Existing
from holdfast.testing.samples import new_run, signal
from tests.crash.file_check import check_file
from tests.crash.kill_loop import KillPlan, run_kill_loop
from tests.crash.openers import CLOSED, SILENT, kill_openers
from tests.races.stores import opened, prepare

pytestmark = pytest.mark.slow

DEATHS = int(os.environ.get("TEST_KILL_ROUNDS", "120"))
"""`make soak` kills 1,000."""

SECONDS_PER_DEATH = 2.0


@pytest.mark.contract("STO-1", "EVT-1", "SIG-4", "MSG-2")
@pytest.mark.parametrize("lanes", [1, 2])
async def test_killing_writers_loses_nothing_and_leaves_nothing_half_done(tmp_path: Path, lanes: int) -> None:
    path = tmp_path / "store.db"
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")

    report = run_kill_loop(KillPlan(path, seed, DEATHS, lanes), timeout_s=60 + DEATHS * SECONDS_PER_DEATH)

    print(report.deaths, report.ledger.repeated)
    async with opened(path) as store:
        for intent in report.unanswered:
            report.ledger.enter(intent, await intent.carry_out(store), is_repeated=True)
        await report.ledger.check(store)
    assert await check_file(path, report.ledger.signals.values()) == len(report.ledger.runs)
    assert report.deaths["in a verb"] > DEATHS // 5, "the kills miss what they are aimed at"
    assert report.ledger.signals
    assert sum(map(len, report.ledger.events.values())) > DEATHS


@pytest.mark.contract("STO-1", "QUE-1")
async def test_a_store_that_was_killed_while_it_was_begun_can_be_used(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")

    words = kill_openers(tmp_path, seed, DEATHS // 6)

    assert {SILENT, CLOSED} <= set(words), "the kills miss what they are aimed at"
    for number, word in enumerate(words):
        path = tmp_path / f"{number}.db"
        async with opened(path) as store:
            if word != SILENT:
                (loaded,) = await store.load(["run-1"])
                assert loaded is not None, "an acknowledged run is lost"
            await store.migrate()
            (answer,) = await store.create([new_run("run-1")])
        assert isinstance(answer, Existing) or word == SILENT
        assert await check_file(path) == 1


LISTENER = """
import asyncio, sys
from holdfast.store.sqlite import SqliteStore

async def main():
    store = await SqliteStore.open(sys.argv[1])
    listener = store.wakeups.listen()
    print("listening", flush=True)
    await listener.wait(None)

asyncio.run(main())
"""


@pytest.mark.contract("MSG-4")
async def test_the_bell_of_a_killed_process_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path, new_run("run-1"))
    command = [sys.executable, "-c", LISTENER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        process.kill()

    async with opened(path) as store:
        (answer,) = await store.deliver([signal("run-1")])

    assert isinstance(answer, Accepted)
    assert [file.name for file in tmp_path.iterdir()] == ["store.db"]
