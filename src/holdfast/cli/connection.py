"""The connection of a command: to a server over HTTP, or to a store directly. Both have the same operations."""

import asyncio
import getpass
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from cyclopts import Group, Parameter

from holdfast.app import App
from holdfast.cli.app_loader import load_app, settings_at
from holdfast.client.calls import Calls
from holdfast.client.transports import Http, InProcess, Transport
from holdfast.clock import SystemIds, SystemRng
from holdfast.core.timing import Retry
from holdfast.errors import InvalidInput, NotFound, RateLimited, StoreUnavailable
from holdfast.service.context import Principal
from holdfast.service.operations import DOWNLOADS, OPERATIONS
from holdfast.service.operations.streams import follow_run, follow_stream
from holdfast.store.open import is_new, open_existing

DEFAULT_SERVER = "http://127.0.0.1:8321"
ANSWER_S = 45.0
"""How long an answer may take, in addition to the requested waiting time. A server times out before that."""

ONCE = Retry(max_attempts=1)
"""A command is not retried: its user sees the error, and decides."""

PATIENTLY = Retry(max_attempts=8, initial_ms=100, most_ms=5_000)
"""How often to reconnect to a broken stream: long enough for a server to restart."""

BULK_TRIES = 5
BULK_WAIT_MS = 60_000
"""The interval and the time limit of retries when a server limits the rate of a large operation's parts."""

SHARED = Group("Server or store, and output", sort_key=100)


class Connection:
    """Calls operations of the server or the store that the target names."""

    def __init__(self, transport: Transport) -> None:
        ids, rng = SystemIds(), SystemRng()
        self._calls = Calls(transport, ONCE, ids, rng)
        self._streams = Calls(transport, PATIENTLY, ids, rng)

    async def __call__(self, name: str, ask: dict[str, Any]) -> Any:
        """Return the answer of an operation as plain values; raise the error that refuses it."""
        if name not in OPERATIONS:
            raise NotFound(f"there is no operation {name!r}: `holdfast call` lists them", operation=name)
        return await self._calls.call(OPERATIONS[name], ask, Any)

    async def patiently(self, name: str, ask: dict[str, Any]) -> Any:
        """Return the response of one of many calls; a call that was rate limited is retried."""
        for _ in range(BULK_TRIES):
            try:
                return await self(name, ask)
            except RateLimited as problem:
                wait_ms = problem.details.get("retry_after_ms", 1_000)
                await asyncio.sleep(min(max(wait_ms, 100), BULK_WAIT_MS) / 1_000)
        return await self(name, ask)

    async def download(self, name: str, ask: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the bytes with which an operation answers, as they arrive."""
        async with aclosing(self._calls.download(DOWNLOADS[name], ask)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def events(self, run_id: str, after: int) -> AsyncGenerator[Any, None]:
        """Yield the events of a run after a number, as they arrive, to its end."""
        await self("runs.get", {"run_id": run_id})  # this fails immediately, while a stream would be retried
        async with aclosing(self._streams.stream(follow_run, {"run_id": run_id, "after": after})) as events:
            async for event in events:
                yield msgspec.json.decode(msgspec.json.encode(event))

    async def chunks(self, run_id: str, name: str, after: int) -> AsyncGenerator[Any, None]:
        """Yield the chunks of a run's stream after a number, as they arrive, to its end."""
        ask = {"run_id": run_id, "name": name, "after": after}
        await self("streams.read", {**ask, "limit": 1})  # this fails immediately, while a stream would be retried
        async with aclosing(self._streams.stream(follow_stream, ask)) as chunks:
            async for chunk in chunks:
                yield msgspec.json.decode(msgspec.json.encode(chunk))


@Parameter(name="*", group=SHARED)
@dataclass(frozen=True)
class Target:
    """The options of every command that calls an operation."""

    server: Annotated[
        str | None, Parameter(help=f"The address of the server; otherwise HOLDFAST_SERVER, else {DEFAULT_SERVER}.")
    ] = None
    token: Annotated[str | None, Parameter(help="Your access token for the server; otherwise HOLDFAST_TOKEN.")] = None
    store: Annotated[
        str | None,
        Parameter(
            help="The address of a store, to work on it without a server; otherwise HOLDFAST_STORE, "
            "unless HOLDFAST_SERVER is set."
        ),
    ] = None
    app: Annotated[
        str | None, Parameter(help="Without a server, the app, such as shop.py: starting a workflow needs its code.")
    ] = None
    json: Annotated[bool, Parameter(negative="", show_default=False, help="Answer with JSON.")] = False


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[Connection]:
    """Open the connection that the target names: arguments first, then the environment."""
    if target.server is not None and (target.store is not None or target.app is not None):
        raise InvalidInput("--server uses HTTP, --store and --app do not: give one or the other")
    environment = os.environ
    server = target.server
    if server is None and target.store is None and target.app is None:
        server = environment.get("HOLDFAST_SERVER")
        if server is None and "HOLDFAST_STORE" not in environment:
            server = DEFAULT_SERVER
    if server is None:
        async with _in_process(target) as connection:
            yield connection
        return
    transport = Http(server, target.token or environment.get("HOLDFAST_TOKEN"), ANSWER_S)
    try:
        yield Connection(transport)
    finally:
        await transport.close()


@asynccontextmanager
async def _in_process(target: Target) -> AsyncIterator[Connection]:
    settings = settings_at(target.store)
    app = load_app(target.app) if target.app is not None else App("holdfast")
    try:
        store = await open_existing(settings)
    except StoreUnavailable as problem:
        if not is_new(settings.store):
            raise
        message = f"{problem.message} (make one with `holdfast store migrate --store ADDRESS`, or name another)"
        raise StoreUnavailable(message, **problem.details) from problem
    try:
        async with app.connect(store):
            transport = InProcess(app, Principal(name=user_name(), is_admin=True, token_id=f"os-user:{user_name()}"))
            try:
                yield Connection(transport)
            finally:
                await transport.close()
    finally:
        await store.close()


def user_name() -> str:
    """Return the name of the user of the operating system."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return "operator"
