"""One body of each event type, and a run in each status for them to happen to."""

from msgspec import Raw

from holdfast.core import events as e
from holdfast.core.attributes import At
from holdfast.core.events import ArtifactRef, Body, ErrorInfo
from holdfast.core.state import RunStatus
from tests.core.driver import START, Driver, activity, child, task, timer, wait

PLAN = e.PlanSource("0f" * 32, "file:///etl.yaml")
RETRY = e.RetryOf("run-0", "click", "ann", "again")
ERROR = ErrorInfo("Broken", "it broke", True, "infrastructure", "line 1", ErrorInfo("Cause", "deeper"))
ARTIFACT = ArtifactRef("s3://bucket/log", "log", "ab" * 32, 12, START)

# Each body with the step it is for. The names of steps are the kinds of the steps that `run_in` leaves open.
SAMPLES: list[tuple[Body, str | None]] = [
    (
        e.RunQueued(
            *("order", "1", "acme", "shop", "prod", "req-1", Raw(b"{}"), "parent", "child", "child@4", 2, RETRY, PLAN),
            attributes={"cents": 5, "reference.customer": "42"},
            schedule=e.ScheduleTick("nightly", 5),
            forked_from=e.ForkedFrom("run-0", 7, "run-00"),
            requires_approval=True,
            start_at=START + 1,
            reference_key="ref-7",
            tags=("urgent",),
            timeouts=e.RunTimeouts(60_000, 30_000, 5_000),
            context=Raw(b'{"user":"ann"}'),
            priority=2,
            needs=1,
            debounce=e.DebounceTerms(30_000, 300_000),
        ),
        None,
    ),
    (e.RunApproved("ann"), None),
    (e.RunStarted(), None),
    (e.RunPaused("lunch", ERROR, "activity"), None),
    (e.RunResumed("back"), None),
    (e.RunCancelRequested("enough"), None),
    (e.RunTimedOut("run", 30_000), None),
    (e.InputReplaced(input=Raw(b"[2]"), start_at=7), None),
    (e.RunCompleted(Raw(b"1"), (ARTIFACT,)), None),
    (e.RunFailed(ERROR, "run"), None),
    (e.RunCancelled("enough"), None),
    (e.ContinuedAsNew(Raw(b"2"), Raw(b'{"plan_id":"order","plan_version":"1"}')), None),
    (e.SignalAccepted("PAUSE", "click-1", "ann", "lunch", "activity"), None),
    (e.SignalRejected("PAUSE", "click-1", "bob", "not permitted", "activity"), None),
    (e.StepStarted("charge", Raw(b"[1]"), "fast", "order-1", Raw(b'{"timeout_ms":9}')), "fresh"),
    (e.StepRetried("failed", START + 1, ERROR, 1, True, "node-b"), "activity"),
    (e.StepDetached(START + 1, {"type": "string"}), "activity"),
    (e.StepUnresolved(ERROR, False, Raw(b"15"), "node-b"), "activity"),
    (e.StepSucceededLate(Raw(b"16"), "node-b"), "activity"),
    (e.StepCompleted(Raw(b"3"), (ARTIFACT,), "verifier"), "activity"),
    (e.StepFailed(ERROR), "activity"),
    (e.StepSkipped("not needed", Raw(b"7")), "activity"),
    (e.StepCancelled("not needed"), "timer"),
    (e.TimerStarted("fresh@9", START + 1), "fresh"),
    (e.TimerFired(), "timer"),
    (e.SignalWaiting("go", "fresh@9", START + 1), "fresh"),
    (e.SignalReceived("go", "click-1", "2026_x", "signal", Raw(b"4"), Raw(b"5"), ERROR), "signal"),
    (e.SignalTimedOut("go"), "signal"),
    (e.SignalDeadLettered("go", "click-3", "2026_y", "signal", "payload: Expected `int`"), None),
    (e.SignalSent("run-2", "go", "click-2", Raw(b"14"), "approval"), "fresh"),
    (
        e.TaskCreated(
            *("task-1", "approve", "fresh@9", "form", "/a", Raw(b"6"), Raw(b"7"), ("boss",), "ann", START + 1),
            *(60_000, e.EscalationRule(90_000, ("chief",), "eve"), 2, 3),
        ),
        "fresh",
    ),
    (e.TaskAssigned("escalate", "ann", "ann", ("boss",)), "task"),
    (e.TaskReminded(2), "task"),
    (e.TaskCommented("ann", "soon"), "task"),
    (e.TaskAnswered("ann", Raw(b"8")), "task"),
    (e.TaskRefused("claim", "bob", ERROR, "ann", START), "task"),
    (e.TaskCompleted("ann", Raw(b"8")), "task"),
    (
        e.ChildStarted(
            *("run-2", "ship", "1", "fresh@9", Raw(b"9"), "cancel"),
            PLAN,
            {"cents": 5},
            ("fast",),
            3,
            e.RunTimeouts(60_000, 30_000, 5_000),
        ),
        "fresh",
    ),
    (e.ChildCompleted(Raw(b"10")), "child"),
    (e.ChildFailed(ERROR), "child"),
    (e.MarkerRecorded("seed", Raw(b"11")), "fresh"),
    (e.AttributesSet({"cents": 1, "due": At(5), "parts": ("a",), "region": None}), "fresh"),
    (e.UpdateAccepted("rename", Raw(b"12"), False), "fresh"),
    (e.UpdateCompleted(Raw(b"13"), ERROR), "update"),
]


def run_in(status: RunStatus) -> Driver:
    """Return a run that has come to this status; where it may, with one open step of every kind."""
    awaits = e.RunQueued("order", "1", input=Raw(b"{}"), requires_approval=True)
    run = Driver(queued=awaits if status in (RunStatus.PENDING, RunStatus.APPROVED) else None)
    if status is RunStatus.APPROVED:
        run.control("APPROVE")
    elif status is not RunStatus.PENDING:
        run.start()
        run.ask(activity("activity"), timer("timer"), wait("signal"), task("task"), child("child"))
        run.append(e.UpdateAccepted("rename"), "update")
    if status is RunStatus.PAUSED:
        run.control("PAUSE")
    elif status is RunStatus.COMPLETED:
        run.append(e.RunCompleted())
    elif status is RunStatus.FAILED:
        run.append(e.RunFailed(ERROR))
    elif status is RunStatus.CANCELLED:
        run.append(e.RunCancelled())
    assert run.state.status is status
    return run
