"""A process that forks workers, reads what they acknowledge, and kills each at a random moment.

It has one thread and no event loop of its own, and everything is imported before the first fork, so a life costs
milliseconds. A victim dies before its first word, in the middle of a verb, or between two of them. Several lanes of
victims may work on one file at the same time; a life belongs to a lane and begins where the last one of it ended.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.killed_worker import KilledWorker, pack, unpack
from tests.crash.ledger import Intent, Ledger

ROOT = Path(__file__).parents[2]
LONGEST_LIFE_S = 60.0
"""A victim that says nothing for so long hangs, and that is a failure."""


@dataclass(frozen=True)
class KillPlan:
    """What to do: kill so many victims that work on one file, in so many lanes."""

    path: Path
    seed: int
    deaths: int
    lanes: int = 1


@dataclass
class Report:
    """How it went: what was acknowledged, what each lane left unanswered, and where the victims died."""

    ledger: Ledger
    unanswered: list[Intent]
    deaths: dict[str, int]


def run_kill_loop(order: KillPlan, timeout_s: float) -> Report:
    """Run the loop in a process of its own."""
    kill_loop = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.kill_loop"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        answer, _ = kill_loop.communicate(pickle.dumps(order), timeout=timeout_s)
    finally:
        if kill_loop.poll() is None:
            os.killpg(kill_loop.pid, signal.SIGKILL)
            kill_loop.communicate()
    assert kill_loop.returncode == 0, "the loop broke down; see its traceback above"
    report: Report = pickle.loads(answer)
    return report


@dataclass
class Lane:
    """A succession of lives: the present victim, and what the ones before it left undone."""

    number: int
    pid: int = 0
    pipe: int = -1
    buffer: bytes = b""
    life: int = 0
    intents: int = 0
    dies_after_intents: int = 0
    delay_s: float = 0.0
    dies_at: float = field(default=0.0)
    intent: Intent | None = None
    repeats: Intent | None = None


class KillLoop:
    """The lanes, and everything that their victims have said."""

    def __init__(self, order: KillPlan) -> None:
        self._order = order
        self._chance = random.Random(order.seed)
        self._lanes = [Lane(number) for number in range(order.lanes)]
        self.report = Report(Ledger(), [], {"silent": 0, "in a verb": 0, "between verbs": 0})

    def work(self) -> None:
        """Bring forth and kill as many victims as ordered."""
        for _ in range(self._order.deaths):
            for lane in self._lanes:
                if lane.pid == 0:
                    self._bear(lane)
            self._kill(self._next_to_die())
        for lane in self._living():
            self._kill(lane)
        self.report.unanswered = [lane.intent for lane in self._lanes if lane.intent is not None]

    def abandon(self) -> None:
        """Leave no victim behind when something has gone wrong."""
        for lane in self._living():
            os.kill(lane.pid, signal.SIGKILL)
            os.waitpid(lane.pid, 0)

    def _living(self) -> list[Lane]:
        return [lane for lane in self._lanes if lane.pid]

    def _bear(self, lane: Lane) -> None:
        lane.life += 1
        lane.repeats, lane.intents, lane.buffer = lane.intent, 0, b""
        lane.dies_after_intents = self._chance.choice((0, 1, 1, 2, 3, 5, 8))
        lane.delay_s = self._chance.uniform(0, 0.02) if lane.dies_after_intents == 0 else self._chance.uniform(0, 0.002)
        lane.dies_at = time.monotonic() + (lane.delay_s if lane.dies_after_intents == 0 else LONGEST_LIFE_S)
        lane.pipe, far = os.pipe()
        lane.pid = os.fork()
        if lane.pid == 0:
            for near in {near.pipe for near in self._lanes} - {-1}:
                os.close(near)
            _live(self._order, lane, far)
        os.close(far)

    def _next_to_die(self) -> Lane:
        """Listen to all victims until the time of one has come."""
        while True:
            lane = min(self._lanes, key=lambda lane: lane.dies_at)
            left = lane.dies_at - time.monotonic()
            if left <= 0:
                assert lane.intents >= lane.dies_after_intents, "a victim hangs"
                return lane
            ready, _, _ = select.select([lane.pipe for lane in self._lanes], [], [], left)
            for lane in self._lanes:
                if lane.pipe in ready:
                    assert self._listen(lane), "a victim ended by itself; see its traceback above"

    def _listen(self, lane: Lane) -> bool:
        """Take what the victim has said; return whether it may say more."""
        data = os.read(lane.pipe, 1 << 20)
        notes, lane.buffer = unpack(lane.buffer + data)
        for note in notes:
            if isinstance(note, Intent):
                assert lane.intents or lane.repeats is None or note == lane.repeats
                lane.intent = note
                lane.intents += 1
                if lane.intents == lane.dies_after_intents:
                    lane.dies_at = time.monotonic() + lane.delay_s
            else:
                assert lane.intent is not None
                is_repeated = lane.repeats is not None and lane.intents == 1
                self.report.ledger.enter(lane.intent, note, is_repeated=is_repeated)
                lane.intent = None
        return bool(data)

    def _kill(self, lane: Lane) -> None:
        os.kill(lane.pid, signal.SIGKILL)
        _, status = os.waitpid(lane.pid, 0)
        assert os.WIFSIGNALED(status), f"a victim ended by itself: {status}"
        while self._listen(lane):
            pass
        os.close(lane.pipe)
        lane.pid, lane.pipe = 0, -1
        where = "silent" if lane.intents == 0 else "between verbs" if lane.intent is None else "in a verb"
        self.report.deaths[where] += 1


def _live(order: KillPlan, lane: Lane, pipe: int) -> Any:
    """Be a victim. Ends by os._exit, so that nothing of its parent's is cleaned up twice."""

    def tell(note: object) -> None:
        data = pack(note)
        while data:
            data = data[os.write(pipe, data) :]

    try:
        name = f"{lane.number}-{lane.life:05}"
        victim = KilledWorker(order.path, name, f"node-{lane.number}", f"{order.seed}-{name}", tell)
        asyncio.run(victim.live(lane.intent))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        os._exit(1)


def main() -> None:
    """Take an order from stdin, carry it out, and report on stdout."""
    order: KillPlan = pickle.load(sys.stdin.buffer)
    gc.freeze()
    kill_loop = KillLoop(order)
    try:
        kill_loop.work()
    finally:
        kill_loop.abandon()
    sys.stdout.buffer.write(pickle.dumps(kill_loop.report))


if __name__ == "__main__":
    from tests.crash import kill_loop

    kill_loop.main()  # not this module's own: what it pickles must be found under its real name
