"""The methods of the client as type checkers see them: `python -m tools.client_stubs` writes `client/resources.pyi`.

`make tables` runs it, and breaks its lines.
"""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UnsetType

from holdfast.client.resources import RESOURCES, STREAMED, needed
from holdfast.service.operations import DOWNLOADS, OPERATIONS
from holdfast.service.registry import Operation

STUBS = Path(__file__).parent.parent / "src" / "holdfast" / "client" / "resources.pyi"

HEAD = '''"""Written by `python -m tools.client_stubs` from the operations; a test compares them. Do not edit."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from typing import Any, Literal

from holdfast.client.calls import Calls
from holdfast.service.registry import Operation
{imports}

RESOURCES: tuple[str, ...]
STREAMED: dict[str, Operation]

Run = Callable[[Coroutine[Any, Any, Any]], Any]

def needed(operation: Operation) -> tuple[str, ...]: ...
def iterate(stream: AsyncGenerator[Any], run: Run) -> Iterator[Any]: ...
'''


def written(hint: Any, imports: dict[str, str], *, is_asked: bool = True) -> str:
    """Return a type as it is written."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return written(args[0], imports, is_asked=is_asked)
    if origin in (Union, types.UnionType):
        parts = [written(arg, imports, is_asked=is_asked) for arg in args if arg is not UnsetType]
        return " | ".join(dict.fromkeys(parts))
    if origin is Literal:
        return f"Literal[{', '.join(repr(arg) for arg in args)}]"
    if origin is tuple:
        return f"Sequence[{written(args[0], imports)}]"
    if origin is list and is_asked:
        return "Sequence[dict[str, Any]]"
    if origin is dict:
        return "dict[str, Any]"
    if hint is Any:
        return "Any"
    if hint is type(None):
        return "None"
    if hint.__module__.startswith("holdfast."):
        imports[hint.__name__] = hint.__module__
    return str(hint.__name__)


def _parameters(operation: Operation, imports: dict[str, str]) -> str:
    hints = get_type_hints(operation.request_type, include_extras=True)
    first = needed(operation)
    rest = [field.name for field in msgspec.structs.fields(operation.request_type) if field.name not in first]
    placed = [f"{name}: {written(hints[name], imports)}" for name in first]
    named = [f"{name}: {written(hints[name], imports)} = ..." for name in rest]
    return ", ".join(["self", *placed, *(["*", *named] if named else [])])


def _method(operation: Operation, imports: dict[str, str], *, is_sync: bool) -> str:
    name = operation.name.partition(".")[2]
    answer = written(operation.response_type, imports, is_asked=False)
    if operation.name in STREAMED:
        told = answer if "after" in operation.request_type.__struct_fields__ else "tuple[str, Any]"
        answer = f"{'' if is_sync else 'Async'}Iterator[{told}]"
    if operation.name in DOWNLOADS:
        answer = f"{'' if is_sync else 'Async'}Iterator[{answer}]"
    prefix = "" if is_sync or operation.name in STREAMED or operation.name in DOWNLOADS else "async "
    return f"    {prefix}def {name}({_parameters(operation, imports)}) -> {answer}: ..."


def stubs() -> str:
    """Return the text of the stubs."""
    imports: dict[str, str] = {}
    classes: list[str] = []
    for resource in RESOURCES:
        known = {**OPERATIONS, **STREAMED, **DOWNLOADS}
        operations = [each for each in known.values() if each.resource == resource]
        for is_sync in (False, True):
            takes = "resource: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]" if is_sync else "calls: Calls"
            lines = [
                f"class {'Sync' if is_sync else ''}{resource.title()}:",
                f"    def __init__(self, {takes}) -> None: ...",
            ]
            lines += [_method(each, imports, is_sync=is_sync) for each in operations]
            classes.append("\n".join(lines))
    names = {module: sorted(name for name in imports if imports[name] == module) for module in imports.values()}
    listed = "\n".join(f"from {module} import {', '.join(names[module])}" for module in sorted(names))
    return HEAD.format(imports=listed) + "\n" + "\n\n".join(classes) + "\n"


def flat(text: str) -> str:
    """Return stubs without regard to how their lines are broken or their imports are sorted."""
    body = text.partition("RESOURCES:")[2]
    return re.sub(r"\s+", "", body).replace(",)", ")").replace(",]", "]").replace('"', "'")


if __name__ == "__main__":
    STUBS.write_text(stubs(), encoding="utf-8")
