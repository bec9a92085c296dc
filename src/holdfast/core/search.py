"""Conditions on the attributes of runs, and the text in which people write them: `cents>1000 region=eu`.

A query is a list of conditions separated by spaces, all of which must hold. A condition is a name, one of
= != < <= > >=, and a value. A value with spaces, or a text that looks like a number, is put in double quotes.
`region=*` finds runs that have the attribute and `region!=*` those that do not. `city=New*` finds texts with this
prefix; in quotes the asterisk has no special meaning. A list matches a value if one of its texts equals it. `!=` finds
runs that have the attribute with no value equal to this one.

Other fields of runs are named with a colon, status:failed workflow:order tag:web reference:"o 7" parent:RUN-ID, and
`created_at` and `finished_at` are compared with instants.

The declared type of a name determines how its value is read. If none is declared, the value itself does: `1000` is a
number, `true` a boolean, `2026-01-31` and `2026-01-31T09:00:00Z` are instants, everything else is text.
"""

from collections.abc import Callable, Mapping
from operator import ge, gt, le, lt
from re import compile as pattern
from typing import Any, Literal

from msgspec import Struct
from msgspec.json import decode

from holdfast.core.attributes import (
    EXACT,
    REFERENCE,
    AttributeType,
    RowKind,
    Value,
    instant_in,
    items_of,
    rows_of,
    to_value,
)
from holdfast.core.instants import Instant
from holdfast.errors import InvalidInput
from holdfast.limits import SEARCH_CONDITIONS

Operator = Literal["=", "!=", "<", "<=", ">", ">=", "prefix", "exists", "missing"]

_CONDITION = pattern(
    r"""\s*([A-Za-z][A-Za-z0-9_.]*)\s*(<=|>=|!=|=|<|>)\s*("(?:[^"\\]|\\.)*"|[^\s"]\S*)(?=\s|$)""",
)
_FIELD = pattern(r"""\s*([a-z]+):("(?:[^"\\]|\\.)*"|[^\s"]\S*)(?=\s|$)""")
_NUMBER = pattern(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MOMENT = pattern(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ].*)?")
_ORDERED = {"<": lt, "<=": le, ">": gt, ">=": ge}

OF_RUN: dict[str, Literal["created_at", "finished_at"]] = {"created_at": "created_at", "finished_at": "finished_at"}
"""The fields by which runs can be ordered, besides attributes."""


FIELDS = {
    "status": "status",
    "workflow": "workflow",
    "tag": "tag",
    "reference": "reference_key",
    "parent": "parent_run_id",
}
"""The names that are written with a colon, and their fields in a query."""

_BOUNDS = {">=": ("from", 0), ">": ("from", 1), "<": ("until", 0), "<=": ("until", 1)}


class Condition(Struct, frozen=True, gc=False):
    """A condition on one attribute. `kind` and `value` are those of an index row.

    For exists and missing there is no value, and the kind is None if it is not known.
    """

    name: str
    operator: Operator
    kind: RowKind | None = None
    value: str | float | None = None


class Order(Struct, frozen=True, gc=False):
    """The order of a result: by an attribute of this kind, never a list; or without a kind by a field of OF_RUN."""

    name: str
    kind: RowKind | None = None
    descending: bool = False


class ParsedQuery(Struct, frozen=True):
    """A parsed text: conditions on attributes, and values of `FIELDS`, `created_from` and the like."""

    conditions: tuple[Condition, ...] = ()
    fields: dict[str, str | Instant] = {}


def parse_query(text: str, types: Mapping[str, AttributeType]) -> ParsedQuery:
    """Parse a text, or raise `InvalidInput` with the position that cannot be read."""
    found: list[Condition] = []
    fields: dict[str, str | Instant] = {}
    place = 0
    text = text.rstrip()
    while place < len(text):
        try:
            if (match := _FIELD.match(text, place)) is not None:
                _add_field(fields, _named(match[1]), _literal(match[1], match[2]), match[1])
            elif (match := _CONDITION.match(text, place)) is None:
                rest = text[place:].strip()[:100]
                raise InvalidInput(
                    f"{rest!r} is not a condition; use a name, one of = != < <= > >=, and a value, such as cents>1000 "
                    'or city="New York"; or status:failed, workflow:order, tag:web, reference:o-7, parent:RUN-ID'
                )
            elif match[1] in OF_RUN:
                field, instant = _bound(match[1], match[2], _literal(match[1], match[3]))
                _add_field(fields, field, instant, match[1])
            else:
                found.append(_condition(match[1], match[2], match[3], types))
        except InvalidInput as problem:
            at = place + len(text[place:]) - len(text[place:].lstrip()) + 1
            said = problem.message.removeprefix("where: ")
            raise InvalidInput(f"where, character {at}: {said}", field="where", at=at) from None
        place = match.end()
    if len(found) > SEARCH_CONDITIONS:
        raise InvalidInput(f"where: a search has at most {SEARCH_CONDITIONS} conditions", field="where")
    return ParsedQuery(tuple(found), fields)


