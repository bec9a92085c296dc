"""The places in which a node carries out activities, and the threads for those that are not async.

Who asks for a place gets one at once or has to wait; nothing is made for those who wait. A function in a thread cannot
be stopped. One that is no longer waited for keeps its place until it returns.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Protocol

THREADS = "holdfast-activity"
"""What the names of threads begin with that carry out activities."""

logger = logging.getLogger("holdfast.activities")


class Waiting(Protocol):
    """Somebody who wants a place."""

    is_given_up: bool

    def begin(self) -> None:
        """Begin, with the place that is there now. It is given back by `Slots.leave`."""
        ...


class Slots:
    """So many places."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most
        self._waiting: deque[Waiting] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self.on_free: Callable[[], None] = lambda: None

    @property
    def free(self) -> int:
        """How many more could begin at once."""
        return self._left

    def ask(self, waiting: Waiting) -> None:
        """Let somebody begin, now or when it is their turn."""
        if self._left:
            self._left -= 1
            waiting.begin()
        else:
            self._waiting.append(waiting)

    def give_back(self) -> None:
        """Take a place back, and give it to who has waited for longest."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.is_given_up:
                waiting.begin()
                return
        self._left += 1
        self.on_free()

    def run(self, call: Callable[[], Any]) -> "Future[Any]":
        """Begin to carry out a call in a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._most, THREADS)
        return self._threads.submit(copy_context().run, _called, call)

    def leave(self, thread: "Future[Any] | None", activity: str) -> None:
        """Take a place back; if a thread still works in it, when that is done."""
        if thread is None or thread.done():
            self.give_back()
            return
        logger.warning("activity %r is over and its function goes on; it keeps its thread", activity)
        loop = asyncio.get_running_loop()
        thread.add_done_callback(lambda _: self._leave_at_last(loop))

    def _leave_at_last(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(self.give_back)
        except RuntimeError:  # the loop is closed: the node is gone, and its places with it
            return

    def close(self) -> None:
        """Let go of the threads, without waiting for what they do."""
        self._waiting.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _called(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except StopIteration as problem:  # no future can carry it; from a coroutine it comes like this too
        raise RuntimeError("an activity raised StopIteration") from problem
