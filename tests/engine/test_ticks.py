"""The calendar of schedules: cron in time zones, also when the clocks change; intervals; once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pytest
from cronsim import CronSim

from holdfast.core.schedules import ScheduleSpec
from holdfast.engine.ticks import check_calendar, following, ticks_after, zone_of
from holdfast.errors import InvalidInput

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SOFIA = "Europe/Sofia"


def instant(text: str) -> int:
    """Return the instant that a text names."""
    return (datetime.fromisoformat(text) - EPOCH) // timedelta(microseconds=1)


def local(cron: str, after: str, count: int, tz: str = SOFIA) -> list[str]:
    """Return the next ticks as the clocks on the wall show them."""
    ticks = islice(ticks_after(ScheduleSpec(cron=cron, tz=tz), instant(after)), count)
    shown = [(EPOCH + timedelta(microseconds=tick)).astimezone(zone_of(tz)) for tick in ticks]
    return [f"{moment:%m-%d %H:%M%z}" for moment in shown]


@pytest.mark.contract("TMR-2")
def test_a_job_in_the_hour_that_is_skipped_runs_right_after_the_change() -> None:
    assert local("30 3 * * *", "2026-03-28T00:00+02:00", 3) == [
        "03-28 03:30+0200",
        "03-29 04:00+0300",
        "03-30 03:30+0300",
    ]
    assert local("0,30 3,4 * * *", "2026-03-28T12:00+02:00", 3) == [
        "03-29 04:00+0300",
        "03-29 04:30+0300",
        "03-30 03:00+0300",
    ]


@pytest.mark.contract("TMR-2")
def test_a_job_in_the_hour_that_comes_twice_runs_once() -> None:
    assert local("30 3 * * *", "2026-10-24T12:00+03:00", 2) == ["10-25 03:30+0300", "10-26 03:30+0200"]
    between = "2026-10-25T03:10+02:00"  # the second time that the clocks show ten past three
    assert local("30 3 * * *", between, 1) == ["10-26 03:30+0200"]


@pytest.mark.contract("TMR-2")
def test_what_runs_every_half_hour_follows_real_time() -> None:
    assert local("*/30 * * * *", "2026-10-25T02:45+03:00", 5) == [
        "10-25 03:00+0300",
        "10-25 03:30+0300",
        "10-25 03:00+0200",
        "10-25 03:30+0200",
        "10-25 04:00+0200",
    ]


@pytest.mark.contract("TMR-2")
def test_a_job_at_fixed_hours_with_seconds_is_neither_left_out_nor_run_twice() -> None:
    assert local("0 30 3 * * *", "2026-03-28T12:00+02:00", 2) == ["03-29 04:00+0300", "03-30 03:30+0300"]
    assert local("0 30 3 * * *", "2026-10-24T12:00+03:00", 2) == ["10-25 03:30+0300", "10-26 03:30+0200"]


def by_real_time(cron: str, tz: str, start: datetime, end: datetime) -> list[int]:
    """Return the ticks of a job that follows real time: every minute at which the clocks on the wall match."""
    expression, zone, ticks = CronSim(cron, datetime(2000, 1, 1)), zone_of(tz), list[int]()  # noqa: DTZ001
    minute = start
    while minute < end:
        wall = minute.astimezone(zone)
        is_match = wall.hour in expression.hours and wall.minute in expression.minutes
        if is_match and wall.month in expression.months and expression.match_day(wall.date()):
            ticks.append((minute - EPOCH) // timedelta(microseconds=1))
        minute += timedelta(minutes=1)
    return ticks


def changes(tz: str) -> list[datetime]:
    """Return when the clocks of a zone change in 2026, to the hour."""
    hours = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=hour) for hour in range(366 * 24)]
    offsets = [hour.astimezone(zone_of(tz)).utcoffset() for hour in hours]
    return [hour for hour, before, after in zip(hours[1:], offsets, offsets[1:], strict=False) if before != after]


@pytest.mark.contract("TMR-2")
@pytest.mark.parametrize(
    "tz", [SOFIA, "Australia/Lord_Howe", "Pacific/Chatham", "Antarctica/Troll", "America/Havana", "Africa/Cairo"]
)
@pytest.mark.parametrize(
    "cron", ["* 3 * * *", "45 * * * *", "*/15 5 * * *", "15 */3 * * *", "*/30 0 * * *", "*/20 0 * * SUN"]
)
def test_what_follows_real_time_runs_whenever_the_clocks_match(cron: str, tz: str) -> None:
    """Also where they change by half an hour, by two, within an hour, or at midnight."""
    for change in changes(tz):
        start, end = change - timedelta(hours=30), change + timedelta(hours=50)
        after = (start - EPOCH) // timedelta(microseconds=1) - 1
        spec = ScheduleSpec(cron=cron, tz=tz, end_at=(end - EPOCH) // timedelta(microseconds=1))
        assert [*ticks_after(spec, after)] == by_real_time(cron, tz, start, end)


@pytest.mark.contract("TMR-2")
@pytest.mark.parametrize(
    "tz", [SOFIA, "America/New_York", "Australia/Lord_Howe", "Pacific/Chatham", "Asia/Kolkata", "UTC"]
)
@pytest.mark.parametrize("cron", ["30 2 * * *", "15 */3 * * *", "*/20 * * * *", "0 9 * * MON-FRI", "0 0 L * *"])
def test_over_a_year_ticks_grow_and_the_way_to_them_does_not_matter(cron: str, tz: str) -> None:
    """From any instant between two ticks the same one follows."""
    spec, start = ScheduleSpec(cron=cron, tz=tz), instant("2026-01-01T00:00+00:00")
    ticks: list[int] = []
    for tick in ticks_after(spec, start):
        if tick > start + 366 * 86_400_000_000 or len(ticks) == 800:
            break
        ticks.append(tick)
    assert ticks == sorted(set(ticks))
    for before, tick in zip(ticks[::7], ticks[1::7], strict=False):
        assert {following(spec, at) for at in (before, (before + tick) // 2, tick - 1)} == {tick}


@pytest.mark.contract("TMR-2")
def test_intervals_are_counted_from_their_start_and_end_before_their_end() -> None:
    start = instant("2026-01-01T00:00:10+00:00")
    spec = ScheduleSpec(every_ms=60_000, start_at=start, end_at=start + 180_000_000)
    assert list(ticks_after(spec, 0)) == [start, start + 60_000_000, start + 120_000_000]
    assert following(ScheduleSpec(every_ms=1_000), 1_500_000) == 2_000_000
    assert list(ticks_after(ScheduleSpec(at=start), 0)) == [start]
    assert following(ScheduleSpec(at=start), start) is None


@pytest.mark.contract("TMR-2", "API-2")
@pytest.mark.parametrize(
    "spec",
    [
        {"cron": "* * * *"},
        {"cron": "61 * * * *"},
        {"cron": "@often"},
        {"cron": "0 0 30 2 *"},
        {"tz": "Sofia"},
        {"tz": "../UTC"},
    ],
)
def test_what_cannot_be_read_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        check_calendar(ScheduleSpec(**{"cron": "@daily", **spec}))
