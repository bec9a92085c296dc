"""The fold: every transition and every one that is none, purity, gaps, unknown events, and a size that is bounded."""

import copy
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec, commands
from holdfast.core import events as e
from holdfast.core.events import Body, UnknownBody
from holdfast.core.state import (
    APPROVED,
    CANCELLED,
    COMPLETED,
    FAILED,
    PAUSED,
    PENDING,
    RUNNING,
    TERMINAL,
    TRANSITIONS,
    RunState,
    RunStatus,
    evolve,
    fold,
    state_of,
)
from holdfast.errors import CorruptHistory, HistoryGap
from tests.core.driver import START, Driver, activity, done, failed, made, task, timer, wait
from tests.core.event_bodies import ERROR, SAMPLES, run_in
from tests.core.random_histories import Plan, carry_out, plans

STATUS_EVENTS = {body for row in TRANSITIONS.values() for body in row}
ALLOWED_BEFORE_START = {e.InputReplaced, e.RunCancelRequested, e.RunTimedOut, e.SignalAccepted, e.SignalRejected}


def next_status(status: RunStatus, body: type[Body]) -> RunStatus | None:
    """Return where the event leads, or None if it cannot happen. Written down a second time, on purpose."""
    by_hand = {
        (PENDING, e.RunApproved): APPROVED,
        (PENDING, e.RunStarted): RUNNING,
        (PENDING, e.RunFailed): FAILED,
        (PENDING, e.RunCancelled): CANCELLED,
        (APPROVED, e.RunStarted): RUNNING,
        (APPROVED, e.RunFailed): FAILED,
        (APPROVED, e.RunCancelled): CANCELLED,
        (RUNNING, e.RunPaused): PAUSED,
        (RUNNING, e.RunCompleted): COMPLETED,
        (RUNNING, e.RunFailed): FAILED,
        (RUNNING, e.RunCancelled): CANCELLED,
        (PAUSED, e.RunResumed): RUNNING,
        (PAUSED, e.RunFailed): FAILED,
        (PAUSED, e.RunCancelled): CANCELLED,
    }
    if body in STATUS_EVENTS:
        return by_hand.get((status, body))
    if status in TERMINAL or body is e.RunQueued:
        return None
    if status in (PENDING, APPROVED) and body not in ALLOWED_BEFORE_START:
        return None
    return status


# --- the table


@pytest.mark.contract("WF-7", "EVT-5")
@pytest.mark.parametrize("status", list(RunStatus))
@pytest.mark.parametrize(("body", "step_id"), SAMPLES, ids=[type(body).__name__ for body, _ in SAMPLES])
def test_every_event_in_every_status_leads_where_the_table_says_or_is_corrupt(
    status: RunStatus, body: Body, step_id: str | None
) -> None:
    state = run_in(status).state
    expected = next_status(status, type(body))
    event = made(state, body, step_id)
    if expected is None:
        with pytest.raises(CorruptHistory) as found:
            evolve(state, event)
        assert found.value.details == {"run_id": "run-1", "run_seq": state.version + 1}
        assert type(body).__name__ in found.value.message
    else:
        after = evolve(state, event)
        assert (after.status, after.version) == (expected, state.version + 1)


@pytest.mark.contract("EVT-3")
def test_the_samples_are_of_every_event_type() -> None:
    assert {type(body).__name__ for body, _ in SAMPLES} == set(e.BODIES)


@pytest.mark.contract("WF-7")
def test_terminal_statuses_are_those_that_nothing_leads_out_of() -> None:
    assert {status for status, row in TRANSITIONS.items() if not row} == TERMINAL
    assert set(TRANSITIONS) == set(RunStatus)


@pytest.mark.contract("EVT-5")
@pytest.mark.parametrize("body", [body for body, step_id in SAMPLES if not isinstance(body, e.RunQueued)])
def test_a_history_that_does_not_begin_with_its_run_is_corrupt(body: Body) -> None:
    nothing = RunState(run_id="run-1")
    with pytest.raises(CorruptHistory, match="does not exist"):
        evolve(nothing, made(nothing, body, "fresh" if body.KEYED_BY == "step" else None))


CONCERNED: dict[str, set[type[Body]]] = {
    "activity": {e.StepCompleted, e.StepFailed, e.StepRetried, e.StepDetached, e.StepUnresolved},
    "timer": {e.TimerFired},
    "signal": {e.SignalReceived, e.SignalTimedOut},
    "task": {e.TaskCompleted, e.TaskAssigned, e.TaskAnswered, e.TaskCommented, e.TaskReminded},
    "child": {e.ChildCompleted, e.ChildFailed},
    "update": {e.UpdateCompleted},
}
OF_ANY_STEP: set[type[Body]] = {e.StepSkipped, e.StepCancelled}


