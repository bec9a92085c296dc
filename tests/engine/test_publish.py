"""`hf.publish`: what is shown with a run while it works."""

from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import NotDurable, NotFound, PayloadTooLarge
from holdfast.run import RunHandle
from holdfast.store.port import RunQuery, Store
from holdfast.testing import explore
from tests.engine.harness import wait_for_event

pytestmark = pytest.mark.contract("PRJ-1")


def packs(app: hf.App) -> Any:
    """Register a workflow that publishes what it does."""

    @app.workflow
    async def pack(rounds: int) -> str:
        hf.publish(stage="packing", done=0.4, note="fragile")
        await hf.wait_signal("go")
        hf.publish(done=0.8, note=None)
        if rounds:
            hf.continue_as_new(rounds - 1)
        await hf.wait_signal("go")
        hf.publish(stage="sent", done=1)
        return "sent"

    return pack


async def published(store: Store, run: RunHandle[Any]) -> dict[str, Any]:
    """Return what a list shows of a run."""
    [head] = await store.find(RunQuery(run_ids=(run.run_id,)))
    assert head.snapshot is not None
    return head.snapshot.published


async def test_what_is_published_is_listed_also_after_the_run_began_again_and_ended(store: Store) -> None:
    app = hf.App("shop")
    pack = packs(app)
    async with app.node(store, options=hf.NodeOptions(cached_runs=0)):
        run = await app.start(pack, 0)
        await wait_for_event(run, "SignalWaiting")
        assert await published(store, run) == {"stage": "packing", "done": 0.4, "note": "fragile"}
        await run.signal("go")
        await wait_for_event(run, "SignalWaiting", 2)
        assert await run.published() == await published(store, run) == {"stage": "packing", "done": 0.8}
        await run.signal("go")
        assert await run.result() == "sent"
        assert await published(store, run) == {"stage": "sent", "done": 1}
        again = await app.start(pack, 1)
        await again.signal("go")
        await wait_for_event(again, "ContinuedAsNew")
        await wait_for_event(again, "SignalWaiting", 2)
        assert (await published(store, again))["stage"] == "packing"


def test_it_changes_nothing_else() -> None:
    app = hf.App("shop")
    pack = packs(app)

    async def drive(run: RunHandle[Any]) -> None:
        for number in range(3):
            await run.signal("go", signal_id=f"go-{number}")

    explore(app, pack, 1, drive=drive).assert_clean()


async def test_it_is_bounded_and_for_workflows_only() -> None:
    app = hf.App("shop")

    @app.workflow
    async def shouts() -> str:
        try:
            hf.publish(text="x" * 5_000)
        except PayloadTooLarge:
            return "too much"
        return "published"

    with pytest.raises(NotDurable):
        hf.publish(done=1)
    async with app.node("memory://"):
        run = await app.start(shouts)
        assert await run.result() == "too much"
        assert await run.published() == {}
        with pytest.raises(NotFound):
            await app.run("nobody").published()
