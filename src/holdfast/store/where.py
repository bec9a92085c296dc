"""Conditions of a query that grow one by one."""

from typing import Any


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
