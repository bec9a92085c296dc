"""The simulator bites: each of these faults, planted into the engine or the store, is found within a few seeds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.app import App
from holdfast.core import codec, decide
from holdfast.core.admission import QueueState, RunLimit, decide_admission
from holdfast.core.event_writer import NOTHING, Decision, EventWriter
from holdfast.core.events import NULL, ErrorInfo, StepCompleted, StepFailed, StepStarted
from holdfast.core.index_rows import ActivityRecord, record_changes
from holdfast.core.keyed_steps import Effect, is_of_engine
from holdfast.core.messages import ActivityErrored
from holdfast.core.state import OpenStep, RunState, carried
from holdfast.core.timing import Retry
from holdfast.engine.activities import queue_worker
from holdfast.engine.activities.executor import ActivityExecutor
from holdfast.engine.activities.queue_worker import QueueWorker
from holdfast.engine.start.admission import RunQueue
from holdfast.engine.start.starter import Starter
from holdfast.engine.turns import draft, fail_open, owned_runs, turn_loop
from holdfast.engine.turns.draft import TurnDraft
from holdfast.engine.turns.fail_open import Journal
from holdfast.engine.turns.owned_runs import OwnedRuns
from holdfast.engine.turns.turn_loop import TurnProcessor
from holdfast.program.coroutine import CoroutineProgram
from holdfast.store import decisions, outgoing, port
from holdfast.store.encryption import Encryption
from holdfast.store.memory import admission, run
from holdfast.store.memory.admission import AdmissionQueue
from holdfast.store.memory.jobs import put
from holdfast.store.memory.run import Run
from holdfast.store.payloads import Payload
from holdfast.testing.sim_loop import current_process
from tests.sim.planted import DYING, NARROW, PAYING, STARTED, first_finding
from tests.sim.sealed_values import Bucket
from tests.sim.story import Story
from tests.sim.tries import LOST_TURNS
from tests.sim.world import World

pytestmark = [
    pytest.mark.slow,
    # A planted fault can leave a program that nothing closes; what its clean-up meets later is no finding.
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Let nodes fail without a word."""
    logger = logging.getLogger("holdfast")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


@pytest.mark.contract("OWN-1")
def test_it_finds_work_that_is_begun_before_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    take = TurnDraft.finish

    def finish(self: TurnDraft, *, release: bool = False) -> port.Turn:
        turn = take(self, release=release)
        for taker in takers[-1:]:
            taker.owned_runs.executor.cancel(turn.run_id)
            for step_id in self.dispatch:
                step = self.state.open_steps[step_id]
                taker.owned_runs.dispatcher.dispatch(self._loaded.head, step, NULL, self._now, NULL)
        return turn

    turns = TurnProcessor.process
    takers: list[TurnProcessor] = []

    async def take_turns(self: TurnProcessor, batch: Sequence[Any]) -> None:
        takers.append(self)
        await turns(self, batch)

    monkeypatch.setattr(TurnProcessor, "process", take_turns)
    monkeypatch.setattr(TurnDraft, "finish", finish)
    assert "began before it was committed" in first_finding()


@pytest.mark.contract("OWN-1")
def test_it_finds_a_store_that_does_not_look_at_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Run.commit

    def commit_anyway(
        self: Run, turn: port.Turn, now: int, persisted_at: int | None = None
    ) -> port.Committed | port.CommitConflict:
        return commit(self, replace(turn, epoch=self.head.lease_epoch), now, persisted_at)

    monkeypatch.setattr(Run, "commit", commit_anyway)
    assert "committed a turn of a run that belongs to" in first_finding()


@pytest.mark.contract("OWN-1", "OWN-3")
def test_it_finds_a_life_that_keeps_the_lease_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(App, "_life_of", lambda self, name: name)
    assert first_finding() != "nothing"


@pytest.mark.contract("OWN-1")
def test_it_finds_a_store_that_gives_a_former_life_its_lease_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "is_another_life", lambda node, other: False)
    assert "is not superseded" in first_finding()


@pytest.mark.contract("OWN-3", "MSG-2")
def test_it_finds_runs_that_are_blamed_for_what_others_did(monkeypatch: pytest.MonkeyPatch) -> None:
    take_turns = TurnProcessor.process

    async def count_all(self: TurnProcessor, batch: Sequence[Any]) -> None:
        for each in batch:
            if each.loaded.head.losses:
                each.loaded = replace(each.loaded, head=replace(each.loaded.head, losses=LOST_TURNS))
        await take_turns(self, batch)

    monkeypatch.setattr(TurnProcessor, "process", count_all)
    assert "others have ended the processes" in first_finding()


