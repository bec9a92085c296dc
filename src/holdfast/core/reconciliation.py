"""Result reconciliation: what follows when it is not known whether the effect of a keyed step has happened.

A step with an idempotency key is *reconcilable*. If an attempt may have begun and its outcome was not recorded, its
effect is unknown, and `OpenStep.effect` records that: the next attempt, whatever its cause (a lost node, a time-out,
the retry policy, a queue, RETRY_STEP), first asks the verifier. So all of these cases share one path.

The verifier's answer reaches the run as an outcome of the attempt:

* not completed: the function is called in the same attempt. If that attempt was only a last look, because there is no
  further one, the step fails with the error of the previous attempt (`NOT_COMPLETED`);
* completed with a result: a success, confirmed by the verifier;
* completed, and the result cannot be found: the step fails with `ReconciliationFailed`;
* anything else (`INDETERMINATE`): the step is unresolved.

An **unresolved** step stays open, is executed by no node, and has an engine task for operators. The task is opened in
the same decision, and closed in the decision that closes or retries the step. The program does not see the task.

A success of an abandoned attempt counts if no later attempt can have begun. Otherwise it is kept with the step, and the
current attempt decides: with the same result the step completes; anything else is a contradiction, and an operator
decides.
"""

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.codec import format_instant
from holdfast.core.event_writer import NOTHING, Decision, EventWriter
from holdfast.core.events import ErrorInfo
from holdfast.core.instants import Instant
from holdfast.core.keyed_steps import (
    ASKED_AGAIN,
    LOST,
    NOT_COMPLETED,
    NOT_HAPPENED,
    RECONCILE_MARK,
    TIMED_OUT,
    Effect,
    effect_after_doubt,
)
from holdfast.core.keys import event_id, event_key
from holdfast.core.messages import ActivityOutcome, ActivitySucceeded
from holdfast.core.state import OpenStep, RunState
from holdfast.core.timing import Retry
from holdfast.errors import InvalidInput
from holdfast.limits import COMMENT_CHARS, ERROR_TEXT_CHARS, LOSSES_IN_A_ROW

OPERATOR = "operator"
"""The role of the people who are asked about unresolved steps."""

TASK_TYPE = "reconciliation"
"""The type of a task about an unresolved step."""

RECONCILIATION_FAILED = "ReconciliationFailed"
"""The error code of a failed step that may have had its effect and has no usable result."""

COMPLETED_WITHOUT_RESULT = "completed-result-unavailable"
INDETERMINATE = "indeterminate"
"""The category of errors that come from a verifier or replace its answer."""

UNKNOWN_CODES = frozenset({TIMED_OUT, "NodeLost", "WorkerLost"})
"""The error codes after which the function may have done its work."""

SHOWN_BYTES = 16_384
"""The largest value that the task shows to an operator. Larger ones are in the run's history."""

Verdict = Literal["happened", "did-not-happen", "fail"]


class ReconciliationAnswer(Struct, frozen=True):
    """The answer of an operator: the effect happened, with this result; it did not happen; or the step fails."""

    answer: Verdict
    result: Raw | UnsetType = UNSET
    reason: str = ""


class AboutStep(Struct, frozen=True):
    """The part of the task's payload, about the step, that the engine reads again."""

    activity: str


FORM = codec.encode(
    {
        "title": "Reconciliation",
        "type": "object",
        "properties": {
            "answer": {
                "title": "Has it happened?",
                "enum": ["happened", "did-not-happen", "fail"],
                "description": "happened: the step completes with the result; did-not-happen: the activity is called "
                "again; fail: the step fails",
            },
            "result": {"title": "Result", "description": "What the activity would have returned, if it happened"},
            "reason": {"title": "Reason", "type": "string", "default": ""},
        },
        "required": ["answer"],
    }
)
"""The form of the task, as JSON Schema."""


def indeterminate(words: str) -> ErrorInfo:
    """Return the error of an attempt after which only an operator can find out what happened."""
    return ErrorInfo("Indeterminate", words[:ERROR_TEXT_CHARS], category=INDETERMINATE)


def without_result(words: str) -> ErrorInfo:
    """Return the error of a step with an effect that happened and a result that cannot be found."""
    return ErrorInfo(RECONCILIATION_FAILED, words[:ERROR_TEXT_CHARS], category=COMPLETED_WITHOUT_RESULT)


