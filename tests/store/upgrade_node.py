"""A node of any build of Holdfast, for tests of upgrades: what is imported here is what PYTHONPATH says.

`python tests/store/upgrade_node.py NAME ADDRESS` serves until it is ended. It prints where its build is once it works,
and each activity that it carries out.
"""

import asyncio
import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import holdfast as hf

OTHERS: dict[str, Any] = {}
"""The other workflows of the app that was made last, by their names."""


def make_app(name: str) -> tuple[hf.App, Any]:
    """Return an app with the same workflow in every build."""
    app = hf.App("shop")

    @app.activity
    async def add(number: int) -> int:
        print(f"{name} adds to {number}", flush=True)
        return number + 1

    @app.workflow
    async def order(number: int) -> int:
        first = await add(number)
        note = await hf.wait_signal("go", int)
        return await add(first + note)

    @app.workflow
    async def rotating(left: int, total: int) -> int:
        total = await add(total)
        if left:
            hf.continue_as_new(left - 1, total + await hf.wait_signal("go", int))
        return total

    # An earlier build runs it without knowing that it has to be approved.
    known = "requires_approval" in inspect.signature(hf.App.workflow).parameters
    options: dict[str, Any] = {"requires_approval": True} if known else {}

    @app.workflow(name="held", version="1", **options)
    async def held(number: int) -> int:
        return await add(number) + await hf.wait_signal("go", int)

    @app.workflow(name="few", version="1", at_once=1)
    async def few(number: int) -> int:
        return await add(number)

    OTHERS.update(rotating=rotating, held=held, few=few)
    return app, order


async def main(name: str, address: str) -> None:
    """Live as a node."""
    app, _ = make_app(name)
    options = hf.NodeOptions(lease_ms=2_000, safety_poll_s=0.2, drain_s=1.0)
    async with app.node(address, name=name, options=options):
        print(f"{name} works: {Path(hf.__file__).parent}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2]))
    except Exception as problem:
        print(f"{sys.argv[1]} has ended: {problem!r}", flush=True)
        raise
