"""What the stores admit is what the rule of `core/admission.py` says, after any sequence of starts and ends."""

import random
from pathlib import Path

import pytest

from holdfast.store.memory import MemoryStore
from holdfast.store.port import Store
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from tests.store.admission_model import compare


@pytest.mark.contract("QUE-2")
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("seed", range(12))
async def test_stores_admit_by_the_rule(kind: str, seed: int, tmp_path: Path) -> None:
    clock = VirtualClock()
    store: Store = MemoryStore(clock=clock)
    if kind == "sqlite":
        store = await SqliteStore.open(tmp_path / "a.db", clock=clock)
    await store.migrate()
    try:
        await compare(store, clock, random.Random(seed), 150)
    finally:
        await store.close()