def parse_conditions(text: str, types: Mapping[str, AttributeType]) -> tuple[Condition, ...]:
    """Return the conditions on attributes in a text, which may contain nothing else."""
    parsed = parse_query(text, types)
    if parsed.fields:
        raise InvalidInput(f"where: {', '.join(parsed.fields)} cannot be asked for here", field="where")
    return parsed.conditions


def _named(name: str) -> str:
    if name not in FIELDS:
        raise InvalidInput(f"{name!r} is none of {', '.join(FIELDS)}; attributes are compared with = != < <= > >=")
    return FIELDS[name]


def _add_field(fields: dict[str, str | Instant], field: str, value: str | Instant, name: str) -> None:
    if field in fields:
        raise InvalidInput(f"{name} is asked for twice")
    fields[field] = str(value).upper() if field == "status" else value


def _bound(name: str, operator: str, text: str) -> tuple[str, Instant]:
    instant = instant_in(text)
    if instant is None or operator not in _BOUNDS:
        raise InvalidInput(f"{name} is compared with an instant, such as {name}>=2026-01-31, by one of < <= > >=")
    side, more = _BOUNDS[operator]
    return f"{name.removesuffix('_at')}_{side}", instant.at + more


def parse_order(text: str, types: Mapping[str, AttributeType]) -> Order:
    """Return the order that a text names: `cents`, or descending `-cents` or `cents desc`."""
    name = text.removeprefix("-").removesuffix(" desc").strip()
    descending = text.startswith("-") or text.endswith(" desc")
    if name in OF_RUN:
        return Order(name, None, descending)
    if types.get(name) not in (None, "list") or name.startswith(REFERENCE):
        return Order(name, _ROW_KINDS[types.get(name, "str")], descending)
    known = ", ".join([*OF_RUN, *(each for each, kind in sorted(types.items()) if kind != "list")])
    raise InvalidInput(f"order_by: {name!r} is none of: {known}", field="order_by")


_ROW_KINDS: dict[AttributeType, RowKind] = {
    "str": "s",
    "int": "n",
    "float": "n",
    "bool": "b",
    "datetime": "t",
    "list": "s",
}


def _condition(name: str, operator: str, literal: str, types: Mapping[str, AttributeType]) -> Condition:
    if literal == "*" and operator in ("=", "!="):
        declared = "str" if name.startswith(REFERENCE) else types.get(name)
        kind = None if declared is None else _ROW_KINDS[declared]
        return Condition(name, "exists" if operator == "=" else "missing", kind)
    if literal.endswith("*") and operator == "=" and types.get(name) in (None, "str", "list"):
        return Condition(name, "prefix", "s", literal[:-1])
    [(kind, value)] = items_of(_value(name, literal, types))
    return Condition(name, operator, kind, value)  # type: ignore[arg-type]


def _literal(name: str, literal: str) -> str:
    """Return the text of a written value."""
    try:
        return decode(literal, type=str) if literal.startswith('"') else literal
    except ValueError as problem:
        raise InvalidInput(f"the text of {name!r} is malformed: {problem}", field="where") from problem


def _value(name: str, literal: str, types: Mapping[str, AttributeType]) -> Value:
    is_quoted, text = literal.startswith('"'), _literal(name, literal)
    declared: AttributeType | None = "str" if name.startswith(REFERENCE) else types.get(name)
    if declared in ("str", "list") or (declared is None and is_quoted):
        return text
    if declared is not None:
        return to_value(name, _guess(text) if declared != "datetime" else text, types)
    return _guess(text)


def _guess(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    if match := _NUMBER.fullmatch(text):
        number = float(text)
        return number if match[2] or match[3] or abs(number) >= EXACT else int(text)
    moment = instant_in(text) if _MOMENT.fullmatch(text) else None
    return text if moment is None else moment


def matches(attributes: Mapping[str, Value], condition: Condition) -> bool:
    """Return whether a run's attributes meet a condition. Database queries have the same meaning."""
    value = attributes.get(condition.name)
    rows = [] if value is None else rows_of({condition.name: value})
    if condition.operator in ("exists", "missing"):
        return bool(rows) is (condition.operator == "exists")
    values = [item for _, kind, item in rows if kind == condition.kind]
    if condition.operator == "=":
        return condition.value in values
    if condition.operator == "!=":
        return bool(values) and condition.value not in values
    if condition.operator == "prefix":
        return any(str(item).startswith(str(condition.value)) for item in values)
    compare: Callable[[Any, Any], bool] = _ORDERED[condition.operator]
    return any(compare(item, condition.value) for item in values)


def after_prefix(prefix: str) -> str | None:
    """Return the smallest text that is greater, by bytes, than every text with this prefix; None if there is none."""
    for place in range(len(prefix) - 1, -1, -1):
        following = ord(prefix[place]) + 1
        if following < 0x110000:
            return prefix[:place] + chr(0xE000 if following == 0xD800 else following)
    return None
