"""`holdfast task bulk`: one operation on all open tasks that a filter finds, after a preview."""

import asyncio
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from holdfast.cli import values
from holdfast.cli.bulk_items import ItemKind, operate_on_all
from holdfast.cli.commands import NO_TASKS
from holdfast.cli.connection import Target
from holdfast.clock import SystemIds
from holdfast.errors import InvalidInput

COLUMNS = ("task_id", "run_id", "name", "assignee", "roles", "due_at")
TASKS = ItemKind("tasks", "tasks.list", "task_id", COLUMNS, NO_TASKS)

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
    _check(operation, has_answer=bool(answer), is_preview=preview)
    fields: dict[str, Any] = {"actor": actor} if actor else {}
    if operation == "complete":
        fields["answer"] = values.parse_value(answer, "answer") if answer else None
    if operation == "reassign" and to is not None:
        fields["to"] = to
    asked = {
        "status": "OPEN",
        "workflow": workflow,
        "role": role,
        "assignee": assignee,
        "text": text,
        "overdue": overdue or None,
    }
    operation_id = f"bulk-{SystemIds().new_id()}"

    def fields_of(task: dict[str, Any]) -> dict[str, Any]:
        roles = {"actor_roles": task["roles"]} if "actor" in fields else {}
        return {"operation_id": operation_id, **fields, **roles}

    return asyncio.run(
        operate_on_all(
            TASKS, f"tasks.{operation}", asked, fields_of, target or Target(), is_preview=preview, is_sure=yes
        )
    )


def _check(operation: str, *, has_answer: bool, is_preview: bool) -> None:
    if has_answer and operation != "complete":
        raise InvalidInput(f"{operation} takes no answer", field="answer")
    if operation == "complete" and not has_answer and not is_preview:
        raise InvalidInput("complete takes the answer that all of them get, such as true", field="answer")
