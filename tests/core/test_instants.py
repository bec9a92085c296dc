"""Instants: one fixed-width text for each, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.codec import format_instant, parse_instant
from holdfast.errors import InvalidInput

LAST = 253_402_300_799_999_999  # the end of the year 9999


@given(st.integers(0, LAST))
def test_an_instant_survives_its_text(instant: int) -> None:
    text = format_instant(instant)
    assert len(text) == 27
    assert parse_instant(text) == instant


@pytest.mark.contract("SIG-1")
@given(st.integers(0, LAST), st.integers(0, LAST))
def test_texts_sort_like_the_instants(one: int, other: int) -> None:
    assert (format_instant(one) < format_instant(other)) == (one < other)


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("1970-01-01T00:00:00.000000Z", 0),
        ("1970-01-01T00:00:00.000001Z", 1),
        ("1970-01-01T02:00:00+02:00", 0),
        ("2026-01-28T12:00:00Z", 1_769_601_600_000_000),
        ("1969-12-31T23:59:59.999999Z", -1),
    ],
)
def test_parsing_reads_any_zone(text: str, instant: int) -> None:
    assert parse_instant(text) == instant


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("text", ["", "soon", "2026-01-28", "2026-01-28T12:00:00", "2026-13-01T00:00:00Z"])
def test_text_without_a_zone_or_a_meaning_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_instant(text)
