"""Rows that a commit stores along with the history, to find runs, waits, tasks and activity records without reading it.

The `RuntimeSnapshot` is the row of the run itself. It is a cache: folding the events restores it.

All rows are derived from events. An activity record holds what is known about the effect of a keyed step: the commit
that schedules the step claims it, as `indeterminate`, and it survives a crash that loses the result.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core import events as e
from holdfast.core.attributes import Attributes
from holdfast.core.events import NULL, ErrorInfo, Event
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import NOT_COMPLETED, TIMED_OUT
from holdfast.core.operator_commands import failures_to_settle
from holdfast.core.plans import level_needed
from holdfast.core.reconciliation import (
    COMPLETED_WITHOUT_RESULT,
    INDETERMINATE,
    UNKNOWN_CODES,
    may_have_begun,
)
from holdfast.core.state import (
    NO_PROGRESS,
    PAUSED,
    OpenStep,
    Pause,
    RunState,
    RunStatus,
    TaskProgress,
    apply_to_task,
    awaits_approval,
    fold_onto,
    kept_open,
    own_copy,
)

SNAPSHOT_SCHEMA_VERSION = 1


class Retrying(Struct, frozen=True, gc=False):
    """A failed activity that is retried, at `next_at` or, without one, as soon as a node begins it."""

    step_id: str
    activity: str
    failures: int
    error_code: str
    next_at: Instant | None = None


class RuntimeSnapshot(Struct, frozen=True, omit_defaults=True, gc=False):
    """The row that each commit stores along with the events: the status of the run and what it waits for.

    The four waiting fields describe one step: the one that has been open longest. `signals` holds the cursor of each
    signal name, only its suffix. `resume_pointer` is the event at which replay begins.
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
    attributes: Attributes = {}
    """The search attributes of the run, and the parts of its reference."""
    waiting_name: str = ""
    """The name of the signal, activity, task or workflow that it waits for."""
    retrying: Retrying | None = None
    """The activity that was last retried after a failure, until it is done."""
    pause: Pause | None = None
    """Why it is paused, and by whom."""
    published: dict[str, Any] = {}
    """What its program has published last, such as its progress."""
    needs: int = 0
    """The format level that a node must understand to continue the run (`core/plans.py`)."""


FOR_PEOPLE = frozenset({"waiting_name", "retrying", "pause", "published"})
"""Fields that describe a run to people. Rows written by older versions lack them."""

MOST_SCANNED = 1_000
"""The most open steps among which another retried one is searched."""

APPROVAL = "approval"
"""What a run waits for if it needs an approval before it starts."""

START = "start"
"""What a run waits for if it starts later."""


def runtime_snapshot(state: RunState) -> RuntimeSnapshot:
    """Return the row that the commit of this state stores along with its events."""
    kind: str | None = None
    token = until = task_id = None
    name, error = "", state.last_error
    if state.open_steps:
        waiting = next(iter(state.open_steps.values()))
        kind, token, until, name = waiting.kind, waiting.token, waiting.due_at, waiting.name
        if type(waiting.body) is e.TaskCreated:
            task_id = waiting.body.task_id
    elif awaits_approval(state):
        kind = APPROVAL
    elif state.start_at is not None:
        kind, until = START, state.start_at
    return RuntimeSnapshot(  # by position: msgspec takes six times as long with keyword arguments
        state.status,
        state.version,
        SNAPSHOT_SCHEMA_VERSION,
        kind,
        token,
        until,
        task_id,
        state.replay_from,
        state.cursors,
        state.last_signal_id,
        error.code if error else None,
        error,
        state.last_executed_by,
        state.last_executed_on,
        failures_to_settle(state) if state.failed_steps and state.status is PAUSED else (),
        state.attributes,
        name,
        None if state.retried is None else _retrying(state, state.retried),
        state.pause if state.status is PAUSED else None,
        state.published,
        state.needs if state.timeouts is None and state.context is NULL else _level(state),
    )


def _level(state: RunState) -> int:
    lasting = level_needed(is_bounded=state.timeouts is not None, has_context=state.context != NULL)
    return max(state.needs, lasting)


def _retrying(state: RunState, retried: str) -> Retrying | None:
    """Return the step that was retried last or, if it is done, the first other retried one."""
    step = state.open_steps.get(retried)
    if step is None or step.error is None:
        some = islice(state.open_steps.values(), MOST_SCANNED)
        step = next((each for each in some if each.error is not None and each.kind == "activity"), None)
    if step is None or step.error is None:
        return None
    return Retrying(step.step_id, step.name, step.attempt - 1, step.error.code, step.due_at)


class Wait(Struct, frozen=True, kw_only=True, gc=False):
    """An open wait for a signal. Its address is the path of its step."""

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


RecordStatus = Literal["completed", "failed", "cancelled", "timed-out", "indeterminate"]


