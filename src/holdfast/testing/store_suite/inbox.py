"""The store suite, delivering: refusals in their order, waits, rates, and messages."""

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core.messages import CONTROL_SIGNAL, UPDATE_SIGNAL, Message
from holdfast.errors import InvalidInput, NotFound, NotWaiting, PayloadTooLarge, RateLimited, RunTerminal
from holdfast.limits import Limits
from holdfast.store.port import Accepted, Duplicate, Store
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, fail, message, new_run, read_mailbox, signal, wait
from holdfast.testing.store_suite.base import (
    BAD_NAMES,
    MINUTE_MS,
    SuiteBase,
    accept,
    check_deliver_refused,
    check_refused,
    deliver_one,
    kinds,
    unchanged,
)


class InboxSuite(SuiteBase):
    """Who may send what, and when."""

    # --- to whom

    @pytest.mark.contract("SIG-3")
    async def test_signal_to_an_unknown_run_is_refused(self, store: Store) -> None:
        """It is never accepted and then dropped."""
        await check_deliver_refused(store, signal("missing", "go"), NotFound, run_id="missing")

    @pytest.mark.contract("SIG-3")
    @pytest.mark.parametrize(("end", "status"), [(complete(), "COMPLETED"), (fail(), "FAILED")])
    async def test_signal_to_a_finished_run_is_refused(
        self, store: Store, node: SampleNode, end: object, status: str
    ) -> None:
        """It is never accepted and then dropped; the refusal contains how the run ended."""
        await node.start("run-1", end)  # type: ignore[arg-type]
        await check_deliver_refused(store, signal("run-1", "go"), RunTerminal, run_id="run-1", status=status)

    async def test_answers_come_one_by_one_and_a_refused_item_harms_no_other(self, store: Store) -> None:
        """Signals and messages may be mixed; each is answered at its own position."""
        await store.create([new_run("run-1")])
        answers = await store.deliver(
            [
                signal("missing", "go"),
                message("run-1", "m-1"),
                signal("run-1", "go", signal_id=""),
                signal("run-1", "go", signal_id="click-1"),
                message("missing", "m-1"),
                message("run-1", "m-1"),
                signal("run-1", "go", signal_id="click-1"),
                signal("run-1", "stop"),
            ]
        )
        assert kinds(answers) == [
            *("NotFound", "Accepted", "InvalidInput", "Accepted", "NotFound", "Duplicate", "Duplicate", "Accepted")
        ]
        assert [kept.name for kept in await read_mailbox(store, "run-1")] == ["go", "stop"]

    async def test_deliver_refuses_a_batch_over_the_limit_whole(self, store: Store) -> None:
        """One call is one transaction, so its size is bounded."""
        await store.create([new_run("run-1")])
        most = self.limits.batch_items
        async with unchanged(store):
            with pytest.raises(InvalidInput):
                await store.deliver([message("run-1", f"m-{number}") for number in range(most + 1)])
        answers = await store.deliver([message("run-1", f"m-{number}") for number in range(most)])
        assert kinds(answers) == ["Accepted"] * most
        assert await store.deliver([]) == []

    # --- the order of refusals

    @pytest.mark.contract("SIG-3", "SIG-11")
    async def test_signal_is_refused_for_the_first_reason_in_the_documented_order(
        self, store: Store, node: SampleNode
    ) -> None:
        """The run is finished, over its rate, and has no wait: each reason hides the later ones."""
        await node.start("run-1", wait("other"))
        for _ in range(self.limits.signals_per_run_per_minute):
            await accept(store, signal("run-1", "go"))
        pushy = signal("run-1", "go", require_waiting=True)
        await check_deliver_refused(store, pushy, NotWaiting)
        await check_deliver_refused(store, signal("run-1", "go"), RateLimited)
        await node.step("run-1", complete())
        await check_deliver_refused(store, pushy, RunTerminal)
        await check_deliver_refused(store, replace(pushy, signal_id=""), InvalidInput)
        big = signal("run-1", "go", "x" * self.limits.signal_payload_bytes, require_waiting=True)
        await check_deliver_refused(store, big, PayloadTooLarge)
        await check_deliver_refused(store, replace(big, signal_id=""), InvalidInput)

    @pytest.mark.contract("SIG-5", "SIG-11")
    async def test_duplicate_is_answered_although_the_rate_is_exceeded_and_there_is_no_wait(self, store: Store) -> None:
        """A retry of what was accepted is not a new request, so reasons against new ones do not apply."""
        await store.create([new_run("run-1")])
        first = await accept(store, signal("run-1", "go", signal_id="click-1"))
        for _ in range(self.limits.signals_per_run_per_minute - 1):
            await accept(store, signal("run-1", "go"))
        async with unchanged(store):
            again = signal("run-1", "go", signal_id="click-1", require_waiting=True)
            assert await deliver_one(store, again) == Duplicate(first)

    # --- require_waiting

    @pytest.mark.contract("SIG-3")
    async def test_required_wait_must_be_open_for_that_name(self, store: Store, node: SampleNode) -> None:
        """A wait for another name, or of another run, does not count."""
        await node.start("run-1", wait("go"))
        await node.start("run-2", wait("stop"))
        request = signal("run-2", "go", require_waiting=True)
        await check_deliver_refused(store, request, NotWaiting, workflow_id="run-2", signal_name="go")
        await accept(store, signal("run-1", "go", require_waiting=True))

    @pytest.mark.contract("SIG-3")
    async def test_required_wait_must_not_be_taken_by_a_signal_ahead(self, store: Store, node: SampleNode) -> None:
        """Two waits take two signals; a third signal finds no wait until the program waits again."""
        await node.start("run-1", wait("go", "first"), wait("go", "second"))
        pushy = signal("run-1", "go", require_waiting=True)
        await accept(store, pushy)
        await accept(store, signal("run-1", "go"))
        await check_deliver_refused(store, pushy, NotWaiting)
        await node.step("run-1", wait("go", "third"))
        await accept(store, pushy)

    @pytest.mark.contract("SIG-3")
    async def test_signals_of_other_names_are_not_ahead(self, store: Store, node: SampleNode) -> None:
        """Each name has its own inbox."""
        await node.start("run-1", wait("go"))
        await accept(store, signal("run-1", "stop"))
        await accept(store, signal("run-1", "go", require_waiting=True))

    @pytest.mark.contract("SIG-3")
    async def test_required_wait_of_a_step_is_exactly_that_one(self, store: Store, node: SampleNode) -> None:
        """A signal addressed by step finds only that wait, and only earlier signals to it count as ahead."""
        await node.start("run-1", wait("go", "first"), wait("go", "second"))
        to_third = signal("run-1", "go", step_id="third", require_waiting=True)
        await check_deliver_refused(store, to_third, NotWaiting)
        await check_deliver_refused(store, replace(to_third, name="stop", step_id="first"), NotWaiting)
        for step_id in ("first", "second"):
            await accept(store, replace(to_third, step_id=step_id))
            await check_deliver_refused(store, replace(to_third, step_id=step_id), NotWaiting)

    @pytest.mark.contract("SIG-3", "SIG-9")
    async def test_signals_ahead_take_the_waits_that_they_will_take(self, store: Store, node: SampleNode) -> None:
        """Signals without an address take the oldest wait; signals that are too late for their wait take none."""
        await node.start("run-1", wait("go", "z-first"), wait("go", "a-second"))
        pushy = signal("run-1", "go", require_waiting=True)
        await accept(store, signal("run-1", "go"))
        await check_deliver_refused(store, replace(pushy, step_id="z-first"), NotWaiting)
        await accept(store, signal("run-1", "go", step_id="z-first"))
        await accept(store, signal("run-1", "go", step_id="nowhere"))
        await accept(store, replace(pushy, step_id="a-second"))
        await check_deliver_refused(store, pushy, NotWaiting)

    @pytest.mark.contract("SIG-3", "SIG-9")
    async def test_a_wait_that_only_an_addressed_signal_takes_is_no_longer_there(
        self, store: Store, node: SampleNode
    ) -> None:
        """Of two waits, one is taken by its address; a single signal without an address still finds the other."""
        await node.start("run-1", wait("go", "first"), wait("go", "second"))
        await accept(store, signal("run-1", "go", step_id="first"))
        pushy = signal("run-1", "go", require_waiting=True)
        await accept(store, pushy)
        await check_deliver_refused(store, pushy, NotWaiting)
        await check_deliver_refused(store, replace(pushy, step_id="second"), NotWaiting)

    @pytest.mark.contract("SIG-3", "SIG-8")
    async def test_a_wait_whose_time_is_over_is_no_longer_there(
        self, store: Store, node: SampleNode, clock: VirtualClock
    ) -> None:
        """It takes what arrived in time, to the microsecond, and nothing else, even if no turn has closed it yet."""
        until = clock.now() + 1_000
        for run_id in ("run-1", "run-2"):
            await node.start(run_id, wait("go", "first", until), wait("go", "second", until), wait("go", "third"))
        first_run, second_run = (signal(f"run-{number}", "go", require_waiting=True) for number in (1, 2))
        clock.advance(us=1_000)
        await accept(store, replace(first_run, step_id="second"))
        await check_deliver_refused(store, replace(first_run, step_id="first"), NotWaiting)  # it would be too late
        await accept(store, signal("run-2", "go"))
        clock.advance(us=1)
        await check_deliver_refused(store, replace(first_run, step_id="first"), NotWaiting)
        await accept(store, first_run)
        await check_deliver_refused(store, first_run, NotWaiting)
        await accept(store, signal("run-2", "go", step_id="second"))
        await accept(store, replace(second_run, step_id="third"))
        await check_deliver_refused(store, second_run, NotWaiting)

    # --- rate

    @pytest.mark.contract("SIG-11")
    async def test_rate_is_limited_in_a_sliding_minute(self, store: Store, clock: VirtualClock) -> None:
        """Over the limit the sender gets the delay; then there is room for exactly as many as have left the window."""
        await store.create([new_run("run-1")])
        for _ in range(self.limits.signals_per_run_per_minute):
            await accept(store, signal("run-1", "go"))
            clock.advance(ms=1_000)
        spent = self.limits.signals_per_run_per_minute * 1_000
        request = signal("run-1", "go")
        await check_deliver_refused(store, request, RateLimited, workflow_id="run-1", retry_after_ms=MINUTE_MS - spent)
        clock.advance(ms=MINUTE_MS - spent - 1, us=999)
        await check_deliver_refused(store, request, RateLimited, retry_after_ms=1)
        clock.advance(us=1)
        await accept(store, request)
        await check_deliver_refused(store, request, RateLimited, retry_after_ms=1_000)
        clock.advance(ms=1_000)
        await accept(store, request)

    @pytest.mark.contract("SIG-11")
    async def test_rate_counts_accepted_signals_of_one_run_only(self, store: Store) -> None:
        """Other runs, duplicates and refusals do not count; a batch counts item by item."""
        await store.create([new_run("run-1"), new_run("run-2")])
        most = self.limits.signals_per_run_per_minute
        await store.deliver([signal("run-2", "go") for _ in range(most)])
        same = signal("run-1", "go", signal_id="click-1")
        refused = signal("run-1", "go", require_waiting=True)
        await store.deliver([same, same, refused, same, refused])
        answers = await store.deliver([signal("run-1", "go") for _ in range(most)])
        assert kinds(answers) == ["Accepted"] * (most - 1) + ["RateLimited"]

    @pytest.mark.contract("SIG-11", "WF-6", "SIG-13")
    async def test_rate_counts_nothing_of_the_engines_own(self, store: Store) -> None:
        """Updates and operators' commands are not signals of a sender: they are not refused, and do not count."""
        await store.create([new_run("run-1")])
        most = self.limits.signals_per_run_per_minute
        update, command = {"name": "poke", "input": None}, {"name": "PAUSE", "actor": "ann"}
        own = [signal("run-1", *each) for each in ((UPDATE_SIGNAL, update), (CONTROL_SIGNAL, command))] * most
        plain = [signal("run-1", "go") for _ in range(most)]
        assert kinds(await store.deliver([*own, *plain[1:], *own])) == ["Accepted"] * (len(own) * 2 + most - 1)
        assert kinds(await store.deliver([plain[0], *own, plain[0], own[0]])) == [
            *["Accepted"] * (len(own) + 1),
            "RateLimited",
            "Accepted",
        ]

    @pytest.mark.contract("SIG-11")
    async def test_rate_holds_when_the_clock_is_set_back(self, store: Store, clock: VirtualClock) -> None:
        """No sender is refused for longer than a minute, even after a clock change, and the limit still holds."""
        await store.create([new_run("run-1")])
        full = [signal("run-1", "go") for _ in range(self.limits.signals_per_run_per_minute)]
        await store.deliver(full)
        clock.advance(ms=2 * MINUTE_MS)
        assert kinds(await store.deliver(full)) == ["Accepted"] * len(full)
        clock.set_back(ms=2 * MINUTE_MS - 1_000)
        assert kinds(await store.deliver(full)) == ["Accepted"] * len(full)
        request = signal("run-1", "go")
        await check_deliver_refused(store, request, RateLimited, retry_after_ms=MINUTE_MS)
        clock.advance(ms=MINUTE_MS)
        await accept(store, request)

    @pytest.mark.contract("SIG-11")
    async def test_default_limits_are_the_contracts(self, clock: VirtualClock) -> None:
        """They are 64 KB for a payload, and 60 signals per run and minute."""
        async with self.opened(clock, Limits()) as store:
            await store.create([new_run("run-1")])
            answers = await store.deliver([signal("run-1", "go") for _ in range(61)])
            assert kinds(answers) == ["Accepted"] * 60 + ["RateLimited"]
            clock.advance(ms=MINUTE_MS)
            await accept(store, signal("run-1", "go", "x" * (64 * 1024 - 2)))
            await check_deliver_refused(store, signal("run-1", "go", "x" * (64 * 1024 - 1)), PayloadTooLarge)

    # --- messages

    @pytest.mark.contract("MSG-1")
    async def test_message_is_kept_with_its_whole_envelope(self, store: Store, node: SampleNode) -> None:
        """What was delivered is what is loaded; it makes the run ready immediately."""
        await node.start("run-1")
        envelope = Message(
            signal_id="m-1",
            run_id="run-1",
            type="TimerDue",
            occurred_at=START - 5,
            due_at=START - 3,
            expected_version=2,
            waiting_token="go@2",
            step_id="go",
            runtime_provider="other",
            payload=Raw(b'{ "n": [1, 2] }'),
        )
        assert await deliver_one(store, envelope) == Accepted(None)
        run = await node.load("run-1")
        assert (run.messages, run.head.ready_at) == ((envelope,), START - 3)

    @pytest.mark.contract("MSG-2")
    async def test_message_is_accepted_once_by_its_id(self, store: Store, node: SampleNode) -> None:
        """A second message with the id of a waiting one changes nothing, whatever it contains."""
        await node.start("run-1")
        await store.deliver([message("run-1", "m-1")])
        async with unchanged(store):
            answers = await store.deliver(
                [message("run-1", "m-1"), message("run-1", "m-1", kind="RetryDue", due_at=START - 1)]
            )
        assert answers == [Duplicate(None), Duplicate(None)]

    @pytest.mark.contract("MSG-2")
    async def test_message_ids_are_scoped_to_their_run(self, store: Store, node: SampleNode) -> None:
        """Two runs may have messages with the same id, and signal ids are separate."""
        await node.start("run-1")
        await node.start("run-2")
        answers = await store.deliver(
            [message("run-1", "m-1"), message("run-2", "m-1"), signal("run-1", "go", signal_id="m-1")]
        )
        assert kinds(answers) == ["Accepted"] * 3

    @pytest.mark.contract("TMR-1")
    async def test_message_is_handed_out_when_it_is_due_and_never_before(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """It is not a microsecond early by the store's clock."""
        await node.start("run-1")
        later = message("run-1", "m-1", due_at=START + 5_000)
        await store.deliver([later])
        clock.advance(us=4_999)
        assert (await node.load("run-1")).messages == ()
        assert await node.claim() == []
        clock.advance(us=1)
        [run] = await node.claim()
        assert run.messages == (later,)

    async def test_messages_are_handed_out_earliest_first(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The due time decides, whatever the order of delivery; without one, a message is due at delivery."""
        await node.start("run-1")
        late, early = message("run-1", "a", due_at=START + 3_000), message("run-1", "z", due_at=START + 1_000)
        await store.deliver([late])
        clock.advance(ms=2)
        now = message("run-1", "m")
        await store.deliver([now, early])
        clock.advance(ms=1)
        assert (await node.load("run-1")).messages == (early, now, late)

    async def test_message_to_an_unknown_or_finished_run_is_refused(self, store: Store, node: SampleNode) -> None:
        """A finished run has no messages."""
        await node.start("run-1", complete())
        await check_deliver_refused(store, message("missing", "m-1"), NotFound, run_id="missing")
        await check_deliver_refused(store, message("run-1", "m-1"), RunTerminal, run_id="run-1", status="COMPLETED")

    async def test_malformed_message_is_refused(self, store: Store) -> None:
        """Its run, id and type are checked before anything else."""
        await store.create([new_run("run-1")])
        for field in ("run_id", "signal_id"):
            async with unchanged(store):
                answers = await store.deliver([replace(message("run-1"), **{field: bad}) for bad in BAD_NAMES])
            for answer in answers:
                check_refused(answer, InvalidInput, field=field)
        unknown = replace(message("missing"), type="Surprise")
        await check_deliver_refused(store, unknown, InvalidInput, field="type")
