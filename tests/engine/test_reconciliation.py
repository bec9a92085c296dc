"""Keyed activities end to end: verified before every dispatch after the first, on the run's node and from queues."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.core import events as e
from holdfast.core.events import Event
from holdfast.core.index_rows import ActivityRecord
from holdfast.core.invariants import check
from holdfast.engine.inbox.tasks import TaskView
from holdfast.errors import InvalidInput, NotPermitted, RunFailed
from holdfast.store.port import CommitConflict, Committed, Created, Existing, NewRun, Refused, Store, Turn
from holdfast.store.proxy import StoreProxy
from holdfast.testing import view_of
from tests.engine.harness import EngineVariant, wait_for_event, wait_for_history

ANN = hf.Actor("ann", roles=("operator",))
QUICK = hf.Retry(max_attempts=3, initial_ms=1, jitter=0.0)


class Bank:
    """The outside system: what it was asked to charge, and what its clerk says about it."""

    def __init__(self) -> None:
        self.charges: list[str | None] = []
        self.looks = 0
        self.says: Any = hf.NotCompleted()
        self.behaviour: Callable[[], Awaitable[str]] = self.answer

    async def answer(self) -> str:
        return "receipt"

    async def fail(self) -> str:
        raise ConnectionError("the line is dead")

    async def hang(self) -> str:
        await asyncio.sleep(60)
        return "never"

    def app(self, queue: str = "", *, verify: bool = True, **options: Any) -> tuple[hf.App, Any]:
        """Return an app with one keyed activity, and the workflow that calls it."""
        app = hf.App("bank")

        async def find_charge(order: str) -> Any:
            self.looks += 1
            assert hf.activity_context().idempotency_key == f"order-{order}"
            if isinstance(self.says, Exception):
                raise self.says
            return await self.says() if callable(self.says) else self.says

        @app.activity(
            idempotency_key=lambda order: f"order-{order}",
            verify=find_charge if verify else None,
            queue=queue,
            **{"retry": QUICK, **options},
        )
        async def charge(order: str, cents: int) -> str:
            self.charges.append(hf.activity_context().idempotency_key)
            return await self.behaviour()

        @app.workflow
        async def pay(order: str) -> str:
            return await charge(order, 500)

        return app, pay


async def record_of(store: Store, run_id: str) -> ActivityRecord | None:
    """Return the record of a run's keyed step, unless it is completed."""
    [run] = await store.load([run_id])
    assert run is not None
    return run.records[0] if run.records else None


async def check_run(store: Store, run_id: str) -> None:
    """Check that no invariant of the run is violated."""
    view = await view_of(store, run_id)
    assert view is not None
    assert check(view) == []


async def open_task(app: hf.App) -> TaskView:
    """Wait for the operator's task."""
    while not (found := await app.tasks.list(actor=ANN, status="OPEN")):  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return found[0]


def types(events: list[Event]) -> list[str]:
    return [event.event_type for event in events]


def has(event_type: str) -> Callable[[list[Event]], bool]:
    return lambda events: event_type in types(events)


@pytest.fixture(params=["", "far"], ids=["local", "queued"])
def queue(request: pytest.FixtureRequest) -> str:
    """Return the queue of the activity; empty if the run's node executes it."""
    return str(request.param)


def options_of(queue: str) -> dict[str, Any]:
    return {"queues": (queue,), "visible_ms": 1_000} if queue else {}


# --- the four verdicts


@pytest.mark.contract("ACT-4", "ACT-5")
async def test_not_completed_is_dispatched_again(variant: EngineVariant, queue: str) -> None:
    bank = Bank()
    bank.behaviour = bank.fail
    app, pay = bank.app(queue)
    async with variant.node(app, **options_of(queue)):

        async def mend() -> Any:
            bank.behaviour = bank.answer
            return hf.NotCompleted()

        bank.says = mend
        assert await (await app.start(pay, "1")).result() == "receipt"
    assert (bank.charges, bank.looks) == (["order-1", "order-1"], 1)


@pytest.mark.contract("ACT-4", "ACT-5")
async def test_completed_with_a_result_is_recorded_and_not_dispatched_again(variant: EngineVariant, queue: str) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, hf.Completed("found")
    app, pay = bank.app(queue)
    async with variant.node(app, **options_of(queue)):
        run = await app.start(pay, "1")
        assert await run.result() == "found"
        [done] = [each.data for each in await run.events() if isinstance(each.data, e.StepCompleted)]
        assert done.confirmed_by == "verifier"
    assert (len(bank.charges), bank.looks) == (1, 1)


