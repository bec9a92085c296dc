"""Takes the turns of a batch: rebuilds the runs, runs their code, commits all turns with one call, performs effects."""

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.core.decide import Input
from holdfast.core.instants import Instant
from holdfast.engine.activities.heartbeats import Heartbeats
from holdfast.engine.hand_over import HandOver
from holdfast.engine.inbox.declarations import Declarations, has_signals, without_unfit_signals
from holdfast.engine.observe.logs import log_dead_letters
from holdfast.engine.start.admission import RunQueue
from holdfast.engine.turns.draft import TurnDraft
from holdfast.engine.turns.execute import CachedRun, RunCache, pause_turn, take_turn
from holdfast.engine.turns.owned_runs import OwnedRun, OwnedRuns, unsuccessful
from holdfast.engine.turns.poison import deferring_turn, is_suspect, losses_after, poison_of, trial_turn, tried
from holdfast.errors import HoldfastError, NondeterminismError, RunError, StoreCorrupt, StoreError
from holdfast.limits import Limits
from holdfast.program.loop import outside_loop
from holdfast.program.port import EndDeferred
from holdfast.registry import Registry
from holdfast.store.port import CommitConflict, Committed, Store, Turn

RETRY_S = 0.2

logger = logging.getLogger("holdfast.node")


