"""The engine on a bucket: a real S3 server, and nodes that are killed."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.core.invariants import check
from holdfast.store.port import RunQuery
from holdfast.testing import system_view
from tests.engine.s3_orders import LEASE_MS, make_app
from tests.s3_server import Endpoint

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
ORDERS = 4


@pytest.fixture(params=["s3_server", "seaweed"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of an empty bucket, on moto's server and on a real one."""
    server: Endpoint = request.getfixturevalue(request.param)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.make_bucket()}/shop"


@pytest.mark.process
@pytest.mark.contract("STO-1", "SIG-4", "WF-4", "TMR-1")
async def test_a_workflow_runs_on_a_bucket(address: str, tmp_path: Path) -> None:
    app, order = make_app(tmp_path / "ledger")
    async with asyncio.timeout(PATIENCE_S), app.node(address, options=hf.NodeOptions(lease_ms=LEASE_MS)):
        run = await app.start(order, "one", run_id="one")
        receipts = [await run.signal("approved", 7, signal_id="click") for _ in range(2)]
        assert receipts[0] == receipts[1]
        assert await run.result() == ["charged one", 7, "shipped one"]
    store = await hf.open_store(hf.Settings(store=address))
    try:
        types = Counter(event.event_type for event in await store.read_events("one"))
        assert types["SignalReceived"] == types["RunCompleted"] == types["StepCompleted"] == 1
        check(await system_view(store))
    finally:
        await store.close()


async def start_node(address: str, ledger: Path) -> Process:
    """Start a node in a process of its own, and wait until it runs."""
    command = [sys.executable, "-m", "tests.engine.s3_orders", address, str(ledger)]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=PIPE, stderr=DEVNULL, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert (await process.stdout.readline()).decode().strip() == "running"
    return process


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.contract("OWN-1", "OWN-3", "INV")
async def test_nodes_that_are_killed_lose_nothing_and_double_nothing(address: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    app, order = make_app(ledger)
    nodes = [await start_node(address, ledger) for _ in range(2)]
    try:
        async with asyncio.timeout(PATIENCE_S), app.connect(address):
            runs = [await app.start(order, f"o{number}", run_id=f"o{number}") for number in range(ORDERS)]
            for place, run in enumerate(runs):
                await run.signal("approved", place, signal_id="click")
                if place == 1:  # in the middle of what the others do
                    nodes[0].kill()
                    await nodes[0].wait()
                    nodes = [nodes[1], await start_node(address, ledger)]
            results = [await run.result() for run in runs]
            assert results == [[f"charged o{n}", n, f"shipped o{n}"] for n in range(ORDERS)]
    finally:
        for node in nodes:
            if node.returncode is None:
                node.kill()
            await node.wait()
    store = await hf.open_store(hf.Settings(store=address))
    try:
        heads = await store.find(RunQuery(limit=100))
        assert len(heads) == 2 * ORDERS
        for head in heads:
            events = await store.read_events(head.run_id, limit=1_000)
            assert [event.run_seq for event in events] == list(range(1, head.version + 1))
            types = Counter(event.event_type for event in events)
            assert types["RunCompleted"] == types["StepCompleted"] == 1
        check(await system_view(store))
    finally:
        await store.close()
    effects = set(ledger.read_text().splitlines())
    assert effects == {f"{what} o{n}" for n in range(ORDERS) for what in ("charge", "ship")}
