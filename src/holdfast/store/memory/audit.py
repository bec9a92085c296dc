"""The audit log in the reference model."""

from holdfast.core.audit import AuditEntry
from holdfast.core.instants import Instant
from holdfast.store.queries import AuditQuery, Found
from holdfast.store.types import PurgePolicy

_EXACT = ("tenant", "run_id", "actor", "operation")


class AuditLog:
    """Entries, in the order in which they were appended."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Instant, str], AuditEntry] = {}

    def append(self, entry: AuditEntry) -> None:
        """Append an entry that already has its time."""
        self._entries.setdefault((entry.at, entry.entry_id), entry)

    def find(self, query: AuditQuery) -> Found[AuditEntry]:
        """Return the entries that match the query."""
        found = Found[AuditEntry]()
        for place, entry in sorted(self._entries.items(), reverse=query.newest):
            if query.after is not None and (place >= query.after if query.newest else place <= query.after):
                continue
            if query.since is not None and entry.at < query.since:
                continue
            if query.until is not None and entry.at >= query.until:
                continue
            token_id = None if entry.by is None else entry.by.token_id
            if query.token_id in (None, token_id) and all(
                getattr(query, field) in (None, getattr(entry, field)) for field in _EXACT
            ):
                found.append(entry)
        return found

    def old(self, until: Instant, policy: PurgePolicy) -> list[tuple[Instant, str]]:
        """Return the positions of the entries up to an instant to which a policy applies, oldest first."""
        return sorted(
            place
            for place, entry in self._entries.items()
            if place[0] <= until
            and policy.tenant in (None, entry.tenant)
            and (policy.run_ids is None or entry.run_id in policy.run_ids)
        )

    def forget(self, places: list[tuple[Instant, str]]) -> None:
        """Delete entries."""
        for place in places:
            del self._entries[place]
