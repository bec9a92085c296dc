"""Forks: runs that begin with the recorded results of another."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.events import RunQueued
from holdfast.core.fork import find_cut
from holdfast.core.invariants import check
from holdfast.core.state import CANCELLED, FAILED, PENDING, state_of
from holdfast.engine.inbox.operator_commands import OperatorCommand
from holdfast.errors import ActivityFailed, Conflict, InvalidInput, RunFailed, StoreUnavailable
from holdfast.store.port import RunQuery, Store
from holdfast.testing import view_of
from tests.engine.harness import EngineVariant, store_with_virtual_time, wait_for_event, wait_for_status

ONCE = hf.Retry(max_attempts=1)
RETRY = OperatorCommand(name="RETRY_RUN")


def origin_of(events: list[Any]) -> tuple[str, int]:
    """Return which run a fork is from, and which of its events is the last that it has."""
    first = events[0].data
    assert isinstance(first, RunQueued)
    assert first.forked_from is not None
    return first.forked_from.run_id, first.forked_from.run_seq


@pytest.mark.contract("WF-2", "EVT-4")
async def test_a_failed_run_goes_on_from_the_step_that_failed(variant: EngineVariant) -> None:
    app = hf.App("shop", attributes={"cents": int})
    calls: list[str] = []
    is_mended = False

    @app.activity(retry=ONCE)
    async def reserve(key: str) -> str:
        calls.append("reserve")
        return key

    @app.activity(retry=ONCE)
    async def charge(key: str) -> str:
        calls.append("charge")
        if not is_mended:
            raise ValueError("no money")
        return f"paid {key}"

    @app.workflow
    async def order() -> str:
        key = await reserve(str(hf.uuid4()))
        hf.set_attributes(cents=5)
        return f"{key}, {await charge(str(hf.uuid4()))}"

    async with variant.node(app):
        run = await app.start(order, reference_key="o-1", tags=("web",))
        with pytest.raises(RunFailed):
            await run.result()
        await wait_for_status(run, FAILED)
        before = await run.events()
        is_mended = True
        fork = await run.fork(request_id="once", reason="mended")
        assert (await run.fork(request_id="once")).run_id == fork.run_id
        result = await fork.result()
        assert calls == ["reserve", "charge", "charge"]
        events = await fork.events()
        origin, cut = origin_of(events)
        assert origin == run.run_id
        assert [event.event_type for event in events[:cut]] == [event.event_type for event in before[:cut]]
        [reserved, _] = [event for event in events if event.event_type == "StepCompleted"]
        assert result.startswith(bytes(reserved.data.result).decode()[1:-1])  # type: ignore[attr-defined]
        assert {event.run_id for event in events} == {fork.run_id}
        assert not {event.event_id for event in events} & {event.event_id for event in before}
        assert await run.events() == before, "the other run is as it was"
        assert state_of(fork.run_id, events).status == "COMPLETED"
        [head] = await app.runtime().store.find(RunQuery(run_ids=(fork.run_id,)))
        assert head.snapshot is not None
        assert (head.reference_key, head.snapshot.attributes, head.tags[0]) == ("o-1", {"cents": 5}, "web")


@pytest.mark.contract("WF-2")
@pytest.mark.parametrize("undoes", [False, True], ids=["nothing is undone", "a step is undone"])
async def test_a_run_that_failed_later_than_its_step_goes_on_from_the_step_if_nothing_was_done_since(
    variant: EngineVariant, undoes: bool
) -> None:
    app = hf.App("shop")
    calls: list[str] = []

    @app.activity(retry=ONCE)
    async def charge() -> str:
        calls.append("charge")
        if len(calls) == 1:
            raise ValueError("no money")
        return "paid"

    @app.activity(retry=ONCE)
    async def give_back() -> None:
        calls.append("give back")

    @app.workflow
    async def order() -> str:
        try:
            return await charge()
        except ActivityFailed as error:
            if undoes:
                await give_back()
            raise hf.WorkflowFailed("no money") from error

    async with variant.node(app):
        run = await app.start(order)
        with pytest.raises(RunFailed):
            await run.result()
        await wait_for_status(run, FAILED)
        fork = await run.fork(request_id="once")
        if undoes:  # the step is not done again behind the back of what has undone the others
            with pytest.raises(RunFailed):
                await fork.result()
            assert calls.count("charge") == 1
        else:
            assert await fork.result() == "paid"


@pytest.mark.contract("WF-2")
async def test_a_fork_at_every_event_goes_on_to_the_same_end(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.activity(retry=ONCE)
    async def double(value: int) -> int:
        return 2 * value

    @app.workflow
    async def child(value: int) -> int:
        return value + 1

    @app.workflow
    async def sums(round: int, total: int) -> int:
        drawn = hf.random().randrange(1_000)
        parts = list(await asyncio.gather(double(drawn), double(2)))
        await hf.sleep(timedelta(milliseconds=1))
        parts.append(await double(hf.random().randrange(1_000)))
        await hf.sleep(timedelta(milliseconds=1))
        parts.append(await child(3))
        if round < 1:
            hf.continue_as_new(round + 1, total + sum(parts))
        return total + sum(parts)

    async with variant.node(app):
        run = await app.start(sums, 0, 0)
        expected = await run.result()
        history = await run.events()
        cuts = sorted({find_cut(history, at) for at in range(1, len(history) + 1)})
        assert len(cuts) > 3
        for cut in cuts:
            fork = await run.fork(at=cut)
            assert origin_of(await fork.events()) == (run.run_id, cut)
            assert await fork.result() == expected
            again = await fork.fork(at=cut)
            assert await again.result() == expected


@pytest.mark.contract("SIG-4", "TSK-1", "TMR-1", "INV")
async def test_waits_tasks_and_timers_are_open_in_a_fork(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def asks() -> list[Any]:
        first = await hf.wait_signal("first", str)
        answers = await asyncio.gather(
            hf.wait_signal("second", str),
            hf.task("approve", bool, roles=["boss"]),
            hf.wait_signal("third", str, timeout=0.5, on_timeout=str),
        )
        return [first, *answers]

    async with variant.node(app):
        run = await app.start(asks)
        await run.signal("first", "one")
        await wait_for_event(run, "TaskCreated")
        await run.signal("second", "of the other run")
        fork = await run.fork(at=[event.event_type for event in await run.events()].index("TaskCreated") + 2)
        tasks = await app.tasks.list()
        own = [task for task in tasks if task.run_id == fork.run_id]
        assert len(own) == 1
        assert own[0].task_id not in {task.task_id for task in tasks if task.run_id == run.run_id}
        await fork.signal("second", "two")
        await app.tasks.complete(own[0].task_id, True, actor=hf.Actor("ann", ("boss",)))
        assert await fork.result() == ["one", "two", True, ""]
        assert (await run.snapshot()).status == "RUNNING"
        view = await view_of(app.runtime().store, fork.run_id)
        assert view is not None
        assert check(view) == [], "the signal that the original has received is in the mailbox of the original"


async def test_what_cannot_be_forked_is_refused(variant: EngineVariant) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order(number: int) -> int:
        await hf.wait_signal("go")
        return number

    async with variant.node(app):
        run = await app.start(order, 1)
        await wait_for_event(run, "SignalWaiting")
        for at in (0, -1, 99):
            with pytest.raises(InvalidInput):
                await run.fork(at=at)
        first = await run.fork(at=1, request_id="r", input={"number": 2})
        with pytest.raises(Conflict):
            await run.fork(at=3, request_id="r", input={"number": 3})
        await first.signal("go")
        assert await first.result() == 2


@pytest.mark.contract("QUE-1")
async def test_a_fork_of_a_run_that_goes_on_is_made_once_for_its_request(variant: EngineVariant) -> None:
    """Who repeats the request after a lost answer has the same fork, with what the run had recorded at first."""
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        await hf.wait_signal("go")
        await hf.wait_signal("on")
        return "done"

    def request() -> Any:
        return app.runtime().fork_run(run.run_id, RETRY, request_id="once")

    async with variant.node(app):
        run = await app.start(order)
        await wait_for_event(run, "SignalWaiting")
        first = await request()
        await run.signal("go")
        await wait_for_event(run, "SignalWaiting", 2)
        assert await request() == first
        await run.signal("on")
        assert await run.result() == "done"
        assert await request() == first
        run_id, count = first
        assert origin_of(await app.run(run_id).events()) == (run.run_id, count)
        with pytest.raises(Conflict):
            await run.fork(at=1, request_id="once")


@pytest.mark.contract("QUE-1")
@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_fork_whose_write_was_lost_is_made_once(is_stored: bool) -> None:
    app = hf.App("shop")

    @app.workflow
    async def order() -> str:
        await hf.wait_signal("go")
        return "done"

    class Losing(hf.MemoryStore):
        loses = False

        async def create(self, runs: Any, claim_for: str | None = None) -> Any:
            if self.loses and not is_stored:
                raise StoreUnavailable("lost before it was written")
            answers = await super().create(runs, claim_for)
            if self.loses:
                raise StoreUnavailable("lost after it was written")
            return answers

    store = Losing()
    async with app.node(store):
        run = await app.start(order, run_id="a")
        await wait_for_event(run, "SignalWaiting")
        store.loses = True
        with pytest.raises(StoreUnavailable):
            await run.fork(request_id="once")
        assert len(await store.find(RunQuery())) == (2 if is_stored else 1)
        store.loses = False
        fork = await run.fork(request_id="once")
        assert len(await store.find(RunQuery())) == 2
        await fork.signal("go")
        assert await fork.result() == "done"


@pytest.mark.contract("SIG-13", "WF-7")
async def test_a_fork_does_not_get_round_the_approval_of_its_run(variant: EngineVariant) -> None:
    app = hf.App("shop")
    paid: list[int] = []

    @app.activity
    async def pay(cents: int) -> int:
        paid.append(cents)
        return cents

    @app.workflow(requires_approval=True)
    async def order(cents: int) -> int:
        return await pay(cents)

    async with variant.node(app):
        run = await app.start(order, 5)
        fork = await run.fork()
        other = await run.fork(input={"cents": 70})
        await run.approve(wait=True)
        assert await run.result() == 5
        for held in (fork, other):
            assert await held.status() == PENDING
            assert (await held.snapshot()).substatus == "AWAITING_APPROVAL"
        assert paid == [5]
        with pytest.raises(InvalidInput, match="another input was approved"):
            await run.fork(input={"cents": 9_000})
        await fork.approve(wait=True)
        assert await fork.result() == 5
        again = await run.fork()  # with what was approved
        assert await again.result() == 5
        late = await run.fork(at=1, input={"cents": 90})
        assert await late.status() == PENDING
        await late.approve(wait=True)
        assert await late.result() == 90
        await other.cancel()
        await wait_for_status(other, CANCELLED)


@pytest.mark.contract("SIG-4", "INV")
async def test_a_fork_of_a_run_that_has_received_signals_breaks_no_invariant(variant: EngineVariant) -> None:
    """They are in the mailbox of its origin; what it receives itself is in its own."""
    app = hf.App("shop")

    @app.workflow(signals={"first": str, "second": str})
    async def order() -> str:
        return await hf.wait_signal("first", str) + await hf.wait_signal("second", str)

    async with variant.opened() as store, variant.node(app, store):
        run = await app.start(order)
        await run.signal("first", "a")
        await wait_for_event(run, "SignalReceived")
        fork = await run.fork()
        for each in (run, fork):
            await each.signal("second", "b")
            assert await each.result() == "ab"
            view = await view_of(store, each.run_id)
            assert view is not None
            assert check(view) == []


@pytest.mark.contract("SIG-1", "SIG-3", "CAN-1", "INV")
@pytest.mark.parametrize("rotates", [False, True])
async def test_no_signal_to_a_fork_falls_behind_what_its_origin_has_consumed(
    variant: EngineVariant, rotates: bool
) -> None:
    """The clock was set back since, as a failover may do. What the fork accepts is taken: its inbox is its own."""
    app = hf.App("shop")
    is_mended = False

    @app.activity(retry=ONCE)
    async def check_votes() -> None:
        if not is_mended:
            raise ValueError("not now")

    @app.workflow
    async def poll(first: str) -> list[str]:
        if not first:
            first = await hf.wait_signal("vote", str)
            if rotates:
                hf.continue_as_new(first)
        await check_votes()
        return [first, await hf.wait_signal("vote", str), await hf.wait_signal("vote", str)]

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(poll, "")
        clock.advance(ms=600_000)
        await run.signal("vote", "a")
        with pytest.raises(RunFailed):
            await run.result()
        clock.set_back(ms=500_000)
        is_mended = True
        fork = await run.fork()
        for made in (fork, await fork.fork(), await run.retry_run()):
            assert [await made.signal("vote", vote) for vote in "bc"]
            assert await made.result() == ["a", "b", "c"]
            view = await view_of(store, made.run_id)
            assert view is not None
            assert check(view) == []


@pytest.mark.contract("WF-2", "INV")
async def test_a_fork_knows_nothing_of_a_pause_that_it_leaves_out(variant: EngineVariant) -> None:
    """The command that has paused a run is left out with the pause: what pauses the fork later is said of the fork."""
    app = hf.App("shop")

    @app.activity(retry=ONCE, on_failure="pause")
    async def charge() -> None:
        raise ValueError("no money")

    @app.workflow(signals={"go": str})
    async def order() -> None:
        await hf.wait_signal("go", str)
        await charge()

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        run = await app.start(order, execution_timeout=60)
        await wait_for_event(run, "SignalWaiting")
        await run.pause(actor="ann")
        await wait_for_event(run, "RunPaused")
        clock.advance(ms=60_000)
        store.wakeups.notify()
        with pytest.raises(RunFailed):
            await run.result()
        fork = await run.fork()
        await fork.signal("go", "on")
        await wait_for_event(fork, "StepFailed")
        view = await view_of(store, fork.run_id)
        assert view is not None
        assert view.snapshot is not None
        assert view.snapshot.pause is not None
        assert view.snapshot.pause.actor == "", "a failed step has paused it"
        assert check(view) == []


@pytest.mark.contract("SIG-3", "WF-2", "INV")
async def test_what_a_run_has_sent_to_itself_is_in_the_mailbox_of_its_fork_until_it_was_received(
    store: Store,
) -> None:
    """To replay does not send it again, and nobody else would."""
    app = hf.App("shop")
    fails = True

    @app.activity(retry=ONCE)
    async def act() -> str:
        if fails:
            raise ValueError("not now")
        return "done"

    @app.workflow
    async def order() -> list[str]:
        to_itself = app.run()
        for signal_id in ("a", "b", "b"):
            await to_itself.signal("go", signal_id, signal_id=signal_id)
        await to_itself.signal("addressed", "c", step_id="addressed")
        taken = [await hf.wait_signal("go", str)]
        await hf.sleep(0.001)
        taken.append(await act())
        return [*taken, await hf.wait_signal("go", str), await hf.wait_signal("addressed", str)]

    async with EngineVariant("", 0).node(app, store):
        run = await app.start(order)
        with pytest.raises(RunFailed):
            await run.result()
        fails = False
        history = await run.events()
        cuts = sorted({find_cut(history, at) for at in range(1, len(history) + 1)})
        assert len(cuts) > 3
        forks = [await run.fork(at=cut) for cut in cuts]
        forks += [await forks[-1].fork(at=cuts[-1]), await run.retry_run()]
        for fork in forks:
            assert await fork.result() == ["a", "done", "b", "c"]
            assert await fork.mailbox() == []
            view = await view_of(store, fork.run_id)
            assert view is not None
            assert check(view) == []
        assert len(await run.mailbox()) == 2, "the other run is as it was"