def not_completed(error: ErrorInfo | None) -> ErrorInfo:
    """Return the error of a step that had no effect and is not retried."""
    error = error or ErrorInfo(RECONCILIATION_FAILED, "the effect did not happen, and no attempt is left")
    return replace(error, retryable=False, category=NOT_COMPLETED)


# --- attempts that end without a recorded success


def on_failure(
    step: OpenStep, error: ErrorInfo, retry: Retry, writer: EventWriter, node: str, cause: str | None, lost: int = 0
) -> Decision | None:
    """Return what follows from a failure after which the policy allows no further attempt; None if the step fails.

    `lost` is how often nodes that never reported had acquired the job before this attempt.
    """
    if error.category == INDETERMINATE:
        return leave_unresolved(step, error, writer, node=node, cause=cause, was_called=False)
    if not _leaves_doubt(step, error, retry, lost):
        return None
    return look_once_more(step, error, "failed", writer, node=node, cause=cause)


def _leaves_doubt(step: OpenStep, error: ErrorInfo, retry: Retry, lost: int) -> bool:
    """Return whether the effect may have happened although the attempt failed.

    A non-retryable error is the function's own statement, but only about this attempt: an earlier attempt in doubt may
    have been slower than the verifier, which was asked before the function was called.
    """
    if error.category in (NOT_COMPLETED, COMPLETED_WITHOUT_RESULT) or (step.effect and step.effect.is_last_look):
        return False
    if lost or (step.effect is not None and step.effect.must_verify):
        return True
    return error.code in UNKNOWN_CODES or (error.retryable and error.code not in retry.non_retryable)


def look_once_more(
    step: OpenStep, error: ErrorInfo, reason: str, writer: EventWriter, *, node: str = "", cause: str | None = None
) -> Decision:
    """Ask the verifier of a step that is not retried, before the step fails."""
    writer.retry(step, e.StepRetried(reason, None, error, is_last_look=True, node=node), cause)
    writer.dispatch.append(step.step_id)
    return writer.decision()


def on_loss(step: OpenStep, error: ErrorInfo, is_last: bool, retry: Retry, writer: EventWriter, node: str) -> Decision:
    """Return what follows when the node of an attempt was lost. `is_last`: the policy allows no further attempt."""
    effect = step.effect or Effect()
    losses = effect.losses + 1
    is_over = is_last or effect.is_last_look
    if lost_too_often(replace(effect, losses=losses), retry):
        words = f"{losses} attempts in a row were lost with their nodes; the last: {error.message}"
        was_called = not effect.is_last_look
        return leave_unresolved(step, indeterminate(words), writer, node=node, was_called=was_called)
    if is_over:
        return look_once_more(step, error, LOST, writer, node=node)
    uncounted = 0 if retry.count_lost else 1
    writer.retry(step, e.StepRetried(LOST, error=error, uncounted=uncounted, node=node))
    writer.dispatch.append(step.step_id)
    return writer.decision()


def effect_after_takes(step: OpenStep, lost: int, retry: Retry) -> Effect:
    """Return what is known about the effect of a job that `lost` nodes acquired without reporting to its run."""
    known = step.effect or Effect(since=step.opened_at)
    words = f"{lost} times a node acquired the job of activity {step.name!r} and did not report its outcome"
    error = ErrorInfo("WorkerLost", words)
    return replace(
        known,
        must_verify=True,
        is_last_look=known.is_last_look or 0 < retry.max_attempts < step.attempt,
        called=known.called if known.is_last_look else step.engine_attempt_id - 1,
        losses=known.losses + lost,
        error=error if known.error is None or not known.is_last_look else known.error,
    )


def lost_too_often(effect: Effect, retry: Retry) -> bool:
    """Return whether so many consecutive attempts were lost that the step is left to an operator."""
    is_endless = effect.is_last_look or not retry.max_attempts or not retry.count_lost
    return effect.losses >= LOSSES_IN_A_ROW and is_endless


def may_have_begun(step: OpenStep, now: Instant) -> bool:
    """Return whether the function of a step may have been called in any attempt."""
    if step.effect is not None and step.effect.called > 0:
        return True
    return may_be_under_way(step, now)


