"""Search attributes: typed values by which a run is found. They are stored unencrypted, next to the history.

An app declares the type of each name. So a value of another type is refused before anything is stored, in the process
that has the code, and a replayed workflow gets the same answer as the first time: it does not depend on the contents
of a store. An index row has the kind of its value, so two apps that declare a name differently do not mix their values.

The parts of a run's business reference are attributes too, of type str and named `reference.PART`.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from math import isfinite
from re import compile as pattern
from typing import Any, Literal, get_args, get_origin

from msgspec import Struct

from holdfast.core.instants import Instant, datetime_of, instant_of
from holdfast.errors import InvalidInput
from holdfast.limits import ATTRIBUTE_BYTES, ATTRIBUTE_ITEMS, ATTRIBUTES

AttributeType = Literal["str", "int", "float", "bool", "datetime", "list"]
"""The type of an attribute. `list` is a list of str."""

RowKind = Literal["s", "n", "b", "t"]
"""How a value is compared: as text, as a number, as a truth value, or as an instant."""

REFERENCE = "reference."
"""The prefix of attributes that hold the parts of a business reference."""

RESERVED = frozenset({"created_at", "finished_at", "status", "workflow", "tag", "reference", "run_id", "tenant"})
"""Names that are taken by the fields of a run."""

EXACT = 2**53
"""Whole numbers are below this, as in JSON: every reader, also JavaScript in a browser, has them exactly."""

_NAME = pattern(r"[a-z][a-z0-9_]{0,62}")
_PART = pattern(r"[A-Za-z][A-Za-z0-9_]{0,62}")


class At(Struct, frozen=True, gc=False):
    """An instant as the value of an attribute: microseconds since 1970."""

    at: Instant


Value = str | int | float | bool | tuple[str, ...] | At
Attributes = dict[str, Value]
Row = tuple[str, RowKind, str | float]
"""One entry of the index: name, kind, and the value as it is compared."""


def declared_types(types: Mapping[Any, Any]) -> dict[str, AttributeType]:
    """Return the types that an app declares, by name: str, int, float, bool, datetime or list[str]."""
    given_types: object = types
    if not isinstance(given_types, Mapping):
        text = f'attributes are types by name, such as {{"region": str}}, not {given_types!r}'
        raise InvalidInput(text, field="attributes")
    if len(types) > ATTRIBUTES:
        raise InvalidInput(f"attributes: an app declares at most {ATTRIBUTES}, not {len(types)}", field="attributes")
    known: dict[Any, AttributeType] = {str: "str", int: "int", float: "float", bool: "bool", datetime: "datetime"}
    declared: dict[str, AttributeType] = {}
    for name, given in types.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in RESERVED:
            raise InvalidInput(
                f"attributes: {name!r} cannot be the name of an attribute: a name has a to z, 0 to 9 and _, begins "
                f"with a letter, and is none of {', '.join(sorted(RESERVED))}",
                field="attributes",
            )
        is_list = get_origin(given) is list and get_args(given) == (str,)
        kind: AttributeType | None = "list" if is_list else known.get(given)
        if kind is None:
            raise InvalidInput(
                f"attributes: {name!r} is declared as {given!r}; declare str, int, float, bool, datetime or list[str]",
                field="attributes",
            )
        declared[name] = kind
    return declared


def to_values(given: Mapping[str, Any], types: Mapping[str, AttributeType]) -> Attributes:
    """Return the attributes that a run is started with, or raise `InvalidInput`."""
    if not isinstance(given, Mapping):
        raise InvalidInput(f"attributes are a dict of names and values, not {given!r}", field="attributes")
    return {name: to_value(name, value, types) for name, value in given.items()}


def to_changes(given: Mapping[str, Any], types: Mapping[str, AttributeType]) -> dict[str, Value | None]:
    """Return the changes that a workflow makes; None removes an attribute."""
    return {name: None if value is None else to_value(name, value, types) for name, value in given.items()}


def to_value(name: str, value: Any, types: Mapping[str, AttributeType]) -> Value:
    """Return a value of the type that is declared for its name. An instant may be given as ISO 8601 text."""
    declared = types.get(name)
    if declared is None:
        known = ", ".join(sorted(types)) or "none"
        raise InvalidInput(
            f"attributes: {name!r} is not declared (declared are: {known}); add it to App(attributes=…)",
            field="attributes",
        )
    made: Value | None = _MAKERS[declared](value)
    if made is None:
        raise InvalidInput(
            f"attributes: {name!r} is declared as {declared} and cannot be {value!r}"[:500], field="attributes"
        )
    return made


def to_parts(parts: Any) -> Attributes:
    """Return the parts of a business reference as attributes."""
    if not isinstance(parts, Mapping) or len(parts) > ATTRIBUTES:
        raise InvalidInput(f"reference_parts: a dict of at most {ATTRIBUTES} texts", field="reference_parts")
    made: Attributes = {}
    for name, value in parts.items():
        if not isinstance(name, str) or not _PART.fullmatch(name) or (text := _text(value)) is None:
            raise InvalidInput(
                f"reference_parts: {name!r} with {value!r} is no part of a reference: names are identifiers, and "
                f"values are texts of at most {ATTRIBUTE_BYTES} bytes"[:500],
                field="reference_parts",
            )
        made[REFERENCE + name] = text
    return made


def parts_of(attributes: Mapping[str, Value]) -> dict[str, str]:
    """Return the parts of a run's reference."""
    return {
        name.removeprefix(REFERENCE): str(value) for name, value in attributes.items() if name.startswith(REFERENCE)
    }