@pytest.mark.contract("ACT-4", "ACT-5")
async def test_completed_without_a_result_fails_the_step(variant: EngineVariant, queue: str) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, hf.CompletedWithoutResult("no receipt")
    app, pay = bank.app(queue)
    async with variant.node(app, **options_of(queue)):
        with pytest.raises(RunFailed, match=r"ReconciliationFailed.*no receipt"):
            await (await app.start(pay, "1")).result()
    assert (len(bank.charges), bank.looks) == (1, 1)


@pytest.mark.contract("ACT-4", "ACT-5")
@pytest.mark.parametrize(
    ("says", "words"),
    [
        (hf.Indeterminate("the bank is closed"), "the bank is closed"),
        (RuntimeError("no line"), "RuntimeError: no line"),
        (True, "bool, which is no verdict"),
        (hf.Completed(7), "cannot be used"),
    ],
    ids=["indeterminate", "raises", "no verdict", "misfit"],
)
async def test_indeterminate_waits_for_an_operator(variant: EngineVariant, queue: str, says: Any, words: str) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, says
    app, pay = bank.app(queue)
    async with variant.node(app, **options_of(queue)) as node:
        run = await app.start(pay, "1")
        task = await open_task(app)
        assert words in bytes(task.payload).decode()
        record = await record_of(node.store, run.run_id)
        assert record is not None
        assert (record.status, record.idempotency_key) == ("indeterminate", "order-1")
        await app.tasks.complete(task.task_id, {"answer": "happened", "result": "by hand"}, actor=ANN)
        assert await run.result() == "by hand"
        assert await record_of(node.store, run.run_id) is None
    assert len(bank.charges) == 1


@pytest.mark.contract("ACT-4")
async def test_a_key_without_a_verifier_waits_for_an_operator(variant: EngineVariant, queue: str) -> None:
    bank = Bank()
    bank.behaviour = bank.fail
    app, pay = bank.app(queue, verify=False)
    async with variant.node(app, **options_of(queue)):
        run = await app.start(pay, "1")
        task = await open_task(app)
        assert "no verifier" in bytes(task.payload).decode()
        bank.behaviour = bank.answer
        await app.tasks.complete(task.task_id, {"answer": "did-not-happen"}, actor=ANN)
        assert await run.result() == "receipt"
    assert len(bank.charges) == 2


@pytest.mark.contract("ACT-4")
async def test_an_unresolved_step_is_logged(variant: EngineVariant, caplog: pytest.LogCaptureFixture) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, hf.Indeterminate("the bank is closed")
    app, pay = bank.app()
    async with variant.node(app):
        await app.start(pay, "1")
        await open_task(app)
    [line] = [each for each in caplog.records if "unresolved" in each.getMessage()]
    assert (line.levelname, "the bank is closed" in line.getMessage()) == ("ERROR", True)


@pytest.mark.contract("ACT-4")
async def test_an_operator_may_fail_the_step_and_others_may_not(variant: EngineVariant) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, hf.Indeterminate()
    app, pay = bank.app()
    async with variant.node(app):
        run = await app.start(pay, "1")
        task = await open_task(app)
        with pytest.raises(NotPermitted):
            await app.tasks.complete(task.task_id, {"answer": "fail"}, actor=hf.Actor("bob", roles=("clerk",)))
        with pytest.raises(InvalidInput):
            await app.tasks.complete(task.task_id, {"answer": "perhaps"}, actor=ANN)
        with pytest.raises(InvalidInput, match="does not fit str"):
            await app.tasks.complete(task.task_id, {"answer": "happened", "result": 7}, actor=ANN)
        await app.tasks.complete(task.task_id, {"answer": "fail", "reason": "too old"}, actor=ANN)
        with pytest.raises(RunFailed, match=r"ReconciliationFailed.*ann.*too old"):
            await run.result()


# --- exhaustion, time-outs


@pytest.mark.contract("ACT-5")
@pytest.mark.parametrize("verify", [True, False])
async def test_a_failure_of_the_last_attempt_is_the_functions_word(variant: EngineVariant, verify: bool) -> None:
    bank = Bank()
    bank.behaviour = bank.fail
    app, pay = bank.app(verify=verify, retry=hf.Retry(max_attempts=1))
    async with variant.node(app):
        with pytest.raises(RunFailed, match="ConnectionError: the line is dead"):
            await (await app.start(pay, "1")).result()
    assert (len(bank.charges), bank.looks) == (1, int(verify))


