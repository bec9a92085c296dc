"""Schedules of a real node: declared in code and made at run time; overlap, operators, deployments, tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.core.index_rows import START, runtime_snapshot
from holdfast.core.run_context import encode_context
from holdfast.core.schedules import Schedule
from holdfast.core.state import CANCELLED, PENDING, RUNNING, state_of
from holdfast.engine.ticks import TZDATA
from holdfast.errors import Conflict, InvalidInput, NotFound, Overloaded
from holdfast.store.memory import MemoryStore
from holdfast.store.port import RunHead, RunQuery, ScheduleQuery, Store
from holdfast.testing import VirtualClock

SECOND = timedelta(seconds=1)
OPTIONS = hf.NodeOptions(safety_poll_s=0.2, lease_ms=2_000, drain_s=0.5)


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until a condition holds, and return what it gave."""
    async with asyncio.timeout(60):
        while not (found := await condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return found


async def runs_of(store: Store, schedule_id: str) -> list[RunHead]:
    """Return the runs of a schedule, the oldest first."""
    found = await store.find(RunQuery(tag=f"schedule:{schedule_id}", newest=True))
    return found[::-1]


async def tick_of(app: hf.App, run_id: str) -> tuple[str, int]:
    """Return the schedule and the tick that a run knows."""
    first: Any = (await app.run(run_id).events())[0].data
    return first.schedule.schedule_id, first.schedule.tick


def an_app(name: str = "clock") -> hf.App:
    """Return an app with a workflow that ends, and one that waits."""
    app = hf.App(name)

    @app.workflow
    async def report(n: int = 0) -> int:
        return n

    @app.workflow
    async def hold() -> None:
        await hf.wait_signal("go")

    return app


@pytest.mark.contract("TMR-2")
async def test_what_is_declared_in_code_starts_runs_that_know_their_tick(store: Store) -> None:
    app = hf.App("clock")

    @app.schedule(every=SECOND, tags=("eu",), reference_key="r-7", input={"n": 7}, overlap="allow")
    @app.workflow
    async def report(n: int = 0) -> int:
        return n

    async with app.node(store, options=OPTIONS):
        runs = await until(lambda: _at_least(store, "report", 2))
        assert await app.run(runs[0].run_id).result() == 7
        ticks = []
        for head in runs:
            schedule_id, tick = await tick_of(app, head.run_id)
            assert schedule_id == "report"
            ticks.append(tick)
            assert head.created_at >= ticks[-1]
            assert (head.tags, head.reference_key) == (("eu", "schedule:report"), "r-7")
        assert ticks == [ticks[0] + number * 1_000_000 for number in range(len(ticks))]
        [schedule] = await app.schedules.list()
        assert (schedule.tzdata, schedule.started >= 2) == (TZDATA, True)
        locks = await store.find_locks()
        assert [lock.name for lock in locks] == ["schedules of clock"]


async def _at_least(store: Store, schedule_id: str, count: int) -> list[RunHead]:
    runs = await runs_of(store, schedule_id)
    return runs if len(runs) >= count else []


@pytest.mark.contract("TMR-2")
async def test_a_node_without_schedules_takes_no_lock(store: Store) -> None:
    app = an_app()
    async with app.node(store, options=OPTIONS):
        await app.start(_workflow_object(app, "report"), 1)
        assert await store.find_locks() == []
        made = await app.schedules.create("soon", workflow="report", every=SECOND)
        assert made.revision == 1
        await until(lambda: _at_least(store, "soon", 1))


def _workflow_object(app: hf.App, name: str) -> Any:
    return hf.Workflow(app.registry.workflow(name))


@pytest.mark.contract("TMR-2")
@pytest.mark.parametrize("overlap", ["skip", "queue", "cancel-running", "allow"])
async def test_what_becomes_of_ticks_while_a_run_is_not_finished(store: Store, overlap: Any) -> None:
    app = an_app()
    async with app.node(store, options=OPTIONS):
        await app.schedules.create("tick", workflow="hold", every=SECOND, overlap=overlap)
        if overlap == "skip":
            skipped = await until(lambda: _when(app, lambda schedule: schedule.skipped >= 2))
            [run] = await runs_of(store, "tick")
            assert skipped.running == (run.run_id,)
            await app.run(run.run_id).signal("go")
            assert len(await until(lambda: _at_least(store, "tick", 2))) == 2
        elif overlap == "queue":
            queued = await until(lambda: _when(app, lambda schedule: len(schedule.queued) >= 2))
            [run] = await runs_of(store, "tick")
            await app.schedules.pause("tick")
            await app.schedules.resume("tick")
            await app.run(run.run_id).signal("go")
            _, second, *more = await until(lambda: _at_least(store, "tick", 2))
            assert more == []
            assert await tick_of(app, second.run_id) == ("tick", queued.queued[0])
        elif overlap == "cancel-running":
            runs = await until(lambda: _at_least(store, "tick", 3))
            await until(lambda: _status(store, runs[0].run_id, CANCELLED))
            await until(lambda: _status(store, runs[1].run_id, CANCELLED))
        else:
            runs = await until(lambda: _at_least(store, "tick", 3))
            await until(lambda: _status(store, runs[0].run_id, RUNNING))
        await app.schedules.delete("tick")


async def _when(app: hf.App, condition: Callable[[Schedule], bool]) -> Schedule | None:
    schedule = await app.schedules.get("tick")
    return schedule if condition(schedule) else None


async def _status(store: Store, run_id: str, status: Any) -> bool:
    [head] = await store.find(RunQuery(run_ids=(run_id,)))
    return bool(head.status == status)


@pytest.mark.contract("TMR-2")
async def test_what_operators_did_stays_when_code_is_deployed_again(store: Store) -> None:
    def deployed(every: timedelta) -> hf.App:
        app = an_app()
        app.schedule(every=every, workflow="report", schedule_id="s")
        return app

    app = deployed(timedelta(hours=1))
    async with app.node(store, options=OPTIONS):
        first = await app.schedules.pause("s", "the bank is down")
        assert (first.is_paused, first.next_due) == (True, None)
    app = deployed(timedelta(hours=1))
    async with app.node(store, options=OPTIONS):
        assert await app.schedules.get("s") == first
    app = deployed(timedelta(hours=2))
    async with app.node(store, options=OPTIONS):
        changed = await app.schedules.get("s")
        assert (changed.spec.every_ms, changed.is_paused, changed.note) == (7_200_000, True, "the bank is down")
        assert app.schedules.next_ticks(changed) == []
        resumed = await app.schedules.resume("s")
        assert resumed.next_due == resumed.next_tick
        [due, *_] = app.schedules.next_ticks(resumed)
        assert due > datetime.fromtimestamp(resumed.updated_at / 1_000_000, UTC)


@pytest.mark.contract("TMR-2")
async def test_a_schedule_is_triggered_beside_its_ticks_and_once_for_each_request(store: Store) -> None:
    app = an_app()
    async with app.node(store, options=OPTIONS):
        await app.schedules.create("far", "0 0 1 1 *", workflow="report", input={"n": 3}, tz="Europe/Sofia")
        run = await app.schedules.trigger("far", request_id="click-1")
        again = await app.schedules.trigger("far", request_id="click-1")
        other = await app.schedules.trigger("far")
        assert run.run_id == again.run_id != other.run_id
        assert await run.result() == 3
        with pytest.raises(NotFound):
            await app.schedules.trigger("nothing")
        with pytest.raises(Conflict):
            await app.schedules.create("far", "@daily", workflow="report")


@pytest.mark.contract("TMR-2", "FMT-2")
@pytest.mark.parametrize("overlap", ["queue", "allow"])
async def test_a_backfill_runs_what_has_not_run(store: Store, overlap: Any) -> None:
    app = an_app()
    async with app.node(store, options=OPTIONS):
        await app.schedules.create("daily", "@daily", workflow="report")
        now = datetime.fromtimestamp(await store.now() / 1_000_000, UTC)
        since = now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=3)
        assert await app.schedules.backfill("daily", since, now, overlap=overlap) == 4
        runs = await until(lambda: _at_least(store, "daily", 4))
        for run in runs:
            await app.run(run.run_id).result()
        assert await app.schedules.backfill("daily", since - timedelta(days=1), now, overlap="allow") == 5
        assert len(await until(lambda: _at_least(store, "daily", 5))) == 5
        with pytest.raises(InvalidInput):
            await app.schedules.backfill("daily", since - timedelta(days=5_000), now)


