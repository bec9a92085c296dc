"""Random plans: after each outcome the interpreter has opened what the naive one says, with the same input.

The program is rebuilt from its history at random, so that a crash may come after every commit; with a history that is
rotated as often as it can be, and with one that never is.
"""

import random
from typing import Any

import pytest
from msgspec import json

from holdfast.limits import Limits
from holdfast.program.plan import program
from tests.program.naive_plan import Naive, random_plan
from tests.program.plan_run import PlanRun

pytestmark = pytest.mark.contract("WF-1", "WF-2", "WF-5", "CAN-1")

SEEDS = 120


def play(seed: int, rotation_steps: int, crash_every: float = 0.5) -> PlanRun:
    """Run a random plan to its end, and compare all the way."""
    rng = random.Random(seed)
    plan, inputs = random_plan(rng)
    naive = Naive(plan, inputs)
    run = PlanRun(json.encode(plan), inputs, limits=Limits(rotation_steps=rotation_steps))
    outcomes: dict[str, tuple[bool, Any]] = {}
    while True:
        expected = naive.outlook(outcomes)
        assert {path: _input(run, path) for path in run.open} == expected.open
        if expected.is_done:
            break
        if rng.random() < crash_every:
            run = run.again(since_rotation=rng.random() < 0.7)
        path = rng.choice(run.open)
        outcomes[path] = _end(run, path, rng)
    if expected.failed_at is None:
        assert run.result == expected.result
    else:
        assert run.status == "FAILED"
        assert f"step {expected.failed_at}: Broken" in run.error.message
    run.again(since_rotation=False)
    return run


def _input(run: PlanRun, path: str) -> Any:
    return run.input_of(path) if run.state.open_steps[path].kind == "activity" else {}


def _end(run: PlanRun, path: str, rng: random.Random) -> tuple[bool, Any]:
    kind = run.state.open_steps[path].kind
    if kind == "timer":
        run.fire(path)
        return True, None
    value = rng.choice([None, 1, "text", [1, 2], {"a": 1}, []])
    if kind == "signal":
        run.send(f"sig-{path}", value)
        return True, value
    if rng.random() < 0.2:
        run.fail(path)
        return False, "Broken"
    run.complete(path, value)
    return True, value


@pytest.mark.parametrize("rotation_steps", [1, 3, 50])
@pytest.mark.parametrize("block", range(6))
def test_random_plans_do_as_the_naive_interpreter_says(block: int, rotation_steps: int) -> None:
    rotations = 0
    for seed in range(block * SEEDS // 6, (block + 1) * SEEDS // 6):
        try:
            rotations += play(seed, rotation_steps).rotations
        except BaseException:
            print(f"seed {seed}, rotation_steps {rotation_steps}")
            raise
    if rotation_steps == 1:
        assert rotations > 0


def test_no_two_events_of_a_plan_have_the_same_key() -> None:
    for seed in range(SEEDS):
        keys = [event.idempotency_key for event in play(seed, 2, crash_every=0.0).events]
        assert len(set(keys)) == len(keys), f"seed {seed}"


def play_all() -> None:
    for seed in range(SEEDS):
        play(seed, 50)


def test_a_bug_in_the_interpreter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: what waits for a failed step is begun like anything else."""
    plain = program.PlanProgram._settle

    def forgetful(self: Any, position: int, status: int, *more: Any) -> None:
        plain(self, position, program.SUCCESS if status == program.FAILED else status, *more)

    monkeypatch.setattr(program.PlanProgram, "_settle", forgetful)
    with pytest.raises(AssertionError):
        play_all()