@pytest.mark.contract("OWN-3", "MSG-2")
def test_it_finds_runs_that_begin_while_another_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnedRuns, "under_try", lambda self: [])
    assert "which is blamed for it" in first_finding(DYING)


@pytest.mark.contract("OWN-3", "MSG-2")
def test_it_finds_runs_that_are_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "die", _die_always)
    monkeypatch.setattr(turn_loop, "poison_of", lambda loaded, limits: None)
    assert "ends one process after the other" in first_finding()


def _die_always(self: World, bomb: str, times: int) -> None:
    process = current_process()
    if process is not None and process.is_alive and times > LOST_TURNS:
        self.deaths[bomb] += 1
        if self.deaths[bomb] > 2 * LOST_TURNS:
            self.violate(f"{bomb} ends one process after the other")
        process.kill()


@pytest.mark.contract("OWN-3")
def test_it_finds_runs_that_were_created_and_are_never_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Starter, "_look_for", lambda self, run_ids: None)
    assert "is stuck" in first_finding(STARTED)


@pytest.mark.contract("SIG-4")
def test_it_finds_a_signal_that_is_consumed_without_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = TurnDraft.finish

    def finish_early(self: TurnDraft, *, release: bool = False) -> port.Turn:
        turn = finish(self, release=release)
        seen = tuple((signal.inbox_seq, 0) for signal in self._loaded.signals)
        return replace(turn, received=seen) if turn.events else turn

    monkeypatch.setattr(TurnDraft, "finish", finish_early)
    assert "consumed" in first_finding()


@pytest.mark.contract("SIG-5")
def test_it_finds_a_signal_that_is_accepted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_known_signal", lambda self, request, limits, now: None)
    assert "was sent once and is there" in first_finding()


@pytest.mark.contract("TMR-1")
def test_it_finds_timers_that_fire_early(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Run.loaded
    monkeypatch.setattr(decide, "_is_early", lambda step, writer: False)
    monkeypatch.setattr(Run, "loaded", lambda self, now: loaded(self, now + 5_000_000))
    found = first_finding()
    assert "early" in found or "timers_are_scheduled" in found


@pytest.mark.contract("OWN-3")
def test_it_finds_activities_that_died_with_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnedRuns, "lost", lambda self, owned, state, now: [])
    assert "is open and no node has the run" in first_finding()


@pytest.mark.contract("MSG-2")
def test_it_finds_outcomes_that_are_dropped_when_the_store_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def commit_once(
        self: TurnProcessor, turns: Sequence[port.Turn]
    ) -> list[port.Committed | port.CommitConflict]:
        return await self._store.commit(turns)

    monkeypatch.setattr(TurnProcessor, "_commit", commit_once)
    assert first_finding() != "nothing"


@pytest.mark.contract("ACT-1")
def test_it_finds_jobs_that_outlive_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnDraft, "_jobs_closed", lambda self: ())
    assert "nobody waits for it to be carried out" in first_finding()


@pytest.mark.contract("ACT-1", "OWN-3")
def test_it_finds_a_detached_activity_that_is_given_up_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(step: OpenStep, until: int | None, writer: EventWriter) -> Decision:
        return NOTHING

    monkeypatch.setattr(decide, "_detach", forget)
    assert "is open and no node has the run" in first_finding()


@pytest.mark.contract("WF-6")
def test_it_finds_updates_that_are_answered_after_the_arguments_of_a_rotation_were_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CoroutineProgram, "after_callback", lambda self, number: None)
    monkeypatch.setattr(CoroutineProgram, "_end", end_when_all_is_answered)
    assert "was answered, and its effect is there 0 times" in first_finding()


def end_when_all_is_answered(self: CoroutineProgram, main: asyncio.Task[Any]) -> None:
    """End as a program did that let updates finish after its function had."""
    if not self._answering:
        END(self, main)


END = CoroutineProgram._end


@pytest.mark.contract("WF-6")
def test_it_finds_updates_that_are_taken_after_the_function_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoroutineProgram, "takes_updates", True)
    monkeypatch.setattr(CoroutineProgram, "after_callback", lambda self, number: None)
    monkeypatch.setattr(CoroutineProgram, "_end", end_when_all_is_answered)
    assert "was answered, and its effect is there 0 times" in first_finding()


