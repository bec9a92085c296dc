"""Decisions that all stores share: whether a lease is current or a signal is accepted, and the text of refusals.

Nothing here reads a store. Checks of arguments are in `validation.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

from msgspec import Raw, Struct
from msgspec.structs import asdict, replace

from holdfast.core import codec
from holdfast.core.admission import AdmissionRequest
from holdfast.core.audit import AuditEntry
from holdfast.core.bus import OutboxReplay
from holdfast.core.codec import INTEGER_LIMIT
from holdfast.core.dead_letters import DeadLetter, Settlement
from holdfast.core.index_rows import Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import CONTROL_SIGNAL, UPDATE_SIGNAL, ControlPayload, Message, SignalRequest
from holdfast.core.plans import RegisteredPlan
from holdfast.core.restarts import next_restart
from holdfast.core.schedules import Schedule
from holdfast.core.state import PENDING, TERMINAL, RunStatus
from holdfast.core.streams import StreamAppend
from holdfast.errors import (
    CallerError,
    Conflict,
    InvalidInput,
    LeaseExpired,
    LockLost,
    NodeSuperseded,
    NotFound,
    NotWaiting,
    RateLimited,
    RunTerminal,
    SignalAcceptanceIndeterminate,
)
from holdfast.limits import LEASE_MS, Limits
from holdfast.store.types import (
    ArchivedRun,
    Delivered,
    Duplicate,
    Existing,
    HostLock,
    NewRun,
    PurgePolicy,
    PurgeReport,
    Refused,
    RunHead,
)

# --- nodes and their leases --------------------------------------------------------------------------------------


LEASE_HORIZON = 2 * LEASE_MS * 1_000
"""How far ahead, in microseconds, a lease may end: the longest lease, granted by a clock that is a little ahead."""
LIFE = "#"
"""Separates a node's name from the suffix of its life, within a node's identity; no name contains it."""


def lease_end(lease_until: Instant, now: Instant) -> Instant:
    """Return when a lease ends: now, if it ends beyond the horizon: a clock that was ahead granted it."""
    return lease_until if lease_until <= now + LEASE_HORIZON else now


def lease_expired(node: str) -> LeaseExpired:
    """Return the error of a node that claims without a current lease."""
    return LeaseExpired(f"node {node} has no current lease; renew it before claiming", node=node)


def name_of(node: str) -> str:
    """Return the name by which operators know a node, without the suffix of its life."""
    return node.partition(LIFE)[0]


def lives_of(node: str) -> tuple[str, str] | None:
    """Return the open range of texts that contains all lives of the node's name; None if the node has no other life."""
    name, mark, _ = node.partition(LIFE)
    return (name + mark, name + chr(ord(LIFE) + 1)) if mark else None


def is_another_life(node: str, other: str) -> bool:
    """Return whether this is another life of the same node."""
    lives = lives_of(node)
    return lives is not None and other != node and lives[0] < other < lives[1]


def superseded(node: str) -> NodeSuperseded:
    """Return the error of a node whose name another life has taken over."""
    name = name_of(node)
    return NodeSuperseded(
        f"node {name}: another process has started under this name and took over; give each process its own name",
        node=name,
    )


def schedule_conflict(schedule: Schedule, known: Schedule | None) -> Conflict:
    """Return the refusal of a change that was computed from another revision."""
    what = f"schedule {schedule.schedule_id!r}"
    if known is None:
        return Conflict(f"{what} is not there any more", schedule_id=schedule.schedule_id)
    text = f"{what} exists" if schedule.revision <= 1 else f"{what} was changed meanwhile: read it again"
    return Conflict(text, schedule_id=schedule.schedule_id, revision=known.revision)


def next_schedule(schedule: Schedule, expected: int, known: Schedule | None, now: Instant) -> Schedule | None:
    """Return the schedule to store; None if this very change is already stored. Otherwise raise `Conflict`."""
    given = replace(schedule, revision=expected + 1)
    is_another = known is not None and schedule.created_at not in (0, known.created_at)  # deleted, and created again
    if (0 if known is None else known.revision) == expected and not is_another:
        return replace(given, updated_at=now, created_at=now if known is None else known.created_at)
    if known is not None and known == replace(given, updated_at=known.updated_at, created_at=known.created_at):
        return None
    raise schedule_conflict(given, known)


