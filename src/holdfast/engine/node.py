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
from contextlib import suppress
from typing import Protocol

from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core.decide import Input
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.messages import ActivityDetached, ActivityErrored, NodeLost
from holdfast.core.state import OpenStep, RunState
from holdfast.engine.activities import Details, Outcome, Slots, Work, Workers
from holdfast.engine.finishes import Finishes
from holdfast.engine.live import Definitions, LiveRun, pause_turn, revive, take_turn
from holdfast.engine.queues import ActivityDefinitions, Queues
from holdfast.engine.turn import TurnDraft
from holdfast.errors import HoldfastError, LeaseExpired, NotDurable, NotFound, RunError, StoreError
from holdfast.ports import Rng
from holdfast.program.definitions import decode_options
from holdfast.store.beginnings import created_run
from holdfast.store.guards import no_such_run
from holdfast.store.port import (
    Beat,
    CommitConflict,
    Committed,
    Created,
    Existing,
    LoadedRun,
    NewRun,
    Refused,
    Store,
    Turn,
)

PAGE_EVENTS = 50_000
CREATE_RUNS = 500
RETRY_S = 0.2

logger = logging.getLogger("holdfast.node")


class NodeDefinitions(Definitions, ActivityDefinitions, Protocol):
    """What a node can run."""

    def plan_ids(self) -> list[str]:
        """Return the names of the workflows that are known."""
        ...


class NodeOptions(Struct, frozen=True, kw_only=True):
    """How a node behaves. It carries out what is in `queues`; a job that it falls silent about is visible to others."""

    lease_ms: int = 10_000
    claim_runs: int = 200
    activities_at_once: int = 200
    live_runs: int = 5_000
    safety_poll_s: float = 5.0
    drain_s: float = 10.0
    queues: tuple[str, ...] = ()
    takes_runs: bool = True
    visible_ms: int = 30_000


