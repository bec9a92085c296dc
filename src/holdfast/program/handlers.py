"""Handlers of signals and updates: each is called once, its result is recorded, and replay reads the record."""

import asyncio
from collections.abc import Callable
from typing import Any, get_type_hints

from msgspec import UNSET, Raw, Struct, UnsetType

from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.events import ErrorInfo, Event
from holdfast.errors import InvalidInput, NondeterminismError, RunError, SignalHandlerFailed
from holdfast.program.definitions import Signature
from holdfast.program.outcomes import error_info
from holdfast.program.watchdog import Watch


class Handler(Struct, frozen=True):
    """A plain function that is applied to the payload of a signal, decoded as `kind`."""

    function: Callable[[Any], Any]
    kind: Any

    @property
    def result_type(self) -> Any:
        """The annotated type of the function's result."""
        try:
            return get_type_hints(self.function).get("return", Any)
        except (NameError, TypeError):  # an annotation that cannot be resolved, or something without annotations
            return Any

    def apply(self, payload: Raw, watch: Watch) -> "Received":
        """Call the function, and return what to record."""
        try:
            given = codec.decode(payload, self.kind)
            return Received(watch.run(lambda: codec.encode(self.function(given))))
        except RunError:  # it blocks its node, or cannot be replayed: the run is paused, and nothing is consumed
            raise
        except (Exception, asyncio.CancelledError) as problem:
            return Received(error=error_info(problem))


class UpdateHandler:
    """A function that answers updates of one name, and its validator, which may refuse one before it is accepted."""

    __slots__ = ("_signature", "function", "validator")

    def __init__(self, function: Callable[..., Any], validator: Callable[..., Any] | None) -> None:
        self.function = function
        self.validator = validator
        self._signature: Signature | None = None

    def unpack(self, input: Raw) -> dict[str, Any]:
        """Return the arguments as the types of the function's parameters."""
        if self._signature is None:
            self._signature = Signature(self.function)
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
    """Return what the wait returns or raises, from the history; the handler is not called."""
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
    return SignalHandlerFailed(f"the handler of {event.step_id}: {error.code}: {error.message}", error)
