"""Who waits for runs to finish, and how they are told, wherever the runs finish.

A run that this node finishes is told at once. Runs that it does not hold (parked, or taken over by another node) are
looked up together when the store rings and now and then; never one by one, and looking takes at most a tenth of the
time, however many are waited for, unless they would then hear of it later than by looking now and then.
"""

import asyncio
from collections.abc import Callable

from msgspec import Struct

from holdfast.core.events import Event
from holdfast.core.state import TERMINAL
from holdfast.errors import EngineError, HoldfastError, StoreCorrupt
from holdfast.store.port import RunHead, Store
from holdfast.store.types import load_each

PAGE_RUNS = 500
REST = 10
"""How many times as long as a look took to wait before the next, within the time after which to look anyway."""

HELD_POLLS = 6
"""After how many times that time runs that are held here are looked at as well."""

Asked = tuple[str, "asyncio.Future[RunHead | None]"]


class Completion(Struct, frozen=True, gc=False):
    """How far a run's history goes, now that it has finished; and its last event, if that happened here."""

    version: int
    last: Event | None = None


class CompletionWaiters:
    """The runs whose end somebody in this process waits for."""

    def __init__(self, store: Store, holds: Callable[[str], bool], poll_s: float) -> None:
        self._store = store
        self._holds = holds
        self._poll_s = poll_s
        self._waiting: dict[str, list[asyncio.Future[Completion]]] = {}
        self._someone = asyncio.Event()
        self.problem: EngineError | None = None
        self._asked: list[Asked] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def runs_awaited(self) -> int:
        """How many runs are waited for."""
        return len(self._waiting)

    def wait(self, run_id: str) -> "asyncio.Future[Completion]":
        """Return a future that is given the run's end when it has finished. Who asks says when it is let go."""
        if self.problem is not None:
            raise self.problem
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, []).append(future)
        self._someone.set()
        return future

    def let_go(self, run_id: str, future: "asyncio.Future[Completion]") -> None:
        """Forget somebody who waits no longer."""
        futures = self._waiting.get(run_id, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                del self._waiting[run_id]

    async def head(self, run_id: str) -> RunHead | None:
        """Return a run as it is now, looked up together with others that are asked for at the same time."""
        future: asyncio.Future[RunHead | None] = asyncio.get_running_loop().create_future()
        self._asked.append((run_id, future))
        if self._task is None:
            self._task = asyncio.create_task(self._look_up(), name="heads")
        return await future

    async def _look_up(self) -> None:
        try:
            while self._asked:
                batch, self._asked = self._asked[:PAGE_RUNS], self._asked[PAGE_RUNS:]
                await self._answer(batch)
        except asyncio.CancelledError:
            _fail(batch, EngineError("the node was stopped"))
            raise
        finally:
            self._task = None

    async def _answer(self, batch: list[Asked]) -> None:
        try:
            runs = await load_each(self._store.load, [run_id for run_id, _ in batch])
        except HoldfastError as problem:
            _fail(batch, problem)
            return
        for (_, future), run in zip(batch, runs, strict=True):
            if future.done():
                continue
            if isinstance(run, StoreCorrupt):
                future.set_exception(run)
            else:
                future.set_result(None if run is None else run.head)

    def tell(self, run_id: str, version: int, last: Event | None = None) -> None:
        """Tell everybody who waits for this run that it has finished."""
        for future in self._waiting.pop(run_id, ()):
            if not future.done():
                future.set_result(Completion(version, last))

    def close(self, problem: EngineError | None = None) -> None:
        """Tell everybody, also those who ask later, that nobody looks any more."""
        self.problem = self.problem or problem or EngineError("the node was stopped before the run had finished")
        if self._task is not None:
            self._task.cancel()
        _fail(self._asked, self.problem)
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(self.problem)

    async def watch(self) -> None:
        """Look for runs that finished elsewhere, as long as somebody waits for one.

        Those that are held here are looked at now and then: a node may have lost a run without having noticed.
        """
        loop = asyncio.get_running_loop()
        whole_at = loop.time()
        listener = self._store.wakeups.listen()
        try:
            while True:
                if not self._waiting:
                    self._someone.clear()
                    await self._someone.wait()
                await listener.wait(self._poll_s)
                began = loop.time()
                if is_whole := began >= whole_at + HELD_POLLS * self._poll_s:
                    whole_at = began
                await self._look(is_whole)
                # A look that took long because the store was away says nothing of the next.
                await asyncio.sleep(min(REST * (loop.time() - began), self._poll_s))
        finally:
            listener.close()

    async def _look(self, is_whole: bool) -> None:
        elsewhere = [run_id for run_id in self._waiting if is_whole or not self._holds(run_id)]
        for start in range(0, len(elsewhere), PAGE_RUNS):
            for run in await load_each(self._store.load, elsewhere[start : start + PAGE_RUNS]):
                if run is not None and not isinstance(run, StoreCorrupt) and run.head.status in TERMINAL:
                    self.tell(run.head.run_id, run.head.version)


def _fail(asked: list[Asked], problem: Exception) -> None:
    for _, future in asked:
        if not future.done():
            future.set_exception(problem)
