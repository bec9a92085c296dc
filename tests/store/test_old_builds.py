"""Upgrades with real old code: nodes of an earlier build beside nodes of this one, on one store (FMT-1).

The earlier builds are in `old_builds`, one for each stored format. Each node is a process that imports one of them, or
the present code. The oldest is tested with everything, the others on one store or the other, and with what they lack.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.core.plans import CONTEXT_LEVEL, DEBOUNCE_LEVEL, FORMAT_LEVEL
from holdfast.core.state import COMPLETED, RUNNING
from holdfast.errors import Conflict
from holdfast.store.port import FinishedRunQuery, PurgePolicy, RunQuery
from holdfast.store.schema import read_schema
from holdfast.testing.samples import new_run
from tests.store.upgrade_node import OTHERS, make_app

pytestmark = [pytest.mark.process, pytest.mark.contract("FMT-1")]

TOP = Path(__file__).parents[2]
OLD_BUILDS = Path(__file__).parent / "old_builds" / "builds.tar.xz"
OLDEST = "8.7"
NODE = Path(__file__).parent / "upgrade_node.py"
NEW = TOP / "src"
MOST_SECONDS = 60.0


@pytest.fixture(scope="session")
def old_builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a folder for each earlier build."""
    folder = tmp_path_factory.mktemp("old-builds")
    with tarfile.open(OLD_BUILDS) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(params=[OLDEST])
def old_build(request: pytest.FixtureRequest, old_builds: Path) -> Path:
    """Return a folder with an earlier build in it."""
    return old_builds / str(request.param)


def builds_on_stores(*others: tuple[str, str]) -> pytest.MarkDecorator:
    """Play a test with the oldest build on both stores, and with other builds on one each."""
    cases = [(OLDEST, "sqlite"), (OLDEST, "postgres"), *others]
    return pytest.mark.parametrize(("old_build", "address"), cases, indirect=True)


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a store that is not there yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    return str(request.getfixturevalue("postgres_url"))


