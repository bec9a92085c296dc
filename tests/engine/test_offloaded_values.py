"""Values that are too large for the store, where they meet updates, rotations, dead letters and reconciliation."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.check_histories import check_store
from holdfast.limits import DeadLetterPolicy
from tests.engine.harness import wait_for_event

KIB, MIB = 1024, 1024 * 1024
LARGE = "x" * (300 * KIB)
LIMITS = hf.Limits(
    signal_payload_bytes=4 * MIB,
    value_bytes=8 * MIB,
    poison_retries=1,
    dead_letters=DeadLetterPolicy(first_ms=1, most_ms=1),
)
OLGA = hf.Actor("olga", roles=("operator",))


class Place:
    """A store in a file, and the folder of its artifacts."""

    def __init__(self, folder: Path, keys: dict[str, bytes | str]) -> None:
        self.folder = folder / "artifacts"
        self.path = folder / "shop.db"
        self._keys = keys

    def app(self) -> hf.App:
        """Return an app that keeps large values in the folder."""
        codecs = [hf.Encryption(self._keys)] if self._keys else []
        return hf.App("shop", artifacts=hf.Artifacts(self.folder), codecs=codecs, limits=LIMITS)

    @asynccontextmanager
    async def node(self, app: hf.App, **options: Any) -> AsyncIterator[hf.App]:
        """Run a node that replays every turn, and check the histories in the end."""
        chosen = hf.NodeOptions(cached_runs=0, drain_s=2.0, **options)
        async with asyncio.timeout(60), app.node(f"sqlite:///{self.path}", options=chosen):
            yield app
            assert await check_store(app.registry, app.runtime().store, finished=True) == []

    def check_small(self) -> None:
        """Check that no large value is in the tables of the store, and none is readable if it is encrypted."""
        with closing(sqlite3.connect(self.path)) as db:
            for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                for column in [row[1] for row in db.execute(f"PRAGMA table_info({table})")]:
                    [longest] = db.execute(f"SELECT coalesce(max(length({column})), 0) FROM {table}").fetchone()
                    assert longest < 64 * KIB, (table, column)
        files = [path.read_bytes() for path in self.folder.rglob("*") if path.is_file()]
        assert files
        if self._keys:
            assert not any(b"x" * 100 in content for content in files)


@pytest.fixture(params=[{}, {"k1": b"1" * 32}], ids=["plain", "encrypted"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return where the test runs."""
    return Place(tmp_path, request.param)


@pytest.mark.contract("SEC-2", "SIG-5")
async def test_updates_take_and_return_large_values_also_across_a_rotation(place: Place) -> None:
    app = place.app()

    @app.workflow
    async def book(entries: list[str]) -> int:
        async def add(text: str) -> str:
            entries.append(text)
            await hf.wait_signal(f"confirmed {len(entries)}")
            return text + "!"

        hf.on_update("add", add)
        hf.on_query("last", lambda: entries[-1])
        await hf.wait_signal("rotate")
        if len(entries) < 2:
            await hf.wait_signal("confirmed 1")
            hf.continue_as_new(entries)
        return sum(map(len, entries))

    async with place.node(app):
        run = await app.start(book, [])
        adding = asyncio.create_task(run.update("add", text=LARGE, update_id="u-1"))
        await wait_for_event(run, "UpdateAccepted")
        await run.signal("rotate")
        await run.signal("confirmed 1")
        await run.signal("confirmed 1")
        assert await adding == LARGE + "!"
        assert await run.update("add", text=LARGE, update_id="u-1") == LARGE + "!"
        await wait_for_event(run, "ContinuedAsNew")
        assert await run.query("last") == LARGE
        again = asyncio.create_task(run.update("add", text=LARGE + "y", update_id="u-2"))
        await wait_for_event(run, "UpdateAccepted")
        await run.signal("confirmed 2")
        assert await again == LARGE + "y!"
        await run.signal("rotate")
        assert await run.result() == 2 * len(LARGE) + 1
    place.check_small()


@pytest.mark.contract("SEC-2", "ACT-3", "ACT-4")
@pytest.mark.parametrize("queue", ["", "far"], ids=["local", "queued"])
@pytest.mark.parametrize("found_by", ["verifier", "operator"])
async def test_a_large_result_of_a_keyed_step_is_found_by_a_verifier_or_an_operator(
    place: Place, queue: str, found_by: str
) -> None:
    app = place.app()
    calls: list[int] = []

    async def find(text: str) -> Any:
        return hf.Completed(text * 2) if found_by == "verifier" else hf.Indeterminate("closed")

    @app.activity(idempotency_key=lambda text: "k", verify=find, queue=queue, retry=hf.Retry(initial_ms=1))
    async def double(text: str) -> str:
        calls.append(1)
        raise ConnectionError("the answer is lost")

    @app.workflow
    async def grow(text: str) -> str:
        return await double(text)

    async with place.node(app, queues=("far",)):
        run = await app.start(grow, LARGE)
        if found_by == "operator":
            await wait_for_event(run, "TaskCreated")
            [task] = await app.tasks.list(run_id=run.run_id, status="OPEN")
            await app.tasks.complete(task.task_id, {"answer": "happened", "result": LARGE * 2}, actor=OLGA)
        assert await run.result() == LARGE * 2
        run_id = run.run_id
    assert calls == [1]
    place.check_small()
    app = place.app()
    async with asyncio.timeout(60), app.node(f"sqlite:///{place.path}"):
        assert await app.run(run_id).result() == LARGE * 2


@pytest.mark.contract("SEC-2", "MSG-4")
async def test_a_large_signal_that_became_a_dead_letter_is_delivered_whole_when_it_is_requeued(place: Place) -> None:
    app, strict = place.app(), place.app()

    @app.workflow(name="wait", signals={"more": str})
    async def wait() -> int:
        return len(await hf.wait_signal("more", str))

    @strict.workflow(name="wait", signals={"more": int})
    async def wait_strictly() -> int:
        return await hf.wait_signal("more", int)

    async with place.node(app):
        run = await app.start(wait)
        await wait_for_event(run, "SignalWaiting")
    async with asyncio.timeout(60), app.connect(f"sqlite:///{place.path}"):
        await app.run(run.run_id).signal("more", LARGE)
    async with place.node(strict):
        await wait_for_event(strict.run(run.run_id), "SignalDeadLettered")
    place.check_small()
    async with place.node(app):
        [letter] = await app.dead_letters(run_id=run.run_id)
        await letter.requeue(actor="olga")
        assert await app.run(run.run_id).result() == len(LARGE)
