"""The shape of production: a process that starts runs, such as a web server, apart from the nodes that execute them.

One and two nodes, on SQLite and on PostgreSQL (`bench/postgres.py` says which server), beside one process alone: runs
of three steps, and signals to parked runs, all at once and one at a time, until their results are there.
CPU is what all these processes use per run or signal; that of a server is not in it.
"""

import asyncio
import gc
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import asyncpg

import holdfast as hf
from bench.effort import Effort
from bench.engine import STARTS_AT_ONCE, app, steps
from bench.postgres import SCHEMA, WARM_RUNS, server, signalled
from bench.report import Row, Rows, percentile, progress
from bench.stores import as_the_command
from holdfast.store.port import WaitQuery

FLEETS = (0, 1, 2)
"""How many nodes there are beside the starter; with none, the starter executes the runs itself."""


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure each fleet on each store."""
    rows: Rows = {}
    for nodes in FLEETS:
        path = folder / "fleet.db"
        rows[f"SQLite, {_named(nodes)}"] = await _measure(f"sqlite:///{path}", nodes, effort)
        path.unlink()
    with server() as dsn:
        address = f"{dsn}{'&' if '?' in dsn else '?'}schema={SCHEMA}"
        for nodes in FLEETS:
            await _drop(dsn)
            rows[f"PostgreSQL, {_named(nodes)}"] = await _measure(address, nodes, effort)
        await _drop(dsn)
    return rows


def _named(nodes: int) -> str:
    return "starter is the node" if not nodes else f"starter and {nodes} node{'s' if nodes > 1 else ''}"


async def _drop(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    await connection.close()


async def _measure(address: str, nodes: int, effort: Effort) -> Row:
    progress(f"fleet: {address.partition(':')[0]}, {_named(nodes)}")
    count, rates, cpu_us, fetched_s = effort.fleet_runs, list[float](), list[float](), list[float]()
    async with (
        app.node(address, options=as_the_command(takes_runs=not nodes)),
        node_processes(address, nodes) as others,
    ):
        await _finished(WARM_RUNS)
        for _ in range(effort.engine_rounds):
            gc.collect()
            before_s, began = cpu_s(others), time.perf_counter()
            run_ids = await _finished(count)
            rates.append(count / (time.perf_counter() - began))
            cpu_us.append((cpu_s(others) - before_s) / count * 1e6)
            began = time.perf_counter()
            await asyncio.gather(*(app.run(run_id).result() for run_id in run_ids))
            fetched_s.append(time.perf_counter() - began)
        rate, cpu_us_a_signal = await _signal_all(effort.signalled_runs, others)
        delays_ms = await _signal_each(effort.engine_sequential)
    return {
        "runs/s": statistics.median(rates),
        "CPU µs/run": statistics.median(cpu_us),
        "results fetched/s": count / statistics.median(fetched_s),
        "signals/s": rate,
        "CPU µs/signal": cpu_us_a_signal,
        "signal to result, median ms": statistics.median(delays_ms),
        "p99 ms": percentile(delays_ms, 99),
    }


async def _finished(count: int) -> list[str]:
    """Take so many runs to their end; return their ids."""
    run_ids: list[str] = []

    async def one() -> None:
        run = await app.start(steps, 3)
        assert await run.result() == 3
        run_ids.append(run.run_id)

    for first in range(0, count, STARTS_AT_ONCE):
        await asyncio.gather(*(one() for _ in range(min(STARTS_AT_ONCE, count - first))))
    return run_ids


async def _park(count: int) -> "list[hf.RunHandle[bool]]":
    """Start runs, and return once all of them wait for a signal."""
    parked: list[hf.RunHandle[bool]] = []
    for first in range(0, count, STARTS_AT_ONCE):
        starts = (app.start(signalled) for _ in range(min(STARTS_AT_ONCE, count - first)))
        parked += await asyncio.gather(*starts)
    find = app.runtime().store.find
    for run in parked:
        while not await find(WaitQuery(run_id=run.run_id)):  # noqa: ASYNC110 - another process opens it
            await asyncio.sleep(0.01)
    return parked


async def _signal_all(count: int, others: list[Connection]) -> tuple[float, float]:
    """Signal parked runs at once and wait for their results; return the rate, and the CPU for each."""
    parked = await _park(count)
    before_s, began = cpu_s(others), time.perf_counter()
    await asyncio.gather(*(_signal(run) for run in parked))
    return count / (time.perf_counter() - began), (cpu_s(others) - before_s) / count * 1e6


async def _signal_each(count: int) -> list[float]:
    """Signal parked runs one at a time; return the milliseconds until each result is there."""
    delays_ms: list[float] = []
    for run in await _park(count):
        began = time.perf_counter()
        await _signal(run)
        delays_ms.append((time.perf_counter() - began) * 1e3)
    return delays_ms


async def _signal(run: "hf.RunHandle[bool]") -> None:
    await run.signal("go", True)
    assert await run.result()


# --- the nodes, which are processes


@asynccontextmanager
async def node_processes(address: str, count: int) -> AsyncIterator[list[Connection]]:
    """Start nodes; give a connection to each, over which it answers how much CPU it has used."""
    spawning = multiprocessing.get_context("spawn")
    connections, processes = list[Connection](), []
    try:
        for _ in range(count):
            here, there = spawning.Pipe()
            process = spawning.Process(target=_node, args=(address, there), daemon=True)
            process.start()
            connections.append(here)
            processes.append(process)
        for connection in connections:
            await asyncio.to_thread(connection.recv)
        yield connections
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            await asyncio.to_thread(process.join)


def cpu_s(others: list[Connection]) -> float:
    used_s = time.process_time()
    for connection in others:
        connection.send(None)
        used_s += connection.recv()
    return used_s


def _node(address: str, connection: Connection) -> None:
    async def work() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def answer() -> None:
            try:
                connection.recv()
                connection.send(time.process_time())
            except (EOFError, OSError):
                loop.remove_reader(connection.fileno())
                ended.set()

        async with app.node(address, options=as_the_command()):
            loop.add_reader(connection.fileno(), answer)
            connection.send(None)
            await ended.wait()

    asyncio.run(work())
