"""SQLite finds what the reference model finds, whatever drives the search."""

from pathlib import Path
from random import Random

import pytest

from holdfast.store.memory import MemoryStore
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from tests.store.random_searches import compare, fill


@pytest.mark.contract("QUE-4")
@pytest.mark.parametrize("seed", range(2))
async def test_a_file_finds_what_the_model_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random, clock = Random(seed), VirtualClock()
    model_clock = VirtualClock()
    model = MemoryStore(clock=model_clock)
    store = await SqliteStore.open(tmp_path / "store.db", clock=clock)
    for each in (model, store):
        await each.migrate()
    await fill({model: model_clock, store: clock}, random, 25)
    await compare(model, store, random, clock, 100, monkeypatch)
    await store.close()
