"""Nodes whose process has ended: their runs continue immediately, instead of when their lease has expired.

A node publishes the identity of its process with its lease. A node that starts checks the others. If it can be certain
that a process has ended, because it ran on this machine since the last boot, it ends that node's lease. The runs of
that node are then lost as in any crash: they are claimed with a new epoch, and the loss is counted. From then on the
node watches the processes that still run: the system reports when they end (`pidfd`, on Linux), so only the list of
nodes is polled. On another machine, in another container, or without `/proc` a node cannot know, and the lease expires.

A mistake would cost no more than an expired lease does: the epoch fences what the other node still writes.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from holdfast.engine.abilities import NodeAbilities, abilities_of
from holdfast.errors import NodeSuperseded, StoreError
from holdfast.store.decisions import name_of
from holdfast.store.port import Store

logger = logging.getLogger("holdfast.node")

PROC = Path("/proc")
SHORTEST_LEASE_MS = 1

PAUSE_S = 0.05
"""The shortest time between two looks, in which an ended lease expires."""

NAMED = 5


def process_identity() -> str:
    """Return an identity that is unique among the processes of this machine since it was booted; "" if unknown."""
    try:
        return f"{_machine()} {os.getpid()} {_started(os.getpid())}"
    except (OSError, ValueError):
        return ""


def is_here(identity: str) -> bool:
    """Return whether this process runs, or ran, where it is visible from here."""
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
    except (OSError, ValueError):  # it exists and belongs to another user, or cannot be inspected
        return False


class DeadProcesses:
    """Ends the leases of other nodes whose processes have ended, so that their runs can be claimed immediately."""

    def __init__(self, store: Store, node: str) -> None:
        self._store = store
        self._node = node
        self._process = process_identity()
        self._watched: dict[str, int] = {}
        self._has_ended = asyncio.Event()

    async def end_leases(self) -> list[str]:
        """End the leases of nodes whose process has ended, and return their names. Log those that cannot be checked."""
        if not self._process:
            return []
        others = await self._others()
        unseen = [name_of(each.node) for each in others if not is_here(each.abilities.process)]
        if unseen:
            named = ", ".join(unseen[:NAMED]) + (f" and {len(unseen) - NAMED} more" if len(unseen) > NAMED else "")
            text = (
                "node %s cannot see whether these still run, elsewhere: %s. If one is gone, its runs wait for its lease"
            )
            logger.info(text, name_of(self._node), named)
        return await self._end_leases_of(others)

    async def watch(self, look_s: float, taken_over: Callable[[list[str]], None]) -> None:
        """Do the same as soon as a process ends. Look for new nodes every `look_s`."""
        try:
            while self._process:
                self._has_ended.clear()
                with suppress(StoreError):  # then the leases expire
                    others = await self._others()
                    if gone := await self._end_leases_of(others):
                        taken_over(gone)
                    self._follow({each.abilities.process for each in others if name_of(each.node) not in gone})
                await asyncio.sleep(PAUSE_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(look_s):
                        await self._has_ended.wait()
        finally:
            for process in list(self._watched):
                self._unfollow(process)

    async def _others(self) -> list[NodeAbilities]:
        return [each for each in abilities_of(await self._store.find_nodes()) if each.node != self._node]

    async def _end_leases_of(self, others: Iterable[NodeAbilities]) -> list[str]:
        gone = []
        for other in others:
            if is_gone(other.abilities.process):
                text = "node %s takes over at once from %s, whose process has ended without stopping: see why it did"
                logger.warning(text, name_of(self._node), name_of(other.node))
                try:
                    await self._store.renew(other.node, SHORTEST_LEASE_MS)
                except NodeSuperseded:  # a process with its name has started again meanwhile
                    continue
                gone.append(name_of(other.node))
        return gone

    def _follow(self, processes: set[str]) -> None:
        """Watch those of these processes that run here, and no others."""
        for process in self._watched.keys() - processes:
            self._unfollow(process)
        for process in processes - self._watched.keys() - {self._process}:
            if not is_here(process):
                continue
            try:
                descriptor = os.pidfd_open(int(process.split(" ")[-2]))
            except ProcessLookupError:  # it has ended since it was checked
                self._has_ended.set()
                continue
            except (AttributeError, OSError, ValueError):  # the system cannot report its end
                continue
            self._watched[process] = descriptor
            asyncio.get_running_loop().add_reader(descriptor, self._ended, process)
            if is_gone(process):  # and its number belongs to another process
                self._ended(process)

    def _ended(self, process: str) -> None:
        self._unfollow(process)
        self._has_ended.set()

    def _unfollow(self, process: str) -> None:
        descriptor = self._watched.pop(process)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


def _machine() -> str:
    """Return an identity of this boot of this machine, of the processes visible from here, and of their clock.

    The start time of a process reads differently in another time namespace.
    """
    if os.readlink(PROC / "self") != str(os.getpid()):
        raise OSError(f"{PROC} shows the processes of another namespace")
    boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    namespaces = [PROC / "self/ns/pid", PROC / "self/ns/time"]  # `ns/time` exists only since Linux 5.6
    return " ".join([boot, *(os.readlink(each) for each in namespaces if each.is_symlink())])


def _started(pid: int) -> str:
    """Return when a process was started, in ticks since the boot; "" if it has ended and is not reaped yet."""
    after_name = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return "" if after_name[0] in "ZX" else after_name[19]
