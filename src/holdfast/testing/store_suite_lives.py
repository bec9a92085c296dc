"""The store suite, lives of nodes: who comes back under a name takes over, and who was taken over from finds out."""

import pytest

from holdfast.errors import LeaseExpired, NodeSuperseded
from holdfast.store.port import Beat, CommitConflict, Committed, Store
from holdfast.testing.clock import VirtualClock
from holdfast.testing.samples import SampleNode, job, marker, wait
from holdfast.testing.store_suite_base import SuiteBase, unchanged
from holdfast.testing.store_suite_queues import VISIBLE_MS, attempts, put, take


class LivesSuite(SuiteBase):
    """Nodes that have several lives under one name."""

    @pytest.fixture
    def former(self, store: Store) -> SampleNode:
        """The first life of a node."""
        return SampleNode(store, "web#1")

    @pytest.fixture
    def later(self, store: Store) -> SampleNode:
        """The next life of the same node."""
        return SampleNode(store, "web#2")

    @pytest.mark.contract("OWN-1", "OWN-3")
    async def test_what_a_former_life_held_is_claimed_at_once(
        self, store: Store, former: SampleNode, later: SampleNode
    ) -> None:
        """Nobody waits for the lease of a process that is gone, and a new epoch fences it off."""
        await former.start("run-1", wait("go"))
        late = await former.turn(await former.load("run-1"), marker("late"))
        await later.renew(is_start=True)
        [run] = await store.claim(later.name, 10)
        assert (run.head.lease_owner, run.head.lease_epoch) == ("web#2", 2)
        [answer] = await store.commit([late])
        assert isinstance(answer, CommitConflict)

    @pytest.mark.contract("OWN-3")
    async def test_others_may_claim_it_as_well(self, store: Store, former: SampleNode, later: SampleNode) -> None:
        """They are told when to look."""
        await former.start("run-1", wait("go"))
        other = SampleNode(store, "node-b")
        await other.renew()
        assert await store.claim("node-b", 10) == []
        await later.renew(is_start=True)
        assert await store.next_due("node-b") == await store.now()
        assert [run.head.run_id for run in await store.claim("node-b", 10)] == ["run-1"]

    @pytest.mark.contract("OWN-1")
    async def test_a_life_that_is_over_gets_no_lease(
        self, store: Store, former: SampleNode, later: SampleNode, clock: VirtualClock
    ) -> None:
        """It may not claim, create or admit, and is told that another process has its name; nothing changes."""
        await former.start("run-1", wait("go"))
        await later.renew(is_start=True)
        for _ in range(2):
            async with unchanged(store):
                with pytest.raises(LeaseExpired):
                    await store.claim(former.name, 10)
                with pytest.raises(NodeSuperseded) as raised:
                    await former.renew()
            assert raised.value.details == {"node": "web"}
            await later.claim()  # afterwards nothing is left of the former life
            clock.advance(ms=1)
            await later.renew()
        assert list((await store.stats()).leases) == ["web#2"]

    @pytest.mark.contract("OWN-1")
    async def test_a_life_that_only_lost_its_lease_gets_it_again(
        self, store: Store, former: SampleNode, later: SampleNode, clock: VirtualClock
    ) -> None:
        """Also if there has been another life, which is gone as well, in good order or not."""
        await former.renew()
        clock.advance(ms=former.lease_ms)
        await former.renew()
        await later.renew(is_start=True)
        clock.advance(ms=later.lease_ms)
        await former.renew()
        await later.renew(is_start=True)
        await store.release(later.name)
        await former.renew()
        assert list((await store.stats()).leases) == ["web#1"]

    @pytest.mark.contract("OWN-1")
    async def test_other_names_are_left_alone(self, store: Store) -> None:
        """However alike they are."""
        names = ("web", "web-1#1", "webs#1", "we#1", "web$1", "WEB#1")
        for name in names:
            await SampleNode(store, name).renew(is_start=True)
        await SampleNode(store, "web#2").renew(is_start=True)
        await SampleNode(store, "web").renew(is_start=True)
        for name in names:
            await SampleNode(store, name).renew()
        assert sorted((await store.stats()).leases) == sorted([*names, "web#2"])

    @pytest.mark.contract("OWN-1")
    async def test_starting_again_in_the_same_life_changes_nothing(self, store: Store, former: SampleNode) -> None:
        """The answer to the start may have been lost."""
        await former.renew(is_start=True)
        run = await former.start("run-1", wait("go"))
        await former.renew(is_start=True)
        assert await store.claim(former.name, 10) == []
        assert isinstance(await former.commit(await former.turn(run, marker("mark"))), Committed)

    @pytest.mark.contract("OWN-1", "ACT-1")
    async def test_jobs_of_a_former_life_are_taken_at_once(self, store: Store, node: SampleNode) -> None:
        """By whoever asks, as another attempt. Those of other nodes stay theirs."""
        await put(node, job(step_id="a"), job(step_id="b"))
        assert attempts(await take(store, "web#1", limit=1)) == [("a", 1)]
        assert attempts(await take(store, "webs#1", limit=1)) == [("b", 1)]
        await SampleNode(store, "web#2").renew(is_start=True)
        assert attempts(await take(store, "web#2")) == [("a", 2)]
        stale = Beat(run_id="run-1", step_id="a", queue="mail", engine_attempt_id=1)
        assert await store.beat("web#1", [stale], VISIBLE_MS) == [False]
