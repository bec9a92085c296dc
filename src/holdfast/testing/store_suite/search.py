"""The store suite, search: what every store must find by search attributes, in which order, and how many."""

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.attributes import At, Attributes
from holdfast.core.commands import CompleteRun, SetAttributes
from holdfast.core.search import Condition, Order, parse_conditions
from holdfast.core.state import COMPLETED, PENDING, RUNNING
from holdfast.errors import InvalidInput
from holdfast.store.port import PurgePolicy, Refused, RunCount, RunCountQuery, RunQuery, Store
from holdfast.testing.samples import SampleNode, new_run
from holdfast.testing.store_suite.base import SuiteBase, check_refused

PEOPLE: dict[str, Attributes] = {
    "a": {"cents": 5, "region": "eu", "vip": True, "due": At(1_000), "parts": ("x", "y")},
    "b": {"cents": 1_500, "region": "us", "vip": False, "due": At(2_000), "parts": ("y",)},
    "c": {"cents": 20.5, "region": "eu", "reference.customer": "42"},
    "d": {"region": "EU"},
    "e": {},
    "f": {"cents": 1_500, "region": "us"},
    "g": {"cents": "text of another app"},
}


async def fill(store: Store) -> None:
    """Create the runs to search for."""
    await store.create([new_run(run_id, attributes=attributes) for run_id, attributes in PEOPLE.items()])


async def search(store: Store, where: str = "", **query: Any) -> str:
    """Return the ids of the runs that match, over all pages, as one text."""
    asked = RunQuery(where=parse_conditions(where, {}), **query)
    found: list[str] = []
    for _ in range(50):
        page = await store.find(asked)
        found += [head.run_id for head in page]
        if page.cursor is not None:
            asked = replace(asked, **{_place_of(asked): page.cursor})
        elif not page or asked.order is not None:
            return "".join(found)
        else:
            last = (page[-1].created_at, page[-1].run_id) if asked.newest else page[-1].run_id
            asked = replace(asked, **{_place_of(asked): last})
    raise AssertionError("the search does not end")


def _place_of(query: RunQuery) -> str:
    return "behind" if query.order is not None else "before" if query.newest else "after"


CASES = {
    "cents>5": "bcf",
    "cents>=5": "abcf",
    "cents<20.5": "a",
    "cents<=20.5": "ac",
    "cents=1500": "bf",
    "cents!=1500": "ac",
    "cents>10 cents<100": "c",
    "cents>10 region=us": "bf",
    "cents=*": "abcfg",
    "cents!=*": "de",
    'cents="text of another app"': "g",
    "region=eu": "ac",
    "region>EU": "abcf",
    "region=e*": "ac",
    "parts>=x": "ab",
    "parts=y*": "ab",
    "region!=eu": "bdf",
    "vip=true": "a",
    "vip=false": "b",
    "due>=1970-01-01T00:00:00.002Z": "b",
    "parts=y": "ab",
    "parts=x": "a",
    "parts!=x": "b",
    'reference.customer="42"': "c",
    "nothing=here": "",
    "nothing=*": "",
    "region=eu cents=5 vip=true parts=x parts=y": "a",
}


