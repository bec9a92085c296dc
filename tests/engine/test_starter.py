"""Runs that are created many at a time: each is begun here once, if it is this node's, and its caller is told."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.engine.start.starter import CREATE_RUNS, First, Starter
from holdfast.errors import EngineError, InvalidInput, LeaseExpired, StoreUnavailable
from holdfast.store.port import Created, Existing, LoadedRun, NewRun, Refused
from holdfast.store.types import created_run
from holdfast.testing import START
from holdfast.testing.samples import new_run


class Maker:
    """A store that only creates, as the test says."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self.problem: Exception | None = None
        self.known: set[str] = set()
        self.expiries = 0
        self.unfit: dict[str, str] = {}
        self.created: list[NewRun] = []
        self.finds: list[Exception | list[LoadedRun | None]] = []
        self.looked_for: list[list[str]] = []

    async def load(self, run_ids: Sequence[str]) -> Sequence[LoadedRun | None]:
        """Find what the test says."""
        self.looked_for.append(list(run_ids))
        found = self.finds.pop(0) if self.finds else [None]
        if isinstance(found, Exception):
            raise found
        return found

    async def create(self, runs: Sequence[NewRun], claim_for: str | None = None) -> list[Created | Existing | Refused]:
        """Create, when it is allowed."""
        self.created += runs
        self.batches.append(len(runs))
        self.asked.set()
        await self.may_answer.wait()
        if self.problem is not None:
            raise self.problem
        if self.expiries:
            self.expiries -= 1
            raise LeaseExpired("the lease has ended")
        unfit = [self.unfit.get(new.run_id) for new in runs if new.tags == ("begun",)]
        if "raised" in unfit:
            raise ValueError("surrogates not allowed")
        return [self._answer(new, 0 if claim_for is None else 1) for new in runs]

    async def renew(self, node: str, lease_ms: int) -> None:
        """Renew whatever there is."""

    def _answer(self, new: NewRun, epoch: int) -> Created | Existing | Refused:
        if new.run_id in self.known:
            return Existing(new.run_id)
        if new.run_id in self.unfit and new.tags == ("begun",):
            return Refused(InvalidInput("what the run begins with cannot be stored"))
        return Created(new.run_id, epoch)


def loaded(run_id: str, owner: str = "node-a") -> LoadedRun:
    """Return a run as the node may find it in the store."""
    return created_run(new_run(run_id), owner, START)


class Drafter:
    """Takes the first turns of some runs."""

    def __init__(self) -> None:
        self.can_begin: set[str] = set()
        self.begun: list[str] = []
        self.closed: list[str] = []
        self.on_take: Callable[[], None] = lambda: None

    def take(self, new: NewRun, now: Instant) -> First | None:
        """Take it, if the test says so."""
        if new.run_id not in self.can_begin:
            return None
        self.on_take()
        something: Any = SimpleNamespace()
        cached: Any = SimpleNamespace(close=lambda: self.closed.append(new.run_id))
        return First(replace(new, tags=("begun",)), created_run(new, "node-a", now), cached, something, something)

    def begin(self, first: First, now: Instant) -> None:
        """Note it."""
        self.begun.append(f"{first.new.run_id} with its first turn")


class Scene:
    """Creations, and the node that they are for."""

    name = "node-a"
    has_room = True

    def __init__(self, *, is_for_node: bool = True) -> None:
        store: Any = Maker()
        first_turns: Any = Drafter()
        self.store: Maker = store
        self.drafter: Drafter = first_turns
        self.begun = first_turns.begun
        self.found: list[str] = []
        self.starter = Starter(store, self, 1_000, first_turns if is_for_node else None)

    def begin(self, new: NewRun, now: Instant) -> None:
        """Note it."""
        self.begun.append(new.run_id)

    def owns(self, run_id: str) -> bool:
        """Return whether it was begun."""
        return run_id in self.begun

    def find(self, run_id: str) -> None:
        """Note it."""
        self.found.append(run_id)

    def start(self, *run_ids: str, is_unheard_of: bool = True) -> "list[asyncio.Future[Any]]":
        """Ask for runs, all at once."""
        create = partial(self.starter.create, is_unheard_of=is_unheard_of)
        return [create(new_run(run_id), START) for run_id in run_ids]


