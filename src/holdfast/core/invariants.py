"""The catalogue of load invariants: what holds for every run at every moment, after any crash.

An invariant is a pure function from a view to the list of its violations, so tests, the simulator and operators use the
same catalogue. A **view** is what a store holds of a run, as plain data, read at one moment;
this module does not know stores. `check` applies the whole catalogue; `INVARIANTS` lists it.

Invariants about the state fold the view's events. If they do not fold, `history_folds` reports it, and the others
report nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Set
from functools import cached_property
from itertools import chain, pairwise
from typing import TypeVar

from msgspec import Struct

from holdfast.core import events as e
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.decide import RECORDED_AS, is_taken
from holdfast.core.events import BODIES, Event
from holdfast.core.index_rows import (
    FOR_PEOPLE,
    ActivityRecord,
    RuntimeSnapshot,
    Task,
    Wait,
    record_changes,
    runtime_snapshot,
)
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import is_of_engine
from holdfast.core.keys import event_id, event_key, signal_storage_key
from holdfast.core.messages import (
    INPUT_STEP,
    OUTCOME_SIGNAL,
    AcceptedSignalResult,
    Message,
    Signal,
    with_arrival_times,
)
from holdfast.core.state import (
    PAUSED,
    TERMINAL,
    OpenStep,
    RunState,
    RunStatus,
    awaits_approval,
    carried_by,
    fold_onto,
    kept_open,
    own_copy,
    state_of,
)
from holdfast.core.tasks import next_instants
from holdfast.errors import RunError


class RunView(Struct, frozen=True, kw_only=True, dict=True):
    """Everything that a store holds of one run, at the moment `now`.

    `signals` is the whole mailbox, including consumed signals. `messages` are the due ones, which a store returns;
    `ready_at` is the instant of the next one. `acknowledged` are the answers that senders got.
    """

    run_id: str
    status: RunStatus
    version: int
    now: Instant
    snapshot: RuntimeSnapshot | None = None
    events: tuple[Event, ...] = ()
    messages: tuple[Message, ...] = ()
    signals: tuple[Signal, ...] = ()
    acknowledged: tuple[AcceptedSignalResult, ...] = ()
    waits: tuple[Wait, ...] = ()
    tasks: tuple[Task, ...] = ()
    parent_run_id: str | None = None
    tenant: str = "default"
    project: str = "default"
    environment: str = "default"
    letters: tuple[DeadLetter, ...] = ()
    records: tuple[ActivityRecord, ...] = ()
    """The activity records that are not completed."""
    lease_owner: str | None = None
    ready_at: Instant | None = None
    queued_at: Instant | None = None

    @cached_property
    def folded(self) -> RunState | RunError:
        """The state to which the events fold, or why they do not. All invariants share it and none modifies it."""
        try:
            return state_of(self.run_id, self.events)
        except RunError as problem:
            return problem

    @property
    def is_finished(self) -> bool:
        """Whether the status is terminal."""
        return self.status in TERMINAL

    @property
    def is_in_hand(self) -> bool:
        """Whether a node owns the run, or can claim it now."""
        return self.lease_owner is not None or (self.ready_at is not None and self.ready_at <= self.now)


class SystemView(Struct, frozen=True):
    """All runs of an installation."""

    runs: tuple[RunView, ...]

    def by_id(self) -> dict[str, RunView]:
        """Return the runs by their ids."""
        return {run.run_id: run for run in self.runs}


class Violation(Struct, frozen=True):
    """An invariant that does not hold. `run_id` is None if more than one run is concerned."""

    invariant: str
    run_id: str | None
    problem: str


class Invariant(Struct, frozen=True):
    """A sentence that always holds, the rule of the contract behind it, and the function that finds violations."""

    name: str
    rule: str
    sentence: str
    of: type[RunView] | type[SystemView]
    find: Callable[..., list[str]]


INVARIANTS: dict[str, Invariant] = {}
"""The catalogue, by name."""


def check(view: RunView | SystemView) -> list[Violation]:
    """Return every violation of a run, or of a system and all of its runs."""
    run_id = view.run_id if isinstance(view, RunView) else None
    found = [
        Violation(invariant.name, run_id, problem)
        for invariant in INVARIANTS.values()
        if invariant.of is type(view)
        for problem in invariant.find(view)
    ]
    return found if isinstance(view, RunView) else [v for run in view.runs for v in check(run)] + found


def check_drained(view: SystemView) -> list[Violation]:
    """Return every violation, including anything left in the queues after a drain."""
    left = [
        Violation("queues_are_drained", run.run_id, f"ready at {run.ready_at}, with {len(run.messages)} messages")
        for run in view.runs
        if run.messages or (run.ready_at is not None and run.ready_at <= run.now)
    ]
    return check(view) + left


V = TypeVar("V", RunView, SystemView)
Find = Callable[[V], list[str]]


def _invariant(of: type[V], rule: str, sentence: str) -> Callable[[Find[V]], Find[V]]:
    def enter(find: Find[V]) -> Find[V]:
        INVARIANTS[find.__name__] = Invariant(find.__name__, rule, sentence, of, find)
        return find

    return enter


# --- the history ---------------------------------------------------------------------------------------------------


@_invariant(RunView, "EVT-1", "Events are numbered from 1 without a gap, and the last number is the run's version.")
def run_seq_is_gapless(view: RunView) -> list[str]:
    """Find events with a wrong number or of another run, and a version that is not the last number."""
    found = [
        f"event {event.run_seq} stands in place {place}"
        for place, event in enumerate(view.events, 1)
        if event.run_seq != place
    ]
    found += [
        f"event {event.run_seq} is of run {event.run_id!r}" for event in view.events if event.run_id != view.run_id
    ]
    if view.version != len(view.events):
        found.append(f"the version is {view.version} and there are {len(view.events)} events")
    return found


@_invariant(RunView, "EVT-4", "No two events of a run have the same idempotency key.")
def idempotency_keys_are_unique(view: RunView) -> list[str]:
    """Find keys that occur more than once."""
    counts = Counter(event.idempotency_key for event in view.events)
    return [f"{count} events have the key {key}" for key, count in counts.items() if count > 1]


@_invariant(RunView, "EVT-4", "An event's key is the digest of its parts, and its id follows from the key.")
def idempotency_keys_are_exact(view: RunView) -> list[str]:
    """Find keys and ids that do not follow from their events. Events of unknown types are ignored."""
    found: list[str] = []
    occurrences: Counter[str] = Counter()
    first = view.events[0].data if view.events else None
    plan_version = first.plan_version if isinstance(first, e.RunQueued) else ""
    for event in view.events:
        body = BODIES.get(event.event_type)
        if body is None:
            continue
        occurrences[event.event_type] += 1
        if body.KEYED_BY == "step":
            position, attempt = event.step_id or "", event.logical_attempt_id or 1
        else:
            position, attempt = event.caused_by_signal_id or str(occurrences[event.event_type]), 0
        key = event_key(view.run_id, position, attempt, event.event_type, plan_version)
        if event.idempotency_key != key:
            found.append(f"event {event.run_seq} ({event.event_type}) has a key that is not of its parts")
        elif event.event_id != event_id(key):
            found.append(f"event {event.run_seq} ({event.event_type}) has an id that does not follow from its key")
    return found


@_invariant(
    RunView, "INV", "A step has at most one result in each logical attempt; a failed one may be skipped afterwards."
)
def step_results_are_recorded_once(view: RunView) -> list[str]:
    """Find steps that ended more than once in one logical attempt."""
    results: dict[tuple[str, int], list[str]] = {}
    for event in view.events:
        if type(event.data) in e.CLOSING:
            attempt = (event.step_id or "", event.logical_attempt_id or 1)
            results.setdefault(attempt, []).append(event.event_type)
    return [
        f"step {step_id!r} has in logical attempt {attempt} the results {', '.join(types)}"
        for (step_id, attempt), types in results.items()
        if len(types) > 1 and types != ["StepFailed", "StepSkipped"]
    ]


@_invariant(RunView, "EVT-5", "The events fold to a state.")
def history_folds(view: RunView) -> list[str]:
    """Find the first event that cannot follow the ones before it."""
    return [view.folded.message] if isinstance(view.folded, RunError) else []


@_invariant(RunView, "PRJ-4", "The stored status, version and runtime snapshot are those of the folded events.")
def snapshot_equals_fold(view: RunView) -> list[str]:
    """Find stored fields that differ from the fold. A deleted snapshot is not a violation."""
    state = _fold(view)
    if state is None:
        return []
    found = []
    if (view.status, view.version) != (state.status, state.version):
        found.append(f"stored as {view.status} at {view.version}, folded {state.status} at {state.version}")
    if view.snapshot is not None:
        folded = runtime_snapshot(state)
        found += [
            f"the snapshot's {field} is {getattr(view.snapshot, field)!r}, folded {getattr(folded, field)!r}"
            for field in RuntimeSnapshot.__struct_fields__
            if getattr(view.snapshot, field) != getattr(folded, field)
            and not (field in FOR_PEOPLE and not getattr(view.snapshot, field))  # an older version wrote it
        ]
    return found


# --- signals -------------------------------------------------------------------------------------------------------


@_invariant(RunView, "INV", "No acknowledged signal is lost: each is in the mailbox, consumed or not.")
def acknowledged_signals_are_kept(view: RunView) -> list[str]:
    """Find acknowledged signals that are missing."""
    there = {signal_storage_key(view.run_id, signal.name, signal.suffix) for signal in view.signals}
    return [
        f"signal {result.signal_name!r} with id {result.signal_id!r} was acknowledged and is gone"
        for result in view.acknowledged
        if result.workflow_id == view.run_id and result.signal_storage_key not in there
    ]


@_invariant(RunView, "SIG-4", "A consumed signal is in the history, at the recorded number and with its payload.")
def consumed_signals_are_recorded(view: RunView) -> list[str]:
    """Find signals that are marked as consumed and have no event, and such events without a signal."""
    received = {event.run_seq: event for event in view.events if isinstance(event.data, _TAKES_A_SIGNAL)}
    consumed = {signal.consumed_seq: signal for signal in view.signals if signal.consumed_seq is not None}
    dead = {event.caused_by_signal_id for event in view.events if isinstance(event.data, e.SignalDeadLettered)}
    found = [
        f"signal {signal.inbox_seq} was consumed at event {seq}, which does not say so"
        for seq, signal in consumed.items()
        if seq not in received or not _is_of(received[seq], signal)
    ]
    found += [
        f"event {seq} received a signal that is not marked so"
        for seq, event in received.items()
        if isinstance(event.data, e.SignalReceived)
        and seq not in consumed
        and seq > _copied(view)
        and event.caused_by_signal_id not in dead  # an operator has requeued it
    ]
    return found


def _copied(view: RunView) -> int:
    """Return how many events a fork has copied from its original run: their signals are in that run's mailbox."""
    queued = view.events[0].data if view.events else None
    origin = queued.forked_from if isinstance(queued, e.RunQueued) else None
    return 0 if origin is None else origin.run_seq


