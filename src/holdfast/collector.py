"""Holds the garbage collector back for a while.

Taking a wave of turns makes many objects that are let go at its end, and hardly any garbage that only the collector
could free. Left to itself it would look through all of them in the middle of the wave, where there are most. So it
rests until the wave is over and they are gone; then it goes on as its thresholds say.
"""

import gc
from threading import Lock


class _Collector:
    """Whether anybody holds the collector back, and whether it was on before."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.holders = 0
        self.was_on = False


_collector = _Collector()


class held_back:  # noqa: N801 - used like a function
    """Let the collector rest, if it is on. Whoever does so across an `await` lets go when it takes long: `let_go`."""

    __slots__ = ()

    def __enter__(self) -> None:
        with _collector.lock:
            if not _collector.holders:
                _collector.was_on = gc.isenabled()
                gc.disable()
            _collector.holders += 1

    def __exit__(self, *problem: object) -> None:
        with _collector.lock:
            _collector.holders -= 1
            if not _collector.holders and _collector.was_on:
                gc.enable()


class let_go:  # noqa: N801 - used like a function
    """Let the collector work although it is held back: whoever holds it is waiting for something."""

    __slots__ = ()

    def __enter__(self) -> None:
        with _collector.lock:
            if _collector.holders and _collector.was_on:
                gc.enable()

    def __exit__(self, *problem: object) -> None:
        with _collector.lock:
            if _collector.holders:
                gc.disable()
