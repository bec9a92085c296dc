"""A run is created with its first turn: one commit, and nothing runs for a run that is not there."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

import holdfast as hf
from holdfast.core.events import RunQueued
from holdfast.engine.observe.metrics import observer_of
from holdfast.engine.options import NodeOptions
from holdfast.engine.start.starter import FirstTurns
from holdfast.engine.turns.draft import prepare_run
from holdfast.errors import HoldfastError, LeaseExpired, StoreUnavailable
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Created, RunQuery, WaitQuery
from holdfast.store.proxy import StoreProxy
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import signal
from tests.early_first_turns import take_first_turns_early

PATIENCE_S = 60.0


class Writes(StoreProxy):
    """A store that notes what is written, and may lose the answer to a creation, or take its time with it."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.writes: list[tuple[str, int]] = []
        self.loses_answer = False
        self.answers: asyncio.Event | None = None
        self.has_created = asyncio.Event()
        self.claims = 0

    async def create(self, runs: Any, claim_for: str | None = None) -> Any:
        """Create, and note with how many events."""
        answers = await self.inner.create(runs, claim_for)
        self.writes += [("create", len(new.events)) for new in runs]
        if self.loses_answer:
            self.loses_answer = False
            raise StoreUnavailable("the answer was lost")
        self.has_created.set()
        if self.answers is not None:
            await self.answers.wait()
        return answers

    async def claim(self, *args: Any, **kwargs: Any) -> Any:
        """Claim, and count it."""
        self.claims += 1
        return await self.inner.claim(*args, **kwargs)

    async def commit(self, turns: Any) -> Any:
        """Commit, and note how many events."""
        answers = await self.inner.commit(turns)
        self.writes += [("commit", len(turn.events)) for turn in turns]
        return answers


class Shop:
    """Two workflows, and what they did."""

    def __init__(self) -> None:
        self.app = hf.App("shop")
        self.did: list[str] = []

        @self.app.activity
        async def charge(order: str) -> str:
            self.did.append(f"charge {order}")
            return f"{order} paid"

        @self.app.workflow
        async def buy(order: str) -> str:
            self.did.append(f"buy {order}")
            return await charge(order)

        @self.app.workflow
        async def ask(question: str) -> str:
            self.did.append(f"ask {question}")
            return await hf.wait_signal("answer", str)

        @self.app.workflow
        async def echo(word: str) -> str:
            self.did.append(f"echo {word}")
            return word

        self.buy, self.ask, self.echo = buy, ask, echo


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def store() -> Any:
    return Writes(MemoryStore())


@pytest.mark.contract("MSG-2", "WF-2")
async def test_a_run_that_begins_with_an_activity_is_created_at_work(shop: Shop, store: Any) -> None:
    async with shop.app.node(store):
        assert await (await shop.app.start(shop.buy, "tea")).result() == "tea paid"
    assert store.writes == [("create", 3), ("commit", 2)]
    assert shop.did == ["buy tea", "charge tea"]


@pytest.mark.contract("MSG-2", "WF-2")
async def test_other_first_turns_are_taken_before_and_committed_after(shop: Shop, store: Any) -> None:
    async with shop.app.node(store):
        assert await (await shop.app.start(shop.echo, "hello")).result() == "hello"
        asking = await shop.app.start(shop.ask, "who?")
        await asking.signal("answer", "me")
        assert await asking.result() == "me"
    assert store.writes[:2] == [("create", 1), ("commit", 2)]
    assert shop.did == ["echo hello", "ask who?"]


@pytest.mark.parametrize("cached_runs", [NodeOptions().cached_runs, 0])
async def test_what_a_first_turn_did_is_counted_whenever_it_is_committed(shop: Shop, cached_runs: int) -> None:
    async with shop.app.node(MemoryStore(), options=NodeOptions(cached_runs=cached_runs)) as node:
        await (await shop.app.start(shop.buy, "tea")).result()
        counts = observer_of(node.store).counts
    events = ("RunQueued", "RunStarted", "StepStarted", "StepCompleted", "RunCompleted")
    assert counts.events == dict.fromkeys(events, 1)
    assert counts.runs_created == 1


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize("cached_runs", [NodeOptions().cached_runs, 1, 0])
async def test_what_is_kept_in_memory_makes_no_difference(shop: Shop, store: Any, cached_runs: int) -> None:
    async with shop.app.node(store, options=NodeOptions(cached_runs=cached_runs)):
        starts = [shop.app.start(workflow, "x") for workflow in (shop.buy, shop.echo) * 3]
        results = [await run.result() for run in await asyncio.gather(*starts)]
    assert results == ["x paid", "x"] * 3


