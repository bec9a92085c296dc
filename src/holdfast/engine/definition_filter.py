"""What a node can run, and what no node alive can.

A node says with its lease which definitions it has, and claims runs of these versions of these workflows only: during a
rolling upgrade each run goes to a node that has its version. A run that is due while nobody alive has its definition is
not forgotten. After a while any node takes it, only to pause it with `VersionMismatch` and to put aside its messages.
They come again a few times, and are dead letters then. The run goes on with its first turn on a node that has its
definition: a node that begins requeues what has died for want of what it has.

A run whose history does not fit the code here (`NondeterminismError`) is handed over to a node that is alive and has
other code for it, and is paused only if there is none that was not tried. A node that begins tries the runs that are
paused so against its own code, once, and wakes those that fit.

A node that has a workflow but not an activity that it calls hands the run over to a node that has both. While there is
none it keeps the run, says with its lease what it lacks, so that `holdfast doctor` can tell, and looks again when
another node rings, as each does that starts.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from zlib import crc32

from holdfast.core.messages import Message
from holdfast.core.state import PAUSED
from holdfast.engine.options import NodeOptions
from holdfast.errors import StoreCorrupt, StoreError
from holdfast.program.fingerprint import CHARS as FINGERPRINT_CHARS
from holdfast.registry import Registry
from holdfast.store.port import LoadedRun, NodePlans, Plan, RunHead, RunQuery, Store
from holdfast.store.types import DeadLetterQuery, pages
from holdfast.store.validation import name_of

MOST_HANDED = 10_000
"""How many runs that were handed over are remembered."""

Lack = tuple[Plan, frozenset[str]]
"""A definition, and the activities that runs of it wait for."""

Fits = Callable[[RunHead], Awaitable[bool]]
"""Returns whether a run waits for code that fits its history, and the code here does."""

logger = logging.getLogger("holdfast.node")


# What a node says beside the definitions that it has. No name has a line break in it, and no plan's id is empty.


def code_plan(plan: Plan, fingerprint: str) -> Plan:
    """Return how a node says with which code it has a definition."""
    return f"{plan[0]}@{fingerprint}", plan[1]


def activity_plan(name: str) -> Plan:
    """Return how a node says that it has an activity."""
    return "", f"activity\n{name}"


def lack_plan(plan: Plan, activity: str) -> Plan:
    """Return how a node says that runs of a definition wait there for an activity that it does not have."""
    return "", f"lacks\n{activity}\n{plan[0]}\n{plan[1]}"


def lacks_of(nodes: Iterable[NodePlans]) -> set[tuple[str, Plan]]:
    """Return the activities that runs wait for and no node has together with their definition, each with that."""
    all_nodes = list(nodes)
    said = [value.split("\n") for each in all_nodes for key, value in each.plans if not key]
    lacks = {(parts[1], (parts[2], parts[3])) for parts in said if parts[0] == "lacks" and len(parts) == 4}
    return {lack for lack in lacks if not any({lack[1], activity_plan(lack[0])} <= each.plans for each in all_nodes)}


def other_code(nodes: Iterable[NodePlans], plan: Plan, tried: Collection[str]) -> tuple[str, str] | None:
    """Return the first of the nodes that has code for a definition which was not tried, and its fingerprint."""
    start = code_plan(plan, "")[0]
    for each in nodes:
        for key, version in sorted(each.plans):
            code = key.removeprefix(start)
            if key == f"{start}{code}" and version == plan[1] and len(code) == FINGERPRINT_CHARS and code not in tried:
                return each.node, code
    return None


class DefinitionFilter:
    """What one node claims."""

    def __init__(self, node: str, store: Store, registry: Registry, options: NodeOptions) -> None:
        self._node = node
        self._store = store
        self._registry = registry
        self._takes_runs = options.takes_runs
        self._grace_s = options.definition_grace_s
        self._late_ms = round((options.definition_grace_s or 0) * 1_000)
        self._orphaned: list[Plan] = []
        self._codes: Mapping[Plan, str] | None = None
        self._handed: OrderedDict[str, tuple[int, tuple[str, ...]]] = OrderedDict()
        self._lack_of: dict[str, Lack] = {}
        self._lacking: dict[Lack, dict[str, None]] = {}
        self._is_stopping = False

    def plans(self) -> Sequence[Plan]:
        """Return what this node can run."""
        return list(self._registry.workflows) if self._takes_runs else ()

    def has(self, plan_id: str, plan_version: str) -> bool:
        """Say whether this node can run it."""
        return (plan_id, plan_version) in self.plans()

    def published(self) -> Sequence[Plan]:
        """Return what this node says with its lease: what it can run, with which code and activities; what it lacks."""
        lacks = [lack_plan(plan, name) for plan, names in self._lacking for name in sorted(names)]
        if self._is_stopping or not self._takes_runs:  # it is given no runs
            return [*self.plans(), *lacks]
        codes = [code_plan(plan, code) for plan, code in self._fingerprints().items()]
        return [*self.plans(), *codes, *map(activity_plan, self._registry.activity_names()), *lacks]

    def stop(self) -> None:
        """Say from the next renewal on that this node is to be given no runs."""
        self._is_stopping = True

    def _fingerprints(self) -> Mapping[Plan, str]:
        if self._codes is None:
            self._codes = self._registry.fingerprints() if self._takes_runs else {}
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
        found = other_code(await self._others(), plan, (own, *tried))
        if found is None or not await self._store.hand_over(self._node, [head.run_id], found[0]):
            return False
        self._handed[head.run_id] = head.version, (*tried, found[1])
        if len(self._handed) > MOST_HANDED:
            self._handed.popitem(last=False)
        return True

    async def _others(self) -> list[NodePlans]:
        return [each for each in await self._store.find_nodes() if each.node != self._node]

    # --- activities that this node does not have

    @property
    def lacks_any(self) -> bool:
        """Whether a run waits here for an activity that this node does not have."""
        return bool(self._lacking)

    def note_lack(self, run_id: str, plan: Plan, activities: frozenset[str]) -> bool:
        """Note for which activities a run waits that this node does not have; return whether to publish it."""
        lack, before = (plan, activities), self._lack_of.get(run_id)
        if before == lack or (before is None and not activities):
            return False
        if before is not None:
            del self._lack_of[run_id], self._lacking[before][run_id]
        is_news = before is not None and not self._lacking[before]
        if before is not None and is_news:
            del self._lacking[before]
        if activities:
            is_news |= lack not in self._lacking
            self._lack_of[run_id] = lack
            self._lacking.setdefault(lack, {})[run_id] = None
        return is_news

    def forget_lack(self, run_id: str) -> bool:
        """Forget a run that waits here for nothing, or is here no more; return whether to publish it."""
        return self.note_lack(run_id, ("", ""), frozenset())

    async def takers(self) -> list[tuple[str, str]]:
        """Return the runs that wait for activities which other nodes have, each with one that has most of them."""
        others = await self._others()
        found: list[tuple[str, str]] = []
        for (plan, activities), run_ids in self._lacking.items():
            wanted = set(map(activity_plan, activities))
            able = [(len(wanted & each.plans), each.node) for each in others if plan in each.plans]
            most = max((count for count, _ in able), default=0)
            best = [node for count, node in able if count == most and count]
            found += [(run_id, best[crc32(run_id.encode()) % len(best)]) for run_id in run_ids if best]
        return found

    # --- claiming

    async def claim(self, limit: int) -> list[LoadedRun]:
        """Claim runs that this node can run, and those that nobody can: these once, but until there is an answer."""
        orphaned = self._orphaned
        claimed = await self._store.claim(self._node, limit, [*self.plans(), *orphaned] if orphaned else self.plans())
        if orphaned is self._orphaned:
            self._orphaned = []
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
                    await self._find_orphaned()
            except StoreError:
                logger.warning("runs without their definitions could not be looked for", exc_info=True)
            await asyncio.sleep(grace_s)

    async def _requeue(self) -> None:
        query = DeadLetterQuery(reason="definition missing")
        place_of = lambda letter: (letter.died_at, letter.letter_id)  # noqa: E731
        async for letters in pages(self._store.find, query, place_of):
            known = [letter.letter_id for letter in letters if await self._can_run(letter.run_id)]
            await self._store.settle_dead_letters(known, "requeue", name_of(self._node))

    async def _wake_diverged(self, fits: Fits) -> None:
        """Wake the runs whose history did not fit other code, and fits what this node has. Nothing else is written."""
        for plan_id in sorted({plan_id for plan_id, _ in self.plans()}):
            query = RunQuery(plan_id=plan_id, status=PAUSED)
            async for page in pages(self._store.find, query, lambda head: head.run_id):
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

    async def _find_orphaned(self) -> None:
        missing = await self._store.find_orphaned(self._late_ms)
        found = [each.plan for each in missing if each.plan not in self.plans()]
        if found:
            names = ", ".join(f"{plan_id} version {version}" for plan_id, version in found)
            logger.error("no node alive has %s: runs that are due are paused", names)
            self._orphaned = list({*self._orphaned, *found})
            self._store.wakeups.notify()
