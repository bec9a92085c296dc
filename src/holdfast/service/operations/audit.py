"""The audit log: what callers have changed, who they were, and when."""

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from holdfast.core.audit import AuditEntry
from holdfast.service.context import RequestContext
from holdfast.service.paging import Cursor, PageSize, read_page
from holdfast.service.registry import Request, operation
from holdfast.service.views import Moment, instant_of, shown
from holdfast.store.queries import AuditQuery


class CallerView(Struct, frozen=True):
    """A caller: the id of the token, and its name."""

    token_id: str
    name: str


class AuditEntryView(Struct, frozen=True, kw_only=True):
    """One action of a caller. `by` is the bearer of the token, `actor` the person that they acted for."""

    entry_id: str
    at: datetime
    operation: str
    actor: str
    by: CallerView | None
    tenant: str | None
    project: str | None
    environment: str | None
    run_id: str | None
    subject: str
    detail: str
    outcome: str
    correlation_id: str


class ListAudit(Request, frozen=True, kw_only=True):
    """Which entries to list. A field that is omitted matches everything."""

    tenant: str | None = None
    run_id: str | None = None
    actor: str | None = None
    token_id: Annotated[str, Meta(description="The caller's, also if they acted for another.")] | None = None
    operation: Annotated[str, Meta(description="Such as runs.cancel.")] | None = None
    since: Moment | None = None
    until: Moment | None = None
    order: Annotated[Literal["newest", "oldest"], Meta(description="Which come first.")] = "newest"
    cursor: Cursor = ""
    limit: PageSize = 100


class AuditPage(Struct, frozen=True):
    """Some entries. `next` is the cursor of the page behind it, if there is more."""

    items: list[AuditEntryView]
    next: str | None = None


def _place(entry: AuditEntry) -> Any:
    return entry.at, entry.entry_id


@operation("audit.list", "GET /v1/audit", scope="audit:read")
async def list_(context: RequestContext, request: ListAudit) -> AuditPage:
    """Find what callers have changed: starts, signals, commands, tasks, tokens, sign-ins, deletions. Newest first."""
    query = AuditQuery(
        tenant=request.tenant,
        run_id=request.run_id,
        actor=request.actor,
        token_id=request.token_id,
        operation=request.operation,
        since=instant_of(request.since),
        until=instant_of(request.until),
        newest=request.order == "newest",
    )
    rows, following = await read_page(
        context, f"audit {request.order}", context.store.find, query, _place, cursor=request.cursor, limit=request.limit
    )
    return AuditPage([shown(AuditEntryView, row, by=_caller(row)) for row in rows], following)


def _caller(entry: AuditEntry) -> CallerView | None:
    return None if entry.by is None else CallerView(entry.by.token_id, entry.by.name)
