"""What the SQL stores share: conversion of rows to structs, and conditions of queries."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from string import ascii_lowercase, ascii_uppercase
from typing import Any, ParamSpec, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core.audit import AuditEntry
from holdfast.core.bus import ALERTS, BusAlert, BusDeadLetter, OutboxEntry, Sink, SinkStatus
from holdfast.core.codec import decode_body, decode_ref, encode_text
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.events import NULL, CallerRef, EngineRunRef, Event
from holdfast.core.index_rows import ActivityRecord, RuntimeSnapshot, Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.keys import inbox_uuid, signal_suffix
from holdfast.core.messages import AcceptanceRecord, Message, Signal, SignalRequest
from holdfast.core.plans import RegisteredPlan
from holdfast.core.schedules import Schedule
from holdfast.core.state import RunStatus
from holdfast.errors import CorruptHistory, StoreCorrupt
from holdfast.store.queries import (
    ArchivedRunQuery,
    AuditQuery,
    BulletinQuery,
    BusDeadLetterQuery,
    DeadLetterQuery,
    EventQuery,
    Found,
    MailboxQuery,
    PlaceInLine,
    PlanQuery,
    RunQuery,
    ScheduleQuery,
    SinkQuery,
    StreamQuery,
    TaskQuery,
    WaitQuery,
)
from holdfast.store.types import ArchivedRun, Bulletin, HostLock, Job, Plan, RunHead

_snapshots = msgspec.json.Decoder(RuntimeSnapshot)
_messages = msgspec.json.Decoder(Message)
_tasks = msgspec.json.Decoder(Task)
_activity_records = msgspec.json.Decoder(ActivityRecord)
_acceptances = msgspec.json.Decoder(AcceptanceRecord)
_jobs = msgspec.json.Decoder(Job)
_names = msgspec.json.Decoder(tuple[str, ...])
_raws = msgspec.json.Decoder(Raw)
_callers = msgspec.json.Decoder(CallerRef)
_audit = msgspec.json.Decoder(AuditEntry)
_sinks = msgspec.json.Decoder(Sink)
_alerts = msgspec.json.Decoder(BusAlert)

HEAD = (
    "runs.run_no, run_id, tenant, project, environment, plan_id, plan_version, run_request_id, parent_run_id, "
    "reference_key, tags, status, version, snapshot, created_at, updated_at, finished_at, inbox_seq, ready_at, "
    "lease_owner, lease_epoch, queued_at, losses"
)
EVENT = (
    "run_seq, event_id, event_type, step_id, engine_attempt_id, logical_attempt_id, data, idempotency_key, emitted_at, "
    "persisted_at, adapter_version, engine_run_ref, caused_by_signal_id, parent_event_id, schema_version"
)
JOB = "next_attempt, details, job"
SIGNAL = "inbox_seq, name, signal_id, step_id, accepted_at, consumed_seq, payload, received_at, by_caller"
AUDIT = "at, entry_id, tenant, project, environment, run_id, actor, token_id, operation, entry"


def plan_keys(plans: Iterable[Plan]) -> list[str]:
    """Return each definition as one text, in the form that SQL concatenates. No name contains a line break."""
    return ["\n".join(plan) for plan in plans]


def plan_of(key: str) -> Plan:
    """Return the definition of such a text."""
    plan_id, _, version = key.partition("\n")
    return plan_id, version


def schedule_row(schedule: Schedule) -> tuple[Any, ...]:
    """Return the columns of a schedule, in the order of `SCHEDULE_COLUMNS`."""
    body = encode_text(schedule)
    rest = (schedule.next_due, bool(schedule.queued), schedule.revision, body)
    return (*schedule.place, schedule.app, schedule.workflow, *rest)


SCHEDULE_COLUMNS = "tenant, project, environment, schedule_id, app, workflow, next_due, is_waiting, revision, body"


def schedule_of(body: str) -> Schedule:
    """Return the schedule of a row."""
    try:
        return _schedules.decode(body)
    except msgspec.MsgspecError as problem:
        raise StoreCorrupt(f"a schedule cannot be read: {problem}") from problem


_schedules = msgspec.json.Decoder(Schedule)


def host_lock_of(row: Any) -> HostLock:
    """Return the lock of a row."""
    name, owner, epoch, acquired_at, lease_until = row
    return HostLock(name=name, owner=owner, epoch=epoch, acquired_at=acquired_at, lease_until=lease_until)


def registered_plan_of(row: Any) -> RegisteredPlan:
    """Return the plan version in a row: tenant, plan_id, plan_version, sha256, uri, registered_by and registered_at."""
    names = ("tenant", "plan_id", "plan_version", "sha256", "uri", "registered_by", "registered_at")
    return RegisteredPlan(**{**dict(zip(names, row, strict=True)), "sha256": bytes(row[3]).hex()})


P = ParamSpec("P")
R = TypeVar("R")


def plan_order(query: PlanQuery) -> str:
    """Return the order in which registered versions of plans are found."""
    if query.newest_first:
        return "registered_at DESC, tenant DESC, plan_id DESC, plan_version DESC"
    return "tenant, plan_id, plan_version"


def _reading(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a row reader: it raises `StoreCorrupt`, without quoting the row, if a row cannot be read."""

    @wraps(function)
    def read(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise StoreCorrupt("a row of the store cannot be read; restore the store from a backup") from None

    return read


class DamagedText(bytes):
    """Bytes in a text column that are not valid text."""


def text_or_damage(found: bytes) -> str | DamagedText:
    """Return a text of the file, or its bytes if they are not valid text."""
    try:
        return found.decode()
    except UnicodeDecodeError:
        return DamagedText(found)


def found_of(
    rows: Sequence[Any],
    read: Callable[[Any], R],
    name_of: Callable[[Any], str],
    place_of: Callable[[Any], Any],
    place: Any = None,
) -> Found[R]:
    """Return the readable rows, and the names of damaged ones: a damaged row does not hide the others.

    If there are damaged rows, the cursor is that of the last row: the reader of the answer may not see that row.
    """
    found: list[R] = []
    unreadable: list[str] = []
    for row in rows:
        try:
            if any(type(cell) is DamagedText for cell in row):
                raise StoreCorrupt("a text of the store is none")
            found.append(read(row))
        except StoreCorrupt:
            unreadable.append(str(name_of(row)))
    if not unreadable:
        return Found(found, place)
    return Found(found, place_of(rows[-1]) if place is None else place, tuple(unreadable))


def found_events(rows: Iterable[Any], missing: Iterable[str] = ()) -> Found[Event]:
    """Return the events in rows of a run id and EVENT, the runs of damaged ones, and the missing runs."""
    found: list[Event] = []
    unreadable: dict[str, None] = {}
    for run_id, *row in rows:
        try:
            if any(type(cell) is DamagedText for cell in row):
                raise StoreCorrupt("a text of the store is none")
            found += events_of(run_id, [row])
        except (StoreCorrupt, CorruptHistory):
            unreadable[str(run_id)] = None
    return Found(found, None, tuple(unreadable), missing=tuple(missing))


def head_of(row: tuple[Any, ...]) -> RunHead:
    """Return the run that a row of HEAD describes. The error of a damaged row names its run."""
    try:
        return _head_of(row)
    except StoreCorrupt as damage:
        raise StoreCorrupt(damage.message, run_id=row[1]) from None


@_reading
def _head_of(row: tuple[Any, ...]) -> RunHead:
    snapshot = _snapshots.decode(row[13]) if row[13] is not None else None
    fields = (*row[1:10], _names.decode(row[10]), RunStatus(row[11]), row[12], snapshot, *row[14:23])
    return RunHead(*fields)


@_reading
def events_of(run_id: str, rows: Iterable[Sequence[Any]]) -> list[Event]:
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


@_reading
def message_of(text: str) -> Message:
    """Return the message that the text holds."""
    return _messages.decode(text)


@_reading
def task_of(text: str) -> Task:
    """Return the task that the text holds."""
    return _tasks.decode(text)


@_reading
def record_of(text: str) -> ActivityRecord:
    """Return the activity record that the text holds."""
    return _activity_records.decode(text)


@_reading
def job_of(row: Sequence[Any]) -> Job:
    """Return the job that a row of JOB describes, as the node that acquires it gets it."""
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
    """Return the JSON text of a signal's payload as raw JSON, validated, because it goes into the history unchanged."""
    return _raws.decode(text.encode())


@_reading
def acceptance_of(text: str) -> AcceptanceRecord:
    """Return the acceptance record that the text holds."""
    return _acceptances.decode(text)


@_reading
def definition_of(text: str) -> WorkflowDeclaration:
    """Return the definition that a row holds."""
    return msgspec.json.decode(text, type=WorkflowDeclaration)


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
        received_at=row[7],
        by=None if row[8] is None else _callers.decode(row[8]),
    )


