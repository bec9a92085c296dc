"""Limits on what callers may do per minute and concurrently, by token and by tenant.

- Refusals are logged and counted. A caller who was refused too often within a minute gets `RateLimited` for commands,
  signals, updates and operations on tasks, before a run records another refusal.
- Reads are counted: a list costs 1, a text search `SEARCH_COST`, and a batch the sum of its calls. The number of
  concurrent lists of a tenant is limited, so that no tenant occupies all readers of the store.
- Log lines are limited for each caller; the number of omitted lines is logged.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from starlette.types import Scope

from holdfast.errors import HoldfastError, RateLimited

logger = logging.getLogger("holdfast.access")

MINUTE_S = 60.0
LINES_PER_MINUTE = 60
"""How many refusals of one caller are logged per minute."""

ALL_LINES_PER_MINUTE = 6_000
"""How many refusals of all callers are logged per minute, so that many addresses cannot fill a disk."""

KEYS = 10_000
"""For how many callers counts are kept."""

COUNTED = frozenset({"runs:control", "tasks:write", "signals:write"})
UPDATE = "runs.update"
"""The scopes of operations whose refusals the engine records, and the one operation with another scope."""

SEARCH_COST = 20
"""The cost of a text search: it scans every row, while a list reads only the rows that it returns."""


class Meter:
    """Counts by key, in windows of one minute."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, int]] = {}

    def count(self, key: str, by: int = 1) -> int:
        """Add to the count of a key, and return the count in the current window."""
        now = asyncio.get_running_loop().time()
        if len(self._counts) >= KEYS:
            self._counts = {key: count for key, count in self._counts.items() if now - count[0] < MINUTE_S}
        since, so_far = self._counts.get(key, (now, 0))
        if now - since >= MINUTE_S:
            since, so_far = now, 0
        self._counts[key] = since, so_far + by
        return so_far + by

    def left_ms(self, key: str, most: int) -> int:
        """Return how long a caller has to wait if its count has reached `most`, or 0."""
        since, count = self._counts.get(key, (0.0, 0))
        if count < most:
            return 0
        return max(0, int((since + MINUTE_S - asyncio.get_running_loop().time()) * 1_000))


class RefusalLog:
    """The refusals of this process, which are logged and counted for each caller."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._refused = Meter()
        self._lines = Meter()
        self.failed_sign_ins = Meter()
        """How many sign-ins have failed, by address."""
        self._left_out: dict[str, int] = {}

    def check(self, key: str) -> None:
        """Raise `RateLimited` if this caller was refused too often."""
        left_ms = self._refused.left_ms(key, self._per_minute)
        if left_ms:
            raise RateLimited("you have been refused too often; retry later", retry_after_ms=left_ms)

    def count(self, key: str) -> None:
        """Count a refusal of this caller that a run records."""
        self._refused.count(key)

    def log_error(self, key: str, who: str, what: str, refusal: HoldfastError, correlation_id: str) -> None:
        """Log that a known caller was refused, with the error."""
        self.log(f"{who} ({key})" if key != who else who, what, refusal.message, correlation_id, key)

    def log(self, who: str, what: str, why: str, correlation_id: str, key: str) -> None:
        """Log a refusal: the caller, the operation and the reason. If this caller has too many log lines, only count
        it.

        `key` identifies the caller: the id of a valid token, otherwise the address of the client.
        """
        is_over = self._lines.count(key) > LINES_PER_MINUTE or self._lines.count("") > ALL_LINES_PER_MINUTE
        if is_over:
            if key in self._left_out or len(self._left_out) < KEYS:
                self._left_out[key] = self._left_out.get(key, 0) + 1
            return
        left_out = self._left_out.pop(key, 0)
        if left_out:
            logger.warning("%d more refusals of %r were not logged", left_out, key)
        logger.warning("refused: who=%r what=%r why=%r correlation_id=%s", who, what, why, correlation_id)


class ConcurrencyLimit:
    """Limits how many of something a token and a tenant may have open concurrently."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._counts: Counter[str] = Counter()

    def count(self, key: str) -> int:
        """Return how many are open under this key."""
        return self._counts[key]

    @contextmanager
    def hold(self, bounds: Mapping[str, int]) -> Iterator[None]:
        """Count one more under each of these keys while the context is open, or raise `RateLimited`."""
        for key, most in bounds.items():
            if self._counts[key] >= most:
                raise RateLimited(f"{key} has {most} {self._what}, and no more are served", retry_after_ms=5_000)
        self._counts.update(bounds.keys())
        try:
            yield
        finally:
            self._counts.subtract(bounds.keys())
            for key in bounds:
                if self._counts[key] <= 0:
                    del self._counts[key]


class ReadLimiter:
    """Limits how much callers of this process read per minute, and how many lists they read concurrently."""

    def __init__(self, per_minute: int, tenant_per_minute: int, at_once: int) -> None:
        self._per_minute = per_minute
        self._tenant_per_minute = tenant_per_minute
        self._at_once = at_once
        self._meter = Meter()
        self._slots: dict[str, tuple[asyncio.Semaphore, int]] = {}

    def charge(self, caller: str, tenant: str | None, cost: int) -> None:
        """Count a read of a caller, or raise `RateLimited` if the caller or the tenant has read too much."""
        bounds = [(f"token {caller}", self._per_minute, "you have")]
        if tenant is not None:
            bounds.append((f"tenant {tenant}", self._tenant_per_minute, f"tenant {tenant!r} has"))
        for key, most, who in bounds:
            left_ms = self._meter.left_ms(key, most)
            if left_ms:
                raise RateLimited(f"{who} listed and searched too much within a minute", retry_after_ms=left_ms)
        for key, _, _ in bounds:
            self._meter.count(key, cost)

    @asynccontextmanager
    async def slot(self, key: str) -> AsyncIterator[None]:
        """Wait for one of the slots of a key, and occupy it while the context is open."""
        slots, users = self._slots.get(key) or (asyncio.Semaphore(self._at_once), 0)
        self._slots[key] = slots, users + 1
        try:
            async with slots:
                yield
        finally:
            slots, users = self._slots[key]
            if users > 1:
                self._slots[key] = slots, users - 1
            else:
                del self._slots[key]


def client_of(scope: Scope) -> str:
    """Return the address that a request comes from."""
    return str((scope.get("client") or ("?",))[0])