@pytest.mark.contract("WF-6", "CAN-1")
def test_it_finds_a_rotation_that_forgets_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "carried", lambda state, update_ids, step_ids: carried(state, (), step_ids))
    monkeypatch.setattr(CoroutineProgram, "_can_finish", lambda self, *given: False)
    assert "forgets the update" in first_finding()


@pytest.mark.contract("CAN-1")
def test_it_finds_a_rotation_that_loses_an_open_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_last(state: RunState, update_ids: Sequence[str], step_ids: Sequence[str] | None) -> dict[str, Any]:
        return carried(state, update_ids, step_ids and step_ids[:-1])

    monkeypatch.setattr(decide, "carried", lose_last)
    assert first_finding(Story(runs=2, payers=0, flows=4)) != "nothing"


@pytest.mark.contract("CAN-1", "ATT-1")
def test_it_finds_a_rotation_that_forgets_the_attempts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(state: RunState, update_ids: Sequence[str], step_ids: Sequence[str] | None) -> dict[str, Any]:
        known = carried(state, update_ids, step_ids)
        steps = [replace(step, engine_attempt_id=1) for step in known.get("steps", ())]
        return known | {"steps": steps} if steps else known

    monkeypatch.setattr(decide, "carried", forget)
    assert "changes the step" in first_finding(Story(runs=2, payers=0, flows=4))


@pytest.mark.contract("QUE-2")
def test_it_finds_an_admission_of_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_more_room(state: QueueState, queued: Any, limit: RunLimit, now: int) -> Any:
        return decide_admission(state, queued, replace(limit, at_once=3, per_key=2), now)

    monkeypatch.setattr(admission, "decide_admission", with_more_room)
    assert "more runs are under way than there is room for" in first_finding()


@pytest.mark.contract("QUE-2")
def test_it_finds_a_rate_that_counts_admissions_and_not_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    decide, admit, admitted_at = AdmissionQueue.decide, AdmissionQueue.admit, [0]

    def note_time(self: AdmissionQueue, limit: RunLimit, now: int) -> Any:
        admitted_at[0] = now
        return decide(self, limit, now)

    def count_at_once(self: AdmissionQueue, run_id: str, limit: RunLimit) -> None:
        admit(self, run_id, limit)
        self.record_start(run_id, admitted_at[0])

    monkeypatch.setattr(AdmissionQueue, "decide", note_time)
    monkeypatch.setattr(AdmissionQueue, "admit", count_at_once)
    assert "runs have started within" in first_finding(NARROW)


@pytest.mark.contract("QUE-2")
def test_it_finds_a_run_that_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdmissionQueue, "leave", lambda self, run_id: None)
    assert "does not finish" in first_finding()


@pytest.mark.contract("QUE-3")
def test_it_finds_runs_that_are_never_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rest(self: RunQueue) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(RunQueue, "work", rest)
    assert "does not finish" in first_finding()


@pytest.mark.contract("API-4")
def test_it_finds_children_that_are_elsewhere_than_their_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    children = TurnDraft._children

    def move(self: TurnDraft) -> Iterator[port.NewRun]:
        return (replace(new, project="elsewhere") for new in children(self))

    monkeypatch.setattr(TurnDraft, "_children", move)
    assert "families_are_of_one_tenant" in first_finding()


@pytest.mark.contract("API-4")
def test_it_finds_signals_that_reach_another_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "unreachable", lambda turn, item, runs: None)
    assert "a run of another tenant" in first_finding()


@pytest.mark.contract("SIG-3")
def test_it_finds_signals_that_are_dropped_because_they_were_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "left_of", lambda turn, started, sent, now: outgoing.NOTHING_LEFT)
    assert "and it is nowhere" in first_finding()


@pytest.mark.contract("ACT-1")
def test_it_finds_jobs_that_are_taken_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "put", lambda job, there, now: replace(put(job, there, now), visible_at=now))
    assert "us early" in first_finding()


@pytest.mark.contract("ACT-1")
def test_it_finds_jobs_that_are_begun_without_being_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    report = QueueWorker._report

    def try_again(self: QueueWorker, job: port.Job, outcome: Any) -> None:
        if isinstance(outcome, ActivityErrored):
            self._start(replace(job, engine_attempt_id=job.engine_attempt_id + 1), job.scheduled_at)
        else:
            report(self, job, outcome)

    monkeypatch.setattr(QueueWorker, "_report", try_again)
    assert "which has not taken it" in first_finding()


