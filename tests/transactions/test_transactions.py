"""Starting and signalling in a caller's own transaction: committed or rolled back with their rows, else alike."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest

import holdfast as hf
from holdfast.client import SyncClient
from holdfast.core.bus import Sink
from holdfast.errors import Conflict, HoldfastError, InvalidInput, NotFound, Overloaded, PayloadTooLarge, RunCancelled
from holdfast.store.postgres import PostgresStore
from holdfast.store.queries import OutboxQuery
from holdfast.store.types import PurgePolicy
from tests.transactions.callers import (
    POSTGRES,
    SQLITE,
    Caller,
    by_asyncpg,
    by_sqlite3,
    drop_table,
    make_table,
    rows_of,
)

NEVER_POLLS = hf.NodeOptions(safety_poll_s=3_600.0)
"""So that only a wake-up lets a node find a run."""

MOST_S = 60.0


def make_app() -> hf.App:
    """Return an app whose runs echo, wait, and are limited."""
    app = hf.App("shop", attributes={"cents": int})

    @app.workflow
    async def order(order_id: str) -> str:
        return f"shipped {order_id}"

    @app.workflow(signals={"approval": bool})
    async def approved(order_id: str) -> list[bool]:
        return [await hf.wait_signal("approval", bool), await hf.wait_signal("approval", bool)]

    @app.workflow(at_once=1, overload="reject")
    async def single(order_id: str) -> bool:
        return await hf.wait_signal("end", bool)

    @app.workflow(at_once=1)
    async def queued(order_id: str) -> str:
        return order_id

    return app


def workflow(app: hf.App, name: str) -> hf.Workflow[..., Any]:
    """Return a registered workflow."""
    return hf.Workflow(app.registry.workflow(name))


class Place:
    """A store with a caller's table in it, and a way to get a transaction there."""

    def __init__(self, app: hf.App, url: str, how: Any) -> None:
        self.app = app
        self.url = url
        self._how = how

    @asynccontextmanager
    async def caller(self) -> AsyncIterator[Caller]:
        """Give a caller whose transaction is begun, or begins with the first statement."""
        async with asyncio.timeout(MOST_S), self._how(self.url) as caller:
            yield caller


WAYS = {**POSTGRES, **SQLITE}


@pytest.fixture(params=[pytest.param(way, marks=pytest.mark.postgres) for way in POSTGRES] + [*SQLITE])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    is_postgres = request.param in POSTGRES
    url = request.getfixturevalue("postgres_url") if is_postgres else f"sqlite:///{tmp_path}/shop.db"
    app = make_app()
    async with app.node(url, options=NEVER_POLLS):
        await make_table(url)
        yield Place(app, url, WAYS[request.param])
    await drop_table(url)


async def result_of(run: hf.RunHandle[Any]) -> Any:
    """Wait for a run."""
    async with asyncio.timeout(MOST_S):
        return await run.result()


@pytest.mark.contract("QUE-4", "MSG-4")
async def test_a_run_begins_when_its_row_is_committed(place: Place) -> None:
    order = workflow(place.app, "order")
    async with place.caller() as caller:
        await caller.insert("o-1")
        run = await place.app.start(order, "o-1", attributes={"cents": 5}, tags=("a",), connection=caller.connection)
        with pytest.raises(NotFound):
            await place.app.run(run.run_id).status()
        assert await rows_of(place.url) == set()
        await caller.commit()
        assert await result_of(run) == "shipped o-1"
    assert await rows_of(place.url) == {"o-1"}


@pytest.mark.contract("QUE-1", "QUE-4")
async def test_a_run_that_is_rolled_back_never_was(place: Place) -> None:
    order = workflow(place.app, "order")
    async with place.caller() as caller:
        await caller.insert("o-1")
        gone = await place.app.start(order, "o-1", request_id="r", connection=caller.connection)
        await caller.rollback()
    assert await rows_of(place.url) == set()
    with pytest.raises(NotFound):
        await place.app.run(gone.run_id).status()
    again = await place.app.start(order, "o-2", request_id="r")  # with another input: the request is new
    assert await result_of(again) == "shipped o-2"


@pytest.mark.contract("QUE-1")
async def test_a_refusal_leaves_the_transaction_as_it_was(place: Place) -> None:
    order = workflow(place.app, "order")
    first = await place.app.start(order, "o-1", request_id="r")
    async with place.caller() as caller:
        await caller.insert("o-1")
        connection = caller.connection
        assert (await place.app.start(order, "o-1", request_id="r", connection=connection)).run_id == first.run_id
        with pytest.raises(Conflict):
            await place.app.start(order, "o-2", request_id="r", connection=connection)
        with pytest.raises(Conflict):
            await place.app.start(order, "o-2", run_id=first.run_id, connection=connection)
        with pytest.raises(InvalidInput):
            await place.app.start(order, "nul\x00", reference_key="nul\x00", connection=connection)
        with pytest.raises(NotFound):
            await place.app.run("nowhere").signal("approval", True, connection=connection)
        with pytest.raises(PayloadTooLarge):
            await place.app.run("nowhere").signal("approval", "x" * 100_000, connection=connection)
        await caller.insert("o-2")
        await caller.commit()
    assert await rows_of(place.url) == {"o-1", "o-2"}


