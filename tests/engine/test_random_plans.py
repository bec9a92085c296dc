"""Random plans on every store, each turn by a program that is made again from the history; nodes come and go.

What an activity does depends on its step alone, so the naive interpreter knows how the run has to end.
"""

import random
from hashlib import sha256
from typing import Any

import pytest
from msgspec import json

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.invariants import check, check_drained
from holdfast.engine.check_histories import check_store
from holdfast.engine.history import wait_for_event
from holdfast.errors import RunFailed
from holdfast.program.plan.definition import PlanDefinition
from holdfast.store.port import Store
from holdfast.testing import system_view
from tests.program.naive_plan import Naive, random_plan

pytestmark = pytest.mark.contract("WF-1", "WF-2", "WF-5", "OWN-3", "CAN-1", "INV")

PLANS = 12


def outcome_of(seed: int, path: str) -> tuple[bool, Any]:
    """Return what the activity of a step does: the same each time that it is tried."""
    drawn = random.Random(sha256(f"{seed} {path}".encode()).hexdigest())
    if drawn.random() < 0.12 and ":" not in path:
        return False, "Broken"
    return True, drawn.choice([None, 1, "text", [1, 2], {"a": 1}, []])


class Broken(hf.NonRetryable):
    """An activity fails by design."""


def make_app(rotation_steps: int) -> hf.App:
    app = hf.App("random", limits=hf.Limits(rotation_steps=rotation_steps))

    async def effect() -> Any:
        context = hf.activity_context()
        is_good, value = outcome_of(int(context.run_id.partition("/")[0]), context.step_id)  # forks too
        if not is_good:
            raise Broken("by design")
        return value

    @app.activity(retry=hf.Retry(max_attempts=0, initial_ms=1, count_lost=False))  # nodes stop while it is tried
    async def act(v: Any = None, n: Any = None, item: Any = None) -> Any:
        return await effect()

    @app.activity(retry=hf.Retry(max_attempts=0, initial_ms=1, count_lost=False))
    async def undo(v: Any) -> None: ...

    return app


def expected_of(seed: int, plan: dict[str, Any], inputs: dict[str, Any]) -> tuple[Any, bool]:
    """Return the result that a run of the plan has, and whether it has one: else it fails."""
    naive, outcomes = Naive(plan, inputs), dict[str, tuple[bool, Any]]()
    while True:
        outlook = naive.outlook(outcomes)
        if outlook.failed_at is not None:
            return None, False
        if outlook.is_done:
            return outlook.result, True
        for path in outlook.open:
            step = naive.steps[path.partition("[")[0]]
            outcomes[path] = outcome_of(seed, path) if "activity" in step else (True, None)


@pytest.mark.parametrize("rotation_steps", [1, 50])
async def test_random_plans_end_as_the_naive_interpreter_says(store: Store, rotation_steps: int) -> None:
    options = hf.NodeOptions(cached_runs=0, drain_s=0.01)
    expected: dict[str, tuple[Any, bool]] = {}
    app = make_app(rotation_steps)
    async with app.node(store, options=options):
        for seed in range(PLANS):
            plan, inputs = random_plan(random.Random(seed))
            for step in plan["steps"]:
                step |= {"sleep": 0.001} if "sleep" in step else {}
            expected[str(seed)] = expected_of(seed, plan, inputs)
            run = await app.plans.start(json.encode(plan), inputs, run_id=str(seed))
            waits = [step["signal"] for step in plan["steps"] if "signal" in step]
            for name in waits if expected[str(seed)][1] else ():
                await run.signal(name, None)
    for seed_text, (result, is_good) in expected.items():  # a node for each, which finds what the others have left
        again = make_app(rotation_steps)
        async with again.node(store, options=options):
            if is_good:
                assert await again.run(seed_text).result() == result, f"seed {seed_text}"
            else:
                with pytest.raises(RunFailed, match="by design"):
                    await again.run(seed_text).result()
    assert await check_store(again.registry, store, finished=True) == []
    view = await system_view(store, [])
    assert check(view) == []
    assert check_drained(view) == []


async def test_check_histories_names_what_a_history_does_not_fit(store: Store) -> None:
    """A body cannot change, because its hash would: this stands for an interpreter that has changed."""
    app = make_app(50)
    steps = [{"id": "a", "activity": "act"}, {"id": "w", "signal": "go", "depends_on": ["a"]}]
    body = json.encode({"plan": "p", "version": "1", "steps": steps})
    async with app.node(store):
        await app.plans.start(body, run_id="2")
        await wait_for_event(store, "2", 1, lambda event: isinstance(event.data, e.SignalWaiting))
    assert await check_store(make_app(50).registry, store) == []
    other = make_app(50)
    changed = PlanDefinition(body.replace(b'"signal":"go"', b'"signal":"come"'))
    changed.sha256 = PlanDefinition(body).sha256
    other.registry.plans.keep(changed)
    [problem] = await check_store(other.registry, store)
    assert (problem.run_id, problem.code) == ("2", "NondeterminismError")
    assert "step 'w'" in problem.message
