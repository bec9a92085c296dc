"""Contexts, middleware and replaced runs beside each other, on every store."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import TERMINAL
from holdfast.store.port import RunQuery, Store
from tests.sqlite_template import put_empty_store

MOST_S = 20


@pytest.mark.contract("CTX-1", "QUE-5", "CAN-1")
async def test_each_restart_has_the_context_of_its_own_start(store: Store) -> None:
    """It is there in the activity, in the child and after the rotation; a start that gets a run changes nothing."""
    app = hf.App("shop")

    @app.activity
    async def whose() -> str | None:
        return hf.activity_context().run_context.get("user")

    @app.workflow
    async def part() -> str | None:
        return hf.context().get("user")

    @app.workflow
    async def order(seen: list[str | None]) -> list[str | None]:
        seen += [await whose(), await part(), hf.context().get("user")]
        if len(seen) == 3:
            hf.continue_as_new(seen)
        return seen

    async def start(user: str, reuse: Any) -> Any:
        return await app.start(order, [], run_id="o", reuse=reuse, context={"user": user})

    options = hf.NodeOptions(cached_runs=0, drain_s=2.0)
    async with asyncio.timeout(MOST_S), app.node(store, options=options):
        for user in ("ann", "bob"):
            run = await start(user, "restart-if-finished")
            assert await run.result() == [user] * 6
        assert await (await start("eve", "return")).result() == ["bob"] * 6


@pytest.mark.contract("QUE-5")
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def test_callers_who_replace_each_others_runs_leave_one(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each caller has a connection of its own; the runs hold a lock, which the last one gets."""
    postgres = kind == "postgres"
    url = request.getfixturevalue("postgres_url") if postgres else f"sqlite:///{put_empty_store(tmp_path / 'a.db')}"

    def shop() -> tuple[hf.App, Any]:
        app = hf.App("shop")
        one = app.lock("one")

        @app.workflow
        async def cart(user: str) -> str:
            async with one():
                return user + await hf.wait_signal("go", str)

        return app, cart

    (first, cart), (second, same) = shop(), shop()
    async with asyncio.timeout(MOST_S), first.node(url), second.node(url) as node:
        calls = [
            app.start(workflow, f"{number}", run_id="c", reuse="terminate-and-restart", request_id=f"r{number}")
            for number, (app, workflow) in enumerate([(first, cart), (second, same)] * 3)
        ]
        runs = await asyncio.gather(*calls)
        assert sorted(run.run_id for run in runs) == ["c", *(f"c~00000{number}" for number in range(2, 7))]
        last = max(runs, key=lambda run: run.run_id)
        await last.signal("go", "!")
        assert await last.result() == f"{runs.index(last)}!"
        for run in runs:
            await asyncio.gather(run.result(), return_exceptions=True)
        found = await node.store.find(RunQuery(limit=100))
        assert {head.status for head in found} <= TERMINAL, found
