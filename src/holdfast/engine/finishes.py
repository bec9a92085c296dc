"""Who waits for runs to finish, and how they are told, wherever the runs finish.

A run that this node finishes is told at once. Runs that it does not hold (parked, or taken over by another node) are
looked up together when the store rings and now and then; never one by one, and looking takes at most a tenth of the
time, however many are waited for.
"""

import asyncio
from collections.abc import Callable

from msgspec import Struct

from holdfast.core.events import Event
from holdfast.core.state import TERMINAL
from holdfast.errors import EngineError, StoreCorrupt
from holdfast.store.port import LoadedRun, Store

PAGE_RUNS = 500
REST = 10
"""How many times as long as a look took to wait before the next."""


class Finish(Struct, frozen=True, gc=False):
    """How far a run's history goes, now that it has finished; and its last event, if that happened here."""

    version: int
    last: Event | None = None


class Finishes:
    """The runs whose end somebody in this process waits for."""

    def __init__(self, store: Store, holds: Callable[[str], bool], poll_s: float) -> None:
        self._store = store
        self._holds = holds
        self._poll_s = poll_s
        self._waiting: dict[str, list[asyncio.Future[Finish]]] = {}
        self._someone = asyncio.Event()

    def wait(self, run_id: str) -> "asyncio.Future[Finish]":
        """Return a future that is given the run's end when it has finished. Who asks says when it is let go."""
        future: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, []).append(future)
        self._someone.set()
        return future

    def let_go(self, run_id: str, future: "asyncio.Future[Finish]") -> None:
        """Forget somebody who waits no longer."""
        futures = self._waiting.get(run_id, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                del self._waiting[run_id]

    def tell(self, run_id: str, version: int, last: Event | None = None) -> None:
        """Tell everybody who waits for this run that it has finished."""
        for future in self._waiting.pop(run_id, ()):
            if not future.done():
                future.set_result(Finish(version, last))

    def close(self) -> None:
        """Tell everybody that nobody looks any more."""
        for run_id, futures in self._waiting.items():
            for future in futures:
                if not future.done():
                    future.set_exception(EngineError(f"the node was stopped before run {run_id} had finished"))

    async def watch(self) -> None:
        """Look for runs that finished elsewhere, as long as somebody waits for one."""
        loop = asyncio.get_running_loop()
        listener = self._store.wakeups.listen()
        try:
            while True:
                if not self._waiting:
                    self._someone.clear()
                    await self._someone.wait()
                await listener.wait(self._poll_s)
                began = loop.time()
                await self._look()
                await asyncio.sleep(REST * (loop.time() - began))
        finally:
            listener.close()

    async def _look(self) -> None:
        elsewhere = [run_id for run_id in self._waiting if not self._holds(run_id)]
        for start in range(0, len(elsewhere), PAGE_RUNS):
            for run in await self._load(elsewhere[start : start + PAGE_RUNS]):
                if run is not None and run.head.status in TERMINAL:
                    self.tell(run.head.run_id, run.head.version)

    async def _load(self, run_ids: list[str]) -> list[LoadedRun | None]:
        """Load runs, without those that cannot be read: they keep waiting, and nobody else does because of them."""
        try:
            return await self._store.load(run_ids)
        except StoreCorrupt:
            if len(run_ids) == 1:
                return []
        middle = len(run_ids) // 2
        return [*await self._load(run_ids[:middle]), *await self._load(run_ids[middle:])]
