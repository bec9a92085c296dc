"""One command to many runs: those that a search finds, a part at a time, with a preview of the affected runs.

A part is read by the order of creation, the newest first, and the next one begins behind it: what a command changes in
a run never moves another run out of sight. A run to which the command does not apply is left alone, with its history.
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from holdfast.core.index_rows import APPROVAL
from holdfast.core.messages import ControlName
from holdfast.core.state import FAILED, PAUSED, RUNNING, TERMINAL
from holdfast.engine.inbox.operator_commands import OperatorCommand
from holdfast.errors import CallerError, RateLimited, RunTerminal
from holdfast.limits import SIGNAL_ID_BYTES
from holdfast.service.auth.tenancy import heads_of
from holdfast.service.context import RequestContext
from holdfast.service.http.problems import Problem, problem_of
from holdfast.service.operations.runs import RunFilter, done_again_by, run_query
from holdfast.service.paging import Cursor, read_page
from holdfast.service.registry import ActorName, Reason, RunId, operation
from holdfast.store.decisions import no_such_run
from holdfast.store.port import RunHead, RunQuery

BulkCommand = Literal[
    "cancel",
    "pause",
    "resume",
    "raise",
    "terminate",
    "approve",
    "retry_step",
    "skip_step",
    "try_now",
    "retry",
    "retry_failed",
    "retry_from_start",
    "fork",
]
"""`raise` resumes with the error of a failed step, `try_now` begins the next attempt of an activity that is being
retried.

`retry` continues failed runs from the step that failed, and reruns other runs; `retry_failed` leaves those others out.
`fork` continues with everything that a failed run has recorded, including what it did because of the failure.
"""

MOST_RUNS = 100
"""How many runs one request commands. A preview counts more at a time."""

AT_ONCE = 25
"""How many runs are commanded concurrently."""

DOES_AGAIN = frozenset({"retry", "retry_failed", "retry_from_start", "fork"})

ONCE = "bulk:once"
"""The id of each command that reruns a run once: two operators at the same moment get the same run."""

FINISHED_MEANWHILE = "it has finished meanwhile"
TRIED_MEANWHILE = "it was tried again meanwhile"


class CommandRuns(RunFilter, frozen=True, kw_only=True):
    """Which runs to command: these, or those that a search finds; and how."""

    command: BulkCommand
    run_ids: Annotated[tuple[RunId, ...], Meta(max_length=MOST_RUNS, description="Instead of a search.")] = ()
    request_id: Annotated[str, Meta(min_length=1, max_length=128, description="The same request commands none twice.")]
    only_once: Annotated[bool, Meta(description="Leave out runs that were done again, as a search does.")] = False
    preview: Annotated[bool, Meta(description="Only say which runs the command would concern.")] = False
    cursor: Cursor = ""
    limit: Annotated[int, Meta(ge=1, le=500, description="How many runs to look at.")] = MOST_RUNS
    reason: Reason = ""
    actor: ActorName = ""


class CommandAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run: commanded, or why not. `not_concerned` says why the command does not apply; `made` is a new run."""

    run_id: str
    made: str | None = None
    not_concerned: str | None = None
    error: Problem | None = None


class RunsCommanded(Struct, frozen=True, kw_only=True):
    """One answer for each run that was looked at. `next` is the cursor of the part behind it, if there is more."""

    items: list[CommandAnswer]
    concerned: int
    next: str | None = None


def _failed_steps(head: RunHead) -> tuple[str, ...]:
    return head.snapshot.failed_step_ids if head.snapshot is not None else ()


def _not_concerned(head: RunHead, command: BulkCommand) -> str | None:
    """Return why a command does not apply to a run in its current state, or None if it does."""
    status, is_over = head.status, head.status in TERMINAL
    match command:
        case "cancel" | "terminate":
            return "it has finished" if is_over else None
        case "pause":
            return None if status is RUNNING else "it is not running"
        case "approve":
            is_awaited = head.snapshot is not None and head.snapshot.waiting_kind == APPROVAL
            return None if is_awaited and not is_over else "it does not wait for an approval"
        case "resume" if status is PAUSED and _failed_steps(head):
            return "a failed step has paused it: retry the step"
        case "resume":
            return None if status is PAUSED else "it is not paused"
        case "retry_step" | "skip_step" | "raise":
            return None if status is PAUSED and _failed_steps(head) else "no failed step waits for an operator"
        case "try_now":
            is_retrying = head.snapshot is not None and head.snapshot.retrying is not None
            return None if is_retrying and not is_over else "no activity of it is tried again"
        case "retry" | "retry_from_start":
            return None if is_over else "it has not finished"
        case "retry_failed" | "fork":
            return None if status is FAILED else "it has not failed"


@operation(
    "runs.command_many", "POST /v1/run-commands", scope="runs:control", errors=(RateLimited,), audit="its commit"
)
async def command_many(context: RequestContext, request: CommandRuns) -> RunsCommanded:
    """Give one command to many runs: pause, resume, cancel, retry their failed steps, try now, and the others.

    With `preview` nothing is changed. What is refused does not stop the others. Each run records the command, its actor
    and its reason, and the audit log has all of them.
    """
    heads, following = await _heads(context, request)
    items: list[CommandAnswer] = []
    for start in range(0, len(heads), AT_ONCE):  # concurrently, so that the store commits several at a time
        items += await asyncio.gather(*(_answer(context, request, head) for head in heads[start : start + AT_ONCE]))
    concerned = sum(item.not_concerned in (None, FINISHED_MEANWHILE, TRIED_MEANWHILE) for item in items)
    if request.run_ids and not request.cursor:
        items += await _unknown(context, request.run_ids)
    return RunsCommanded(items=items, concerned=concerned, next=following)


