"""Read-only code: queries, conditions, and handlers of signals.

It runs on a loop that starts nothing: no task, no timer, no step. On the run's own loop it would change the run; on the
node's loop an activity would really be executed.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from holdfast.errors import NotDurable, RunError
from holdfast.program.loop import DeterministicLoop, Timer, running


class _ReadOnlyLoop(DeterministicLoop):
    """Refuses every task, timer and callback."""

    def __init__(self, what: str) -> None:
        super().__init__(None, 0, 0)  # type: ignore[arg-type]
        self._what = what

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Refuse."""
        raise NotDurable(self._what)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Timer:
        """Refuse."""
        raise NotDurable(self._what)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        """Refuse."""
        coro.close()
        raise NotDurable(self._what)


@contextmanager
def read_only(what: str) -> Iterator[None]:
    """Run code that is read-only. An exception that would end a task or the process becomes an error of the run."""
    with running(_ReadOnlyLoop(f"{what} would change something, and is read-only")):  # type: ignore[abstract]
        try:
            yield
        except (SystemExit, GeneratorExit, asyncio.CancelledError) as problem:
            raise RunError(f"{what} raised {problem!r}") from problem
