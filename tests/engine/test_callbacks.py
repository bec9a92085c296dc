"""Callbacks: one token for all attempts of the activity that submits, heartbeats by token, and answers that fit."""

import asyncio
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.errors import ActivityFailed, Conflict, InvalidInput, NotDurable, RunTerminal
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_history

pytestmark = pytest.mark.contract("ACT-6")


class Receipt(msgspec.Struct):
    """What the bank answers."""

    cents: int


class Bank:
    """An app that submits an order and waits for the answer."""

    def __init__(self, failures: int = 0, **options: Any) -> None:
        self.app = app = hf.App("bank")
        self.tokens: list[str] = []
        self.submitted = asyncio.Event()

        @app.activity(retry=hf.Retry(initial_ms=1))
        async def submit(ref: hf.CallbackRef) -> None:
            self.tokens.append(hf.activity_context().callback_token(ref))
            if len(self.tokens) <= failures:
                raise ConnectionError("the bank is down")
            self.submitted.set()

        @app.workflow
        async def order() -> str:
            answer = hf.callback(Receipt, **options)
            await submit(answer.ref)
            try:
                return f"paid {(await answer).cents}"
            except TimeoutError as problem:
                return str(problem)
            except ActivityFailed as problem:
                return f"{problem.info.code}: {problem.info.message}"

        self.order = order

    async def start(self) -> hf.RunHandle[str]:
        """Start a run, and wait until its order is submitted."""
        run = await self.app.start(self.order)
        async with asyncio.timeout(60):
            await self.submitted.wait()
        return run


async def test_one_token_is_good_for_all_attempts_and_an_answer_that_does_not_fit_is_refused(
    variant: EngineVariant,
) -> None:
    bank = Bank(failures=2)
    async with variant.node(bank.app):
        run = await bank.start()
        [token] = set(bank.tokens)
        assert len(bank.tokens) == 3
        for unfit in (None, {}, {"cents": "many"}, "paid"):
            with pytest.raises(InvalidInput, match="the result of step 'callback'"):
                await bank.app.complete_activity(token, unfit)
        for _ in range(2):
            await bank.app.complete_activity(token, {"cents": 7})
        assert await run.result() == "paid 7"
        with pytest.raises((Conflict, RunTerminal)):
            await bank.app.complete_activity(token, {"cents": 8})
        assert token not in str(await run.events())


async def test_a_failure_is_the_answer_and_is_not_tried_again(variant: EngineVariant) -> None:
    bank = Bank()
    async with variant.node(bank.app):
        run = await bank.start()
        await bank.app.fail_activity(bank.tokens[0], "no money")
        assert await run.result() == "ActivityError: no money"


async def test_an_answer_may_come_before_it_is_awaited_and_on_another_node(variant: EngineVariant) -> None:
    bank = Bank()
    async with variant.opened() as store:
        async with variant.node(bank.app, store):
            run = await bank.start()
            await wait_for_event(run, "StepCompleted")
        async with variant.node(bank.app, store):
            await bank.app.complete_activity(bank.tokens[0], {"cents": 9})
            assert await bank.app.run(run.run_id).result() == "paid 9"


async def test_it_times_out_as_a_whole(variant: EngineVariant) -> None:
    bank = Bank(timeout=0.2)
    async with variant.node(bank.app):
        run = await bank.start()
        assert await run.result() == "callback 'callback': no answer came in time"
        with pytest.raises((Conflict, RunTerminal)):
            await bank.app.complete_activity(bank.tokens[0], {"cents": 7})


async def test_without_a_heartbeat_it_times_out_while_no_process_works_on_it(variant: EngineVariant) -> None:
    bank = Bank(heartbeat_timeout=0.6)
    async with variant.node(bank.app):
        run = await bank.start()
        await wait_for_event(run, "SignalWaiting")
        await asyncio.sleep(0.25)  # of the time that the heartbeat begins anew; one that comes earlier is not recorded
        await bank.app.heartbeat_activity(bank.tokens[0])
        await wait_for_history(run, lambda events: [e.event_type for e in events].count("SignalWaiting") == 2)
        assert await run.result() == "callback 'callback': no heartbeat came for 0.6 s"
        with pytest.raises(Conflict, match="takes no heartbeats"):
            await bank.app.heartbeat_activity(bank.tokens[0])


async def test_many_heartbeats_are_few_records_and_the_answer_counts(variant: EngineVariant) -> None:
    bank = Bank(heartbeat_timeout=60)
    async with variant.node(bank.app):
        run = await bank.start()
        for _ in range(20):
            await bank.app.heartbeat_activity(bank.tokens[0])
        await bank.app.complete_activity(bank.tokens[0], {"cents": 1})
        assert await run.result() == "paid 1"
        assert len(await run.events()) < 20


async def test_a_token_is_for_its_own_callback_and_runs(variant: EngineVariant) -> None:
    bank = Bank()
    async with variant.node(bank.app):
        await bank.start()
        with pytest.raises(Conflict, match="takes no heartbeats"):
            await bank.app.heartbeat_activity(bank.tokens[0])
        with pytest.raises(InvalidInput):
            await bank.app.heartbeat_activity("made up")
        with pytest.raises(NotDurable):
            hf.callback(int)
