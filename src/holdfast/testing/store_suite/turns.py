"""The store suite, turns: what one commit changes besides the history, and when a run is ready after it."""

import pytest
from msgspec import UNSET, Raw
from msgspec.structs import replace

from holdfast.core.commands import ContinueAsNew
from holdfast.core.events import ErrorInfo
from holdfast.core.index_rows import ActivityRecord, runtime_snapshot
from holdfast.core.messages import ActivitySucceeded
from holdfast.core.state import COMPLETED, PENDING, RUNNING, state_of
from holdfast.store.port import MailboxQuery, Store, TaskQuery, WaitQuery
from holdfast.testing import START, VirtualClock
from holdfast.testing.samples import (
    SampleNode,
    activity,
    answer,
    complete,
    fail,
    marker,
    message,
    read_history,
    read_mailbox,
    record,
    signal,
    task,
    timer,
    wait,
)
from holdfast.testing.store_suite.base import STRANGE_IDS, SuiteBase, accept


class TurnSuite(SuiteBase):
    """What a commit changes, and nothing else."""

    # --- the inbox

    @pytest.mark.contract("MSG-2")
    async def test_consumed_messages_are_gone_and_others_stay(self, store: Store, node: SampleNode) -> None:
        """Consuming messages and changing the state are one commit; other messages are handed out later."""
        await node.start("run-1")
        await store.deliver([message("run-1", name) for name in ("a", "b", "c")])
        turn = await node.turn(await node.load("run-1"), marker("mark"))
        await node.commit(replace(turn, consumed=("a", "c", "unknown")))
        run = await node.load("run-1")
        assert ([kept.signal_id for kept in run.messages], run.head.ready_at) == (["b"], START)

    @pytest.mark.contract("MSG-2")
    async def test_new_messages_are_left_for_the_run_itself(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Due messages are handed out immediately, and later ones when their time comes."""
        run = await node.start("run-1")
        turn = await node.turn(run, marker("mark"))
        new = (message("run-1", "now"), message("run-1", "later", due_at=START + 2_000))
        await node.commit(replace(turn, messages=new))
        assert (await node.load("run-1")).messages == new[:1]
        clock.advance(ms=2)
        assert (await node.load("run-1")).messages == new

    async def test_turn_may_replace_a_message_by_one_of_the_same_id(self, store: Store, node: SampleNode) -> None:
        """Consumption comes first, so a timer can be set again under its old name."""
        await node.start("run-1")
        await store.deliver([message("run-1", "again")])
        turn = await node.turn(await node.load("run-1"), marker("mark"))
        renewed = message("run-1", "again", due_at=START + 1_000)
        await node.commit(replace(turn, messages=(renewed,)))
        run = await node.load("run-1")
        assert (run.messages, run.head.ready_at) == ((), START + 1_000)

    @pytest.mark.contract("TMR-1")
    async def test_a_turns_message_takes_the_place_of_one_that_waits_under_its_id(
        self, store: Store, node: SampleNode
    ) -> None:
        """A message with a timer's id cannot keep the timer from firing."""
        await node.start("run-1")
        await store.deliver([message("run-1", "same", due_at=START + 1_000)])
        turn = await node.turn(await node.load("run-1"), marker("mark"))
        mine = message("run-1", "same")
        await node.commit(replace(turn, messages=(mine,)))
        run = await node.load("run-1")
        assert (run.messages, run.head.ready_at) == ((mine,), START)

    @pytest.mark.contract("SIG-4")
    async def test_received_signals_are_marked_with_the_event_that_consumed_them(
        self, store: Store, node: SampleNode
    ) -> None:
        """One commit advances the cursor and records the event; the receipt leads to it."""
        await node.start("run-1", wait("go", "first"), wait("go", "second"))
        for number in range(3):
            await accept(store, signal("run-1", "go", number))
        run = await node.step("run-1", marker("mark"))
        kept = await read_mailbox(store, "run-1")
        assert [found.consumed_seq for found in kept] == [5, 6, None]
        assert run.signals == (kept[2],)
        history = await read_history(store, "run-1")
        assert [event.event_type for event in history[4:6]] == ["SignalReceived", "SignalReceived"]
        assert run.head.snapshot is not None
        assert run.head.snapshot.signals == {"go": kept[1].suffix}

    @pytest.mark.contract("SIG-4")
    async def test_signal_of_a_turn_that_lost_is_delivered_again(self, store: Store, node: SampleNode) -> None:
        """A crash before the commit redelivers."""
        await node.start("run-1", wait("go"))
        await accept(store, signal("run-1", "go"))
        turn = await node.turn(await node.load("run-1"))
        await node.commit(replace(turn, epoch=9))
        [run] = await node.claim()
        assert [kept.name for kept in run.signals] == ["go"]

    # --- readiness

    async def test_run_that_only_waits_is_not_ready(self, store: Store, node: SampleNode) -> None:
        """A wait occupies no worker."""
        run = await node.start("run-1", wait("go"))
        assert run.head.ready_at is None
        assert await node.claim() == []

    @pytest.mark.contract("SIG-4", "INV")
    async def test_signal_that_came_between_claim_and_commit_keeps_the_run_ready(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The turn contains how far it had seen; a later signal wakes the run again."""
        run = await node.start("run-1", wait("go"))
        turn = await node.turn(run, marker("mark"))
        await accept(store, signal("run-1", "go"))
        clock.advance(ms=1)
        await node.commit(turn)
        [again] = await node.claim()
        assert [kept.name for kept in again.signals] == ["go"]

    @pytest.mark.contract("SIG-3")
    async def test_signal_that_a_turn_has_seen_and_not_wanted_does_not_make_the_run_ready_again(
        self, store: Store, node: SampleNode
    ) -> None:
        """It stays in the mailbox, and is loaded whenever the run is."""
        await node.start("run-1", wait("go"))
        await accept(store, signal("run-1", "other"))
        run = await node.step("run-1")
        assert (run.head.ready_at, [kept.name for kept in run.signals]) == (None, ["other"])
        await accept(store, signal("run-1", "go"))
        [run] = await node.claim()
        assert [kept.name for kept in run.signals] == ["other", "go"]

    @pytest.mark.contract("MSG-2", "INV")
    async def test_message_that_came_between_claim_and_commit_keeps_the_run_ready(
        self, store: Store, node: SampleNode
    ) -> None:
        """A turn consumes only the messages that it was handed."""
        run = await node.start("run-1", wait("go"))
        turn = await node.turn(run, marker("mark"))
        await store.deliver([message("run-1", "m-1")])
        await node.commit(turn)
        [again] = await node.claim()
        assert [kept.signal_id for kept in again.messages] == ["m-1"]

    @pytest.mark.contract("TMR-1")
    async def test_run_is_ready_when_its_earliest_message_is_due(self, store: Store, node: SampleNode) -> None:
        """An earlier message brings the instant forward."""
        run = await node.start("run-1", timer(START + 9_000, "late"), timer(START + 5_000, "early"))
        assert run.head.ready_at == START + 5_000
        await store.deliver([message("run-1", "m-1", due_at=START + 7_000)])
        assert (await node.load("run-1")).head.ready_at == START + 5_000
        await store.deliver([message("run-1", "m-2", due_at=START + 2_000)])
        assert (await node.load("run-1")).head.ready_at == START + 2_000

    # --- waits, tasks, records

    async def test_waits_are_opened_and_closed_with_the_turn(self, store: Store, node: SampleNode) -> None:
        """A wait can be found exactly while it is open."""
        await node.start("run-1", wait("go", until=START + 60_000), wait("stop"))
        found = await store.find(WaitQuery(run_id="run-1"))
        assert [(kept.step_id, kept.name, kept.since, kept.until) for kept in found] == [
            ("go", "go", START, START + 60_000),
            ("stop", "stop", START, None),
        ]
        await accept(store, signal("run-1", "go"))
        await node.step("run-1", wait("next"))
        assert [kept.step_id for kept in await store.find(WaitQuery(run_id="run-1"))] == ["next", "stop"]

    async def test_wait_that_is_opened_again_takes_the_place_of_the_old_one(
        self, store: Store, node: SampleNode
    ) -> None:
        """A step has one wait; every query finds its latest row."""
        await node.start("run-1", wait("go", until=START + 60_000))
        [old] = await store.find(WaitQuery())
        again = replace(old, name="stop", token="another", since=START + 1, until=None)
        turn = await node.turn(await node.load("run-1"), marker("mark"))
        await node.commit(replace(turn, waits_opened=(again,)))
        assert await store.find(WaitQuery()) == [again]
        assert await store.find(WaitQuery(name="go")) == []

    async def test_tasks_are_opened_and_changed_with_the_turn(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """The row of a task has its current state; completing the task is part of the commit that records it."""
        await node.start("run-1", task("approve", roles=("clerk", "boss"), assignee="ann"))
        [opened] = await store.find(TaskQuery())
        assert (opened.run_id, opened.step_id, opened.status) == ("run-1", "approve", "OPEN")
        assert (opened.roles, opened.assignee, opened.created_at) == (("clerk", "boss"), "ann", START)
        snapshot = (await node.load("run-1")).head.snapshot
        assert snapshot is not None
        assert snapshot.active_task_id == opened.task_id
        clock.advance(ms=1)
        await store.deliver([answer("run-1", "approve", snapshot.waiting_token or "", "bob", True)])
        await node.step("run-1")
        [closed] = await store.find(TaskQuery())
        assert closed == replace(opened, status="COMPLETED", completed_at=clock.now(), completed_by="bob")

    async def test_task_that_changes_hands_is_found_by_the_new_ones(self, store: Store, node: SampleNode) -> None:
        """A later row of the same task replaces the former one, in every query."""
        await node.start("run-1", task("approve", roles=("clerk",), assignee="ann"))
        [opened] = await store.find(TaskQuery())
        moved = replace(opened, roles=("boss",), assignee="bob")
        turn = await node.turn(await node.load("run-1"), marker("mark"))
        await node.commit(replace(turn, tasks=(moved,)))
        for query in (TaskQuery(assignee="bob"), TaskQuery(role="boss"), TaskQuery(status="OPEN")):
            assert await store.find(query) == [moved]
        for query in (TaskQuery(assignee="ann"), TaskQuery(role="clerk")):
            assert await store.find(query) == []

    @pytest.mark.contract("ACT-3")
    async def test_activity_records_are_kept_and_updated_by_their_scope(self, store: Store, node: SampleNode) -> None:
        """There is one record per activity, step and key; a later turn overwrites it. Completed ones are not loaded."""
        await node.start("run-1", activity("charge"))
        claimed = replace(record("run-1"), status="indeterminate", result=UNSET)
        other = replace(record("run-1", "ship", activity_name="ship"), status="failed", error=ErrorInfo("E", "m"))
        await node.step("run-1", records=[claimed, other])
        assert (await node.load("run-1")).records == (claimed, other)
        late = replace(claimed, status="timed-out", result=Raw(b'{ "ok": true }'), updated_at=START + 1)
        assert (await node.step("run-1", records=[late])).records == (late, other)
        done = replace(claimed, status="completed", result=Raw(b"true"), updated_at=START + 2)
        outcome = ActivitySucceeded("charge", 1, Raw(b"true"))
        run = await node.step("run-1", inputs=[outcome], records=[done])
        assert run.records == (other,)

    @pytest.mark.contract("ACT-3")
    async def test_activity_records_never_collide_whatever_their_parts_contain(
        self, store: Store, node: SampleNode
    ) -> None:
        """No separator can move a part of one field into the next."""
        parts = [("a:b", "c", "d"), ("a", "b:c", "d"), ("a", "b", "c:d"), ("a", "b:c:d", ""), ("a/b", "c", "d")]
        parts += [("a", "b", key) for key in STRANGE_IDS]
        kept = [
            record("run-1", step_id, activity_name=name, idempotency_key=key, result=number)
            for number, (name, step_id, key) in enumerate(parts)
        ]
        await node.start("run-1")
        run = await node.step("run-1", records=kept)

        def scope(known: ActivityRecord) -> tuple[str, str, str]:
            return known.activity_name, known.step_id, known.idempotency_key

        assert run.records == tuple(sorted(kept, key=scope))

    async def test_activity_records_belong_to_their_run(self, store: Store, node: SampleNode) -> None:
        """The run's id is part of their scope."""
        await node.start("run-1")
        await node.start("run-2")
        await node.step("run-1", records=[record("run-1")])
        assert (await node.load("run-2")).records == ()

    # --- the snapshot

    @pytest.mark.contract("PRJ-4", "INV")
    async def test_snapshot_equals_the_fold_of_the_events_after_each_turn(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Deleting it and folding the events would restore it, at any time in a run's life."""

        async def check(status: str) -> None:
            head = (await node.load("run-1")).head
            assert head.snapshot == runtime_snapshot(state_of("run-1", await read_history(store, "run-1")))
            assert head.snapshot is not None
            assert (head.status, head.snapshot.state_version) == (status, head.version)

        await node.create("run-1")
        await check(PENDING)
        await node.step("run-1", wait("go", until=START + 60_000), wait("go", "second"), task("approve"))
        await check(RUNNING)
        await accept(store, signal("run-1", "go"))
        await accept(store, signal("run-1", "go", step_id="second"))
        await node.step("run-1", activity("charge"), timer(START + 5_000))
        await check(RUNNING)
        clock.advance(ms=5)
        await node.step("run-1", inputs=[ActivitySucceeded("charge", 1)])
        await check(RUNNING)
        await node.step("run-1", fail())
        await check("FAILED")

    # --- the end

    @pytest.mark.contract("INV")
    async def test_finished_run_is_never_ready_and_keeps_no_messages_waits_or_owner(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """What remains is what can be queried: history, mailbox, tasks and records."""
        await node.start("run-1", wait("go"), timer(START + 5_000), task("approve"))
        await store.deliver([message("run-1", "m-1", due_at=START + 9_000), signal("run-1", "other")])
        turn = await node.turn(await node.load("run-1"), complete(), records=[record("run-1")])
        await accept(store, signal("run-1", "late"))
        clock.advance(ms=1)
        await node.commit(replace(turn, messages=(message("run-1", "m-2"),), waits_closed=()))
        clock.advance(ms=node.lease_ms)
        run = await node.load("run-1")
        head = run.head
        assert (head.status, head.ready_at, head.lease_owner, head.lease_epoch) == (COMPLETED, None, None, 1)
        assert (head.finished_at, head.updated_at) == (START + 1_000, START + 1_000)
        assert (run.messages, await store.find(WaitQuery())) == ((), [])
        assert [kept.name for kept in run.signals] == ["other", "late"]
        assert (len(run.records), len(await store.find(MailboxQuery(run_id="run-1")))) == (1, 2)
        assert [kept.status for kept in await store.find(TaskQuery())] == ["CANCELLED"]
        assert await SampleNode(store, "node-b").claim() == []
        assert (await store.stats()).messages == 0

    @pytest.mark.contract("OWN-1")
    async def test_released_run_is_free_and_ready_only_if_something_waits(self, store: Store, node: SampleNode) -> None:
        """A turn that releases its run leaves nothing undone, so the run is not woken by it; the epoch stays."""
        await node.start("run-1", wait("go"))
        run = await node.step("run-1", marker("mark"), release=True)
        assert (run.head.lease_owner, run.head.lease_epoch, run.head.ready_at) == (None, 1, None)
        other = SampleNode(store, "node-b")
        assert await other.claim() == []
        await accept(store, signal("run-1", "go"))
        [run] = await other.claim()
        assert (run.head.lease_owner, run.head.lease_epoch) == ("node-b", 2)

    # --- a rotation

    @pytest.mark.contract("CAN-1")
    async def test_a_rotation_keeps_what_belongs_to_the_steps_that_it_carries_over(
        self, store: Store, clock: VirtualClock, node: SampleNode
    ) -> None:
        """Waits, tasks, jobs, records and timers of other steps are gone, and a fold can begin at the rotation."""
        kept = (
            wait("go", "wait", START + 60_000_000),
            replace(task("ask"), payload=Raw(b'{"cents":7}')),
            timer(START + 2_000),
            replace(activity("far", idempotency_key="k-1"), queue="mail", input=Raw(b'[["deep"]]')),
            replace(activity("near"), input=Raw(b'{"input":1}')),
        )
        others = (wait("go", "other"), task("other task"), replace(activity("other job"), queue="mail"))
        await node.start("run-1", *kept, *others)
        steps = tuple(command.step_id for command in kept)
        await node.step("run-1", ContinueAsNew(input=Raw(b"[1]"), steps=steps))
        clock.advance(ms=2)
        assert [found.step_id for found in await store.find(WaitQuery())] == ["wait"]
        assert {found.step_id: found.status for found in await store.find(TaskQuery())} == {
            "ask": "OPEN",
            "other task": "CANCELLED",
        }
        [job] = await store.acquire_jobs(node.name, ["mail"], ["far", "other job"], 10, 60_000)
        assert (job.step_id, job.input, job.idempotency_key) == ("far", Raw(b'[["deep"]]'), "k-1")
        run = await node.load("run-1")
        assert ([due.step_id for due in run.messages], [known.status for known in run.records]) == (
            ["sleep"],
            ["indeterminate"],
        )
        assert run.head.snapshot is not None
        since = await store.read_events("run-1", run.head.snapshot.resume_pointer - 1)
        state = state_of("run-1", since)
        assert state == state_of("run-1", await read_history(store, "run-1"))
        assert tuple(state.open_steps) == steps
        assert state.open_steps["ask"].body.payload == Raw(b'{"cents":7}')  # type: ignore[attr-defined]
        await accept(store, signal("run-1", "go"))
        await node.step("run-1", inputs=[ActivitySucceeded("near", 1, Raw(b"1"))])
        assert list(state_of("run-1", await read_history(store, "run-1")).open_steps) == ["ask", "far"]
        assert await store.find(WaitQuery()) == []
