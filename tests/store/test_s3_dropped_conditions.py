"""A server that now and then forgets a condition passes the self-test. The invariants find what it has done."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.core.invariants import check
from holdfast.store.port import Accepted, CommitConflict, Committed, Duplicate, RunQuery
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.testing import VirtualClock, system_view
from holdfast.testing.samples import SampleNode, marker, read_history, read_mailbox, signal

PROCESSES = 4
RUNS = 10
ONE_IN = 1_000
CALM_ROUNDS = 100
MOST_ROUNDS = 2_000


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the server drop one in a thousand conditions of writes; return which."""
    put, numbers, found = obstore.put_async, itertools.count(1), list[str]()

    async def put_async(store: Any, path: str, data: bytes, **options: Any) -> Any:
        if "mode" in options and not path.startswith("probe/") and next(numbers) % ONE_IN == 0:
            del options["mode"]
            found.append(path)
        return await put(store, path, data, **options)

    monkeypatch.setattr(obstore, "put_async", put_async)
    return found


class Contenders:
    """Several processes on one bucket: all send to the same run, and one of them commits turns, at the same time."""

    def __init__(self, objects: Any) -> None:
        self.clock = VirtualClock()
        self.stores = [S3Store(Bucket(objects), self.clock) for _ in range(PROCESSES)]
        self.node = SampleNode(self.stores[0], lease_ms=3_600_000)
        self.signals: dict[str, list[str]] = {}
        self.events: dict[str, list[str]] = {}
        self._numbers = itertools.count()

    async def open(self) -> None:
        """Create the runs."""
        for number in range(RUNS):
            run = await self.node.start(f"run-{number}", marker("begun"))
            self.signals[run.head.run_id] = []
            self.events[run.head.run_id] = [e.event_id for e in await read_history(self.stores[0], run.head.run_id)]

    async def play(self, number: int) -> None:
        """Let all processes change one run at once."""
        run_id = f"run-{number % RUNS}"
        self.clock.advance(ms=1_000)
        await asyncio.gather(self._commit(run_id, number), *(self._send(store, run_id) for store in self.stores[1:]))

    async def _commit(self, run_id: str, number: int) -> None:
        turn = await self.node.turn(await self.node.load(run_id), marker(f"m{number}"))
        answer = await self.node.commit(turn)
        assert isinstance(answer, Committed | CommitConflict)
        if isinstance(answer, Committed):
            self.events[run_id] += [event.event_id for event in turn.events]

    async def _send(self, store: S3Store, run_id: str) -> None:
        signal_id = f"s{next(self._numbers)}"
        [answer] = await store.deliver([signal(run_id, "go", signal_id=signal_id)])
        assert isinstance(answer, Accepted | Duplicate), answer
        self.signals[run_id].append(signal_id)

    async def find_wrong(self) -> list[str]:
        """Return what is not as it was acknowledged, and what breaks an invariant."""
        store = S3Store(self.stores[0].bucket, self.clock)
        wrong = [str(violation) for violation in check(await system_view(store))]
        for head in await store.find(RunQuery()):
            kept = sorted(each.signal_id for each in await read_mailbox(store, head.run_id))
            if kept != sorted(self.signals[head.run_id]):
                wrong.append(f"{head.run_id}: an acknowledged signal is lost, or doubled")
            if [each.event_id for each in await read_history(store, head.run_id)] != self.events[head.run_id]:
                wrong.append(f"{head.run_id}: the history is not what was committed")
        return wrong


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.s3.bucket.FIRST_PAUSE_S", 0.0001)


@pytest.mark.contract("OWN-1", "EVT-1", "SIG-5", "INV")
async def test_processes_that_change_the_same_runs_lose_nothing_and_fork_nothing() -> None:
    contenders = Contenders(ObjectsInMemory())
    await contenders.open()
    for number in range(CALM_ROUNDS):
        await contenders.play(number)
    assert await contenders.find_wrong() == []


@pytest.mark.contract("OWN-1", "STO-1", "INV")
async def test_a_server_that_drops_one_condition_in_a_thousand_is_found(dropped: list[str]) -> None:
    objects = ObjectsInMemory()
    await Bucket(objects).check_conditions()
    contenders = Contenders(objects)
    await contenders.open()
    wrong: list[str] = []
    for number in range(MOST_ROUNDS):
        before = len(dropped)
        await contenders.play(number)
        if len(dropped) > before:
            wrong = await contenders.find_wrong()
        if wrong:
            break
    assert any("lost" in each or "history" in each for each in wrong), (wrong, dropped)
