"""Random flows come to what a naive interpreter says, in any order of outcomes, rebuilt after every event.

The first tests play a flow on the core alone: thousands of them, quickly. After an outcome the run is rebuilt from its
history, which is what a crash after that commit comes to; no function of the author is called then.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.decide import decide, wait_for
from holdfast.core.event_writer import Decision
from holdfast.core.events import ErrorInfo
from holdfast.core.messages import ActivityErrored, ActivitySucceeded, Actor, TaskOperation, TaskRequest
from holdfast.core.state import CANCELLED, COMPLETED, FAILED, RUNNING, OpenStep
from holdfast.core.timing import NO_RETRY
from holdfast.program.flow.program import FlowProgram
from tests.flows.random_flows import Calls, Counts, Shape, build, draw, expected, increase, leaves_of
from tests.program.core_run import BROKEN, BY, CoreRun

pytestmark = pytest.mark.contract("WF-1", "WF-2", "CAN-1")

SEEDS = 20
FLOWS_PER_SEED = 20


class FlowRun(CoreRun):
    """A run of a random flow whose world answers every step as the shape says."""

    leaves: dict[str, Shape]

    @property
    def flow(self) -> FlowProgram:
        program = self.replay.program
        assert isinstance(program, FlowProgram)
        return program

    def complete(self, step_id: str, value: Any = None) -> None:
        """Let the present attempt of an activity return."""
        attempt = self.state.open_steps[step_id].logical_attempt_id
        self.handle(ActivitySucceeded(step_id, attempt, codec.encode(value)))

    def fail(self, step_id: str, error: ErrorInfo = BROKEN) -> None:
        """Let the present attempt of an activity fail for good."""
        step = self.state.open_steps[step_id]
        self.handle(ActivityErrored(step_id, step.logical_attempt_id, step.engine_attempt_id, error, NO_RETRY))

    def answer(self, step: OpenStep) -> None:
        """Let the world answer one step."""
        path, _, undoes = step.step_id.partition(":")
        leaf = self.leaves[path.rpartition("/")[2]]
        if undoes:
            self.complete(step.step_id)
        elif step.kind == "activity" or step.kind == "child":
            self._conclude(step, leaf)
        elif step.kind == "timer" or leaf.kind == "timeout":
            self.fire(step.step_id)
        elif step.kind == "task":
            assert isinstance(step.body, e.TaskCreated)
            by, answer = Actor("ann"), codec.encode(1)
            request = TaskRequest(
                task_id=step.body.task_id, step_id=step.step_id, action="complete", actor=by, answer=answer
            )
            self.handle(TaskOperation(id=f"answer-{step.step_id}", request=request))
        else:
            self.send(step.name, 1)

    def _conclude(self, step: OpenStep, leaf: Shape) -> None:
        given = codec.decode(step.body.input, dict[str, Any])  # type: ignore[attr-defined]
        error = ErrorInfo("Broken", f"<{leaf.name}> is broken") if leaf.fails else None
        if leaf.kind == "apply":
            value: Any = 3
        elif leaf.kind == "notify":
            value = None
        else:
            value = None if leaf.fails else increase(leaf, Counts(**given["state"]))
        if step.kind == "child":
            self.child_returns(step.step_id, value, error)
        elif error is not None:
            self.fail(step.step_id, error)
        else:
            self.complete(step.step_id, value)

    def _offer(self) -> None:
        for signal in list(self.mailbox):
            step = wait_for(self.state, signal) if self.state.status is RUNNING else None
            if step is None:
                continue
            self.mailbox.remove(signal)
            received = self.flow.receive(step.step_id, signal.payload)
            assert received is not None
            heard = replace(signal, state_after=received.state_after, error=received.error)
            answer = decide(self.state, heard, self.now, BY)
            assert isinstance(answer, Decision)
            self._absorb(answer)


def began(shape: Shape, calls: Calls, rotation_steps: int) -> FlowRun:
    """Return a run of a shape that has begun."""
    app = hf.App("random", limits=hf.Limits(rotation_steps=rotation_steps))
    flow = build(app, shape, calls)
    run = FlowRun(app, flow, Counts())
    run.leaves = leaves_of(shape)
    run.start()
    return run


def rebuilt(run: FlowRun, calls: Calls) -> FlowRun:
    """Return the run as another node would make it; no function is called for that."""
    before = calls.count.copy()
    copy = run.replayed()
    assert isinstance(copy, CoreRun)
    copy.__class__ = FlowRun
    assert isinstance(copy, FlowRun)
    copy.leaves = run.leaves
    assert calls.count == before, "a function was called again"
    assert copy.open == run.open
    assert bytes(copy.flow.state) == bytes(run.flow.state)
    return copy


def played(seed: str) -> tuple[Shape, FlowRun, Calls]:
    """Play a random flow in a random order to its end."""
    rng = Random(seed)
    shape, calls = draw(rng, is_rough=rng.random() < 0.5), Calls()
    run = began(shape, calls, rng.choice((3, 6, 1_000)))
    cancels_at = rng.randint(1, 12) if rng.random() < 0.15 else 0
    turns = 0
    while run.state.status is RUNNING:
        turns += 1
        if turns == cancels_at:
            run.control("CANCEL")
        elif rng.random() < 0.05:
            run.control("PAUSE")
            for step in rng.sample(list(run.state.open_steps.values()), min(2, len(run.state.open_steps))):
                if step.kind != "signal":
                    run.answer(step)
            run.control("RESUME")
        else:
            run.answer(rng.choice(list(run.state.open_steps.values())))
        if run.state.status is RUNNING:
            run = rebuilt(run, calls) if rng.random() < 0.5 else run
    return shape, run, calls


def undone(shape: Shape, run: FlowRun) -> tuple[list[str], list[str]]:
    """Return the steps with a compensation that were completed, and those that were compensated, in their orders."""
    ended = (e.StepCompleted, e.ChildCompleted)
    completed = [
        path
        for path in (event.step_id or "" for event in run.events if isinstance(event.data, ended))
        if ":" not in path and run.leaves[path.rpartition("/")[2]].is_undone
    ]
    begun = [event.step_id or "" for event in run.events if isinstance(event.data, e.StepStarted)]
    return completed, [path.removesuffix(":compensate") for path in begun if path.endswith(":compensate")]


def check(shape: Shape, run: FlowRun, calls: Calls) -> None:
    """Compare a run that has ended with what the naive interpreter says."""
    outcome = expected(shape, Counts())
    completed, compensated = undone(shape, run)
    assert len(set(compensated)) == len(compensated)
    assert set(compensated) <= set(completed)
    if run.state.status is COMPLETED:
        assert not outcome.failed
        assert Counts(**run.result) == outcome.state
    elif run.state.status is FAILED:
        assert outcome.failed
        assert any(f"<{name}>" in run.error.message or f"{name}'" in run.error.message for name in outcome.failed)
    if run.state.status in (FAILED, CANCELLED):
        assert set(compensated) == set(completed)
    has_partial = any(one.policy == "partial" and one.kind == "chorus" for one in all_of(shape))
    if not has_partial:
        assert compensated == ([] if run.state.status is COMPLETED else completed[::-1])
    assert max(calls.count.values(), default=0) <= 1, "a function was called twice"
    check_order(shape, run)


def all_of(shape: Shape) -> Iterator[Shape]:
    """Return a shape and all that is in it."""
    yield shape
    for inner in shape.inner:
        yield from all_of(inner)


def check_order(shape: Shape, run: FlowRun) -> None:
    """Check that steps of a scene begin after what stands before them has ended."""
    opened, closed = dict[str, int](), dict[str, int]()
    for event in run.events:
        leaf = (event.step_id or "").rpartition("/")[2]
        if type(event.data) in e.OPENING:
            opened.setdefault(leaf, event.run_seq)
        elif type(event.data) in e.CLOSING:
            closed[leaf] = event.run_seq
    for scene in (one for one in all_of(shape) if one.kind == "scene"):
        for earlier, later in zip(scene.inner, scene.inner[1:], strict=False):
            begins = [opened[name] for name in leaves_of(later) if name in opened]
            ends = [closed.get(name, 10**9) for name in leaves_of(earlier) if name in opened]
            assert not begins or max(ends, default=0) < min(begins), (earlier.name, later.name)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_flow_comes_to_what_a_naive_interpreter_says(seed: int) -> None:
    for number in range(FLOWS_PER_SEED):
        shape, run, calls = played(f"{seed}/{number}")
        try:
            check(shape, run, calls)
        except AssertionError:
            print(f"{seed}/{number}", shape)
            raise


def test_random_flows_come_to_every_end() -> None:
    """The generator is of use: flows succeed, fail, are cancelled, rotate, and are undone."""
    runs = [played(f"all/{number}") for number in range(150)]
    statuses = {run.state.status for _, run, _ in runs}
    assert statuses == {COMPLETED, FAILED, CANCELLED}
    seen = {type(event.data) for _, run, _ in runs for event in run.events}
    assert seen >= {e.ContinuedAsNew, e.SignalReceived, e.SignalTimedOut, e.TaskCompleted, e.ChildFailed, e.RunResumed}
    assert any(undone(shape, run)[1] for shape, run, _ in runs)
