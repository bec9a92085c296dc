"""A node on a bucket, to be killed: `python -m tests.engine.s3_orders ADDRESS LEDGER`.

Each order charges, waits for a signal, has a child ship it, and sleeps a moment. Each effect is a line in the ledger.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import holdfast as hf

LEASE_MS = 3_000


def make_app(ledger: Path) -> tuple[hf.App, Any]:
    """Return the app, and its workflow."""
    app = hf.App("orders")

    def note(what: str) -> None:
        with ledger.open("a") as file:
            file.write(f"{what}\n")

    @app.activity
    async def charge(order: str) -> str:
        note(f"charge {order}")
        return f"charged {order}"

    @app.activity
    async def ship(order: str) -> str:
        note(f"ship {order}")
        return f"shipped {order}"

    @app.workflow
    async def shipment(order: str) -> str:
        return await ship(order)

    @app.workflow
    async def order(name: str) -> list[Any]:
        charged = await charge(name)
        approved = await hf.wait_signal("approved", int)
        shipped = await shipment(name)
        await hf.sleep(0.01)
        return [charged, approved, shipped]

    return app, order


async def main(address: str, ledger: Path) -> None:
    """Run a node until it is killed."""
    app, _ = make_app(ledger)
    async with app.node(address, options=hf.NodeOptions(lease_ms=LEASE_MS)):
        sys.stdout.write("running\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
