"""Conditions of a query that grow one by one."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from holdfast.core.audit import AuditQuery

T = TypeVar("T")


def within(rows: Iterable[T], most_bytes: int | None, size_of: Callable[[T], int]) -> Iterator[T]:
    """Return rows up to the one with which they reach this size together."""
    size = 0
    for row in rows:
        yield row
        if most_bytes is not None:
            size += size_of(row)
            if size >= most_bytes:
                return


def text_bytes(row: Iterable[Any]) -> int:
    """Return about how large a row is: the texts in it."""
    return sum(len(value) for value in row if isinstance(value, str | bytes))


class Where:
    """Gathers the conditions of a query, and their values."""

    def __init__(self) -> None:
        self._conditions: list[str] = []
        self._values: list[Any] = []

    def add(self, condition: str, *values: Any) -> None:
        """Add a condition and its values."""
        self._conditions.append(condition)
        self._values.extend(values)

    def add_given(self, condition: str, value: Any) -> None:
        """Add a condition unless its value is None."""
        if value is not None:
            self.add(condition, value)

    @property
    def text(self) -> str:
        """The clause."""
        return "WHERE " + " AND ".join(self._conditions)

    @property
    def numbered(self) -> str:
        """The clause with its places numbered from $1, as PostgreSQL wants them. No condition holds another `?`."""
        first, *rest = self.text.split("?")
        return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))

    @property
    def next_place(self) -> str:
        """The place after those of the conditions: where a limit goes."""
        return f"${len(self._values) + 1}"

    def values(self, limit: int) -> list[Any]:
        """Return the values of the conditions, and a limit."""
        return [*self._values, limit]


def audit_conditions(query: AuditQuery) -> Where:
    """Return what the entries of the audit log that a query names have in common."""
    where = Where()
    where.add("at >= ?", 0 if query.since is None else query.since)
    where.add_given("at < ?", query.until)
    if query.after is not None:
        where.add(f"(at, entry_id) {'<' if query.newest else '>'} (?, ?)", *query.after)
    for column in ("tenant", "run_id", "actor", "token_id", "operation"):
        where.add_given(f"{column} = ?", getattr(query, column))
    return where
