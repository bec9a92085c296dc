"""Which runs a node claims: those that it can execute, and those that no live node can.

A node publishes its definitions with its lease (`abilities`), and claims only runs of these versions of these
workflows. During a rolling upgrade each run goes to a node that has its version. A definition is orphaned if runs of it
are due and no live node has it. After a grace period any node claims such runs, only to pause them with
`VersionMismatch` and to defer their messages. The messages are redelivered a few times and then become dead letters. A
run continues with its first turn on a node that has its definition: a node that starts requeues the dead letters that
it can handle.

A run whose history does not match the code here (`NondeterminismError`) is handed over to a live node that has other
code for it. It is paused only if every such node was tried. A node that starts tries the runs that are paused for this
reason against its own code, once, and wakes up those that match.

A node that has a workflow but not an activity that it calls hands the run over to a node that has both. If there is
none it keeps the run and publishes what it lacks, so that `holdfast doctor` can report it. It tries again when another
node notifies it, as every node does when it starts.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from zlib import crc32

from msgspec.structs import replace

from holdfast.core.event_writer import start_message
from holdfast.core.events import RunQueued
from holdfast.core.messages import Message
from holdfast.core.plans import FORMAT_LEVEL, definition_of, level_of
from holdfast.core.state import APPROVED, PAUSED
from holdfast.engine.abilities import Abilities, NodeAbilities, abilities_of, other_code
from holdfast.engine.dead_processes import process_identity
from holdfast.engine.observe.metrics import LateWrites, ObservedStore
from holdfast.engine.options import NodeOptions
from holdfast.errors import StoreCorrupt, StoreError
from holdfast.registry import Registry
from holdfast.store.decisions import name_of
from holdfast.store.port import Plan, RunHead, RunQuery, Store
from holdfast.store.queries import DeadLetterQuery, pages

MOST_HANDED = 10_000
"""How many handed-over runs are remembered."""

Wanted = tuple[Plan, frozenset[str]]
"""A definition, and the activities that runs of it wait for."""

Fits = Callable[[RunHead], Awaitable[bool]]
"""Returns whether a run waits for code that matches its history, and the code here does."""

VERSION = version("holdfast")
logger = logging.getLogger("holdfast.node")


class DefinitionFilter:
    """Decides what one node claims."""

    def __init__(self, node: str, store: Store, registry: Registry, options: NodeOptions) -> None:
        self._node = node
        self._store = store
        self._registry = registry
        self._takes_runs = options.takes_runs
        self._grace_s = options.definition_grace_s
        self._late_ms = round((options.definition_grace_s or 0) * 1_000)
        self.plans: Sequence[Plan] = registry.definitions if options.takes_runs else ()
        """What this node can run: its workflows, and plans, if there are any."""
        self.registered: Sequence[Plan] = registry.claimable if options.takes_runs else ()
        """What it claims while no definition is orphaned: what this node can run, in the form for claims."""
        self.claimable: Sequence[Plan] = self.registered
        """What it claims now: also orphaned definitions, until they were claimed once."""
        self._codes: Mapping[Plan, str] | None = None
        self._handed: OrderedDict[str, tuple[int, tuple[str, ...]]] = OrderedDict()
        self._lack_of: dict[str, Wanted] = {}
        self.lacking: dict[Wanted, dict[str, None]] = {}
        """The runs that wait here for activities that this node does not have, by what they lack."""
        self._is_stopping = False
        self._process = process_identity()
        self._queues = frozenset(options.queues)
        self.load: Callable[[], tuple[int, int]] | None = None
        """Returns how many runs this node owns, and how many activities are running here."""

    def has(self, plan_id: str, plan_version: str) -> bool:
        """Return whether this node can run it."""
        known = self.plans
        return (plan_id, plan_version) in known or definition_of(plan_id, plan_version) in known

    def understands(self, head: RunHead) -> bool:
        """Return whether this node has the definition, and supports the format of the run's state."""
        return head.needs <= FORMAT_LEVEL and self.has(head.plan_id, head.plan_version)

    def published(self) -> Sequence[Plan]:
        """Return what this node publishes with its lease: its definitions, their code, its activities, and what it
        lacks.

        A node that should receive no runs publishes neither code nor activities.
        """
        lacks = frozenset((name, plan) for plan, names in self.lacking for name in names)
        late = self._late_writes()
        abilities = Abilities(
            frozenset(self.plans),
            lacks=lacks,
            late_writes=late,
            process=self._process,
            version=VERSION,
            queues=self._queues,
            level=FORMAT_LEVEL,
            load=None if self.load is None else self.load(),
        )
        if self._is_stopping or not self._takes_runs:
            return abilities.encode()
        codes, activities = frozenset(self._fingerprints().items()), frozenset(self._registry.activity_names())
        return replace(abilities, codes=codes, activities=activities).encode()

    def _late_writes(self) -> LateWrites | None:
        return self._store.write_latency.recent() if isinstance(self._store, ObservedStore) else None

    def stop(self) -> None:
        """From the next renewal on, publish that this node should receive no runs."""
        self._is_stopping = True

    def _fingerprints(self) -> Mapping[Plan, str]:
        if self._codes is None:
            self._codes = self._registry.fingerprints() if self._takes_runs else {}
        return self._codes

    async def hand_over(self, head: RunHead) -> bool:
        """Hand a run that does not match this code over to a node with other code; return whether there is one.

        A run that comes back unchanged has been tried there: it goes to a third node, or is paused.
        """
        plan = head.plan_id, head.plan_version
        own = self._fingerprints().get(plan)
        if own is None:
            return False
        version, tried = self._handed.pop(head.run_id, (head.version, ()))
        tried = tried if version == head.version else ()
        others = [each for each in await self._others() if each.abilities.level >= head.needs]
        found = other_code(others, plan, (own, *tried))
        if found is None or not await self._store.hand_over(self._node, [head.run_id], found[0]):
            return False
        self._handed[head.run_id] = head.version, (*tried, found[1])
        if len(self._handed) > MOST_HANDED:
            self._handed.popitem(last=False)
        return True

    async def _others(self) -> list[NodeAbilities]:
        return abilities_of(each for each in await self._store.find_nodes() if each.node != self._node)

    # --- activities that this node does not have

    def note_lack(self, run_id: str, plan: Plan, activities: frozenset[str]) -> bool:
        """Note the activities that a run waits for and this node lacks; return whether that must be published."""
        lack, before = (plan, activities), self._lack_of.get(run_id)
        if before == lack or (before is None and not activities):
            return False
        if before is not None:
            del self._lack_of[run_id], self.lacking[before][run_id]
        is_news = before is not None and not self.lacking[before]
        if before is not None and is_news:
            del self.lacking[before]
        if activities:
            is_news |= lack not in self.lacking
            self._lack_of[run_id] = lack
            self.lacking.setdefault(lack, {})[run_id] = None
        return is_news

    def forget_lack(self, run_id: str) -> bool:
        """Forget a run that lacks nothing, or is not owned any more; return whether that must be published."""
        return self.note_lack(run_id, ("", ""), frozenset())

    async def takers(self) -> list[tuple[str, str]]:
        """Return the runs that wait for activities of other nodes, each with a node that has most of them."""
        others = await self._others()
        found: list[tuple[str, str]] = []
        for (plan, activities), run_ids in self.lacking.items():
            able = [
                (len(activities & each.abilities.activities), each.node)
                for each in others
                if plan in each.abilities.workflows
            ]
            most = max((count for count, _ in able), default=0)
            best = [node for count, node in able if count == most and count]
            found += [(run_id, best[crc32(run_id.encode()) % len(best)]) for run_id in run_ids if best]
        return found

    # --- claiming

    def note_claim(self, claimed: Sequence[Plan]) -> None:
        """Stop claiming orphaned definitions after a claim was answered, unless others were found meanwhile."""
        if claimed is self.claimable:
            self.claimable = self.registered

    def start(self, fits: Fits | None = None) -> list[asyncio.Task[None]]:
        """Begin to look for runs that no node could execute earlier, and for runs that no node can execute now."""
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
                await self._start_approved()
            except StoreError:
                logger.warning("the node could not look for orphaned definitions", exc_info=True)
            await asyncio.sleep(grace_s)

    async def _requeue(self) -> None:
        query = DeadLetterQuery(reason="definition missing")
        place_of = lambda letter: (letter.died_at, letter.letter_id)  # noqa: E731
        async for letters in pages(self._store.find, query, place_of):
            known = [letter.letter_id for letter in letters if await self._can_run(letter.run_id)]
            await self._store.settle_dead_letters(known, "requeue", name_of(self._node))

    async def _start_approved(self) -> None:
        """Start runs that a node of an older release has approved: that release sends no message that starts them.

        If a run has that message already, it stays: the store accepts only one.
        """
        query = RunQuery(status=APPROVED)
        async for page in pages(self._store.find, query, lambda head: head.run_id):
            for head in page:
                if head.queued_at is not None or not self.has(head.plan_id, head.plan_version):
                    continue
                queued = [event.data for event in await self._store.read_events(head.run_id, 0, 1)]
                for body in queued:
                    if isinstance(body, RunQueued) and body.requires_approval:
                        now = await self._store.now()
                        await self._store.deliver([start_message(head.run_id, now, body.start_at)])

    async def _wake_diverged(self, fits: Fits) -> None:
        """Wake up runs whose history did not match other code but matches the code here. Nothing else is written."""
        for plan_id in sorted({plan_id for plan_id, _ in self.plans}):
            query = RunQuery(workflow=plan_id, status=PAUSED)
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
        logger.info("run %s matches the code of this node and continues", head.run_id)

    async def _can_run(self, run_id: str) -> bool:
        try:
            [run] = await self._store.load([run_id])
        except StoreCorrupt:
            return False
        return run is not None and self.has(run.head.plan_id, run.head.plan_version)

    def _is_orphaned(self, plan_id: str, version: str, level: int) -> bool:
        """Return whether this node should pause runs of a definition that no live node has published."""
        return level <= FORMAT_LEVEL and (plan_id, version) not in self.plans

    async def _find_orphaned(self) -> None:
        missing = await self._store.find_orphaned(self._late_ms)
        apart = [(each.plan, *level_of(each.plan[1])) for each in missing]
        found = [(*plan, version) for plan, version, level in apart if self._is_orphaned(plan[0], version, level)]
        if found:
            names = ", ".join(sorted({f"{plan_id} version {version}" for plan_id, _, version in found}))
            logger.error("no live node has %s: its due runs are paused", names)
            self.claimable = list({*self.claimable, *self.registered, *((name, claimed) for name, claimed, _ in found)})
            self._store.wakeups.notify()
