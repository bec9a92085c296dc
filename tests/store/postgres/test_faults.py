"""What can go wrong on the way to the server and on it: tried again, looked up, or told in our own words."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast import Settings, open_store
from holdfast.errors import (
    InvalidInput,
    StoreBusy,
    StoreError,
    StoreNotMigrated,
    StoreReadOnly,
    StoreTooNew,
    StoreUnavailable,
    StoreUnsafe,
)
from holdfast.store.port import Accepted, Committed, Created, Duplicate, Existing, RunQuery
from holdfast.store.postgres import PostgresStore, pool
from holdfast.store.postgres.address import parse_address
from holdfast.store.postgres.wakeups import NotifyWakeups
from holdfast.testing.samples import SampleNode, marker, message, new_run, read_history, signal
from tests.store.postgres.proxy import Proxy
from tests.store.postgres.tampering import behind, execute

HOUR_MS = 3_600_000
PASSWORD = "open"


@pytest.fixture
async def store(address: str) -> AsyncIterator[PostgresStore]:
    store = await PostgresStore.open(address)
    await store.migrate()
    yield store
    await store.close()


@pytest.fixture
async def proxy(address: str, store: PostgresStore) -> AsyncIterator[Proxy]:
    """A way to the store's server; the store is migrated."""
    async with Proxy(address) as proxy:
        yield proxy


async def reach(proxy: Proxy, busy_ms: int = 10_000) -> PostgresStore:
    return await PostgresStore.open(proxy.address, busy_ms=busy_ms)


# --- answers that are lost


@pytest.mark.contract("MSG-2", "OWN-1")
async def test_a_commit_whose_answer_was_lost_is_recognised_and_not_repeated(proxy: Proxy) -> None:
    far = await reach(proxy)
    node = SampleNode(far, lease_ms=HOUR_MS)
    run = await node.create("run-1")
    turn = await node.turn(run, marker("once"))
    proxy.loses_answer_to = b"once"
    answer = await node.commit(turn)
    assert proxy.lost == 1
    events = await read_history(far, "run-1")
    assert isinstance(answer, Committed)
    assert answer.version == len(events)
    assert [event.step_id for event in events].count("once") == 1
    await far.close()


@pytest.mark.contract("QUE-1")
async def test_a_run_whose_creation_was_not_answered_is_created_once_and_said_to_be(proxy: Proxy) -> None:
    far = await reach(proxy)
    await far.renew("node-a", HOUR_MS)
    proxy.loses_answer_to = b"run-1"
    answers = await far.create([new_run("run-1", request_id="r")], "node-a")
    assert proxy.lost == 1
    assert answers == [Created("run-1", 1)]
    assert await far.create([new_run("run-1", request_id="r")], "node-a") == [Existing("run-1")]
    assert len(await far.find(RunQuery())) == 1
    await far.close()


@pytest.mark.contract("SIG-5")
async def test_a_signal_with_an_id_whose_acceptance_was_not_answered_is_accepted_once(proxy: Proxy) -> None:
    far = await reach(proxy)
    await far.create([new_run("run-1")])
    proxy.loses_answer_to = b"click-1"
    [answer] = await far.deliver([signal("run-1", signal_id="click-1")])
    assert isinstance(answer, Duplicate)
    [run] = await far.load(["run-1"])
    assert run is not None
    assert [one.signal_id for one in run.signals] == ["click-1"]
    await far.close()


@pytest.mark.contract("SIG-5")
async def test_a_signal_without_an_id_is_never_sent_twice_for_its_sender(proxy: Proxy) -> None:
    """Nobody can tell whether it was accepted, so the sender is told that."""
    far = await reach(proxy)
    await far.create([new_run("run-1")])
    proxy.loses_answer_to = b"anonymous"
    with pytest.raises(StoreUnavailable):
        await far.deliver([signal("run-1", "anonymous")])
    [run] = await far.load(["run-1"])
    assert run is not None
    assert len(run.signals) == 1
    await far.close()


# --- servers that are gone, and come back


