"""Schedules: creating and inspecting them, and the operations of operators on them."""

from datetime import datetime
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.core.plans import is_plan
from holdfast.core.schedules import Overlap, Schedule, ScheduleSpec
from holdfast.engine.run_context import context_of_start
from holdfast.errors import Conflict, InvalidInput, NotFound, NotPermitted, Overloaded, PayloadTooLarge
from holdfast.limits import TAGS
from holdfast.service.context import RequestContext
from holdfast.service.operations.runs import ContextGiven
from holdfast.service.paging import Cursor, PageSize, read_page
from holdfast.service.registry import Name, Request, operation
from holdfast.service.views import Moment, instant_of, moment
from holdfast.store.port import ScheduleQuery

NEXT_TICKS = 5
"""How many of its next ticks are shown with a schedule."""

Seconds = Annotated[float, Meta(ge=0, le=10**9)]
Place = tuple[str, str, str, str]
_ERRORS = (NotFound, Conflict, NotPermitted)


class ScheduleView(Struct, frozen=True, kw_only=True):
    """A schedule: what it starts, when, how far it is, and when its next ticks are due.

    Its runs have the tag `schedule:ID`. `tzdata` is the version of the time zones that it was computed by.
    """

    schedule_id: str
    tenant: str
    project: str
    environment: str
    app: str
    workflow: str
    workflow_version: str | None
    cron: str
    every_s: float | None
    at: datetime | None
    tz: str
    start_at: datetime | None
    end_at: datetime | None
    overlap: str
    jitter_s: float
    catch_up_s: float
    is_paused: bool
    note: str
    is_declared: bool
    tzdata: str
    next_ticks: list[datetime]
    last_tick: datetime | None
    last_run_id: str
    queued: int
    started: int
    skipped: int
    missed: int
    last_error: str
    revision: int
    created_at: datetime
    updated_at: datetime


class OfSchedule(Request, frozen=True, kw_only=True):
    """Which schedule is meant."""

    schedule_id: Name
    tenant: Annotated[Name, Meta(description="Whose it is, where the token does not say so.")] = "default"
    project: Name = "default"
    environment: Name = "default"


class Timing(OfSchedule, frozen=True, kw_only=True):
    """When a schedule starts runs: by one of `cron`, `every_s` and `at`."""

    cron: Annotated[str, Meta(max_length=200, description="Five fields, or six with seconds first; or @daily.")] = ""
    every_s: Seconds | None = None
    at: Moment | None = None
    tz: Annotated[str, Meta(max_length=100, description="The time zone of cron, such as Europe/Sofia.")] = "UTC"
    start_at: Moment | None = None
    end_at: Moment | None = None
    overlap: Annotated[Overlap, Meta(description="What a tick does while an earlier run is not finished.")] = "skip"
    jitter_s: Seconds = 0
    catch_up_s: Annotated[Seconds, Meta(description="Ticks that are late by more are missed.")] = 86_400
    input: dict[str, Any] = field(default_factory=dict)


class CreateSchedule(Timing, frozen=True, kw_only=True):
    """What a schedule starts, and when. `input` holds the workflow's arguments by their names."""

    workflow: Annotated[Name, Meta(description="The workflow's name, or plan:ID for a registered plan.")]
    workflow_version: Annotated[Name, Meta(description="Else the version that was registered last.")] | None = None
    reference_key: Name | None = None
    tags: Annotated[tuple[Name, ...], Meta(max_length=TAGS - 1)] = ()
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    context: ContextGiven = field(default_factory=dict)


def _place(context: RequestContext, request: OfSchedule) -> Place:
    return (*context.within(request.tenant, request.project, request.environment), request.schedule_id)


def _spec(request: Timing) -> ScheduleSpec:
    return ScheduleSpec(
        cron=request.cron,
        every_ms=0 if request.every_s is None else round(request.every_s * 1_000),
        at=instant_of(request.at),
        tz=request.tz,
        start_at=instant_of(request.start_at),
        end_at=instant_of(request.end_at),
        jitter_ms=round(request.jitter_s * 1_000),
        overlap=request.overlap,
        catch_up_ms=round(request.catch_up_s * 1_000),
    )


