"""The store port: what every store promises, and the verbs it offers.

The verbs are grouped into protocols, so that a caller can require no more than it needs:

* `RunStore`: runs, their histories and inboxes, and who owns them;
* `JobQueue`: activities in queues, and runs that are queued for admission;
* `Index`: searches and counts across runs;
* `Admin`: the schema, retention, dead letters, the audit log, host locks;
* `TokenStore`: access tokens and secret keys;
* `PlanStore`, `ScheduleStore`: plans and schedules;
* `BusStore`: sinks and their pending entries;
* `BulletinStore`: short texts that expire and belong to no run;
* `StreamStore`: what runs write for outside readers.

A `Store` implements all of them.

**Atomicity is per run, and only per run.** Each item of a batch (a run created, a signal delivered, a turn committed)
takes effect completely or not at all, and gets its own answer; a conflict in one item does not affect the others. A
store may run a whole batch in one transaction, but no caller may rely on that. When a verb returns, its effect is
durable.

**Only `commit` changes a history** after `create` has begun it. A turn names the version from which it was computed and
the lease epoch. The *version* of a run is the `run_seq` of its last event, so the store numbers new events by counting
up from it: no gaps, no duplicates. The *epoch* grows with every claim by a new owner and with `release`. So an owner
that has lost its lease cannot commit, however late it notices, and a commit that is overtaken by the release of its own
node has no effect. The loser gets a `CommitConflict`, and its turn leaves no trace.

**Retrying is safe.** After an unknown outcome (a time-out, a crash between commit and answer), call again with the same
arguments. `commit` recognises a turn that is already in the history: the events after its version have the turn's keys,
node and epoch. `create` recognises the request's key. `deliver` recognises the id of a signal, and the id of a message
while that message is waiting. If the answer to a claim was lost, the claimed run is still ready, and the next claim
returns it.

**Time comes from the store**: `now()`, and every instant that it writes. A sender's clock is never trusted. Within a
run, acceptance times strictly increase, even when the clock is set back.

**The inbox.** A *message* is handed out when it is due, earliest first, and deleted by the turn that handled it. A
turn handles every message that it was given. A message that it does not consume is handed out again immediately, and so
is one that it consumes and sends again under the same id. A *signal* gets the next `inbox_seq` of its run when it is
accepted, which determines its order. It stays in the mailbox until a turn names it in `received`; a signal that no wait
matched stays there and does not make the run ready again.

**Outcomes by token** are signals named `OUTCOME_SIGNAL`, each for one step. The sender has read that the step is open,
and the store checks that this still holds: it accepts such a signal only at the version that was read
(`expected_version`), before the step's deadline (`accept_before`), and while no other such signal is pending for the
step. A turn that has not seen one (its `inbox_seq` is above `seen_inbox_seq`) is a `CommitConflict`: nothing can close
the step between the acceptance and the turn that records the outcome.

**Readiness.** A run is ready when a message is due, or when a signal has arrived that no turn has seen yet. A finished
run is never ready and has no messages. `claim` can return:

* runs that are ready and have no owner;
* runs of a node whose lease has expired, ready or not, because the state of their activities is unknown. They stay
  ready until a turn is committed: if the answer to the claim is lost, the next claim finds them again;
* runs that are ready and already belong to the claiming node. Their epoch does not change.

A store on which a lost claim is expensive (`s3/shards.py`) may reserve a run for some seconds for one of the nodes that
have a lease and its definition; for the other nodes, `next_due` returns when that ends.

**Leases** belong to nodes: a node renews one lease, however many runs it owns. A run's owner and epoch are stored with
the run, and fencing uses the epoch. A commit by an owner whose lease has expired is still accepted as long as no other
node has claimed the run. A lease that ends far beyond the longest possible one (`decisions.LEASE_HORIZON`) was granted
by a clock that was ahead. It counts as expired, so that no run is stuck after the clock is corrected.

**Queues.** A turn may put a *job* into a queue: an activity that any node may execute. An acquired job is invisible for
a while, and is handed out again if no heartbeat arrives: at least once. The commit that closes its step deletes the
job, so its outcome is recorded once. Like everything sent to other runs, a job becomes durable with its turn.

Jobs of activities that have a **limit** wait in separate queues. `core/call_limits.py` decides how many of them may be
acquired, and in which order.

**Admission** (`core/admission.py`). A run that is created with an `AdmissionRequest` is queued until its workflow
admits it. Until then it has no owner and its messages are held back. Whether admitted or still queued, it leaves
admission with the commit that finishes it.

**Definitions.** A run has one version of one workflow, and a node claims runs only of the versions that it has. It
publishes the list of them with its lease, so that definitions that no live node has can be found (`find_orphaned`). The
same list describes the node's code and activities (`engine/abilities.py` defines the form). A store keeps it and
returns it (`find_nodes`), so that a run can be handed over to a node that fits it better (`hand_over`). What a version
declares outlives the lease: nodes that have its code publish it, and processes that do not have the code use it to
validate what is sent to its runs.

**Host locks.** Work that only one node may do at a time (retention, schedules, relays) is done by the holder of a named
lock. The lock has a lease, renewed by acquiring it again, and an epoch that grows with each holder. A verb that takes
the lock as an argument compares the epoch in its own transaction (`LockLost`): a holder that was frozen for longer than
its lease changes nothing. A node that restarts under the same name ends the locks of its earlier lives.

**The outbox** (`core/bus.py`). `create`, and each commit that appends events, write one entry for every sink that
matches the run: the run, and the range of `run_seq`. The store itself evaluates the sinks, in that commit, so no node
can use an outdated list of sinks. An entry stays until it is settled. Only commits insert entries and only relays
delete them, so a relay holds no lock that a commit waits for.

**Bulletins** are short texts that processes leave for each other and for operators: samples of the installation's load,
nodes that were taken over, queries for nodes that have the code, and the answers to them. Each has a kind and an id;
the first one that is put under an id stays until it expires. No run depends on bulletins: a store may leave all of them
out of its backup.

**Streams** (`core/streams.py`) belong to their run and are deleted with it. The store numbers chunks, within the commit
that stores them. An append is accepted while its run is unfinished and the writer is still current: for an activity of
the run's owner, the lease has the same epoch; for a job from a queue, the node still holds the job. Appends of an
attempt are ordered by `position`: a repeated one gets the same answer as before, and a gap is refused. What a turn
appends is part of its commit.

**Wake-ups** (`wakeups.py`) are only hints that something may have become ready. Losing all of them costs latency.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

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
from holdfast.store.health import Bounds, Facts
from holdfast.store.joined import JoinedStore
from holdfast.store.queries import AlertQuery as AlertQuery
from holdfast.store.queries import ArchivedRunQuery as ArchivedRunQuery
from holdfast.store.queries import AuditQuery as AuditQuery
from holdfast.store.queries import BulletinQuery as BulletinQuery
from holdfast.store.queries import BusDeadLetterQuery as BusDeadLetterQuery
from holdfast.store.queries import DeadLetterQuery as DeadLetterQuery
from holdfast.store.queries import EventQuery as EventQuery
from holdfast.store.queries import FinishedRunQuery as FinishedRunQuery
from holdfast.store.queries import Found as Found
from holdfast.store.queries import MailboxQuery as MailboxQuery
from holdfast.store.queries import OutboxQuery as OutboxQuery
from holdfast.store.queries import PlaceInLine as PlaceInLine
from holdfast.store.queries import PlaceQuery as PlaceQuery
from holdfast.store.queries import PlanQuery as PlanQuery
from holdfast.store.queries import Query as Query
from holdfast.store.queries import RunCount as RunCount
from holdfast.store.queries import RunCountQuery as RunCountQuery
from holdfast.store.queries import RunQuery as RunQuery
from holdfast.store.queries import ScheduleQuery as ScheduleQuery
from holdfast.store.queries import SinkQuery as SinkQuery
from holdfast.store.queries import StreamQuery as StreamQuery
from holdfast.store.queries import TaskQuery as TaskQuery
from holdfast.store.queries import TokenQuery as TokenQuery
from holdfast.store.queries import WaitQuery as WaitQuery
from holdfast.store.types import COUNTED_RUNS as COUNTED_RUNS
from holdfast.store.types import Accepted as Accepted
from holdfast.store.types import Admitted as Admitted
from holdfast.store.types import ArchivedRun as ArchivedRun
from holdfast.store.types import Bulletin as Bulletin
from holdfast.store.types import Capabilities as Capabilities
from holdfast.store.types import Change as Change
from holdfast.store.types import Changes as Changes
from holdfast.store.types import CommitConflict as CommitConflict
from holdfast.store.types import Committed as Committed
from holdfast.store.types import Created as Created
from holdfast.store.types import Delivered as Delivered
from holdfast.store.types import Duplicate as Duplicate
from holdfast.store.types import Existing as Existing
from holdfast.store.types import Heartbeat as Heartbeat
from holdfast.store.types import HostLock as HostLock
from holdfast.store.types import Job as Job
from holdfast.store.types import LoadedRun as LoadedRun
from holdfast.store.types import NewRun as NewRun
from holdfast.store.types import NodePlans as NodePlans
from holdfast.store.types import OrphanedDefinition as OrphanedDefinition
from holdfast.store.types import Plan as Plan
from holdfast.store.types import PurgePolicy as PurgePolicy
from holdfast.store.types import PurgeReport as PurgeReport
from holdfast.store.types import Refused as Refused
from holdfast.store.types import Reuse as Reuse
from holdfast.store.types import ReusePolicy as ReusePolicy
from holdfast.store.types import RunHead as RunHead
from holdfast.store.types import Stats as Stats
from holdfast.store.types import Turn as Turn
from holdfast.store.wakeups import Wakeups

Row = TypeVar("Row")


class RunStore(Protocol):
    """Runs, their histories and inboxes, and who owns them. Every verb may be called concurrently from many nodes."""

    @property
    def capabilities(self) -> Capabilities:
        """What the store can promise."""
        ...

    @property
    def wakeups(self) -> Wakeups:
        """How nodes learn that something may have become ready."""
        ...

    @property
    def extend_lease(self) -> Callable[[str, int], None] | None:
        """A function of node and lease_ms that extends a current lease, from any thread, while the loop is blocked.

        None if the store has none.
        """
        ...

    async def now(self) -> Instant:
        """Return the store's time."""
        ...

    async def create(self, runs: Sequence[NewRun], claim_for: str | None = None) -> list[Created | Existing | Refused]:
        """Create runs. A repeated request answers `Existing`; with another input it is `Refused(Conflict)`.

        With `claim_for` the runs belong to that node from the start, at epoch 1; its lease must be current, or
        `LeaseExpired` is raised and nothing is created.

        A run and its first signals are created in one atomic step with one answer. If one of the signals could never be
        accepted, the run is `Refused`. If the run exists already, in the same version, the signals are delivered to it
        as by `deliver`.

        With `reuse` the id may be taken (QUE-5). A repeated request is answered first. Otherwise `decisions.reuse_of`
        decides from the latest run of the id, and `stop` is delivered to the run that is replaced, in the same step.
        The caller proposes which run of the id this is. If another one is next by now, the answer is `Refused` with a
        `Conflict` whose `details` name that one as `restart_as`, and the latest run as `run_id`.
        """
        ...

    def joined(self, connection: Any) -> JoinedStore:
        """Return `create` and `deliver` within the open transaction of a caller's own connection.

        The caller's commit or rollback applies to what they write; nodes are notified after the commit. Each verb
        raises `InvalidInput` for a connection that the store cannot use: of another kind, to another database, or
        without a transaction. After a refusal, the caller's transaction continues as if the call had not been made.
        A store that cannot share transactions raises `InvalidInput` here.
        """
        ...

    async def load(self, run_ids: Sequence[str]) -> list[LoadedRun | None]:
        """Return the runs with their due messages and unconsumed signals; None for an unknown run."""
        ...

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        """Return the run's events with a run_seq above `after`, in order; none for an unknown run."""
        ...

    async def deliver(self, items: Sequence[SignalRequest | Message]) -> list[Accepted | Duplicate | Refused]:
        """Put signals and messages into inboxes, each at most once by its id.

        A signal is refused for, in this order: a malformed name or id or an oversize payload; `NotFound`;
        `Conflict` (the id was used with another payload); `SignalAcceptanceIndeterminate`; `RunTerminal`;
        `Conflict` (the run is not at `expected_version`, and `details` has both that and the actual `version`; or it is
        `accept_before` or later; or a signal of this name is already pending for the step); `NotWaiting`;
        `RateLimited`. A retry of an accepted signal is a `Duplicate` even when the run has finished.
        A message is refused for `InvalidInput`, `NotFound`, `RunTerminal` and `Conflict` (`is_latest_only`, and the job
        of its step was acquired again). The outcome of the attempt that acquired a job last removes the job from its
        queue in the same step: no node acquires it while the run has not recorded the outcome.
        """
        ...

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Append turns to histories. A turn is appended only if its version and epoch are still those of the run."""
        ...

    async def claim(self, node: str, limit: int, plans: Sequence[Plan] | None = None) -> list[LoadedRun]:
        """Claim and load up to `limit` eligible runs: those eligible longest first, then in order of creation.

        With `plans`, claim only runs of these definitions: a node leaves runs of other definitions to other nodes. The
        node's lease must be current, or `LeaseExpired` is raised.
        """
        ...

    async def renew(
        self, node: str, lease_ms: int, plans: Sequence[Plan] | None = None, is_start: bool = False
    ) -> Instant:
        """Give the node a lease until now + `lease_ms`, regardless of its previous one; return its end.

        A node's identity is its name and its life (`web-1#5f2a`): each started process is a new life. With `is_start`
        the leases of all other lives of the name end now, and their runs and jobs become available immediately. A node
        that has lost its lease to another, current life gets `NodeSuperseded`. `plans` are all definitions that the
        node has, until it publishes others; a node that has published none may have any.
        """
        ...

    async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
        """Release these runs if the node owns them, or all its runs and its lease. Return how many were released.

        They are ready immediately: the former owner may have left some of their activities undone.
        """
        ...

    async def hand_over(self, node: str, run_ids: Sequence[str], to: str) -> list[str]:
        """Give runs that the node owns to another node with a current lease; return those that were given.

        They are ready immediately. If the other node has no current lease, none is given.
        """
        ...

    async def next_due(
        self, node: str, plans: Sequence[Plan] | None = None, queues: Sequence[str] = ()
    ) -> Instant | None:
        """Return the next instant at which such a `claim` may find something, or None if none is known.

        With `queues`, also consider `acquire_jobs` from these queues, for any activity.
        """
        ...


class JobQueue(Protocol):
    """Queued work: jobs for nodes that execute activities, and runs that wait for admission."""

    async def acquire_jobs(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> list[Job]:
        """Acquire up to `limit` jobs of these activities from these queues, those due longest first.

        They are invisible for `visible_ms`; after that, while their step is open, any node may acquire them again.
        """
        ...

    async def acquire_limited_jobs(
        self,
        node: str,
        queues: Sequence[str],
        activities: Sequence[str],
        limits: Mapping[str, CallLimit],
        limit: int,
        visible_ms: int,
    ) -> tuple[list[Job], Instant | None]:
        """Acquire up to `limit` jobs of these activities from these queues that have room under their limits.

        `core/call_limits.py` decides, in the transaction that acquires them. A limit that is not named in `limits` has
        no numbers. Also return when to call again even if no outcome frees a place: when a rate allows the next call, a
        job becomes due, or a place that others wait for expires. A store that cannot count across all runs raises
        `CheckpointOwnershipCapabilityError`.
        """
        ...

    async def release_jobs(self, node: str, jobs: Sequence[Job]) -> int:
        """Return jobs to the queue that this node has acquired and not started. Return how many were returned.

        Each is as it was before: immediately visible, and its next acquisition has the same `engine_attempt_id`.
        """
        ...

    async def heartbeat(self, node: str, beats: Sequence[Heartbeat], visible_ms: int) -> list[bool]:
        """Keep jobs that this node has acquired for another `visible_ms`, and store the details of their progress.

        False: the node no longer has the job. Either its step is closed, or another node has acquired it, or it has a
        limit and its time-out has passed.
        """
        ...

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> tuple[list[Admitted], Instant | None]:
        """Admit up to `limit` queued runs of these plans, in order of the plans' names.

        With `claim_for`, those without an owner belong to that node immediately; its lease must be current, or
        `LeaseExpired` is raised. Also return when to call again even if no run leaves: at the next instant of a rate
        for which a run is queued, or now if `limit` cut the call short.
        """
        ...


class Index(Protocol):
    """Searches and counts across runs. Nothing here changes stored data."""

    async def find(self, query: Query[Row]) -> Found[Row]:
        """Return the rows that match the query: runs for a `RunQuery`, tasks for a `TaskQuery`, and so on."""
        ...

    async def find_nodes(self) -> list[NodePlans]:
        """Return what the nodes with a current lease have published with it, ordered by name."""
        ...

    async def find_orphaned(self, late_ms: int) -> list[OrphanedDefinition]:
        """Return definitions that no node with a current lease has, although their runs have been eligible this long.

        Those that have waited longest come first. Only some thousand runs are examined.
        """
        ...

    async def find_definitions(self, plans: Sequence[Plan]) -> list[WorkflowDeclaration | None]:
        """Return what these versions of workflows declare, as last published; None for those never published."""
        ...

    async def changes(self, cursor: str = "", limit: int = 1_000) -> Changes:
        """Return the runs whose histories have grown since a cursor; without a cursor, return the current one.

        A cursor is a text defined by the store, and valid in every process. At most `limit` events are read. A run may
        be named twice, but none is left out: a caller that follows the cursors misses nothing, or gets `is_lost`.
        """
        ...

    async def stats(self) -> Stats:
        """Return counts for operators."""
        ...

    async def health(self, bounds: Bounds, *, thorough: bool = False) -> Facts:
        """Return facts about the store's health. With `thorough` it may read all stored data."""
        ...


