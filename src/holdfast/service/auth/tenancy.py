"""A store as one tenant sees it: data of other tenants does not exist.

Only the verbs that callers may use are allowed; every other verb is refused. A new verb of the store port does not pass
the type check until it is allowed or refused here.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Never, Protocol, TypeVar

from msgspec.structs import replace

from holdfast.core.access import AccessToken
from holdfast.core.audit import AuditEntry
from holdfast.core.bus import BusDeadLetter, OutboxReplay, Replayed, Sink, SinkStatus
from holdfast.core.dead_letters import DeadLetter, Settled, Settlement
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.events import Event
from holdfast.core.index_rows import Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import Message, Signal, SignalRequest
from holdfast.core.plans import RegisteredPlan
from holdfast.core.schedules import Schedule
from holdfast.core.state import RunStatus
from holdfast.core.streams import NamedStream, StreamPage, StreamRead
from holdfast.errors import InvalidInput, NotPermitted
from holdfast.store.decisions import no_such_letter, no_such_run, no_such_sink
from holdfast.store.port import (
    Accepted,
    ArchivedRun,
    ArchivedRunQuery,
    Capabilities,
    Created,
    Duplicate,
    EventQuery,
    Existing,
    Found,
    Index,
    LoadedRun,
    MailboxQuery,
    NewRun,
    Plan,
    Query,
    Refused,
    RunCount,
    RunCountQuery,
    RunHead,
    RunQuery,
    Store,
    TaskQuery,
    WaitQuery,
)
from holdfast.store.queries import (
    AuditQuery,
    BusDeadLetterQuery,
    DeadLetterQuery,
    PlaceInLine,
    PlaceQuery,
    PlanQuery,
    ScheduleQuery,
    SinkQuery,
    StreamQuery,
    TokenQuery,
    pages,
)
from holdfast.store.validation import finder_of
from holdfast.store.wakeups import Wakeups

COUNTED_AT_ONCE = 500
"""How many runs of one project or environment are read at a time for a count."""


class _OfRun(Protocol):
    @property
    def run_id(self) -> str: ...


T = TypeVar("T")
Row = TypeVar("Row", bound=_OfRun)


class _OfTenant(Protocol):
    @property
    def tenant(self) -> str | None: ...
    @property
    def project(self) -> str | None: ...
    @property
    def environment(self) -> str | None: ...


def seen_by(tenant: str | None, store: Store, project: str | None = None, environment: str | None = None) -> Store:
    """Return the store as visible to a caller of this tenant, or of a part of it; without a tenant, the whole store."""
    return store if tenant is None else TenantView(store, tenant, project, environment)


def check_chosen_id(tenant: str | None, run_id: str | None) -> None:
    """Refuse a run id that one tenant chooses and that another tenant might also choose.

    Run ids are unique across all tenants: a caller who could choose any id would take those of others, or learn that
    they exist.
    """
    if tenant is not None and run_id is not None and not run_id.startswith(f"{tenant}:"):
        raise InvalidInput(f"run_id: a run's id that tenant {tenant!r} chooses begins with '{tenant}:'", field="run_id")


def belongs_to(owner: _OfTenant, thing: _OfTenant) -> bool:
    """Return whether a caller sees a thing: of their tenant, or of their part of it. A caller without a tenant sees
    all.
    """
    return (
        owner.tenant in (None, thing.tenant)
        and owner.project in (None, thing.project)
        and owner.environment in (None, thing.environment)
    )


def _refused(verb: str) -> Callable[..., Coroutine[Any, Any, Never]]:
    async def refuse(*_: object, **__: object) -> Never:
        raise NotPermitted(f"a tenant's view of the store has no {verb}")

    return refuse


class TenantView:
    """The part of a store that belongs to one tenant, or to a project or an environment of it."""

    create = _refused("create")

    def joined(self, connection: Any) -> Never:
        """Refuse: a tenant has no connection to the store's database."""
        raise NotPermitted("a tenant's view of the store has no joined")

    commit = _refused("commit")
    claim = _refused("claim")
    renew = _refused("renew")
    release = _refused("release")
    hand_over = _refused("hand_over")
    next_due = _refused("next_due")
    acquire_jobs = _refused("acquire_jobs")
    acquire_limited_jobs = _refused("acquire_limited_jobs")
    release_jobs = _refused("release_jobs")
    heartbeat = _refused("heartbeat")
    admit = _refused("admit")
    find_nodes = _refused("find_nodes")
    find_orphaned = _refused("find_orphaned")
    changes = _refused("changes")
    stats = _refused("stats")
    health = _refused("health")
    migrate = _refused("migrate")
    close = _refused("close")
    purge = _refused("purge")
    acquire_lock = _refused("acquire_lock")
    release_lock = _refused("release_lock")
    find_locks = _refused("find_locks")
    put_key = _refused("put_key")
    get_key = _refused("get_key")
    put_bulletins = _refused("put_bulletins")
    find_bulletins = _refused("find_bulletins")
    append_streams = _refused("append_streams")
    settle_outbox = _refused("settle_outbox")
    raise_alerts = _refused("raise_alerts")
    extend_lease = None

    def __init__(self, store: Store, tenant: str, project: str | None = None, environment: str | None = None) -> None:
        self._store = store
        self.tenant: str | None = tenant
        self.project = project
        self.environment = environment
        self._finders: dict[type, Callable[[Any], Awaitable[Found[Any]]]] = {
            RunQuery: self._find_runs,
            RunCountQuery: self._count_runs,
            WaitQuery: self._find_waits,
            EventQuery: self._find_events,
            StreamQuery: self._find_streams,
            PlaceQuery: self._find_places,
            MailboxQuery: self._find_mailbox,
            TaskQuery: self._find_tasks,
            DeadLetterQuery: self._find_dead_letters,
            AuditQuery: self._find_audit,
            ScheduleQuery: self._find_schedules,
            ArchivedRunQuery: self._find_archived,
            SinkQuery: self._find_sinks,
            BusDeadLetterQuery: self._find_bus_dead_letters,
        }

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the store."""
        return self._store.capabilities

    @property
    def wakeups(self) -> Wakeups:
        """The store's wake-ups. They do not reveal to which tenant a ready run belongs."""
        return self._store.wakeups

    async def now(self) -> Instant:
        return await self._store.now()

    async def load(self, run_ids: Sequence[str]) -> list[LoadedRun | None]:
        """Return the tenant's own runs. Those of others are not read, so they take no more time than missing runs."""
        own = await self._own(run_ids)
        runs = iter(await self._store.load([run_id for run_id in run_ids if run_id in own]) if own else ())
        return [next(runs) if run_id in own else None for run_id in run_ids]

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        own = await self._own([run_id])
        return await self._store.read_events(run_id, after, limit, most_bytes) if own else []

    async def read_streams(self, items: Sequence[StreamRead]) -> list[StreamPage | None]:
        own = await self._own([item.run_id for item in items])
        pages = iter(await self._store.read_streams([item for item in items if item.run_id in own]) if own else ())
        return [next(pages) if item.run_id in own else None for item in items]

    async def deliver(self, items: Sequence[SignalRequest | Message]) -> list[Accepted | Duplicate | Refused]:
        own = await self._own([item.run_id for item in items])
        answers = iter(await self._store.deliver([item for item in items if item.run_id in own]))
        return [next(answers) if item.run_id in own else Refused(no_such_run(item.run_id)) for item in items]

    async def find(self, query: Query[T]) -> Found[T]:
        finder = finder_of(self._finders, query)
        return await finder(query)

    async def _count_runs(self, query: RunCountQuery) -> Found[RunCount]:
        """Count the tenant's runs. Runs of one project or environment are counted one by one, because no store can
        count them.
        """
        if self.project is None and self.environment is None:
            return await self._store.find(replace(query, runs=replace(query.runs, tenant=self.tenant)))
        counts: Counter[tuple[str, RunStatus]] = Counter()
        runs = replace(query.runs, newest=True, order=None, look=COUNTED_AT_ONCE, limit=COUNTED_AT_ONCE)
        for _ in range(0, query.look, COUNTED_AT_ONCE):
            page = await self._find_runs(runs)
            counts.update((head.plan_id, head.status) for head in page)
            if page.cursor is None and not page:
                return Found(RunCount(*key, count) for key, count in sorted(counts.items()))
            runs = replace(runs, before=page.cursor or (page[-1].created_at, page[-1].run_id))
        return Found((RunCount(*key, count) for key, count in sorted(counts.items())), True)

    async def _find_runs(self, query: RunQuery) -> Found[RunHead]:
        query = replace(query, tenant=self.tenant)
        while True:
            page = await self._store.find(query)
            own = [head for head in page if belongs_to(self, head)]
            if own or not page or page.cursor is not None or query.order is not None:
                is_bound = self.project is not None or self.environment is not None
                return Found(own, page.cursor, () if is_bound else page.unreadable, page.as_of)
            last = page[-1]
            if query.look is not None:
                return Found((), (last.created_at, last.run_id) if query.newest else last.run_id, as_of=page.as_of)
            query = replace(query, after=last.run_id, before=(last.created_at, last.run_id))

    async def find_tokens(self, query: TokenQuery) -> Found[AccessToken]:
        query = replace(query, tenant=self.tenant)
        async for page in pages(self._store.find_tokens, query, lambda token: token.token_id):
            if found := self._part(page, [token for token in page if belongs_to(self, token)]):
                return found
        return Found()

    async def put_plan(self, tenant: str, sha256: str, body: bytes) -> None:
        await self._store.put_plan(self._only(tenant), sha256, body)

    async def get_plan(self, tenant: str, sha256: str) -> bytes | None:
        return await self._store.get_plan(tenant, sha256) if tenant == self.tenant else None

    async def register_plan(self, plan: RegisteredPlan, audit: AuditEntry | None = None) -> RegisteredPlan:
        self._only(plan.tenant)
        return await self._store.register_plan(plan, None if audit is None else self._audited(audit))

    async def find_plans(self, query: PlanQuery) -> Found[RegisteredPlan]:
        return await self._store.find_plans(replace(query, tenant=self.tenant))

    async def commit_schedule(
        self, schedule: Schedule, expected_revision: int, starts: Sequence[NewRun] = (), audit: AuditEntry | None = None
    ) -> tuple[Schedule, list[Created | Existing | Refused]]:
        if not belongs_to(self, schedule) or not all(belongs_to(self, new) for new in starts):
            raise NotPermitted("a tenant keeps schedules of its own")
        audit = None if audit is None else self._audited(audit)
        return await self._store.commit_schedule(schedule, expected_revision, starts, audit)

    async def delete_schedule(
        self, place: tuple[str, str, str, str], expected_revision: int, audit: AuditEntry | None = None
    ) -> bool:
        tenant, project, environment, _ = place
        if tenant != self.tenant or self.project not in (None, project) or self.environment not in (None, environment):
            return False
        audit = None if audit is None else self._audited(audit)
        return await self._store.delete_schedule(place, expected_revision, audit)

    async def _find_schedules(self, query: ScheduleQuery) -> Found[Schedule]:
        project, environment = self.project or query.project, self.environment or query.environment
        return await self._store.find(replace(query, tenant=self.tenant, project=project, environment=environment))

    def _only(self, tenant: str) -> str:
        if tenant != self.tenant:
            raise NotPermitted("a tenant keeps plans of its own")
        return tenant

    # A sink belongs to a whole tenant: a caller for a part of it would receive the events of other parts.

    async def _find_sinks(self, query: SinkQuery) -> Found[SinkStatus]:
        return Found() if self._is_part else await self._store.find(replace(query, tenant=self.tenant))

    async def _find_bus_dead_letters(self, query: BusDeadLetterQuery) -> Found[BusDeadLetter]:
        return Found() if self._is_part else await self._store.find(replace(query, tenant=self.tenant))

    @property
    def _is_part(self) -> bool:
        return self.project is not None or self.environment is not None

    async def _has_sink(self, name: str) -> bool:
        return bool(await self.find(SinkQuery(name=name)))

    async def put_sink(self, sink: Sink, audit: AuditEntry | None = None) -> Sink:
        """Store a webhook of the tenant. Tenants may not configure sinks that reach into the installation's own
        network.
        """
        if self._is_part or sink.tenant != self.tenant or not sink.name.startswith(f"{self.tenant}:"):
            raise NotPermitted(f"a tenant keeps sinks of its own, whose names begin with '{self.tenant}:'")
        if sink.kind != "webhook" or sink.allow_private:
            raise NotPermitted("a tenant keeps webhooks that reach public addresses")
        return await self._store.put_sink(sink, None if audit is None else self._audited(audit))

    async def remove_sink(self, name: str, audit: AuditEntry | None = None) -> bool:
        if not await self._has_sink(name):
            return False
        return await self._store.remove_sink(name, None if audit is None else self._audited(audit))

    async def replay_outbox(self, asked: OutboxReplay, audit: AuditEntry | None = None) -> Replayed:
        if not await self._has_sink(asked.sink):
            raise no_such_sink(asked.sink)
        return await self._store.replay_outbox(asked, None if audit is None else self._audited(audit))

    async def settle_bus_dead_letters(
        self, ids: Sequence[str], action: Settlement, audit: AuditEntry | None = None
    ) -> list[Settled | Refused]:
        own = [id for id in ids if await self.find(BusDeadLetterQuery(letter_id=id))]
        entry = None if audit is None else self._audited(audit)
        answers = iter(await self._store.settle_bus_dead_letters(own, action, entry))
        return [next(answers) if id in own else Refused(no_such_letter(id)) for id in ids]

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        await self._store.append_audit([self._audited(entry) for entry in entries])

    async def _find_audit(self, query: AuditQuery) -> Found[AuditEntry]:
        query = replace(query, tenant=self.tenant)
        async for page in pages(self._store.find, query, lambda entry: (entry.at, entry.entry_id)):
            if found := self._part(page, [entry for entry in page if belongs_to(self, entry)]):
                return found
        return Found()

    async def _find_archived(self, query: ArchivedRunQuery) -> Found[ArchivedRun]:
        query = replace(query, tenant=self.tenant)
        while True:
            page = await self._store.find(query)
            if not page or (found := self._part(page, [run for run in page if belongs_to(self, run)])):
                return page if not page else found
            query = replace(query, before=(page[-1].finished_at, page[-1].run_id))

    def _audited(self, entry: AuditEntry) -> AuditEntry:
        return replace(entry, tenant=self.tenant, project=self.project, environment=self.environment)

    async def publish_definitions(self, definitions: Sequence[WorkflowDeclaration]) -> None:
        await self._store.publish_definitions(definitions)

    async def find_definitions(self, plans: Sequence[Plan]) -> list[WorkflowDeclaration | None]:
        return await self._store.find_definitions(plans)

    async def put_tokens(self, tokens: Sequence[AccessToken], audit: Sequence[AuditEntry] = ()) -> list[AccessToken]:
        ids = tuple(token.token_id for token in tokens)
        known = await self._store.find_tokens(TokenQuery(token_ids=ids, sessions=True, limit=len(ids) or 1))
        if not all(belongs_to(self, token) for token in [*tokens, *known]):
            raise NotPermitted("a tenant keeps tokens of its own")
        return await self._store.put_tokens(tokens, [self._audited(entry) for entry in audit])

    async def _find_events(self, query: EventQuery) -> Found[Event]:
        own = await self._own([run_id for run_id, _ in query.after])
        places = tuple(place for place in query.after if place[0] in own)
        return await self._store.find(replace(query, after=places)) if places else Found()

    async def _find_mailbox(self, query: MailboxQuery) -> Found[Signal]:
        if query.run_id is not None:
            return await self._store.find(query) if await self._own([query.run_id]) else Found()
        query = replace(query, tenant=self.tenant)
        while True:
            page = await self._store.find(query)
            own = await self._own([signal.run_id for signal in page])
            found = [signal for signal in page if signal.run_id in own]
            if found or (not page and page.cursor is None):
                return self._part(page, found)
            after_run, after = page.cursor or (page[-1].run_id, page[-1].inbox_seq)
            query = replace(query, after_run=after_run, after=after)

    async def _find_streams(self, query: StreamQuery) -> Found[NamedStream]:
        return await self._store.find(query) if await self._own([query.run_id]) else Found()

    async def _find_places(self, query: PlaceQuery) -> Found[PlaceInLine]:
        """Return the queue positions of the tenant's runs. The number of places that others occupy is not revealed."""
        own = await self._own(query.run_ids)
        run_ids = tuple(run_id for run_id in query.run_ids if run_id in own)
        places = await self._store.find(replace(query, run_ids=run_ids)) if run_ids else ()
        return Found(replace(place, taken=None) for place in places)

    async def _find_waits(self, query: WaitQuery) -> Found[Wait]:
        return await self._find_of_runs(query, lambda wait: (wait.run_id, wait.step_id))

    async def _find_tasks(self, query: TaskQuery) -> Found[Task]:
        return await self._find_of_runs(query, lambda task: task.task_id)

    async def _find_dead_letters(self, query: DeadLetterQuery) -> Found[DeadLetter]:
        return await self._find_of_runs(query, lambda letter: (letter.died_at, letter.letter_id))

    async def settle_dead_letters(
        self, ids: Sequence[str], action: Settlement, actor: str = "", audit: AuditEntry | None = None
    ) -> list[Settled | Refused]:
        own = [id for id in ids if await self.find(DeadLetterQuery(letter_id=id, settled=True))]
        answers = iter(await self._store.settle_dead_letters(own, action, actor, audit))
        return [next(answers) if id in own else Refused(no_such_letter(id)) for id in ids]

    async def _find_of_runs(self, query: Query[Row], cursor_of: Callable[[Row], Any]) -> Found[Row]:
        """Return the next rows of the tenant's own runs. Only at the end are there no rows and no cursor."""
        query = replace(query, tenant=self.tenant)
        while True:
            page = await self._store.find(query)
            if not page or (self.project is None and self.environment is None):
                return page
            own = await self._own([row.run_id for row in page])
            found = [row for row in page if row.run_id in own]
            if found or page.cursor is not None:
                return Found(found, page.cursor, as_of=page.as_of)
            if getattr(query, "look", None) is not None:
                return Found((), cursor_of(page[-1]), as_of=page.as_of)
            query = replace(query, after=cursor_of(page[-1]))

    def _part(self, page: Found[T], own: list[T]) -> Found[T]:
        """Return the tenant's own rows of a page. The project of damaged rows cannot be known."""
        is_bound = self.project is not None or self.environment is not None
        return Found(own, page.cursor, () if is_bound else page.unreadable, page.as_of)

    async def _own(self, run_ids: Sequence[str]) -> set[str]:
        return set(await heads_of(self, run_ids))


async def heads_of(store: Index, run_ids: Iterable[str]) -> dict[str, RunHead]:
    """Return the heads of the runs to which the rows of a page belong, by id. A deleted run has none."""
    asked = tuple(dict.fromkeys(run_ids))
    found: dict[str, RunHead] = {}
    query = RunQuery(run_ids=asked, limit=len(asked) or 1)
    while (page := await store.find(query)) or page.cursor is not None:
        found |= {head.run_id: head for head in page}
        if len(found) == len(asked):
            break
        query = RunQuery(run_ids=asked, after=page.cursor or page[-1].run_id, limit=len(asked))
    return found
