"""The store suite, definitions: runs are claimed by version, and orphaned definitions are found."""

from typing import Any

import pytest

from holdfast.errors import InvalidInput
from holdfast.store.port import NodePlans, OrphanedDefinition, Plan, Store
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, message, new_run, wait
from holdfast.testing.store_suite.base import SuiteBase, unchanged

OLD, NEW = ("order", "1"), ("order", "2")
LATE_MS = 5_000
LEASE_MS = 3_600_000


async def say(store: Store, node: str, *plans: Plan, lease_ms: int = LEASE_MS) -> None:
    """Let a node publish its definitions."""
    await store.renew(node, lease_ms, plans)


class PlanSuite(SuiteBase):
    """Which node can run which definitions."""

    @pytest.mark.contract("WF-3")
    async def test_a_node_claims_only_the_versions_that_it_has(self, store: Store, clock: VirtualClock) -> None:
        """This covers free, own and orphaned runs; the node does not wait for the others either."""
        first, second = SampleNode(store, "node-a"), SampleNode(store, "node-b", LEASE_MS)
        await first.start("orphan-1", wait("go"))
        await first.start("orphan-2", wait("go"), plan_version="2")
        await store.create([new_run("free-1"), new_run("free-2", plan_version="2")])
        clock.advance(ms=first.lease_ms)
        await second.renew()
        strange = [("order", "3"), ("order 1", ""), ("", "order\n1"), ("1", "order")]
        assert await store.claim("node-b", 10, strange) == []
        assert await store.next_due("node-b", [("order", "3")]) is None
        assert sorted(run.head.run_id for run in await store.claim("node-b", 10, [NEW])) == ["free-2", "orphan-2"]
        assert await store.next_due("node-b", [NEW]) == START
        assert sorted(run.head.run_id for run in await store.claim("node-b", 10, [NEW, OLD])) == [
            "free-1",
            "free-2",
            "orphan-1",
            "orphan-2",
        ]

    @pytest.mark.contract("WF-3", "MSG-3")
    async def test_what_no_node_alive_has_is_found_once_it_is_late(self, store: Store, clock: VirtualClock) -> None:
        """The answer says since when it waits; a definition of a live node is not orphaned, however late it is."""
        await say(store, "node-a", NEW)
        await store.create([new_run("run-1"), new_run("run-2", plan_version="2"), new_run("x", plan_id="other")])
        clock.advance(ms=LATE_MS - 1, us=999)
        assert await store.find_orphaned(LATE_MS) == []
        clock.advance(us=1)
        assert await store.find_orphaned(LATE_MS) == [
            OrphanedDefinition(OLD, START),
            OrphanedDefinition(("other", "1"), START),
        ]
        await say(store, "node-b", OLD, NEW)
        assert await store.find_orphaned(LATE_MS) == [OrphanedDefinition(("other", "1"), START)]
        await store.release("node-b")
        assert [missing.plan for missing in await store.find_orphaned(0)] == [OLD, ("other", "1")]

    @pytest.mark.contract("WF-3")
    async def test_runs_that_wait_or_have_finished_miss_nothing(self, store: Store, clock: VirtualClock) -> None:
        """Only runs that are due need their definition."""
        node = SampleNode(store, "node-a")
        await node.start("waiting", wait("go"))
        await node.start("done", complete())
        await store.release("node-a", ["waiting"])
        await node.claim()
        await node.step("waiting", release=True)
        await store.release("node-a")
        await say(store, "node-b")
        clock.advance(ms=LATE_MS)
        assert await store.find_orphaned(LATE_MS) == []
        await store.deliver([message("waiting")])
        assert await store.find_orphaned(0) == [OrphanedDefinition(OLD, clock.now())]
        assert await store.find_orphaned(1) == []

    @pytest.mark.contract("WF-3", "OWN-3")
    async def test_runs_of_a_node_that_is_gone_count_from_the_end_of_its_lease(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """While the node is alive, it is taken to have them, whatever it publishes."""
        node = SampleNode(store, "node-a", 1_000)
        await node.start("run-1", wait("go"))
        await say(store, "node-a", lease_ms=1_000)
        await say(store, "node-b", NEW)
        clock.advance(ms=999)
        assert await store.find_orphaned(0) == []
        clock.advance(ms=1)
        assert await store.find_orphaned(0) == [OrphanedDefinition(OLD, START + 1_000_000)]
        assert await store.find_orphaned(LATE_MS) == []
        clock.advance(ms=LATE_MS)
        assert await store.find_orphaned(LATE_MS) == [OrphanedDefinition(OLD, START + 1_000_000)]

    @pytest.mark.contract("WF-3", "FMT-1")
    async def test_a_node_that_says_nothing_may_have_everything(self, store: Store, clock: VirtualClock) -> None:
        """Nodes of an older version publish nothing; what was published stays until other definitions are published."""
        await store.create([new_run("run-1")])
        await say(store, "node-a")
        await store.renew("node-b", 1_000)
        assert await store.find_orphaned(0) == []
        await say(store, "node-b", NEW, lease_ms=1_000)
        await store.renew("node-b", 1_000)
        assert await store.find_orphaned(0) == [OrphanedDefinition(OLD, START)]
        await say(store, "node-b", OLD, lease_ms=1_000)
        assert await store.find_orphaned(0) == []
        clock.advance(ms=1_000)
        assert await store.find_orphaned(0) == [OrphanedDefinition(OLD, START)]

    @pytest.mark.contract("OWN-1", "OWN-3")
    async def test_runs_are_handed_over_to_a_node_with_a_lease(self, store: Store, clock: VirtualClock) -> None:
        """Only their owner can hand them over, and the receiver can continue them immediately."""
        await say(store, "node-a", OLD)
        await say(store, "node-b", OLD, lease_ms=1_000)
        await store.create([new_run("run-1"), new_run("run-2")])
        claimed = {run.head.run_id: run.head.lease_epoch for run in await store.claim("node-a", 10, [OLD])}
        assert await store.hand_over("node-b", ["run-1"], "node-a") == []
        assert await store.hand_over("node-a", ["run-1"], "node-c") == []
        assert await store.hand_over("node-a", ["run-1"], "node-a") == []
        assert await store.hand_over("node-a", [], "node-b") == []
        assert await store.hand_over("node-a", ["run-2", "run-3", "run-1", "run-1"], "node-b") == ["run-1", "run-2"]
        assert await store.claim("node-a", 10, [OLD]) == []
        given = await store.claim("node-b", 10, [OLD])
        assert {run.head.run_id for run in given} == {"run-1", "run-2"}
        assert all(run.head.lease_owner == "node-b" and run.head.losses == 0 for run in given)
        assert all(run.head.lease_epoch > claimed[run.head.run_id] for run in given)
        clock.advance(ms=1_000)
        assert len(await store.claim("node-a", 10, [OLD])) == 2
        assert await store.hand_over("node-a", ["run-1"], "node-b") == [], "its lease has ended"

    @pytest.mark.contract("OWN-1", "OWN-3")
    async def test_what_was_handed_over_is_free_when_the_node_is_released(self, store: Store) -> None:
        """This holds although they were never claimed there."""
        await say(store, "node-a", OLD)
        await say(store, "node-b", OLD)
        await store.create([new_run("run-1")])
        await store.claim("node-a", 10, [OLD])
        assert await store.hand_over("node-a", ["run-1"], "node-b") == ["run-1"]
        assert await store.release("node-b") == 1
        [back] = await store.claim("node-a", 10, [OLD])
        assert back.head.run_id == "run-1"

    @pytest.mark.contract("OWN-3")
    async def test_nodes_with_a_lease_are_found_with_what_they_have_said(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """They are in the order of their names, with what they published last."""
        assert await store.find_nodes() == []
        await say(store, "node-b", OLD, ("", "activity\nship"), lease_ms=1_000)
        await say(store, "node-a", OLD)
        await store.renew("node-c", LEASE_MS)
        await say(store, "node-a", NEW, OLD)
        said = [
            NodePlans("node-a", frozenset({OLD, NEW})),
            NodePlans("node-b", frozenset({OLD, ("", "activity\nship")})),
        ]
        assert await store.find_nodes() == said
        clock.advance(ms=1_000)
        assert await store.find_nodes() == said[:1]
        await store.release("node-a")
        assert await store.find_nodes() == []

    async def test_malformed_definitions_are_refused(self, store: Store) -> None:
        """Every verb that takes definitions refuses them, and nothing changes."""
        await store.renew("node-a", LEASE_MS)
        bad: Any
        async with unchanged(store):
            for bad in (["order"], [("order",)], [("order", 1)], [("order", "\ud800")]):
                for asked in (
                    store.claim("node-a", 1, bad),
                    store.next_due("node-a", bad),
                    store.renew("node-a", 1, bad),
                ):
                    with pytest.raises(InvalidInput) as raised:
                        await asked
                    assert raised.value.details["field"].startswith("plans")
            for bad in (-1, 1.5, 2**60):
                with pytest.raises(InvalidInput) as raised:
                    await store.find_orphaned(bad)
                assert raised.value.details == {"field": "late_ms"}
