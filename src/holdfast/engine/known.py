"""What a node can run, and what no node alive can.

A node says with its lease which definitions it has, and claims runs of these versions of these workflows only: during a
rolling upgrade each run goes to a node that has its version. A run that is due while nobody alive has its definition is
not forgotten. After a while any node takes it, only to pause it with `VersionMismatch` and to put aside its messages.
They come again a few times, and are dead letters then. The run goes on with its first turn on a node that has its
definition: a node that begins requeues what has died for want of what it has.

A run whose history does not fit the code here (`NondeterminismError`) is handed over to a node that is alive and has
other code for it, and is paused only if there is none that was not tried. A node that begins tries the runs that are
paused so against its own code, once, and wakes those that fit.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from holdfast.core.letters import DeadLetterQuery
from holdfast.core.messages import Message
from holdfast.core.state import PAUSED
from holdfast.engine.options import NodeOptions
from holdfast.errors import StoreCorrupt, StoreError
from holdfast.store.guards import name_of
from holdfast.store.port import LoadedRun, Plan, RunHead, RunQuery, Store
from holdfast.store.rows import code_plan

MOST_HANDED = 10_000
"""How many runs that were handed over are remembered."""

Fits = Callable[[RunHead], Awaitable[bool]]
"""Returns whether a run waits for code that fits its history, and the code here does."""

logger = logging.getLogger("holdfast.node")


class KnownDefinitions(Protocol):
    """Knows which definitions there are."""

    def plans(self) -> Sequence[Plan]:
        """Return the workflows that are known, each with its version."""
        ...

    def fingerprints(self) -> Mapping[Plan, str]:
        """Return what tells the code of each workflow apart from other code of the same version."""
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
        self._codes: Mapping[Plan, str] | None = None
        self._handed: OrderedDict[str, tuple[int, tuple[str, ...]]] = OrderedDict()

    def plans(self) -> Sequence[Plan]:
        """Return what this node can run."""
        return self._definitions.plans() if self._takes_runs else ()

    def has(self, plan_id: str, plan_version: str) -> bool:
        """Say whether this node can run it."""
        return (plan_id, plan_version) in self.plans()

    def published(self) -> Sequence[Plan]:
        """Return what this node says with its lease: what it can run, and with which code."""
        return [*self.plans(), *(code_plan(plan, code) for plan, code in self._fingerprints().items())]

    def _fingerprints(self) -> Mapping[Plan, str]:
        if self._codes is None:
            self._codes = self._definitions.fingerprints() if self._takes_runs else {}
        return self._codes

    async def hand_over(self, head: RunHead) -> bool:
        """Give a run whose history does not fit the code here to a node with other code; return whether there is one.

        A run that comes back as it went has been tried there: it goes to a third node, or is paused.
        """
        plan = head.plan_id, head.plan_version
        own = self._fingerprints().get(plan)
        if own is None:
            return False
        version, tried = self._handed.pop(head.run_id, (head.version, ()))
        tried = tried if version == head.version else ()
        code = await self._store.hand_over(self._node, head.run_id, plan, (own, *tried))
        if code is None:
            return False
        self._handed[head.run_id] = head.version, (*tried, code)
        if len(self._handed) > MOST_HANDED:
            self._handed.popitem(last=False)
        return True

    async def claim(self, limit: int) -> list[LoadedRun]:
        """Claim runs that this node can run, and those that nobody can: these once, but until there is an answer."""
        strays = self._strays
        claimed = await self._store.claim(self._node, limit, [*self.plans(), *strays] if strays else self.plans())
        if strays is self._strays:
            self._strays = []
        return claimed

    def start(self, fits: Fits | None = None) -> list[asyncio.Task[None]]:
        """Begin to look for runs that nobody could run, and for those that nobody can."""
        if not self._takes_runs or self._grace_s is None:
            return []
        return [asyncio.create_task(self._watch(self._grace_s, fits), name="definitions")]

    async def _watch(self, grace_s: float, fits: Fits | None) -> None:
        is_first = True
        while True:
            try:
                if is_first:
                    await self._requeue()
                    if fits is not None:
                        await self._wake_diverged(fits)
                    is_first = False
                else:
                    await self._find_strays()
            except StoreError:
                logger.warning("runs without their definitions could not be looked for", exc_info=True)
            await asyncio.sleep(grace_s)

    async def _requeue(self) -> None:
        after = (0, "")
        while letters := await self._store.find_dead_letters(DeadLetterQuery(reason="definition missing", after=after)):
            known = [letter.letter_id for letter in letters if await self._can_run(letter.run_id)]
            await self._store.settle_dead_letters(known, "requeue", name_of(self._node))
            after = letters[-1].died_at, letters[-1].letter_id

    async def _wake_diverged(self, fits: Fits) -> None:
        """Wake the runs whose history did not fit other code, and fits what this node has. Nothing is written else."""
        for plan_id in sorted({plan_id for plan_id, _ in self.plans()}):
            after = ""
            while page := await self._store.find_runs(RunQuery(plan_id=plan_id, status=PAUSED, after=after)):
                after = page[-1].run_id
                for head in page:
                    has_error = head.snapshot is None or head.snapshot.last_error_code is not None
                    if has_error and self.has(plan_id, head.plan_version) and await fits(head):
                        await self._wake(head)

    async def _wake(self, head: RunHead) -> None:
        word = Message(
            signal_id=f"code:{self._fingerprints()[head.plan_id, head.plan_version]}",
            run_id=head.run_id,
            type="InternalContinue",
            occurred_at=await self._store.now(),
            expected_version=1,
        )
        await self._store.deliver([word])
        logger.info("run %s fits the code of this node, and goes on", head.run_id)

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
