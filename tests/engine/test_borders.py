"""Borders between rules: what one promise does while another is kept."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.inbox.dead_letters import find_dead_letters
from holdfast.errors import StoreError
from holdfast.run import RunHandle
from holdfast.store.port import Job, Store
from holdfast.store.proxy import StoreProxy
from holdfast.store.queries import DeadLetterQuery
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_history


async def has_arrived(store: Store, run: RunHandle[Any]) -> bool:
    """Return whether an update waits for its run, or was taken by it."""
    [loaded] = await store.load([run.run_id])
    return bool(loaded is not None and loaded.signals) or "UpdateAccepted" in await event_types(run)


@pytest.mark.contract("WF-6", "CAN-1")
async def test_an_update_that_comes_while_a_cut_cleans_up_is_answered_by_the_next_stretch(
    variant: EngineVariant,
) -> None:
    opened, began = asyncio.Event(), asyncio.Event()
    app = hf.App("counting", limits=hf.Limits(rotation_steps=1))

    @app.activity
    async def clean() -> None:
        began.set()
        await opened.wait()

    @app.workflow
    async def count(total: int = 0, stretch: int = 0) -> list[int]:
        def add(by: int) -> int:
            nonlocal total
            total += by
            return total

        hf.on_update("add", add)
        await hf.wait_signal("go")
        if stretch == 0:
            try:
                hf.continue_as_new_if_long(total, stretch + 1)
            finally:
                await clean()
        return [total, stretch]

    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(count)
        await run.signal("go")
        await began.wait()
        asking = asyncio.create_task(run.update("add", by=5))
        while not await has_arrived(store, run):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        opened.set()
        assert await asking == 5
        await wait_for_event(run, "ContinuedAsNew")
        await run.signal("go")
        assert await run.result() == [5, 1], await event_types(run)


@pytest.mark.contract("WF-6", "MSG-3")
async def test_a_requeued_signal_is_not_applied_by_a_function_that_has_ended(variant: EngineVariant) -> None:
    app = hf.App("requeue")

    @app.workflow
    async def child() -> str:
        return await hf.wait_signal("end", str)

    @app.workflow
    async def parent(stretch: int = 0) -> str:
        async def listen() -> None:
            await hf.wait_signal("vote", int)
            await hf.wait_signal("vote", str)

        if stretch == 0:
            beside = [asyncio.create_task(listen()), asyncio.create_task(child())]
            await hf.wait_signal("rotate")
            assert not any(task.done() for task in beside)
            hf.continue_as_new(1)
        return await hf.wait_signal("vote", str)

    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(parent)
        await run.signal("vote", "x")
        await wait_for_event(run, "SignalDeadLettered")
        await run.signal("vote", 1)
        await wait_for_event(run, "SignalReceived")
        await run.signal("rotate")
        await wait_for_event(run, "SignalReceived", 2)
        [letter] = await find_dead_letters(store, DeadLetterQuery(run_id=run.run_id))
        await letter.requeue()
        await app.run(f"{run.run_id}/child").signal("end", "now")
        await wait_for_event(run, "ContinuedAsNew")
        assert await run.result() == "x"


def signing(app: hf.App, tokens: "asyncio.Queue[str]", *, extra: bool) -> Any:
    """Add a workflow whose step is completed by token; with one more step if it is to diverge."""

    @app.activity
    async def other() -> None: ...

    @app.activity
    async def sign() -> str:
        context = hf.activity_context()
        tokens.put_nowait(context.token)
        context.complete_later()

    @app.workflow
    async def contract() -> str:
        if extra:
            await other()
        return await sign()

    return contract


@pytest.mark.contract("ACT-1", "SIG-13")
@pytest.mark.parametrize("command", ["terminate", "skip"])
async def test_an_outcome_that_was_acknowledged_is_recorded_by_a_node_whose_code_diverges(
    variant: EngineVariant, command: str
) -> None:
    tokens: asyncio.Queue[str] = asyncio.Queue()
    old, new = hf.App("old"), hf.App("new")
    contract = signing(old, tokens, extra=False)
    signing(new, tokens, extra=True)
    async with variant.opened() as store:
        async with variant.node(old, store):
            run = await old.start(contract)
            token = await tokens.get()
            await wait_for_event(run, "StepDetached")
        async with old.connect(store):
            await old.complete_activity(token, "ann")
            handle = old.run(run.run_id)
            if command == "terminate":
                await handle.terminate(wait=False)
            else:
                await handle.skip_step("sign", result="nobody", wait=False)
            async with variant.node(new, store):
                await wait_for_event(
                    new.run(run.run_id), "SignalAccepted" if command == "terminate" else "SignalRejected"
                )
                assert "StepCompleted" in await event_types(new.run(run.run_id))


class Slow(StoreProxy):
    """A store whose histories are read while something else happens."""

    meanwhile: Any = None

    async def read_events(self, *args: Any, **bounds: Any) -> Any:
        """Read, and let something happen before the answer."""
        answer = await self.inner.read_events(*args, **bounds)
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return answer


@pytest.mark.contract("WF-6", "CAN-1")
@pytest.mark.parametrize("end", ["return", "rotate"])
async def test_an_outcome_that_comes_while_an_end_is_being_deferred_is_not_deferred_with_it(
    variant: EngineVariant, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = {"a": asyncio.Event(), "b": asyncio.Event()}
    began = {"a": asyncio.Event(), "b": asyncio.Event()}
    app = hf.App("counting")
    made: list[str] = []

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def work(name: str) -> None:
        made.append(name)
        began[name].set()
        await gates[name].wait()

    @app.workflow
    async def count(total: int = 0, stretch: int = 0) -> list[int]:
        async def add(by: int) -> int:
            nonlocal total
            await work("a")
            total += by
            return total

        hf.on_update("add", add)
        if stretch == 0:
            asyncio.create_task(work("b"))  # noqa: RUF006
        if await hf.wait_signal("end", str) == "rotate":
            hf.continue_as_new(total, stretch + 1)
        return [total, stretch]

    async with variant.opened() as inner:
        store: Any = Slow(inner)
        async with variant.node(app, store) as node:
            run = await app.start(count)
            asking = asyncio.create_task(run.update("add", by=5))
            await began["a"].wait()
            await began["b"].wait()
            await wait_for_event(run, "StepStarted", 2)
            defer = node.run_cache.make_again

            async def meanwhile() -> None:
                gates["a"].set()
                while not node.owned_runs.by_id[run.run_id].inputs:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

            def make_again(*deferred: Any) -> None:
                if not gates["a"].is_set():
                    store.meanwhile = meanwhile
                defer(*deferred)

            monkeypatch.setattr(node.run_cache, "make_again", make_again)
            await run.signal("end", end)
            assert await asking == 5
            gates["b"].set()
            if end == "rotate":
                await wait_for_event(run, "ContinuedAsNew")
                await run.signal("end", "return")
                assert await run.result() == [5, 1]
            else:
                assert await run.result() == [5, 0]
            assert made.count("a") == 1


@pytest.mark.contract("WF-6", "SIG-4", "CAN-1")
async def test_a_signal_that_comes_while_a_rotation_cleans_up_is_for_the_next_stretch(variant: EngineVariant) -> None:
    app = hf.App("reading")

    @app.workflow
    async def read(seen: list[int], stretch: int = 0) -> list[int]:
        async def listen() -> None:
            async for note in hf.signals("note", int):
                seen.append(note)  # noqa: PERF401 - one by one, as they come

        if stretch == 0:
            asyncio.create_task(listen())  # noqa: RUF006
            await hf.wait_signal("go")
            try:
                hf.continue_as_new(seen, 1)
            finally:
                await hf.wait_signal("cleaned")  # what it waits for itself while it cleans up is taken
        return [await hf.wait_signal("note", int), *seen]

    async with variant.node(app):
        run = await app.start(read, [])
        await run.signal("go")
        await wait_for_history(
            run, lambda events: any(getattr(event.data, "name", "") == "cleaned" for event in events)
        )
        await run.signal("note", 7)
        await run.signal("cleaned")
        assert await run.result() == [7]


class Broken(StoreProxy):
    """A store of which nobody gets jobs."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked = asyncio.Event()
        self.returned: list[str] = []

    async def acquire_jobs(self, *asked: Any) -> Any:
        """Fail."""
        self.asked.set()
        raise StoreError("the connection is gone")

    async def release_jobs(self, node: str, jobs: Sequence[Job]) -> int:
        """Take note of what comes back."""
        self.returned += [job.step_id for job in jobs]
        return len(jobs)


@pytest.mark.contract("ACT-1", "MSG-4")
async def test_a_worker_whose_last_take_failed_gives_back_what_it_has_not_begun(variant: EngineVariant) -> None:
    app = hf.App("queues")

    @app.activity(queue="q")
    async def work() -> None: ...

    job = Job(run_id="run-1", step_id="work", queue="q", activity="work")
    async with variant.opened() as inner:
        store: Any = Broken(inner)
        async with variant.node(app, store, queues=("q",)) as node:
            await store.asked.wait()
            node._queue_worker._unbegun = [job]
    assert store.returned == ["work"]
