"""Holdfast: durable workflows for Python."""

from holdfast import errors
from holdfast.limits import Limits
from holdfast.settings import Settings, load_settings
from holdfast.store.memory import MemoryStore
from holdfast.store.opening import open_store
from holdfast.store.sqlite import SqliteStore

__all__ = ["Limits", "MemoryStore", "Settings", "SqliteStore", "errors", "load_settings", "open_store"]
