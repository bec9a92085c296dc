"""The store suite, the store itself: time, capabilities, migration, wake-ups and closing."""

import asyncio

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.store.port import (
    Capabilities,
    Heartbeat,
    MailboxQuery,
    PurgePolicy,
    RunQuery,
    Store,
    TaskQuery,
    WaitQuery,
)
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, message, new_run, read_picture, signal, wait
from holdfast.testing.store_suite.base import SuiteBase, unchanged

SOON_S = 60.0
"""How long to wait for what should happen immediately, before it counts as not happening."""


class LifecycleSuite(SuiteBase):
    """The store as a whole."""

    @pytest.mark.contract("SIG-2")
    async def test_time_is_the_stores(self, store: Store, clock: VirtualClock) -> None:
        """`now` is the reference for every instant in the store."""
        assert await store.now() == START
        clock.advance(ms=1)
        assert await store.now() == START + 1_000

    @pytest.mark.contract("STO-2")
    async def test_capabilities_are_declared(self, store: Store) -> None:
        """There are four, and they do not change while the store is open."""
        declared = store.capabilities
        assert isinstance(declared, Capabilities)
        flags = (declared.conditional_batch, declared.atomic_batch, declared.read_after_write)
        assert all(isinstance(flag, bool) for flag in flags)
        assert declared.scan_consistency in ("snapshot", "eventual")
        await store.create([new_run("run-1")])
        assert store.capabilities == declared

    async def test_migrating_again_changes_nothing(self, store: Store, peer: Store, node: SampleNode) -> None:
        """The first process migrates once; the answer is the schema's version."""
        await node.start("run-1", wait("go"))
        version = await store.migrate()
        assert version >= 1
        async with unchanged(store):
            assert set(await asyncio.gather(store.migrate(), peer.migrate(), store.migrate())) == {version}

    @pytest.mark.contract("STO-2")
    async def test_what_one_has_written_another_reads(self, store: Store, peer: Store, node: SampleNode) -> None:
        """When a verb has returned, every process sees its effect."""
        await node.start("run-1", wait("go"))
        await peer.deliver([signal("run-1", "go", signal_id="click-1")])
        run = await node.step("run-1", wait("again"))
        assert [await peer.load(["run-1"])] == [[run]]
        assert await read_picture(peer, ["node-a"]) == await read_picture(store, ["node-a"])

    # --- wake-ups

    async def test_notification_wakes_every_listener(self, store: Store) -> None:
        """This includes listeners that are already waiting, and those that wait later."""
        first, second = store.wakeups.listen(), store.wakeups.listen()
        waiting = asyncio.create_task(first.wait(SOON_S))
        await asyncio.sleep(0)
        store.wakeups.notify()
        assert await waiting
        assert await second.wait(SOON_S)
        first.close()
        second.close()

    async def test_notification_since_the_last_wait_is_not_lost(self, store: Store) -> None:
        """A busy listener returns from its next wait immediately, and several notifications count as one."""
        listener = store.wakeups.listen()
        for _ in range(2):
            store.wakeups.notify()
            store.wakeups.notify()
            assert await listener.wait(SOON_S)
        listener.close()

    async def test_wait_ends_when_its_time_runs_out(self, store: Store) -> None:
        """There was no notification."""
        listener = store.wakeups.listen()
        assert not await listener.wait(0)
        listener.close()

    @pytest.mark.parametrize("verb", ["create", "deliver", "commit", "release"])
    async def test_verbs_that_may_make_a_run_ready_notify(self, store: Store, node: SampleNode, verb: str) -> None:
        """So no node has to poll."""
        run = await node.start("run-1", wait("go"))
        turn = await node.turn(run, release=True)
        listener = store.wakeups.listen()
        while await listener.wait(0):
            pass  # earlier notifications come from the setup
        match verb:
            case "create":
                await store.create([new_run("run-2")])
            case "deliver":
                await store.deliver([message("run-1", "m-1")])
            case "commit":
                await store.commit([turn])
            case "release":
                await store.release("node-a")
        assert await listener.wait(SOON_S)
        listener.close()

    async def test_closing_wakes_those_who_still_wait(self, store: Store) -> None:
        """A sleeping node must be able to stop."""
        listener = store.wakeups.listen()
        waiting = asyncio.create_task(listener.wait(SOON_S))
        await asyncio.sleep(0)
        await store.close()
        assert await waiting
        listener.close()

    # --- closing

    async def test_closing_twice_is_harmless(self, store: Store) -> None:
        """A caller that cleans up need not know whether it was closed before."""
        await store.close()
        await store.close()

    async def test_closed_store_refuses_every_verb(self, store: Store, node: SampleNode) -> None:
        """The error is of our own type, never one of the driver."""
        turn = await node.turn(await node.start("run-1", wait("go")))
        await store.close()
        calls = [
            store.migrate(),
            store.now(),
            store.create([new_run("run-2")]),
            store.load(["run-1"]),
            store.deliver([signal("run-1", "go")]),
            store.commit([turn]),
            store.claim("node-a", 1),
            store.renew("node-a", 1_000),
            store.release("node-a"),
            store.next_due("node-a"),
            store.acquire_jobs("node-a", ["mail"], ["charge"], 1, 1_000),
            store.acquire_jobs("node-a", [], [], 1, 1_000),
            store.heartbeat("node-a", [Heartbeat(run_id="run-1", step_id="charge")], 1_000),
            store.find(RunQuery()),
            store.find(WaitQuery()),
            store.find(MailboxQuery(run_id="run-1")),
            store.find(TaskQuery()),
            store.read_events("run-1"),
            store.purge(PurgePolicy()),
            store.stats(),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable):
                await call
