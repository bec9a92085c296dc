"""The arithmetic of admission: ranks, free instants of a rate, and limits that make no sense."""

import random

import pytest

from holdfast.core.admission import (
    NEVER,
    Overload,
    QueuedRun,
    QueueState,
    RunLimit,
    check_limit,
    decide_admission,
    free_slot,
    nth_last_start,
    overloaded,
    rank,
    rejection,
)
from holdfast.limits import OVERLOAD_RETRY_MS, PRIORITY, PRIORITY_AGE_MS

MS = 1_000


@pytest.mark.contract("QUE-2")
@pytest.mark.parametrize("seed", range(20))
def test_no_window_of_a_period_holds_more_starts_than_the_rate_allows(seed: int) -> None:
    rng = random.Random(seed)
    limit = RunLimit(starts=rng.randint(1, 4), period_ms=rng.randint(1, 50))
    now, starts = 0, list[int]()
    for _ in range(200):
        now += rng.choice((0, 0, 1, rng.randint(0, 40) * MS))
        starts.append(free_slot(limit, now, nth_last_start(starts, limit)))
        assert starts[-1] >= now
    for first, beyond in zip(starts, starts[limit.starts or 0 :], strict=False):
        assert beyond - first >= limit.period_ms * MS
    assert starts == sorted(starts)


@pytest.mark.contract("QUE-2")
def test_without_a_rate_every_instant_is_free() -> None:
    assert free_slot(RunLimit(at_once=1), 6, nth_last_start([5, 6, 7], RunLimit(at_once=1))) == 6


@pytest.mark.contract("QUE-2")
def test_runs_that_have_yet_to_start_use_up_the_rate() -> None:
    limit = RunLimit(starts=3, period_ms=1)
    starts = [10 * MS, 20 * MS]
    assert free_slot(limit, 20 * MS, nth_last_start(starts, limit)) == 20 * MS
    assert free_slot(limit, 20 * MS, nth_last_start(starts, limit, 1), 1) == 20 * MS
    assert free_slot(limit, 20 * MS, nth_last_start(starts, limit, 2), 2) == 21 * MS
    assert free_slot(limit, 20 * MS, nth_last_start(starts, limit, 3), 3) == NEVER


def queued(id: str, tenant: str = "t", rank: int = 0, of_key: int = 0) -> QueuedRun[str]:
    return QueuedRun(id=id, tenant=tenant, rank=rank, of_key=of_key)


def chosen(last_tenant: str, limit: RunLimit, *runs: QueuedRun[str], inside: int = 0) -> str | None:
    run = decide_admission(QueueState(inside=inside, last_tenant=last_tenant), runs, limit, 0).run
    return None if run is None else run.id


@pytest.mark.contract("QUE-2")
def test_the_next_tenant_is_the_one_behind_the_last_in_a_circle() -> None:
    """Then the lowest rank, then the order of creation."""
    runs = [queued("a", "ann", 9), queued("b", "bob", 5), queued("c", "bob", 4), queued("d", "bob", 4)]
    limit = RunLimit(at_once=1)
    assert [chosen(last, limit, *runs) for last in ("", "ann", "anna", "bob", "zoe")] == ["a", "c", "c", "a", "a"]


@pytest.mark.contract("QUE-2")
def test_a_run_without_room_is_passed_over() -> None:
    full, free = queued("full", of_key=2), queued("free", rank=9, of_key=1)
    assert chosen("", RunLimit(per_key=2), full, free) == "free"
    assert chosen("", RunLimit(per_key=3), full, free) == "full"
    assert chosen("", RunLimit(per_key=1), full, free) is None
    assert chosen("", RunLimit(at_once=3), full, free, inside=3) is None
    assert chosen("", RunLimit()) is None


@pytest.mark.contract("QUE-2")
def test_the_time_to_call_again_is_known_only_if_the_rate_alone_holds_a_run_back() -> None:
    limit = RunLimit(starts=1, period_ms=1)
    waiting = QueueState(nth_last_start=5 * MS)
    assert decide_admission(waiting, [queued("a")], limit, 5 * MS).next_at(5 * MS) == 6 * MS
    assert decide_admission(waiting, [], limit, 5 * MS).next_at(5 * MS) is None
    assert decide_admission(QueueState(starting=1), [queued("a")], limit, 5 * MS).next_at(5 * MS) is None


@pytest.mark.contract("QUE-2")
@pytest.mark.parametrize("overload", ["queue", "reject"])
def test_reject_refuses_what_would_be_queued(overload: Overload) -> None:
    limit = RunLimit(at_once=2, per_key=1, starts=2, period_ms=1, overload=overload)
    cases: list[tuple[QueueState, list[QueuedRun[str]], int]] = [
        (QueueState(inside=2), [], 0),
        (QueueState(inside=1), [queued("other")], 0),
        (QueueState(inside=1), [], 1),
        (QueueState(starting=2), [], 0),
        (QueueState(nth_last_start=7 * MS), [], 0),
    ]
    for state, others, of_key in cases:
        refusal = rejection("order", state, others, queued("new", of_key=of_key), limit, 7 * MS)
        assert (refusal is not None) == (overload == "reject")
    accepted = rejection("order", QueueState(inside=1), [queued("full", of_key=1)], queued("new"), limit, 7 * MS)
    assert accepted is None


@pytest.mark.contract("QUE-2")
def test_the_lowest_priority_overtakes_the_highest_that_comes_late_enough() -> None:
    low, head_start = rank(-PRIORITY, 0), 2 * PRIORITY * PRIORITY_AGE_MS * MS
    assert rank(PRIORITY, head_start - 1) < low < rank(PRIORITY, head_start + 1)


@pytest.mark.contract("QUE-2", "API-2")
def test_a_refusal_says_when_to_try_again() -> None:
    """Rounded up, so that a start at that time is not too early."""
    assert overloaded("order", 1, 0).details["retry_after_ms"] == 1
    assert overloaded("order", 5_001, 0).details["retry_after_ms"] == 6
    assert overloaded("order", 0, 0).details["retry_after_ms"] == OVERLOAD_RETRY_MS


@pytest.mark.contract("QUE-2")
def test_a_delay_goes_with_a_rate_and_nothing_else() -> None:
    assert check_limit(RunLimit(starts=1, overload="delay")) is None
    for limit in (RunLimit(overload="delay"), RunLimit(starts=1, at_once=1, overload="delay")):
        assert check_limit(limit) is not None
