"""Writes the tables of operations and errors into `docs/service.md`: `python -m tools.reference`.

After an operation or an error was added or has changed; a test says when that is due.
"""

from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import HoldfastError, InvalidInput
from holdfast.service.http.problems import rpc_code_of, status_of, title_of
from holdfast.service.operations import DOWNLOADS, OPERATIONS, STREAMS
from holdfast.service.registry import Operation

PAGE = Path(__file__).parents[1] / "docs" / "service.md"
BEGIN, END = "<!-- {name}: made by python -m tools.reference -->\n", "<!-- end -->\n"


def operations_table(operations: Mapping[str, Operation]) -> str:
    """Return the operations as a table: name, address, scope, and what each does."""
    lines = ["| operation | address | scope | what it does |", "|---|---|---|---|"]
    for name, operation in operations.items():
        scope = f"`{operation.scope}`" if operation.scope else "of each kind" if name in STREAMS else "none"
        lines.append(f"| `{name}` | `{operation.verb} {operation.path}` | {scope} | {operation.summary} |")
    return "\n".join(lines)


def errors_table() -> str:
    """Return the errors as a table: code, status of HTTP, number of JSON-RPC, and what each means."""
    lines = ["| code | HTTP | JSON-RPC | what it means |", "|---|---|---|---|"]
    kinds = sorted(_kinds(HoldfastError), key=lambda kind: (status_of(kind), kind.code))
    lines += [f"| `{kind.code}` | {status_of(kind)} | {rpc_code_of(kind)} | {title_of(kind)} |" for kind in kinds]
    return "\n".join(lines)


def _kinds(root: type[HoldfastError]) -> list[type[HoldfastError]]:
    """Return the errors that are raised: those at the ends of the tree, and `InvalidInput`, which has one below it."""
    children = [kind for kind in root.__subclasses__() if kind.__module__ == HoldfastError.__module__]
    raised = [root] if not children or root is InvalidInput else []
    return [*raised, *(kind for child in children for kind in _kinds(child))]


def page_with_tables(text: str) -> str:
    """Return the page with the tables in their places."""
    tables = {"operations": operations_table({**OPERATIONS, **STREAMS, **DOWNLOADS}), "errors": errors_table()}
    for name, made in tables.items():
        begin = BEGIN.format(name=name)
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{made}\n\n{END}{rest.partition(END)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
