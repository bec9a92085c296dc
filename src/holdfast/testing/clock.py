"""A clock that tests control."""

from holdfast.core.codec import parse_instant
from holdfast.core.instants import Instant

START: Instant = parse_instant("2026-01-28T12:00:00Z")
"""The default start of a virtual clock: the same instant in every test."""


class VirtualClock:
    """A clock for tests. Time stands still between calls of `advance`.

    `set_back` breaks the promise of `holdfast.clock.Clock` on purpose. A process holds its clock still when the
    machine's clock is set back. But two processes do not agree on the time, and a restarted process does not know the
    time it had before: a store may get an earlier time than it has written.
    """

    def __init__(self, at: Instant = START) -> None:
        self._now = at

    def now(self) -> Instant:
        """Return the current instant of this clock."""
        return self._now

    def advance(self, *, ms: int = 0, us: int = 0) -> Instant:
        """Advance the time, and return the new time."""
        if ms < 0 or us < 0:
            raise ValueError("time passes forwards; use set_back")
        self._now += ms * 1_000 + us
        return self._now

    def set_back(self, *, ms: int) -> Instant:
        """Set the clock back, as an administrator or a failover does, and return the new time."""
        if ms < 0:
            raise ValueError("a clock is set back by a positive amount; use advance")
        self._now -= ms * 1_000
        return self._now
