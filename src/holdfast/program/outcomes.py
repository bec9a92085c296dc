"""How a program's code ends: as a command to the core, or as an error that a history keeps.

An exception is kept as an `ErrorInfo`: bounded, plain text, with its causes.
"""

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core.events import ErrorInfo
from holdfast.errors import InvalidInput, PayloadTooLarge
from holdfast.limits import ERROR_CAUSES, ERROR_TEXT_CHARS
from holdfast.program.definitions import Signature

Bounded = Callable[[Raw, str], Raw]
"""Returns an encoded value, or raises `PayloadTooLarge` with this description of it."""


class Rotate(BaseException):
    """Raised by `continue_as_new` and `continue_as_new_if_long` to end the function before the history rotates."""

    def __init__(self, input: Raw) -> None:
        super().__init__("continue_as_new")
        self.input = input


def outcome_of(main: asyncio.Task[Any], signature: Signature, *, is_cancelling: bool, bounded: Bounded) -> c.Command:
    """Return the command of a program whose main task has ended.

    A `CancelledError` ends the run as cancelled only if the run is being cancelled; else it is a failure.
    """
    if main.cancelled():
        return c.CancelRun() if is_cancelling else c.FailRun(error=_stray_cancellation(main, "the run"))
    problem = main.exception()
    while isinstance(problem, BaseExceptionGroup) and len(problem.exceptions) == 1 and _rotates(problem):
        [problem] = problem.exceptions  # a TaskGroup wraps every exception
    if isinstance(problem, Rotate):
        return c.ContinueAsNew(input=problem.input)
    if problem is not None:
        return c.FailRun(error=error_info(problem))
    try:
        result = bounded(codec.encode(main.result()), "the result of the run")
        signature.result_of(result)
        return c.CompleteRun(result=result)
    except (InvalidInput, PayloadTooLarge) as unfit:
        return c.FailRun(error=error_info(unfit))


def fails_on_none(main: asyncio.Task[Any]) -> bool:
    """Return whether a main task has failed with an error that code raises when it gets None unexpectedly."""
    if main.cancelled():
        return False
    problem = main.exception()
    if isinstance(problem, BaseExceptionGroup):
        return problem.subgroup(_OF_NONE) is not None
    return problem is None or isinstance(problem, _OF_NONE)  # without one, it is the result that does not fit


_OF_NONE = (TypeError, AttributeError, InvalidInput)


def answer_of(step_id: str, task: asyncio.Task[Any], bounded: Bounded) -> c.CompleteUpdate:
    """Return the command that answers an update whose task has ended."""
    if task.cancelled():
        return c.CompleteUpdate(step_id=step_id, error=_stray_cancellation(task, "the update"))
    problem = task.exception()
    if problem is not None:
        return c.CompleteUpdate(step_id=step_id, error=error_info(problem))
    try:
        return c.CompleteUpdate(
            step_id=step_id, result=bounded(codec.encode(task.result()), "the answer of the update")
        )
    except (InvalidInput, PayloadTooLarge) as unfit:
        return c.CompleteUpdate(step_id=step_id, error=error_info(unfit))


def _stray_cancellation(task: asyncio.Task[Any], what: str) -> ErrorInfo:
    """Return the error of a task that ended with a `CancelledError` although it was not cancelled."""
    try:
        task.result()
    except asyncio.CancelledError as problem:
        error = error_info(problem)
        return error if error.message else replace(error, message=f"{what} was not being cancelled; the code raised it")
    raise AssertionError("the task was not cancelled")


def _rotates(group: BaseExceptionGroup[BaseException]) -> bool:
    return group.subgroup(Rotate) is not None


# --- exceptions as a history keeps them


def error_info(problem: BaseException, *, retryable: bool = False, causes: int = ERROR_CAUSES) -> ErrorInfo:
    """Return an exception as a history keeps it: bounded, with its cause. The cause of a group is its first member."""
    if isinstance(problem, BaseExceptionGroup):
        inner = problem.__cause__ or problem.exceptions[0]
    else:
        inner = problem.__cause__ or (None if problem.__suppress_context__ else problem.__context__)
    cause = _attribute(problem, "info")
    if not isinstance(cause, ErrorInfo):
        cause = error_info(inner, causes=causes - 1) if inner is not None and causes > 0 else None
    code = None if isinstance(problem, SystemExit) else _attribute(problem, "code")  # its code is an exit status
    return ErrorInfo(
        code=_plain_text(code)[:ERROR_TEXT_CHARS] if isinstance(code, str) and code else type(problem).__name__,
        message=_message(problem)[:ERROR_TEXT_CHARS],
        retryable=retryable,
        traceback=_traceback(problem)[-ERROR_TEXT_CHARS:],
        cause=cause,
    )


def error_bytes(error: ErrorInfo | None) -> int:
    """Return about how many bytes an error takes in a history."""
    size = 0
    while error is not None:
        size += len(error.message) + len(error.traceback)
        error = error.cause
    return size


def _message(problem: BaseException) -> str:
    """Return the message of any exception; of a group, with the messages of all members."""
    try:
        text = _plain_text(str(problem))
        if isinstance(problem, BaseExceptionGroup):
            members = "; ".join(f"{type(member).__name__}: {_message(member)}" for member in problem.exceptions)
            return f"{text}: {members}"
        return text
    except Exception:  # an exception that cannot even be shown must not stop its run from being recorded
        return f"a {type(problem).__name__} that cannot be shown"


def _traceback(problem: BaseException) -> str:
    try:
        return _plain_text("".join(traceback.format_exception(problem, chain=False)))
    except Exception:
        return ""


def _attribute(problem: BaseException, name: str) -> object:
    """Return an attribute of an exception, or None if its own code raises."""
    try:
        return getattr(problem, name, None)
    except Exception:
        return None


def _plain_text(text: str) -> str:
    """Return text that can be stored: without lone surrogates."""
    return text.encode(errors="replace").decode()
