"""The inputs of a run: messages, signals, results of activities, operators' commands.

A **message** is an envelope that the engine creates; the commit that handles it deletes it. It carries the waiting
token of its step. If that token is no longer open the message is stale: handling it changes nothing. This is how
timers are cancelled.

A **signal** is sent from outside. It is kept in the run's mailbox, in the order of acceptance per name, until a wait
consumes it, and it can be traced afterwards.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.audit import AuditEntry
from holdfast.core.events import NULL, ArtifactRef, CallerRef, ErrorInfo
from holdfast.core.instants import Instant
from holdfast.core.keys import ATTEMPT_MARK, check_name, check_signal_id, fitting_id
from holdfast.core.timing import DEADLINE_MARK, Retry
from holdfast.errors import CallerError, InvalidInput, PayloadTooLarge
from holdfast.limits import ERROR_CAUSES, ERROR_TEXT_CHARS, NAME_BYTES, SIGNAL_ID_BYTES, Limits

T = TypeVar("T")

MessageType = Literal[
    "TaskCompleted",
    "TimerDue",
    "RetryDue",
    "ExternalSignal",
    "SubWorkflowCompleted",
    "InternalContinue",
    "ActivityCompleted",
]


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An envelope waiting to be handled by a run. `signal_id` is its id, unique within the run."""

    signal_id: str
    run_id: str
    type: MessageType
    occurred_at: Instant
    due_at: Instant | None = None
    expected_version: int | None = None
    waiting_token: str | None = None
    step_id: str | None = None
    runtime_provider: str = "holdfast"
    payload: Raw = NULL
    attempts: int = 0
    """How often it was deferred because it could not be handled."""

    by: CallerRef | None = None
    """The caller of the service who sent it."""

    is_latest_only: bool = False
    """It is refused if the job of its step was acquired again: the outcome of the later attempt decides."""

    opened_at: Instant = 0
    """When the step of its outcome was opened: this distinguishes the run from a later one with the same id.
    0 in older messages, and in those without an outcome."""

    @property
    def attempt(self) -> int | None:
        """The attempt of an activity to which its outcome belongs; None if it carries none."""
        if self.type != "ActivityCompleted" or self.step_id is None or self.waiting_token is None:
            return None
        step_id, mark, attempt = self.waiting_token.rpartition(ATTEMPT_MARK)
        return int(attempt) if mark and step_id == self.step_id and attempt.isdecimal() else None


class Answer(Struct, frozen=True, omit_defaults=True, gc=False):
    """The payload of `TaskCompleted`: who answered, and what."""

    actor: str
    answer: Raw = NULL


class ChildOutcome(Struct, frozen=True, omit_defaults=True, gc=False):
    """The payload of `SubWorkflowCompleted`: a result or an error."""

    result: Raw = NULL
    error: ErrorInfo | None = None


def child_outcome(
    run_id: str, parent_run_id: str, step_id: str | None, token: str | None, outcome: ChildOutcome, now: Instant
) -> Message:
    """Return the message that informs a parent how a child ended, or that it never began."""
    return Message(
        signal_id=fitting_id(f"child:{run_id}", NAME_BYTES),
        run_id=parent_run_id,
        type="SubWorkflowCompleted",
        occurred_at=now,
        expected_version=1,
        waiting_token=token,
        step_id=step_id,
        payload=codec.encode(outcome),
    )


