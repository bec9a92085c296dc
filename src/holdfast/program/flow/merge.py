"""Merges, field by field, the changes that the branches of a chorus made to the state.

It works on the JSON of the states and calls none of the author's code, so nothing needs to be recorded.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Raw

from holdfast.core import codec
from holdfast.errors import Conflict


def merged(chorus: str, before: Raw, after: Mapping[str, Raw]) -> Raw:
    """Return the state with the changes of every branch; raise `Conflict` if two have changed the same field.

    That holds even if both have the same value: two branches that count from 0 to 1 have counted to 2.
    """
    changed = {branch: state for branch, state in after.items() if bytes(state) != bytes(before)}
    if not changed:
        return before
    if len(after) == 1:
        return next(iter(changed.values()))
    base: dict[str, Raw] = codec.decode(before, dict[str, Raw])
    result = dict(base)
    by: dict[str, str] = {}
    for branch, state in changed.items():
        fields: dict[str, Raw] = codec.decode(state, dict[str, Raw])
        for name in [*base, *(name for name in fields if name not in base)]:
            value = fields.get(name)
            if _is_unchanged(base.get(name), value):
                continue
            if name in by:
                raise Conflict(
                    f"branches {by[name]!r} and {branch!r} of {chorus!r} both change the field {name!r}; "
                    "let one of them do it, or give the Chorus a `merge`",
                    field=name,
                    branches=[by[name], branch],
                )
            by[name] = branch
            if value is None:
                result.pop(name, None)
            else:
                result[name] = value
    return Raw(b"{" + b",".join(bytes(codec.encode(name)) + b":" + bytes(raw) for name, raw in result.items()) + b"}")


def _is_unchanged(before: Raw | None, after: Raw | None) -> bool:
    """Return whether a field is unchanged. A missing field differs from every value."""
    if before is None or after is None:
        return before is after
    return bytes(before) == bytes(after) or is_same(codec.decode(before, Any), codec.decode(after, Any))


def is_same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are the same: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)
