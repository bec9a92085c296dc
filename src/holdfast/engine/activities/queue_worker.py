"""Queues: activities that any node that consumes the queue may execute.

A node acquires no more jobs than it has free slots, and only of activities that its app has registered. The outcome is
sent to the run as a message, and the job is kept until the run has recorded it. The jobs of a node that is lost become
visible again: another node acquires them, and the count of attempts continues.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.clock import Rng
from holdfast.core import codec
from holdfast.core.call_limits import limited_queue
from holdfast.core.events import ErrorInfo, StepStarted
from holdfast.core.instants import Instant
from holdfast.core.messages import (
    ActivityDetached,
    ActivityErrored,
    ActivityOutcome,
    ActivitySucceeded,
    Message,
    activity_completed,
)
from holdfast.core.reconciliation import effect_after_takes, indeterminate, lost_too_often
from holdfast.core.state import OpenStep, retry_token
from holdfast.core.timing import Retry
from holdfast.engine.activities.context import ArtifactAccess, Details, Outcome, Work
from holdfast.engine.activities.executor import ActivityExecutor
from holdfast.engine.activities.heartbeats import Heartbeats
from holdfast.engine.activities.slots import Slots
from holdfast.engine.activities.streams import StreamAccess, StreamSender
from holdfast.errors import InvalidInput, StoreError
from holdfast.limits import Limits
from holdfast.program.definitions import ActivityOptions, decode_options
from holdfast.program.outcomes import error_info
from holdfast.registry import Registry
from holdfast.store.port import Heartbeat, Job, Refused, Store
from holdfast.store.types import CALL_LIMITS

DELIVER = 500
RETRY_S = 0.2
AVOIDED_S = 10.0
"""For how long a worker takes no jobs of an activity after it could not decrypt one of them for lack of a key."""

logger = logging.getLogger("holdfast.queues")


class QueueWorker:
    """Executes the jobs of some queues on one node."""

    def __init__(
        self,
        node: str,
        store: Store,
        registry: Registry,
        queues: Sequence[str],
        visible_ms: int,
        slots: Slots,
        rng: Rng,
        limits: Limits,
        *,
        takes_runs: bool = True,
    ) -> None:
        """Calls that have a limit go to the nodes of their queue or, if they have no queue, to the nodes that take
        runs.
        """
        self._node = node
        self._store = store
        self._registry = registry
        self._queues = tuple(queues)
        self._limited_queues = tuple(limited_queue(queue) for queue in (*queues, *([""] if takes_runs else [])))
        can_take_limited = bool(self._limited_queues) and CALL_LIMITS not in store.capabilities.lacking
        self._takes_limited = can_take_limited and bool(registry.activity_names())
        self.is_taking = bool(self._queues) or self._takes_limited
        """Whether there may be any jobs to take here."""
        self._limited_first = False
        self._ask_limited_at: Instant | None = None
        self._visible_ms = visible_ms
        self._slots = slots
        self._slots.on_free = self._notice_free_slot
        self._executor = ActivityExecutor(
            *(slots, self._on_outcome, self._on_heartbeat, rng, limits, registry.secrets, registry.middleware.activity)
        )
        self.heartbeats = Heartbeats(node, store, visible_ms, self.cancel)
        self._outcomes: list[tuple[Job, ActivityOutcome]] = []
        self.jobs: dict[tuple[str, str], Job] = {}
        """The jobs that are executed here, by run and step."""
        self._notified = asyncio.Event()
        self._to_report = asyncio.Event()
        self._reporting: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.is_held = takes_runs
        """Whether it takes no jobs yet: the node has first to try the runs that its previous process has left."""
        self._taking: asyncio.Future[list[Job]] | None = None
        self._unbegun: list[Job] = []
        self._unknown_jobs_seen = 0
        self._avoided: dict[str, float] = {}
        """Activities whose jobs are not taken for now, by name, with the time from which they are taken again."""

    def use_artifacts(self, access: ArtifactAccess) -> None:
        """Let activities keep artifacts there."""
        self._executor.artifacts = access

    def use_streams(self, sender: StreamSender) -> None:
        """Let activities write to streams."""
        self._executor.streams = StreamAccess(sender)

    def start(self, key: str) -> "list[asyncio.Task[None]]":
        """Begin to work, with the store's key for tokens, and return the tasks that are to be cancelled in the end."""
        self._executor.key = key
        loops = {"heartbeats": self.heartbeats.run}
        if self._limited_queues:
            loops |= {"queues": self._take_on, "outcomes": self._report_on}
        tasks = [asyncio.create_task(self._live(name, loop), name=name) for name, loop in loops.items()]
        self._reporting = [task for task in tasks if task.get_name() == "outcomes"]
        return tasks

    async def _live(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        except Exception:
            logger.critical("node %s has failed, and no longer processes its %s", self._node, name, exc_info=True)
            raise

    def notify(self) -> None:
        """Signal that there may be jobs to take or, once the node is stopping, that there is nothing left to report."""
        self._notified.set()
        if self._is_stopping:
            self._to_report.set()

    def _notice_free_slot(self) -> None:
        """Look for jobs again, as there is a free slot. A node that takes no jobs is not woken up for each activity."""
        if self.is_taking or self._is_stopping:
            self.notify()

    def begin(self) -> None:
        """Take jobs from now on."""
        self.is_held = False
        self.notify()

    def expect_limited(self) -> None:
        """Note that calls with a limit are in the queues, even if no activity here has a limit any more."""
        if self._limited_queues:
            self._takes_limited = self.is_taking = True
            self.notify()

    def cancel(self, run_id: str, step_id: str) -> None:
        """Cancel a job that no longer belongs to this node."""
        if self.jobs.pop((run_id, step_id), None) is not None:
            self._executor.cancel(run_id, step_id)

    def let_go(self, run_id: str, step_id: str) -> None:
        """Let go of a step that is known here to be closed, without waiting for the store to report it."""
        self.heartbeats.let_go(run_id, step_id)
        self.cancel(run_id, step_id)

    @property
    def busy(self) -> int:
        """How many jobs are running."""
        return self._executor.busy

    def drain(self) -> "list[asyncio.Task[None]]":
        """Take no more jobs. Return tasks that end once every running job has ended and its outcome was reported."""
        self._is_stopping = True
        for work in self._executor.withdraw():
            job = self.jobs.pop((work.run_id, work.step.step_id))
            self.heartbeats.let_go(job.run_id, job.step_id)
            self._unbegun.append(job)
        self.notify()
        return self._reporting

    async def release(self) -> None:
        """Return jobs that were acquired but never begun, including those of an acquisition still in progress."""
        if self._taking is not None:
            with suppress(StoreError):  # then no jobs, or only such as become visible again by themselves
                self._unbegun += await self._taking
            self._taking = None
        if self._unbegun:
            await self._store.release_jobs(self._node, self._unbegun)
            self._unbegun = []

    def stop(self) -> None:
        """Cancel the running jobs. They become visible again when their time-out is over."""
        self._executor.cancel_all()

    async def end(self, timeout_s: float) -> int:
        """Wait up to this time for cancelled activities; return how many have ignored their cancellation."""
        return await self._executor.end(timeout_s)

    # --- taking

    async def _take_on(self) -> None:
        is_over = False
        while not is_over:
            try:
                self._notified.clear()  # before the call: a notification may arrive during it
                if self._is_stopping:
                    await self.release()
                    is_over = True
                elif self.is_held:
                    await self._notified.wait()
                elif not await self._take():
                    await self._idle()
            except StoreError:
                logger.exception("node %s could not acquire jobs; retrying", self._node)
                await asyncio.sleep(RETRY_S)

    async def _take(self) -> bool:
        """Take as many jobs as there is room for, and return whether there may be more right now."""
        limit, activities = self._slots.free, self._takable()
        if limit == 0 or not activities or not self.is_taking:
            return False
        await self.heartbeats.catch_up()
        # A task of its own, so that the acquired jobs are known even if this task is cancelled meanwhile.
        self._taking = asyncio.ensure_future(self._acquire(activities, limit))
        jobs = self._unbegun = await asyncio.shield(self._taking)
        self._taking = None
        if jobs:
            now = await self._now()
            if self._is_stopping:
                return True
            self._unbegun = [job for job in jobs if codec.holds_sealed(job.input)]
            unreported = {(job.run_id, job.step_id) for job, _ in self._outcomes}
            for job in jobs:
                if codec.holds_sealed(job.input):
                    continue
                if (job.run_id, job.step_id) not in unreported:  # otherwise no other node took it, and it is done
                    self._start(job, now)
            if self._unbegun:
                await self._return_sealed(self._unbegun)
        return len(jobs) == limit

    async def _acquire(self, activities: Sequence[str], limit: int) -> list[Job]:
        """Acquire jobs with limits and jobs without. Which of them come first alternates."""
        self._limited_first = not self._limited_first
        jobs: list[Job] = []
        for is_limited in (self._limited_first, not self._limited_first):
            if len(jobs) == limit or not (self._takes_limited if is_limited else self._queues):
                continue
            acquire = self._acquire_limited if is_limited else self._acquire_plain
            try:
                jobs += await acquire(activities, limit - len(jobs))
            except StoreError:
                if not jobs:  # otherwise the acquired jobs are begun first
                    raise
                logger.exception("node %s could not acquire jobs; retrying", self._node)
        return jobs

    async def _acquire_plain(self, activities: Sequence[str], limit: int) -> list[Job]:
        return await self._store.acquire_jobs(self._node, self._queues, activities, limit, self._visible_ms)

    async def _acquire_limited(self, activities: Sequence[str], limit: int) -> list[Job]:
        limits = self._registry.call_limits
        jobs, self._ask_limited_at = await self._store.acquire_limited_jobs(
            self._node, self._limited_queues, activities, limits, limit, self._visible_ms
        )
        if not jobs and self._ask_limited_at is None and not limits:  # until a run here makes such a call
            self._takes_limited, self.is_taking = False, bool(self._queues)
        return jobs

    def _takable(self) -> Sequence[str]:
        """Return the activities whose jobs may be taken now."""
        names = self._registry.activity_names()
        if self._avoided:
            now = asyncio.get_running_loop().time()
            self._avoided = {name: until for name, until in self._avoided.items() if until > now}
            return [name for name in names if name not in self._avoided]
        return names

    async def _return_sealed(self, jobs: Sequence[Job]) -> None:
        """Leave jobs whose input cannot be decrypted here to other nodes. No attempt of them has begun."""
        until = asyncio.get_running_loop().time() + AVOIDED_S
        for job in jobs:
            self._avoided[job.activity] = until
            logger.error(
                "job %s of run %s: its input cannot be opened here, and is left to a node that has the key; none of "
                "activity %s is taken for %d s",
                *(job.step_id, job.run_id, job.activity, AVOIDED_S),
            )
        await self.release()

    async def _now(self) -> Instant:
        """Return the store's time, however long that takes: acquired jobs must not be forgotten."""
        while True:
            try:
                return await self._store.now()
            except StoreError:
                await asyncio.sleep(RETRY_S)

    async def _idle(self) -> None:
        """Sleep until a job becomes visible or a notification arrives. A free slot notifies as well."""
        if self._slots.free == 0 or self._is_stopping:
            await self._notified.wait()
            return
        if not self.is_taking:
            await self._notified.wait()
            return
        due_at = await self._store.next_due(self._node, (), self._queues) if self._queues else None
        now = await self._store.now()
        is_left = due_at is not None and due_at <= now
        if not is_left:
            self._unknown_jobs_seen = 0
        elif not self._notified.is_set() and not self._avoided:
            self._note_unknown_jobs()
        timeout_s = (due_at - now) / 1_000_000 if due_at is not None and due_at > now else None
        if self._takes_limited and self._ask_limited_at is not None:
            limited_s = max(0.0, (self._ask_limited_at - now) / 1_000_000)
            timeout_s = limited_s if timeout_s is None else min(limited_s, timeout_s)
        if self._avoided:
            again_s = max(0.0, min(self._avoided.values()) - asyncio.get_running_loop().time())
            timeout_s = again_s if timeout_s is None else min(again_s, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._notified.wait()
        except TimeoutError:
            return

    def _note_unknown_jobs(self) -> None:
        """Log once that jobs are left to others: at the second look, as they may have arrived after the acquisition."""
        self._unknown_jobs_seen += 1
        if self._unknown_jobs_seen == 2:
            names = ", ".join(self._queues)
            logger.warning(
                "node %s: jobs of activities that are not registered here stay in the queues %s", self._node, names
            )

    # --- executing

    def _start(self, job: Job, now: Instant) -> None:
        self.jobs[job.run_id, job.step_id] = job
        self.heartbeats.keep(_heartbeat(job))
        definition = self._registry.activities.get(job.activity)
        assert definition is not None  # only jobs of known activities are acquired
        try:
            options = decode_options(job.options) if bytes(job.options) != b"null" else ActivityOptions()
        except InvalidInput as problem:
            self._report(job, error_info(problem))
            return
        step = _step(job, options.retry)
        most = options.retry.max_attempts
        if job.idempotency_key is None:
            if most and step.attempt > most:
                lost = f"activity {job.activity!r} was taken {step.attempt - 1} times, and no node reported an outcome"
                self._report(job, ErrorInfo("WorkerLost", lost))
                return
        elif step.effect is not None and lost_too_often(step.effect, options.retry):
            words = f"activity {job.activity!r} was taken {step.effect.losses} times, and no node reported an outcome"
            self._report(job, indeterminate(words))
            return
        work = Work(job.run_id, step, definition, options, job.details, job.tenant, job.environment, job.context)
        self._executor.start(work, now)

    def _on_heartbeat(self, work: Work, details: Details) -> None:
        job = self.jobs.get((work.run_id, work.step.step_id))
        if job is not None and job.engine_attempt_id == work.step.engine_attempt_id:
            self.heartbeats.send(_heartbeat(job, details))

    # --- reporting

    def _on_outcome(self, work: Work, outcome: Outcome) -> None:
        job = self.jobs.get((work.run_id, work.step.step_id))
        if job is not None and job.engine_attempt_id == work.step.engine_attempt_id:
            self._report(job, outcome)
        self.notify()

    def _report(self, job: Job, outcome: Outcome | ErrorInfo) -> None:
        self._outcomes.append((job, _outcome(job, outcome)))
        self._to_report.set()

    async def _report_on(self) -> None:
        while not self._is_stopping or self._executor.busy or self._outcomes:
            await self._to_report.wait()
            self._to_report.clear()
            while self._outcomes:
                batch = self._outcomes[:DELIVER]
                try:
                    await self._deliver(batch)
                except StoreError:
                    logger.exception("node %s could not report outcomes; retrying", self._node)
                    await asyncio.sleep(RETRY_S)
                else:
                    del self._outcomes[: len(batch)]

    async def _deliver(self, batch: Sequence[tuple[Job, ActivityOutcome]]) -> None:
        await self.heartbeats.flush((job.run_id, job.step_id) for job, outcome in batch if outcome.error is not None)
        now = await self._store.now()
        answers = await self._store.deliver([_message(job, outcome, now, self._node) for job, outcome in batch])
        for (job, _), answer in zip(batch, answers, strict=True):
            key = (job.run_id, job.step_id)
            if self.jobs.get(key) is job:
                del self.jobs[key]
            if isinstance(answer, Refused):  # the run has ended, or was deleted: no turn waits for it
                logger.info("run %s takes no outcome of %s: %s", job.run_id, job.step_id, answer.error)
                self.heartbeats.let_go(*key)


def _heartbeat(job: Job, details: Details = UNSET) -> Heartbeat:
    return Heartbeat(
        run_id=job.run_id,
        step_id=job.step_id,
        queue=job.queue,
        engine_attempt_id=job.engine_attempt_id,
        details=details,
    )


def _step(job: Job, retry: Retry) -> OpenStep:
    """Return the step as its run has it, or will have it after this attempt's message."""
    lost = job.engine_attempt_id - job.queued_attempt_id if job.queued_attempt_id else 0
    step = OpenStep(
        job.step_id,
        "activity",
        StepStarted(job.activity, job.input, job.queue, job.idempotency_key, job.options),
        "",
        job.scheduled_at,
        job.logical_attempt_id,
        job.engine_attempt_id,
        first_engine_attempt_id=job.first_engine_attempt_id + (0 if retry.count_lost else lost),
        effect=job.effect,
    )
    if job.idempotency_key is None or not lost:
        return step
    return replace(step, effect=effect_after_takes(step, lost, retry))


def outcome_message(work: Work, outcome: Outcome, now: Instant) -> Message:
    """Return the message that delivers an outcome to a run. The outcome is made durable first."""
    step = work.step
    token = retry_token(step.step_id, step.engine_attempt_id)
    return activity_completed(work.run_id, step.step_id, token, _outcome(step, outcome), now, step.opened_at)


def _outcome(job: Job | OpenStep, outcome: Outcome | ErrorInfo) -> ActivityOutcome:
    """Return an outcome in the form in which it is sent, with its attempt."""
    logical, engine = job.logical_attempt_id, job.engine_attempt_id
    sent = ActivityOutcome(logical_attempt_id=logical, engine_attempt_id=engine)
    match outcome:
        case ActivitySucceeded():
            return replace(sent, result=outcome.result, confirmed_by=outcome.confirmed_by, artifacts=outcome.artifacts)
        case ActivityErrored():
            return replace(sent, error=outcome.error, fraction=outcome.fraction)
        case ActivityDetached():
            return replace(sent, is_detached=True, until=outcome.until, result_schema=outcome.result_schema)
        case ErrorInfo():
            return replace(sent, error=outcome)


def _message(job: Job, outcome: ActivityOutcome, now: Instant, node: str) -> Message:
    token = retry_token(job.step_id, job.engine_attempt_id)
    if job.idempotency_key is not None:  # for an operator who may have to decide about the attempt
        outcome = replace(outcome, node=node)
    return activity_completed(job.run_id, job.step_id, token, outcome, now, job.scheduled_at)
