"""Random turns: valid ones of the engine's making, changed in ways that a store must accept or must refuse."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core import commands as c
from holdfast.core.decide import Input
from holdfast.core.events import ErrorInfo, Event
from holdfast.core.index_rows import Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import ActivityErrored, ActivitySucceeded, Control, ControlName, Message, NodeLost
from holdfast.core.state import RunState, state_of
from holdfast.core.timing import Retry
from holdfast.errors import HoldfastError
from holdfast.store.port import LoadedRun, Turn
from holdfast.testing.samples import activity, answer, complete, draft_turn, fail, marker, task, timer, wait
from tests.store.random_values import MISSING, NAMES, PEOPLE, ROLES, STEPS, Values

FAR = 10_000
"""So far from a version that no history of these tests gets there."""

CONTROLS: tuple[ControlName, ...] = ("PAUSE", "RESUME", "RESUME", "CANCEL", "APPROVE", "RETRY_STEP", "SKIP_STEP")


class Held(Struct, frozen=True):
    """A run as a node has it in hand. It may be out of date."""

    node: str
    run: LoadedRun
    history: tuple[Event, ...]

    @property
    def state(self) -> RunState:
        """What has become of the run, as far as this node knows."""
        return state_of(self.run.head.run_id, self.history)

    def after(self, turn: Turn) -> Held:
        """Return the run as its node has it when it believes that a turn was committed."""
        history = (*self.history, *turn.events)
        numbered = tuple(replace(event, run_seq=number) for number, event in enumerate(history, 1))
        head = replace(self.run.head, version=len(history))
        return Held(self.node, replace(self.run, head=head, messages=(), signals=()), numbered)


def random_turn(values: Values, held: Held, now: Instant) -> Turn:
    """Draw a turn of a run: what it handles, what it does, and what else the store must cope with."""
    state = held.state
    inputs = _inputs(values, state, now)
    records = [values.record(held.run.head.run_id, now) for _ in range(values.pick((0, 0, 0, 1, 2)))]
    release = values.happens(0.15)
    try:
        turn = draft_turn(state, held.run, now, held.node, _todo(values, state, now), inputs, records, release=release)
    except HoldfastError:  # the run is paused, or what it was to do cannot follow
        turn = draft_turn(state, held.run, now, held.node, (), (), records, release=release)
    return _varied(values, turn, now)


def open_task_answers(values: Values, held: Held) -> list[Message]:
    """Return messages that answer the open tasks of a run, some of them with an old token."""
    run_id = held.run.head.run_id
    return [
        answer(run_id, step.step_id, (step.token or "") + values.pick(("", "", "old")))
        for step in held.state.open_steps.values()
        if step.kind == "task"
    ]


def spoiled(values: Values, turn: Turn, held: Held, now: Instant) -> Turn:
    """Return the turn with something that should make it lose."""
    match values.number(0, 6):
        case 0:
            return replace(turn, run_id=MISSING)
        case 1:
            return replace(turn, expected_version=turn.expected_version + FAR)
        case 2:
            return replace(turn, expected_version=turn.expected_version - 1)
        case 3:
            return replace(turn, epoch=turn.epoch + values.pick((-1, 1)))
        case 4 if held.history:
            return replace(turn, events=(*turn.events, replace(values.pick(held.history), run_seq=0, persisted_at=0)))
        case 5 if turn.events:
            return replace(turn, events=turn.events + turn.events[:1])
        case _:
            first = values.task(turn.run_id, values.pick(STEPS), now)
            return replace(turn, tasks=(*turn.tasks, first, values.task(turn.run_id, first.step_id, now)))


def _todo(values: Values, state: RunState, now: Instant) -> list[c.Command]:
    todo = [_command(values, state, now) for _ in range(values.number(0, 3))]
    if values.happens(0.2):
        ends: tuple[c.Command, ...] = (complete("done"), complete(), fail())
        todo.append(values.pick(ends))
    return todo


def _command(values: Values, state: RunState, now: Instant) -> c.Command:
    step_id = values.pick(STEPS) if values.happens(0.4) else values.fresh("step")
    match values.number(0, 9):
        case 0 | 1 | 2:
            return wait(values.pick(NAMES), step_id, values.pick((None, now + 1_000, now + 60_000_000)))
        case 3:
            return timer(values.pick((now - 1, now + 1_000, now + 60_000_000)), step_id)
        case 4 | 5:
            return task(step_id, roles=tuple(values.some(ROLES, 2)), assignee=values.pick(PEOPLE))
        case 6:
            return activity(step_id, idempotency_key=values.pick((None, "key")))
        case 7 if state.open_steps:
            return c.CancelStep(step_id=values.pick(list(state.open_steps)), reason="changed my mind")
        case 8 if values.happens(0.3):
            return c.ContinueAsNew()
        case _ if values.happens(0.3):
            return c.SetAttributes(step_id=step_id, values=values.attributes())
        case _:
            return marker(step_id, values.pick((None, "x")))


def _inputs(values: Values, state: RunState, now: Instant) -> list[Input]:
    inputs: list[Input] = []
    for step in state.open_steps.values():
        if step.kind == "activity":
            error = ErrorInfo("Flaky", "try again", retryable=values.happens(0.5))
            outcomes: tuple[Input, ...] = (
                ActivitySucceeded(step.step_id, step.logical_attempt_id),
                ActivityErrored(step.step_id, step.logical_attempt_id, step.engine_attempt_id, error, Retry()),
                NodeLost(step.step_id),
            )
            inputs += [values.pick(outcomes)] if values.happens(0.6) else []
    if values.happens(0.15):
        steps = (*state.open_steps, *state.failed_steps, None)
        command = Control(
            id=values.fresh("control"),
            name=values.pick(CONTROLS),
            signal_id="operator",
            actor="ann",
            step_id=values.pick(steps),
            is_allowed=values.happens(0.9),
        )
        inputs.append(command)
    return inputs


def _varied(values: Values, turn: Turn, now: Instant) -> Turn:
    """Return the turn with more rows, or with less handled or seen than there was: all of it is allowed."""
    if values.happens(0.2):
        turn = replace(turn, messages=(*turn.messages, values.plain_message(turn.run_id, now)))
    if values.happens(0.1) and turn.consumed:
        again = replace(values.plain_message(turn.run_id, now), signal_id=values.pick(turn.consumed))
        turn = replace(turn, messages=(*turn.messages, again))
    if values.happens(0.1):
        turn = replace(turn, consumed=turn.consumed[1:])
    if values.happens(0.1):
        turn = replace(turn, seen_inbox_seq=values.number(0, turn.seen_inbox_seq))
    if values.happens(0.1):
        step_id, name = values.pick(STEPS), values.pick(NAMES)
        wait_again = Wait(run_id=turn.run_id, step_id=step_id, name=name, token=values.fresh("token"), since=now)
        turn = replace(turn, waits_opened=(*turn.waits_opened, wait_again))
    if values.happens(0.15):
        turn = replace(turn, tasks=(*turn.tasks, values.task_in_hand(turn.run_id, now)))
    if turn.events and values.happens(0.4):  # only a turn with events is recognised when it is sent again
        jobs = tuple(values.job(turn.run_id, now) for _ in range(values.number(0, 4)))
        turn = replace(turn, jobs=jobs, jobs_closed=tuple(values.some(STEPS, 2)))
    if turn.events and values.happens(0.15):
        turn = replace(turn, streams=tuple(values.chunks() for _ in range(values.number(1, 2))))
    if values.happens(0.15):
        letter = values.dead_letter(turn.run_id, now)
        turn = replace(turn, dead=(letter, letter)[: values.number(1, 2)])
    return turn
