"""Events: what has happened to a run, in order, for ever.

An `Event` is an envelope around one typed body. `event_type` is the name of the body's class and is what the store
and every other language see.

What an event of a type means for its run and its step stands on its body class, and nowhere else: which kind of step it
opens or closes, from which status to which it leads, whether the program sees it. Those are the class attributes of
`Body`. Every table of event types is derived from them when its module is imported, and `tools/event_tables.py` writes
the page's. To add a kind of step, add the bodies that open and close it, with these attributes.

User values (inputs, results, payloads) are carried as raw JSON and never decoded here.

Events and bodies are hidden from the cyclic garbage collector (`gc=False`): they are frozen and refer to nothing that
could refer back, and a node may hold a great many of them.
"""

from enum import StrEnum
from typing import ClassVar, Literal, get_args

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core.instants import Instant

NULL = Raw(b"null")

ADAPTER_VERSION = "holdfast/1"
"""Which writer made an event. It changes when the meaning of events changes, not with every release."""


class RunStatus(StrEnum):
    """Where a run stands. The last three are terminal."""

    PENDING = "PENDING"
    APPROVED = "APPROVED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    # The same hash as Enum's own, without a Python call for every look-up in a table.
    __hash__ = str.__hash__


PENDING, APPROVED, RUNNING, PAUSED, COMPLETED, FAILED, CANCELLED = RunStatus
TERMINAL = frozenset({COMPLETED, FAILED, CANCELLED})
_UNFINISHED = (PENDING, APPROVED, RUNNING, PAUSED)

StepKind = Literal["activity", "timer", "signal", "task", "child", "update"]
"""What a step can be. `signal` is a wait for one."""

_EVERY_KIND: frozenset[StepKind] = frozenset(get_args(StepKind))


class ErrorInfo(Struct, frozen=True, omit_defaults=True, gc=False):
    """An error as it is kept in a history: bounded text, never an object."""

    code: str
    message: str
    retryable: bool = False
    category: str = ""
    traceback: str = ""
    cause: "ErrorInfo | None" = None


class ArtifactRef(Struct, frozen=True, omit_defaults=True, gc=False):
    """A reference to bytes kept elsewhere. The bytes are never in a history."""

    uri: str
    kind: str
    sha256: str | None = None
    size_bytes: int | None = None
    expires_at: Instant | None = None


class EngineRunRef(Struct, frozen=True, omit_defaults=True, gc=False):
    """Who appended an event: the node, and the epoch of the lease under which it did."""

    node: str
    epoch: int = 0
    provider: str = "holdfast"


class CallerRef(Struct, frozen=True, omit_defaults=True, gc=False):
    """Who called the service: the id of the token, and its name. An actor may be somebody whom the caller acts for."""

    token_id: str
    name: str = ""


