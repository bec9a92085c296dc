"""A turn that takes longer than the lease does not cost it: a thread renews while the loop is held up, for a while."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import LeaseExpired
from holdfast.settings import load_settings
from holdfast.store.open import open_store

LEASE_MS = 600
BLOCKED_S = 3.0


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a store that two threads can share."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/leases.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


class Thief:
    """Another node, in a thread of its own, that claims whatever it can."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._should_end = threading.Event()
        self.claimed: list[str] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._steal()))
        self._thread.start()

    async def _steal(self) -> None:
        store = await open_store(load_settings({}, store=self._address))
        while not self._should_end.is_set():
            await store.renew("thief", 60_000)
            self.claimed += [run.head.run_id for run in await store.claim("thief", 10)]
            await asyncio.sleep(0.05)
        await store.release("thief")
        await store.close()

    def end(self) -> None:
        """Stop, and give everything back."""
        self._should_end.set()
        self._thread.join()


def blocking_app() -> tuple[hf.App, Any]:
    """Return an app whose workflow blocks the loop for several leases."""
    app = hf.App("slow")

    @app.workflow
    async def grind() -> str:
        threading.Event().wait(BLOCKED_S)
        return "ground"

    return app, grind


@pytest.mark.slow
@pytest.mark.contract("OWN-1", "OWN-3")
@pytest.mark.parametrize("blocked_s", [60.0, 0.0], ids=["guarded", "unguarded"])
async def test_a_turn_that_takes_longer_than_the_lease_keeps_its_run(address: str, blocked_s: float) -> None:
    app, grind = blocking_app()
    options = hf.NodeOptions(lease_ms=LEASE_MS, turn_s=None, blocked_s=blocked_s)
    async with asyncio.timeout(60), app.node(address, options=options) as node:
        run = await app.start(grind, run_id="run-1")  # with an id it is taken after it was created
        thief = Thief(address)
        try:
            while len(await run.events()) == 1 and not thief.claimed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(thief.end)
        assert bool(thief.claimed) == (blocked_s == 0.0)
        assert await run.result() == "ground"
        assert node._guard is not None
        assert bool(node._guard.extensions) == (blocked_s != 0.0)
    for thread in threading.enumerate():
        if thread.name.startswith("lease of"):
            await asyncio.to_thread(thread.join, 30)
            assert not thread.is_alive()


@pytest.mark.contract("OWN-1")
async def test_only_a_lease_that_is_current_is_extended(address: str) -> None:
    store: Any = await open_store(load_settings({}, store=address))
    await asyncio.to_thread(store.extend_lease, "node-a", 60_000)
    assert (await store.stats()).leases == {}
    until = await store.renew("node-a", 10_000)
    await asyncio.to_thread(store.extend_lease, "node-a", 60_000)
    assert (await store.stats()).leases["node-a"] > until + 40_000_000
    await store.renew("web#1", 10_000, None, True)
    await store.renew("web#2", 10_000, None, True)
    await asyncio.to_thread(store.extend_lease, "web#1", 60_000)
    with pytest.raises(LeaseExpired):
        await store.claim("web#1", 1)
    await store.close()
