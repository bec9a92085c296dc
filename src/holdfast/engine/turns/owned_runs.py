"""The runs that a node owns: what comes in for them, what is carried out for them here, and how they are let go.

A run is owned from its claim, or its creation, until a turn releases it or another node has it. Nothing here waits: the
node's loop asks the store for what is noted here (`should_claim`, `to_load`, `to_release`, `reports`, `should_offer`).
"""

import asyncio
import logging
from itertools import chain

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.clock import Rng
from holdfast.core import events as e
from holdfast.core.instants import Instant
from holdfast.core.messages import ActivityReturned, NodeLost
from holdfast.core.state import OpenStep, RunState
from holdfast.engine.activities.context import Details, Outcome, Work
from holdfast.engine.activities.dispatch import NONE, Dispatcher
from holdfast.engine.activities.executor import ActivityExecutor
from holdfast.engine.activities.queue_worker import QueueWorker
from holdfast.engine.activities.slots import Slots
from holdfast.engine.completion_waiters import CompletionWaiters
from holdfast.engine.definition_filter import DefinitionFilter
from holdfast.engine.observe.logs import LOGGED, log_events
from holdfast.engine.options import NodeOptions
from holdfast.engine.start.admission import RunQueue
from holdfast.engine.start.first_turns import First
from holdfast.engine.turns.draft import TurnDraft
from holdfast.engine.turns.execute import CachedRun, RunCache
from holdfast.engine.turns.owned_runs import OwnedRun, ReadyQueue
from holdfast.engine.turns.poison import Refusals
from holdfast.limits import Limits
from holdfast.registry import Registry
from holdfast.store.port import CommitConflict, Heartbeat, LoadedRun, NewRun, Turn
from holdfast.store.types import created_run

logger = logging.getLogger("holdfast.node")


