"""A run whose history makes no sense is set aside; every other run goes on, and nothing that it was sent is lost."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import RunStatus
from holdfast.run import RunHandle
from holdfast.store.port import MailboxQuery, WaitQuery
from tests.engine.harness import EngineVariant, wait_for_history

Damage = Callable[[sqlite3.Connection, int], Any]

DAMAGES: dict[str, Damage] = {
    "an event is missing": lambda db, no: db.execute("DELETE FROM events WHERE run_no = ? AND run_seq = 2", (no,)),
    "the end is missing": lambda db, no: db.execute("DELETE FROM events WHERE run_no = ? AND run_seq = 3", (no,)),
    "everything is missing": lambda db, no: db.execute("DELETE FROM events WHERE run_no = ?", (no,)),
    "an event cannot follow": lambda db, no: db.execute(
        "UPDATE events SET event_type = 'TimerFired', data = '{}' WHERE run_no = ? AND run_seq = 3", (no,)
    ),
    "a body is unreadable": lambda db, no: db.execute(
        "UPDATE events SET data = '{\"name\": 7' WHERE run_no = ? AND run_seq = 3", (no,)
    ),
}


def waiting_app() -> tuple[hf.App, Any]:
    app = hf.App("damaged")

    @app.workflow
    async def wait() -> str:
        return await hf.wait_signal("go", str)

    return app, wait


@pytest.mark.contract("MSG-3")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
async def test_a_damaged_history_stops_no_other_run(damage: Damage, tmp_path: Path) -> None:
    app, wait = waiting_app()
    path = tmp_path / "store.db"
    variant = EngineVariant(f"sqlite:///{path}", 5_000)
    async with variant.node(app):
        bad: RunHandle[str] = await app.start(wait)
        good: RunHandle[str] = await app.start(wait)
        for run in (bad, good):
            await wait_for_history(run, lambda events: any(event.event_type == "SignalWaiting" for event in events))
    with closing(sqlite3.connect(path)) as db, db:
        (run_no,) = db.execute("SELECT run_no FROM runs WHERE run_id = ?", (bad.run_id,)).fetchone()
        damage(db, run_no)
    async with variant.node(app) as node:
        await app.run(bad.run_id).signal("go", "kept", signal_id="s-1")
        await app.run(good.run_id).signal("go", "fine")
        assert await app.run(good.run_id).result() == "fine"
        assert await (await _signalled(app, wait)).result() == "new"
        assert await app.run(bad.run_id).status() is RunStatus.RUNNING
        [signal] = await node.store.find(MailboxQuery(run_id=bad.run_id))
        assert signal.signal_id == "s-1"
        assert await node.store.find(WaitQuery(run_id=bad.run_id))


async def _signalled(app: hf.App, wait: Any) -> RunHandle[str]:
    run: RunHandle[str] = await app.start(wait)
    await run.signal("go", "new")
    return run
