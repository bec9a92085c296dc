"""Workflows of another app: as children and as runs of their own, by name, without their code."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.state import RunStatus
from holdfast.errors import ChildFailed, InvalidInput, NotFound, StartRefused, StoreUnavailable
from holdfast.store.port import Plan, Store
from tests.engine.harness import EngineVariant, event_types, wait_for_child, wait_for_event, wait_for_status

pytestmark = pytest.mark.contract("WF-4")

OPTIONS = hf.NodeOptions(safety_poll_s=0.2)


@asynccontextmanager
async def both(store: Store, shop: hf.App, depot: hf.App) -> AsyncIterator[None]:
    """Open a node of each app on one store."""
    async with asyncio.timeout(60), depot.node(store, options=OPTIONS), shop.node(store, options=OPTIONS):
        yield


def depot_app(**options: Any) -> tuple[hf.App, list[str]]:
    """Return the other app, and what it has shipped."""
    depot, shipped = hf.App("depot"), list[str]()

    @depot.workflow(version="2", signals={"go": bool}, allow_other_signals=True, **options)
    async def ship(parcel: str, fast: bool = False) -> str:
        if parcel == "lost":
            raise hf.WorkflowFailed("no such parcel")
        if parcel == "slow":
            await hf.wait_signal("go", bool)
        shipped.append(parcel)
        return f"{parcel} by {'air' if fast else 'sea'}"

    return depot, shipped


async def test_a_workflow_of_another_app_is_a_child_by_its_name(store: Store) -> None:
    depot, shipped = depot_app()
    shop = hf.App("shop")
    ship = shop.external_workflow("ship", version="2")

    @shop.workflow
    async def order() -> list[Any]:
        child = ship.options(run_id="parcel-2", tags=("fast",)).child(parcel="b", fast=True)
        found: list[Any] = [await ship(parcel="a"), await child]
        try:
            await ship(parcel="lost")
        except ChildFailed as problem:
            found.append(problem.info.code)
        return found

    async with both(store, shop, depot):
        run = await shop.start(order, run_id="o-1")
        assert await run.result() == ["a by sea", "b by air", "WorkflowFailed"]
        assert (await depot.run("parcel-2").snapshot()).status == RunStatus.COMPLETED
    assert sorted(shipped) == ["a", "b"]


async def test_a_function_without_a_body_gives_calls_their_types(variant: EngineVariant) -> None:
    shop = hf.App("shop")

    async def ship(parcel: str, fast: bool = False) -> str:
        raise AssertionError("its code is elsewhere")

    external = shop.external_workflow(ship, version="2")

    @shop.workflow
    async def order(parcel: Any) -> str:
        try:
            return await external(parcel)
        except InvalidInput as problem:
            return problem.message

    depot, _ = depot_app()
    async with variant.opened() as store, both(store, shop, depot):
        assert await (await shop.start(order, "a")).result() == "a by sea"
        assert "ship" in await (await shop.start(order, 7)).result()


async def test_a_child_waits_until_a_node_has_its_workflow(variant: EngineVariant) -> None:
    shop = hf.App("shop")
    ship = shop.external_workflow("ship", version="2")

    @shop.workflow
    async def order() -> str:
        return str(await ship(parcel="a"))

    async with variant.opened() as store:
        async with variant.node(shop, store):
            run = await shop.start(order, run_id="o-1")
            await wait_for_event(run, "ChildStarted")
            await wait_for_child(variant, shop.run("o-1/ship"))
            assert await shop.run("o-1/ship").status() == RunStatus.PENDING
        depot, _ = depot_app()
        async with variant.node(depot, store):
            await depot.run("o-1/ship").last_event()
        async with variant.node(shop, store):
            assert await shop.run("o-1").result() == "a by sea"


async def test_a_child_is_started_although_its_declaration_cannot_be_read_at_first(
    variant: EngineVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.start.admission.RETRY_S", 0.01)
    depot, _ = depot_app(at_once=1)
    shop, failed = hf.App("shop"), list[Any]()
    ship = shop.external_workflow("ship", version="2")

    @shop.workflow
    async def order() -> str:
        return str(await ship(parcel="a"))

    async with variant.opened() as store:
        find = store.find_definitions

        async def find_after_an_outage(plans: Sequence[Plan]) -> list[WorkflowDeclaration | None]:
            if len(failed) < 2:
                failed.append(plans)
                raise StoreUnavailable("the store is away")
            return await find(plans)

        monkeypatch.setattr(store, "find_definitions", find_after_an_outage)
        async with both(store, shop, depot):
            assert await (await shop.start(order)).result() == "a by sea"
    assert len(failed) == 2


async def test_the_approval_and_the_limits_of_the_other_app_hold(store: Store) -> None:
    shop, depot = hf.App("shop"), hf.App("depot")
    release = asyncio.Event()
    inside: list[int] = []
    most: list[int] = []

    @depot.activity
    async def load(number: int) -> None:
        inside.append(number)
        most.append(len(inside))
        await release.wait()
        inside.remove(number)

    @depot.workflow(at_once=1)
    async def pack(number: int) -> int:
        await load(number)
        return number

    @depot.workflow(requires_approval=True)
    async def pay(cents: int) -> int:
        return cents

    packing, paying = shop.external_workflow("pack"), shop.external_workflow("pay")

    @shop.workflow
    async def order() -> list[int]:
        return list(await asyncio.gather(packing(number=1), packing(number=2), paying(cents=5)))

    async with both(store, shop, depot):
        run = await shop.start(order, run_id="o-1")
        await wait_for_event(run, "ChildStarted", 3)
        alone = await shop.start(packing, number=3)
        await wait_for_status(depot.run("o-1/pay"), RunStatus.PENDING)
        assert (await event_types(depot.run("o-1/pay"))) == ["RunQueued"]
        assert (await store.stats()).queued == 2
        release.set()
        await depot.run("o-1/pay").approve()
        assert await run.result() == [1, 2, 5]
        assert await alone.result() == 3
    assert max(most) == 1


async def test_a_run_of_another_app_is_started_on_its_own(store: Store) -> None:
    depot, shipped = depot_app()
    shop = hf.App("shop")
    ship = shop.external_workflow("ship", version="2")
    unknown = shop.external_workflow("ship", version="9")

    @shop.workflow
    async def order() -> str:
        try:
            await hf.start(unknown, parcel="x")
        except StartRefused as problem:
            started = await hf.start(ship, parcel="a", run_id="alone")
            return f"{problem.info.code}, {started.run_id}"
        return "started"

    async with both(store, shop, depot):
        assert await (await shop.start(order)).result() == "NotFound, alone"
        assert await depot.run("alone").result() == "a by sea"
        run = await shop.start(ship, parcel="slow", request_id="r-1", with_signal={"name": "go", "payload": True})
        assert (await shop.start(ship, parcel="slow", request_id="r-1")).run_id == run.run_id
        assert await run.result() == "slow by sea"
        with pytest.raises(InvalidInput):
            await shop.start(ship, parcel="slow", with_signal={"name": "go", "payload": "perhaps"})
        with pytest.raises(NotFound, match="no node has published version '9'"):
            await shop.start(unknown, parcel="a")
        with pytest.raises(InvalidInput, match="by name"):
            await shop.start(ship, "a")
        with pytest.raises(InvalidInput, match="name the version in external_workflow"):
            await shop.start(ship, parcel="a", workflow_version="3")
    assert sorted(shipped) == ["a", "slow"]


async def test_a_workflow_that_is_here_is_taken_as_it_is() -> None:
    depot, _ = depot_app()
    here = depot.external_workflow("ship", version="2")
    assert here.definition is depot.registry.workflow("ship", "2")
    for name in ("", "a\nb", "plan:x"):
        with pytest.raises(InvalidInput):
            depot.external_workflow(name)