class OwnedRuns:
    """The runs of one node, by their ids, and what the node has to do about them."""

    def __init__(
        self,
        name: str,
        registry: Registry,
        rng: Rng,
        options: NodeOptions,
        limits: Limits,
        slots: Slots,
        queue_worker: QueueWorker,
        run_cache: RunCache,
        completion_waiters: CompletionWaiters,
        run_queue: RunQueue,
        definition_filter: DefinitionFilter,
    ) -> None:
        self.name = name
        self.by_id: dict[str, OwnedRun] = {}
        self.ready = ReadyQueue()
        self.refusals = Refusals()
        self.executor = ActivityExecutor(slots, self._on_outcome, self._on_heartbeat, rng, limits)
        self._workflow_limits = registry.workflow_limits
        self.dispatcher = Dispatcher(registry, self.executor, self._on_outcome)
        self._queue_worker = queue_worker
        self._run_cache = run_cache
        self._completion_waiters = completion_waiters
        self._run_queue = run_queue
        self._definition_filter = definition_filter
        self._most_cached = options.cached_runs
        self.reports: dict[tuple[str, str], tuple[Work, Outcome]] = {}
        """Outcomes that are made durable before a run takes them, because it was lost before."""
        self.to_release: list[str] = []
        self.to_load: list[str] = []
        self.should_claim = True
        self.should_offer = False
        """Whether a run may be handed over, because it waits for an activity that this node does not have."""
        self.has_news = False
        """Whether the node lacks other activities than it has published."""
        self.is_stopping = False
        self.changed = asyncio.Event()
        """Set whenever there may be something to do."""

    def add(self, loaded: LoadedRun) -> None:
        """Take a run that was claimed for this node; its turn comes with the next round."""
        run_id = loaded.head.run_id
        owned = self.by_id.get(run_id)
        if owned is not None and owned.drafted is not None:
            if owned.is_as_before(loaded):
                return
            owned.drafted = None  # there is more to take with the first turn, or another node owned it in between
            self._run_cache.forget(run_id)
        if owned is None:
            self.by_id[run_id] = OwnedRun(loaded)
        elif owned.loaded.head.lease_epoch == loaded.head.lease_epoch:
            if loaded.head.version < owned.loaded.head.version:  # the answer was overtaken by a turn
                return
            if owned.loaded.details:  # what activities here have said since is newer
                loaded = replace(loaded, details=loaded.details | owned.loaded.details)
            owned.loaded = loaded
            owned.is_fresh = True
        else:  # another node owned it in between, which knows nothing of what goes on here
            self.executor.cancel(run_id)
            self.by_id[run_id] = OwnedRun(loaded)
        self.ready.add(run_id, is_new=loaded.head.version == 1)
        self.changed.set()

    def begin(self, new: NewRun, now: Instant, first: First | None) -> None:
        """Hold a run that was just created; its history is known without asking."""
        if first is None:
            self._run_cache.keep(self._run_cache.beginning(new))
            self.add(created_run(new, self.name, now))
            return
        self._run_cache.keep(first.drafted.cached)
        owned = self.by_id[new.run_id] = OwnedRun(first.loaded)
        owned.is_fresh = False
        if first.is_at_work:
            self.perform_effects(owned, first.drafted.cached, first.drafted.draft, None, now)
            self._run_cache.trim()
        else:
            owned.drafted = first.drafted
            self.ready.add(new.run_id)
            self.changed.set()

    @property
    def has_room(self) -> bool:
        """Whether a run that begins now can stay in memory."""
        return len(self.by_id) < self._most_cached and not self.is_stopping

    def owns(self, run_id: str) -> bool:
        """Return whether the run belongs to this node."""
        return run_id in self.by_id

    def find(self, run_id: str) -> None:
        """Take a run that belongs to this node, if that is still so between two turns."""
        if run_id not in self.to_load:
            self.to_load.append(run_id)
        self.changed.set()

    def _on_outcome(self, work: Work, outcome: Outcome) -> None:
        owned = self.by_id.get(work.run_id)
        if owned is not None and owned.loaded.head.losses:
            self.reports[work.run_id, work.step.step_id] = work, outcome
        elif owned is not None:
            owned.inputs.append(outcome)
            self.ready.add(work.run_id)
        self.changed.set()

    def return_attempt(self, run_id: str, step: OpenStep) -> None:
        """Record that an attempt has not begun here, and never will: the node that goes on with the run makes it."""
        owned = self.by_id.get(run_id)
        if owned is not None:
            owned.inputs.append(ActivityReturned(step.step_id, step.logical_attempt_id, step.engine_attempt_id))
            self.ready.add(run_id)

    def _on_heartbeat(self, work: Work, details: Details) -> None:
        """Keep the progress that an activity reports: here for a next attempt, and in the store for another node."""
        owned, step_id = self.by_id.get(work.run_id), work.step.step_id
        if owned is not None and details is not UNSET:
            owned.loaded.details[step_id] = details
            self._queue_worker.heartbeats.send(Heartbeat(run_id=work.run_id, step_id=step_id, details=details))

    def is_busy(self, draft: TurnDraft) -> bool:
        """Return whether this node carries out, or is about to carry out, anything for the run.

        A node that is stopping begins nothing any more. It keeps its runs to the end, and gives them back as ready.
        So it does with a run that waits for an activity which is not known here, until another node has it.
        """
        if self.is_stopping:
            return True
        open_steps = draft.state.open_steps
        if self.reports and any(run_id == draft.state.run_id for run_id, _ in self.reports):
            return True
        for step_id in chain(draft.dispatch, self.executor.attempts.get(draft.state.run_id, ())):
            if step_id in open_steps:  # else the turn itself has closed it
                return True
        state = draft.state
        if not self.dispatcher.unknown or not self.dispatcher.waits_for_unknown(state):
            return False
        return self._definition_filter.has(state.plan_id, state.plan_version)

    def lost(self, owned: OwnedRun, state: RunState, now: Instant) -> list[NodeLost]:
        """Return the activities that no node carries out, as far as they are known here."""
        lost = [step for step in owned.lost_steps(state, now) if self.dispatcher.is_known(state.run_id, step)]
        lost = [step for step in lost if (state.run_id, step.step_id) not in self.reports]
        return [NodeLost(s.step_id) for s in lost if not self.executor.is_working_on(state.run_id, s.step_id)]

    def perform_effects(
        self, owned: OwnedRun, cached: CachedRun, draft: TurnDraft, turn: Turn | None, now: Instant
    ) -> None:
        """Perform the effects of a turn that is durable."""
        run_id = draft.state.run_id
        cached.settle(draft.state)
        heartbeats = self._queue_worker.heartbeats
        if self.executor.attempts.get(run_id) or self._queue_worker.jobs or heartbeats.kept or heartbeats.unsent:
            for step_id in draft.closed():
                self.executor.cancel(run_id, step_id)
                self._queue_worker.let_go(run_id, step_id)
        if self._workflow_limits:
            self._run_queue.notice_starts_of(draft.state.plan_id, draft.events)
        if not LOGGED.isdisjoint(draft.kinds):
            log_events(draft.events)
        for step_id in draft.dispatch:
            step = draft.state.open_steps.get(step_id)
            if step is not None and self.is_stopping:
                self.return_attempt(run_id, step)
            elif step is not None:
                self.dispatcher.dispatch(owned.loaded.head, step, owned.loaded.details.get(step_id, e.NULL), now)
        is_finished = draft.state.is_finished
        if is_finished:
            self._run_cache.forget(run_id)
            self._completion_waiters.notify(run_id, draft.state.version, draft.events[-1] if draft.events else None)
            if self._workflow_limits:
                self._run_queue.notice_end(draft.state.plan_id)
        if is_finished or (turn is not None and turn.release):
            if self.by_id.get(run_id) is owned:  # what came in meanwhile is about steps that this turn has closed
                del self.by_id[run_id]
            lacking = None
        else:
            owned.advance(draft, 0 if turn is None else turn.losses)
            lacking = draft.state
        if self.dispatcher.unknown or self._definition_filter.lacking:
            self._note_lack(run_id, lacking, now)

    def lose(self, run_id: str, conflict: CommitConflict, owned: OwnedRun) -> None:
        """Let go of a run that another node has, or whose turn the store refuses: its next turn pauses it.

        A turn that has not seen an outcome which was accepted meanwhile is taken again, with all that it was given.
        """
        if conflict.reason == "unseen":
            self._run_cache.forget(run_id)
            owned.inputs, owned.taken, owned.refused = [*owned.taken, *owned.inputs], (), None
            self.to_load.append(run_id)
            self.changed.set()
            return
        logger.warning("run %s: a turn was not committed (%s)", run_id, conflict.reason)
        if self.refusals.note(owned, conflict):
            self.to_release.append(run_id)
        self.drop(run_id)
        self.should_claim = True

    def drop(self, run_id: str) -> None:
        """Forget a run, and give up what is carried out for it here."""
        self.executor.cancel(run_id)
        self.let_go(run_id)

    def let_go(self, run_id: str) -> None:
        """Forget a run that is another node's."""
        self.by_id.pop(run_id, None)
        self._note_lack(run_id)
        self._run_cache.forget(run_id)

    def _note_lack(self, run_id: str, state: RunState | None = None, now: Instant = 0) -> None:
        """Note what a run waits for that is not known here: nothing, if it is not held."""
        names = NONE if state is None else self.dispatcher.lacking(state, now)
        if names and state is not None:
            self.has_news |= self._definition_filter.note_lack(run_id, (state.plan_id, state.plan_version), names)
            self.should_offer = True
        elif self._definition_filter.lacking and self._definition_filter.forget_lack(run_id):
            self.has_news = self.should_offer = True
