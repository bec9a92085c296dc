"""What the engine asks of a program, whichever way it was written."""

from typing import Protocol

from msgspec import Raw

from holdfast.core.commands import Command
from holdfast.core.events import Event


class Program(Protocol):
    """A run's program, at some point of its history."""

    is_replaying: bool
    """Whether the outcomes come from a history that goes on."""

    known_patches: frozenset[str]
    """The steps in which the history has recorded that a patch was taken."""

    def handle(self, event: Event) -> list[Command]:
        """Take an outcome, go as far as possible, and return what is asked for."""
        ...

    def query(self, name: str, arguments: Raw) -> Raw:
        """Answer a question about the present, without changing anything."""
        ...

    def where(self) -> str:
        """Say where in the source the program is waiting, for people."""
        ...

    def close(self) -> None:
        """Let go of everything, without running any further."""
        ...
