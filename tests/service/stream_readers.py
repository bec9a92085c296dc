"""Readers of event streams, over a real socket, and the service that they read from."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from holdfast.app import App
from holdfast.service.context import Authenticate, Service, make_service, open_access
from holdfast.service.http.server import listening
from holdfast.service.live.sse import Parser, Piece
from holdfast.service.options import ServiceOptions
from holdfast.store.port import Store
from tests.service.in_process import MOST_SECONDS, make_app

QUICK = ServiceOptions(port=0, is_open=True, watch_poll_s=0.05, heartbeat_s=5.0, list_rest_s=0.01)


class Served(Struct, frozen=True):
    """A service behind a socket."""

    app: App
    service: Service
    port: int
    http: httpx.AsyncClient

    async def start(self, workflow: str, **input: Any) -> str:
        """Start a run, and return its id."""
        response = await self.http.post("/v1/runs", json={"workflow": workflow, "input": input})
        assert response.status_code == 201, response.text
        return str(response.json()["run_id"])

    async def send(self, run_id: str, name: str, payload: Any = None) -> None:
        """Send a signal."""
        response = await self.http.post(f"/v1/runs/{run_id}/signals/{name}", json={"payload": payload})
        assert response.status_code == 202, response.text

    async def history(self, run_id: str) -> list[dict[str, Any]]:
        """Return a run's events, as REST has them."""
        items: list[dict[str, Any]] = []
        while page := (await self.http.get(f"/v1/runs/{run_id}/events?after={len(items)}")).json()["items"]:
            items += page
        return items

    @asynccontextmanager
    async def reading(self, path: str, **headers: str) -> AsyncIterator["Reading"]:
        """Open an event stream."""
        async with self.http.stream("GET", path, headers=headers) as response:
            yield Reading(response)


class Reading:
    """One who reads an event stream. Comments are passed over, and counted."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.comments = 0
        self._pieces = self._read()

    async def _read(self) -> AsyncIterator[Piece]:
        parser = Parser()
        async for chunk in self.response.aiter_raw():
            for piece in parser.feed(chunk):
                if piece.data:
                    yield piece
                else:
                    self.comments += 1

    async def next(self) -> tuple[str, Any]:
        """Return the next piece: its event and its data."""
        piece = await anext(self._pieces)
        return piece.event, msgspec.json.decode(piece.data)

    async def until(self, is_it: Callable[[str, Any], bool]) -> list[tuple[str, Any]]:
        """Return what comes, up to a certain piece."""
        read: list[tuple[str, Any]] = []
        while not read or not is_it(*read[-1]):
            read.append(await self.next())
        return read

    async def rest(self) -> list[tuple[str, Any]]:
        """Return everything that comes, to the end."""
        return [(piece.event, msgspec.json.decode(piece.data)) async for piece in self._pieces]


@asynccontextmanager
async def served(
    store: str | Store = "memory://",
    *,
    app: App | None = None,
    options: ServiceOptions = QUICK,
    authenticate: Authenticate = open_access,
) -> AsyncIterator[Served]:
    """Serve an app behind a socket."""
    app = app or make_app()
    async with asyncio.timeout(MOST_SECONDS), app.node(store):
        service = make_service(app, options, authenticate)
        async with (
            listening(service) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=MOST_SECONDS) as http,
        ):
            yield Served(app, service, port, http)


async def settled(is_so: Callable[[], bool]) -> None:
    """Wait until something is so that nobody tells of."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