@_invariant(RunView, "INV", "No signal is consumed twice.")
def signals_are_consumed_once(view: RunView) -> list[str]:
    """Find signals that more than one event received, and events that more than one signal claims."""
    causes = Counter(event.caused_by_signal_id for event in view.events if isinstance(event.data, e.SignalReceived))
    numbers = Counter(signal.consumed_seq for signal in view.signals if signal.consumed_seq is not None)
    found = [f"signal {cause} was received {count} times" for cause, count in causes.items() if count > 1]
    return found + [f"{count} signals were consumed at event {seq}" for seq, count in numbers.items() if count > 1]


@_invariant(
    RunView, "SIG-1", "Signals of one name are consumed in the order of their acceptance, and none falls behind."
)
def signal_order_is_kept(view: RunView) -> list[str]:
    """Find signals out of order, and unconsumed ones behind the cursor. Signals addressed to one wait may overtake."""
    found: list[str] = []
    cursors: dict[str, str] = {}
    for event in view.events:
        body = event.data
        if isinstance(body, e.SignalReceived | e.SignalDeadLettered) and body.addressed_to is None:
            if body.suffix and body.suffix <= cursors.get(body.name, ""):  # empty in a fork: another inbox
                found.append(f"event {event.run_seq} received a signal {body.name!r} from before the cursor")
            cursors[body.name] = body.suffix
    found += [
        f"signal {signal.inbox_seq} ({signal.name!r}) is unconsumed and behind the cursor"
        for signal in view.signals
        if signal.consumed_seq is None and signal.step_id is None and signal.suffix <= cursors.get(signal.name, "")
    ]
    places = [(signal.inbox_seq, signal.suffix) for signal in view.signals]
    if any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(places)):
        found.append("the mailbox is not in the order of acceptance")
    return found


