"""Plans of many steps: what a turn costs at the beginning and at the end, and how much memory they take."""

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import holdfast as hf
from bench.effort import Effort
from bench.report import Rows, progress

PARTS = 10


def chain(count: int) -> list[dict[str, Any]]:
    """Return steps of which each waits for the one before it."""
    first = {"id": "s0", "activity": "act", "input": {"v": 0}}
    rest = [{"id": f"s{n}", "activity": "act", "input": {"v": f"${{steps.s{n - 1}.output}}"}} for n in range(1, count)]
    return [first, *rest]


def fan_out(count: int) -> list[dict[str, Any]]:
    """Return steps that all wait for the first, and one that waits for all of them."""
    first = {"id": "s0", "activity": "act", "input": {"v": 0}}
    wide = [{"id": f"s{n}", "activity": "act", "input": {"v": n}, "depends_on": ["s0"]} for n in range(1, count - 1)]
    last = {"id": "last", "activity": "act", "input": {"v": 1}, "depends_on": [step["id"] for step in wide]}
    return [first, *wide, last]


def layered(count: int) -> list[dict[str, Any]]:
    """Return layers of steps: each waits for two of the layer before it."""
    width = round(count**0.5)
    steps: list[dict[str, Any]] = []
    for n in range(width * width):
        layer, place = divmod(n, width)
        before = [] if layer == 0 else [f"s{(layer - 1) * width + (place + k) % width}" for k in (0, 1)]
        steps.append({"id": f"s{n}", "activity": "act", "input": {"v": n}, "depends_on": before})
    return steps


SHAPES: dict[str, Callable[[int], list[dict[str, Any]]]] = {"chain": chain, "fan-out": fan_out, "layered": layered}


class Played(NamedTuple):
    """What a plan has cost: ms a step, the CPU's ms a step in each part of the run, and the memory at its highest."""

    ms: float
    cpu_ms: list[float]
    grown_mb: float


async def play(steps: list[dict[str, Any]], store: str, parts: int = PARTS) -> Played:
    """Run a plan, and measure. The CPU's time does not depend on what else the machine does."""
    app = hf.App("bench")
    done: list[float] = []
    sizes = [resident_mb()]

    @app.activity
    async def act(v: int) -> int:
        done.append(time.process_time())
        if len(done) % 100 == 0:
            sizes.append(resident_mb())
        return v

    output = {"output": f"${{steps.{steps[-1]['id']}.output}}"}
    document = json.dumps({"plan": "bench", "version": "1", "steps": steps, **output}).encode()
    async with app.node(store, options=hf.NodeOptions(activities_at_once=100)):
        run = await app.plans.start(document)
        began, cpu_began = time.perf_counter(), time.process_time()
        await run.result()
        ms = 1_000 * (time.perf_counter() - began) / len(steps)
    assert len(done) == len(steps)
    size = len(done) // parts
    marks = [min(cpu_began, done[0]), *(done[min((part + 1) * size, len(done)) - 1] for part in range(parts))]
    cpu_ms = [1_000 * (later - sooner) / size for sooner, later in pairwise(marks)]
    return Played(ms, cpu_ms, max(sizes) - sizes[0])


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure each shape. Where the tenths of a run cost the same, a step costs the same however many there are."""
    rows: Rows = {}
    for name, make in SHAPES.items():
        count = effort.plan_steps
        progress(f"plans: {name} of {count:,} steps")
        played = await play(make(count), f"sqlite:///{folder}/{name}.db")
        rows[f"{name}, {count:,} steps"] = {
            "ms/step": played.ms,
            "first tenth, CPU": played.cpu_ms[0],
            "last tenth, CPU": played.cpu_ms[-1],
            "CPU ms/step by tenths": [round(part, 2) for part in played.cpu_ms],
            "MB": played.grown_mb,
        }
    return rows


def resident_mb() -> float:
    """Return how much memory the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096 / 1e6
