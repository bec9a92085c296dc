"""The commands of a program. A command is a request; `apply_commands` turns it into events.

A program (code, flow or plan) has one task: to return the commands that follow from the given outcomes. `RECORDED_AS`
is the body of the event that records a command: replay compares the two.
"""

from typing import get_args

from msgspec import Raw, Struct

from holdfast.core import events as e
from holdfast.core.attributes import Value
from holdfast.core.events import NULL, ErrorInfo, EscalationRule, PlanSource, RunTimeouts
from holdfast.core.instants import Instant


class RunActivity(Struct, frozen=True, kw_only=True, gc=False):
    """Execute an activity."""

    RECORDED_AS = e.StepStarted

    step_id: str
    name: str
    input: Raw = NULL
    queue: str = ""
    idempotency_key: str | None = None
    options: Raw = NULL
    logical_attempt_id: int = 1
    """Above 1, a retry policy at plan level starts a failed step again (ATT-2)."""


class StartTimer(Struct, frozen=True, kw_only=True, gc=False):
    """Start a timer."""

    RECORDED_AS = e.TimerStarted

    step_id: str
    due_at: Instant


class WaitSignal(Struct, frozen=True, kw_only=True, gc=False):
    """Wait for a signal of this name, until the deadline."""

    RECORDED_AS = e.SignalWaiting

    step_id: str
    name: str
    until: Instant | None = None


class SendSignal(Struct, frozen=True, kw_only=True, gc=False):
    """Send a signal to a run, without waiting for anything."""

    RECORDED_AS = e.SignalSent

    step_id: str
    run_id: str
    name: str
    signal_id: str
    payload: Raw = NULL
    addressed_to: str | None = None


class AskHuman(Struct, frozen=True, kw_only=True, gc=False):
    """Open a task, and wait for the answer."""

    RECORDED_AS = e.TaskCreated

    step_id: str
    name: str
    task_type: str = ""
    route: str = ""
    payload: Raw = NULL
    form: Raw = NULL
    roles: tuple[str, ...] = ()
    assignee: str | None = None
    due_at: Instant | None = None
    remind_ms: int | None = None
    escalation: EscalationRule | None = None
    approvals: int = 1
    of: int | None = None


class StartChild(Struct, frozen=True, kw_only=True, gc=False):
    """Start another run, and wait for its outcome."""

    RECORDED_AS = e.ChildStarted

    step_id: str
    child_run_id: str
    plan_id: str
    plan_version: str
    input: Raw = NULL
    close_policy: str = "await"
    plan: PlanSource | None = None
    attributes: dict[str, Value] = {}
    tags: tuple[str, ...] = ()
    priority: int = 0
    timeouts: RunTimeouts | None = None


class RecordMarker(Struct, frozen=True, kw_only=True, gc=False):
    """Record this value."""

    RECORDED_AS = e.MarkerRecorded

    step_id: str
    name: str
    value: Raw = NULL


class SetAttributes(Struct, frozen=True, kw_only=True, gc=False):
    """Change search attributes of the run; None removes one."""

    RECORDED_AS = e.AttributesSet

    step_id: str
    values: dict[str, Value | None]


class CompleteUpdate(Struct, frozen=True, kw_only=True, gc=False):
    """Answer an update: with a result, or with an error."""

    RECORDED_AS = e.UpdateCompleted

    step_id: str
    result: Raw = NULL
    error: ErrorInfo | None = None


class CancelStep(Struct, frozen=True, kw_only=True, gc=False):
    """Cancel an open step."""

    RECORDED_AS = e.StepCancelled

    step_id: str
    reason: str = ""


class PauseRun(Struct, frozen=True, kw_only=True, gc=False):
    """Pause the run, because its program cannot be advanced. The engine issues it, so a replay never does."""

    error: ErrorInfo


class ContinueAsNew(Struct, frozen=True, kw_only=True, gc=False):
    """Rotate the history: begin again with this input. Step ids stay unique in the whole run: none is used again.

    Without `steps`, as in code workflows, all open steps are abandoned. With `steps`, these steps continue unchanged,
    whether open or failed, with their attempts, tokens, deadlines, jobs, tasks and children; the others are abandoned.
    A program that carries steps can issue this at any time, and again with later steps: until `ContinuedAsNew` is
    recorded it gets outcomes as before, and the last command counts.
    """

    RECORDED_AS = e.ContinuedAsNew

    input: Raw = NULL
    updates: tuple[str, ...] = ()
    """The steps of updates that were accepted before the rotation and are answered after it."""
    steps: tuple[str, ...] | None = None
    """The open and failed steps that continue."""


class CompleteRun(Struct, frozen=True, kw_only=True, gc=False):
    """End the run with a result."""

    RECORDED_AS = e.RunCompleted

    result: Raw = NULL


class FailRun(Struct, frozen=True, kw_only=True, gc=False):
    """End the run with an error."""

    RECORDED_AS = e.RunFailed

    error: ErrorInfo


class CancelRun(Struct, frozen=True, kw_only=True, gc=False):
    """End the run as cancelled, after cleaning up."""

    RECORDED_AS = e.RunCancelled

    reason: str = ""


Command = (
    RunActivity
    | StartTimer
    | WaitSignal
    | SendSignal
    | AskHuman
    | StartChild
    | RecordMarker
    | SetAttributes
    | CancelStep
    | CompleteUpdate
    | PauseRun
    | ContinueAsNew
    | CompleteRun
    | FailRun
    | CancelRun
)

_ENDS = frozenset({CompleteRun, FailRun, CancelRun})

COMMAND_OF: dict[type[e.Body], type[Command]] = {
    command.RECORDED_AS: command for command in get_args(Command) if command is not PauseRun
}
"""The command of a program that an event records, by the type of its body."""

OF_THE_RUN = "\0run"
"""The key of a command that concerns no step. No step has it, because names hold no control characters."""

_PREFIXES: dict[type, str] = {
    CancelStep: "\0cancel ",
    CompleteUpdate: "\0answer ",
    RecordMarker: "\0marker ",
    SetAttributes: "\0attributes ",
}


def with_one_rotation(commands: list[Command]) -> list[Command]:
    """Return the commands that a program issued for several outcomes, with only the last rotation, at the end.

    A program that has ended does not rotate.
    """
    rotations = [command for command in commands if type(command) is ContinueAsNew and command.steps is not None]
    if not rotations:
        return commands
    others = [command for command in commands if type(command) is not ContinueAsNew]
    return others if any(type(command) in _ENDS for command in others) else [*others, rotations[-1]]


def command_key(kind: type, step_id: str | None) -> str:
    """Return the key of a command within its program: one step may be opened, cancelled and answered."""
    return OF_THE_RUN if step_id is None else _PREFIXES.get(kind, "") + step_id
