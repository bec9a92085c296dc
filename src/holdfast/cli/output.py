"""Output of results: tables and lists for people, in colour on a terminal; JSON for programs.

Text from histories is untrusted: it is never interpreted as markup, and its control characters are shown instead of
being sent to the terminal.
"""

import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.clock import SystemClock
from holdfast.engine.observe.logs import escaped, escaped_json
from holdfast.errors import HoldfastError

STYLES = {
    "COMPLETED": "green",
    "SUCCESS": "green",
    "consumed": "green",
    "ok": "green",
    "RUNNING": "cyan",
    "OPEN": "cyan",
    "PAUSED": "magenta",
    "FAILED": "red",
    "dead-lettered": "red",
    "CANCELLED": "yellow",
    "SKIPPED": "yellow",
}
"""The styles of words that describe a status."""

MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
AGES = ((60, 1, "s"), (3_600, 60, "min"), (86_400, 3_600, "h"), (2**62, 86_400, "d"))
"""As on the page: the upper limit in seconds, the divisor, and the unit."""


def show_json(value: Any) -> None:
    """Write one JSON document on a line of its own."""
    print(json_line(value), flush=True)


def show_items(items: Sequence[dict[str, Any]], columns: Sequence[str], nothing: str = "there are none") -> None:
    """Write a table, or `nothing`. Without a terminal it is as wide as necessary, and nothing is truncated."""
    if not items:
        note(nothing)
        return
    rows = [[_cell(item.get(column)) for column in columns] for item in items]
    heads = [clean(column.replace("_", " ")) for column in columns]
    if sys.stdout.isatty():
        table = Table(*heads, box=SIMPLE_HEAD, pad_edge=False)
        for column in table.columns:
            column.overflow = "fold"
        for row in rows:
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        Console().print(table)
        return
    widths = [max(len(row[index]) for row in [heads, *rows]) for index in range(len(heads))]
    for row in [heads, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_fields(answer: dict[str, Any]) -> None:
    """Write one item: a line for each of its fields that is not empty."""
    fields = {
        clean(name.replace("_", " ")): _cell(value) for name, value in answer.items() if value not in (None, [], {}, "")
    }
    width = max(map(len, fields), default=0)
    console = Console() if sys.stdout.isatty() else None
    for name, text in fields.items():
        if console is None:
            print(f"{name.ljust(width)}  {text}")
        else:
            console.print(Text.assemble((name.ljust(width), "bold"), "  ", (text, STYLES.get(text, ""))))


def show_text(text: str) -> None:
    """Write a text of several lines after an empty line."""
    print()
    for line in text.splitlines():
        print(clean(line))


def show_line(text: str, style: str = "") -> None:
    """Write a line, and flush it."""
    if sys.stdout.isatty():
        Console().print(Text(clean(text), style=style), soft_wrap=True)
    else:
        print(clean(text), flush=True)


def note(text: str) -> None:
    """Write a note, which is not a result, to stderr."""
    print(f"holdfast: {clean(text)}", file=sys.stderr)


def show_traceback(problem: HoldfastError) -> None:
    """Write the traceback that an error carries, if it has one, below its message."""
    for line in str(problem.details.get("traceback", "")).splitlines():
        print(clean(line), file=sys.stderr)


clean = escaped
"""Returns a text as one line in which control characters are visible and have no effect."""


def json_line(value: Any) -> str:
    """Return a value as one line of JSON, with escapes for characters that a terminal would interpret."""
    return escaped_json(msgspec.json.encode(value, enc_hook=str).decode())


def moment(text: str) -> str:
    """Return an instant in local time, with its distance from now."""
    then = datetime.fromisoformat(text)
    try:
        here = then.astimezone()
    except OverflowError:  # the year 9999, which means never
        here = then.astimezone(UTC)
    return f"{here:%Y-%m-%d %H:%M:%S} ({distance(text)})"


def distance(text: str) -> str:
    """Return the distance of a point in time from now."""
    seconds = SystemClock().now() / 1_000_000 - datetime.fromisoformat(text).timestamp()
    return _age(abs(seconds), seconds >= 0)


def _age(seconds: float, is_past: bool) -> str:
    size, unit = next((size, unit) for below, size, unit in AGES if seconds < below)
    return f"{int(seconds // size)} {unit} ago" if is_past else f"in {round(seconds / size)} {unit}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return moment(value) if MOMENT.fullmatch(value) else clean(value)
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return clean(", ".join(value))
    if isinstance(value, dict) and value.keys() == {"token_id", "name"}:  # a caller
        return clean(f"{value['name']} ({value['token_id']})")
    if isinstance(value, dict) and all(type(count) is int for count in value.values()):
        return clean(", ".join(f"{name} {count}" for name, count in value.items()))
    return clean(msgspec.json.encode(value).decode())
