"""What belongs to the whole process and has to be after a test as it was before: tracers, the collector, handlers.

A test that leaves a profiler on, the garbage collector off or a handler of a signal behind spoils some other test, and
only in some orders. So the state is compared around every test, its fixtures included.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


def _is_of_hypothesis(callback: object) -> bool:
    return str(getattr(callback, "__module__", "")).startswith("hypothesis")


def read() -> dict[str, Any]:
    """Return the state of the process, by the name of each part; not what is frozen, which is counted one by one."""
    return {
        "sys.getprofile()": sys.getprofile(),
        "sys.gettrace()": sys.gettrace(),
        "threading.getprofile()": threading.getprofile(),
        "threading.gettrace()": threading.gettrace(),
        "sys.getswitchinterval()": round(sys.getswitchinterval(), 9),
        "sys.getrecursionlimit()": sys.getrecursionlimit(),
        "sys.get_asyncgen_hooks()": tuple(sys.get_asyncgen_hooks()),
        "sys.excepthook": sys.excepthook,
        "gc.isenabled()": gc.isenabled(),
        "gc.get_threshold()": gc.get_threshold(),
        # Hypothesis adds one of its own when it is first used, and keeps it.
        "gc.callbacks": [repr(each) for each in gc.callbacks if not _is_of_hypothesis(each)],
        "tracemalloc.is_tracing()": tracemalloc.is_tracing(),
        "logging.root.manager.disable": logging.root.manager.disable,
        "logging.root.level": logging.root.level,
    } | {f"signal.getsignal({number.name})": signal.getsignal(number) for number in SIGNALS}


def changes(before: dict[str, Any]) -> list[str]:
    """Return what is not as it was."""
    now = read()
    return [f"{name} was {was!r} and is {now[name]!r}" for name, was in before.items() if now[name] != was]


@contextmanager
def no_collections() -> Iterator[None]:
    """Turn the garbage collector off: what it takes depends on the objects of all tests."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return how long it takes at best, in time of this thread: what others do on the machine does not count."""
    best = 1e9
    with no_collections():
        for _ in range(3):
            before = time.thread_time()
            work()
            best = min(best, time.thread_time() - before)
            if best > 1.0:
                break
    return best


@contextmanager
def traced_memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Trace what is allocated from now on. Yields what returns the bytes in use, and the most that were."""
    gc.collect()
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()
