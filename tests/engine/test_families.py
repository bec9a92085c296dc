"""Families are of one tenant, parents learn of children that cannot be, and what is refused elsewhere is not lost."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.invariants import check
from holdfast.core.messages import Actor
from holdfast.core.state import RunStatus
from holdfast.errors import ChildFailed, InvalidInput
from holdfast.program.definitions import ClosePolicy
from holdfast.service.auth.tenancy import seen_by
from holdfast.store.inspect import system_view
from holdfast.store.port import RunQuery, Store, TaskQuery
from holdfast.store.queries import DeadLetterQuery
from holdfast.testing.samples import new_run
from tests.engine.harness import EngineVariant, wait_for_event

HOME: dict[str, Any] = {"tenant": "acme", "project": "shop", "environment": "prod"}


def family(policy: ClosePolicy = "await", **options: Any) -> tuple[hf.App, Any]:
    """Return an app whose workflow has a child and a grandchild, which asks somebody."""
    app = hf.App("family", **options)

    @app.workflow
    async def grandchild() -> str:
        return await hf.task("name", str, roles=["clerk"])

    @app.workflow
    async def child() -> str:
        return await grandchild.options(close_policy=policy)()

    @app.workflow
    async def parent(rotates: bool = False) -> str:
        if rotates:
            await asyncio.sleep(0.001)
            hf.continue_as_new(False)
        return await child.options(close_policy=policy)()

    return app, parent


async def places(store: Store) -> dict[str, tuple[str, str, str]]:
    """Return whose all runs are."""
    return {head.run_id: (head.tenant, head.project, head.environment) for head in await store.find(RunQuery())}


@pytest.mark.contract("API-4", "WF-4", "TSK-1")
@pytest.mark.parametrize("policy", ["await", "abandon", "cancel"])
@pytest.mark.parametrize("rotates", [False, True])
async def test_a_family_is_of_one_tenant_and_so_are_its_tasks(
    variant: EngineVariant, policy: ClosePolicy, rotates: bool
) -> None:
    app, parent = family(policy)
    async with variant.node(app) as node:
        run = await app.start(parent, rotates, run_id="p", **HOME)
        while not (tasks := await seen_by("acme", node.store).find(TaskQuery(status="OPEN"))):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert set((await places(node.store)).values()) == {("acme", "shop", "prod")}
        assert await seen_by("default", node.store).find(TaskQuery()) == []
        await app.tasks.complete(tasks[0].task_id, "x", actor=Actor("ann", ("clerk",)))
        assert await run.result() == "x"
        assert check(await system_view(node.store)) == []


@pytest.mark.contract("WF-4", "QUE-1")
async def test_a_request_id_like_the_id_of_a_child_is_in_nobodys_way(variant: EngineVariant) -> None:
    app = hf.App("family")

    @app.workflow
    async def child(number: int) -> int:
        return number

    @app.workflow
    async def parent() -> int:
        return await child(7)

    async with variant.node(app):
        for number in (7, 8):
            other = await app.start(child, number, request_id=f"p{number}/child", workflow_version="1")
            assert await other.result() == number
            assert await (await app.start(parent, run_id=f"p{number}")).result() == 7
        with pytest.raises(InvalidInput, match="slash"):
            await app.start(child, 7, run_id="p/child")


@pytest.mark.contract("WF-4", "INV")
async def test_a_parent_is_told_that_its_child_could_not_be_started(variant: EngineVariant) -> None:
    """On its first turn, which may be taken before it is there, and on later ones."""
    app = hf.App("family")

    @app.workflow
    async def child() -> None:
        return None

    @app.workflow
    async def parent(is_late: bool) -> str:
        if is_late:
            await asyncio.sleep(0.001)
        try:
            await child()
        except ChildFailed as problem:
            return str(problem)
        return "nothing happened"

    async with variant.node(app) as node:
        for run_id, is_late in (("p", False), ("q", True)):
            child_id = f"{run_id}/child"
            await node.store.create([new_run(child_id, plan_id="elsewhere")])
            run = await app.start(parent, is_late, run_id=run_id)
            result = await run.result()
            assert "Conflict" in result
            assert child_id in result
        assert check(await system_view(node.store)) == []


def senders(**options: Any) -> tuple[hf.App, Any, Any]:
    """Return an app with a workflow that sends to another run, and one that waits."""
    app = hf.App("talk", **options)

    @app.workflow
    async def sender(to: str) -> None:
        await app.run(to).signal("go", "hello")

    @app.workflow
    async def waiter() -> str:
        return await hf.wait_signal("go", str)

    return app, sender, waiter


@pytest.mark.contract("API-4", "SIG-3", "MSG-3")
async def test_a_workflow_reaches_runs_of_its_own_tenant_only(variant: EngineVariant) -> None:
    app, sender, waiter = senders()
    async with variant.node(app) as node:
        ours = await app.start(waiter, run_id="ours", **HOME)
        theirs = await app.start(waiter, run_id="theirs")
        for run in (ours, theirs):
            await wait_for_event(run, "SignalWaiting")
        for to in ("ours", "theirs", "nobody"):
            await (await app.start(sender, to, run_id=f"to-{to}", **HOME)).result()
        assert await ours.result() == "hello"
        assert (await theirs.snapshot()).status is RunStatus.RUNNING
        letters = await app.dead_letters(reason="refused")
        assert sorted(letter.record.run_id for letter in letters) == ["to-nobody", "to-theirs"]
        assert {letter.record.detail.split(": ")[1] for letter in letters} == {"NotFound"}
        of_acme = await seen_by("acme", node.store).find(DeadLetterQuery())
        assert len(of_acme) == 2
        assert await seen_by("default", node.store).find(DeadLetterQuery()) == []


@pytest.mark.contract("API-4")
async def test_an_app_may_allow_signals_across_tenants(variant: EngineVariant) -> None:
    app, sender, waiter = senders(allow_cross_tenant_signals=True)
    async with variant.node(app):
        theirs = await app.start(waiter, run_id="theirs")
        await wait_for_event(theirs, "SignalWaiting")
        await (await app.start(sender, "theirs", **HOME)).result()
        assert await theirs.result() == "hello"
        assert await app.dead_letters() == []


@pytest.mark.contract("API-4", "QUE-2")
async def test_children_wait_in_the_line_of_their_tenant(variant: EngineVariant) -> None:
    """The tenant with many children does not hold up the other one."""
    app = hf.App("crowd")
    order: list[str] = []

    @app.workflow(at_once=1)
    async def child() -> None:
        await hf.wait_signal("go")

    @app.workflow
    async def parent(count: int) -> None:
        await asyncio.gather(*(child() for _ in range(count)))

    async with variant.node(app):
        await app.start(parent, 4, run_id="a", tenant="a")
        await wait_for_event(app.run("a/child"), "SignalWaiting")
        await app.start(parent, 2, run_id="b", tenant="b")
        await wait_for_event(app.run("b"), "ChildStarted", 2)
        inside = "a/child"
        for _ in range(3):
            await app.run(inside).signal("go")
            while not (waits := [wait.run_id async for wait in app.waits()]) or inside in waits:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            [inside] = waits
            order.append(inside.split("/")[0])
        assert order == ["b", "a", "b"]
