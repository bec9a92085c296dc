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
from holdfast.engine.activities.executor import ActivityExecutor
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
QUEUE = "far"
PLANTED = frozenset(os.environ.get(PLANT, "").split())


class ChaosApp(hf.App):
    """An app whose nodes have the lease that the chaos asks for, however they are started."""

    async def serve(
        self, store: str | port.Store | None = None, *, name: str | None = None, options: NodeOptions | None = None
    ) -> None:
        """Run a node until it is told to end, or killed."""
        diary.keep()
        lease_ms = int(os.environ.get(LEASE_MS, 0)) or NodeOptions().lease_ms
        given = replace(options or NodeOptions(), lease_ms=lease_ms, queues=(QUEUE,), visible_ms=lease_ms)
        await super().serve(store, name=name, options=given)


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


# --- charges: effects with a key, whose books are outside of the store too


def books(ledger: str) -> str:
    """Return the folder of the books: one for each key, a line for each charge and for each question about it."""
    return f"{ledger}-keyed"


def charges_in(path: str) -> list[Effect]:
    """Return what a key was charged. A charge that came after a question to which an attempt after it led is void."""
    found, asked_by = [], 0
    with open(path) as book:
        for line in book:
            what, attempt, *effect = line.split()
            if what == "asked":
                asked_by = max(asked_by, int(attempt))
            elif int(attempt) >= asked_by:
                found.append(Effect(*effect))
    return found


def _note(token: str, line: str) -> list[Effect]:
    """Add a line to the book of a key, and return what it was charged."""
    folder = books(os.environ[LEDGER])
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, token)
    book = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(book, f"{line}\n".encode())
    finally:
        os.close(book)
    return charges_in(path)


async def find_charge(token: str) -> hf.Completed | hf.NotCompleted:
    """Answer whether a key was charged. No attempt before the present one charges it from now on."""
    charged = _note(token, f"asked {hf.activity_context().engine_attempt_id}")
    return hf.Completed(charged[-1].value) if charged else hf.NotCompleted()


@app.activity(
    idempotency_key=lambda token: token, verify=find_charge, retry=hf.Retry(max_attempts=1_000, initial_ms=10)
)
async def charge(token: str) -> str:
    """Charge a key, and say under which number."""
    context = hf.activity_context()
    await asyncio.sleep(0.02)
    value = uuid.uuid4().hex
    charged = _note(token, f"charge {context.engine_attempt_id} {context.run_id} {context.step_id} {value}")
    if all(effect.value != value for effect in charged):
        raise ConnectionError("somebody has asked meanwhile, and was answered that nothing was charged")
    await asyncio.sleep(0.02)
    return value


# --- programs


@app.workflow
async def play(script: Script, told: list[Any], updates: list[str]) -> list[Any]:
    """Carry out a program, and return everything that it was told."""
    arrived: asyncio.Queue[str] = asyncio.Queue()
    for token in updates:
        arrived.put_nowait(token)

    async def note(token: str) -> str:
        await hf.sleep(0.01)
        arrived.put_nowait(token)
        return token

    hf.on_update("note", note)
    for position, (kind, *rest) in enumerate(script):
        if kind == "again":
            hf.continue_as_new(script[position + 1 :], told, [arrived.get_nowait() for _ in range(arrived.qsize())])
        told.append(await (arrived.get() if kind == "update" else _carry_out(kind, *rest)))
    return told


async def _carry_out(kind: str, *rest: Any) -> Any:
    match kind:
        case "work":
            return await work(rest[0])
        case "job":
            return await work.options(queue=QUEUE)(rest[0])
        case "charge":
            return await charge(rest[0])
        case "ask":
            return await hf.task("ask", str)
        case "limit":
            try:
                async with asyncio.timeout(rest[0]):
                    return await work(0.2)
            except TimeoutError:
                return None
        case "sleep":
            return await hf.sleep(rest[0])
        case "wait":
            return await hf.wait_signal(SIGNAL, str)
        case "all":
            return await asyncio.gather(*(_carry_out(*each) for each in rest[0]))
        case "child":
            return await play(rest[0], [], [])
    raise AssertionError(kind)


def draw_script(rng: Random, depth: int = 0) -> Script:
    """Return a random program."""
    return [_draw(rng, depth) for _ in range(rng.randint(1, 4 if depth == 0 else 2))]


ANYWHERE = ("work", "work", "work", "sleep", "job", "charge", "limit")
AT_THE_TOP = ("wait", "wait", "all", "child", "ask", "update", "again")


def _draw(rng: Random, depth: int) -> list[Any]:
    match kind := rng.choice((*ANYWHERE, *(AT_THE_TOP if depth == 0 else ()))):
        case "work" | "job":
            return [kind, rng.choice((0.0, 0.0, 0.0, 0.02, 0.2, 1.0))]
        case "charge":
            return ["charge", f"{rng.getrandbits(64):016x}"]
        case "limit":
            return ["limit", rng.choice((0.05, 0.3, 2.0))]
        case "sleep":
            return ["sleep", rng.choice((0.01, 0.3, 2.0))]
        case "wait" | "ask" | "update" | "again":
            return [kind]
        case "all":
            return ["all", [_draw(rng, 1) for _ in range(rng.randint(2, 4))]]
        case _:
            return ["child", draw_script(rng, 1)]


def given_to(script: Script) -> list[str]:
    """Return what a program has to be given, in order: signals and updates. Children need nothing."""
    return [kind for kind, *_ in script if kind in ("wait", "update")]


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


def _trust() -> None:
    """Carry keyed steps out again without asking whether they have happened."""

    async def trust(self: ActivityExecutor, attempt: Any, context: Any, deadline: float | None) -> None:
        return None

    ActivityExecutor._verify = trust  # type: ignore[method-assign]


if "unverified" in PLANTED:
    _trust()
if "falls-over" in PLANTED:
    OwnedRuns.perform_effects = None  # type: ignore[assignment,method-assign]
