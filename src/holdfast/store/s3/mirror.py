"""What a process knows of the bucket: all runs and nodes, as they were when it looked last.

A bucket cannot be searched. Each process keeps the heads of all runs in memory, built from one listing, and follows
their changes: who changes runs writes a small object under `changes/` that names them, after the heads. To follow is
to list the names after the last that was seen, and to read the heads that they name. So lists are at most as old as
the last look, and idle runs cost no request.

Names begin with the store's time of their writer, or that of the last name that it has seen. One that arrives late
sorts before others that were seen already, so each listing begins `OVERLAP` earlier. A writer that is killed between
the head and the name leaves a change that nothing names: a *sweep* lists all heads now and then, and announces what it
finds. A process that has followed nothing for long compares all heads too.

Everything here may be old, and nothing depends on it: a decision counts when its head was replaced under the condition
that it had not changed.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from holdfast.core.instants import Instant
from holdfast.core.keys import storage_key
from holdfast.store import decisions, port
from holdfast.store.s3.bucket import Bucket, Unchanged
from holdfast.store.s3.head import StoredRun, decode_run

OVERLAP = 30_000_000
"""How much earlier than the last name that was seen a listing begins, in microseconds."""

KEPT = 900_000_000
"""How long a name stays under `changes/`, in microseconds."""

LOG = 20_000
"""How many names a process remembers, with the changes that they announced."""

HEADS = "heads"
NODES = "nodes"
CHANGES = "changes"


class Held(NamedTuple):
    """A run as it was read or written last, and the etag of its head."""

    run: StoredRun
    etag: str


class NodeRecord(Struct, frozen=True):
    """The lease of a node, and what it has published with it."""

    node: str
    lease_until: Instant
    plans: tuple[port.Plan, ...] | None
    mark: str


class HeldNode(NamedTuple):
    """A node as it was read or written last, and the etag of its object."""

    record: NodeRecord
    etag: str


class Announced(Struct, frozen=True):
    """What an object under `changes/` says: which runs have changed, whose histories have grown, which nodes."""

    runs: dict[str, str] = {}
    """The etag of each changed head; empty if the run was deleted."""
    grown: tuple[port.Change, ...] = ()
    nodes: tuple[str, ...] = ()


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
        self.runs: dict[str, Held] = {}
        self.active: dict[str, None] = {}
        """The runs that are ready or will be, or that have an owner, jobs, or something to send."""
        self.nodes: dict[str, HeldNode] = {}
        self._ordered: dict[str, StoredRun] | None = None
        self._seen: dict[str, None] = {}
        self._watermark = 0
        self._log: list[tuple[str, tuple[port.Change, ...]]] = []
        self._places: dict[str, int] = {}
        self._dropped = 0
        self._count = 0
        self._following = asyncio.Lock()
        self.is_loaded = False
        self.followed_at = 0
        """When it was known to be up to date, by the store's clock."""

    # --- what is known

    def put(self, run: StoredRun, etag: str) -> Held:
        """Keep a run as it was read or written, unless a later one is known. Return the one that is kept."""
        run_id = run.head.run_id
        there = self.runs.get(run_id)
        if there is not None and (there.run.order, there.run.writes) > (run.order, run.writes):
            return there
        held = self.runs[run_id] = Held(run, etag)
        head = run.head
        if head.ready_at is not None or head.lease_owner is not None or run.work or run.outgoing:
            self.active[run_id] = None
        else:
            self.active.pop(run_id, None)
        if self._ordered is not None:
            last = next(reversed(self._ordered.values()), None)
            is_in_place = there is not None and there.run.order == run.order
            if is_in_place or (there is None and (last is None or last.order < run.order)):
                self._ordered[run_id] = run
            else:
                self._ordered = None
        return held

    def forget(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        if self.runs.pop(run_id, None) is not None:
            self.active.pop(run_id, None)
            self._ordered = None

    def ordered(self) -> dict[str, StoredRun]:
        """Return all runs in the order of their creation."""
        if self._ordered is None:
            runs = sorted((held.run for held in self.runs.values()), key=lambda run: (run.order, run.head.run_id))
            self._ordered = {run.head.run_id: run for run in runs}
        return self._ordered

    def next_order(self, now: Instant) -> int:
        """Return a place in the order after all runs that are known."""
        last = next(reversed(self.ordered().values()), None)
        return max(now, 0 if last is None else last.order + 1)

    def lease_end(self, node: str, now: Instant) -> Instant:
        """Return when a node's lease ends, or has ended; 0 for a node that has none."""
        held = self.nodes.get(node)
        return 0 if held is None else decisions.lease_end(held.record.lease_until, now)

    # --- reading

    async def fetch(self, run_id: str) -> Held | None:
        """Read a run anew, if it has changed."""
        there = self.runs.get(run_id)
        found = await self._bucket.get_newer(head_key(run_id), None if there is None else there.etag)
        if isinstance(found, Unchanged):
            return self.runs.get(run_id)
        if found is None:
            if self.runs.get(run_id) is there:
                self.forget(run_id)
            return None
        return self.put(decode_run(found.data, head_key(run_id)), found.etag)

    async def fetch_node(self, node: str) -> HeldNode | None:
        """Read a node's lease anew, if it has changed."""
        there = self.nodes.get(node)
        found = await self._bucket.get_newer(node_key(node), None if there is None else there.etag)
        if isinstance(found, Unchanged):
            return there
        if found is None:
            self.nodes.pop(node, None)
            return None
        held = self.nodes[node] = HeldNode(msgspec.json.decode(found.data, type=NodeRecord), found.etag)
        return held

    async def fetch_nodes(self) -> None:
        """Read the leases of all nodes anew that have changed."""
        await asyncio.gather(*map(self.fetch_node, list(self.nodes)))

    async def check_leases(self, now: Instant, own: str) -> None:
        """Read the leases anew that seem to have ended: their nodes may have renewed them."""
        owners = {owner for run_id in self.active if (owner := self.runs[run_id].run.head.lease_owner) is not None}
        ended = [owner for owner in owners if owner != own and self.lease_end(owner, now) <= now]
        await asyncio.gather(*map(self.fetch_node, ended))

    async def follow(self, now: Instant) -> bool:
        """Read what others have changed since the last look. Return whether there was something."""
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
            found = await asyncio.gather(*(self._announced(name) for name in new))
            stale = {
                run_id
                for each in found
                for run_id, etag in each.runs.items()
                if run_id not in self.runs or self.runs[run_id].etag != etag
            }
            nodes = {node for each in found for node in each.nodes}
            await asyncio.gather(*map(self.fetch, stale), *map(self.fetch_node, nodes))
            for name, each in zip(new, found, strict=True):
                self._remember(name, each.grown)
            self.followed_at = now
            return True

    async def _names(self) -> list[str]:
        after = f"{CHANGES}/{max(0, self._watermark - OVERLAP):020d}"
        return [each.key for each in await self._bucket.list(CHANGES, after) if each.key not in self._seen]

    async def _announced(self, name: str) -> Announced:
        found = await self._bucket.get(name)
        return Announced() if found is None else msgspec.json.decode(found.data, type=Announced)

    async def _load(self, now: Instant) -> None:
        """Read everything: first the names, so that whatever changes from now on is named later."""
        names = await self._bucket.list(CHANGES)
        heads, nodes = await asyncio.gather(self._bucket.list(HEADS), self._bucket.list(NODES))
        await asyncio.gather(*(self._load_head(each.key) for each in heads), *(self._load_node(n.key) for n in nodes))
        self._seen |= dict.fromkeys(each.key for each in names)
        self._remember(self._name(now), ())
        self.is_loaded = True
        self.followed_at = now

    async def _load_again(self, now: Instant) -> None:
        """Read what has changed in a while in which nothing was followed. Cursors of before are lost."""
        self._dropped += len(self._log)
        self._log, self._places = [], {}
        self._seen |= dict.fromkeys(each.key for each in await self._bucket.list(CHANGES))
        await self._compare()
        await self.fetch_nodes()
        self._remember(self._name(now), ())
        self.followed_at = now

    async def _compare(self) -> None:
        """List all heads and nodes, and read those that this process does not know so."""
        heads, nodes = await asyncio.gather(self._bucket.list(HEADS), self._bucket.list(NODES))
        listed = {each.key: each.etag for each in heads}
        known = {head_key(run_id): held.etag for run_id, held in self.runs.items()}
        changed = [key for key, etag in listed.items() if known.get(key) != etag]
        gone = [run_id for run_id in list(self.runs) if head_key(run_id) not in listed]
        leases = {node_key(node): held.etag for node, held in self.nodes.items()}
        renewed = [each.key for each in nodes if leases.get(each.key) != each.etag]
        await asyncio.gather(*map(self._load_head, changed), *map(self.fetch, gone), *map(self._load_node, renewed))

    async def _load_head(self, key: str) -> None:
        found = await self._bucket.get(key)
        if found is not None:
            self.put(decode_run(found.data, key), found.etag)

    async def _load_node(self, key: str) -> None:
        found = await self._bucket.get(key)
        if found is not None:
            record = msgspec.json.decode(found.data, type=NodeRecord)
            self.nodes[record.node] = HeldNode(record, found.etag)

    async def sweep(self, now: Instant) -> list[str]:
        """List all heads, read those that have changed, and return the runs of which nothing had said so."""
        before = {run_id: held.etag for run_id, held in self.runs.items()}
        await self._compare()
        after = {run_id: held.etag for run_id, held in self.runs.items()}
        old = f"{CHANGES}/{max(0, now - KEPT):020d}"
        names = [each.key for each in await self._bucket.list(CHANGES) if each.key < old]
        await self._bucket.delete(names)
        return [run_id for run_id in {*before, *after} if before.get(run_id) != after.get(run_id)]

    # --- announcing

    async def announce(
        self, runs: Mapping[str, str], grown: Sequence[port.Change], nodes: Iterable[str], now: Instant
    ) -> None:
        """Announce to other processes what has changed."""
        name = self._name(now)
        await self._bucket.put(name, msgspec.json.encode(Announced(dict(runs), tuple(grown), tuple(nodes))))
        self._remember(name, tuple(grown))

    def _name(self, now: Instant) -> str:
        self._count += 1
        return f"{CHANGES}/{max(now, self._watermark):020d}-{self._count:09d}-{self._writer}"

    # --- the changes of histories

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
        """Return the cursor of the present."""
        return self._log[-1][0]

    async def since(self, cursor: str, most: int) -> port.Changes:
        """Return which histories of known runs have grown since a cursor of any process."""
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
        """Return the changes since a cursor of another process: all that are named from a while before on."""
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
            if change.run_id in self.runs:
                before = last.get(change.run_id, change)
                has_tasks = change.has_tasks or before.has_tasks
                last[change.run_id] = port.Change(change.run_id, max(before.version, change.version), has_tasks)
        return tuple(change for _, change in sorted(last.items()))
