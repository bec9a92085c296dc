"""A caller's transaction that is left open for long, or is partly rolled back: others go on, and the rest counts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest

import holdfast as hf
from holdfast.client import Client
from holdfast.errors import NotFound
from holdfast.store.postgres import PostgresStore
from holdfast.store.types import PurgePolicy
from tests.transactions.callers import by_asyncpg, by_sqlite3, drop_table, make_table, rows_of
from tests.transactions.test_transactions import MOST_S, NEVER_POLLS, make_app, result_of, workflow

IMPATIENT = hf.NodeOptions(safety_poll_s=0.2, lease_ms=1_000)


@pytest.mark.postgres
@pytest.mark.contract("OWN-3", "EVT-6")
async def test_others_go_on_while_a_transaction_that_has_started_a_run_is_open(postgres_url: str) -> None:
    """For longer than the lease; and whoever follows changes meanwhile is notified of the run when it is committed."""
    app = make_app()
    async with asyncio.timeout(MOST_S), app.node(postgres_url, options=IMPATIENT), by_asyncpg(postgres_url) as caller:
        late = await app.start(workflow(app, "order"), "late", connection=caller.connection)
        began = asyncio.get_running_loop().time()
        seen = set[str]()
        async with Client(app) as client:
            while asyncio.get_running_loop().time() - began < 2.5:
                assert await result_of(await app.start(workflow(app, "order"), "o")) == "shipped o"
                seen |= {run.run_id for run in (await client.runs.list(limit=500)).items}
            assert late.run_id not in seen
            await caller.commit()
            assert await result_of(late) == "shipped late"


@pytest.mark.postgres
@pytest.mark.contract("FMT-2")
async def test_retention_takes_nothing_of_a_transaction_that_is_open(postgres_url: str) -> None:
    app = make_app()
    async with asyncio.timeout(MOST_S), app.node(postgres_url, options=IMPATIENT), by_asyncpg(postgres_url) as caller:
        open_run = await app.start(workflow(app, "order"), "open", connection=caller.connection)
        done = await app.start(workflow(app, "order"), "done")
        await result_of(done)
        store = await PostgresStore.open(postgres_url)
        await store.purge(PurgePolicy(finished_run_ms=0))
        await store.close()
        await caller.commit()
        assert await result_of(open_run) == "shipped open"


@pytest.mark.postgres
@pytest.mark.contract("OWN-3")
async def test_the_servers_bound_ends_a_transaction_that_holds_up_a_run(postgres_url: str) -> None:
    app = make_app()
    async with asyncio.timeout(MOST_S), app.node(postgres_url, options=NEVER_POLLS):
        run = await app.start(workflow(app, "approved"), "o-1")
        async with by_asyncpg(postgres_url) as caller:
            await caller.connection.execute("SET LOCAL idle_in_transaction_session_timeout = '500ms'")
            await run.signal("approval", True, connection=caller.connection)
            await run.signal("approval", False)  # it waits for the caller, until the server has ended them
            await run.signal("approval", False)
            assert await result_of(run) == [False, False]


@asynccontextmanager
async def place(kind: str, request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[tuple[hf.App, str]]:
    """Open an app with a caller's table beside it."""
    url = f"sqlite:///{folder}/shop.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    app = make_app()
    async with app.node(url, options=NEVER_POLLS):
        await make_table(url)
        yield app, url
    await drop_table(url)


async def execute(connection: Any, sql: str) -> None:
    """Execute a statement by either driver."""
    done = connection.execute(sql)
    if asyncio.iscoroutine(done):
        await done


EITHER = pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])


@EITHER
@pytest.mark.contract("QUE-4")
async def test_a_savepoint_that_is_rolled_back_takes_its_run_with_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with place(kind, request, tmp_path) as (app, url):
        order = workflow(app, "order")
        async with (by_sqlite3 if kind == "sqlite" else by_asyncpg)(url) as caller:
            connection: Any = caller.connection
            await caller.insert("kept")
            kept = await app.start(order, "kept", request_id="kept", connection=connection)
            for ending, id in (("ROLLBACK TO", "gone"), ("RELEASE", "too")):
                await execute(connection, "SAVEPOINT mine")
                await caller.insert(id)
                run = await app.start(order, id, request_id=id, connection=connection)
                await execute(connection, f"{ending} SAVEPOINT mine")
            await caller.commit()
        assert await rows_of(url) == {"kept", "too"}
        assert [await result_of(each) for each in (kept, run)] == ["shipped kept", "shipped too"]
        again = await app.start(order, "another", request_id="gone")
        assert await result_of(again) == "shipped another", "the request that was rolled back never was"


@EITHER
@pytest.mark.contract("API-4", "QUE-1")
async def test_a_request_of_another_tenant_is_another_one(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with place(kind, request, tmp_path) as (app, url):
        order = workflow(app, "order")
        mine = await app.start(order, "mine", request_id="r", tenant="a")
        async with (by_sqlite3 if kind == "sqlite" else by_asyncpg)(url) as caller:
            theirs = await app.start(order, "theirs", request_id="r", tenant="b", connection=caller.connection)
            assert theirs.run_id != mine.run_id
            await caller.commit()
        assert await result_of(theirs) == "shipped theirs"


@pytest.mark.postgres
@pytest.mark.contract("QUE-4")
@pytest.mark.parametrize("how", ["cancelled", "killed by the server", "a statement fails later"])
async def test_an_error_in_the_middle_leaves_nothing(how: str, postgres_url: str) -> None:
    app = make_app()
    async with asyncio.timeout(MOST_S), app.node(postgres_url, options=NEVER_POLLS):
        await make_table(postgres_url)
        connection = await asyncpg.connect(postgres_url)
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError, asyncio.CancelledError)):
            await fail_in_the_middle(app, connection, how, postgres_url)
        await connection.close()
        assert await rows_of(postgres_url) == set()
        with pytest.raises(NotFound):
            await app.run("o-1").status()
        assert await result_of(await app.start(workflow(app, "order"), "o-2", run_id="o-1")) == "shipped o-2"
    await drop_table(postgres_url)


async def fail_in_the_middle(app: hf.App, connection: Any, how: str, url: str) -> None:
    """Insert a row, start a run, and fail."""
    async with connection.transaction():
        await connection.execute("INSERT INTO caller_orders VALUES ('o-1')")
        await app.start(workflow(app, "order"), "o-1", run_id="o-1", connection=connection)
        if how == "cancelled":
            raise asyncio.CancelledError
        if how == "killed by the server":
            with psycopg.connect(url, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", [connection.get_server_pid()])
            await connection.execute("SELECT 1")
        await connection.execute("SELECT nonsense")
