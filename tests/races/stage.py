"""A stage: processes and threads that play on one file, and begin at the same moment.

The stage is a process of its own. It has one thread while it forks, so forking is safe and cheap, and the test's
process is left as it was. Every player has its own thread, event loop and store.
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
class Seat:
    """A player's place: its number among all players, and where it waits for the others."""

    number: int
    process: int
    count: int
    barrier: Barrier

    def meet(self) -> None:
        """Wait until every player is here."""
        self.barrier.wait(PATIENCE_S)


Player = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Play:
    """What is played: a player's function by name, and how many play it."""

    module: str
    function: str
    processes: int
    threads: int
    arguments: dict[str, Any]


def play(player: Player, *, processes: int, threads: int = 1, **arguments: Any) -> list[Any]:
    """Let `player(seat, **arguments)` run in so many processes and threads; return their answers by seat number."""
    script = pickle.dumps(Play(player.__module__, player.__name__, processes, threads, arguments))
    command = [sys.executable, "-m", "tests.races.stage"]
    stage = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        answer, _ = stage.communicate(script, timeout=PATIENCE_S)
    finally:
        if stage.poll() is None:
            os.killpg(stage.pid, signal.SIGKILL)
            stage.communicate()
    assert stage.returncode == 0, f"the stage broke down: {stage.returncode}"
    failures, answers = pickle.loads(answer)
    assert not failures, "\n".join(failures)
    return list(answers)


# --- within the stage's process


def main() -> None:
    """Read a play from stdin, let it be played, and write the failures and the answers to stdout."""
    script: Play = pickle.load(sys.stdin.buffer)
    barrier = _fork.Barrier(script.processes * script.threads)
    troupes = []
    for number in range(script.processes):
        near, far = _fork.Pipe(duplex=False)
        process = _fork.Process(target=_troupe, args=(script, number, barrier, far))
        process.start()
        far.close()
        troupes.append((process, near))
    failures: list[str] = []
    answers: list[Any] = []
    for process, near in troupes:
        try:
            failed, answered = near.recv()
        except EOFError:
            failed, answered = [f"a process ended by itself: {process.exitcode}"], []
        failures += failed
        answers += answered
        process.join()
    sys.stdout.buffer.write(pickle.dumps((failures, answers)))


def _troupe(script: Play, number: int, barrier: Barrier, answer_to: Connection) -> None:
    """Play in one process, with a thread for each player."""
    player: Player = getattr(import_module(script.module), script.function)
    failures: list[str] = []
    answers: list[Any] = [None] * script.threads

    def perform(thread: int) -> None:
        seat = Seat(number * script.threads + thread, number, script.processes * script.threads, barrier)
        try:
            answers[thread] = asyncio.run(_call(player, seat, script.arguments))
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


async def _call(player: Player, seat: Seat, arguments: dict[str, Any]) -> Any:
    return await player(seat, **arguments)


if __name__ == "__main__":
    from tests.races import stage

    stage.main()  # not this module's own: what it pickles must be found under its real name
