"""Lists of a PostgreSQL store have connections of their own: commits do not wait for them, and they end in time."""

import asyncio

import pytest

from holdfast.errors import RequestTimedOut
from holdfast.store.port import RunQuery
from holdfast.store.postgres.pool import Pool
from holdfast.store.postgres.store import PostgresStore
from holdfast.testing.samples import new_run

MOST_SECONDS = 60.0


@pytest.mark.contract("STO-1", "API-2")
@pytest.mark.parametrize("pooler", ["", "&pooler=transaction"])
async def test_commits_do_not_wait_for_lists(address: str, pooler: str) -> None:
    store = await PostgresStore.open(f"{address}&connections=2{pooler}")
    await store.migrate()
    store._lists = Pool(store._pool.address, 30_000, statement_s=1.0)
    async with asyncio.timeout(MOST_SECONDS):
        slow = [asyncio.create_task(store._lists.fetch("SELECT pg_sleep(60)")) for _ in range(4)]
        created = 0
        while not all(search.done() for search in slow):
            await store.create([new_run(f"run-{created}", request_id=f"r-{created}")])
            created += 1
        assert created > 10
        for search in slow:
            with pytest.raises(RequestTimedOut):
                search.result()
        assert await store.find(RunQuery(limit=1)), "the connections are free again"
    await store.close()


@pytest.mark.contract("STO-1")
async def test_a_list_ends_with_its_caller(address: str) -> None:
    store = await PostgresStore.open(f"{address}&connections=1")
    await store.migrate()
    async with asyncio.timeout(MOST_SECONDS):
        slow = asyncio.create_task(store._lists.fetch("SELECT pg_sleep(60)"))
        await asyncio.sleep(0)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        assert await store.find(RunQuery()) == []
    await store.close()
