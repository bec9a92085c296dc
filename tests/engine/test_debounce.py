"""Debounced starts: one run of several, with the last input, and how that meets everything else."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.core.events import InputReplaced
from holdfast.core.plans import DEBOUNCE_LEVEL
from holdfast.core.state import RunStatus
from holdfast.engine.inbox.authorization import ControlRequest, Verdict
from holdfast.errors import (
    Conflict,
    InvalidInput,
    NotPermitted,
    PayloadTooLarge,
    RunCancelled,
    RunTimedOut,
    StoreUnavailable,
)
from holdfast.limits import Limits
from holdfast.store.port import PurgePolicy, RunQuery, Store
from holdfast.store.proxy import StoreProxy
from holdfast.testing import VirtualClock
from tests.engine.harness import EngineVariant, event_types, store_with_virtual_time, wait_for_event, wait_for_status

pytestmark = pytest.mark.contract("QUE-6")

QUIET_S, MOST_S = 30, 140
KEY = hf.Debounce("doc-7", QUIET_S, timedelta(seconds=MOST_S))


def index_app(**options: Any) -> tuple[hf.App, Any, list[str]]:
    """Return an app that indexes documents, and what it was given."""
    app, given = hf.App("search"), list[str]()

    @app.workflow(**options)
    async def index(text: str) -> str:
        given.append(text)
        await hf.sleep(1)
        return text

    return app, index, given


def pass_time(store: Store, clock: VirtualClock, seconds: float) -> None:
    """Let time pass, and wake the node as its own clock would."""
    clock.advance(ms=round(seconds * 1_000))
    store.wakeups.notify()


async def settled(run: hf.RunHandle[Any], times: int) -> None:
    """Wait until the run has recorded so many later inputs."""
    await wait_for_event(run, "InputReplaced", times)


async def result_of(run: hf.RunHandle[Any], store: Store, clock: VirtualClock) -> Any:
    """Wait until the run has begun, a moment later at most, and for its result."""
    pass_time(store, clock, 0.001)  # times of acceptance strictly grow
    await wait_for_event(run, "TimerStarted")
    pass_time(store, clock, 1)
    return await run.result()


async def test_starts_within_the_quiet_time_are_one_run_with_the_last_input(variant: EngineVariant) -> None:
    app, index, given = index_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        runs = []
        for number in range(4):
            runs.append(await app.start(index, f"draft {number}", debounce=KEY))
            if number:
                await settled(runs[0], number)
            pass_time(store, clock, QUIET_S - 1)
        assert [run.is_reused for run in runs] == [False, True, True, True]
        [run_id] = {run.run_id for run in runs}
        assert run_id.startswith("doc-7-")
        assert await runs[0].status() == RunStatus.PENDING
        [head] = await store.find(RunQuery(limit=10))
        assert head.snapshot is not None
        assert head.needs == DEBOUNCE_LEVEL
        assert (head.snapshot.waiting_kind, head.snapshot.waiting_until) == ("start", clock.now() + 1_000_000)
        pass_time(store, clock, 0.999)
        assert given == []
        assert await runs[0].status() == RunStatus.PENDING
        pass_time(store, clock, 0.001)
        assert await result_of(runs[0], store, clock) == "draft 3"
    assert set(given) == {"draft 3"}


async def test_a_run_starts_at_most_so_long_after_the_first(variant: EngineVariant) -> None:
    """However often it is put off; the next start is the first of the next run."""
    app, index, _ = index_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        first = await app.start(index, "0", debounce=KEY)
        for number in range(1, 5):
            pass_time(store, clock, MOST_S / 5)
            assert (await app.start(index, str(number), debounce=KEY)).run_id == first.run_id
            await settled(first, number)
        pass_time(store, clock, MOST_S / 5)
        after = await app.start(index, "5", debounce=KEY)
        assert after.run_id == f"{first.run_id}~000002"
        assert not after.is_reused
        assert await result_of(first, store, clock) == "4"
        pass_time(store, clock, QUIET_S)
        assert await result_of(after, store, clock) == "5"


async def test_a_start_after_the_run_has_begun_is_the_next_run(variant: EngineVariant) -> None:
    app, index, _ = index_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        first = await app.start(index, "a", debounce=KEY)
        pass_time(store, clock, QUIET_S)
        await wait_for_event(first, "TimerStarted")
        second = await app.start(index, "b", debounce=KEY)
        assert second.run_id == f"{first.run_id}~000002"
        third = await app.start(index, "c", debounce=KEY)
        assert third.run_id == second.run_id
        await settled(second, 1)
        pass_time(store, clock, QUIET_S)
        assert await first.result() == "a"
        assert await result_of(second, store, clock) == "c"


async def test_what_was_accepted_while_no_node_was_there_counts(variant: EngineVariant) -> None:
    """A node that comes late begins with the last input, once, without waiting anew."""
    app, index, given = index_app()
    async with store_with_virtual_time(variant) as (store, clock):
        async with app.connect(store):
            for number in range(3):
                run = await app.start(index, str(number), debounce=KEY)
                clock.advance(ms=20_000)
        clock.advance(ms=3_600_000)
        async with variant.node(app, store):
            again = app.run(run.run_id)
            await settled(again, 2)
            assert await result_of(again, store, clock) == "2"
            types = await event_types(again)
            assert (types.count("InputReplaced"), types.count("RunStarted")) == (2, 1)
    assert set(given) == {"2"}


async def test_keys_tenants_versions_and_workflows_have_runs_of_their_own(variant: EngineVariant) -> None:
    app, index, _ = index_app()

    @app.workflow
    async def other(text: str) -> str:
        return text

    async with store_with_virtual_time(variant) as (store, _), variant.node(app, store):
        starts = [
            await app.start(index, "x", debounce=KEY),
            await app.start(index, "x", debounce=hf.Debounce("doc-8", 30, 100)),
            await app.start(index, "x", debounce=KEY, tenant="b"),
            await app.start(index, "x", debounce=KEY, project="b"),
            await app.start(index, "x", debounce=KEY, environment="b"),
            await app.start(other, "x", debounce=KEY),
        ]
    assert len({run.run_id for run in starts}) == len(starts)
    assert not any(run.is_reused for run in starts)


async def test_a_request_counts_once(variant: EngineVariant) -> None:
    """Neither an input nor the start is put off by a retry; another input under its id is refused."""
    app, index, _ = index_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        first = await app.start(index, "a", debounce=KEY, request_id="r-1")
        await app.start(index, "b", debounce=KEY, request_id="r-2")
        await settled(first, 1)
        pass_time(store, clock, 10)
        for request, text in (("r-1", "a"), ("r-2", "b")):
            assert (await app.start(index, text, debounce=KEY, request_id=request)).run_id == first.run_id
            with pytest.raises(Conflict, match="another input"):
                await app.start(index, "c", debounce=KEY, request_id=request)
        pass_time(store, clock, QUIET_S - 10)
        assert await result_of(first, store, clock) == "b"
        for request, text in (("r-1", "a"), ("r-2", "b")):  # and when it has finished
            assert (await app.start(index, text, debounce=KEY, request_id=request)).run_id == first.run_id
        assert len(await store.find(RunQuery(limit=10))) == 1


async def test_simultaneous_starts_are_one_run(variant: EngineVariant) -> None:
    app, index, given = index_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        runs = await asyncio.gather(*[app.start(index, str(n), debounce=KEY) for n in range(50)])
        assert len({run.run_id for run in runs}) == 1
        assert sum(not run.is_reused for run in runs) == 1
        await settled(runs[0], 49)
        pass_time(store, clock, QUIET_S)
        last = [e.data for e in await runs[0].events() if isinstance(e.data, InputReplaced)][-1]
        assert f'"{await result_of(runs[0], store, clock)}"'.encode() in bytes(last.input)
    assert len(set(given)) == 1


async def test_a_waiting_run_is_cancelled_or_terminated_and_the_next_start_is_the_next_run(
    variant: EngineVariant,
) -> None:
    app, index, given = index_app()
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        first = await app.start(index, "a", debounce=KEY)
        await first.cancel(reason="no need")
        with pytest.raises(RunCancelled):
            await first.result()
        second = await app.start(index, "b", debounce=KEY)
        await app.start(index, "c", debounce=KEY)
        await second.terminate()
        with pytest.raises(RunCancelled):
            await second.result()
        third = await app.start(index, "d", debounce=KEY)
        assert [run.run_id[-7:] for run in (second, third)] == ["~000002", "~000003"]
        pass_time(store, clock, QUIET_S)
        assert await result_of(third, store, clock) == "d"
    assert set(given) == {"d"}


async def test_a_run_that_needs_approval_takes_inputs_until_it_is_approved(variant: EngineVariant) -> None:
    app, index, _ = index_app(requires_approval=True)
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        first = await app.start(index, "a", debounce=KEY)
        assert (await app.start(index, "b", debounce=KEY)).run_id == first.run_id
        await settled(first, 1)
        await first.approve("ann")
        await wait_for_event(first, "RunApproved")
        second = await app.start(index, "c", debounce=KEY)
        assert second.run_id != first.run_id
        pass_time(store, clock, QUIET_S - 1)
        assert "RunStarted" not in await event_types(first)
        pass_time(store, clock, 1)
        assert await result_of(first, store, clock) == "b"


@pytest.mark.parametrize("command", ["cancel", "terminate", "approve"])
async def test_no_input_is_taken_after_a_command_that_was_given_for_the_run_as_it_was(
    variant: EngineVariant, command: str
) -> None:
    """Also before a node has read the command: what was approved is not exchanged, and no start is cancelled by it."""
    app, index, given = index_app(requires_approval=command == "approve")
    async with store_with_virtual_time(variant) as (store, clock):
        async with app.connect(store):
            first = await app.start(index, "a", debounce=KEY)
            await getattr(first, command)("as it is")
            second = await app.start(index, "b", debounce=KEY)
            assert (await app.start(index, "c", debounce=KEY)).run_id == second.run_id == f"{first.run_id}~000002"
        async with variant.node(app, store):
            first, second = app.run(first.run_id), app.run(second.run_id)
            await settled(second, 1)
            if command == "approve":
                await second.approve()
                await asyncio.gather(*(wait_for_event(run, "RunApproved") for run in (first, second)))
            else:
                with pytest.raises(RunCancelled):
                    await first.result()
            pass_time(store, clock, QUIET_S)
            assert await result_of(second, store, clock) == "c"
            if command == "approve":
                assert await first.result() == "a"
    assert set(given) == ({"a", "c"} if command == "approve" else {"c"})


async def test_a_command_that_was_refused_leaves_the_run_open_for_inputs(variant: EngineVariant) -> None:
    def only_ann_approves(request: ControlRequest) -> Verdict:
        return request.command != "APPROVE" or request.actor == "ann"

    app, given = hf.App("search", authoriser=only_ann_approves), list[str]()

    @app.workflow(requires_approval=True)
    async def index(text: str) -> str:
        given.append(text)
        await hf.sleep(1)
        return text

    async with store_with_virtual_time(variant) as (store, clock):
        async with app.connect(store):
            first = await app.start(index, "a", debounce=KEY)
            with pytest.raises(NotPermitted):
                await first.approve(actor="bob")
            assert (await app.start(index, "b", debounce=KEY)).run_id == first.run_id
        async with variant.node(app, store):
            first = app.run(first.run_id)
            await settled(first, 1)
            await first.approve(actor="ann")
            await wait_for_event(first, "RunApproved")
            pass_time(store, clock, QUIET_S)
            assert await result_of(first, store, clock) == "b"
    assert set(given) == {"b"}


async def test_limits_count_the_run_when_its_time_has_come(variant: EngineVariant) -> None:
    """By the key of the last input; what waits for a place takes no other input."""
    app, index, _ = index_app(at_once=1)
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        busy = await app.start(index, "busy")
        await wait_for_event(busy, "TimerStarted")
        first = await app.start(index, "a", debounce=KEY)
        await app.start(index, "b", debounce=KEY)
        await settled(first, 1)
        pass_time(store, clock, QUIET_S)
        await busy.result()
        assert await result_of(first, store, clock) == "b"


async def test_a_timeout_counts_from_when_it_is_to_start(variant: EngineVariant) -> None:
    app = hf.App("search")

    @app.workflow
    async def index(text: str) -> str:
        return await hf.wait_signal("go", str)

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        first = await app.start(index, "a", debounce=KEY, execution_timeout=QUIET_S)
        pass_time(store, clock, QUIET_S - 1)
        await app.start(index, "b", debounce=KEY)
        await settled(first, 1)
        pass_time(store, clock, QUIET_S)
        await wait_for_event(first, "SignalWaiting")
        pass_time(store, clock, QUIET_S - 0.001)
        await first.signal("other")
        assert "RunTimedOut" not in await event_types(first)
        pass_time(store, clock, 0.001)
        with pytest.raises(RunTimedOut):
            await first.result()


async def test_retries_and_forks_have_the_last_input(variant: EngineVariant) -> None:
    app = hf.App("search")

    @app.workflow
    async def index(text: str) -> str:
        raise hf.WorkflowFailed(text)

    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        first = await app.start(index, "a", debounce=KEY)
        await app.start(index, "b", debounce=KEY)
        await settled(first, 1)
        pass_time(store, clock, QUIET_S)
        await wait_for_status(first, RunStatus.FAILED)
        forked = await first.fork()
        pass_time(store, clock, QUIET_S)
        with pytest.raises(hf.errors.RunFailed, match="b"):
            await forked.result()
        again = await first.retry_run()
        with pytest.raises(hf.errors.RunFailed, match="b"):
            await again.result()


async def test_what_cannot_be_debounced_is_refused_and_leaves_nothing(variant: EngineVariant) -> None:
    app = hf.App("search", limits=Limits(value_bytes=100))

    @app.workflow
    async def index(text: str) -> str:
        return text

    async with store_with_virtual_time(variant) as (store, _), variant.node(app, store):
        for wrong in (
            hf.Debounce("", 1, 2),
            hf.Debounce("a/b", 1, 2),
            hf.Debounce("x" * 101, 1, 2),
            hf.Debounce("a", 0, 2),
            hf.Debounce("a", 3, 2),
            hf.Debounce("a", True, 2),
            hf.Debounce("a", "1", 2),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidInput):
                await app.start(index, "x", debounce=wrong)
        for beside in (
            {"run_id": "r"},
            {"run_id": "r", "reuse": "return"},
            {"after": timedelta(1)},
            {"with_signal": {"name": "go", "signal_id": "s"}},
        ):
            with pytest.raises(InvalidInput, match="a debounced start has no"):
                await app.start(index, "x", debounce=KEY, **beside)
        assert await store.find(RunQuery(limit=10)) == []
        run = await app.start(index, "x", debounce=KEY)
        with pytest.raises(InvalidInput):
            await app.start(index, 7, debounce=KEY)
        with pytest.raises(PayloadTooLarge):
            await app.start(index, "x" * 200, debounce=KEY)
        [loaded] = await store.load([run.run_id])
        assert loaded is not None
        assert loaded.signals == ()


async def test_each_start_is_authorised(variant: EngineVariant) -> None:
    asked = list[ControlRequest]()

    async def authorise(request: ControlRequest) -> Verdict:
        asked.append(request)
        return b"secret" not in bytes(request.payload)

    app = hf.App("search", authoriser=authorise)

    @app.workflow
    async def index(text: str) -> str:
        return text

    async with store_with_virtual_time(variant) as (store, _), variant.node(app, store):
        run = await app.start(index, "a", debounce=KEY)
        with pytest.raises(NotPermitted):
            await app.start(index, "secret", debounce=KEY)
        assert [each.command for each in asked] == ["START", "START"]
        assert "InputReplaced" not in await event_types(run)


class LosesAnswers(StoreProxy):
    """Takes debounced starts and does not say so, a few times."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.left = 0

    async def create(self, runs: Any, claim_for: str | None = None) -> Any:
        answers = await self.inner.create(runs, claim_for)
        if self.left > 0 and any(new.plan_id == "index" for new in runs):
            self.left -= 1
            raise StoreUnavailable("the connection was lost")
        return answers