class SearchSuite(SuiteBase):
    """Search attributes."""

    @pytest.mark.contract("QUE-4")
    @pytest.mark.parametrize("newest", [False, True])
    async def test_runs_are_found_by_comparison_range_and_presence(self, store: Store, newest: bool) -> None:
        """Values of different kinds are never compared, and all conditions have to hold."""
        await fill(store)
        for where, expected in CASES.items():
            wanted = expected[::-1] if newest else expected
            assert await search(store, where, newest=newest) == wanted, where
            assert await search(store, where, newest=newest, limit=1) == wanted, where
            if newest:
                assert await search(store, where, newest=True, look=2) == wanted, where

    @pytest.mark.contract("QUE-4")
    @pytest.mark.parametrize(("limit", "look"), [(100, None), (1, None), (2, 1), (3, 2)])
    async def test_runs_are_ordered_by_an_attribute(self, store: Store, limit: int, look: int | None) -> None:
        """Runs without the attribute are left out; ties are in the order of creation, in the direction of the sort."""
        await fill(store)
        bounds: dict[str, Any] = {"limit": limit, "look": look}
        assert await search(store, order=Order("cents", "n"), **bounds) == "acbf"
        assert await search(store, order=Order("cents", "n", True), **bounds) == "fbca"
        assert await search(store, "cents>5 cents<=1500", order=Order("cents", "n"), **bounds) == "cbf"
        assert await search(store, "region=us", order=Order("cents", "n", True), **bounds) == "fb"
        assert await search(store, order=Order("region", "s"), **bounds) == "dacbf"
        assert await search(store, order=Order("due", "t", True), **bounds) == "ba"
        assert await search(store, order=Order("created_at"), **bounds) == "abcdefg"
        assert await search(store, "cents>5", order=Order("created_at", None, True), **bounds) == "fcb"

    @pytest.mark.contract("QUE-4")
    async def test_search_is_combined_with_everything_else_that_is_known_of_a_run(
        self, store: Store, node: SampleNode
    ) -> None:
        """The others are tenant, workflow, status, reference, tag, times of creation and end, and words."""
        await store.create(
            [
                new_run("a", attributes={"cents": 1}, tenant="t", plan_id="one", tags=("x",)),
                new_run("b", attributes={"cents": 1}, tenant="t", plan_id="two", reference_key="order 7"),
                new_run("c", attributes={"cents": 1}, tenant="u", plan_id="one"),
            ]
        )
        for order in (None, Order("cents", "n")):
            asked: dict[str, Any] = {"newest": order is None, "order": order}
            assert sorted(await search(store, "cents=1", tenant="t", **asked)) == ["a", "b"]
            assert await search(store, "cents=1", tenant="t", workflow="one", **asked) == "a"
            assert await search(store, "cents=1", tag="x", **asked) == "a"
            assert await search(store, "cents=1", reference_key="order 7", **asked) == "b"
            assert await search(store, "cents=1", text="ORDER", **asked) == "b"
            assert await search(store, "cents=1", status=RUNNING, **asked) == ""
            assert sorted(await search(store, "cents=1", status=PENDING, **asked)) == ["a", "b", "c"]
            assert await search(store, "cents=1", finished_from=0, **asked) == ""

    @pytest.mark.contract("QUE-4")
    async def test_runs_are_found_and_ordered_by_their_time_of_end(
        self, store: Store, node: SampleNode, clock: Any
    ) -> None:
        """Unfinished runs have no time of end."""
        await node.start("a")
        await node.start("b")
        await node.start("c")
        for run_id in ("b", "a"):
            await node.step(run_id, CompleteRun())
            clock.advance(ms=1_000)
        [ended] = [head.finished_at for head in await store.find(RunQuery(run_ids=("a",)))]
        assert ended is not None
        assert await search(store, finished_from=ended) == "a"
        assert await search(store, finished_until=ended) == "b"
        for limit in (1, 10):
            assert await search(store, order=Order("finished_at"), limit=limit) == "ba"
            assert await search(store, order=Order("finished_at", None, True), limit=limit) == "ab"
        assert await search(store, order=Order("finished_at"), finished_from=ended) == "a"

    @pytest.mark.contract("QUE-4", "EVT-5")
    async def test_a_turn_changes_attributes_with_its_commit(self, store: Store, node: SampleNode) -> None:
        """The run is no longer found by its earlier values; a turn that changes none keeps them."""
        await store.create([new_run("a", attributes={"cents": 1, "region": "eu"})])
        await node.renew()
        await node.claim()
        values: dict[str, Any] = {"cents": 2, "region": None, "vip": True}
        await node.step("a", SetAttributes(step_id="attributes", values=values))
        assert await search(store, "cents=1", newest=True) == ""
        assert await search(store, "region=*", newest=True) == ""
        assert await search(store, "cents=2 vip=true", newest=True) == "a"
        loaded = await node.step("a")
        assert loaded.head.snapshot is not None
        assert loaded.head.snapshot.attributes == {"cents": 2, "vip": True}
        assert await search(store, "cents=2 vip=true", newest=True) == "a"
        await node.step("a", SetAttributes(step_id="attributes#2", values={"cents": None, "vip": None}))
        assert await search(store, "cents=*", newest=True) == ""

    async def test_attributes_go_with_their_run(self, store: Store, node: SampleNode, clock: Any) -> None:
        """A deleted run is not found, and its number can be reused by another run."""
        await store.create([new_run("a", attributes={"cents": 1})])
        await node.renew()
        await node.claim()
        await node.step("a", CompleteRun())
        clock.advance(ms=1_000)
        assert (await store.purge(PurgePolicy(finished_run_ms=0))).runs == 1
        await store.create([new_run("b", request_id="another")])
        assert await search(store, "cents=*", newest=True) == ""
        assert await search(store, order=Order("cents", "n")) == ""

    async def test_what_no_index_can_hold_is_refused(self, store: Store) -> None:
        """Nothing is stored."""
        [answer] = await store.create([new_run("a", attributes={"region": "a\0b"})])
        assert isinstance(answer, Refused)
        check_refused(answer, InvalidInput)
        for where in ((Condition("a", "=", "n", float("inf")),), (Condition("a", "=", "n", 1.0),) * 11):
            with pytest.raises(InvalidInput):
                await store.find(RunQuery(where=where))

    @pytest.mark.contract("QUE-4")
    async def test_runs_are_counted_by_workflow_and_status(self, store: Store, node: SampleNode) -> None:
        """The same queries count and find them; a count that was cut short has a cursor."""
        await fill(store)
        await store.create([new_run("x", attributes={"region": "eu"}, plan_id="another")])
        await node.start("done")
        await node.step("done", CompleteRun())

        async def count(where: str = "", look: int = 100, **query: Any) -> tuple[list[RunCount], bool]:
            asked = RunQuery(where=parse_conditions(where, {}), **query)
            found = await store.find(RunCountQuery(runs=asked, look=look))
            return list(found), found.cursor is not None

        assert await count() == (
            [RunCount("another", PENDING, 1), RunCount("order", COMPLETED, 1), RunCount("order", PENDING, 7)],
            False,
        )
        assert await count("region=eu") == ([RunCount("another", PENDING, 1), RunCount("order", PENDING, 2)], False)
        assert await count("cents>5", workflow="order") == ([RunCount("order", PENDING, 3)], False)
        assert await count("cents>5", status=RUNNING) == ([], False)
        assert (await count(look=3))[1]
        assert RunCount("order", COMPLETED, 1) in (await count(look=3))[0], "they are counted apart"
