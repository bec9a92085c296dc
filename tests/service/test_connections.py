"""Connections that send too much before it is a request, over a real socket, with either parser of uvicorn."""

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec import Raw
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from holdfast.service.http import server
from holdfast.service.http.exchange import HEAD_BYTES
from holdfast.service.http.protocol import connection_class
from tests.service.test_server import socketed

PARSERS = {"h11": "H11Protocol", "httptools": "HttpToolsProtocol"}
HEAD = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n"
MOST_BYTES = 8 * 1024 * 1024
"""More than what the operating system takes on behalf of a server that has stopped reading."""


@pytest.fixture(params=PARSERS)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Serve with one parser."""
    name: str = request.param
    chosen = getattr(importlib.import_module(f"uvicorn.protocols.http.{name}_impl"), PARSERS[name])
    monkeypatch.setattr(server, "connection_class", lambda head_s, **more: connection_class(head_s, chosen, **more))
    return name


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a service."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def send_until_cut(writer: asyncio.StreamWriter, first: bytes, more: bytes) -> int:
    """Send something without end until nobody takes it any more; return how much was taken."""
    writer.write(first)
    sent = 0
    try:
        while sent < MOST_BYTES:
            writer.write(more)
            sent += len(more)
            await writer.drain()
    except ConnectionError:
        pass
    return sent


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"GET /", b"a" * 65_536),
        (HEAD + b"X-A: ", b"a" * 65_536),
        (HEAD, b"X-A: b\r\n" * 8_192),
        (b"POST /rpc HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;", b"a" * 65_536),
    ],
    ids=["address", "header", "headers", "chunk extension"],
)
async def test_a_head_without_end_is_cut_short(parser: str, first: bytes, more: bytes) -> None:
    async with socketed() as (_, port), connected(port) as (_, writer):
        assert await send_until_cut(writer, first, more) < MOST_BYTES


@pytest.mark.contract("API-2")
async def test_a_head_without_end_behind_a_request_under_way_is_not_kept(parser: str) -> None:
    async with socketed() as (service, port), connected(port) as (_, writer):
        handle = await service.app.runtime().start(service.app.registry.workflow("patient"), Raw(b"{}"))
        first = f"GET /v1/runs/{handle.run_id}/result?wait_s=15 HTTP/1.1\r\nHost: x\r\n\r\n".encode() + HEAD + b"X-A: "
        with suppress(TimeoutError):  # one that reads nothing before the answer is given leaves it to the socket
            async with asyncio.timeout(0.5):
                assert await send_until_cut(writer, first, b"a" * 65_536) < MOST_BYTES


async def test_large_bodies_and_many_requests_are_no_head(parser: str) -> None:
    async with socketed() as (_, port), connected(port) as (reader, writer):
        value = b'"' + b"a" * (HEAD_BYTES * 4) + b'"'
        body = b'{"jsonrpc":"2.0","id":1,"method":"nothing","params":{"a":%b}}' % value
        head = b"POST /rpc HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
            body
        )
        for _ in range(3):
            writer.write(head + body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert b"-32601" in await reader.readuntil(b"}}")
        many = 2 * HEAD_BYTES // len(HEAD)
        writer.write((HEAD + b"\r\n") * many)
        for _ in range(many):
            await reader.readuntil(b'"time":')


class Parser:
    """A parser that has a whole head at each empty line, as httptools has, and keeps what comes before it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.cycle = None
        self.pipeline = [1, 2]
        self.transport: Any = None
        self.refusals: list[str] = []
        self.is_closing = lambda: bool(self.refusals)
        self.flow = self
        self.is_reading = False

    def pause_reading(self) -> None:
        self.is_reading = False

    def on_response_complete(self) -> None:
        self.is_reading = True
        self.pipeline.pop()

    def connection_made(self, transport: Any) -> None:
        self.transport = self

    def connection_lost(self, exc: Exception | None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def data_received(self, data: bytes) -> None:
        for _ in range(data.count(b"\r\n\r\n")):
            self.on_headers_complete()
        if data.startswith(b"body"):
            self.on_body(data)

    def on_headers_complete(self) -> None:
        """Do nothing."""

    def on_body(self, body: bytes) -> None:
        """Do nothing."""

    def send_400_response(self, text: str) -> None:
        self.refusals.append(text)


async def test_what_a_parser_keeps_is_counted() -> None:
    connection: Any = connection_class(60.0, Parser)()
    connection.connection_made(connection)
    for _ in range(100):
        connection.data_received(b"a" * 1_000 + b"\r\n\r\n")
        connection.data_received(b"body" + b"a" * HEAD_BYTES)
    assert connection.refusals == []
    for _ in range(HEAD_BYTES // 1_000 + 5):
        connection.data_received(b"a" * 1_000)
    assert connection.refusals == ["The head of the request is too large."]
    connection.connection_lost(None)
    assert connection.pipeline == []


async def test_nothing_is_read_while_whole_requests_wait_for_an_answer() -> None:
    connection: Any = connection_class(60.0, Parser)()
    connection.connection_made(connection)
    connection.on_response_complete()
    assert (connection.pipeline, connection.is_reading) == ([1], False)
    connection.on_response_complete()
    assert (connection.pipeline, connection.is_reading) == ([], True)


def test_the_installed_parser_is_the_one_that_is_used() -> None:
    assert issubclass(connection_class(1.0), AutoHTTPProtocol)


async def answered(port: int, request: bytes) -> tuple[int, bytes]:
    """Send one request; return the status, and all that is answered until the connection is closed."""
    async with asyncio.timeout(60), connected(port) as (reader, writer):
        writer.write(request)
        text = await reader.read()
        return int(text.split(b" ")[1]), text


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Content-Length: 4\r\nContent-Length: 40\r\n",
    ],
    ids=["length first", "encoding first", "two lengths"],
)
async def test_a_body_whose_end_is_in_two_places_is_refused_and_nothing_behind_it_is_read(
    parser: str, head: bytes
) -> None:
    smuggled = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"
    async with socketed() as (_, port):
        request = b"POST /rpc HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + head + b"\r\n0\r\n\r\n"
        status, text = await answered(port, request + smuggled)
        assert status == 400
        assert text.count(b"HTTP/1.1 ") == 1, "what stands behind it is no request"


@pytest.mark.contract("API-2")
@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/health?" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"X-A: " + b"a" * HEAD_BYTES + b"\r\n\r\n",
        HEAD + b"X-A: b\r\n" * (HEAD_BYTES // 7) + b"\r\n",
    ],
    ids=["address", "header", "headers"],
)
async def test_a_head_that_arrives_at_once_is_not_larger_than_others(parser: str, head: bytes) -> None:
    async with socketed() as (_, port):
        assert (await answered(port, head))[0] == 400
        usual = HEAD + b"X-A: " + b"a" * (HEAD_BYTES // 2) + b"\r\nConnection: close\r\n\r\n"
        assert (await answered(port, usual))[0] == 200
