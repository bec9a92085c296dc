"""For tests of what is built on Holdfast, and of stores: public, and kept as stable as the rest.

`secrets` gives secrets values in tests that call an activity's function without a node.
`view_of` and `system_view` are views of a store for `holdfast.core.invariants`, which check in a test what must hold.
The conformance suite needs pytest, so it is not imported here: ``from holdfast.testing.store_suite import StoreSuite``.
"""

from holdfast.core.instants import Instant, parse_instant
from holdfast.program.secrets import revealed as secrets
from holdfast.store.inspect import system_view, view_of

__all__ = ["START", "VirtualClock", "secrets", "system_view", "view_of"]

START: Instant = parse_instant("2026-01-28T12:00:00Z")
"""Where a virtual clock starts by default: the same instant in every test."""


class VirtualClock:
    """A clock for tests. Time stands still between calls of `advance`.

    `set_back` breaks the promise of `holdfast.clock.Clock` on purpose. One process holds its clock still when the
    machine's is set back, but two processes do not agree on the time, and a restarted one does not know the time it
    had before: a store may get an earlier time than it has written.
    """

    def __init__(self, at: Instant = START) -> None:
        self._now = at

    def now(self) -> Instant:
        """Return the present instant of this clock."""
        return self._now

    def advance(self, *, ms: int = 0, us: int = 0) -> Instant:
        """Let time pass, and return the new present."""
        if ms < 0 or us < 0:
            raise ValueError("time passes forwards; use set_back")
        self._now += ms * 1_000 + us
        return self._now

    def set_back(self, *, ms: int) -> Instant:
        """Set the clock back, as an administrator or a failover does, and return the new present."""
        if ms < 0:
            raise ValueError("a clock is set back by a positive amount; use advance")
        self._now -= ms * 1_000
        return self._now
