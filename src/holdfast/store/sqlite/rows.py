"""Rows of the tables as our structs, and back."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.codec import decode_body, decode_ref, encode_body, encode_ref
from holdfast.core.events import NULL, EngineRunRef, Event
from holdfast.core.idempotency import inbox_uuid, signal_suffix
from holdfast.core.instants import Instant
from holdfast.core.messages import AcceptanceRecord, Message, Signal
from holdfast.core.records import ActivityRecord, Task, Wait
from holdfast.core.snapshot import RuntimeSnapshot
from holdfast.core.state import RunStatus
from holdfast.errors import StoreCorrupt
from holdfast.store import guards
from holdfast.store.port import Job, RunHead

_encoder = msgspec.json.Encoder()
_snapshots = msgspec.json.Decoder(RuntimeSnapshot)
_messages = msgspec.json.Decoder(Message)
_tasks = msgspec.json.Decoder(Task)
_activity_records = msgspec.json.Decoder(ActivityRecord)
_acceptances = msgspec.json.Decoder(AcceptanceRecord)
_jobs = msgspec.json.Decoder(Job)
_names = msgspec.json.Decoder(tuple[str, ...])
_raws = msgspec.json.Decoder(Raw)

HEAD = (
    "runs.run_no, run_id, tenant, project, environment, plan_id, plan_version, run_request_id, parent_run_id, "
    "reference_key, tags, status, version, snapshot, created_at, updated_at, finished_at, inbox_seq, ready_at, "
    "lease_owner, lease_epoch"
)
EVENT = (
    "run_seq, event_id, event_type, step_id, engine_attempt_id, logical_attempt_id, data, idempotency_key, emitted_at, "
    "persisted_at, adapter_version, engine_run_ref, caused_by_signal_id, parent_event_id, schema_version"
)
JOB = "next_attempt, details, job"
SIGNAL = "inbox_seq, name, signal_id, step_id, accepted_at, consumed_seq, payload"

INSERT_EVENT = f"INSERT INTO events (run_no, {EVENT}) VALUES ({', '.join('?' * 16)})"
IS_CURRENT = f"lease_until > :now AND lease_until <= :now + {guards.LEASE_BELIEVED}"
"""What ends later was given by a clock that was ahead, and is not believed (`guards.lease_end`)."""

INSERT_MESSAGE = "INSERT OR REPLACE INTO messages VALUES (?, ?, ?, ?)"
INSERT_WAIT = "INSERT OR REPLACE INTO waits VALUES (?, ?, ?, ?, ?, ?)"
INSERT_TASK = (
    "INSERT INTO tasks VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (task_id) DO UPDATE SET run_no = excluded.run_no, "
    "step_id = excluded.step_id, status = excluded.status, assignee = excluded.assignee, roles = excluded.roles, "
    "task = excluded.task WHERE run_no = excluded.run_no"
)
INSERT_RECORD = "INSERT OR REPLACE INTO activity_records VALUES (?, ?, ?, ?, ?, ?)"
INSERT_JOB = (
    "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, NULL, ?, ?, ?) ON CONFLICT (run_no, step_id) DO UPDATE SET "
    "queue = excluded.queue, activity = excluded.activity, visible_at = excluded.visible_at, taken_by = NULL, "
    "next_attempt = excluded.next_attempt, details = coalesce(details, excluded.details), job = excluded.job"
)


P = ParamSpec("P")
R = TypeVar("R")


def _reading(function: Callable[P, R]) -> Callable[P, R]:
    """Make a reader of rows say that the file is damaged when a row makes no sense, without quoting the row."""

    @wraps(function)
    def read(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise StoreCorrupt("a row of the store makes no sense; restore the store from a backup") from None

    return read


def encode(value: Any) -> str:
    """Return the value as JSON text."""
    return _encoder.encode(value).decode()


def head_of(row: tuple[Any, ...]) -> RunHead:
    """Return the run that a row of HEAD describes. The error of one that makes no sense names its run."""
    try:
        return _head_of(row)
    except StoreCorrupt as damage:
        raise StoreCorrupt(damage.message, run_id=row[1]) from None


@_reading
def _head_of(row: tuple[Any, ...]) -> RunHead:
    return RunHead(
        run_id=row[1],
        tenant=row[2],
        project=row[3],
        environment=row[4],
        plan_id=row[5],
        plan_version=row[6],
        run_request_id=row[7],
        parent_run_id=row[8],
        reference_key=row[9],
        tags=_names.decode(row[10]),
        status=RunStatus(row[11]),
        version=row[12],
        snapshot=_snapshots.decode(row[13]) if row[13] is not None else None,
        created_at=row[14],
        updated_at=row[15],
        finished_at=row[16],
        inbox_seq=row[17],
        ready_at=row[18],
        lease_owner=row[19],
        lease_epoch=row[20],
    )


def event_rows(run_no: int, events: Iterable[Event], version: int, now: Instant) -> list[tuple[Any, ...]]:
    """Return the rows of new events, numbered from after `version`."""
    rows = []
    ref, ref_text = None, ""
    for run_seq, event in enumerate(events, version + 1):
        if event.engine_run_ref is not ref:
            ref, ref_text = event.engine_run_ref, encode_ref(event.engine_run_ref)
        rows.append(
            (
                run_no,
                run_seq,
                event.event_id,
                event.event_type,
                event.step_id,
                event.engine_attempt_id,
                event.logical_attempt_id,
                encode_body(event.data),
                bytes.fromhex(event.idempotency_key),
                event.emitted_at,
                now,
                event.adapter_version,
                ref_text,
                event.caused_by_signal_id,
                event.parent_event_id,
                event.schema_version,
            )
        )
    return rows


@_reading
def events_of(run_id: str, rows: Iterable[tuple[Any, ...]]) -> list[Event]:
    """Return the events that rows of EVENT describe."""
    refs: dict[str, EngineRunRef] = {}
    events = []
    for row in rows:
        ref = refs.get(row[11])
        if ref is None:
            ref = refs[row[11]] = decode_ref(row[11])
        events.append(
            Event(
                run_id,
                row[0],
                row[1],
                row[2],
                row[3],
                row[4],
                row[5],
                decode_body(row[2], row[14], row[6]),
                row[7].hex(),
                row[8],
                row[9],
                row[10],
                ref,
                row[12],
                row[13],
                row[14],
            )
        )
    return events


def message_row(run_no: int, message: Message, now: Instant) -> tuple[Any, ...]:
    """Return the row of a message; one without a due instant is due now."""
    return run_no, message.signal_id, now if message.due_at is None else message.due_at, encode(message)


@_reading
def message_of(text: str) -> Message:
    """Return the message that the text holds."""
    return _messages.decode(text)


def wait_row(run_no: int, wait: Wait) -> tuple[Any, ...]:
    """Return the row of an open wait."""
    return run_no, wait.step_id, wait.name, wait.token, wait.since, wait.until


def task_row(run_no: int, task: Task) -> tuple[Any, ...]:
    """Return the row of a task."""
    return task.task_id, run_no, task.step_id, task.status, task.assignee, encode(task.roles), encode(task)


@_reading
def task_of(text: str) -> Task:
    """Return the task that the text holds."""
    return _tasks.decode(text)


def record_row(run_no: int, record: ActivityRecord) -> tuple[Any, ...]:
    """Return the row of an activity record."""
    is_completed = record.status == "completed"
    return run_no, record.activity_name, record.step_id, record.idempotency_key, is_completed, encode(record)


@_reading
def record_of(text: str) -> ActivityRecord:
    """Return the activity record that the text holds."""
    return _activity_records.decode(text)


def job_row(run_no: int, job: Job, now: Instant) -> tuple[Any, ...]:
    """Return the row of a job in a queue; one without a due instant is visible now. Details stand beside the job."""
    visible_at = now if job.due_at is None else job.due_at
    details = None if job.details == NULL else text_of(job.details)
    plain = replace(job, details=NULL)
    return run_no, job.step_id, job.queue, job.activity, visible_at, job.engine_attempt_id, details, encode(plain)


@_reading
def job_of(row: Sequence[Any]) -> Job:
    """Return the job that a row of JOB describes, as its next taker is given it."""
    details = NULL if row[1] is None else raw_of(row[1])
    return replace(_jobs.decode(row[2]), engine_attempt_id=row[0], details=details)


def text_of(raw: Raw) -> str:
    """Return raw JSON as text."""
    return bytes(raw).decode()


@_reading
def raw_of(text: str) -> Raw:
    """Return JSON text as raw JSON."""
    return Raw(text.encode())


@_reading
def payload_of(text: str) -> Raw:
    """Return the JSON text of a signal's payload as raw JSON: it goes into the history as it is, so it is looked at."""
    return _raws.decode(text.encode())


@_reading
def acceptance_of(text: str) -> AcceptanceRecord:
    """Return the acceptance record that the text holds."""
    return _acceptances.decode(text)


@_reading
def signal_of(run_id: str, row: tuple[Any, ...]) -> Signal:
    """Return the signal that a row of SIGNAL describes."""
    uuid = inbox_uuid(run_id, row[0])
    return Signal(
        id=uuid,
        run_id=run_id,
        name=row[1],
        signal_id=row[2],
        inbox_seq=row[0],
        suffix=signal_suffix(row[4], uuid),
        accepted_at=row[4],
        payload=payload_of(row[6]),
        step_id=row[3],
        consumed_seq=row[5],
    )


def listing(values: Iterable[int | str]) -> str:
    """Return values as a JSON array, to be read by `json_each(?)`: one statement for any number of them."""
    return encode(list(values))
