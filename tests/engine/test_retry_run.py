"""RETRY_RUN of failed runs: it goes on from the step that failed, and what was recorded is not done again."""

import asyncio
import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.fork import attempt_of
from holdfast.core.invariants import check
from holdfast.core.keys import retry_tag
from holdfast.errors import Conflict, RunCancelled, RunFailed
from holdfast.store.port import RunQuery, Store
from holdfast.testing import view_of
from tests.engine.harness import EngineVariant, wait_for_event

pytestmark = pytest.mark.contract("SIG-13", "WF-7")

ONCE = hf.Retry(max_attempts=1)


class Bank:
    """An app whose `charge` fails until it is mended, and what was carried out."""

    def __init__(self, **options: Any) -> None:
        self.app = app = hf.App("shop", attributes={"cents": int}, **options)
        self.is_mended = False
        self.calls: list[str] = []

        @app.activity(retry=ONCE)
        async def reserve(item: str) -> str:
            self.calls.append(f"reserve {item}")
            return item

        @app.activity(retry=ONCE)
        async def charge(item: str) -> str:
            self.calls.append(f"charge {item}")
            if not self.is_mended:
                raise ValueError("no money")
            return f"paid {item}"

        @app.activity(retry=ONCE)
        async def release(item: str) -> None:
            self.calls.append(f"release {item}")

        self.reserve, self.charge, self.release = reserve, charge, release

    async def failed(self, workflow: Any, *arguments: Any) -> hf.RunHandle[Any]:
        """Start a run, wait until it has failed, and mend what it failed of."""
        run: hf.RunHandle[Any] = await self.app.start(workflow, *arguments)
        with pytest.raises(RunFailed):
            await run.result()
        self.is_mended = True
        self.calls.clear()
        return run


async def check_invariants(app: hf.App, run: hf.RunHandle[Any]) -> None:
    """Raise if what is stored of a run breaks an invariant."""
    view = await view_of(app.runtime().store, run.run_id)
    assert view is not None
    assert check(view) == []


