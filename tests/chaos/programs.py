"""What the nodes run: random small programs, whose activities leave a line each in a ledger outside of the store.

A program is data, drawn from a seed: a list of operations, each a list that begins with its name. Every activity
returns something that it has never returned before, so that a recorded result leads to the very effect it came from.
The nodes of a chaos import this file as their app. `CHAOS_PLANT` names faults to plant into them, to see them found.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

import holdfast as hf
from holdfast.core import events as e
from holdfast.engine.options import NodeOptions
from holdfast.engine.turns.owned_runs import OwnedRuns
from holdfast.store import port
from holdfast.store.sqlite import SqliteStore
from tests.chaos import diary

Script = list[Any]

LEDGER = "CHAOS_LEDGER"
LEASE_MS = "CHAOS_LEASE_MS"
PLANT = "CHAOS_PLANT"
SIGNAL = "go"
PLANTED = frozenset(os.environ.get(PLANT, "").split())


class ChaosApp(hf.App):
    """An app whose nodes have the lease that the chaos asks for, however they are started."""

    async def serve(
        self, store: str | port.Store | None = None, *, name: str | None = None, options: NodeOptions | None = None
    ) -> None:
        """Run a node until it is told to end, or killed."""
        diary.keep()
        lease_ms = int(os.environ.get(LEASE_MS, 0)) or NodeOptions().lease_ms
        await super().serve(store, name=name, options=replace(options or NodeOptions(), lease_ms=lease_ms))


app = ChaosApp("chaos", limits=hf.Limits(signals_per_run_per_minute=10_000))


class Effect(Struct, frozen=True):
    """A line of the ledger: what an activity did for which step."""

    run_id: str
    step_id: str
    value: str


def append_effect(effect: Effect) -> None:
    """Write a line that is there whole or not at all, also if this process is killed at once."""
    ledger = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(ledger, f"{effect.run_id} {effect.step_id} {effect.value}\n".encode())
    finally:
        os.close(ledger)


def read_effects(path: str) -> Iterator[Effect]:
    """Yield the lines of a ledger."""
    with open(path) as ledger:
        for line in ledger:
            yield Effect(*line.split())


@app.activity(retry=hf.Retry(max_attempts=1_000, initial_ms=10))
async def work(seconds: float) -> str:
    """Do something in the world, for some time, and say what."""
    await asyncio.sleep(seconds / 2)
    context = hf.activity_context()
    effect = Effect(context.run_id, context.step_id, uuid.uuid4().hex)
    if "effect-free" not in PLANTED or not effect.value.startswith("0"):
        append_effect(effect)
    await asyncio.sleep(seconds / 2)
    return effect.value


@app.workflow
async def play(script: Script) -> list[Any]:
    """Carry out a program, and return everything that it was told."""
    return [await _carry_out(kind, *rest) for kind, *rest in script]


async def _carry_out(kind: str, *rest: Any) -> Any:
    match kind:
        case "work":
            return await work(rest[0])
        case "sleep":
            return await hf.sleep(rest[0])
        case "wait":
            return await hf.wait_signal(SIGNAL, str)
        case "all":
            return await asyncio.gather(*(_carry_out(*each) for each in rest[0]))
        case "child":
            return await play(rest[0])
    raise AssertionError(kind)


def draw_script(rng: Random, depth: int = 0) -> Script:
    """Return a random program."""
    return [_draw(rng, depth) for _ in range(rng.randint(1, 4 if depth == 0 else 2))]


def _draw(rng: Random, depth: int) -> list[Any]:
    kinds = ["work", "work", "work", "sleep", *(["wait", "all", "child"] if depth == 0 else [])]
    match rng.choice(kinds):
        case "work":
            return ["work", rng.choice((0.0, 0.0, 0.0, 0.02, 0.2, 1.0))]
        case "sleep":
            return ["sleep", rng.choice((0.01, 0.3, 2.0))]
        case "wait":
            return ["wait"]
        case "all":
            return ["all", [_draw(rng, 1) for _ in range(rng.randint(2, 4))]]
        case _:
            return ["child", draw_script(rng, 1)]


def signals_of(script: Script) -> int:
    """Return how many signals a program waits for. Children wait for none."""
    return sum(kind == "wait" for kind, *_ in script)


def leaves_of(value: Any) -> Iterator[str]:
    """Yield all that a program was told, from what it returned."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from leaves_of(each)


# --- Faults to plant into the nodes


def _drop_ends() -> None:
    """Answer, of some turns that end a run, that they are committed, and forget them."""
    commit = SqliteStore.commit

    async def commit_some(self: SqliteStore, turns: Sequence[port.Turn]) -> list[port.Committed | port.CommitConflict]:
        kept = [turn for turn in turns if not _is_dropped(turn)]
        answers = dict(zip((turn.run_id for turn in kept), await commit(self, kept), strict=True))
        return [answers.get(turn.run_id, port.Committed(turn.expected_version + len(turn.events), 0)) for turn in turns]

    SqliteStore.commit = commit_some  # type: ignore[method-assign]


def _is_dropped(turn: port.Turn) -> bool:
    return any(isinstance(event.data, e.RunCompleted) for event in turn.events) and turn.run_id.endswith("7")


def _forget_the_lost() -> None:
    OwnedRuns.lost = lambda self, owned, state, now: []  # type: ignore[method-assign]


if "dropped-commit" in PLANTED:
    _drop_ends()
if "forgotten-activities" in PLANTED:
    _forget_the_lost()
if "falls-over" in PLANTED:
    OwnedRuns.perform_effects = None  # type: ignore[assignment,method-assign]
