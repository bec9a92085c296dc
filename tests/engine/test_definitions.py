"""Nodes with different versions of a workflow on one store, and runs whose definition nobody has for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.core import events as e
from holdfast.core.invariants import check
from holdfast.core.messages import Message
from holdfast.core.state import PAUSED, RUNNING
from holdfast.engine.definition_filter import DefinitionFilter
from holdfast.engine.observe.doctor import examine
from holdfast.engine.turns.draft import DEFINITION, prepare_run
from holdfast.errors import InvalidInput, StoreUnavailable
from holdfast.limits import DeadLetterPolicy
from holdfast.store.inspect import view_of
from holdfast.store.memory import MemoryStore
from holdfast.store.port import OrphanedDefinition, RunQuery, Store
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import MOST_SECONDS, event_types, wait_for_event, wait_for_history, wait_for_status

GRACE_S = 0.05
IMPATIENT = hf.Limits(poison_retries=1, dead_letters=DeadLetterPolicy(first_ms=1, most_ms=1))
PATIENT = hf.Limits(poison_retries=100, dead_letters=DeadLetterPolicy(first_ms=1, most_ms=1))


class Shop:
    """An app with some versions of one workflow, `order`, which waits for a signal or sleeps."""

    def __init__(self, *versions: str, limits: hf.Limits = IMPATIENT, **limited: Any) -> None:
        self.app = hf.App("shop", limits=limits)
        self.orders = {version: self._order(version, limited) for version in versions}

    def _order(self, version: str, limited: dict[str, Any]) -> Any:
        @self.app.workflow(name="order", version=version, **limited)
        async def order(sleep_s: float = 0.0) -> str:
            if sleep_s:
                await hf.sleep(sleep_s)
                return f"slept by {version}"
            return f"{await hf.wait_signal('go', str)} by {version}"

        return order

    @asynccontextmanager
    async def node(
        self, store: Store, grace_s: float | None = GRACE_S, name: str | None = None, **options: Any
    ) -> AsyncIterator[Any]:
        """Run the app here."""
        chosen = hf.NodeOptions(definition_grace_s=grace_s, **{"drain_s": 2.0, **options})
        async with asyncio.timeout(MOST_SECONDS), self.app.node(store, name=name, options=chosen) as node:
            yield node

    async def begun(self, store: Store, version: str, *args: Any) -> str:
        """Start a run, let it come to its wait, and stop the node."""
        async with self.node(store):
            run = await self.app.start(self.orders[version], *args)
            await wait_for_history(run, lambda events: len(events) >= 3)
            return run.run_id


async def queue(store: Store, shop: Shop, version: str, count: int) -> list[str]:
    """Create runs that no node has started."""
    definition = shop.orders[version].definition
    body = e.RunQueued("order", version, input=definition.signature.pack((), {}))
    run_ids = [f"{version}-{number}" for number in range(count)]
    await store.create([prepare_run(run_id, body, await store.now(), "somebody") for run_id in run_ids])
    return run_ids


async def letters_of(shop: Shop, run_id: str) -> list[Any]:
    """Wait for dead letters of a run."""
    async with asyncio.timeout(MOST_SECONDS):
        while not (found := await shop.app.dead_letters(run_id=run_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return found


async def until_left(store: Store, run_id: str) -> None:
    """Wait until a run is nobody's, and nothing of it is due."""
    async with asyncio.timeout(MOST_SECONDS):
        while True:
            [loaded] = await store.load([run_id])
            assert loaded is not None
            if loaded.head.lease_owner is None and loaded.head.ready_at is None:
                return
            await asyncio.sleep(0.002)


# --- rolling upgrade


@pytest.mark.contract("WF-3")
async def test_every_run_goes_to_a_node_that_has_its_version(store: Store) -> None:
    """The node with the new version only is there first, and has nothing else to do."""
    old, new = Shop("1", "2"), Shop("2")
    run_ids = [*await queue(store, old, "1", 20), *await queue(store, old, "2", 20)]
    async with new.node(store, grace_s=None):
        await wait_for_event(new.app.run("2-19"), "SignalWaiting")
        assert await event_types(new.app.run("1-0")) == ["RunQueued"]
        async with old.node(store):
            for run_id in run_ids:
                await new.app.run(run_id).signal("go", "on")
            results = [await new.app.run(run_id).result() for run_id in run_ids]
            assert results == ["on by 1"] * 20 + ["on by 2"] * 20
            paused = [run_id for run_id in run_ids if "RunPaused" in await event_types(new.app.run(run_id))]
            assert paused == []


