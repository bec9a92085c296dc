"""A node: claims runs, takes their turns, commits them together, and carries out what follows.

One loop, the pump, does all of it. Each round takes what there is (runs claimed, outcomes of this node's own
activities), lets every run take its turn, commits all turns with one call, and only then performs effects. With
nothing to do it sleeps until the next due instant or until somebody rings: nothing is swept or polled, but for a
look every `safety_poll_s`, in case a ring was lost.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Raw, Struct
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core.decide import Input
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.messages import NodeLost
from holdfast.core.state import OpenStep, RunState
from holdfast.engine.activities import Job, Outcome, Workers
from holdfast.engine.creations import Creations
from holdfast.engine.finishes import Finishes
from holdfast.engine.live import Definitions, LiveRun, pause_turn, revive, take_turn
from holdfast.engine.turn import TurnDraft, aside_turn
from holdfast.errors import (
    HistoryGap,
    HoldfastError,
    LeaseExpired,
    NotDurable,
    NotFound,
    RunawayWorkflow,
    RunError,
    StoreCorrupt,
    StoreError,
    TurnRefused,
)
from holdfast.ports import Rng
from holdfast.program.definitions import ActivityDefinition, decode_options
from holdfast.store.guards import no_such_run
from holdfast.store.port import (
    CommitConflict,
    Committed,
    LoadedRun,
    NewRun,
    Store,
    Turn,
    created_run,
)

PAGE_EVENTS = 50_000
RETRY_S = 0.2

UNFIT = frozenset({"event exists", "task is open", "cannot be stored"})
"""Conflicts that are not about who came first: the same turn would be refused again, for ever."""

logger = logging.getLogger("holdfast.node")


class NodeDefinitions(Definitions, Protocol):
    """What a node can run."""

    def plan_ids(self) -> list[str]:
        """Return the names of the workflows that are known."""
        ...

    def activity_named(self, name: str) -> ActivityDefinition | None:
        """Return the activity of this name, or None."""
        ...


class NodeOptions(Struct, frozen=True, kw_only=True):
    """How a node behaves."""

    lease_ms: int = 10_000
    claim_runs: int = 200
    activities_at_once: int = 200
    live_runs: int = 5_000
    safety_poll_s: float = 5.0
    drain_s: float = 10.0
    turn_s: float | None = 5.0
    """How long a workflow's code may block the node before it is stopped; None or 0, for a debugger, sets no bound."""


class _Held:
    """A run that belongs to this node: as it was loaded, and what came in since."""

    __slots__ = ("inputs", "is_fresh", "loaded")

    def __init__(self, loaded: LoadedRun) -> None:
        self.loaded = loaded
        self.inputs: list[Input] = []
        self.is_fresh = True


