"""PostgreSQL finds what the reference model finds, whatever drives the search."""

from random import Random

import pytest

from holdfast.store.memory import MemoryStore
from holdfast.store.postgres import PostgresStore
from holdfast.testing import VirtualClock
from tests.store.random_searches import compare, fill


@pytest.mark.contract("QUE-4")
async def test_a_server_finds_what_the_model_finds(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random, clock = Random(7), VirtualClock()
    model_clock = VirtualClock()
    model = MemoryStore(clock=model_clock)
    store = await PostgresStore.open(address, clock=clock)
    for each in (model, store):
        await each.migrate()
    await fill({model: model_clock, store: clock}, random, 20)
    await compare(model, store, random, clock, 40, monkeypatch)
    await store.close()
