"""The clients of a chaos: each starts a run, sends it signals, and waits for its end, until each is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from holdfast.core.messages import AcceptedSignalResult
from holdfast.errors import EngineError, HoldfastError
from holdfast.store.port import Store
from tests.chaos.programs import SIGNAL, Script, app, draw_script, play, signals_of

T = TypeVar("T")

AGAIN_S = 0.1
WATCHED_S = 5.0


@dataclass
class Promise:
    """What the engine has acknowledged of one run."""

    run_id: str
    script: Script
    is_started: bool = False
    signals: list[AcceptedSignalResult] = field(default_factory=list)
    result: list[Any] | None = None


class Clients:
    """As many clients as there are runs, over so many seconds."""

    def __init__(self, runs: int, seconds: float, rng: Random, works: int = 0) -> None:
        more: Script = [["work", 0.0]] * works
        self.promises = [Promise(f"r{number:07}", draw_script(rng) + more) for number in range(runs)]
        self._seconds = seconds
        self._rng = rng
        self.answered = 0
        self.repeated = 0
        self.refused: list[str] = []
        self._progress = asyncio.Event()

    async def serve_all(self, patience_s: float) -> None:
        """Let every client have its answers; give up when for so long nobody has had one, and no run went on."""
        clients = [asyncio.create_task(self._serve(promise)) for promise in self.promises]
        try:
            while not all(client.done() for client in clients):
                self._progress.clear()
                async with asyncio.timeout(patience_s):
                    await self._progress.wait()
            for client in clients:
                client.result()
        except TimeoutError:
            return  # the judge says what is missing
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _serve(self, promise: Promise) -> None:
        try:
            await asyncio.sleep(self._rng.uniform(0.0, self._seconds))
            handle = await self._until_answered(
                lambda: app.start(play, promise.script, run_id=promise.run_id, request_id=promise.run_id)
            )
            promise.is_started = True
            for number in range(signals_of(promise.script)):
                await asyncio.sleep(self._rng.choice((0.0, 0.05, 1.0)))
                signal_id = f"{promise.run_id}-{number}"
                promise.signals.append(await self._until_answered(self._sending(handle, signal_id)))
            promise.result = await self._until_answered(handle.result)
        except HoldfastError as refusal:
            self.refused.append(f"{promise.run_id}: its client was refused: {refusal!r}")
        finally:
            self._progress.set()  # also for whoever waits for the last one

    async def watch(self, store: Store) -> None:
        """Note, without end, that runs go on, though no client is answered."""
        cursor = ""
        while True:
            with suppress(EngineError):
                found = await store.changes(cursor)
                if cursor and (found.runs or found.is_lost):
                    self._progress.set()
                cursor = found.cursor
            await asyncio.sleep(WATCHED_S)

    def _sending(self, handle: Any, signal_id: str) -> Callable[[], Awaitable[AcceptedSignalResult]]:
        return lambda: handle.signal(SIGNAL, f"signal {signal_id}", signal_id=signal_id)

    async def _until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the same again until there is an answer, whatever became of the calls before."""
        while True:
            try:
                answer = await ask()
            except (EngineError, TimeoutError):
                self.repeated += 1
                await asyncio.sleep(AGAIN_S)
                continue
            self.answered += 1
            self._progress.set()
            return answer
