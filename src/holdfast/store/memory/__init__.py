"""The memory store: the reference model of every store."""

from holdfast.store.memory.store import MemoryStore

__all__ = ["MemoryStore"]
