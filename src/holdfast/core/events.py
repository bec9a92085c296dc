"""Events: what has happened to a run, in order. They are appended and never change.

An `Event` is an envelope around one typed body. `event_type` is the name of the body's class, which the store and
every other language read.

The meaning of an event type for its run and its step is defined on its body class, and nowhere else: which kind of step
it opens or closes, which status it leads to, and whether the program gets it. These are the class attributes of `Body`.
Every table of event types is derived from them on import, and `tools/event_tables.py` generates the tables of the web
page. To add a kind of step, add the bodies that open and close it, with these attributes.

User values (inputs, results, payloads) are kept as raw JSON and never decoded here.

Events and bodies are hidden from the cyclic garbage collector (`gc=False`): they are frozen and refer to nothing that
could refer back, and a node may hold very many of them.
"""

from enum import StrEnum
from typing import Any, ClassVar, Literal, get_args

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core.attributes import Value
from holdfast.core.instants import Instant

NULL = Raw(b"null")

ADAPTER_VERSION = "holdfast/1"
"""Which writer made an event. It changes when the meaning of events changes, not with each release."""


class RunStatus(StrEnum):
    """The status of a run. The last three are terminal."""

    PENDING = "PENDING"
    APPROVED = "APPROVED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    # Equal to Enum's hash, but without a Python call for every look-up in a table.
    __hash__ = str.__hash__


PENDING, APPROVED, RUNNING, PAUSED, COMPLETED, FAILED, CANCELLED = RunStatus
TERMINAL = frozenset({COMPLETED, FAILED, CANCELLED})
_UNFINISHED = (PENDING, APPROVED, RUNNING, PAUSED)

StepKind = Literal["activity", "timer", "signal", "task", "child", "update"]
"""The kinds of steps. `signal` is a wait for a signal."""

_EVERY_KIND: frozenset[StepKind] = frozenset(get_args(StepKind))


