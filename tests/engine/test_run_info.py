"""`hf.run_info()`: what a workflow can know about its run."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import NotDurable
from tests.engine.harness import EngineVariant

pytestmark = pytest.mark.contract("WF-1")


async def test_a_run_knows_how_it_came_about_also_after_it_began_again(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow(version="7")
    async def order(seen: list[Any]) -> list[Any]:
        info = hf.run_info()
        assert info.started_at is not None
        assert info.created_at is not None
        assert info.created_at <= info.started_at <= hf.now()
        await hf.sleep(0.01)
        assert hf.run_info() == info  # however often it is replayed
        seen = [*seen, [info.run_id, info.workflow, info.version, info.tags, info.reference_key, info.request_id]]
        seen[-1] += [info.tenant, info.parent_run_id, info.rotation, info.started_at.isoformat()]
        if len(seen) < 3:
            hf.continue_as_new(seen)
        return seen

    @app.workflow
    async def parent() -> list[Any]:
        return await order([])

    async with variant.node(app):
        run = await app.start(
            order, [], run_id="o-1", request_id="q", tags=("a", "b"), reference_key="ref", tenant="acme"
        )
        found = await run.result()
        child = await (await app.start(parent, run_id="p")).result()
    times = {each.pop() for each in found}
    assert len(times) == 1
    assert datetime.fromisoformat(times.pop()).tzinfo is not None
    assert found == [["o-1", "order", "7", ["a", "b"], "ref", "q", "acme", None, rotation] for rotation in range(3)]
    assert [(each[0], each[7]) for each in child] == [("p/order", "p")] * 3


async def test_a_run_of_a_schedule_knows_its_tick(variant: EngineVariant) -> None:
    app = hf.App("shop")
    found: asyncio.Future[hf.RunInfo] = asyncio.get_running_loop().create_future()

    @app.workflow
    async def report() -> None:
        if not found.done():
            found.set_result(hf.run_info())

    async with variant.node(app):
        await app.schedules.create("often", workflow=report, every=timedelta(seconds=1))
        info = await found
    assert info.schedule_id == "often"
    assert info.tick is not None
    assert info.tick.microsecond == 0
    assert info.started_at is not None
    assert info.tick <= info.started_at


async def test_it_is_known_inside_of_a_workflow_only() -> None:
    with pytest.raises(NotDurable):
        hf.run_info()