class Admin(Protocol):
    """The schema, retention, dead letters, the audit log, host locks, and what workflows declare."""

    async def migrate(self) -> int:
        """Bring the schema up to this version; safe to call from many processes. Return the version of the schema."""
        ...

    async def close(self) -> None:
        """Release every resource. Closing twice is harmless."""
        ...

    async def publish_definitions(self, definitions: Sequence[WorkflowDeclaration]) -> None:
        """Store what versions of workflows declare, replacing what was published for them before."""
        ...

    async def settle_dead_letters(
        self, ids: Sequence[str], action: Settlement, actor: str = "", audit: AuditEntry | None = None
    ) -> list[Settled | Refused]:
        """Put messages back into their runs' inboxes, due now, or drop them permanently. Safe to repeat.

        Refused: `NotFound`; `Conflict` if it was settled with another action; for a requeue, `RunTerminal`, and
        `InvalidInput` if the message cannot be read. A waiting message with the same id stays. With `audit`, each
        letter that this call settles gets an entry in the audit log, in the same commit.
        """
        ...

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Append entries to the audit log, with the store's time. Entries about other verbs are passed to those."""
        ...

    async def purge(self, policy: PurgePolicy, audit: AuditEntry | None = None) -> PurgeReport:
        """Delete what retention allows, the oldest first: what belongs to finished runs, expired acceptance records,
        settled dead letters, and old entries of the audit log.

        A finished run stays while its parent or one of its children is unfinished. The audit entry, with what was
        deleted, is appended in the same commit, unless this is a dry run.
        """
        ...

    async def acquire_lock(self, name: str, owner: str, lease_ms: int) -> HostLock | None:
        """Give the owner the lock until now + `lease_ms`; return None if another owner has it.

        The holder renews the lock by calling this again and keeps its epoch, even late, if no other owner acquired it
        first. The lock is free when its lease has expired, or ends far beyond the longest possible one
        (`decisions.LEASE_HORIZON`).
        """
        ...

    async def release_lock(self, name: str, owner: str, epoch: int) -> bool:
        """Release the lock, so that others may acquire it now. False: this owner no longer has it at this epoch."""
        ...

    async def find_locks(self) -> list[HostLock]:
        """Return the locks that have a holder, ordered by name, including those whose lease has expired."""
        ...


