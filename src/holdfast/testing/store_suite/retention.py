"""The store suite, retention: what a purge deletes when, and what it must never touch."""

import pytest
from msgspec.structs import replace

from holdfast.core.index_rows import runtime_snapshot
from holdfast.core.instants import Instant
from holdfast.core.state import COMPLETED, FAILED, state_of
from holdfast.errors import InvalidInput
from holdfast.store.port import (
    ArchivedRun,
    ArchivedRunQuery,
    Created,
    DeadLetterQuery,
    Duplicate,
    FinishedRunQuery,
    MailboxQuery,
    PurgePolicy,
    PurgeReport,
    RunHead,
    RunQuery,
    Store,
    TaskQuery,
)
from holdfast.store.queries import pages
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import (
    SampleNode,
    complete,
    dead_letter,
    fail,
    marker,
    message,
    new_run,
    read_history,
    read_picture,
    record,
    signal,
    task,
    timer,
    wait,
)
from holdfast.testing.store_suite.base import SuiteBase, accept, deliver_one, unchanged

EVERYTHING = PurgePolicy(finished_run_ms=0, task_ms=0, runtime_state_ms=0)
"""The most aggressive policy: everything that may be deleted is deleted."""


async def run_ids(store: Store) -> list[str]:
    """Return the ids of all runs."""
    return [head.run_id for head in await store.find(RunQuery())]