class Body(Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """The part of an event that differs by type. `by` is the caller who caused it; None if it was none."""

    KEYED_BY: ClassVar[Literal["step", "run"]] = "step"
    """How the idempotency key is formed. `step`: an event of a step, once per logical attempt (the canonical key).

    `run`: an event of the run, or one that may recur within an attempt. The id of the signal that caused it, or the
    count of events of its type, stands in place of the step.
    """

    OPENS: ClassVar[StepKind | None] = None
    """The kind of step that it opens."""

    DUE_FIELD: ClassVar[str] = "due_at"
    """The field that says until when the step which it opens may stay open."""

    ASKS_OTHERS: ClassVar[bool] = False
    """The step that it opens asks somebody outside for an answer: to skip it takes a permission of its own."""

    CLOSES: ClassVar[frozenset[StepKind]] = frozenset()
    """The kinds of open steps that it closes."""

    CLOSED_AS: ClassVar[Literal["SUCCESS", "FAILED", "SKIPPED"]] = "SUCCESS"
    """How operators see a step that it has closed."""

    CHANGES: ClassVar[StepKind | None] = None
    """The kind of open step that it changes, which stays open."""

    CLOSES_ALL: ClassVar[bool] = False
    """It closes every step that is open."""

    LEADS_FROM: ClassVar[tuple[RunStatus, ...]] = ()
    LEADS_TO: ClassVar[RunStatus | None] = None
    """The statuses in which it can happen and the one that it leads to, if it changes the status of the run."""

    BEFORE_START: ClassVar[bool] = False
    """It can happen before the run has started, without changing its status. Other events need a run that has."""

    TO_PROGRAM: ClassVar[Literal["outcome", "control"] | None] = None
    """`outcome`: the program gets it, once the run is not paused. `control`: it says when the program gets outcomes."""

    RECORDS: ClassVar[Literal["control", "update", "task", "outcome"] | None] = None
    """The kind of signal from the engine to itself about which it records the decision, as the first event of it."""

    by: CallerRef | None = None


# --- the run -----------------------------------------------------------------------------------------------------


class RunBody(Body, frozen=True):
    """An event of the run as a whole."""

    KEYED_BY = "run"


class RetryOf(Struct, frozen=True, omit_defaults=True, gc=False):
    """The finished run that an operator had done again: by which command, by whom and why."""

    run_id: str
    signal_id: str
    actor: str = ""
    reason: str = ""


class RunQueued(RunBody, frozen=True):
    """The run exists. Everything that was asked for at its start is here."""

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


class RunApproved(RunBody, frozen=True):
    """Someone who may has let the run go ahead."""

    LEADS_FROM = (PENDING,)
    LEADS_TO = APPROVED

    actor: str = ""


class RunStarted(RunBody, frozen=True):
    """The program begins."""

    LEADS_FROM = (PENDING, APPROVED)
    LEADS_TO = RUNNING
    TO_PROGRAM = "control"


class RunPaused(RunBody, frozen=True):
    """The program is not advanced until the run is resumed. Results that arrive are still recorded."""

    LEADS_FROM = (RUNNING,)
    LEADS_TO = PAUSED
    TO_PROGRAM = "control"
    RECORDS = "outcome"

    reason: str = ""
    error: ErrorInfo | None = None
    failed_step_id: str | None = None
    """The step whose failure, recorded next, pauses the run."""


class RunResumed(RunBody, frozen=True):
    """The program goes on."""

    LEADS_FROM = (PAUSED,)
    LEADS_TO = RUNNING
    TO_PROGRAM = "control"

    reason: str = ""


class RunCancelRequested(RunBody, frozen=True):
    """The program is being cancelled; it may still clean up."""

    BEFORE_START = True
    TO_PROGRAM = "outcome"

    reason: str = ""


class RunCompleted(RunBody, frozen=True):
    """The program returned."""

    LEADS_FROM = (RUNNING,)
    LEADS_TO = COMPLETED
    CLOSES_ALL = True

    result: Raw = NULL
    artifacts: tuple[ArtifactRef, ...] = ()


class RunFailed(RunBody, frozen=True):
    """The program raised."""

    LEADS_FROM = _UNFINISHED
    LEADS_TO = FAILED
    CLOSES_ALL = True

    error: ErrorInfo


class RunCancelled(RunBody, frozen=True):
    """The program was cancelled and has ended."""

    LEADS_FROM = _UNFINISHED
    LEADS_TO = CANCELLED
    CLOSES_ALL = True

    reason: str = ""


class ContinuedAsNew(RunBody, frozen=True):
    """The history rotates: replay starts here, with this input. The run, its inbox and its numbering stay.

    `carried` is what the state before it held that is still true, so that a fold can begin here too.
    """

    CLOSES_ALL = True
    TO_PROGRAM = "control"

    input: Raw = NULL
    carried: Raw = NULL


class SignalAccepted(RunBody, frozen=True):
    """An operator's command was allowed. What it changes follows as events of its own."""

    BEFORE_START = True
    TO_PROGRAM = "control"
    RECORDS = "control"

    name: str
    signal_id: str
    actor: str = ""
    reason: str = ""
    target_step_id: str | None = None


class SignalRejected(RunBody, frozen=True):
    """An operator's command was refused; or a signal, an operation on a task or an update, by the authoriser.

    `name` is the command's, such as `PAUSE`, or says what was sent, such as `SIGNAL approval`.
    """

    BEFORE_START = True
    RECORDS = "control"

    name: str
    signal_id: str
    actor: str = ""
    reason: str = ""
    target_step_id: str | None = None


# --- steps -------------------------------------------------------------------------------------------------------


class StepStarted(Body, frozen=True):
    """An activity was scheduled."""

    OPENS = "activity"

    name: str
    input: Raw = NULL
    queue: str = ""
    idempotency_key: str | None = None
    options: Raw = NULL


NOT_BEGUN = "not begun"
"""Why an attempt is made again that no node has begun."""


class StepRetried(RunBody, frozen=True):
    """An activity will be dispatched again within the same logical attempt: after a failure, or after a crash.

    With the reason `NOT_BEGUN` the attempt before was given back by a node that stopped before it had begun it, or that
    does not have the activity: it does not count toward the policy's bound. Without `due_at` the next attempt waits for
    a node that has the activity.

    Keyed like an event of the run, because it recurs and the engine's attempt is never part of a key.
    """

    CHANGES = "activity"
    RECORDS = "outcome"

    reason: str
    due_at: Instant | None = None
    error: ErrorInfo | None = None


class StepDetached(RunBody, frozen=True):
    """An activity has ended without an outcome; somebody reports it later, until then at the latest.

    Keyed like `StepRetried`: it may recur, once for each attempt.
    """

    CHANGES = "activity"

    until: Instant | None = None


class StepCompleted(Body, frozen=True):
    """An activity's result is recorded."""

    CLOSES = frozenset({"activity"})
    TO_PROGRAM = "outcome"
    RECORDS = "outcome"

    result: Raw = NULL
    artifacts: tuple[ArtifactRef, ...] = ()


class StepFailed(Body, frozen=True):
    """An activity failed for good, in this logical attempt."""

    CLOSES = frozenset({"activity"})
    CLOSED_AS = "FAILED"
    TO_PROGRAM = "outcome"
    RECORDS = "outcome"

    error: ErrorInfo


class StepSkipped(Body, frozen=True):
    """The step is not to be done. Who waits for it gets `result`, or None."""

    CLOSES = _EVERY_KIND
    CLOSED_AS = "SKIPPED"
    TO_PROGRAM = "outcome"

    reason: str = ""
    result: Raw = NULL


class StepCancelled(Body, frozen=True):
    """The program gave up an open step of any kind."""

    CLOSES = _EVERY_KIND
    CLOSED_AS = "SKIPPED"

    reason: str = ""


class TimerStarted(Body, frozen=True):
    """The program sleeps until `due_at`."""

    OPENS = "timer"

    token: str
    due_at: Instant


class TimerFired(Body, frozen=True):
    """The time has come."""

    CLOSES = frozenset({"timer"})
    TO_PROGRAM = "outcome"


class SignalWaiting(Body, frozen=True):
    """The program waits for a signal."""

    OPENS = "signal"
    DUE_FIELD = "until"
    ASKS_OTHERS = True

    name: str
    token: str
    until: Instant | None = None


class SignalReceived(Body, frozen=True):
    """A signal was consumed. `suffix` is the new cursor of its name; replay reads the payload from here.

    Where the wait has a handler, `state_after` is what it returned, or else `error` what it raised.
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
    """A signal did not fit the wait that would have taken it: it is a dead letter, and the wait goes on.

    `suffix` is the new cursor of its name. The payload is with the dead letter.
    """

    name: str
    signal_id: str
    suffix: str
    addressed_to: str | None = None
    reason: str = ""


class SignalTimedOut(Body, frozen=True):
    """No signal came in time."""

    CLOSES = frozenset({"signal"})
    CLOSED_AS = "FAILED"
    TO_PROGRAM = "outcome"

    name: str


class SignalSent(Body, frozen=True):
    """The program sent a signal to a run, which gets it by itself, at most once by its id."""

    run_id: str
    name: str
    signal_id: str
    payload: Raw = NULL
    addressed_to: str | None = None


class EscalationRule(Struct, frozen=True, omit_defaults=True, gc=False):
    """To whom a task goes that nobody has completed for so long. Without roles it keeps its own."""

    after_ms: int
    roles: tuple[str, ...] = ()
    assignee: str | None = None


class TaskCreated(Body, frozen=True):
    """A human is asked. With `of`, or more than one of `approvals`, so many are to answer."""

    OPENS = "task"
    ASKS_OTHERS = True

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
    """A task changed hands, and roles if some are given. It may recur.

    `action` is assign, claim, release, reassign, or escalate when it happened by itself.
    """

    CHANGES = "task"
    RECORDS = "task"

    action: str
    actor: str
    assignee: str | None = None
    roles: tuple[str, ...] | None = None


class TaskReminded(RunBody, frozen=True):
    """A task is still open, and it is time to say so again. `count` begins with 1."""

    CHANGES = "task"

    count: int


class TaskCommented(RunBody, frozen=True):
    """Somebody has said something about a task."""

    CHANGES = "task"
    RECORDS = "task"

    actor: str
    text: str


class TaskAnswered(RunBody, frozen=True):
    """One of several humans who are asked has answered. After the last that is needed comes `TaskCompleted`."""

    CHANGES = "task"
    RECORDS = "task"

    actor: str
    answer: Raw = NULL


class TaskRefused(RunBody, frozen=True):
    """What somebody asked for was not done to a task. `stands_by` and `stands_at` say what stands instead."""

    RECORDS = "task"

    action: str
    actor: str
    error: ErrorInfo
    stands_by: str | None = None
    stands_at: Instant | None = None


class TaskCompleted(Body, frozen=True):
    """A human has answered."""

    CLOSES = frozenset({"task"})
    TO_PROGRAM = "outcome"
    RECORDS = "task"

    actor: str
    answer: Raw = NULL


class ChildStarted(Body, frozen=True):
    """Another run was started, and this one waits for it."""

    OPENS = "child"

    child_run_id: str
    plan_id: str
    plan_version: str
    token: str
    input: Raw = NULL
    close_policy: str = "await"


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

    error: ErrorInfo


class MarkerRecorded(Body, frozen=True):
    """A value that the program must find again on replay: a new id, a draw, a version flag."""

    name: str
    value: Raw = NULL


class UpdateAccepted(Body, frozen=True):
    """A request that will be answered was let in.

    `was_refused` is the verdict of the validation, which runs once, when the update is accepted. A refused update is
    answered by the next event, and the program is not told of it. None, of older writers: no verdict was recorded.
    """

    OPENS = "update"
    TO_PROGRAM = "outcome"
    RECORDS = "update"

    name: str
    input: Raw = NULL
    was_refused: bool | None = None


class UpdateCompleted(Body, frozen=True):
    """The request was answered."""

    CLOSES = frozenset({"update"})

    result: Raw = NULL
    error: ErrorInfo | None = None


class UnknownBody(Body, frozen=True):
    """A body that this version does not know. It is kept as it is, and skipped."""

    raw: Raw


BODIES: dict[str, type[Body]] = {
    body.__name__: body
    for base in (Body, RunBody)
    for body in base.__subclasses__()
    if body not in (RunBody, UnknownBody)
}
"""Every known body by its event type."""

OPENING: dict[type[Body], StepKind] = {body: body.OPENS for body in BODIES.values() if body.OPENS is not None}
"""What kind of step an event opens, by the type of its body."""

CLOSING: dict[type[Body], frozenset[StepKind]] = {body: body.CLOSES for body in BODIES.values() if body.CLOSES}
"""The kinds of step that an event closes, by the type of its body."""

CLOSING_ALL = frozenset(body for body in BODIES.values() if body.CLOSES_ALL)
"""The bodies of events that close every open step."""

OUTCOMES = frozenset(body for body in BODIES.values() if body.TO_PROGRAM == "outcome")
"""The bodies of events that a program gets: something has ended, or is asked of it."""

TRANSITIONS: dict[RunStatus, dict[type[Body], RunStatus]] = {
    status: {body: body.LEADS_TO for body in BODIES.values() if body.LEADS_TO is not None and status in body.LEADS_FROM}
    for status in RunStatus
}
"""From a status, by the type of an event, to the next status. `docs/states.md` is drawn from this table."""


def recording(kind: Literal["control", "update", "task", "outcome"]) -> tuple[type[Body], ...]:
    """Return the bodies of events that record the decision about this kind of signal from the engine to itself."""
    return tuple(body for body in BODIES.values() if kind == body.RECORDS)


class Event(Struct, frozen=True, gc=False):
    """One entry of a run's history.

    `run_seq` and `persisted_at` are 0 until the store assigns them inside the commit.
    """

    run_id: str
    run_seq: int
    event_id: str
    event_type: str
    step_id: str | None
    engine_attempt_id: int | None
    logical_attempt_id: int | None
    data: Body
    idempotency_key: str
    emitted_at: Instant
    persisted_at: Instant
    adapter_version: str
    engine_run_ref: EngineRunRef
    caused_by_signal_id: str | None
    parent_event_id: str | None
    schema_version: int