def mail_of(row: Sequence[Any]) -> Signal:
    """Return the signal that a row with the run's id and SIGNAL describes."""
    return signal_of(row[0], tuple(row[1:]))


def mail_place(row: Sequence[Any]) -> tuple[str, int]:
    """Return the cursor of such a row among the signals of all runs."""
    return row[0], row[1]


WAIT = "run_id, step_id, name, token, since, until"


@_reading
def wait_of(row: Sequence[Any]) -> Wait:
    """Return the wait that a row of WAIT describes."""
    return msgspec.convert(dict(zip(WAIT.split(", "), row, strict=True)), Wait)


def wait_name(row: Sequence[Any]) -> str:
    """Return the name of such a row for messages about damage."""
    return f"{row[0]}/{row[1]}"


LETTER = "letter_id, run_id, envelope, reason, detail, node, died_at, settled, settled_by, settled_at"


@_reading
def letter_of(row: Sequence[Any]) -> DeadLetter:
    """Return the dead letter that a row of LETTER describes. Some stores return its texts as bytes."""
    fields = dict(zip(LETTER.split(", "), row, strict=True))
    for name in ("detail", "settled_by"):
        if isinstance(fields[name], bytes):
            fields[name] = fields[name].decode()
    return msgspec.convert(fields, DeadLetter)


