"""Processes and threads that contend for one store, and begin at the same moment.

They are started by a process of its own. It has one thread while it forks, so forking is safe and cheap, and the test's
process is left as it was. Every contender has its own thread, event loop and store.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90
"""How long a play may last before it is called off: far longer than any play on a busy machine."""

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Contender:
    """One of those who contend: its number among all, and where it waits for the others."""

    number: int
    process: int
    count: int
    barrier: Barrier

    def meet(self) -> None:
        """Wait until every contender is here."""
        self.barrier.wait(PATIENCE_S)


Part = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Race:
    """What is run: a function by name, and how many run it."""

    module: str
    function: str
    processes: int
    threads: int
    arguments: dict[str, Any]


def run_in_parallel(part: Part, *, processes: int, threads: int = 1, **arguments: Any) -> list[Any]:
    """Let `part(contender, **arguments)` run in so many processes and threads; return their answers in order."""
    script = pickle.dumps(Race(part.__module__, part.__name__, processes, threads, arguments))
    command = [sys.executable, "-m", "tests.races.parallel"]
    parallel = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        answer, _ = parallel.communicate(script, timeout=PATIENCE_S)
    finally:
        if parallel.poll() is None:
            os.killpg(parallel.pid, signal.SIGKILL)
            parallel.communicate()
    assert parallel.returncode == 0, f"the process broke down: {parallel.returncode}"
    failures, answers = pickle.loads(answer)
    assert not failures, "\n".join(failures)
    return list(answers)


# --- within that process


def main() -> None:
    """Read a play from stdin, let it be played, and write the failures and the answers to stdout."""
    script: Race = pickle.load(sys.stdin.buffer)
    barrier = _fork.Barrier(script.processes * script.threads)
    processes = []
    for number in range(script.processes):
        near, far = _fork.Pipe(duplex=False)
        process = _fork.Process(target=_contend, args=(script, number, barrier, far))
        process.start()
        far.close()
        processes.append((process, near))
    failures: list[str] = []
    answers: list[Any] = []
    for process, near in processes:
        try:
            failed, answered = near.recv()
        except EOFError:
            failed, answered = [f"a process ended by itself: {process.exitcode}"], []
        failures += failed
        answers += answered
        process.join()
    sys.stdout.buffer.write(pickle.dumps((failures, answers)))


def _contend(script: Race, number: int, barrier: Barrier, answer_to: Connection) -> None:
    """Contend in one process, with a thread for each contender."""
    part: Part = getattr(import_module(script.module), script.function)
    failures: list[str] = []
    answers: list[Any] = [None] * script.threads

    def perform(thread: int) -> None:
        contender = Contender(number * script.threads + thread, number, script.processes * script.threads, barrier)
        try:
            answers[thread] = asyncio.run(_call(part, contender, script.arguments))
        except threading.BrokenBarrierError:
            failures.append("called off")
        except BaseException:
            failures.append(traceback.format_exc())
            barrier.abort()
            raise

    threads = [threading.Thread(target=perform, args=(thread,)) for thread in range(script.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answer_to.send((failures, answers))


async def _call(part: Part, contender: Contender, arguments: dict[str, Any]) -> Any:
    return await part(contender, **arguments)


if __name__ == "__main__":
    from tests.races import parallel

    parallel.main()  # not this module's own: what it pickles must be found under its real name
