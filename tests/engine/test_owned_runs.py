"""Runs that a node holds: which activities died with another node, and what is left after a turn."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.events import ErrorInfo
from holdfast.core.messages import (
    ActivityDetached,
    ActivityErrored,
    ActivityOutcome,
    ActivitySucceeded,
    NodeLost,
    activity_completed,
)
from holdfast.core.state import state_of
from holdfast.core.timing import Retry
from holdfast.engine.activities.dispatch import is_local
from holdfast.engine.turns.owned_runs import OwnedRun, unsuccessful
from holdfast.store.memory import MemoryStore
from holdfast.testing import START, VirtualClock, samples
from holdfast.testing.samples import SampleNode, activity, signal, wait
from tests.core.driver import SECOND, Driver, failed, timer
from tests.core.driver import activity as step

THREE = Retry(max_attempts=3, initial_ms=1_000, jitter=0.0)


def held(**loaded: Any) -> OwnedRun:
    given: Any = SimpleNamespace(**{"messages": (), "signals": (), "details": {}, **loaded})
    return OwnedRun(given)


def lost(run: Driver, given: OwnedRun, now: int = START) -> list[str]:
    return [step.step_id for step in given.lost_steps(run.state, now)]


@pytest.mark.contract("OWN-3")
def test_only_local_activities_of_a_run_that_was_just_loaded_are_lost() -> None:
    run = Driver().start()
    run.ask(step("charge"), replace(step("far"), queue="gpu"), step("later"), timer("sleep"))
    run.tell(ActivityDetached("later", 1, 1, None))
    assert [one.step_id for one in run.state.open_steps.values() if is_local(one)] == ["charge"]
    given = held()
    assert lost(run, given) == ["charge"]
    assert lost(run, held(messages=(SimpleNamespace(waiting_token=None, type="TimerDue"),))) == ["charge"], (
        "that is of another matter"
    )
    given.inputs.append(ActivitySucceeded("charge", 1))
    assert lost(run, given) == []
    given.inputs.clear()
    given.is_fresh = False
    assert lost(run, given) == []


@pytest.mark.contract("OWN-3", "LAT-1")
def test_an_outcome_of_a_start_that_was_never_committed_does_not_keep_a_step_from_being_lost() -> None:
    """A node that fails open reports what it began although its turn lost, or another run had this id."""
    run = Driver().start()
    run.ask(step("charge"))
    opened_at = run.state.open_steps["charge"].opened_at
    outcome = ActivityOutcome(logical_attempt_id=1, engine_attempt_id=1, result=Raw(b"1"))
    own = activity_completed("run-1", "charge", "charge~1", outcome, START, opened_at)
    assert lost(run, held(messages=(own,))) == []
    assert lost(run, held(messages=(replace(own, opened_at=0),))) == [], "an older build does not say when it opened"
    assert lost(run, held(messages=(replace(own, opened_at=opened_at - 1),))) == ["charge"]


@pytest.mark.contract("OWN-3", "TMR-1")
def test_a_step_that_waits_for_its_next_attempt_is_lost_once_that_is_due_and_its_message_gone() -> None:
    run = Driver().start()
    run.ask(step("charge"))
    run.tell(failed("charge", retry=THREE))
    due_at = run.state.open_steps["charge"].due_at
    assert due_at is not None
    assert lost(run, held(), due_at - 1) == []
    assert lost(run, held(), due_at) == ["charge"]
    assert lost(run, held(messages=(run.message("charge"),)), due_at + SECOND) == []


@pytest.mark.contract("ACT-1")
def test_the_steps_whose_attempts_came_to_nothing_are_known() -> None:
    given = held(head=SimpleNamespace(run_id="run-1"))
    given.inputs += [
        ActivitySucceeded("a", 1),
        ActivityErrored("b", 1, 1, failed("b").error, Retry(), 0.0),
        ActivityDetached("c", 1, 1, None),
    ]
    assert unsuccessful([given]) == [("run-1", "b"), ("run-1", "c")]


@pytest.mark.contract("SIG-4", "ACT-1")
async def test_what_a_turn_has_consumed_is_gone_afterwards_and_the_rest_is_kept() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock)
    node = SampleNode(store, "node-a")
    loaded = await node.start("run-1", wait("go"), activity("charge"))
    await store.deliver([signal("run-1", "go"), signal("run-1", "other")])
    [again] = await node.claim()
    given = OwnedRun(again)
    given.loaded.details.update({"charge": Raw(b"1"), "gone": Raw(b"2")})
    draft: Any = SimpleNamespace(
        received=[(1, 0)], state=SimpleNamespace(version=loaded.head.version + 1, open_steps={"charge": None})
    )
    given.advance(draft)
    assert [kept.name for kept in given.loaded.signals] == ["other"]
    assert given.loaded.details == {"charge": Raw(b"1")}
    assert given.loaded.head.version == loaded.head.version + 1
    assert given.loaded.messages == ()
    draft.received = []
    given.advance(draft)
    assert [kept.name for kept in given.loaded.signals] == ["other"]


@pytest.mark.contract("SIG-8")
async def test_a_load_that_waits_for_nobody_brings_no_time_out_of_a_wait() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock)
    node = SampleNode(store)
    await node.start("run-1")
    await node.step("run-1", activity("charge"), wait("go", until=START + SECOND), samples.timer(START + SECOND))
    given = OwnedRun(await node.load("run-1"))
    clock.advance(ms=1_000)
    later = await node.load("run-1")
    assert sorted(str(message.step_id) for message in later.messages) == ["go", "sleep"]
    given.load_again(later, state_of("run-1", await store.read_events("run-1")))
    assert [message.step_id for message in given.loaded.messages] == ["sleep"]
    given = OwnedRun(later)
    given.load_again(later, state_of("run-1", await store.read_events("run-1")))
    assert len(given.loaded.messages) == 2, "what was claimed stays"


@pytest.mark.contract("OWN-3", "ACT-1")
def test_a_failure_of_an_earlier_attempt_does_not_hide_that_the_present_one_is_lost() -> None:
    run = Driver().start()
    run.ask(step("charge"))
    run.tell(NodeLost("charge"))
    assert run.state.open_steps["charge"].engine_attempt_id == 2

    def with_outcome(attempt: int, error: ErrorInfo | None) -> OwnedRun:
        outcome = ActivityOutcome(logical_attempt_id=1, engine_attempt_id=attempt, error=error)
        return held(messages=(activity_completed("run-1", "charge", f"charge~{attempt}-", outcome, START),))

    refused = ErrorInfo("ValueError", "the card was refused")
    assert lost(run, with_outcome(1, refused)) == ["charge"], "it ends nothing, and no node works on the second"
    assert lost(run, with_outcome(2, refused)) == []
    assert lost(run, with_outcome(1, None)) == [], "a success of any attempt counts"
