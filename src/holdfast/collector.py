"""Lets the garbage collector work less often while nodes are at work.

Runs are made of many objects that all go when they end, and hardly any garbage that only the collector could free. Left
to itself it would look through the runs that are under way again and again, each time a few hundred objects are new.
So it waits until there are `NEW_OBJECTS` more than when it last looked.
"""

import gc
from threading import Lock

NEW_OBJECTS = 100_000
"""Fewer cost time, up to a tenth of it; more are garbage for longer, if somebody does leave garbage."""


class _Collector:
    """How many nodes are at work, and what the collector's thresholds were before."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.nodes = 0
        self.before = (0, 0, 0)
        self.during = (0, 0, 0)


_collector = _Collector()


class patient:  # noqa: N801 - used like a function
    """Make the collector wait for longer, if it is on. What somebody else has set meanwhile is left as it is."""

    __slots__ = ()

    def __enter__(self) -> None:
        with _collector.lock:
            _collector.nodes += 1
            if _collector.nodes == 1:
                _collector.before = young, middle, old = gc.get_threshold()
                _collector.during = (max(young, NEW_OBJECTS) if young else 0, middle, old)
                gc.set_threshold(*_collector.during)

    def __exit__(self, *problem: object) -> None:
        with _collector.lock:
            _collector.nodes -= 1
            if not _collector.nodes and gc.get_threshold() == _collector.during:
                gc.set_threshold(*_collector.before)
