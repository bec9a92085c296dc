"""Retention: the policy, what it would delete, what it has deleted, and the archived runs."""

from datetime import datetime
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict

from holdfast.core.instants import Instant
from holdfast.core.state import RunStatus
from holdfast.engine.retention import LOCK, OPERATION, RetentionReport
from holdfast.errors import ArtifactCorrupt, ArtifactMissing, Conflict, NotFound, NotPermitted
from holdfast.service.auth.roles import ADMIN
from holdfast.service.context import RequestContext
from holdfast.service.operations.runs import EventPage, ReadEvents
from holdfast.service.operations.system import Nothing
from holdfast.service.paging import Cursor, PageSize, read_page
from holdfast.service.registry import Request, RunId, operation
from holdfast.service.views import TASK_CONTENTS, event_view, moment, shown
from holdfast.store.decisions import is_free, name_of, no_such_run
from holdfast.store.port import ArchivedRun, ArchivedRunQuery, AuditQuery

HISTORY = 50
"""How many entries about deletions are shown."""

OF_THE_ARCHIVE = (NotFound, ArtifactMissing, ArtifactCorrupt)


class RetentionRuleView(Struct, frozen=True, kw_only=True):
    """How long finished runs of a workflow, with a status, or of a tenant are kept; null: for ever."""

    finished_days: float | None
    workflow: str | None = None
    status: str | None = None
    tenant: str | None = None


class RetentionReportView(Struct, frozen=True, kw_only=True):
    """What was deleted, or would be; how many runs were archived; and what is stale. `by_workflow` has the runs.

    `has_more` says that the time was too short, or that there is more of a kind than is counted.
    """

    at: datetime
    runs: int
    events: int
    signals: int
    tasks: int
    runtime_states: int
    acceptance_records: int
    dead_letters: int
    audit_entries: int
    plans: int
    archived_runs: int
    outbox: int
    archived: int
    stale_runs: int
    stale_tasks: int
    cancelled: int
    by_workflow: dict[str, int]
    has_more: bool


class RetentionEntry(Struct, frozen=True, kw_only=True):
    """What went, and when: an entry of the audit log."""

    at: datetime
    actor: str
    detail: str


class RetentionView(Struct, frozen=True, kw_only=True):
    """How long data is kept, in days (null: for ever), which node has the duty, and what was deleted recently."""

    rules: list[RetentionRuleView]
    windows_days: dict[str, float | None]
    cancel_stale_runs: bool
    cancel_stale_tasks: bool
    every_s: float
    archive: bool
    node: str | None
    last: RetentionReportView | None
    history: list[RetentionEntry]


@operation("retention.show", "GET /v1/retention", scope="system:read", reads_much=True)
async def show(context: RequestContext, request: Nothing) -> RetentionView:
    """Return the policy of this process, the node that carries it out, and what was deleted lately."""
    _require_all_tenants(context)
    duty, store = context.runtime.retention, context.runtime.store
    policy, now = duty.policy, await store.now()
    holders = [lock for lock in await store.find_locks() if lock.name == LOCK and not is_free(lock, now)]
    entries = await store.find(AuditQuery(operation=OPERATION, newest=True, limit=HISTORY))
    windows = ("tasks", "snapshots", "dead_letters", "audit", "outbox", "archive_index", "stale_runs", "stale_tasks")
    return RetentionView(
        rules=[
            RetentionRuleView(
                finished_days=_days(rule.window_ms), workflow=rule.workflow, status=rule.status, tenant=rule.tenant
            )
            for rule in policy.all_rules
        ],
        windows_days={field: _days(policy.window_ms(field)) for field in windows},
        cancel_stale_runs=policy.cancel_stale_runs,
        cancel_stale_tasks=policy.cancel_stale_tasks,
        every_s=policy.every.total_seconds(),
        archive=duty.archive is not None,
        node=name_of(holders[0].owner) if holders else None,
        last=None if duty.last is None else _report(duty.last),
        history=[RetentionEntry(at=moment(each.at), actor=each.actor, detail=each.detail) for each in entries],
    )


@operation("retention.preview", "GET /v1/retention/preview", scope="system:read", reads_much=True)
async def preview(context: RequestContext, request: Nothing) -> RetentionReportView:
    """Return what the policy of this process would delete now, and what is stale. Nothing is changed."""
    _require_all_tenants(context)
    return _report(await context.runtime.retention.preview(context.service.options.request_s / 2))


