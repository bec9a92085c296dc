"""Flows beside code: runs of the same three steps, written in both ways.

Both pass the same state through the same activity. Rounds are interleaved, so that a machine which is busy for a while
disturbs both.
"""

import asyncio
import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast as hf
from bench.effort import Effort
from bench.engine import STARTS_AT_ONCE, WARM_RUNS, elsewhere
from bench.report import Row, Rows, progress
from bench.stores import as_the_command, opened

app = hf.App("flows")


@dataclass
class Order:
    """The state."""

    number: int = 0
    item: str = "book"
    steps: int = 0


@app.activity
async def step(order: Order) -> Order:
    """Count a step."""
    return Order(order.number, order.item, order.steps + 1)


@app.workflow
async def code(order: Order) -> Order:
    """Take three steps, as code."""
    order = await step(order)
    order = await step(order)
    return await step(order)


flow = app.flow("flow", Order, hf.Scene(*(hf.Act(step, step=f"step-{number}") for number in range(3))))
WAYS: dict[str, Any] = {"code": code, "flow": flow}


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure both ways in turns."""
    count = effort.engine_runs[0]
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for number in range(effort.engine_rounds):
        progress(f"flows: round {number + 1}")
        for name in list(WAYS) if number % 2 == 0 else reversed(list(WAYS)):
            took[name].append(elsewhere(_timed, folder, count, name))
    return {f"3 steps as {name}": _row(count, figures, took["code"]) for name, figures in took.items()}


async def _timed(folder: Path, count: int, name: str) -> tuple[float, float]:
    path = folder / "flows.db"
    for warm_up in (True, False):
        async with opened(path) as store, app.node(store, options=as_the_command()):
            gc.collect()
            cpu, began = time.process_time(), time.perf_counter()
            await _run_all(WAYS[name], min(count, WARM_RUNS) if warm_up else count)
            figures = time.perf_counter() - began, time.process_time() - cpu
        path.unlink()
    return figures


async def _run_all(workflow: Any, count: int) -> None:
    for first in range(0, count, STARTS_AT_ONCE):
        number = min(STARTS_AT_ONCE, count - first)
        runs = await asyncio.gather(*(app.start(workflow, Order(each)) for each in range(number)))
        results = await asyncio.gather(*(run.result() for run in runs))
        assert all(result.steps == 3 for result in results)


def _row(count: int, figures: list[tuple[float, float]], beside: list[tuple[float, float]]) -> Row:
    pairs = list(zip(figures, beside, strict=True))
    return {
        "runs/s": statistics.median(count / seconds for seconds, _ in figures),
        "of code": statistics.median(other[0] / own[0] for own, other in pairs),
        "CPU ms/run": statistics.median(1e3 * cpu / count for _, cpu in figures),
        "CPU of code": statistics.median(own[1] / other[1] for own, other in pairs),
    }
