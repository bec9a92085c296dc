"""Money transfer: withdraw, deposit, and refund if the deposit is impossible. The program of Temporal's tutorial.

The bank knows each movement by its reference, so an attempt that is repeated after a crash moves nothing twice. A run
that is cancelled while it withdraws waits for the outcome, and gives the money back.
"""

import asyncio
import tempfile

import holdfast as hf

app = hf.App("bank")
balances = {"ann": 100, "ben": 0}
booked: set[str] = set()


class Impossible(hf.NonRetryable):
    """There is no such account, or too little on it; trying again changes nothing."""


@app.activity(cancel="wait")
async def move(account: str, amount: int, reference: str) -> str:
    """Book an amount on an account, once for each reference."""
    if account not in balances:
        raise Impossible(f"there is no account {account!r}")
    if reference not in booked and balances[account] + amount < 0:
        raise Impossible(f"{account} has {balances[account]}, and {-amount} are needed")
    if reference not in booked:
        booked.add(reference)
        balances[account] += amount
    return reference


@app.workflow
async def transfer(source: str, target: str, amount: int) -> str:
    """Move money from one account to another, or leave both as they are."""
    run_id = hf.run_info().run_id
    async with hf.Saga() as saga:
        saga.undo(move, source, amount, await move(source, -amount, f"{run_id}/withdraw") + "/refund")
        await move(target, amount, f"{run_id}/deposit")
    return f"{amount} from {source} to {target}"


async def main(store: str) -> None:
    """Make three transfers: one that works, and two that do not."""
    async with app.node(store):
        for source, target, amount in (("ann", "ben", 60), ("ann", "ben", 60), ("ann", "bob", 10)):
            run = await app.start(transfer, source, target, amount)
            try:
                print(await run.result())
            except hf.errors.RunFailed as failure:
                print(f"not possible: {failure.info.cause.message}")
        print(balances)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/bank.db"))
