"""Outcomes of activities that are reported from outside, with the token that the activity handed out.

An outcome becomes a signal to the run, which is durable before the caller is answered. It is accepted as soon as the
activity has its token, whether or not the run has recorded yet that the activity ended without an outcome.

**The store decides.** Whether the step can take an outcome is read from the history. The store then accepts the outcome
only if the history has not grown since, no other outcome waits for the step, and the step has not expired by the
store's clock. From then on no turn commits without having seen it. So an outcome that was accepted is recorded, and an
outcome that can no longer be recorded was refused.
"""

from collections.abc import Sequence
from typing import Any, cast

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.clock import SystemSecrets
from holdfast.core import codec
from holdfast.core.audit import AuditEntry
from holdfast.core.events import (
    NULL,
    ErrorInfo,
    Event,
    SignalWaiting,
    StepCompleted,
    StepDetached,
    StepFailed,
    StepStarted,
)
from holdfast.core.instants import Instant
from holdfast.core.keys import CALLBACK, COMPLETION_KEY, ActivityToken, outcome_id, read_activity_token
from holdfast.core.messages import OUTCOME_SIGNAL, ActivityOutcome, SignalRequest
from holdfast.core.state import TERMINAL, OpenStep, state_of
from holdfast.core.timing import retry_delay_ms, step_options
from holdfast.engine.activities.context import is_mendable
from holdfast.engine.history import head_of, read_since_rotation
from holdfast.engine.inbox.json_schema import SchemaCheck
from holdfast.errors import Conflict, HoldfastError, InvalidInput, StoreUnavailable
from holdfast.limits import ERROR_TEXT_CHARS, Limits
from holdfast.program.callbacks import CallbackTerms, heartbeat_signal
from holdfast.program.outcomes import attempt_error
from holdfast.program.secrets import current_redactor
from holdfast.registry import Registry
from holdfast.store.decisions import run_terminal
from holdfast.store.port import Refused, Store, TokenStore


async def completion_key(store: TokenStore) -> str:
    """Return the store's key for tokens of activities. The first caller creates it."""
    return await store.put_key(COMPLETION_KEY, SystemSecrets().new_secret())


async def report_result(
    store: Store,
    key: str,
    token: str,
    result: Any,
    limits: Limits,
    registry: Registry,
    audit: AuditEntry | None = None,
) -> None:
    """Report that the activity has succeeded. See `App.complete_activity`.

    A result that does not fit the type of a registered activity is refused: once recorded, it would fail the workflow.
    """
    of = read_activity_token(token, key)
    encoded, redactor = registry.values.encode(result), current_redactor()
    if redactor is not None:  # an activity reports this outcome
        encoded = redactor.json(encoded)
    codec.bounded(encoded, limits.value_bytes, f"the result of step {of.step_id!r}")
    await _report(store, of, _outcome(of, result=encoded), registry, audit)


async def report_error(
    store: Store,
    key: str,
    token: str,
    error: BaseException | str,
    registry: Registry,
    audit: AuditEntry | None = None,
) -> None:
    """Report that the activity has failed. See `App.fail_activity`."""
    of = read_activity_token(token, key)
    redactor = current_redactor()
    redact = None if redactor is None else redactor.text
    if isinstance(error, str):
        info = ErrorInfo("ActivityError", (redact or str)(error)[:ERROR_TEXT_CHARS], retryable=True)
    else:
        info = attempt_error(error, retryable=is_mendable(error), redact=redact)
    if of.is_callback:  # an answer to a callback is final
        info = replace(info, retryable=False)
    # Derived from the token, not random: a caller who repeats the call after an unknown outcome sends the same value
    # again.
    fraction = codec.number_of(token) / 2**56
    await _report(store, of, _outcome(of, error=info, fraction=fraction), registry, audit)


def _outcome(of: ActivityToken, **fields: Any) -> ActivityOutcome:
    return ActivityOutcome(logical_attempt_id=of.logical_attempt_id, engine_attempt_id=of.engine_attempt_id, **fields)