@pytest.mark.contract("ACT-5")
async def test_a_time_out_of_the_last_attempt_is_verified(variant: EngineVariant, queue: str) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.hang, hf.Completed("found")
    app, pay = bank.app(queue, retry=hf.Retry(max_attempts=1), timeout=0.05)
    async with variant.node(app, **options_of(queue)):
        assert await (await app.start(pay, "1")).result() == "found"
    assert (len(bank.charges), bank.looks) == (1, 1)


@pytest.mark.contract("ACT-4")
async def test_a_verifier_has_a_time_limit_of_its_own(variant: EngineVariant) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, bank.hang
    app, pay = bank.app(verify_timeout=0.05)
    async with variant.node(app):
        await app.start(pay, "1")
        task = await open_task(app)
        assert "did not answer within 50 ms" in bytes(task.payload).decode()


@pytest.mark.contract("ACT-4")
async def test_a_verifier_that_fails_for_a_while_is_asked_again_and_no_operator_is(
    variant: EngineVariant, queue: str
) -> None:
    bank = Bank()
    bank.behaviour = bank.fail

    async def come_back() -> Any:
        if bank.looks < 4:
            raise ConnectionError("the bank restarts")
        return hf.Completed("found")

    bank.says = come_back
    app, pay = bank.app(queue, verify_retry=hf.Retry(max_attempts=5, initial_ms=1))
    async with variant.node(app, **options_of(queue)):
        run = await app.start(pay, "1")
        assert await run.result() == "found"
        events = await run.events()
    assert (len(bank.charges), bank.looks) == (1, 4)
    assert "StepUnresolved" not in types(events)
    assert types(events).count("StepRetried") == 1, "the pauses use up no attempt"


@pytest.mark.contract("ACT-4")
@pytest.mark.parametrize("says", ["error", "silence", "doubt", "non-retryable"])
async def test_a_verifier_that_goes_on_failing_is_a_question_for_an_operator(variant: EngineVariant, says: str) -> None:
    bank = Bank()
    answers: dict[str, Any] = {
        "error": ConnectionError("down"),
        "silence": bank.hang,
        "doubt": hf.Indeterminate("perhaps"),
        "non-retryable": KeyError("no such account"),
    }
    bank.behaviour, bank.says = bank.fail, answers[says]
    policy = hf.Retry(max_attempts=3, initial_ms=1, non_retryable=("KeyError",))
    app, pay = bank.app(verify_timeout=0.05, verify_retry=policy)
    async with variant.node(app):
        await app.start(pay, "1")
        await open_task(app)
    assert bank.looks == (3 if says in ("error", "silence") else 1)


@pytest.mark.contract("ACT-1", "ACT-4")
async def test_the_pauses_of_a_verifier_take_no_slot_and_end_with_the_node(variant: EngineVariant, queue: str) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, ConnectionError("down for long")
    policy = hf.Retry(max_attempts=3, initial_ms=60_000)
    async with variant.opened() as store:
        app, pay = bank.app(queue, verify_retry=policy)
        async with variant.node(app, store, drain_s=5.0, activities_at_once=1, **options_of(queue)):
            run = await app.start(pay, "1")
            while not bank.looks:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            bank.behaviour = bank.answer
            assert await (await app.start(pay, "2")).result() == "receipt"  # in the only slot
        bank.says = hf.Completed("found")
        again, _ = bank.app(queue, verify_retry=policy)
        async with variant.node(again, store, **options_of(queue)):
            assert await again.run(run.run_id).result() == "found"
    assert len(bank.charges) == 2


@pytest.mark.contract("ACT-4")
async def test_a_verifier_that_comes_back_waits_for_a_slot(variant: EngineVariant) -> None:
    bank = Bank()
    bank.behaviour = bank.fail

    async def take_the_slot() -> Any:
        if bank.looks == 1:
            await is_taken.wait()
            raise ConnectionError("down")
        order.append("asked again")
        return hf.Completed("found")

    bank.says = take_the_slot
    order: list[str] = []
    is_taken = asyncio.Event()
    app, pay = bank.app(verify_retry=hf.Retry(max_attempts=2, initial_ms=50, jitter=0.0))

    @app.activity
    async def other() -> int:
        await asyncio.sleep(0.15)  # longer than the pause
        order.append("other")
        return 1

    @app.workflow
    async def beside() -> int:
        return await other()

    async with variant.node(app, activities_at_once=1):
        run = await app.start(pay, "1")
        while not bank.looks:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        busy = await app.start(beside)
        await wait_for_event(busy, "StepStarted")  # it is the next to have the slot
        is_taken.set()
        assert await run.result() == "found"
        assert await busy.result() == 1
        assert await (await app.start(beside)).result() == 1  # the slot is there again
    assert order == ["other", "asked again", "other"]


