"""The store suite, limits on activities: which calls get a place and when, across all nodes, and what frees it."""

from collections.abc import Mapping, Sequence

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.call_limits import LIMITED, CallLimit
from holdfast.core.instants import Instant
from holdfast.errors import CheckpointOwnershipCapabilityError, InvalidInput
from holdfast.store.port import Accepted, Heartbeat, Job, PlaceQuery, Store
from holdfast.store.types import CALL_LIMITS
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, job
from holdfast.testing.store_suite.base import BAD_NAMES, SuiteBase, deliver_one
from holdfast.testing.store_suite.jobs import VISIBLE_MS, close, ended, put

QUEUE = f"{LIMITED}mail"
NAME = "api"
MS = 1_000
"""A millisecond in the unit of instants."""


def call(step_id: str, key: str = "", *, tenant: str = "acme", name: str = NAME, run: str = "run-1") -> Job:
    """Return a call of an activity that has a limit."""
    options = Raw(codec.encode({"limit": {"name": name, "key": key}}))
    return replace(job(run, step_id, QUEUE), options=options, tenant=tenant)


async def ask(
    store: Store,
    limit: CallLimit | None = None,
    most: int = 20,
    *,
    node: str = "node-b",
    queues: Sequence[str] = (QUEUE,),
    activities: Sequence[str] = ("charge",),
    limits: Mapping[str, CallLimit] | None = None,
) -> tuple[list[Job], Instant | None]:
    """Acquire for `VISIBLE_MS` under a limit of this name."""
    known = {NAME: limit} if limit is not None else limits or {}
    return await store.acquire_limited_jobs(node, queues, activities, known, most, VISIBLE_MS)


async def steps(store: Store, limit: CallLimit, most: int = 20, node: str = "node-b") -> list[str]:
    """Acquire, and return the steps."""
    return [one.step_id for one in (await ask(store, limit, most, node=node))[0]]


def beat(one: Job) -> Heartbeat:
    """Return a heartbeat of an attempt."""
    return Heartbeat(run_id=one.run_id, step_id=one.step_id, queue=one.queue, engine_attempt_id=one.engine_attempt_id)


