"""The audit log: what callers have changed, who they were, and when. Entries are appended, and never changed.

An entry is of a caller: a request to the service, a command of `holdfast`, or a client that is authenticated. What code
in the engine's own process does without a caller stands in the histories of runs, and costs no entry.

Stores write the entry of a start, a signal, a command, an update, an operation on a task, a settled dead letter, a
token or a deletion with the very commit that does it; an entry about nothing in the store (a sign-in that failed) is
appended by itself.
"""

from msgspec import Struct

from holdfast.core.events import CallerRef
from holdfast.core.instants import Instant

DETAIL_CHARS = 500


class AuditEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One thing that a caller has done. The store sets `at`, and for what is of a run whose it is.

    `operation` is the name of the operation, such as `runs.cancel`; `subject` what it was about, such as the name of a
    signal or the id of a task or token. `by` is the caller's token, `actor` whom they named as acting.
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
