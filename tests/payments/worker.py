"""A shop whose node is a process of its own: `python -m tests.payments.worker STORE FOLDER ROLE`.

ROLE is `runs` (a node that has the runs), or `queue` (one that only works on the queue).
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast as hf
from tests.payments.service import Declined, ask

QUEUE = "payments"
LEASE_MS = 1_500
VISIBLE_MS = 1_000
TIMEOUT_S = 4.0
OPTIONS = {
    "runs": hf.NodeOptions(lease_ms=LEASE_MS, activities_at_once=500),
    "queue": hf.NodeOptions(
        lease_ms=LEASE_MS, takes_runs=False, queues=(QUEUE,), visible_ms=VISIBLE_MS, activities_at_once=500
    ),
}


@dataclass(frozen=True)
class Order:
    """What is paid for, and how it is carried out."""

    key: str
    cents: int = 100
    queue: str = ""
    max_attempts: int = 5
    kind: str = "verified"
    """`verified`: with a key and a verifier; `keyed`: with a key only; `plain`: with neither."""


def shop(folder: Path) -> tuple[hf.App, Any]:
    """Return the app and its workflow, for the payment service of this folder."""
    app = hf.App("shop")

    async def find_charge(key: str, cents: int) -> Any:
        answer = await ask(folder, "find", hf.activity_context().idempotency_key or "")
        match answer["state"]:
            case "none":
                return hf.NotCompleted()
            case "charged":
                return hf.Completed(answer["charge"])
            case "no-details":
                return hf.CompletedWithoutResult()
            case _:
                return hf.Indeterminate("the payment service does not know")

    def key_of(key: str, cents: int) -> str:
        return key

    policy = hf.Retry(initial_ms=20, most_ms=200, non_retryable=(Declined.__name__,))

    @app.activity(idempotency_key=key_of, verify=find_charge, verify_timeout=TIMEOUT_S, timeout=TIMEOUT_S, retry=policy)
    async def charge(key: str, cents: int) -> int:
        answer = await ask(folder, "charge", hf.activity_context().idempotency_key or "", cents)
        return int(answer["charge"])

    @app.activity(idempotency_key=key_of, timeout=TIMEOUT_S, retry=policy)
    async def charge_unverified(key: str, cents: int) -> int:
        return int((await ask(folder, "charge", key, cents))["charge"])

    @app.activity(timeout=TIMEOUT_S, retry=policy)
    async def charge_plainly(key: str, cents: int) -> int:
        return int((await ask(folder, "charge", key, cents))["charge"])

    by_kind: dict[str, Any] = {"verified": charge, "keyed": charge_unverified, "plain": charge_plainly}

    @app.workflow
    async def pay(order: Order) -> int:
        retry = hf.Retry(
            max_attempts=order.max_attempts, initial_ms=20, most_ms=200, non_retryable=(Declined.__name__,)
        )
        result: int = await by_kind[order.kind].options(retry=retry, queue=order.queue)(order.key, order.cents)
        return result

    return app, pay


async def main(store: str, folder: Path, role: str) -> None:
    """Work until the process is killed."""
    app, _ = shop(folder)
    async with app.node(store, options=OPTIONS[role]):
        (folder / f"{role}.up").write_text(str(os.getpid()), encoding="ascii")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
