"""Readers of streams in this process. Readers at the same position of a stream share one read.

A reader requests the chunks after the last one that it has. If there are none, it waits until the store notifies it
that something was written or has finished, or for `safety_poll_s`. Requests of readers that arrive together share one
call.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from msgspec import Raw, Struct, json

from holdfast.core import codec
from holdfast.core.instants import Instant
from holdfast.core.streams import StreamPage, StreamRead
from holdfast.engine.batcher import Batcher
from holdfast.errors import EngineError
from holdfast.store.decisions import no_such_run
from holdfast.store.port import Store

READS_AT_ONCE = 500
PART_BYTES = 128 * 1024
"""About how many bytes of a stream are read at a time: a slow reader keeps them in memory."""

REST_S = 0.01
"""How long to wait after a hint before the next one counts: writers send more often than readers need."""

REST = 3
"""The same as a multiple of the last read's duration, so that reading takes only a share of a process's time."""

_bodies = json.Decoder(list[Raw])


class StreamChunk(Struct, frozen=True):
    """A chunk of a stream, as a reader gets it.

    `step_id` and `attempt` name the writer: an attempt of an activity, or the workflow, whose step is empty. With
    `restarted_from` the step has started over with this chunk: its chunks from that number on are no longer valid.
    """

    seq: int
    """Its number in the stream, from 1."""
    value: Any
    """The written value."""
    step_id: str
    attempt: int
    at: Instant
    """When it was written, by the clock of the store."""
    restarted_from: int | None = None


class StreamPart:
    """A part of a stream: the chunks after a number. Readers that requested the same part share it."""

    def __init__(self, page: StreamPage, after: int) -> None:
        self._segments = page.segments
        self._after = after
        self.head = page.head
        self.is_finished = page.is_finished
        """Whether the run had finished before the chunks were read."""
        self.last_seq = after
        for segment in page.segments:
            self.last_seq = segment.first_seq + segment.count - 1
        self.derived: Any = None
        """What readers have derived from the chunks, shared by all of them."""

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return self.last_seq - self._after

    @property
    def is_last(self) -> bool:
        """Whether no chunk follows these: the run has finished, or the stream is closed."""
        return self.last_seq >= self.head.last_seq and (self.is_finished or self.head.is_closed)

    def chunks(self) -> Iterator[StreamChunk]:
        """Yield the chunks, their values as JSON. Each segment is decoded when it is reached.

        If a segment cannot be decrypted here, each of its chunks has the encrypted segment as its value.
        """
        for segment in self._segments:
            is_sealed = codec.is_sealed(segment.body)
            values = [segment.body] * segment.count if is_sealed else _bodies.decode(segment.body)
            for place, value in enumerate(values):
                seq = segment.first_seq + place
                if seq > self._after:
                    restarted = segment.restarted_from if place == 0 else None
                    yield StreamChunk(seq, value, segment.step_id, segment.attempt, segment.at, restarted)


class StreamHub:
    """The shared state of one process's readers."""

    def __init__(self, store: Store, poll_s: float) -> None:
        self._store = store
        self._poll_s = poll_s
        self._readers: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._took_s = 0.0
        self._reads: Batcher[StreamRead, StreamPart] = Batcher(
            self._read, lambda _: _stopped(), READS_AT_ONCE, "read streams"
        )
        self.reads = 0
        """How often the store was read."""

    @property
    def readers(self) -> int:
        """How many readers there are."""
        return len(self._readers)

    def enter(self, wake: asyncio.Event) -> None:
        """From now on, set this event whenever something may have been written, or have finished."""
        if self._is_closed:
            raise _stopped()
        self._readers.add(wake)
        if self._task is None:
            self._task = asyncio.create_task(self._hear(), name="hints of streams")

    def leave(self, wake: asyncio.Event) -> None:
        """Forget a reader. After the last one, stop listening."""
        self._readers.discard(wake)
        if not self._readers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End all readers with an error."""
        self._is_closed = True
        self._reads.close()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._wake()

    async def read(self, run_id: str, name: str, after: int) -> StreamPart:
        """Return a part of a stream. Readers that ask while another read is in progress are answered together."""
        if self._is_closed:
            raise _stopped()
        return await self._reads.ask(StreamRead(run_id=run_id, name=name, after=after, most_bytes=PART_BYTES))

    async def _hear(self) -> None:
        listener = self._store.wakeups.listen("streams")
        try:
            while True:
                await listener.wait(self._poll_s)
                self._wake()
                await asyncio.sleep(max(REST_S, REST * self._took_s))
        finally:
            listener.close()

    def _wake(self) -> None:
        for wake in self._readers:
            wake.set()

    async def _read(self, asked: list[StreamRead]) -> list[StreamPart | Exception]:
        loop = asyncio.get_running_loop()
        different, began = list(dict.fromkeys(asked)), loop.time()
        self.reads += 1
        pages = await self._store.read_streams(different)
        self._took_s = loop.time() - began
        found = {
            each: no_such_run(each.run_id) if page is None else StreamPart(page, each.after)
            for each, page in zip(different, pages, strict=True)
        }
        return [found[each] for each in asked]


def _stopped() -> EngineError:
    return EngineError("the node was stopped before the stream had ended")


class StreamReader:
    """The chunks of a stream after a number, until the stream is closed or its run has finished. Use `async for`."""

    def __init__(self, hub: StreamHub, run_id: str, name: str, after: int, decode: Callable[[Raw], Any]) -> None:
        self._hub = hub
        self._decode = decode
        self.run_id = run_id
        self.name = name
        self.last_seq = after
        """The number of the last chunk that was returned, from which another reader can continue."""
        self.dropped = 0
        """How many chunks the stream had no room for, as far as it was read."""

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """Yield the chunks as they arrive."""
        wake = asyncio.Event()
        self._hub.enter(wake)
        try:
            while True:
                wake.clear()
                part = await self._hub.read(self.run_id, self.name, self.last_seq)
                self.dropped = part.head.dropped
                for chunk in part.chunks():
                    codec.refuse_sealed(chunk.value)
                    self.last_seq = chunk.seq
                    yield StreamChunk(
                        *(chunk.seq, self._decode(chunk.value), chunk.step_id, chunk.attempt, chunk.at),
                        chunk.restarted_from,
                    )
                if part.is_last:
                    return
                if not part.count:
                    await wake.wait()
        finally:
            self._hub.leave(wake)
