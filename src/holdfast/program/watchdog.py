"""Stops a program that blocks its thread: `while True: pass` in one workflow must not take the whole node with it.

A program runs on its node's thread, so one that never returns would block every other run, and the renewal of the
lease. A `Watch` (`loop.py`) runs a piece of the program while one daemon thread watches it. That thread sleeps while
nothing is watched. Otherwise it wakes up every tick and counts; it reads no clock, so a process that was suspended is
not blamed for it. A piece that runs for longer than its bound is logged, with its current line, and `Overdue` is raised
inside it, again at every tick, for code that catches it. The piece ends with `RunawayWorkflow`.

One call of C code (`time.sleep`) cannot be interrupted before it returns: it is logged immediately, and stopped after
it returns. A call that holds the interpreter lock (a regular expression that backtracks) blocks the watchdog as well,
and is not noticed. Code that always catches everything is logged but cannot be stopped.

A strike may hit Python code between acquiring a lock and entering the block that releases it, and then the lock is
never released: one inside a logging handler can silence the log for ever, one inside the tracer of `coverage` stops
every thread. Up to Python 3.13 code that uses `with` on a lock of the interpreter is safe. So a thread is left alone
for some ticks while its innermost code belongs to a module that takes locks in other ways (`DELICATE`), or is about to
enter a `with`. That makes it rare, but not impossible, because the thread may continue between the check and the
strike.

The interpreter lets one thread raise in another, but not at a chosen place. So nothing may be raised outside the piece:

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
import dis
import logging
import os
import sys
from threading import Event, Lock, Thread
from traceback import format_stack
from types import FrameType
from typing import Protocol

TICK_S = 0.1
"""The interval of the watchdog while something runs. A bound is accurate to two ticks."""

DELICATE = frozenset({"coverage", "logging", "threading"})
"""Packages whose Python code takes locks outside of a `with`, or implements them."""

MOST_DELICATE_TICKS = 20
"""How many ticks such code is left alone after its bound. A log handler may be what blocks."""

logger = logging.getLogger("holdfast.watchdog")


class Overdue(KeyboardInterrupt):
    """Raised in a program that blocks. asyncio lets it pass through any task, like every interrupt."""


class Watched(Protocol):
    """A running piece of a program: how many ticks it has run and may run, and where it was when it was struck."""

    run_id: str
    workflow: str
    ticks: int
    most_ticks: int
    where: str


class Watchdog:
    """The thread that watches, and what it watches: at most one piece of a program per thread."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        self.tick_s = tick_s
        self.forget()

    def forget(self) -> None:
        """Reset: a forked process has neither the thread nor the holder of the lock."""
        self.watched: dict[int, Watched] = {}
        self.is_asleep = True
        self.lock = Lock()
        self.bell = Event()
        self.thread: Thread | None = None

    def start(self) -> None:
        """Start the thread. From then on its bell wakes it up."""
        with self.lock:
            if self.thread is None:
                self.thread = Thread(target=self._run, name="holdfast-watchdog", daemon=True)
                self.thread.start()

    def strike(self, thread_id: int) -> None:
        """Raise `Overdue` in a thread, replacing one that is pending there."""
        _set_async_exc(thread_id, _OVERDUE)

    def _run(self) -> None:
        self.is_asleep = False
        while True:
            if not self.watched:
                self._sleep()
            if self.bell.wait(self.tick_s):
                self.bell.clear()  # a watch believed it asleep when it no longer was: this is no tick
            else:
                self._tick()

    def _sleep(self) -> None:
        self.is_asleep = True
        if not self.watched:  # read after the line above; a watch does it in the opposite order
            self.bell.wait()
        self.is_asleep = False
        self.bell.clear()

    def _tick(self) -> None:
        struck: list[tuple[Watched, str]] = []
        with self.lock:
            for thread_id, watch in list(self.watched.items()):
                watch.ticks += 1
                if watch.ticks <= watch.most_ticks or _is_delicate(thread_id, watch):
                    continue
                where, stack = (watch.where, "") if watch.where else _locate(thread_id)  # reads files: check again
                if self.watched.get(thread_id) is watch and not _is_delicate(thread_id, watch):
                    if not watch.where:
                        watch.where = where
                        struck.append((watch, stack))
                    self.strike(thread_id)
        for watch, stack in struck:  # only now: the struck thread may block the log
            logger.error("run %s: %s blocks its node%s\n%s", watch.run_id, watch.workflow, watch.where, stack)


def _is_delicate(thread_id: int, watch: Watched) -> bool:
    """Return whether to delay the strike because of the code that the thread is executing."""
    if watch.ticks > watch.most_ticks + MOST_DELICATE_TICKS:
        return False
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return False
    return str(frame.f_globals.get("__name__")).partition(".")[0] in DELICATE or _is_entering(frame)


def _is_entering(frame: FrameType) -> bool:
    """Return whether a strike would be raised right after a `with` has called `__enter__`, leaving a lock locked.

    From Python 3.14 on the call is a separate instruction. A strike is raised at the next call or backward jump.
    """
    if not _CALLS_ENTER:
        return False
    code = list(dis.get_instructions(frame.f_code))
    at = next((number for number, each in enumerate(code) if each.offset == frame.f_lasti), 0)
    if _enters(code, at):
        return True
    if code[at].opname.startswith("JUMP_BACKWARD"):
        at = next(number for number, each in enumerate(code) if each.offset >= code[at].argval) - 1
    following = range(at + 1, len(code))
    interrupted = (number for number in following if code[number].opname.startswith(("CALL", "JUMP_BACKWARD")))
    return _enters(code, next(interrupted, 0))


def _enters(code: list[dis.Instruction], at: int) -> bool:
    return at > 0 and code[at].opname == "CALL" and code[at - 1].opname == "LOAD_SPECIAL"


def _locate(thread_id: int) -> tuple[str, str]:
    """Return where a thread is, and its stack, for a log message."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    if frame is None:
        return " in a thread that has ended", ""
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}", "".join(format_stack(frame))


_set_async_exc = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)
_OVERDUE = ctypes.py_object(Overdue)
_CALLS_ENTER = "LOAD_SPECIAL" in dis.opmap

WATCHDOG = Watchdog()
"""The watchdog of this process."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WATCHDOG.forget)