@_invariant(RunView, "SIG-8", "A wait takes nothing that was accepted after its deadline.")
def deadlines_decide(view: RunView) -> list[str]:
    """Find signals that were accepted after the deadline of their wait and still consumed."""
    until = {event.step_id: event.data.until for event in view.events if isinstance(event.data, e.SignalWaiting)}
    came = {signal.id: signal.accepted_at for signal in with_arrival_times(view.signals)}
    return [
        f"event {event.run_seq}: a signal was taken that came after the deadline of its wait"
        for event in view.events
        if isinstance(event.data, e.SignalReceived)
        and (deadline := until.get(event.step_id)) is not None
        and came.get(event.caused_by_signal_id or "", 0) > deadline
    ]


@_invariant(RunView, "WF-6", "No rotation forgets an update: each is answered before it, or carried over.")
def rotations_keep_updates(view: RunView) -> list[str]:
    """Find updates that are neither answered nor carried over when the history rotates.

    Updates of older writers, which recorded no result of the validation, were always answered before.
    """
    found: list[str] = []
    unanswered: dict[str, None] = {}
    for event in view.events:
        body, step_id = event.data, event.step_id or ""
        if isinstance(body, e.UpdateAccepted) and body.was_refused is not None:
            unanswered[step_id] = None
        elif isinstance(body, e.UpdateCompleted):
            unanswered.pop(step_id, None)
        elif isinstance(body, e.ContinuedAsNew):
            kept = kept_open(body)
            lost = [each for each in unanswered if each not in kept]
            found += [f"event {event.run_seq} rotates the history and forgets the update {each!r}" for each in lost]
            unanswered = dict.fromkeys(each for each in unanswered if each in kept)
    return found


