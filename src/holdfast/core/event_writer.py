"""Writing events: the envelope, the idempotency key, and the accompanying messages.

Every decision of the core is written through an `EventWriter`; nothing else creates events.
"""

from collections.abc import Sequence

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import messages as m
from holdfast.core.codec import SCHEMA_VERSIONS
from holdfast.core.events import (
    ADAPTER_VERSION,
    BODIES,
    Body,
    CallerRef,
    EngineRunRef,
    ErrorInfo,
    Event,
    RunPaused,
    StepCancelled,
    StepFailed,
    StepRetried,
)
from holdfast.core.instants import Instant
from holdfast.core.keys import event_key_and_id
from holdfast.core.state import RUNNING, OpenStep, RunState
from holdfast.core.timing import deadline_token, pauses, step_options
from holdfast.errors import CallerError, Conflict


class Decision(Struct, frozen=True, gc=False):
    """What follows: events, messages to the run itself, steps to dispatch after the commit, signals to other runs."""

    events: tuple[Event, ...] = ()
    messages: tuple[m.Message, ...] = ()
    dispatch: tuple[str, ...] = ()
    sends: tuple[m.SignalRequest, ...] = ()


class Refusal(Struct, frozen=True):
    """Nothing follows; the error says why."""

    error: CallerError


NOTHING = Decision()

_TYPES = {body: (name, body.KEYED_BY == "step") for name, body in BODIES.items()}
"""The event type for each body type, and whether its key contains a step."""


