"""The view of a run for operators, derived from its events.

The projector's rules (PRJ-2): events are applied in strictly increasing order of `run_seq`; a gap halts projection
with `HistoryGap` and is never skipped; an event that was applied before changes nothing; the full and the
incremental projection of the same events are equal. A snapshot is never modified: each projection is a new object, and
`last_event_seq` is its watermark.

A snapshot is a cache. If it is deleted, folding the events restores it.

`catch_up` is for a reader that follows a history (EVT-6, PRJ-3): it applies the new events. At a gap it stops, marks
the projection STALE and returns an alert; it continues when it gets the missing events. A reader that crashed starts
again from the snapshot that it stored last.
"""

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core.events import ArtifactRef, ErrorInfo, Event
from holdfast.core.instants import Instant
from holdfast.core.state import RUNNING, TERMINAL, TRANSITIONS, RunStatus, kept_open
from holdfast.errors import HistoryGap
from holdfast.limits import PROJECTOR_LAG_MS

CANCELLING = "CANCELLING"
"""The substatus of a run that is being cancelled and is cleaning up."""

AWAITING_APPROVAL = "AWAITING_APPROVAL"
"""The substatus of a run that waits for approval before it starts."""


UNRESOLVED = "Unresolved"
"""The error code of an open step that waits for an operator because it is not known whether its effect happened."""


class StepStatus(StrEnum):
    """The status of a step, as operators see it."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


class StepError(Struct, frozen=True):
    """A step's error, as operators see it."""

    code: str
    message: str
    retryable: bool


class StepSnapshot(Struct, frozen=True, kw_only=True):
    """One step, as operators see it."""

    step_id: str
    """The name of the step, which is unique in its run."""
    status: StepStatus
    """Its status."""
    kind: str = "activity"
    """Its kind: activity, timer, signal, task, child or update."""
    logical_attempt_id: int = 1
    """1, and one more with each RETRY_STEP."""
    engine_attempt_id: int = 1
    """The number of its last dispatch, from 1."""
    started_at: Instant | None = None
    """When it was opened."""
    completed_at: Instant | None = None
    """When it was closed."""
    artifacts: tuple[ArtifactRef, ...] = ()
    """The artifacts of its result."""
    error: StepError | None = None
    """Why it failed."""


class RunSnapshot(Struct, frozen=True, kw_only=True):
    """A run, as operators see it. `last_event_seq` is the watermark: the highest run_seq applied."""

    run_id: str
    """The id of the run."""
    status: RunStatus = RunStatus.PENDING
    """Its status."""
    substatus: str | None = None
    """More about the status, such as AWAITING_APPROVAL, or the code of the error that paused it."""
    last_event_seq: int = 0
    steps: tuple[StepSnapshot, ...] = ()
    """The steps that were opened, in order."""
    artifacts: tuple[ArtifactRef, ...] = ()
    """The artifacts of all steps and of the result."""
    started_at: Instant | None = None
    """When it became RUNNING."""
    completed_at: Instant | None = None
    """When it ended."""
    total_duration_ms: int | None = None
    """How long it took, from its start to its end."""
    is_cancelling: bool = False
    """Whether it is being cancelled and is cleaning up."""
    decided: tuple[tuple[str, StepStatus], ...] = ()
    """Steps of a flow or a plan that ended without beginning: skipped, failed because they could not begin, or already
    done by the run that this one retries."""


def project_run(run_id: str, events: Iterable[Event]) -> RunSnapshot:
    """Return the snapshot of a run from its whole history."""
    return incremental_project(RunSnapshot(run_id=run_id), events)


