"""The data types of the store port: arguments and results of its verbs.

The verbs are in `port.py`, which re-exports these types: they are used as `port.…`. The types of searches are in
`queries.py`.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core.admission import AdmissionRequest
from holdfast.core.attributes import Attributes
from holdfast.core.audit import AuditEntry
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import NULL, Event
from holdfast.core.index_rows import ActivityRecord, RuntimeSnapshot, Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import Effect
from holdfast.core.messages import AcceptedSignalResult, Message, Signal, SignalRequest
from holdfast.core.plans import PLAN_PREFIX
from holdfast.core.state import RunStatus
from holdfast.core.streams import StreamChunks
from holdfast.errors import CallerError, StoreCorrupt

T = TypeVar("T")

Plan = tuple[str, str]
"""A definition: the id of a plan, and its version."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a store can promise. This is trusted: nothing above can compensate for a store with false claims."""

    conditional_batch: bool
    atomic_batch: bool
    read_after_write: bool
    scan_consistency: Literal["snapshot", "eventual"]
    lacking: frozenset[str] = frozenset()
    """What the store does not support, by name, such as `outbox`: a verb that needs it raises, and stores nothing."""
    commits_aside: bool = False
    """Whether another process executes commits, so that a node can take other turns meanwhile."""
    one_process: bool = False
    """Whether only one process can have the store open."""


STREAMS = "streams"
"""The entry in `Capabilities.lacking` of a store that keeps no streams."""

CALL_LIMITS = "limits on activities"
"""The entry in `Capabilities.lacking` of a store that cannot apply limits across all activities."""


# --- arguments ---------------------------------------------------------------------------------------------------


class Turn(Struct, frozen=True, kw_only=True, gc=False):
    """One step of one run: everything that its commit changes.

    `received` names the signals that the turn consumed, as (inbox_seq, index of the event among `events`).
    `seen_inbox_seq` is the highest inbox number that the turn had seen: a later one makes the run ready again.
    `starts` and `sends` go to other runs: they become durable with the commit and are then delivered by the store, as
    if by `create` and `deliver`, each at most once by its id. The limit of signals per minute does not apply to them:
    they are recorded, and no caller could retry. A run in `starts` is not refused because of its limit: it is queued.
    Any other refusal is reported to the sending run (`outgoing.py`), in the same commit. Signals reach runs of the same
    tenant, project and environment; with `crosses_tenants` they reach all runs.
    `dead` are messages that the turn moves to the dead letters, and consumes.
    `jobs_closed` names the steps whose jobs, with the details of their progress, are deleted; then `jobs` are queued.
    `losses` is the run's count of lost nodes after the turn: 0, unless the turn records that another attempt is about
    to start. A claim from a lost node adds one, up to `SUSPECT_LOSSES`. Beyond that, the node that tries the run
    counts, so that a run is not blamed for what other runs of the same node did.
    `admission` queues an existing run, as if it were created now: the turn's messages are held back until it is
    admitted. It is not refused because of its limit. The turn releases the run. If the run is already queued or
    admitted (the turn is committed a second time), that remains.
    """

    run_id: str
    expected_version: int
    epoch: int
    snapshot: RuntimeSnapshot
    events: tuple[Event, ...] = ()
    consumed: tuple[str, ...] = ()
    received: tuple[tuple[int, int], ...] = ()
    messages: tuple[Message, ...] = ()
    waits_opened: tuple[Wait, ...] = ()
    waits_closed: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()
    records: tuple[ActivityRecord, ...] = ()
    seen_inbox_seq: int = 0
    release: bool = False
    starts: tuple["NewRun", ...] = ()
    sends: tuple[Message | SignalRequest, ...] = ()
    jobs: tuple["Job", ...] = ()
    jobs_closed: tuple[str, ...] = ()
    dead: tuple[DeadLetter, ...] = ()
    crosses_tenants: bool = False
    losses: int = 0
    attributes: Attributes | None = None
    """The run's search attributes after the turn, if it has changed them."""
    admission: AdmissionRequest | None = None
    streams: tuple[StreamChunks, ...] = ()
    """What the turn appends to the run's streams."""


