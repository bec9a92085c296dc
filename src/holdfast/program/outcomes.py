"""Results of a program's code: commands for the core, effects of handlers, and errors as a history records them.

An exception is recorded as an `ErrorInfo`: bounded, plain text, with its causes. A handler of signals or updates is
called once; its result is recorded, and replay reads the record.
"""

import asyncio
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, get_type_hints

from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.events import ErrorInfo, Event
from holdfast.errors import (
    ActivityFailed,
    ChildFailed,
    InvalidInput,
    NondeterminismError,
    PayloadTooLarge,
    RunError,
    SignalHandlerFailed,
    UnhandledError,
    WorkflowFailed,
)
from holdfast.limits import DURATION_MS, ERROR_CAUSES, ERROR_TEXT_CHARS
from holdfast.program.definitions import WorkflowDefinition
from holdfast.program.loop import Watch
from holdfast.program.source import authors_frames, raising_line
from holdfast.program.values import PLAIN, Signature, Values

Bounded = Callable[[Raw, str], Raw]
"""Returns an encoded value, or raises `PayloadTooLarge` with this description of it."""


class Rotate(BaseException):
    """Raised by `continue_as_new` and `continue_as_new_if_long` to end the function before the history rotates."""

    def __init__(self, input: Raw) -> None:
        super().__init__("continue_as_new")
        self.input = input


def raised_outcome(main: asyncio.Task[Any], *, is_cancelling: bool) -> tuple[c.Command, BaseException | None]:
    """Return the command of a program whose main task has raised, and the exception if that is a failure.

    A `CancelledError` ends the run as cancelled only if the run is being cancelled; otherwise it is treated like any
    other exception.
    """
    if main.cancelled():
        if is_cancelling:
            return c.CancelRun(), None
        problem: BaseException = _stray_cancellation(main, "the run")
    else:
        raised = main.exception()
        assert raised is not None
        problem = raised
    while isinstance(problem, BaseExceptionGroup) and len(problem.exceptions) == 1 and rotates(problem):
        [problem] = problem.exceptions  # a TaskGroup wraps every exception
    if isinstance(problem, Rotate):
        return c.ContinueAsNew(input=problem.input), None
    return c.FailRun(error=error_info(problem)), problem


def fails_on_none(main: asyncio.Task[Any]) -> bool:
    """Return whether a main task has failed with an error that code raises when it unexpectedly gets None."""
    if main.cancelled():
        return False
    problem = main.exception()
    if isinstance(problem, BaseExceptionGroup):
        return problem.subgroup(_OF_NONE) is not None
    return problem is None or isinstance(problem, _OF_NONE)  # without an exception, the result does not fit


_OF_NONE = (TypeError, AttributeError, InvalidInput)


def answer_of(step_id: str, task: asyncio.Task[Any], values: Values, bounded: Bounded) -> c.CompleteUpdate:
    """Return the command that answers an update whose task has ended."""
    if task.cancelled():
        return c.CompleteUpdate(step_id=step_id, error=error_info(_stray_cancellation(task, "the update")))
    problem = task.exception()
    if problem is not None:
        return c.CompleteUpdate(step_id=step_id, error=error_info(problem))
    try:
        return c.CompleteUpdate(
            step_id=step_id, result=bounded(values.encode(task.result()), "the answer of the update")
        )
    except (InvalidInput, PayloadTooLarge) as unfit:
        return c.CompleteUpdate(step_id=step_id, error=error_info(unfit))


def _stray_cancellation(task: asyncio.Task[Any], what: str) -> asyncio.CancelledError:
    """Return the exception of a task that ended with a `CancelledError` although it was not cancelled."""
    try:
        task.result()
    except asyncio.CancelledError as problem:
        if not problem.args:
            problem.args = (f"{what} was not being cancelled; the code raised it",)
        return problem
    raise AssertionError("the task was not cancelled")


# --- which exceptions fail a run

FAILURES = (WorkflowFailed, ActivityFailed, ChildFailed, SignalHandlerFailed, TimeoutError)
"""What fails every run that does not handle it: raised to do so, or the recorded outcome of a step or wait.

Later code would get the same outcome again, so a pause would not help.
"""


