"""Which node claims a run first: nodes with a lease share the runs, so that they do not all try to claim the same one.

All processes learn of a timer or an ending lease at the same instant. Without an order, each of them would try to
replace the same head, and all but one would fail. So runs are divided into shards by their ids, and each shard belongs
to one of the nodes that have the definition and a lease: the one with the highest score for it. A node that joins or
leaves moves only its own shards; this assignment is stored in no object and costs no request.

It is an order, not a right: a run that its node has not claimed within `GRACE` is claimed by any other node, and nodes
that disagree on who has a lease at worst fail a conditional write.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from zlib import crc32

from holdfast.store.port import Plan

SHARDS = 256

GRACE = 2_000_000
"""How long a run is left to the node of its shard before others claim it, in microseconds."""


def shard_of(run_id: str) -> int:
    """Return the shard of a run."""
    return crc32(run_id.encode()) % SHARDS


def place_for(node: str, run_id: str) -> int:
    """Return the position of a run among those of other nodes, for a helping node: different for each node."""
    return crc32(run_id.encode(), crc32(node.encode()))


@lru_cache(maxsize=64)
def owners_of(nodes: frozenset[str]) -> Sequence[str]:
    """Return the node of each shard."""
    names = sorted(nodes)
    return [max(names, key=lambda node: _score(node, shard), default="") for shard in range(SHARDS)]


def _score(node: str, shard: int) -> bytes:
    return blake2b(f"{shard} {node}".encode(), digest_size=8).digest()


class Shares:
    """How the nodes that have a lease share the runs, as seen by one of them."""

    def __init__(self, node: str, alive: Mapping[str, Sequence[Plan] | None], grace: int) -> None:
        self._node = node
        self._alive = alive
        self._grace = grace
        self._owners: dict[Plan, Sequence[str]] = {}

    def delay(self, run_id: str, plan: Plan) -> int:
        """Return for how long the node leaves a run to another node: 0 if it is the node's own."""
        if not self._grace:
            return 0
        owners = self._owners.get(plan)
        if owners is None:
            able = frozenset(name for name, plans in self._alive.items() if plans is None or plan in plans)
            owners = self._owners[plan] = owners_of(able | {self._node})
        return 0 if owners[shard_of(run_id)] == self._node else self._grace
