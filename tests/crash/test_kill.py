"""Processes are killed at any moment, again and again, on one file: what they were told stays true."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.crash.nursery import Order, run
from tests.crash.whole import check_file
from tests.races.builders import opened

pytestmark = pytest.mark.slow

DEATHS = int(os.environ.get("HOLDFAST_KILL_ROUNDS", "300"))
SECONDS_PER_DEATH = 2.0


@pytest.mark.contract("STO-1", "EVT-1", "SIG-4", "MSG-2")
@pytest.mark.parametrize("lanes", [1, 2])
async def test_killing_writers_loses_nothing_and_leaves_nothing_half_done(tmp_path: Path, lanes: int) -> None:
    path = tmp_path / "store.db"
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")

    report = run(Order(path, seed, DEATHS, lanes), timeout_s=60 + DEATHS * SECONDS_PER_DEATH)

    print(report.deaths, report.ledger.repeated)
    async with opened(path) as store:
        for intent in report.unanswered:
            report.ledger.enter(intent, await intent.carry_out(store), is_repeated=True)
        await report.ledger.check(store)
    assert await check_file(path) == len(report.ledger.runs)
    assert report.deaths["in a verb"] > DEATHS // 5, "the kills miss what they are aimed at"
    assert report.ledger.signals
    assert sum(map(len, report.ledger.events.values())) > DEATHS
