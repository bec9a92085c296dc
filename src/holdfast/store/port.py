"""The store port: what every store promises, in prose and in verbs.

**Atomicity is per run, and only per run.** Each item of a batch (a run created, a signal delivered, a turn committed)
happens wholly or not at all, and is answered by itself; one loser never harms the others. A store may make a whole
batch one transaction, but nobody may rely on it. When a verb returns, what it answered is durable.

**Only `commit` changes a history** once `create` has begun it. A turn says which version it was computed from and
under which lease epoch. The *version* of a run is the `run_seq` of its last event, so the store numbers events by
counting on from it: no gaps, no duplicates. The *epoch* grows with every claim by a new owner and with `release`,
so an owner that lost its lease cannot commit, however late it finds out, and a commit that is overtaken by the release
of its own node does not count. A loser gets `CommitConflict` and its turn leaves no trace.

**Retrying is safe.** After an unknown outcome (a time-out, a crash between commit and answer) call again with the
same arguments. `commit` recognises a turn that is already in the history: the events that follow its version have
the turn's keys, node and epoch. `create` recognises the request's key, `deliver` the signal's id (of a message, while
it waits). A run that was claimed by a call whose answer was lost is ready, and is handed out again.

**Time comes from the store**: `now()`, and every instant that it writes. A sender's clock is never trusted. Within a
run, times of acceptance strictly increase, even when the clock is set back.

**The inbox.** A *message* is handed out when it is due, earliest first, and deleted by the turn that handled it. A
turn handles every message that it was handed; what it leaves is handed out again at once, and so is what it consumes
and leaves again under the same id. A *signal* gets the next `inbox_seq` of its run when it is accepted, and that is
its order. It stays in the mailbox until a turn names it in `received`; one that no wait wanted stays there without
waking anyone again.

**Outcomes by token** are signals named `OUTCOME_SIGNAL`, each for one step. Its sender has read that the step is open,
and the store makes that stick: such a signal is accepted only at the version that was read (`expected_version`), before
the step's time is over (`accept_before`), and while no other one waits for the step. A turn that has not seen one (its
`inbox_seq` is above `seen_inbox_seq`) is a `CommitConflict`: nothing can close the step between the acceptance and the
turn that records the outcome.

**Readiness.** A run is ready when a message is due, or when a signal came in that no turn has seen yet. A run that
has finished is never ready and has no messages. Eligible for `claim` are:

* runs that are ready and free;
* runs of a node whose lease has run out, ready or not: nobody knows what became of their activities. They are ready
  from then on, until a turn is committed: if the answer to the claim is lost, the next one finds them again;
* runs that are ready and already belong to the claimer. Their epoch stays.

**Leases** belong to nodes: a node renews one lease, whatever number of runs it holds. A run's owner and epoch stand
in the run itself, and the epoch is what fences. A commit by the owner whose lease has run out still counts as long
as nobody else has claimed the run. A lease that ends much later than the longest one (`guards.LEASE_BELIEVED`) was
given by a clock that was ahead; it is not believed, so that a clock which is set right again holds up no run.

**Queues.** A turn may put a *job* into a queue: an activity that any node may carry out. A job that was taken is
invisible for a while, and is handed out again if its taker goes silent: at least once. It goes with the commit that
closes its step, so its outcome is recorded once. Like what goes to other runs, a job becomes durable with its turn.

**Admission** (`core/admission.py`). A run with an `AdmissionRequest` is queued until its plan's limits admit it: it has
no owner and its messages are held back. It leaves, admitted or queued, with the commit that finishes it.

**Definitions.** A run is of one version of one plan, and a node claims what it can run. What that is it says with its
lease, so that what nobody alive can run is found (`find_orphaned`), and is not forgotten. In the same list it says with
which code and activities (`engine/definition_filter.py` has the form). A store keeps that as it is and returns it
(`find_nodes`), so that a run can be handed over to a node that fits it better (`hand_over`). What a version declares is
kept for longer than a lease: nodes that have its code publish it, and processes that do not have it check by
that what is sent to its runs.

**Wake-ups** (`wakeups.py`) are only hints that something may have become ready. Losing all of them costs latency.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core.access import AccessToken, TokenQuery
from holdfast.core.admission import AdmissionRequest, RunLimit
from holdfast.core.audit import AuditEntry, AuditQuery
from holdfast.core.dead_letters import DeadLetter, DeadLetterQuery, Settled, Settlement
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.events import NULL, Event, RunStarted, UpdateCompleted
from holdfast.core.index_rows import ActivityRecord, Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import Message, Signal, SignalRequest
from holdfast.core.snapshot import RuntimeSnapshot
from holdfast.core.state import TERMINAL
from holdfast.core.tasks import DECISIONS
from holdfast.store.queries import MailboxQuery as MailboxQuery
from holdfast.store.queries import RunQuery as RunQuery
from holdfast.store.queries import TaskQuery as TaskQuery
from holdfast.store.queries import WaitQuery as WaitQuery
from holdfast.store.types import Accepted as Accepted
from holdfast.store.types import Admitted as Admitted
from holdfast.store.types import Change as Change
from holdfast.store.types import Changes as Changes
from holdfast.store.types import CommitConflict as CommitConflict
from holdfast.store.types import Committed as Committed
from holdfast.store.types import Created as Created
from holdfast.store.types import Delivered as Delivered
from holdfast.store.types import Duplicate as Duplicate
from holdfast.store.types import Existing as Existing
from holdfast.store.types import Found as Found
from holdfast.store.types import LoadedRun as LoadedRun
from holdfast.store.types import NodePlans as NodePlans
from holdfast.store.types import OrphanedDefinition as OrphanedDefinition
from holdfast.store.types import Plan as Plan
from holdfast.store.types import PurgeReport as PurgeReport
from holdfast.store.types import Refused as Refused
from holdfast.store.types import RunHead as RunHead
from holdfast.store.types import Stats as Stats
from holdfast.store.wakeups import Wakeups


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a store can promise. Trusted: a store that lies here cannot be repaired from above."""

    conditional_batch: bool
    atomic_batch: bool
    read_after_write: bool
    scan_consistency: Literal["snapshot", "eventual"]