def mail_name(row: Sequence[Any]) -> str:
    """Return the name of such a row for messages about damage."""
    return f"{row[0]}/{row[2]}/{row[3]}"


def by_of(request: SignalRequest) -> str | None:
    """Return the caller of a signal as text, or None."""
    return None if request.audit is None or request.audit.by is None else encode_text(request.audit.by)


def count_rows(rows: Sequence[Any]) -> list[tuple[str, RunStatus, int]]:
    """Return rows of workflow, status and count."""
    return [(row[0], RunStatus(row[1]), int(row[2])) for row in rows]


def with_completed(counts: dict[str, int], every: int) -> dict[str, int]:
    """Return the number of runs by status. Only completed ones, nearly all, have no index: their number is the rest."""
    completed = every - sum(counts.values())
    return {**counts, "COMPLETED": completed} if completed > 0 else counts


@_reading
def audit_of(row: tuple[Any, ...]) -> AuditEntry:
    """Return the entry that a row of AUDIT describes: its columns take precedence over the JSON."""
    entry = _audit.decode(row[9])
    return replace(entry, at=row[0], tenant=row[2], project=row[3], environment=row[4], run_id=row[5])


ARCHIVED = ", ".join(f'"{field}"' for field in ArchivedRun.__struct_fields__)
"""The columns of a run that is archived elsewhere."""


def archived_row(run: ArchivedRun) -> tuple[Any, ...]:
    """Return the row of ARCHIVED that describes an archived run."""
    return tuple(getattr(run, field) for field in ArchivedRun.__struct_fields__)


@_reading
def archived_run_of(row: Sequence[Any]) -> ArchivedRun:
    """Return the archived run that a row of ARCHIVED describes."""
    run = ArchivedRun(**dict(zip(ArchivedRun.__struct_fields__, row, strict=True)))
    return replace(run, status=RunStatus(run.status))