@operation("retention.run", "POST /v1/retention/run", scope=ADMIN, errors=(Conflict,), audit="its commit")
async def run(context: RequestContext, request: Nothing) -> RetentionReportView:
    """Delete now what is past its window, by the policy of this process. It needs a token without a tenant.

    It is refused (`Conflict`) while it is under way. With `has_more` the time was too short: ask again.
    """
    _require_all_tenants(context)
    seconds = context.service.options.request_s / 2
    return _report(await context.runtime.retention.sweep(until_s=seconds, caller=context.principal))


class ArchivedRunView(Struct, frozen=True, kw_only=True):
    """A run that was deleted after its history was archived, and where that is."""

    run_id: str
    workflow: str
    workflow_version: str
    status: RunStatus
    tenant: str
    project: str
    environment: str
    events: int
    created_at: datetime
    finished_at: datetime
    archived_at: datetime
    object_key: str
    size_bytes: int


class ArchivedRunPage(Struct, frozen=True):
    """Some archived runs. `next` is the cursor of the page behind it, if there is more."""

    items: list[ArchivedRunView]
    next: str | None = None


class ListArchived(Request, frozen=True, kw_only=True):
    """Which archived runs to list. A field that is omitted matches everything."""

    run_id: str | None = None
    workflow: str | None = None
    status: RunStatus | None = None
    tenant: str | None = None
    cursor: Cursor = ""
    limit: PageSize = 100


@operation("archive.list", "GET /v1/archive", scope="runs:read")
async def list_(context: RequestContext, request: ListArchived) -> ArchivedRunPage:
    """Find runs that retention has archived. Those that ended last are first."""
    query = ArchivedRunQuery(
        run_id=request.run_id, workflow=request.workflow, status=request.status, tenant=request.tenant
    )
    rows, following = await read_page(
        context, "archive", context.store.find, query, _end, cursor=request.cursor, limit=request.limit, place="before"
    )
    return ArchivedRunPage([_view(run) for run in rows], following)


class OfArchivedRun(Request, frozen=True, kw_only=True):
    """Which archived run is meant. Of several with the same id, it is the one that ended last."""

    run_id: RunId


@operation("archive.get", "GET /v1/archive/{run_id}", scope="runs:read", errors=(NotFound,))
async def get(context: RequestContext, request: OfArchivedRun) -> ArchivedRunView:
    """Return an archived run, without its history."""
    return _view(await _archived(context, request.run_id))


class ReadArchived(ReadEvents, frozen=True, kw_only=True):
    """From where to read an archived history."""

    limit: Annotated[int, Meta(ge=1, le=500, description="The most events to answer with.")] = 100


@operation(
    "archive.events", "GET /v1/archive/{run_id}/events", scope="runs:read", errors=OF_THE_ARCHIVE, reads_much=True
)
async def events(context: RequestContext, request: ReadArchived) -> EventPage:
    """Return a part of an archived history, like `runs.events`. The contents of tasks are shown to admins only."""
    run = await _archived(context, request.run_id)
    archive = context.runtime.retention.archive
    if archive is None:
        raise ArtifactMissing(
            "this process has no archive: give it the same `retention` as the nodes", run_id=run.run_id
        )
    page = await archive.read_events(run, request.after, request.limit)
    tasks = {event.step_id or "" for event in page if isinstance(event.data, TASK_CONTENTS)}
    redacted = set[str]() if context.principal.is_admin else tasks
    items, size = [], 0
    for event in page:
        item = event_view(event, redacted, context.item_bytes)
        items.append(item)
        size += len(item.data)
        if size >= context.page_bytes:
            break
    return EventPage(items=items, last_event_seq=run.version, status=run.status)


async def _archived(context: RequestContext, run_id: str) -> ArchivedRun:
    found = await context.store.find(ArchivedRunQuery(run_id=run_id, limit=1))
    if not found:
        raise no_such_run(run_id)
    return found[0]


def _require_all_tenants(context: RequestContext) -> None:
    if context.principal.tenant is not None:
        raise NotPermitted("retention concerns the whole installation: this needs a token without a tenant")


def _view(run: ArchivedRun) -> ArchivedRunView:
    return shown(ArchivedRunView, run, workflow=run.plan_id, workflow_version=run.plan_version, events=run.version)


def _report(report: RetentionReport) -> RetentionReportView:
    return RetentionReportView(**{**asdict(report), "at": moment(report.at)})


def _end(run: ArchivedRun) -> Any:
    return run.finished_at, run.run_id


def _days(window_ms: Instant | None) -> float | None:
    return None if window_ms is None else window_ms / 86_400_000
