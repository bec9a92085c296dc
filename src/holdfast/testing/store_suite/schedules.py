"""The store suite, schedules: changed from a revision, with the runs of their ticks in the same commit."""

import asyncio
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.audit import AuditEntry
from holdfast.core.schedules import Schedule, ScheduleSpec
from holdfast.errors import Conflict, InvalidInput
from holdfast.store.port import AuditQuery, Created, Existing, PurgePolicy, Refused, ScheduleQuery, Store
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run
from holdfast.testing.store_suite.base import BAD_NAMES, STRANGE_NAMES, SuiteBase


def schedule(schedule_id: str = "nightly", **more: Any) -> Schedule:
    """Return an hourly schedule."""
    fields = {"app": "shop", "workflow": "order", "spec": ScheduleSpec(every_ms=3_600_000), **more}
    return Schedule(schedule_id=schedule_id, **fields)


async def ids(store: Store, **query: Any) -> list[str]:
    """Return the ids of the schedules that a query finds."""
    return [found.schedule_id for found in await store.find(ScheduleQuery(**query))]


class ScheduleSuite(SuiteBase):
    """How schedules change, and the runs that they start."""

    @pytest.mark.contract("TMR-2")
    async def test_a_schedule_and_its_runs_are_one_commit(self, store: Store, clock: VirtualClock) -> None:
        """The loser of a race changes nothing and creates nothing."""
        given = schedule(input=Raw(b'{"n":1}'), context=Raw(b'{"user":"ann"}'), next_due=START + 5, tags=("eu",))
        stored, answers = await store.commit_schedule(given, 0)
        assert (stored, answers) == (replace(given, revision=1, created_at=START, updated_at=START), [])
        clock.advance(ms=1)
        ticked = replace(stored, watermark=START + 5, started=1)
        after, [created] = await store.commit_schedule(ticked, 1, [new_run("tick-1")])
        assert isinstance(created, Created)
        assert (after.revision, after.created_at, after.updated_at) == (2, START, clock.now())
        with pytest.raises(Conflict):
            await store.commit_schedule(replace(ticked, started=7), 1, [new_run("tick-2")])
        assert await store.load(["tick-2"]) == [None]
        assert await store.find(ScheduleQuery()) == [after]
        [run] = await store.load(["tick-1"])
        assert run is not None
        assert run.head.lease_owner is None

    @pytest.mark.contract("TMR-2")
    async def test_a_retry_of_a_commit_is_recognised(self, store: Store, clock: VirtualClock) -> None:
        """A retry follows a lost answer; a different change of the same revision is refused."""
        stored, _ = await store.commit_schedule(schedule(), 0)
        ticked = replace(stored, watermark=START)
        after, _ = await store.commit_schedule(ticked, 1, [new_run("tick-1", request_id="t1")])
        clock.advance(ms=5)
        again, [answer] = await store.commit_schedule(ticked, 1, [new_run("tick-9", request_id="t1")])
        assert (again, answer) == (after, Existing("tick-1"))

    @pytest.mark.contract("TMR-2", "FMT-2")
    async def test_a_retry_does_not_bring_a_deleted_run_back(self, store: Store, node: SampleNode) -> None:
        """Retention may have deleted the run of a tick before a late retry of its commit arrives."""
        stored, _ = await store.commit_schedule(schedule(), 0)
        ticked = replace(stored, watermark=START)
        entry = AuditEntry(entry_id="e-1", operation="schedules.trigger", actor="ann", subject="nightly")
        for _ in range(2):
            after, [answer] = await store.commit_schedule(ticked, 1, [new_run("tick-1")], entry)
            assert answer.run_id == "tick-1"  # type: ignore[union-attr]
            for run in await node.claim():
                await node.step(run.head.run_id, complete())
                assert (await store.purge(PurgePolicy(finished_run_ms=0))).runs == 1
        assert await store.load(["tick-1"]) == [None]
        assert (after.revision, len(await store.find(AuditQuery()))) == (2, 1)

    @pytest.mark.contract("TMR-2")
    async def test_of_many_commits_at_once_one_wins(self, store: Store, clock: VirtualClock) -> None:
        """This holds for new and existing schedules."""
        for revision in (0, 1):
            commits = [
                store.commit_schedule(
                    schedule(note=f"{revision} {number}"), revision, [new_run(f"{revision}-{number}")]
                )
                for number in range(6)
            ]
            answers = await asyncio.gather(*commits, return_exceptions=True)
            assert sum(isinstance(answer, Conflict) for answer in answers) == 5
            runs = await store.load([f"{revision}-{number}" for number in range(6)])
            assert sum(run is not None for run in runs) == 1

    @pytest.mark.contract("TMR-2")
    async def test_a_run_that_is_refused_does_not_undo_the_rest(self, store: Store, clock: VirtualClock) -> None:
        """The tick counts as handled all the same."""
        await store.create([new_run("taken", request_id="other")])
        starts = [new_run("taken"), new_run("fine")]
        stored, [refused, created] = await store.commit_schedule(schedule(), 0, starts)
        assert isinstance(refused, Refused)
        assert isinstance(created, Created)
        assert await store.find(ScheduleQuery()) == [stored]

    @pytest.mark.contract("TMR-2", "API-4")
    async def test_they_are_found_by_place_app_workflow_and_due_instant(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """A paused one is not due."""
        await store.commit_schedule(schedule("b", next_due=START + 9), 0)
        await store.commit_schedule(schedule("a", next_due=START + 9, workflow="etl"), 0)
        await store.commit_schedule(schedule("paused", queued=(1,)), 0)
        await store.commit_schedule(schedule("a", tenant="other", next_due=START, app="b"), 0)
        assert await ids(store) == ["a", "b", "paused", "a"]
        assert await ids(store, by_due=True) == ["a", "a", "b"]
        assert await ids(store, by_due=True, app="shop") == ["a", "b"]
        assert await ids(store, by_due=True, app="shop", limit=1) == ["a"]
        assert await ids(store, waiting=True) == ["paused"]
        assert await ids(store, workflow="etl") == ["a"]
        assert await ids(store, tenant="default", schedule_id="a", environment="default") == ["a"]
        assert await ids(store, project="x") == []
        assert await ids(store, after=("default", "default", "default", "a"), limit=2) == ["b", "paused"]

    @pytest.mark.contract("TMR-2")
    async def test_a_deleted_one_is_gone_and_may_come_back(self, store: Store, clock: VirtualClock) -> None:
        """Only at the revision that was read."""
        stored, _ = await store.commit_schedule(schedule(), 0)
        assert not await store.delete_schedule(stored.place, 2)
        assert await store.delete_schedule(stored.place, 1)
        assert not await store.delete_schedule(stored.place, 1)
        with pytest.raises(Conflict):
            await store.commit_schedule(stored, 1, [new_run("late")])
        assert await store.load(["late"]) == [None]
        clock.advance(ms=1)
        again, _ = await store.commit_schedule(schedule(note="again"), 0)
        assert again.revision == 1
        with pytest.raises(Conflict):  # a tick that was in flight when the schedule was deleted and created again
            await store.commit_schedule(replace(stored, watermark=START), 1, [new_run("late")])
        assert await store.load(["late"]) == [None]
        assert await store.find(ScheduleQuery()) == [again]

    @pytest.mark.contract("TMR-2", "API-4")
    async def test_what_callers_change_is_in_the_audit_log(self, store: Store, clock: VirtualClock) -> None:
        """The entry is in the same commit."""
        entry = AuditEntry(entry_id="e-1", operation="schedules.create", actor="ann", subject="nightly")
        stored, _ = await store.commit_schedule(schedule(), 0, audit=entry)
        with pytest.raises(Conflict):
            await store.commit_schedule(schedule(note="x"), 0, audit=replace(entry, entry_id="e-2"))
        await store.delete_schedule(stored.place, 1, replace(entry, entry_id="e-3", operation="schedules.delete"))
        await store.delete_schedule(stored.place, 1, replace(entry, entry_id="e-4", operation="schedules.delete"))
        assert [(found.entry_id, found.at) for found in await store.find(AuditQuery())] == [
            ("e-1", START),
            ("e-3", START),
        ]

    @pytest.mark.contract("FMT-2", "TMR-2")
    async def test_a_tenant_that_is_deleted_has_no_schedules(self, store: Store, clock: VirtualClock) -> None:
        """Other tenants keep theirs."""
        await store.commit_schedule(schedule("mine", tenant="gone"), 0)
        await store.commit_schedule(schedule("theirs"), 0)
        await store.purge(PurgePolicy(tenant="gone", finished_run_ms=0, plans=True))
        assert await ids(store) == ["theirs"]

    @pytest.mark.contract("TMR-2", "API-2")
    async def test_malformed_schedules_are_refused(self, store: Store, clock: VirtualClock) -> None:
        """Nothing is stored; unusual names are valid."""
        bad: list[Any] = [schedule(name) for name in BAD_NAMES]  # type: ignore[arg-type]
        bad += [schedule(tenant=""), schedule(app=None), schedule(spec=ScheduleSpec()), schedule(next_due="soon"), None]
        bad += [schedule(spec=ScheduleSpec(every_ms=1)), schedule(input=Raw(b"{")), schedule(tags=("",))]
        for given in bad:
            with pytest.raises(InvalidInput):
                await store.commit_schedule(given, 0)
        assert await ids(store) == []
        for name in STRANGE_NAMES:
            await store.commit_schedule(schedule(name), 0)
        assert sorted(await ids(store)) == sorted(STRANGE_NAMES)
