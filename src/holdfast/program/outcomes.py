"""How a program's tasks end, as commands."""

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core.events import ErrorInfo
from holdfast.errors import InvalidInput, PayloadTooLarge
from holdfast.program.definitions import Signature
from holdfast.program.failures import error_info

Bounded = Callable[[Raw, str], Raw]
"""Returns a value of this description, or raises `PayloadTooLarge`."""


class Rotate(BaseException):
    """Raised by `continue_as_new` and `cut` to end this stretch of the run."""

    def __init__(self, input: Raw) -> None:
        super().__init__("continue_as_new")
        self.input = input


def ending_of(main: asyncio.Task[Any], signature: Signature, *, is_cancelling: bool, bounded: Bounded) -> c.Command:
    """Return what a program asks for whose main task has ended like this.

    A `CancelledError` ends the run as cancelled only if the run was asked to cancel itself; else it is a failure.
    """
    if main.cancelled():
        return c.CancelRun() if is_cancelling else c.FailRun(error=_stray_cancellation(main, "the run"))
    problem = main.exception()
    while isinstance(problem, BaseExceptionGroup) and len(problem.exceptions) == 1 and _rotates(problem):
        [problem] = problem.exceptions  # a TaskGroup wraps whatever is raised inside
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


def cannot_do_without(main: asyncio.Task[Any]) -> bool:
    """Return whether a main task has failed as code does that got None and can do nothing with it."""
    if main.cancelled():
        return False
    problem = main.exception()
    if isinstance(problem, BaseExceptionGroup):
        return problem.subgroup(_OF_NONE) is not None
    return problem is None or isinstance(problem, _OF_NONE)  # without one, it is the result that does not fit


_OF_NONE = (TypeError, AttributeError, InvalidInput)


def answer_of(step_id: str, task: asyncio.Task[Any], bounded: Bounded) -> c.CompleteUpdate:
    """Return the answer to an update whose task has ended like this."""
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
    """Return the error of a task that ended with a `CancelledError` although no caller cancelled it."""
    try:
        task.result()
    except asyncio.CancelledError as problem:
        error = error_info(problem)
        return error if error.message else replace(error, message=f"{what} was not asked to cancel; the code raised it")
    raise AssertionError("the task was not cancelled")


def _rotates(group: BaseExceptionGroup[BaseException]) -> bool:
    return group.subgroup(Rotate) is not None
