"""Functions of the app that are called when a run fails or is paused: to page someone, or to write elsewhere.

The node that committed the failure or pause calls them once, after the commit. If that node is lost meanwhile they are
not called again, so anything that must not be missed belongs in a projection or a sink. If a hook raises, the exception
is logged and the run is not affected.
"""

import asyncio
import inspect
import logging
from collections.abc import Iterable

from holdfast.core import events as e
from holdfast.core.events import Event
from holdfast.registry import Registry, RunHook

logger = logging.getLogger("holdfast.hooks")


class RunHooks:
    """The hooks of an app, and their running calls."""

    def __init__(self, registry: Registry) -> None:
        self._on_failed, self._on_paused = registry.on_failed, registry.on_paused
        self._calls: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._on_failed or self._on_paused)

    def notice(self, events: Iterable[Event]) -> None:
        """Call the hooks for events that are now durable. They run concurrently with the node's work."""
        for event in events:
            if isinstance(event.data, e.RunFailed):
                self._call(self._on_failed, event.run_id, _words(event.data.error))
            elif isinstance(event.data, e.RunPaused):
                why = event.data.reason if event.data.error is None else _words(event.data.error)
                self._call(self._on_paused, event.run_id, why)

    def _call(self, hooks: Iterable[RunHook], run_id: str, why: str) -> None:
        for hook in hooks:
            task = asyncio.get_running_loop().create_task(_call(hook, run_id, why))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)


async def _call(hook: RunHook, run_id: str, why: str) -> None:
    try:
        answer = hook(run_id, why)
        if inspect.isawaitable(answer):
            await answer
    except Exception:  # an error in a hook is not an error of the run
        logger.exception("the hook %s failed for run %s", getattr(hook, "__qualname__", hook), run_id)


def _words(error: e.ErrorInfo) -> str:
    return f"{error}"
