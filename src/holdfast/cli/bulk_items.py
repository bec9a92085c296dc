"""One operation on all tasks or dead letters that a list finds: preview, confirmation, then each item."""

import sys
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.progress import Progress

from holdfast.cli.connection import Connection, Target, connect
from holdfast.cli.exit_codes import FAILED, OK
from holdfast.cli.output import note, show_items, show_json
from holdfast.errors import CallerError, InvalidInput

PAGE = 500
NAMED = 10
"""How many items a preview lists by id."""


class ItemKind(Struct, frozen=True):
    """A kind of items: its word, the operation that lists it, its id, the columns of a preview, and the text for an
    empty list.
    """

    noun: str
    listed_by: str
    id_field: str
    columns: tuple[str, ...]
    nothing: str = ""


async def operate_on_all(
    kind: ItemKind,
    operation: str,
    asked: dict[str, Any],
    fields_of: Callable[[dict[str, Any]], dict[str, Any]],
    target: Target,
    *,
    is_preview: bool,
    is_sure: bool,
) -> int:
    """Execute an operation, such as `tasks.claim`, on each item that the list finds, and return the exit code."""
    word = operation.rpartition(".")[2]
    async with connect(target) as connection:
        items = await _read(connection, kind, asked)
        if is_preview or not items:
            _show_preview(kind, word, items, target)
            return OK
        if not is_sure:
            _show_preview(kind, word, items, target)
            _confirm(kind, word, len(items))
        refused: list[dict[str, str]] = []
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            going = bar.add_task(word, total=len(items))
            for item in items:
                item_id = item[kind.id_field]
                try:
                    await connection.patiently(operation, {kind.id_field: item_id, **fields_of(item)})
                except CallerError as problem:
                    refused.append({kind.id_field: item_id, "why": problem.message})
                bar.advance(going)
    if target.json:
        show_json({"operation": word, "done": len(items) - len(refused), "refused": refused})
    else:
        print(f"{word}: {len(items) - len(refused)} done, {len(refused)} refused")
        if refused:
            show_items(refused, (kind.id_field, "why"))
        note("the audit log has recorded each of them")
    return FAILED if refused else OK


async def _read(connection: Connection, kind: ItemKind, asked: dict[str, Any]) -> list[Any]:
    filtered = {name: value for name, value in asked.items() if value is not None}
    found: list[Any] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await connection.patiently(kind.listed_by, {**filtered, "limit": PAGE, "cursor": cursor})
        found += page["items"]
        cursor = page["next"]
    return found


def _show_preview(kind: ItemKind, word: str, items: list[Any], target: Target) -> None:
    if target.json:
        show_json({"operation": word, kind.noun.replace(" ", "_"): [item[kind.id_field] for item in items]})
        return
    print(f"{word} concerns {len(items)} {kind.noun}")
    if items:
        show_items(items[:NAMED], kind.columns)
    elif kind.nothing:
        note(kind.nothing)
    if len(items) > NAMED:
        print(f"and {len(items) - NAMED} more")


def _confirm(kind: ItemKind, word: str, count: int) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput(f"{word} of {count} {kind.noun} has to be confirmed: add --yes, or look with --preview")
    if input(f"{word} {count} {kind.noun}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise InvalidInput("nothing was done")
