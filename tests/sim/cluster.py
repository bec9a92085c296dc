"""Nodes that are started, stopped, killed and replaced, over one store that is not always there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

from msgspec.structs import replace

from holdfast.app import App
from holdfast.engine.node import Node
from holdfast.engine.options import NodeOptions
from holdfast.errors import HoldfastError, NodeSuperseded
from holdfast.limits import Limits
from holdfast.testing.faults import CALM, Faults, FaultyStore, Weather
from holdfast.testing.sim_loop import SimProcess
from tests.early_first_turns import take_first_turns_early
from tests.sim.features import JUMPS_S
from tests.sim.scripts import Definitions
from tests.sim.sealed_values import sealing
from tests.sim.tries import LOST_TURNS
from tests.sim.world import World

LEASE_MS = 3_000
BUDGET_MS = 20
"""How long a write may take where nodes fail open: less than it takes in bad weather."""
NODE_TASKS = frozenset({"turns", "lease", "wake-ups", "heartbeats", "queues", "outcomes", "run queue"})


class SeededIds:
    """New ids from a seed."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def new_id(self) -> str:
        """Return a fresh id."""
        return f"{self._rng.getrandbits(64):016x}"


class SeededRng:
    """Chance from a seed."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def fraction(self) -> float:
        """Return a number from 0 (included) to 1 (excluded)."""
        return self._rng.random()


class Member:
    """One process with an app and its node."""

    def __init__(self, world: World, definitions: Definitions, weather: Weather, name: str, life: int) -> None:
        rng = Random(world.rng.random())
        self.name = name
        self.process = SimProcess(world.loop, f"{name}-{life}")
        self.store = FaultyStore(world.store, weather, Random(rng.random()))
        # Nodes need not agree on when to cut, or to give up.
        limits = Limits(rotation_steps=rng.choice((1, 3, 50)), poison_retries=rng.choice((1, 3)), lost_turns=LOST_TURNS)
        sealed = sealing(world.objects, weather, f"{name} {life}") if world.is_sealed else {}
        self.app = App("sim", limits=limits, ids=SeededIds(rng), rng=SeededRng(rng), **sealed)
        features = world.features
        versions = (("1",), "1") if features is None else features.versions_of(is_first=name == "n0")
        self.workflows = definitions.given_to(self.app, *versions)
        self._options = NodeOptions(
            lease_ms=LEASE_MS,
            safety_poll_s=4.0,
            sample_s=7.0,
            drain_s=rng.choice((0.1, 2.0)),
            claim_runs=rng.choice((1, 5, 200)),
            activities_at_once=rng.choice((2, 200)),
            cached_runs=rng.choice((1, 3, 5_000)),
            queues=("far",),
            visible_ms=2_000,
            fail_open=str(world.journals or ""),
            write_latency_budget_ms=3_000 if world.journals is None else BUDGET_MS,
        )
        self._takes_first_turns = rng.choice((True, False))
        self.node: Node | None = None
        self._should_leave: asyncio.Future[str] = world.loop.create_future()
        self.is_superseded = False
        self.life = self.process.spawn(self._live(), name="life")

    @property
    def is_open(self) -> bool:
        """Return whether it takes requests."""
        return (
            self.process.is_alive and self.node is not None and not self._should_leave.done() and not self.is_superseded
        )

    async def _live(self) -> None:
        while True:
            try:
                async with self.app.node(self.store, name=self.name, options=self._options) as self.node:
                    if self._takes_first_turns:
                        take_first_turns_early(self.node)
                    await self.node.run_until(self._should_leave)
                return
            except NodeSuperseded:
                self.is_superseded = True
                return
            except HoldfastError:
                if self._should_leave.done():
                    return  # it could not say goodbye; its lease will run out
                await asyncio.sleep(0.3)

    def leave(self) -> None:
        """Shut down in good order."""
        if not self._should_leave.done():
            self._should_leave.set_result("leave")

    def bury(self) -> None:
        """Let go of what a dead process would take with it: programs that nobody advances any more."""
        if self.node is not None:
            self.node.run_cache.close()
            self.node.starter.let_go()

    def broken_tasks(self, *, may_be_superseded: bool) -> list[str]:
        """Return what has ended by an exception and should not have ended."""
        ended = [task for task in self.process.tasks if task.done()]
        if ended:  # each is looked at once
            self.process.tasks = [task for task in self.process.tasks if not task.done()]
        problems = [
            (task, task.exception()) for task in ended if task.get_name() in NODE_TASKS and not task.cancelled()
        ]
        return [
            f"{self.process.name}: task {task.get_name()} ended: {problem!r}"
            for task, problem in problems
            if problem is not None and not (may_be_superseded and isinstance(problem, NodeSuperseded))
        ]


class Cluster:
    """The nodes, and what befalls them."""

    def __init__(self, world: World, size: int, pauses_s: Sequence[float]) -> None:
        self._world = world
        self._pauses_s = pauses_s
        self._definitions = Definitions(world)
        self._rng = Random(f"{world.rng.random()} chaos")
        self.weather = Weather()
        self.members: list[Member | None] = [None] * size
        self.all: list[Member] = []
        for place in range(size):
            self._start(place)

    def _start(self, place: int) -> None:
        member = Member(self._world, self._definitions, self.weather, f"n{place}", len(self.all))
        self._world.note(f"start  {member.process.name}", "starts")
        self.members[place] = member
        self.all.append(member)

    def pick(self, rng: Random) -> Member | None:
        """Return a node that takes requests, or None."""
        open_ones = [member for member in self.members if member is not None and member.is_open]
        return rng.choice(open_ones) if open_ones else None

    async def rage(self, until_s: float) -> None:
        """Do harm until this time, one thing after another."""
        loop, rng = self._world.loop, self._rng
        self.weather.faults = Faults(
            latency_s=rng.choice((0.0, 0.002, 0.05)),
            refused=rng.choice((0.0, 0.02, 0.1)),
            unanswered=rng.choice((0.0, 0.02, 0.1)),
            repeated=rng.choice((0.0, 0.1)),
            unheard=rng.choice((0.0, 0.3, 1.0)),
        )
        if self._world.journals is not None:  # commits that are slow, and some that fail
            self.weather.faults = replace(self.weather.faults, latency_s=0.1, refused=0.1)
        self._world.note(f"weather {self.weather.faults}")
        pause_s = rng.choice(self._pauses_s)
        harms = [self._kill, self._fuse, self._stop, self._expire, self._down, self._leave, self._supersede]
        if self._world.features is not None:
            harms.append(self._jump)
        while loop.time() < until_s:
            await asyncio.sleep(rng.expovariate(1.0 / pause_s))
            self.watch()
            place = rng.randrange(len(self.members))
            member = self.members[place]
            if member is not None and member.process.is_alive and not member.process.is_stopped:
                await rng.choice(harms)(member)
            if member is not None and (not member.process.is_alive or member.life.done()):
                self.members[place] = None
                loop.create_task(self._replace(place))

    async def _replace(self, place: int) -> None:
        await asyncio.sleep(self._rng.choice((0.01, 1.0, 6.0)))
        self._start(place)

    async def _kill(self, member: Member) -> None:
        self._world.note(f"kill   {member.process.name}", "kills")
        member.process.kill()

    async def _fuse(self, member: Member) -> None:
        self._world.note(f"fuse   {member.process.name}", "kills")
        member.process.fuse = self._rng.randint(0, 60)
        await asyncio.wait([member.process.death], timeout=3.0)
        member.process.fuse = None

    async def _stop(self, member: Member) -> None:
        duration_s = self._rng.choice((0.1, 2.0, 4.0, 9.0))
        self._world.note(f"stop   {member.process.name} for {duration_s} s", "stops")
        member.process.stop()
        self._world.loop.call_later(duration_s, member.process.go_on)

    async def _expire(self, member: Member) -> None:
        self._world.note(f"expire {member.process.name}", "lost leases")
        if member.node is not None:
            with suppress(NodeSuperseded):
                await self._world.store.renew(member.node.name, 1)

    async def _supersede(self, member: Member) -> None:
        """Start a process under the name of one that is alive, and maybe frozen: the older one has to find out."""
        self._world.note(f"double {member.process.name}", "doubles")
        if self._rng.random() < 0.5:
            member.process.stop()
            self._world.loop.call_later(self._rng.choice((0.1, 4.0)), member.process.go_on)
        self._start(self.members.index(member))

    async def _down(self, member: Member) -> None:
        duration_s = self._rng.choice((0.05, 1.0, 5.0))
        self._world.note(f"store down for {duration_s} s", "outages")
        self.weather.is_down = True
        self._world.loop.call_later(duration_s, setattr, self.weather, "is_down", False)

    async def _jump(self, member: Member) -> None:
        seconds = self._rng.choice(JUMPS_S)
        self._world.note(f"jump   {seconds} s", "jumps")
        self._world.store.jump(seconds)

    async def _leave(self, member: Member) -> None:
        self._world.note(f"leave  {member.process.name}", "leaves")
        member.leave()
        await asyncio.wait([member.process.death, member.life], timeout=3.0, return_when=asyncio.FIRST_COMPLETED)

    def heal(self) -> None:
        """End all harm, and make sure that there are nodes."""
        self._world.note("heal")
        self.weather.faults = CALM
        self.weather.is_down = False
        for place, member in enumerate(self.members):
            if member is not None:
                member.process.fuse = None
                if member.process.is_stopped:
                    member.process.go_on()
                if not member.process.is_alive or not member.is_open:
                    self._start(place)
        self._world.loop.create_task(self._tend())

    async def _tend(self) -> None:
        """Start nodes again that runs have ended, as a supervisor does."""
        while True:
            await asyncio.sleep(0.5)
            for place, member in enumerate(self.members):
                if member is None or not member.process.is_alive or member.life.done():
                    self._start(place)

    def watch_names(self) -> None:
        """Note nodes that live on although another process has their name."""
        alive = [member for member in self.all if member.process.is_alive and not member.life.done()]
        for name, count in Counter(member.name for member in alive).items():
            if count > 1:
                self._world.violate(f"{name} is not superseded: {count} processes live under this name")

    def watch(self) -> None:
        """Note nodes whose own tasks have failed."""
        names = Counter(member.name for member in self.all)
        for member in self.all:
            for problem in member.broken_tasks(may_be_superseded=names[member.name] > 1):
                self._world.violate(problem)


async def in_process(member: Member, coro: Any, within_s: float) -> Any:
    """Run a coroutine in a member's process; raise `TimeoutError` if there is no answer."""
    task = member.process.spawn(coro)
    await asyncio.wait([task, member.process.death], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        raise TimeoutError
    return task.result()