class _Held:
    """A run that belongs to this node: as it was loaded, and what came in since."""

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
        self._slots = Slots(options.activities_at_once)
        self._workers = Workers(self._slots, self._on_outcome, self._on_beat, rng)
        self._queues = Queues(name, store, definitions, options.queues, options.visible_ms, self._slots, rng)
        self._unknown: set[str] = set()
        self._held: dict[str, _Held] = {}
        self._live: OrderedDict[str, LiveRun] = OrderedDict()
        self._ready: dict[str, None] = {}
        self._being_created: set[str] = set()
        self._creating: list[tuple[NewRun, Instant, asyncio.Future[Created | Existing | Refused]]] = []
        self._creator: asyncio.Task[None] | None = None
        self._finishes = Finishes(store, self.holds, options.safety_poll_s)
        self._should_claim = True
        self._is_stopping = False
        self._something = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # --- life

    async def start(self) -> None:
        """Take a lease and begin to work."""
        await self.store.renew(self.name, self._options.lease_ms)
        self._listener = self.store.wakeups.listen()
        self._tasks = [
            asyncio.create_task(self._keep_lease(), name="lease"),
            asyncio.create_task(self._hear(), name="wake-ups"),
            asyncio.create_task(self._watch(), name="finishes"),
            *self._queues.start(),
        ]
        if self._options.takes_runs:
            self._tasks.append(asyncio.create_task(self._pump(), name="pump"))

    async def stop(self) -> None:
        """Stop claiming, let what is under way finish for a while, and give everything back."""
        self._is_stopping = True
        self._something.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_s):
                await asyncio.gather(self._drained(), self._queues.drain())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(StoreError):
            await self._queues.beats.flush()
        self._workers.cancel_all()
        self._queues.stop()
        self._slots.close()
        self._listener.close()
        self._finishes.close()
        await self.store.release(self.name)
        for live in self._live.values():
            live.close()

    async def _drained(self) -> None:
        while self._workers.busy or self._ready:
            await self._workers.drain()
            await asyncio.sleep(0)

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
            self._queues.ring()

    async def _watch(self) -> None:
        while True:
            try:
                await self._finishes.watch()
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
                else:
                    await self._idle()
            except StoreError:
                logger.exception("node %s: the store failed; trying again", self.name)
                await asyncio.sleep(RETRY_S)
            except Exception:
                logger.critical("node %s has failed: no run goes on here any more", self.name, exc_info=True)
                self._finishes.close()  # who waits for a result here is told, and does not wait for ever
                raise

    async def _gather(self) -> list[_Held]:
        """Return the runs that have something to do."""
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
        due_at = await self.store.next_due(self.name, self._definitions.plan_ids())
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
        self._being_created.discard(run_id)
        if held is None:
            self._held[run_id] = _Held(loaded)
        elif held.loaded.head.lease_epoch == loaded.head.lease_epoch:
            if held.loaded.details:  # what activities here have said since is newer
                loaded = replace(loaded, details=loaded.details | held.loaded.details)
            held.loaded = loaded
            held.is_fresh = True
        else:  # it belonged to somebody else in between, who knows nothing of what goes on here
            self._workers.cancel(run_id)
            self._held[run_id] = _Held(loaded)
        self._ready[run_id] = None
        self._something.set()

    async def create(self, new: NewRun, now: Instant) -> Created | Existing | Refused:
        """Create a run that belongs to this node, together with others that are being created, and hold it."""
        future: asyncio.Future[Created | Existing | Refused] = asyncio.get_running_loop().create_future()
        self._creating.append((new, now, future))
        if self._creator is None:
            self._creator = asyncio.create_task(self._create(), name="create")
        return await future

    async def _create(self) -> None:
        while self._creating:
            batch, self._creating = self._creating[:CREATE_RUNS], self._creating[CREATE_RUNS:]
            self._being_created.update(new.run_id for new, _, _ in batch)
            try:
                owner = self.name if self._options.takes_runs else None
                answers = await self.store.create([new for new, _, _ in batch], claim_for=owner)
            except HoldfastError as problem:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(problem)
                continue
            finally:
                created = {new.run_id for new, _, _ in batch} & self._being_created
                self._being_created -= created
            for (new, now, future), answer in zip(batch, answers, strict=True):
                if owner and isinstance(answer, Created) and new.run_id in created:  # else the pump has found it before
                    self._begin(new, now)
                if not future.done():
                    future.set_result(answer)
        self._creator = None

    def _begin(self, new: NewRun, now: Instant) -> None:
        """Hold a run that was just created; its history is known without asking."""
        history = [replace(event, run_seq=number) for number, event in enumerate(new.events, 1)]
        live, problem = revive(new.run_id, history, self._definitions)
        if problem is None:
            self._live[new.run_id] = live
        self.hold(created_run(new, self.name, now))

    def _on_outcome(self, work: Work, outcome: Outcome) -> None:
        held = self._held.get(work.run_id)
        if held is not None:
            held.inputs.append(outcome)
            self._ready[work.run_id] = None
            self._something.set()

    def _on_beat(self, work: Work, details: Details) -> None:
        """Keep what an activity says of its progress: here for a next attempt, and in the store for another node."""
        held, step_id = self._held.get(work.run_id), work.step.step_id
        if held is not None and details is not UNSET:
            held.loaded.details[step_id] = details
            self._queues.beats.say(Beat(run_id=work.run_id, step_id=step_id, details=details))

    # --- turns

    async def _take_turns(self, batch: Sequence[_Held]) -> None:
        try:
            await self._queues.beats.flush(_unsuccessful(batch))  # for a next attempt to find, wherever it is made
            now = await self.store.now()
            lives = [await self._prepare(held, now) for held in batch]
        except StoreError:
            self._ready |= dict.fromkeys(held.loaded.head.run_id for held in batch)
            raise
        # From here to the commit nothing is awaited: an outcome that came in between would belong to neither turn.
        drafts: list[tuple[_Held, LiveRun, TurnDraft]] = []
        for held, (live, problem) in zip(batch, lives, strict=True):
            inputs = [*self._lost(held, live.state, now), *held.inputs]
            held.inputs, held.is_fresh = [], False
            if problem is None:
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
        """Say whether this node carries out, or is about to carry out, anything for the run."""
        working = self._workers.steps_of(draft.state.run_id)
        return bool(draft.dispatch) or any(step_id in draft.state.open_steps for step_id in working)

    async def _prepare(self, held: _Held, now: Instant) -> tuple[LiveRun, RunError | None]:
        """Return the run as it is in memory. What has come due since it was loaded is looked up, where it matters."""
        live, problem = await self._live_run(held.loaded)
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
            except NotDurable:  # it has changed something: this program is no longer what the history tells
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
        before, live.state = live.state, draft.state
        run_id = draft.state.run_id
        for step_id in before.open_steps.keys() - draft.state.open_steps.keys():
            self._workers.cancel(run_id, step_id)
            self._queues.let_go(run_id, step_id)
        for step_id in draft.dispatch:
            step = draft.state.open_steps.get(step_id)
            if step is not None:
                self._dispatch(run_id, step, now)
        if draft.state.is_finished:
            self._forget(run_id)
            self._finishes.tell(run_id, draft.state.version)
        if is_released or draft.state.is_finished:
            if not held.inputs:
                self._held.pop(run_id, None)
        else:
            consumed = {inbox_seq for inbox_seq, _ in draft.received}
            signals = tuple(signal for signal in held.loaded.signals if signal.inbox_seq not in consumed)
            head = replace(held.loaded.head, version=draft.state.version)
            details = {s: said for s, said in held.loaded.details.items() if s in draft.state.open_steps}
            held.loaded = LoadedRun(head=head, signals=signals, details=details)
        while len(self._live) > self._options.live_runs:
            self._live.popitem(last=False)[1].close()

    def _dispatch(self, run_id: str, step: OpenStep, now: Instant) -> None:
        body = step.body
        assert isinstance(body, e.StepStarted)
        definition = self._definitions.activity_named(body.name)
        if definition is None:
            if body.name not in self._unknown:
                self._unknown.add(body.name)
                logger.error("run %s: no activity %r is known here; its steps wait", run_id, body.name)
            return
        held = self._held.get(run_id)
        details = held.loaded.details.get(step.step_id, e.NULL) if held is not None else e.NULL
        self._workers.start(Work(run_id, step, definition, decode_options(bytes(body.options)), details), now)

    def _lose(self, run_id: str, conflict: CommitConflict) -> None:
        """Let go of a run that somebody else has taken."""
        logger.warning("run %s: a turn was not committed (%s)", run_id, conflict.reason)
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

    def finished(self, run_id: str) -> "asyncio.Future[int]":
        """Return a future that is given the run's version when it has finished, here or elsewhere."""
        return self._finishes.wait(run_id)


def _answer(live: LiveRun, name: str, arguments: Raw) -> Raw:
    if live.replay.program is None:
        raise NotFound(f"run {live.state.run_id} has not started", run_id=live.state.run_id)
    return live.replay.program.query(name, arguments)


def _unsuccessful(batch: Sequence[_Held]) -> list[tuple[str, str]]:
    """Return the steps whose attempts have ended without a result."""
    ended = [(held.loaded.head.run_id, given) for held in batch for given in held.inputs]
    return [(run_id, o.step_id) for run_id, o in ended if isinstance(o, ActivityErrored | ActivityDetached)]


def _is_local(step: OpenStep) -> bool:
    """Say whether a step's activity is carried out by the node that holds the run."""
    return isinstance(step.body, e.StepStarted) and step.body.queue == "" and not step.is_detached
