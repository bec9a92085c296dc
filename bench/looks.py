"""What operators, charts and housekeeping ask a store for, and the CPU that it takes: of this process and the server.

None of it should cost more because more runs have finished.
"""

import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg

from bench.report import Row
from holdfast.clock import SystemClock, SystemIds
from holdfast.core.state import RunStatus
from holdfast.engine.observe.doctor import examine
from holdfast.engine.observe.samples import take_sample
from holdfast.engine.retention import Retention, RetentionDuty
from holdfast.store.health import Bounds
from holdfast.store.port import RunQuery, Store
from holdfast.store.queries import RunCountQuery

REPEATS = 5
NODE = "looking"
LEASE_MS = 60_000
MINUTE_US = 60_000_000
DAYS_30_S = 30 * 86_400
LOOK = 20_000

Look = Callable[[], Awaitable[object]]


class ServerCpu:
    """The CPU of a PostgreSQL server on this machine, with all its processes; 0 for a file."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid

    @classmethod
    async def of(cls, address: str) -> "ServerCpu":
        """Find the server of a store. It must be on this machine, and its user one who may ask."""
        if not address.startswith("postgres"):
            return cls(None)
        connection = await asyncpg.connect(address.partition("?")[0])
        try:
            pid = int((await connection.fetchval("SELECT pg_read_file('postmaster.pid')")).split()[0])
        finally:
            await connection.close()
        server = cls(pid)
        server.used_s()
        return server

    def used_s(self) -> float:
        """Return what it has used, also that of its processes that have ended."""
        if self._pid is None:
            return 0.0
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text(encoding="ascii").split()
        return (_ticks(str(self._pid), 11, 15) + sum(_ticks(child, 11, 13) for child in children)) / 100


def _ticks(pid: str, first: int, last: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has just ended, and is counted by its parent
    return sum(map(int, stat.rpartition(")")[2].split()[first:last]))


async def looked_at(store: Store, server: ServerCpu) -> Row:
    """Measure each question: the CPU milliseconds of the process and of the server, by its name."""
    await store.renew(NODE, LEASE_MS)
    row: Row = {}
    for name, look in _looks(store).items():
        used, repeats = list[float](), REPEATS
        await look()  # what the first one reads from the disk, the others have in memory
        while len(used) < repeats:
            began, at_server = time.process_time(), server.used_s()
            for _ in range(times := 1 if server.used_s() == 0 or (used and used[0] > 100) else 10):
                await look()
            took_ms = (time.process_time() - began + server.used_s() - at_server) * 1e3 / times
            used.append(took_ms)
            repeats = 2 if took_ms > 1_000 else REPEATS
        row[f"{name}, CPU ms"] = statistics.median(used)
    return row


def _looks(store: Store) -> dict[str, Look]:
    async def sample() -> None:
        now = await store.now()
        await take_sample(store, now - MINUTE_US, now)

    async def preview() -> None:
        await RetentionDuty(NODE, store, Retention(finished=DAYS_30_S), SystemIds(), None, _none).preview(5.0)

    def find(query: RunQuery) -> Look:
        return lambda: store.find(query)

    return {
        "newest": find(RunQuery(newest=True, limit=50)),
        "failed": find(RunQuery(newest=True, limit=50, status=RunStatus.FAILED)),
        "of a workflow": find(RunQuery(newest=True, limit=50, workflow="steps")),
        "a word that is nowhere": find(RunQuery(newest=True, limit=50, text="nowhere", look=LOOK)),
        "counts": lambda: store.find(RunCountQuery(runs=RunQuery(), limit=500)),
        "claim of nothing": lambda: store.claim(NODE, 100),
        "next due": lambda: store.next_due(NODE),
        "orphaned": lambda: store.find_orphaned(60_000),
        "metrics": store.stats,
        "health sample": sample,
        "doctor": lambda: examine(store, SystemClock(), bounds=Bounds(sample_runs=0)),
        "retention's preview": preview,
    }


async def _none(run_id: str, reason: str) -> None:
    raise AssertionError(f"{run_id}: {reason}")
