"""Rotations: a fold that begins at the last one gives the state of the whole history."""

import pytest
from hypothesis import given
from msgspec import Raw

from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.messages import Update
from holdfast.core.state import CARRIED, RunState, state_of
from holdfast.errors import CorruptHistory
from tests.core.driver import Driver, activity, done, failed, timer, wait
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
    "awaits_definition",
    "steps_since_rotation",
    "last_executed_by",
    "last_executed_on",
    "closed_effects",
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


@pytest.mark.contract("FMT-1")
@pytest.mark.parametrize("carried", [e.NULL, Raw(b"[]"), codec.encode({"depth": "deep"}), codec.encode({"plan_id": 1})])
def test_a_rotation_that_carries_nothing_readable_is_no_place_to_begin(carried: Raw) -> None:
    run = Driver().start()
    run.append(e.ContinuedAsNew(Raw(b"2"), carried))
    assert state_of("run-1", run.events) == run.state
    with pytest.raises(CorruptHistory, match="ContinuedAsNew"):
        state_of("run-1", since_rotation(run))
