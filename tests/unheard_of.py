"""Nodes that take every run for one that nobody else can have asked for."""

import functools
from typing import Any

from holdfast.engine.node import Node


def take_first_turns(node: Node) -> None:
    """Let a node take the first turns of all runs before they are there, as it does where it has made the id itself."""
    creations: Any = node.creations
    creations.create = functools.partial(creations.create, is_unheard_of=True)
