"""What people wrote may hold a NUL, which functions of PostgreSQL refuse in JSON: work and searches go on."""

import asyncio

import pytest

import holdfast as hf
from holdfast.store.port import TaskQuery
from holdfast.store.postgres import PostgresStore

pytestmark = pytest.mark.contract("ACT-1", "TSK-1")

ODD = "a\x00b"


async def test_outcome_of_a_job_whose_input_holds_one_is_recorded(postgres_url: str) -> None:
    app = hf.App("odd")

    @app.activity(queue="far")
    async def echo(text: str) -> str:
        return text

    @app.workflow
    async def order(text: str) -> str:
        return await echo(text)

    async with asyncio.timeout(60), app.node(postgres_url, options=hf.NodeOptions(queues=("far",))):
        assert await (await app.start(order, ODD)).result() == ODD


async def test_tasks_are_searched_also_where_a_payload_holds_one(postgres_url: str) -> None:
    app = hf.App("odd")

    @app.workflow
    async def order() -> None:
        await hf.task("approve", dict, payload={"text": ODD})

    store = await PostgresStore.open(postgres_url)
    async with asyncio.timeout(60), app.node(store):
        run = await app.start(order)
        while not await store.find(TaskQuery(run_id=run.run_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        found = await store.find(TaskQuery(text="approve"))
        assert [task.run_id for task in found] == [run.run_id]
        await run.cancel()
    await store.close()