class ErrorInfo(Struct, frozen=True, omit_defaults=True, gc=False):
    """An error as recorded in a history: bounded text, never an object."""

    code: str
    message: str
    retryable: bool = False
    category: str = ""
    traceback: str = ""
    cause: "ErrorInfo | None" = None
    bases: tuple[str, ...] = ()
    """The names of the exception's informative base classes, nearest first."""
    retry_after_ms: int | None = None
    """The delay before the next attempt that the error asks for."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.message else self.code


class ArtifactRef(Struct, frozen=True, omit_defaults=True, gc=False):
    """A reference to bytes kept elsewhere. The bytes are never in a history."""

    uri: str
    """Where the bytes are."""
    kind: str
    """Its kind, in your own words, such as `report`."""
    sha256: str | None = None
    """The SHA-256 of the bytes in hex, if it is known."""
    size_bytes: int | None = None
    """How many bytes there are, if it is known."""
    expires_at: Instant | None = None
    """When the bytes may be deleted, if a time was set."""


class PlanSource(Struct, frozen=True, omit_defaults=True, gc=False):
    """The body of a plan that a run executes: its hash, and where it came from."""

    sha256: str
    uri: str = ""


class EngineRunRef(Struct, frozen=True, omit_defaults=True, gc=False):
    """The writer of an event: the node, and the epoch of its lease."""

    node: str
    epoch: int = 0
    provider: str = "holdfast"


class CallerRef(Struct, frozen=True, omit_defaults=True, gc=False):
    """A caller of the service: the id and name of its token. It may act for another person, the actor."""

    token_id: str
    name: str = ""


class Body(Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """The part of an event that differs by type. `by` is the caller who caused it, or None."""

    KEYED_BY: ClassVar[Literal["step", "run"]] = "step"
    """How the idempotency key is formed. `step`: an event of a step, once per logical attempt (the canonical key).

    `run`: an event of the run, or one that may recur within an attempt. The id of the signal that caused it, or the
    count of events of its type, replaces the step.
    """

    OPENS: ClassVar[StepKind | None] = None
    """The kind of step that it opens."""

    DUE_FIELD: ClassVar[str] = "due_at"
    """The field with the deadline of the step that it opens."""

    ASKS_OTHERS: ClassVar[bool] = False
    """The step that it opens waits for an answer from outside: skipping it needs a separate permission."""

    CLOSES: ClassVar[frozenset[StepKind]] = frozenset()
    """The kinds of open steps that it closes."""

    CLOSED_AS: ClassVar[Literal["SUCCESS", "FAILED", "SKIPPED"]] = "SUCCESS"
    """How operators see a step that it has closed."""

    CHANGES: ClassVar[StepKind | None] = None
    """The kind of open step that it changes without closing it."""

    CLOSES_ALL: ClassVar[bool] = False
    """It closes every step that is open."""

    LEADS_FROM: ClassVar[tuple[RunStatus, ...]] = ()
    LEADS_TO: ClassVar[RunStatus | None] = None
    """The statuses in which it can happen and the status that it leads to, if it changes the status of the run."""

    BEFORE_START: ClassVar[bool] = False
    """It can happen before the run has started, without changing its status. Other events need a run that has."""

    TO_PROGRAM: ClassVar[Literal["outcome", "control"] | None] = None
    """`outcome`: the program gets it once the run is not paused. `control`: it decides when outcomes are delivered."""

    RECORDS: ClassVar[Literal["control", "update", "task", "outcome"] | None] = None
    """The kind of engine signal whose decision it records, as the first event of that decision."""

    IS_AWAITED: ClassVar[bool] = False
    """Callers on other nodes may wait for it, as they do for the end of a run and for decisions about tasks."""

    IS_WORK: ClassVar[bool] = False
    """The run executes something while the step that it opens is open. In other steps it only waits."""

    LABEL: ClassVar[str] = ""
    """What people call a step of the kind that it opens."""

    TONE: ClassVar[Literal["plain", "good", "warn", "bad"]] = "plain"
    """How it is shown to people: success, needs attention, failure."""

    by: CallerRef | None = None


# --- the run -----------------------------------------------------------------------------------------------------


class RunBody(Body, frozen=True):
    """An event of the run as a whole."""

    KEYED_BY = "run"


class RetryOf(Struct, frozen=True, omit_defaults=True, gc=False):
    """The finished run that an operator retried, with the command, the operator and the reason."""

    run_id: str
    signal_id: str
    actor: str = ""
    reason: str = ""
    attempt: int = 2
    """The number of the new run's attempt: one more than that of the retried run."""


class ScheduleTick(Struct, frozen=True):
    """The tick of a schedule that started a run."""

    schedule_id: str
    tick: int


class RunOrigin(Struct, frozen=True, omit_defaults=True, gc=False):
    """How a run was created, for its program to read: the contents of `RunQueued`, and when."""

    queued_at: Instant
    tenant: str = "default"
    project: str = "default"
    environment: str = "default"
    request_id: str = ""
    reference_key: str | None = None
    tags: tuple[str, ...] = ()
    schedule: ScheduleTick | None = None
    retry_of: str | None = None
    attempt: int = 0
    """The number of its attempt; 0: the one in its id (`core/restarts.py`)."""


class FormerRun(Struct, frozen=True, omit_defaults=True, gc=False):
    """A run that recorded the first events of another one, up to this event, and what its program knew of its run."""

    last_event: int
    run_id: str
    attempt: int = 1
    parent_run_id: str | None = None
    retry_of: str | None = None
    schedule: ScheduleTick | None = None


class ForkedFrom(Struct, frozen=True, omit_defaults=True, gc=False):
    """The original run of a fork, how many of its events are kept, and the source of the ids and random numbers."""

    run_id: str
    run_seq: int
    seed: str = ""
    forked_at: Instant = 0
    """The instant from which the time-outs of the fork count."""
    former: tuple[FormerRun, ...] = ()
    """The runs that recorded those events, earliest first: `run_id`, and the runs that it was forked from."""

    @property
    def formers(self) -> tuple[FormerRun, ...]:
        """The same for every fork: earlier versions did not write `former`."""
        return self.former or (FormerRun(self.run_seq, self.run_id),)


