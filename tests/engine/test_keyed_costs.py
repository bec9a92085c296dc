"""What an idempotency key costs: one row, and no transaction more."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import holdfast as hf
from holdfast.store.port import Store
from holdfast.store.proxy import StoreProxy
from tests.races.stores import open_anywhere

pytestmark = pytest.mark.contract("ACT-3")

OPTIONS = hf.NodeOptions(queues=("far",))


class Counted(StoreProxy):
    """Counts the verbs that write: each call of one is a transaction."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.writes: Counter[str] = Counter()

    async def create(self, *args: Any) -> Any:
        """Count, and create."""
        self.writes["create"] += 1
        return await self.inner.create(*args)

    async def commit(self, *args: Any) -> Any:
        """Count, and commit."""
        self.writes["commit"] += 1
        return await self.inner.commit(*args)

    async def deliver(self, *args: Any, **kwargs: Any) -> Any:
        """Count, and deliver."""
        self.writes["deliver"] += 1
        return await self.inner.deliver(*args, **kwargs)


class Shop:
    """An app with the same activity three times: without a key, with one, and with a verifier too."""

    def __init__(self, queue: str) -> None:
        self.app = hf.App("shop")

        async def find(order: str) -> hf.NotCompleted:
            return hf.NotCompleted()

        key: dict[str, Any] = {"idempotency_key": lambda order: order}
        options: dict[str, dict[str, Any]] = {"plain": {}, "keyed": key, "verified": {**key, "verify": find}}
        self.workflows = {name: self._workflow(name, queue, given) for name, given in options.items()}

    def _workflow(self, name: str, queue: str, options: dict[str, Any]) -> Any:
        @self.app.activity(name=f"charge_{name}", queue=queue, **options)
        async def charge(order: str) -> str:
            return f"receipt of {order}"

        @self.app.workflow(name=name)
        async def buy(order: str) -> str:
            return await charge(order)

        return buy


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Return where an empty store is."""
    return tmp_path / "shop.db" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


async def rows_in(place: Path | str) -> Counter[str]:
    """Return how many rows each table has."""
    if isinstance(place, Path):
        with closing(sqlite3.connect(place)) as db:
            tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return Counter({name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables})
    connection = await asyncpg.connect(place)
    try:
        found = await connection.fetch(
            "SELECT relname FROM pg_class WHERE relnamespace = 'holdfast'::regnamespace AND relkind IN ('r', 'p')"
            " AND NOT relispartition"
        )
        return Counter(
            {name: await connection.fetchval(f'SELECT count(*) FROM holdfast."{name}"') for (name,) in found}
        )
    finally:
        await connection.close()


@asynccontextmanager
async def opened(place: Path | str) -> AsyncIterator[Counted]:
    """Open a store, with its writes counted."""
    store = await open_anywhere(place)
    try:
        await store.migrate()
        yield Counted(store)
    finally:
        await store.close()


@pytest.mark.parametrize("queue", ["", "far"], ids=["local", "queued"])
async def test_a_keyed_step_costs_one_row_and_no_transaction_more(place: Path | str, queue: str) -> None:
    shop = Shop(queue)
    costs: dict[str, tuple[Counter[str], Counter[str]]] = {}
    async with asyncio.timeout(60), opened(place) as store, shop.app.node(store, options=OPTIONS):
        for name in ("plain", "plain", "keyed", "verified"):  # the first run also makes what is made once
            before = await rows_in(place)
            store.writes.clear()
            run = await shop.app.start(shop.workflows[name], f"order of {name}")
            assert await run.result() == f"receipt of order of {name}"
            costs[name] = Counter(store.writes), (await rows_in(place)) - before
    writes, rows = costs["plain"]
    assert rows["activity_records"] == 0
    assert writes["commit"] > 0
    for name in ("keyed", "verified"):
        assert costs[name] == (writes, rows + Counter(activity_records=1)), name
