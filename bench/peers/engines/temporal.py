"""Temporal; the address is that of its development server, which keeps its data in a SQLite file.

Workflows are not sandboxed, which is faster, and activities are not local: the result of a local one is recorded only
with its workflow's next task, so it is not durable by itself.
"""

import asyncio
from datetime import timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from bench.peers import load
from bench.peers.load import STARTER, Engine

QUEUE = "peers"
LOST_AFTER = timedelta(seconds=load.LEASE_S)


@activity.defn
async def nothing(number: int) -> int:
    """Do nothing."""
    return number


@activity.defn
async def arrive() -> int:
    """Note that the run is about to wait."""
    load.note("arrived")
    return 0


@activity.defn
async def held_step(number: int, run_id: str) -> int:
    """Carry out a step of a run that is recovered."""
    return await load.held_step(number, run_id)


@workflow.defn(name="steps")
class Steps:
    """Takes steps one after the other."""

    @workflow.run
    async def run(self, count: int) -> int:
        """Run."""
        for number in range(count):
            await workflow.execute_activity(nothing, number, start_to_close_timeout=LOST_AFTER)
        return count


@workflow.defn(name="parked")
class Parked:
    """Takes a step, and waits."""

    def __init__(self) -> None:
        self._value: int | None = None

    @workflow.run
    async def run(self, _: int) -> int:
        """Run."""
        await workflow.execute_activity(arrive, start_to_close_timeout=LOST_AFTER)
        await workflow.wait_condition(lambda: self._value is not None)
        return self._value or 0

    @workflow.signal
    def go(self, value: int) -> None:
        """Take the value."""
        self._value = value


@workflow.defn(name="held")
class Held:
    """Takes three steps that are noted."""

    @workflow.run
    async def run(self, _: int) -> int:
        """Run."""
        run_id = workflow.info().workflow_id
        for number in (1, 2, 3):
            await workflow.execute_activity(held_step, args=[number, run_id], start_to_close_timeout=LOST_AFTER)
        return 3


class Temporal(Engine):
    """A client, and a worker unless this process only starts."""

    at_once = 50

    async def open(self, address: str, role: str) -> None:
        self._client = await Client.connect(address)
        self._worker = None if role == STARTER else self._new_worker()
        self._work = None if self._worker is None else asyncio.create_task(self._worker.run())

    def _new_worker(self) -> Worker:
        return Worker(
            self._client,
            task_queue=QUEUE,
            workflows=[Steps, Parked, Held],
            activities=[nothing, arrive, held_step],
            workflow_runner=UnsandboxedWorkflowRunner(),
            max_concurrent_activities=500,
            max_concurrent_workflow_tasks=200,
            max_concurrent_workflow_task_polls=10,
            max_concurrent_activity_task_polls=10,
        )

    async def close(self) -> None:
        if self._worker is not None and self._work is not None:
            await self._worker.shutdown()
            await self._work

    async def start(self, workflow: str, run_id: str, argument: int) -> Any:
        return await self._client.start_workflow(workflow, argument, id=run_id, task_queue=QUEUE)

    def handle(self, run_id: str) -> Any:
        return self._client.get_workflow_handle(run_id)

    async def result(self, handle: Any) -> int:
        value: int = await handle.result()
        return value

    async def signal(self, handle: Any, value: int) -> None:
        await handle.signal("go", value)


if __name__ == "__main__":
    load.main(Temporal())