@_invariant(RunView, "CAN-1", "The steps that a rotation carries over are as they were before it.")
def rotations_keep_steps(view: RunView) -> list[str]:
    """Find steps that are carried over as open or failed and were not so before the rotation."""
    found: list[str] = []
    if _fold(view) is None:
        return found
    state, next_place = RunState(run_id=view.run_id), 0
    for place, event in enumerate(view.events):
        if not isinstance(event.data, e.ContinuedAsNew) or carried_by(event.data).steps is None:
            continue
        fold_onto(state, view.events[next_place:place])
        before = own_copy(state)
        fold_onto(state, (event,))
        next_place = place + 1
        was: dict[str, object] = {**before.open_steps, **before.failed_steps}
        now: dict[str, object] = {**state.open_steps, **state.failed_steps}
        found += [
            f"event {event.run_seq} rotates the history and changes the step {step_id!r}"
            for step_id, step in now.items()
            if was.get(step_id) != step
        ]
    return found


@_invariant(RunView, "ACT-1", "An outcome that was accepted is recorded before its step is closed by anything else.")
def reported_outcomes_are_recorded(view: RunView) -> list[str]:
    """Find outcomes, reported by token, for steps that are no longer open."""
    state = _fold(view)
    if state is None:
        return []
    return [
        f"the outcome of step {signal.step_id!r} was accepted and will never be recorded"
        for signal in view.signals
        if signal.name == OUTCOME_SIGNAL and signal.consumed_seq is None and signal.step_id not in state.open_steps
        if signal.step_id != INPUT_STEP or state.debounce is None  # a run that has not begun takes it
    ]