class RetentionSuite(SuiteBase):
    """Deleting only what has ended."""

    # --- whole runs

    @pytest.mark.contract("FMT-2", "EVT-1")
    async def test_finished_run_past_its_window_goes_with_all_that_belongs_to_it(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The window is exact to the microsecond, counted from the run's end; the report counts what was deleted."""
        await node.start("run-1", wait("go"), task("approve"))
        await store.deliver([signal("run-1", "go", signal_id="click-1"), signal("run-1", "other")])
        clock.advance(ms=500)
        await node.step("run-1", complete(), records=[record("run-1")])
        events = len(await read_history(store, "run-1"))
        clock.advance(ms=999, us=999)
        policy = PurgePolicy(finished_run_ms=1_000)
        async with unchanged(store):
            assert await store.purge(policy) == PurgeReport()
        clock.advance(us=1)
        expected = PurgeReport(runs=1, events=events, signals=2, tasks=1, acceptance_records=2)
        assert await store.purge(policy) == expected
        assert await store.load(["run-1"]) == [None]
        assert (await store.read_events("run-1"), await store.find(TaskQuery())) == ([], [])
        assert await store.find(MailboxQuery(run_id="run-1", consumed=True)) == []
        assert await store.purge(policy) == PurgeReport()

    @pytest.mark.contract("FMT-2", "QUE-1")
    async def test_request_of_a_purged_run_may_be_made_again(self, store: Store, node: SampleNode) -> None:
        """Nothing of the old run shows through, even under the same id."""
        await node.start("run-1", task("approve"), request_id="req-1")
        await store.deliver([signal("run-1", "go", signal_id="click-1"), message("run-1", "m-1")])
        await node.step("run-1", complete(), records=[record("run-1")])
        await store.purge(EVERYTHING)
        again = new_run("run-1", request_id="req-1", value="other")
        assert await store.create([again]) == [Created("run-1")]
        run = await node.load("run-1")
        assert (run.head.version, run.head.inbox_seq, run.signals, run.records) == (1, 0, (), ())
        assert (await accept(store, signal("run-1", "go", "new", signal_id="click-1"))).signal_id == "click-1"

    @pytest.mark.contract("FMT-2")
    async def test_purge_is_bounded_by_bytes(self, store: Store, node: SampleNode, clock: VirtualClock) -> None:
        """It deletes the oldest runs whose events fit, at least one, and reports that there are others."""
        for number, size in enumerate([100, 30_000, 100, 100]):
            await node.start(f"run-{number}", marker("large", "é" * (size // 2)))
            await node.step(f"run-{number}", complete())
            clock.advance(ms=1)
        policy = PurgePolicy(finished_run_ms=0, most_bytes=25_000)
        for runs, has_more in ((1, True), (1, True), (2, False), (0, False)):
            counted = await store.purge(replace(policy, dry_run=True))
            report = await store.purge(policy)
            assert (report.runs, report.has_more, counted.runs) == (runs, has_more, runs)

    @pytest.mark.contract("FMT-2")
    async def test_nothing_finished_is_deleted_without_a_window(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """None means keep for ever."""
        await node.start("run-1", task("approve"), complete())
        clock.advance(ms=10**9)
        async with unchanged(store):
            assert await store.purge(PurgePolicy()) == PurgeReport()

    @pytest.mark.contract("FMT-2")
    async def test_unfinished_run_is_never_touched(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """This holds whatever its age and the policy: its tasks, snapshot, signals, messages and records stay."""
        await node.start("run-1", wait("go"), task("approve"), timer(clock.now() + 10**15))
        await store.deliver([signal("run-1", "other")])
        await node.step("run-1", marker("mark"), records=[record("run-1")])
        await store.create([new_run("run-2")])
        clock.advance(ms=self.limits.acceptance_retention_ms)
        async with unchanged(store):
            report = await store.purge(replace(EVERYTHING, stale_run_ms=0))
        assert report == PurgeReport(acceptance_records=1, stale_runs=2)

    @pytest.mark.contract("FMT-2")
    @pytest.mark.parametrize("end", [complete(), fail()])
    async def test_runs_go_however_they_ended(self, store: Store, node: SampleNode, end: object) -> None:
        """Failure is an end too."""
        await node.start("run-1", end)  # type: ignore[arg-type]
        assert (await store.purge(EVERYTHING)).runs == 1

    # --- families

    @pytest.mark.contract("FMT-2", "INV")
    async def test_finished_child_stays_while_its_parent_is_unfinished(self, store: Store, node: SampleNode) -> None:
        """The parent may still ask how it ended."""
        await node.start("parent", wait("go"))
        await node.start("child", complete(), parent="parent")
        async with unchanged(store):
            await store.purge(PurgePolicy(finished_run_ms=0))
        await node.step("parent", complete())
        assert (await store.purge(PurgePolicy(finished_run_ms=0))).runs == 2

    @pytest.mark.contract("FMT-2", "INV")
    async def test_finished_parent_stays_while_a_child_is_unfinished(self, store: Store, node: SampleNode) -> None:
        """One unfinished child is enough; the finished child can be deleted."""
        await node.start("parent", complete())
        await node.start("child-1", complete(), parent="parent")
        await node.start("child-2", wait("go"), parent="parent")
        await store.purge(PurgePolicy(finished_run_ms=0))
        assert await run_ids(store) == ["child-2", "parent"]
        await node.step("child-2", complete())
        await store.purge(PurgePolicy(finished_run_ms=0))
        assert await run_ids(store) == []

    @pytest.mark.contract("FMT-2")
    async def test_child_whose_parent_is_gone_may_go(self, store: Store, node: SampleNode) -> None:
        """A parent that no longer exists does not hold its children."""
        await node.start("child", complete(), parent="missing")
        assert (await store.purge(PurgePolicy(finished_run_ms=0))).runs == 1

    @pytest.mark.contract("FMT-2")
    async def test_grandparent_does_not_hold_a_grandchild(self, store: Store, node: SampleNode) -> None:
        """Only parents and children refer to each other."""
        await node.start("a-grandparent", wait("go"))
        await node.start("b-parent", complete(), parent="a-grandparent")
        await node.start("c-child", complete(), parent="b-parent")
        await store.purge(PurgePolicy(finished_run_ms=0))
        assert await run_ids(store) == ["a-grandparent", "b-parent"]

    # --- parts of runs

    @pytest.mark.contract("FMT-2")
    async def test_tasks_of_finished_runs_have_a_window_of_their_own(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The run stays, and so do the tasks of others."""
        await node.start("run-1", task("a"), task("b"))
        await node.start("run-2", task("c"))
        await node.step("run-1", complete())
        clock.advance(ms=1_000)
        assert await store.purge(PurgePolicy(task_ms=1_001)) == PurgeReport()
        assert await store.purge(PurgePolicy(task_ms=1_000)) == PurgeReport(tasks=2)
        assert [found.step_id for found in await store.find(TaskQuery())] == ["c"]
        assert await run_ids(store) == ["run-1", "run-2"]

    @pytest.mark.contract("FMT-2", "PRJ-4")
    async def test_runtime_states_of_finished_runs_have_a_window_of_their_own(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """A snapshot is a cache: folding the events, which stay, restores it."""
        await node.start("run-1", complete())
        await node.start("run-2", wait("go"))
        snapshot = (await node.load("run-1")).head.snapshot
        clock.advance(ms=1_000)
        assert await store.purge(PurgePolicy(runtime_state_ms=1_001)) == PurgeReport()
        assert await store.purge(PurgePolicy(runtime_state_ms=1_000)) == PurgeReport(runtime_states=1)
        assert await store.purge(PurgePolicy(runtime_state_ms=1_000)) == PurgeReport()
        head = (await node.load("run-1")).head
        assert (head.snapshot, head.status, head.version) == (None, "COMPLETED", 3)
        assert runtime_snapshot(state_of("run-1", await read_history(store, "run-1"))) == snapshot
        assert (await node.load("run-2")).head.snapshot is not None

    @pytest.mark.contract("FMT-2", "SIG-6")
    async def test_acceptance_records_go_when_they_expire_and_not_before(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The policy and the status of the run do not matter; the signals stay in the mailbox."""
        await node.start("run-1", wait("go"))
        await accept(store, signal("run-1", "other", signal_id="click-1"))
        clock.advance(ms=1)
        later = await accept(store, signal("run-1", "other", signal_id="click-2"))
        clock.advance(ms=self.limits.acceptance_retention_ms - 2, us=999)
        assert await store.purge(EVERYTHING) == PurgeReport()
        clock.advance(us=1)
        assert await store.purge(PurgePolicy()) == PurgeReport(acceptance_records=1)
        assert await deliver_one(store, signal("run-1", "other", signal_id="click-2")) == Duplicate(later)
        assert len((await node.load("run-1")).signals) == 2

    @pytest.mark.contract("FMT-2")
    async def test_what_goes_with_its_run_is_counted_once(self, store: Store, node: SampleNode) -> None:
        """This holds even when the windows of its parts have passed too."""
        await node.start("run-1", task("approve"))
        await node.step("run-1", complete())
        events = len(await read_history(store, "run-1"))
        assert await store.purge(EVERYTHING) == PurgeReport(runs=1, events=events, tasks=1)

    # --- stale runs, dry runs, limits

    @pytest.mark.contract("FMT-2")
    async def test_stale_runs_are_counted_and_kept(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """A stale run is unfinished and inactive; a turn makes it fresh, and a finished run is never stale."""
        await node.start("run-1", wait("go"))
        await node.start("run-2", wait("go"))
        await node.start("run-3", complete())
        clock.advance(ms=1_000)
        await node.step("run-2", marker("mark"))
        async with unchanged(store):
            assert await store.purge(PurgePolicy(stale_run_ms=1_000)) == PurgeReport(stale_runs=1)
            assert await store.purge(PurgePolicy(stale_run_ms=1_001)) == PurgeReport()
            assert await store.purge(PurgePolicy(stale_run_ms=0)) == PurgeReport(stale_runs=2)

    @pytest.mark.contract("FMT-2")
    async def test_dry_run_reports_what_the_purge_then_does(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """It changes nothing, whatever the policy."""
        for number in range(4):
            await node.start(f"run-{number}", task("approve"), wait("go"))
            await accept(store, signal(f"run-{number}", "other", signal_id="click-1"))
        clock.advance(ms=self.limits.acceptance_retention_ms)
        for number in range(3):
            await node.step(f"run-{number}", complete())
        policies = [
            PurgePolicy(finished_run_ms=0, stale_run_ms=0, limit=1),
            PurgePolicy(task_ms=0, runtime_state_ms=0, limit=1),
            replace(EVERYTHING, stale_run_ms=0),
        ]
        for policy in policies:
            async with unchanged(store):
                promised = await store.purge(replace(policy, dry_run=True))
                assert promised == await store.purge(replace(policy, dry_run=True))
            assert promised != PurgeReport()
            assert await store.purge(policy) == promised

    @pytest.mark.contract("FMT-2")
    async def test_limit_cuts_a_purge_short_and_says_so(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The next purge continues where it ended; each kind of data is limited separately."""
        for number in range(5):
            await node.start(f"run-{number}", task("approve"))
            await accept(store, signal(f"run-{number}", "go", signal_id="click-1"))
            await node.step(f"run-{number}", complete())
        clock.advance(ms=self.limits.acceptance_retention_ms)
        policy = PurgePolicy(task_ms=0, runtime_state_ms=0, limit=3)
        assert await store.purge(policy) == PurgeReport(tasks=3, runtime_states=3, acceptance_records=3, has_more=True)
        assert await store.purge(policy) == PurgeReport(tasks=2, runtime_states=2, acceptance_records=2)
        whole = PurgePolicy(finished_run_ms=0, limit=3)
        assert await store.purge(whole) == PurgeReport(runs=3, events=12, signals=3, has_more=True)
        assert await run_ids(store) == ["run-3", "run-4"]
        assert await store.purge(whole) == PurgeReport(runs=2, events=8, signals=2)

    async def test_purge_of_fewer_than_one_is_refused(self, store: Store) -> None:
        """A limit is at least 1."""
        with pytest.raises(InvalidInput) as raised:
            await store.purge(PurgePolicy(limit=0))
        assert raised.value.details == {"field": "limit"}

    @pytest.mark.contract("FMT-2")
    async def test_purge_leaves_other_runs_as_they_were(self, store: Store, node: SampleNode) -> None:
        """Deleting a run does not affect its neighbours."""
        await node.start("run-2", wait("go"), task("approve"))
        await store.deliver([signal("run-2", "other", signal_id="click-1")])
        await node.step("run-2", records=[record("run-2")])
        before = await read_picture(store)
        await node.start("run-1", task("approve"))
        await node.start("run-3", task("approve"))
        for run_id in ("run-1", "run-3"):
            await store.deliver([signal(run_id, "other", signal_id="click-1")])
            await node.step(run_id, complete(), records=[record(run_id)])
        await store.purge(EVERYTHING)
        assert await read_picture(store) == before

    # --- deletable and archived runs

    @pytest.mark.contract("FMT-2")
    async def test_finished_runs_whose_family_has_ended_are_found_by_their_end(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """They are found in pages, by tenant, workflow and status, whatever their order of creation."""
        await node.start("parent", wait("go"))
        await node.start("child", complete(), parent="parent")
        await node.start("c", task("approve"), tenant="acme")
        await node.start("b", complete())
        clock.advance(ms=1)
        await node.start("a", fail())
        clock.advance(ms=1)
        await node.step("c", complete())
        now = await store.now()
        everything = FinishedRunQuery(until=now)
        assert await found_runs(store, everything) == ["b", "a", "c"]
        assert await found_runs(store, replace(everything, until=now - 1)) == ["b", "a"]
        assert await found_runs(store, replace(everything, tenant="acme")) == ["c"]
        assert await found_runs(store, replace(everything, status=FAILED)) == ["a"]
        assert await found_runs(store, replace(everything, workflow="none")) == []
        for limit, look in ((1, None), (1, 1), (2, 1), (3, 2), (10, 2)):
            seen = [
                head.run_id
                async for page in pages(store.find, replace(everything, limit=limit, look=look), _end)
                for head in page
            ]
            assert seen == ["b", "a", "c"]

    @pytest.mark.contract("FMT-2")
    async def test_what_is_archived_is_remembered_by_the_purge_that_deletes_it(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Nothing is remembered for a run that is not deleted, or is another run with the same id."""
        await node.start("run-1", complete(), tenant="acme")
        await node.start("run-2", complete())
        await node.start("open", wait("go"))
        heads = {run_id: (await node.load(run_id)).head for run_id in ("run-1", "run-2", "open")}
        archived = [archived_run(head) for head in heads.values()]
        archived[1] = replace(archived[1], created_at=archived[1].created_at - 1)
        policy = PurgePolicy(run_ids=tuple(heads), finished_run_ms=0, archived=tuple(archived))
        async with unchanged(store):
            await store.purge(replace(policy, dry_run=True))
        assert await store.find(ArchivedRunQuery()) == []
        assert (await store.purge(policy)).runs == 2
        [kept] = await store.find(ArchivedRunQuery())
        assert kept == replace(archived[0], archived_at=await store.now())
        for query in (
            ArchivedRunQuery(run_id="run-1", tenant="acme", workflow=kept.plan_id, status=COMPLETED),
            ArchivedRunQuery(before=(kept.finished_at, "run-2")),
        ):
            assert await store.find(query) == [kept]
        for query in (
            ArchivedRunQuery(run_id="run-2"),
            ArchivedRunQuery(tenant="default"),
            ArchivedRunQuery(status=FAILED),
            ArchivedRunQuery(before=(kept.finished_at, "run-1")),
        ):
            assert await store.find(query) == []
        clock.advance(ms=1_000)
        assert (await store.purge(PurgePolicy(archived_run_ms=1_001))).archived_runs == 0
        assert (await store.purge(PurgePolicy(archived_run_ms=0, tenant="other"))).archived_runs == 0
        assert (await store.purge(PurgePolicy(archived_run_ms=1_000))).archived_runs == 1
        assert await store.find(ArchivedRunQuery()) == []

    @pytest.mark.contract("API-2")
    async def test_what_is_said_to_be_archived_is_checked(self, store: Store, node: SampleNode) -> None:
        """It is checked before anything is deleted."""
        await node.start("run-1", complete())
        archived = archived_run((await node.load("run-1")).head)
        async with unchanged(store):
            for policy in (
                PurgePolicy(finished_run_ms=0, archived=(archived,)),
                PurgePolicy(finished_run_ms=0, run_ids=("run-1",), archived=("run-1",)),  # type: ignore[arg-type]
                PurgePolicy(finished_run_ms=0, run_ids=("run-1",), archived=(replace(archived, offset=2**63),)),
            ):
                with pytest.raises(InvalidInput):
                    await store.purge(policy)

    @pytest.mark.contract("FMT-2", "MSG-3")
    async def test_settled_dead_letters_have_a_window_of_their_own(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """It is counted from their settlement; open ones stay, and so does their run."""
        await node.start("run-1", wait("go"))
        letters = [dead_letter("run-1", f"letter-{number}", died_at=START + number) for number in range(3)]
        turn = await node.turn(await node.load("run-1"))
        await node.commit(replace(turn, dead=tuple(letters)))
        await store.settle_dead_letters([letters[0].letter_id], "drop", "sam")
        clock.advance(ms=1)
        await store.settle_dead_letters([letters[1].letter_id], "drop", "sam")
        clock.advance(ms=999)
        assert (await store.purge(PurgePolicy(dead_letter_ms=1_001))).dead_letters == 0
        policy = PurgePolicy(dead_letter_ms=1_000)
        assert (await store.purge(replace(policy, dry_run=True))).dead_letters == 1
        assert (await store.purge(policy)).dead_letters == 1
        left = await store.find(DeadLetterQuery(settled=True))
        assert [letter.letter_id for letter in left] == [letters[1].letter_id, letters[2].letter_id]
        assert (await store.purge(PurgePolicy(dead_letter_ms=0, limit=5))).dead_letters == 1
        assert len(await store.find(DeadLetterQuery(settled=True))) == 1

    @pytest.mark.contract("FMT-2")
    async def test_the_oldest_go_first(self, store: Store, clock: VirtualClock, node: SampleNode) -> None:
        """Names do not matter."""
        for run_id in ("c", "a", "b"):
            await node.start(run_id, complete())
            clock.advance(ms=1)
        assert (await store.purge(PurgePolicy(finished_run_ms=0, limit=1))).has_more
        assert await run_ids(store) == ["a", "b"]


def _end(head: RunHead) -> tuple[Instant, str]:
    return head.finished_at or 0, head.run_id


async def found_runs(store: Store, query: FinishedRunQuery) -> list[str]:
    """Return the ids of the runs that a query finds."""
    return [head.run_id for head in await store.find(query)]


def archived_run(head: RunHead) -> ArchivedRun:
    """Return the record of where a run was archived."""
    return ArchivedRun(
        run_id=head.run_id,
        tenant=head.tenant,
        project=head.project,
        environment=head.environment,
        plan_id=head.plan_id,
        plan_version=head.plan_version,
        status=head.status,
        version=head.version,
        created_at=head.created_at,
        finished_at=head.finished_at or 0,
        object_key="place/archive/2026/a.jsonl.gz",
        offset=7,
        size_bytes=100,
    )
