"""Judges whom the nodes blame for processes that ended: see `holdfast/engine/turns/poison.py`.

No store can distinguish a run that ends its process from one whose process is killed each time just while it is tried.
So what is judged is the evidence. A run is set aside only after as many tries as there have to be, all but the first of
them alone, none of them followed by a turn or taken back; and nothing else ends a process while it tries one run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core import events as e
from holdfast.engine.turns.poison import is_set_aside
from holdfast.limits import SUSPECT_LOSSES
from holdfast.store import port
from holdfast.testing.sim_loop import current_process

if TYPE_CHECKING:
    from tests.sim.world import World

LOST_TURNS = 6
"""How many processes a run may end. More than by default: here others end them all the time, also while it is tried."""


class Try(NamedTuple):
    """A try that is durable, of a run or of some together."""

    process: str
    is_alone: bool
    epoch: int
    """Of the lease under which it is made: who loses the lease, and is given another one, has not begun again."""


class Tries:
    """The tries of each run since its last turn."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._of: dict[str, list[Try]] = {}

    def note(self, turns: Sequence[port.Turn], heads: Sequence[port.RunHead]) -> None:
        """Take note of turns that were committed together, of runs that were like this before."""
        fresh = [(t, head) for t, head in zip(turns, heads, strict=True) if head.version == t.expected_version]
        begun = [t.run_id for t, head in fresh if not t.events and t.losses > max(head.losses, SUSPECT_LOSSES)]
        process = current_process()
        for turn, head in fresh:
            tries = self._of.setdefault(turn.run_id, [])
            if turn.run_id in begun:
                tries.append(Try(process.name if process else "", len(begun) == 1, turn.epoch))
                self._world.note(f"try    {turn.run_id} {turn.losses} of {len(begun)}", "tries")
                if len(begun) > 1 and turn.losses > SUSPECT_LOSSES + 1:
                    self._world.violate(f"{turn.run_id}: its try {len(tries)} is one of {begun}")
            elif turn.events or turn.losses < SUSPECT_LOSSES:
                if any(is_of_poison(event) for event in turn.events):
                    self._check_set_aside(turn.run_id, tries, head)
                tries.clear()
            elif turn.losses < head.losses:
                tries.pop()
                self._world.note(f"untry  {turn.run_id} {turn.losses}", "tries taken back")

    def _check_set_aside(self, run_id: str, tries: list[Try], head: port.RunHead) -> None:
        """A run is set aside for its tries, or stays so. One that ended none of its processes had bad luck."""
        self._world.note(f"set aside {run_id} {tries}", "set aside")
        if is_set_aside(head):
            return
        if len(tries) < LOST_TURNS - SUSPECT_LOSSES:
            self._world.violate(f"{run_id}: it is set aside after {tries}, and others have ended the processes")
        elif not self._world.ended_by[run_id]:
            self._world.note(f"bad luck {run_id}", "set aside by bad luck")

    def blame(self, run_id: str, process: str) -> None:
        """Note that a run ends its process: no other run is tried alone there."""
        for other, tries in self._of.items():
            if other != run_id and tries and tries[-1] == Try(process, True, self._held_at(other)):
                self._world.violate(f"{run_id} ends the process while {other} is tried, which is blamed for it")

    def _held_at(self, run_id: str) -> int:
        """Return the epoch at which a node has a run, or 0 if none has it."""
        head = self._world.store.head_of(run_id)
        return 0 if head.lease_owner is None else head.lease_epoch


def is_of_poison(event: e.Event) -> bool:
    """Return whether a run is set aside by this event."""
    return (
        isinstance(event.data, e.RunPaused) and event.data.error is not None and event.data.error.code == "PoisonTurn"
    )
