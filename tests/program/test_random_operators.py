"""Random plans of every kind of step, whose operators do what they like; after each turn the node is gone.

There is no second interpreter that says what should happen. What has to hold whatever happens: a run that is rebuilt
from its history stands where it stood, no two events have one key, only what has succeeded is undone, and once, and a
run whose operators have gone home comes to an end.
"""

import random
from collections import Counter
from typing import Any

import pytest
from msgspec import json

from holdfast.app import App
from holdfast.core import events as e
from holdfast.core.codec import decode
from holdfast.core.messages import ControlName
from holdfast.limits import Limits
from holdfast.program.plan import program
from tests.program.naive_plan import random_plan
from tests.program.plan_run import PlanRun

pytestmark = pytest.mark.contract("WF-1", "WF-2", "SIG-13", "ATT-2", "CAN-1")

SEEDS = 100
TURNS = 40
FINISHED = ("COMPLETED", "FAILED", "CANCELLED")
COMMANDS: tuple[ControlName, ...] = ("PAUSE", "RESUME", "RETRY_STEP", "RETRY_STEP", "SKIP_STEP", "APPROVE")
MEND = e.ErrorInfo("Broken", "it broke", retryable=True)
SOURCE = {"plan_id": "q", "plan_version": "1", "sha256": "0" * 64}

app = App("operators")


@app.workflow
async def child(v: object = None, n: object = None, item: object = None) -> None:
    """Do nothing: its outcome is what a test says."""


