"""Nodes that have a workflow but not an activity that it calls: its runs go to a node that has both, now or later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.core.state import CANCELLED
from holdfast.engine.abilities import decode
from holdfast.engine.observe.doctor import examine
from holdfast.errors import RunFailed
from holdfast.store.port import LoadedRun, Store
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import event_types, wait_for_event, wait_for_status

LONG: dict[str, Any] = {"lease_ms": 60_000, "safety_poll_s": 60.0, "drain_s": 2.0}
"""Nothing ends or is looked for by itself in the time of a test."""

SECONDS = 60.0


class Counting(StoreProxy):
    """The store of one node: counts how often each run was claimed there, and given away."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.claimed: list[str] = []
        self.given: list[str] = []

    async def claim(self, node: str, limit: int, plans: Any = None) -> list[LoadedRun]:
        found: list[LoadedRun] = await self.inner.claim(node, limit, plans)
        self.claimed += [loaded.head.run_id for loaded in found]
        return found

    async def hand_over(self, node: str, run_ids: Sequence[str], to: str) -> list[str]:
        given: list[str] = await self.inner.hand_over(node, run_ids, to)
        self.given += given
        return given


class Killed(StoreProxy):
    """The store of a node that is gone without a word: it gives nothing back."""

    async def release(self, node: str, run_ids: Any = None) -> int:
        return 0


class Shop:
    """An app with all workflows and some of the activities. Its attempts are counted, and the first may fail."""

    def __init__(self, *activities: str, failures: int = 0, block: bool = False) -> None:
        self.app = hf.App("shop")
        self.failures = failures
        self.attempts: list[tuple[str, int]] = []
        self.may_go = asyncio.Event()
        if not block:
            self.may_go.set()
        for name in activities:
            self.app.activity(name=name)(self._named(name))
        self.order = self.app.workflow(name="order")(order)
        self.both = self.app.workflow(name="both")(both)
        self.in_turn = self.app.workflow(name="in_turn")(in_turn)
        self.rounds = self.app.workflow(name="rounds")(rounds)
        self.family = self.app.workflow(name="family")(family)

    def _named(self, name: str) -> Any:
        async def act(what: str) -> str:
            self.attempts.append((name, hf.activity_context().attempt))
            await self.may_go.wait()
            if self.failures:
                self.failures -= 1
                raise ValueError("not yet")
            return f"{name} {what}"

        return act

    def node(self, store: Store, **options: Any) -> AbstractAsyncContextManager[Any]:
        """Run the app here."""
        return self.app.node(store, options=hf.NodeOptions(**{**LONG, **options}))


elsewhere = hf.App("elsewhere")
ONCE = hf.Retry(max_attempts=1)
SOON = hf.Retry(max_attempts=3, initial_ms=1)


@elsewhere.activity(name="ship", retry=ONCE)
async def ship(what: str) -> str:
    raise NotImplementedError


@elsewhere.activity(name="charge", retry=ONCE)
async def charge(what: str) -> str:
    raise NotImplementedError


async def order(what: str) -> str:
    return await ship(what)


child = elsewhere.workflow(name="order")(order)


async def both(what: str) -> list[str]:
    return list(await asyncio.gather(charge(what), ship(what)))


async def in_turn(what: str) -> list[str]:
    return [await charge(what), await ship(what), await charge(what), await ship(what)]


async def rounds(left: int) -> str:
    done = await ship.options(retry=SOON)(str(left))
    if left:
        hf.continue_as_new(left - 1)
    return done


async def family(count: int) -> list[Any]:
    return list(await asyncio.gather(*(child(str(number)) for number in range(count))))


@asynccontextmanager
async def limited() -> AsyncIterator[None]:
    async with asyncio.timeout(SECONDS):
        yield


async def until_lacking(store: Store) -> str:
    """Return what doctor says of activities that no node has, once it says so."""
    while True:
        report = await examine(store, SystemClock())
        for finding in report.findings:
            if finding.subject == "activities" and finding.level == "wrong":
                assert not report.is_fine
                return finding.sentence
        await asyncio.sleep(0.005)


