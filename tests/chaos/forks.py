"""Node processes that begin at once: each is forked from a process that has imported everything, and opened nothing.

A node that is started as a program spends a second of computing on imports. Where one is killed in every second, that
would be all that the machine does. This file is also the program that forks.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOOK_S = 0.02


class Fork:
    """A process, as its grandparent knows it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._over = asyncio.Event()

    def ended(self, code: int) -> None:
        """Note that it has ended."""
        self.returncode = code
        self._over.set()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        """Wait until it has ended, and return its exit code."""
        await self._over.wait()
        assert self.returncode is not None
        return self.returncode


class Forks:
    """The process that forks, and what it says of its children."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._born: asyncio.Queue[Fork] = asyncio.Queue()
        self._alive: dict[int, Fork] = {}
        self._listening: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()

    async def open(self, environment: dict[str, str]) -> None:
        """Start it."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.forks"), cwd=ROOT, env=environment, stdin=PIPE, stdout=PIPE
        )
        self._listening = asyncio.create_task(self._listen())

    async def fork(self, arguments: list[str], log: Path) -> Fork:
        """Fork a process that carries out a command line, and logs there."""
        assert self._process is not None
        assert self._process.stdin is not None
        async with self._asking:
            self._process.stdin.write(json.dumps([arguments, str(log)]).encode() + b"\n")
            return await self._born.get()

    async def close(self) -> None:
        """End it. Its children have ended."""
        if self._process is None or self._listening is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._listening

    async def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            pid, code = json.loads(line)
            if code is None:
                fork = self._alive[pid] = Fork(pid)
                self._born.put_nowait(fork)
            else:
                self._alive.pop(pid).ended(code)


# --- the process that forks


def main() -> None:
    """Fork what standard input asks for, and report who was born and who has ended."""
    from holdfast.cli.main import main as command
    from tests.chaos import programs  # noqa: F401 - so that no child imports it

    buffered = b""
    while True:
        while (ended := _ended()) is not None:
            _say(*ended)
        if not select.select([0], [], [], LOOK_S)[0]:
            continue
        read = os.read(0, 65_536)
        if not read:
            return
        *lines, buffered = (buffered + read).split(b"\n")
        for line in lines:
            arguments, log = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _become(log)
                os._exit(command(arguments))
            _say(pid, None)


def _ended() -> tuple[int, int] | None:
    with suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            return pid, os.waitstatus_to_exitcode(status)
    return None


def _say(pid: int, code: int | None) -> None:
    os.write(1, json.dumps([pid, code]).encode() + b"\n")


def _become(log: str) -> None:
    """Be a process of its own, with nothing of its parent but what was imported."""
    os.setsid()
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.dup2(opened, 2)


if __name__ == "__main__":
    main()
