"""Somebody who watches lists: what they want to hear of, and what they have not been told yet."""

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
"""How much one who watches may be behind; with more they are told to read their lists again."""

RESET = frame({}, event="reset")

_VIEWS: dict[Kind, tuple[str, str, Callable[[Any], Any]]] = {
    "runs": ("run", "run_id", run_view),
    "tasks": ("task", "task_id", listed_task),
    "letters": ("letter", "letter_id", letter_view),
}


class ListChange:
    """Something that has changed, and the run that it belongs to. It is put into words once, for all who hear of it."""

    def __init__(self, kind: Kind, head: RunHead, record: Any) -> None:
        self.kind = kind
        self.head = head
        self.record = record
        self._name, field, self._view = _VIEWS[kind]
        self._id = {field: getattr(record, field)}
        self.key = (kind, *self._id.values())

    @cached_property
    def is_there(self) -> bytes:
        """How it is now."""
        return frame(self._view(self.record), event=self._name)

    @cached_property
    def has_left(self) -> bytes:
        """It does not belong to the list, or no longer."""
        return frame(self._id, event=f"{self._name}_left")


class ListSubscription:
    """One who watches lists. `is_seen` says of what they hear, `is_listed` what of it their lists hold."""

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
        """Say whether they hear of this."""
        return kind in self._kinds

    def offer(self, told: ListChange) -> None:
        """Tell them, if it concerns them. What changes again before it is sent is sent once."""
        if self._is_reset or told.kind not in self._kinds or not self._is_seen(told.head):
            return
        is_listed = self._is_listed(told)
        if not is_listed and told.kind == "letters" and told.record.settled is None:
            return
        self._size -= len(self._pending.pop(told.key, b""))
        piece = self._pending[told.key] = told.is_there if is_listed else told.has_left
        self._size += len(piece)
        if len(self._pending) > MOST_PENDING or self._size > PENDING_BYTES:
            self.reset()
        self.wake.set()

    def reset(self) -> None:
        """Let them read their lists again, instead of telling them what has changed."""
        self._pending.clear()
        self._size = 0
        self._is_reset = True
        self.wake.set()

    def take(self) -> bytes:
        """Return what they have not been told yet."""
        if self._is_reset:
            self._is_reset = False
            return RESET
        pending, self._pending, self._size = self._pending, {}, 0
        return b"".join(pending.values())
