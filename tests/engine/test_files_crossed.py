"""How many files of the package a request crosses: each of them is one that its reader has to open.

Counted with a profiler on the event loop's thread, over warm runs on SQLite, with everything that the node does
meanwhile. The smallest of some counts is taken, because a renewal of the lease may fall into any of them; on a busy
machine into many.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

import holdfast as hf
from holdfast.run import RunHandle
from holdfast.service.auth.tokens import TokenAccess, make_token
from holdfast.service.context import make_service
from holdfast.service.http.front import Front
from holdfast.workflow import Workflow
from tests.engine.harness import wait_for_event

PACKAGE = str(Path(hf.__file__).parent) + "/"
ROUNDS = 20

START_FILES = 25
SIGNAL_FILES = 32
REST_START_FILES = 32
TOKEN_FILES = 2

Order = Workflow[[], str]


async def files_of(request: Callable[[], Awaitable[Any]]) -> set[str]:
    """Do a request and return the files that were crossed meanwhile."""
    crossed: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            crossed.add(file.removeprefix(PACKAGE))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        await request()
    finally:
        sys.setprofile(before)
    return crossed


async def check(request: Callable[[], Awaitable[Any]], between: Callable[[], Awaitable[None]], most: int) -> None:
    """Do a request some times; fail with the smallest list of files that one has crossed if it is always too long."""
    found: list[set[str]] = []
    while not found or (len(found) < ROUNDS and len(found[-1]) > most):
        await between()
        found.append(await files_of(request))
    files = min(found, key=len)
    assert len(files) <= most, f"{len(files)} files, at most {most}:\n" + "\n".join(sorted(files))


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[tuple[hf.App, Order]]:
    app = hf.App("crossing")

    @app.workflow
    async def order() -> str:
        return await hf.wait_signal("go", str)

    async with app.node(f"sqlite:///{tmp_path}/crossing.db"):
        run = await app.start(order)  # what is done once is done now
        await run.signal("go", "warm")
        await run.result()
        yield app, order


async def test_files_of_a_start(shop: tuple[hf.App, Order]) -> None:
    app, order = shop
    await check(lambda: app.start(order), _at_rest, START_FILES)


async def test_files_of_a_signal_until_the_result(shop: tuple[hf.App, Order]) -> None:
    app, order = shop
    runs: list[RunHandle[str]] = []

    async def begin() -> None:
        runs.append(await app.start(order))
        await wait_for_event(runs[-1], "SignalWaiting")
        await _at_rest()

    async def signal() -> None:
        await runs[-1].signal("go", "x")
        assert await runs[-1].result() == "x"

    await check(signal, begin, SIGNAL_FILES)


@pytest.mark.parametrize("with_token", [False, True])
async def test_files_of_a_start_over_rest(shop: tuple[hf.App, Order], with_token: bool) -> None:
    app, _ = shop
    token, _ = await make_token(app.runtime().store, "ann", role="engineer")
    service = make_service(app, authenticate=TokenAccess(app, 60.0)) if with_token else make_service(app)
    headers = {"authorization": f"Bearer {token}"}
    transport = httpx.ASGITransport(Front(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://shop", headers=headers) as http:

        async def start() -> None:
            assert (await http.post("/v1/runs", json={"workflow": "order"})).status_code == 201

        await start()
        await check(start, _at_rest, REST_START_FILES + (TOKEN_FILES if with_token else 0))


async def _at_rest() -> None:
    """Give the node the time to do what it has to do."""
    for _ in range(20):
        await asyncio.sleep(0.002)