# --- what goes in -------------------------------------------------------------------------------------------------


class Turn(Struct, frozen=True, kw_only=True, gc=False):
    """One step of one run: everything that its commit changes.

    `received` names the signals that the turn consumed, as (inbox_seq, index of the event among `events`).
    `seen_inbox_seq` is the highest inbox number that the turn had before it: a later one makes the run ready again.
    `starts` and `sends` go to other runs: they become durable with the commit and arrive by themselves, as if by
    `create` and `deliver`, each at most once by its id. How many signals a run takes in a minute does not matter for
    them: they were recorded, and nobody is there to be told to try again. Nor is a run in `starts` refused because of
    its limit: it is queued. What is refused all the same is reported to the run itself (`outgoing.py`), in the
    same commit.
    Signals reach runs of the same tenant, project and environment; with `crosses_tenants` all.
    `dead` are messages that it gives up, and consumes.
    `jobs` go into queues, after `jobs_closed` names the steps whose jobs, and what was said of their progress, go.
    `losses` is what the run's count of lost nodes is after it: 0, unless the turn tells that another one is about to
    be tried. A claim from a node that is gone counts one more, up to `SUSPECT_LOSSES`: a run that is lost more often is
    counted by who tries it, so that it is not blamed for what other runs of the same node did.
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


_AWAITED = frozenset({RunStarted, UpdateCompleted})


def may_wake_others(turn: Turn) -> bool:
    """Say whether anybody but the run's owner can be waiting for what this turn does."""
    if turn.release or turn.messages or turn.starts or turn.sends or turn.jobs or turn.snapshot.status in TERMINAL:
        return True
    for event in turn.events:
        kind = type(event.data)
        if kind in _AWAITED or (turn.received and kind in DECISIONS):
            return True
    return False


class Job(Struct, frozen=True, kw_only=True, gc=False):
    """One step's activity in a queue, to be carried out by whichever node takes it.

    There is at most one for each step of a run; putting it again replaces it, and keeps the details of its progress.
    `engine_attempt_id` is that of the first take; each later take of the same job counts one on (ATT-1).
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


class Heartbeat(Struct, frozen=True, kw_only=True, gc=False):
    """Word that a step's activity is still being carried out, with details of its progress if there are new ones.

    `queue` is empty for an activity that is carried out by the run's owner.
    """

    run_id: str
    step_id: str
    queue: str = ""
    engine_attempt_id: int = 1
    details: Raw | UnsetType = UNSET


class NewRun(Struct, frozen=True, kw_only=True, gc=False):
    """A run to be created: who asked for it, its first events, and what goes with them.

    `request_key` recognises a retry of the same request (QUE-1); `input_sha256` tells a retry from a misuse.
    `signals` are for the run, whatever run they name: they are in its mailbox when it is there, or nothing is.
    With `admission` it is queued, and starts once its plan admits it.
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
    parent_run_id: str | None = None
    reference_key: str | None = None
    tags: tuple[str, ...] = ()
    signals: tuple[SignalRequest, ...] = ()
    admission: AdmissionRequest | None = None
    audit: AuditEntry | None = None
    """What the audit log keeps once the run is created. A request that was made before adds nothing."""