def is_free(lock: HostLock, now: Instant) -> bool:
    """Return whether another owner may acquire the lock."""
    return lease_end(lock.lease_until, now) <= now


def lock_lost(lock: HostLock) -> LockLost:
    """Return the error of a node that writes under a lock that it no longer holds."""
    text = f"node {name_of(lock.owner)} no longer holds the lock {lock.name!r}: its lease has expired"
    return LockLost(text, lock=lock.name, node=name_of(lock.owner))


# --- runs --------------------------------------------------------------------------------------------------------


MINUTE = 60_000_000


def no_such_run(run_id: str) -> NotFound:
    """Return the refusal of something sent to a run that does not exist."""
    return NotFound(f"there is no run {run_id!r}", run_id=run_id)


def run_terminal(run_id: str, status: RunStatus) -> RunTerminal:
    """Return the refusal of something sent to a run that has finished."""
    return RunTerminal(f"run {run_id!r} is {status}", run_id=run_id, status=str(status))


def taken_again(message: Message) -> Conflict:
    """Return the refusal of a failed attempt whose job has been acquired again since."""
    return Conflict(
        f"the job of step {message.step_id!r} of run {message.run_id!r} was acquired again after attempt "
        f"{message.attempt}; how the later attempt ends decides",
        run_id=message.run_id,
        step_id=message.step_id,
    )


def is_of_another_run(message: Message, scheduled_at: Instant) -> bool:
    """Return whether an outcome is of a deleted run with the same id, judging by when its job was scheduled."""
    is_known = message.attempt is not None and message.opened_at and scheduled_at
    return bool(is_known) and message.opened_at != scheduled_at


def of_another_run(message: Message) -> Conflict:
    """Return the refusal of an outcome of a job that belonged to a deleted run with the same id."""
    return Conflict(
        f"attempt {message.attempt} of step {message.step_id!r} was of a run that was deleted; run {message.run_id!r} "
        "is another one",
        run_id=message.run_id,
        step_id=message.step_id,
    )


def request_conflict(run_id: str) -> Conflict:
    """Return the refusal of a request id that was used with another input."""
    return Conflict(f"this request was made before with another input, and started run {run_id!r}", run_id=run_id)


def older_nodes(nodes: Sequence[str], level: int) -> Conflict:
    """Make the refusal of a run that nodes of an earlier release would claim and process wrongly."""
    return Conflict(
        f"the run needs level {level} of the stored format, and nodes of an earlier release work on this store: "
        f"{', '.join(nodes)}. Upgrade them first",
        nodes=list(nodes),
        level=level,
    )


def run_id_taken(run_id: str) -> Conflict:
    """Return the refusal of a run id that another request has used."""
    return Conflict(f"there is another run with the id {run_id!r}", run_id=run_id)


class Taken(NamedTuple):
    """The latest run of an id that a start requests."""

    run_id: str
    place: tuple[str, str, str, str]
    """Its tenant, project, environment and plan."""
    status: RunStatus
    created_at: Instant = 0
    is_queued: bool = False
    is_decided: bool = False
    """Whether it has received a command that decides on it as it is now: `decides`."""


def reuse_of(new: NewRun, latest: Taken | None) -> Existing | Refused | None:
    """Return the verdict on a start whose id may be taken; None if the run is to be created.

    The caller proposes an id, and names the run to terminate. If these are outdated by now, the refusal has the right
    ones: its `details` have `restart_as`, and the caller tries again.
    """
    reuse = new.reuse
    assert reuse is not None
    if latest is None:
        return None if new.run_id == reuse.run_id else Refused(_restarts_as(None, reuse.run_id))
    if latest.place != (new.tenant, new.project, new.environment, new.plan_id):
        return Refused(run_id_taken(reuse.run_id))
    is_finished = latest.status in TERMINAL
    if reuse.policy == "reject":
        return Refused(run_is_there(latest))
    if reuse.policy == "debounce":
        return None  # the outcome of its signal decides: `accepted_before`
    if reuse.policy == "return" or (reuse.policy == "restart-if-finished" and not is_finished):
        return Existing(latest.run_id, is_reused=True)
    try:
        next_id = next_restart(reuse.run_id, latest.run_id)
    except Conflict as problem:
        return Refused(problem)
    is_stopped = is_finished or (reuse.stop is not None and reuse.stop.run_id == latest.run_id)
    return None if new.run_id == next_id and is_stopped else Refused(_restarts_as(latest.run_id, next_id))


