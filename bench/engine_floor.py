"""The floor under the engine: bare `sqlite3` that writes the rows of whole runs, in transactions of the same size.

The rows are read from the file that the engine wrote; which of them shared a transaction was noted while it did.
"""

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from bench.floor import UPDATED
from bench.metered import Write
from holdfast.core import codec
from holdfast.store.sqlite.connection import Database


class Rows(Struct):
    """The rows of one transaction."""

    runs: list[tuple[object, ...]]
    updates: list[tuple[object, ...]]
    events: list[tuple[object, ...]]
    messages: list[tuple[object, ...]]
    consumed: list[tuple[object, ...]]

    def __len__(self) -> int:
        return sum(len(rows) for rows in (self.runs, self.updates, self.events, self.messages, self.consumed))


def rows_of(path: Path, transactions: Sequence[Sequence[Write]]) -> list[Rows]:
    """Return the rows that these writes have left in a file, or had there for a while."""
    columns = ", ".join((*UPDATED, "run_no"))
    with closing(sqlite3.connect(path)) as db:
        runs = {run[1]: run for run in db.execute("SELECT * FROM runs")}
        updates = {row[-1]: row for row in db.execute(f"SELECT {columns} FROM runs")}
        events = {row[:2]: row for row in db.execute("SELECT * FROM events")}
    return [_rows(writes, runs, updates, events) for writes in transactions]


def _rows(
    writes: Sequence[Write],
    runs: dict[str, tuple[object, ...]],
    updates: dict[object, tuple[object, ...]],
    events: dict[tuple[object, ...], tuple[object, ...]],
) -> Rows:
    rows = Rows([], [], [], [], [])
    for write in writes:
        run = runs[write.run_id]
        run_no = run[0]
        if write.is_new:
            rows.runs.append(run)
        else:
            rows.updates.append(updates[run_no])
            rows.consumed.extend((run_no, signal_id) for signal_id in write.consumed)
        rows.events.extend(events[run_no, write.version + index + 1] for index in range(write.events))
        for message in write.messages:
            text = codec.encode(message)
            rows.messages.append((run_no, message.signal_id, message.due_at or message.occurred_at, bytes(text)))
    return rows


async def write(path: Path, transactions: Sequence[Rows]) -> float:
    """Write the rows into a file with the store's schema; return the seconds that it took."""
    database = await Database.open(path, busy_ms=5_000)
    db = database.connection
    insert = {table: _insert(db, table) for table in ("runs", "events", "messages")}
    update = f"UPDATE runs SET {', '.join(f'{column} = ?' for column in UPDATED)} WHERE run_no = ?"
    began = time.perf_counter()
    for rows in transactions:
        db.execute("BEGIN IMMEDIATE")
        db.executemany(insert["runs"], rows.runs)
        db.executemany(update, rows.updates)
        db.executemany(insert["events"], rows.events)
        db.executemany("DELETE FROM messages WHERE run_no = ? AND signal_id = ?", rows.consumed)
        db.executemany(insert["messages"], rows.messages)
        db.execute("COMMIT")
    taken = time.perf_counter() - began
    await database.close()
    return taken


def _insert(connection: sqlite3.Connection, table: str) -> str:
    columns = len(connection.execute(f"PRAGMA table_info({table})").fetchall())
    return f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})"
