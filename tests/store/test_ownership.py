"""A store that cannot guard commits is refused before anything is claimed or stored (OWN-2)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.messages import Message, SignalRequest
from holdfast.errors import CheckpointOwnershipCapabilityError
from holdfast.settings import Ownership
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Accepted, Capabilities, Committed
from holdfast.store.proxy import StoreProxy
from holdfast.store.validation import check_ownership, require_conditional_batch
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, marker, message, new_run, record, signal, wait
from holdfast.testing.store_suite.base import unchanged

CAREFUL = Capabilities(conditional_batch=True, atomic_batch=True, read_after_write=True, scan_consistency="snapshot")
CARELESS = Capabilities(conditional_batch=False, atomic_batch=True, read_after_write=True, scan_consistency="snapshot")

pytestmark = pytest.mark.contract("OWN-2")


class CarelessStore(MemoryStore):
    """A store without conditional_batch."""

    def __init__(self) -> None:
        super().__init__(VirtualClock(), capabilities=CARELESS)


@pytest.fixture
def store() -> MemoryStore:
    return CarelessStore()


def check_named(error: CheckpointOwnershipCapabilityError, feature: str) -> None:
    """Check that the error says what is missing, what for, and where."""
    assert error.details == {"capability": "conditional_batch", "feature": feature, "store": "CarelessStore"}
    for word in ("conditional_batch", feature, "CarelessStore"):
        assert word in error.message


def test_cas_required_refuses_a_store_without_conditional_batch(store: MemoryStore) -> None:
    with pytest.raises(CheckpointOwnershipCapabilityError) as raised:
        check_ownership(store, "cas-required")
    check_named(raised.value, "checkpoint_ownership='cas-required'")


@pytest.mark.parametrize(
    ("capabilities", "mode"), [(CAREFUL, "cas-required"), (CAREFUL, "single-owner"), (CARELESS, "single-owner")]
)
def test_ownership_is_accepted_wherever_the_store_or_the_deployment_guards_it(
    capabilities: Capabilities, mode: Ownership
) -> None:
    check_ownership(MemoryStore(capabilities=capabilities), mode)


def test_feature_is_refused_by_its_name(store: MemoryStore) -> None:
    with pytest.raises(CheckpointOwnershipCapabilityError) as raised:
        require_conditional_batch(store, "time travel")
    check_named(raised.value, "time travel")
    require_conditional_batch(MemoryStore(), "time travel")


@pytest.mark.contract("SIG-5")
async def test_idempotent_signals_fail_fast_before_anything_is_stored(store: MemoryStore) -> None:
    await store.create([new_run("run-1")])
    batch: list[SignalRequest | Message] = [
        signal("run-1", "go"),
        message("run-1", "m-1"),
        signal("run-1", "go", signal_id="click-1"),
    ]
    async with unchanged(store):
        with pytest.raises(CheckpointOwnershipCapabilityError) as raised:
            await store.deliver(batch)
    check_named(raised.value, "idempotent signal delivery")


@pytest.mark.contract("ACT-3")
async def test_activity_records_fail_fast_before_anything_is_stored(store: MemoryStore) -> None:
    node = SampleNode(store)
    plain = await node.turn(await node.start("run-1", wait("go")), marker("mark"))
    keyed = await node.turn(await node.start("run-2", wait("go")), marker("mark"), records=[record("run-2")])
    async with unchanged(store):
        with pytest.raises(CheckpointOwnershipCapabilityError) as raised:
            await store.commit([plain, keyed])
    check_named(raised.value, "activity reconciliation")


async def test_single_owner_may_do_all_that_needs_no_guard(store: MemoryStore) -> None:
    check_ownership(store, "single-owner")
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    answers = await store.deliver([signal("run-1", "go"), message("run-1", "m-1")])
    assert [type(answer) for answer in answers] == [Accepted, Accepted]
    turn = await node.turn(await node.load("run-1"))
    assert isinstance(await node.commit(turn), Committed)


class Careless(StoreProxy):
    """A store object that guards nothing, around one that could."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.capabilities = CARELESS


def signalled_app() -> tuple[hf.App, Any]:
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        return await hf.wait_signal("go", str)

    return app, order


async def test_a_node_asks_a_store_object_too_before_it_claims_anything() -> None:
    app, _ = signalled_app()
    store = MemoryStore()
    careless: Any = Careless(store)
    with pytest.raises(CheckpointOwnershipCapabilityError) as raised:
        async with app.node(careless):
            pass
    assert raised.value.details["store"] == "Careless"
    assert raised.value.details["feature"] == "checkpoint_ownership='cas-required'"
    assert (await store.stats()).leases == {}
    with pytest.raises(hf.errors.InvalidInput, match="no node is open"):
        app.runtime()


@pytest.mark.contract("SIG-5")
async def test_a_single_owner_s_idempotent_signals_fail_fast_on_a_store_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_OWNERSHIP", "single-owner")
    app, order = signalled_app()
    careless: Any = Careless(MemoryStore())
    async with asyncio.timeout(60), app.node(careless):
        run = await app.start(order)
        for refused in (
            run.signal("go", "yes", signal_id="click-1"),
            app.start(order, with_signal={"name": "go", "payload": "yes", "signal_id": "click-1"}),
        ):
            with pytest.raises(CheckpointOwnershipCapabilityError) as raised:
                await refused
            assert raised.value.details["store"] == "Careless"
            assert raised.value.details["feature"] == "idempotent signal delivery"
        await run.signal("go", "yes")
        assert await run.result() == "yes"
