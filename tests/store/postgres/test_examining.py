"""What a PostgreSQL store says of its server: each finding is shown by making it true."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.store.health import Bounds, Finding
from holdfast.store.postgres import PostgresStore
from holdfast.store.postgres.address import parse_address
from holdfast.testing.samples import SampleNode, timer, wait
from tests.postgres_server import Installation, Pair
from tests.store.postgres.tampering import behind, execute

HOUR_US = 3_600_000_000


@pytest.fixture
async def store(address: str) -> AsyncIterator[PostgresStore]:
    """Return an empty store."""
    store = await PostgresStore.open(address)
    await store.migrate()
    yield store
    await store.close()


async def found(store: PostgresStore, subject: str, **bounds: Any) -> list[Finding]:
    """Return what the store says of a subject."""
    facts = await store.health(Bounds(**bounds))
    return [one for one in facts.findings if one.subject == subject]


async def test_a_new_schema_is_fine(store: PostgresStore) -> None:
    node = SampleNode(store)
    await node.start("run-1", wait("go"))
    await node.start("run-2", timer(await store.now() + HOUR_US))
    await store.release("node-a")
    facts = await store.health(Bounds(connections_share=2.0))
    assert [one for one in facts.findings if one.level != "fine"] == []
    assert {one.subject for one in facts.findings} == {
        "durability", "writing", "connections", "transactions", "size", "vacuum", "bloat", "replicas",
    }  # fmt: skip
    assert facts.software.startswith("PostgreSQL 1")
    assert facts.schema_version == facts.latest_version
    assert facts.sample == ("run-1", "run-2")


async def test_a_transaction_that_stays_open_is_named(store: PostgresStore, address: str) -> None:
    async with behind(address) as analyst:
        await analyst.execute("SET application_name = 'quarterly report'")
        async with analyst.transaction():
            await analyst.fetch("SELECT 1")
            [found_open] = await found(store, "transactions", transaction_s=0.0)
            assert found_open.level == "wrong"
            assert "(quarterly report, idle in transaction) has a transaction open for" in found_open.sentence
            [in_time] = await found(store, "transactions")
            assert in_time.level == "fine"


async def test_dead_rows_that_nobody_removes_are_counted(store: PostgresStore, address: str) -> None:
    async with behind(address) as analyst, analyst.transaction(isolation="repeatable_read"):
        await analyst.fetch("SELECT count(*) FROM pg_class")
        await execute(
            address,
            "INSERT INTO holdfast.agenda SELECT -n, '', 0, n, NULL, 'order', '1' FROM generate_series(1, 5000) n",
        )
        await execute(address, "DELETE FROM holdfast.agenda")
        await execute(address, COUNTED.replace("SCHEMA", parse_address(address).schema))
        [vacuum] = await found(store, "vacuum", dead_rows=1_000, vacuum_times=1.0)
    assert (vacuum.level, vacuum.sentence) == (
        "wrong",
        "agenda has 5,000 dead rows (100 %), and was last vacuumed never",
    )
    [vacuum] = await found(store, "vacuum", dead_rows=5_001)
    assert vacuum.level == "fine"


# Counts of rows become visible a moment after the connection that changed them has ended.
COUNTED = """
DO $$ BEGIN
    FOR round IN 1..1000 LOOP
        PERFORM pg_stat_clear_snapshot();
        IF (SELECT n_dead_tup FROM pg_stat_user_tables WHERE schemaname = 'SCHEMA' AND relname = 'agenda') = 5000 THEN
            RETURN;
        END IF;
        PERFORM pg_sleep(0.01);
    END LOOP;
    RAISE EXCEPTION 'the dead rows are not counted';
