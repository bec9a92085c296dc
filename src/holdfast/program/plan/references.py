"""References in the texts of a plan: `${steps.load.output.rows}`.

The text between the braces is JMESPath over `inputs`, `steps.ID.output`, `steps.ID.status`, `steps.ID.error`, and in a
step with `for_each`, over `item` and `index`. A text that is exactly one reference has the value's type; references
within other text are inserted as text. `$${` is `${` itself.

An expression gets only the steps that it names, so its cost does not grow with the plan. Plans may come from untrusted
sources, and a short expression can build a value of any size: what an evaluation visits and builds is counted and
bounded.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions, signature
from jmespath.visitor import Options, TreeInterpreter
from msgspec import Struct

from holdfast.core import codec
from holdfast.core.keys import check_idempotency_key
from holdfast.errors import InvalidInput
from holdfast.limits import EXPRESSION_CHARS, EXPRESSION_STEPS, EXPRESSION_VISITS

ROOTS = frozenset({"inputs", "steps", "item", "index", "output"})
OF_STEP = ("output", "status", "error", "artifact_refs")
"""The fields of a step that an expression may refer to."""


class Expression(Struct, frozen=True):
    """A JMESPath expression, compiled."""

    text: str
    parsed: Any
    paths: tuple[tuple[str, ...], ...]
    """The paths from the root: `("inputs", "day")`, `("steps", "load", "output", "rows")`, as far as names go.
    """

    is_path: bool
    """Whether it is only a path of names, without a condition, an index or a function."""

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that it names, in order."""
        return tuple(dict.fromkeys(path[1] for path in self.paths if path[0] == "steps"))

    def evaluate(self, data: Mapping[str, Any]) -> Any:
        """Return its value over this data; raise `InvalidInput` if it has none."""
        interpreter = _Interpreter()
        try:
            value = interpreter.visit(self.parsed, data)
            interpreter.charge(value)
            return value
        except (JMESPathError, RecursionError, ArithmeticError, ValueError, TypeError) as problem:
            raise InvalidInput(f"${{{self.text[:200]}}}: {str(problem)[:500]}") from problem


class Template(Struct, frozen=True):
    """A text with references: literal parts, and expressions between them."""

    parts: tuple[str | Expression, ...]

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """The expressions in it."""
        return tuple(part for part in self.parts if isinstance(part, Expression))

    def evaluate(self, data: Mapping[str, Any]) -> Any:
        """Return the value of a single reference, or otherwise a text."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Expression):
            return self.parts[0].evaluate(data)
        return "".join(part if isinstance(part, str) else _as_text(part.evaluate(data)) for part in self.parts)


def key_text(value: Any) -> str:
    """Return a value as the idempotency key of a step; raise `InvalidInput` if it cannot be one."""
    if value is None:
        raise InvalidInput("the idempotency_key of the step is null")
    key = _as_text(value)
    problem = check_idempotency_key(key)
    if problem is not None:
        raise problem
    return key


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(codec.encode(value)).decode()


def is_template(text: str) -> bool:
    """Return whether a text holds a reference or something that has to be unescaped."""
    return "${" in text


@lru_cache(maxsize=20_000)
def parse_template(text: str) -> Template:
    """Return a text with its references; raise `InvalidInput` if one of them cannot be read."""
    parts: list[str | Expression] = []
    literal, position = "", 0
    while True:
        begin = text.find("${", position)
        if begin < 0:
            literal += text[position:]
            break
        if begin > 0 and text[begin - 1] == "$":
            literal += text[position : begin - 1] + "${"
            position = begin + 2
            continue
        literal += text[position:begin]
        end = _end_of(text, begin + 2)
        if literal:
            parts.append(literal)
            literal = ""
        parts.append(parse_expression(text[begin + 2 : end]))
        position = end + 1
    if literal or not parts:
        parts.append(literal)
    return Template(tuple(parts))


def _end_of(text: str, position: int) -> int:
    """Return the position of the brace that ends an expression, ignoring braces in quotes and nested ones."""
    depth, quote = 0, ""
    while position < len(text):
        char = text[position]
        if quote:
            if char == "\\":
                position += 1
            elif char == quote:
                quote = ""
        elif char in "'\"`":
            quote = char
        elif char == "{":
            depth += 1
        elif char == "}":
            if depth == 0:
                return position
            depth -= 1
        position += 1
    raise InvalidInput("a reference is not closed: ${ needs a }")


@lru_cache(maxsize=20_000)
def parse_expression(text: str) -> Expression:
    """Return a compiled expression; raise `InvalidInput` if it is invalid or names what a plan does not have."""
    if len(text) > EXPRESSION_CHARS:
        raise InvalidInput(f"an expression has at most {EXPRESSION_CHARS} characters, not {len(text)}")
    try:
        parsed = jmespath.compile(text).parsed
        paths = tuple(_named(parsed))
    except (JMESPathError, RecursionError, ValueError, TypeError, IndexError) as problem:
        said = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise InvalidInput(f"${{{text[:200]}}} is not a JMESPath expression: {said[:300]}") from problem
    for path in paths:
        _check_path(text, path)
    expression = Expression(text, parsed, paths, _is_path(parsed))
    if len(expression.steps) > EXPRESSION_STEPS:
        raise InvalidInput(f"${{{text[:200]}}} names more than {EXPRESSION_STEPS} steps")
    return expression


def _check_path(text: str, path: tuple[str, ...]) -> None:
    shown = text[:200]
    if not path:
        raise InvalidInput(f"${{{shown}}}: @ and * at the beginning mean everything; name what is needed")
    if path[0] not in ROOTS:
        known = "inputs.NAME, steps.ID.output, .status or .error, item or index"
        raise InvalidInput(f"${{{shown}}}: there is no {path[0]!r}; a reference begins with {known}")
    if path[0] == "steps" and len(path) == 1:
        raise InvalidInput(
            f"${{{shown}}}: steps is followed by the id of a step; after ! put the path into parentheses"
        )
    if path[0] == "steps" and len(path) > 2 and path[2] not in OF_STEP:
        raise InvalidInput(f"${{{shown}}}: a step has {', '.join(OF_STEP)}, and no {path[2]!r}")


_TRANSPARENT = frozenset(
    "comparator or_expression and_expression not_expression function_expression multi_select_list multi_select_dict"
    " key_val_pair".split()
)
"""Expressions that evaluate all their parts against their own input. Others do so only with the first part."""


def _named(node: Any) -> Iterator[tuple[str, ...]]:
    """Yield the paths of names that begin at the root. Names inside projections belong to elements."""
    pending = [node]
    while pending:
        node = pending.pop()
        kind, children = node["type"], node["children"]
        if kind in ("field", "subexpression"):
            first, names = _leading(node)
            if names:
                yield names
            else:
                pending.append(first)
        elif kind in _TRANSPARENT:
            pending.extend(child for child in children if isinstance(child, dict))
        elif kind in ("current", "identity"):
            yield ()
        elif children and kind != "expref":
            pending.append(children[0])


def _leading(node: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the first part of a chain of dots, and the names after it, up to the first part that is not one."""
    parts = [node]
    while parts[0]["type"] == "subexpression":
        parts = [*parts[0]["children"], *parts[1:]]
    names = []
    for part in parts:
        if part["type"] != "field":
            break
        names.append(part["value"])
    return parts[0], tuple(names)