class Node:
    """Runs workflows of one app on one store."""

    def __init__(self, name: str, store: Store, definitions: NodeDefinitions, rng: Rng, options: NodeOptions) -> None:
        self.name = name
        self.store = store
        self._definitions = definitions
        self._options = options
        self._workers = Workers(options.activities_at_once, self._on_outcome, rng)
        self._held: dict[str, _Held] = {}
        self._live: OrderedDict[str, LiveRun] = OrderedDict()
        self._ready: dict[str, None] = {}
        self.creations = Creations(store, name, self._begin)
        self.finishes = Finishes(store, self.holds, options.safety_poll_s)
        self._unfit: dict[str, RunError] = {}
        self._to_release: list[str] = []
        self._should_claim = True
        self._is_stopping = False
        self._something = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # --- life

    async def start(self) -> None:
        """Take a lease and begin to work."""
        await self.store.renew(self.name, self._options.lease_ms)
        self._listener = self.store.wakeups.listen()
        self._pumping = asyncio.create_task(self._pump(), name="pump")
        self._tasks = [
            asyncio.create_task(self._keep_lease(), name="lease"),
            asyncio.create_task(self._hear(), name="wake-ups"),
            asyncio.create_task(self._watch(), name="finishes"),
            self._pumping,
        ]

    async def stop(self) -> None:
        """Stop claiming, let what is under way finish for a while, and give everything back."""
        self._is_stopping = True
        self._something.set()
        if self._workers.busy:
            logger.info("node %s: activities under way: %d", self.name, self._workers.busy)
        await asyncio.wait([self._pumping], timeout=self._options.drain_s)
        for task in self._tasks:
            task.cancel()
        await self.creations.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._workers.busy:
            logger.warning("node %s: activities given up because they took too long: %d", self.name, self._workers.busy)
        for run_id in list(self._held):
            self._workers.cancel(run_id)
        self._listener.close()
        self.finishes.close()
        given_back = await self.store.release(self.name)
        if given_back:
            logger.info("node %s: runs given back: %d", self.name, given_back)
        for live in self._live.values():
            live.close()

    async def run_until(self, asked: "asyncio.Future[str]") -> None:
        """Wait until somebody asks; raise if a part of the node fails before."""
        awaited: list[asyncio.Future[Any]] = [asked, *self._tasks]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._options.lease_ms / 3_000)
            try:
                await self.store.renew(self.name, self._options.lease_ms)
            except StoreError:
                logger.warning("node %s could not renew its lease", self.name, exc_info=True)

    async def _hear(self) -> None:
        while True:
            await self._listener.wait(self._options.safety_poll_s)
            self._should_claim = True
            self._something.set()

    async def _watch(self) -> None:
        while True:
            try:
                await self.finishes.watch()
            except StoreError:
                logger.warning("node %s could not look for finished runs", self.name, exc_info=True)
                await asyncio.sleep(self._options.safety_poll_s)

    # --- the pump

    async def _pump(self) -> None:
        while True:
            try:
                batch = await self._gather()
                if batch:
                    await self._take_turns(batch)
                elif self._is_stopping and not self._workers.busy:
                    return
                else:
                    await self._idle()
            except StoreError:
                logger.exception("node %s: the store failed; trying again", self.name)
                await asyncio.sleep(RETRY_S)
            except Exception:
                logger.critical("node %s has failed: no run goes on here any more", self.name, exc_info=True)
                self.finishes.close()  # who waits for a result here is told, and does not wait for ever
                raise

    async def _gather(self) -> list[_Held]:
        """Return the runs that have something to do."""
        if self._to_release:
            await self.store.release(self.name, self._to_release)
            self._to_release = []
        if self._should_claim and not self._is_stopping:
            await self._claim()
        ready, self._ready = self._ready, {}
        return [self._held[run_id] for run_id in ready if run_id in self._held]

    async def _claim(self) -> None:
        self._should_claim = False  # before the call: somebody may ring while it is under way
        try:
            claimed = await self.store.claim(self.name, self._options.claim_runs, self._definitions.plan_ids())
        except LeaseExpired:
            self._should_claim = True
            await self.store.renew(self.name, self._options.lease_ms)
            return
        except StoreError:
            self._should_claim = True
            raise
        self._should_claim |= len(claimed) == self._options.claim_runs
        for loaded in claimed:
            self.hold(loaded)

    async def _idle(self) -> None:
        """Sleep until the next due instant, or until something happens."""
        if self._something.is_set():
            self._something.clear()
            return
        stops = self._is_stopping  # then nothing is claimed, whatever is due
        due_at = None if stops else await self.store.next_due(self.name, self._definitions.plan_ids())
        timeout_s = None if due_at is None else max(0.0, (due_at - await self.store.now()) / 1_000_000)
        try:
            async with asyncio.timeout(timeout_s):
                await self._something.wait()
        except TimeoutError:
            self._should_claim = True
        self._something.clear()

    def hold(self, loaded: LoadedRun) -> None:
        """Take a run that was claimed for this node; its turn comes with the next round."""
        run_id = loaded.head.run_id
        held = self._held.get(run_id)
        self.creations.found(run_id)
        if held is None:
            self._held[run_id] = _Held(loaded)
        elif held.loaded.head.lease_epoch == loaded.head.lease_epoch:
            held.loaded = loaded
            held.is_fresh = True
        else:  # it belonged to somebody else in between, who knows nothing of what goes on here
            self._workers.cancel(run_id)
            self._held[run_id] = _Held(loaded)
        self._ready[run_id] = None
        self._something.set()

    def _begin(self, new: NewRun, now: Instant) -> None:
        """Hold a run that was just created; its history is known without asking."""
        history = [replace(event, run_seq=number) for number, event in enumerate(new.events, 1)]
        live, problem = revive(new.run_id, history, self._definitions)
        if problem is None:
            self._live[new.run_id] = live
        self.hold(created_run(new, self.name, now))

    def _on_outcome(self, run_id: str, outcome: Outcome) -> None:
        held = self._held.get(run_id)
        if held is not None:
            held.inputs.append(outcome)
            self._ready[run_id] = None
        self._something.set()

    # --- turns

    async def _take_turns(self, batch: Sequence[_Held]) -> None:
        try:
            now = await self.store.now()
            prepared = [(held, self._at_hand(held) or await self._prepare(held, now)) for held in batch]
        except StoreError:
            self._ready |= dict.fromkeys(held.loaded.head.run_id for held in batch)
            raise
        # From here to the commit nothing is awaited: an outcome that came in between would belong to neither turn.
        drafts: list[tuple[_Held, LiveRun, TurnDraft]] = []
        for held, (live, problem) in prepared:
            if live is None:
                continue
            inputs = [*self._lost(held, live.state, now), *held.inputs] if held.is_fresh else held.inputs
            held.inputs, held.is_fresh = [], False
            unfit = self._unfit.pop(live.state.run_id, None)
            if unfit is not None:  # some of what came in leads to a turn that cannot be: it is put aside
                problem = unfit
                draft = pause_turn(live.state, held.loaded, [], problem, now, self.name, is_poisoned=True)
            elif problem is None:
                draft, problem = take_turn(live, held.loaded, inputs, now, self.name)
            else:
                draft = pause_turn(live.state, held.loaded, inputs, problem, now, self.name)
            if problem is not None:
                logger.error("run %s is paused: %s", live.state.run_id, problem)
                self._forget(live.state.run_id)
            drafts.append((held, live, draft))
        turns = [draft.finish(release=not self._is_busy(draft)) for _, _, draft in drafts]
        answers = await self._commit(turns)
        for (held, live, draft), turn, answer in zip(drafts, turns, answers, strict=True):
            if isinstance(answer, CommitConflict):
                self._lose(turn.run_id, answer)
            else:
                self._after(held, live, draft, turn.release, now)

    async def _commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Commit, again and again until there is an answer: after an error nobody knows whether it was done."""
        while True:
            try:
                return await self.store.commit(turns)
            except StoreError:
                logger.exception("node %s: the store failed to commit; trying again", self.name)
                await asyncio.sleep(RETRY_S)

    def _is_busy(self, draft: TurnDraft) -> bool:
        """Say whether this node carries out, or is about to carry out, anything for the run.

        A node that is stopping begins nothing any more. It keeps its runs to the end, and gives them back as ready.
        """
        if self._is_stopping:
            return True
        working = self._workers.steps_of(draft.state.run_id)
        return bool(draft.dispatch) or any(step_id in draft.state.open_steps for step_id in working)

    def _at_hand(self, held: _Held) -> tuple[LiveRun | None, RunError | None] | None:
        """Return a run that is in memory and needs nothing from the store, or None."""
        head = held.loaded.head
        live = self._live.get(head.run_id)
        if live is None or held.is_fresh or live.state.version != head.version:
            return None
        self._live.move_to_end(head.run_id)
        return live, None

    async def _prepare(self, held: _Held, now: Instant) -> tuple[LiveRun | None, RunError | None]:
        """Return the run as it is in memory, or None if its history cannot be read.

        What has come due since it was loaded is looked up, where it matters.
        """
        try:
            live, problem = await self._live_run(held.loaded)
        except (RunError, StoreCorrupt) as damage:
            await self._put_aside(held, damage, now)
            return None, None
        if any(live.state.open_steps[lost.step_id].due_at is not None for lost in self._lost(held, live.state, now)):
            [loaded] = await self.store.load([live.state.run_id])
            if loaded is not None and loaded.head.lease_epoch == held.loaded.head.lease_epoch:
                held.loaded = loaded
        return live, problem

    async def _live_run(self, loaded: LoadedRun) -> tuple[LiveRun, RunError | None]:
        """Return the run as it is in memory, or make it from its history."""
        run_id = loaded.head.run_id
        live = self._live.get(run_id)
        if live is not None and live.state.version == loaded.head.version:
            self._live.move_to_end(run_id)
            return live, None
        self._forget(run_id)
        live, problem = revive(run_id, await self._history(loaded), self._definitions)
        if problem is None:
            self._live[run_id] = live
        return live, problem

    async def _put_aside(self, held: _Held, damage: HoldfastError, now: Instant) -> None:
        """Leave a run whose history makes no sense for a while: others go on, and what it was told is kept."""
        run_id = held.loaded.head.run_id
        logger.error("run %s is put aside: %s", run_id, damage)
        [answer] = await self._commit([aside_turn(held.loaded, now)])
        self._workers.cancel(run_id)
        self._held.pop(run_id, None)
        self._forget(run_id)
        if isinstance(answer, CommitConflict):
            logger.warning("run %s: it could not be put aside (%s)", run_id, answer.reason)

    async def _history(self, loaded: LoadedRun) -> list[Event]:
        """Return the run's events since its last rotation."""
        snapshot = loaded.head.snapshot
        after = snapshot.resume_pointer - 1 if snapshot is not None else 0
        events: list[Event] = []
        while page := await self.store.read_events(loaded.head.run_id, after, PAGE_EVENTS):
            events += page
            after = page[-1].run_seq
            if len(page) < PAGE_EVENTS:
                break
        if after < loaded.head.version:
            raise HistoryGap(f"the history ends at event {after}, not {loaded.head.version}", run_id=loaded.head.run_id)
        return events

    async def query(self, run_id: str, name: str, arguments: Raw) -> Raw:
        """Ask a run's program about its present state."""
        [loaded] = await self.store.load([run_id])
        if loaded is None:
            raise no_such_run(run_id)
        live = self._live.get(run_id)
        if live is not None and live.state.version == loaded.head.version:
            try:
                return _answer(live, name, arguments)
            except (NotDurable, RunawayWorkflow):  # this program may no longer be what the history tells
                self._forget(run_id)
                raise
        # Made for this question only: the pump may be making its own at the same time, and keeps that one.
        live, problem = revive(run_id, await self._history(loaded), self._definitions)
        try:
            if problem is not None:
                raise problem
            return _answer(live, name, arguments)
        finally:
            live.close()

    def _lost(self, held: _Held, state: RunState, now: Instant) -> list[NodeLost]:
        """Return word of activities that nobody carries out: their node is gone, and took them along.

        Only a run that was just loaded shows it: then a step whose next attempt is due has its message beside it,
        unless a node took the message and was lost with it.
        """
        if not held.is_fresh:
            return []
        reported = {getattr(given, "step_id", None) for given in held.inputs}
        tokens = {message.waiting_token for message in held.loaded.messages}
        return [
            NodeLost(step.step_id)
            for step in state.open_steps.values()
            if _is_local(step)
            and (step.due_at is None or step.due_at <= now)
            and step.step_id not in reported
            and (step.token is None or step.token not in tokens)
            and not self._workers.is_working_on(state.run_id, step.step_id)
        ]

    def _after(self, held: _Held, live: LiveRun, draft: TurnDraft, is_released: bool, now: Instant) -> None:
        """Perform the effects of a turn that is durable."""
        live.state = draft.state
        run_id = draft.state.run_id
        for step_id in self._workers.steps_of(run_id):
            if step_id not in draft.state.open_steps:
                self._workers.cancel(run_id, step_id)
        for step_id in draft.dispatch:
            step = draft.state.open_steps.get(step_id)
            if step is not None and not self._is_stopping:  # else it is for the node that goes on with the run
                self._dispatch(run_id, step, now)
        if draft.state.is_finished:
            self._forget(run_id)
            self.finishes.tell(run_id, draft.state.version, draft.last_event)
        if is_released or draft.state.is_finished:
            if not held.inputs:
                self._held.pop(run_id, None)
        else:
            signals = held.loaded.signals
            if draft.received:
                consumed = {inbox_seq for inbox_seq, _ in draft.received}
                signals = tuple(signal for signal in signals if signal.inbox_seq not in consumed)
            head = replace(held.loaded.head, version=draft.state.version)
            held.loaded = LoadedRun(head=head, signals=signals)
        while len(self._live) > self._options.live_runs:
            self._live.popitem(last=False)[1].close()

    def _dispatch(self, run_id: str, step: OpenStep, now: Instant) -> None:
        body = step.body
        assert isinstance(body, e.StepStarted)
        definition = self._definitions.activity_named(body.name)
        if definition is None:
            logger.error("run %s: no activity %r is known here; step %s waits", run_id, body.name, step.step_id)
            return
        options = decode_options(bytes(body.options))
        self._workers.start(Job(run_id, step, definition, options), now)

    def _lose(self, run_id: str, conflict: CommitConflict) -> None:
        """Let go of a run that somebody else has taken, or whose turn cannot be: its next turn pauses it."""
        logger.warning("run %s: a turn was not committed (%s)", run_id, conflict.reason)
        if conflict.reason in UNFIT:
            self._unfit[run_id] = TurnRefused(f"the run's turn was refused by the store: {conflict.reason}")
            self._to_release.append(run_id)
        self._workers.cancel(run_id)
        self._held.pop(run_id, None)
        self._forget(run_id)
        self._should_claim = True

    def _forget(self, run_id: str) -> None:
        live = self._live.pop(run_id, None)
        if live is not None:
            live.close()

    def holds(self, run_id: str) -> bool:
        """Say whether the run belongs to this node."""
        return run_id in self._held


def _answer(live: LiveRun, name: str, arguments: Raw) -> Raw:
    if live.replay.program is None:
        raise NotFound(f"run {live.state.run_id} has not started", run_id=live.state.run_id)
    return live.replay.program.query(name, arguments)


def _is_local(step: OpenStep) -> bool:
    """Say whether a step's activity is carried out by the node that holds the run."""
    return isinstance(step.body, e.StepStarted) and step.body.queue == ""