@pytest.mark.contract("EVT-5")
@pytest.mark.parametrize("kind", sorted(CONCERNED))
@pytest.mark.parametrize(
    "body",
    [body for body, _ in SAMPLES if any(type(body) in closers for closers in (*CONCERNED.values(), OF_ANY_STEP))],
    ids=lambda body: type(body).__name__,
)
def test_an_event_of_a_step_needs_an_open_step_of_its_own_kind(kind: str, body: Body) -> None:
    state = run_in(RUNNING).state
    if type(body) in CONCERNED[kind] | OF_ANY_STEP:
        evolve(state, made(state, body, kind))
    else:
        with pytest.raises(CorruptHistory, match=f"an open {kind}"):
            evolve(state, made(state, body, kind))
    with pytest.raises(CorruptHistory, match="not open"):
        evolve(state, made(state, body, "never opened"))
    with pytest.raises(CorruptHistory, match="not open"):
        evolve(state, made(state, body, None))


@pytest.mark.contract("EVT-5")
@pytest.mark.parametrize(
    "body",
    [
        body
        for body, step_id in SAMPLES
        if step_id == "fresh" and not isinstance(body, e.MarkerRecorded | e.SignalSent | e.AttributesSet)
    ],
)
def test_a_step_cannot_be_opened_twice(body: Body) -> None:
    state = run_in(RUNNING).state
    with pytest.raises(CorruptHistory, match="an open activity"):
        evolve(state, made(state, body, "activity"))
    with pytest.raises(CorruptHistory):
        evolve(state, made(state, body, None))


# --- folding


@pytest.mark.contract("EVT-5")
@given(plans)
def test_folding_changes_nothing_that_it_was_given(plan: Plan) -> None:
    run = carry_out(plan)
    half = len(run.events) // 2
    state = state_of(run.run_id, run.events[:half])
    state_before, events_before = copy.deepcopy(state), copy.deepcopy(run.events)
    after = fold(state, run.events[half:])
    assert state == state_before
    assert run.events == events_before
    assert after is not state
    mappings = ("open_steps", "failed_steps", "cursors", "occurrences")
    assert all(getattr(after, field) is not getattr(state, field) for field in mappings)


@pytest.mark.contract("EVT-5")
@given(plans, st.lists(st.integers(0, 80), max_size=6))
def test_folding_in_any_pieces_gives_what_folding_at_once_gives(plan: Plan, cuts: list[int]) -> None:
    run = carry_out(plan)
    whole = state_of(run.run_id, run.events)
    borders = [0, *sorted(min(cut, len(run.events)) for cut in cuts), len(run.events)]
    state = RunState(run_id=run.run_id)
    for begin, end in pairwise(borders):
        state = fold(state, run.events[begin:end])
    one_by_one = RunState(run_id=run.run_id)
    for event in run.events:
        one_by_one = evolve(one_by_one, event)
    assert state == whole == one_by_one == run.state
    assert msgspec.json.encode(state) == msgspec.json.encode(whole) == msgspec.json.encode(one_by_one)


@pytest.mark.contract("EVT-5")
@given(plans)
def test_the_same_events_give_the_same_state_after_a_trip_through_json(plan: Plan) -> None:
    run = carry_out(plan)
    read = [
        replace(
            event,
            data=codec.decode_body(event.event_type, event.schema_version, codec.encode_body(event.data)),
            engine_run_ref=codec.decode_ref(codec.encode_ref(event.engine_run_ref)),
        )
        for event in run.events
    ]
    assert msgspec.json.encode(state_of(run.run_id, read)) == msgspec.json.encode(run.state)


@pytest.mark.contract("EVT-1", "EVT-6")
@pytest.mark.parametrize(("number", "expected"), [(3, 2), (1, 2), (99, 2)])
def test_an_event_out_of_number_is_a_gap(number: int, expected: int) -> None:
    state = Driver().state
    event = replace(made(state, e.RunStarted()), run_seq=number)
    with pytest.raises(HistoryGap) as found:
        evolve(state, event)
    assert found.value.details == {"run_id": "run-1", "expected": expected, "found": number}


@pytest.mark.contract("EVT-1")
def test_a_history_with_a_hole_is_never_folded() -> None:
    run = Driver().start()
    run.ask(activity())
    with pytest.raises(HistoryGap):
        state_of("run-1", [*run.events[:1], *run.events[2:]])
    with pytest.raises(HistoryGap):
        state_of("run-1", [*run.events, run.events[-1]])