class CallLimitSuite(SuiteBase):
    """Limits on activities."""

    async def _lacks_limits(self, store: Store) -> bool:
        """Return whether the store does not support these limits; if so, check that it declares that."""
        if CALL_LIMITS not in store.capabilities.lacking:
            return False
        with pytest.raises(CheckpointOwnershipCapabilityError) as refused:
            await ask(store, CallLimit(at_once=1))
        assert refused.value.details["capability"] == CALL_LIMITS
        return True

    @pytest.mark.contract("ACT-7")
    async def test_limit_bounds_attempts_under_way_over_all_nodes(
        self, store: Store, peer: Store, node: SampleNode
    ) -> None:
        """A place is free when the outcome of its attempt is delivered, whether or not the run has recorded it."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(at_once=2)
        await put(node, *(call(f"s{number}") for number in range(4)))
        jobs, again_at = await ask(store, limit)
        assert [one.step_id for one in jobs] == ["s0", "s1"]
        assert jobs[0] == call("s0")
        assert again_at == START + VISIBLE_MS * MS  # a place expires
        assert await steps(peer, limit, node="node-c") == []
        assert isinstance(await deliver_one(store, ended(jobs[1], "failed")), Accepted)
        assert await steps(peer, limit, node="node-c") == ["s2"]
        assert isinstance(await deliver_one(peer, ended(jobs[0], "done")), Accepted)
        assert await steps(store, limit) == ["s3"]
        assert await steps(store, limit) == []

    @pytest.mark.contract("ACT-7")
    async def test_place_is_free_when_its_step_is_closed(self, store: Store, node: SampleNode) -> None:
        """A cancellation or a timeout closes it: the attempt may still be running."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(at_once=1)
        await put(node, call("s0"), call("s1"))
        assert await steps(store, limit) == ["s0"]
        await close(node, "s0")
        assert await steps(store, limit) == ["s1"]

    @pytest.mark.contract("ACT-7")
    async def test_place_of_a_silent_node_is_free_after_its_time_out_and_stays_lost(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """A late heartbeat is refused even if the place is still free; otherwise one attempt too many could run."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(at_once=1)
        await put(node, call("s0"), call("s1"))
        [[first], _] = await ask(store, limit)
        clock.advance(ms=VISIBLE_MS - 1)
        assert await store.heartbeat("node-b", [beat(first)], VISIBLE_MS) == [True]
        clock.advance(ms=VISIBLE_MS - 1)
        assert await steps(store, limit, node="node-c") == []
        clock.advance(ms=1)
        assert await store.heartbeat("node-b", [beat(first)], VISIBLE_MS) == [False]
        assert await steps(store, limit, node="node-c") == ["s1"]
        assert await store.heartbeat("node-b", [beat(first)], VISIBLE_MS) == [False]
        clock.advance(ms=VISIBLE_MS)
        [[again], _] = await ask(store, limit)
        assert (again.step_id, again.engine_attempt_id) == ("s0", 2)

    @pytest.mark.contract("ACT-7")
    async def test_place_that_is_given_back_is_free_at_once(self, store: Store, node: SampleNode) -> None:
        """A node that stops before it has begun gives it back."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(at_once=1)
        await put(node, call("s0"), call("s1"))
        jobs, _ = await ask(store, limit)
        assert await store.release_jobs("node-b", jobs) == 1
        [[again], _] = await ask(store, limit, node="node-c")
        assert again == jobs[0]

    @pytest.mark.contract("ACT-7")
    async def test_limit_of_a_key_holds_up_no_other_key(self, store: Store, node: SampleNode) -> None:
        """The same key of two tenants is two keys."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(per_key=1)
        await put(node, call("a0", "a"), call("a1", "a"), call("a2", "a"), call("b0", "b"), call("n0"), call("n1"))
        await put(node, call("x0", "a", tenant="zeta", run="run-2"))
        jobs, again_at = await ask(store, limit)
        assert sorted(one.step_id for one in jobs) == ["a0", "b0", "n0", "x0"]
        assert again_at == START + VISIBLE_MS * MS
        assert isinstance(await deliver_one(store, ended(next(j for j in jobs if j.step_id == "a0"), "done")), Accepted)
        assert await steps(store, limit) == ["a1"]

    @pytest.mark.contract("ACT-7")
    async def test_tenants_and_their_keys_take_turns(self, store: Store, node: SampleNode) -> None:
        """This holds however many calls a tenant has, and whenever they came; in a key, the longest due is first."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(at_once=20)
        await put(node, *(call(f"a{number}", "a") for number in range(4)), call("b0", "b"), call("b1", "b"))
        await put(node, call("z0", "q", tenant="zeta", run="run-2"), call("z1", "q", tenant="zeta", run="run-2"))
        assert await steps(store, limit, 3) == ["a0", "z0", "b0"]
        assert await steps(store, limit, 2, node="node-c") == ["z1", "a1"]
        assert await steps(store, limit) == ["b1", "a2", "a3"]

    @pytest.mark.contract("ACT-7")
    async def test_rate_is_exact_in_every_window(
        self, store: Store, peer: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """An attempt counts from its start, however it ends, including those of lost nodes and those given back."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(calls=2, period_ms=100)
        await put(node, *(call(f"s{number}") for number in range(6)))
        jobs, _ = await ask(store, limit, 1)
        assert await store.release_jobs("node-b", jobs) == 1
        clock.advance(ms=60)
        [[again], again_at] = await ask(store, limit)
        assert again == jobs[0]
        assert again_at == START + 100 * MS
        clock.advance(ms=39)
        assert await ask(peer, limit, node="node-c") == ([], START + 100 * MS)
        clock.advance(ms=1)
        assert await steps(peer, limit, node="node-c") == ["s1"]
        assert await ask(store, limit) == ([], START + 160 * MS)
        clock.advance(ms=60)
        assert await steps(store, limit) == ["s2"]

    @pytest.mark.contract("ACT-7")
    async def test_rate_of_a_key_counts_the_calls_of_that_key(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """It applies together with the rate of all calls."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(key_calls=1, key_period_ms=50, calls=3, period_ms=100)
        await put(node, *(call(f"a{number}", "a") for number in range(3)), call("b0", "b"), call("c0", "c"))
        jobs, again_at = await ask(store, limit, 2)
        assert [one.step_id for one in jobs] == ["a0", "b0"]
        assert await steps(store, limit) == ["c0"]
        assert (await ask(store, limit))[1] == START + 100 * MS
        clock.advance(ms=100)
        jobs, again_at = await ask(store, limit)
        assert [one.step_id for one in jobs] == ["a1"]
        assert again_at == START + 150 * MS

    @pytest.mark.contract("ACT-7")
    async def test_call_that_is_due_later_takes_no_place_until_then(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """A retry acquires again when its time has come."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(at_once=1)
        await put(node, replace(call("s0"), due_at=START + 5 * MS), call("s1"))
        jobs, again_at = await ask(store, limit)
        assert [one.step_id for one in jobs] == ["s1"]
        assert again_at == START + 5 * MS
        assert isinstance(await deliver_one(store, ended(jobs[0], "done")), Accepted)
        assert await ask(store, limit) == ([], START + 5 * MS)
        clock.advance(ms=5)
        assert await steps(store, limit) == ["s0"]

    @pytest.mark.contract("ACT-7")
    async def test_who_could_take_nothing_is_not_told_to_ask_again(self, store: Store, node: SampleNode) -> None:
        """Slots expire for others; a node for which there is no call waits for a notification."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(at_once=1)
        await put(node, call("s0"), call("s1"))
        assert await steps(store, limit) == ["s0"]
        assert await ask(store, limit, node="node-c", activities=("ship",)) == ([], None)
        assert await ask(store, limit, node="node-c", queues=(LIMITED,)) == ([], None)

    @pytest.mark.contract("ACT-7")
    async def test_limits_are_apart_and_one_without_numbers_has_none(self, store: Store, node: SampleNode) -> None:
        """The caller passes the numbers; calls with limits unknown to it are left to others."""
        if await self._lacks_limits(store):
            return
        await put(node, call("s0"), call("s1"), call("o0", name="other"), call("o1", name="other"))
        assert (await ask(store, CallLimit(at_once=1), activities=("ship",)))[0] == []
        assert (await ask(store, CallLimit(at_once=1), queues=(LIMITED,)))[0] == []
        jobs, _ = await ask(store, CallLimit(at_once=1))
        assert sorted(one.step_id for one in jobs) == ["o0", "o1", "s0"]
        assert [one.step_id for one in (await ask(store))[0]] == ["s1"]

    @pytest.mark.contract("ACT-7")
    async def test_calls_with_limits_are_not_among_other_jobs(self, store: Store, node: SampleNode) -> None:
        """A node that does not know limits cannot take them by mistake; the input of a call may be anything."""
        if await self._lacks_limits(store):
            return
        strange = replace(call("s0", "é'\"\\"), input=Raw(codec.encode(["a\x00b", '\\u0000","limit":{"name":"x"}'])))
        await put(node, strange, job(step_id="plain"))
        plain = await store.acquire_jobs("node-c", ["mail"], ["charge"], 10, VISIBLE_MS)
        assert [one.step_id for one in plain] == ["plain"]
        jobs, _ = await ask(store, CallLimit(per_key=1))
        assert jobs == [strange]
        assert isinstance(await deliver_one(store, ended(jobs[0], "done")), Accepted)

    @pytest.mark.contract("ACT-7")
    async def test_call_that_waits_is_found_with_its_place_in_line(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """There is one row per run: its first call, the places taken, and how many calls of its own line precede it."""
        if await self._lacks_limits(store):
            return
        limit = CallLimit(at_once=2)
        await put(node, call("a0", "a"), call("b0", "b"))
        await put(node, call("a1", "a", run="run-2"), call("a2", "a", run="run-2"), call("b1", "b", run="run-2"))
        clock.advance(ms=1)
        await put(node, call("a3", "a", run="run-3"), call("b9", "b", run="run-3"))
        await put(node, call("z0", "a", run="run-4", tenant="zeta"))
        await put(node, replace(call("l0", run="run-5"), due_at=START + 60_000_000))
        run_ids = tuple(f"run-{number}" for number in (5, 4, 3, 2, 1, 9))
        assert await steps(store, limit) == ["a0", "z0"]
        found = await store.find(PlaceQuery(run_ids=run_ids))
        shown = [(each.run_id, each.step_id, each.limit, each.key) for each in found]
        assert shown == [("run-1", "b0", NAME, "b"), ("run-2", "a1", NAME, "a"), ("run-3", "a3", NAME, "a")]
        assert [(each.taken, each.taken_of_key, each.before, each.waiting) for each in found] == [
            *((2, 0, 0, 1), (2, 1, 0, 3), (2, 1, 2, 2))
        ]
        clock.advance(ms=VISIBLE_MS)  # the node that had the places is lost, and its calls are last in line again
        first, *_, last = await store.find(PlaceQuery(run_ids=run_ids))
        assert (first.step_id, first.taken, first.waiting) == ("b0", 0, 2)
        assert (last.run_id, last.before, last.taken_of_key) == ("run-4", 0, 0)
        assert await store.find(PlaceQuery(run_ids=())) == []
        assert len(await store.find(PlaceQuery(run_ids=run_ids, limit=2))) == 2

    @pytest.mark.contract("ACT-7")
    async def test_acquiring_under_limits_refuses_malformed_arguments(self, store: Store) -> None:
        """Nothing is acquired."""
        if await self._lacks_limits(store):
            return
        with pytest.raises(InvalidInput):
            await ask(store, queues=("mail",))
        with pytest.raises(InvalidInput):
            await ask(store, CallLimit(at_once=0))
        for name in BAD_NAMES:
            with pytest.raises(InvalidInput):
                await ask(store, limits={name: CallLimit()})  # type: ignore[dict-item]
        with pytest.raises(InvalidInput):
            await ask(store, CallLimit(), 0)