@pytest.mark.contract("OWN-1")
async def test_a_run_that_is_created_for_this_node_is_begun_here_once() -> None:
    scene = Scene()
    assert await asyncio.gather(*scene.start("a", "b")) == [Created("a", 1), Created("b", 1)]
    assert scene.begun == ["a", "b"]


@pytest.mark.contract("OWN-1", "QUE-1")
async def test_a_run_that_is_somebody_elses_is_not_begun_here() -> None:
    scene = Scene()
    scene.store.known = {"b"}
    assert await asyncio.gather(*scene.start("a", "b")) == [Created("a", 1), Existing("b")]
    assert scene.begun == ["a"]
    nobody = Scene(is_for_node=False)
    await asyncio.gather(*nobody.start("a"))
    assert nobody.begun == []


@pytest.mark.contract("OWN-1", "ACT-1")
async def test_a_run_that_is_claimed_before_the_answer_to_its_creation_is_begun_first() -> None:
    """What it does has not begun: it is not to be taken for something that was lost."""
    scene = Scene()
    scene.drafter.can_begin = {"a"}
    scene.store.may_answer.clear()
    tasks = scene.start("a", "b")
    await scene.store.asked.wait()
    await scene.starter.begun([loaded("c")])
    claims = [asyncio.create_task(scene.starter.begun([loaded("c"), loaded(run_id)])) for run_id in ("a", "b")]
    await asyncio.sleep(0)
    assert not any(claim.done() for claim in claims)
    scene.store.may_answer.set()
    await asyncio.gather(*claims)
    assert scene.begun == ["a with its first turn", "b"]
    await asyncio.gather(*tasks)


@pytest.mark.contract("QUE-1")
async def test_a_run_that_somebody_may_know_has_to_be_there_first() -> None:
    scene = Scene()
    scene.drafter.can_begin = {"a"}
    await asyncio.gather(*scene.start("a", is_unheard_of=False))
    assert [new.tags for new in scene.store.created] == [()]


@pytest.mark.contract("OWN-1", "OWN-3")
async def test_runs_of_which_some_may_have_been_created_before_a_lease_ended_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.engine.start.starter.LOOKS_S", (0.0,))
    scene = Scene()
    scene.drafter.can_begin = {"a", "b"}
    scene.store.expiries = 1
    scene.store.known = {"a"}
    scene.store.finds = [[loaded("a"), None]]
    assert await asyncio.gather(*scene.start("a", "b")) == [Existing("a"), Created("b", 1)]
    async with asyncio.timeout(60):
        while scene.starter._looking:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert (scene.begun, scene.found) == (["b with its first turn"], ["a"])


async def test_what_runs_here_knows_nothing_of_who_asked() -> None:
    scene = Scene()
    scene.drafter.can_begin = {"a"}
    user = ContextVar("user", default="nobody")
    seen: list[str] = []
    scene.drafter.on_take = lambda: seen.append(user.get())
    user.set("alice")
    await asyncio.gather(*scene.start("a"))
    assert seen == ["nobody"]


@pytest.mark.contract("OWN-1")
async def test_a_run_that_is_claimed_though_its_creation_failed_waits_no_longer() -> None:
    scene = Scene()
    scene.drafter.can_begin = {"a"}
    scene.store.may_answer.clear()
    scene.store.problem = StoreUnavailable("down")
    tasks = scene.start("a")
    await scene.store.asked.wait()
    claim = asyncio.create_task(scene.starter.begun([loaded("a")]))
    await asyncio.sleep(0)
    scene.store.may_answer.set()
    await claim
    assert await asyncio.gather(*tasks, return_exceptions=True) == [scene.store.problem]
    assert (scene.begun, scene.drafter.closed) == ([], ["a"])


