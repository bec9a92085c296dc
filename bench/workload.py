"""The work that is measured: runs that do nothing but sleep again and again.

One turn of such a run is 1 update of the run, 2 events (TimerFired, TimerStarted), 1 message consumed (TimerDue) and
1 created. The first turn has the same shape: RunStarted, TimerStarted, the start message, a timer.

Everything is made before the clock of a measurement starts: what events follow is the core's work, not the store's.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from holdfast.clock import SystemClock, SystemIds
from holdfast.core.commands import Command, StartTimer, WaitSignal
from holdfast.core.events import RunQueued
from holdfast.core.messages import Message, Signal
from holdfast.core.state import RunState, state_of
from holdfast.engine.turns.draft import TurnDraft, prepare_run
from holdfast.limits import Limits
from holdfast.store.port import Created, LoadedRun, NewRun, Store, Turn
from holdfast.store.types import new_head

T = TypeVar("T")

NODE = "bench"
SECOND = 1_000_000
LEASE_MS = 3_600_000
LIMITS = Limits(signals_per_run_per_minute=1_000_000)
"""The rate limit is policy, not cost; it would stop the measurement of deliveries."""

_ids = SystemIds()
_clock = SystemClock()


def new_runs(count: int) -> list[NewRun]:
    """Make runs to create."""
    queued = RunQueued("bench", "1")
    return [prepare_run(_ids.new_id(), queued, _clock.now(), NODE) for _ in range(count)]


async def create_all(store: Store, runs: Sequence[NewRun], claim_for: str | None = NODE) -> None:
    """Create the runs, in batches. They belong to the bench's node, so that its turns can be committed."""
    if claim_for is not None:
        await store.renew(claim_for, LEASE_MS)
    for batch in batches(runs, 1_000):
        answers = await store.create(batch, claim_for)
        assert all(isinstance(answer, Created) for answer in answers), answers


class Sleeper:
    """A run that sleeps again and again, as the node that owns it sees it."""

    def __init__(self, new: NewRun) -> None:
        self._loaded = LoadedRun(head=new_head(new, NODE, 0))
        self._state = state_of(new.run_id, new.events)
        self._due = new.messages[0]

    def next_turn(self) -> Turn:
        """Wake up, and go to sleep again."""
        now = self._due.due_at or self._due.occurred_at
        draft = TurnDraft(self._state, self._loaded, now, NODE)
        draft.handle(self._due)
        draft.apply_commands([StartTimer(step_id=f"sleep#{self._state.version}", due_at=now + SECOND)])
        turn = draft.finish()
        self._state, (self._due,) = draft.state, turn.messages
        return turn


class Sleepers:
    """Many runs that sleep. A run's state is made when its first turn is."""

    def __init__(self, runs: Sequence[NewRun], seed: int | None) -> None:
        """Take the runs in the order of their creation, or, with a seed, at random."""
        self._runs = runs
        self._awake: dict[int, Sleeper] = {}
        self._chance = None if seed is None else random.Random(seed)
        self._next = 0

    def next_turns(self, batch: int, batch_count: int) -> list[list[Turn]]:
        """Make batches of turns, in the order in which they must be committed. No batch takes a run twice."""
        return [[self._sleeper(index).next_turn() for index in self._choose(batch)] for _ in range(batch_count)]

    def _choose(self, batch: int) -> list[int]:
        if self._chance is not None:
            return self._chance.sample(range(len(self._runs)), batch)
        self._next += batch
        return [index % len(self._runs) for index in range(self._next - batch, self._next)]

    def _sleeper(self, index: int) -> Sleeper:
        if index not in self._awake:
            self._awake[index] = Sleeper(self._runs[index])
        return self._awake[index]


def park(loaded: Iterable[LoadedRun], states: dict[str, RunState]) -> list[Turn]:
    """Make the turns in which runs take what is in their inbox, wait for a signal again, and are let go."""
    turns = []
    for run in loaded:
        run_id = run.head.run_id
        draft = TurnDraft(states[run_id], run, _clock.now(), NODE)
        inbox: tuple[Message | Signal, ...] = (*run.messages, *run.signals)
        for item in inbox:
            draft.handle(item)
        wait: Command = WaitSignal(step_id=f"wait#{draft.state.version}", name="go")
        draft.apply_commands([wait])
        turns.append(draft.finish(release=True))
        states[run_id] = draft.state
    return turns


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut the items into batches."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
