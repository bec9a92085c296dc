"""Forks: a run that begins with the recorded results of another, up to one of its events.

Rules of this file:
1. A history can be cut where a commit ended, because a crash after that commit leaves exactly this history, and it is
   replayed. It can also be cut after its first event. Nothing is cut where a child is open, which reports to its own
   parent, nor after the end of the run.
2. The fork is a run of its own. Every event gets the key and the id that it has in a run of this id (EVT-4), and what
   refers to them follows: parents of events, ids of tasks, and what rotations carry.
3. Ids and draws of the program stay as they were recorded, so the fork keeps the seed of the run that it is from.
4. What was open is open again: activities are dispatched anew, with all the attempts of their policy; a keyed one is
   verified first. Timers, deadlines, waits and tasks keep their instants. Signals that were not consumed, progress of
   activities, and outcomes that are reported by token stay with the other run.
5. An approval is of a run with its input. What was not approved waits for an approval of its own, and so does a run
   with another input.
"""

from collections.abc import Sequence
from re import compile as pattern

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core import run_timeouts, tasks
from holdfast.core.codec import decode, encode
from holdfast.core.event_writer import EventWriter, start_message
from holdfast.core.events import EngineRunRef, Event
from holdfast.core.instants import Instant
from holdfast.core.keys import event_id, event_key
from holdfast.core.messages import Message
from holdfast.core.state import RunState, awaits_approval, retry_token, state_of
from holdfast.errors import Conflict, InvalidInput

FORKED = "forked"
"""Why the activities that were open are dispatched again."""

_UUID = pattern(rb"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_CLOSES_CHILD = frozenset(body for body, kinds in e.CLOSING.items() if "child" in kinds)


class Fork(Struct, frozen=True):
    """What a fork begins with."""

    events: tuple[Event, ...]
    messages: tuple[Message, ...]
    state: RunState


def find_cut(history: Sequence[Event], at: int) -> int:
    """Return the last event, not after `at`, behind which a history can be cut."""
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


def before_failure(history: Sequence[Event]) -> int:
    """Return the event before the failed step that has ended the run, or the last one if no such step is known.

    Where something was begun after the step had failed, such as what undoes other steps, the workflow has handled the
    failure: then to go back behind it would forget what was done since.
    """
    for event in reversed(history[:-1] if isinstance(history[-1].data, e.RunFailed) else ()):
        kind = type(event.data)
        if kind in (e.StepFailed, e.ChildFailed):
            return event.run_seq - 1
        if kind in e.OPENING or kind in e.CLOSING or kind in e.CLOSING_ALL:
            break
    return history[-1].run_seq


def fork(
    history: Sequence[Event], run_id: str, cut: int, now: Instant, by: EngineRunRef, input: Raw | None = None
) -> Fork:
    """Return the run that begins with a history up to this event. `input` is instead of what the other run had."""
    first = history[0].data
    if not isinstance(first, e.RunQueued):
        raise Conflict(f"run {history[0].run_id}: its history does not begin with its start")
    if find_cut(history, cut) != cut:
        raise Conflict(f"run {history[0].run_id} cannot be cut after event {cut}", run_id=history[0].run_id)
    source = first.forked_from
    origin = e.ForkedFrom(history[0].run_id, cut, source.seed if source is not None else history[0].run_id, now)
    kept = history[:cut]
    if input is not None and any(isinstance(event.data, e.ContinuedAsNew) for event in kept):
        raise InvalidInput("input: before this event the run has begun again with an input of its own", field="input")
    if input is not None and any(isinstance(event.data, e.RunApproved) for event in kept):
        problem = "input: another input was approved; fork the run at event 1, and the fork waits for its own approval"
        raise InvalidInput(problem, field="input")
    events = _rewritten(kept, run_id, origin, input)
    state = state_of(run_id, events)
    writer = EventWriter(state, now, by)
    _open_again(state, writer)
    run_timeouts.schedule_again(state, writer)
    # An approval leaves the run the message that starts it.
    start = () if awaits_approval(state) else (start_message(run_id, now, state.start_at),)
    every = (*events, *writer.events)
    return Fork(every, (*start, *writer.messages), state_of(run_id, every))


def _rewritten(history: Sequence[Event], run_id: str, origin: e.ForkedFrom, input: Raw | None) -> list[Event]:
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
                data=_body(event.data, ids, origin, input),
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


def _body(body: e.Body, ids: dict[str, str], origin: e.ForkedFrom, input: Raw | None) -> e.Body:
    if isinstance(body, e.RunQueued):
        return replace(
            body,
            forked_from=origin,
            input=body.input if input is None else input,
            depth=0,
            **dict.fromkeys(("parent_run_id", "parent_step_id", "parent_token", "retry_of", "schedule")),
        )
    if isinstance(body, e.InputReplaced) and input is not None:
        return replace(body, input=input)
    if isinstance(body, e.TaskCreated):
        return replace(body, task_id=ids.get(body.task_id, body.task_id))
    if isinstance(body, e.ContinuedAsNew):
        text = _UUID.sub(lambda found: ids.get(found[0].decode(), found[0].decode()).encode(), bytes(body.carried))
        carried = decode(text, dict[str, object])
        carried |= {"parent_run_id": None, "parent_step_id": None, "parent_token": None, "depth": 0}
        return replace(body, carried=encode({**carried, "forked_from": origin}))
    return body


def _open_again(state: RunState, writer: EventWriter) -> None:
    """Write what goes on with the steps that are open, and schedule what they wait for."""
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
    """Return the place, from 0, at which two parts of histories differ in what they record; None if they do not.

    Ids and instants do not count, nor who wrote an event. Where one is longer it differs at the end of the other.
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
