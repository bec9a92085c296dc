"""The records that operations return: the engine's data as callers see it, with instants as ISO 8601 text."""

from collections.abc import Callable, Container, Hashable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from holdfast.core import codec, instants
from holdfast.core.attributes import REFERENCE, Attributes, parts_of, plain
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import (
    NULL,
    ArtifactRef,
    ErrorInfo,
    Event,
    TaskAnswered,
    TaskCommented,
    TaskCompleted,
    TaskCreated,
)
from holdfast.core.graph import Change, NodeKind
from holdfast.core.index_rows import Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import AcceptedSignalResult
from holdfast.core.run_graph import NodeStatus, RunGraph
from holdfast.core.snapshot import Projection, RunSnapshot, StepError, StepStatus
from holdfast.core.state import RunStatus
from holdfast.engine.inbox.tasks import TaskView
from holdfast.store.decisions import name_of
from holdfast.store.payloads import concealed, concealed_text
from holdfast.store.port import RunHead

T = TypeVar("T", bound=Struct)

Moment = Annotated[datetime, Meta(tz=True)]
"""A point in time in wire format: ISO 8601 with a time zone."""

_LAST = instants.instant_of(datetime(9999, 12, 31, tzinfo=UTC))


def moment(instant: Instant) -> datetime:
    """Return an instant in wire format."""
    return instants.datetime_of(min(instant, _LAST))


def instant_of(given: datetime | None) -> Instant | None:
    """Return the instant that a caller names."""
    return None if given is None else instants.instant_of(given)


def shown(kind: type[T], record: Any, **more: Any) -> T:
    """Return a view of a record: the fields that both have, and more."""
    shared = _shared(kind, record.__class__)
    fields = {name: convert(getattr(record, name)) for name, convert in shared if name not in more}
    return kind(**fields, **more)


@lru_cache(maxsize=256)
def _shared(kind: type[Struct], record: Hashable) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    hints = get_type_hints(kind)
    known = set(getattr(record, "__struct_fields__", ()))
    return tuple(
        (name, _moment_or_none if hints[name] is datetime or datetime in get_args(hints[name]) else _visible)
        for name in kind.__struct_fields__
        if name in known
    )


def _moment_or_none(value: Instant | None) -> datetime | None:
    return None if value is None else moment(value)


def _visible(value: Any) -> Any:
    """Return a value as callers see it. Of an encrypted value that cannot be opened here, only that fact is shown."""
    if type(value) is Raw:
        return concealed(value)
    if type(value) is StepError:
        return replace(value, message=concealed_text(value.message))
    return value


class Failure(Struct, frozen=True):
    """An error as it was recorded, without its traceback."""

    code: str
    message: str
    retryable: bool = False
    category: str = ""


def failure_of(error: ErrorInfo | None) -> Failure | None:
    """Return a recorded error as callers see it."""
    if error is None:
        return None
    return Failure(error.code, concealed_text(error.message), error.retryable, error.category)


class RunStarted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run that exists now, by this request or by an earlier identical one."""

    run_id: str
    workflow: str
    workflow_version: str
    is_reused: bool = False
    """Whether it was started by another request for the same run id, and `reuse` is to return it."""


class RetryView(Struct, frozen=True, kw_only=True):
    """An activity that has failed and is tried again, at `next_at` or, without one, as soon as a node begins it."""

    step_id: str
    activity: str
    failures: int
    error_code: str
    next_at: datetime | None = None


class PauseView(Struct, frozen=True, kw_only=True):
    """Since when a run is paused, and why; `actor` is the operator who has paused it, if one has."""

    since: datetime
    reason: str
    actor: str


class PlaceView(Struct, frozen=True, kw_only=True):
    """What a run waits for because of a limit, and its position in the line of its tenant and key."""

    step_id: str | None
    """The first of its waiting calls; None if the run itself waits to be admitted."""
    limit: str
    """The limit's name, or the workflow."""
    key: str
    in_line: int
    """1 means that it is the next in its line."""
    taken: int | None
    """How many places are taken; None for a token of a tenant."""
    taken_of_key: int
    at_once: int | None = None
    """How many places there are, if the process that answers has the code with the limit."""
    per_key: int | None = None
    waiting: int = 1
    """How many calls of the run wait."""


