"""Subscriptions: a recurring payment, then one subscription after the other; if one fails, all is undone in reverse.

The saga of Restate's examples. Each effect has an id, so an attempt that is repeated finds what the first has made.
"""

import asyncio
import tempfile

import holdfast as hf

app = hf.App("subscriptions")
active: set[str] = set()


@app.activity(cancel="wait")
async def pay(payment: str, card: str) -> str:
    active.add(payment)
    return payment


@app.activity(cancel="wait")
async def subscribe(user: str, magazine: str, payment: str) -> str:
    if magazine == "Vapour":
        raise hf.NonRetryable(f"{magazine} takes no subscribers")
    active.add(f"{user}: {magazine}")
    return f"{user}: {magazine}"


@app.activity
async def end(what: str) -> None:
    active.discard(what)


@app.workflow
async def sign_up(user: str, card: str, magazines: list[str]) -> str:
    """Subscribe a user to all of these, or to none."""
    async with hf.Saga() as saga:
        payment = await pay(f"payment of {user} in {hf.run_info().run_id}", card)
        saga.undo(end, payment)
        for magazine in magazines:
            saga.undo(end, await subscribe(user, magazine, payment))
    return f"{user} reads {', '.join(magazines)}"


async def main(store: str) -> None:
    """Sign up two users; one wants what is not to be had."""
    async with app.node(store):
        for user, magazines in (("ann", ["Tide", "Rope"]), ("ben", ["Tide", "Vapour"])):
            run = await app.start(sign_up, user, "card-1", magazines, run_id=f"of {user}")
            try:
                print(await run.result())
            except hf.errors.RunFailed as failure:
                print(f"{user}: {failure.info.cause.message}")
        print(sorted(active))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{folder}/subscriptions.db"))
