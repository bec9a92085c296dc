"""What a commit stores beside the history, so that a run, its waits and its tasks are found without reading it.

The `RuntimeSnapshot` is the row of the run itself: it is a cache, and folding the events gives it back.

Waits and tasks are derived from events (`index_changes`). Activity records are written by the engine: they hold what
is known about an effect outside, and survive the crash that lost its result.
"""

from collections.abc import Iterable
from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core import events as e
from holdfast.core.events import NULL, ErrorInfo, Event
from holdfast.core.instants import Instant
from holdfast.core.operator_commands import failures_to_settle
from holdfast.core.state import NO_PROGRESS, OpenStep, RunState, RunStatus, TaskProgress, apply_to_task

SNAPSHOT_SCHEMA_VERSION = 1


class RuntimeSnapshot(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What each commit stores beside the events: the status of the run and what it waits for.

    The four waiting fields describe one step: the one that has been open for longest. `signals` holds the cursor of
    each signal name, the suffix only. `resume_pointer` is the event at which replay begins.
    """

    status: RunStatus
    state_version: int
    snapshot_schema_version: int = SNAPSHOT_SCHEMA_VERSION
    waiting_kind: str | None = None
    waiting_token: str | None = None
    waiting_until: Instant | None = None
    active_task_id: str | None = None
    resume_pointer: int = 1
    signals: dict[str, str] = {}
    last_signal_id: str | None = None
    last_error_code: str | None = None
    last_error: ErrorInfo | None = None
    last_executed_by: str = ""
    last_executed_on: Instant = 0
    failed_step_ids: tuple[str, ...] = ()
    """Failed steps that wait for an operator to retry or skip them."""


def runtime_snapshot(state: RunState) -> RuntimeSnapshot:
    """Return what the commit of this state stores beside its events."""
    waiting = next(iter(state.open_steps.values()), None)
    error = state.last_error
    return RuntimeSnapshot(
        status=state.status,
        state_version=state.version,
        waiting_kind=waiting.kind if waiting else None,
        waiting_token=waiting.token if waiting else None,
        waiting_until=waiting.due_at if waiting else None,
        active_task_id=waiting.body.task_id if waiting and isinstance(waiting.body, e.TaskCreated) else None,
        resume_pointer=state.replay_from,
        signals=state.cursors,
        last_signal_id=state.last_signal_id,
        last_error_code=error.code if error else None,
        last_error=error,
        last_executed_by=state.last_executed_by,
        last_executed_on=state.last_executed_on,
        failed_step_ids=failures_to_settle(state) if state.failed_steps else (),
    )


class Wait(Struct, frozen=True, kw_only=True, gc=False):
    """An open wait for a signal. Its address is its step's path."""

    run_id: str
    step_id: str
    name: str
    token: str
    since: Instant
    until: Instant | None = None


class Task(Struct, frozen=True, kw_only=True, gc=False, rename={"workflow": "plan_id"}):
    """A task for a human, and its status. Stores keep `workflow` as `plan_id`."""

    task_id: str
    run_id: str
    step_id: str
    name: str
    status: Literal["OPEN", "COMPLETED", "CANCELLED"]
    created_at: Instant
    task_type: str = ""
    route: str = ""
    payload: Raw = NULL
    form: Raw = NULL
    roles: tuple[str, ...] = ()
    assignee: str | None = None
    due_at: Instant | None = None
    completed_at: Instant | None = None
    completed_by: str | None = None
    workflow: str = ""
    approvals: int = 1
    of: int | None = None
    answered_by: tuple[str, ...] = ()
    reminders: int = 0
    is_escalated: bool = False


class ActivityRecord(Struct, frozen=True, kw_only=True, gc=False):
    """What is known about one activity call with an idempotency key. Its key is the first four fields."""

    run_id: str
    activity_name: str
    step_id: str
    idempotency_key: str
    status: Literal["completed", "failed", "cancelled", "timed-out", "indeterminate"]
    created_at: Instant
    updated_at: Instant
    result: Raw | UnsetType = UNSET
    error: ErrorInfo | None = None
    version: int = 1


class IndexChanges(Struct, frozen=True, gc=False):
    """How a turn changes the rows of waits and tasks."""

    waits_opened: tuple[Wait, ...] = ()
    waits_closed: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()


_NO_CHANGES = IndexChanges()
_INDEXED = frozenset({"signal", "task"})
"""The kinds of steps that have rows."""

_CHANGES_ROW = frozenset(body for body in e.BODIES.values() if body.CHANGES in _INDEXED) - {e.TaskCommented}
_CONCERNS_INDEX = (
    frozenset(body for body in e.BODIES.values() if body.OPENS in _INDEXED or body.CLOSES & _INDEXED)
    | _CHANGES_ROW
    | e.CLOSING_ALL
)


def index_changes(before: RunState, after: RunState, events: Iterable[Event]) -> IndexChanges:
    """Return how these events, which led from one state to the other, change the rows of waits and tasks."""
    touched: dict[str, Event] = {}
    changed: dict[str, list[Event]] = {}
    for event in events:
        if type(event.data) not in _CONCERNS_INDEX:
            continue
        if type(event.data) in e.CLOSING_ALL:
            ended = {step_id: by for step_id, by in touched.items() if type(by.data) not in _CHANGES_ROW}
            touched = dict.fromkeys([*before.open_steps, *touched], event) | ended
        elif event.step_id is not None:
            touched[event.step_id] = event
            if type(event.data) in _CHANGES_ROW:
                changed.setdefault(event.step_id, []).append(event)
    if not touched:
        return _NO_CHANGES
    opened: list[Wait] = []
    closed: list[str] = []
    tasks: list[Task] = []
    for step_id, event in touched.items():
        was, now = before.open_steps.get(step_id), after.open_steps.get(step_id)
        if now is not None and now.kind == "signal":
            opened.append(_wait(before.run_id, now))
        elif was is not None and was.kind == "signal":
            closed.append(step_id)
        elif now is not None and isinstance(now.body, e.TaskCreated):
            tasks.append(_task(after, now, now.body, now.task or NO_PROGRESS, None))
        elif was is not None and isinstance(was.body, e.TaskCreated):
            body, progress = was.body, was.task or NO_PROGRESS
            for change in changed.get(step_id, ()):
                body, progress = apply_to_task(body, progress, change)
            tasks.append(_task(after, was, body, progress, event))
    return IndexChanges(tuple(opened), tuple(closed), tuple(tasks))


def _wait(run_id: str, step: OpenStep) -> Wait:
    return Wait(
        run_id=run_id,
        step_id=step.step_id,
        name=step.name,
        token=step.token or "",
        since=step.opened_at,
        until=step.due_at,
    )


def _task(run: RunState, step: OpenStep, body: e.TaskCreated, progress: TaskProgress, end: Event | None) -> Task:
    completed = end.data if end is not None and isinstance(end.data, e.TaskCompleted) else None
    return Task(
        task_id=body.task_id,
        run_id=run.run_id,
        step_id=step.step_id,
        name=body.name,
        status="OPEN" if end is None else "COMPLETED" if completed else "CANCELLED",
        created_at=step.opened_at,
        task_type=body.task_type,
        route=body.route,
        payload=body.payload,
        form=body.form,
        roles=body.roles,
        assignee=body.assignee,
        due_at=body.due_at,
        completed_at=end.emitted_at if end is not None else None,
        completed_by=completed.actor if completed else None,
        workflow=run.plan_id,
        approvals=body.approvals,
        of=body.of,
        answered_by=tuple(given.actor for given in progress.answers),
        reminders=progress.reminders,
        is_escalated=progress.is_escalated,
    )
