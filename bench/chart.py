"""Charts for the documentation: `python -m bench --only plans --json - | python -m bench.chart plans FILE.svg`.

A chart is an SVG that follows the reader's light or dark mode: one line for each row of a measurement that has its
figures by tenths, or one bar for each of several that are compared.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from msgspec import Struct

from bench.report import Rows

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 150, 40, 40
BARS_LEFT, BAR_HEIGHT = 270, 22
OTHERS = "#8593a1"
COLOURS = ("#2a78d6", "#c2571a", "#3a8a4d", "#8a4fbf")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #52606d } .title { font-size: 14px; fill: #1f2933 }
.grid { stroke: #d9e0e6 } .line { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #a5b1bd } .title { fill: #e6ebf0 } .grid { stroke: #38434f } }
"""


def by_tenths(title: str, rows: Rows, column: str) -> str:
    """Return the chart of a column whose values are lists: a point for each part of the work."""
    found = {label: row[column] for label, row in rows.items() if isinstance(row.get(column), list)}
    values = {label: line for label, line in found.items() if isinstance(line, list)}
    return lines(title, values, [f"{number + 1}" for number in range(max(map(len, values.values())))])


def lines(title: str, values: Mapping[str, Sequence[float]], ticks: Sequence[str]) -> str:
    """Return the chart of lines that have a point at each tick, or at the first ones."""
    top = _round_up(max(max(line) for line in values.values()))
    parts = [_text(LEFT, 22, title, "title"), *_grid(top, ticks)]
    ends: list[float] = []
    for (label, line), colour in zip(values.items(), COLOURS, strict=False):
        points = [(_x(number, len(ticks)), _y(value, top)) for number, value in enumerate(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        place = points[-1][1] + 4
        while any(abs(place - end) < 15 for end in ends):
            place -= 15
        ends.append(place)
        parts.append(_text(points[-1][0] + 8, place, label, colour=colour))
    return _svg(title, parts, HEIGHT)


class Bar(Struct, frozen=True):
    """One of several figures that are compared; `is_ours` is drawn in a colour of its own."""

    label: str
    value: float
    is_ours: bool = False


def bars(title: str, values: Sequence[Bar]) -> str:
    """Return the chart of figures that are compared, one below the other."""
    top = max(bar.value for bar in values) or 1.0
    parts = [_text(0, 22, title, "title")]
    for number, bar in enumerate(values):
        y = TOP + number * BAR_HEIGHT
        width = max(1.0, (WIDTH - BARS_LEFT - 70) * bar.value / top)
        colour = COLOURS[0] if bar.is_ours else OTHERS
        parts.append(_text(BARS_LEFT - 8, y + 13, bar.label, anchor="end"))
        parts.append(f'<rect x="{BARS_LEFT}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT - 6}" fill="{colour}"/>')
        parts.append(
            _text(BARS_LEFT + width + 6, y + 13, f"{bar.value:,.0f}" if bar.value >= 100 else f"{bar.value:.3g}")
        )
    return _svg(title, parts, TOP + len(values) * BAR_HEIGHT + 8)


def _svg(title: str, parts: Sequence[str], height: int) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _grid(top: float, ticks: Sequence[str]) -> list[str]:
    parts = []
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    bottom = HEIGHT - BOTTOM + 20
    return parts + [_text(_x(number, len(ticks)), bottom, tick, anchor="middle") for number, tick in enumerate(ticks)]


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start", colour: str = "") -> str:
    look = (f' class="{kind}"' if kind else "") + (f' style="fill:{colour}"' if colour else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{escape(text)}</text>'


def _x(number: int, count: int) -> float:
    return LEFT + (WIDTH - RIGHT - LEFT) * number / max(count - 1, 1)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top


def _round_up(value: float) -> float:
    """Return the next round number: 1, 2 or 5 times a power of ten."""
    scale = 10.0 ** (len(f"{int(value)}") - 1) if value >= 1 else 0.1
    return next(scale * step for step in (1, 2, 5, 10) if scale * step >= value)


TITLES = {"plans": ("CPU milliseconds a step, by tenths of a plan of 10,000 steps (SQLite)", "CPU ms/step by tenths")}


def main() -> None:
    """Read the figures of a measurement from standard input and write its chart."""
    name, path = sys.argv[1:]
    title, column = TITLES[name]
    rows: Rows = json.load(sys.stdin)["results"][name]
    Path(path).write_text(by_tenths(title, rows, column), encoding="utf-8")


if __name__ == "__main__":
    main()