@pytest.mark.contract("ACT-4", "ACT-1")
async def test_a_plain_verifier_runs_in_a_thread(variant: EngineVariant) -> None:
    app = hf.App("bank")
    threads: list[str] = []

    def find(order: str) -> hf.Completed:
        import threading

        threads.append(threading.current_thread().name)
        return hf.Completed(f"found {order}")

    @app.activity(idempotency_key=lambda order: order, verify=find, retry=QUICK)
    def charge(order: str) -> str:
        raise ConnectionError

    @app.workflow
    async def pay() -> str:
        return await charge("o")

    async with variant.node(app):
        assert await (await app.start(pay)).result() == "found o"
    assert threads[0].startswith("holdfast-activity")


# --- lost nodes


@pytest.mark.contract("ACT-4", "ACT-5", "OWN-3")
@pytest.mark.parametrize("says", [hf.Completed("found"), hf.NotCompleted()], ids=["completed", "not completed"])
async def test_a_lost_attempt_is_verified_by_the_next_node(variant: EngineVariant, queue: str, says: Any) -> None:
    bank = Bank()
    bank.behaviour = bank.hang
    bank.says = says
    async with variant.opened() as store:
        app, pay = bank.app(queue)
        async with variant.node(app, store, drain_s=0.01, **options_of(queue)):
            run = await app.start(pay, "1")
            while not bank.charges:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        bank.behaviour = bank.answer
        again, _ = bank.app(queue)
        async with variant.node(again, store, **options_of(queue)):
            expected = "found" if isinstance(says, hf.Completed) else "receipt"
            assert await again.run(run.run_id).result() == expected
    assert bank.looks >= 1  # a worker that is slow to send its heartbeats may lose the job once more
    assert len(bank.charges) == 1 if isinstance(says, hf.Completed) else 2 <= len(bank.charges) <= 1 + bank.looks


@pytest.mark.contract("ACT-1", "ACT-4")
async def test_a_node_that_stops_while_it_verifies_uses_up_nothing(variant: EngineVariant, queue: str) -> None:
    bank = Bank()
    bank.behaviour = bank.fail
    bank.says = bank.hang
    async with variant.opened() as store:
        app, pay = bank.app(queue)
        async with variant.node(app, store, drain_s=5.0, **options_of(queue)):
            run = await app.start(pay, "1")
            while not bank.looks:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        bank.says = hf.Completed("found")
        again, _ = bank.app(queue)
        async with variant.node(again, store, **options_of(queue)):
            assert await again.run(run.run_id).result() == "found"
            events = await again.run(run.run_id).events()
    reasons = [each.data.reason for each in events if isinstance(each.data, e.StepRetried)]
    assert reasons == (["failed"] if queue else ["failed", e.NOT_BEGUN])


@pytest.mark.contract("ACT-4")
async def test_a_worker_without_the_verifier_leaves_the_step_to_an_operator(variant: EngineVariant) -> None:
    bank = Bank()
    bank.behaviour = bank.hang
    async with variant.opened() as store:
        app, pay = bank.app()
        async with variant.node(app, store, drain_s=0.01):
            await app.start(pay, "1")
            while not bank.charges:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        older, _ = bank.app(verify=False)
        async with variant.node(older, store):
            task = await open_task(older)
        newer, _ = bank.app()
        bank.says = hf.Completed("found")
        async with variant.node(newer, store):
            run = newer.run(task.run_id)
            await run.retry_step("charge", actor="ann")  # asks the verifier again
            assert await run.result() == "found"
            assert (await newer.tasks.get(task.task_id)).status == "CANCELLED"
    assert len(bank.charges) == 1


# --- keys


