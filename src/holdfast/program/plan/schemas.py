"""JSON Schemas of activities, as far as a plan needs them: the possible types of a value."""

from typing import Any

MOST_STEPS = 100
"""The maximum number of steps by which a schema is followed: one that refers to itself has no end."""


def schema_at(schema: dict[str, Any] | None, path: tuple[str | None, ...]) -> dict[str, Any] | None:
    """Return the schema of a part of a value, or None if it is not known; None in the path is any element of a list."""
    found = schema
    root = schema or {}
    for name in path:
        found = _resolved(found, root)
        if found is None:
            return None
        found = found.get("items") if name is None else (found.get("properties") or {}).get(name)
        if not isinstance(found, dict):
            return None
    resolved = _resolved(found, root)
    return None if resolved is None else {**resolved, "$defs": root.get("$defs", {})}


def types_of(schema: dict[str, Any] | None) -> frozenset[str] | None:
    """Return the JSON types that a schema allows, or None if it allows any."""
    if schema is None:
        return None
    pending, found, steps = [schema], set[str](), 0
    while pending:
        steps += 1
        one = _resolved(pending.pop(), schema)
        if one is None or steps > MOST_STEPS:
            return None
        union = one.get("anyOf") or one.get("oneOf")
        if union:
            pending.extend(union)
        elif "type" in one:
            kinds = one["type"]
            found |= set(kinds) if isinstance(kinds, list) else {kinds}
        elif "enum" in one and all(isinstance(value, str) for value in one["enum"]):
            found.add("string")
        else:
            return None
    return frozenset(found)


def _resolved(schema: dict[str, Any] | None, root: dict[str, Any]) -> dict[str, Any] | None:
    """Return a schema after following its references."""
    for _ in range(MOST_STEPS):
        if schema is None or "$ref" not in schema:
            return schema
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        schema = root.get("$defs", {}).get(name)
    return None
