"""Wake-ups through a real NATS server: they arrive, and without the server nothing is lost but time."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.client import Client
from obstore.store import MemoryStore as ObjectsInMemory

import holdfast as hf
from holdfast.errors import InvalidInput
from holdfast.settings import Settings, load_settings
from holdfast.store import nats_wakeups
from holdfast.store.nats_wakeups import NatsWakeups, read_address
from holdfast.store.open import open_store, open_wakeups
from holdfast.store.port import RunQuery
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.store.s3.polling import NOTIFIED_LOOK_S
from holdfast.store.wakeups import LocalListener, Wakeups
from holdfast.testing.samples import new_run
from tests.nats_server import NatsServer
from tests.server_folder import processes_of

pytestmark = pytest.mark.process

WITHIN_S = 60.0


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """Return a server that runs."""
    server = NatsServer()
    server.start()
    yield server
    server.remove()


@asynccontextmanager
async def bells(*addresses: str) -> AsyncIterator[list[NatsWakeups]]:
    """Give wake-ups, each with a connection of its own, as in processes of their own."""
    opened = [NatsWakeups(address) for address in addresses]
    try:
        yield opened
    finally:
        for bell in opened:
            bell.close()
            await ended(bell)


async def ended(bell: Wakeups) -> None:
    """Wait until wake-ups that were closed have left."""
    assert isinstance(bell, NatsWakeups)
    assert bell._task is not None
    done, _ = await asyncio.wait([bell._task], timeout=WITHIN_S)
    assert done


async def connected(listener: LocalListener) -> None:
    """Wait until the connection is there: whoever comes (back) is woken, because it may have missed a ring."""
    assert await listener.wait(WITHIN_S)


@pytest.mark.contract("MSG-4")
async def test_a_ring_wakes_those_who_listen_elsewhere_and_here(server: NatsServer) -> None:
    async with bells(server.url, server.url) as (mine, other):
        here, there = mine.listen(), other.listen()
        await connected(here)
        await connected(there)
        for _ in range(3):
            mine.notify()
            assert await here.wait(0)
            assert await there.wait(WITHIN_S)
        assert not await here.wait(0.1), "a ring does not come back to who rang"


async def test_who_only_rings_is_heard(server: NatsServer) -> None:
    async with bells(server.url, server.url) as (mine, other):
        there = other.listen()
        await connected(there)
        mine.notify()
        assert await there.wait(WITHIN_S)


async def test_other_subjects_are_not_disturbed(server: NatsServer) -> None:
    async with bells(f"{server.url}/orders", f"{server.url}/letters", f"{server.url}/orders") as (mine, other, friend):
        there, listening = other.listen(), friend.listen()
        await connected(there)
        await connected(listening)
        mine.notify()
        assert await listening.wait(WITHIN_S)
        assert not await there.wait(0.1)


async def test_many_rings_at_once_are_one_message(server: NatsServer) -> None:
    heard = 0

    async def count(message: object) -> None:
        nonlocal heard
        heard += 1

    witness = Client()
    await witness.connect(server.url)
    await witness.subscribe("holdfast.wake", cb=count)
    await witness.flush()
    async with bells(server.url, server.url) as (mine, other):
        await connected(mine.listen())
        there = other.listen()
        await connected(there)
        for _ in range(10_000):
            mine.notify()
        assert await there.wait(WITHIN_S)
        await witness.flush()
        assert 1 <= heard <= 2
    await witness.close()


async def test_the_last_ring_before_the_end_is_heard(server: NatsServer) -> None:
    async with bells(server.url, server.url) as (mine, other):
        there = other.listen()
        await connected(mine.listen())
        await connected(there)
        mine.notify()
        mine.close()
        assert await there.wait(WITHIN_S)


@pytest.mark.contract("STO-1", "MSG-4")
async def test_processes_on_a_bucket_notify_each_other_and_look_less_often(server: NatsServer) -> None:
    """A process that listens is woken long before it would have looked."""
    objects = ObjectsInMemory()
    async with bells(server.url, server.url) as (mine, other):
        store, listening = S3Store(Bucket(objects), wakeups=mine), S3Store(Bucket(objects), wakeups=other)
        idle = listening.idle_requests_per_hour()
        assert idle < S3Store(Bucket(objects)).idle_requests_per_hour() / 2
        await listening.stats()
        there = listening.wakeups.listen()
        await connected(mine.listen())
        while await there.wait(0.2):
            continue  # both have arrived
        await store.create([new_run("run-1")])
        async with asyncio.timeout(NOTIFIED_LOOK_S / 2):
            while not await listening.find(RunQuery()):
                assert await there.wait(WITHIN_S)
        await store.close()
        await listening.close()


@pytest.mark.contract("OWN-3")
async def test_a_server_that_is_killed_costs_nothing_but_wakeups_and_is_found_again(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with bells(server.url, server.url) as (mine, other):
        here, there = mine.listen(), other.listen()
        await connected(here)
        await connected(there)
        server.kill()
        with caplog.at_level(logging.WARNING, "holdfast.wakeups"):
            mine.notify()
            assert await here.wait(0), "in the same process it rings as before"
            assert not await there.wait(0.5)
        server.start()
        await connected(there)  # it may have missed a ring, and it has
        await connected(here)
        mine.notify()
        assert await there.wait(WITHIN_S)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(warnings) <= 2, "each says it once"


async def test_a_server_may_come_later() -> None:
    server = NatsServer()
    try:
        async with bells(server.url, server.url) as (mine, other):
            here, there = mine.listen(), other.listen()
            mine.notify()
            assert await here.wait(0)
            assert not await there.wait(0.3)
            server.start()
            assert await there.wait(WITHIN_S)
    finally:
        server.remove()


class Warned(logging.Handler):
    """Waits for a word of warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Take it."""
        self.event.set()


async def test_a_server_that_does_not_answer_is_given_up(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_wakeups, "PING_S", 0.1)
    monkeypatch.setattr(nats_wakeups, "CONNECT_S", 0.2)
    warned = Warned()
    nats_wakeups.logger.addHandler(warned)
    async with bells(server.url) as (mine,):
        here = mine.listen()
        await connected(here)
        server.freeze()
        mine.notify()
        assert await here.wait(0)
        async with asyncio.timeout(WITHIN_S):
            await warned.event.wait()
        server.kill()
        server.start()
        await connected(here)
    nats_wakeups.logger.removeHandler(warned)


# --- A node with such wake-ups


app = hf.App("bells")


@app.activity
async def add_one(number: int) -> int:
    """Add one."""
    return number + 1


@app.workflow
async def count(number: int) -> int:
    """Add one twice."""
    return await add_one(await add_one(number))


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return the address of a store."""
    return f"sqlite:///{tmp_path}/bells.db"


