"""Turns: what is handled and decided together becomes one commit, with everything that the store expects."""

import pytest
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec, commands
from holdfast.core import events as e
from holdfast.core.event_writer import NOTHING, Decision, Refusal
from holdfast.core.events import EngineRunRef, RunQueued
from holdfast.core.index_rows import Task, Wait, runtime_snapshot
from holdfast.core.keys import request_key
from holdfast.core.messages import ActivityOutcome, ActivitySucceeded, Control, NodeLost, activity_completed
from holdfast.core.reconciliation import indeterminate
from holdfast.core.state import RUNNING, RunState, fold, state_of
from holdfast.engine.turns.draft import TurnDraft, prepare_run
from holdfast.errors import Conflict, InvalidInput, RunTerminal
from holdfast.store.memory import MemoryStore
from holdfast.store.port import Committed, Created, LoadedRun
from holdfast.testing import START, VirtualClock, samples

SECOND = 1_000_000
NODE = "node-a"


@pytest.fixture
def clock() -> VirtualClock:
    """Return the time of this test."""
    return VirtualClock()


@pytest.fixture
async def store(clock: VirtualClock) -> MemoryStore:
    """Return a store in which node-a has a lease and owns the new run run-1."""
    store = MemoryStore(clock)
    await store.renew(NODE, 60_000)
    [created] = await store.create([samples.new_run()], claim_for=NODE)
    assert created == Created("run-1", 1)
    return store


async def load(store: MemoryStore) -> LoadedRun:
    """Return run-1 as it is now."""
    [run] = await store.load(["run-1"])
    assert run is not None
    return run


async def begin(store: MemoryStore) -> TurnDraft:
    """Return the draft of a turn of run-1, in which nothing is handled yet."""
    run = await load(store)
    state = state_of("run-1", await store.read_events("run-1"))
    return TurnDraft(state, run, await store.now(), NODE)


async def commit(store: MemoryStore, draft: TurnDraft, *, release: bool = False) -> LoadedRun:
    """Commit a turn which must win; return the run after it."""
    [answer] = await store.commit([draft.finish(release=release)])
    assert isinstance(answer, Committed), answer
    assert answer.version == draft.state.version
    return await load(store)


async def started(store: MemoryStore, *todo: commands.Command) -> LoadedRun:
    """Commit the first turn of run-1."""
    draft = await begin(store)
    for message in (await load(store)).messages:
        draft.handle(message)
    assert isinstance(draft.apply_commands(todo), Decision)
    return await commit(store, draft)


# --- starting


@pytest.mark.contract("QUE-1", "QUE-4")
def test_a_new_run_carries_its_request_its_first_event_and_its_first_message() -> None:
    queued = RunQueued("order", "7", "acme", "shop", "prod", "req-77", Raw(b"[1]"), "parent", "step")
    new = prepare_run("run-1", queued, START, NODE, reference_key="order-1", tags=("vip",))
    assert (new.run_id, new.tenant, new.project, new.environment) == ("run-1", "acme", "shop", "prod")
    assert (new.plan_id, new.plan_version, new.run_request_id) == ("order", "7", "req-77")
    assert new.request_key == request_key("acme", "shop", "prod", "order", "7", "req-77")
    assert new.input_sha256 == codec.digest(b"[1]")
    assert (new.parent_run_id, new.reference_key, new.tags) == ("parent", "order-1", ("vip",))
    [event] = new.events
    known = replace(queued, tags=("vip",), reference_key="order-1")
    assert (event.data, event.engine_run_ref, event.emitted_at) == (known, EngineRunRef(NODE), START)
    assert [message.type for message in new.messages] == ["InternalContinue"]
    assert new.snapshot == runtime_snapshot(fold(RunState(run_id="run-1"), new.events))


@pytest.mark.contract("QUE-1")
def test_without_a_request_id_nothing_is_a_retry() -> None:
    one, other = (prepare_run(run_id, RunQueued("order", "1"), START, NODE) for run_id in ("run-1", "run-2"))
    assert one.run_request_id == "run-1"
    assert one.request_key != other.request_key


