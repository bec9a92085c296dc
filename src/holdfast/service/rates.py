"""How much a caller may read: so much in a minute, and so many lists at once, by token and by tenant.

A list costs 1, a search for words `SEARCH_COST`; the calls of a batch cost what each of them costs. Every transport
comes through here. Of a tenant's lists only some are read at once, so that none keeps the store's readers to itself.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from holdfast.errors import RateLimited
from holdfast.service.auth.throttle import Meter

SEARCH_COST = 20
"""What a search for words costs: it looks at every row, where a list looks at those that it shows."""


class ConcurrencyLimit:
    """Bounds how many of something a token and a tenant have open at once."""

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
    """What callers have read in this process within the minute, and what they are reading now."""

    def __init__(self, per_minute: int, tenant_per_minute: int, at_once: int) -> None:
        self._per_minute = per_minute
        self._tenant_per_minute = tenant_per_minute
        self._at_once = at_once
        self._meter = Meter()
        self._places: dict[str, tuple[asyncio.Semaphore, int]] = {}

    def charge(self, caller: str, tenant: str | None, cost: int) -> None:
        """Count what a caller reads, or raise `RateLimited` if that is too much for them or for their tenant."""
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
    async def place(self, key: str) -> AsyncIterator[None]:
        """Wait until those of one key read few enough lists, and count as one of them."""
        places, users = self._places.get(key) or (asyncio.Semaphore(self._at_once), 0)
        self._places[key] = places, users + 1
        try:
            async with places:
                yield
        finally:
            places, users = self._places[key]
            if users > 1:
                self._places[key] = places, users - 1
            else:
                del self._places[key]
