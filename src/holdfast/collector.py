"""Holds the garbage collector back for a moment.

Taking a batch of turns makes many objects that live on, and hardly any garbage that only the collector could free.
Left to itself it would look through everything that is alive, all live runs included, over and over in the middle of
the batch. So it rests until the batch is done, and looks once.
"""

import gc


class held_back:  # noqa: N801 - used like a function
    """Let the collector rest, if it is on; never across an `await`."""

    __slots__ = ("_was_on",)

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *problem: object) -> None:
        if self._was_on:
            gc.enable()