@pytest.mark.contract("QUE-1")
def test_the_same_request_with_another_input_has_the_same_key_and_another_digest() -> None:
    one, other = (
        prepare_run("run-1", RunQueued("order", "1", run_request_id="r", input=Raw(text)), START, NODE)
        for text in (b"1", b"2")
    )
    assert one.request_key == other.request_key
    assert one.input_sha256 != other.input_sha256


@pytest.mark.contract("QUE-1", "API-2")
@pytest.mark.parametrize(
    "queued",
    [
        RunQueued("or|der", "1"),
        RunQueued("order", "1|2"),
        RunQueued("order", "1", tenant="a|b"),
        RunQueued("order", "1", run_request_id="\ud800"),
    ],
)
def test_what_cannot_be_part_of_a_key_is_refused_before_anything_is_stored(queued: RunQueued) -> None:
    with pytest.raises(InvalidInput):
        prepare_run("run-1", queued, START, NODE)


# --- one turn


@pytest.mark.contract("SIG-4", "MSG-2", "PRJ-4")
async def test_a_turn_is_everything_that_follows_from_what_was_handled(store: MemoryStore) -> None:
    draft = await begin(store)
    [start] = (await load(store)).messages
    assert isinstance(draft.handle(start), Decision)
    draft.apply_commands([samples.activity(), samples.timer(START + SECOND), samples.wait("go"), samples.task()])
    turn = draft.finish()
    assert (turn.run_id, turn.expected_version, turn.epoch) == ("run-1", 1, 1)
    assert [event.event_type for event in turn.events] == [
        "RunStarted",
        "StepStarted",
        "TimerStarted",
        "SignalWaiting",
        "TaskCreated",
    ]
    assert {event.engine_run_ref for event in turn.events} == {EngineRunRef(NODE, 1)}
    assert (turn.consumed, turn.received) == (("start",), ())
    assert [message.type for message in turn.messages] == ["TimerDue"]
    assert [row.step_id for row in turn.waits_opened] == ["go"]
    assert [(row.step_id, row.status) for row in turn.tasks] == [("approve", "OPEN")]
    assert (turn.waits_closed, turn.records, turn.release) == ((), (), False)
    assert draft.dispatch == ["charge"]


@pytest.mark.contract("PRJ-4", "INV", "EVT-5")
async def test_the_drafts_state_and_the_stored_snapshot_are_the_fold_of_the_stored_events(store: MemoryStore) -> None:
    await started(store, samples.activity(), samples.wait("go"))
    await store.deliver([samples.signal(name="go")])
    draft = await begin(store)
    draft.handle(ActivitySucceeded("charge", 1, Raw(b"1")))
    for signal in (await load(store)).signals:
        draft.handle(signal)
    draft.apply_commands([samples.complete()])
    run = await commit(store, draft)
    folded = state_of("run-1", await store.read_events("run-1"))
    assert draft.state == folded
    assert run.head.snapshot == runtime_snapshot(folded)
    assert (run.head.status, run.head.version) == (folded.status, folded.version)


@pytest.mark.contract("SIG-4")
async def test_received_names_each_signal_with_the_event_that_received_it(store: MemoryStore) -> None:
    await started(store, samples.activity(), samples.wait("go", "a"), samples.wait("stop", "b"))
    await store.deliver([samples.signal(name=name) for name in ("go", "other", "stop")])
    draft = await begin(store)
    draft.handle(ActivitySucceeded("charge", 1))
    for signal in (await load(store)).signals:
        draft.handle(signal)
    turn = draft.finish()
    assert turn.received == ((1, 1), (3, 2))
    assert [turn.events[index].event_type for _, index in turn.received] == ["SignalReceived", "SignalReceived"]
    assert turn.waits_closed == ("a", "b")
    run = await commit(store, draft)
    assert [signal.name for signal in run.signals] == ["other"]
    mailbox = await samples.read_mailbox(store, "run-1")
    events = {event.run_seq: event for event in await store.read_events("run-1")}
    for signal in mailbox:
        if signal.consumed_seq is not None:
            assert events[signal.consumed_seq].caused_by_signal_id == signal.id