class TokenStore(Protocol):
    """Access tokens, and the store's secret keys."""

    async def put_tokens(self, tokens: Sequence[AccessToken], audit: Sequence[AuditEntry] = ()) -> list[AccessToken]:
        """Store tokens, and return them as stored. Of a known token, only what `merge_tokens` allows changes.

        So a revoked token never becomes valid again. Expired sessions are deleted as well. The entries of the audit log
        are appended in the same commit.
        """
        ...

    async def find_tokens(self, query: TokenQuery) -> Found[AccessToken]:
        """Return the tokens that match the query."""
        ...

    async def put_key(self, name: str, key: str) -> str:
        """Store a secret key of 64 hex digits under a name, unless there is one; return the stored key.

        It is as old as the store, and part of its backups.
        """
        ...

    async def get_key(self, name: str) -> str | None:
        """Return the key stored under a name, or None."""
        ...


class PlanStore(Protocol):
    """The bodies of plans, by their hashes, and the registered versions. Each belongs to one tenant.

    A body is kept while a run or a registered version refers to it, and for a day after it was last put.
    """

    async def put_plan(self, tenant: str, sha256: str, body: bytes) -> None:
        """Store the body of a plan. If the body is known, only update the time at which it was last put."""
        ...

    async def get_plan(self, tenant: str, sha256: str) -> bytes | None:
        """Return the body with this hash, as it was put, or None. Callers verify the hash."""
        ...

    async def register_plan(self, plan: RegisteredPlan, audit: AuditEntry | None = None) -> RegisteredPlan:
        """Register a version of a plan, at the store's time, and return it as registered.

        Repeating it with the same hash changes nothing. Raise `Conflict` if the version has another hash, and
        `NotFound` if the store does not have the body. The audit entry is appended in the same commit.
        """
        ...

    async def find_plans(self, query: PlanQuery) -> Found[RegisteredPlan]:
        """Return the registered versions that match the query."""
        ...


