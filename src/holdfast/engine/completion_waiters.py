"""Callers that wait for runs to finish, on this node or on another.

If this node finishes the run, its waiters are notified immediately. Runs that this node does not own (parked, or taken
over by another node) are looked up in batches, never one by one. Notifications name the runs that have ended, so only
those are read. All awaited runs are looked up every `safety_poll_s`, in case a notification was lost, and when a
notification does not name the runs. These lookups take at most a tenth of the time, however many runs are awaited, but
are never delayed by more than that period. For finished runs, only the last events are read, many in one query.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct

from holdfast.core.events import Event
from holdfast.core.state import TERMINAL
from holdfast.engine.batcher import Batcher
from holdfast.engine.history import find_ends
from holdfast.errors import EngineError, StoreCorrupt, StoreError
from holdfast.store.decisions import no_such_run
from holdfast.store.port import LoadedRun, Store
from holdfast.store.types import load_each
from holdfast.store.wakeups import digest_of

PAGE_RUNS = 500
REST = 10
"""The pause after a lookup, as a multiple of its duration; at most `safety_poll_s`."""

OWNED_POLLS = 6
"""After how many periods of `safety_poll_s` runs that this node owns are looked up as well."""

logger = logging.getLogger("holdfast.node")


class Completion(Struct, frozen=True, gc=False):
    """The length of a finished run's history, and its last event, if that is known."""

    version: int
    last: Event | None = None


class Question(NamedTuple):
    """A run whose end a caller asks for, and whether the run is known to exist."""

    run_id: str
    is_known: bool