@pytest.mark.contract("SIG-3")
async def test_a_signal_that_no_wait_wants_is_neither_received_nor_lost(store: MemoryStore) -> None:
    await started(store)
    await store.deliver([samples.signal(name="go")])
    draft = await begin(store)
    [signal] = (await load(store)).signals
    assert draft.handle(signal) == NOTHING
    turn = draft.finish()
    assert (turn.received, turn.events, turn.seen_inbox_seq) == ((), (), 1)
    run = await commit(store, draft)
    assert run.signals == (signal,)
    assert run.head.ready_at is None


@pytest.mark.contract("SIG-3", "MSG-2")
async def test_a_signal_that_came_after_the_turn_began_makes_the_run_ready_again(store: MemoryStore) -> None:
    await started(store, samples.wait("go"))
    draft = await begin(store)
    await store.deliver([samples.signal(name="go")])
    draft.apply_commands([samples.marker()])
    assert draft.finish().seen_inbox_seq == 0
    run = await commit(store, draft)
    assert run.head.ready_at == START
    assert len(run.signals) == 1


@pytest.mark.contract("MSG-2")
async def test_every_message_that_was_handled_is_consumed_stale_ones_too(store: MemoryStore) -> None:
    await started(store, samples.timer(START))
    draft = await begin(store)
    [due] = (await load(store)).messages
    draft.handle(replace(due, signal_id="stale", waiting_token="old"))
    draft.handle(due)
    assert draft.finish().consumed == ("stale", due.signal_id)
    assert (await commit(store, draft)).messages == ()


@pytest.mark.contract("TMR-1", "MSG-2")
async def test_a_timer_that_is_handled_with_a_time_before_its_own_is_not_lost(
    store: MemoryStore, clock: VirtualClock
) -> None:
    await started(store, samples.timer(START + SECOND))
    early = await begin(store)
    clock.advance(ms=1_000)
    [due] = (await load(store)).messages  # handed out now, and handled in a turn that began before
    early.handle(due)
    assert (await commit(store, early)).messages == (due,)
    draft = await begin(store)
    draft.handle(due)
    await commit(store, draft)
    assert [event.event_type for event in await store.read_events("run-1")][-1] == "TimerFired"


async def test_each_decision_of_a_turn_sees_what_the_ones_before_it_did(store: MemoryStore) -> None:
    await started(store, samples.activity())
    draft = await begin(store)
    draft.handle(ActivitySucceeded("charge", 1))
    assert draft.handle(ActivitySucceeded("charge", 1)) == NOTHING
    draft.apply_commands([samples.complete()])
    late = draft.handle(NodeLost("charge"))
    assert isinstance(late, Refusal)
    assert isinstance(late.error, RunTerminal)
    refused = draft.apply_commands([samples.activity("again")])
    assert isinstance(refused, Refusal)
    assert isinstance(refused.error, Conflict)
    assert [event.event_type for event in draft.finish().events] == ["StepCompleted", "RunCompleted"]


async def test_a_refusal_leaves_nothing_in_the_turn(store: MemoryStore) -> None:
    await started(store, samples.activity())
    draft = await begin(store)
    before = draft.state
    answer = draft.apply_commands([samples.timer(START), samples.activity()])
    assert isinstance(answer, Refusal)
    turn = draft.finish()
    assert (turn.events, turn.messages, draft.dispatch, draft.state) == ((), (), [], before)


@pytest.mark.contract("ACT-3")
async def test_records_of_activities_are_part_of_the_commit(store: MemoryStore) -> None:
    keyed = replace(samples.activity(), idempotency_key="order-1")
    await started(store, keyed)
    [claimed] = (await load(store)).records
    assert (claimed.step_id, claimed.idempotency_key, claimed.status) == ("charge", "order-1", "indeterminate")
    draft = await begin(store)
    draft.handle(ActivitySucceeded("charge", 1, Raw(b"7")))
    [completed] = draft.finish().records
    assert (completed.status, completed.result, completed.created_at) == ("completed", Raw(b"7"), claimed.created_at)
    assert (await commit(store, draft)).records == ()  # a completed one is not needed any more


