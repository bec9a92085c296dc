"""The programs that the documentation of others shows: with a crash at every commit and every effect."""

import asyncio
from typing import Any

import pytest

from examples import agent_inbox, money_transfer, subscription
from holdfast.run import RunHandle
from holdfast.testing import explore


def of_the_bank() -> None:
    """Bring the bank back to its beginning."""
    money_transfer.booked.clear()
    money_transfer.balances.update(ann=100, ben=0)


def cancel_at(version: int) -> Any:
    """Return a driver that cancels a run once it has so many events."""

    async def drive(run: RunHandle[Any]) -> None:
        while len(await run.events()) < version:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.05)
        await run.cancel("changed my mind")

    return drive


@pytest.mark.contract("INV")
@pytest.mark.parametrize(
    ("target", "ending", "balances"), [("ben", "result '60 from", (40, 60)), ("bob", "RunFailed: ", (100, 0))]
)
def test_a_transfer_survives_a_crash_at_every_point(target: str, ending: str, balances: tuple[int, int]) -> None:
    found = explore(
        money_transfer.app,
        money_transfer.transfer,
        *("ann", target, 60),
        before=of_the_bank,
        check=lambda: tuple(money_transfer.balances.values()),
        repeatable=[money_transfer.move],
    )
    found.assert_clean()
    assert len(found.plays) > 6
    assert all(play.ending.startswith(ending) and play.checked == balances for play in found.plays)


@pytest.mark.contract("INV", "WF-4")
@pytest.mark.parametrize("version", range(1, 7))
def test_a_cancelled_transfer_moves_all_or_nothing(version: int) -> None:
    found = explore(
        money_transfer.app,
        money_transfer.transfer,
        *("ann", "ben", 60),
        drive=cancel_at(version),
        before=of_the_bank,
        check=lambda: tuple(money_transfer.balances.values()),
    )
    for play in found.plays:
        assert play.checked == ((40, 60) if play.ending.startswith("result") else (100, 0)), play


@pytest.mark.contract("INV")
def test_an_agent_survives_a_crash_at_every_point() -> None:
    async def answer(run: RunHandle[Any]) -> None:
        await run.signal("answer", agent_inbox.Answer(False, "too wet"), signal_id="click-0")
        await run.signal("answer", agent_inbox.Answer(True), signal_id="click-1")
        await run.signal("answer", agent_inbox.Answer(True), signal_id="click-1")

    found = explore(
        agent_inbox.app,
        agent_inbox.agent,
        "book a hotel",
        drive=answer,
        repeatable=[agent_inbox.propose, agent_inbox.act],
    )
    found.assert_clean()
    assert {play.ending for play in found.plays} == {"result 'done: book a hotel in Lisbon'"}


@pytest.mark.contract("INV")
@pytest.mark.parametrize(("magazines", "left"), [(["Tide", "Rope"], 3), (["Tide", "Rope", "Vapour"], 0)])
def test_a_subscription_survives_a_crash_at_every_point(magazines: list[str], left: int) -> None:
    found = explore(
        subscription.app,
        subscription.sign_up,
        *("ann", "card-1", magazines),
        before=subscription.active.clear,
        check=lambda: len(subscription.active),
        repeatable=[subscription.pay, subscription.subscribe, subscription.end],
    )
    found.assert_clean()
    assert {play.checked for play in found.plays} == {left}