async def not_begun(run: Any) -> int:
    """Return how many attempts were left to others before they began."""
    return sum(getattr(event.data, "reason", "") == "not begun" for event in await run.events())


@pytest.mark.contract("OWN-3", "ACT-1", "WF-3")
async def test_a_run_goes_to_a_node_that_has_its_activity(store: Store) -> None:
    lacking, whole = Shop(), Shop("ship")
    one, two = Counting(store), Counting(store)
    async with limited(), lacking.node(one), whole.node(two):
        run = await lacking.app.start(lacking.order, "a")
        assert await run.result() == "ship a"
    assert whole.attempts == [("ship", 1)]
    assert len(one.claimed) <= 1, "it does not come back"
    assert two.claimed.count(run.run_id) <= 3
    assert len(one.given) <= 1
    assert two.given == []


@pytest.mark.contract("OWN-3", "ACT-1", "WF-3")
async def test_many_runs_are_spread_over_the_nodes_that_have_both(store: Store) -> None:
    lacking, wholes = Shop(), [Shop("ship"), Shop("ship")]
    async with limited(), lacking.node(store):
        runs = [await lacking.app.start(lacking.order, str(number)) for number in range(20)]
        for run in runs:
            await wait_for_event(run, "StepRetried")
        async with wholes[0].node(store), wholes[1].node(store):
            assert [await run.result() for run in runs] == [f"ship {number}" for number in range(20)]
    assert len(wholes[0].attempts) + len(wholes[1].attempts) == 20


@pytest.mark.contract("OWN-3", "ACT-1", "WF-3")
async def test_without_such_a_node_the_run_waits_visibly_and_goes_on_when_one_comes_up(store: Store) -> None:
    lacking, whole = Shop(), Shop("ship")
    one = Counting(store)
    async with limited(), lacking.node(one):
        run = await lacking.app.start(lacking.order, "a")
        told = await until_lacking(store)
        assert "'ship'" in told
        assert "order" in told
        before = await event_types(run)
        async with whole.node(store):
            assert await run.result() == "ship a"
            assert whole.attempts == [("ship", 1)]
            assert (await event_types(run))[: len(before)] == before
        assert not any(finding.subject == "activities" and finding.level == "wrong" for finding in await _findings(one))
    assert len(one.claimed) <= 1


async def _findings(store: Any) -> Any:
    return (await examine(store.inner, SystemClock())).findings


@pytest.mark.contract("OWN-3", "ACT-1")
@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_attempt_that_never_began_does_not_count_when_the_lacking_node_goes(
    store: Store, is_killed: bool
) -> None:
    """The activity may be tried once: an attempt that counted would fail it."""
    lacking, whole = Shop(), Shop("ship")
    async with limited():
        options: dict[str, Any] = {"lease_ms": 200} if is_killed else {}
        async with lacking.node(Killed(store) if is_killed else store, **options):
            run_id = (await lacking.app.start(lacking.order, "a")).run_id
            await wait_for_event(lacking.app.run(run_id), "StepRetried")
        async with whole.node(store):
            assert await whole.app.run(run_id).result() == "ship a"
            assert whole.attempts == [("ship", 1)]


@pytest.mark.contract("OWN-3", "ACT-1")
async def test_a_node_that_stops_leaves_its_run_to_a_lacking_one_until_the_next_comes(store: Store) -> None:
    """An attempt that was cut short counts, one that nobody began does not."""
    lacking, first, second = Shop(), Shop("ship", block=True), Shop("ship")
    async with limited(), lacking.node(store):
        async with first.node(store, drain_s=0.01):
            run = await lacking.app.start(lacking.rounds, 0)
            while not first.attempts:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert "'ship'" in await until_lacking(store)
        async with second.node(store):
            assert await run.result() == "ship 0"
    assert (first.attempts, second.attempts) == ([("ship", 1)], [("ship", 2)])