@pytest.mark.contract("WF-3")
async def test_nobody_judges_runs_of_a_version_that_a_living_node_has(store: Store) -> None:
    """However long they wait for it: it may be busy."""
    old, new = Shop("1"), Shop("2")
    [run_id] = await queue(store, old, "1", 1)
    await store.renew("busy", 60_000, [("order", "1")])
    looks: list[list[OrphanedDefinition]] = []
    enough = asyncio.Event()

    class Counted(StoreProxy):
        async def find_orphaned(self, late_ms: int) -> list[OrphanedDefinition]:
            looks.append(await self.inner.find_orphaned(late_ms))
            if len(looks) == 3:
                enough.set()
            return looks[-1]

    async with new.node(Counted(store)):
        await enough.wait()
        assert looks == [[], [], []]
        assert await event_types(new.app.run(run_id)) == ["RunQueued"]
        await store.release("busy")
        await wait_for_status(new.app.run(run_id), PAUSED)


@pytest.mark.contract("WF-3", "QUE-3")
async def test_a_run_that_is_admitted_by_a_node_of_another_version_is_given_back(store: Store) -> None:
    old, new = Shop("1", at_once=1), Shop("2", at_once=1)
    async with new.node(store, grace_s=None):
        first = await new.app.start(new.orders["2"])
        async with old.node(store, takes_runs=False):
            second = await old.app.start(old.orders["1"])
        await first.signal("go", "on")
        async with asyncio.timeout(MOST_SECONDS):
            while (await store.stats()).queued:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        async with old.node(store):
            await wait_for_event(old.app.run(second.run_id), "SignalWaiting")
        assert "RunPaused" not in await event_types(new.app.run(second.run_id))


@pytest.mark.contract("WF-3", "SIG-13")
async def test_a_run_of_another_version_can_be_done_again_from_any_node(store: Store) -> None:
    old, new = Shop("1"), Shop("2")
    async with new.node(store, grace_s=None):
        async with old.node(store):
            run = await old.app.start(old.orders["1"])
            await run.terminate()
            await wait_for_event(run, "RunCancelled")
            again = await new.app.run(run.run_id).retry_run(actor="ann")
            await again.signal("go", "again")
            assert await again.result() == "again by 1"
        assert "RunPaused" not in await event_types(again)


# --- a definition that nobody has


@pytest.mark.contract("WF-3", "MSG-3")
async def test_a_run_that_nobody_can_run_is_paused_and_named_and_a_requeue_lets_it_go_on(store: Store) -> None:
    """What it was told stays in its mailbox; when the definition is back, the requeued letter wakes the run."""
    old, new = Shop("1"), Shop("2")
    run_id = await old.begun(store, "1")
    async with new.node(store):
        run = new.app.run(run_id)
        await run.signal("go", "kept")
        event = await wait_for_event(run, "RunPaused")
        assert isinstance(event.data, e.RunPaused)
        assert event.data.error is not None
        assert event.data.error.code == "VersionMismatch"
        [letter] = await letters_of(new, run_id)
        record, message = letter.record, letter.message()
        assert (record.reason, record.run_id) == ("definition missing", run_id)
        assert record.detail.startswith("VersionMismatch: ")
        assert record.node.startswith("shop-")
        assert isinstance(message, Message)
        assert (message.signal_id, message.type, message.attempts) == (DEFINITION, "InternalContinue", 0)
        assert [signal.name for signal in await run.mailbox()] == ["go"]
        report = await examine(store, SystemClock())
        assert run_id in [named for finding in report.findings for named in finding.run_ids]
    async with old.node(store, grace_s=None):
        await letter.requeue(actor="ann")
        assert await old.app.run(run_id).result() == "kept by 1"
        assert (await event_types(old.app.run(run_id))).count("RunPaused") == 1
        assert await old.app.dead_letters() == []


@pytest.mark.contract("WF-3", "MSG-3", "TMR-1")
async def test_a_timer_of_a_run_that_nobody_can_run_dies_and_fires_when_it_is_requeued(store: Store) -> None:
    old, new = Shop("1"), Shop("2")
    run_id = await old.begun(store, "1", 1.0)
    async with new.node(store):
        [letter] = await letters_of(new, run_id)
        assert letter.message().type == "TimerDue"
        view = await view_of(store, run_id)
        assert view is not None
        assert check(view) == []
        assert letter.record.reason == "definition missing"
        assert await event_types(new.app.run(run_id)) == ["RunQueued", "RunStarted", "TimerStarted", "RunPaused"]
    async with old.node(store, grace_s=None):
        await letter.requeue()
        assert await old.app.run(run_id).result() == "slept by 1"