def may_be_under_way(step: OpenStep, now: Instant) -> bool:
    """Return whether the function may have been called in the current attempt."""
    if step.effect is not None and (step.effect.is_last_look or not step.effect.was_called):
        return False
    is_early = step.due_at is not None and step.due_at > now and not step.is_detached
    return not step.is_unbegun and not is_early


# --- the operator's part


def leave_unresolved(
    step: OpenStep,
    error: ErrorInfo,
    writer: EventWriter,
    *,
    was_called: bool,
    node: str = "",
    cause: str | None = None,
    result: Raw | UnsetType = UNSET,
) -> Decision:
    """Leave a step to an operator, and open the task for it."""
    body = e.StepUnresolved(error, was_called, result, node)
    attempt = step.engine_attempt_id
    event = writer.write(body, step.step_id, step.logical_attempt_id, attempt, cause, step.opened_event_id)
    effect = effect_after_doubt(step, event, body)
    state = writer.state
    key = event_key(state.run_id, effect.task, 1, "TaskCreated", state.plan_version)
    task = e.TaskCreated(
        event_id(key),
        f"reconcile {step.name}"[:ERROR_TEXT_CHARS],
        writer.token(effect.task),
        TASK_TYPE,
        payload=_facts(step, effect, error, result),
        form=FORM,
        roles=(OPERATOR,),
    )
    writer.open(task, effect.task)
    return writer.decision()


def _facts(step: OpenStep, effect: Effect, error: ErrorInfo, result: Raw | UnsetType) -> Raw:
    """Return the facts about an unresolved step, for the operator."""
    facts: dict[str, object] = {
        "problem": error.message,
        "activity": step.name,
        "idempotency_key": step.key,
        "step_id": step.step_id,
        "attempts": [
            {
                "attempt": each.engine_attempt_id,
                "ended_at": format_instant(each.ended_at),
                "how": each.how,
                "node": each.node,
                "error": each.error,
            }
            for each in effect.attempts
        ],
    }
    input = getattr(step.body, "input", e.NULL)
    if len(input) <= SHOWN_BYTES:
        facts["input"] = input
    results = [] if effect.late is None else [(effect.late.engine_attempt_id, effect.late.result)]
    results += [] if isinstance(result, UnsetType) else [(step.engine_attempt_id, result)]
    if results:
        facts["results"] = [
            {"attempt": attempt, "result": value if len(value) <= SHOWN_BYTES else f"{len(value)} bytes"}
            for attempt, value in results
        ]
    return codec.encode(facts)


def read_answer(answer: Raw) -> ReconciliationAnswer:
    """Return the answer of an operator; raise `InvalidInput` if it cannot be read."""
    read = codec.decode(answer, ReconciliationAnswer)
    if read.answer != "happened" and not isinstance(read.result, UnsetType) and read.result != e.NULL:
        raise InvalidInput(f"a result belongs to the answer 'happened', not to {read.answer!r}", field="result")
    return read


def step_of(state: RunState, task_step_id: str) -> OpenStep | None:
    """Return the unresolved step that a task is about, if it is open."""
    step = state.open_steps.get(task_step_id.rpartition(RECONCILE_MARK)[0])
    return step if step is not None and step.effect is not None and step.effect.task == task_step_id else None


def settle(task: OpenStep, actor: str, answer: Raw, writer: EventWriter, cause: str | None) -> None:
    """Decide an unresolved step by the answer to its task, which is already closed."""
    step = step_of(writer.state, task.step_id)
    if step is None or step.effect is None:
        return
    step = replace(step, effect=replace(step.effect, task=""))  # the task needs no closing
    given = read_answer(answer)
    if given.answer == "happened":
        result = e.NULL if isinstance(given.result, UnsetType) else given.result
        writer.close(step, e.StepCompleted(result, confirmed_by="operator"), cause)
    elif given.answer == "did-not-happen":
        writer.retry(step, e.StepRetried(NOT_HAPPENED), cause)
        writer.dispatch.append(step.step_id)
    else:
        said = f": {given.reason}" if given.reason else ""
        words = f"{actor} answered that the step fails; whether its effect happened is not known{said}"
        error = ErrorInfo(RECONCILIATION_FAILED, words[:ERROR_TEXT_CHARS], category=INDETERMINATE)
        writer.fail(step, error, cause)


