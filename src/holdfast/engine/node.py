"""A node: claims runs, takes their turns, commits them together, and carries out what follows.

One loop, the pump, does all of it. Each round takes what there is (runs claimed, outcomes of this node's own
activities), lets every run take its turn, commits all turns with one call, and only then performs effects. With
nothing to do it sleeps until the next due instant or until somebody rings: nothing is swept or polled, but for a
look every `safety_poll_s`, in case a ring was lost.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.clock import Rng
from holdfast.core import events as e
from holdfast.core.decide import Input
from holdfast.core.instants import Instant
from holdfast.core.messages import ActivityReturned, ActivitySucceeded, NodeLost
from holdfast.core.state import OpenStep, RunState
from holdfast.engine.activities.async_completion import completion_key
from holdfast.engine.activities.context import Details, Outcome, Work
from holdfast.engine.activities.dispatch import NONE, Dispatcher
from holdfast.engine.activities.executor import ActivityExecutor
from holdfast.engine.activities.queue_worker import QueueWorker, outcome_message
from holdfast.engine.activities.slots import Slots
from holdfast.engine.completion_waiters import CompletionWaiters
from holdfast.engine.definition_filter import DefinitionFilter
from holdfast.engine.gc_tuning import tuned_gc
from holdfast.engine.inbox.declarations import Declarations, has_signals, without_unfit_signals
from holdfast.engine.leases import LeaseGuard, keep_lease
from holdfast.engine.observe.logs import log_dead_letters, log_events
from holdfast.engine.options import NodeOptions
from holdfast.engine.start.admission import RunQueue
from holdfast.engine.start.first_turns import First, FirstTurns
from holdfast.engine.start.starter import Starter
from holdfast.engine.turns.draft import LIMITS, TurnDraft
from holdfast.engine.turns.execute import CachedRun, pause_turn, take_turn
from holdfast.engine.turns.owned_run import OwnedRun, unsuccessful
from holdfast.engine.turns.poison import (
    Refusals,
    deferring_turn,
    is_suspect,
    losses_after,
    poison_of,
    trial_turn,
    tried,
)
from holdfast.engine.turns.ready_queue import ReadyQueue
from holdfast.engine.turns.run_cache import RunCache
from holdfast.errors import (
    EngineError,
    HoldfastError,
    LeaseExpired,
    NodeSuperseded,
    NondeterminismError,
    RunError,
    StoreCorrupt,
    StoreError,
)
from holdfast.limits import Limits
from holdfast.program.loop import outside_loop
from holdfast.program.port import EndDeferred
from holdfast.registry import Registry
from holdfast.store.port import CommitConflict, Committed, Heartbeat, LoadedRun, NewRun, Store, Turn
from holdfast.store.types import created_run

RETRY_S = 0.2

HAND_OVER = 500
"""How many runs are handed over to another node at once."""

GIVE_BACK_S = 5.0
"""How long a node that stops waits for the store to take its runs back. Else they go on when its lease has ended."""

logger = logging.getLogger("holdfast.node")


class Node:
    """Runs workflows of one app on one store."""

    def __init__(
        self,
        name: str,
        store: Store,
        registry: Registry,
        rng: Rng,
        options: NodeOptions,
        limits: Limits = LIMITS,
    ) -> None:
        self.name = name
        self._limits = limits
        self.store = store
        self.definition_filter = DefinitionFilter(name, store, registry, options)
        self.registry = registry
        self._options = options
        self._slots = Slots(options.activities_at_once)
        self._executor = ActivityExecutor(self._slots, self._on_outcome, self._on_heartbeat, rng, limits)
        self._queue_worker = QueueWorker(
            name, store, registry, options.queues, options.visible_ms, self._slots, rng, limits
        )
        self._dispatcher = Dispatcher(registry, self._executor, self._on_outcome)
        self._owned: dict[str, OwnedRun] = {}
        self.failure: EngineError | None = None
        self.run_cache = RunCache(store, registry, options.cached_runs)
        self._ready = ReadyQueue()
        first_turns = FirstTurns(name, self.run_cache, self._dispatcher, limits) if options.takes_runs else None
        self.starter = Starter(store, self, options.lease_ms, first_turns)
        self.completion_waiters = CompletionWaiters(store, self.owns, options.safety_poll_s)
        self.run_queue = RunQueue(
            store, registry, self.definition_filter, self._owner_of_queued, self.add_owned, options
        )
        self._refusals = Refusals()
        self._reports: dict[tuple[str, str], tuple[Work, Outcome]] = {}
        self._to_release: list[str] = []
        self._to_load: list[str] = []
        self.completion_key = ""
        self.declarations: Declarations | None = None
        """What workflows declare of their signals, for what runs of this node send."""
        self._should_claim = True
        self._should_offer = False
        self._has_news = False
        self._guard: LeaseGuard | None = None
        self._is_stopping = False
        self._is_idle = False
        self._claiming: asyncio.Task[None] | None = None
        self._something = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def limits(self) -> Limits:
        """The bounds of this installation."""
        return self._limits

    @property
    def activities_running(self) -> int:
        """How many activities are under way here."""
        return self._executor.busy + self._queue_worker.busy

    # --- life

    async def start(self) -> None:
        """Take a lease, and with it what former lives of this node held; begin to work."""
        await self.store.renew(self.name, self._options.lease_ms, self.definition_filter.published(), True)
        self.completion_key = self._executor.key = await completion_key(self.store)
        self._listener = self.store.wakeups.listen()
        extend = getattr(self.store, "extend_lease", None)
        if extend is not None:
            self._guard = LeaseGuard(extend, self.name, self._options.lease_ms, self._options.blocked_s)
        self._pumping = [asyncio.create_task(self._pump(), name="pump")] if self._options.takes_runs else []
        self._tasks = [
            asyncio.create_task(
                keep_lease(self._renew, self.name, self._options.lease_ms, self._has_failed, self._guard), name="lease"
            ),
            asyncio.create_task(self._hear(), name="wake-ups"),
            asyncio.create_task(self._watch(), name="completion waiters"),
            asyncio.create_task(self.run_queue.work(), name="run queue"),
            *self._queue_worker.start(self.completion_key),
            *self.definition_filter.start(self.run_cache.fits),
            *self._pumping,
        ]

    async def stop(self) -> None:
        """Stop claiming, let what is under way finish for a while, and give everything back.

        If the caller is cancelled meanwhile, nothing is waited for any longer, and everything is given back all the
        same before the cancellation goes on. A second cancellation leaves the runs to the end of the lease.
        """
        self._is_stopping = True
        self.definition_filter.stop()
        self._something.set()
        if under_way := self._executor.busy + self._queue_worker.busy:
            logger.info("node %s: activities under way: %d", self.name, under_way)
        for work in self._executor.withdraw():
            self._return(work.run_id, work.step)
        try:
            if draining := [*self._queue_worker.drain(), *self._pumping]:
                await asyncio.wait(draining, timeout=self._options.drain_s)
        except asyncio.CancelledError:
            await self._give_back()
            raise
        await self._give_back()

    async def _give_back(self) -> None:
        """End every part of the node, then its lease. What ends the parts does not wait: it cannot be interrupted."""
        if self._guard is not None:
            self._guard.stop()
        for task in self._tasks:
            task.cancel()
        if given_up := self._executor.busy + self._queue_worker.busy:
            logger.warning("node %s: activities given up because they took too long: %d", self.name, given_up)
        self._executor.cancel_all()
        self._queue_worker.stop()
        self._slots.close()
        self._listener.close()
        self.completion_waiters.close()
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self.starter.stop()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                with suppress(StoreError):  # nothing but progress is lost; its runs are given back below
                    await self._queue_worker.heartbeats.flush()
                    await self._queue_worker.release()
                if given_back := await self.store.release(self.name):
                    logger.info("node %s: runs given back: %d", self.name, given_back)
        except TimeoutError:
            text = "node %s could not give its runs back within %d s: others take them when its lease has ended"
            logger.warning(text, self.name, GIVE_BACK_S)
        finally:
            self.run_cache.close()

    async def run_until(self, asked: "asyncio.Future[str]") -> None:
        """Wait until somebody asks; raise if a part of the node fails before."""
        awaited: list[asyncio.Future[Any]] = [asked, *self._tasks]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()

    def _has_failed(self) -> bool:
        return self.failure is not None

    async def _renew(self) -> None:
        try:
            await self.store.renew(self.name, self._options.lease_ms, self.definition_filter.published())
        except NodeSuperseded as problem:
            self._end_superseded(problem)
            raise

    def _end_superseded(self, problem: NodeSuperseded) -> None:
        """Do nothing more: another process has this node's name, and what it held."""
        if self.failure is None:
            logger.critical("node %s ends its work: %s", self.name, problem)
            self.failure = problem
            self.completion_waiters.close(problem)
            self._executor.cancel_all()
            self._queue_worker.drain()
            self._queue_worker.stop()
            self._something.set()

    async def _hear(self) -> None:
        while True:
            await self._listener.wait(self._options.safety_poll_s)
            self._should_claim = True
            self._should_offer |= self.definition_filter.lacks_any
            self._something.set()
            self._queue_worker.ring()

    async def _watch(self) -> None:
        while True:
            try:
                await self.completion_waiters.watch()
            except StoreError:
                logger.warning("node %s could not look for finished runs", self.name, exc_info=True)
                await asyncio.sleep(self._options.safety_poll_s)

    # --- the pump

    async def _pump(self) -> None:
        with tuned_gc() if self._options.tune_gc else nullcontext():
            await self._pump_on()

    async def _pump_on(self) -> None:
        while True:
            try:
                batch = await self._gather()
                if isinstance(self.failure, NodeSuperseded):
                    raise self.failure
                if batch:
                    await self._take_turns(batch)
                elif self._is_stopping and not self._executor.busy and not self._reports:
                    return
                else:
                    await self._idle()
            except StoreError:
                logger.exception("node %s: the store failed; trying again", self.name)
                await asyncio.sleep(RETRY_S)
            except Exception as failure:
                if self.failure is None:
                    logger.critical("node %s has failed: no run goes on here any more", self.name, exc_info=True)
                    self.failure = EngineError(f"node {self.name} has failed: {type(failure).__name__}: {failure}")
                self.completion_waiters.close(self.failure)  # callers that wait for a result here fail at once
                raise

    async def _gather(self) -> list[OwnedRun]:
        """Return the runs that have something to do."""
        if self._reports:
            await self._report()
        if self._to_release:
            await self.store.release(self.name, self._to_release)
            self._to_release = []
        if self._to_load:
            await self._load_again()
        if self._should_offer and not self._is_stopping:
            await self._offer()
        if self._claiming is not None:
            claiming, self._claiming = self._claiming, None
            await claiming
        elif self._should_claim and self._ready.wants_more and not self._is_stopping:
            await self._claim()
        seen = 0
        while seen < len(self._ready) and not (seen and self._ready.is_full):
            seen = len(self._ready)  # what is about to come in shares the commit
            await asyncio.sleep(0)
        return [self._owned[run_id] for run_id in self._ready.take() if run_id in self._owned]

    def expect(self) -> None:
        """Claim at once if there is nothing else to do: somebody here is about to make runs ready.

        Called right before, so that the store is asked for both together. While turns are taken nothing is claimed
        beside them: what was loaded before a commit would be out of date after it.
        """
        if self._is_idle and self._claiming is None and not self._is_stopping:
            self._claiming = asyncio.create_task(self._claim(), name="claim")
            self._something.set()

    async def _offer(self) -> None:
        """Hand runs that wait for activities which this node does not have over to nodes that do.

        What is carried out here for such a run is finished first.
        """
        self._should_offer = False  # before the calls: somebody may ring while they are under way
        try:
            given: dict[str, list[str]] = {}
            for run_id, to in await self.definition_filter.takers():
                if (owned := self._owned.get(run_id)) is not None and self._is_at_rest(owned):
                    given.setdefault(to, []).append(run_id)
            for to, run_ids in given.items():
                for start in range(0, len(run_ids), HAND_OVER):
                    for run_id in await self.store.hand_over(self.name, run_ids[start : start + HAND_OVER], to):
                        logger.info("run %s is handed over to %s, which has its activity", run_id, to)
                        self._let_go(run_id)
            if self._has_news:
                self._has_news = False
                await self._renew()
        except StoreError:
            self._should_offer = self._has_news = True
            raise

    def _is_at_rest(self, owned: OwnedRun) -> bool:
        """Return whether nothing of the run is under way here that is not in the store."""
        run_id = owned.loaded.head.run_id
        has_reports = any(run_id == reported for reported, _ in self._reports)
        return not (owned.inputs or owned.drafted or has_reports or self._executor.steps_of(run_id))

    def _let_go(self, run_id: str) -> None:
        """Forget a run that is another node's."""
        self._owned.pop(run_id, None)
        self._note_lack(run_id)
        self.run_cache.forget(run_id)

    def _note_lack(self, run_id: str, state: RunState | None = None, now: Instant = 0) -> None:
        """Note what a run waits for that is not known here: nothing, if it is not held."""
        names = NONE if state is None else self._dispatcher.lacking(state, now)
        if names and state is not None:
            self._has_news |= self.definition_filter.note_lack(run_id, (state.plan_id, state.plan_version), names)
            self._should_offer = True
        elif self.definition_filter.lacks_any and self.definition_filter.forget_lack(run_id):
            self._has_news = self._should_offer = True

    def find(self, run_id: str) -> None:
        """Take a run that belongs to this node, if that is still so between two turns."""
        if run_id not in self._to_load:
            self._to_load.append(run_id)
        self._something.set()

    async def _load_again(self) -> None:
        """Load runs that belong to this node: those whose last turn had not seen an outcome take that turn again.

        No turn is taken meanwhile, so that none can let go of what was loaded.
        """
        run_ids = list(self._to_load)
        try:
            runs = await self.store.load(run_ids)
        except StoreCorrupt:  # whoever claims them makes dead letters of what cannot be read
            for run_id in run_ids:
                self._drop(run_id)
            self._to_release += run_ids
            runs = []
        del self._to_load[: len(run_ids)]
        for loaded in runs:
            if loaded is not None and loaded.head.lease_owner == self.name:
                owned = self._owned.get(loaded.head.run_id)
                if owned is None or owned.loaded.head.lease_epoch == loaded.head.lease_epoch:
                    self.add_owned(loaded)

    async def _claim(self) -> None:
        self._should_claim = False  # before the call: somebody may ring while it is under way
        try:
            claimed = await self.definition_filter.claim(self._options.claim_runs)
        except LeaseExpired:
            self._should_claim = True
            await self._renew()
            return
        except StoreError:
            self._should_claim = True
            raise
        self._should_claim |= len(claimed) == self._options.claim_runs
        for loaded in claimed:
            self.add_owned(loaded)

    async def _idle(self) -> None:
        """Sleep until the next due instant, or until something happens."""
        if self._something.is_set():
            self._something.clear()
            return
        stops = self._is_stopping  # then nothing is claimed, whatever is due
        due_at = None if stops else await self.store.next_due(self.name, self.definition_filter.plans())
        timeout_s = None if due_at is None else (due_at - await self.store.now()) / 1_000_000
        if timeout_s is not None:
            timeout_s = max(timeout_s, self.starter.pause_s)
        try:
            async with asyncio.timeout(timeout_s):
                self._is_idle = True
                await self._something.wait()
        except TimeoutError:
            self._should_claim = True
        finally:
            self._is_idle = False
        self._something.clear()

    def add_owned(self, loaded: LoadedRun) -> None:
        """Take a run that was claimed for this node; its turn comes with the next round."""
        run_id = loaded.head.run_id
        if self.starter.keeps(loaded):
            return
        owned = self._owned.get(run_id)
        if owned is not None and owned.drafted is not None:
            if owned.is_as_before(loaded):
                return
            owned.drafted = None  # there is more to take with the first turn, or it was somebody else's in between
            self.run_cache.forget(run_id)
        if owned is None:
            self._owned[run_id] = OwnedRun(loaded)
        elif owned.loaded.head.lease_epoch == loaded.head.lease_epoch:
            if loaded.head.version < owned.loaded.head.version:  # the answer was overtaken by a turn
                return
            if owned.loaded.details:  # what activities here have said since is newer
                loaded = replace(loaded, details=loaded.details | owned.loaded.details)
            owned.loaded = loaded
            owned.is_fresh = True
        else:  # it belonged to somebody else in between, who knows nothing of what goes on here
            self._executor.cancel(run_id)
            self._owned[run_id] = OwnedRun(loaded)
        self._ready.add(run_id, is_new=loaded.head.version == 1)
        self._something.set()

    def begin(self, new: NewRun, now: Instant, first: First | None) -> None:
        """Hold a run that was just created; its history is known without asking."""
        if first is None:
            self.run_cache.keep(self.run_cache.beginning(new))
            self.add_owned(created_run(new, self.name, now))
            return
        self.run_cache.keep(first.drafted.cached)
        owned = self._owned[new.run_id] = OwnedRun(first.loaded)
        owned.is_fresh = False
        if first.is_at_work:
            self._after(owned, first.drafted.cached, first.drafted.draft, None, now)
            self.run_cache.trim()
        else:
            owned.drafted = first.drafted
            self._ready.add(new.run_id)
            self._something.set()

    @property
    def has_room(self) -> bool:
        """Whether a run that begins now can stay in memory."""
        return len(self._owned) < self._options.cached_runs and not self._is_stopping

    def _on_outcome(self, work: Work, outcome: Outcome) -> None:
        owned = self._owned.get(work.run_id)
        if owned is not None and owned.loaded.head.losses:
            self._reports[work.run_id, work.step.step_id] = work, outcome
        elif owned is not None:
            owned.inputs.append(outcome)
            self._ready.add(work.run_id)
        self._something.set()

    def _return(self, run_id: str, step: OpenStep) -> None:
        """Record that an attempt has not begun here, and never will: the node that goes on with the run makes it."""
        owned = self._owned.get(run_id)
        if owned is not None:
            owned.inputs.append(ActivityReturned(step.step_id, step.logical_attempt_id, step.engine_attempt_id))
            self._ready.add(run_id)

    async def _report(self) -> None:
        """Make outcomes of runs durable that were lost before: should a turn end this node, it was not the activity."""
        batch = list(self._reports.items())
        await self._queue_worker.heartbeats.flush(
            key for key, (_, told) in batch if not isinstance(told, ActivitySucceeded)
        )
        now = await self.store.now()
        await self.store.deliver([outcome_message(work, outcome, now) for _, (work, outcome) in batch])
        for key, told in batch:
            if self._reports.get(key) is told:
                del self._reports[key]
        self._should_claim = True

    def _on_heartbeat(self, work: Work, details: Details) -> None:
        """Keep what an activity says of its progress: here for a next attempt, and in the store for another node."""
        owned, step_id = self._owned.get(work.run_id), work.step.step_id
        if owned is not None and details is not UNSET:
            owned.loaded.details[step_id] = details
            self._queue_worker.heartbeats.say(Heartbeat(run_id=work.run_id, step_id=step_id, details=details))

    # --- turns

    async def _take_turns(self, batch: Sequence[OwnedRun]) -> None:
        suspects = [owned for owned in batch if owned.loaded.head.losses and is_suspect(owned.loaded.head)]
        if not suspects:
            await self._take_together(batch)
            return
        suspect = next((owned for owned in suspects if owned.is_tried), suspects[0])
        # What ended this process between a try that is durable and the turn would be blamed on the run.
        others = [] if suspect.is_tried else [owned for owned in batch if owned not in suspects]
        self._ready.add_again(each.loaded.head.run_id for each in batch if each is not suspect and each not in others)
        try:
            if others:
                await self._take_together(others)
            if suspect.loaded.head.run_id in self._owned:
                await self._try_alone(suspect)
        except StoreError:
            self._ready.add_first(suspect.loaded.head.run_id)
            raise

    async def _try_alone(self, suspect: OwnedRun) -> None:
        """Let a run take its turn alone, once it is durable that it does; or pause it, if that was too often."""
        loaded = suspect.loaded
        poison = None if suspect.is_tried else poison_of(loaded, self._limits)
        if poison is None:
            if not suspect.is_tried:  # else the store failed in the middle of it
                [answer] = await self._commit([trial_turn(loaded.head)])
                if isinstance(answer, CommitConflict):
                    self._lose(loaded.head.run_id, answer, suspect)
                    return
                suspect.loaded, suspect.is_tried = tried(loaded), True
            await self._take_together([suspect])
            return
        now = await self.store.now()
        try:
            cached = await self.run_cache.at_rest(loaded)
        except (RunError, StoreCorrupt) as damage:
            await self._put_aside(suspect, damage, now)
            return
        await self._play([(suspect, cached, poison)], now)

    async def _take_together(self, batch: Sequence[OwnedRun]) -> None:
        try:
            if self._queue_worker.heartbeats.has_news:  # for a next attempt to find, wherever it is made
                await self._queue_worker.heartbeats.flush(unsuccessful(batch))
            now = await self.store.now()
            prepared = [(owned, *(self._at_hand(owned) or await self._prepare(owned, now))) for owned in batch]
            while any(cached is not None and problem is None and cached.is_closed for _, cached, problem in prepared):
                prepared = [await self._prepared_again(*each, now) for each in prepared]
        except StoreError:
            self._ready.add_again(owned.loaded.head.run_id for owned in batch)
            raise
        refused = await self._play([(owned, cached, problem) for owned, cached, problem in prepared if cached], now)
        for owned, damage in refused:
            await self._put_aside(owned, damage, now)

    async def _play(
        self, prepared: Sequence[tuple[OwnedRun, CachedRun, RunError | None]], now: Instant
    ) -> list[tuple[OwnedRun, RunError]]:
        """Let runs take their turns, commit them, and do what follows; return those of which nothing can be kept."""
        with outside_loop():
            taken = [self._draft(owned, cached, problem, now) for owned, cached, problem in prepared]
        drafts = [each for each in taken if each is not None]
        if not drafts:
            return []
        turns = [draft.finish(release=not self._is_busy(draft)) for _, _, draft in drafts]
        turns = self.run_queue.with_admissions(turns)
        if self.registry.allow_cross_tenant_signals:
            turns = [replace(turn, crosses_tenants=True) if turn.sends else turn for turn in turns]
        for place, (owned, _, _) in enumerate(drafts):
            if owned.losses_after:
                turns[place] = replace(turns[place], losses=owned.losses_after)
        if has_signals(turns):
            turns = await self._refuse_sends(turns, [owned for owned, _, _ in drafts], now)
        answers = await self._commit(turns)
        self.run_queue.notice_starts(turns)
        refused: list[tuple[OwnedRun, RunError]] = []
        for (owned, cached, draft), turn, answer in zip(drafts, turns, answers, strict=True):
            if isinstance(answer, CommitConflict):
                self._lose(turn.run_id, answer, owned)
                if owned.refused is not None:  # not even a pause can be recorded
                    refused.append((owned, owned.refused))
            else:
                if turn.dead:
                    log_dead_letters(turn.dead)
                self._after(owned, cached, draft, turn, now)
        self.run_cache.trim()
        return refused

    def _draft(
        self, owned: OwnedRun, cached: CachedRun, problem: RunError | None, now: Instant
    ) -> tuple[OwnedRun, CachedRun, TurnDraft] | None:
        """Let a run take its turn, or return None if it is to be made again before.

        Until the commit nothing is awaited: what came in between would be of no turn.
        """
        if owned.drafted is not None and (drafted := owned.take_drafted(cached)) is not None:
            return self._drafted(owned, cached, drafted.draft, drafted.problem)
        was = owned.inputs, owned.is_fresh
        lost = self._lost(owned, cached.state, now) if owned.is_fresh else []
        inputs = [*lost, *owned.inputs] if lost else owned.inputs
        if owned.deferred_with is not None and problem is None and self._is_deferred_otherwise(owned, inputs):
            self.run_cache.forget(cached.state.run_id)
            self._ready.add(cached.state.run_id)
            return None
        owned.taken, owned.inputs, owned.is_fresh = owned.inputs, [], False
        head = owned.loaded.head
        has_losses = head.losses or problem is not None
        owned.losses_after = losses_after(head, problem, self._limits, has_lost=bool(lost)) if has_losses else 0
        owned.refused = self._refusals.take(owned.loaded)
        if owned.refused is not None:  # what came in leads to what cannot be
            problem = owned.refused
            draft = pause_turn(cached.state, owned.loaded, [], problem, now, self.name, self._limits, is_poisoned=True)
        elif problem is None:
            try:
                draft, problem = take_turn(cached, owned.loaded, inputs, now, self.name, self._limits)
            except EndDeferred:
                owned.inputs, owned.is_fresh = was
                owned.deferred_with = owned.loaded, list(inputs)
                self.run_cache.make_again(cached, owned.loaded)
                self._ready.add(cached.state.run_id)
                return None
        else:
            draft = pause_turn(cached.state, owned.loaded, inputs, problem, now, self.name, self._limits)
        return self._drafted(owned, cached, draft, problem)

    def _is_deferred_otherwise(self, owned: OwnedRun, inputs: Sequence[Input]) -> bool:
        """Return whether something has come in since the end of this turn was deferred: then it may end elsewhere."""
        was, owned.deferred_with = owned.deferred_with, None
        return was is not None and was != (owned.loaded, list(inputs))

    def _drafted(
        self, owned: OwnedRun, cached: CachedRun, draft: TurnDraft, problem: RunError | None
    ) -> tuple[OwnedRun, CachedRun, TurnDraft]:
        if draft.dispatch:
            self._dispatcher.leave_unknown(draft)
        if problem is not None:
            logger.error("run %s is paused: %s", cached.state.run_id, problem)
            self.run_cache.forget(cached.state.run_id)
        return owned, cached, draft

    async def _refuse_sends(self, turns: list[Turn], of: Sequence[OwnedRun], now: Instant) -> list[Turn]:
        """Return the turns without the signals that other runs do not take; again and again until that is known."""
        heads = [owned.loaded.head for owned in of]
        while self.declarations is not None:
            try:
                return await without_unfit_signals(self.declarations, turns, heads, now)
            except StoreError:
                logger.exception("node %s: what other runs declare cannot be looked up; trying again", self.name)
                await asyncio.sleep(RETRY_S)
        return turns

    async def _commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Commit, again and again until there is an answer: after an error nobody knows whether it was done."""
        while True:
            try:
                return await self.store.commit(turns)
            except StoreError:
                logger.exception("node %s: the store failed to commit; trying again", self.name)
                await asyncio.sleep(RETRY_S)

    def _is_busy(self, draft: TurnDraft) -> bool:
        """Return whether this node carries out, or is about to carry out, anything for the run.

        A node that is stopping begins nothing any more. It keeps its runs to the end, and gives them back as ready.
        So it does with a run that waits for an activity which is not known here, until another node has it.
        """
        if self._is_stopping:
            return True
        open_steps = draft.state.open_steps
        if self._reports and any(run_id == draft.state.run_id for run_id, _ in self._reports):
            return True
        for step_id in chain(draft.dispatch, self._executor.steps_of(draft.state.run_id)):
            if step_id in open_steps:  # else the turn itself has closed it
                return True
        state = draft.state
        return self._dispatcher.waits_for_unknown(state) and self.definition_filter.has(
            state.plan_id, state.plan_version
        )

    def _at_hand(self, owned: OwnedRun) -> tuple[CachedRun | None, RunError | None] | None:
        """Return a run that is in memory and needs nothing from the store, or None."""
        cached = None if owned.is_fresh else self.run_cache.get(owned.loaded.head)
        return None if cached is None else (cached, None)

    async def _prepare(self, owned: OwnedRun, now: Instant) -> tuple[CachedRun | None, RunError | None]:
        """Return the run as it is in memory, or None if its history cannot be read.

        What has come due since it was loaded is looked up, where it matters.
        """
        try:
            cached, problem = await self.run_cache.make(owned.loaded)
        except (RunError, StoreCorrupt) as damage:
            await self._put_aside(owned, damage, now)
            return None, None
        if isinstance(problem, NondeterminismError) and await self._hand_over(owned, problem):
            return None, None
        lost = self._lost(owned, cached.state, now)
        is_overtaken = cached.state.version != owned.loaded.head.version  # by a turn that was taken here, and let it go
        if is_overtaken or any(cached.state.open_steps[each.step_id].due_at is not None for each in lost):
            try:
                [loaded] = await self.store.load([cached.state.run_id])
            except StoreCorrupt as damage:  # whoever claims the run next makes a dead letter of what cannot be read
                await self._put_aside(owned, damage, now)
                return None, None
            if loaded is None or loaded.head.lease_owner != self.name:  # it was let go, and is claimed again when due
                self._drop(cached.state.run_id)
                return None, None
            if loaded.head.lease_epoch == owned.loaded.head.lease_epoch:
                owned.load_again(loaded, cached.state)
        return cached, problem

    async def _hand_over(self, owned: OwnedRun, problem: NondeterminismError) -> bool:
        """Give a run to a node that has other code for it, unless something of the run is under way here."""
        run_id = owned.loaded.head.run_id
        if (
            owned.inputs
            or self._executor.steps_of(run_id)
            or not await self.definition_filter.hand_over(owned.loaded.head)
        ):
            return False
        logger.info("run %s is handed over to a node with other code: %s", run_id, problem)
        self._let_go(run_id)
        return True

    async def _prepared_again(
        self, owned: OwnedRun, cached: CachedRun | None, problem: RunError | None, now: Instant
    ) -> tuple[OwnedRun, CachedRun | None, RunError | None]:
        """Return a prepared run, made again if it was let go while others were prepared: a query had changed it."""
        if cached is None or problem is not None or not cached.is_closed:
            return owned, cached, problem
        return owned, *await self._prepare(owned, now)

    async def _put_aside(self, owned: OwnedRun, damage: HoldfastError, now: Instant) -> None:
        """Leave a run whose history makes no sense for a while: others go on, and what it was told is kept."""
        run_id = owned.loaded.head.run_id
        logger.error("run %s is put aside: %s", run_id, damage)
        turn = deferring_turn(owned.loaded, now, self.name, damage, self._limits)
        log_dead_letters(turn.dead)
        [answer] = await self._commit([turn])
        self._drop(run_id)
        if isinstance(answer, CommitConflict):
            logger.warning("run %s: it could not be put aside (%s)", run_id, answer.reason)

    def _lost(self, owned: OwnedRun, state: RunState, now: Instant) -> list[NodeLost]:
        """Return word of activities that nobody carries out, as far as they are known here."""
        lost = [step for step in owned.lost_steps(state, now) if self._dispatcher.is_known(state.run_id, step)]
        lost = [step for step in lost if (state.run_id, step.step_id) not in self._reports]
        return [NodeLost(s.step_id) for s in lost if not self._executor.is_working_on(state.run_id, s.step_id)]

    def _after(self, owned: OwnedRun, cached: CachedRun, draft: TurnDraft, turn: Turn | None, now: Instant) -> None:
        """Perform the effects of a turn that is durable."""
        run_id = draft.state.run_id
        cached.settle(draft.state)
        if self._executor.steps_of(run_id) or self._queue_worker.is_in_use:
            for step_id in draft.closed():
                self._executor.cancel(run_id, step_id)
                self._queue_worker.let_go(run_id, step_id)
        if self.run_queue.has_rates:
            self.run_queue.notice_starts_of(draft.state.plan_id, draft.events)
        if not draft.is_plain:
            log_events(draft.events)
        for step_id in draft.dispatch:
            step = draft.state.open_steps.get(step_id)
            if step is not None and self._is_stopping:
                self._return(run_id, step)
            elif step is not None:
                self._dispatcher.dispatch(run_id, step, owned.loaded.details.get(step_id, e.NULL), now)
        is_finished = draft.state.is_finished
        if is_finished:
            self.run_cache.forget(run_id)
            self.completion_waiters.notify(run_id, draft.state.version, draft.events[-1] if draft.events else None)
            self.run_queue.notice_end(draft.state.plan_id)
        if is_finished or (turn is not None and turn.release):
            if self._owned.get(run_id) is owned:  # what came in meanwhile is about steps that this turn has closed
                del self._owned[run_id]
            lacking = None
        else:
            owned.advance(draft, 0 if turn is None else turn.losses)
            lacking = draft.state
        if self._dispatcher.has_unknown or self.definition_filter.lacks_any:
            self._note_lack(run_id, lacking, now)

    def _lose(self, run_id: str, conflict: CommitConflict, owned: OwnedRun) -> None:
        """Let go of a run that somebody else has taken, or whose turn cannot be: its next turn pauses it.

        A turn that has not seen an outcome which was accepted meanwhile is taken again, with all that it was given.
        """
        if conflict.reason == "unseen":
            self.run_cache.forget(run_id)
            owned.inputs, owned.taken, owned.refused = [*owned.taken, *owned.inputs], [], None
            self._to_load.append(run_id)
            self._something.set()
            return
        logger.warning("run %s: a turn was not committed (%s)", run_id, conflict.reason)
        if self._refusals.note(owned, conflict):
            self._to_release.append(run_id)
        self._drop(run_id)
        self._should_claim = True

    def _drop(self, run_id: str) -> None:
        """Forget a run, and give up what is carried out for it here."""
        self._executor.cancel(run_id)
        self._let_go(run_id)

    def _owner_of_queued(self) -> str | None:
        """Return the node that claims admitted runs: this one, unless it takes none, or none any more."""
        takes_runs = self._options.takes_runs and not self._is_stopping and self.failure is None
        return self.name if takes_runs else None

    def owns(self, run_id: str) -> bool:
        """Say whether the run belongs to this node."""
        return run_id in self._owned
