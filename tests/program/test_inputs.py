"""A recorded result goes to the call that it is the result of, or the replay has diverged."""

import asyncio
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.engine.check_histories import check_histories
from holdfast.errors import NondeterminismError
from tests.program.core_run import CoreRun


class Item(msgspec.Struct):
    """What is ordered."""

    name: str
    tags: set[str] = set()


def shop(calls: list[tuple[tuple[Any, ...], dict[str, Any]]], function: Any, *, is_child: bool = False) -> CoreRun:
    """Return a run that makes these calls at the same time."""
    app = hf.App("shop")
    called: Any = app.workflow(name="act")(function) if is_child else app.activity(name="act")(function)

    @app.workflow(name="order")
    async def order() -> list[Any]:
        return await asyncio.gather(*(called(*args, **kwargs) for args, kwargs in calls))

    return CoreRun(app, order)


async def act(number: int) -> int:
    return number


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize("is_child", [False, True])
def test_results_of_swapped_calls_are_a_divergence(is_child: bool) -> None:
    run = shop([call(1), call(2)], act, is_child=is_child).start()
    swapped = shop([call(2), call(1)], act, is_child=is_child)
    with pytest.raises(NondeterminismError) as caught:
        run.replayed(swapped.app)
    assert '{"number":1}' in caught.value.details["expected"]
    assert '{"number":2}' in caught.value.details["found"]
    assert f"{__file__}:" in caught.value.message
    [problem] = check_histories(swapped.app.registry, [run.events])
    assert problem.code == "NondeterminismError"
    assert check_histories(run.app.registry, [run.events]) == []


async def act_with_more(number: int, currency: str = "EUR") -> int:
    return number


@pytest.mark.contract("WF-2", "WF-3")
@pytest.mark.parametrize(("given", "is_the_same"), [(call(1), True), (call(1, "EUR"), True), (call(1, "USD"), False)])
def test_a_parameter_with_a_default_may_be_added(given: Any, is_the_same: bool) -> None:
    run = shop([call(1)], act).start()
    assert (check_histories(shop([given], act_with_more).app.registry, [run.events]) == []) is is_the_same


@pytest.mark.contract("WF-2")
def test_a_parameter_that_is_taken_away_is_a_divergence() -> None:
    run = shop([call(1, "USD")], act_with_more).start()
    assert check_histories(shop([call(1)], act).app.registry, [run.events]) != []


async def order_item(item: Item) -> None: ...


@pytest.mark.contract("WF-2")
def test_a_set_has_no_order() -> None:
    tags = [f"tag {number}" for number in range(20)]
    run = shop([call(Item("lamp", set(tags)))], order_item).start()
    encoded = bytes(run.events[-1].data.input)  # type: ignore[attr-defined]
    turned = msgspec.json.decode(encoded)
    turned["item"]["tags"].reverse()
    body = msgspec.structs.replace(run.events[-1].data, input=msgspec.Raw(msgspec.json.encode(turned)))
    history = [*run.events[:-1], msgspec.structs.replace(run.events[-1], data=body)]
    assert check_histories(run.app.registry, [history]) == []
