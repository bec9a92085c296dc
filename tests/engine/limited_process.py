"""A process that is a node and holds the one place of a limit, to be killed.

`python -m tests.engine.limited_process NAME ADDRESS KIND` says `began` when it has the place.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

import holdfast as hf

VISIBLE_MS = 600
OPTIONS: dict[str, Any] = {"visible_ms": VISIBLE_MS, "lease_ms": VISIBLE_MS, "drain_s": 0.1, "queues": ("desk",)}


class Asked(msgspec.Struct, frozen=True):
    """The state of a flow that asks."""

    user: str


def make_app(kind: str, *, hangs: bool) -> tuple[hf.App, Callable[[str], Awaitable[hf.RunHandle[Any]]]]:
    """Return an app whose activity has a limit of one, and what starts a run that calls it: code, a flow or a plan."""
    app = hf.App("bank")

    @app.activity(limit=hf.ActivityLimit(at_once=1), queue="desk" if kind == "queue" else "")
    async def ask(user: str) -> str:
        print("began", flush=True)
        if hangs:
            await asyncio.Event().wait()
        return f"{user} at attempt {hf.activity_context().attempt}"

    @app.workflow
    async def order(user: str) -> str:
        return await ask(user)

    step: Any = hf.Act(ask, input=lambda asked: asked.user, apply=lambda asked, answer: asked)
    asks = app.flow("asks", Asked, hf.Scene(step))
    plan: dict[str, Any] = {"plan": "ask-too", "version": "1", "inputs": {"user": {"type": "string"}}}
    plan["steps"] = [{"id": "ask", "activity": "ask", "input": {"user": "${inputs.user}"}}]

    async def start(user: str) -> hf.RunHandle[Any]:
        if kind == "plan":
            return await app.plans.start(plan, {"user": user})
        return await (app.start(asks, Asked(user)) if kind == "flow" else app.start(order, user))

    return app, start


if __name__ == "__main__":
    node = make_app(sys.argv[3], hangs=True)[0]
    asyncio.run(node.serve(sys.argv[2], name=sys.argv[1], options=hf.NodeOptions(**OPTIONS)))
