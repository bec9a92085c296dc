"""A way to the server that can be cut: between a statement and its answer, or altogether."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from holdfast.store.postgres.address import parse_address


class Proxy:
    """Passes on what is said to and by the server, until it is told otherwise."""

    def __init__(self, address: str) -> None:
        self._address = address
        place = parse_address(address).dsn.partition("://")[2].partition("/")[0]
        host, _, port = place.rpartition("@")[2].rpartition(":")
        self._server = (host or "127.0.0.1", int(port))
        self._listening: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.loses_answer_to: bytes | None = None
        self.lost = 0
        self.port = 0

    async def __aenter__(self) -> Proxy:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        """The store's address by this way."""
        scheme, _, rest = self._address.partition("://")
        place, slash, more = rest.partition("/")
        user, at, _ = place.rpartition("@")
        return f"{scheme}://{user}{at}127.0.0.1:{self.port}{slash}{more}"

    async def listen(self) -> None:
        """Let others in, at the same port as before."""
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Let nobody in, and break every connection."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self._break_all()

    def _break_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._server)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, server_writer}
        asked: list[bytes] = []
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(
                self._pass_on(reader, server_writer, asked, is_answer=False),
                self._pass_on(server_reader, writer, asked, is_answer=True),
            )
        for end in (writer, server_writer):
            end.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: list[bytes], *, is_answer: bool
    ) -> None:
        while data := await reader.read(2**16):
            if not is_answer:
                asked.append(data)
                del asked[:-20]
            elif self.loses_answer_to is not None and self.loses_answer_to in b"".join(asked):
                self.loses_answer_to = None
                self.lost += 1
                self._break_all()
                return
            writer.write(data)
            await writer.drain()
        writer.transport.abort()
