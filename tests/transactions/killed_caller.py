"""Callers that start runs beside their own rows, commit or roll back at random, and are killed at any instant.

A process that has everything imported forks one for each seed that it reads, which prints its id once it has committed
a transaction. Each goes on until it is killed. Nothing runs the workflows meanwhile.
"""

import asyncio
import os
import random
import sys

import holdfast as hf
from tests.transactions.callers import POSTGRES, SQLITE

app = hf.App("shop")


@app.workflow
async def order(order_id: str) -> str:
    """Return which order it was for."""
    return order_id


async def main(url: str, driver: str, seed: int) -> None:
    """Make transactions for ever."""
    chance, number = random.Random(seed), 0
    how = {**POSTGRES, **SQLITE}[driver]
    has_committed = False
    async with app.connect(url):
        while True:
            async with how(url) as caller:
                for _ in range(chance.randint(1, 3)):
                    number += 1
                    id, connection = f"{seed}-{number}", caller.connection
                    row = caller.insert(id)
                    run = app.start(order, id, request_id=id, reference_key=id, connection=connection)
                    for step in (row, run) if chance.random() < 0.5 else (run, row):
                        await step
                commits = chance.random() < 0.6
                await (caller.commit() if commits else caller.rollback())
            if commits and not has_committed:
                has_committed = True
                print(os.getpid(), flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            asyncio.run(main(sys.argv[1], sys.argv[2], int(line)))
        os.waitpid(child, 0)
        print("gone", flush=True)
