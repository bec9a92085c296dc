"""`holdfast archive export`: archived runs with their histories, as JSON lines."""

import asyncio
from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.cli.connection import Connection, Target, connect
from holdfast.cli.exit_codes import OK
from holdfast.cli.output import show_json

PAGE = 100
Filter = Annotated[str | None, Parameter(show_default=False)]


def archive_export(
    run_id: str | None = None,
    /,
    *,
    workflow: Filter = None,
    status: Filter = None,
    tenant: Filter = None,
    target: Target | None = None,
) -> int:
    """Write archived runs as JSON lines: for each run one line about it, and then its events.

    Parameters
    ----------
    run_id: str
        One run; otherwise all that match.
    workflow: str
        Only runs of this workflow.
    status: str
        Only runs that ended so: COMPLETED, FAILED or CANCELLED.
    tenant: str
        Only runs of this tenant.
    """
    given = {"run_id": run_id, "workflow": workflow, "status": status, "tenant": tenant}
    ask = {name: value for name, value in given.items() if value is not None}
    return asyncio.run(_export(ask, target or Target()))


async def _export(ask: dict[str, Any], target: Target) -> int:
    async with connect(target) as connection:
        cursor: str | None = ""
        while cursor is not None:
            page = await connection("archive.list", {**ask, "limit": PAGE, "cursor": cursor})
            for run in page["items"]:
                show_json(run)
                await _export_events(connection, run["run_id"])
            cursor = page["next"]
        if "run_id" in ask:
            await connection("archive.get", {"run_id": ask["run_id"]})  # raises NotFound if there is no such run
    return OK


async def _export_events(connection: Connection, run_id: str) -> None:
    after, last = 0, 1
    while after < last:
        page = await connection("archive.events", {"run_id": run_id, "after": after, "limit": PAGE})
        for event in page["items"]:
            show_json(event)
            after = event["run_seq"]
        last = page["last_event_seq"] if page["items"] else after
