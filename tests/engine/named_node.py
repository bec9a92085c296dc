"""A process that is a node with a given name, for tests of nodes that are killed, frozen, and come back.

`python -m tests.engine.named_node NAME ADDRESS LEASE_MS [starts]` serves until it is ended,
and prints what it does.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import holdfast as hf

RUN_ID = "run-1"


def make_ship_app() -> tuple[hf.App, Any]:
    """Return an app whose activity hangs the first time; a second attempt ends it."""
    app = hf.App("yard")

    @app.activity
    async def build() -> str:
        attempt = hf.activity_context().attempt
        print(f"began {attempt}", flush=True)
        if attempt == 1:
            await asyncio.Event().wait()
        return f"built by attempt {attempt}"

    @app.workflow
    async def ship() -> str:
        return await build()

    return app, ship


async def serve_as(name: str, address: str, lease_ms: int, starts: bool) -> None:
    """Live as a node."""
    app, ship = make_ship_app()
    if starts:
        async with app.connect(address):
            await app.start(ship, run_id=RUN_ID)
    print("ready", flush=True)
    await app.serve(address, name=name, options=hf.NodeOptions(lease_ms=lease_ms, drain_s=0.1))


if __name__ == "__main__":
    asyncio.run(serve_as(sys.argv[1], sys.argv[2], int(sys.argv[3]), "starts" in sys.argv))
