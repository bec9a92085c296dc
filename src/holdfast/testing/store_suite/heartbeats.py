"""The store suite, heartbeats: activities that are still running, and the details of their progress."""

import pytest
from msgspec import UNSET, Raw, UnsetType

from holdfast.core import codec
from holdfast.errors import InvalidInput
from holdfast.limits import JSON_DEPTH
from holdfast.store.port import Heartbeat, Store
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, activity, complete, job, wait
from holdfast.testing.store_suite.base import BAD_NAMES, SuiteBase, unchanged
from holdfast.testing.store_suite.jobs import VISIBLE_MS, acquire, attempts, close, put


def beat(
    step_id: str = "charge", queue: str = "mail", *, run_id: str = "run-1", attempt: int = 1, details: object = UNSET
) -> Heartbeat:
    """Return a heartbeat, with details if they are given."""
    said: Raw | UnsetType = UNSET if details is UNSET else codec.encode(details)
    return Heartbeat(run_id=run_id, step_id=step_id, queue=queue, engine_attempt_id=attempt, details=said)


async def send(store: Store, one: Heartbeat, node: str = "node-b") -> bool:
    """Send one heartbeat and return its answer."""
    [is_kept] = await store.heartbeat(node, [one], VISIBLE_MS)
    return is_kept


