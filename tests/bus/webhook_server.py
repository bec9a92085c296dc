"""A webhook receiver for tests: checks signatures, and fails as often as it is told to."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

KEY = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
MOST_SECONDS = 60.0


class Receiver:
    """What has arrived at a webhook, in order."""

    def __init__(self, failing: float = 0.0, seed: int = 1) -> None:
        self.failing = failing
        self.events: list[dict[str, Any]] = []
        self.begun = 0
        self.requests = 0
        self.status = 200
        self.answer_of: Callable[[dict[str, Any]], int] = lambda event: self.status
        self.unsigned = 0
        self.head = ""
        self.port = 0
        self.delay_s = 0.0
        self.padding = 0
        self._random = Random(seed)
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?x=1"

    def of(self, run_id: str) -> list[int]:
        """Return the numbers of a run's events in the order in which they first arrived."""
        return self.by_run().get(run_id, [])

    def by_run(self) -> dict[str, list[int]]:
        """Return the numbers of each run's events in the order in which they first arrived."""
        found: dict[str, dict[int, None]] = {}
        for event in self.events:
            found.setdefault(event["subject"], {})[int(event["sequence"])] = None
        return {run_id: list(numbers) for run_id, numbers in found.items()}

    def ids(self) -> dict[tuple[str, str], set[str]]:
        """Return the ids under which each event has arrived."""
        ids: dict[tuple[str, str], set[str]] = {}
        for event in self.events:
            ids.setdefault((event["subject"], event["sequence"]), set()).add(event["id"])
        return ids

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Receiver]:
        server = await asyncio.start_server(self._talk, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in list(self._open):
                writer.transport.abort()
            await asyncio.sleep(0)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.head = head
                fields = {
                    name.strip().lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:] if line)
                }
                body = await reader.readexactly(int(fields["content-length"]))
                self.begun += 1
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                status = self._take(fields, body)
                padding = b"x" * self.padding
                extra = "location: http://127.0.0.1:1/elsewhere\r\n" if 300 <= status < 400 else ""
                writer.write(f"HTTP/1.1 {status} X\r\n{extra}content-length: {len(padding)}\r\n\r\n".encode() + padding)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    def _take(self, fields: dict[str, str], body: bytes) -> int:
        self.requests += 1
        signed = f"{fields['webhook-id']}.{fields['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(KEY.removeprefix("whsec_"))
        expected = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        event = json.loads(body)
        if fields["webhook-signature"] != expected or fields["webhook-id"] != event["id"]:
            self.unsigned += 1
            return 401
        if self._random.random() < self.failing:
            return 503
        status = self.answer_of(event)
        if status < 300:
            self.events.append(event)
        return status


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(MOST_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