class RunView(Struct, frozen=True, kw_only=True):
    """A run without its history. `last_event_seq` is the number of its last event."""

    run_id: str
    workflow: str
    workflow_version: str
    status: RunStatus
    tenant: str
    project: str
    environment: str
    request_id: str
    created_at: datetime
    updated_at: datetime
    last_event_seq: int
    finished_at: datetime | None = None
    parent_run_id: str | None = None
    reference_key: str | None = None
    tags: tuple[str, ...] = ()
    waiting_kind: str | None = None
    waiting_until: datetime | None = None
    active_task_id: str | None = None
    last_error: Failure | None = None
    node: str | None = None
    failed_step_ids: tuple[str, ...] = ()
    """Failed steps that wait for an operator to retry or skip them."""
    reference_parts: dict[str, str] = {}
    attributes: dict[str, Any] = {}
    waiting_for: str | None = None
    """The name of the signal, activity, task or workflow that it waits for."""
    retrying: RetryView | None = None
    pause: PauseView | None = None
    queued_at: datetime | None = None
    """Since when it waits for a place, because of the limits of its workflow."""
    place: PlaceView | None = None
    """Its position in the queue, if it or one of its calls waits for a place."""
    published: dict[str, Any] = {}
    """What its program has published last, such as its progress."""
    done_again_by: str | None = None
    """For a failed run that is requested alone: the run that retries or continues it, if there is one."""


def run_view(head: RunHead, place: PlaceView | None = None, *, done_again_by: str | None = None) -> RunView:
    """Return a run as callers see it."""
    snapshot = head.snapshot
    return shown(
        RunView,
        head,
        workflow=head.plan_id,
        workflow_version=head.plan_version,
        request_id=head.run_request_id,
        last_event_seq=head.version,
        waiting_kind=snapshot.waiting_kind if snapshot else None,
        waiting_until=_moment_or_none(snapshot.waiting_until) if snapshot else None,
        active_task_id=snapshot.active_task_id if snapshot else None,
        last_error=failure_of(snapshot.last_error) if snapshot else None,
        node=None if head.lease_owner is None else name_of(head.lease_owner),
        failed_step_ids=snapshot.failed_step_ids if snapshot else (),
        reference_parts=parts_of(snapshot.attributes) if snapshot else {},
        attributes=_attributes_of(snapshot.attributes) if snapshot and snapshot.attributes else {},
        waiting_for=(snapshot.waiting_name or None) if snapshot else None,
        retrying=shown(RetryView, snapshot.retrying) if snapshot and snapshot.retrying else None,
        pause=shown(PauseView, snapshot.pause) if snapshot and snapshot.pause else None,
        published=snapshot.published if snapshot else {},
        place=place,
        done_again_by=done_again_by,
    )


def _attributes_of(attributes: Attributes) -> dict[str, Any]:
    return {name: plain(value) for name, value in attributes.items() if not name.startswith(REFERENCE)}


class EngineRef(Struct, frozen=True):
    """Who appended an event: the node, and the epoch of the lease under which it did."""

    node: str
    epoch: int
    provider: str


class EventView(Struct, frozen=True, kw_only=True):
    """One entry of a run's history. `data` differs by `event_type`; unknown fields are preserved and skipped."""

    run_id: str
    run_seq: int
    event_id: str
    event_type: str
    step_id: str | None
    engine_attempt_id: int | None
    logical_attempt_id: int | None
    data: Raw
    idempotency_key: str
    emitted_at: datetime
    persisted_at: datetime
    adapter_version: str
    engine_run_ref: EngineRef
    caused_by_signal_id: str | None
    parent_event_id: str | None
    schema_version: int
    is_redacted: bool = False
    """Whether the contents of a task are omitted from `data`, because it does not concern the caller."""

    data_bytes: int | None = None
    """The size of `data`, if it was omitted because no response has room for it."""