# --- waits and tasks -----------------------------------------------------------------------------------------------


@_invariant(RunView, "INV", "No wait has two open tasks.")
def waits_have_one_open_task(view: RunView) -> list[str]:
    """Find steps with more than one open task."""
    counts = Counter(task.step_id for task in view.tasks if task.status == "OPEN")
    return [f"step {step_id!r} has {count} open tasks" for step_id, count in counts.items() if count > 1]


@_invariant(RunView, "TSK-2", "The open tasks are those that the folded events have open.")
def tasks_equal_fold(view: RunView) -> list[str]:
    """Find rows of open tasks that differ from the open task steps."""
    state = _fold(view)
    if state is None:
        return []
    rows = {(task.step_id, task.task_id, task.assignee, task.roles) for task in view.tasks if task.status == "OPEN"}
    steps = {
        (step.step_id, step.body.task_id, step.body.assignee, step.body.roles)
        for step in state.open_steps.values()
        if isinstance(step.body, e.TaskCreated)
    }
    return _differences("task", rows, steps)


@_invariant(RunView, "SIG-9", "The waits that can be found are those that the folded events have open.")
def waits_equal_fold(view: RunView) -> list[str]:
    """Find rows of waits that differ from the open signal steps."""
    state = _fold(view)
    if state is None:
        return []
    rows = {(wait.step_id, wait.name, wait.token, wait.since, wait.until) for wait in view.waits}
    steps = {
        (step.step_id, step.name, step.token or "", step.opened_at, step.due_at)
        for step in state.open_steps.values()
        if step.kind == "signal"
    }
    return _differences("wait", rows, steps)


# --- keyed steps ---------------------------------------------------------------------------------------------------


@_invariant(RunView, "ACT-3", "Every keyed step has its record, from when it is scheduled, as the events say.")
def records_equal_fold(view: RunView) -> list[str]:
    """Find records that are missing or do not follow from the events. Completed ones are not checked."""
    if _fold(view) is None:
        return []
    rows = {_record_row(record) for record in view.records}
    if not any(isinstance(event.data, e.StepStarted) and event.data.idempotency_key for event in view.events):
        return _differences("record", rows, set())
    known = record_changes(RunState(run_id=view.run_id), view.events)
    return _differences("record", rows, {_record_row(record) for record in known if record.status != "completed"})


@_invariant(RunView, "ACT-4", "Every unresolved step has an open task, and every such task an unresolved step.")
def unresolved_steps_are_asked_about(view: RunView) -> list[str]:
    """Find unresolved steps without a task in the inbox, and engine tasks about steps that are not unresolved."""
    state = _fold(view)
    if state is None:
        return []
    asked = {task.step_id for task in view.tasks if task.status == "OPEN" and is_of_engine(task.step_id)}
    effects = [step.effect for step in state.open_steps.values() if step.effect is not None]
    unresolved = {effect.task for effect in effects if effect.task}
    found = [f"the step that task {step_id!r} is about is not unresolved" for step_id in asked - unresolved]
    return found + [f"there is no open task {step_id!r} for an unresolved step" for step_id in unresolved - asked]


# --- going on ------------------------------------------------------------------------------------------------------

_WAITS_FOR_THE_WORLD = frozenset({"signal", "task", "child"})


