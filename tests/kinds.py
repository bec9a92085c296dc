"""What each test needs, as a marker: set from the fixtures it asks for, its parameters and its folder.

A test that starts a process and does not say so fails, so that the quick ones stay quick.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar
from zlib import crc32

import pytest

from tools import slow_tests

T = TypeVar("T")

BY_FIXTURE = {
    "databases": "postgres",
    "postgres": "postgres",
    "browser": "browser",
    "forks": "process",
    "pytester": "slow",
    "s3_server": "process",
    "seaweed": "process",
}
"""A fixture counts for every test that asks for it, and for those that ask for a fixture which asks for it."""

BY_PARAMETER = {"postgres": "postgres", "s3": "process"}
"""Fixtures with this parameter ask for the server only when they are made, so it is not among those of the test."""

BY_FOLDER = {
    "chaos": "chaos",
    "sim": "sim",
    "races": "process",
    "crash": "process",
    "bench": "process",
    "examples": "process",
}
"""Folders of `tests`."""

LONG = frozenset({"postgres", "browser", "process", "chaos", "slow"})
"""The kinds that take longer than one waits for while writing code."""

QUICK_VARIANTS = (("memory", 5_000), ("sqlite", 0))
"""The combinations of store and live runs of `tests/engine` that are quick: tests take turns between them."""

IN_TURN: dict[str, tuple[Any, ...]] = {
    "how": ("REST", "JSON-RPC", "client in process", "client over HTTP", "command line"),
    "store": ("memory", "sqlite"),
    "stored_in": ("memory", "sqlite"),
}
"""Parameters whose values take turns in a test with many cases: each case is quick with one of them."""

REPEATED = {**IN_TURN, "store": ("memory", "sqlite", "postgres", "bucket")}
"""Parameters of which `make test` plays two values in each case, the quick one and another in turn; `make soak` all."""

TURN_WORDS = (
    *("live", "replayed", "postgres", "bucket"),
    *(value for values in IN_TURN.values() for value in values),
)

QUICK_SUITE = "test_sqlite.py"
"""The subclass of `StoreSuite` that is quick, by its file. Of the memory's the engine's tests would fail as well."""

QUICK_SEEDS = 10
QUICK_STORIES = 1
"""How many seeds of a test are quick, and how many of the simulation."""

SLOW = slow_tests.read_list()
"""Tests, and functions with all their tests, that were measured to be slow; of the simulation the seeds decide."""

READ_ONCE = "test_tidy.py"
"""The file of tests that read all sources, once in each process that runs some of them: one worker begins with all."""

STARTS = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"})
"""The events of the interpreter that start a process."""


def kinds_of(item: pytest.Item) -> set[str]:
    """Return the markers of a test: those that it has, and what follows from its fixtures and its folder."""
    kinds = {marker.name for marker in item.iter_markers()}
    kinds |= {BY_FIXTURE[name] for name in getattr(item, "fixturenames", ()) if name in BY_FIXTURE}
    kinds |= {
        BY_PARAMETER[value] for value in parameters(item).values() if isinstance(value, str) and value in BY_PARAMETER
    }
    kinds |= {BY_FOLDER[part] for part in parts_of(item) if part in BY_FOLDER}
    if {item.nodeid, slow_tests.function_of(item.nodeid)} & SLOW and not kinds & {"sim", "slow"}:
        kinds.add("slow")
    if not kinds & LONG and not is_repetition(item):
        kinds.add("quick")
    return kinds


def is_repetition(item: pytest.Item) -> bool:
    """Return whether the test is one of many alike, of which a few are enough while writing code."""
    given, parts = parameters(item), parts_of(item)
    if "variant" in given:
        return (given.get("stored_in"), given["variant"]) not in _in_turn(item, QUICK_VARIANTS)
    suite = getattr(item, "cls", None)
    if suite is not None and any(base.__name__ == "StoreSuite" for base in suite.__mro__):
        return parts[-1] != QUICK_SUITE
    if given.get("seed", 0) >= (QUICK_STORIES if "sim" in parts else QUICK_SEEDS):
        return True
    for name, values in IN_TURN.items():
        if len(given) > 1 and given.get(name) in REPEATED[name]:
            return given[name] not in _in_turn(item, values)
    return False


def left_to_soak(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that `make test` leaves out: those that say so, and repetitions whose turn it is not.

    A test that is there with several stores, ways to ask or variants of the engine is played with two of them: the
    quick one, and another in turn. So all tests of an area together are played with each.
    """
    left = {item for item in items if item.get_closest_marker("soak")}
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item not in left and _is_repeated(item):
            alike.setdefault(_case_of(item), []).append(item)
    for case, some in alike.items():
        some.sort(key=is_repetition)  # the quick one first
        others = some[1:]
        left.update(others)
        if others:
            left.remove(others[_turn(case, len(others))])
    return left


