"""Absurd; the address is that of a PostgreSQL database. Its schema is the one that `absurdctl` carries.

Its events belong to a queue, so a signal to a run is an event with the run's id in its name. Workers poll, and results
are polled for by the client; the interval of the workers is shortened (`POLL_S`).
"""

import asyncio
import os
from typing import Any

from absurd_sdk import AsyncAbsurd
from absurdctl import BUNDLED_SCHEMA_SQL
from psycopg import AsyncConnection

from bench.peers import load
from bench.peers.load import STARTER, WORKER, Engine

POLL_S = 0.02
QUEUE = "peers"
WORKERS, CONCURRENCY = 4, 25
"""Worker loops of a process, each with a connection of its own, and tasks that each executes at once."""

HOLDING = 100, 1
"""The same while runs are held: a loop takes no more tasks before those that it has taken end."""

CLIENTS = 4


def registered(client: AsyncAbsurd) -> AsyncAbsurd:
    """Register the workflows with a client."""

    @client.register_task("steps")
    async def steps(params: Any, ctx: Any) -> int:
        for number in range(params["argument"]):
            await ctx.step(f"nothing-{number}", lambda number=number: _nothing(number))
        return int(params["argument"])

    @client.register_task("parked")
    async def parked(params: Any, ctx: Any) -> int:
        await ctx.step("arrive", _arrive)
        value = await ctx.await_event(f"go-{params['run_id']}")
        return int(value)

    @client.register_task("held")
    async def held(params: Any, ctx: Any) -> int:
        for number in (1, 2, 3):
            await ctx.step(f"held-{number}", lambda number=number: load.held_step(number, params["run_id"]))
        return 3

    return client


async def _nothing(number: int) -> int:
    return number


async def _arrive() -> int:
    load.note("arrived")
    return 0


class AbsurdEngine(Engine):
    """Clients, and worker loops unless this process only starts."""

    at_once = 100

    async def open(self, address: str, role: str) -> None:
        self._turn = 0
        self._connections: list[Any] = []
        await self._migrate(await self._client(address), self._connections[0])
        self._clients = [] if role == WORKER else [await self._client(address) for _ in range(CLIENTS)]
        loops, concurrency = HOLDING if "PEERS_HOLD" in os.environ else (WORKERS, CONCURRENCY)
        workers = [] if role == STARTER else [await self._client(address) for _ in range(loops)]
        self._loops = [
            asyncio.create_task(
                worker.start_worker(
                    worker_id=f"{os.getpid()}-{number}",
                    claim_timeout=load.LEASE_S,
                    concurrency=concurrency,
                    poll_interval=POLL_S,
                )
            )
            for number, worker in enumerate(workers)
        ]

    async def _migrate(self, client: AsyncAbsurd, connection: Any) -> None:
        found = await (await connection.execute("SELECT to_regnamespace('absurd')")).fetchone()
        if found == (None,):
            await connection.execute(BUNDLED_SCHEMA_SQL)
            await client.create_queue(QUEUE)

    async def _client(self, address: str) -> AsyncAbsurd:
        connection = await AsyncConnection.connect(address, autocommit=True)
        self._connections.append(connection)
        return registered(AsyncAbsurd(connection, queue_name=QUEUE))

    def _next(self) -> AsyncAbsurd:
        self._turn += 1
        return self._clients[self._turn % len(self._clients)]

    async def close(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for connection in self._connections:
            await connection.close()

    async def start(self, workflow: str, run_id: str, argument: int) -> Any:
        params = {"run_id": run_id, "argument": argument}
        spawned = await self._next().spawn(workflow, params, idempotency_key=run_id)
        return run_id, str(spawned["task_id"])

    def handle(self, run_id: str) -> Any:
        return run_id, None

    async def result(self, handle: Any) -> int:
        run_id, task_id = handle
        if task_id is None:  # the same request again gives the task that is there
            _, task_id = await self.start("held", run_id, 0)
        snapshot = await self._next().await_task_result(task_id)
        assert snapshot.state == "completed", snapshot
        return int(snapshot.result)

    async def signal(self, handle: Any, value: int) -> None:
        await self._next().emit_event(f"go-{handle[0]}", value)


if __name__ == "__main__":
    load.main(AbsurdEngine())
