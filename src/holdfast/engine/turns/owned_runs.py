"""The runs that a node owns: their inputs, the activities that it executes for them, and their release.

A node owns a run from the claim, or the creation, until a turn releases the run or another node acquires it. Nothing
here waits. The turn loop asks the store for what is noted here: `should_claim`, `to_load`, `to_release`, `reports`,
`should_offer`.

**Batches.** The turns of a batch share one commit. A batch is bounded: the memory that its turns touch stays in the
processor's cache from the first access to the commit, and no run waits for the turns of thousands of others. Runs that
have begun take precedence over those that have not, so a node finishes what it has started however many runs are
started meanwhile.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from msgspec import UNSET, Struct
from msgspec.structs import replace

from holdfast.clock import Rng
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.admission import AdmissionRequest
from holdfast.core.call_limits import is_limited
from holdfast.core.decide import Input
from holdfast.core.instants import Instant
from holdfast.core.messages import (
    ActivityDetached,
    ActivityErrored,
    ActivityOutcome,
    ActivityReturned,
    Message,
    NodeLost,
)
from holdfast.core.plans import definition_of
from holdfast.core.state import OpenStep, RunState
from holdfast.engine.activities.context import Details, Outcome, Work
from holdfast.engine.activities.dispatch import NONE, Dispatcher, is_local
from holdfast.engine.activities.executor import ActivityExecutor
from holdfast.engine.activities.queue_worker import QueueWorker
from holdfast.engine.activities.slots import Slots
from holdfast.engine.completion_waiters import CompletionWaiters
from holdfast.engine.definition_filter import DefinitionFilter
from holdfast.engine.observe.hooks import RunHooks
from holdfast.engine.observe.logs import LOGGED, log_events
from holdfast.engine.options import NodeOptions
from holdfast.engine.start.admission import RunQueue
from holdfast.engine.turns.draft import TurnDraft
from holdfast.engine.turns.execute import CachedRun, RunCache
from holdfast.engine.turns.poison import UNFIT, Refusals
from holdfast.errors import InvalidInput, RunError, TurnRefused
from holdfast.limits import Limits
from holdfast.registry import Registry
from holdfast.store.port import CommitConflict, Heartbeat, LoadedRun, NewRun, Turn
from holdfast.store.types import created_run

BATCH = 500
"""The maximum number of turns in a commit. Fewer cost more commits, more cost cache misses; both were measured."""

PATIENCE = 20
"""After this many full batches the node claims more runs, although it is busy."""

logger = logging.getLogger("holdfast.node")


class OwnedRun(Struct, gc=False, eq=False):
    """A run that belongs to this node. It is fresh until it has taken a turn in its loaded state."""

    loaded: LoadedRun
    inputs: list[Input] = []
    taken: Sequence[Input] = ()  # the inputs of the turn that is being committed
    is_fresh: bool = True
    deferred_with: object = None  # the input of the turn whose end waits for updates
    is_tried: bool = False  # whether it is durable that its turn is being tried
    losses_after: int = 0  # how often it counts as lost after its present turn
    refused: TurnRefused | None = None  # why its present turn only pauses it
    is_offered: bool = False  # whether its present turn follows a search for nodes with other code
    paused_by: RunError | None = None  # why its last turn could not be taken
    admission: AdmissionRequest | None = None  # with which its present turn queues it instead of starting it
    should_offer: bool = False  # whether to search for such nodes after its present turn

    def lost_steps(self, state: RunState, now: Instant) -> list[OpenStep]:
        """Return local activities that have no message: their node was lost, and the activities with it.

        Only a freshly loaded run shows this. Then a step that is due for its next attempt has a message for it, unless
        a node took the message and was lost with it.
        """
        if not self.is_fresh or not state.local_activities:
            return []
        reported = {getattr(given, "step_id", None) for given in self.inputs}
        reported |= {
            message.step_id
            for message in self.loaded.messages
            if message.type == "ActivityCompleted" and _is_of_present_attempt(message, state)
        }
        tokens = {message.waiting_token for message in self.loaded.messages}
        return [
            step
            for step in state.open_steps.values()
            if is_local(step)
            and (step.due_at is None or step.due_at <= now)
            and step.step_id not in reported
            and (step.token is None or step.token not in tokens)
        ]

    def load_again(self, loaded: LoadedRun, state: RunState) -> None:
        """Take the freshly loaded state of the run, without claiming ownership again.

        Such a load takes no lock: it may miss a signal that was accepted in time and is about to be durable. So it
        contains no time-outs of waits; they are delivered again with the next claim.
        """
        known = {message.signal_id for message in self.loaded.messages}
        waits = {step_id for waits in state.waits.values() for step_id in waits}
        messages = [
            m for m in loaded.messages if m.signal_id in known or m.type != "TimerDue" or m.step_id not in waits
        ]
        self.loaded = replace(loaded, messages=tuple(messages))

    def advance(self, draft: TurnDraft, losses: int = 0) -> None:
        """Note a turn that was committed."""
        self.taken = ()
        state, signals, details = draft.state, self.loaded.signals, self.loaded.details
        self.is_tried = False
        if draft.received:
            consumed = {inbox_seq for inbox_seq, _ in draft.received}
            signals = tuple(signal for signal in signals if signal.inbox_seq not in consumed)
        if details:
            details = {step_id: said for step_id, said in details.items() if step_id in state.open_steps}
        head = replace(self.loaded.head, version=state.version, losses=losses)
        self.loaded = LoadedRun(head=head, signals=signals, details=details, is_whole=self.loaded.is_whole)


def _is_of_present_attempt(message: Message, state: RunState) -> bool:
    """Return whether the outcome in a message ends the present attempt of its step.

    An earlier failure does not. Nor does an earlier success of a keyed step, which can only be recorded in addition,
    nor an attempt for a start of the step that was never committed, or in a deleted run that had this id.
    """
    step = state.open_steps.get(message.step_id or "")
    if step is not None and message.opened_at not in (0, step.opened_at):
        return False
    try:
        outcome = codec.decode(message.payload, ActivityOutcome)
    except InvalidInput:  # it becomes a dead letter
        return False
    if step is None or outcome.logical_attempt_id != step.logical_attempt_id:
        return False
    is_success = outcome.error is None and not outcome.is_detached and step.key is None
    return is_success or outcome.engine_attempt_id >= step.engine_attempt_id


def unsuccessful(batch: Sequence[OwnedRun]) -> list[tuple[str, str]]:
    """Return the steps with attempts that have ended without a result."""
    ended = [(owned.loaded.head.run_id, given) for owned in batch for given in owned.inputs]
    return [(run_id, o.step_id) for run_id, o in ended if isinstance(o, ActivityErrored | ActivityDetached)]


class ReadyQueue:
    """The runs that are ready to take a turn."""

    __slots__ = ("_begun", "_full_batches", "_has_left", "_new")

    def __init__(self) -> None:
        self._begun: OrderedDict[str, None] = OrderedDict()
        self._new: OrderedDict[str, None] = OrderedDict()
        self._full_batches = 0
        self._has_left = False

    def __len__(self) -> int:
        return len(self._begun) + len(self._new)

    def add(self, run_id: str, *, is_new: bool = False) -> None:
        """Let a run take a turn. A run that has not begun comes after those that have."""
        (self._new if is_new else self._begun)[run_id] = None

    def add_again(self, run_ids: Iterable[str]) -> None:
        """Let runs repeat the turn that had no effect."""
        self._begun.update(dict.fromkeys(run_ids))

    def add_first(self, run_id: str) -> None:
        """Let a run take its turn with the next batch, however many others there are."""
        self._begun[run_id] = None
        self._begun.move_to_end(run_id, last=False)

    @property
    def is_full(self) -> bool:
        """Whether there is a full batch."""
        return len(self) >= BATCH

    @property
    def wants_more(self) -> bool:
        """Whether to claim more runs: the batch has room, or the node has not claimed for long.

        Not while runs are left that did not fit into the last batch: they would be claimed and loaded once more.
        """
        return not (self.is_full or self._has_left) or self._full_batches >= PATIENCE

    def take(self) -> list[str]:
        """Return the runs of the next batch."""
        self._full_batches = self._full_batches + 1 if self.is_full else 0
        batch: dict[str, None] = {}
        for runs in (self._begun, self._new):
            if len(batch) + len(runs) <= BATCH:
                batch |= runs
                runs.clear()
            while runs and len(batch) < BATCH:
                batch[runs.popitem(last=False)[0]] = None
        self._has_left = bool(self._new)
        return list(batch)


class OwnedRuns:
    """The runs of one node, by id, and what the node has to do about them."""

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
        self.tried_now: Sequence[OwnedRun] = ()
        self.ready = ReadyQueue()
        self.refusals = Refusals()
        self.executor = ActivityExecutor(
            *(slots, self._on_outcome, self._on_heartbeat, rng, limits, registry.secrets, registry.middleware.activity)
        )
        self._workflow_limits = registry.workflow_limits
        self._hooks = RunHooks(registry)
        self.dispatcher = Dispatcher(registry, self.executor, self._on_outcome)
        self._queue_worker = queue_worker
        self._run_cache = run_cache
        self._completion_waiters = completion_waiters
        self._run_queue = run_queue
        self._definition_filter = definition_filter
        self._most_cached = options.cached_runs
        self.reports: dict[tuple[str, str], tuple[Work, Outcome]] = {}
        """Outcomes that are made durable before a run takes them, because the run was lost before."""
        self.to_release: list[str] = []
        self.to_load: list[str] = []
        self.should_claim = True
        self.should_offer = False
        """Whether a run may be handed over, because it waits for an activity that this node does not have."""
        self.has_news = False
        """Whether this node lacks activities that it has not published as lacking."""
        self.is_stopping = False
        self.changed = asyncio.Event()
        """Set whenever there may be something to do."""

    def add(self, loaded: LoadedRun) -> None:
        """Take a run that was claimed for this node; its turn comes in the next round."""
        run_id = loaded.head.run_id
        owned = self.by_id.get(run_id)
        if owned is None:
            self.by_id[run_id] = OwnedRun(loaded)
        elif owned.loaded.head.lease_epoch == loaded.head.lease_epoch:
            if loaded.head.version < owned.loaded.head.version:  # a turn was committed after this was read
                return
            if owned.loaded.details:  # details that activities here have reported since are newer
                loaded = replace(loaded, details=loaded.details | owned.loaded.details)
            owned.loaded = loaded
            owned.is_fresh = True
        else:  # another node owned it in between, and knows nothing about the activities here
            self.executor.cancel(run_id)
            self.by_id[run_id] = OwnedRun(loaded)
        self.ready.add(run_id, is_new=loaded.head.version == 1)
        self.changed.set()

    def begin(self, new: NewRun, now: Instant) -> None:
        """Take a run that was just created, unless it was found in the store before. Its history is known."""
        if new.run_id not in self.by_id:
            cached = self._run_cache.beginning(new)
            if cached is not None:  # otherwise it is rebuilt from the store, with its plan
                self._run_cache.keep(cached)
            self.add(created_run(new, self.name, now))

    def begin_with(self, loaded: LoadedRun, cached: CachedRun) -> None:
        """Take a run that was just created, with its program, unless it was found in the store before."""
        if loaded.head.run_id in self.by_id:
            cached.close()
        else:
            self._run_cache.keep(cached)
            self.add(loaded)

    def hold(self, loaded: LoadedRun, cached: CachedRun) -> OwnedRun:
        """Take a run that has nothing to do, with its program."""
        self._run_cache.keep(cached)
        owned = self.by_id[loaded.head.run_id] = OwnedRun(loaded)
        owned.is_fresh = False
        return owned

    def under_try(self) -> list[OwnedRun]:
        """Return the suspects that are being tried: meanwhile nothing else begins that could end the process."""
        return [owned for owned in self.tried_now if self.by_id.get(owned.loaded.head.run_id) is owned]

    @property
    def has_room(self) -> bool:
        """Whether a run that begins now can stay in memory."""
        return len(self.by_id) < self._most_cached and not self.is_stopping

    def owns(self, run_id: str) -> bool:
        """Return whether this node owns the run."""
        return run_id in self.by_id

    def find(self, run_id: str) -> None:
        """Take a run that this node owns, if it still does between two turns."""
        if run_id not in self.to_load:
            self.to_load.append(run_id)
        self.changed.set()

    def epoch_of(self, run_id: str) -> int | None:
        """Return the epoch at which this node owns a run, or None if it does not."""
        owned = self.by_id.get(run_id)
        return None if owned is None else owned.loaded.head.lease_epoch

    def _on_outcome(self, work: Work, outcome: Outcome) -> None:
        owned = self.by_id.get(work.run_id)
        if owned is not None and owned.loaded.head.losses:
            self.reports[work.run_id, work.step.step_id] = work, outcome
        elif owned is not None:
            owned.inputs.append(outcome)
            self.ready.add(work.run_id)
        self.changed.set()

    def return_attempt(self, run_id: str, step: OpenStep) -> None:
        """Record that an attempt has not begun here, and never will: the node that continues the run makes it."""
        owned = self.by_id.get(run_id)
        if owned is not None:
            owned.inputs.append(ActivityReturned(step.step_id, step.logical_attempt_id, step.engine_attempt_id))
            self.ready.add(run_id)

    def _on_heartbeat(self, work: Work, details: Details) -> None:
        """Keep the progress that an activity reports: here for the next attempt, and in the store for another node."""
        owned, step_id = self.by_id.get(work.run_id), work.step.step_id
        if owned is not None and details is not UNSET:
            owned.loaded.details[step_id] = details
            self._queue_worker.heartbeats.send(Heartbeat(run_id=work.run_id, step_id=step_id, details=details))

    def is_busy(self, draft: TurnDraft) -> bool:
        """Return whether this node executes, or is about to execute, anything for the run.

        A node that is stopping begins nothing any more. It keeps its runs to the end, and releases them as ready. It
        does the same with a run that waits for an activity that is not known here, until another node has it.
        """
        if self.is_stopping:
            return True
        open_steps = draft.state.open_steps
        if self.reports and any(run_id == draft.state.run_id for run_id, _ in self.reports):
            return True
        for step_id in chain(draft.dispatch, self.executor.attempts.get(draft.state.run_id, ())):
            if step_id in open_steps:  # otherwise the turn itself has closed it
                return True
        state = draft.state
        if not self.dispatcher.unknown or not self.dispatcher.waits_for_unknown(state):
            return False
        return self._definition_filter.has(state.plan_id, state.plan_version)

    def lost(self, owned: OwnedRun, state: RunState, now: Instant) -> list[NodeLost]:
        """Return the activities that no node executes, as far as they are known here."""
        lost = [step for step in owned.lost_steps(state, now) if self.dispatcher.is_known(state.run_id, step)]
        lost = [step for step in lost if (state.run_id, step.step_id) not in self.reports]
        return [NodeLost(s.step_id) for s in lost if not self.executor.is_working_on(state.run_id, s.step_id)]

    def perform_effects(self, owned: OwnedRun, cached: CachedRun, draft: TurnDraft, turn: Turn, now: Instant) -> None:
        """Perform the effects of a turn that is durable."""
        state, loaded = draft.state, owned.loaded
        run_id = state.run_id
        cached.settle(state)
        heartbeats = self._queue_worker.heartbeats
        if run_id in self.executor.attempts or self._queue_worker.jobs or heartbeats.kept or heartbeats.unsent:
            for step_id in draft.closed():
                self.executor.cancel(run_id, step_id)
                self._queue_worker.let_go(run_id, step_id)
        if self._workflow_limits:
            self._run_queue.notice_starts_of(state.plan_id, draft.events)
        if turn.jobs and any(is_limited(job.queue) for job in turn.jobs):
            self._queue_worker.expect_limited()
        if not LOGGED.isdisjoint(draft.kinds):
            log_events(draft.events)
            if self._hooks:
                self._hooks.notice(draft.events)
        for step_id in draft.dispatch:
            step = state.open_steps.get(step_id)
            if step is not None and self.is_stopping:
                self.return_attempt(run_id, step)
            elif step is not None:
                self.dispatcher.dispatch(loaded.head, step, loaded.details.get(step_id, e.NULL), now, state.context)
        is_finished = state.is_finished
        if is_finished:
            self._run_cache.forget(run_id)
            self._completion_waiters.notify(run_id, state.version, draft.events[-1] if draft.events else None)
            if self._workflow_limits:
                self._run_queue.notice_end(state.plan_id)
        lacking = None
        if is_finished or turn.release:
            if self.by_id.get(run_id) is owned:  # messages that came meanwhile concern steps that it has closed
                del self.by_id[run_id]
        else:
            owned.advance(draft, turn.losses)
            lacking = state
        if self.dispatcher.unknown or self._definition_filter.lacking:
            self._note_lack(run_id, lacking, now)

    def begin_steps(self, owned: OwnedRun, draft: TurnDraft, now: Instant) -> None:
        """Begin the steps of a turn that is not durable yet; its other effects wait for its commit."""
        for step_id in draft.dispatch:
            step = draft.state.open_steps[step_id]
            details = owned.loaded.details.get(step_id, e.NULL)
            self.dispatcher.dispatch(owned.loaded.head, step, details, now, draft.state.context)
        draft.dispatch = []

    def lose(self, run_id: str, conflict: CommitConflict, owned: OwnedRun) -> None:
        """Release a run that another node has, or a run with a turn that the store refuses: its next turn pauses it.

        A turn that missed an outcome accepted meanwhile is taken again, with all its inputs.
        """
        if conflict.reason == "unseen":
            self._run_cache.forget(run_id)
            owned.inputs, owned.taken, owned.refused = [*owned.taken, *owned.inputs], (), None
            self.to_load.append(run_id)
            self.changed.set()
            return
        logger.warning("run %s: a turn was not committed (%s)", run_id, conflict.reason)
        if conflict.reason not in UNFIT:
            owned.refused = None  # it only came too late
        elif owned.refused is None:
            self.refusals.note(owned.loaded.head, conflict.reason)
            self.to_release.append(run_id)
        self.drop(run_id)
        self.should_claim = True

    def drop(self, run_id: str) -> None:
        """Drop a run, and cancel its activities on this node."""
        self.executor.cancel(run_id)
        self.let_go(run_id)

    def let_go(self, run_id: str) -> None:
        """Forget a run that another node owns."""
        self.by_id.pop(run_id, None)
        self._note_lack(run_id)
        self._run_cache.forget(run_id)

    def _note_lack(self, run_id: str, state: RunState | None = None, now: Instant = 0) -> None:
        """Note what a run waits for that is not known here; nothing, if the run is not owned."""
        names = NONE if state is None else self.dispatcher.lacking(state, now)
        if names and state is not None:
            self.has_news |= self._definition_filter.note_lack(
                run_id, definition_of(state.plan_id, state.plan_version), names
            )
            self.should_offer = True
        elif self._definition_filter.lacking and self._definition_filter.forget_lack(run_id):
            self.has_news = self.should_offer = True
