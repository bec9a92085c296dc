"""Callbacks: a workflow gives another system an address for its answer before it sends the request.

A callback is a separate step from the activity that submits the request, so retries of that activity use the same
token. The step is an activity that returns immediately without an outcome; its outcome is reported like that of any
activity that is completed later. The token is a secret and is never in a history: the workflow has a `CallbackRef`,
from which an activity derives the token. Heartbeats are internal signals to a wait next to the step.
"""

import asyncio
from collections.abc import Generator
from datetime import timedelta
from typing import Any, Generic, TypeVar, overload

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core import commands as c
from holdfast.core.instants import Instant
from holdfast.core.keys import CALLBACK, RESERVED_PREFIX
from holdfast.errors import ActivityFailed, InvalidInput
from holdfast.program.coroutine import CoroutineProgram, require_program
from holdfast.program.definitions import WAITING_FOR_A_CALLBACK, encode_options, milliseconds
from holdfast.program.signals import wait_for_own

T = TypeVar("T")


class CallbackRef(Struct, frozen=True):
    """Identifies a callback of the run. It is not secret and may be in histories. See `ActivityContext.callback_token`.

    It does not name the run: a fork has the recorded calls of its original, but its own callback and token.
    """

    step_id: str
    """The step that waits for the callback."""
    opened_at: Instant
    """When the step was opened."""


class CallbackTerms(Struct, frozen=True, omit_defaults=True):
    """The requirements for an answer, as they are recorded with the step."""

    schema: dict[str, Any] | None = None
    heartbeat_ms: int | None = None


def heartbeat_signal(step_id: str) -> str:
    """Return the name of the signals that carry the heartbeats of a callback."""
    return f"{RESERVED_PREFIX}heartbeat:{step_id}"


class Callback(Generic[T]):
    """An outcome that is reported later. Pass `ref` to the activity that requests it, and await this object."""

    def __init__(self, ref: CallbackRef, answer: "asyncio.Future[T]") -> None:
        self.ref = ref
        self._answer = answer

    def __await__(self) -> Generator[Any, None, T]:
        return self._answer.__await__()

    def cancel(self) -> None:
        """Stop waiting for it. Its token is then no longer accepted."""
        self._answer.cancel()


@overload
def callback(
    kind: type[T],
    *,
    name: str = "callback",
    timeout: timedelta | float | None = None,
    heartbeat_timeout: timedelta | float | None = None,
) -> Callback[T]: ...
@overload
def callback(
    kind: Any = None,
    *,
    name: str = "callback",
    timeout: timedelta | float | None = None,
    heartbeat_timeout: timedelta | float | None = None,
) -> Callback[Any]: ...


def callback(
    kind: Any = None,
    *,
    name: str = "callback",
    timeout: timedelta | float | None = None,
    heartbeat_timeout: timedelta | float | None = None,
) -> Callback[Any]:
    """Open a callback in a workflow: `answer = hf.callback(Receipt)`, `await submit(answer.ref)`, `await answer`.

    The holder of its token reports one outcome: a result of this `kind`, or a failure, which raises `ActivityFailed`.
    It raises `TimeoutError` when `timeout` has passed since it was opened, or `heartbeat_timeout` since the last
    heartbeat.
    """
    program = require_program("callback")
    values = program.definition.values
    kind = Any if kind is None else kind
    values.decoder(kind, "a callback")  # raises before anything is opened
    schema = None if kind is Any else values.schema(kind)
    heartbeat_ms = None if heartbeat_timeout is None else milliseconds(heartbeat_timeout)
    step_id = program.name_step(name)
    options = replace(WAITING_FOR_A_CALLBACK, schedule_to_close_ms=None if timeout is None else milliseconds(timeout))
    terms = codec.encode({"terms": CallbackTerms(schema, heartbeat_ms)})
    command = c.RunActivity(
        step_id=step_id,
        name=CALLBACK,
        input=program.bounded(terms, f"the type of callback {name!r}"),
        options=encode_options(options),
    )
    ref = CallbackRef(step_id, program.now())
    return Callback(ref, asyncio.ensure_future(_answer(program, command, kind, heartbeat_ms)))


async def _answer(program: CoroutineProgram, command: c.RunActivity, kind: Any, heartbeat_ms: int | None) -> Any:
    try:
        result = await _watched(program, command, heartbeat_ms)
    except ActivityFailed as problem:
        if problem.info.code == "TimeoutError":
            raise TimeoutError(f"callback {command.step_id!r}: no answer came in time") from None
        raise
    if result is None:
        raise InvalidInput(f"callback {command.step_id!r}: an operator has skipped it")
    return program.definition.values.decode(result, kind)


async def _watched(program: CoroutineProgram, command: c.RunActivity, heartbeat_ms: int | None) -> Any:
    if heartbeat_ms is None:
        return await program.step(command)
    answer = asyncio.ensure_future(program.step(command))
    try:
        while not answer.done():
            signal = heartbeat_signal(command.step_id)
            beat = asyncio.ensure_future(wait_for_own(program, signal, heartbeat_ms / 1_000))
            await asyncio.wait({answer, beat}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                beat.cancel()
                break
            try:
                await beat
            except TimeoutError:
                text = f"callback {command.step_id!r}: no heartbeat came for {heartbeat_ms / 1_000:g} s"
                raise TimeoutError(text) from None
        return await answer
    finally:
        if not answer.done():
            answer.cancel()
