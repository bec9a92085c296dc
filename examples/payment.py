"""Charge a card exactly once: the first answer of the payment service is lost; the charge is found, not repeated."""

import asyncio

import holdfast as hf

app = hf.App("payment")


class Payments:
    """A payment service outside. It charges each key once, and its first answer never arrives."""

    def __init__(self) -> None:
        self.receipts: dict[str, str] = {}

    async def charge(self, cents: int, key: str) -> str:
        self.receipts.setdefault(key, f"receipt for {cents} cents")
        raise ConnectionError("the answer was lost")

    async def find(self, key: str) -> str | None:
        return self.receipts.get(key)


payments = Payments()


async def find_charge(order: str) -> hf.Completed | hf.NotCompleted:
    """Ask the payment service whether an earlier attempt has charged the card."""
    receipt = await payments.find(f"charge-{order}")
    return hf.Completed(receipt) if receipt else hf.NotCompleted()


@app.activity(
    idempotency_key=lambda order: f"charge-{order}",
    verify=find_charge,
    retry=hf.Retry(initial_ms=10),
)
async def charge(order: str, cents: int) -> str:
    """Charge the card, under a key by which the service knows the charge."""
    key = hf.activity_context().idempotency_key
    assert key is not None
    return await payments.charge(cents, key)


@app.workflow
async def pay(order: str) -> str:
    """Return the receipt of the one charge."""
    return await charge(order, 500)


async def main() -> None:
    async with app.node("memory://"):
        run = await app.start(pay, "order-1", request_id="order-1")
        print(await run.result())  # receipt for 500 cents


if __name__ == "__main__":
    asyncio.run(main())
