"""A snapshot is a cache: where retention or an operator has deleted it, a run is shown as it was before."""

import asyncio
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.client import Client
from holdfast.core.state import PAUSED
from holdfast.errors import Conflict, RunFailed
from holdfast.store.port import PurgePolicy
from tests.engine.harness import MOST_SECONDS, EngineVariant, wait_for_event, wait_for_status

pytestmark = pytest.mark.contract("PRJ-4")


async def shown(app: hf.App, run: hf.RunHandle[Any]) -> Any:
    """Return what callers are shown of a run without its history."""
    view = msgspec.to_builtins(await Client(app).runs.get(run.run_id))
    return view, await run.published()


def shop() -> tuple[hf.App, dict[str, Any]]:
    app = hf.App("shop", limits=hf.Limits(rotation_steps=4), attributes={"city": str})
    workflows: dict[str, Any] = {}

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def fail(text: str) -> str:
        raise ValueError(text)

    @app.activity
    async def work() -> int:
        return 1

    @app.workflow
    async def waits() -> str:
        hf.publish(progress=7)
        hf.set_attributes(city="Rome")
        return await hf.wait_signal("go", str, timeout=3600)

    @app.workflow
    async def stuck() -> str:
        return await fail.options(on_failure="pause")("no")

    @app.workflow(failures=Exception)
    async def fails() -> str:
        hf.publish(progress=9)
        raise ValueError("no")

    @app.workflow
    async def rotates(rounds: int = 0) -> int:
        hf.publish(round=rounds)
        if rounds < 3:
            await work()
            hf.continue_as_new(rounds + 1)
        return await hf.wait_signal("go", int)

    @app.workflow(requires_approval=True)
    async def held() -> None:
        pass

    for each in (waits, stuck, fails, rotates, held):
        workflows[each.definition.name] = each
    return app, workflows


@pytest.mark.contract("FMT-2")
async def test_a_finished_run_is_shown_as_before_when_retention_has_deleted_its_snapshot(
    variant: EngineVariant,
) -> None:
    app, workflows = shop()
    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(workflows["fails"])
        with pytest.raises(RunFailed):
            await run.result()
        before = await shown(app, run)
        assert before[1] == {"progress": 9}
        await asyncio.sleep(0.002)  # its end is past a window of no length
        report = await store.purge(PurgePolicy(runtime_state_ms=0))
        assert report.runtime_states == 1
        assert await shown(app, run) == before


async def test_an_unfinished_run_is_shown_and_commanded_as_before(tmp_path: Path) -> None:
    app, workflows = shop()
    address = f"sqlite:///{tmp_path / 'shop.db'}"
    runs: dict[str, Any] = {}
    async with asyncio.timeout(MOST_SECONDS), app.node(address):
        for name in ("waits", "stuck", "rotates", "held"):
            runs[name] = await app.start(workflows[name])
        runs["later"] = await app.start(workflows["waits"], after=timedelta(days=1))
        for name in ("waits", "rotates"):
            await wait_for_event(runs[name], "SignalWaiting")
        await wait_for_status(runs["stuck"], PAUSED)
        await runs["waits"].pause(reason="lunch", wait=True)
        before = {name: await shown(app, run) for name, run in runs.items()}
    with closing(sqlite3.connect(tmp_path / "shop.db")) as db:
        db.execute("UPDATE runs SET snapshot = NULL")
        db.commit()
    async with asyncio.timeout(MOST_SECONDS), app.connect(address):
        runs = {name: app.run(run.run_id) for name, run in runs.items()}
        for name, run in runs.items():
            assert await shown(app, run) == before[name]
        with pytest.raises(Conflict, match="fail"):
            await runs["stuck"].resume()
