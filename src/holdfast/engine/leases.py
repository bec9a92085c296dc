"""Keeps a node's lease: the node owns its runs for as long as it renews the lease in time.

The event loop renews the lease. If the loop is blocked, by a long turn or anything else that does not await, a thread
renews it instead, if the store can be called from a thread. It does so only for a limited time: a node whose loop stays
blocked is lost, and other nodes must continue its runs.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from holdfast.errors import HoldfastError, StoreError

logger = logging.getLogger("holdfast.node")

Extend = Callable[[str, int], None]
"""Extends the current lease of a node, from any thread."""


class LeaseTimer:
    """Tracks until when a lease is certainly held, by this process's own clock."""

    def __init__(self, lease_ms: int) -> None:
        self._lease_s = lease_ms / 1_000
        self._certain_until = 0.0

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Measure a renewal. The lease counts from before the request, and for a tenth less: clocks differ in speed."""
        sent = asyncio.get_running_loop().time()
        yield
        self._certain_until = max(self._certain_until, sent + 0.9 * self._lease_s)

    @property
    def is_certain(self) -> bool:
        """Whether the lease is held now, whatever the store would answer."""
        return asyncio.get_running_loop().time() < self._certain_until

    def end(self) -> None:
        """Note that the lease is lost."""
        self._certain_until = 0.0


class LeaseGuard:
    """Renews a lease in a thread while the loop is blocked."""

    def __init__(self, extend: Extend, node: str, lease_ms: int, blocked_s: float) -> None:
        self._extend = extend
        self._node = node
        self._lease_ms = lease_ms
        self._blocked_s = blocked_s
        self._loop = asyncio.get_running_loop()
        self._answered_at = self._loop.time()
        self._is_over = threading.Event()
        self.extensions = 0
        """How often the thread had to renew."""
        threading.Thread(target=self._watch, name=f"lease of {node}", daemon=True).start()

    def answer(self) -> None:
        """Note that the loop is responding and has renewed the lease."""
        self._answered_at = self._loop.time()

    def stop(self) -> None:
        """Stop renewing."""
        self._is_over.set()

    def _watch(self) -> None:
        """Check three times per lease. The loop is late if it misses its time by half as much again."""
        third_s = self._lease_ms / 3_000
        while not self._is_over.wait(third_s / 2):
            silent_s = self._loop.time() - self._answered_at
            if 1.5 * third_s <= silent_s <= self._blocked_s:
                try:
                    self._extend(self._node, self._lease_ms)
                    self.extensions += 1
                except HoldfastError:
                    logger.warning("node %s could not renew its lease from the thread", self._node, exc_info=True)


async def keep_lease(
    renew: Callable[[], Awaitable[None]],
    node: str,
    lease_ms: int,
    has_failed: Callable[[], bool],
    guard: LeaseGuard | None = None,
) -> None:
    """Renew the lease of a node three times per lease, until the node has failed.

    Raise `NodeSuperseded` if another process has taken over the name of the node.
    """
    loop, third_s = asyncio.get_running_loop(), lease_ms / 3_000
    try:
        while True:
            due = loop.time() + third_s
            await asyncio.sleep(third_s)
            if has_failed():
                return  # the lease expires, and other nodes continue the runs of this one
            late_s = loop.time() - due
            if late_s > third_s:
                text = "node %s was blocked for %.1f s%s: something on its loop does not await"
                logger.warning(text, node, late_s, "" if guard is not None else ", and may have lost its runs")
            try:
                await renew()
                if guard is not None:
                    guard.answer()
            except StoreError:
                logger.warning("node %s could not renew its lease", node, exc_info=True)
    finally:
        if guard is not None:
            guard.stop()
