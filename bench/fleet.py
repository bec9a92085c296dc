"""The shape of production: a process that starts runs, such as a web server, apart from the nodes that execute them.

One and two nodes, on SQLite and on PostgreSQL (`bench/postgres.py` says which server), beside one process alone.
CPU is what all these processes use per run; that of a server is not in it.
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

from bench.effort import Effort
from bench.engine import STARTS_AT_ONCE, app, steps
from bench.postgres import SCHEMA, WARM_RUNS, server
from bench.report import Row, Rows, progress
from bench.stores import as_the_command

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
            before_s, began = _cpu_s(others), time.perf_counter()
            run_ids = await _finished(count)
            rates.append(count / (time.perf_counter() - began))
            cpu_us.append((_cpu_s(others) - before_s) / count * 1e6)
            began = time.perf_counter()
            await asyncio.gather(*(app.run(run_id).result() for run_id in run_ids))
            fetched_s.append(time.perf_counter() - began)
    return {
        "runs/s": statistics.median(rates),
        "CPU µs/run": statistics.median(cpu_us),
        "results fetched/s": count / statistics.median(fetched_s),
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


def _cpu_s(others: list[Connection]) -> float:
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
