"""Who waits for runs to finish elsewhere is told soon, also after the store was away."""

from __future__ import annotations

import asyncio

from holdfast.engine.completion_waiters import CompletionWaiters
from holdfast.store.memory import MemoryStore
from holdfast.store.types import Found, Query, Row
from holdfast.testing.sim_loop import SimLoop

AWAY_S = 30.0
POLL_S = 5.0


class AwayStore(MemoryStore):
    """A store that answers the first look only when it is back."""

    looks = 0

    async def find(self, query: Query[Row]) -> Found[Row]:
        """Count a look."""
        self.looks += 1
        if self.looks == 1:
            await asyncio.sleep(AWAY_S)
        return Found()


def test_a_look_that_took_long_does_not_put_off_the_next() -> None:
    loop = SimLoop(0)
    store: AwayStore | None = None

    async def main() -> None:
        nonlocal store
        store = AwayStore()
        waiters = CompletionWaiters(store, lambda run_id: False, POLL_S)
        waiting = waiters.wait("r")
        watching = asyncio.ensure_future(waiters.watch())
        await asyncio.sleep(POLL_S + AWAY_S + 2 * POLL_S + 1.0)
        watching.cancel()
        waiting.cancel()

    loop.simulate(main())
    assert store is not None
    assert store.looks == 2
