"""Schedules of an app: the operations on them, and the duty that fires their ticks.

Every change is computed from a schedule that was read, and committed at its revision; if a concurrent change was
committed first, the schedule is read again. The runs of ticks are created by the same commit (`core/schedules.py`
explains why each tick therefore fires once). The host lock of the duty only saves work: without it every node would
compute the ticks, and all but one would get a conflict.

The duty sleeps until the next due instant, or until it is notified. The runs of a schedule that queues its ticks are
awaited one after the other.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.clock import Ids
from holdfast.core import codec, instants
from holdfast.core import events as e
from holdfast.core.audit import AuditEntry, Caller, audit_entry
from holdfast.core.instants import Instant
from holdfast.core.plans import PLAN_PREFIX, PlanRef, is_plan
from holdfast.core.schedules import (
    DAY_MS,
    QUEUED_TICKS,
    STARTS_AT_ONCE,
    Overlap,
    Schedule,
    ScheduleSpec,
    check_schedule,
    decide_ticks,
    due_at,
    request_id_of,
    tag_of,
    waited_for,
    with_next,
)
from holdfast.core.state import TERMINAL
from holdfast.engine.host_locks import HeldLock
from holdfast.engine.plans import Plans
from holdfast.engine.ticks import TZDATA, check_calendar, following, ticks_after
from holdfast.errors import CallerError, Conflict, HoldfastError, InvalidInput, NotFound, StoreError
from holdfast.registry import Registry
from holdfast.store import port
from holdfast.store.port import RunQuery, ScheduleQuery

Place = tuple[str, str, str, str]
"""A schedule's tenant, project, environment and id."""

Change = Callable[[Schedule, Instant], Schedule]
Prepare = Callable[[e.RunQueued, Schedule, Instant], port.NewRun]

TRIES = 20
"""How often a change is retried after a conflict."""

LOOK_S = 1.0
"""The shortest time between two looks of the duty, however often it is notified."""

DEFER_MS = 5_000
"""How long a schedule is deferred that cannot be fired, because no node has its workflow, or because of an error."""

RUNNING = 100
"""How many of its latest runs, which may be unfinished, a schedule remembers."""

INPUT_BYTES = 64 * 1024
"""The maximum size of a schedule's input."""


logger = logging.getLogger("holdfast.schedules")


class Declaration(Struct, frozen=True):
    """A schedule that is declared in code."""

    schedule: Schedule

    @property
    def digest(self) -> str:
        """Identifies the declaration when it is made again."""
        return codec.digest(codec.encode_text(self.schedule).encode())


