"""Tests of nodes whose process is gone: their runs go on at once where that can be known, else by the lease."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import Raw
from msgspec.structs import replace

import holdfast as hf
from holdfast.engine import dead_processes
from holdfast.engine.abilities import Abilities
from holdfast.engine.dead_processes import DeadProcesses, is_gone, is_here, process_identity
from holdfast.engine.observe.takeovers import Takeovers, find_takeovers
from holdfast.store.memory import MemoryStore
from holdfast.store.port import LoadedRun
from holdfast.store.proxy import StoreProxy
from holdfast.testing import VirtualClock

WORKER = """
import asyncio, sys, holdfast as hf
app = hf.App("shop")

@app.workflow
async def order() -> str:
    return await hf.wait_signal("approval", str)

async def main():
    async with app.node(sys.argv[1], options=hf.NodeOptions(lease_ms=600_000)):
        run = await app.start(order, run_id="o-1")
        print("up", flush=True)
        await run.result()

asyncio.run(main())
"""

OWNER = """
import asyncio, sys, holdfast as hf
app = hf.App("shop")

@app.activity
async def pick() -> str:
    print("up", flush=True)
    await asyncio.sleep(600)
    return "never"

@app.workflow
async def order() -> str:
    return await pick()

async def main():
    async with app.node(sys.argv[1], options=hf.NodeOptions(lease_ms=600_000)):
        await (await app.start(order, run_id="o-1")).result()

asyncio.run(main())
"""
"""It owns its run, because an activity of it is under way."""


def test_this_process_is_not_gone_and_one_that_has_ended_is() -> None:
    identity = process_identity()
    assert identity.split()[-2] == str(os.getpid())
    assert not is_gone(identity)
    machine = identity.rsplit(" ", 2)[0]
    assert is_gone(f"{machine} {os.getpid()} 1"), "the number of the process was used again"
    assert not is_gone(f"another {identity}"), "another machine, or another boot"
    assert not is_gone("")
    assert not is_gone("nonsense")


@pytest.mark.process
def test_a_process_that_was_killed_is_gone_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    machine = process_identity().rsplit(" ", 2)[0]
    started = dead_processes._started(child.pid)
    assert not is_gone(f"{machine} {child.pid} {started}")
    child.kill()
    until = time.monotonic() + 30
    while not is_gone(f"{machine} {child.pid} {started}"):
        assert time.monotonic() < until
    child.wait()
    assert is_gone(f"{machine} {child.pid} {started}")


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    identity = process_identity()
    monkeypatch.setattr(dead_processes, "PROC", tmp_path)
    assert process_identity() == ""
    assert not is_gone(identity)


def proc_of(folder: Path, pid: int, started: str, clock: str) -> Path:
    """Make a folder like /proc, as this process sees itself there."""
    own = folder / str(pid)
    (own / "ns").mkdir(parents=True)
    (own / "ns/pid").symlink_to("pid:[1]")
    (own / "ns/time").symlink_to(clock)
    (own / "stat").write_text(f"{pid} (python) S {'0 ' * 18}{started} 0")
    (folder / "self").symlink_to(str(pid))
    (folder / "sys/kernel/random").mkdir(parents=True)
    (folder / "sys/kernel/random/boot_id").write_text("boot\n")
    return folder


def test_what_proc_says_of_processes_of_another_namespace_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after `unshare --pid` without `--mount-proc`: this process's number is there, and is that of another."""
    monkeypatch.setattr(dead_processes, "PROC", proc_of(tmp_path / "own", os.getpid(), "7", "time:[1]"))
    identity = process_identity()
    assert identity
    foreign = proc_of(tmp_path / "foreign", os.getpid() + 1, "8", "time:[1]")
    (foreign / str(os.getpid())).mkdir()
    (foreign / str(os.getpid()) / "stat").write_text(f"{os.getpid()} (other) S {'0 ' * 18}9 0")
    monkeypatch.setattr(dead_processes, "PROC", foreign)
    assert process_identity() == ""
    assert not is_gone(identity)
    assert not is_here(identity)


