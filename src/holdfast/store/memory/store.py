"""The memory store: the reference model.

Everything is in dicts, and nothing survives the process. Every other store must give the same answers. No verb yields
to another task while it runs, so each item of a batch is atomic.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from holdfast.clock import Clock, SystemClock
from holdfast.core import codec
from holdfast.core.access import AccessToken
from holdfast.core.admission import AdmissionRequest, RunLimit
from holdfast.core.audit import AuditEntry, letter_entry, run_entry
from holdfast.core.bus import BusAlert, OutboxReplay, OutboxSettlement, Replayed, Sink, SinkProgress
from holdfast.core.call_limits import CallLimit, limited_by
from holdfast.core.dead_letters import DeadLetter, Settled, Settlement
from holdfast.core.declarations import WorkflowDeclaration
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.core.messages import Message, SignalRequest
from holdfast.core.plans import RegisteredPlan
from holdfast.core.restarts import restart_number
from holdfast.core.schedules import Schedule
from holdfast.core.streams import Appended, StreamAppend, StreamPage, StreamRead
from holdfast.errors import StoreUnavailable
from holdfast.limits import SUSPECT_LOSSES, Limits
from holdfast.store import decisions, health, outgoing, port, validation
from holdfast.store.joined import JoinedStore, no_transactions
from holdfast.store.memory import queries, retention
from holdfast.store.memory.admission import AdmissionQueue
from holdfast.store.memory.audit import AuditLog
from holdfast.store.memory.bulletins import Bulletins
from holdfast.store.memory.bus import Bus
from holdfast.store.memory.call_limits import Call, CallLimits, place_in_line
from holdfast.store.memory.health import examine
from holdfast.store.memory.host_locks import HostLocks
from holdfast.store.memory.jobs import acquire
from holdfast.store.memory.plans import Plans
from holdfast.store.memory.run import NEVER, Run
from holdfast.store.memory.schedules import Schedules
from holdfast.store.memory.tokens import Tokens
from holdfast.store.queries import within
from holdfast.store.types import creations_may_wake_others
from holdfast.store.wakeups import NOTHING, READY, LocalWakeups, news_of

T = TypeVar("T")
Row = TypeVar("Row")


class MemoryStore:
    """A store in memory, for tests and as the reference model."""

    def __init__(
        self,
        clock: Clock | None = None,
        limits: Limits | None = None,
        capabilities: port.Capabilities | None = None,
        *,
        distinct_commits: bool = False,
    ) -> None:
        """With `distinct_commits` no two commits of a run have the same instant, even if the clock does not advance."""
        self.capabilities = capabilities or port.Capabilities(
            conditional_batch=True,
            atomic_batch=True,
            read_after_write=True,
            scan_consistency="snapshot",
            one_process=True,
        )
        self.wakeups = LocalWakeups()
        self.extend_lease = None  # no other process could claim while this loop is blocked
        self._clock = clock or SystemClock()
        self._limits = limits or Limits()
        self._distinct_commits = distinct_commits
        self._runs: dict[str, Run] = {}
        self._definitions: dict[port.Plan, WorkflowDeclaration] = {}
        self._requests: dict[str, str] = {}
        self._nodes: dict[str, Instant] = {}
        self._known: dict[str, frozenset[port.Plan]] = {}
        self._tokens = Tokens()
        self._plans = Plans()
        self._audit = AuditLog()
        self._bus = Bus(self._runs)
        self._bulletins = Bulletins()
        self._keys: dict[str, str] = {}
        self._host_locks = HostLocks()
        self._schedules = Schedules()
        self._changefeed = _Changefeed()
        self._call_limits = CallLimits()
        self._admission_queues: dict[str, AdmissionQueue] = {}
        self._is_closed = False
        self._archive = retention.Archive()
        self._finders: dict[type, Callable[[Any], port.Found[Any]]] = {
            port.RunQuery: partial(queries.find_runs, self._runs),
            port.RunCountQuery: partial(queries.count_runs, self._runs),
            port.WaitQuery: partial(queries.find_waits, self._runs),
            port.EventQuery: partial(queries.find_events, self._runs),
            port.StreamQuery: partial(queries.find_streams, self._runs),
            port.PlaceQuery: self._find_places,
            port.MailboxQuery: partial(queries.find_mailbox, self._runs),
            port.TaskQuery: partial(queries.find_tasks, self._runs),
            port.DeadLetterQuery: partial(queries.find_dead_letters, self._runs),
            port.AuditQuery: self._audit.find,
            port.FinishedRunQuery: partial(retention.find_finished, self._runs, self._bus.holds),
            port.ScheduleQuery: self._schedules.find,
            port.ArchivedRunQuery: self._archive.find,
            port.SinkQuery: self._bus.find_sinks,
            port.OutboxQuery: self._bus.find_outbox,
            port.AlertQuery: self._bus.find_alerts,
            port.BusDeadLetterQuery: self._bus.find_letters,
        }

    # --- RunStore

    async def now(self) -> Instant:
        return self._now()

    def _now(self) -> Instant:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        return self._clock.now()

    async def create(
        self, runs: Sequence[port.NewRun], claim_for: str | None = None
    ) -> list[port.Created | port.Existing | port.Refused]:
        now = self._now()
        validation.check_batch(runs, self._limits)
        validation.require_for_signals(self, (signal for new in runs for signal in getattr(new, "signals", ())))
        validation.require_for_records(self, runs)
        if claim_for is not None:
            self._check_node(claim_for, now)
        answers = [self._create(new, claim_for, now) for new in runs]
        if creations_may_wake_others(runs, answers):
            self.wakeups.notify()
        return answers

    def _create(self, new: port.NewRun, owner: str | None, now: Instant) -> port.Created | port.Existing | port.Refused:
        problem = validation.check_new_run(new)
        if problem is not None:
            return port.Refused(problem)
        existing_id = self._requests.get(new.request_key)
        if existing_id is not None:
            if self._runs[existing_id].input_sha256 == new.input_sha256:
                return port.Existing(existing_id, self._deliver_first(new, existing_id, now))
            return port.Refused(decisions.request_conflict(existing_id))
        verdict = self._reuse(new, now) if new.reuse is not None else None
        if verdict is not None:
            return verdict
        if new.run_id in self._runs:
            return port.Refused(decisions.run_id_taken(new.run_id))
        problem = validation.check_first_signals(new, self._limits)
        if problem is not None:
            return port.Refused(problem)
        request = new.admission
        entry = Run(new, owner, now) if request is None else self._enqueue(new, request, now)
        if isinstance(entry, port.Refused):
            return entry
        run = self._runs[new.run_id] = entry
        self._requests[new.request_key] = new.run_id
        self._changefeed.note(new.run_id, run.events)
        self._bus.note(run.head, run.events, now)
        self._note(new.audit, run, now)
        if request is not None:
            self._admit_next(new, request.limit, owner, now)
        if new.reuse is not None and new.reuse.stop is not None:
            self._deliver(new.reuse.stop, self._limits, now)
        return port.Created(new.run_id, run.head.lease_epoch, self._deliver_first(new, new.run_id, now))

    def _reuse(self, new: port.NewRun, now: Instant) -> port.Existing | port.Refused | None:
        """Return the verdict on an id that may be taken; None if the run is to be created."""
        assert new.reuse is not None
        numbers = {run_id: restart_number(new.reuse.run_id, run_id) for run_id in self._runs}
        found = max((each for each in numbers if numbers[each]), key=lambda each: numbers[each] or 0, default=None)
        latest = None if found is None else self._runs[found].taken
        verdict = decisions.reuse_of(new, latest)
        if verdict is None and latest is not None:
            delivered = [self._deliver(each, self._limits, now) for each in decisions.signals_to(new, latest)]
            return decisions.accepted_before(new, latest, delivered)
        return verdict

    def _enqueue(self, new: port.NewRun, request: AdmissionRequest, now: Instant) -> Run | port.Refused:
        """Put a new run into the admission queue of its plan."""
        queue = self._admission_queues.setdefault(new.plan_id, AdmissionQueue())
        refusal = queue.enqueue(new.run_id, new.plan_id, new.tenant, request, now)
        return Run(new, None, now, NEVER) if refusal is None else port.Refused(refusal)

    def _queue_again(self, run: Run, request: AdmissionRequest, now: Instant) -> None:
        """Put an existing run into the admission queue of its plan, unless it is there already, and admit the next."""
        head = run.head
        queue = self._admission_queues.setdefault(head.plan_id, AdmissionQueue())
        request = decisions.unrejected(request)
        if queue.is_inside(head.run_id):
            run.admit(now)
        elif not queue.is_waiting(head.run_id):
            queue.enqueue(head.run_id, head.plan_id, head.tenant, request, now)
            self._admit(head.plan_id, request.limit, 1, now)

    def _admit_next(self, new: port.NewRun, limit: RunLimit, owner: str | None, now: Instant) -> None:
        """Admit the next run after a new one was queued; if it is the new one, for `owner`."""
        run_ids, _ = self._admit(new.plan_id, limit, 1, now)
        if new.run_id in run_ids and owner is not None:
            run = self._runs[new.run_id]
            run.head = replace(run.head, lease_owner=owner, lease_epoch=1)

    def _admit(self, plan_id: str, limit: RunLimit, most: int, now: Instant) -> tuple[list[str], Instant | None]:
        """Admit up to `most` runs of one plan. Also return when to call again even if no run leaves."""
        admitted: list[str] = []
        queue = self._admission_queues.get(plan_id)
        while queue is not None and (decision := queue.decide(limit, now)).run is not None:
            if decision.free_at > now or len(admitted) == most:
                return admitted, decision.next_at(now)
            run_id = decision.run.id
            queue.admit(run_id, limit)
            self._runs[run_id].admit(now)
            admitted.append(run_id)
        return admitted, None

    def _deliver_first(self, new: port.NewRun, run_id: str, now: Instant) -> tuple[port.Delivered, ...]:
        requests = decisions.first_signals(new, run_id, self._runs[run_id].head.plan_version)
        return tuple(self._deliver(request, self._limits, now) for request in requests)

    def joined(self, connection: Any) -> JoinedStore:
        raise no_transactions("a store in memory")

    async def load(self, run_ids: Sequence[str]) -> list[port.LoadedRun | None]:
        now = self._now()
        validation.check_ids(run_ids, self._limits)
        return [self._runs[run_id].loaded(now) if run_id in self._runs else None for run_id in run_ids]

    async def read_events(
        self, run_id: str, after: int = 0, limit: int | None = None, most_bytes: int | None = None
    ) -> list[Event]:
        validation.check_values(run_id=run_id, after=after)
        validation.check_bound("most_bytes", most_bytes)
        self._now()
        run = self._runs.get(run_id)
        most = self._limits.page_items if limit is None else validation.check_page(limit)
        events = run.events[max(after, 0) :][:most] if run else []
        return list(within(events, most_bytes, lambda event: len(codec.encode_body(event.data))))

    async def deliver(
        self, items: Sequence[SignalRequest | Message]
    ) -> list[port.Accepted | port.Duplicate | port.Refused]:
        now = self._now()
        validation.check_batch(items, self._limits)
        validation.require_for_signals(self, (item for item in items if isinstance(item, SignalRequest)))
        answers = [self._deliver(item, self._limits, now) for item in items]
        self.wakeups.notify(*READY)
        return answers

    def _deliver(self, item: SignalRequest | Message, limits: Limits, now: Instant) -> port.Delivered:
        problem = validation.check_item(item, limits)
        if problem is not None:
            return port.Refused(problem)
        run = self._runs.get(item.run_id)
        if run is None:
            return port.Refused(decisions.no_such_run(item.run_id))
        if isinstance(item, Message):
            return run.deliver_message(item, now)
        answer = run.deliver_signal(item, limits, now)
        if isinstance(answer, port.Accepted):
            self._note(item.audit, run, now)
        return answer

    async def commit(self, turns: Sequence[port.Turn]) -> list[port.Committed | port.CommitConflict]:
        now = self._now()
        validation.check_batch(turns, self._limits)
        validation.require_for_records(self, turns)
        answers = [self._commit(turn, now) for turn in turns]
        self.wakeups.notify(*(news_of(turns) or ("changes", NOTHING)))
        return answers

    def _commit(self, turn: port.Turn, now: Instant) -> port.Committed | port.CommitConflict:
        run = self._runs.get(turn.run_id)
        if run is None:
            return port.CommitConflict("no such run")
        before, was_begun = run.head.version, run.has_begun
        persisted_at = max(now, run.events[-1].persisted_at + 1) if self._distinct_commits else now
        answer = run.commit(turn, now, persisted_at)
        if isinstance(answer, port.Committed):
            self._changefeed.note(turn.run_id, run.events[before:])
            self._bus.note(run.head, run.events[before:], now)
            queue = self._admission_queues.get(run.head.plan_id)
            if queue is not None and run.has_begun and not was_begun:
                queue.record_start(turn.run_id, now)
            if queue is not None and run.is_finished:
                queue.leave(turn.run_id)
            if turn.admission is not None and before == turn.expected_version:
                self._queue_again(run, turn.admission, now)
            if before == turn.expected_version:  # otherwise it was committed before, along with what it sends to others
                self._send_out(turn, run, now)
        return answer

    def _send_out(self, turn: port.Turn, run: Run, now: Instant) -> None:
        if turn.streams:
            run.streams.write(turn.run_id, turn.streams, self._limits.stream_bytes, now)
        started = [self._create(new, None, now) for new in decisions.never_rejected(turn.starts)]
        sent = [self._send(turn, item, now) for item in turn.sends]
        left = outgoing.left_of(turn, started, sent, now)
        for message in left.messages:
            run.deliver_message(message, now)
        run.letters.update({letter.letter_id: letter for letter in left.letters})

    def _send(self, turn: port.Turn, item: SignalRequest | Message, now: Instant) -> port.Delivered:
        concerned = [run_id for run_id in outgoing.concerned(turn, item) if run_id in self._runs]
        runs = {run_id: outgoing.whose(self._runs[run_id].head) for run_id in concerned}
        return outgoing.unreachable(turn, item, runs) or self._deliver(item, decisions.without_rate(self._limits), now)

    async def claim(self, node: str, limit: int, plans: Sequence[port.Plan] | None = None) -> list[port.LoadedRun]:
        validation.check_values(node=node)
        validation.check_plans(plans)
        now = self._now()
        validation.check_page(limit)
        self._check_node(node, now)
        known = None if plans is None else frozenset(plans)
        eligible = [
            (since, run_id)
            for run_id, run in self._runs.items()  # in order of creation
            if (since := self._eligible_since(run, node, now)) is not None
            and (known is None or queries.claimed_as(run.head) in known)
        ]
        claimed = []
        for _, run_id in sorted(eligible, key=lambda entry: entry[0])[:limit]:
            run = self._runs[run_id]
            owner, losses = run.head.lease_owner, run.head.losses
            epoch = run.head.lease_epoch + (owner != node)
            if owner is not None and owner != node:
                losses = max(losses, min(losses + 1, SUSPECT_LOSSES))
            run.head = replace(run.head, lease_owner=node, lease_epoch=epoch, losses=losses)
            run.wake(now)
            claimed.append(run.loaded(now))
        return claimed

    def _eligible_since(self, run: Run, node: str, now: Instant) -> Instant | None:
        """Return since when the node may claim the run, or None if it may not."""
        owner = run.head.lease_owner
        since = run.head.ready_at if owner is None or owner == node else self._lease_end(owner, now)
        return since if since is not None and since <= now else None

    async def renew(
        self, node: str, lease_ms: int, plans: Sequence[port.Plan] | None = None, is_start: bool = False
    ) -> Instant:
        now = self._now()
        validation.check_lease(node, lease_ms, plans)
        others = [name for name in self._nodes if decisions.is_another_life(node, name)]
        has_lease = decisions.lease_end(self._nodes.get(node, 0), now) > now
        if is_start:
            self._end_lives(node, others, now)
        elif not has_lease and any(self._lease_end(name, now) > now for name in others):
            raise decisions.superseded(node)
        self._nodes[node] = now + lease_ms * 1_000
        if plans is not None:
            self._known[node] = frozenset(plans)
        owners = {run.head.lease_owner for run in self._runs.values()}
        self._nodes = {
            name: end for name, end in self._nodes.items() if self._lease_end(name, now) > now or name in owners
        }
        self._known = {name: known for name, known in self._known.items() if name in self._nodes}
        return self._nodes[node]

    def _end_lives(self, node: str, others: Sequence[str], now: Instant) -> None:
        """End the leases of other lives of a node, and make the jobs that they had acquired visible."""
        for name in others:
            self._nodes[name] = min(self._nodes[name], now)
        for run in self._runs.values():
            for step_id, work in run.work.items():
                is_theirs = work.taken_by is not None and decisions.is_another_life(node, work.taken_by)
                if is_theirs and work.visible_at is not None and work.visible_at > now:
                    run.work[step_id] = replace(work, visible_at=now)
        self._host_locks.end_lives(node, now)
        self.wakeups.notify()

    async def release(self, node: str, run_ids: Sequence[str] | None = None) -> int:
        validation.check_values(node=node)
        validation.check_ids(run_ids or ())
        now = self._now()
        named = self._runs.keys() if run_ids is None else set(run_ids)
        freed = [run for run_id, run in self._runs.items() if run_id in named and run.head.lease_owner == node]
        for run in freed:
            run.head = replace(run.head, lease_owner=None, lease_epoch=run.head.lease_epoch + 1)
            run.wake(now)
        if run_ids is None:
            self._nodes.pop(node, None)
            self._known.pop(node, None)
        self.wakeups.notify()
        return len(freed)

    async def hand_over(self, node: str, run_ids: Sequence[str], to: str) -> list[str]:
        validation.check_values(node=node, to=to)
        validation.check_ids(run_ids, self._limits)
        now = self._now()
        if to not in self._nodes or self._lease_end(to, now) <= now:
            return []
        found = [run for run_id in dict.fromkeys(run_ids) if (run := self._runs.get(run_id)) is not None]
        given = [run for run in found if run.head.lease_owner == node != to]
        for run in given:
            run.head = replace(run.head, lease_owner=to, lease_epoch=run.head.lease_epoch + 1)
            run.wake(now)
        self.wakeups.notify()
        return sorted(run.head.run_id for run in given)

    async def next_due(
        self, node: str, plans: Sequence[port.Plan] | None = None, queues: Sequence[str] = ()
    ) -> Instant | None:
        validation.check_values(node=node)
        validation.check_plans(plans)
        validation.check_names("queues", queues, self._limits)
        now = self._now()
        visible = [run.work[job.step_id].visible_at for run, job in self._jobs() if job.queue in queues]
        instants = [visible_at for visible_at in visible if visible_at is not None]
        known = None if plans is None else frozenset(plans)
        for run in self._runs.values():
            owner, ready_at = run.head.lease_owner, run.head.ready_at
            at = self._lease_end(owner, now) if owner is not None and owner != node else ready_at
            if at is not None and (known is None or queries.claimed_as(run.head) in known):
                instants.append(at)
        return min(instants, default=None)

    # --- JobQueue

    async def acquire_jobs(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> list[port.Job]:
        validation.check_acquire(node, queues, activities, limit, visible_ms, self._limits)
        now = self._now()
        visible = [
            (run, job)
            for run, job in self._jobs()
            if job.queue in queues and job.activity in activities and run.work[job.step_id].is_visible(now)
        ]
        visible.sort(key=lambda entry: entry[0].work[entry[1].step_id].visible_at or 0)
        taken = []
        for run, job in visible[:limit]:
            run.work[job.step_id], given = acquire(run.work[job.step_id], job, node, now + visible_ms * 1_000)
            taken.append(given)
        return taken

    async def acquire_limited_jobs(
        self,
        node: str,
        queues: Sequence[str],
        activities: Sequence[str],
        limits: Mapping[str, CallLimit],
        limit: int,
        visible_ms: int,
    ) -> tuple[list[port.Job], Instant | None]:
        validation.check_acquire_limited(node, queues, activities, limits, limit, visible_ms, self._limits)
        now = self._now()
        calls, jobs = self._limited_calls(queues, activities)
        if not any(call.is_wanted for waiting in calls.values() for call in waiting):
            return [], None
        places, again_at = self._call_limits.acquire(calls, limits, limit, now, now + visible_ms * 1_000)
        taken = []
        for run, job in (jobs[place] for place in places):
            run.work[job.step_id], given = acquire(run.work[job.step_id], job, node, now + visible_ms * 1_000)
            taken.append(given)
        return taken, again_at

    def _limited_calls(
        self, queues: Sequence[str] = (), activities: Sequence[str] = ()
    ) -> tuple[dict[str, list[Call]], dict[tuple[int, str], tuple[Run, port.Job]]]:
        """Return the calls that have limits, by limit name, with their runs and jobs."""
        calls, jobs = dict[str, list[Call]](), dict[tuple[int, str], tuple[Run, port.Job]]()
        for number, (run, job) in enumerate(self._jobs()):
            limited, work = limited_by(job.queue, job.options), run.work[job.step_id]
            if limited is not None and work.visible_at is not None:
                is_wanted = job.queue in queues and job.activity in activities
                call = Call(
                    *((number, job.step_id), job.tenant, limited.key),
                    *(work.visible_at, work.taken_by is not None, is_wanted),
                )
                calls.setdefault(limited.name, []).append(call)
                jobs[call.id] = run, job
        return calls, jobs

    def _find_places(self, query: port.PlaceQuery) -> port.Found[port.PlaceInLine]:
        """Return what waits for a place in these runs."""
        now = self._now()
        calls, jobs = self._limited_calls()
        found: list[port.PlaceInLine] = []
        for run_id in sorted({*query.run_ids} & self._runs.keys()):
            queue = self._admission_queues.get(self._runs[run_id].head.plan_id)
            waiting = None if queue is None else queue.place_of(run_id, self._runs[run_id].head.plan_id)
            if waiting is not None:
                found.append(waiting)
                continue
            own = [
                (call.turn, name)
                for name, all_ in calls.items()
                for call in all_
                if call.visible_at <= now and jobs[call.id][0].head.run_id == run_id
            ]
            if own:
                turns, name = {turn for turn, _ in own}, min(own)[1]
                mine = [call for all_ in calls.values() for call in all_ if call.turn in turns]
                found.append(place_in_line(run_id, mine, name, calls[name], now))
        return port.Found(found)

    async def release_jobs(self, node: str, jobs: Sequence[port.Job]) -> int:
        validation.check_release(node, jobs, self._limits)
        now = self._now()
        released = 0
        for job in jobs:
            run = self._runs.get(job.run_id)
            work = None if run is None else run.work.get(job.step_id)
            if run is not None and work is not None and work.is_taken_by(node, job.engine_attempt_id):
                run.work[job.step_id] = work.returned(job.engine_attempt_id, now)
                released += 1
        self.wakeups.notify()
        return released

    async def heartbeat(self, node: str, beats: Sequence[port.Heartbeat], visible_ms: int) -> list[bool]:
        validation.check_heartbeats(node, beats, visible_ms, self._limits)
        now = self._now()
        until = now + visible_ms * 1_000
        return [beat.run_id in self._runs and self._runs[beat.run_id].beat(node, beat, until, now) for beat in beats]

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> tuple[list[port.Admitted], Instant | None]:
        validation.check_admit(limits, limit, claim_for, self._limits)
        now = self._now()
        if claim_for is not None:
            self._check_node(claim_for, now)
        admitted: list[port.Admitted] = []
        instants: list[Instant] = []
        for plan_id, run_limit in sorted(limits.items()):
            run_ids, next_at = self._admit(plan_id, run_limit, limit - len(admitted), now)
            admitted += [self._admitted(run_id, claim_for, now) for run_id in run_ids]
            instants += [] if next_at is None else [next_at]
        if admitted:
            self.wakeups.notify()
        return admitted, min(instants, default=None)

    def _admitted(self, run_id: str, node: str | None, now: Instant) -> port.Admitted:
        run = self._runs[run_id]
        if run.head.lease_owner is not None:
            return port.Admitted(run_id, "SKIPPED")
        if node is None:
            return port.Admitted(run_id, "STARTED")
        run.head = replace(run.head, lease_owner=node, lease_epoch=run.head.lease_epoch + 1)
        return port.Admitted(run_id, "STARTED", run.loaded(now))

    # --- Index

    async def find(self, query: port.Query[Row]) -> port.Found[Row]:
        finder = validation.finder_of(self._finders, query)
        self._now()
        most = min(validation.check_page(query.limit), self._limits.page_items)
        if isinstance(query, port.RunCountQuery) or getattr(query, "order", None) is not None:
            return finder(replace(query, limit=most))  # it has its own bound and cursor
        found = finder(query)
        page = queries.page_of(found, query, most)
        cursor = found.cursor if len(page) == len(found) < query.limit else None
        return port.Found(page, cursor, missing=found.missing)

    async def find_nodes(self) -> list[port.NodePlans]:
        now = self._now()
        alive = sorted(name for name in self._known if self._lease_end(name, now) > now)
        return [port.NodePlans(name, self._known[name]) for name in alive]

    async def find_orphaned(self, late_ms: int) -> list[port.OrphanedDefinition]:
        validation.check_late(late_ms)
        heads = (run.head for run in self._runs.values())
        return queries.find_orphaned(heads, self._nodes, self._known, late_ms, self._now())

    async def find_definitions(self, plans: Sequence[port.Plan]) -> list[WorkflowDeclaration | None]:
        validation.check_plans(plans)
        return [self._definitions.get(plan) for plan in plans]

    async def changes(self, cursor: str = "", limit: int = 1_000) -> port.Changes:
        self._now()
        return self._changefeed.since(cursor, min(validation.check_page(limit), self._limits.page_items), self._runs)

    async def stats(self) -> port.Stats:
        now = self._now()
        runs = list(self._runs.values())
        ready = [run.head.ready_at for run in runs if run.head.ready_at is not None and run.head.ready_at <= now]
        by_status: dict[str, int] = {}
        for run in runs:
            by_status[str(run.head.status)] = by_status.get(str(run.head.status), 0) + 1
        return port.Stats(
            runs=by_status,
            ready=len(ready),
            leased=sum(run.head.lease_owner is not None for run in runs),
            messages=sum(len(run.messages) for run in runs),
            signals=sum(signal.consumed_seq is None for run in runs for signal in run.signals),
            open_tasks=sum(task.status == "OPEN" for run in runs for task in run.tasks.values()),
            jobs=len(self._jobs()),
            queued=sum(run.head.queued_at is not None for run in runs),
            dead_letters=sum(letter.settled is None for letter in self._letters()),
            nodes=sum(self._lease_end(node, now) > now for node in self._nodes),
            oldest_ready_at=min(ready, default=None),
            queues=dict(Counter(job.queue for _, job in self._jobs())),
            leases={node: end for node, end in self._nodes.items() if self._lease_end(node, now) > now},
        )

    async def health(self, bounds: health.Bounds, *, thorough: bool = False) -> health.Facts:
        return examine(self._runs, self._nodes, bounds, self._now())

    # --- Admin

    async def migrate(self) -> int:
        self._now()
        return 1

    async def close(self) -> None:
        self._is_closed = True
        self.wakeups.close()

    async def publish_definitions(self, definitions: Sequence[WorkflowDeclaration]) -> None:
        validation.check_definitions(definitions, self._limits)
        self._definitions |= {(one.plan_id, one.plan_version): one for one in definitions}

    async def settle_dead_letters(
        self, ids: Sequence[str], action: Settlement, actor: str = "", audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        validation.check_settlement(ids, action, actor, self._limits)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        now = self._now()
        answers = [self._settle(letter_id, action, actor, now, audit) for letter_id in ids]
        self.wakeups.notify()
        return answers

    def _settle(
        self, letter_id: str, action: Settlement, actor: str, now: Instant, audit: AuditEntry | None
    ) -> Settled | port.Refused:
        for run in self._runs.values():
            if letter_id in run.letters:
                before = run.letters[letter_id]
                answer = run.settle(before, action, actor, now)
                if audit is not None and isinstance(answer, Settled) and before.settled is None:
                    self._note(letter_entry(audit, letter_id), run, now)
                return answer
        return port.Refused(decisions.no_such_letter(letter_id))

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        validation.check_audit(entries, self._limits)
        now = self._now()
        for entry in entries:
            self._audit.append(replace(entry, at=now))

    async def purge(self, policy: port.PurgePolicy, audit: AuditEntry | None = None) -> port.PurgeReport:
        validation.check_purge(policy, audit, self._limits)
        now = self._now()
        held_after = now - policy.sink_hold_ms * 1_000
        report, gone = retention.purge(self._runs, policy, now, lambda run_id: self._bus.holds(run_id, held_after))
        entries = [] if policy.audit_ms is None else self._audit.old(now - policy.audit_ms * 1_000, policy)
        kept = [run for run_id, run in self._runs.items() if run_id not in gone]
        used = {(run.head.tenant, run.plan_sha256) for run in kept if run.plan_sha256 is not None}
        bodies = self._plans.unused(policy, used, now)
        archived = self._archive.old(policy, now)
        outbox, has_more_entries = self._bus.purge(policy, gone, now)
        has_more_rows = max(len(entries), len(bodies), len(archived)) > policy.limit
        has_more = report.has_more or has_more_entries or has_more_rows
        tokens = self._tokens.of_tenant(policy.tenant) if policy.tokens else []
        report = replace(
            report,
            audit_entries=len(entries[: policy.limit]),
            tokens=len(tokens),
            plans=len(bodies[: policy.limit]),
            archived_runs=len(archived[: policy.limit]),
            outbox=outbox,
            has_more=has_more,
        )
        if not policy.dry_run:
            self._plans.forget(bodies[: policy.limit], policy.tenant if policy.plans else None)
            self._schedules.forget(policy.tenant if policy.plans else None)
            self._audit.forget(entries[: policy.limit])
            self._archive.forget(archived[: policy.limit])
            created = {run_id: self._runs[run_id].head.created_at for run_id in gone}
            self._archive.add(decisions.archived_of(policy, created, now))
            self._tokens.forget(tokens)
            if audit is not None:
                self._audit.append(decisions.purge_entry(audit, report, now))
        for run_id in gone if not policy.dry_run else ():
            del self._requests[self._runs.pop(run_id).request_key]
        return report

    async def acquire_lock(self, name: str, owner: str, lease_ms: int) -> port.HostLock | None:
        validation.check_lock(name, owner, lease_ms)
        return self._host_locks.acquire(name, owner, lease_ms, self._now())

    async def release_lock(self, name: str, owner: str, epoch: int) -> bool:
        validation.check_lock(name, owner, epoch=epoch)
        self._now()
        return self._host_locks.release(name, owner, epoch)

    async def find_locks(self) -> list[port.HostLock]:
        self._now()
        return self._host_locks.find()

    # --- TokenStore

    async def put_tokens(self, tokens: Sequence[AccessToken], audit: Sequence[AuditEntry] = ()) -> list[AccessToken]:
        validation.check_tokens(tokens, self._limits)
        validation.check_audit(audit, self._limits)
        now = self._now()
        for entry in audit:
            self._audit.append(replace(entry, at=now))
        return self._tokens.put(tokens, now)

    async def find_tokens(self, query: port.TokenQuery) -> port.Found[AccessToken]:
        validation.check_query(query)
        self._now()
        return port.Found(self._page(self._tokens.find(query), query.limit))

    async def put_key(self, name: str, key: str) -> str:
        validation.check_key(name, key)
        self._now()
        return self._keys.setdefault(name, key)

    async def get_key(self, name: str) -> str | None:
        validation.check_names("name", [name])
        self._now()
        return self._keys.get(name)

    # --- PlanStore

    async def put_plan(self, tenant: str, sha256: str, body: bytes) -> None:
        validation.check_plan_body(tenant, sha256, body)
        self._plans.put(tenant, sha256, body, self._now())

    async def get_plan(self, tenant: str, sha256: str) -> bytes | None:
        validation.check_plan_body(tenant, sha256)
        self._now()
        return self._plans.get(tenant, sha256)

    async def register_plan(self, plan: RegisteredPlan, audit: AuditEntry | None = None) -> RegisteredPlan:
        validation.check_registered_plan(plan)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        now = self._now()
        stored = self._plans.register(plan, now)
        if audit is not None:
            self._audit.append(replace(audit, at=now))
        return stored

    async def find_plans(self, query: port.PlanQuery) -> port.Found[RegisteredPlan]:
        validation.check_query(query)
        self._now()
        return port.Found(self._page(self._plans.find(query), query.limit))

    # --- BusStore

    async def put_sink(self, sink: Sink, audit: AuditEntry | None = None) -> Sink:
        validation.check_put_sink(sink, audit, self._limits)
        now = self._now()
        stored = self._bus.put_sink(sink, now)
        self._append(audit, now)
        self.wakeups.notify()
        return stored

    async def remove_sink(self, name: str, audit: AuditEntry | None = None) -> bool:
        validation.check_sink_name(name, audit, self._limits)
        now = self._now()
        is_removed = self._bus.remove_sink(name)
        if is_removed:
            self._append(audit, now)
        return is_removed

    async def settle_outbox(self, sink: str, items: Sequence[OutboxSettlement], progress: SinkProgress) -> list[bool]:
        validation.check_settle_outbox(sink, items, progress, self._limits)
        return self._bus.settle(sink, items, progress, self._now())

    async def replay_outbox(self, asked: OutboxReplay, audit: AuditEntry | None = None) -> Replayed:
        validation.check_replay(asked, audit, self._limits)
        now = self._now()
        replayed = self._bus.replay(asked, now)
        self._append(audit, now)
        self.wakeups.notify()
        return replayed

    async def raise_alerts(self, alerts: Sequence[BusAlert]) -> int:
        validation.check_alerts(alerts, self._limits)
        new = self._bus.raise_alerts(alerts, self._now())
        self.wakeups.notify()
        return new

    async def settle_bus_dead_letters(
        self, ids: Sequence[str], action: Settlement, audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        validation.check_settlement(ids, action, "", self._limits)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        now = self._now()

        def note(letter_id: str) -> None:
            self._append(None if audit is None else letter_entry(audit, letter_id), now)

        answers = self._bus.settle_letters(ids, action, now, note)
        self.wakeups.notify()
        return answers

    # --- BulletinStore

    async def put_bulletins(self, kind: str, bodies: Mapping[str, Raw], keep_ms: int) -> list[bool]:
        validation.check_bulletins(kind, bodies, keep_ms, self._limits)
        answers = self._bulletins.put(kind, bodies, keep_ms, self._now())
        self.wakeups.notify()
        return answers

    async def find_bulletins(self, query: port.BulletinQuery) -> port.Found[port.Bulletin]:
        validation.check_query(query)
        most = min(validation.check_page(query.limit), self._limits.page_items)
        return port.Found(self._bulletins.find(query, self._now())[:most])

    # --- StreamStore

    async def append_streams(self, items: Sequence[StreamAppend]) -> list[Appended | port.Refused]:
        validation.check_batch(items, self._limits)
        now = self._now()
        answers = [self._append_stream(given, now) for given in items]
        self.wakeups.notify("streams")
        return answers

    def _append_stream(self, given: StreamAppend, now: Instant) -> Appended | port.Refused:
        problem = validation.check_append(given)
        run = None if problem is not None else self._runs.get(given.run_id)
        refusal = problem or decisions.fenced(given, None if run is None else run.fence_of(given.step_id))
        if refusal is not None or run is None:
            return port.Refused(refusal or decisions.no_such_run(given.run_id))
        return run.streams.append(given, self._limits.stream_bytes, now)

    async def read_streams(self, items: Sequence[StreamRead]) -> list[StreamPage | None]:
        validation.check_stream_reads(items, self._limits)
        self._now()
        runs = [self._runs.get(asked.run_id) for asked in items]
        return [
            None if run is None else run.streams.read(asked, run.is_finished)
            for asked, run in zip(items, runs, strict=True)
        ]

    # --- ScheduleStore

    async def commit_schedule(
        self,
        schedule: Schedule,
        expected_revision: int,
        starts: Sequence[port.NewRun] = (),
        audit: AuditEntry | None = None,
    ) -> tuple[Schedule, list[port.Created | port.Existing | port.Refused]]:
        validation.check_committed_schedule(schedule, expected_revision, starts, audit, self._limits)
        now = self._now()
        stored, is_new = self._schedules.commit(schedule, expected_revision, now)
        if not is_new:
            return stored, [validation.started_before(new, self._requests.get) for new in starts]
        if audit is not None:
            self._audit.append(replace(audit, at=now))
        answers = [self._create(new, None, now) for new in starts]
        self.wakeups.notify()
        return stored, answers

    async def delete_schedule(
        self, place: tuple[str, str, str, str], expected_revision: int, audit: AuditEntry | None = None
    ) -> bool:
        validation.check_names("schedule", place)
        now = self._now()
        is_deleted = self._schedules.delete(place, expected_revision)
        if audit is not None and is_deleted:
            self._audit.append(replace(audit, at=now))
        return is_deleted

    # --- shared by several verbs

    def _append(self, entry: AuditEntry | None, now: Instant) -> None:
        """Append an entry to the audit log, if there is one."""
        if entry is not None:
            self._audit.append(replace(entry, at=now))

    def _note(self, entry: AuditEntry | None, run: Run, now: Instant) -> None:
        """Append an entry about a run to the audit log, if there is one."""
        if entry is not None:
            place = (run.head.tenant, run.head.project, run.head.environment)
            self._audit.append(run_entry(entry, run.head.run_id, place, now))

    def _page(self, found: list[T], limit: int) -> list[T]:
        return found[: min(validation.check_page(limit), self._limits.page_items)]

    def _letters(self) -> list[DeadLetter]:
        return [letter for run in self._runs.values() for letter in run.letters.values()]

    def _check_node(self, node: str, now: Instant) -> None:
        if decisions.lease_end(self._nodes.get(node, 0), now) <= now:
            raise decisions.lease_expired(node)

    def _lease_end(self, node: str, now: Instant) -> Instant:
        return decisions.lease_end(self._nodes[node], now)

    def _jobs(self) -> list[tuple[Run, port.Job]]:
        """Return the jobs in all queues: runs in order of creation, the steps of each in order of their ids."""
        return [
            (run, work.job)
            for run in self._runs.values()
            if run.work
            for _, work in sorted(run.work.items())
            if work.job is not None
        ]


class _Changefeed:
    """The histories that have grown, in the order of the commits."""

    def __init__(self) -> None:
        self._changes: list[port.Change] = []

    def note(self, run_id: str, new: Sequence[Event]) -> None:
        """Note that a run's history has grown by these events, if there are any."""
        if new:
            has_tasks = any(event.event_type.startswith("Task") for event in new)
            self._changes.append(port.Change(run_id, new[-1].run_seq, has_tasks))

    def since(self, cursor: str, most: int, known: Container[str]) -> port.Changes:
        """Return the known runs whose histories have grown since a cursor."""
        here = len(self._changes)
        if not cursor:
            return port.Changes(str(here))
        if not (cursor.isascii() and cursor.isdecimal() and int(cursor) <= here):
            return port.Changes(str(here), is_lost=True)
        end = min(here, int(cursor) + most)
        grown = [change for change in self._changes[int(cursor) : end] if change.run_id in known]
        last = {change.run_id: change for change in grown}
        tasks = {change.run_id for change in grown if change.has_tasks}
        runs = tuple(replace(change, has_tasks=run_id in tasks) for run_id, change in sorted(last.items()))
        return port.Changes(str(end), runs, has_more=end < here)
