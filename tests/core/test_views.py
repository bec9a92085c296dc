"""The invariants, looked at through a real store: what the views read is what the invariants need."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.core import commands
from holdfast.core.invariants import SystemView, check, check_drained
from holdfast.core.messages import AcceptedSignalResult, ActivitySucceeded
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Accepted, PurgePolicy, Store
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import START, VirtualClock, samples, system_view, view_of
from holdfast.testing.samples import SampleNode

SECOND = 1_000_000


@pytest.fixture
def clock() -> VirtualClock:
    """Return the time of this test."""
    return VirtualClock()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, clock: VirtualClock, tmp_path: Path) -> AsyncIterator[Store]:
    """Return a store that is empty."""
    if request.param == "memory":
        yield MemoryStore(clock)
        return
    store = await SqliteStore.open(tmp_path / "views.db", clock=clock)
    await store.migrate()
    yield store
    await store.close()


async def busy(store: Store) -> list[AcceptedSignalResult]:
    """Leave three runs in the store: one that waits for all sorts of things, its child, and one that has ended."""
    node = SampleNode(store)
    child = commands.StartChild(step_id="child", child_run_id="run-2", plan_id="order", plan_version="1")
    todo = (samples.wait("go"), samples.wait("go", "again"), samples.task(), samples.activity(), child)
    await node.start("run-1", samples.timer(START + 60 * SECOND), *todo)
    assert [run.head.run_id for run in await node.claim()] == ["run-2"]
    await node.step("run-2", samples.wait("stop"))
    await node.start("run-3", samples.complete())
    answers = await store.deliver([samples.signal(name="go", value=n, signal_id=f"click-{n}") for n in range(3)])
    await node.step("run-1")
    await node.step("run-1", inputs=[ActivitySucceeded("charge", 1)], release=True)
    await store.release("node-a")
    return [answer.result for answer in answers if isinstance(answer, Accepted) and answer.result is not None]


@pytest.mark.contract("INV")
async def test_a_store_that_was_used_as_it_should_be_has_no_violation(store: Store) -> None:
    told = await busy(store)
    view = await system_view(store, told)
    assert [run.run_id for run in view.runs] == ["run-1", "run-2", "run-3"]
    assert len(told) == 3
    assert check(view) == []


@pytest.mark.contract("INV")
async def test_a_view_holds_everything_that_the_store_keeps(store: Store) -> None:
    told = await busy(store)
    view = await view_of(store, "run-1", told)
    assert view is not None
    assert (view.version, len(view.events)) == (11, 11)
    assert [signal.consumed_seq is None for signal in view.signals] == [False, False, True]
    assert [task.status for task in view.tasks] == ["OPEN"]
    assert (view.waits, view.lease_owner, view.acknowledged) == ((), None, tuple(told))
    assert view.snapshot is not None
    assert view.now == await store.now()


@pytest.mark.contract("INV")
async def test_queues_are_drained_when_everything_due_was_handled(store: Store, clock: VirtualClock) -> None:
    told = await busy(store)
    node = SampleNode(store)
    for run in await node.claim():
        await node.step(run.head.run_id)
    assert check_drained(await system_view(store, told)) == []
    clock.advance(ms=60_000)
    assert [left.invariant for left in check_drained(await system_view(store, told))] == ["queues_are_drained"]


async def test_there_is_no_view_of_a_run_that_is_not_there(store: Store) -> None:
    assert await view_of(store, "nowhere") is None
    assert await system_view(store) == SystemView(())


@pytest.mark.contract("FMT-2", "INV")
async def test_what_retention_leaves_has_no_violation(store: Store, clock: VirtualClock) -> None:
    await busy(store)
    clock.advance(ms=1_000)
    await store.purge(PurgePolicy(finished_run_ms=0, task_ms=0, runtime_state_ms=0))
    view = await system_view(store)
    assert [run.run_id for run in view.runs] == ["run-1", "run-2"]
    assert check(view) == []


class RestlessStore(MemoryStore):
    """A store in which something happens to the run between the first two reads."""

    async def read_events(self, run_id, after=0, limit=None, most_bytes=None):  # type: ignore[no-untyped-def]
        found = await super().read_events(run_id, after, limit)
        if not self.has_interfered:
            self.has_interfered = True
            await SampleNode(self).step(run_id, samples.marker())
        return found

    has_interfered = True


@pytest.mark.contract("INV")
async def test_a_view_is_of_one_moment_although_it_is_read_in_pieces(clock: VirtualClock) -> None:
    store = RestlessStore(clock)
    await SampleNode(store).start("run-1", samples.wait())
    store.has_interfered = False
    view = await view_of(store, "run-1")
    assert view is not None
    assert (view.version, len(view.events)) == (4, 4)
    assert check(view) == []


async def test_views_do_not_disturb_the_runs_that_they_show(store: Store) -> None:
    await busy(store)
    before = await samples.read_picture(store)
    await asyncio.gather(system_view(store), system_view(store))
    assert await samples.read_picture(store) == before
