"""The runs that a node keeps in memory: the last ones that took a turn, and never more than so many.

What is kept is a cache. A run that is not in it is made from its history.
"""

import asyncio
from collections import OrderedDict
from contextlib import suppress

from msgspec import Raw

from holdfast.core.events import RunStarted
from holdfast.core.state import APPROVED, PENDING, state_of
from holdfast.engine.history import head_of, read_since_rotation, wait_for_event
from holdfast.engine.turns.execute import CachedRun, at_rest, rebuild
from holdfast.engine.turns.poison import is_suspect, refuse_suspect
from holdfast.errors import Conflict, NotDurable, RunawayWorkflow, RunError, RunTerminal, StoreCorrupt
from holdfast.program.replay import Replay
from holdfast.registry import Registry
from holdfast.store.port import LoadedRun, NewRun, RunHead, RunStore

START_S = 10.0
"""How long a query waits for its run to start."""

REST = 2
"""How many times as long as a replay for a query took to wait before the next one: the event loop is for turns too."""


class RunCache:
    """Live runs of one node."""

    def __init__(self, store: RunStore, registry: Registry, most: int) -> None:
        self._store = store
        self._registry = registry
        self._most = most
        self._runs: OrderedDict[str, CachedRun] = OrderedDict()
        self._deferred: dict[str, tuple[int, Replay]] = {}  # by run, with the epoch of its lease
        self._asking = asyncio.Lock()
        self._asked_again_at = 0.0

    def get(self, head: RunHead) -> CachedRun | None:
        """Return a run if it is in memory at this version."""
        cached = self._runs.get(head.run_id)
        if cached is None or cached.state.version != head.version:
            return None
        self._runs.move_to_end(head.run_id)
        return cached

    async def make(self, loaded: LoadedRun) -> tuple[CachedRun, RunError | None]:
        """Return a run, from memory or from its history; with the reason if its program cannot go on."""
        cached = self.get(loaded.head)
        if cached is not None:
            return cached, None
        epoch, before = self._deferred.pop(loaded.head.run_id, (0, None))
        self.forget(loaded.head.run_id)
        history = await read_since_rotation(self._store, loaded.head)
        before = before if epoch == loaded.head.lease_epoch else None  # else another node owned it in between
        cached, problem = rebuild(loaded.head.run_id, history, self._registry, before)
        if problem is None:
            self.keep(cached)
        return cached, problem

    async def fits(self, head: RunHead) -> bool:
        """Return whether a run waits for code that fits its history, and the code here does. Nothing is written."""
        if is_suspect(head):  # it could end this process
            return False
        try:
            history = await read_since_rotation(self._store, head)
            if not history or not state_of(head.run_id, history).awaits_definition:
                return False
            cached, problem = rebuild(head.run_id, history, self._registry)
        except (RunError, StoreCorrupt):
            return False
        cached.close()
        return problem is None

    def beginning(self, new: NewRun) -> CachedRun:
        """Return a run that is about to be created, or just was; its history is known without asking."""
        return rebuild(new.run_id, new.events, self._registry)[0]

    def keep(self, cached: CachedRun) -> None:
        """Keep a run in memory."""
        self._runs[cached.state.run_id] = cached

    def make_again(self, cached: CachedRun, loaded: LoadedRun) -> None:
        """Let go of a run whose stretch has ended too early. It is made again, and the end waits for updates then."""
        self.forget(cached.state.run_id)
        self._deferred[cached.state.run_id] = loaded.head.lease_epoch, cached.replay

    def trim(self) -> None:
        """Let go of those that have not been used for longest."""
        while len(self._runs) > self._most:
            self._runs.popitem(last=False)[1].close()

    def forget(self, run_id: str) -> None:
        """Let go of a run."""
        cached = self._runs.pop(run_id, None)
        self._deferred.pop(run_id, None)
        if cached is not None:
            cached.close()

    def close(self) -> None:
        """Let go of all."""
        for cached in self._runs.values():
            cached.close()
        self._runs.clear()

    async def at_rest(self, loaded: LoadedRun) -> CachedRun:
        """Return a run whose program is not begun."""
        self.forget(loaded.head.run_id)
        return at_rest(loaded.head.run_id, await read_since_rotation(self._store, loaded.head), self._registry)

    async def query(self, run_id: str, name: str, arguments: Raw) -> Raw:
        """Ask a run's program about its present state. A run that is about to start is asked once it has started."""
        head = await head_of(self._store, run_id)
        if head.status in (PENDING, APPROVED):
            with suppress(TimeoutError, RunTerminal):
                async with asyncio.timeout(START_S):
                    await wait_for_event(self._store, run_id, 1, lambda event: isinstance(event.data, RunStarted))
            head = await head_of(self._store, run_id)
        refuse_suspect(head)
        cached = self.get(head)
        if cached is not None and not cached.is_ahead:  # what is not durable may never come to be
            try:
                return _answer(cached, name, arguments)
            except (NotDurable, RunawayWorkflow):  # this program no longer agrees with its history
                self.forget(run_id)
                raise
        return await self._answer_from_history(head, name, arguments)

    async def _answer_from_history(self, head: RunHead, name: str, arguments: Raw) -> Raw:
        """Answer a query by replaying its run. One run is replayed at a time, and not without a pause in between.

        A replay holds up the event loop, which turns, leases and other callers share.
        """
        loop = asyncio.get_running_loop()
        async with self._asking:
            await asyncio.sleep(max(0.0, self._asked_again_at - loop.time()))
            history = await read_since_rotation(self._store, head)
            began_at = loop.time()
            # Rebuilt for this query only: a turn may be rebuilding the run at the same time, and keeps its own.
            cached, problem = rebuild(head.run_id, history, self._registry)
            try:
                if problem is not None:
                    raise problem
                return _answer(cached, name, arguments)
            finally:
                cached.close()
                self._asked_again_at = loop.time() + REST * (loop.time() - began_at)


def _answer(cached: CachedRun, name: str, arguments: Raw) -> Raw:
    if cached.replay.program is None:
        run_id, status = cached.state.run_id, cached.state.status
        raise Conflict(f"run {run_id} is {status} and has not started: it cannot answer a query", run_id=run_id)
    return cached.replay.program.query(name, arguments)
