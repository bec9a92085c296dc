"""The work that every engine is given, and how it is timed: one program for all, in the environment of each.

Only the standard library is imported, because each engine is installed apart from the others. An engine says how it
starts a run, asks for its result and sends it a signal (`Engine`); everything else is the same for all of them. The
program reads commands from its standard input and writes answers to its standard output, a line of JSON each.

Workflows: `steps` takes so many steps one after the other, which do nothing. `parked` takes a step, waits for a signal
and returns its value. `held` takes three steps that are noted in a file; where PEERS_HOLD is set, the second never
ends.
"""

import asyncio
import json
import os
import statistics
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ALONE, STARTER, WORKER = "alone", "starter", "worker"
"""Roles of a process: it starts and executes runs, it only starts them, it only executes them."""

LOOK_S = 0.02
LEASE_S = 5
"""How long an engine may wait until it takes a lost worker for lost, wherever it can be told."""

SETTLE_S = 0.5
"""Between the step before a wait and the wait that counts as durable."""


class Engine(ABC):
    """What one engine has to say about itself."""

    at_once = 200
    """How many runs are under way at once; what was found to be best for this engine."""

    @abstractmethod
    async def open(self, address: str, role: str) -> None:
        """Connect to the store or server, and execute runs if that is the role."""

    @abstractmethod
    async def close(self) -> None:
        """End what was opened."""

    @abstractmethod
    async def start(self, workflow: str, run_id: str, argument: int) -> Any:
        """Start a run durably, and return a handle to it."""

    @abstractmethod
    def handle(self, run_id: str) -> Any:
        """Return the handle of a run that another process has started."""

    @abstractmethod
    async def result(self, handle: Any) -> int:
        """Wait for the end of a run."""

    @abstractmethod
    async def signal(self, handle: Any, value: int) -> None:
        """Send the value to a run that is parked, durably."""


# --- what steps do


def note(text: str) -> None:
    """Write down that a step was carried out; a line in the file that the environment names."""
    file = os.open(os.environ["PEERS_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{text}\n".encode())
    os.close(file)


async def held_step(number: int, run_id: str) -> int:
    """Note the step; in the first life of a recovery, never end the second one."""
    note(f"{number} {run_id}")
    if number == 2 and "PEERS_HOLD" in os.environ:
        await asyncio.Event().wait()
    return number


def ledger() -> list[str]:
    """Return the lines that steps have written."""
    path = Path(os.environ["PEERS_LEDGER"])
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


async def _noted(count: int, prefix: str) -> None:
    while sum(line.startswith(prefix) for line in ledger()) < count:  # noqa: ASYNC110 - steps of other processes write it
        await asyncio.sleep(LOOK_S)


# --- loads


def _new_id(workflow: str) -> str:
    return f"{workflow}-{uuid.uuid4().hex}"


async def runs(engine: Engine, warm_s: float, seconds: float, steps: int) -> dict[str, Any]:
    """Keep many runs under way; count those that end while the clock runs."""
    finished, is_over = 0, False

    async def one_after_the_other() -> None:
        nonlocal finished
        while not is_over:
            handle = await engine.start("steps", _new_id("steps"), steps)
            assert await engine.result(handle) == steps
            finished += 1

    loops = [asyncio.create_task(one_after_the_other()) for _ in range(engine.at_once)]
    await asyncio.sleep(warm_s)
    before, began = finished, time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (finished - before) / (time.perf_counter() - began)
    is_over = True
    await asyncio.gather(*loops)
    return {"runs_s": rate, "finished": finished}


async def step_ms(engine: Engine, seconds: float, steps: int) -> dict[str, Any]:
    """Take one run at a time to its end."""
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while not taken or time.perf_counter() < until:
        began = time.perf_counter()
        handle = await engine.start("steps", _new_id("steps"), steps)
        assert await engine.result(handle) == steps
        taken.append((time.perf_counter() - began) * 1e3 / steps)
    return {"ms": statistics.median(taken), "of": len(taken)}


_parked: list[Any] = []


async def park(engine: Engine, count: int) -> dict[str, Any]:
    """Start runs that wait for a signal, and return once all of them wait."""
    before = sum(line.startswith("arrived") for line in ledger())
    handles: list[Any] = []
    for first in range(0, count, engine.at_once):
        batch = range(first, min(count, first + engine.at_once))
        handles += await asyncio.gather(*(engine.start("parked", _new_id("parked"), 0) for _ in batch))
    await _noted(before + count, "arrived")
    await asyncio.sleep(SETTLE_S)
    _parked.extend(handles)
    return {"parked": len(_parked)}


async def signal_ms(engine: Engine, count: int, seconds: float) -> dict[str, Any]:
    """Signal parked runs one at a time; from the send to the result."""
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while _parked and len(taken) < count and (len(taken) < 5 or time.perf_counter() < until):
        handle = _parked.pop()
        began = time.perf_counter()
        await engine.signal(handle, 7)
        assert await engine.result(handle) == 7
        taken.append((time.perf_counter() - began) * 1e3)
    return {"ms": taken}


async def signals(engine: Engine) -> dict[str, Any]:
    """Signal all parked runs at once; until the last result."""
    waiting, count = list(_parked), len(_parked)
    _parked.clear()

    async def one_after_the_other() -> None:
        while waiting:
            handle = waiting.pop()
            await engine.signal(handle, 7)
            assert await engine.result(handle) == 7

    began = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(min(engine.at_once, count))))
    return {"signals_s": count / (time.perf_counter() - began), "of": count}


async def hold(engine: Engine, count: int) -> dict[str, Any]:
    """Start runs, and return once each of them is in the middle of its second step."""
    run_ids = [_new_id("held") for _ in range(count)]
    await asyncio.gather(*(engine.start("held", run_id, 0) for run_id in run_ids))
    await _noted(count, "2 ")
    return {"run_ids": run_ids}


async def finish(engine: Engine, run_ids: list[str]) -> dict[str, Any]:
    """Wait for the end of runs that another process has started."""
    results = await asyncio.gather(*(engine.result(engine.handle(run_id)) for run_id in run_ids))
    return {"finished": sum(result == 3 for result in results)}


COMMANDS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "runs": runs,
    "step_ms": step_ms,
    "park": park,
    "signal_ms": signal_ms,
    "signals": signals,
    "hold": hold,
    "finish": finish,
}


# --- the program


def main(engine: Engine) -> None:
    """Serve commands until the input ends: `python -m bench.peers.engines.NAME ADDRESS ROLE`."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    asyncio.run(_serve(engine, *sys.argv[1:3], answers=answers))


async def _serve(engine: Engine, address: str, role: str, *, answers: Any) -> None:
    requests = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    await engine.open(address, role)
    try:
        answers.write(json.dumps({"ready": True}) + "\n")
        while line := await requests.readline():
            request = json.loads(line)
            answers.write(json.dumps(await COMMANDS[request.pop("do")](engine, **request)) + "\n")
    finally:
        await engine.close()
