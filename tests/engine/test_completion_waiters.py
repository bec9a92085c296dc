"""Who waits for runs to finish: told wherever they finish, looked up together, and never left alone."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.state import COMPLETED, RUNNING
from holdfast.engine.completion_waiters import PAGE_RUNS, Completion, CompletionWaiters
from holdfast.errors import EngineError, NotFound, StoreCorrupt, StoreUnavailable
from holdfast.store.types import EventQuery, Found, RunQuery
from holdfast.store.wakeups import LocalWakeups

PAGE = 2


class Library:
    """A store that only finds and loads heads of runs."""

    def __init__(self) -> None:
        self.wakeups = LocalWakeups()
        self.asked: list[list[str]] = []
        self.loads = 0
        self.finished: dict[str, int] = {}
        self.damaged: set[str] = set()
        self.missing: set[str] = set()
        self.problem: Exception | None = None
        self.last: dict[str, Any] = {}
        self.places: list[Any] = []

    async def load(self, run_ids: Sequence[str]) -> list[Any]:
        """Load, if nothing is wrong with any of them."""
        self.loads += 1
        self.asked.append(list(run_ids))
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        if self.damaged & set(run_ids):
            raise StoreCorrupt("a row makes no sense")
        return [None if run_id in self.missing else self._head(run_id) for run_id in run_ids]

    async def find(self, query: RunQuery | EventQuery) -> Found[Any]:
        """Find heads, a few at a time, but for those of damaged runs; or the last events that there are."""
        if isinstance(query, EventQuery):
            self.places.append(query.after)
            return Found([self.last[run_id] for run_id, _ in query.after if run_id in self.last])
        run_ids = query.run_ids or ()
        self.asked.append(list(run_ids))
        await asyncio.sleep(0)
        there = sorted((set(run_ids) & self.finished.keys()) - self.missing - self.damaged)
        assert query.finished_from == 0
        page = [run_id for run_id in there if run_id > query.after][:PAGE]
        return Found([self._head(run_id).head for run_id in page])

    def _head(self, run_id: str) -> Any:
        status = COMPLETED if run_id in self.finished else RUNNING
        return SimpleNamespace(head=SimpleNamespace(run_id=run_id, status=status, version=self.finished.get(run_id, 1)))


class Scene:
    """Completion waiters of a node that owns some runs, and looks when the store notifies."""

    def __init__(self, *held: str, poll_s: float = 60.0) -> None:
        store: Any = Library()
        self.store: Library = store
        self.completion_waiters = CompletionWaiters(store, lambda run_id: run_id in held, poll_s)

    async def __aenter__(self) -> "Scene":
        self._watching = asyncio.create_task(self.completion_waiters.watch())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])


async def soon(future: "asyncio.Future[Any]") -> Any:
    async with asyncio.timeout(60):
        return await future


@pytest.mark.contract("OWN-3")
async def test_a_run_that_was_lost_without_notice_is_looked_up_now_and_then() -> None:
    async with Scene("held", poll_s=0.01) as scene:
        waiting = scene.completion_waiters.wait("held")
        scene.store.finished = {"far": 7, "held": 9}
        assert await soon(scene.completion_waiters.wait("far")) == Completion(7)
        assert not waiting.done()
        assert await soon(waiting) == Completion(9)
    assert sum("held" in asked for asked in scene.store.asked) < len(scene.store.asked)


@pytest.mark.contract("OWN-3")
async def test_a_run_that_finishes_elsewhere_is_looked_up_when_the_store_rings() -> None:
    async with Scene("held") as scene:
        waiting = [scene.completion_waiters.wait(run_id) for run_id in ("far", "far", "damaged", "held", "missing")]
        scene.store.finished = {"far": 7, "held": 9}
        scene.store.damaged, scene.store.missing = {"damaged"}, {"missing"}
        await asyncio.sleep(0)
        scene.store.wakeups.notify()
        assert await soon(waiting[0]) == await soon(waiting[1]) == Completion(7)
        assert [future.done() for future in waiting[2:]] == [False, False, False]
        assert all("held" not in asked for asked in scene.store.asked), "of those the node knows by itself"
        assert scene.store.loads == 0, "whether runs have finished is seen without their mailboxes"
        scene.completion_waiters.notify("held", 9)
        assert await soon(waiting[3]) == Completion(9)


async def test_every_page_of_what_is_looked_up_is_read() -> None:
    async with Scene() as scene:
        waiting = [scene.completion_waiters.wait(f"run-{number}") for number in range(3 * PAGE)]
        scene.store.finished = {f"run-{number}": number for number in range(3 * PAGE)}
        await asyncio.sleep(0)
        scene.store.wakeups.notify()
        assert [await soon(each) for each in waiting] == [Completion(number) for number in range(3 * PAGE)]


async def test_nothing_is_looked_up_while_nobody_waits() -> None:
    async with Scene() as scene:
        scene.store.wakeups.notify()
        for _ in range(5):
            await asyncio.sleep(0)
        assert scene.store.asked == []
        gone = scene.completion_waiters.wait("far")
        scene.completion_waiters.let_go("far", gone)
        scene.completion_waiters.let_go("far", gone)
        assert scene.completion_waiters._waiting == {}


@pytest.mark.contract("API-2")
async def test_ends_that_are_asked_for_together_are_looked_up_together_and_answered_each() -> None:
    scene = Scene()
    scene.store.damaged, scene.store.missing = {"run-3"}, {"run-5"}
    scene.store.finished = {"run-1": 4, "run-6": 9, "run-7": 2}
    scene.store.last = {"run-1": SimpleNamespace(run_id="run-1"), "run-6": SimpleNamespace(run_id="run-6")}
    asking = [asyncio.create_task(scene.completion_waiters.end_of(f"run-{number}")) for number in range(8)]
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert scene.store.asked[0] == [f"run-{number}" for number in range(8)]
    assert isinstance(answers[3], StoreCorrupt)
    assert isinstance(answers[5], NotFound)
    last = scene.store.last
    assert [answers[place] for place in (0, 2, 4)] == [None, None, None]
    assert answers[1:8:5] == [Completion(4, last["run-1"]), Completion(9, last["run-6"])]
    assert answers[7] == Completion(2), "an event that cannot be read is left to its own caller"
    assert scene.store.places == [(("run-1", 3), ("run-6", 8), ("run-7", 1))], "one call for the last events of all"
    scene.store.problem = StoreUnavailable("down")
    with pytest.raises(StoreUnavailable):
        await scene.completion_waiters.end_of("run-1")


async def test_no_call_asks_for_too_many() -> None:
    scene = Scene()
    asking = [asyncio.create_task(scene.completion_waiters.end_of(f"run-{number}")) for number in range(PAGE_RUNS + 1)]
    await asyncio.gather(*asking)
    assert [len(asked) for asked in scene.store.asked] == [PAGE_RUNS, 1]


@pytest.mark.contract("OWN-3", "API-2")
async def test_everybody_is_told_that_nobody_looks_any_more_also_who_asks_later() -> None:
    scene = Scene()
    waiting, done = scene.completion_waiters.wait("far"), scene.completion_waiters.wait("near")
    scene.completion_waiters.notify("near", 3)
    asking = asyncio.create_task(scene.completion_waiters.end_of("far"))
    await asyncio.sleep(0)
    problem = EngineError("it has failed")
    scene.completion_waiters.close(problem)
    scene.completion_waiters.close()
    for told in (waiting, asking):
        with pytest.raises(EngineError):
            await soon(told)
    with pytest.raises(EngineError, match="it has failed"):
        scene.completion_waiters.wait("later")
    assert await soon(done) == Completion(3)
