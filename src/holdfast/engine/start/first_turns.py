"""A special path: first turns that are taken before their runs are created. `FirstTurns.take` is its only entry.

It saves one commit of each run that begins with an activity. Without it a run of three steps takes 15 % more
instructions on SQLite (2.87 million instead of 2.49 million); `python -m bench --only paths` measures it again.

The turn is written by the same commit as the run itself: a run that begins with an activity is created with the attempt
under way. Nothing is lost if it is not created, because a program has no effect until its turn is durable. A turn that
a creation cannot carry whole (it ends the run, releases it, or is about other runs and nodes) is kept, and committed
right after the run was created without it.
"""

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.core.state import RUNNING
from holdfast.engine.activities.dispatch import Dispatcher
from holdfast.engine.turns.draft import TurnDraft
from holdfast.engine.turns.execute import Drafted, RunCache, take_turn
from holdfast.limits import Limits
from holdfast.store.port import LoadedRun, NewRun
from holdfast.store.types import created_run


class First(Struct, frozen=True):
    """A run as it is to be created, and what its node knows of it then."""

    new: NewRun
    loaded: LoadedRun
    drafted: Drafted
    is_at_work: bool
    """Whether it is created with its first turn."""


class FirstTurns:
    """Takes the first turns of runs that are about to be created for a node."""

    def __init__(self, node: str, run_cache: RunCache, dispatcher: Dispatcher, limits: Limits) -> None:
        self._node = node
        self._dispatcher = dispatcher
        self._run_cache = run_cache
        self._limits = limits

    def take(self, new: NewRun, now: Instant) -> First | None:
        """Return the run with its first turn, or None if it has to exist before."""
        if new.admission is not None or new.signals:
            return None
        loaded = created_run(new, self._node, now)
        cached = self._run_cache.beginning(new)
        draft, problem = take_turn(cached, loaded, (), now, self._node, self._limits)
        if draft.dispatch:
            self._dispatcher.leave_unknown(draft)
        begun = _begun(new, draft) if problem is None and draft.dispatch else None
        return First(begun or new, loaded, Drafted(cached, draft, problem), begun is not None)


def _begun(new: NewRun, draft: TurnDraft) -> NewRun | None:
    """Return the run as it is after the turn, or None if a creation cannot carry all that the turn writes."""
    turn = draft.finish()
    others = turn.jobs or turn.jobs_closed or turn.starts or turn.sends or turn.records or turn.dead or turn.received
    if others or turn.snapshot.status is not RUNNING:
        return None
    return replace(
        new,
        snapshot=turn.snapshot,
        events=new.events + turn.events,
        messages=turn.messages,
        waits_opened=turn.waits_opened,
        tasks=turn.tasks,
    )
