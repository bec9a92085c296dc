"""Runs with more unread signals than a turn reads: what waits can take is found, in order, and nothing else costs."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.core.messages import SignalRequest
from holdfast.limits import MAILBOX_SIGNALS, Limits
from holdfast.store.port import LoadedRun, Store
from holdfast.testing import VirtualClock
from tests.engine.harness import EngineVariant, wait_for_event

MUCH = 3 * MAILBOX_SIGNALS
LIMITS = Limits(signals_per_run_per_minute=1_000_000, rotation_steps=1_000_000)


async def opened(variant: EngineVariant, clock: VirtualClock | None = None) -> Store:
    """Return a store that takes any number of signals."""
    path = variant.store.removeprefix("sqlite:///")
    store: Store = (
        hf.MemoryStore(clock, LIMITS)
        if path == variant.store
        else await hf.SqliteStore.open(path, clock=clock, limits=LIMITS)
    )
    await store.migrate()
    return store


async def send(store: Store, run_id: str, *names: str) -> None:
    """Send signals that are numbered from 0."""
    requests = [
        SignalRequest(run_id=run_id, name=name, payload=codec.encode(number)) for number, name in enumerate(names)
    ]
    await store.deliver(requests)


@pytest.mark.contract("SIG-3", "LAT-1")
async def test_unread_signals_of_another_name_are_not_read_by_turns(
    variant: EngineVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = hf.App("mail")

    @app.workflow
    async def waits() -> list[int]:
        return [await hf.wait_signal("go", int) for _ in range(5)]

    store = await opened(variant)
    read: list[int] = []
    claim = store.claim

    async def counted(*args: Any) -> list[LoadedRun]:
        claimed = await claim(*args)
        read.extend(len(run.signals) for run in claimed)
        return claimed

    monkeypatch.setattr(store, "claim", counted)
    async with variant.node(app, store):
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting")
        await send(store, run.run_id, *["noise"] * 2_000)
        read.clear()
        for number in range(5):
            await run.signal("go", number)
            await wait_for_event(run, "SignalReceived", times=number + 1)
        assert await run.result() == [0, 1, 2, 3, 4]
    assert max(read) <= 2, read
    await store.close()


@pytest.mark.contract("SIG-1", "SIG-3")
async def test_a_wait_that_opens_later_finds_what_came_before_in_order(variant: EngineVariant) -> None:
    app = hf.App("mail")

    @app.workflow
    async def waits() -> list[int]:
        await hf.wait_signal("go")
        votes = hf.signals("vote", int)
        return [await anext(votes) for _ in range(MUCH)]

    store = await opened(variant)
    async with variant.node(app, store):
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting")
        await send(store, run.run_id, *["vote"] * MUCH)
        await send(store, run.run_id, *["noise"] * MUCH)
        await run.signal("go")
        assert await run.result() == list(range(MUCH))
    await store.close()


@pytest.mark.contract("SIG-1", "SIG-3")
async def test_what_comes_with_a_new_wait_does_not_overtake_what_was_there(variant: EngineVariant) -> None:
    app = hf.App("mail")

    @app.workflow
    async def waits() -> list[int]:
        found = []
        for _ in range(4):
            await hf.wait_signal("go")
            found.append(await hf.wait_signal("vote", int))
        return found

    store = await opened(variant)
    async with variant.node(app, store):
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting")
        await send(store, run.run_id, *["vote"] * MUCH)
        await store.deliver([SignalRequest(run_id=run.run_id, name=name) for name in ("go", "vote", "go", "vote")])
        await send(store, run.run_id, "go", "vote", "go")
        assert await run.result() == [0, 1, 2, 3]
    await store.close()


@pytest.mark.contract("SIG-8", "SIG-3")
async def test_no_wait_of_many_times_out_though_its_signal_came_in_time(variant: EngineVariant) -> None:
    app, clock, many = hf.App("mail"), VirtualClock(), MAILBOX_SIGNALS + 30

    @app.workflow
    async def waits() -> list[Any]:
        return list(
            await asyncio.gather(
                *(hf.wait_signal("go", int, timeout=60, on_timeout=lambda: "nobody") for _ in range(many))
            )
        )

    store = await opened(variant, clock)
    async with variant.node(app, store):
        run = await app.start(waits)
        await wait_for_event(run, "SignalWaiting", times=many)
    clock.advance(ms=59_000)
    await send(store, run.run_id, *["go"] * (many - 1))
    clock.advance(ms=3_000)
    await send(store, run.run_id, "go")
    async with variant.node(app, store):
        assert sorted(map(str, await app.run(run.run_id).result())) == sorted([*map(str, range(many - 1)), "nobody"])
    await store.close()
