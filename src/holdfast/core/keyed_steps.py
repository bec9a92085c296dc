"""The state of a run's keyed steps: what is known about their effects, according to the events.

The decisions about them are in `reconciliation.py`.
"""

from typing import TYPE_CHECKING

from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core.events import NULL, ErrorInfo, Event
from holdfast.core.instants import Instant
from holdfast.limits import ATTEMPTS_SHOWN, ERROR_SHOWN_CHARS

if TYPE_CHECKING:
    from holdfast.core.state import FailedStep, OpenStep


class EndedAttempt(Struct, frozen=True, omit_defaults=True, gc=False):
    """How an attempt of a keyed step ended, as far as the run knows. `node` is empty if it is not known."""

    engine_attempt_id: int
    ended_at: Instant
    how: str
    node: str = ""
    error: str = ""


class LateResult(Struct, frozen=True, gc=False):
    """The result of an attempt that had been abandoned."""

    engine_attempt_id: int
    result: Raw = NULL


class Effect(Struct, frozen=True, omit_defaults=True, gc=False):
    """What is known about a keyed step's effect after an attempt that may have begun and has no known outcome.

    A job carries it to the node that acquires the job.
    """

    must_verify: bool = False
    """The verifier is asked before the function is called."""
    is_last_look: bool = False
    """The verifier is asked, and the function is no longer called."""
    called: int = 0
    """The last attempt before the current one in which the function may have been called."""
    losses: int = 0
    """How many consecutive attempts were lost."""
    error: ErrorInfo | None = None
    """The error of the last attempt that failed."""
    late: LateResult | None = None
    attempts: tuple[EndedAttempt, ...] = ()
    since: Instant = 0
    """When the step was first opened, before an operator retried it."""
    task: str = ""
    """The step of the task that asks an operator. While there is one, the step is unresolved."""
    was_called: bool = True
    """Whether the function may have been called in the current attempt; only for an unresolved step."""
    succeeded: tuple[int, ...] = ()
    """The attempts that succeeded without completing the step."""
    is_contradicted: bool = False
    """Two of them have different results."""
    was_in_doubt: bool = False
    """Before the last attempt that ended, others had unknown outcomes: its error does not settle those."""


class ClosedEffect(Struct, frozen=True, gc=False):
    """How a keyed step was closed: its result, and the attempts that had succeeded.

    The digest is empty if the step was closed without a result.
    """

    step_id: str
    logical_attempt_id: int
    attempts: tuple[int, ...]
    digest: str = ""


RECONCILE_MARK = "!reconcile"
"""Separates the id of a keyed step from the attempt in the step id of the task that asks an operator about it."""

NOT_HAPPENED = "did not happen"
"""The reason of a retry after an operator answered that the effect did not happen."""

ASKED_AGAIN = "asked again"
"""The reason of a retry by which an operator has the verifier of an unresolved step run again."""

LOST = "node lost"
"""The reason of a retry after an attempt that was lost with its node."""

NOT_COMPLETED = "not-completed"
"""The category of an error that is certain: the effect did not happen in this attempt, nor before."""

TIMED_OUT = "TimeoutError"
"""The code of an error after which the function may or may not have done its work."""


def reconcile_step_id(step_id: str, engine_attempt_id: int) -> str:
    """Return the step id of the task that asks an operator about an attempt of a keyed step."""
    return f"{step_id}{RECONCILE_MARK}{engine_attempt_id}"


def is_of_engine(step_id: str | None) -> bool:
    """Return whether a step is a task of the engine, which no program knows."""
    return step_id is not None and RECONCILE_MARK in step_id


def effect_after_retry(step: "OpenStep", event: Event, body: e.StepRetried) -> Effect | None:
    """Return what is known about a keyed step's effect after its attempt was followed by another one."""
    was = step.effect
    if body.reason == e.NOT_BEGUN or (body.error is not None and body.error.category == NOT_COMPLETED):
        return was  # the function was not called
    ended = (event.engine_attempt_id or step.engine_attempt_id + 1) - 1
    known = was or Effect(since=step.opened_at)
    if body.reason == NOT_HAPPENED:
        return Effect(called=known.called, attempts=known.attempts, since=known.since, error=known.error)
    is_called = known.was_called and not known.is_last_look
    attempts = known.attempts
    if body.reason != ASKED_AGAIN:
        lost = range(step.engine_attempt_id, ended)  # acquired by other nodes and never reported
        how = "lost" if body.reason == LOST else "timed out" if _is_timeout(body.error) else "failed"
        said = "" if body.error is None else f"{body.error}"
        attempts += tuple(EndedAttempt(each, event.emitted_at, "lost") for each in lost)
        attempts += (EndedAttempt(ended, event.emitted_at, how, body.node, said[:ERROR_SHOWN_CHARS]),)
    return Effect(
        must_verify=True,
        is_last_look=body.is_last_look,
        called=ended if is_called else known.called,
        losses=known.losses + 1 if body.reason == LOST else 0,
        error=body.error or known.error,
        late=known.late,
        attempts=attempts[-ATTEMPTS_SHOWN:],
        since=known.since,
        succeeded=known.succeeded,
        was_in_doubt=known.must_verify or ended > step.engine_attempt_id,
    )


def effect_after_doubt(step: "OpenStep", event: Event, body: e.StepUnresolved) -> Effect:
    """Return what is known about the effect of a keyed step that now waits for an operator."""
    known = step.effect or Effect(since=step.opened_at)
    attempt = event.engine_attempt_id or step.engine_attempt_id
    said = f"{body.error}"
    ended = EndedAttempt(attempt, event.emitted_at, "unresolved", body.node, said[:ERROR_SHOWN_CHARS])
    return replace(
        known,
        must_verify=True,
        error=body.error,
        attempts=(*known.attempts, ended)[-ATTEMPTS_SHOWN:],
        task=reconcile_step_id(step.step_id, attempt),
        was_called=body.was_called,
        succeeded=known.succeeded if body.result is UNSET else (*known.succeeded, attempt),
        is_contradicted=body.result is not UNSET,
    )


def effect_of_retried_step(failed: "FailedStep") -> Effect:
    """Return what is known about the effect of a failed keyed step that an operator retries."""
    step = failed.started
    known = step.effect or Effect(since=step.opened_at)
    said = f"{failed.error}"
    ended = EndedAttempt(step.engine_attempt_id, step.opened_at, "failed", "", said[:ERROR_SHOWN_CHARS])
    return Effect(
        must_verify=True,
        called=step.engine_attempt_id,
        error=failed.error,
        late=known.late,
        attempts=(*known.attempts, ended)[-ATTEMPTS_SHOWN:],
        since=known.since,
    )


def _is_timeout(error: ErrorInfo | None) -> bool:
    return error is not None and error.code == TIMED_OUT
