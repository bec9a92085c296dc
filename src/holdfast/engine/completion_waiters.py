"""Callers that wait for runs to finish, on this node or on another.

The waiters of a run that this node finishes are notified at once. Runs that it does not own (parked, or taken over by
another node) are looked up together when the store notifies, and every `safety_poll_s`; never one by one. Looking takes
at most a tenth of the time, however many runs are waited for, but it is never put off for longer than that period. What
is read of a run that has finished is its last event, together with those of others.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from operator import attrgetter

from msgspec import Struct

from holdfast.core.events import Event
from holdfast.core.state import TERMINAL
from holdfast.engine.batcher import Batcher
from holdfast.engine.history import last_events
from holdfast.errors import EngineError, StoreCorrupt
from holdfast.store.decisions import no_such_run
from holdfast.store.port import RunHead, RunQuery, Store
from holdfast.store.types import load_each, pages

PAGE_RUNS = 500
REST = 10
"""How many times as long as a look took to wait before the next, within the period after which to look anyway."""

OWNED_POLLS = 6
"""After how many of these periods runs that this node owns are looked at as well."""


class Completion(Struct, frozen=True, gc=False):
    """How far a run's history goes, now that it has finished; and its last event, if that is known."""

    version: int
    last: Event | None = None


class CompletionWaiters:
    """The runs whose end callers in this process wait for."""

    def __init__(self, store: Store, owns: Callable[[str], bool], poll_s: float) -> None:
        self._store = store
        self._owns = owns
        self._poll_s = poll_s
        self._waiting: dict[str, list[asyncio.Future[Completion]]] = {}
        self._has_waiters = asyncio.Event()
        self.problem: EngineError | None = None
        self._ends: Batcher[str, Completion | None] = Batcher(self._look_up, self._stopped, PAGE_RUNS, "ends")

    @property
    def runs_awaited(self) -> int:
        """How many runs are waited for."""
        return len(self._waiting)

    def wait(self, run_id: str) -> "asyncio.Future[Completion]":
        """Return a future that gets the run's end when it has finished. The caller ends the wait with `let_go`."""
        if self.problem is not None:
            raise self.problem
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, []).append(future)
        self._has_waiters.set()
        return future

    def let_go(self, run_id: str, future: "asyncio.Future[Completion]") -> None:
        """Forget a caller that waits no longer."""
        futures = self._waiting.get(run_id, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                del self._waiting[run_id]

    async def end_of(self, run_id: str) -> Completion | None:
        """Return a run's end, or None if it goes on; looked up together with others that are asked for now."""
        return await self._ends.ask(run_id)

    async def _look_up(self, run_ids: list[str]) -> list[Completion | Exception | None]:
        runs = await load_each(self._store.load, run_ids)
        there = [run.head for run in runs if run is not None and not isinstance(run, StoreCorrupt)]
        ends = await self._ends_of(there)
        return [
            no_such_run(run_id) if run is None else run if isinstance(run, StoreCorrupt) else ends.get(run_id)
            for run_id, run in zip(run_ids, runs, strict=True)
        ]

    async def _ends_of(self, heads: Sequence[RunHead]) -> dict[str, Completion]:
        """Return the ends of those runs that have finished."""
        finished = [head for head in heads if head.status in TERMINAL]
        last = await last_events(self._store, finished)
        return {head.run_id: Completion(head.version, last.get(head.run_id)) for head in finished}

    def notify(self, run_id: str, version: int, last: Event | None = None) -> None:
        """Notify every caller that waits for this run that it has finished."""
        for future in self._waiting.pop(run_id, ()):
            if not future.done():
                future.set_result(Completion(version, last))

    def close(self, problem: EngineError | None = None) -> None:
        """Raise in every caller, also in later ones, that this node does not look for finished runs any more."""
        self.problem = self.problem or problem or EngineError("the node was stopped before the run had finished")
        self._ends.close()
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(self.problem)

    def _stopped(self, run_id: str) -> EngineError:
        return self.problem or EngineError("the node was stopped")

    async def watch(self) -> None:
        """Look for runs that finished on other nodes, as long as a caller waits for one.

        Those that this node owns are looked at less often: it may have lost a run without having noticed.
        """
        loop = asyncio.get_running_loop()
        whole_at = loop.time()
        listener = self._store.wakeups.listen()
        try:
            while True:
                if not self._waiting:
                    self._has_waiters.clear()
                    await self._has_waiters.wait()
                await listener.wait(self._poll_s)
                began = loop.time()
                if is_whole := began >= whole_at + OWNED_POLLS * self._poll_s:
                    whole_at = began
                await self._look(is_whole)
                # A look that took long because the store was away does not predict the next.
                await asyncio.sleep(min(REST * (loop.time() - began), self._poll_s))
        finally:
            listener.close()

    async def _look(self, is_whole: bool) -> None:
        elsewhere = [run_id for run_id in self._waiting if is_whole or not self._owns(run_id)]
        for start in range(0, len(elsewhere), PAGE_RUNS):
            await self._look_at(elsewhere[start : start + PAGE_RUNS])

    async def _look_at(self, run_ids: list[str]) -> None:
        """Look which of these runs have finished; of the others nothing is read."""
        query, left = RunQuery(run_ids=tuple(run_ids), finished_from=0, limit=len(run_ids)), len(run_ids)
        async with aclosing(pages(self._store.find, query, attrgetter("run_id"))) as found:
            async for page in found:
                for run_id, end in (await self._ends_of(page)).items():
                    self.notify(run_id, end.version, end.last)
                left -= len(page)
                if not left:
                    return
