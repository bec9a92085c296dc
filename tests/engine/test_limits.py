"""Workflows with limits: how many runs are under way, who is next, and what becomes of a start beyond that."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.admission import Overload
from holdfast.core.state import CANCELLED, PENDING, RUNNING
from holdfast.engine.start.admission import Dequeued
from holdfast.errors import Conflict, InvalidInput, Overloaded, RunCancelled
from holdfast.program.definitions import LimitOptions
from holdfast.testing.samples import SampleNode, complete
from tests.engine.harness import EngineVariant, event_types, store_with_virtual_time, wait_for_event, wait_for_status

CUSTOMERS = ("ann", "bob", "eve")


def by_customer(customer: str) -> str:
    return customer


def crowd(**limits: Any) -> tuple[hf.App, Any, list[str]]:
    """Return an app with a limited workflow that waits for `go`, and a list of who has begun, in order."""
    app = hf.App("crowd")
    begun: list[str] = []

    @app.workflow(**limits)
    async def visit(customer: str) -> str:
        begun.append(customer)
        await hf.wait_signal("go", str)
        return customer

    return app, visit, begun


@pytest.mark.contract("QUE-2", "QUE-3")
async def test_no_more_than_the_limit_are_under_way_and_all_get_their_turn(variant: EngineVariant) -> None:
    app = hf.App("crowd")
    inside: list[int] = []
    most = 0

    @app.activity
    async def work(number: int) -> int:
        nonlocal most
        inside.append(number)
        most = max(most, len(inside))
        await asyncio.sleep(0)
        inside.remove(number)
        return number

    @app.workflow(at_once=3)
    async def job(number: int) -> int:
        return await work(number) + await work(number)

    async with variant.node(app):
        runs = [await app.start(job, number) for number in range(20)]
        assert await asyncio.gather(*(run.result() for run in runs)) == [2 * number for number in range(20)]
    assert 1 <= most <= 3


@pytest.mark.contract("QUE-2")
async def test_a_run_that_waits_is_pending_and_starts_when_another_has_finished(variant: EngineVariant) -> None:
    app, visit, _ = crowd(at_once=1)
    async with variant.node(app, safety_poll_s=60.0):
        first, second = await app.start(visit, "a"), await app.start(visit, "b")
        await wait_for_event(first, "SignalWaiting")
        assert (await second.snapshot()).status is PENDING
        assert await event_types(second) == ["RunQueued"]
        await first.signal("go", "x")
        await wait_for_event(second, "SignalWaiting")
        await second.signal("go", "x")
        assert await second.result() == "b"


@pytest.mark.contract("QUE-2")
async def test_each_key_has_its_own_room(variant: EngineVariant) -> None:
    app, visit, begun = crowd(per_key=1, key=by_customer)
    async with variant.node(app):
        runs = [await app.start(visit, customer) for customer in (*CUSTOMERS, *CUSTOMERS)]
        for run in runs[:3]:
            await wait_for_event(run, "SignalWaiting")
        assert sorted(begun) == sorted(CUSTOMERS)
        for run in runs:
            await wait_for_event(run, "SignalWaiting")
            await run.signal("go", "x")
            await run.result()


@pytest.mark.contract("QUE-2")
async def test_a_higher_priority_goes_first(variant: EngineVariant) -> None:
    app, visit, begun = crowd(at_once=1)
    async with variant.node(app):
        given = {"a": 0, "b": 0, "c": 5, "d": 1}
        runs = [await app.start(visit, name, priority=priority) for name, priority in given.items()]
        for run in (runs[0], runs[2], runs[3], runs[1]):
            await wait_for_event(run, "SignalWaiting")
            await run.signal("go", "x")
            await run.result()
    assert list(dict.fromkeys(begun)) == ["a", "c", "d", "b"]


@pytest.mark.contract("QUE-2")
async def test_tenants_take_turns_whoever_has_started_more(variant: EngineVariant) -> None:
    app, visit, begun = crowd(at_once=1)
    async with variant.node(app):
        given = {"a1": "acme", "a2": "acme", "a3": "acme", "b1": "beta", "b2": "beta"}
        runs = {name: await app.start(visit, name, tenant=tenant) for name, tenant in given.items()}
        for name in ("a1", "b1", "a2", "b2", "a3"):
            await wait_for_event(runs[name], "SignalWaiting")
            await runs[name].signal("go", "x")
            await runs[name].result()
    assert list(dict.fromkeys(begun)) == ["a1", "b1", "a2", "b2", "a3"]


@pytest.mark.contract("QUE-1")
async def test_a_request_is_the_same_only_within_tenant_project_and_environment() -> None:
    app, visit, _ = crowd()
    async with asyncio.timeout(60), app.node("memory://") as node:
        whose: list[dict[str, Any]] = [{}, {"tenant": "acme"}, {"project": "p"}, {"environment": "test"}]
        runs = [await app.start(visit, "a", request_id="r-1", **each) for each in whose]
        again = [await app.start(visit, "a", request_id="r-1", **each) for each in whose]
        assert [run.run_id for run in again] == [run.run_id for run in runs]
        assert len({run.run_id for run in runs}) == 4
        heads = [run.head for run in await node.store.load([run.run_id for run in runs]) if run is not None]
        assert [(head.tenant, head.project, head.environment) for head in heads] == [
            ("default", "default", "default"),
            ("acme", "default", "default"),
            ("default", "p", "default"),
            ("default", "default", "test"),
        ]
        with pytest.raises(InvalidInput):
            await app.start(visit, "a", tenant="a|b")


@pytest.mark.contract("QUE-2", "API-2")
async def test_a_start_beyond_the_limit_is_refused_if_the_workflow_says_so(variant: EngineVariant) -> None:
    app, visit, _ = crowd(at_once=1, overload="reject")
    async with variant.node(app):
        first = await app.start(visit, "a", request_id="r-1")
        with pytest.raises(Overloaded) as refused:
            await app.start(visit, "b", run_id="b")
        assert refused.value.details == {"plan_id": "visit", "retry_after_ms": 1_000}
        assert (await app.start(visit, "a", request_id="r-1")).run_id == first.run_id
        await wait_for_event(first, "SignalWaiting")
        await first.signal("go", "x")
        await first.result()
        assert (await app.start(visit, "b", run_id="b")).run_id == "b"


@pytest.mark.contract("QUE-2", "TMR-1")
@pytest.mark.parametrize("overload", ["queue", "delay"])
async def test_starts_are_spread_over_time(variant: EngineVariant, overload: Overload) -> None:
    app = hf.App("crowd")

    @app.workflow(rate=(2, timedelta(milliseconds=200)), overload=overload)
    async def ping() -> None:
        return None

    async with variant.node(app, safety_poll_s=60.0):
        runs = [await app.start(ping) for _ in range(6)]
        await asyncio.gather(*(run.result() for run in runs))
        began = (await runs[0].events())[0].persisted_at
        started = sorted([(await wait_for_event(run, "RunStarted")).persisted_at - began for run in runs])
    assert all(after >= number // 2 * 200_000 for number, after in enumerate(started)), started


@pytest.mark.contract("QUE-2", "WF-7", "SIG-13")
@pytest.mark.parametrize("end", ["cancel", "terminate"])
async def test_a_run_that_is_ended_while_it_waits_leaves_the_queue(variant: EngineVariant, end: str) -> None:
    app, visit, begun = crowd(at_once=1)
    async with variant.node(app):
        first, second, third = [await app.start(visit, name) for name in "abc"]
        await getattr(second, end)()
        with pytest.raises(RunCancelled):
            await second.result()
        await wait_for_event(first, "SignalWaiting")
        await first.signal("go", "x")
        await wait_for_event(third, "SignalWaiting")
        assert "RunStarted" not in await event_types(second)
    assert "b" not in begun


@pytest.mark.contract("QUE-2", "SIG-13")
async def test_a_run_that_is_done_again_comes_to_the_gate_like_any_other(variant: EngineVariant) -> None:
    app, visit, _ = crowd(at_once=1)
    async with variant.node(app):
        first, second = await app.start(visit, "a"), await app.start(visit, "b")
        await second.cancel()
        with pytest.raises(RunCancelled):
            await second.result()
        again = await second.retry_run(actor="ann")
        await wait_for_event(first, "SignalWaiting")
        assert (await again.snapshot()).status is PENDING


@pytest.mark.contract("QUE-2", "SIG-3", "SIG-13")
async def test_what_is_sent_to_a_run_that_waits_is_there_when_it_starts(variant: EngineVariant) -> None:
    """An operator cannot pause it: it has not started. It waits on."""
    app, visit, _ = crowd(at_once=1)
    async with variant.node(app):
        first, second = (
            await app.start(visit, "a"),
            await app.start(visit, "b", with_signal={"name": "go", "payload": "x"}),
        )
        with pytest.raises(Conflict, match="not started"):
            await second.pause(actor="ann", wait=True)
        assert (await second.snapshot()).status is PENDING
        await wait_for_event(first, "SignalWaiting")
        await first.signal("go", "x")
        assert await second.result() == "b"


@pytest.mark.contract("QUE-2", "WF-4")
async def test_children_queue_even_where_others_are_refused(variant: EngineVariant) -> None:
    app = hf.App("crowd")
    running: set[int] = set()
    most = 0

    @app.activity
    async def work(number: int) -> None:
        nonlocal most
        running.add(number)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.discard(number)

    @app.workflow(at_once=2, per_key=1, key=lambda number: number % 2, overload="reject")
    async def child(number: int) -> int:
        await work(number)
        return number

    @app.workflow
    async def parent() -> list[int]:
        return list(await asyncio.gather(*(child(number) for number in range(8))))

    async with variant.node(app):
        assert await (await app.start(parent)).result() == list(range(8))
    assert 1 <= most <= 2


@pytest.mark.contract("QUE-2")
async def test_a_child_whose_key_cannot_be_computed_queues_without_one(variant: EngineVariant) -> None:
    app = hf.App("crowd")

    def no_key(number: int) -> str:
        raise KeyError(number)

    @app.workflow(per_key=1, key=no_key)
    async def child(number: int) -> int:
        return number

    @app.workflow
    async def parent() -> list[int]:
        return list(await asyncio.gather(child(1), child(2)))

    async with variant.node(app):
        assert await (await app.start(parent)).result() == [1, 2]
        with pytest.raises(InvalidInput, match="key could not be computed"):
            await app.start(child, 3)


@pytest.mark.contract("QUE-2", "QUE-3", "OWN-3")
async def test_queued_runs_are_admitted_by_the_next_node_with_its_own_limit(variant: EngineVariant) -> None:
    """The node that knew the old limit is gone; the new code has another limit, or none at all."""
    limits: list[LimitOptions] = [{"at_once": 1}, {"at_once": 2}, {}]
    async with variant.opened() as store:
        for limit, under_way in zip(limits, (1, 2, 4), strict=True):
            app, visit, _ = crowd(**limit)
            async with variant.node(app, store):
                if limit == limits[0]:
                    for name in "abcd":
                        await app.start(visit, name, run_id=name)
                for name in "abcd"[:under_way]:
                    await wait_for_event(app.run(name), "SignalWaiting")
                statuses = [(await app.run(name).snapshot()).status for name in "abcd"]
                assert statuses == [RUNNING] * under_way + [PENDING] * (4 - under_way)


@pytest.mark.contract("QUE-3")
async def test_dequeue_and_start_says_what_became_of_each_run(variant: EngineVariant) -> None:
    """Any process may call it, at any time and however often; here one that takes no runs."""
    app, visit, _ = crowd(at_once=1)
    async with variant.opened() as store:
        async with app.connect(store):
            await app.start(visit, "a", run_id="a")
            await app.start(visit, "b", run_id="b")
            assert await app.dequeue_and_start() == []
            elsewhere = SampleNode(store)
            [loaded] = await elsewhere.claim()
            await elsewhere.step(loaded.head.run_id, complete("a"))
            assert await app.dequeue_and_start() == [Dequeued("b", "STARTED")]
            assert await app.dequeue_and_start() == []
        async with variant.node(app, store):
            await wait_for_event(app.run("b"), "SignalWaiting")
    with pytest.raises(InvalidInput, match="no node is open"):
        await app.dequeue_and_start()


@pytest.mark.contract("QUE-2")
async def test_a_run_that_was_cancelled_by_its_parent_while_it_waited_never_starts(variant: EngineVariant) -> None:
    app = hf.App("crowd")

    @app.workflow(at_once=1)
    async def child(name: str) -> None:
        await hf.wait_signal("go", str)

    @app.workflow
    async def parent() -> str:
        try:
            async with asyncio.timeout(0.1):
                await asyncio.gather(child("a"), child("b"))
        except TimeoutError:
            return "too late"
        return "done"

    async with variant.node(app):
        run = await app.start(parent, run_id="p")
        assert await run.result() == "too late"
        for name in ("p/child", "p/child#2"):
            await wait_for_status(app.run(name), CANCELLED)


@pytest.mark.contract("QUE-2", "API-2")
@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"at_once": 0}, "at_once"),
        ({"at_once": True}, "at_once"),
        ({"per_key": 2}, "belong together"),
        ({"at_once": 2, "key": by_customer}, "belong together"),
        ({"per_key": 2, "key": "customer"}, "function"),
        ({"per_key": 2, "key": lambda other: other}, "key takes"),
        ({"rate": 5}, "rate"),
        ({"rate": (5, 0)}, "duration"),
        ({"at_once": 2, "overload": "burn"}, "overload|one of"),
        ({"overload": "reject"}, "at_once, per_key or rate"),
        ({"at_once": 2, "overload": "delay"}, "delay"),
        ({"most": 2}, "unknown"),
    ],
)
def test_limits_that_make_no_sense_are_refused_when_the_workflow_is_registered(
    limits: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        crowd(**limits)


@pytest.mark.contract("QUE-2", "API-2")
async def test_priorities_and_keys_that_make_no_sense_are_refused(variant: EngineVariant) -> None:
    app, visit, _ = crowd(per_key=1, key=by_customer)
    async with variant.node(app):
        for customer, priority in (("a", 101), ("a", "high"), ("a\nb", 0)):
            with pytest.raises(InvalidInput):
                await app.start(visit, customer, priority=priority)  # type: ignore[arg-type]


def test_the_limit_of_the_version_that_was_registered_last_holds() -> None:
    app = hf.App("crowd")

    async def visit() -> None: ...

    register: Callable[..., Any] = app.workflow
    register(at_once=1, version="1")(visit)
    register(at_once=5, version="2")(visit)
    assert app.registry.workflow_limits["visit"].limit.at_once == 5
    register(version="3")(visit)
    assert app.registry.workflow_limits == {}


def most_within(instants: list[int], period_us: int) -> int:
    """Return how many of the instants lie within one period, at most."""
    return max(sum(first <= other < first + period_us for other in instants) for first in instants)


@pytest.mark.contract("QUE-2", "OWN-3")
@pytest.mark.parametrize("overload", ["queue", "delay"])
async def test_runs_that_queued_while_no_node_was_up_start_within_the_rate(
    variant: EngineVariant, overload: Overload
) -> None:
    """Their starts were asked for over a long time; the node that comes at last starts no more than the rate allows."""
    app = hf.App("crowd")

    @app.workflow(rate=(2, timedelta(seconds=1)), overload=overload)
    async def ping() -> None:
        return None

    async with store_with_virtual_time(variant) as (store, clock):
        async with app.connect(store):
            for number in range(9):
                await app.start(ping, run_id=f"r{number}", priority=number % 3, tenant="ab"[number % 2])
                clock.advance(ms=3_000)
                await app.dequeue_and_start()
        async with variant.node(app, store, safety_poll_s=0.005):
            while (await store.stats()).runs.get("COMPLETED", 0) < 9:
                clock.advance(ms=50)
                await asyncio.sleep(0.005)
            runs = [app.run(f"r{number}") for number in range(9)]
            started = [(await wait_for_event(run, "RunStarted")).persisted_at for run in runs]
    assert most_within(started, 1_000_000) <= 2, sorted(started)


@pytest.mark.contract("QUE-2", "OWN-1")
async def test_several_nodes_start_no_more_than_the_rate_in_any_period(variant: EngineVariant) -> None:
    """By the instants of their commits, which are later than their admission."""
    apps = [hf.App("crowd") for _ in range(3)]
    pings = []
    for app in apps:

        @app.workflow(rate=(3, timedelta(milliseconds=150)))
        async def ping() -> None:
            return None

        pings.append(ping)
    async with variant.opened() as store, AsyncExitStack() as nodes:
        for app in apps:
            await nodes.enter_async_context(variant.node(app, store))
        runs = [await apps[number % 3].start(pings[number % 3]) for number in range(15)]
        await asyncio.gather(*(run.result() for run in runs))
        started = [(await wait_for_event(run, "RunStarted")).persisted_at for run in runs]
    assert most_within(started, 150_000) <= 3, sorted(started)
