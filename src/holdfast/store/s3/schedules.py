"""Schedules in a bucket: one object for all of them, with the runs that a commit has yet to create.

A conditional write covers one object, so a schedule and the runs of its ticks cannot be written together. The runs are
first stored in the object of the schedules, in the write that advances the schedule, and are created afterwards. A
process that reads schedules creates those that another one left behind. Its request ensures that a run is created once.

The request is deleted when retention deletes the run. A process that was frozen before it created a run must not create
it a second time. So it first checks whether the run is still in the object, and retention keeps finished runs of ticks
for `PurgePolicy.sink_hold_ms`, a week. Being frozen for that long between the check and the write does no harm either,
because a server accepts no request whose signature is older than a quarter of an hour.
"""

from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from holdfast.core.instants import Instant
from holdfast.core.schedules import Schedule
from holdfast.store import port, validation
from holdfast.store.memory.schedules import Place, Schedules
from holdfast.store.s3.documents import Document
from holdfast.store.s3.head import StartRecord, start_of, start_record

Answer = port.Created | port.Existing | port.Refused
Create = Callable[[Sequence[port.NewRun]], Awaitable[list[Answer]]]


class SchedulesDocument(Struct, frozen=True):
    """All schedules, and the runs that are not created yet."""

    schedules: tuple[Schedule, ...] = ()
    starts: tuple[StartRecord, ...] = ()
    mark: str = ""


def _schedules_of(document: SchedulesDocument) -> Schedules:
    schedules = Schedules()
    for schedule in document.schedules:
        schedules.restore(schedule)
    return schedules


class StoredSchedules:
    """The object with the schedules."""

    def __init__(
        self, document: Document[SchedulesDocument], create: Create, is_requested: Callable[[str], Awaitable[bool]]
    ) -> None:
        """`is_requested` returns whether there is a request with this key."""
        self._document = document
        self._create = create
        self._is_requested = is_requested

    async def commit(
        self, schedule: Schedule, expected: int, starts: Sequence[port.NewRun], now: Instant
    ) -> tuple[Schedule, list[Answer]]:
        """Store a schedule with the next revision, then create its runs."""
        await self._create_left()
        kept = tuple(start_record(new) for new in starts if validation.check_new_run(new) is None)

        def decide(document: SchedulesDocument, mark: str) -> tuple[SchedulesDocument, tuple[Schedule, bool]]:
            schedules = _schedules_of(document)
            stored, is_new = schedules.commit(schedule, expected, now)
            if not is_new:
                return document, (stored, False)
            return SchedulesDocument(schedules.all(), (*document.starts, *kept), mark), (stored, True)

        stored, is_new = await self._document.change(decide)
        if not is_new:
            return stored, [await self._started_before(new) for new in starts]
        answers = await self._create_own(starts) if starts else []
        if kept:
            await self._forget({record.run_id for record in kept})
        return stored, answers

    async def _create_own(self, starts: Sequence[port.NewRun]) -> list[Answer]:
        """Create the runs of a commit, except those that another process has created meanwhile."""
        left = {record.run_id for record in (await self._document.read()).starts}
        own = [new for new in starts if new.run_id in left or validation.check_new_run(new) is not None]
        created = iter(await self._create(own))
        return [next(created) if new in own else await self._started_before(new) for new in starts]

    async def _started_before(self, new: port.NewRun) -> Answer:
        """Return the answer about a run of a repeated commit: the request of a deleted run is deleted too."""
        if validation.check_new_run(new) is not None or not await self._is_requested(new.request_key):
            return validation.started_before(new, lambda _: None)
        [answer] = await self._create([new])
        return answer

    async def delete(self, place: Place, expected: int) -> bool:
        """Delete a schedule, if it has this revision."""

        def decide(document: SchedulesDocument, mark: str) -> tuple[SchedulesDocument, bool]:
            schedules = _schedules_of(document)
            if not schedules.delete(place, expected):
                return document, False
            return SchedulesDocument(schedules.all(), document.starts, mark), True

        return await self._document.change(decide)

    async def find(self, query: port.ScheduleQuery) -> port.Found[Schedule]:
        """Return the schedules that match the query."""
        return _schedules_of(await self._create_left()).find(query)

    async def forget(self, tenant: str | None) -> None:
        """Delete all schedules of a tenant."""

        def decide(document: SchedulesDocument, mark: str) -> tuple[SchedulesDocument, None]:
            left = tuple(schedule for schedule in document.schedules if schedule.tenant != tenant)
            return (document if left == document.schedules else SchedulesDocument(left, document.starts, mark)), None

        await self._document.change(decide)

    async def _create_left(self) -> SchedulesDocument:
        """Create the runs that a killed process has left, and return the document with the schedules."""
        document = await self._document.read()
        if document.starts:
            await self._create([start_of(record) for record in document.starts])
            await self._forget({record.run_id for record in document.starts})
        return document

    async def _forget(self, run_ids: set[str]) -> None:
        def decide(document: SchedulesDocument, mark: str) -> tuple[SchedulesDocument, None]:
            left = tuple(record for record in document.starts if record.run_id not in run_ids)
            return (document if left == document.starts else SchedulesDocument(document.schedules, left, mark)), None

        await self._document.change(decide)
