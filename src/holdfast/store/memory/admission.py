"""Gates in the reference model: who waits, who is inside, and who is next. `core/admission.py` says what they do."""

from msgspec import Struct

from holdfast.core.admission import RunLimit, free_slot
from holdfast.core.instants import Instant


class Waiting(Struct, frozen=True):
    """A run that waits to be let in."""

    tenant: str
    key: str
    place: Instant


class AdmissionQueue:
    """The gate of one plan. Runs are in order of creation."""

    def __init__(self) -> None:
        self.waiting: dict[str, Waiting] = {}
        self._inside: dict[str, tuple[str, str]] = {}
        self._last_tenant = ""
        self._starts: list[Instant] = []
        self._starting: set[str] = set()

    def free_at(self, limit: RunLimit, now: Instant) -> Instant:
        """Return the next instant at which the rate allows a start."""
        return free_slot(self._starts, limit, now, len(self._starting))

    def note_start(self, run_id: str, now: Instant) -> None:
        """Take note that a run has started, or will not."""
        if run_id in self._starting:
            self._starting.discard(run_id)
            self._starts.append(now)

    def next_in(self, limit: RunLimit) -> str | None:
        """Return the run that is next, if one has room but for the rate."""
        able = {run_id: each for run_id, each in self.waiting.items() if self.has_room(limit, each.tenant, each.key)}
        tenants = sorted({each.tenant for each in able.values()})
        if not tenants:
            return None
        tenant = next((name for name in tenants if name > self._last_tenant), tenants[0])
        return min((run_id for run_id in able if able[run_id].tenant == tenant), key=lambda run_id: able[run_id].place)

    def has_room(self, limit: RunLimit, tenant: str, key: str) -> bool:
        """Say whether a run of this tenant and key may be inside with those that are."""
        of_key = sum(inside == (tenant, key) for inside in self._inside.values())
        is_full = limit.at_once is not None and len(self._inside) >= limit.at_once
        return not is_full and (limit.per_key is None or of_key < limit.per_key)

    def admit(self, run_id: str, limit: RunLimit, now: Instant) -> None:
        """Let a run in that waits."""
        waiting = self.waiting.pop(run_id)
        self._inside[run_id] = waiting.tenant, waiting.key
        self._last_tenant = waiting.tenant
        if limit.starts is not None:
            self._starting.add(run_id)
            self._starts = self._starts[-limit.starts :]

    def leave(self, run_id: str) -> None:
        """Forget a run that has finished, wherever it was."""
        self.waiting.pop(run_id, None)
        self._inside.pop(run_id, None)
