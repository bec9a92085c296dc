"""Deletions: of one finished run, or of all data of a tenant. They cannot be undone."""

import asyncio
from contextlib import suppress
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.core.audit import run_entry
from holdfast.core.state import TERMINAL, RunStatus
from holdfast.engine.history import head_of
from holdfast.errors import Conflict, InvalidInput, NotFound, NotPermitted
from holdfast.service.auth.roles import ADMIN
from holdfast.service.context import RequestContext
from holdfast.service.operations.tokens import Place
from holdfast.service.registry import Request, RunId, operation
from holdfast.store.port import PurgePolicy, PurgeReport, RunQuery
from holdfast.store.queries import ScheduleQuery, pages

DryRun = Annotated[bool, Meta(description="Only count what would be deleted.")]
UNFINISHED = tuple(status for status in RunStatus if status not in TERMINAL)
PART = 500
"""How many runs are deleted by one commit."""


class DeletedView(Struct, frozen=True, kw_only=True):
    """What was deleted, or, with `dry_run`, would be. `has_more` says that the time was too short: ask again."""

    runs: int
    events: int
    signals: int
    tasks: int
    dead_letters: int
    tokens: int
    schedules: int
    audit_entries: int
    is_dry_run: bool
    has_more: bool


def _view(report: PurgeReport, schedules: int = 0, *, is_dry_run: bool) -> DeletedView:
    return DeletedView(
        runs=report.runs,
        events=report.events,
        signals=report.signals,
        tasks=report.tasks,
        dead_letters=report.dead_letters,
        tokens=report.tokens,
        schedules=schedules,
        audit_entries=report.audit_entries,
        is_dry_run=is_dry_run,
        has_more=report.has_more,
    )


class DeleteRun(Request, frozen=True, kw_only=True):
    """Which run to delete. It has finished; terminate it first if it has not."""

    run_id: RunId
    dry_run: DryRun = False


@operation("runs.delete", "POST /v1/runs/{run_id}/delete", scope=ADMIN, errors=(NotFound, Conflict), audit="its commit")
async def delete_run(context: RequestContext, request: DeleteRun) -> DeletedView:
    """Delete a finished run for good: its history, signals, tasks and dead letters. Its entries of the audit log stay.

    It is refused (`Conflict`) while the run, its parent or a child of it has not finished.
    """
    head = await head_of(context.store, request.run_id)
    if head.status not in TERMINAL:
        raise Conflict(f"run {request.run_id} has not finished: terminate it first", run_id=request.run_id)
    entry = context.audit(subject=request.run_id)
    if entry is not None:
        entry = run_entry(entry, request.run_id, (head.tenant, head.project, head.environment), 0)
    policy = PurgePolicy(run_ids=(request.run_id,), finished_run_ms=0, sink_hold_ms=0, dry_run=request.dry_run)
    report = await context.runtime.store.purge(policy, entry)
    if report.runs == 0:
        problem = f"the parent of run {request.run_id}, or a child of it, has not finished"
        raise Conflict(problem, run_id=request.run_id)
    if context.runtime.artifacts is not None and not request.dry_run:  # for a tenant, the next sweep deletes them
        await context.runtime.artifacts.delete_run(context.runtime.store, request.run_id)
    return _view(report, is_dry_run=request.dry_run)


class DeleteTenant(Request, frozen=True, kw_only=True):
    """Whose data to delete, and that this is meant."""

    tenant: Place
    yes: Annotated[bool, Meta(description="That this is meant: nothing of it can be brought back.")] = False
    dry_run: DryRun = False


@operation("tenants.delete", "POST /v1/tenants/{tenant}/delete", scope=ADMIN, errors=(Conflict,), audit="its commit")
async def delete_tenant(context: RequestContext, request: DeleteTenant) -> DeletedView:
    """Delete everything of a tenant for good: tokens, schedules, runs (including archived ones) and audit entries.

    It needs a token without a tenant. It is refused (`Conflict`) while a run of the tenant has not finished. Entries of
    the audit log that are no tenant's say what was deleted.
    """
    if context.principal.tenant is not None:
        raise NotPermitted("this needs a token without a tenant", field="tenant")
    if not request.yes and not request.dry_run:
        raise InvalidInput("yes: confirm with true, or request a dry_run; the deletion cannot be undone", field="yes")
    await _refuse_unfinished(context, request.tenant)
    schedules = await _delete_schedules(context, request.tenant, is_dry_run=request.dry_run)
    await _refuse_unfinished(context, request.tenant)  # a schedule may have started one in the meantime
    store, loop = context.runtime.store, asyncio.get_running_loop()
    until = loop.time() + context.service.options.request_s / 2
    whole = PurgePolicy(
        tenant=request.tenant,
        finished_run_ms=0,
        audit_ms=0,
        archived_run_ms=0,
        tokens=True,
        plans=True,
        sink_hold_ms=0,
        outbox_ms=0,
        sinks=True,
        limit=PART,
        dry_run=request.dry_run,
    )
    total = PurgeReport()
    while True:
        entry = context.audit(subject=request.tenant)
        report = await store.purge(whole, entry)
        total = _sum(total, report)
        if request.dry_run or not report.has_more or loop.time() > until:
            break
    if context.runtime.retention.archive is not None and not request.dry_run:
        await context.runtime.retention.archive.delete_tenant(request.tenant)
    return _view(total, schedules, is_dry_run=request.dry_run)


async def _delete_schedules(context: RequestContext, tenant: str, *, is_dry_run: bool) -> int:
    """Delete the schedules of a tenant, so that they start no more runs; return how many there were."""
    runtime, count = context.runtime, 0
    query = ScheduleQuery(tenant=tenant)
    async for page in pages(runtime.store.find, query, lambda schedule: schedule.place):
        for schedule in page if not is_dry_run else ():
            with suppress(NotFound):
                await runtime.schedules.delete(schedule.place)
        count += len(page)
    return count


async def _refuse_unfinished(context: RequestContext, tenant: str) -> None:
    left: list[str] = []
    for status in UNFINISHED:
        left += [head.run_id for head in await context.runtime.store.find(RunQuery(tenant=tenant, status=status))]
    if left:
        shown = ", ".join(left[:5])
        problem = (
            f"{len(left)} runs of tenant {tenant!r} or more have not finished, such as {shown}: terminate them first"
        )
        raise Conflict(problem, tenant=tenant)


def _sum(total: PurgeReport, more: PurgeReport) -> PurgeReport:
    counts = {
        name: getattr(total, name) + getattr(more, name)
        for name in PurgeReport.__struct_fields__
        if name not in ("has_more", "stale_runs")
    }
    return PurgeReport(**counts, has_more=more.has_more)
