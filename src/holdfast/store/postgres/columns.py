"""Batches as columns: a statement takes each column as one array, however many rows there are.

The hot verbs pass arrays as text, in the form that the server reads (`literals`), and the statement casts them
(`places`). The driver's own encoding checks for each value whether it is an array itself: it takes 8 to 11 µs of CPU
for an event of fifteen columns, the text takes 3. Other statements use `columns`.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, get_args

from msgspec import UNSET, Raw
from msgspec.structs import fields, replace

from holdfast.core.attributes import Attributes, rows_of
from holdfast.core.codec import encode_body, encode_ref, encode_text
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.events import NULL, Body, Event
from holdfast.core.index_rows import ActivityRecord, Task, Wait
from holdfast.core.messages import Message
from holdfast.store.port import Job
from holdfast.store.sql import text_of

EVENT_KINDS = (
    *("int", "bigint", "text", "text", "text", "bigint", "bigint", "text"),
    *("bytea", "bigint", "text", "text", "text", "text", "bigint"),
)
MESSAGE_KINDS = ("int", "text", "bigint", "text")

_HEX = re.compile(r"[0-9a-fA-F\x00]*")

CALL_BYTES = 32 * 1024 * 1024
"""How many bytes of values one call may have, unless one turn or new run alone has more. Other calls wait for it."""


def bytes_of(events: Iterable[Event]) -> int:
    """Return the approximate size of the values in events: those that programs, activities and callers choose."""
    size = 0
    for event in events:
        body = event.data
        for field in _values_in(type(body)):
            value = getattr(body, field)
            size += 0 if value is UNSET else len(value)
    return size


def is_too_much(batch: Iterable[Iterable[Event]]) -> bool:
    """Return whether the events of several turns or new runs have too many bytes for one call."""
    sizes = list(map(bytes_of, batch))
    return len(sizes) > 1 and sum(sizes) > CALL_BYTES


@cache
def _values_in(body: type[Body]) -> tuple[str, ...]:
    """Return the fields of an event that hold a value as it was given."""
    return tuple(field.name for field in fields(body) if field.type is Raw or Raw in get_args(field.type))


def columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[Any]:
    """Return rows as columns."""
    return list(zip(*rows, strict=True)) if rows else [()] * width


def places(first: int, kinds: Sequence[str]) -> str:
    """Return the parameters of a statement that take columns of these kinds as text, from number `first` on."""
    return ", ".join(f"${number}::text::{kind}[]" for number, kind in enumerate(kinds, first))


def literals(rows: Sequence[tuple[Any, ...]], kinds: Sequence[str]) -> list[str]:
    """Return rows as columns of these kinds, each as text. Bytes are given in hexadecimal.

    A value that is invalid for its kind is refused here, or by the server: it never becomes two values.
    """
    if not rows:
        return ["{}"] * len(kinds)
    return [_LITERALS.get(kind, _plain)(column) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True)]


def _plain(column: tuple[Any, ...]) -> str:
    """Return numbers, or truth values. Anything else has quotes around it, or a name, and the server refuses it."""
    return "{" + str(list(column))[1:-1].replace("None", "NULL") + "}"


def _text(column: tuple[Any, ...]) -> str:
    if None in column:
        return "{" + ",".join(["NULL" if each is None else f'"{_escaped(each)}"' for each in column]) + "}"
    return '{"' + _joined(column).replace("\x00", '","') + '"}'


def _hex(column: tuple[Any, ...]) -> str:
    joined = _joined(column)
    if _HEX.fullmatch(joined) is None:
        raise ValueError("bytes are given in hexadecimal")
    return '{"\\\\x' + joined.replace("\x00", '","\\\\x') + '"}'


def _joined(column: tuple[Any, ...]) -> str:
    """Return values with a NUL between them, which no text of the server contains."""
    joined = "\x00".join(column)
    if joined.count("\x00") != len(column) - 1:
        raise ValueError("text contains no NUL")
    return _escaped(joined)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


_LITERALS = {"text": _text, "bytea": _hex}


def askable(value: Any) -> Any:
    """Return a value that can be a parameter: text in PostgreSQL never contains a NUL.

    Names never contain one either, so a NUL is replaced by another character that no name can contain.
    """
    return value.replace("\x00", "\x01") if isinstance(value, str) else value


def event_rows(number: int, version: int, events: Iterable[Event]) -> list[tuple[Any, ...]]:
    """Return the events of item `number` of a batch, numbered from after its version."""
    rows = []
    ref, ref_text = None, ""
    for run_seq, event in enumerate(events, version + 1):
        if event.engine_run_ref is not ref:
            ref, ref_text = event.engine_run_ref, encode_ref(event.engine_run_ref)
        rows.append(
            (
                number,
                run_seq,
                event.event_id,
                event.event_type,
                event.step_id,
                event.engine_attempt_id,
                event.logical_attempt_id,
                encode_body(event.data),
                event.idempotency_key,
                event.emitted_at,
                event.adapter_version,
                ref_text,
                event.caused_by_signal_id,
                event.parent_event_id,
                event.schema_version,
            )
        )
    return rows


def message_rows(number: int, messages: Iterable[Message]) -> list[tuple[Any, ...]]:
    """Return the messages of item `number`; of two with the same id, the later one counts."""
    latest = {message.signal_id: message for message in messages}
    return [(number, signal_id, message.due_at, encode_text(message)) for signal_id, message in latest.items()]


class More:
    """Data that only some items of a batch have, under the names that `commit_more_1` reads."""

    def __init__(self) -> None:
        self._lists: dict[str, list[dict[str, Any]]] = {}

    def text(self) -> str | None:
        """Return it as JSON, or None if there is none."""
        return encode_text(self._lists) if self._lists else None

    def add(self, name: str, number: int, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows of item `number`."""
        found = [{"turn": number, **row} for row in rows]
        if found:
            self._lists.setdefault(name, []).extend(found)

    def add_waits(self, number: int, opened: Iterable[Wait], closed: Iterable[str] = ()) -> None:
        """Add waits."""
        self.add("closed", number, ({"step_id": step_id} for step_id in closed))
        latest = {wait.step_id: wait for wait in opened}
        fields = ("step_id", "name", "token", "since", "until")
        self.add("opened", number, ({field: getattr(wait, field) for field in fields} for wait in latest.values()))

    def add_tasks(self, number: int, tasks: Iterable[Task]) -> None:
        """Add tasks; of two with the same id, the later one counts."""
        latest = {task.task_id: task for task in tasks}
        fields = ("task_id", "step_id", "status", "assignee", "roles", "due_at")
        self.add(
            "tasks",
            number,
            (
                {**{field: getattr(task, field) for field in fields}, "task": encode_text(task)}
                for task in latest.values()
            ),
        )

    def add_records(self, number: int, records: Iterable[ActivityRecord]) -> None:
        """Add activity records."""
        latest = {(one.activity_name, one.step_id, one.idempotency_key): one for one in records}
        fields = ("activity_name", "step_id", "idempotency_key")
        self.add(
            "records",
            number,
            (
                {
                    **{field: getattr(one, field) for field in fields},
                    "is_completed": one.status == "completed",
                    "record": encode_text(one),
                }
                for one in latest.values()
            ),
        )

    def add_attributes(self, number: int, attributes: Attributes) -> None:
        """Add the search attributes that replace those of a run."""
        rows = [
            {"name": name, "kind": kind, "word" if kind == "s" else "number": value}
            for name, kind, value in rows_of(attributes)
        ]
        self.add("attributes", number, rows or [{}])

    def add_jobs(self, number: int, jobs: Iterable[Job], closed: Iterable[str]) -> None:
        """Add jobs; a later one of the same step replaces an earlier one, and keeps its details."""
        self.add("jobs_closed", number, ({"step_id": step_id} for step_id in closed))
        latest: dict[str, Job] = {}
        for job in jobs:
            earlier = latest.get(job.step_id)
            kept = job if earlier is None or earlier.details == NULL else replace(job, details=earlier.details)
            latest[job.step_id] = kept
        self.add("jobs", number, map(_job, latest.values()))

    def add_dead(self, number: int, letters: Iterable[DeadLetter]) -> None:
        """Add dead letters."""
        latest = {letter.letter_id: letter for letter in letters}
        self.add("dead", number, map(_letter, latest.values()))


def _job(job: Job) -> dict[str, Any]:
    return {
        "step_id": job.step_id,
        "queue": job.queue,
        "activity": job.activity,
        "due_at": job.due_at,
        "next_attempt": job.engine_attempt_id,
        "details": None if job.details == NULL else text_of(job.details),
        "job": encode_text(replace(job, details=NULL)),
    }


def _letter(letter: DeadLetter) -> dict[str, Any]:
    return {
        "letter_id": letter.letter_id,
        "reason": letter.reason,
        "detail": letter.detail.encode().hex(),
        "node": letter.node,
        "died_at": letter.died_at,
        "settled": letter.settled,
        "settled_by": letter.settled_by.encode().hex(),
        "settled_at": letter.settled_at,
        "envelope": letter.envelope.hex(),
    }
