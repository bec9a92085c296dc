"""Limits on activities beside all else that can happen to a run: no place is kept by it, and none is taken twice."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

import holdfast as hf
from holdfast.core.state import PAUSED
from holdfast.errors import CheckpointOwnershipCapabilityError, RunCancelled, RunFailed
from holdfast.store.copy import copy_store
from holdfast.store.port import PurgePolicy, Store
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.store.sqlite import SqliteStore
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_history, wait_for_status

pytestmark = pytest.mark.contract("ACT-7")

PATIENT: dict[str, Any] = {"safety_poll_s": 600.0, "lease_ms": 30_000}
"""Nodes that learn of nothing by looking again."""

ANN = hf.Actor("ann", roles=("operator",))
ONCE = hf.Retry(max_attempts=1)


@pytest.fixture(params=["memory", "sqlite"])
def stored_in(request: pytest.FixtureRequest) -> str:
    """Return a kind of store that has limits on activities: a bucket refuses them when a node starts."""
    return str(request.param)


class Desk:
    """An app with one place at a desk, who has come there, and doors behind which those who sit there wait."""

    def __init__(self, **options: Any) -> None:
        self.app = app = hf.App("desk", limits=hf.Limits(rotation_steps=4))
        self.seen: list[str] = []
        self.inside = self.most = 0
        self.doors: dict[str, asyncio.Event] = {}
        self.limit = hf.ActivityLimit("desk", at_once=1)

        @app.activity(limit=self.limit, **options)
        async def ask(who: str) -> str:
            self.seen.append(who)
            self.inside += 1
            self.most = max(self.most, self.inside)
            try:
                if who in self.doors:
                    await self.doors[who].wait()
            finally:
                self.inside -= 1
            return who

        @app.workflow(failures=Exception, signals={"go": str})
        async def visit(who: str) -> str:
            return await ask(who)

        self.ask, self.visit = ask, visit

    def shut(self, *names: str) -> None:
        """Let who comes under these names stay there until `open`."""
        self.doors |= {name: asyncio.Event() for name in names}

    def open(self, name: str) -> None:
        """Let somebody go."""
        self.doors[name].set()

    async def has_seen(self, *names: str) -> None:
        """Wait until these have come, in this order, and nobody else."""
        async with asyncio.timeout(60):
            while self.seen != list(names):
                assert self.seen == list(names)[: len(self.seen)]
                await asyncio.sleep(0.002)

    async def is_free(self, store: Store) -> None:
        """Check that nothing is left in the queue, and nobody has been there beside another."""
        assert (await store.stats()).jobs == 0
        assert self.most == 1

    async def waiting(self, who: str, **options: Any) -> hf.RunHandle[Any]:
        """Start a visit that waits for its place."""
        run = await self.app.start(self.visit, who, **options)
        await wait_for_event(run, "StepStarted")
        return run


@pytest.mark.contract("CAN-1")
async def test_a_rotation_takes_calls_that_wait_or_are_under_way_with_it(variant: EngineVariant) -> None:
    """A stretch that ends with a call open frees its place, or leaves the line; the next one stands in it anew."""
    desk = Desk()
    desk.shut("holder")

    @desk.app.workflow
    async def turning(rounds: int) -> str:
        if rounds:
            call = asyncio.ensure_future(desk.ask("holder" if rounds == 2 else f"round {rounds}"))
            assert not call.done()
            await hf.wait_signal("turn", str)
            hf.continue_as_new(rounds - 1)
        return await desk.ask("last")

    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        run = await desk.app.start(turning, 2)
        await desk.has_seen("holder")
        other = await desk.waiting("other")
        desk.shut("other")
        await run.signal("turn", "1")
        await desk.has_seen("holder", "other")
        await wait_for_event(run, "StepStarted", 2)
        await run.signal("turn", "2")
        await wait_for_event(run, "StepStarted", 3)
        desk.open("other")
        assert (await other.result(), await run.result()) == ("other", "last")
        assert desk.seen == ["holder", "other", "last"]
        await desk.is_free(store)


@pytest.mark.contract("CAN-1")
async def test_a_run_rotates_between_limited_calls(variant: EngineVariant) -> None:
    desk = Desk()

    @desk.app.workflow
    async def many(done: int = 0) -> int:
        for number in range(done, 12):
            await desk.ask(f"{number}")
            hf.continue_as_new_if_long(number + 1)
        return 12

    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        runs = [await desk.app.start(many) for _ in range(2)]
        assert [await run.result() for run in runs] == [12, 12]
        types = Counter(event.event_type for event in await runs[0].events())
        assert types["ContinuedAsNew"] > 1
        assert Counter(desk.seen) == {f"{number}": 2 for number in range(12)}
        await desk.is_free(store)


@pytest.mark.contract("WF-4")
async def test_a_call_that_waits_is_cancelled_at_once(variant: EngineVariant) -> None:
    desk = Desk()
    desk.shut("holder")
    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        holder = await desk.app.start(desk.visit, "holder")
        await desk.has_seen("holder")
        run = await desk.waiting("late")
        await run.cancel("it rains")
        with pytest.raises(RunCancelled):
            await run.result()
        third = await desk.waiting("third")
        desk.open("holder")
        assert (await holder.result(), await third.result()) == ("holder", "third")
        assert desk.seen == ["holder", "third"]
        await desk.is_free(store)


@pytest.mark.contract("WF-4")
async def test_a_call_whose_outcome_is_waited_for_is_cancelled_in_its_turn(variant: EngineVariant) -> None:
    """Whether it has its place or waits for it: it is carried out, and its place is free when it has ended."""
    desk = Desk(cancel="wait")
    desk.shut("holder")

    @desk.app.workflow
    async def long_visit(who: str) -> str:
        await desk.ask(who)
        await hf.wait_signal("never", str)
        return who

    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        runs = [await desk.app.start(long_visit, "holder")]
        await desk.has_seen("holder")
        runs.append(await desk.app.start(long_visit, "second"))
        await wait_for_event(runs[1], "StepStarted")
        third = await desk.waiting("third")
        for run in runs:
            await run.cancel("it rains")
            await wait_for_event(run, "SignalAccepted")
        assert desk.seen == ["holder"]
        desk.open("holder")
        for run in runs:
            with pytest.raises(RunCancelled):
                await run.result()
        assert await third.result() == "third"
        assert desk.seen == ["holder", "second", "third"]
        await desk.is_free(store)


@pytest.mark.parametrize("how", ["skip", "terminate"])
async def test_an_operator_frees_the_place_of_a_call_that_is_under_way(variant: EngineVariant, how: str) -> None:
    desk = Desk()
    desk.shut("holder")
    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        holder = await desk.app.start(desk.visit, "holder")
        await desk.has_seen("holder")
        second = await desk.waiting("second")
        if how == "skip":
            await holder.skip_step("ask", result="skipped")
            assert await holder.result() == "skipped"
        else:
            await holder.terminate("enough")
        assert await second.result() == "second"
        await wait_until_nothing_is_queued(store)


async def wait_until_nothing_is_queued(store: Store) -> None:
    """Wait until no job is left."""
    async with asyncio.timeout(60):
        while (await store.stats()).jobs:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_step_that_is_tried_again_stands_in_line_anew(variant: EngineVariant) -> None:
    """By an operator: while another has the place."""
    desk = Desk(retry=ONCE)
    is_broken = True

    @desk.app.activity(limit=desk.limit, retry=ONCE)
    async def break_down() -> str:
        desk.seen.append("broken")
        if is_broken:
            raise ValueError("no")
        return "mended"

    @desk.app.workflow
    async def mend() -> str:
        return await break_down()

    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        run = await desk.app.start(mend)
        with pytest.raises(RunFailed):
            await run.result()
        desk.shut("holder")
        holder = await desk.app.start(desk.visit, "holder")
        await desk.has_seen("broken", "holder")
        is_broken = False
        fork = await run.fork()
        await wait_for_history(fork, lambda events: any(each.event_type == "StepRetried" for each in events))
        await asyncio.sleep(0.05)
        assert desk.seen == ["broken", "holder"]
        desk.open("holder")
        assert (await holder.result(), await fork.result()) == ("holder", "mended")
        await desk.is_free(store)


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("how", ["has failed", "is to be tried again later"])
async def test_a_step_that_an_operator_has_tried_again_waits_for_a_place(variant: EngineVariant, how: str) -> None:
    desk = Desk()
    is_broken = True
    later = hf.Retry(initial_ms=3_600_000)

    @desk.app.activity(limit=desk.limit, retry=ONCE if how == "has failed" else later, on_failure="pause")
    async def break_down() -> str:
        desk.seen.append("broken")
        if is_broken:
            raise ValueError("no")
        return f"mended at attempt {hf.activity_context().attempt}"

    @desk.app.workflow
    async def mend() -> str:
        return await break_down()

    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        run = await desk.app.start(mend)
        await wait_for_event(run, "StepFailed" if how == "has failed" else "StepRetried")
        desk.shut("holder")
        holder = await desk.app.start(desk.visit, "holder")
        await desk.has_seen("broken", "holder")
        second = await desk.waiting("second")
        is_broken = False
        await run.retry_step("break_down", actor="ann", wait=True)
        await asyncio.sleep(0.05)
        assert desk.seen == ["broken", "holder"]
        desk.open("holder")
        assert (await holder.result(), await second.result()) == ("holder", "second")
        assert await run.result() == f"mended at attempt {1 if how == 'has failed' else 2}"
        assert desk.seen == ["broken", "holder", "second", "broken"]
        await desk.is_free(store)


async def test_a_fork_stands_in_line_for_what_was_under_way(variant: EngineVariant) -> None:
    """It takes no place that its origin has, and the origin keeps it."""
    desk = Desk()
    desk.shut("holder")
    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        run = await desk.app.start(desk.visit, "holder")
        await desk.has_seen("holder")
        fork = await run.fork()
        await wait_for_event(fork, "StepRetried")
        await asyncio.sleep(0.05)
        assert desk.seen == ["holder"]
        desk.open("holder")
        assert (await run.result(), await fork.result()) == ("holder", "holder")
        assert len(desk.seen) == 2
        await desk.is_free(store)


@pytest.mark.contract("WF-4")
async def test_children_have_places_of_their_own_and_free_them_with_their_parent(variant: EngineVariant) -> None:
    desk = Desk()
    desk.shut("child")

    @desk.app.workflow
    async def parent() -> str:
        return await desk.visit("child")

    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        run = await desk.app.start(parent)
        await desk.has_seen("child")
        second = await desk.waiting("second")
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        assert await second.result() == "second"
        await wait_until_nothing_is_queued(store)


@pytest.mark.contract("API-4")
async def test_tenants_take_turns_at_a_limit(variant: EngineVariant) -> None:
    """However many one of them has asked for before."""
    desk = Desk()
    desk.shut("holder")
    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        holder = await desk.app.start(desk.visit, "holder", tenant="acme")
        await desk.has_seen("holder")
        runs = [await desk.waiting(f"acme {number}", tenant="acme") for number in range(5)]
        runs.append(await desk.waiting("zeta", tenant="zeta"))
        desk.open("holder")
        for run in (holder, *runs):
            await run.result()
        assert desk.seen[:3] == ["holder", "zeta", "acme 0"]
        await desk.is_free(store)


@pytest.mark.contract("ACT-4")
async def test_a_step_that_waits_for_an_operator_holds_no_place(variant: EngineVariant) -> None:
    """Its verification takes one as an attempt does, and leaves it whatever it finds out."""
    desk = Desk()
    looks: list[str] = []
    is_known = False

    async def find(who: str) -> Any:
        looks.append(who)
        assert desk.inside == 0
        return hf.Completed("found") if is_known else hf.Indeterminate("nobody knows")

    @desk.app.activity(limit=desk.limit, idempotency_key=lambda who: who, verify=find, retry=hf.Retry(initial_ms=1))
    async def pay(who: str) -> str:
        desk.seen.append(who)
        raise ConnectionError("the line is dead")

    @desk.app.workflow
    async def order(who: str) -> str:
        return await pay(who)

    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        run = await desk.app.start(order, "doubt")
        await wait_for_event(run, "TaskCreated")
        assert looks == ["doubt"]
        desk.shut("holder")
        holder = await desk.app.start(desk.visit, "holder")
        await desk.has_seen("doubt", "holder")
        is_known = True
        [task] = await desk.app.tasks.list(actor=ANN, status="OPEN")
        await desk.app.tasks.complete(task.task_id, {"answer": "happened", "result": "paid"}, actor=ANN)
        assert await run.result() == "paid"
        desk.open("holder")
        assert await holder.result() == "holder"
        await desk.is_free(store)


@pytest.mark.contract("ACT-4")
async def test_a_verification_waits_in_line_and_is_reached(variant: EngineVariant) -> None:
    """Of a step whose node was lost with the place: others come before it, and none for ever."""
    desk = Desk()
    looks: list[str] = []

    async def find(who: str) -> Any:
        looks.append(who)
        return hf.Completed("found")

    @desk.app.activity(limit=desk.limit, idempotency_key=lambda who: who, verify=find)
    async def pay(who: str) -> str:
        desk.seen.append(who)
        await asyncio.Event().wait()
        return "never"

    @desk.app.workflow
    async def order(who: str) -> str:
        return await pay(who)

    async with variant.opened() as store:
        async with variant.node(desk.app, store, drain_s=0.0, visible_ms=200, lease_ms=200):
            run = await desk.app.start(order, "lost")
            await desk.has_seen("lost")
            others = [await desk.waiting(f"{number}") for number in range(5)]
        async with variant.node(desk.app, store, visible_ms=200):
            assert await desk.app.run(run.run_id).result() == "found"
            for other in others:
                await desk.app.run(other.run_id).result()
        assert looks == ["lost"]
        await desk.is_free(store)


@pytest.mark.contract("FMT-2")
async def test_retention_leaves_places_and_lines_alone(variant: EngineVariant) -> None:
    desk = Desk()
    desk.shut("holder")
    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        done = await desk.app.start(desk.visit, "done")
        await done.result()
        holder = await desk.app.start(desk.visit, "holder")
        await desk.has_seen("done", "holder")
        second = await desk.waiting("second")
        policy = PurgePolicy(
            finished_run_ms=0, task_ms=0, runtime_state_ms=0, dead_letter_ms=0, outbox_ms=0, sink_hold_ms=0
        )
        assert (await store.purge(policy)).runs == 1
        await asyncio.sleep(0.05)
        assert desk.seen == ["done", "holder"]
        desk.open("holder")
        assert (await holder.result(), await second.result()) == ("holder", "second")
        await desk.is_free(store)


@asynccontextmanager
async def sqlite(path: Path) -> AsyncIterator[Store]:
    """Give a file."""
    store = await SqliteStore.open(path)
    await store.migrate()
    try:
        yield store
    finally:
        await store.close()


@pytest.mark.contract("STO-1")
async def test_a_copy_has_the_line_and_what_was_under_way(tmp_path: Path) -> None:
    """What was under way there is lost with its node, and its place is free when its time-out is over."""
    desk = Desk()
    desk.shut("holder")
    options = hf.NodeOptions(visible_ms=300, lease_ms=300, drain_s=0.0)
    async with sqlite(tmp_path / "here.db") as here, sqlite(tmp_path / "there.db") as there:
        async with asyncio.timeout(60), desk.app.node(here, options=options):
            runs = [await desk.app.start(desk.visit, "holder")]
            await desk.has_seen("holder")
            runs += [await desk.waiting(f"{number}") for number in range(3)]
        await copy_store(here, there)
        desk.open("holder")
        async with asyncio.timeout(60), desk.app.node(there, options=options):
            found = [await desk.app.run(run.run_id).result() for run in runs]
        assert found == ["holder", "0", "1", "2"]
        await desk.is_free(there)


@pytest.mark.contract("STO-1", "OWN-2")
async def test_a_copy_to_a_bucket_that_could_not_go_on_with_a_call_is_refused(tmp_path: Path) -> None:
    """Nothing is written: there no node takes calls with a limit."""
    desk = Desk()
    desk.shut("holder")
    there = S3Store(Bucket(ObjectsInMemory()))
    await there.migrate()
    async with sqlite(tmp_path / "here.db") as here:
        async with asyncio.timeout(60), desk.app.node(here, options=hf.NodeOptions(drain_s=0.0)):
            await desk.app.start(desk.visit, "holder")
            await desk.has_seen("holder")
        with pytest.raises(CheckpointOwnershipCapabilityError, match="call"):
            await copy_store(here, there)
    assert (await there.stats()).jobs == 0
    await there.close()


async def test_paused_run_whose_call_has_a_place_keeps_it_until_it_ends(variant: EngineVariant) -> None:
    desk = Desk()
    desk.shut("holder")
    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        holder = await desk.app.start(desk.visit, "holder")
        await desk.has_seen("holder")
        second = await desk.waiting("second")
        await holder.pause()
        await wait_for_status(holder, PAUSED)
        desk.open("holder")
        assert await second.result() == "second"
        await holder.resume()
        assert await holder.result() == "holder"
        await desk.is_free(store)


# --- operators' retries under a limit, in code, flows and plans


@pytest.mark.contract("SIG-13")
@pytest.mark.parametrize("command", ["retry_step", "retry_run"])
@pytest.mark.parametrize("kind", ["flow", "plan"])
async def test_what_an_operator_retries_in_a_flow_or_a_plan_waits_for_a_place(
    variant: EngineVariant, kind: str, command: str
) -> None:
    """The step has the place again only after those who have asked before, and frees it."""
    desk, is_broken = Desk(), True

    @desk.app.activity(limit=desk.limit, retry=ONCE, on_failure="pause" if command == "retry_step" else "raise")
    async def mend(state: dict[str, str] | None = None) -> dict[str, str]:
        desk.seen.append("broken")
        if is_broken:
            raise ValueError("no")
        return {"is": "mended"}

    steps = [
        {"id": "mend", "activity": "mend", **({"on_failure": "pause"} if command == "retry_step" else {})},
    ]
    flow = desk.app.flow("mending", dict[str, str], hf.Act(mend))
    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        run: hf.RunHandle[Any]
        if kind == "flow":
            run = await desk.app.start(flow, {"is": "broken"})
        else:
            run = await desk.app.plans.start({"plan": "mending", "version": "1", "steps": steps})
        if command == "retry_step":
            await wait_for_status(run, PAUSED)
        else:
            with pytest.raises(RunFailed):
                await run.result()
        desk.shut("holder")
        holder = await desk.app.start(desk.visit, "holder")
        await desk.has_seen("broken", "holder")
        second = await desk.waiting("second")
        is_broken = False
        if command == "retry_step":
            await run.retry_step("mend", actor="ann", wait=True)
        else:
            run = await run.retry_run(actor="ann")
            await wait_for_event(run, "StepStarted")
        await asyncio.sleep(0.05)
        assert desk.seen == ["broken", "holder"]
        desk.open("holder")
        assert (await holder.result(), await second.result()) == ("holder", "second")
        assert await run.result() == ({"is": "mended"} if kind == "flow" else {"mend": {"is": "mended"}})
        assert desk.seen == ["broken", "holder", "second", "broken"]
        await desk.is_free(store)


@pytest.mark.contract("SIG-13", "WF-4")
@pytest.mark.parametrize("kind", ["code", "flow", "plan"])
async def test_a_retried_step_that_waits_for_a_place_is_cancelled_at_once(variant: EngineVariant, kind: str) -> None:
    desk = Desk()

    @desk.app.activity(limit=desk.limit, retry=ONCE, on_failure="pause")
    async def mend(state: dict[str, str] | None = None) -> dict[str, str]:
        desk.seen.append("broken")
        raise ValueError("no")

    @desk.app.workflow
    async def mending() -> Any:
        return await mend()

    flow = desk.app.flow("flow", dict[str, str], hf.Act(mend))
    plan = {"plan": "p", "version": "1", "steps": [{"id": "mend", "activity": "mend", "on_failure": "pause"}]}
    async with variant.opened() as store, variant.node(desk.app, store, **PATIENT):
        run: hf.RunHandle[Any]
        if kind == "plan":
            run = await desk.app.plans.start(plan)
        else:
            run = await (desk.app.start(mending) if kind == "code" else desk.app.start(flow, {}))
        await wait_for_status(run, PAUSED)
        desk.shut("holder")
        holder = await desk.app.start(desk.visit, "holder")
        await desk.has_seen("broken", "holder")
        await run.retry_step("mend", actor="ann", wait=True)
        await run.cancel("not needed")
        with pytest.raises(RunCancelled):
            await run.result()
        desk.open("holder")
        assert await holder.result() == "holder"
        assert desk.seen == ["broken", "holder"]
        await desk.is_free(store)