class BusStore(Protocol):
    """Sinks of the event bus, and their pending entries. Use `find` to search them."""

    async def put_sink(self, sink: Sink, audit: AuditEntry | None = None) -> Sink:
        """Store a sink, at the store's time, or replace the stored one; return it as stored.

        A new sink gets what is committed from now on. A replaced one keeps its pending entries, and is tried
        immediately. Its tenant cannot change: `Conflict` if it belongs to another. This notifies the nodes.
        """
        ...

    async def remove_sink(self, name: str, audit: AuditEntry | None = None) -> bool:
        """Delete a sink, with its pending entries and its dead letters. False if there is none."""
        ...

    async def settle_outbox(self, sink: str, items: Sequence[OutboxSettlement], progress: SinkProgress) -> list[bool]:
        """Delete entries of a sink, put back what is left of them, and store the sink's progress, in one commit.

        False for an entry that has changed since it was found; it is left alone. So a relay that was overtaken by
        another one puts nothing back. Counts are added in any case. If `progress.number` is not the sink's, nothing is
        changed and all answers are False: the sink was removed and created again, and the new one received nothing.
        """
        ...

    async def replay_outbox(self, asked: OutboxReplay, audit: AuditEntry | None = None) -> Replayed:
        """Send events that the store still has to a sink again; call again with `after` if there are more.

        Raise `NotFound` if there is no such sink or run.
        """
        ...

    async def raise_alerts(self, alerts: Sequence[BusAlert]) -> int:
        """Put alerts on the bus, at the store's time, each once by its id; return the number of new ones.

        Nothing is stored if no sink gets alerts.
        """
        ...

    async def settle_bus_dead_letters(
        self, ids: Sequence[str], action: Settlement, audit: AuditEntry | None = None
    ) -> list[Settled | Refused]:
        """Put dead letters of the bus back into the outbox, due now, or drop them permanently; the letters are deleted.

        Refused: `NotFound` if there is no such letter or, for a requeue, if its run was deleted.
        """
        ...


