"""Streams in the reference model."""

from collections.abc import Iterable, Sequence

from holdfast.core.instants import Instant
from holdfast.core.streams import (
    Appended,
    NamedStream,
    StreamAppend,
    StreamChunks,
    StreamHead,
    StreamPage,
    StreamRead,
    StreamSegment,
    StreamWriter,
)
from holdfast.store.port import Refused
from holdfast.store.streams import EMPTY, PAGE_SEGMENTS, StreamBatch


class Streams:
    """The streams of one run."""

    def __init__(self) -> None:
        self._heads: dict[str, StreamHead] = {}
        self._writers: dict[tuple[str, str], StreamWriter] = {}
        self._segments: dict[str, list[StreamSegment]] = {}

    def append(self, given: StreamAppend, most_bytes: int, now: Instant) -> Appended | Refused:
        """Append what an attempt writes."""
        batch = self._batch(most_bytes, now)
        answer = batch.append(0, given)
        self._keep(batch)
        return answer

    def write(self, run_id: str, all_given: Iterable[StreamChunks], most_bytes: int, now: Instant) -> None:
        """Append what a turn writes."""
        batch = self._batch(most_bytes, now)
        for given in all_given:
            batch.write(0, run_id, given)
        self._keep(batch)

    def _batch(self, most_bytes: int, now: Instant) -> StreamBatch:
        batch = StreamBatch(most_bytes, now)
        batch.heads = {(0, name): head for name, head in self._heads.items()}
        batch.writers = {((0, name), step_id): writer for (name, step_id), writer in self._writers.items()}
        return batch

    def _keep(self, batch: StreamBatch) -> None:
        self._heads = {name: head for (_, name), head in batch.heads.items()}
        self._writers = {(name, step_id): writer for ((_, name), step_id), writer in batch.writers.items()}
        for (_, name), segment in batch.segments:
            self._segments.setdefault(name, []).append(segment)

    def named(self, run_id: str, after: str) -> list[NamedStream]:
        """Return the streams with a later name, ordered by name."""
        return [
            NamedStream(run_id=run_id, name=name, head=head)
            for name, head in sorted(self._heads.items())
            if name > after
        ]

    def read(self, asked: StreamRead, is_finished: bool) -> StreamPage:
        """Return a part of a stream."""
        kept, after = self._segments.get(asked.name, ()), asked.after
        segments = [each for each in kept if each.first_seq + each.count > after + 1]
        return StreamPage(
            run_id=asked.run_id,
            name=asked.name,
            head=self._heads.get(asked.name, EMPTY),
            segments=tuple(bounded(segments, asked.most_bytes)),
            is_finished=is_finished,
        )


def bounded(segments: Sequence[StreamSegment], most_bytes: int) -> list[StreamSegment]:
    """Return segments up to the one at which they reach this size, and at most one page of them."""
    size, taken = 0, list[StreamSegment]()
    for segment in segments[:PAGE_SEGMENTS]:
        taken.append(segment)
        size += len(segment.body)
        if size >= most_bytes:
            break
    return taken
