"""An activity that is not known where its run is: it waits for a node that knows it, and that is said once."""

import asyncio
import logging

import pytest

import holdfast as hf
from tests.engine.harness import event_types, wait_for_event


async def test_an_unknown_activity_of_a_run_is_reported_once_for_each_name(caplog: pytest.LogCaptureFixture) -> None:
    app, other = hf.App("shop"), hf.App("shop")
    began: asyncio.Queue[None] = asyncio.Queue()

    @app.activity
    async def gone() -> None:
        began.put_nowait(None)
        await asyncio.Event().wait()

    async def order() -> None:
        await asyncio.gather(gone(), gone(), gone())

    workflow = app.workflow(order)
    other.workflow(order)
    store = hf.MemoryStore()
    with caplog.at_level(logging.ERROR, logger="holdfast.node"):
        async with asyncio.timeout(60):
            async with app.node(store, options=hf.NodeOptions(drain_s=0.01)):
                run_id = (await app.start(workflow)).run_id
                for _ in range(3):  # what has not begun when its node stops is given back, which is recorded
                    await began.get()
            async with other.node(store, options=hf.NodeOptions(drain_s=0.01)):
                while not caplog.records:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                await other.run(run_id).signal("more", 1)
                assert "StepRetried" not in await event_types(other.run(run_id))
            async with app.node(store, options=hf.NodeOptions(drain_s=0.01)):
                await wait_for_event(app.run(run_id), "StepRetried", times=3)
    assert [record.message for record in caplog.records] == [
        f"run {run_id}: activity 'gone' is not registered here; its steps wait"
    ]
