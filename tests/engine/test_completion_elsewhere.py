"""Who waits for runs to finish elsewhere is told soon, also after the store was away."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.engine.completion_waiters import CompletionWaiters
from holdfast.store.memory import MemoryStore
from holdfast.store.queries import Found, Query, Row
from holdfast.testing.sim_loop import SimLoop

AWAY_S = 30.0
POLL_S = 5.0


class AwayStore(MemoryStore):
    """A store that answers the first look only when it is back."""

    def __init__(self) -> None:
        super().__init__()
        self.began = asyncio.get_running_loop().time()
        self.looked_at: list[float] = []

    async def find(self, query: Query[Row]) -> Found[Row]:
        """Note when it is looked."""
        self.looked_at.append(asyncio.get_running_loop().time() - self.began)
        if len(self.looked_at) == 1:
            await asyncio.sleep(AWAY_S)
        return Found()


def test_a_look_that_took_long_does_not_put_off_the_next() -> None:
    """The first look is made at once, for what ended before is not notified. Each other one is made a poll interval
    after the former has ended, however long that took: neither later nor sooner.
    """
    loop = SimLoop(0)
    store: AwayStore | None = None

    async def main() -> None:
        nonlocal store
        store = AwayStore()
        waiters = CompletionWaiters(store, lambda run_id: False, POLL_S)
        waiting = waiters.wait("r")
        watching = asyncio.ensure_future(waiters.watch())
        await asyncio.sleep(AWAY_S + 3 * POLL_S + 1.0)
        watching.cancel()
        waiting.cancel()

    loop.simulate(main())
    assert store is not None
    expected = [0.0, *(AWAY_S + polls * POLL_S for polls in (1, 2, 3))]
    assert store.looked_at == pytest.approx(expected, abs=0.1)  # code takes a little of the loop's time as well
