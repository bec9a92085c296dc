"""Children and parents whose ids are as long as ids can be, or hold any letters; and children whose parent is gone."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.core.events import ChildStarted, RunQueued
from holdfast.core.state import CANCELLED
from holdfast.engine.turns.draft import prepare_run
from holdfast.errors import InvalidInput, RunCancelled, RunFailed
from holdfast.limits import NAME_BYTES
from holdfast.program import coroutine
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_status

LONGEST = ["p" * NAME_BYTES, "p" * (NAME_BYTES - len("/child")), "ü" * (NAME_BYTES // 2), "日" * 80]
"""The second leaves just enough room for the id of its child."""


def family() -> tuple[hf.App, Any]:
    app = hf.App("family")

    @app.workflow
    async def child() -> str:
        return await hf.wait_signal("go", str)

    @app.workflow
    async def parent() -> str:
        return f"{await child()} of the child"

    return app, parent


async def child_of(app: hf.App, run: Any) -> Any:
    """Return the child, once it waits."""
    started = await wait_for_event(run, "ChildStarted")
    assert isinstance(started.data, ChildStarted)
    child = app.run(started.data.child_run_id)
    await wait_for_event(child, "SignalWaiting")
    return child


@pytest.mark.contract("WF-4")
async def test_a_child_in_a_scope_is_another_run_than_the_child_of_a_child(variant: EngineVariant) -> None:
    app = hf.App("family")

    @app.workflow
    async def label(of: str) -> str:
        return f"label of {of}"

    @app.workflow
    async def ship(parcel: str) -> str:
        return await label(parcel)

    @app.workflow
    async def order() -> list[str]:
        async with hf.scope("ship"):
            scoped = label.child("the order")
        named = label.options(name="ship/label")("a name")
        slashes = [label.options(name=name)(name) for name in ("ship//label", "/label", "label/")]
        return list(await asyncio.gather(scoped, named, ship("the parcel"), *slashes))

    async with variant.node(app):
        run = await app.start(order)
        expected = ["the order", "a name", "the parcel", "ship//label", "/label", "label/"]
        assert await run.result() == [f"label of {each}" for each in expected]
        ids = [event.data.child_run_id for event in await run.events() if isinstance(event.data, ChildStarted)]
        assert ids[0] == f"{run.run_id}/ship//label"
        assert len(set(ids)) == len(expected)


@pytest.mark.contract("WF-2", "FMT-1")
async def test_a_child_that_was_started_by_an_earlier_version_keeps_its_id(variant: EngineVariant) -> None:
    """There the slash after a scope stood single."""
    app = hf.App("family")

    @app.workflow
    async def child() -> str:
        return await hf.wait_signal("go", str)

    @app.workflow
    async def parent() -> list[str]:
        async with hf.scope("ship"):
            started = child.child()
        return [started.run_id, await started]

    async with variant.opened() as store:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(coroutine, "scoped_child_run_id", lambda run_id, prefix, name: f"{run_id}/{prefix}{name}")
            async with variant.node(app, store):
                run = await app.start(parent)
                waiting = await child_of(app, run)
        assert waiting.run_id == f"{run.run_id}/ship/child"
        async with variant.node(app, store):
            await app.run(waiting.run_id).signal("go", "on")
            assert await app.run(run.run_id).result() == [waiting.run_id, "on"]


@pytest.mark.contract("WF-4")
@pytest.mark.parametrize("run_id", LONGEST, ids=["longest", "child fits", "two bytes", "three bytes"])
async def test_a_result_goes_up_and_a_cancellation_goes_down_whatever_the_ids(
    variant: EngineVariant, run_id: str
) -> None:
    app, parent = family()
    async with variant.node(app):
        if variant.store.startswith("s3:") and run_id in LONGEST[2:]:  # this server takes 255 bytes, percent-encoded
            with pytest.raises(InvalidInput, match="the name is too long"):
                await app.start(parent, run_id=run_id)
            return
        run = await app.start(parent, run_id=run_id)
        if variant.store.startswith("s3:") and run_id == LONGEST[1]:  # its child's has /, encoded
            with pytest.raises(RunFailed, match="the name is too long"):
                await run.result()
            return
        child = await child_of(app, run)
        await child.signal("go", "word")
        assert await run.result() == "word of the child"

        given_up = await app.start(parent, run_id=run_id[:-1])
        child = await child_of(app, given_up)
        await given_up.cancel()
        with pytest.raises(RunCancelled):
            await given_up.result()
        await wait_for_status(child, CANCELLED)


@pytest.mark.contract("WF-4", "INV")
@pytest.mark.parametrize("parent_id", ["gone", LONGEST[0], LONGEST[2]], ids=["short", "longest", "not ASCII"])
async def test_a_child_whose_parent_is_gone_ends_and_harms_nobody(variant: EngineVariant, parent_id: str) -> None:
    app, parent = family()
    child = next(definition for (name, _), definition in app.registry.workflows.items() if name == "child")
    async with variant.node(app) as node:
        queued = RunQueued(
            child.name,
            child.version,
            input=codec.encode({}),
            parent_run_id=parent_id,
            parent_step_id="child",
            parent_token="child@3",
            depth=1,
        )
        await node.store.create([prepare_run("orphan-ö", queued, await node.store.now(), "somebody")])
        orphan: Any = app.run("orphan-ö")
        await wait_for_event(orphan, "SignalWaiting")
        await orphan.signal("go", "word")
        assert await orphan.result() == "word"
        run = await app.start(parent)
        await (await child_of(app, run)).signal("go", "more")
        assert await run.result() == "more of the child"
        assert node.failure is None
        assert (await node.store.stats()).messages == 0


@pytest.mark.contract("WF-4", "WF-7")
async def test_a_child_that_ends_after_its_parent_tells_nobody(variant: EngineVariant) -> None:
    app = hf.App("family")

    @app.workflow
    async def child() -> str:
        return await hf.wait_signal("go", str)

    @app.workflow
    async def parent() -> str:
        task = asyncio.create_task(child.options(close_policy="abandon")())
        await asyncio.sleep(0)
        assert not task.done()
        return "done"

    async with variant.node(app):
        run = await app.start(parent, run_id=LONGEST[0])
        assert await run.result() == "done"
        before = await event_types(run)
        orphan = await child_of(app, run)
        await orphan.signal("go", "word")
        assert await orphan.result() == "word"
        assert await event_types(run) == before