END $$
"""


async def test_a_table_that_is_mostly_room_is_noted(store: PostgresStore, address: str) -> None:
    await execute(
        address, "INSERT INTO holdfast.agenda SELECT -n, '', 0, n, NULL, 'order', '1' FROM generate_series(1, 5000) n"
    )
    await execute(address, "DELETE FROM holdfast.agenda WHERE run_no % 100 <> 0")
    await execute(address, "VACUUM ANALYZE holdfast.agenda")
    [bloat] = await found(store, "bloat", bloat_bytes=100_000)
    assert (bloat.level, bloat.sentence.startswith("agenda has ")) == ("note", True)
    await execute(address, "VACUUM (FULL, ANALYZE) holdfast.agenda")
    [bloat] = await found(store, "bloat", bloat_bytes=8_192)
    assert bloat.level == "fine"


async def test_a_server_that_runs_out_of_connections_is_noticed(store: PostgresStore, address: str) -> None:
    async with behind(address) as connection:
        most = await connection.fetchval("SHOW max_connections")
    [connections] = await found(store, "connections", connections_share=0.0)
    assert (connections.level, f"of {most} are in use" in connections.sentence) == ("wrong", True)


async def test_rows_that_get_too_old_are_noticed(store: PostgresStore) -> None:
    assert await found(store, "transaction age") == []
    [age] = await found(store, "transaction age", transaction_age=1)
    assert age.level == "wrong"


async def test_a_user_without_rights_is_told_which(store: PostgresStore, address: str) -> None:
    schema = parse_address(address).schema
    async with behind(address) as connection:
        await connection.execute("CREATE ROLE half_allowed")
        try:
            await connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO half_allowed")
            await connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO half_allowed")
            await connection.execute(f"REVOKE UPDATE ON {schema}.runs FROM half_allowed")
            for free in store._pool._free:
                await free.execute("SET ROLE half_allowed")
            [writing] = await found(store, "writing")
            for free in store._pool._free:
                await free.execute("RESET ROLE")
        finally:
            await connection.execute("DROP OWNED BY half_allowed")
            await connection.execute("DROP ROLE half_allowed")
    assert (writing.level, writing.sentence) == ("wrong", "this user may not read and write runs")


@pytest.mark.contract("INV")
async def test_a_run_that_claims_cannot_see_is_named(store: PostgresStore, address: str) -> None:
    await SampleNode(store).start("run-1", timer(await store.now() + HOUR_US))
    assert await found(store, "ready set") == []
    await execute(address, "UPDATE holdfast.agenda SET owner = ''")
    [other] = await found(store, "ready set")
    await execute(address, "DELETE FROM holdfast.agenda")
    [missing] = await found(store, "ready set")
    assert [(one.level, one.run_ids) for one in (other, missing)] == [("wrong", ("run-1",))] * 2


@pytest.mark.slow
@pytest.mark.contract("STO-1")
async def test_a_server_that_is_not_safe_or_keeps_no_house_is_noticed(postgres: Installation) -> None:
    server = postgres.server()
    server.configure("fsync = off\nautovacuum = off")
    server.restart()
    store = await PostgresStore.open(f"{server.dsn}?allow_unsafe=true")
    await store.migrate()
    [durability], [vacuum] = await found(store, "durability"), await found(store, "vacuum")
    await store.close()
    assert (durability.level, "fsync is off" in durability.sentence) == ("wrong", True)
    assert (vacuum.level, "autovacuum is off" in vacuum.sentence) == ("wrong", True)


@pytest.mark.slow
@pytest.mark.contract("STO-1")
async def test_a_replica_that_commits_wait_for_is_named_and_its_absence_too(postgres: Installation) -> None:
    pair = Pair(postgres)
    assert pair.standby is not None
    store = await PostgresStore.open(pair.dsn)
    await store.migrate()
    [replicas] = await found(store, "replicas")
    assert (replicas.level, replicas.sentence) == ("fine", f"there are {pair.standby.name} (streaming, sync)")
    pair.primary.sql("SELECT pg_create_physical_replication_slot('left_over', true)")
    [kept] = await found(store, "replicas", kept_log_bytes=0)
    assert (kept.level, "are kept for the slot left_over, which has no reader" in kept.sentence) == ("wrong", True)
    pair.standby.stop()
    pair.primary._wait_for("SELECT WHERE NOT EXISTS (SELECT FROM pg_stat_replication)")
    [away] = await found(store, "replicas")
    await store.close()
    assert (away.level, away.sentence) == (
        "wrong",
        f"commits wait for a replica ({pair.standby.name}), and none is there",
    )
