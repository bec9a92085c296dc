"""Operators' commands. Each is durable when it is answered, and decided by the run's next turn."""

from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from holdfast.core import codec
from holdfast.core.events import NULL
from holdfast.core.messages import ControlName
from holdfast.engine.inbox.operator_commands import OperatorCommand
from holdfast.errors import Conflict, NotFound, NotPermitted, PayloadTooLarge, RateLimited
from holdfast.service.context import RequestContext
from holdfast.service.registry import (
    TO_A_RUN,
    ActorName,
    Errors,
    Operation,
    Reason,
    Request,
    RunId,
    SignalId,
    StepId,
    given,
    operation,
)
from holdfast.service.views import RunStarted


class Command(Request, frozen=True, kw_only=True):
    """A command to a run. With `wait` it is answered when the run has decided: `Conflict` says that it refused."""

    run_id: RunId
    reason: Reason = ""
    actor: ActorName = ""
    signal_id: SignalId | UnsetType = UNSET
    wait: Annotated[bool, Meta(description="Answer when the run has decided, and not before.")] = False


class ResumeRun(Command, frozen=True, kw_only=True):
    """Which run to resume, and whether to raise the error of a failed step that has paused it."""

    raise_failure: Annotated[
        bool, Meta(description="Raise the error of a failed step in the workflow, instead of retrying or skipping it.")
    ] = False


class StepCommand(Command, frozen=True, kw_only=True):
    """A command about one step of a run."""

    step_id: StepId


class SkipStep(StepCommand, frozen=True, kw_only=True):
    """Which step to skip, and what the workflow gets in place of its result. A task or a wait has none."""

    result: Any = None


class Commanded(Struct, frozen=True):
    """The command is in the run's inbox; with `wait`, it was carried out."""

    run_id: str
    command: str
    is_decided: bool


Asked = TypeVar("Asked", bound=Command)


def _command(
    verb: str, path: str, name: ControlName, kind: type[Asked], doc: str, errors: Errors = TO_A_RUN
) -> Operation:
    """Declare the operation that sends a command."""

    async def send(context: RequestContext, request: Command) -> Commanded:
        await context.require_run(request.run_id)
        command = OperatorCommand(
            name=name,
            reason=request.reason,
            actor=context.name(request.actor),
            step_id=getattr(request, "step_id", None),
            signal_id=given(request.signal_id),
            result=codec.encode(request.result) if isinstance(request, SkipStep) else NULL,
            raise_failure=getattr(request, "raise_failure", False),
        )
        await context.runtime.command(request.run_id, command, context.principal, wait=request.wait)
        return Commanded(request.run_id, name, request.wait)

    send.__doc__, send.__annotations__["request"] = doc, kind
    address = f"POST /v1/runs/{{run_id}}/{path}"
    declare = operation(verb, address, scope="runs:control", status=202, errors=errors, audit="its commit")
    return declare(send)


cancel = _command("runs.cancel", "cancel", "CANCEL", Command, "Ask a run to cancel itself; it may clean up first.")
pause = _command(
    "runs.pause",
    "pause",
    "PAUSE",
    Command,
    "Pause a run: results are still recorded, but its program does not go on.",
)
resume = _command(
    "runs.resume",
    "resume",
    "RESUME",
    ResumeRun,
    "Resume a paused run. If a failed step has paused it, `Conflict`: retry the step, or skip it.\n\n"
    "With `raise_failure` the step's error is raised in the workflow, which ends a run that does not catch it.",
)
approve = _command("runs.approve", "approve", "APPROVE", Command, "Approve a run that has not started.")
terminate = _command(
    "runs.terminate",
    "terminate",
    "EMERGENCY_STOP",
    Command,
    "End a run at once, as cancelled, without letting it clean up.",
)
retry_step = _command(
    "runs.retry_step",
    "steps/{step_id}/retry",
    "RETRY_STEP",
    StepCommand,
    "Retry a failed step whose failure the workflow has not seen.",
)
skip_step = _command(
    "runs.skip_step",
    "steps/{step_id}/skip",
    "SKIP_STEP",
    SkipStep,
    "Skip a step, whether it is open or has failed. A task or a wait takes the scope `runs:override`.",
    (*TO_A_RUN, PayloadTooLarge),
)


class RetryRun(Request, frozen=True, kw_only=True):
    """Which finished run to do again."""

    run_id: RunId
    reason: Reason = ""
    actor: ActorName = ""
    signal_id: SignalId | UnsetType = UNSET


@operation(
    "runs.retry",
    "POST /v1/runs/{run_id}/retry",
    scope="runs:control",
    status=201,
    errors=(NotFound, Conflict, NotPermitted, RateLimited),
    audit="its commit",
)
async def retry_run(context: RequestContext, request: RetryRun) -> RunStarted:
    """Do a finished run again, with the same input, as a new run. With a `signal_id` a retry gives the same one."""
    await context.require_run(request.run_id)
    actor, signal_id = context.name(request.actor), given(request.signal_id)
    command = OperatorCommand(name="RETRY_RUN", reason=request.reason, actor=actor, signal_id=signal_id)
    run_id = await context.runtime.retry_run(request.run_id, command, context.principal)
    head = await context.runtime.head(run_id)
    return RunStarted(run_id=run_id, workflow=head.plan_id, workflow_version=head.plan_version)
