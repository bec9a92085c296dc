"""Flows on a node: what runs, in which order, with which state."""

import pytest

import holdfast as hf
from holdfast import errors
from tests.engine.harness import EngineVariant, event_types
from tests.flows.order_flow import Approval, Order, Shop

pytestmark = pytest.mark.contract("WF-1")


async def test_flow_passes_its_state_through_its_steps(variant: EngineVariant) -> None:
    shop = Shop()
    async with variant.node(shop.app):
        run = await shop.app.start(shop.fulfil, Order(cents=50_00))
        result = await run.result()
    assert result == Order(
        cents=50_00, in_stock=True, payment="paid 5000", reservation="shelf 7", parcel="paid 5000, shelf 7"
    )
    assert shop.done[0] == "check_stock"
    assert sorted(shop.done[1:3]) == ["charge", "reserve"]
    assert shop.done[3:] == ["ship"]


async def test_signal_of_a_flow_changes_its_state(variant: EngineVariant) -> None:
    shop = Shop()
    async with variant.node(shop.app):
        run = await shop.app.start(shop.fulfil, Order(cents=500_00))
        await run.signal("approval", Approval("ann"))
        result = await run.result()
    assert result.approved_by == "ann"
    assert result.parcel == "paid 50000, shelf 7"
    assert shop.called == ["is_large", "approve", "may_ship"]


async def test_plain_flow_writes_the_events_of_the_code_with_the_same_steps(variant: EngineVariant) -> None:
    shop = Shop()
    app = shop.app
    plain = app.flow("plain", Order, hf.Scene(hf.Act(shop.charge), hf.Act(shop.reserve), hf.Act(shop.ship)))

    @app.workflow
    async def code(order: Order) -> Order:
        order = await shop.charge(order)
        order = await shop.reserve(order)
        return await shop.ship(order)

    async with variant.node(app):
        of_flow = await app.start(plain, Order(7))
        of_code = await app.start(code, Order(7))
        assert await of_flow.result() == await of_code.result()
        assert await event_types(of_flow) == await event_types(of_code)


async def test_failed_flow_is_undone_in_reverse_order(variant: EngineVariant) -> None:
    shop = Shop(ship=1)
    async with variant.node(shop.app):
        run = await shop.app.start(shop.fulfil, Order(cents=1))
        with pytest.raises(errors.RunFailed, match="ship is broken"):
            await run.result()
    effects, undone = shop.done[1:3], shop.done[3:]
    expected = {"charge": "refund paid 1", "reserve": "release shelf 7"}
    assert undone == [expected[effect] for effect in reversed(effects)]