@pytest.mark.contract("WF-3", "MSG-3", "OWN-3")
async def test_a_node_that_begins_requeues_what_has_died_for_want_of_its_definitions(store: Store) -> None:
    """So a workflow whose nodes were all away goes on by itself; what other workflows miss is not touched."""
    old, new = Shop("1"), Shop("2")
    waiting = [await old.begun(store, "1") for _ in range(3)]
    await store.create([prepare_run("strange", e.RunQueued("other", "1"), await store.now(), "somebody")])
    async with new.node(store):
        for run_id in waiting:
            await new.app.run(run_id).signal("go", "kept")
        for run_id in (*waiting, "strange"):
            await letters_of(new, run_id)
    async with old.node(store, name="back again"):
        assert [await old.app.run(run_id).result() for run_id in waiting] == ["kept by 1"] * 3
        assert {letter.record.run_id for letter in await old.app.dead_letters()} == {"strange"}
        settled = [each.record for each in await old.app.dead_letters(run_id=waiting[0], settled=True)]
        assert [(each.settled, each.settled_by) for each in settled] == [("requeue", "back again")]


@pytest.mark.contract("WF-3", "MSG-3", "OWN-3")
@pytest.mark.parametrize(("is_known", "is_paused"), [(False, False), (False, True), (True, False), (True, True)])
async def test_activities_of_a_run_that_nobody_can_run_are_left_to_who_can(
    store: Store, is_known: bool, is_paused: bool
) -> None:
    """They are not carried out without the definition, nor is the run kept by a node that does not know them."""
    tries: list[int] = []
    began = asyncio.Event()

    def working(*, has_workflow: bool = True) -> Shop:
        shop = Shop("2")

        @shop.app.activity
        async def work() -> str:
            tries.append(1)
            began.set()
            if len(tries) == 1:
                await asyncio.Event().wait()
            return "worked"

        async def labour() -> str:
            return await work()

        if has_workflow:
            shop.orders["labour"] = shop.app.workflow(labour)
        return shop

    old, new = working(), working(has_workflow=False) if is_known else Shop("2")
    async with old.node(store, drain_s=0.01):
        run_id = (await old.app.start(old.orders["labour"])).run_id
        await began.wait()
        if is_paused:
            await old.app.run(run_id).pause(wait=True)
    async with new.node(store, safety_poll_s=0.05):
        await until_left(store, run_id)
        letters = await new.app.dead_letters(run_id=run_id, reason="definition missing")
        assert len(letters) == (is_known or not is_paused)
        view = await view_of(store, run_id)
        assert view is not None
        assert is_paused or check(view) == []
        assert tries == [1]
        async with working().node(store):
            if is_paused:
                await new.app.run(run_id).resume()
            assert await new.app.run(run_id).result() == "worked"
    assert tries == [1, 1]


@pytest.mark.contract("WF-3", "OWN-3")
async def test_a_claim_whose_answer_was_lost_is_made_again(store: Store) -> None:
    """The runs belong to the node by then, and nobody else would find them."""
    old, new = Shop("1"), Shop("2")
    [run_id] = await queue(store, old, "1", 1)

    class Losing(StoreProxy):
        has_lost = False

        async def claim(self, node: str, limit: int, plans: Any = None) -> Any:
            claimed = await self.inner.claim(node, limit, plans)
            if claimed and not self.has_lost:
                self.has_lost = True
                raise StoreUnavailable("no answer")
            return claimed

    losing = Losing(store)
    async with new.node(losing):
        await wait_for_status(new.app.run(run_id), PAUSED)
    assert losing.has_lost


@pytest.mark.contract("WF-3", "MSG-3")
@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_run_goes_on_by_itself_if_its_definition_is_back_before_its_messages_die(
    store: Store, has_begun: bool
) -> None:
    old, new = Shop("1", limits=PATIENT), Shop("2", limits=PATIENT)
    run_id = await old.begun(store, "1") if has_begun else (await queue(store, old, "1", 1))[0]
    async with new.node(store):
        await new.app.run(run_id).signal("go", "on")
        await wait_for_status(new.app.run(run_id), PAUSED)
        async with old.node(store):
            assert await new.app.run(run_id).result() == "on by 1"
        assert await new.app.dead_letters() == []
        assert (await event_types(new.app.run(run_id))).count("RunResumed") == 1


@pytest.mark.contract("WF-3", "SIG-13")
async def test_a_run_without_its_definition_can_be_resumed_when_it_is_back(store: Store) -> None:
    """Resumed before, it is paused again."""
    old, new = Shop("1"), Shop("2")
    run_id = await old.begun(store, "1")
    async with new.node(store):
        run = new.app.run(run_id)
        await run.signal("go", "kept")
        await letters_of(new, run_id)
        await run.resume()
        await wait_for_event(run, "RunPaused", times=2)
    async with old.node(store, grace_s=None):  # which requeues nothing
        await old.app.run(run_id).resume()
        assert await old.app.run(run_id).result() == "kept by 1"