@pytest.mark.contract("SIG-3", "SIG-5", "SIG-10")
async def test_signals_count_when_they_are_committed(place: Place) -> None:
    app, approved = place.app, workflow(place.app, "approved")
    run = await app.start(approved, "o-1")
    async with place.caller() as caller:
        await caller.insert("gone")
        await run.signal("approval", False, signal_id="s", connection=caller.connection)
        await caller.rollback()
    async with place.caller() as caller:
        await caller.insert("o-1")
        connection = caller.connection
        sent = await run.signal("approval", True, signal_id="s", connection=connection)  # the first never was
        assert await app.run(run.run_id).signal("approval", True, signal_id="s", connection=connection) == sent
        with pytest.raises(Conflict):
            await run.signal("approval", False, signal_id="s", connection=connection)
        with pytest.raises(InvalidInput):
            await app.run(run.run_id).signal("approval", "yes", connection=connection)
        await run.signal("approval", False, connection=connection)
        await caller.commit()
        assert await result_of(run) == [True, False]
    assert await rows_of(place.url) == {"o-1"}


@pytest.mark.contract("SIG-9", "SIG-10")
async def test_a_run_is_signalled_in_the_transaction_that_starts_it(place: Place) -> None:
    approved = workflow(place.app, "approved")
    async with place.caller() as caller:
        first = {"name": "approval", "payload": True}
        run = await place.app.start(approved, "a", with_signal=first, connection=caller.connection)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            await run.signal("approval", "yes", connection=caller.connection)
        with pytest.raises(InvalidInput):  # also where only its id is known
            await place.app.run(run.run_id).signal("approval", "yes", connection=caller.connection)
        await run.signal("approval", False, connection=caller.connection)
        await caller.commit()
        assert await result_of(run) == [True, False]


async def test_a_run_may_start_later(place: Place) -> None:
    order = workflow(place.app, "order")
    async with place.caller() as caller:
        run = await place.app.start(order, "a", after=timedelta(hours=1), connection=caller.connection)
        await caller.commit()
    assert await run.status() == "PENDING"
    await run.cancel(wait=True)


@pytest.mark.contract("QUE-2")
async def test_limits_on_runs_hold_in_transactions(place: Place) -> None:
    app, single, queued = place.app, workflow(place.app, "single"), workflow(place.app, "queued")
    async with place.caller() as caller:
        await app.start(single, "gone", connection=caller.connection)
        await caller.rollback()
    async with place.caller() as caller:
        running = await app.start(single, "a", connection=caller.connection)
        with pytest.raises(Overloaded):
            await app.start(single, "b", connection=caller.connection)
        runs = [await app.start(queued, f"{n}", connection=caller.connection) for n in range(3)]
        await caller.commit()
        with pytest.raises(Overloaded):
            await app.start(single, "c")
        await running.signal("end", True)
        assert [await result_of(run) for run in runs] == ["0", "1", "2"]
        assert await result_of(running) is True


# --- connections that cannot be used


@asynccontextmanager
async def on_sqlite(folder: Path, **options: Any) -> AsyncIterator[tuple[hf.App, str]]:
    """Open an app on a file with a caller's table in it."""
    app, url = make_app(), f"sqlite:///{folder}/shop.db"
    for name, value in options.items():
        setattr(app, name, value)
    async with app.node(url, options=NEVER_POLLS):
        await make_table(url)
        yield app, url


async def refused(app: hf.App, connection: Any, match: str) -> None:
    """Check that neither a start nor a signal takes this connection, and that nothing is written."""
    run = await app.start(workflow(app, "approved"), "a")
    for ask in (
        lambda: app.start(workflow(app, "order"), "a", connection=connection),
        lambda: run.signal("approval", True, connection=connection),
    ):
        with pytest.raises(InvalidInput, match=match) as caught:
            await ask()
        assert caught.value.details["field"] == "connection"
    assert await run.mailbox() == []


async def test_a_store_that_is_attached_is_refused(tmp_path: Path) -> None:
    async with on_sqlite(tmp_path) as (app, _):
        connection = sqlite3.connect(tmp_path / "own.db")
        connection.execute(f"ATTACH '{tmp_path}/shop.db' AS store")
        await refused(app, connection, "attached as store")
        connection.close()