def is_failure(problem: BaseException, definition: WorkflowDefinition, *, is_cancelling: bool = False) -> bool:
    """Return whether an exception that the code does not handle fails its run; any other pauses it.

    A group fails the run if every exception in it does. Cancellations in it, of the run or of a task by its code, do
    not count.
    """
    if definition.on_error == "fail" or isinstance(problem, (*FAILURES, *definition.failures)):
        return True
    if not isinstance(problem, BaseExceptionGroup):
        return False
    others = [each for each in problem.exceptions if not isinstance(each, asyncio.CancelledError)]
    return (is_cancelling or bool(others)) and all(
        is_failure(each, definition, is_cancelling=is_cancelling) for each in others
    )


def unhandled(problem: BaseException, what: str = "the workflow", advice: str = "") -> UnhandledError:
    """Return the error of a run whose code did not handle an exception, with the author's line."""
    info = error_info(problem)
    line = raising_line(problem)
    found = UnhandledError(
        f"{what} raised {info}{f' at {line}' if line else ''}"[: ERROR_TEXT_CHARS // 2]
        + f"; {advice or 'fix the code, and the run continues from here; or cancel the run'}",
        source=str(line or ""),
    )
    found.__cause__ = problem
    return found


def stuck(line: object, failed: list[asyncio.Task[Any]]) -> UnhandledError:
    """Return the error of a run whose code waits for what can never come; with a task that has failed meanwhile."""
    text = f"nothing can wake the workflow: no step, timer or signal is open, and it waits at {line}"
    for task in failed[:1]:
        problem = task._exception  # without marking it as retrieved
        assert problem is not None
        text += f"; {task.get_name()!r}, a task that nothing has awaited, raised {error_info(problem)}"
    text = text[: ERROR_TEXT_CHARS // 2]
    found = UnhandledError(
        f"{text}; fix the code, and the run continues from here; or cancel the run", source=str(line)
    )
    found.__cause__ = failed[0]._exception if failed else None
    return found


def rotates(group: BaseExceptionGroup[BaseException]) -> bool:
    """Return whether one of the exceptions in a group rotates the history."""
    return group.subgroup(Rotate) is not None


# --- how a history stores exceptions


Redact = Callable[[str], str]
"""Returns a text without anything that a history may not contain."""


def error_info(
    problem: BaseException, *, retryable: bool = False, causes: int = ERROR_CAUSES, redact: Redact | None = None
) -> ErrorInfo:
    """Return an exception as a history stores it: bounded, with its cause. The cause of a group is its first member.

    Texts are redacted before they are truncated: the remaining part of a secret value could no longer be found.
    """
    clean = redact or str
    if isinstance(problem, BaseExceptionGroup):
        inner = problem.__cause__ or problem.exceptions[0]
    else:
        inner = problem.__cause__ or (None if problem.__suppress_context__ else problem.__context__)
    cause = _attribute(problem, "info")
    if isinstance(cause, ErrorInfo):
        cause = cause if redact is None else _redacted(cause, redact)
    else:
        cause = error_info(inner, causes=causes - 1, redact=redact) if inner is not None and causes > 0 else None
    code = None if isinstance(problem, SystemExit) else _attribute(problem, "code")  # its code is an exit status
    return ErrorInfo(
        code=clean(_plain_text(code) if isinstance(code, str) and code else type(problem).__name__)[:ERROR_TEXT_CHARS],
        message=clean(_message(problem))[:ERROR_TEXT_CHARS],
        retryable=retryable,
        traceback=clean(_traceback(problem))[-ERROR_TEXT_CHARS:],
        cause=cause,
    )


def attempt_error(problem: BaseException, *, retryable: bool, redact: Redact | None) -> ErrorInfo:
    """Return the error of an activity's attempt, with what a retry policy and a workflow that catches it need."""
    error = error_info(problem, retryable=retryable, redact=redact)
    bases, after_ms = _bases(problem), _retry_after_ms(problem)
    return replace(error, bases=bases, retry_after_ms=after_ms) if bases or after_ms is not None else error


_SAYS_NOTHING = frozenset({"object", "BaseException", "Exception"})
_MOST_BASES = 8


def _bases(problem: BaseException) -> tuple[str, ...]:
    """Return the names of an exception's base classes, without those that every exception has."""
    names = [each.__name__[:ERROR_TEXT_CHARS] for each in type(problem).__mro__[1:]]
    return tuple(name for name in names if name not in _SAYS_NOTHING)[:_MOST_BASES]


def _retry_after_ms(problem: BaseException) -> int | None:
    """Return the delay that an exception requests before the next attempt: seconds, also as text, or a timedelta."""
    asked = _attribute(problem, "retry_after")
    if isinstance(asked, timedelta):
        asked = asked.total_seconds()
    elif isinstance(asked, str) and asked.isascii() and asked.strip().isdigit():  # of an HTTP header
        asked = int(asked[:20])
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not 0 <= asked <= DURATION_MS / 1_000:
        return None
    return round(asked * 1_000)


def _redacted(error: ErrorInfo, redact: Redact) -> ErrorInfo:
    """Return a previously recorded error, with its causes, redacted."""
    return replace(
        error,
        code=redact(error.code),
        message=redact(error.message),
        traceback=redact(error.traceback),
        cause=None if error.cause is None else _redacted(error.cause, redact),
    )


def error_bytes(error: ErrorInfo | None) -> int:
    """Return the approximate size in bytes of an error in a history."""
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
    except Exception:  # an exception that cannot even be shown must not keep its run from being recorded
        return f"a {type(problem).__name__} that cannot be shown"


def _traceback(problem: BaseException) -> str:
    try:
        if isinstance(problem, UnhandledError):  # only the author's frames: the cause has all of them
            frames = [] if problem.__cause__ is None else authors_frames(problem.__cause__)
            return _plain_text("".join(traceback.format_list(frames)))
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


# --- handlers of signals and updates


class Handler(Struct, frozen=True):
    """A plain function that is applied to the payload of a signal, decoded as `kind`."""

    function: Callable[[Any], Any]
    kind: Any
    values: Values = PLAIN

    @property
    def result_type(self) -> Any:
        """The annotated type of the function's result."""
        try:
            return get_type_hints(self.function, include_extras=True).get("return", Any)
        except (NameError, TypeError):  # an annotation that cannot be resolved, or something without annotations
            return Any

    def apply(self, payload: Raw, watch: Watch) -> "Received":
        """Call the function, and return what to record."""
        try:
            given = self.values.decode(payload, self.kind)
            return Received(watch.run(lambda: self.values.encode(self.function(given))))
        except RunError:  # it blocks its node, or cannot be replayed: the run is paused, and nothing is consumed
            raise
        except (Exception, asyncio.CancelledError) as problem:
            return Received(error=error_info(problem))


class UpdateHandler:
    """A function that answers updates of one name, and its validator, which may refuse one before it is accepted."""

    __slots__ = ("_signature", "_values", "function", "name", "validator")

    def __init__(
        self, name: str, function: Callable[..., Any], validator: Callable[..., Any] | None, values: Values = PLAIN
    ) -> None:
        self.name = name
        self.function = function
        self.validator = validator
        self._values = values
        self._signature: Signature | None = None

    def unpack(self, input: Raw) -> dict[str, Any]:
        """Return the arguments as the types of the function's parameters."""
        if self._signature is None:
            self._signature = Signature(self.function, f"update {self.name!r}", values=self._values)
        return self._signature.unpack(input)

    def refusal_of(self, input: Raw, watch: Watch) -> ErrorInfo | None:
        """Return why an update with this input is not accepted, or None. Called once, never at replay."""
        try:
            return Handler(self._validate, Raw).apply(input, watch).error
        except RunError as problem:  # it blocks its node, or is not durable: only this update is refused
            return error_info(problem)

    def _validate(self, input: Raw) -> None:
        arguments = self.unpack(input)
        if self.validator is not None:
            self.validator(**arguments)


class Received(Struct, frozen=True):
    """The result of a handler."""

    state_after: Raw | UnsetType = UNSET
    error: ErrorInfo | None = None


def recorded(event: Event, body: e.SignalReceived, handler: Handler | None) -> Raw | Exception:
    """Return or raise the recorded result of the wait; the handler is not called."""
    has_effect = body.state_after is not UNSET or body.error is not None
    if has_effect is (handler is None):
        was, found = ("with", "without") if has_effect else ("without", "with")
        raise NondeterminismError(
            f"event {event.run_seq}: signal {body.name!r} was received {was} a handler; the code waits {found} one",
            run_seq=event.run_seq,
            expected=f"SignalReceived {was} a handler",
            found=f"WaitSignal {found} a handler",
        )
    if body.error is not None:
        return _error(event, body.error)
    return body.payload if body.state_after is UNSET else body.state_after


def _error(event: Event, error: ErrorInfo) -> Exception:
    if error.code == InvalidInput.code:
        return InvalidInput(error.message)
    return SignalHandlerFailed(f"the handler of {event.step_id}: {error}", error)
