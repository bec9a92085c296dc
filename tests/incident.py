"""An incident for the tests: a bad deployment, a dead API, a bank that does not answer, overdue tasks, and a run that
ends its process, all at once, behind a real server that is started again each time it ends.

What an operator has is a token with that role. `mend_outside` is what others do meanwhile: the API and the bank are
back, and mended code is deployed.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import holdfast as hf
from holdfast.client import Client
from holdfast.client.transports import Unreachable
from holdfast.core.state import RUNNING
from tests.cli.command_process import MOST_SECONDS, environment, running

ORDERS, MAILS, PAYMENTS, REVIEWS, PARCELS = 30, 50, 4, 5, 3
ALL = ORDERS + MAILS + PAYMENTS + REVIEWS + PARCELS + 1

SHOP = """
import os
from datetime import timedelta
from pathlib import Path

import holdfast as hf

app = hf.App("shop")
IS_BAD, IS_DEAD = Path("bad").exists(), Path("dead")


@app.activity
async def reserve(order: str) -> dict[str, str]:
    return {"order": order}


@app.activity(retry=hf.Retry(max_attempts=100, initial_ms=3_600_000))
async def send(order: str) -> str:
    if IS_DEAD.exists():
        raise ConnectionError("mail.example.com: connection refused")
    return "sent"


@app.activity(retry=hf.Retry(max_attempts=1), on_failure="pause")
async def charge(order: str) -> str:
    if IS_DEAD.exists():
        raise TimeoutError("bank.example.com: no answer")
    return "charged"


@app.activity(retry=hf.Retry(max_attempts=1))
async def pack(order: str) -> str:
    if IS_DEAD.exists():
        raise ValueError("no label")
    return "packed"


@app.workflow
async def order(order_id: str) -> str:
    found = await reserve(order_id)
    return found["shelf"] if IS_BAD else "by hand"


@app.workflow
async def mail(order_id: str) -> str:
    return await send(order_id)


@app.workflow
async def payment(order_id: str) -> str:
    return await charge(order_id)


@app.workflow
async def parcel(order_id: str) -> str:
    return await pack(order_id)


@app.workflow
async def review(order_id: str) -> bool:
    return await hf.task("review", bool, payload={"order": order_id}, due=timedelta(milliseconds=1))


@app.workflow
async def thumbnail() -> str:
    if IS_BAD:
        os._exit(139)
    return "small"
"""


class Incident:
    """A folder with the shop and its store, the address of its server, and the token of an operator."""

    def __init__(self, folder: Path, address: str, token: str) -> None:
        self.folder = folder
        self.address = address
        self.token = token
        self._mended = asyncio.Event()
        self._up = asyncio.Event()

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the operator types commands."""
        return environment(HOLDFAST_SERVER=self.address, HOLDFAST_TOKEN=self.token)

    async def mend_outside(self) -> None:
        """Bring the API and the bank back, deploy mended code, and wait until its server is up."""
        (self.folder / "dead").unlink()
        (self.folder / "bad").unlink()
        self._up.clear()
        self._mended.set()
        async with asyncio.timeout(MOST_SECONDS):
            await self._up.wait()

    async def supervise(self) -> None:
        """Run the server, and start it again when it has ended; with other code, when that is deployed."""
        port = self.address.rpartition(":")[2]
        settings = {"HOLDFAST_STORE": "sqlite:///shop.db", "HOLDFAST_LIMITS__LOST_TURNS": "3"}
        while True:
            async with running(self.folder, "server", "shop.py", "--port", port, **settings) as process:
                await process.until("is served at")
                self._up.set()
                ended = asyncio.create_task(process.ended())
                deployed = asyncio.create_task(self._mended.wait())
                try:
                    await asyncio.wait({ended, deployed}, return_when=asyncio.FIRST_COMPLETED)
                    if not ended.done():
                        self._mended.clear()
                        process.send(signal.SIGTERM)
                        await ended
                finally:
                    ended.cancel()
                    deployed.cancel()


async def _fill(client: Client) -> None:
    counts = {"order": ORDERS, "mail": MAILS, "payment": PAYMENTS, "review": REVIEWS, "parcel": PARCELS}
    for name, count in counts.items():
        starts = [
            client.runs.start(workflow=name, input={"order_id": f"{name}-{number}"}, run_id=f"{name}-{number:02}")
            for number in range(count)
        ]
        await asyncio.gather(*starts)
    while (await client.runs.count(status=RUNNING)).total > MAILS + REVIEWS:
        pass  # the others have failed, or are paused


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@asynccontextmanager
async def incident(folder: Path) -> AsyncIterator[Incident]:
    """Let everything go wrong, and return what an operator has."""
    (folder / "shop.py").write_text(SHOP)
    (folder / "bad").touch()
    (folder / "dead").touch()
    app = hf.App("tokens")
    async with app.node(f"sqlite:///{folder}/shop.db"), Client(app) as client:
        made = await client.tokens.create(name="ann", role="operator")
        starter = await client.tokens.create(name="shop", role="engineer")
    here = Incident(folder, f"http://127.0.0.1:{_free_port()}", made.token)
    supervised = asyncio.create_task(here.supervise())
    try:
        async with asyncio.timeout(MOST_SECONDS), Client(here.address, token=starter.token) as client:
            await here._up.wait()
            await _fill(client)
            await _start_the_deadly(client)
        yield here
    finally:
        supervised.cancel()
        await asyncio.gather(supervised, return_exceptions=True)


async def _start_the_deadly(client: Client) -> None:
    """Start the run that ends its process, and wait until it is set aside."""
    status = ""
    while status != "PAUSED":
        with suppress(Unreachable):  # the server is gone, and is started again
            await client.runs.start(workflow="thumbnail", run_id="thumbnail")
            status = (await client.runs.get(run_id="thumbnail")).status
