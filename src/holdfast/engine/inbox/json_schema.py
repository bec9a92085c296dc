"""Validates values against the JSON Schemas that workflows publish, where the workflow's code is not available.

msgspec makes the schemas from the types of the code. They are checked as strictly as the code would: 1.0 is not an
integer, and formats are enforced. Schemas are never fetched from elsewhere.
"""

from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cache
from typing import Any
from uuid import UUID

import msgspec

from holdfast.core.codec import NO_CHOICE

FORMATS: dict[str, type] = {
    "date-time": datetime,
    "date": date,
    "time": time,
    "duration": timedelta,
    "uuid": UUID,
    "decimal": Decimal,
}
_SAID = {
    "enum": NO_CHOICE,
    "const": NO_CHOICE,
    "additionalProperties": "Object contains a field that is not declared",
    "unevaluatedProperties": "Object contains a field that is not declared",
    "anyOf": "It fits none of the types that are declared",
}


class SchemaCheck:
    """Checks values against one schema."""

    __slots__ = ("_names", "_validator")

    def __init__(self, schema: Mapping[str, Any]) -> None:
        from referencing import Registry

        self._validator = _validator_class()(schema, registry=Registry(), format_checker=_format_checker())
        self._names = frozenset(_property_names(schema))

    def misfit(self, payload: bytes) -> tuple[str, str] | None:
        """Return where a payload does not fit and why, in words taken from the schema alone; None if it fits."""
        try:
            value = msgspec.json.decode(payload)
            problem = next(iter(self._validator.iter_errors(value)), None)
        except RecursionError:
            return "", "it is nested too deeply"
        if problem is None:
            return None
        where = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" if part in self._names else "[...]"
            for part in problem.absolute_path
        )
        return where, _reason(problem)


def _reason(problem: Any) -> str:
    if problem.validator == "type":
        return f"Expected `{problem.validator_value}`"
    if problem.validator == "required":
        missing = [name for name in problem.validator_value if name not in problem.instance]
        return f"Object missing required field `{missing[0]}`"
    if problem.validator == "format":
        return f"Expected a `{problem.validator_value}`"
    return _SAID.get(problem.validator, f"It does not keep to `{problem.validator}` of what is declared")


def _property_names(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        yield from schema.get("properties", {})
        for part in schema.values():
            yield from _property_names(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _property_names(part)


@cache
def _validator_class() -> Any:
    """Return the validator class for JSON Schema 2020-12; an integer has no decimal point, as in msgspec."""
    from jsonschema import Draft202012Validator, validators

    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return validators.extend(Draft202012Validator, type_checker=types)


@cache
def _format_checker() -> Any:
    from jsonschema import FormatChecker

    checker = FormatChecker(formats=())
    for name, kind in FORMATS.items():
        checker.checks(name, raises=msgspec.ValidationError)(_is_of_format(kind))
    return checker


def _is_of_format(kind: type) -> Any:
    def check(value: object) -> bool:
        if isinstance(value, str):
            msgspec.convert(value, kind)
        return True

    return check
