"""The clients of a chaos: each starts a run, sends it signals, and waits for its end, until each is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from holdfast.core.messages import AcceptedSignalResult, Actor
from holdfast.errors import CallerError, EngineError, HoldfastError, RunCancelled
from holdfast.store.port import Store, TaskQuery
from tests.chaos.programs import SIGNAL, Script, app, draw_script, given_to, play

T = TypeVar("T")

AGAIN_S = 0.1
WATCHED_S = 5.0
TASKS_S = 1.0
CANCELLED = 0.05
"""How many of the programs are cancelled by their clients, at some time."""
PERSON = Actor("ann", ())


@dataclass
class Promise:
    """What the engine has acknowledged of one run."""

    run_id: str
    script: Script
    is_started: bool = False
    signals: list[AcceptedSignalResult] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)
    """The updates that were answered."""
    result: list[Any] | None = None
    cancels_after: int | None = None
    """After so much of what it needs its client cancels it, if it does."""
    was_cancelled: bool = False
    """Whether its client was told that it is cancelled, in the end."""


class Clients:
    """As many clients as there are runs, over so many seconds."""

    def __init__(self, runs: int, seconds: float, rng: Random, works: int = 0) -> None:
        more: Script = [["work", 0.0]] * works
        self.promises = [Promise(f"r{number:07}", draw_script(rng) + more) for number in range(runs)]
        for promise in self.promises:
            if rng.random() < CANCELLED:
                promise.cancels_after = rng.randint(0, len(given_to(promise.script)))
        self.tasks: dict[str, str] = {}
        """The answers to tasks that were acknowledged, by task."""
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
                lambda: app.start(play, promise.script, [], [], run_id=promise.run_id, request_id=promise.run_id)
            )
            promise.is_started = True
            for number, kind in enumerate(given_to(promise.script)[: promise.cancels_after]):
                await asyncio.sleep(self._rng.choice((0.0, 0.05, 1.0)))
                await self._give(promise, handle, kind, f"{promise.run_id}-{number}")
            if promise.cancels_after is not None:
                await asyncio.sleep(self._rng.choice((0.0, 0.05, 1.0)))
                await self._cancel(promise, handle)
            try:
                promise.result = await self._until_answered(handle.result)
            except RunCancelled:
                promise.was_cancelled = True
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

    async def answer_tasks(self) -> None:
        """Be the people who answer tasks, without end."""
        while True:
            with suppress(EngineError):
                for task in await app.tasks.find(TaskQuery(status="OPEN", limit=100)):
                    answer = f"answer {task.task_id}"
                    try:
                        await app.tasks.complete(task.task_id, answer, actor=PERSON, operation_id=answer)
                        self.tasks[task.task_id] = answer
                    except CallerError:  # its run was cancelled meanwhile
                        continue
            await asyncio.sleep(TASKS_S)

    async def _give(self, promise: Promise, handle: Any, kind: str, its_id: str) -> None:
        """Give a program a signal that it waits for, or an update."""
        if kind == "wait":
            sent = await self._until_answered(lambda: handle.signal(SIGNAL, f"signal {its_id}", signal_id=its_id))
            promise.signals.append(sent)
        else:
            await self._until_answered(lambda: handle.update("note", token=its_id, update_id=its_id))
            promise.updates.append(its_id)

    async def _cancel(self, promise: Promise, handle: Any) -> None:
        with suppress(CallerError):  # it has ended before
            await self._until_answered(lambda: handle.cancel("enough", signal_id=f"{promise.run_id}-cancel"))

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
