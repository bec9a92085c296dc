"""Processes of a contender: started, asked, killed, and what all of them together use."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A contender did not do what it was asked."""


class Program:
    """A program of `bench/peers/engines`, which is asked by lines of JSON."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                cwd=Path(__file__).parents[2],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._log = log
        self._buffer = b""

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Send a command, and return its answer."""
        self.send(do, **arguments)
        return self.answer(timeout_s)

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command whose answer is fetched later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Wait for a line, and return what it says."""
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise Failed(f"no answer within {timeout_s:g} s; see {self._log}")
                piece = os.read(self._process.stdout.fileno(), 2**16)
                if not piece:
                    raise Failed(f"the program has ended; see {self._log}: {self._log.read_text()[-2_000:]}")
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """Kill it with what it has started."""
        end(self._process)


def started(command: list[str], environment: dict[str, str], folder: Path, log: Path) -> "subprocess.Popen[bytes]":
    """Start a server in a folder."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            cwd=folder,
            start_new_session=True,
        )


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process with its group, and wait for its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


# --- what processes use


def _tree(roots: Iterable[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found, left = list[int](), list(roots)
    while left:
        pid = left.pop()
        found.append(pid)
        left += children.get(pid, ())
    return found


def cpu_s(roots: Iterable[int]) -> float:
    """Return the CPU time of processes and of all that they have started, also of those that have ended."""
    ticks = 0
    for pid in _tree(roots):
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:
            continue
    return ticks / TICKS


def memory_kb(roots: Iterable[int]) -> int:
    """Return the memory of processes and of all that they have started; what is shared counts once."""
    total = 0
    for pid in _tree(roots):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total


def stolen_s() -> tuple[float, float]:
    """Return the time that the machine's processors were stolen by others, and all their time, in seconds."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[7] / TICKS, sum(fields) / TICKS
