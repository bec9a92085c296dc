"""The state of a run: a fold over its events.

Rules of this file:

1. Everything that changes a run's state is here. If you change state elsewhere, you have a bug.
2. Nothing here knows about storage, asyncio or the present time. A state is a fold over events and nothing else, so
   the same events give the same state on every node.
3. A state is never modified: `evolve` and `fold` return a new one. `fold` copies the state and its mappings once and
   works on its own copy, so that folding n events costs n, not n squared. A caller that folds events one by one, as
   they are decided, keeps such a copy as long as it holds the only reference to it (`own_copy`, `fold_onto`).
4. A state holds what is *open* or may still be needed (failed steps, a cursor for each signal name). The past is in the
   events.

The table TRANSITIONS is the life cycle of a run, and the effect of an event on a step is defined on its body
(`events.py`). An event that changes the status must be in the row of the current one; other events need a run that has
not finished (and, for events of steps, one that has started). Anything else means that the history is damaged, and
raises `CorruptHistory`; it is never skipped. Events of unknown types are counted and otherwise ignored.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from msgspec import MsgspecError, Raw, Struct, convert
from msgspec.json import decode, encode
from msgspec.structs import force_setattr, replace

from holdfast.core import events as e
from holdfast.core.attributes import Attributes, changed
from holdfast.core.codec import SCHEMA_VERSIONS, SEAL, decode_body, digest, encode_body
from holdfast.core.events import NULL, ErrorInfo, Event
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import (
    ClosedEffect,
    Effect,
    LateResult,
    effect_after_doubt,
    effect_after_retry,
    effect_of_retried_step,
)
from holdfast.core.keys import ATTEMPT_MARK
from holdfast.core.plans import HELD_LEVEL
from holdfast.core.step_map import LARGE, copy_of
from holdfast.errors import CorruptHistory, HistoryGap, HistoryTooNew
from holdfast.limits import CLOSED_EFFECTS


class GivenAnswer(Struct, frozen=True, gc=False):
    """An answer to a task: by whom, when and what. `token_id` is the caller's, who may act for the actor."""

    actor: str
    at: Instant
    answer: Raw = NULL
    token_id: str = ""


class TaskProgress(Struct, frozen=True, gc=False):
    """What has happened to an open task, apart from assignments."""

    answers: tuple[GivenAnswer, ...] = ()
    reminders: int = 0
    reminded_at: Instant | None = None
    is_escalated: bool = False


NO_PROGRESS = TaskProgress()


class OpenStep(Struct, frozen=True, gc=False):
    """A step that was opened and not yet closed: what the run waits for."""

    step_id: str
    kind: str
    body: e.Body
    opened_event_id: str
    opened_at: Instant
    logical_attempt_id: int = 1
    engine_attempt_id: int = 1
    token: str | None = None
    due_at: Instant | None = None
    first_engine_attempt_id: int = 1
    is_detached: bool = False
    task: TaskProgress | None = None
    error: ErrorInfo | None = None
    """The error of the last failed attempt within the logical attempt."""
    is_unbegun: bool = False
    """The attempt waits for a node that has the activity: no node has begun it."""
    effect: Effect | None = None
    """What is known about the effect, if the step has a key and its first attempt is over."""

    @property
    def attempt(self) -> int:
        """The number of the current attempt within the logical one, from 1; attempts that never began do not count."""
        return self.engine_attempt_id - self.first_engine_attempt_id + 1

    @property
    def key(self) -> str | None:
        """The idempotency key of the step; None if it has none."""
        return getattr(self.body, "idempotency_key", None)

    @property
    def is_unresolved(self) -> bool:
        """Whether the step waits for an operator to decide if its effect has happened."""
        return self.effect is not None and self.effect.task != ""

    @property
    def queue(self) -> str:
        """The queue of the step's activity; empty if the node that owns the run executes it."""
        return getattr(self.body, "queue", "")

    @property
    def name(self) -> str:
        """The name of the activity, signal, task, marker or plan that is executed or awaited."""
        return getattr(self.body, "name", "") or getattr(self.body, "plan_id", "")


class FailedStep(Struct, frozen=True, gc=False):
    """A step that failed permanently. Until the program gets the failure, an operator can retry or skip the step.

    `delivered_by` is the event that delivered the failure: 0 for the failure itself, else the number of the resumption.
    """

    started: OpenStep
    error: ErrorInfo
    delivered_by: int | None = 0

    @property
    def is_delivered(self) -> bool:
        """Whether the program has got the failure."""
        return self.delivered_by is not None


