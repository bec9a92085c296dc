"""The floor: bare `sqlite3` that writes the rows of a turn and does nothing else.

No encoding, no checks, no answers: rows that were prepared beforehand, with `executemany`, in as many transactions as
the store uses, in a file that began as a copy of the store's, through a connection with the same settings.

The rows are taken from a third copy of the file to which the store commits the same turns, so they are by construction
the rows that the store writes.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from holdfast.store.port import Turn
from holdfast.store.sqlite.connection import Database

UPDATED = ("status", "version", "snapshot", "updated_at", "finished_at", "ready_at", "lease_owner")
"""The columns of a run that a turn changes."""


class Rows(Struct, frozen=True):
    """The rows of one batch of turns."""

    runs: list[tuple[object, ...]]
    events: list[tuple[object, ...]]
    consumed: list[tuple[object, ...]]
    messages: list[tuple[object, ...]]


class Floor:
    """A connection that writes rows."""

    def __init__(self, database: Database) -> None:
        self._database = database
        connection = database.connection
        assignments = ", ".join(f"{column} = ?" for column in UPDATED)
        self._update_run = f"UPDATE runs SET {assignments} WHERE run_no = ?"
        self._insert_event = _insert(connection, "events")
        self._insert_message = _insert(connection, "messages")

    @classmethod
    async def open(cls, path: Path) -> "Floor":
        """Open a file in the way that the store does."""
        return cls(await Database.open(path, busy_ms=5_000))

    def write(self, rows: Rows) -> None:
        """Write the rows in one transaction."""
        db = self._database.connection
        db.execute("BEGIN IMMEDIATE")
        db.executemany(self._update_run, rows.runs)
        db.executemany(self._insert_event, rows.events)
        db.executemany("DELETE FROM messages WHERE run_no = ? AND signal_id = ?", rows.consumed)
        db.executemany(self._insert_message, rows.messages)
        db.execute("COMMIT")

    async def close(self) -> None:
        """Close the file."""
        await self._database.close()


def _insert(connection: sqlite3.Connection, table: str) -> str:
    columns = len(connection.execute(f"PRAGMA table_info({table})").fetchall())
    return f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})"


def rows_of(connection: sqlite3.Connection, turns: Sequence[Turn]) -> Rows:
    """Return the rows that the commit of these turns, which has just been made, has written."""
    rows = Rows([], [], [], [])
    for turn in turns:
        (run_no,) = connection.execute("SELECT run_no FROM runs WHERE run_id = ?", (turn.run_id,)).fetchone()
        columns = ", ".join((*UPDATED, "run_no"))
        rows.runs.extend(connection.execute(f"SELECT {columns} FROM runs WHERE run_no = ?", (run_no,)))
        new_events = (run_no, turn.expected_version)
        rows.events.extend(connection.execute("SELECT * FROM events WHERE run_no = ? AND run_seq > ?", new_events))
        rows.consumed.extend((run_no, signal_id) for signal_id in turn.consumed)
        for message in turn.messages:
            key = (run_no, message.signal_id)
            found = connection.execute("SELECT * FROM messages WHERE run_no = ? AND signal_id = ?", key)
            rows.messages.extend(found)
    return rows
