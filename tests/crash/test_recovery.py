"""Processes that run workflows are killed; others, started after them or beside them, finish every run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import holdfast as hf
from examples import orders
from holdfast.core.invariants import check_drained
from holdfast.store.port import LoadedRun, WaitQuery
from holdfast.testing import system_view
from holdfast.workflow import Workflow
from tests.crash import in_flight
from tests.crash.file_check import check_file
from tests.machine_load import slowdown
from tests.races.stores import opened

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and leave nothing of it behind."""
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def wait_for_lines(ledger: Path, count: int, child: subprocess.Popen[str]) -> None:
    """Wait until the ledger has so many lines."""
    deadline = time.monotonic() + PATIENCE_S
    while not ledger.exists() or len(ledger.read_text().splitlines()) < count:
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.005)
        assert child.returncode is None, "the worker ended before it could be killed"
        assert time.monotonic() < deadline


@pytest.mark.slow
@pytest.mark.contract("OWN-3", "ACT-1", "SIG-5", "QUE-1", "INV")
@pytest.mark.parametrize("kills", [[1], [60], [150], [198], [1, 30, 60, 100, 140, 180]], ids=str)
async def test_orders_survive_the_kill_of_their_worker(kills: list[int], tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    acknowledged: set[str] = set()
    worker = (str(ROOT / "examples" / "orders.py"), str(tmp_path))
    for lines in kills:
        with process(*worker) as child:
            wait_for_lines(ledger, lines, child)
            child.kill()
            assert child.stdout is not None
            acknowledged |= set(child.stdout.read().split())
    with process(*worker) as child:
        told, _ = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 0
    assert set(told.split()) == {f"order-{number:03}" for number in range(orders.ORDERS)} >= acknowledged

    async with opened(tmp_path / "orders.db") as store:
        view = await system_view(store)
        histories = {run.run_id: [event.event_type for event in run.events] for run in view.runs}
        assert check_drained(view) == []
    assert all(Counter(types)["StepCompleted"] == 2 for types in histories.values())
    assert all(Counter(types)["SignalReceived"] == 1 for types in histories.values())
    assert all(types[-1] == "RunCompleted" for types in histories.values())
    assert len(set(ledger.read_text().splitlines())) == 2 * orders.ORDERS, "an effect is missing"
    assert await check_file(tmp_path / "orders.db") == orders.ORDERS


@pytest.mark.slow
@pytest.mark.contract("OWN-3", "INV")
async def test_runs_in_flight_are_finished_within_a_lease_and_two_seconds(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with process("-m", "tests.crash.in_flight", str(path), "hold") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "in flight\n"
        child.kill()
    with process("-m", "tests.crash.in_flight", str(path), "finish") as child:
        told, _ = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 0
    print(f"finished {float(told):.2f} s after the restart; the lease is {in_flight.LEASE_MS / 1_000} s")
    assert float(told) < in_flight.LEASE_MS / 1_000 + 2 * slowdown()

    async with opened(path) as store:
        assert (await store.stats()).runs == {"COMPLETED": in_flight.RUNS}
    assert await check_file(path) == in_flight.RUNS


def app_that_waits(name: str) -> tuple[hf.App, Workflow[[], list[str]]]:
    """Return an app whose workflow works, waits for a signal, and works again."""
    app = hf.App(name)

    @app.activity
    async def work() -> str:
        return name

    @app.workflow
    async def waiter() -> list[str]:
        first = await work()
        await hf.wait_signal("go", bool)
        return [first, await work()]

    return app, waiter


@pytest.mark.contract("OWN-3", "WF-7")
async def test_result_is_told_wherever_the_run_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, waiter = app_that_waits("here")
    there, _ = app_that_waits("there")

    async def claim_nothing(*_: object) -> list[LoadedRun]:
        return []

    address = f"sqlite:///{tmp_path}/store.db"
    async with here.node(address) as node, there.node(address), asyncio.timeout(PATIENCE_S):
        monkeypatch.setattr(node.store, "claim", claim_nothing)
        run = await here.start(waiter)
        result = asyncio.create_task(run.result())
        listener = node.store.wakeups.listen()
        while not await node.store.find(WaitQuery(run_id=run.run_id)):
            await listener.wait(0.1)
        listener.close()
        await run.signal("go", True)
        assert await result == ["here", "there"]
