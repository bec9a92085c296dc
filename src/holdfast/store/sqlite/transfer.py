"""Export and import of complete runs of a SQLite file."""

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from holdfast.core.audit import AuditEntry
from holdfast.core.codec import encode_text
from holdfast.core.instants import Instant
from holdfast.store import port, sql
from holdfast.store.sqlite import audit, queries, retention
from holdfast.store.sqlite.dead_letters import INSERT as INSERT_LETTER
from holdfast.store.sqlite.dead_letters import letter_row
from holdfast.store.transfer import (
    COLUMNS,
    ORDERS,
    RUN,
    WholeRun,
    assemble,
    run_row,
    signal_row,
    stream_rows,
    work_row,
)

Work = Callable[[sqlite3.Connection, Instant], Any]
Reading = Callable[[Work], Awaitable[Any]]
Writing = Callable[[Work], Awaitable[Any]]

_HEAD = f"""
SELECT {sql.HEAD}, request_key, input_sha256, last_accepted_at,
    EXISTS (SELECT 1 FROM gate_runs WHERE gate_runs.run_no = runs.run_no)
FROM runs WHERE run_id = ?
"""
_INSERT_RUN = f"INSERT INTO runs ({RUN}) VALUES ({', '.join('?' * 26)})"
_INSERT_SIGNAL = f"INSERT INTO signals (run_no, {sql.SIGNAL}) VALUES ({', '.join('?' * 10)})"
_TABLES = (*COLUMNS, "acceptance_records")


def read(db: sqlite3.Connection, run_ids: Sequence[str]) -> list[WholeRun | None]:
    """Return complete runs."""
    return [_read(db, run_id) for run_id in run_ids]


def _read(db: sqlite3.Connection, run_id: str) -> WholeRun | None:
    found = db.execute(_HEAD, (run_id,)).fetchone()
    if found is None:
        return None
    number = found[0]
    rows: dict[str, list[Any]] = {}
    for table, columns in COLUMNS.items():
        order = f"ORDER BY {ORDERS[table]}" if table in ORDERS else ""
        rows[table] = db.execute(f"SELECT {columns} FROM {table} WHERE run_no = ? {order}", (number,)).fetchall()
    records = db.execute("SELECT record FROM acceptance_records WHERE run_no = ?", (number,)).fetchall()
    return assemble(found[:23], found[23:], rows, [sql.acceptance_of(text) for [text] in records])


def write(db: sqlite3.Connection, runs: Sequence[WholeRun]) -> None:
    """Write runs unchanged, replacing what the file has of them."""
    for run in runs:
        _delete(db, run.head.run_id)
        [[number]] = db.execute("SELECT coalesce(max(run_no), 0) + 1 FROM runs")
        _write(db, number, run)


def _delete(db: sqlite3.Connection, run_id: str) -> None:
    for [number] in db.execute("SELECT run_no FROM runs WHERE run_id = ?", (run_id,)).fetchall():
        for table in _TABLES:
            db.execute(f"DELETE FROM {table} WHERE run_no = ?", (number,))
        db.execute("DELETE FROM runs WHERE run_no = ?", (number,))


def _write(db: sqlite3.Connection, number: int, run: WholeRun) -> None:
    db.execute(_INSERT_RUN, run_row(number, run))
    for event in run.events:  # one by one: each has its own persisted time
        rows = queries.event_rows(number, (event,), event.run_seq - 1, event.persisted_at)
        queries.insert_events(db, rows)
    db.executemany(
        queries.INSERT_MESSAGE, [(number, one.signal_id, due_at, encode_text(one)) for due_at, one in run.messages]
    )
    db.executemany(_INSERT_SIGNAL, [signal_row(number, signal) for signal in run.signals])
    db.executemany(
        "INSERT INTO acceptance_records VALUES (?, ?, ?, ?, ?)",
        [(number, one.signal_name, one.signal_id, one.expires_at, encode_text(one)) for one in run.acceptances],
    )
    db.executemany(queries.INSERT_WAIT, [queries.wait_row(number, wait) for wait in run.waits])
    db.executemany(queries.INSERT_TASK, [queries.task_row(number, task) for task in run.tasks])
    db.executemany(queries.INSERT_RECORD, [queries.record_row(number, record) for record in run.records])
    db.executemany(
        "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(number, *work_row(step_id, work)) for step_id, work in run.work.items()],
    )
    db.executemany(INSERT_LETTER, [letter_row(number, letter) for letter in run.letters])
    db.executemany(queries.INSERT_ATTRIBUTE, queries.attribute_rows(number, run.attributes))
    for table, rows in stream_rows(number, run).items():
        places = ", ".join("?" * (COLUMNS[table].count(",") + 2))
        db.executemany(f"INSERT INTO {table} (run_no, {COLUMNS[table]}) VALUES ({places})", rows)
    if run.plan_sha256 is not None:
        use = (number, run.head.tenant, bytes.fromhex(run.plan_sha256))
        db.execute("INSERT INTO plan_uses VALUES (?, ?, ?)", use)


def write_audit(db: sqlite3.Connection, entries: Sequence[AuditEntry]) -> None:
    """Write the entries of the audit log that are missing."""
    known = {(at, id_) for at, id_ in db.execute("SELECT at, entry_id FROM audit_log")}
    audit.append(db, [entry for entry in entries if (entry.at, entry.entry_id) not in known])


class SqliteTransfer:
    """The `Transfer` of a SQLite file."""

    def __init__(self, read: Reading, write: Writing) -> None:
        self._read = read
        self._write = write

    async def settle(self) -> None:
        """Do nothing: what a turn sends to other runs is delivered with its commit."""

    async def read_runs(self, run_ids: Sequence[str]) -> list[WholeRun | None]:
        """Return complete runs."""
        found: list[WholeRun | None] = await self._read(lambda db, now: read(db, run_ids))
        return found

    async def write_runs(self, runs: Sequence[WholeRun]) -> None:
        """Write runs unchanged."""
        await self._write(lambda db, now: write(db, [run.released(now) for run in runs]))

    async def write_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Write entries of the audit log with their original times."""
        await self._write(lambda db, now: write_audit(db, entries))

    async def write_archived(self, runs: Sequence[port.ArchivedRun]) -> None:
        """Write archive locations of deleted runs."""
        await self._write(lambda db, now: retention.note_archived(db, runs))
