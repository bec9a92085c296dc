"""`deliver`: puts signals and messages into inboxes, each at most once by its id."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from holdfast.core.audit import run_entry
from holdfast.core.codec import encode_text
from holdfast.core.index_rows import Wait
from holdfast.core.instants import Instant
from holdfast.core.keys import RESERVED_PREFIX, inbox_uuid, signal_storage_key, signal_suffix
from holdfast.core.messages import AcceptanceRecord, AcceptedSignalResult, Message, SignalRequest, came_at_of
from holdfast.core.state import TERMINAL, RunStatus
from holdfast.errors import CallerError, Conflict
from holdfast.limits import Limits
from holdfast.store import decisions, port, sql, validation
from holdfast.store.sql import by_of
from holdfast.store.sqlite import audit, queries

Answer = port.Accepted | port.Duplicate | port.Refused

_INSERT_SIGNAL = (
    "INSERT INTO signals (run_no, inbox_seq, name, signal_id, step_id, accepted_at, received_at, payload, "
    "by_caller) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
# When the n-th last of the signals that count toward the rate of its run was accepted.
_COUNTED = """
SELECT received_at FROM signals WHERE run_no = ? AND name NOT GLOB ? || '*' ORDER BY inbox_seq DESC LIMIT 1 OFFSET ?
"""
# The acceptance record, and a row without one for each signal of that id: if there is no other, the record is missing.
_KNOWN_SIGNAL = """
SELECT record FROM acceptance_records WHERE run_no = ? AND name = ? AND signal_id = ?
UNION ALL
SELECT NULL FROM signals WHERE run_no = ? AND name = ? AND signal_id = ? AND accepted_at > ?
"""


_CONDITIONS = """
SELECT version, EXISTS (
    SELECT 1 FROM signals INDEXED BY signals_unconsumed
    WHERE run_no = ? AND consumed_seq IS NULL AND name = ? AND step_id IS ?
) FROM runs WHERE run_no = ?
"""

# The previous attempt has acquired the job, unless the run has just queued it for the next attempt.
_ACQUIRED = (
    "SELECT next_attempt - 1, taken_by, json_extract(job, '$.scheduled_at') FROM jobs "
    "WHERE run_no = ? AND step_id = ? AND queue <> ''"
)
_QUEUED = "SELECT json_extract(job, '$.queued_attempt_id') FROM jobs WHERE run_no = ? AND step_id = ?"
_END_JOB = "UPDATE jobs SET visible_at = NULL, taken_by = NULL WHERE run_no = ? AND step_id = ?"


class _Inbox:
    """A run while items are delivered to it."""

    __slots__ = ("inbox_seq", "last_accepted_at", "ready_at", "run_no", "status")

    def __init__(self, row: tuple[int, str, int, int, int | None]) -> None:
        self.run_no, status, self.inbox_seq, self.last_accepted_at, self.ready_at = row
        self.status = RunStatus(status)

    def wake(self, at: Instant) -> None:
        self.ready_at = at if self.ready_at is None else min(at, self.ready_at)


def deliver(
    db: sqlite3.Connection, items: Sequence[SignalRequest | Message], limits: Limits, now: Instant
) -> list[Answer]:
    """Deliver the items in order."""
    problems = [validation.check_item(item, limits) for item in items]
    inboxes = _inboxes(db, {item.run_id for item, problem in zip(items, problems, strict=True) if problem is None})
    answers: list[Answer] = []
    pending = _Pending(db)
    for item, problem in zip(items, problems, strict=True):
        inbox = inboxes.get(item.run_id) if problem is None else None
        if problem is not None:
            answers.append(port.Refused(problem))
        elif inbox is None:
            answers.append(port.Refused(decisions.no_such_run(item.run_id)))
        elif isinstance(item, Message):
            answers.append(_deliver_message(db, inbox, item, now))
        else:
            answers.append(_deliver_signal(pending, inbox, item, limits, now))
    pending.write()
    db.executemany(
        "UPDATE runs SET inbox_seq = ?, last_accepted_at = ?, ready_at = ? WHERE run_no = ?",
        [(box.inbox_seq, box.last_accepted_at, box.ready_at, box.run_no) for box in inboxes.values()],
    )
    _audit(db, items, answers, now)
    return answers


def _audit(
    db: sqlite3.Connection, items: Sequence[SignalRequest | Message], answers: Sequence[Answer], now: Instant
) -> None:
    """Append the entries of the accepted signals to the audit log."""
    entries = [
        (item.run_id, item.audit)
        for item, answer in zip(items, answers, strict=True)
        if isinstance(item, SignalRequest) and item.audit is not None and isinstance(answer, port.Accepted)
    ]
    if entries:
        places = audit.places_of(db, {run_id for run_id, _ in entries})
        audit.append(db, [run_entry(entry, run_id, places[run_id], now) for run_id, entry in entries])


def _inboxes(db: sqlite3.Connection, run_ids: set[str]) -> dict[str, _Inbox]:
    found = db.execute(
        "SELECT run_id, run_no, status, inbox_seq, last_accepted_at, ready_at FROM runs "
        "WHERE run_id IN (SELECT value FROM json_each(?))",
        (queries.listing(run_ids),),
    )
    return {row[0]: _Inbox(row[1:]) for row in found}


def _deliver_message(db: sqlite3.Connection, inbox: _Inbox, message: Message, now: Instant) -> Answer:
    known = db.execute(
        "SELECT 1 FROM messages WHERE run_no = ? AND signal_id = ?", (inbox.run_no, message.signal_id)
    ).fetchone()
    if known:
        return port.Duplicate()
    if inbox.status in TERMINAL:
        return port.Refused(decisions.run_terminal(message.run_id, inbox.status))
    problem = None if message.attempt is None else _end_job(db, inbox.run_no, message, message.attempt)
    if problem is not None:
        return port.Refused(problem)
    row = queries.message_row(inbox.run_no, message, now)
    db.execute(queries.INSERT_MESSAGE, row)
    inbox.wake(row[2])
    return port.Accepted()


def _end_job(db: sqlite3.Connection, run_no: int, message: Message, attempt: int) -> Conflict | None:
    """Remove the job of an outcome from its queue, or return why the outcome is refused."""
    place = (run_no, message.step_id)
    [acquired, taken_by, scheduled_at] = db.execute(_ACQUIRED, place).fetchone() or (-1, None, 0)
    if decisions.is_of_another_run(message, scheduled_at):
        return decisions.of_another_run(message)
    if acquired > attempt:
        return decisions.taken_again(message) if message.is_latest_only else None
    if acquired == attempt:
        [queued] = (attempt,) if taken_by is not None else db.execute(_QUEUED, place).fetchone()
        if queued and queued <= attempt:  # 0: it was not acquired since it was queued
            db.execute(_END_JOB, place)
    return None


class _Pending:
    """Signals that are accepted but not yet written, so that one statement writes many."""

    __slots__ = ("_records", "_signals", "db", "scopes")

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.scopes: set[tuple[int, str, str]] = set()
        self._signals: list[tuple[Any, ...]] = []
        self._records: list[tuple[Any, ...]] = []

    def add(self, scope: tuple[int, str, str], signal: tuple[Any, ...], record: tuple[Any, ...]) -> None:
        self.scopes.add(scope)
        self._signals.append(signal)
        self._records.append(record)

    def write(self) -> None:
        """Write what is pending. Call this before reading signals."""
        if self._signals:
            self.db.executemany(_INSERT_SIGNAL, self._signals)
            self.db.executemany("INSERT OR REPLACE INTO acceptance_records VALUES (?, ?, ?, ?, ?)", self._records)
            self.scopes, self._signals, self._records = set(), [], []


def _deliver_signal(pending: _Pending, inbox: _Inbox, request: SignalRequest, limits: Limits, now: Instant) -> Answer:
    scope = (inbox.run_no, request.name, request.signal_id)
    looks = request.require_waiting or request.expected_version is not None
    if scope in pending.scopes or looks or inbox.inbox_seq >= limits.signals_per_run_per_minute:
        pending.write()
    known = _known_signal(pending.db, inbox, request, limits, now)
    if known is not None:
        return known
    problem = _signal_problem(pending.db, inbox, request, limits, now)
    if problem is not None:
        return port.Refused(problem)
    return port.Accepted(_accept(pending, inbox, request, limits, now))


def _known_signal(
    db: sqlite3.Connection, inbox: _Inbox, request: SignalRequest, limits: Limits, now: Instant
) -> port.Duplicate | port.Refused | None:
    if request.signal_id is None:
        return None
    scope = (inbox.run_no, request.name, request.signal_id)
    found = db.execute(_KNOWN_SIGNAL, (*scope, *scope, now - limits.acceptance_retention_ms * 1_000)).fetchall()
    if not found:
        return None
    texts = [text for (text,) in found if text is not None]
    if texts:
        record = sql.acceptance_of(texts[0])
        if record.expires_at <= now:
            return None
        if record.payload_sha256 == request.payload_sha256:
            return port.Duplicate(record.response)
        return port.Refused(decisions.payload_conflict(request))
    return port.Refused(decisions.indeterminate(request, now))


def _signal_problem(
    db: sqlite3.Connection, inbox: _Inbox, request: SignalRequest, limits: Limits, now: Instant
) -> CallerError | None:
    if inbox.status in TERMINAL:
        return decisions.run_terminal(request.run_id, inbox.status)
    if request.expected_version is not None or request.accept_before is not None:
        conflict = _unmet_condition(db, inbox, request, now)
        if conflict is not None:
            return conflict
    if request.require_waiting and not _is_awaited(db, inbox, request, now):
        return decisions.not_waiting(request)
    most = limits.signals_per_run_per_minute
    if inbox.inbox_seq < most or request.is_unlimited or request.name.startswith(RESERVED_PREFIX):
        return None
    found = db.execute(_COUNTED, (inbox.run_no, RESERVED_PREFIX, most - 1)).fetchone()
    if found and now - decisions.MINUTE < found[0] <= now:
        return decisions.rate_limited(request, limits, found[0] + decisions.MINUTE, now)
    return None


def _unmet_condition(db: sqlite3.Connection, inbox: _Inbox, request: SignalRequest, now: Instant) -> CallerError | None:
    [version, is_taken] = db.execute(
        _CONDITIONS, (inbox.run_no, request.name, request.step_id, inbox.run_no)
    ).fetchone()
    return decisions.check_conditions(request, version, now, bool(is_taken))


def _is_awaited(db: sqlite3.Connection, inbox: _Inbox, request: SignalRequest, now: Instant) -> bool:
    """Return whether the earlier signals leave an open wait for this one."""
    waits = db.execute(
        "SELECT step_id, token, since, until FROM waits WHERE run_no = ? AND name = ?", (inbox.run_no, request.name)
    )
    earlier = db.execute(
        "SELECT step_id, accepted_at, received_at FROM signals INDEXED BY signals_unconsumed "
        "WHERE run_no = ? AND consumed_seq IS NULL AND name = ? ORDER BY inbox_seq",
        (inbox.run_no, request.name),
    )
    open_waits = [
        Wait(run_id=request.run_id, step_id=step_id, name=request.name, token=token, since=since, until=until)
        for step_id, token, since, until in waits
    ]
    ahead = [(step_id, came_at_of(accepted_at, received_at)) for step_id, accepted_at, received_at in earlier]
    came_at = came_at_of(max(now, inbox.last_accepted_at + 1), now)
    return decisions.finds_wait(open_waits, ahead, request.step_id, came_at)


def _accept(
    pending: _Pending, inbox: _Inbox, request: SignalRequest, limits: Limits, now: Instant
) -> AcceptedSignalResult:
    inbox.inbox_seq += 1
    inbox.last_accepted_at = accepted_at = max(now, inbox.last_accepted_at + 1)
    inbox.wake(now)
    uuid = inbox_uuid(request.run_id, inbox.inbox_seq)
    signal_id = uuid if request.signal_id is None else request.signal_id
    result = AcceptedSignalResult(
        workflow_id=request.run_id,
        signal_name=request.name,
        signal_id=signal_id,
        accepted_at=accepted_at,
        signal_storage_key=signal_storage_key(request.run_id, request.name, signal_suffix(accepted_at, uuid)),
    )
    record = AcceptanceRecord(
        workflow_id=request.run_id,
        signal_name=request.name,
        signal_id=signal_id,
        signal_storage_key=result.signal_storage_key,
        payload_sha256=request.payload_sha256,
        response=result,
        accepted_at=accepted_at,
        expires_at=accepted_at + limits.acceptance_retention_ms * 1_000,
    )
    pending.add(
        (inbox.run_no, request.name, signal_id),
        (
            inbox.run_no,
            inbox.inbox_seq,
            request.name,
            signal_id,
            queries.NULL_VALUE if request.step_id is None else request.step_id,
            accepted_at,
            now,
            bytes(request.payload).decode(),
            by_of(request) or queries.NULL_VALUE,
        ),
        (inbox.run_no, request.name, signal_id, record.expires_at, encode_text(record)),
    )
    return result
