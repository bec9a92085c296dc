"""`holdfast dead-letter bulk` and `holdfast bus bulk`: requeue or drop all dead letters that a filter finds."""

import asyncio
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from holdfast.cli.bulk_items import ItemKind, operate_on_all
from holdfast.cli.connection import Target
from holdfast.core.dead_letters import Reason

LETTERS = ItemKind("dead letters", "letters.list", "letter_id", ("letter_id", "run_id", "reason", "detail", "died_at"))
BUS_LETTERS = ItemKind("dead letters", "bus.letters", "letter_id", ("letter_id", "sink", "run_id", "detail", "died_at"))

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def dead_letter_bulk(
    operation: Literal["requeue", "drop"],
    /,
    *,
    run_id: str | None = None,
    reason: Reason | None = None,
    actor: str | None = None,
    preview: Flag = False,
    yes: Flag = False,
    target: Target | None = None,
) -> int:
    """Requeue or drop all dead letters that a filter finds: first they are counted, then it asks.

    Ends with 1 if something was refused. The audit log records each of them.

    Parameters
    ----------
    operation: str
        requeue gives the messages to their runs again; drop gives them up for good.
    run_id: str
        Only those of this run.
    reason: str
        Only those with this reason.
    actor: str
        Who does this, where access is open; else it is the caller.
    preview: bool
        Only say which dead letters there are.
    yes: bool
        Do not ask.
    """
    fields: dict[str, Any] = {"actor": actor} if actor else {}
    asked = {"run_id": run_id, "reason": reason}
    return asyncio.run(
        operate_on_all(
            LETTERS,
            f"letters.{operation}",
            asked,
            lambda _: fields,
            target or Target(),
            is_preview=preview,
            is_sure=yes,
        )
    )


def bus_bulk(
    operation: Literal["requeue", "drop"],
    /,
    *,
    sink: str | None = None,
    run_id: str | None = None,
    preview: Flag = False,
    yes: Flag = False,
    target: Target | None = None,
) -> int:
    """Send again or drop all that sinks were given up for: first it is counted, then it asks.

    Ends with 1 if something was refused. The audit log records each of them.

    Parameters
    ----------
    operation: str
        requeue sends the events again; drop gives them up for good.
    sink: str
        Only those of this sink.
    run_id: str
        Only those of this run.
    preview: bool
        Only say which dead letters there are.
    yes: bool
        Do not ask.
    """
    asked = {"sink": sink, "run_id": run_id}
    return asyncio.run(
        operate_on_all(
            BUS_LETTERS,
            f"bus.{operation}",
            asked,
            lambda _: {},
            target or Target(),
            is_preview=preview,
            is_sure=yes,
        )
    )
