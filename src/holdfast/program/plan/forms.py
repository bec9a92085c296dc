"""Forms of tasks that a plan describes by a JSON Schema: answers are validated against it.

A form is part of a plan, which may come from an untrusted source. So it may neither refer to schemas elsewhere nor use
regular expressions, which can take unbounded time to match.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import msgspec
from msgspec import Raw

from holdfast.core import codec
from holdfast.program.plan.text import Place

_REFUSED = frozenset({"pattern", "patternProperties", "$ref", "$dynamicRef", "$id", "$schema", "format"})


@cache
def _jsonschema() -> Any:
    return import_module("jsonschema")  # imported only where it is used, because the import is slow


def problems_of_form(form: Any, place: Place) -> Iterator[tuple[Place, str]]:
    """Yield the problems of a form, each with its place."""
    pending = [(place, form, False)]
    while pending:
        at, part, has_names = pending.pop()
        if isinstance(part, dict):
            for key, inner in part.items():
                if key in _REFUSED and not has_names:
                    yield (*at, key), f"a form has no {key}"
                pending.append(((*at, key), inner, key == "properties" and not has_names))
        elif isinstance(part, list):
            pending.extend(((*at, number), inner, False) for number, inner in enumerate(part))
    jsonschema = _jsonschema()
    try:
        jsonschema.Draft202012Validator.check_schema(form)
    except jsonschema.SchemaError as problem:
        yield (*place, *problem.absolute_path), f"the form is no JSON Schema: {problem.message}"[:500]
    except RecursionError:
        yield place, "the form is nested too deep"


class FormDecoder:
    """Decodes an answer, and validates it against a form."""

    def __init__(self, schema: Any) -> None:
        self._check = _jsonschema().Draft202012Validator(schema)

    def decode(self, raw: Raw | bytes | str) -> Any:
        """Return the answer; raise `ValidationError` if it does not fit."""
        value = msgspec.json.decode(raw)
        problem = next(self._check.iter_errors(value), None)
        if problem is not None:
            where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in problem.absolute_path)
            raise msgspec.ValidationError(f"{problem.validator}: the answer does not fit the form - at `${where}`")
        return value


def form_of(schema: Raw, forms: dict[str, Any]) -> Raw:
    """Return a form as it is stored with a task, after adding its decoder to those of the definition."""
    key = codec.value_digest(schema)
    if key not in forms:
        forms[key] = FormDecoder(codec.decode(schema, object))
    return schema