@_invariant(RunView, "INV", "An unfinished run is leased, ready, or waits for something named.")
def unfinished_runs_can_go_on(view: RunView) -> list[str]:
    """Find runs that nothing will ever wake, and activities that no node executes.

    A run may wait for a signal, a human, a child, an instant, admission, approval, a definition, or the operator who
    paused it. An activity of the owner is different: it needs a node that owns the run, or an instant of its next
    attempt.
    """
    state = _fold(view)
    if state is None or view.is_finished or view.is_in_hand or state.awaits_definition:
        return []
    steps = state.open_steps.values()
    found = [
        f"activity {step.step_id!r} is open and no node has the run"
        for step in steps
        if step.kind == "activity" and not _is_elsewhere(step) and not _is_timed(step, view)
    ]
    is_named = view.ready_at is not None or view.queued_at is not None or state.status is PAUSED
    is_named = is_named or awaits_approval(state)
    if not is_named and not found and not any(s.kind in _WAITS_FOR_THE_WORLD or _is_elsewhere(s) for s in steps):
        found.append(f"the run is {view.status}, and neither leased nor ready nor waiting for anything")
    return found


@_invariant(RunView, "TMR-1", "Every step that is due at an instant has a message that is due then.")
def timers_are_scheduled(view: RunView) -> list[str]:
    """Find open steps with an instant at which the run will not be ready. In a paused run a signal may delay it."""
    state = _fold(view)
    if state is None or view.is_finished or state.awaits_definition:
        return []
    held_by = [signal for signal in view.signals if signal.consumed_seq is None] if state.status is PAUSED else []
    return [
        f"step {step.step_id!r} is due at {due_at} and the run will not be ready then"
        for step in state.open_steps.values()
        for due_at in ((step.due_at or 0,) if _is_timed(step, view) else next_instants(step))
        if (view.ready_at is None or view.ready_at > due_at) and not is_taken(state, step, held_by)
    ]


@_invariant(RunView, "INV", "A finished run has nothing left in any queue.")
def finished_runs_leave_nothing(view: RunView) -> list[str]:
    """Find messages, waits, open tasks, leases and instants that a finished run still has."""
    if not view.is_finished:
        return []
    left = {
        "messages": len(view.messages),
        "waits": len(view.waits),
        "open tasks": sum(task.status == "OPEN" for task in view.tasks),
        "owner": int(view.lease_owner is not None),
        "instant at which it is ready": int(view.ready_at is not None),
        "place in its admission queue": int(view.queued_at is not None),
    }
    return [f"the run is {view.status} and has {count} {what}" for what, count in left.items() if count]


# --- parents and children ------------------------------------------------------------------------------------------


@_invariant(
    SystemView, "INV", "Every child of an unfinished run exists and names its parent, or its failure is recorded."
)
def started_children_exist(view: SystemView) -> list[str]:
    """Find children that are missing or have another parent. Retention may have deleted those of finished runs.

    A child that could not be created has failed in the history, or a message or a dead letter about it exists.
    """
    runs = view.by_id()
    return [
        f"run {parent.run_id!r} started the child {body.child_run_id!r}, which is not there as its child"
        for parent in view.runs
        if not parent.is_finished
        for step_id, body in _children(parent)
        if body.child_run_id not in runs or runs[body.child_run_id].parent_run_id != parent.run_id
        if not _knows_of(parent, step_id, body.child_run_id)
    ]


@_invariant(SystemView, "API-4", "A family is of one tenant, project and environment.")
def families_are_of_one_tenant(view: SystemView) -> list[str]:
    """Find children of another tenant, project or environment than their parents."""
    runs = view.by_id()
    return [
        f"run {child.run_id!r} is of {_place(child)}, and its parent {parent.run_id!r} of {_place(parent)}"
        for child in view.runs
        if child.parent_run_id is not None and (parent := runs.get(child.parent_run_id)) is not None
        if _place(child) != _place(parent)
    ]


@_invariant(SystemView, "INV", "The parent of an unfinished child is there.")
def unfinished_children_have_parents(view: SystemView) -> list[str]:
    """Find orphans."""
    runs = view.by_id()
    return [
        f"run {child.run_id!r} is {child.status} and its parent {child.parent_run_id!r} is gone"
        for child in view.runs
        if child.parent_run_id is not None and not child.is_finished and child.parent_run_id not in runs
    ]


