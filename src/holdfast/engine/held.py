"""Runs that belong to a node: as they were loaded, and what came in since."""

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.core.decide import Input
from holdfast.core.messages import ActivityDetached, ActivityErrored
from holdfast.engine.turn import TurnDraft
from holdfast.store.port import LoadedRun


class Held:
    """A run that belongs to this node. It is fresh until it has taken a turn as it was loaded."""

    __slots__ = ("inputs", "is_fresh", "loaded")

    def __init__(self, loaded: LoadedRun) -> None:
        self.loaded = loaded
        self.inputs: list[Input] = []
        self.is_fresh = True

    def advance(self, draft: TurnDraft) -> None:
        """Take note of a turn that was committed."""
        state, signals, details = draft.state, self.loaded.signals, self.loaded.details
        if draft.received:
            consumed = {inbox_seq for inbox_seq, _ in draft.received}
            signals = tuple(signal for signal in signals if signal.inbox_seq not in consumed)
        if details:
            details = {step_id: said for step_id, said in details.items() if step_id in state.open_steps}
        head = replace(self.loaded.head, version=state.version)
        self.loaded = LoadedRun(head=head, signals=signals, details=details)


def unsuccessful(batch: Sequence[Held]) -> list[tuple[str, str]]:
    """Return the steps whose attempts have ended without a result."""
    ended = [(held.loaded.head.run_id, given) for held in batch for given in held.inputs]
    return [(run_id, o.step_id) for run_id, o in ended if isinstance(o, ActivityErrored | ActivityDetached)]
