"""The store suite, debounced starts: which run a later input reaches, and that no run begins without it."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core.debounce import offer
from holdfast.core.messages import INPUT_STEP, SignalRequest, control_request
from holdfast.errors import Conflict, InvalidInput
from holdfast.store.port import CommitConflict, Committed, Created, Existing, NewRun, Store
from holdfast.store.types import Reuse
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run, read_mailbox
from holdfast.testing.store_suite.base import SuiteBase, check_refused, kinds, unchanged

TERMS = e.DebounceTerms(30_000, 100_000)


def asked(run_id: str = "doc", *, request: str, value: Any = None, of: str = "doc", **more: Any) -> NewRun:
    """Return a debounced start of the key `of`, which proposes this run id."""
    new = new_run(run_id, request_id=request, value=value, **more)
    [first, *others] = new.events
    assert isinstance(first.data, e.RunQueued)
    later: SignalRequest = offer(of, first.data.input, f"start {request}")
    return replace(
        new,
        events=(replace(first, data=replace(first.data, debounce=TERMS)), *others),
        signals=(later,),
        reuse=Reuse(run_id=of, policy="debounce"),
    )


class DebounceSuite(SuiteBase):
    """A later input reaches the run of its key that has not begun, or none: the store decides this atomically."""

    @pytest.mark.contract("QUE-6")
    async def test_a_later_input_is_accepted_once_by_the_run_that_has_not_begun(self, store: Store) -> None:
        """The first start has its own input; a retry changes nothing, and a different input under its id is refused."""
        [answer] = await store.create([asked(request="r1", value=1)])
        assert (answer.run_id, type(answer)) == ("doc", Created)  # type: ignore[union-attr]
        assert await read_mailbox(store, "doc") == []
        for proposed in ("doc", "doc~000002", "doc~000007"):
            [answer] = await store.create([asked(proposed, request="r2", value=2)])
            assert answer == Existing("doc", is_reused=True)
        [sent] = await read_mailbox(store, "doc")
        assert sent.step_id == INPUT_STEP
        async with unchanged(store):
            answers = await store.create([asked(request="r1", value=1), asked(request="r2", value=3)])
        assert answers[0] == Existing("doc")
        check_refused(answers[1], Conflict)

    @pytest.mark.contract("QUE-6")
    async def test_simultaneous_starts_are_one_run(self, store: Store, peer: Store) -> None:
        """Every input is accepted, except that of the run itself."""
        calls = [way.create([asked(request=f"r{n}", value=n)]) for n, way in enumerate([store, peer] * 5)]
        answers = [answer for [answer] in await asyncio.gather(*calls)]
        assert sorted(kinds(answers)) == ["Created"] + ["Existing"] * 9
        assert len(await read_mailbox(store, "doc")) == 9

    @pytest.mark.contract("QUE-6")
    async def test_a_run_that_has_begun_takes_no_input(self, store: Store, node: SampleNode) -> None:
        """Neither does a finished run: the answer names the next run, and retries of accepted inputs are recognised."""
        await store.create([asked(request="r1")])
        await store.create([asked(request="r2", value=2)])
        await node.claim()
        await node.step("doc")
        for last in (False, True):
            async with unchanged(store):
                again, other = await store.create([asked(request="r2", value=2), asked(request="r3", value=3)])
            assert again == Existing("doc", is_reused=True)
            assert check_refused(other, Conflict).details["restart_as"] == "doc~000002"
            if not last:
                await node.step("doc", complete())
        [answer] = await store.create([asked("doc~000002", request="r3", value=3)])
        assert isinstance(answer, Created)
        [answer] = await store.create([asked(request="r4", value=4)])
        assert answer == Existing("doc~000002", is_reused=True)

    @pytest.mark.contract("QUE-6")
    @pytest.mark.parametrize("command", ["CANCEL", "EMERGENCY_STOP", "APPROVE"])
    async def test_a_run_takes_no_input_after_a_command_that_decides_on_it(self, store: Store, command: Any) -> None:
        """This holds even before a turn has read it; a refused command, or a pause, decides nothing."""
        await store.create([asked(request="r1")])
        await store.deliver([control_request("doc", command, "bob", refusal="not bob", signal_id="c1")])
        await store.deliver([control_request("doc", "PAUSE", "ann", signal_id="c2")])
        [answer] = await store.create([asked(request="r2", value=2)])
        assert answer == Existing("doc", is_reused=True)
        await store.deliver([control_request("doc", command, "ann", signal_id="c3")])
        async with unchanged(store):
            again, other = await store.create([asked(request="r2", value=2), asked(request="r3", value=3)])
        assert again == Existing("doc", is_reused=True)
        assert check_refused(other, Conflict).details["restart_as"] == "doc~000002"
        [answer] = await store.create([asked("doc~000002", request="r3", value=3)])
        assert isinstance(answer, Created)

    @pytest.mark.contract("QUE-6")
    async def test_a_run_takes_inputs_for_so_long_at_most(self, store: Store, clock: VirtualClock) -> None:
        """The store's clock measures this from the run's creation."""
        await store.create([asked(request="r1")])
        clock.advance(ms=TERMS.at_most_ms - 1)
        [answer] = await store.create([asked(request="r2", value=2)])
        assert answer == Existing("doc", is_reused=True)
        clock.advance(ms=1)
        [answer] = await store.create([asked(request="r3", value=3)])
        assert check_refused(answer, Conflict).details["restart_as"] == "doc~000002"

    @pytest.mark.contract("QUE-6", "EVT-3")
    async def test_no_run_begins_without_an_input_that_was_accepted(self, store: Store, node: SampleNode) -> None:
        """A turn that was computed before does not commit; the next one has seen the input."""
        await store.create([asked(request="r1")])
        await node.claim()
        before = await node.load("doc")
        [answer] = await store.create([asked(request="r2", value=2)])
        assert answer == Existing("doc", is_reused=True)
        verdict = await node.commit(await node.turn(before))
        assert isinstance(verdict, CommitConflict)
        verdict = await node.commit(await node.turn(await node.load("doc")))
        assert isinstance(verdict, Committed)

    @pytest.mark.contract("QUE-6")
    async def test_a_start_without_its_input_is_refused(self, store: Store) -> None:
        """It has exactly one signal, which contains the input."""
        good = asked(request="r1")
        [later] = good.signals
        async with unchanged(store):
            for signals in ((), (later, later), (replace(later, step_id="x"),), (replace(later, signal_id=None),)):
                [answer] = await store.create([replace(good, signals=signals)])
                check_refused(answer, InvalidInput)
