"""A store that fails in every way in which a real one can.

`FaultyStore` is one node's view of a store: answers take time, some never arrive, some calls are repeated, and wake-ups
get lost. It breaks no promise of the port: what it has answered has happened. After an error the outcome is unknown:
the verb may or may not have been executed.

`Weather` is shared by all users of the store and can change at any time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from random import Random
from typing import Any, TypeVar

from msgspec import Raw, Struct

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
from holdfast.errors import HoldfastError, StoreUnavailable
from holdfast.store import port
from holdfast.store.health import Bounds, Facts
from holdfast.store.joined import JoinedStore
from holdfast.store.wakeups import Ended, Interest, Listener, Topic, Wakeups
from holdfast.testing.sim_loop import current_process

T = TypeVar("T")
Row = TypeVar("Row")

Verb = Callable[[], Awaitable[T]]


class Faults(Struct, frozen=True, kw_only=True):
    """How often things go wrong, as probabilities, and how long they take."""

    latency_s: float = 0.0
    """The mean time that a request or its answer takes to arrive."""

    refused: float = 0.0
    """A verb is not executed, and raises."""

    unanswered: float = 0.0
    """A verb is executed, and raises."""

    repeated: float = 0.0
    """A verb that may be repeated is executed again, some time later."""

    unheard: float = 0.0
    """A wake-up is lost."""


CALM = Faults()


class Weather:
    """The current faults."""

    def __init__(self, faults: Faults = CALM) -> None:
        self.faults = faults
        self.is_down = False
        """The store cannot be reached."""


class FaultyStore:
    """A store as seen through bad weather."""

    def __init__(self, store: port.Store, weather: Weather, rng: Random) -> None:
        self._store = store
        self._weather = weather
        self._rng = rng
        self.capabilities = store.capabilities
        self.extend_lease = None  # a blocked loop would block the simulation
        self.wakeups: Wakeups = FaultyWakeups(store.wakeups, weather, rng)

    # --- how a verb is executed

    async def _reach(self, verb: Verb[T], *, may_repeat: bool = False) -> T:
        process = current_process()
        if process is not None and not process.is_alive:  # killed by the very thing it is doing: its call has no effect
            await asyncio.get_running_loop().create_future()
        await self._travel()
        if self._fails(self._weather.faults.refused):
            raise StoreUnavailable("the store could not be reached")
        if may_repeat and self._rng.random() < self._weather.faults.repeated:
            # Outside of every process: what is on its way arrives, whatever becomes of the sender.
            asyncio.get_running_loop().create_task(self._repeat(verb), context=Context())
        answer = await verb()
        await self._travel()
        if self._fails(self._weather.faults.unanswered):
            raise StoreUnavailable("the store did not answer")
        return answer

    def _fails(self, chance: float) -> bool:
        return self._weather.is_down or self._rng.random() < chance

    async def _travel(self) -> None:
        mean = self._weather.faults.latency_s
        if mean > 0.0:
            await asyncio.sleep(self._rng.choice((0.0, self._rng.expovariate(1.0 / mean))))

    async def _repeat(self, verb: Verb[T]) -> None:
        await asyncio.sleep(self._rng.expovariate(1.0 / (20.0 * self._weather.faults.latency_s + 0.1)))
        try:
            await verb()
        except HoldfastError:
            return  # there is no caller for this answer

    # --- the verbs

    async def migrate(self) -> int:
        return await self._reach(self._store.migrate)

    async def close(self) -> None:
        """Do nothing: the store is shared."""

    async def now(self) -> Instant:
        return await self._reach(self._store.now)

    async def create(
        self, runs: Sequence[port.NewRun], claim_for: str | None = None
    ) -> list[port.Created | port.Existing | port.Refused]:
        return await self._reach(lambda: self._store.create(runs, claim_for), may_repeat=True)

    def joined(self, connection: Any) -> JoinedStore:
        return self._store.joined(connection)

    async def load(self, run_ids: Sequence[str]) -> list[port.LoadedRun | None]:
        return await self._reach(lambda: self._store.load(run_ids))

    async def deliver(
        self, items: Sequence[SignalRequest | Message]
    ) -> list[port.Accepted | port.Duplicate | port.Refused]:
        is_named = all(item.signal_id is not None for item in items)
        return await self._reach(lambda: self._store.deliver(items), may_repeat=is_named)

    async def commit(self, turns: Sequence[port.Turn]) -> list[port.Committed | port.CommitConflict]:
        return await self._reach(lambda: self._store.commit(turns), may_repeat=True)

    async def claim(self, node: str, limit: int, plans: Sequence[port.Plan] | None = None) -> list[port.LoadedRun]:
        return await self._reach(lambda: self._store.claim(node, limit, plans))

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> tuple[list[port.Admitted], Instant | None]:
        return await self._reach(lambda: self._store.admit(limits, limit, claim_for))

    async def renew(
        self, node: str, lease_ms: int, plans: Sequence[port.Plan] | None = None, is_start: bool = False
    ) -> Instant:
        return await self._reach(lambda: self._store.renew(node, lease_ms, plans, is_start))

    async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
        return await self._reach(lambda: self._store.release(node, run_ids))

    async def hand_over(self, node: str, run_ids: Sequence[str], to: str) -> list[str]:
        return await self._reach(lambda: self._store.hand_over(node, run_ids, to))

    async def find_nodes(self) -> list[port.NodePlans]:
        return await self._reach(self._store.find_nodes)

    async def next_due(
        self, node: str, plans: Sequence[port.Plan] | None = None, queues: Sequence[str] = ()
    ) -> Instant | None:
        return await self._reach(lambda: self._store.next_due(node, plans, queues))

    async def find_orphaned(self, late_ms: int) -> list[port.OrphanedDefinition]:
        return await self._reach(lambda: self._store.find_orphaned(late_ms))

    async def acquire_jobs(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> list[port.Job]:
        return await self._reach(lambda: self._store.acquire_jobs(node, queues, activities, limit, visible_ms))

    async def acquire_limited_jobs(
        self,
        node: str,
        queues: Sequence[str],
        activities: Sequence[str],
        limits: Mapping[str, CallLimit],
        limit: int,
        visible_ms: int,
    ) -> tuple[list[port.Job], Instant | None]:
        return await self._reach(
            lambda: self._store.acquire_limited_jobs(node, queues, activities, limits, limit, visible_ms)
        )

    async def release_jobs(self, node: str, jobs: Sequence[port.Job]) -> int:
        return await self._reach(lambda: self._store.release_jobs(node, jobs), may_repeat=True)

    async def heartbeat(self, node: str, beats: Sequence[port.Heartbeat], visible_ms: int) -> list[bool]:
        return await self._reach(lambda: self._store.heartbeat(node, beats, visible_ms))

    async def changes(self, cursor: str = "", limit: int = 1_000) -> port.Changes:
        return await self._reach(lambda: self._store.changes(cursor, limit))

    async def find(self, query: port.Query[Row]) -> port.Found[Row]:
        return await self._reach(lambda: self._store.find(query))

    async def settle_dead_letters(
        self, ids: Sequence[str], action: Settlement, actor: str = "", audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        return await self._reach(lambda: self._store.settle_dead_letters(ids, action, actor, audit), may_repeat=True)

    async def publish_definitions(self, definitions: Sequence[WorkflowDeclaration]) -> None:
        await self._reach(lambda: self._store.publish_definitions(definitions), may_repeat=True)

    async def find_definitions(self, plans: Sequence[port.Plan]) -> list[WorkflowDeclaration | None]:
        return await self._reach(lambda: self._store.find_definitions(plans))

    async def put_tokens(self, tokens: Sequence[AccessToken], audit: Sequence[AuditEntry] = ()) -> list[AccessToken]:
        return await self._reach(lambda: self._store.put_tokens(tokens, audit), may_repeat=True)

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        return await self._reach(lambda: self._store.append_audit(entries))

    async def put_bulletins(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int) -> list[bool]:
        return await self._reach(lambda: self._store.put_bulletins(kind, bodies, keep_ms), may_repeat=True)

    async def find_bulletins(self, query: port.BulletinQuery) -> port.Found[port.Bulletin]:
        return await self._reach(lambda: self._store.find_bulletins(query))

    async def append_streams(self, items: Sequence[StreamAppend]) -> list[Appended | port.Refused]:
        return await self._reach(lambda: self._store.append_streams(items), may_repeat=True)

    async def read_streams(self, items: Sequence[StreamRead]) -> list[StreamPage | None]:
        return await self._reach(lambda: self._store.read_streams(items))

    async def put_key(self, name: str, key: str) -> str:
        return await self._reach(lambda: self._store.put_key(name, key), may_repeat=True)

    async def get_key(self, name: str) -> str | None:
        return await self._reach(lambda: self._store.get_key(name), may_repeat=True)

    async def put_plan(self, tenant: str, sha256: str, body: bytes) -> None:
        await self._reach(lambda: self._store.put_plan(tenant, sha256, body), may_repeat=True)

    async def get_plan(self, tenant: str, sha256: str) -> bytes | None:
        return await self._reach(lambda: self._store.get_plan(tenant, sha256))

    async def register_plan(self, plan: RegisteredPlan, audit: AuditEntry | None = None) -> RegisteredPlan:
        return await self._reach(lambda: self._store.register_plan(plan, audit), may_repeat=audit is None)

    async def find_plans(self, query: port.PlanQuery) -> port.Found[RegisteredPlan]:
        return await self._reach(lambda: self._store.find_plans(query))

    async def commit_schedule(
        self,
        schedule: Schedule,
        expected_revision: int,
        starts: Sequence[port.NewRun] = (),
        audit: AuditEntry | None = None,
    ) -> tuple[Schedule, list[port.Created | port.Existing | port.Refused]]:
        return await self._reach(
            lambda: self._store.commit_schedule(schedule, expected_revision, starts, audit), may_repeat=audit is None
        )

    async def delete_schedule(
        self, place: tuple[str, str, str, str], expected_revision: int, audit: AuditEntry | None = None
    ) -> bool:
        return await self._reach(lambda: self._store.delete_schedule(place, expected_revision, audit))

    async def find_tokens(self, query: port.TokenQuery) -> port.Found[AccessToken]:
        return await self._reach(lambda: self._store.find_tokens(query))

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        return await self._reach(lambda: self._store.read_events(run_id, after, limit, most_bytes))

    async def purge(self, policy: port.PurgePolicy, audit: AuditEntry | None = None) -> port.PurgeReport:
        return await self._reach(lambda: self._store.purge(policy, audit))

    async def acquire_lock(self, name: str, owner: str, lease_ms: int) -> port.HostLock | None:
        return await self._reach(lambda: self._store.acquire_lock(name, owner, lease_ms))

    async def release_lock(self, name: str, owner: str, epoch: int) -> bool:
        return await self._reach(lambda: self._store.release_lock(name, owner, epoch), may_repeat=True)

    async def find_locks(self) -> list[port.HostLock]:
        return await self._reach(self._store.find_locks)

    async def put_sink(self, sink: Sink, audit: AuditEntry | None = None) -> Sink:
        return await self._reach(lambda: self._store.put_sink(sink, audit), may_repeat=audit is None)

    async def remove_sink(self, name: str, audit: AuditEntry | None = None) -> bool:
        return await self._reach(lambda: self._store.remove_sink(name, audit))

    async def settle_outbox(self, sink: str, items: Sequence[OutboxSettlement], progress: SinkProgress) -> list[bool]:
        return await self._reach(lambda: self._store.settle_outbox(sink, items, progress))

    async def replay_outbox(self, asked: OutboxReplay, audit: AuditEntry | None = None) -> Replayed:
        return await self._reach(lambda: self._store.replay_outbox(asked, audit), may_repeat=audit is None)

    async def raise_alerts(self, alerts: Sequence[BusAlert]) -> int:
        return await self._reach(lambda: self._store.raise_alerts(alerts), may_repeat=True)

    async def settle_bus_dead_letters(
        self, ids: Sequence[str], action: Settlement, audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        return await self._reach(lambda: self._store.settle_bus_dead_letters(ids, action, audit))

    async def stats(self) -> port.Stats:
        return await self._reach(self._store.stats)

    async def health(self, bounds: Bounds, *, thorough: bool = False) -> Facts:
        return await self._reach(lambda: self._store.health(bounds, thorough=thorough))


class FaultyWakeups:
    """Wake-ups some of which are lost."""

    def __init__(self, wakeups: Wakeups, weather: Weather, rng: Random) -> None:
        self._wakeups = wakeups
        self._weather = weather
        self._rng = rng

    def notify(self, topic: Topic = "runs", ended: Ended = None) -> None:
        self._wakeups.notify(topic, ended)

    def listen(self, interest: Interest = "changes") -> Listener:
        return FaultyListener(self._wakeups.listen(interest), self._weather, self._rng)

    def close(self) -> None:
        """Do nothing: the wake-ups are shared."""


class FaultyListener:
    """A listener that misses some notifications."""

    def __init__(self, listener: Listener, weather: Weather, rng: Random) -> None:
        self._listener = listener
        self._weather = weather
        self._rng = rng

    async def wait(self, timeout_s: float | None) -> bool:
        loop = asyncio.get_running_loop()
        end = None if timeout_s is None else loop.time() + timeout_s
        while await self._listener.wait(None if end is None else max(0.0, end - loop.time())):
            if self._rng.random() >= self._weather.faults.unheard:
                return True
            self._listener.take_ended()
        return False

    def take_ended(self) -> Ended:
        return self._listener.take_ended()

    def close(self) -> None:
        self._listener.close()
