"""What the engine asks of a program, whichever way it was written."""

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Raw

from holdfast.core.commands import Command, RunActivity, StartChild
from holdfast.core.events import ErrorInfo, Event
from holdfast.program.definitions import WorkflowDefinition
from holdfast.program.handlers import Received


class EndDeferred(Exception):
    """The workflow's function has ended too early: updates are still being answered, and would miss its end.

    A coroutine cannot go back, so the program is of no use any more. Whoever has the history makes it again, with the
    callback in which the function asked for its end among those that wait until the updates are answered.
    """

    def __init__(self, seed: str, callback: int, returns: bool) -> None:
        super().__init__(f"the end of {seed} waits for updates")
        self.seed = seed
        self.callback = callback
        self.returns = returns


class Program(Protocol):
    """A run's program, at some point of its history."""

    is_replaying: bool
    """Whether the outcomes come from a history that goes on."""

    known_markers: frozenset[str]
    """The steps in which the history has recorded a choice: a patch that was taken, a cut."""

    seed: str
    """What tells this stretch of the run apart from the others."""

    def defer(self, deferred: Mapping[int, bool]) -> None:
        """Let these callbacks, and those that the history names, wait for updates; each with whether it returned."""
        ...

    @property
    def takes_updates(self) -> bool:
        """Whether an update would be answered by this stretch of the run, and its effect be kept."""
        ...

    @property
    def takes_signals(self) -> bool:
        """Whether the effect of a signal that is received now would be kept."""
        ...

    deaf: frozenset[str]
    """The waits that were open when the code asked to begin again: the effect of a signal to them would be lost."""

    definition: WorkflowDefinition
    """What the program is a run of. It knows the types of the forms that were asked for."""

    def handle(self, event: Event) -> list[Command]:
        """Take an outcome, go as far as possible, and return what is asked for."""
        ...

    handlers: dict[str, Any]
    """The waits whose signal is given to a handler, by their step."""

    kinds: dict[str, Any]
    """The types of the waits whose signals are checked before they are taken, by their step."""

    def misfit_of(self, step_id: str, payload: Raw) -> str | None:
        """Return why a wait does not take this payload, or None. Asked once, before it is recorded; never at replay."""
        ...

    def receive(self, step_id: str, payload: Raw) -> Received | None:
        """Let the handler of a wait make something of a signal; None if the wait has none."""
        ...

    def refusal_of(self, name: str, input: Raw) -> ErrorInfo | None:
        """Return why an update is not accepted, or None. Asked once, before it is recorded; never at replay."""
        ...

    def query(self, name: str, arguments: Raw) -> Raw:
        """Answer a question about the present, without changing anything."""
        ...

    def is_given(self, command: RunActivity | StartChild, recorded: Raw) -> bool:
        """Return whether a step is given the input that was recorded of it, however it is written; at replay only."""
        ...

    def where(self, command: Command | None) -> str:
        """Say where in the source the command was issued, for people; or where the program is waiting."""
        ...

    def close(self) -> None:
        """Let go of everything, without running any further."""
        ...
