"""Holdfast: durable workflows for Python."""

from holdfast import errors
from holdfast.core.retry import Retry
from holdfast.engine.activities import NonRetryable, activity_context
from holdfast.engine.app import App
from holdfast.engine.node import NodeOptions
from holdfast.limits import Limits
from holdfast.program.api import (
    Saga,
    continue_as_new,
    cut,
    now,
    on_query,
    on_update,
    patched,
    random,
    sleep,
    uuid4,
    wait_signal,
    wait_until,
)
from holdfast.program.tasks import task
from holdfast.settings import Settings, load_settings
from holdfast.store.memory import MemoryStore
from holdfast.store.opening import open_store
from holdfast.store.sqlite import SqliteStore

__all__ = [
    "App",
    "Limits",
    "MemoryStore",
    "NodeOptions",
    "NonRetryable",
    "Retry",
    "Saga",
    "Settings",
    "SqliteStore",
    "activity_context",
    "continue_as_new",
    "cut",
    "errors",
    "load_settings",
    "now",
    "on_query",
    "on_update",
    "open_store",
    "patched",
    "random",
    "sleep",
    "task",
    "uuid4",
    "wait_signal",
    "wait_until",
]
