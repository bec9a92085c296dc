"""Retry arithmetic: bounds, jitter, ends, and numbers that are too large for their own good."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.events import ErrorInfo
from holdfast.core.timing import NO_RETRY, Retry, full_delay_ms, retry_delay_ms
from holdfast.errors import InvalidInput
from tests.core.driver import BROKEN, FATAL

policies = st.builds(
    Retry,
    max_attempts=st.integers(0, 50),
    initial_ms=st.integers(0, 10**7),
    factor=st.floats(1.0, 1e6),
    most_ms=st.integers(0, 10**9),
    jitter=st.floats(0.0, 1.0),
)
fractions = st.floats(0.0, 1.0, exclude_max=True)


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize(
    ("attempt", "delay_ms"), [(1, 1_000), (2, 2_000), (3, 4_000), (7, 64_000), (8, 100_000), (9, 100_000)]
)
def test_delays_grow_by_the_factor_up_to_the_most(attempt: int, delay_ms: int) -> None:
    assert retry_delay_ms(Retry(max_attempts=0, jitter=0.0), attempt, BROKEN, 0.5) == delay_ms


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize(("fraction", "delay_ms"), [(0.0, 1_000), (0.5, 900), (0.999, 800)])
def test_jitter_takes_away_its_share(fraction: float, delay_ms: int) -> None:
    assert retry_delay_ms(Retry(jitter=0.2), 1, BROKEN, fraction) == delay_ms


@pytest.mark.contract("ACT-1")
@given(policies, st.integers(1, 100), fractions)
def test_a_delay_is_always_between_what_jitter_leaves_and_the_bounds(
    policy: Retry, attempt: int, fraction: float
) -> None:
    delay_ms = retry_delay_ms(policy, attempt, BROKEN, fraction)
    if policy.max_attempts and attempt >= policy.max_attempts:
        assert delay_ms is None
        return
    assert delay_ms is not None
    full = full_delay_ms(policy, attempt)
    assert min(policy.initial_ms, policy.most_ms) <= full <= policy.most_ms
    assert int(full * (1.0 - policy.jitter)) <= delay_ms <= full


@pytest.mark.contract("ACT-1")
@given(policies, st.integers(1, 60))
def test_delays_never_shrink_from_one_attempt_to_the_next(policy: Retry, attempt: int) -> None:
    assert full_delay_ms(policy, attempt) <= full_delay_ms(policy, attempt + 1)


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("factor", [1.0, 1.0001, 2.0, 1e300])
@pytest.mark.parametrize("initial_ms", [0, 1, 10**9])
def test_the_ten_thousandth_attempt_does_not_overflow(factor: float, initial_ms: int) -> None:
    policy = Retry(max_attempts=0, initial_ms=initial_ms, factor=factor, most_ms=100_000, jitter=0.0)
    delay_ms = retry_delay_ms(policy, 10_000, BROKEN, 0.0)
    assert delay_ms is not None
    assert 0 <= delay_ms <= 100_000


@pytest.mark.contract("ACT-1")
def test_the_last_attempt_is_the_last() -> None:
    policy = Retry(max_attempts=3)
    assert [retry_delay_ms(policy, attempt, BROKEN, 0.0) is None for attempt in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]
    assert retry_delay_ms(NO_RETRY, 1, BROKEN, 0.0) is None


@pytest.mark.contract("ACT-1")
def test_zero_attempts_means_without_end() -> None:
    assert retry_delay_ms(Retry(max_attempts=0), 1_000_000, BROKEN, 0.0) == 100_000


@pytest.mark.contract("ACT-1")
def test_an_error_that_says_so_or_is_named_by_the_policy_is_not_tried_again() -> None:
    assert retry_delay_ms(Retry(), 1, FATAL, 0.0) is None
    assert retry_delay_ms(Retry(non_retryable=("Other", "Broken")), 1, BROKEN, 0.0) is None
    assert retry_delay_ms(Retry(non_retryable=("broken",)), 1, BROKEN, 0.0) is not None
    assert retry_delay_ms(Retry(), 1, ErrorInfo("", "", retryable=True), 0.0) is not None


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    "fields",
    [
        {"max_attempts": -1},
        {"initial_ms": -1},
        {"most_ms": -1},
        {"factor": 0.99},
        {"factor": float("nan")},
        {"factor": float("inf")},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": float("nan")},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        Retry(**fields)  # type: ignore[arg-type]