async def _unknown(context: RequestContext, run_ids: Sequence[str]) -> list[CommandAnswer]:
    """Return the answers for ids that do not exist."""
    known = await heads_of(context.store, run_ids)
    problems = {run_id: problem_of(no_such_run(run_id), context.correlation_id) for run_id in run_ids}
    return [CommandAnswer(run_id=run_id, error=error) for run_id, error in problems.items() if run_id not in known]


async def _answer(context: RequestContext, request: CommandRuns, head: RunHead) -> CommandAnswer:
    objection = _not_concerned(head, request.command)
    if objection is None and _is_once(request):
        again = await done_again_by(context.store, head.run_id)
        if again is not None:
            return CommandAnswer(run_id=head.run_id, made=again, not_concerned="it was done again already")
    if objection is not None or request.preview:
        return CommandAnswer(run_id=head.run_id, not_concerned=objection)
    try:
        return CommandAnswer(run_id=head.run_id, made=await _carry_out(context, request, head))
    except RunTerminal:
        return CommandAnswer(run_id=head.run_id, not_concerned=FINISHED_MEANWHILE)
    except CallerError as error:
        if request.command == "try_now" and await _was_tried(context, head):
            return CommandAnswer(run_id=head.run_id, not_concerned=TRIED_MEANWHILE)
        return CommandAnswer(run_id=head.run_id, error=problem_of(error, context.correlation_id))


def _is_once(request: CommandRuns) -> bool:
    """Return whether the command leaves out runs that were already rerun."""
    return request.command in DOES_AGAIN and (request.only_once or not request.run_ids)


async def _was_tried(context: RequestContext, head: RunHead) -> bool:
    """Return whether the attempt that was due later has begun by itself since the run was read."""
    [now] = await context.store.find(RunQuery(run_ids=(head.run_id,), limit=1)) or [head]
    return (now.snapshot and now.snapshot.retrying) != (head.snapshot and head.snapshot.retrying)


async def _heads(context: RequestContext, request: CommandRuns) -> tuple[list[RunHead], str | None]:
    query = replace(run_query(context, request), newest=True)
    if request.run_ids:
        query = replace(query, run_ids=request.run_ids)
    limit = request.limit if request.preview else min(request.limit, MOST_RUNS)
    return await read_page(
        context,
        "commanded runs",
        context.store.find,
        query,
        lambda head: (head.created_at, head.run_id),
        cursor=request.cursor,
        limit=limit,
        place="before",
    )


_CONTROLS: dict[BulkCommand, ControlName] = {
    "cancel": "CANCEL",
    "pause": "PAUSE",
    "resume": "RESUME",
    "raise": "RESUME",
    "terminate": "EMERGENCY_STOP",
    "approve": "APPROVE",
    "retry_step": "RETRY_STEP",
    "skip_step": "SKIP_STEP",
    "try_now": "RETRY_STEP",
    "retry": "RETRY_RUN",
    "retry_failed": "RETRY_RUN",
    "retry_from_start": "RETRY_RUN",
    "fork": "RETRY_RUN",
}
assert _CONTROLS.keys() == set(get_args(BulkCommand))


async def _carry_out(context: RequestContext, request: CommandRuns, head: RunHead) -> str | None:
    """Give the command to one run, and return the run that it created, if it created one."""
    runtime, caller = context.runtime, context.principal
    request_id = ONCE if _is_once(request) else request.request_id
    command = OperatorCommand(
        name=_CONTROLS[request.command],
        reason=request.reason,
        actor=context.name(request.actor),
        signal_id=request_id,
        raise_failure=request.command == "raise",
    )
    if request.command in ("retry", "retry_failed", "retry_from_start"):
        from_start = request.command == "retry_from_start"
        return await runtime.retry_run(head.run_id, command, caller, from_start=from_start)
    if request.command == "fork":
        forked, _ = await runtime.fork_run(head.run_id, command, caller, request_id=request_id)
        return forked
    for step_id in _steps_for(head, request.command):
        signal_id = request.request_id if step_id is None else _id_for(request.request_id, step_id)
        await runtime.command(head.run_id, replace(command, step_id=step_id, signal_id=signal_id), caller)
    return None


def _id_for(request_id: str, step_id: str) -> str:
    """Return the id of a command to one step, the same for a repeated request. Long names are shortened to a hash."""
    plain = f"{request_id}:{step_id}"
    return plain if len(plain.encode()) <= SIGNAL_ID_BYTES else sha256(plain.encode()).hexdigest()


def _steps_for(head: RunHead, command: BulkCommand) -> tuple[str | None, ...]:
    """Return the steps that a command addresses; None for the run itself."""
    if command in ("retry_step", "skip_step"):
        return _failed_steps(head)
    if command == "try_now" and head.snapshot is not None and head.snapshot.retrying is not None:
        return (head.snapshot.retrying.step_id,)
    return (None,)
