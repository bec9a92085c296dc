"""`holdfast task bulk`: one operation on all open tasks that a filter finds, after a preview."""

import asyncio
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from holdfast.cli import values
from holdfast.cli.connection import Connection, Target, connect
from holdfast.cli.exit_codes import FAILED, OK
from holdfast.cli.output import note, show_items, show_json
from holdfast.clock import SystemClock, SystemIds
from holdfast.errors import CallerError, InvalidInput

PAGE = 500
NAMED = 10
"""How many tasks a preview names."""

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def task_bulk(
    operation: Literal["claim", "release", "reassign", "complete"],
    /,
    *answer: Annotated[str, Parameter(allow_leading_hyphen=False)],
    workflow: str | None = None,
    role: str | None = None,
    assignee: str | None = None,
    text: str | None = None,
    overdue: Flag = False,
    to: str | None = None,
    actor: str | None = None,
    preview: Flag = False,
    yes: Flag = False,
    target: Target | None = None,
) -> int:
    """Do one thing to all open tasks that a filter finds: first they are counted, then it asks.

    Ends with 1 if something was refused. Each task records what was done, and so does the audit log.

    Parameters
    ----------
    operation: str
        What to do: reassign gives them to somebody, or to none; complete answers all of them alike.
    answer: str
        With complete, the answer: name=TEXT and name:=JSON, or one JSON value, or @FILE, or - for stdin.
    workflow: str
        Only tasks of this workflow.
    role: str
        Only tasks for this role.
    assignee: str
        Only tasks of this assignee.
    text: str
        Words, each a part of the task's name or payload.
    overdue: bool
        Only tasks whose time is over.
    to: str
        With reassign, the new assignee; none if it is left out.
    actor: str
        Who does this, where access is open; else it is the caller.
    preview: bool
        Only say which tasks there are.
    yes: bool
        Do not ask.
    """
    if answer and operation != "complete":
        raise InvalidInput(f"{operation} takes no answer", field="answer")
    fields: dict[str, Any] = {"actor": actor} if actor else {}
    if operation == "complete":
        fields["answer"] = values.parse_value(answer, "answer") if answer else None
    if operation == "reassign" and to is not None:
        fields["to"] = to
    asked = {"status": "OPEN", "workflow": workflow, "role": role, "assignee": assignee, "text": text, "limit": PAGE}
    if overdue:
        asked["due_before"] = datetime.fromtimestamp(SystemClock().now() / 1_000_000, UTC).isoformat()
    filtered = {name: value for name, value in asked.items() if value is not None}
    return asyncio.run(_operate(operation, filtered, fields, target or Target(), is_preview=preview, is_sure=yes))


async def _operate(
    operation: str, asked: dict[str, Any], fields: dict[str, Any], target: Target, *, is_preview: bool, is_sure: bool
) -> int:
    async with connect(target) as connection:
        tasks = await _tasks(connection, asked)
        if is_preview or not tasks:
            _show_preview(operation, tasks, target)
            return OK
        if not is_sure:
            _show_preview(operation, tasks, target)
            _confirm(operation, len(tasks))
        refused: list[dict[str, str]] = []
        request_id, console = SystemIds().new_id(), Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            going = bar.add_task(operation, total=len(tasks))
            for task in tasks:
                of_task = {"task_id": task["task_id"], "operation_id": f"bulk-{request_id}", **fields}
                if "actor" in fields:
                    of_task["actor_roles"] = task["roles"]
                try:
                    await connection.patiently(f"tasks.{operation}", of_task)
                except CallerError as problem:
                    refused.append({"task_id": task["task_id"], "why": problem.message})
                bar.advance(going)
    if target.json:
        show_json({"operation": operation, "done": len(tasks) - len(refused), "refused": refused})
    else:
        print(f"{operation}: {len(tasks) - len(refused)} done, {len(refused)} refused")
        if refused:
            show_items(refused, ("task_id", "why"))
        note(f"each task has recorded it, as operation bulk-{request_id}")
    return FAILED if refused else OK


async def _tasks(connection: Connection, asked: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await connection.patiently("tasks.list", {**asked, "cursor": cursor})
        found += page["items"]
        cursor = page["next"]
    return found


def _show_preview(operation: str, tasks: list[Any], target: Target) -> None:
    if target.json:
        show_json({"operation": operation, "tasks": [task["task_id"] for task in tasks]})
        return
    print(f"{operation} concerns {len(tasks)} tasks")
    show_items(tasks[:NAMED], ("task_id", "workflow", "name", "assignee", "roles", "due_at"))
    if len(tasks) > NAMED:
        print(f"and {len(tasks) - NAMED} more")


def _confirm(operation: str, count: int) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput(f"{operation} of {count} tasks has to be confirmed: add --yes, or look with --preview")
    if input(f"{operation} {count} tasks? [y/N] ").strip().lower() not in ("y", "yes"):
        raise InvalidInput("nothing was done")
