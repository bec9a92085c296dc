"""Projection: what operators see of a run, in any pieces, and the runtime snapshot as a cache of the fold."""

import copy
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

import holdfast as hf
from holdfast.core import commands, index_rows
from holdfast.core import events as e
from holdfast.core.events import ArtifactRef, ErrorInfo, Event
from holdfast.core.index_rows import RuntimeSnapshot, runtime_snapshot
from holdfast.core.messages import NodeLost
from holdfast.core.snapshot import (
    RunSnapshot,
    StepError,
    StepSnapshot,
    StepStatus,
    detect_gaps,
    incremental_project,
    project_run,
)
from holdfast.core.state import CANCELLED, COMPLETED, FAILED, PAUSED, RUNNING, RunStatus, state_of
from holdfast.errors import HistoryGap
from tests.core.driver import FATAL, SECOND, START, Driver, activity, done, failed, task, timer, wait
from tests.core.event_bodies import ARTIFACT, ERROR, run_in
from tests.core.random_histories import Plan, carry_out, plans

encode = msgspec.json.encode


def project(run: Driver) -> RunSnapshot:
    """Return the snapshot of a driven run."""
    return project_run(run.run_id, run.events)


def step(run: Driver, step_id: str) -> StepSnapshot:
    """Return one step of a driven run."""
    [found] = [step for step in project(run).steps if step.step_id == step_id]
    return found


# --- the shape