def _packed(context: RequestContext, workflow: str, version: str | None, given: dict[str, Any]) -> Any:
    registry = context.runtime.registry
    if is_plan(workflow):
        return registry.values.encode(given)
    return registry.workflow(workflow, version).signature.pack((), given)


def _moment(instant: Instant | None) -> datetime | None:
    return None if instant is None else moment(instant)


def _view(context: RequestContext, schedule: Schedule) -> ScheduleView:
    spec = schedule.spec
    return ScheduleView(
        schedule_id=schedule.schedule_id,
        tenant=schedule.tenant,
        project=schedule.project,
        environment=schedule.environment,
        app=schedule.app,
        workflow=schedule.workflow,
        workflow_version=schedule.workflow_version,
        cron=spec.cron,
        every_s=spec.every_ms / 1_000 if spec.every_ms else None,
        at=_moment(spec.at),
        tz=spec.tz,
        start_at=_moment(spec.start_at),
        end_at=_moment(spec.end_at),
        overlap=spec.overlap,
        jitter_s=spec.jitter_ms / 1_000,
        catch_up_s=spec.catch_up_ms / 1_000,
        is_paused=schedule.is_paused,
        note=schedule.note,
        is_declared=bool(schedule.declared),
        tzdata=schedule.tzdata,
        next_ticks=[moment(tick) for tick in context.runtime.schedules.next_ticks(schedule, NEXT_TICKS)],
        last_tick=_moment(schedule.last_tick),
        last_run_id=schedule.last_run_id,
        queued=len(schedule.queued),
        started=schedule.started,
        skipped=schedule.skipped,
        missed=schedule.missed,
        last_error=schedule.last_error,
        revision=schedule.revision,
        created_at=moment(schedule.created_at),
        updated_at=moment(schedule.updated_at),
    )


@operation(
    "schedules.create",
    "POST /v1/schedules",
    scope="runs:write",
    status=201,
    errors=(*_ERRORS, PayloadTooLarge),
    audit="its commit",
)
async def create(context: RequestContext, request: CreateSchedule) -> ScheduleView:
    """Make a schedule. Its first tick is the first one from now on. `Conflict` if there is one of that id."""
    tenant, project, environment, schedule_id = _place(context, request)
    schedule = Schedule(
        schedule_id=schedule_id,
        tenant=tenant,
        project=project,
        environment=environment,
        app=context.runtime.schedules.app,
        workflow=request.workflow,
        workflow_version=request.workflow_version,
        input=_packed(context, request.workflow, request.workflow_version, request.input),
        spec=_spec(request),
        reference_key=request.reference_key,
        tags=request.tags,
        priority=request.priority,
        context=context_of_start(request.context),
    )
    return _view(context, await context.runtime.schedules.create(schedule, context.principal))


class ListSchedules(Request, frozen=True, kw_only=True):
    """Which schedules to list. A field that is omitted matches everything."""

    workflow: str | None = None
    cursor: Cursor = ""
    limit: PageSize = 100


class SchedulePage(Struct, frozen=True):
    """Some schedules. `next` is the cursor of the page behind it, if there is more."""

    items: list[ScheduleView]
    next: str | None = None


@operation("schedules.list", "GET /v1/schedules", scope="runs:read")
async def list_(context: RequestContext, request: ListSchedules) -> SchedulePage:
    """Return schedules with their next ticks, by tenant, project, environment and id."""
    rows, following = await read_page(
        context,
        "schedules",
        context.store.find,
        ScheduleQuery(workflow=request.workflow),
        lambda schedule: schedule.place,
        cursor=request.cursor,
        limit=request.limit,
    )
    return SchedulePage([_view(context, schedule) for schedule in rows], following)


@operation("schedules.get", "GET /v1/schedules/{schedule_id}", scope="runs:read", errors=(NotFound,))
async def get(context: RequestContext, request: OfSchedule) -> ScheduleView:
    """Return a schedule with its next ticks."""
    return _view(context, await context.runtime.schedules.get(_place(context, request)))


class UpdateSchedule(Timing, frozen=True, kw_only=True):
    """When a schedule starts runs from now on, and with what. All of it is replaced, but an input that is left out."""

    input: Annotated[dict[str, Any] | None, Meta(description="null: it stays.")] = None  # type: ignore[assignment]


