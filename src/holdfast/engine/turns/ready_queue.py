"""The runs of a node that have something to do, in batches.

The turns of a batch share one commit. A batch is bounded: what its turns touch stays in the processor's cache from the
first access to the commit, and no run waits for the turns of thousands of others. Runs that are under way go before
those that have not begun, so a node finishes what it has started, however much more is started meanwhile.
"""

from collections import OrderedDict
from collections.abc import Iterable

BATCH = 500
"""How many turns share a commit at most. Fewer cost more commits, and more cost cache misses; both were measured."""

PATIENCE = 20
"""After so many full batches the node claims more runs, although it has enough to do."""


class ReadyQueue:
    """Which runs are to take a turn."""

    __slots__ = ("_begun", "_full_batches", "_new")

    def __init__(self) -> None:
        self._begun: OrderedDict[str, None] = OrderedDict()
        self._new: OrderedDict[str, None] = OrderedDict()
        self._full_batches = 0

    def __len__(self) -> int:
        return len(self._begun) + len(self._new)

    def add(self, run_id: str, *, is_new: bool = False) -> None:
        """Let a run take a turn; if it has not begun, after those that have."""
        (self._new if is_new else self._begun)[run_id] = None

    def add_again(self, run_ids: Iterable[str]) -> None:
        """Let runs take the turn that came to nothing."""
        self._begun.update(dict.fromkeys(run_ids))

    def add_first(self, run_id: str) -> None:
        """Let a run take its turn with the next batch, however many there are."""
        self._begun[run_id] = None
        self._begun.move_to_end(run_id, last=False)

    @property
    def is_full(self) -> bool:
        """Whether there is a whole batch."""
        return len(self) >= BATCH

    @property
    def wants_more(self) -> bool:
        """Whether to claim more runs: the batch has room, or the node has not claimed for long."""
        return not self.is_full or self._full_batches >= PATIENCE

    def take(self) -> list[str]:
        """Return the runs of the next batch."""
        self._full_batches = self._full_batches + 1 if self.is_full else 0
        batch: dict[str, None] = {}
        for runs in (self._begun, self._new):
            if len(batch) + len(runs) <= BATCH:
                batch |= runs
                runs.clear()
            while runs and len(batch) < BATCH:
                batch[runs.popitem(last=False)[0]] = None
        return list(batch)
