"""Rotations: a fold that begins at the last one gives the state of the whole history."""

import json

import pytest
from hypothesis import given
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.attributes import At
from holdfast.core.event_writer import Refusal
from holdfast.core.invariants import check
from holdfast.core.keyed_steps import is_of_engine
from holdfast.core.messages import ActivityErrored, ActivitySucceeded, NodeLost, Update
from holdfast.core.reconciliation import indeterminate
from holdfast.core.snapshot import StepStatus, project_run
from holdfast.core.state import CARRIED, RunState, carried, state_of
from holdfast.core.timing import Retry
from holdfast.errors import CorruptHistory, HistoryTooNew
from tests.core.driver import (
    SECOND,
    Driver,
    activity,
    answered,
    child,
    done,
    failed,
    outcome,
    task,
    timer,
    wait,
)
from tests.core.event_bodies import ERROR
from tests.core.random_histories import Plan, carry_out, plans

# What a rotation forgets on purpose, and what the rotation's own event gives back.
NOT_CARRIED = {
    "run_id",
    "version",
    "status",
    "replay_from",
    "open_steps",
    "waits",
    "local_activities",
    "failed_steps",
    "is_held",
    "pause",
    "retried",
    "requires_approval",
    "debounce",
    "replaced_input",
    "start_at",
    "needs",
    "awaits_definition",
    "steps_since_rotation",
    "last_executed_by",
    "last_executed_on",
    "closed_effects",
    "stretch_began_at",
}


def since_rotation(run: Driver) -> list[e.Event]:
    """Return the events since the last rotation, with it."""
    return run.events[run.state.replay_from - 1 :]


@pytest.mark.contract("CAN-1", "EVT-5", "PRJ-4")
@given(plans)
def test_a_fold_since_the_last_rotation_is_the_fold_of_the_whole_history(plan: Plan) -> None:
    rotated = [("rotate", number) if number % 9 == 0 else (what, number) for what, number in plan]
    run = carry_out(rotated)
    whole = state_of("run-1", run.events)
    assert state_of("run-1", since_rotation(run)) == whole == run.state


@pytest.mark.contract("CAN-1")
def test_a_rotation_carries_everything_that_is_still_true() -> None:
    run = Driver("run-1", e.RunQueued("order", "3", parent_run_id="p", parent_step_id="s", parent_token="t", depth=4))
    run.start()
    run.ask(c.SetAttributes(step_id="set", values={"cents": 1, "due": At(5), "parts": ("a", "b"), "score": 1.0}))
    run.ask(wait("w", "go"), activity("a"), timer("t"))
    run.tell(run.sent("go"))
    run.tell(failed("a"))
    run.control("CANCEL")
    before = run.state
    run.ask(c.ContinueAsNew(input=Raw(b"[2]")))
    state = state_of("run-1", since_rotation(run))
    assert state == run.state
    assert {field: getattr(state, field) for field in CARRIED if field != "occurrences"} == {
        field: getattr(before, field) for field in CARRIED if field != "occurrences"
    }
    assert state.is_cancelling
    assert (state.parent_run_id, state.parent_step_id, state.parent_token, state.depth) == ("p", "s", "t", 4)


def test_every_field_of_a_state_is_carried_or_known_not_to_be() -> None:
    assert set(RunState.__struct_fields__) == set(CARRIED) | NOT_CARRIED


@pytest.mark.contract("CAN-1", "EVT-5")
def test_what_was_decided_in_the_same_breath_is_carried_too() -> None:
    run = Driver().start()
    run.tell(Update(id="0001", update_id="u-1", name="rename"))
    run.ask(c.CompleteUpdate(step_id="update:0001", error=ERROR), c.ContinueAsNew(), c.ContinueAsNew())
    assert run.state.last_error == ERROR
    assert state_of("run-1", since_rotation(run)) == run.state


