"""A node: a process that executes runs, with all its parts and the tasks that keep it going.

`Node` assembles the parts, takes a lease, starts their tasks, and stops them again: running work may finish for a
limited time, the rest is released. The parts are in other modules. `TurnLoop` takes the turns of runs, `OwnedRuns`
keeps the runs and their incoming messages, `Starter` creates runs, and `QueueWorker` executes jobs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from holdfast.clock import Rng
from holdfast.engine.activities.async_completion import completion_key
from holdfast.engine.activities.context import ArtifactAccess
from holdfast.engine.activities.queue_worker import QueueWorker
from holdfast.engine.activities.slots import Slots
from holdfast.engine.activities.streams import StreamAccess, StreamSender
from holdfast.engine.completion_waiters import CompletionWaiters
from holdfast.engine.dead_processes import DeadProcesses
from holdfast.engine.definition_filter import DefinitionFilter
from holdfast.engine.gc_tuning import tuned_gc
from holdfast.engine.hand_over import HandOver
from holdfast.engine.host_locks import HostDuty, Work
from holdfast.engine.leases import LeaseGuard, LeaseTimer, keep_lease
from holdfast.engine.observe.samples import Sampler
from holdfast.engine.observe.takeovers import Takeovers
from holdfast.engine.options import NodeOptions
from holdfast.engine.start.admission import RunQueue
from holdfast.engine.start.starter import FirstTurns, Starter
from holdfast.engine.turns.draft import LIMITS
from holdfast.engine.turns.execute import RunCache
from holdfast.engine.turns.fail_open import FailOpen
from holdfast.engine.turns.owned_runs import OwnedRuns
from holdfast.engine.turns.turn_loop import TurnLoop, TurnProcessor
from holdfast.errors import (
    EngineError,
    NodeSuperseded,
    StoreError,
)
from holdfast.limits import Limits
from holdfast.registry import Registry
from holdfast.store.artifacts import Artifacts, place_of
from holdfast.store.port import LoadedRun, Store
from holdfast.store.types import CALL_LIMITS
from holdfast.store.validation import RECONCILIATION, lacks, require_conditional_batch

GIVE_BACK_S = 5.0
"""How long a node that stops waits for the store to release its runs, and for cancelled activities to end.

