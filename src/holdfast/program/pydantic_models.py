"""Models of pydantic 2 as values: pydantic serializes, validates and describes them.

A model is stored as its own JSON: by alias, without computed fields. It is read with `model_validate_json`, so its
validators run each time. A function with a type that would lose something that way is refused when it is registered.

Nothing here imports pydantic. A program that has a model has already imported it.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any, Literal, get_args, get_origin
from weakref import WeakKeyDictionary

import msgspec

from holdfast.core.codec import Misfit, type_name
from holdfast.errors import InvalidInput

_encoder = msgspec.json.Encoder()
_canonical = msgspec.json.Encoder(order="deterministic")

SHOWN_ERRORS = 5
"""How many errors of a model one message shows."""

_ECHOING = frozenset({"value_error", "assertion_error", "union_tag_invalid"})
"""Errors whose message may contain the input."""


def _pydantic() -> Any:
    """Return pydantic, if the program has imported version 2 of it."""
    module = sys.modules.get("pydantic")
    return module if module is not None and hasattr(module, "TypeAdapter") else None


def is_model(kind: Any) -> bool:
    """Return whether a type is a model of pydantic."""
    pydantic = _pydantic()
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def is_dataclass(kind: Any) -> bool:
    """Return whether a type is one of pydantic's dataclasses."""
    return _pydantic() is not None and hasattr(kind, "__pydantic_validator__") and hasattr(kind, "__dataclass_fields__")


def to_plain(model: Any) -> Any:
    """Return a model as plain JSON values. Sets in it are sorted, so that every process writes them alike."""
    try:
        plain = model.model_dump(mode="json", by_alias=True, round_trip=True)
    except Exception as problem:  # from a serializer
        raise ValueError(f"{type(model).__qualname__}: {problem}") from problem
    if _adapter(type(model)).holds_sets:
        return _settled(plain, model.model_dump(mode="python", by_alias=True, round_trip=True))
    return plain


def _settled(plain: Any, python: Any) -> Any:
    """Return plain values with sets sorted; a number that JSON cannot express stays, so that it is refused later."""
    if isinstance(python, float) and not isfinite(python):
        return python
    if isinstance(python, set | frozenset) and isinstance(plain, list):
        return sorted(plain, key=_canonical.encode)
    if isinstance(python, dict) and isinstance(plain, dict) and len(python) == len(plain):
        return {key: _settled(one, other) for (key, one), other in zip(plain.items(), python.values(), strict=True)}
    if isinstance(python, list | tuple) and isinstance(plain, list) and len(python) == len(plain):
        return [_settled(one, other) for one, other in zip(plain, python, strict=True)]
    return plain


def of_plain(kind: Any, plain: Any) -> Any:
    """Return the model, or the value of a union with models, that plain values represent. Raises `Misfit`."""
    adapter = _adapter(kind)
    try:
        return adapter.types.validate_json(_encoder.encode(plain))
    except Exception as problem:  # including what a validator raises other than ValueError
        # A validation error shows the input, so it is not kept as the cause.
        raise adapter.misfit(problem) from (None if hasattr(problem, "errors") else problem)


def union_of(kind: Any, members: Sequence[Any]) -> Any:
    """Return a type that stands for a union with models in it: `of_plain` reads it, and any value is one of it."""
    for member in members:
        if not (is_model(member) or member in (str, int, float, bool, type(None)) or get_origin(member) is Literal):
            raise InvalidInput(
                f"{kind}: {type_name(member)} cannot be in one union with a pydantic model; "
                "use models, text, numbers and None there, or wrap it in a model"
            )
    name = " | ".join("None" if member is type(None) else type_name(member) for member in members)
    return _AnyOf(name, (), {"__qualname__": name, "kind": kind})


def is_union(kind: Any) -> bool:
    """Return whether a type stands for a union with models in it."""
    return isinstance(kind, _AnyOf)


def schemas(kinds: Iterable[Any], taken: Iterable[str]) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """Return the JSON Schema of each type, and the definitions that they refer to, under names that are not taken."""
    kinds = list(kinds)
    if not kinds:
        return {}, {}
    asked = [(kind, "validation", _adapter(kind).types) for kind in kinds]
    found, rest = _pydantic().TypeAdapter.json_schemas(asked, by_alias=True, ref_template=_REF)
    definitions = rest.get("$defs", {})
    names = {_REF.format(model=name): _REF.format(model=f"{name}_model") for name in {*taken} & {*definitions}}
    return (
        {kind: _renamed(found[kind, "validation"], names) for kind in kinds},
        {
            names.get(_REF.format(model=name), name).removeprefix(_REF[:-7]): _renamed(each, names)
            for name, each in definitions.items()
        },
    )


_REF = "#/$defs/{model}"


def _renamed(schema: Any, names: dict[str, str]) -> Any:
    """Return a schema with its references renamed."""
    if not names:
        return schema
    if isinstance(schema, list):
        return [_renamed(each, names) for each in schema]
    if isinstance(schema, dict):
        return {
            key: names.get(each, each) if key == "$ref" and isinstance(each, str) else _renamed(each, names)
            for key, each in schema.items()
        }
    return schema


_FURTHER = "\n\nFor further information"


