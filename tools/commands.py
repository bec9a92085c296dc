"""Writes the table of the commands that are derived from the catalogue into `docs/command-line.md`.

`python -m tools.commands` after an operation was added or has changed; a test says when that is due.
"""

from pathlib import Path

from holdfast.cli.commands import spec_of
from holdfast.cli.generate import arguments_of, fields_of
from holdfast.cli.main import OWN, STARTS
from holdfast.service.operations import OPERATIONS
from holdfast.service.registry import Operation

PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"
BEGIN, END = "<!-- made by python -m tools.commands -->\n", "<!-- end -->\n"


def table() -> str:
    """Return the table: each command, its options, and the operation behind it."""
    rows = [_row(operation) for name, operation in OPERATIONS.items() if name not in OWN]
    return "\n".join(["| command | options | operation |", "|---|---|---|", *sorted(rows), ""])


def page_with(text: str, made: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + made + "\n" + END + rest.partition(END)[2]


def _row(operation: Operation) -> str:
    spec, fields = spec_of(operation), fields_of(operation)
    arguments = arguments_of(spec, fields)
    said = [name.upper().replace("_", "-") if fields[name].is_required else f"[{name.upper()}]" for name in arguments]
    said += [f"[{spec.rest.upper()}]..."] if spec.rest else []
    options = [given.option for given in fields.values() if given.field not in (*arguments, spec.rest)]
    options += [given.negative for given in fields.values() if given.negative]
    options += ["--all"] if "cursor" in fields else []
    options += ["--watch"] if spec.columns else []
    options += ["--wait"] if operation.name in STARTS else []
    listed = " ".join(f"`{option}`" for option in options)
    return f"| `holdfast {' '.join([spec.words, *said])}` | {listed} | `{operation.name}` |"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), table()))
