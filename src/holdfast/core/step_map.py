"""The steps of a run by id, copied for each turn at a cost that depends on the changes.

A state is never modified, so each turn works on a copy of its mappings. Most runs have a few open steps, and copying a
`dict` takes almost no time. A run of a plan may have ten thousand: `copy_of` makes a `StepMap` of so many. Its copies
share one `dict` that no longer changes, and each has the few entries that differ. When there are too many of these,
they are merged into a new `dict`. So a turn costs about the square root of the number of open steps. The order is that
of a `dict`.
"""

from collections.abc import Iterator, MutableMapping
from math import isqrt
from typing import TypeVar

V = TypeVar("V")

LARGE = 512
"""The number of entries from which copies share a base. Below it a plain `dict` is faster."""


def copy_of(steps: dict[str, V]) -> dict[str, V]:
    """Return a copy for the caller alone. It behaves like a `dict`, and shares most entries of a large one."""
    if type(steps) is dict:
        return steps.copy() if len(steps) < LARGE else StepMap(steps.copy())  # type: ignore[return-value]
    return steps.copy()


class StepMap(MutableMapping[str, V]):
    """A mapping in insertion order. Its copies share their common entries."""

    __slots__ = ("_base", "_changed", "_gone", "_size")

    def __init__(
        self, base: dict[str, V], changed: dict[str, V] | None = None, gone: set[str] | None = None, size: int = -1
    ) -> None:
        """`base` is shared with others and never changes: the caller must not change it either."""
        self._base = base
        self._changed: dict[str, V] = {} if changed is None else changed
        self._gone: set[str] = set() if gone is None else gone
        self._size = len(base) if size < 0 else size

    def copy(self) -> dict[str, V]:
        """Return a copy: this map and the copy share the base."""
        if len(self._changed) + len(self._gone) <= LARGE // 16 + isqrt(len(self._base)):
            return StepMap(self._base, self._changed.copy(), self._gone.copy(), self._size)  # type: ignore[return-value]
        merged = dict(self.items())
        return merged if len(merged) < LARGE // 2 else StepMap(merged)  # type: ignore[return-value]

    def __getitem__(self, key: str) -> V:
        if key in self._changed:
            return self._changed[key]
        if key in self._gone:
            raise KeyError(key)
        return self._base[key]

    def __contains__(self, key: object) -> bool:
        return key in self._changed or (key in self._base and key not in self._gone)

    def __setitem__(self, key: str, value: V) -> None:
        self._size += key not in self
        self._changed[key] = value

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._changed.pop(key, None)
        if key in self._base:
            self._gone.add(key)
        self._size -= 1

    def __iter__(self) -> Iterator[str]:
        gone, base = self._gone, self._base
        yield from (key for key in base if key not in gone) if gone else base
        yield from (key for key in self._changed if key not in base or key in gone)

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return self._size > 0

    def __repr__(self) -> str:
        return f"StepMap({dict(self.items())!r})"

    def clear(self) -> None:
        """Remove everything."""
        self._base, self._changed, self._gone, self._size = {}, {}, set(), 0
