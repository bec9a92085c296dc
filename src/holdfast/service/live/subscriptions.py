"""Subscriptions to lists: the filter of each, and its pending changes."""

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

from holdfast.service.live.sse import frame
from holdfast.service.views import letter_view, listed_task, run_view
from holdfast.store.port import RunHead

Kind = Literal["runs", "tasks", "letters"]

MOST_PENDING = 500
PENDING_BYTES = 1024 * 1024
"""How many bytes may be pending for one subscription. Beyond it the subscriber reads its lists again."""

RESET = frame({}, event="reset")

_VIEWS: dict[Kind, tuple[str, str, Callable[[Any], Any]]] = {
    "runs": ("run", "run_id", run_view),
    "tasks": ("task", "task_id", listed_task),
    "letters": ("letter", "letter_id", letter_view),
}


class ListChange:
    """An item that has changed, and its run. It is encoded once, for all subscribers."""

    def __init__(self, kind: Kind, head: RunHead, record: Any) -> None:
        self.kind = kind
        self.head = head
        self.record = record
        self._name, field, self._view = _VIEWS[kind]
        self._id = {field: getattr(record, field)}
        self.key = (kind, *self._id.values())

    @cached_property
    def is_there(self) -> bytes:
        """The item in its current state."""
        return frame(self._view(self.record), event=self._name)

    @cached_property
    def has_left(self) -> bytes:
        """The item is not in the list, or no longer."""
        return frame(self._id, event=f"{self._name}_left")


class ListSubscription:
    """A subscription to lists. `is_seen` decides which runs it may see, `is_listed` which items its lists contain."""

    def __init__(
        self, kinds: frozenset[str], is_seen: Callable[[RunHead], bool], is_listed: Callable[[ListChange], bool]
    ) -> None:
        self.wake = asyncio.Event()
        self._kinds = kinds
        self._is_seen = is_seen
        self._is_listed = is_listed
        self._pending: dict[Any, bytes] = {}
        self._size = 0
        self._is_reset = True

    def wants(self, kind: Kind) -> bool:
        """Return whether this kind is subscribed to."""
        return kind in self._kinds

    def offer(self, change: ListChange) -> None:
        """Queue a change, if it is subscribed to. An item that changes again before it is sent is sent only once."""
        if self._is_reset or change.kind not in self._kinds or not self._is_seen(change.head):
            return
        is_listed = self._is_listed(change)
        if not is_listed and change.kind == "letters" and change.record.settled is None:
            return
        self._size -= len(self._pending.pop(change.key, b""))
        piece = self._pending[change.key] = change.is_there if is_listed else change.has_left
        self._size += len(piece)
        if len(self._pending) > MOST_PENDING or self._size > PENDING_BYTES:
            self.reset()
        self.wake.set()

    def reset(self) -> None:
        """Make the subscriber read its lists again, instead of sending the changes."""
        self._pending.clear()
        self._size = 0
        self._is_reset = True
        self.wake.set()

    def take(self) -> bytes:
        """Return the pending changes."""
        if self._is_reset:
            self._is_reset = False
            return RESET
        pending, self._pending, self._size = self._pending, {}, 0
        return b"".join(pending.values())
