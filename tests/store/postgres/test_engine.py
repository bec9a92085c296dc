"""The engine on PostgreSQL: orders are carried out, signals and timers arrive, and a node that dies is taken over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import Settings, open_store
from holdfast.core.events import SignalWaiting
from holdfast.core.invariants import check_drained
from holdfast.core.messages import Actor
from holdfast.run import RunHandle
from holdfast.store.port import Store
from holdfast.store.postgres.pool import Pool
from holdfast.store.postgres.store import PostgresStore
from holdfast.testing import system_view
from tests.engine.harness import wait_for_event
from tests.store.postgres import worker
from tests.store.postgres.proxy import Proxy
from tests.store.postgres.tampering import behind

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0


@pytest.fixture
async def store(address: str) -> AsyncIterator[Store]:
    store = await open_store(Settings(store=address))
    yield store
    await store.close()


@contextmanager
def begun(address: str, mode: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process with a node, which is gone at the end."""
    command = [sys.executable, "-m", "tests.store.postgres.worker", address, mode]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


async def line_of(child: subprocess.Popen[str]) -> str:
    """Return the next line that it says."""
    assert child.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        line = await asyncio.to_thread(child.stdout.readline)
    assert line, "it has ended"
    return line.rstrip()


def shop() -> hf.App:
    """An app with all that runs can do to each other."""
    app = hf.App("shop")

    @app.activity
    async def charge(order_id: str, cents: int) -> str:
        return f"{order_id}: {cents}"

    @app.workflow
    async def parcel(number: int) -> int:
        await hf.sleep(0.01)
        return number

    @app.workflow
    async def order(order_id: str, cents: int) -> list[object]:
        approved = await hf.wait_signal("approval", bool, timeout=60)
        receipt, first, second = await asyncio.gather(charge(order_id, cents), parcel(1), parcel(2))
        return [approved, receipt, first, second]

    app.order = order  # type: ignore[attr-defined]
    return app


@pytest.mark.contract("STO-1", "SIG-4", "TMR-1", "INV")
async def test_orders_with_signals_timers_and_children_are_carried_out(store: Store) -> None:
    app = shop()
    order = app.order  # type: ignore[attr-defined]
    async with asyncio.timeout(PATIENCE_S), app.node(store):
        runs = [await app.start(order, f"o-{number}", number) for number in range(20)]
        for run in runs:
            await run.signal("approval", True, signal_id="click")
        results = await asyncio.gather(*(run.result() for run in runs))
    assert results == [[True, f"o-{number}: {number}", 1, 2] for number in range(20)]
    assert check_drained(await system_view(store)) == []


@pytest.mark.contract("QUE-2", "QUE-3", "INV")
async def test_runs_of_a_limited_workflow_get_their_turn_on_two_nodes(address: str, store: Store) -> None:
    """No node polls: the one that ends a run admits the next. Children pass the same limit."""
    app = hf.App("crowd")
    inside: set[int] = set()
    most = 0

    @app.workflow(at_once=3)
    async def visit(number: int) -> int:
        nonlocal most
        inside.add(number)
        most = max(most, len(inside))
        await hf.sleep(0.01)
        inside.discard(number)
        return number

    @app.workflow
    async def party(first: int) -> list[int]:
        return list(await asyncio.gather(visit(first), visit(first + 1)))

    other, options = await open_store(Settings(store=address)), hf.NodeOptions(safety_poll_s=1_000)
    async with asyncio.timeout(PATIENCE_S), app.node(store, options=options), app.node(other, options=options):
        runs = [await app.start(visit, number) for number in range(20)]
        parties = [await app.start(party, number) for number in range(20, 30, 2)]
        assert await asyncio.gather(*(run.result() for run in runs)) == list(range(20))
        assert await asyncio.gather(*(each.result() for each in parties)) == [[n, n + 1] for n in range(20, 30, 2)]
    assert 1 <= most <= 3
    assert check_drained(await system_view(store)) == []
    await other.close()


