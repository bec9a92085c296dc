"""A process that is a node, and runs that end it: `python -m tests.engine.bombs ADDRESS FOLDER`.

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


def bombs(folder: Path) -> tuple[hf.App, dict[str, Any]]:
    """Return an app whose workflows end their process, each in its own way, while there is a file of their name."""
    app = hf.App("bombs")

    def go_off(kind: str) -> None:
        if (folder / kind).exists():
            os._exit(7)

    def is_wanted() -> bool:
        go_off("condition")
        return True

    def shake(how: str) -> str:
        go_off("update")
        return how

    @app.activity(retry=hf.Retry(max_attempts=20, initial_ms=1))
    async def blast() -> str:
        go_off("activity")
        return "done"

    @app.activity(retry=hf.Retry(max_attempts=20, initial_ms=1))
    async def rest() -> str:
        await asyncio.sleep(0)
        return "rested"

    @app.workflow
    async def turn() -> str:
        await rest()
        go_off("turn")
        return "whole"

    @app.workflow
    async def first() -> str:
        go_off("first")
        return "whole"

    @app.workflow
    async def replay() -> str:
        go_off("replay")
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
    app, _ = bombs(folder)
    await app.serve(address, name="web-0", options=hf.NodeOptions(lease_ms=LEASE_MS, cached_runs=0, drain_s=0.1))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
