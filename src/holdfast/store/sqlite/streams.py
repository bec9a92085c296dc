"""Streams in the file."""

import sqlite3
from collections.abc import Sequence

from holdfast.core.instants import Instant
from holdfast.core.state import RunStatus
from holdfast.core.streams import Appended, NamedStream, StreamAppend, StreamPage, StreamRead
from holdfast.limits import Limits
from holdfast.store import decisions, port, validation
from holdfast.store.streams import (
    EMPTY,
    HEAD,
    PAGE_SEGMENTS,
    SEGMENT,
    WRITER,
    StreamBatch,
    head_of,
    named_stream_of,
    segment_of,
    writer_of,
)

_RUN = "SELECT run_no, status, finished_at IS NOT NULL, lease_epoch FROM runs WHERE run_id = ?"
_JOB = "SELECT taken_by, next_attempt FROM jobs WHERE run_no = ? AND step_id = ? AND job IS NOT NULL"
_HEAD = "SELECT last_seq, size, dropped, is_closed FROM streams WHERE run_no = ? AND name = ?"
_WRITER = "SELECT attempt, epoch, first_seq, count FROM stream_writers WHERE run_no = ? AND name = ? AND step_id = ?"
_SEGMENTS = f"""
SELECT {SEGMENT.removeprefix("name, ")} FROM stream_segments WHERE run_no = ?1 AND name = ?2 AND first_seq >= coalesce(
    (SELECT max(first_seq) FROM stream_segments WHERE run_no = ?1 AND name = ?2 AND first_seq <= ?3 + 1), 0)
    AND first_seq + count > ?3 + 1
ORDER BY first_seq LIMIT {PAGE_SEGMENTS}
"""
_FIND = f"""
SELECT {HEAD} FROM streams WHERE run_no = (SELECT run_no FROM runs WHERE run_id = ?) AND name > ? ORDER BY name LIMIT ?
"""
_PUT_HEAD = f"INSERT OR REPLACE INTO streams (run_no, {HEAD}) VALUES (?, ?, ?, ?, ?, ?)"
_PUT_WRITER = f"INSERT OR REPLACE INTO stream_writers (run_no, {WRITER}) VALUES (?, ?, ?, ?, ?, ?, ?)"
_PUT_SEGMENT = f"INSERT INTO stream_segments (run_no, {SEGMENT}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


def append(
    db: sqlite3.Connection, items: Sequence[StreamAppend], limits: Limits, now: Instant
) -> list[Appended | port.Refused]:
    """Append what attempts write."""
    batch = StreamBatch(limits.stream_bytes, now)
    answers = [_append(db, batch, given) for given in items]
    put(db, batch)
    return answers


def _append(db: sqlite3.Connection, batch: StreamBatch, given: StreamAppend) -> Appended | port.Refused:
    problem = validation.check_append(given)
    if problem is not None:
        return port.Refused(problem)
    run = db.execute(_RUN, (given.run_id,)).fetchone()
    fence, number = None, 0
    if run is not None:
        number = run[0]
        job = db.execute(_JOB, (number, given.step_id)).fetchone() if given.epoch is None else None
        fence = decisions.StreamFence(RunStatus(run[1]), bool(run[2]), run[3], *(job or ()))
    refusal = decisions.fenced(given, fence)
    if refusal is not None:
        return port.Refused(refusal)
    _read(db, batch, number, given.name)
    if ((number, given.name), given.step_id) not in batch.writers:
        writer = db.execute(_WRITER, (number, given.name, given.step_id)).fetchone()
        if writer is not None:
            batch.writers[(number, given.name), given.step_id] = writer_of(*writer)
    return batch.append(number, given)


def _read(db: sqlite3.Connection, batch: StreamBatch, number: int, name: str) -> None:
    if (number, name) not in batch.heads:
        head = db.execute(_HEAD, (number, name)).fetchone()
        if head is not None:
            batch.heads[number, name] = head_of(*head)


def write(db: sqlite3.Connection, turns: Sequence[tuple[int, port.Turn]], limits: Limits, now: Instant) -> None:
    """Append what turns write, in their transaction."""
    batch = StreamBatch(limits.stream_bytes, now)
    for number, turn in turns:
        for given in turn.streams:
            _read(db, batch, number, given.name)
            batch.write(number, turn.run_id, given)
    put(db, batch)


def put(db: sqlite3.Connection, batch: StreamBatch) -> None:
    """Write what a batch has changed."""
    db.executemany(_PUT_HEAD, batch.head_rows())
    db.executemany(_PUT_WRITER, batch.writer_rows())
    db.executemany(_PUT_SEGMENT, batch.segment_rows())


def find(db: sqlite3.Connection, query: port.StreamQuery, limit: int) -> port.Found[NamedStream]:
    """Return the streams of a run."""
    found = db.execute(_FIND, (query.run_id, query.after, limit))
    return port.Found(named_stream_of(query.run_id, *row) for row in found)


def read(db: sqlite3.Connection, items: Sequence[StreamRead]) -> list[StreamPage | None]:
    """Return parts of streams."""
    return [_page(db, asked) for asked in items]


def _page(db: sqlite3.Connection, asked: StreamRead) -> StreamPage | None:
    run = db.execute(_RUN, (asked.run_id,)).fetchone()
    if run is None:
        return None
    head = db.execute(_HEAD, (run[0], asked.name)).fetchone()
    segments, size = [], 0
    for row in db.execute(_SEGMENTS, (run[0], asked.name, asked.after)) if head is not None else ():
        segments.append(segment_of(asked.run_id, *row))
        size += len(segments[-1].body)
        if size >= asked.most_bytes:
            break
    return StreamPage(
        run_id=asked.run_id,
        name=asked.name,
        head=EMPTY if head is None else head_of(*head),
        segments=tuple(segments),
        is_finished=bool(run[2]),
    )
