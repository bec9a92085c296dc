"""Rows of the tables as our structs, and back. How rows are read is shared with the other SQL stores."""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from holdfast.core.codec import encode_body, encode_ref
from holdfast.core.events import NULL, Event
from holdfast.core.index_rows import ActivityRecord, Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import Message
from holdfast.store import decisions
from holdfast.store.port import Job
from holdfast.store.sql import EVENT as EVENT
from holdfast.store.sql import HEAD as HEAD
from holdfast.store.sql import JOB as JOB
from holdfast.store.sql import SIGNAL as SIGNAL
from holdfast.store.sql import acceptance_of as acceptance_of
from holdfast.store.sql import encode as encode
from holdfast.store.sql import events_of as events_of
from holdfast.store.sql import found_of as found_of
from holdfast.store.sql import head_of as head_of
from holdfast.store.sql import job_of as job_of
from holdfast.store.sql import mail_name as mail_name
from holdfast.store.sql import mail_of as mail_of
from holdfast.store.sql import mail_place as mail_place
from holdfast.store.sql import message_of as message_of
from holdfast.store.sql import payload_of as payload_of
from holdfast.store.sql import raw_of as raw_of
from holdfast.store.sql import record_of as record_of
from holdfast.store.sql import signal_of as signal_of
from holdfast.store.sql import task_of as task_of
from holdfast.store.sql import text_of as text_of

INSERT_EVENT = f"INSERT INTO events (run_no, {EVENT}) VALUES ({', '.join('?' * 16)})"
IS_CURRENT = f"lease_until > :now AND lease_until <= :now + {decisions.LEASE_HORIZON}"
"""A lease that ends later was given by a clock that was ahead, and counts as expired (`decisions.lease_end`)."""

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
                bytearray.fromhex(event.idempotency_key),  # which `sqlite3` binds at once, unlike bytes
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


def message_row(run_no: int, message: Message, now: Instant) -> tuple[Any, ...]:
    """Return the row of a message; one without a due instant is due now."""
    return run_no, message.signal_id, now if message.due_at is None else message.due_at, encode(message)


def wait_row(run_no: int, wait: Wait) -> tuple[Any, ...]:
    """Return the row of an open wait."""
    return run_no, wait.step_id, wait.name, wait.token, wait.since, wait.until


def task_row(run_no: int, task: Task) -> tuple[Any, ...]:
    """Return the row of a task."""
    return task.task_id, run_no, task.step_id, task.status, task.assignee, encode(task.roles), encode(task)


def record_row(run_no: int, record: ActivityRecord) -> tuple[Any, ...]:
    """Return the row of an activity record."""
    is_completed = record.status == "completed"
    return run_no, record.activity_name, record.step_id, record.idempotency_key, is_completed, encode(record)


def job_row(run_no: int, job: Job, now: Instant) -> tuple[Any, ...]:
    """Return the row of a job; one without a due instant is visible now. Details have a column of their own."""
    visible_at = now if job.due_at is None else job.due_at
    details = None if job.details == NULL else text_of(job.details)
    plain = replace(job, details=NULL)
    return run_no, job.step_id, job.queue, job.activity, visible_at, job.engine_attempt_id, details, encode(plain)


def listing(values: Iterable[int | str]) -> str:
    """Return values as a JSON array, to be read by `json_each(?)`: one statement for any number of them."""
    return encode(list(values))