class EventWriter(Struct, gc=False, eq=False):
    """Writes the events of one decision, with their keys, and collects its messages, dispatches and signals.

    `opened` holds the first event of each step that this decision has opened, or None once it has cancelled the step.
    `caller` is the caller of the service who caused the decision; all of its events name the caller.
    """

    state: RunState
    now: Instant
    by: EngineRunRef
    caller: CallerRef | None = None
    events: list[Event] = []
    messages: list[m.Message] = []
    dispatch: list[str] = []
    opened: dict[str, Event | None] = {}
    sends: list[m.SignalRequest] = []
    has_ended: bool = False

    @property
    def node(self) -> str:
        """The node that decides."""
        return self.by.node

    def write(
        self,
        body: Body,
        step_id: str | None = None,
        logical_attempt_id: int | None = None,
        engine_attempt_id: int | None = None,
        cause: str | None = None,
        parent: str | None = None,
    ) -> Event:
        event_type, is_keyed_by_step = _TYPES[type(body)]
        state = self.state
        if self.caller is not None:
            body = replace(body, by=self.caller)
        if is_keyed_by_step:
            position, attempt = step_id or "", logical_attempt_id or 1
        else:
            position, attempt = cause or self._occurrence(event_type), 0
        run_id = state.run_id
        key, event_id = event_key_and_id(run_id, position, attempt, event_type, state.plan_version)
        event = Event(
            run_id,
            0,
            event_id,
            event_type,
            step_id,
            engine_attempt_id,
            logical_attempt_id,
            body,
            key,
            self.now,
            0,
            ADAPTER_VERSION,
            self.by,
            cause,
            parent,
            SCHEMA_VERSIONS.get(event_type, 1),
        )
        self.events.append(event)
        return event

    def open(self, body: Body, step_id: str, engine_attempt_id: int | None = None, logical_attempt_id: int = 1) -> None:
        """Write the event that opens a new step."""
        if step_id in self.opened or step_id in self.state.open_steps:
            raise Conflict(f"run {self.state.run_id}: step {step_id!r} exists already", step_id=step_id)
        self.opened[step_id] = self.write(body, step_id, logical_attempt_id, engine_attempt_id)

    def close(self, step: OpenStep, body: Body, cause: str | None = None) -> None:
        """Write the event that closes a step."""
        self.write(body, step.step_id, step.logical_attempt_id, step.engine_attempt_id, cause, step.opened_event_id)
        if step.effect is not None and step.effect.task:
            self.close_reconciliation(step.effect.task)

    def close_reconciliation(self, task_step_id: str) -> None:
        """Close the task that asks an operator about a step: the step is closed or retried."""
        task = self.state.open_steps.get(task_step_id)
        if task is not None and task_step_id not in self.opened:
            self.opened[task_step_id] = None
            self.close(task, StepCancelled("the step is no longer unresolved"))

    def retry(self, step: OpenStep, body: StepRetried, cause: str | None = None) -> None:
        """Record that an activity is dispatched again, as the next attempt."""
        next_attempt = step.engine_attempt_id + 1
        self.write(body, step.step_id, step.logical_attempt_id, next_attempt, cause, step.opened_event_id)

    def fail(self, step: OpenStep, error: ErrorInfo, cause: str | None = None) -> None:
        """Record that an activity has failed permanently, and pause the run if its options say so."""
        if self.state.status is RUNNING and pauses(step, error):
            # First, so that the program gets the failure among the outcomes when the run is resumed.
            self.write(RunPaused(f"step {step.step_id!r} failed", failed_step_id=step.step_id), cause=cause)
        self.close(step, StepFailed(error), cause)

    def token(self, step_id: str) -> str:
        """Return a waiting token that is unique among the waits of this run."""
        return f"{step_id}@{self.state.version + len(self.events) + 1}"

    def schedule(self, kind: m.MessageType, step_id: str, token: str, due_at: Instant) -> None:
        """Schedule a message to the run."""
        self.messages.append(
            m.Message(
                signal_id=f"{kind}:{token}",
                run_id=self.state.run_id,
                type=kind,
                occurred_at=self.now,
                due_at=due_at,
                expected_version=self.state.version,
                waiting_token=token,
                step_id=step_id,
            )
        )

    def schedule_deadline(self, step_id: str, logical_attempt_id: int, options: Raw) -> None:
        """Schedule the message that ends a newly opened step at its deadline, if it has one."""
        if b'"schedule_to_close_ms"' not in bytes(options):  # avoids decoding: most have none
            return
        limit_ms = step_options(options).schedule_to_close_ms
        if limit_ms is not None:
            token = deadline_token(step_id, logical_attempt_id)
            self.schedule("TimerDue", step_id, token, self.now + limit_ms * 1_000)

    def decision(self, messages: tuple[m.Message, ...] = ()) -> Decision:
        """Return the decision, with these messages before the scheduled ones."""
        if self.messages or messages or self.sends:
            return Decision((*self.events,), (*messages, *self.messages), (*self.dispatch,), (*self.sends,))
        return Decision(tuple(self.events), (), tuple(self.dispatch))

    def _occurrence(self, event_type: str) -> str:
        written = [event.event_type for event in self.events].count(event_type) if self.events else 0
        return str(self.state.occurrences.get(event_type, 0) + written + 1)


def start_message(run_id: str, now: Instant, due_at: Instant | None = None) -> m.Message:
    """Return the message that starts a run, now or when it is due."""
    return m.Message(
        signal_id="start", run_id=run_id, type="InternalContinue", occurred_at=now, due_at=due_at, expected_version=1
    )


def admitted_message(run_id: str, now: Instant) -> m.Message:
    """Return the message that starts a run once it is admitted. Until then the store holds the message back."""
    return m.Message(signal_id=m.ADMITTED, run_id=run_id, type="InternalContinue", occurred_at=now, expected_version=1)


def starts_run(message: m.Message) -> bool:
    """Return whether a message starts a run that has not started. A message about its mailbox does not."""
    return message.type == "InternalContinue" and message.signal_id != m.MAILBOX


def is_about_to_start(messages: Sequence[m.Message]) -> bool:
    """Return whether one of the messages starts a run that was not queued for admission since its release."""
    ids = [message.signal_id for message in messages if starts_run(message)]
    return bool(ids) and m.ADMITTED not in ids
