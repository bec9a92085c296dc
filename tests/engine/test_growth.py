"""What a turn costs follows what has changed, not how much is open: lines of Python are counted, not time."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core import commands
from holdfast.core.index_rows import runtime_snapshot
from holdfast.core.messages import Message
from holdfast.engine.turns.draft import TurnDraft
from holdfast.engine.turns.owned_runs import OwnedRun
from holdfast.store.types import LoadedRun, RunHead
from tests.core.driver import SECOND, START, Driver, activity, child, done, timer, wait
from tests.process_state import no_collections

FEW = 20
MANY, VERY_MANY = 1_000, 10_000
"""So many that copies of a state share their steps, which takes some lines more than a plain `dict` does."""


def lines_of(work: Callable[[], object]) -> int:
    """Return how many lines of Python it takes. Finalizers of what other tests left are not counted."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.collect()
    with no_collections():
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(before)
    return count


def run_with(many: int, make: Callable[[str], commands.Command]) -> Driver:
    """Return a run with so many open steps."""
    run = Driver().start()
    run.ask(*(make(f"step{number}") for number in range(many)))
    return run


def loaded(run: Driver, *messages: Message) -> LoadedRun:
    """Return a run as a store hands it out."""
    head = RunHead(
        run_id=run.run_id,
        tenant="default",
        project="default",
        environment="default",
        plan_id="plan",
        plan_version="1",
        run_request_id="request",
        parent_run_id=None,
        reference_key=None,
        tags=(),
        status=run.state.status,
        version=run.state.version,
        snapshot=runtime_snapshot(run.state),
        created_at=START,
        updated_at=START,
        finished_at=None,
        inbox_seq=0,
        ready_at=START,
        lease_owner="node-a",
        lease_epoch=1,
    )
    return LoadedRun(head=head, messages=messages)


STEPS: dict[str, Callable[[str], commands.Command]] = {
    "child": lambda step_id: child(step_id, step_id),
    "timer": lambda step_id: timer(step_id, START + SECOND),
    "wait": lambda step_id: wait(step_id, "go", until=START + SECOND),
    "names": lambda step_id: wait(step_id, step_id, until=START + SECOND),
    "activity": activity,
    "queued": lambda step_id: replace(activity(step_id), queue="gpu"),
}


def turn_of(run: Driver, kind: str) -> Callable[[], object]:
    """Return a turn that closes one step, begins another, and is offered a signal that nobody waits for."""
    noise = run.sent("noise")
    outcome: Any = done("step7") if kind in ("activity", "queued") else None
    if kind == "child":
        token = run.state.open_steps["step7"].token
        outcome = Message(
            signal_id="child",
            run_id=run.run_id,
            type="SubWorkflowCompleted",
            occurred_at=START,
            waiting_token=token,
            step_id="step7",
            payload=b'{"result":1}',  # type: ignore[arg-type]
        )
    if kind in ("timer", "wait", "names"):
        outcome = run.message("step7")
    run_loaded = loaded(run, outcome) if isinstance(outcome, Message) else loaded(run)

    def turn() -> None:
        draft = TurnDraft(run.state, run_loaded, START + SECOND, "node-a")
        OwnedRun(run_loaded).lost_steps(run.state, START) if kind != "activity" else None
        draft.handle(outcome)
        draft.handle(noise)
        draft.apply_commands([timer("another", START + SECOND)])
        draft.finish()
        assert list(draft.closed()) == ["step7"]

    return turn


@pytest.mark.contract("LAT-1", "EVT-5")
@pytest.mark.parametrize("kind", STEPS)
def test_a_turn_costs_the_same_however_many_steps_are_open(kind: str) -> None:
    few, many, very_many = (run_with(number, STEPS[kind]) for number in (FEW, MANY, VERY_MANY))
    before = dict(very_many.state.open_steps)
    turn_of(few, kind)()  # once for what is cached
    counts = [lines_of(turn_of(run, kind)) for run in (few, many, very_many)]
    assert counts[1] <= counts[0] + 3 * FEW, counts
    assert counts[2] <= counts[1], counts
    assert very_many.state.open_steps == before, "a state is never edited"


@pytest.mark.contract("LAT-1")
def test_an_end_costs_what_it_closes_and_no_more() -> None:
    def end(run: Driver) -> Callable[[], object]:
        def turn() -> None:
            draft = TurnDraft(run.state, loaded(run), START, "node-a")
            draft.apply_commands([commands.CancelRun(reason="enough")])
            assert len(draft.finish().sends) == len(run.state.open_steps)

        return turn

    few, many = run_with(FEW, STEPS["child"]), run_with(10 * FEW, STEPS["child"])
    end(few)()
    assert lines_of(end(many)) <= 10 * lines_of(end(few))
