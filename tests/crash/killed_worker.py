"""A process that works until it is killed: it creates runs, sends signals and commits turns, without a pause."""

from __future__ import annotations

import itertools
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core import codec
from holdfast.core.commands import (
    AskHuman,
    Command,
    CompleteRun,
    ContinueAsNew,
    RecordMarker,
    RunActivity,
    StartTimer,
    WaitSignal,
)
from holdfast.core.messages import ActivitySucceeded, Message, SignalRequest
from holdfast.core.state import RUNNING, state_of
from holdfast.engine.turns.draft import TurnDraft
from holdfast.store.port import LoadedRun, RunQuery, Turn
from holdfast.store.sqlite import SqliteStore
from holdfast.testing.samples import new_run, read_history
from tests.crash.ledger import Intent
from tests.races.stores import GENEROUS, HOUR_MS

Report = Callable[[object], None]
"""Writes a note to whoever will kill us. What has been told before the kill arrives, whole or not at all."""


def pack(note: object) -> bytes:
    """Return a note as it goes through the pipe."""
    data = pickle.dumps(note)
    return struct.pack("!I", len(data)) + data


def unpack(data: bytes) -> tuple[list[Any], bytes]:
    """Return the whole notes in `data`, and the beginning of one that has not fully arrived."""
    notes = []
    while len(data) >= 4:
        (size,) = struct.unpack_from("!I", data)
        if len(data) < 4 + size:
            break
        notes.append(pickle.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    return notes, data


class KilledWorker:
    """The work of one life. `name` tells it from all other lives; `node` is the same in every life of a lane."""

    def __init__(self, path: Path, name: str, node: str, seed: str, tell: Report) -> None:
        self._path = path
        self._name = name
        self._node = node
        self._tell = tell
        self._chance = random.Random(seed)
        self._numbers = itertools.count()

    async def live(self, unanswered: Intent | None) -> None:
        """Repeat what the last life did not see the end of, and go on from there; never return."""
        store = await SqliteStore.open(self._path, limits=GENEROUS)
        await store.migrate()
        if unanswered is not None:
            await self._carry_out(store, unanswered)
        await store.renew(self._node, HOUR_MS)
        while True:
            work = self._chance.choice((self._create, self._deliver, self._commit, self._commit))
            intent = await work(store)
            if intent is not None:
                await self._carry_out(store, intent)

    async def _carry_out(self, store: SqliteStore, intent: Intent) -> None:
        self._tell(intent)
        self._tell(await intent.carry_out(store))

    def _unique(self, prefix: str) -> str:
        return f"{prefix}-{self._name}-{next(self._numbers)}"

    async def _create(self, store: SqliteStore) -> Intent:
        runs = tuple(new_run(self._unique("run")) for _ in range(self._chance.randint(1, 3)))
        return Intent("create", runs, self._node if self._chance.random() < 0.3 else None)

    async def _deliver(self, store: SqliteStore) -> Intent | None:
        heads = await store.find(RunQuery(status=RUNNING, limit=20))
        if not heads:
            return None
        items: list[SignalRequest | Message] = []
        for _ in range(self._chance.randint(1, 3)):
            run_id = self._chance.choice(heads).run_id
            name = self._chance.choice(("go", "stop"))
            payload = codec.encode("x" * self._chance.choice((1, 100, 20_000)))
            items.append(SignalRequest(run_id=run_id, name=name, signal_id=self._unique("click"), payload=payload))
        if self._chance.random() < 0.2:
            message_id = self._unique("message")
            items.append(Message(signal_id=message_id, run_id=run_id, type="InternalContinue", occurred_at=1))
        return Intent("deliver", tuple(items))

    async def _commit(self, store: SqliteStore) -> Intent | None:
        claimed = await store.claim(self._node, self._chance.randint(1, 5))
        turns = [await self._turn(store, loaded) for loaded in claimed]
        return Intent("commit", tuple(turns)) if turns else None

    async def _turn(self, store: SqliteStore, loaded: LoadedRun) -> Turn:
        run_id, now = loaded.head.run_id, await store.now()
        turn = TurnDraft(state_of(run_id, await read_history(store, run_id)), loaded, now, self._node)
        for message in loaded.messages:
            turn.handle(message)
        for signal in loaded.signals:
            turn.handle(signal)
        if turn.state.status is RUNNING:
            turn.apply_commands([self._command(turn, now)])
            for step_id in turn.dispatch:
                turn.handle(ActivitySucceeded(step_id, 1, codec.encode("done")))
        if turn.state.status is RUNNING and not turn.state.open_steps:
            turn.apply_commands([WaitSignal(step_id=f"step#{turn.state.version}", name="go")])
        return turn.finish(release=self._chance.random() < 0.5)

    def _command(self, turn: TurnDraft, now: int) -> Command:
        step_id = f"step#{turn.state.version}"
        choices: tuple[Command, ...] = (
            WaitSignal(step_id=step_id, name="go"),
            WaitSignal(step_id=step_id, name="stop", until=now + 3_000),
            StartTimer(step_id=step_id, due_at=now + 1_000),
            AskHuman(step_id=step_id, name="approve"),
            RunActivity(step_id=step_id, name="charge"),
            RecordMarker(step_id=step_id, name="note", value=codec.encode("y" * 5_000)),
            ContinueAsNew(),
            CompleteRun(),
        )
        return self._chance.choice(choices)