def ask_again(step: OpenStep, writer: EventWriter, cause: str | None) -> None:
    """Ask the verifier of an unresolved step again, as a further attempt."""
    assert step.effect is not None
    writer.close_reconciliation(step.effect.task)
    writer.retry(step, e.StepRetried(ASKED_AGAIN, is_last_look=step.effect.is_last_look), cause)
    writer.dispatch.append(step.step_id)


# --- successes


def on_success(
    step: OpenStep,
    attempt: int,
    outcome: ActivitySucceeded | ActivityOutcome,
    writer: EventWriter,
    cause: str | None,
    node: str,
) -> Decision:
    """Record a success of an attempt of a keyed step, or what contradicts it."""
    effect = step.effect or Effect()
    late, result = effect.late, outcome.result
    if effect.is_contradicted and step.is_unresolved:  # only the operator can decide
        if attempt not in effect.succeeded:
            _keep_late(step, attempt, result, writer, cause, node)
        return writer.decision()
    if late is not None and codec.value_digest(late.result) != codec.value_digest(result):
        return _contradict(step, attempt, result, writer, cause, node)
    is_latest = attempt >= step.engine_attempt_id
    if is_latest or late is not None or (attempt >= effect.called and not may_be_under_way(step, writer.now)):
        writer.close(step, e.StepCompleted(result, outcome.artifacts, outcome.confirmed_by), cause)
        return writer.decision()
    _keep_late(step, attempt, result, writer, cause, node)
    return writer.decision()


def _contradict(
    step: OpenStep, attempt: int, result: Raw, writer: EventWriter, cause: str | None, node: str
) -> Decision:
    """Fail closed: two attempts have succeeded with different results. An operator is asked again, in a new task."""
    assert step.effect is not None
    assert step.effect.late is not None
    words = f"attempts {step.effect.late.engine_attempt_id} and {attempt} have succeeded with different results"
    if step.is_unresolved:
        writer.close_reconciliation(step.effect.task)
        step = replace(step, engine_attempt_id=max(attempt, step.engine_attempt_id + 1))  # for a separate task
    return leave_unresolved(step, indeterminate(words), writer, node=node, cause=cause, result=result, was_called=True)


def _keep_late(step: OpenStep, attempt: int, result: Raw, writer: EventWriter, cause: str | None, node: str) -> None:
    late = e.StepSucceededLate(result, node)
    writer.write(late, step.step_id, step.logical_attempt_id, attempt, cause, step.opened_event_id)
    _comment(step, f"attempt {attempt} has succeeded after all; the history has its result", writer, cause)


def _comment(step: OpenStep, text: str, writer: EventWriter, cause: str | None) -> None:
    """Comment on the task about an unresolved step."""
    task = writer.state.open_steps.get(step.effect.task) if step.effect is not None else None
    if task is not None:
        said = e.TaskCommented("holdfast", text[:COMMENT_CHARS])
        writer.write(said, task.step_id, task.logical_attempt_id, None, cause, task.opened_event_id)


def on_stray_outcome(step: OpenStep, attempt: int, error: ErrorInfo | None, writer: EventWriter) -> Decision:
    """Inform the operator of an attempt that ended after the step became unresolved: the job was acquired again."""
    if attempt > step.engine_attempt_id:
        how = "without an outcome" if error is None else f"with {error}"
        _comment(step, f"attempt {attempt}, which was under way, has ended {how}", writer, None)
    return writer.decision()


def on_success_of_closed(
    state: RunState, step_id: str, logical_attempt_id: int, attempt: int, result: Raw, writer: EventWriter, node: str
) -> Decision:
    """Record a success that differs from how its step was closed, as a diagnostic. It replaces nothing."""
    for closed in state.closed_effects:
        if (closed.step_id, closed.logical_attempt_id) == (step_id, logical_attempt_id):
            is_known = attempt in closed.attempts or closed.digest == codec.digest(bytes(result))
            if not is_known:
                writer.write(e.StepSucceededLate(result, node), step_id, logical_attempt_id, attempt)
            return writer.decision()
    return NOTHING