@pytest.mark.contract("OWN-3", "MSG-4")
async def test_a_signal_that_is_sent_on_one_node_is_taken_at_once_by_the_node_that_runs_the_workflow(
    address: str, store: Store
) -> None:
    async with asyncio.timeout(PATIENCE_S), worker.app.node(store, options=hf.NodeOptions(safety_poll_s=1_000)):
        run = await worker.app.start(worker.order, "o-1")
        other = await open_store(Settings(store=address))
        elsewhere = hf.App("elsewhere")
        async with elsewhere.node(other, options=hf.NodeOptions(takes_runs=False)):
            await elsewhere.run(run.run_id).signal("approval", False)
        assert await run.result() == "rejected"
        await other.close()


@pytest.mark.slow
@pytest.mark.contract("OWN-3", "ACT-1", "INV")
async def test_a_node_that_was_killed_in_the_middle_of_an_activity_is_taken_over(address: str, store: Store) -> None:
    with begun(address, "stall") as child:
        assert await line_of(child) == "charging"
        child.kill()
    async with asyncio.timeout(PATIENCE_S), worker.app.node(store, options=worker.OPTIONS):
        run = await worker.app.start(worker.order, "o-1", run_id="o-1", request_id="o-1")
        assert await run.result() == "receipt of o-1"
        types = [event.event_type for event in await run.events()]
    assert types.count("SignalReceived") == types.count("StepCompleted") == 1
    assert check_drained(await system_view(store)) == []


@pytest.mark.slow
@pytest.mark.contract("OWN-1", "OWN-3", "INV")
async def test_a_node_that_was_frozen_for_longer_than_its_lease_is_taken_over_and_fenced(
    address: str, store: Store
) -> None:
    """It goes on with what it did, and its turn is refused."""
    with begun(address, "dawdle") as child:
        assert await line_of(child) == "charging"
        child.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S), worker.app.node(store, options=worker.OPTIONS):
            run = await worker.app.start(worker.order, "o-1", run_id="o-1", request_id="o-1")
            assert await run.result() == "receipt of o-1"
            events = await run.events()
            child.send_signal(signal.SIGCONT)
            while "a turn was not committed" not in await line_of(child):
                continue
        child.kill()
    assert await store.read_events("o-1") == list(events)
    owners = [event.engine_run_ref.epoch for event in events]
    assert owners == sorted(owners)
    assert [event.event_type for event in events].count("StepCompleted") == 1
    assert check_drained(await system_view(store)) == []


@pytest.mark.slow
@pytest.mark.contract("OWN-3", "INV")
async def test_a_node_goes_on_when_its_server_was_away(address: str, store: Store) -> None:
    app = shop()
    order = app.order  # type: ignore[attr-defined]
    async with Proxy(address) as proxy:
        far = await open_store(Settings(store=proxy.address))
        async with asyncio.timeout(PATIENCE_S), app.node(far):
            runs = [await app.start(order, f"o-{number}", number) for number in range(10)]
            for number, run in enumerate(runs):
                if number % 3 == 0:
                    await proxy.cut()
                    asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(proxy.listen()))
                await run.signal("approval", True, signal_id="click")
            results = await asyncio.gather(*(run.result() for run in runs))
        await far.close()
    assert results == [[True, f"o-{number}: {number}", 1, 2] for number in range(10)]
    assert check_drained(await system_view(store)) == []


@pytest.mark.contract("SIG-8", "SIG-2")
async def test_signals_around_the_deadline_of_their_waits_go_by_the_time_of_the_server(address: str) -> None:
    app = hf.App("shop")

    @app.workflow
    async def waits() -> str:
        return await hf.wait_signal("go", str, timeout=0.8, on_timeout=lambda: "nobody")  # type: ignore[no-any-return]

    class Behind(PostgresStore):
        """A store that read the time a while ago."""

        async def now(self) -> int:
            return await super().now() - 30_000

    store = await Behind.open(address)
    try:
        await store.migrate()
        async with asyncio.timeout(PATIENCE_S), app.node(store):
            runs = [await app.start(waits) for _ in range(40)]
            until: dict[str, int] = {}
            sent: dict[str, int] = {}
            for run in runs:
                while run.run_id not in until:
                    opened = [event.data for event in await run.events() if isinstance(event.data, SignalWaiting)]
                    if opened:
                        until[run.run_id] = opened[0].until or 0

            async def send(number: int, run: RunHandle[str]) -> None:
                moment = until[run.run_id] + (number - 20) * 1_000  # from 20 ms before to 20 ms after
                await asyncio.sleep((moment - await PostgresStore.now(store)) / 1_000_000)
                with contextlib.suppress(hf.errors.RunTerminal):
                    sent[run.run_id] = (await run.signal("go", "somebody")).accepted_at

            await asyncio.gather(*(send(number, run) for number, run in enumerate(runs)))
            for run in runs:
                is_in_time = sent.get(run.run_id, until[run.run_id] + 1) <= until[run.run_id]
                assert await run.result() == ("somebody" if is_in_time else "nobody")
    finally:
        await store.close()


