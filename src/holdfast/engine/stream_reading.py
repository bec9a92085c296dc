"""Readers of streams in this process. They share what is read: readers at one place of a stream cost one read.

A reader asks for what comes after the last chunk that it has. If there is nothing, it waits for a hint of the store
that something was written or has finished, or `safety_poll_s`. All that readers ask for at the same time is one call.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from msgspec import Raw, Struct, json

from holdfast.core import codec
from holdfast.core.instants import Instant
from holdfast.core.streams import StreamHead, StreamPage, StreamRead
from holdfast.engine.batcher import Batcher
from holdfast.errors import EngineError, PayloadUnreadable
from holdfast.store.decisions import no_such_run
from holdfast.store.port import Store

READS_AT_ONCE = 500
REST_S = 0.01
"""How long to wait after a hint before the next one counts: writers send more often than readers need."""

_bodies = json.Decoder(list[Raw])


class StreamChunk(Struct, frozen=True):
    """A chunk of a stream, as a reader gets it.

    `step_id` and `attempt` say who wrote it: an attempt of an activity, or the workflow, whose step is empty. With
    `restarted_from` the step has begun anew with this chunk: what it wrote from that number on does not count any more.
    """

    seq: int
    value: Any
    step_id: str
    attempt: int
    at: Instant
    restarted_from: int | None = None


class _Part(Struct, frozen=True):
    """What was read of a stream, its values not yet decoded."""

    chunks: tuple[StreamChunk, ...]
    head: StreamHead
    is_finished: bool


class StreamHub:
    """What the readers of one process share."""

    def __init__(self, store: Store, poll_s: float) -> None:
        self._store = store
        self._poll_s = poll_s
        self._readers = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._reads: Batcher[StreamRead, _Part] = Batcher(
            self._read, lambda _: _stopped(), READS_AT_ONCE, "read streams"
        )
        self.hints = 0
        """How many hints there were that something may have changed."""

    def enter(self) -> None:
        """Begin to listen for a reader."""
        if self._is_closed:
            raise _stopped()
        self._readers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._hear(), name="hints of streams")

    def leave(self) -> None:
        """Stop listening with the last reader."""
        self._readers -= 1
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
        self._wake(_stopped())

    async def read(self, asked: StreamRead) -> _Part:
        """Return a part of a stream."""
        return await self._reads.ask(asked)

    async def changed(self, hints: int) -> None:
        """Wait until there have been more hints than these."""
        if self.hints == hints:
            if self._is_closed:
                raise _stopped()
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    async def _hear(self) -> None:
        listener = self._store.wakeups.listen("streams")
        try:
            while True:
                await listener.wait(self._poll_s)
                self.hints += 1
                self._wake()
                await asyncio.sleep(REST_S)
        finally:
            listener.close()

    def _wake(self, problem: EngineError | None = None) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                if problem is None:
                    future.set_result(None)
                else:
                    future.set_exception(problem)

    async def _read(self, asked: list[StreamRead]) -> list[_Part | Exception]:
        different = list(dict.fromkeys((each.run_id, each.name, each.after) for each in asked))
        pages = await self._store.read_streams([StreamRead(run_id=r, name=n, after=a) for r, n, a in different])
        found: dict[tuple[str, str, int], _Part | Exception] = {}
        for key, page in zip(different, pages, strict=True):
            try:
                found[key] = no_such_run(key[0]) if page is None else _part_of(page, key[2])
            except PayloadUnreadable as problem:
                found[key] = problem
        return [found[each.run_id, each.name, each.after] for each in asked]


def _stopped() -> EngineError:
    return EngineError("the node was stopped before the stream had ended")


def _part_of(page: StreamPage, after: int) -> _Part:
    chunks: list[StreamChunk] = []
    for segment in page.segments:
        codec.refuse_sealed(segment.body)
        for place, value in enumerate(_bodies.decode(segment.body)):
            seq = segment.first_seq + place
            if seq > after:
                restarted = segment.restarted_from if place == 0 else None
                chunks.append(StreamChunk(seq, value, segment.step_id, segment.attempt, segment.at, restarted))
    return _Part(tuple(chunks), page.head, page.is_finished)


class StreamReader:
    """The chunks of a stream, from after a number on, until it is closed or its run has finished: `async for`."""

    def __init__(self, hub: StreamHub, run_id: str, name: str, after: int, decode: Callable[[Raw], Any]) -> None:
        self._hub = hub
        self._decode = decode
        self.run_id = run_id
        self.name = name
        self.last_seq = after
        """The number of the last chunk that was returned: where another reader can go on."""
        self.dropped = 0
        """How many chunks the stream had no room for, as far as was read."""

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """Yield the chunks as they come."""
        self._hub.enter()
        try:
            while True:
                hints = self._hub.hints
                part = await self._hub.read(StreamRead(run_id=self.run_id, name=self.name, after=self.last_seq))
                self.dropped = part.head.dropped
                for chunk in part.chunks:
                    self.last_seq = chunk.seq
                    yield StreamChunk(
                        *(chunk.seq, self._decode(chunk.value), chunk.step_id, chunk.attempt, chunk.at),
                        chunk.restarted_from,
                    )
                if part.chunks:
                    continue
                if part.is_finished or part.head.is_closed:
                    return
                await self._hub.changed(hints)
        finally:
            self._hub.leave()