@pytest.mark.contract("CAN-1", "EVT-4")
def test_keys_go_on_after_a_rotation_where_they_were() -> None:
    run = Driver().start()
    for _ in range(3):
        run.control("PAUSE")
        run.control("RESUME")
        run.ask(c.ContinueAsNew())
    whole, since = state_of("run-1", run.events), state_of("run-1", since_rotation(run))
    assert since.occurrences == whole.occurrences
    assert since.occurrences["ContinuedAsNew"] == 3
    keys = [event.idempotency_key for event in run.events]
    assert len(set(keys)) == len(keys)


@pytest.mark.contract("CAN-1")
def test_steps_after_a_rotation_are_open_in_both_folds() -> None:
    run = Driver().start()
    run.ask(activity("a"), c.ContinueAsNew(), activity("1/a"), timer("1/b"))
    run.tell(done("1/a"))
    since = state_of("run-1", since_rotation(run))
    assert list(since.open_steps) == ["1/b"]
    assert since == run.state


def carrying_run() -> Driver:
    """Return a run with an open step of every kind, in the middle of its life, and a failed one."""
    run = Driver().start()
    run.ask(
        activity("local"),
        replace(activity("far"), queue="elsewhere"),
        replace(activity("keyed"), idempotency_key="k-1"),
        activity("broken"),
        timer("sleep", run.now + 60 * SECOND),
        wait("first", "go", run.now + 90 * SECOND),
        wait("second", "go"),
        task("approve"),
        child("ship", "child-1"),
    )
    run.tell(failed("local", retry=Retry(max_attempts=3, jitter=0.0)))
    run.tell(NodeLost("keyed"))
    run.tell(ActivityErrored("keyed", 1, 2, indeterminate("the bank is closed"), Retry()))
    run.append(e.TaskAssigned("claim", "ann", "ann"), "approve")
    run.tell(failed("broken"))
    return run


def carry(run: Driver, *steps: str) -> None:
    """Rotate the history, and carry these steps over; by default all, as a program knows them."""
    own = [step for step in run.state.open_steps if not is_of_engine(step)]
    run.ask(c.ContinueAsNew(input=Raw(b"[2]"), steps=steps or (*own, *run.state.failed_steps)))


@pytest.mark.contract("CAN-1", "EVT-5")
def test_steps_that_are_carried_over_are_as_they_were() -> None:
    run = carrying_run()
    before, inbox, rows = run.state, dict(run.inbox), (dict(run.waits), dict(run.tasks), dict(run.records))
    carry(run)
    assert run.state.open_steps == before.open_steps
    assert list(run.state.open_steps) == list(before.open_steps)
    assert (run.state.waits, run.state.local_activities) == (before.waits, before.local_activities)
    assert run.state.failed_steps == before.failed_steps
    assert (run.inbox, (run.waits, run.tasks, run.records)) == (inbox, rows)
    assert state_of("run-1", since_rotation(run)) == state_of("run-1", run.events) == run.state
    assert [violation.problem for violation in check(run.view())] == []


@pytest.mark.contract("CAN-1", "SIG-8", "TMR-1", "ACT-1", "TSK-2")
def test_what_was_scheduled_before_a_rotation_ends_the_carried_steps_after_it() -> None:
    run = carrying_run()
    carry(run)
    run.tell(run.sent("go", 1))
    assert "first" not in run.state.open_steps
    carry(run)
    run.now += 61 * SECOND
    run.tell(run.message("sleep"))
    run.tell(outcome(run, "far", 1, result=7))
    run.tell(answered(run, "ship", "SubWorkflowCompleted", {"result": 7}))
    run.tell(answered(run, "approve", "TaskCompleted", {"actor": "ann", "answer": 1}))
    run.tell(run.message("local"))
    run.tell(ActivitySucceeded("local", 1, Raw(b"1")))
    run.control("RETRY_STEP", "keyed")
    assert list(run.state.open_steps) == ["keyed", "second"]
    assert run.types[run.state.replay_from :].count("StepCompleted") == 2
    assert state_of("run-1", since_rotation(run)) == state_of("run-1", run.events) == run.state
    assert [violation.problem for violation in check(run.view())] == []


