"""Commands, generated from the operations: arguments and options from the request, help from the docstring."""

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import Parameter, Token
from msgspec import Struct
from msgspec import inspect as types

from holdfast.cli import values
from holdfast.cli.commands import CommandSpec
from holdfast.cli.connection import Connection, Target, connect
from holdfast.cli.output import clean, note, show_fields, show_items, show_json, show_text
from holdfast.cli.plans import read_document
from holdfast.errors import InvalidInput
from holdfast.service.registry import Operation

WATCH_S = 2.0
"""How long a watched list is shown before it is read again."""

Fields = dict[str, Any]
Read = Callable[[Any, str], Any]
"""Converts the given value of a field to the value in the request."""

_SIMPLE: dict[type[types.Type], Any] = {
    types.StrType: str,
    types.IntType: int,
    types.FloatType: float,
    types.BoolType: bool,
    types.VarTupleType: tuple[str, ...],
}


class ExtraFlag(Struct, frozen=True, kw_only=True):
    """A flag that an operation does not have. With it, the answer is passed to `then`, which returns the exit code."""

    option: str
    help: str
    then: Callable[[Connection, Any, Target], Awaitable[int]]


class Option(Struct, frozen=True, kw_only=True):
    """A field of a request, as an argument or option of the command line."""

    field: str
    option: str
    kind: Any
    read: Read | None = None
    is_required: bool
    is_on: bool = False
    help: str = ""

    @property
    def negative(self) -> str:
        """The option that turns off what is on by default."""
        return f"--no-{self.option.removeprefix('--')}" if self.is_on else ""


def fields_of(operation: Operation) -> dict[str, Option]:
    """Return the fields of the request of an operation, by name."""
    info = types.type_info(operation.request_type)
    assert isinstance(info, types.StructType)
    names = {field.name for field in info.fields}
    return {field.name: _given(field, names) for field in info.fields}


def arguments_of(spec: CommandSpec, fields: dict[str, Option]) -> tuple[str, ...]:
    """Return the fields that are arguments, in their order: those that the spec names, or all required ones."""
    return spec.arguments or tuple(name for name, given in fields.items() if given.is_required and name != spec.rest)


def command_of(operation: Operation, spec: CommandSpec, extra: ExtraFlag | None = None) -> Callable[..., int]:
    """Return the function that is the command of an operation, with the signature for parsing its arguments."""
    fields = fields_of(operation)
    arguments = arguments_of(spec, fields)
    flags = [_flag("all_pages", "--all", "Read all pages, and not only the first.")] if "cursor" in fields else []
    flags += [_flag("is_watched", "--watch", "Show it again every two seconds, until Ctrl-C.")] if spec.columns else []
    flags += [] if extra is None else [_flag("is_extra", extra.option, extra.help)]
    signature = inspect.Signature(
        [*_parameters(fields, arguments, spec.rest), *flags, _keyword("target", Target | None)]
    )

    def command(*positional: Any, **named: Any) -> int:
        bound = signature.bind(*positional, **named)
        target = bound.arguments.pop("target", None) or Target()
        is_all = bound.arguments.pop("all_pages", False)
        is_watched = bound.arguments.pop("is_watched", False)
        then = extra.then if extra is not None and bound.arguments.pop("is_extra", False) else None
        ask = _ask(fields, spec.rest, bound.arguments)
        if not ask.keys() & {"order", "order_by"}:
            ask |= spec.defaults
        if spec.stdin is not None and ask.get(spec.stdin) == "-":
            ask[spec.stdin] = sys.stdin.readline().strip()
        if spec.file is not None and spec.file in ask:
            ask[spec.file] = read_document(ask[spec.file])
        try:
            if is_watched:
                return asyncio.run(_watch(operation, spec, target, ask, is_all))
            return asyncio.run(_carry_out(operation, spec, target, ask, is_all, then))
        except InvalidInput as problem:
            if values.has_text_pairs(bound.arguments.get(spec.rest or "", ())) and problem.message.endswith(
                "got `str`"
            ):
                message = f"{problem.message} (name=TEXT is a text; what is none is written name:=JSON)"
                raise InvalidInput(message, **problem.details) from problem
            raise

    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    command.__name__ = spec.words.replace(" ", "_").replace("-", "_")
    command.__doc__ = operation.doc
    return command


def show(spec: CommandSpec, answer: Any, target: Target) -> None:
    """Write an answer, as JSON or for people."""
    if target.json:
        show_json(answer)
    elif spec.shown is not None:
        show_json(answer[spec.shown])
    elif spec.secret is not None:
        print(clean(answer[spec.secret]))
        note("this is shown once, and only its hash is kept")
    elif isinstance(answer, dict) and isinstance(answer.get("items"), list):
        items = [{**item, **spec.adds(item)} for item in answer["items"]] if spec.adds else answer["items"]
        show_items(items, spec.columns or (tuple(items[0]) if items else ()), spec.nothing)
    elif isinstance(answer, dict):
        apart = {*spec.tables, *spec.hidden, spec.text}
        show_fields({name: value for name, value in answer.items() if name not in apart})
        for name, columns in spec.tables.items():
            if answer.get(name):
                print()
                show_items(list(_rows(answer[name])), columns)
        if spec.text is not None and answer.get(spec.text):
            show_text(answer[spec.text])
    else:
        show_fields(answer)


