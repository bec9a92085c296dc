"""Draws the states of a run from the transition table, so that the page always matches the code.

`python -m holdfast.core.diagram` prints the page; `make diagram` writes it to `docs/states.md`.
"""

from collections.abc import Iterator

from holdfast.core.events import RunQueued
from holdfast.core.state import PENDING, TERMINAL, TRANSITIONS, RunStatus

_INTRODUCTION = """\
# The life of a run

Drawn by `make diagram` from the bodies of events in `holdfast.core.events`; do not edit. Only the events below change
the status of a run. Every other event leaves it as it is, and a finished run takes no events at all.
"""


def states_page() -> str:
    """Return the page: the diagram and a table of the same."""
    return "\n".join([_INTRODUCTION, *_diagram(), "", *_table(), ""])


def transitions() -> Iterator[tuple[RunStatus, str, RunStatus]]:
    """Yield every entry of the table as (status, event type, next status), in the table's order."""
    for status, row in TRANSITIONS.items():
        for body, following in row.items():
            yield status, body.__name__, following


def _diagram() -> Iterator[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {PENDING}: {RunQueued.__name__}"
    for status, event_type, following in transitions():
        yield f"    {status} --> {following}: {event_type}"
    for status in TRANSITIONS:
        if status in TERMINAL:
            yield f"    {status} --> [*]"
    yield "```"


def _table() -> Iterator[str]:
    yield "| status | event | next status |"
    yield "|---|---|---|"
    yield f"| (none) | {RunQueued.__name__} | {PENDING} |"
    for status, event_type, following in transitions():
        yield f"| {status} | {event_type} | {following} |"


if __name__ == "__main__":
    print(states_page(), end="")