class NodeProcess:
    """A node of some build."""

    def __init__(self, name: str, address: str, build: Path) -> None:
        environ = {**os.environ, "PYTHONPATH": str(build), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, str(NODE), name, address]
        self.name = name
        self._process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []

    def wait_for(self, text: str) -> str:
        """Return the first line with this text."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"{self.name} has ended without saying {text!r}: {self.lines}")

    def end(self, *, kill: bool = False) -> None:
        """End the process: in order, or at once."""
        if kill:
            self._process.kill()
        else:
            self._process.terminate()
        rest, _ = self._process.communicate(timeout=MOST_SECONDS)
        self.lines += rest.splitlines()


@contextmanager
def node(name: str, address: str, build: Path) -> Iterator[NodeProcess]:
    """Run a node until the context ends."""
    process = NodeProcess(name, address, build)
    try:
        assert str(build) in process.wait_for("works")
        yield process
    finally:
        process.end(kill=True)


@asynccontextmanager
async def client(address: str) -> AsyncIterator[tuple[hf.App, Any]]:
    """Look at the store with the present code, which brings its schema up to date, and run nothing."""
    app, order = make_app("client")
    async with asyncio.timeout(MOST_SECONDS), app.connect(address):
        yield app, order


async def until(is_so: Callable[[], Any]) -> None:
    """Wait until something is so."""
    while not await is_so():  # noqa: ASYNC110 - another process makes it so
        await asyncio.sleep(0.05)


async def waits(app: hf.App, run_ids: list[str]) -> None:
    """Wait until these runs wait for their signal."""

    async def all_wait() -> bool:
        waiting = {wait.run_id async for wait in app.waits(name="go")}
        return waiting >= set(run_ids)

    await until(all_wait)


@pytest.mark.parametrize(("place", "store"), [(0, "sqlite"), (1, "postgres")])
def test_there_is_a_build_of_each_earlier_format(old_builds: Path, place: int, store: str) -> None:
    built = {int(folder.name.split(".")[place]) for folder in old_builds.iterdir()}
    with as_file(files(f"holdfast.store.{store}")) as folder:
        schema = read_schema(folder)
    assert built == set(range(schema.first, schema.latest))


@builds_on_stores(
    *(("8.7.rotations.2", "sqlite"), ("9.8", "postgres"), ("10.9", "sqlite"), ("11.10.level.2", "postgres")),
    ("12.11", "sqlite"),
)
async def test_runs_of_an_old_build_go_on_with_this_one_and_back(old_build: Path, address: str) -> None:
    """An upgrade, and a downgrade: the old build reads what this one has written, in the new format."""
    with node("old", address, old_build) as old:
        async with client(address) as (app, order):
            runs = [await app.start(order, number, run_id=f"run-{number}") for number in range(3)]
            await waits(app, [run.run_id for run in runs])
            old.end()
            with node("new", address, NEW) as new:
                await runs[0].signal("go", 10)
                assert await runs[0].result() == 12
                runs.append(await app.start(order, 7, run_id="run-7", tags=("blue",), reference_key="order-7"))
                await waits(app, ["run-7"])
                new.end()
            with node("old", address, old_build):
                for number, run in ((1, runs[1]), (7, runs[3])):
                    await run.signal("go", 10, signal_id="click")
                    assert await run.result() == number + 12
            with node("new", address, NEW):
                await runs[2].signal("go", 10)
                assert await runs[2].result() == 14
            store = app.runtime().store
            assert {head.status for head in await store.find(RunQuery())} == {COMPLETED}


@builds_on_stores(
    *(("8.7.rotations.2", "postgres"), ("9.8", "sqlite"), ("10.9", "postgres"), ("11.10.level.2", "sqlite")),
    ("12.11", "postgres"),
)
async def test_old_and_new_nodes_share_the_work_and_take_over_from_each_other(old_build: Path, address: str) -> None:
    """Both are alive, each is killed once, and every run ends with its result."""
    async with client(address) as (app, order):
        with node("old", address, old_build) as old, node("new", address, NEW) as new:
            runs = [await app.start(order, number, run_id=f"run-{number}") for number in range(20)]
            await waits(app, [run.run_id for run in runs])
            old.end(kill=True)
            await app.signal_many([{"run_id": run.run_id, "name": "go", "payload": 1} for run in runs[:10]])
            assert [await run.result() for run in runs[:10]] == [number + 3 for number in range(10)]
            with node("old", address, old_build) as again:
                new.end(kill=True)
                await app.signal_many([{"run_id": run.run_id, "name": "go", "payload": 1} for run in runs[10:]])
                assert [await run.result() for run in runs[10:]] == [number + 3 for number in range(10, 20)]
                again.end()
                assert any("adds to" in line for line in again.lines)


async def test_runs_that_need_more_are_not_claimed_by_an_old_node(old_build: Path, address: str) -> None:
    """A plan is a kind of run that the old build does not have: it waits, unharmed, for a node that does."""
    document = "plan: sums\nversion: '1'\nsteps:\n  - {id: one, activity: add, input: {number: 1}}\n"
    with node("old", address, old_build):
        async with client(address) as (app, order):
            plan = await app.plans.start(document, run_id="plan-1")
            simple = await app.start(order, 1, run_id="simple")
            await waits(app, ["simple"])  # the old node has looked at what is ready
            store = app.runtime().store
            [head] = await store.find(RunQuery(run_ids=("plan-1",)))
            assert (head.lease_owner, head.losses, head.status in (RUNNING, "PENDING")) == (None, 0, True)
            assert len(await plan.events()) == head.version
            with node("new", address, NEW):
                await plan.result()
                await simple.signal("go", 1)
                assert await simple.result() == 4


async def test_a_run_whose_state_needs_a_level_is_not_claimed_by_an_old_node(
    old_build: Path, postgres_url: str
) -> None:
    """A delayed run of a workflow with limits would start there without a place; one of a later build, nowhere."""
    with node("old", postgres_url, old_build):
        async with client(postgres_url) as (app, order):
            store = app.runtime().store
            delayed = await app.start(OTHERS["few"], 1, after=timedelta(milliseconds=1), run_id="delayed")
            future = new_run("future", now=await store.now())
            await store.create([replace(future, snapshot=replace(future.snapshot, needs=FORMAT_LEVEL + 1))])
            for number in range(3):
                await app.start(order, number, run_id=f"simple-{number}")
            await waits(app, ["simple-0", "simple-1", "simple-2"])  # the old node has looked at what is ready
            for head in await store.find(RunQuery(run_ids=("delayed", "future"))):
                assert (head.status, head.version, head.lease_epoch) == ("PENDING", 1, 0)
            with node("new", postgres_url, NEW):
                assert await delayed.result() == 2
                [head] = await store.find(RunQuery(run_ids=("future",)))
                assert (head.status, head.version, head.lease_epoch) == ("PENDING", 1, 0)


@pytest.mark.parametrize("old_build", [OLDEST, "9.8", "10.9"], indirect=True)
async def test_on_a_file_old_builds_are_refused_once_a_run_needs_a_level(old_build: Path, tmp_path: Path) -> None:
    """Its statements would claim such a run: it is not created beside an old node, and no old node opens it later."""
    address = f"sqlite:///{tmp_path}/store.db"
    async with client(address) as (app, order):
        with node("old", address, old_build) as old:
            simple = await app.start(order, 1, run_id="simple")
            await waits(app, ["simple"])
            with pytest.raises(Conflict, match="earlier release work on this store: old"):
                await app.start(OTHERS["few"], 1, after=timedelta(milliseconds=1), run_id="delayed")
            with pytest.raises(Conflict, match="level 2"):
                await app.start(order, 1, run_id="bounded", execution_timeout=60)
            assert [head.run_id for head in await app.runtime().store.find(RunQuery())] == ["simple"]
            old.end()
        await until(partial(_is_old_gone, app))
        delayed = await app.start(OTHERS["few"], 1, after=timedelta(milliseconds=1), run_id="delayed")
        late = NodeProcess("late", address, old_build)
        assert "StoreTooNew" in late.wait_for("late")
        late.end()
        with node("new", address, NEW):
            assert await delayed.result() == 2
            await simple.signal("go", 1)
            assert await simple.result() == 4


@pytest.mark.parametrize(
    ("old_build", "address"),
    [("10.9", "postgres"), ("11.10.level.2", "sqlite"), ("11.10.level.2", "postgres")],
    indirect=True,
)
async def test_a_run_with_a_context_is_not_claimed_by_a_build_before_that_level(old_build: Path, address: str) -> None:
    """It would lose the context. The build stays on the store, and runs what it understands."""
    async with client(address) as (app, order):
        with node("old", address, old_build):
            carrying = await app.start(order, 1, run_id="carrying", context={"trace": "7"})
            simple = await app.start(order, 1, run_id="simple")
            await waits(app, ["simple"])  # the old node has looked at what is ready
            [head] = await app.runtime().store.find(RunQuery(run_ids=("carrying",)))
            assert (head.needs, head.status, head.lease_epoch) == (CONTEXT_LEVEL, "PENDING", 0)
            with node("new", address, NEW) as new:
                await waits(app, ["carrying"])
                new.end(kill=True)
            await simple.signal("go", 1)
            assert await simple.result() == 4
            await carrying.signal("go", 1)
            with node("next", address, NEW):
                assert await carrying.result() == 4
            nodes = {event.engine_run_ref.node.partition("#")[0] for event in await carrying.events()}
            assert nodes & {"old", "new", "next"} == {"new", "next"}


@pytest.mark.contract("QUE-6")
@pytest.mark.parametrize(
    ("old_build", "address"),
    [(build, store) for build in ("11.10.level.2", "12.11") for store in ("sqlite", "postgres")],
    indirect=True,
)
async def test_a_debounced_run_is_not_claimed_by_a_build_before_that_level(old_build: Path, address: str) -> None:
    """It would begin with its first input. The build stays on the store, and runs what it understands."""
    key = hf.Debounce("doc-7", quiet=3, at_most=60)
    async with client(address) as (app, order):
        first = await app.start(order, 1, debounce=key)
        with node("old", address, old_build):
            store = app.runtime().store
            assert (await app.start(order, 2, debounce=key)).run_id == first.run_id

            async def is_due() -> bool:
                [head] = await store.find(RunQuery(run_ids=(first.run_id,)))
                assert (head.needs, head.status, head.lease_epoch) == (DEBOUNCE_LEVEL, "PENDING", 0)
                assert head.snapshot is not None
                return await store.now() > (head.snapshot.waiting_until or 0) + 3_000_000

            await until(is_due)
            simple = await app.start(order, 1, run_id="simple")
            await waits(app, ["simple"])  # the old node has looked at what is ready
            assert await is_due(), "it stays as it was"
            with node("new", address, NEW) as new:
                await waits(app, [first.run_id])
                new.end(kill=True)
            await simple.signal("go", 1)
            assert await simple.result() == 4
            await first.signal("go", 1)
            with node("next", address, NEW):
                assert await first.result() == 5
            nodes = {event.engine_run_ref.node.partition("#")[0] for event in await first.events()}
            assert nodes & {"old", "new", "next"} == {"new", "next"}


async def _is_old_gone(app: hf.App) -> bool:
    return not any(each.node.startswith("old") for each in await app.runtime().store.find_nodes())


async def test_retention_of_this_build_beside_an_old_node(old_build: Path, address: str) -> None:
    """What is deleted is gone for the old node too, and what it runs goes on."""
    with node("old", address, old_build) as old:
        async with client(address) as (app, order):
            runs = [await app.start(order, number, run_id=f"run-{number}") for number in range(3)]
            await waits(app, [run.run_id for run in runs])
            await runs[0].signal("go", 1)
            await runs[0].result()
            store = app.runtime().store
            [done] = await store.find(FinishedRunQuery(until=await store.now() + 1_000_000))
            assert (await store.purge(PurgePolicy(run_ids=(done.run_id,), finished_run_ms=0))).runs == 1
            again = await app.start(order, 5, run_id="run-0")
            await waits(app, ["run-0"])
            for number, run in ((5, again), (1, runs[1]), (2, runs[2])):
                await run.signal("go", 1)
                assert await run.result() == number + 3
            old.end()
            assert sum("adds to" in line for line in old.lines) == 8


@builds_on_stores(("8.7.rotations.2", "sqlite"))
async def test_a_history_that_is_rotated_by_either_build_goes_on_with_the_other(old_build: Path, address: str) -> None:
    """What is carried over a rotation is read by both, and nothing that was sent is lost."""
    async with client(address) as (app, _):
        run = await app.start(OTHERS["rotating"], 4, 0, run_id="turning")
        for number, build in enumerate([old_build, NEW, old_build, NEW]):
            with node(f"node-{number}", address, build) as process:
                await waits(app, ["turning"])
                await run.signal("go", 10, signal_id=f"go-{number}")
                await until(partial(_has_rotated, run, number + 1))
                process.end()
        with node("last", address, old_build):
            assert await run.result() == 45
        events = await run.events()
        assert [event.run_seq for event in events] == list(range(1, len(events) + 1))


async def _has_rotated(run: hf.RunHandle[Any], count: int) -> bool:
    return sum(event.event_type == "ContinuedAsNew" for event in await run.events()) >= count


@pytest.mark.contract("SIG-13")
async def test_what_an_old_node_approves_is_started_by_this_build(old_build: Path, address: str) -> None:
    """An old node holds such a run too, because it has no message; its approval leaves none, so this build does."""
    async with client(address) as (app, order):
        with node("old", address, old_build) as old:
            held = await app.start(OTHERS["held"], 1, run_id="held")
            await held.signal("go", 5)
            other = await app.start(order, 1, run_id="other")
            await waits(app, ["other"])  # the old node has looked at what is ready
            assert (await held.snapshot()).status == "PENDING"
            await held.approve(actor="ann")

            async def is_approved() -> bool:
                return (await held.snapshot()).status == "APPROVED"

            await until(is_approved)
            old.end()
        with node("new", address, NEW):
            assert await held.result() == 7
            await other.signal("go", 1)
            await other.result()


@pytest.mark.contract("BUS-1")
async def test_what_an_old_node_commits_is_sent_to_a_sink_by_this_build(old_build: Path, address: str) -> None:
    """It knows of no sink, but the store writes the outbox. What it committed before there was one is not sent."""
    seen: dict[str, list[int]] = {}
    with node("old", address, old_build):
        app, order = make_app("client")

        def note(events: list[dict[str, Any]]) -> None:
            for event in events:
                seen.setdefault(event["subject"], []).append(int(event["sequence"]))

        async with client(address) as (first, same):
            early = await first.start(same, 1, run_id="early")
            await waits(first, ["early"])
            before = len(await early.events())
        app.projection("all")(note)
        options = hf.NodeOptions(takes_runs=False, relays=True, safety_poll_s=0.2)
        async with asyncio.timeout(MOST_SECONDS), app.node(address, options=options):
            runs = [app.run("early"), await app.start(order, 2, run_id="late")]
            await waits(app, ["late"])
            for run in runs:
                await run.signal("go", 1)
                await run.result()
            histories = {run.run_id: [event.run_seq for event in await run.events()] for run in runs}
            expected = {"early": histories["early"][before:], "late": histories["late"]}

            async def has_all() -> bool:
                return seen == expected

            await until(has_all)