def text_bytes(row: Iterable[Any]) -> int:
    """Return the approximate size of a row: the length of its texts."""
    return sum(len(value) for value in row if isinstance(value, str | bytes))


def place_of(row: Sequence[Any]) -> PlaceInLine:
    """Return the waiting run or call in a row."""
    run_id, step_id, limit, key, taken, taken_of_key, before, waiting = row
    return PlaceInLine(
        run_id=run_id,
        step_id=step_id,
        limit=limit,
        key=key,
        taken=taken,
        taken_of_key=taken_of_key,
        before=before,
        waiting=waiting,
    )


# --- which queries are short --------------------------------------------------------------------------------------

_IS_LOOKUP: dict[type, Callable[[Any], bool]] = {
    RunQuery: lambda query: query.run_ids is not None,
    WaitQuery: lambda query: query.run_id is not None,
    EventQuery: lambda query: query.most_bytes is None,
    MailboxQuery: lambda query: query.run_id is not None and query.most_bytes is None,
    TaskQuery: lambda query: query.run_id is not None or query.task_id is not None,
    DeadLetterQuery: lambda query: query.run_id is not None or query.letter_id is not None,
    ScheduleQuery: lambda query: True,
    StreamQuery: lambda query: True,
    ArchivedRunQuery: lambda query: query.run_id is not None,
}


def is_lookup(query: Struct) -> bool:
    """Return whether an index narrows a query to few rows. Other queries may take long, and must not delay turns."""
    check = _IS_LOOKUP.get(type(query))
    return check is not None and check(query)


# --- conditions ---------------------------------------------------------------------------------------------------

_LOWERED = str.maketrans(ascii_uppercase, ascii_lowercase)


def lowered(text: str) -> str:
    """Return a text with A to Z in lower case; all other letters stay unchanged."""
    return text.translate(_LOWERED)


def words_of(text: str | None) -> list[str]:
    """Return the words of a search: all of them have to match.

    Every store finds the same in a run's id, workflow, reference, tags and last error, and in a task's name and
    payload, as JSON: a word must be part of one of these texts, case is ignored for A to Z only, and a word with a NUL
    matches nothing.
    """
    return lowered(text or "").split()


def in_json(word: str) -> str:
    """Return a word as it is written in a JSON text."""
    return msgspec.json.encode(word).decode()[1:-1]


def numbered(text: str) -> str:
    """Return a statement with its parameters numbered from $1, as in PostgreSQL. It must contain no other `?`."""
    first, *rest = text.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


class Where:
    """The conditions of a query, with their values."""

    def __init__(self) -> None:
        self._conditions: list[str] = []
        self._values: list[Any] = []

    def add(self, condition: str, *values: Any) -> None:
        """Add a condition and its values."""
        self._conditions.append(condition)
        self._values.extend(values)

    def add_given(self, condition: str, value: Any) -> None:
        """Add a condition unless its value is None."""
        if value is not None:
            self.add(condition, value)

    @property
    def text(self) -> str:
        """The clause, with `?` for each value."""
        return "WHERE " + " AND ".join(self._conditions) if self._conditions else ""

    @property
    def numbered(self) -> str:
        """The clause with its parameters numbered from $1, as in PostgreSQL. No condition contains another `?`."""
        return numbered(self.text)

    @property
    def limit_parameter(self) -> str:
        """The number of the parameter after those of the conditions: the limit."""
        return f"${len(self._values) + 1}"

    def values(self, *limit: int) -> list[Any]:
        """Return the values of the conditions, and a limit."""
        return [*self._values, *limit]


# --- conditions that both databases share: `runs` is the name of the table in a statement


def add_run_conditions(where: Where, query: RunQuery, has_tag: str) -> None:
    """Add the conditions on runs, except for ids and words."""
    where.add_given("tenant = ?", query.tenant)
    where.add_given("plan_id = ?", query.workflow)
    where.add_given("status = ?", None if query.status is None else str(query.status))
    where.add_given("reference_key = ?", query.reference_key)
    where.add_given("parent_run_id = ?", query.parent_run_id)
    if query.roots:
        where.add("parent_run_id IS NULL")
    where.add_given(has_tag, query.tag)
    where.add_given("created_at >= ?", query.created_from)
    where.add_given("created_at < ?", query.created_until)
    where.add_given("finished_at >= ?", query.finished_from)
    where.add_given("finished_at < ?", query.finished_until)