class HeartbeatSuite(SuiteBase):
    """Which node still executes an activity, and the details of its progress."""

    # --- jobs

    @pytest.mark.contract("ACT-1")
    async def test_heartbeat_keeps_a_job_for_longer(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """Each heartbeat extends it from now on; after that any node may acquire it."""
        await put(node, job())
        await acquire(store)
        for _ in range(3):
            clock.advance(ms=VISIBLE_MS - 1)
            assert await send(store, beat())
        clock.advance(ms=VISIBLE_MS - 1, us=999)
        assert await acquire(store, "node-c") == []
        clock.advance(us=1)
        assert attempts(await acquire(store, "node-c")) == [("charge", 2)]

    @pytest.mark.contract("ACT-1")
    async def test_late_heartbeat_counts_while_no_other_node_has_acquired_the_job(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """As with leases, the next acquisition fences, not the clock."""
        await put(node, job())
        await acquire(store)
        clock.advance(ms=5 * VISIBLE_MS)
        assert await send(store, beat())
        assert await acquire(store) == []

    @pytest.mark.contract("ACT-1", "ATT-1")
    async def test_heartbeat_of_a_node_without_the_job_is_refused(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The cases: another node, an earlier attempt of the same node, a job that was not acquired, an unknown run."""
        await put(node, job(), job(step_id="other", queue="post"))
        await acquire(store)
        clock.advance(ms=VISIBLE_MS)
        await acquire(store)
        async with unchanged(store):
            assert not await send(store, beat(attempt=2, details="no"), "node-c")
            assert not await send(store, beat(attempt=1, details="no"))
            assert not await send(store, beat(attempt=3, details="no"))
            assert not await send(store, beat("other", "post", details="no"))
            assert not await send(store, beat("other", "post", attempt=0, details="no"))
            assert not await send(store, beat("unknown", details="no"))
            assert not await send(store, beat(run_id="unknown", details="no"))
        assert await send(store, beat(attempt=2))

    @pytest.mark.contract("ACT-1")
    async def test_each_heartbeat_of_a_batch_has_its_own_answer(self, store: Store, node: SampleNode) -> None:
        """The answers are in the order of the heartbeats."""
        await put(node, job(step_id="a"), job(step_id="b"))
        await acquire(store, limit=1)
        beats = [beat("b"), beat("a", details=1), beat("none"), beat("a", details=2)]
        assert await store.heartbeat("node-b", beats, VISIBLE_MS) == [False, True, False, True]
        assert await store.heartbeat("node-b", [], VISIBLE_MS) == []
        assert (await node.load("run-1")).details == {"a": codec.encode(2)}

    @pytest.mark.contract("ACT-1", "OWN-3")
    async def test_next_attempt_gets_the_details(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """It gets the last ones sent: a heartbeat without details keeps them. Null is a value like any other."""
        await put(node, job())
        for attempt, details in enumerate(({"line": 7}, None, [1]), 1):
            [taken] = await acquire(store)
            assert await send(store, beat(attempt=attempt, details="first"))
            assert await send(store, beat(attempt=attempt, details=details))
            assert await send(store, beat(attempt=attempt))
            assert (await node.load("run-1")).details == {"charge": codec.encode(details)}
            clock.advance(ms=VISIBLE_MS)
        [taken] = await acquire(store)
        assert taken == job(attempt=4, details=[1])

    @pytest.mark.contract("ACT-1")
    async def test_job_that_is_put_again_keeps_the_details(self, store: Store, node: SampleNode) -> None:
        """Its next attempt gets them. Heartbeats of the former node are refused."""
        await put(node, job(details="from the turn"))
        [taken] = await acquire(store)
        assert taken == job(details="from the turn")
        await send(store, beat(details="half"))
        await put(node, job(attempt=2, details="older"))
        assert not await send(store, beat(details="late"))
        assert await acquire(store) == [job(attempt=2, details="half")]

    @pytest.mark.contract("ACT-1")
    async def test_closing_a_step_ends_its_heartbeats_and_deletes_its_details(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """A late heartbeat leaves no trace, and a job that is queued after it has no details."""
        await put(node, job())
        await acquire(store)
        await send(store, beat(details="half"))
        await close(node, "charge")
        async with unchanged(store):
            assert not await send(store, beat(details="late"))
        assert (await node.load("run-1")).details == {}
        await put(node, job())
        assert await acquire(store) == [job()]

    @pytest.mark.contract("ACT-1", "OWN-3")
    async def test_details_survive_the_loss_of_worker_and_owner(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The next owner of the run gets them too."""
        await put(node, job())
        await acquire(store)
        await send(store, beat(details="half"))
        clock.advance(ms=node.lease_ms)
        [run] = await SampleNode(store, "node-c").claim()
        assert run.details == {"charge": codec.encode("half")}
        assert await acquire(store, "node-d") == [job(attempt=2, details="half")]

    # --- activities of the run's owner

    @pytest.mark.contract("ACT-1", "OWN-3")
    async def test_owner_keeps_details_that_its_heir_finds(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """They are not a job: they are not acquired, not counted, and never due."""
        await node.start("run-1", activity("charge"))
        assert await send(store, beat(queue=""), "node-a")
        assert (await node.load("run-1")).details == {}
        for details in ("begun", "half"):
            assert await send(store, beat(queue="", details=details), "node-a")
        assert await send(store, beat(queue=""), "node-a")
        assert ((await store.stats()).jobs, await store.next_due("x", [], ["mail"])) == (0, None)
        clock.advance(ms=node.lease_ms)
        assert await acquire(store) == []
        heir = SampleNode(store, "node-b")
        [run] = await heir.claim()
        assert run.details == {"charge": codec.encode("half")}
        async with unchanged(store):
            assert not await send(store, beat(queue="", details="late"), "node-a")
        assert await send(store, beat(queue="", details="more"), "node-b")

    @pytest.mark.contract("ACT-1", "OWN-1")
    async def test_only_the_owner_of_an_unfinished_run_heartbeats_without_a_queue(
        self, store: Store, node: SampleNode
    ) -> None:
        """This holds with or without details, and excludes queued steps."""
        await put(node, job())
        await node.start("done", complete())
        async with unchanged(store):
            for details in (UNSET, "half"):
                assert not await send(store, beat("x", "", details=details), "node-b")
                assert not await send(store, beat("x", "", run_id="done", details=details), "node-a")
                assert not await send(store, beat("x", "", run_id="unknown", details=details), "node-a")
                assert not await send(store, beat("charge", "", details=details), "node-a")
        await store.release("node-a", ["run-1"])
        async with unchanged(store):
            assert not await send(store, beat("x", "", details="half"), "node-a")

    @pytest.mark.contract("ACT-1", "INV")
    async def test_owners_details_go_with_the_step_and_with_the_run(self, store: Store, node: SampleNode) -> None:
        """They stay when the step is queued."""
        await node.start("run-1", wait("go"))
        for step_id in ("a", "b", "c"):
            await send(store, beat(step_id, "", details=step_id), "node-a")
        await close(node, "a")
        await put(node, job(step_id="b"))
        assert sorted((await node.load("run-1")).details) == ["b", "c"]
        assert await acquire(store) == [job(step_id="b", details="b")]
        assert (await node.step("run-1", complete())).details == {}

    # --- refusals

    @pytest.mark.contract("API-2")
    async def test_malformed_heartbeat_is_refused_with_its_batch(self, store: Store, node: SampleNode) -> None:
        """Nothing of the batch is stored."""
        await put(node, job())
        await acquire(store)
        deep = Raw(b"[" * (JSON_DEPTH + 1) + b"]" * (JSON_DEPTH + 1))
        bad: list[object] = [None, job()]
        for field in ("run_id", "step_id", "queue"):
            bad += [
                Heartbeat(**{"run_id": "run-1", "step_id": "charge", field: name})  # type: ignore[arg-type]
                for name in BAD_NAMES
                if (field, name) != ("queue", "")
            ]
        for attempt in (1.5, "1", None, 2**62):
            bad.append(Heartbeat(run_id="run-1", step_id="charge", engine_attempt_id=attempt))  # type: ignore[arg-type]
        for details in (deep, Raw(b"{oops"), Raw(b""), b"{}", {"a": 1}, None):
            bad.append(Heartbeat(run_id="run-1", step_id="charge", details=details))  # type: ignore[arg-type]
        async with unchanged(store):
            for one in bad:
                with pytest.raises(InvalidInput):
                    await store.heartbeat("node-b", [beat(details="half"), one], VISIBLE_MS)  # type: ignore[list-item]
            for name, visible_ms in (("", 1), ("a\nb", 1), ("node-b", 0), ("node-b", 2**40), ("node-b", 1.5)):
                with pytest.raises(InvalidInput):
                    await store.heartbeat(name, [beat(details="half")], visible_ms)  # type: ignore[arg-type]
            with pytest.raises(InvalidInput):
                await store.heartbeat("node-b", [beat()] * (self.limits.batch_items + 1), VISIBLE_MS)
