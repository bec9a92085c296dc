"""Claims on a PostgreSQL server while analysts keep transactions open for as long as the measurement lasts.

Dead rows cannot be removed meanwhile. Runs wait, are signalled, claimed and finished all the time; what counts is how
long claims take, at the beginning and at the end, and whether runs are finished as fast at the end.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg

from bench.effort import Effort
from bench.engine import app
from bench.postgres import SCHEMA, opened, server, signalled
from bench.report import Row, Rows, percentile, progress
from bench.stores import as_the_command

ANALYSTS = 3
AT_ONCE = 20
QUESTION = f"SELECT event_type, count(*), sum(length(data)) FROM {SCHEMA}.events GROUP BY event_type"


class TimedStore:
    """Passes every verb on to a store, and notes how long claims take that find something."""

    def __init__(self, inner: Any) -> None:
        self.capabilities = inner.capabilities
        self.wakeups = inner.wakeups
        self.took_ms: list[float] = []
        self._inner = inner

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    async def claim(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Note how long it took."""
        began = time.perf_counter()
        claimed: list[Any] = await self._inner.claim(*args, **kwargs)
        if claimed:
            self.took_ms.append((time.perf_counter() - began) * 1e3)
        return claimed


async def measure(effort: Effort, folder: Path) -> Rows:
    """Measure without analysts, and then with them."""
    del folder  # the server keeps its files elsewhere
    rows: Rows = {}
    with server() as dsn:
        async with opened(dsn) as (store, _):
            progress("analysts: without them")
            rows["no long transaction"] = await _claims(store, max(effort.analysts_s / 20, 1.0))
            async with AsyncExitStack() as stack:
                for _ in range(ANALYSTS):
                    await stack.enter_async_context(_analyst(dsn))
                progress(f"analysts: {ANALYSTS} for {effort.analysts_s:,.0f} s")
                label = f"{ANALYSTS} open for {effort.analysts_s:,.0f} s"
                rows[label] = await _claims(store, effort.analysts_s)
    return rows


@asynccontextmanager
async def _analyst(dsn: str) -> AsyncIterator[None]:
    """Keep one transaction open, and ask a question of all events in it now and then."""
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            asking = asyncio.create_task(_ask(connection))
            try:
                yield
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
    finally:
        await connection.close()


async def _ask(connection: Any) -> None:
    while True:
        await connection.fetch(QUESTION, timeout=60)
        await asyncio.sleep(5.0)


async def _claims(store: Any, seconds: float) -> Row:
    timed: Any = TimedStore(store)
    finished: list[float] = []
    began = time.perf_counter()
    async with app.node(timed, options=as_the_command()):
        await asyncio.gather(*(_runs_until(began + seconds, finished) for _ in range(AT_ONCE)))
    took_ms, tenth = timed.took_ms, max(len(timed.took_ms) // 10, 1)
    late = sum(at > began + seconds * 0.9 for at in finished)
    return {
        "runs/s": len(finished) / seconds,
        "runs/s of the last tenth": late / seconds * 10,
        "claims": len(took_ms),
        "p50 ms": percentile(took_ms, 50),
        "p99 ms": percentile(took_ms, 99),
        "p99 ms of the first tenth": percentile(took_ms[:tenth], 99),
        "p99 ms of the last tenth": percentile(took_ms[-tenth:], 99),
    }


async def _runs_until(end: float, finished: list[float]) -> None:
    while time.perf_counter() < end:
        run = await app.start(signalled)
        await asyncio.sleep(0.05)  # it waits by now, and belongs to nobody
        await run.signal("go", True)
        await run.result()
        finished.append(time.perf_counter())
