"""Processes that begin a new store and are killed while they do: at the opening, the migration, the first run.

Run as a program it forks one process for each file, kills it after a random time, and prints what each had said. How
long a whole life takes on this machine is found out by letting the first one end in peace.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import new_run

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
SILENT, CLOSED = b"", b"cx"


def kill_openers(folder: Path, seed: int, count: int) -> list[bytes]:
    """Let `count` new stores be begun in the folder, as `0.db`, `1.db` and so on; return what each opener said."""
    command = [sys.executable, "-m", "tests.crash.openers", str(folder), str(seed), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [word.encode() for word in done.stdout.split("\n")[:count]]


def main(folder: Path, seed: int, count: int) -> None:
    """Kill openers, and print what they said."""
    chance = random.Random(seed)
    began = time.monotonic()
    print(_life(folder / "0.db", PATIENCE_S).decode())
    whole_life_s = time.monotonic() - began
    for number in range(1, count):
        print(_life(folder / f"{number}.db", chance.uniform(0, 1.2 * whole_life_s)).decode())


def _life(path: Path, longest_s: float) -> bytes:
    """Let one opener live for so long, or until it is done; return what it said."""
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        _begin(path, far)
    os.close(far)
    dies_at = time.monotonic() + longest_s
    said = b""
    while said != CLOSED and select.select([near], [], [], max(dies_at - time.monotonic(), 0))[0]:
        said += os.read(near, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    said += os.read(near, 10)
    os.close(near)
    return said


def _begin(path: Path, pipe: int) -> None:
    """Begin a store, say so, close it, say so, and wait for the end."""
    try:
        asyncio.run(_create(path, pipe))
        signal.pause()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        os._exit(1)


async def _create(path: Path, pipe: int) -> None:
    store = await SqliteStore.open(path)
    await store.migrate()
    await store.create([new_run("run-1")])
    os.write(pipe, b"c")
    await store.close()
    os.write(pipe, b"x")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