def apply_to_task(task: e.TaskCreated, progress: TaskProgress, event: Event) -> tuple[e.TaskCreated, TaskProgress]:
    """Return a task, with its current assignee and roles, and its progress after one more event."""
    body = event.data
    if isinstance(body, e.TaskAssigned):
        roles = task.roles if body.roles is None else body.roles
        is_escalated = progress.is_escalated or body.action == "escalate"
        return replace(task, assignee=body.assignee, roles=roles), replace(progress, is_escalated=is_escalated)
    if isinstance(body, e.TaskAnswered):
        token_id = "" if body.by is None else body.by.token_id
        given = GivenAnswer(body.actor, event.emitted_at, body.answer, token_id)
        return replace(task, assignee=None), replace(progress, answers=(*progress.answers, given))  # others may answer
    if isinstance(body, e.TaskReminded):
        return task, replace(progress, reminders=body.count, reminded_at=event.emitted_at)
    return task, progress


RunStatus = e.RunStatus
PENDING, APPROVED, RUNNING, PAUSED, COMPLETED, FAILED, CANCELLED = RunStatus
TERMINAL = e.TERMINAL
TRANSITIONS = e.TRANSITIONS

MENDED_BY_CODE = frozenset({"VersionMismatch", "NondeterminismError", "UnhandledError"})
"""The error codes of paused runs that resume automatically when a node has matching code."""


class Pause(Struct, frozen=True, gc=False):
    """When and why a run was paused; `actor` is the operator who paused it, if one did."""

    since: Instant
    reason: str = ""
    actor: str = ""


def was_paused_by(pause: Pause | None, error: ErrorInfo | None) -> bool:
    """Return whether this error paused the run, rather than an operator or a failed step."""
    return pause is not None and error is not None and not pause.actor and pause.reason == error.code


class RunState(Struct, frozen=True, kw_only=True, gc=False):
    """A run, folded from its events. `version` is the run_seq of the last event."""

    run_id: str
    version: int = 0
    status: RunStatus = PENDING
    plan_id: str = ""
    plan_version: str = ""
    plan: e.PlanSource | None = None
    """The body of its plan, if it is a run of one."""
    parent_run_id: str | None = None
    parent_step_id: str | None = None
    parent_token: str | None = None
    depth: int = 0
    replay_from: int = 1
    open_steps: dict[str, OpenStep] = {}
    waits: dict[str, tuple[str, ...]] = {}
    """The open waits for each signal name, oldest first: an index into `open_steps`."""
    local_activities: int = 0
    """The number of open activities that are not in a queue."""
    failed_steps: dict[str, FailedStep] = {}
    cursors: dict[str, str] = {}
    occurrences: dict[str, int] = {}
    is_cancelling: bool = False
    cancel_reason: str = ""
    """Why it is being cancelled, if it is and a reason was given."""
    requires_approval: bool = False
    """The run waits for an operator's approval before it starts."""
    start_at: Instant | None = None
    """The run has not started, and does not start before this instant."""
    needs: int = 0
    """The format level that a node must understand to continue the run."""
    is_held: bool = False
    """A failed step is the only reason for which the run is paused."""
    awaits_definition: bool = False
    """The run is paused only because its definition, or code that matches its history, is missing."""
    steps_since_rotation: int = 0
    last_signal_id: str | None = None
    last_error: ErrorInfo | None = None
    last_executed_by: str = ""
    last_executed_on: Instant = 0
    unknown_events: int = 0
    closed_effects: tuple[ClosedEffect, ...] = ()
    """The last closed keyed steps, kept to detect a second success."""
    attributes: Attributes = {}
    """The search attributes of the run, and the parts of its reference. Replaced as a whole, never modified."""
    pause: Pause | None = None
    """Why the run is paused, if it is."""
    retried: str | None = None
    """The step that was last retried after a failure; it may have ended since."""
    forked_from: e.ForkedFrom | None = None
    """The run from which it was forked, if it is a fork."""
    origin: e.RunOrigin | None = None
    """How it was created. None in runs that rotated before this field existed."""
    started_at: Instant = 0
    timeouts: e.RunTimeouts | None = None
    """How long it may take, if there is a limit."""
    execution_deadline: Instant | None = None
    """The instant of its execution time-out, if it has one."""
    stretch_began_at: Instant = 0
    """When the run started or last rotated, if its time is bounded."""
    timed_out: str = ""
    """The time-out that caused its cancellation: `execution` or `run`."""
    context: Raw = e.NULL
    """The context from its starter, if any (`core/run_context.py`)."""
    published: dict[str, Any] = {}
    """What the program has published last, by name. Replaced as a whole, never modified."""
    debounce: e.DebounceTerms | None = None
    """How long it waits for a later start before it begins."""
    replaced_input: Raw | None = None
    """The input from a later start, until it begins."""

    @property
    def is_finished(self) -> bool:
        """Whether the status is terminal."""
        return self.status in TERMINAL


def awaits_approval(state: RunState) -> bool:
    """Return whether a run waits for approval before it starts."""
    return state.requires_approval and state.status is PENDING


def was_held(state: RunState) -> bool:
    """Return whether a run that has not started was held for an approval or until an instant."""
    return state.status is APPROVED or (state.status is PENDING and state.start_at is not None)