GREETING = """
plan: greeting
version: "1"
inputs:
  who: {type: string}
steps:
  - id: say
    activity: greet
    input: {who: "${inputs.who}"}
"""


@pytest.mark.contract("TMR-2", "WF-1")
async def test_a_plan_runs_on_a_schedule(store: Store) -> None:
    app = hf.App("clock")

    @app.activity
    async def greet(who: str) -> str:
        return f"hello {who}"

    async with app.node(store, options=OPTIONS):
        await app.plans.register(GREETING)
        with pytest.raises(InvalidInput):
            await app.schedules.create("plan", workflow="plan:greeting", every=SECOND, input={})
        await app.schedules.create("plan", workflow="plan:greeting", every=SECOND, input={"who": "Ada"})
        [run, *_] = await until(lambda: _at_least(store, "plan", 1))
        await app.run(run.run_id).result()


@pytest.mark.contract("TMR-2", "QUE-2")
async def test_a_tick_that_is_refused_is_over_and_shown(store: Store) -> None:
    app = hf.App("clock")

    @app.workflow(at_once=1, overload="reject")
    async def hold() -> None:
        await hf.wait_signal("go")

    async with app.node(store, options=OPTIONS):
        await app.start(hold)
        await app.schedules.create("tick", workflow=hold, every=SECOND)
        shown = await until(lambda: _when(app, lambda schedule: bool(schedule.last_error)))
        assert (shown.running, shown.last_run_id) == ((), "")


