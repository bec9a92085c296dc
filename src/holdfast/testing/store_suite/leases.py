"""The store suite, leases: claims, fencing, and the next instant at which there is something to do."""

import asyncio

import pytest
from msgspec.structs import replace

from holdfast.core.plans import claimed_as
from holdfast.errors import InvalidInput, LeaseExpired
from holdfast.limits import LEASE_MS
from holdfast.store.port import CommitConflict, Committed, Store
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import (
    SampleNode,
    activity,
    complete,
    marker,
    message,
    new_run,
    record,
    signal,
    timer,
    wait,
)
from holdfast.testing.store_suite.base import SuiteBase, accept, unchanged

DAY_MS = 24 * 3_600_000
THEIRS = [("theirs", "1")]


class LeaseSuite(SuiteBase):
    """Which node owns a run."""

    @pytest.fixture
    def other(self, store: Store) -> SampleNode:
        """A second node on the same store."""
        return SampleNode(store, "node-b")

    # --- eligibility

    @pytest.mark.contract("OWN-1")
    async def test_free_run_that_is_ready_is_claimed_and_loaded(self, store: Store, node: SampleNode) -> None:
        """The claim is a lease with a new epoch, and loads everything that waits for the run."""
        await store.create([new_run("run-1")])
        await accept(store, signal("run-1", "go"))
        [run] = await node.claim()
        assert (run.head.lease_owner, run.head.lease_epoch) == ("node-a", 1)
        assert ([kept.signal_id for kept in run.messages], [kept.name for kept in run.signals]) == (["start"], ["go"])
        assert run == await node.load("run-1")

    async def test_claim_brings_activity_records(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """The next owner needs what is known about effects outside the store."""
        await node.start("run-1", wait("go"))
        await node.step("run-1", records=[record("run-1")])
        clock.advance(ms=node.lease_ms)
        [run] = await SampleNode(store, "node-b").claim()
        assert run.records == (record("run-1"),)

    async def test_free_run_that_is_not_ready_is_not_claimed(self, store: Store, node: SampleNode) -> None:
        """There is nothing to do for it."""
        await node.start("run-1", wait("go"))
        await node.step("run-1", marker("mark"), release=True)
        assert await node.claim() == []

    @pytest.mark.contract("OWN-1")
    async def test_run_of_a_living_node_is_not_claimed_by_another(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """This holds whether or not the run is ready, until the last microsecond of the lease."""
        await node.start("run-1", wait("go"))
        await node.create("run-2")
        clock.advance(ms=node.lease_ms - 1, us=999)
        assert await other.claim() == []

    @pytest.mark.contract("OWN-1")
    async def test_runs_of_a_node_whose_lease_ran_out_are_claimed_ready_or_not(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """The state of their activities is unknown; the epoch fences the former owner."""
        await node.start("run-1", wait("go"))
        await node.create("run-2")
        clock.advance(ms=node.lease_ms)
        claimed = {run.head.run_id: run.head for run in await other.claim()}
        assert {run_id: (head.lease_owner, head.lease_epoch) for run_id, head in claimed.items()} == {
            "run-1": ("node-b", 2),
            "run-2": ("node-b", 2),
        }
        assert (claimed["run-1"].ready_at, claimed["run-2"].ready_at) == (clock.now(), START)

    @pytest.mark.contract("OWN-3")
    async def test_orphans_of_nodes_that_died_together_are_claimed_in_order_of_creation(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """The order does not depend on which node held them."""
        for number, owner in enumerate((other, node, other, node)):
            await owner.start(f"run-{number}", wait("go"))
        clock.advance(ms=node.lease_ms)
        claimed = await SampleNode(store, "node-c").claim(3)
        assert [run.head.run_id for run in claimed] == ["run-0", "run-1", "run-2"]

    @pytest.mark.contract("WF-3")
    async def test_runs_of_other_plans_are_left_to_others(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """Free, own or orphaned: a node neither claims nor waits for runs whose definition it lacks."""
        await node.start("own", wait("go"), plan_id="mine")
        await node.start("strange", wait("go"), plan_id="theirs")
        await store.create([new_run("free", plan_id="theirs")])
        await other.renew()
        assert await store.claim(other.name, 10, [("mine", "1")]) == []
        assert await store.claim(other.name, 10, []) == []
        assert await store.next_due(other.name, []) is None
        assert await store.next_due(other.name, THEIRS) == START
        clock.advance(ms=node.lease_ms)
        await other.renew()
        assert [run.head.run_id for run in await store.claim(other.name, 10, [("mine", "1")])] == ["own"]
        assert sorted(run.head.run_id for run in await store.claim(other.name, 10, THEIRS)) == ["free", "strange"]

    @pytest.mark.contract("OWN-3", "INV")
    async def test_a_claim_whose_answer_was_lost_hands_the_runs_out_again(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """A run that was taken over and not committed is ready: otherwise no node would ever see its activities."""
        await node.start("run-1", activity("charge"))
        clock.advance(ms=node.lease_ms)
        [lost] = await other.claim()
        [again] = await other.claim()
        assert again == lost
        assert again.head.ready_at == clock.now()

    @pytest.mark.contract("OWN-1")
    async def test_own_run_that_is_ready_is_claimed_again_at_the_same_epoch(
        self, store: Store, node: SampleNode
    ) -> None:
        """A node continues what it holds; only a new owner advances the epoch."""
        await node.start("run-1", wait("go"))
        await node.start("run-2", wait("go"))
        await accept(store, signal("run-2", "go"))
        for _ in range(2):
            [run] = await node.claim()
            assert (run.head.run_id, run.head.lease_epoch) == ("run-2", 1)

    async def test_finished_run_is_never_claimed(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """This holds even when its last owner is gone."""
        await node.start("run-1", complete())
        clock.advance(ms=10 * node.lease_ms)
        assert await other.claim() == []

    # --- order, limit, lease

    async def test_runs_that_were_ready_for_longest_come_first(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Their ids and ages do not matter; the rest is left for the next claim. The same holds for own runs."""
        for run_id, due_us in (("run-b", 3_000), ("run-c", 1_000), ("run-a", 2_000)):
            first = message(run_id, "start", due_at=START + due_us)
            await store.create([replace(new_run(run_id), messages=(first,))])
        clock.advance(ms=5)
        assert [run.head.run_id for run in await node.claim(2)] == ["run-c", "run-a"]
        assert [run.head.run_id for run in await node.claim(3)] == ["run-c", "run-a", "run-b"]
        assert [run.head.run_id for run in await node.claim(1)] == ["run-c"]

    async def test_runs_of_one_instant_come_in_order_of_creation(self, store: Store, node: SampleNode) -> None:
        """Ids do not matter: they do not reflect age."""
        await store.create([new_run("run-c"), new_run("run-a")])
        await store.create([new_run("run-b")])
        assert [run.head.run_id for run in await node.claim(2)] == ["run-c", "run-a"]
        assert [run.head.run_id for run in await SampleNode(store, "node-b").claim()] == ["run-b"]

    async def test_orphan_is_as_old_as_the_end_of_its_lease(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """It is in the same line as runs that are ready."""
        await node.start("run-b", wait("go"))
        clock.advance(ms=node.lease_ms - 1)
        await store.create([new_run("run-c", now=clock.now())])
        clock.advance(ms=2)
        await store.create([new_run("run-a", now=clock.now())])
        assert [run.head.run_id for run in await other.claim()] == ["run-c", "run-b", "run-a"]

    async def test_orphans_of_nodes_that_died_together_come_in_order_of_creation(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """This holds for any owners and any limit."""
        for number, owner in enumerate((other, node, other, node)):
            await owner.start(f"run-{number}", wait("go"))
        clock.advance(ms=node.lease_ms)
        heir = SampleNode(store, "node-c")
        assert [run.head.run_id for run in await heir.claim(3)] == ["run-0", "run-1", "run-2"]
        assert [run.head.run_id for run in await SampleNode(store, "node-d").claim(3)] == ["run-3"]

    async def test_claim_of_fewer_than_one_is_refused(self, store: Store, node: SampleNode) -> None:
        """A limit is at least 1."""
        await node.renew()
        for limit in (0, -1):
            with pytest.raises(InvalidInput) as raised:
                await store.claim("node-a", limit)
            assert raised.value.details == {"field": "limit"}

    @pytest.mark.contract("OWN-1")
    async def test_claim_needs_a_current_lease(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """A node that never renewed, or whose lease expired or was released, cannot claim."""
        await store.create([new_run("run-1")])

        async def check_refused() -> None:
            async with unchanged(store):
                with pytest.raises(LeaseExpired) as raised:
                    await store.claim("node-a", 10)
            assert raised.value.details == {"node": "node-a"}

        await check_refused()
        await node.renew()
        clock.advance(ms=node.lease_ms)
        await check_refused()
        await node.renew()
        await store.release("node-a")
        await check_refused()
        assert len(await node.claim()) == 1

    @pytest.mark.contract("OWN-1")
    async def test_simultaneous_claims_share_out_the_runs(self, store: Store, peer: Store, node: SampleNode) -> None:
        """Each run goes to exactly one node."""
        await store.create([new_run(f"run-{number:02}") for number in range(20)])
        names = ("node-a", "node-b", "node-c", "node-d")
        for name in names:
            await store.renew(name, 30_000)
        ways = zip((store, peer, store, peer), names, strict=True)
        shares = await asyncio.gather(*(way.claim(name, 5) for way, name in ways))
        assert sorted(run.head.run_id for share in shares for run in share) == [f"run-{n:02}" for n in range(20)]
        assert all(
            (run.head.lease_owner, run.head.lease_epoch) == (name, 1)
            for name, share in zip(names, shares, strict=True)
            for run in share
        )

    # --- fencing

    @pytest.mark.contract("OWN-1")
    async def test_former_owner_cannot_commit_after_a_takeover(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """This holds however late it notices, and even after it renews its lease; the new owner continues."""
        turn = await node.turn(await node.start("run-1", wait("go")), marker("mark"))
        clock.advance(ms=node.lease_ms)
        [run] = await other.claim()
        await node.renew()
        async with unchanged(store):
            assert await node.commit(turn) == CommitConflict("epoch", 3, 2)
        assert isinstance(await other.commit(await other.turn(run, marker("mark"))), Committed)

    @pytest.mark.contract("OWN-1")
    async def test_owner_whose_lease_ran_out_still_commits_while_no_other_node_has_claimed_the_run(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The epoch is what fences, not the clock."""
        turn = await node.turn(await node.start("run-1", wait("go")), marker("mark"))
        clock.advance(ms=2 * node.lease_ms)
        assert isinstance(await node.commit(turn), Committed)

    @pytest.mark.contract("OWN-1")
    async def test_epoch_grows_with_every_claim_by_a_new_owner(
        self, store: Store, node: SampleNode, other: SampleNode
    ) -> None:
        """It also grows when an owner releases the run: its earlier turns are void, even if it claims the run again."""
        await store.create([new_run("run-1")])
        epochs = []
        for owner in (node, other, node, node):
            [run] = await owner.claim()
            epochs.append(run.head.lease_epoch)
            await store.release(owner.name, ["run-1"])
        assert epochs == [1, 3, 5, 7]

    # --- renewing

    async def test_renewed_lease_lasts_from_now(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """The answer is its end; renewing in time keeps the runs."""
        await node.start("run-1", wait("go"))
        for _ in range(3):
            clock.advance(ms=20_000)
            assert await store.renew("node-a", 30_000) == clock.now() + 30_000_000
        assert await SampleNode(store, "node-b").claim() == []
        assert (await store.stats()).nodes == 2

    async def test_renewed_lease_may_be_shorter_than_before(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The last renewal counts: the lease ends then, and any node may claim the runs."""
        await node.start("run-1", wait("go"))
        assert await store.renew("node-a", 1) == START + 1_000
        clock.advance(ms=1)
        assert len(await SampleNode(store, "node-b").claim()) == 1

    async def test_malformed_lease_is_refused(self, store: Store) -> None:
        """A lease needs a node with a name, and a duration from a millisecond to the maximum."""
        bad = (("", 1_000, "node"), ("a\nb", 1_000, "node"), ("a", 0, "lease_ms"), ("a", LEASE_MS + 1, "lease_ms"))
        for name, lease_ms, field in bad:
            async with unchanged(store):
                with pytest.raises(InvalidInput) as raised:
                    await store.renew(name, lease_ms)
            assert raised.value.details == {"field": field}

    @pytest.mark.contract("OWN-3")
    async def test_lease_of_a_clock_that_was_ahead_does_not_count_once_it_is_set_right(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """No run waits for a day because a clock was wrong for a moment; the owner has to renew, too."""
        await store.create([new_run("run-1")])
        clock.advance(ms=DAY_MS)
        await node.start("run-2", wait("go"))
        clock.set_back(ms=DAY_MS)
        assert await store.next_due("node-b") == clock.now()
        assert (await store.stats()).nodes == 0
        with pytest.raises(LeaseExpired):
            await store.claim("node-a", 10)
        assert [run.head.run_id for run in await other.claim()] == ["run-1", "run-2"]
        await store.renew("node-a", 1_000)
        assert await store.claim("node-a", 10) == []

    @pytest.mark.contract("OWN-1")
    async def test_longest_lease_counts_to_its_end(self, store: Store, clock: VirtualClock, other: SampleNode) -> None:
        """This includes clocks that are behind the one that granted it, by up to that duration."""
        owner = SampleNode(store, "node-a", lease_ms=LEASE_MS)
        await owner.start("run-1", wait("go"))
        assert await other.claim() == []
        clock.set_back(ms=LEASE_MS)
        assert await other.claim() == []
        assert await store.next_due("node-b") == START + LEASE_MS * 1_000
        clock.set_back(ms=1)
        assert await store.next_due("node-b") == clock.now()
        assert len(await other.claim()) == 1

    # --- releasing

    @pytest.mark.contract("OWN-1")
    async def test_released_runs_are_free_and_ready_at_once(
        self, store: Store, clock: VirtualClock, node: SampleNode, other: SampleNode
    ) -> None:
        """The former owner may have left activities undone. The other runs stay, and so does the lease."""
        await node.start("run-1", wait("go"))
        await node.start("run-2", timer(START + 60_000_000))
        await node.start("run-3", wait("go"))
        clock.advance(ms=1)
        assert await store.release("node-a", ["run-1", "run-2"]) == 2
        for run_id in ("run-1", "run-2"):
            head = (await node.load(run_id)).head
            assert (head.lease_owner, head.lease_epoch, head.ready_at) == (None, 2, clock.now())
        assert sorted(run.head.run_id for run in await other.claim()) == ["run-1", "run-2"]
        assert await store.claim("node-a", 10) == []

    async def test_released_run_that_was_ready_before_stays_ready_since_then(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """It keeps its rank."""
        await node.create("run-1")
        clock.advance(ms=1)
        await store.release("node-a", ["run-1"])
        assert (await node.load("run-1")).head.ready_at == START

    async def test_releasing_all_frees_every_run_and_ends_the_lease(
        self, store: Store, node: SampleNode, other: SampleNode
    ) -> None:
        """A node does this before it stops."""
        for number in range(3):
            await node.start(f"run-{number}", wait("go"))
        await node.start("run-9", complete())
        assert await store.release("node-a") == 3
        assert (await store.stats()).nodes == 0
        assert [run.head.lease_epoch for run in await other.claim()] == [3, 3, 3]

    async def test_a_node_releases_only_its_own_runs(self, store: Store, node: SampleNode, other: SampleNode) -> None:
        """Runs without an owner and unknown runs are not released either."""
        await node.start("run-1", wait("go"))
        await store.create([new_run("run-2")])
        await other.renew()
        async with unchanged(store):
            assert await store.release("node-b", ["run-1", "run-2", "missing"]) == 0
            assert await store.release("node-a", []) == 0
        assert await store.release("node-b") == 0

    # --- the next instant

    @pytest.mark.contract("TMR-1")
    async def test_nothing_is_due_in_an_empty_store_or_for_finished_and_waiting_runs(
        self, store: Store, node: SampleNode
    ) -> None:
        """A node may then sleep until it is notified."""
        assert await store.next_due("node-a") is None
        await node.start("run-1", complete())
        await node.start("run-2", wait("go"))
        await store.renew("node-b", 1_000)
        assert await store.next_due("node-a") is None

    @pytest.mark.contract("TMR-1")
    async def test_next_due_is_when_a_free_or_own_run_becomes_ready(self, store: Store, node: SampleNode) -> None:
        """The earliest one counts; a run that is already ready was due in the past."""
        await node.start("run-1", timer(START + 9_000))
        assert await store.next_due("node-a") == START + 9_000
        await node.start("run-2", timer(START + 5_000))
        await node.step("run-2", marker("mark"), release=True)
        assert await store.next_due("node-a") == START + 5_000
        await store.create([new_run("run-3")])
        assert await store.next_due("node-a") == START

    @pytest.mark.contract("TMR-1")
    async def test_next_due_for_others_is_the_end_of_the_owners_lease(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Until then only its owner handles the run, even if it is ready."""
        await node.create("run-1")
        await store.deliver([message("run-1", "m-1")])
        assert await store.next_due("node-a") == START
        assert await store.next_due("node-b") == START + node.lease_ms * 1_000
        clock.advance(ms=1)
        end = await node.renew()
        assert await store.next_due("node-b") == end == clock.now() + node.lease_ms * 1_000

    @pytest.mark.contract("FMT-1")
    async def test_run_that_needs_a_level_is_claimed_by_nodes_that_ask_for_it(
        self, store: Store, node: SampleNode, clock: VirtualClock
    ) -> None:
        """Other nodes neither claim it nor see it as due. Its definition is orphaned if no node has that level."""
        plan, later = ("order", "1"), claimed_as("order", "1", 7)
        new = new_run("later", now=await store.now())
        # The second run has published a value of that name, and needs no level.
        plain = replace(new_run("plain", now=await store.now()), snapshot=replace(new.snapshot, published={"needs": 7}))
        await store.create([replace(new, snapshot=replace(new.snapshot, needs=7)), plain])
        await store.renew(node.name, 30_000, [plan])
        [claimed] = await store.claim(node.name, 10, [plan])
        assert claimed.head.run_id == "plain"
        await node.commit(await node.turn(claimed, complete()))
        assert await store.next_due(node.name, [plan]) is None
        clock.advance(ms=10_000)
        await store.renew(node.name, 30_000, [plan])
        assert await store.find_orphaned(1_000) == []
        assert await store.claim(node.name, 10, [plan]) == []
        await store.renew(node.name, 30_000, [])
        assert [each.plan for each in await store.find_orphaned(1_000)] == [later]
        other = SampleNode(store, "node-b")
        await other.renew()
        due = await store.next_due(other.name, [plan, later])
        assert due is not None
        assert due <= clock.now()
        [run] = await store.claim(other.name, 10, [plan, later])
        assert (run.head.run_id, run.head.needs) == ("later", 7)
        # Once it needs no level, every node may continue it: here when the owner is gone.
        turn = await other.turn(run, wait("go"))
        await other.commit(replace(turn, snapshot=replace(turn.snapshot, needs=7)))
        clock.advance(ms=60_000)
        await node.renew()
        assert await store.claim(node.name, 10, [plan]) == []
        [again] = await store.claim(node.name, 10, [later])
        await node.step("later", release=True)
        await store.deliver([signal("later", "go")])
        [last] = await store.claim(node.name, 10, [plan])
        assert (last.head.run_id, again.head.run_id) == ("later", "later")

    @pytest.mark.contract("TMR-1")
    async def test_timer_makes_its_run_claimable_exactly_when_it_is_due(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """A node that sleeps until `next_due` finds something then, and nothing before."""
        await node.start("run-1", timer(START + 5_000_000))
        due_at = await store.next_due("node-a")
        assert due_at == START + 5_000_000
        clock.advance(us=due_at - clock.now() - 1)
        assert await node.claim() == []
        clock.advance(us=1)
        assert len(await node.claim()) == 1
        await node.step("run-1")
        assert await store.next_due("node-a") is None
