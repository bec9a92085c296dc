"""How a node receives: it waits to be rung for, and looks by itself after a while, in case a ring was lost."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.observe.metrics import observer_of
from holdfast.errors import InvalidInput
from holdfast.store.memory import MemoryStore
from holdfast.store.wakeups import Ended, LocalWakeups, Topic
from tests.engine.harness import MOST_SECONDS


class Silent(LocalWakeups):
    """A bell that nobody hears."""

    def notify(self, topic: Topic = "runs", ended: Ended = None) -> None:
        """Do nothing."""


def silent_store() -> MemoryStore:
    """Return a store whose nodes are never rung for."""
    store = MemoryStore()
    store.wakeups = Silent()
    return store


def waiting_app() -> tuple[hf.App, Any]:
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        return await hf.wait_signal("go", str)

    return app, order


@pytest.mark.contract("MSG-4")
async def test_how_long_a_node_waits_for_a_ring_can_be_set() -> None:
    """It does not look again and again before that, and finds what it was not rung for after it."""
    app, order = waiting_app()
    other, _ = waiting_app()
    store = silent_store()
    async with asyncio.timeout(MOST_SECONDS), app.node(store, options=hf.NodeOptions(safety_poll_s=0.2)):
        counts = observer_of(app.runtime().store).counts
        run = await app.start(order)
        async with other.connect(store):
            await other.run(run.run_id).signal("go", "heard")
            before = counts.claims
            assert await run.result() == "heard"
            assert counts.claims - before <= 3


@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize("field", ["safety_poll_s", "drain_s", "claim_runs", "activities_at_once"])
@pytest.mark.parametrize("value", [-1, "1"])
def test_settings_of_receiving_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        hf.NodeOptions(**{field: value})
    assert raised.value.details == {"field": field}
