"""Lets the garbage collector of the process run less often while nodes work in it (`NodeOptions.tune_gc`).

A run consists of many objects that are all freed when it ends, and of hardly any garbage that only the collector could
free. By default the collector examines the active runs every few hundred new objects. With this option it waits until
there are `NEW_OBJECTS` more than at the last collection.

The thresholds apply to the whole process. So only the `holdfast` command changes them on its own; a program that embeds
a node has to enable it.
"""

import gc
from threading import Lock

NEW_OBJECTS = 100_000
"""A smaller number costs up to a tenth of the time. With a larger one, garbage stays longer if a program makes any."""


class _Thresholds:
    """How many nodes work in this process, and the thresholds before the first of them began."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.nodes = 0
        self.before = (0, 0, 0)
        self.during = (0, 0, 0)


_thresholds = _Thresholds()


class tuned_gc:  # noqa: N801 - used like a function
    """Raise the collector's first threshold, if the collector is on. Thresholds that others set meanwhile are kept."""

    __slots__ = ()

    def __enter__(self) -> None:
        with _thresholds.lock:
            _thresholds.nodes += 1
            if _thresholds.nodes == 1:
                _thresholds.before = young, middle, old = gc.get_threshold()
                _thresholds.during = (max(young, NEW_OBJECTS) if young else 0, middle, old)
                gc.set_threshold(*_thresholds.during)

    def __exit__(self, *problem: object) -> None:
        with _thresholds.lock:
            _thresholds.nodes -= 1
            if not _thresholds.nodes and gc.get_threshold() == _thresholds.during:
                gc.set_threshold(*_thresholds.before)
