"""What each test needs, as a marker: set from the fixtures it asks for, its parameters and its folder.

A test that starts a process and does not say so fails, so that the quick ones stay quick.
"""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import Any
from zlib import crc32

import pytest

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
"""The combinations of store and live runs of `tests/engine` that are quick: each of the four is in one of them."""

QUICK_SUITES = frozenset({"test_memory.py", "test_sqlite.py"})
"""The subclasses of `StoreSuite` that are quick, by their files."""

QUICK_SEEDS = 4

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
    kinds |= {BY_FOLDER[part] for part in PurePath(item.nodeid.partition("::")[0]).parts if part in BY_FOLDER}
    if not kinds & LONG and not is_repetition(item):
        kinds.add("quick")
    return kinds


def is_repetition(item: pytest.Item) -> bool:
    """Return whether the test is one of many alike, of which a few are enough while writing code."""
    given, file = parameters(item), PurePath(item.nodeid.partition("::")[0])
    if "variant" in given:
        return (given.pop("address", None), given.pop("variant")) not in _quick_variants(item, is_case=bool(given))
    suite = getattr(item, "cls", None)
    if suite is not None and any(base.__name__ == "StoreSuite" for base in suite.__mro__):
        return file.name not in QUICK_SUITES
    return bool(given.get("seed", 0) >= QUICK_SEEDS) if "sim" in file.parts else False


def _quick_variants(item: pytest.Item, *, is_case: bool) -> tuple[tuple[str, int], ...]:
    """Return the quick combinations of a test: both, but of a test with many cases they take turns."""
    if not is_case:
        return QUICK_VARIANTS
    case = item.nodeid
    for word in ("memory", "sqlite", "live", "replayed"):
        case = case.replace(word, "")
    return (QUICK_VARIANTS[crc32(case.encode()) % len(QUICK_VARIANTS)],)


def slow_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in an order in which each worker begins with its share of the slow ones.

    `--dist worksteal` splits the list into one stretch a worker. A slow test that begins last would keep one worker
    busy while the others have nothing left to do.
    """
    once = [item for item in items if item.path.name == READ_ONCE]
    slow = [item for item in items if item.get_closest_marker("slow")]
    short = [item for item in items if item.path.name != READ_ONCE and not item.get_closest_marker("slow")]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        stretch = (len(items) - len(ordered)) // (workers - worker)
        own = slow[worker::workers] if worker else once + slow[::workers]
        ordered += own + short[: max(0, stretch - len(own))]
        del short[: max(0, stretch - len(own))]
    return ordered + short


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
