"""The embedded store: one SQLite file, any number of processes on one machine."""

from holdfast.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