class Job(Struct, frozen=True, kw_only=True, gc=False):
    """One step's activity in a queue, for any node that consumes the queue.

    There is at most one for each step of a run; putting another replaces it, and keeps the details of its progress.
    `engine_attempt_id` is that of the first acquisition; each later acquisition of the same job adds one (ATT-1).
    """

    run_id: str
    step_id: str
    queue: str
    activity: str
    input: Raw = NULL
    options: Raw = NULL
    logical_attempt_id: int = 1
    engine_attempt_id: int = 1
    first_engine_attempt_id: int = 1
    scheduled_at: Instant = 0
    due_at: Instant | None = None
    details: Raw = NULL
    queued_attempt_id: int = 0
    """The `engine_attempt_id` with which it was queued: later acquisitions follow lost attempts."""
    idempotency_key: str | None = None
    effect: Effect | None = None
    """What the run knows about the effect of a keyed step."""
    tenant: str = ""
    environment: str = ""
    """The run's environment; empty if the job was put by a version of Holdfast that did not write it."""
    context: Raw = NULL
    """The run's context (`core/run_context.py`)."""


class Heartbeat(Struct, frozen=True, kw_only=True, gc=False):
    """A heartbeat of a step's activity; `details` describe its progress, if there are new ones.

    `queue` is empty for an activity that the run's owner executes.
    """

    run_id: str
    step_id: str
    queue: str = ""
    engine_attempt_id: int = 1
    details: Raw | UnsetType = UNSET


ReusePolicy = Literal["return", "reject", "restart-if-finished", "terminate-and-restart"]
"""What happens if an id is taken; the values that callers may choose."""


class Reuse(Struct, frozen=True, kw_only=True):
    """What happens if `run_id`, the requested id, already has a run (`core/restarts.py`).

    `stop` is the command that terminates the replaced run, for the policy that does so. With `debounce` the start's one
    signal is a later input (`core/debounce.py`): it goes to the run of the id that has not begun, if there is one, and
    to no other.
    """

    run_id: str
    policy: ReusePolicy | Literal["debounce"]
    stop: SignalRequest | None = None


class NewRun(Struct, frozen=True, kw_only=True, gc=False):
    """A run to be created: who requested it, its first events, and what is created with it.

    `request_key` recognises a retry of the same request (QUE-1); `input_sha256` distinguishes a retry from a misuse.
    `signals` are for this run, whatever run they name: the run and its signals are created together, or neither is.
    `unfit` is the reason why no run may be created with these signals, unless the request is a repeated one.
    With `admission` it is queued, and starts when its plan admits it. With `reuse` its id may be taken.
    """

    run_id: str
    tenant: str = "default"
    project: str = "default"
    environment: str = "default"
    plan_id: str
    plan_version: str
    run_request_id: str
    request_key: str
    input_sha256: str
    snapshot: RuntimeSnapshot
    events: tuple[Event, ...]
    messages: tuple[Message, ...] = ()
    waits_opened: tuple[Wait, ...] = ()
    tasks: tuple[Task, ...] = ()
    records: tuple[ActivityRecord, ...] = ()
    parent_run_id: str | None = None
    reference_key: str | None = None
    tags: tuple[str, ...] = ()
    signals: tuple[SignalRequest, ...] = ()
    unfit: CallerError | None = None
    admission: AdmissionRequest | None = None
    audit: AuditEntry | None = None
    """The audit entry to append when the run is created. A repeated request appends nothing."""
    reuse: Reuse | None = None

    @property
    def plan_sha256(self) -> str | None:
        """The hash of its plan's body, which is kept as long as the run is; None for a code workflow."""
        if not self.plan_id.startswith(PLAN_PREFIX):
            return None
        plan = getattr(self.events[0].data, "plan", None)
        return None if plan is None else plan.sha256


