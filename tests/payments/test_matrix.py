"""What becomes of a payment, for every outcome of an attempt and every word of a verifier (the matrix of ACT-5).

The payment service is a process with a ledger of its own, and the nodes are processes; both die where it is ordered.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from tests.payments.service import Fault
from tests.payments.town import Town, outcome
from tests.payments.worker import QUEUE, VISIBLE_MS, Order

pytestmark = [pytest.mark.slow, pytest.mark.process]


@dataclass(frozen=True)
class Case:
    """What goes wrong with a payment, and what must become of it."""

    name: str
    charge: tuple[Fault | None, ...] = ()
    find: tuple[Fault | None, ...] = ()
    kind: str = "verified"
    max_attempts: int = 5
    operator: Literal["happened", "did-not-happen", "fail"] | None = None
    """What the operator answers, if one must be asked."""
    charged: int = 1
    ends: str = "paid"
    """`paid`: the result is a charge of the ledger; else the code of the error."""
    record: str = "completed"
    found: int | None = None
    """How often the verifier asked the payment service."""


CALM = [
    Case("success", found=0),
    Case("refused", charge=("refuse",), charged=0, ends="Declined", record="failed", found=0),
    Case("failure before the effect", charge=("drop-before",), found=1),
    Case("failure after the effect", charge=("drop-after",), found=1),
    Case("two failures before, one after", charge=("drop-before", "drop-before", "drop-after"), found=3),
    Case("time-out after the effect", charge=("silent",), found=1),
    Case("answer after the time-out", charge=("late",), found=1),
    Case(
        "attempts are used up",
        charge=("drop-before", "drop-before"),
        max_attempts=2,
        charged=0,
        ends="ConnectionError",
        record="failed",
    ),
    Case("the last attempt took effect", charge=("drop-after",), max_attempts=1, found=1),
    Case("the last attempt timed out and took effect", charge=("silent",), max_attempts=1, found=1),
    Case(
        "the result is not available",
        charge=("drop-after",),
        find=("no-details",),
        ends="ReconciliationFailed",
        record="completed",
        found=1,
    ),
    Case("unsure, and it happened", charge=("drop-after",), find=("unsure",), operator="happened"),
    Case("unsure, and it did not happen", charge=("drop-before",), find=("unsure",), operator="did-not-happen"),
    Case(
        "unsure, and the operator gives up",
        charge=("drop-after",),
        find=("unsure",),
        operator="fail",
        ends="ReconciliationFailed",
        record="indeterminate",
    ),
    Case("the verifier raises", charge=("drop-after",), find=("error",), operator="happened"),
    Case("the verifier hangs", charge=("drop-after",), find=("silent",), operator="happened"),
    Case("the verifier loses its connection", charge=("drop-after",), find=("drop-after",), operator="happened"),
    Case("a key without verifier", charge=("drop-after",), kind="keyed", operator="happened", found=0),
    Case("a key without verifier, nothing happened", charge=("drop-before",), kind="keyed", operator="did-not-happen"),
    Case("without a key", charge=("drop-after",), kind="plain", charged=2, found=0),
]

DEADLY = [
    Case("service dies before the effect", charge=("die-before",)),
    Case("service dies after the effect", charge=("die-after",)),
    Case("the node dies after the effect", charge=("kill-caller",)),
    Case("the node dies before the effect", charge=("kill-caller-before",)),
    Case("the node dies after the effect of its only attempt", charge=("kill-caller",), max_attempts=1),
    Case(
        "the node dies, and the result is not available",
        charge=("kill-caller",),
        find=("no-details",) * 9,
        ends="ReconciliationFailed",
        record="completed",
    ),
    Case(
        "the node dies, and the verifier is unsure", charge=("kill-caller",), find=("unsure",) * 9, operator="happened"
    ),
    Case("the node dies, a key without verifier", charge=("kill-caller",), kind="keyed", operator="happened"),
    Case("the verifier kills its node", charge=("drop-after",), find=("kill-caller",) * 9, operator="happened"),
    Case(
        "the verifier kills its node, no bound",
        charge=("drop-after",),
        find=("kill-caller",) * 9,
        max_attempts=0,
        operator="happened",
    ),
    Case("the node dies, without a key", charge=("kill-caller",), kind="plain", charged=2),
]


async def play(town: Town, case: Case, queue: str) -> tuple[Any, ...]:
    """Let a payment go through what was ordered; return what became of it."""
    key = case.name.replace(" ", "-").replace(",", "")
    order = Order(key, queue=queue, max_attempts=case.max_attempts, kind=case.kind)
    run = await town.start(order, charge=case.charge, find=case.find)
    if case.operator is not None:
        question = await town.question(run.run_id)
        charged = town.charged(key)
        assert await town.record(run.run_id) in ("indeterminate", "failed", "timed-out")
        assert key in bytes(question.payload).decode(), "the operator sees the key"
        await town.answer(question, case.operator, charged[0] if case.operator == "happened" else None)
    ended: Any = await outcome(run)
    charges = town.charged(key)
    if ended in charges:
        ended = "paid"
    record = case.record if case.kind == "plain" else await town.record(run.run_id)
    found = case.found if case.found is None else town.asked(key, "find")
    assert not await town.questions(run.run_id), "a question is left over"
    return case.name, ended, len(charges), record, found


def expected(case: Case) -> tuple[Any, ...]:
    return case.name, case.ends, case.charged, case.record, case.found


@pytest.mark.contract("ACT-2", "ACT-3", "ACT-4", "ACT-5")
@pytest.mark.parametrize("queue", ["", QUEUE], ids=["local", "queued"])
async def test_every_outcome_and_every_word_of_the_verifier(town: Town, queue: str) -> None:
    async with town.opened():
        ends = await asyncio.gather(*(play(town, case, queue) for case in CALM))
    assert [end for end, case in zip(ends, CALM, strict=True) if end != expected(case)] == []


@pytest.mark.contract("ACT-4", "ACT-5")
@pytest.mark.parametrize("queue", ["", QUEUE], ids=["local", "queued"])
async def test_a_charge_that_was_long_on_its_way_is_found_though_the_next_attempt_is_refused(
    town: Town, queue: str
) -> None:
    """The first request is still on its way when the verifier says that nothing was charged."""
    order = Order("slow", queue=queue, max_attempts=3)
    async with town.opened():
        run = await town.start(order, charge=("hold", "refuse"))
        while not town.asked("slow", "charge"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        town.nodes["queue" if queue else "runs"].kill()
        assert [await outcome(run)] == town.charged("slow")
        assert (town.asked("slow", "charge"), town.asked("slow", "find")) == (2, 2)
        assert await town.record("slow") == "completed"


@pytest.mark.contract("ACT-4", "ACT-5")
async def test_a_refusal_that_waits_for_its_run_is_followed_by_no_further_attempt(town: Town) -> None:
    """A worker reports it while no node has the run, and dies. Another worker must not take the job."""
    order = Order("refused", queue=QUEUE, max_attempts=3)
    async with town.opened():
        async with town.nodes["queue"].down():
            run = await town.start(order, charge=("refuse",))
            while not (await town.store.stats()).jobs:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await town.nodes["runs"].stop()
        while not await reported(town, "refused"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        town.nodes["queue"].kill()
        over_at = await town.store.now() + 2 * VISIBLE_MS * 1_000
        while await town.store.now() < over_at:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        town.nodes["runs"].start()
        assert await outcome(run) == "Declined"
    assert (town.asked("refused", "charge"), town.charged("refused")) == (1, [])


async def reported(town: Town, run_id: str) -> bool:
    """Return whether an outcome waits for the run."""
    [loaded] = await town.store.load([run_id])
    assert loaded is not None
    return any(message.type == "ActivityCompleted" for message in loaded.messages)


@pytest.mark.contract("ACT-2", "ACT-3", "ACT-4", "ACT-5")
@pytest.mark.parametrize("queue", ["", QUEUE], ids=["local", "queued"])
async def test_nodes_that_die_in_the_window(towns: list[Town], queue: str) -> None:
    """One case after the other in each town, because a death concerns all runs there; in several towns at once."""

    async def play_some(town: Town, cases: list[Case]) -> list[tuple[Any, ...]]:
        async with town.opened():
            return [await play(town, case, queue) for case in cases]

    parts = [DEADLY[number :: len(towns)] for number in range(len(towns))]
    played = await asyncio.gather(*(play_some(*each) for each in zip(towns, parts, strict=True)))
    ends = {end[0]: end for of_town in played for end in of_town}
    assert [ends[case.name] for case in DEADLY if ends[case.name] != expected(case)] == []
