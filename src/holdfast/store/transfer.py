"""A complete run, in a form that every store can export and import: `store copy` moves these between stores.

A store that supports this has a `Transfer` (`sqlite/transfer.py`, `postgres/transfer.py`, `s3/transfer.py`). It reads
runs with everything that belongs to them, and writes them unchanged: with the same times, numbers and ids. Only the
owner is not copied: a run that had one is written without it, with the next epoch, and is ready immediately, as after
`release`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.attributes import At, Attributes, Value, rows_of
from holdfast.core.audit import AuditEntry
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import NULL, Event
from holdfast.core.index_rows import ActivityRecord, Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import AcceptanceRecord, Message, Signal
from holdfast.core.streams import StreamSegment, StreamWriter, WholeStream
from holdfast.store import port, sql, streams
from holdfast.store.memory.jobs import Work

RUNS_AT_ONCE = 50
"""How many runs are read or written in one call."""


class WholeRun(Struct, frozen=True, kw_only=True):
    """A run with everything that belongs to it."""

    head: port.RunHead
    request_key: str
    input_sha256: str
    plan_sha256: str | None
    last_accepted_at: Instant
    events: tuple[Event, ...]
    messages: tuple[tuple[Instant, Message], ...]
    signals: tuple[Signal, ...]
    acceptances: tuple[AcceptanceRecord, ...]
    waits: tuple[Wait, ...]
    tasks: tuple[Task, ...]
    records: tuple[ActivityRecord, ...]
    work: dict[str, Work]
    letters: tuple[DeadLetter, ...]
    attributes: Attributes
    has_place: bool = False
    """Whether it is queued for admission, or counts among the admitted runs."""
    streams: tuple[WholeStream, ...] = ()

    def digest(self) -> str:
        """Return a hash of everything that must be the same in every store that has the run."""
        head = replace(self.head, lease_owner=None, lease_epoch=0, ready_at=None, losses=0)
        events = [replace(event, data=codec.encode_body(event.data)) for event in self.events]
        parts = [
            (head, self.request_key, self.input_sha256, self.plan_sha256, self.last_accepted_at),
            events,
            sorted(self.messages, key=lambda each: each[1].signal_id),
            [replace(signal, received_at=0) for signal in self.signals],
            sorted(self.acceptances, key=lambda each: (each.signal_name, each.signal_id)),
            sorted(self.waits, key=lambda wait: wait.step_id),
            sorted(self.tasks, key=lambda task: task.task_id),
            sorted(self.records, key=lambda each: (each.activity_name, each.step_id, each.idempotency_key)),
            sorted(((step_id, _comparable(work)) for step_id, work in self.work.items()), key=lambda each: each[0]),
            sorted(self.letters, key=lambda letter: letter.letter_id),
            sorted(rows_of(self.attributes)),
            sorted(self.streams, key=lambda stream: stream.name),
        ]
        return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()

    def released(self, now: Instant) -> "WholeRun":
        """Return the run as it is without an owner."""
        head = self.head
        if head.lease_owner is None:
            return self
        ready_at = now if head.ready_at is None else min(now, head.ready_at)
        released = replace(head, lease_owner=None, lease_epoch=head.lease_epoch + 1, ready_at=ready_at)
        return replace(self, head=released)


def _comparable(work: Work) -> tuple[Any, ...]:
    """Return the parts of a step's activity that must be equal. Without a job there are only details."""
    details = None if work.details is None else sql.text_of(work.details)
    return (details, None, None, None) if work.job is None else (details, work.visible_at, work.taken_by, work.job)


class Transfer(Protocol):
    """The verbs that a store offers, besides those of the port, if it can be copied."""

    async def settle(self) -> None:
        """Complete pending deliveries between runs, so that each run is complete by itself."""
        ...

    async def read_runs(self, run_ids: Sequence[str]) -> list[WholeRun | None]:
        """Return complete runs; None for an unknown one."""
        ...

    async def write_runs(self, runs: Sequence[WholeRun]) -> None:
        """Write runs unchanged, replacing what the store has of them. Each is written completely or not at all."""
        ...

    async def write_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Write entries of the audit log with their original times, each once."""
        ...

    async def write_archived(self, runs: Sequence[port.ArchivedRun]) -> None:
        """Write archive locations of deleted runs, each once."""
        ...


# --- shared by the databases


COLUMNS = {
    "events": sql.EVENT,
    "messages": "due_at, message",
    "signals": sql.SIGNAL,
    "waits": "step_id, name, token, since, until",
    "tasks": "task",
    "activity_records": "record",
    "jobs": "step_id, visible_at, taken_by, next_attempt, details, job",
    "dead_letters": "letter_id, envelope, reason, detail, node, died_at, settled, settled_by, settled_at",
    "run_attributes": "name, kind, number, word",
    "plan_uses": "sha256",
    "streams": streams.HEAD,
    "stream_writers": streams.WRITER,
    "stream_segments": streams.SEGMENT,
}
"""The columns that are read of a run, by table. Both databases have them."""

RUN = f"{sql.HEAD}, request_key, input_sha256, last_accepted_at".removeprefix("runs.")

ORDERS = {"events": "run_seq", "signals": "inbox_seq", "stream_segments": "name, first_seq"}


def assemble(
    head_row: tuple[Any, ...], more: tuple[Any, ...], rows: Mapping[str, Sequence[Any]], acceptances: Iterable[Any]
) -> WholeRun:
    """Return a run from its rows. `more` is the request's key, the hash of its input, and the last acceptance."""
    head = sql.head_of(head_row)
    run_id = head.run_id
    request_key, input_sha256, last_accepted_at, has_place = more
    sha256 = next((row[0].hex() for row in rows["plan_uses"]), None)
    kept = {} if head.snapshot is None else head.snapshot.attributes
    return WholeRun(
        head=head,
        request_key=request_key.hex(),
        input_sha256=input_sha256.hex(),
        plan_sha256=sha256,
        last_accepted_at=last_accepted_at,
        events=tuple(sql.events_of(run_id, map(tuple, rows["events"]))),
        messages=tuple((row[0], sql.message_of(row[1])) for row in rows["messages"]),
        signals=tuple(sql.signal_of(run_id, tuple(row)) for row in rows["signals"]),
        acceptances=tuple(acceptances),
        waits=tuple(sql.wait_of((run_id, *row)) for row in rows["waits"]),
        tasks=tuple(sql.task_of(row[0]) for row in rows["tasks"]),
        records=tuple(sql.record_of(row[0]) for row in rows["activity_records"]),
        work={row[0]: _work_of(row) for row in rows["jobs"]},
        letters=tuple(sql.letter_of((row[0], run_id, *row[1:])) for row in rows["dead_letters"]),
        attributes=kept or attributes_of(rows["run_attributes"]),
        has_place=bool(has_place),
        streams=_streams_of(run_id, rows),
    )