@pytest.mark.contract("WF-4", "QUE-1")
async def test_a_workflow_debounces_what_it_starts_and_each_of_its_starts_counts_once(variant: EngineVariant) -> None:
    """Also if the answer of the store was lost, and when it is replayed; callers outside share the key."""
    app, index, given = index_app()

    @app.workflow
    async def edit(texts: list[str], name: str | None = None) -> list[str]:
        found = []
        for text in texts:
            run: hf.RunHandle[str] = await hf.start(name or index, text=text, debounce=KEY)
            found.append(run.run_id)
            await hf.wait_signal("next")
        return found

    async with store_with_virtual_time(variant) as (inner, clock):
        store = LosesAnswers(inner)
        async with variant.node(app, store):
            store.left = 2
            editor = await app.start(edit, ["a", "b"], run_id="editor")
            for lost in (1, 2):
                await wait_for_event(editor, "StepRetried", lost)
                pass_time(store, clock, 1)
            await wait_for_event(editor, "SignalWaiting")
            [head] = await store.find(RunQuery(workflow="index"))
            run = app.run(head.run_id)
            store.left = 1
            await editor.signal("next")
            await wait_for_event(editor, "StepRetried", 3)
            pass_time(store, clock, 1)
            await wait_for_event(editor, "SignalWaiting", 2)
            await editor.signal("next")
            assert await editor.result() == [run.run_id, run.run_id]
            await settled(run, 1)
            by_name = await app.start(edit, ["c"], "index")
            await by_name.signal("next")
            assert await by_name.result() == [run.run_id]
            await settled(run, 2)
            assert (await app.start(index, "d", debounce=KEY)).run_id == run.run_id
            await settled(run, 3)
            assert store.left == 0
            pass_time(store, clock, QUIET_S)
            assert await result_of(run, store, clock) == "d"
            assert (await event_types(run)).count("InputReplaced") == 3
    assert set(given) == {"d"}


