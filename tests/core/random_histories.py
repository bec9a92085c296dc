"""Histories made by really driving the core with random inputs.

A plan is a list of (what, number). Each entry is read against the run as it is then: "complete", 3 means the fourth
open activity, counted round. So every plan makes sense, and hypothesis can make a failing one shorter.
"""

from collections.abc import Callable, Sequence
from typing import get_args

from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import commands, events
from holdfast.core.event_writer import Refusal
from holdfast.core.events import ArtifactRef, UnknownBody
from holdfast.core.messages import (
    ActivityDetached,
    Actor,
    ControlName,
    Message,
    NodeLost,
    TaskAction,
    TaskOperation,
    TaskRequest,
    Update,
)
from holdfast.core.state import RUNNING, OpenStep
from holdfast.core.timing import Retry
from tests.core.driver import (
    SECOND,
    Driver,
    activity,
    answered,
    child,
    done,
    failed,
    made,
    outcome,
    task,
    timer,
    wait,
)

PATIENT = Retry(max_attempts=3, initial_ms=10)
CONTROLS: tuple[ControlName, ...] = get_args(ControlName)
ACTIONS: tuple[TaskAction, ...] = get_args(TaskAction)
NAMES = ("go", "stop", "é|~")

Act = Callable[[Driver, int], object]


def _steps(run: Driver, kind: str) -> list[OpenStep]:
    return [step for step in run.state.open_steps.values() if step.kind == kind]


def _ask(make: Callable[[Driver, int], commands.Command]) -> Act:
    def act(run: Driver, number: int) -> None:
        if run.state.status is RUNNING:
            run.ask(make(run, number))

    return act


def _on(kind: str, act: Callable[[Driver, OpenStep, int], object]) -> Act:
    def on(run: Driver, number: int) -> None:
        steps = _steps(run, kind)
        if steps:
            act(run, steps[number % len(steps)], number)

    return on


def _fresh(run: Driver, kind: str) -> str:
    return f"{kind}#{run.state.version}"


def _error(run: Driver, step: OpenStep, number: int) -> None:
    retry = PATIENT if number % 2 else Retry(max_attempts=1)
    run.tell(failed(step.step_id, step.logical_attempt_id, step.engine_attempt_id, retry))


def _detach(run: Driver, step: OpenStep, number: int) -> None:
    until = run.now + number * SECOND if number % 2 else None
    run.tell(ActivityDetached(step.step_id, step.logical_attempt_id, step.engine_attempt_id, until))


def _outcome(run: Driver, step: OpenStep, number: int) -> None:
    attempt = max(1, step.engine_attempt_id + number % 4 - 1)  # from the one before to two later
    ends: list[dict[str, object]] = [
        {"result": number},
        {"error": {"code": "Broken", "message": "it broke", "retryable": True}},
        {"is_detached": True},
        {"is_detached": True, "until": run.now + number * SECOND},
    ]
    run.tell(outcome(run, step.step_id, attempt, step.logical_attempt_id, **ends[number % 3 if number < 40 else 3]))


def _due(run: Driver, number: int) -> None:
    waiting = sorted((message.due_at or 0, message.signal_id) for message in run.inbox.values())
    if waiting:
        due_at, signal_id = waiting[number % len(waiting)]
        run.now = max(run.now, due_at)
        run.tell(run.inbox[signal_id])


def _offer(run: Driver) -> None:
    for signal in [signal for signal in run.mailbox if signal.consumed_seq is None]:
        run.tell(signal)


def _send(run: Driver, number: int) -> None:
    waits = _steps(run, "signal")
    address = waits[number % len(waits)] if waits and number % 5 == 0 else None
    name = address.name if address else NAMES[number % len(NAMES)]
    run.sent(name, number, step_id=address.step_id if address else None)
    _offer(run)


def _control(run: Driver, number: int) -> None:
    steps = [*run.state.failed_steps, *run.state.open_steps, "nowhere"]
    name = CONTROLS[number % len(CONTROLS)]
    if name in ("EMERGENCY_STOP", "CANCEL") and number % 3:
        return  # let most histories grow
    run.control(name, steps[number % len(steps)], is_allowed=number % 7 != 0)


def _finish(run: Driver, number: int) -> None:
    ends: tuple[commands.Command, ...] = (
        commands.CompleteRun(result=Raw(b"1")),
        commands.FailRun(error=events.ErrorInfo("Broken", "it broke")),
        commands.CancelRun(reason="enough"),
    )
    if run.state.status is RUNNING and number > 50:
        run.ask(ends[number % 3])


def _artifact(run: Driver, step: OpenStep, number: int) -> None:
    artifacts = (ArtifactRef(f"s3://bucket/{number}", "log"), ArtifactRef("s3://bucket/all", "log"))
    run.append(events.StepCompleted(Raw(b"2"), artifacts), step.step_id, step.logical_attempt_id)


def _update(run: Driver, number: int) -> None:
    for step in _steps(run, "update"):
        error = events.ErrorInfo("Refused", "no") if number % 2 else None
        if run.state.status is RUNNING:
            run.ask(commands.CompleteUpdate(step_id=step.step_id, error=error))
        return
    identity = _fresh(run, "update")
    run.tell(Update(id=identity, update_id=identity, name="set", input=Raw(b"1")))


