"""A process's view of the bucket: all runs and nodes, as of its last look.

A bucket cannot be searched. Each process keeps the *summaries* of all runs in memory, and follows their changes: a
process that changes runs then writes a small object under `changes/` that names them and has their summaries. To
follow, a process lists the names after the last one it has seen, and reads those objects. Heads are read only when they
are needed: to claim a run, or to answer a list. So lists are at most as old as the last look, and idle runs cost no
request.

Names begin with the store's time at which they were announced, or with that of the last name that their writer has
seen. A late name sorts before others that were seen already, so each listing begins `OVERLAP` earlier, and changes that
took long to be announced are announced once more.

A writer that is killed between the head and the name leaves a change that nothing names. The process that holds the
lock of the *sweep* lists all heads now and then, announces those for which it has seen no announcement, and writes the
index, from which processes start. A process that has not followed changes for a long time also compares all heads.

Everything here may be outdated, and nothing depends on it: a decision takes effect when its head is replaced on
condition that it has not changed.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from holdfast.core.instants import Instant
from holdfast.core.keys import storage_key
from holdfast.errors import StoreCorrupt, StoreTooNew
from holdfast.store import decisions, port
from holdfast.store.s3.bucket import Bucket, Stored, Unchanged, for_each
from holdfast.store.s3.head import StoredRun, decode_run
from holdfast.store.s3.summary import Summary, decode_index, encode_index, summary_of

OVERLAP = 10_000_000
"""How much earlier than the last name seen a listing begins, in microseconds."""

KEPT = 900_000_000
"""How long a name stays under `changes/`, in microseconds."""

LOG = 20_000
"""How many names a process keeps, with the changes that they announced."""

INDEX_AFTER = 100
"""How many heads a starting process reads before it writes the index, to spare the next process the same."""

UNREAD = 30_000_000
"""How long after the end of its lease, as last read, a node that owns nothing counts as alive, in microseconds.

Renewals are not announced. A node that stops deletes its lease, which is announced."""

ENDING = 2_000_000
"""When a lease counts as ending without being renewed, in microseconds: processes' times differ by up to a second."""

CHECKED = 15_000_000
"""How often a run whose owner is gone is read again for a caller that requests it by its id, in microseconds."""

ANNOUNCED_BULLETINS = ("question",)
"""The kinds of bulletins that others wait for: they are announced when put, so that no process has to poll for them."""

UNREADABLE = (StoreCorrupt, StoreTooNew)
"""The errors of a head that this version cannot read."""

HEADS = "heads"
NODES = "nodes"
CHANGES = "changes"
INDEX = "index"


logger = logging.getLogger("holdfast.store")


class Held(NamedTuple):
    """A run as last read or written, and the etag of its head."""

    run: StoredRun
    etag: str


class NodeRecord(Struct, frozen=True):
    """The lease of a node, and what it has published with it."""

    node: str
    lease_until: Instant
    plans: tuple[port.Plan, ...] | None
    mark: str


class HeldNode(NamedTuple):
    """A node as last read or written, the etag of its object, and when that was."""

    record: NodeRecord
    etag: str
    at: Instant


class Announced(Struct, frozen=True):
    """The content of an object under `changes/`: which runs have changed, whose histories have grown, which nodes."""

    runs: dict[str, str] = {}
    """The etag of each changed head; empty if the run was deleted."""
    grown: tuple[port.Change, ...] = ()
    nodes: tuple[str, ...] = ()
    summaries: tuple[Summary, ...] = ()
    """The summaries of these runs; a missing one is made from the head."""
    bulletins: tuple[str, ...] = ()
    """The kinds of which bulletins were put."""


def head_key(run_id: str) -> str:
    """Return the key of a run's head."""
    return storage_key(HEADS, run_id)


def node_key(node: str) -> str:
    """Return the key of a node's lease."""
    return storage_key(NODES, node)