@pytest.mark.contract("FMT-2")
async def test_retention_takes_what_has_finished_and_no_input_of_what_waits(variant: EngineVariant) -> None:
    """The number of the next run goes on from the latest that is kept, and begins anew when there is none."""
    app, index, given = index_app()
    everything = PurgePolicy(finished_run_ms=0)
    async with store_with_virtual_time(variant) as (store, clock), variant.node(app, store):
        first = await app.start(index, "a", debounce=KEY, request_id="r-1")
        pass_time(store, clock, QUIET_S)
        assert await result_of(first, store, clock) == "a"
        second = await app.start(index, "b", debounce=KEY)
        await app.start(index, "c", debounce=KEY, request_id="r-3")
        await settled(second, 1)
        assert (await store.purge(everything)).runs == 1
        assert [head.run_id for head in await store.find(RunQuery(limit=10))] == [second.run_id]
        again = await app.start(index, "c", debounce=KEY, request_id="r-3")
        assert (again.run_id, second.run_id) == (second.run_id, f"{first.run_id}~000002")
        pass_time(store, clock, QUIET_S)
        assert await result_of(second, store, clock) == "c"
        third = await app.start(index, "d", debounce=KEY)
        assert third.run_id == f"{first.run_id}~000003"
        await third.terminate()
        with pytest.raises(RunCancelled):
            await third.result()
        clock.advance(ms=1)
        assert (await store.purge(everything)).runs == 2
        anew = await app.start(index, "a", debounce=KEY, request_id="r-1")
        assert (anew.run_id, anew.is_reused) == (first.run_id, False)
        pass_time(store, clock, QUIET_S)
        assert await result_of(anew, store, clock) == "a"
    assert set(given) == {"a", "c"}
