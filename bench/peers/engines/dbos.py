"""DBOS; the address is that of its system database, a SQLite file or a PostgreSQL database.

Alone, workflows run where they are started, which is how DBOS is fastest. Apart, a client enqueues them and executors
poll a queue. Async workflows and steps; what is waited for by polling is polled for often (`NOTICE_S`, `POLL_S`).
A SQLite file is put into WAL mode first, which DBOS does not do and which is faster; commits are still synchronised.
"""

import asyncio
import os
import sqlite3
from typing import Any

from dbos import DBOS, DBOSClient, DBOSConfig, SetWorkflowID

from bench.peers import load
from bench.peers.load import ALONE, STARTER, Engine

NOTICE_S, POLL_S = 0.01, 0.05
POOL = 20
QUEUE = "peers"
NAME = "peers"
VERSION = "1"


@DBOS.step()
async def nothing(number: int) -> int:
    """Do nothing."""
    return number


@DBOS.step()
async def arrive() -> int:
    """Note that the run is about to wait."""
    load.note("arrived")
    return 0


@DBOS.step()
async def held_step(number: int, run_id: str) -> int:
    """Carry out a step of a run that is recovered."""
    return await load.held_step(number, run_id)


@DBOS.workflow(name="steps")
async def steps(count: int) -> int:
    """Take steps one after the other."""
    for number in range(count):
        await nothing(number)
    return count


@DBOS.workflow(name="parked")
async def parked(_: int) -> int:
    """Take a step, and wait."""
    await arrive()
    value: int = await DBOS.recv_async("go", timeout_seconds=3_600)
    return value


@DBOS.workflow(name="held")
async def held(_: int) -> int:
    """Take three steps that are noted."""
    run_id = DBOS.workflow_id or ""
    for number in (1, 2, 3):
        await held_step(number, run_id)
    return 3


WORKFLOWS: dict[str, Any] = {"steps": steps, "parked": parked, "held": held}


class Dbos(Engine):
    """DBOS in this process, or a client of the executors in others."""

    at_once = 100

    async def open(self, address: str, role: str) -> None:
        self._role = role
        if address.startswith("sqlite:///"):
            self.at_once = 20
            with sqlite3.connect(address.removeprefix("sqlite:///")) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
        if role == STARTER:
            self._client = DBOSClient(system_database_url=address, system_database_pool_size=POOL)
            return
        config: DBOSConfig = {
            "name": NAME,
            "system_database_url": address,
            "sys_db_pool_size": POOL,
            "application_version": VERSION,
            "executor_id": os.environ.get("PEERS_NAME", "local"),
            "notification_listener_polling_interval_sec": NOTICE_S,
            "log_level": "WARNING",
            "run_admin_server": False,
        }
        DBOS(config=config)
        await asyncio.to_thread(DBOS.launch)
        if role != ALONE:
            await DBOS.register_queue_async(QUEUE, polling_interval_sec=POLL_S)

    async def close(self) -> None:
        if self._role == STARTER:
            self._client.destroy()
        else:
            await asyncio.to_thread(DBOS.destroy)

    async def start(self, workflow: str, run_id: str, argument: int) -> Any:
        if self._role == STARTER:
            options: Any = {
                "queue_name": QUEUE,
                "workflow_name": workflow,
                "workflow_id": run_id,
                "app_version": VERSION,
            }
            return await self._client.enqueue_async(options, argument)
        with SetWorkflowID(run_id):
            return await DBOS.start_workflow_async(WORKFLOWS[workflow], argument)

    def handle(self, run_id: str) -> Any:
        return run_id

    async def result(self, handle: Any) -> int:
        if isinstance(handle, str):
            retrieve = self._client.retrieve_workflow_async if self._role == STARTER else DBOS.retrieve_workflow_async
            handle = await retrieve(handle)
        if self._role == STARTER or "Polling" in type(handle).__name__:
            polled: int = await handle.get_result(polling_interval_sec=POLL_S)
            return polled
        value: int = await handle.get_result()
        return value

    async def signal(self, handle: Any, value: int) -> None:
        send = self._client.send_async if self._role == STARTER else DBOS.send_async
        await send(handle.get_workflow_id(), value, "go")


if __name__ == "__main__":
    load.main(Dbos())
