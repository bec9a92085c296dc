"""A process that runs orders on a PostgreSQL store: `python -m tests.store.postgres.worker ADDRESS MODE`.

With the mode `stall` its activities never end, and it says so on stdout as soon as one has begun.
"""

from __future__ import annotations

import asyncio
import sys

import holdfast as hf

LEASE_MS = 1_000
OPTIONS = hf.NodeOptions(lease_ms=LEASE_MS, drain_s=0.1)

app = hf.App("orders")
mode = "finish"


@app.activity
async def charge(order_id: str) -> str:
    """Charge a card; or stall."""
    if mode == "stall":
        print("charging", flush=True)
        await asyncio.sleep(3_600)
    return f"receipt of {order_id}"


@app.workflow
async def order(order_id: str) -> str:
    """Wait for approval, then charge."""
    if not await hf.wait_signal("approval", bool):
        return "rejected"
    return await charge(order_id)


async def main(address: str) -> None:
    """Run until killed."""
    async with app.node(address, options=OPTIONS):
        run = await app.start(order, "o-1", run_id="o-1", request_id="o-1")
        await run.signal("approval", True, signal_id="click")
        await asyncio.sleep(3_600)


if __name__ == "__main__":
    mode = sys.argv[2]
    asyncio.run(main(sys.argv[1]))