@pytest.mark.contract("SIG-5", "SIG-13", "TSK-2")
async def test_what_was_committed_and_not_answered_is_decided_once_though_its_caller_gave_no_id(address: str) -> None:
    """A command, an update, a task operation, a signal with a start: the connection is cut before the answer."""

    def make() -> tuple[hf.App, Any]:
        app = hf.App("asking")

        @app.workflow
        async def asks() -> bool:
            words: list[str] = []

            def say(word: str) -> int:
                words.append(word)
                return len(words)

            hf.on_update("say", say)
            return await hf.task("approve", bool)

        return app, asks

    app, _ = make()
    far, far_asks = make()
    async with Proxy(address) as proxy, asyncio.timeout(PATIENCE_S), app.node(address), far.connect(proxy.address):
        proxy.loses_answer_to = b"zebra-1"
        run = await far.start(far_asks, with_signal={"name": "other", "payload": "zebra-1"})
        assert [mail.payload for mail in await run.mailbox()] == ["zebra-1"]
        await wait_for_event(run, "TaskCreated")
        [task] = await far.tasks.list()
        proxy.loses_answer_to = b"zebra-2"
        assert await run.update("say", word="zebra-2") == 1
        proxy.loses_answer_to = b"zebra-3"
        await far.tasks.comment(task.task_id, "zebra-3", actor=Actor("ann"))
        proxy.loses_answer_to = b"zebra-4"
        await run.pause(reason="zebra-4", wait=True)
        await run.resume(wait=True)
        proxy.loses_answer_to = b"zebra-5"
        await run.cancel(reason="zebra-5", wait=True)
        assert proxy.lost == 5
        kinds = [event.event_type for event in await run.events()]
        assert [kinds.count(kind) for kind in ("TaskCommented", "SignalAccepted", "UpdateCompleted")] == [1, 3, 1]


@pytest.mark.contract("TMR-1", "SIG-2")
async def test_an_answer_that_was_read_late_does_not_set_the_time_back(address: str) -> None:
    """A loop that is busy reads answers late. A duration that begins then would be over early."""
    store = await PostgresStore.open(address)
    try:
        await store.migrate()
        await store.renew("node-a", 60_000)
        loop = asyncio.get_running_loop()
        for _ in range(5):  # so that one of them is quick, on a machine that is busy too
            await store.renew("node-a", 60_000)
        renewing = asyncio.create_task(store.renew("node-a", 60_000))
        await asyncio.wait({renewing}, timeout=0)
        until = loop.time() + 0.3
        while loop.time() < until:
            pass  # the answer is there, and nothing reads it
        await renewing
        extrapolated = await store.now()
        async with behind(address) as connection:
            [[now]] = await connection.fetch("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
        assert now - extrapolated < 250_000
        assert extrapolated <= now
    finally:
        await store.close()


@pytest.mark.contract("SIG-2")
async def test_callers_that_ask_for_the_time_together_share_one_query(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that only starts runs hears the time rarely: each of its starts would be a round trip more."""
    asked: list[str] = []
    fetch = Pool.fetch

    async def counted(pool: Pool, statement: str, *values: Any) -> Any:
        asked.append(statement)
        return await fetch(pool, statement, *values)

    store = await PostgresStore.open(address)
    try:
        await store.migrate()
        monkeypatch.setattr(Pool, "fetch", counted)
        given_up = asyncio.create_task(store.now())
        await asyncio.wait({given_up}, timeout=0)
        others = [asyncio.create_task(store.now()) for _ in range(50)]
        given_up.cancel()
        times = await asyncio.gather(*others)
        assert times == sorted(times)
        assert len(asked) == 1
    finally:
        await store.close()
