"""Admission in a bucket. `core/admission.py` has the rule.

The queue of a plan is one object. A run gets its place in the queue before its head is created, and is admitted there
before its head is changed. So a process that is killed in between leaves a place without a run, a place of a finished
run, or an admitted run whose head still says that it is queued, but never too many admitted runs. `admit` repairs all
three: it releases admitted runs that are still held back, and frees places if it finds queued runs and can admit none.
A run that was held back by an approval or until its start time exists before it gets its place: its head is first
marked as queued, and `admit` gives a place to runs that have none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.clock import Secrets
from holdfast.core.admission import RunLimit
from holdfast.core.instants import Instant
from holdfast.core.keys import storage_key
from holdfast.errors import Overloaded
from holdfast.store import port
from holdfast.store.memory.admission import AdmissionQueue, Waiting
from holdfast.store.s3.bucket import Bucket
from holdfast.store.s3.documents import Document
from holdfast.store.s3.head import StoredRun
from holdfast.store.s3.heads import Heads
from holdfast.store.s3.mirror import Mirror

T = TypeVar("T")

GHOST = 60_000_000
"""How long a place may be without a run, in microseconds: its creation is in progress, or was interrupted."""


class QueueDocument(Struct, frozen=True, omit_defaults=True):
    """The admission queue of a plan."""

    waiting: dict[str, Waiting] = {}
    inside: dict[str, tuple[str, str]] = {}
    last_tenant: str = ""
    starts: tuple[Instant, ...] = ()
    starting: tuple[str, ...] = ()
    entered: dict[str, Instant] = {}
    mark: str = ""


class StoredQueue(AdmissionQueue):
    """An admission queue of the reference model that can be read from a document and stored as one."""

    def __init__(self, document: QueueDocument) -> None:
        super().__init__()
        self._waiting = dict(document.waiting)
        self._inside = dict(document.inside)
        self._last_tenant = document.last_tenant
        self._starts = list(document.starts)
        self._starting = set(document.starting)
        self.entered = dict(document.entered)

    def document(self, mark: str) -> QueueDocument:
        """Return the queue in its stored form."""
        places = {**self._waiting, **self._inside}
        return QueueDocument(
            waiting=self._waiting,
            inside=self._inside,
            last_tenant=self._last_tenant,
            starts=tuple(self._starts),
            starting=tuple(sorted(self._starting)),
            entered={run_id: at for run_id, at in self.entered.items() if run_id in places},
            mark=mark,
        )

    @property
    def has_waiting(self) -> bool:
        """Whether runs are queued."""
        return bool(self._waiting)

    @property
    def inside(self) -> list[str]:
        """The runs that were admitted and have not finished."""
        return list(self._inside)

    @property
    def starting(self) -> list[str]:
        """The runs that were admitted under a rate and have not started."""
        return list(self._starting)

    @property
    def places(self) -> list[str]:
        """All runs that have a place in the queue."""
        return [*self._waiting, *self._inside]

    def admit_next(self, limit: RunLimit, most: int, now: Instant) -> tuple[list[str], Instant | None]:
        """Admit up to `most` runs. Also return when to call again even if no run leaves."""
        admitted: list[str] = []
        while (decision := self.decide(limit, now)).run is not None:
            if decision.free_at > now or len(admitted) == most:
                return admitted, decision.next_at(now)
            self.admit(decision.run.id, limit)
            admitted.append(decision.run.id)
        return admitted, None


class Admission:
    """The admission queues of all plans."""

    async def find_places(self, query: port.PlaceQuery) -> port.Found[port.PlaceInLine]:
        """Return the positions of queued runs. In a bucket, calls of activities have no limits."""
        queued = {
            run_id: run.head.plan_id
            for run_id, run in self._mirror.ordered().items()
            if run_id in query.run_ids and run.head.queued_at is not None
        }
        plans = sorted({*queued.values()})
        queues = {plan: StoredQueue(await self._document(plan).read()) for plan in plans}
        places = [queues[plan].place_of(run_id, plan) for run_id, plan in sorted(queued.items())]
        return port.Found(place for place in places if place is not None)

    def __init__(self, bucket: Bucket, mirror: Mirror, heads: Heads, secrets: Secrets) -> None:
        self._bucket = bucket
        self._mirror = mirror
        self._heads = heads
        self._secrets = secrets
        self._documents: dict[str, Document[QueueDocument]] = {}

    def _document(self, plan_id: str) -> Document[QueueDocument]:
        if plan_id not in self._documents:
            key = storage_key("admission", plan_id)
            self._documents[plan_id] = Document(self._bucket, self._secrets, key, QueueDocument())
        return self._documents[plan_id]

    async def _change(self, plan_id: str, decide: Callable[[StoredQueue], T]) -> T:
        def on_document(document: QueueDocument, mark: str) -> tuple[QueueDocument, T]:
            queue = StoredQueue(document)
            answer = decide(queue)
            is_same = queue.document(document.mark) == document
            return (document if is_same else queue.document(mark)), answer

        return await self._document(plan_id).change(on_document)

    async def enter(self, run: StoredRun, now: Instant) -> list[str] | Overloaded:
        """Give a new run its place; return the runs that are admitted now, or why it is refused. Safe to repeat."""
        head, request = run.head, run.admission
        assert request is not None

        def decide(queue: StoredQueue) -> list[str] | Overloaded:
            if head.run_id in queue.places:
                return [head.run_id] if head.run_id in queue.inside else []
            refusal = queue.enqueue(head.run_id, head.plan_id, head.tenant, request, now)
            if refusal is not None:
                return refusal
            queue.entered[head.run_id] = now
            return queue.admit_next(request.limit, 1, now)[0]

        return await self._change(head.plan_id, decide)

    async def enter_again(self, run_id: str, now: Instant) -> None:
        """Give a run whose head says that it is queued its place, if it has none, and release the admitted runs."""
        held = await self._mirror.fetch(run_id)
        if held is None or held.run.admission is None or held.run.head.queued_at is None:
            return
        admitted = await self.enter(held.run, now)
        if not isinstance(admitted, Overloaded):
            await self.release(admitted, now)

    async def release(self, run_ids: Sequence[str], now: Instant) -> None:
        """Release what was held back for admitted runs."""
        for run_id in run_ids:
            await self._heads.change(run_id, lambda run: _release(run, None, now))

    async def moved(self, run: StoredRun, now: Instant) -> None:
        """Note that a run has started or finished."""

        def decide(queue: StoredQueue) -> None:
            queue.record_start(run.head.run_id, now)
            if run.is_finished:
                queue.leave(run.head.run_id)

        await self._change(run.head.plan_id, decide)

    async def leave(self, plan_id: str, run_id: str) -> None:
        """Free the place of a run that was not created."""
        await self._change(plan_id, lambda queue: queue.leave(run_id))

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, node: str | None, now: Instant
    ) -> tuple[list[port.Admitted], Instant | None]:
        """Admit queued runs of plans, and release admitted runs that are still held back."""
        admitted: list[port.Admitted] = []
        instants: list[Instant] = []
        for plan_id, run_limit in sorted(limits.items()):
            most = limit - len(admitted)
            run_ids, stuck, next_at = await self._admit(plan_id, run_limit, most, now)
            for run_id in [*stuck, *run_ids]:
                answer = await self._heads.change(run_id, lambda run: _release(run, node, now))
                admitted += [] if answer is None else [answer]
            instants += [] if next_at is None else [next_at]
        return admitted, min(instants, default=None)

    async def _admit(
        self, plan_id: str, limit: RunLimit, most: int, now: Instant
    ) -> tuple[list[str], list[str], Instant | None]:
        if not any(
            summary.has_place and summary.plan_id == plan_id and not summary.is_finished
            for summary in self._mirror.summaries.values()
        ):
            return [], [], None  # a place whose run does not exist yet must not be admitted
        known = StoredQueue(await self._document(plan_id).read())
        for run_id in self._without_place(plan_id, known):
            await self.enter_again(run_id, now)
            known = StoredQueue(await self._document(plan_id).read())
        stuck = [run_id for run_id in known.inside if self._is_held_back(run_id)]
        if not known.has_waiting:
            return [], stuck, None
        ghosts = {run_id for run_id in known.places if await self._is_ghost(known, run_id, now)}

        def decide(queue: StoredQueue) -> tuple[list[str], Instant | None]:
            admitted, next_at = queue.admit_next(limit, most, now)
            if not admitted and queue.has_waiting:
                self._mend(queue, ghosts, now)
                admitted, next_at = queue.admit_next(limit, most, now)
            return admitted, next_at

        run_ids, next_at = await self._change(plan_id, decide)
        return run_ids, stuck, next_at

    def _mend(self, queue: StoredQueue, ghosts: set[str], now: Instant) -> None:
        """Free the places of runs that have finished or were never created, and count those that have started."""
        runs = self._mirror.summaries
        for run_id in queue.starting:
            if run_id in runs and runs[run_id].has_begun:
                queue.record_start(run_id, now)
        for run_id in queue.places:
            if run_id in ghosts or (run_id in runs and runs[run_id].is_finished):
                queue.record_start(run_id, now)
                queue.leave(run_id)

    def _without_place(self, plan_id: str, queue: StoredQueue) -> list[str]:
        """Return the runs of a plan whose heads say that they are queued but that have no place, oldest first."""
        places = set(queue.places)
        lost = [
            summary
            for run_id, summary in self._mirror.summaries.items()
            if summary.is_queued and summary.plan_id == plan_id and run_id not in places
        ]
        return [summary.run_id for summary in sorted(lost, key=lambda summary: summary.order)]

    def _is_held_back(self, run_id: str) -> bool:
        summary = self._mirror.summaries.get(run_id)
        return summary is not None and summary.is_queued

    async def _is_ghost(self, queue: StoredQueue, run_id: str, now: Instant) -> bool:
        is_old = queue.entered.get(run_id, 0) <= now - GHOST
        return is_old and run_id not in self._mirror.summaries and await self._mirror.fetch(run_id) is None


def _release(run: StoredRun, node: str | None, now: Instant) -> port.Admitted | None:
    """Release what was held back for an admitted run; None if another process has done so."""
    if run.head.queued_at is None:
        return None
    run.admit(now)
    if run.head.lease_owner is not None:
        return port.Admitted(run.head.run_id, "SKIPPED")
    if node is None:
        return port.Admitted(run.head.run_id, "STARTED")
    run.head = replace(run.head, lease_owner=node, lease_epoch=run.head.lease_epoch + 1)
    return port.Admitted(run.head.run_id, "STARTED", run.loaded(now))