@pytest.mark.contract("TMR-2", "API-2")
async def test_what_cannot_be_scheduled_is_refused() -> None:
    app = an_app()
    with pytest.raises(InvalidInput):
        app.schedule("* * * * *", every=SECOND, workflow="report")
    with pytest.raises(InvalidInput):
        app.schedule("@daily", tz="Nowhere/City", workflow="report")
    with pytest.raises(InvalidInput):
        app.schedule("@daily", workflow="report", input={"m": 1})
    with pytest.raises(NotFound):
        app.schedule("@daily", workflow="nothing")
    app.schedule("@daily", workflow="report")
    with pytest.raises(InvalidInput, match="twice"):
        app.schedule("@hourly", workflow="report")
    past = datetime(2020, 1, 1, tzinfo=UTC)
    async with app.node("memory://", options=OPTIONS):
        with pytest.raises(InvalidInput, match="no tick"):
            await app.schedules.create("late", workflow="report", at=past)
        with pytest.raises(InvalidInput, match="time zone"):
            await app.schedules.create("late", workflow="report", at=datetime(2030, 1, 1))  # noqa: DTZ001


# --- runs that are started later


@pytest.mark.contract("TMR-1", "TMR-2")
async def test_a_delayed_run_is_there_and_starts_when_it_is_due(store: Store) -> None:
    app = an_app()
    async with app.node(store, options=OPTIONS):
        run = await app.start(_workflow_object(app, "report"), 5, after=2 * SECOND, request_id="r-1")
        again = await app.start(_workflow_object(app, "report"), 5, after=timedelta(hours=1), request_id="r-1")
        assert run.run_id == again.run_id
        [head] = await store.find(RunQuery(run_ids=(run.run_id,)))
        assert (head.status, head.lease_owner) == (PENDING, None)
        snapshot = runtime_snapshot(state_of(run.run_id, await run.events()))
        assert (snapshot.waiting_kind, snapshot.waiting_until) == (START, head.ready_at), "what it waits for is named"
        assert head.snapshot == snapshot, "the snapshot is the fold of the events"
        fork = await run.fork()
        assert (await store.find(RunQuery(run_ids=(fork.run_id,))))[0].ready_at == head.ready_at, "nor does a fork"
        assert await run.result() == 5
        [head_after] = await store.find(RunQuery(run_ids=(run.run_id,)))
        assert head_after.snapshot is not None
        assert (head_after.snapshot.waiting_kind, head_after.snapshot.waiting_until) == (None, None)
        started = next(event for event in await run.events() if event.event_type == "RunStarted")
        assert head.ready_at is not None
        assert started.persisted_at >= head.ready_at > head.created_at


