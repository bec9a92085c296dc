"""What operators should know: raised by who notices, kept for who looks."""

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from holdfast.core.instants import Instant
from holdfast.core.snapshot import Alert

MOST_ALERTS = 1_000
"""How many alerts are kept in a process. Counters go on."""


class RaisedAlert(Struct, frozen=True, kw_only=True):
    """An alert, with its number in this process and when it was raised."""

    number: int
    raised_at: Instant
    alert: Alert


class Alerts:
    """The alerts of one process, the latest of them in full."""

    def __init__(self) -> None:
        self._latest: deque[RaisedAlert] = deque(maxlen=MOST_ALERTS)
        self._number = 0
        self.counts: dict[str, int] = {}

    def add(self, alerts: Iterable[Alert], now: Instant) -> None:
        """Keep alerts, and count them by their codes."""
        for alert in alerts:
            self._number += 1
            self.counts[alert.code] = self.counts.get(alert.code, 0) + 1
            self._latest.append(RaisedAlert(number=self._number, raised_at=now, alert=alert))

    def after(self, number: int, limit: int) -> list[RaisedAlert]:
        """Return alerts in the order they were raised, from behind one of them."""
        return [raised for raised in self._latest if raised.number > number][:limit]
