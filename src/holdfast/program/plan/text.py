"""The text of a plan, JSON or YAML, as plain values, with the position of each value in the text.

The text may come from an untrusted source, so nothing in it is executed, and everything is bounded: its size, its
nesting depth, and its number of values. Duplicate keys are refused, because readers differ in which of them counts.

YAML is read by the rules of JSON: strings, numbers, `true`, `false`, `null`, lists and mappings. `no` and `2026-01-28`
are texts. Anchors, aliases, tags and merge keys are refused: what is written in a plan is what is executed.
"""

import json
import re
from functools import cache
from importlib import import_module
from typing import Any

from msgspec import Struct

from holdfast.core.codec import is_deeper
from holdfast.limits import PLAN_BYTES, PLAN_DEPTH, PLAN_VALUES

Key = str | int
Place = tuple[Key, ...]


class PlanProblem(Struct, frozen=True, order=True):
    """A problem in a plan: its place as a JSON Pointer, a description, and the line if the text is YAML."""

    place: str
    message: str
    line: int | None = None


class UnreadablePlan(Exception):
    """The text is neither JSON nor the YAML that is allowed in a plan."""

    def __init__(self, message: str, place: Place = (), line: int | None = None) -> None:
        super().__init__(message)
        self.problem = PlanProblem(pointer(place), message, line)


def pointer(place: Place) -> str:
    """Return a place as a JSON Pointer (RFC 6901)."""
    return "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in place)


def keys_of(pointer: str) -> Place:
    """Return the keys that a JSON Pointer names; numbers are positions in lists."""
    keys = (part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])
    return tuple(int(key) if key.isdigit() else key for key in keys)


def read_text(body: bytes) -> tuple[Any, dict[Place, int]]:
    """Return the value of a text, and the line of each value in it (none for JSON). Raise `UnreadablePlan`."""
    if len(body) > PLAN_BYTES:
        raise UnreadablePlan(f"the plan has {len(body)} bytes; the most is {PLAN_BYTES}")
    try:
        text = body.decode()
    except UnicodeDecodeError as problem:
        raise UnreadablePlan(f"the plan is not UTF-8 text: byte {problem.start} cannot be read") from problem
    if "\0" in text:
        raise UnreadablePlan("the plan holds a NUL character", line=text.count("\n", 0, text.index("\0")) + 1)
    if not text.strip():
        raise UnreadablePlan("the plan is empty")
    if text.lstrip()[:1] in ("{", "["):
        return _read_json(body, text), {}
    return _read_yaml(text)


# --- JSON


def _read_json(body: bytes, text: str) -> Any:
    if is_deeper(body, PLAN_DEPTH):
        raise UnreadablePlan(f"the plan is nested more than {PLAN_DEPTH} deep")
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except json.JSONDecodeError as problem:
        raise UnreadablePlan(f"the plan is no JSON: {problem.msg}", line=problem.lineno) from problem
    except (ValueError, RecursionError) as problem:  # a number with too many digits
        raise UnreadablePlan(f"the plan cannot be read: {problem}") from problem


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise UnreadablePlan(f"the key {key!r} stands twice in the same object")
            seen.add(key)
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# --- YAML, from the events of the parser: nothing is constructed, and nothing recurses


@cache
def _yaml() -> Any:
    return import_module("yaml")  # imported only where it is used, because the import is slow


_PLAIN = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_INTEGER = re.compile(r"[-+]?[0-9]{1,400}")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]{1,400}|[0-9]{1,400}(?:\.[0-9]{0,400})?)(?:[eE][-+]?[0-9]{1,4})?")


class _Open:
    """A list or a mapping that is being read."""

    __slots__ = ("is_list", "key", "place", "value")

    def __init__(self, is_list: bool, place: Place) -> None:
        self.is_list = is_list
        self.place = place
        self.value: Any = [] if is_list else {}
        self.key: Any = None


class _Builder:
    """Builds a value from events."""

    def __init__(self) -> None:
        self.lines: dict[Place, int] = {}
        self.documents: list[Any] = []
        self._open: list[_Open] = []
        self._yaml = _yaml()

    def take(self, event: Any) -> None:
        """Take the next event."""
        line, yaml = event.start_mark.line + 1, self._yaml
        if isinstance(event, yaml.AliasEvent):
            raise UnreadablePlan("a plan has no aliases: write the value out", self._place(), line)
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise UnreadablePlan("a plan has no anchors: write the value out", self._place(), line)
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event, line)
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            self._begin(event, line)
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            done = self._open.pop()
            self._put(done.value)

    def _place(self) -> Place:
        if not self._open:
            return ()
        top = self._open[-1]
        if top.is_list:
            return (*top.place, len(top.value))
        return top.place if top.key is None else (*top.place, top.key)

    def _note(self, line: int) -> Place:
        place = self._place()
        if len(self.lines) >= PLAN_VALUES:
            raise UnreadablePlan(f"the plan holds more than {PLAN_VALUES} values", place, line)
        self.lines[place] = line
        return place

    def _begin(self, event: Any, line: int) -> None:
        if event.tag is not None and event.tag != "!":
            raise UnreadablePlan(f"a plan has no tags such as {event.tag!r}", self._place(), line)
        if self._open and not self._open[-1].is_list and self._open[-1].key is None:
            raise UnreadablePlan("a key is a text, not a list or a mapping", self._place(), line)
        place = self._note(line)
        if len(self._open) >= PLAN_DEPTH:
            raise UnreadablePlan(f"the plan is nested more than {PLAN_DEPTH} deep", place, line)
        self._open.append(_Open(isinstance(event, self._yaml.SequenceStartEvent), place))

    def _scalar(self, event: Any, line: int) -> None:
        if event.tag is not None and event.tag != "!":
            raise UnreadablePlan(f"a plan has no tags such as {event.tag!r}", self._place(), line)
        top = self._open[-1] if self._open else None
        if top is not None and not top.is_list and top.key is None:
            if event.value in top.value:
                raise UnreadablePlan(f"the key {event.value!r} stands twice in the same mapping", top.place, line)
            if event.value == "<<":
                raise UnreadablePlan("a plan has no merge keys: write the values out", top.place, line)
            top.key = event.value
            return
        self._note(line)
        self._put(_scalar_of(event.value) if event.implicit[0] else event.value)  # otherwise it is quoted

    def _put(self, value: Any) -> None:
        if not self._open:
            self.documents.append(value)
            return
        top = self._open[-1]
        if top.is_list:
            top.value.append(value)
        else:
            top.value[top.key] = value
            top.key = None


def _scalar_of(text: str) -> Any:
    """Return an unquoted scalar: as JSON has it, or otherwise a text."""
    if text in _PLAIN:
        return _PLAIN[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise UnreadablePlan(f"the number {text[:40]} is too large")
        return number
    return text


def _read_yaml(text: str) -> tuple[Any, dict[Place, int]]:
    builder, yaml = _Builder(), _yaml()
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            builder.take(event)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        said = str(getattr(problem, "problem", None) or problem).splitlines()[0][:200]
        line = None if mark is None else mark.line + 1
        if line is not None and any("${" in each for each in text.split("\n")[max(0, line - 2) : line]):
            said += "; inside of {…} and […] a reference stands in quotes"
        raise UnreadablePlan(f"the plan is no YAML: {said}", line=line) from problem
    except RecursionError as problem:  # only without libyaml
        raise UnreadablePlan(f"the plan is nested more than {PLAN_DEPTH} deep") from problem
    if len(builder.documents) != 1:
        raise UnreadablePlan(f"the text holds {len(builder.documents)} documents; a plan is one")
    return builder.documents[0], builder.lines
