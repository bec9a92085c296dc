"""The store suite, queues: jobs that turns queue and close, and which node acquires them when."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.events import ErrorInfo
from holdfast.core.keyed_steps import Effect, EndedAttempt, LateResult
from holdfast.core.messages import ActivityOutcome, Message, activity_completed
from holdfast.core.state import retry_token
from holdfast.errors import Conflict, InvalidInput
from holdfast.store.port import (
    Accepted,
    CommitConflict,
    Committed,
    Duplicate,
    Heartbeat,
    Job,
    PurgePolicy,
    Refused,
    Store,
    Turn,
)
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, job, marker, wait
from holdfast.testing.store_suite.base import (
    BAD_NAMES,
    STRANGE_NAMES,
    SuiteBase,
    check_deliver_refused,
    deliver_one,
    unchanged,
)

VISIBLE_MS = 1_000
SOON_S = 60.0


async def queue_turn(
    node: SampleNode, jobs: Sequence[Job] = (), closed: Sequence[str] = (), run: str = "run-1"
) -> Turn:
    """Return a turn with its own event that queues these jobs and closes these steps."""
    loaded = await node.load(run)
    turn = await node.turn(loaded, marker(f"mark-{loaded.head.version}"))
    return replace(turn, jobs=tuple(jobs), jobs_closed=tuple(closed))


async def put(node: SampleNode, *jobs: Job) -> None:
    """Queue jobs, each by a turn of its own run, which is started if it does not exist."""
    for one in jobs:
        if (await node.store.load([one.run_id]))[0] is None:
            await node.start(one.run_id, wait("go"))
        assert isinstance(await node.commit(await queue_turn(node, [one], run=one.run_id)), Committed)


async def close(node: SampleNode, *step_ids: str, run: str = "run-1") -> None:
    """Close steps of a run."""
    assert isinstance(await node.commit(await queue_turn(node, closed=step_ids, run=run)), Committed)


async def acquire(
    store: Store,
    node: str = "node-b",
    limit: int = 100,
    *,
    queues: Sequence[str] = ("mail",),
    activities: Sequence[str] = ("charge",),
) -> list[Job]:
    """Acquire for `VISIBLE_MS`."""
    return await store.acquire_jobs(node, queues, activities, limit, VISIBLE_MS)


def ended(job: Job, how: str) -> Message:
    """Return the message that reports how an attempt has ended."""
    outcome = ActivityOutcome(
        logical_attempt_id=job.logical_attempt_id,
        engine_attempt_id=job.engine_attempt_id,
        error=ErrorInfo("Broken", "it broke") if how == "failed" else None,
        is_detached=how == "detached",
    )
    token = retry_token(job.step_id, job.engine_attempt_id)
    return activity_completed(job.run_id, job.step_id, token, outcome, START, job.scheduled_at)


def attempts(jobs: Sequence[Job]) -> list[tuple[str, int]]:
    """Return the steps of acquired jobs, with their attempts."""
    return [(one.step_id, one.engine_attempt_id) for one in jobs]


class JobSuite(SuiteBase):
    """What is in a queue, and which node acquires it."""

    # --- queueing and acquiring

    @pytest.mark.contract("ACT-2", "ACT-4")
    async def test_job_of_a_keyed_step_says_on_each_acquisition_what_is_known(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The node has to know whether it is the first to acquire the job: later ones verify before they call."""
        ended = EndedAttempt(1, START, "lost", "node-a", "NodeLost: gone")
        known = Effect(must_verify=True, called=1, losses=1, attempts=(ended,), late=LateResult(1, Raw(b'"r"')))
        keyed = replace(job(attempt=2), queued_attempt_id=2, idempotency_key="order:1|2", effect=known)
        await put(node, keyed)
        assert await acquire(store) == [keyed]
        clock.advance(ms=VISIBLE_MS)
        assert await acquire(store) == [replace(keyed, engine_attempt_id=3)]

    @pytest.mark.contract("ACT-1")
    async def test_job_is_queued_with_its_turn_and_is_acquired_once(self, store: Store, node: SampleNode) -> None:
        """Any node can acquire it, with or without a lease; it is handed out as it was queued."""
        await node.start("run-1", wait("go"))
        turn = await queue_turn(node, [job()])
        assert await acquire(store) == []
        await node.commit(turn)
        assert await acquire(store) == [job()]
        assert await acquire(store) == await acquire(store, "node-c") == []

    @pytest.mark.contract("ACT-1", "TMR-1")
    async def test_job_is_not_acquired_before_it_is_due(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The store's clock decides; this is how a retry waits."""
        await put(node, job(due_at=START + 2_000))
        clock.advance(us=1_999)
        assert await acquire(store) == []
        clock.advance(us=1)
        assert attempts(await acquire(store)) == [("charge", 1)]

    @pytest.mark.contract("ACT-1", "ATT-1", "OWN-3")
    async def test_job_without_heartbeats_is_handed_out_again(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """It is handed out when its time is over and not before, to any node; each acquisition is another attempt."""
        await put(node, job(attempt=5))
        for attempt, taker in enumerate(("node-b", "node-c", "node-c"), 5):
            assert attempts(await acquire(store, taker)) == [("charge", attempt)]
            clock.advance(ms=VISIBLE_MS - 1, us=999)
            assert await acquire(store, "node-d") == []
            clock.advance(us=1)

    @pytest.mark.contract("ACT-1", "ACT-5", "OWN-3")
    async def test_job_whose_outcome_was_delivered_is_not_acquired_again(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """However long its run takes to record the outcome, and without heartbeats. A turn may queue the job again."""
        await put(node, job())
        due_before = await store.next_due("node-d", (), ("mail",))
        [taken] = await acquire(store)
        assert isinstance(await deliver_one(store, ended(taken, "failed")), Accepted)
        assert isinstance(await deliver_one(store, ended(taken, "failed")), Duplicate)
        clock.advance(ms=10 * VISIBLE_MS)
        assert await acquire(store) == []
        assert (due_before, await store.next_due("node-d", (), ("mail",))) == (START, None)
        beat = Heartbeat(run_id="run-1", step_id="charge", queue="mail", engine_attempt_id=1)
        assert await store.heartbeat("node-b", [beat], VISIBLE_MS) == [False]
        assert await acquire(store) == []
        await put(node, job(attempt=2))
        assert attempts(await acquire(store)) == [("charge", 2)]

    @pytest.mark.contract("ACT-1", "ACT-5", "OWN-3")
    @pytest.mark.parametrize("how", ["failed", "detached"])
    async def test_only_a_success_counts_of_an_attempt_whose_job_was_acquired_again(
        self, store: Store, clock: VirtualClock, node: SampleNode, how: str
    ) -> None:
        """The later attempt may be running, so a failure of the earlier one must not end the step."""
        await put(node, job())
        [first] = await acquire(store)
        clock.advance(ms=VISIBLE_MS)
        [second] = await acquire(store, "node-c")
        await check_deliver_refused(store, ended(first, how), Conflict)
        assert (await node.load("run-1")).messages == ()
        assert isinstance(await deliver_one(store, ended(first, "succeeded")), Accepted)
        beat = Heartbeat(run_id="run-1", step_id="charge", queue="mail", engine_attempt_id=2)
        assert await store.heartbeat("node-c", [beat], VISIBLE_MS) == [True], "the later attempt has the job"
        assert isinstance(await deliver_one(store, ended(second, how)), Accepted)
        clock.advance(ms=VISIBLE_MS)
        assert await acquire(store) == []

    @pytest.mark.contract("ACT-1", "ACT-5")
    async def test_outcome_that_is_delivered_again_leaves_the_next_attempt_alone(
        self, store: Store, node: SampleNode
    ) -> None:
        """The answer to the first delivery was lost, and meanwhile the run has recorded it and queued the job again."""
        await put(node, job())
        [taken] = await acquire(store)
        await deliver_one(store, ended(taken, "failed"))
        loaded = await node.load("run-1")
        turn = await node.turn(loaded, marker("recorded"))
        again = replace(job(attempt=2), queued_attempt_id=2)
        await node.commit(replace(turn, jobs=(again,), consumed=tuple(each.signal_id for each in loaded.messages)))
        assert isinstance(await deliver_one(store, ended(taken, "failed")), Accepted)
        assert attempts(await acquire(store)) == [("charge", 2)]

    @pytest.mark.contract("ACT-1", "ACT-5")
    async def test_outcome_takes_a_job_that_a_later_attempt_gave_back(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The later attempt has not begun, so the earlier one decides."""
        await put(node, replace(job(), queued_attempt_id=1))
        [first] = await acquire(store)
        clock.advance(ms=VISIBLE_MS)
        await store.release_jobs("node-c", await acquire(store, "node-c"))
        assert isinstance(await deliver_one(store, ended(first, "failed")), Accepted)
        assert await acquire(store) == []

    @pytest.mark.contract("ACT-1")
    async def test_outcome_without_a_job_and_of_other_steps_changes_no_queue(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Examples are the outcome of an attempt that was given back, or a token of another form."""
        await put(node, job(), job(step_id="other"))
        [taken, other] = await acquire(store)
        await store.release_jobs("node-b", [taken])
        strange = replace(ended(other, "failed"), signal_id="strange", waiting_token="charge~one")
        for message in (ended(replace(taken, step_id="gone"), "failed"), ended(taken, "failed"), strange):
            assert isinstance(await deliver_one(store, message), Accepted)
        assert attempts(await acquire(store)) == [("charge", 1)]
        clock.advance(ms=VISIBLE_MS)
        assert sorted(attempts(await acquire(store))) == [("charge", 2), ("other", 2)]

    @pytest.mark.contract("OWN-3")
    async def test_jobs_do_not_depend_on_the_lease_of_the_runs_owner(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Queues do not depend on the owners of runs."""
        await put(node, job(step_id="a"), job(step_id="b"))
        clock.advance(ms=node.lease_ms)
        assert attempts(await acquire(store, limit=1)) == [("a", 1)]
        assert len(await SampleNode(store, "node-c").claim()) == 1
        assert attempts(await acquire(store)) == [("b", 1)]

    @pytest.mark.contract("ACT-1")
    async def test_jobs_that_have_been_visible_for_longest_come_first(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Ties are in order of the runs' creation and of step ids, across queues; a limit leaves the rest."""
        await node.start("run-9", wait("go"))
        await put(
            node,
            job("run-1", "c", "post"),
            job("run-1", "a"),
            job("run-9", "z"),
            job("run-9", "b", "post"),
            job("run-1", "late", due_at=START + 1),
            job("run-1", "early", "post", due_at=START - 1),
        )
        clock.advance(ms=1)
        both = ("mail", "post")
        assert attempts(await acquire(store, limit=2, queues=both)) == [("early", 1), ("b", 1)]
        assert attempts(await acquire(store, queues=both)) == [("z", 1), ("a", 1), ("c", 1), ("late", 1)]

    @pytest.mark.contract("ACT-1")
    async def test_only_jobs_of_these_queues_and_activities_are_taken(self, store: Store, node: SampleNode) -> None:
        """A node leaves to others what it does not know."""
        await put(
            node,
            job(step_id="a"),
            job(step_id="b", activity_name="refund"),
            job(step_id="c", queue="post"),
            job(step_id="d", queue="Mail"),
        )
        assert await acquire(store, queues=[]) == await acquire(store, activities=[]) == []
        assert await acquire(store, queues=["none"]) == await acquire(store, activities=["none"]) == []
        assert attempts(await acquire(store, activities=["refund"])) == [("b", 1)]
        assert attempts(await acquire(store, queues=["mail", "post", "mail"])) == [("a", 1), ("c", 1)]

    @pytest.mark.contract("ACT-1")
    async def test_names_that_look_alike_are_different(self, store: Store, node: SampleNode) -> None:
        """This holds for names of steps, queues and activities."""
        await node.start("run-1", wait("go"))
        jobs = [job(step_id=name, queue=name, activity_name=name) for name in STRANGE_NAMES]
        await node.commit(await queue_turn(node, jobs))
        for one in jobs:
            assert await acquire(store, queues=[one.queue], activities=STRANGE_NAMES) == [one]

    @pytest.mark.contract("ACT-1", "OWN-1")
    async def test_simultaneous_acquisitions_share_out_the_jobs(
        self, store: Store, peer: Store, node: SampleNode
    ) -> None:
        """Each job goes to exactly one node."""
        await node.start("run-1", wait("go"))
        await node.commit(await queue_turn(node, [job(step_id=f"step-{number:02}") for number in range(20)]))
        ways = ((store, "node-a"), (peer, "node-b"), (store, "node-c"), (peer, "node-d"))
        shares = await asyncio.gather(*(acquire(way, name, 6) for way, name in ways))
        taken = sorted(one.step_id for share in shares for one in share)
        assert taken == [f"step-{number:02}" for number in range(20)]

    # --- closing and replacing

    @pytest.mark.contract("ACT-1")
    async def test_job_goes_with_the_turn_that_closes_its_step(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """This holds for acquired and waiting jobs, and for no other job; closing an unknown step is harmless."""
        await put(node, job(step_id="a"), job(step_id="b"), job(step_id="c"), job("run-2", "a"))
        await acquire(store, limit=1)
        await close(node, "a", "b", "unknown")
        clock.advance(ms=VISIBLE_MS)
        assert [(one.run_id, one.step_id) for one in await acquire(store)] == [("run-1", "c"), ("run-2", "a")]

    @pytest.mark.contract("ACT-1", "ATT-1")
    async def test_job_that_is_put_again_replaces_the_first(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """It is replaced immediately, even if acquired: a step has one job, and its attempt is the turn's."""
        await put(node, job())
        await acquire(store)
        again = job(queue="post", activity_name="refund", attempt=4)
        await put(node, again)
        clock.advance(ms=VISIBLE_MS)
        assert await acquire(store) == []
        assert await acquire(store, queues=["post"], activities=["refund"]) == [again]
        assert (await store.stats()).jobs == 1

    @pytest.mark.contract("ACT-1", "EVT-1")
    async def test_retried_commit_neither_brings_a_job_back_nor_frees_it(self, store: Store, node: SampleNode) -> None:
        """What is already in the history changes nothing, however late it is retried."""
        await node.start("run-1", wait("go"))
        turn = await queue_turn(node, [job()])
        answer = await node.commit(turn)
        await acquire(store)
        assert await node.commit(turn) == answer
        assert await acquire(store) == []
        await close(node, "charge")
        async with unchanged(store):
            assert await node.commit(turn) == answer
        assert (await store.stats()).jobs == 0

    @pytest.mark.contract("ACT-1", "OWN-1")
    async def test_turn_that_lost_neither_puts_nor_closes(self, store: Store, node: SampleNode) -> None:
        """It leaves no trace."""
        await put(node, job(step_id="a"))
        lost = await queue_turn(node, [job(step_id="b")], ["a"])
        await node.step("run-1", marker("other"))
        async with unchanged(store):
            assert isinstance(await node.commit(lost), CommitConflict)
        assert attempts(await acquire(store)) == [("a", 1)]

    @pytest.mark.contract("ACT-1", "API-2")
    async def test_turn_with_a_job_that_cannot_be_read_again_cannot_be_stored(
        self, store: Store, node: SampleNode
    ) -> None:
        """The job belongs to another run, or has no name; no other turn is affected."""
        await node.start("run-1", wait("go"))
        bad = [job("run-2"), *(job(queue=name) for name in BAD_NAMES)]  # type: ignore[arg-type]
        for one in bad:
            async with unchanged(store):
                assert await node.commit(await queue_turn(node, [one])) == CommitConflict("cannot be stored", 3, 1)
        await node.start("run-2", wait("go"))
        turns = [await queue_turn(node, bad[1:2]), await queue_turn(node, [job("run-2")], run="run-2")]
        assert [type(answer) for answer in await store.commit(turns)] == [CommitConflict, Committed]

    # --- the end of a run

    @pytest.mark.contract("ACT-1", "INV")
    async def test_run_that_finishes_loses_its_jobs(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """It loses earlier jobs, acquired or not, and those of its last turn; other runs keep theirs."""
        await put(node, job(step_id="a"), job(step_id="b"), job("run-2", "a"))
        await acquire(store, limit=1)
        last = await node.turn(await node.load("run-1"), complete())
        await node.commit(replace(last, jobs=(job(step_id="c"),)))
        clock.advance(ms=VISIBLE_MS)
        assert (await store.stats()).jobs == 1
        assert [one.run_id for one in await acquire(store)] == ["run-2"]

    @pytest.mark.contract("FMT-2", "INV")
    async def test_purge_of_a_run_leaves_nothing_to_the_next_of_its_name(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """It never touches the queued jobs of unfinished runs."""
        await put(node, job("run-2"), job("run-1"))
        await node.step("run-1", complete())
        assert (await store.purge(PurgePolicy(finished_run_ms=0))).runs == 1
        run = await node.start("run-1", wait("go"))
        assert run.details == {}
        assert [one.run_id for one in await acquire(store)] == ["run-2"]

    @pytest.mark.contract("FMT-2", "ACT-1", "INV")
    @pytest.mark.parametrize("how", ["succeeded", "failed", "detached"])
    async def test_outcome_of_a_job_of_a_deleted_run_does_not_reach_the_next_of_its_name(
        self, store: Store, clock: VirtualClock, node: SampleNode, how: str
    ) -> None:
        """It is refused, and leaves the next run's job in its queue, acquired or not."""
        await put(node, job())
        [late] = await acquire(store, "node-b")
        await node.step("run-1", complete())
        assert (await store.purge(PurgePolicy(finished_run_ms=0))).runs == 1
        clock.advance(ms=1)
        await put(node, replace(job(), scheduled_at=await store.now()))
        for _ in range(2):
            [answer] = await store.deliver([ended(late, how)])
            assert isinstance(answer, Refused)
            assert isinstance(answer.error, Conflict)
            assert (await node.load("run-1")).messages == ()
            clock.advance(ms=VISIBLE_MS)
            [mine] = await acquire(store, "node-b")
        old = replace(ended(mine, how), opened_at=0)  # in the form in which a node of an older release sends it
        assert [type(each) for each in await store.deliver([old])] == [Accepted]

    # --- when there is something to acquire

    @pytest.mark.contract("MSG-4", "TMR-1")
    async def test_next_due_knows_when_a_job_is_visible(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """It considers these queues only, and returns whichever comes first: a job or a run."""
        await put(node, job(step_id="a", due_at=START + 3_000), job(step_id="b", queue="post", due_at=START + 1_000))
        assert await store.next_due("node-a") is None
        assert await store.next_due("node-a", None, ["none"]) is None
        assert await store.next_due("node-a", [], ["mail"]) == START + 3_000
        assert await store.next_due("node-a", None, ["mail", "post"]) == START + 1_000
        assert await store.next_due("node-b", None, ["mail"]) == START + 3_000
        clock.advance(ms=3)
        await acquire(store)
        assert await store.next_due("node-a", None, ["mail"]) == clock.now() + VISIBLE_MS * 1_000
        await node.create("run-2")
        assert await store.next_due("node-a", None, ["mail"]) == clock.now()

    @pytest.mark.contract("MSG-4")
    async def test_commit_with_a_job_notifies(self, store: Store, node: SampleNode) -> None:
        """So that no node has to poll."""
        await node.start("run-1", wait("go"))
        turn = await queue_turn(node, [job()])
        listener = store.wakeups.listen()
        while await listener.wait(0):
            pass  # earlier notifications come from the setup
        await node.commit(turn)
        assert await listener.wait(SOON_S)
        listener.close()

    # --- refusals

    @pytest.mark.contract("API-2")
    async def test_malformed_acquisition_is_refused(self, store: Store, node: SampleNode) -> None:
        """Nothing is acquired."""
        await put(node, job())
        many = ["mail"] * (self.limits.batch_items + 1)
        async with unchanged(store):
            for name in BAD_NAMES:
                for node_name, queue, known in ((name, "q", "a"), ("n", name, "a"), ("n", "q", name)):
                    with pytest.raises(InvalidInput):
                        await store.acquire_jobs(node_name, ["q", queue], ["a", known], 1, 1)  # type: ignore[arg-type,list-item]
                with pytest.raises(InvalidInput):
                    await store.next_due("n", None, [name])  # type: ignore[list-item]
            for limit, visible_ms in ((0, 1), (-1, 1), (2**31, 1), (1, 0), (1, -1), (1, 2**40), (1, 1.5), (True, 1)):
                with pytest.raises(InvalidInput):
                    await store.acquire_jobs("n", ["mail"], ["charge"], limit, visible_ms)  # type: ignore[arg-type]
            for queues, activities in ((many, ["charge"]), (["mail"], many)):
                with pytest.raises(InvalidInput):
                    await store.acquire_jobs("n", queues, activities, 1, 1)

    # --- giving jobs back

    @pytest.mark.contract("ACT-1", "ATT-1")
    async def test_a_job_that_was_not_begun_is_given_back_as_it_was(self, store: Store, node: SampleNode) -> None:
        """It is visible immediately, with the same attempt; heartbeats of the former node are refused."""
        await put(node, job("run-1"))
        [taken] = await store.acquire_jobs("node-a", ["mail"], ["charge"], 5, VISIBLE_MS)
        assert await store.release_jobs("node-b", [taken]) == 0
        assert await store.release_jobs("node-a", [replace(taken, engine_attempt_id=7)]) == 0
        assert await store.acquire_jobs("node-b", ["mail"], ["charge"], 5, VISIBLE_MS) == []
        assert await store.release_jobs("node-a", [taken]) == 1
        assert await store.release_jobs("node-a", [taken]) == 0
        beat = Heartbeat(run_id="run-1", step_id=taken.step_id, queue="mail", engine_attempt_id=taken.engine_attempt_id)
        assert await store.heartbeat("node-a", [beat], VISIBLE_MS) == [False]
        assert await store.acquire_jobs("node-b", ["mail"], ["charge"], 5, VISIBLE_MS) == [taken]
        assert await store.release_jobs("node-a", [taken]) == 0

    @pytest.mark.contract("ACT-1", "API-2")
    async def test_to_give_back_what_is_no_job_is_refused(self, store: Store) -> None:
        """A job that does not exist, or was queued again, is not changed."""
        for unfit in ("job", job("run-1", step_id=""), job("")):
            with pytest.raises(InvalidInput):
                await store.release_jobs("node-a", [unfit])  # type: ignore[list-item]
        with pytest.raises(InvalidInput):
            await store.release_jobs("", [])
        assert await store.release_jobs("node-a", [job("run-1")]) == 0
        assert await store.release_jobs("node-a", []) == 0
