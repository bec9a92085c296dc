"""Instants, and the `datetime` of each. `codec.py` writes them as text.

An instant is an integer count of microseconds since 1970-01-01T00:00:00Z.
"""

from datetime import UTC, datetime, timedelta

Instant = int
"""A point in time: microseconds since 1970-01-01T00:00:00Z."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def instant_of(moment: datetime) -> Instant:
    """Return the instant of a datetime that has a zone."""
    return (moment - EPOCH) // _MICROSECOND


def datetime_of(instant: Instant) -> datetime:
    """Return an instant as a datetime in UTC."""
    return EPOCH + timedelta(microseconds=instant)
