"""Holdfast: durable workflows for Python."""

from holdfast import errors
from holdfast.limits import Limits
from holdfast.store.memory import MemoryStore

__all__ = ["Limits", "MemoryStore", "errors"]
