"""Schedules: when runs are started automatically, and which of the due ticks start one.

A *tick* is an instant that a schedule names. It is identified by the schedule and that instant; the version of the
workflow is not part of it. A schedule is one row with a `revision`. Every change (a tick, an operator, a deployment) is
one commit that names the revision from which it was computed and, for ticks, creates the runs. So each tick is decided
once, whatever crashes, however many nodes try, and even if its run was deleted since: every tick up to `watermark` is
decided.

`decide_ticks` is that decision. It knows no clock and no calendar: `now` and the function that returns the next tick
are arguments (`engine/ticks.py` has the calendar).
"""

from collections.abc import Callable
from hashlib import sha256
from typing import Literal

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core.events import NULL
from holdfast.core.instants import Instant
from holdfast.core.keys import SCHEDULE_TAG, check_name, check_tag
from holdfast.errors import InvalidInput
from holdfast.limits import DURATION_MS, PRIORITY, TAGS

Overlap = Literal["skip", "queue", "cancel-running", "allow"]
"""What happens to a tick while an earlier run of the schedule is not finished."""

Following = Callable[[Instant], Instant | None]
"""Returns the first tick after an instant, or None if there is none."""

ID_BYTES = 200
"""The longest id of a schedule, in UTF-8 bytes: tags and request ids contain it."""

QUEUED_TICKS = 1_000
"""The most ticks that wait in the queue; further ones are skipped."""

TICKS_AT_ONCE = 1_000
"""The most ticks in one decision. The rest follows immediately."""

STARTS_AT_ONCE = 50
"""The most runs that one decision starts. The rest follows immediately."""

DAY_MS = 86_400_000


class ScheduleSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When to start runs: by `cron`, `every_ms` (counted from `start_at`, else from 1970), or once `at` an instant.

    Cron is read in the time zone `tz`. Only ticks from `start_at` to before `end_at` count. Each is delayed by up to
    `jitter_ms`, always equally for the same tick. A tick that no node could fire within `catch_up_ms` is missed.
    """

    cron: str = ""
    every_ms: int = 0
    at: Instant | None = None
    tz: str = "UTC"
    start_at: Instant | None = None
    end_at: Instant | None = None
    jitter_ms: int = 0
    overlap: Overlap = "skip"
    catch_up_ms: int = DAY_MS


class Schedule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule as it is stored: what it starts, when, and its progress.

    `declared` recognises a declaration in code that has not changed. `next_due` is `next_tick` with its jitter, None
    while the schedule is paused or ended. `queued` are ticks that wait for the previous run, `running` are its runs
    that may not have finished, `queue_run_id` is the run that the queue started last. `tzdata` is the version of the
    time zone data with which `next_tick` was computed.
    """

    schedule_id: str
    tenant: str = "default"
    project: str = "default"
    environment: str = "default"
    app: str
    workflow: str
    workflow_version: str | None = None
    input: Raw = NULL
    spec: ScheduleSpec
    reference_key: str | None = None
    tags: tuple[str, ...] = ()
    priority: int = 0
    is_paused: bool = False
    note: str = ""
    declared: str = ""
    tzdata: str = ""
    revision: int = 1
    created_at: Instant = 0
    updated_at: Instant = 0
    watermark: Instant = 0
    next_tick: Instant | None = None
    next_due: Instant | None = None
    queued: tuple[Instant, ...] = ()
    running: tuple[str, ...] = ()
    queue_run_id: str = ""
    last_tick: Instant | None = None
    last_run_id: str = ""
    started: int = 0
    skipped: int = 0
    missed: int = 0
    last_error: str = ""
    context: Raw = NULL
    """The context of its runs (`core/run_context.py`)."""

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Its tenant, project and environment, and its id there."""
        return (self.tenant, self.project, self.environment, self.schedule_id)


def tag_of(schedule_id: str) -> str:
    """Return the tag that the runs of a schedule have."""
    return f"{SCHEDULE_TAG}{schedule_id}"


def request_id_of(schedule_id: str, tick: Instant) -> str:
    """Return the request id that starts the run of a tick: the same for every node, version and retry."""
    return f"{_REQUEST_PREFIX}{schedule_id}:{tick}"


def is_of_schedule(request_id: str) -> bool:
    """Return whether a request id belongs to a tick."""
    return request_id.startswith(_REQUEST_PREFIX)


_REQUEST_PREFIX = "schedule:"


def due_at(schedule: Schedule, tick: Instant) -> Instant:
    """Return when a tick is due: delayed by its jitter, which is derived from the schedule and the tick."""
    if not schedule.spec.jitter_ms:
        return tick
    digest = sha256("|".join((*schedule.place, str(tick))).encode()).digest()
    return tick + int.from_bytes(digest[:8], "big") % (schedule.spec.jitter_ms * 1_000 + 1)


def with_next(schedule: Schedule, tick: Instant | None) -> Schedule:
    """Return the schedule with its next tick; a paused schedule is not due."""
    due = None if tick is None or schedule.is_paused else due_at(schedule, tick)
    return replace(schedule, next_tick=tick, next_due=due)


class TickDecision(Struct, frozen=True):
    """The new schedule, the ticks that start a run, and whether running runs are cancelled for that.

    `is_from_queue`: the last of these ticks was waiting in the queue.
    """

    schedule: Schedule
    starts: tuple[Instant, ...] = ()
    cancels: bool = False
    is_from_queue: bool = False


def decide_ticks(schedule: Schedule, following: Following, now: Instant, *, is_running: bool) -> TickDecision:
    """Decide the ticks that are due. `is_running`: a run that is `waited_for` has not finished.

    Up to `TICKS_AT_ONCE` missed ticks are counted, and the others skipped.
    """
    spec, tick, watermark = schedule.spec, schedule.next_tick, schedule.watermark
    starts: list[Instant] = []
    queued = list(schedule.queued)
    skipped, missed = schedule.skipped, schedule.missed
    oldest = now - (spec.catch_up_ms + spec.jitter_ms) * 1_000  # including the longest delay by jitter
    left = TICKS_AT_ONCE
    while tick is not None and due_at(schedule, tick) <= now and len(starts) < STARTS_AT_ONCE and left:
        left -= 1
        if tick < oldest:
            missed += 1
            watermark = tick if left else max(tick, oldest - 1)
            tick = following(watermark)
            continue
        if spec.overlap == "queue":
            if len(queued) < QUEUED_TICKS:
                queued.append(tick)
            else:
                skipped += 1
        elif spec.overlap == "skip" and (is_running or starts):
            skipped += 1
        elif spec.overlap == "cancel-running" and starts:
            skipped += len(starts)
            starts = [tick]
        else:
            starts.append(tick)
        watermark = tick
        tick = following(tick)
    is_from_queue = bool(queued) and not is_running and (spec.overlap == "allow" or not starts)
    if is_from_queue:
        starts.append(queued.pop(0))
    changed = replace(
        schedule, watermark=watermark, queued=tuple(queued), skipped=skipped, missed=missed,
        started=schedule.started + len(starts), last_tick=starts[-1] if starts else schedule.last_tick,
    )  # fmt: skip
    cancels = spec.overlap == "cancel-running" and is_running and bool(starts)
    return TickDecision(with_next(changed, tick), tuple(starts), cancels, is_from_queue)


def waited_for(schedule: Schedule) -> tuple[str, ...]:
    """Return the runs for which a tick waits: those of the schedule, or of its queue if its runs may overlap."""
    if schedule.spec.overlap != "allow":
        return schedule.running
    return (schedule.queue_run_id,) if schedule.queue_run_id else ()


def check_spec(spec: ScheduleSpec) -> InvalidInput | None:
    """Return what is wrong with the times of a schedule, except for the cron expression and the time zone."""
    if bool(spec.cron) + bool(spec.every_ms) + (spec.at is not None) != 1:
        return InvalidInput("a schedule has one of cron, every and at", field="cron")
    for field, least in (("every_ms", 1_000 if spec.every_ms else 0), ("jitter_ms", 0), ("catch_up_ms", 1_000)):
        value = getattr(spec, field)
        if type(value) is not int or not least <= value <= DURATION_MS:
            return InvalidInput(f"{field} is from {least} to {DURATION_MS} milliseconds, not {value!r}", field=field)
    for field in ("at", "start_at", "end_at"):
        value = getattr(spec, field)
        if value is not None and (type(value) is not int or not 0 <= value < 2**53):
            return InvalidInput(f"{field} is an instant after 1970, not {value!r}", field=field)
    if spec.overlap not in ("skip", "queue", "cancel-running", "allow"):
        return InvalidInput("overlap is skip, queue, cancel-running or allow", field="overlap")
    return None


def check_schedule(schedule: Schedule) -> InvalidInput | None:
    """Return why a schedule could not be stored, or not found again; None if it can."""
    for field in ("tenant", "project", "environment", "app", "workflow"):
        problem = check_name(field, getattr(schedule, field))
        if problem is not None:
            return problem
    problem = check_name("schedule_id", schedule.schedule_id)
    if problem is None and len(schedule.schedule_id.encode()) > ID_BYTES:
        problem = InvalidInput(f"the id of a schedule has at most {ID_BYTES} UTF-8 bytes", field="schedule_id")
    for tag in schedule.tags:
        problem = problem or check_tag(tag)
    if problem is None and schedule.reference_key is not None:
        problem = check_name("reference_key", schedule.reference_key)
    if problem is None and len(schedule.tags) >= TAGS:
        problem = InvalidInput(f"a schedule has at most {TAGS - 1} tags: its runs have one more", field="tags")
    if problem is None and not -PRIORITY <= schedule.priority <= PRIORITY:
        problem = InvalidInput(f"priority is a whole number from -{PRIORITY} to {PRIORITY}", field="priority")
    return problem or check_spec(schedule.spec)
