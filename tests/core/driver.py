"""A run without engine and store: the core is asked, and what it answers is kept as a store would keep it.

`Driver` numbers events, keeps the inbox, the mailbox and the rows of waits and tasks, and can be looked at as a
`RunView`. Time is a number that tests move.
"""

from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec, commands, events, messages
from holdfast.core.decide import Input, apply_commands, decide, queue_run
from holdfast.core.event_writer import Decision, Refusal
from holdfast.core.events import ADAPTER_VERSION, Body, EngineRunRef, ErrorInfo, Event
from holdfast.core.index_rows import (
    ActivityRecord,
    Task,
    Wait,
    index_changes,
    record_changes,
    runtime_snapshot,
)
from holdfast.core.invariants import RunView
from holdfast.core.keys import event_id, event_key, inbox_uuid, signal_storage_key, signal_suffix
from holdfast.core.messages import AcceptedSignalResult, Control, ControlName, Message, Signal
from holdfast.core.state import RunState, RunStatus, fold, retry_token
from holdfast.core.timing import NO_RETRY, Retry

START = 1_767_225_600_000_000  # 2026-01-01T00:00:00Z
SECOND = 1_000_000
BY = EngineRunRef("node-a", 1)

BROKEN = ErrorInfo("Broken", "it broke", retryable=True)
FATAL = ErrorInfo("Fatal", "it cannot be repaired")


class Driver:
    """One run, driven by hand."""

    def __init__(
        self, run_id: str = "run-1", queued: events.RunQueued | None = None, parent_run_id: str | None = None
    ) -> None:
        self.now = START
        self.state = RunState(run_id=run_id)
        self.events: list[Event] = []
        self.inbox: dict[str, Message] = {}
        self.mailbox: list[Signal] = []
        self.acknowledged: list[AcceptedSignalResult] = []
        self.waits: dict[str, Wait] = {}
        self.tasks: dict[str, Task] = {}
        self.records: dict[str, ActivityRecord] = {}
        self.dispatched: list[str] = []
        self.is_owned = True
        first = queued or events.RunQueued("order", "1", input=Raw(b"{}"), parent_run_id=parent_run_id)
        self._keep(queue_run(run_id, first, self.now, BY))

    @property
    def run_id(self) -> str:
        return self.state.run_id

    @property
    def types(self) -> list[str]:
        return [event.event_type for event in self.events]

    # --- what happens

    def start(self) -> "Driver":
        """Handle the first message."""
        self.tell(self.inbox["start"])
        assert self.state.status is RunStatus.RUNNING
        return self

    def tell(self, message: Input) -> Decision:
        """Tell the run something; it must not be refused."""
        answer = self.try_tell(message)
        assert isinstance(answer, Decision), answer
        return answer

    def try_tell(self, message: Input) -> Decision | Refusal:
        """Tell the run something."""
        answer = decide(self.state, message, self.now, BY)
        if isinstance(message, Message):
            self.inbox.pop(message.signal_id, None)
        elif isinstance(message, Signal) and isinstance(answer, Decision) and answer.events:
            place = self.mailbox.index(message)
            self.mailbox[place] = replace(message, consumed_seq=self.state.version + 1)
        return self._keep(answer)

    def ask(self, *todo: commands.Command) -> Decision:
        """Ask for something as the run's program; it must not be refused."""
        answer = self.try_ask(*todo)
        assert isinstance(answer, Decision), answer
        return answer

    def try_ask(self, *todo: commands.Command) -> Decision | Refusal:
        """Ask for something as the run's program."""
        return self._keep(apply_commands(self.state, todo, self.now, BY))

    def append(self, body: Body, step_id: str | None = None, attempt: int = 1) -> Event:
        """Append an event that nothing in the core decides yet."""
        return self.keep(made(self.state, body, step_id, attempt, self.now))

    def keep(self, event: Event) -> Event:
        """Append an event as it is; return it with its number."""
        self._keep(Decision((event,)))
        return self.events[-1]

    def sent(self, name: str, payload: object = None, *, step_id: str | None = None, signal_id: str = "") -> Signal:
        """Put a signal into the mailbox, as the store does when it accepts one."""
        number = len(self.mailbox) + 1
        uuid = inbox_uuid(self.run_id, number)
        accepted_at = self.now + number
        signal = Signal(
            id=uuid,
            run_id=self.run_id,
            name=name,
            signal_id=signal_id or uuid,
            inbox_seq=number,
            suffix=signal_suffix(accepted_at, uuid),
            accepted_at=accepted_at,
            payload=codec.encode(payload),
            step_id=step_id,
        )
        self.mailbox.append(signal)
        self.acknowledged.append(
            AcceptedSignalResult(
                workflow_id=self.run_id,
                signal_name=name,
                signal_id=signal.signal_id,
                accepted_at=accepted_at,
                signal_storage_key=signal_storage_key(self.run_id, name, signal.suffix),
            )
        )
        return signal

    def control(
        self,
        name: ControlName,
        step_id: str | None = None,
        *,
        reason: str = "because",
        is_allowed: bool = True,
        raise_failure: bool = False,
    ) -> Decision | Refusal:
        """Send an operator's command."""
        number = len(self.mailbox) + len(self.events) + 1_000
        identity = inbox_uuid(self.run_id, number)
        return self.try_tell(
            Control(
                id=identity,
                name=name,
                signal_id=f"click-{number}",
                actor="ann",
                reason=reason,
                step_id=step_id,
                is_allowed=is_allowed,
                raise_failure=raise_failure,
            )
        )

    # --- what can be seen

    def message(self, step_id: str) -> Message:
        """Return the message that waits for a step with its present token."""
        token = self.state.open_steps[step_id].token
        [found] = [message for message in self.inbox.values() if message.waiting_token == token]
        return found

    def view(self, **changes: Any) -> RunView:
        """Return the run as a store would show it."""
        due = [START if message.due_at is None else message.due_at for message in self.inbox.values()]
        view = RunView(
            run_id=self.run_id,
            status=self.state.status,
            version=self.state.version,
            now=self.now,
            snapshot=runtime_snapshot(self.state),
            events=tuple(self.events),
            messages=tuple(message for message in self.inbox.values() if (message.due_at or 0) <= self.now),
            signals=tuple(self.mailbox),
            acknowledged=tuple(self.acknowledged),
            waits=tuple(self.waits.values()),
            tasks=tuple(self.tasks.values()),
            records=tuple(record for record in self.records.values() if record.status != "completed"),
            parent_run_id=self.state.parent_run_id,
            lease_owner="node-a" if self.is_owned and not self.state.is_finished else None,
            ready_at=min(due, default=None),
        )
        return replace(view, **changes)

    def _keep(self, answer: Decision | Refusal) -> Decision | Refusal:
        if isinstance(answer, Refusal):
            return answer
        before, version = self.state, self.state.version
        self.state = fold(before, answer.events)
        self.events += [
            replace(event, run_seq=number, persisted_at=self.now)
            for number, event in enumerate(answer.events, version + 1)
        ]
        changes = index_changes(before, self.state, answer.events)
        for step_id in changes.waits_closed:
            del self.waits[step_id]
        self.waits.update({wait.step_id: wait for wait in changes.waits_opened})
        self.tasks.update({task.task_id: task for task in changes.tasks})
        self.records.update({record.step_id: record for record in record_changes(before, answer.events)})
        self.inbox.update({message.signal_id: message for message in answer.messages})
        if self.state.is_finished:
            self.inbox.clear()
        self.dispatched += answer.dispatch
        return answer


