"""A process that is a node, and runs that end it: `python -m tests.engine.crashing_node ADDRESS FOLDER`.

What goes off is a file in the folder, so that a test can mend it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import holdfast as hf

LEASE_MS = 600_000


def make_crashing_app(folder: Path) -> tuple[hf.App, dict[str, Any]]:
    """Return an app whose workflows end their process, each in its own way, while there is a file of their name."""
    app = hf.App("bombs")

    def crash(kind: str) -> None:
        if (folder / kind).exists():
            os._exit(7)

    def is_wanted() -> bool:
        crash("condition")
        return True

    def shake(how: str) -> str:
        crash("update")
        return how

    @app.activity(retry=hf.Retry(max_attempts=20, initial_ms=1))
    async def blast() -> str:
        crash("activity")
        return "done"

    @app.activity(retry=hf.Retry(max_attempts=20, initial_ms=1))
    async def rest() -> str:
        await asyncio.sleep(0)
        return "rested"

    @app.workflow
    async def turn() -> str:
        await rest()
        crash("turn")
        return "whole"

    @app.workflow
    async def first() -> str:
        crash("first")
        return "whole"

    @app.workflow
    async def replay() -> str:
        crash("replay")
        hf.on_query("how", lambda: "well")
        return await hf.wait_signal("go", str)

    @app.workflow
    async def condition() -> str:
        return str(await hf.wait_signal("go", str, condition=is_wanted))

    @app.workflow
    async def update() -> str:
        hf.on_update("shake", shake)
        return await hf.wait_signal("go", str)

    @app.workflow
    async def activity() -> str:
        return await blast()

    @app.workflow
    async def calm(number: int) -> str:
        for _ in range(3):
            await rest()
        return await hf.wait_signal("go", str)

    return app, {
        "turn": turn,
        "first": first,
        "replay": replay,
        "condition": condition,
        "update": update,
        "activity": activity,
        "calm": calm,
    }


async def serve(address: str, folder: Path) -> None:
    """Serve as the one node there is."""
    app, _ = make_crashing_app(folder)
    await app.serve(address, name="web-0", options=hf.NodeOptions(lease_ms=LEASE_MS, cached_runs=0, drain_s=0.1))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