def _rows(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of items: for an item that contains a list of others, one row for each of them."""
    for item in items:
        inner = [part for value in item.values() if isinstance(value, list) for part in value if isinstance(part, dict)]
        yield from ({**item, **part} for part in inner or [{}])


async def _carry_out(
    operation: Operation,
    spec: CommandSpec,
    target: Target,
    ask: Fields,
    is_all: bool,
    then: Callable[[Connection, Any, Target], Awaitable[int]] | None,
) -> int:
    async with connect(target) as connection:
        answer = await connection(operation.name, ask)
        while is_all and answer["next"] is not None:
            page = await connection(operation.name, {**ask, "cursor": answer["next"]})
            answer = {**page, "items": answer["items"] + page["items"]}
        if then is not None:
            return await then(connection, answer, target)
    show(spec, answer, target)
    if not target.json and isinstance(answer, dict) and answer.get("is_decided") is False:
        run_id = answer["run_id"]
        note(
            f"accepted; the run decides, and may refuse: see `holdfast run events {run_id}`, or wait for it with --wait"
        )
    if not target.json and isinstance(answer, dict) and answer.get("next"):
        note(f"there is more: use --all, or --cursor {answer['next']}")
    return 0


async def _watch(operation: Operation, spec: CommandSpec, target: Target, ask: Fields, is_all: bool) -> int:
    """Show an answer repeatedly; on a terminal, in place of the previous one."""
    while True:
        if sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")
        await _carry_out(operation, spec, target, ask, is_all, None)
        sys.stdout.flush()
        await asyncio.sleep(WATCH_S)


def _parameters(fields: dict[str, Option], arguments: tuple[str, ...], rest: str | None) -> list[inspect.Parameter]:
    made = [_argument(name, fields[name]) for name in arguments]
    if rest is not None:
        help_text = f"{fields[rest].help} {values.HELP}".strip()
        annotation = Annotated[str, Parameter(help=help_text, allow_leading_hyphen=False)]
        made.append(inspect.Parameter(rest, inspect.Parameter.VAR_POSITIONAL, annotation=annotation))
    return made + [_option(given) for given in fields.values() if given.field not in (*arguments, rest)]


def _argument(name: str, given: Option) -> inspect.Parameter:
    parameter = Parameter(help=given.help, show_default=False)
    kept, kind = (inspect.Parameter.empty, given.kind) if given.is_required else (None, given.kind | None)
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_ONLY, annotation=Annotated[kind, parameter], default=kept
    )


def _flag(name: str, option: str, help_text: str) -> inspect.Parameter:
    return _keyword(
        name, Annotated[bool, Parameter(name=option, negative="", show_default=False, help=help_text)], False
    )


def _option(given: Option) -> inspect.Parameter:
    kind = given.kind | None if given.kind != tuple[str, ...] else given.kind
    negative = given.negative or (() if given.kind in (tuple[str, ...], bool) else None)
    converter = _in_any_case if get_origin(given.kind) is Literal else None
    parameter = Parameter(
        name=given.option, negative=negative, show_default=False, help=given.help, converter=converter
    )
    default = () if given.kind == tuple[str, ...] else None
    return _keyword(given.field, Annotated[kind, parameter], default, given.is_required)


def _in_any_case(kind: Any, tokens: Sequence[Token]) -> Any:
    """Return the chosen value, regardless of its case."""
    [token] = tokens
    choices = [choice for part in (kind, *get_args(kind)) if get_origin(part) is Literal for choice in get_args(part)]
    chosen = next((choice for choice in choices if str(choice).lower() == token.value.lower()), None)
    if chosen is None:
        raise ValueError(f'"{token.value}" is none of {", ".join(map(str, choices))}')
    return chosen


def _keyword(name: str, annotation: Any, default: Any = None, is_required: bool = False) -> inspect.Parameter:
    kept = inspect.Parameter.empty if is_required else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=kept)


def _ask(fields: dict[str, Option], rest: str | None, given: Fields) -> Fields:
    """Return the request: everything that was given, converted according to its field."""
    asked: Fields = {}
    for name, value in given.items():
        if value is None or value == ():
            continue
        if name == rest:
            asked[name] = values.parse_value(value, name)
        else:
            read = fields[name].read
            asked[name] = value if read is None else read(value, fields[name].option)
    return asked


def _given(field: types.Field, names: set[str]) -> Option:
    kind, described = field.type, ""
    if isinstance(kind, types.UnionType):  # a value, or omitted
        kind = next(part for part in kind.types if not isinstance(part, types.NoneType))
    while isinstance(kind, types.Metadata):
        described = described or (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    accepted, read = _accepted(kind)
    one = field.name.removesuffix("s")  # an option that may be repeated is named in the singular
    option = one if accepted == tuple[str, ...] and one not in names else field.name
    return Option(
        field=field.name,
        option=f"--{option.replace('_', '-')}",
        kind=accepted,
        read=read,
        is_required=field.required,
        is_on=field.default is True,
        help=described,
    )


def _accepted(kind: types.Type) -> tuple[Any, Read | None]:
    """Return the type that the command line accepts for a type, and how it is converted."""
    if type(kind) in _SIMPLE:
        return _SIMPLE[type(kind)], None
    if isinstance(kind, types.EnumType):
        return Literal[tuple(member.value for member in kind.cls)], None
    if isinstance(kind, types.LiteralType):
        return Literal[kind.values], None
    if isinstance(kind, types.DateTimeType):
        return str, values.parse_moment
    return str, values.parse_json
