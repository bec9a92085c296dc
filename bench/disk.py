"""Where the measurements write, and what kind of disk that is.

A commit is as fast as the disk says "written". Memory says so at once, so a file system in memory is refused.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def default_folder() -> Path:
    """Return the folder for temporary files, or the working folder if that one is in memory."""
    temporary = Path(tempfile.gettempdir())
    return Path.cwd() if filesystem(temporary) in IN_MEMORY else temporary


def filesystem(folder: Path) -> str:
    """Return the type of the file system that holds the folder, or `unknown` where the system does not tell."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    folder = folder.resolve()
    best, kind = Path(), "unknown"
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, point, mounted, *_ = line.split(" ")
        path = Path(point.encode().decode("unicode_escape"))
        if (path == folder or path in folder.parents) and len(path.parts) >= len(best.parts):
            best, kind = path, mounted
    return kind


def fsync_us(folder: Path, times: int = 50) -> float:
    """Return the median time of writing one page at a file's end and forcing it to the disk."""
    taken: list[float] = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(times):
            began = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6