@pytest.mark.contract("EVT-3")
@pytest.mark.parametrize("status", list(RunStatus))
def test_unknown_events_are_counted_and_otherwise_left_alone(status: RunStatus) -> None:
    state = run_in(status).state
    unknown = replace(made(state, UnknownBody(Raw(b"{}")), "odd"), event_type="FromTheFuture")
    after = evolve(state, unknown)
    assert after.unknown_events == 1
    expected = replace(state, version=state.version + 1, unknown_events=1)
    assert after == replace(expected, last_executed_on=after.last_executed_on, last_executed_by="node-a")


# --- what a state holds


@pytest.mark.contract("PRJ-4")
def test_a_state_is_as_small_after_a_thousand_steps_as_after_ten() -> None:
    def after(rounds: int) -> int:
        run = Driver().start()
        for number in range(rounds):
            run.ask(activity(f"a{number:05}"), timer(f"t{number:05}", START), wait(f"w{number:05}"))
            run.ask(wait(f"x{number:05}"), task(f"h{number:05}"))
            run.tell(done(f"a{number:05}"))
            run.tell(run.message(f"t{number:05}"))
            run.tell(run.sent("go"))
            run.tell(run.sent("go", step_id=f"x{number:05}"))  # addressed to one wait
            run.ask(commands.CancelStep(step_id=f"h{number:05}"))
            run.control("PAUSE")
            run.control("RESUME")
        assert not run.state.open_steps
        return len(msgspec.json.encode(run.state))

    assert after(1_000) <= after(10) + 40  # a few numbers have more digits


@pytest.mark.contract("EVT-4")
def test_occurrences_count_the_events_that_may_recur() -> None:
    run = Driver().start()
    for _ in range(3):
        run.control("PAUSE")
        run.control("RESUME")
    counts = {"RunQueued": 1, "RunStarted": 1, "RunPaused": 3, "RunResumed": 3, "SignalAccepted": 6}
    assert run.state.occurrences == counts


@pytest.mark.contract("CAN-1")
def test_a_rotation_forgets_steps_and_keeps_everything_else() -> None:
    run = run_in(RUNNING)
    run.tell(run.sent("go"))
    run.tell(failed("activity"))
    before = run.state
    run.ask(commands.ContinueAsNew(input=Raw(b"2")))
    after = run.state
    assert (after.open_steps, after.failed_steps) == ({}, {})
    assert (after.steps_since_rotation, before.steps_since_rotation) == (0, 6)
    assert after.replay_from == after.version == before.version + 1
    assert after.status is RUNNING
    assert after.cursors == before.cursors != {}
    assert after.occurrences == before.occurrences | {"ContinuedAsNew": 1}
    assert after.last_error == before.last_error


@pytest.mark.contract("CAN-1")
def test_steps_since_the_rotation_counts_what_was_opened() -> None:
    run = Driver().start()
    run.ask(activity("a"), timer("b"), wait("c"))
    run.ask(commands.RecordMarker(step_id="m", name="seed"))
    assert run.state.steps_since_rotation == 3


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_a_finished_run_has_nothing_open(status: RunStatus) -> None:
    assert run_in(status).state.open_steps == {}
    assert run_in(status).state.is_finished


def test_open_steps_stay_in_the_order_in_which_they_were_opened() -> None:
    run = run_in(RUNNING)
    run.append(e.StepRetried("failed", START + 1, ERROR), "activity")
    run.append(e.TaskAssigned("claim", "ann", "ann"), "task")
    assert list(run.state.open_steps) == ["activity", "timer", "signal", "task", "child", "update"]


def test_an_open_step_tells_the_name_of_what_it_waits_for() -> None:
    steps = run_in(RUNNING).state.open_steps
    names = {"activity": "charge", "timer": "", "signal": "go", "task": "approve", "child": "ship", "update": "rename"}
    assert {kind: step.name for kind, step in steps.items()} == names


def test_the_last_error_stays_until_another_one_comes() -> None:
    run = run_in(RUNNING)
    run.append(e.ChildFailed(ERROR), "child")
    run.control("PAUSE")
    run.append(e.UpdateCompleted(), "update")
    assert run.state.last_error == ERROR
    run.append(e.RunFailed(e.ErrorInfo("Last", "the end")))
    assert run.state.last_error == e.ErrorInfo("Last", "the end")


def test_a_status_can_be_looked_up_by_its_text() -> None:
    assert all(hash(status) == hash(status.value) and {status.value: 1}[status] for status in RunStatus)