class Mirror:
    """All runs and nodes, as this process knows them."""

    def __init__(self, bucket: Bucket, writer: str) -> None:
        self._bucket = bucket
        self._writer = writer
        self.summaries: dict[str, Summary] = {}
        self.active: dict[str, None] = {}
        """The runs that are ready or will be, or that have an owner, jobs, or something to send."""
        self.nodes: dict[str, HeldNode] = {}
        self._held: dict[str, Held] = {}
        self._announced_etags: dict[str, str] = {}
        self._checked: dict[str, Instant] = {}
        self._gone: dict[str, int] = {}
        self.unreadable: dict[str, str] = {}
        """The runs whose heads cannot be read, because damaged or written by a newer version, and their etags."""
        self._indexed: dict[str, str] = {}
        self._last_order = 0
        self._ordered: dict[str, StoredRun] | None = None
        self._seen: dict[str, None] = {}
        self.bulletins: Counter[str] = Counter()
        """How often bulletins of a kind were announced, or may have been."""
        self._watermark = 0
        self._log: list[tuple[str, tuple[port.Change, ...]]] = []
        self._places: dict[str, int] = {}
        self._dropped = 0
        self._count = 0
        self._following = asyncio.Lock()
        self.is_loaded = False
        self.followed_at = 0
        """When it was last known to be up to date, by the store's clock."""

    # --- what is known

    def held(self, run_id: str) -> Held | None:
        """Return a run if this process has its head, as far as it knows."""
        held, summary = self._held.get(run_id), self.summaries.get(run_id)
        return held if held is not None and summary is not None and held.etag == summary.etag else None

    def put(self, run: StoredRun, etag: str) -> Held:
        """Keep a run as it was read or written, unless a later version is known. Return the one that is kept."""
        run_id = run.head.run_id
        there = self._held.get(run_id)
        if there is not None and (there.run.order, there.run.writes) > (run.order, run.writes):
            return there
        held = self._held[run_id] = Held(run, etag)
        self.note(summary_of(run, etag))
        if self._ordered is not None:
            last = next(reversed(self._ordered.values()), None)
            is_in_place = there is not None and there.run.order == run.order
            if is_in_place or (there is None and (last is None or last.order < run.order)):
                self._ordered[run_id] = run
            else:
                self._ordered = None
        return held

    def note(self, summary: Summary) -> None:
        """Keep the summary of a run, unless a later one is known, or the run was deleted."""
        run_id = summary.run_id
        there = self.summaries.get(run_id)
        if (there is not None and there.age > summary.age) or self._gone.get(run_id, -1) >= summary.order:
            return
        self.summaries[run_id] = summary
        self._last_order = max(self._last_order, summary.order)
        if summary.is_active and self.unreadable.get(run_id) != summary.etag:
            self.active[run_id] = None
        else:
            self.active.pop(run_id, None)

    def forget(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        gone = self.summaries.pop(run_id, None)
        if gone is not None:
            self._gone.pop(run_id, None)
            self._gone[run_id] = gone.order  # an earlier announcement may still arrive
            while len(self._gone) > LOG:
                del self._gone[next(iter(self._gone))]
        self.active.pop(run_id, None)
        self._announced_etags.pop(run_id, None)
        self.unreadable.pop(run_id, None)
        if self._held.pop(run_id, None) is not None:
            self._ordered = None

    def ordered(self) -> dict[str, StoredRun]:
        """Return all runs whose heads this process has, in order of creation."""
        if self._ordered is None:
            runs = sorted((held.run for held in self._held.values()), key=lambda run: (run.order, run.head.run_id))
            self._ordered = {run.head.run_id: run for run in runs}
        return self._ordered

    async def read_all(self) -> dict[str, StoredRun]:
        """Read all heads that have changed, and return all runs in order of creation."""
        await self.read(self.summaries)
        return self.ordered()

    async def read(self, run_ids: Iterable[str]) -> dict[str, StoredRun]:
        """Read those of these heads that have changed, and return the runs in order of creation."""
        wanted = list(run_ids)
        await for_each(self.fetch_readable, [run_id for run_id in wanted if self.held(run_id) is None])
        readable = [run_id for run_id in wanted if run_id not in self.unreadable]
        runs = [held.run for run_id in readable if (held := self._held.get(run_id)) is not None]
        return {run.head.run_id: run for run in sorted(runs, key=lambda run: (run.order, run.head.run_id))}

    def is_announced(self, run_id: str) -> bool:
        """Return whether this process has seen an announcement of a run in the state that it knows."""
        known = self.summaries.get(run_id)
        return known is not None and self._announced_etags.get(run_id) == known.etag

    def next_order(self, now: Instant) -> int:
        """Return a position in the order after all known runs."""
        return max(now, self._last_order + 1)

    def lease_end(self, node: str, now: Instant) -> Instant:
        """Return when a node's lease ends, or has ended; 0 for a node that has none."""
        held = self.nodes.get(node)
        return 0 if held is None else decisions.lease_end(held.record.lease_until, now)

    # --- reading

    async def fetch(self, run_id: str) -> Held | None:
        """Read a run again, if it has changed."""
        there, known = self._held.get(run_id), self.summaries.get(run_id)
        found = await self._bucket.get_newer(head_key(run_id), None if there is None else there.etag)
        if isinstance(found, Unchanged):
            assert there is not None
            return self._confirmed(run_id, there)
        if found is None:
            if self.summaries.get(run_id) is known:
                self.forget(run_id)
            return None
        return self._read(run_id, found)

    async def fetch_readable(self, run_id: str) -> Held | None:
        """Read a run again, if it has changed; also None if its head cannot be read."""
        try:
            return await self.fetch(run_id)
        except UNREADABLE:
            return None

    def _read(self, run_id: str, found: Stored) -> Held:
        """Keep a run as it was read. An unreadable one is left alone until its head changes."""
        try:
            run = decode_run(found.data, head_key(run_id))
        except UNREADABLE as problem:
            if self.unreadable.get(run_id) != found.etag:
                logger.warning("run %s is left alone: %s", run_id, problem)
            self.unreadable[run_id] = found.etag
            self.active.pop(run_id, None)
            if self._held.pop(run_id, None) is not None:
                self._ordered = None
            raise
        self.unreadable.pop(run_id, None)
        return self.put(run, found.etag)

    def _confirmed(self, run_id: str, read: Held) -> Held:
        """Return a run whose head was found unchanged, or a later version that is known by now."""
        there = self._held.get(run_id)
        if there is None:  # it was dropped meanwhile
            return self.put(read.run, read.etag)
        return there

    async def fetch_node(self, node: str, now: Instant) -> HeldNode | None:
        """Read a node's lease again, if it has changed."""
        there = self.nodes.get(node)
        found = await self._bucket.get_newer(node_key(node), None if there is None else there.etag)
        if isinstance(found, Unchanged):
            assert there is not None
            held = self.nodes.get(node, there)
        elif found is None:
            self.nodes.pop(node, None)
            return None
        else:
            held = HeldNode(msgspec.json.decode(found.data, type=NodeRecord), found.etag, now)
        held = self.nodes[node] = held._replace(at=max(held.at, now))
        return held

    async def fetch_nodes(self, nodes: Iterable[str], now: Instant) -> None:
        """Read those of the nodes' leases again that have changed."""
        await asyncio.gather(*(self.fetch_node(node, now) for node in nodes))

    async def check_leases(self, now: Instant, own: str) -> None:
        """Read the leases of owners again that seem to have ended: their nodes may have renewed them."""
        owners = {owner for run_id in self.active if (owner := self.summaries[run_id].lease_owner) is not None}
        await self.fetch_nodes([each for each in owners if each != own and self.lease_end(each, now) <= now], now)

    async def check_abandoned(self, run_ids: Iterable[str], now: Instant) -> None:
        """Read runs again whose owner seems to be gone: it may not have announced its last change.

        Each is read once in `CHECKED`. That is how a caller that waits for a run learns that it has finished.
        """
        mine = [summary for run_id in run_ids if (summary := self.summaries.get(run_id)) is not None]
        doubtful = [
            (summary.run_id, summary.lease_owner)
            for summary in mine
            if summary.lease_owner is not None
            and self.lease_end(summary.lease_owner, now) <= now
            and self._checked.get(summary.run_id, 0) + CHECKED <= now
        ]
        if not doubtful:
            return
        await self.fetch_nodes({owner for _, owner in doubtful if owner in self.nodes}, now)
        abandoned = [run_id for run_id, owner in doubtful if self.lease_end(owner, now) <= now]
        self._checked = {run_id: at for run_id, at in self._checked.items() if at + CHECKED > now}
        self._checked |= dict.fromkeys(abandoned, now)
        await for_each(self.fetch_readable, abandoned)

    def may_be_alive(self, node: str, now: Instant) -> bool:
        """Return whether a node has a lease, or recently had one that was not about to end when last read."""
        end, held = self.lease_end(node, now), self.nodes.get(node)
        return end > now or (held is not None and held.at + ENDING < end and now < end + UNREAD)

    async def follow(self, now: Instant) -> bool:
        """Read what others have changed since the last look. Return whether there was anything."""
        async with self._following:
            if not self.is_loaded:
                await self._load(now)
                return True
            if now - self.followed_at > KEPT // 2:  # some names may be gone that it has not seen
                await self._load_again(now)
                return True
            new = await self._names()
            if not new:
                self.followed_at = now
                return False
            found = await for_each(self._announced, new)
            unknown = {run_id: None for each in found for run_id in self._take(each)}
            nodes = {node for each in found for node in each.nodes}
            self.bulletins.update(kind for each in found for kind in each.bulletins)
            await for_each(self.fetch_readable, unknown)
            await self.fetch_nodes(nodes, now)
            for name, each in zip(new, found, strict=True):
                self._remember(name, each.grown)
            self.followed_at = now
            return True

    def _take(self, announced: Announced) -> list[str]:
        """Keep what was announced, and return the runs whose heads have to be read."""
        for summary in announced.summaries:
            self.note(summary)
        summarised = {summary.run_id for summary in announced.summaries}
        unknown = []
        for run_id, etag in announced.runs.items():
            there = self.summaries.get(run_id)
            if etag:
                self._announced_etags[run_id] = etag
            if run_id not in summarised and (there.etag != etag if there is not None else etag):
                unknown.append(run_id)
        return unknown

    async def _names(self) -> list[str]:
        after = f"{CHANGES}/{max(0, self._watermark - OVERLAP):020d}"
        return [each.key for each in await self._bucket.list(CHANGES, after) if each.key not in self._seen]

    async def _recent_names(self, now: Instant) -> list[str]:
        """Return the names that a later listing could show, with some margin: it never shows older ones."""
        after = f"{CHANGES}/{max(0, now - 2 * OVERLAP):020d}"
        return [each.key for each in await self._bucket.list(CHANGES, after)]

    async def _announced(self, name: str) -> Announced:
        found = await self._bucket.get(name)
        return Announced() if found is None else msgspec.json.decode(found.data, type=Announced)

    async def _load(self, now: Instant) -> None:
        """Read the index, and the heads that have changed since it was written.

        The names are listed before the heads, so that everything that changes from now on has a later name.
        """
        names, index = await asyncio.gather(self._recent_names(now), self._bucket.get(INDEX))
        listed = () if index is None else decode_index(index.data)
        self._indexed = {summary.run_id: summary.etag for summary in listed}
        self._announced_etags = self._indexed | self._announced_etags
        for summary in listed:
            self.note(summary)
        if await self._compare(now) >= INDEX_AFTER:
            await self.write_index()
        self._seen |= dict.fromkeys(names)
        self._remember(self._name(now), ())
        self.is_loaded = True
        self.followed_at = now

    async def _load_again(self, now: Instant) -> None:
        """Read what has changed while nothing was followed. Earlier cursors are lost."""
        self._dropped += len(self._log)
        self._log, self._places = [], {}
        self._seen |= dict.fromkeys(await self._recent_names(now))
        self.bulletins.update(ANNOUNCED_BULLETINS)
        await self._compare(now)
        await self.fetch_nodes(list(self.nodes), now)
        self._remember(self._name(now), ())
        self.followed_at = now

    async def _compare(self, now: Instant) -> int:
        """List all heads and nodes, and read those that this process knows differently. Return the number of heads."""
        heads, nodes = await asyncio.gather(self._bucket.list(HEADS), self._bucket.list(NODES))
        known = {head_key(run_id): summary.etag for run_id, summary in self.summaries.items()}
        known |= {head_key(run_id): etag for run_id, etag in self.unreadable.items()}
        listed = {each.key for each in heads}
        changed = [each.key for each in heads if known.get(each.key) != each.etag]
        gone = [run_id for run_id in self.summaries | self.unreadable if head_key(run_id) not in listed]
        leases = {node_key(node): held.etag for node, held in self.nodes.items()}
        renewed = [each.key for each in nodes if leases.get(each.key) != each.etag]
        await for_each(lambda key: self._load_node(key, now), renewed)
        await for_each(self._load_head, changed)
        await for_each(self.fetch_readable, gone)
        return len(changed)

    async def _load_head(self, key: str) -> None:
        found = await self._bucket.get(key)
        if found is not None:
            with suppress(*UNREADABLE):
                self._read(unquote(key.rpartition("/")[2]), found)

    async def _load_node(self, key: str, now: Instant) -> None:
        found = await self._bucket.get(key)
        if found is not None:
            record = msgspec.json.decode(found.data, type=NodeRecord)
            self.nodes[record.node] = HeldNode(record, found.etag, now)

    async def sweep(self, now: Instant) -> list[str]:
        """List all heads, read those that have changed, and return the runs for which no announcement was seen.

        Old names are deleted, and the index is written if something has changed since the last one.
        """
        before = dict(self.summaries)
        await self._compare(now)
        old = f"{CHANGES}/{max(0, now - KEPT):020d}"
        names = [each.key for each in await self._bucket.list(CHANGES) if each.key < old]
        await self._bucket.delete(names)
        announced = self._announced_etags
        silent = [run_id for run_id, summary in self.summaries.items() if announced.get(run_id) != summary.etag]
        return [*silent, *(run_id for run_id in before if run_id not in self.summaries)]

    async def write_index(self) -> None:
        """Write the summaries of all runs, for starting processes, unless they are written already."""
        etags = {run_id: summary.etag for run_id, summary in self.summaries.items()}
        if etags != self._indexed:
            await self._bucket.put(INDEX, encode_index(self.summaries.values()))
            self._indexed = etags

    # --- announcing

    async def announce(
        self,
        runs: Mapping[str, str],
        grown: Sequence[port.Change],
        nodes: Iterable[str],
        bulletins: Iterable[str],
        now: Callable[[], Awaitable[Instant]],
    ) -> None:
        """Announce changes to other processes."""
        summaries = [self.summaries[run_id] for run_id, etag in runs.items() if etag and run_id in self.summaries]
        etags = {**runs, **{summary.run_id: summary.etag for summary in summaries}}
        data = msgspec.json.encode(Announced(etags, tuple(grown), tuple(nodes), tuple(summaries), tuple(bulletins)))
        while True:
            began = await now()
            name = self._name(began)
            await self._bucket.put(name, data)
            self._remember(name, tuple(grown))
            if await now() - began < OVERLAP // 2:
                break  # otherwise others may have seen later names before this one existed
        self._announced_etags |= {run_id: etag for run_id, etag in etags.items() if etag}

    def _name(self, now: Instant) -> str:
        self._count += 1
        return f"{CHANGES}/{max(now, self._watermark):020d}-{self._count:09d}-{self._writer}"

    # --- changes of histories

    def _remember(self, name: str, grown: tuple[port.Change, ...]) -> None:
        self._seen[name] = None
        self._watermark = max(self._watermark, int(name.removeprefix(f"{CHANGES}/").partition("-")[0]))
        self._places[name] = self._dropped + len(self._log)
        self._log.append((name, grown))
        if len(self._log) > 2 * LOG:
            for old, _ in self._log[:LOG]:
                self._places.pop(old, None)
                self._seen.pop(old, None)
            del self._log[:LOG]
            self._dropped += LOG

    def cursor(self) -> str:
        """Return the current cursor."""
        return self._log[-1][0]

    async def since(self, cursor: str, most: int) -> port.Changes:
        """Return the known runs whose histories have grown since a cursor of any process."""
        place = self._places.get(cursor)
        if place is None:
            return await self._since_elsewhere(cursor)
        log = self._log[place - self._dropped + 1 :]
        taken = 0
        changes: list[port.Change] = []
        for _, grown in log:
            if len(changes) + len(grown) > most and taken:
                break
            taken += 1
            changes += grown
        end = log[taken - 1][0] if taken else cursor
        return port.Changes(end, self._merged(changes), has_more=taken < len(log))

    async def _since_elsewhere(self, cursor: str) -> port.Changes:
        """Return the changes since a cursor of another process: all whose names begin a while before it."""
        stamp = cursor.removeprefix(f"{CHANGES}/").partition("-")[0]
        is_known = cursor.startswith(f"{CHANGES}/") and len(stamp) == 20 and stamp.isascii() and stamp.isdecimal()
        if not is_known or not self.followed_at - KEPT // 2 <= int(stamp) <= self.followed_at + OVERLAP:
            return port.Changes(self.cursor(), is_lost=True)
        end = self.cursor()
        listed = await self._bucket.list(CHANGES, f"{CHANGES}/{max(0, int(stamp) - OVERLAP):020d}")
        found = await asyncio.gather(*(self._announced(each.key) for each in listed))
        return port.Changes(end, self._merged([change for each in found for change in each.grown]))

    def _merged(self, changes: Sequence[port.Change]) -> tuple[port.Change, ...]:
        last: dict[str, port.Change] = {}
        for change in changes:
            if change.run_id in self.summaries:
                before = last.get(change.run_id, change)
                has_tasks = change.has_tasks or before.has_tasks
                last[change.run_id] = port.Change(change.run_id, max(before.version, change.version), has_tasks)
        return tuple(change for _, change in sorted(last.items()))
