"""A process on a bucket that is gone from any of its writes on: the next one under its name finishes the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

import holdfast as hf
from holdfast.core.invariants import check
from holdfast.errors import StoreUnavailable
from holdfast.store.port import RunQuery
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.testing import system_view

T = TypeVar("T")

OPTIONS = hf.NodeOptions(drain_s=0.0, sample_s=None)
MOST_WRITES = 40


class MortalBucket(Bucket):
    """A bucket to which nothing of this process comes from its nth write on; that one itself does, or does not."""

    def __init__(self, objects: Any, last_write: int = MOST_WRITES, *, is_written: bool = False) -> None:
        super().__init__(objects)
        self.died = asyncio.Event()
        self.writes = 0
        self._last_write = last_write
        self._is_written = is_written

    async def _patiently(self, kind: str, ask: Callable[[], Awaitable[T]], size: int = 0, *, slower: int = 0) -> T:
        self.writes += kind == "PUT"
        is_last = kind == "PUT" and self.writes == self._last_write
        if not self.died.is_set() and (not is_last or self._is_written):
            answer = await super()._patiently(kind, ask, size, slower=slower)
            if not is_last:
                return answer
        self.died.set()
        raise StoreUnavailable("this process is gone")


class Shop:
    """An app whose effects are counted."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self.app = app = hf.App("shop")

        @app.activity
        async def charge(what: str) -> str:
            self.effects[what] += 1
            return f"charged {what}"

        @app.workflow
        async def ship(what: str) -> str:
            return await charge(f"shipping of {what}")

        @app.workflow
        async def order(what: str) -> list[str]:
            return [await charge(what), await hf.wait_signal("paid", str), await ship(what)]

        self.order = order

    async def play(self, bucket: MortalBucket) -> list[str]:
        """Start the order, pay it, and wait for its end, each as often as it takes, in a process of its own."""
        async with self.app.node(S3Store(bucket), name="shop-1", options=OPTIONS):
            run = await self.app.start(self.order, "tea", run_id="tea", request_id="tea")
            await run.signal("paid", "yes", signal_id="payment")
            return list(await run.result())


async def outlived(shop: Shop, bucket: MortalBucket) -> list[str] | None:
    """Return the result, or None if the process was gone before."""
    playing, dying = asyncio.create_task(shop.play(bucket)), asyncio.create_task(bucket.died.wait())
    await asyncio.wait([playing, dying], return_when=asyncio.FIRST_COMPLETED)
    dying.cancel()
    if bucket.died.is_set():
        playing.cancel()
    [found] = await asyncio.gather(playing, return_exceptions=True)
    return found if isinstance(found, list) else None


async def survives(last_write: int, *, is_written: bool) -> bool:
    """Play an order whose process is gone at that write; check what is left; return whether it was gone."""
    objects, shop = ObjectsInMemory(), Shop()
    first = MortalBucket(objects, last_write, is_written=is_written)
    result = await outlived(shop, first) or await outlived(shop, MortalBucket(objects))
    assert result == ["charged tea", "yes", "charged shipping of tea"], f"gone at write {last_write}"
    store = S3Store(Bucket(objects))
    check(await system_view(store))
    for head in await store.find(RunQuery()):
        types = Counter(event.event_type for event in await store.read_events(head.run_id))
        assert types["StepCompleted"] == types["RunCompleted"] == 1
    assert max(shop.effects.values()) <= 2
    await store.close()
    return first.died.is_set()


@pytest.mark.contract("OWN-1", "OWN-3", "SIG-4", "INV")
@pytest.mark.parametrize("is_written", [False, True], ids=["before it", "after it"])
async def test_order_finishes_after_its_process_is_gone_at_any_write(is_written: bool) -> None:
    async with asyncio.timeout(120):
        gone = await asyncio.gather(*(survives(number, is_written=is_written) for number in range(1, MOST_WRITES)))
    assert all(gone[:15])
    assert not gone[-1], "an order takes more writes than are tried"