@pytest.mark.contract("TMR-2", "SIG-3", "SIG-13")
async def test_a_delayed_run_can_be_cancelled_and_signalled_and_survives_its_node(store: Store) -> None:
    app = an_app()
    hold, report = _workflow_object(app, "hold"), _workflow_object(app, "report")
    moment = datetime.fromtimestamp(await store.now() / 1_000_000, UTC)
    async with app.node(store, options=OPTIONS):
        far = await app.start(report, at=moment + timedelta(days=400))
        await far.cancel()
        await until(lambda: _status(store, far.run_id, CANCELLED))
        past = await app.start(report, 2, at=moment - timedelta(days=1))
        assert await past.result() == 2
        early = await app.start(hold, after=2 * SECOND)
        await early.signal("go")
        [head] = await store.find(RunQuery(run_ids=(early.run_id,)))
        assert head.ready_at is not None
        assert head.status == PENDING or await store.now() >= head.ready_at, "a signal does not start it"
    async with app.node(store, options=OPTIONS):
        await app.run(early.run_id).result()
        started = next(event for event in await app.run(early.run_id).events() if event.event_type == "RunStarted")
        assert started.persisted_at >= head.ready_at


@pytest.mark.contract("TMR-2", "API-2")
async def test_how_a_run_cannot_be_delayed() -> None:
    app = hf.App("clock")

    @app.workflow
    async def plain() -> None: ...

    async with app.node("memory://"):
        for wrong in (
            {"at": datetime(2030, 1, 1)},  # noqa: DTZ001
            {"after": timedelta(seconds=-1)},
            {"after": timedelta(hours=1), "at": datetime(2030, 1, 1, tzinfo=UTC)},
        ):
            with pytest.raises(InvalidInput):
                await app.start(plain, **wrong)


@pytest.mark.contract("TMR-2", "TMR-1")
async def test_the_first_schedule_of_an_app_that_is_made_at_run_time_begins_at_once(store: Store) -> None:
    """A node that has looked for schedules and found none does not wait for its next look."""
    app = an_app()
    options = hf.NodeOptions(safety_poll_s=600.0, lease_ms=2_000, drain_s=0.5)
    async with app.node(store, options=options):
        await (await app.start(_workflow_object(app, "report"))).result()
        await app.schedules.create("late", workflow="report", every=SECOND)
        await until(lambda: _at_least(store, "late", 1))


# --- borders


@pytest.mark.contract("TMR-2", "OWN-3")
@pytest.mark.parametrize("overlap", ["skip", "queue", "cancel-running", "allow"])
async def test_what_becomes_of_the_ticks_of_a_day_without_nodes(overlap: Any) -> None:
    """Each of them is run, skipped, queued or cancelled, once and in order; what is older than `catch_up` is missed."""
    clock = VirtualClock()
    store, app = MemoryStore(clock=clock), an_app()
    hour, day = timedelta(hours=1), 24 * 3_600_000
    async with app.node(store, options=OPTIONS):
        await app.schedules.create("tick", workflow="hold", every=hour, overlap=overlap, catch_up=timedelta(hours=20))
        first = (await app.schedules.get("tick")).next_tick
    assert first is not None
    clock.advance(ms=day)
    due = [tick for tick in range(first, clock.now() + 1, 3_600_000_000) if tick >= clock.now() - 20 * 3_600_000_000]
    async with app.node(store, options=OPTIONS):
        await until(lambda: _when(app, lambda schedule: schedule.watermark >= due[-1]))
        runs = await runs_of(store, "tick")
        ticks = [(await tick_of(app, run.run_id))[1] for run in runs]
        schedule = await app.schedules.get("tick")
        if overlap == "allow":
            assert sorted(ticks) == due
        elif overlap == "skip":
            assert (ticks, schedule.skipped) == ([due[0]], len(due) - 1)
        elif overlap == "queue":
            assert (ticks, list(schedule.queued)) == ([due[0]], due[1:])
            await app.run(runs[0].run_id).signal("go")
            [_, second] = await until(lambda: _at_least(store, "tick", 2))
            assert (await tick_of(app, second.run_id))[1] == due[1], "one after the other, the oldest first"
        else:
            assert (ticks, schedule.skipped) == ([due[-1]], len(due) - 1), "one would cancel the other at once"
            await until(lambda: _status(store, runs[-1].run_id, RUNNING))
        assert schedule.missed > 0
    await store.close()


