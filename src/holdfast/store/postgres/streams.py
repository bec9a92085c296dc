"""Streams on the server. An append first locks its runs, ordered by id; the decision is made here."""

from collections.abc import Iterable, Mapping, Sequence

from holdfast.core.instants import Instant
from holdfast.core.state import RunStatus
from holdfast.core.streams import Appended, NamedStream, StreamAppend, StreamPage, StreamRead, StreamSegment
from holdfast.limits import Limits
from holdfast.store import decisions, port, validation
from holdfast.store.postgres.columns import askable, columns
from holdfast.store.postgres.pool import Db, Transaction
from holdfast.store.streams import (
    EMPTY,
    HEAD,
    PAGE_SEGMENTS,
    SEGMENT,
    WRITER,
    Key,
    StreamBatch,
    head_of,
    named_stream_of,
    segment_of,
    writer_of,
)

_LOCK = """
SELECT run_id, run_no, status, finished_at IS NOT NULL, lease_epoch FROM holdfast.runs
WHERE run_id = ANY ($1) ORDER BY run_id FOR UPDATE
"""
_JOBS = """
SELECT run_no, step_id, taken_by, next_attempt FROM holdfast.jobs
WHERE run_no = ANY ($1) AND step_id = ANY ($2) AND job IS NOT NULL
"""
_HEADS = f"SELECT run_no, {HEAD} FROM holdfast.streams WHERE run_no = ANY ($1) AND name = ANY ($2)"
_WRITERS = f"""
SELECT run_no, {WRITER} FROM holdfast.stream_writers WHERE run_no = ANY ($1) AND name = ANY ($2) AND step_id = ANY ($3)
"""
_PUT_HEADS = f"""
INSERT INTO holdfast.streams (run_no, {HEAD})
SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::boolean[])
ON CONFLICT (run_no, name) DO UPDATE SET last_seq = excluded.last_seq, size = excluded.size,
    dropped = excluded.dropped, is_closed = excluded.is_closed
"""
_PUT_WRITERS = f"""
INSERT INTO holdfast.stream_writers (run_no, {WRITER})
SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])
ON CONFLICT (run_no, name, step_id) DO UPDATE SET attempt = excluded.attempt, epoch = excluded.epoch,
    first_seq = excluded.first_seq, count = excluded.count
"""
_PUT_SEGMENTS = f"""
INSERT INTO holdfast.stream_segments (run_no, {SEGMENT})
SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[],
    $8::bigint[], $9::text[])
"""
_FIND = f"""
SELECT {HEAD} FROM holdfast.streams WHERE run_no = (SELECT run_no FROM holdfast.runs WHERE run_id = $1) AND name > $2
ORDER BY name LIMIT $3
"""
_READ_HEADS = """
SELECT t.place, r.run_no, r.finished_at IS NOT NULL, s.last_seq, s.size, s.dropped, s.is_closed
FROM unnest($1::bigint[], $2::text[], $3::text[]) AS t (place, run_id, name)
JOIN holdfast.runs r ON r.run_id = t.run_id
LEFT JOIN holdfast.streams s ON s.run_no = r.run_no AND s.name = t.name
"""
_READ_SEGMENTS = f"""
SELECT t.place, s.first_seq, s.count, s.step_id, s.attempt, s.at, s.restarted_from, s.body
FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::bigint[], $5::bigint[])
    AS t (place, run_no, name, after, most_bytes)
CROSS JOIN LATERAL (
    SELECT page.*, sum(octet_length(page.body)) OVER (ORDER BY page.first_seq) - octet_length(page.body) AS before
    FROM (
        SELECT {SEGMENT} FROM holdfast.stream_segments p
        WHERE p.run_no = t.run_no AND p.name = t.name AND p.first_seq + p.count > t.after + 1
            AND p.first_seq >= coalesce((
                SELECT max(q.first_seq) FROM holdfast.stream_segments q
                WHERE q.run_no = t.run_no AND q.name = t.name AND q.first_seq <= t.after + 1
            ), 0)
        ORDER BY p.first_seq LIMIT {PAGE_SEGMENTS}
    ) page
) s WHERE s.before < t.most_bytes ORDER BY t.place, s.first_seq
"""


