"""`holdfast call`: calls any operation by its name, whether or not it has a command."""

import asyncio
from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.cli import values
from holdfast.cli.commands import spec_of
from holdfast.cli.connection import Target, connect
from holdfast.cli.exit_codes import OK
from holdfast.cli.output import show_items, show_json
from holdfast.errors import InvalidInput
from holdfast.service.operations import OPERATIONS


def call(
    operation: Annotated[str | None, Parameter(show_default=False)] = None,
    /,
    *ask: str,
    target: Target | None = None,
) -> int:
    """Ask for any operation by its name, and write the answer as JSON. Without a name, list the operations.

    Parameters
    ----------
    operation: str
        Its name, such as runs.get.
    ask: str
        What is asked: name=TEXT and name:=JSON, or one JSON object, or @FILE, or - for stdin.
    """
    target = target or Target()
    if operation is None:
        listed = [{"operation": name, "command": spec_of(each).words, "what": each.summary} for name, each in _named()]
        if target.json:
            show_json(listed)
        else:
            show_items(listed, ("operation", "command", "what"))
        return OK
    asked = values.parse_value(ask, "ask")
    if not isinstance(asked, dict):
        raise InvalidInput("the request is a JSON object, or name=text and name:=json", field="ask")
    show_json(asyncio.run(_call(operation, asked, target)))
    return OK


def _named() -> list[tuple[str, Any]]:
    return sorted(OPERATIONS.items())


async def _call(operation: str, ask: dict[str, Any], target: Target) -> Any:
    async with connect(target) as connection:
        return await connection(operation, ask)