def incremental_project(snapshot: RunSnapshot, events: Iterable[Event]) -> RunSnapshot:
    """Return the snapshot after these events. Events at or below the watermark change nothing."""
    steps = {step.step_id: step for step in snapshot.steps}
    artifacts = dict.fromkeys(snapshot.artifacts)
    decided = dict(snapshot.decided)
    for event in events:
        if event.run_seq <= snapshot.last_event_seq:
            continue
        if detect_gaps(snapshot.last_event_seq, event.run_seq):
            raise HistoryGap(
                f"run {snapshot.run_id}: event {event.run_seq} follows event {snapshot.last_event_seq}",
                run_id=snapshot.run_id,
                expected=snapshot.last_event_seq + 1,
                found=event.run_seq,
            )
        snapshot = replace(_project(snapshot, event, steps), last_event_seq=event.run_seq)
        artifacts.update(dict.fromkeys(getattr(event.data, "artifacts", ())))
        if isinstance(event.data, e.MarkerRecorded):
            decided.update(_decision(event.step_id or "", event.data))
    return replace(snapshot, steps=tuple(steps.values()), artifacts=tuple(artifacts), decided=tuple(decided.items()))


def _decision(step_id: str, marker: e.MarkerRecorded) -> dict[str, StepStatus]:
    """Return the status of a step from a marker of a flow or a plan: `load:when` and `ship:condition` may be false."""
    base, _, role = step_id.rpartition(":")
    if not base:
        return {}
    value = bytes(marker.value)
    if role == "done":
        return {base: StepStatus.SUCCESS}
    if role == "skipped" or (role in ("when", "condition") and value == b"false"):
        return {base: StepStatus.SKIPPED}
    if role.partition("~")[0] == "failed" or (role == "when" and value.startswith(b'"')):
        return {base.partition(":")[0]: StepStatus.FAILED}
    return {}


def detect_gaps(last_seq: int, next_seq: int) -> bool:
    """Return whether events are missing between the two."""
    return next_seq > last_seq + 1


_CLOSED_AS = {body: StepStatus(body.CLOSED_AS) for body in e.CLOSING}
_TIMED_OUT = StepError("SignalTimedOut", "no signal came in time", False)


def _project(snapshot: RunSnapshot, event: Event, steps: dict[str, StepSnapshot]) -> RunSnapshot:
    body, kind = event.data, type(event.data)
    if event.step_id is not None:
        _project_step(event, steps)
    elif isinstance(body, e.RunQueued) and body.requires_approval:
        snapshot = replace(snapshot, substatus=AWAITING_APPROVAL)
    elif kind is e.RunApproved:
        snapshot = replace(snapshot, substatus=None)
    elif isinstance(body, e.RunPaused):
        snapshot = replace(snapshot, substatus=body.error.code if body.error else body.reason or None)
    elif kind is e.RunCancelRequested:
        substatus = CANCELLING if snapshot.status is RUNNING else snapshot.substatus
        snapshot = replace(snapshot, is_cancelling=True, substatus=substatus)
    elif kind is e.ContinuedAsNew:
        assert isinstance(body, e.ContinuedAsNew)
        _give_up_open(event, steps, but=kept_open(body))
    status = TRANSITIONS[snapshot.status].get(kind)
    if status is None:
        return snapshot
    if status is RUNNING:
        started = snapshot.started_at if snapshot.started_at is not None else event.persisted_at
        substatus = CANCELLING if snapshot.is_cancelling else None
        return replace(snapshot, status=status, started_at=started, substatus=substatus)
    if status in TERMINAL:
        _give_up_open(event, steps)
        began = snapshot.started_at if snapshot.started_at is not None else event.persisted_at
        return replace(
            snapshot,
            status=status,
            substatus=None,
            completed_at=event.persisted_at,
            total_duration_ms=(event.persisted_at - began) // 1_000,
        )
    return replace(snapshot, status=status)


def _give_up_open(event: Event, steps: dict[str, StepSnapshot], but: Collection[str] = ()) -> None:
    """Mark open steps as skipped: the run has ended or rotated."""
    for step_id, step in steps.items():
        if step.status is StepStatus.RUNNING and step_id not in but:
            steps[step_id] = replace(step, status=StepStatus.SKIPPED, completed_at=event.persisted_at)


