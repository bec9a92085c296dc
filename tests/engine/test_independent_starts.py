"""Runs that workflows start on their own: once, without a parent, and refused with a reason."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.fork import find_cut
from holdfast.core.state import COMPLETED, FAILED
from holdfast.engine.check_histories import check_history
from holdfast.errors import NotDurable, RunFailed, StartRefused, StoreUnavailable
from holdfast.limits import NESTED_RUNS
from holdfast.store.port import RunQuery, Store
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_status


@dataclass
class Parcel:
    """The state of a flow."""

    address: str
    is_sent: bool = False


def make_app() -> hf.App:
    app = hf.App("family")

    @app.workflow(signals={"go": str})
    async def echo(word: str) -> str:
        return f"{word} {await hf.wait_signal('go', str)}"

    @app.activity
    async def send(parcel: Parcel) -> Parcel:
        return Parcel(parcel.address, True)

    flow = app.flow("parcel", Parcel, hf.Act(send))

    @app.workflow
    async def starts(word: str, request_id: str | None = None, run_id: str | None = None) -> str:
        run = await hf.start(echo, word, request_id=request_id, run_id=run_id, tags=("made",), reference_key="r-1")
        return run.run_id

    @app.workflow
    async def by_name(name: str, run_id: str | None = None) -> str:
        try:
            run: hf.RunHandle[Any] = await hf.start(name, word="named", run_id=run_id)
            await run.signal("go", "on")
            return run.run_id
        except StartRefused as problem:
            return str(problem.info.code)

    @app.workflow
    async def by_flow() -> str:
        return (await hf.start(flow, Parcel("here"))).run_id

    @app.workflow
    async def by_plan() -> str:
        return (await hf.start(hf.PlanRef(plan_id="etl"), {"days": 2})).run_id

    @app.workflow
    async def counter() -> int:
        added: asyncio.Queue[int] = asyncio.Queue()

        def add(number: int) -> int:
            added.put_nowait(number)
            return number

        hf.on_update("add", add)
        return await added.get() + await added.get()

    @app.workflow
    async def counts() -> int:
        run = await hf.start(counter)
        first = await app.run(run.run_id).update("add", number=1)
        await hf.sleep(0.001)
        return int(first)

    @app.workflow
    async def chain(left: int) -> int:
        if left:
            await hf.start(chain, left - 1, run_id=f"chain-{left - 1}")
        return left

    return app


def workflow(app: hf.App, name: str) -> Any:
    return hf.Workflow(app.registry.workflow(name))


@pytest.mark.contract("WF-6", "ACT-1")
async def test_updates_from_inside_leave_the_slots_to_what_they_wait_for(variant: EngineVariant) -> None:
    """The handler of an update calls an activity, on the same node, which has one slot."""
    app = hf.App("shop")

    @app.activity
    async def weigh(grams: int) -> int:
        return grams

    @app.workflow
    async def scales() -> int:
        hf.on_update("weigh", weigh)
        return await hf.wait_signal("end", int)

    @app.workflow
    async def asks(run_id: str) -> int:
        return int(await app.run(run_id).update("weigh", grams=5))

    async with variant.node(app, activities_at_once=1):
        asked = [await app.start(scales) for _ in range(2)]
        asking = [await app.start(asks, run.run_id) for run in asked]
        assert [await run.result() for run in asking] == [5, 5]


@pytest.mark.contract("WF-4")
async def test_a_fork_keeps_what_its_original_has_started_and_updated(variant: EngineVariant) -> None:
    """The ids of a start and of an update, if the run gives them, are those of the original in its history."""
    app = make_app()
    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(workflow(app, "counts"))
        assert await run.result() == 1
        history = await run.events()
        for cut in sorted({find_cut(history, at) for at in range(1, len(history) + 1)}):
            fork = await run.fork(at=cut)
            assert await fork.result() == 1, cut
            assert await (await fork.fork(at=cut)).result() == 1, cut
            assert check_history(app.registry, await fork.events()) is None
        started = await store.find(RunQuery(workflow="counter"))
        assert len(started) <= 1 + 2 * 2  # forks from before the start have started runs of their own


@pytest.mark.contract("WF-4")
async def test_it_has_no_parent_and_goes_on_when_its_starter_has_ended(variant: EngineVariant) -> None:
    app = make_app()
    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(workflow(app, "starts"), "hello", tenant="acme", project="p", environment="e")
        run_id = await run.result()
        [started] = await store.load([run_id])
        assert started is not None
        head = started.head
        assert (head.parent_run_id, head.tenant, head.project, head.environment) == (None, "acme", "p", "e")
        assert (head.tags, head.reference_key) == (("made",), "r-1")
        await app.run(run_id).signal("go", "on")
        assert await app.run(run_id).result() == "hello on"
        assert check_history(app.registry, await run.events()) is None
        assert (await wait_for_event(run, "StepStarted")).step_id == "start:echo"


@pytest.mark.contract("WF-4")
async def test_it_is_not_nested(variant: EngineVariant) -> None:
    app = make_app()
    async with variant.opened() as store, variant.node(app, store):
        await app.start(workflow(app, "chain"), NESTED_RUNS + 5)
        await wait_for_event(app.run("chain-0"), "RunCompleted")


class LosesAnswers(StoreProxy):
    """Creates runs and does not say so, a few times."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.left = 0

    async def create(self, runs: Any, claim_for: str | None = None) -> Any:
        answers = await self.inner.create(runs, claim_for)
        if self.left > 0 and any(new.plan_id == "echo" for new in runs):
            self.left -= 1
            raise StoreUnavailable("the connection was lost")
        return answers


