"""An empty SQLite store for a test: the bytes of one that was migrated before, because making a schema takes longer.

That a schema is made is proved where files are opened that are not there yet.
"""

import os
import sqlite3
import tempfile
from functools import cache
from pathlib import Path

from holdfast.store.sqlite.connection import create_private
from holdfast.store.sqlite.migrate import migrate


def put_empty_store(path: Path) -> Path:
    """Write an empty store to a path where nothing is, and return the path."""
    create_private(path)
    path.write_bytes(_template())
    return path


@cache
def _template() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "template.db")
        database = sqlite3.connect(path, isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("BEGIN")
        migrate(database, path, 0)
        database.execute("COMMIT")
        database.close()
        assert os.listdir(folder) == [path.name]
        return path.read_bytes()
