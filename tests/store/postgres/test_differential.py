"""PostgreSQL answers as the reference model and as SQLite do, whatever it is asked, and shows the same contents.

`TEST_SEED` fixes the first seed, and `TEST_SEQUENCES` how many sequences are tried.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from holdfast.store.port import Store
from holdfast.store.postgres import PostgresStore
from holdfast.testing import VirtualClock
from tests.store.differential import LIMITS, Subject, World
from tests.store.postgres.tampering import execute, lose_record
from tests.store.test_differential import STEPS, TakingTurns, make_memory, make_sqlite

SEQUENCES = int(os.environ.get("TEST_SEQUENCES", "2"))


@pytest.mark.slow
@pytest.mark.contract("STO-1", "PRJ-4", "EVT-1", "OWN-1", "SIG-5", "FMT-2", "INV")
@pytest.mark.parametrize("ways", [1, 2], ids=["one node", "two nodes"])
async def test_all_stores_answer_alike_whatever_they_are_asked(tmp_path: Path, address: str, ways: int) -> None:
    first = int(os.environ.get("TEST_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
    reached: Counter[str] = Counter()
    for number in range(5 * SEQUENCES):
        if number >= SEQUENCES and is_enough(reached):
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        reached += await run_sequence(first + number, folder, address, ways)
        await execute(address, "DROP SCHEMA " + address.partition("schema=")[2].partition("&")[0] + " CASCADE")
    assert is_enough(reached), reached


def is_enough(reached: Counter[str]) -> bool:
    """Return whether something was done; a few sequences come to little."""
    return reached["commit: committed"] > 10 and reached["claim: free"] > 1


async def run_sequence(seed: int, folder: Path, address: str, ways: int) -> Counter[str]:
    clock = VirtualClock()
    stores = [await PostgresStore.open(address, clock=clock, limits=LIMITS) for _ in range(ways)]
    store = cast("Store", stores[0] if ways == 1 else TakingTurns(stores))
    subjects = [
        await make_memory(folder, clock, LIMITS),
        await make_sqlite(folder, clock, LIMITS),
        Subject("postgres", store, lambda *scope: lose_record(address, *scope)),
    ]
    try:
        for subject in subjects:
            await subject.store.migrate()
        world = World(seed, clock, subjects)
        await world.run(STEPS)
    except Exception as problem:
        problem.add_note(f"to see it again: TEST_SEED={seed} pytest tests/store/postgres/test_differential.py")
        raise
    finally:
        for subject in subjects:
            await subject.store.close()
    return world.reached
