"""A proxy before an S3 server that fails as real ones do, in a process of its own.

Of all requests to objects a share fails: with 500 or 503, with a connection that is reset, or with no answer until the
caller gives up; before the request has reached the server, or after it was done. It can also plant what no server may
do: drop conditions of writes. They are signed, so such a request is signed again. Others pass through it unchanged.
This file is also the proxy's program. It ends when its standard input does: with the test session, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from asyncio import StreamReader, StreamWriter
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.s3_server import Endpoint, signature

ROOT = Path(__file__).parents[1]

FAULTS = ("500 before", "503 before", "500 after", "reset before", "reset after", "no answer after")
WEIGHTS = (4, 4, 4, 4, 4, 1)
"""An answer that never comes costs the caller its whole patience, so it is the rarest."""

CONDITIONS = (b"if-match", b"if-none-match")
PROBE = b"/probe/"
"""In the path of what the self-test writes."""


@dataclass(frozen=True)
class Weather:
    """What a proxy does: the share of requests that fail, and which conditions of writes it drops."""

    faults: float = 0.0
    seed: int = 0
    drops: str = ""
    """Empty, or the header (`if-match`, `if-none-match`) that no request reaches the server with."""
    drop_one_in: int = 0
    """Of so many conditions of writes one is dropped, but none of the self-test."""


class FaultProxy(Endpoint):
    """A proxy on 127.0.0.1, before another endpoint."""

    def __init__(self, behind: Endpoint, weather: Weather) -> None:
        super().__init__(secret=behind.secret)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault_proxy", behind.url.rpartition(":")[2], json.dumps(asdict(weather))],
            cwd=ROOT,
            env=os.environ | {"S3_SERVER_SECRET": behind.secret},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        assert port, "the proxy ended"
        self.url = f"http://127.0.0.1:{port}"

    def kill(self) -> dict[str, int]:
        """End it, and return how many requests it had, and what became of them."""
        said, _ = self._process.communicate("")
        found: dict[str, int] = json.loads(said)
        return found


# --- the proxy's process


class Proxy:
    """Passes requests on, and fails some of them."""

    def __init__(self, port: int, weather: Weather) -> None:
        self._port = port
        self._weather = weather
        self._rng = Random(weather.seed)
        self._conditions = 0
        self._open: set[StreamReader] = set()
        self.counts: dict[str, int] = {}

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer the requests of a connection."""
        server: tuple[StreamReader, StreamWriter] | None = None
        self._open.add(reader)  # nothing else holds a connection that waits for its caller to give up
        try:
            while (request := await _read_message(reader, is_answer=False)) is not None:
                server = server or await asyncio.open_connection("127.0.0.1", self._port)
                if not await self._pass(request, reader, writer, *server):
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            self._open.discard(reader)
            for each in (writer, *(server or ())[1:]):
                assert isinstance(each, StreamWriter)
                each.close()

    async def _pass(
        self, request: bytes, reader: StreamReader, writer: StreamWriter, from_server: StreamReader, to_server: Any
    ) -> bool:
        """Pass a request on, and its answer back; return whether the connection is still good."""
        fault = self._fault(request)
        self._count(fault or "passed")
        kind, _, when = fault.rpartition(" ")
        answer = _refusal(kind)
        if when != "before":
            to_server.write(self._changed(request))
            await to_server.drain()
            done = await _read_message(from_server, is_answer=True, is_head=request.startswith(b"HEAD "))
            if done is None:
                return False
            answer = answer if fault else done
        if kind == "no answer":
            await reader.read(1)  # until the caller has given up
            return False
        if kind == "reset":
            _reset(writer)
            return False
        writer.write(answer)
        await writer.drain()
        return True

    def _fault(self, request: bytes) -> str:
        path = request.split(b" ", 2)[1].partition(b"?")[0]
        is_bucket = path.count(b"/") < 2 and request.startswith(b"PUT ")
        if is_bucket or self._rng.random() >= self._weather.faults:
            return ""
        return self._rng.choices(FAULTS, WEIGHTS)[0]

    def _changed(self, request: bytes) -> bytes:
        head, _, body = request.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        dropped = [line for line in lines if first.startswith(b"PUT ") and self._is_dropped(first, line)]
        if not dropped:
            return request
        self._count("dropped a condition")
        kept = [line for line in lines if line not in dropped]
        return b"\r\n".join([first, *_signed(first, kept)]) + b"\r\n\r\n" + body

    def _is_dropped(self, first: bytes, line: bytes) -> bool:
        name = line.partition(b":")[0].strip().lower()
        if name not in CONDITIONS:
            return False
        if self._weather.drops:
            return name == self._weather.drops.encode()
        if PROBE in first or not self._weather.drop_one_in:
            return False
        self._conditions += 1
        return self._conditions % self._weather.drop_one_in == 0

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def _signed(first: bytes, lines: list[bytes]) -> list[bytes]:
    """Return the headers of a request with a signature of those that are left."""
    headers = {
        name.lower().decode(): value.strip().decode() for name, _, value in (line.partition(b":") for line in lines)
    }
    said = dict(part.strip().split("=", 1) for part in headers["authorization"].partition(" ")[2].split(","))
    names = [name for name in said["SignedHeaders"].split(";") if name in headers]
    scope = said["Credential"].partition("/")[2]
    method, target, _ = first.decode().split(" ")
    path, _, query = target.partition("?")
    chosen, payload = {name: headers[name] for name in names}, headers["x-amz-content-sha256"]
    proof = signature(os.environ["S3_SERVER_SECRET"], method, path, query, chosen, scope, payload)
    credential = said["Credential"]
    proven = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={';'.join(names)}, Signature={proof}"
    rest = [line for line in lines if not line.lower().startswith(b"authorization:")]
    return [*rest, b"authorization: " + proven.encode()]


def _refusal(kind: str) -> bytes:
    words = "Slow Down" if kind == "503" else "Internal Server Error"
    text = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>a fault</Message></Error>"
    return (
        f"HTTP/1.1 {kind} {words}\r\nContent-Type: application/xml\r\nContent-Length: {len(text)}\r\n\r\n".encode()
        + text
    )


def _reset(writer: StreamWriter) -> None:
    """Close a connection so that the other side finds it reset."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


async def _read_message(reader: StreamReader, *, is_answer: bool, is_head: bool = False) -> bytes | None:
    """Return a whole request or answer, or None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as end:
        if end.partial:
            raise
        return None
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if is_answer and (is_head or head.split(b" ", 2)[1] in (b"204", b"304")):
        return head
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        return head + await _read_chunks(reader)
    return head + await reader.readexactly(int(fields.get(b"content-length", b"0")))


async def _read_chunks(reader: StreamReader) -> bytes:
    read = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        read += line + await reader.readexactly(size + 2)
        if size == 0:
            return read


async def main() -> None:
    """Serve until standard input ends."""
    proxy = Proxy(int(sys.argv[1]), Weather(**json.loads(sys.argv[2])))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 24)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(over.set)), daemon=True).start()
    await over.wait()
    sys.stdout.write(json.dumps(proxy.counts))


if __name__ == "__main__":
    asyncio.run(main())