@pytest.mark.contract("WF-3", "WF-7", "SIG-13")
async def test_a_run_that_an_operator_has_paused_stays_paused_when_its_definition_is_back(store: Store) -> None:
    old, new = Shop("1"), Shop("2")
    run_id = await old.begun(store, "1")
    async with new.node(store):
        run = new.app.run(run_id)
        await run.signal("go", "kept")
        [letter] = await letters_of(new, run_id)
        await run.pause("not now")
        await wait_for_event(run, "SignalAccepted")
    async with old.node(store):
        run = old.app.run(run_id)
        await letter.requeue()
        await old.app.run(run_id).pause("still not", wait=True)  # a turn later, the letter has been handled
        assert (await run.snapshot()).status == PAUSED
        assert "RunResumed" not in await event_types(run)
        await run.resume()
        assert await run.result() == "kept by 1"


@pytest.mark.contract("WF-3", "SIG-13")
async def test_a_run_that_nobody_can_run_can_be_stopped(store: Store) -> None:
    old, new = Shop("1"), Shop("2")
    run_id = await old.begun(store, "1")
    async with new.node(store):
        await new.app.run(run_id).terminate("it is of no use any more")
        await wait_for_event(new.app.run(run_id), "RunCancelled")
        assert await store.find_orphaned(0) == []


@pytest.mark.contract("WF-3")
async def test_runs_that_wait_for_nothing_that_is_due_are_left_alone(store: Store) -> None:
    """A definition may be away for as long as nobody needs it."""
    old, new = Shop("1"), Shop("2")
    waiting, due = await old.begun(store, "1"), (await queue(store, old, "1", 1))[0]
    async with new.node(store):
        await wait_for_status(new.app.run(due), PAUSED)
        head = next(head for head in await store.find(RunQuery()) if head.run_id == waiting)
        assert (head.status, "RunPaused" in await event_types(new.app.run(waiting))) == (RUNNING, False)


HELD: dict[str, dict[str, Any]] = {
    "delayed": {},
    "approved": {"requires_approval": True},
    "with a time-out": {},
    "with limits": {"at_once": 1},
    "with limits and a time-out": {"at_once": 1},
}


@pytest.mark.contract("WF-3", "TMR-2", "SIG-13", "QUE-2")
@pytest.mark.parametrize("how", HELD)
async def test_a_run_that_was_held_is_treated_like_one_that_has_started(store: Store, how: str) -> None:
    """Once it is due, and no node has its version. One that has yet to get a place by its limits does not start."""
    old, new = Shop("1", **HELD[how]), Shop("2")
    async with old.node(store, takes_runs=False):
        timeout: dict[str, Any] = {"execution_timeout": timedelta(hours=1)} if "time-out" in how else {}
        run = await old.app.start(old.orders["1"], after=timedelta(milliseconds=1), **timeout)
        if how == "approved":
            await run.approve(actor="ann")
        await run.signal("go", "kept")
    async with new.node(store):
        [letter] = await letters_of(new, run.run_id)
        assert letter.record.reason == "definition missing"
        status = (await new.app.run(run.run_id).snapshot()).status
        assert status == ("PENDING" if "limits" in how else "PAUSED")
        if status == "PAUSED":
            event = await wait_for_event(new.app.run(run.run_id), "RunPaused")
            assert isinstance(event.data, e.RunPaused)
            assert event.data.error is not None
            assert event.data.error.code == "VersionMismatch"
    async with old.node(store, name="back again"):
        assert await old.app.run(run.run_id).result() == "kept by 1"


# --- settings


async def test_without_a_grace_or_without_runs_nobody_looks() -> None:
    shop = Shop("1")
    for options in (hf.NodeOptions(definition_grace_s=None), hf.NodeOptions(takes_runs=False)):
        assert DefinitionFilter("node-a", MemoryStore(), shop.app.registry, options).start() == []
    assert DefinitionFilter("node-a", MemoryStore(), shop.app.registry, hf.NodeOptions(takes_runs=False)).plans == ()


@pytest.mark.parametrize("grace_s", [0, -1.0, float("nan"), "1", 1e300])
def test_a_grace_that_is_none_is_refused(grace_s: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        hf.NodeOptions(definition_grace_s=grace_s)
    assert raised.value.details == {"field": "definition_grace_s"}