FAR = "0 0 1 1 *"


@pytest.mark.contract("TMR-2", "OWN-3")
async def test_a_backfill_goes_on_after_a_pause(store: Store) -> None:
    """A queue does not wait for the next tick, which may be next year."""
    app = an_app()
    async with app.node(store, options=OPTIONS):
        await app.schedules.create("tick", FAR, workflow="hold")
        year = datetime.fromtimestamp(await store.now() / 1_000_000, UTC).year
        period = datetime(year - 2, 1, 1, tzinfo=UTC), datetime(year, 1, 1, tzinfo=UTC) + SECOND
        assert await app.schedules.backfill("tick", *period) == 3
        [first] = await until(lambda: _at_least(store, "tick", 1))
        await app.schedules.pause("tick")
        await app.run(first.run_id).signal("go")
        await app.run(first.run_id).result()
        await asyncio.sleep(1)  # it is seen that the run has finished, and nothing follows
        assert len(await runs_of(store, "tick")) == 1
        await app.schedules.resume("tick")
        await until(lambda: _at_least(store, "tick", 2))
        assert len((await app.schedules.get("tick")).queued) == 1


@pytest.mark.contract("TMR-2")
async def test_a_backfill_gets_its_turn_beside_runs_that_always_overlap(store: Store) -> None:
    """Its ticks run one after the other, whatever the other runs of a schedule do that lets them overlap."""
    app = an_app()
    async with app.node(store, options=OPTIONS):
        await app.schedules.create("tick", every=SECOND, workflow="hold", overlap="allow")
        began = (await until(lambda: _at_least(store, "tick", 1)))[0].created_at
        period = datetime(2020, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC) + 3 * SECOND
        assert await app.schedules.backfill("tick", *period) == 3
        since = int(period[0].timestamp()) * 1_000_000
        for number in range(3):
            *before, run = await until(partial(_of_ticks_before, app, store, began, number + 1))
            assert [await tick_of(app, run.run_id), len(before)] == [("tick", since + number * 1_000_000), number]
            count = len(await runs_of(store, "tick"))
            await until(partial(_at_least, store, "tick", count + 1))
            assert await _of_ticks_before(app, store, began, number + 2) == [], "one after the other"
            await app.run(run.run_id).signal("go")
        assert (await app.schedules.get("tick")).queued == ()


async def _of_ticks_before(app: hf.App, store: Store, instant: int, count: int) -> list[RunHead]:
    """Return the runs of ticks that were over before an instant by more than an hour, if there are so many."""
    heads = await runs_of(store, "tick")
    found = [head for head in heads if (await tick_of(app, head.run_id))[1] < instant - 3_600_000_000]
    return found if len(found) >= count else []