class CompletionWaiters:
    """The runs that callers in this process wait for."""

    def __init__(self, store: Store, owns: Callable[[str], bool], poll_s: float) -> None:
        self._store = store
        self._owns = owns
        self._poll_s = poll_s
        self._waiting: dict[str, list[asyncio.Future[Completion]]] = {}
        self._by_digest: dict[int, list[str]] = {}
        self._has_waiters = asyncio.Event()
        self.problem: EngineError | None = None
        self._ends: Batcher[Question, Completion | None] = Batcher(self._look_up, self._stopped, PAGE_RUNS, "ends")

    @property
    def runs_awaited(self) -> int:
        """How many runs are awaited."""
        return len(self._waiting)

    def wait(self, run_id: str) -> "asyncio.Future[Completion]":
        """Return a future that gets the run's completion. The caller ends the wait with `let_go`."""
        if self.problem is not None:
            raise self.problem
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        if run_id in self._waiting:
            self._waiting[run_id].append(future)
        else:
            self._waiting[run_id] = [future]
            self._by_digest.setdefault(digest_of(run_id), []).append(run_id)
            self._has_waiters.set()
        return future

    def let_go(self, run_id: str, future: "asyncio.Future[Completion]") -> None:
        """Forget a caller that no longer waits."""
        futures = self._waiting.get(run_id, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                self._forget(run_id)

    def _forget(self, run_id: str) -> "list[asyncio.Future[Completion]]":
        """Return the futures of a run that is no longer awaited."""
        futures = self._waiting.pop(run_id, None)
        if futures is None:
            return []
        digest = digest_of(run_id)
        alike = self._by_digest[digest]
        alike.remove(run_id)
        if not alike:
            del self._by_digest[digest]
        return futures

    async def end_of(self, run_id: str, *, is_known: bool = False) -> Completion | None:
        """Return a run's completion, or None if the run continues. Concurrent calls share one lookup.

        Raise `NotFound` if there is no such run. With `is_known` the run is known to exist and need not be loaded as
        well.
        """
        return await self._ends.ask(Question(run_id, is_known))

    async def _look_up(self, questions: list[Question]) -> list[Completion | Exception | None]:
        ends, damaged, missing = await find_ends(self._store, (run_id for run_id, _ in questions))
        known = {run_id for run_id, is_known in questions if is_known}.difference(ends, damaged, missing)
        answered = known.union(ends, missing)
        others = list(dict.fromkeys(run_id for run_id, _ in questions if run_id not in answered))
        runs = dict(zip(others, await load_each(self._store.load, others) if others else (), strict=True))
        return [
            None if run_id in known else _answer(run_id, ends.get(run_id), runs.get(run_id)) for run_id, _ in questions
        ]

    def notify(self, run_id: str, version: int, last: Event | None = None) -> None:
        """Notify every caller that waits for this run that it has finished."""
        for future in self._forget(run_id):
            if not future.done():
                future.set_result(Completion(version, last))

    def close(self, problem: EngineError | None = None) -> None:
        """Raise an error in all present and later callers: this node does not look for finished runs any more."""
        self.problem = self.problem or problem or EngineError("the node was stopped before the run had finished")
        self._ends.close()
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(self.problem)

    def _stopped(self, question: Question) -> EngineError:
        return self.problem or EngineError("the node was stopped")

    async def watch(self) -> None:
        """Look for runs that finished on other nodes, for as long as the node works."""
        while True:
            try:
                await self._watch()
            except StoreError:
                logger.warning("the store failed while finished runs were looked up; retrying", exc_info=True)
                await asyncio.sleep(self._poll_s)

    async def _watch(self) -> None:
        """Look for runs that finished on other nodes, whenever a caller waits for one.

        Runs that this node owns are looked up less often: it may have lost a run without having noticed.
        """
        loop = asyncio.get_running_loop()
        looked_at = rested_at = whole_at = loop.time()
        is_wanted = True  # notifications from before this began were missed
        listener = self._store.wakeups.listen("ends")
        try:
            while True:
                if not self._waiting:
                    self._has_waiters.clear()
                    await self._has_waiters.wait()
                due_at = rested_at if is_wanted else looked_at + self._poll_s
                is_notified = await listener.wait(max(0.0, due_at - loop.time()))
                ended = listener.take_ended()
                if ended:
                    await self._look_for_ends(ended)
                is_wanted |= ended is None or not is_notified
                began = loop.time()
                if not is_wanted or began < rested_at:
                    continue
                if is_whole := began >= whole_at + OWNED_POLLS * self._poll_s:
                    whole_at = began
                is_wanted = False
                await self._look(is_whole)
                looked_at = loop.time()
                # A lookup that was slow because the store was unavailable does not predict the next one.
                rested_at = looked_at + min(REST * (looked_at - began), self._poll_s)
        finally:
            listener.close()

    async def _look_for_ends(self, digests: frozenset[int]) -> None:
        """Look up the awaited runs that may be among the ended ones, by their digests."""
        known = self._by_digest.keys() & digests
        run_ids = [run_id for digest in known for run_id in self._by_digest[digest] if not self._owns(run_id)]
        for start in range(0, len(run_ids), PAGE_RUNS):
            await self._look_at(run_ids[start : start + PAGE_RUNS])

    async def _look(self, is_whole: bool) -> None:
        elsewhere = [run_id for run_id in self._waiting if is_whole or not self._owns(run_id)]
        for start in range(0, len(elsewhere), PAGE_RUNS):
            await self._look_at(elsewhere[start : start + PAGE_RUNS])

    async def _look_at(self, run_ids: Sequence[str]) -> None:
        """Look up which of these runs have finished and which were deleted. Nothing is read of the others."""
        ends, damaged, missing = await find_ends(self._store, run_ids)
        for run_id in missing:
            for future in self._forget(run_id):
                if not future.done():
                    future.set_exception(no_such_run(run_id))
        for run_id, end in ends.items():
            self.notify(run_id, end.run_seq, end)
        if damaged:  # its own caller reads it alone, and gets the error
            for run in await load_each(self._store.load, damaged):
                if isinstance(run, LoadedRun) and run.head.status in TERMINAL:
                    self.notify(run.head.run_id, run.head.version)


def _answer(run_id: str, end: Event | None, run: LoadedRun | StoreCorrupt | None) -> Completion | Exception | None:
    """Return how a run ended, or None if it continues. If its last event is damaged, only the number is known."""
    if end is not None:
        return Completion(end.run_seq, end)
    if isinstance(run, LoadedRun):
        return Completion(run.head.version) if run.head.status in TERMINAL else None
    return no_such_run(run_id) if run is None else run