def taken_by(head: RunHead, *, is_decided: bool = False) -> Taken:
    """Return what the verdict on an id needs to know about its latest run."""
    place = (head.tenant, head.project, head.environment, head.plan_id)
    return Taken(head.run_id, place, head.status, head.created_at, head.queued_at is not None, is_decided)


def signals_to(new: NewRun, latest: Taken) -> list[SignalRequest]:
    """Return the signals of a start, for the finished run that may have accepted them from the same start.

    Only a finished run may get them: it accepts nothing new, and answers what it accepted before. A later input of a
    debounced run always goes to the latest run: a run that takes no more input answers in the same way.
    """
    if is_debounced(new):
        until = _takes_input_until(new, latest)
        return [replace(request, run_id=latest.run_id, accept_before=until) for request in new.signals]
    if latest.status not in TERMINAL:
        return []
    return [replace(request, run_id=latest.run_id) for request in new.signals if request.signal_id is not None]


def decides(command: Raw | str) -> bool:
    """Return whether a command that no turn has read yet ends or approves a run.

    The command was given for the run as it was then, so the run takes no other input after it.
    """
    try:
        read = codec.decode(Raw(command), ControlPayload)
    except InvalidInput:
        return False
    return read.name in ("CANCEL", "EMERGENCY_STOP", "APPROVE") and read.refusal is None


def is_debounced(new: NewRun) -> bool:
    """Return whether a start may become a later input of a run that has not begun."""
    return new.reuse is not None and new.reuse.policy == "debounce"


def _takes_input_until(new: NewRun, latest: Taken) -> Instant:
    """Return the instant before which the latest run of a key takes another input; 0 if it takes none."""
    terms = getattr(new.events[0].data, "debounce", None)
    if terms is None or latest.status is not PENDING or latest.is_queued or latest.is_decided:
        return 0
    return latest.created_at + int(terms.at_most_ms) * 1_000


def _debounce_of(new: NewRun, latest: Taken, delivered: Sequence[Delivered]) -> Existing | Refused | None:
    """Return the run that has taken the input of a debounced start; None if the next run is to be created."""
    [answer] = delivered
    if not isinstance(answer, Refused):
        return Existing(latest.run_id, is_reused=True)
    if isinstance(answer.error, Conflict) and "signal_id" in answer.error.details:
        return Refused(request_conflict(latest.run_id))
    if not isinstance(answer.error, Conflict | RunTerminal):
        return answer
    assert new.reuse is not None
    try:
        next_id = next_restart(new.reuse.run_id, latest.run_id)
    except Conflict as problem:
        return Refused(problem)
    return None if new.run_id == next_id else Refused(_restarts_as(latest.run_id, next_id))


def accepted_before(new: NewRun, latest: Taken, delivered: Sequence[Delivered]) -> Existing | Refused | None:
    """Return the finished run that has accepted all signals of a start, which means that the start was made before.

    For a debounced start, return the run that has taken its input, or which run is next if another was proposed.
    """
    if is_debounced(new):
        return _debounce_of(new, latest, delivered)
    is_done = len(delivered) == len(new.signals) > 0 and all(isinstance(each, Duplicate) for each in delivered)
    return Existing(latest.run_id, tuple(delivered), is_reused=True) if is_done else None


