"""A process that is a node and has a run that holds a lock, to be killed.

`python -m tests.engine.locked_process ADDRESS DIARY` prints what its activities note, and adds it to the diary.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import holdfast as hf

LEASE_MS = 600


def make_app(diary: Path) -> tuple[hf.App, Any]:
    """Return an app with a workflow that holds a lock until it gets a signal."""
    app = hf.App("bank")
    accounts = app.lock("account")

    @app.activity
    async def note(what: str) -> None:
        with diary.open("a", encoding="utf-8") as file:
            file.write(f"{what}\n")
        print(what, flush=True)

    @app.workflow(signals={"go": str})
    async def transfer(number: int) -> str:
        async with accounts("17"):
            await note(f"in {number}")
            word = await hf.wait_signal("go")
            await note(f"out {number}")
        return str(word)

    return app, transfer


if __name__ == "__main__":
    asyncio.run(
        make_app(Path(sys.argv[2]))[0].serve(
            sys.argv[1], name="killed", options=hf.NodeOptions(lease_ms=LEASE_MS, drain_s=0.1)
        )
    )