class PurgePolicy(Struct, frozen=True, kw_only=True):
    """How long data of finished runs is kept, counted from their end. None keeps it indefinitely.

    Acceptance records are deleted when they expire, whatever the policy. `stale_run_ms` deletes nothing: unfinished
    runs that have not changed for this long are counted, for an operator to look at. `audit_ms` is how long entries of
    the audit log are kept, counted from when they were written; `dead_letter_ms` how long dead letters are kept,
    counted from when they were settled; `archived_run_ms` how long the archive location of a deleted run is kept.

    With a `tenant` or `run_ids`, only their data is deleted; `tokens` also deletes the tenant's tokens, and `plans` the
    versions of plans that it has registered. The body of a plan is kept as long as a run that ended when the body was
    last put (`plan_body_ms`, else `finished_run_ms`), and always while a run or a registered version refers to it.

    `archived` gives the archive locations of the runs that this purge deletes: the store keeps them, in the same
    commit, for those that it does delete.

    The purge deletes the oldest finished runs: at most `limit`, and with `most_bytes` only as many as have no more
    bytes of events than that, but at least one; `has_more` means that others are left. With `most_bytes` a database
    at first deletes only some events of a run with a long history.

    A finished run is kept for another `sink_hold_ms` while it has events that a sink has not received yet; its entries
    in the outbox and its dead letters of the bus are deleted with it. `outbox_ms` is how long other entries of the
    outbox, alerts and dead letters of the bus are kept, whether or not a sink received them; with `run_ids` they stay.
    `sinks` deletes the tenant's sinks.
    """

    finished_run_ms: int | None = None
    task_ms: int | None = None
    """How long to keep tasks of runs that are kept longer."""
    runtime_state_ms: int | None = None
    """How long to keep snapshots of runs that are kept longer."""
    stale_run_ms: int | None = None
    audit_ms: int | None = None
    dead_letter_ms: int | None = None
    plan_body_ms: int | None = None
    archived_run_ms: int | None = None
    archived: "tuple[ArchivedRun, ...]" = ()
    tenant: str | None = None
    run_ids: tuple[str, ...] | None = None
    tokens: bool = False
    plans: bool = False
    sink_hold_ms: int = 7 * 24 * 3_600_000
    outbox_ms: int | None = None
    sinks: bool = False
    limit: int = 1_000
    most_bytes: int | None = None
    dry_run: bool = False
    """Count what would be deleted, and delete nothing."""


# --- results -----------------------------------------------------------------------------------------------------


class Refused(Struct, frozen=True):
    """Nothing was stored. The error gives the reason."""

    error: CallerError


class Accepted(Struct, frozen=True, gc=False):
    """The message or signal is in the run's inbox. `result` is None for messages."""

    result: AcceptedSignalResult | None = None


class Duplicate(Struct, frozen=True, gc=False):
    """The same id was accepted before; for a signal, `result` is what the first sender received."""

    result: AcceptedSignalResult | None = None


Delivered = Accepted | Duplicate | Refused
"""The answer to one signal or message."""


class Created(Struct, frozen=True, gc=False):
    """This call created the run. `epoch` is 1 if the run was claimed with it; a queued run is not claimed."""

    run_id: str
    epoch: int = 0
    signals: "tuple[Delivered, ...]" = ()


class Existing(Struct, frozen=True, gc=False):
    """The same request was made before; this is its run. `signals` are the answers to those of this request.

    There are none if the run is of another version, or the signals do not fit the requested version: what the run's
    own version declares decides, so the caller checks and delivers them. With `is_reused` another request created the
    run, for the same id, and the policy of this request is to return it. Then there are answers to signals only if the
    run has finished and had accepted them before: for any other run the caller delivers them.
    """

    run_id: str
    signals: "tuple[Delivered, ...]" = ()
    is_reused: bool = False


