"""The loop that takes the turns of a node's runs: claim, turn, commit, effects.

Each round collects the work (runs that were claimed, outcomes of this node's activities), takes a turn of every run,
commits all turns with one call, and only then performs effects. With nothing to do the loop sleeps until the next due
instant or until it is notified. Nothing is polled, except for a claim every `safety_poll_s`, in case a notification was
lost.

`TurnLoop` decides when there is work. `TurnProcessor` processes one batch of runs: it loads them into memory, runs
their programs, commits the turns and performs the effects. A single turn is in `execute.py`, and what a node keeps for
each of its runs in `owned_runs.py`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import cast

from msgspec.structs import replace

from holdfast.core.codec import holds_sealed, unreadable_payload
from holdfast.core.decide import Input
from holdfast.core.events import RunPaused
from holdfast.core.instants import Instant
from holdfast.core.messages import ActivitySucceeded
from holdfast.engine.activities.heartbeats import Heartbeats
from holdfast.engine.activities.queue_worker import QueueWorker, outcome_message
from holdfast.engine.definition_filter import DefinitionFilter
from holdfast.engine.hand_over import HandOver
from holdfast.engine.inbox.declarations import Declarations, has_signals, without_unfit_signals
from holdfast.engine.observe.logs import log_dead_letters
from holdfast.engine.observe.takeovers import Takeovers
from holdfast.engine.options import NodeOptions
from holdfast.engine.start.admission import RunQueue
from holdfast.engine.start.starter import Starter
from holdfast.engine.turns.draft import TurnDraft
from holdfast.engine.turns.execute import CachedRun, RunCache, pause_turn, take_turn
from holdfast.engine.turns.fail_open import FailOpen
from holdfast.engine.turns.owned_runs import OwnedRun, OwnedRuns, unsuccessful
from holdfast.engine.turns.poison import (
    TRIED_TOGETHER,
    counting_turn,
    deferring_turn,
    is_first_try,
    is_suspect,
    losses_after,
    poison_of,
    tried,
)
from holdfast.errors import (
    HoldfastError,
    LeaseExpired,
    NodeSuperseded,
    NondeterminismError,
    PoisonTurn,
    RunError,
    StoreCorrupt,
    StoreError,
    UnhandledError,
)
from holdfast.limits import Limits
from holdfast.program.loop import outside_loop
from holdfast.program.port import EndDeferred
from holdfast.registry import Registry
from holdfast.store.port import CommitConflict, Committed, LoadedRun, Store, Turn
from holdfast.store.wakeups import Listener

RETRY_S = 0.2
"""The pause before a failed call of the store is retried."""

_MENDED_BY_OTHER_CODE = (NondeterminismError, UnhandledError)
"""The errors for which a node with other code may be able to continue the run."""

OVERLAPPED = 200
"""The size from which a batch is committed in two halves, if the store works concurrently. Smaller ones share one
commit.
"""

UNDER_WAY = 12
"""After this many loop iterations a call of the store has been sent. If not, the gain is smaller, with no harm."""

Prepared = tuple[OwnedRun, CachedRun, RunError | None]
"""A run that can take its turn, with the reason if its program cannot continue."""

logger = logging.getLogger("holdfast.node")


class TurnLoop:
    """Takes the turns of one node's runs, for as long as the node works."""

    def __init__(
        self,
        store: Store,
        options: NodeOptions,
        owned_runs: OwnedRuns,
        definition_filter: DefinitionFilter,
        queue_worker: QueueWorker,
        starter: Starter,
        takeovers: Takeovers,
        hand_over: HandOver,
        processor: "TurnProcessor",
        renew: Callable[[], Awaitable[None]],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._node = owned_runs.name
        self._store = store
        self._options = options
        self._owned_runs = owned_runs
        self._definition_filter = definition_filter
        self._queue_worker = queue_worker
        self._starter = starter
        self._takeovers = takeovers
        self._hand_over = hand_over
        self._processor = processor
        self._renew = renew
        self._on_failure = on_failure
        self._due_at: Instant | None = None
        self._knows_due_at = False
        self._claiming: asyncio.Task[None] | None = None
        self._is_asleep = self._has_claimed = False
        self.superseded: NodeSuperseded | None = None
        """Set if another process has taken over the node's name: the loop ends with this error."""

    @property
    def is_idle(self) -> bool:
        """Whether the loop waits for an event, and none has occurred yet."""
        return self._is_asleep and self._claiming is None and not self._owned_runs.changed.is_set()

    async def run(self) -> None:
        """Take turns until the node stops and nothing is in progress here any more."""
        try:
            await self._take_turns()
        except asyncio.CancelledError:  # the node is being stopped, which is not the fault of the runs in progress
            with suppress(StoreError):
                await self._processor.take_back_tries()
            raise

    async def _take_turns(self) -> None:
        owned_runs = self._owned_runs
        while True:
            try:
                batch = await self._gather()
                if self._queue_worker.is_held and self._has_tried_suspects():
                    self._queue_worker.begin()
                if self.superseded is not None:
                    raise self.superseded
                if batch:
                    await self._processor.process(batch)
                elif owned_runs.is_stopping and not owned_runs.executor.busy and not owned_runs.reports:
                    return
                else:
                    await self._sleep()
            except StoreError:
                logger.exception("node %s: the store failed; retrying", self._node)
                await asyncio.sleep(RETRY_S)
            except Exception as failure:
                self._on_failure(failure)
                raise

    async def _gather(self) -> list[OwnedRun]:
        """Return the runs that have work to do."""
        owned_runs = self._owned_runs
        if owned_runs.reports:
            await self._record_outcomes()
        if owned_runs.to_release:
            await self._store.release(self._node, owned_runs.to_release)
            owned_runs.to_release = []
        if owned_runs.to_load:
            await self._load_again()
        if owned_runs.should_offer and not owned_runs.is_stopping:
            await self._hand_over.offer()
        ready = owned_runs.ready
        if self._claiming is not None:
            claiming, self._claiming = self._claiming, None
            await claiming
        elif owned_runs.should_claim and ready.wants_more and not owned_runs.is_stopping:
            await self._claim()
        seen = 0
        while seen < len(ready) and not (seen and ready.is_full):
            seen = len(ready)  # messages about to arrive share the commit
            await asyncio.sleep(0)
        by_id = owned_runs.by_id
        return [by_id[run_id] for run_id in ready.take() if run_id in by_id]

    async def _claim(self) -> None:
        definitions = self._definition_filter
        self._owned_runs.should_claim = False  # before the call: a notification may arrive during it
        self._knows_due_at = False
        try:
            plans = definitions.claimable
            claimed = await self._store.claim(self._node, self._options.claim_runs, plans)
            if plans is not definitions.registered:
                definitions.note_claim(plans)
        except LeaseExpired:
            self._owned_runs.should_claim = True
            await self._renew()
            return
        except StoreError:
            self._owned_runs.should_claim = True
            raise
        is_full, has_lost = len(claimed) == self._options.claim_runs, any(loaded.head.losses for loaded in claimed)
        self._owned_runs.should_claim |= is_full
        self._has_claimed |= not (is_full and has_lost)
        if self._starter.creating:
            await self._starter.begun(claimed)
        if has_lost:
            await self._takeovers.note(claimed)
        for loaded in claimed:
            self._owned_runs.add(loaded)

    def _has_tried_suspects(self) -> bool:
        """Return whether this node has claimed the runs of its earlier processes, and tried all suspects among them.

        Before that it takes no jobs: a job that ends every process that takes it would do so in the middle of a try,
        and the run being tried would be blamed.
        """
        owned = self._owned_runs.by_id.values()
        return self._has_claimed and not any(is_suspect(each.loaded.head) for each in owned)

    async def _sleep(self) -> None:
        """Sleep until the next due instant, or until an event occurs."""
        changed = self._owned_runs.changed
        if changed.is_set():
            changed.clear()
            return
        stops = self._owned_runs.is_stopping  # then nothing is claimed, whatever is due
        due_at = None if stops else await self._next_due()
        timeout_s = None if due_at is None else (due_at - await self._store.now()) / 1_000_000
        try:
            async with asyncio.timeout(timeout_s):
                self._is_asleep = True
                await changed.wait()
        except TimeoutError:
            self._owned_runs.should_claim = True
        finally:
            self._is_asleep = False
        changed.clear()

    async def _next_due(self) -> Instant | None:
        """Return when a claim may find something. The store is asked once after each claim.

        Everything that becomes due earlier notifies the nodes, including turns of this node, and leads to a claim.
        """
        if not self._knows_due_at:
            self._due_at = await self._store.next_due(self._node, self._definition_filter.registered)
            self._knows_due_at = True
        return self._due_at

    async def _load_again(self) -> None:
        """Load runs of this node again: a run with a last turn that missed an outcome takes that turn again.

        No turn is taken meanwhile, so that none can release a run that was loaded.
        """
        run_ids = list(self._owned_runs.to_load)
        try:
            runs = await self._store.load(run_ids)
        except StoreCorrupt:  # the node that claims them makes dead letters of what cannot be read
            for run_id in run_ids:
                self._owned_runs.drop(run_id)
            self._owned_runs.to_release += run_ids
            runs = []
        del self._owned_runs.to_load[: len(run_ids)]
        for loaded in runs:
            if loaded is not None and loaded.head.lease_owner == self._node:
                owned = self._owned_runs.by_id.get(loaded.head.run_id)
                if owned is None or owned.loaded.head.lease_epoch == loaded.head.lease_epoch:
                    self._owned_runs.add(loaded)

    async def _record_outcomes(self) -> None:
        """Make outcomes of runs that were lost before durable: if a turn then ends this node, no activity did."""
        batch = list(self._owned_runs.reports.items())
        await self._queue_worker.heartbeats.flush(
            key for key, (_, outcome) in batch if not isinstance(outcome, ActivitySucceeded)
        )
        now = await self._store.now()
        await self._store.deliver([outcome_message(work, outcome, now) for _, (work, outcome) in batch])
        for key, report in batch:
            if self._owned_runs.reports.get(key) is report:
                del self._owned_runs.reports[key]
        self._owned_runs.should_claim = True

    def expect(self) -> None:
        """Claim immediately if there is nothing else to do: a caller in this process is about to make runs ready.

        It is called right before that, so that both calls reach the store together. No claim is made while turns are
        being taken: runs loaded before a commit would be outdated after it.
        """
        if self._is_asleep and self._claiming is None and not self._owned_runs.is_stopping:
            self._claiming = asyncio.create_task(self._claim(), name="claim")
            self._owned_runs.changed.set()

    async def listen(self, listener: Listener) -> None:
        """Look for work whenever the store notifies this node, and every `safety_poll_s`."""
        while True:
            await listener.wait(self._options.safety_poll_s)
            self._owned_runs.should_claim = True
            self._owned_runs.should_offer |= bool(self._definition_filter.lacking)
            self._owned_runs.changed.set()
            if self._queue_worker.is_taking:
                self._queue_worker.notify()


class TurnProcessor:
    """Processes batches of runs that have work: one turn of each run, and one commit of all of them."""

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
        """The signal declarations of workflows, to check the signals that runs of this node send."""
        self.fail_open: FailOpen | None = None
        """Commits the turns, if the node may fail open."""

    async def process(self, batch: Sequence[OwnedRun]) -> None:
        """Take a turn of each run, commit the turns, and perform their effects. Possible poison runs are processed
        separately.
        """
        suspects = [owned for owned in batch if owned.loaded.head.losses and is_suspect(owned.loaded.head)]
        if not suspects:
            await self._take_together(batch)
            return
        chosen = [owned for owned in suspects if owned.is_tried] or self._next_tries(suspects)
        # If this process died between the recorded try and the turn, the run would be blamed.
        known = {owned.loaded.head.run_id for owned in suspects}
        others = [] if chosen[0].is_tried else [owned for owned in batch if owned.loaded.head.run_id not in known]
        taken = {owned.loaded.head.run_id for owned in (*chosen, *others)}
        self.owned_runs.ready.add_again(run_id for each in batch if (run_id := each.loaded.head.run_id) not in taken)
        try:
            if others:
                await self._take_together(others)
            chosen = [owned for owned in chosen if owned.loaded.head.run_id in self.owned_runs.by_id]
            if chosen:
                await self._try(chosen)
        except StoreError:
            for owned in reversed(chosen):
                self.owned_runs.ready.add_first(owned.loaded.head.run_id)
            raise

    def _next_tries(self, suspects: Sequence[OwnedRun]) -> Sequence[OwnedRun]:
        """Return the suspects that take their turns next: several together on their first try, otherwise one alone.

        The one alone is the one that was lost least often: otherwise something that ends each process soon after its
        start would always hit the try of the same run.
        """
        first = [owned for owned in suspects if is_first_try(owned.loaded, self._limits)]
        return first[:TRIED_TOGETHER] or [min(suspects, key=lambda owned: owned.loaded.head.losses)]

    async def _try(self, suspects: Sequence[OwnedRun]) -> None:
        """Let suspects take their turns, once the try is durable; or pause one that was tried too often."""
        if not suspects[0].is_tried:  # otherwise the store failed in the middle of it
            poison = poison_of(suspects[0].loaded, self._limits)
            if poison is not None:
                await self._set_aside(suspects[0], poison)
                return
            self.owned_runs.tried_now = suspects
            heads = [owned.loaded.head for owned in suspects]
            answers = await self._commit([counting_turn(head, head.losses + 1) for head in heads])
            for owned, answer in zip(suspects, answers, strict=True):
                if isinstance(answer, CommitConflict):
                    self.owned_runs.lose(owned.loaded.head.run_id, answer, owned)
                else:
                    owned.loaded, owned.is_tried = tried(owned.loaded), True
        if still_tried := [owned for owned in suspects if owned.is_tried]:
            await self._take_together(still_tried)
        self.owned_runs.tried_now = [owned for owned in suspects if owned.is_tried]  # the end of a turn was deferred

    async def take_back_tries(self) -> None:
        """Do not count the running tries: the node is stopping, and none of them has ended it."""
        under_way = [(owned.loaded.head, owned.is_tried) for owned in self.owned_runs.under_try()]
        if under_way:
            await self._store.commit([counting_turn(head, head.losses - is_tried) for head, is_tried in under_way])

    async def _set_aside(self, suspect: OwnedRun, poison: PoisonTurn) -> None:
        """Pause a run that was tried too often."""
        loaded, now = suspect.loaded, await self._store.now()
        try:
            cached = await self._run_cache.at_rest(loaded)
        except (RunError, StoreCorrupt) as damage:
            await self._defer(suspect, damage, now)
            return
        await self._take_and_commit([(suspect, cached, poison)], now)
        self._run_cache.trim()

    async def _take_together(self, batch: Sequence[OwnedRun]) -> None:
        try:
            if self._heartbeats.unsent:  # for the next attempt to find, wherever it is made
                await self._heartbeats.flush(unsuccessful(batch))
            now = await self._store.now()
            fresh = [owned.loaded.head for owned in batch if owned.is_fresh]
            if len(fresh) > 1:
                await self._run_cache.read_ahead(fresh)
            prepared = [(owned, *(self._at_hand(owned) or await self._prepare(owned, now))) for owned in batch]
            ready = await self._still_open(prepared, now)
        except StoreError:
            self.owned_runs.ready.add_again(owned.loaded.head.run_id for owned in batch)
            raise
        if len(ready) >= OVERLAPPED and self._store.capabilities.commits_aside and self.fail_open is None:
            refused = await self._take_in_halves(ready, now)
        else:
            refused = await self._take_and_commit(ready, now)
        self._run_cache.trim()
        for owned, damage in refused:
            await self._defer(owned, damage, now)

    async def _still_open(
        self, prepared: Sequence[tuple[OwnedRun, CachedRun | None, RunError | None]], now: Instant
    ) -> list[Prepared]:
        """Return the runs that can take their turns; runs released meanwhile are rebuilt."""
        while any(cached is not None and problem is None and cached.is_closed for _, cached, problem in prepared):
            prepared = [await self._prepared_again(*each, now) for each in prepared]
        if self._registry.workflow_limits:
            for owned, cached, _ in prepared:
                if cached is not None:
                    owned.admission = await self._run_queue.request_of(owned.loaded, cached.state)
        return cast(list[Prepared], [each for each in prepared if each[1] is not None])

    async def _take_in_halves(self, ready: Sequence[Prepared], now: Instant) -> list[tuple[OwnedRun, RunError]]:
        """Take and commit turns in two halves: while the store commits the first, the second is taken here.

        They have different runs, and each half is one commit: otherwise this is the same as taking all turns together.
        """
        half = len(ready) // 2
        first = asyncio.create_task(self._take_and_commit(ready[:half], now), name="first half")
        try:
            for _ in range(UNDER_WAY):  # until the store has received the first half
                await asyncio.sleep(0)
            rest = ready[half:]
            try:
                if any(problem is None and cached.is_closed for _, cached, problem in rest):
                    rest = await self._still_open(rest, now)
            except StoreError:
                self.owned_runs.ready.add_again(owned.loaded.head.run_id for owned, _, _ in rest)
                rest = []
            refused = await self._take_and_commit(rest, now)
        except BaseException:
            first.cancel()
            raise
        return [*await first, *refused]

    async def _take_and_commit(self, prepared: Sequence[Prepared], now: Instant) -> list[tuple[OwnedRun, RunError]]:
        """Let runs take turns, commit these and perform their effects; return the runs that cannot be recorded."""
        with outside_loop():
            taken = [self._draft(owned, cached, problem, now) for owned, cached, problem in prepared]
        drafts = [each for each in taken if each is not None]
        if not drafts:
            return []
        turns = [draft.finish(release=self._is_let_go(owned, draft)) for owned, _, draft in drafts]
        if self._registry.workflow_limits or self._registry.approvals:
            turns = self._run_queue.with_admissions(turns)
        if any(turn.starts for turn in turns):
            turns = await self._run_queue.with_external_admissions(turns)
        if self._registry.allow_cross_tenant_signals:
            turns = [replace(turn, crosses_tenants=True) if turn.sends else turn for turn in turns]
        for place, (owned, _, _) in enumerate(drafts):
            if owned.losses_after:
                turns[place] = replace(turns[place], losses=owned.losses_after)
        if any(turn.sends for turn in turns) and has_signals(turns):
            turns = await self._refuse_sends(turns, [owned for owned, _, _ in drafts], now)
        if self.fail_open is None:
            answers = await self._commit(turns)
        else:
            answers = await self.fail_open.commit(drafts, turns, now)
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
                if owned.should_offer:
                    self.owned_runs.ready.add(turn.run_id)
        return refused

    def _is_let_go(self, owned: OwnedRun, draft: TurnDraft) -> bool:
        """Return whether a turn releases its run: nothing of it is running here, and it is not being offered.

        A run whose history does not match the code here is offered to nodes with other code once its pause is durable
        and nothing of it is running: such a node may have started, and searched for runs that wait for it, before that.
        """
        is_busy = self.owned_runs.is_busy(draft)
        owned.should_offer &= not is_busy and not draft.state.is_finished
        return not is_busy and not owned.should_offer

    def _draft(
        self, owned: OwnedRun, cached: CachedRun, problem: RunError | None, now: Instant
    ) -> tuple[OwnedRun, CachedRun, TurnDraft] | None:
        """Let a run take its turn, or return None if it must be rebuilt first.

        Nothing is awaited until the commit: a message that arrived in between would belong to no turn.
        """
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
        if owned.refused is not None:  # its inputs lead to a turn that cannot be stored
            problem = owned.refused
            draft = pause_turn(cached.state, owned.loaded, [], problem, now, self._node, self._limits, is_poisoned=True)
        elif problem is None:
            try:
                begun = () if self.fail_open is None else self.fail_open.begun_before(cached.state.run_id)
                bounds = self._limits, begun, owned.admission
                draft, problem = take_turn(cached, owned.loaded, inputs, now, self._node, *bounds)
            except EndDeferred:
                owned.inputs, owned.is_fresh = was
                owned.deferred_with = owned.loaded, list(inputs)
                self._run_cache.make_again(cached, owned.loaded)
                self.owned_runs.ready.add(cached.state.run_id)
                return None
        else:
            draft = pause_turn(cached.state, owned.loaded, inputs, problem, now, self._node, self._limits)
        if draft.dispatch:
            self.owned_runs.dispatcher.leave_unknown(draft)
        was_offered, owned.should_offer = owned.should_offer, False
        if problem is not None:
            has_paused = any(isinstance(event.data, RunPaused) for event in draft.events)
            owned.should_offer = isinstance(problem, _MENDED_BY_OTHER_CODE) and (has_paused or not owned.is_offered)
            owned.paused_by = problem
            if not was_offered and not has_paused:  # otherwise it is logged as soon as it is durable
                logger.error("run %s stays paused: %s", cached.state.run_id, problem)
            self._run_cache.forget(cached.state.run_id)
        return owned, cached, draft

    def _is_deferred_otherwise(self, owned: OwnedRun, inputs: Sequence[Input]) -> bool:
        """Return whether a new input has arrived since the end of this turn was deferred: then it may end elsewhere."""
        was, owned.deferred_with = owned.deferred_with, None
        return was is not None and was != (owned.loaded, list(inputs))

    async def _refuse_sends(self, turns: list[Turn], of: Sequence[OwnedRun], now: Instant) -> list[Turn]:
        """Return the turns without signals that other runs do not accept. The lookup is retried until it succeeds."""
        heads = [owned.loaded.head for owned in of]
        while self.declarations is not None:
            try:
                return await without_unfit_signals(self.declarations, turns, heads, now)
            except StoreError:
                logger.exception("node %s: the declarations of other workflows could not be read; retrying", self._node)
                await asyncio.sleep(RETRY_S)
        return turns

    async def _commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        """Commit, and retry until there is an answer: after an error it is unknown whether the commit succeeded."""
        while True:
            try:
                return await self._store.commit(turns)
            except StoreError:
                logger.exception("node %s: the store failed to commit; retrying", self._node)
                await asyncio.sleep(RETRY_S)

    def _at_hand(self, owned: OwnedRun) -> tuple[CachedRun | None, RunError | None] | None:
        """Return a run that is in memory and needs nothing from the store, or None."""
        loaded = owned.loaded
        if _has_sealed(loaded):
            return None
        cached = None if owned.is_fresh else self._run_cache.get(loaded.head)
        return None if cached is None else (cached, None)

    async def _prepare(self, owned: OwnedRun, now: Instant) -> tuple[CachedRun | None, RunError | None]:
        """Return the run from memory, or None if its history cannot be read.

        What has become due since it was loaded is looked up if it matters.
        """
        try:
            if _has_sealed(owned.loaded):
                raise unreadable_payload()
            cached, problem = await self._run_cache.make(owned.loaded)
        except (RunError, StoreCorrupt) as damage:
            await self._defer(owned, damage, now)
            return None, None
        misfit = owned.paused_by if owned.should_offer and problem is None else problem
        if isinstance(misfit, _MENDED_BY_OTHER_CODE) and await self._hand_over.for_other_code(owned, misfit):
            return None, None
        lost = self.owned_runs.lost(owned, cached.state, now)
        is_overtaken = cached.state.version != owned.loaded.head.version  # by a turn taken here that released it
        if is_overtaken or any(cached.state.open_steps[each.step_id].due_at is not None for each in lost):
            try:
                [loaded] = await self._store.load([cached.state.run_id])
            except StoreCorrupt as damage:  # the next claim makes a dead letter of what cannot be read
                await self._defer(owned, damage, now)
                return None, None
            if loaded is None or loaded.head.lease_owner != self._node:  # it was released, and is claimed again if due
                self.owned_runs.drop(cached.state.run_id)
                return None, None
            if loaded.head.lease_epoch == owned.loaded.head.lease_epoch:
                owned.load_again(loaded, cached.state)
        return cached, problem

    async def _prepared_again(
        self, owned: OwnedRun, cached: CachedRun | None, problem: RunError | None, now: Instant
    ) -> tuple[OwnedRun, CachedRun | None, RunError | None]:
        """Return a prepared run, rebuilt if it was released while others were prepared because a query changed it."""
        if cached is None or problem is not None or not cached.is_closed:
            return owned, cached, problem
        return owned, *await self._prepare(owned, now)

    async def _defer(self, owned: OwnedRun, damage: HoldfastError, now: Instant) -> None:
        """Defer a run with an inconsistent history: other runs continue, and its messages are kept."""
        run_id = owned.loaded.head.run_id
        logger.error("run %s is deferred: %s", run_id, damage)
        turn = deferring_turn(owned.loaded, now, self._node, damage, self._limits)
        log_dead_letters(turn.dead)
        [answer] = await self._commit([turn])
        self.owned_runs.drop(run_id)
        if isinstance(answer, CommitConflict):
            logger.warning("run %s could not be deferred (%s)", run_id, answer.reason)


def _has_sealed(run: LoadedRun) -> bool:
    """Return whether something that waits for the run could not be decrypted."""
    for message in run.messages:  # checked for each turn: generators would be slower than the loops
        if holds_sealed(message.payload):
            return True
    for signal in run.signals:  # noqa: SIM110
        if holds_sealed(signal.payload):
            return True
    return False
