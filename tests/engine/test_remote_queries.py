"""Queries of runs whose code this process does not have: a live node that has it answers, through the store."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.engine import remote_queries
from holdfast.errors import InvalidInput, NotFound, QueryFailed, RequestTimedOut, VersionMismatch
from holdfast.store.port import BulletinQuery, Store
from tests.engine.harness import EngineVariant, wait_for_event


def shop() -> tuple[hf.App, Any]:
    """Return an app whose runs answer queries."""
    app = hf.App("shop")

    @app.workflow
    async def order(customer: str) -> str:
        """Wait to be paid."""
        paid: list[str] = []

        def who(greeting: str = "Hello") -> str:
            if greeting == "fail":
                raise ValueError("rude")
            return f"{greeting} {customer}"

        def pay(by: str) -> int:
            paid.append(by)
            return len(paid)

        hf.on_query("who", who)
        hf.on_update("pay", pay)
        await hf.wait_signal("go")
        return customer

    return app, order


def answer_of(raw: Any) -> Any:
    """Return what a run has answered."""
    return codec.decode(raw, Any)


async def ask(app: hf.App, run_id: str, name: str = "who", **arguments: Any) -> Any:
    """Ask a run through an app that need not have its code."""
    return answer_of(await app.runtime().query(run_id, name, codec.encode(arguments)))


@pytest.mark.contract("WF-6")
async def test_a_node_that_has_the_code_answers_for_a_process_that_has_not(variant: EngineVariant) -> None:
    """With its errors, of their own types; and it names what the run answers. Nothing is recorded."""
    app, order = shop()
    other = hf.App("front")
    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(order, "Ada")
        await wait_for_event(run, "SignalWaiting")
        events = await run.events()
        async with other.connect(store):
            assert await ask(other, run.run_id) == "Hello Ada"
            assert await ask(other, run.run_id, greeting="Bye") == "Bye Ada"
            with pytest.raises(NotFound, match="answers no query"):
                await ask(other, run.run_id, "colour")
            with pytest.raises(InvalidInput):
                await ask(other, run.run_id, wrong=1)
            with pytest.raises(QueryFailed, match="rude"):
                await ask(other, run.run_id, greeting="fail")
            handlers = answer_of(await other.runtime().handlers(run.run_id))
            assert (list(handlers["queries"]), list(handlers["updates"])) == (["who"], ["pay"])
            assert "greeting" in str(handlers["queries"]["who"]["input"])
        assert await run.events() == events
        await run.signal("go")
        assert await run.result() == "Ada"


async def test_a_process_with_the_code_and_no_node_knows_what_its_runs_answer(variant: EngineVariant) -> None:
    """It replays the run once, and not again and again for one that answers nothing."""
    app, order = shop()
    async with variant.opened() as store:
        async with variant.node(app, store):
            run = await app.start(order, "Ada")
            await wait_for_event(run, "SignalWaiting")
        again, _ = shop()
        async with again.connect(store):
            handlers = answer_of(await again.runtime().handlers(run.run_id))
            assert (list(handlers["queries"]), list(handlers["updates"])) == (["who"], ["pay"])
            assert await ask(again, run.run_id) == "Hello Ada"


@pytest.mark.contract("WF-3")
async def test_without_a_live_node_that_has_the_code_the_error_says_so() -> None:
    """Also where there are nodes, with other code."""
    store = hf.MemoryStore()
    app, order = shop()
    async with app.node(store):
        run_id = (await app.start(order, "Ada")).run_id
        await wait_for_event(app.run(run_id), "SignalWaiting")
    other = hf.App("front")

    @other.workflow
    async def something_else() -> None:
        """Nothing."""

    async with other.node(store), asyncio.timeout(30):
        with pytest.raises(VersionMismatch, match="any live node"):
            await ask(other, run_id)
        with pytest.raises(VersionMismatch, match="any live node"):
            await other.runtime().handlers(run_id)
        with pytest.raises(NotFound):
            await ask(other, "nowhere")
        assert await store.find_bulletins(BulletinQuery(kind="question")) == []


async def test_if_a_node_does_not_answer_another_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was killed keeps its lease for some seconds. If none answers, the error is typed."""
    monkeypatch.setattr(remote_queries, "WAIT_S", 1.0)
    monkeypatch.setattr(remote_queries, "LOOK_S", 0.01)
    store = hf.MemoryStore()
    app, order = shop()
    other = hf.App("front")
    async with app.node(store, name="alive") as node:
        run = await app.start(order, "Ada")
        await wait_for_event(run, "SignalWaiting")
        await store.renew("killed#1", 60_000, list(node.definition_filter.published()))
        async with other.connect(store), asyncio.timeout(30):
            for number in range(4):  # whichever is chosen first
                run = await app.start(order, f"c-{number}")
                await wait_for_event(run, "SignalWaiting")
                assert await ask(other, run.run_id) == f"Hello c-{number}"
    async with other.connect(store), asyncio.timeout(30):
        with pytest.raises(RequestTimedOut, match="killed#1"):
            await ask(other, run.run_id)


@pytest.mark.contract("OWN-3", "STO-1")
async def test_a_node_serves_until_it_is_asked_to_stop_on_every_store(store: Store) -> None:
    app, _ = shop()
    asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with app.node(store) as node:
        serving = asyncio.ensure_future(node.run_until(asked))
        _, under_way = await asyncio.wait([serving], timeout=0.3)
        assert under_way == {serving}
        asked.set_result("SIGTERM")
        await serving