@pytest.mark.contract("QUE-1")
@pytest.mark.parametrize("ids", [{"request_id": "r-1"}, {"run_id": "a"}])
async def test_nothing_runs_for_a_request_that_was_made_before(shop: Shop, store: Any, ids: dict[str, Any]) -> None:
    async with shop.app.node(store):
        first = await shop.app.start(shop.buy, "tea", **ids)
        await first.result()
        again = await shop.app.start(shop.buy, "tea", **ids)
        assert await again.result() == "tea paid"
    assert shop.did == ["buy tea", "charge tea"]


@pytest.mark.contract("QUE-1", "API-2")
async def test_a_run_id_that_is_taken_is_refused_and_its_run_goes_on(shop: Shop, store: Any) -> None:
    async with shop.app.node(store) as node:
        take_first_turns_early(node)
        first = await shop.app.start(shop.ask, "who?", run_id="a")
        with pytest.raises(HoldfastError, match="a"):
            await shop.app.start(shop.buy, "tea", run_id="a")
        await first.signal("answer", "me")
        assert await first.result() == "me"
    assert "charge tea" not in shop.did


@pytest.mark.contract("MSG-4", "OWN-1", "WF-2")
@pytest.mark.parametrize("name", ["buy", "echo"])
async def test_a_run_whose_creation_was_not_answered_goes_on(
    shop: Shop, store: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("holdfast.engine.start.starter.LOOKS_S", (0.0,))
    store.loses_answer = True
    async with shop.app.node(store) as node:
        take_first_turns_early(node)
        with pytest.raises(StoreUnavailable):
            await shop.app.start(getattr(shop, name), "tea", run_id="a")
        async with asyncio.timeout(PATIENCE_S):
            assert await shop.app.run("a").result() in ("tea paid", "tea")
        history = [event.event_type for event in await shop.app.run("a").events()]
    assert history.count("RunCompleted") == 1
    assert history[0] == "RunQueued"


class SlowLook(Writes):
    """A store that creates nothing at first, for want of a lease, and answers a look for what it created late."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(MemoryStore(clock))
        self.has_lease = False
        self.has_looked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.owners: list[str | None] = []

    async def create(self, runs: Any, claim_for: str | None = None) -> Any:
        """Create, if there is a lease."""
        if not self.has_lease:
            self.has_lease = True
            raise LeaseExpired("the lease has ended", node="n")
        return await super().create(runs, claim_for)

    async def load(self, run_ids: Any) -> Any:
        """Load, and keep the first answer back."""
        runs = await self.inner.load(run_ids)
        if not self.has_looked.is_set():
            self.has_looked.set()
            await self.may_answer.wait()
        return runs

    async def commit(self, turns: Any) -> Any:
        """Commit, and note whose the runs are."""
        runs = await self.inner.load([turn.run_id for turn in turns])
        self.owners += [loaded.head.lease_owner for loaded in runs if loaded is not None]
        return await super().commit(turns)


@pytest.mark.contract("OWN-1", "ACT-1")
async def test_a_run_that_is_let_go_while_it_is_looked_for_is_claimed_before_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was found is out of date: it says that the run belongs to the node, which has let it go since."""
    monkeypatch.setattr("holdfast.engine.start.starter.LOOKS_S", (0.0,))
    clock = VirtualClock()
    store, app = SlowLook(clock), hf.App("shop")
    ring = store.wakeups.notify
    monkeypatch.setattr(store.wakeups, "notify", lambda *topics: None)  # wake-ups may get lost
    tries: list[int] = []

    @app.activity(retry=hf.Retry(max_attempts=2, initial_ms=3_000, most_ms=3_000))
    async def charge() -> str:
        tries.append(clock.now())
        if len(tries) == 1:
            await store.has_looked.wait()
            raise ConnectionError("not now")
        return "paid"

    @app.workflow
    async def buy() -> str:
        return await charge()

    async with asyncio.timeout(PATIENCE_S), app.node(store, options=NodeOptions(safety_poll_s=3_600.0)) as node:
        run = await app.start(buy)
        while node.owns(run.run_id):  # noqa: ASYNC110
            await asyncio.sleep(0)
        while not node.turn_loop.is_idle or node.owned_runs.should_claim:  # noqa: ASYNC110
            await asyncio.sleep(0)
        clock.advance(ms=4_000)
        store.may_answer.set()
        while node.starter._looking or not node.turn_loop.is_idle:  # noqa: ASYNC110
            await asyncio.sleep(0)
        ring()
        assert await run.result() == "paid"
    assert set(store.owners) == {node.name}


class SlowAdmission(MemoryStore):
    """A store that keeps the first answer back in which it lets a run in."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer: asyncio.Event | None = asyncio.Event()
        self.owners: list[str | None] = []

    async def admit(self, *args: Any, **kwargs: Any) -> Any:
        """Admit runs, and answer late."""
        admitted, next_at = await super().admit(*args, **kwargs)
        if admitted and self.may_answer is not None:
            await self.may_answer.wait()
            self.may_answer = None
        return admitted, next_at

    async def commit(self, turns: Any) -> Any:
        """Commit, and note whose the runs are."""
        self.owners += [self._runs[turn.run_id].head.lease_owner for turn in turns]
        return await super().commit(turns)


@pytest.mark.contract("OWN-1", "QUE-3")
async def test_a_run_that_is_admitted_and_let_go_before_the_answer_comes_is_not_taken_by_it() -> None:
    store, app = SlowAdmission(), hf.App("shop")

    @app.workflow(at_once=1)
    async def wait() -> str:
        return await hf.wait_signal("go", str)

    async with asyncio.timeout(PATIENCE_S), app.node(store) as node:
        first, second = await app.start(wait, run_id="first"), await app.start(wait, run_id="second")
        await first.signal("go", "now")
        while not await store.find(WaitQuery(run_id="second")):  # noqa: ASYNC110
            await asyncio.sleep(0)
        while node.owns("second"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert store.may_answer is not None
        store.may_answer.set()
        while store.may_answer is not None or node.owns("second") or not node.turn_loop.is_idle:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await second.signal("go", "later")
        assert await second.result() == "later"
    assert set(store.owners) == {node.name}


@pytest.mark.contract("SIG-1", "OWN-1")
async def test_a_signal_that_is_faster_than_the_answer_to_the_creation_is_taken_without_haste(
    shop: Shop, store: Any
) -> None:
    store.answers = asyncio.Event()
    async with shop.app.node(store):
        starting = asyncio.create_task(shop.app.start(shop.buy, "tea"))
        await store.has_created.wait()
        [head] = await store.find(RunQuery())
        await store.deliver([signal(head.run_id, "hurry", "please")])
        store.claims = 0
        await asyncio.sleep(0.5)
        assert store.claims < 10
        while not store.claims:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        store.answers.set()
        assert await (await starting).result() == "tea paid"
        assert await shop.app.run(head.run_id).mailbox()
    assert shop.did == ["buy tea", "charge tea"]


@pytest.mark.contract("SIG-1", "OWN-1")
@pytest.mark.parametrize("brings", ["nothing", "a signal", "another epoch"])
async def test_a_turn_that_was_taken_before_loses_nothing_that_comes_before_it_is_durable(
    shop: Shop, brings: str
) -> None:
    store = MemoryStore()
    async with shop.app.node(store) as node:
        new = prepare_run("a", RunQueued("ask", "1", input=Raw(b'{"question":"who?"}')), START, node.name)
        first_turns = FirstTurns(node.owned_runs, node.run_cache, node.limits)
        first = first_turns.take(new, START)
        assert first is not None
        assert isinstance((await store.create([new], claim_for=node.name))[0], Created)
        first_turns.begin(first, START)
        if brings == "a signal":
            await store.deliver([signal("a", "answer", "me")])
        [loaded] = await store.load(["a"])
        assert loaded is not None
        if brings == "another epoch":
            loaded = replace(loaded, head=replace(loaded.head, lease_epoch=2))
        node.owned_runs.add(loaded)
        if brings != "a signal":
            await shop.app.run("a").signal("answer", "me")
        assert await shop.app.run("a").result() == "me"
        history = [event.event_type for event in await shop.app.run("a").events()]
    assert history == ["RunQueued", "RunStarted", "SignalWaiting", "SignalReceived", "RunCompleted"]


@pytest.mark.contract("WF-2")
async def test_a_workflow_knows_nothing_of_who_has_started_it(store: Any) -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")
    app, seen = hf.App("users"), list[str]()

    @app.activity
    async def act() -> None:
        seen.append(user.get())

    @app.workflow
    async def work() -> None:
        seen.append(user.get())
        await act()

    async with app.node(store):
        user.set("alice")
        await (await app.start(work)).result()
    assert seen == ["nobody", "nobody"]