class PurgePolicy(Struct, frozen=True, kw_only=True):
    """How long what belongs to finished runs is kept, counted from their end. None keeps it for ever.

    Acceptance records go when they expire, whatever the policy. `stale_run_ms` deletes nothing: unfinished runs
    that nothing has happened to for so long are counted, for somebody to look at. `audit_ms` is how long entries of the
    audit log are kept, counted from when they were written.

    With a `tenant`, or `run_ids`, only what is theirs is deleted; `tokens` deletes the tenant's tokens too.
    """

    finished_run_ms: int | None = None
    task_ms: int | None = None
    runtime_state_ms: int | None = None
    stale_run_ms: int | None = None
    audit_ms: int | None = None
    tenant: str | None = None
    run_ids: tuple[str, ...] | None = None
    tokens: bool = False
    limit: int = 1_000
    dry_run: bool = False


# --- the verbs ----------------------------------------------------------------------------------------------------


class Store(Protocol):
    """The verbs. Every one is safe to call from many nodes at once."""

    @property
    def capabilities(self) -> Capabilities:
        """What the store can promise."""
        ...

    @property
    def wakeups(self) -> Wakeups:
        """The store's bell."""
        ...

    async def migrate(self) -> int:
        """Bring the schema up to this version, once, whoever comes first. Return the schema's version."""
        ...

    async def close(self) -> None:
        """Give back every resource. Closing twice is harmless."""
        ...

    async def now(self) -> Instant:
        """Return the store's time."""
        ...

    async def create(self, runs: Sequence[NewRun], claim_for: str | None = None) -> list[Created | Existing | Refused]:
        """Create runs. A request that was made before answers `Existing`, with another input `Refused(Conflict)`.

        With `claim_for` the runs belong to that node as they are written, at epoch 1; its lease must be current,
        or `LeaseExpired` is raised and nothing is created.

        A run and its first signals are one atomic step, and answered together. If one of the signals could never be
        accepted, the run is `Refused`; if the run is there already, they are delivered to it as by `deliver`.
        """
        ...

    async def load(self, run_ids: Sequence[str]) -> list[LoadedRun | None]:
        """Return the runs with the messages that are due and the signals that are unconsumed; None where missing."""
        ...

    async def deliver(self, items: Sequence[SignalRequest | Message]) -> list[Accepted | Duplicate | Refused]:
        """Put signals and messages into inboxes, each at most once by its id.

        A signal is refused for, in this order: a malformed name or id or an oversize payload; `NotFound`;
        `Conflict` (the id was used with another payload); `SignalAcceptanceIndeterminate`; `RunTerminal`;
        `Conflict` (the run is not at `expected_version`, which `details` then holds beside the `version`; it is
        `accept_before` or later; or a signal of the name waits for the step); `NotWaiting`; `RateLimited`. A retry of
        what was accepted is a `Duplicate` even when the run has finished.
        A message is refused for `InvalidInput`, `NotFound` and `RunTerminal`.
        """
        ...

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Append turns to histories, each if its version and epoch are still the run's."""
        ...

    async def claim(self, node: str, limit: int, plans: Sequence[Plan] | None = None) -> list[LoadedRun]:
        """Take up to `limit` eligible runs and load them: longest eligible first, then in order of creation.

        With `plans` only runs of these versions of them: what a node does not know it leaves to others. The node's
        lease must be current, or `LeaseExpired` is raised.
        """
        ...

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> tuple[list[Admitted], Instant | None]:
        """Admit up to `limit` queued runs of these plans, in order of the plans' names.

        With `claim_for` those without an owner belong to that node at once; its lease must be current, or
        `LeaseExpired` is raised. Also return when to call again even if no run leaves: at the next instant of a rate
        that a run is queued for, or now if `limit` cut it short.
        """
        ...

    async def renew(
        self, node: str, lease_ms: int, plans: Sequence[Plan] | None = None, is_start: bool = False
    ) -> Instant:
        """Give the node a lease until now + `lease_ms`, whatever it had before; return its end.

        A node is its name and its life (`web-1#5f2a`): each process that starts has a life of its own. With `is_start`
        the leases of all other lives of the name end now, and what they held can be claimed and taken at once. A node
        that has lost its lease to another life which is current gets `NodeSuperseded`. `plans` are all that it can run,
        until it says otherwise; of a node that has not said it, anything is believed.
        """
        ...

    async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
        """Free these runs if the node owns them, or all its runs and its lease. Return how many were freed.

        They are ready at once: whoever lets go of a run may have left activities of it undone.
        """
        ...

    async def hand_over(self, node: str, run_ids: Sequence[str], to: str) -> list[str]:
        """Give runs that the node owns to another one with a current lease; return which were given.

        They are ready at once. If the other node has no current lease none is given.
        """
        ...

    async def find_nodes(self) -> list[NodePlans]:
        """Return what the nodes with a current lease have said with it, in order of their names."""
        ...

    async def next_due(
        self, node: str, plans: Sequence[Plan] | None = None, queues: Sequence[str] = ()
    ) -> Instant | None:
        """Return the next instant at which such a `claim` may find something, or None if there is none in sight.

        With `queues` also the next one at which an `acquire_jobs` from them may, whatever the activity.
        """
        ...

    async def find_orphaned(self, late_ms: int) -> list[OrphanedDefinition]:
        """Return which definitions no node with a current lease has, though runs of them are eligible for so long.

        Those that have waited for longest come first. Only some thousand of the runs are looked at.
        """
        ...

    async def acquire_jobs(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> list[Job]:
        """Take up to `limit` jobs of these activities from these queues, those that have been due for longest first.

        They are not handed out again for `visible_ms`; then, if their step is still open, they are, to whoever asks.
        """
        ...

    async def release_jobs(self, node: str, jobs: Sequence[Job]) -> int:
        """Undo the take of jobs that this node was given and has not begun. Return how many were given back.

        Each is as it was before: visible at once, and its next take has the same `engine_attempt_id`.
        """
        ...

    async def heartbeat(self, node: str, beats: Sequence[Heartbeat], visible_ms: int) -> list[bool]:
        """Keep jobs that this node has taken for `visible_ms` more, and keep the details of their progress.

        False: it is no longer this node's to carry out. Its step is closed, or somebody else has taken it.
        """
        ...

    async def find_runs(self, query: RunQuery) -> Found[RunHead]:
        """Return the runs that the query names."""
        ...

    async def find_waits(self, query: WaitQuery) -> list[Wait]:
        """Return the open waits that the query names."""
        ...

    async def find_mailbox(self, query: MailboxQuery) -> list[Signal]:
        """Return the signals that the query names."""
        ...

    async def find_tasks(self, query: TaskQuery) -> Found[Task]:
        """Return the tasks that the query names."""
        ...

    async def find_dead_letters(self, query: DeadLetterQuery) -> list[DeadLetter]:
        """Return the dead letters that the query names."""
        ...

    async def settle_dead_letters(
        self, ids: Sequence[str], action: Settlement, actor: str = "", audit: AuditEntry | None = None
    ) -> list[Settled | Refused]:
        """Put messages back into their runs' inboxes, due now, or drop them for good. Safe to repeat.

        Refused: `NotFound`; `Conflict`, if it was settled otherwise; of a requeue `RunTerminal`, and `InvalidInput` for
        what cannot be read. A message of the same id that waits by now stays. With `audit` each letter that this call
        settles has an entry of the audit log, in the same commit.
        """
        ...

    async def put_tokens(self, tokens: Sequence[AccessToken], audit: Sequence[AuditEntry] = ()) -> list[AccessToken]:
        """Keep tokens, and return them as they are kept now. Of one that is known only what `joined` says changes.

        So nothing makes a token valid again that was revoked. Sessions that have run out are forgotten meanwhile. The
        entries of the audit log are appended in the same commit.
        """
        ...

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Append entries to the audit log, with the store's time. Those that go with another verb are given there."""
        ...

    async def find_audit(self, query: AuditQuery) -> list[AuditEntry]:
        """Return the entries of the audit log that the query names."""
        ...

    async def keep_key(self, name: str, key: str) -> str:
        """Keep a secret key of 64 hex digits under a name, unless there is one; return the key that is kept.

        It is as old as the store, and goes where the store goes: into backups, and back.
        """
        ...

    async def find_tokens(self, query: TokenQuery) -> list[AccessToken]:
        """Return the tokens that the query names."""
        ...

    async def publish_definitions(self, definitions: Sequence[WorkflowDeclaration]) -> None:
        """Keep what versions of workflows declare, in the place of what was published of them before."""
        ...

    async def find_definitions(self, plans: Sequence[Plan]) -> list[WorkflowDeclaration | None]:
        """Return what these versions of workflows declare, as it was published last; None where nothing was."""
        ...

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        """Return the run's events with a run_seq above `after`, in order; none for an unknown run."""
        ...

    async def changes(self, cursor: str = "", limit: int = 1_000) -> Changes:
        """Return which runs' histories have grown behind a cursor; without one, the cursor where everything is now.

        A cursor is the store's own text, and good for every process. At most `limit` events are looked at. A run may be
        named twice, but none is left out: whoever goes from cursor to cursor misses nothing, or is told `is_lost`.
        """
        ...

    async def purge(self, policy: PurgePolicy, audit: AuditEntry | None = None) -> PurgeReport:
        """Delete what retention allows: what belongs to finished runs, expired acceptance records, old audit entries.

        A finished run stays while its parent or a child of it is unfinished. The entry of the audit log, with what was
        deleted, is appended in the same commit, unless it is a dry run.
        """
        ...

    async def stats(self) -> Stats:
        """Count."""
        ...