@pytest.mark.contract("ACT-1", "OWN-3")
def test_it_finds_jobs_that_are_given_up_with_the_node_of_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_runs, "is_local", lambda step: step.kind == "activity" and not step.is_detached)
    assert "is a job, and was given up" in first_finding()


@pytest.mark.contract("ACT-1")
def test_it_finds_jobs_that_are_given_up_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    start = QueueWorker._start

    def give_up(self: QueueWorker, job: port.Job, now: int) -> None:
        if job.engine_attempt_id > job.first_engine_attempt_id:
            self.jobs[job.run_id, job.step_id] = job
            self._report(job, ErrorInfo("WorkerLost", "nobody has patience", retryable=False))
        else:
            start(self, job, now)

    monkeypatch.setattr(QueueWorker, "_start", give_up)
    assert "given up at attempt" in first_finding()


@pytest.mark.contract("ACT-4")
def test_it_finds_keyed_steps_that_are_dispatched_again_without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trust(self: ActivityExecutor, attempt: Any, context: Any, deadline: float | None) -> None:
        return None

    monkeypatch.setattr(ActivityExecutor, "_verify", trust)
    assert "was charged twice, and its verifier is truthful" in first_finding()


@pytest.mark.contract("ACT-4")
def test_it_finds_jobs_that_are_taken_again_without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    def trust(step: OpenStep, lost: int, retry: Retry) -> Effect | None:
        return step.effect

    monkeypatch.setattr(queue_worker, "effect_after_takes", trust)
    assert "was charged twice, and its verifier is truthful" in first_finding(PAYING)


@pytest.mark.contract("ACT-3")
def test_it_finds_records_that_are_written_after_the_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = record_changes

    def record_when_over(before: Any, events: Sequence[Any]) -> tuple[ActivityRecord, ...]:
        has_ended = any(isinstance(event.data, StepCompleted | StepFailed) for event in events)
        return changes(before, events) if has_ended else ()

    monkeypatch.setattr(draft, "record_changes", record_when_over)
    assert "records_equal_fold" in first_finding()


@pytest.mark.contract("ACT-4")
def test_it_finds_steps_that_are_unresolved_without_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    open_step = EventWriter.open

    def open_others(self: EventWriter, body: Any, step_id: str, *attempts: int) -> None:
        if not is_of_engine(step_id):
            open_step(self, body, step_id, *attempts)

    monkeypatch.setattr(EventWriter, "open", open_others)
    assert "unresolved_steps_are_asked_about" in first_finding()


@pytest.mark.contract("ACT-4")
def test_it_finds_a_success_that_nobody_has_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventWriter, "fail", _complete_instead)
    assert "which nobody has said" in first_finding()


def _complete_instead(self: EventWriter, step: OpenStep, error: ErrorInfo, cause: str | None = None) -> None:
    body = StepFailed(error) if step.key is None else StepCompleted(codec.encode("guessed"))
    self.close(step, body, cause)


@pytest.mark.contract("SEC-2")
def test_it_finds_values_that_are_referred_to_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Bucket.put

    async def put_later(self: Bucket, key: str, chunks: Any) -> None:
        asyncio.ensure_future(put(self, key, chunks))  # noqa: RUF006

    monkeypatch.setattr(Bucket, "put", put_later)
    assert "a value is referred to, and is not there" in first_finding()


@pytest.mark.contract("SEC-2")
def test_it_finds_values_that_are_sealed_for_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child's input belongs to the child, not to the run that starts it."""
    encode = Encryption.encode

    async def encode_for_the_parent(self: Encryption, payloads: Sequence[Payload]) -> list[bytes | None]:
        return await encode(self, [replace_scope(payload) for payload in payloads])

    def replace_scope(payload: Payload) -> Payload:
        return payload._replace(scope=payload.scope.rpartition("/")[0] or payload.scope)

    monkeypatch.setattr(Encryption, "encode", encode_for_the_parent)
    assert first_finding() != "nothing"


@pytest.mark.contract("LAT-1")
def test_it_finds_steps_that_begin_early_and_are_in_no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "append", lambda self, entries: None)
    assert "began before it was committed" in first_finding()


@pytest.mark.contract("LAT-1", "ACT-3")
def test_it_finds_keyed_steps_that_begin_before_their_record_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    def starts_some(turn: port.Turn) -> bool:
        return any(isinstance(event.data, StepStarted) and not event.data.queue for event in turn.events)

    monkeypatch.setattr(fail_open, "starts_steps_only", starts_some)
    assert "began before it was committed" in first_finding()
