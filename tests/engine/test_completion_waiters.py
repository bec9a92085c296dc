"""Who waits for runs to finish: told wherever they finish, looked up together, and never left alone."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from holdfast.core.state import COMPLETED, RUNNING
from holdfast.engine.completion_waiters import PAGE_RUNS, Completion, CompletionWaiters
from holdfast.errors import EngineError, NotFound, StoreCorrupt, StoreUnavailable
from holdfast.store.queries import EventQuery, Found
from holdfast.store.types import LoadedRun, created_run
from holdfast.store.wakeups import NOTHING, LocalWakeups, digest_of
from holdfast.testing.samples import new_run

PAGE = 2


class Library:
    """A store that only loads heads of runs, and finds their ends."""

    def __init__(self) -> None:
        self.wakeups = LocalWakeups()
        self.asked: list[list[str]] = []
        self.loaded: list[list[str]] = []
        self.finished: dict[str, int] = {}
        self.damaged: set[str] = set()
        self.missing: set[str] = set()
        self.damaged_ends: set[str] = set()
        self.problem: Exception | None = None

    async def load(self, run_ids: Sequence[str]) -> list[Any]:
        """Load, if nothing is wrong with any of them."""
        self.loaded.append(list(run_ids))
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        if self.damaged & set(run_ids):
            raise StoreCorrupt("a row makes no sense")
        return [None if run_id in self.missing else self._run(run_id) for run_id in run_ids]

    async def find(self, query: EventQuery) -> Found[Any]:
        """Find ends, a few at a time, and name those that are damaged."""
        assert query.only_ends
        run_ids = [run_id for run_id, _ in query.after]
        self.asked.append(run_ids)
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        there = sorted((set(run_ids) & self.finished.keys()) - self.missing - self.damaged - self.damaged_ends)
        gone = tuple(sorted(self.missing & set(run_ids)))
        return Found(map(self.end, there[:PAGE]), None, tuple(self.damaged_ends & set(run_ids)), missing=gone)

    def end(self, run_id: str) -> Any:
        """Return the last event of a run that has finished."""
        return Event(run_id, self.finished[run_id])

    def _run(self, run_id: str) -> LoadedRun:
        new = created_run(new_run(run_id), "node-a", 0)
        status = COMPLETED if run_id in self.finished else RUNNING
        return replace(new, head=replace(new.head, status=status, version=self.finished.get(run_id, 1)))


class Event(NamedTuple):
    """An event, as far as it matters here."""

    run_id: str
    run_seq: int


class Scene:
    """Completion waiters of a node that owns some runs, and looks when the store notifies."""

    def __init__(self, *held: str, poll_s: float = 60.0) -> None:
        store: Any = Library()
        self.store: Library = store
        self.completion_waiters = CompletionWaiters(store, lambda run_id: run_id in held, poll_s)

    def end(self, run_id: str) -> Completion:
        """Return what a caller gets who waits for this run."""
        return Completion(self.store.finished[run_id], self.store.end(run_id))

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
        assert await soon(scene.completion_waiters.wait("far")) == scene.end("far")
        assert not waiting.done()
        assert await soon(waiting) == scene.end("held")
    assert sum("held" in asked for asked in scene.store.asked) < len(scene.store.asked)


@pytest.mark.contract("OWN-3")
async def test_a_run_that_finishes_elsewhere_is_looked_up_when_the_store_rings() -> None:
    async with Scene("held") as scene:
        waiting = [scene.completion_waiters.wait(run_id) for run_id in ("far", "far", "damaged", "held", "missing")]
        scene.store.finished = {"far": 7, "held": 9}
        scene.store.damaged, scene.store.missing = {"damaged"}, {"missing"}
        await asyncio.sleep(0)
        scene.store.wakeups.notify()
        assert await soon(waiting[0]) == await soon(waiting[1]) == scene.end("far")
        with pytest.raises(NotFound):
            await soon(waiting[4])
        assert [future.done() for future in waiting[2:4]] == [False, False]
        assert all("held" not in asked for asked in scene.store.asked), "of those the node knows by itself"
        assert scene.store.loaded == [], "whether runs have finished is seen without their mailboxes"
        scene.completion_waiters.notify("held", 9)
        assert await soon(waiting[3]) == Completion(9)


async def test_every_page_of_what_is_looked_up_is_read() -> None:
    async with Scene() as scene:
        waiting = [scene.completion_waiters.wait(f"run-{number}") for number in range(3 * PAGE)]
        scene.store.finished = {f"run-{number}": number for number in range(3 * PAGE)}
        await asyncio.sleep(0)
        scene.store.wakeups.notify()
        assert [await soon(each) for each in waiting] == [scene.end(f"run-{number}") for number in range(3 * PAGE)]


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
        assert scene.completion_waiters._by_digest == {}


@pytest.mark.contract("API-2")
async def test_ends_that_are_asked_for_together_are_looked_up_together_and_answered_each() -> None:
    scene = Scene()
    scene.store.damaged, scene.store.missing = {"run-3"}, {"run-5"}
    scene.store.finished = {"run-1": 4, "run-6": 9, "run-7": 2}
    scene.store.damaged_ends = {"run-7"}
    asking = [asyncio.create_task(scene.completion_waiters.end_of(f"run-{number}")) for number in range(8)]
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert scene.store.asked[0] == [f"run-{number}" for number in range(8)], "one call for the ends of all"
    assert isinstance(answers[3], StoreCorrupt)
    assert isinstance(answers[5], NotFound)
    assert [answers[place] for place in (0, 2, 4)] == [None, None, None]
    assert [answers[place] for place in (1, 6)] == [scene.end("run-1"), scene.end("run-6")]
    assert answers[7] == Completion(2), "an event that cannot be read is left to its own caller"
    assert not {"run-1", "run-6"} & {run_id for loaded in scene.store.loaded for run_id in loaded}
    scene.store.problem = StoreUnavailable("down")
    with pytest.raises(StoreUnavailable):
        await scene.completion_waiters.end_of("run-1")


@pytest.mark.contract("MSG-4")
async def test_of_a_notification_that_names_runs_only_the_ends_of_those_are_read() -> None:
    async with Scene("held") as scene:
        waiting = {run_id: scene.completion_waiters.wait(run_id) for run_id in ("far", "near", "held", "damaged")}
        await until_looked(scene)
        scene.store.finished = {"far": 7, "near": 8, "held": 9, "damaged": 3}
        scene.store.damaged_ends = {"damaged"}
        named = frozenset(map(digest_of, ("far", "held", "damaged", "somebody's")))
        scene.store.wakeups.notify("changes", named)
        assert await soon(waiting["far"]) == scene.end("far")
        assert await soon(waiting["damaged"]) == Completion(3), "its own caller gets the error"
        assert not waiting["near"].done()
        assert sorted(scene.store.asked[-1]) == ["damaged", "far"]
        scene.store.wakeups.notify("runs", NOTHING)
        for _ in range(10):
            await asyncio.sleep(0)
        assert sorted(scene.store.asked[-1]) == ["damaged", "far"], "nothing has ended, and nothing is read"
        scene.store.wakeups.notify("runs", None)
        assert await soon(waiting["near"]) == scene.end("near"), "which have ended is not known: all are looked at"


@pytest.mark.contract("MSG-4")
async def test_a_named_end_is_read_at_once_however_long_the_last_look_took() -> None:
    async with Scene() as scene:
        release = asyncio.Event()
        find = scene.store.find

        async def slowly(query: EventQuery) -> Found[Any]:
            await release.wait()
            return await find(query)

        scene.store.find = slowly  # type: ignore[method-assign]
        far, near = scene.completion_waiters.wait("far"), scene.completion_waiters.wait("near")
        await asyncio.sleep(1.0)  # the next look at all of them is ten seconds away
        release.set()
        scene.store.finished = {"near": 4}
        assert await soon(near) == scene.end("near")
        scene.store.finished = {"far": 4}
        began = asyncio.get_running_loop().time()
        scene.store.wakeups.notify("changes", frozenset([digest_of("far")]))
        assert await soon(far) == scene.end("far")
        assert asyncio.get_running_loop().time() - began < 5.0


@pytest.mark.contract("MSG-4")
async def test_the_end_of_a_run_is_found_although_every_notification_is_lost() -> None:
    """Even while others come all the time."""
    async with Scene(poll_s=0.05) as scene:
        far = scene.completion_waiters.wait("far")
        await until_looked(scene)
        scene.store.finished = {"far": 7}
        async with asyncio.timeout(60):
            while not far.done():
                scene.store.wakeups.notify("changes", frozenset([digest_of("another")]))
                await asyncio.sleep(0.001)
        assert await far == scene.end("far")


@pytest.mark.contract("API-2")
async def test_a_run_that_was_started_here_is_not_loaded_before_and_if_it_is_gone_its_callers_are_told() -> None:
    async with Scene() as scene:  # who looks only as often as it must would be late
        scene.store.missing = {"gone"}
        waiting = {run_id: scene.completion_waiters.wait(run_id) for run_id in ("gone", "there", "done")}
        scene.store.finished = {"done": 3}
        asking = [scene.completion_waiters.end_of(run_id, is_known=True) for run_id in waiting]
        gone, *others = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(gone, NotFound)
        assert others == [None, scene.end("done")]
        scene.store.missing.add("there")
        scene.store.wakeups.notify("changes", frozenset([digest_of("there")]))
        with pytest.raises(NotFound):
            await soon(waiting["there"])
        assert scene.store.loaded == []


async def test_runs_of_one_digest_are_kept_apart() -> None:
    """`plumless` and `buckeroo` have the same."""
    assert digest_of("plumless") == digest_of("buckeroo")
    async with Scene() as scene:
        plumless, buckeroo = scene.completion_waiters.wait("plumless"), scene.completion_waiters.wait("buckeroo")
        await until_looked(scene)
        scene.store.finished = {"buckeroo": 5}
        scene.store.wakeups.notify("changes", frozenset([digest_of("buckeroo")]))
        assert await soon(buckeroo) == scene.end("buckeroo")
        assert not plumless.done()
        scene.store.finished["plumless"] = 6
        scene.store.wakeups.notify("changes", frozenset([digest_of("plumless")]))
        assert await soon(plumless) == scene.end("plumless")
        assert scene.completion_waiters._by_digest == {}


async def until_looked(scene: Scene) -> None:
    """Wait until the watch has looked at what is waited for, as it does when it begins."""
    async with asyncio.timeout(60):
        while not scene.store.asked:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)


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