class _Terms(Struct, frozen=True):
    """The terms on which the store may accept an outcome, as far as the history shows them; or why it may not."""

    version: int
    outcome: ActivityOutcome | None = None
    """The outcome of a callback, as one of the present attempt: its token is valid for all attempts."""
    before: Instant | None = None
    why_not: HoldfastError | None = None


async def _report(
    store: Store, of: ActivityToken, outcome: ActivityOutcome, registry: Registry, audit: AuditEntry | None
) -> None:
    while True:
        terms = await _terms(store, of, outcome, registry)
        payload = codec.encode(terms.outcome or outcome)
        request = SignalRequest(
            run_id=of.run_id,
            name=OUTCOME_SIGNAL,
            payload=payload,
            signal_id=outcome_id(of),
            step_id=of.step_id,
            expected_version=terms.version,
            # An outcome that the step does not take is still sent to the store, which knows whether it is a retry.
            accept_before=terms.before if terms.why_not is None else 0,
            audit=audit,
        )
        [answer] = await store.deliver([request])
        if not isinstance(answer, Refused):
            return
        if not isinstance(answer.error, Conflict):
            raise answer.error
        if terms.why_not is not None:
            raise terms.why_not
        if "signal_id" in answer.error.details:
            raise _too_late(of, "the attempt has another outcome")
        if "expected_version" not in answer.error.details:
            is_waiting = "step_id" in answer.error.details
            raise _too_late(of, "the step has an outcome already" if is_waiting else "its time is over")


async def _terms(store: Store, of: ActivityToken, outcome: ActivityOutcome, registry: Registry) -> _Terms:
    head = await head_of(store, of.run_id)
    if head.status in TERMINAL:
        known = outcome if not of.is_callback else _as_concluded(outcome, of, await read_since_rotation(store, head))
        return _Terms(head.version, known, why_not=run_terminal(of.run_id, head.status))
    history = await read_since_rotation(store, head)
    state = state_of(of.run_id, history)
    version, step = state.version, state.open_steps.get(of.step_id)
    if step is None and history[-1].emitted_at < of.opened_at:  # it began before its start was durable (`fail_open`)
        return _Terms(version, why_not=StoreUnavailable(f"step {of.step_id!r} is not durable yet: report again"))
    if step is not None and of.is_callback and isinstance(step.body, StepStarted) and step.body.name == CALLBACK:
        of = replace(of, logical_attempt_id=step.logical_attempt_id, engine_attempt_id=step.engine_attempt_id)
        outcome = replace(outcome, logical_attempt_id=of.logical_attempt_id, engine_attempt_id=of.engine_attempt_id)
    if step is None or step.kind != "activity" or step.logical_attempt_id != of.logical_attempt_id:
        known = outcome if not of.is_callback else _as_concluded(outcome, of, history)
        return _Terms(version, known, why_not=_too_late(of, "the step is closed"))
    if of.opened_at not in (0, step.opened_at):
        return _Terms(version, why_not=_too_late(of, "the run of the token was deleted, and this is another one"))
    if of.engine_attempt_id > step.engine_attempt_id and not step.queue:
        there_was_none = f"the token is of attempt {of.engine_attempt_id}, and there was none"
        return _Terms(version, why_not=InvalidInput(there_was_none, field="token"))
    if outcome.error is not None and step.is_unresolved:
        return _Terms(version, why_not=_too_late(of, "an operator is asked whether it has happened"))
    if outcome.error is not None and of.engine_attempt_id < step.engine_attempt_id:
        return _Terms(version, why_not=_too_late(of, f"the step has come to attempt {step.engine_attempt_id}"))
    if outcome.error is None:
        try:
            registry.check_result(step.body, outcome.result)
            _check_answer(step, outcome.result, history)
        except InvalidInput as misfit:
            return _Terms(version, why_not=misfit)
    return _Terms(version, outcome, _closes_at(step, of, outcome))