class RunTimeouts(Struct, frozen=True, omit_defaults=True, gc=False):
    """How long a run may take, in milliseconds; None: without limit (`core/run_timeouts.py`)."""

    execution_ms: int | None = None
    """The whole run, from its creation or scheduled start."""
    run_ms: int | None = None
    """One stretch of it: from its start or its last rotation."""
    cleanup_ms: int = 600_000
    """How long it may clean up after a time-out before it is ended."""


class DebounceTerms(Struct, frozen=True, gc=False):
    """How long a debounced run waits for a later start, in milliseconds (`core/debounce.py`)."""

    quiet_ms: int
    """From the last start of its key until the run starts."""
    at_most_ms: int
    """From the first one: then the run starts, even if more starts come."""


class RunQueued(RunBody, frozen=True):
    """The run exists. The event holds everything in the start request."""

    plan_id: str
    plan_version: str
    tenant: str = "default"
    project: str = "default"
    environment: str = "default"
    run_request_id: str = ""
    input: Raw = NULL
    parent_run_id: str | None = None
    parent_step_id: str | None = None
    parent_token: str | None = None
    depth: int = 0
    retry_of: RetryOf | None = None
    plan: PlanSource | None = None
    attributes: dict[str, Value] = {}
    """The search attributes that it is started with, and the parts of its reference."""
    schedule: ScheduleTick | None = None
    forked_from: ForkedFrom | None = None
    requires_approval: bool = False
    """The run does not start before an operator has approved it."""
    start_at: Instant | None = None
    """The run does not start before this instant."""
    reference_key: str | None = None
    tags: tuple[str, ...] = ()
    priority: int = 0
    """The priority with which it is queued for admission when it is approved or its start is due."""
    needs: int = 0
    """The level of the format that a node must understand to start it (`core/plans.py`)."""
    timeouts: RunTimeouts | None = None
    context: Raw = NULL
    """What its starter passes on to everything that works for the run: an object of texts (`core/run_context.py`)."""
    debounce: DebounceTerms | None = None
    """Until it starts, a later start with the same key replaces its input and postpones its start."""


class InputReplaced(RunBody, frozen=True):
    """A later start of a debounced run that has not begun: it begins with this input, and not before `start_at`."""

    BEFORE_START = True
    TO_PROGRAM = "control"
    RECORDS = "outcome"

    input: Raw = NULL
    start_at: Instant = 0


class RunApproved(RunBody, frozen=True):
    """A person with the permission has approved the run."""

    LEADS_FROM = (PENDING,)
    LEADS_TO = APPROVED

    actor: str = ""


class RunStarted(RunBody, frozen=True):
    """The program begins."""

    LEADS_FROM = (PENDING, APPROVED)
    LEADS_TO = RUNNING
    TO_PROGRAM = "control"
    IS_AWAITED = True


class RunPaused(RunBody, frozen=True):
    """The program is not advanced until the run is resumed. Results that arrive are still recorded."""

    LEADS_FROM = (RUNNING,)
    LEADS_TO = PAUSED
    TO_PROGRAM = "control"
    RECORDS = "outcome"
    TONE = "warn"

    reason: str = ""
    error: ErrorInfo | None = None
    failed_step_id: str | None = None
    """The step whose failure, recorded next, pauses the run."""


class RunResumed(RunBody, frozen=True):
    """The program is advanced again."""

    LEADS_FROM = (PAUSED,)
    LEADS_TO = RUNNING
    TO_PROGRAM = "control"

    reason: str = ""


class RunCancelRequested(RunBody, frozen=True):
    """The program is being cancelled; it may still clean up."""

    BEFORE_START = True
    TO_PROGRAM = "outcome"

    reason: str = ""


