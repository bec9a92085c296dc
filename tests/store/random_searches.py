"""Random searches over a few runs, which two stores answer alike, whatever drives them."""

from random import Random
from typing import Any

from msgspec.structs import replace

from holdfast.core.attributes import At, Attributes
from holdfast.core.search import Condition, Order
from holdfast.core.state import COMPLETED, FAILED, PENDING, RUNNING
from holdfast.store import search
from holdfast.store.port import RunCountQuery, RunQuery, Store
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, fail, new_run

TENANTS = ("default", "acme", "umbrella")
WORKFLOWS = ("order", "refund")
ORDERS = (
    *(Order("cents", "n"), Order("region", "s"), Order("due", "t")),
    *(Order("created_at"), Order("finished_at")),
)
REGIONS = ("eu", "eu-west", "us", "", "é", "\U0010ffff")
COMPARED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("cents", "n", (0.0, 2.0, 4.0)),
    ("region", "s", REGIONS),
    ("parts", "s", ("a", "b", "")),
    ("due", "t", (0.0, 1.0)),
)


def attributes_of(random: Random) -> Attributes:
    """Draw the attributes of a run."""
    drawn: Attributes = {}
    if random.random() < 0.8:
        drawn["cents"] = random.randrange(5)
    if random.random() < 0.7:
        drawn["region"] = random.choice(REGIONS)
    if random.random() < 0.4:
        drawn["parts"] = tuple(random.sample(("a", "ab", "b", "c"), random.randrange(4)))
    if random.random() < 0.3:
        drawn["due"] = At(random.randrange(3))
    return drawn


async def fill(stores: dict[Store, VirtualClock], random: Random, runs: int) -> None:
    """Put the same runs into each store, and let some of them end."""
    drawn = [
        new_run(
            f"run-{random.randrange(10**6):06}",
            attributes=attributes_of(random),
            tenant=random.choice(TENANTS),
            plan_id=random.choice(WORKFLOWS),
            tags=("x",) if random.random() < 0.3 else (),
        )
        for _ in range(runs)
    ]
    ends = {new.run_id: random.choice((complete(), complete(), fail(), None)) for new in drawn}
    for store, clock in stores.items():
        node = SampleNode(store)
        await node.renew()
        for new in drawn:
            await store.create([new])
            await node.claim()
            if (end := ends[new.run_id]) is not None:
                await node.step(new.run_id, end)
            clock.advance(ms=1)


def draw_query(random: Random, clock: VirtualClock) -> RunQuery:
    """Draw what is looked for."""
    conditions = tuple(_condition(random) for _ in range(random.choice((0, 1, 1, 2, 3))))
    order = random.choice((None, None, *ORDERS))
    given: dict[str, Any] = {}
    for field, values in (
        ("tenant", TENANTS),
        ("workflow", WORKFLOWS),
        ("status", (COMPLETED, FAILED, RUNNING, PENDING)),
        ("tag", ("x",)),
        ("finished_from", (clock.now() - 20_000, clock.now() - 5_000)),
        ("finished_until", (clock.now() - 10_000, clock.now() - 3_000)),
    ):
        if random.random() < 0.3:
            given[field] = random.choice(values)
    if order is not None:
        order = replace(order, descending=random.random() < 0.5)
    return RunQuery(where=conditions, order=order, newest=order is None, **given)


def _condition(random: Random) -> Condition:
    name, kind, values = random.choice(COMPARED)
    operators = ["=", "=", "!=", "<", "<=", ">", ">=", "exists", "missing", *(["prefix"] if kind == "s" else [])]
    operator: Any = random.choice(operators)
    value = None if operator in ("exists", "missing") else random.choice(values)
    known: Any = kind
    return Condition(name, operator, known, value)


async def answer(store: Store, query: RunQuery, limit: int, look: int | None) -> list[str]:
    """Return the ids of all that is found, page by page."""
    asked = replace(query, limit=limit, look=look)
    place = "before" if query.order is None else "behind"
    found: list[str] = []
    for _ in range(500):
        page = await store.find(asked)
        found += [head.run_id for head in page]
        if page.cursor is None and (not page or query.order is not None):
            return found
        behind = page.cursor if page.cursor is not None else (page[-1].created_at, page[-1].run_id)
        asked = replace(asked, **{place: behind})
    raise AssertionError("the search does not end")


async def compare(model: Store, store: Store, random: Random, clock: VirtualClock, queries: int, patch: Any) -> None:
    """Ask both stores the same, with every way in which an index can drive the search."""
    for _ in range(queries):
        query = draw_query(random, clock)
        expected = await answer(model, query, 100, None)
        for few in (0, 3, 5_000):
            patch.setattr(search, "FEW", few)
            limit, look = random.choice((1, 3, 100)), random.choice((None, 1, 4))
            assert await answer(store, query, limit, look) == expected, (few, limit, look, query)
            count = RunCountQuery(runs=query)
            asked = replace(count, runs=replace(query, order=None))
            counted = await store.find(asked)
            assert (list(counted), counted.cursor) == (list(await model.find(asked)), None), (few, query)