async def test_runs_are_created_with_their_first_turns() -> None:
    scene = Scene()
    scene.drafter.can_begin = {"a", "c"}
    scene.store.known = {"c"}
    await asyncio.gather(*scene.start("a", "b", "c"))
    assert [new.tags for new in scene.store.created] == [("begun",), (), ("begun",)]
    assert scene.begun == ["a with its first turn", "b"]
    assert scene.drafter.closed == ["c"]


async def test_without_room_runs_are_created_as_they_were_asked_for() -> None:
    scene = Scene()
    scene.drafter.can_begin, scene.has_room = {"a"}, False
    await asyncio.gather(*scene.start("a"))
    assert [new.tags for new in scene.store.created] == [()]


@pytest.mark.contract("MSG-3")
@pytest.mark.parametrize("problem", ["refused", "raised"])
async def test_a_first_turn_that_cannot_be_stored_comes_later_and_harms_nobody(problem: str) -> None:
    scene = Scene()
    scene.drafter.can_begin = {"a", "b"}
    scene.store.unfit = {"a": problem}
    starts = scene.start("a", "b", "c")
    assert await asyncio.gather(*starts) == [Created("a", 1), Created("b", 1), Created("c", 1)]
    assert "a" in scene.begun
    assert scene.drafter.closed == (["a"] if problem == "refused" else ["a", "b"])


@pytest.mark.contract("MSG-4", "OWN-1")
async def test_runs_whose_creation_was_not_answered_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be there, at work for this node: nothing would make them ready."""
    monkeypatch.setattr("holdfast.engine.start.starter.LOOKS_S", (0.0, 0.0, 0.0))
    scene = Scene()
    scene.drafter.can_begin = {"a", "b", "c"}
    scene.store.problem = StoreUnavailable("down")
    scene.store.finds = [StoreUnavailable("down"), [None, None, None], [loaded("a"), loaded("b", "node-b"), None]]
    await asyncio.gather(*scene.start("a", "b", "c", "d"), return_exceptions=True)
    async with asyncio.timeout(60):
        while scene.starter._looking:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert scene.found == ["a"]
    assert scene.store.looked_for == [*[["a", "b", "c"]] * 3, ["c"]]


async def test_nobody_looks_for_runs_after_the_node_has_stopped() -> None:
    scene = Scene()
    scene.drafter.can_begin = {"a"}
    scene.store.problem = StoreUnavailable("down")
    await asyncio.gather(*scene.start("a"), return_exceptions=True)
    assert scene.starter._looking
    async with asyncio.timeout(0.1):
        await scene.starter.stop()
    assert not scene.starter._looking


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
    assert scene.begun == []
    scene.store.problem = None
    assert await asyncio.gather(*scene.start("a")) == [Created("a", 1)]


@pytest.mark.contract("MSG-4", "API-2")
@pytest.mark.parametrize(("is_unheard_of", "hint"), [(True, "or not"), (False, "or not; ask again with the same id")])
async def test_who_waits_when_the_node_stops_is_told_that_nobody_knows(is_unheard_of: bool, hint: str) -> None:
    scene = Scene()
    scene.drafter.can_begin = {"a", "b"}
    scene.store.may_answer.clear()
    tasks = scene.start("a", is_unheard_of=is_unheard_of)
    await scene.store.asked.wait()
    tasks += scene.start("b", is_unheard_of=is_unheard_of)
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await scene.starter.stop()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [EngineError, EngineError]
    assert all(str(answer).endswith(f"was being created: it may be there, {hint}") for answer in answers)
    assert (scene.begun, scene.drafter.closed) == ([], ["a"] if is_unheard_of else [])


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