def _streams_of(run_id: str, rows: Mapping[str, Sequence[Any]]) -> tuple[WholeStream, ...]:
    writers: dict[str, dict[str, StreamWriter]] = {}
    segments: dict[str, list[StreamSegment]] = {}
    for name, step_id, *row in rows["stream_writers"]:
        writers.setdefault(name, {})[step_id] = streams.writer_of(*row)
    for name, *row in rows["stream_segments"]:
        segments.setdefault(name, []).append(streams.segment_of(run_id, *row))
    return tuple(
        WholeStream(
            name=name,
            head=streams.head_of(*row),
            writers=writers.get(name, {}),
            segments=tuple(segments.get(name, ())),
        )
        for name, *row in rows["streams"]
    )


def stream_rows(number: int, run: WholeRun) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of a run's streams, by table."""
    return {
        "streams": [streams.head_row(number, each.name, each.head) for each in run.streams],
        "stream_writers": [
            streams.writer_row(number, each.name, step_id, writer)
            for each in run.streams
            for step_id, writer in each.writers.items()
        ],
        "stream_segments": [
            streams.segment_row(number, each.name, segment) for each in run.streams for segment in each.segments
        ],
    }


def _work_of(row: Sequence[Any]) -> Work:
    job = None if row[5] is None else replace(sql.job_of((row[3], None, row[5])), details=NULL)
    details = None if row[4] is None else sql.raw_of(row[4])
    return Work(job=job, visible_at=row[1], taken_by=row[2], details=details)


def run_row(number: int, run: WholeRun) -> tuple[Any, ...]:
    """Return the row of RUN that describes a run."""
    head = run.head
    return (
        *(number, head.run_id, head.tenant, head.project, head.environment, head.plan_id, head.plan_version),
        *(head.run_request_id, head.parent_run_id, head.reference_key, codec.encode_text(head.tags), str(head.status)),
        *(head.version, None if head.snapshot is None else codec.encode_text(head.snapshot)),
        *(head.created_at, head.updated_at, head.finished_at, head.inbox_seq, head.ready_at),
        *(head.lease_owner, head.lease_epoch, head.queued_at, head.losses),
        *(bytes.fromhex(run.request_key), bytes.fromhex(run.input_sha256), run.last_accepted_at),
    )


def signal_row(number: int, signal: Signal) -> tuple[Any, ...]:
    """Return the row of SIGNAL that describes a signal, behind its run's number."""
    by = None if signal.by is None else codec.encode_text(signal.by)
    return (
        *(number, signal.inbox_seq, signal.name, signal.signal_id, signal.step_id, signal.accepted_at),
        *(signal.consumed_seq, sql.text_of(signal.payload), signal.received_at or signal.accepted_at, by),
    )


def work_row(step_id: str, work: Work) -> tuple[Any, ...]:
    """Return the row of a step's activity: step, queue, activity, visible, owner, next attempt, details, job."""
    details = None if work.details is None else sql.text_of(work.details)
    job = work.job
    if job is None:
        return step_id, "", "", work.visible_at, work.taken_by, 0, details, None
    text = codec.encode_text(replace(job, details=NULL))
    return (step_id, job.queue, job.activity, work.visible_at, work.taken_by, job.engine_attempt_id, details, text)


def attributes_of(rows: Iterable[Any]) -> Attributes:
    """Return search attributes from their rows in the index."""
    found: dict[str, list[Value]] = {}
    for name, kind, number, word in rows:
        value: Value = word
        if kind == "b":
            value = bool(number)
        elif kind == "t":
            value = At(int(number))
        elif kind == "n":
            value = number
        found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else tuple(map(str, values)) for name, values in found.items()}
