"""Approval: wait for a person, but not for ever.

A signal is how the outside world talks to a run. It may come before the run asks for it: then it is kept. A run that
waits holds no thread, no memory and no connection, so `timeout` may as well be days.
"""

import asyncio
import tempfile
from dataclasses import dataclass
from datetime import timedelta

import holdfast as hf

app = hf.App("approval")


@dataclass
class Decision:
    """What the manager says. A signal that does not fit this type is never mistaken for one."""

    approved: bool
    by: str


@app.activity
async def pay(employee: str, cents: int) -> str:
    """Pay the money out."""
    return f"{cents / 100:.2f} paid to {employee}"


@app.workflow
async def expense(employee: str, cents: int, patience: timedelta) -> str:
    """Pay an expense if the manager agrees in time."""
    try:
        decision = await hf.wait_signal("decision", Decision, timeout=patience)
    except TimeoutError:
        return "nobody answered in time; please ask again"
    if not decision.approved:
        return f"refused by {decision.by}"
    return f"{await pay(employee, cents)}, approved by {decision.by}"


async def main(store: str) -> None:
    """Start two expenses and answer only the first."""
    async with app.node(store):
        answered = await app.start(expense, "ann", 4_200, timedelta(hours=48))
        ignored = await app.start(expense, "bob", 999_900, timedelta(milliseconds=300))
        click = Decision(approved=True, by="carol")
        await answered.signal("decision", click, signal_id="click-1")
        await answered.signal("decision", click, signal_id="click-1")  # an impatient double click counts once
        print("ann:", await answered.result())
        print("bob:", await ignored.result())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/approval.db"))