def _as_concluded(outcome: ActivityOutcome, of: ActivityToken, history: Sequence[Event]) -> ActivityOutcome:
    """Return an outcome of a closed callback as one of the attempt that has ended, so that the store recognises a
    retry.
    """
    attempt = 1, 1
    for event in history:
        if event.step_id == of.step_id and isinstance(event.data, StepCompleted | StepFailed):
            attempt = event.logical_attempt_id or 1, event.engine_attempt_id or 1
    return replace(outcome, logical_attempt_id=attempt[0], engine_attempt_id=attempt[1])


def _terms_of_callback(step: OpenStep) -> CallbackTerms | None:
    """Return the terms that the answer to a callback has to meet; None if the step is not a callback."""
    if not isinstance(step.body, StepStarted) or step.body.name != CALLBACK:
        return None
    return codec.decode(step.body.input, dict[str, CallbackTerms])["terms"]


def _check_answer(step: OpenStep, result: Raw, history: Sequence[Event]) -> None:
    """Raise `InvalidInput` if a result does not fit the recorded type of the callback or the activity."""
    terms = _terms_of_callback(step)
    schema = None if terms is None else terms.schema
    for event in history:
        if event.step_id == step.step_id and isinstance(event.data, StepDetached) and terms is None:
            schema = event.data.result_schema
    misfit = None if schema is None else SchemaCheck(schema).misfit(bytes(result))
    if misfit is not None:
        where, why = misfit
        raise InvalidInput(f"the result of step {step.step_id!r}: {why} - at `${where}`", field="result")


async def report_heartbeat(store: Store, key: str, token: str) -> None:
    """Report that the system that answers a callback is still working. See `App.heartbeat_activity`.

    It is recorded at most three times in each `heartbeat_timeout`, and accepted without a record in between.
    """
    of = read_activity_token(token, key)
    head = await head_of(store, of.run_id)
    history = await read_since_rotation(store, head)
    step = state_of(of.run_id, history).open_steps.get(of.step_id) if head.status not in TERMINAL else None
    terms = None if step is None or of.opened_at not in (0, step.opened_at) else _terms_of_callback(step)
    if terms is None or terms.heartbeat_ms is None:
        raise _too_late(of, "it is closed, or takes no heartbeats")
    name = heartbeat_signal(of.step_id)
    waits = [event for event in history if isinstance(event.data, SignalWaiting) and event.data.name == name]
    if not waits:
        raise _too_late(of, "it does not wait for heartbeats")
    last, until = waits[-1], cast(SignalWaiting, waits[-1].data).until
    if await store.now() < last.persisted_at + terms.heartbeat_ms * 1_000 // 3:
        return
    request = SignalRequest(
        run_id=of.run_id,
        name=name,
        payload=NULL,
        signal_id=f"after {last.run_seq}",
        require_waiting=True,
        accept_before=until,  # even while there is no node to time it out
    )
    [answer] = await store.deliver([request])
    if isinstance(answer, Refused):
        raise _too_late(of, "it has timed out") from answer.error


def _closes_at(step: OpenStep, of: ActivityToken, outcome: ActivityOutcome) -> Instant | None:
    """Return the time from which the outcome is too late, or None.

    A success counts while the step is open, so the end of its attempt's time matters only if no further attempt
    follows.
    """
    options = step_options(getattr(step.body, "options", NULL))
    ends = [options.deadline_of(step)]
    if step.is_detached and of.engine_attempt_id == step.engine_attempt_id and (outcome.error or step.key is None):
        timed_out = ErrorInfo("TimeoutError", "", retryable=True)
        if outcome.error is not None or retry_delay_ms(options.retry, step.attempt, timed_out, 0.0) is None:
            ends.append(step.due_at)
    return min((end for end in ends if end is not None), default=None)


def _too_late(of: ActivityToken, why: str) -> Conflict:
    return Conflict(
        f"attempt {of.engine_attempt_id} of step {of.step_id!r} takes no outcome: {why}",
        run_id=of.run_id,
        step_id=of.step_id,
    )
