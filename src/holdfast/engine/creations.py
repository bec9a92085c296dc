"""Runs that are started here: created many at a time, and begun without asking the store for them again."""

import asyncio
from collections.abc import Callable

from holdfast.core.instants import Instant
from holdfast.errors import EngineError, HoldfastError, LeaseExpired
from holdfast.store.port import Created, Existing, NewRun, Refused, Store

CREATE_RUNS = 500
"""How many runs are created by one call at most."""

Answer = Created | Existing | Refused
Asked = tuple[NewRun, Instant, "asyncio.Future[Answer]"]


class Creations:
    """Creates runs that belong to one node, or to none. `begin` is called with each that belongs to it from now on."""

    def __init__(
        self, store: Store, owner: str | None, lease_ms: int, begin: Callable[[NewRun, Instant], None]
    ) -> None:
        self._store = store
        self._owner = owner
        self._lease_ms = lease_ms
        self._begin = begin
        self._asked: list[Asked] = []
        self._under_way: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    async def create(self, new: NewRun, now: Instant) -> Answer:
        """Create a run, together with others that are being created."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.append((new, now, future))
        if self._task is None:
            self._task = asyncio.create_task(self._create(), name="create")
        return await future

    def found(self, run_id: str) -> None:
        """Take note that the node came by a run before the answer to its creation did."""
        self._under_way.discard(run_id)

    async def stop(self) -> None:
        """Give up what is under way; nobody knows what becomes of it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        _give_up(self._asked)

    async def _create(self) -> None:
        try:
            while self._asked:
                batch, self._asked = self._asked[:CREATE_RUNS], self._asked[CREATE_RUNS:]
                await self._create_batch(batch)
        finally:
            self._task = None

    async def _create_batch(self, batch: list[Asked]) -> None:
        run_ids = {new.run_id for new, _, _ in batch}
        self._under_way |= run_ids
        try:
            answers = await self._create_runs([new for new, _, _ in batch])
        except HoldfastError as problem:
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(problem)
            return
        except asyncio.CancelledError:
            _give_up(batch)
            raise
        finally:
            mine = run_ids & self._under_way
            self._under_way -= mine
        for (new, now, future), answer in zip(batch, answers, strict=True):
            if isinstance(answer, Created) and answer.epoch and new.run_id in mine:  # else the node has found it before
                self._begin(new, now)
            if not future.done():
                future.set_result(answer)

    async def _create_runs(self, runs: list[NewRun]) -> list[Answer]:
        try:
            return await self._store.create(runs, claim_for=self._owner)
        except LeaseExpired:  # the loop was blocked for longer than the lease; nothing was created
            assert self._owner is not None
            await self._store.renew(self._owner, self._lease_ms)
            return await self._store.create(runs, claim_for=self._owner)


def _give_up(asked: list[Asked]) -> None:
    for new, _, future in asked:
        if not future.done():
            problem = (
                f"the node was stopped while run {new.run_id} was being created; ask again with the same request id"
            )
            future.set_exception(EngineError(problem))
