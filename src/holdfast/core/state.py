"""What has become of a run, as far as its events tell.

Rules of this file:

1. Everything that changes a run's state is here. If you change state elsewhere, you have a bug.
2. Nothing here knows about storage, asyncio or the present time. A state is a fold over events and nothing else, so
   the same events give the same state on every node.
3. A state is never edited: `evolve` and `fold` return a new one. `fold` copies the state's mappings once and works
   on its own copies, so that folding n events costs n, not n squared.
4. A state holds what is *open*, not what has been: its size depends on what the run is waiting for, not on its age.
   What has been is in the events.

The life of a run is the table TRANSITIONS. An event that changes the status must be in the row of the present one;
other events need a run that has not finished (and, for events of steps, one that has started). Anything else means
that the history is damaged, and raises `CorruptHistory`; it is never skipped. Events of unknown types are counted
and otherwise left alone.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core.events import ErrorInfo, Event
from holdfast.core.instants import Instant
from holdfast.errors import CorruptHistory, HistoryGap


class RunStatus(StrEnum):
    """Where a run stands. The last three are terminal."""

    PENDING = "PENDING"
    APPROVED = "APPROVED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


PENDING, APPROVED, RUNNING, PAUSED, COMPLETED, FAILED, CANCELLED = RunStatus
TERMINAL = frozenset({COMPLETED, FAILED, CANCELLED})

TRANSITIONS: dict[RunStatus, dict[type[e.Body], RunStatus]] = {
    PENDING: {
        e.RunApproved: APPROVED,
        e.RunStarted: RUNNING,
        e.RunFailed: FAILED,
        e.RunCancelled: CANCELLED,
    },
    APPROVED: {e.RunStarted: RUNNING, e.RunFailed: FAILED, e.RunCancelled: CANCELLED},
    RUNNING: {
        e.RunPaused: PAUSED,
        e.RunCompleted: COMPLETED,
        e.RunFailed: FAILED,
        e.RunCancelled: CANCELLED,
    },
    PAUSED: {e.RunResumed: RUNNING, e.RunFailed: FAILED, e.RunCancelled: CANCELLED},
    COMPLETED: {},
    FAILED: {},
    CANCELLED: {},
}
"""From a status, by the type of an event, to the next status. `docs/states.md` is drawn from this table."""


class OpenStep(Struct, frozen=True):
    """A step that has been opened and not yet closed: what the run waits for."""

    step_id: str
    kind: str
    body: e.Body
    opened_event_id: str
    opened_at: Instant
    logical_attempt_id: int = 1
    engine_attempt_id: int = 1
    token: str | None = None
    due_at: Instant | None = None

    @property
    def name(self) -> str:
        """The name of what is done or waited for: of the activity, signal, task, marker or plan."""
        return getattr(self.body, "name", "") or getattr(self.body, "plan_id", "")


class FailedStep(Struct, frozen=True):
    """A step that failed for good. It can be tried again by an operator."""

    started: OpenStep
    error: ErrorInfo


class RunState(Struct, frozen=True, kw_only=True):
    """A run as its events tell. `version` is the run_seq of the last event."""

    run_id: str
    version: int = 0
    status: RunStatus = PENDING
    plan_id: str = ""
    plan_version: str = ""
    parent_run_id: str | None = None
    replay_from: int = 1
    open_steps: dict[str, OpenStep] = {}
    failed_steps: dict[str, FailedStep] = {}
    cursors: dict[str, str] = {}
    occurrences: dict[str, int] = {}
    is_cancelling: bool = False
    steps_since_rotation: int = 0
    last_signal_id: str | None = None
    last_error: ErrorInfo | None = None
    last_executed_by: str = ""
    last_executed_on: Instant = 0
    unknown_events: int = 0

    @property
    def is_finished(self) -> bool:
        """Say whether the run has come to its end."""
        return self.status in TERMINAL


def evolve(state: RunState, event: Event) -> RunState:
    """Return the state after one more event."""
    return fold(state, (event,))


def fold(state: RunState, events: Iterable[Event]) -> RunState:
    """Return the state after these events, in order."""
    state = replace(
        state,
        open_steps=dict(state.open_steps),
        failed_steps=dict(state.failed_steps),
        cursors=dict(state.cursors),
        occurrences=dict(state.occurrences),
    )
    for event in events:
        state = _apply(state, event)
    return state


def state_of(run_id: str, events: Iterable[Event]) -> RunState:
    """Return the state of a run from its whole history."""
    return fold(RunState(run_id=run_id), events)


# --- applying one event; the mappings of `state` are private to `fold` and may be edited here ----------------------


def _apply(state: RunState, event: Event) -> RunState:
    version = state.version + 1
    if event.run_seq not in (0, version):
        raise HistoryGap(
            f"run {state.run_id}: event {event.run_seq} follows event {state.version}",
            run_id=state.run_id,
            expected=version,
            found=event.run_seq,
        )
    body = event.data
    kind = type(body)
    changes: dict[str, Any] = {
        "version": version,
        "last_executed_by": event.engine_run_ref.node,
        "last_executed_on": event.emitted_at,
    }
    if event.caused_by_signal_id is not None:
        changes["last_signal_id"] = event.caused_by_signal_id
    if kind is e.UnknownBody:
        return replace(state, unknown_events=state.unknown_events + 1, **changes)
    if body.KEYED_BY == "run":
        state.occurrences[event.event_type] = state.occurrences.get(event.event_type, 0) + 1
    if kind in _STATUS_EVENTS:
        _change_status(state, event, changes)
    else:
        _check_allowed(state, event)
    handler = _HANDLERS.get(kind)
    if handler is not None:
        handler(state, event, changes)
    return replace(state, **changes)


def _change_status(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    status = TRANSITIONS[state.status].get(type(event.data))
    if status is None or state.version == 0:
        raise _misfit(state, event)
    changes["status"] = status
    if status in TERMINAL:
        state.open_steps.clear()


def _check_allowed(state: RunState, event: Event) -> None:
    has_begun = state.status is RUNNING or state.status is PAUSED
    if has_begun:
        return
    is_first = type(event.data) is e.RunQueued and state.version == 0
    is_early = type(event.data) in _BEFORE_START and state.status not in TERMINAL and state.version > 0
    if not is_first and not is_early:
        raise _misfit(state, event)


def _misfit(state: RunState, event: Event) -> CorruptHistory:
    where = "a run that does not exist" if state.version == 0 else f"a run that is {state.status}"
    return CorruptHistory(
        f"run {state.run_id}: {event.event_type} cannot happen to {where} (after event {state.version})",
        run_id=state.run_id,
        run_seq=state.version + 1,
    )


def _queued(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    body = event.data
    assert isinstance(body, e.RunQueued)
    if state.version != 0:
        raise _misfit(state, event)
    changes["plan_id"] = body.plan_id
    changes["plan_version"] = body.plan_version
    changes["parent_run_id"] = body.parent_run_id


def _cancel_requested(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    changes["is_cancelling"] = True


def _record_error(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    changes["last_error"] = getattr(event.data, "error", None) or state.last_error


def _rotated(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    state.open_steps.clear()
    state.failed_steps.clear()
    changes["replay_from"] = state.version + 1
    changes["steps_since_rotation"] = 0


def _opener(kind: str, due: str = "due_at") -> Callable[[RunState, Event, dict[str, Any]], None]:
    """Make the handler of an event that opens a step; `due` names the field of the body that says until when."""

    def opened(state: RunState, event: Event, changes: dict[str, Any]) -> None:
        step_id, body = event.step_id, event.data
        if step_id is None or step_id in state.open_steps:
            raise _misfit(state, event)
        state.failed_steps.pop(step_id, None)
        state.open_steps[step_id] = OpenStep(
            step_id,
            kind,
            body,
            event.event_id,
            event.emitted_at,
            event.logical_attempt_id or 1,
            event.engine_attempt_id or 1,
            getattr(body, "token", None),
            getattr(body, due, None),
        )
        changes["steps_since_rotation"] = state.steps_since_rotation + 1

    return opened


def _closed(state: RunState, event: Event, changes: dict[str, Any]) -> OpenStep:
    step = state.open_steps.pop(event.step_id or "", None)
    if step is None:
        raise _misfit(state, event)
    return step


def _step_failed(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    assert isinstance(event.data, e.StepFailed)
    step = _closed(state, event, changes)
    state.failed_steps[step.step_id] = FailedStep(step, event.data.error)
    changes["last_error"] = event.data.error


def _step_skipped(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    if state.failed_steps.pop(event.step_id or "", None) is None:
        _closed(state, event, changes)


def _step_retried(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    assert isinstance(event.data, e.StepRetried)
    step = state.open_steps.get(event.step_id or "")
    if step is None:
        raise _misfit(state, event)
    state.open_steps[step.step_id] = replace(
        step,
        engine_attempt_id=event.engine_attempt_id or step.engine_attempt_id + 1,
        token=retry_token(step.step_id, event.engine_attempt_id or step.engine_attempt_id + 1),
        due_at=event.data.due_at,
    )
    _record_error(state, event, changes)


def _signal_received(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    assert isinstance(event.data, e.SignalReceived)
    _closed(state, event, changes)
    state.cursors[lane(event.data.name, event.data.addressed_to)] = event.data.suffix


def _closed_with_error(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    _closed(state, event, changes)
    _record_error(state, event, changes)


def _task_assigned(state: RunState, event: Event, changes: dict[str, Any]) -> None:
    assert isinstance(event.data, e.TaskAssigned)
    step = state.open_steps.get(event.step_id or "")
    if step is None or not isinstance(step.body, e.TaskCreated):
        raise _misfit(state, event)
    state.open_steps[step.step_id] = replace(step, body=replace(step.body, assignee=event.data.assignee))


def lane(name: str, step_id: str | None) -> str:
    """Return which cursor a signal moves: its name's, or that of one wait if it was addressed to it.

    Names hold no control characters, so the separator cannot be part of one.
    """
    return name if step_id is None else f"{name}\x1f{step_id}"


def retry_token(step_id: str, engine_attempt_id: int) -> str:
    """Return the token that guards the message for an activity's next attempt."""
    return f"{step_id}~{engine_attempt_id}"


