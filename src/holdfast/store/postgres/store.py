"""The PostgreSQL store, for many nodes on many machines.

Each verb is one round trip and one transaction for a whole batch, except in a few rare cases. The time is the server's.
Nothing depends on the session in which a statement runs, so a pooler in transaction mode may be in between. See
`docs/adr/0016-postgresql.md`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

from msgspec import Raw
from msgspec.structs import replace

from holdfast.clock import Clock
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
from holdfast.limits import LIST_S, Limits
from holdfast.store import port, sql, validation
from holdfast.store.health import Bounds, Facts
from holdfast.store.joined import JoinedStore
from holdfast.store.postgres import (
    admission,
    bulletins,
    bus,
    changefeed,
    dead_letters,
    health,
    host_locks,
    leases,
    queries,
    retention,
    streams,
)
from holdfast.store.postgres import audit as audit_log
from holdfast.store.postgres import jobs as job_queue
from holdfast.store.postgres import plans as stored_plans
from holdfast.store.postgres import schedules as stored_schedules
from holdfast.store.postgres import tokens as access_tokens
from holdfast.store.postgres.address import parse_address
from holdfast.store.postgres.columns import askable
from holdfast.store.postgres.commit import Committing
from holdfast.store.postgres.create import create_on
from holdfast.store.postgres.inbox import deliver
from holdfast.store.postgres.joined import DATABASE, JoinedPostgres
from holdfast.store.postgres.migrate import latest_version, migrate, not_migrated, schema_version
from holdfast.store.postgres.pool import Pool, Transaction
from holdfast.store.postgres.transfer import PostgresTransfer
from holdfast.store.postgres.wakeups import NotifyWakeups
from holdfast.store.transfer import Transfer
from holdfast.store.types import creations_may_wake_others
from holdfast.store.wakeups import READY, News, Pending, Wakeups, news_of, news_of_starts

T = TypeVar("T")
Row = TypeVar("Row")

_FINDERS: dict[type, Callable[[Pool, Any, int], Coroutine[Any, Any, port.Found[Any]]]] = {
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

FRESH_S = 1.0
"""For how long the local clock extrapolates the server's time before it is queried again."""

FLUSH_S = 1.0
"""How long closing waits for a wake-up to be sent."""