def schedule_conditions(query: ScheduleQuery) -> tuple[Where, str]:
    """Return the conditions on schedules, and their order."""
    where = Where()
    for column in ("tenant", "project", "environment", "schedule_id", "app", "workflow"):
        where.add_given(f"{column} = ?", getattr(query, column))
    place = "tenant, project, environment, schedule_id"
    if query.waiting:
        where.add("is_waiting")
    if query.by_due:
        where.add("next_due IS NOT NULL")
        return where, f"next_due, {place}"
    where.add(f"({place}) > (?, ?, ?, ?)", *query.after)
    return where, place


def wait_conditions(query: WaitQuery) -> Where:
    """Return the conditions on waits, which are joined with their runs."""
    where = Where()
    where.add("(run_id, step_id) > (?, ?)", *query.after)
    where.add_given("tenant = ?", query.tenant)
    where.add_given("run_id = ?", query.run_id)
    where.add_given("name = ?", query.name)
    return where


def mailbox_conditions(query: MailboxQuery, runs: str, behind: str) -> Where:
    """Return the conditions on signals. `behind` compares with the position after which to search, across all runs."""
    of_run = f"EXISTS (SELECT 1 FROM {runs} WHERE runs.run_no = signals.run_no AND {{}})"
    where = Where()
    if query.run_id is not None:
        where.add(f"run_no = (SELECT run_no FROM {runs} WHERE run_id = ?)", query.run_id)
        where.add("inbox_seq > ?", query.after)
    else:
        where.add(behind, query.after_run, query.after_run, query.after)
    where.add_given(of_run.format("tenant = ?"), query.tenant)
    if query.unfinished:
        where.add(of_run.format("finished_at IS NULL"))
    where.add_given("name = ?", query.name)
    where.add_given("signal_id = ?", query.signal_id)
    if not query.consumed:
        where.add("consumed_seq IS NULL")
    return where


def add_task_conditions(where: Where, query: TaskQuery, runs: str) -> None:
    """Add the conditions on tasks, as far as they concern columns of the task or its run."""
    where.add_given(f"run_no = (SELECT run_no FROM {runs} WHERE run_id = ?)", query.run_id)
    where.add_given("task_id = ?", query.task_id)
    where.add_given("status = ?", query.status)
    where.add_given("assignee = ?", query.assignee)
    where.add_given(f"(SELECT tenant FROM {runs} WHERE runs.run_no = tasks.run_no) = ?", query.tenant)
    where.add_given(f"(SELECT plan_id FROM {runs} WHERE runs.run_no = tasks.run_no) = ?", query.workflow)


def letter_conditions(query: DeadLetterQuery, runs: str) -> Where:
    """Return the conditions on dead letters, which are joined with their runs."""
    where = Where()
    where.add("(died_at, letter_id) > (?, ?)", *query.after)
    where.add_given("tenant = ?", query.tenant)
    where.add_given(f"run_no = (SELECT run_no FROM {runs} WHERE run_id = ?)", query.run_id)
    where.add_given("letter_id = ?", query.letter_id)
    where.add_given("reason = ?", query.reason)
    if not query.settled:
        where.add("settled IS NULL")
    return where


def audit_conditions(query: AuditQuery) -> Where:
    """Return the conditions of a query of the audit log."""
    where = Where()
    where.add("at >= ?", 0 if query.since is None else query.since)
    where.add_given("at < ?", query.until)
    if query.after is not None:
        where.add(f"(at, entry_id) {'<' if query.newest else '>'} (?, ?)", *query.after)
    for column in ("tenant", "run_id", "actor", "token_id", "operation"):
        where.add_given(f"{column} = ?", getattr(query, column))
    return where


BULLETIN = "kind, bulletin_id, at, expires_at, body"


