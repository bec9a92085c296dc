"""The store suite, signals that come with the start of a run, and signals that runs send."""

import asyncio

import pytest
from msgspec.structs import replace

from holdfast.core.messages import SignalRequest
from holdfast.errors import Conflict, InvalidInput, NotWaiting, PayloadTooLarge, RunTerminal
from holdfast.store.port import Accepted, Created, Duplicate, Existing, NewRun, Refused, Store
from holdfast.testing.samples import SampleNode, complete, marker, new_run, read_mailbox, signal, wait
from holdfast.testing.store_suite.base import SuiteBase, check_refused, kinds, unchanged


def with_signals(new: NewRun, *signals: SignalRequest) -> NewRun:
    """Return a run that begins with these signals."""
    return replace(new, signals=signals)


class FirstSignalSuite(SuiteBase):
    """A run and its first signals are stored together."""

    @pytest.mark.contract("SIG-9", "SIG-3", "QUE-4")
    @pytest.mark.parametrize("owner", [None, "node-a"])
    async def test_a_run_begins_with_its_signals_in_the_mailbox(
        self, store: Store, node: SampleNode, owner: str | None
    ) -> None:
        """They are accepted as by `deliver`, in their order, and the run's turn finds them."""
        await store.renew("node-a", 60_000)
        first = signal("any", "go", 1, signal_id="click-1")
        new = with_signals(new_run("run-1"), first, signal("any", "go", 2), signal("any", "stop", 3))
        [answer] = await store.create([new], owner)
        assert isinstance(answer, Created)
        assert kinds(answer.signals) == ["Accepted"] * 3
        kept = await read_mailbox(store, "run-1")
        assert [(found.name, bytes(found.payload), found.inbox_seq) for found in kept] == [
            ("go", b"1", 1),
            ("go", b"2", 2),
            ("stop", b"3", 3),
        ]
        assert kept[0].signal_id == "click-1"
        [run] = await node.claim()
        assert [found.inbox_seq for found in run.signals] == [1, 2, 3]
        assert await store.deliver([replace(first, run_id="run-1")]) == [
            Duplicate(delivered.result) for delivered in answer.signals[:1] if isinstance(delivered, Accepted)
        ]

    @pytest.mark.contract("SIG-9", "QUE-1", "SIG-5")
    async def test_signals_of_a_request_that_was_made_before_go_to_its_run(self, store: Store) -> None:
        """The run is the same. A signal with an id is there once; one without is added each time."""
        request = with_signals(
            new_run("run-1", request_id="r"), signal("x", "go", 1, signal_id="click-1"), signal("x", "go", 2)
        )
        await store.create([request])
        [answer] = await store.create([replace(request, run_id="run-2")])
        assert isinstance(answer, Existing)
        assert (answer.run_id, kinds(answer.signals)) == ("run-1", ["Duplicate", "Accepted"])
        assert [bytes(found.payload) for found in await read_mailbox(store, "run-1")] == [b"1", b"2", b"2"]

    @pytest.mark.contract("SIG-9", "QUE-1", "SIG-5")
    async def test_of_simultaneous_requests_with_one_signal_one_run_has_it_once(
        self, store: Store, peer: Store
    ) -> None:
        """The first request creates the run and its signal; the others find both."""
        request = with_signals(new_run("run-1", request_id="r"), signal("x", "go", signal_id="click-1"))
        calls = [way.create([replace(request, run_id=f"run-{n}")]) for n, way in enumerate([store, peer] * 5)]
        answers = [answer for [answer] in await asyncio.gather(*calls)]
        assert sorted(kinds(answers)) == ["Created"] + ["Existing"] * 9
        [run_id] = {answer.run_id for answer in answers if not isinstance(answer, Refused)}
        assert len(await read_mailbox(store, run_id)) == 1

    @pytest.mark.contract("SIG-9", "SIG-3", "SIG-11")
    async def test_what_could_never_be_accepted_keeps_the_run_from_being_created(self, store: Store) -> None:
        """Nothing is partially done: there is no run without its signal."""
        big = signal("x", "go", "x" * self.limits.signal_payload_bytes)
        many = [signal("x", "go")] * (self.limits.signals_per_run_per_minute + 1)
        twice = [signal("x", "go", number, signal_id="click-1") for number in (1, 2)]
        cases = [
            ((big,), PayloadTooLarge),
            ((signal("x", "go", signal_id=""),), InvalidInput),
            ((signal("x", ""),), InvalidInput),
            ((signal("x", "go", require_waiting=True),), NotWaiting),
            (tuple(twice), InvalidInput),
            (tuple(many), InvalidInput),
            (("go",), InvalidInput),
        ]
        for signals, error in cases:
            async with unchanged(store):
                [answer] = await store.create([replace(new_run("run-1"), signals=signals)])
            check_refused(answer, error)
        [answer] = await store.create([new_run("run-1")])
        assert isinstance(answer, Created)

    @pytest.mark.contract("SIG-9", "SIG-3")
    async def test_a_run_that_is_there_answers_for_each_signal(self, store: Store, node: SampleNode) -> None:
        """A different payload under the same id, and a signal to a finished run, are refused."""
        request = with_signals(new_run("run-1", request_id="r"), signal("x", "go", 1, signal_id="click-1"))
        await store.create([request])
        other = replace(request, signals=(signal("x", "go", 2, signal_id="click-1"), signal("x", "stop")))
        [answer] = await store.create([other])
        assert isinstance(answer, Existing)
        check_refused(answer.signals[0], Conflict)
        assert isinstance(answer.signals[1], Accepted)
        await node.claim()
        await node.step("run-1", complete())
        async with unchanged(store):
            [answer] = await store.create([replace(request, signals=(signal("x", "go"),))])
        assert isinstance(answer, Existing)
        check_refused(answer.signals[0], RunTerminal)

    @pytest.mark.contract("SIG-9", "SIG-10", "QUE-1")
    async def test_signals_for_a_run_of_another_version_are_left_to_the_caller(self, store: Store) -> None:
        """What that version declares decides whether they fit."""
        request = new_run("run-1", request_id="r")
        await store.create([request])
        other = with_signals(replace(request, run_id="run-2", plan_version="9"), signal("x", "go", 1, signal_id="a"))
        async with unchanged(store):
            assert await store.create([other]) == [Existing("run-1")]

    @pytest.mark.contract("SIG-9", "SIG-10", "QUE-1")
    async def test_no_run_is_created_with_signals_that_are_unfit(self, store: Store) -> None:
        """A repeated request is answered all the same, and delivers nothing."""
        unfit = InvalidInput("signal 'go': payload: not a number")
        request = with_signals(new_run("run-1", request_id="r"), signal("x", "go", 1, signal_id="a"))
        async with unchanged(store):
            assert await store.create([replace(request, unfit=unfit)]) == [Refused(unfit)]
        await store.create([replace(request, signals=())])
        async with unchanged(store):
            assert await store.create([replace(request, run_id="run-2", unfit=unfit)]) == [Existing("run-1")]

    @pytest.mark.contract("SIG-9", "QUE-1")
    async def test_a_request_with_another_input_delivers_nothing(self, store: Store) -> None:
        """A misused request id leaves no trace, not even of its signal."""
        await store.create([new_run("run-1", request_id="r", value=1)])
        misuse = with_signals(new_run("run-2", request_id="r", value=2), signal("x", "go"))
        async with unchanged(store):
            [answer] = await store.create([misuse])
        check_refused(answer, Conflict)
        async with unchanged(store):
            [answer] = await store.create([replace(new_run("run-1", request_id="r", value=1), signals=("go",))])
        check_refused(answer, InvalidInput)

    @pytest.mark.contract("SIG-9", "SIG-11", "SIG-5")
    async def test_what_runs_send_arrives_once_and_is_not_counted_by_the_minute(
        self, store: Store, node: SampleNode
    ) -> None:
        """The signal was recorded with a turn, so it is not rate-limited. A retry changes nothing."""
        await node.start("run-1", wait("go"))
        await node.start("run-2")
        most = self.limits.signals_per_run_per_minute
        sends = tuple(signal("run-1", "other", n, signal_id=f"sent-{n}") for n in range(most + 2))
        turn = await node.turn(await node.load("run-2"), marker())
        turn = replace(turn, sends=sends)
        await node.commit(turn)
        await store.commit([turn])
        assert [found.signal_id for found in await read_mailbox(store, "run-1")] == [s.signal_id for s in sends]