class ActivityRecord(Struct, frozen=True, kw_only=True, gc=False):
    """What is known about one activity call with an idempotency key. Its key is the first four fields."""

    run_id: str
    activity_name: str
    step_id: str
    idempotency_key: str
    status: RecordStatus
    created_at: Instant
    updated_at: Instant
    result: Raw | UnsetType = UNSET
    error: ErrorInfo | None = None
    version: int = 1


class IndexChanges(Struct, frozen=True, gc=False):
    """The changes of a turn to the rows of waits and tasks."""

    waits_opened: tuple[Wait, ...] = ()
    waits_closed: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()


NO_CHANGES = IndexChanges()
_INDEXED = frozenset({"signal", "task"})
"""The kinds of steps that have rows."""

_CHANGES_ROW = frozenset(body for body in e.BODIES.values() if body.CHANGES in _INDEXED) - {e.TaskCommented}
CONCERN_INDEX = (
    frozenset(body for body in e.BODIES.values() if body.OPENS in _INDEXED or body.CLOSES & _INDEXED)
    | _CHANGES_ROW
    | e.CLOSING_ALL
)
"""The types of events that may change rows of waits or tasks."""


def index_changes(before: RunState, after: RunState, events: Iterable[Event]) -> IndexChanges:
    """Return how these events, which lead from one state to the other, change the rows of waits and tasks."""
    touched: dict[str, Event] = {}
    changed: dict[str, list[Event]] = {}
    for event in events:
        if type(event.data) not in CONCERN_INDEX:
            continue
        if type(event.data) in e.CLOSING_ALL:
            kept = kept_open(event.data) if isinstance(event.data, e.ContinuedAsNew) else ()
            ended = {step: by for step, by in touched.items() if step in kept or type(by.data) not in _CHANGES_ROW}
            closed_now = dict.fromkeys([*before.open_steps, *touched], event)
            touched = {step: by for step, by in closed_now.items() if step not in kept} | ended
        elif event.step_id is not None:
            touched[event.step_id] = event
            if type(event.data) in _CHANGES_ROW:
                changed.setdefault(event.step_id, []).append(event)
    if not touched:
        return NO_CHANGES
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


def record_changes(before: RunState, events: Iterable[Event]) -> tuple[ActivityRecord, ...]:
    """Return the records of the keyed steps that these events concern, as they are after the events.

    A step has one record. RETRY_STEP does not create another one: it is indeterminate again, with the last error.
    """
    state = own_copy(before)
    records: dict[str, ActivityRecord] = {}
    for event in events:
        closes_all = type(event.data) in e.CLOSING_ALL
        touched = list(state.open_steps.values()) if closes_all else [state.open_steps.get(event.step_id or "")]
        fold_onto(state, (event,))
        for was in touched:
            if closes_all and was is not None and was.step_id in state.open_steps:  # a rotation carries it over
                continue
            step = state.open_steps.get(event.step_id or "") if was is None else was
            if step is not None and step.key is not None:
                known = _known_of(step, event)
                if known is not None:
                    records[step.step_id] = _record(state.run_id, step, event, *known)
    return tuple(records.values())


Known = tuple[RecordStatus, Raw | UnsetType, ErrorInfo | None]


def _known_of(step: OpenStep, event: Event) -> Known | None:
    """Return what is known about a step's effect after an event of the step or run; None if nothing has changed."""
    body = event.data
    error = step.effect.error if step.effect is not None else None
    if isinstance(body, e.StepStarted):
        return "indeterminate", UNSET, error
    if isinstance(body, e.StepCompleted):
        return "completed", body.result, None
    if isinstance(body, e.StepFailed):
        has_happened = body.error.category == COMPLETED_WITHOUT_RESULT
        return "completed" if has_happened else _status_of(body.error), UNSET, body.error
    if isinstance(body, e.StepUnresolved):
        return "indeterminate", UNSET, body.error
    if isinstance(body, e.StepRetried):
        return None if body.reason == e.NOT_BEGUN else (_status_of(body.error), UNSET, body.error or error)
    if type(body) in e.CLOSING or type(body) in e.CLOSING_ALL:  # abandoned: skipped, cancelled, or left open by its run
        return "indeterminate" if may_have_begun(step, event.emitted_at) else "cancelled", UNSET, error
    return None


def _status_of(error: ErrorInfo | None) -> RecordStatus:
    """Return the status of an attempt that ended like this. Lost attempts and those left to operators are unknown."""
    if error is None or error.category == INDETERMINATE:
        return "indeterminate"
    if error.code == TIMED_OUT:
        return "timed-out"
    return "indeterminate" if error.code in UNKNOWN_CODES and error.category != NOT_COMPLETED else "failed"


def _record(
    run_id: str, step: OpenStep, event: Event, status: RecordStatus, result: Raw | UnsetType, error: ErrorInfo | None
) -> ActivityRecord:
    return ActivityRecord(
        run_id=run_id,
        activity_name=step.name,
        step_id=step.step_id,
        idempotency_key=step.key or "",
        status=status,
        created_at=step.effect.since if step.effect is not None and step.effect.since else step.opened_at,
        updated_at=event.emitted_at,
        result=result,
        error=error,
    )


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
