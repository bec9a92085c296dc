"""Levels of the stored format: runs whose state needs more than a node understands are left to others (FMT-1)."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.core.plans import FORMAT_LEVEL, HELD_LEVEL, TIMEOUT_LEVEL
from holdfast.core.state import COMPLETED, PENDING, state_of
from holdfast.engine.abilities import abilities_of
from holdfast.engine.observe.doctor import examine
from holdfast.store.port import RunQuery
from holdfast.testing.samples import new_run
from tests.engine.harness import EngineVariant, store_with_virtual_time

pytestmark = pytest.mark.contract("FMT-1")

FUTURE = FORMAT_LEVEL + 1


def an_app() -> tuple[hf.App, Any, Any]:
    """Return an app with two workflows that end at once; the second has a limit."""
    app = hf.App("levels")

    @app.workflow(name="order", version="1")
    async def order() -> str:
        return "done"

    @app.workflow(at_once=1)
    async def limited() -> str:
        return "done"

    return app, order, limited


async def test_a_run_of_a_later_release_is_not_touched_and_doctor_names_it(variant: EngineVariant) -> None:
    """It stays as it is, also after the grace in which runs of missing definitions are paused."""
    app, order, _ = an_app()
    async with store_with_virtual_time(variant) as (store, clock):
        new = new_run("future", now=clock.now())
        await store.create([replace(new, snapshot=replace(new.snapshot, needs=FUTURE))])
        async with variant.node(app, store, safety_poll_s=0.01, definition_grace_s=0.02):
            clock.advance(ms=120_000)
            for _ in range(3):
                assert await (await app.start(order)).result() == "done"
                clock.advance(ms=1_000)
            [head] = await store.find(RunQuery(run_ids=("future",)))
            assert (head.status, head.version, head.lease_owner, head.lease_epoch) == (PENDING, 1, None, 0)
            [published] = abilities_of(await store.find_nodes())
            assert published.abilities.level == FORMAT_LEVEL
            assert published.abilities.named_workflows == {("order", "1"), ("limited", "1")}
            found = [each.sentence for each in (await examine(store, clock)).findings if "level" in each.sentence]
            assert len(found) == 1, found
            assert f"1 runs of order version 1 need level {FUTURE}" in found[0]


async def test_a_held_run_of_a_workflow_with_limits_needs_a_level_until_it_has_started(variant: EngineVariant) -> None:
    """Older nodes would start it without a place. After that any node can go on with it."""
    app, order, limited = an_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store, safety_poll_s=0.01):
        run = await app.start(limited, after=timedelta(hours=1))
        plain = await app.start(order, after=timedelta(hours=1))
        heads = {head.run_id: head for head in await store.find(RunQuery())}
        assert (heads[run.run_id].needs, heads[plain.run_id].needs) == (HELD_LEVEL, 0)
        assert state_of(run.run_id, await run.events()).needs == HELD_LEVEL, "the snapshot is the fold of the events"
        clock.advance(ms=3_600_000)
        assert [await run.result(), await plain.result()] == ["done", "done"]
        [head] = await store.find(RunQuery(run_ids=(run.run_id,)))
        assert (head.status, head.needs) == (COMPLETED, 0)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
async def test_a_node_wakes_up_for_a_run_that_needs_a_level(variant: EngineVariant, timeout_s: float | None) -> None:
    """It sleeps until something is due that it can claim, of whatever level, not until its periodic look."""
    app, _, limited = an_app()
    async with asyncio.timeout(60), variant.opened() as store, variant.node(app, store, safety_poll_s=600.0):
        run = await app.start(limited, after=timedelta(milliseconds=20), run_timeout=timeout_s)
        [head] = await store.find(RunQuery())
        assert head.needs == (HELD_LEVEL if timeout_s is None else TIMEOUT_LEVEL)
        assert await run.result() == "done"
