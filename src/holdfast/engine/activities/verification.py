"""Verifiers: they ask the external system whether the effect of a keyed step has happened.

The verifier is the first part of an attempt: the node or queue worker that would call the function calls the verifier
first. It takes arguments of the activity by name, has the activity's context, and a time limit of its own. It only
reads, so a node that stops returns the attempt as if it had not begun.

A verifier that returns anything but a verdict, raises, or returns a result that does not fit the activity counts as
indeterminate, with the reason. One that raises or times out is retried first, according to its policy: a restart of an
external system needs no decision of an operator.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from msgspec import Raw, Struct

from holdfast.core import reconciliation
from holdfast.core.events import ErrorInfo, StepStarted
from holdfast.core.timing import retry_delay_ms
from holdfast.engine.activities.context import Work
from holdfast.errors import HoldfastError
from holdfast.program.outcomes import Redact, error_info


class NotCompleted(Struct, frozen=True):
    """The effect has not happened, and no earlier attempt can still cause it. The activity is called."""


class Completed(Struct, frozen=True):
    """The effect has happened. `result` is what the activity would have returned."""

    result: Any = None


class CompletedWithoutResult(Struct, frozen=True):
    """The effect has happened, and its result cannot be found. The step fails and is never called again."""

    reason: str = ""
    """Why there is no result, for the history."""


class Indeterminate(Struct, frozen=True):
    """It cannot be known whether the effect has happened. An operator decides."""

    reason: str = ""
    """Why it cannot be known, for the operator."""


Verdict = NotCompleted | Completed | CompletedWithoutResult | Indeterminate

Enter = Callable[[dict[str, Any]], Awaitable[None]]
Encode = Callable[[Work, Any], Raw]
RunInThread = Callable[[Callable[[], Any]], "Future[Any]"]


class Found(Struct, frozen=True):
    """The conclusion of a verification: a result or an error. If it has neither, the function must be called."""

    result: Raw | None = None
    error: ErrorInfo | None = None
    failure: str = ""
    """The code of the error by which the verifier itself failed, so that it may be asked again."""


CALL = Found()


def before_asking(work: Work) -> Found | None:
    """Return the conclusion for an activity without a verifier; None if the activity has one."""
    if work.definition.verifier is not None:
        return None
    step, effect = work.step, work.step.effect
    assert effect is not None
    error = effect.error
    is_known = error is not None and error.code not in reconciliation.UNKNOWN_CODES and not effect.was_in_doubt
    if effect.is_last_look and is_known:
        return Found(error=reconciliation.not_completed(error))  # the function itself has reported this
    last = "" if error is None else f"; the last attempt ended with {error}"
    words = f"whether step {step.step_id!r} has had its effect is not known, and the activity has no verifier{last}"
    return Found(error=reconciliation.indeterminate(words))


async def ask(work: Work, enter: Enter, in_thread: RunInThread, encode: Encode, redact: Redact) -> Found:
    """Ask the verifier of an activity, and return the conclusion. `enter` resolves the secrets among the arguments."""
    definition, step = work.definition, work.step
    assert isinstance(step.body, StepStarted)
    assert definition.verifier is not None
    try:
        arguments = definition.signature.unpack(step.body.input)
        await enter(arguments)
        call = partial(definition.verifier.function, **{name: arguments[name] for name in definition.verifier.names})
        limit = asyncio.timeout(definition.verifier.timeout_ms / 1_000)
        try:
            async with limit:
                said = await (call() if definition.verifier.is_async else asyncio.wrap_future(in_thread(call)))
                if inspect.isawaitable(said):  # a lambda that calls an async function returns an awaitable
                    said = await said
        except TimeoutError:
            if limit.expired():
                words = f"the verifier did not answer within {definition.verifier.timeout_ms} ms"
                return Found(error=reconciliation.indeterminate(words), failure=TimeoutError.__name__)
            raise
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as problem:  # whatever a verifier raises is shown to the operator
        raised = error_info(problem, redact=redact)
        words = f"the verifier raised {raised}"
        return Found(error=reconciliation.indeterminate(words), failure=raised.code)
    return _follow(work, said, encode, redact)


def delay_before_asking_again_ms(work: Work, found: Found, asked: int, fraction: float) -> int | None:
    """Return how long to wait before a verifier that has failed this often is asked again; None if it is not."""
    if not found.failure:
        return None
    assert work.definition.verifier is not None
    return retry_delay_ms(work.definition.verifier.retry, asked, ErrorInfo(found.failure, "", retryable=True), fraction)


def _follow(work: Work, said: Any, encode: Encode, redact: Redact) -> Found:
    step = work.step
    effect = step.effect
    assert effect is not None
    match said:
        case NotCompleted():
            if effect.late is not None:
                words = (
                    f"the verifier says that it has not happened, and attempt {effect.late.engine_attempt_id} "
                    "has succeeded: they contradict each other"
                )
                return Found(error=reconciliation.indeterminate(words))
            return Found(error=reconciliation.not_completed(effect.error)) if effect.is_last_look else CALL
        case Completed():
            try:
                return Found(result=encode(work, said.result))
            except HoldfastError as problem:
                words = f"the verifier found a result that cannot be used: {redact(problem.message)}"
                return Found(error=reconciliation.indeterminate(words))
        case CompletedWithoutResult():
            words = f"step {step.step_id!r} has had its effect, and the result cannot be found"
            return Found(
                error=reconciliation.without_result(f"{words}: {redact(str(said.reason))}" if said.reason else words)
            )
        case Indeterminate():
            return Found(error=reconciliation.indeterminate(redact(str(said.reason)) or "the verifier cannot say"))
    words = f"the verifier returned {type(said).__qualname__}, which is no verdict"
    return Found(error=reconciliation.indeterminate(words))