@operation(
    "schedules.update",
    "POST /v1/schedules/{schedule_id}/update",
    scope="runs:write",
    errors=(*_ERRORS, PayloadTooLarge),
    audit="its commit",
)
async def update(context: RequestContext, request: UpdateSchedule) -> ScheduleView:
    """Change when a schedule starts runs, and with what. Ticks that are over are not run by the new rule."""
    place = _place(context, request)
    old = await context.runtime.schedules.get(place)
    given = request.input
    packed = None if given is None else _packed(context, old.workflow, old.workflow_version, given)

    def change(schedule: Schedule, now: Instant) -> Schedule:
        changed = replace(schedule, spec=_spec(request))
        return changed if packed is None else replace(changed, input=packed)

    return _view(context, await context.runtime.schedules.update(place, change, context.principal))


class NotedSchedule(OfSchedule, frozen=True, kw_only=True):
    """Which schedule is meant, and why."""

    note: Annotated[str, Meta(max_length=500)] = ""


@operation(
    "schedules.pause",
    "POST /v1/schedules/{schedule_id}/pause",
    scope="runs:control",
    errors=_ERRORS,
    audit="its commit",
)
async def pause(context: RequestContext, request: NotedSchedule) -> ScheduleView:
    """Pause a schedule: its ticks until it is resumed are not run."""
    paused = await context.runtime.schedules.pause(_place(context, request), request.note, context.principal)
    return _view(context, paused)


@operation(
    "schedules.resume",
    "POST /v1/schedules/{schedule_id}/resume",
    scope="runs:control",
    errors=_ERRORS,
    audit="its commit",
)
async def resume(context: RequestContext, request: NotedSchedule) -> ScheduleView:
    """Resume a schedule: its ticks from now on are run."""
    resumed = await context.runtime.schedules.resume(_place(context, request), request.note, context.principal)
    return _view(context, resumed)


class TriggerSchedule(OfSchedule, frozen=True, kw_only=True):
    """Which schedule is meant."""

    request_id: Annotated[str, Meta(max_length=255, description="The same request again gives the same run.")] = ""


class Triggered(Struct, frozen=True):
    """The run that was started."""

    run_id: str


@operation(
    "schedules.trigger",
    "POST /v1/schedules/{schedule_id}/trigger",
    scope="runs:write",
    errors=(*_ERRORS, Overloaded),
    audit="its commit",
)
async def trigger(context: RequestContext, request: TriggerSchedule) -> Triggered:
    """Start a run of a schedule now, in addition to its ticks."""
    place = _place(context, request)
    return Triggered(await context.runtime.schedules.trigger(place, request.request_id, context.principal))


class BackfillSchedule(OfSchedule, frozen=True, kw_only=True):
    """Which ticks to run, from `since` to before `until`."""

    since: Moment
    until: Moment
    overlap: Annotated[Overlap, Meta(description="queue: one after the other; allow: all at once.")] = "queue"


class Backfilled(Struct, frozen=True):
    """How many ticks the period has."""

    ticks: int


@operation(
    "schedules.backfill",
    "POST /v1/schedules/{schedule_id}/backfill",
    scope="runs:write",
    errors=_ERRORS,
    audit="its commit",
)
async def backfill(context: RequestContext, request: BackfillSchedule) -> Backfilled:
    """Fire the ticks of a past period. A tick whose run still exists is skipped."""
    since, until = instant_of(request.since), instant_of(request.until)
    if since is None or until is None:
        raise InvalidInput("a backfill has a period", field="since")
    place = _place(context, request)
    schedules = context.runtime.schedules
    return Backfilled(await schedules.backfill(place, since, until, request.overlap, context.principal))


class Deleted(Struct, frozen=True):
    """The schedule that was deleted."""

    schedule_id: str


@operation(
    "schedules.delete",
    "POST /v1/schedules/{schedule_id}/delete",
    scope="runs:write",
    errors=_ERRORS,
    audit="its commit",
)
async def delete(context: RequestContext, request: OfSchedule) -> Deleted:
    """Delete a schedule. Its runs continue. The next node that starts creates it again if code declares it."""
    await context.runtime.schedules.delete(_place(context, request), context.principal)
    return Deleted(request.schedule_id)