def event_view(event: Event, redacted: Container[str] = (), most_bytes: int | None = None) -> EventView:
    """Return an event as callers see it. The contents of tasks are omitted for the `redacted` steps.

    Of an event larger than `most_bytes` only the size is shown.
    """
    by, data = event.engine_run_ref, event.data
    is_redacted = event.step_id in redacted and isinstance(data, TASK_CONTENTS)
    if is_redacted:
        held = {"payload": NULL, "form": NULL, "answer": NULL, "text": ""}
        data = replace(data, **{field: held[field] for field in held.keys() & set(data.__struct_fields__)})
    text = codec.encode_body(data).encode()
    if codec.SEAL.encode() in text:
        text = codec.encode_body(concealed(data)).encode()
    is_left_out = most_bytes is not None and len(text) > most_bytes
    return shown(
        EventView,
        event,
        data=Raw(b"{}") if is_left_out else Raw(text),
        data_bytes=len(text) if is_left_out else None,
        engine_run_ref=EngineRef(by.node, by.epoch, by.provider),
        is_redacted=is_redacted,
    )


TASK_CONTENTS = (TaskCreated, TaskCommented, TaskAnswered, TaskCompleted)
"""The events that contain what a task asks, what was answered, and the comments on it."""


class StepView(Struct, frozen=True, kw_only=True):
    """One step of a run, as operators see it."""

    step_id: str
    status: StepStatus
    kind: str
    logical_attempt_id: int
    engine_attempt_id: int
    started_at: datetime | None = None
    completed_at: datetime | None = None
    artifacts: tuple[ArtifactRef, ...] = ()
    error: StepError | None = None


class SnapshotView(Struct, frozen=True, kw_only=True):
    """A run as operators see it, projected from its events up to `last_event_seq`.

    With `is_stale` events are missing behind that one: look again when they are there. `state` is the present state of
    a flow, and null otherwise; while branches of it are at work, it is the one before them.
    """

    run_id: str
    status: RunStatus
    last_event_seq: int
    state: Raw
    substatus: str | None = None
    steps: tuple[StepView, ...] = ()
    artifacts: tuple[ArtifactRef, ...] = ()
    started_at: datetime | None = None
    completed_at: datetime | None = None
    total_duration_ms: int | None = None
    is_cancelling: bool = False
    is_stale: bool = False


def snapshot_view(snapshot: RunSnapshot, is_stale: bool = False, state: Raw = NULL) -> SnapshotView:
    """Return a projection as callers see it."""
    steps = tuple(shown(StepView, step) for step in snapshot.steps)
    return shown(SnapshotView, snapshot, steps=steps, is_stale=is_stale, state=state)


class GraphNodeView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of a flow or a plan, or a group of steps, with its state in a run. Absent values are omitted."""

    id: str
    label: str
    kind: NodeKind
    status: NodeStatus
    parent: str | None = None
    """The group that it belongs to."""

    depends_on: tuple[str, ...] = ()
    """The nodes of the same parent that have to end before it begins."""

    branch: str = ""
    """In a cue, the case in which it is executed."""

    detail: str = ""
    started_at: datetime | None = None
    completed_at: datetime | None = None
    attempts: int = 0
    """How often the step was attempted."""

    counts: dict[NodeStatus, int] = {}
    """For a group, the number of its steps by status."""

    is_expanded: bool = False
    """Whether the nodes of a group are included."""

    is_critical: bool = False
    """Whether it is on the critical path."""

    critical_after: str | None = None
    """Which of its dependencies precedes it on the critical path."""

    change: Change | None = None
    """In a comparison of two versions, its change; for a group, whether something in it changes."""


class GraphView(Struct, frozen=True, kw_only=True):
    """A run's graph, as much of it as is shown. `steps` is how many there are, and `counts` how all of them stand.

    A workflow in code has no graph: `kind` is `code`, and there are no nodes.
    """

    run_id: str
    kind: Literal["code", "flow", "plan"]
    last_event_seq: int
    steps: int = 0
    counts: dict[NodeStatus, int] = {}
    nodes: tuple[GraphNodeView, ...] = ()
    is_stale: bool = False


def graph_view(projection: Projection, graph: RunGraph | None) -> GraphView:
    """Return a run's graph as callers see it."""
    snapshot = projection.snapshot
    view = GraphView(
        run_id=snapshot.run_id, kind="code", last_event_seq=snapshot.last_event_seq, is_stale=projection.is_stale
    )
    if graph is None:
        return view
    nodes = tuple(shown(GraphNodeView, node) for node in graph.nodes)
    return replace(view, kind=graph.kind, steps=graph.steps, counts=graph.counts, nodes=nodes)


