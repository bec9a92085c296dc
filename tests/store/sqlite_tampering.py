"""What tests do to a store's file behind its back."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def lose_record(path: Path, run_id: str, name: str, signal_id: str) -> None:
    """Delete the acceptance record of a signal from a SQLite file, and leave its payload."""
    scope = (run_id, name, signal_id)
    with closing(sqlite3.connect(path)) as db, db:
        deleted = db.execute(
            "DELETE FROM acceptance_records WHERE run_no = (SELECT run_no FROM runs WHERE run_id = ?) "
            "AND name = ? AND signal_id = ?",
            scope,
        )
        assert deleted.rowcount <= 1, scope
