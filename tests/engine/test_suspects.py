"""Runs that are suspected of ending their processes are tried apart, and are blamed for nothing that others do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.engine.turns.poison import TRIED_TOGETHER
from holdfast.errors import StoreUnavailable
from holdfast.limits import SUSPECT_LOSSES
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Store, Turn
from holdfast.store.proxy import StoreProxy

PATIENCE_S = 60.0


class Failing(MemoryStore):
    """A store that fails once, right after it was noted that a run is tried, and has work for others then."""

    def __init__(self) -> None:
        super().__init__()
        self.is_tried = False
        self.on_failure: Any = None
        self.commits: list[list[tuple[str, int]]] = []

    def suspect(self, run_id: str, losses: int = SUSPECT_LOSSES) -> None:
        """Let a run be a suspect."""
        run = self._runs[run_id]
        run.head = replace(run.head, losses=losses)

    async def commit(self, turns: Sequence[Turn]) -> Any:
        """Commit, and see whether a run is about to be tried."""
        self.commits.append([(turn.run_id, turn.losses) for turn in turns])
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


async def played_by_suspects(
    losses: int, runs: int, lost_turns: int = 5, first: int = 0
) -> list[list[tuple[str, int]]]:
    """Return the commits by which so many runs go on that were lost so often, and end; the first, oftener than that."""
    app, store = hf.App("court", limits=hf.Limits(lost_turns=lost_turns)), Failing()

    @app.workflow
    async def walk() -> str:
        return await hf.wait_signal("go", str)

    started = [f"w{number:03}" for number in range(runs)]
    async with app.node(store) as node, asyncio.timeout(PATIENCE_S):
        for run_id in started:
            await app.start(walk, run_id=run_id)
        while any(node.owns(run_id) for run_id in started):  # noqa: ASYNC110
            await asyncio.sleep(0)
    for run_id in started:
        store.suspect(run_id, losses + first * (run_id == "w000"))
    async with app.connect(store):
        for run_id in started:
            await app.run(run_id).signal("go", "now")
    store.commits.clear()
    async with app.node(store), asyncio.timeout(PATIENCE_S):
        assert [await app.run(run_id).result() for run_id in started] == ["now"] * runs
    return store.commits


@pytest.mark.contract("OWN-3", "MSG-3")
async def test_after_an_outage_runs_are_tried_together_and_not_one_after_the_other() -> None:
    """Each try is durable before it begins, and a turn that is committed clears its run."""
    commits = await played_by_suspects(SUSPECT_LOSSES, TRIED_TOGETHER + 8)
    assert [(len(turns), {losses for _, losses in turns}) for turns in commits] == [
        (TRIED_TOGETHER, {SUSPECT_LOSSES + 1}),
        (TRIED_TOGETHER, {0}),
        (8, {SUSPECT_LOSSES + 1}),
        (8, {0}),
    ]


@pytest.mark.contract("MSG-3")
@pytest.mark.parametrize(("losses", "lost_turns"), [(SUSPECT_LOSSES + 1, 5), (SUSPECT_LOSSES, 3)])
async def test_a_run_whose_next_loss_may_be_its_last_is_tried_alone(losses: int, lost_turns: int) -> None:
    """Else others that are lost with it would be set aside for what it did."""
    commits = await played_by_suspects(losses, 5, lost_turns)
    assert [[lost for _, lost in turns] for turns in commits] == [[losses + 1], [0]] * 5


@pytest.mark.contract("MSG-3")
async def test_of_those_that_are_tried_alone_the_one_that_was_lost_least_often_is_next() -> None:
    """What ends each process soon after its start would else end each in the try of the same run."""
    commits = await played_by_suspects(SUSPECT_LOSSES + 1, 3, first=1)
    assert [turns[0][0] for turns in commits[::2]] == ["w001", "w002", "w000"]


class Slow(Failing):
    """A store whose commits take long, and which knows after how many of them jobs were taken."""

    taken_after: int | None = None

    async def commit(self, turns: Sequence[Turn]) -> Any:
        """Commit after everything else that is under way."""
        for _ in range(100):
            await asyncio.sleep(0)
        return await super().commit(turns)

    async def acquire_jobs(self, *given: Any) -> Any:
        """Acquire jobs, and note when."""
        jobs = await super().acquire_jobs(*given)
        if jobs:
            self.taken_after = len(self.commits)
        return jobs


@pytest.mark.contract("MSG-3")
@pytest.mark.parametrize(("losses", "commits"), [(SUSPECT_LOSSES, 2), (SUSPECT_LOSSES + 1, 6)])
async def test_jobs_are_taken_once_the_runs_of_a_former_life_were_tried(losses: int, commits: int) -> None:
    """A job that ends each process that takes it would end each in the middle of a try, and always of the same run."""
    app, store = hf.App("court"), Slow()

    @app.activity
    async def work() -> str:
        return "worked"

    @app.workflow
    async def walk() -> str:
        return await hf.wait_signal("go", str)

    @app.workflow
    async def labour() -> str:
        return await work.options(queue="mine")()

    started = [f"w{number}" for number in range(3)]
    async with app.node(store) as node, asyncio.timeout(PATIENCE_S):
        for run_id in started:
            await app.start(walk, run_id=run_id)
        labouring = await app.start(labour)
        while any(node.owns(run_id) for run_id in (*started, labouring.run_id)):  # noqa: ASYNC110
            await asyncio.sleep(0)
    for run_id in started:
        store.suspect(run_id, losses)
    async with app.connect(store):
        for run_id in started:
            await app.run(run_id).signal("go", "now")
    store.commits.clear()
    async with app.node(store, options=hf.NodeOptions(queues=("mine",))), asyncio.timeout(PATIENCE_S):
        assert await app.run(labouring.run_id).result() == "worked"
        assert [await app.run(run_id).result() for run_id in started] == ["now"] * 3
    assert store.taken_after == commits


class Blaming(StoreProxy):
    """A store in which every run counts as lost so often after each turn."""

    def __init__(self, store: Store, losses: int) -> None:
        super().__init__(store)
        self._losses = losses

    async def commit(self, turns: Sequence[Turn]) -> Any:
        """Commit the turns with this count."""
        return await self._store.commit([replace(turn, losses=self._losses) for turn in turns])


class Silent(StoreProxy):
    """A store that does not answer once a suspect is tried: before its turn is committed, or after the try is."""

    def __init__(self, store: Store, losses: int, silent_after: str) -> None:
        super().__init__(store)
        self._tried, self._silent_after = losses + 1, silent_after
        self.is_silent = asyncio.Event()

    async def commit(self, turns: Sequence[Turn]) -> Any:
        """Commit, and answer as long as nobody is tried."""
        is_try = any(turn.losses == self._tried for turn in turns)
        if self.is_silent.is_set():
            return await self._store.commit(turns)
        answers = await self._store.commit(turns) if is_try else None
        if is_try and self._silent_after == "try":
            return answers
        self.is_silent.set()
        return await asyncio.Event().wait()


def walking_app() -> tuple[hf.App, Any]:
    app = hf.App("court")

    @app.workflow
    async def walk() -> str:
        return await hf.wait_signal("go", str)

    return app, walk


async def park_suspect(app: hf.App, walk: Any, store: Store, losses: int) -> None:
    """Start a run that waits for a signal, and counts as lost so often; and send it the signal."""
    async with asyncio.timeout(PATIENCE_S), app.node(Blaming(store, losses)) as node:
        run = await app.start(walk, run_id="w")
        while node.owns("w"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    async with app.connect(store):
        await run.signal("go", "now")


async def losses_of(store: Store, run_id: str) -> int:
    [loaded] = await store.load([run_id])
    assert loaded is not None
    return loaded.head.losses


@pytest.mark.contract("OWN-3", "MSG-3")
@pytest.mark.parametrize("silent_after", ["try", "turn"])
@pytest.mark.parametrize("losses", [SUSPECT_LOSSES, SUSPECT_LOSSES + 2])
async def test_a_try_does_not_count_whose_node_leaves_in_good_order(
    store: Store, losses: int, silent_after: str
) -> None:
    """Else a run would be set aside because its nodes were stopped, whether or not it is known that the try counts."""
    app, walk = walking_app()
    await park_suspect(app, walk, store, losses)
    silent = Silent(store, losses, silent_after)
    async with asyncio.timeout(PATIENCE_S), app.node(silent, options=hf.NodeOptions(drain_s=0)):
        await silent.is_silent.wait()
        assert await losses_of(store, "w") == losses + 1
    assert await losses_of(store, "w") == losses
    async with asyncio.timeout(PATIENCE_S), app.node(store):
        assert await app.run("w").result() == "now"


@pytest.mark.contract("OWN-3", "MSG-3")
async def test_no_run_begins_in_the_process_while_another_is_tried(store: Store) -> None:
    """It could end the process, and the run that is tried would be blamed for it."""
    app, walk = walking_app()
    went: list[str] = []

    @app.activity
    async def pack() -> str:
        return "packed"

    @app.workflow
    async def begin() -> str:
        went.append("began")
        return await pack()

    class Starting(StoreProxy):
        """A store that starts a run as soon as it is durable that another is tried."""

        began: hf.RunHandle[str] | None = None

        async def commit(self, turns: Sequence[Turn]) -> Any:
            answers = await self._store.commit(turns)
            if any(turn.losses > SUSPECT_LOSSES for turn in turns):
                self.began = await app.start(begin)
                assert went == []
            return answers

    await park_suspect(app, walk, store, SUSPECT_LOSSES)
    starting = Starting(store)
    async with asyncio.timeout(PATIENCE_S), app.node(starting):
        assert await app.run("w").result() == "now"
        assert starting.began is not None
        assert await starting.began.result() == "packed"
    assert went
