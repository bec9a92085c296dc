"""Flow: an order as a tree of steps around one typed state.

The lambdas are called once, and recorded. If shipping fails, the payment is undone. `holdfast flow show` draws it.
"""

import asyncio
from dataclasses import dataclass, replace
from datetime import timedelta

import holdfast as hf

app = hf.App("shop")


@dataclass(frozen=True)
class Order:
    item: str
    cents: int
    approved_by: str = ""
    payment: str = ""


@app.activity
async def charge(order: Order) -> Order:
    return replace(order, payment=f"{order.cents / 100:.2f} paid")


@app.activity
async def refund(order: Order) -> None:
    print("gave back what was taken:", order.payment)


@app.activity
async def ship(order: Order) -> None:
    if order.item == "piano":
        raise hf.NonRetryable("a piano is too heavy")


approval: hf.Signal[Order] = hf.Signal(
    "approval", str, on_receive=lambda order, by: replace(order, approved_by=by), timeout=timedelta(days=2)
)
expensive: hf.Cue[Order] = hf.Cue(lambda order: order.cents > 100_00, then=approval)
fulfil = app.flow("fulfil", Order, hf.Scene(expensive, hf.Act(charge, compensate=refund), hf.Act(ship)))


async def main(store: str) -> None:
    async with app.node(store):
        print(await (await app.start(fulfil, Order("book", 20_00))).result())
        run = await app.start(fulfil, Order("piano", 4_000_00))
        await run.signal("approval", "ann")
        try:
            await run.result()
        except hf.errors.RunFailed as failure:
            print("not delivered:", failure.info.message)


if __name__ == "__main__":
    asyncio.run(main("memory://"))
