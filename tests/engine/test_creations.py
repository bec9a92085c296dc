"""Runs that are created many at a time: each is begun here once, if it is this node's, and its caller is told."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.engine.creations import CREATE_RUNS, Creations
from holdfast.errors import EngineError, StoreUnavailable
from holdfast.store.port import Created, Existing, NewRun
from holdfast.testing.clock import START
from holdfast.testing.samples import new_run


class Maker:
    """A store that only creates, as the test says."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self.problem: Exception | None = None
        self.known: set[str] = set()

    async def create(self, runs: Sequence[NewRun], claim_for: str | None = None) -> list[Created | Existing]:
        """Create, when it is allowed."""
        self.batches.append(len(runs))
        self.asked.set()
        await self.may_answer.wait()
        if self.problem is not None:
            raise self.problem
        epoch = 0 if claim_for is None else 1
        return [Existing(new.run_id) if new.run_id in self.known else Created(new.run_id, epoch) for new in runs]


class Scene:
    """Creations, and what they have begun."""

    def __init__(self, owner: str | None = "node-a") -> None:
        store: Any = Maker()
        self.store: Maker = store
        self.begun: list[str] = []
        self.creations = Creations(store, owner, 1_000, lambda new, now: self.begun.append(new.run_id))

    def start(self, *run_ids: str) -> "list[asyncio.Task[Any]]":
        """Ask for runs, all at once."""
        return [asyncio.create_task(self.creations.create(new_run(run_id), START)) for run_id in run_ids]


@pytest.mark.contract("OWN-1")
async def test_a_run_that_is_created_for_this_node_is_begun_here_once() -> None:
    scene = Scene()
    assert await asyncio.gather(*scene.start("a", "b")) == [Created("a", 1), Created("b", 1)]
    assert scene.begun == ["a", "b"]
    assert scene.creations._under_way == set()


@pytest.mark.contract("OWN-1", "QUE-1")
async def test_a_run_that_is_somebody_elses_is_not_begun_here() -> None:
    scene = Scene()
    scene.store.known = {"b"}
    assert await asyncio.gather(*scene.start("a", "b")) == [Created("a", 1), Existing("b")]
    assert scene.begun == ["a"]
    nobody = Scene(owner=None)
    await asyncio.gather(*nobody.start("a"))
    assert nobody.begun == []


@pytest.mark.contract("OWN-1")
async def test_a_run_that_the_node_has_found_by_itself_meanwhile_is_not_begun_again() -> None:
    scene = Scene()
    scene.store.may_answer.clear()
    tasks = scene.start("a", "b")
    await scene.store.asked.wait()
    scene.creations.found("a")
    scene.store.may_answer.set()
    await asyncio.gather(*tasks)
    assert scene.begun == ["b"]


async def test_those_who_ask_meanwhile_share_the_next_call_and_none_is_too_large() -> None:
    scene = Scene()
    scene.store.may_answer.clear()
    first = scene.start("first")
    await scene.store.asked.wait()
    others = scene.start(*(f"run-{number}" for number in range(CREATE_RUNS + 1)))
    await asyncio.sleep(0)
    scene.store.may_answer.set()
    await asyncio.gather(*first, *others)
    assert scene.store.batches == [1, CREATE_RUNS, 1]
    assert len(scene.begun) == CREATE_RUNS + 2


@pytest.mark.contract("API-2")
async def test_a_store_that_fails_is_told_to_everybody_of_the_batch_and_to_nobody_after() -> None:
    scene = Scene()
    scene.store.problem = StoreUnavailable("down")
    answers = await asyncio.gather(*scene.start("a", "b"), return_exceptions=True)
    assert answers == [scene.store.problem] * 2
    assert (scene.begun, scene.creations._under_way) == ([], set())
    scene.store.problem = None
    assert await asyncio.gather(*scene.start("a")) == [Created("a", 1)]


@pytest.mark.contract("MSG-4", "API-2")
async def test_who_waits_when_the_node_stops_is_told_that_nobody_knows() -> None:
    scene = Scene()
    scene.store.may_answer.clear()
    tasks = scene.start("a")
    await scene.store.asked.wait()
    tasks += scene.start("b")
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await scene.creations.stop()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [EngineError, EngineError]
    assert all("ask again with the same request id" in str(answer) for answer in answers)
    assert scene.begun == []


async def test_who_waits_no_longer_is_not_answered_and_harms_nobody() -> None:
    scene = Scene()
    scene.store.may_answer.clear()
    gone, there = scene.start("a", "b")
    await scene.store.asked.wait()
    gone.cancel()
    await asyncio.sleep(0)
    scene.store.may_answer.set()
    assert await there == Created("b", 1)
    assert scene.begun == ["a", "b"]
