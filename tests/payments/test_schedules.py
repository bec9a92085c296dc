"""Payments with faults drawn at random, while nodes and the payment service are killed at random moments.

With a key and a truthful verifier every order is charged exactly once, always. What is shown as paid was charged.
Without a key an order is charged at least once, and nothing claims more. `TEST_PAYMENTS=10000` plays the long form.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress
from typing import Any

import pytest

import holdfast as hf
from tests.payments import service
from tests.payments.town import Town, outcome
from tests.payments.worker import QUEUE, Order

pytestmark = [pytest.mark.slow, pytest.mark.process]

PAYMENTS = int(os.environ.get("TEST_PAYMENTS", "200"))
AT_ONCE = 100
CHARGE_FAULTS: tuple[service.Fault | None, ...] = (None, None, "drop-before", "drop-after", "late", "refuse")
FIND_FAULTS: tuple[service.Fault | None, ...] = (None, None, None, None, "unsure", "error", "drop-after", "no-details")
KINDS = ("verified", "verified", "verified", "keyed", "plain")


def draw(number: int, rng: random.Random) -> tuple[Order, dict[str, Any]]:
    """Draw an order, and what goes wrong with it."""
    kind = rng.choice(KINDS)
    order = Order(f"order-{number}", queue=rng.choice(("", QUEUE)), max_attempts=rng.choice((1, 3, 0)), kind=kind)
    faults = {
        "charge": tuple(rng.choice(CHARGE_FAULTS) for _ in range(rng.randrange(4))),
        "find": tuple(rng.choice(FIND_FAULTS) for _ in range(rng.randrange(3))),
    }
    return order, faults


async def kill_at_random(town: Town, rng: random.Random, ended: list[str]) -> None:
    """Kill a node or the payment service now and then, but not faster than a busy machine brings them up again."""
    while True:
        before = len(ended)
        await asyncio.sleep(rng.uniform(0.3, 1.5))
        while len(ended) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        rng.choice([*town.nodes.values(), *town.nodes.values(), town.service]).kill()


async def answer_truthfully(town: Town) -> None:
    """Answer each question as an operator who looks into the ledger."""
    while True:
        for task in await town.questions():
            charged = town.charged(task.run_id)
            with suppress(hf.errors.Conflict, hf.errors.RunTerminal):  # settled meanwhile
                verdict = "happened" if charged else "did-not-happen"
                await town.answer(task, verdict, charged[0] if charged else None)
        await asyncio.sleep(0.1)


async def pay(
    town: Town, order: Order, faults: dict[str, Any], places: asyncio.Semaphore, ended: list[str]
) -> tuple[Order, Any]:
    """Start a payment and wait for its end."""
    async with places:
        end = await outcome(await town.start(order, **faults))
        ended.append(order.key)
        return order, end


@pytest.mark.contract("ACT-2", "ACT-4", "ACT-5")
async def test_with_a_key_and_a_verifier_every_order_is_charged_once(town: Town) -> None:
    seed = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"TEST_SEED={seed}")
    rng = random.Random(seed)
    places, ended = asyncio.Semaphore(AT_ONCE), list[str]()
    async with town.opened(60 + PAYMENTS):
        others = [
            asyncio.create_task(kill_at_random(town, random.Random(seed + 1), ended)),
            asyncio.create_task(answer_truthfully(town)),
        ]
        paying = asyncio.gather(*(pay(town, *draw(number, rng), places, ended) for number in range(PAYMENTS)))
        waited: list[asyncio.Future[Any]] = [paying, *others]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert paying.done(), [task.exception() for task in others if not task.cancelled()]
        ends = await paying

    charged = service.charges(town.folder)
    for order, end in ends:
        numbers = charged.get(order.key, [])
        if isinstance(end, int):
            assert end in numbers, f"{order} is shown as paid by {end}, and was not: {numbers}"
        if order.kind != "plain":
            assert len(numbers) <= 1, f"{order} was charged twice: {numbers}, ended {end}"
        if order.kind == "verified" and not isinstance(end, int):
            is_known = end == "ReconciliationFailed" or service.is_overtaken(town.folder, order.key)
            assert not numbers or is_known, f"{order} was charged, and ended with {end}"
    deaths = sum(node.deaths for node in (*town.nodes.values(), town.service))
    print(f"{PAYMENTS} payments, {deaths} deaths, {sum(map(len, charged.values()))} charges")
    assert deaths
