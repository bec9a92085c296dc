"""Values on the command line: JSON, arguments by name, and instants."""

import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from holdfast.clock import SystemClock
from holdfast.errors import InvalidInput

PAIR = re.compile(r"([^\W\d]\w*)(:?=)(.*)", re.DOTALL)
AGO = re.compile(r"(\d+)(s|m|h|d)")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

HELP = "name=TEXT and name:=JSON, or one JSON value, or @FILE, or - for stdin."


def has_text_pairs(words: Sequence[str]) -> bool:
    """Return whether one of the words is `name=text`."""
    return any(pair[2] == "=" for pair in map(PAIR.fullmatch, words) if pair)


def parse_value(words: Sequence[str], what: str) -> Any:
    """Return the value of words: an object from `name=text` and `name:=json`, or one JSON value."""
    pairs = [PAIR.fullmatch(word) for word in words]
    if all(pairs):
        return _object([(pair[1], pair[2], pair[3]) for pair in pairs if pair], what)
    if len(words) == 1:
        return _json(_text(words[0], what), what)
    wrong = next(word for word, pair in zip(words, pairs, strict=True) if pair is None)
    raise InvalidInput(f"{what}: {wrong!r} is neither name=text nor name:=json", field=what)


def parse_json(text: str, what: str) -> Any:
    """Return the value of one word: JSON, `@FILE`, or `-`."""
    return _json(_text(text, what), what)


def parse_moment(text: str, what: str) -> str:
    """Return a point in time in wire format: `2h` is two hours ago; without a zone it is local."""
    ago = AGO.fullmatch(text)
    try:
        if ago is None:
            return datetime.fromisoformat(text).astimezone(UTC).isoformat()
        since = timedelta(**{UNITS[ago[2]]: int(ago[1])})
        return (datetime.fromtimestamp(SystemClock().now() / 1_000_000, UTC) - since).isoformat()
    except (ValueError, OverflowError) as problem:
        raise InvalidInput(f"{what}: {text!r} is not a time such as 2026-01-28T12:00 or 2h", field=what) from problem


def _object(pairs: list[tuple[str, str, str]], what: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, sign, text in pairs:
        if name in made:
            raise InvalidInput(f"{what}: {name} is given twice", field=what)
        made[name] = text if sign == "=" else _json(text, f"{what}: {name}")
    return made


def _text(word: str, what: str) -> str:
    try:
        if word == "-":
            return sys.stdin.read()
        return Path(word[1:]).read_text(encoding="utf-8") if word.startswith("@") else word
    except (OSError, ValueError) as problem:
        raise InvalidInput(f"{what}: {word} cannot be read: {problem}", field=what) from problem


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
        raise InvalidInput(f"""{what}: this is not JSON (a text is written as '"text"')""", field=what) from problem