class TurnTaker:
    """Takes the turns of one node's runs."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        limits: Limits,
        owned_runs: OwnedRuns,
        run_cache: RunCache,
        run_queue: RunQueue,
        heartbeats: Heartbeats,
        hand_over: HandOver,
    ) -> None:
        self._node = owned_runs.name
        self._store = store
        self._registry = registry
        self._limits = limits
        self.owned_runs = owned_runs
        self._run_cache = run_cache
        self._run_queue = run_queue
        self._heartbeats = heartbeats
        self._hand_over = hand_over
        self.declarations: Declarations | None = None
        """What workflows declare of their signals, to check what the runs of this node send."""

    async def take(self, batch: Sequence[OwnedRun]) -> None:
        suspects = [owned for owned in batch if owned.loaded.head.losses and is_suspect(owned.loaded.head)]
        if not suspects:
            await self._take_together(batch)
            return
        suspect = next((owned for owned in suspects if owned.is_tried), suspects[0])
        # What ended this process between a try that is durable and the turn would be blamed on the run.
        others = [] if suspect.is_tried else [owned for owned in batch if owned not in suspects]
        self.owned_runs.ready.add_again(
            each.loaded.head.run_id for each in batch if each is not suspect and each not in others
        )
        try:
            if others:
                await self._take_together(others)
            if suspect.loaded.head.run_id in self.owned_runs.by_id:
                await self._try_alone(suspect)
        except StoreError:
            self.owned_runs.ready.add_first(suspect.loaded.head.run_id)
            raise

    async def _try_alone(self, suspect: OwnedRun) -> None:
        """Let a run take its turn alone, once it is durable that it does; or pause it, if that was too often."""
        loaded = suspect.loaded
        poison = None if suspect.is_tried else poison_of(loaded, self._limits)
        if poison is None:
            if not suspect.is_tried:  # else the store failed in the middle of it
                [answer] = await self._commit([trial_turn(loaded.head)])
                if isinstance(answer, CommitConflict):
                    self.owned_runs.lose(loaded.head.run_id, answer, suspect)
                    return
                suspect.loaded, suspect.is_tried = tried(loaded), True
            await self._take_together([suspect])
            return
        now = await self._store.now()
        try:
            cached = await self._run_cache.at_rest(loaded)
        except (RunError, StoreCorrupt) as damage:
            await self._defer(suspect, damage, now)
            return
        await self._play([(suspect, cached, poison)], now)

    async def _take_together(self, batch: Sequence[OwnedRun]) -> None:
        try:
            if self._heartbeats.unsent:  # for a next attempt to find, wherever it is made
                await self._heartbeats.flush(unsuccessful(batch))
            now = await self._store.now()
            prepared = [(owned, *(self._at_hand(owned) or await self._prepare(owned, now))) for owned in batch]
            while any(cached is not None and problem is None and cached.is_closed for _, cached, problem in prepared):
                prepared = [await self._prepared_again(*each, now) for each in prepared]
        except StoreError:
            self.owned_runs.ready.add_again(owned.loaded.head.run_id for owned in batch)
            raise
        refused = await self._play([(owned, cached, problem) for owned, cached, problem in prepared if cached], now)
        for owned, damage in refused:
            await self._defer(owned, damage, now)

    async def _play(
        self, prepared: Sequence[tuple[OwnedRun, CachedRun, RunError | None]], now: Instant
    ) -> list[tuple[OwnedRun, RunError]]:
        """Let runs take their turns, commit them, and do what follows; return those of which nothing can be kept."""
        with outside_loop():
            taken = [self._draft(owned, cached, problem, now) for owned, cached, problem in prepared]
        drafts = [each for each in taken if each is not None]
        if not drafts:
            return []
        turns = [draft.finish(release=not self.owned_runs.is_busy(draft)) for _, _, draft in drafts]
        if self._registry.workflow_limits:
            turns = self._run_queue.with_admissions(turns)
        if self._registry.allow_cross_tenant_signals:
            turns = [replace(turn, crosses_tenants=True) if turn.sends else turn for turn in turns]
        for place, (owned, _, _) in enumerate(drafts):
            if owned.losses_after:
                turns[place] = replace(turns[place], losses=owned.losses_after)
        if any(turn.sends for turn in turns) and has_signals(turns):
            turns = await self._refuse_sends(turns, [owned for owned, _, _ in drafts], now)
        answers = await self._commit(turns)
        if self._registry.workflow_limits:
            self._run_queue.notice_starts(turns)
        refused: list[tuple[OwnedRun, RunError]] = []
        for (owned, cached, draft), turn, answer in zip(drafts, turns, answers, strict=True):
            if isinstance(answer, CommitConflict):
                self.owned_runs.lose(turn.run_id, answer, owned)
                if owned.refused is not None:  # not even a pause can be recorded
                    refused.append((owned, owned.refused))
            else:
                if turn.dead:
                    log_dead_letters(turn.dead)
                self.owned_runs.perform_effects(owned, cached, draft, turn, now)
        self._run_cache.trim()
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
        lost = self.owned_runs.lost(owned, cached.state, now) if owned.is_fresh else []
        inputs = [*lost, *owned.inputs] if lost else owned.inputs
        if owned.deferred_with is not None and problem is None and self._is_deferred_otherwise(owned, inputs):
            self._run_cache.forget(cached.state.run_id)
            self.owned_runs.ready.add(cached.state.run_id)
            return None
        owned.taken, owned.inputs, owned.is_fresh = owned.inputs, [], False
        head = owned.loaded.head
        has_losses = head.losses or problem is not None
        owned.losses_after = losses_after(head, problem, self._limits, has_lost=bool(lost)) if has_losses else 0
        refusals = self.owned_runs.refusals
        owned.refused = refusals.take(owned.loaded) if refusals.problems or owned.loaded.messages else None
        if owned.refused is not None:  # what came in leads to what cannot be
            problem = owned.refused
            draft = pause_turn(cached.state, owned.loaded, [], problem, now, self._node, self._limits, is_poisoned=True)
        elif problem is None:
            try:
                draft, problem = take_turn(cached, owned.loaded, inputs, now, self._node, self._limits)
            except EndDeferred:
                owned.inputs, owned.is_fresh = was
                owned.deferred_with = owned.loaded, list(inputs)
                self._run_cache.make_again(cached, owned.loaded)
                self.owned_runs.ready.add(cached.state.run_id)
                return None
        else:
            draft = pause_turn(cached.state, owned.loaded, inputs, problem, now, self._node, self._limits)
        return self._drafted(owned, cached, draft, problem)

    def _is_deferred_otherwise(self, owned: OwnedRun, inputs: Sequence[Input]) -> bool:
        """Return whether something has come in since the end of this turn was deferred: then it may end elsewhere."""
        was, owned.deferred_with = owned.deferred_with, None
        return was is not None and was != (owned.loaded, list(inputs))

    def _drafted(
        self, owned: OwnedRun, cached: CachedRun, draft: TurnDraft, problem: RunError | None
    ) -> tuple[OwnedRun, CachedRun, TurnDraft]:
        if draft.dispatch:
            self.owned_runs.dispatcher.leave_unknown(draft)
        if problem is not None:
            logger.error("run %s is paused: %s", cached.state.run_id, problem)
            self._run_cache.forget(cached.state.run_id)
        return owned, cached, draft

    async def _refuse_sends(self, turns: list[Turn], of: Sequence[OwnedRun], now: Instant) -> list[Turn]:
        """Return the turns without the signals that other runs do not take; again and again until that is known."""
        heads = [owned.loaded.head for owned in of]
        while self.declarations is not None:
            try:
                return await without_unfit_signals(self.declarations, turns, heads, now)
            except StoreError:
                logger.exception("node %s: what other runs declare cannot be looked up; trying again", self._node)
                await asyncio.sleep(RETRY_S)
        return turns

    async def _commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Commit, and retry until there is an answer: after an error it is not known whether it was done."""
        while True:
            try:
                return await self._store.commit(turns)
            except StoreError:
                logger.exception("node %s: the store failed to commit; trying again", self._node)
                await asyncio.sleep(RETRY_S)

    def _at_hand(self, owned: OwnedRun) -> tuple[CachedRun | None, RunError | None] | None:
        """Return a run that is in memory and needs nothing from the store, or None."""
        cached = None if owned.is_fresh else self._run_cache.get(owned.loaded.head)
        return None if cached is None else (cached, None)

    async def _prepare(self, owned: OwnedRun, now: Instant) -> tuple[CachedRun | None, RunError | None]:
        """Return the run as it is in memory, or None if its history cannot be read.

        What has come due since it was loaded is looked up, where it matters.
        """
        try:
            cached, problem = await self._run_cache.make(owned.loaded)
        except (RunError, StoreCorrupt) as damage:
            await self._defer(owned, damage, now)
            return None, None
        if isinstance(problem, NondeterminismError) and await self._hand_over.for_other_code(owned, problem):
            return None, None
        lost = self.owned_runs.lost(owned, cached.state, now)
        is_overtaken = cached.state.version != owned.loaded.head.version  # by a turn that was taken here, and let it go
        if is_overtaken or any(cached.state.open_steps[each.step_id].due_at is not None for each in lost):
            try:
                [loaded] = await self._store.load([cached.state.run_id])
            except StoreCorrupt as damage:  # the next claim makes a dead letter of what cannot be read
                await self._defer(owned, damage, now)
                return None, None
            if loaded is None or loaded.head.lease_owner != self._node:  # it was let go, and is claimed again when due
                self.owned_runs.drop(cached.state.run_id)
                return None, None
            if loaded.head.lease_epoch == owned.loaded.head.lease_epoch:
                owned.load_again(loaded, cached.state)
        return cached, problem

    async def _prepared_again(
        self, owned: OwnedRun, cached: CachedRun | None, problem: RunError | None, now: Instant
    ) -> tuple[OwnedRun, CachedRun | None, RunError | None]:
        """Return a prepared run, made again if it was let go while others were prepared: a query had changed it."""
        if cached is None or problem is not None or not cached.is_closed:
            return owned, cached, problem
        return owned, *await self._prepare(owned, now)

    async def _defer(self, owned: OwnedRun, damage: HoldfastError, now: Instant) -> None:
        """Defer a run whose history makes no sense: others go on, and its messages are kept."""
        run_id = owned.loaded.head.run_id
        logger.error("run %s is deferred: %s", run_id, damage)
        turn = deferring_turn(owned.loaded, now, self._node, damage, self._limits)
        log_dead_letters(turn.dead)
        [answer] = await self._commit([turn])
        self.owned_runs.drop(run_id)
        if isinstance(answer, CommitConflict):
            logger.warning("run %s could not be deferred (%s)", run_id, answer.reason)
