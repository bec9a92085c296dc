"""Views of runs in which something is wrong: at least one for each invariant."""

from collections.abc import Callable

from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import commands
from holdfast.core import events as e
from holdfast.core.events import Event
from holdfast.core.invariants import RunView, SystemView
from holdfast.core.messages import (
    OUTCOME_SIGNAL,
    ActivityDetached,
    ActivityErrored,
    Message,
    NodeLost,
    Signal,
    Update,
)
from holdfast.core.reconciliation import indeterminate
from holdfast.core.state import RUNNING, RunStatus
from holdfast.core.timing import Retry
from tests.core.driver import SECOND, START, Driver, activity, child, done, failed, made, task, timer, wait
from tests.core.event_bodies import run_in

View = RunView | SystemView


def with_event(view: RunView, place: int, **changes: object) -> RunView:
    """Return the view with one event changed; places count from 0."""
    events = list(view.events)
    events[place] = replace(events[place], **changes)
    return replace(view, events=tuple(events))


def busy() -> Driver:
    """Return a run with one open step of each kind, two consumed signals and one that waits."""
    run = run_in(RUNNING)
    for number in range(2):
        run.ask(wait(f"go{number}", "go"))
    run.tell(run.sent("go", 1))
    run.tell(run.sent("go", 2, step_id="go1"))
    run.sent("stop", 3)
    return run


def consumed(view: RunView) -> list[tuple[int, Signal]]:
    """Return the consumed signals with their places."""
    return [(place, signal) for place, signal in enumerate(view.signals) if signal.consumed_seq is not None]


def with_signal(view: RunView, place: int, **changes: object) -> RunView:
    """Return the view with one signal changed."""
    signals = list(view.signals)
    signals[place] = replace(signals[place], **changes)
    return replace(view, signals=tuple(signals))


def appended(run: Driver, body: e.Body, step_id: str) -> Event:
    """Return an event that would follow, numbered, without checking that it can."""
    return replace(made(run.state, body, step_id), run_seq=run.state.version + 1)


def parent_and_child(child_status: RunStatus = RUNNING) -> tuple[RunView, RunView]:
    """Return a run that waits for a child, and the child."""
    parent = Driver("parent").start()
    parent.ask(child("child", "child"))
    parent.is_owned = False
    offspring = Driver("child", parent_run_id="parent").start()
    if child_status is not RUNNING:
        offspring.append(e.RunCompleted())
    return parent.view(), offspring.view()


def timed(until: int) -> Driver:
    """Return a run with a wait that ends then."""
    run = run_in(RUNNING)
    run.ask(wait("timed", "on", until=until))
    return run


# --- the collection

BROKEN_VIEWS: list[tuple[str, str, Callable[[], View]]] = []


def breaks(invariant: str) -> Callable[[Callable[[], View]], Callable[[], View]]:
    """Enter a view in which this invariant is violated."""

    def enter(make: Callable[[], View]) -> Callable[[], View]:
        BROKEN_VIEWS.append((invariant, make.__name__, make))
        return make

    return enter


@breaks("run_seq_is_gapless")
def an_event_was_deleted() -> View:
    view = busy().view()
    return replace(view, events=view.events[:3] + view.events[4:], version=view.version - 1)


@breaks("run_seq_is_gapless")
def numbers_begin_at_2() -> View:
    view = busy().view()
    return replace(view, events=view.events[1:], version=view.version - 1)


@breaks("run_seq_is_gapless")
def the_version_is_behind() -> View:
    view = busy().view()
    return replace(view, version=view.version - 1)


@breaks("run_seq_is_gapless")
def an_event_belongs_to_another_run() -> View:
    return with_event(busy().view(), 2, run_id="run-2")


@breaks("idempotency_keys_are_unique")
def two_events_share_a_key() -> View:
    view = busy().view()
    return with_event(view, 4, idempotency_key=view.events[3].idempotency_key)


@breaks("idempotency_keys_are_exact")
def the_key_of_a_step_event_is_of_another_attempt() -> View:
    return with_event(busy().view(), 2, logical_attempt_id=2)


@breaks("idempotency_keys_are_exact")
def the_key_of_a_run_event_is_of_another_occurrence() -> View:
    run = busy()
    run.control("PAUSE")
    view = run.view()
    other = made(run.state, e.RunPaused()).idempotency_key
    return with_event(view, len(view.events) - 1, idempotency_key=other)


