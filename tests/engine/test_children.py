"""Children: results, failures, cancellation down the tree, close policies, and how deep they may go."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import CANCELLED, COMPLETED, RUNNING
from holdfast.errors import ChildFailed, RunCancelled, RunFailed
from holdfast.limits import NESTED_RUNS
from holdfast.program.definitions import ClosePolicy
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_status


@pytest.mark.contract("WF-4")
async def test_a_child_returns_its_result_to_its_parent(variant: EngineVariant) -> None:
    app = hf.App("family")

    @app.workflow
    async def child(number: int) -> int:
        return number * 2

    @app.workflow
    async def parent() -> list[int]:
        return list(await asyncio.gather(*(child(n) for n in range(5))))

    async with variant.node(app):
        run = await app.start(parent, run_id="p")
        assert await run.result() == [0, 2, 4, 6, 8]
        assert await app.run("p/child#3").result() == 4


@pytest.mark.contract("WF-4")
async def test_a_childs_failure_is_raised_in_its_parent_with_its_cause(variant: EngineVariant) -> None:
    app = hf.App("family")

    @app.workflow
    async def child() -> None:
        raise hf.WorkflowFailed("the child broke")

    @app.workflow
    async def parent() -> str:
        try:
            await child()
        except ChildFailed as problem:
            return f"{problem.info.code}: {problem.info.message}"
        return "fine"

    async with variant.node(app):
        assert await (await app.start(parent)).result() == "WorkflowFailed: the child broke"


def family(policy: ClosePolicy) -> tuple[hf.App, Any]:
    app = hf.App("family")

    @app.workflow
    async def grandchild() -> None:
        await hf.wait_signal("go", str)

    @app.workflow
    async def child() -> str:
        await grandchild.options(close_policy=policy)()
        return "child done"

    @app.workflow
    async def parent(ends: bool) -> str:
        task = asyncio.create_task(child.options(close_policy=policy)())
        if not ends:
            await task
        await hf.sleep(0.05)
        return "parent done"

    return app, parent


@pytest.mark.contract("WF-4")
@pytest.mark.parametrize("policy", ["await", "cancel", "abandon"])
async def test_a_cancellation_goes_down_the_tree_but_not_to_the_abandoned(
    variant: EngineVariant, policy: ClosePolicy
) -> None:
    app, parent = family(policy)
    async with variant.node(app):
        run = await app.start(parent, False, run_id="p")
        child, grandchild = app.run("p/child"), app.run("p/child/grandchild")
        await wait_for_event(run, "ChildStarted")
        await wait_for_event(child, "ChildStarted")
        await wait_for_event(grandchild, "SignalWaiting")
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        if policy == "abandon":
            await grandchild.signal("go", "")
            assert await child.result() == "child done"
        else:
            await wait_for_status(child, CANCELLED)
            await wait_for_status(grandchild, CANCELLED)


@pytest.mark.contract("WF-4", "INV")
@pytest.mark.parametrize("policy", ["await", "cancel", "abandon"])
async def test_what_becomes_of_a_child_when_its_parent_ends(variant: EngineVariant, policy: ClosePolicy) -> None:
    app, parent = family(policy)
    async with variant.node(app):
        run = await app.start(parent, True, run_id="p")
        child, grandchild = app.run("p/child"), app.run("p/child/grandchild")
        await wait_for_event(run, "TimerFired")
        await wait_for_event(grandchild, "SignalWaiting")
        if policy == "await":
            assert (await run.snapshot()).status == RUNNING
            await grandchild.signal("go", "")
            assert await run.result() == "parent done"
            assert (await child.snapshot()).status == COMPLETED
        elif policy == "cancel":
            assert await run.result() == "parent done"
            await wait_for_status(child, CANCELLED)
            await wait_for_status(grandchild, CANCELLED)
        else:
            assert await run.result() == "parent done"
            await grandchild.signal("go", "")
            assert await child.result() == "child done"


@pytest.mark.contract("WF-4")
async def test_a_parent_that_only_waits_for_its_children_can_be_cancelled(variant: EngineVariant) -> None:
    app, parent = family("await")
    async with variant.node(app):
        run = await app.start(parent, True, run_id="p")
        child = app.run("p/child")
        await wait_for_event(run, "TimerFired")
        await wait_for_event(child, "ChildStarted")
        await run.cancel()
        await wait_for_status(child, CANCELLED)
        assert await run.result() == "parent done"


@pytest.mark.contract("WF-4")
async def test_a_child_that_is_cancelled_by_hand_fails_in_its_parent(variant: EngineVariant) -> None:
    app, parent = family("await")
    async with variant.node(app):
        run = await app.start(parent, False, run_id="p")
        child = app.run("p/child")
        await wait_for_event(run, "ChildStarted")
        await wait_for_event(child, "ChildStarted")
        await child.cancel()
        with pytest.raises(RunFailed, match="RunCancelled"):
            await run.result()


@pytest.mark.contract("WF-4")
async def test_runs_are_nested_as_deep_as_the_limit_and_no_deeper(variant: EngineVariant) -> None:
    app = hf.App("family")

    @app.workflow(on_error="fail")
    async def a_workflow_with_quite_a_long_name(depth: int) -> int:
        if depth == 0:
            return 0
        return 1 + await a_workflow_with_quite_a_long_name(depth - 1)

    async with variant.node(app):
        run = await app.start(a_workflow_with_quite_a_long_name, NESTED_RUNS)
        assert await run.result() == NESTED_RUNS
        too_deep = await app.start(a_workflow_with_quite_a_long_name, NESTED_RUNS + 1)
        with pytest.raises(RunFailed, match=f"nested at most {NESTED_RUNS} deep"):
            await too_deep.result()


@pytest.mark.contract("WF-4", "CAN-1")
async def test_a_rotation_waits_for_the_children_that_are_to_be_awaited(variant: EngineVariant) -> None:
    app = hf.App("family")

    @app.workflow
    async def child() -> None:
        await hf.sleep(0.03)

    @app.workflow
    async def rounds(number: int) -> int:
        if number < 2:
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
            assert not task.done()
            hf.continue_as_new(number + 1)
        return number

    async with variant.node(app):
        run = await app.start(rounds, 0)
        assert await run.result() == 2
        names = await event_types(run)
        assert (names.count("ChildCompleted"), names.count("ContinuedAsNew")) == (2, 2)


@pytest.mark.contract("WF-4", "INV")
async def test_a_child_that_is_to_be_cancelled_does_not_outlive_the_stretch_that_began_it(
    variant: EngineVariant,
) -> None:
    app = hf.App("family")

    @app.workflow
    async def child() -> None:
        await hf.wait_signal("never", bool)

    @app.workflow
    async def parent(is_first: bool) -> str:
        if is_first:
            task = asyncio.create_task(child.options(close_policy="cancel")())
            await asyncio.sleep(0.01)
            assert not task.done()
            hf.continue_as_new(False)
        return "done"

    async with variant.node(app):
        run = await app.start(parent, True, run_id="p")
        assert await run.result() == "done"
        with pytest.raises(RunCancelled):
            await app.run("p/child").result()
