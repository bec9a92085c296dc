"""Outcomes of activities that are reported from outside, by the token that the activity gave away.

What is reported becomes a message to the run, durable before the caller is answered. It counts from the moment at
which the activity has its token, whether or not the run has heard yet that the activity ended without an outcome.
"""

from typing import Any

from holdfast.core import codec
from holdfast.core.events import ErrorInfo
from holdfast.core.messages import ActivityOutcome, activity_completed
from holdfast.core.state import TERMINAL, OpenStep, retry_token, state_of
from holdfast.core.tokens import ActivityToken, read_token
from holdfast.engine.activities import is_mendable
from holdfast.engine.stretch import read_stretch
from holdfast.errors import Conflict, InvalidInput
from holdfast.program.failures import error_info
from holdfast.store.guards import no_such_run, run_terminal
from holdfast.store.port import Accepted, Refused, Store


async def report_result(store: Store, token: str, result: Any) -> None:
    """Report that the activity has succeeded. See `App.complete_activity`."""
    of = read_token(token)
    await _report(store, of, _outcome(of, result=codec.encode(result)))


async def report_error(store: Store, token: str, error: BaseException | str, fraction: float) -> None:
    """Report that the activity has failed. See `App.fail_activity`."""
    of = read_token(token)
    if isinstance(error, str):
        info = ErrorInfo("ActivityError", error, retryable=True)
    else:
        info = error_info(error, retryable=is_mendable(error))
    await _report(store, of, _outcome(of, error=info, fraction=fraction))


def _outcome(of: ActivityToken, **fields: Any) -> ActivityOutcome:
    return ActivityOutcome(logical_attempt_id=of.logical_attempt_id, engine_attempt_id=of.engine_attempt_id, **fields)


async def _report(store: Store, of: ActivityToken, outcome: ActivityOutcome) -> None:
    step = await _open_step(store, of)
    if step is None or step.kind != "activity" or step.logical_attempt_id != of.logical_attempt_id:
        raise _too_late(of, "is closed")
    if of.engine_attempt_id > step.engine_attempt_id and not step.queue:
        raise InvalidInput(f"the token is of attempt {of.engine_attempt_id}, and there was none", field="token")
    if outcome.error is not None and of.engine_attempt_id < step.engine_attempt_id:
        raise _too_late(of, f"has come to attempt {step.engine_attempt_id}")
    token = retry_token(of.step_id, of.engine_attempt_id)
    message = activity_completed(of.run_id, of.step_id, token, outcome, await store.now())
    [answer] = await store.deliver([message])
    if isinstance(answer, Refused):
        raise answer.error
    if not isinstance(answer, Accepted):
        raise _too_late(of, "has an outcome that its run is about to record")


async def _open_step(store: Store, of: ActivityToken) -> OpenStep | None:
    """Return the step as it stands, or None if it is not open."""
    [run] = await store.load([of.run_id])
    if run is None:
        raise no_such_run(of.run_id)
    if run.head.status in TERMINAL:
        raise run_terminal(of.run_id, run.head.status)
    return state_of(of.run_id, await read_stretch(store, run.head)).open_steps.get(of.step_id)


def _too_late(of: ActivityToken, why: str) -> Conflict:
    return Conflict(
        f"attempt {of.engine_attempt_id} of step {of.step_id!r} takes no outcome: the step {why}",
        run_id=of.run_id,
        step_id=of.step_id,
    )
