"""Which ticks start runs: overlap, catching up, jitter; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.schedules import (
    QUEUED_TICKS,
    STARTS_AT_ONCE,
    TICKS_AT_ONCE,
    Schedule,
    ScheduleSpec,
    check_schedule,
    decide_ticks,
    due_at,
    waited_for,
    with_next,
)

MINUTE = 60_000_000


def every_minute(after: int) -> int:
    """Return the next full minute."""
    return (after // MINUTE + 1) * MINUTE


def schedule(**spec: Any) -> Schedule:
    """Return a schedule whose next tick is at minute 1."""
    fields = {"every_ms": 60_000, **spec}
    plain = Schedule(schedule_id="s", app="a", workflow="w", spec=ScheduleSpec(**fields))
    return with_next(plain, MINUTE)


@pytest.mark.contract("TMR-2")
def test_no_tick_is_early_and_a_due_one_starts_one_run() -> None:
    assert decide_ticks(schedule(), every_minute, MINUTE - 1, is_running=False).starts == ()
    decision = decide_ticks(schedule(), every_minute, MINUTE, is_running=False)
    assert decision.starts == (MINUTE,)
    assert (decision.schedule.watermark, decision.schedule.next_tick) == (MINUTE, 2 * MINUTE)
    assert decide_ticks(decision.schedule, every_minute, MINUTE, is_running=False).starts == ()


@pytest.mark.contract("TMR-2")
@pytest.mark.parametrize(
    ("overlap", "is_running", "starts", "skipped", "queued", "cancels"),
    [
        ("skip", False, (1,), 2, (), False),
        ("skip", True, (), 3, (), False),
        ("allow", True, (1, 2, 3), 0, (), False),
        ("queue", False, (1,), 0, (2, 3), False),
        ("queue", True, (), 0, (1, 2, 3), False),
        ("cancel-running", True, (3,), 2, (), True),
        ("cancel-running", False, (3,), 2, (), False),
    ],
)
def test_what_becomes_of_three_ticks_that_are_due_together(
    overlap: Any, is_running: bool, starts: tuple[int, ...], skipped: int, queued: tuple[int, ...], cancels: bool
) -> None:
    decision = decide_ticks(schedule(overlap=overlap), every_minute, 3 * MINUTE, is_running=is_running)
    assert decision.starts == tuple(tick * MINUTE for tick in starts)
    assert decision.schedule.skipped == skipped
    assert decision.schedule.queued == tuple(tick * MINUTE for tick in queued)
    assert decision.cancels == cancels
    assert decision.schedule.next_tick == 4 * MINUTE


@pytest.mark.contract("TMR-2")
def test_a_queue_is_worked_off_in_order_and_bounded() -> None:
    plain = schedule(overlap="queue", catch_up_ms=10**12)
    first = decide_ticks(plain, every_minute, (QUEUED_TICKS + 5) * MINUTE, is_running=True).schedule
    rest = decide_ticks(first, every_minute, (QUEUED_TICKS + 5) * MINUTE, is_running=True).schedule
    assert (len(rest.queued), rest.skipped, rest.watermark) == (QUEUED_TICKS, 5, (QUEUED_TICKS + 5) * MINUTE)
    decision = decide_ticks(rest, every_minute, (QUEUED_TICKS + 5) * MINUTE, is_running=False)
    assert decision.starts == (MINUTE,)
    assert len(decision.schedule.queued) == QUEUED_TICKS - 1


@pytest.mark.contract("TMR-2")
@pytest.mark.parametrize(
    ("is_running", "starts", "queued"), [(False, (1, 2, 3, -9), (-8,)), (True, (1, 2, 3), (-9, -8))]
)
def test_a_queue_of_runs_that_may_overlap_waits_for_its_own_run_alone(
    is_running: bool, starts: tuple[int, ...], queued: tuple[int, ...]
) -> None:
    given = replace(schedule(overlap="allow"), queued=(-9 * MINUTE, -8 * MINUTE), running=("r-1", "r-2"))
    assert waited_for(given) == ()
    assert waited_for(replace(given, queue_run_id="r-2")) == ("r-2",)
    assert waited_for(replace(given, spec=schedule(overlap="skip").spec)) == ("r-1", "r-2")
    decision = decide_ticks(given, every_minute, 3 * MINUTE, is_running=is_running)
    assert decision.starts == tuple(tick * MINUTE for tick in starts)
    assert decision.schedule.queued == tuple(tick * MINUTE for tick in queued)
    assert decision.is_from_queue is not is_running


@pytest.mark.contract("TMR-2")
def test_ticks_before_the_window_are_missed_and_the_others_are_caught_up() -> None:
    now = 100 * MINUTE
    decision = decide_ticks(schedule(overlap="allow", catch_up_ms=180_000), every_minute, now, is_running=False)
    assert decision.starts == tuple(tick * MINUTE for tick in (97, 98, 99, 100))
    assert (decision.schedule.missed, decision.schedule.next_tick) == (96, 101 * MINUTE)


@pytest.mark.contract("TMR-2")
def test_of_very_many_missed_ticks_some_are_counted_and_the_rest_is_passed_over() -> None:
    now = 500_000 * MINUTE
    first = decide_ticks(schedule(catch_up_ms=180_000), every_minute, now, is_running=False)
    assert (first.starts, first.schedule.missed) == ((), TICKS_AT_ONCE)
    rest = decide_ticks(first.schedule, every_minute, now, is_running=False)
    assert (rest.starts, rest.schedule.next_tick) == ((now - 3 * MINUTE,), now + MINUTE)


@pytest.mark.contract("TMR-2")
def test_a_tick_that_its_jitter_puts_off_by_more_than_the_window_is_not_missed() -> None:
    """How late a tick is counts from when it is due."""
    state, starts, now = schedule(overlap="allow", jitter_ms=600_000, catch_up_ms=1_000), list[int](), MINUTE
    while now <= 60 * MINUTE:
        assert state.next_due is not None
        now = max(now, state.next_due)
        decision = decide_ticks(state, every_minute, now, is_running=False)
        state, starts = decision.schedule, [*starts, *decision.starts]
    assert state.missed == 0
    assert starts == [tick * MINUTE for tick in range(1, len(starts) + 1)]


@pytest.mark.contract("TMR-2")
def test_many_ticks_start_in_parts() -> None:
    state, started = schedule(overlap="allow"), list[int]()
    now = (2 * STARTS_AT_ONCE + 7) * MINUTE
    for _ in range(3):
        decision = decide_ticks(state, every_minute, now, is_running=True)
        state = decision.schedule
        started += decision.starts
    assert started == [tick * MINUTE for tick in range(1, 2 * STARTS_AT_ONCE + 8)]


@pytest.mark.contract("TMR-2")
def test_jitter_puts_a_tick_off_always_by_the_same() -> None:
    plain = schedule(jitter_ms=30_000)
    dues = [due_at(plain, tick * MINUTE) - tick * MINUTE for tick in range(100)]
    assert all(0 <= due <= 30_000_000 for due in dues)
    assert len(set(dues)) > 90
    assert dues == [due_at(plain, tick * MINUTE) - tick * MINUTE for tick in range(100)]
    assert due_at(plain, MINUTE) != due_at(replace(plain, schedule_id="t"), MINUTE)
    due = due_at(plain, MINUTE)
    assert decide_ticks(plain, every_minute, due - 1, is_running=False).starts == ()
    assert decide_ticks(plain, every_minute, due, is_running=False).starts == (MINUTE,)


@pytest.mark.contract("TMR-2", "API-2")
@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("cron", {"every_ms": 0}),
        ("cron", {"cron": "* * * * *"}),
        ("every_ms", {"every_ms": 999}),
        ("jitter_ms", {"jitter_ms": -1}),
        ("catch_up_ms", {"catch_up_ms": 0}),
        ("at", {"every_ms": 0, "at": -1}),
        ("overlap", {"overlap": "burn"}),
    ],
)
def test_what_is_no_schedule_is_refused(field: str, spec: dict[str, Any]) -> None:
    problem = check_schedule(schedule(**spec))
    assert problem is not None
    assert problem.details["field"] == field
