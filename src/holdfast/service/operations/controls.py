"""What operators tell runs. Each command is durable when it is answered, and decided by the run's next turn."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from holdfast.engine.history import head_of
from holdfast.errors import Conflict, NotFound, NotPermitted, PayloadTooLarge, RateLimited
from holdfast.service.context import Call
from holdfast.service.operations.fields import TO_A_RUN, ActorName, Reason, RunId, SignalId, StepId, given
from holdfast.service.registry import Ask, operation
from holdfast.service.views import RunStarted


class Command(Ask, frozen=True, kw_only=True):
    """A command to a run. With `wait` it is answered when the run has decided: `Conflict` says that it refused."""

    run_id: RunId
    reason: Reason = ""
    actor: ActorName = ""
    signal_id: SignalId | UnsetType = UNSET
    wait: Annotated[bool, Meta(description="Answer when the run has decided, and not before.")] = False


class Commanded(Struct, frozen=True):
    """The command is in the run's inbox; with `wait`, it was carried out."""

    run_id: str
    command: str
    is_decided: bool


def _how(call: Call, ask: Command) -> dict[str, Any]:
    return {"actor": call.name(ask.actor), "signal_id": given(ask.signal_id), "wait": ask.wait}


@operation(
    "runs.cancel",
    "POST /v1/runs/{run_id}/cancel",
    scope="runs:control",
    status=202,
    errors=TO_A_RUN,
    audit="its commit",
)
async def cancel(call: Call, ask: Command) -> Commanded:
    """Ask a run to cancel itself; it may clean up first."""
    await (await call.run(ask.run_id)).cancel(ask.reason, **_how(call, ask))
    return Commanded(ask.run_id, "CANCEL", ask.wait)


@operation(
    "runs.pause", "POST /v1/runs/{run_id}/pause", scope="runs:control", status=202, errors=TO_A_RUN, audit="its commit"
)
async def pause(call: Call, ask: Command) -> Commanded:
    """Hold a run: results are still recorded, but its program does not go on."""
    await (await call.run(ask.run_id)).pause(ask.reason, **_how(call, ask))
    return Commanded(ask.run_id, "PAUSE", ask.wait)


class ResumeRun(Command, frozen=True, kw_only=True):
    """Which run to resume, and whether to raise the error of a failed step that has paused it."""

    raise_failure: Annotated[
        bool, Meta(description="Raise the error of a failed step in the workflow, instead of retrying or skipping it.")
    ] = False


@operation(
    "runs.resume",
    "POST /v1/runs/{run_id}/resume",
    scope="runs:control",
    status=202,
    errors=TO_A_RUN,
    audit="its commit",
)
async def resume(call: Call, ask: ResumeRun) -> Commanded:
    """Let a paused run go on. If a failed step has paused it, `Conflict`: retry the step, or skip it.

    With `raise_failure` the step's error is raised in the workflow, which ends a run that does not catch it.
    """
    await (await call.run(ask.run_id)).resume(ask.reason, raise_failure=ask.raise_failure, **_how(call, ask))
    return Commanded(ask.run_id, "RESUME", ask.wait)


@operation(
    "runs.approve",
    "POST /v1/runs/{run_id}/approve",
    scope="runs:control",
    status=202,
    errors=TO_A_RUN,
    audit="its commit",
)
async def approve(call: Call, ask: Command) -> Commanded:
    """Let a run that has not started go ahead."""
    await (await call.run(ask.run_id)).approve(ask.reason, **_how(call, ask))
    return Commanded(ask.run_id, "APPROVE", ask.wait)


@operation(
    "runs.terminate",
    "POST /v1/runs/{run_id}/terminate",
    scope="runs:control",
    status=202,
    errors=TO_A_RUN,
    audit="its commit",
)
async def terminate(call: Call, ask: Command) -> Commanded:
    """End a run at once, as cancelled, without letting it clean up."""
    await (await call.run(ask.run_id)).terminate(ask.reason, **_how(call, ask))
    return Commanded(ask.run_id, "EMERGENCY_STOP", ask.wait)


class StepCommand(Command, frozen=True, kw_only=True):
    """A command about one step of a run."""

    step_id: StepId


@operation(
    "runs.retry_step",
    "POST /v1/runs/{run_id}/steps/{step_id}/retry",
    scope="runs:control",
    status=202,
    errors=TO_A_RUN,
    audit="its commit",
)
async def retry_step(call: Call, ask: StepCommand) -> Commanded:
    """Try a failed step again that the workflow has not been told of."""
    await (await call.run(ask.run_id)).retry_step(ask.step_id, ask.reason, **_how(call, ask))
    return Commanded(ask.run_id, "RETRY_STEP", ask.wait)


class SkipStep(StepCommand, frozen=True, kw_only=True):
    """Which step to skip, and what the workflow gets in place of its result. A task or a wait has none."""

    result: Any = None


@operation(
    "runs.skip_step",
    "POST /v1/runs/{run_id}/steps/{step_id}/skip",
    scope="runs:control",
    status=202,
    errors=(*TO_A_RUN, PayloadTooLarge),
    audit="its commit",
)
async def skip_step(call: Call, ask: SkipStep) -> Commanded:
    """Let a step not be done, whether it is open or has failed. A task or a wait takes the scope `runs:override`."""
    await (await call.run(ask.run_id)).skip_step(ask.step_id, ask.reason, result=ask.result, **_how(call, ask))
    return Commanded(ask.run_id, "SKIP_STEP", ask.wait)


class RetryRun(Ask, frozen=True, kw_only=True):
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
async def retry_run(call: Call, ask: RetryRun) -> RunStarted:
    """Do a finished run again, with the same input, as a new run. With a `signal_id` a retry gives the same one."""
    handle = await call.run(ask.run_id)
    again = await handle.retry_run(ask.reason, actor=call.name(ask.actor), signal_id=given(ask.signal_id))
    head = await head_of(call.store, again.run_id)
    return RunStarted(run_id=again.run_id, workflow=head.plan_id, workflow_version=head.plan_version)