@pytest.mark.contract("TMR-2")
async def test_a_queue_goes_on_although_its_schedule_was_changed_while_its_next_run_was_decided() -> None:
    class Racing(MemoryStore):
        """A store in which somebody else changes the schedule first, once."""

        is_armed = False

        async def commit_schedule(self, schedule: Schedule, *given: Any) -> Any:
            if self.is_armed and given[1:2] and given[1]:
                self.is_armed = False
                [other] = await self.find(ScheduleQuery(schedule_id="tick"))
                await super().commit_schedule(replace(other, note="by an operator"), other.revision)
            return await super().commit_schedule(schedule, *given)

    store, app = Racing(), an_app()
    async with app.node(store, options=OPTIONS):
        await app.schedules.create("tick", FAR, workflow="hold")
        year = datetime.fromtimestamp(await store.now() / 1_000_000, UTC).year
        await app.schedules.backfill("tick", datetime(year - 1, 1, 1, tzinfo=UTC), datetime(year, 2, 1, tzinfo=UTC))
        [first] = await until(lambda: _at_least(store, "tick", 1))
        store.is_armed = True
        await app.run(first.run_id).signal("go")
        await until(lambda: _at_least(store, "tick", 2))
        assert (await app.schedules.get("tick")).note == "by an operator"
    await store.close()


@pytest.mark.contract("TMR-2")
async def test_what_is_shown_of_a_schedule_is_a_run_that_there_is(store: Store) -> None:
    app = hf.App("clock")

    @app.workflow(at_once=1, overload="reject")
    async def hold() -> None:
        await hf.wait_signal("go")

    async with app.node(store, options=OPTIONS):
        await app.schedules.create("tick", FAR, workflow=hold)
        run = await app.schedules.trigger("tick", request_id="click")
        assert (await app.schedules.trigger("tick", request_id="click")).run_id == run.run_id
        with pytest.raises(Overloaded):
            await app.schedules.trigger("tick")
        schedule = await app.schedules.get("tick")
        assert (schedule.last_run_id, schedule.running, schedule.started) == (run.run_id, (run.run_id,), 1)
        assert schedule.last_error
        year = datetime.fromtimestamp(await store.now() / 1_000_000, UTC).year
        period = datetime(year - 1, 1, 1, tzinfo=UTC), datetime(year, 2, 1, tzinfo=UTC)
        await app.schedules.backfill("tick", *period, overlap="allow")
        assert (await app.schedules.get("tick")).started == 1, "what is refused is not started"


@pytest.mark.contract("TMR-2", "FMT-1")
async def test_a_tick_that_was_due_during_a_deployment_is_run_by_what_is_deployed() -> None:
    """A declaration with other options and the same ticks goes on where the one before was."""
    clock = VirtualClock()
    store, hour = MemoryStore(clock=clock), timedelta(hours=1)

    def deployed(n: int, every: timedelta = hour) -> hf.App:
        app = an_app()
        context = {"release": str(n)}
        app.schedule(
            every=every, workflow="report", schedule_id="tick", input={"n": n}, overlap="allow", context=context
        )
        return app

    app = deployed(1)
    async with app.node(store, options=OPTIONS):
        due = (await app.schedules.get("tick")).next_tick
    clock.advance(ms=3_600_000)
    app = deployed(2)
    async with app.node(store, options=OPTIONS):
        [run] = await until(lambda: _at_least(store, "tick", 1))
        assert await tick_of(app, run.run_id) == ("tick", due)
        assert await app.run(run.run_id).result() == 2
        first: Any = (await app.run(run.run_id).events())[0].data
        assert first.context == encode_context({"release": "2"})
    clock.advance(ms=3_600_000)
    app = deployed(3, 2 * hour)
    async with app.node(store, options=OPTIONS):
        schedule = await app.schedules.get("tick")
        assert schedule.watermark >= clock.now() - 1_000_000, "other ticks begin anew"
    await store.close()


@pytest.mark.contract("TMR-2", "FMT-1", "WF-3")
async def test_the_version_is_no_part_of_a_tick(store: Store) -> None:
    """What has run before a deployment is not run again after it; what has not is run by the new version."""

    def deployed(version: str) -> hf.App:
        app = hf.App("clock")

        @app.workflow(version=version)
        async def report() -> str:
            return version

        return app

    first, second = deployed("1"), deployed("2")
    day = timedelta(days=1)
    async with first.node(store, options=OPTIONS):
        await first.schedules.create("daily", "@daily", workflow="report")
        now = datetime.fromtimestamp(await store.now() / 1_000_000, UTC)
        since = now.replace(hour=0, minute=0, second=0, microsecond=0) - 2 * day
        assert await first.schedules.backfill("daily", since, since + 2 * day, overlap="allow") == 2
    async with second.node(store, options=OPTIONS):
        assert await second.schedules.backfill("daily", since - day, since + 2 * day, overlap="allow") == 3
        runs = await runs_of(store, "daily")
        ticks = {(await tick_of(second, run.run_id))[1]: run.plan_version for run in runs}
    began = int(since.timestamp()) * 1_000_000
    assert (len(runs), ticks) == (3, {began - DAY: "2", began: "1", began + DAY: "1"})


