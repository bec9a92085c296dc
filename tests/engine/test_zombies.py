"""Attempts that were given up and go on all the same: what they come to is nobody's business any more."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.events import RunCompleted, StepCompleted
from holdfast.store.port import CommitConflict, Committed, Store, Turn
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import EngineVariant, event_types, wait_for_event


class Zombie:
    """An activity that does not let itself be cancelled, and ends when it is told to."""

    def __init__(self) -> None:
        self.began, self.may_end, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, fails: bool) -> str:
        """Go on, whatever is asked of it."""
        self.began.set()
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                continue
        self.ended.set()
        if fails:
            raise ValueError("undead")
        return "undead"


class Meddling(StoreProxy):
    """A store in which the zombie ends while the end of its run is being committed."""

    def __init__(self, inner: Store, zombie: Zombie) -> None:
        super().__init__(inner)
        self._zombie = zombie
        self.commits = 0

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Commit, and let the zombie end beside it."""
        self.commits += 1
        if any(isinstance(event.data, RunCompleted) for turn in turns for event in turn.events):
            self._zombie.may_end.set()
            await self._zombie.ended.wait()
            for _ in range(5):
                await asyncio.sleep(0)
        answers: list[Committed | CommitConflict] = await self.inner.commit(turns)
        return answers


def haunted_app(zombie: Zombie) -> tuple[hf.App, Any]:
    app = hf.App("haunted")

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def haunt(fails: bool) -> str:
        return await zombie(fails)

    @app.workflow
    async def house(fails: bool) -> str:
        task = asyncio.create_task(haunt(fails))
        await hf.wait_signal("stop", bool)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await hf.wait_signal("go", str)

    return app, house


@pytest.mark.contract("ACT-1", "INV")
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
async def test_what_an_attempt_that_was_given_up_comes_to_is_ignored(
    variant: EngineVariant, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    zombie = Zombie()
    app, house = haunted_app(zombie)
    with caplog.at_level(logging.WARNING, logger="holdfast.node"):
        async with variant.opened() as inner:
            store: Any = Meddling(inner, zombie)
            async with variant.node(app, store) as node:
                run = await app.start(house, fails)
                await zombie.began.wait()
                await run.signal("stop", True)
                await wait_for_event(run, "StepCancelled")
                await run.signal("go", "quiet")
                assert await run.result() == "quiet"
                commits = store.commits
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not node.owns(run.run_id)
                assert store.commits == commits, "a run that has finished takes no turn"
                names = await event_types(run)
                assert names[-1] == "RunCompleted"
                assert not {"StepCompleted", "StepFailed"} & set(names)
    assert "a turn was not committed" not in caplog.text


@pytest.mark.contract("ACT-1", "OWN-1", "INV")
async def test_an_attempt_of_a_run_that_was_taken_over_reports_nothing_here(variant: EngineVariant) -> None:
    """The run comes back to its first node, which is asked for a second attempt while the first goes on."""
    first = Zombie()
    app, attempts = hf.App("haunted"), list[int]()

    @app.activity
    async def haunt() -> str:
        attempts.append(hf.activity_context().attempt)
        return await first(False) if len(attempts) == 1 else "alive"

    @app.workflow
    async def house() -> str:
        return f"{await haunt()} after {await hf.wait_signal('go', str)}"

    async with variant.opened() as store, variant.node(app, store) as node:
        run = await app.start(house)
        await first.began.wait()
        await store.release(node.name, [run.run_id])  # as if another node had had it
        store.wakeups.notify()
        await wait_for_event(run, "StepCompleted")
        first.may_end.set()
        await first.ended.wait()
        await run.signal("go", "all")
        assert await run.result() == "alive after all"
        results = [event.data.result for event in await run.events() if isinstance(event.data, StepCompleted)]
        assert [bytes(result) for result in results] == [b'"alive"']
    assert attempts == [1, 2]
