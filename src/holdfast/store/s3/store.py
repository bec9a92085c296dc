"""The store in a bucket: every verb of the port on conditional writes of objects.

* `bucket` has the objects and their conditions; `server_time` the time;
* `head` is a run as one object, and `heads` changes it: replacing the head is the commit;
* `create`, `relay` and `signals` handle what takes more than one object: a request and its run, what a run sends to
  others, and signals that any S3 client puts into the bucket;
* `leases` determines which node owns which run, and `jobs` has the activities in queues;
* `mirror` is a process's view of all runs, for everything that has to be searched;
* `documents` has the data that is not part of a run.

The reference model (`memory/run.py`) decides what the rules say about a run. Atomicity is per run. Runs of a batch are
changed concurrently, and changes of the same run are one write.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from holdfast.clock import Clock, Secrets, SystemSecrets
from holdfast.core import codec
from holdfast.core.access import AccessToken, is_expired_session, merge_tokens
from holdfast.core.admission import RunLimit
from holdfast.core.audit import AuditEntry, letter_entry, run_entry
from holdfast.core.call_limits import CallLimit
from holdfast.core.dead_letters import Settled, Settlement
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.messages import Message, SignalRequest
from holdfast.core.plans import RegisteredPlan
from holdfast.core.schedules import Schedule
from holdfast.core.state import TERMINAL
from holdfast.core.streams import Appended, NamedStream, StreamAppend, StreamPage, StreamRead
from holdfast.errors import CallerError, Conflict, StoreCorrupt, StoreUnavailable
from holdfast.limits import Limits
from holdfast.store import decisions, health, port, validation
from holdfast.store.health import Finding
from holdfast.store.joined import JoinedStore, no_transactions
from holdfast.store.memory import queries
from holdfast.store.memory.health import examine
from holdfast.store.memory.host_locks import HostLocks
from holdfast.store.memory.plans import Plans
from holdfast.store.memory.retention import find_finished
from holdfast.store.memory.run import Run
from holdfast.store.memory.tokens import Tokens
from holdfast.store.queries import within
from holdfast.store.s3.admission import Admission
from holdfast.store.s3.bucket import Bucket
from holdfast.store.s3.bulletins import StoredBulletins
from holdfast.store.s3.bus import OUTBOX, WithoutBus, nothing
from holdfast.store.s3.create import Creator, deliver_all
from holdfast.store.s3.documents import (
    Document,
    LocksDocument,
    Objects,
    PlansDocument,
    TokensDocument,
    locks_document,
    locks_of,
)
from holdfast.store.s3.head import FORMAT, StoredRun, note_audit
from holdfast.store.s3.heads import Heads
from holdfast.store.s3.jobs import Jobs
from holdfast.store.s3.leases import Leases
from holdfast.store.s3.mirror import ANNOUNCED_BULLETINS, Mirror
from holdfast.store.s3.polling import SWEEP_MS, PollingWakeups
from holdfast.store.s3.relay import Relay
from holdfast.store.s3.retention import ArchiveDocument, Retention, is_held
from holdfast.store.s3.schedules import SchedulesDocument, StoredSchedules
from holdfast.store.s3.server_time import ServerTime
from holdfast.store.s3.shards import GRACE
from holdfast.store.s3.signals import SignalObjects
from holdfast.store.s3.streams import StreamParts, append_all
from holdfast.store.s3.summary import Summary
from holdfast.store.s3.transfer import S3Transfer
from holdfast.store.transfer import Transfer
from holdfast.store.types import CALL_LIMITS, creations_may_wake_others, load_each
from holdfast.store.wakeups import Wakeups, may_wake_others

T = TypeVar("T")
Row = TypeVar("Row")
Item = TypeVar("Item", SignalRequest | Message, StreamAppend)

FRESH_US = 1_000_000
"""The greatest age of the mirror from which `next_due` and `admit` are answered."""

SWEEP = "sweep of the bucket"
"""The host lock of the process that compares all heads."""

STREAMS_ANNOUNCED_US = 1_000_000
"""How often a process announces that streams have grown: others look no more often than that."""

FROM_HEADS = (port.RunQuery, port.WaitQuery, port.TaskQuery, port.MailboxQuery, port.DeadLetterQuery)
"""The lists that are answered from heads."""

FROM_DOCUMENTS = (
    port.ScheduleQuery,
    port.ArchivedRunQuery,
    port.SinkQuery,
    port.OutboxQuery,
    port.AlertQuery,
    port.BusDeadLetterQuery,
)
"""The lists that need no look for changes: they are in a separate object, or of data that a bucket does not have."""

LOOKED_US = 4_000_000
"""A node that has claimed within this time does not look again."""


class S3Store(WithoutBus):
    """A store in a bucket. Create it with `open`. For the time `grace`, a run is left to the node of its shard."""

    def __init__(
        self,
        bucket: Bucket,
        clock: Clock | None = None,
        limits: Limits | None = None,
        wakeups: Wakeups | None = None,
        secrets: Secrets | None = None,
        grace: int = 0,
    ) -> None:
        self.capabilities = port.Capabilities(
            conditional_batch=True,
            atomic_batch=False,
            read_after_write=True,
            scan_consistency="eventual",
            lacking=frozenset({CALL_LIMITS, OUTBOX}),
        )
        self.extend_lease = None  # a lease is renewed by a request, which needs the loop
        self.bucket = bucket
        self._clock = clock
        self._limits = limits or Limits()
        self._secrets = secrets or SystemSecrets()
        self._writer = writer = self._secrets.new_secret()[:12]
        self._time = ServerTime(bucket)
        self._mirror = Mirror(bucket, writer)
        self._heads = Heads(bucket, self._mirror, self._secrets, self._now)
        self._admission = Admission(bucket, self._mirror, self._heads, self._secrets)
        self._creator = Creator(bucket, self._mirror, self._heads, self._admission, self._secrets, self._limits)
        self._relay = Relay(self._mirror, self._heads, self._creator, self._limits)
        self._signals = SignalObjects(bucket, self._mirror, self._heads, self._limits)
        self._leases = Leases(bucket, self._mirror, self._heads, self._secrets, self._follow, grace)
        self._jobs = Jobs(self._mirror, self._heads)
        self._objects = Objects(bucket)
        self._stream_parts = StreamParts(bucket)
        self._streams_announced_at = 0
        self._tokens = Document(bucket, self._secrets, "tokens.json", TokensDocument())
        self._bulletins = StoredBulletins(bucket, self._secrets)
        self._locks = Document(bucket, self._secrets, "locks.json", LocksDocument())
        self._plans = Document(bucket, self._secrets, "plans.json", PlansDocument())
        schedules = Document(bucket, self._secrets, "schedules.json", SchedulesDocument())
        self._schedules = StoredSchedules(schedules, self.create, self._creator.is_requested)
        self._retention = Retention(
            self._mirror,
            self._heads,
            self._objects,
            self._signals,
            self._tokens,
            self._plans,
            Document(bucket, self._secrets, "archive.json", ArchiveDocument()),
        )
        self.wakeups: Wakeups = PollingWakeups(self._look, wakeups)
        self._is_closed = False
        self._finders: dict[type, Callable[[Any], Awaitable[port.Found[Any]]]] = {
            port.RunQuery: self._finder(queries.find_runs),
            port.RunCountQuery: self._finder(queries.count_runs),
            port.WaitQuery: self._finder(queries.find_waits),
            port.EventQuery: self._find_events,
            port.StreamQuery: self._find_streams,
            port.PlaceQuery: self._admission.find_places,
            port.MailboxQuery: self._finder(queries.find_mailbox),
            port.TaskQuery: self._finder(queries.find_tasks),
            port.DeadLetterQuery: self._finder(queries.find_dead_letters),
            port.FinishedRunQuery: self._finder(_find_finished),
            port.ArchivedRunQuery: self._retention.find_archived,
            port.AuditQuery: self._retention.find_audit,
            port.ScheduleQuery: self._schedules.find,
            port.SinkQuery: nothing,
            port.OutboxQuery: nothing,
            port.AlertQuery: nothing,
            port.BusDeadLetterQuery: nothing,
        }

    def _finder(self, find: Callable[[Any, Any], port.Found[Any]]) -> Callable[[Any], Awaitable[port.Found[Any]]]:
        async def find_in_mirror(query: Any) -> port.Found[Any]:
            if isinstance(query, port.RunQuery) and query.run_ids is not None:
                await self._mirror.check_abandoned(query.run_ids, await self._now())
            narrowed = _narrowed(query)
            if narrowed is None:
                return find(await self._mirror.read_all(), query)
            return find(
                await self._mirror.read([run_id for run_id, each in self._mirror.summaries.items() if narrowed(each)]),
                query,
            )

        return find_in_mirror

    @classmethod
    async def open(
        cls,
        address: str,
        *,
        limits: Limits | None = None,
        busy_ms: int = 30_000,
        wakeups: Wakeups | None = None,
    ) -> "S3Store":
        """Open the store at `s3://bucket/prefix`, after its server has proved that it honours conditions."""
        bucket = Bucket.at(address, patience_s=max(1.0, busy_ms / 1_000))
        await bucket.check_conditions()
        return cls(bucket, limits=limits, wakeups=wakeups, grace=GRACE)

    @property
    def transfer(self) -> Transfer:
        """Export and import of complete runs."""
        return S3Transfer(
            self.bucket,
            self._mirror,
            self._heads,
            self._objects,
            self._retention,
            self._secrets,
            self._now,
            self._settle_all,
        )

    async def _settle_all(self, now: Instant) -> None:
        """Relay everything that runs send to each other, and accept all signals in the bucket."""
        await self._mirror.follow(now)
        for run_id in list(self._mirror.active):
            await self._relay.relay(run_id, now)
        await self._signals.collect(now)
        await self._announce()

    # --- RunStore

    async def now(self) -> Instant:
        return await self._now()

    async def _now(self) -> Instant:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        return await self._time.now() if self._clock is None else self._clock.now()

    async def create(
        self, runs: Sequence[port.NewRun], claim_for: str | None = None
    ) -> list[port.Created | port.Existing | port.Refused]:
        now = await self._now()
        validation.check_batch(runs, self._limits)
        validation.require_for_signals(self, (signal for new in runs for signal in getattr(new, "signals", ())))
        validation.require_for_records(self, runs)
        if claim_for is not None:
            await self._leases.check(claim_for, now)
        order = self._mirror.next_order(now)
        answers: list[Any] = [None] * len(runs)
        in_turn = [bool(getattr(new, "admission", None) or getattr(new, "reuse", None)) for new in runs]
        for wave in _waves([_names_of_request(new) for new in runs], in_turn):
            created = [self._creator.create(runs[place], claim_for, now, order + place) for place in wave]
            for place, answer in zip(wave, await asyncio.gather(*created), strict=True):
                answers[place] = answer
        for new, answer in zip(runs, answers, strict=True):
            if getattr(new, "reuse", None) is not None and not isinstance(answer, port.Refused):
                await self._relay.relay(answer.run_id, now)
        for answer in answers:
            if isinstance(answer, port.Existing):
                self._heads.note_unannounced(answer.run_id)
        await self._announce(creations_may_wake_others(runs, answers))
        return answers

    def joined(self, connection: Any) -> JoinedStore:
        raise no_transactions("a store in a bucket")

    async def load(self, run_ids: Sequence[str]) -> list[port.LoadedRun | None]:
        now = await self._now()
        validation.check_ids(run_ids, self._limits)
        held = dict(
            zip(run_ids, await asyncio.gather(*(self._mirror.fetch(run_id) for run_id in run_ids)), strict=True)
        )
        return [None if (found := held[run_id]) is None else found.run.loaded(now) for run_id in run_ids]

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        validation.check_values(run_id=run_id, after=after)
        validation.check_bound("most_bytes", most_bytes)
        await self._now()
        most = self._limits.page_items if limit is None else validation.check_page(limit)
        held = await self._mirror.fetch(run_id) if run_id else None
        if held is None:
            return []
        events = await self._unless_deleted(held.run, self._heads.events(held.run, max(after, 0), most)) or []
        return list(within(events, most_bytes, lambda event: len(codec.encode_body(event.data))))

    async def deliver(
        self, items: Sequence[SignalRequest | Message]
    ) -> list[port.Accepted | port.Duplicate | port.Refused]:
        now = await self._now()
        validation.check_batch(items, self._limits)
        validation.require_for_signals(self, (item for item in items if isinstance(item, SignalRequest)))
        answers = await self._change_each(
            items,
            lambda item: validation.check_item(item, self._limits),
            lambda run, mine: deliver_all(run, mine, self._limits, now),
        )
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, port.Duplicate):
                self._heads.note_unannounced(item.run_id)
        await self._announce()
        return answers

    async def commit(self, turns: Sequence[port.Turn]) -> list[port.Committed | port.CommitConflict]:
        now = await self._now()
        validation.check_batch(turns, self._limits)
        validation.require_for_records(self, turns)
        answers: list[Any] = [None] * len(turns)
        for wave in _waves([{turn.run_id} for turn in turns], [bool(turn.starts or turn.sends) for turn in turns]):
            committed = await asyncio.gather(*(self._commit(turns[place], now) for place in wave))
            for place, answer in zip(wave, committed, strict=True):
                answers[place] = answer
        await self._announce(any(map(may_wake_others, turns)))
        return answers

    async def _commit(self, turn: port.Turn, now: Instant) -> port.Committed | port.CommitConflict:
        def decide(run: StoredRun) -> tuple[port.Committed | port.CommitConflict, StoredRun | None]:
            before, was_begun = run.head.version, run.has_begun
            answer = run.commit(turn, now)
            if isinstance(answer, port.CommitConflict):
                return answer, None
            if before == turn.expected_version:
                run.keep_outgoing(turn, now)
                run.streams.write(turn.run_id, turn.streams, self._limits.stream_bytes, now)
                if turn.admission is not None:
                    run.admission = decisions.unrejected(turn.admission)
            has_moved = run.is_finished or run.has_begun != was_begun
            return answer, run if run.admission is not None and has_moved else None

        decided = await self._heads.change_readable(turn.run_id, decide)
        if decided is None:
            return port.CommitConflict("no such run")
        answer, moved = decided
        if moved is not None:
            await self._admission.moved(moved, now)
        if isinstance(answer, port.Committed) and turn.admission is not None:
            await self._admission.enter_again(turn.run_id, now)
        if isinstance(answer, port.Committed) and (turn.starts or turn.sends):
            await self._relay.relay(turn.run_id, now)
        return answer

    async def claim(self, node: str, limit: int, plans: Sequence[port.Plan] | None = None) -> list[port.LoadedRun]:
        validation.check_values(node=node)
        validation.check_plans(plans)
        now = await self._now()
        validation.check_page(limit)
        await self._follow(now)
        await self._leases.check(node, now)
        await self._relay.relay_abandoned(now)
        claimed = await self._leases.claim(node, limit, plans, now)
        await self._announce(notify=False)
        return claimed

    async def renew(
        self, node: str, lease_ms: int, plans: Sequence[port.Plan] | None = None, is_start: bool = False
    ) -> Instant:
        now = await self._now()
        validation.check_lease(node, lease_ms, plans)
        if not self._mirror.is_loaded or is_start:
            await self._follow(now)
            now = await self._now()  # with many runs this takes a while, and the lease begins now
        until = await self._leases.renew(node, lease_ms, plans, now, is_start=is_start)
        if is_start:
            await self._change_locks(lambda locks: locks.end_lives(node, now))
        await self._announce(notify=is_start)
        return until

    async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
        validation.check_values(node=node)
        validation.check_ids(run_ids or ())
        now = await self._now()
        await self._follow(now)
        released = await self._leases.release(node, run_ids, now)
        await self._announce()
        return released

    async def hand_over(self, node: str, run_ids: Sequence[str], to: str) -> list[str]:
        validation.check_values(node=node, to=to)
        validation.check_ids(run_ids, self._limits)
        now = await self._now()
        await self._follow(now)
        given = await self._leases.hand_over(node, run_ids, to, now)
        await self._announce()
        return given

    async def next_due(
        self, node: str, plans: Sequence[port.Plan] | None = None, queues: Sequence[str] = ()
    ) -> Instant | None:
        validation.check_values(node=node)
        validation.check_plans(plans)
        validation.check_names("queues", queues, self._limits)
        now = await self._now()
        await self._follow(now, FRESH_US)
        return await self._leases.next_due(node, plans, queues, now)

    # --- JobQueue

    async def acquire_jobs(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> list[port.Job]:
        validation.check_acquire(node, queues, activities, limit, visible_ms, self._limits)
        now = await self._now()
        if not queues or not activities:
            return []
        await self._follow(now)
        taken = await self._jobs.acquire(node, queues, activities, limit, now + visible_ms * 1_000, now)
        await self._announce(notify=False)
        return taken

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
        raise validation.lacks(self, CALL_LIMITS, "a limit on an activity")

    async def release_jobs(self, node: str, jobs: Sequence[port.Job]) -> int:
        validation.check_release(node, jobs, self._limits)
        now = await self._now()
        released = await self._jobs.release(node, jobs, now)
        await self._announce()
        return released

    async def heartbeat(self, node: str, beats: Sequence[port.Heartbeat], visible_ms: int) -> list[bool]:
        validation.check_heartbeats(node, beats, visible_ms, self._limits)
        now = await self._now()
        kept = await self._jobs.heartbeat(node, beats, now + visible_ms * 1_000)
        await self._announce(notify=False)
        return kept

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> tuple[list[port.Admitted], Instant | None]:
        validation.check_admit(limits, limit, claim_for, self._limits)
        now = await self._now()
        if claim_for is not None:
            await self._leases.check(claim_for, now)
        if not limits:
            return [], None
        await self._follow(now, FRESH_US)
        admitted, next_at = await self._admission.admit(limits, limit, claim_for, now)
        await self._announce(notify=bool(admitted))
        return admitted, next_at

    # --- Index

    async def find(self, query: port.Query[Row]) -> port.Found[Row]:
        finder = validation.finder_of(self._finders, query)
        now = await self._now()
        as_of = now
        if not isinstance(query, FROM_DOCUMENTS):
            await self._follow(now)
            as_of = self._mirror.followed_at
        most = min(validation.check_page(query.limit), self._limits.page_items)
        if isinstance(query, port.RunCountQuery) or getattr(query, "order", None) is not None:
            found = await finder(replace(query, limit=most))  # it has its own bound and cursor
            return port.Found(found, found.cursor, self._unreadable(query), as_of)
        found = await finder(query)
        page = queries.page_of(found, query, most)
        cursor = found.cursor if len(page) == len(found) < query.limit else None
        return port.Found(page, cursor, self._unreadable(query), as_of, found.missing)

    def _unreadable(self, query: port.Query[Any]) -> tuple[str, ...]:
        """Return the runs that a list lacks because their heads cannot be read."""
        if not isinstance(query, FROM_HEADS):
            return ()
        wanted = query.run_ids if isinstance(query, port.RunQuery) else None
        return tuple(sorted(run_id for run_id in self._mirror.unreadable if wanted is None or run_id in wanted))

    async def _find_events(self, query: port.EventQuery) -> port.Found[Event]:
        places = sorted(dict(query.after).items())
        most = min(query.limit, self._limits.page_items)
        missing: list[str] = []
        if query.only_ends:
            places, missing = await self._ends_behind(places)
        read = await asyncio.gather(*(self.read_events(run_id, after, most) for run_id, after in places))
        return port.Found((event for events in read for event in events), missing=tuple(missing))

    async def _find_streams(self, query: port.StreamQuery) -> port.Found[NamedStream]:
        held = await self._mirror.fetch(query.run_id)
        return port.Found([] if held is None else held.run.streams.named(query.run_id, query.after))

    async def _ends_behind(self, places: Sequence[tuple[str, int]]) -> tuple[list[tuple[str, int]], list[str]]:
        """Return the positions just before the last events of the finished runs, if those come after the given ones.

        Also return the runs that do not exist: no head is found for a run that this process does not know.
        """
        known = self._mirror.summaries
        asked = [run_id for run_id, _ in places if run_id not in known or known[run_id].status in TERMINAL]
        runs = dict(zip(asked, await load_each(self.load, asked) if asked else (), strict=True))
        ends = {
            run_id: run.head.version
            for run_id, run in runs.items()
            if isinstance(run, port.LoadedRun) and run.head.status in TERMINAL
        }
        behind = [(run_id, ends[run_id] - 1) for run_id, after in places if after < ends.get(run_id, after)]
        return behind, [run_id for run_id, run in runs.items() if run is None]

    async def find_nodes(self) -> list[port.NodePlans]:
        now = await self._now()
        await self._follow(now)
        await self._mirror.fetch_nodes(list(self._mirror.nodes), now)
        return [
            port.NodePlans(node, frozenset(held.record.plans))
            for node, held in sorted(self._mirror.nodes.items())
            if held.record.plans is not None and self._mirror.lease_end(node, now) > now
        ]

    async def find_orphaned(self, late_ms: int) -> list[port.OrphanedDefinition]:
        validation.check_late(late_ms)
        now = await self._now()
        await self._follow(now)
        await self._mirror.fetch_nodes(list(self._mirror.nodes), now)
        leases = self._leases.ends()
        known = {
            node: frozenset(held.record.plans)
            for node, held in self._mirror.nodes.items()
            if held.record.plans is not None
        }
        summaries = self._mirror.summaries.values()
        owners = {summary.lease_owner for summary in summaries}
        leases |= {owner: 0 for owner in owners if owner is not None and owner not in leases}
        return queries.find_orphaned(summaries, leases, known, late_ms, now)

    async def find_definitions(self, plans: Sequence[port.Plan]) -> list[WorkflowDeclaration | None]:
        validation.check_plans(plans)
        await self._now()
        return list(await asyncio.gather(*map(self._objects.get_definition, plans)))

    async def changes(self, cursor: str = "", limit: int = 1_000) -> port.Changes:
        now = await self._now()
        most = min(validation.check_page(limit), self._limits.page_items)
        await self._follow(now)
        return await self._mirror.since(cursor, most) if cursor else port.Changes(self._mirror.cursor())

    async def stats(self) -> port.Stats:
        now = await self._now()
        await self._follow(now)
        await self._mirror.fetch_nodes(list(self._mirror.nodes), now)
        runs = self._mirror.summaries.values()
        queues = [work.queue for run in runs for work in run.work if work.queue is not None]
        ready = [run.ready_at for run in runs if run.ready_at is not None and run.ready_at <= now]
        leases = self._leases.ends()
        alive = {node: end for node, end in leases.items() if decisions.lease_end(end, now) > now}
        return port.Stats(
            runs=dict(Counter(str(run.status) for run in runs)),
            ready=len(ready),
            leased=sum(run.lease_owner is not None for run in runs),
            messages=sum(run.messages for run in runs),
            signals=sum(run.signals for run in runs),
            open_tasks=sum(run.open_tasks for run in runs),
            jobs=len(queues),
            queued=sum(run.is_queued for run in runs),
            dead_letters=sum(run.open_letters for run in runs),
            nodes=len(alive),
            oldest_ready_at=min(ready, default=None),
            queues=dict(Counter(queues)),
            leases=alive,
        )

    async def health(self, bounds: health.Bounds, *, thorough: bool = False) -> health.Facts:
        now = await self._now()
        await self._follow(now)
        runs: Mapping[str, Run] = await self._mirror.read_all()
        facts = examine(runs, self._leases.ends(), bounds, now)
        return replace(
            facts,
            software="S3",
            schema_version=FORMAT,
            latest_version=FORMAT,
            findings=(
                health.fine(
                    "store",
                    f"its server honours conditional writes; this process has sent {self.bucket.requests.total()} "
                    f"requests; waiting, it sends {self.idle_requests_per_hour()} an hour, beside those of leases",
                ),
                *self._findings(),
            ),
        )

    def _findings(self) -> list[Finding]:
        unread = sorted(self._mirror.unreadable)
        if not unread:
            return []
        sentence = f"the heads of {len(unread)} runs cannot be read, and the runs are left alone"
        advice = "upgrade Holdfast if a newer version has written them; else put them back from a backup"
        return [health.wrong("heads", sentence, advice, unread[:10])]

    def idle_requests_per_hour(self) -> int:
        """Return how many requests per hour an idle process sends, besides those for leases."""
        polling: Any = self.wakeups
        return int(polling.requests_per_hour(len(self._mirror.summaries)))

    # --- Admin

    async def migrate(self) -> int:
        await self._now()
        return FORMAT

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.wakeups.close()

    async def publish_definitions(self, definitions: Sequence[WorkflowDeclaration]) -> None:
        validation.check_definitions(definitions, self._limits)
        await self._now()
        await self._objects.put_definitions(definitions)

    async def settle_dead_letters(
        self, ids: Sequence[str], action: Settlement, actor: str = "", audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        validation.check_settlement(ids, action, actor, self._limits)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        now = await self._now()
        await self._follow(now)
        answers = [await self._settle(letter_id, action, actor, now, audit) for letter_id in ids]
        await self._announce()
        return answers

    async def _settle(
        self, letter_id: str, action: Settlement, actor: str, now: Instant, audit: AuditEntry | None
    ) -> Settled | port.Refused:
        def decide(run: StoredRun) -> Settled | port.Refused | None:
            before = run.letters.get(letter_id)
            if before is None:
                return None
            answer = run.settle(before, action, actor, now)
            if audit is not None and isinstance(answer, Settled) and before.settled is None:
                whose = (run.head.tenant, run.head.project, run.head.environment)
                note_audit(run, [run_entry(letter_entry(audit, letter_id), run.head.run_id, whose, now)])
            return answer

        some = [run_id for run_id, summary in self._mirror.summaries.items() if summary.letters]
        holders = [run_id for run_id, run in (await self._mirror.read(some)).items() if letter_id in run.letters]
        for run_id in holders:
            answer = await self._heads.change(run_id, decide)
            if answer is not None:
                return answer
        return port.Refused(decisions.no_such_letter(letter_id))

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        validation.check_audit(entries, self._limits)
        now = await self._now()
        await self._objects.append_audit(replace(entry, at=now) for entry in entries)

    async def purge(self, policy: port.PurgePolicy, audit: AuditEntry | None = None) -> port.PurgeReport:
        validation.check_purge(policy, audit, self._limits)
        now = await self._now()
        await self._follow(now)
        report = await self._retention.purge(policy, audit, now)
        if policy.plans and not policy.dry_run:
            await self._schedules.forget(policy.tenant)
        await self._announce()
        return report

    async def acquire_lock(self, name: str, owner: str, lease_ms: int) -> port.HostLock | None:
        validation.check_lock(name, owner, lease_ms)
        now = await self._now()
        return await self._change_locks(lambda locks: locks.acquire(name, owner, lease_ms, now))

    async def release_lock(self, name: str, owner: str, epoch: int) -> bool:
        validation.check_lock(name, owner, epoch=epoch)
        await self._now()
        return await self._change_locks(lambda locks: locks.release(name, owner, epoch))

    async def find_locks(self) -> list[port.HostLock]:
        await self._now()
        return locks_of(await self._locks.read()).find()

    async def _change_locks(self, decide: Callable[[HostLocks], T]) -> T:
        def on_document(document: LocksDocument, mark: str) -> tuple[LocksDocument, T]:
            locks = locks_of(document)
            answer = decide(locks)
            changed = locks_document(locks, document.mark)
            return (document if changed == document else locks_document(locks, mark)), answer

        return await self._locks.change(on_document)

    # --- TokenStore

    async def put_tokens(self, tokens: Sequence[AccessToken], audit: Sequence[AuditEntry] = ()) -> list[AccessToken]:
        validation.check_tokens(tokens, self._limits)
        validation.check_audit(audit, self._limits)
        now = await self._now()

        def decide(document: TokensDocument, mark: str) -> tuple[TokensDocument, list[AccessToken]]:
            kept = {id_: token for id_, token in document.tokens.items() if not is_expired_session(token, now)}
            for token in tokens:
                kept[token.token_id] = merge_tokens(kept.get(token.token_id, token), token)
            return TokensDocument(kept, mark), [kept[token.token_id] for token in tokens]

        stored = await self._tokens.change(decide)
        await self._objects.append_audit(replace(entry, at=now) for entry in audit)
        return stored

    async def find_tokens(self, query: port.TokenQuery) -> port.Found[AccessToken]:
        validation.check_query(query)
        await self._now()
        tokens = Tokens()
        tokens.put(list((await self._tokens.read()).tokens.values()), 0)
        return port.Found(self._page(tokens.find(query), query.limit))

    async def put_key(self, name: str, key: str) -> str:
        validation.check_key(name, key)
        await self._now()
        return await self._objects.put_key(name, key)

    async def get_key(self, name: str) -> str | None:
        validation.check_names("name", [name])
        await self._now()
        return await self._objects.get_key(name)

    # --- PlanStore

    async def put_plan(self, tenant: str, sha256: str, body: bytes) -> None:
        validation.check_plan_body(tenant, sha256, body)
        await self._objects.put_body(tenant, sha256, body, await self._now())

    async def get_plan(self, tenant: str, sha256: str) -> bytes | None:
        validation.check_plan_body(tenant, sha256)
        await self._now()
        return await self._objects.get_body(tenant, sha256)

    async def register_plan(self, plan: RegisteredPlan, audit: AuditEntry | None = None) -> RegisteredPlan:
        validation.check_registered_plan(plan)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        now = await self._now()
        has_body = await self._objects.get_body(plan.tenant, plan.sha256) is not None

        def decide(document: PlansDocument, mark: str) -> tuple[PlansDocument, RegisteredPlan]:
            plans = Plans()
            if has_body:
                plans.put(plan.tenant, plan.sha256, b"", now)
            for each in document.plans:
                plans.restore(each)
            stored = plans.register(plan, now)
            is_new = all(each != stored for each in document.plans)
            return PlansDocument((*document.plans, *([stored] if is_new else [])), mark), stored

        stored = await self._plans.change(decide)
        if audit is not None:
            await self._objects.append_audit([replace(audit, at=now)])
        return stored

    async def find_plans(self, query: port.PlanQuery) -> port.Found[RegisteredPlan]:
        validation.check_query(query)
        await self._now()
        plans = Plans()
        for each in (await self._plans.read()).plans:
            plans.restore(each)
        return port.Found(self._page(plans.find(query), query.limit))

    # --- BulletinStore

    async def put_bulletins(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int) -> list[bool]:
        validation.check_bulletins(kind, bodies, keep_ms, self._limits)
        answers = await self._bulletins.put(kind, bodies, keep_ms, await self._now())
        if kind in ANNOUNCED_BULLETINS:
            self._mirror.bulletins[kind] += 1
            self._heads.note_bulletin(kind)
            await self._announce()
        return answers

    async def find_bulletins(self, query: port.BulletinQuery) -> port.Found[port.Bulletin]:
        validation.check_query(query)
        now = await self._now()
        if query.kind in ANNOUNCED_BULLETINS and query.bulletin_ids is None:
            await self._follow(now, LOOKED_US)
            found = await self._bulletins.find_announced(query, self._mirror.bulletins[query.kind], now)
        else:
            found = await self._bulletins.find(query, now)
        return port.Found(self._page(found, query.limit))

    # --- StreamStore

    async def append_streams(self, items: Sequence[StreamAppend]) -> list[Appended | port.Refused]:
        validation.check_batch(items, self._limits)
        now = await self._now()
        answers = await self._change_each(
            items,
            validation.check_append,
            lambda run, mine: append_all(run.streams, mine, run.fence_of, self._limits, now),
        )
        if now - self._streams_announced_at >= STREAMS_ANNOUNCED_US:
            self._streams_announced_at = now
            await self._heads.announce()
        self.wakeups.notify("streams")
        return answers

    async def read_streams(self, items: Sequence[StreamRead]) -> list[StreamPage | None]:
        validation.check_stream_reads(items, self._limits)
        await self._now()
        run_ids = dict.fromkeys(asked.run_id for asked in items)
        found = await asyncio.gather(*map(self._mirror.fetch, run_ids))
        runs = {run_id: held.run for run_id, held in zip(run_ids, found, strict=True) if held is not None}

        async def page(asked: StreamRead) -> StreamPage | None:
            run = runs.get(asked.run_id)
            if run is None:
                return None
            read = self._stream_parts.page(asked.run_id, run.streams, asked, run.is_finished)
            return await self._unless_deleted(run, read)

        return list(await asyncio.gather(*map(page, items)))

    # --- ScheduleStore

    async def commit_schedule(
        self,
        schedule: Schedule,
        expected_revision: int,
        starts: Sequence[port.NewRun] = (),
        audit: AuditEntry | None = None,
    ) -> tuple[Schedule, list[port.Created | port.Existing | port.Refused]]:
        validation.check_committed_schedule(schedule, expected_revision, starts, audit, self._limits)
        now = await self._now()
        stored, answers = await self._schedules.commit(schedule, expected_revision, starts, now)
        if audit is not None:
            await self._objects.append_audit([replace(audit, at=now)])
        await self._announce()
        return stored, answers

    async def delete_schedule(
        self, place: tuple[str, str, str, str], expected_revision: int, audit: AuditEntry | None = None
    ) -> bool:
        validation.check_names("schedule", place)
        now = await self._now()
        is_deleted = await self._schedules.delete(place, expected_revision)
        if audit is not None and is_deleted:
            await self._objects.append_audit([replace(audit, at=now)])
        return is_deleted

    # --- shared by several verbs

    async def _change_each(
        self,
        items: Sequence[Item],
        check: Callable[[Item], CallerError | None],
        decide: Callable[[StoredRun, list[Item]], Sequence[Any]],
    ) -> list[Any]:
        """Decide on items that name a run, those of one run together, and return the answers in their order."""
        answers: list[Any] = [None] * len(items)
        by_run: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            problem = check(item)
            if problem is None:
                by_run.setdefault(item.run_id, []).append(place)
            else:
                answers[place] = port.Refused(problem)

        async def on_run(run_id: str, places: list[int]) -> None:
            mine = [items[place] for place in places]
            given = await self._heads.change_readable(run_id, lambda run: decide(run, mine))
            is_there = run_id in self._mirror.unreadable
            missing = port.Refused(unreadable_run(run_id) if is_there else decisions.no_such_run(run_id))
            for place, answer in zip(places, given or [missing] * len(places), strict=True):
                answers[place] = answer

        await asyncio.gather(*(on_run(run_id, places) for run_id, places in by_run.items()))
        return answers

    async def _unless_deleted(self, run: StoredRun, read: Awaitable[T]) -> T | None:
        """Return what was read of a run; None if a part of it is missing because the run is being deleted.

        The request of a run is deleted first, its head last.
        """
        try:
            return await read
        except StoreCorrupt:
            if await self._creator.is_requested(run.request_key):
                raise
            return None

    def _page(self, found: list[T], limit: int) -> list[T]:
        return found[: min(validation.check_page(limit), self._limits.page_items)]

    async def _follow(self, now: Instant, fresh: int = 0) -> bool:
        """Look for changes by others, unless a claim or another call has done so within this time."""
        is_fresh = self._clock is None and self._mirror.is_loaded and now - self._mirror.followed_at < fresh
        return False if is_fresh else await self._mirror.follow(now)

    async def _announce(self, notify: bool = True) -> None:
        await self._heads.announce()
        if notify:
            self.wakeups.notify()

    async def _look(self, thoroughly: bool) -> bool:
        """Look for changes by others; return whether there were any."""
        now = await self._now()
        has_news = await self._follow(now, LOOKED_US)
        has_signals = await self._signals.collect(now)
        if thoroughly and await self.acquire_lock(SWEEP, self._writer, SWEEP_MS) is not None:
            for run_id in await self._mirror.sweep(now):
                self._heads.note_found(run_id)
                has_news = True
            await self._heads.announce()
            await self._mirror.write_index()
        await self._heads.announce()
        return has_news or has_signals


def _find_finished(runs: dict[str, Run], query: port.FinishedRunQuery) -> port.Found[port.RunHead]:
    return find_finished(runs, lambda run_id, after: is_held(runs[run_id], after), query)


def unreadable_run(run_id: str) -> Conflict:
    """Return the refusal of an item for a run whose head cannot be read."""
    words = "its head is damaged, or of a newer version of Holdfast: repair it, or upgrade"
    return Conflict(f"run {run_id!r} cannot be read: {words}", run_id=run_id)


def _narrowed(query: Any) -> Callable[[Summary], bool] | None:
    """Return the runs that a query can find, according to their summaries; None: possibly all."""
    if isinstance(query, port.DeadLetterQuery):
        return lambda summary: summary.letters > 0
    if not isinstance(query, port.RunQuery) or query.look is not None or query.order is not None:
        return None
    if query.status is None and query.run_ids is None:
        return None
    return lambda summary: (
        query.status in (None, summary.status)
        and query.workflow in (None, summary.plan_id)
        and (query.run_ids is None or summary.run_id in query.run_ids)
    )


def _names_of_request(new: Any) -> set[str]:
    return {f"run {getattr(new, 'run_id', '')}", f"request {getattr(new, 'request_key', '')}"}


def _waves(names: Sequence[set[str]], alone: Sequence[bool] = ()) -> list[list[int]]:
    """Split a batch so that no two items of a part share a name, and items that concern other runs are alone."""
    waves: list[list[int]] = []
    taken: set[str] = set()
    is_closed = True
    for place, mine in enumerate(names):
        is_alone = bool(alone) and alone[place]
        if is_closed or is_alone or not taken.isdisjoint(mine):
            waves.append([])
            taken = set()
        waves[-1].append(place)
        taken |= mine
        is_closed = is_alone
    return waves
