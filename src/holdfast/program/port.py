"""The interface between the engine and a program, whichever kind of definition it has."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec
from msgspec import Raw

from holdfast.core.commands import Command, RunActivity, StartChild
from holdfast.core.events import ErrorInfo, Event
from holdfast.errors import RunError
from holdfast.program.outcomes import Received


class EndDeferred(Exception):
    """The workflow's function has ended too early: updates are still being answered, and their effect would be lost.

    A coroutine cannot go back, so this program can no longer be used. The engine rebuilds it from the history, and
    defers the callback in which the function ended until the updates are answered.
    """

    def __init__(self, seed: str, callback: int, returns: bool) -> None:
        super().__init__(f"the end of {seed} waits for updates")
        self.seed = seed
        self.callback = callback
        self.returns = returns


class WithForms(Protocol):
    """The part of a definition that the engine needs from a program."""

    forms: dict[str, "msgspec.json.Decoder[Any]"]
    """The decoders of task answers, by their forms."""


@runtime_checkable
class WritesStreams(Protocol):
    """A program whose code writes to streams."""

    stream_writes: list[tuple[str, bytes, bool]] | None


class Program(Protocol):
    """The program of a run, at some point of its history."""

    is_replaying: bool
    """Whether it gets outcomes from a history, with more to come."""

    accepts_end: bool
    """Whether the replayed history ends with a result or a failure: the program then ends as it did before."""

    problem: RunError | None
    """Why the program cannot continue: its code did not handle an exception. A cancellation lets it continue."""

    known_markers: Mapping[str, Raw]
    """The markers in the replayed history, with their values, by step: a patch, a rotation, a choice.

    Steps with an idempotency key are among them, with null: the function of the key is not called again. So are
    children, with the ids of their runs.
    """

    seed: str
    """The run id and the number of rotations: differs for each part of a run between rotations."""

    def defer(self, deferred: Mapping[int, bool]) -> None:
        """Defer these callbacks, with whether each returned, and those in the history, until updates are answered."""
        ...

    @property
    def takes_updates(self) -> bool:
        """Whether an update would be answered before the next rotation or end, and its effect kept."""
        ...

    @property
    def takes_signals(self) -> bool:
        """Whether the effect of a signal received now would be kept."""
        ...

    lost_waits: frozenset[str]
    """The waits that were open when the code began to rotate: the effect of a signal to them would be lost."""

    @property
    def definition(self) -> WithForms:
        """The workflow. It keeps the types of the forms of its tasks."""
        ...

    def handle(self, event: Event) -> list[Command]:
        """Take an outcome, run until nothing is ready, and return the commands that were issued.

        The first event is RunStarted or ContinuedAsNew. A program that carries steps over a rotation finds them on the
        latter (`core.state.carried_steps`). If the run was being cancelled before, RunCancelRequested follows again.
        """
        ...

    def arranged(self, outcomes: list[Event]) -> list[Event]:
        """Return outcomes that were recorded during a pause in the order in which the program takes them."""
        ...

    @property
    def stream_writes(self) -> list[tuple[str, bytes, bool]] | None:
        """What the code has written to streams since the last turn; None if nothing."""
        ...

    handlers: dict[str, Any]
    """The handlers of waits, by their steps."""

    kinds: dict[str, Any]
    """The payload types of waits whose signals are checked before they are consumed, by step."""

    def misfit_of(self, step_id: str, payload: Raw) -> str | None:
        """Return why a wait does not accept this payload, or None. Called before it is recorded; never at replay."""
        ...

    def receive(self, step_id: str, payload: Raw) -> Received | None:
        """Apply the handler of a wait to a signal, and return its result; None if the wait has no handler."""
        ...

    def refusal_of(self, name: str, input: Raw) -> ErrorInfo | None:
        """Return why an update is not accepted, or None. Called once, before it is recorded; never at replay."""
        ...

    def query(self, name: str, arguments: Raw) -> Raw:
        """Answer a query, without changing anything."""
        ...

    def has_recorded_input(self, command: RunActivity | StartChild, recorded: Raw) -> bool:
        """Return whether a step has the recorded input, regardless of its JSON formatting; at replay only."""
        ...

    def where(self, command: Command | None, event: Event | None = None) -> str:
        """Return the line of source that issued the command, or where the program waits, for an error message.

        The event is what the history has instead.
        """
        ...

    def close(self) -> None:
        """Close the program, without running it any further."""
        ...
