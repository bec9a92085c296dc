"""Golden histories: runs as this version of Holdfast writes them, kept so that every later one can read them.

A version of the format is two files: `v1.jsonl`, one event to a line, as a store keeps it (the body and the engine's
reference as JSON text), and `v1.expected.json`, the snapshots that those events give. Once released they never
change. When an event type is added, or the schema version of one grows, add the next version with

    python -m tests.histories.golden

which writes new files and never touches old ones. (A version that was never released may be deleted and made anew.)
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec, commands
from holdfast.core import events as e
from holdfast.core.attributes import At
from holdfast.core.events import Event, UnknownBody
from holdfast.core.index_rows import runtime_snapshot
from holdfast.core.messages import INPUT_STEP, ActivityErrored, ActivityOutcome, NodeLost, ReportedOutcome, Update
from holdfast.core.reconciliation import indeterminate, without_result
from holdfast.core.snapshot import project_run
from holdfast.core.state import state_of
from holdfast.core.timing import Retry
from tests.core.driver import SECOND, START, Driver, activity, answered, child, done, failed, made, task, timer, wait
from tests.core.event_bodies import SAMPLES

FOLDER = Path(__file__).parent
TASK_EVENTS = ("TaskAssigned", "TaskReminded", "TaskCommented", "TaskAnswered", "TaskRefused")


def versions() -> list[int]:
    """Return the versions of the format that are kept, oldest first."""
    return sorted(int(path.stem.removeprefix("v")) for path in FOLDER.glob("v*.jsonl"))


# --- lines


def to_line(event: Event) -> str:
    """Return an event as a line of a golden file."""
    fields: dict[str, Any] = {name: getattr(event, name) for name in Event.__struct_fields__}
    fields["data"] = codec.encode_body(event.data)
    fields["engine_run_ref"] = codec.encode_ref(event.engine_run_ref)
    return json.dumps(fields, ensure_ascii=False)


def from_line(line: str) -> Event:
    """Return the event of a line, read as a store reads it."""
    fields = json.loads(line)
    fields["data"] = codec.decode_body(fields["event_type"], fields["schema_version"], fields["data"])
    fields["engine_run_ref"] = codec.decode_ref(fields["engine_run_ref"])
    return Event(**fields)


def expected(run_id: str, events: list[Event]) -> dict[str, Any]:
    """Return what the events of a run give, as plain values."""
    return {
        "run": msgspec.to_builtins(project_run(run_id, events)),
        "runtime": msgspec.to_builtins(runtime_snapshot(state_of(run_id, events))),
    }


# --- runs


def make_runs() -> list[Driver]:
    """Return a handful of runs that have, between them, an event of every type."""
    return [smooth(), troubled(), sociable(), awkward(), doubtful(), carrying(), late(), debounced(), complete_bodies()]


def smooth() -> Driver:
    """Return a run in which everything goes well."""
    run = Driver("smooth", e.RunQueued("order", "1", input=Raw(b"{}"), requires_approval=True))
    run.control("APPROVE")
    run.start()
    run.ask(activity(), timer("sleep", run.now + SECOND), wait("approval", "approve", run.now + 60 * SECOND))
    run.now += SECOND
    run.tell(done())
    run.tell(run.message("sleep"))
    run.tell(run.sent("approve", {"approved": True, "by": "ann"}, signal_id="click-1"))
    run.ask(commands.RecordMarker(step_id="seed", name="seed", value=Raw(b"42")))
    run.ask(commands.SetAttributes(step_id="set", values={"cents": 5, "due": At(7), "parts": ("a", "b"), "vip": True}))
    run.ask(commands.CompleteRun(result=Raw(b'"receipt-1"')))
    return run


def late() -> Driver:
    """Return a run that takes longer than it may, and cleans up."""
    timeouts = e.RunTimeouts(60_000, 10_000, 5_000)
    run = Driver("late", e.RunQueued("order", "1", input=Raw(b"{}"), timeouts=timeouts)).start()
    run.ask(wait("approval", "approve"))
    run.now += 10 * SECOND
    run.tell(run.inbox["timeout:run@0"])
    run.ask(commands.CancelStep(step_id="approval"), commands.CancelRun())
    return run


def debounced() -> Driver:
    """Return a run that gets another input before it begins."""
    terms = e.DebounceTerms(30_000, 100_000)
    queued = e.RunQueued("order", "1", input=Raw(b"[1]"), debounce=terms, start_at=START + 30 * SECOND, needs=4)
    run = Driver("debounced", queued)
    run.now += 20 * SECOND
    outcome = ActivityOutcome(logical_attempt_id=0, engine_attempt_id=0, result=Raw(b"[2]"))
    run.tell(ReportedOutcome(id="0190-2", step_id=INPUT_STEP, outcome=outcome, accepted_at=run.now))
    run.now += 30 * SECOND
    run.start()
    run.ask(commands.CompleteRun(result=Raw(b"2")))
    return run


def troubled() -> Driver:
    """Return a run in which things fail, are tried again, skipped and given up, and which fails in the end."""
    run = Driver("troubled").start()
    run.ask(activity("charge"), activity("reserve"), wait("late", "never", run.now + SECOND))
    run.tell(failed("charge", retry=Retry(max_attempts=2, jitter=0.0)))
    run.now += SECOND
    run.tell(run.message("charge"))
    run.tell(failed("charge", engine_attempt=2))
    run.tell(run.message("late"))
    for attempt in range(2, 12):
        run.control("RETRY_STEP", "charge")
        run.tell(failed("charge", attempt, attempt + 1))
    run.control("SKIP_STEP", "charge")
    run.control("RETRY_STEP", "charge")
    run.tell(NodeLost("reserve"))
    for name in ("PAUSE", "RESUME", "PAUSE", "RESUME"):
        run.control(name)
    run.ask(commands.CancelStep(step_id="reserve", reason="no longer wanted"))
    run.ask(commands.FailRun(error=e.ErrorInfo("OutOfStock", "none left", category="business")))
    return run


def sociable() -> Driver:
    """Return a run with humans, children and updates, which is rotated and then cancelled."""
    run = Driver("sociable").start()
    run.ask(task(), child("ship", "child-1"), child("bill", "child-2"))
    run.append(e.TaskAssigned("claim", "ann", "ann"), "approve")
    run.tell(answered(run, "approve", "TaskCompleted", {"actor": "ann", "answer": {"ok": True}}))
    run.tell(answered(run, "ship", "SubWorkflowCompleted", {"result": 7}))
    run.tell(answered(run, "bill", "SubWorkflowCompleted", {"error": {"code": "Broken", "message": "no"}}))
    run.tell(Update(id="0190-1", update_id="u-1", name="rename", input=Raw(b'"x"')))
    run.ask(commands.CompleteUpdate(step_id="update:0190-1", error=e.ErrorInfo("Refused", "no")))
    run.ask(commands.ContinueAsNew(input=Raw(b'{"round":2}')))
    run.ask(wait("again", "go"))
    run.control("CANCEL")
    run.ask(commands.CancelRun(reason="enough"))
    return run


def awkward() -> Driver:
    """Return a run with names that try to be something else, an event from the future, and no end."""
    run = Driver("awkward").start()
    run.ask(activity("a|b|1|StepStarted|1"), wait("caf\u00e9/\U0001f680", "cafe\u0301 %|:"), wait("caf\u00e9", "go"))
    run.tell(run.sent("cafe\u0301 %|:", "\u2028", signal_id="\u00e9" * 64))
    run.tell(run.sent("go", step_id="caf\u00e9"))
    body = UnknownBody(Raw(b'{"what": [1.50, "we cannot know"] }'))
    run.keep(replace(made(run.state, body, "odd"), event_type="FromTheFuture", schema_version=3))
    run.control("PAUSE", reason="to look at it")
    return run


def doubtful() -> Driver:
    """Return a run whose effects are not known: nodes are lost, verifiers cannot say, an operator is asked."""
    run = Driver("doubtful").start()
    run.ask(replace(activity("charge"), idempotency_key="order-1"), replace(activity("refund"), idempotency_key="r"))
    run.tell(NodeLost("charge"))
    run.tell(ActivityErrored("charge", 1, 2, indeterminate("the bank is closed"), Retry()))
    run.now += SECOND
    run.control("RETRY_STEP", "charge")
    run.tell(ActivityErrored("charge", 1, 3, indeterminate("the bank is closed"), Retry()))
    [asked] = [step for step in run.state.open_steps.values() if step.kind == "task"]
    run.tell(answered(run, asked.step_id, "TaskCompleted", {"actor": "ann", "answer": {"answer": "did-not-happen"}}))
    run.tell(done("charge"))
    run.tell(NodeLost("refund"))
    run.tell(ActivityErrored("refund", 1, 2, without_result("refunded"), Retry()))
    run.ask(commands.CompleteRun(result=Raw(b"1")))
    return run


def carrying() -> Driver:
    """Return a run that carries open and failed steps over two rotations."""
    run = Driver("carrying").start()
    run.ask(
        replace(activity("keyed"), idempotency_key="order-1"),
        activity("broken"),
        timer("sleep", run.now + SECOND),
        wait("approval", "approve", run.now + 60 * SECOND),
        task("ask"),
        child("ship", "child-3"),
    )
    run.tell(NodeLost("keyed"))
    run.tell(ActivityErrored("keyed", 1, 2, indeterminate("the bank is closed"), Retry()))
    run.tell(failed("broken"))
    steps = ("keyed", "broken", "sleep", "approval", "ask", "ship")
    run.ask(commands.ContinueAsNew(input=Raw(b'{"round":2}'), steps=steps))
    run.now += SECOND
    run.tell(run.message("sleep"))
    run.tell(answered(run, "ship", "SubWorkflowCompleted", {"result": 7}))
    run.ask(commands.ContinueAsNew(input=Raw(b'{"round":3}'), steps=("keyed", "approval", "ask")))
    run.tell(run.sent("approve", {"approved": True}, signal_id="click-1"))
    return run


def complete_bodies() -> Driver:
    """Return a run with every body, each with all of its fields; each status event comes when it can."""
    bodies = {type(body).__name__: (body, step_id) for body, step_id in SAMPLES}
    queued, _ = bodies.pop("RunQueued")
    assert isinstance(queued, e.RunQueued)
    run = Driver("complete", queued)

    def append(name: str, step_id: str | None = None) -> None:
        body, usual = bodies[name]
        run.append(body, step_id or usual)

    append("RunApproved")
    append("RunStarted")
    append("SignalAccepted")
    append("SignalRejected")
    append("SignalDeadLettered")
    opened = {
        "StepStarted": ["StepRetried", "StepDetached", "StepUnresolved", "StepSucceededLate", "StepCompleted"],
        "TimerStarted": ["TimerFired"],
        "SignalWaiting": ["SignalReceived"],
        "TaskCreated": [*TASK_EVENTS, "TaskCompleted"],
        "ChildStarted": ["ChildCompleted"],
        "UpdateAccepted": ["UpdateCompleted"],
    }
    for opener, followers in opened.items():
        for name in (opener, *followers):
            append(name, f"{opener}#1")
    for opener, name in (
        ("StepStarted", "StepFailed"),
        ("SignalWaiting", "SignalTimedOut"),
        ("ChildStarted", "ChildFailed"),
    ):
        append(opener, f"{opener}#2")
        append(name, f"{opener}#2")
    append("StepSkipped", "StepStarted#2")
    append("TimerStarted", "TimerStarted#2")
    append("StepCancelled", "TimerStarted#2")
    append("SignalSent", "send:go")
    for name in ("MarkerRecorded", "RunPaused", "RunResumed", "ContinuedAsNew", "RunCancelRequested", "RunCompleted"):
        append(name)
    return run


def main() -> None:
    """Write the next version of the golden files."""
    version = max(versions(), default=0) + 1
    runs = make_runs()
    lines = "".join(f"{to_line(event)}\n" for run in runs for event in run.events)
    snapshots = {run.run_id: expected(run.run_id, run.events) for run in runs}
    text = json.dumps(snapshots, ensure_ascii=False, indent=1, sort_keys=True)
    with (FOLDER / f"v{version}.jsonl").open("x", encoding="utf-8") as file:
        file.write(lines)
    with (FOLDER / f"v{version}.expected.json").open("x", encoding="utf-8") as file:
        file.write(f"{text}\n")
    sys.stdout.write(f"wrote version {version}\n")


if __name__ == "__main__":
    main()