def made(state: RunState, body: Body, step_id: str | None = None, attempt: int = 1, now: int = START) -> Event:
    """Return an event that follows a state, made by hand and not by the code under test."""
    event_type = type(body).__name__
    if body.KEYED_BY == "step":
        key = event_key(state.run_id, step_id or "", attempt, event_type, state.plan_version)
    else:
        count = state.occurrences.get(event_type, 0) + 1
        key = event_key(state.run_id, str(count), 0, event_type, state.plan_version)
    return Event(
        run_id=state.run_id,
        run_seq=0,
        event_id=event_id(key),
        event_type=event_type,
        step_id=step_id,
        engine_attempt_id=None,
        logical_attempt_id=None if step_id is None else attempt,
        data=body,
        idempotency_key=key,
        emitted_at=now,
        persisted_at=0,
        adapter_version=ADAPTER_VERSION,
        engine_run_ref=BY,
        caused_by_signal_id=None,
        parent_event_id=None,
        schema_version=1,
    )


# --- short words for what tests ask for


def activity(step_id: str = "charge", *, on_failure: str = "raise") -> commands.RunActivity:
    """Return the command to run an activity; `on_failure` says what follows when it has failed for good."""
    options = events.NULL if on_failure == "raise" else codec.encode({"on_failure": on_failure})
    return commands.RunActivity(step_id=step_id, name="charge", options=options)


def timer(step_id: str = "sleep", due_at: int = START + SECOND) -> commands.StartTimer:
    """Return the command to sleep."""
    return commands.StartTimer(step_id=step_id, due_at=due_at)


def wait(step_id: str = "wait", name: str = "go", until: int | None = None) -> commands.WaitSignal:
    """Return the command to wait for a signal."""
    return commands.WaitSignal(step_id=step_id, name=name, until=until)


def task(step_id: str = "approve") -> commands.AskHuman:
    """Return the command to ask a human."""
    return commands.AskHuman(step_id=step_id, name="approve")


def child(step_id: str = "child", run_id: str = "run-2") -> commands.StartChild:
    """Return the command to start another run."""
    return commands.StartChild(step_id=step_id, child_run_id=run_id, plan_id="ship", plan_version="1")


def done(step_id: str = "charge", attempt: int = 1, result: object = "ok") -> messages.ActivitySucceeded:
    """Return the news that an activity has returned."""
    return messages.ActivitySucceeded(step_id, attempt, codec.encode(result))


def failed(
    step_id: str = "charge", attempt: int = 1, engine_attempt: int = 1, retry: Retry = NO_RETRY
) -> messages.ActivityErrored:
    """Return the news that an activity has raised."""
    return messages.ActivityErrored(step_id, attempt, engine_attempt, BROKEN, retry)


def answered(run: Driver, step_id: str, kind: str, payload: object) -> Message:
    """Return the message with which a task or a child comes back."""
    token = run.state.open_steps[step_id].token
    message = Message(
        signal_id=f"{kind}:{token}",
        run_id=run.run_id,
        type=kind,  # type: ignore[arg-type]
        occurred_at=run.now,
        waiting_token=token,
        step_id=step_id,
        payload=codec.encode(payload),
    )
    run.inbox[message.signal_id] = message
    return message


def outcome(run: Driver, step_id: str = "charge", attempt: int = 1, logical: int = 1, **fields: Any) -> Message:
    """Return the message with which an activity comes back from elsewhere."""
    given = {"logical_attempt_id": logical, "engine_attempt_id": attempt, **fields}
    sent = codec.decode(codec.encode(given), messages.ActivityOutcome)
    message = messages.activity_completed(run.run_id, step_id, retry_token(step_id, attempt), sent, run.now)
    run.inbox[message.signal_id] = message
    return message
