"""Nodes that take every run for one that nobody else can have asked for."""

from typing import Any

from holdfast.core.instants import Instant
from holdfast.engine.node import Node
from holdfast.store.port import NewRun


def take_first_turns_early(node: Node) -> None:
    """Let a node take the first turns of all runs before they are there, as it does where it has made the id itself."""
    starter: Any = node.starter
    create = starter.create

    def create_unheard_of(new: NewRun, now: Instant, *, is_unheard_of: bool = False) -> Any:
        return create(new, now, is_unheard_of=True)

    starter.create = create_unheard_of
