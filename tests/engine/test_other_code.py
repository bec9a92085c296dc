"""Runs whose history does not fit the code of a node: another node with other code takes them, now or when it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import PAUSED
from holdfast.program.fingerprint import fingerprint
from holdfast.store.port import LoadedRun, RunQuery, Store
from holdfast.store.proxy import StoreProxy
from tests.engine.harness import MOST_SECONDS, event_types, wait_for_event, wait_for_status


class Release:
    """An app with one workflow, which asks for these steps, by a patch or not, and then waits."""

    def __init__(self, *steps: str, patch: str = "") -> None:
        self.app = hf.App("shop")
        activities: dict[str, Any] = {}
        for name in ("charge", "ship", "post"):
            activities[name] = self.app.activity(name=name)(self._act)

        @self.app.workflow(name="order")
        async def order() -> str:
            if patch and hf.patched(patch):
                await activities["post"]("new")
            for step in steps:
                await activities[step](step)
            return await hf.wait_signal("go", str)

        self.order = order

    async def _act(self, what: str) -> str:
        return what

    @asynccontextmanager
    async def node(self, store: Store, **options: Any) -> AsyncIterator[Any]:
        """Run the app here."""
        chosen = hf.NodeOptions(**{"drain_s": 2.0, **options})
        async with asyncio.timeout(MOST_SECONDS), self.app.node(store, options=chosen) as node:
            yield node

    async def begun(self, store: Store) -> str:
        """Start a run, let it come to its wait, and stop the node."""
        async with self.node(store):
            run = await self.app.start(self.order)
            await wait_for_event(run, "SignalWaiting")
            return run.run_id


class Looking(StoreProxy):
    """Says when a node has looked for runs that fit its code."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.has_looked = asyncio.Event()
        self.delivered: list[Any] = []

    async def find(self, query: Any) -> Any:
        found = await self.inner.find(query)
        if isinstance(query, RunQuery) and not found:
            self.has_looked.set()
        return found

    async def deliver(self, requests: Any) -> Any:
        self.delivered += requests
        return await self.inner.deliver(requests)


@pytest.mark.contract("WF-2", "WF-3")
async def test_a_run_that_diverged_goes_on_by_itself_when_other_code_comes_up(store: Store) -> None:
    run_id = await Release("charge").begun(store)
    broken = Release("ship")
    async with broken.node(store):
        run = broken.app.run(run_id)
        await run.signal("go", "on")
        await wait_for_status(run, PAUSED)
    again, looking = Release("ship"), Looking(store)
    async with again.node(looking):
        run = again.app.run(run_id)
        before = await event_types(run)
        await looking.has_looked.wait()
        assert looking.delivered == [], "the same code is not tried again"
        assert await event_types(run) == before
    mended = Release("charge")
    async with mended.node(store):
        assert await mended.app.run(run_id).result() == "on"
        names = await event_types(mended.app.run(run_id))
        assert (names.count("RunPaused"), names.count("RunResumed")) == (1, 1)