def changed(attributes: Mapping[str, Value], changes: Mapping[str, Value | None]) -> Attributes:
    """Return a run's attributes after a change."""
    merged = {**attributes, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def rows_of(attributes: Mapping[str, Value]) -> list[Row]:
    """Return the index rows of a run's attributes. A list has one row for each of its texts."""
    return [(name, kind, item) for name, value in attributes.items() for kind, item in items_of(value)]


def items_of(value: Value) -> Iterator[tuple[RowKind, str | float]]:
    """Yield how a value is compared, and with what."""
    if isinstance(value, str):
        yield "s", value
    elif isinstance(value, bool):
        yield "b", float(value)
    elif isinstance(value, int | float):
        yield "n", float(value)
    elif isinstance(value, At):
        yield "t", float(value.at)
    else:
        for text in dict.fromkeys(value):
            yield "s", text


def plain(value: Value) -> str | int | float | bool | list[str] | datetime:
    """Return a value as programs and callers see it."""
    if isinstance(value, At):
        return datetime_of(value.at)
    return list(value) if isinstance(value, tuple) else value


def instant_in(text: str) -> At | None:
    """Return the instant of an ISO 8601 text. Without a time zone it is in UTC."""
    try:
        moment = datetime.fromisoformat(text)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return At(instant_of(moment))
    except (ValueError, OverflowError):
        return None


def _text(value: Any) -> str | None:
    if not isinstance(value, str) or "\0" in value:
        return None
    try:
        return value if len(value.encode()) <= ATTRIBUTE_BYTES else None
    except UnicodeEncodeError:
        return None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and -EXACT < value < EXACT else None


def _number(value: Any) -> float | None:
    if type(value) is int:
        return float(value) if -EXACT < value < EXACT else None
    return value if type(value) is float and isfinite(value) else None


def _truth(value: Any) -> bool | None:
    return value if type(value) is bool else None


def _moment(value: Any) -> At | None:
    if isinstance(value, datetime | date | str):
        return instant_in(value if isinstance(value, str) else value.isoformat())
    return value if isinstance(value, At) else None


def _texts(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, list | tuple) or len(value) > ATTRIBUTE_ITEMS:
        return None
    texts = [_text(each) for each in value]
    return None if None in texts else tuple(each for each in texts if each is not None)


_MAKERS: dict[AttributeType, Any] = {
    "str": _text,
    "int": _whole,
    "float": _number,
    "bool": _truth,
    "datetime": _moment,
    "list": _texts,
}
