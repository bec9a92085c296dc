"""The embedded store: one SQLite file, for production.

Write-ahead log and full synchronisation are on and verified: what a verb has confirmed survives a power cut. Any number
of processes on one machine may share the file; it must not be on a network file system.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from msgspec import Raw
from msgspec.structs import replace

from holdfast.clock import Clock, SystemClock
from holdfast.core.access import AccessToken
from holdfast.core.admission import RunLimit
from holdfast.core.audit import AuditEntry
from holdfast.core.bus import BusAlert, OutboxReplay, OutboxSettlement, Replayed, Sink, SinkProgress
from holdfast.core.call_limits import CallLimit
from holdfast.core.dead_letters import Settled, Settlement
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.messages import Message, SignalRequest
from holdfast.core.plans import RegisteredPlan
from holdfast.core.schedules import Schedule
from holdfast.core.streams import Appended, StreamAppend, StreamPage, StreamRead
from holdfast.errors import RequestTimedOut, StoreUnavailable
from holdfast.limits import Limits
from holdfast.store import port, search, sql, validation
from holdfast.store.health import Bounds, Facts
from holdfast.store.joined import JoinedStore
from holdfast.store.sqlite import (
    admission,
    bulletins,
    bus,
    call_limits,
    changefeed,
    commit,
    create,
    dead_letters,
    health,
    host_locks,
    inbox,
    leases,
    queries,
    retention,
    streams,
)
from holdfast.store.sqlite import audit as audit_log
from holdfast.store.sqlite import jobs as job_queue
from holdfast.store.sqlite import plans as stored_plans
from holdfast.store.sqlite import schedules as stored_schedules
from holdfast.store.sqlite import tokens as access_tokens
from holdfast.store.sqlite.connection import Database
from holdfast.store.sqlite.joined import JoinedSqlite, when_ended
from holdfast.store.sqlite.migrate import latest_version, migrate, not_migrated, schema_version
from holdfast.store.sqlite.readers import Readers
from holdfast.store.sqlite.transfer import SqliteTransfer
from holdfast.store.transfer import Transfer
from holdfast.store.types import creations_may_wake_others
from holdfast.store.wakeups import READY, News, Pending, SocketWakeups, Wakeups, news_of, news_of_starts

T = TypeVar("T")
Row = TypeVar("Row")

_FINDERS: dict[type, Callable[[sqlite3.Connection, Any, int], port.Found[Any]]] = {
    port.RunQuery: queries.find_runs,
    port.RunCountQuery: queries.count_runs,
    port.WaitQuery: queries.find_waits,
    port.EventQuery: queries.find_events,
    port.StreamQuery: streams.find,
    port.MailboxQuery: queries.find_mailbox,
    port.TaskQuery: queries.find_tasks,
    port.DeadLetterQuery: dead_letters.find,
    port.AuditQuery: audit_log.find,
    port.ScheduleQuery: stored_schedules.find,
    port.FinishedRunQuery: retention.find_finished,
    port.ArchivedRunQuery: retention.find_archived,
    port.SinkQuery: bus.find_sinks,
    port.OutboxQuery: bus.find_outbox,
    port.AlertQuery: bus.find_alerts,
    port.BusDeadLetterQuery: bus.find_letters,
}


class SqliteStore:
    """A store in one SQLite file. Create it with `open`."""

    def __init__(self, database: Database, clock: Clock, limits: Limits, wakeups: Wakeups | None = None) -> None:
        self.capabilities = port.Capabilities(
            conditional_batch=True, atomic_batch=True, read_after_write=True, scan_consistency="snapshot"
        )
        self.wakeups: Wakeups = wakeups or SocketWakeups(database.path)
        self._database = database
        self._clock = clock
        self._limits = limits
        self._is_migrated = False
        self._unsaid = Pending()
        self._watching: set[asyncio.Task[None]] = set()
        self._short_cut = commit.ShortCut()
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
        """Open the file, or create it. `busy_ms` is how long to wait for other processes before `StoreBusy`.

        `wakeups` replace the file's own.
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

    @property
    def transfer(self) -> Transfer:
        """Export and import of complete runs."""
        return SqliteTransfer(self._read, self._write)

    # --- RunStore

    async def now(self) -> Instant:
        self._check_migrated()
        return self._clock.now()

    async def create(
        self, runs: Sequence[port.NewRun], claim_for: str | None = None
    ) -> list[port.Created | port.Existing | port.Refused]:
        validation.check_batch(runs, self._limits)

        def work(db: sqlite3.Connection, now: Instant) -> list[port.Created | port.Existing | port.Refused]:
            if claim_for is not None:
                queries.check_node(db, claim_for, now)
            answers = create.create(db, runs, claim_for, self._limits, now)
            if creations_may_wake_others(runs, answers):
                self._notify_soon(news_of_starts(runs))  # it runs after the commit: nothing is awaited before
            return answers

        return await self._write(work)

    async def load(self, run_ids: Sequence[str]) -> list[port.LoadedRun | None]:
        validation.check_ids(run_ids, self._limits)
        return await self._read(lambda db, now: queries.load(db, run_ids, now))

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        validation.check_values(run_id=run_id, after=after)
        validation.check_bound("most_bytes", most_bytes)
        most = self._limits.page_items if limit is None else validation.check_page(limit)
        read = self._read if most_bytes is None else self._list
        return await read(lambda db, _: queries.read_events(db, run_id, after, most, most_bytes))

    async def deliver(
        self, items: Sequence[SignalRequest | Message]
    ) -> list[port.Accepted | port.Duplicate | port.Refused]:
        validation.check_batch(items, self._limits)
        return await self._write(lambda db, now: inbox.deliver(db, items, self._limits, now), says=READY)

    def joined(self, connection: Any) -> JoinedStore:
        self._check_migrated()
        return JoinedSqlite(self._database.path, connection, self._limits, self._clock.now, self._watch)

    def _watch(self, transaction: sqlite3.Connection) -> None:
        """Notify nodes when a caller's transaction has ended."""
        task = asyncio.create_task(when_ended(transaction, self.wakeups.notify), name="watch a transaction")
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def commit(self, turns: Sequence[port.Turn]) -> list[port.Committed | port.CommitConflict]:
        validation.check_batch(turns, self._limits)
        says = news_of(turns)
        return await self._write(
            lambda db, now: commit.commit(db, turns, self._limits, now, self._short_cut), says=says
        )

    async def claim(self, node: str, limit: int, plans: Sequence[port.Plan] | None = None) -> list[port.LoadedRun]:
        validation.check_values(node=node)
        validation.check_plans(plans)
        validation.check_page(limit)
        return await self._write(lambda db, now: leases.claim(db, node, limit, plans, now))

    async def renew(
        self, node: str, lease_ms: int, plans: Sequence[port.Plan] | None = None, is_start: bool = False
    ) -> Instant:
        validation.check_lease(node, lease_ms, plans)
        return await self._write(
            lambda db, now: leases.renew(db, node, lease_ms, plans, is_start, now), says=READY if is_start else None
        )

    def extend_lease(self, node: str, lease_ms: int) -> None:
        """Extend a current lease, from any thread, while the loop is blocked. Opens its own connection to the file."""
        try:
            with closing(sqlite3.connect(self._database.path, timeout=lease_ms / 1_000, isolation_level=None)) as db:
                now = self._clock.now()
                db.execute(leases.EXTEND, {"node": node, "until": now + lease_ms * 1_000, "now": now})
        except sqlite3.Error as problem:
            raise StoreUnavailable(f"{self._database.path}: the lease could not be extended: {problem}") from problem

    async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
        validation.check_values(node=node)
        validation.check_ids(run_ids or ())
        return await self._write(lambda db, now: leases.release(db, node, run_ids, now), says=READY)

    async def hand_over(self, node: str, run_ids: Sequence[str], to: str) -> list[str]:
        validation.check_values(node=node, to=to)
        validation.check_ids(run_ids, self._limits)
        return await self._write(lambda db, now: leases.hand_over(db, node, run_ids, to, now), says=READY)

    async def next_due(
        self, node: str, plans: Sequence[port.Plan] | None = None, queues: Sequence[str] = ()
    ) -> Instant | None:
        validation.check_values(node=node)
        validation.check_plans(plans)
        validation.check_names("queues", queues, self._limits)
        return await self._read(lambda db, now: leases.next_due(db, node, plans, queues, now))

    # --- JobQueue

    async def acquire_jobs(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> list[port.Job]:
        validation.check_acquire(node, queues, activities, limit, visible_ms, self._limits)
        if not queues or not activities:
            self._check_migrated()
            return []
        return await self._write(
            lambda db, now: job_queue.acquire(db, node, queues, activities, limit, visible_ms, now)
        )

    async def acquire_limited_jobs(
        self,
        node: str,
        queues: Sequence[str],
        activities: Sequence[str],
        limits: Mapping[str, CallLimit],
        limit: int,
        visible_ms: int,
    ) -> tuple[list[port.Job], Instant | None]:
        validation.check_acquire_limited(node, queues, activities, limits, limit, visible_ms, self._limits)
        if not await self._read(lambda db, _: call_limits.are_there(db, queues, activities)):
            return [], None
        return await self._write(
            lambda db, now: call_limits.acquire(db, node, queues, activities, limits, limit, visible_ms, now)
        )

    async def release_jobs(self, node: str, jobs: Sequence[port.Job]) -> int:
        validation.check_release(node, jobs, self._limits)
        return await self._write(lambda db, now: job_queue.release(db, node, jobs, now), says=READY)

    async def heartbeat(self, node: str, beats: Sequence[port.Heartbeat], visible_ms: int) -> list[bool]:
        validation.check_heartbeats(node, beats, visible_ms, self._limits)
        return await self._write(lambda db, now: job_queue.heartbeat(db, node, beats, visible_ms, now))

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> tuple[list[port.Admitted], Instant | None]:
        validation.check_admit(limits, limit, claim_for, self._limits)

        if not await self._read(lambda db, now: admission.has_queued_runs(db, claim_for, now)):
            return [], None
        admitted, next_at = await self._write(lambda db, now: admission.admit(db, limits, limit, claim_for, now))
        if admitted:
            self._notify_soon()
        return admitted, next_at

    # --- Index

    async def find(self, query: port.Query[Row]) -> port.Found[Row]:
        if isinstance(query, port.PlaceQuery):
            return cast(port.Found[Row], await self._find_places(query))
        finder = validation.finder_of(_FINDERS, query)
        most = self._page(query.limit)
        if isinstance(query, port.RunQuery) and search.is_driven(query):
            found = await self._search(query, most)
            if found is not None:
                return cast(port.Found[Row], found)
        if isinstance(query, port.RunQuery) and query.newest and query.look is None:
            return cast(port.Found[Row], await self._find_newest(query, most))
        read = self._read if sql.is_lookup(query) and not getattr(query, "newest", False) else self._list
        return await read(lambda db, _: finder(db, query, most))

    async def _find_places(self, query: port.PlaceQuery) -> port.Found[port.PlaceInLine]:
        validation.check_query(query)
        most = self._page(query.limit)
        return port.Found(await self._read(lambda db, now: call_limits.find_places(db, query, most, now)))

    async def _search(self, query: port.RunQuery, most: int) -> port.Found[port.RunHead] | None:
        """Return what a query that an index drives finds, or None if no index should."""
        found = port.Found[port.RunHead]()
        while True:
            part, left = search.part_of(query, found.cursor), most - len(found)
            more = await self._list(partial(queries.search_runs, part, left))
            if more is None:
                return None if found.cursor is None else found
            found = search.joined(found, more)
            if not search.goes_on(query, found, most):
                return found

    async def _find_newest(self, query: port.RunQuery, most: int) -> port.Found[port.RunHead]:
        """Search the newest runs window by window, so that one search does not keep a thread from others."""
        before = await self._list(lambda db, _: queries.number_before(db, query))
        window = before if queries.is_looked_up(query) else queries.WINDOW
        found = port.Found[port.RunHead]()
        while before > 0 and len(found) < most:
            part = replace(query, limit=most - len(found))
            more = await self._list(partial(queries.newest_runs, part, before, before - window))
            found += more
            if more.unreadable:  # the window may have more than requested
                return port.Found(found, more.cursor, more.unreadable)
            before -= window
            await asyncio.sleep(0)
        return found

    async def find_nodes(self) -> list[port.NodePlans]:
        return await self._read(leases.find_nodes)

    async def find_orphaned(self, late_ms: int) -> list[port.OrphanedDefinition]:
        validation.check_late(late_ms)
        return await self._read(lambda db, now: leases.find_orphaned(db, late_ms, now))

    async def find_definitions(self, plans: Sequence[port.Plan]) -> list[WorkflowDeclaration | None]:
        validation.check_plans(plans)
        return await self._read(lambda db, _: leases.find_definitions(db, plans))

    async def changes(self, cursor: str = "", limit: int = 1_000) -> port.Changes:
        most = self._page(limit)
        return await self._read(lambda db, _: changefeed.changes(db, cursor, most))

    async def stats(self) -> port.Stats:
        return await self._list(queries.stats)

    async def health(self, bounds: Bounds, *, thorough: bool = False) -> Facts:
        self._check_migrated()
        return await health.examine(self._database, bounds, self._clock.now(), thorough=thorough)

    # --- Admin

    async def migrate(self) -> int:
        path = self._database.path
        version = await self._database.write(lambda db: migrate(db, path, self._clock.now()))
        self._is_migrated = True
        return version

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        try:
            try:
                await asyncio.gather(self._readers.close(), self._database.finish())  # each within its bound
            finally:
                await self._database.close()  # after the readers, which may not write and so would leave the log behind
            self._notify()
        finally:
            self.wakeups.close()

    async def publish_definitions(self, definitions: Sequence[WorkflowDeclaration]) -> None:
        validation.check_definitions(definitions, self._limits)
        await self._write(lambda db, _: leases.publish_definitions(db, definitions))

    async def settle_dead_letters(
        self, ids: Sequence[str], action: Settlement, actor: str = "", audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        validation.check_settlement(ids, action, actor, self._limits)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        return await self._write(lambda db, now: dead_letters.settle(db, ids, action, actor, now, audit), says=READY)

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        validation.check_audit(entries, self._limits)
        await self._write(lambda db, now: audit_log.append(db, [replace(entry, at=now) for entry in entries]))

    async def purge(self, policy: port.PurgePolicy, audit: AuditEntry | None = None) -> port.PurgeReport:
        validation.check_purge(policy, audit, self._limits)
        if policy.run_ids and not policy.dry_run:
            with suppress(RequestTimedOut):  # then it is read within the transaction
                await self._list(lambda db, _: retention.warm(db, policy))
        return await self._write(lambda db, now: retention.purge(db, policy, now, audit))

    async def acquire_lock(self, name: str, owner: str, lease_ms: int) -> port.HostLock | None:
        validation.check_lock(name, owner, lease_ms)
        return await self._write(lambda db, now: host_locks.acquire(db, name, owner, lease_ms, now))

    async def release_lock(self, name: str, owner: str, epoch: int) -> bool:
        validation.check_lock(name, owner, epoch=epoch)
        return await self._write(lambda db, _: host_locks.release(db, name, owner, epoch))

    async def find_locks(self) -> list[port.HostLock]:
        return await self._read(lambda db, _: host_locks.find(db))

    # --- TokenStore

    async def put_tokens(self, tokens: Sequence[AccessToken], audit: Sequence[AuditEntry] = ()) -> list[AccessToken]:
        validation.check_tokens(tokens, self._limits)
        validation.check_audit(audit, self._limits)

        def work(db: sqlite3.Connection, now: Instant) -> list[AccessToken]:
            audit_log.append(db, [replace(entry, at=now) for entry in audit])
            return access_tokens.put(db, tokens, now)

        return await self._write(work)

    async def find_tokens(self, query: port.TokenQuery) -> port.Found[AccessToken]:
        validation.check_query(query)
        most = self._page(query.limit)
        return await self._read(lambda db, _: access_tokens.find(db, query, most))

    async def put_key(self, name: str, key: str) -> str:
        validation.check_key(name, key)
        return await self._write(lambda db, _: access_tokens.put_key(db, name, key))

    async def get_key(self, name: str) -> str | None:
        validation.check_names("name", [name])
        return await self._read(lambda db, _: access_tokens.get_key(db, name))

    # --- PlanStore

    async def put_plan(self, tenant: str, sha256: str, body: bytes) -> None:
        validation.check_plan_body(tenant, sha256, body)
        await self._write(lambda db, now: stored_plans.put(db, tenant, sha256, body, now))

    async def get_plan(self, tenant: str, sha256: str) -> bytes | None:
        validation.check_plan_body(tenant, sha256)
        return await self._read(lambda db, _: stored_plans.get(db, tenant, sha256))

    async def register_plan(self, plan: RegisteredPlan, audit: AuditEntry | None = None) -> RegisteredPlan:
        validation.check_registered_plan(plan)
        validation.check_audit(() if audit is None else (audit,), self._limits)

        def work(db: sqlite3.Connection, now: Instant) -> RegisteredPlan:
            stored = stored_plans.register(db, plan, now)
            audit_log.append(db, [] if audit is None else [replace(audit, at=now)])
            return stored

        return await self._write(work)

    async def find_plans(self, query: port.PlanQuery) -> port.Found[RegisteredPlan]:
        validation.check_query(query)
        most = self._page(query.limit)
        return await self._read(lambda db, _: stored_plans.find(db, query, most))

    # --- BusStore

    async def put_sink(self, sink: Sink, audit: AuditEntry | None = None) -> Sink:
        validation.check_put_sink(sink, audit, self._limits)

        def work(db: sqlite3.Connection, now: Instant) -> Sink:
            stored = bus.put_sink(db, sink, now)
            audit_log.append(db, [] if audit is None else [replace(audit, at=now)])
            return stored

        return await self._write(work, says=READY)

    async def remove_sink(self, name: str, audit: AuditEntry | None = None) -> bool:
        validation.check_sink_name(name, audit, self._limits)

        def work(db: sqlite3.Connection, now: Instant) -> bool:
            is_removed = bus.remove_sink(db, name)
            audit_log.append(db, [replace(audit, at=now)] if is_removed and audit is not None else [])
            return is_removed

        return await self._write(work)

    async def settle_outbox(self, sink: str, items: Sequence[OutboxSettlement], progress: SinkProgress) -> list[bool]:
        validation.check_settle_outbox(sink, items, progress, self._limits)
        return await self._write(lambda db, now: bus.settle(db, sink, items, progress, now))

    async def replay_outbox(self, asked: OutboxReplay, audit: AuditEntry | None = None) -> Replayed:
        validation.check_replay(asked, audit, self._limits)

        def work(db: sqlite3.Connection, now: Instant) -> Replayed:
            replayed = bus.replay(db, asked, now)
            audit_log.append(db, [] if audit is None else [replace(audit, at=now)])
            return replayed

        return await self._write(work, says=READY)

    async def raise_alerts(self, alerts: Sequence[BusAlert]) -> int:
        validation.check_alerts(alerts, self._limits)
        return await self._write(lambda db, now: bus.raise_alerts(db, alerts, now), says=READY)

    async def settle_bus_dead_letters(
        self, ids: Sequence[str], action: Settlement, audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        validation.check_settlement(ids, action, "", self._limits)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        return await self._write(lambda db, now: bus.settle_letters(db, ids, action, now, audit), says=READY)

    # --- BulletinStore

    async def put_bulletins(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int) -> list[bool]:
        validation.check_bulletins(kind, bodies, keep_ms, self._limits)
        return await self._write(lambda db, now: bulletins.put(db, kind, bodies, keep_ms, now), says=READY)

    async def find_bulletins(self, query: port.BulletinQuery) -> port.Found[port.Bulletin]:
        validation.check_query(query)
        most = self._page(query.limit)
        return await self._read(lambda db, now: bulletins.find(db, query, most, now))

    # --- StreamStore

    async def append_streams(self, items: Sequence[StreamAppend]) -> list[Appended | port.Refused]:
        validation.check_batch(items, self._limits)
        answers = await self._write(lambda db, now: streams.append(db, items, self._limits, now))
        self.wakeups.notify("streams")
        return answers

    async def read_streams(self, items: Sequence[StreamRead]) -> list[StreamPage | None]:
        validation.check_stream_reads(items, self._limits)
        return await self._list(lambda db, _: streams.read(db, items))

    # --- ScheduleStore

    async def commit_schedule(
        self,
        schedule: Schedule,
        expected_revision: int,
        starts: Sequence[port.NewRun] = (),
        audit: AuditEntry | None = None,
    ) -> tuple[Schedule, list[port.Created | port.Existing | port.Refused]]:
        validation.check_committed_schedule(schedule, expected_revision, starts, audit, self._limits)

        def work(
            db: sqlite3.Connection, now: Instant
        ) -> tuple[Schedule, list[port.Created | port.Existing | port.Refused]]:
            stored, is_new = stored_schedules.commit(db, schedule, expected_revision, now)
            if not is_new:
                return stored, [*stored_schedules.started_before(db, starts)]
            audit_log.append(db, [] if audit is None else [replace(audit, at=now)])
            return stored, create.create(db, starts, None, self._limits, now) if starts else []

        return await self._write(work, says=READY)

    async def delete_schedule(
        self, place: tuple[str, str, str, str], expected_revision: int, audit: AuditEntry | None = None
    ) -> bool:
        validation.check_names("schedule", place)

        def work(db: sqlite3.Connection, now: Instant) -> bool:
            is_deleted = stored_schedules.delete(db, place, expected_revision)
            audit_log.append(db, [] if audit is None or not is_deleted else [replace(audit, at=now)])
            return is_deleted

        return await self._write(work)

    # --- access to the file

    def _page(self, limit: int) -> int:
        return min(validation.check_page(limit), self._limits.page_items)

    async def _read(self, work: Callable[[sqlite3.Connection, Instant], T]) -> T:
        self._check_migrated()
        return await self._database.read(lambda db: work(db, self._clock.now()))

    async def _list(self, work: Callable[[sqlite3.Connection, Instant], T]) -> T:
        """Read in a thread what may take long, so that the event loop is not delayed."""
        self._check_migrated()
        now = self._clock.now()
        return await self._readers.read(lambda db: work(db, now))

    async def _write(self, work: Callable[[sqlite3.Connection, Instant], T], *, says: News | None = None) -> T:
        """Do the work in a transaction. The time is read while the lock is held, so that it grows with each commit."""
        self._check_migrated()
        return await self._database.write(
            lambda db: work(db, self._clock.now()), then=None if says is None else lambda: self._notify_soon(says)
        )

    def _check_migrated(self) -> None:
        self._database.check_open()
        if not self._is_migrated:
            raise not_migrated(self._database.path)

    def _notify_soon(self, news: News = READY) -> None:
        """Notify once for all the work of this iteration of the event loop."""
        if not self._unsaid:
            asyncio.get_running_loop().call_soon(self._notify)
        self._unsaid.add(*news)

    def _notify(self) -> None:
        if self._unsaid:
            self.wakeups.notify(*self._unsaid.take())
