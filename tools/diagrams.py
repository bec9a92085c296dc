"""The diagrams in the documentation, as SVG that needs no script and no network: `python -m tools.diagrams`.

Three explain how it works (`docs/how-it-works.md`) and are files in `docs/pictures`. That of the states of a run is
drawn for the site from the transition table; a code forge draws the same from the Mermaid source in `docs/states.md`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from holdfast.core.diagram import transitions
from holdfast.core.events import RunQueued
from holdfast.core.state import PENDING

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

STYLE = """
.page { fill: #f7f9fb } .box { fill: #ffffff; stroke: #9aa8b5 } .ours { fill: #e3effc; stroke: #2a78d6 }
.kept { fill: #e6f4e9; stroke: #3a8a4d } .lost { fill: #fdeee6; stroke: #c2571a }
text { font: 13px system-ui, sans-serif; fill: #1f2933; text-anchor: middle } .small { font-size: 11px; fill: #52606d }
.left { text-anchor: start } .code { font-family: ui-monospace, monospace; font-size: 12px }
.arrow { stroke: #52606d; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 z" fill="#52606d"/></marker></defs>'
)


def main() -> None:
    """Write the files."""
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pictures() -> dict[str, str]:
    """Return the diagrams that are files, by their names."""
    return {"how-parts.svg": parts(), "how-turn.svg": turn(), "how-recovery.svg": recovery()}


def parts() -> str:
    """Return the processes of an installation and what they share."""
    drawn = [
        *_box(20, 20, 150, 60, "box", "Your application", "app.start, signal"),
        *_box(20, 110, 150, 60, "box", "Browser, curl, CLI", "page, REST, JSON-RPC"),
        *_box(250, 110, 150, 60, "ours", "Server", "API and page"),
        *_box(250, 20, 150, 60, "ours", "Node", "your workflows"),
        *_box(430, 20, 150, 60, "ours", "Node", "your activities"),
        *_box(250, 210, 330, 60, "kept", "Store", "SQLite file, PostgreSQL, or S3 bucket"),
        *_box(640, 20, 140, 60, "box", "The world", "bank, mail, models"),
        _arrow(170, 140, 250, 140),
        '<path class="arrow" d="M95 80 V100 H210 V240 H250"/>',
        _arrow(325, 170, 325, 210),
        '<path class="arrow" d="M400 65 H415 V210"/>',
        _arrow(505, 80, 505, 210),
        _arrow(580, 50, 640, 50),
        _text(125, 260, "small", "starts and signals are commits"),
        _text(610, 40, "small", "calls"),
        _text(650, 150, "small left", "Nodes read messages,"),
        _text(650, 166, "small left", "commit turns, and"),
        _text(650, 182, "small left", "wake each other up."),
    ]
    return _svg(800, 290, "An installation: your application, servers and nodes share one store", drawn)


def turn() -> str:
    """Return one turn, and what a crash at each place leads to."""
    steps = (
        ("1  claim", "lease and epoch", "box", "nothing happened;", "another node claims it"),
        ("2  decide", "your code runs", "box", "nothing was recorded;", "it is decided again"),
        ("3  commit", "one transaction", "kept", "all of the turn is", "there, or none of it"),
        ("4  effects", "activities, wake-ups", "ours", "the attempt is unknown:", "retry, verify, or ask"),
    )
    drawn: list[str] = [_text(20, 150, "small left", "A crash here:")]
    for number, (title, below, kind, first, second) in enumerate(steps):
        x = 20 + number * 195
        drawn += _box(x, 30, 165, 60, kind, title, below)
        drawn += _box(x, 165, 165, 50, "lost", first, second, is_small=True)
        drawn.append(_arrow(x + 82, 90, x + 82, 165))
        if number:
            drawn.append(_arrow(x - 30, 60, x, 60))
    return _svg(790, 235, "A turn: claim, decide, commit, effects, and what a crash at each place leads to", drawn)


def recovery() -> str:
    """Return how a history brings a program back to where it was."""
    lines = (
        (
            "receipt = await charge(order)",
            "StepCompleted charge → “r-1”",
            "not called again: “r-1” is returned",
            "kept",
        ),
        ("await hf.sleep(timedelta(days=3))", "TimerFired sleep", "returns at once: time is up", "kept"),
        ("ok = await hf.wait_signal(…)", "SignalWaiting approval", "waits: nothing is recorded yet", "box"),
        ("await ship(order)", "", "not reached", "box"),
    )
    drawn = [
        _text(140, 28, "", "The workflow’s code"),
        _text(415, 28, "", "The run’s history"),
        _text(680, 28, "", "On the next node"),
    ]
    for number, (code, event, effect, kind) in enumerate(lines):
        y = 45 + number * 48
        drawn += _box(15, y, 250, 36, "box", code, is_code=True)
        if event:
            drawn += _box(305, y, 220, 36, "kept", event)
            drawn.append(_arrow(265, y + 18, 305, y + 18))
        drawn += _box(565, y, 230, 36, kind, effect)
        drawn.append(_arrow(525 if event else 265, y + 18, 565, y + 18))
    return _svg(810, 250, "Recovery: the code runs again, and recorded results take the place of calls", drawn)


PLACES = {
    "PENDING": (170, 50),
    "APPROVED": (170, 240),
    "RUNNING": (430, 50),
    "PAUSED": (430, 185),
    "COMPLETED": (710, 50),
    "FAILED": (710, 145),
    "CANCELLED": (710, 240),
}


def states() -> str:
    """Return the life of a run, with one arrow for each pair of statuses that the transition table connects."""
    between: dict[tuple[str, str], list[str]] = defaultdict(list)
    for status, event_type, following in transitions():
        between[status, following].append(event_type)
    drawn = [_arrow(15, 50, 105, 50), _text(55, 42, "small", RunQueued.__name__)]
    assert PLACES.keys() == {status for pair in between for status in pair}, "a status has no place"
    for (first, second), events in between.items():
        drawn += _connection(PLACES[first], PLACES[second], (second, first) in between, events)
    for name, (x, y) in PLACES.items():
        is_final = not any(name == first for first, _ in between)
        drawn += _box(x - 65, y - 20, 130, 40, "kept" if is_final else "box" if name == PENDING else "ours", name)
    return _svg(800, 285, "The life of a run", drawn)


def _connection(start: tuple[int, int], end: tuple[int, int], is_both: bool, events: Sequence[str]) -> Iterator[str]:
    (x1, y1), (x2, y2) = start, end
    aside = (10 if (x1, y1) < (x2, y2) else -10) if is_both else 0
    if x1 == x2:
        way = 1 if y2 > y1 else -1
        yield _arrow(x1 + aside, y1 + 20 * way, x2 + aside, y2 - 20 * way)
        yield _text(x1 + (aside * 5 or 45), (y1 + y2) // 2 + 4, "small", " ".join(events))
    else:
        yield _arrow(x1 + 65, y1 + aside, x2 - 65, y2 + aside)
        if y1 == y2:
            yield _text((x1 + x2) // 2, y1 - 6, "small", " ".join(events))


def _svg(width: int, height: int, title: str, drawn: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    page = f'<rect class="page" width="{width}" height="{height}" rx="8"/>'
    return "\n".join([f"{head}<title>{escape(title)}</title><style>{STYLE}</style>{TIP}", page, *drawn, "</svg>", ""])


def _box(
    x: int, y: int, width: int, height: int, kind: str, *lines: str, is_code: bool = False, is_small: bool = False
) -> Iterator[str]:
    yield f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'
    for number, line in enumerate(lines):
        place = y + height // 2 + 5 + (number * 18 - 9 if len(lines) > 1 else 0)
        style = "code" if is_code else "small" if number or is_small else ""
        yield _text(x + width // 2, place, style, line)


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<path class="arrow" d="M{x1} {y1} L{x2} {y2}"/>'


def _text(x: int, y: int, style: str, text: str) -> str:
    return f'<text x="{x}" y="{y}" class="{style}">{escape(text)}</text>'


if __name__ == "__main__":
    main()