@_reading
def bulletin_of(row: Any) -> Bulletin:
    """Return the bulletin that a row of BULLETIN describes."""
    kind, bulletin_id, at, expires_at, body = row
    return Bulletin(kind=kind, bulletin_id=bulletin_id, at=at, expires_at=expires_at, body=Raw(body.encode()))


def bulletin_conditions(query: BulletinQuery, now: Instant) -> Where:
    """Return the conditions of a query for bulletins, except for their ids."""
    where = Where()
    where.add("kind = ?", query.kind)
    where.add("expires_at > ?", now)
    where.add("(at, bulletin_id) > (?, ?)", *query.after)
    where.add_given("at >= ?", query.since)
    return where


def archived_conditions(query: ArchivedRunQuery) -> Where:
    """Return the conditions of a query for archived runs."""
    where = Where()
    where.add("(finished_at, run_id) < (?, ?)", *query.before)
    where.add_given("tenant = ?", query.tenant)
    where.add_given("run_id = ?", query.run_id)
    where.add_given("plan_id = ?", query.workflow)
    where.add_given("status = ?", query.status)
    return where


# --- the event bus

SINK = "sink_no, name, sink, failures, due_at, error, failed_at, delivered_at, delivered"
ENTRY = (
    "o.run_no, r.run_id, o.from_seq, o.to_seq, o.at, o.attempts, o.due_at, r.tenant, r.project, r.environment, "
    "r.plan_id, r.plan_version"
)
BUS_LETTER = "l.letter_id, s.name, l.run_id, l.from_seq, l.to_seq, l.attempts, l.detail, l.died_at, s.tenant"


@_reading
def sink_status_of(row: Any) -> SinkStatus:
    """Return the sink that a row of SINK describes, and its state, followed by its counts, if they were taken."""
    number, _, text, failures, due_at, error, failed_at, delivered_at, delivered, *counted = row
    backlog, oldest_at, dead_letters = counted or (0, None, 0)
    return SinkStatus(
        sink=_sinks.decode(text),
        number=number,
        failures=failures,
        due_at=due_at,
        error=error,
        failed_at=failed_at,
        delivered_at=delivered_at,
        delivered=delivered,
        backlog=backlog,
        oldest_at=oldest_at,
        dead_letters=dead_letters,
    )


@_reading
def outbox_entry_of(row: Any) -> OutboxEntry:
    """Return the entry that a row of ENTRY describes. For a deleted run only the run's number is known."""
    number, run_id, from_seq, to_seq, at, attempts, due_at, tenant, project, environment, workflow, version = row
    return OutboxEntry(
        number=number,
        run_id=ALERTS if run_id is None else run_id,
        from_seq=from_seq,
        to_seq=to_seq,
        at=at,
        attempts=attempts,
        due_at=due_at,
        tenant=tenant,
        project=project,
        environment=environment,
        workflow=workflow or "",
        workflow_version=version or "",
    )


@_reading
def alert_of(row: Any) -> BusAlert:
    """Return the alert in a row: its number, its time, and the alert."""
    number, raised_at, text = row
    return replace(_alerts.decode(text), number=number, raised_at=raised_at)


@_reading
def bus_letter_of(row: Any) -> BusDeadLetter:
    """Return the dead letter of the bus that a row of BUS_LETTER describes."""
    return BusDeadLetter(**dict(zip(BusDeadLetter.__struct_fields__, row, strict=True)))


def sink_conditions(query: SinkQuery) -> "Where":
    """Return the conditions on sinks."""
    where = Where()
    where.add("name > ?", query.after)
    where.add_given("name = ?", query.name)
    where.add_given("tenant = ?", query.tenant)
    return where


def bus_letter_conditions(query: BusDeadLetterQuery) -> "Where":
    """Return the conditions on dead letters of the bus."""
    where = Where()
    where.add("(l.died_at, l.letter_id) > (?, ?)", *query.after)
    where.add_given("s.tenant = ?", query.tenant)
    where.add_given("s.name = ?", query.sink)
    where.add_given("l.run_id = ?", query.run_id)
    where.add_given("l.letter_id = ?", query.letter_id)
    return where
