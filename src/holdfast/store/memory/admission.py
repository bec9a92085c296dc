"""The admission queue in the reference model. `core/admission.py` has the rule."""

from msgspec import Struct

from holdfast.core.admission import (
    AdmissionDecision,
    AdmissionRequest,
    QueuedRun,
    QueueState,
    RunLimit,
    decide_admission,
    nth_last_start,
    rank,
    rejection,
)
from holdfast.core.instants import Instant
from holdfast.errors import Overloaded
from holdfast.store.queries import PlaceInLine


class Waiting(Struct, frozen=True):
    """A queued run."""

    tenant: str
    key: str
    rank: Instant


class AdmissionQueue:
    """The admission queue of one plan. Runs are in order of creation."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self._inside: dict[str, tuple[str, str]] = {}
        self._last_tenant = ""
        self._starts: list[Instant] = []
        self._starting: set[str] = set()

    def decide(self, limit: RunLimit, now: Instant) -> AdmissionDecision[str]:
        """Return the next run, and when it may start."""
        return decide_admission(self._state(limit), self._queued(), limit, now)

    def enqueue(
        self, run_id: str, plan_id: str, tenant: str, request: AdmissionRequest, now: Instant
    ) -> Overloaded | None:
        """Put a new run into the queue, or return why it is rejected."""
        run, limit = Waiting(tenant, request.key, rank(request.priority, now)), request.limit
        refusal = rejection(plan_id, self._state(limit), self._queued(), self._queued_run(run_id, run), limit, now)
        if refusal is None:
            self._waiting[run_id] = run
        return refusal

    def admit(self, run_id: str, limit: RunLimit) -> None:
        """Admit a queued run."""
        run = self._waiting.pop(run_id)
        self._inside[run_id] = run.tenant, run.key
        self._last_tenant = run.tenant
        if limit.starts is not None:
            self._starting.add(run_id)
            self._starts = self._starts[-limit.starts :]

    def record_start(self, run_id: str, now: Instant) -> None:
        """Count a run that has started, or ended without starting, if it was admitted under a rate."""
        if run_id in self._starting:
            self._starting.discard(run_id)
            self._starts.append(now)

    def is_inside(self, run_id: str) -> bool:
        """Return whether a run was admitted and has not finished."""
        return run_id in self._inside

    def is_waiting(self, run_id: str) -> bool:
        """Return whether a run is queued."""
        return run_id in self._waiting

    def place_of(self, run_id: str, plan_id: str) -> PlaceInLine | None:
        """Return the position of a queued run; None for one that is not queued."""
        run = self._waiting.get(run_id)
        if run is None:
            return None
        line = [
            (other.rank, number)
            for number, other in enumerate(self._waiting.values())
            if (other.tenant, other.key) == (run.tenant, run.key)
        ]
        own = run.rank, list(self._waiting).index(run_id)
        return PlaceInLine(
            run_id=run_id,
            limit=plan_id,
            key=run.key,
            taken=len(self._inside),
            taken_of_key=sum(inside == (run.tenant, run.key) for inside in self._inside.values()),
            before=sum(other < own for other in line),
        )

    def leave(self, run_id: str) -> None:
        """Remove a run that has finished, whether queued or admitted."""
        self._waiting.pop(run_id, None)
        self._inside.pop(run_id, None)

    def _state(self, limit: RunLimit) -> QueueState:
        starting = len(self._starting)
        return QueueState(
            inside=len(self._inside),
            last_tenant=self._last_tenant,
            starting=starting,
            nth_last_start=nth_last_start(self._starts, limit, starting),
        )

    def _queued(self) -> list[QueuedRun[str]]:
        return [self._queued_run(run_id, run) for run_id, run in self._waiting.items()]

    def _queued_run(self, run_id: str, run: Waiting) -> QueuedRun[str]:
        of_key = sum(inside == (run.tenant, run.key) for inside in self._inside.values())
        return QueuedRun(id=run_id, tenant=run.tenant, rank=run.rank, of_key=of_key)
