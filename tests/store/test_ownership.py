"""A store that cannot guard commits is refused before anything is claimed or stored (OWN-2)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.events import RunPaused
from holdfast.core.messages import Message, SignalRequest
from holdfast.core.state import PAUSED
from holdfast.errors import CheckpointOwnershipCapabilityError
from holdfast.settings import Ownership, Settings
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Accepted, Capabilities, Committed
from holdfast.store.proxy import StoreProxy
from holdfast.store.validation import check_ownership, require_conditional_batch
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, marker, message, new_run, record, signal, wait
from holdfast.testing.store_suite.base import unchanged
from tests.engine.harness import wait_for_status

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


@pytest.mark.parametrize("mode", ["cas_required", "CAS-REQUIRED", "", None, 1])
def test_a_mode_that_is_none_is_refused_and_not_taken_for_one_that_checks_nothing(
    store: MemoryStore, mode: Any
) -> None:
    with pytest.raises(hf.errors.InvalidInput, match="'single-owner' or 'cas-required'") as raised:
        Settings(checkpoint_ownership=mode)
    assert raised.value.details == {"field": "checkpoint_ownership"}
    with pytest.raises(hf.errors.InvalidInput, match="'single-owner' or 'cas-required'"):
        check_ownership(store, mode)


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


@pytest.mark.contract("SIG-5")
async def test_what_others_ask_at_the_same_time_is_not_refused_with_an_idempotent_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_OWNERSHIP", "single-owner")
    app, order = signalled_app()
    careless: Any = Careless(MemoryStore())
    async with asyncio.timeout(60), app.node(careless):
        signalled: Any = {"name": "go", "payload": "yes", "signal_id": "click-1"}
        starts: Any = [app.start(order, with_signal=signalled), *(app.start(order) for _ in range(5))]
        answers: list[Any] = await asyncio.gather(*starts, return_exceptions=True)
        refused, *runs = answers
        assert isinstance(refused, CheckpointOwnershipCapabilityError)
        signals: Any = [runs[0].signal("go", "yes", signal_id="click-1"), *(run.signal("go", "yes") for run in runs)]
        answers = await asyncio.gather(*signals, return_exceptions=True)
        refused, *sent = answers
        assert isinstance(refused, CheckpointOwnershipCapabilityError)
        assert [each.accepted for each in sent] == [True] * 5
        assert [await run.result() for run in runs] == ["yes"] * 5


@pytest.mark.contract("SIG-13")
@pytest.mark.contract("WF-6")
@pytest.mark.contract("TSK-2")
async def test_a_single_owner_takes_commands_updates_and_answers_without_ids_and_refuses_those_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine gives requests ids to repeat them: where they could not be recognised, it sends them once."""
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_OWNERSHIP", "single-owner")
    app = hf.App("shop")

    @app.workflow
    async def order() -> Any:
        hf.on_update("add", lambda amount: amount + 1)
        return await hf.task("approve", bool)

    careless: Any = Careless(MemoryStore())
    ann = hf.Actor("ann")
    async with asyncio.timeout(60), app.node(careless):
        run = await app.start(order)
        assert await run.update("add", amount=1) == 2
        await run.pause(wait=True)
        await run.resume(wait=True)
        for refused in (run.update("add", amount=1, update_id="u-1"), run.pause(signal_id="p-1")):
            with pytest.raises(CheckpointOwnershipCapabilityError) as raised:
                await refused
            assert raised.value.details["feature"] == "idempotent signal delivery"
        [task] = await app.tasks.list(actor=ann)
        await app.tasks.complete(task.task_id, True, actor=ann)
        assert await run.result() is True
        another = await app.start(order, with_signal={"name": "note"})
        await another.cancel(wait=True)
        with pytest.raises(hf.errors.RunCancelled):
            await another.result()


@pytest.mark.contract("SIG-13")
async def test_each_retry_by_a_single_owner_is_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command without an id is no repetition of another one."""
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_OWNERSHIP", "single-owner")
    app = hf.App("shop")

    @app.workflow
    async def order(number: int) -> int:
        return number

    careless: Any = Careless(MemoryStore())
    async with asyncio.timeout(60), app.node(careless):
        run = await app.start(order, 7)
        assert await run.result() == 7
        again = [await run.retry_run() for _ in range(3)]
        assert len({each.run_id for each in (run, *again)}) == 4
        assert [await each.result() for each in again] == [7, 7, 7]


@pytest.mark.contract("ACT-2")
async def test_a_node_whose_activities_have_keys_is_refused_before_it_claims_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_OWNERSHIP", "single-owner")
    app = hf.App("shop")

    @app.activity(idempotency_key=lambda card: card)
    async def charge(card: str) -> str:
        return card

    store = MemoryStore()
    careless: Any = Careless(store)
    with pytest.raises(CheckpointOwnershipCapabilityError) as raised:
        async with app.node(careless):
            pass
    assert raised.value.details["feature"] == "activity reconciliation"
    assert raised.value.details["store"] == "Careless"
    assert (await store.stats()).leases == {}
    async with app.connect(careless):  # it executes nothing
        pass


@pytest.mark.contract("ACT-2")
@pytest.mark.contract("MSG-3")
async def test_a_call_with_a_key_pauses_its_run_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_OWNERSHIP", "single-owner")
    app = hf.App("shop")
    charged: list[str] = []

    @app.activity
    async def charge(card: str) -> str:
        charged.append(card)
        return card

    @app.workflow
    async def order(card: str, key: str | None) -> str:
        if key == "later":
            await hf.wait_signal("go")
        return await (charge(card) if key is None else charge.options(idempotency_key=key)(card))

    careless: Any = Careless(MemoryStore())
    async with asyncio.timeout(60), app.node(careless) as node:
        keyed = [await app.start(order, card, card) for card in ("now", "later")]
        plain = await asyncio.gather(*(app.start(order, f"plain {n}", None) for n in range(5)))
        await keyed[1].signal("go")
        assert [await run.result() for run in plain] == [f"plain {n}" for n in range(5)]
        for run in keyed:
            await wait_for_status(run, PAUSED)
            [paused] = [event.data for event in await run.events() if event.event_type == "RunPaused"]
            assert isinstance(paused, RunPaused)
            assert paused.error is not None
            for word in ("activity reconciliation", "conditional_batch", "Careless"):
                assert word in paused.error.message
        assert node.failure is None
        assert sorted(charged) == [f"plain {n}" for n in range(5)]
        await keyed[0].cancel(wait=True)