async def test_a_failed_run_goes_on_from_the_failed_step_once_for_each_command(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order(item: str) -> str:
        kept = await bank.reserve(f"{item} {hf.uuid4()}")
        return f"{kept}, {await bank.charge(item)}"

    async with variant.node(bank.app):
        run = await bank.failed(order, "book")
        before = await run.events()
        again = await run.retry_run("the bank is back", actor="ann", signal_id="click")
        assert (await run.retry_run(signal_id="click")).run_id == again.run_id
        result = await again.result()
        assert bank.calls == ["charge book"]
        [reserved] = [event.data for event in before if isinstance(event.data, e.StepCompleted)]
        assert result == f"{bytes(reserved.result).decode()[1:-1]}, paid book"
        events = await again.events()
        first = events[0].data
        assert isinstance(first, e.RunQueued)
        assert first.retry_of == e.RetryOf(run.run_id, "click", "ann", "the bank is back", 2)
        assert await run.events() == before, "the failed run is as it was"
        [found] = await bank.app.runtime().store.find(RunQuery(tag=retry_tag(run.run_id)))
        assert found.run_id == again.run_id
        await check_invariants(bank.app, again)


async def test_from_the_start_nothing_is_kept(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order(item: str) -> str:
        return await bank.charge(await bank.reserve(item))

    async with variant.node(bank.app):
        run = await bank.failed(order, "book")
        again = await run.retry_run(from_start=True)
        assert await again.result() == "paid book"
        assert bank.calls == ["reserve book", "charge book"]


async def test_a_completed_and_a_cancelled_run_begin_again(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order(waits: bool) -> str:
        kept = await bank.reserve("book")
        if waits:
            await hf.wait_signal("go")
        return kept

    async with variant.node(bank.app):
        done = await bank.app.start(order, False)
        assert await done.result() == "book"
        stopped = await bank.app.start(order, True)
        await wait_for_event(stopped, "SignalWaiting")
        await stopped.cancel()
        with pytest.raises(RunCancelled):
            await stopped.result()
        assert await (await done.retry_run()).result() == "book"
        again = await stopped.retry_run()
        await again.signal("go")
        assert await again.result() == "book"
        assert bank.calls == ["reserve book"] * 4


async def test_a_result_of_the_commit_that_ended_the_run_is_kept(variant: EngineVariant) -> None:
    """The code has a bug right behind a paid step, and its author lets runs fail of bugs."""
    bank = Bank()

    @bank.app.workflow(on_error="fail")
    async def order() -> str:
        await hf.sleep(0.001)
        kept = await bank.reserve("book")
        if not bank.is_mended:
            raise KeyError("shelf")
        return kept

    async with variant.node(bank.app):
        run = await bank.failed(order)
        for retry in (await run.retry_run(), await run.fork()):
            assert await retry.result() == "book"
            await check_invariants(bank.app, retry)
        assert bank.calls == []


async def test_a_retry_with_the_bug_still_there_fails_as_before(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow(on_error="fail")
    async def order() -> str:
        await bank.reserve("book")
        raise KeyError("shelf")

    async with variant.node(bank.app):
        run = await bank.failed(order)
        for _ in range(3):  # a retry of a retry, too
            run = await run.retry_run()
            with pytest.raises(RunFailed, match="shelf"):
                await run.result()
        assert bank.calls == []


@pytest.mark.parametrize("how", ["gather", "gather to the end", "task group", "timeout"])
async def test_what_succeeded_beside_the_failed_step_is_kept(variant: EngineVariant, how: str) -> None:
    bank = Bank()
    go_on = asyncio.Event()

    @bank.app.activity(retry=ONCE)
    async def slow(item: str) -> str:
        bank.calls.append(f"slow {item}")
        await go_on.wait()
        return item

    @bank.app.workflow
    async def order() -> list[Any]:
        quick = await bank.reserve("book")
        if how == "timeout":
            async with asyncio.timeout(3600):
                return [quick, await bank.charge("book")]
        if how == "task group":
            async with asyncio.TaskGroup() as group:
                tasks = group.create_task(bank.charge("book")), group.create_task(slow("pen"))
            return [quick, *(task.result() for task in tasks)]
        is_whole = how == "gather to the end"
        found = await asyncio.gather(bank.charge("book"), slow("pen"), return_exceptions=is_whole)
        for each in found:
            if isinstance(each, Exception):
                raise each
        return [quick, *found]

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        await wait_for_event(run, "StepFailed")
        if how == "gather to the end":
            go_on.set()
        with pytest.raises(RunFailed):
            await run.result()
        go_on.set()
        bank.is_mended = True
        bank.calls.clear()
        again = await run.retry_run()
        assert await again.result() == ["book", "paid book", *(["pen"] if how != "timeout" else [])]
        # What succeeded is not done again, also where it ended after the failure; what was given up is begun again.
        given_up = ["slow pen"] if how in ("gather", "task group") else []
        assert sorted(bank.calls) == ["charge book", *given_up]
        await check_invariants(bank.app, again)


async def test_branches_that_went_on_after_the_failure_of_another_are_not_done_again(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def orders() -> list[Any]:
        async def one(number: int) -> str:
            if number == 1:
                return await bank.charge("1")
            await hf.wait_signal(f"go {number}")
            return await bank.reserve(str(number))

        found = await asyncio.gather(*map(one, range(3)), return_exceptions=True)
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found

    async with variant.node(bank.app):
        run = await bank.app.start(orders)
        await wait_for_event(run, "StepFailed")
        for number in (0, 2):
            await run.signal(f"go {number}")
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        again = await run.retry_run()
        assert await again.result() == ["0", "paid 1", "2"]
        assert bank.calls.count("reserve 0") == bank.calls.count("reserve 2") == 1
        assert bank.calls.count("charge 1") == 2


@pytest.mark.parametrize("what", ["attributes", "published", "patched", "given up"])
async def test_what_branches_record_after_the_failure_of_another_costs_no_later_result(
    variant: EngineVariant, what: str
) -> None:
    bank = Bank()
    go_on = asyncio.Event()

    @bank.app.activity(retry=ONCE)
    async def slow(item: str) -> str:
        await go_on.wait()
        bank.calls.append(f"slow {item}")
        return item

    @bank.app.workflow
    async def orders() -> list[Any]:
        async def heard() -> str:
            other = asyncio.ensure_future(hf.wait_signal("never", str))
            found = await hf.wait_signal("go", str)
            if what == "attributes":
                hf.set_attributes(cents=3)
            elif what == "published":
                hf.publish(stage="heard")
            elif what == "patched":
                hf.patched("noted")
            else:
                other.cancel()
            return found

        found = await asyncio.gather(bank.charge("book"), heard(), slow("pen"), return_exceptions=True)
        for each in found:
            if isinstance(each, Exception):
                raise each
        return list(found)

    recorded = {"attributes": "AttributesSet", "given up": "StepCancelled"}.get(what, "MarkerRecorded")
    async with variant.node(bank.app):
        run = await bank.app.start(orders)
        await wait_for_event(run, "StepFailed")
        await run.signal("go", "heard")
        await wait_for_event(run, recorded)
        go_on.set()
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        again = await run.retry_run()
        assert await again.result() == ["paid book", "heard", "pen"]
        assert bank.calls.count("slow pen") == 1
        await check_invariants(bank.app, again)


async def test_a_run_that_has_undone_its_steps_begins_again(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order() -> str:
        async with hf.Saga() as saga:
            saga.undo(bank.release, await bank.reserve("book"))
            return await bank.charge("book")

    async with variant.node(bank.app):
        run = await bank.failed(order)
        again = await run.retry_run()
        assert await again.result() == "paid book"
        assert bank.calls == ["reserve book", "charge book"]


async def test_where_the_code_is_not_there_nobody_guesses_whether_steps_were_undone(tmp_path: Path) -> None:
    bank, other = Bank(), hf.App("page")
    address = f"sqlite:///{tmp_path}/shop.db"

    @bank.app.workflow
    async def order(undoes: bool) -> str:
        try:
            return await bank.charge(await bank.reserve("book"))
        except hf.errors.ActivityFailed:
            if undoes:
                await bank.release("book")
            raise

    async with asyncio.timeout(60), bank.app.node(address):
        run, undone = await bank.failed(order, False), None
        bank.is_mended = False
        undone = await bank.failed(order, True)
    async with asyncio.timeout(60), other.connect(address):
        again = await other.run(run.run_id).retry_run()
        with pytest.raises(Conflict, match="may have undone steps"):
            await other.run(undone.run_id).retry_run()
        anew = await other.run(undone.run_id).retry_run(from_start=True)
    bank.calls.clear()
    async with asyncio.timeout(60), bank.app.node(address):
        assert await bank.app.run(again.run_id).result() == "paid book"
        assert bank.calls.count("reserve book") <= 1, "that of the other"
        assert await bank.app.run(anew.run_id).result() == "paid book"
    assert sorted(bank.calls) == ["charge book", "charge book", "reserve book"]


async def test_the_failed_child_is_started_again(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def pay() -> str:
        return await bank.charge("book")

    @bank.app.workflow
    async def order() -> str:
        return f"{await bank.reserve('book')}, {await pay()}"

    async with variant.node(bank.app):
        run = await bank.failed(order)
        again = await run.retry_run()
        assert await again.result() == "book, paid book"
        assert bank.calls == ["charge book"]
        child = (await wait_for_event(run, "ChildStarted")).data.child_run_id  # type: ignore[attr-defined]
        alone = await bank.app.run(child).retry_run()  # its parent has ended
        assert await alone.result() == "paid book"


async def test_a_rotated_run_goes_on_from_its_failed_step(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def orders(number: int = 0) -> list[Any]:
        info = hf.run_info()
        await bank.reserve(f"{number} {info.run_id} {info.attempt}")
        if number < 2:
            hf.continue_as_new(number + 1)
        await bank.charge("book")
        info = hf.run_info()
        return [info.attempt, info.retry_of, info.rotation, info.run_id]

    async with variant.node(bank.app):
        run = await bank.failed(orders)
        again = await run.retry_run()
        assert await again.result() == [2, run.run_id, 2, again.run_id]
        assert bank.calls == ["charge book"]
        view = await view_of(bank.app.runtime().store, again.run_id)
        assert view is not None
        assert check(view) == []


async def test_a_run_that_fails_while_it_cleans_up_goes_on_cancelling(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order() -> None:
        try:
            await hf.wait_signal("go")
        finally:
            await bank.charge("the fee")

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        await wait_for_event(run, "SignalWaiting")
        await run.cancel("not wanted")
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        with pytest.raises(RunCancelled):
            await (await run.retry_run()).result()
        assert bank.calls == ["charge the fee"] * 2


async def test_signals_that_were_consumed_stay_consumed_and_a_wait_is_open_again(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow(on_error="fail")
    async def order() -> str:
        first = await hf.wait_signal("word", str)
        second = await hf.wait_signal("word", str)
        if not bank.is_mended:
            raise KeyError(second)
        return first + second + await hf.wait_signal("word", str)

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        for word in ("a", "b"):
            await run.signal("word", word)
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        again = await run.retry_run()
        await again.signal("word", "c")
        assert await again.result() == "abc"
        await check_invariants(bank.app, again)


async def test_a_keyed_step_is_verified_before_it_is_tried_again(variant: EngineVariant) -> None:
    """Its effect may have happened, although the run has failed."""
    app, charged, asked = hf.App("shop"), list[str](), list[str]()

    async def find_charge(item: str) -> Any:
        asked.append(item)
        return hf.Completed("from the ledger")

    @app.activity(retry=ONCE, idempotency_key=lambda item: f"key of {item}", verify=find_charge)
    async def charge(item: str) -> str:
        charged.append(item)
        raise hf.NonRetryable("the answer cannot be read")

    @app.workflow
    async def order() -> str:
        return await charge("book")

    async with variant.node(app):
        run = await app.start(order)
        with pytest.raises(RunFailed):
            await run.result()
        assert (charged, asked) == (["book"], [])
        again = await run.retry_run()
        assert await again.result() == "from the ledger"
        assert (charged, asked) == (["book"], ["book"])


async def test_a_command_that_was_sent_twice_makes_one_run(variant: EngineVariant) -> None:
    """By a client that got no answer, and through another process."""
    bank = Bank()

    @bank.app.workflow
    async def order() -> str:
        return await bank.charge(await bank.reserve("book"))

    async with variant.opened() as store:
        async with variant.node(bank.app, store):
            run = await bank.failed(order)
        async with bank.app.connect(store):
            first = await bank.app.run(run.run_id).retry_run(signal_id="click")
        async with variant.node(bank.app, store):
            again = await bank.app.run(run.run_id).retry_run(signal_id="click")
            assert again.run_id == first.run_id
            assert await bank.app.run(again.run_id).result() == "paid book"
        assert bank.calls == ["charge book"]


# --- attempts


async def numbers(runs: list[hf.RunHandle[Any]]) -> list[Any]:
    return [await run.result() for run in runs]


async def test_attempts_are_counted_by_retries_and_restarts_and_kept_by_forks_and_rotations(
    variant: EngineVariant,
) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order(rotated: bool = False) -> int:
        if not rotated:
            hf.continue_as_new(True)
        return hf.run_info().attempt

    async with variant.node(app):
        first = await app.start(order, run_id="cart", reuse="restart-if-finished")
        assert await first.result() == 1
        second = await app.start(order, run_id="cart", reuse="restart-if-finished")
        assert (second.run_id, await second.result()) == ("cart~000002", 2)
        third = await second.retry_run()
        assert await third.result() == 3
        assert await (await third.retry_run()).result() == 4
        assert await (await third.fork(at=1)).result() == 3
        assert await (await second.fork(at=1)).result() == 2
        restart = await app.start(order, run_id="cart", reuse="terminate-and-restart")
        assert await restart.result() == 3


async def test_a_debounced_run_is_no_attempt_at_the_one_before_and_its_retry_is_one(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def index(doc: str) -> int:
        return hf.run_info().attempt

    async with variant.node(app):
        soon = hf.Debounce(key="doc", quiet=0.001, at_most=0.01)
        first = await app.start(index, "doc", debounce=soon)
        assert await first.result() == 1
        second = await app.start(index, "doc", debounce=soon)
        assert second.run_id == f"{first.run_id}~000002"
        assert await second.result() == 1
        assert await (await second.retry_run()).result() == 2


def test_retries_and_forks_of_earlier_versions_are_read() -> None:
    """They have no number of an attempt, and do not say what their programs knew of themselves."""
    stored = b'{"plan_id":"order","plan_version":"1","retry_of":{"run_id":"a","signal_id":"s"}}'
    retried = codec.decode_body("RunQueued", 1, stored)
    assert isinstance(retried, e.RunQueued)
    assert attempt_of("a/retry-1", retried) == 2
    stored = b'{"plan_id":"order","plan_version":"1","forked_from":{"run_id":"a~000003","run_seq":5,"seed":"a"}}'
    forked = codec.decode_body("RunQueued", 1, stored)
    assert isinstance(forked, e.RunQueued)
    assert forked.forked_from is not None
    assert forked.forked_from.formers == (e.FormerRun(5, "a~000003"),)


async def test_a_run_is_told_the_same_at_replay_as_before_its_retry(variant: EngineVariant) -> None:
    """Steps that were given its id and attempt are recorded with those of the failed run."""
    bank = Bank()
    told: list[tuple[str, int, str | None]] = []

    @bank.app.workflow
    async def order() -> list[Any]:
        def now() -> tuple[str, int, str | None]:
            info = hf.run_info()
            return info.run_id, info.attempt, info.retry_of

        told.append(now())
        await bank.reserve(str(now()))
        with contextlib.suppress(hf.errors.ActivityFailed):
            await bank.charge(str(now()))
            return [*now()]
        raise hf.WorkflowFailed("no money")

    async with variant.node(bank.app):
        first = await bank.failed(order)
        bank.is_mended = False
        second = await first.retry_run()
        with pytest.raises(RunFailed):
            await second.result()
        bank.is_mended = True
        third = await second.retry_run()
        assert await third.result() == [third.run_id, 3, second.run_id]
        assert set(told) == {(first.run_id, 1, None)}, "whoever replays its first part"
        assert {each.partition(" ")[2] for each in bank.calls} == {str((first.run_id, 1, None))}


async def test_a_fork_of_a_run_that_gives_its_id_to_steps_goes_on(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order() -> str:
        await bank.reserve(hf.run_info().run_id)
        await hf.wait_signal("go")
        return await bank.reserve(hf.run_info().run_id)

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        waiting = await wait_for_event(run, "SignalWaiting")
        fork = await run.fork(at=waiting.run_seq)
        again = await fork.fork(at=(await wait_for_event(fork, "SignalWaiting")).run_seq)
        for each in (fork, again):
            await each.signal("go")
            assert await each.result() == each.run_id


async def test_a_retry_of_a_tick_is_no_tick_and_says_so_only_after_what_was_recorded(variant: EngineVariant) -> None:
    bank = Bank()
    seen: list[str | None] = []

    @bank.app.workflow
    async def nightly() -> str | None:
        await bank.reserve(str(hf.run_info().schedule_id))
        await bank.charge("book")
        return hf.run_info().schedule_id

    async with variant.node(bank.app):
        await bank.app.schedules.create("night", workflow=nightly, every=timedelta(days=1))
        run = await bank.app.schedules.trigger("night")
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        seen.append(await (await run.retry_run()).result())
        assert seen == [None]
        assert bank.calls.count("reserve night") == 1


# --- beside other things


async def test_a_run_that_is_retried_and_cancelled_undoes_only_what_is_its_own(variant: EngineVariant) -> None:
    """A cancelled retry runs the undoing of what it has from the failed run, once; that run stays failed."""
    bank, may_go = Bank(), asyncio.Event()

    @bank.app.activity(retry=ONCE)
    async def ship() -> str:
        if not bank.is_mended:
            raise ValueError("no ship")
        await may_go.wait()
        return "shipped"

    @bank.app.workflow
    async def order() -> str:
        kept = await bank.reserve("book")
        try:
            return await ship()
        except asyncio.CancelledError:
            await bank.release(kept)
            raise

    async with variant.node(bank.app):
        run = await bank.failed(order)
        again = await run.retry_run()
        await wait_for_event(again, "StepRetried")
        await again.cancel("not wanted")
        with pytest.raises(RunCancelled):
            await again.result()
        assert bank.calls == ["release book"]
        assert await run.status() == "FAILED"
        anew = await again.retry_run()  # it was cancelled, so it begins at the beginning
        may_go.set()
        assert await anew.result() == "shipped"
        assert bank.calls == ["release book", "reserve book"]


async def test_a_retried_step_that_is_cancelled_at_any_moment_leaves_nothing_open(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order() -> str:
        return await bank.charge.options(on_failure="pause", retry=hf.Retry(max_attempts=2, initial_ms=1))("book")

    async with variant.node(bank.app):
        for moment in ("before the retry", "with the retry", "after the retry"):
            bank.is_mended = False
            run = await bank.app.start(order)
            await wait_for_event(run, "RunPaused")
            if moment == "before the retry":
                await run.cancel()
                with contextlib.suppress(Conflict, hf.errors.RunTerminal):
                    await run.retry_step("charge")
            else:
                await run.retry_step("charge", wait=moment == "after the retry")
                await run.cancel()
            with pytest.raises(RunCancelled):
                await run.result()
            await check_invariants(bank.app, run)


async def test_updates_of_the_failed_run_are_replayed_and_new_ones_answered_by_the_retry(
    variant: EngineVariant,
) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order() -> list[str]:
        items: list[str] = []

        def add(item: str) -> int:
            items.append(item)
            return len(items)

        hf.on_update("add", add)
        await hf.wait_signal("pay")
        await bank.charge("all")
        await hf.wait_signal("close")
        return items

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        assert await run.update("add", update_id="u-1", item="book") == 1
        await run.signal("pay")
        with pytest.raises(RunFailed):
            await run.result()
        with pytest.raises(hf.errors.RunTerminal):
            await run.update("add", update_id="u-2", item="pen")
        bank.is_mended = True
        again = await run.retry_run()
        assert await again.update("add", update_id="u-2", item="pen") == 2
        assert await again.update("add", update_id="u-2", item="pen") == 2
        await again.signal("close")
        assert await again.result() == ["book", "pen"]
        await check_invariants(bank.app, again)


async def test_an_update_while_a_step_is_retried_is_answered(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order() -> str:
        hf.on_update("ping", lambda: "pong")
        return await bank.charge.options(retry=hf.Retry(initial_ms=3_600_000))("book")

    async with variant.node(bank.app):
        run = await bank.app.start(order)
        await wait_for_event(run, "StepRetried")
        assert await run.update("ping", update_id="u") == "pong"
        bank.is_mended = True
        await run.retry_step("charge", wait=True)
        assert await run.result() == "paid book"


async def test_the_failed_update_handler_of_a_run_is_not_asked_again_by_its_retry(variant: EngineVariant) -> None:
    """Its sender got the error. What the handler had begun is given up with the run."""
    bank = Bank()

    @bank.app.workflow
    async def paid() -> str:
        async def pay(item: str) -> str:
            return await bank.charge(item)

        hf.on_update("pay", pay)
        await hf.wait_signal("close")
        if not bank.is_mended:
            raise hf.WorkflowFailed("not paid")
        return "closed"

    async with variant.node(bank.app):
        run = await bank.app.start(paid)
        with pytest.raises(hf.errors.UpdateFailed):
            await run.update("pay", update_id="u-1", item="book")
        await run.signal("close")
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        bank.calls.clear()
        again = await run.retry_run()
        assert await again.result() == "closed"
        assert bank.calls == []
        await check_invariants(bank.app, again)


async def test_flows_go_on_from_their_failed_step(variant: EngineVariant) -> None:
    bank = Bank()

    flow = bank.app.flow(
        "order",
        dict[str, str],
        hf.Scene(
            hf.Act(bank.reserve, input=lambda state: state["item"], apply=lambda state, kept: {**state, "kept": kept}),
            hf.Act(bank.charge, input=lambda state: state["item"], apply=lambda state, paid: {**state, "paid": paid}),
        ),
    )
    async with variant.node(bank.app):
        run = await bank.failed(flow, {"item": "book"})
        again = await run.retry_run()
        assert await again.result() == {"item": "book", "kept": "book", "paid": "paid book"}
        assert bank.calls == ["charge book"]
        await check_invariants(bank.app, again)


async def test_a_flow_that_has_compensated_begins_again(variant: EngineVariant) -> None:
    bank = Bank()
    flow = bank.app.flow(
        "order",
        dict[str, str],
        hf.Scene(
            hf.Act(
                bank.reserve,
                input=lambda state: state["item"],
                apply=lambda state, kept: {**state, "kept": kept},
                compensate=hf.Act(bank.release, input=lambda state: state["item"]),
            ),
            hf.Act(bank.charge, input=lambda state: state["item"], apply=lambda state, paid: {**state, "paid": paid}),
        ),
    )
    async with variant.node(bank.app):
        run = await bank.app.start(flow, {"item": "book"})
        with pytest.raises(RunFailed):
            await run.result()
        assert bank.calls == ["reserve book", "charge book", "release book"]
        bank.calls.clear()
        bank.is_mended = True
        again = await run.retry_run()
        assert await again.result() == {"item": "book", "kept": "book", "paid": "paid book"}
        assert bank.calls == ["reserve book", "charge book"]


async def test_a_plan_keeps_its_results_and_from_the_start_it_does_not(variant: EngineVariant) -> None:
    bank = Bank()
    steps: list[dict[str, Any]] = [
        {"id": "reserve", "activity": "reserve", "input": {"item": "book"}},
        {"id": "charge", "activity": "charge", "input": {"item": "${steps.reserve.output}"}},
    ]
    async with variant.node(bank.app):
        run = await bank.app.plans.start({"plan": "order", "version": "1", "steps": steps})
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        bank.calls.clear()
        again = await run.retry_run()
        assert await again.result() == {"charge": "paid book"}
        assert bank.calls == ["charge book"]
        anew = await again.retry_run(from_start=True)
        assert await anew.result() == {"charge": "paid book"}
        assert bank.calls == ["charge book", "reserve book", "charge book"]
        first = (await anew.events())[0].data
        assert isinstance(first, e.RunQueued)
        assert first.retry_of is not None
        assert first.retry_of.attempt == 3


async def test_a_retry_is_of_the_same_tenant_and_bounded_in_time_anew(variant: EngineVariant) -> None:
    bank = Bank()

    @bank.app.workflow
    async def order() -> str:
        return await bank.charge(await bank.reserve("book"))

    async with variant.node(bank.app):
        run = await bank.app.start(order, tenant="acme", project="p", environment="test", execution_timeout=60)
        with pytest.raises(RunFailed):
            await run.result()
        bank.is_mended = True
        again = await run.retry_run()
        assert await again.result() == "paid book"
        [head] = await bank.app.runtime().store.find(RunQuery(run_ids=(again.run_id,)))
        assert (head.tenant, head.project, head.environment) == ("acme", "p", "test")


async def test_every_store_keeps_what_a_retry_begins_with(store: Store) -> None:
    """Signals, answers, keyed steps, attributes, and results of the last commit; another process sends the command."""
    bank = Bank()
    app, keyed = bank.app, bank.reserve.options(idempotency_key="the only one")

    @app.workflow(on_error="fail")
    async def order() -> list[str]:
        found = [await hf.wait_signal("word", str), await keyed("book")]
        hf.set_attributes(cents=5)
        found += [str(await hf.task("approve", bool, roles=["boss"])), await hf.wait_signal("word", str)]
        if not bank.is_mended:
            raise KeyError("shelf")
        return [*found, await bank.charge("book")]

    async with asyncio.timeout(60):
        async with app.node(store, options=hf.NodeOptions(drain_s=0.5)):
            run = await app.start(order, reference_key="o-1")
            for word in ("a", "b"):
                await run.signal("word", word)
            await wait_for_event(run, "TaskCreated")
            [task] = await app.tasks.list()
            await app.tasks.complete(task.task_id, True, actor=hf.Actor("ann", ("boss",)))
            with pytest.raises(RunFailed):
                await run.result()
        bank.calls.clear()
        bank.is_mended = True
        async with app.connect(store):
            again = await app.run(run.run_id).retry_run("mended", signal_id="click")
            fork = await app.run(run.run_id).fork(request_id="once")
        async with app.node(store, options=hf.NodeOptions(drain_s=0.5)):
            for each in (again, fork):
                each = app.run(each.run_id)
                assert await each.result() == ["a", "book", "True", "b", "paid book"]
                await check_invariants(app, each)
            [head] = await store.find(RunQuery(run_ids=(again.run_id,)))
            assert head.snapshot is not None
            assert (head.reference_key, head.snapshot.attributes) == ("o-1", {"cents": 5})
        assert bank.calls == ["charge book"] * 2


async def test_an_encrypted_run_is_retried_where_its_key_is_and_nowhere_else(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/shop.db"
    bank, other = Bank(codecs=[hf.Encryption({"k1": bytes(32)})]), hf.App("page")

    @bank.app.workflow
    async def order(item: str) -> str:
        return await bank.charge(await bank.reserve(item))

    async with asyncio.timeout(60):
        async with bank.app.node(address):
            run = await bank.failed(order, "book")
            again = await run.retry_run()
            assert await again.result() == "paid book"
            assert bank.calls == ["charge book"]
        async with other.connect(address):
            for from_start in (False, True):
                with pytest.raises(hf.errors.PayloadUnreadable):
                    await other.run(run.run_id).retry_run(from_start=from_start)