_STATUS_EVENTS = frozenset(body for row in TRANSITIONS.values() for body in row)
_BEFORE_START = frozenset({e.RunCancelRequested, e.SignalAccepted, e.SignalRejected})
_HANDLERS: dict[type[e.Body], Callable[[RunState, Event, dict[str, Any]], Any]] = {
    e.RunQueued: _queued,
    e.RunPaused: _record_error,
    e.RunFailed: _record_error,
    e.RunCancelRequested: _cancel_requested,
    e.ContinuedAsNew: _rotated,
    e.StepStarted: _opener("activity"),
    e.StepRetried: _step_retried,
    e.StepCompleted: _closed,
    e.StepFailed: _step_failed,
    e.StepSkipped: _step_skipped,
    e.StepCancelled: _closed,
    e.TimerStarted: _opener("timer"),
    e.TimerFired: _closed,
    e.SignalWaiting: _opener("signal", due="until"),
    e.SignalReceived: _signal_received,
    e.SignalTimedOut: _closed,
    e.TaskCreated: _opener("task"),
    e.TaskAssigned: _task_assigned,
    e.TaskCompleted: _closed,
    e.ChildStarted: _opener("child"),
    e.ChildCompleted: _closed,
    e.ChildFailed: _closed_with_error,
    e.UpdateAccepted: _opener("update"),
    e.UpdateCompleted: _closed_with_error,
}
