"""RETRY_RUN of failed runs beside what others answer, hold or have done: callbacks, locks, children, queues, people."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import holdfast as hf
from holdfast.core.state import RunStatus
from holdfast.errors import ActivityFailed, HistoryGap, NotFound, RunFailed, RunTerminal
from holdfast.store.port import RunQuery
from tests.engine.harness import EngineVariant, event_types, wait_for_event, wait_for_status
from tests.engine.test_retry_run import ONCE, Bank, check_invariants

pytestmark = pytest.mark.contract("SIG-13", "WF-7")

BOSS = hf.Actor("ann", ("boss",))


class Submitting(Bank):
    """A bank that is asked by `submit`, and answers by the token of a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: asyncio.Queue[str] = asyncio.Queue()

        @self.app.activity
        async def submit(ref: hf.CallbackRef) -> None:
            self.calls.append("submit")
            self.tokens.put_nowait(hf.activity_context().callback_token(ref))

        self.submit = submit


@pytest.mark.parametrize("how", ["failed", "timed out", "open", "handled"])
async def test_a_callback_is_asked_for_again_because_nobody_has_a_token_of_the_new_run(
    how: Literal["failed", "timed out", "open", "handled"], variant: EngineVariant
) -> None:
    bank = Submitting()

    @bank.app.workflow
    async def order() -> str:
        await bank.reserve("book")
        paid = hf.callback(str, timeout=0.01 if how == "timed out" and not bank.is_mended else None)
        await bank.submit(paid.ref)
        if how == "open":
            await bank.charge("the fee")
        try:
            return await paid
        except ActivityFailed:
            if how == "handled":
                await bank.release("book")
            raise

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        token = await bank.tokens.get()
        if how in ("failed", "handled"):
            await wait_for_event(run, "StepDetached")
            await bank.app.fail_activity(token, "no money")
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        bank.calls.clear()
        for retry in (await run.retry_run(), *([await run.fork()] if how == "failed" else [])):
            await bank.app.complete_activity(await bank.tokens.get(), "paid")
            assert await retry.result() == "paid"
            await check_invariants(bank.app, retry)
        begins_again = how == "handled"  # it has undone what it had reserved
        assert bank.calls.count("reserve book") == begins_again
        assert bank.calls.count("charge the fee") == (how == "open")


async def test_a_retry_inside_a_lock_takes_the_lock_first(variant: EngineVariant) -> None:
    """Another run may have had it in between, so what was done inside is done again."""
    bank = Bank()
    lock = bank.app.lock("account")

    @bank.app.workflow
    async def transfer(name: str) -> str:
        await bank.reserve("before")
        async with lock("17"):
            if name == "other":
                return await hf.wait_signal("go", str)
            await bank.reserve("inside")
            return await bank.charge("book")

    async with variant.node(bank.app):
        run = await bank.failed(transfer, "one")
        other = await bank.app.start(transfer, "other")
        await wait_for_event(other, "SignalReceived")
        bank.calls.clear()
        again = await run.retry_run()
        await wait_for_event(again, "SignalWaiting")
        assert bank.calls == []
        await other.signal("go", "done")
        assert await other.result() == "done"
        assert await again.result() == "paid book"
        assert bank.calls == ["reserve inside", "charge book"]
        await check_invariants(bank.app, again)


@pytest.mark.parametrize("policy", ["abandon", "await", "cancel"])
async def test_a_child_that_was_running_is_started_again_unless_it_has_ended_before_its_parent(
    policy: Literal["abandon", "await", "cancel"], variant: EngineVariant
) -> None:
    bank = Bank()

    @bank.app.workflow
    async def mail() -> str:
        return await hf.wait_signal("go", str)

    @bank.app.workflow
    async def order() -> str:
        await bank.reserve("before")
        child = mail.options(close_policy=policy).child()
        await bank.reserve("after")
        await bank.charge("book")
        return await child

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        started = await wait_for_event(run, "ChildStarted")
        first = bank.app.run(started.data.child_run_id)  # type: ignore[attr-defined]
        await wait_for_event(run, "StepFailed")
        if policy == "await":
            await first.signal("go", "first")
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        bank.calls.clear()
        again = await run.retry_run()
        if policy != "await":
            started = await wait_for_event(again, "ChildStarted")
            second = bank.app.run(started.data.child_run_id)  # type: ignore[attr-defined]
            assert second.run_id != first.run_id
            await second.signal("go", "second")
        assert await again.result() == ("first" if policy == "await" else "second")
        assert bank.calls == (["charge book"] if policy == "await" else ["reserve after", "charge book"])
        if policy == "abandon":  # it goes on alone
            await first.signal("go", "first")
            assert await first.result() == "first"
        await check_invariants(bank.app, again)