@pytest.mark.contract("PRJ-1")
def test_snapshots_have_the_fields_of_the_contract() -> None:
    run_fields = "run_id status substatus last_event_seq steps artifacts started_at completed_at total_duration_ms"
    step_fields = "step_id status logical_attempt_id engine_attempt_id started_at completed_at artifacts error"
    assert set(run_fields.split()) <= set(RunSnapshot.__struct_fields__)
    assert set(step_fields.split()) <= set(StepSnapshot.__struct_fields__)
    assert StepError.__struct_fields__ == ("code", "message", "retryable")
    assert set(RunStatus) == {"PENDING", "APPROVED", "RUNNING", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"}
    assert set(StepStatus) == {"PENDING", "RUNNING", "SUCCESS", "FAILED", "SKIPPED"}


@pytest.mark.contract("PRJ-1")
@pytest.mark.parametrize("kind", [RunSnapshot, StepSnapshot, StepError, RuntimeSnapshot])
def test_snapshots_cannot_be_edited(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen


@pytest.mark.contract("PRJ-4")
def test_the_runtime_snapshot_has_the_fields_of_the_contract() -> None:
    fields = """state_version snapshot_schema_version waiting_kind waiting_token waiting_until active_task_id
        resume_pointer last_signal_id last_error_code last_error last_executed_by last_executed_on"""
    assert set(fields.split()) <= set(RuntimeSnapshot.__struct_fields__)


# --- full and incremental


@pytest.mark.contract("PRJ-2")
@given(plans, st.lists(st.integers(0, 80), max_size=5))
def test_projecting_in_any_pieces_is_equal_byte_for_byte(plan: Plan, cuts: list[int]) -> None:
    run = carry_out(plan)
    borders = [0, *sorted(min(cut, len(run.events)) for cut in cuts), len(run.events)]
    pieces = RunSnapshot(run_id=run.run_id)
    for begin, end in pairwise(borders):
        pieces = incremental_project(pieces, run.events[begin:end])
    one_by_one = RunSnapshot(run_id=run.run_id)
    for event in run.events:
        one_by_one = incremental_project(one_by_one, [event])
    assert encode(pieces) == encode(one_by_one) == encode(project(run))


@pytest.mark.contract("PRJ-2")
@given(plans, st.integers(0, 80), st.integers(0, 80))
def test_events_that_are_applied_again_change_nothing(plan: Plan, first: int, second: int) -> None:
    run = carry_out(plan)
    seen = incremental_project(RunSnapshot(run_id=run.run_id), run.events[: max(first, second)])
    again = incremental_project(seen, run.events[min(first, second) : max(first, second)])
    assert encode(again) == encode(seen)
    assert encode(incremental_project(project(run), run.events)) == encode(project(run))


@pytest.mark.contract("PRJ-2", "PRJ-3")
@given(plans, st.integers(0, 80))
def test_a_projector_that_crashed_goes_on_from_its_watermark(plan: Plan, crash: int) -> None:
    run = carry_out(plan)
    stored = encode(project_run(run.run_id, run.events[:crash]))
    revived = msgspec.json.decode(stored, type=RunSnapshot)
    missed = [event for event in run.events if event.run_seq > revived.last_event_seq]
    assert encode(incremental_project(revived, missed)) == encode(project(run))


@pytest.mark.contract("PRJ-1", "PRJ-2")
@given(plans)
def test_projecting_changes_nothing_that_it_was_given(plan: Plan) -> None:
    run = carry_out(plan)
    half = project_run(run.run_id, run.events[: len(run.events) // 2])
    kept, kept_events = copy.deepcopy(half), copy.deepcopy(run.events)
    whole = incremental_project(half, run.events)
    assert (half, run.events) == (kept, kept_events)
    assert whole is not half


@pytest.mark.contract("PRJ-2", "EVT-5")
@given(plans)
def test_what_operators_see_agrees_with_the_fold(plan: Plan) -> None:
    run = carry_out(plan)
    seen = project(run)
    assert (seen.status, seen.last_event_seq) == (run.state.status, run.state.version)
    assert [s.step_id for s in seen.steps if s.status is StepStatus.RUNNING] == sorted(
        run.state.open_steps, key=[s.step_id for s in seen.steps].index
    )
    for found in seen.steps:
        if found.step_id in run.state.open_steps:
            expected = run.state.open_steps[found.step_id]
            assert found.kind == expected.kind
            assert found.logical_attempt_id == expected.logical_attempt_id
            assert found.engine_attempt_id == expected.engine_attempt_id
    assert (seen.completed_at is not None) == run.state.is_finished


# --- gaps


@pytest.mark.contract("PRJ-2", "EVT-6")
@pytest.mark.parametrize(
    ("last", "following", "has_gap"),
    [(0, 1, False), (0, 2, True), (9, 10, False), (9, 12, True), (9, 9, False), (9, 3, False)],
)
def test_a_gap_is_a_number_that_was_left_out(last: int, following: int, has_gap: bool) -> None:
    assert detect_gaps(last, following) is has_gap


@pytest.mark.contract("PRJ-2")
def test_a_gap_halts_projection_and_when_it_closes_projection_goes_on() -> None:
    run = run_in(RUNNING)
    before = project_run(run.run_id, run.events[:3])
    with pytest.raises(HistoryGap) as found:
        incremental_project(before, run.events[4:])
    assert found.value.details == {"run_id": "run-1", "expected": 4, "found": 5}
    assert before.last_event_seq == 3
    assert encode(incremental_project(before, run.events[3:])) == encode(project(run))


# --- what each event does to the run


@pytest.mark.contract("PRJ-1")
def test_a_run_starts_ends_and_lasts_by_the_stores_time() -> None:
    run = Driver()
    assert project(run) == RunSnapshot(run_id="run-1", last_event_seq=1)
    run.now += SECOND
    run.start()
    run.now += 5 * SECOND + 499
    run.append(e.RunCompleted(Raw(b"1"), (ARTIFACT,)))
    seen = project(run)
    assert (seen.status, seen.started_at, seen.completed_at) == (COMPLETED, START + SECOND, START + 6 * SECOND + 499)
    assert seen.total_duration_ms == 5_000
    assert seen.artifacts == (ARTIFACT,)


@pytest.mark.contract("PRJ-1")
@pytest.mark.parametrize("body", [e.RunFailed(ERROR), e.RunCancelled("no")])
def test_a_run_that_ends_before_it_began_has_lasted_no_time(body: e.Body) -> None:
    run = Driver()
    run.append(body)
    seen = project(run)
    assert (seen.started_at, seen.completed_at, seen.total_duration_ms) == (None, START, 0)
    assert seen.status in (FAILED, CANCELLED)


@pytest.mark.contract("PRJ-1")
@pytest.mark.parametrize(
    ("body", "substatus"),
    [
        (e.RunPaused("lunch"), "lunch"),
        (e.RunPaused(), None),
        (e.RunPaused("x", ErrorInfo("VersionMismatch", "")), "VersionMismatch"),
    ],
)
def test_a_paused_run_says_why(body: e.RunPaused, substatus: str | None) -> None:
    run = Driver().start()
    run.append(body)
    assert (project(run).status, project(run).substatus) == (PAUSED, substatus)
    run.control("RESUME")
    assert (project(run).status, project(run).substatus) == (RUNNING, None)


@pytest.mark.contract("PRJ-1", "WF-4")
def test_a_run_that_is_being_cancelled_says_so_until_its_end_whether_or_not_it_is_paused() -> None:
    run = run_in(PAUSED)
    run.control("CANCEL")
    assert (project(run).status, project(run).substatus) == (RUNNING, "CANCELLING")
    run.control("PAUSE", reason="lunch")
    assert (project(run).status, project(run).substatus) == (PAUSED, "lunch")
    run.control("RESUME")
    assert (project(run).status, project(run).substatus) == (RUNNING, "CANCELLING")
    run.append(e.RunCancelled())
    assert (project(run).status, project(run).substatus) == (CANCELLED, None)


@pytest.mark.contract("PRJ-1")
def test_a_resumed_run_keeps_the_time_at_which_it_started() -> None:
    run = Driver().start()
    run.now += SECOND
    run.control("PAUSE")
    run.control("RESUME")
    assert project(run).started_at == START


def test_an_approved_run_has_not_started() -> None:
    seen = project(run_in(RunStatus.APPROVED))
    assert (seen.status, seen.started_at) == ("APPROVED", None)


# --- what each event does to a step

CLOSED_BY: list[tuple[str, e.Body, StepStatus]] = [
    ("activity", e.StepCompleted(Raw(b"1"), (ARTIFACT,)), StepStatus.SUCCESS),
    ("activity", e.StepFailed(ERROR), StepStatus.FAILED),
    ("activity", e.StepSkipped(), StepStatus.SKIPPED),
    ("activity", e.StepCancelled(), StepStatus.SKIPPED),
    ("timer", e.TimerFired(), StepStatus.SUCCESS),
    ("signal", e.SignalReceived("go", "s", "x"), StepStatus.SUCCESS),
    ("signal", e.SignalTimedOut("go"), StepStatus.FAILED),
    ("task", e.TaskCompleted("ann"), StepStatus.SUCCESS),
    ("child", e.ChildCompleted(), StepStatus.SUCCESS),
    ("child", e.ChildFailed(ERROR), StepStatus.FAILED),
    ("update", e.UpdateCompleted(Raw(b"1")), StepStatus.SUCCESS),
    ("update", e.UpdateCompleted(error=ERROR), StepStatus.FAILED),
]


@pytest.mark.contract("PRJ-1")
@pytest.mark.parametrize("kind", ["activity", "timer", "signal", "task", "child", "update"])
def test_an_opened_step_is_running(kind: str) -> None:
    expected = StepSnapshot(step_id=kind, status=StepStatus.RUNNING, kind=kind, started_at=START)
    assert step(run_in(RUNNING), kind) == expected


@pytest.mark.contract("PRJ-1")
@pytest.mark.parametrize(("kind", "body", "status"), CLOSED_BY, ids=lambda value: type(value).__name__)
def test_a_closed_step_shows_how_and_when_it_ended(kind: str, body: e.Body, status: StepStatus) -> None:
    run = run_in(RUNNING)
    run.now += SECOND
    run.append(body, kind)
    seen = step(run, kind)
    assert (seen.status, seen.started_at, seen.completed_at) == (status, START, START + SECOND)
    if isinstance(body, e.SignalTimedOut):
        assert seen.error == StepError("SignalTimedOut", "no signal came in time", False)
    elif status is StepStatus.FAILED:
        assert seen.error == StepError("Broken", "it broke", True)
    else:
        assert seen.error is None
    assert seen.artifacts == getattr(body, "artifacts", ())


@pytest.mark.contract("PRJ-1", "ATT-1", "ATT-2")
def test_attempts_are_shown_and_a_retry_begins_afresh() -> None:
    run = Driver().start()
    run.ask(activity(on_failure="pause"))
    run.tell(NodeLost("charge"))
    assert (step(run, "charge").logical_attempt_id, step(run, "charge").engine_attempt_id) == (1, 2)
    run.tell(failed(engine_attempt=2))
    assert step(run, "charge").error is not None
    run.now += SECOND
    run.control("RETRY_STEP", "charge")
    seen = step(run, "charge")
    assert (seen.logical_attempt_id, seen.engine_attempt_id, seen.started_at) == (2, 3, START + SECOND)
    assert (seen.status, seen.error, seen.completed_at) == (StepStatus.RUNNING, None, None)


@pytest.mark.parametrize("end", [commands.CompleteRun(), commands.FailRun(error=FATAL), commands.ContinueAsNew()])
def test_what_is_open_at_the_end_or_at_a_rotation_is_shown_as_skipped(end: commands.Command) -> None:
    run = run_in(RUNNING)
    run.tell(done("activity"))
    run.now += SECOND
    run.ask(end)
    seen = {found.step_id: (found.status, found.completed_at) for found in project(run).steps}
    assert seen.pop("activity") == (StepStatus.SUCCESS, START)
    assert set(seen.values()) == {(StepStatus.SKIPPED, START + SECOND)}


def test_a_marker_and_an_assignment_are_no_steps_of_their_own() -> None:
    run = run_in(RUNNING)
    before = project(run).steps
    run.ask(commands.RecordMarker(step_id="m", name="seed"))
    run.append(e.TaskAssigned("claim", "ann", "ann"), "task")
    assert project(run).steps == before


@pytest.mark.contract("PRJ-1", "SEC-2")
def test_artifacts_of_steps_and_run_are_gathered_once_each_in_order() -> None:
    one, two, three = (ArtifactRef(f"s3://b/{n}", "log") for n in range(3))
    run = Driver().start()
    run.ask(activity("a"), activity("b"))
    run.append(e.StepCompleted(artifacts=(one, two)), "b")
    run.append(e.StepCompleted(artifacts=(two,)), "a")
    run.append(e.RunCompleted(artifacts=(three, one)))
    assert project(run).artifacts == (one, two, three)


# --- the runtime snapshot


@pytest.mark.contract("PRJ-4", "INV")
@given(plans)
def test_the_runtime_snapshot_is_the_fold_and_survives_json(plan: Plan) -> None:
    run = carry_out(plan)
    stored = encode(runtime_snapshot(run.state))
    assert msgspec.json.decode(stored, type=RuntimeSnapshot) == runtime_snapshot(run.state)
    # deleting it and folding the events, as the store numbered them, gives it back
    assert encode(runtime_snapshot(state_of(run.run_id, run.events))) == stored


@pytest.mark.contract("PRJ-4")
def test_the_waiting_fields_are_of_the_step_that_has_been_open_for_longest() -> None:
    run = Driver().start()
    run.ask(task("human"), timer("sleep", START + 5), wait("w", until=START + 9))
    seen = runtime_snapshot(run.state)
    assert (seen.waiting_kind, seen.waiting_token, seen.waiting_until) == ("task", "human@3", None)
    assert seen.active_task_id == run.state.open_steps["human"].body.task_id  # type: ignore[attr-defined]
    run.ask(commands.CancelStep(step_id="human"))
    seen = runtime_snapshot(run.state)
    assert (seen.waiting_kind, seen.waiting_token, seen.waiting_until) == ("timer", "sleep@4", START + 5)
    assert seen.active_task_id is None


@pytest.mark.contract("PRJ-4")
def test_a_run_that_waits_for_nothing_says_so() -> None:
    seen = runtime_snapshot(Driver().start().state)
    assert (seen.waiting_kind, seen.waiting_token, seen.waiting_until, seen.active_task_id) == (None,) * 4
    assert (seen.state_version, seen.status, seen.resume_pointer) == (2, RUNNING, 1)
    assert seen.snapshot_schema_version == index_rows.SNAPSHOT_SCHEMA_VERSION == 1
    assert (seen.last_executed_by, seen.last_executed_on) == ("node-a", START)


@pytest.mark.contract("PRJ-4")
def test_the_last_error_and_the_point_to_resume_from_are_kept() -> None:
    run = Driver().start()
    run.ask(activity())
    run.tell(failed())
    run.ask(commands.ContinueAsNew())
    seen = runtime_snapshot(run.state)
    assert (seen.last_error_code, seen.resume_pointer) == ("Broken", run.state.version)


def test_an_event_that_is_not_yet_persisted_is_not_projected() -> None:
    run = Driver()
    fresh: list[Event] = [replace(event, run_seq=0) for event in run.events]
    assert project_run("run-1", fresh) == RunSnapshot(run_id="run-1")


@pytest.mark.contract("PRJ-1", "PRJ-2")
async def test_who_follows_a_history_by_the_public_names_has_the_snapshot_of_the_run() -> None:
    app = hf.App("follow")

    @app.activity
    async def act(number: int) -> int:
        return number

    @app.workflow
    async def count(number: int) -> int:
        return sum([await act(each) for each in range(number)])

    async with app.node("memory://"):
        run = await app.start(count, 3)
        assert await run.result() == 3
        events, whole = await run.events(), await run.snapshot()
    followed = hf.RunSnapshot(run_id=run.run_id)
    for end in range(1, len(events) + 1):
        assert not hf.detect_gaps(followed.last_event_seq, events[end - 1].run_seq)
        followed = hf.incremental_project(followed, events[max(0, end - 3) : end])
    assert encode(followed) == encode(whole) == encode(hf.project_run(run.run_id, events))
    assert all(isinstance(step, hf.StepSnapshot) for step in followed.steps)
    with pytest.raises(hf.errors.HistoryGap):
        hf.project_run(run.run_id, events[1:])
