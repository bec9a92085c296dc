"""Workflows whose runs do not start before an operator has approved them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.core import events as e
from holdfast.core.snapshot import AWAITING_APPROVAL
from holdfast.core.state import APPROVED, CANCELLED, PENDING, RUNNING
from holdfast.engine.check_histories import check_history
from holdfast.engine.observe.doctor import examine
from holdfast.errors import Conflict, InvalidInput, NotPermitted, RunCancelled
from holdfast.store.port import Store
from tests.engine.harness import MOST_SECONDS, EngineVariant, event_types, store_with_virtual_time, wait_for_event


@dataclass
class Payout:
    """The state of a flow."""

    cents: int
    is_paid: bool = False


class Bank:
    """An app whose runs are approved before they start, and what they have done."""

    def __init__(self, **options: Any) -> None:
        self.app = hf.App("bank", **options)
        self.done: list[str] = []

        @self.app.activity
        async def pay(cents: int) -> int:
            self.done.append(f"paid {cents}")
            return cents

        @self.app.activity
        async def pay_out(payout: Payout) -> Payout:
            return Payout(payout.cents, True)

        @self.app.workflow(requires_approval=True, signals={"note": str})
        async def transfer(cents: int, notes: int = 0) -> list[str]:
            await pay(cents)
            return [await hf.wait_signal("note", str) for _ in range(notes)]

        @self.app.workflow
        async def parent() -> list[str]:
            return await transfer(5)

        @self.app.workflow
        async def starter() -> str:
            return (await hf.start(transfer, 6)).run_id

        @self.app.workflow
        async def plain() -> str:
            return await hf.wait_signal("go", str)

        self.transfer, self.parent, self.starter, self.plain = transfer, parent, starter, plain
        self.flow = self.app.flow("payout", Payout, hf.Act(pay_out), requires_approval=True)


async def is_held(run: hf.RunHandle[Any]) -> None:
    """Wait until a run is there, and see that it waits for its approval."""
    await wait_for_event(run, "RunQueued")
    assert await run.status() is PENDING
    snapshot = await run.snapshot()
    assert (snapshot.status, snapshot.substatus) == (PENDING, AWAITING_APPROVAL)


@pytest.mark.contract("SIG-13", "EVT-3")
async def test_a_run_is_held_until_it_is_approved(store: Store) -> None:
    bank = Bank()
    async with asyncio.timeout(MOST_SECONDS), bank.app.node(store):
        run = await bank.app.start(bank.transfer, 3)
        await is_held(run)
        [loaded] = await store.load([run.run_id])
        assert loaded is not None
        assert loaded.head.snapshot is not None
        assert loaded.head.snapshot.waiting_kind == "approval"
        findings = (await examine(store, SystemClock())).findings
        assert [each.sentence for each in findings if run.run_id in each.run_ids] == [], "it is not stuck"
        with pytest.raises(Conflict, match="has not started"):
            await run.pause(wait=True)
        assert bank.done == []
        await run.approve(actor="ann", wait=True)
        assert await run.result() == []
        assert bank.done == ["paid 3"]
        names = await event_types(run)
        begun = names.index("RunApproved")
        assert [name for name in names if name.startswith("Run")][:3] == ["RunQueued", "RunApproved", "RunStarted"]
        approved = (await run.events())[begun].data
        assert isinstance(approved, e.RunApproved)
        assert approved.actor == "ann"
        assert check_history(bank.app.registry, await run.events()) is None


@pytest.mark.contract("SIG-13")
async def test_an_approval_of_others_is_a_conflict(variant: EngineVariant) -> None:
    bank = Bank()
    async with variant.node(bank.app):
        run = await bank.app.start(bank.plain)
        with pytest.raises(Conflict, match="has started already"):
            await run.approve(wait=True)
        await run.signal("go", "on")
        narrow = hf.App("narrow")

    @narrow.workflow(at_once=1)
    async def one() -> str:
        return await hf.wait_signal("go", str)

    async with variant.node(narrow):
        first, queued = await narrow.start(one), await narrow.start(one)
        with pytest.raises(Conflict, match="requires no approval"):
            await queued.approve(wait=True)
        for run in (first, queued):
            await run.signal("go", "on")
            assert await run.result() == "on"


@pytest.mark.contract("SIG-13", "WF-4")
async def test_a_run_that_waits_for_approval_can_be_cancelled(variant: EngineVariant) -> None:
    bank = Bank()
    async with variant.node(bank.app):
        run = await bank.app.start(bank.transfer, 3)
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        assert await run.status() is CANCELLED
        assert bank.done == []


@pytest.mark.contract("SIG-13", "SIG-9")
async def test_signals_that_come_before_are_kept_and_start_nothing(variant: EngineVariant) -> None:
    bank = Bank()
    async with variant.node(bank.app):
        first: Any = {"name": "note", "payload": "one"}
        run = await bank.app.start(bank.transfer, 3, 2, with_signal=first)
        await run.signal("note", "two")
        await is_held(run)
        await run.approve(wait=True)
        assert await run.result() == ["one", "two"]


@pytest.mark.contract("SIG-13", "WF-4")
async def test_children_and_runs_of_their_own_and_flows_are_held_too(variant: EngineVariant) -> None:
    bank = Bank()
    async with variant.node(bank.app):
        parent = await bank.app.start(bank.parent, run_id="p-1")
        child = bank.app.run("p-1/transfer")
        await is_held(child)
        assert await parent.status() is RUNNING
        own = bank.app.run(await (await bank.app.start(bank.starter)).result())
        await is_held(own)
        flow = await bank.app.start(bank.flow, Payout(7))
        await is_held(flow)
        for run in (child, own, flow):
            await run.approve(wait=True)
        assert await parent.result() == []
        assert await own.result() == []
        assert (await flow.result()).is_paid


@pytest.mark.contract("SIG-13", "OWN-3")
async def test_an_approval_is_kept_while_no_node_is_there(variant: EngineVariant) -> None:
    async with variant.opened() as store:
        bank = Bank()
        async with variant.node(bank.app, store):
            await bank.app.start(bank.transfer, 3, run_id="t-1")
        async with bank.app.connect(store):
            await bank.app.run("t-1").approve()
        again = Bank()
        async with variant.node(again.app, store):
            assert await again.app.run("t-1").result() == []
        assert (bank.done, again.done) == ([], ["paid 3"])


@pytest.mark.contract("SIG-13", "TMR-1")
async def test_a_run_that_is_approved_before_its_time_waits_for_that(variant: EngineVariant) -> None:
    bank = Bank()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(bank.app, store):
        run = await bank.app.start(bank.transfer, 3, after=timedelta(seconds=5))
        await is_held(run)
        await run.approve(wait=True)
        assert await run.status() is APPROVED
        clock.advance(ms=4_000)
        other = await bank.app.start(bank.plain)
        await wait_for_event(other, "SignalWaiting")
        assert (await run.status(), bank.done) == (APPROVED, [])
        clock.advance(ms=2_000)
        store.wakeups.notify()
        assert await run.result() == []


@pytest.mark.contract("SIG-13", "API-4")
async def test_who_may_not_approve_does_not(variant: EngineVariant) -> None:
    async def authorise(request: hf.ControlRequest) -> bool:
        return request.command != "APPROVE" or request.actor == "ann"

    bank = Bank(authoriser=authorise)
    async with variant.node(bank.app):
        run = await bank.app.start(bank.transfer, 3)
        with pytest.raises(NotPermitted):
            await run.approve(actor="bob", wait=True)
        await is_held(run)
        await run.approve(actor="ann", wait=True)
        assert await run.result() == []


def test_how_an_approval_cannot_be_required() -> None:
    app = hf.App("odd")
    with pytest.raises(InvalidInput, match="requires_approval is True or False"):
        app.workflow(name="odd", requires_approval="yes")(Bank().plain.definition.function)  # type: ignore[call-overload]
