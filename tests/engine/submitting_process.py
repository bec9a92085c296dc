"""A process that is a node, and asks for an answer that comes later, to be killed before it has reported that.

`python -m tests.engine.submitting_process ADDRESS` prints the token that it has given away.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import holdfast as hf

LEASE_MS = 600
SUBMITTED: list[str] = []
"""The tokens that this process has given away."""


def make_app(*, hangs: bool) -> tuple[hf.App, Any]:
    """Return an app with a workflow that submits an order and waits for the answer."""
    app = hf.App("bank")

    @app.activity
    async def submit(ref: hf.CallbackRef) -> str:
        context = hf.activity_context()
        SUBMITTED.append(context.callback_token(ref))
        if hangs:
            print(SUBMITTED[-1], flush=True)
            await asyncio.Event().wait()
        return f"submitted at attempt {context.attempt}"

    @app.workflow
    async def order() -> list[int | str]:
        answer = hf.callback(int, heartbeat_timeout=3_600)
        submitted = await submit(answer.ref)
        return [await answer, submitted]

    return app, order


if __name__ == "__main__":
    options = hf.NodeOptions(lease_ms=LEASE_MS)
    asyncio.run(make_app(hangs=True)[0].serve(sys.argv[1], name="killed", options=options))