def evolve(state: RunState, event: Event) -> RunState:
    """Return the state after one more event."""
    return fold(state, (event,))


def fold(state: RunState, events: Iterable[Event]) -> RunState:
    """Return the state after these events, in order."""
    draft = own_copy(state)
    fold_onto(draft, events)
    return draft


def own_copy(state: RunState) -> RunState:
    """Return a copy that only the caller holds, and may pass to `fold_onto`."""
    open_steps, failed_steps = state.open_steps, state.failed_steps
    return replace(
        state,
        open_steps={} if not open_steps else open_steps.copy() if len(open_steps) < LARGE else copy_of(open_steps),
        waits=state.waits.copy() if state.waits else {},
        failed_steps=copy_of(failed_steps) if failed_steps else {},
        cursors=state.cursors.copy() if state.cursors else {},
        occurrences=state.occurrences.copy() if state.occurrences else {},
    )


def fold_onto(draft: RunState, events: Iterable[Event]) -> None:
    """Apply these events, in order, to a state that only the caller holds: a new one, or one made by `own_copy`."""
    event = None
    for event in events:
        version = draft.version + 1
        if event.run_seq and event.run_seq != version:
            raise _gap(draft, event)
        rule = _RULES.get(type(event.data))
        if rule is None:
            _count_unknown(draft, event)
        else:
            changes_status, is_counted, handler = rule
            if changes_status:
                _change_status(draft, event)
            elif draft.status is not RUNNING:
                _check_allowed(draft, event)
            if is_counted:
                draft.occurrences[event.event_type] = draft.occurrences.get(event.event_type, 0) + 1
            if handler is not None:
                handler(draft, event)
        if event.caused_by_signal_id is not None:
            _set(draft, "last_signal_id", event.caused_by_signal_id)
        _set(draft, "version", version)
    if event is not None:
        _set(draft, "last_executed_by", event.engine_run_ref.node)
        _set(draft, "last_executed_on", event.emitted_at)


def state_of(run_id: str, events: Iterable[Event]) -> RunState:
    """Return the state of a run from its whole history or from its history since a rotation: both are equal."""
    events = iter(events)
    first = next(events, None)
    if first is None:
        return RunState(run_id=run_id)
    state = _state_before(run_id, first)
    fold_onto(state, chain((first,), events))
    return state


CARRIED = (
    "plan_id",
    "plan_version",
    "plan",
    "parent_run_id",
    "parent_step_id",
    "parent_token",
    "depth",
    "cursors",
    "occurrences",
    "is_cancelling",
    "cancel_reason",
    "last_signal_id",
    "last_error",
    "unknown_events",
    "attributes",
    "forked_from",
    "origin",
    "started_at",
    "published",
    "timeouts",
    "execution_deadline",
    "timed_out",
    "context",
)
"""The fields of a state that remain valid after a rotation: its event carries them over."""


class CarriedUpdate(Struct, frozen=True, gc=False):
    """An update that was accepted before a rotation and is answered after it."""

    step_id: str
    name: str
    event_id: str
    opened_at: Instant
    input: Raw = e.NULL
    was_refused: bool | None = None


class CarriedStep(Struct, frozen=True, omit_defaults=True, gc=False):
    """A step that a rotation carries over: an `OpenStep`, with its body as recorded, in its schema version."""

    step_id: str
    kind: str
    body: Raw
    opened_event_id: str
    opened_at: Instant
    logical_attempt_id: int = 1
    engine_attempt_id: int = 1
    token: str | None = None
    due_at: Instant | None = None
    first_engine_attempt_id: int = 1
    is_detached: bool = False
    task: TaskProgress | None = None
    error: ErrorInfo | None = None
    is_unbegun: bool = False
    effect: Effect | None = None
    schema_version: int = 1


class CarriedFailure(Struct, frozen=True, omit_defaults=True, gc=False):
    """A failed step that a rotation carries over, so that operators can still settle it."""

    started: CarriedStep
    error: ErrorInfo
    delivered_by: int | None = 0


class Carried(Struct, frozen=True, omit_defaults=True):
    """What a rotation carries over besides the fields of a state. `steps` is None if it abandons all open steps."""

    updates: tuple[CarriedUpdate, ...] = ()
    steps: tuple[CarriedStep, ...] | None = None
    failed: tuple[CarriedFailure, ...] = ()
    closed_effects: tuple[ClosedEffect, ...] = ()


_BESIDE_FIELDS = Carried.__struct_fields__
_NOTHING_CARRIED = Carried()
OPENED_BY: dict[str, type[e.Body]] = {kind: body for body, kind in e.OPENING.items()}
"""The body of the event that opens a step of a kind."""