class ScheduleStore(Protocol):
    """Schedules. A `ScheduleQuery` finds them. A change replaces the whole schedule, from a revision that was read."""

    async def commit_schedule(
        self,
        schedule: Schedule,
        expected_revision: int,
        starts: Sequence[NewRun] = (),
        audit: AuditEntry | None = None,
    ) -> tuple[Schedule, list[Created | Existing | Refused]]:
        """Store a schedule with the next revision, and create these runs, owned by no node, in one transaction.

        Raise `Conflict`, and change nothing, if the revision is not `expected_revision` (0: the schedule does not
        exist). The answers are those of `create`; a run that is refused does not undo the rest. A retry of the same
        call is recognised and creates nothing, not even a run that was deleted since. The audit entry is appended in
        the same commit.
        """
        ...

    async def delete_schedule(
        self, place: tuple[str, str, str, str], expected_revision: int, audit: AuditEntry | None = None
    ) -> bool:
        """Delete the schedule of this tenant, project, environment and id. False: it is not at this revision."""
        ...


class BulletinStore(Protocol):
    """Short texts that belong to no run and expire."""

    async def put_bulletins(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int) -> list[bool]:
        """Put bulletins of a kind, each under its id, at the store's time, until now + `keep_ms`.

        False: the id already has a bulletin, which stays. All expired bulletins, of any kind, are deleted.
        """
        ...

    async def find_bulletins(self, query: BulletinQuery) -> Found[Bulletin]:
        """Return the bulletins that match the query and have not expired."""
        ...


class StreamStore(Protocol):
    """Streams of runs. A store that keeps none raises `CheckpointOwnershipCapabilityError`."""

    async def append_streams(self, items: Sequence[StreamAppend]) -> list[Appended | Refused]:
        """Append chunks to streams, and wake the readers of these streams.

        Refused: `InvalidInput`, `NotFound`, `RunTerminal`; `Conflict` if the writer has lost its run or its job,
        another attempt writes, or earlier chunks are missing. A retry of the last append gets the same answer.
        """
        ...

    async def read_streams(self, items: Sequence[StreamRead]) -> list[StreamPage | None]:
        """Return parts of streams; None for an unknown run. A stream that was never written to is empty."""
        ...


class Store(
    RunStore,
    JobQueue,
    Index,
    Admin,
    TokenStore,
    PlanStore,
    BusStore,
    ScheduleStore,
    BulletinStore,
    StreamStore,
    Protocol,
):
    """Every verb. `open_store` returns one; `testing.store_suite` checks one."""