@pytest.mark.parametrize("other", ["own.db", ":memory:"])
async def test_a_connection_to_another_file_is_refused(tmp_path: Path, other: str) -> None:
    async with on_sqlite(tmp_path) as (app, _):
        connection = sqlite3.connect(other if other == ":memory:" else tmp_path / other)
        await refused(app, connection, "not to the database of the store")
        connection.close()


async def test_a_connection_that_commits_each_statement_is_refused(tmp_path: Path) -> None:
    async with on_sqlite(tmp_path) as (app, _):
        connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
        await refused(app, connection, "no transaction")
        connection.close()


@pytest.mark.parametrize("nonsense", [7, "sqlite:///a.db", object()])
async def test_what_is_no_connection_is_refused(tmp_path: Path, nonsense: Any) -> None:
    async with on_sqlite(tmp_path) as (app, _):
        await refused(app, nonsense, "connection is a connection of sqlite3")


async def test_a_connection_of_another_thread_is_refused(tmp_path: Path) -> None:
    async with on_sqlite(tmp_path) as (app, _):
        connection = await asyncio.to_thread(sqlite3.connect, tmp_path / "shop.db")
        await refused(app, connection, "another thread")
        await asyncio.to_thread(connection.close)


@pytest.mark.postgres
async def test_postgres_refuses_what_it_cannot_use(postgres_url: str, databases: Any, tmp_path: Path) -> None:
    app = make_app()
    async with app.node(postgres_url):
        plain = await asyncpg.connect(postgres_url)
        await refused(app, plain, "no transaction")
        await plain.close()
        with psycopg.connect(postgres_url, autocommit=True) as committing:
            await refused(app, committing, "no transaction")
        with closing(sqlite3.connect(":memory:")) as foreign:
            await refused(app, foreign, "asyncpg or psycopg 3")
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=1) as pool:
            await refused(app, pool, r"not asyncpg\.pool\.Pool")
        with databases.database() as elsewhere:
            async with by_asyncpg(elsewhere) as caller:
                await refused(app, caller.connection, "not to the database of the store")
        failed = psycopg.connect(postgres_url)
        with pytest.raises(psycopg.errors.SyntaxError):
            failed.execute("nonsense")
        await refused(app, failed, "has failed already")
        failed.close()


@pytest.mark.contract("STO-2")
async def test_a_store_without_transactions_says_so(tmp_path: Path) -> None:
    app = make_app()
    async with app.node(hf.MemoryStore()):
        connection = sqlite3.connect(":memory:")
        await refused(app, connection, "only stores in PostgreSQL and SQLite")
        connection.close()


async def test_a_bucket_has_no_transactions() -> None:
    from holdfast.store.s3.store import S3Store

    with pytest.raises(InvalidInput, match="only stores in PostgreSQL and SQLite"):
        S3Store.joined(object(), object())  # type: ignore[arg-type]


async def test_a_workflow_has_no_connection(tmp_path: Path) -> None:
    async with on_sqlite(tmp_path) as (app, _):

        @app.workflow
        async def careless() -> str:
            try:
                await app.run().signal("note", connection=object())
            except InvalidInput:
                return "refused"
            return "sent"

        assert await result_of(await app.start(careless)) == "refused"


async def test_a_parameter_named_connection_is_not_taken_for_the_option(tmp_path: Path) -> None:
    async with on_sqlite(tmp_path) as (app, _):

        @app.workflow
        async def wired(connection: str) -> str:
            return connection

        assert await result_of(await app.start(wired, "cable")) == "cable"
        with pytest.raises(InvalidInput, match="has a parameter of that name"):
            await app.start(wired, connection="cable")


async def test_a_file_that_another_writes_is_busy_and_not_locked(tmp_path: Path) -> None:
    async with on_sqlite(tmp_path) as (app, _):
        writing = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
        writing.execute("BEGIN IMMEDIATE")
        connection = sqlite3.connect(tmp_path / "shop.db", timeout=0.0)
        with pytest.raises(hf.errors.StoreBusy, match="BEGIN IMMEDIATE"):
            await app.start(workflow(app, "order"), "a", connection=connection)
        writing.execute("ROLLBACK")
        writing.close()
        connection.close()


# --- what else a start has


@pytest.mark.contract("SEC-1")
async def test_payloads_are_sealed_in_transactions_too(tmp_path: Path) -> None:
    keys = hf.Encryption({"k": b"0" * 32})
    async with on_sqlite(tmp_path, codecs=(keys,)) as (app, url), by_sqlite3(url) as caller:
        run = await app.start(workflow(app, "approved"), "a secret order", connection=caller.connection)
        await run.signal("approval", True, connection=caller.connection)
        await caller.commit()
        await run.signal("approval", False)
        assert await result_of(run) == [True, False]
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"a secret order" not in stored


