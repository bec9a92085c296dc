"""The tables of event types that the page needs, from the bodies of the events.

`python -m tools.event_tables`, or `make tables`, writes `web/run/event-tables.js`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from json import dumps
from pathlib import Path

from holdfast.core.events import BODIES, CLOSING, OPENING, TERMINAL, TRANSITIONS, RunStatus
from holdfast.core.operator_commands import OVERRIDES

SCRIPT = Path(__file__).parent.parent / "src" / "holdfast" / "web" / "run" / "event-tables.js"

_HEAD = "// Written by `make tables` from the bodies of events in core/events.py; a test compares them. Do not edit.\n"


def script() -> str:
    """Return the script with all tables."""
    return "\n".join(
        [
            _HEAD,
            "// The kind of step that an event opens.",
            _table("OPENING", {body.__name__: kind for body, kind in OPENING.items()}),
            "// How an event that closes a step leaves it.",
            _table("CLOSING", {body.__name__: body.CLOSED_AS for body in CLOSING}),
            "// From a status, by the type of an event, to the next one.",
            "export const TRANSITIONS = {",
            *(
                f"  {status}: {_row({body.__name__: next for body, next in row.items()})},"
                for status, row in TRANSITIONS.items()
            ),
            "};\n",
            _set("TERMINAL", (status for status in RunStatus if status in TERMINAL)),
            "// Kinds of steps that wait for an answer from outside: skipping one needs a permission of its own.",
            _set("OVERRIDES", (kind for kind in OPENING.values() if kind in OVERRIDES)),
            "// Kinds of steps in which a run carries something out. In the others it only waits.",
            _set("WORK", (kind for body, kind in OPENING.items() if body.IS_WORK)),
            "// What people call a step of a kind.",
            _table("LABELS", {kind: body.LABEL for body, kind in OPENING.items()}),
            "// How people see an event that is not plain.",
            _table("TONES", {name: body.TONE for name, body in BODIES.items() if body.TONE != "plain"}),
        ]
    )


def _table(name: str, rows: Mapping[str, str]) -> str:
    lines = "".join(f"  {key}: {dumps(value)},\n" for key, value in rows.items())
    return f"export const {name} = {{\n{lines}}};\n"


def _row(rows: Mapping[str, str]) -> str:
    pairs = ", ".join(f"{key}: {dumps(value)}" for key, value in rows.items())
    return f"{{ {pairs} }}" if pairs else "{}"


def _set(name: str, values: Iterable[str]) -> str:
    return f"export const {name} = new Set({dumps(list(values))});\n"


if __name__ == "__main__":
    SCRIPT.write_text(script(), encoding="utf-8")
