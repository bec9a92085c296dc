"""Queries of a run's present state. Nothing is recorded.

The run's program answers, either the one in memory or one that is rebuilt from the history for this query. If this
process does not have the run's code, a node that has it answers (`remote_queries.py`).
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from msgspec import Raw

from holdfast.clock import Ids
from holdfast.core import codec
from holdfast.core.events import NULL, RunStarted
from holdfast.core.plans import ANY_PLAN, definition_of
from holdfast.core.state import APPROVED, PENDING
from holdfast.engine.history import head_of, read_since_rotation, wait_for_event
from holdfast.engine.plans import load_plan_of
from holdfast.engine.remote_queries import RemoteQueries
from holdfast.engine.turns.execute import CachedRun, RunCache, rebuild
from holdfast.engine.turns.poison import refuse_suspect
from holdfast.errors import Conflict, NotDurable, NotFound, RunawayWorkflow, RunTerminal, VersionMismatch
from holdfast.program.values import Signature
from holdfast.registry import Registry
from holdfast.store.port import RunHead, Store

EXAMINED = 10_000
"""For how many runs it is remembered that they were replayed to find out what they answer."""

NO_QUERY = ""
"""The empty name: no query."""

START_S = 10.0
"""How long a query waits for its run to start."""

REST = 2
"""The pause after a replay for a query, as a multiple of its duration: turns need the event loop, too."""


class RunQueries:
    """Answers queries of runs for callers in this process, and for other nodes."""

    def __init__(
        self, store: Store, registry: Registry, run_cache: RunCache, node: str, poll_s: float, ids: Ids
    ) -> None:
        self._store = store
        self._registry = registry
        self._run_cache = run_cache
        self._remote = RemoteQueries(store, node, poll_s, self._answer_for_others, ids)
        self._examined: set[tuple[str, int]] = set()
        self._asking = asyncio.Lock()
        self._asked_again_at = 0.0

    async def serve(self) -> None:
        """Answer the queries of other nodes, until this is cancelled."""
        await self._remote.serve()

    async def ask(self, run_id: str, name: str, arguments: Raw) -> Raw:
        """Return the answer of a run. If the run is about to start, wait for that."""
        head = await self._started(await head_of(self._store, run_id))
        if self._has_code(head):
            return await self._query(head, name, arguments)
        try:
            return await self._remote.ask(head, name, arguments)
        except VersionMismatch:
            with suppress(VersionMismatch):
                return await self._query(head, name, arguments)  # raises Conflict if the run has not started
            raise

    async def handlers(self, run_id: str) -> Raw:
        """Return which queries and updates a run answers, with JSON Schemas: `{"queries": …, "updates": …}`."""
        head = await head_of(self._store, run_id)
        return await self._handlers(head) if self._has_code(head) else await self._remote.ask(head, NO_QUERY, NULL)

    async def _handlers(self, head: RunHead) -> Raw:
        definition = self._registry.workflows.get((head.plan_id, head.plan_version))
        if definition is None:
            return codec.encode({"queries": {}, "updates": {}})
        if not definition.queries and not definition.updates:
            await self._examine(head)
        known = {"queries": definition.queries, "updates": definition.updates}
        return codec.encode({kind: _schemas(handlers) for kind, handlers in known.items()})

    def _has_code(self, head: RunHead) -> bool:
        """Return whether this process has the code of a run. A plan is in the store."""
        plan = head.plan_id, head.plan_version
        return plan in self._registry.workflows or definition_of(*plan) == ANY_PLAN

    async def _answer_for_others(self, run_id: str, name: str, arguments: Raw) -> Raw:
        """Answer the query of another process, which has asked the authoriser."""
        head = await head_of(self._store, run_id)
        return await self._query(head, name, arguments) if name else await self._handlers(head)

    async def _examine(self, head: RunHead) -> None:
        """Replay a run once to find the queries and updates that its code registers. Nothing is written."""
        place = head.run_id, head.version
        if place in self._examined or head.status in (PENDING, APPROVED):
            return
        if len(self._examined) >= EXAMINED:
            self._examined.clear()
        self._examined.add(place)
        refuse_suspect(head)
        if self._run_cache.get(head) is None:
            with suppress(NotFound):
                await self._answer_from_history(head, NO_QUERY, NULL)

    async def _started(self, head: RunHead) -> RunHead:
        """Wait for a limited time until a run has started, and return its state then."""
        if head.status not in (PENDING, APPROVED):
            return head
        with suppress(TimeoutError, RunTerminal):
            async with asyncio.timeout(START_S):
                await wait_for_event(self._store, head.run_id, 1, lambda event: isinstance(event.data, RunStarted))
        return await head_of(self._store, head.run_id)

    async def _query(self, head: RunHead, name: str, arguments: Raw) -> Raw:
        """Query a run's program about its present state. Raise `Conflict` if it has not started."""
        run_id = head.run_id
        refuse_suspect(head)
        cached = self._run_cache.get(head)
        if cached is not None and cached.ahead is None:  # state that is not durable may be lost
            try:
                return _answer(cached, name, arguments)
            except (NotDurable, RunawayWorkflow):  # this program no longer agrees with its history
                self._run_cache.forget(run_id)
                raise
        return await self._answer_from_history(head, name, arguments)

    async def _answer_from_history(self, head: RunHead, name: str, arguments: Raw) -> Raw:
        """Answer a query by replaying its run. Replays run one at a time, with a pause between them.

        A replay blocks the event loop, which turns, leases and other callers share.
        """
        loop = asyncio.get_running_loop()
        async with self._asking:
            await asyncio.sleep(max(0.0, self._asked_again_at - loop.time()))
            history = await read_since_rotation(self._store, head)
            await load_plan_of(self._registry, self._store, head, history)
            began_at = loop.time()
            # Rebuilt for this query only: a turn may be rebuilding the run at the same time, and has a program of its
            # own.
            cached, problem = rebuild(head.run_id, history, self._registry)
            try:
                if problem is not None:
                    raise problem
                return _answer(cached, name, arguments)
            finally:
                cached.close()
                self._asked_again_at = loop.time() + REST * (loop.time() - began_at)


def _answer(cached: CachedRun, name: str, arguments: Raw) -> Raw:
    if cached.replay.program is None:
        run_id, status = cached.state.run_id, cached.state.status
        raise Conflict(f"run {run_id} is {status} and has not started: it cannot answer a query", run_id=run_id)
    return cached.replay.program.query(name, arguments)


def _schemas(handlers: Mapping[str, Signature]) -> dict[str, dict[str, Any]]:
    """Return the schemas of handlers' arguments and results, by name."""
    found = {name: signature.schemas() for name, signature in sorted(handlers.items())}
    return {name: {"input": input, "result": result} for name, (input, result) in found.items()}
