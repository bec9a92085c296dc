"""A folder for servers that die with whoever uses it, however that ends.

Everybody who uses the folder holds a writing end of the pipe `holders` in it. A guardian, a process of its own, reads
from the pipe until nobody is left; then it kills the servers whose command lines name the folder, and removes it.
This file is also the guardian's program, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MOST_SECONDS = 60.0
"""What takes longer hangs."""

SERVERS = frozenset({"postgres", "initdb", "pg_ctl", "pg_basebackup", "nats-server", "redis-server", "weed"})
"""The programs that are ended with a folder; whoever else looks into it is left alone."""

MEMORY = "/dev/shm"
ROOM_BYTES = 2 * 1024**3

PIPE = "holders"
ELSEWHERE = "elsewhere"
"""The file that names what servers leave outside of the folder."""
IPC_RMID = 0


class ServerFolder:
    """A folder with a guardian, and a part in keeping it."""

    def __init__(self, path: Path, holding: int, ending: int) -> None:
        self.path = path
        self._holding = holding
        self._ending = ending

    @classmethod
    def make(cls, owner: int = -1, *, in_memory: bool = False) -> ServerFolder:
        """Make a folder on a disk, or in memory if there is room. It belongs to the user `owner`, or to oneself."""
        path = Path(tempfile.mkdtemp(prefix="holdfast-", dir=(memory_folder() if in_memory else None) or _real_disk()))
        os.mkfifo(path / PIPE)
        reading = os.open(path / PIPE, os.O_RDONLY | os.O_NONBLOCK)
        holding = os.open(path / PIPE, os.O_WRONLY | os.O_NONBLOCK)
        ending, guardians_end = os.pipe()
        os.set_blocking(reading, True)
        os.chown(path, owner, -1)
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, str(path)],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[guardians_end],
            check=True,
            timeout=MOST_SECONDS,
        )
        os.close(reading)
        os.close(guardians_end)
        return cls(path, holding, ending)

    @classmethod
    def join(cls, path: Path) -> ServerFolder | None:
        """Take part in keeping a folder, or return None if its guardian has given it up."""
        try:
            return cls(path, os.open(path / PIPE, os.O_WRONLY | os.O_NONBLOCK), -1)
        except OSError:
            return None

    def also_remove(self, paths: Iterable[str]) -> None:
        """Have files removed with the folder that a server makes elsewhere."""
        (self.path / ELSEWHERE).write_text("\n".join(paths))

    def leave(self) -> None:
        """Hold it no longer, and leave it to those who do."""
        os.close(self._holding)
        if self._ending >= 0:
            os.close(self._ending)

    def remove(self) -> None:
        """Hold it no longer, and wait until it is gone with all that ran in it. Only for who made it."""
        os.close(self._holding)
        gone, _, _ = select.select([self._ending], [], [], MOST_SECONDS)
        os.close(self._ending)
        assert gone, f"the guardian of {self.path} hangs, or somebody else holds the folder"


def processes_of(path: Path) -> set[int]:
    """Return the servers whose command lines name the path, and their children."""
    parents: dict[int, int] = {}
    named: set[int] = set()
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError, IndexError):
            pid = int(entry)
            after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if after_name[0] == "Z":
                continue
            parents[pid] = int(after_name[1])
            program, *arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            names_it = any(os.fsencode(path) in argument for argument in arguments)
            if names_it and os.path.basename(os.fsdecode(program)) in SERVERS:
                named.add(pid)
    return named | {pid for pid, parent in parents.items() if parent in named}


def signal_all(path: Path, number: signal.Signals) -> None:
    """Send a signal to every process of the path."""
    for pid in processes_of(path):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(path: Path) -> None:
    """Kill every process of the path at once, and wait until they are gone."""
    while True:
        signal_all(path, signal.SIGSTOP)  # nobody has children any more, or notices that another one has died
        doomed = processes_of(path)
        if not doomed:
            break
        watched = [watch for watch in map(_watch, doomed) if watch is not None]
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for watch in watched:
            gone, _, _ = select.select([watch], [], [], MOST_SECONDS)
            os.close(watch)
            assert gone, "a process survives SIGKILL"


def remove_shared_memory(path: Path) -> None:
    """Remove the System V segment that a PostgreSQL server, killed, has left behind: its lock file names it."""
    for lock in path.rglob("postmaster.pid"):
        lines = lock.read_text().splitlines()
        if len(lines) > 6 and lines[6].strip():
            ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), IPC_RMID, None)


def remove_elsewhere(path: Path) -> None:
    """Remove what the servers of the folder have left outside of it."""
    with suppress(FileNotFoundError):
        for name in (path / ELSEWHERE).read_text().splitlines():
            Path(name).unlink(missing_ok=True)


def can_be_reached(path: Path) -> bool:
    """Return whether every user of the machine may go through all the folders above the path."""
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.absolute().parents)


def _watch(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def memory_folder() -> str | None:
    """Return a folder in memory with room for tests, if the machine has one: there, to synchronise costs nothing."""
    with suppress(OSError):
        found = os.statvfs(MEMORY)
        if _is_in_memory(Path(MEMORY)) and found.f_bavail * found.f_frsize >= ROOM_BYTES and os.access(MEMORY, os.W_OK):
            return MEMORY
    return None


def _real_disk() -> str:
    """Return where temporary files are on a disk, so that to synchronise a file means something."""
    for place in (tempfile.gettempdir(), "/var/tmp", "/tmp"):
        if os.path.isdir(place) and can_be_reached(Path(place) / "new") and not _is_in_memory(Path(place)):
            return place
    raise AssertionError("there is no folder for temporary files that is on a disk and can be reached by everybody")


def _is_in_memory(path: Path) -> bool:
    kinds: dict[Path, str] = {}
    with suppress(FileNotFoundError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, *_ = line.split()
            kinds[Path(place)] = kind
    mounts = [place for place in (path.resolve(), *path.resolve().parents) if place in kinds]
    return bool(mounts) and kinds[mounts[0]] in ("tmpfs", "ramfs")


def remove_when_unused(path: Path) -> None:
    """Wait until nobody holds the folder, then leave nothing of it. Whoever joins at the last moment is waited for."""
    while os.read(0, 4096):
        pass
    (path / PIPE).unlink(missing_ok=True)
    while os.read(0, 4096):
        pass
    kill_all(path)
    remove_shared_memory(path)
    remove_elsewhere(path)
    shutil.rmtree(path)


if __name__ == "__main__":
    if os.fork() == 0:
        os.setsid()
        remove_when_unused(Path(sys.argv[1]))