class RunTimedOut(RunBody, frozen=True):
    """The run took longer than it may. It is cancelled, unless it is being cancelled already, and may clean up."""

    BEFORE_START = True
    TONE = "bad"

    timeout: str
    """`execution` or `run`."""
    limit_ms: int


class RunCompleted(RunBody, frozen=True):
    """The program returned."""

    LEADS_FROM = (RUNNING,)
    LEADS_TO = COMPLETED
    CLOSES_ALL = True
    TONE = "good"

    result: Raw = NULL
    artifacts: tuple[ArtifactRef, ...] = ()


class RunFailed(RunBody, frozen=True):
    """The program raised; or the run took longer than it may."""

    LEADS_FROM = _UNFINISHED
    LEADS_TO = FAILED
    CLOSES_ALL = True
    TONE = "bad"

    error: ErrorInfo
    timeout: str = ""
    """`execution` or `run`, if a time-out ended the run and not its program."""


class RunCancelled(RunBody, frozen=True):
    """The program was cancelled and has ended."""

    LEADS_FROM = _UNFINISHED
    LEADS_TO = CANCELLED
    CLOSES_ALL = True
    TONE = "warn"

    reason: str = ""


class ContinuedAsNew(RunBody, frozen=True):
    """The history rotates: replay starts here, with this input. The run, its inbox and its numbering stay.

    `carried` is the part of the previous state that still holds, so that a fold can begin here too.
    """

    CLOSES_ALL = True
    TO_PROGRAM = "control"

    input: Raw = NULL
    carried: Raw = NULL


class SignalAccepted(RunBody, frozen=True):
    """An operator's command was accepted. Its effects follow as separate events."""

    BEFORE_START = True
    TO_PROGRAM = "control"
    RECORDS = "control"

    name: str
    signal_id: str
    actor: str = ""
    reason: str = ""
    target_step_id: str | None = None


class SignalRejected(RunBody, frozen=True):
    """An operator's command was refused; or the authoriser refused a signal, an operation on a task or an update.

    `name` is the name of the command, such as `PAUSE`, or of what was sent, such as `SIGNAL approval`.
    """

    BEFORE_START = True
    RECORDS = "control"
    TONE = "bad"

    name: str
    signal_id: str
    actor: str = ""
    reason: str = ""
    target_step_id: str | None = None


# --- steps -------------------------------------------------------------------------------------------------------


class StepStarted(Body, frozen=True):
    """An activity was scheduled. With an idempotency key the step is reconcilable: see `core/reconciliation.py`."""

    OPENS = "activity"
    IS_WORK = True
    LABEL = "Activity"

    name: str
    input: Raw = NULL
    queue: str = ""
    idempotency_key: str | None = None
    options: Raw = NULL


NOT_BEGUN = "not begun"
"""The reason of a retry after an attempt that never began."""


class StepRetried(RunBody, frozen=True):
    """An activity will be dispatched again within the same logical attempt: after a failure, or after a crash.

    With the reason `NOT_BEGUN` a node returned the previous attempt before it began: the node was stopping, or does
    not have the activity. That attempt does not count toward the policy's limit. Without `due_at` the next attempt
    waits for a node that has the activity.

    Keyed like an event of the run, because it recurs and the engine's attempt is never part of a key.
    """

    CHANGES = "activity"
    RECORDS = "outcome"
    TONE = "warn"

    reason: str
    due_at: Instant | None = None
    error: ErrorInfo | None = None
    uncounted: int = 0
    """How many attempts before the next one do not count toward the limit: they were lost, and the policy allows it."""
    is_last_look: bool = False
    """The next attempt only asks the verifier of a keyed step: the function is not called again."""
    node: str = ""
    """The node that made the previous attempt, if the step has a key and the node is known."""


