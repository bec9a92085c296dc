"""The embedded store: one SQLite file, for production.

Write-ahead log and full synchronisation are on and verified: what a verb has answered survives a power cut. Any
number of processes on one machine may share the file; a network file system may not hold it.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from holdfast.core.access import AccessToken, TokenQuery
from holdfast.core.audit import AuditEntry, AuditQuery
from holdfast.core.declared import PublishedDefinition
from holdfast.core.events import Event
from holdfast.core.gates import RunLimit
from holdfast.core.instants import Instant
from holdfast.core.letters import DeadLetter, DeadLetterQuery, Settled, Settlement
from holdfast.core.messages import Message, Signal, SignalRequest
from holdfast.core.records import Task, Wait
from holdfast.errors import StoreUnavailable
from holdfast.limits import Limits
from holdfast.ports import Clock, SystemClock
from holdfast.store import guards, port
from holdfast.store.examining import Bounds, Facts
from holdfast.store.sqlite import (
    access,
    changing,
    committing,
    creating,
    delivering,
    examining,
    finding,
    gates,
    letters,
    owning,
    queueing,
    reading,
    retention,
)
from holdfast.store.sqlite import audit as audit_log
from holdfast.store.sqlite import definitions as definitions_
from holdfast.store.sqlite.database import Database
from holdfast.store.sqlite.migrate import latest_version, migrate, not_migrated, schema_version
from holdfast.store.sqlite.readers import Readers
from holdfast.store.sqlite.wakeups import SocketWakeups
from holdfast.store.wakeups import Wakeups

T = TypeVar("T")


class SqliteStore:
    """A store in one SQLite file. Make it with `open`."""

    def __init__(self, database: Database, clock: Clock, limits: Limits, wakeups: Wakeups | None = None) -> None:
        self.capabilities = port.Capabilities(
            conditional_batch=True, atomic_batch=True, read_after_write=True, scan_consistency="snapshot"
        )
        self.wakeups: Wakeups = wakeups or SocketWakeups(database.path)
        self._database = database
        self._clock = clock
        self._limits = limits
        self._is_migrated = False
        self._will_ring = False
        self._short_cut = committing.ShortCut()
        self._readers = Readers(database.path)

    @classmethod
    async def open(
        cls,
        path: str | Path,
        *,
        clock: Clock | None = None,
        limits: Limits | None = None,
        busy_ms: int = 30_000,
        wakeups: Wakeups | None = None,
    ) -> "SqliteStore":
        """Open the file, or begin a new one. `busy_ms` is how long to wait for other processes before `StoreBusy`.

        `wakeups` ring instead of the file's own.
        """
        database = await Database.open(Path(path), busy_ms)
        store = cls(database, clock or SystemClock(), limits or Limits(), wakeups)
        try:
            present = await database.read(lambda db: schema_version(db, database.path))
            store._is_migrated = present >= latest_version()
        except BaseException:
            await store.close()
            raise
        return store

    async def migrate(self) -> int:
        path = self._database.path
        version = await self._database.write(lambda db: migrate(db, path, self._clock.now()))
        self._is_migrated = True
        return version

    async def close(self) -> None:
        try:
            try:
                await self._readers.close()
            finally:
                await self._database.close()
            self._ring()
        finally:
            self.wakeups.close()

    async def now(self) -> Instant:
        self._check_migrated()
        return self._clock.now()

    # --- writing

    async def create(
        self, runs: Sequence[port.NewRun], claim_for: str | None = None
    ) -> list[port.Created | port.Existing | port.Refused]:
        guards.check_batch(runs, self._limits)

        def work(db: sqlite3.Connection, now: Instant) -> list[port.Created | port.Existing | port.Refused]:
            if claim_for is not None:
                owning.check_node(db, claim_for, now)
            return creating.create(db, runs, claim_for, self._limits, now, self._short_cut.learn)

        return await self._write(work, rings=True)

    async def deliver(
        self, items: Sequence[SignalRequest | Message]
    ) -> list[port.Accepted | port.Duplicate | port.Refused]:
        guards.check_batch(items, self._limits)
        return await self._write(lambda db, now: delivering.deliver(db, items, self._limits, now), rings=True)

    async def commit(self, turns: Sequence[port.Turn]) -> list[port.Committed | port.CommitConflict]:
        guards.check_batch(turns, self._limits)
        rings = any(port.may_wake_others(turn) for turn in turns)
        return await self._write(
            lambda db, now: committing.commit(db, turns, self._limits, now, self._short_cut), rings=rings
        )

    async def purge(self, policy: port.PurgePolicy, audit: AuditEntry | None = None) -> port.PurgeReport:
        guards.check_purge(policy, audit, self._limits)
        return await self._write(lambda db, now: retention.purge(db, policy, now, audit))

    # --- owning

    async def claim(self, node: str, limit: int, plans: Sequence[port.Plan] | None = None) -> list[port.LoadedRun]:
        guards.check_values(node=node)
        guards.check_plans(plans)
        guards.check_page(limit)
        return await self._write(lambda db, now: owning.claim(db, node, limit, plans, now))

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> tuple[list[port.Admitted], Instant | None]:
        guards.check_admit(limits, limit, claim_for, self._limits)

        if not await self._read(lambda db, now: gates.is_awaited(db, claim_for, now)):
            return [], None
        admitted, next_at = await self._write(lambda db, now: gates.admit(db, limits, limit, claim_for, now))
        if admitted:
            self._ring_soon()
        return admitted, next_at

    async def renew(
        self, node: str, lease_ms: int, plans: Sequence[port.Plan] | None = None, is_start: bool = False
    ) -> Instant:
        guards.check_lease(node, lease_ms, plans)
        return await self._write(lambda db, now: owning.renew(db, node, lease_ms, plans, is_start, now), rings=is_start)

    def extend_lease(self, node: str, lease_ms: int) -> None:
        """Extend a lease that is current, from any thread, while the loop is held up. Opens the file for itself."""
        try:
            with closing(sqlite3.connect(self._database.path, timeout=lease_ms / 1_000, isolation_level=None)) as db:
                now = self._clock.now()
                db.execute(owning.EXTEND, {"node": node, "until": now + lease_ms * 1_000, "now": now})
        except sqlite3.Error as problem:
            raise StoreUnavailable(f"{self._database.path}: the lease could not be extended: {problem}") from problem

    async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
        guards.check_values(node=node)
        guards.check_ids(run_ids or ())
        return await self._write(lambda db, now: owning.release(db, node, run_ids, now), rings=True)

    async def hand_over(self, node: str, run_ids: Sequence[str], to: str) -> list[str]:
        guards.check_values(node=node, to=to)
        guards.check_ids(run_ids, self._limits)
        return await self._write(lambda db, now: owning.hand_over(db, node, run_ids, to, now), rings=True)

    async def find_nodes(self) -> list[port.NodePlans]:
        return await self._read(owning.find_nodes)

    async def next_due(
        self, node: str, plans: Sequence[port.Plan] | None = None, queues: Sequence[str] = ()
    ) -> Instant | None:
        guards.check_values(node=node)
        guards.check_plans(plans)
        guards.check_names("queues", queues, self._limits)
        return await self._read(lambda db, now: owning.next_due(db, node, plans, queues, now))

    async def find_missing(self, late_ms: int) -> list[port.Missing]:
        guards.check_late(late_ms)
        return await self._read(lambda db, now: owning.find_missing(db, late_ms, now))

    # --- carrying out activities

    async def take(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> list[port.Job]:
        guards.check_take(node, queues, activities, limit, visible_ms, self._limits)
        if not queues or not activities:
            self._check_migrated()
            return []
        return await self._write(lambda db, now: queueing.take(db, node, queues, activities, limit, visible_ms, now))

    async def release_jobs(self, node: str, jobs: Sequence[port.Job]) -> int:
        guards.check_release(node, jobs, self._limits)
        return await self._write(lambda db, now: queueing.release(db, node, jobs, now), rings=True)

    async def beat(self, node: str, beats: Sequence[port.Beat], visible_ms: int) -> list[bool]:
        guards.check_beats(node, beats, visible_ms, self._limits)
        return await self._write(lambda db, now: queueing.beat(db, node, beats, visible_ms, now))

    # --- reading

    async def load(self, run_ids: Sequence[str]) -> list[port.LoadedRun | None]:
        guards.check_ids(run_ids, self._limits)
        return await self._read(lambda db, now: reading.load(db, run_ids, now))

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        guards.check_values(run_id=run_id, after=after)
        guards.check_bound("most_bytes", most_bytes)
        most = self._limits.page_items if limit is None else guards.check_page(limit)
        read = self._read if most_bytes is None else self._list
        return await read(lambda db, _: reading.read_events(db, run_id, after, most, most_bytes))

    async def find_runs(self, query: port.RunQuery) -> port.Found[port.RunHead]:
        guards.check_query(query)
        most = self._page(query.limit)
        if not query.newest:
            read = self._read if query.run_ids is not None else self._list
            return await read(lambda db, _: finding.find_runs(db, query, most))
        if query.look is not None:
            return await self._list(lambda db, _: finding.look_at_newest(db, query, most))
        before = await self._list(lambda db, _: finding.place_of_newest(db, query))
        window = before if finding.is_looked_up(query) else finding.WINDOW
        found = port.Found[port.RunHead]()
        while before > 0 and len(found) < most:
            part = replace(query, limit=most - len(found))
            more = await self._list(partial(finding.newest_runs, part, before, before - window))
            found += more
            if more.unreadable:  # the window may have more than was asked for
                return port.Found(found, more.place, more.unreadable)
            before -= window
            await asyncio.sleep(0)
        return found

    async def find_waits(self, query: port.WaitQuery) -> list[Wait]:
        guards.check_query(query)
        most = self._page(query.limit)
        read = self._list if query.run_id is None else self._read
        return await read(lambda db, _: reading.find_waits(db, query, most))

    async def find_mailbox(self, query: port.MailboxQuery) -> list[Signal]:
        guards.check_query(query)
        most = self._page(query.limit)
        read = self._list if query.run_id is None or query.most_bytes is not None else self._read
        return await read(lambda db, _: reading.find_mailbox(db, query, most))

    async def find_tasks(self, query: port.TaskQuery) -> port.Found[Task]:
        guards.check_query(query)
        most = self._page(query.limit)
        read = self._list if query.run_id is None and query.task_id is None else self._read
        return await read(lambda db, _: reading.find_tasks(db, query, most))

    async def find_dead_letters(self, query: DeadLetterQuery) -> list[DeadLetter]:
        guards.check_query(query)
        most = self._page(query.limit)
        read = self._list if query.run_id is None and query.letter_id is None else self._read
        return await read(lambda db, _: letters.find(db, query, most))

    async def settle_dead_letters(
        self, ids: Sequence[str], action: Settlement, actor: str = "", audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        guards.check_settlement(ids, action, actor, self._limits)
        guards.check_audit(() if audit is None else (audit,), self._limits)
        return await self._write(lambda db, now: letters.settle(db, ids, action, actor, now, audit), rings=True)

    async def publish_definitions(self, definitions: Sequence[PublishedDefinition]) -> None:
        guards.check_definitions(definitions, self._limits)
        await self._write(lambda db, _: definitions_.publish(db, definitions))

    async def find_definitions(self, plans: Sequence[port.Plan]) -> list[PublishedDefinition | None]:
        guards.check_plans(plans)
        return await self._read(lambda db, _: definitions_.find(db, plans))

    async def keep_tokens(self, tokens: Sequence[AccessToken], audit: Sequence[AuditEntry] = ()) -> list[AccessToken]:
        guards.check_tokens(tokens, self._limits)
        guards.check_audit(audit, self._limits)

        def work(db: sqlite3.Connection, now: Instant) -> list[AccessToken]:
            audit_log.append(db, [replace(entry, at=now) for entry in audit])
            return access.keep(db, tokens, now)

        return await self._write(work)

    async def keep_key(self, name: str, key: str) -> str:
        guards.check_key(name, key)
        return await self._write(lambda db, _: access.keep_key(db, name, key))

    async def find_tokens(self, query: TokenQuery) -> list[AccessToken]:
        guards.check_query(query)
        most = self._page(query.limit)
        return await self._read(lambda db, _: access.find(db, query, most))

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        guards.check_audit(entries, self._limits)
        await self._write(lambda db, now: audit_log.append(db, [replace(entry, at=now) for entry in entries]))

    async def find_audit(self, query: AuditQuery) -> list[AuditEntry]:
        guards.check_query(query)
        most = self._page(query.limit)
        return await self._list(lambda db, _: audit_log.find(db, query, most))

    async def changes(self, place: str = "", limit: int = 1_000) -> port.Changes:
        most = self._page(limit)
        return await self._read(lambda db, _: changing.changes(db, place, most))

    async def stats(self) -> port.Stats:
        return await self._list(reading.stats)

    async def examine(self, bounds: Bounds, *, thorough: bool = False) -> Facts:
        self._check_migrated()
        return await examining.examine(self._database, bounds, self._clock.now(), thorough=thorough)

    # --- how work reaches the file

    def _page(self, limit: int) -> int:
        return min(guards.check_page(limit), self._limits.page_items)

    async def _read(self, work: Callable[[sqlite3.Connection, Instant], T]) -> T:
        self._check_migrated()
        return await self._database.read(lambda db: work(db, self._clock.now()))

    async def _list(self, work: Callable[[sqlite3.Connection, Instant], T]) -> T:
        """Read what may take long in a thread beside the event loop, so that everything else goes on."""
        self._check_migrated()
        now = self._clock.now()
        return await self._readers.read(lambda db: work(db, now))

    async def _write(self, work: Callable[[sqlite3.Connection, Instant], T], *, rings: bool = False) -> T:
        """Do the work in a transaction; the time is read when the lock is held, so that it grows with the commits."""
        self._check_migrated()
        return await self._database.write(
            lambda db: work(db, self._clock.now()), then=self._ring_soon if rings else None
        )

    def _check_migrated(self) -> None:
        self._database.check_open()
        if not self._is_migrated:
            raise not_migrated(self._database.path)

    def _ring_soon(self) -> None:
        """Ring once for all the work of this round of the event loop."""
        if not self._will_ring:
            self._will_ring = True
            asyncio.get_running_loop().call_soon(self._ring)

    def _ring(self) -> None:
        if self._will_ring:
            self._will_ring = False
            self.wakeups.ring()
