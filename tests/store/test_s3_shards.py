"""Nodes on a bucket share runs by their leases: who claims what, what that costs, and who goes on after one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.store.s3.mirror import UNREAD
from holdfast.store.s3.shards import GRACE, SHARDS, owners_of, shard_of
from holdfast.testing import VirtualClock
from holdfast.testing.samples import new_run
from tests.store.faulty_objects import FaultyObjects, opened

NODES = [f"node-{number}" for number in range(8)]
RUNS = [f"run-{number:03}" for number in range(40)]
LEASE_MS = 10_000
PLAN = ("order", "1")


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> FaultyObjects:
    return FaultyObjects(ObjectsInMemory(), monkeypatch)


class Processes:
    """Nodes on one bucket, each in a process of its own, and a process that starts runs."""

    def __init__(self, objects: FaultyObjects, grace: int) -> None:
        self.clock = VirtualClock()
        self.stores = {node: opened(objects, self.clock, grace=grace) for node in NODES}
        self.client = opened(objects, self.clock)
        self.claimed: dict[str, set[str]] = {}

    async def renew(self, *nodes: str) -> None:
        """Renew the leases of nodes."""
        for node in nodes or NODES:
            await self.stores[node].renew(node, LEASE_MS, [PLAN])

    async def claim(self, *nodes: str, limit: int = 100) -> None:
        """Let nodes claim at the same time."""
        names = nodes or tuple(NODES)
        found = await asyncio.gather(*(self.stores[node].claim(node, limit, [PLAN]) for node in names))
        for node, runs in zip(names, found, strict=True):
            self.claimed.setdefault(node, set()).update(run.head.run_id for run in runs)

    def owned(self) -> list[str]:
        """Return the runs that were claimed, each as often as nodes have claimed it."""
        return sorted(run_id for runs in self.claimed.values() for run_id in runs)

    async def close(self) -> None:
        """Close all."""
        for store in (*self.stores.values(), self.client):
            await store.close()


@pytest.fixture
async def processes(request: pytest.FixtureRequest, objects: FaultyObjects) -> AsyncIterator[Processes]:
    made = Processes(objects, getattr(request, "param", GRACE))
    await made.renew()
    await made.client.create([new_run(run_id, request_id=run_id, now=made.clock.now()) for run_id in RUNS])
    for store in made.stores.values():
        await store.stats()  # it knows all runs and nodes
    objects.log.clear()
    yield made
    await made.close()


def written(objects: FaultyObjects) -> Counter[str]:
    """Return how often each head was written, or tried to be."""
    return Counter(line.split()[1] for line in objects.log if line.startswith("PUT heads/"))


@pytest.mark.contract("OWN-1", "MSG-4")
@pytest.mark.parametrize("processes", [GRACE, 0], indirect=True, ids=["shared", "not shared"])
async def test_nodes_that_find_the_same_runs_at_the_same_instant_do_not_all_ask_for_them(
    request: pytest.FixtureRequest, processes: Processes, objects: FaultyObjects
) -> None:
    """Without shards nearly each node asks for each run, and all but one in vain."""
    await processes.claim()
    assert processes.owned() == RUNS
    tries = written(objects)
    assert set(tries) == {f"heads/{run_id}" for run_id in RUNS}
    if "not shared" in request.node.name:
        assert min(tries.values()) > 1
    else:
        assert set(tries.values()) == {1}
        assert all(processes.claimed[node] for node in NODES), "each has some"


@pytest.mark.contract("OWN-3", "TMR-1")
async def test_what_the_node_of_a_shard_does_not_claim_is_claimed_by_another_a_little_later(
    processes: Processes,
) -> None:
    """The others sleep until then; a node that is dead or full holds up nothing for longer."""
    alone = NODES[0]
    await processes.claim(alone)
    mine = processes.owned()
    assert 0 < len(mine) < len(RUNS)
    store, now = processes.stores[alone], processes.clock.now()
    assert await store.next_due(alone, [PLAN]) in (now, now + GRACE)
    other = NODES[1]
    assert await processes.stores[other].next_due(other, [PLAN]) == now, "it has some that are its own"
    processes.clock.advance(ms=GRACE // 1_000)
    await processes.claim(alone, limit=len(mine) + 3)
    assert len(processes.owned()) == len(mine) + 3
    await processes.claim(alone)
    assert processes.owned() == RUNS


@pytest.mark.contract("OWN-3")
async def test_runs_of_a_node_that_died_are_shared_by_the_others_at_once(
    processes: Processes, objects: FaultyObjects
) -> None:
    """When its lease ends, which all know: none of them waits for the dead one, and none asks in vain."""
    await processes.claim()
    dead, *others = NODES
    lost = sorted(processes.claimed.pop(dead))
    assert lost
    processes.clock.advance(ms=LEASE_MS // 2)
    await processes.renew(*others)
    processes.clock.advance(ms=LEASE_MS // 2)
    objects.log.clear()
    before, processes.claimed = processes.claimed, {}
    await processes.claim(*others)
    taken = [run_id for node, runs in processes.claimed.items() for run_id in runs if run_id not in before[node]]
    assert sorted(taken) == lost
    assert {written(objects)[f"heads/{run_id}"] for run_id in lost} == {1}


@pytest.mark.contract("OWN-3")
async def test_backlog_is_worked_off_by_each_node_from_its_own_shards_on(
    processes: Processes, objects: FaultyObjects
) -> None:
    """Runs that are overdue, as after an outage, may be claimed by all, and still hardly two ask for the same."""
    processes.clock.advance(ms=5_000)
    for limit in range(1, len(RUNS)):  # a run that a node has claimed is found again until a turn is committed
        await processes.claim(limit=limit)
        if len(processes.owned()) >= len(RUNS):
            break
    assert processes.owned() == RUNS
    assert written(objects).total() < len(RUNS) * 2


@pytest.mark.contract("OWN-3")
async def test_node_whose_lease_was_ended_has_no_share_any_more(processes: Processes) -> None:
    """As a node does with the lease of one whose process is gone; also who ended it knows."""
    dead, *others = NODES
    before, shares = owners_of(frozenset(NODES)), owners_of(frozenset(others))
    heir = next(shares[shard_of(run_id)] for run_id in RUNS if before[shard_of(run_id)] == dead)
    await processes.stores[heir].renew(dead, 1)
    processes.clock.advance(ms=1)
    for node in others:
        await processes.claim(node)
        assert processes.claimed[node] == {run_id for run_id in RUNS if shares[shard_of(run_id)] == node}


async def test_node_that_lacks_the_definition_has_no_share(objects: FaultyObjects) -> None:
    made = Processes(objects, GRACE)
    for number, node in enumerate(NODES):
        plans = [PLAN] if number == 3 else [("other", "1")]
        await made.stores[node].renew(node, LEASE_MS, plans)
    await made.client.create([new_run(run_id, request_id=run_id, now=made.clock.now()) for run_id in RUNS])
    await made.claim(NODES[3])
    assert made.owned() == RUNS
    await made.close()


@pytest.mark.contract("STO-1")
async def test_idle_nodes_do_not_read_each_others_leases_all_the_time(
    processes: Processes, objects: FaultyObjects
) -> None:
    """Each reads that of another once in the time for which it believes in it, and knows that it lives."""
    await processes.claim()
    for node in NODES:
        await processes.stores[node].release(node, [*processes.claimed[node]])
    for node, store in processes.stores.items():
        await store.next_due(node, [PLAN])  # it knows that nothing is owned any more
    objects.log.clear()
    renewals = 60
    for _ in range(renewals):
        processes.clock.advance(ms=LEASE_MS // 3)
        await processes.renew()
    reads = sum(line.startswith("GET nodes/") for line in objects.log)
    passed_s = renewals * LEASE_MS / 3_000
    assert reads <= len(NODES) * (len(NODES) - 1) * (passed_s / (UNREAD / 1e6) + 1)
    assert all(processes.stores[NODES[0]]._mirror.may_be_alive(node, processes.clock.now()) for node in NODES)


@pytest.mark.contract("OWN-3")
async def test_what_is_left_of_a_node_is_removed_also_if_another_was_faster(
    objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one deletes the lease, the same process follows what another one has announced."""
    clock = VirtualClock()
    store, other = opened(objects, clock), opened(objects, clock)
    await store.renew("gone", LEASE_MS)
    await other.stats()
    clock.advance(ms=LEASE_MS + UNREAD // 1_000)
    delete = Bucket.delete

    async def after_another(bucket: Bucket, keys: list[str]) -> None:
        await delete(bucket, keys)
        if bucket is store.bucket and keys:
            await other.renew("node-b", LEASE_MS)
            await store.stats()

    monkeypatch.setattr(Bucket, "delete", after_another)
    await store.renew("node-a", LEASE_MS)
    assert [each.key for each in await store.bucket.list("nodes")] == ["nodes/node-a", "nodes/node-b"]


def test_shards_are_spread_and_only_those_of_a_node_that_goes_are_moved() -> None:
    before, after = owners_of(frozenset(NODES)), owners_of(frozenset(NODES[1:]))
    counts = Counter(before)
    assert set(counts) == set(NODES)
    assert max(counts.values()) < 2 * SHARDS / len(NODES)
    moved = {before[shard] for shard in range(SHARDS) if before[shard] != after[shard]}
    assert moved == {NODES[0]}


async def test_stores_that_are_opened_by_their_address_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that tests make by hand do not, so that the conformance suite claims with whichever node it likes."""
    objects = ObjectsInMemory()
    monkeypatch.setattr(Bucket, "at", lambda address, patience_s: Bucket(objects))
    stores = [await S3Store.open("s3://bucket") for _ in range(2)]
    for store, node in zip(stores, NODES, strict=False):
        await store.renew(node, LEASE_MS, [PLAN])
    await stores[0].create([new_run(run_id, request_id=run_id) for run_id in RUNS])
    assert 0 < len(await stores[0].claim(NODES[0], 100, [PLAN])) < len(RUNS)
    for store in stores:
        await store.close()
