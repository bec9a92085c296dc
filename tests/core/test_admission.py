"""The arithmetic of admission: ranks, free instants of a rate, and limits that make no sense."""

import random

import pytest

from holdfast.core.admission import RunLimit, check_limit, free_slot, overloaded, rank
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
        starts.append(free_slot(starts, limit, now))
        assert starts[-1] >= now
    for first, beyond in zip(starts, starts[limit.starts or 0 :], strict=False):
        assert beyond - first >= limit.period_ms * MS
    assert starts == sorted(starts)


@pytest.mark.contract("QUE-2")
def test_without_a_rate_every_instant_is_free() -> None:
    assert free_slot([5, 6, 7], RunLimit(at_once=1), 6) == 6


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
