"""Mistakes that are easy to make are refused where they are made."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import InvalidInput, NotDurable, RateLimited
from holdfast.store.port import RunQuery, Store
from tests.engine.harness import EngineVariant, wait_for_event


async def yields_later() -> AsyncIterator[int]:
    yield 1


def yields() -> Iterator[int]:
    yield 1


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("function", [yields_later, yields])
def test_an_activity_that_yields_is_refused_when_it_is_registered(function: Any) -> None:
    app = hf.App("shop")
    with pytest.raises(InvalidInput, match="returns its result, and yields"):
        app.activity(function)
    assert app.registry.activities == {}


@pytest.mark.contract("API-2", "QUE-1")
async def test_an_option_of_start_that_could_be_an_argument_is_refused() -> None:
    app = hf.App("shop")

    @app.workflow
    async def looks(run_id: str, priority: int = 0) -> str:
        return f"{run_id} {priority}"

    @app.workflow(version="2", name="looks")
    async def looks_2(run_id: str, tags: list[str]) -> str:
        return f"{run_id} {tags}"

    @app.workflow
    async def asks(how: str) -> str:
        if how == "an option that could be an argument":
            await hf.start(looks, "other", priority=0)
        if how == "beside others":
            await hf.start(looks, "other", arguments={"run_id": "mine"})
        version: dict[str, Any] = {"workflow_version": "1"}
        mine = {"run_id": "mine", "priority": 3}
        run = await hf.start(looks, arguments=mine, run_id="its-own", priority=1, **version)
        by_name: hf.RunHandle[str] = await hf.start("looks", arguments={**mine, "priority": 4}, **version)
        return f"{run.run_id} {by_name.run_id}"

    async with app.node("memory://"):
        given: list[dict[str, Any]] = [
            {"run_id": "r-1"},
            {"priority": 1},
            {"priority": 0},  # what the option is without being given
            {"run_id": None},
            {"tags": ("a",), "workflow_version": "2"},  # it is a parameter of that version
        ]
        for options in given:
            with pytest.raises(InvalidInput, match="arguments=") as refused:
                await app.start(looks, "other", **options)
            assert refused.value.details["field"] in options
        assert await (await app.start(looks, "other", 2)).result() == "other 2"
        assert await (await app.start(looks, "other", request_id="q-1", tags=("a",))).result() == "other 0"
        named = await app.start(looks, arguments={"run_id": "mine", "priority": 3}, run_id="its-own-1", priority=1)
        assert (named.run_id, await named.result()) == ("its-own-1", "mine 3")
        assert await (await app.start(looks, arguments={"run_id": "mine"}, priority=2)).result() == "mine 0"
        bad: list[tuple[Any, dict[str, Any]]] = [(("x",), {"arguments": {}}), ((), {"arguments": 3, "priority": 1})]
        bad += [((), {"arguments": {}}), ((), {"arguments": {"run_id": "x", "other": 1}}), ((), {"arguments": {1: 2}})]
        bad += [((), {"arguments": {"run_id": "x"}, "color": "red"})]
        for args, options in bad:
            with pytest.raises(InvalidInput):
                await app.start(looks, *args, **options)
        first, second = (await (await app.start(asks, "")).result()).split()
        assert (first, await app.run(first).result()) == ("its-own", "mine 3")
        assert await app.run(second).result() == "mine 4"
        for how in ("an option that could be an argument", "beside others"):
            run = await app.start(asks, how)
            paused = await wait_for_event(run, "RunPaused")
            assert "arguments" in paused.data.error.message  # type: ignore[attr-defined]
        assert len(await app.runtime().store.find(RunQuery(workflow="looks"))) == 6


@pytest.mark.contract("API-2")
async def test_every_option_of_start_can_be_the_name_of_a_parameter() -> None:
    """Also that which has the arguments."""
    names = [
        name for name, each in inspect.signature(hf.App.start).parameters.items() if each.kind is each.KEYWORD_ONLY
    ]
    assert {"arguments", "priority", "connection", "run_timeout"} < set(names)
    app, scope = hf.App("shop"), dict[str, Any]()
    exec(f"async def echo(*, {', '.join(names)}):\n    return [{', '.join(names)}]", scope)
    echo = app.workflow(scope["echo"])
    async with app.node("memory://"):
        run = await app.start(echo, arguments={name: f"its {name}" for name in names}, tags=("a",))
        assert await run.result() == [f"its {name}" for name in names]
        [head] = await app.runtime().store.find(RunQuery(run_ids=(run.run_id,)))
        assert head.tags == ("a",)


@pytest.mark.contract("API-2")
async def test_a_workflow_that_is_called_outside_of_a_run_raises_and_says_what_to_do() -> None:
    app = hf.App("shop")

    @app.activity
    def double(number: int) -> int:
        return 2 * number

    @app.workflow
    async def order(number: int) -> int:
        return await double(number)

    @app.workflow
    async def inside(number: int) -> int:
        return await order.plain(number)

    with pytest.raises(NotDurable, match=r"app.start\(order, …\); a unit test calls order.plain"):
        await order(2)
    assert await order.plain(2) == 4
    async with app.node("memory://"):
        run = await app.start(inside, 1)
        paused = await wait_for_event(run, "RunPaused")
        assert "run it as a child" in str(paused.data)


@pytest.mark.contract("SIG-3")
async def test_a_wait_without_time_takes_what_is_in_the_mailbox(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def reads() -> list[str]:
        await hf.wait_signal("go")
        found = [await hf.wait_signal("item", str, timeout=0) for _ in range(2)]
        found += [item async for item in hf.signals("item", str, timeout=0)]
        return [*found, await hf.wait_signal("item", str, timeout=0, on_timeout=lambda: "none")]

    async with variant.node(app):
        run = await app.start(reads)
        for item in ("a", "b", "c", "d"):
            await run.signal("item", item)
        await run.signal("go")
        assert await run.result() == ["a", "b", "c", "d", "none"]


@pytest.mark.contract("SIG-7")
async def test_an_entity_takes_any_number_of_signals_a_minute(store: Store) -> None:
    app = hf.App("shop")

    async def counts(most: int) -> int:
        total = 0
        async for number in hf.signals("add", int):
            total += number
            if total >= most:
                return total
        return 0

    plain = app.workflow(name="plain")(counts)
    cart = app.workflow(name="cart", entity=True)(counts)
    sender = hf.App("sender")  # without the code: what was published holds
    most = hf.Limits().signals_per_run_per_minute
    async with app.node(store), sender.connect(store):
        entity, other = await app.start(cart, most + 4, run_id="cart"), await app.start(plain, most + 4)
        many = [{"run_id": entity.run_id, "name": "add", "payload": 1}] * most
        assert not [answer for answer in await app.signal_many(many) if isinstance(answer, Exception)]  # type: ignore[arg-type]
        await entity.signal("add", 1)
        await sender.run(entity.run_id).signal("add", 1)
        first: Any = {"name": "add", "payload": 1}
        await app.start(cart, most + 4, run_id="cart", request_id="", with_signal=first)
        mixed = [{"run_id": run_id, "name": "add", "payload": 1} for run_id in ["cart", *[other.run_id] * (most + 1)]]
        answers = await app.signal_many(mixed)  # type: ignore[arg-type]
        assert [isinstance(answer, RateLimited) for answer in answers] == [*[False] * (most + 1), True]
        assert await entity.result() == most + 4


@pytest.mark.contract("SIG-9")
async def test_what_a_run_sends_in_vain_is_reported(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    app = hf.App("shop")

    @app.workflow
    async def sends() -> None:
        await app.run("nowhere").signal("hello", 1)

    async with app.node(store):
        with caplog.at_level(logging.WARNING, "holdfast.runs"):
            await (await app.start(sends, run_id="sender")).result()
        [letter] = await app.dead_letters(run_id="sender")
        assert letter.record.reason == "refused"
    assert "run sender: what it sent was not delivered: 'hello' to run 'nowhere': NotFound" in caplog.text