class Schedules:
    """The schedules that an app has in a store."""

    def __init__(
        self,
        app: str,
        store: port.Store,
        registry: Registry,
        plans: Plans,
        ids: Ids,
        prepare: Prepare,
        cancel: Callable[[str, str], Awaitable[None]],
        wait_finished: Callable[[str], Awaitable[Any]],
        permit: Callable[[e.RunQueued, Caller | None], Awaitable[None]],
        safety_poll_s: float,
    ) -> None:
        self.app = app
        self._store = store
        self._registry = registry
        self._plans = plans
        self._ids = ids
        self._prepare = prepare
        self._cancel = cancel
        self._wait_finished = wait_finished
        self._permit = permit
        self._safety_poll_s = safety_poll_s
        self._changed = asyncio.Event()
        self._awaited: dict[Place, asyncio.Task[None]] = {}
        self._finished: set[Place] = set()

    # --- what callers do

    async def create(self, schedule: Schedule, caller: Caller | None = None) -> Schedule:
        """Store a new schedule. Its first tick is the first one from now on. Raise `Conflict` if the id is taken."""
        await self._check(schedule)
        await self._permit(await self._queued(schedule, 0), caller)
        now = await self._store.now()
        begun = self._begun(schedule, now)
        if begun.next_tick is None:
            raise InvalidInput("the schedule has no tick after this moment", field="at")
        return await self._commit(begun, 0, (), caller)

    async def get(self, place: Place, store: port.Store | None = None) -> Schedule:
        """Return a schedule; raise `NotFound` if there is none."""
        tenant, project, environment, schedule_id = place
        query = ScheduleQuery(tenant=tenant, project=project, environment=environment, schedule_id=schedule_id, limit=1)
        for schedule in await (store or self._store).find(query):
            return schedule
        raise NotFound(f"there is no schedule {schedule_id!r}", schedule_id=schedule_id)

    async def update(self, place: Place, change: Change, caller: Caller | None = None) -> Schedule:
        """Change what a schedule starts, or when. Past ticks are not run by the new rule."""
        first = change(await self.get(place), await self._store.now())
        await self._check(first)
        await self._permit(await self._queued(first, 0), caller)
        return await self._change(place, lambda old, now: self._changed_to(old, change(old, now), now), caller)

    async def pause(self, place: Place, note: str = "", caller: Caller | None = None) -> Schedule:
        """Fire no ticks until it is resumed. Ticks in between are not run."""
        return await self._change(
            place, lambda old, _: with_next(replace(old, is_paused=True, note=note), old.next_tick), caller, note
        )

    async def resume(self, place: Place, note: str = "", caller: Caller | None = None) -> Schedule:
        """Fire ticks from now on."""

        def change(old: Schedule, now: Instant) -> Schedule:
            return self._begun(replace(old, is_paused=False, note=note), now) if old.is_paused else old

        return await self._change(place, change, caller, note)

    async def delete(self, place: Place, caller: Caller | None = None) -> None:
        """Delete a schedule. Its runs continue."""
        for _ in range(TRIES):
            old = await self.get(place)
            if await self._store.delete_schedule(place, old.revision, self._audit(caller, old)):
                return
        raise Conflict("the schedule was changed by others each time; try again", schedule_id=place[3])

    async def trigger(self, place: Place, request_id: str = "", caller: Caller | None = None) -> str:
        """Start a run now, in addition to the ticks and running runs; return its id. The same request gives the same
        run.
        """
        request = f"trigger:{request_id}" if request_id else f"trigger once:{self._ids.new_id()}"
        for _ in range(TRIES):
            old, now = await self.get(place), await self._store.now()
            await self._permit(await self._queued(old, now), caller)
            new = self._prepare(await self._queued(old, now, request), old, now)
            changed = replace(old, last_run_id=new.run_id, running=_running(old, [new.run_id]), started=old.started + 1)
            try:
                stored, [answer] = await self._store.commit_schedule(
                    changed, old.revision, [new], self._audit(caller, old, new.run_id)
                )
            except Conflict:
                continue
            await self._correct(old, stored, [new], [answer])
            if isinstance(answer, port.Refused):
                raise answer.error
            return answer.run_id
        raise Conflict("the schedule was changed by others each time; try again", schedule_id=place[3])

    async def backfill(
        self, place: Place, since: Instant, until: Instant, overlap: Overlap = "queue", caller: Caller | None = None
    ) -> int:
        """Run the past ticks from `since` to before `until`: one after the other, or with `allow` concurrently.

        A tick whose run still exists is not run again. Return the number of ticks.
        """
        if overlap not in ("queue", "allow"):
            raise InvalidInput("a backfill queues its ticks, or allows them to overlap", field="overlap")
        now, old = await self._store.now(), await self.get(place)
        await self._permit(await self._queued(old, now), caller)
        until = min(until, now + 1)
        within = (tick for tick in ticks_after(old.spec, since - 1))
        ticks = [tick for tick in islice(within, QUEUED_TICKS + 1) if tick < until]
        if len(ticks) > QUEUED_TICKS:
            raise InvalidInput(f"a backfill has at most {QUEUED_TICKS} ticks: shorten the period", field="until")
        detail = f"{len(ticks)} ticks"
        if overlap == "allow":
            for first in range(0, len(ticks), STARTS_AT_ONCE):
                await self._start_now(place, ticks[first : first + STARTS_AT_ONCE], caller, detail)
        else:
            await self._change(place, lambda old, now: _with_queued(old, ticks, now), caller, detail)
        return len(ticks)

    def next_ticks(self, schedule: Schedule, count: int) -> list[Instant]:
        """Return when the next ticks are due; none while it is paused."""
        if schedule.next_tick is None or schedule.is_paused:
            return []
        ticks = ticks_after(schedule.spec, schedule.next_tick - 1)
        return [due_at(schedule, tick) for tick in islice(ticks, count)]

    async def declare(self, declaration: Declaration) -> None:
        """Store a schedule that is declared in code, or update it if the declaration has changed.

        Operators' changes are kept: a schedule that they have paused stays paused.
        """
        given, digest = declaration.schedule, declaration.digest
        await self._check(given)
        for _ in range(TRIES):
            now = await self._store.now()
            try:
                old = await self.get(given.place)
            except NotFound:
                new, revision = self._begun(replace(given, app=self.app, declared=digest), now), 0
            else:
                if old.declared == digest:
                    return
                if old.app != self.app:
                    detail = f"is of the app {old.app!r}: declare it under another schedule_id, or delete it there"
                    raise Conflict(f"schedule {given.schedule_id!r} {detail}", schedule_id=given.schedule_id)
                new, revision = self._changed_to(old, _redeclared(old, given, digest), now), old.revision
            try:
                await self._store.commit_schedule(new, revision)
            except Conflict:
                continue
            self._changed.set()
            return
        raise Conflict("the schedule was changed by others each time; try again", schedule_id=given.schedule_id)

    # --- how a change is made

    def _begun(self, schedule: Schedule, now: Instant) -> Schedule:
        """Return a schedule that starts, or starts anew: every tick up to now counts as decided."""
        return self._followed(replace(schedule, watermark=max(now, schedule.watermark)), now)

    def _changed_to(self, old: Schedule, schedule: Schedule, now: Instant) -> Schedule:
        """Return a schedule after a change. If its ticks differ it starts anew; otherwise no due tick is skipped."""
        return self._followed(schedule, now) if _calendar(old) == _calendar(schedule) else self._begun(schedule, now)

    def _followed(self, schedule: Schedule, now: Instant) -> Schedule:
        """Return a schedule with the tick after those that are decided. A schedule with a queue is due now."""
        moved = replace(schedule, tzdata=TZDATA, last_error="")
        moved = with_next(moved, following(schedule.spec, schedule.watermark))
        return replace(moved, next_due=now) if moved.queued and not moved.is_paused else moved

    async def _check(self, schedule: Schedule) -> None:
        """Refuse a schedule that cannot be stored, read or run."""
        problem = check_schedule(schedule) or codec.check(schedule.input, "input")
        if problem is not None:
            raise problem
        check_calendar(schedule.spec)
        codec.bounded(schedule.input, INPUT_BYTES, f"the input of schedule {schedule.schedule_id!r}", "")
        if is_plan(schedule.workflow):
            definition, _ = await self._plan(schedule)
            definition.check_inputs(codec.decode(schedule.input, dict[str, Any]))
        else:
            self._registry.workflow(schedule.workflow, schedule.workflow_version)

    async def _plan(self, schedule: Schedule) -> Any:
        plan_id = schedule.workflow.removeprefix(PLAN_PREFIX)
        ref = PlanRef(plan_id=plan_id, plan_version=schedule.workflow_version or "")
        return await self._plans.resolve(schedule.tenant, ref)

    async def _change(self, place: Place, change: Change, caller: Caller | None, detail: str = "") -> Schedule:
        for _ in range(TRIES):
            old = await self.get(place)
            try:
                changed = change(old, await self._store.now())
                return await self._commit(changed, old.revision, (), caller, detail)
            except Conflict:
                continue
        raise Conflict("the schedule was changed by others each time; try again", schedule_id=place[3])

    async def _commit(
        self,
        schedule: Schedule,
        revision: int,
        starts: Sequence[port.NewRun],
        caller: Caller | None = None,
        detail: str = "",
    ) -> Schedule:
        stored, _ = await self._store.commit_schedule(schedule, revision, starts, self._audit(caller, schedule, detail))
        self._changed.set()
        return stored

    def _audit(self, caller: Caller | None, schedule: Schedule, detail: str = "") -> AuditEntry | None:
        entry = audit_entry(caller, self._ids.new_id, subject=schedule.schedule_id, detail=detail)
        if entry is None:
            return None
        tenant, project, environment, _ = schedule.place
        return replace(entry, tenant=tenant, project=project, environment=environment)

    async def _start_now(self, place: Place, ticks: Sequence[Instant], caller: Caller | None, detail: str) -> None:
        for _ in range(TRIES):
            old = await self.get(place)
            news = [self._prepare(await self._queued(old, tick), old, tick) for tick in ticks]
            changed = replace(old, started=old.started + len(news))
            try:
                stored, answers = await self._store.commit_schedule(
                    changed, old.revision, news, self._audit(caller, old, detail)
                )
            except Conflict:
                continue
            await self._correct(old, stored, news, answers)
            return
        raise Conflict("the schedule was changed by others each time; try again", schedule_id=place[3])

    # --- the duty

    async def until_needed(self) -> None:
        """Wait until the app has a schedule: one that is made here is noticed immediately, others within the poll
        interval.
        """
        while True:
            self._changed.clear()
            if await self._store.find(ScheduleQuery(app=self.app, limit=1)):
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._safety_poll_s):
                    await self._changed.wait()

    async def fire(self, held: HeldLock) -> None:
        """Fire the due ticks of all schedules of the app, for as long as the lock is held."""
        listener = self._store.wakeups.listen()
        try:
            await self._take_over()
            while True:
                wait_s = await self._fire_due(held)
                if wait_s > 0:
                    await self._rest(listener, min(wait_s, self._safety_poll_s))
        finally:
            listener.close()
            for task in self._awaited.values():
                task.cancel()
            await asyncio.gather(*self._awaited.values(), return_exceptions=True)
            self._awaited.clear()

    async def _take_over(self) -> None:
        """Continue the previous node's work: wait for runs, and compute with the time zones of this machine."""
        query = ScheduleQuery(app=self.app)
        while page := await self._store.find(query):
            for schedule in page:
                if schedule.queued:
                    self._finished.add(schedule.place)
                if schedule.tzdata != TZDATA and schedule.spec.cron and schedule.next_tick is not None:
                    moved = replace(schedule, tzdata=TZDATA)
                    await self._try(with_next(moved, following(schedule.spec, schedule.watermark)), schedule.revision)
            query = replace(query, after=page[-1].place)

    async def _fire_due(self, held: HeldLock) -> float:
        """Fire what is due; return the time until anything else is due."""
        for place in sorted(self._finished):
            self._finished.discard(place)
            held.check()
            try:
                while not await self._fire(await self.get(place)):
                    held.check()
            except NotFound:
                continue
        self._changed.clear()
        found = await self._store.find(ScheduleQuery(app=self.app, by_due=True, limit=100))
        now = await self._store.now()
        for schedule in found:
            assert schedule.next_due is not None
            if schedule.next_due > now:
                return (schedule.next_due - now) / 1_000_000
            held.check()
            await self._fire(schedule)
        return 0.0 if found else self._safety_poll_s

    async def _fire(self, schedule: Schedule) -> bool:
        """Decide the due ticks of one schedule, and start their runs; return False if it was changed meanwhile."""
        if schedule.is_paused:
            return True
        try:
            await self._fire_ticks(schedule)
        except Conflict:
            logger.debug("schedule %s was changed meanwhile", schedule.schedule_id)
            return False
        except (StoreError, asyncio.CancelledError):
            raise
        except HoldfastError as problem:
            logger.warning("schedule %s cannot be fired: %s", schedule.schedule_id, problem)
            due = await self._store.now() + DEFER_MS * 1_000
            await self._try(replace(schedule, next_due=due, last_error=str(problem)[:500]), schedule.revision)
        return True

    async def _fire_ticks(self, schedule: Schedule) -> None:
        waited = waited_for(schedule)
        unfinished = await self._unfinished(dict.fromkeys((*schedule.running, *waited)))
        running = [run_id for run_id in unfinished if run_id in schedule.running]
        is_running = any(run_id in waited for run_id in unfinished)
        now = await self._store.now()
        decision = decide_ticks(schedule, partial(following, schedule.spec), now, is_running=is_running)
        news = [self._prepare(await self._queued(schedule, tick), schedule, tick) for tick in decision.starts]
        if decision.cancels:
            for run_id in running:
                await self._cancel(run_id, request_id_of(schedule.schedule_id, decision.starts[-1]))
        new_ids = [new.run_id for new in news]
        changed = replace(
            decision.schedule,
            running=_running(replace(schedule, running=tuple(running)), new_ids),
            queue_run_id=new_ids[-1] if decision.is_from_queue else schedule.queue_run_id,
            last_run_id=new_ids[-1] if new_ids else schedule.last_run_id,
            last_error="",
        )
        stored, answers = await self._store.commit_schedule(changed, schedule.revision, news)
        await self._correct(schedule, stored, news, answers)
        if stored.queued:
            self._await_run(stored)

    async def _correct(
        self,
        before: Schedule,
        stored: Schedule,
        news: Sequence[port.NewRun],
        answers: Sequence[port.Created | port.Existing | port.Refused],
    ) -> None:
        """Record the runs of ticks that this commit did not create: earlier runs, or none."""
        other = {
            new.run_id: answer
            for new, answer in zip(news, answers, strict=True)
            if isinstance(answer, port.Refused) or answer.run_id != new.run_id
        }
        if not other:
            return
        renamed = {run_id: answer.run_id for run_id, answer in other.items() if isinstance(answer, port.Existing)}
        refused = [answer.error for answer in other.values() if isinstance(answer, port.Refused)]
        for problem in refused:
            logger.warning("schedule %s: a tick did not start a run: %s", stored.schedule_id, problem)
        kept = [renamed.get(run_id, run_id) for run_id in stored.running if run_id not in other or run_id in renamed]
        last = renamed.get(
            stored.last_run_id, before.last_run_id if stored.last_run_id in other else stored.last_run_id
        )
        corrected = replace(
            stored,
            running=tuple(dict.fromkeys(kept)),
            queue_run_id=renamed.get(stored.queue_run_id, stored.queue_run_id),
            last_run_id=last,
            started=stored.started - len(other),
            last_error=str(refused[-1])[:500] if refused else stored.last_error,
        )
        await self._try(corrected, stored.revision)

    async def _try(self, schedule: Schedule, revision: int) -> None:
        """Store a change that is recomputed if it is lost."""
        try:
            await self._store.commit_schedule(schedule, revision)
        except Conflict:
            logger.debug("schedule %s was changed meanwhile", schedule.schedule_id)

    async def _unfinished(self, run_ids: Collection[str]) -> list[str]:
        """Return the unfinished ones among the runs."""
        if not run_ids:
            return []
        heads = await self._store.find(RunQuery(run_ids=tuple(run_ids), limit=len(run_ids)))
        unfinished = {head.run_id for head in heads if head.status not in TERMINAL}
        return [run_id for run_id in run_ids if run_id in unfinished]

    async def _queued(self, schedule: Schedule, tick: Instant, request: str = "") -> e.RunQueued:
        """Return the first event of a tick's run. `request` replaces the tick in the key that recognises a retry."""
        workflow, plan = schedule.workflow, None
        if is_plan(workflow):
            definition, uri = await self._plan(schedule)
            version, plan = definition.version, e.PlanSource(definition.sha256, uri)
        else:
            version = await self._version(schedule)
        own = request_id_of(schedule.schedule_id, tick)
        if request:
            own = f"schedule:{schedule.schedule_id}:{codec.digest(request.encode())[:40]}"
        return e.RunQueued(
            workflow,
            version,
            schedule.tenant,
            schedule.project,
            schedule.environment,
            run_request_id=own,
            input=schedule.input,
            plan=plan,
            schedule=e.ScheduleTick(schedule.schedule_id, tick),
            context=schedule.context,
        )

    async def _version(self, schedule: Schedule) -> str:
        """Return the version to start: the one here, otherwise one that a live node has."""
        name, wanted = schedule.workflow, schedule.workflow_version
        try:
            return self._registry.workflow(name, wanted).version
        except NotFound:
            plans = {plan for node in await self._store.find_nodes() for plan in node.plans}
            versions = sorted(version for of, version in plans if of == name and wanted in (None, version))
            if not versions:
                raise
            return versions[-1]

    def _await_run(self, schedule: Schedule) -> None:
        """Look at the schedule again when its run has finished: the next tick in its queue follows."""
        waited = waited_for(schedule)
        if schedule.place in self._awaited or not waited:
            return
        run_id = waited[-1]

        async def wait() -> None:
            try:
                await self._wait_finished(run_id)
            except CallerError:
                logger.debug("run %s of schedule %s no longer exists", run_id, schedule.schedule_id)
            except HoldfastError:
                logger.warning("the queue of schedule %s waits for the store", schedule.schedule_id, exc_info=True)
                await asyncio.sleep(DEFER_MS / 1_000)
            self._awaited.pop(schedule.place, None)
            self._finished.add(schedule.place)
            self._changed.set()

        self._awaited[schedule.place] = asyncio.create_task(wait(), name="scheduled run")

    def look(self) -> None:
        """Look at the schedules immediately: the clock was moved."""
        self._changed.set()

    async def _rest(self, listener: Any, wait_s: float) -> None:
        """Sleep until then, a change of a schedule here, or a notification, but for the minimum time at least."""
        loop = asyncio.get_running_loop()
        end, soonest = loop.time() + wait_s, loop.time() + LOOK_S
        changed = asyncio.ensure_future(self._changed.wait())
        heard = asyncio.ensure_future(listener.wait(wait_s))
        try:
            await asyncio.wait({changed, heard}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not changed.done() and (left_s := min(soonest, end) - loop.time()) > 0:
                await asyncio.wait({changed}, timeout=left_s)
        finally:
            changed.cancel()
            heard.cancel()
            await asyncio.gather(changed, heard, return_exceptions=True)


def _running(schedule: Schedule, new_ids: Sequence[str]) -> tuple[str, ...]:
    return (*schedule.running, *new_ids)[-RUNNING:]


def _with_queued(schedule: Schedule, ticks: Sequence[Instant], now: Instant) -> Schedule:
    """Return the schedule with more ticks in its queue, due now."""
    queued = tuple(sorted({*schedule.queued, *ticks}))
    if len(queued) > QUEUED_TICKS:
        raise InvalidInput(f"a schedule has at most {QUEUED_TICKS} ticks in its queue", field="until")
    return replace(schedule, queued=queued, next_due=now if queued and not schedule.is_paused else schedule.next_due)


def _redeclared(old: Schedule, given: Schedule, digest: str) -> Schedule:
    """Return a schedule according to its new declaration, with its own state: pause, queue, counts."""
    return replace(
        old,
        workflow=given.workflow,
        workflow_version=given.workflow_version,
        input=given.input,
        spec=given.spec,
        reference_key=given.reference_key,
        tags=given.tags,
        priority=given.priority,
        context=given.context,
        declared=digest,
    )


def _calendar(schedule: Schedule) -> ScheduleSpec:
    """Return the specification from which the ticks of a schedule are computed."""
    return replace(schedule.spec, jitter_ms=0, overlap="skip", catch_up_ms=DAY_MS)


def spec_of(
    cron: str = "",
    every: timedelta | None = None,
    at: Any = None,
    start_at: Any = None,
    end_at: Any = None,
    jitter: timedelta | None = None,
    catch_up: timedelta | None = None,
    **more: Any,
) -> ScheduleSpec:
    """Return when a schedule starts runs, from datetimes and timedeltas as written in code."""
    durations = {"every_ms": every, "jitter_ms": jitter, "catch_up_ms": catch_up}
    given: dict[str, Any] = {
        field: _milliseconds(field, value) for field, value in durations.items() if value is not None
    }
    moments = {"at": at, "start_at": start_at, "end_at": end_at}
    given |= {field: instant_of(field, value) for field, value in moments.items() if value is not None}
    return ScheduleSpec(cron=cron, **given, **more)


def _milliseconds(field: str, value: Any) -> int:
    if not isinstance(value, timedelta):
        raise InvalidInput(f"{field.removesuffix('_ms')} is a timedelta, not {value!r}", field=field)
    return value // timedelta(milliseconds=1)


def instant_of(field: str, moment: Any) -> Instant:
    """Return the instant of a datetime with a time zone."""
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise InvalidInput(f"{field} is a datetime with a time zone, not {moment!r}", field=field)
    return instants.instant_of(moment)


def tags_of(schedule: Schedule) -> tuple[str, ...]:
    """Return the tags of the runs of a schedule."""
    return (*schedule.tags, tag_of(schedule.schedule_id))
