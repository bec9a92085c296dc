"""Streams that activities write to: chunks are buffered here briefly and sent to the store together.

All writers of a node share one call at a time. A chunk is sent after `LINGER_S` at the latest, or when there are enough
for a segment. A writer waits if its chunks are not stored fast enough. A call whose outcome is unknown is repeated with
the same chunks: the store recognises them by their position.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core.streams import Appended, StreamAppend
from holdfast.errors import HoldfastError, InvalidInput, StoreError
from holdfast.program.streams import SEGMENT_BYTES, SEGMENT_CHUNKS, Stream, body_of
from holdfast.store.port import Refused, Store
from holdfast.store.types import STREAMS
from holdfast.store.validation import lacks

LINGER_S = 0.02
RETRY_S = 0.2
BUFFER_BYTES = 4 * SEGMENT_BYTES
"""How many bytes a writer buffers before it waits for the store."""
BUFFER_CHUNKS = 2 * SEGMENT_CHUNKS
"""The maximum number of buffered chunks. Code that only writes yields to others by then."""

WRITERS_AT_ONCE = 200

logger = logging.getLogger("holdfast.streams")


class StreamSender:
    """Sends the stream chunks of one node's activities."""

    def __init__(self, store: Store, node: str, most_bytes: int) -> None:
        self.store = store
        self.node = node
        self.most_bytes = most_bytes
        self._waiting: dict[ActivityStream, None] = {}
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise if the store does not support streams."""
        if STREAMS in self.store.capabilities.lacking:
            raise lacks(self.store, STREAMS, "a stream")

    def send(self, writer: "ActivityStream", *, is_urgent: bool) -> None:
        """Send what a writer has buffered, soon or immediately."""
        self._waiting[writer] = None
        if is_urgent:
            self._urgent.set()
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="streams")

    def close(self) -> None:
        """Stop sending."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _work(self) -> None:
        try:
            while self._waiting:
                try:
                    async with asyncio.timeout(LINGER_S):
                        await self._urgent.wait()
                except TimeoutError:
                    pass
                self._urgent.clear()
                await self._send()
        finally:
            self._task = None

    async def _send(self) -> None:
        known = list(self._waiting)[:WRITERS_AT_ONCE]
        for writer in known:
            del self._waiting[writer]
        writers = [writer for writer in known if writer.has_more]
        batch = [(writer, writer.take()) for writer in writers]
        items = [given for _, given in batch]
        while True:
            try:
                answers = await self.store.append_streams(items)
                break
            except StoreError:
                logger.exception("node %s could not store chunks of streams; retrying", self.node)
                await asyncio.sleep(RETRY_S)
            except HoldfastError as problem:
                for writer in writers:
                    writer.fail(problem)
                return
        for (writer, given), answer in zip(batch, answers, strict=True):
            writer.settle(given, answer)
            if writer.has_more:
                self.send(writer, is_urgent=writer.is_urgent)


class StreamAccess(Struct, frozen=True):
    """How the activities of one executor reach their streams. `epoch_of` is None for jobs from queues."""

    sender: StreamSender
    epoch_of: Callable[[str], int | None] | None = None


class ActivityStream(Stream):
    """A stream that one attempt of an activity writes to."""

    def __init__(
        self,
        sender: StreamSender,
        template: StreamAppend,
        loop: asyncio.AbstractEventLoop,
        encode: Callable[[Any], Raw],
    ) -> None:
        super().__init__(template.name)
        self._sender = sender
        self._template = template
        self._loop = loop
        self._encode = encode
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._position = 0
        self._under_way = 0
        self._resumes = False
        self._is_closed = False
        self._closes = False
        self._has_written = False
        self._problem: HoldfastError | None = None
        self._moved = asyncio.Event()
        self._is_reported_full = False
        self.is_flushing = False

    async def write(self, value: Any) -> None:
        chunk = bytes(self._encode(value))
        self._check()
        self._has_written = True
        self._chunks.append(chunk)
        self._size += len(chunk) + 1
        self._sender.send(self, is_urgent=self.is_urgent)
        while self._size >= BUFFER_BYTES or len(self._chunks) >= BUFFER_CHUNKS:
            await self._settled()

    def write_blocking(self, value: Any) -> None:
        asyncio.run_coroutine_threadsafe(self.write(value), self._loop).result()

    async def resume(self) -> int:
        if self._has_written:
            raise InvalidInput(f"stream {self.name!r}: this attempt has written already; resume before")
        self._resumes = self._has_written = True
        self._sender.send(self, is_urgent=True)
        while self._resumes:
            await self._settled()
        return self._position

    def close(self) -> None:
        self._check()
        self._is_closed = self._closes = True
        self._loop.call_soon_threadsafe(lambda: self._sender.send(self, is_urgent=True))

    async def flush(self) -> None:
        """Wait until everything that was written is durable, or cannot become so."""
        self.is_flushing = True
        while self.has_more and self._problem is None:
            self._sender.send(self, is_urgent=True)
            self._moved.clear()
            await self._moved.wait()

    @property
    def has_more(self) -> bool:
        """Whether there are chunks to send."""
        return bool(self._chunks) or self._closes or self._resumes

    @property
    def is_urgent(self) -> bool:
        """Whether its chunks should be sent without waiting for more."""
        is_full = self._size >= SEGMENT_BYTES or len(self._chunks) >= SEGMENT_CHUNKS
        return is_full or self._closes or self.is_flushing

    def take(self) -> StreamAppend:
        """Return the chunks to send next."""
        if self._resumes:
            self._under_way = 0
            return replace(self._template, resumes=True)
        chunks, size = list[bytes](), 0
        for chunk in self._chunks:
            chunks.append(chunk)
            size += len(chunk) + 1
            if size >= SEGMENT_BYTES or len(chunks) >= SEGMENT_CHUNKS:
                break
        self._under_way = len(chunks)
        closes = self._closes and len(chunks) == len(self._chunks)
        given = replace(self._template, position=self._position, count=len(chunks), body=body_of(chunks))
        return replace(given, closes=closes) if closes else given

    def settle(self, given: StreamAppend, answer: Appended | Refused) -> None:
        """Note that the taken chunks are durable, or why they never will be."""
        if self._problem is not None:  # the stream was closed meanwhile
            return
        if isinstance(answer, Refused):
            self.fail(answer.error)
            return
        if given.resumes:
            self._resumes, self._position = False, answer.position
        for _ in range(given.count):
            self._size -= len(self._chunks.popleft()) + 1
        self._position += given.count
        if given.closes:
            self._closes = False
        if answer.head.dropped and not self._is_reported_full:
            self._is_reported_full = True
            logger.warning("run %s: stream %r is full; further chunks are dropped", given.run_id, given.name)
        self._moved.set()

    def fail(self, problem: HoldfastError) -> None:
        """Give up: nothing that is written here is stored any more."""
        self._problem = problem
        self._chunks.clear()
        self._size, self._closes, self._resumes = 0, False, False
        self._moved.set()

    async def _settled(self) -> None:
        self._moved.clear()
        await self._moved.wait()
        if self._problem is not None:
            raise self._problem

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem
        if self._is_closed:
            raise InvalidInput(f"stream {self.name!r} is closed")