@breaks("idempotency_keys_are_exact")
def an_event_id_was_drawn() -> View:
    return with_event(busy().view(), 2, event_id="00000000-0000-4000-8000-000000000000")


@breaks("step_results_are_recorded_once")
def a_step_completed_twice() -> View:
    run = Driver().start()
    run.ask(activity())
    run.tell(done())
    view = run.view()
    twice = replace(view.events[-1], run_seq=view.version + 1)
    return replace(view, events=(*view.events, twice), version=view.version + 1)


@breaks("step_results_are_recorded_once")
def a_step_failed_and_then_completed_in_one_attempt() -> View:
    run = Driver().start()
    run.ask(activity())
    run.tell(failed())
    late = appended(run, e.StepCompleted(), "charge")
    view = run.view()
    return replace(view, events=(*view.events, late), version=view.version + 1)


@breaks("history_folds")
def a_result_without_its_step() -> View:
    run = Driver().start()
    view = run.view()
    return replace(view, events=(*view.events, appended(run, e.TimerFired(), "never")), version=view.version + 1)


@breaks("snapshot_equals_fold")
def the_stored_status_is_old() -> View:
    return replace(busy().view(), status=RunStatus.PENDING)


@breaks("snapshot_equals_fold")
def the_snapshot_is_of_an_earlier_turn() -> View:
    run = busy()
    before = run.view().snapshot
    run.tell(done("activity"))
    return run.view(snapshot=before)


@breaks("snapshot_equals_fold")
def a_cursor_moved_without_its_event() -> View:
    view = busy().view()
    assert view.snapshot is not None
    return replace(view, snapshot=replace(view.snapshot, signals={"go": "9999"}))


@breaks("acknowledged_signals_are_kept")
def an_unconsumed_signal_is_gone() -> View:
    view = busy().view()
    return replace(view, signals=view.signals[:-1])


@breaks("acknowledged_signals_are_kept")
def a_consumed_signal_is_gone() -> View:
    view = busy().view()
    return replace(view, signals=view.signals[1:])


@breaks("reported_outcomes_are_recorded")
def an_outcome_was_accepted_and_its_step_was_closed_without_it() -> View:
    run = busy()
    run.sent(OUTCOME_SIGNAL, {"logical_attempt_id": 1, "engine_attempt_id": 1}, step_id="closed")
    return run.view()


@breaks("consumed_signals_are_recorded")
def a_signal_was_marked_as_consumed_and_never_applied() -> View:
    view = busy().view()
    return with_signal(view, len(view.signals) - 1, consumed_seq=2)


@breaks("consumed_signals_are_recorded")
def a_signal_is_marked_at_the_event_of_another() -> View:
    view = busy().view()
    [(one, first), (two, second)] = consumed(view)
    return with_signal(with_signal(view, one, consumed_seq=second.consumed_seq), two, consumed_seq=first.consumed_seq)


@breaks("consumed_signals_are_recorded")
def a_signal_was_applied_and_is_still_in_the_mailbox() -> View:
    view = busy().view()
    return with_signal(view, consumed(view)[0][0], consumed_seq=None)


@breaks("consumed_signals_are_recorded")
def the_recorded_payload_is_another() -> View:
    view = busy().view()
    return with_signal(view, consumed(view)[0][0], payload=Raw(b'"forged"'))


@breaks("signals_are_consumed_once")
def two_events_received_one_signal() -> View:
    view = busy().view()
    [(_, first), (_, second)] = consumed(view)
    assert second.consumed_seq is not None
    return with_event(view, second.consumed_seq - 1, caused_by_signal_id=first.id)


@breaks("signals_are_consumed_once")
def two_signals_were_consumed_by_one_event() -> View:
    view = busy().view()
    [(_, first), (two, _)] = consumed(view)
    return with_signal(view, two, consumed_seq=first.consumed_seq)


def two_of_one_name() -> Driver:
    run = Driver().start()
    run.ask(wait("a"), wait("b"))
    run.tell(run.sent("go"))
    run.tell(run.sent("go"))
    return run


@breaks("signal_order_is_kept")
def the_later_signal_was_received_first() -> View:
    view = two_of_one_name().view()
    one, two = view.events[-2:]
    swapped = replace(view, events=(*view.events[:-2], replace(one, data=two.data), replace(two, data=one.data)))
    return replace(swapped, signals=())


@breaks("signal_order_is_kept")
def an_unconsumed_signal_is_behind_the_cursor() -> View:
    run = Driver().start()
    run.ask(wait("a"))
    run.sent("go")
    run.tell(run.sent("go"))
    return run.view()


