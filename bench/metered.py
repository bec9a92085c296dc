"""A store that notes what a node asks of it: how often, when, and which writes shared a transaction."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from msgspec import Struct

from holdfast.core.messages import Message
from holdfast.store.port import (
    CommitConflict,
    Committed,
    Created,
    Existing,
    LoadedRun,
    NewRun,
    Plan,
    Refused,
    Store,
    Turn,
)
from holdfast.store.proxy import StoreProxy

P = ParamSpec("P")
R = TypeVar("R")


class Write(Struct, frozen=True, gc=False):
    """How much a turn wrote, or the beginning of a run. Small: the collector walks through all that is kept."""

    run_id: str
    is_new: bool
    version: int
    events: int
    consumed: tuple[str, ...]
    messages: tuple[Message, ...]


VERBS = tuple(name for name, verb in vars(StoreProxy).items() if callable(verb) and not name.startswith("_"))


class MeteredStore(StoreProxy):
    """Counts the calls of every verb, and notes what is written."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.transactions: list[list[Write]] = []
        self.turn_s: list[float] = []
        self.committed = asyncio.Event()
        self._group: list[Write] = []
        self._claimed_at = 0.0
        for verb in VERBS:
            setattr(self, verb, self._counted(verb, getattr(self, verb)))

    def _counted(self, verb: str, call: Callable[P, R]) -> Callable[P, R]:
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            self.calls[verb] += 1
            return call(*args, **kwargs)

        return counted

    async def claim(self, node: str, limit: int, plans: Sequence[Plan] | None = None) -> list[LoadedRun]:
        """Note when runs were claimed."""
        claimed = await self._store.claim(node, limit, plans)
        if claimed:
            self._claimed_at = time.perf_counter()
        return claimed

    async def create(self, runs: Sequence[NewRun], claim_for: str | None = None) -> list[Created | Existing | Refused]:
        """Note what was created."""
        answers = await self._store.create(runs, claim_for)
        self._note([Write(run.run_id, True, 0, len(run.events), (), run.messages) for run in runs])
        return answers

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Note what was committed, and how long after its claim."""
        self.turn_s.append(time.perf_counter() - self._claimed_at)
        answers = await self._store.commit(turns)
        self._note(
            [
                Write(turn.run_id, False, turn.expected_version, len(turn.events), turn.consumed, turn.messages)
                for turn in turns
            ]
        )
        self.committed.set()
        return answers

    def _note(self, writes: Sequence[Write]) -> None:
        """Note writes. Those that are answered in the same round of the loop were made durable together."""
        if not self._group:
            asyncio.get_running_loop().call_soon(self._close)
        self._group.extend(writes)

    def _close(self) -> None:
        self.transactions.append(self._group)
        self._group = []