def run_is_there(latest: Taken) -> Conflict:
    """Return the refusal of an id that is taken."""
    return Conflict(
        f"there is a run with the id {latest.run_id!r}, which is {latest.status}",
        run_id=latest.run_id,
        status=str(latest.status),
    )


def _restarts_as(latest: str | None, run_id: str) -> Conflict:
    problem = f"the next run of this id is {run_id!r}"
    return Conflict(problem, run_id=latest, restart_as=run_id)


def without_rate(limits: Limits) -> Limits:
    """Return the limits that apply to signals from runs: all but the limit of signals per minute."""
    return replace(limits, signals_per_run_per_minute=INTEGER_LIMIT)


def never_rejected(starts: Iterable[NewRun]) -> list[NewRun]:
    """Return the runs that a turn starts, changed so that they are queued instead of refused."""
    return [new if new.admission is None else replace(new, admission=unrejected(new.admission)) for new in starts]


LAST_RUN = 2**62
"""No run has a number above this one."""


def after_replay(asked: OutboxReplay, until: int) -> int | None:
    """Return where to continue a replay that has examined the runs up to this number; None if it is complete."""
    return None if asked.run_id is not None or until == LAST_RUN else until


PART_EVENTS = 1_000
"""How many events of one run a purge deletes at most in one commit, in a database and if `most_bytes` bounds it.

A longer history is deleted in parts, the oldest events first, and the run itself with the last part. A reader meanwhile
finds a gap at the beginning of the history, and the run's result. In a file, a part takes 5 ms of processor time. A
server aborts statements that take too long; a history that one statement cannot delete would then stay forever, along
with everything that ended after it.
"""


def within_bytes(sizes: Iterable[int], most: int) -> int:
    """Return how many items, in order, fit into this many bytes: at least one, if there is one."""
    total = count = 0
    for size in sizes:
        total += size
        if count and total > most:
            break
        count += 1
    return count


def unrejected(request: AdmissionRequest) -> AdmissionRequest:
    """Return a request that queues a run where this one would be refused."""
    if request.limit.overload != "reject":
        return request
    return replace(request, limit=replace(request.limit, overload="queue"))


def first_signals(new: NewRun, run_id: str, version: str) -> list[SignalRequest]:
    """Return the signals that come with a request and that its run, of this version, gets."""
    if new.unfit is not None or version != new.plan_version or is_debounced(new):  # it begins with its input
        return []
    return [replace(request, run_id=run_id) for request in new.signals]


# --- signals -----------------------------------------------------------------------------------------------------


def finds_wait(
    waits: Sequence[Wait], ahead: Iterable[tuple[str | None, Instant]], step_id: str | None, came_at: Instant
) -> bool:
    """Return whether an open wait is left for a signal, after earlier signals of the same name have taken theirs.

    For each of those signals, `ahead` has the wait that it is addressed to and when it arrived. A signal without an
    address takes the oldest wait. A wait takes nothing that arrives after its deadline, even if no turn has closed it
    yet.
    """
    free = sorted(waits, key=_opened)
    for address, at in (*ahead, (step_id, came_at)):
        taken = next((wait for wait in free if _takes(wait, address, at)), None)
        if taken is not None:
            free.remove(taken)
    return taken is not None


def _takes(wait: Wait, address: str | None, came_at: Instant) -> bool:
    return address in (None, wait.step_id) and (wait.until is None or came_at <= wait.until)


def _opened(wait: Wait) -> tuple[Instant, int, str]:
    """Return when a wait was opened: its token ends with the number of the event that opened it."""
    number = wait.token.rpartition("@")[2]
    return wait.since, int(number) if number.isdecimal() else 0, wait.step_id


def check_conditions(request: SignalRequest, version: int, now: Instant, is_step_taken: bool) -> Conflict | None:
    """Return why a conditional signal is not accepted, or None."""
    if request.accept_before is not None and now >= request.accept_before:
        return not_accepted_any_more(request)
    if request.expected_version is not None and is_step_taken:
        return step_is_taken(request)
    if request.expected_version is not None and request.expected_version != version:
        return version_moved(request, version)
    return None