def _is_path(node: Any) -> bool:
    if node["type"] == "field":
        return True
    return node["type"] == "subexpression" and all(_is_path(child) for child in node["children"])


# --- evaluation, bounded


class _Functions(Functions):  # type: ignore[misc]
    """The functions of JMESPath. Functions that build texts are bounded before they build one."""

    def __init__(self, charge: Any, spend: Any) -> None:
        self._charge = charge
        self._spend = spend

    def call_function(self, function_name: str, resolved_args: list[Any]) -> Any:
        """Call a function. It visits its arguments uncounted, so they are counted before."""
        for argument in resolved_args:
            if isinstance(argument, str):
                self._spend(len(argument) // 8)
            elif isinstance(argument, list | Mapping):
                self._spend(len(argument))
        return super().call_function(function_name, resolved_args)

    @signature({"types": ["string"]}, {"types": ["array-string"]})  # type: ignore[untyped-decorator]
    def _func_join(self, separator: str, texts: list[str]) -> str:
        self._charge([separator] * len(texts))
        self._charge(texts)
        return separator.join(texts)

    @signature({"types": []})  # type: ignore[untyped-decorator]
    def _func_to_string(self, value: Any) -> str:
        self._charge(value)
        return _as_text(value)


class _Interpreter(TreeInterpreter):  # type: ignore[misc]
    """Evaluates one expression, and counts the work."""

    def __init__(self) -> None:
        super().__init__(Options(custom_functions=_Functions(self.charge, self._spend)))
        self._left = EXPRESSION_VISITS

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a part."""
        self._spend(1)
        return super().visit(node, *args, **kwargs)

    def visit_multi_select_list(self, node: Any, value: Any) -> Any:
        """Build a list, which may contain a value many times."""
        made = super().visit_multi_select_list(node, value)
        self.charge(made)
        return made

    def visit_multi_select_dict(self, node: Any, value: Any) -> Any:
        """Build an object, which may contain a value many times."""
        made = super().visit_multi_select_dict(node, value)
        self.charge(made)
        return made

    def charge(self, value: Any) -> None:
        """Count the parts of a value, with repetitions, and the length of its texts."""
        pending = [value]
        while pending:
            part = pending.pop()
            if isinstance(part, str):
                self._spend(1 + len(part) // 8)
            elif isinstance(part, Mapping):
                self._spend(1 + len(part))
                pending.extend(part.values())
            elif isinstance(part, list):
                self._spend(1 + len(part))
                pending.extend(part)
            else:
                self._spend(1)

    def _spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise ValueError("it takes too long, or makes too large a value")
