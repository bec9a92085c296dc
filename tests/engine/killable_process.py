"""A process of its own that runs or carries out `film`, to be killed.

`python -m tests.engine.killable_process ROLE STORE` plays a role until it is killed.

It says on its standard output what it has come to, one line for each thing.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import holdfast as hf
from holdfast.app import App

VISIBLE_MS, LEASE_MS = 500, 500
RUN_ID = "film-1"


def make_film_app(queue: str, is_hanging: bool) -> tuple[App, Any]:
    """Return an app whose activity says what it finds, and then hangs or returns it."""
    app = hf.App("studio")

    @app.activity(queue=queue)
    async def render() -> str:
        context = hf.activity_context()
        context.heartbeat({"frames": 7 * context.attempt})
        print_line(f"began {context.attempt}")
        if is_hanging:
            await asyncio.Event().wait()
        return f"attempt {context.attempt}"

    @app.activity
    async def resume() -> Any:
        context = hf.activity_context()
        found = context.details
        context.heartbeat({"frames": 7 * context.attempt})
        print_line(f"began {context.attempt}")
        if is_hanging:
            await asyncio.Event().wait()
        return [context.attempt, found]

    @app.workflow
    async def film(is_local: bool) -> Any:
        return await (resume() if is_local else render())

    return app, film


def print_line(line: str) -> None:
    """Tell who started this process."""
    print(line, flush=True)


async def main(role: str, address: str) -> None:
    """Play a role until killed."""
    app, film = make_film_app("far", is_hanging=role.endswith("hangs"))
    is_producer = role.startswith("producer")
    options = hf.NodeOptions(
        lease_ms=LEASE_MS, visible_ms=VISIBLE_MS, queues=() if is_producer else ("far",), takes_runs=is_producer
    )
    async with app.node(address, options=options):
        if is_producer:
            await app.start(film, role == "producer hangs", run_id=RUN_ID)
        print_line("ready")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
