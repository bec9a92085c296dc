"""How figures are written down: rows for people, the same rows as JSON for programs."""

import statistics
import sys
from collections.abc import Iterable, Sequence

Row = dict[str, float | list[float]]
Rows = dict[str, Row]
"""The figures of one measurement: a label for each row, and in each row a value by the name of its column."""


def table(title: str, rows: Rows) -> str:
    """Return the rows as a table. Columns are as wide as what is in them."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["", *columns]]
    lines += [[label, *(_cell(row.get(column)) for column in columns)] for label, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join([title, *(_line(line, widths) for line in lines)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    label, *values = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return "  ".join(["", label.strip().ljust(widths[0]), *values]).rstrip()


def _cell(value: float | list[float] | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(_number, value))
    return _number(value)


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"


def percentile(values: Iterable[float], percent: int) -> float:
    """Return the value below which `percent` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def ratios(left: Sequence[float], right: Sequence[float]) -> Row:
    """Return the ratio of two rivals round by round, its median, and its spread."""
    by_round = [one / other for one, other in zip(left, right, strict=True)]
    return {
        "ratio": statistics.median(by_round),
        "lowest": min(by_round),
        "highest": max(by_round),
        "ratio by round": [round(ratio, 3) for ratio in by_round],
    }


def progress(text: str) -> None:
    """Say on stderr what is going on: in place on a terminal, line by line elsewhere."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
    elif text:
        print(text, file=sys.stderr)