class HeldPauses(StoreProxy):
    """Holds a pause up on its way into the store."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_held, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def commit(self, turns: Any) -> Any:
        if any(event.event_type == "RunPaused" for turn in turns for event in turn.events):
            self.is_held.set()
            await self.may_go_on.wait()
        return await self.inner.commit(turns)


@pytest.mark.contract("WF-2", "WF-3")
async def test_a_run_goes_on_though_the_node_with_other_code_has_looked_just_before_it_was_paused(store: Store) -> None:
    run_id = await Release("charge").begun(store)
    broken, held = Release("ship"), HeldPauses(store)
    mended, looking = Release("charge"), Looking(store)
    async with broken.node(held):
        await broken.app.run(run_id).signal("go", "on")
        await held.is_held.wait()
        async with mended.node(looking):
            await looking.has_looked.wait()
            held.may_go_on.set()
            assert await mended.app.run(run_id).result() == "on"


@pytest.mark.contract("WF-2", "WF-3")
@pytest.mark.parametrize("comes_up", ["before it ends", "after it has ended"])
async def test_a_run_goes_on_with_other_code_when_what_is_under_way_for_it_has_ended(
    store: Store, comes_up: str
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    def release(*steps: str) -> tuple[hf.App, Any]:
        app = hf.App("shop")

        async def act(what: str) -> str:
            if what == "pack":
                begun.set()
                await may_end.wait()
            return what

        acts = {name: app.activity(name=name)(act) for name in ("charge", "ship", "pack")}

        @app.workflow(name="order")
        async def order() -> list[str]:
            return [await acts[step](step) for step in steps]

        return app, order

    old, order = release("charge", "pack")
    async with asyncio.timeout(MOST_SECONDS), old.node(store, options=hf.NodeOptions(drain_s=0.0)):
        run_id = (await old.start(order)).run_id
        await begun.wait()
    begun.clear()
    broken, _ = release("ship", "pack")
    mended, _ = release("charge", "pack")
    looking = Looking(store)
    async with asyncio.timeout(MOST_SECONDS), broken.node(store):
        await begun.wait()  # the attempt that was lost is made again
        await wait_for_status(broken.run(run_id), PAUSED)
        if comes_up == "after it has ended":
            may_end.set()
            await wait_for_event(broken.run(run_id), "StepCompleted", times=2)
        async with mended.node(looking):
            await looking.has_looked.wait()
            may_end.set()
            assert await mended.run(run_id).result() == ["charge", "pack"]


@pytest.mark.contract("WF-2", "SIG-13")
async def test_a_run_that_an_operator_has_paused_meanwhile_stays_paused(store: Store) -> None:
    run_id = await Release("charge").begun(store)
    broken = Release("ship")
    async with broken.node(store):
        run = broken.app.run(run_id)
        await run.signal("go", "on")
        await wait_for_status(run, PAUSED)
        await run.pause()
    mended, looking = Release("charge"), Looking(store)
    async with mended.node(looking):
        run = mended.app.run(run_id)
        await looking.has_looked.wait()
        await run.signal("other")
        assert await run.status() is PAUSED
        await run.resume()
        assert await run.result() == "on"


def signing(tokens: list[str], first: str) -> tuple[hf.App, Any]:
    """Return an app whose workflow begins with one of two activities, and has another one completed later."""
    app = hf.App("signing")

    async def act() -> None: ...

    begins = app.activity(name=first)(act)

    @app.activity(retry=hf.Retry(max_attempts=1))
    async def sign() -> str:
        context = hf.activity_context()
        tokens.append(context.token)
        context.complete_later()

    @app.workflow(name="paper")
    async def paper() -> str:
        await begins()
        signed = asyncio.create_task(sign())
        answer: str = await hf.wait_signal("go", str)
        try:
            return await signed
        except hf.errors.ActivityFailed:
            return answer

    return app, paper


@pytest.mark.contract("WF-2", "WF-3")
async def test_a_step_that_fails_meanwhile_does_not_hide_that_the_run_diverged(store: Store) -> None:
    tokens: list[str] = []
    app, paper = signing(tokens, "print")
    async with asyncio.timeout(MOST_SECONDS), app.node(store):
        run_id = (await app.start(paper)).run_id
        await wait_for_event(app.run(run_id), "StepDetached")
    app, _ = signing(tokens, "copy")
    async with asyncio.timeout(MOST_SECONDS), app.node(store):
        run = app.run(run_id)
        await run.signal("go", "on")
        await wait_for_status(run, PAUSED)
        await app.fail_activity(tokens[0], "not acceptable")
        await wait_for_event(run, "StepFailed")
    app, _ = signing(tokens, "print")
    async with asyncio.timeout(MOST_SECONDS), app.node(store):
        assert await app.run(run_id).result() == "on"


class Hasty(StoreProxy):
    """The store of a node that is handed runs it cannot run; says when it has given one away."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.given: list[str] = []
        self.has_given = asyncio.Event()

    async def hand_over(self, node: str, run_ids: Any, to: str) -> list[str]:
        given: list[str] = await self.inner.hand_over(node, run_ids, to)
        self.given += given
        self.has_given.set()
        return given


class Slow(StoreProxy):
    """The store of a node that claims nothing before another one has given a run away."""

    def __init__(self, inner: Store, hasty: Hasty) -> None:
        super().__init__(inner)
        self.hasty = hasty

    async def claim(self, node: str, limit: int, plans: Any = None) -> list[LoadedRun]:
        claimed: list[LoadedRun] = await self.inner.claim(node, limit, plans) if self.hasty.has_given.is_set() else []
        return claimed


@pytest.mark.contract("WF-2", "WF-3", "OWN-1")
async def test_in_a_rolling_upgrade_an_old_node_gives_a_run_with_a_new_marker_to_a_new_one(store: Store) -> None:
    run_id = await Release("charge", patch="greeting").begun(store)
    old, new = Release("charge"), Release("charge", patch="greeting")
    hasty = Hasty(store)
    async with new.node(Slow(store, hasty), safety_poll_s=0.05), old.node(hasty):
        run = old.app.run(run_id)
        await run.signal("go", "on")
        assert await run.result() == "on"
        assert "RunPaused" not in await event_types(run)
    assert hasty.given == [run_id]


@pytest.mark.contract("WF-2", "WF-3")
async def test_a_run_that_fits_the_code_of_no_node_alive_is_paused_once(store: Store) -> None:
    run_id = await Release("charge").begun(store)
    one, two = Release("ship"), Release("post")
    async with one.node(store), two.node(store):
        run = one.app.run(run_id)
        await run.signal("go", "on")
        await wait_for_status(run, PAUSED)
        assert (await event_types(run)).count("RunPaused") == 1
    mended = Release("charge")
    async with mended.node(store):
        assert await mended.app.run(run_id).result() == "on"


@pytest.mark.contract("WF-3")
def test_a_fingerprint_is_of_the_code_and_of_what_it_refers_to() -> None:
    def made(number: int, *, other: bool = False) -> Any:
        def helper() -> int:
            return number

        async def flow() -> int:
            return helper()

        async def other_flow() -> int:
            return helper() + 1

        return other_flow if other else flow

    assert fingerprint(made(1)) == fingerprint(made(1))
    assert len({fingerprint(made(1)), fingerprint(made(2)), fingerprint(made(1, other=True))}) == 3
    releases = Release("charge"), Release("charge"), Release("ship"), Release("charge", patch="x")
    assert len({release.order.definition.fingerprint for release in releases}) == 3
