"""The store suite, admission: which runs are admitted and which are queued, in which order, and how they leave."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.admission import NO_LIMIT, AdmissionRequest, Overload, RunLimit
from holdfast.core.event_writer import admitted_message
from holdfast.core.events import RunStarted
from holdfast.core.messages import ADMITTED
from holdfast.core.state import CANCELLED
from holdfast.errors import Conflict, InvalidInput, LeaseExpired, Overloaded
from holdfast.store.port import (
    Admitted,
    CommitConflict,
    Committed,
    Created,
    Existing,
    LoadedRun,
    PlaceQuery,
    Refused,
    Store,
    Turn,
)
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run, signal, wait
from holdfast.testing.store_suite.base import STRANGE_NAMES, SuiteBase, check_refused, unchanged

ONE = RunLimit(at_once=1)
SECOND = 1_000_000


async def enqueue(
    store: Store,
    *run_ids: str,
    limit: RunLimit = ONE,
    key: str = "",
    priority: int = 0,
    claim_for: str | None = None,
    **options: Any,
) -> list[Created | Existing | Refused]:
    """Create runs with an admission request. Options: see `new_run`."""
    now, request = await store.now(), AdmissionRequest(limit=limit, key=key, priority=priority)
    runs = [replace(new_run(run_id, now=now, **options), admission=request) for run_id in run_ids]
    return await store.create(runs, claim_for)


async def admit(
    store: Store, limit: RunLimit = ONE, most: int = 50, claim_for: str | None = None, plan_id: str = "order"
) -> list[str]:
    """Admit runs, and return their ids."""
    admitted, _ = await store.admit({plan_id: limit}, most, claim_for)
    return [each.run_id for each in admitted]


async def waiting(store: Store, *run_ids: str) -> list[str]:
    """Return which of these runs are queued. A queued run is not ready, and has no owner."""
    found = []
    for loaded in await store.load(run_ids):
        assert loaded is not None
        if loaded.head.queued_at is not None:
            assert (loaded.head.ready_at, loaded.head.lease_owner, loaded.messages) == (None, None, ())
            found.append(loaded.head.run_id)
    return found


async def finish(node: SampleNode, *run_ids: str) -> None:
    """Let runs start, if they have not, and finish them, whichever node owns them."""
    for run_id in run_ids:
        run = await node.load(run_id)
        if run.head.lease_owner is None:
            await node.claim()
        await node.step(run_id, complete())


async def begin(node: SampleNode, *run_ids: str) -> list[int]:
    """Let runs start, whichever node owns them, and return when they did."""
    for run_id in run_ids:
        run = await node.load(run_id)
        if run.head.lease_owner is None:
            await node.claim()
        await node.step(run_id, wait("go"))
    return [await started_at(node.store, run_id) for run_id in run_ids]


async def started_at(store: Store, run_id: str) -> int:
    """Return when a run has started, or 0."""
    events = await store.read_events(run_id)
    return next((event.persisted_at for event in events if isinstance(event.data, RunStarted)), 0)


async def start_all(node: SampleNode, limit: RunLimit) -> None:
    """Admit runs, and start every run that can be claimed."""
    await node.renew()
    await node.store.admit({"order": limit}, 2, node.name)
    for run in await node.claim():
        await node.commit(await node.turn(run, *(() if run.head.version > 1 else (wait("go"),))))


async def admit_one_by_one(node: SampleNode, limit: RunLimit, first: Iterable[str]) -> list[str]:
    """Finish the runs inside, repeatedly, and return the order in which the others were admitted."""
    order: list[str] = []
    inside = list(first)
    while inside:
        await finish(node, *inside)
        inside = await admit(node.store, limit)
        order += inside
    return order


async def release(node: SampleNode, run_id: str, limit: RunLimit = ONE, key: str = "", priority: int = 0) -> Turn:
    """Queue an existing run, held until now, for admission."""
    run = await node.load(run_id)
    if run.head.lease_owner is None:
        await node.claim()
        run = await node.load(run_id)
    turn = releasing_turn(run, AdmissionRequest(limit=limit, key=key, priority=priority))
    [answer] = await node.store.commit([turn])
    assert isinstance(answer, Committed), answer
    return turn


def releasing_turn(run: LoadedRun, request: AdmissionRequest) -> Turn:
    """Return the turn that queues a run which has not started for admission."""
    assert run.head.snapshot is not None
    return Turn(
        run_id=run.head.run_id,
        expected_version=run.head.version,
        epoch=run.head.lease_epoch,
        snapshot=run.head.snapshot,
        consumed=tuple(message.signal_id for message in run.messages),
        messages=(admitted_message(run.head.run_id, run.head.updated_at),),
        seen_inbox_seq=run.head.inbox_seq,
        release=True,
        admission=request,
    )


class AdmissionSuite(SuiteBase):
    """How runs of workflows with limits are admitted."""

    # --- runs that were held before they are queued

    @pytest.mark.contract("QUE-2")
    async def test_queued_run_is_found_with_its_place_in_line(self, store: Store, node: SampleNode) -> None:
        """It is found by tenant and key, in order of admission (by priority). An admitted run is no longer found."""
        await node.renew()
        limit = RunLimit(at_once=2, per_key=2)
        await enqueue(store, "a", "b", limit=limit, key="k", claim_for=node.name)
        await enqueue(store, "c", "d", limit=limit, key="k")
        await enqueue(store, "e", limit=limit)
        run_ids = ("missing", "e", "d", "c", "b", "a")
        found = await store.find(PlaceQuery(run_ids=run_ids))
        assert [(each.run_id, each.step_id, each.limit, each.key) for each in found] == [
            *(("c", "", "order", "k"), ("d", "", "order", "k"), ("e", "", "order", ""))
        ]
        assert [(each.taken, each.taken_of_key, each.before) for each in found] == [(2, 2, 0), (2, 2, 1), (2, 0, 0)]
        await node.claim()
        await node.step("a", complete())
        found = await store.find(PlaceQuery(run_ids=run_ids))
        assert {each.taken for each in found} == {1}
        assert len(await admit(store, limit)) == 1
        assert len(await store.find(PlaceQuery(run_ids=run_ids))) == 2

    @pytest.mark.contract("QUE-2")
    async def test_run_that_was_held_is_queued_when_it_is_released(
        self, store: Store, node: SampleNode, clock: VirtualClock
    ) -> None:
        """It takes no place before. Then it is admitted like a start at that moment, after the earlier ones."""
        await node.renew()
        await store.create([new_run("held", now=await store.now())])
        assert (await enqueue(store, "a", "b", claim_for=node.name))[0] == Created("a", 1)
        clock.advance(us=1)
        await release(node, "held")
        assert await waiting(store, "a", "b", "held") == ["b", "held"]
        assert (await store.stats()).queued == 2
        assert await SampleNode(store, "node-b").claim() == []
        assert await admit_one_by_one(node, ONE, ["a"]) == ["b", "held"]
        assert (await store.stats()).queued == 0

    @pytest.mark.contract("QUE-2")
    async def test_released_run_is_admitted_at_once_if_there_is_room(self, store: Store, node: SampleNode) -> None:
        """It can be claimed with the message that starts it, and holds its place until it ends."""
        await node.renew()
        await store.create([new_run("held", now=await store.now())])
        await release(node, "held")
        [claimed] = await node.claim()
        assert (claimed.head.run_id, claimed.head.queued_at) == ("held", None)
        assert [message.signal_id for message in claimed.messages] == [ADMITTED]
        await enqueue(store, "next")
        assert await waiting(store, "next") == ["next"]
        await node.step("held", complete())
        assert await admit(store) == ["next"]

    @pytest.mark.contract("QUE-2")
    async def test_release_makes_room_for_the_run_that_is_next_first(
        self, store: Store, node: SampleNode, clock: VirtualClock
    ) -> None:
        """The ended run frees its place for the run that was queued first; the released run is queued."""
        await node.renew()
        await store.create([new_run("held", now=await store.now())])
        await enqueue(store, "a", "b", claim_for=node.name)
        await finish(node, "a")
        clock.advance(us=1)
        await release(node, "held")
        assert await waiting(store, "b", "held") == ["held"]
        assert [run.head.run_id for run in await SampleNode(store, "node-b").claim()] == ["b"]

    @pytest.mark.contract("QUE-2")
    async def test_released_run_is_never_rejected(self, store: Store, node: SampleNode) -> None:
        """It was acknowledged, so it is queued where a start would be rejected."""
        await node.renew()
        limit = RunLimit(at_once=1, overload="reject")
        await store.create([new_run("held", now=await store.now())])
        await enqueue(store, "a", limit=limit, claim_for=node.name)
        await release(node, "held", limit)
        assert await waiting(store, "held") == ["held"]
        [refused] = await enqueue(store, "c", limit=limit)
        assert isinstance(refused, Refused)
        await finish(node, "a")
        assert await admit(store, limit) == ["held"]

    @pytest.mark.contract("QUE-2", "OWN-1")
    async def test_release_that_is_committed_again_changes_nothing(self, store: Store, node: SampleNode) -> None:
        """This holds whether the run is queued or admitted: a node commits its turn again after a lost answer."""
        await node.renew()
        await enqueue(store, "a", claim_for=node.name)
        await store.create([new_run("held", now=await store.now())])
        turn = await release(node, "held")
        assert isinstance((await store.commit([turn]))[0], Committed)
        assert await waiting(store, "held") == ["held"]
        await finish(node, "a")
        assert await admit(store) == ["held"]
        assert isinstance((await store.commit([turn]))[0], Committed)
        [claimed] = await node.claim()
        assert [message.signal_id for message in claimed.messages] == [ADMITTED]
        await enqueue(store, "next")
        assert await waiting(store, "next") == ["next"]

    @pytest.mark.contract("QUE-2")
    async def test_released_run_counts_for_its_key_its_priority_and_the_rate(
        self, store: Store, node: SampleNode, clock: VirtualClock
    ) -> None:
        """The instant of its release counts, not that of its creation."""
        await node.renew()
        per_key = RunLimit(per_key=1)
        held = [new_run(f"held-{number}", now=await store.now()) for number in range(3)]
        await store.create(held)
        await release(node, "held-0", per_key, key="x")
        await release(node, "held-1", per_key, key="x")
        await release(node, "held-2", per_key, key="x", priority=1)
        assert await waiting(store, "held-0", "held-1", "held-2") == ["held-1", "held-2"]
        assert await admit_one_by_one(node, per_key, ["held-0"]) == ["held-2", "held-1"]
        rate = RunLimit(starts=1, period_ms=1_000)
        for number in (3, 4):
            await store.create([new_run(f"held-{number}", now=await store.now())])
            await release(node, f"held-{number}", rate)
        assert await waiting(store, "held-3", "held-4") == ["held-4"]
        [began] = await begin(node, "held-3")
        assert await store.admit({"order": rate}, 9) == ([], began + SECOND)
        clock.advance(us=SECOND)
        assert await admit(store, rate) == ["held-4"]

    @pytest.mark.contract("QUE-2")
    async def test_released_run_that_is_cancelled_leaves_its_queue(self, store: Store, node: SampleNode) -> None:
        """A signal makes it ready, without the message that starts it."""
        await node.renew()
        await enqueue(store, "a", claim_for=node.name)
        await store.create([new_run("held", now=await store.now()), new_run("last", now=await store.now())])
        await release(node, "held")
        await release(node, "last")
        await store.deliver([signal("held", "go")])
        other = SampleNode(store, "node-b")
        [claimed] = await other.claim()
        assert (claimed.head.run_id, claimed.messages) == ("held", ())
        cancelled = await other.turn(claimed)
        await other.commit(replace(cancelled, snapshot=replace(cancelled.snapshot, status=CANCELLED)))
        assert await waiting(store, "last") == ["last"]
        await finish(node, "a")
        assert await admit(store) == ["last"]

    async def test_turn_that_queues_its_run_lets_go_of_it(self, store: Store, node: SampleNode) -> None:
        """A turn that would keep the run, or that names an invalid limit, is a conflict, and nothing is stored."""
        await node.renew()
        await store.create([new_run("held", now=await store.now())], node.name)
        run = await node.load("held")
        turn = releasing_turn(run, AdmissionRequest(limit=ONE))
        odd = replace(turn, admission=AdmissionRequest(limit=RunLimit(at_once=0)))
        for unfit in (replace(turn, release=False), odd):
            [answer] = await store.commit([unfit])
            assert isinstance(answer, CommitConflict)
            assert answer.reason == "cannot be stored"
        assert await waiting(store, "held") == []

    # --- entering and leaving

    @pytest.mark.contract("QUE-2")
    async def test_run_beyond_the_limit_is_queued_and_admitted_when_another_has_left(
        self, store: Store, node: SampleNode
    ) -> None:
        """Until then it exists and is PENDING, and no node can claim it."""
        await node.renew()
        answers = await enqueue(store, "a", "b", "c", claim_for=node.name)
        assert answers == [Created("a", 1), Created("b"), Created("c")]
        assert await waiting(store, "a", "b", "c") == ["b", "c"]
        assert (await store.stats()).queued == 2
        assert await SampleNode(store, "node-b").claim() == []
        assert await admit(store) == []
        await finish(node, "a")
        assert await admit(store) == ["b"]
        [claimed] = await node.claim()
        assert (claimed.head.run_id, len(claimed.messages)) == ("b", 1)
        assert await waiting(store, "b", "c") == ["c"]

    @pytest.mark.contract("QUE-2")
    async def test_other_plans_and_runs_without_a_request_do_not_count(self, store: Store, node: SampleNode) -> None:
        """A run without an admission request is neither counted nor delayed."""
        await node.start("free")
        await enqueue(store, "a")
        await enqueue(store, "b", plan_id="other")
        assert await waiting(store, "a", "b") == []
        await enqueue(store, "c")
        await node.create("d")
        assert await waiting(store, "c", "d") == ["c"]

    @pytest.mark.contract("QUE-2", "EVT-1")
    async def test_run_leaves_once_however_often_its_end_is_committed(self, store: Store, node: SampleNode) -> None:
        """A turn that lost its commit frees no place either."""
        await enqueue(store, "a", "b", "c", "d")
        [loaded] = await node.claim()
        late = await node.turn(loaded, complete())
        assert isinstance(await node.commit(replace(late, epoch=7)), CommitConflict)
        assert await admit(store) == []
        for _ in range(3):
            await node.commit(late)
        assert await admit(store) == ["b"]
        await node.commit(late)
        assert await admit(store) == []

    @pytest.mark.contract("QUE-2", "WF-7")
    async def test_run_that_is_finished_while_queued_leaves_the_queue(self, store: Store, node: SampleNode) -> None:
        """It can be signalled and claimed for that; the run behind it is next."""
        await enqueue(store, "a", "b", "c")
        await store.deliver([signal("b", "__control__")])
        claimed = {run.head.run_id: run for run in await node.claim()}
        assert sorted(claimed) == ["a", "b"]
        assert (await store.load(["b"]))[0].head.queued_at is not None  # type: ignore[union-attr]
        cancelled = await node.turn(claimed["b"])
        snapshot = replace(cancelled.snapshot, status=CANCELLED)
        await node.commit(replace(cancelled, snapshot=snapshot))
        assert (await store.stats()).queued == 1
        await finish(node, "a")
        assert await admit(store) == ["c"]

    @pytest.mark.contract("QUE-2", "SIG-3")
    async def test_signal_to_a_waiting_run_is_kept_and_does_not_start_it(self, store: Store, node: SampleNode) -> None:
        """It is claimed, takes a turn that changes nothing, and stays queued."""
        await node.renew()
        await enqueue(store, "a", "b", claim_for=node.name)
        await store.deliver([signal("b", "go", 1)])
        [loaded] = [run for run in await node.claim() if run.head.run_id == "b"]
        assert loaded.messages == ()
        await node.commit(await node.turn(loaded, release=True))
        assert await waiting(store, "b") == ["b"]
        await finish(node, "a")
        assert await admit(store) == ["b"]
        [loaded] = await node.claim()
        assert [len(loaded.messages), len(loaded.signals)] == [1, 1]

    @pytest.mark.contract("QUE-2", "QUE-3")
    async def test_run_that_is_admitted_while_another_node_owns_it_starts_after_that(
        self, store: Store, node: SampleNode
    ) -> None:
        """The commit of its owner does not undo the admission."""
        await node.renew()
        await enqueue(store, "a", "b", claim_for=node.name)
        await store.deliver([signal("b", "go")])
        other = SampleNode(store, "node-b")
        [loaded] = await other.claim()
        turn = await other.turn(loaded, release=True)
        await finish(node, "a")
        admitted, _ = await store.admit({"order": ONE}, 9, node.name)
        assert admitted == [Admitted("b", "SKIPPED")]
        await other.commit(turn)
        [claimed] = await node.claim()
        assert (claimed.head.run_id, len(claimed.messages)) == ("b", 1)

    @pytest.mark.contract("QUE-1", "QUE-2")
    async def test_same_request_again_is_answered_with_its_run_whatever_the_limit(
        self, store: Store, node: SampleNode
    ) -> None:
        """It takes no second place, and a different input is a conflict."""
        reject = RunLimit(at_once=1, overload="reject")
        assert await enqueue(store, "a", limit=reject, request_id="r") == [Created("a")]
        assert await enqueue(store, "x", limit=reject, request_id="r") == [Existing("a")]
        [answer] = await enqueue(store, "x", limit=reject, request_id="r", value=7)
        check_refused(answer, Conflict)
        await enqueue(store, "b", request_id="s")
        assert await enqueue(store, "y", request_id="s") == [Existing("b")]
        assert (await store.stats()).queued == 1

    # --- room

    @pytest.mark.contract("QUE-2")
    async def test_full_key_does_not_hold_up_the_others(self, store: Store, node: SampleNode) -> None:
        """This holds within one tenant; the same key of another tenant is another key."""
        limit = RunLimit(at_once=4, per_key=1)
        for run_id, key, tenant in (("a", "k", "t"), ("b", "k", "t"), ("c", "l", "t"), ("d", "k", "u")):
            await enqueue(store, run_id, limit=limit, key=key, tenant=tenant)
        assert await waiting(store, "a", "b", "c", "d") == ["b"]
        await finish(node, "c", "d")
        assert await admit(store, limit) == []
        await finish(node, "a")
        assert await admit(store, limit) == ["b"]

    @pytest.mark.contract("QUE-2")
    async def test_keys_that_look_alike_are_different(self, store: Store) -> None:
        """Keys are never normalised, and never joined with anything else."""
        limit = RunLimit(per_key=1)
        for number, key in enumerate(STRANGE_NAMES):
            await enqueue(store, f"run-{number}", limit=limit, key=key)
            await enqueue(store, f"late-{number}", limit=limit, key=key)
        assert (await store.stats()).queued == len(STRANGE_NAMES)

    @pytest.mark.contract("QUE-2")
    async def test_change_of_the_limit_applies_to_queued_runs(self, store: Store) -> None:
        """The caller passes the limit: a higher one admits more runs, a lower one none, and no limit admits all."""
        await enqueue(store, *"abcdefgh")
        assert await admit(store, RunLimit(at_once=3)) == ["b", "c"]
        assert await admit(store, RunLimit(at_once=2)) == []
        assert await admit(store, RunLimit(per_key=4)) == ["d"]
        assert await admit(store, RunLimit(per_key=1)) == []
        assert await admit(store, NO_LIMIT, 2) == ["e", "f"]
        assert await admit(store, NO_LIMIT) == ["g", "h"]

    @pytest.mark.contract("QUE-2")
    async def test_new_run_does_not_overtake_queued_ones(self, store: Store, node: SampleNode) -> None:
        """There is room again, and `admit` was not called yet: the creation admits the next run in the queue."""
        await enqueue(store, "a", "b", "c")
        await finish(node, "a")
        assert await enqueue(store, "d", claim_for=node.name) == [Created("d")]
        assert await waiting(store, "b", "c", "d") == ["c", "d"]

    # --- order

    @pytest.mark.contract("QUE-2")
    async def test_tenants_take_turns_however_many_runs_each_has_queued(self, store: Store, node: SampleNode) -> None:
        """They take turns in the order of their names, cyclically."""
        await enqueue(store, "first", tenant="b")
        await enqueue(store, *(f"b{number}" for number in range(4)), tenant="b")
        await enqueue(store, "c0", "c1", tenant="c")
        await enqueue(store, "a0", tenant="a")
        order = await admit_one_by_one(node, ONE, ["first"])
        assert order == ["c0", "a0", "b0", "c1", "b1", "b2", "b3"]

    @pytest.mark.contract("QUE-2")
    async def test_higher_priority_goes_first_until_the_others_have_waited_long(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """A step of priority is worth a minute of waiting, so no run starves."""
        await enqueue(store, "first")
        await enqueue(store, "low", priority=-1)
        await enqueue(store, "old")
        clock.advance(ms=59_000)
        await enqueue(store, "high", priority=2)
        await enqueue(store, "new", priority=1)
        clock.advance(ms=2_000)
        await enqueue(store, "late", priority=1)
        order = await admit_one_by_one(node, ONE, ["first"])
        assert order == ["high", "new", "old", "late", "low"]

    @pytest.mark.contract("QUE-2")
    async def test_limit_of_the_call_leaves_the_rest_and_says_so(self, store: Store, clock: VirtualClock) -> None:
        """Plans are admitted in order of their names."""
        await enqueue(store, *"abcd")
        await enqueue(store, *"xyz", plan_id="other")
        limits = {"other": NO_LIMIT, "order": NO_LIMIT}
        admitted, next_at = await store.admit(limits, 4)
        assert [each.run_id for each in admitted] == ["b", "c", "d", "y"]
        assert next_at == clock.now()
        admitted, next_at = await store.admit(limits, 4)
        assert [(each.run_id, each.status) for each in admitted] == [("z", "STARTED")]
        assert next_at is None

    # --- rates

    @pytest.mark.contract("QUE-2")
    async def test_starts_within_a_period_are_bounded_and_others_wait_for_its_end(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The rate holds in any period, not only in those aligned to a clock; the answer says when to call again."""
        limit = RunLimit(starts=2, period_ms=1_000)
        await enqueue(store, "a", limit=limit)
        await begin(node, "a")
        clock.advance(ms=600)
        await enqueue(store, "b", "c", "d", limit=limit)
        assert await waiting(store, "a", "b", "c", "d") == ["c", "d"]
        assert await store.admit({"order": limit}, 9) == ([], START + SECOND)
        await begin(node, "b")
        assert await store.admit({"order": limit}, 9) == ([], START + SECOND)
        clock.advance(ms=399, us=999)
        assert await admit(store, limit) == []
        clock.advance(us=1)
        admitted, next_at = await store.admit({"order": limit}, 9)
        assert ([each.run_id for each in admitted], next_at) == (["c"], START + 1_600_000)
        clock.advance(ms=600)
        assert await admit(store, limit) == ["d"]

    @pytest.mark.contract("QUE-2")
    @pytest.mark.parametrize("overload", ["queue", "delay"])
    async def test_rate_bounds_what_starts_however_late_that_is(
        self, store: Store, clock: VirtualClock, node: SampleNode, overload: Overload
    ) -> None:
        """After a long time without nodes, no more runs are admitted than may start at once, and then the next ones."""
        limit = RunLimit(starts=2, period_ms=1_000, overload=overload)
        for run_id in "abcdef":
            assert await enqueue(store, run_id, limit=limit) == [Created(run_id)]
            clock.advance(ms=1_500)
        assert await waiting(store, *"abcdef") == ["c", "d", "e", "f"]
        assert await store.admit({"order": limit}, 9) == ([], None)
        assert await begin(node, "a", "b") == [clock.now()] * 2
        assert await store.admit({"order": limit}, 9) == ([], clock.now() + SECOND)
        clock.advance(ms=1_000)
        assert await admit(store, limit, claim_for=node.name) == ["c", "d"]
        clock.advance(ms=700)
        await begin(node, "c")
        assert await store.admit({"order": limit}, 9) == ([], clock.now() + SECOND)
        clock.advance(ms=1_000)
        assert await admit(store, limit, claim_for=node.name) == ["e"]
        await begin(node, "d", "e")
        assert await store.admit({"order": limit}, 9) == ([], clock.now() + SECOND)

    @pytest.mark.contract("QUE-2", "OWN-3")
    async def test_run_that_was_admitted_and_lost_its_node_starts_within_the_rate(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The node that takes it over starts it later, and the runs behind it start even later."""
        limit = RunLimit(starts=1, period_ms=1_000)
        await node.renew()
        await enqueue(store, "a", "b", limit=limit, claim_for=node.name)
        clock.advance(ms=node.lease_ms + 1)
        assert await admit(store, limit) == []
        other = SampleNode(store, "node-b")
        assert [run.head.run_id for run in await other.claim()] == ["a"]
        assert await begin(other, "a") == [clock.now()]
        clock.advance(ms=999)
        assert await admit(store, limit) == []
        clock.advance(ms=1)
        assert await admit(store, limit) == ["b"]

    @pytest.mark.contract("QUE-2", "WF-7")
    async def test_run_that_is_admitted_and_ends_without_a_start_frees_its_place(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The place is free after a period, as if the run had started."""
        limit = RunLimit(starts=1, period_ms=1_000)
        await enqueue(store, "a", "b", limit=limit)
        [loaded] = await node.claim()
        cancelled = replace(await node.turn(replace(loaded, messages=())), seen_inbox_seq=0)
        snapshot = replace(cancelled.snapshot, status=CANCELLED)
        await node.commit(replace(cancelled, snapshot=snapshot))
        assert await store.admit({"order": limit}, 9) == ([], clock.now() + SECOND)
        clock.advance(ms=1_000)
        assert await admit(store, limit) == ["b"]

    @pytest.mark.contract("QUE-2", "EVT-1")
    async def test_start_counts_once_however_often_it_is_committed(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """A turn that lost does not count either."""
        limit = RunLimit(starts=2, period_ms=1_000)
        await enqueue(store, "a", "b", "c", limit=limit)
        loaded = {run.head.run_id: run for run in await node.claim()}
        turn = await node.turn(loaded["a"], wait("go"))
        assert isinstance(await node.commit(replace(turn, epoch=7)), CommitConflict)
        assert await store.admit({"order": limit}, 9) == ([], None)
        for _ in range(3):
            await node.commit(turn)
        await begin(node, "b")
        clock.advance(ms=1_000)
        assert await admit(store, limit) == ["c"]

    @pytest.mark.contract("QUE-2", "QUE-3", "OWN-1")
    async def test_simultaneous_nodes_never_start_more_than_the_rate(
        self, store: Store, peer: Store, clock: VirtualClock
    ) -> None:
        """They repeatedly create, admit, claim and start runs concurrently."""
        limit = RunLimit(starts=3, period_ms=1_000)
        nodes = [SampleNode(way, f"node-{number}", 3_600_000) for number, way in enumerate((store, peer, store))]
        run_ids = [f"run-{number:02}" for number in range(15)]
        await asyncio.gather(*(enqueue(nodes[place % 3].store, id_, limit=limit) for place, id_ in enumerate(run_ids)))
        started: list[int] = []
        for _ in range(40):
            await asyncio.gather(*(start_all(node, limit) for node in nodes))
            started = [await started_at(store, run_id) for run_id in run_ids]
            clock.advance(ms=350)
        instants = sorted(started)
        assert instants[0] > 0, "all have started"
        assert all(later - first >= SECOND for first, later in zip(instants, instants[3:], strict=False)), instants

    @pytest.mark.contract("QUE-2", "TMR-1")
    async def test_delayed_start_comes_at_the_next_free_instant(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The run is queued like any other, and is never refused; the answer contains when it can be admitted."""
        limit = RunLimit(starts=1, period_ms=500, overload="delay")
        await node.renew()
        answers = await enqueue(store, "a", "b", "c", limit=limit, claim_for=node.name)
        assert answers == [Created("a", 1), Created("b"), Created("c")]
        assert await waiting(store, "a", "b", "c") == ["b", "c"]
        await finish(node, "a")
        assert await store.admit({"order": limit}, 9, node.name) == ([], START + SECOND // 2)
        clock.advance(ms=500)
        [admitted], next_at = await store.admit({"order": limit}, 9, node.name)
        assert (admitted.run_id, next_at) == ("b", None)
        await begin(node, "b")
        assert await store.admit({"order": limit}, 9, node.name) == ([], START + SECOND)

    # --- rejection

    @pytest.mark.contract("QUE-2")
    @pytest.mark.parametrize("limit", [RunLimit(at_once=1), RunLimit(per_key=1), RunLimit(starts=1, period_ms=1_500)])
    async def test_start_that_would_wait_is_refused_and_leaves_no_trace(
        self, store: Store, clock: VirtualClock, node: SampleNode, limit: RunLimit
    ) -> None:
        """The refusal has a hint when to retry; the retry may be accepted."""
        limit = replace(limit, overload="reject")
        assert await enqueue(store, "a", limit=limit) == [Created("a")]
        async with unchanged(store):
            [answer] = await enqueue(store, "b", limit=limit)
        retry_after_ms = 1_500 if limit.starts else 1_000
        check_refused(answer, Overloaded, plan_id="order", retry_after_ms=retry_after_ms)
        await finish(node, "a")
        clock.advance(ms=retry_after_ms)
        assert await enqueue(store, "b", limit=limit) == [Created("b")]

    @pytest.mark.contract("QUE-2", "WF-4")
    async def test_run_that_a_turn_starts_is_never_refused(self, store: Store, node: SampleNode) -> None:
        """It is queued, because no caller could retry, and it precedes the runs created after it."""
        reject = RunLimit(at_once=1, overload="reject")
        await enqueue(store, "a", limit=reject)
        await node.start("parent", wait("child"))
        child = replace(new_run("child"), admission=AdmissionRequest(limit=reject))
        await node.commit(replace(await node.turn(await node.load("parent")), starts=(child,)))
        assert await waiting(store, "child") == ["child"]
        await finish(node, "a")
        check_refused((await enqueue(store, "b", limit=reject))[0], Overloaded)
        assert await admit(store, reject) == ["child"]

    @pytest.mark.contract("QUE-2", "API-2")
    async def test_requests_and_limits_that_make_no_sense_are_refused(self, store: Store) -> None:
        """They are refused before anything is stored."""
        bad_limits = [RunLimit(at_once=0), RunLimit(per_key=-1), RunLimit(starts=1.5), RunLimit(period_ms=0)]  # type: ignore[arg-type]
        bad_limits += [RunLimit(overload="burn"), RunLimit(overload="delay"), None]  # type: ignore[arg-type,list-item]
        requests: list[Any] = [AdmissionRequest(limit=limit) for limit in bad_limits]
        requests += [
            AdmissionRequest(limit=ONE, key="a\nb"),
            AdmissionRequest(limit=ONE, priority=101),
            AdmissionRequest(limit=ONE, key=None),  # type: ignore[arg-type]
            "me",
        ]
        for request in requests:
            async with unchanged(store):
                [answer] = await store.create([replace(new_run("a"), admission=request)])
            check_refused(answer, InvalidInput)
        for limits, most in [({"order": limit}, 1) for limit in bad_limits] + [({"": ONE}, 1), ({"order": ONE}, 0)]:
            with pytest.raises(InvalidInput):
                await store.admit(limits, most)

    # --- any number of reconcilers

    @pytest.mark.contract("QUE-3", "OWN-1")
    async def test_run_is_claimed_as_it_is_admitted(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """Only a node with a current lease claims it; if the answer is lost, the node's next claim finds the run."""
        await enqueue(store, "a", "b")
        await finish(node, "a")
        with pytest.raises(LeaseExpired):
            await store.admit({"order": ONE}, 9, "no-node")
        [admitted], _ = await store.admit({"order": ONE}, 9, node.name)
        assert (admitted.run_id, admitted.status) == ("b", "STARTED")
        assert admitted.run is not None
        assert (admitted.run.head.lease_owner, admitted.run.head.lease_epoch) == (node.name, 1)
        assert len(admitted.run.messages) == 1
        assert await SampleNode(store, "node-b").claim() == []
        assert await node.claim() == [admitted.run]

    @pytest.mark.contract("QUE-2", "QUE-3", "OWN-1")
    async def test_simultaneous_calls_never_admit_more_than_there_is_room_for(self, store: Store, peer: Store) -> None:
        """No run is admitted twice."""
        limit, ways = RunLimit(at_once=7), (store, peer)
        await asyncio.gather(*(enqueue(ways[number % 2], f"run-{number}", limit=limit) for number in range(20)))
        assert (await store.stats()).queued == 13
        limit = RunLimit(at_once=12)
        answers = await asyncio.gather(*(admit(way, limit, 2) for _ in range(3) for way in (store, peer)))
        admitted = [run_id for answer in answers for run_id in answer]
        assert len(admitted) == len(set(admitted)) == 5
