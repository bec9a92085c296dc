"""A node that has failed, and one that was blocked: others go on with its runs, and nobody waits for nothing."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import EngineError, StoreUnavailable
from holdfast.store.port import CommitConflict, Committed, Turn
from holdfast.store.proxy import StoreProxy
from holdfast.testing.samples import signal
from tests.engine.harness import EngineVariant, store_with_virtual_time, wait_for_event

LEASE_MS = 150


def waiting_app() -> tuple[hf.App, Any]:
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        return await hf.wait_signal("go", str)

    return app, order


class Broken(StoreProxy):
    """A store with a mistake in it, from some moment on."""

    is_broken = False

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Commit, or fail in a way that no store should."""
        if self.is_broken:
            raise ZeroDivisionError("a mistake")
        answers: list[Committed | CommitConflict] = await self.inner.commit(turns)
        return answers


def has_failed() -> Any:
    return pytest.raises(EngineError, match="has failed: ZeroDivisionError: a mistake")


@pytest.mark.contract("OWN-3")
async def test_others_go_on_with_the_runs_of_a_node_whose_pump_has_failed(
    variant: EngineVariant, caplog: pytest.LogCaptureFixture
) -> None:
    (app, order), (other, _) = waiting_app(), waiting_app()
    async with variant.opened() as store:
        broken: Any = Broken(store)
        with has_failed():  # which the end of the node says once more
            async with variant.node(app, broken, lease_ms=LEASE_MS) as node:
                run = await app.start(order)
                await wait_for_event(run, "SignalWaiting")
                waiting = asyncio.create_task(run.result())
                broken.is_broken = True
                await store.deliver([signal(run.run_id, "go", "on")])
                for ask in (lambda: waiting, run.result, lambda: app.start(order)):
                    with has_failed():
                        await ask()
                assert isinstance(node.failure, EngineError)
                async with variant.node(other, store, lease_ms=LEASE_MS):
                    result = await other.run(run.run_id).result()
    assert result == "on"
    assert "executes no runs any more" in caplog.text


class Flaky(StoreProxy):
    """A store that cannot be reached for a while, but for reading, and counts how often it was asked to renew."""

    is_down = False
    renewals = 0

    async def renew(self, *asked: Any) -> int:
        """Renew, unless the store is down."""
        self.renewals += 1
        if self.is_down:
            raise StoreUnavailable("down")
        until: int = await self.inner.renew(*asked)
        return until


@pytest.mark.contract("OWN-3")
async def test_a_node_goes_on_renewing_after_a_renewal_that_failed(
    variant: EngineVariant, caplog: pytest.LogCaptureFixture
) -> None:
    app, order = waiting_app()
    async with variant.opened() as store:
        flaky: Any = Flaky(store)
        async with variant.node(app, flaky, lease_ms=90) as node:
            flaky.is_down = True
            failed = flaky.renewals
            while flaky.renewals < failed + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            flaky.is_down = False
            run = await app.start(order)
            await run.signal("go", "on")
            assert await run.result() == "on"
            assert node.failure is None
    assert "could not renew its lease" in caplog.text


# --- a lease that ran out


@pytest.mark.contract("OWN-1", "OWN-3")
async def test_starting_a_run_renews_a_lease_that_has_run_out(variant: EngineVariant) -> None:
    app, order = waiting_app()
    async with store_with_virtual_time(variant) as (store, clock):
        flaky: Any = Flaky(store)
        async with variant.node(app, flaky) as node:
            first = await app.start(order)
            await wait_for_event(first, "SignalWaiting")
            clock.advance(ms=60_000)
            before = flaky.renewals
            runs = await asyncio.gather(*(app.start(order) for _ in range(3)))
            assert flaky.renewals > before
            loaded = await store.load([run.run_id for run in runs])
            assert [run.head.lease_epoch for run in loaded if run is not None] == [1, 1, 1]
            for run in (first, *runs):
                await run.signal("go", "on")
                assert await run.result() == "on"
            assert node.failure is None


@pytest.mark.contract("OWN-3")
async def test_a_loop_that_was_blocked_for_longer_than_the_lease_says_so_and_goes_on(
    variant: EngineVariant, caplog: pytest.LogCaptureFixture
) -> None:
    app, order = waiting_app()
    with caplog.at_level(logging.WARNING, logger="holdfast.node"):
        async with variant.node(app, lease_ms=LEASE_MS):
            waiting = await app.start(order)
            await wait_for_event(waiting, "SignalWaiting")
            threading.Event().wait(2 * LEASE_MS / 1_000)  # the mistake: it does not await
            run = await app.start(order)
            for each in (run, waiting):
                await each.signal("go", "on")
                assert await each.result() == "on"
            while "was blocked for" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