def creations_may_wake_others(runs: Sequence[NewRun], answers: Sequence[Created | Existing | Refused]) -> bool:
    """Return whether a process other than the owner of these runs can be waiting for an effect of their creation.

    The owner starts a run as soon as it has the answer, and the run's first turn wakes the others.
    """
    for new, answer in zip(runs, answers, strict=True):
        if isinstance(answer, Refused):
            continue
        if (
            new.signals
            or new.reuse is not None
            or (isinstance(answer, Created) and (not answer.epoch or _is_under_way(new)))
        ):
            return True
    return False


def _is_under_way(new: NewRun) -> bool:
    """Return whether a run is created with a history that others wait for, or with messages that are due later."""
    is_awaited = any(event.data.IS_AWAITED for event in new.events)
    return is_awaited or any(message.due_at is not None for message in new.messages)


class Committed(Struct, frozen=True, gc=False):
    """The turn is part of the history. `version` is the run's version after it."""

    version: int
    persisted_at: Instant


class CommitConflict(Struct, frozen=True):
    """The deterministic conflict: the turn lost and left no trace.

    `existing` is the event that is already there, if the turn would append the same event again. `unseen`: the outcome
    of an activity was accepted that the turn has not seen; repeat the turn with what `load` returns.
    """

    reason: Literal[
        "no such run", "version", "epoch", "finished", "event exists", "task is open", "cannot be stored", "unseen"
    ]
    version: int = 0
    epoch: int = 0
    existing: Event | None = None


class RunHead(Struct, frozen=True, gc=False):
    """A run without its history."""

    run_id: str
    tenant: str
    project: str
    environment: str
    plan_id: str
    plan_version: str
    run_request_id: str
    parent_run_id: str | None
    reference_key: str | None
    tags: tuple[str, ...]
    status: RunStatus
    version: int
    snapshot: RuntimeSnapshot | None
    created_at: Instant
    updated_at: Instant
    finished_at: Instant | None
    inbox_seq: int
    ready_at: Instant | None
    lease_owner: str | None
    lease_epoch: int
    queued_at: Instant | None = None
    """Since when it is queued for admission; None if it is not."""
    losses: int = 0
    """How many nodes were lost while they owned it, since its last committed turn. See `Turn.losses`."""

    @property
    def needs(self) -> int:
        """The format level that a node must support to continue it (`core/plans.py`)."""
        return 0 if self.snapshot is None else self.snapshot.needs


class LoadedRun(Struct, frozen=True, kw_only=True, gc=False):
    """A run with its pending work: due messages, unconsumed signals in order, uncompleted activity records.

    `details` holds, by step, the latest progress details of activities. With more than `MAILBOX_SIGNALS` unconsumed
    signals the run is partial: it has that many of the oldest signals for each name that has an open wait, and for each
    of the engine's own names, without signals addressed to steps that are not waiting.
    """

    head: RunHead
    messages: tuple[Message, ...] = ()
    signals: tuple[Signal, ...] = ()
    records: tuple[ActivityRecord, ...] = ()
    details: dict[str, Raw] = {}
    is_whole: bool = True


def new_head(new: NewRun, owner: str | None, now: Instant) -> RunHead:
    """Return the head of a newly created run, before anything makes it ready."""
    return RunHead(  # by position: see `runtime_snapshot`
        new.run_id,
        new.tenant,
        new.project,
        new.environment,
        new.plan_id,
        new.plan_version,
        new.run_request_id,
        new.parent_run_id,
        new.reference_key,
        new.tags,
        new.snapshot.status,
        len(new.events),
        new.snapshot,
        now,
        now,
        None,
        0,
        None,
        owner,
        1 if owner else 0,
    )


def created_run(new: NewRun, owner: str, now: Instant) -> LoadedRun:
    """Return a run as it is right after it was created for `owner`, without asking the store."""
    return LoadedRun(head=new_head(new, owner, now), messages=new.messages)


class Admitted(Struct, frozen=True, gc=False):
    """A run that was admitted. STARTED: `run` is set if it was claimed; otherwise any node may claim it.

    SKIPPED: it has an owner, which finds that it was admitted. FAILED: it cannot be read, and is deferred.
    """

    run_id: str
    status: Literal["STARTED", "FAILED", "SKIPPED"]
    run: LoadedRun | None = None