def carried(state: RunState, update_ids: Sequence[str] = (), step_ids: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what a rotation carries over: the fields that still hold, these updates, and these steps.

    The updates have no answer yet. An unresolved step is carried over along with its task for an operator.
    """
    updates = [
        CarriedUpdate(
            step.step_id, step.name, step.opened_event_id, step.opened_at, step.body.input, step.body.was_refused
        )
        for step in map(state.open_steps.get, update_ids)
        if step is not None and isinstance(step.body, e.UpdateAccepted)
    ]
    fields: dict[str, Any] = {field: getattr(state, field) for field in CARRIED}
    if not state.attributes:  # like most runs: then the rotation has the older form
        del fields["attributes"]
    if state.forked_from is None:
        del fields["forked_from"]
    if state.origin is None:
        del fields["origin"], fields["started_at"]
    if not state.published:
        del fields["published"]
    if not state.cancel_reason:
        del fields["cancel_reason"]
    if state.timeouts is None:
        del fields["timeouts"], fields["execution_deadline"], fields["timed_out"]
    if state.context == e.NULL:
        del fields["context"]
    if updates:
        fields["updates"] = updates
    if step_ids is not None:
        kept = set(step_ids)
        kept |= {step.effect.task for step in map(state.open_steps.get, step_ids) if step is not None and step.effect}
        fields["steps"] = [_to_carried(step) for step in state.open_steps.values() if step.step_id in kept]
        fields["failed"] = [
            CarriedFailure(_to_carried(failed.started), failed.error, failed.delivered_by)
            for step_id, failed in state.failed_steps.items()
            if step_id in kept
        ]
        fields["closed_effects"] = state.closed_effects
    return fields


_OF_STEP = tuple(field for field in OpenStep.__struct_fields__ if field != "body")


def _to_carried(step: OpenStep) -> CarriedStep:
    schema_version = SCHEMA_VERSIONS.get(type(step.body).__name__, 1)
    fields = {field: getattr(step, field) for field in _OF_STEP}
    return CarriedStep(body=Raw(encode_body(step.body).encode()), schema_version=schema_version, **fields)


def _from_carried(step: CarriedStep) -> OpenStep:
    opening = OPENED_BY.get(step.kind)
    if opening is None:
        raise CorruptHistory(f"ContinuedAsNew carries step {step.step_id!r} of an unknown kind, {step.kind!r}")
    body = decode_body(opening.__name__, step.schema_version, bytes(step.body))
    return OpenStep(body=body, **{field: getattr(step, field) for field in _OF_STEP})


def carried_by(rotation: e.ContinuedAsNew) -> Carried:
    """Return the updates and steps that a rotation carries over."""
    text = bytes(rotation.carried)
    if b'"updates"' not in text and b'"steps"' not in text:  # fast path for the usual rotation
        return _NOTHING_CARRIED
    try:
        return decode(rotation.carried, type=Carried)
    except MsgspecError as problem:
        raise CorruptHistory(f"ContinuedAsNew carries what cannot be read: {problem}") from problem


def carried_updates(rotation: e.ContinuedAsNew) -> tuple[CarriedUpdate, ...]:
    """Return the updates that a rotation carries over."""
    return carried_by(rotation).updates


def carried_steps(rotation: e.ContinuedAsNew) -> dict[str, OpenStep]:
    """Return the steps that are open before a rotation and after it, in the order in which they were opened."""
    return {step.step_id: _from_carried(step) for step in carried_by(rotation).steps or ()}


def kept_open(rotation: e.ContinuedAsNew) -> frozenset[str]:
    """Return the ids of the steps, including updates, that a rotation does not close."""
    known = carried_by(rotation)
    return frozenset((*(update.step_id for update in known.updates), *(step.step_id for step in known.steps or ())))


def _open_update(update: CarriedUpdate) -> OpenStep:
    body = e.UpdateAccepted(update.name, update.input, update.was_refused)
    return OpenStep(update.step_id, "update", body, update.event_id, update.opened_at)


def _state_before(run_id: str, first: Event) -> RunState:
    if isinstance(first.data, e.UnknownBody):  # only newer versions can read this rotation: the fold refuses it
        return RunState(run_id=run_id, version=first.run_seq - 1, status=RUNNING)
    if isinstance(first.data, e.ContinuedAsNew) and first.run_seq > 1:
        fields = {"run_id": run_id, "version": first.run_seq - 1, "status": RUNNING}
        try:
            known = decode(first.data.carried)
            for beside in _BESIDE_FIELDS:  # the event itself opens them
                known.pop(beside, None)
            if "context" in known:
                known["context"] = Raw(encode(known["context"]))
            return convert({**fields, **known}, RunState)
        except (TypeError, AttributeError, MsgspecError) as problem:
            problem_text = f"ContinuedAsNew carries nothing that a fold could begin with: {problem}"
            raise _corrupt(RunState(run_id=run_id, version=first.run_seq - 1), problem_text) from problem
    return RunState(run_id=run_id)


# --- what one event changes; `draft` is private to `fold`, so it may be modified here -------------------------------

_set = force_setattr


def _gap(draft: RunState, event: Event) -> HistoryGap:
    return HistoryGap(
        f"run {draft.run_id}: event {event.run_seq} follows event {draft.version}",
        run_id=draft.run_id,
        expected=draft.version + 1,
        found=event.run_seq,
    )


def _count_unknown(draft: RunState, event: Event) -> None:
    if event.event_type in e.BODIES:
        raise HistoryTooNew(
            f"run {draft.run_id}: event {draft.version + 1} is a {event.event_type} of schema {event.schema_version}, "
            "which this version of Holdfast cannot read: upgrade it",
            run_id=draft.run_id,
            run_seq=draft.version + 1,
        )
    _set(draft, "unknown_events", draft.unknown_events + 1)


def _change_status(draft: RunState, event: Event) -> None:
    status = TRANSITIONS[draft.status].get(type(event.data))
    if status is None or draft.version == 0:
        raise _misfit(draft, event)
    _set(draft, "status", status)
    if status in TERMINAL:
        _close_all(draft)


def _check_allowed(draft: RunState, event: Event) -> None:
    if draft.status is PAUSED:
        return
    is_first = type(event.data) is e.RunQueued and draft.version == 0
    is_early = type(event.data) in _BEFORE_START and draft.status not in TERMINAL and draft.version > 0
    if not is_first and not is_early:
        raise _misfit(draft, event)


def _misfit(draft: RunState, event: Event) -> CorruptHistory:
    where = "a run that does not exist" if draft.version == 0 else f"a run that is {draft.status}"
    return _corrupt(draft, f"{event.event_type} cannot happen to {where}")


def _step_misfit(draft: RunState, event: Event) -> CorruptHistory:
    step = draft.open_steps.get(event.step_id or "")
    where = "not open" if step is None else f"an open {step.kind}"
    return _corrupt(draft, f"{event.event_type} cannot happen to step {event.step_id!r}, which is {where}")


def _corrupt(draft: RunState, problem: str) -> CorruptHistory:
    return CorruptHistory(
        f"run {draft.run_id}: {problem} (after event {draft.version})",
        run_id=draft.run_id,
        run_seq=draft.version + 1,
    )


def _queued(draft: RunState, event: Event) -> None:
    body = event.data
    assert isinstance(body, e.RunQueued)
    if draft.version != 0:
        raise _misfit(draft, event)
    _set(draft, "plan_id", body.plan_id)
    _set(draft, "plan_version", body.plan_version)
    if body.plan is not None:
        _set(draft, "plan", body.plan)
    if body.parent_run_id is not None:
        _set(draft, "parent_run_id", body.parent_run_id)
        _set(draft, "parent_step_id", body.parent_step_id)
        _set(draft, "parent_token", body.parent_token)
    _set(draft, "depth", body.depth)
    if body.requires_approval:
        _set(draft, "requires_approval", True)
    if body.start_at is not None:
        _set(draft, "start_at", body.start_at)
    if body.needs:
        _set(draft, "needs", body.needs)
    if body.debounce is not None:
        _set(draft, "debounce", body.debounce)
    if body.attributes:
        _set(draft, "attributes", body.attributes)
    if body.forked_from is not None:
        _set(draft, "forked_from", body.forked_from)
    if body.timeouts is not None:
        _set(draft, "timeouts", body.timeouts)
        if body.timeouts.execution_ms is not None:
            since = max(_since_fork(draft, event.emitted_at), body.start_at or 0)
            _set(draft, "execution_deadline", since + body.timeouts.execution_ms * 1_000)
    if body.context != e.NULL:
        _set(draft, "context", body.context)
    origin = e.RunOrigin(
        event.emitted_at,
        body.tenant,
        body.project,
        body.environment,
        body.run_request_id,
        body.reference_key,
        body.tags,
        body.schedule,
        None if body.retry_of is None else body.retry_of.run_id,
    )
    if body.retry_of is not None:
        origin = replace(origin, attempt=body.retry_of.attempt)
    elif body.forked_from is not None:
        origin = replace(origin, attempt=body.forked_from.formers[-1].attempt)
    elif body.debounce is not None:  # a later run of its key is not another attempt
        origin = replace(origin, attempt=1)
    _set(draft, "origin", origin)


def _input_replaced(draft: RunState, event: Event) -> None:
    body = event.data
    assert isinstance(body, e.InputReplaced)
    if draft.execution_deadline is not None:
        put_off = max(0, body.start_at - (draft.start_at or body.start_at))
        _set(draft, "execution_deadline", draft.execution_deadline + put_off)
    _set(draft, "start_at", body.start_at)
    _set(draft, "replaced_input", body.input)


def _marked(draft: RunState, event: Event) -> None:
    body = event.data
    assert isinstance(body, e.MarkerRecorded)
    if body.name == e.PUBLISHED:
        changed = decode(body.value)
        if isinstance(changed, dict) and SEAL not in changed:
            known = {**draft.published, **changed}
            _set(draft, "published", {name: value for name, value in known.items() if value is not None})


def _started(draft: RunState, event: Event) -> None:
    _set(draft, "started_at", event.emitted_at)
    if draft.start_at is not None:
        _set(draft, "start_at", None)
    if draft.debounce is not None:
        _set(draft, "debounce", None)
        _set(draft, "replaced_input", None)
    if draft.needs == HELD_LEVEL:
        _set(draft, "needs", 0)
    if draft.timeouts is not None:
        _set(draft, "stretch_began_at", _since_fork(draft, event.emitted_at))


def _since_fork(draft: RunState, instant: Instant) -> Instant:
    """Return the instant, or the instant of the fork if it is from the original run's history."""
    return instant if draft.forked_from is None else max(instant, draft.forked_from.forked_at)


def _timed_out(draft: RunState, event: Event) -> None:
    assert isinstance(event.data, e.RunTimedOut)
    if not draft.is_cancelling:
        _set(draft, "timed_out", event.data.timeout)


def _approved(draft: RunState, event: Event) -> None:
    _set(draft, "requires_approval", False)


def _attributes_set(draft: RunState, event: Event) -> None:
    assert isinstance(event.data, e.AttributesSet)
    _set(draft, "attributes", changed(draft.attributes, event.data.values))


def _paused(draft: RunState, event: Event) -> None:
    assert isinstance(event.data, e.RunPaused)
    _set(draft, "is_held", event.data.failed_step_id is not None)
    _set(draft, "awaits_definition", event.data.error is not None and event.data.error.code in MENDED_BY_CODE)
    if draft.pause is None:  # else an operator's command, accepted immediately before
        _set(draft, "pause", Pause(event.emitted_at, event.data.reason))
    _record_error(draft, event)
    if event.data.error is not None:  # immediately after a resumption: the program could not continue, and got nothing
        _mark_delivered(draft, draft.version, None)


def _resumed(draft: RunState, event: Event) -> None:
    _set(draft, "pause", None)
    _set(draft, "is_held", False)
    _set(draft, "awaits_definition", False)
    _mark_delivered(draft, None, draft.version + 1)


def _mark_delivered(draft: RunState, was: int | None, now: int | None) -> None:
    for step_id, failed in draft.failed_steps.items():
        if failed.delivered_by == was:
            draft.failed_steps[step_id] = replace(failed, delivered_by=now)


def _signal_accepted(draft: RunState, event: Event) -> None:
    if isinstance(event.data, e.SignalAccepted) and event.data.name == "PAUSE":
        _set(draft, "pause", Pause(event.emitted_at, event.data.reason, event.data.actor))
        _set(draft, "is_held", False)  # from now on an operator holds the run
        _set(draft, "awaits_definition", False)


def _cancel_requested(draft: RunState, event: Event) -> None:
    assert isinstance(event.data, e.RunCancelRequested)
    _set(draft, "is_cancelling", True)
    if event.data.reason:
        _set(draft, "cancel_reason", event.data.reason)


def _record_error(draft: RunState, event: Event) -> None:
    error = getattr(event.data, "error", None)
    if error is not None:
        _set(draft, "last_error", error)


def _record_step_error(draft: RunState, event: Event) -> None:
    """Record the error of a failed step, unless the run is paused by an error: that one has to be fixed."""
    if draft.status is not PAUSED or not was_paused_by(draft.pause, draft.last_error):
        _record_error(draft, event)


def _close_all(draft: RunState) -> None:
    draft.open_steps.clear()
    draft.waits.clear()
    _set(draft, "local_activities", 0)
    _set(draft, "retried", None)


def _rotated(draft: RunState, event: Event) -> None:
    assert isinstance(event.data, e.ContinuedAsNew)
    _close_all(draft)
    draft.failed_steps.clear()
    known = carried_by(event.data)
    for update in known.updates:
        draft.open_steps[update.step_id] = _open_update(update)
    for carried_step in known.steps or ():
        step = draft.open_steps[carried_step.step_id] = _from_carried(carried_step)
        _index(draft, step.step_id, step.body)
    for failure in known.failed:
        failed = FailedStep(_from_carried(failure.started), failure.error, failure.delivered_by)
        draft.failed_steps[failure.started.step_id] = failed
    _set(draft, "closed_effects", known.closed_effects)
    _set(draft, "replay_from", draft.version + 1)
    _set(draft, "steps_since_rotation", 0)
    if draft.timeouts is not None:
        _set(draft, "stretch_began_at", _since_fork(draft, event.emitted_at))


def _opener(opening: type[e.Body], kind: str) -> Callable[[RunState, Event], None]:
    """Return the handler of events with this body type, which open a step of this kind."""
    has_token, due = "token" in opening.__struct_fields__, opening.DUE_FIELD
    has_due = due in opening.__struct_fields__

    def opened(draft: RunState, event: Event) -> None:
        step_id, body = event.step_id, event.data
        if step_id is None or step_id in draft.open_steps:
            raise _step_misfit(draft, event)
        failed = draft.failed_steps.pop(step_id, None) if draft.failed_steps else None
        engine_attempt_id = event.engine_attempt_id or 1
        draft.open_steps[step_id] = OpenStep(
            step_id,
            kind,
            body,
            event.event_id,
            event.emitted_at,
            event.logical_attempt_id or 1,
            engine_attempt_id,
            getattr(body, "token") if has_token else None,  # noqa: B009 - not every body has one
            getattr(body, due) if has_due else None,
            engine_attempt_id,
        )
        _set(draft, "steps_since_rotation", draft.steps_since_rotation + 1)
        if failed is not None and failed.started.key is not None:
            draft.open_steps[step_id] = replace(draft.open_steps[step_id], effect=effect_of_retried_step(failed))
        _index(draft, step_id, body)

    return opened


def _index(draft: RunState, step_id: str, body: e.Body) -> None:
    """Add an open step to the indexes other than the one by id."""
    if type(body) is e.StepStarted:
        if not body.queue:
            _set(draft, "local_activities", draft.local_activities + 1)
    elif type(body) is e.SignalWaiting:
        draft.waits[body.name] = (*draft.waits.get(body.name, ()), step_id)


def _close(draft: RunState, event: Event) -> OpenStep:
    step = draft.open_steps.get(event.step_id or "")
    if step is None or step.kind not in event.data.CLOSES:
        raise _step_misfit(draft, event)
    del draft.open_steps[step.step_id]
    body = step.body
    if type(body) is e.StepStarted:
        if not body.queue:
            _set(draft, "local_activities", draft.local_activities - 1)
        if body.idempotency_key is not None:
            _note_closed(draft, step, event)
    elif type(body) is e.SignalWaiting:
        waits = draft.waits.pop(body.name)
        if len(waits) > 1:
            place = waits.index(step.step_id)
            draft.waits[body.name] = waits[:place] + waits[place + 1 :]
    return step


def _note_closed(draft: RunState, step: OpenStep, event: Event) -> None:
    """Record how a keyed step was closed: a second success with another result is kept as a diagnostic."""
    attempt = event.engine_attempt_id or step.engine_attempt_id
    result = digest(bytes(event.data.result)) if isinstance(event.data, e.StepCompleted) else ""
    closed = ClosedEffect(step.step_id, step.logical_attempt_id, (attempt,) if result else (), result)
    others = [each for each in draft.closed_effects if each.step_id != step.step_id]
    _set(draft, "closed_effects", (*others, closed)[-CLOSED_EFFECTS:])


def _step_failed(draft: RunState, event: Event) -> None:
    assert isinstance(event.data, e.StepFailed)
    step = _close(draft, event)
    if event.engine_attempt_id is not None:  # an attempt on another node may be ahead of the history
        step = replace(step, engine_attempt_id=event.engine_attempt_id)
    delivered_by = None if draft.status is PAUSED else 0
    draft.failed_steps[step.step_id] = FailedStep(step, event.data.error, delivered_by)
    _record_step_error(draft, event)


def _step_skipped(draft: RunState, event: Event) -> None:
    if draft.failed_steps.pop(event.step_id or "", None) is None:
        _close(draft, event)


def _step_retried(draft: RunState, event: Event) -> None:
    assert isinstance(event.data, e.StepRetried)
    step = draft.open_steps.get(event.step_id or "")
    if step is None or step.kind != "activity":
        raise _step_misfit(draft, event)
    engine_attempt_id = event.engine_attempt_id or step.engine_attempt_id + 1
    draft.open_steps[step.step_id] = replace(
        step,
        engine_attempt_id=engine_attempt_id,
        token=retry_token(step.step_id, engine_attempt_id),
        due_at=event.data.due_at,
        first_engine_attempt_id=step.first_engine_attempt_id
        + (event.data.reason == e.NOT_BEGUN)
        + event.data.uncounted,
        is_detached=False,
        error=event.data.error or step.error,
        is_unbegun=event.data.reason == e.NOT_BEGUN and event.data.due_at is None,
        effect=None if step.key is None else effect_after_retry(step, event, event.data),
    )
    if event.data.error is not None:
        _set(draft, "retried", step.step_id)
    _record_step_error(draft, event)


def _step_detached(draft: RunState, event: Event) -> None:
    assert isinstance(event.data, e.StepDetached)
    step = _left_open(draft, event)
    draft.open_steps[step.step_id] = replace(step, due_at=event.data.until)


def _left_open(draft: RunState, event: Event) -> OpenStep:
    """Return the activity of an event as it is after the event, from which on no node executes it."""
    step = draft.open_steps.get(event.step_id or "")
    if step is None or step.kind != "activity":
        raise _step_misfit(draft, event)
    attempt = event.engine_attempt_id or step.engine_attempt_id
    return replace(step, engine_attempt_id=attempt, token=retry_token(step.step_id, attempt), is_detached=True)


def _step_unresolved(draft: RunState, event: Event) -> None:
    """Leave the step to an operator: like a detached step, no node executes it."""
    assert isinstance(event.data, e.StepUnresolved)
    step = _left_open(draft, event)
    effect = effect_after_doubt(step, event, event.data)
    draft.open_steps[step.step_id] = replace(step, due_at=None, is_unbegun=False, effect=effect)
    _record_step_error(draft, event)


def _step_succeeded_late(draft: RunState, event: Event) -> None:
    assert isinstance(event.data, e.StepSucceededLate)
    step = draft.open_steps.get(event.step_id or "")
    if step is not None and step.kind == "activity" and step.logical_attempt_id == event.logical_attempt_id:
        late = LateResult(event.engine_attempt_id or 1, event.data.result)
        known = step.effect or Effect(since=step.opened_at)
        succeeded = (*known.succeeded, late.engine_attempt_id)
        draft.open_steps[step.step_id] = replace(step, effect=replace(known, late=late, succeeded=succeeded))
        return
    attempt = (event.engine_attempt_id or 1,)
    noted = tuple(
        replace(each, attempts=each.attempts + attempt) if each.step_id == event.step_id else each
        for each in draft.closed_effects
    )
    _set(draft, "closed_effects", noted)


def _signal_received(draft: RunState, event: Event) -> None:
    """Close the wait and move the cursor of the signal's name.

    A signal that was addressed to one wait moves no cursor: it may overtake signals that were not. A wait takes only
    one signal, so it cannot take a later one by mistake.
    """
    assert isinstance(event.data, e.SignalReceived)
    _close(draft, event)
    if event.data.addressed_to is None:
        draft.cursors[event.data.name] = event.data.suffix


def _signal_dead_lettered(draft: RunState, event: Event) -> None:
    assert isinstance(event.data, e.SignalDeadLettered)
    if event.data.addressed_to is None:
        draft.cursors[event.data.name] = event.data.suffix


def _child_failed(draft: RunState, event: Event) -> None:
    _close(draft, event)
    _record_step_error(draft, event)


def _update_completed(draft: RunState, event: Event) -> None:
    _close(draft, event)
    _record_step_error(draft, event)


def _task_changed(draft: RunState, event: Event) -> None:
    step = draft.open_steps.get(event.step_id or "")
    if step is None or not isinstance(step.body, e.TaskCreated):
        raise _step_misfit(draft, event)
    body, progress = apply_to_task(step.body, step.task or NO_PROGRESS, event)
    draft.open_steps[step.step_id] = replace(step, body=body, task=progress)


def retry_token(step_id: str, engine_attempt_id: int) -> str:
    """Return the token of one attempt of an activity: it guards the messages for that attempt."""
    return f"{step_id}{ATTEMPT_MARK}{engine_attempt_id}"


_STATUS_EVENTS = frozenset(body for row in TRANSITIONS.values() for body in row)
_BEFORE_START = frozenset(body for body in e.BODIES.values() if body.BEFORE_START)
_HANDLERS: dict[type[e.Body], Callable[[RunState, Event], object]] = {
    **{body: _opener(body, kind) for body, kind in e.OPENING.items()},
    **dict.fromkeys(e.CLOSING, _close),
    **{body: _task_changed for body in e.BODIES.values() if body.CHANGES == "task"},
    # What does more than open, close or change a step:
    e.RunQueued: _queued,
    e.InputReplaced: _input_replaced,
    e.RunApproved: _approved,
    e.RunStarted: _started,
    e.MarkerRecorded: _marked,
    e.RunPaused: _paused,
    e.RunResumed: _resumed,
    e.RunFailed: _record_error,
    e.RunCancelRequested: _cancel_requested,
    e.RunTimedOut: _timed_out,
    e.ContinuedAsNew: _rotated,
    e.SignalAccepted: _signal_accepted,
    e.StepRetried: _step_retried,
    e.StepDetached: _step_detached,
    e.StepUnresolved: _step_unresolved,
    e.StepSucceededLate: _step_succeeded_late,
    e.StepFailed: _step_failed,
    e.StepSkipped: _step_skipped,
    e.SignalReceived: _signal_received,
    e.SignalDeadLettered: _signal_dead_lettered,
    e.ChildFailed: _child_failed,
    e.UpdateCompleted: _update_completed,
    e.AttributesSet: _attributes_set,
}

_RULES = {body: (body in _STATUS_EVENTS, body.KEYED_BY == "run", _HANDLERS.get(body)) for body in e.BODIES.values()}
"""How events of each body type are folded: whether they change the status and are counted, and their handler."""
