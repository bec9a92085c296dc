"""Real node processes, and what is done to them: killed, frozen for longer than their lease, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from holdfast.cli.exit_codes import UNAVAILABLE
from tests.chaos import diary, programs
from tests.chaos.forks import Fork, Forks
from tests.chaos.stores import HarmedStore

DELAY_US = 100_000
SENDING_US = 100_000
"""How long it may take until a process notices that it is killed."""

OPENED_WITHIN_S = 60.0
CONNECT_WITHIN_US = 15_000_000
"""How long a node tries to connect before it ends, at most: an outage in that time is a reason to end."""
OUTAGE_FELT_US = 5_000_000
"""How long after an outage a node may end because of it."""


def now_us() -> int:
    """Return the time as stores of this machine tell it."""
    return time.time_ns() // 1_000


async def passed(over: asyncio.Event, seconds: float) -> bool:
    """Let time pass; return True, earlier, if it is over."""
    try:
        async with asyncio.timeout(seconds):
            return await over.wait()
    except TimeoutError:
        return False


@dataclass(frozen=True)
class Loss:
    """A life that stopped at an instant, for good or until others have taken over."""

    kind: str
    at: int


@dataclass
class Chronicle:
    """What was done, when, to whom; and what should not have happened."""

    losses: dict[str, list[Loss]] = field(default_factory=dict)
    outages: list[tuple[int, int]] = field(default_factory=list)
    delays: list[tuple[int, int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def loss_after(self, name: str, at: int) -> Loss | None:
        """Return the first time after an instant that a life was lost."""
        return next((loss for loss in self.losses.get(name, ()) if loss.at >= at - SENDING_US), None)

    def excused_us(self, begin: int, end: int) -> int:
        """Return how much of a time the store was away, or the machine so busy that nothing went on in this process."""
        excuses = sorted(
            (max(first, begin), min(last, end)) for first, last in self.outages + self.delays if last > first
        )
        total, until = 0, begin
        for first, last in excuses:
            total += max(0, last - max(first, until))
            until = max(until, last)
        return total

    async def note_delays(self) -> None:
        """Note, without end, when this process was woken later than it asked for."""
        while True:
            asked = now_us() + DELAY_US
            await asyncio.sleep(DELAY_US / 1e6)
            if now_us() > asked + DELAY_US:
                self.delays.append((asked, now_us()))

    def was_out(self, since: int, until: int) -> bool:
        """Return whether the database was away at some time in between, or shortly before."""
        return any(begin <= until and since <= end + OUTAGE_FELT_US for begin, end in self.outages)


@dataclass
class Slot:
    """A place for a node: one life after another."""

    number: int
    life: int = 0
    process: Fork | None = None
    is_busy: bool = False

    @property
    def name(self) -> str:
        """What the present life is called in histories, before the dash."""
        return f"n{self.number}l{self.life}"


class Fleet:
    """So many nodes on one store."""

    def __init__(
        self, store: HarmedStore, nodes: int, folder: Path, lease_s: float, rng: Random, chronicle: Chronicle
    ) -> None:
        self._place = store
        self._folder = folder
        self._lease_s = lease_s
        self._rng = rng
        self._chronicle = chronicle
        self._slots = [Slot(number) for number in range(nodes)]
        self._watching: dict[int, asyncio.Task[None]] = {}
        self._forks = Forks()
        self.plant = ""

    async def open(self) -> None:
        """Start every node."""
        await self._forks.open(self._environment())
        await asyncio.gather(*(self._begin(slot) for slot in self._slots))

    async def close(self) -> None:
        """Tell every node to end, and wait until it has, in order."""
        for slot in self._slots:
            await self._look_away(slot)
            if slot.process is not None and slot.process.returncode is None:
                slot.process.send_signal(signal.SIGCONT)
                slot.process.terminate()
        for slot in self._slots:
            if slot.process is not None:
                code = await asyncio.wait_for(slot.process.wait(), OPENED_WITHIN_S)
                log = self._folder / f"{slot.name}.log"
                has_begun = log.exists() and "works on" in log.read_text()
                if code != 0 and has_begun:
                    self._chronicle.violations.append(f"node {slot.name} was told to end, and ended with {code}")

    async def abandon(self) -> None:
        """Leave no process behind, whatever went wrong."""
        for slot in self._slots:
            await self._look_away(slot)
            if slot.process is not None and slot.process.returncode is None:
                slot.process.kill()
                await slot.process.wait()
        await self._forks.close()

    async def kill_some(self, over: asyncio.Event, every_s: float | None = None) -> None:
        """Kill a node now and then, or so often, until it is over, and start another in its place."""
        while not await passed(over, every_s or self._rng.uniform(0.5, 5.0)):
            with self._chosen() as slot:
                if slot is not None and await self._take_down(slot):
                    await asyncio.sleep(0.0 if every_s else self._rng.uniform(0.0, 1.0))
                    await self._begin(slot)

    async def freeze_some(self, over: asyncio.Event) -> None:
        """Freeze a node now and then, until it is over, for longer than its lease, and let it go on."""
        while not await passed(over, self._rng.uniform(1.0, self._lease_s)):
            with self._chosen() as slot:
                process = slot.process if slot is not None else None
                if slot is None or process is None or process.returncode is not None:
                    continue
                self._lose(slot, "frozen")
                with suppress(ProcessLookupError):  # it ends by itself in this moment: who watches notes it
                    begin = now_us()
                    process.send_signal(signal.SIGSTOP)
                    is_held = await asyncio.to_thread(self._place.is_held)
                    await asyncio.sleep(self._lease_s + self._rng.uniform(0.5, 3.0))
                    process.send_signal(signal.SIGCONT)
                    if is_held:
                        self._chronicle.counts["frozen with the store's lock"] += 1
                        self._chronicle.outages.append((begin, now_us()))

    def refusals(self) -> int:
        """Return how many turns of nodes were refused, by what they said."""
        return sum(path.read_text().count("a turn was not committed") for path in self._folder.glob("n*.log"))

    @contextmanager
    def _chosen(self) -> Iterator[Slot | None]:
        """Give a node to harm, which nobody else harms meanwhile. One at least is left alone."""
        calm = [slot for slot in self._slots if not slot.is_busy]
        if len(calm) < 2:
            yield None
            return
        slot = self._rng.choice(calm)
        slot.is_busy = True
        yield slot
        slot.is_busy = False

    async def _take_down(self, slot: Slot) -> bool:
        """Kill a node; return False if it is not running."""
        assert slot.process is not None
        if slot.process.returncode is not None:
            return False
        await self._look_away(slot)
        self._lose(slot, "killed")
        slot.process.kill()
        await slot.process.wait()
        return True

    def _lose(self, slot: Slot, kind: str) -> None:
        self._chronicle.losses.setdefault(slot.name, []).append(Loss(kind, now_us()))
        self._chronicle.counts[kind] += 1

    async def _look_away(self, slot: Slot) -> None:
        watching = self._watching.pop(slot.number, None)
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])

    async def _begin(self, slot: Slot) -> None:
        slot.life += 1
        slot.process = await self._forks.fork(
            ["node", f"{programs.__name__}:app", "--store", self._place.url, "--name", slot.name],
            self._folder / f"{slot.name}.log",
        )
        self._watching[slot.number] = asyncio.create_task(self._watch(slot, slot.process))

    async def _watch(self, slot: Slot, process: Fork) -> None:
        """Start a node again that ended by itself. It may, if there was no database; else it is noted."""
        begun = now_us()
        code = await process.wait()
        said = (self._folder / f"{slot.name}.log").read_text()
        says_why = said.splitlines()[-1:] and said.splitlines()[-1].startswith("holdfast: ")
        since = max(begun, now_us() - CONNECT_WITHIN_US)
        if code != UNAVAILABLE or not says_why or not self._chronicle.was_out(since, now_us()):
            self._chronicle.violations.append(f"node {slot.name} ended by itself with {code}: {said[-500:]}")
        self._chronicle.counts["found no store"] += 1
        await asyncio.sleep(0.2)
        await self._begin(slot)

    def _environment(self) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        return {
            **mine,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, sys.path))),
            programs.LEDGER: str(self._folder / "ledger"),
            diary.DIARY: str(self._folder / "diary"),
            programs.LEASE_MS: str(int(self._lease_s * 1_000)),
            programs.PLANT: self.plant,
        }
