"""Creates runs on this node, many at a time, and begins them without reading them from the store.

**A special path: first turns before creation.** `FirstTurns` saves one commit for each run that begins with an
activity. Without it a run of three steps takes 15 % more instructions on SQLite (2.87 million instead of 2.49 million);
`python -m bench --only paths` measures it again. Nothing outside this module depends on it.

The commit that creates the run also writes its first turn: the run is created with its first attempts already started.
If the creation fails nothing is lost, because a program has no effect until its turn is durable. Some turns cannot be
part of a creation: those that dispatch nothing, end the run, or concern other runs and nodes. Then the run is created
as it was requested, with its program one turn ahead, and its first batch commits that turn.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.event_writer import starts_run
from holdfast.core.instants import Instant
from holdfast.core.state import RUNNING
from holdfast.engine.batcher import Batcher
from holdfast.engine.turns.draft import TurnDraft
from holdfast.engine.turns.execute import CachedRun, RunCache, take_turn
from holdfast.engine.turns.owned_runs import OwnedRuns
from holdfast.errors import EngineError, HoldfastError, LeaseExpired, StoreError
from holdfast.limits import Limits
from holdfast.program.loop import outside_loop
from holdfast.store.port import Created, Existing, LoadedRun, NewRun, Refused, Store, Turn
from holdfast.store.types import created_run, load_each

CREATE_RUNS = 500
"""The maximum number of runs that one call creates."""

LOOKS_S = (0.2, 1.0, 5.0, 30.0)
"""Pauses before each look for runs whose creation was not answered: the store may still finish it after the connection
is lost.
"""

Answer = Created | Existing | Refused


class Start(NamedTuple):
    """A run to create. `is_unheard_of`: no other caller can have requested it, or know its id."""

    new: NewRun
    now: Instant
    is_unheard_of: bool


class StartingNode(Protocol):
    """The node that the runs are created for."""

    name: str

    @property
    def has_room(self) -> bool:
        """Whether a run that begins now can stay in memory."""
        ...

    def begin(self, new: NewRun, now: Instant) -> None:
        """Continue a run that was created."""
        ...

    def owns(self, run_id: str) -> bool:
        """Return whether the node owns the run already."""
        ...

    def find(self, run_id: str) -> None:
        """Take a run that the node owns, if it still does between two turns."""
        ...


class First(Struct, frozen=True):
    """A run to create, its program after the first turn, and that turn if the creation includes it."""

    new: NewRun
    loaded: LoadedRun
    cached: CachedRun
    draft: TurnDraft
    turn: Turn | None


class FirstTurns:
    """Takes the first turns of runs that are about to be created for a node."""

    def __init__(self, owned_runs: OwnedRuns, run_cache: RunCache, limits: Limits) -> None:
        self._owned_runs = owned_runs
        self._run_cache = run_cache
        self._limits = limits

    def take(self, new: NewRun, now: Instant) -> First | None:
        """Take the first turn of a run, or return None if the run has to be created first."""
        if new.admission is not None or new.signals or not any(map(starts_run, new.messages)):
            return None  # without that message it waits for approval
        if self._owned_runs.tried_now and self._owned_runs.under_try():
            return None  # a run that is being tried would be blamed if this turn ended the process
        node = self._owned_runs.name
        loaded, cached = created_run(new, node, now), self._run_cache.beginning(new)
        if cached is None:
            return None
        draft, problem = take_turn(cached, loaded, (), now, node, self._limits)
        if draft.dispatch:
            self._owned_runs.dispatcher.leave_unknown(draft)
        if problem is None and draft.dispatch:
            turn = draft.finish()
            begun = _begun(new, turn)
            if begun is not None:
                return First(begun, loaded, cached, draft, turn)
        return First(new, loaded, cached, draft, None)

    def begin(self, first: First, now: Instant) -> None:
        """Continue a run that was created: perform the effects of its first turn, if that is durable."""
        if first.turn is None:
            self._owned_runs.begin_with(first.loaded, first.cached)
            return
        owned = self._owned_runs.hold(first.loaded, first.cached)
        self._owned_runs.perform_effects(owned, first.cached, first.draft, first.turn, now)
        self._run_cache.trim()


def _begun(new: NewRun, turn: Turn) -> NewRun | None:
    """Return the run after the turn, or None if a creation cannot include everything that the turn writes."""
    others = turn.jobs or turn.jobs_closed or turn.starts or turn.sends or turn.dead or turn.received or turn.streams
    if others or turn.snapshot.status is not RUNNING:
        return None
    return replace(
        new,
        snapshot=turn.snapshot,
        events=new.events + turn.events,
        messages=turn.messages,
        waits_opened=turn.waits_opened,
        tasks=turn.tasks,
        records=turn.records,
    )


class Starter:
    """Creates runs: for the node, with their first turns where possible, or for no node, without first turns.

    The first turns run in the context in which the node was made, independent of the caller.
    """

    def __init__(self, store: Store, node: StartingNode, lease_ms: int, first_turns: FirstTurns | None) -> None:
        self._store = store
        self._node = node
        self._owner = None if first_turns is None else node.name
        self._lease_ms = lease_ms
        self._first_turns = first_turns
        self._batcher: Batcher[Start, Answer] = Batcher(
            self._create, _stopped, CREATE_RUNS, "create runs", self._begin_all
        )
        self._firsts: Sequence[First | None] = ()
        self._to_begin: list[tuple[Start, First | None, bool]] = []
        """The created runs, and whether the node owns them. They begin after their callers have their answers."""
        self.creating: frozenset[str] = frozenset()
        """The runs with a creation that is not answered yet."""
        self._answered = asyncio.Event()
        self._looking: set[asyncio.Task[None]] = set()

    def create(self, new: NewRun, now: Instant, *, is_unheard_of: bool = False) -> "asyncio.Future[Answer]":
        """Create a run, batched with others that are being created; return a future of the answer.

        With `is_unheard_of` its first turn may be taken before it is created.
        """
        return self._batcher.ask(Start(new, now, is_unheard_of))

    async def begun(self, claimed: Iterable[LoadedRun]) -> None:
        """Wait until the runs among these that are still being created here have begun.

        Otherwise a run that is created with activities already started would be mistaken for one that lost its node.
        """
        run_ids = {loaded.head.run_id for loaded in claimed}
        while not self.creating.isdisjoint(run_ids):
            self._answered.clear()
            await self._answered.wait()

    async def stop(self) -> None:
        """Cancel the running creations; their outcome is then unknown."""
        for task in self._looking:
            task.cancel()
        await self._batcher.stop()
        if self._looking:
            await asyncio.wait(self._looking)
        self.let_go()

    def let_go(self) -> None:
        """Close the programs of runs that are being created."""
        for first in self._firsts:
            if first is not None:
                first.cached.close()

    async def _create(self, batch: list[Start], *, is_again: bool = False) -> list[Answer | Exception]:
        firsts = self._firsts = [None] * len(batch) if is_again else self._take_first_turns(batch)
        runs = [start.new if first is None else first.new for start, first in zip(batch, firsts, strict=True)]
        self.creating = frozenset([new.run_id for new in runs])
        answers: list[Answer | Exception]
        try:
            answers, is_sure = await self._create_runs(runs)
        except Exception as problem:
            answers, is_sure = [problem] * len(runs), not isinstance(problem, StoreError | LeaseExpired)
        finally:
            self.creating = frozenset()
            self._answered.set()
        self._firsts = ()
        again: list[int] = []
        for place, (start, first, answer) in enumerate(zip(batch, firsts, answers, strict=True)):
            self._to_begin.append((start, first, isinstance(answer, Created) and answer.epoch > 0))
            if not is_again and _may_be_unfit(answer, first):
                again.append(place)
        if not is_sure:
            self._look_for([first.new.run_id for first in firsts if first is not None and first.turn is not None])
        if again:
            self._begin_all()  # before anything is awaited: they are no longer being created
            later = await self._create([batch[place] for place in again], is_again=True)
            for place, answer in zip(again, later, strict=True):
                answers[place] = answer
        return answers

    def _begin_all(self) -> None:
        created, self._to_begin = self._to_begin, []
        for start, first, is_owned in created:
            if first is None:
                if is_owned:
                    self._node.begin(start.new, start.now)
            elif is_owned and self._first_turns is not None:
                self._first_turns.begin(first, start.now)
            else:
                first.cached.close()

    def _take_first_turns(self, batch: list[Start]) -> list[First | None]:
        first_turns = self._first_turns
        if first_turns is None or not self._node.has_room:
            return [None] * len(batch)
        with outside_loop():
            return [first_turns.take(start.new, start.now) if start.is_unheard_of else None for start in batch]

    def _look_for(self, run_ids: list[str]) -> None:
        if run_ids:
            task = asyncio.create_task(self._look(run_ids), name="look for runs")
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    async def _look(self, run_ids: list[str]) -> None:
        """Look for runs whose creation was not answered: one that has started activities would not become ready by
        itself.

        A run that is found may have been taken and released here while the answer was on its way: the node looks again.
        """
        looks = 0
        while run_ids and looks < len(LOOKS_S):
            await asyncio.sleep(LOOKS_S[looks])
            try:
                found = [run for run in await load_each(self._store.load, run_ids) if isinstance(run, LoadedRun)]
            except StoreError:
                continue
            looks += 1
            for loaded in found:
                run_ids.remove(loaded.head.run_id)
                if loaded.head.lease_owner == self._owner and not self._node.owns(loaded.head.run_id):
                    self._node.find(loaded.head.run_id)

    async def _create_runs(self, runs: list[NewRun]) -> tuple[list[Answer | Exception], bool]:
        """Create runs; return also whether it is certain that the runs that this call did not create do not exist."""
        try:
            return [*await self._store.create(runs, claim_for=self._owner)], True
        except LeaseExpired:  # the loop was blocked for longer than the lease; some may have been created before
            assert self._owner is not None
            await self._store.renew(self._owner, self._lease_ms)
            return [*await self._store.create(runs, claim_for=self._owner)], False


def _may_be_unfit(answer: Answer | Exception, first: First | None) -> bool:
    """Return whether a creation may have failed because the first turn of some run cannot be stored."""
    if isinstance(answer, Exception):
        return not isinstance(answer, HoldfastError)
    return isinstance(answer, Refused) and first is not None and first.turn is not None


def _stopped(start: Start) -> EngineError:
    run_id = start.new.run_id
    problem = f"the node was stopped while run {run_id} was being created: it may be there, or not"
    if not start.is_unheard_of:
        problem += "; ask again with the same id"
    return EngineError(problem)
