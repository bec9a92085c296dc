"""The write latency budget: how long a write to the store may take before operators are to know of it (LAT-1).

Each write is measured. One that is not answered within the budget counts as over it at that moment, whether it is
answered later, fails, or never ends. Of those one in ten seconds is logged and becomes an alert; all are counted.
"""

import asyncio
import logging
from collections import Counter, deque
from types import TracebackType
from typing import Self

from msgspec import Struct

QUIET_S = 10.0
"""How long after a line in the log, and an alert, there is no other."""

RECENT_S = 3_600.0
"""How long a node publishes that its writes were over the budget."""

MOST_ALERTS = 100
"""So many alerts are kept until a service asks for them."""

logger = logging.getLogger("holdfast.node")


class LateWrites(Struct, frozen=True):
    """What a node publishes of the writes that took longer than its budget, within the last hour."""

    count: int
    slowest_ms: int
    budget_ms: int


class WriteAlert(Struct, frozen=True):
    """An alert, and when it was raised, by the time of the event loop."""

    detail: str
    at_s: float


class WriteLatency:
    """Measures the writes of one process against a budget."""

    def __init__(self, budget_ms: int) -> None:
        self.budget_ms = budget_ms
        self.over_budget: Counter[str] = Counter()
        """How many writes took longer than the budget, by verb."""
        self.slowest_s = 0.0
        """How long the slowest of them took, as far as they have ended."""
        self.alerts: deque[WriteAlert] = deque(maxlen=MOST_ALERTS)
        self._recent: deque[tuple[float, float]] = deque(maxlen=1_000)
        self._quiet_until = 0.0
        self._unsaid = 0

    def measure(self, verb: str, items: int) -> "Write":
        """Return a context in which a write is measured."""
        return Write(self, verb, items)

    def recent(self) -> LateWrites | None:
        """Return the writes of the last hour that were over the budget; None without any."""
        now = asyncio.get_running_loop().time()
        while self._recent and self._recent[0][0] < now - RECENT_S:
            self._recent.popleft()
        if not self._recent:
            return None
        slowest_ms = round(max(took_s for _, took_s in self._recent) * 1_000)
        return LateWrites(len(self._recent), max(slowest_ms, self.budget_ms), self.budget_ms)

    def _notice(self, verb: str, items: int, now: float) -> None:
        """Take note of a write that is over the budget."""
        self.over_budget[verb] += 1
        if now < self._quiet_until:
            self._unsaid += 1
            return
        more = f"; {self._unsaid} more since the last alert" if self._unsaid else ""
        detail = f"a {verb} of {items} is not answered after {self.budget_ms} ms{more}"
        logger.warning("writes to the store exceed write_latency_budget_ms: %s", detail)
        self.alerts.append(WriteAlert(detail, now))
        self._quiet_until, self._unsaid = now + QUIET_S, 0

    def _ended(self, took_s: float, now: float) -> None:
        self.slowest_s = max(self.slowest_s, took_s)
        self._recent.append((now, took_s))


class Write:
    """One write that is under way."""

    __slots__ = ("_began", "_is_over", "_items", "_latency", "_loop", "_timer", "_verb", "took_s")

    def __init__(self, latency: WriteLatency, verb: str, items: int) -> None:
        self._latency = latency
        self._verb = verb
        self._items = items
        self._is_over = False
        self.took_s = 0.0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer = self._loop.call_later(self._latency.budget_ms / 1_000, self._notice)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = self._loop.time()
        self.took_s = now - self._began
        self._timer.cancel()
        if self.took_s >= self._latency.budget_ms / 1_000:
            if not self._is_over:  # the loop was held up, and comes to the timer only now
                self._notice()
            self._latency._ended(self.took_s, now)

    def _notice(self) -> None:
        self._is_over = True
        self._latency._notice(self._verb, self._items, self._loop.time())
