"""Connections and event streams: what one address, token or tenant takes for itself, and what is left for others."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from socket import SO_RCVBUF, SOL_SOCKET
from typing import Any

import pytest

import holdfast as hf
from holdfast.run import RunHandle
from holdfast.service.auth.tokens import TokenAccess
from holdfast.service.context import make_service
from holdfast.service.http.protocol import FEW, SPARE, SPARE_PER_ADDRESS, ConnectionLimits
from holdfast.service.http.server import listening
from holdfast.service.options import ServiceOptions
from tests.service.in_process import MOST_SECONDS, InProcessServer, make_app
from tests.service.test_connections import connected
from tests.service.test_connections import parser as parser
from tests.service.test_server import socketed
from tests.service.token_callers import token_for

HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"
LIST = b"GET /v1/runs HTTP/1.1\r\nHost: x\r\n\r\n"


async def ask(port: int, request: bytes) -> tuple[int, dict[str, str], Any]:
    """Ask over a connection of its own, whose answer ends it or has a length; 0 if it is closed without one."""
    async with connected(port) as (reader, writer):
        writer.write(request)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, {}, None
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        return int(first.split(" ")[1]), headers, json.loads(body)


@asynccontextmanager
async def held(port: int, many: int) -> AsyncIterator[None]:
    """Hold so many connections that were answered once, and stay."""
    async with AsyncExitStack() as stack:
        for _ in range(many):
            reader, writer = await stack.enter_async_context(connected(port))
            writer.write(HEALTH)
            assert b" 200 " in await reader.readuntil(b"\r\n")
        yield


@pytest.mark.contract("API-4", "API-2")
@pytest.mark.parametrize("bound", ["connections", "connections_per_address"])
async def test_health_is_answered_when_there_is_no_place_left(parser: str, bound: str) -> None:
    options: dict[str, Any] = {bound: 5}
    async with socketed(**options) as (_, port):
        async with held(port, 5):
            status, headers, problem = await ask(port, LIST)
            assert (status, problem["code"]) == (503, "EngineError")
            assert headers["content-type"] == "application/problem+json"
            assert (headers["retry-after"], headers["connection"]) == ("1", "close")
            status, headers, health = await ask(port, HEALTH)
            assert (status, health["status"], headers["connection"]) == (200, "ok", "close")
        while (status := (await ask(port, LIST))[0]) != 200:
            assert status == 503, "it takes a moment to notice that they have gone"


@pytest.mark.contract("API-4")
async def test_spare_connections_are_few_and_end_soon(parser: str) -> None:
    async with socketed(connections=1) as (_, port), held(port, 1), AsyncExitStack() as stack:
        for _ in range(SPARE_PER_ADDRESS):
            reader, writer = await stack.enter_async_context(connected(port))
            writer.write(b"GET /v1/")  # and nothing more, for as long as it is let
        await asyncio.sleep(0)
        seen = {(await ask(port, HEALTH))[0] for _ in range(5)}
        assert seen == {0}
        assert await reader.read() == b"", "it is closed"
        assert (await ask(port, HEALTH))[0] in (0, 200)
        while (await ask(port, HEALTH))[0] != 200:
            pass


@pytest.mark.contract("API-4")
def test_one_address_leaves_places_for_others() -> None:
    limits = ConnectionLimits(1_000, 800)
    taken = [limits.acquire("greedy") for _ in range(1_000)]
    assert taken.count("requests") == 800
    assert taken.count("health") == SPARE_PER_ADDRESS
    more = [limits.acquire("second") for _ in range(1_000)]
    assert more.count("requests") == 100, "a tenth is kept for those with few"
    for number in range(10):
        mine = [limits.acquire(f"small-{number}") for _ in range(20)]
        assert mine.count("requests") == FEW
    while limits.taken < 1_000:
        assert limits.acquire(f"other-{limits.taken}") == "requests"
    purposes = [limits.acquire(f"late-{number}") for number in range(200)]
    assert purposes.count("requests") == 0
    assert purposes.count("health") == SPARE - 2 * SPARE_PER_ADDRESS - 10 * SPARE_PER_ADDRESS
    for _ in range(800):
        limits.release("greedy", "requests")
    assert limits.acquire("late") == "requests"


@asynccontextmanager
async def guarded_socket(**options: Any) -> AsyncIterator[tuple[InProcessServer, int]]:
    """Serve on a socket to those who have tokens."""
    app = make_app()
    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        service = make_service(app, ServiceOptions(port=0, **options), TokenAccess(app, 2.0))
        async with listening(service) as port:
            unused: Any = None
            yield InProcessServer(app, service, unused), port


def stream(token: str) -> bytes:
    """Return a request for an event stream."""
    return f"GET /v1/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


@pytest.mark.contract("API-4", "API-3")
async def test_streams_are_bounded_by_token_and_tenant(parser: str) -> None:
    async with guarded_socket(streams_per_token=2, streams_per_tenant=3) as (server, port):
        first, second = [await token_for(server, "viewer", tenant="acme", name=name) for name in ("ann", "bob")]
        other = await token_for(server, "viewer", tenant="other")
        async with AsyncExitStack() as stack:
            for token in (first, first, second):
                reader, writer = await stack.enter_async_context(connected(port))
                writer.write(stream(token))
                assert b" 200 " in await reader.readuntil(b"\r\n")
            for token, who in ((first, "token"), (second, "tenant acme")):
                status, headers, problem = await ask(port, stream(token))
                assert (status, problem["code"]) == (429, "RateLimited")
                assert who in problem["detail"]
                assert int(headers["retry-after"]) >= 1
            reader, writer = await stack.enter_async_context(connected(port))
            writer.write(stream(other))
            assert b" 200 " in await reader.readuntil(b"\r\n")
        while server.service.change_feeds.subscribers:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        async with connected(port) as (reader, writer):
            writer.write(stream(first))
            assert b" 200 " in await reader.readuntil(b"\r\n"), "those that have gone are not counted"


@pytest.mark.contract("API-4")
async def test_a_stream_that_is_refused_holds_no_place() -> None:
    async with guarded_socket(streams_per_token=1) as (server, port):
        token = await token_for(server, "viewer")
        for _ in range(3):
            bad = stream(token).replace(b"/v1/stream", b"/v1/runs/nowhere/stream")
            assert (await ask(port, bad))[0] == 404
        async with connected(port) as (reader, writer):
            writer.write(stream(token))
            assert b" 200 " in await reader.readuntil(b"\r\n")


@pytest.mark.contract("API-4")
async def test_a_reader_who_does_not_take_a_large_answer_is_dropped(parser: str) -> None:
    """And what is being sent to such readers is bounded for all together."""
    limits = hf.Limits(value_bytes=8_000_000)
    async with socketed(limits, stall_s=0.3, sending_bytes=5_000_000) as (service, port):
        app = service.app
        run = await app.runtime().start(
            app.registry.workflow("echo"), app.registry.workflow("echo").signature.pack((), {"value": "x" * 4_000_000})
        )
        await RunHandle(app.runtime(), run.run_id).result()
        request = f"GET /v1/runs/{run.run_id}/result HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        async with connected(port) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_RCVBUF, 4_096)  # else it may take all of it
            writer.write(request)
            while service.sending.bytes == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            status, headers, problem = await ask(port, request)
            assert (status, problem["code"], headers["retry-after"]) == (503, "EngineError", "1")
            while service.sending.bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert (await ask(port, request))[0] == 200