async def test_a_run_that_is_started_elsewhere_is_found_at_once(server: NatsServer, store: str) -> None:
    patient = hf.NodeOptions(safety_poll_s=1_000.0)
    settings = Settings(store=store, wakeups=server.url)
    works, starts = await open_store(settings), await open_store(settings)
    other = hf.App("other")
    other.registry = app.registry
    async with app.node(works, options=patient), other.connect(starts):
        witness = works.wakeups.listen()
        await asyncio.gather(*(witness.wait(1.0) for _ in range(2)))
        async with asyncio.timeout(WITHIN_S):
            run = await other.start(count, 1)
            assert await run.result() == 3
    assert not Path(store.removeprefix("sqlite:///")).with_name("bells.db-wake").exists(), "the file's own are not used"
    for opened in (starts, works):
        await opened.close()
        await ended(opened.wakeups)


@pytest.mark.contract("OWN-3")
async def test_runs_go_on_without_the_server(server: NatsServer, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_WAKEUPS", server.url)
    quick = hf.NodeOptions(safety_poll_s=0.2)
    async with app.node(store, options=quick):
        assert await (await app.start(count, 1)).result() == 3
        server.kill()
        for number in range(5):
            assert await (await app.start(count, number)).result() == number + 2
        server.start()
        assert await (await app.start(count, 7)).result() == 9
        bell = app.runtime().store.wakeups
    await ended(bell)


# --- Addresses


@pytest.mark.parametrize(
    ("address", "servers", "subject"),
    [
        ("nats://localhost", ("nats://localhost",), "holdfast.wake"),
        ("nats://ann:pw@a:1,b:2/orders", ("nats://ann:pw@a:1", "nats://b:2"), "holdfast.orders"),
        ("tls://a/or-ders_1", ("tls://a",), "holdfast.or-ders_1"),
    ],
)
def test_an_address_names_servers_and_a_subject(address: str, servers: tuple[str, ...], subject: str) -> None:
    assert read_address(address) == (servers, subject)


@pytest.mark.parametrize(
    "address", ["redis://a", "nats://", "nats:a", "a", "nats://a/b/c", "nats://a/b.>", "nats://a/*", "nats://a?b=c"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match="nats://localhost:4222/orders"):
        open_wakeups(address)


def test_a_refusal_does_not_show_the_password() -> None:
    with pytest.raises(InvalidInput) as refusal:
        read_address("redis://ann:secret@host")
    assert "secret" not in str(refusal.value)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "holdfast.store.nats_wakeups")
    monkeypatch.setitem(sys.modules, "nats.aio.client", None)
    with pytest.raises(InvalidInput, match=r"pip install 'holdfast\[nats\]'"):
        open_wakeups("nats://localhost")


async def test_a_store_in_memory_has_nobody_to_wake() -> None:
    with pytest.raises(InvalidInput, match="one process"):
        await open_store(load_settings({"HOLDFAST_WAKEUPS": "nats://localhost"}, store="memory://"))
    assert open_wakeups("") is None


def test_nothing_is_left_of_a_server() -> None:
    server = NatsServer()
    server.start()
    folder = server._folder.path
    assert processes_of(folder)
    server.remove()
    assert not folder.exists()
    assert not processes_of(folder)