def any_plan(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a plan with approvals, tasks, children, time limits and policies."""
    plan, inputs = random_plan(rng)
    while len(plan["steps"]) < 5:
        plan, inputs = random_plan(rng)
    for step in plan["steps"]:
        if "activity" in step:
            step["on_failure"] = rng.choice(["continue"] * 6 + ["pause"] * 3 + ["fail", "compensate"])
            kind = rng.choice(["activity"] * 6 + ["task", "workflow", "plan"])
            if kind != "activity":
                del step["activity"]
                step[kind] = {"task": "ask", "workflow": "child", "plan": "q"}[kind]
                step["on_failure"] = rng.choice(["continue"] * 4 + ["fail", "compensate"])
                if rng.random() < 0.4:
                    step["timeout"] = 3
        if rng.random() < 0.15:
            step["requires_approval"] = True
    if rng.random() < 0.15:
        plan["requires_approval"] = True
    if rng.random() < 0.4:
        plan["retry"] = {"max_attempts": rng.choice([0, 2, 3])}
    return plan, inputs


class Operated:
    """A run, what may be done to it, and what has to hold."""

    def __init__(self, seed: int, rotation_steps: int) -> None:
        self.rng = random.Random(seed)
        plan, inputs = any_plan(self.rng)
        limits = Limits(rotation_steps=rotation_steps)
        self.run = PlanRun(json.encode(plan), inputs, limits=limits, app=app)
        self.check()

    def check(self) -> None:
        """Compare the run with what is rebuilt from its history."""
        stands = _stands(self.run)
        rebuilt = self.run.again(since_rotation=self.rng.random() < 0.7)
        assert _stands(rebuilt) == stands
        if self.rng.random() < 0.5:
            self.run = rebuilt
        keys = Counter(event.idempotency_key for event in self.run.events)
        assert not [key for key, count in keys.items() if count > 1]

    def act(self) -> None:
        """Let something happen."""
        if self.rng.random() < 0.5:
            name = self.rng.choice(COMMANDS) if self.rng.random() < 0.97 else "CANCEL"
            likely = {
                "RETRY_STEP": [*self.run.state.failed_steps],
                "SKIP_STEP": [*self.run.state.failed_steps, *self.run.open],
                "APPROVE": [path.removesuffix(":approval") for path in self.run.open if path.endswith(":approval")],
            }.get(name, [])
            ids = likely if likely and self.rng.random() < 0.8 else [step.id for step in self.run.plan.plan.steps]
            step_id = None if name in ("PAUSE", "RESUME", "CANCEL") else self.rng.choice(ids) or None
            self.run.ask(name, step_id, may_override=True, raise_failure=self.rng.random() < 0.5)
        elif self.run.open:
            self.end(self.rng.choice(self.run.open), fails=self.rng.random() < 0.4)

    def end(self, path: str, fails: bool) -> None:
        """End an open step."""
        run, kind = self.run, self.run.state.open_steps[path].kind
        if kind == "timer":
            run.fire(path)
        elif kind == "signal":
            run.send(str(getattr(run.state.open_steps[path].body, "name")), 1)  # noqa: B009
        elif kind == "task":
            approves = path.endswith(":approval")
            run.answer(path, {"approved": not fails} if approves else "yes")
        elif kind == "child":
            run.child_returns(path, 1, MEND if fails else None)
        elif fails:
            run.fail(path, self.rng.choice([MEND, e.ErrorInfo("Hopeless", "it broke")]))
        else:
            run.complete(path, SOURCE if path.endswith(":plan") else self.rng.choice([1, [1, 2], {"a": 1}]))

    def finish(self) -> None:
        """Let everything end well, and the operators only resume."""
        for _ in range(200):
            if self.run.status in FINISHED:
                return
            if self.run.status == "PAUSED":
                self.run.ask("RESUME", raise_failure=True)
            elif self.run.open:
                self.end(self.rng.choice(self.run.open), fails=False)
            else:
                break
            self.check()
        raise AssertionError(f"it has not ended: {self.run.status}, {self.run.open}")

    def check_undoing(self) -> None:
        """Only what has succeeded is undone, and once."""
        ended, undone = Counter[str](), Counter[str]()
        for event in self.run.events:
            path = event.step_id or ""
            if isinstance(event.data, e.StepStarted) and path.endswith(":compensate"):
                undone[path.removesuffix(":compensate")] += event.logical_attempt_id == 1
            if isinstance(event.data, e.StepCompleted | e.ChildCompleted | e.TaskCompleted):
                ended[path] += 1
        assert all(count == 1 and ended[path] for path, count in undone.items())
        if undone:
            assert self.run.status != "COMPLETED"


def _stands(run: PlanRun) -> Any:
    """Return where a run stands: what it would carry over a rotation."""
    if run.status in FINISHED or run.status == "PAUSED":
        return run.status
    plan = run.replay.program
    assert isinstance(plan, program.PlanProgram)
    assert sorted(plan._at.open) == sorted(run.open), "the interpreter waits for what is open"
    return decode(plan._cursor(), dict[str, Any])


def play(seed: int, rotation_steps: int) -> str:
    """Run a plan to its end."""
    operated = Operated(seed, rotation_steps)
    for _ in range(operated.rng.randint(0, 2 * TURNS)):
        if operated.run.status in FINISHED:
            break
        operated.act()
        operated.check()
    operated.finish()
    operated.check_undoing()
    return operated.run.status


@pytest.mark.parametrize("rotation_steps", [1, 4, 50])
@pytest.mark.parametrize("block", range(5))
def test_whatever_operators_do_a_plan_stands_where_its_history_says(block: int, rotation_steps: int) -> None:
    ends = set()
    for seed in range(block * SEEDS // 5, (block + 1) * SEEDS // 5):
        try:
            ends.add(play(seed, rotation_steps))
        except BaseException as problem:
            problem.add_note(f"seed {seed}, rotation after {rotation_steps}")
            raise
    assert len(ends) > 1


def test_it_finds_a_rotation_that_forgets_what_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a step that failed before a rotation is begun anew behind the interpreter's back."""
    plain = program.PlanProgram._begin

    def forgetful(self: program.PlanProgram, event: e.Event) -> None:
        plain(self, event)
        self._at.failed.clear()

    handlers: dict[Any, Any] = program._ON_EVENT
    monkeypatch.setitem(handlers, e.ContinuedAsNew, forgetful)
    with pytest.raises(AssertionError):
        play_all()


def play_all() -> None:
    for seed in range(SEEDS):
        play(seed, 1)