@pytest.mark.contract("ACT-4")
@pytest.mark.parametrize("queue", ["far", ""])
async def test_a_step_that_is_unresolved_at_the_end_of_a_turn_is_not_dispatched_by_it(
    store: MemoryStore, queue: str
) -> None:
    await started(store, replace(samples.activity(), idempotency_key="order-1", queue=queue))
    draft = await begin(store)
    for attempt, error in ((1, e.ErrorInfo("Broken", "", retryable=True)), (2, indeterminate("closed"))):
        outcome = ActivityOutcome(logical_attempt_id=1, engine_attempt_id=attempt, error=error)
        draft.handle(activity_completed("run-1", "charge", f"charge~{attempt}", outcome, START))
        draft.dispatch += [] if queue else ["charge"]  # as the message does by which the next attempt is due
    turn = draft.finish()
    assert [event.event_type for event in turn.events] == ["StepRetried", "StepUnresolved", "TaskCreated"]
    assert (turn.jobs, draft.dispatch) == ((), [])


@pytest.mark.contract("OWN-1")
@pytest.mark.parametrize("release", [True, False])
async def test_release_lets_go_of_the_run_with_the_same_commit(store: MemoryStore, release: bool) -> None:
    await started(store, samples.wait("go"))
    draft = await begin(store)
    draft.apply_commands([samples.marker()])
    run = await commit(store, draft, release=release)
    assert run.head.lease_owner == (None if release else NODE)


@pytest.mark.contract("OWN-1", "EVT-1")
async def test_a_turn_carries_the_version_and_the_epoch_that_it_was_made_from(store: MemoryStore) -> None:
    run = await started(store, samples.wait("go"))
    state = state_of("run-1", await store.read_events("run-1"))
    turn = TurnDraft(state, replace(run, head=replace(run.head, lease_epoch=7)), START, "node-b").finish()
    assert (turn.expected_version, turn.epoch) == (3, 7)


@pytest.mark.contract("SIG-9", "TSK-2")
async def test_the_rows_of_waits_and_tasks_follow_the_turn(store: MemoryStore) -> None:
    await started(store, samples.wait("go"), samples.task())
    draft = await begin(store)
    draft.apply_commands(
        [commands.CancelStep(step_id="go"), commands.CancelStep(step_id="approve"), samples.wait("next")]
    )
    turn = draft.finish()
    assert turn.waits_closed == ("go",)
    [row] = turn.waits_opened
    assert isinstance(row, Wait)
    assert row.step_id == "next"
    [cancelled] = turn.tasks
    assert isinstance(cancelled, Task)
    assert cancelled.status == "CANCELLED"


@pytest.mark.contract("SIG-13")
async def test_an_operators_command_is_one_commit_with_its_effect(store: MemoryStore) -> None:
    await started(store, samples.wait("go"))
    draft = await begin(store)
    draft.handle(Control(id="0198c5a0-0000-7000-8000-000000000000", name="PAUSE", signal_id="c", actor="ann"))
    run = await commit(store, draft)
    assert run.head.status == "PAUSED"
    assert [event.data for event in (await store.read_events("run-1"))[-2:]] == [
        e.SignalAccepted("PAUSE", "c", "ann"),
        e.RunPaused(),
    ]


async def test_a_turn_in_which_nothing_happened_has_nothing_in_it(store: MemoryStore) -> None:
    await started(store)
    draft = await begin(store)
    turn = draft.finish()
    assert (turn.events, turn.consumed, turn.received, turn.messages, turn.tasks) == ((), (), (), (), ())
    assert turn.snapshot == runtime_snapshot(draft.state)
    assert draft.state.status is RUNNING
