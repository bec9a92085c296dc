"""The audit log: what callers have changed, who they were, and when. Entries are appended, and never changed.

An entry belongs to a caller: a request to the service, a command of `holdfast`, or an authenticated client. What code
in the engine's own process does without a caller is in the histories of runs, and has no entry.

Stores write the entry of a start, a signal, a command, an update, an operation on a task, a settled dead letter, a
token or a deletion in the same commit as the change. An entry that concerns nothing in the store (a failed sign-in) is
appended alone.
"""

from msgspec import Struct

from holdfast.core.events import CallerRef
from holdfast.core.instants import Instant

DETAIL_CHARS = 500


class AuditEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One thing that a caller has done. The store sets `at` and, for an operation on a run, its tenant and the like.

    `operation` is the name of the operation, such as `runs.cancel`; `subject` what it concerned, such as the name of a
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