@pytest.mark.contract("OWN-3", "ACT-1")
async def test_a_lost_attempt_counts_although_a_lacking_node_had_the_run_in_between(store: Store) -> None:
    lacking, first, second = Shop(), Shop("ship", block=True), Shop("ship")
    async with limited():
        async with first.node(Killed(store), lease_ms=200, drain_s=0.01):
            run_id = (await first.app.start(first.order, "a")).run_id
            while not first.attempts:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        async with lacking.node(store):
            await until_lacking(store)
            async with second.node(store):
                with pytest.raises(RunFailed, match="the node was lost that ran attempt 1"):
                    await lacking.app.run(run_id).result()
    assert second.attempts == []


@pytest.mark.contract("OWN-3", "ACT-1", "WF-3")
@pytest.mark.parametrize("workflow", ["both", "in_turn"])
async def test_nodes_that_have_one_activity_each_hand_the_run_to_and_fro_no_more_than_needed(
    store: Store, workflow: str
) -> None:
    charging, shipping = Shop("charge"), Shop("ship")
    one, two = Counting(store), Counting(store)
    async with limited(), charging.node(one), shipping.node(two):
        run = await charging.app.start(getattr(charging, workflow), "a")
        expected = ["charge a", "ship a"]
        assert await run.result() == (expected if workflow == "both" else expected * 2)
        assert len(one.given) + len(two.given) <= (2 if workflow == "both" else 4)
    assert {attempt for _, attempt in charging.attempts + shipping.attempts} == {1}


@pytest.mark.contract("OWN-3", "WF-3")
async def test_activities_under_way_are_not_cut_short_when_a_run_waits_for_another_node(store: Store) -> None:
    charging, shipping = Shop("charge", block=True), Shop("ship")
    async with limited(), charging.node(store):
        run = await charging.app.start(charging.both, "a")
        await wait_for_event(run, "StepRetried")
        async with shipping.node(store):
            charging.may_go.set()
            assert await run.result() == ["charge a", "ship a"]
    assert charging.attempts == [("charge", 1)]


@pytest.mark.contract("OWN-3", "ACT-1", "WF-3")
async def test_rotation_and_retries_of_steps(store: Store) -> None:
    lacking, whole = Shop(), Shop("ship", failures=2)
    async with limited(), lacking.node(store), whole.node(store):
        run = await lacking.app.start(lacking.rounds, 3)
        assert await run.result() == "ship 0"
    assert [attempt for _, attempt in whole.attempts] == [1, 2, 3, 1, 1, 1]


@pytest.mark.contract("OWN-3", "ACT-1", "WF-3")
async def test_children(store: Store) -> None:
    lacking, whole = Shop(), Shop("ship")
    async with limited(), lacking.node(store):
        run = await lacking.app.start(lacking.family, 3)
        await until_lacking(store)
        async with whole.node(store):
            assert await run.result() == ["ship 0", "ship 1", "ship 2"]
    assert whole.attempts == [("ship", 1)] * 3


@pytest.mark.contract("OWN-3", "SIG-13")
async def test_a_run_that_waits_can_be_cancelled(store: Store) -> None:
    lacking, whole = Shop(), Shop("ship")
    async with limited(), lacking.node(store):
        run = await lacking.app.start(lacking.order, "a")
        await until_lacking(store)
        await run.cancel()
        await wait_for_status(run, CANCELLED)
        async with whole.node(store):
            assert await whole.app.run(run.run_id).status() is CANCELLED
    assert whole.attempts == []


@pytest.mark.contract("OWN-3")
async def test_a_node_that_stops_is_given_no_run(store: Store) -> None:
    """It says so with its next renewal."""
    lacking, stopping = Shop(), Shop("ship")
    async with limited(), lacking.node(store), stopping.node(store, lease_ms=300) as node:
        node.definition_filter.stop()
        while any("ship" in decode(each.plans).activities for each in await store.find_nodes()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        run = await lacking.app.start(lacking.order, "a")
        await until_lacking(store)
        assert await not_begun(run) == 1
    assert stopping.attempts == []
