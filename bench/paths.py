"""What each special path is worth: runs of three steps with it switched off, beside the same with all of them on.

A path exists for speed alone. What buys less than a tenth in runs/s is not worth its code. Rounds are interleaved, so
that a machine which is busy for a while disturbs all of them.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.effort import Effort
from bench.engine import _timed_runs, elsewhere
from bench.report import Row, Rows, progress
from holdfast.engine.activities.task_pool import TaskPool
from holdfast.engine.start.starter import FirstTurns
from holdfast.store.sqlite.commit import ShortCut

ALL = "all paths on"


def _in_a_task_of_its_own(self: TaskPool[Any], work: Any) -> None:
    async def carry_out() -> None:
        if not work.is_given_up:
            work.task = asyncio.current_task()
            await self._carry_out(work)

    task = asyncio.get_running_loop().create_task(carry_out(), context=self._context.copy(), name=work.name)
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)


OFF: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "without first turns before creation": (FirstTurns, "take", lambda self, new, now: None),
    "without the pool of tasks": (TaskPool, "add", _in_a_task_of_its_own),
    "without the short cut of SQLite": (ShortCut, "numbers_of", lambda self, db, turns: None),
}


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure with each path off, and with all on."""
    count = effort.engine_runs[0]
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in (ALL, *OFF)}
    for number in range(effort.engine_rounds):
        progress(f"special paths: round {number + 1}")
        for name, figures in took.items():
            figures.append(elsewhere(_timed, folder, count, name))
    return {name: _row(count, figures, took[ALL]) for name, figures in took.items()}


async def _timed(folder: Path, count: int, name: str) -> tuple[float, float]:
    with ExitStack() as stack:
        if name in OFF:
            owner, entry, instead = OFF[name]
            stack.enter_context(patch.object(owner, entry, instead))
        began_s = time.process_time()
        return await _timed_runs(folder, count), time.process_time() - began_s


def _row(count: int, figures: list[tuple[float, float]], beside: list[tuple[float, float]]) -> Row:
    pairs = list(zip(figures, beside, strict=True))
    return {
        "runs/s": statistics.median(count / seconds for seconds, _ in figures),
        "of all": statistics.median(other[0] / own[0] for own, other in pairs),
        "CPU of all": statistics.median(own[1] / other[1] for own, other in pairs),
    }
