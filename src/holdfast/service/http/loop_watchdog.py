"""Detects that the event loop of a service is blocked, and logs which operation blocks it.

API, node and leases share one loop. A thread waits for a heartbeat of that loop. If none arrives in time it inspects
the stack of the loop's thread, logs it once, and counts how long the loop was blocked. Even code that holds the
interpreter lock (one long call of C) is named: the thread gets its turn when that call returns, before the operation
continues.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, get_ident
from traceback import extract_stack
from typing import Any

BEATS = 2
"""The number of heartbeats in the time after which the loop counts as blocked."""

SHOWN_FRAMES = 3
"""How many of the innermost lines of the loop's thread are logged."""

logger = logging.getLogger("holdfast.service.loop")


class LoopWatchdog:
    """How often and for how long the loop was blocked. `name_of` returns what a task executes, for the log."""

    def __init__(self, name_of: "Callable[[asyncio.Task[Any] | None], str]") -> None:
        self.stalls = 0
        self.stalled_s = 0.0
        self.name_of = name_of

    @contextmanager
    def watching(self, most_s: float) -> Iterator[None]:
        """Watch the running loop, which may be blocked for this long; 0 disables it."""
        if most_s <= 0:
            yield
            return
        watch = _Watch(self, asyncio.get_running_loop(), most_s)
        try:
            yield
        finally:
            watch.close()


class _Watch:
    """One loop being watched."""

    def __init__(self, dog: LoopWatchdog, loop: asyncio.AbstractEventLoop, most_s: float) -> None:
        self._dog = dog
        self._loop = loop
        self._most_s = most_s
        self._thread_id = get_ident()
        self._bell = Event()
        self._is_over = False
        self._is_stalled = False
        self._beaten_at = loop.time()
        self._timer = loop.call_soon(self._beat)
        Thread(target=self._run, name="holdfast-loop-watchdog", daemon=True).start()

    def close(self) -> None:
        self._is_over = True
        self._timer.cancel()
        self._bell.set()

    def _beat(self) -> None:
        now = self._loop.time()
        if self._is_stalled:
            self._is_stalled = False
            self._dog.stalled_s += now - self._beaten_at
            logger.warning("the event loop continues after %.1f s", now - self._beaten_at)
        self._beaten_at = now
        self._bell.set()
        self._timer = self._loop.call_later(self._most_s / BEATS, self._beat)

    def _run(self) -> None:
        while True:
            has_beaten = self._bell.wait(self._most_s)
            self._bell.clear()
            if self._is_over:
                return
            if not has_beaten and not self._is_stalled:
                self._is_stalled = True
                logger.warning(
                    "the event loop has been blocked for %d ms by %s, at %s",
                    self._most_s * 1_000,
                    self._dog.name_of(asyncio.current_task(self._loop)),
                    _place(self._thread_id),
                )
                self._dog.stalls += 1


def _place(thread_id: int) -> str:
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "an unknown place"
    lines = [f"{found.filename}:{found.lineno} {found.name}" for found in extract_stack(frame)[-SHOWN_FRAMES:]]
    return " < ".join(reversed(lines))
