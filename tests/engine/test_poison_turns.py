"""Runs that take their process along are set aside after some losses, whatever they do it with, and others go on."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.core.state import PAUSED
from holdfast.engine.observe.doctor import examine
from holdfast.engine.observe.takeovers import find_takeovers
from holdfast.errors import Conflict
from holdfast.store.port import RunHead, Store
from tests.engine.crashing_node import make_crashing_app

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
LOST_TURNS = hf.Limits().lost_turns
CALM = 5
KINDS = ("turn", "first", "replay", "condition", "update")
"""Where a run ends its process. How a store counts lost turns is in its suite, so one of them is enough on a server."""

pytestmark = [pytest.mark.slow, pytest.mark.contract("OWN-3", "MSG-2"), pytest.mark.process]


class Fleet:
    """A node that is started again whenever it ends, as a supervisor does; and this process, which only asks."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self._folder = folder
        self.app, self.workflows = make_crashing_app(folder / "unused")
        self.deaths = 0
        self.store: Store

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the store for clients, and end the node in the end."""
        async with asyncio.timeout(PATIENCE_S), self.app.connect(self._address):
            self.store = self.app.runtime().store
            keeping = asyncio.create_task(self._keep())
            try:
                yield
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)

    async def _keep(self) -> None:
        command = [sys.executable, "-m", "tests.engine.crashing_node", self._address, str(self._folder)]
        while True:
            process: Process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
            try:
                assert await process.wait() == 7, "a node ended, and not by a bomb"
                self.deaths += 1
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    def arm(self, kind: str) -> None:
        """Let a kind of bomb go off from now on."""
        (self._folder / kind).touch()

    def mend(self, kind: str) -> None:
        """Let a kind of bomb go off no more."""
        (self._folder / kind).unlink()

    async def head(self, run: Any) -> RunHead:
        """Return a run as it is."""
        [loaded] = await self.store.load([run.run_id])
        assert loaded is not None
        return loaded.head

    async def until(self, run: Any, status: str, losses: int) -> RunHead:
        """Wait until a run is as it should be."""
        while True:
            head = await self.head(run)
            if head.status == status and head.losses == losses and head.ready_at is None:
                return head
            await asyncio.sleep(0.01)

    async def waits(self, run: Any) -> None:
        """Wait until a run waits for its signal."""
        while not [wait async for wait in self.app.waits(run_id=run.run_id)]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Fleet:
    """Return what a test works with, on a store that processes share."""
    if request.param == "sqlite":
        return Fleet(f"sqlite:///{tmp_path}/bombs.db", tmp_path)
    return Fleet(request.getfixturevalue("postgres_url"), tmp_path)


async def light(fleet: Fleet, kind: str) -> Any:
    """Start a run, bring it to where it waits, and let it go off."""
    if kind in ("turn", "first", "condition"):
        fleet.arm(kind)
        return await fleet.app.start(fleet.workflows[kind])
    run = await fleet.app.start(fleet.workflows[kind])
    await fleet.waits(run)
    fleet.arm(kind)
    if kind == "update":
        asyncio.create_task(run.update("shake", how="hard")).add_done_callback(lambda task: task.exception())
    else:
        await run.signal("go", "gone")
    return run


@pytest.mark.parametrize(
    ("fleet", "kind"), [*(("sqlite", kind) for kind in KINDS), ("postgres", "turn")], indirect=["fleet"]
)
async def test_a_run_that_ends_its_process_is_set_aside_and_others_go_on(fleet: Fleet, kind: str) -> None:
    async with fleet.opened():
        calm = [await fleet.app.start(fleet.workflows["calm"], number) for number in range(CALM)]
        bomb = await light(fleet, kind)
        head = await fleet.until(bomb, PAUSED, losses=LOST_TURNS)
        assert fleet.deaths == LOST_TURNS
        assert head.snapshot is not None
        assert head.snapshot.last_error_code == "PoisonTurn"
        takeovers = [each.takeover for each in await find_takeovers(fleet.store, 0, 100)]
        assert len(takeovers) >= LOST_TURNS, "each process that found another gone has reported it"
        for run in calm:
            await fleet.waits(run)
            await run.signal("go", "fine")
            assert await run.result() == "fine"
            types = [event.event_type for event in await run.events()]
            assert "RunPaused" not in types, "an innocent run was blamed"
        report = await examine(fleet.store, SystemClock())
        assert any("PoisonTurn" in finding.sentence for finding in report.findings)
        assert any(found.subject == "takeovers" and found.level == "note" for found in report.findings)
        # Nothing that comes in runs its code again, but for an operator's word, which is one more try.
        with pytest.raises(Conflict, match="were lost"):
            await bomb.query("how")
        await bomb.signal("unheard", "of")
        await fleet.until(bomb, PAUSED, losses=LOST_TURNS)
        assert fleet.deaths == LOST_TURNS
        await bomb.resume(actor="ann")
        while fleet.deaths < LOST_TURNS + 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await fleet.until(bomb, PAUSED, losses=LOST_TURNS)
        types = [event.event_type for event in await bomb.events()]
        assert (types.count("RunPaused"), fleet.deaths) == (2, LOST_TURNS + 1)
        fleet.mend(kind)
        await bomb.resume(actor="ann")
        if kind in ("update", "condition"):
            await bomb.signal("go", "gone")
        assert await bomb.result() in ("whole", "gone")
        assert (await fleet.head(bomb)).losses == 0
        assert fleet.deaths == LOST_TURNS + 1


@pytest.mark.parametrize("fleet", ["sqlite"], indirect=True)
async def test_an_activity_that_ends_its_process_uses_up_attempts_and_is_no_poison(fleet: Fleet) -> None:
    async with fleet.opened():
        fleet.arm("activity")
        run = await fleet.app.start(fleet.workflows["activity"])
        while fleet.deaths < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        fleet.mend("activity")
        assert await run.result() == "done"
        types = [event.event_type for event in await run.events()]
        assert "RunPaused" not in types
        assert types.count("StepRetried") >= 5


@pytest.mark.parametrize("lost_turns", [0, 1, 2])
def test_a_bound_that_leaves_no_try_alone_is_refused(lost_turns: int) -> None:
    with pytest.raises(hf.errors.InvalidInput):
        hf.Limits(lost_turns=lost_turns)