def test_a_process_whose_clock_begins_elsewhere_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In another time namespace the same process was started at another time."""
    monkeypatch.setattr(dead_processes, "PROC", proc_of(tmp_path / "own", os.getpid(), "7", "time:[1]"))
    identity = process_identity()
    monkeypatch.setattr(dead_processes, "PROC", proc_of(tmp_path / "other", os.getpid(), "1000007", "time:[2]"))
    assert not is_gone(identity)
    assert not is_here(identity)


@pytest.mark.contract("OWN-3")
async def test_only_leases_of_the_gone_are_ended_and_it_says_whose_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    identity = process_identity()
    machine = identity.rsplit(" ", 2)[0]
    for name, process in {"gone#1": f"{machine} {os.getpid()} 1", "here#1": identity, "far#1": f"x {identity}"}.items():
        await store.renew(name, 60_000, Abilities(process=process).encode())
    await store.renew("old#1", 60_000, Abilities().encode())
    with caplog.at_level(logging.INFO, "holdfast.node"):
        assert await DeadProcesses(store, "new#1").end_leases() == ["gone"]
    waits, takes = caplog.records
    assert "elsewhere: far, old. If one is gone, its runs wait for its lease" in waits.getMessage()
    assert (takes.levelname, "new takes over at once from gone, " in takes.getMessage()) == ("WARNING", True)
    clock.advance(ms=2)
    assert [each.node for each in await store.find_nodes()] == ["far#1", "here#1", "old#1"]


async def waiting_run(store: MemoryStore) -> LoadedRun:
    """Return a run that the node `first` has executed until it waits."""
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        return await hf.wait_signal("approval", str)

    async with app.node(store, name="first"), asyncio.timeout(60):
        run = await app.start(order)
        while not [wait async for wait in app.waits(run_id=run.run_id)]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    [loaded] = await store.load([run.run_id])
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    ("losses", "gone_s", "gone", "taken_from"),
    [
        (1, 60, ["second"], "first"),
        (2, 60, ["second"], "second"),
        (2, 0, ["second"], "first"),
        (2, 60, ["second", "second"], "second"),
        (2, 60, ["second", "other"], "first"),
        (2, 0, ["other", "second"], "first"),
    ],
)
async def test_a_run_that_is_lost_again_is_taken_from_the_node_that_had_it_last(
    losses: int, gone_s: float, gone: list[str], taken_from: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That node has committed nothing, so the run's snapshot names the one before. Later losses are of other nodes."""
    monkeypatch.setattr("holdfast.engine.observe.takeovers.GONE_S", gone_s)
    store = MemoryStore()
    loaded = await waiting_run(store)
    takeovers = Takeovers(store, "third#1", lambda _: False)
    for node in gone:
        takeovers.note_gone([node])
    await takeovers.note([replace(loaded, head=replace(loaded.head, losses=losses))])
    [found] = await find_takeovers(store, 0, 10)
    assert found.takeover.taken_from == taken_from


class SlowBulletins(StoreProxy):
    """A store that takes for ever to keep a bulletin."""

    async def put_bulletins(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int) -> list[bool]:
        await asyncio.Event().wait()
        return await super().put_bulletins(kind, bodies, keep_ms)


@pytest.mark.contract("OWN-3")
async def test_runs_that_are_taken_over_do_not_wait_for_a_report_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.engine.observe.takeovers.REPORTED_S", 0.01)
    store = MemoryStore()
    loaded = await waiting_run(store)
    takeovers = Takeovers(SlowBulletins(store), "second#1", lambda _: False)
    async with asyncio.timeout(60):
        await takeovers.note([replace(loaded, head=replace(loaded.head, losses=1))])
    assert "second has taken over 1 run of first" in caplog.messages[0]
    assert caplog.messages[1] == "node second could not report what it has taken over"


@pytest.mark.process
@pytest.mark.contract("OWN-3")
async def test_the_successor_of_a_killed_process_goes_on_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = f"sqlite:///{tmp_path}/orders.db"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, store], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert await asyncio.to_thread(worker.stdout.readline) == "up\n"
    worker.send_signal(signal.SIGKILL)
    await asyncio.to_thread(worker.wait)
    worker.stdout.close()
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        return await hf.wait_signal("approval", str)

    with caplog.at_level(logging.INFO, "holdfast.node"):
        async with app.node(store), asyncio.timeout(60):  # the lease of the dead process lasts for ten minutes
            run = app.run("o-1")
            await run.signal("approval", "yes")
            assert await run.result() == "yes"
    assert "whose process has ended" in caplog.text


async def start_owner(store: str) -> subprocess.Popen[str]:
    worker = subprocess.Popen([sys.executable, "-c", OWNER, store], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert await asyncio.to_thread(worker.stdout.readline) == "up\n"
    return worker


@pytest.mark.process
@pytest.mark.contract("OWN-3")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_node_that_runs_takes_over_at_once_from_a_process_that_is_killed(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The lease of the dead process lasts for ten minutes, and the next look for new nodes is in ten minutes too."""
    store = f"sqlite:///{tmp_path}/orders.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    app = hf.App("shop")

    @app.activity
    async def pick() -> str:
        return "picked"

    @app.workflow
    async def order() -> str:
        return await pick()

    owner = await start_owner(store)
    try:
        async with app.node(store, options=hf.NodeOptions(safety_poll_s=600)), asyncio.timeout(60):
            run = app.run("o-1")
            assert (await run.snapshot()).status == "RUNNING"
            owner.send_signal(signal.SIGKILL)
            assert await run.result() == "picked"
    finally:
        owner.kill()
        owner.communicate()


@pytest.mark.process
async def test_processes_are_watched_while_their_nodes_have_a_lease_and_nothing_is_left_open() -> None:
    store = MemoryStore()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    identity = process_identity()
    machine = identity.rsplit(" ", 2)[0]
    process = f"{machine} {child.pid} {dead_processes._started(child.pid)}"
    await store.renew("other#1", 600_000, Abilities(process=process).encode())
    await store.renew("same#1", 600_000, Abilities(process=identity).encode())
    descriptors = len(os.listdir("/proc/self/fd"))
    taken: asyncio.Queue[list[str]] = asyncio.Queue()
    watching = asyncio.create_task(DeadProcesses(store, "new#1").watch(600, taken.put_nowait))
    try:
        async with asyncio.timeout(60):
            while len(os.listdir("/proc/self/fd")) == descriptors:  # noqa: ASYNC110
                await asyncio.sleep(0)
            child.kill()
            assert await taken.get() == ["other"]
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        child.kill()
        child.wait()
    assert len(os.listdir("/proc/self/fd")) == descriptors
