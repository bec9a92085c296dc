"""Signals from the view of a workflow: waiting for one or for many, and sending them to other runs."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, Literal, Self, TypeVar, get_args, overload

from msgspec import Raw

from holdfast.core import commands as c
from holdfast.core.instants import Instant
from holdfast.core.keys import RESERVED_PREFIX, check_signal_name, sent_signal_id
from holdfast.core.messages import AcceptedSignalResult, SignalRequest, check_signal
from holdfast.errors import CallerError, InvalidInput
from holdfast.program.coroutine import CoroutineProgram, require_program
from holdfast.program.definitions import milliseconds
from holdfast.program.outcomes import Handler

T = TypeVar("T")
OnMisfit = Literal["dead-letter", "raise"]
"""What happens to a signal whose payload is not of the expected type."""

_ON_MISFIT = get_args(OnMisfit)


@overload
async def wait_signal(
    name: str, kind: type[T], *, timeout: timedelta | float | None = None, on_misfit: OnMisfit = "dead-letter"
) -> T: ...
@overload
async def wait_signal(
    name: str,
    kind: Any = None,
    *,
    timeout: timedelta | float | None = None,
    on_timeout: Callable[[], Any] | None = None,
    condition: Callable[[], bool] | None = None,
    handler: Callable[[Any], Any] | None = None,
    on_misfit: OnMisfit = "dead-letter",
) -> Any: ...


async def wait_signal(
    name: str,
    kind: Any = None,
    *,
    timeout: timedelta | float | None = None,
    on_timeout: Callable[[], Any | Awaitable[Any]] | None = None,
    condition: Callable[[], bool] | None = None,
    handler: Callable[[Any], Any] | None = None,
    on_misfit: OnMisfit = "dead-letter",
) -> Any:
    """Wait for a signal and return its payload. An earlier one is returned immediately. `TimeoutError` if none arrives.

    - `timeout=0`: only check the mailbox.
    - `on_timeout`: a function that is called instead of raising; its result is returned.
    - `condition`: evaluated once, at the start of the wait. If it is false, the call returns None without waiting.
    - `handler`: applied to the payload exactly once. Its result is recorded and returned; its exception is raised as
      `SignalHandlerFailed`.
    - `on_misfit`: a signal whose payload does not fit `kind` becomes a dead letter, and the wait continues. With
      `on_misfit="raise"` it is consumed, and `InvalidInput` is raised.

    If an operator skips the wait, it returns None, or the result of `on_timeout`.
    """
    program = require_program("wait_signal")
    check_on_misfit(on_misfit)
    check_signal_name(name)
    kind = _kind(program, name, kind)
    _check_plain("condition", condition)
    _check_plain("handler", handler)
    given: Any = on_timeout
    if given is not None and not callable(given):  # raised here, not later when the time has passed
        raise InvalidInput(f"wait_signal: on_timeout is a function, not {given!r}", field="on_timeout")
    if on_timeout is not None and timeout is None:
        raise InvalidInput("wait_signal: on_timeout has no effect without a timeout", field="on_timeout")
    until = _until(program, timeout)
    step_id = program.name_step(name)
    if condition is not None and not _is_taken(program, step_id, condition):
        return None
    try:
        return await _wait(program, step_id, name, kind, until, handler, on_misfit)
    except _Skipped:
        if on_timeout is None:
            program.skipped += (step_id,)
            return None
    except TimeoutError:
        if on_timeout is None:
            raise
    late = on_timeout()
    return await late if inspect.isawaitable(late) else late


@overload
def signals(
    name: str, kind: type[T], *, timeout: timedelta | float | None = None, on_misfit: OnMisfit = "dead-letter"
) -> "Signals[T]": ...
@overload
def signals(
    name: str, kind: Any = None, *, timeout: timedelta | float | None = None, on_misfit: OnMisfit = "dead-letter"
) -> "Signals[Any]": ...


def signals(
    name: str, kind: Any = None, *, timeout: timedelta | float | None = None, on_misfit: OnMisfit = "dead-letter"
) -> "Signals[Any]":
    """Iterate over signals of a name in the order of acceptance: `async for vote in hf.signals("vote", Vote)`.

    With a `timeout`, the iteration ends that long after it was created, once it has returned every signal that was
    accepted in time. It also ends when an operator skips the current wait. Otherwise it never ends.
    """
    program = require_program("signals")
    check_signal_name(name)
    check_on_misfit(on_misfit)
    return Signals(program, name, _kind(program, name, kind), _until(program, timeout), on_misfit)


class Signals(AsyncIterator[T], Generic[T]):
    """Signals of one name, one after the other. Between two of them no step is open, and no signal is lost."""

    def __init__(
        self,
        program: CoroutineProgram,
        name: str,
        kind: Any,
        until: Instant | None,
        on_misfit: OnMisfit = "dead-letter",
    ) -> None:
        self._program = program
        self._name = name
        self._kind = kind
        self._until = until
        self._on_misfit = on_misfit

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        step_id = self._program.name_step(self._name)
        try:
            value: T = await _wait(self._program, step_id, self._name, self._kind, self._until, None, self._on_misfit)
        except (TimeoutError, _Skipped):
            raise StopAsyncIteration from None
        return value


def send_signal(
    program: CoroutineProgram, run_id: str, name: str, payload: Any, signal_id: str | None, addressed_to: str | None
) -> AcceptedSignalResult:
    """Send a signal from inside a workflow: it is recorded with the turn, and delivered once.

    In the result `accepted` is False: the signal is not delivered yet, and the run may refuse it.
    """
    check_signal_name(name)
    step_id = program.name_step(f"send:{name}")
    signal_id = sent_signal_id(program.run_id, step_id, program.definition.version) if signal_id is None else signal_id
    request = SignalRequest(
        run_id=run_id,
        name=name,
        payload=program.definition.values.encode(payload),
        signal_id=signal_id,
        step_id=addressed_to,
    )
    problem: CallerError | None = check_signal(request, program.limits)
    if problem is not None:
        raise problem
    program.loop.check_open()
    program.note(
        c.SendSignal(
            step_id=step_id,
            run_id=run_id,
            name=name,
            payload=request.payload,
            signal_id=signal_id,
            addressed_to=addressed_to,
        )
    )
    return AcceptedSignalResult(
        workflow_id=run_id,
        signal_name=name,
        signal_id=signal_id,
        accepted_at=program.now(),
        signal_storage_key="",
        accepted=False,
    )


def granted(workflow: str) -> str:
    """Return the signal by which a run of this workflow (a lock's) notifies its parent that it was admitted.

    Nothing else can send it: the engine's own signals stay within a family.
    """
    return RESERVED_PREFIX + workflow


def send_granted(program: CoroutineProgram, parent_run_id: str, granted_to: str) -> None:
    """Notify a parent, from inside its child, that the child was admitted: exactly the wait of this step gets it."""
    step_id = program.name_step("granted")
    signal_id = sent_signal_id(program.run_id, step_id, program.definition.version)
    program.loop.check_open()
    program.note(
        c.SendSignal(
            step_id=step_id,
            run_id=parent_run_id,
            name=granted(program.definition.name),
            payload=program.definition.values.encode(None),
            signal_id=signal_id,
            addressed_to=granted_to,
        )
    )


async def wait_for_own(program: CoroutineProgram, name: str, timeout: float) -> None:
    """Wait for a signal of the engine. Raise `TimeoutError` after this many seconds; if skipped, continue."""
    with suppress(_Skipped):
        await _wait(program, program.name_step(name), name, Any, _until(program, timeout), None, "dead-letter")


async def wait_granted(
    program: CoroutineProgram, step_id: str, workflow: str, timeout: timedelta | float | None
) -> bool:
    """Wait until a child was admitted; False if an operator skips the wait. Raise `TimeoutError` after `timeout`."""
    try:
        await _wait(program, step_id, granted(workflow), Any, _until(program, timeout), None, "dead-letter")
    except _Skipped:
        return False
    return True


async def _wait(
    program: CoroutineProgram,
    step_id: str,
    name: str,
    kind: Any,
    until: Instant | None,
    function: Callable[[Any], Any] | None,
    on_misfit: OnMisfit,
) -> Any:
    command = c.WaitSignal(step_id=step_id, name=name, until=until)
    values = program.definition.values
    handler = None if function is None else Handler(function, kind, values)
    result_type = kind
    if handler is not None:
        result_type = handler.result_type
        values.decoder(result_type, f"the result of the handler of signal {name!r}")  # raises before the wait
        program.handlers[step_id] = handler
    if kind is not Any and on_misfit == "dead-letter":
        program.kinds[step_id] = kind
    try:
        payload: Raw | None = await program.step(command)
    finally:
        program.handlers.pop(step_id, None)
        program.kinds.pop(step_id, None)
    if payload is None:
        raise _Skipped
    return values.decode(payload, result_type)


class _Skipped(Exception):
    """An operator has skipped the wait."""


def check_on_misfit(on_misfit: Any) -> None:
    """Raise `InvalidInput` if there is no such policy."""
    if on_misfit not in _ON_MISFIT:
        raise InvalidInput(f"on_misfit is one of {', '.join(_ON_MISFIT)}, not {on_misfit!r}", field="on_misfit")


def _until(program: CoroutineProgram, timeout: timedelta | float | None) -> Instant | None:
    if timeout is None:
        return None
    is_look = timeout in (0, timedelta(0)) and not isinstance(timeout, bool)
    limit_ms = 1 if is_look else milliseconds(timeout) or 0  # what is in the mailbox was accepted before
    return program.now() + limit_ms * 1_000


def _kind(program: CoroutineProgram, name: str, kind: Any) -> Any:
    """Return the type to read payloads as: the one that the workflow declares for the name, if any."""
    declared = program.definition.signals.get(name)
    if declared is None:
        if kind is None:
            return Any
        program.definition.values.decoder(kind, f"signal {name!r}")  # raises before the wait
        return kind
    if kind is not None and kind != declared:
        raise InvalidInput(f"signal {name!r} is declared as {declared!r}, and waited for as {kind!r}", field="kind")
    return declared


def _check_plain(what: str, function: Any) -> None:
    if function is not None and (not callable(function) or inspect.iscoroutinefunction(function)):
        found = "an async one" if callable(function) else repr(function)
        raise InvalidInput(f"wait_signal: a {what} is a plain function, not {found}", field=what)


def _is_taken(program: CoroutineProgram, step_id: str, condition: Callable[[], bool]) -> bool:
    """Return the recorded choice, or make and record it. A condition that raises records nothing."""
    taken, skipped = f"{step_id}:taken", f"{step_id}:skipped"
    if program.is_replaying and (taken in program.known_markers or skipped in program.known_markers):
        is_taken = taken in program.known_markers
    else:
        is_taken = bool(condition())
    program.note(c.RecordMarker(step_id=taken if is_taken else skipped, name="condition"))
    return is_taken
