"""Streams as workflows use them: what they write is committed with the turn. For activities see `engine`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from msgspec import Raw

from holdfast.core import codec
from holdfast.core.streams import StreamChunks
from holdfast.errors import InvalidInput, NotDurable
from holdfast.limits import STREAMS_PER_WRITER
from holdfast.program.coroutine import CoroutineProgram, current_program

SEGMENT_BYTES = 64 * 1024
"""The approximate number of bytes of chunks that are stored together."""

SEGMENT_CHUNKS = 2_000
"""The maximum number of chunks that are stored together: readers decode all of them at once."""

Write = tuple[str, bytes, bool]
"""The name of a stream, a chunk (empty if there is none), and whether the stream is closed after it."""


class Stream(ABC):
    """A stream of the run to write to."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    async def write(self, value: Any) -> None:
        """Append a chunk: any value that can be a result. It waits if too many chunks are not yet durable."""

    @abstractmethod
    def write_blocking(self, value: Any) -> None:
        """Append a chunk from an activity that runs in a thread."""

    @abstractmethod
    async def resume(self) -> int:
        """Continue after the chunks of this step's last attempt, and return how many there are."""

    @abstractmethod
    def close(self) -> None:
        """Close the stream for its readers when all chunks are durable. After that nothing can be written to it."""


class WorkflowStream(Stream):
    """A stream that a workflow writes to: its chunks are durable with the commit of its turn."""

    def __init__(self, program: CoroutineProgram, name: str) -> None:
        super().__init__(name)
        self._program = program
        self._is_closed = False
        names = program.stream_names = program.stream_names or set()
        names.add(name)
        if len(names) > STREAMS_PER_WRITER:
            raise InvalidInput(f"a workflow writes to at most {STREAMS_PER_WRITER} streams between two rotations")

    async def write(self, value: Any) -> None:
        self._write(value)

    def _write(self, value: Any) -> None:
        program = self._inside()
        chunk = program.definition.values.encode(value)
        self._note(bytes(bounded_chunk(chunk, program.limits.stream_chunk_bytes, self.name)), closes=False)

    def write_blocking(self, value: Any) -> None:
        self._write(value)

    async def resume(self) -> int:
        raise NotDurable("a workflow's chunks are part of its turns: there is nothing to resume")

    def close(self) -> None:
        self._inside()
        self._note(b"", closes=True)
        self._is_closed = True

    def _inside(self) -> CoroutineProgram:
        if current_program() is not self._program:
            raise NotDurable(f"stream {self.name!r} belongs to the workflow's own code: this is not")
        if self._is_closed:
            raise InvalidInput(f"stream {self.name!r} is closed")
        return self._program

    def _note(self, chunk: bytes, *, closes: bool) -> None:
        program = self._program
        if not program.is_replaying:
            program.stream_writes = program.stream_writes or []
            program.stream_writes.append((self.name, chunk, closes))


def bounded_chunk(chunk: Raw, most_bytes: int, name: str) -> Raw:
    """Return a chunk, or raise `PayloadTooLarge`."""
    return codec.bounded(chunk, most_bytes, f"a chunk of stream {name!r}", "Limits.stream_chunk_bytes")


def chunks_of(writes: Iterable[Write]) -> tuple[StreamChunks, ...]:
    """Return what a turn appends: the chunks of each stream in segments."""
    made: list[StreamChunks] = []
    by_name: dict[str, list[bytes]] = {}
    sizes: dict[str, int] = {}

    def put(name: str, closes: bool) -> None:
        chunks = by_name.pop(name, [])
        sizes.pop(name, None)
        made.append(StreamChunks(name=name, count=len(chunks), body=body_of(chunks), closes=closes))

    for name, chunk, closes in writes:
        if chunk:
            by_name.setdefault(name, []).append(chunk)
            sizes[name] = sizes.get(name, 0) + len(chunk) + 1
        if closes or sizes.get(name, 0) >= SEGMENT_BYTES or len(by_name.get(name, ())) >= SEGMENT_CHUNKS:
            put(name, closes)
    for name in list(by_name):
        put(name, False)
    return tuple(made)


def body_of(chunks: Iterable[bytes]) -> Raw:
    """Return the body of a segment."""
    return Raw(b"[" + b",".join(chunks) + b"]")
