"""The store suite, signals: answers to the sender, retries, the order of acceptance, and lost records."""

import asyncio
import re

import pytest
from msgspec import Raw, json
from msgspec.structs import replace

from holdfast.core.codec import format_instant, parse_instant
from holdfast.core.messages import UPDATE_SIGNAL, AcceptedSignalResult, SignalRequest
from holdfast.errors import Conflict, InvalidInput, PayloadTooLarge, SignalAcceptanceIndeterminate
from holdfast.limits import MAILBOX_SIGNALS, Limits
from holdfast.store.port import Accepted, Duplicate, MailboxQuery, PurgePolicy, Refused, Store
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import SampleNode, complete, new_run, read_mailbox, signal, wait
from holdfast.testing.store_suite.base import (
    BAD_NAMES,
    MINUTE_MS,
    STRANGE_IDS,
    STRANGE_NAMES,
    SuiteBase,
    accept,
    check_deliver_refused,
    check_refused,
    deliver_one,
    kinds,
    unchanged,
)

UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"


class SignalSuite(SuiteBase):
    """Accepting signals in order, and once per id."""

    # --- acceptance

    @pytest.mark.contract("SIG-1", "SIG-2")
    async def test_accepted_signal_is_in_the_mailbox_under_its_storage_key(self, store: Store) -> None:
        """The key contains the store's time in fixed width, and its last part is the cursor."""
        await store.create([new_run("run-1")])
        result = await accept(store, signal("run-1", "go", {"n": 1}, signal_id="click-1", step_id="s-1"))
        [kept] = await store.find(MailboxQuery(run_id="run-1"))
        assert result == AcceptedSignalResult(
            accepted=True,
            workflow_id="run-1",
            signal_name="go",
            signal_id="click-1",
            accepted_at=START,
            signal_storage_key=f"workflow/run-1/signals/go/{kept.suffix}.json",
        )
        assert re.fullmatch(f"{TIME}_{UUID}", kept.suffix)
        assert kept.suffix == f"{format_instant(START)}_{kept.id}"
        assert (kept.run_id, kept.name, kept.signal_id, kept.step_id) == ("run-1", "go", "click-1", "s-1")
        assert (kept.payload, kept.accepted_at, kept.inbox_seq, kept.consumed_seq) == (Raw(b'{"n":1}'), START, 1, None)

    @pytest.mark.contract("SIG-5", "EVT-2")
    async def test_values_come_back_in_the_order_in_which_they_were_given(self, store: Store) -> None:
        """This holds for signals and events; a retry is the same, whatever order it is written in."""
        given, retried = (
            Raw(b'{"zeta":[{"b":1,"a":2}],"alpha":{"0":1,"-1":2}}'),
            Raw(b'{"alpha":{"-1":2,"0":1},"zeta":[{"a":2,"b":1}]}'),
        )
        node = SampleNode(store)
        await node.start("run-1", wait("go"))
        first = await accept(store, replace(signal("run-1", "go", signal_id="s-1"), payload=given))
        again = await deliver_one(store, replace(signal("run-1", "go", signal_id="s-1"), payload=retried))
        assert isinstance(again, Duplicate)
        assert again.result == first
        [kept] = await store.find(MailboxQuery(run_id="run-1"))
        assert kept.payload == given
        await node.step("run-1")
        [received] = [event.data for event in await store.read_events("run-1") if event.event_type == "SignalReceived"]
        assert received.payload == given  # type: ignore[attr-defined]

    @pytest.mark.contract("SIG-1", "SIG-5")
    async def test_storage_keys_are_different_whatever_the_names_contain(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """A separator within a name is escaped, so two runs or names never share a folder."""
        folders = set()
        await store.create([new_run(name) for name in STRANGE_NAMES])
        for run_id in STRANGE_NAMES:
            for name in STRANGE_NAMES:
                clock.advance(ms=MINUTE_MS)
                key = (await accept(store, signal(run_id, name))).signal_storage_key
                match = re.fullmatch(rf"(workflow/[^/]+/signals/[^/]+)/{TIME}_{UUID}\.json", key)
                assert match is not None, key
                folders.add(match.group(1))
        assert len(folders) == len(STRANGE_NAMES) ** 2

    @pytest.mark.contract("SIG-1")
    async def test_payload_is_kept_byte_for_byte(self, store: Store) -> None:
        """The store does not read, sort or reformat what a sender wrote."""
        payload = Raw('{ "b": 1.50, "a": [ null, "é\\u00e9" ] }'.encode())
        await store.create([new_run("run-1")])
        await accept(store, SignalRequest(run_id="run-1", name="go", payload=payload))
        [kept] = await store.find(MailboxQuery(run_id="run-1"))
        assert bytes(kept.payload) == bytes(payload)

    @pytest.mark.contract("SIG-3")
    async def test_signal_sent_before_anyone_waits_is_kept_and_loaded(self, store: Store, node: SampleNode) -> None:
        """It makes the run ready, and stays until a turn consumes it."""
        await node.start("run-1")
        await accept(store, signal("run-1", "go"))
        [run] = await node.claim()
        assert [kept.name for kept in run.signals] == ["go"]
        await node.step("run-1", wait("go"))
        assert await store.find(MailboxQuery(run_id="run-1")) == []

    # --- order

    @pytest.mark.contract("SIG-1", "SIG-2")
    async def test_order_is_acceptance_order_with_strictly_increasing_times(self, store: Store) -> None:
        """Signals of the same instant get different times, so keys sort in order of acceptance."""
        await store.create([new_run("run-1")])
        await store.deliver([signal("run-1", name) for name in ("b", "a", "b")])
        await store.deliver([signal("run-1", "a")])
        kept = await read_mailbox(store, "run-1")
        assert [found.name for found in kept] == ["b", "a", "b", "a"]
        assert [found.inbox_seq for found in kept] == [1, 2, 3, 4]
        assert [found.accepted_at for found in kept] == [START, START + 1, START + 2, START + 3]

    @pytest.mark.contract("SIG-1", "SIG-2")
    async def test_times_of_acceptance_increase_although_the_clock_is_set_back(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """Nothing can fall behind a cursor, whatever the clock does."""
        await store.create([new_run("run-1")])
        first = await accept(store, signal("run-1", "go"))
        clock.set_back(ms=3_600_000)
        second = await accept(store, signal("run-1", "go"))
        clock.advance(ms=7_200_000)
        third = await accept(store, signal("run-1", "go"))
        assert (first.accepted_at, second.accepted_at) == (START, START + 1)
        assert third.accepted_at == START + 3_600_000_000
        suffixes = [found.suffix for found in await read_mailbox(store, "run-1")]
        assert suffixes == sorted(suffixes)
        assert [parse_instant(suffix[:27]) for suffix in suffixes] == [
            result.accepted_at for result in (first, second, third)
        ]

    @pytest.mark.contract("SIG-8", "SIG-2")
    async def test_a_signal_has_what_the_clock_said_beside_its_time_of_acceptance(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Deadlines follow the clock, even after it was set back and the times of acceptance are ahead of it."""
        await node.start("run-1")
        await store.deliver([signal("run-1", "go"), signal("run-1", "go")])
        clock.set_back(ms=3_600_000)
        await accept(store, signal("run-1", "go"))
        expected = [START, START, START - 3_600_000_000]
        assert [found.received_at for found in await read_mailbox(store, "run-1")] == expected
        assert [found.received_at for found in (await node.load("run-1")).signals] == expected

    # --- large mailboxes

    @pytest.mark.contract("SIG-1", "SIG-3")
    async def test_of_a_large_mailbox_a_run_is_loaded_with_what_its_waits_can_take(self, clock: VirtualClock) -> None:
        """Unread signals of other names, and those for steps that do not wait, are not loaded, however many."""
        much = MAILBOX_SIGNALS + 5
        update = {"name": "rename", "input": None}
        sent = [
            *(signal("run-1", "go", "lost", step_id="gone") for _ in range(much)),
            *(signal("run-1", "other") for _ in range(much)),
            signal("run-1", "stop", "for it", step_id="stop"),
            *(signal("run-1", "go", number) for number in range(much)),
            signal("run-1", UPDATE_SIGNAL, update),
        ]
        async with self.opened(clock, Limits(signals_per_run_per_minute=10_000)) as store:
            node = SampleNode(store)
            for run_id in ("run-1", "run-2"):
                await node.start(run_id)
                await node.step(run_id, wait("go"), wait("stop"))
                delivered = await store.deliver([replace(request, run_id=run_id) for request in sent])
                assert all(isinstance(answer, Accepted) for answer in delivered)
            await node.create("run-3")
            oldest = [("go", number) for number in range(MAILBOX_SIGNALS)]
            expected = [("stop", "for it"), *oldest, (UPDATE_SIGNAL, update)]
            claimed = {run.head.run_id: run for run in await node.claim()}
            assert {run_id: run.is_whole for run_id, run in claimed.items()} == {
                "run-1": False,
                "run-2": False,
                "run-3": True,
            }
            for run in (claimed["run-1"], await node.load("run-1"), claimed["run-2"]):
                assert [(kept.name, json.decode(kept.payload)) for kept in run.signals] == expected
            assert len(await read_mailbox(store, "run-1")) == len(sent)

    @pytest.mark.contract("SIG-3")
    async def test_a_mailbox_that_is_not_large_is_loaded_whole_although_many_were_consumed(
        self, clock: VirtualClock
    ) -> None:
        """Only unread signals count."""
        async with self.opened(clock, Limits(signals_per_run_per_minute=10_000)) as store:
            node = SampleNode(store)
            await node.start("run-1")
            await store.deliver([signal("run-1", "go") for _ in range(MAILBOX_SIGNALS + 1)])
            assert not (await node.load("run-1")).is_whole
            await node.step("run-1", wait("go"))
            await node.step("run-1")
            run = await node.load("run-1")
            assert (run.is_whole, len(run.signals)) == (True, MAILBOX_SIGNALS)

    # --- the same signal again

    @pytest.mark.contract("SIG-5")
    async def test_without_an_id_every_request_is_accepted_with_a_fresh_one(self, store: Store) -> None:
        """A sender without an id asks for no deduplication, and gets none."""
        await store.create([new_run("run-1")])
        results = [await accept(store, signal("run-1", "go", "same")) for _ in range(3)]
        assert len({result.signal_id for result in results}) == 3
        assert len(await read_mailbox(store, "run-1")) == 3

    @pytest.mark.contract("SIG-5", "SIG-6")
    async def test_duplicate_gets_the_answer_of_the_first_sender(self, store: Store, clock: VirtualClock) -> None:
        """The canonical result is that of the first sender, including time and key, and nothing more is enqueued."""
        await store.create([new_run("run-1")])
        first = await accept(store, signal("run-1", "go", 1, signal_id="click-1"))
        clock.advance(ms=10)
        async with unchanged(store):
            assert await deliver_one(store, signal("run-1", "go", 1, signal_id="click-1")) == Duplicate(first)

    @pytest.mark.contract("SIG-5")
    async def test_duplicates_within_a_batch_are_enqueued_once(self, store: Store) -> None:
        """An item sees the ones before it."""
        await store.create([new_run("run-1")])
        answers = await store.deliver([signal("run-1", "go", value, signal_id="click-1") for value in (1, 1, 2)])
        assert kinds(answers) == ["Accepted", "Duplicate", "Conflict"]
        assert len(await read_mailbox(store, "run-1")) == 1

    @pytest.mark.contract("SIG-5")
    async def test_of_simultaneous_duplicates_exactly_one_is_enqueued(self, store: Store, peer: Store) -> None:
        """Insert-or-read is atomic: all senders get the same result."""
        await store.create([new_run("run-1")])
        calls = [way.deliver([signal("run-1", "go", 1, signal_id="click-1")]) for way in [store, peer] * 10]
        answers = [answer for [answer] in await asyncio.gather(*calls)]
        assert sorted(kinds(answers)) == ["Accepted"] + ["Duplicate"] * 19
        assert len({answer.result for answer in answers if not isinstance(answer, Refused)}) == 1
        assert len(await read_mailbox(store, "run-1")) == 1

    @pytest.mark.contract("SIG-5")
    async def test_id_is_scoped_to_run_and_name(self, store: Store) -> None:
        """The same id with another name or for another run is another signal."""
        await store.create([new_run("run-1"), new_run("run-2")])
        answers = await store.deliver(
            [
                signal("run-1", "go", signal_id="click-1"),
                signal("run-1", "stop", signal_id="click-1"),
                signal("run-2", "go", signal_id="click-1"),
            ]
        )
        assert kinds(answers) == ["Accepted"] * 3

    @pytest.mark.contract("SIG-5")
    async def test_same_id_with_another_payload_is_a_conflict(self, store: Store) -> None:
        """The refusal names the signal, but never contains the payload."""
        await store.create([new_run("run-1")])
        await accept(store, signal("run-1", "go", "first-secret", signal_id="click-1"))
        request = signal("run-1", "go", "other-secret", signal_id="click-1")
        error = await check_deliver_refused(
            store, request, Conflict, workflow_id="run-1", signal_name="go", signal_id="click-1"
        )
        assert "secret" not in str(error.as_dict())

    @pytest.mark.contract("SIG-5")
    async def test_ids_are_compared_byte_for_byte(self, store: Store, clock: VirtualClock) -> None:
        """Case, Unicode form, spaces, separators and escapes distinguish ids, and each is found again."""
        await store.create([new_run("run-1")])
        results = {}
        for signal_id in STRANGE_IDS:
            clock.advance(ms=MINUTE_MS)
            results[signal_id] = await accept(store, signal("run-1", "go", signal_id=signal_id))
            assert results[signal_id].signal_id == signal_id
        for signal_id, first in results.items():
            assert await deliver_one(store, signal("run-1", "go", signal_id=signal_id)) == Duplicate(first)
        assert [found.signal_id for found in await read_mailbox(store, "run-1")] == list(STRANGE_IDS)

    @pytest.mark.contract("SIG-5")
    async def test_names_and_ids_that_join_alike_are_different_signals(self, store: Store) -> None:
        """No separator can move a part of the name into the id, or of the run into the name."""
        await store.create([new_run("run"), new_run("run:go")])
        requests = [
            signal("run", "go:a", signal_id="b"),
            signal("run", "go", signal_id="a:b"),
            signal("run:go", "a", signal_id="b"),
            signal("run", "go/a", signal_id="b"),
            signal("run", "go", signal_id="a/b"),
        ]
        assert kinds(await store.deliver(requests)) == ["Accepted"] * 5
        assert kinds(await store.deliver(requests)) == ["Duplicate"] * 5

    @pytest.mark.contract("SIG-5")
    async def test_signal_that_was_consumed_is_still_a_duplicate(self, store: Store, node: SampleNode) -> None:
        """Consuming a signal does not free its id."""
        await node.start("run-1", wait("go"))
        first = await accept(store, signal("run-1", "go", signal_id="click-1"))
        await node.step("run-1", wait("go", "again"))
        async with unchanged(store):
            assert await deliver_one(store, signal("run-1", "go", signal_id="click-1")) == Duplicate(first)

    # --- refused before anything is stored

    @pytest.mark.contract("SIG-5")
    async def test_malformed_signal_id_is_refused(self, store: Store) -> None:
        """It is empty, over 128 UTF-8 bytes, not Unicode, or not a string. This holds even without such a run."""
        await store.create([new_run("run-1")])
        for bad in ("", "x" * 129, "é" * 65, "a\x00b", "\ud800", 7, b"id"):
            for run_id in ("run-1", "missing"):
                request = SignalRequest(run_id=run_id, name="go", signal_id=bad)  # type: ignore[arg-type]
                await check_deliver_refused(store, request, InvalidInput, field="signal_id")

    async def test_malformed_name_is_refused(self, store: Store) -> None:
        """The names of the run, the signal and the step have to follow the rules for names."""
        await store.create([new_run("run-1")])
        for field, named in (("run_id", "run_id"), ("name", "signal_name"), ("step_id", "step_id")):
            bads = [bad for bad in BAD_NAMES if not (field == "step_id" and bad is None)]
            async with unchanged(store):
                answers = await store.deliver(
                    [SignalRequest(**{"run_id": "run-1", "name": "go", field: bad}) for bad in bads]  # type: ignore[arg-type]
                )
            for answer in answers:
                check_refused(answer, InvalidInput, field=named)

    @pytest.mark.contract("SIG-11")
    async def test_payload_over_the_limit_is_refused(self, store: Store) -> None:
        """A payload of exactly the limit is accepted; one more byte is refused, even for a run that does not exist."""
        most = self.limits.signal_payload_bytes
        await store.create([new_run("run-1")])
        await accept(store, signal("run-1", "go", "x" * (most - 2)))
        for run_id in ("run-1", "missing"):
            request = signal(run_id, "go", "x" * (most - 1))
            await check_deliver_refused(store, request, PayloadTooLarge, size_bytes=most + 1, limit_bytes=most)

    # --- the record of acceptance

    @pytest.mark.contract("SIG-6")
    async def test_retry_after_the_retention_is_a_new_request(self, store: Store, clock: VirtualClock) -> None:
        """The first answer is kept until it expires, to the microsecond; then the id is free again."""
        await store.create([new_run("run-1")])
        request = signal("run-1", "go", signal_id="click-1")
        first = await accept(store, request)
        clock.advance(ms=self.limits.acceptance_retention_ms - 1, us=999)
        assert await deliver_one(store, request) == Duplicate(first)
        clock.advance(us=1)
        second = await accept(store, request)
        assert second.signal_storage_key != first.signal_storage_key
        assert await deliver_one(store, request) == Duplicate(second)
        assert len(await read_mailbox(store, "run-1")) == 2

    @pytest.mark.contract("SIG-6")
    async def test_another_payload_after_the_retention_is_a_new_request(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """An expired record conflicts with nothing."""
        await store.create([new_run("run-1")])
        await accept(store, signal("run-1", "go", 1, signal_id="click-1"))
        clock.advance(ms=self.limits.acceptance_retention_ms)
        await accept(store, signal("run-1", "go", 2, signal_id="click-1"))
        check_refused(await deliver_one(store, signal("run-1", "go", 1, signal_id="click-1")), Conflict)

    @pytest.mark.contract("SIG-6", "FMT-2")
    async def test_retry_after_its_record_was_purged_is_a_new_request(self, store: Store, clock: VirtualClock) -> None:
        """A purged record had expired, so its payload, which still exists, raises no doubt."""
        await store.create([new_run("run-1")])
        await accept(store, signal("run-1", "go", signal_id="click-1"))
        clock.advance(ms=self.limits.acceptance_retention_ms)
        assert (await store.purge(PurgePolicy())).acceptance_records == 1
        await accept(store, signal("run-1", "go", signal_id="click-1"))

    @pytest.mark.contract("SIG-6")
    async def test_payload_without_its_record_is_indeterminate(self, store: Store) -> None:
        """It may have been delivered: the error states that, with a correlation id, and nothing is enqueued."""
        await store.create([new_run("run-1")])
        await accept(store, signal("run-1", "go", "a-secret", signal_id="click-1"))
        await self.lose_acceptance_record(store, "run-1", "go", "click-1")
        for value in ("a-secret", "other-secret"):
            request = signal("run-1", "go", value, signal_id="click-1")
            error = await check_deliver_refused(
                store,
                request,
                SignalAcceptanceIndeterminate,
                workflow_id="run-1",
                signal_name="go",
                signal_id="click-1",
            )
            assert error.details["correlation_id"]
            assert "secret" not in str(error.as_dict())

    @pytest.mark.contract("SIG-6")
    async def test_indeterminate_signal_is_a_new_request_after_the_retention(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """The doubt ends when the record, if it existed, would have expired."""
        await store.create([new_run("run-1")])
        await accept(store, signal("run-1", "go", signal_id="click-1"))
        await self.lose_acceptance_record(store, "run-1", "go", "click-1")
        clock.advance(ms=self.limits.acceptance_retention_ms - 1)
        answer = await deliver_one(store, signal("run-1", "go", signal_id="click-1"))
        check_refused(answer, SignalAcceptanceIndeterminate)
        clock.advance(ms=1)
        assert isinstance(await deliver_one(store, signal("run-1", "go", signal_id="click-1")), Accepted)

    @pytest.mark.contract("SIG-6")
    async def test_lost_record_of_one_signal_raises_no_doubt_about_others(self, store: Store) -> None:
        """This holds for another id, another name, and a signal without an id."""
        await store.create([new_run("run-1")])
        await accept(store, signal("run-1", "go", signal_id="click-1"))
        await self.lose_acceptance_record(store, "run-1", "go", "click-1")
        others = [
            signal("run-1", "go", signal_id="click-2"),
            signal("run-1", "stop", signal_id="click-1"),
            signal("run-1", "go"),
        ]
        assert kinds(await store.deliver(others)) == ["Accepted"] * 3

    @pytest.mark.contract("SIG-5", "SIG-6")
    async def test_finished_run_still_answers_for_what_it_accepted(self, store: Store, node: SampleNode) -> None:
        """Duplicate, Conflict and doubt come before RunTerminal: the sender learns what happened to its signal."""
        await node.start("run-1")
        kept = await accept(store, signal("run-1", "go", 1, signal_id="kept"))
        await accept(store, signal("run-1", "go", 1, signal_id="lost"))
        await self.lose_acceptance_record(store, "run-1", "go", "lost")
        await node.step("run-1", complete())
        async with unchanged(store):
            assert await deliver_one(store, signal("run-1", "go", 1, signal_id="kept")) == Duplicate(kept)
            answers = await store.deliver(
                [
                    signal("run-1", "go", 2, signal_id="kept"),
                    signal("run-1", "go", 1, signal_id="lost"),
                    signal("run-1", "go", 1, signal_id="new"),
                ]
            )
        assert kinds(answers) == ["Conflict", "SignalAcceptanceIndeterminate", "RunTerminal"]