class ActivityOutcome(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The payload of `ActivityCompleted`: a result, an error, or the note that the outcome is reported later.

    `fraction` is the sender's random number for the jitter of the next attempt.
    """

    logical_attempt_id: int
    engine_attempt_id: int
    result: Raw = NULL
    artifacts: tuple[ArtifactRef, ...] = ()
    error: ErrorInfo | None = None
    fraction: float = 0.0
    is_detached: bool = False
    until: Instant | None = None
    result_schema: dict[str, Any] | None = None
    confirmed_by: str = ""
    """`verifier` if the result is not from the function."""
    node: str = ""
    """The node that made the attempt, if the step has a key."""


class Original(Struct, frozen=True, gc=False):
    """The fingerprint and size of the payload as sent, if the stored payload differs from it.

    Retries are recognised by the fingerprint, and the limit applies to this size.
    """

    sha256: str
    size_bytes: int


class SignalRequest(Struct, frozen=True, kw_only=True, gc=False):
    """A request to accept a signal."""

    run_id: str
    name: str
    payload: Raw = NULL
    signal_id: str | None = None
    step_id: str | None = None
    require_waiting: bool = False
    expected_version: int | None = None
    """Accept it only while the run is at this version and no other signal of its name waits for the same step."""
    accept_before: Instant | None = None
    """Accept it only before this instant, by the store's clock."""
    is_unlimited: bool = False
    """Accept it however many signals the run got within the minute: the run is an entity."""
    actor: str = ""
    """The sender, for the authoriser. It is not stored."""

    audit: AuditEntry | None = None
    """The entry of the audit log for the acceptance; its `by` is stored with the signal. A retry may differ."""

    original: Original | None = None
    """Set if the payload is sealed (`store/payloads.py`)."""

    @property
    def payload_sha256(self) -> str:
        """The fingerprint by which a retry with the same id is compared."""
        return codec.value_digest(self.payload) if self.original is None else self.original.sha256


ADMITTED = "admitted"
"""The id of the message that starts a run that was held, then released and queued for admission."""


MAILBOX = "mailbox"
"""The id of the message that a run leaves itself after reading a part of its mailbox."""


class Signal(Struct, frozen=True, kw_only=True, gc=False):
    """A signal in a run's mailbox. `id` is the store's, `signal_id` the sender's.

    `accepted_at` strictly increases within a run; `received_at` is the time of the store's clock at acceptance.
    `state_after` or `error` is the result of the wait's handler, for the turn that consumes the signal.
    """

    id: str
    run_id: str
    name: str
    signal_id: str
    inbox_seq: int
    suffix: str
    accepted_at: Instant
    payload: Raw = NULL
    step_id: str | None = None
    consumed_seq: int | None = None
    state_after: Raw | UnsetType = UNSET
    error: ErrorInfo | None = None
    received_at: Instant | None = None
    misfit: str | None = None
    """Why the wait cannot take it: its payload is not of the expected type."""
    by: CallerRef | None = None


class DeadSignal(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The payload of `ExternalSignal`: a signal that was a dead letter and is requeued."""

    id: str
    name: str
    signal_id: str
    suffix: str
    accepted_at: Instant
    payload: Raw = NULL


def dead_signal(signal: Signal, now: Instant) -> Message:
    """Return the message that the dead letter of a signal holds."""
    dead = DeadSignal(
        id=signal.id,
        name=signal.name,
        signal_id=signal.signal_id,
        suffix=signal.suffix,
        accepted_at=signal.accepted_at,
        payload=signal.payload,
    )
    return Message(
        signal_id=f"signal:{signal.id}",
        run_id=signal.run_id,
        type="ExternalSignal",
        occurred_at=now,
        step_id=signal.step_id,
        payload=codec.encode(dead),
    )


CLOCK_SET_BACK = 1_000_000
"""How far times of acceptance may run ahead of the clock, in microseconds, unless the clock was set back."""


def with_arrival_times(signals: Sequence[Signal]) -> Sequence[Signal]:
    """Return the signals of a run with the times that are compared to the deadlines of waits.

    This is normally the time of acceptance. After the clock was set back, times of acceptance run ahead of it, and
    would be too late for every wait. Then the clock counts, and a signal arrives no later than the next one accepted.
    """
    for signal in signals:
        if came_at_of(signal.accepted_at, signal.received_at) != signal.accepted_at:
            break
    else:
        return signals
    came: list[Signal] = []
    for signal in reversed(signals):
        came_at = came_at_of(signal.accepted_at, signal.received_at)
        came_at = min(came_at, came[-1].accepted_at) if came else came_at
        came.append(replace(signal, accepted_at=came_at))
    return came[::-1]


def came_at_of(accepted_at: Instant, received_at: Instant | None) -> Instant:
    """Return the time of a signal that is compared to the deadlines of waits, regardless of later signals."""
    is_ahead = received_at is not None and accepted_at > received_at + CLOCK_SET_BACK
    return accepted_at if received_at is None or not is_ahead else received_at


class AcceptedSignalResult(Struct, frozen=True, kw_only=True, gc=False):
    """The answer to every sender of the same signal, on every transport. `workflow_id` is the run's id."""

    workflow_id: str
    signal_name: str
    signal_id: str
    accepted_at: Instant
    signal_storage_key: str
    accepted: bool = True
    warning: str | None = None
    """A warning to the sender of an accepted signal: the workflow does not declare a signal of this name."""


class AcceptanceRecord(Struct, frozen=True, kw_only=True, gc=False):
    """The durable record of an acceptance. After `expires_at` a retry is a new request."""

    workflow_id: str
    signal_name: str
    signal_id: str
    signal_storage_key: str
    payload_sha256: str
    response: AcceptedSignalResult
    accepted_at: Instant
    expires_at: Instant
    version: int = 1


class ActivitySucceeded(Struct, frozen=True, gc=False):
    """An activity returned; or its verifier has found the result (`confirmed_by`)."""

    step_id: str
    logical_attempt_id: int
    result: Raw = NULL
    confirmed_by: str = ""
    artifacts: tuple[ArtifactRef, ...] = ()


class ActivityErrored(Struct, frozen=True, gc=False):
    """An activity raised. `fraction` is the engine's random number for the jitter of the next attempt."""

    step_id: str
    logical_attempt_id: int
    engine_attempt_id: int
    error: ErrorInfo
    retry: Retry
    fraction: float = 0.0


class ActivityDetached(Struct, frozen=True, gc=False):
    """An activity has ended without an outcome. The outcome is reported later, before `until`."""

    step_id: str
    logical_attempt_id: int
    engine_attempt_id: int
    until: Instant | None = None
    result_schema: dict[str, Any] | None = None


class ReportedOutcome(Struct, frozen=True, kw_only=True, gc=False):
    """The outcome of an activity, reported by its token. `id` is the store's id of the signal that carried it."""

    id: str
    step_id: str
    outcome: ActivityOutcome
    inbox_seq: int | None = None
    accepted_at: Instant = 0
    by: CallerRef | None = None


class NodeLost(Struct, frozen=True, gc=False):
    """The node that ran this step's activity is lost; the outcome is not known."""

    step_id: str


class ActivityReturned(Struct, frozen=True, gc=False):
    """The node did not begin this step's activity: it is stopping, or does not have the activity."""

    step_id: str
    logical_attempt_id: int
    engine_attempt_id: int
    is_lacking: bool = False


class DefinitionFound(Struct, frozen=True, gc=False):
    """The run has a turn on a node that has its definition."""


class MessageDeadLettered(Struct, frozen=True, gc=False):
    """A message of the run has become a dead letter, and the policy pauses the run."""


ControlName = Literal["PAUSE", "RESUME", "CANCEL", "APPROVE", "RETRY_STEP", "SKIP_STEP", "RETRY_RUN", "EMERGENCY_STOP"]
SentName = Literal["SIGNAL", "TASK", "UPDATE", "START", "QUERY"]
"""The other requests to a run: a signal, an operation on a task, an update, its start, a query."""


class Control(Struct, frozen=True, kw_only=True, gc=False):
    """An operator's command, after the authoriser has decided. `id` is the store's id of the signal."""

    id: str
    name: str
    signal_id: str
    actor: str
    reason: str = ""
    step_id: str | None = None
    is_allowed: bool = True
    inbox_seq: int | None = None
    refusal: str = ""
    result: Raw = NULL
    by: CallerRef | None = None
    raise_failure: bool = False
    may_override: bool = True


class ControlPayload(Struct, frozen=True):
    """The payload of a control signal. `refusal` is the reason of the authoriser, if it refused.

    A signal, a task operation or an update appears here only if it was refused; `subject` is its name. `raise_failure`
    lets RESUME raise the error of a failed step; `may_override` lets SKIP_STEP skip a task or a wait.
    """

    name: ControlName | SentName
    actor: str
    reason: str = ""
    step_id: str | None = None
    refusal: str | None = None
    result: Raw = NULL
    subject: str = ""
    raise_failure: bool = False
    may_override: bool = False


class UpdatePayload(Struct, frozen=True):
    """The payload of an update's signal."""

    name: str
    input: Raw


class Update(Struct, frozen=True, kw_only=True, gc=False):
    """An update: a request that will be answered. `id` is the store's id of the signal that carried it."""

    id: str
    update_id: str
    name: str
    input: Raw = NULL
    inbox_seq: int | None = None
    refusal: ErrorInfo | UnsetType | None = UNSET
    """Why the validation refuses the update; None if it passes, UNSET if there was no validation."""
    by: CallerRef | None = None


class Actor(Struct, frozen=True, omit_defaults=True):
    """The person who works on a task. The caller vouches for the name and the roles."""

    name: str
    """The name of the person in histories and the audit log."""
    roles: tuple[str, ...] = ()
    """The person's roles, which tasks may require."""
    is_admin: bool = False
    """Whether this person may assign every task."""


TaskAction = Literal["assign", "claim", "release", "reassign", "complete", "comment"]


class TaskRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An operation on a task: the payload of the signal that carries it."""

    task_id: str
    step_id: str
    action: TaskAction
    actor: Actor
    assignee: str | None = None
    roles: tuple[str, ...] | None = None
    answer: Raw = NULL
    text: str = ""


class TaskOperation(Struct, frozen=True, kw_only=True, gc=False):
    """A `TaskRequest` as it reaches the run. `problem` is why an answer does not fit; `id` is the store's."""

    id: str
    request: TaskRequest
    problem: str | None = None
    inbox_seq: int | None = None
    by: CallerRef | None = None


CONTROL_SIGNAL = "holdfast.control"
UPDATE_SIGNAL = "holdfast.update"
TASK_SIGNAL = "holdfast.task"
OUTCOME_SIGNAL = "holdfast.outcome"
"""The signal with an outcome that was reported by activity token. A turn that has not read it does not commit."""
INPUT_STEP = "holdfast.input"
"""Used instead of a step id: the outcome is a later input of a debounced run (`core/debounce.py`)."""
OUTCOME_BYTES = 4 * ERROR_CAUSES * ERROR_TEXT_CHARS
"""The most bytes of an outcome apart from its result: an error with its causes."""
ENGINE_SIGNALS = frozenset({CONTROL_SIGNAL, UPDATE_SIGNAL, TASK_SIGNAL, OUTCOME_SIGNAL})

_SIGNAL_PAYLOADS: dict[str, type] = {
    CONTROL_SIGNAL: ControlPayload,
    UPDATE_SIGNAL: UpdatePayload,
    OUTCOME_SIGNAL: ActivityOutcome,
    TASK_SIGNAL: TaskRequest,
}
PAYLOADS: dict[str, type] = {
    "TaskCompleted": Answer,
    "SubWorkflowCompleted": ChildOutcome,
    "ActivityCompleted": ActivityOutcome,
    "ExternalSignal": DeadSignal,
}
"""The types of the payloads that the engine itself reads, by message type."""


def payload_type(item: "Message | Signal | SignalRequest") -> type | None:
    """Return the type of a payload that the engine itself reads, or None if it is a value of the user."""
    return PAYLOADS.get(item.type) if isinstance(item, Message) else _SIGNAL_PAYLOADS.get(item.name)


def activity_completed(
    run_id: str, step_id: str, token: str, outcome: ActivityOutcome, now: Instant, opened_at: Instant = 0
) -> Message:
    """Return the message with the outcome of an activity that was executed by a node other than the run's owner.

    An attempt has one outcome, so its token is the id of the message; the note that it is detached has another id.
    """
    return Message(
        signal_id=f"{'detached' if outcome.is_detached else 'activity'}:{token}",
        run_id=run_id,
        type="ActivityCompleted",
        occurred_at=now,
        expected_version=1,
        waiting_token=token,
        step_id=step_id,
        payload=codec.encode(outcome),
        is_latest_only=outcome.error is not None or outcome.is_detached,
        opened_at=opened_at,
    )


def is_deadline(message: Message) -> bool:
    """Return whether this is the message that ends a step at its deadline."""
    return message.type == "TimerDue" and (message.waiting_token or "").startswith(f"{message.step_id}{DEADLINE_MARK}")


def check_signal(request: SignalRequest, limits: Limits) -> CallerError | None:
    """Return why the request cannot be accepted in any state of the run, or None."""
    problem = check_name("run_id", request.run_id) or check_name("signal_name", request.name)
    if problem is None and request.step_id is not None:
        problem = check_name("step_id", request.step_id)
    if problem is None and request.signal_id is not None:
        problem = check_signal_id(request.signal_id)
    if problem is None and request.actor != "":
        problem = check_name("actor", request.actor)
    is_flag: Any = request.require_waiting
    if problem is None and not isinstance(is_flag, bool):
        problem = InvalidInput(f"require_waiting is True or False, not {is_flag!r}", field="require_waiting")
    if problem is not None:
        return problem
    if request.expected_version is not None:
        problem = codec.check_integer("expected_version", request.expected_version)
    if problem is None and request.accept_before is not None:
        problem = codec.check_integer("accept_before", request.accept_before)
    problem = problem or codec.check(request.payload, "payload")
    if problem is not None:
        return problem
    if request.original is None and codec.holds_sealed(request.payload):
        return InvalidInput(f"payload: the key {codec.SEAL!r} of an object is reserved", field="payload")
    size, most = len(request.payload), limits.signal_payload_bytes
    if request.original is not None:
        size = request.original.size_bytes
    if request.name == OUTCOME_SIGNAL:  # its result has the limit of any value
        most = limits.value_bytes + OUTCOME_BYTES
    if size > most:
        return PayloadTooLarge(
            f"the payload of signal {request.name!r} has {size} bytes; the limit is {most}",
            size_bytes=size,
            limit_bytes=most,
        )
    kind = _SIGNAL_PAYLOADS.get(request.name)
    return None if kind is None else codec.check_as(request.payload, kind)


# --- what signals of the engine's own carry


def controls_of(signals: Iterable[Signal]) -> Iterable[Control]:
    """Return the operators' commands among signals."""
    for signal in signals:
        if signal.name == CONTROL_SIGNAL:
            command = _payload_of(signal, ControlPayload, _UNREADABLE_COMMAND)
            yield Control(
                id=signal.id,
                name=f"{command.name} {command.subject}".rstrip(),
                signal_id=signal.signal_id,
                actor=command.actor,
                reason=command.reason,
                step_id=command.step_id,
                is_allowed=command.refusal is None,
                inbox_seq=signal.inbox_seq,
                refusal=command.refusal or "",
                result=command.result,
                by=signal.by,
                raise_failure=command.raise_failure,
                may_override=command.may_override,
            )


def outcomes_of(signals: Iterable[Signal]) -> Iterable[ReportedOutcome]:
    """Return the outcomes that were reported by activity token, among signals."""
    for signal in signals:
        if signal.name == OUTCOME_SIGNAL:
            outcome = _payload_of(signal, ActivityOutcome, _UNREADABLE_OUTCOME)
            yield ReportedOutcome(
                id=signal.id,
                step_id=signal.step_id or "",
                outcome=outcome,
                inbox_seq=signal.inbox_seq,
                accepted_at=signal.accepted_at,
                by=signal.by if signal.step_id == INPUT_STEP else None,
            )


def updates_of(signals: Iterable[Signal]) -> Iterable[Update]:
    """Return the updates among signals."""
    for signal in signals:
        if signal.name == UPDATE_SIGNAL:
            update = _payload_of(signal, UpdatePayload, _UNREADABLE_UPDATE)
            yield Update(
                id=signal.id,
                update_id=signal.signal_id,
                name=update.name,
                input=update.input,
                inbox_seq=signal.inbox_seq,
                by=signal.by,
            )


_UNREADABLE_COMMAND = ControlPayload("", "", refusal="the command cannot be read")  # type: ignore[arg-type]
_UNREADABLE_UPDATE = UpdatePayload("", NULL)
_UNREADABLE_OUTCOME = ActivityOutcome(logical_attempt_id=0, engine_attempt_id=0)


def _payload_of(signal: Signal, kind: type[T], otherwise: T) -> T:
    """Return the payload of one of the engine's own signals. A damaged one is refused or answered like any other."""
    try:
        return codec.decode(signal.payload, kind)
    except InvalidInput:
        return otherwise


def cancel_request(run_id: str, actor: str, reason: str, signal_id: str | None = None) -> SignalRequest:
    """Return the signal that asks a run to cancel itself."""
    return control_request(
        run_id, "CANCEL", actor, reason, signal_id=signal_id or fitting_id(f"cancel by {actor}", SIGNAL_ID_BYTES)
    )


def control_request(
    run_id: str,
    name: ControlName | SentName,
    actor: str,
    reason: str = "",
    *,
    step_id: str | None = None,
    signal_id: str | None = None,
    refusal: str = "",
    result: Raw = NULL,
    subject: str = "",
    raise_failure: bool = False,
    may_override: bool = False,
) -> SignalRequest:
    """Return the signal that carries an operator's command, or the authoriser's refusal of any request."""
    payload: dict[str, object] = {"name": name, "actor": actor, "reason": reason, "step_id": step_id}
    if refusal:
        payload["refusal"] = refusal
    if subject:
        payload["subject"] = subject
    if result != NULL:
        payload["result"] = result
    payload |= {"raise_failure": True} if raise_failure else {}
    payload |= {"may_override": True} if may_override else {}
    return SignalRequest(run_id=run_id, name=CONTROL_SIGNAL, payload=codec.encode(payload), signal_id=signal_id)


def cancelled_text(run_id: str, reason: str) -> str:
    """Return the error text of a cancelled run."""
    return f"run {run_id} was cancelled{reason and ': '}{reason}"
