"""A workflow that blocks its node without ever awaiting is paused, and every other run goes on."""

from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.state import PAUSED
from holdfast.errors import RunawayWorkflow
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_status

pytestmark = pytest.mark.untraced  # a strike may leave a lock of coverage held: see the watchdog

TURN_S = 0.2


def spin() -> bool:
    while True:
        pass


def mended() -> Any:
    async def order() -> str:
        return await hf.wait_signal("go", str)

    return order


def spins_at_once() -> Any:
    async def order() -> str:
        spin()
        return await hf.wait_signal("go", str)

    return order


def spins_after_a_signal() -> Any:
    async def order() -> str:
        answer = await hf.wait_signal("go", str)
        try:
            spin()
        except Exception:
            return "swallowed"
        return answer

    return order


def spins_in_a_condition() -> Any:
    async def order() -> str:
        answer = await hf.wait_signal("go", str)
        await hf.wait_until(spin)
        return answer

    return order


def spins_again_when_it_is_stopped() -> Any:
    async def order() -> str:
        answer = await hf.wait_signal("go", str)
        try:
            spin()
        finally:
            try:
                await hf.wait_signal("never", str)
            finally:
                spin()
        return answer

    return order


def shop(workflow: Callable[[], Any]) -> tuple[hf.App, Any, Any]:
    """Return an app with this workflow, called order, and one that does no harm."""
    app = hf.App("shop")

    async def harmless() -> str:
        return await hf.wait_signal("go", str)

    return app, app.workflow(name="order")(workflow()), app.workflow(harmless)


@pytest.mark.contract("MSG-3", "INV", "WF-2")
@pytest.mark.parametrize(
    "broken", [spins_at_once, spins_after_a_signal, spins_in_a_condition, spins_again_when_it_is_stopped]
)
async def test_a_workflow_that_blocks_is_paused_others_go_on_and_it_can_be_mended(
    variant: EngineVariant, broken: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with variant.opened() as store:
        app, order, harmless = shop(broken)
        async with variant.node(app, store, turn_s=TURN_S):
            other = await app.start(harmless)
            run = await app.start(order)
            await run.signal("go", "on")
            event = await wait_for_event(run, "RunPaused")
            await other.signal("go", "on")
            assert await other.result() == "on"
        assert isinstance(event.data, e.RunPaused)
        assert event.data.reason == "RunawayWorkflow"
        assert event.data.error is not None
        assert f"within {TURN_S} s at {__file__}:" in event.data.error.message
        assert f"run {run.run_id}: order blocks its node at {__file__}:" in caplog.text
        app, order, _ = shop(mended)
        async with variant.node(app, store, turn_s=TURN_S):
            again = app.run(run.run_id)
            await wait_for_status(again, PAUSED)
            await again.resume()
            assert await again.result() == "on"


@pytest.mark.contract("MSG-3", "WF-6")
async def test_a_query_that_blocks_is_stopped_and_its_run_goes_on(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        hf.on_query("spin", spin)
        return await hf.wait_signal("go", str)

    async with variant.node(app, turn_s=TURN_S):
        run = await app.start(order)
        await wait_for_event(run, "SignalWaiting")
        with pytest.raises(RunawayWorkflow):
            await run.query("spin")
        await run.signal("go", "on")
        assert await run.result() == "on"
        assert "RunPaused" not in await event_types(run)
