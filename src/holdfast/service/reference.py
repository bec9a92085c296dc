"""The reference of the service as a page has it: `python -m holdfast.service.reference` writes it."""

from collections.abc import Mapping

from holdfast.errors import HoldfastError
from holdfast.service.catalogue import Operation
from holdfast.service.operations import CATALOGUE
from holdfast.service.problems import rpc_code_of, status_of, title_of


def operations_table(catalogue: Mapping[str, Operation]) -> str:
    """Return the operations as a table: name, address, scope, and what each does."""
    lines = ["| operation | address | scope | what it does |", "|---|---|---|---|"]
    for name, operation in catalogue.items():
        scope = "none" if operation.scope is None else f"`{operation.scope}`"
        lines.append(f"| `{name}` | `{operation.verb} {operation.path}` | {scope} | {operation.summary} |")
    return "\n".join(lines)


def errors_table() -> str:
    """Return the errors as a table: code, status of HTTP, number of JSON-RPC, and what each means."""
    lines = ["| code | HTTP | JSON-RPC | what it means |", "|---|---|---|---|"]
    kinds = sorted(_kinds(HoldfastError), key=lambda kind: (status_of(kind), kind.code))
    lines += [f"| `{kind.code}` | {status_of(kind)} | {rpc_code_of(kind)} | {title_of(kind)} |" for kind in kinds]
    return "\n".join(lines)


def _kinds(root: type[HoldfastError]) -> list[type[HoldfastError]]:
    """Return the errors that are raised: those at the ends of the tree."""
    children = [kind for kind in root.__subclasses__() if kind.__module__ == HoldfastError.__module__]
    return [root] if not children else [kind for child in children for kind in _kinds(child)]


if __name__ == "__main__":
    print(f"{operations_table(CATALOGUE)}\n\n{errors_table()}")
