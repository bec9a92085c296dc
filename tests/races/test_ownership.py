"""A run has one owner at a time, however many claim and however late one of them wakes up."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.store.port import CommitConflict, Committed
from holdfast.store.sqlite import SqliteStore
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, new_run, read_history, timer
from tests.races import contenders
from tests.races.parallel import run_in_parallel
from tests.races.stores import opened, prepare

pytestmark = pytest.mark.slow


@pytest.mark.contract("OWN-1", "MSG-2")
async def test_claimers_share_the_runs_and_no_run_goes_to_two(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path, *(new_run(f"run-{number:03}") for number in range(500)))

    played = run_in_parallel(contenders.claim_everything, processes=2, threads=8, path=path, batch=7)

    claimed = [run_id for claims in played for run_id, _ in claims]
    assert sorted(claimed) == [f"run-{number:03}" for number in range(500)]
    assert {epoch for claims in played for _, epoch in claims} == {1}
    async with opened(path) as store:
        for contender, claims in enumerate(played):
            for loaded in await store.load([run_id for run_id, _ in claims]):
                assert loaded is not None
                assert (loaded.head.lease_owner, loaded.head.version) == (f"node-{contender}", 3)
                assert loaded.messages == ()


@pytest.mark.contract("OWN-1")
async def test_the_late_commit_of_a_stalled_owner_is_fenced(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await prepare(path, new_run("run-1"))

    stalled, successor = run_in_parallel(contenders.stall_or_take_over, processes=2, path=path)

    assert successor["epoch"] == stalled["epoch"] + 1
    assert isinstance(successor["answer"], Committed)
    assert isinstance(stalled["answer"], CommitConflict)
    assert stalled["answer"].epoch == successor["epoch"]
    async with opened(path) as store:
        events = await read_history(store, "run-1")
    assert {event.engine_run_ref.node for event in events[1:]} == {"node-1"}
    assert [event.step_id for event in events] == [None, None, "in time"]


@pytest.mark.contract("OWN-1", "OWN-2")
async def test_a_stalled_owner_is_fenced_as_soon_as_another_has_claimed(tmp_path: Path) -> None:
    """The version is still the one that it read: only the epoch can tell."""
    path = tmp_path / "store.db"
    clock = VirtualClock()
    stores = [await SqliteStore.open(path, clock=clock) for _ in range(2)]
    for store in stores:
        await store.migrate()
    await stores[0].create([new_run("run-1")])
    stalled, successor = (SampleNode(store, name) for store, name in zip(stores, ("a", "b"), strict=True))
    (loaded,) = await stalled.claim()
    turn = await stalled.turn(loaded, timer(1))
    clock.advance(ms=stalled.lease_ms)
    (taken,) = await successor.claim()
    assert taken.head.lease_epoch == 2

    answer = await stalled.commit(turn)

    assert answer == CommitConflict("epoch", 1, 2)
    assert len(await read_history(stores[1], "run-1")) == 1
    for store in stores:
        await store.close()


@pytest.mark.contract("OWN-1")
async def test_an_owner_whose_lease_ran_out_may_commit_while_nobody_has_claimed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    clock = VirtualClock()
    store = await SqliteStore.open(path, clock=clock)
    await store.migrate()
    node = SampleNode(store)
    run = await node.create("run-1")
    turn = await node.turn(run, timer(1))
    clock.advance(ms=node.lease_ms + 1)

    answer = await node.commit(turn)

    assert isinstance(answer, Committed)
    await store.close()