@pytest.mark.contract("ACT-2")
async def test_a_key_may_be_given_for_one_call(variant: EngineVariant) -> None:
    app = hf.App("keys")
    seen: list[str | None] = []

    @app.activity
    async def charge() -> None:
        seen.append(hf.activity_context().idempotency_key)

    @app.workflow
    async def pay() -> None:
        await charge.options(idempotency_key="by hand")()
        await charge()

    async with variant.node(app):
        run = await app.start(pay)
        await run.result()
        keys = [each.data.idempotency_key for each in await run.events() if isinstance(each.data, e.StepStarted)]
    assert seen == keys == ["by hand", None]


@pytest.mark.contract("ACT-2", "WF-2")
async def test_the_function_of_a_key_is_called_once_and_its_value_recorded(variant: EngineVariant) -> None:
    app = hf.App("keys")
    calls: list[str] = []

    def key(order: str) -> str:
        calls.append(order)
        return f"{order}-{len(calls)}"

    @app.activity(idempotency_key=key)
    async def charge(order: str) -> str | None:
        return hf.activity_context().idempotency_key

    @app.workflow
    async def pay() -> list[str | None]:
        return [await charge("a"), await hf.wait_signal("go", str), await charge("b")]

    async with variant.node(app):
        run = await app.start(pay)
        await wait_for_history(run, has("SignalWaiting"))
        await run.signal("go", "on")
        assert await run.result() == ["a-1", "on", "b-2"]
    assert calls == ["a", "b"]


@pytest.mark.contract("ACT-2")
@pytest.mark.parametrize("key", ["", "a\0b", "x" * 257, "ä" * 129, 7, None, "\ud800"])
async def test_a_value_that_cannot_be_a_key_is_refused_at_the_call(variant: EngineVariant, key: Any) -> None:
    app = hf.App("keys")

    @app.activity(idempotency_key=lambda: key)
    async def charge() -> None:
        raise AssertionError("never called")

    with pytest.raises(InvalidInput):
        charge.options(idempotency_key=key)

    @app.workflow
    async def pay() -> str:
        try:
            await charge()
        except InvalidInput as problem:
            return problem.message
        return "accepted"

    async with variant.node(app):
        run = await app.start(pay)
        assert "idempotency_key" in await run.result()
        assert "StepStarted" not in types(await run.events())


@pytest.mark.contract("ACT-2", "ACT-4")
def test_what_cannot_work_is_refused_when_it_is_registered() -> None:
    app = hf.App("keys")

    async def later(order: str) -> str:
        return order

    def other(price: int) -> str:
        return str(price)

    wrong: list[dict[str, Any]] = [
        {"idempotency_key": later},
        {"idempotency_key": other},
        {"idempotency_key": "text"},
        {"idempotency_key": lambda *args: "x"},
        {"verify": other},
        {"verify": "text"},
        {"verify_timeout": 5},
        {"verify": later, "verify_timeout": 0},
        {"verify_retry": hf.Retry()},
        {"verify": later, "verify_retry": hf.Retry(max_attempts=0)},
        {"verify": later, "verify_retry": 3},
    ]
    for options in wrong:
        with pytest.raises(InvalidInput):

            @app.activity(**options)
            async def charge(order: str) -> None: ...

    @app.activity(idempotency_key=lambda order: order, verify=later, verify_timeout=5)
    async def fine(order: str, cents: int) -> None: ...


@pytest.mark.contract("ACT-2")
async def test_without_a_key_nothing_is_verified_or_recorded(variant: EngineVariant) -> None:
    app = hf.App("plain")
    calls = []

    def find() -> hf.Completed:
        raise AssertionError("never asked")

    @app.activity(verify=find, retry=QUICK)
    async def charge() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError
        return "again"

    @app.workflow
    async def pay() -> str:
        return await charge()

    async with variant.node(app) as node:
        run = await app.start(pay)
        assert await run.result() == "again"
        assert await record_of(node.store, run.run_id) is None


@pytest.mark.contract("ACT-3")
async def test_the_first_turn_claims_the_record_with_the_creation_of_the_run(variant: EngineVariant) -> None:
    bank = Bank()
    bank.behaviour = bank.hang
    app, pay = bank.app()
    async with variant.node(app, drain_s=0.01) as node:
        run = await app.start(pay, "1")
        while not bank.charges:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        record = await record_of(node.store, run.run_id)
        assert record is not None
        assert (record.status, record.step_id, record.activity_name) == ("indeterminate", "charge", "charge")
        persisted = {each.persisted_at for each in await run.events()}
        assert len(persisted) == (1 if variant.cached_runs else 2)  # created with its first turn, if it stays in memory


