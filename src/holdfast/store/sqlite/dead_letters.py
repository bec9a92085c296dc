"""Dead letters: written with a turn or for an unreadable row, searched, and settled."""

import sqlite3
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from holdfast.core.audit import AuditEntry, letter_entry, run_entry
from holdfast.core.dead_letters import DeadLetter, Settled, Settlement, letter_id, unreadable_payload
from holdfast.core.instants import Instant
from holdfast.core.keys import inbox_uuid
from holdfast.core.messages import Message
from holdfast.core.state import RunStatus
from holdfast.errors import CallerError, StoreCorrupt
from holdfast.store import decisions, port, sql
from holdfast.store.queries import DeadLetterQuery, within
from holdfast.store.sql import LETTER, found_of, letter_of, text_bytes
from holdfast.store.sqlite import audit, queries
from holdfast.store.sqlite.connection import check_unreadable

INSERT = (
    "INSERT OR REPLACE INTO dead_letters (run_no, letter_id, envelope, reason, detail, node, died_at, settled, "
    "settled_by, settled_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def letter_row(run_no: int, letter: DeadLetter) -> tuple[Any, ...]:
    """Return the row of a dead letter."""
    return (
        run_no,
        letter.letter_id,
        letter.envelope,
        letter.reason,
        letter.detail,
        letter.node,
        letter.died_at,
        letter.settled,
        letter.settled_by,
        letter.settled_at,
    )


def find(db: sqlite3.Connection, query: DeadLetterQuery, limit: int) -> port.Found[DeadLetter]:
    """Return the dead letters that match the query."""
    where = sql.letter_conditions(query, "runs")
    found = db.execute(
        f"SELECT {LETTER} FROM dead_letters JOIN runs USING (run_no) {where.text} ORDER BY died_at, letter_id LIMIT ?",
        where.values(limit),
    )
    taken = list(within(found, query.most_bytes, text_bytes))
    return found_of(taken, letter_of, itemgetter(0), itemgetter(6, 0))


def settle(
    db: sqlite3.Connection,
    ids: Sequence[str],
    action: Settlement,
    actor: str,
    now: Instant,
    entry: AuditEntry | None = None,
) -> list[Settled | port.Refused]:
    """Settle each letter, or return why it cannot be settled."""
    return [_settle(db, id_, action, actor, now, entry) for id_ in ids]


def _settle(
    db: sqlite3.Connection, id_: str, action: Settlement, actor: str, now: Instant, entry: AuditEntry | None
) -> Settled | port.Refused:
    select = f"SELECT {LETTER}, run_no, status FROM dead_letters JOIN runs USING (run_no) WHERE letter_id = ?"
    try:
        found = db.execute(select, (id_,)).fetchone()
        if found is None:
            return port.Refused(decisions.no_such_letter(id_))
        *row, run_no, status = found
        letter = letter_of(row)
    except (StoreCorrupt, sqlite3.OperationalError) as problem:
        check_unreadable(problem)
        return port.Refused(decisions.unreadable_letter(id_))
    if letter.settled == action:
        return Settled(id_, action)
    message = decisions.settled_message(letter, action, RunStatus(status))
    if isinstance(message, CallerError):
        return port.Refused(message)
    if message is not None:
        _requeue(db, run_no, message, now)
    db.execute(
        "UPDATE dead_letters SET settled = ?, settled_by = ?, settled_at = ? WHERE letter_id = ?",
        (action, actor, now, id_),
    )
    if entry is not None:
        place = audit.places_of(db, [letter.run_id])[letter.run_id]
        audit.append(db, [run_entry(letter_entry(entry, id_), letter.run_id, place, now)])
    return Settled(id_, action)


def _requeue(db: sqlite3.Connection, run_no: int, message: Message, now: Instant) -> None:
    """Put a message back, due now, unless there is another one with its id by now."""
    db.execute("INSERT OR IGNORE INTO messages VALUES (?, ?, ?, ?)", queries.message_row(run_no, message, now))
    db.execute("UPDATE runs SET ready_at = min(?, coalesce(ready_at, ?)) WHERE run_no = ?", (now, now, run_no))


def unreadable_to_dead_letters(db: sqlite3.Connection, run_no: int, node: str, now: Instant) -> None:
    """Turn unreadable messages and signals of a run into dead letters, with the bytes that are stored."""
    (run_id,) = db.execute("SELECT run_id FROM runs WHERE run_no = ?", (run_no,)).fetchone()
    messages = db.execute("SELECT signal_id, CAST(message AS BLOB) FROM messages WHERE run_no = ?", (run_no,))
    for signal_id, found in messages.fetchall():
        if not _can_be_read(sql.message_of, found):
            id_ = letter_id(run_id, signal_id, now)
            dead = _unreadable(id_, run_id, found, f"message {signal_id!r} cannot be read", node, now)
            db.execute(INSERT, letter_row(run_no, dead))
            db.execute("DELETE FROM messages WHERE run_no = ? AND signal_id = ?", (run_no, signal_id))
    signals = db.execute(
        "SELECT inbox_seq, name, signal_id, CAST(payload AS BLOB) FROM signals "
        "WHERE run_no = ? AND consumed_seq IS NULL",
        (run_no,),
    )
    for inbox_seq, name, signal_id, found in signals.fetchall():
        if not _can_be_read(sql.payload_of, found):
            id_ = letter_id(run_id, inbox_uuid(run_id, inbox_seq))
            dead = _unreadable(id_, run_id, found, unreadable_payload(name, signal_id), node, now)
            db.execute(INSERT, letter_row(run_no, dead))
            db.execute("DELETE FROM signals WHERE run_no = ? AND inbox_seq = ?", (run_no, inbox_seq))


def _can_be_read(read: Any, found: bytes) -> bool:
    try:
        read(found.decode())
        return True
    except (StoreCorrupt, UnicodeDecodeError):
        return False


def _unreadable(id_: str, run_id: str, found: bytes, detail: str, node: str, now: Instant) -> DeadLetter:
    return DeadLetter(
        letter_id=id_,
        run_id=run_id,
        envelope=found,
        reason="undecodable",
        detail=detail,
        node=node,
        died_at=now,
    )
