"""Instants, and as what else they are written: as text, and as a `datetime`.

An instant is an integer count of microseconds since 1970-01-01T00:00:00Z. Its text is ISO 8601 in UTC with a
fixed width, so that sorting the text sorts the time: signal keys on object storage depend on it.
"""

from datetime import UTC, datetime, timedelta
from functools import lru_cache

from holdfast.errors import InvalidInput

Instant = int
"""A point in time: microseconds since 1970-01-01T00:00:00Z."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def format_instant(instant: Instant) -> str:
    """Return the instant as `2026-01-28T12:00:00.000000Z`: always 27 characters."""
    second, microsecond = divmod(instant, 1_000_000)
    return f"{_format_second(second)}.{microsecond:06d}Z"


@lru_cache(maxsize=1_024)
def _format_second(second: int) -> str:
    return f"{_EPOCH + timedelta(seconds=second):%Y-%m-%dT%H:%M:%S}"


def parse_instant(text: str) -> Instant:
    """Return the instant that `text`, ISO 8601 with a zone, names."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as problem:
        raise InvalidInput(f"not an ISO 8601 instant: {text!r}") from problem
    if moment.tzinfo is None:
        raise InvalidInput(f"an instant needs a zone, such as a final Z: {text!r}")
    return instant_of(moment)


def instant_of(moment: datetime) -> Instant:
    """Return the instant of a datetime that has a zone."""
    return (moment - _EPOCH) // _MICROSECOND


def datetime_of(instant: Instant) -> datetime:
    """Return an instant as a datetime in UTC."""
    return _EPOCH + timedelta(microseconds=instant)
