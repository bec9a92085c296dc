"""Forks: a run that begins with the recorded results of another, up to one of its events.

Rules of this file:
1. A history can be cut at the end of a commit, because a crash after that commit leaves exactly this history, and it is
   replayed. It can also be cut after its first event. It cannot be cut where a child is open, because a child reports
   to its own parent, nor after the end of the run.
2. The fork is a separate run. Every event gets the key and the id that it has in a run with this id (EVT-4), and all
   references to them are changed too: parents of events, ids of tasks, and what rotations carry.
3. The program's ids and random numbers stay as recorded, so the fork keeps the seed of the original run. While the
   recorded part is replayed, the program sees the same facts about its run as it did then (`FormerRun`).
4. Open steps are opened again: activities are dispatched anew, with all the attempts of their policy, and keyed ones
   are verified first. Timers, deadlines, waits and tasks keep their instants. Progress of activities, outcomes that are
   reported by token, and unconsumed signals stay with the original run, except signals that it had sent to itself. So
   no cursor is copied: no signal that the fork's inbox accepts may fall behind what another run has consumed.
5. An approval covers a run with its input. A fork of a run that was not yet approved needs its own approval, and so
   does a fork with another input.
6. A failed run is continued without the failures that ended it. Outcomes that arrived in the commit of its end, or
   after the failure, are kept: the fork begins as a run that was paused before they arrived, and its program gets them
   when a node with its code resumes it. Open steps that report only to the failed run (a child, or the holder of a
   callback's token) are started again: the fork begins before them.
"""

from collections.abc import Collection, Sequence
from re import compile as pattern
from typing import Any

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core import run_timeouts, tasks
from holdfast.core.codec import decode, encode
from holdfast.core.event_writer import EventWriter, start_message
from holdfast.core.events import EngineRunRef, ErrorInfo, Event
from holdfast.core.instants import Instant
from holdfast.core.keys import CALLBACK, RESERVED_PREFIX, event_id, event_key, is_lock
from holdfast.core.messages import Message, SignalRequest
from holdfast.core.restarts import number_of_id
from holdfast.core.state import RunState, awaits_approval, retry_token, state_of
from holdfast.errors import Conflict, InvalidInput

FORKED = "forked"
"""The reason for which open activities are dispatched again."""

CONTINUED = "continued from where it failed"
"""The reason of the pause of a fork whose program gets outcomes when it is resumed."""

NOWHERE = ""
"""The cursor of copied signals: they were in another inbox, and the fork's is empty."""

