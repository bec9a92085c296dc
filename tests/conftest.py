"""What every test shares: the contract marker, real servers, and settings of the test libraries."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import kinds, open_transports, process_state
from tests.postgres_server import Databases, Installation
from tests.s3_server import S3Server
from tests.seaweed_server import SharedSeaweed
from tests.server_folder import memory_folder
from tools import contract

# The conformance suites live in the package, so pytest would not explain their failed assertions.
pytest.register_assert_rewrite("holdfast.testing")

# No deadline: a busy machine is not a failure. The blob reproduces a failure that was found by chance.
hypothesis.settings.register_profile("holdfast", deadline=None, print_blob=True)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("holdfast"), max_examples=30)
hypothesis.settings.load_profile("holdfast")

# httpx looks for this package at each request in process, which takes longer than many an answer.
sys.modules.setdefault("sniffio", None)  # type: ignore[arg-type]

# A shell lets a job in the background ignore interrupts, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of processes: bytecode is kept, or each of them would compile everything that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Nothing here cuts the power, so files in memory do as well as on a disk, and synchronising them takes no time.
if (room := memory_folder()) is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", room)

open_transports.watch()
WATCH = kinds.Watch()
STATE_BEFORE = pytest.StashKey[dict[str, Any]]()
KNOWN_IDS = frozenset(contract.read_ids(contract.CONTRACT.read_text(encoding="utf-8")))


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples while one writes code."""
    config.addinivalue_line("markers", "soak: left to `make soak`, because a shorter form of it is in `make test`")
    if config.option.markexpr == "quick":
        hypothesis.settings.load_profile("quick")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep ten thousand tests from the garbage collector: it would go through all of them again and again."""
    if gc.get_freeze_count():
        return (yield)  # within a test
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse a test that claims to prove a rule which the contract does not have."""
    report = yield
    tests = [node for node in report.result or () if isinstance(node, pytest.Item)]
    problems = [problem for test in tests for problem in contract.marker_problems(test, KNOWN_IDS)]
    if problems:
        report.outcome = "failed"
        report.longrepr = "\n".join(problems)
        report.result = []
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark every test with what it needs, before tests are chosen by their markers; then let long ones begin first."""
    for item in items:
        for kind in sorted(kinds.kinds_of(item) - {marker.name for marker in item.iter_markers()}):
            item.add_marker(kind)
    if os.environ.get("TEST_SAMPLED"):
        left = kinds.left_to_soak(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    yield
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        items[:] = kinds.slow_first(items, workers)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that leaves the process in another state, instead of another that runs later."""
    item.stash[STATE_BEFORE] = process_state.read()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Watch for processes, from the fixtures on."""
    WATCH.begin(item)
    yield


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test that has started a process and is not marked with it."""
    yield
    started = WATCH.end()
    assert not started, f"this test starts processes: mark it with `process`: {started}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Fail a test that leaves a transport open on its event loop, instead of another that runs when it is collected."""
    yield
    left = open_transports.left_open()
    assert not left, f"this test leaves open: {left}"
    changed = process_state.changes(item.stash[STATE_BEFORE])
    assert not changed, f"this test leaves the process changed: {changed}"


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    """Return the PostgreSQL server that all tests of a session share, whichever of its processes they are in."""
    databases = Databases.shared(_meeting_place(tmp_path_factory))
    yield databases
    databases.leave()


def _meeting_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of a session know."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture
def postgres_url(databases: Databases) -> Iterator[str]:
    """Return the address of an empty store in a database of a PostgreSQL server; it is migrated."""
    with databases.store() as url:
        yield url


@pytest.fixture
def empty_database(databases: Databases) -> Iterator[str]:
    """Return the address of an empty database in a PostgreSQL server."""
    with databases.database() as url:
        yield url


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Return an S3 server that the tests of this process share. Each makes buckets of its own."""
    server = S3Server()
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSeaweed]:
    """Return a real object storage that all tests of a session share. Each makes buckets of its own."""
    server = SharedSeaweed.join(_meeting_place(tmp_path_factory))
    yield server
    server.leave()


@pytest.fixture
def postgres() -> Iterator[Installation]:
    """Return where a test can make PostgreSQL servers of its own, to stop and to kill."""
    installation = Installation()
    yield installation
    installation.remove()
