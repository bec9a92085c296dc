"""Holdfast: durable workflows for Python."""

from holdfast import errors
from holdfast.app import App
from holdfast.core.timing import Retry
from holdfast.engine.activities.context import NonRetryable, activity_context
from holdfast.engine.options import NodeOptions
from holdfast.limits import Limits
from holdfast.program.api import (
    Saga,
    continue_as_new,
    continue_as_new_if_long,
    cut,
    now,
    on_query,
    on_update,
    patched,
    random,
    sleep,
    uuid4,
    wait_until,
)
from holdfast.program.signals import signals, wait_signal
from holdfast.program.tasks import task
from holdfast.settings import Settings
from holdfast.store.memory import MemoryStore
from holdfast.store.open import open_store
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
    "continue_as_new_if_long",
    "cut",
    "errors",
    "now",
    "on_query",
    "on_update",
    "open_store",
    "patched",
    "random",
    "signals",
    "sleep",
    "task",
    "uuid4",
    "wait_signal",
    "wait_until",
]
