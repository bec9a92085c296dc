"""Search attributes of runs: given at the start, changed by the workflow, the same after every replay."""

from datetime import UTC, datetime
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.attributes import At, Attributes
from holdfast.core.search import parse_conditions
from holdfast.errors import InvalidInput
from holdfast.store.port import RunQuery, Store
from tests.engine.harness import EngineVariant, wait_for_event

TYPES: dict[str, Any] = {"cents": int, "region": str, "due": datetime, "parts": list[str]}


async def found(store: Store, where: str) -> list[str]:
    """Return the ids of the runs that match, the oldest first."""
    page = await store.find(RunQuery(where=parse_conditions(where, {}), newest=True))
    return [head.run_id for head in reversed(page)]


async def attributes_of(store: Store, run_id: str) -> Attributes:
    """Return what the store shows of a run."""
    [head] = await store.find(RunQuery(run_ids=(run_id,)))
    assert head.snapshot is not None
    return head.snapshot.attributes


@pytest.mark.contract("QUE-4")
async def test_a_run_is_started_with_attributes_and_parts_of_its_reference(variant: EngineVariant) -> None:
    app = hf.App("shop", attributes=TYPES)

    @app.workflow
    async def order() -> None:
        await hf.wait_signal("go")

    async with variant.node(app):
        due = datetime(2026, 1, 1, tzinfo=UTC)
        run = await app.start(
            order,
            run_id="a",
            reference_key="order 7",
            reference_parts={"customer": "42"},
            attributes={"cents": 1_500, "region": "eu", "due": due, "parts": ["x", "y"]},
        )
        await wait_for_event(run, "SignalWaiting")
        await app.start(order, run_id="b", attributes={"cents": 5})
        await app.start(order, run_id="c")
        for where in ("cents>1000", "region=eu due<2026-02-01", "parts=y", 'reference.customer="42"'):
            assert await found(app.runtime().store, where) == ["a"], where
        assert await found(app.runtime().store, "cents=*") == ["a", "b"]
        assert (await attributes_of(app.runtime().store, "a"))["due"] == At(int(due.timestamp()) * 1_000_000)
        assert await attributes_of(app.runtime().store, "c") == {}


@pytest.mark.contract("QUE-4")
async def test_a_start_with_a_misfit_stores_nothing(variant: EngineVariant) -> None:
    app = hf.App("shop", attributes=TYPES)

    @app.workflow
    async def order() -> None:
        return None

    async with variant.node(app):
        wrong: list[dict[str, Any]] = [
            {"attributes": {"cents": "5"}},
            {"attributes": {"unknown": 5}},
            {"attributes": {"region": "x" * 300}},
            {"attributes": 5},
            {"reference_parts": {"customer": 42}},
        ]
        for options in wrong:
            with pytest.raises(InvalidInput):
                await app.start(order, **options)
        assert list(await app.runtime().store.find(RunQuery())) == []


@pytest.mark.contract("QUE-4", "WF-2")
async def test_a_workflow_changes_its_attributes(variant: EngineVariant) -> None:
    app = hf.App("shop", attributes=TYPES)

    @app.workflow
    async def order() -> str:
        hf.set_attributes(cents=10, region="us")
        await hf.wait_signal("go")
        hf.set_attributes(cents=20, region=None, parts=["paid"])
        await hf.wait_signal("go")
        return "done"

    async with variant.node(app):
        run = await app.start(order, run_id="a", attributes={"region": "eu"})
        await wait_for_event(run, "SignalWaiting")
        assert await found(app.runtime().store, "cents=10 region=us") == ["a"]
        await run.signal("go")
        await wait_for_event(run, "SignalWaiting", 2)
        assert await found(app.runtime().store, "cents=10") == []
        assert await found(app.runtime().store, "cents=20 parts=paid region!=*") == ["a"]
        await run.signal("go")
        assert await run.result() == "done"
        assert await attributes_of(app.runtime().store, "a") == {"cents": 20, "parts": ("paid",)}
        set_by = [event.step_id for event in await run.events() if event.event_type == "AttributesSet"]
        assert set_by == ["attributes:set", "attributes:set#2"]


@pytest.mark.contract("QUE-4", "WF-4")
async def test_attributes_survive_a_rotation_and_children_have_their_own(variant: EngineVariant) -> None:
    app = hf.App("shop", attributes=TYPES)

    @app.workflow
    async def child() -> None:
        return None

    @app.workflow
    async def order(round: int) -> None:
        if round == 0:
            hf.set_attributes(cents=1)
            hf.continue_as_new(1)
        await child.options(attributes={"region": "of the child"})()
        hf.set_attributes(region="of the parent")

    async with variant.node(app):
        run = await app.start(order, 0, run_id="a", attributes={"parts": ["x"]})
        await run.result()
        assert await attributes_of(app.runtime().store, "a") == {"cents": 1, "parts": ("x",), "region": "of the parent"}
        [child_id] = await found(app.runtime().store, 'region="of the child"')
        assert child_id.startswith("a/")


@pytest.mark.contract("QUE-4")
async def test_a_workflow_gets_an_error_for_a_misfit_and_stores_nothing_of_the_call(variant: EngineVariant) -> None:
    app = hf.App("shop", attributes=TYPES)

    @app.workflow
    async def order() -> str:
        try:
            hf.set_attributes(region="eu", cents="many")
        except InvalidInput as problem:
            return problem.code
        return "accepted"

    async with variant.node(app):
        run = await app.start(order, run_id="a")
        assert await run.result() == "InvalidInput"
        assert await attributes_of(app.runtime().store, "a") == {}
