"""Brokers: real servers get every event, in order, and an outage costs nothing but time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import nats
import pytest
from redis import asyncio as redis

import holdfast as hf
from holdfast.core.bus import OutboxReplay
from holdfast.engine.activities.secrets import EnvironmentSecrets
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Store
from holdfast.store.queries import BusDeadLetterQuery
from tests.bus.test_relay import running, status_of, until_sent
from tests.nats_server import NatsServer
from tests.redis_server import RedisServer

PASSWORD = "a secret of Redis"

pytestmark = pytest.mark.process


def make_app() -> tuple[hf.App, Any]:
    app = hf.App("shop", secrets=EnvironmentSecrets("S_", {"S_REDIS": PASSWORD}))

    @app.activity
    async def charge(amount: int) -> int:
        return amount

    @app.workflow
    async def order(amount: int) -> int:
        return await charge(amount)

    return app, order


@pytest.fixture
async def store() -> Store:
    opened = MemoryStore()
    await opened.migrate()
    return opened


@pytest.fixture(scope="module")
def nats_server() -> Iterator[NatsServer]:
    server = NatsServer(jetstream=True)
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer(PASSWORD)
    server.start()
    yield server
    server.remove()


async def play(app: hf.App, order: Any, store: Store, sink: str) -> dict[str, list[int]]:
    """Let some runs finish, and return their events when the sink has all of them."""
    async with running(app, store):
        runs = [await app.start(order, number) for number in range(5)]
        for run in runs:
            await run.result()
        await until_sent(store, sink)
        return {run.run_id: [event.run_seq for event in await run.events()] for run in runs}


def by_run(events: list[dict[str, Any]]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for event in events:
        numbers.setdefault(event["subject"], []).append(int(event["sequence"]))
    return {run_id: list(dict.fromkeys(found)) for run_id, found in numbers.items()}


@pytest.mark.contract("BUS-1")
async def test_nats_jetstream_keeps_every_event_once(store: Store, nats_server: NatsServer) -> None:
    """With the event's id, by which the stream drops duplicates."""
    client = await nats.connect(nats_server.url)
    try:
        stream = client.jetstream()
        await stream.add_stream(name="ORDERS", subjects=["orders.>"])
        app, order = make_app()
        app.sink("orders", f"{nats_server.url}/orders", first_ms=5, most_ms=50)
        histories = await play(app, order, store, "orders")
        count = sum(map(len, histories.values()))
        await store.replay_outbox(OutboxReplay("orders"))
        async with running(app, store):
            await until_sent(store, "orders")
        assert (await stream.stream_info("ORDERS")).state.messages == count
        subscription = await stream.pull_subscribe("orders.>", "reader")
        messages = await subscription.fetch(count, timeout=30)
        assert by_run([json.loads(message.data) for message in messages]) == histories
        assert {message.subject for message in messages} >= {"orders.RunQueued", "orders.RunCompleted"}
        assert (messages[0].headers or {})["Nats-Msg-Id"] == json.loads(messages[0].data)["id"]
    finally:
        await client.close()


@pytest.mark.contract("BUS-1")
async def test_a_nats_server_without_a_stream_is_a_sink_that_fails(store: Store, nats_server: NatsServer) -> None:
    """Nothing counts as delivered that no stream has stored."""
    app, order = make_app()
    app.sink("nowhere", f"{nats_server.url}/nowhere", first_ms=5, most_ms=50, timeout_ms=2_000)
    async with running(app, store):
        await (await app.start(order, 1)).result()
        async with asyncio.timeout(60):
            while not (await status_of(store, "nowhere")).failures:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await status_of(store, "nowhere")).delivered == 0


@pytest.mark.contract("BUS-1")
async def test_an_event_that_a_nats_server_never_takes_is_soon_a_dead_letter(
    store: Store, nats_server: NatsServer
) -> None:
    """It is too large, however often it is sent; the sink and other runs go on."""
    client = await nats.connect(nats_server.url)
    try:
        await client.jetstream().add_stream(name="LARGE", subjects=["large.>"])
        app, order = make_app()

        @app.workflow
        async def large() -> str:
            return "x" * (client.max_payload + 1)

        app.sink("large", f"{nats_server.url}/large", first_ms=5, most_ms=50)
        async with running(app, store):
            run, other = await app.start(large), await app.start(order, 1)
            await run.result()
            await other.result()
            await until_sent(store, "large")
            [letter] = await store.find(BusDeadLetterQuery())
            assert (letter.run_id, letter.attempts) == (run.run_id, 3)
            assert "MaxPayload" in letter.detail
            assert (await status_of(store, "large")).failures == 0
            sent = (await client.jetstream().stream_info("LARGE")).state.messages
            assert sent == len(await run.events()) - 1 + len(await other.events())
    finally:
        await client.close()


@pytest.mark.contract("BUS-1")
async def test_redis_streams_get_every_event_in_order(store: Store, redis_server: RedisServer) -> None:
    """The password is the sink's secret."""
    app, order = make_app()
    app.sink("log", f"redis://127.0.0.1:{redis_server.port}/orders", secret="redis", first_ms=5, most_ms=50)
    histories = await play(app, order, store, "log")
    client = redis.Redis(port=redis_server.port, password=PASSWORD)
    try:
        found: Any = await client.xrange("orders")
    finally:
        await client.aclose()
    assert by_run([json.loads(fields[b"event"]) for _, fields in found]) == histories
    assert {fields[b"type"] for _, fields in found} >= {b"RunQueued", b"StepCompleted"}


@pytest.mark.contract("BUS-1")
async def test_a_redis_server_that_is_away_gets_everything_when_it_is_back(
    store: Store, redis_server: RedisServer
) -> None:
    app, order = make_app()
    app.sink("back", f"redis://127.0.0.1:{redis_server.port}/back", secret="redis", first_ms=5, most_ms=50)
    redis_server.kill()
    async with running(app, store):
        run = await app.start(order, 1)
        await run.result()
        async with asyncio.timeout(60):
            while not (await status_of(store, "back")).failures:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        redis_server.start()
        await until_sent(store, "back")
        assert (await status_of(store, "back")).delivered >= len(await run.events())
