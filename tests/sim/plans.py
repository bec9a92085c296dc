"""Random plans for the simulator, and a judge that reads their histories: the order of steps, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.program.plan.definition import PlanDefinition
from tests.sim.world import World

ENDED = (e.StepCompleted, e.StepFailed, e.StepSkipped, e.TimerFired, e.SignalReceived, e.SignalTimedOut)
OPENED = (e.StepStarted, e.TimerStarted, e.SignalWaiting)


def draw_document(rng: Random, number: int) -> dict[str, Any]:
    """Return a random plan."""
    steps: list[dict[str, Any]] = []
    for place in range(rng.randint(2, 9)):
        step: dict[str, Any] = {"id": f"s{place}"}
        if place and rng.random() < 0.8:
            step["depends_on"] = sorted({f"s{rng.randrange(place)}" for _ in range(rng.randint(1, 3))})
        kind = rng.choice(("work", "work", "work", "work", "each", "sleep", "wait"))
        if kind == "sleep":
            step["sleep"] = rng.choice((0.01, 0.5, 2.0))
        elif kind == "wait":
            step |= {"signal": rng.choice(("go", "stop")), "timeout": rng.choice((0.05, 1.0, 6.0))}
            step["on_failure"] = "continue"
        else:
            failures = rng.choice((0, 0, 0, 1, 9))
            step |= {"activity": "work", "input": {"seconds": rng.choice((0.0, 0.3, 2.0)), "failures": failures}}
            step["on_failure"] = rng.choice(("fail", "continue", "continue", "compensate", "pause"))
            step["retry"] = {"max_attempts": rng.choice((2, 3)), "initial_ms": 200}
            if rng.random() < 0.3:
                step["queue"] = "far"
            if rng.random() < 0.5:
                step["compensate"] = {"activity": "work", "input": {"seconds": 0.0, "failures": 0}}
            if kind == "each":
                step |= {"for_each": [1, 2, 3], "max_concurrency": rng.randint(1, 3)}
        if place and rng.random() < 0.2:
            step["when"] = f"${{steps.s{rng.randrange(place)}.status != 'FAILED'}}"
        steps.append(step)
    document: dict[str, Any] = {"plan": f"sim{number}", "version": "1", "steps": steps}
    if rng.random() < 0.3:
        document["retry"] = {"max_attempts": 2, "initial_ms": 300}
    return document


def judge_plan(world: World, definition: PlanDefinition, run_id: str, history: Sequence[e.Event]) -> None:
    """Check that no step began before what it depends on had ended, and that the result is what was recorded."""
    last = history[-1].data
    world.note(f"plan   {run_id} {type(last).__name__}", f"plans: {type(last).__name__}")
    ended: set[str] = set()
    running: dict[str, set[str]] = {}
    results: dict[str, Any] = {}
    for event in history:
        step_id = event.step_id or ""
        name, _, part = step_id.partition(":")
        own, _, item = name.partition("[")
        is_decision = isinstance(event.data, e.MarkerRecorded) and event.data.name in ("skipped", "when", "failed")
        if is_decision and bytes(getattr(event.data, "value", b"")) != b"true":
            ended.add(own)
        if part or own not in definition.by_id:
            continue
        compiled = definition.by_id[own]
        if isinstance(event.data, OPENED):
            running.setdefault(own, set()).add(name)
            most = compiled.step.max_concurrency
            if item and most is not None and len(running[own]) > most:
                world.violate(f"{run_id}: {len(running[own])} items of {own} are under way, and {most} may be")
            for other in compiled.depends_on:
                needed = definition.steps[other].step.id
                if needed not in ended and running.get(needed):
                    world.violate(f"{run_id}: {step_id} began before {needed} had ended")
                elif needed not in ended and needed not in running:
                    world.violate(f"{run_id}: {step_id} began, and {needed} never did")
        elif isinstance(event.data, ENDED):
            running.setdefault(own, set()).discard(name)
            ended.add(own)
            if isinstance(event.data, e.StepCompleted) and not item:
                results[own] = codec.decode(event.data.result, object)
    if isinstance(last, e.RunCompleted):
        output = codec.decode(last.result, dict[str, Any])
        for name, value in output.items():
            if definition.by_id[name].step.for_each is None and name in results and results[name] != value:
                world.violate(f"{run_id}: the output of {name} is {value!r}, and {results[name]!r} was recorded")
