"""What a node can run, and what no node alive can.

A node says with its lease which definitions it has, and claims runs of these versions of these workflows only: during a
rolling upgrade each run goes to a node that has its version. A run that is due while nobody alive has its definition is
not forgotten. After a while any node takes it, only to pause it with `VersionMismatch` and to put aside its messages.
They come again a few times, and are dead letters then. The run goes on with its first turn on a node that has its
definition: a node that begins requeues what has died for want of what it has.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from holdfast.core.letters import DeadLetterQuery
from holdfast.engine.options import NodeOptions
from holdfast.errors import StoreCorrupt, StoreError
from holdfast.store.guards import name_of
from holdfast.store.port import LoadedRun, Plan, Store

logger = logging.getLogger("holdfast.node")


class KnownDefinitions(Protocol):
    """Knows which definitions there are."""

    def plans(self) -> Sequence[Plan]:
        """Return the workflows that are known, each with its version."""
        ...


class Known:
    """What one node claims."""

    def __init__(self, node: str, store: Store, definitions: KnownDefinitions, options: NodeOptions) -> None:
        self._node = node
        self._store = store
        self._definitions = definitions
        self._takes_runs = options.takes_runs
        self._grace_s = options.definition_grace_s
        self._late_ms = round((options.definition_grace_s or 0) * 1_000)
        self._strays: list[Plan] = []

    def plans(self) -> Sequence[Plan]:
        """Return what this node can run."""
        return self._definitions.plans() if self._takes_runs else ()

    def has(self, plan_id: str, plan_version: str) -> bool:
        """Say whether this node can run it."""
        return (plan_id, plan_version) in self.plans()

    async def claim(self, limit: int) -> list[LoadedRun]:
        """Claim runs that this node can run, and those that nobody can: these once, but until there is an answer."""
        strays = self._strays
        claimed = await self._store.claim(self._node, limit, [*self.plans(), *strays] if strays else self.plans())
        if strays is self._strays:
            self._strays = []
        return claimed

    def start(self) -> list[asyncio.Task[None]]:
        """Begin to look for runs that nobody could run, and for those that nobody can."""
        if not self._takes_runs or self._grace_s is None:
            return []
        return [asyncio.create_task(self._watch(self._grace_s), name="definitions")]

    async def _watch(self, grace_s: float) -> None:
        look = self._requeue
        while True:
            try:
                await look()
                look = self._find_strays
            except StoreError:
                logger.warning("runs without their definitions could not be looked for", exc_info=True)
            await asyncio.sleep(grace_s)

    async def _requeue(self) -> None:
        after = (0, "")
        while letters := await self._store.find_dead_letters(DeadLetterQuery(reason="definition missing", after=after)):
            known = [letter.letter_id for letter in letters if await self._can_run(letter.run_id)]
            await self._store.settle_dead_letters(known, "requeue", name_of(self._node))
            after = letters[-1].died_at, letters[-1].letter_id

    async def _can_run(self, run_id: str) -> bool:
        try:
            [run] = await self._store.load([run_id])
        except StoreCorrupt:
            return False
        return run is not None and self.has(run.head.plan_id, run.head.plan_version)

    async def _find_strays(self) -> None:
        missing = await self._store.find_missing(self._late_ms)
        found = [each.plan for each in missing if each.plan not in self.plans()]
        if found:
            names = ", ".join(f"{plan_id} version {version}" for plan_id, version in found)
            logger.error("no node alive has %s: runs that are due are paused", names)
            self._strays = list({*self._strays, *found})
            self._store.wakeups.ring()