def payload_conflict(request: SignalRequest) -> Conflict:
    """Return the refusal of a signal id that was used with another payload."""
    return Conflict(
        f"{_with_its_id(request)} was accepted before with another payload",
        workflow_id=request.run_id,
        signal_name=request.name,
        signal_id=request.signal_id,
    )


def _with_its_id(request: SignalRequest) -> str:
    """Return how a request looks to its sender, who need not know that it is stored as a signal."""
    return _SENT_AS.get(request.name, f"signal {request.name!r} with this signal_id")


_SENT_AS = {UPDATE_SIGNAL: "an update with this update_id", CONTROL_SIGNAL: "a command with this signal_id"}


def version_moved(request: SignalRequest, version: int) -> Conflict:
    """Return the refusal of a signal for a version of its run that is no longer current."""
    return Conflict(
        f"signal {request.name!r} was meant for version {request.expected_version} of run {request.run_id!r}, "
        f"which is at {version}",
        workflow_id=request.run_id,
        expected_version=request.expected_version,
        version=version,
    )


def not_accepted_any_more(request: SignalRequest) -> Conflict:
    """Return the refusal of a signal that arrives at or after its `accept_before`."""
    return Conflict(f"the time for signal {request.name!r} is over", workflow_id=request.run_id)


def step_is_taken(request: SignalRequest) -> Conflict:
    """Return the refusal of a conditional signal for a step that has another, unrecorded one."""
    problem = f"another signal {request.name!r} was accepted for step {request.step_id!r} before"
    return Conflict(problem, workflow_id=request.run_id, step_id=request.step_id)


def indeterminate(request: SignalRequest, now: Instant) -> SignalAcceptanceIndeterminate:
    """Return the refusal of a signal whose payload is stored but whose acceptance record is missing."""
    seed = f"{request.run_id}|{request.name}|{request.signal_id}|{now}"
    return SignalAcceptanceIndeterminate(
        f"{_with_its_id(request)} may have been delivered; its acceptance record is missing",
        workflow_id=request.run_id,
        signal_name=request.name,
        signal_id=request.signal_id,
        correlation_id=sha256(seed.encode()).hexdigest()[:16],
    )


def not_waiting(request: SignalRequest) -> NotWaiting:
    """Return the refusal of a signal that requires an open wait and finds none."""
    return NotWaiting(
        f"no open wait of run {request.run_id!r} would take signal {request.name!r}",
        workflow_id=request.run_id,
        signal_name=request.name,
    )