class StepDetached(RunBody, frozen=True):
    """An activity has ended without an outcome. The outcome is reported later by token, before `until`.

    Keyed like `StepRetried`: it may recur, once for each attempt.
    """

    CHANGES = "activity"

    until: Instant | None = None
    result_schema: dict[str, Any] | None = None
    """The JSON Schema of the result, for processes that do not have the activity. None if it is not known."""


class StepUnresolved(RunBody, frozen=True):
    """It is not known whether the effect of a keyed step has happened: the step waits for an operator.

    Keyed like `StepRetried`: it may recur. The next event opens the task for the operator.
    """

    CHANGES = "activity"
    RECORDS = "outcome"
    TONE = "bad"

    error: ErrorInfo
    """Why it is not known: the last answer of the verifier, or what happened instead."""
    was_called: bool = True
    """Whether the function may have been called in this attempt."""
    result: Raw | UnsetType = UNSET
    """The result of this attempt, if it contradicts that of another one."""
    node: str = ""


class StepSucceededLate(RunBody, frozen=True):
    """An abandoned attempt of a keyed step has succeeded, and a later one may have begun in the meantime.

    While the step is open, the current attempt decides: its result must be the same. If the step is closed, this is a
    diagnostic: the result differs from the recorded one, and does not replace it.
    """

    RECORDS = "outcome"
    TONE = "warn"

    result: Raw = NULL
    node: str = ""


class StepCompleted(Body, frozen=True):
    """An activity's result is recorded. `confirmed_by` is `verifier` or `operator` if it is not from the function."""

    CLOSES = frozenset({"activity"})
    TO_PROGRAM = "outcome"
    RECORDS = "outcome"

    result: Raw = NULL
    artifacts: tuple[ArtifactRef, ...] = ()
    confirmed_by: str = ""


class StepFailed(Body, frozen=True):
    """An activity failed permanently, in this logical attempt."""

    CLOSES = frozenset({"activity"})
    CLOSED_AS = "FAILED"
    TO_PROGRAM = "outcome"
    RECORDS = "outcome"
    TONE = "bad"

    error: ErrorInfo


class StepSkipped(Body, frozen=True):
    """An operator has skipped the step. The program gets `result`, or None."""

    CLOSES = _EVERY_KIND
    CLOSED_AS = "SKIPPED"
    TO_PROGRAM = "outcome"

    reason: str = ""
    result: Raw = NULL


class StepCancelled(Body, frozen=True):
    """The program no longer waits for an open step of any kind."""

    CLOSES = _EVERY_KIND
    CLOSED_AS = "SKIPPED"

    reason: str = ""


class TimerStarted(Body, frozen=True):
    """The program sleeps until `due_at`."""

    OPENS = "timer"
    LABEL = "Timer"

    token: str
    due_at: Instant


class TimerFired(Body, frozen=True):
    """The timer is due."""

    CLOSES = frozenset({"timer"})
    TO_PROGRAM = "outcome"


class SignalWaiting(Body, frozen=True):
    """The program waits for a signal."""

    OPENS = "signal"
    DUE_FIELD = "until"
    ASKS_OTHERS = True
    LABEL = "Wait"

    name: str
    token: str
    until: Instant | None = None


class SignalReceived(Body, frozen=True):
    """A signal was consumed. `suffix` is the new cursor of its name; replay reads the payload from here.

    If the wait has a handler, `state_after` is what it returned, or `error` what it raised.
    """

    CLOSES = frozenset({"signal"})
    TO_PROGRAM = "outcome"

    name: str
    signal_id: str
    suffix: str
    addressed_to: str | None = None
    payload: Raw = NULL
    state_after: Raw | UnsetType = UNSET
    error: ErrorInfo | None = None


class SignalDeadLettered(RunBody, frozen=True):
    """The payload of a signal did not fit the wait: the signal is a dead letter, and the wait stays open.

    `suffix` is the new cursor of its name. The payload is with the dead letter.
    """

    TONE = "bad"

    name: str
    signal_id: str
    suffix: str
    addressed_to: str | None = None
    reason: str = ""


