"""Saga: when a later step fails, undo the earlier ones, last one first.

The undoing is made of durable steps as well. If the process dies halfway through it, it goes on after the restart.
"""

import asyncio
import tempfile

import holdfast as hf

app = hf.App("travel")


class SoldOut(hf.NonRetryable):
    """There is nothing to retry: the answer will be the same."""


@app.activity(cancel="wait")  # a cancelled run waits for the outcome, so it knows what to give back
async def book(what: str, place: str) -> str:
    """Book one part of a trip."""
    if what == "car" and place == "Venice":
        raise SoldOut("there are no cars in Venice")
    print(f"  booked the {what} in {place}")
    return f"{what}-{place}"


@app.activity(retry=hf.Retry(max_attempts=10, initial_ms=100))
async def give_back(booking: str) -> None:
    """Cancel a booking. Try hard: somebody would pay for it."""
    print(f"  gave back {booking}")


@app.workflow
async def trip(place: str) -> list[str]:
    """Book all parts of a trip, or none."""
    bookings = []
    async with hf.Saga() as saga:
        for what in ("flight", "hotel", "car"):
            booking = await book(what, place)
            saga.undo(give_back, booking)
            bookings.append(booking)
    return bookings


async def main(store: str) -> None:
    """Book two trips: one that works, and one that does not."""
    async with app.node(store):
        for place in ("Lisbon", "Venice"):
            print(f"A trip to {place}:")
            run = await app.start(trip, place)
            try:
                print("  all booked:", ", ".join(await run.result()))
            except hf.errors.RunFailed as failure:
                print("  not possible:", failure.info.cause.message)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/saga.db"))
