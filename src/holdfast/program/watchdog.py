"""Stops a program that blocks its thread: `while True: pass` in one workflow must not take the whole node with it.

A program runs on its node's thread, so one that never returns would block every other run, and the lease with them. A
`Watch` runs a piece of the program while one daemon thread watches it. That thread sleeps while nothing is watched.
Otherwise it wakes up every tick and counts; it reads no clock, so a process that was suspended is not blamed for it. A
piece that runs for longer than its bound is logged, with its present line, and `Overdue` is raised inside it, again at
every tick, for code that catches it. The piece ends with `RunawayWorkflow`.

One call of C code (`time.sleep`) cannot be interrupted before it returns: it is logged at once, and stopped after that.
A call that holds the interpreter lock (a regular expression that backtracks) blocks the watchdog as well, and is not
noticed. Code that always catches everything is logged but cannot be stopped.

A strike may hit Python code between acquiring a lock and entering the block that releases it, and then the lock is
never released: one inside a logging handler can silence the log for ever, one inside the tracer of `coverage` stops
every thread. Code that uses `with` on a lock of the interpreter is safe. So a thread is left alone for some ticks while
its innermost code belongs to a module that takes locks in other ways (`DELICATE`). That makes it rare, but not
impossible, because the thread may go on between the check and the strike.

The interpreter lets one thread raise in another, but not at a certain place. So nothing may be raised outside the
piece:

1. A thread is struck only under the lock, and only while its watch is in `watched`.
2. To leave, a watch first removes itself. At most two strikes can reach it after that: one that is pending, and one
   that was under way. Then it acquires the lock, so that none is under way, and takes what is pending.
3. Either strike may interrupt the leaving itself. So leaving is tried three times, each within the handler of the one
   before; nothing can interrupt the third. The interpreter raises at calls and backward jumps, not between them.
4. What is pending is taken by raising and catching it, never by `PyThreadState_SetAsyncExc(thread, NULL)`. That
   forgets the exception but leaves the interpreter's flag for it set, in Python 3.11 and 3.12 for the life of the
   process and in every thread: each call takes the slow path then, and 3.11 never gets past the first call under a
   profiler, a debugger or `coverage`.
"""

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from math import ceil
from threading import Event, Lock, Thread, get_ident
from traceback import format_stack
from types import FrameType
from typing import TypeVar

from holdfast.errors import RunawayWorkflow

T = TypeVar("T")

TICK_S = 0.1
"""The interval of the watchdog, while something runs. A bound is accurate to two ticks."""

DELICATE = frozenset({"coverage", "logging", "threading"})
"""Packages whose Python code takes locks outside of a `with`, or implements them."""

MOST_DELICATE_TICKS = 20
"""For how many ticks such code is left alone after its bound. A log handler may be what blocks."""

logger = logging.getLogger("holdfast.watchdog")


class Overdue(KeyboardInterrupt):
    """Raised in a program that blocks. asyncio lets it through any task, like every interrupt."""


class Watchdog:
    """The thread that watches, and what it watches: at most one piece of a program in each thread."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        self.tick_s = tick_s
        self.forget()

    def forget(self) -> None:
        """Reset: a forked process has neither the thread nor the holder of the lock."""
        self.watched: dict[int, Watch] = {}
        self.is_asleep = True
        self._lock = Lock()
        self._bell = Event()
        self._thread: Thread | None = None

    def wake(self) -> None:
        """Wake the thread up, to watch."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="holdfast-watchdog", daemon=True)
                self._thread.start()
        self._bell.set()

    def settle(self, thread_id: int, watch: "Watch") -> None:
        """Make sure that nothing more is raised in this thread, which is no longer watched."""
        with self._lock:
            if watch.where:
                try:
                    _set_async_exc(thread_id, _OVERDUE)  # in place of the pending one, and raised by this call
                    while True:
                        pass
                except Overdue:
                    pass

    def _run(self) -> None:
        self.is_asleep = False
        while True:
            if not self.watched:
                self._sleep()
            if self._bell.wait(self.tick_s):
                self._bell.clear()  # a watch saw it asleep when it no longer was: that is no tick
            else:
                self._tick()

    def _sleep(self) -> None:
        self.is_asleep = True
        if not self.watched:  # read after the line above; a watch does it in the other order
            self._bell.wait()
        self.is_asleep = False
        self._bell.clear()

    def _tick(self) -> None:
        struck: list[tuple[Watch, str]] = []
        with self._lock:
            for thread_id, watch in list(self.watched.items()):
                watch.ticks += 1
                if watch.ticks <= watch.most_ticks or _is_delicate(thread_id, watch):
                    continue
                where, stack = (watch.where, "") if watch.where else _locate(thread_id)  # reads files: check again
                if self.watched.get(thread_id) is watch and not _is_delicate(thread_id, watch):
                    if not watch.where:
                        watch.where = where
                        struck.append((watch, stack))
                    _set_async_exc(thread_id, _OVERDUE)
        for watch, stack in struck:  # only now: the struck thread may block the log
            logger.error("run %s: %s blocks its node%s\n%s", watch.run_id, watch.workflow, watch.where, stack)


class Watch:
    """Runs pieces of one program, each for `turn_s` at most; None or 0 sets no bound."""

    __slots__ = ("_turn_s", "_watchdog", "most_ticks", "run_id", "ticks", "where", "workflow")

    def __init__(self, turn_s: float | None, run_id: str, workflow: str, watchdog: Watchdog | None = None) -> None:
        self.run_id = run_id
        self.workflow = workflow
        self.ticks = 0
        self.where = ""
        self._turn_s = turn_s
        self._watchdog = watchdog or _WATCHDOG
        self.most_ticks = ceil(turn_s / self._watchdog.tick_s) if turn_s else 0

    def run(self, piece: Callable[[], T]) -> T:
        """Return the result of the piece; raise `RunawayWorkflow` if it was struck, even if it caught that."""
        if not self.most_ticks:
            return piece()
        watchdog, thread_id = self._watchdog, get_ident()
        self.ticks, self.where = 0, ""
        try:
            try:
                try:
                    watchdog.watched[thread_id] = self
                    if watchdog.is_asleep:
                        watchdog.wake()
                    result = piece()
                finally:
                    watchdog.watched.pop(thread_id, None)
                    watchdog.settle(thread_id, self)
            except Overdue:
                watchdog.settle(thread_id, self)
        except Overdue:
            watchdog.settle(thread_id, self)
        finally:
            if self.where:
                raise RunawayWorkflow(f"the workflow did not become idle within {self._turn_s} s{self.where}")
        return result


def _is_delicate(thread_id: int, watch: Watch) -> bool:
    """Return whether to strike the thread later, because of the code that it executes."""
    if watch.ticks > watch.most_ticks + MOST_DELICATE_TICKS:
        return False
    frame = sys._current_frames().get(thread_id)
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in DELICATE


def _locate(thread_id: int) -> tuple[str, str]:
    """Return where a thread is, and its stack, for people."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    if frame is None:
        return " in a thread that has ended", ""
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}", "".join(format_stack(frame))


_set_async_exc = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)
_OVERDUE = ctypes.py_object(Overdue)

_WATCHDOG = Watchdog()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_WATCHDOG.forget)

UNWATCHED = Watch(None, "", "")
"""Sets no bound."""
