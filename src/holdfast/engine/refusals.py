"""Turns that the store refuses, and would refuse again: what a node remembers of them, and how a run is left alone.

A run whose turn is refused is paused by its next turn, without what came in. If that is refused as well, nothing can
be recorded for the run: it is put aside, with a message to itself for which it is to be paused later, on any node. The
message comes back a bounded number of times, and is a dead letter then: an operator hears of it, and can requeue it.
"""

from msgspec.structs import replace

from holdfast.core.instants import Instant
from holdfast.core.messages import Message
from holdfast.engine.turns.draft import aside_turn
from holdfast.engine.turns.owned_run import OwnedRun
from holdfast.errors import HoldfastError, TurnRefused
from holdfast.limits import Limits
from holdfast.store.port import CommitConflict, LoadedRun, Turn

UNFIT = frozenset({"event exists", "task is open", "cannot be stored"})
"""Conflicts that are not about who came first: the same turn would be refused again, for ever."""

PAUSE_LATER = "refused"
"""The id of the message for which a run is to be paused."""


class Refusals:
    """The runs whose last turn was refused: each is to be paused by its next turn, if this node takes that one too."""

    def __init__(self) -> None:
        self._problems: dict[str, tuple[TurnRefused, int]] = {}

    def note(self, owned: OwnedRun, conflict: CommitConflict) -> bool:
        """Take note of a conflict, and say whether the run is to be paused by its next turn."""
        if conflict.reason not in UNFIT:
            owned.refused = None  # it only came too late
        elif owned.refused is None:
            problem, head = (
                TurnRefused(f"the run's turn was refused by the store: {conflict.reason}"),
                owned.loaded.head,
            )
            self._problems[head.run_id] = problem, head.lease_epoch + 2  # its release, and its claim by this node
            return True
        return False

    def take(self, loaded: LoadedRun) -> TurnRefused | None:
        """Return why the run's turn is to be a pause. What was noted before others had the run says nothing."""
        if not self._problems and not loaded.messages:
            return None
        head = loaded.head
        problem, last_epoch = self._problems.pop(head.run_id, (None, 0))
        if problem is not None and head.lease_epoch <= last_epoch:
            return problem
        if any(message.signal_id == PAUSE_LATER for message in loaded.messages):
            return TurnRefused("a turn of the run was refused by the store, and so was the pause that followed")
        return None


def left_turn(loaded: LoadedRun, now: Instant, node: str, problem: HoldfastError, limits: Limits) -> Turn:
    """Return a turn that records nothing and leaves a run for later, with all that it was told."""
    if not isinstance(problem, TurnRefused):
        return aside_turn(loaded, now, node, problem, limits)
    if all(message.signal_id != PAUSE_LATER for message in loaded.messages):
        run_id = loaded.head.run_id
        later = Message(
            signal_id=PAUSE_LATER, run_id=run_id, type="InternalContinue", occurred_at=now, expected_version=1
        )
        loaded = replace(loaded, messages=(*loaded.messages, later))
    return aside_turn(loaded, now, node, problem, limits, "retries exhausted")