@_invariant(SystemView, "INV", "No run waits for a child that has ended.")
def ended_children_are_reported(view: SystemView) -> list[str]:
    """Find parents that wait for a finished child, with nothing to wake them."""
    runs = view.by_id()
    return [
        f"run {parent.run_id!r} waits for the child {child_id!r}, which is {runs[child_id].status}"
        for parent in view.runs
        if not parent.is_in_hand and (state := _fold(parent)) is not None
        for child_id in _awaited_children(state)
        if child_id in runs and runs[child_id].is_finished
    ]


# --- helpers -------------------------------------------------------------------------------------------------------


def _fold(view: RunView) -> RunState | None:
    return None if isinstance(view.folded, RunError) else view.folded


_TAKES_A_SIGNAL: tuple[type[e.Body], ...] = (e.SignalReceived, e.SignalDeadLettered, *chain(*RECORDED_AS.values()))


def _is_of(event: Event, signal: Signal) -> bool:
    """Return whether the event is the one that received this signal."""
    body = event.data
    if signal.name in RECORDED_AS:
        return isinstance(body, RECORDED_AS[signal.name]) and event.caused_by_signal_id == signal.id
    if isinstance(body, e.SignalDeadLettered):
        found = event.caused_by_signal_id, body.name, body.signal_id, body.suffix, body.addressed_to
        return found == (signal.id, signal.name, signal.signal_id, signal.suffix, signal.step_id)
    return isinstance(body, e.SignalReceived) and (
        event.caused_by_signal_id,
        body.name,
        body.signal_id,
        body.suffix,
        body.addressed_to,
        bytes(body.payload),
    ) == (signal.id, signal.name, signal.signal_id, signal.suffix, signal.step_id, bytes(signal.payload))


def _is_timed(step: OpenStep, view: RunView) -> bool:
    """Return whether the step has a message that is due at its instant. A task's instant is only shown to people."""
    # The message for an activity's next attempt is deleted, without an event, when that begins; a job has none.
    if step.due_at is None or step.kind == "task" or (step.queue and not step.is_detached):
        return False
    return step.kind != "activity" or step.is_detached or step.due_at > view.now


def _is_elsewhere(step: OpenStep) -> bool:  # another process than the run's owner reports its outcome
    return step.is_detached or step.queue != ""


def _record_row(record: ActivityRecord) -> tuple[object, ...]:
    scope = record.step_id, record.activity_name, record.idempotency_key
    return *scope, record.status, record.created_at, record.updated_at


def _differences(what: str, rows: Set[tuple[object, ...]], steps: Set[tuple[object, ...]]) -> list[str]:
    found = [f"there is a row for the {what} of {row[0]!r}, which the history does not have" for row in rows - steps]
    return sorted(found + [f"there is no row for the {what} of {step[0]!r}" for step in steps - rows])


def _children(view: RunView) -> Iterable[tuple[str, e.ChildStarted]]:
    return ((event.step_id or "", event.data) for event in view.events if isinstance(event.data, e.ChildStarted))


def _knows_of(parent: RunView, step_id: str, child_run_id: str) -> bool:
    """Return whether a parent has an event, a message or a dead letter about a child that was not created."""
    return (
        any(event.step_id == step_id and isinstance(event.data, e.ChildFailed) for event in parent.events)
        or any(message.step_id == step_id and message.type == "SubWorkflowCompleted" for message in parent.messages)
        or any(letter.reason == "refused" and repr(child_run_id) in letter.detail for letter in parent.letters)
    )


def _place(view: RunView) -> str:
    return f"{view.tenant}/{view.project}/{view.environment}"


def _awaited_children(state: RunState) -> Iterable[str]:
    return (step.body.child_run_id for step in state.open_steps.values() if isinstance(step.body, e.ChildStarted))