def _is_repeated(item: pytest.Item) -> bool:
    """Return whether a test is one of several that differ in where they are played alone."""
    given = parameters(item)
    if "variant" in given:
        return given.get("stored_in") in {store for store, _ in QUICK_VARIANTS}
    return len(given) > 1 and any(given.get(name) in values for name, values in REPEATED.items())


def _in_turn(item: pytest.Item, values: tuple[T, ...]) -> tuple[T, ...]:
    """Return the value whose turn it is in this case of a test: cases take turns."""
    return (values[_turn(_case_of(item), len(values))],)


def _turn(case: str, count: int) -> int:
    return crc32(case.encode()) % count


def _case_of(item: pytest.Item) -> str:
    """Return what a test is called, whatever it is played with."""
    case = item.nodeid
    for word in TURN_WORDS:
        case = case.replace(word, "")
    return case


def slow_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in an order in which each worker begins with slow ones and ends with quick ones.

    `--dist worksteal` splits the list into one stretch a worker; one that has nothing left gets the end of another's. A
    slow test that begins last would keep one worker busy while the others have nothing left to do. What needs a server,
    a browser or a process may be slow as well: it comes next, in stretches, because many of them share what they need.
    """
    once = [item for item in items if item.path.name == READ_ONCE]
    slow = [item for item in items if item.path.name != READ_ONCE and item.get_closest_marker("slow")]
    rest = [item for item in items if item.path.name != READ_ONCE and not item.get_closest_marker("slow")]
    far = [item for item in rest if any(map(item.get_closest_marker, LONG))]
    short = [item for item in rest if not any(map(item.get_closest_marker, LONG))]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        stretch = (len(items) - len(ordered)) // (workers - worker)
        share = -(-len(far) // (workers - worker))
        own = (once if worker == 0 else []) + slow[worker::workers] + far[:share]
        del far[:share]
        ordered += own + short[: max(0, stretch - len(own))]
        del short[: max(0, stretch - len(own))]
    return ordered + short


def parts_of(item: pytest.Item) -> list[str]:
    """Return the folders and the name of the file that a test is in."""
    return item.nodeid.partition("::")[0].split("/")


def parameters(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a test and of its fixtures."""
    spec = getattr(item, "callspec", None)
    return dict(spec.params) if spec is not None else {}


class Watch:
    """Notices processes that are started while a test runs which does not say that it does."""

    def __init__(self) -> None:
        self._starts: list[str] | None = None
        sys.addaudithook(self._hear)

    def begin(self, item: pytest.Item) -> None:
        """Watch a test from now on."""
        allowed = any(item.get_closest_marker(kind) for kind in LONG - {"slow"})
        self._starts = None if allowed else []

    def end(self) -> list[str]:
        """Watch it no longer. Return what it has started."""
        found, self._starts = self._starts, None
        return found or []

    def _hear(self, event: str, details: tuple[Any, ...]) -> None:
        if self._starts is not None and event in STARTS:
            self._starts.append(f"{event} {details[:2]}")
