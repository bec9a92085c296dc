"""Schedules in the reference model."""

from holdfast.core.instants import Instant
from holdfast.core.schedules import Schedule
from holdfast.store import decisions
from holdfast.store.queries import Found, ScheduleQuery

Place = tuple[str, str, str, str]


class Schedules:
    """The schedules, each with its revision."""

    def __init__(self) -> None:
        self._by_place: dict[Place, Schedule] = {}

    def commit(self, schedule: Schedule, expected: int, now: Instant) -> tuple[Schedule, bool]:
        """Store a schedule with the next revision; also return whether it was not stored before."""
        known = self._by_place.get(schedule.place)
        stored = decisions.next_schedule(schedule, expected, known, now)
        if stored is None:
            assert known is not None
            return known, False
        self._by_place[schedule.place] = stored
        return stored, True

    def restore(self, schedule: Schedule) -> None:
        """Put back a schedule as it was stored."""
        self._by_place[schedule.place] = schedule

    def all(self) -> tuple[Schedule, ...]:
        """Return all schedules, in order."""
        return tuple(schedule for _, schedule in sorted(self._by_place.items()))

    def delete(self, place: Place, expected: int) -> bool:
        """Delete a schedule, if it has this revision."""
        known = self._by_place.get(place)
        if known is None or known.revision != expected:
            return False
        del self._by_place[place]
        return True

    def find(self, query: ScheduleQuery) -> Found[Schedule]:
        """Return the schedules that match the query."""
        fields = ("tenant", "project", "environment", "schedule_id", "app", "workflow")
        found = [
            schedule
            for place, schedule in sorted(self._by_place.items())
            if all(getattr(query, field) in (None, getattr(schedule, field)) for field in fields)
            and (not query.waiting or schedule.queued)
            and (query.by_due or place > query.after)
        ]
        if query.by_due:
            due = [(schedule.next_due, schedule.place, schedule) for schedule in found if schedule.next_due is not None]
            found = [schedule for _, _, schedule in sorted(due, key=lambda row: row[:2])]
        return Found(found[: query.limit])

    def forget(self, tenant: str | None) -> None:
        """Delete all schedules of a tenant."""
        self._by_place = {place: one for place, one in self._by_place.items() if one.tenant != tenant}