After that, the runs continue elsewhere when its lease has expired, and the activities are abandoned.
"""

LAST_DRAIN_S = 1.0
"""The minimum time that activities may still run if the stop was delayed by something else."""

logger = logging.getLogger("holdfast.node")


class Node:
    """Executes workflows of one app on one store."""

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
        self.store = store
        self.limits = limits
        self.options = options
        self.failure: EngineError | None = None
        self.completion_key = ""
        self.definition_filter = DefinitionFilter(name, store, registry, options)
        self.run_cache = RunCache(store, registry, options.cached_runs)
        self.completion_waiters = CompletionWaiters(store, self.owns, options.safety_poll_s)
        self.run_queue = RunQueue(store, registry, self.definition_filter, self._owner_of_queued, self._accept, options)
        self._slots = Slots(options.activities_at_once)
        self._queue_worker = QueueWorker(
            *(name, store, registry, options.queues, options.visible_ms, self._slots, rng, limits),
            takes_runs=options.takes_runs,
        )
        self._has_call_limits, self._has_keys = bool(registry.call_limits), registry.has_keyed_activities()
        self.owned_runs = OwnedRuns(
            name,
            registry,
            rng,
            options,
            limits,
            self._slots,
            self._queue_worker,
            self.run_cache,
            self.completion_waiters,
            self.run_queue,
            self.definition_filter,
        )
        self._streams = StreamSender(store, name, limits.stream_chunk_bytes)
        self.owned_runs.executor.streams = StreamAccess(self._streams, self.owned_runs.epoch_of)
        self._queue_worker.use_streams(self._streams)
        self.definition_filter.load = lambda: (len(self.owned_runs.by_id), self.activities_running)
        self._takeovers = Takeovers(store, name, self.owns)
        self._hand_over = HandOver(store, self.owned_runs, self.definition_filter, self._renew)
        self.turn_processor = TurnProcessor(
            store,
            registry,
            limits,
            self.owned_runs,
            self.run_cache,
            self.run_queue,
            self._queue_worker.heartbeats,
            self._hand_over,
        )
        first_turns = FirstTurns(self.owned_runs, self.run_cache, limits) if options.takes_runs else None
        self._lease = LeaseTimer(options.lease_ms)
        if options.fail_open:
            budget_ms, folder = options.write_latency_budget_ms, options.fail_open
            self.turn_processor.fail_open = FailOpen(name, store, self.owned_runs, self._lease, budget_ms, folder)
        self.starter = Starter(store, self.owned_runs, options.lease_ms, first_turns)
        self.turn_loop = TurnLoop(
            *(store, options, self.owned_runs, self.definition_filter, self._queue_worker, self.starter),
            *(self._takeovers, self._hand_over, self.turn_processor, self._renew, self._fail),
        )
        self._guard: LeaseGuard | None = None
        self._asked_at: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.duties: list[HostDuty] = []
        self.background: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What else runs during the life of the node. Add to it before the node starts."""

    def _owner_of_queued(self) -> str | None:
        """Return the node that claims admitted runs: this one, or None if it takes no runs, or no more."""
        takes_runs = self.options.takes_runs and not self.owned_runs.is_stopping and self.failure is None
        return self.name if takes_runs else None

    def _accept(self, loaded: LoadedRun) -> None:
        """Take a run that was admitted for this node."""
        self.owned_runs.add(loaded)

    def owns(self, run_id: str) -> bool:
        """Return whether this node owns the run."""
        return self.owned_runs.owns(run_id)

    @property
    def activities_running(self) -> int:
        """How many activities are running here."""
        return self.owned_runs.executor.busy + self._queue_worker.busy

    @property
    def is_at_rest(self) -> bool:
        """Whether it only waits: no turn, no activity and no start is in progress here."""
        return self.turn_loop.is_idle and not self.starter.creating and not self.activities_running

    @property
    def works(self) -> bool:
        """Whether it takes runs, or jobs from queues."""
        return self.options.takes_runs or bool(self.options.queues)

    async def use_artifacts(self, artifacts: Artifacts) -> None:
        """Let activities keep artifacts in this storage."""
        access = ArtifactAccess(artifacts, await place_of(self.store), self.store.now)
        self.owned_runs.executor.artifacts = access
        self._queue_worker.use_artifacts(access)

    def add_duty(self, name: str, work: Work, until_needed: Callable[[], Awaitable[None]] | None = None) -> None:
        """Let this node execute a duty that only one node may have at a time, whenever it has the lock of that name.

        Call it before the node starts. With `until_needed` the lock is acquired after that has returned.
        """
        lease_ms, safety_poll_s = self.options.lease_ms, self.options.safety_poll_s
        self.duties.append(HostDuty(name, self.name, self.store, work, lease_ms, safety_poll_s, until_needed))

    # --- start and stop

    async def start(self) -> None:
        """Take a lease, and with it the runs that earlier processes of this node owned; then start to work."""
        if self.works and self._has_call_limits and CALL_LIMITS in self.store.capabilities.lacking:
            raise lacks(self.store, CALL_LIMITS, "a limit on an activity")
        if self.works and self._has_keys:
            require_conditional_batch(self.store, RECONCILIATION)
        with self._lease.renewing():
            await self.store.renew(self.name, self.options.lease_ms, self.definition_filter.published(), True)
        dead_processes = DeadProcesses(self.store, self.name)
        if self.options.takes_runs:
            self._takeovers.note_gone(await self._end_leases(dead_processes))
        if self.turn_processor.fail_open is not None:
            await self.turn_processor.fail_open.reconcile()
        self.completion_key = self.owned_runs.executor.key = await completion_key(self.store)
        self._listener = self.store.wakeups.listen("runs")
        extend = getattr(self.store, "extend_lease", None)
        if extend is not None:
            self._guard = LeaseGuard(extend, self.name, self.options.lease_ms, self.options.blocked_s)
        self._working = [asyncio.create_task(self.turn_loop.run(), name="turns")] if self.options.takes_runs else []
        self._tasks = [
            asyncio.create_task(
                keep_lease(self._renew, self.name, self.options.lease_ms, self._has_failed, self._guard), name="lease"
            ),
            asyncio.create_task(self.turn_loop.listen(self._listener), name="wake-ups"),
            asyncio.create_task(self.completion_waiters.watch(), name="completion waiters"),
            asyncio.create_task(self.run_queue.work(), name="run queue"),
            *self._queue_worker.start(self.completion_key),
            *self.definition_filter.start(self.run_cache.fits),
            *self._working,
            *([asyncio.create_task(_tune_gc(), name="garbage collector")] if self.options.tune_gc else []),
            *(asyncio.create_task(duty.run(), name=f"duty {duty.name}") for duty in self.duties),
            *self._sampling(),
            *self._watching(dead_processes),
            *(asyncio.create_task(work(), name="background") for work in self.background),
        ]

    async def _end_leases(self, dead_processes: DeadProcesses) -> list[str]:
        try:
            return await dead_processes.end_leases()
        except StoreError:  # then they expire
            logger.warning("the node could not look for processes that have ended", exc_info=True)
            return []

    def _watching(self, dead_processes: DeadProcesses) -> list[asyncio.Task[None]]:
        """Watch the processes of other nodes, unless no others can have the store open, or each look costs requests."""
        capabilities, look_s = self.store.capabilities, self.options.safety_poll_s
        if not self.options.takes_runs or capabilities.one_process or capabilities.scan_consistency == "eventual":
            return []
        return [asyncio.create_task(dead_processes.watch(look_s, self._take_over), name="processes")]

    def _take_over(self, gone: list[str]) -> None:
        self._takeovers.note_gone(gone)
        self.store.wakeups.notify()

    def _sampling(self) -> list[asyncio.Task[None]]:
        if self.options.sample_s is None:
            return []
        sampler = Sampler(self.store, self.name, self.options.sample_s, self.options.sample_keep_s)
        return [asyncio.create_task(sampler.run(), name="samples")]

    async def stop(self) -> None:
        """Stop claiming, wait a limited time for running activities, and release everything.

        If the caller is cancelled meanwhile, it stops waiting but still releases everything before it re-raises the
        cancellation. After a second cancellation, the runs stay until the lease has expired.
        """
        self.owned_runs.is_stopping = True
        self.definition_filter.stop()
        self.owned_runs.changed.set()
        if under_way := self.owned_runs.executor.busy + self._queue_worker.busy:
            logger.info("node %s: activities under way: %d", self.name, under_way)
        for work in self.owned_runs.executor.withdraw():
            self.owned_runs.return_attempt(work.run_id, work.step)
        try:
            if draining := [*self._queue_worker.drain(), *self._working]:
                await asyncio.wait(draining, timeout=self._drain_left_s())
        except asyncio.CancelledError:
            await self._give_back()
            raise
        await self._give_back()

    def _drain_left_s(self) -> float:
        """Return how long activities may still run, counted from when the process was asked to stop."""
        drain_s = self.options.drain_s
        if self._asked_at is None:
            return drain_s
        waited_s = asyncio.get_running_loop().time() - self._asked_at
        return max(drain_s - waited_s, min(drain_s, LAST_DRAIN_S))

    async def _give_back(self) -> None:
        """End every part of the node, then its lease. The parts are ended without waiting, so that cannot be
        interrupted.
        """
        if self._guard is not None:
            self._guard.stop()
        for task in self._tasks:
            task.cancel()
        if given_up := self.owned_runs.executor.busy + self._queue_worker.busy:
            logger.warning("node %s: activities cancelled because they took too long: %d", self.name, given_up)
        self.owned_runs.executor.cancel_all()
        self._queue_worker.stop()
        self._streams.close()
        self._slots.close()
        self._listener.close()
        self.completion_waiters.close()
        self._takeovers.stop()
        loop = asyncio.get_running_loop()
        until = loop.time() + GIVE_BACK_S
        try:
            async with asyncio.timeout_at(until):
                await self.starter.stop()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                with suppress(StoreError):  # only progress is lost; its runs are released below
                    await self._queue_worker.heartbeats.flush()
                    await self._queue_worker.release()
                if self.turn_loop.superseded is None:  # otherwise it has no lease, and an error here would hide that
                    given_back = await self.store.release(self.name)
                    if given_back:
                        logger.info("node %s: runs released: %d", self.name, given_back)
        except TimeoutError:
            text = "node %s could not release its runs within %d s: other nodes claim them when its lease has expired"
            logger.warning(text, self.name, GIVE_BACK_S)
        finally:
            self.run_cache.close()
            left_s = max(until - loop.time(), 0.0)
            stubborn = await asyncio.gather(self.owned_runs.executor.end(left_s), self._queue_worker.end(left_s))
            if any(stubborn):
                logger.warning("node %s: activities that ignore their cancellation: %d", self.name, sum(stubborn))

    async def run_until(self, asked: "asyncio.Future[str]") -> None:
        """Wait until the future is done; raise if a part of the node fails before."""
        awaited: set[asyncio.Future[Any]] = {asked, *self._tasks}
        while not asked.done():  # a part that has nothing left to do ends, and the others continue
            done, awaited = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for part in done - {asked}:
                part.result()
        self._asked_at = asyncio.get_running_loop().time()

    def _fail(self, failure: Exception) -> None:
        """Record that this node takes no more turns. Callers that wait for a result here get the error immediately."""
        if self.failure is None:
            logger.critical("node %s has failed and executes no runs any more", self.name, exc_info=failure)
            self.failure = EngineError(f"node {self.name} has failed: {type(failure).__name__}: {failure}")
        self.completion_waiters.close(self.failure)

    def _has_failed(self) -> bool:
        return self.failure is not None

    async def _renew(self) -> None:
        try:
            with self._lease.renewing():
                await self.store.renew(self.name, self.options.lease_ms, self.definition_filter.published())
        except NodeSuperseded as problem:
            self._end_superseded(problem)
            raise

    def _end_superseded(self, problem: NodeSuperseded) -> None:
        """Stop all work: another process has this node's name, and its runs."""
        self._lease.end()
        if self.failure is None:
            logger.critical("node %s stops: %s", self.name, problem)
            self.failure = self.turn_loop.superseded = problem
            self.completion_waiters.close(problem)
            self.owned_runs.executor.cancel_all()
            self._queue_worker.drain()
            self._queue_worker.stop()
            self.owned_runs.changed.set()


async def _tune_gc() -> None:
    """Let the collector run less often until this is cancelled, even on a node that only starts runs and waits for
    them.
    """
    with tuned_gc():
        await asyncio.get_running_loop().create_future()
