"""Nodes that are interrupted: each is cut short before or after one of its writes, and the next finds what it left.

A life has its own node on its own connection to the same file. When it is cut short, the call that it died in never
returns, no later call reaches the file, and nothing is released. Time is the machine's, but a new life begins after the
last one's lease: nobody has to wait for it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest.mock import patch

from holdfast import App, MemoryStore, NodeOptions, PostgresStore, SqliteStore, activity_context
from holdfast.activity import Activity
from holdfast.clock import SystemClock
from holdfast.core.messages import AcceptedSignalResult
from holdfast.engine import node as node_module
from holdfast.store.port import Accepted, Duplicate
from tests.early_first_turns import take_first_turns_early
from tests.sqlite_template import put_empty_store

LEASE_MS = 60_000
PATIENCE_S = 60.0
GIVE_BACK_S = 0.05
WRITES = ("create", "deliver", "claim", "commit", "acquire_limited_jobs")
OTHERS = (
    *(
        "now",
        "load",
        "renew",
        "next_due",
        "heartbeat",
        "release_jobs",
        "put_key",
        "get_key",
        "read_events",
        "hand_over",
    ),
    *("publish_definitions", "find_definitions", "find", "find_orphaned", "find_nodes"),
    *("put_plan", "get_plan", "register_plan", "find_plans", "put_bulletins"),
)
OPTIONS = NodeOptions(lease_ms=LEASE_MS, activities_at_once=3, drain_s=0.001)

Edge = Literal["before", "after"]
Scenario = Callable[[App], Awaitable[Any]]
"""What a client does with an app whose node is open. Told again in every life, it changes nothing that was done."""


class SkippingClock:
    """The machine's time, and the time that was skipped."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._skipped = 0

    def now(self) -> int:
        """Return the present instant."""
        return self._clock.now() + self._skipped

    def skip(self, ms: int) -> None:
        """Let time pass at once."""
        self._skipped += ms * 1_000


class InterruptedStore:
    """A store that is there until the n-th write, and then is not any more."""

    def __init__(
        self,
        inner: Any,
        dies_at: int | None,
        edge: Edge,
        counted: Sequence[str],
        acknowledged: list[AcceptedSignalResult],
    ) -> None:
        self.capabilities = inner.capabilities
        self.wakeups = inner.wakeups
        self.died = asyncio.Event()
        self.died_in = ""
        self.writes = 0
        self._inner = inner
        self._dies_at = dies_at
        self._edge = edge
        self._counted = counted
        self._acknowledged = acknowledged

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        if verb in WRITES:
            return functools.partial(self._write, verb)
        if verb in OTHERS:
            return functools.partial(self._read, verb)
        raise AttributeError(verb)

    async def release(self, *args: Any) -> int:
        """Free nothing: a process that dies does not let go of anything."""
        return 0

    async def _read(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        await self._unless_dead(None)
        return await self._unless_dead(await getattr(self._inner, verb)(*args, **kwargs))

    async def _write(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        await self._unless_dead(None)
        is_counted = verb in self._counted
        self.writes += is_counted
        is_last = is_counted and self.writes == self._dies_at
        if is_last and self._edge == "before":
            await self._die(verb)
        answer = await getattr(self._inner, verb)(*args, **kwargs)
        if is_last:
            await self._die(verb)
        await self._unless_dead(answer)
        if verb == "deliver":
            told = (item.result for item in answer if isinstance(item, Accepted | Duplicate))
            self._acknowledged.extend(result for result in told if result is not None)
        return answer

    async def _die(self, verb: str) -> None:
        self.died_in = verb
        self.died.set()
        await self._unless_dead(None)

    async def _unless_dead(self, answer: Any) -> Any:
        if self.died.is_set():
            await asyncio.get_running_loop().create_future()
        return answer


class InterruptedNodes:
    """One file, and the lives that are lived on it."""

    def __init__(self, app: App, path: Path, options: NodeOptions = OPTIONS) -> None:
        self.app = app
        self._options = options
        self.acknowledged: list[AcceptedSignalResult] = []
        self._path = path
        self._clock = SkippingClock()
        self._count = 0

    async def live(
        self, scenario: Scenario, dies_at: int | None = None, edge: Edge = "before", counted: Sequence[str] = WRITES
    ) -> InterruptedStore | Any:
        """Play the scenario in a new life, which ends at a write of those that are counted.

        Return what came of the scenario, or the store in which the life ended.
        """
        self._count += 1
        inner = await self.open()
        store: Any = InterruptedStore(inner, dies_at, edge, counted, self.acknowledged)
        dying = ExitStack()
        try:
            async with self.app.node(store, name=self._name(), options=self._options) as node:
                take_first_turns_early(node)
                told, died = asyncio.ensure_future(scenario(self.app)), asyncio.ensure_future(store.died.wait())
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await asyncio.wait([told, died], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    told.cancel()
                    died.cancel()
                    await asyncio.wait([told, died])
                if store.died.is_set():  # what has no answer now never has one, and a dead process waits for nothing
                    dying.enter_context(patch.object(node_module, "GIVE_BACK_S", GIVE_BACK_S))
            return store if store.died.is_set() else told.result()
        finally:
            dying.close()
            self._clock.skip(LEASE_MS + 1)
            await self.close(inner)

    async def open(self) -> Any:
        """Open the store for one life."""
        if not self._path.exists():
            put_empty_store(self._path)
        inner = await SqliteStore.open(self._path, clock=self._clock)
        await inner.migrate()
        return inner

    async def close(self, inner: Any) -> None:
        await inner.close()

    def _name(self) -> str:
        return f"life-{self._count}"


class InterruptedMemoryNodes(InterruptedNodes):
    """Lives in one process's memory: the store is there after each of them."""

    def __init__(self, app: App, options: NodeOptions = OPTIONS) -> None:
        super().__init__(app, Path(), options)
        self._store = MemoryStore(clock=self._clock)

    async def open(self) -> Any:
        return self._store

    async def close(self, inner: Any) -> None:
        """Leave it open for the next life."""


class InterruptedPostgresNodes(InterruptedNodes):
    """Lives on one database. Time is the server's, so each life has the name of the one before, and takes over."""

    def __init__(self, app: App, url: str, options: NodeOptions = OPTIONS) -> None:
        super().__init__(app, Path(), options)
        self._url = url

    async def open(self) -> Any:
        return await PostgresStore.open(self._url)

    def _name(self) -> str:
        return "life"


@contextmanager
def counted_effects(example: ModuleType) -> Iterator[Counter[tuple[str, str]]]:
    """Count how often each step of each run is carried out, by (run id, step id)."""
    effects: Counter[tuple[str, str]] = Counter()

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def count_async(*args: Any, **kwargs: Any) -> Any:
            effects[activity_context().run_id, activity_context().step_id] += 1
            return await function(*args, **kwargs)

        @functools.wraps(function)
        def count(*args: Any, **kwargs: Any) -> Any:
            effects[activity_context().run_id, activity_context().step_id] += 1
            return function(*args, **kwargs)

        return count_async if inspect.iscoroutinefunction(function) else count

    definitions = [value.definition for value in vars(example).values() if isinstance(value, Activity)]
    originals = [definition.function for definition in definitions]
    try:
        for definition in definitions:
            definition.function = counting(definition.function)
        yield effects
    finally:
        for definition, original in zip(definitions, originals, strict=True):
            definition.function = original