class PostgresStore:
    """A store in one schema of a PostgreSQL database. Create it with `open`."""

    def __init__(self, pool: Pool, clock: Clock | None, limits: Limits, wakeups: Wakeups) -> None:
        self.capabilities = port.Capabilities(
            conditional_batch=True,
            atomic_batch=True,
            read_after_write=True,
            scan_consistency="snapshot",
            commits_aside=True,
        )
        self.wakeups = wakeups
        self._pool = pool
        self._lists = Pool(pool.address, pool.busy_ms, LIST_S)
        self._clock = clock
        self._limits = limits
        self._starts = leases.Starts()
        self._is_migrated = False
        self._unsaid = Pending()
        self._named: str | None = None
        self._latest: Instant = 0
        self._heard: tuple[Instant, float] | None = None
        self._asking: asyncio.Task[Instant] | None = None

    @classmethod
    async def open(
        cls,
        address: str,
        *,
        clock: Clock | None = None,
        limits: Limits | None = None,
        busy_ms: int = 30_000,
        wakeups: Wakeups | None = None,
    ) -> "PostgresStore":
        """Open the store at `postgresql://user@host/database?schema=holdfast`.

        `busy_ms` is how long transient errors are retried. `clock` replaces the server's time.
        """
        place = parse_address(address)
        pool = Pool(place, busy_ms)
        await pool.check()
        store = cls(pool, clock, limits or Limits(), wakeups or NotifyWakeups(place))
        try:
            store._is_migrated = await schema_version(pool, place.schema, place.shown) >= latest_version()
        except BaseException:
            await store.close()
            raise
        return store

    @property
    def transfer(self) -> Transfer:
        """Export and import of complete runs."""
        return PostgresTransfer(self._pool, self.now)

    # --- RunStore

    async def now(self) -> Instant:
        """Return the server's time, extrapolated from the last answer that contained it if that is recent.

        An answer takes time to arrive, so this is never ahead of the server; and it never goes back.
        """
        self._check_migrated()
        if self._clock is not None:
            return self._clock.now()
        loop_time = asyncio.get_running_loop().time()
        if self._heard is None or loop_time - self._heard[1] > FRESH_S:
            if self._asking is None:  # concurrent callers share the answer
                self._asking = asyncio.create_task(self._ask_time(), name="time of the server")
                self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
            now = await asyncio.shield(self._asking)
        else:
            now = self._heard[0] + int((loop_time - self._heard[1]) * 1_000_000)
        self._latest = max(self._latest, now)
        return self._latest

    async def _ask_time(self) -> Instant:
        try:
            [[now]] = await self._pool.finished(self._pool.fetch("SELECT holdfast.time_1(NULL)"))
        finally:
            self._asking = None
        self._hear(now)
        return int(now)

    async def create(
        self, runs: Sequence[port.NewRun], claim_for: str | None = None
    ) -> list[port.Created | port.Existing | port.Refused]:
        validation.check_batch(runs, self._limits)
        pool = self._ready()

        async def create() -> list[port.Created | port.Existing | port.Refused]:
            answers = await create_on(pool, runs, claim_for, self._limits, self._asked())
            if creations_may_wake_others(runs, answers):
                self._notify_soon(news_of_starts(runs))
            return answers

        return await self._pool.finished(create())

    async def load(self, run_ids: Sequence[str]) -> list[port.LoadedRun | None]:
        validation.check_ids(run_ids, self._limits)
        return await self._pool.finished(queries.load(self._ready(), run_ids, self._asked()))

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        validation.check_values(run_id=run_id, after=after)
        validation.check_bound("most_bytes", most_bytes)
        most = self._limits.page_items if limit is None else validation.check_page(limit)
        if most_bytes is not None:
            return await queries.read_events(self._listing(), run_id, after, most, most_bytes)
        return await self._pool.finished(queries.read_events(self._ready(), run_id, after, most))

    async def deliver(
        self, items: Sequence[SignalRequest | Message]
    ) -> list[port.Accepted | port.Duplicate | port.Refused]:
        validation.check_batch(items, self._limits)
        work = deliver(self._ready(), items, self._limits, self._asked())
        return await self._pool.finished(self._then_notify(work))

    def joined(self, connection: Any) -> JoinedStore:
        return JoinedPostgres(self._ready(), connection, self._limits, self._asked(), self._database)

    async def _database(self) -> str:
        """Return the identity of this store's schema among all servers."""
        if self._named is None:
            [[self._named]] = await self._pool.finished(self._pool.fetch(DATABASE, self._pool.address.schema))
        return self._named

    async def commit(self, turns: Sequence[port.Turn]) -> list[port.Committed | port.CommitConflict]:
        validation.check_batch(turns, self._limits)
        if not turns:
            self._check_migrated()
            return []
        work = Committing(self._ready(), turns, self._limits, self._asked())
        news = news_of(turns)
        answers = await self._pool.finished(work.run() if news is None else self._then_notify(work.run(), news))
        if work.heard is not None:
            self._hear(work.heard)
        return answers

    async def claim(self, node: str, limit: int, plans: Sequence[port.Plan] | None = None) -> list[port.LoadedRun]:
        validation.check_values(node=node)
        validation.check_plans(plans)
        validation.check_page(limit)
        work = leases.claim(self._ready(), self._starts, node, limit, plans, self._asked())
        now, claimed = await self._pool.finished(work)
        self._hear(now)
        return claimed

    async def renew(
        self, node: str, lease_ms: int, plans: Sequence[port.Plan] | None = None, is_start: bool = False
    ) -> Instant:
        validation.check_lease(node, lease_ms, plans)
        now, lease_until = await self._pool.finished(
            leases.renew(self._ready(), node, lease_ms, plans, is_start, self._asked())
        )
        self._hear(now)
        if is_start:
            self._notify_soon()
        return lease_until

    def extend_lease(self, node: str, lease_ms: int) -> None:
        """Extend a current lease, from any thread, while the loop is blocked, on a separate connection."""
        now = None if self._clock is None else self._clock.now()
        asyncio.run(leases.extend(self._pool.address, node, lease_ms, now))

    async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
        validation.check_values(node=node)
        validation.check_ids(run_ids or ())
        named = None if run_ids is None else list(map(askable, run_ids))
        work = self._ready().fetch(leases.RELEASE, self._asked(), askable(node), named)
        [[_, freed]] = await self._pool.finished(self._then_notify(work))
        return int(freed)

    async def hand_over(self, node: str, run_ids: Sequence[str], to: str) -> list[str]:
        validation.check_values(node=node, to=to)
        validation.check_ids(run_ids, self._limits)
        names = list(map(askable, run_ids))
        work = self._ready().fetch(leases.HAND_OVER, self._asked(), askable(node), names, askable(to))
        [[given]] = await self._pool.finished(self._then_notify(work))
        return sorted(given)

    async def next_due(
        self, node: str, plans: Sequence[port.Plan] | None = None, queues: Sequence[str] = ()
    ) -> Instant | None:
        validation.check_values(node=node)
        validation.check_plans(plans)
        validation.check_names("queues", queues, self._limits)
        work = leases.next_due(self._ready(), self._starts, node, plans, queues, self._asked())
        now, due_at = await self._pool.finished(work)
        self._hear(now)
        return due_at

    # --- JobQueue

    async def acquire_jobs(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> list[port.Job]:
        validation.check_acquire(node, queues, activities, limit, visible_ms, self._limits)
        if not queues or not activities:
            self._check_migrated()
            return []
        return await self._pool.finished(
            job_queue.acquire(self._ready(), node, queues, activities, limit, visible_ms, self._asked())
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
        work = job_queue.acquire_limited(
            self._ready(), node, queues, activities, limits, limit, visible_ms, self._asked()
        )
        return await self._pool.finished(work)

    async def release_jobs(self, node: str, jobs: Sequence[port.Job]) -> int:
        validation.check_release(node, jobs, self._limits)
        work = job_queue.release(self._ready(), node, jobs, self._asked())
        return await self._pool.finished(self._then_notify(work))

    async def heartbeat(self, node: str, beats: Sequence[port.Heartbeat], visible_ms: int) -> list[bool]:
        validation.check_heartbeats(node, beats, visible_ms, self._limits)
        now, kept = await self._pool.finished(
            job_queue.heartbeat(self._ready(), node, beats, visible_ms, self._asked())
        )
        self._hear(now)
        return kept

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> tuple[list[port.Admitted], Instant | None]:
        validation.check_admit(limits, limit, claim_for, self._limits)
        work = admission.admit(self._ready(), limits, limit, claim_for, self._asked())
        admitted, next_at = await self._pool.finished(work)
        if admitted:
            self._notify_soon()
        return admitted, next_at

    # --- Index

    async def find(self, query: port.Query[Row]) -> port.Found[Row]:
        if isinstance(query, port.PlaceQuery):
            return cast("port.Found[Row]", await self._find_places(query))
        finder = validation.finder_of(_FINDERS, query)
        most = self._page(query.limit)
        if sql.is_lookup(query):
            return await self._pool.finished(finder(self._ready(), query, most))
        return await finder(self._listing(), query, most)

    async def _find_places(self, query: port.PlaceQuery) -> port.Found[port.PlaceInLine]:
        validation.check_query(query)
        places = job_queue.find_places(self._ready(), query, self._page(query.limit), self._asked())
        return await self._pool.finished(places)

    async def find_nodes(self) -> list[port.NodePlans]:
        said = await self._pool.finished(self._ready().fetch(leases.ALIVE, self._asked()))
        return [port.NodePlans(node, frozenset(map(sql.plan_of, plans))) for node, plans in said]

    async def find_orphaned(self, late_ms: int) -> list[port.OrphanedDefinition]:
        validation.check_late(late_ms)
        return await self._pool.finished(leases.find_orphaned(self._ready(), late_ms, self._asked()))

    async def find_definitions(self, plans: Sequence[port.Plan]) -> list[WorkflowDeclaration | None]:
        validation.check_plans(plans)
        return await self._pool.finished(leases.find_definitions(self._ready(), plans))

    async def changes(self, cursor: str = "", limit: int = 1_000) -> port.Changes:
        return await self._pool.finished(changefeed.changes(self._ready(), cursor, self._page(limit)))

    async def stats(self) -> port.Stats:
        return await queries.stats(self._listing(), self._asked())

    async def health(self, bounds: Bounds, *, thorough: bool = False) -> Facts:
        return await self._pool.finished(health.examine(self._ready(), bounds, self._asked()))

    # --- Admin

    async def migrate(self) -> int:
        self._pool.check_open()
        place = self._pool.address
        work = self._pool.transact(lambda transaction: migrate(transaction, place.schema, place.shown))
        version = await self._pool.finished(work)
        self._is_migrated = True
        return version

    async def close(self) -> None:
        try:
            await asyncio.gather(self._lists.close(), self._pool.close())  # each within its bound
            self._notify()
            if isinstance(self.wakeups, NotifyWakeups):
                await self.wakeups.flush(FLUSH_S)
        finally:
            self.wakeups.close()

    async def publish_definitions(self, definitions: Sequence[WorkflowDeclaration]) -> None:
        validation.check_definitions(definitions, self._limits)
        await self._pool.finished(leases.publish_definitions(self._ready(), definitions))

    async def settle_dead_letters(
        self, ids: Sequence[str], action: Settlement, actor: str = "", audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        validation.check_settlement(ids, action, actor, self._limits)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        now = self._asked()
        work = self._ready().transact(
            lambda transaction: dead_letters.settle(transaction, ids, action, actor, now, audit)
        )
        return await self._pool.finished(self._then_notify(work))

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        validation.check_audit(entries, self._limits)
        now = self._asked()
        await self._pool.finished(
            self._ready().transact(lambda transaction: audit_log.append_now(transaction, entries, now))
        )

    async def purge(self, policy: port.PurgePolicy, audit: AuditEntry | None = None) -> port.PurgeReport:
        validation.check_purge(policy, audit, self._limits)
        now = self._asked()
        return await self._pool.finished(
            self._ready().transact(lambda transaction: retention.purge(transaction, policy, now, audit))
        )

    async def acquire_lock(self, name: str, owner: str, lease_ms: int) -> port.HostLock | None:
        validation.check_lock(name, owner, lease_ms)
        return await self._pool.finished(host_locks.acquire(self._ready(), name, owner, lease_ms, self._asked()))

    async def release_lock(self, name: str, owner: str, epoch: int) -> bool:
        validation.check_lock(name, owner, epoch=epoch)
        return await self._pool.finished(host_locks.release(self._ready(), name, owner, epoch))

    async def find_locks(self) -> list[port.HostLock]:
        return await self._pool.finished(host_locks.find(self._ready()))

    # --- TokenStore

    async def put_tokens(self, tokens: Sequence[AccessToken], audit: Sequence[AuditEntry] = ()) -> list[AccessToken]:
        validation.check_tokens(tokens, self._limits)
        validation.check_audit(audit, self._limits)
        now = self._asked()

        async def work(transaction: Transaction) -> list[AccessToken]:
            await audit_log.append_now(transaction, audit, now)
            return await access_tokens.put(transaction, tokens, now)

        return await self._pool.finished(self._ready().transact(work))

    async def find_tokens(self, query: port.TokenQuery) -> port.Found[AccessToken]:
        validation.check_query(query)
        return await self._pool.finished(access_tokens.find(self._ready(), query, self._page(query.limit)))

    async def put_key(self, name: str, key: str) -> str:
        validation.check_key(name, key)
        return await self._pool.finished(access_tokens.put_key(self._ready(), name, key))

    async def get_key(self, name: str) -> str | None:
        validation.check_names("name", [name])
        return await self._pool.finished(access_tokens.get_key(self._ready(), name))

    # --- PlanStore

    async def put_plan(self, tenant: str, sha256: str, body: bytes) -> None:
        validation.check_plan_body(tenant, sha256, body)
        await self._pool.finished(stored_plans.put(self._ready(), tenant, sha256, body, self._asked()))

    async def get_plan(self, tenant: str, sha256: str) -> bytes | None:
        validation.check_plan_body(tenant, sha256)
        return await self._pool.finished(stored_plans.get(self._ready(), tenant, sha256))

    async def register_plan(self, plan: RegisteredPlan, audit: AuditEntry | None = None) -> RegisteredPlan:
        validation.check_registered_plan(plan)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        now = self._asked()

        async def work(transaction: Transaction) -> RegisteredPlan:
            stored = await stored_plans.register(transaction, plan, now)
            await audit_log.append_now(transaction, () if audit is None else (audit,), now)
            return stored

        return await self._pool.finished(self._ready().transact(work))

    async def find_plans(self, query: port.PlanQuery) -> port.Found[RegisteredPlan]:
        validation.check_query(query)
        return await self._pool.finished(stored_plans.find(self._ready(), query, self._page(query.limit)))

    # --- BusStore

    async def put_sink(self, sink: Sink, audit: AuditEntry | None = None) -> Sink:
        validation.check_put_sink(sink, audit, self._limits)

        async def work(transaction: Transaction, now: Instant) -> Sink:
            stored = await bus.put_sink(transaction, sink, now)
            await audit_log.append(transaction, () if audit is None else [replace(audit, at=now)])
            return stored

        return await self._then_notify(self._transact(work))

    async def remove_sink(self, name: str, audit: AuditEntry | None = None) -> bool:
        validation.check_sink_name(name, audit, self._limits)

        async def work(transaction: Transaction, now: Instant) -> bool:
            is_removed = await bus.remove_sinks(transaction, "name", askable(name)) > 0
            await audit_log.append(transaction, [replace(audit, at=now)] if is_removed and audit is not None else ())
            return is_removed

        return await self._transact(work)

    async def settle_outbox(self, sink: str, items: Sequence[OutboxSettlement], progress: SinkProgress) -> list[bool]:
        validation.check_settle_outbox(sink, items, progress, self._limits)
        return await self._transact(lambda transaction, now: bus.settle(transaction, sink, items, progress, now))

    async def replay_outbox(self, asked: OutboxReplay, audit: AuditEntry | None = None) -> Replayed:
        validation.check_replay(asked, audit, self._limits)

        async def work(transaction: Transaction, now: Instant) -> Replayed:
            replayed = await bus.replay(transaction, asked, now)
            await audit_log.append(transaction, () if audit is None else [replace(audit, at=now)])
            return replayed

        return await self._then_notify(self._transact(work))

    async def raise_alerts(self, alerts: Sequence[BusAlert]) -> int:
        validation.check_alerts(alerts, self._limits)
        work = self._transact(lambda transaction, now: bus.raise_alerts(transaction, alerts, now))
        return await self._then_notify(work)

    async def settle_bus_dead_letters(
        self, ids: Sequence[str], action: Settlement, audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        validation.check_settlement(ids, action, "", self._limits)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        work = self._transact(lambda transaction, now: bus.settle_letters(transaction, ids, action, now, audit))
        return await self._then_notify(work)

    # --- BulletinStore

    async def put_bulletins(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int) -> list[bool]:
        validation.check_bulletins(kind, bodies, keep_ms, self._limits)
        now = self._asked()
        work = self._ready().transact(lambda transaction: bulletins.put(transaction, kind, bodies, keep_ms, now))
        return await self._pool.finished(self._then_notify(work))

    async def find_bulletins(self, query: port.BulletinQuery) -> port.Found[port.Bulletin]:
        validation.check_query(query)
        work = bulletins.find(self._ready(), query, self._page(query.limit), self._asked())
        return await self._pool.finished(work)

    # --- StreamStore

    async def append_streams(self, items: Sequence[StreamAppend]) -> list[Appended | port.Refused]:
        validation.check_batch(items, self._limits)
        now = self._asked()
        work = self._ready().transact(lambda transaction: streams.append(transaction, items, self._limits, now))
        answers = await self._pool.finished(work)
        self.wakeups.notify("streams")
        return answers

    async def read_streams(self, items: Sequence[StreamRead]) -> list[StreamPage | None]:
        validation.check_stream_reads(items, self._limits)
        return await self._pool.finished(streams.read(self._ready(), items))

    # --- ScheduleStore

    async def commit_schedule(
        self,
        schedule: Schedule,
        expected_revision: int,
        starts: Sequence[port.NewRun] = (),
        audit: AuditEntry | None = None,
    ) -> tuple[Schedule, list[port.Created | port.Existing | port.Refused]]:
        validation.check_committed_schedule(schedule, expected_revision, starts, audit, self._limits)
        now = self._asked()

        async def work(
            transaction: Transaction,
        ) -> tuple[Schedule, list[port.Created | port.Existing | port.Refused]]:
            stored, answers, at = await stored_schedules.commit(
                transaction, schedule, expected_revision, starts, self._limits, now
            )
            if audit is not None and at is not None:
                await audit_log.append_now(transaction, [audit], at)
            return stored, answers

        return await self._pool.finished(self._then_notify(self._ready().transact(work)))

    async def delete_schedule(
        self, place: tuple[str, str, str, str], expected_revision: int, audit: AuditEntry | None = None
    ) -> bool:
        validation.check_names("schedule", place)
        now = self._asked()

        async def work(transaction: Transaction) -> bool:
            is_deleted = await stored_schedules.delete(transaction, place, expected_revision)
            if audit is not None and is_deleted:
                await audit_log.append_now(transaction, [audit], now)
            return is_deleted

        return await self._pool.finished(self._ready().transact(work))

    # --- shared by several verbs

    async def _transact(self, work: Callable[[Transaction, Instant], Awaitable[T]]) -> T:
        """Do work in a transaction that knows its time."""
        given = self._asked()

        async def timed(transaction: Transaction) -> T:
            return await work(transaction, await bus.now_of(transaction, given))

        return await self._pool.finished(self._ready().transact(timed))

    def _page(self, limit: int) -> int:
        return min(validation.check_page(limit), self._limits.page_items)

    def _asked(self) -> Instant | None:
        """Return the time of the clock that replaces the server's, or None."""
        return None if self._clock is None else self._clock.now()

    def _listing(self) -> Pool:
        """Return the connections for queries that may take long: no commit waits for them."""
        self._check_migrated()
        return self._lists

    def _ready(self) -> Pool:
        self._check_migrated()
        return self._pool

    def _check_migrated(self) -> None:
        self._pool.check_open()
        if not self._is_migrated:
            raise not_migrated(self._pool.address.shown)

    def _hear(self, now: Instant) -> None:
        """Record the server's time. Soon after a quick answer, a slow one is worth less: it is older."""
        loop_time = asyncio.get_running_loop().time()
        if self._heard is not None:
            passed_s = loop_time - self._heard[1]
            is_older = self._heard[0] + int(passed_s * 1_000_000) > now
        if self._heard is None or passed_s > FRESH_S / 2 or not is_older:
            self._heard = (now, loop_time)
        self._starts.heard(now)

    async def _then_notify(self, work: Awaitable[T], news: News = READY) -> T:
        answer = await work
        self._notify_soon(news)
        return answer

    def _notify_soon(self, news: News = READY) -> None:
        """Notify once for all the work of this iteration of the event loop."""
        if not self._unsaid:
            asyncio.get_running_loop().call_soon(self._notify)
        self._unsaid.add(*news)

    def _notify(self) -> None:
        if self._unsaid:
            self.wakeups.notify(*self._unsaid.take())