async def test_children_that_have_ended_are_not_started_again_beside_the_failed_one(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def one(number: int) -> str:
        return await (bank.charge if number == 3 else bank.reserve)(str(number))

    @bank.app.workflow
    async def order() -> list[str]:
        return list(await hf.map(one, [1, 2, 3, 4], at_once=1))

    async with variant.node(bank.app):
        run = await bank.failed(order)
        again = await run.retry_run()
        assert await again.result() == ["1", "2", "paid 3", "4"]
        assert bank.calls == ["charge 3", "reserve 4"]
        await check_invariants(bank.app, again)


@pytest.mark.contract("ACT-4")
async def test_a_keyed_step_without_a_verifier_is_a_question_to_an_operator(variant: EngineVariant) -> None:
    app, calls = hf.App("shop"), list[str]()

    @app.activity(retry=ONCE, idempotency_key=lambda item: f"key of {item}")
    async def charge(item: str) -> str:
        calls.append(item)
        if len(calls) == 1:
            raise ValueError("no answer")
        return f"paid {item}"

    @app.workflow
    async def order() -> str:
        return await charge("book")

    async with variant.node(app):
        run = await app.start(order)
        with pytest.raises(RunFailed):
            await run.result()
        again = await run.retry_run()
        await wait_for_event(again, "TaskCreated")
        assert calls == ["book"]
        [task] = await app.tasks.list()
        await app.tasks.complete(task.task_id, {"answer": "did-not-happen"}, actor=hf.Actor("ann", ("operator",)))
        assert await again.result() == "paid book"
        await check_invariants(app, again)


async def test_a_job_of_a_queue_is_done_again_and_the_others_are_not(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order() -> str:
        await bank.reserve.options(queue="desk")("book")
        return await bank.charge.options(queue="desk")("book")

    async with variant.node(bank.app, queues=("desk",)):
        run = await bank.failed(order)
        again = await run.retry_run()
        assert await again.result() == "paid book"
        assert bank.calls == ["charge book"]
        await check_invariants(bank.app, again)


@pytest.mark.contract("WF-4")
async def test_a_saga_that_could_not_undo_everything_undoes_the_rest_and_a_retry_after_that_begins_again(
    variant: EngineVariant,
) -> None:
    """What was undone is not taken for done, and what was not undone is not forgotten."""
    bank = Bank()

    @bank.app.activity(retry=ONCE)
    async def undo(item: str) -> None:
        bank.calls.append(f"undo {item}")
        if item == "a" and not bank.is_mended:
            raise ValueError("cannot be undone")

    @bank.app.workflow
    async def order() -> str:
        async with hf.Saga() as saga:
            for item in ("a", "b"):
                saga.undo(undo, await bank.reserve(item))
            return await bank.charge("book")

    async with variant.node(bank.app):
        run = await bank.failed(order)
        again = await run.retry_run()
        with pytest.raises(RunFailed, match="no money"):
            await again.result()
        assert bank.calls == ["undo a"]
        bank.calls.clear()
        assert await (await again.retry_run()).result() == "paid book"
        assert bank.calls == ["reserve a", "reserve b", "charge book"]


async def test_what_was_sent_to_others_is_not_sent_again(variant: EngineVariant) -> None:
    """Runs that were started on their own, signals, and values that were published."""
    bank = Bank()

    @bank.app.workflow
    async def report() -> str:
        return await bank.reserve("report")

    @bank.app.workflow
    async def office() -> list[str]:
        return [await hf.wait_signal("word", str), await hf.wait_signal("word", str)]

    @bank.app.workflow
    async def order(office_id: str) -> str:
        hf.publish(stage="packing")
        started = await hf.start(report)
        await bank.app.run(office_id).signal("word", "one")
        await bank.charge("book")
        await bank.app.run(office_id).signal("word", "two")
        hf.publish(done=1.0)
        return started.run_id

    async with variant.node(bank.app):
        told = await bank.app.start(office)
        run = await bank.failed(order, told.run_id)
        again = await run.retry_run()
        other = bank.app.run(await again.result())
        assert await other.result() == "report"
        assert await told.result() == ["one", "two"]
        assert len(await bank.app.runtime().store.find(RunQuery(workflow="report"))) == 1
        assert await again.published() == {"stage": "packing", "done": 1.0}
        await check_invariants(bank.app, again)


async def test_tasks_that_were_answered_stay_answered_and_open_ones_are_asked_for_the_new_run(
    variant: EngineVariant,
) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order() -> list[bool]:
        first = await hf.task("first", bool, roles=["boss"])
        second = asyncio.create_task(hf.task("second", bool, roles=["boss"]))
        await bank.reserve("book")
        await bank.charge("book")
        return [first, await second]

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        await wait_for_event(run, "TaskCreated")
        [task] = await bank.app.tasks.list()
        await bank.app.tasks.complete(task.task_id, True, actor=BOSS)
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        again = await run.retry_run()
        [task] = await bank.app.tasks.list(run_id=again.run_id)
        assert task.name == "second"
        await bank.app.tasks.complete(task.task_id, False, actor=BOSS)
        assert await again.result() == [True, False]
        await check_invariants(bank.app, again)


async def test_of_any_number_of_the_same_command_at_once_one_run_is_made(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order() -> str:
        return await bank.charge(await bank.reserve("book"))

    async with variant.node(bank.app):
        run = await bank.failed(order)
        sent = (run.retry_run(signal_id="click", from_start=number % 2 == 0) for number in range(8))
        made = await asyncio.gather(*sent)
        assert len({each.run_id for each in made}) == 1
        assert await made[0].result() == "paid book"
        assert bank.calls.count("charge book") == 1


@pytest.mark.parametrize("command", ["pause", "cancel"])
async def test_a_command_before_a_retry_has_a_node_holds_when_it_gets_one(
    command: Literal["pause", "cancel"], variant: EngineVariant
) -> None:
    """A retry that has an outcome to deliver begins paused, and resumes itself: not against an operator's will."""

    def shop() -> tuple[Bank, Any]:
        bank = Bank()

        @bank.app.workflow(on_error="fail")
        async def order() -> str:
            await hf.sleep(0.001)
            kept = await bank.reserve("book")
            if not bank.is_mended:
                raise KeyError("shelf")
            return await hf.wait_signal("go", str) + kept

        return bank, order

    bank, order = shop()
    async with variant.opened() as store:
        async with variant.node(bank.app, store):
            run = await bank.failed(order)
        async with bank.app.connect(store):
            again = await bank.app.run(run.run_id).retry_run()
            await getattr(again, command)("not now", actor="ann")
        async with variant.node(bank.app, store):
            again = bank.app.run(again.run_id)
            if command == "cancel":
                with pytest.raises(hf.errors.RunCancelled, match="not now"):
                    await again.result()
            else:
                await wait_for_event(again, "SignalAccepted")
                await wait_for_status(again, RunStatus.PAUSED)
                assert "RunResumed" not in await event_types(again)
                await again.resume(actor="ann")
                await again.signal("go", "a ")
                assert await again.result() == "a book"
            await check_invariants(bank.app, again)
        assert bank.calls == []


async def test_what_operators_have_decided_about_steps_stays_decided(variant: EngineVariant) -> None:
    """A step that was skipped, and one that was retried, have their results; its logical attempt stays, too."""
    bank = Bank()

    @bank.app.activity(retry=ONCE, on_failure="pause")
    async def ship(item: str) -> str:
        bank.calls.append(f"ship {item}")
        if bank.calls.count(f"ship {item}") == 1:
            raise ValueError("no ship")
        return f"shipped {item}"

    @bank.app.workflow
    async def order() -> list[str]:
        return [await ship("lamp"), await ship("desk"), await bank.charge("both")]

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        await wait_for_event(run, "StepFailed")
        await run.skip_step("ship", result="fetched")
        await wait_for_event(run, "StepFailed", times=2)
        await run.retry_step("ship#2")
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        bank.calls.clear()
        again = await run.retry_run()
        assert await again.result() == ["fetched", "shipped desk", "paid both"]
        assert bank.calls == ["charge both"]
        steps = {step.step_id: step.logical_attempt_id for step in (await again.snapshot()).steps}
        assert steps["ship#2"] == 2
        await check_invariants(bank.app, again)


async def test_steps_that_paused_the_run_and_were_given_up_are_tried_again(variant: EngineVariant) -> None:
    bank = Bank()
    charge = bank.charge.options(on_failure="pause")

    @bank.app.workflow
    async def order() -> list[str]:
        kept = await bank.reserve("book")
        return [kept, *await asyncio.gather(charge("a"), charge("b"))]

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        await wait_for_event(run, "StepFailed", times=2)
        await run.resume(raise_failure=True)
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        bank.calls.clear()
        again = await run.retry_run()
        assert await again.result() == ["book", "paid a", "paid b"]
        assert sorted(bank.calls) == ["charge a", "charge b"]
        await check_invariants(bank.app, again)


@pytest.mark.parametrize("how", ["retried", "retried in vain", "skipped"])
@pytest.mark.parametrize("is_paused", [True, False])
async def test_a_step_that_was_settled_in_the_pause_in_which_another_failed_stays_settled(
    how: str, is_paused: bool, variant: EngineVariant
) -> None:
    bank, fails = Bank(), asyncio.Event()

    @bank.app.activity(retry=ONCE, on_failure="pause")
    async def ship() -> str:
        bank.calls.append("ship")
        if not bank.is_mended and (how == "retried in vain" or bank.calls.count("ship") == 1):
            raise ValueError("no ship")
        return "shipped"

    @bank.app.activity(retry=ONCE)
    async def pack() -> str:
        bank.calls.append("pack")
        await fails.wait()
        if not bank.is_mended:
            raise ValueError("no box")
        return "packed"

    @bank.app.workflow
    async def order() -> list[str]:
        return list(await asyncio.gather(ship(), pack()))

    failures = 2 if how == "retried in vain" else 1
    async with variant.node(bank.app):
        run = await bank.app.start(order)
        await wait_for_event(run, "StepFailed")
        await run.pause()
        if how == "skipped":
            await run.skip_step("ship", result="fetched")
            await wait_for_event(run, "StepSkipped")
        else:
            await run.retry_step("ship")
            await wait_for_event(run, "StepFailed" if failures == 2 else "StepCompleted", times=failures)
        if is_paused:
            fails.set()
            await wait_for_event(run, "StepFailed", times=failures + 1)
        await run.resume(raise_failure=failures == 2)
        fails.set()
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        bank.calls.clear()
        again = await run.retry_run()
        assert await again.result() == ["fetched" if how == "skipped" else "shipped", "packed"]
        assert sorted(bank.calls) == (["pack", "ship"] if failures == 2 else ["pack"])
        await check_invariants(bank.app, again)


@pytest.mark.contract("ACT-6")
async def test_an_activity_that_completes_later_gets_a_token_of_the_new_run(variant: EngineVariant) -> None:
    bank = Bank()
    tokens: asyncio.Queue[str] = asyncio.Queue()

    @bank.app.activity
    async def sign() -> str:
        context = hf.activity_context()
        tokens.put_nowait(context.token)
        context.complete_later()
        raise AssertionError("not reached")

    @bank.app.workflow
    async def order() -> str:
        signed = asyncio.create_task(sign())
        await bank.reserve("book")
        await hf.wait_signal("go")
        return await bank.charge("book") + await signed

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        old = await tokens.get()
        await wait_for_event(run, "StepDetached")
        await run.signal("go")
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        bank.calls.clear()
        again = await run.retry_run()
        new = await tokens.get()
        with pytest.raises(RunTerminal):
            await bank.app.complete_activity(old, " by ann")
        await wait_for_event(again, "StepDetached", times=2)
        await bank.app.complete_activity(new, " by ben")
        assert await again.result() == "paid book by ben"
        assert bank.calls == ["charge book"]
        await check_invariants(bank.app, again)


@pytest.mark.contract("FMT-2")
async def test_large_values_of_the_failed_run_stay_with_the_one_that_goes_on(
    variant: EngineVariant, tmp_path: Path
) -> None:
    """Also when the failed run is deleted, and the new one is replayed from what is stored."""
    artifacts = hf.Artifacts(tmp_path / "artifacts")
    bank = Bank(artifacts=artifacts)
    large = "x" * 300_000

    @bank.app.activity
    async def write() -> str:
        return large

    @bank.app.workflow
    async def order(given: str) -> int:
        written = await write()
        await bank.charge("book")
        await hf.wait_signal("go")
        return len(given) + len(written)

    async with variant.opened() as store:
        async with variant.node(bank.app, store):
            run = await bank.failed(order, large)
            again = await run.retry_run()
            await wait_for_event(again, "SignalWaiting")
            await store.purge(hf.PurgePolicy(run_ids=(run.run_id,), finished_run_ms=0))
            await artifacts.delete_run(store, run.run_id)
        async with variant.node(bank.app, store):
            again = bank.app.run(again.run_id)
            await again.signal("go")
            assert await again.result() == 2 * len(large)


@pytest.mark.contract("WF-6", "SIG-4")
@pytest.mark.parametrize("how", ["signal", "update"])
async def test_a_failure_that_others_were_told_of_is_not_forgotten(
    how: Literal["signal", "update"], variant: EngineVariant
) -> None:
    """A signal may have undone something in another run, and who sent the update acts on its answer."""
    bank = Bank()

    @bank.app.workflow
    async def office() -> list[str]:
        words: list[str] = []
        async for word in hf.signals("word", str):
            words.append(word)
            if word == "close":
                break
        return words

    @bank.app.workflow
    async def order(office_id: str) -> str:
        told = asyncio.get_running_loop().create_future()

        async def pay(item: str) -> str:
            try:
                return await bank.charge(item)
            except ActivityFailed as problem:
                told.set_exception(problem)
                return "not paid"

        hf.on_update("pay", pay)
        await bank.reserve("book")
        if how == "update":
            return str(await told)
        await bank.app.run(office_id).signal("word", "reserve")
        try:
            return await bank.charge("book")
        except ActivityFailed:
            await bank.app.run(office_id).signal("word", "release")
            raise

    async with variant.node(bank.app):
        other = await bank.app.start(office)
        run = await bank.app.start(order, other.run_id)
        if how == "update":
            assert await run.update("pay", item="book") == "not paid"
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        bank.calls.clear()
        again = await run.retry_run()
        if how == "update":  # it begins again: the update was answered
            assert await again.update("pay", item="pen") == "paid pen"
            await again.cancel()
            assert bank.calls == ["reserve book", "charge pen"]
        else:
            assert await again.result() == "paid book"
            assert bank.calls == ["reserve book", "charge book"]
            await other.signal("word", "close")
            assert await other.result() == ["reserve", "release", "reserve", "close"]


@pytest.mark.contract("ACT-4")
@pytest.mark.parametrize("way", ["did-not-happen", "happened", "retry step", "skip step"])
async def test_an_unresolved_step_beside_the_failed_one_is_still_a_question(way: str, variant: EngineVariant) -> None:
    bank, paid = Bank(), list[str]()

    async def find(item: str) -> Any:
        return hf.NotCompleted() if bank.is_mended else hf.Indeterminate("the ledger is away")

    @bank.app.activity(retry=hf.Retry(max_attempts=3, initial_ms=1), idempotency_key=lambda item: item, verify=find)
    async def pay(item: str) -> str:
        paid.append(item)
        if len(paid) == 1:
            raise ConnectionError("the answer was lost")
        return f"paid {item}"

    @bank.app.workflow
    async def order() -> list[Any]:
        paying = asyncio.create_task(pay("rent"))
        await hf.wait_signal("go")
        return [await bank.charge("book"), await paying]

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        await wait_for_event(run, "StepUnresolved")
        await run.signal("go")
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        again = await run.retry_run()
        await wait_for_event(again, "StepCompleted")
        assert paid == ["rent"]
        [task] = await bank.app.tasks.list(run_id=again.run_id)
        if way == "retry step":
            await again.retry_step("pay")
        elif way == "skip step":
            await again.skip_step("pay", result="by hand")
        else:
            answer = {"answer": way, **({"result": "by hand"} if way == "happened" else {})}
            await bank.app.tasks.complete(task.task_id, answer, actor=hf.Actor("ann", ("operator",)))
        is_repeated = way in ("did-not-happen", "retry step")
        assert await again.result() == ["paid book", "paid rent" if is_repeated else "by hand"]
        assert paid == ["rent"] * (1 + is_repeated)
        await check_invariants(bank.app, again)


async def test_a_flow_goes_on_from_its_failed_child(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def pay(state: dict[str, str]) -> dict[str, str]:
        return {**state, "paid": await bank.charge(state["item"])}

    @bank.app.activity(retry=ONCE)
    async def pack(state: dict[str, str]) -> None:
        bank.calls.append(f"pack {state.get('paid')}")

    root: hf.Scene[dict[str, str]] = hf.Scene(hf.Act(pack), hf.Child(pay), hf.Act(pack, step="pack again"))
    flow = bank.app.flow("order", dict[str, str], root)
    async with variant.node(bank.app):
        run = await bank.failed(flow, {"item": "book"})
        again = await run.retry_run()
        assert await again.result() == {"item": "book", "paid": "paid book"}
        assert bank.calls == ["charge book", "pack paid book"]
        await check_invariants(bank.app, again)


@pytest.mark.contract("FMT-2")
@pytest.mark.parametrize("reads", range(4))
@pytest.mark.parametrize("verb", ["retry", "retry from the start", "fork", "fork at an event", "retry a plan"])
async def test_a_run_that_is_deleted_while_it_is_read_is_not_continued_without_its_results(
    verb: str, reads: int
) -> None:
    """Retention may delete the failed run between two pages of its history."""

    class Deleting(hf.MemoryStore):
        left: int | None = None

        async def read_events(
            self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
        ) -> list[hf.Event]:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    return []
                limit = min(limit or 3, 3)
            return await super().read_events(run_id, after, limit, most_bytes)

    bank, store = Bank(), Deleting()

    @bank.app.workflow
    async def order(item: str) -> str:
        for number in range(3):
            await bank.reserve(f"{item} {number}")
        return await bank.charge(item)

    reserve = [{"id": f"r{number}", "activity": "reserve", "input": {"item": str(number)}} for number in range(3)]
    charge = {"id": "charge", "activity": "charge", "input": {"item": "book"}, "depends_on": ["r0", "r1", "r2"]}
    async with bank.app.node(store):
        if verb == "retry a plan":
            run = await bank.app.plans.start({"plan": "order", "version": "1", "steps": [*reserve, charge]})
            with pytest.raises(RunFailed):
                await run.result()
        else:
            run = await bank.failed(order, "book")
        store.left = reads
        verbs: dict[str, Callable[[], Awaitable[Any]]] = {
            "retry": run.retry_run,
            "retry from the start": lambda: run.retry_run(from_start=True),
            "retry a plan": run.retry_run,
            "fork": run.fork,
            "fork at an event": lambda: run.fork(at=8),
        }
        if verb == "retry from the start" and reads:  # only the first event is needed
            await verbs[verb]()
            return
        with pytest.raises((NotFound, HistoryGap)):
            await verbs[verb]()
        store.left = None
        assert len(await store.find(RunQuery())) == 1
