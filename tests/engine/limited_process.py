"""A process that is a node and holds the one place of a limit, to be killed.

`python -m tests.engine.limited_process NAME ADDRESS` says `began` when it has the place.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import holdfast as hf

VISIBLE_MS = 600
OPTIONS: dict[str, Any] = {"visible_ms": VISIBLE_MS, "lease_ms": VISIBLE_MS, "drain_s": 0.1}


def make_app(*, hangs: bool) -> tuple[hf.App, Any]:
    """Return an app whose activity has a limit of one."""
    app = hf.App("bank")

    @app.activity(limit=hf.ActivityLimit(at_once=1))
    async def ask(user: str) -> str:
        print("began", flush=True)
        if hangs:
            await asyncio.Event().wait()
        return f"{user} at attempt {hf.activity_context().attempt}"

    @app.workflow
    async def order(user: str) -> str:
        return await ask(user)

    return app, order


if __name__ == "__main__":
    asyncio.run(make_app(hangs=True)[0].serve(sys.argv[2], name=sys.argv[1], options=hf.NodeOptions(**OPTIONS)))
