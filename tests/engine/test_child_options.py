"""What a child is started with, its handle, and updates from inside of workflows."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import PENDING, RUNNING
from holdfast.errors import ActivityFailed, ChildFailed, InvalidInput
from holdfast.store.port import RunQuery, Store
from tests.engine.harness import EngineVariant

pytestmark = pytest.mark.contract("WF-4")


async def test_a_child_is_started_with_an_id_tags_and_attributes(store: Store) -> None:
    app = hf.App("shop", attributes={"region": str})

    @app.workflow
    async def ship() -> list[Any]:
        info = hf.run_info()
        return [info.run_id, list(info.tags), info.parent_run_id]

    @app.workflow
    async def order() -> list[Any]:
        chosen = ship.options(run_id="parcel-1", tags=("fast", "blue"), attributes={"region": "eu"}, name="send it")
        return await chosen()

    async with app.node(store):
        run = await app.start(order, run_id="o-1")
        assert await run.result() == ["parcel-1", ["fast", "blue"], "o-1"]
        [head] = await store.find(RunQuery(run_ids=("parcel-1",)))
    assert head.tags == ("fast", "blue")
    assert head.parent_run_id == "o-1"


async def test_children_are_admitted_by_their_priority(variant: EngineVariant) -> None:
    app = hf.App("shop")
    order_of_starts: list[int] = []

    @app.workflow(at_once=1)
    async def ship(number: int) -> None:
        order_of_starts.append(number)
        if number == 0:
            await hf.wait_signal("go")

    @app.workflow
    async def order() -> None:
        first = ship.child(0)
        await hf.sleep(0.01)
        await asyncio.gather(first, *(ship.options(priority=number)(number) for number in (1, 3, 2)))

    async with variant.node(app):
        run, store = await app.start(order), app.runtime().store
        while len(await store.find(RunQuery(workflow="ship", status=PENDING))) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        [first] = await store.find(RunQuery(workflow="ship", status=RUNNING))
        await app.run(first.run_id).signal("go")
        await run.result()
    assert list(dict.fromkeys(order_of_starts)) == [0, 3, 2, 1]


async def test_a_child_is_started_again_when_it_has_failed(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def ship(number: int) -> str:
        run_id = hf.run_info().run_id
        if not run_id.endswith(("#3", "-2")):
            raise hf.WorkflowFailed(f"{run_id} broke")
        return run_id

    @app.workflow
    async def order(most: int, child_id: str) -> str:
        chosen = ship.options(retry=hf.Retry(max_attempts=most, initial_ms=1))
        try:
            return await (chosen.options(run_id=child_id) if child_id else chosen)(7)
        except ChildFailed as problem:
            return f"{problem.info.code}: {problem.info.message}"

    async with variant.node(app):
        assert await (await app.start(order, 3, "", run_id="a")).result() == "a/ship#3"
        assert await (await app.start(order, 2, "", run_id="b")).result() == "WorkflowFailed: b/ship#2 broke"
        assert await (await app.start(order, 3, "parcel")).result() == "parcel-2"


async def test_a_child_has_a_handle_that_is_not_awaited_at_once(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def basket() -> list[str]:
        items: list[str] = []

        def add(item: str) -> int:
            if not item:
                raise ValueError("which item?")
            items.append(item)
            return len(items)

        hf.on_update("add", add)
        await hf.wait_signal("done")
        return items

    @app.workflow
    async def order() -> list[Any]:
        child = basket.child()
        found: list[Any] = [child.run_id, child.done()]
        found.append(await child.update("add", item="pear"))
        found.append(await child.update("add", item="plum"))
        try:
            await child.update("add", item="")
        except ActivityFailed as problem:
            found.append(problem.info.code)
        await child.signal("done")
        return [*found, await child, child.done()]

    @app.workflow
    async def gives_up() -> str:
        child = basket.child()
        await hf.sleep(0.01)
        child.cancel("too slow")
        try:
            await child
        except asyncio.CancelledError:
            return "given up"
        return "not given up"

    async with variant.node(app):
        run = await app.start(order, run_id="o")
        assert await run.result() == ["o/basket", False, 1, 2, "UpdateFailed", ["pear", "plum"], True]
        names = [getattr(event.data, "name", "") for event in await run.events()]
        assert names.count("holdfast.update") == 3
        assert await (await app.start(gives_up, run_id="g")).result() == "given up"


@pytest.mark.contract("SEC-1")
async def test_an_update_stays_inside_of_the_tenant(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def answers() -> None:
        hf.on_update("ask", lambda: 1)
        await hf.wait_signal("done")

    @app.workflow
    async def asks(other: str) -> str:
        try:
            return str(await app.run(other).update("ask", update_id="once"))
        except ActivityFailed as problem:
            return str(problem.info.code)

    async with variant.node(app):
        await app.start(answers, run_id="mine")
        await app.start(answers, run_id="theirs", tenant="other")
        for run_id, expected in (("mine", "1"), ("theirs", "NotFound"), ("nowhere", "NotFound")):
            assert await (await app.start(asks, run_id)).result() == expected


@pytest.mark.contract("API-2")
def test_options_that_make_no_sense_are_refused() -> None:
    app = hf.App("shop")

    @app.workflow
    async def ship() -> None: ...

    bad: list[dict[str, Any]] = [{"tags": ["a"]}, {"tags": ("",)}, {"priority": 1.5}, {"retry": 3}, {"run_id": ""}]
    for options in [*bad, {"close_policy": "later"}, {"colour": "red"}]:
        with pytest.raises(InvalidInput):
            ship.options(**options)