class NodePlans(Struct, frozen=True):
    """What a node published with its lease: the definitions that it can run, and other facts for other nodes."""

    node: str
    plans: frozenset[Plan]


class OrphanedDefinition(Struct, frozen=True):
    """A definition that no live node has, although one of its runs has been ready since this instant."""

    plan: Plan
    since: Instant


class HostLock(Struct, frozen=True, kw_only=True, gc=False):
    """A named lock as its holder has it: until `lease_until`, fenced by `epoch`, which grows with each holder."""

    name: str
    owner: str
    epoch: int
    acquired_at: Instant
    lease_until: Instant


class PurgeReport(Struct, frozen=True, kw_only=True):
    """What a purge deleted, or would delete. `has_more`: the limit cut it short."""

    runs: int = 0
    events: int = 0
    signals: int = 0
    tasks: int = 0
    runtime_states: int = 0
    acceptance_records: int = 0
    dead_letters: int = 0
    audit_entries: int = 0
    tokens: int = 0
    plans: int = 0
    """The bodies of plans."""
    archived_runs: int = 0
    """Deleted runs whose archive location was deleted."""
    outbox: int = 0
    """Entries of the outbox, alerts, dead letters of the bus and sinks."""
    stale_runs: int = 0
    has_more: bool = False


class ArchivedRun(Struct, frozen=True, kw_only=True, gc=False):
    """A run that retention has deleted, and the location of its history: a part of an object of the archive."""

    run_id: str
    tenant: str
    project: str
    environment: str
    plan_id: str
    plan_version: str
    status: RunStatus
    version: int
    created_at: Instant
    finished_at: Instant
    object_key: str
    offset: int
    size_bytes: int
    archived_at: Instant = 0


COUNTED_RUNS = 100_000
"""From this number on, completed runs are estimated: counting them would take longer with every run."""


class Stats(Struct, frozen=True, kw_only=True):
    """Counts for operators. `runs` are by status."""

    runs: dict[str, int]
    completed_is_estimated: bool = False
    """Whether the number of completed runs is an estimate. The others are counted."""
    ready: int
    leased: int
    messages: int
    signals: int
    open_tasks: int
    jobs: int
    dead_letters: int
    nodes: int
    oldest_ready_at: Instant | None
    queued: int = 0
    """How many runs are queued for admission."""
    queues: dict[str, int] = {}
    """How many jobs each queue holds."""
    leases: dict[str, Instant] = {}
    """When the current lease of each live node ends."""


class Change(Struct, frozen=True, gc=False):
    """A run whose history has grown to this version. `has_tasks`: some of the new events may concern a task."""

    run_id: str
    version: int
    has_tasks: bool = True


class Changes(Struct, frozen=True):
    """Runs whose histories have grown since a cursor, and the next cursor. `has_more`: there are more after that one.

    `is_lost`: the store does not know the cursor, or no longer does; the caller has to read everything again.
    """

    cursor: str
    runs: tuple[Change, ...] = ()
    has_more: bool = False
    is_lost: bool = False


BULLETINS_WITH_PAYLOADS = frozenset({"question", "answer"})
"""The kinds of bulletins whose bodies hold values of runs."""


class Bulletin(Struct, frozen=True, kw_only=True):
    """A short text that processes leave for each other and for operators until it expires; it belongs to no run."""

    kind: str
    bulletin_id: str
    at: Instant
    expires_at: Instant
    body: Raw


async def load_each(
    load: Callable[[Sequence[str]], Awaitable[list[T]]], run_ids: Sequence[str]
) -> list[T | StoreCorrupt]:
    """Load runs. The answer for a damaged run is its error; the others are loaded all the same."""
    try:
        return [*await load(run_ids)]
    except StoreCorrupt as damage:
        if len(run_ids) == 1:
            return [damage]
    half = len(run_ids) // 2
    return [*await load_each(load, run_ids[:half]), *await load_each(load, run_ids[half:])]
