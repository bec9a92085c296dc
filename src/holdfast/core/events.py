"""Events: what has happened to a run, in order, for ever.

An `Event` is an envelope around one typed body. `event_type` is the name of the body's class and is what the store
and every other language see. A body class says with `KEYED_BY` how its idempotency key is formed:

* ``step``: an event of a step, once per logical attempt (the canonical key);
* ``run``: an event of the run, or one that may recur within an attempt. The id of the signal that caused it, or
  the count of events of its type, stands in place of the step.

User values (inputs, results, payloads) are carried as raw JSON and never looked into here.

Events and bodies are hidden from the cyclic garbage collector (`gc=False`): they are frozen and refer to nothing that
could refer back, and a node may hold a great many of them.
"""

from typing import ClassVar

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core.instants import Instant

NULL = Raw(b"null")

ADAPTER_VERSION = "holdfast/1"
"""Which writer made an event. It changes when the meaning of events changes, not with every release."""


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

    KEYED_BY: ClassVar[str] = "step"

    by: CallerRef | None = None


# --- the run -----------------------------------------------------------------------------------------------------


class RunBody(Body, frozen=True):
    """An event of the run as a whole."""

    KEYED_BY: ClassVar[str] = "run"


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

    actor: str = ""


class RunStarted(RunBody, frozen=True):
    """The program begins."""


class RunPaused(RunBody, frozen=True):
    """The program is not advanced until the run is resumed. Results that arrive are still recorded."""

    reason: str = ""
    error: ErrorInfo | None = None
    failed_step_id: str | None = None
    """The step whose failure, recorded next, pauses the run."""


class RunResumed(RunBody, frozen=True):
    """The program goes on."""

    reason: str = ""


class RunCancelRequested(RunBody, frozen=True):
    """The program is being cancelled; it may still clean up."""

    reason: str = ""


class RunCompleted(RunBody, frozen=True):
    """The program returned."""

    result: Raw = NULL
    artifacts: tuple[ArtifactRef, ...] = ()


class RunFailed(RunBody, frozen=True):
    """The program raised."""

    error: ErrorInfo


class RunCancelled(RunBody, frozen=True):
    """The program was cancelled and has ended."""

    reason: str = ""


class ContinuedAsNew(RunBody, frozen=True):
    """The history rotates: replay starts here, with this input. The run, its inbox and its numbering stay.

    `carried` is what the state before it held that is still true, so that a fold can begin here too.
    """

    input: Raw = NULL
    carried: Raw = NULL


class SignalAccepted(RunBody, frozen=True):
    """An operator's command was allowed. What it changes follows as events of its own."""

    name: str
    signal_id: str
    actor: str = ""
    reason: str = ""
    target_step_id: str | None = None


class SignalRejected(RunBody, frozen=True):
    """An operator's command was refused; or a signal, an operation on a task or an update, by the authoriser.

    `name` is the command's, such as `PAUSE`, or says what was sent, such as `SIGNAL approval`.
    """

    name: str
    signal_id: str
    actor: str = ""
    reason: str = ""
    target_step_id: str | None = None


# --- steps -------------------------------------------------------------------------------------------------------


class StepStarted(Body, frozen=True):
    """An activity was scheduled."""

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

    reason: str
    due_at: Instant | None = None
    error: ErrorInfo | None = None


class StepDetached(RunBody, frozen=True):
    """An activity has ended without an outcome; somebody reports it later, until then at the latest.

    Keyed like `StepRetried`: it may recur, once for each attempt.
    """

    until: Instant | None = None


class StepCompleted(Body, frozen=True):
    """An activity's result is recorded."""

    result: Raw = NULL
    artifacts: tuple[ArtifactRef, ...] = ()


class StepFailed(Body, frozen=True):
    """An activity failed for good, in this logical attempt."""

    error: ErrorInfo


class StepSkipped(Body, frozen=True):
    """The step is not to be done. Who waits for it gets `result`, or None."""

    reason: str = ""
    result: Raw = NULL


class StepCancelled(Body, frozen=True):
    """The program gave up an open step of any kind."""

    reason: str = ""


class TimerStarted(Body, frozen=True):
    """The program sleeps until `due_at`."""

    token: str
    due_at: Instant


class TimerFired(Body, frozen=True):
    """The time has come."""


class SignalWaiting(Body, frozen=True):
    """The program waits for a signal."""

    name: str
    token: str
    until: Instant | None = None


class SignalReceived(Body, frozen=True):
    """A signal was consumed. `suffix` is the new cursor of its name; replay reads the payload from here.

    Where the wait has a handler, `state_after` is what it returned, or else `error` what it raised.
    """

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

    action: str
    actor: str
    assignee: str | None = None
    roles: tuple[str, ...] | None = None


class TaskReminded(RunBody, frozen=True):
    """A task is still open, and it is time to say so again. `count` begins with 1."""

    count: int


class TaskCommented(RunBody, frozen=True):
    """Somebody has said something about a task."""

    actor: str
    text: str


class TaskAnswered(RunBody, frozen=True):
    """One of several humans who are asked has answered. After the last that is needed comes `TaskCompleted`."""

    actor: str
    answer: Raw = NULL


class TaskRefused(RunBody, frozen=True):
    """What somebody asked for was not done to a task. `stands_by` and `stands_at` say what stands instead."""

    action: str
    actor: str
    error: ErrorInfo
    stands_by: str | None = None
    stands_at: Instant | None = None


class TaskCompleted(Body, frozen=True):
    """A human has answered."""

    actor: str
    answer: Raw = NULL


class ChildStarted(Body, frozen=True):
    """Another run was started, and this one waits for it."""

    child_run_id: str
    plan_id: str
    plan_version: str
    token: str
    input: Raw = NULL
    close_policy: str = "await"


class ChildCompleted(Body, frozen=True):
    """The other run returned."""

    result: Raw = NULL


class ChildFailed(Body, frozen=True):
    """The other run failed or was cancelled."""

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

    name: str
    input: Raw = NULL
    was_refused: bool | None = None


class UpdateCompleted(Body, frozen=True):
    """The request was answered."""

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