class Counting(StoreProxy):
    """Counts the writes of a node."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.writes: list[tuple[int, int]] = []

    async def create(self, runs: Sequence[NewRun], claim_for: str | None = None) -> list[Created | Existing | Refused]:
        self.writes += [(len(run.events), len(run.records)) for run in runs]
        return await super().create(runs, claim_for)

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        self.writes += [(len(turn.events), len(turn.records)) for turn in turns]
        return await super().commit(turns)


@pytest.mark.contract("ACT-3")
async def test_a_keyed_step_costs_one_record_and_no_write_more(variant: EngineVariant) -> None:
    writes = []
    for key in (None, "k"):
        app = hf.App("cost")

        @app.activity
        async def charge() -> int:
            return 1

        chosen = charge if key is None else charge.options(idempotency_key=key)

        @app.workflow
        async def pay() -> int:
            return await chosen() + await chosen()  # noqa: B023

        async with variant.opened() as store:
            counting = Counting(store)
            async with variant.node(app, counting):
                run = await app.start(pay)
                assert await run.result() == 2
                assert await record_of(store, run.run_id) is None
            writes.append(counting.writes)
    plain, keyed = writes
    assert [events for events, _ in keyed] == [events for events, _ in plain]
    assert [records for _, records in plain] == [0] * len(plain)
    assert sum(records for _, records in keyed) == 4  # each of two is claimed, and completed


@pytest.mark.contract("ACT-3")
async def test_a_step_that_its_own_turn_gives_up_was_never_begun_and_its_record_says_so(variant: EngineVariant) -> None:
    bank = Bank()
    app = bank.app()[0]

    @app.activity(idempotency_key=lambda: "never")
    async def never() -> None:
        raise AssertionError("never called")

    @app.workflow
    async def forget() -> str:
        asyncio.ensure_future(never())  # noqa: RUF006
        await asyncio.sleep(0)
        return "over"

    async with variant.node(app) as node:
        run = await app.start(forget)
        assert await run.result() == "over"
        assert "StepStarted" in types(await run.events())
        record = await record_of(node.store, run.run_id)
        assert record is not None
        assert record.status in ("cancelled", "indeterminate")
        await check_run(node.store, run.run_id)


@pytest.mark.contract("ACT-4", "WF-4")
async def test_cancelling_while_unresolved_or_verifying_ends_the_run_and_closes_the_task(
    variant: EngineVariant,
) -> None:
    for says in (hf.Indeterminate("closed"), None):
        bank = Bank()
        bank.behaviour = bank.fail
        bank.says = says or bank.hang
        app, pay = bank.app()
        async with variant.node(app, drain_s=0.01) as node:
            run = await app.start(pay, "1")
            if says is None:
                while not bank.looks:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            else:
                await open_task(app)
            await run.cancel(actor="ann")
            with pytest.raises(hf.errors.RunCancelled):
                await run.result()
            assert await app.tasks.list(actor=ANN, status="OPEN", run_id=run.run_id) == []
            record = await record_of(node.store, run.run_id)
            assert record is not None
            assert record.status == "indeterminate"


# --- borders


async def lose_attempt(variant: EngineVariant, store: Store, bank: Bank, name: str | None = None) -> str:
    """Start a run whose first attempt charges and is lost with its node; return the run's id."""
    bank.behaviour = bank.hang
    app, pay = bank.app()
    options = hf.NodeOptions(cached_runs=variant.cached_runs, drain_s=0.01)
    async with app.node(store, name=name, options=options):
        run = await app.start(pay, "1")
        while not bank.charges:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    bank.behaviour = bank.answer
    return run.run_id


@pytest.mark.contract("ACT-4", "OWN-1")
async def test_a_node_that_comes_back_under_its_name_verifies_what_its_former_life_began(
    variant: EngineVariant,
) -> None:
    bank = Bank()
    bank.says = hf.Completed("found")
    async with variant.opened() as store:
        run_id = await lose_attempt(variant, store, bank, "web-1")
        again, _ = bank.app()
        async with asyncio.timeout(60), again.node(store, name="web-1"):
            assert await again.run(run_id).result() == "found"
    assert (len(bank.charges), bank.looks) == (1, 1)


