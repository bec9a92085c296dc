"""Operators' commands. Each is durable when it is answered, and is decided by the run's next turn."""

from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.events import NULL, Event
from holdfast.core.fork import first_difference
from holdfast.core.messages import ControlName
from holdfast.core.state import FAILED
from holdfast.engine.history import head_of
from holdfast.engine.inbox.operator_commands import OperatorCommand
from holdfast.errors import CallerError, Conflict, NotFound, NotPermitted, PayloadTooLarge, RateLimited
from holdfast.service.context import RequestContext
from holdfast.service.http.problems import Problem, problem_of
from holdfast.service.operations.runs import RunFilter, run_query
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

FORK_REQUEST = "fork:"
"""The prefix of the request ids of forks."""

DIFF_EVENTS = 1_000
"""How many events of each run are compared at a time."""


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


class ApproveRun(Command, frozen=True, kw_only=True):
    """Which run to approve, or which step of a run of a plan."""

    step_id: Annotated[StepId, Meta(description="The step of a plan that awaits approval; else the run.")] | None = None


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
    "Pause a run: results are still recorded, but its code does not continue.",
)
resume = _command(
    "runs.resume",
    "resume",
    "RESUME",
    ResumeRun,
    "Resume a paused run. If a failed step has paused it, `Conflict`: retry the step, or skip it.\n\n"
    "With `raise_failure` the step's error is raised in the workflow, which ends a run that does not catch it.",
)
approve = _command(
    "runs.approve",
    "approve",
    "APPROVE",
    ApproveRun,
    "Approve a run that has not started; or a run or a step of a plan that asks everyone for approval.",
)
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
    "Retry a failed step whose failure the workflow has not seen; in a plan that continues, any failed step.",
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
    from_start: Annotated[bool, Meta(description="Begin a failed run again, and keep none of its results.")] = False
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
    """Run a finished run again, as a new run. With a `signal_id` a retry gives the same one.

    A failed run goes on from the step that failed, with the recorded results. With `from_start`, and after another end,
    the new run begins with the same input.
    """
    await context.require_run(request.run_id)
    actor, signal_id = context.name(request.actor), given(request.signal_id)
    command = OperatorCommand(name="RETRY_RUN", reason=request.reason, actor=actor, signal_id=signal_id)
    run_id = await context.runtime.retry_run(request.run_id, command, context.principal, from_start=request.from_start)
    head = await context.runtime.head(run_id)
    return RunStarted(run_id=run_id, workflow=head.plan_id, workflow_version=head.plan_version)


RequestId = Annotated[str, Meta(max_length=255, description="The same request again gives the same run.")]


class ForkRun(Request, frozen=True, kw_only=True):
    """Which run to begin with, and up to which of its events."""

    run_id: RunId
    at: Annotated[int, Meta(ge=1, lt=2**53, description="The run_seq; without it, as late as it can be.")] | None = None
    input: dict[str, Any] | None = None
    request_id: RequestId = ""
    reason: Reason = ""
    actor: ActorName = ""


class RunForked(Struct, frozen=True, kw_only=True):
    """A fork, and the last event that it has of the other run."""

    run_id: str
    forked_from: str
    run_seq: int


@operation(
    "runs.fork",
    "POST /v1/runs/{run_id}/fork",
    scope="runs:control",
    status=201,
    errors=(NotFound, Conflict, NotPermitted, RateLimited),
    audit="its commit",
)
async def fork_run(context: RequestContext, request: ForkRun) -> RunForked:
    """Start a run that begins with the recorded results of another, up to an event. With a `request_id`, once.

    A history is cut where a commit ended, and never while a child is open or after the end: `run_seq` is where. What
    was open is open again, and activities are dispatched anew. A failed run so goes on from the step that failed.
    """
    await context.require_run(request.run_id)
    head = await head_of(context.store, request.run_id)
    packed = None
    if request.input is not None:
        definition = context.runtime.registry.workflow(head.plan_id, head.plan_version)
        packed = definition.signature.pack((), request.input)
    run_id, run_seq = await _fork(context, request, request.run_id, request.request_id, request.at, packed)
    return RunForked(run_id=run_id, forked_from=request.run_id, run_seq=run_seq)