class SignalTimedOut(Body, frozen=True):
    """No signal arrived before the deadline."""

    CLOSES = frozenset({"signal"})
    CLOSED_AS = "FAILED"
    TO_PROGRAM = "outcome"
    TONE = "bad"

    name: str


class SignalSent(Body, frozen=True):
    """The program sent a signal to a run. The run gets it at most once, by its id."""

    run_id: str
    name: str
    signal_id: str
    payload: Raw = NULL
    addressed_to: str | None = None


class EscalationRule(Struct, frozen=True, omit_defaults=True, gc=False):
    """Who gets a task that is still open after this time. Without roles the task keeps its own."""

    after_ms: int
    roles: tuple[str, ...] = ()
    assignee: str | None = None


class TaskCreated(Body, frozen=True):
    """A task for a human is open. With `of`, or with more than one of `approvals`, several people answer it."""

    OPENS = "task"
    ASKS_OTHERS = True
    LABEL = "Task"

    task_id: str
    name: str
    token: str
    task_type: str = ""
    route: str = ""
    payload: Raw = NULL
    form: Raw = NULL
    roles: tuple[str, ...] = ()
    assignee: str | None = None
    due_at: Instant | None = None
    remind_ms: int | None = None
    escalation: EscalationRule | None = None
    approvals: int = 1
    of: int | None = None


class TaskAssigned(RunBody, frozen=True):
    """A task got another assignee, and other roles if the event has any. It may recur.

    `action` is assign, claim, release or reassign; escalate if the engine did it.
    """

    CHANGES = "task"
    RECORDS = "task"

    action: str
    actor: str
    assignee: str | None = None
    roles: tuple[str, ...] | None = None


class TaskReminded(RunBody, frozen=True):
    """A reminder of a task that is still open. `count` begins with 1."""

    CHANGES = "task"

    count: int


class TaskCommented(RunBody, frozen=True):
    """A person has commented on a task."""

    CHANGES = "task"
    RECORDS = "task"

    actor: str
    text: str


class TaskAnswered(RunBody, frozen=True):
    """One of several people has answered a task. `TaskCompleted` follows the last answer that is needed."""

    CHANGES = "task"
    RECORDS = "task"

    actor: str
    answer: Raw = NULL


class TaskRefused(RunBody, frozen=True):
    """An operation on a task was refused. `stands_by` and `stands_at` name the earlier decision that holds instead."""

    RECORDS = "task"

    action: str
    actor: str
    error: ErrorInfo
    stands_by: str | None = None
    stands_at: Instant | None = None


class TaskCompleted(Body, frozen=True):
    """The task is answered."""

    CLOSES = frozenset({"task"})
    TO_PROGRAM = "outcome"
    RECORDS = "task"

    actor: str
    answer: Raw = NULL


class ChildStarted(Body, frozen=True):
    """Another run was started, and this one waits for it."""

    OPENS = "child"
    LABEL = "Child run"

    child_run_id: str
    plan_id: str
    plan_version: str
    token: str
    input: Raw = NULL
    close_policy: str = "await"
    plan: PlanSource | None = None
    attributes: dict[str, Value] = {}
    tags: tuple[str, ...] = ()
    priority: int = 0
    """The order in which it is admitted, if its workflow has limits."""
    timeouts: RunTimeouts | None = None


class ChildCompleted(Body, frozen=True):
    """The other run returned."""

    CLOSES = frozenset({"child"})
    TO_PROGRAM = "outcome"

    result: Raw = NULL


class ChildFailed(Body, frozen=True):
    """The other run failed or was cancelled."""

    CLOSES = frozenset({"child"})
    CLOSED_AS = "FAILED"
    TO_PROGRAM = "outcome"
    TONE = "bad"

    error: ErrorInfo


class MarkerRecorded(Body, frozen=True):
    """A value that the program must get again on replay: a new id, a random number, a version flag."""

    name: str
    value: Raw = NULL


