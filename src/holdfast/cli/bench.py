"""`holdfast bench`: measures this machine and this disk in a few seconds, without touching a store."""

import asyncio
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators
from rich.console import Console
from rich.progress import Progress

from holdfast.app import App
from holdfast.cli.app_loader import settings_at
from holdfast.cli.exit_codes import OK
from holdfast.cli.output import show_fields, show_json
from holdfast.cli.stores import file_of
from holdfast.errors import StoreUnavailable

SYNCS = 50
AT_ONCE = 200
STEPS = 3


def bench(
    *,
    store: Annotated[str | None, Parameter(show_default=False)] = None,
    seconds: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=60))] = 2.0,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Measure this machine: how long the disk takes to say "written", and how many runs of 3 steps it does.

    A store of its own is made for that, in the folder where yours is, and deleted again.

    Parameters
    ----------
    store: str
        The address of the store, such as sqlite:///orders.db; otherwise HOLDFAST_STORE, then sqlite:///holdfast.db.
    seconds: float
        How long to measure.
    as_json: bool
        Answer with JSON.
    """
    folder = file_of(settings_at(store), "use pgbench").resolve().parent
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="holdfast-bench-") as place:
            measured = asyncio.run(_measure(Path(place), seconds))
    except OSError as problem:
        raise StoreUnavailable(f"{folder}: nothing can be written here: {problem}", path=str(folder)) from problem
    answer = {"folder": str(folder), **measured}
    if as_json:
        show_json(answer)
    else:
        show_fields(answer)
    return OK


async def _measure(place: Path, seconds: float) -> dict[str, Any]:
    clock = asyncio.get_running_loop().time
    fsync_ms = _fsync_ms(place, clock)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=seconds)
        runs, took_s, latencies = await _runs(place, seconds, lambda done_s: bar.update(task, completed=done_s))
    return {
        "fsync_ms": round(fsync_ms, 3),
        "runs": runs,
        "runs_per_s": round(runs / took_s, 1),
        "steps_per_s": round(runs * STEPS / took_s, 1),
        "run_ms_median": round(statistics.median(latencies) * 1_000, 2),
    }


def _fsync_ms(place: Path, clock: Callable[[], float]) -> float:
    """Return the median time of an fsync of one page."""
    taken: list[float] = []
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        for _ in range(SYNCS):
            began = clock()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            taken.append(clock() - began)
    return statistics.median(taken) * 1_000


async def _runs(place: Path, seconds: float, report: Callable[[float], object]) -> tuple[int, float, list[float]]:
    """Start many runs concurrently for a time, and wait for them; return how many, in what time, and each one's."""
    app = App("bench")

    @app.activity
    async def step(number: int) -> int:
        return number + 1

    @app.workflow
    async def chain() -> int:
        number = 0
        for _ in range(STEPS):
            number = await step(number)
        return number

    clock = asyncio.get_running_loop().time
    latencies: list[float] = []

    async def one_after_another(until: float) -> None:
        while clock() < until:
            began = clock()
            await (await app.start(chain)).result()
            latencies.append(clock() - began)
            report(clock() - start)

    async with app.node(f"sqlite:///{place}/bench.db"):
        start = clock()
        await asyncio.gather(*(one_after_another(start + seconds) for _ in range(AT_ONCE)))
        took_s = clock() - start
    return len(latencies), took_s, latencies