class AcceptedSignal(Struct, frozen=True, kw_only=True):
    """What every sender of the same signal gets, on every transport. `workflow_id` is the run's id."""

    accepted: bool
    workflow_id: str
    signal_name: str
    signal_id: str
    accepted_at: datetime
    signal_storage_key: str
    warning: str | UnsetType = UNSET
    """Information for the sender although the signal was accepted."""


def accepted_signal(result: AcceptedSignalResult) -> AcceptedSignal:
    """Return an acceptance as callers see it."""
    return shown(AcceptedSignal, result, warning=UNSET if result.warning is None else result.warning)


class WaitView(Struct, frozen=True, kw_only=True):
    """An open wait for a signal, and whose it is. `step_id` addresses exactly this one."""

    run_id: str
    step_id: str
    workflow: str
    workflow_version: str
    reference_key: str | None = None
    name: str
    since: datetime
    until: datetime | None = None


def wait_view(wait: Wait, head: RunHead) -> WaitView:
    """Return a wait of a run as callers see it."""
    return shown(
        WaitView, wait, workflow=head.plan_id, workflow_version=head.plan_version, reference_key=head.reference_key
    )


LISTED_BYTES = 16 * 1024
"""The maximum size of a task's payload and form in a list."""


class TaskItem(Struct, frozen=True, kw_only=True):
    """What a human is asked, and how it stands. `form` is the JSON Schema of the answer.

    `payload_bytes` is how large both are, if they were left out of a list: the task by itself has them.
    """

    task_id: str
    run_id: str
    step_id: str
    workflow: str
    name: str
    status: str
    created_at: datetime
    task_type: str = ""
    route: str = ""
    payload: Raw
    form: Raw
    roles: tuple[str, ...] = ()
    assignee: str | None = None
    due_at: datetime | None = None
    completed_at: datetime | None = None
    completed_by: str | None = None
    approvals: int = 1
    of: int | None = None
    answered_by: tuple[str, ...] = ()
    reminders: int = 0
    is_escalated: bool = False
    is_overdue: bool = False
    payload_bytes: int | None = None


def task_item(task: TaskView) -> TaskItem:
    """Return a task as callers see it."""
    return shown(TaskItem, task)


def listed_task(task: TaskView) -> TaskItem:
    """Return a task as lists show it: without payload and form if they are large."""
    size = len(task.payload) + len(task.form)
    if size <= LISTED_BYTES:
        return task_item(task)
    return shown(TaskItem, task, payload=NULL, form=NULL, payload_bytes=size)


class LetterView(Struct, frozen=True, kw_only=True):
    """A message that could not be handled, and why. Its envelope is shown only by `letters.get`."""

    letter_id: str
    run_id: str
    reason: str
    detail: str
    node: str
    died_at: datetime
    settled: str | None = None
    settled_by: str = ""
    settled_at: datetime | None = None


def letter_view(letter: DeadLetter) -> LetterView:
    """Return a dead letter as callers see it."""
    return shown(LetterView, letter)