@breaks("signal_order_is_kept")
def the_mailbox_is_out_of_order() -> View:
    view = busy().view()
    return replace(view, signals=tuple(reversed(view.signals)))


@breaks("signal_order_is_kept")
def two_signals_have_one_number() -> View:
    view = busy().view()
    return with_signal(view, 1, inbox_seq=1)


@breaks("rotations_keep_updates")
def a_rotation_forgets_an_update() -> View:
    run = Driver().start()
    run.tell(Update(id="0001", update_id="u-1", name="rename", refusal=None))
    run.ask(commands.ContinueAsNew())
    return run.view()


@breaks("rotations_keep_steps")
def a_rotation_carries_a_step_with_another_deadline() -> View:
    run = Driver().start()
    run.ask(wait("w", "go", START + 60 * SECOND), commands.ContinueAsNew(steps=("w",)))
    rotated = run.events[-1].data
    assert isinstance(rotated, e.ContinuedAsNew)
    other = Raw(bytes(rotated.carried).replace(str(START + 60 * SECOND).encode(), str(START + 90 * SECOND).encode()))
    return with_event(run.view(), len(run.events) - 1, data=replace(rotated, carried=other))


@breaks("waits_have_one_open_task")
def a_wait_has_two_open_tasks() -> View:
    view = busy().view()
    return replace(view, tasks=(*view.tasks, replace(view.tasks[0], task_id="another")))


@breaks("tasks_equal_fold")
def an_answered_task_is_still_open() -> View:
    run = busy()
    before = run.view().tasks
    run.control("SKIP_STEP", "task")
    return run.view(tasks=before)


@breaks("tasks_equal_fold")
def an_open_task_has_no_row() -> View:
    return busy().view(tasks=())


@breaks("tasks_equal_fold")
def a_task_has_another_assignee() -> View:
    view = busy().view()
    return replace(view, tasks=(replace(view.tasks[0], assignee="mallory"),))


@breaks("tasks_equal_fold")
def a_task_has_other_roles() -> View:
    view = busy().view()
    return replace(view, tasks=(replace(view.tasks[0], roles=("mallory",)),))


def doubtful() -> Driver:
    """Return a run with a keyed step under way, and one that waits for an operator."""
    run = Driver().start()
    run.ask(replace(activity("charge"), idempotency_key="k1"), replace(activity("refund"), idempotency_key="k2"))
    run.tell(NodeLost("refund"))
    run.tell(ActivityErrored("refund", 1, 2, indeterminate("the bank is closed"), Retry()))
    return run


@breaks("records_equal_fold")
def a_keyed_step_is_scheduled_without_its_record() -> View:
    view = doubtful().view()
    return replace(view, records=tuple(record for record in view.records if record.step_id != "charge"))


@breaks("records_equal_fold")
def a_record_has_another_status() -> View:
    view = doubtful().view()
    return replace(view, records=tuple(replace(record, status="failed") for record in view.records))


@breaks("records_equal_fold")
def a_record_is_of_another_key() -> View:
    view = doubtful().view()
    return replace(view, records=tuple(replace(record, idempotency_key="k3") for record in view.records))


@breaks("unresolved_steps_are_asked_about")
def a_step_is_unresolved_and_no_operator_is_asked() -> View:
    return doubtful().view(tasks=())


@breaks("unresolved_steps_are_asked_about")
def an_operator_is_asked_about_a_step_that_is_closed() -> View:
    run = doubtful()
    before = run.view().tasks
    run.control("SKIP_STEP", "refund")
    return run.view(tasks=before)


@breaks("waits_equal_fold")
def a_closed_wait_is_still_found() -> View:
    run = busy()
    before = run.view().waits
    run.tell(run.sent("go"))
    return run.view(waits=before)


@breaks("waits_equal_fold")
def an_open_wait_is_not_found() -> View:
    return busy().view(waits=())


@breaks("waits_equal_fold")
def a_wait_has_another_token() -> View:
    view = busy().view()
    return replace(view, waits=tuple(replace(row, token="forged") for row in view.waits))


def unowned(*todo: commands.Command) -> Driver:
    run = Driver().start()
    run.ask(*todo)
    run.is_owned = False
    return run


@breaks("unfinished_runs_can_go_on")
def a_run_waits_for_nothing() -> View:
    return unowned().view()


@breaks("unfinished_runs_can_go_on")
def a_new_run_has_lost_its_first_message() -> View:
    run = Driver()
    run.is_owned = False
    run.inbox.clear()
    return run.view()


