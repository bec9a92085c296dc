"""A run that is suspected of ending its processes is tried alone, and is blamed for nothing that others do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.errors import StoreUnavailable
from holdfast.limits import SUSPECT_LOSSES
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Turn

PATIENCE_S = 60.0


class Failing(MemoryStore):
    """A store that fails once, right after it was noted that a run is tried, and has work for others then."""

    def __init__(self) -> None:
        super().__init__()
        self.is_tried = False
        self.on_failure: Any = None

    def suspect(self, run_id: str) -> None:
        """Let a run be a suspect."""
        run = self._runs[run_id]
        run.head = replace(run.head, losses=SUSPECT_LOSSES)

    async def commit(self, turns: Sequence[Turn]) -> Any:
        """Commit, and see whether a run is about to be tried."""
        self.is_tried |= any(turn.losses > SUSPECT_LOSSES for turn in turns)
        return await super().commit(turns)

    async def now(self) -> int:
        """Fail, once."""
        if self.is_tried and self.on_failure is not None:
            on_failure, self.on_failure = self.on_failure, None
            await on_failure()
            raise StoreUnavailable("the store could not be reached")
        return await super().now()


@pytest.mark.contract("OWN-3", "MSG-2")
async def test_a_try_that_the_store_interrupts_goes_on_before_other_runs_do_anything() -> None:
    """What they did could end the process, and the run that is tried would be blamed for it."""
    app, store = hf.App("court"), Failing()
    went: list[str] = []

    @app.workflow
    async def walk(name: str) -> str:
        await hf.wait_signal("go", str)
        went.append(name)
        return name

    async with asyncio.timeout(PATIENCE_S), app.node(store) as node:
        others = [await app.start(walk, f"other {number}", run_id=f"o{number}") for number in range(3)]
        tried = await app.start(walk, "tried", run_id="t")
        while any(node.owns(run.run_id) for run in (*others, tried)):  # noqa: ASYNC110
            await asyncio.sleep(0)

        async def tell_others() -> None:
            for run in others:
                await run.signal("go", "now")

        store.suspect(tried.run_id)
        store.on_failure = tell_others
        await tried.signal("go", "now")
        assert await tried.result() == "tried"
        assert [await run.result() for run in others] == ["other 0", "other 1", "other 2"]
    assert went[0] == "tried"
    assert store.on_failure is None