async def append(
    transaction: Transaction, items: Sequence[StreamAppend], limits: Limits, given_time: Instant | None
) -> list[Appended | port.Refused]:
    """Append what attempts write."""
    problems = [validation.check_append(given) for given in items]
    sound = [given for given, problem in zip(items, problems, strict=True) if problem is None]
    found = await transaction.fetch(_LOCK, sorted({given.run_id for given in sound}))
    runs = {row[0]: row for row in found}
    numbers = [row[1] for row in found]
    [[now]] = await transaction.fetch("SELECT holdfast.time_1($1)", given_time)
    queued = [given.step_id for given in sound if given.epoch is None]
    found = await transaction.fetch(_JOBS, numbers, queued) if queued else []
    jobs = {(row[0], row[1]): (row[2], row[3]) for row in found}
    batch = StreamBatch(limits.stream_bytes, now)
    names = sorted({given.name for given in sound})
    await _read_heads(transaction, batch, numbers, names)
    steps = sorted({given.step_id for given in sound})
    for number, name, step_id, *row in await transaction.fetch(_WRITERS, numbers, names, steps):
        batch.writers[(number, name), step_id] = writer_of(*row)
    answers: list[Appended | port.Refused] = []
    for given, problem in zip(items, problems, strict=True):
        run = None if problem is not None else runs.get(given.run_id)
        fence = None
        if run is not None:
            job = jobs.get((run[1], given.step_id), ()) if given.epoch is None else ()
            fence = decisions.StreamFence(RunStatus(run[2]), run[3], run[4], *job)
        refusal = problem or decisions.fenced(given, fence)
        if refusal is not None:
            answers.append(port.Refused(refusal))
        else:
            assert run is not None
            answers.append(batch.append(run[1], given))
    await _put(transaction, batch)
    return answers


async def _read_heads(transaction: Transaction, batch: StreamBatch, numbers: list[int], names: list[str]) -> None:
    for number, name, *row in await transaction.fetch(_HEADS, numbers, names):
        batch.heads[number, name] = head_of(*row)


async def write(
    transaction: Transaction, turns: Iterable[port.Turn], numbers: Mapping[str, int], limits: Limits, now: Instant
) -> None:
    """Append what turns write, in their transaction, which has locked their runs."""
    turns = [turn for turn in turns if turn.streams]
    if not turns:
        return
    batch = StreamBatch(limits.stream_bytes, now)
    keys: set[Key] = {(numbers[turn.run_id], given.name) for turn in turns for given in turn.streams}
    await _read_heads(transaction, batch, sorted({key[0] for key in keys}), sorted({key[1] for key in keys}))
    for turn in turns:
        for given in turn.streams:
            batch.write(numbers[turn.run_id], turn.run_id, given)
    await _put(transaction, batch)


async def _put(transaction: Transaction, batch: StreamBatch) -> None:
    for statement, rows, width in (
        (_PUT_HEADS, batch.head_rows(), 6),
        (_PUT_WRITERS, batch.writer_rows(), 7),
        (_PUT_SEGMENTS, batch.segment_rows(), 9),
    ):
        if rows:
            await transaction.fetch(statement, *columns(rows, width))


async def find(db: Db, query: port.StreamQuery, limit: int) -> port.Found[NamedStream]:
    """Return the streams of a run."""
    found = await db.fetch(_FIND, askable(query.run_id), askable(query.after), limit)
    return port.Found(named_stream_of(query.run_id, *row) for row in found)


async def read(db: Db, items: Sequence[StreamRead]) -> list[StreamPage | None]:
    """Return parts of streams. Whether a run has finished is read before the chunks."""
    asked = [(place, item.run_id, item.name) for place, item in enumerate(items)]
    heads = {row[0]: row for row in await db.fetch(_READ_HEADS, *columns(asked, 3))}
    wanted = [
        (place, heads[place][1], item.name, item.after, item.most_bytes)
        for place, item in enumerate(items)
        if place in heads and heads[place][3] is not None
    ]
    segments: dict[int, list[StreamSegment]] = {}
    for place, *row in await db.fetch(_READ_SEGMENTS, *columns(wanted, 5)) if wanted else ():
        segments.setdefault(place, []).append(segment_of(items[place].run_id, *row))
    return [
        None
        if place not in heads
        else StreamPage(
            run_id=item.run_id,
            name=item.name,
            head=EMPTY if heads[place][3] is None else head_of(*tuple(heads[place])[3:]),
            segments=tuple(segments.get(place, ())),
            is_finished=heads[place][2],
        )
        for place, item in enumerate(items)
    ]
