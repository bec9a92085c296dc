"""The store suite, commit: which turns have a conflict and why, and the answer to a retry."""

import asyncio

import pytest
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from holdfast.core.events import EngineRunRef, Event, MarkerRecorded, UnknownBody
from holdfast.core.index_rows import Task
from holdfast.errors import InvalidInput
from holdfast.store.port import CommitConflict, Committed, Refused, Store, TaskQuery, Turn
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import (
    SampleNode,
    activity,
    complete,
    marker,
    message,
    new_run,
    read_history,
    record,
    signal,
    task,
    timer,
    wait,
)
from holdfast.testing.store_suite.base import SuiteBase, accept, kinds, unchanged


async def rich_turn(node: SampleNode, run_id: str = "run-1") -> Turn:
    """Return a turn of a new run that changes everything that a turn can change."""
    await node.start(run_id, wait("go"))
    await node.store.deliver([signal(run_id, "go", "payload"), message(run_id, "m-1")])
    todo = (wait("next"), timer(START + 60_000), task("approve"), activity("charge", idempotency_key="order-1"))
    run = await node.load(run_id)
    return await node.turn(run, *todo, records=[record(run_id)], release=True)


class CommitSuite(SuiteBase):
    """Winners and losers."""

    # --- winning

    @pytest.mark.contract("EVT-1", "EVT-2")
    async def test_committed_events_are_numbered_on_without_gaps(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The store numbers events and records when they were stored; turns may have one event, many or none."""
        await node.create("run-1")
        stamps = []
        for todo in ((marker("a"),), (marker("b"), marker("c"), marker("d")), (), (marker("e"),)):
            clock.advance(ms=1_000)
            before = await node.load("run-1")
            turn = await node.turn(before, *todo)
            version = before.head.version + len(turn.events)
            assert await node.commit(turn) == Committed(version, clock.now())
            after = (await node.load("run-1")).head
            assert (after.version, after.updated_at) == (version, clock.now())
            stamps += [clock.now()] * len(turn.events)
        history = await read_history(store, "run-1")
        assert [event.run_seq for event in history] == list(range(1, len(history) + 1))
        assert [event.persisted_at for event in history[1:]] == stamps

    @pytest.mark.contract("EVT-2", "WF-7")
    async def test_what_could_not_be_read_again_is_not_stored(self, store: Store, node: SampleNode) -> None:
        """A turn with a field of a wrong type is refused and leaves the run unchanged. A new run is refused as well."""
        await node.start("run-1")
        run = await node.load("run-1")
        turn = await node.turn(run, replace(task("approve"), route=None))
        before = await read_history(store, "run-1")
        assert await node.commit(turn) == CommitConflict("cannot be stored", run.head.version, run.head.lease_epoch)
        assert await read_history(store, "run-1") == before
        assert await store.find(TaskQuery()) == []
        await node.step("run-1", task("approve"))
        new = new_run("run-2")
        queued = replace(new.events[0], data=replace(new.events[0].data, run_request_id=None))
        [refused] = await store.create([replace(new, events=(queued,))])
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, InvalidInput)
        assert await store.load(["run-2"]) == [None]

    @pytest.mark.contract("EVT-2")
    async def test_every_field_of_an_event_is_kept(self, store: Store, node: SampleNode) -> None:
        """This includes rarely set fields; only `run_seq` and `persisted_at` are the store's."""
        run = await node.start("run-1")
        turn = await node.turn(run, marker("mark", {"b": [1, None, "é\u2028😀"]}))
        [event] = turn.events
        full = replace(
            event,
            run_seq=77,
            persisted_at=77,
            engine_attempt_id=12,
            logical_attempt_id=11,
            emitted_at=START - 123_456,
            adapter_version="other/9",
            engine_run_ref=EngineRunRef("node-a", 1, "other"),
            caused_by_signal_id="signal",
            parent_event_id="parent",
        )
        await node.commit(replace(turn, events=(full,)))
        [kept] = await store.read_events("run-1", after=2)
        assert kept == replace(full, run_seq=3, persisted_at=START)

    @pytest.mark.contract("EVT-2")
    async def test_event_of_an_unknown_type_is_preserved(self, store: Store, node: SampleNode) -> None:
        """A newer version's event is returned unchanged, including whitespace."""
        run = await node.start("run-1")
        turn = await node.turn(run, marker("mark"))
        body = UnknownBody(Raw(b'{ "what": "we cannot know" }'))
        future = replace(turn.events[0], event_type="FromTheFuture", data=body, schema_version=9)
        await node.commit(replace(turn, events=(future,)))
        [kept] = await store.read_events("run-1", after=2)
        assert kept == replace(future, run_seq=3, persisted_at=START)

    async def test_raw_values_in_events_are_kept_byte_for_byte(self, store: Store, node: SampleNode) -> None:
        """User values are never parsed."""
        run = await node.start("run-1")
        turn = await node.turn(run, marker("mark"))
        body = MarkerRecorded("mark", Raw(b'{"z": 1.0,  "a": 1e3}'))
        await node.commit(replace(turn, events=(replace(turn.events[0], data=body),)))
        [kept] = await store.read_events("run-1", after=2)
        assert isinstance(kept.data, MarkerRecorded)
        assert bytes(kept.data.value) == b'{"z": 1.0,  "a": 1e3}'

    @pytest.mark.contract("SIG-4")
    @pytest.mark.parametrize("state_after", [UNSET, Raw(b"null"), Raw(b'{ "total": 3 }')])
    async def test_state_after_a_signal_is_kept_or_kept_absent(
        self, store: Store, node: SampleNode, state_after: Raw | UnsetType
    ) -> None:
        """Replay must distinguish a handler's state, even if it is null, from no handler at all."""
        await node.start("run-1", wait("go"))
        await accept(store, signal("run-1", "go"))
        turn = await node.turn(await node.load("run-1"))
        [event] = turn.events
        received = replace(event, data=replace(event.data, state_after=state_after))
        await node.commit(replace(turn, events=(received,)))
        [kept] = await store.read_events("run-1", after=3)
        assert kept == replace(received, run_seq=4, persisted_at=START)

    # --- losing

    async def test_turn_of_an_unknown_run_loses(self, store: Store, node: SampleNode) -> None:
        """There is no history to append to."""
        turn = await rich_turn(node)
        async with unchanged(store):
            assert await node.commit(replace(turn, run_id="missing")) == CommitConflict("no such run")

    @pytest.mark.contract("OWN-1")
    @pytest.mark.parametrize("away", [-1, 1])
    async def test_turn_from_another_version_loses_without_a_trace(
        self, store: Store, node: SampleNode, away: int
    ) -> None:
        """It was computed from a different state of the run. This is reported before anything about the epoch."""
        turn = await rich_turn(node)
        stale = replace(turn, expected_version=turn.expected_version + away, epoch=7)
        async with unchanged(store):
            assert await node.commit(stale) == CommitConflict("version", turn.expected_version, 1)

    @pytest.mark.contract("OWN-1")
    @pytest.mark.parametrize("epoch", [0, 2])
    async def test_turn_under_another_epoch_loses_without_a_trace(
        self, store: Store, node: SampleNode, epoch: int
    ) -> None:
        """Its owner has lost the run, or never had it."""
        turn = await rich_turn(node)
        async with unchanged(store):
            answer = await node.commit(replace(turn, epoch=epoch))
        assert answer == CommitConflict("epoch", turn.expected_version, 1)

    @pytest.mark.contract("EVT-1", "INV")
    async def test_turn_of_a_finished_run_loses_without_a_trace(self, store: Store, node: SampleNode) -> None:
        """Nothing happens to a run after its end, even at the right version and epoch."""
        turn = await rich_turn(node)
        await node.step("run-1", complete())
        head = (await node.load("run-1")).head
        late = replace(turn, expected_version=head.version, epoch=head.lease_epoch)
        async with unchanged(store):
            for revived in (late, replace(late, events=())):
                assert await node.commit(revived) == CommitConflict("finished", head.version, head.lease_epoch)

    async def test_what_is_learnt_of_an_activity_after_the_end_is_kept(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """A turn without events on a finished run does not revive it: its time of end does not change."""
        await node.start("run-1", complete())
        clock.advance(ms=5)
        run = await node.step("run-1", records=[record("run-1")])
        assert (run.head.finished_at, run.head.version, run.records) == (START, 3, (record("run-1"),))

    @pytest.mark.contract("EVT-4")
    async def test_turn_that_would_append_an_event_again_is_a_conflict_that_names_it(
        self, store: Store, node: SampleNode
    ) -> None:
        """The key of an event is unique in its run; the answer contains the existing event."""
        turn = await rich_turn(node)
        history = await read_history(store, "run-1")
        again = replace(turn, events=(*turn.events, replace(history[1], run_seq=0, persisted_at=0)))
        async with unchanged(store):
            answer = await node.commit(again)
        assert answer == CommitConflict("event exists", turn.expected_version, 1, history[1])

    @pytest.mark.contract("EVT-4")
    async def test_turn_with_the_same_event_twice_loses(self, store: Store, node: SampleNode) -> None:
        """The key is unique within a turn as well."""
        turn = await rich_turn(node)
        async with unchanged(store):
            answer = await node.commit(replace(turn, events=(*turn.events, turn.events[0])))
        assert isinstance(answer, CommitConflict)
        assert answer.reason == "event exists"
        assert answer.existing is not None
        assert answer.existing.idempotency_key == turn.events[0].idempotency_key

    @pytest.mark.contract("EVT-4")
    async def test_same_event_key_in_two_runs_is_no_conflict(self, store: Store, node: SampleNode) -> None:
        """Keys are unique within a run, not in the store."""
        first = await node.turn(await node.start("run-1"), marker("mark"))
        second = await node.turn(await node.start("run-2"), marker("mark"))
        same = tuple(replace(event, run_id="run-2") for event in first.events)
        answers = await store.commit([first, replace(second, events=same)])
        assert kinds(answers) == ["Committed", "Committed"]

    @pytest.mark.contract("INV")
    async def test_turn_that_opens_a_second_task_for_a_wait_loses_without_a_trace(
        self, store: Store, node: SampleNode
    ) -> None:
        """A step has at most one open task, counting existing ones and those of the same turn."""
        turn = await rich_turn(node)
        twin = replace(turn.tasks[0], task_id="twin")
        async with unchanged(store):
            answer = await node.commit(replace(turn, tasks=(*turn.tasks, twin)))
        assert answer == CommitConflict("task is open", turn.expected_version, 1)
        await node.commit(turn)
        later = await node.turn(await node.load("run-1"), marker("mark"))
        async with unchanged(store):
            answer = await node.commit(replace(later, tasks=(twin,)))
        assert answer == CommitConflict("task is open", later.expected_version, 1)

    async def test_task_that_takes_the_place_of_one_closed_in_the_same_turn_is_no_conflict(
        self, store: Store, node: SampleNode
    ) -> None:
        """The state after the turn is what counts."""
        await node.start("run-1", task("approve"))
        turn = await node.turn(await node.load("run-1"), marker("mark"))
        old = Task(task_id="old", run_id="run-1", step_id="other", name="other", status="OPEN", created_at=START)
        assert isinstance(await node.commit(replace(turn, tasks=(old,))), Committed)
        turn = await node.turn(await node.load("run-1"), marker("mark-2"))
        change = (replace(old, task_id="new"), replace(old, status="CANCELLED"))
        assert isinstance(await node.commit(replace(turn, tasks=change)), Committed)

    # --- retrying

    @pytest.mark.contract("EVT-4", "STO-1")
    async def test_retry_of_a_committed_turn_gets_the_same_answer(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """After an unknown outcome the caller retries: immediately, after later turns, after the run has finished."""
        turn = await rich_turn(node)
        first = await node.commit(turn)
        assert isinstance(first, Committed)
        clock.advance(ms=5)
        async with unchanged(store):
            assert await node.commit(turn) == first
        await node.step("run-1", marker("later"))
        await node.step("run-1", complete())
        async with unchanged(store):
            assert await node.commit(turn) == first

    @pytest.mark.contract("OWN-1")
    async def test_retry_of_a_committed_turn_gets_the_same_answer_after_the_epoch_moved_on(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The turn is part of the history, whichever node owns the run now."""
        turn = await node.turn(await node.start("run-1"), marker("mark"))
        first = await node.commit(turn)
        clock.advance(ms=node.lease_ms)
        heir = SampleNode(store, "node-b")
        [run] = await heir.claim()
        assert run.head.lease_epoch == 2
        async with unchanged(store):
            assert await node.commit(turn) == first
        await heir.step("run-1", marker("mark-2"))
        async with unchanged(store):
            assert await node.commit(turn) == first

    @pytest.mark.contract("OWN-1")
    @pytest.mark.parametrize("other", [EngineRunRef("node-b", 1), EngineRunRef("node-a", 2)])
    async def test_equal_event_of_another_node_or_epoch_is_not_taken_for_a_retry(
        self, store: Store, node: SampleNode, other: EngineRunRef
    ) -> None:
        """Two owners that did the same are still two: the loser must not assume that its turn is in the history."""
        turn = await node.turn(await node.start("run-1"), marker("mark"))
        await node.commit(turn)
        twin = replace(turn, events=tuple(replace(event, engine_run_ref=other) for event in turn.events))
        async with unchanged(store):
            assert await node.commit(twin) == CommitConflict("version", 3, 1)

    @pytest.mark.contract("OWN-1")
    async def test_another_turn_that_begins_alike_is_not_taken_for_a_retry(
        self, store: Store, node: SampleNode
    ) -> None:
        """It loses: the turn was presumed lost and computed again, while the first one arrived after all."""
        run = await node.create("run-1")
        first = await node.turn(run, wait("go"))
        others = [await node.turn(run, *todo) for todo in ((marker("mark"),), (wait("go"), marker("mark")))]
        assert all(other.events[0] == first.events[0] for other in others)
        await node.commit(first)
        async with unchanged(store):
            for other in others:
                assert await node.commit(other) == CommitConflict("version", 3, 1)

    async def test_retry_of_a_turn_without_events_changes_nothing(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """A turn that only handled messages may be committed again, as long as nothing has happened since."""
        await node.start("run-1", wait("go"))
        await store.deliver([message("run-1", "stale", kind="TimerDue")])
        turn = await node.turn(await node.load("run-1"))
        assert turn.events == ()
        assert await node.commit(turn) == Committed(3, START)
        async with unchanged(store):
            assert await node.commit(turn) == Committed(3, START)
        await node.step("run-1", marker("mark"))
        async with unchanged(store):
            assert await node.commit(turn) == CommitConflict("version", 4, 1)

    # --- batches

    @pytest.mark.contract("OWN-1")
    async def test_losers_in_a_batch_do_not_disturb_winners(self, store: Store, node: SampleNode) -> None:
        """Each turn is answered at its own position, and only the winners are stored."""
        turns = [await rich_turn(node, f"run-{number}") for number in range(6)]
        losers = [
            replace(turns[1], expected_version=1),
            replace(turns[2], epoch=9),
            replace(turns[3], events=turns[3].events * 2),
            replace(turns[4], tasks=(*turns[4].tasks, replace(turns[4].tasks[0], task_id="twin"))),
        ]
        before = [await node.load(f"run-{number}") for number in range(6)]
        answers = await store.commit([turns[0], *losers, replace(turns[5], run_id="missing"), turns[5]])
        assert kinds([answers[0], answers[6]]) == ["Committed", "Committed"]
        assert [answer.reason for answer in answers if isinstance(answer, CommitConflict)] == [
            *("version", "epoch", "event exists", "task is open", "no such run")
        ]
        after = [await node.load(f"run-{number}") for number in range(6)]
        assert after[1:5] == before[1:5]
        assert [after[number].head.version for number in (0, 5)] == [
            turns[number].expected_version + len(turns[number].events) for number in (0, 5)
        ]

    @pytest.mark.contract("OWN-1")
    async def test_second_turn_of_a_run_in_a_batch_sees_the_first(self, store: Store, node: SampleNode) -> None:
        """From the same version it loses; from the version that the first one creates, it wins."""
        run = await node.start("run-1")
        first = await node.turn(run, marker("first"))
        stale = await node.turn(run, marker("stale"))
        following = replace(stale, expected_version=first.expected_version + 1)
        answers = await store.commit([first, stale, following])
        assert answers == [Committed(3, START), CommitConflict("version", 3, 1), Committed(4, START)]
        assert [event.step_id for event in await read_history(store, "run-1")] == [None, None, "first", "stale"]

    @pytest.mark.contract("OWN-1")
    async def test_run_released_by_a_turn_stays_free_in_the_rest_of_its_batch(
        self, store: Store, node: SampleNode
    ) -> None:
        """The next turn has the same epoch, so it counts; but it does not take the run back."""
        run = await node.start("run-1")
        first = await node.turn(run, marker("first"), release=True)
        second = replace(await node.turn(run, marker("second")), expected_version=first.expected_version + 1)
        assert kinds(await store.commit([first, second])) == ["Committed", "Committed"]
        assert (await node.load("run-1")).head.lease_owner is None

    async def test_same_turn_twice_in_a_batch_is_committed_once(self, store: Store, node: SampleNode) -> None:
        """The second is a retry of the first."""
        turn = await node.turn(await node.start("run-1"), marker("mark"))
        assert await store.commit([turn, turn]) == [Committed(3, START), Committed(3, START)]
        assert len(await read_history(store, "run-1")) == 3

    @pytest.mark.contract("OWN-1")
    async def test_of_simultaneous_turns_from_one_version_exactly_one_wins(
        self, store: Store, peer: Store, node: SampleNode
    ) -> None:
        """The store enforces this, not a lock of the caller."""
        run = await node.start("run-1")
        turns = [await node.turn(run, marker(f"mark-{number}")) for number in range(10)]
        ways = [store, peer] * 5
        calls = [way.commit([turn]) for way, turn in zip(ways, turns, strict=True)]
        answers = [answer for [answer] in await asyncio.gather(*calls)]
        assert sorted(kinds(answers)) == ["CommitConflict"] * 9 + ["Committed"]
        [winner] = [turn for turn, answer in zip(turns, answers, strict=True) if isinstance(answer, Committed)]
        history: list[Event] = await read_history(store, "run-1")
        assert [event.idempotency_key for event in history[2:]] == [winner.events[0].idempotency_key]

    async def test_commit_refuses_a_batch_over_the_limit_whole(self, store: Store, node: SampleNode) -> None:
        """One call is one transaction, so its size is bounded."""
        turn = await node.turn(await node.start("run-1"), marker("mark"))
        async with unchanged(store):
            with pytest.raises(InvalidInput):
                await store.commit([turn] * (self.limits.batch_items + 1))
        assert await store.commit([]) == []

    async def test_what_is_sent_after_the_commit_belongs_to_the_next_turn(self, store: Store, node: SampleNode) -> None:
        """A retry does not consume what arrived after the first attempt."""
        await node.start("run-1", wait("go"))
        await store.deliver([message("run-1", "m-1")])
        turn = await node.turn(await node.load("run-1"), marker("mark"))
        await node.commit(turn)
        await store.deliver([message("run-1", "m-1")])
        await accept(store, signal("run-1", "go"))
        await node.commit(turn)
        run = await node.load("run-1")
        assert ([kept.signal_id for kept in run.messages], len(run.signals)) == (["m-1"], 1)