def _project_step(event: Event, steps: dict[str, StepSnapshot]) -> None:
    body, kind, step_id = event.data, type(event.data), event.step_id or ""
    step = steps.get(step_id) or StepSnapshot(step_id=step_id, status=StepStatus.PENDING)
    if kind in e.OPENING:
        steps[step_id] = StepSnapshot(
            step_id=step_id,
            status=StepStatus.RUNNING,
            kind=e.OPENING[kind],
            logical_attempt_id=event.logical_attempt_id or 1,
            engine_attempt_id=event.engine_attempt_id or 1,
            started_at=event.persisted_at,
        )
    elif kind is e.StepRetried:
        attempt = event.engine_attempt_id or step.engine_attempt_id + 1
        steps[step_id] = replace(step, engine_attempt_id=attempt, error=_settled_error(step))
    elif kind is e.StepDetached:
        steps[step_id] = replace(step, engine_attempt_id=event.engine_attempt_id or step.engine_attempt_id)
    elif isinstance(body, e.StepUnresolved):
        steps[step_id] = replace(
            step,
            engine_attempt_id=event.engine_attempt_id or step.engine_attempt_id,
            error=StepError(UNRESOLVED, body.error.message, True),
        )
    elif kind in _CLOSED_AS:
        error = _TIMED_OUT if kind is e.SignalTimedOut else _step_error(getattr(body, "error", None))
        steps[step_id] = replace(
            step,
            status=StepStatus.FAILED if error is not None else _CLOSED_AS[kind],
            engine_attempt_id=event.engine_attempt_id or step.engine_attempt_id,
            completed_at=event.persisted_at,
            artifacts=getattr(body, "artifacts", ()),
            error=error if error is not None else _settled_error(step),
        )


def _settled_error(step: StepSnapshot) -> StepError | None:
    """Return the error of a step that is no longer unresolved."""
    return None if step.error is not None and step.error.code == UNRESOLVED else step.error


def _step_error(error: ErrorInfo | None) -> StepError | None:
    return None if error is None else StepError(error.code, error.message, error.retryable)


# --- keeping up with a history

AlertCode = Literal["PROJECTOR_LAG_HIGH", "PROJECTOR_GAP_DETECTED", "WRITE_LATENCY_HIGH", "STALE_RUNS", "STALE_TASKS"]


class Alert(Struct, frozen=True):
    """A problem that an operator should know about. `priority` 1 is the most urgent."""

    code: AlertCode
    priority: int
    run_id: str
    detail: str


class Projection(Struct, frozen=True):
    """A snapshot, and whether it is known to be stale."""

    snapshot: RunSnapshot
    is_stale: bool = False


def catch_up(projection: Projection, events: Sequence[Event], now: Instant) -> tuple[Projection, tuple[Alert, ...]]:
    """Apply the new events up to the first gap, and return the projection and its alerts."""
    run_id, watermark = projection.snapshot.run_id, projection.snapshot.last_event_seq
    alerts: list[Alert] = []
    usable: list[Event] = []
    gap: Event | None = None
    for event in events:
        if detect_gaps(watermark, event.run_seq):
            gap = event
            break
        if event.run_seq > watermark:
            usable.append(event)
            watermark = event.run_seq
    lag_ms = max(((now - event.persisted_at) // 1_000 for event in usable), default=0)
    if lag_ms > PROJECTOR_LAG_MS:
        alerts.append(Alert("PROJECTOR_LAG_HIGH", 2, run_id, f"{lag_ms} ms behind"))
    if gap is not None:
        detail = f"event {gap.run_seq} follows event {watermark}"
        alerts.append(Alert("PROJECTOR_GAP_DETECTED", 1, run_id, detail))
    return Projection(incremental_project(projection.snapshot, usable), gap is not None), tuple(alerts)
