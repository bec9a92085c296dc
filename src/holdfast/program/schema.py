"""The JSON Schema of a type, with fields and choices in the order of their declaration, for people to read.

`msgspec` sorts the choices of enums and literals, and the fields of typed dicts. Their order is looked up in the type.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

import msgspec


def json_schema(kind: Any, describe: Callable[[Any], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the JSON Schema of a type; `describe` returns it for a class that msgspec does not know.

    Raises `TypeError` for a type without one.
    """
    schema = msgspec.json.schema(kind, schema_hook=describe)
    parts = list(parts_of(kind, set()))
    choices = [(part.__name__, [member.value for member in part]) for part in parts if _is_enum(part)]
    choices += [("", list(get_args(part))) for part in parts if get_origin(part) is Literal]
    fields = {part.__name__: list(get_type_hints(part)) for part in parts if is_typeddict(part)}
    return _ordered(schema, choices, fields) if choices or fields else schema


Choices = list[tuple[str, list[Any]]]


def _is_enum(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, Enum)


def parts_of(kind: Any, seen: set[int]) -> Iterator[Any]:
    """Return the types that a type is composed of, each once."""
    if id(kind) in seen:
        return
    seen.add(id(kind))
    yield kind
    if get_origin(kind) is Literal:
        return
    for argument in get_args(kind):
        yield from parts_of(argument, seen)
    if isinstance(kind, type) and not _is_enum(kind):
        try:
            hints = get_type_hints(kind, include_extras=True)
        except (NameError, TypeError):
            return
        for hint in hints.values():
            yield from parts_of(hint, seen)
    for name in ("__value__", "__supertype__"):  # of an alias, and of a NewType
        alias = getattr(kind, name, None)
        if alias is not None:
            yield from parts_of(alias, seen)


def _ordered(schema: Any, choices: Choices, fields: dict[str, list[str]]) -> Any:
    if isinstance(schema, list):
        return [_ordered(each, choices, fields) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key == "enum" else _ordered(value, choices, fields) for key, value in schema.items()}
    title = schema.get("title", "")
    if isinstance(schema.get("enum"), list):
        found["enum"] = _as_declared(schema["enum"], title, choices)
    names = fields.get(title)
    if names is not None and isinstance(found.get("properties"), dict) and set(names) >= set(found["properties"]):
        found["properties"] = {name: found["properties"][name] for name in names if name in found["properties"]}
        found["required"] = [name for name in names if name in found.get("required", ())]
    return found


def _as_declared(found: list[Any], title: str, choices: Choices) -> list[Any]:
    """Return the choices in the order of a declaration with exactly these, preferably one with this title."""
    for _, declared in sorted(choices, key=lambda each: each[0] != title):
        if sorted(map(repr, declared)) == sorted(map(repr, found)):
            return declared
    return found