@pytest.mark.contract("ACT-2", "WF-2")
async def test_another_function_of_the_key_does_not_change_a_recorded_key(variant: EngineVariant) -> None:
    bank = Bank()
    keys: list[str | None] = []

    def look(order: str) -> hf.Completed:
        keys.append(hf.activity_context().idempotency_key)
        return hf.Completed("found")

    async with variant.opened() as store:
        run_id = await lose_attempt(variant, store, bank)
        changed = hf.App("bank")

        @changed.activity(idempotency_key=lambda cents: f"other-{cents}", verify=look)
        async def charge(order: str, cents: int) -> str:
            raise AssertionError("never called")

        @changed.workflow
        async def pay(order: str) -> str:
            return await charge(order, 500)

        async with variant.node(changed, store):
            assert await changed.run(run_id).result() == "found"
    assert keys == ["order-1"]


@pytest.mark.contract("ACT-2", "WF-3")
async def test_code_without_the_key_goes_on_with_a_keyed_step(variant: EngineVariant) -> None:
    bank = Bank()
    async with variant.opened() as store:
        run_id = await lose_attempt(variant, store, bank)
        plain = hf.App("bank")

        @plain.activity
        async def charge(order: str, cents: int) -> str:
            raise AssertionError("never called")

        @plain.workflow
        async def pay(order: str) -> str:
            return await charge(order, 500)

        async with variant.node(plain, store):
            task = await open_task(plain)  # the recorded step has a key, and nothing here can verify it
            await plain.tasks.complete(task.task_id, {"answer": "happened", "result": "by hand"}, actor=ANN)
            assert await plain.run(run_id).result() == "by hand"


@pytest.mark.contract("ACT-2", "WF-3")
async def test_a_step_from_before_the_key_was_added_stays_without(variant: EngineVariant) -> None:
    calls: list[str | None] = []

    def make(keyed: bool) -> tuple[hf.App, Any]:
        app = hf.App("bank")

        async def charge(order: str) -> str:
            calls.append(hf.activity_context().idempotency_key)
            if len(calls) == 1:
                await asyncio.sleep(60)
            return "receipt"

        options: dict[str, Any] = {"idempotency_key": lambda order: order} if keyed else {}
        activity = app.activity(**options)(charge)

        @app.workflow
        async def pay() -> list[str]:
            return [await activity("a"), await activity("b")]

        return app, pay

    async with variant.opened() as store:
        plain, pay = make(False)
        async with variant.node(plain, store, drain_s=0.01):
            run = await plain.start(pay)
            while not calls:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        keyed, _ = make(True)
        async with variant.node(keyed, store):
            assert await keyed.run(run.run_id).result() == ["receipt", "receipt"]
    assert calls == [None, None, "b"]  # called again as ever; the next step has a key


@pytest.mark.contract("ACT-4", "SIG-13")
async def test_skipping_and_pausing_an_unresolved_step(variant: EngineVariant) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, hf.Indeterminate("closed")
    app = bank.app()[0]
    charge: hf.Activity[..., Any] = hf.Activity(app.registry.activities["charge"])

    @app.workflow
    async def pay_or_not(order: str) -> str | None:
        return await charge(order, 1)  # type: ignore[no-any-return]

    async with variant.node(app):
        run = await app.start(pay_or_not, "1")
        task = await open_task(app)
        await run.pause(actor="ann")
        with pytest.raises(hf.errors.Conflict, match="asks about another step"):
            await run.skip_step(task.step_id, actor="ann", wait=True)
        await run.skip_step("charge", actor="ann", wait=True)
        assert (await app.tasks.get(task.task_id)).status == "CANCELLED"
        await run.resume(actor="ann")
        assert await run.result() is None


@pytest.mark.contract("ACT-4", "WF-4")
async def test_a_parent_that_is_cancelled_cancels_a_child_with_an_unresolved_step(variant: EngineVariant) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, hf.Indeterminate("closed")
    app, pay = bank.app()

    @app.workflow
    async def parent() -> str:
        return await pay("1")  # type: ignore[no-any-return]

    async with variant.node(app):
        run = await app.start(parent)
        task = await open_task(app)
        assert task.run_id != run.run_id
        await run.cancel(actor="ann")
        with pytest.raises(hf.errors.RunCancelled):
            await run.result()
        with pytest.raises(hf.errors.RunCancelled):
            await app.run(task.run_id).result()
        assert (await app.tasks.get(task.task_id)).status == "CANCELLED"