def _rotation_with_steps(run: Driver, number: int) -> commands.ContinueAsNew:
    """Return a rotation that carries most of the open and failed steps over."""
    state = run.state
    steps = [*state.open_steps, *state.failed_steps]
    kept = tuple(step for place, step in enumerate(steps) if number % 3 == 0 or place % 7 != number % 7)
    updates = tuple(step.step_id for step in _steps(run, "update") if step.step_id not in kept)
    return commands.ContinueAsNew(input=Raw(b"9"), updates=updates, steps=kept)


def _operate(run: Driver, step: OpenStep, number: int) -> None:
    run.tell(_operation(run, step, number))


def _operation(run: Driver, step: OpenStep, number: int) -> TaskOperation:
    assert isinstance(step.body, events.TaskCreated)
    request = TaskRequest(
        task_id=step.body.task_id if number % 9 else "another",
        step_id=step.step_id,
        action=ACTIONS[number % len(ACTIONS)],
        actor=Actor(f"worker-{number % 3}", ("boss",) if number % 2 else (), number % 5 == 0),
        assignee=f"worker-{number % 4}",
        roles=("boss",) if number % 4 == 0 else None,
        text="soon",
    )
    return TaskOperation(id=_fresh(run, "operation"), request=request, problem="unfit" if number % 11 == 0 else None)


def _task(run: Driver, number: int) -> commands.AskHuman:
    return replace(
        task(_fresh(run, "task")),
        roles=("boss",) if number % 2 else (),
        approvals=1 + number % 3,
        remind_ms=number * 500 or None,
        escalation=events.EscalationRule(number * 700, ("boss",)) if number % 2 else None,
    )


def _unknown(run: Driver, number: int) -> None:
    body = UnknownBody(Raw(f'{{"n":{number}}}'.encode()))
    event = made(run.state, body, f"odd#{run.state.version}", now=run.now)
    run.keep(replace(event, event_type="FromTheFuture"))


def _stale(run: Driver, number: int) -> None:
    for old in range(1, 4):
        answer = run.try_tell(done(f"activity#{number}", old + 40))
        assert isinstance(answer, Refusal) or not answer.events
    run.tell(NodeLost("nowhere"))


ACTS: dict[str, Act] = {
    "activity": _ask(lambda run, n: activity(_fresh(run, "activity"))),
    "job": _ask(lambda run, n: replace(activity(_fresh(run, "activity")), queue="far")),
    "detach": _on("activity", _detach),
    "outcome": _on("activity", _outcome),
    "timer": _ask(lambda run, n: timer(_fresh(run, "timer"), run.now + n * SECOND)),
    "wait": _ask(
        lambda run, n: wait(_fresh(run, "wait"), NAMES[n % len(NAMES)], run.now + n * SECOND if n % 2 else None)
    ),
    "task": _ask(_task),
    "child": _ask(lambda run, n: child(_fresh(run, "child"), f"child-{n}-{run.state.version}")),
    "marker": _ask(lambda run, n: commands.RecordMarker(step_id=_fresh(run, "marker"), name="seed", value=Raw(b"7"))),
    "give up": _on("activity", lambda run, s, n: run.state.status is RUNNING and run.ask(_cancel(s))),
    "carry": _ask(_rotation_with_steps),
    "rotate": _ask(lambda run, n: commands.ContinueAsNew(input=Raw(b"9"))),
    "complete": _on("activity", lambda run, s, n: run.tell(done(s.step_id, s.logical_attempt_id))),
    "complete with artifacts": _on("activity", _artifact),
    "error": _on("activity", _error),
    "lose the node": _on("activity", lambda run, s, n: run.tell(NodeLost(s.step_id))),
    "due": _due,
    "send": _send,
    "offer": lambda run, n: _offer(run),
    "answer": _on(
        "task", lambda run, s, n: run.tell(answered(run, s.step_id, "TaskCompleted", {"actor": f"worker-{n % 3}"}))
    ),
    "operate": _on("task", _operate),
    "child returns": _on("child", lambda run, s, n: run.tell(_child_outcome(run, s, n))),
    "update": _update,
    "control": _control,
    "pause": lambda run, n: run.control("PAUSE"),
    "pause for an error": _ask(lambda run, n: commands.PauseRun(error=events.ErrorInfo("Stuck", "it is stuck"))),
    "resume": lambda run, n: run.control("RESUME", raise_failure=n % 2 == 0),
    "retry": lambda run, n: run.control("RETRY_STEP", next(iter(run.state.failed_steps), None)),
    "cancel": lambda run, n: n % 4 == 0 and run.control("CANCEL"),
    "unknown": _unknown,
    "stale": _stale,
    "finish": _finish,
}


def _cancel(step: OpenStep) -> commands.CancelStep:
    return commands.CancelStep(step_id=step.step_id, reason="no longer wanted")


def _child_outcome(run: Driver, step: OpenStep, number: int) -> Message:
    outcome = {"result": number} if number % 2 else {"error": {"code": "Broken", "message": "the child broke"}}
    return answered(run, step.step_id, "SubWorkflowCompleted", outcome)


Plan = Sequence[tuple[str, int]]

_entries = st.tuples(st.sampled_from(sorted(ACTS)), st.integers(0, 60))
plans: st.SearchStrategy[Plan] = st.lists(_entries, max_size=20) | st.lists(_entries, min_size=30, max_size=80)


def carry_out(plan: Plan, run_id: str = "run-1") -> Driver:
    """Return the run that has gone through the plan, as far as it went."""
    run = Driver(run_id)
    for what, number in plan:
        if run.state.is_finished:
            break
        if "start" in run.inbox and number % 3:
            run.start()
        ACTS[what](run, number)
    return run


histories = plans.map(carry_out)
