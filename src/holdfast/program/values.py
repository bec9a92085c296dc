"""The values of workflows and activities: how each type is stored as JSON and read back, and which types cannot be.

Arguments are bound to the parameters of the function (`Signature`) and stored as a JSON object by name. So people can
read them, other languages can send them, and they can be checked against annotations. A value that does not fit raises.

msgspec handles plain values, dataclasses, Structs and the usual types of the standard library. Pydantic handles its
models. Any other type needs a `Converter`, which is passed to the app. `Values.checked` refuses a type that cannot be
stored when a function that uses it is registered.
"""

import inspect
import types
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, wraps
from typing import (
    Annotated,
    Any,
    Generic,
    Never,
    NoReturn,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import msgspec.inspect as i
from msgspec import Raw
from msgspec.structs import asdict

from holdfast.core import codec
from holdfast.core.codec import Misfit, type_name
from holdfast.errors import InvalidInput
from holdfast.program import pydantic_models
from holdfast.program.schema import json_schema, parts_of

P = ParamSpec("P")
T = TypeVar("T")

KNOWN_TYPES = 1_024
"""How many types have their decoders cached."""

_SURE = frozenset({Any, bool, int, float, str, bytes, None, type(None), object})
"""Types that need no check."""


class Converter(Generic[T]):
    """How values of your own type are stored.

    `encode` returns something that can be stored, and `decode` gets it back as plain JSON. The converter of a class
    also encodes instances of its subclasses. `schema` is the JSON Schema of what is stored. Without it, any value is
    valid.
    """

    __slots__ = ("decode", "encode", "schema", "type")

    def __init__(
        self,
        type: type[T],
        encode: Callable[[T], Any],
        decode: Callable[[Any], T],
        schema: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(type, types_of_types):
            raise InvalidInput(f"a Converter is for a class, not {type!r}", field="type")
        functions: tuple[Any, ...] = (encode, decode)
        if not all(map(callable, functions)):
            raise InvalidInput(f"the converter of {type_name(type)} needs two functions, encode and decode")
        described: Any = schema
        if described is not None and not isinstance(described, dict):
            raise InvalidInput(f"the schema of the converter of {type_name(type)} is a dict, not {schema!r}")
        self.type = type
        self.encode = encode
        self.decode = decode
        self.schema = schema


types_of_types = type
"""needed because `type` is an argument above"""


class Values:
    """Encodes and decodes the values of one app, with its converters."""

    def __init__(self, converters: Iterable[Converter[Any]] = ()) -> None:
        self._converters: dict[type, Converter[Any]] = {}
        for converter in converters:
            self._add(converter)
        self._encoders = codec.Encoders(self._to_plain)
        self._adapted: dict[Any, Any] = {}
        self._decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
        self._forms: dict[msgspec.json.Decoder[Any], Raw] = {}

    def encode(self, value: object) -> Raw:
        """Return a value as JSON; raise `InvalidInput` if it cannot be stored."""
        if type(value) is int or type(value) is bool:  # always storable, and has no parts
            return Raw(self._encoders.in_order.encode(value))
        return codec.encode(value, self._encoders)

    def encode_plain(self, value: object) -> bytes:
        """Return a value of a plain kind as JSON: texts, whole numbers and the like, which need no check."""
        return self._encoders.in_order.encode(value)

    def encode_request(self, fields: Mapping[str, object], depth: int) -> bytes:
        """Return a request to another process as JSON; raise `InvalidInput` for what JSON cannot express."""
        asked: dict[str, Raw] = {}
        for field, value in fields.items():
            try:
                asked[field] = codec.encode(value, self._encoders, depth)
            except InvalidInput as problem:
                raise InvalidInput(f"{field}: {problem.message}", field=field) from problem
        return self._encoders.in_order.encode(asked)

    def decode(self, raw: Raw | bytes | str, kind: Any) -> Any:
        """Return the value that the JSON holds, as this type; raise `InvalidInput` if it does not fit."""
        return codec.decode_with(self.decoder(kind), raw)

    def decoder(self, kind: Any, what: str = "") -> "msgspec.json.Decoder[Any]":
        """Return the decoder of a type; raise `InvalidInput` if values of it cannot be stored."""
        try:
            known = self._decoders.get(kind)
        except TypeError:  # a part of it cannot be hashed
            return self.new_decoder(self.checked(kind, what))
        if known is None:
            if len(self._decoders) >= KNOWN_TYPES:  # from code that creates types while it runs
                self._decoders.clear()
                self._forms.clear()
            known = self._decoders[kind] = self.new_decoder(self.checked(kind, what))
        return known

    def new_decoder(self, checked: Any) -> "msgspec.json.Decoder[Any]":
        """Return a decoder of a type that was already checked."""
        return msgspec.json.Decoder(checked, dec_hook=self._of_plain)

    def form(self, kind: Any, what: str) -> "tuple[Raw, msgspec.json.Decoder[Any]]":
        """Return the JSON Schema of a type, encoded, and its decoder; raise `InvalidInput` if there is none."""
        decoder = self.decoder(kind, what)
        form = self._forms.get(decoder)
        if form is None:
            form = self._forms[decoder] = codec.encode(self.schema(kind))
        return form, decoder

    def schema(self, kind: Any) -> dict[str, Any]:
        """Return the JSON Schema of a type; raise `InvalidInput` if values of it cannot be stored."""
        checked = self.checked(kind, "")
        models: dict[Any, dict[str, Any]] = {}

        def describe(part: Any) -> dict[str, Any]:
            converter = self._converters.get(part)
            anything = {"title": type_name(part)}  # msgspec treats an empty schema as none
            if part is object or converter is not None:
                return (converter and converter.schema) or anything
            return models.setdefault(part, anything) or anything

        found = json_schema(checked, describe)
        if not models:
            return found
        models, definitions = pydantic_models.schemas(models, found.get("$defs", ()))
        found = json_schema(checked, describe)  # again, now that all the models are described together
        return found | {"$defs": found.get("$defs", {}) | definitions} if definitions else found

    # --- which types can be stored

    def checked(self, kind: Any, what: str) -> Any:
        """Return the type as msgspec should read it; raise `InvalidInput` if values of it cannot be stored.

        `what` has the type: it begins the error message.
        """
        try:
            if kind in _SURE:
                return kind
            known = self._adapted.get(kind)
        except TypeError:  # a part of it cannot be hashed
            known = None
        if known is not None:
            return known
        try:
            adapted = self._checked(kind)
        except (TypeError, NameError, InvalidInput) as problem:
            text = problem.message if isinstance(problem, InvalidInput) else _explained(kind, problem)
            raise InvalidInput(f"{what}: {text}" if what else text) from problem
        if len(self._adapted) >= KNOWN_TYPES:
            self._adapted.clear()
        with suppress(TypeError):
            self._adapted[kind] = adapted
        return adapted

    def _checked(self, kind: Any) -> Any:
        for part in _arguments(kind):
            if isinstance(part, TypeVar):
                raise InvalidInput(f"{type_name(kind)} has the type variable {part}; name a type, or Any")
        adapted = _adapted(kind)
        for part, where in _parts(i.type_info(adapted), "", set()):
            text = self._problem_of(part)
            if text is not None:
                raise InvalidInput(f"{where.removeprefix('.')}: {text}" if where else text)
        self.new_decoder(adapted)
        return adapted

    def _problem_of(self, part: Any) -> str | None:
        """Return why values of a part of a type cannot be stored, or None."""
        if isinstance(part, i.DictType) and not _is_text(part.key_type):
            return "the keys of a JSON object are text; use dict[str, …], or a list of pairs"
        if isinstance(part, i.DataclassType) and pydantic_models.is_dataclass(part.cls):
            return (
                f"{part.cls.__qualname__} is a dataclass of pydantic, whose validators would not run; use a BaseModel"
            )
        if not isinstance(part, i.CustomType) or part.cls is object or part.cls in self._converters:
            return None
        if pydantic_models.is_model(part.cls) or pydantic_models.is_union(part.cls):
            return pydantic_models.problem_of(part.cls)
        name = type_name(part.cls)
        return f"values of {name} cannot be stored; use {_instead(part.cls, name)}"

    def _add(self, converter: Converter[Any]) -> None:
        given: Any = converter
        if not isinstance(given, Converter):
            raise InvalidInput(f"converters are a list of Converter, not of {converter!r}", field="converters")
        name = type_name(converter.type)
        if converter.type in self._converters:
            raise InvalidInput(f"there are two converters of {name}", field="converters")
        try:
            is_native = not isinstance(i.type_info(converter.type), i.CustomType)
        except (TypeError, NameError):  # a type that msgspec knows and cannot read, such as an Enum of tuples
            is_native = True
        if is_native:
            raise InvalidInput(
                f"{name} has a stored form of its own, so a converter of it would not be called; "
                "wrap it in a class, or convert it in your code",
                field="converters",
            )
        self._converters[converter.type] = converter

    # --- hooks that msgspec calls for types that it does not know

    def _to_plain(self, value: Any) -> Any:
        kind = type(value)
        for base in kind.__mro__ if self._converters else ():
            converter = self._converters.get(base)
            if converter is not None:
                try:
                    return converter.encode(value)
                except Exception as problem:
                    raise ValueError(f"{_failure(converter, problem)}, encoding it") from problem
        if pydantic_models.is_model(kind):
            return pydantic_models.to_plain(value)
        raise TypeError(f"Encoding objects of type {kind.__name__} is unsupported")

    def _of_plain(self, kind: Any, plain: Any) -> Any:
        converter = self._converters.get(kind)
        if converter is not None:
            try:
                return converter.decode(plain)
            except Exception as problem:
                text = _failure(converter, problem)
                raise Misfit(text, "", f"Expected `{type_name(kind)}`") from problem
        if pydantic_models.is_model(kind) or pydantic_models.is_union(kind):
            return pydantic_models.of_plain(kind, plain)
        return plain  # for `object`; msgspec refuses it for any other type


def _failure(converter: Converter[Any], problem: Exception) -> str:
    return f"the converter of {type_name(converter.type)} raised {type(problem).__name__}: {problem}"


PLAIN_KINDS = (int, str, bool)
"""Types whose own values fit them and are decoded as they were encoded. Not float, which may be NaN."""

PLAIN = Values()
"""The values of code that has no app."""


class Signature:
    """The parameters and the result of a function, as types that values are checked against."""

    def __init__(
        self, function: Callable[..., Any], what: str = "", *, values: Values = PLAIN, skip_first: bool = False
    ) -> None:
        self.name = what or codec.type_name(function)
        try:
            signature = inspect.signature(function)
        except ValueError as problem:  # of a function in C
            raise InvalidInput(f"{self.name}: {problem}; write a function that calls it") from None
        parameters = list(signature.parameters.values())[1 if skip_first else 0 :]
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise InvalidInput(f"{self.name}: *args and **kwargs cannot be stored; name the parameters")
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise InvalidInput(f"{self.name}: arguments are stored by name; {parameter.name!r} is positional-only")
        if parameters and parameters[0].name == "self":
            text = "it is a method without its object; register a function, or the method of an object: service.charge"
            raise InvalidInput(f"{self.name}: {text}")
        hints = _hints(function, self.name)
        kinds = {
            p.name: values.checked(hints.get(p.name, Any), f"parameter {p.name!r} of {self.name}") for p in parameters
        }
        fields = [
            (p.name, kinds[p.name]) if p.default is p.empty else (p.name, kinds[p.name], p.default) for p in parameters
        ]
        self.values = values
        self.hints = {p.name: hints[p.name] for p in parameters if p.name in hints}
        """The annotated types of the parameters, by their names."""
        self.names = [p.name for p in parameters]
        self._signature = signature.replace(parameters=parameters)
        try:
            self._model = msgspec.defstruct(
                f"{getattr(function, '__name__', 'function')}_arguments",
                fields,
                kw_only=True,
                forbid_unknown_fields=True,
            )
        except TypeError as problem:  # a default that is shared and mutable
            raise InvalidInput(f"{self.name}: a default value cannot be stored: {problem}") from problem
        self._decoder = values.new_decoder(self._model)
        self._positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self._known = frozenset(self.names)
        self.required = frozenset(p.name for p in parameters if p.default is p.empty)
        self._all_positional = len(parameters) if len(self._positional) == len(parameters) else -1
        self.result_type = hints.get("return", Any)
        if self.result_type in (NoReturn, Never):
            self.result_type = Any
        self._result_decoder = values.decoder(self.result_type, f"the result of {self.name}")
        found = [hints.get(name) for name in self.names]
        self._plain_kinds = found if all(kind in PLAIN_KINDS for kind in found) else None
        self.plain_result = self.result_type if self.result_type in PLAIN_KINDS else None
        """The result type if its values need no further check: what is encoded of them can be decoded."""

    def __str__(self) -> str:
        return str(self._signature)

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Raw:
        """Return the arguments as JSON, after binding them to the parameters."""
        arguments = self._bind(args, kwargs)
        if [*map(type, arguments.values())] == self._plain_kinds:
            try:
                return Raw(self.values.encode_plain(arguments))
            except ValueError:  # text that is not valid Unicode: the error below names it
                pass
        try:
            raw = self.values.encode(arguments)
            codec.decode_with(self._decoder, raw)
        except InvalidInput as problem:
            raise self._unfit(arguments, problem) from problem
        return raw

    def _unfit(self, arguments: dict[str, Any], problem: InvalidInput) -> InvalidInput:
        """Return the error that names the argument that cannot be stored, or does not fit its type."""
        for name, value in arguments.items():
            try:
                raw = self.values.encode(value)
                if name in self._kinds:
                    self._kinds[name].decode(raw)
            except InvalidInput as unfit:
                return InvalidInput(f"argument {name!r} of {self.name}: {unfit.message}", field=name)
            except (msgspec.MsgspecError, UnicodeError):  # the cause says why, with the path within the arguments
                reason = problem.__cause__ or problem
                return InvalidInput(f"argument {name!r} of {self.name} does not fit: {reason}", field=name)
        return InvalidInput(f"{self.name}: {problem.message}")

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if not kwargs and len(args) == self._all_positional:
            return dict(zip(self._positional, args))  # noqa: B905 - the usual call; `strict` would take longer than all
        if not args and self.required <= kwargs.keys() <= self._known:  # the usual call of a service
            return {name: kwargs[name] for name in self.names if name in kwargs}
        try:
            return self._signature.bind(*args, **kwargs).arguments
        except TypeError as problem:
            raise InvalidInput(f"{self.name}: {problem}") from problem

    def unpack(self, raw: Raw) -> dict[str, Any]:
        """Return the arguments that the JSON holds, as the annotated types."""
        try:
            return asdict(codec.decode_with(self._decoder, raw))
        except InvalidInput as problem:
            if problem.__cause__ is None:
                raise
            raise InvalidInput(f"the arguments of {self.name} do not fit: {problem.__cause__}") from problem.__cause__

    @cached_property
    def _kinds(self) -> "dict[str, msgspec.json.Decoder[Any]]":
        return {field.name: self.values.new_decoder(field.type) for field in msgspec.structs.fields(self._model)}

    def misfits(self, arguments: Mapping[str, Any], later: Container[str] = ()) -> Iterator[tuple[str, str]]:
        """Yield the arguments that are missing, unknown or of another type, each with the reason.

        The values of the arguments in `later` are not known yet.
        """
        for name in self.names:
            if name in self.required and name not in arguments:
                yield name, f"{self.name} needs the argument {name!r}"
        kinds = self._kinds
        for name, value in arguments.items():
            if name not in kinds:
                known = ", ".join(self.names) or "none"
                yield name, f"{self.name} has no argument {name!r}; it has {known}"
            elif name not in later:
                try:
                    kinds[name].decode(codec.encode(value))
                except (msgspec.MsgspecError, InvalidInput, UnicodeError) as problem:
                    where, reason = codec.explain_unfit(problem)
                    yield name, f"argument {name!r} of {self.name} does not fit: {reason}{where and f' at {where}'}"

    def takes(self, kind: type) -> bool:
        """Return whether values of this type may be among the arguments, including nested ones."""
        return any(part is kind for hint in self.hints.values() for part in parts_of(hint, set()))

    def schemas(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the JSON Schemas of the arguments and of the result."""
        return self._schemas

    @cached_property
    def _schemas(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.values.schema(self._model), self.values.schema(self.result_type)

    def result_of(self, raw: Raw | None) -> Any:
        """Return the result that the JSON holds, as the annotated type; None if the step was skipped."""
        if raw is None:
            return None
        try:
            value = self._result_decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
            kind = codec.type_name(self.result_type)
            raise InvalidInput(f"the result of {self.name} does not fit {kind}: {problem}") from problem
        return codec.decode_with(self._result_decoder, raw) if type(value) is dict and codec.SEAL in value else value


def keywords_are_options(start: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let the keywords of a function that starts runs be its options, in addition to the workflow's arguments.

    A keyword that could be either, because a parameter of the workflow has the name of an option, is refused. If
    `arguments` passes the arguments by name, every keyword is an option.
    """
    parameters = inspect.signature(start).parameters.values()
    options = frozenset(each.name for each in parameters if each.kind is each.KEYWORD_ONLY) - {"arguments"}

    @wraps(start)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        if kwargs.get("arguments") is None and not options.isdisjoint(kwargs):
            _refuse_ambiguous(args, kwargs, options)
        return start(*args, **kwargs)

    return checked


def _refuse_ambiguous(args: tuple[Any, ...], kwargs: Mapping[str, Any], options: frozenset[str]) -> None:
    given = (getattr(each, "definition", None) for each in (*args[:2], kwargs.get("workflow")))
    definition, version = next((each for each in given if each is not None), None), kwargs.get("workflow_version")
    if definition is None:
        return
    registry = getattr(args[0] if args else None, "registry", None)
    if registry is not None and isinstance(version, str):
        definition = registry.workflows.get((definition.name, version), definition)
    for name in definition.signature.names:
        if name in options and name in kwargs:
            problem = (
                f"{name} is an option of start, and workflow {definition.name!r} has a parameter of that name: with "
                f"arguments={{{name!r}: …}} it is the argument, and the keywords beside `arguments` are options"
            )
            raise InvalidInput(problem, field=name)


def named(arguments: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a workflow that are given by name, without positional ones."""
    given: Any = arguments
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidInput(f"arguments has the arguments of the workflow by name: {arguments!r}", field="arguments")
    if args or kwargs:
        raise InvalidInput("arguments has all arguments of the workflow: give none beside it", field="arguments")
    return dict(arguments)


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the annotations of a function, resolved."""
    annotated: Any = function
    if not hasattr(annotated, "__annotations__"):  # a partial, or an object with __call__
        annotated = getattr(annotated, "func", None) or type(annotated).__call__
    try:
        return get_type_hints(annotated, include_extras=True)
    except (NameError, AttributeError, TypeError) as problem:
        raise InvalidInput(
            f"{name}: an annotation cannot be resolved: {problem}; it has to be importable where the function is "
            "defined, not under TYPE_CHECKING and not inside another function"
        ) from problem


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _arguments(kind: Any) -> Iterator[Any]:
    """Iterate over a type and the types in its brackets, not over the fields of classes."""
    yield kind
    for argument in get_args(kind):
        yield from _arguments(argument)


def _adapted(kind: Any) -> Any:
    """Return a type whose unions that msgspec cannot read are ones that pydantic reads, if they contain a model."""
    kind = getattr(kind, "__value__", kind)  # of an alias
    origin, arguments = get_origin(kind), get_args(kind)
    if not any(map(pydantic_models.is_model, _arguments(kind))):
        return kind
    if origin is Annotated and _is_union(arguments[0]) and pydantic_models.is_union(_adapted(arguments[0])):
        return pydantic_models.union_of(kind, get_args(arguments[0]))  # with its annotations
    if _is_union(kind):
        others = [one for one in arguments if one is not type(None)]
        if len(others) > 1 and any(map(pydantic_models.is_model, others)):
            return pydantic_models.union_of(kind, arguments)
        return Union[tuple(map(_adapted, arguments))]  # noqa: UP007 - made of what is found
    adapted = tuple(map(_adapted, arguments))
    if all(one is other for one, other in zip(adapted, arguments, strict=True)):
        return kind
    if origin is Annotated:
        return Annotated[adapted]
    return types.GenericAlias(origin, adapted) if origin.__module__ in _COLLECTIONS else kind


_COLLECTIONS = ("builtins", "collections.abc")


def _parts(node: Any, where: str, seen: set[int]) -> Iterator[tuple[Any, str]]:
    """Iterate over the parts of a type as msgspec describes it, each with the path of fields that leads to it."""
    if id(node) in seen:
        return
    seen.add(id(node))
    yield node, where
    for field in getattr(node, "fields", ()):
        yield from _parts(field.type, f"{where}.{node.cls.__qualname__}.{field.name}", seen)
    for name in ("item_type", "key_type", "value_type", "type"):
        inner = getattr(node, name, None)
        if isinstance(inner, i.Type):
            yield from _parts(inner, where, seen)
    for name in ("item_types", "types"):
        for inner in getattr(node, name, ()):
            yield from _parts(inner, where, seen)


def _is_text(key: Any) -> bool:
    if isinstance(key, i.Metadata):
        return _is_text(key.type)
    if isinstance(key, i.LiteralType):
        return all(isinstance(value, str) for value in key.values)
    return isinstance(key, i.StrType | i.AnyType)


_ABSTRACT = frozenset({"Iterable", "Iterator", "Generator", "AsyncIterable", "AsyncIterator", "deque", "range"})


def _instead(kind: Any, name: str) -> str:
    plain = name.split("[")[0].rsplit(".", 1)[-1]
    if plain in _ABSTRACT:
        return "list[…]"
    if plain in ("Path", "PosixPath", "PurePath"):
        return f"str, or App(converters=[Converter({plain}, str, {plain})])"
    if plain in ("Callable", "TextIO", "BinaryIO", "IO", "TextIOWrapper", "type", "Awaitable", "Coroutine"):
        return "a value that describes it: it exists in one process only"
    return (
        f"a dataclass, a Struct or a pydantic model, or give the app a converter: "
        f"App(converters=[Converter({plain}, encode=…, decode=…)])"
    )


def _explained(kind: Any, problem: Exception) -> str:
    text = str(problem)
    if isinstance(problem, NameError):
        return f"an annotation in {type_name(kind)} cannot be resolved: {text}; import the name where it is used"
    text = text if type_name(kind) in text else f"{type_name(kind)}: {text}"
    if "unions" in text or "type union" in text:
        return f"{text}; use one of them, Structs with a tag, or a pydantic model that holds the union"
    return text
