"""Processes that begin a new store and are killed while they do: at the opening, the migration, the first run.

Run as a program it forks one process for each file, kills it after a random time, and prints the last word of each.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import new_run

ROOT = Path(__file__).parents[2]
LONGEST_LIFE_S = 0.02
SILENT, CREATED, CLOSED = b"", b"c", b"cx"


def kill_openers(folder: Path, seed: int, count: int) -> list[bytes]:
    """Let `count` new stores be begun in the folder, as `0.db`, `1.db` and so on; return what each opener said."""
    command = [sys.executable, "-m", "tests.crash.openers", str(folder), str(seed), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [word.encode() for word in done.stdout.split("\n")[:count]]


def main(folder: Path, seed: int, count: int) -> None:
    """Kill openers, and print what they said."""
    chance = random.Random(seed)
    for number in range(count):
        near, far = os.pipe()
        pid = os.fork()
        if pid == 0:
            _begin(folder / f"{number}.db", far)
        os.close(far)
        select.select([], [], [], chance.uniform(0, LONGEST_LIFE_S))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print(os.read(near, 10).decode())
        os.close(near)


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
