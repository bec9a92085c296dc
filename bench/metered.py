"""A store that notes what a node asks of it: how often, when, and which writes shared a transaction."""

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct

from holdfast.core.messages import Message
from holdfast.store.port import NewRun, Store, Turn


class Write(Struct, frozen=True, gc=False):
    """How much a turn wrote, or the beginning of a run. Small: the collector walks through all that is kept."""

    run_id: str
    is_new: bool
    version: int
    events: int
    consumed: tuple[str, ...]
    messages: tuple[Message, ...]


class MeteredStore:
    """Passes every verb on to a store."""

    def __init__(self, inner: Store) -> None:
        self.capabilities = inner.capabilities
        self.wakeups = inner.wakeups
        self.calls: Counter[str] = Counter()
        self.transactions: list[list[Write]] = []
        self.turn_s: list[float] = []
        self.committed = asyncio.Event()
        self._inner = inner
        self._group: list[Write] = []
        self._claimed_at = 0.0

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        call = functools.partial(self._call, verb)
        setattr(self, verb, call)
        return call

    async def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        self.calls[verb] += 1
        return await getattr(self._inner, verb)(*args, **kwargs)

    async def claim(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Note when runs were claimed."""
        claimed: list[Any] = await self._call("claim", *args, **kwargs)
        if claimed:
            self._claimed_at = time.perf_counter()
        return claimed

    async def create(self, runs: Sequence[NewRun], claim_for: str | None = None) -> list[Any]:
        """Note what was created."""
        self.calls["create"] += 1
        answers = await self._inner.create(runs, claim_for)
        self._note([Write(run.run_id, True, 0, len(run.events), (), run.messages) for run in runs])
        return answers

    async def commit(self, turns: Sequence[Turn]) -> list[Any]:
        """Note what was committed, and how long after its claim."""
        self.calls["commit"] += 1
        self.turn_s.append(time.perf_counter() - self._claimed_at)
        answers = await self._inner.commit(turns)
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
