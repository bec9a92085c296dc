"""Callbacks beside the other features: what a token is good for, and what a late answer gets."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.state import RunStatus
from holdfast.errors import Conflict, InvalidInput, NotFound, PayloadUnreadable, RunTerminal
from holdfast.settings import load_settings
from holdfast.store.copy import copy_store
from holdfast.store.memory import MemoryStore
from holdfast.store.open import open_store
from holdfast.store.port import PurgePolicy, Store
from holdfast.store.sqlite import SqliteStore
from tests.engine.harness import EngineVariant, store_with_virtual_time, wait_for_event, wait_for_status
from tests.engine.submitting_process import LEASE_MS, SUBMITTED, make_app
from tests.engine.test_callbacks import Bank, Receipt
from tests.engine.test_completion import Office

pytestmark = pytest.mark.contract("ACT-6")

PAID = {"cents": 7}
REPLAYED = hf.NodeOptions(cached_runs=0, drain_s=2.0)
Run = hf.RunHandle[str]


async def parked(bank: Bank) -> Run:
    """Start a run whose order is submitted, and wait until nothing is left to do but to get the answer."""
    run = await bank.start()
    await wait_for_event(run, "StepDetached")
    await wait_for_event(run, "StepCompleted")
    return run


async def test_an_answer_reaches_a_run_on_every_store_and_of_two_at_once_one_counts(store: Store) -> None:
    """Also while the run is paused: what counts is what the store accepted first."""
    bank = Bank(heartbeat_timeout=60)
    async with asyncio.timeout(60), bank.app.node(store, options=REPLAYED):
        run = await parked(bank)
        await run.pause(actor="ann")
        await wait_for_status(run, RunStatus.PAUSED)
        await bank.app.heartbeat_activity(bank.tokens[0])
        answers = [bank.app.complete_activity(bank.tokens[0], {"cents": cents}) for cents in range(4)]
        told = await asyncio.gather(*answers, return_exceptions=True)
        [winner] = [cents for cents, answer in enumerate(told) if answer is None]
        assert all(isinstance(answer, Conflict) for answer in told if answer is not None), told
        await run.resume(actor="ann")
        assert await run.result() == f"paid {winner}"


async def skip(bank: Bank, run: Run) -> None:
    await run.skip_step("callback", actor="ann")
    await wait_for_status(run, RunStatus.PAUSED)  # its code does not expect that there is no answer


async def cancel(bank: Bank, run: Run) -> None:
    await run.cancel("enough", wait=True)


async def terminate(bank: Bank, run: Run) -> None:
    await run.terminate()
    await wait_for_status(run, RunStatus.CANCELLED)


async def replace_run(bank: Bank, run: Run) -> None:
    await bank.app.start(bank.order, run_id=run.run_id, reuse="terminate-and-restart")
    await wait_for_status(run, RunStatus.CANCELLED)


ENDS: list[Callable[[Bank, Run], Awaitable[None]]] = [skip, cancel, terminate, replace_run]


@pytest.mark.parametrize("end", ENDS, ids=[end.__name__ for end in ENDS])
async def test_a_late_answer_or_heartbeat_is_refused(end: Any, variant: EngineVariant) -> None:
    bank = Bank(heartbeat_timeout=60)
    async with variant.node(bank.app):
        run = await parked(bank)
        await end(bank, run)
        late = [
            bank.app.complete_activity(bank.tokens[0], PAID),
            bank.app.fail_activity(bank.tokens[0], "no money"),
            bank.app.heartbeat_activity(bank.tokens[0]),
        ]
        for answer in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(answer, Conflict | RunTerminal), answer


async def test_the_token_of_a_deleted_run_is_good_for_nothing_also_where_its_id_is_used_again() -> None:
    bank = Bank()
    store = MemoryStore()
    async with asyncio.timeout(60), bank.app.node(store, options=REPLAYED):
        first = await bank.app.start(bank.order, run_id="one")
        await wait_for_event(first, "StepDetached")
        await bank.app.complete_activity(bank.tokens[0], PAID)
        await first.result()
        await store.purge(PurgePolicy(run_ids=("one",), finished_run_ms=0))
        with pytest.raises(NotFound):
            await bank.app.complete_activity(bank.tokens[0], PAID)
        second = await bank.app.start(bank.order, run_id="one")
        await wait_for_event(second, "StepDetached")
        with pytest.raises(Conflict, match="another one"):
            await bank.app.complete_activity(bank.tokens[0], PAID)


async def test_a_rotation_ends_the_callback_and_the_next_stretch_has_a_token_of_its_own(variant: EngineVariant) -> None:
    app, tokens = hf.App("bank"), asyncio.Queue[str]()

    @app.activity
    async def submit(ref: hf.CallbackRef) -> None:
        tokens.put_nowait(hf.activity_context().callback_token(ref))

    @app.workflow
    async def order(stretch: int) -> int:
        answer = hf.callback(Receipt, heartbeat_timeout=60)
        await submit(answer.ref)
        if stretch == 0:
            hf.continue_as_new(1)
        return (await answer).cents

    async with variant.node(app):
        run = await app.start(order, 0)
        old, new = await tokens.get(), await tokens.get()
        for late in (app.complete_activity(old, PAID), app.heartbeat_activity(old)):
            with pytest.raises(Conflict):
                await late
        await app.heartbeat_activity(new)
        await app.complete_activity(new, PAID)
        assert await run.result() == 7


@pytest.mark.contract("WF-4")
async def test_a_fork_has_a_callback_of_its_own_wherever_it_is_cut(variant: EngineVariant) -> None:
    bank = Bank()
    async with variant.node(bank.app):
        run = await parked(bank)
        last = (await run.events())[-1].run_seq
        after = await run.fork(at=last)
        before = await run.fork(at=2)
        await wait_for_event(before, "StepDetached")
        await wait_for_event(after, "StepDetached", times=2)
        [token, own] = bank.tokens
        assert token != own
        await bank.app.complete_activity(token, PAID)
        await bank.app.complete_activity(own, {"cents": 8})
        assert (await run.result(), await before.result()) == ("paid 7", "paid 8")
        assert await after.status() == RunStatus.RUNNING  # nobody was given a token of it


@pytest.mark.parametrize("is_failure", [False, True])
async def test_who_lost_the_reply_is_answered_alike_after_the_end(is_failure: bool, variant: EngineVariant) -> None:
    """The run has ended, and all the same the same answer is no other one."""
    bank = Bank(failures=1)
    async with variant.node(bank.app):
        run = await parked(bank)

        async def report(what: Any) -> None:
            tell = bank.app.fail_activity if is_failure else bank.app.complete_activity
            await tell(bank.tokens[0], what)

        mine, other = ("no money", "no bank") if is_failure else (PAID, {"cents": 8})
        await report(mine)
        ended = await run.result()
        await report(mine)
        with pytest.raises(RunTerminal):
            await report(other)
        assert await run.result() == ended


async def test_time_passes_by_the_stores_clock_while_there_is_no_node(variant: EngineVariant) -> None:
    """A heartbeat in time counts though its node is gone; one that is late is refused, and does not pass for one."""
    for at_ms, expected in ((50_000, "paid 7"), (70_000, "callback 'callback': no heartbeat came for 60 s")):
        bank = Bank(heartbeat_timeout=60)
        async with store_with_virtual_time(variant) as (store, clock):
            async with variant.node(bank.app, store):
                run_id = (await parked(bank)).run_id
            clock.advance(ms=at_ms)
            async with bank.app.connect(store):
                with nullcontext() if at_ms < 60_000 else pytest.raises(Conflict):
                    await bank.app.heartbeat_activity(bank.tokens[0])
            clock.advance(ms=20_000)
            async with variant.node(bank.app, store):
                run = bank.app.run(run_id)
                if at_ms < 60_000:
                    await wait_for_event(run, "SignalReceived")
                    await bank.app.complete_activity(bank.tokens[0], PAID)
                assert await run.result() == expected


@pytest.mark.contract("ACT-1")
@pytest.mark.parametrize("queue", ["", "desk"])
async def test_a_process_without_the_activity_refuses_a_result_that_does_not_fit(
    queue: str, variant: EngineVariant
) -> None:
    office, stranger = Office(queue=queue), hf.App("web")
    async with variant.opened() as store, variant.node(office.app, store, queues=(queue,) if queue else ()):
        run = await office.app.start(office.contract, "lease")
        token = await office.tokens.get()
        await wait_for_event(run, "StepDetached")
        async with stranger.connect(store):
            with pytest.raises(InvalidInput, match="the result of step 'sign'"):
                await stranger.complete_activity(token, {"by": "ann"})
            await stranger.complete_activity(token, "ann")
        assert await run.result() == "signed by ann"


@pytest.mark.contract("SEC-1")
@pytest.mark.parametrize("how", ["callback", "later"])
async def test_a_token_that_an_activity_lets_out_stands_in_no_history(how: str, variant: EngineVariant) -> None:
    """Neither in an error, as that of a client which names the address that it has asked, nor in a result."""
    app, tokens = hf.App("bank"), list[str]()

    @app.activity(retry=hf.Retry(max_attempts=2, initial_ms=1))
    async def submit(ref: hf.CallbackRef) -> list[str]:
        context = hf.activity_context()
        token = context.callback_token(ref) if how == "callback" else context.token
        tokens.append(token)
        context.heartbeat({"at": token})
        if context.attempt == 1:
            raise ConnectionError(f"POST https://bank.example/pay?answer={token} failed")
        return [token, "sent"]

    @app.workflow
    async def order() -> str:
        answer = hf.callback(Receipt)
        sent = await submit(answer.ref)
        return f"{sent[1]}, {(await answer).cents}"

    async with variant.node(app):
        run = await app.start(order)
        await wait_for_event(run, "StepCompleted")
        events = await run.events()
        assert [event.event_type for event in events].count("StepRetried") == 1
        assert not [token for token in tokens if token in str(events)]
        assert str(events).count("[redacted: ") >= 2
        if how == "callback":
            await app.complete_activity(tokens[0], PAID)
            assert await run.result() == "sent, 7"


@pytest.mark.contract("SEC-2")
async def test_an_answer_is_sealed_and_recognised_also_after_a_change_of_keys(tmp_path: Path) -> None:
    """Who has no key reports nothing, and what does not fit is refused by who has."""
    address = f"sqlite:///{tmp_path / 'bank.db'}"
    keys, both = {"k1": b"1" * 32}, {"k2": b"2" * 32, "k1": b"1" * 32}
    bank = Bank(heartbeat_timeout=60)
    bank.app.codecs = (hf.Encryption(keys),)
    async with asyncio.timeout(60), bank.app.node(address, options=REPLAYED):
        run = await parked(bank)
    stranger, friend = hf.App("web"), hf.App("web", codecs=[hf.Encryption(both)])
    token = bank.tokens[0]
    async with asyncio.timeout(60), stranger.connect(address):
        for refused in (stranger.complete_activity(token, PAID), stranger.fail_activity(token, "no money")):
            with pytest.raises(PayloadUnreadable):
                await refused
    async with asyncio.timeout(60), friend.connect(address):
        await friend.heartbeat_activity(token)
        with pytest.raises(InvalidInput, match="the result of step 'callback'"):
            await friend.complete_activity(token, {"cents": "plenty"})
        await friend.complete_activity(token, {"cents": 424242})
        await friend.complete_activity(token, {"cents": 424242})
        with pytest.raises(Conflict):
            await friend.complete_activity(token, PAID)
    assert not any(b"424242" in path.read_bytes() for path in tmp_path.iterdir())
    bank.app.codecs = (hf.Encryption(both),)
    async with asyncio.timeout(60), bank.app.node(address, options=REPLAYED):
        assert await bank.app.run(run.run_id).result() == "paid 424242"
        await bank.app.complete_activity(token, {"cents": 424242})
    assert not any(b"424242" in path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.contract("STO-1")
async def test_a_token_is_good_in_a_copy_of_the_store(tmp_path: Path) -> None:
    bank = Bank(heartbeat_timeout=60)
    here, there = [await SqliteStore.open(tmp_path / f"{name}.db") for name in ("here", "there")]
    try:
        for store in (here, there):
            await store.migrate()
        async with asyncio.timeout(60), bank.app.node(here, options=REPLAYED):
            run = await parked(bank)
        await copy_store(here, there)
        async with asyncio.timeout(60), bank.app.node(there, options=REPLAYED):
            await bank.app.heartbeat_activity(bank.tokens[0])
            with pytest.raises(InvalidInput):
                await bank.app.complete_activity(bank.tokens[0], {})
            await bank.app.complete_activity(bank.tokens[0], PAID)
            assert await bank.app.run(run.run_id).result() == "paid 7"
    finally:
        await here.close()
        await there.close()


@pytest.mark.process
@pytest.mark.contract("OWN-3")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_an_answer_counts_while_the_node_that_submitted_is_dead(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Killed before it could report that it has submitted: the next attempt, elsewhere, gives the same token away."""
    address = f"sqlite:///{tmp_path / 'bank.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    SUBMITTED.clear()
    app, order = make_app(hangs=False)
    store = await open_store(load_settings({}, store=address))
    await store.migrate()
    try:
        async with app.connect(store):
            run = await app.start(order)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.engine.submitting_process", address), stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            async with asyncio.timeout(60):
                token = (await process.stdout.readline()).decode().strip()
            process.kill()
            await process.wait()
            await app.complete_activity(token, 7)
            assert await run.status() == RunStatus.RUNNING
        options = hf.NodeOptions(lease_ms=LEASE_MS)
        async with asyncio.timeout(60), app.node(store, name="other", options=options):
            found = await app.run(run.run_id).result()
            assert found == [7, "submitted at attempt 2"]
            await app.complete_activity(token, 7)
            with pytest.raises(RunTerminal):
                await app.complete_activity(token, 8)
        assert [token] == SUBMITTED
    finally:
        await store.close()
