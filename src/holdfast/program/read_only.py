"""Code that may only look: queries, and the handlers of signals.

It runs on a loop that begins nothing: no task, no timer, no step. Were it the run's, it would change the run; were it
the node's, an activity would be carried out for real.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from holdfast.errors import NotDurable, RunError
from holdfast.program.loop import DeterministicLoop, Timer, running


class _ReadOnlyLoop(DeterministicLoop):
    """Refuses whatever is to be begun on it."""

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
    """Let code run that may only look. What would end a task or the process is a mistake of the run's."""
    with running(_ReadOnlyLoop(f"{what} would change something, and may only look")):  # type: ignore[abstract]
        try:
            yield
        except (SystemExit, GeneratorExit, asyncio.CancelledError) as problem:
            raise RunError(f"{what} raised {problem!r}") from problem