@breaks("unfinished_runs_can_go_on")
def an_activity_is_open_and_no_node_runs_it() -> View:
    return unowned(activity(), wait()).view()


@breaks("timers_are_scheduled")
def a_timer_has_lost_its_message() -> View:
    run = unowned(timer("sleep"), wait())
    run.inbox.clear()
    return run.view()


@breaks("timers_are_scheduled")
def a_time_limit_has_lost_its_message_and_another_is_later() -> View:
    run = unowned(wait("w", until=START + SECOND), timer("sleep", START + 2 * SECOND))
    del run.inbox[run.message("w").signal_id]
    return run.view()


@breaks("timers_are_scheduled")
def a_retry_has_lost_its_message() -> View:
    run = unowned(activity())
    run.tell(failed(retry=Retry(initial_ms=1_000)))
    run.inbox.clear()
    run.is_owned = True
    return run.view()


@breaks("timers_are_scheduled")
def a_detached_activity_has_lost_its_time_limit() -> View:
    run = unowned(activity(), wait())
    run.tell(ActivityDetached("charge", 1, 1, START + SECOND))
    run.inbox.clear()
    run.now = START + 2 * SECOND  # not even when it is over
    return run.view()


@breaks("timers_are_scheduled")
def a_task_has_lost_its_reminder() -> View:
    run = unowned(replace(task(), remind_ms=1_000))
    run.tell(run.inbox.popitem()[1])
    run.inbox.clear()
    return run.view()


@breaks("timers_are_scheduled")
def a_task_has_lost_its_escalation_and_its_reminder_is_later() -> View:
    run = unowned(replace(task(), remind_ms=2_000, escalation=e.EscalationRule(1_000, ("boss",))))
    run.inbox = {signal_id: kept for signal_id, kept in run.inbox.items() if "remind" in signal_id}
    return run.view()


STRAY = Message(signal_id="m", run_id="run-1", type="InternalContinue", occurred_at=START)


@breaks("finished_runs_leave_nothing")
def a_finished_run_has_a_message() -> View:
    return run_in(RunStatus.COMPLETED).view(messages=(STRAY,))


@breaks("finished_runs_leave_nothing")
def a_finished_run_has_a_wait() -> View:
    return run_in(RunStatus.FAILED).view(waits=busy().view().waits)


@breaks("finished_runs_leave_nothing")
def a_finished_run_has_an_open_task() -> View:
    return run_in(RunStatus.CANCELLED).view(tasks=busy().view().tasks)


@breaks("finished_runs_leave_nothing")
def a_finished_run_has_an_owner() -> View:
    return run_in(RunStatus.COMPLETED).view(lease_owner="node-a")


@breaks("finished_runs_leave_nothing")
def a_finished_run_is_ready() -> View:
    return run_in(RunStatus.COMPLETED).view(ready_at=START)


@breaks("started_children_exist")
def a_child_was_never_created() -> View:
    parent, _ = parent_and_child()
    return SystemView((parent,))


@breaks("started_children_exist")
def a_child_has_another_parent() -> View:
    parent, offspring = parent_and_child()
    return SystemView((parent, replace(offspring, parent_run_id=None)))


@breaks("unfinished_children_have_parents")
def a_parent_was_purged() -> View:
    _, offspring = parent_and_child()
    return SystemView((offspring,))


@breaks("ended_children_are_reported")
def a_parent_waits_for_a_child_that_has_ended() -> View:
    return SystemView(parent_and_child(RunStatus.COMPLETED))


@breaks("deadlines_decide")
def a_signal_that_came_too_late_was_taken() -> View:
    run = timed(START + 9 * SECOND)
    run.tell(run.sent("on"))
    [place] = [place for place, signal in consumed(run.view()) if signal.name == "on"]
    return with_signal(run.view(), place, accepted_at=START + 9 * SECOND + 1)


@breaks("families_are_of_one_tenant")
def a_child_is_of_another_tenant() -> View:
    parent, offspring = parent_and_child()
    return SystemView((replace(parent, tenant="acme"), offspring))


@breaks("families_are_of_one_tenant")
def a_child_is_of_another_project() -> View:
    parent, offspring = parent_and_child()
    return SystemView((parent, replace(offspring, project="shop")))


@breaks("families_are_of_one_tenant")
def a_child_is_of_another_environment() -> View:
    parent, offspring = parent_and_child()
    return SystemView((replace(parent, environment="prod"), replace(offspring, environment="test")))
