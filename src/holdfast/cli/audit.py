"""`holdfast audit export`: the audit log as JSON lines."""

import asyncio
from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.cli.connection import Target, connect
from holdfast.cli.exit_codes import OK
from holdfast.cli.output import show_json
from holdfast.cli.values import parse_moment

PAGE = 500

Since = Annotated[str | None, Parameter(help="From this moment on, such as 2026-01-31T00:00:00Z.")]
Until = Annotated[str | None, Parameter(help="Up to this moment.")]


def export(
    *,
    since: Since = None,
    until: Until = None,
    tenant: str | None = None,
    actor: str | None = None,
    operation: str | None = None,
    run_id: str | None = None,
    target: Target | None = None,
) -> int:
    """Write the audit log as JSON lines, the oldest entry first."""
    given = {"tenant": tenant, "actor": actor, "operation": operation, "run_id": run_id}
    ask: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name, value in (("since", since), ("until", until)):
        if value is not None:
            ask[name] = parse_moment(value, f"--{name}")
    return asyncio.run(_export(ask, target or Target()))


async def _export(ask: dict[str, Any], target: Target) -> int:
    async with connect(target) as connection:
        cursor: str | None = ""
        while cursor is not None:
            page = await connection("audit.list", {**ask, "order": "oldest", "limit": PAGE, "cursor": cursor})
            for item in page["items"]:
                show_json(item)
            cursor = page["next"]
    return OK