_UUID = pattern(rb"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_CLOSES_CHILD = frozenset(body for body, kinds in e.CLOSING.items() if "child" in kinds)
_FAILURES = (e.StepFailed, e.ChildFailed, e.RunTimedOut)
_ACTS = {*e.OPENING, e.ContinuedAsNew, e.UpdateCompleted, e.SignalSent}


class Kept(Struct, frozen=True):
    """The part of a history that a fork keeps: its first events, and outcomes that its program gets afterwards."""

    events: Sequence[Event]
    outcomes: Sequence[Event] = ()


class Fork(Struct, frozen=True):
    """The initial contents of a fork."""

    queued: e.RunQueued
    copied: int
    """How many of the events are copied from the original run."""
    events: tuple[Event, ...]
    messages: tuple[Message, ...]
    state: RunState
    signals: tuple[SignalRequest, ...]
    """The signals that the original run had sent to itself and had not received."""


def find_cut(history: Sequence[Event], at: int) -> int:
    """Return the last event, at or before `at`, after which a history can be cut."""
    cut = 1
    children: set[str] = set()
    for event, following in zip(history, [*history[1:], None], strict=True):
        kind = type(event.data)
        if event.run_seq > at or kind.LEADS_TO in e.TERMINAL:
            break
        if kind is e.ChildStarted:
            children.add(event.step_id or "")
        elif kind in _CLOSES_CHILD:
            children.discard(event.step_id or "")
        elif kind in e.CLOSING_ALL:
            children.clear()
        if not children and (following is None or following.persisted_at != event.persisted_at):
            cut = event.run_seq
    return cut


def kept_until(history: Sequence[Event], cut: int) -> Kept:
    """Return the part that is kept of a history that is cut after this event."""
    if find_cut(history, cut) != cut:
        raise Conflict(f"run {history[0].run_id} cannot be cut after event {cut}", run_id=history[0].run_id)
    return Kept(history[:cut])


def kept_to_continue(history: Sequence[Event]) -> Kept:
    """Return what is kept of a run to continue it: for a failed run, all but the failures that ended it.

    If the workflow began or sent something after a step had failed, such as a compensation, a signal or the answer to
    an update, it has handled the failure: forgetting the failure would also forget what was done since.
    """
    end = len(history) - 1
    if not isinstance(history[end].data, e.RunFailed):
        return kept_until(history, find_cut(history, len(history)))
    failures = _last_failures(history)
    place = min(failures) if failures else _last_outcome(history[:end])
    while (cut := _before(history, place)) > 1:
        kept = Kept(history[:cut], _outcomes_since(history[:end], cut, failures))
        elsewhere = _open_elsewhere(events_of(kept))
        if not elsewhere:
            return kept
        # A child reports to its own parent, and a callback's token belongs to the run that made it: the fork starts
        # another child and makes another token, and everything after that is left out.
        end = next(at for at, event in enumerate(history) if event.step_id in elsewhere)
        failures, place = set(), _last_outcome(history[:end])
    return Kept(history[:1])


def failures_since_rotation(kept: Kept) -> list[int]:
    """Return the positions of the failures since the last rotation that a fork can retry."""
    failed: list[int] = []
    callbacks: set[str | None] = set()
    for place, event in enumerate(kept.events):
        if isinstance(event.data, e.ContinuedAsNew):
            failed.clear()
        elif _is_callback(event.data):
            callbacks.add(event.step_id)
        elif isinstance(event.data, e.StepFailed) and event.step_id not in callbacks:
            failed.append(place)
    return failed


def without(kept: Kept, places: Collection[int]) -> Kept:
    """Return what is kept without the failures at these positions, and without the steps cancelled because of them."""
    events: list[Event] = []
    is_left_out = False
    for place, event in enumerate(kept.events):
        is_left_out = place in places or (is_left_out and isinstance(event.data, e.StepCancelled))
        if not is_left_out:
            events.append(replace(event, run_seq=len(events) + 1))
    return Kept(events, kept.outcomes)


def has_handled_failure(history: Sequence[Event]) -> bool:
    """Return whether a run ended by a failure after which it did more, such as compensating other steps."""
    last = history[-1].data
    if not isinstance(last, e.RunFailed) or _last_failures(history):
        return False
    bodies = (event.data for event in history)
    failed = {_gist_of(body.error) for body in bodies if isinstance(body, e.StepFailed | e.ChildFailed)}
    error: ErrorInfo | None = last.error
    while error is not None and _gist_of(error) not in failed:
        error = error.cause
    return error is not None or last.timeout != ""


def _gist_of(error: ErrorInfo) -> tuple[str, str]:
    return error.code, error.message


def _last_failures(history: Sequence[Event]) -> set[int]:
    """Return the positions of the failures after which a failed run neither began nor sent anything."""
    bodies = [event.data for event in history]
    started = (body for body in bodies if isinstance(body, e.ChildStarted))
    locks = {child.child_run_id for child in started if is_lock(child.plan_id)}
    found = set()
    for place in range(len(history) - 2, 0, -1):
        body = bodies[place]
        if isinstance(body, _FAILURES):
            found.add(place)
        elif type(body) not in _ACTS or _is_retry(history[place]):
            continue
        elif getattr(body, "run_id", None) not in locks:  # a signal releases a lock
            break
    return found


def _is_retry(event: Event) -> bool:
    """Return whether this event records an operator's retry of a failed step."""
    return isinstance(event.data, e.StepStarted) and event.caused_by_signal_id is not None


def _last_outcome(history: Sequence[Event]) -> int:
    return next((place for place in range(len(history) - 1, 0, -1) if type(history[place].data) in e.OUTCOMES), 1)


def _open_elsewhere(history: Sequence[Event]) -> set[str]:
    """Return the open steps that report their outcome to this run and not to a fork of it."""
    steps = state_of(history[0].run_id, history).open_steps.values()
    return {step.step_id for step in steps if isinstance(step.body, e.ChildStarted) or _is_callback(step.body)}


def _is_callback(body: e.Body) -> bool:
    return isinstance(body, e.StepStarted) and body.name == CALLBACK


def _before(history: Sequence[Event], place: int) -> int:
    """Return how many events precede an outcome and those delivered along with it, in one commit or pause."""
    paused = [False] * len(history)
    for at, event in enumerate(history[:-1]):
        paused[at + 1] = _pauses(event.data) or (paused[at] and type(event.data) is not e.RunResumed)
    while place > 1 and (paused[place] or _comes_with(history[place - 1], history[place])):
        place -= 1
    return place


def _pauses(body: e.Body) -> bool:
    """Return whether a run is paused from this event on: an operator's command precedes its pause."""
    return isinstance(body, e.RunPaused) or (isinstance(body, e.SignalAccepted) and body.name == "PAUSE")


def _comes_with(event: Event, following: Event) -> bool:
    return type(event.data) in e.OUTCOMES and event.persisted_at == following.persisted_at


def _outcomes_since(history: Sequence[Event], cut: int, failures: set[int]) -> list[Event]:
    """Return the outcomes after a cut for steps that are open at the cut, and a cancellation; without failures."""
    is_open = dict(state_of(history[0].run_id, history[:cut]).open_steps)
    has_timed_out = any(isinstance(history[place].data, e.RunTimedOut) for place in failures)
    kept: list[Event] = []
    for place, event in enumerate(history[cut:], cut):
        kind = type(event.data)
        if place in failures or kind not in e.OUTCOMES:
            continue
        if (step := is_open.pop(event.step_id or "", None)) is not None:  # an operator may have retried it since
            kept.append(replace(event, logical_attempt_id=event.logical_attempt_id and step.logical_attempt_id))
        elif kind is e.RunCancelRequested and not has_timed_out:
            kept.append(event)
    return kept


def events_of(kept: Kept) -> list[Event]:
    """Return what is kept as one history, with a pause before the outcomes that the program gets afterwards."""
    if not kept.outcomes:
        return list(kept.events)
    pause = replace(
        kept.events[-1],
        event_id="",
        event_type="RunPaused",
        step_id=None,
        engine_attempt_id=None,
        logical_attempt_id=None,
        data=e.RunPaused(CONTINUED, ErrorInfo("UnhandledError", CONTINUED)),
        idempotency_key="",
        caused_by_signal_id=None,
        parent_event_id=None,
    )
    return [*kept.events, *(replace(event, run_seq=0) for event in (pause, *kept.outcomes))]


def fork(
    kept: Kept,
    run_id: str,
    now: Instant,
    by: EngineRunRef,
    input: Raw | None = None,
    retry: e.RetryOf | None = None,
) -> Fork:
    """Return the run that begins with what is kept of another. `input` replaces the input of the original run.

    With `retry` the fork is an operator's retry of the original run.
    """
    source, first = kept.events[0].run_id, kept.events[0].data
    if not isinstance(first, e.RunQueued):
        raise Conflict(f"run {source}: its history does not begin with its start")
    if input is not None and any(isinstance(event.data, e.ContinuedAsNew) for event in kept.events):
        raise InvalidInput("input: before this event the run has begun again with an input of its own", field="input")
    if input is not None and any(isinstance(event.data, e.RunApproved) for event in kept.events):
        problem = "input: another input was approved; fork the run at event 1, and the fork waits for its own approval"
        raise InvalidInput(problem, field="input")
    history = events_of(kept)
    seed = source if first.forked_from is None else first.forked_from.seed
    origin = e.ForkedFrom(source, len(history), seed, now, _formers(source, first, len(history)))
    queued = replace(
        first,
        forked_from=origin,
        input=first.input if input is None else input,
        depth=0,
        retry_of=retry,
        **dict.fromkeys(("parent_run_id", "parent_step_id", "parent_token", "schedule")),
    )
    events = _rewritten(history, run_id, queued, input)
    state = state_of(run_id, events)
    writer = EventWriter(state, now, by)
    _open_again(state, writer)
    run_timeouts.schedule_again(state, writer)
    # An approval leaves the run the message that starts it.
    start = () if awaits_approval(state) else (start_message(run_id, now, state.start_at),)
    every = (*events, *writer.events)
    signals = tuple(_sent_to_itself(history, origin.formers, run_id))
    return Fork(queued, len(history), every, (*start, *writer.messages), state_of(run_id, every), signals)


def attempt_of(run_id: str, queued: e.RunQueued) -> int:
    """Return the number of a run's attempt. Retries and restarts count; forks and debounced starts do not."""
    if queued.retry_of is not None:
        return queued.retry_of.attempt
    if queued.forked_from is not None:
        return queued.forked_from.formers[-1].attempt
    return 1 if queued.debounce is not None else number_of_id(run_id)


def _formers(run_id: str, queued: e.RunQueued, count: int) -> tuple[e.FormerRun, ...]:
    """Return the runs that recorded the first `count` events of a run."""
    earlier = () if queued.forked_from is None else queued.forked_from.formers
    retry_of = None if queued.retry_of is None else queued.retry_of.run_id
    own = e.FormerRun(count, run_id, attempt_of(run_id, queued), queued.parent_run_id, retry_of, queued.schedule)
    whole = sum(each.last_event < count for each in earlier)
    return (*earlier[:whole], replace(earlier[whole], last_event=count) if whole < len(earlier) else own)


def _sent_to_itself(history: Sequence[Event], formers: Sequence[e.FormerRun], run_id: str) -> list[SignalRequest]:
    """Return the signals that a run had sent to itself and not received: a replay does not send them again."""
    waiting: dict[tuple[str, str], SignalRequest | None] = {}
    for place, event in enumerate(history, 1):
        body = event.data
        if isinstance(body, e.SignalReceived | e.SignalDeadLettered):
            waiting[body.name, body.signal_id] = None
        elif isinstance(body, e.SignalSent) and not body.name.startswith(RESERVED_PREFIX):
            sender = next((former.run_id for former in formers if place <= former.last_event), None)
            request = SignalRequest(
                run_id=run_id,
                name=body.name,
                payload=body.payload,
                signal_id=body.signal_id,
                step_id=body.addressed_to,
            )
            if body.run_id == sender:
                waiting.setdefault((body.name, body.signal_id), request)
    return [request for request in waiting.values() if request is not None]


def _rewritten(history: Sequence[Event], run_id: str, queued: e.RunQueued, input: Raw | None) -> list[Event]:
    ids: dict[str, str] = {}
    counts: dict[str, int] = {}
    events: list[Event] = []
    version = getattr(history[0].data, "plan_version", "")
    for event in history:
        key = _key(event, run_id, version, counts)
        ids[event.event_id] = event_id(key)
        events.append(
            replace(
                event,
                run_id=run_id,
                run_seq=0,
                persisted_at=0,
                event_id=ids[event.event_id],
                idempotency_key=key,
                parent_event_id=ids.get(event.parent_event_id or "", event.parent_event_id),
                data=_body(event.data, ids, queued, input),
            )
        )
    return events


def _key(event: Event, run_id: str, version: str, counts: dict[str, int]) -> str:
    if isinstance(event.data, e.UnknownBody):
        return event_key(run_id, event.idempotency_key, 0, event.event_type, version)
    if event.data.KEYED_BY == "step":
        return event_key(run_id, event.step_id or "", event.logical_attempt_id or 1, event.event_type, version)
    counts[event.event_type] = counts.get(event.event_type, 0) + 1
    position = event.caused_by_signal_id or str(counts[event.event_type])
    return event_key(run_id, position, 0, event.event_type, version)


def _body(body: e.Body, ids: dict[str, str], queued: e.RunQueued, input: Raw | None) -> e.Body:
    if isinstance(body, e.RunQueued):
        return queued
    if isinstance(body, e.InputReplaced) and input is not None:
        return replace(body, input=input)
    if isinstance(body, e.TaskCreated):
        return replace(body, task_id=ids.get(body.task_id, body.task_id))
    if isinstance(body, e.SignalReceived | e.SignalDeadLettered):
        return replace(body, suffix=NOWHERE)
    if isinstance(body, e.ContinuedAsNew):
        text = _UUID.sub(lambda found: ids.get(found[0].decode(), found[0].decode()).encode(), bytes(body.carried))
        carried = decode(text, dict[str, Any])
        carried |= {"parent_run_id": None, "parent_step_id": None, "parent_token": None, "depth": 0}
        carried["cursors"] = dict.fromkeys(carried.get("cursors", ()), NOWHERE)
        if queued.retry_of is not None and "origin" in carried:
            carried["origin"] |= {"retry_of": queued.retry_of.run_id, "attempt": queued.retry_of.attempt}
        return replace(body, carried=encode({**carried, "forked_from": queued.forked_from}))
    return body


def _open_again(state: RunState, writer: EventWriter) -> None:
    """Write the events that continue the open steps, and schedule their messages."""
    for step in state.open_steps.values():
        body = step.body
        if isinstance(body, e.StepStarted) and not step.is_unresolved:
            writer.retry(step, e.StepRetried(FORKED, writer.now, uncounted=step.attempt))
            token = retry_token(step.step_id, step.engine_attempt_id + 1)
            writer.schedule("RetryDue", step.step_id, token, writer.now)
            writer.schedule_deadline(step.step_id, step.logical_attempt_id, body.options)
        elif isinstance(body, e.TaskCreated):
            tasks.schedule_again(step, writer)
        elif step.due_at is not None and step.token is not None:
            writer.schedule("TimerDue", step.step_id, step.token, step.due_at)


def first_difference(events: Sequence[Event], others: Sequence[Event]) -> int | None:
    """Return the position, from 0, at which two parts of histories record different things; None if they do not.

    Ids, instants and the writers of events are ignored. If one part is longer, they differ at the end of the other.
    """
    for place, (event, other) in enumerate(zip(events, others, strict=False)):
        if _gist(event) != _gist(other):
            return place
    return min(len(events), len(others)) if len(events) != len(others) else None


def _gist(event: Event) -> tuple[object, ...]:
    body: object = replace(event.data, by=None)
    if isinstance(body, e.RunQueued):
        body = (body.plan_id, body.plan_version, body.input)
    elif isinstance(body, e.TaskCreated):
        body = replace(body, task_id="", due_at=None)
    elif isinstance(body, e.ChildStarted):
        body = replace(body, child_run_id="")
    elif isinstance(body, e.ContinuedAsNew | e.InputReplaced):
        body = body.input
    elif isinstance(body, e.SignalReceived):
        body = (body.name, body.payload)
    elif isinstance(body, e.TimerStarted | e.SignalWaiting | e.StepRetried):
        body = type(body)
    return event.event_type, event.step_id, event.logical_attempt_id, body
