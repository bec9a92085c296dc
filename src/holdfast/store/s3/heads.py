"""Changing runs: decide on a copy, replace the head if it has not changed, and decide again if it has.

Every change of a run goes through `Heads.change`. A decision on a head that was replaced meanwhile is discarded. A
decision that changes nothing (a refusal, a duplicate) is made on a head that was read for it, never on what this
process has cached.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from holdfast.clock import Secrets
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.keys import storage_key
from holdfast.errors import StoreCorrupt
from holdfast.store import port
from holdfast.store.s3.bucket import Bucket
from holdfast.store.s3.head import OlderEventsNeeded, StoredRun, decode_run, decode_segment, encode_run
from holdfast.store.s3.mirror import UNREADABLE, Held, Mirror, head_key

T = TypeVar("T")

SEGMENTS_KEPT = 64
"""How many segments a process caches. They never change."""

AT_ONCE = 1_000
"""How many runs one announcement names, at most."""

UNKNOWN = "?"
"""Replaces the etag of a head whose writer does not know the outcome of its write."""


class Heads:
    """The heads of all runs, and their changes that are not announced yet."""

    def __init__(self, bucket: Bucket, mirror: Mirror, secrets: Secrets, now: Callable[[], Awaitable[Instant]]) -> None:
        self._now = now
        self._bucket = bucket
        self._mirror = mirror
        self._secrets = secrets
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._segments: dict[str, list[Event]] = {}
        self._changed: dict[str, str] = {}
        self._grown: list[port.Change] = []
        self._nodes: dict[str, None] = {}
        self._bulletins: dict[str, None] = {}
        self._announcing = asyncio.Lock()

    # --- changing

    async def change(self, run_id: str, decide: Callable[[StoredRun], T]) -> T | None:
        """Decide on a run, and write what the decision changes. None: there is no such run.

        `decide` changes the run that it gets, and may be called several times.
        """
        lock = self._locks.setdefault(run_id, asyncio.Lock())
        async with lock:  # only to save requests: the condition of the write decides
            held = self._mirror.held(run_id)
            is_fresh = held is None
            if held is None:
                held = await self._mirror.fetch(run_id)
            while held is not None:
                run = held.run.copy()
                try:
                    answer = decide(run)
                except OlderEventsNeeded:
                    held = Held(await self._with_older(held.run), held.etag)
                    continue
                if _is_same(run, held.run):
                    if is_fresh:
                        return answer
                elif await self._replace(run, held):
                    return answer
                held, is_fresh = await self._mirror.fetch(run_id), True
            return None

    async def change_readable(self, run_id: str, decide: Callable[[StoredRun], T]) -> T | None:
        """Decide on a run as `change` does. A run with an unreadable head is left alone, as if it did not exist."""
        try:
            return await self.change(run_id, decide)
        except UNREADABLE:
            if run_id not in self._mirror.unreadable:
                raise
            return None

    async def _replace(self, run: StoredRun, held: Held) -> bool:
        mark = self._secrets.new_secret()[:24]
        cut = run.with_segment(mark)
        if cut is not None:
            segment, events = cut
            await self._bucket.put(segment.key, events)
        for key, chunks in run.streams.cut(run.head.run_id, mark):
            await self._bucket.put(key, chunks)
        run.older = None
        data = encode_run(run, mark)
        with self._noted(run.head.run_id):
            written = await self._bucket.replace(head_key(run.head.run_id), data, held.etag, mark.encode())
        if written is None:
            return False
        if written.data is not data:  # others have written since
            run = decode_run(written.data, head_key(run.head.run_id))
        self._mirror.put(run, written.etag)
        self.note(run, held.run.head.version, written.etag)
        return True

    async def create(self, run: StoredRun) -> bool:
        """Write the first head of a run. False: there is another run with its id."""
        mark = self._secrets.new_secret()[:24]
        data = encode_run(run, mark)
        with self._noted(run.head.run_id):
            written = await self._bucket.create(head_key(run.head.run_id), data, mark.encode())
        if written is None:
            return False
        if written.data is not data:
            run = decode_run(written.data, head_key(run.head.run_id))
        self._mirror.put(run, written.etag)
        self.note(run, 0, written.etag)
        return True

    async def delete(self, run: StoredRun, keys: Iterable[str]) -> None:
        """Delete a run: first what leads to it, then what belongs to it, then its head."""
        run_id = run.head.run_id
        segments = await self._bucket.list(storage_key("events", run_id))  # including those that no head names
        await self._bucket.delete([f"requests/{run.request_key}"])
        await self._bucket.delete([*(each.key for each in segments), *keys])
        await self._bucket.delete([head_key(run_id)])
        self._mirror.forget(run_id)
        self._changed[run_id] = ""

    # --- older events

    async def events(self, run: StoredRun, after: int, most: int) -> list[Event]:
        """Return events of a run, including those in segments."""
        found: list[Event] = []
        for segment in run.segments:
            if segment.last > after and len(found) < most:
                found += [event for event in await self._segment(run, segment.key) if event.run_seq > after]
        found += run.events[max(0, after + 1 - run.first_in_tail) :]
        return found[:most]

    async def _with_older(self, run: StoredRun) -> StoredRun:
        copy = run.copy()
        copy.older = [event for segment in run.segments for event in await self._segment(run, segment.key)]
        return copy

    async def _segment(self, run: StoredRun, key: str) -> list[Event]:
        if key not in self._segments:
            found = await self._bucket.get(key)
            if found is None:
                raise StoreCorrupt(f"the segment {key} is missing", key=key)
            while len(self._segments) >= SEGMENTS_KEPT:
                del self._segments[next(iter(self._segments))]
            self._segments[key] = decode_segment(run.head.run_id, found.data, key)
        return self._segments[key]

    # --- announcing

    def note(self, run: StoredRun, before: int, etag: str) -> None:
        """Note that a run was changed, to be announced with others."""
        self._changed[run.head.run_id] = etag
        new = [event for event in run.events if event.run_seq > before]
        if new:
            has_tasks = any(event.event_type.startswith("Task") for event in new)
            self._grown.append(port.Change(run.head.run_id, run.head.version, has_tasks))

    def note_found(self, run_id: str) -> None:
        """Note that an unannounced change of a run, or its deletion, was found."""
        held = self._mirror.held(run_id)
        if held is not None:
            self.note(held.run, held.run.first_in_tail - 1, held.etag)
        else:
            summary = self._mirror.summaries.get(run_id)
            self._changed[run_id] = "" if summary is None else summary.etag

    def note_unannounced(self, run_id: str) -> None:
        """Note a run to be announced, unless it is known to be as in its last announcement.

        This is for repeated requests: the process that changed the run may have been killed before announcing it.
        """
        if not self._mirror.is_announced(run_id):
            self.note_found(run_id)

    def note_node(self, node: str) -> None:
        """Note that a node's lease was granted or ended, to be announced with others."""
        self._nodes[node] = None

    def note_bulletin(self, kind: str) -> None:
        """Note that bulletins of a kind were put, to be announced with others."""
        self._bulletins[kind] = None

    @contextmanager
    def _noted(self, run_id: str) -> Iterator[None]:
        """Have a run read again and announced if its writer does not learn the outcome of its write."""
        try:
            yield
        except BaseException:  # including cancellation
            self._changed.setdefault(run_id, UNKNOWN)
            raise

    async def announce(self) -> bool:
        """Announce all changes noted by any call; return whether there were any."""
        async with self._announcing:
            if not self._changed and not self._nodes and not self._bulletins:
                return False
            changed, grown, nodes, bulletins = self._changed, self._grown, self._nodes, self._bulletins
            self._changed, self._grown, self._nodes, self._bulletins = {}, [], {}, {}
            try:
                await self._announce(changed, grown, nodes, bulletins)
            except BaseException:  # the next call announces it
                self._changed, self._nodes = changed | self._changed, nodes | self._nodes
                self._grown, self._bulletins = grown + self._grown, bulletins | self._bulletins
                raise
            return True

    async def _announce(
        self,
        changed: dict[str, str],
        grown: list[port.Change],
        nodes: dict[str, None],
        bulletins: dict[str, None],
    ) -> None:
        for run_id in [run_id for run_id, etag in changed.items() if etag == UNKNOWN]:
            held = await self._mirror.fetch_readable(run_id)
            changed[run_id] = self._mirror.unreadable.get(run_id, "") if held is None else held.etag
        run_ids = list(changed)
        for first in range(0, max(1, len(run_ids)), AT_ONCE):
            some = {run_id: changed[run_id] for run_id in run_ids[first : first + AT_ONCE]}
            if first:
                grown, nodes, bulletins = [], {}, {}
            await self._mirror.announce(some, grown, nodes, bulletins, self._now)


def _is_same(run: StoredRun, before: StoredRun) -> bool:
    return vars(run) == vars(before)
