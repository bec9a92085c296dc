"""Runs that are started here: created many at a time, and begun without asking the store for them again."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.core.instants import Instant
from holdfast.engine.batcher import Batcher
from holdfast.engine.start.first_turns import First, FirstTurns
from holdfast.errors import EngineError, HoldfastError, LeaseExpired, StoreError
from holdfast.program.loop import outside_loop
from holdfast.store.port import Created, Existing, LoadedRun, NewRun, Refused, Store
from holdfast.store.types import load_each

CREATE_RUNS = 500
"""How many runs are created by one call at most."""

LOOKS_S = (0.2, 1.0, 5.0, 30.0)
"""Pauses before each look for runs whose creation was not answered: what a lost connection began may end later."""

KEPT_S = 0.1
"""How long a node that came by a run too early waits at least before it claims again: it would come by it again."""

Answer = Created | Existing | Refused


class Start(NamedTuple):
    """A run to create. `is_unheard_of`: no other caller can have asked for it, or know its id."""

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

    def begin(self, new: NewRun, now: Instant, first: First | None) -> None:
        """Go on with a run that was created, as it was asked for or with its first turn."""
        ...

    def add(self, loaded: LoadedRun) -> None:
        """Take a run that was found in the store."""
        ...

    def owns(self, run_id: str) -> bool:
        """Return whether the node owns the run already."""
        ...

    def find(self, run_id: str) -> None:
        """Take a run that belongs to the node, if that is still so between two turns."""
        ...


class Starter:
    """Creates runs: for the node, with their first turns where these can be taken before; or for no node, without.

    The first turns run in the context that the node was made in, whichever caller asks.
    """

    def __init__(self, store: Store, node: StartingNode, lease_ms: int, first_turns: FirstTurns | None) -> None:
        self._store = store
        self._node = node
        self._owner = None if first_turns is None else node.name
        self._lease_ms = lease_ms
        self._first_turns = first_turns
        self._batcher: Batcher[Start, Answer] = Batcher(self._create, _stopped, CREATE_RUNS, "create runs")
        self._firsts: Sequence[First | None] = ()
        self._under_way: set[str] = set()
        self._at_work: dict[str, LoadedRun | None] = {}
        self.pause_s = 0.0
        """How long the node has to wait before it claims again."""
        self._looking: set[asyncio.Task[None]] = set()

    async def create(self, new: NewRun, now: Instant, *, is_unheard_of: bool = False) -> Answer:
        """Create a run, together with others that are being created.

        With `is_unheard_of` its first turn may be taken before it is created.
        """
        return await self._batcher.ask(Start(new, now, is_unheard_of))

    def keeps(self, loaded: LoadedRun) -> bool:
        """Note that the node came by a run before the answer to its creation did; return whether to wait for that.

        A run that is created at work waits: it is not to be taken for one that lost its node.
        """
        run_id = loaded.head.run_id
        self._under_way.discard(run_id)
        if run_id not in self._at_work:
            return False
        self._at_work[run_id] = loaded
        self.pause_s = KEPT_S
        return True

    async def stop(self) -> None:
        """Give up what is under way. Whether it is created is not known then."""
        for task in self._looking:
            task.cancel()
        await self._batcher.stop()
        if self._looking:
            await asyncio.wait(self._looking)
        self.let_go()

    def let_go(self) -> None:
        """Let go of programs whose runs are being created."""
        for first in self._firsts:
            if first is not None:
                first.drafted.cached.close()

    async def _create(self, batch: list[Start], *, is_again: bool = False) -> list[Answer | Exception]:
        firsts = self._firsts = [None] * len(batch) if is_again else self._take_first_turns(batch)
        runs = [start.new if first is None else first.new for start, first in zip(batch, firsts, strict=True)]
        self._under_way.update(new.run_id for new in runs)
        self._at_work = {first.new.run_id: None for first in firsts if first is not None and first.is_at_work}
        answers: list[Answer | Exception]
        try:
            answers, is_sure = await self._create_runs(runs)
        except Exception as problem:
            answers, is_sure = [problem] * len(runs), not isinstance(problem, StoreError | LeaseExpired)
        finally:
            mine = {new.run_id for new in runs} & self._under_way
            self._under_way -= mine
            found, self._at_work = self._at_work, {}
            self.pause_s = 0.0
        self._firsts = ()
        again: list[int] = []
        for place, (start, first) in enumerate(zip(batch, firsts, strict=True)):
            answer = answers[place]
            is_begun = isinstance(answer, Created) and answer.epoch and (start.new.run_id in mine or _is_at_work(first))
            if is_begun:
                self._node.begin(start.new, start.now, first)
            elif first is not None:
                first.drafted.cached.close()
            if not is_again and _may_be_unfit(answer, first):
                again.append(place)
        for loaded in found.values():
            if loaded is not None:
                self._node.add(loaded)
        if not is_sure:
            self._look_for([run_id for run_id, loaded in found.items() if loaded is None])
        if again:
            later = await self._create([batch[place] for place in again], is_again=True)
            for place, answer in zip(again, later, strict=True):
                answers[place] = answer
        return answers

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
        """Look for runs whose creation was not answered: one that is at work would not become ready by itself.

        A run that is found may have been taken and let go here while the answer was on its way: the node looks again.
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
        """Create runs; return also whether it is certain that those which are not created by this call do not exist."""
        try:
            return [*await self._store.create(runs, claim_for=self._owner)], True
        except LeaseExpired:  # the loop was blocked for longer than the lease; some may have been created before
            assert self._owner is not None
            await self._store.renew(self._owner, self._lease_ms)
            return [*await self._store.create(runs, claim_for=self._owner)], False


def _is_at_work(first: First | None) -> bool:
    return first is not None and first.is_at_work


def _may_be_unfit(answer: Answer | Exception, first: First | None) -> bool:
    """Return whether a creation may have failed because of some run's first turn, which cannot be stored."""
    if isinstance(answer, Exception):
        return not isinstance(answer, HoldfastError)
    return isinstance(answer, Refused) and first is not None


def _stopped(start: Start) -> EngineError:
    run_id = start.new.run_id
    problem = f"the node was stopped while run {run_id} was being created: it may be there, or not"
    if not start.is_unheard_of:
        problem += "; ask again with the same id"
    return EngineError(problem)