@pytest.mark.contract("OWN-3")
async def test_a_server_that_comes_back_in_time_is_waited_for(proxy: Proxy) -> None:
    far = await reach(proxy)
    await far.create([new_run("run-1")])
    await proxy.cut()
    working = asyncio.create_task(far.deliver([message("run-1", "m-1")]))
    done, _ = await asyncio.wait([working], timeout=0.1)
    assert not done
    await proxy.listen()
    assert await working == [Accepted()]
    await far.close()


@pytest.mark.contract("API-2")
async def test_a_server_that_stays_away_is_a_typed_error(proxy: Proxy) -> None:
    far = await reach(proxy, busy_ms=100)
    await proxy.cut()
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await far.load(["run-1"])
    with pytest.raises(StoreUnavailable):
        await PostgresStore.open(proxy.address, busy_ms=100)
    await far.close()


@pytest.mark.contract("OWN-3")
async def test_connections_that_the_server_ends_are_replaced(store: PostgresStore, address: str) -> None:
    await store.create([new_run("run-1")])
    for _ in range(3):
        await execute(
            address,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1",
            f"holdfast {parse_address(address).schema}",
        )
        assert len(await store.load(["run-1"])) == 1


@pytest.mark.contract("MSG-4")
async def test_the_bell_is_heard_again_after_its_connection_broke(proxy: Proxy, store: PostgresStore) -> None:
    far = await reach(proxy)
    listener = far.wakeups.listen()
    await far.create([new_run("run-1")])
    await proxy.cut()
    await proxy.listen()
    async with asyncio.timeout(60):
        while not await _is_heard(listener, store):
            pass
    listener.close()
    await far.close()


async def _is_heard(listener: Any, store: PostgresStore) -> bool:
    while await listener.wait(0.05):
        pass
    store.wakeups.notify()
    return bool(await listener.wait(0.5))


# --- servers that refuse


@pytest.mark.contract("STO-1")
async def test_a_server_that_takes_no_writes_is_refused_at_open(address: str) -> None:
    with pytest.raises(StoreReadOnly, match="takes no writes"):
        await PostgresStore.open(f"{address}&default_transaction_read_only=on")


