"""A node of any build of Holdfast, for tests of upgrades: what is imported here is what PYTHONPATH says.

`python tests/store/upgrade_node.py NAME ADDRESS` serves until it is ended. It prints where its build is once it works,
and each activity that it carries out.
"""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import holdfast as hf


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
    asyncio.run(main(sys.argv[1], sys.argv[2]))
