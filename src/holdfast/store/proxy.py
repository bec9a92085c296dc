"""A wrapper around a store: the base for views that observe or change some verbs and pass on the rest."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Raw

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
from holdfast.store import port
from holdfast.store.health import Bounds, Facts
from holdfast.store.joined import JoinedStore
from holdfast.store.wakeups import Wakeups

Row = TypeVar("Row")
T = TypeVar("T")
Answer = Coroutine[Any, Any, T]


class StoreProxy:
    """Passes every verb on to a store. Each returns the inner store's coroutine, so a call costs no task and no frame.

    A subclass overrides a verb with an `async def` of the port's signature.
    """

    def __init__(self, store: port.Store) -> None:
        self._store = store
        self.capabilities: port.Capabilities = store.capabilities
        self.wakeups: Wakeups = store.wakeups

    @property
    def inner(self) -> port.Store:
        """The store to which the verbs are passed on."""
        return self._store

    # --- RunStore

    @property
    def extend_lease(self) -> Callable[[str, int], None] | None:
        return self._store.extend_lease

    def now(self) -> Answer[Instant]:
        return self._store.now()

    def create(
        self, runs: Sequence[port.NewRun], claim_for: str | None = None
    ) -> Answer[list[port.Created | port.Existing | port.Refused]]:
        return self._store.create(runs, claim_for)

    def joined(self, connection: Any) -> JoinedStore:
        return self._store.joined(connection)

    def load(self, run_ids: Sequence[str]) -> Answer[list[port.LoadedRun | None]]:
        return self._store.load(run_ids)

    def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> Answer[list[Event]]:
        return self._store.read_events(run_id, after, limit, most_bytes)

    def deliver(self, items: Sequence[SignalRequest | Message]) -> Answer[list[port.Delivered]]:
        return self._store.deliver(items)

    def commit(self, turns: Sequence[port.Turn]) -> Answer[list[port.Committed | port.CommitConflict]]:
        return self._store.commit(turns)

    def claim(self, node: str, limit: int, plans: Sequence[port.Plan] | None = None) -> Answer[list[port.LoadedRun]]:
        return self._store.claim(node, limit, plans)

    def renew(
        self, node: str, lease_ms: int, plans: Sequence[port.Plan] | None = None, is_start: bool = False
    ) -> Answer[Instant]:
        return self._store.renew(node, lease_ms, plans, is_start)

    def release(self, node: str, run_ids: Sequence[str] | None = None) -> Answer[int]:
        return self._store.release(node, run_ids)

    def hand_over(self, node: str, run_ids: Sequence[str], to: str) -> Answer[list[str]]:
        return self._store.hand_over(node, run_ids, to)

    def next_due(
        self, node: str, plans: Sequence[port.Plan] | None = None, queues: Sequence[str] = ()
    ) -> Answer[Instant | None]:
        return self._store.next_due(node, plans, queues)

    # --- JobQueue

    def acquire_jobs(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> Answer[list[port.Job]]:
        return self._store.acquire_jobs(node, queues, activities, limit, visible_ms)

    def acquire_limited_jobs(
        self,
        node: str,
        queues: Sequence[str],
        activities: Sequence[str],
        limits: Mapping[str, CallLimit],
        limit: int,
        visible_ms: int,
    ) -> Answer[tuple[list[port.Job], Instant | None]]:
        return self._store.acquire_limited_jobs(node, queues, activities, limits, limit, visible_ms)

    def release_jobs(self, node: str, jobs: Sequence[port.Job]) -> Answer[int]:
        return self._store.release_jobs(node, jobs)

    def heartbeat(self, node: str, beats: Sequence[port.Heartbeat], visible_ms: int) -> Answer[list[bool]]:
        return self._store.heartbeat(node, beats, visible_ms)

    def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> Answer[tuple[list[port.Admitted], Instant | None]]:
        return self._store.admit(limits, limit, claim_for)

    # --- Index

    def find(self, query: port.Query[Row]) -> Answer[port.Found[Row]]:
        return self._store.find(query)

    def find_nodes(self) -> Answer[list[port.NodePlans]]:
        return self._store.find_nodes()

    def find_orphaned(self, late_ms: int) -> Answer[list[port.OrphanedDefinition]]:
        return self._store.find_orphaned(late_ms)

    def find_definitions(self, plans: Sequence[port.Plan]) -> Answer[list[WorkflowDeclaration | None]]:
        return self._store.find_definitions(plans)

    def changes(self, cursor: str = "", limit: int = 1_000) -> Answer[port.Changes]:
        return self._store.changes(cursor, limit)

    def stats(self) -> Answer[port.Stats]:
        return self._store.stats()

    def health(self, bounds: Bounds, *, thorough: bool = False) -> Answer[Facts]:
        return self._store.health(bounds, thorough=thorough)

    # --- Admin

    def migrate(self) -> Answer[int]:
        return self._store.migrate()

    def close(self) -> Answer[None]:
        return self._store.close()

    def publish_definitions(self, definitions: Sequence[WorkflowDeclaration]) -> Answer[None]:
        return self._store.publish_definitions(definitions)

    def settle_dead_letters(
        self, ids: Sequence[str], action: Settlement, actor: str = "", audit: AuditEntry | None = None
    ) -> Answer[list[Settled | port.Refused]]:
        return self._store.settle_dead_letters(ids, action, actor, audit)

    def append_audit(self, entries: Sequence[AuditEntry]) -> Answer[None]:
        return self._store.append_audit(entries)

    def purge(self, policy: port.PurgePolicy, audit: AuditEntry | None = None) -> Answer[port.PurgeReport]:
        return self._store.purge(policy, audit)

    def acquire_lock(self, name: str, owner: str, lease_ms: int) -> Answer[port.HostLock | None]:
        return self._store.acquire_lock(name, owner, lease_ms)

    def release_lock(self, name: str, owner: str, epoch: int) -> Answer[bool]:
        return self._store.release_lock(name, owner, epoch)

    def find_locks(self) -> Answer[list[port.HostLock]]:
        return self._store.find_locks()

    # --- TokenStore

    def put_tokens(self, tokens: Sequence[AccessToken], audit: Sequence[AuditEntry] = ()) -> Answer[list[AccessToken]]:
        return self._store.put_tokens(tokens, audit)

    def find_tokens(self, query: port.TokenQuery) -> Answer[port.Found[AccessToken]]:
        return self._store.find_tokens(query)

    def put_key(self, name: str, key: str) -> Answer[str]:
        return self._store.put_key(name, key)

    def get_key(self, name: str) -> Answer[str | None]:
        return self._store.get_key(name)

    # --- PlanStore

    def put_plan(self, tenant: str, sha256: str, body: bytes) -> Answer[None]:
        return self._store.put_plan(tenant, sha256, body)

    def get_plan(self, tenant: str, sha256: str) -> Answer[bytes | None]:
        return self._store.get_plan(tenant, sha256)

    def register_plan(self, plan: RegisteredPlan, audit: AuditEntry | None = None) -> Answer[RegisteredPlan]:
        return self._store.register_plan(plan, audit)

    def find_plans(self, query: port.PlanQuery) -> Answer[port.Found[RegisteredPlan]]:
        return self._store.find_plans(query)

    # --- BusStore

    def put_sink(self, sink: Sink, audit: AuditEntry | None = None) -> Answer[Sink]:
        return self._store.put_sink(sink, audit)

    def remove_sink(self, name: str, audit: AuditEntry | None = None) -> Answer[bool]:
        return self._store.remove_sink(name, audit)

    def settle_outbox(self, sink: str, items: Sequence[OutboxSettlement], progress: SinkProgress) -> Answer[list[bool]]:
        return self._store.settle_outbox(sink, items, progress)

    def replay_outbox(self, asked: OutboxReplay, audit: AuditEntry | None = None) -> Answer[Replayed]:
        return self._store.replay_outbox(asked, audit)

    def raise_alerts(self, alerts: Sequence[BusAlert]) -> Answer[int]:
        return self._store.raise_alerts(alerts)

    def settle_bus_dead_letters(
        self, ids: Sequence[str], action: Settlement, audit: AuditEntry | None = None
    ) -> Answer[list[Settled | port.Refused]]:
        return self._store.settle_bus_dead_letters(ids, action, audit)

    # --- BulletinStore

    def put_bulletins(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int) -> Answer[list[bool]]:
        return self._store.put_bulletins(kind, bodies, keep_ms)

    def find_bulletins(self, query: port.BulletinQuery) -> Answer[port.Found[port.Bulletin]]:
        return self._store.find_bulletins(query)

    # --- StreamStore

    def append_streams(self, items: Sequence[StreamAppend]) -> Answer[list[Appended | port.Refused]]:
        return self._store.append_streams(items)

    def read_streams(self, items: Sequence[StreamRead]) -> Answer[list[StreamPage | None]]:
        return self._store.read_streams(items)

    # --- ScheduleStore

    def commit_schedule(
        self,
        schedule: Schedule,
        expected_revision: int,
        starts: Sequence[port.NewRun] = (),
        audit: AuditEntry | None = None,
    ) -> Answer[tuple[Schedule, list[port.Created | port.Existing | port.Refused]]]:
        return self._store.commit_schedule(schedule, expected_revision, starts, audit)

    def delete_schedule(
        self, place: tuple[str, str, str, str], expected_revision: int, audit: AuditEntry | None = None
    ) -> Answer[bool]:
        return self._store.delete_schedule(place, expected_revision, audit)
