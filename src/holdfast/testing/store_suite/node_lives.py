"""The store suite, lives of nodes: a process that starts under a name takes over, and the former one is refused."""

import pytest
from msgspec.structs import replace

from holdfast.errors import LeaseExpired, NodeSuperseded
from holdfast.store.port import CommitConflict, Committed, Heartbeat, Store
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, job, marker, wait
from holdfast.testing.store_suite.base import SuiteBase, unchanged
from holdfast.testing.store_suite.jobs import VISIBLE_MS, acquire, attempts, put


class NodeLifeSuite(SuiteBase):
    """Nodes that have several lives under the same name."""

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
        """No run waits for the lease of a dead process, and a new epoch fences that process off."""
        await former.start("run-1", wait("go"))
        late = await former.turn(await former.load("run-1"), marker("late"))
        await later.renew(is_start=True)
        [run] = await store.claim(later.name, 10)
        assert (run.head.lease_owner, run.head.lease_epoch) == ("web#2", 2)
        [answer] = await store.commit([late])
        assert isinstance(answer, CommitConflict)

    @pytest.mark.contract("OWN-3")
    async def test_others_may_claim_it_as_well(self, store: Store, former: SampleNode, later: SampleNode) -> None:
        """They are notified."""
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
        """It may not claim, create or admit, and gets `NodeSuperseded`; nothing changes."""
        await former.start("run-1", wait("go"))
        await later.renew(is_start=True)
        for _ in range(2):
            async with unchanged(store):
                with pytest.raises(LeaseExpired):
                    await store.claim(former.name, 10)
                with pytest.raises(NodeSuperseded) as raised:
                    await former.renew()
            assert raised.value.details == {"node": "web"}
            await later.claim()  # this leaves nothing with the former life
            clock.advance(ms=1)
            await later.renew()
        assert list((await store.stats()).leases) == ["web#2"]

    @pytest.mark.contract("OWN-1")
    async def test_a_life_that_only_lost_its_lease_gets_it_again(
        self, store: Store, former: SampleNode, later: SampleNode, clock: VirtualClock
    ) -> None:
        """This holds even if there was another life that has ended as well, cleanly or not."""
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
        """This holds however similar they are."""
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
    async def test_jobs_of_a_former_life_are_acquired_at_once(self, store: Store, node: SampleNode) -> None:
        """Any node can acquire them, as another attempt. Other nodes keep theirs."""
        await put(node, job(step_id="a"), job(step_id="b"))
        assert attempts(await acquire(store, "web#1", limit=1)) == [("a", 1)]
        assert attempts(await acquire(store, "webs#1", limit=1)) == [("b", 1)]
        await SampleNode(store, "web#2").renew(is_start=True)
        assert attempts(await acquire(store, "web#2")) == [("a", 2)]
        stale = Heartbeat(run_id="run-1", step_id="a", queue="mail", engine_attempt_id=1)
        assert await store.heartbeat("web#1", [stale], VISIBLE_MS) == [False]


class LostNodeSuite(SuiteBase):
    """How often a run has lost the node that owned it."""

    async def _lose(self, store: Store, clock: VirtualClock, name: str) -> int:
        """Let the run's owner expire, claim the run with another node, and return the loss count."""
        clock.advance(ms=30_000)
        [run] = await SampleNode(store, name).claim()
        return run.head.losses

    @pytest.mark.contract("OWN-3")
    async def test_claims_from_nodes_that_are_gone_are_counted_up_to_a_bound(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Beyond the bound the node that tries the run counts, so a claim never blames the run."""
        await node.start("run-1", wait("go"))
        assert (await node.load("run-1")).head.losses == 0
        assert [await self._lose(store, clock, f"node-{n}") for n in "bcdef"] == [1, 2, 2, 2, 2]

    @pytest.mark.contract("OWN-3")
    async def test_a_turn_sets_the_count(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """It sets 0, unless the turn has another count, with or without events; claims count on from there."""
        await node.start("run-1", wait("go"))
        for name, before, after in (("b", 1, 0), ("c", 1, 5), ("d", 5, 4), ("e", 4, 0), ("f", 1, 1)):
            assert await self._lose(store, clock, f"node-{name}") == before
            heir = SampleNode(store, f"node-{name}")
            loaded = await heir.load("run-1")
            turn = await heir.turn(loaded, marker(f"mark-{name}")) if name in "be" else await heir.turn(loaded)
            assert isinstance(await heir.commit(replace(turn, losses=after)), Committed)
            assert (await heir.load("run-1")).head.losses == after

    @pytest.mark.contract("OWN-3")
    async def test_what_is_given_back_or_claimed_again_is_not_lost(self, store: Store, node: SampleNode) -> None:
        """A turn that comes too late does not change the count either."""
        run = await node.start("run-1", wait("go"))
        late = replace(await node.turn(run, marker("late")), losses=7)
        await store.release("node-a")
        other = SampleNode(store, "node-b")
        for _ in range(2):
            [run] = await other.claim()
            assert run.head.losses == 0
        assert isinstance(await node.commit(late), CommitConflict)
        assert (await other.load("run-1")).head.losses == 0

    @pytest.mark.contract("OWN-1", "OWN-3")
    async def test_what_a_former_life_held_was_lost(self, store: Store) -> None:
        """This holds however soon the node restarts."""
        await SampleNode(store, "web#1").start("run-1", wait("go"))
        later = SampleNode(store, "web#2")
        await later.renew(is_start=True)
        [run] = await store.claim("web#2", 10)
        assert run.head.losses == 1
