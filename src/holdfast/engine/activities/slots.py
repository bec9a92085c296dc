"""The slots in which a node executes activities, and the threads for activities that are not async.

A caller that requests a slot gets one immediately or waits. A function in a thread cannot be interrupted: if it is
abandoned, it keeps its slot until it returns.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

THREADS = "holdfast-activity"
"""The prefix of the names of threads that execute activities."""

THREADS_OF_LOOP = min(32, (os.cpu_count() or 1) + 4)
"""How many threads an event loop has for code that is not async: the default of `asyncio`."""

logger = logging.getLogger("holdfast.activities")


class Waiting(Protocol):
    """A caller that waits for a slot."""

    is_given_up: bool

    def begin(self) -> None:
        """Begin, with the slot that is free now. `Slots.leave` returns the slot."""
        ...


class Slots:
    """A fixed number of slots."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._waiting: deque[Waiting] = deque()
        self._threads = _Threads(most)
        self.on_free: Callable[[], None] = lambda: None

    @property
    def free(self) -> int:
        """How many more callers could begin now."""
        return self._left

    def ask(self, waiting: Waiting) -> None:
        """Let a caller begin, now or when its turn comes."""
        if self._left:
            self._left -= 1
            waiting.begin()
        else:
            self._waiting.append(waiting)

    def give_back(self) -> None:
        """Free a slot, and give it to the caller that has waited the longest."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.is_given_up:
                waiting.begin()
                return
        self._left += 1
        self.on_free()

    def run(self, call: Callable[[], Any]) -> "Future[Any]":
        """Start a call in a thread."""
        return self._threads.submit(partial(copy_context().run, _called, call))

    def leave(self, thread: "Future[Any] | None", activity: str) -> None:
        """Take a slot back. If a thread still works in it, wait until that is done."""
        if thread is None or thread.done():
            self.give_back()
            return
        logger.warning("activity %r has ended, but its function still runs and keeps its thread", activity)
        loop = asyncio.get_running_loop()
        thread.add_done_callback(lambda _: self._leave_at_last(loop))

    def _leave_at_last(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(self.give_back)
        except RuntimeError:  # the loop is closed: the node has ended, and its slots with it
            return

    def close(self) -> None:
        """Release the threads, without waiting for their work."""
        self._waiting.clear()
        self._threads.close()


class DaemonExecutor(ThreadPoolExecutor):
    """An executor with threads that do not keep the process alive. This includes calls of `asyncio.to_thread`."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # The base class's pool is never used: its threads keep the process alive.
        self._daemons = _Threads(THREADS_OF_LOOP)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Start a call in a thread."""
        return self._daemons.submit(partial(function, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls, and do not wait for running ones."""
        self._daemons.close()


class _Threads:
    """Threads that do not keep the process alive, unlike those of an executor."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made = 0
        self._idle = threading.Semaphore(0)  # an upper bound once all threads exist, when it is not needed any more
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._is_closed = False

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        if self._is_closed:
            raise RuntimeError("the node has stopped: nothing more is carried out")
        if self._made < self._most and not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name=f"{THREADS}_{self._made}", daemon=True).start()
            self._made += 1
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        self._is_closed = True
        with suppress(Empty):
            while asked := self._calls.get_nowait():
                asked[0].cancel()
        self._calls.put(None)

    def _work(self) -> None:
        while asked := self._calls.get():
            _carry_out(*asked)
            del asked
            self._idle.release()
        self._calls.put(None)  # for the next thread


def _carry_out(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as problem:  # whatever it is, it is the activity's outcome
        future.set_exception(problem)
        del future  # this frame is in the traceback: otherwise they would form a reference cycle
    else:
        future.set_result(result)


def _called(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except StopIteration as problem:  # no future can carry it; a coroutine would raise it as a RuntimeError, too
        raise RuntimeError("an activity raised StopIteration") from problem