PUBLISHED = "published"
"""The name of a marker with values that a program has published: the changed fields, and None for removed ones."""


class AttributesSet(Body, frozen=True):
    """The program has changed search attributes of its run. None: the attribute was removed."""

    values: dict[str, Value | None]


class UpdateAccepted(Body, frozen=True):
    """An update was accepted. It will be answered.

    `was_refused` is the verdict of the validation, which runs once, when the update is accepted. The next event answers
    a refused update, and the program does not get it. None, from older writers: no verdict was recorded.
    """

    OPENS = "update"
    TO_PROGRAM = "outcome"
    RECORDS = "update"
    IS_WORK = True
    LABEL = "Update"

    name: str
    input: Raw = NULL
    was_refused: bool | None = None


class UpdateCompleted(Body, frozen=True):
    """The update was answered."""

    CLOSES = frozenset({"update"})
    IS_AWAITED = True

    result: Raw = NULL
    error: ErrorInfo | None = None


class UnknownBody(Body, frozen=True):
    """A body of a type that this version does not know. It is preserved, and readers skip it."""

    raw: Raw


BODIES: dict[str, type[Body]] = {
    body.__name__: body
    for base in (Body, RunBody)
    for body in base.__subclasses__()
    if body not in (RunBody, UnknownBody)
}
"""All known bodies by event type."""

OPENING: dict[type[Body], StepKind] = {body: body.OPENS for body in BODIES.values() if body.OPENS is not None}
"""The kind of step that an event opens, by the type of its body."""

CLOSING: dict[type[Body], frozenset[StepKind]] = {body: body.CLOSES for body in BODIES.values() if body.CLOSES}
"""The kinds of step that an event closes, by the type of its body."""

CLOSING_ALL = frozenset(body for body in BODIES.values() if body.CLOSES_ALL)
"""The bodies of events that close every open step."""

OUTCOMES = frozenset(body for body in BODIES.values() if body.TO_PROGRAM == "outcome")
"""The bodies of events that a program gets: a step has ended, an update was accepted, the run is being cancelled."""

TRANSITIONS: dict[RunStatus, dict[type[Body], RunStatus]] = {
    status: {body: body.LEADS_TO for body in BODIES.values() if body.LEADS_TO is not None and status in body.LEADS_FROM}
    for status in RunStatus
}
"""From a status, by the type of an event, to the next status. `docs/states.md` is drawn from this table."""


def recording(kind: Literal["control", "update", "task", "outcome"]) -> tuple[type[Body], ...]:
    """Return the bodies of events that record the decision about this kind of engine signal."""
    return tuple(body for body in BODIES.values() if kind == body.RECORDS)


class Event(Struct, frozen=True, gc=False):
    """One entry of a run's history.

    `run_seq` and `persisted_at` are 0 until the store assigns them inside the commit.
    """

    run_id: str
    """The run."""
    run_seq: int
    """The position in the history of the run, from 1, without gaps."""
    event_id: str
    """A UUID that stays the same if the event is written again."""
    event_type: str
    """The name of the type, such as `StepCompleted`."""
    step_id: str | None
    """The step that it is about; None for events of the run."""
    engine_attempt_id: int | None
    """The number of the dispatch of the step, from 1."""
    logical_attempt_id: int | None
    """1, and one more with each RETRY_STEP."""
    data: Body
    """The fields of the type: see the reference of events."""
    idempotency_key: str
    """64 hex digits that a repeated event shares with the first. The store keeps one of them."""
    emitted_at: Instant
    """When the node created it, by the node's clock."""
    persisted_at: Instant
    """When the store committed it, by the store's clock."""
    adapter_version: str
    """The form of the event, such as `holdfast/1`."""
    engine_run_ref: EngineRunRef
    """The node that appended it, and the epoch of its lease."""
    caused_by_signal_id: str | None
    """The signal or command that it answers."""
    parent_event_id: str | None
    """The event that caused it."""
    schema_version: int
    """The version of the fields in `data`."""
