"""The catalogue of invariants: a healthy run has no violation, and every planted one is found."""

from collections.abc import Callable

import pytest
from hypothesis import given
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import commands
from holdfast.core.events import UnknownBody
from holdfast.core.invariants import INVARIANTS, SystemView, Violation, check, check_drained
from holdfast.core.messages import ActivityDetached
from holdfast.core.state import RunStatus
from tests.core.broken_views import BROKEN_VIEWS, View, busy, parent_and_child, unowned
from tests.core.driver import START, Driver, activity, child, failed, made, task, timer, wait
from tests.core.event_bodies import run_in
from tests.core.random_histories import Plan, carry_out, plans
from tools import contract


def names(view: View) -> set[str]:
    """Return the names of the invariants that the view violates."""
    return {violation.invariant for violation in check(view)}


# --- health


@pytest.mark.contract("INV", "EVT-1", "EVT-4", "PRJ-4")
@given(plans)
def test_a_run_that_was_really_driven_has_no_violation(plan: Plan) -> None:
    assert check(carry_out(plan).view()) == []


@pytest.mark.contract("INV")
@pytest.mark.parametrize("status", list(RunStatus))
def test_a_run_in_any_status_has_no_violation(status: RunStatus) -> None:
    assert check(run_in(status).view()) == []
    assert check(busy().view()) == []


@pytest.mark.contract("INV")
def test_a_healthy_parent_and_its_child_have_no_violation() -> None:
    assert check(SystemView(parent_and_child())) == []


# --- illness


@pytest.mark.contract("INV", "EVT-1", "EVT-4", "EVT-5", "PRJ-4", "SIG-1", "SIG-4", "TSK-2", "TMR-1")
@pytest.mark.parametrize(
    ("invariant", "make"), [(name, make) for name, _, make in BROKEN_VIEWS], ids=[title for _, title, _ in BROKEN_VIEWS]
)
def test_a_planted_violation_is_found(invariant: str, make: Callable[[], View]) -> None:
    assert invariant in names(make())


def test_every_invariant_has_a_planted_violation() -> None:
    assert {invariant for invariant, _, _ in BROKEN_VIEWS} == set(INVARIANTS)


@pytest.mark.contract("INV")
def test_every_invariant_has_a_name_a_sentence_and_a_rule() -> None:
    known = contract.read_ids(contract.CONTRACT.read_text(encoding="utf-8"))
    for name, invariant in INVARIANTS.items():
        assert invariant.name == name == invariant.find.__name__
        assert invariant.sentence.endswith(".")
        assert invariant.rule in known


# --- what is no violation


def test_a_deleted_snapshot_is_no_violation() -> None:
    assert check(busy().view(snapshot=None)) == []


def test_skipping_a_failed_step_is_no_second_result() -> None:
    run = Driver().start()
    run.ask(activity())
    run.tell(failed())
    run.control("SKIP_STEP", "charge")
    assert check(run.view()) == []


def test_an_event_of_an_unknown_type_is_no_violation() -> None:
    run = busy()
    run.keep(replace(made(run.state, UnknownBody(Raw(b"{}"))), event_type="FromTheFuture", idempotency_key="0" * 64))
    assert check(run.view()) == []


@pytest.mark.parametrize(
    "todo",
    [wait(), task(), child(), timer()],
    ids=["signal", "human", "child", "instant"],
)
def test_a_run_without_an_owner_may_wait_for_something_named(todo: commands.Command) -> None:
    assert check(unowned(todo).view()) == []


def test_a_run_without_an_owner_may_wait_for_an_outcome_from_elsewhere() -> None:
    assert check(unowned(replace(activity(), queue="far")).view()) == []
    run = unowned(activity())
    run.tell(ActivityDetached("charge", 1, 1, None))
    assert check(run.view()) == []


def test_a_paused_run_waits_for_its_operator() -> None:
    run = unowned()
    run.control("PAUSE")
    assert check(run.view()) == []


def test_a_signal_that_was_acknowledged_by_another_run_is_not_missed_here() -> None:
    view = busy().view()
    elsewhere = replace(view.acknowledged[0], workflow_id="run-2", signal_storage_key="elsewhere")
    assert check(replace(view, acknowledged=(*view.acknowledged, elsewhere))) == []


# --- reports


def test_a_violation_says_which_invariant_and_which_run() -> None:
    view = unowned(wait("w")).view(waits=())
    found = check(SystemView((view,)))
    assert found == [Violation("waits_equal_fold", "run-1", "there is no row for the wait of 'w'")]


@pytest.mark.contract("INV")
def test_after_a_drain_nothing_may_be_ready() -> None:
    idle = unowned(wait()).view()
    assert check_drained(SystemView((idle, run_in(RunStatus.COMPLETED).view()))) == []
    [left] = check_drained(SystemView((replace(idle, ready_at=START),)))
    assert (left.invariant, left.run_id) == ("queues_are_drained", "run-1")
    assert check_drained(SystemView((replace(idle, ready_at=START + 1),))) == []
