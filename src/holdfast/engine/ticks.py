"""The calendar of schedules: which tick follows an instant, by cron in a time zone, by an interval, or once.

Cron is `cronsim`'s: five fields, or six with seconds first, read as Debian's cron reads them. At a change of the clock
a job at fixed hours that falls into the skipped hour runs right after the change, and one in the repeated hour runs
once; jobs whose minutes or hours begin with `*` follow the real time. `_Cron` also does this where clocks change by
half an hour or within an hour. Time zones come from the package `tzdata`, not from the machine, so that all nodes
agree; its version is stored with each schedule.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from holdfast.core.instants import Instant, datetime_of, instant_of
from holdfast.core.schedules import ScheduleSpec
from holdfast.errors import InvalidInput

TZDATA = version("tzdata")
"""The version of the time zone data."""

_MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


@lru_cache(maxsize=1_024)
def zone_of(name: str) -> ZoneInfo:
    """Return a time zone of the package `tzdata` by its name, such as Europe/Sofia."""
    if name not in _zones():
        raise InvalidInput(f"there is no time zone {name!r}; names are such as Europe/Sofia and UTC", field="tz")
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


@lru_cache(maxsize=1)
def _zones() -> frozenset[str]:
    return frozenset(files("tzdata").joinpath("zones").read_text().split())


def check_calendar(spec: ScheduleSpec) -> None:
    """Refuse a cron expression or a time zone that cannot be read."""
    zone_of(spec.tz)
    if spec.cron:
        _cron(spec, 0)


def following(spec: ScheduleSpec, after: Instant) -> Instant | None:
    """Return the first tick after an instant, or None if there is none."""
    if spec.start_at is not None:
        after = max(after, spec.start_at - 1)
    if spec.at is not None:
        tick: Instant | None = spec.at if spec.at > after else None
    elif spec.every_ms:
        every, first = spec.every_ms * 1_000, spec.start_at or 0
        tick = first + ((after - first) // every + 1) * every
    else:
        tick = _next_by_cron(spec, after)
    return None if tick is None or (spec.end_at is not None and tick >= spec.end_at) else tick


def ticks_after(spec: ScheduleSpec, after: Instant) -> Iterator[Instant]:
    """Yield the ticks after an instant, in order."""
    tick = following(spec, after)
    while tick is not None:
        yield tick
        tick = following(spec, tick)


def _next_by_cron(spec: ScheduleSpec, after: Instant) -> Instant | None:
    ticks = _cron(spec, after)
    for moment in ticks:
        tick = instant_of(moment.astimezone(UTC))
        if tick > after:  # after a change of the clock two local times can be the same instant
            return tick
    return None


class _Cron(CronSim):
    """A cron expression, evaluated from an instant on. It only moves forward in real time, in every time zone.

    `cronsim` advances by whole hours, and goes back to the full hour of the same local time. Where clocks change by
    half an hour, or a quarter before the hour, this skips ticks or never ends. It also has no fixed hours with seconds.
    """

    STEP_S = 900
    """Clocks change at full quarters of an hour."""

    def __init__(self, expression: str, local: datetime) -> None:
        super().__init__(expression, local)
        is_fixed = not self.parts[1].startswith("*") and not self.parts[2].startswith("*")
        if is_fixed and self.dt.tzinfo is not None:
            self.fixup_tz = self.dt.tzinfo
            self.dt = self.dt.replace(tzinfo=None)

    def advance_month(self) -> None:
        super().advance_month()
        self._leave_gap()

    def advance_day(self) -> bool:
        has_moved = super().advance_day()
        self._leave_gap()
        return has_moved

    def advance_hour(self) -> bool:
        if self.dt.tzinfo is None:
            return super().advance_hour()
        day = self.dt.day
        if self.dt.hour in self.hours:
            return False
        while self.dt.hour not in self.hours and self.dt.day == day:
            self.tick(self.STEP_S - (self.dt.minute * 60 + self.dt.second) % self.STEP_S)
        return True

    def advance_minute(self) -> bool:
        if self.dt.tzinfo is None:
            return super().advance_minute()
        hour = self.dt.hour
        if self.dt.minute in self.minutes:
            return False
        while self.dt.minute not in self.minutes and self.dt.hour == hour:
            self.tick(60 - self.dt.second)
        return True

    def _leave_gap(self) -> None:
        """Continue from a midnight that does not exist because clocks are changed then."""
        if self.dt.tzinfo is not None:
            self.dt = self.dt.astimezone(UTC).astimezone(self.dt.tzinfo)


def _cron(spec: ScheduleSpec, after: Instant) -> CronSim:
    local = datetime_of(after).astimezone(zone_of(spec.tz))
    try:
        return _Cron(_MACROS.get(spec.cron.strip().lower(), spec.cron), local)
    except (CronSimError, ValueError) as problem:
        raise InvalidInput(f"cron: {spec.cron!r} cannot be read: {problem}", field="cron") from problem
