"""Which of many cases alike `make quick` and `make test` play: each case in some combinations, together in all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import kinds

CASES = range(60)
LIVE = {5_000: "live", 0: "replayed"}
HOW = kinds.IN_TURN["how"]
VARIANTS = [(store, live) for store in ("memory", "sqlite") for live in LIVE]
STORES = ("memory", "sqlite", "postgres", "bucket")


class HashableNamespace(SimpleNamespace):
    """One that is itself alone."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def made(test: str, *marks: str, **given: Any) -> pytest.Item:
    """Return something that is looked at like a test with these parameters."""
    words = "-".join(LIVE[value] if name == "variant" else str(value) for name, value in given.items())
    item = HashableNamespace(
        nodeid=f"tests/engine/test_some.py::{test}[{words}]",
        callspec=SimpleNamespace(params=given),
        get_closest_marker=lambda name: name in marks or None,
    )
    return cast("pytest.Item", item)


def families() -> list[list[pytest.Item]]:
    """Return cases, each with all of its combinations."""
    variants = [[made(f"test_{n}", stored_in=at, variant=live) for at, live in VARIANTS] for n in CASES]
    ways = [[made("test_way", case=n, how=how) for how in HOW] for n in CASES]
    stores = [[made("test_store", store=store, case=n) for store in STORES] for n in CASES]
    return [*variants, *ways, *stores]


def families_of(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the tests of each case."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        given = kinds.parameters(item)
        found.setdefault(f"{item.nodeid.partition('[')[0]} {given.get('case')}", []).append(item)
    return list(found.values())


def played() -> list[pytest.Item]:
    """Return what `make test` plays of them."""
    items = [item for family in families() for item in family]
    left = kinds.left_to_soak(items)
    return [item for item in items if item not in left]


def test_each_case_is_quick_once_and_played_twice() -> None:
    chosen = played()
    for family in families_of(chosen):
        assert len(family) == 2
        assert len([item for item in family if not kinds.is_repetition(item)]) == 1


def test_together_the_cases_are_played_in_every_combination() -> None:
    given = [kinds.parameters(item) for item in played()]
    assert {(each.get("stored_in"), each["variant"]) for each in given if "variant" in each} == set(VARIANTS)
    assert {each["how"] for each in given if "how" in each} == set(HOW)
    assert {each["store"] for each in given if "store" in each} == set(STORES)


def test_what_is_there_once_is_played() -> None:
    alone = [made("test_one", store="postgres"), made("test_seed", seed=99), made("test_case", store="bucket", case=1)]
    assert kinds.left_to_soak(alone) == set()
    long = made("test_long", "soak", seed=1)
    assert kinds.left_to_soak([*alone, long]) == {long}


def rank_of(item: pytest.Item) -> int:
    """Return 0 for a slow test, 1 for one that needs a server, a browser or a process, 2 for others."""
    return 0 if item.get_closest_marker("slow") else 1 if any(map(item.get_closest_marker, kinds.LONG)) else 2


def test_a_worker_begins_with_what_may_take_long_and_ends_with_quick_tests() -> None:
    """So that at the end, when workers take tests from each other, there are many short ones left."""
    kinds_of_tests = ["", "slow", "", "process", "", "browser", "slow", "postgres", "", ""] * 40
    items = []
    for number, kind in enumerate(kinds_of_tests):
        item = cast("Any", made(f"test_{number}", kind))
        item.path = SimpleNamespace(name="test_tidy.py" if number == 7 else "test_some.py")
        items.append(item)
    ordered = kinds.slow_first(items, 4)
    assert sorted(map(id, ordered)) == sorted(map(id, items))
    assert ordered[0] is items[7]
    for worker in range(4):
        stretch = ordered[100 * worker : 100 * (worker + 1)]
        found = [rank_of(item) for item in stretch[1 if worker == 0 else 0 :]]
        assert found == sorted(found)
        assert min(map(found.count, range(3))) >= 15