@pytest.mark.contract("CAN-1")
def test_a_step_that_is_left_out_is_given_up() -> None:
    run = carrying_run()
    carry(run, "second", "ship")
    assert list(run.state.open_steps) == ["second", "ship"]
    assert (run.state.waits, run.state.local_activities, run.state.failed_steps) == ({"go": ("second",)}, 0, {})
    assert list(run.waits) == ["second"]
    assert {row.status for row in run.tasks.values()} == {"CANCELLED"}
    [snapshot] = [step for step in project_run("run-1", run.events).steps if step.step_id == "second"]
    assert snapshot.status is StepStatus.RUNNING
    assert [violation.problem for violation in check(run.view())] == []


@pytest.mark.contract("CAN-1")
def test_a_step_that_is_opened_and_carried_over_in_one_turn_is_dispatched() -> None:
    run = Driver().start()
    decision = run.ask(activity("a"), activity("b"), wait("w"), c.ContinueAsNew(steps=("a", "w")))
    assert decision.dispatch == ("a",)
    assert list(run.state.open_steps) == ["a", "w"]
    assert list(run.waits) == ["w"]
    assert state_of("run-1", since_rotation(run)) == run.state


@pytest.mark.contract("CAN-1")
def test_a_step_that_is_not_there_cannot_be_carried_over() -> None:
    run = Driver().start()
    run.ask(activity("a"))
    run.tell(done("a"))
    refused = run.try_ask(c.ContinueAsNew(steps=("a",)))
    assert isinstance(refused, Refusal)
    assert refused.error.details == {"step_id": "a"}


@pytest.mark.contract("FMT-1", "CAN-1")
def test_only_a_rotation_with_steps_has_a_schema_that_older_versions_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    run = carrying_run()
    run.ask(c.ContinueAsNew())
    plain = run.events[-1]
    assert plain.schema_version == 1
    run.ask(wait("w"))
    carry(run)
    rotated = run.events[-1]
    assert rotated.schema_version == 2
    assert codec.decode_body("ContinuedAsNew", 1, codec.encode_body(plain.data)) == plain.data
    monkeypatch.delitem(codec.SCHEMA_VERSIONS, "ContinuedAsNew")  # as the version before knew it
    unread = codec.decode_body("ContinuedAsNew", 2, codec.encode_body(rotated.data))
    old = [*run.events[:-1], replace(rotated, data=unread)]
    for history in (old, old[-1:]):
        with pytest.raises(HistoryTooNew, match="upgrade"):
            state_of("run-1", history)


@pytest.mark.contract("MSG-3")
@pytest.mark.parametrize("step", [{"step_id": "a"}, {"kind": "wonder"}, {"body": {"name": 1}}])
def test_carried_steps_that_cannot_be_read_are_a_corrupt_history(step: dict[str, object]) -> None:
    run = Driver().start()
    run.ask(activity("a"))
    known = carried(run.state, (), ("a",))
    plain = json.loads(bytes(codec.encode(known)))
    plain["steps"] = [step if "step_id" in step else plain["steps"][0] | step]
    with pytest.raises(CorruptHistory, match=r"ContinuedAsNew|StepStarted"):
        run.append(e.ContinuedAsNew(Raw(b"2"), codec.encode(plain)))


@pytest.mark.contract("FMT-1")
@pytest.mark.parametrize("carried", [e.NULL, Raw(b"[]"), codec.encode({"depth": "deep"}), codec.encode({"plan_id": 1})])
def test_a_rotation_that_carries_nothing_readable_is_no_place_to_begin(carried: Raw) -> None:
    run = Driver().start()
    run.append(e.ContinuedAsNew(Raw(b"2"), carried))
    assert state_of("run-1", run.events) == run.state
    with pytest.raises(CorruptHistory, match="ContinuedAsNew"):
        state_of("run-1", since_rotation(run))
