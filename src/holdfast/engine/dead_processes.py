"""Nodes whose process is gone: their runs go on at once, instead of when their lease has expired.

A node publishes with its lease which process it is. A node that starts looks at the others: where it can know that a
process is gone, because it ran on this machine since the last boot, it ends that node's lease. Its runs are then lost
as by any crash: claimed with a new epoch, and counted as losses. On another machine, in another container, or without
`/proc` it cannot know: then it ends nothing, and the lease expires.

A mistake would cost no more than an expired lease does: the epoch fences what the other node still writes.
"""

import logging
import os
from pathlib import Path

from holdfast.engine.abilities import abilities_of
from holdfast.errors import NodeSuperseded
from holdfast.store.decisions import name_of
from holdfast.store.port import Store

logger = logging.getLogger("holdfast.node")

PROC = Path("/proc")
SHORTEST_LEASE_MS = 1
NAMED = 5


def process_identity() -> str:
    """Return what distinguishes this process from every other on this machine since it was booted; "" if unknown."""
    try:
        return f"{_machine()} {os.getpid()} {_started(os.getpid())}"
    except (OSError, ValueError):
        return ""


def is_here(identity: str) -> bool:
    """Return whether this process runs, or ran, where it can be seen from here."""
    try:
        return identity.rsplit(" ", 2)[0] == _machine()
    except OSError:
        return False


def is_gone(identity: str) -> bool:
    """Return whether it is certain that this process has ended."""
    try:
        machine, pid, started = identity.rsplit(" ", 2)
        if machine != _machine():
            return False
        os.kill(int(pid), 0)
        return _started(int(pid)) != started
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # it is there and belongs to somebody else, or cannot be looked at
        return False


async def end_leases_of_the_gone(store: Store, node: str) -> list[str]:
    """End the leases of other nodes whose process has ended on this machine, so that their runs can be claimed.

    Return the names of those nodes.
    """
    gone = []
    others = [each for each in abilities_of(await store.find_nodes()) if each.node != node]
    unseen = [name_of(each.node) for each in others if not is_here(each.abilities.process)]
    if unseen:
        named = ", ".join(unseen[:NAMED]) + (f" and {len(unseen) - NAMED} more" if len(unseen) > NAMED else "")
        text = "node %s cannot see whether these still run, elsewhere: %s. If one is gone, its runs wait for its lease"
        logger.info(text, name_of(node), named)
    for other in others:
        if is_gone(other.abilities.process):
            text = "node %s takes over at once from %s, whose process has ended without stopping: see why it did"
            logger.warning(text, name_of(node), name_of(other.node))
            try:
                await store.renew(other.node, SHORTEST_LEASE_MS)
            except NodeSuperseded:  # its name has started again meanwhile
                continue
            gone.append(name_of(other.node))
    return gone


def _machine() -> str:
    """Return what distinguishes this boot of this machine, and the processes that can be seen from here."""
    boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink(PROC / 'self/ns/pid')}"


def _started(pid: int) -> str:
    """Return when a process was started, in ticks since the boot; "" for one that has ended and is not reaped yet."""
    after_name = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return "" if after_name[0] in "ZX" else after_name[19]