def problem_of(kind: Any) -> str | None:
    """Return why models of this type could not be read as they were written, or None."""
    try:
        adapter = _adapter(kind)
        adapter.types.json_schema(mode="validation")
    except (_pydantic().errors.PydanticUserError, NameError, TypeError, ValueError) as problem:
        return f"{type_name(kind)}: {str(problem).split(_FURTHER)[0].rstrip()}"
    return next(adapter.problems(), None)


class _AnyOf(type):
    """The type of the types that stand for unions. msgspec accepts whatever pydantic returns as an instance of them."""

    kind: Any

    def __instancecheck__(cls, instance: object) -> bool:
        return True


class _Adapter:
    """What is known about a type: how pydantic reads it, and whether it contains sets."""

    def __init__(self, kind: Any) -> None:
        self.name = type_name(kind)
        self.types: Any = _pydantic().TypeAdapter(kind.kind if is_union(kind) else kind)
        self._nodes = list(_nodes(self.types.core_schema, "", {}))
        # A field declared as Any may also contain a set, or a number that is not finite.
        self.holds_sets = any(node["type"] in ("set", "frozenset", "any") for node, _, _ in self._nodes)

    def problems(self) -> Iterator[str]:
        """Iterate over what would be lost when models of this type are written and read."""
        pydantic = _pydantic()
        secrets = (pydantic.SecretStr, pydantic.SecretBytes, pydantic.Secret)
        for node, where, config in self._nodes:
            if node["type"] == "is-instance" and isinstance(node["cls"], type) and issubclass(node["cls"], secrets):
                yield (
                    f"{where}: a {node['cls'].__name__} is written as asterisks; "
                    "keep the secret elsewhere and store its name"
                )
            if node["type"] == "bytes" and not (
                config.get("ser_json_bytes") == config.get("val_json_bytes") in ("base64", "hex")
            ):
                yield (
                    f"{where}: bytes that are not UTF-8 could not be written; "
                    "set ser_json_bytes and val_json_bytes to 'base64' in the model_config"
                )
            if node["type"] == "model":
                yield from _unreadable_fields(node["cls"])

    def misfit(self, problem: Exception) -> Misfit:
        """Return a validation error: a text for the owner of the value, and one that reveals nothing of the value."""
        describe = getattr(problem, "errors", None)
        if describe is None:
            text = f"a validator of {self.name} raised {type(problem).__name__}: {problem}"
            return Misfit(text, "", f"Expected `{self.name}`")
        errors = describe(include_url=False, include_context=False, include_input=False)
        text = "; ".join(f"{_path(each['loc'])}: {each['msg']}".removeprefix(": ") for each in errors[:SHOWN_ERRORS])
        first = errors[0]
        known = get_args(sys.modules["pydantic_core.core_schema"].ErrorType)
        is_safe = first["type"] in known and first["type"] not in _ECHOING
        names = set(_names(self.types.json_schema(mode="validation")))
        return Misfit(
            text,
            "".join(
                f"[{part}]" if isinstance(part, int) else f".{part}" if part in names else "[...]"
                for part in first["loc"]
            ),
            first["msg"] if is_safe else "Its validator refuses it",
        )


_adapters: "WeakKeyDictionary[Any, _Adapter]" = WeakKeyDictionary()


def _adapter(kind: Any) -> _Adapter:
    known = _adapters.get(kind)
    if known is None:
        known = _adapters[kind] = _Adapter(kind)
    return known


def _nodes(schema: Any, where: str, config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Iterate over the parts of a core schema, each with its field and the config of its model.

    A part with its own serializer is not searched for bytes: its author has defined how they are written.
    """
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from _nodes(part, where, config)
    elif isinstance(schema, dict):
        if isinstance(schema.get("type"), str) and not (schema["type"] == "bytes" and "own" in config):
            yield schema, where, config
        if schema.get("type") == "model":
            where, config = schema["cls"].__qualname__, schema.get("config", {})
        if "serialization" in schema:
            config = {**config, "own": True}
        for name, part in schema.items():
            if name == "fields" and isinstance(part, dict):
                for field, inner in part.items():
                    yield from _nodes(inner, f"{where}.{field}", config)
            elif name not in ("config", "metadata", "serialization", "function"):
                yield from _nodes(part, where, config)


def _unreadable_fields(model: Any) -> Iterator[str]:
    """Iterate over the reasons why fields of a model are not read under the names that they are written with."""
    config = model.model_config
    for name, field in model.model_fields.items():
        where = f"{model.__qualname__}.{name}"
        if field.exclude and field.is_required():
            yield f"{where}: it is required, and excluded from what is written; give it a default"
        written = field.serialization_alias or name
        alias = field.validation_alias
        read = {name} if alias is None or config.get("populate_by_name") or config.get("validate_by_name") else set()
        if alias is not None and config.get("validate_by_alias") is not False:
            choices = getattr(alias, "choices", [alias])
            read |= {one if isinstance(one, str) else one.path[0] for one in choices if _is_plain_alias(one)}
        if written not in read and not field.exclude:
            yield (
                f"{where}: it is written as {written!r}, and read as {', '.join(sorted(map(repr, read))) or 'a path'}; "
                "give both the same alias"
            )


def _is_plain_alias(alias: Any) -> bool:
    return isinstance(alias, str) or len(alias.path) == 1


def _path(location: Iterable[Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _names(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for part in schema.values():
            yield from _names(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _names(part)
