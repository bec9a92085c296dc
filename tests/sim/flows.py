"""Random flows for the simulator: their functions draw by chance, and a judge reads the history.

A function that is called again draws something else, so that only what was recorded can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec import UNSET, Raw

import holdfast as hf
from holdfast.app import App
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.program.flow.steps import Step
from tests.sim.world import World

KINDS = 3
"""So many different flows are in one simulation."""


@dataclass
class Seen:
    """The state: what each step has said, by its name."""

    notes: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, note: Any) -> Seen:
        """Return the state with one more note."""
        return Seen({**self.notes, name: str(note)})


def merge(before: Seen, branches: dict[str, Seen]) -> Seen:
    """Put the notes of all branches together."""
    notes = dict(before.notes)
    for branch in branches.values():
        notes |= branch.notes
    return Seen(notes)


def register_flows(app: App, world: World, work: Any) -> None:
    """Register the flows of this simulation: the same on every node."""
    flows: dict[str, Any] = {}
    for number in range(KINDS):
        name = f"flow{number}"
        drawing = _Drawing(Random(f"{name} {world.seed}"), world, work, [*flows.values()])
        flows[name] = app.flow(name, Seen, hf.Scene(*(drawing.step(0) for _ in range(3))))


class _Drawing:
    def __init__(self, rng: Random, world: World, work: Any, children: list[Any]) -> None:
        self._rng = rng
        self._world = world
        self._work = work
        self._children = children
        self._count = 0

    def step(self, depth: int) -> Step[Seen]:
        """Return a random step."""
        rng, self._count = self._rng, self._count + 1
        name = f"n{self._count}"
        options: dict[str, Any] = {"step": name}
        if rng.random() < 0.2:
            options["condition"] = lambda seen: self._world.rng.random() < 0.7
        groups = ("scene", "chorus", "chorus", "cue") if depth < 3 else ()
        kind = rng.choice(("act", "act", "act", "act", "signal", "sleep", "task", *groups))
        if kind == "act" and self._children and rng.random() < 0.15:
            return hf.Child(rng.choice(self._children), input=lambda seen: Seen(), apply=self._noting(name), **options)
        match kind:
            case "act":
                return self._act(name, options)
            case "signal":
                timeout = rng.choice((None, 0.05, 1.0, 6.0))
                late = None if timeout is None else lambda seen: seen.add(name, "late")
                return hf.Signal(
                    rng.choice(("go", "stop")),
                    str,
                    on_receive=self._noting(name),
                    timeout=timeout,
                    on_timeout=late,
                    **options,
                )
            case "sleep":
                return hf.Sleep(lambda seen: self._world.rng.choice((0.01, 0.5, 2.0)), **options)
            case "task":
                return hf.Task("ask", str, on_answer=self._noting(name), of=1, **options)
            case "scene":
                return hf.Scene(*(self.step(depth + 1) for _ in range(rng.randint(1, 3))), **options)
            case "cue":
                choose = lambda seen: self._world.rng.random() < 0.5  # noqa: E731
                return hf.Cue(choose, then=self.step(depth + 1), otherwise=self.step(depth + 1), **options)
            case _:
                policy: Any = rng.choice(("fail-fast", "fail-after-all", "partial"))
                branches = [self.step(depth + 1) for _ in range(rng.randint(2, 3))]
                return hf.Chorus(*branches, on_failure=policy, merge=merge, **options)

    def _act(self, name: str, options: dict[str, Any]) -> Step[Seen]:
        rng = self._rng
        seconds, failures = rng.choice((0.0, 0.01, 0.3, 2.0)), rng.choice((0, 0, 0, 1, 9))
        policy = hf.Retry(max_attempts=rng.choice((2, 4)), initial_ms=200, most_ms=2_000)
        where: dict[str, Any] = {
            "queue": rng.choice(("", "", "far")),
            "on_failure": rng.choice(("raise", "raise", "pause")),
        }
        is_later = rng.random() < 0.2
        undo: hf.Act[Seen] = hf.Act(self._work, input=lambda seen: {"seconds": 0.0, "failures": 0})
        return hf.Act(
            self._work,
            input=lambda seen: {"seconds": seconds, "failures": failures, "is_later": is_later},
            apply=self._noting(name),
            compensate=undo if rng.random() < 0.6 else None,
            retry=policy,
            **where,
            **options,
        )

    def _noting(self, name: str) -> Any:
        def note(seen: Seen, given: Any) -> Seen:
            return seen.add(name, f"{given} {self._world.rng.random()}")

        return note


def judge_flow(world: World, flow: hf.Flow[Seen], run_id: str, history: Sequence[e.Event]) -> None:
    """Check that the result is what was recorded, and that nothing is left of a flow that did not succeed."""
    last = history[-1].data
    world.note(f"flow   {run_id} {type(last).__name__}", f"flows: {type(last).__name__}")
    noted: set[tuple[str, str]] = set()
    for event in history:
        raw = getattr(event.data, "value", getattr(event.data, "state_after", UNSET))
        value = codec.decode(raw, object) if isinstance(raw, Raw) else None
        if isinstance(value, dict) and isinstance(value.get("notes"), dict):
            noted |= set(value["notes"].items())
    if isinstance(last, e.RunCompleted):
        result = codec.decode(last.result, Seen)
        for note in result.notes.items():
            if note not in noted:
                world.violate(f"{run_id}: its state has {note}, which no step has recorded")
        return
    done = [event.step_id or "" for event in history if isinstance(event.data, e.StepCompleted)]
    undone = {event.step_id for event in history if isinstance(event.data, e.StepStarted)}
    for step_id in done:
        node = flow.definition.nodes.get(step_id)
        if node is not None and node.compensation is not None:
            world.note(f"undone {run_id} {step_id}", "flows: undone steps")
            if node.compensation.path not in undone:
                world.violate(f"{run_id}: {step_id} was completed in a flow that did not succeed, and is not undone")