@pytest.mark.contract("OWN-3")
async def test_a_connection_that_lands_on_a_server_without_writes_is_dropped_until_there_is_one_with(
    store: PostgresStore, address: str, role: str
) -> None:
    """As after a failover, while the name still leads to the old primary."""
    schema = parse_address(address).schema
    await execute(address, f"GRANT ALL ON SCHEMA {schema} TO {role}")
    for what in ("TABLES", "SEQUENCES", "FUNCTIONS"):
        await execute(address, f"GRANT ALL ON ALL {what} IN SCHEMA {schema} TO {role}")
    other = await PostgresStore.open(as_role(address, role))
    await other.create([new_run("run-1")])
    await execute(address, f"ALTER ROLE {role} SET default_transaction_read_only = on")
    await execute(address, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")
    working = asyncio.create_task(other.deliver([message("run-1", "m-1")]))
    done, _ = await asyncio.wait([working], timeout=0.2)
    assert not done
    await execute(address, f"ALTER ROLE {role} SET default_transaction_read_only = off")
    assert await working == [Accepted()]
    await other.close()


@pytest.fixture
async def role(address: str) -> AsyncIterator[str]:
    name = parse_address(address).schema + "_role"
    await execute(address, f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
    yield name
    await execute(address, f"DROP OWNED BY {name}")
    await execute(address, f"DROP ROLE {name}")


def as_role(address: str, role: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{role}:{PASSWORD}@{rest.rpartition('@')[2]}"


@pytest.mark.contract("API-2")
async def test_a_server_without_a_place_for_us_is_busy(address: str, role: str) -> None:
    await execute(address, f"ALTER ROLE {role} CONNECTION LIMIT 0")
    with pytest.raises(StoreBusy, match="no more connections"):
        await PostgresStore.open(as_role(address, role))


@pytest.mark.contract("API-2")
async def test_a_user_without_rights_is_told_so_in_our_words(address: str, role: str) -> None:
    store = await PostgresStore.open(as_role(address, role))
    with pytest.raises(StoreError, match="rights"):
        await store.migrate()
    await store.close()


@pytest.mark.contract("STO-1")
async def test_a_server_that_may_lose_what_it_acknowledged_is_refused(address: str) -> None:
    unsafe = address.replace("&allow_unsafe=true", "") + "&synchronous_commit=off"
    with pytest.raises(StoreUnsafe, match="synchronous_commit"):
        await PostgresStore.open(unsafe)
    await (await PostgresStore.open(f"{unsafe}&allow_unsafe=true")).close()


@pytest.mark.contract("FMT-1")
async def test_a_schema_that_is_missing_or_too_new_is_refused(store: PostgresStore, address: str) -> None:
    empty = await PostgresStore.open(address.replace("schema=", "schema=no_"))
    with pytest.raises(StoreNotMigrated):
        await empty.now()
    await empty.close()
    await execute(address, "INSERT INTO holdfast.holdfast_schema VALUES (99, 99)")
    with pytest.raises(StoreTooNew):
        await PostgresStore.open(address)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("&schema=Robert'); drop", "schema"),
        ("&connections=0", "connections"),
        ("&connections=many", "connections"),
        ("&pooler=session", "pooler"),
        ("&allow_unsafe=maybe", "allow_unsafe"),
    ],
)
@pytest.mark.contract("API-2")
def test_an_address_that_makes_no_sense_is_refused(change: str, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        parse_address(f"postgresql://host/db?a=b{change}")


@pytest.mark.contract("API-2")
async def test_no_error_shows_the_password() -> None:
    for password in ("secret", "se@secret/x"):
        with pytest.raises(StoreError) as raised:
            await PostgresStore.open(f"postgresql://ann:{password}@127.0.0.1:1/db", busy_ms=0)
        assert "secret" not in str(raised.value.as_dict())


async def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("holdfast.store.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(StoreUnavailable, match=r"pip install 'holdfast\[postgres\]'"):
        await open_store(Settings(store="postgresql://host/db"))


# --- others who are in the way


@pytest.mark.contract("API-2")
async def test_a_statement_that_takes_too_long_is_tried_again_and_then_busy(store: PostgresStore, address: str) -> None:
    hasty = await PostgresStore.open(f"{address}&statement_timeout=50ms", busy_ms=300)
    await store.create([new_run("run-1")])
    async with behind(address) as other, other.transaction():
        await other.execute(f"SELECT * FROM {parse_address(address).schema}.runs FOR UPDATE")
        with pytest.raises(StoreBusy, match="too long"):
            await hasty.deliver([message("run-1", "m-1")])
        patient = asyncio.create_task(store.deliver([message("run-1", "m-1")]))
        await asyncio.sleep(0)
    assert await patient == [Accepted()]
    assert await hasty.deliver([message("run-1", "m-1")]) == [Duplicate()]
    await hasty.close()


@pytest.mark.contract("MSG-2")
async def test_whoever_loses_a_deadlock_is_tried_again(store: PostgresStore, address: str) -> None:
    await store.create([new_run("run-1"), new_run("run-2")])
    lock = f"SELECT 1 FROM {parse_address(address).schema}.runs WHERE run_id = $1 FOR UPDATE"
    async with behind(address) as other:
        transaction = other.transaction()
        await transaction.start()
        await other.execute("SET LOCAL deadlock_timeout = '10s'")  # so that it is the store which finds out
        await other.fetch(lock, "run-2")
        working = asyncio.create_task(store.deliver([message("run-1", "m-1"), message("run-2", "m-1")]))
        await asyncio.wait([working], timeout=0.2)
        await other.fetch(lock, "run-1")
        await transaction.rollback()
    assert await working == [Accepted(), Accepted()]


@pytest.mark.contract("MSG-2")
async def test_work_goes_on_when_its_caller_is_cancelled(store: PostgresStore, address: str) -> None:
    await store.create([new_run("run-1")])
    listener = store.wakeups.listen()
    async with behind(address) as other, other.transaction():
        await other.execute(f"SELECT * FROM {parse_address(address).schema}.runs FOR UPDATE")
        working = asyncio.create_task(store.deliver([message("run-1", "m-1")]))
        await asyncio.wait([working], timeout=0.1)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        while await listener.wait(0):
            pass
    assert await listener.wait(10)
    assert await store.deliver([message("run-1", "m-1")]) == [Duplicate()]
    listener.close()


# --- poolers


@pytest.mark.contract("STO-1")
async def test_nothing_is_kept_in_a_session_behind_a_pooler(address: str, store: PostgresStore) -> None:
    """Every transaction may find another session: here each finds one in which everything was forgotten."""
    pooled = await PostgresStore.open(f"{address}&pooler=transaction&connections=1")
    node = SampleNode(pooled)
    for number in range(3):
        await node.start(f"run-{number}", marker("mark"))
        [connection] = pooled._pool._free
        await connection.execute("DISCARD ALL")
    assert len(await pooled.find(RunQuery())) == 3
    listener = pooled.wakeups.listen()
    assert await listener.wait(10), "whoever cannot hear the bell looks by himself"
    listener.close()
    await pooled.close()


async def test_text_with_a_nul_is_refused_or_finds_nothing(store: PostgresStore) -> None:
    await store.create([new_run("run-1")])
    assert await store.load(["run-1\x00", "\x00"]) == [None, None]
    assert await store.find(RunQuery(tenant="default\x00")) == []
    assert await store.read_events("run-1\x00") == []
    assert await store.release("node\x00x", ["run-1\x00"]) == 0
    assert await store.next_due("node\x00x", [("plan\x00", "1\x00")]) is None


@pytest.mark.parametrize("ticks", range(6))
async def test_closing_does_not_swallow_a_cancellation(postgres_url: str, ticks: int) -> None:
    store = await PostgresStore.open(postgres_url)
    wakeups = store.wakeups
    assert isinstance(wakeups, NotifyWakeups)
    wakeups.listen()
    wakeups._sent.clear()
    flushing = asyncio.create_task(wakeups.flush(60.0))
    await asyncio.sleep(0.01)
    wakeups._sent.set()  # what it waits for comes at the same time as the cancellation
    for _ in range(ticks):
        await asyncio.sleep(0)
    is_cancelled = flushing.cancel()
    await asyncio.wait([flushing])
    assert flushing.cancelled() == is_cancelled
    await store.close()


async def test_a_cancelled_close_leaves_no_connection_behind(postgres_url: str) -> None:
    store = await PostgresStore.open(postgres_url)
    await store.migrate()
    asking = asyncio.create_task(store._pool.fetch("SELECT pg_sleep(60)"))
    while not store._pool._in_use:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    [connection] = store._pool._in_use
    closing = asyncio.create_task(store.close())
    store._pool._tasks.add(asking)
    await asyncio.sleep(0.01)
    closing.cancel()
    await asyncio.wait([closing, asking], timeout=5)
    assert closing.cancelled()
    assert connection.is_closed()
    assert isinstance(asking.exception(), StoreUnavailable)


async def test_closing_takes_a_bounded_time_though_a_server_does_not_answer(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CLOSE_S", 0.05)
    store = await PostgresStore.open(postgres_url)
    await store.migrate()
    asking = asyncio.create_task(store._pool.finished(store._pool.fetch("SELECT pg_sleep(60)")))
    while not store._pool._in_use:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        await store.close()
        with pytest.raises(StoreUnavailable):
            await asking


@pytest.mark.contract("MSG-4")
async def test_closing_waits_once_for_a_server_that_does_not_answer(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists have connections of their own, and these are closed beside the others."""
    monkeypatch.setattr(pool, "CLOSE_S", 4.0)
    store = await PostgresStore.open(postgres_url)
    await store.migrate()
    both = (store._pool, store._lists)
    asking = [asyncio.create_task(each.finished(each.fetch("SELECT pg_sleep(60)"))) for each in both]
    while not all(each._in_use for each in both):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    since = asyncio.get_running_loop().time()
    async with asyncio.timeout(60):
        await store.close()
        assert asyncio.get_running_loop().time() - since < 7.5
        assert [type(each) for each in await asyncio.gather(*asking, return_exceptions=True)] == [StoreUnavailable] * 2