def rate_limited(request: SignalRequest, limits: Limits, free_at: Instant, now: Instant) -> RateLimited:
    """Return the refusal of a signal that exceeds the rate limit."""
    return RateLimited(
        f"run {request.run_id!r} takes {limits.signals_per_run_per_minute} signals a minute",
        workflow_id=request.run_id,
        retry_after_ms=-(-(free_at - now) // 1_000),
    )


# --- dead letters ------------------------------------------------------------------------------------------------


def settled_message(letter: DeadLetter, action: Settlement, status: RunStatus) -> Message | CallerError | None:
    """Return the message to put back, None if it is to be dropped, or the reason why it cannot be settled so."""
    if letter.settled is not None:
        return Conflict(f"letter {letter.letter_id!r} was settled before: {letter.settled}", letter_id=letter.letter_id)
    if action == "drop":
        return None
    if letter.reason == "refused":
        problem = "was refused by the run that it was for: send it again yourself, or drop the letter"
        return InvalidInput(f"what letter {letter.letter_id!r} holds {problem}")
    if status in TERMINAL:
        return run_terminal(letter.run_id, status)
    try:
        return replace(codec.decode(letter.envelope, Message), due_at=None, attempts=0)
    except InvalidInput:
        return InvalidInput(f"letter {letter.letter_id!r} cannot be read, so it cannot be handled again")


def no_such_letter(letter_id: str) -> NotFound:
    """Return the refusal to settle a dead letter that does not exist."""
    return NotFound(f"there is no dead letter {letter_id!r}", letter_id=letter_id)


def no_such_sink(name: str) -> NotFound:
    """Return the error of a sink that does not exist."""
    return NotFound(f"there is no sink {name!r}", sink=name)


def sink_of_another(name: str) -> Conflict:
    """Return the refusal to replace a sink that belongs to another tenant."""
    return Conflict(f"there is a sink {name!r} of another tenant: choose another name", sink=name)


def unreadable_letter(letter_id: str) -> Conflict:
    """Return the refusal to settle a dead letter whose row is damaged."""
    return Conflict(f"the row of dead letter {letter_id!r} is damaged: repair or delete it", letter_id=letter_id)


# --- streams -----------------------------------------------------------------------------------------------------


class StreamFence(Struct, frozen=True):
    """What an append to a stream is checked against: its run, and its step's job if that is in a queue."""

    status: RunStatus
    is_finished: bool
    lease_epoch: int
    taken_by: str | None = None
    next_attempt: int = 0


def fenced(given: StreamAppend, fence: StreamFence | None) -> CallerError | None:
    """Return why nothing can be appended to a stream any more, or None."""
    if fence is None:
        return no_such_run(given.run_id)
    if fence.is_finished:
        return run_terminal(given.run_id, fence.status)
    if given.epoch is None:
        is_held = (fence.taken_by, fence.next_attempt) == (given.node, given.attempt + 1)
    else:
        is_held = fence.lease_epoch == given.epoch
    if is_held:
        return None
    return Conflict(
        f"node {given.node} has attempt {given.attempt} of step {given.step_id!r} no more: it appends nothing",
        run_id=given.run_id,
        step_id=given.step_id,
    )


# --- entries of the audit log ------------------------------------------------------------------------------------


def purge_entry(entry: AuditEntry, report: PurgeReport, now: Instant) -> AuditEntry:
    """Return the audit entry of a purge, with what was deleted."""
    counts = asdict(report)
    said = ", ".join(f"{name} {count}" for name, count in counts.items() if count and name != "has_more")
    return replace(entry, detail=said or "nothing", at=now)


# --- plans -------------------------------------------------------------------------------------------------------

PLAN_GRACE_MS = 24 * 3_600_000
"""How long the body of a plan is kept after it was put, even if nothing refers to it yet."""


def unused_until(policy: PurgePolicy, now: Instant) -> Instant | None:
    """Return the instant up to which a purge deletes bodies of plans, by when they were put; None: it deletes none."""
    window_ms = policy.finished_run_ms if policy.plan_body_ms is None else policy.plan_body_ms
    if policy.run_ids is not None or window_ms is None:
        return None
    return now if policy.plans else now - max(window_ms, PLAN_GRACE_MS) * 1_000


def outbox_until(policy: PurgePolicy, now: Instant) -> Instant | None:
    """Return the instant up to which a purge deletes outbox entries; None: it deletes only those of deleted runs."""
    if policy.run_ids is not None or policy.outbox_ms is None:
        return None
    return now - policy.outbox_ms * 1_000


def archived_of(policy: PurgePolicy, deleted: Mapping[str, Instant], now: Instant) -> list[ArchivedRun]:
    """Return what a store keeps about the runs that a purge deletes: by their ids, with when they were created."""
    return [
        replace(run, archived_at=now)
        for run in policy.archived
        if run.created_at == deleted.get(run.run_id, run.created_at + 1)
    ]


def plan_conflict(known: RegisteredPlan) -> Conflict:
    """Make the error of a version that is registered with another body."""
    return Conflict(
        f"version {known.plan_version!r} of plan {known.plan_id!r} is registered with another body: its hash is "
        f"{known.sha256}; give the changed plan another version",
        plan_id=known.plan_id,
        plan_version=known.plan_version,
        sha256=known.sha256,
    )


def no_such_plan_body(plan: RegisteredPlan) -> NotFound:
    """Make the error of a version whose body is not in the store."""
    return NotFound(f"the store has no body with the hash {plan.sha256}; put it first", sha256=plan.sha256)


# --- lists -------------------------------------------------------------------------------------------------------


TOO_SLOW = "the list took too long to read; ask for less, such as by workflow, status or time"