async def _fork(
    context: RequestContext, request: Any, run_id: str, request_id: str, at: int | None, input: Raw | None
) -> tuple[str, int]:
    command = OperatorCommand(name="RETRY_RUN", reason=request.reason, actor=context.name(request.actor))
    return await context.runtime.fork_run(run_id, command, context.principal, at=at, input=input, request_id=request_id)


class ForkRuns(RunFilter, frozen=True, kw_only=True):
    """Which failed runs to continue: these, or the newest that a search finds, without those that have forks."""

    run_ids: Annotated[tuple[RunId, ...], Meta(max_length=100)] = ()
    limit: Annotated[int, Meta(ge=1, le=100)] = 100
    request_id: Annotated[str, Meta(min_length=1, max_length=128, description="The same request forks none twice.")]
    reason: Reason = ""
    actor: ActorName = ""


class ForkAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fork of one run, or why there is none."""

    forked_from: str
    run_id: str | None = None
    run_seq: int | None = None
    error: Problem | None = None


class RunsForked(Struct, frozen=True):
    """One answer for each run, in the order of the request."""

    items: list[ForkAnswer]


@operation("runs.fork_many", "POST /v1/run-forks", scope="runs:control", errors=(RateLimited,), audit="its commit")
async def fork_runs(context: RequestContext, request: ForkRuns) -> RunsForked:
    """Continue many failed runs, each from the step that failed. What cannot be forked does not stop the others."""
    items: list[ForkAnswer] = []
    run_ids = request.run_ids
    if not run_ids:
        query = replace(run_query(context, request), newest=True, status=request.status or FAILED, limit=request.limit)
        found = await context.store.find(replace(query, look=context.service.options.search_rows))
        run_ids = tuple(head.run_id for head in found if not head.run_request_id.startswith(FORK_REQUEST))
    for run_id in run_ids:
        try:
            await context.require_run(run_id)
            made, run_seq = await _fork(context, request, run_id, request.request_id, None, None)
            items.append(ForkAnswer(forked_from=run_id, run_id=made, run_seq=run_seq))
        except CallerError as error:
            items.append(ForkAnswer(forked_from=run_id, error=problem_of(error, context.correlation_id)))
    return RunsForked(items)


class CompareRuns(Request, frozen=True, kw_only=True):
    """Two runs, such as a fork and the run that it is from."""

    run_id: RunId
    other_run_id: RunId


class RunDifference(Struct, frozen=True, kw_only=True):
    """Where two histories part: at the first event that differs, None if they do not. Ids and instants do not count.

    If `is_whole` is false, so many events were compared, and there are more.
    """

    run_id: str
    other_run_id: str
    parts_at: int | None
    event_type: str | None
    other_event_type: str | None
    last_event_seq: int
    other_last_event_seq: int
    is_whole: bool


@operation(
    "runs.diff", "GET /v1/runs/{run_id}/diff", scope="runs:read", errors=(NotFound, RateLimited), reads_much=True
)
async def diff(context: RequestContext, request: CompareRuns) -> RunDifference:
    """Compare the histories of two runs, and return where they differ."""
    heads = [await head_of(context.store, run_id) for run_id in (request.run_id, request.other_run_id)]
    after, most = 0, context.service.options.search_rows
    place: int | None = None
    events: list[Event] = []
    others: list[Event] = []
    while after < most:
        events, others = [
            await context.store.read_events(head.run_id, after, DIFF_EVENTS, context.page_bytes) for head in heads
        ]
        both = min(len(events), len(others))
        if both and max(len(events), len(others)) > both and after + both < min(head.version for head in heads):
            events, others = events[:both], others[:both]  # one page ended early, because its events are large
        place = first_difference(events, others)
        if place is not None or not events:
            break
        after += len(events)
    is_parted = place is not None
    return RunDifference(
        run_id=request.run_id,
        other_run_id=request.other_run_id,
        parts_at=after + place + 1 if place is not None else None,
        event_type=events[place].event_type if place is not None and place < len(events) else None,
        other_event_type=others[place].event_type if place is not None and place < len(others) else None,
        last_event_seq=heads[0].version,
        other_last_event_seq=heads[1].version,
        is_whole=is_parted or after >= max(head.version for head in heads),
    )