@pytest.mark.contract("ACT-4", "CAN-1")
async def test_a_rotation_leaves_an_unresolved_step_behind_with_its_record(variant: EngineVariant) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, hf.Indeterminate("closed")
    app = bank.app()[0]
    charge: hf.Activity[..., Any] = hf.Activity(app.registry.activities["charge"])

    @app.workflow
    async def rotate(rounds: int) -> str:
        if rounds == 0:
            asyncio.ensure_future(charge("1", 1))  # noqa: RUF006
            await hf.wait_signal("go")
            hf.continue_as_new(1)
        return "over"

    async with variant.node(app) as node:
        run = await app.start(rotate, 0)
        task = await open_task(app)
        await run.signal("go")
        assert await run.result() == "over"
        assert (await app.tasks.get(task.task_id)).status == "CANCELLED"
        record = await record_of(node.store, run.run_id)
        assert record is not None
        assert (record.status, record.step_id) == ("indeterminate", "charge")
        await check_run(node.store, run.run_id)


@pytest.mark.contract("ACT-1", "ACT-4")
async def test_completing_later_closes_step_and_record_and_what_is_not_reported_is_verified(
    variant: EngineVariant,
) -> None:
    app = hf.App("later")
    tokens: list[str] = []
    looks: list[int] = []

    def look(order: str) -> hf.Indeterminate:
        looks.append(1)
        return hf.Indeterminate("not yet")

    @app.activity(idempotency_key=lambda order: order, verify=look, timeout=0.2, retry=hf.Retry(max_attempts=1))
    async def sign(order: str) -> str:
        tokens.append(hf.activity_context().token)
        hf.activity_context().complete_later()

    @app.workflow
    async def ask(order: str) -> str:
        return await sign(order)

    async with variant.node(app) as node:
        run = await app.start(ask, "in time")
        await wait_for_history(run, has("StepDetached"))
        await app.complete_activity(tokens[0], "signed")
        assert await run.result() == "signed"
        assert await record_of(node.store, run.run_id) is None
        run = await app.start(ask, "late")
        await open_task(app)
        assert looks == [1]
        with pytest.raises(hf.errors.Conflict, match="operator"):
            await app.fail_activity(tokens[1], "too late")
        await app.complete_activity(tokens[1], "signed after all")  # of the last attempt that was called
        assert await run.result() == "signed after all"
        assert await app.tasks.list(actor=ANN, status="OPEN") == []


@pytest.mark.contract("ACT-1")
async def test_an_unkeyed_activity_may_forgive_lost_attempts(variant: EngineVariant, queue: str) -> None:
    calls: list[int] = []

    def make() -> tuple[hf.App, Any]:
        app = hf.App("lost")

        @app.activity(queue=queue, retry=hf.Retry(max_attempts=1, count_lost=False))
        async def work() -> int:
            calls.append(hf.activity_context().attempt)
            if len(calls) < 3:
                await asyncio.sleep(60)
            return hf.activity_context().attempt

        @app.workflow
        async def run() -> int:
            return await work()

        return app, run

    async with variant.opened() as store:
        app, run = make()
        async with variant.node(app, store, drain_s=0.01, **options_of(queue)):
            started = await app.start(run)
            while len(calls) < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        for lives in (2, 3):
            app, _ = make()
            async with variant.node(app, store, drain_s=0.01, **options_of(queue)):
                while len(calls) < lives:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                if lives == 3:
                    assert await app.run(started.run_id).result() == 1
    assert calls == [1, 1, 1]


@pytest.mark.contract("ACT-3", "SEC-1")
async def test_nothing_of_a_keyed_steps_values_is_readable_in_an_encrypted_store(tmp_path: Path) -> None:
    bank = Bank()
    bank.behaviour, bank.says = bank.fail, hf.Indeterminate("the vault-secret is unknown")
    app = hf.App("sealed", codecs=[hf.Encryption({"k1": bytes(range(32))})])

    @app.activity(idempotency_key=lambda order: "key-1", verify=lambda order: bank.says, retry=QUICK, queue="far")
    async def charge(order: str) -> str:
        raise ConnectionError("vault-secret")

    @app.workflow
    async def pay(order: str) -> str:
        return await charge(order)

    address = f"sqlite:///{tmp_path}/sealed.db"
    async with asyncio.timeout(60), app.node(address, options=hf.NodeOptions(queues=("far",))):
        run = await app.start(pay, "vault-secret")
        task = await open_task(app)
        assert b"vault-secret" in bytes(task.payload)
        await app.tasks.complete(task.task_id, {"answer": "happened", "result": "vault-secret"}, actor=ANN)
        assert await run.result() == "vault-secret"
        stored = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert b"key-1" in stored
    assert b"vault-secret" not in stored
