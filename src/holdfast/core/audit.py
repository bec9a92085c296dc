"""The audit log: what callers have changed, who they were, and when. Entries are appended and never changed.

An entry belongs to a caller: a request to the service, a `holdfast` command, or an authenticated client. Actions of
code in the engine's own process have no caller and no entry; they are in the histories of runs.

Stores write the entry of a start, a signal, a command, an update, an operation on a task, a settled dead letter, a
token or a deletion in the same commit as the change. An entry that concerns nothing in the store (a failed sign-in) is
appended alone.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.codec import encode_text
from holdfast.core.events import CallerRef
from holdfast.core.instants import Instant
from holdfast.limits import NAME_BYTES

DETAIL_CHARS = 500


class AuditEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One action of a caller. The store sets `at` and, for an operation on a run, its tenant, project and environment.

    `operation` is the name of the operation, such as `runs.cancel`; `subject` is its object, such as the name of a
    signal or the id of a task or token. `by` is the caller's token, `actor` the person whom the caller named.
    """

    entry_id: str
    operation: str
    actor: str = ""
    by: CallerRef | None = None
    tenant: str | None = None
    project: str | None = None
    environment: str | None = None
    run_id: str | None = None
    subject: str = ""
    detail: str = ""
    outcome: str = "done"
    correlation_id: str = ""
    at: Instant = 0
    version: int = 1


class Caller(Struct, frozen=True, kw_only=True):
    """The sender of a request, as authenticated by a service. Without a tenant it sees all tenants.

    If `scopes` is None it has all scopes. `token_id` identifies the caller; it is empty if access is open. `operation`
    is the requested operation, and `correlation_id` the id of the request in logs.
    """

    name: str
    """The name of the token, or of the user."""
    tenant: str | None = None
    """The tenant to which it is bound."""
    project: str | None = None
    """The project to which it is bound; None for all of the tenant."""
    environment: str | None = None
    """The environment to which it is bound; None for all of the tenant."""
    roles: tuple[str, ...] = ()
    """The roles for human tasks."""
    scopes: frozenset[str] | None = None
    is_admin: bool = False
    """Whether it may assign every task, and act for another person."""
    token_id: str = ""
    operation: str = ""
    correlation_id: str = ""

    @property
    def ref(self) -> CallerRef | None:
        """The caller as recorded in events."""
        return CallerRef(self.token_id, self.name) if self.token_id else None


def audit_entry(
    caller: Caller | None,
    new_id: Callable[[], str],
    *,
    actor: str = "",
    subject: str = "",
    detail: str = "",
    outcome: str = "done",
) -> AuditEntry | None:
    """Return the audit log entry for a request, or None if it comes from code in this process."""
    if caller is None or not caller.operation:
        return None
    return AuditEntry(
        entry_id=new_id(),
        operation=caller.operation,
        actor=actor or caller.name,
        by=caller.ref,
        tenant=caller.tenant,
        project=caller.project,
        environment=caller.environment,
        subject=subject,
        detail=detail[:DETAIL_CHARS],
        outcome=outcome,
        correlation_id=caller.correlation_id,
    )


def audit_row(entry: AuditEntry) -> tuple[Any, ...]:
    """Return the values of the search columns, one for each, and the entry itself."""
    token_id = None if entry.by is None else entry.by.token_id
    place = (entry.tenant, entry.project, entry.environment)
    return entry.at, entry.entry_id, *place, entry.run_id, entry.actor, token_id, entry.operation, encode_text(entry)


def run_entry(entry: AuditEntry, run_id: str, place: tuple[str, str, str], now: Instant) -> AuditEntry:
    """Return an entry about a run, with the run's tenant, project and environment."""
    tenant, project, environment = place
    return replace(entry, run_id=run_id, tenant=tenant, project=project, environment=environment, at=now)


def letter_entry(entry: AuditEntry, letter_id: str) -> AuditEntry:
    """Return the entry about one of the dead letters that are settled together."""
    return replace(entry, entry_id=f"{entry.entry_id}:{letter_id}"[:NAME_BYTES], subject=letter_id)


def migration_entry(present: int, latest: int, now: Instant) -> AuditEntry:
    """Return the entry about a migration of the schema."""
    detail = f"schema {present} to {latest}"
    return AuditEntry(entry_id=f"migrate-{latest}", operation="store.migrate", actor="holdfast", detail=detail, at=now)
