"""What is refused when a flow is written or registered, and with which words."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import errors
from holdfast.program.flow.steps import Step
from tests.flows.order_flow import Approval, Order, Shop

pytestmark = pytest.mark.contract("WF-1")

SHOP = Shop()
CHARGE, SHIP = SHOP.charge, SHOP.ship


@SHOP.app.activity
async def count(number: int) -> int:
    """An activity that knows nothing of orders."""
    return number


@SHOP.app.activity
async def label(order: Order, text: str) -> Order:
    """An activity with two parameters."""
    return order


async def later(order: Order) -> bool:
    """An async function where a plain one is needed."""
    return True


@dataclass
class Locked:
    """A state that cannot be stored."""

    thread: threading.Thread


class Row(msgspec.Struct, array_like=True):
    """A state without names of fields."""

    cents: int = 0


UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "a plain function": (lambda: hf.Act(lambda order: order), "is not an activity"),
    "two of one path": (lambda: hf.Scene(hf.Act(CHARGE), hf.Act(CHARGE)), "two steps have the path 'charge'"),
    "two cues without names": (
        lambda: hf.Scene(
            hf.Cue(lambda order: True, then=hf.Act(CHARGE)), hf.Cue(lambda order: True, then=hf.Act(SHIP))
        ),
        "two steps have the path 'cue'",
    ),
    "an async condition": (lambda: hf.Act(CHARGE, condition=later), "condition is a plain function"),
    "an activity as a handler": (
        lambda: hf.Signal("approval", Approval, on_receive=CHARGE),  # type: ignore[arg-type]
        "on_receive is a plain function, not an activity",
    ),
    "an argument of another type": (lambda: hf.Act(count), "takes int, and the state is Order; it needs `input`"),
    "a result of another type": (lambda: hf.Act(count, input=lambda order: 1), "it needs `apply`"),
    "two arguments": (lambda: hf.Act(label), "takes order, text; it needs `input`"),
    "an unknown option": (lambda: hf.Act(CHARGE, retries=3), "unknown activity option 'retries'"),
    "an unknown policy": (
        lambda: hf.Chorus(hf.Act(CHARGE), on_failure="pause"),  # type: ignore[arg-type]
        "fail-fast, fail-after-all, partial",
    ),
    "a branch without a name": (lambda: hf.Chorus(hf.Scene(hf.Act(CHARGE))), "has a name"),
    "a condition of a scene without a name": (
        lambda: hf.Scene(hf.Act(CHARGE), condition=lambda order: True),
        "a Scene with a condition has a name",
    ),
    "an empty scene": (lambda: hf.Scene(), "at least one step"),
    "something that is no step": (lambda: hf.Scene(CHARGE), "wrap an activity in Act"),  # type: ignore[arg-type]
    "a root that is no step": (lambda: CHARGE, "its root is a step"),
    "a cue without ways": (lambda: hf.Cue(lambda order: True), "either `then` or `cases`"),
    "one signal of two types": (
        lambda: hf.Scene(hf.Signal("answer", int), hf.Signal("answer", str, step="again")),
        "signal 'answer' is str here and int elsewhere",
    ),
    "on_timeout without a timeout": (lambda: hf.Signal("approval", on_timeout=lambda order: order), "no effect"),
    "a path in a name": (lambda: hf.Act(CHARGE, step="a/b"), "may not contain / or :"),
    "a number as a name": (lambda: hf.Act(CHARGE, step="7"), "looks like a step id"),
    "a compensation with a condition": (
        lambda: hf.Act(CHARGE, compensate=hf.Act(SHIP, condition=lambda order: True)),
        "and nothing else",
    ),
    "a compensation that does not take the state": (lambda: hf.Act(CHARGE, compensate=count), "its compensation"),
    "a sleep of nothing": (lambda: hf.Sleep(0), "more than 0"),
    "a child that is no workflow": (lambda: hf.Child(CHARGE), "is not a workflow"),
    "a path that is too long": (
        lambda: hf.Scene(hf.Scene(hf.Act(CHARGE), step="b" * 150), step="a" * 150),
        "a path has at most",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_tree_is_refused(case: str) -> None:
    make, words = UNFIT[case]
    with pytest.raises(errors.InvalidInput, match=words):
        hf.App("shop").flow("unfit", Order, make())


@pytest.mark.parametrize(
    ("state", "words"),
    [(Locked, "cannot be stored"), (Row, "its state is a dataclass"), (int, "its state is a dataclass")],
)
def test_unfit_state_is_refused(state: Any, words: str) -> None:
    with pytest.raises(errors.InvalidInput, match=words):
        hf.App("shop").flow("unfit", state, hf.Sleep(1))


def test_groups_that_are_nested_too_deep_are_refused() -> None:
    deep: hf.Scene[Order] = hf.Scene(hf.Act(CHARGE))
    for _ in range(100):
        deep = hf.Scene(deep)
    with pytest.raises(errors.InvalidInput, match="nested more than"):
        hf.App("shop").flow("unfit", Order, deep)


def test_flow_is_registered_once_per_version() -> None:
    app = hf.App("shop")
    app.flow("fulfil", Order, hf.Act(CHARGE))
    app.flow("fulfil", Order, hf.Act(CHARGE), version="2")
    with pytest.raises(errors.InvalidInput, match="registered twice"):
        app.flow("fulfil", Order, hf.Act(CHARGE))


async def test_flow_cannot_be_called_outside_of_a_node() -> None:
    with pytest.raises(errors.NotDurable, match=r"start it with app\.start"):
        await SHOP.fulfil(Order())


def test_paths_are_the_names_of_the_groups_and_of_the_step() -> None:
    assert list(SHOP.fulfil.definition.nodes) == [
        "check_stock",
        "cue",
        "cue/approval",
        "chorus",
        "chorus/charge",
        "chorus/reserve",
        "ship",
    ]


def test_signals_of_the_tree_are_declared_with_the_flow() -> None:
    assert SHOP.fulfil.definition.signals == {"approval": Approval}
    assert SHOP.app.signal_schemas(SHOP.fulfil)["approval"]["$defs"]["Approval"]["required"] == ["by"]


def test_fingerprint_differs_where_the_tree_or_a_function_does() -> None:
    def fingerprint_of(root: Step[Order]) -> str:
        return hf.App("shop").flow("flow", Order, root).definition.fingerprint

    plain = fingerprint_of(hf.Act(CHARGE))
    others: list[Step[Order]] = [
        hf.Act(SHIP),
        hf.Act(CHARGE, step="pay"),
        hf.Act(CHARGE, condition=lambda order: order.approved),
        hf.Act(CHARGE, condition=lambda order: not order.approved),
        hf.Act(CHARGE, compensate=SHIP),
        hf.Chorus(hf.Act(CHARGE)),
    ]
    found = [plain, *(fingerprint_of(other) for other in others)]
    assert len(set(found)) == len(found)
    assert fingerprint_of(hf.Act(CHARGE)) == plain


def test_flow_is_drawn() -> None:
    graph = SHOP.fulfil.graph()
    assert graph.kind == "flow"
    drawn = {node.id: node for node in graph.nodes}
    assert drawn["cue/approval"].parent == "cue"
    assert drawn["cue/approval"].branch == "then"
    assert drawn["cue/approval"].detail == "at most 2 d"
    assert drawn["ship"].depends_on == ("chorus",)
    assert drawn["chorus/reserve"].depends_on == ()
    assert drawn["chorus/charge"].detail == "undone by refund"
    assert "subgraph" in SHOP.fulfil.mermaid()