DAY = 86_400_000_000


@pytest.mark.contract("TMR-2", "API-2")
async def test_a_declaration_does_not_take_the_schedule_of_another_app(store: Store) -> None:
    def declaring(name: str) -> hf.App:
        app = an_app(name)
        app.schedule(FAR, workflow="report")
        return app

    async with declaring("first").node(store, options=OPTIONS):
        with pytest.raises(Conflict, match="'first'"):
            async with declaring("second").node(store, options=OPTIONS):
                pass


@pytest.mark.contract("TMR-2")
async def test_two_triggers_at_the_same_instant_are_two_runs() -> None:
    store, app = MemoryStore(clock=VirtualClock()), an_app()
    async with app.node(store, options=OPTIONS):
        await app.schedules.create("tick", FAR, workflow="report")
        assert len({(await app.schedules.trigger("tick")).run_id for _ in range(3)}) == 3
    await store.close()


# --- ids that are taken


@pytest.mark.contract("TMR-2", "QUE-5")
@pytest.mark.parametrize("overlap", ["skip", "queue"])
async def test_a_run_that_replaces_that_of_a_tick_is_none_of_its_schedule(store: Store, overlap: Any) -> None:
    """The schedule goes on: the run of its tick has ended. The one that replaces it is somebody's own."""
    app = an_app()
    hold = _workflow_object(app, "hold")
    async with app.node(store, options=OPTIONS):
        await app.schedules.create("tick", workflow="hold", every=SECOND, overlap=overlap)
        [first, *_] = await until(lambda: _at_least(store, "tick", 1))
        await until(lambda: _when(app, lambda schedule: schedule.skipped + len(schedule.queued) >= 1))
        own = await app.start(hold, run_id=first.run_id, reuse="terminate-and-restart")
        assert own.run_id == f"{first.run_id}~000002"
        second = (await until(lambda: _at_least(store, "tick", 2)))[1]
        assert second.run_id not in (first.run_id, own.run_id)
        assert await _status(store, first.run_id, CANCELLED)
        assert await _status(store, own.run_id, RUNNING)
        assert own.run_id not in (await app.schedules.get("tick")).running
        [queued, *_] = await own.events()
        assert queued.data.schedule is None  # type: ignore[attr-defined]
        await app.schedules.pause("tick")
        await own.signal("go")
        await own.result()
        again = await app.start(hold, run_id=first.run_id, reuse="restart-if-finished")
        assert again.run_id == f"{first.run_id}~000003"
        await app.schedules.delete("tick")


@pytest.mark.contract("TMR-2", "QUE-5")
async def test_a_tick_whose_id_somebody_has_taken_runs_no_second_time(store: Store) -> None:
    """Ids of ticks are no secret: a run that has one is not mistaken for the tick's, nor ended by it."""
    app = an_app()
    hold = _workflow_object(app, "hold")
    async with app.node(store, options=OPTIONS):
        await app.schedules.create("far", "0 0 1 1 *", workflow="hold")
        tick = await app.schedules.trigger("far", request_id="click-1")
        again = await app.start(hold, run_id=tick.run_id, reuse="terminate-and-restart")
        assert (await app.schedules.trigger("far", request_id="click-1")).run_id == tick.run_id
        assert await _status(store, again.run_id, PENDING) or await _status(store, again.run_id, RUNNING)
        runs = await runs_of(store, "far")
        assert [run.run_id for run in runs] == [tick.run_id]