@pytest.mark.contract("WF-4", "QUE-1")
@pytest.mark.parametrize("request_id", [None, "q-1"])
async def test_it_is_started_once_although_the_answer_was_lost(variant: EngineVariant, request_id: str | None) -> None:
    app = make_app()
    async with variant.opened() as inner:
        store = LosesAnswers(inner)
        async with variant.node(app, store):
            store.left = 2
            run = await app.start(workflow(app, "starts"), "hello", request_id)
            run_id = await run.result()
            found = await inner.find(RunQuery(workflow="echo"))
            assert [head.run_id for head in found] == [run_id]
            if request_id is not None:  # the same request from outside is that run
                assert (await app.start(workflow(app, "echo"), "hello", request_id="q-1")).run_id == run_id


@pytest.mark.contract("WF-4", "QUE-1", "API-2")
async def test_a_start_that_is_refused_raises_why(variant: EngineVariant) -> None:
    app = make_app()
    async with variant.node(app):
        taken = await app.start(workflow(app, "echo"), "other", run_id="taken")
        for name, run_id, code in (
            ("echo", "taken", "Conflict"),
            ("nothing", None, "NotFound"),
            ("echo", "a/b", "InvalidInput"),
        ):
            assert await (await app.start(workflow(app, "by_name"), name, run_id)).result() == code
        assert await (await app.start(workflow(app, "by_name"), "starts")).result() != "", "it takes word too"
        refused = await app.start(workflow(app, "starts"), "hello", None, "taken")
        with pytest.raises(RunFailed, match="Conflict"):
            await refused.result()
        assert await refused.status() is FAILED
        await taken.signal("go", "")


@pytest.mark.contract("WF-4", "WF-1")
async def test_by_name_a_flow_and_a_plan(variant: EngineVariant) -> None:
    app = make_app()
    async with variant.node(app):
        await app.plans.register(
            "plan: etl\nversion: '1'\ninputs: {days: {type: integer}}\nsteps:\n- {id: rest, sleep: 0.001}\n"
        )
        named = await (await app.start(workflow(app, "by_name"), "echo")).result()
        assert await app.run(named).result() == "named on"
        sent = await (await app.start(workflow(app, "by_flow"))).result()
        assert (await app.run(sent).result())["is_sent"] is True
        planned = await (await app.start(workflow(app, "by_plan"))).result()
        await wait_for_status(app.run(planned), COMPLETED)


async def test_it_is_for_workflows_only() -> None:
    app = make_app()
    with pytest.raises(NotDurable, match=r"outside of one call app\.start"):
        await hf.start(workflow(app, "echo"), "hello")
