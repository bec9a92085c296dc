"""A contest: the same turns, committed by the store and written by the floor, round by round."""

import gc
import shutil
import sqlite3
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

from bench.floor import Floor, rows_of
from bench.floor import Rows as FloorRows
from bench.report import Row, ratios
from bench.stores import opened
from bench.workload import Sleepers, create_all
from holdfast.store.port import Committed, NewRun, Store, Turn


class Contest:
    """Three files that began alike: the store's, the floor's, and the one that tells the floor its rows."""

    def __init__(
        self, store: Store, floor: Floor, teller: Store, reader: sqlite3.Connection, sleepers: Sleepers
    ) -> None:
        self._store = store
        self._floor = floor
        self._teller = teller
        self._reader = reader
        self._sleepers = sleepers

    async def play(self, batch: int, turns: int, rounds: int) -> Row:
        """Let both do the same work, one after the other, in each round; return the rates and their ratio."""
        store_rates: list[float] = []
        floor_rates: list[float] = []
        for _ in range(rounds):
            work = self._sleepers.next_turns(batch, max(turns // batch, 1))
            rows = await self._rows(work)
            count = batch * len(work)
            gc.collect()
            gc.freeze()  # what was prepared is not for the collector to walk through while the clock runs
            store_rates.append(count / await self._commit(work))
            floor_rates.append(count / self._write(rows))
            gc.unfreeze()
        return {
            "turns/s": statistics.median(store_rates),
            "floor turns/s": statistics.median(floor_rates),
            **ratios(store_rates, floor_rates),
        }

    async def _rows(self, work: Sequence[Sequence[Turn]]) -> list[FloorRows]:
        rows = []
        for turns in work:
            await self._teller.commit(turns)
            rows.append(rows_of(self._reader, turns))
        return rows

    async def _commit(self, work: Sequence[Sequence[Turn]]) -> float:
        began = time.perf_counter()
        answers = [await self._store.commit(turns) for turns in work]
        taken = time.perf_counter() - began
        assert all(isinstance(answer, Committed) for batch in answers for answer in batch)
        return taken

    def _write(self, rows: Sequence[FloorRows]) -> float:
        began = time.perf_counter()
        for batch in rows:
            self._floor.write(batch)
        return time.perf_counter() - began


@asynccontextmanager
async def contest(folder: Path, runs: Sequence[NewRun], seed: int | None = None) -> AsyncIterator[Contest]:
    """Prepare a contest over these runs, taken in order or at random. Its files are deleted at the end."""
    paths = [folder / name for name in ("store.db", "floor.db", "teller.db")]
    async with opened(paths[0]) as store:
        await create_all(store, runs)
    for copy in paths[1:]:
        shutil.copyfile(paths[0], copy)
    floor = await Floor.open(paths[1])
    try:
        async with opened(paths[0]) as store, opened(paths[2]) as teller:
            with closing(sqlite3.connect(paths[2])) as reader:
                yield Contest(store, floor, teller, reader, Sleepers(runs, seed))
    finally:
        await floor.close()
        for path in paths:
            path.unlink()
