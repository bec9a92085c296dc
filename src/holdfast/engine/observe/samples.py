"""Samples of the installation over time, kept in the store for later inspection.

Each process that has a node, or serves, tries once per `NodeOptions.sample_s`. The first that acquires the host lock
takes the sample of that interval and stores it as a bulletin. The id of the bulletin is the interval, so two processes
cannot store two samples of it. The others see that it exists. It expires after `NodeOptions.sample_keep_s`.

A sample costs a few counts. If they take long, because there are very many runs, samples are taken less often.
"""

import asyncio
import logging
from zlib import crc32

import msgspec
from msgspec import Raw, Struct

from holdfast.core.instants import Instant
from holdfast.core.state import COMPLETED, FAILED, RUNNING
from holdfast.engine.abilities import abilities_of
from holdfast.engine.host_locks import acquire, to_the_end
from holdfast.errors import HoldfastError
from holdfast.store.decisions import name_of
from holdfast.store.port import BulletinQuery, RunCountQuery, RunQuery, Store, TaskQuery

KIND = "sample"
LOCK = "samples"
LOCK_MS = 60_000
PAGE = 1_000

LOOKED_AT = 20_000
"""How many runs are examined to count those that have finished, or that are being retried."""

SHARE = 200
"""The minimum ratio of the time between two samples to the time that a sample takes."""

BUCKET_S = 300.0
"""The shortest interval in a bucket, where every request is charged for."""

SPREAD_S = 2.0
"""Over how many seconds the attempts of processes are spread, so that one of them is first."""

logger = logging.getLogger("holdfast.node")


class NodeLoad(Struct, frozen=True):
    """How many runs a node owned, and how many activities were running on it."""

    runs: int
    activities: int


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The installation at one time. `completed` and `failed` count runs that have ended since the previous sample."""

    runs: dict[str, int] = {}
    completed: int = 0
    failed: int = 0
    retrying: int = 0
    overdue: int = 0
    ready: int = 0
    queued: int = 0
    lag_ms: int = 0
    jobs: int = 0
    queues: dict[str, int] = {}
    open_tasks: int = 0
    dead_letters: int = 0
    nodes: int = 0
    load: dict[str, NodeLoad] = {}
    """The load by node, as the nodes have published it."""


class SampleAt(Struct, frozen=True):
    """A sample, when it was taken, and how long after the previous sample."""

    at: Instant
    every_s: float
    sample: Sample


class _Stored(Struct, frozen=True):
    every_s: float
    sample: Sample


_stored = msgspec.json.Decoder(_Stored)


async def take_sample(store: Store, since: Instant, now: Instant) -> Sample:
    """Return a sample, with the runs that have ended since an instant."""
    counted, ended = await store.stats(), {COMPLETED: 0, FAILED: 0}
    for status in ended:
        ended[status] = await _count(store, RunQuery(status=status, finished_from=since, finished_until=now))
    overdue = await store.find(TaskQuery(status="OPEN", due_before=now, limit=PAGE)) if counted.open_tasks else ()
    able = abilities_of(await store.find_nodes())
    oldest = counted.oldest_ready_at
    return Sample(
        runs=counted.runs,
        completed=ended[COMPLETED],
        failed=ended[FAILED],
        retrying=await _count(store, RunQuery(status=RUNNING, retrying=True)) if counted.runs.get(RUNNING) else 0,
        overdue=len(overdue),
        ready=counted.ready,
        queued=counted.queued,
        lag_ms=0 if oldest is None else max(0, (now - oldest) // 1_000),
        jobs=counted.jobs,
        queues=counted.queues,
        open_tasks=counted.open_tasks,
        dead_letters=counted.dead_letters,
        nodes=counted.nodes,
        load={name_of(each.node): NodeLoad(*each.abilities.load) for each in able if each.abilities.load is not None},
    )


async def _count(store: Store, runs: RunQuery) -> int:
    return sum(each.count for each in await store.find(RunCountQuery(runs=runs, look=LOOKED_AT, limit=PAGE)))


async def find_samples(store: Store, since: Instant, limit: int) -> list[SampleAt]:
    """Return the samples from an instant on, in order. Entries of other releases that cannot be decoded are skipped."""
    found: list[SampleAt] = []
    for bulletin in await store.find_bulletins(BulletinQuery(kind=KIND, since=since, limit=limit)):
        try:
            stored = _stored.decode(bulletin.body)
        except msgspec.MsgspecError:
            continue
        found.append(SampleAt(bulletin.at, stored.every_s, stored.sample))
    return found


class Sampler:
    """Takes the samples of one process, whenever it is the first to try."""

    def __init__(self, store: Store, node: str, every_s: float, keep_s: float) -> None:
        self._store = store
        self._node = node
        self._every_s = max(every_s, BUCKET_S) if store.capabilities.scan_consistency == "eventual" else every_s
        self._keep_ms = max(1, round(keep_s * 1_000))
        self._offset_s = SPREAD_S * (crc32(node.encode()) % 1_000) / 1_000

    async def run(self) -> None:
        """Try periodically, until this is cancelled."""
        pause_s, loop = self._every_s, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause_s + min(self._offset_s, self._every_s / 10))
            began_at = loop.time()
            try:
                await self.come_round()
                left_s = self._every_s - (await self._store.now() / 1_000_000) % self._every_s
                pause_s = max(left_s, SHARE * (loop.time() - began_at))
            except HoldfastError as problem:
                logger.warning("node %s could not take a sample: %s", name_of(self._node), problem)
                pause_s = self._every_s

    async def come_round(self) -> bool:
        """Take the sample of this interval unless another process has done or does so; return whether it was taken."""
        now = await self._store.now()
        stretch = round(self._every_s * 1_000_000)
        number = now // stretch
        id_of = f"{number * stretch}"
        if await self._store.find_bulletins(BulletinQuery(kind=KIND, bulletin_ids=(id_of,))):
            return False
        lock = await acquire(self._store, LOCK, self._node, LOCK_MS)
        if lock is None:
            return False
        try:
            last = await find_samples(self._store, now - 3 * stretch, PAGE)
            since = last[-1].at if last else now - stretch
            sample = await take_sample(self._store, since, now)
            body = Raw(msgspec.json.encode(_Stored(round((now - since) / 1_000_000, 3), sample)))
            [is_first] = await self._store.put_bulletins(KIND, {id_of: body}, self._keep_ms)
            return is_first
        finally:
            await to_the_end(self._store.release_lock(LOCK, self._node, lock.epoch), LOCK_MS / 3_000)
