"""Takeovers: a node continues runs of a node that was lost, and reports it in the log and to operators.

A run that was taken from an owner with an expired lease has a loss (`RunHead.losses`), and its snapshot names the node
that executed it last. Claims come in batches, so takeovers are collected for a moment. The report is stored as a
bulletin, for the page and the command line; no run depends on it.

A takeover that might crash this process too is reported before its turn: the first one of a process, because that run
may have crashed the other node, and runs that were lost several times.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Raw, Struct

from holdfast.core.instants import Instant
from holdfast.engine.turns.poison import is_set_aside, is_suspect
from holdfast.errors import HoldfastError
from holdfast.store.decisions import name_of
from holdfast.store.port import BulletinQuery, LoadedRun, Store

KIND = "takeover"
COLLECTED_S = 1.0
REPORTED_S = 3.0
"""How long runs that were taken over wait at most for the report, whose write may be slower than all others."""

GONE_S = 10.0
"""For how long after this node has ended the leases of others its claims may be runs of theirs."""

KEEP_MS = 7 * 86_400_000
UNKNOWN = "a node that is gone"

logger = logging.getLogger("holdfast.node.takeovers")


class Takeover(Struct, frozen=True):
    """A node has continued runs of another one. If both have the same name, a process was restarted."""

    node: str
    taken_from: str
    runs: int


class TakeoverAt(Struct, frozen=True):
    """A takeover, and its time."""

    at: Instant
    takeover: Takeover


_takeovers = msgspec.json.Decoder(Takeover)


class Takeovers:
    """Collects what one node takes over, and reports it. `owns` returns whether it owns a run already."""

    def __init__(self, store: Store, node: str, owns: Callable[[str], bool]) -> None:
        self._store = store
        self._node = node
        self._owns = owns
        self._taken: Counter[str] = Counter()
        self._reporting: asyncio.Task[None] | None = None
        self._number = 0
        self._gone: frozenset[str] = frozenset()
        self._gone_until = 0.0

    def note_gone(self, nodes: list[str]) -> None:
        """Note the nodes whose leases this one has just ended, because their processes have ended."""
        now = asyncio.get_running_loop().time()
        self._gone = self._gone.union(nodes) if now < self._gone_until else frozenset(nodes)
        self._gone_until = now + GONE_S

    async def note(self, claimed: Iterable[LoadedRun]) -> None:
        """Note which claimed runs come from a node that is gone, and report them, most of them after a moment."""
        is_urgent = self._number == 0
        for loaded in claimed:
            is_lost = loaded.head.losses and not is_set_aside(loaded.head)  # it keeps its earlier losses
            if is_lost and not self._owns(loaded.head.run_id):
                self._taken[self._lost_by(loaded)] += 1
                is_urgent |= is_suspect(loaded.head)
        if self._taken and is_urgent:
            await self._report()
        elif self._taken and (self._reporting is None or self._reporting.done()):
            self._reporting = asyncio.create_task(self._report_soon(), name="takeovers")

    def _lost_by(self, loaded: LoadedRun) -> str:
        """Return the node that owned a run. If that node committed nothing, the snapshot names an earlier node.

        If several nodes are gone, it is not known which of them owned it last.
        """
        if loaded.head.losses > 1 and asyncio.get_running_loop().time() < self._gone_until and len(self._gone) == 1:
            return next(iter(self._gone))
        last = loaded.head.snapshot.last_executed_by if loaded.head.snapshot is not None else ""
        return name_of(last) if last else UNKNOWN

    def stop(self) -> None:
        """Stop reporting."""
        if self._reporting is not None:
            self._reporting.cancel()

    async def _report_soon(self) -> None:
        await asyncio.sleep(COLLECTED_S)
        await self._report()

    async def _report(self) -> None:
        if not self._taken:  # it was reported urgently meanwhile
            return
        taken, self._taken = self._taken, Counter()
        here = name_of(self._node)
        bodies: dict[str, Raw] = {}
        for other, runs in sorted(taken.items()):
            of = "its former process" if other == here else other
            logger.warning("node %s has taken over %d %s of %s", here, runs, "run" if runs == 1 else "runs", of)
            self._number += 1
            bodies[f"{self._node} {self._number}"] = Raw(msgspec.json.encode(Takeover(here, other, runs)))
        try:
            async with asyncio.timeout(REPORTED_S):
                await self._store.put_bulletins(KIND, bodies, KEEP_MS)
        except (HoldfastError, TimeoutError):
            logger.warning("node %s could not report what it has taken over", here, exc_info=True)


async def find_takeovers(store: Store, since: Instant, limit: int) -> list[TakeoverAt]:
    """Return the takeovers from an instant on, in order. Entries of other releases are skipped if unreadable."""
    found: list[TakeoverAt] = []
    for bulletin in await store.find_bulletins(BulletinQuery(kind=KIND, since=since, limit=limit)):
        try:
            found.append(TakeoverAt(bulletin.at, _takeovers.decode(bulletin.body)))
        except msgspec.MsgspecError:
            continue
    return found