@pytest.mark.postgres
@pytest.mark.contract("BUS-1", "FMT-2")
@pytest.mark.parametrize("is_removed_again", [True, False])
async def test_what_a_transaction_put_into_the_outbox_of_a_sink_that_was_removed_meanwhile_goes(
    postgres_url: str, is_removed_again: bool
) -> None:
    """The server cannot delete what is not committed yet: retention does, or who removes a sink next."""
    app = make_app()
    async with app.node(postgres_url, options=NEVER_POLLS):
        store = await PostgresStore.open(postgres_url)
        for name in ("gone", "kept"):
            await store.put_sink(Sink(name=name, kind="projection"))
        async with by_asyncpg(postgres_url) as caller:
            run = await app.start(workflow(app, "order"), "o-1", connection=caller.connection)
            assert await store.remove_sink("gone")
            await caller.commit()
        await result_of(run)
        assert await outbox_sinks(postgres_url) == 2
        if is_removed_again:
            assert not await store.remove_sink("gone")
        else:
            dry = await store.purge(PurgePolicy(outbox_ms=3_600_000, dry_run=True))
            assert await store.purge(PurgePolicy(outbox_ms=3_600_000)) == dry
        assert await outbox_sinks(postgres_url) == 1
        kept = await store.find(OutboxQuery(sink="kept"))
        assert [(entry.run_id, entry.from_seq) for entry in kept][:1] == [(run.run_id, 1)]
        await store.close()


async def outbox_sinks(url: str) -> int:
    """Return of how many sinks the outbox has entries, whether they are there or not."""
    connection = await asyncpg.connect(url)
    count = await connection.fetchval("SELECT count(DISTINCT sink_no) FROM holdfast.outbox")
    await connection.close()
    return int(count)


# --- without an event loop


@pytest.mark.parametrize("is_committed", [True, False])
def test_threads_without_a_loop_use_their_own_connections(tmp_path: Path, is_committed: bool) -> None:
    app, url = make_app(), f"sqlite:///{tmp_path}/shop.db"
    with SyncClient(app, url, node=NEVER_POLLS) as client:
        asyncio.run(make_table(url))
        connection = sqlite3.connect(tmp_path / "shop.db")
        connection.execute("INSERT INTO caller_orders VALUES ('o-1')")
        run = client.start(workflow(app, "approved"), "o-1", connection=connection)
        run.signal("approval", True, connection=connection)
        with pytest.raises(Conflict):
            client.start(workflow(app, "approved"), "o-2", run_id=run.run_id, connection=connection)
        if not is_committed:
            connection.rollback()
            with pytest.raises(NotFound):
                run.status()
        else:
            connection.commit()
            run.signal("approval", False)
            assert run.result() == [True, False]
        connection.close()
    assert asyncio.run(rows_of(url)) == ({"o-1"} if is_committed else set())


@pytest.mark.postgres
def test_a_blocking_driver_is_used_without_a_loop(postgres_url: str) -> None:
    app = make_app()
    with SyncClient(app, postgres_url, node=NEVER_POLLS) as client, psycopg.connect(postgres_url) as connection:
        run = client.start(workflow(app, "order"), "o-1", connection=connection)
        with pytest.raises(HoldfastError):
            run.status()
        connection.commit()
        assert run.result() == "shipped o-1"


@pytest.mark.contract("QUE-5")
async def test_what_becomes_of_an_id_is_decided_in_the_transaction(place: Place) -> None:
    app, approved = place.app, workflow(place.app, "approved")
    old = await app.start(approved, "a", run_id="c")
    for is_committed in (False, True):
        async with place.caller() as caller:
            same = await app.start(approved, "b", run_id="c", reuse="return", connection=caller.connection)
            assert (same.run_id, same.is_reused) == ("c", True)
            new = await app.start(
                approved, "b", run_id="c", reuse="terminate-and-restart", connection=caller.connection
            )
            assert new.run_id == "c~000002"
            await (caller.commit() if is_committed else caller.rollback())
        if not is_committed:
            assert await old.status() in ("PENDING", "RUNNING")
    with pytest.raises(RunCancelled, match="replaced by run c~000002"):
        await result_of(old)
    for _ in range(2):
        await new.signal("approval", True)
    assert await result_of(new) == [True, True]


@pytest.mark.contract("QUE-6")
async def test_a_debounced_start_is_a_part_of_the_transaction(place: Place) -> None:
    """An input that was rolled back is none."""
    app, order = place.app, workflow(place.app, "order")
    key = hf.Debounce("o", 2, 60)
    first = await app.start(order, "o-1", debounce=key)
    for order_id, is_committed in (("o-2", True), ("o-3", False)):
        async with place.caller() as caller:
            run = await app.start(order, order_id, debounce=key, connection=caller.connection)
            assert (run.run_id, run.is_reused) == (first.run_id, True)
            await (caller.commit() if is_committed else caller.rollback())
    assert await result_of(first) == "shipped o-2"
