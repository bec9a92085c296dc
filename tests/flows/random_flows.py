"""Random flows: a shape is data; it becomes a flow, and a naive interpreter says what has to come of it.

The interpreter knows nothing of turns, events or histories: it walks the shape once. Which branch of a chorus ends
first is left open, so it only returns whether the flow succeeds, with which state, and which errors a failure may have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

import holdfast as hf
from holdfast.program.flow.steps import Step

FIELDS = 5
AMOUNT = 3


@dataclass
class Counts:
    """The state: some numbers."""

    f0: int = 0
    f1: int = 0
    f2: int = 0
    f3: int = 0
    f4: int = 0

    def add(self, number: int, amount: int) -> Counts:
        """Return the state with one number increased."""
        return Counts(**{**asdict(self), f"f{number}": self.get(number) + amount})

    def get(self, number: int) -> int:
        """Return one of the numbers."""
        value: int = getattr(self, f"f{number}")
        return value


LEAVES: tuple[str, ...] = ("act", "apply", "notify", "signal", "timeout", "sleep", "task", "child", "code")
GROUPS: tuple[str, ...] = ("scene", "chorus", "cue", "cases")
ROUGH_LEAVES = ("act", "act", "signal")
ROUGH_GROUPS = ("chorus", "chorus", "scene")
POLICIES = ("fail-fast", "fail-after-all", "partial")


class Shape(Struct, frozen=True, kw_only=True):
    """A step of a random flow, or a group."""

    kind: str
    name: str = ""
    number: int = 0
    """Which number of the state it increases or asks for."""
    fails: bool = False
    is_undone: bool = False
    condition: int | None = None
    """It is taken if this number of the state is even."""
    policy: str = "fail-fast"
    merges: bool = False
    inner: tuple[Shape, ...] = ()


def draw(rng: Random, *, is_rough: bool = False, depth: int = 0) -> Shape:
    """Return a random shape. A rough one has many branches that fail and are undone."""

    def more(least: int, most: int) -> tuple[Shape, ...]:
        return tuple(draw(rng, is_rough=is_rough, depth=depth + 1) for _ in range(rng.randint(least, most)))

    if depth == 0:
        return named(Shape(kind="scene", inner=more(1, 2 if is_rough else 4)))
    is_leaf = depth > 3 or rng.random() < (0.2 if is_rough else 0.55)
    kind = rng.choice((LEAVES if is_leaf else GROUPS) if not is_rough else ROUGH_LEAVES if is_leaf else ROUGH_GROUPS)
    shape = Shape(
        kind=kind,
        number=rng.randrange(FIELDS),
        fails=kind in ("act", "apply", "signal", "child", "code") and rng.random() < (0.3 if is_rough else 0.12),
        is_undone=kind in ("act", "apply", "child", "code") and rng.random() < (0.9 if is_rough else 0.5),
        condition=None if is_rough else rng.choice((None, None, None, rng.randrange(FIELDS))),
        policy=rng.choice(POLICIES),
        merges=rng.random() < 0.6,
    )
    if kind in LEAVES:
        return shape
    least, most = (1, 2) if kind == "cue" else (1, 3) if kind == "scene" else (2, 3)
    return replace(shape, inner=more(least, most))


def named(shape: Shape) -> Shape:
    """Return a shape in which every step has a name of its own."""
    count = Counter[str]()

    def name(one: Shape) -> Shape:
        count["all"] += 1
        own = f"{one.kind}-{count['all']}"
        return replace(one, name=own, inner=tuple(map(name, one.inner)))

    return name(shape)


def leaves_of(shape: Shape) -> dict[str, Shape]:
    """Return the steps that are no groups, by name."""
    if shape.kind not in GROUPS:
        return {shape.name: shape}
    return {name: leaf for inner in shape.inner for name, leaf in leaves_of(inner).items()}


# --- what has to come of it


@dataclass
class Outcome:
    """What comes of a step: a state, or the names of the steps that may have failed it."""

    state: Counts
    failed: frozenset[str] = frozenset()
    conflict: bool = False


def expected(shape: Shape, state: Counts) -> Outcome:
    """Return what has to come of a shape."""
    if shape.condition is not None and state.get(shape.condition) % 2:
        return Outcome(state)
    match shape.kind:
        case "scene":
            return _in_order(shape.inner, state)
        case "cue":
            chosen = shape.inner[:1] if state.get(shape.number) % 2 == 0 else shape.inner[1:]
            return _in_order(chosen, state)
        case "cases":
            return _in_order(shape.inner[state.get(shape.number) % len(shape.inner) :][:1], state)
        case "chorus":
            return _together(shape, state)
        case "notify" | "sleep":
            return Outcome(state)
        case _:
            return Outcome(state, frozenset([shape.name])) if shape.fails else Outcome(state.add(shape.number, AMOUNT))


def _in_order(shapes: tuple[Shape, ...], state: Counts) -> Outcome:
    outcome = Outcome(state)
    for shape in shapes:
        outcome = expected(shape, outcome.state)
        if outcome.failed:
            break
    return outcome


def _together(shape: Shape, state: Counts) -> Outcome:
    outcomes = [expected(branch, state) for branch in shape.inner]
    errors = frozenset(name for outcome in outcomes for name in outcome.failed)
    good = [outcome for outcome in outcomes if not outcome.failed]
    if errors and (shape.policy != "partial" or not good):
        return Outcome(state, errors)
    result = state
    changed: set[int] = set()
    for outcome in good:
        for number in range(FIELDS):
            change = outcome.state.get(number) - state.get(number)
            if change == 0:
                continue
            if number in changed and not shape.merges:
                return Outcome(state, frozenset([shape.name]))
            changed.add(number)
            result = result.add(number, change)
    return Outcome(result)


# --- as a flow


@dataclass
class Calls:
    """How often the functions of a flow were called, by the step and the function."""

    count: Counter[str] = field(default_factory=Counter)


class Broken(hf.NonRetryable):
    """What a step fails with."""


def build(app: hf.App, shape: Shape, calls: Calls, name: str = "random") -> hf.Flow[Counts]:
    """Register a shape as a flow, with its activities and children."""
    return app.flow(name, Counts, _Building(app, calls).step(shape))


def increase(leaf: Shape, state: Counts) -> Counts:
    """Return what a leaf makes of a state, or raise."""
    if leaf.fails:
        raise Broken(f"<{leaf.name}> is broken")
    return state.add(leaf.number, AMOUNT)


class _Building:
    def __init__(self, app: hf.App, calls: Calls) -> None:
        self._app = app
        self._calls = calls
        self._undo: Any = None

    def step(self, shape: Shape) -> Step[Counts]:
        """Return the step of a shape."""
        condition = self._condition(shape)
        options: dict[str, Any] = {"step": shape.name, "condition": condition}
        inner = [self.step(one) for one in shape.inner]
        if shape.kind == "scene":
            return hf.Scene(*inner, **options)
        if shape.kind == "chorus":
            return hf.Chorus(*inner, on_failure=shape.policy, merge=self._merge(shape), **options)  # type: ignore[arg-type]
        if shape.kind == "cue":
            other = inner[1] if len(inner) > 1 else None
            return hf.Cue(
                self._counted(shape, "choose", self._is_even(shape)), then=inner[0], otherwise=other, **options
            )
        if shape.kind == "cases":
            cases = {f"case{number}": one for number, one in enumerate(inner)}
            return hf.Cue(self._counted(shape, "choose", self._case(shape, len(inner))), cases=cases, **options)
        return self._leaf(shape, options)

    def _leaf(self, shape: Shape, options: dict[str, Any]) -> Step[Counts]:
        if shape.kind == "sleep":
            return hf.Sleep(self._counted(shape, "duration", lambda state: 0.001), **options)
        add = self._counted(shape, "function", lambda state, *more: increase(shape, state))
        if shape.kind == "signal":
            return hf.Signal(f"go-{shape.name}", int, on_receive=add, **options)
        if shape.kind == "timeout":
            return hf.Signal(f"go-{shape.name}", int, timeout=0.001, on_timeout=add, **options)
        if shape.kind == "task":
            return hf.Task(shape.name, int, on_answer=add, payload=lambda state: state.f0, **options)
        if shape.is_undone:
            options["compensate"] = self._undoing()
        if shape.kind in ("child", "code"):
            return hf.Child(self._child(shape), **options)
        return self._act(shape, options)

    def _act(self, shape: Shape, options: dict[str, Any]) -> Step[Counts]:
        app = self._app
        if shape.kind == "apply":

            @app.activity(name=shape.name)
            async def amount(number: int) -> int:
                if shape.fails:
                    raise Broken(f"<{shape.name}> is broken")
                return AMOUNT

            get = self._counted(shape, "input", lambda state: state.get(shape.number))
            apply = self._counted(shape, "apply", lambda state, more: state.add(shape.number, more))
            return hf.Act(amount, input=get, apply=apply, **options)
        if shape.kind == "notify":

            @app.activity(name=shape.name)
            async def notify(state: Counts) -> None:
                return None

            return hf.Act(notify, **options)

        @app.activity(name=shape.name)
        async def act(state: Counts) -> Counts:
            return increase(shape, state)

        return hf.Act(act, **options)

    def _child(self, shape: Shape) -> Any:
        app = self._app

        @app.activity(name=f"in-{shape.name}")
        async def act(state: Counts) -> Counts:
            return increase(shape, state)

        if shape.kind == "child":
            return app.flow(f"flow-{shape.name}", Counts, hf.Act(act, step="act"))

        @app.workflow(name=f"code-{shape.name}")
        async def code(state: Counts) -> Counts:
            return await act(state)

        return code

    def _undoing(self) -> Any:
        if self._undo is None:

            @self._app.activity
            async def undo(state: Counts) -> None:
                return None

            self._undo = undo
        return self._undo

    def _condition(self, shape: Shape) -> Any:
        if shape.condition is None:
            return None
        number = shape.condition
        return self._counted(shape, "condition", lambda state: state.get(number) % 2 == 0)

    def _is_even(self, shape: Shape) -> Any:
        return lambda state: state.get(shape.number) % 2 == 0

    def _case(self, shape: Shape, ways: int) -> Any:
        return lambda state: f"case{state.get(shape.number) % ways}"

    def _merge(self, shape: Shape) -> Any:
        if not shape.merges:
            return None

        def merge(state: Counts, branches: dict[str, Counts]) -> Counts:
            result = state
            for branch in branches.values():
                for number in range(FIELDS):
                    result = result.add(number, branch.get(number) - state.get(number))
            return result

        return self._counted(shape, "merge", merge)

    def _counted(self, shape: Shape, what: str, function: Any) -> Any:
        def counted(*args: Any) -> Any:
            self._calls.count[f"{shape.name}:{what}"] += 1
            return function(*args)

        return counted
