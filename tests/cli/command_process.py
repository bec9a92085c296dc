"""The command as a user runs it: another process, in a folder of its own. Nothing here waits for time to pass."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import holdfast

SOURCES = str(Path(holdfast.__file__).parents[1])
MOST_SECONDS = 60.0
"""A process that takes longer hangs."""


def command(*arguments: str) -> list[str]:
    """Return the command line."""
    return [sys.executable, "-W", "error", "-m", "holdfast", *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process: this one's, without settings that a developer may have."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**mine, "PYTHONPATH": SOURCES, **more}


def run(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )


class Call:
    """An activity that waits, in another process, for an answer from here."""

    def __init__(self, what: str, writer: asyncio.StreamWriter) -> None:
        self.what = what
        self._writer = writer

    def answer(self, text: str) -> None:
        """Let the activity return."""
        self._writer.write(f"{text}\n".encode())


class ActivityServer:
    """Where activities of other processes call, and are answered by the test."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[Call] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def call(self) -> Call:
        """Wait for the next activity that begins."""
        async with asyncio.timeout(MOST_SECONDS):
            return await self._calls.get()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._calls.put_nowait(Call((await reader.readline()).decode().strip(), writer))

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator[ActivityServer]:
        """Listen for activities."""
        activities = cls()
        server = await asyncio.start_server(activities._take, "127.0.0.1", 0)
        activities.port = server.sockets[0].getsockname()[1]
        try:
            yield activities
        finally:
            server.close()
            for writer in activities._writers:
                writer.close()


class Running:
    """A command that is running."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.said = ""

    async def until(self, text: str) -> None:
        """Wait until it has said this on stderr."""
        assert self._process.stderr is not None
        async with asyncio.timeout(MOST_SECONDS):
            while text not in self.said:
                line = await self._process.stderr.readline()
                assert line, f"it ended without saying {text!r}:\n{self.said}"
                self.said += line.decode()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal of the operating system."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end, and return the exit code."""
        assert self._process.stderr is not None
        async with asyncio.timeout(MOST_SECONDS):
            self.said += (await self._process.stderr.read()).decode()
            return await self._process.wait()


@asynccontextmanager
async def running(folder: Path, *arguments: str, **more: str) -> AsyncIterator[Running]:
    """Run the command while the context is open."""
    process = await asyncio.create_subprocess_exec(
        *command(*arguments), cwd=folder, env=environment(**more), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
