"""Random arguments for the verbs of a store: mostly sensible, often related to each other, sometimes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from msgspec import UNSET, Raw
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.admission import AdmissionRequest, Overload, RunLimit
from holdfast.core.attributes import At, RowKind, Value, changed
from holdfast.core.call_limits import CallLimit, LimitedBy, limited_queue
from holdfast.core.dead_letters import DeadLetter, Reason, to_dead_letter
from holdfast.core.debounce import offer
from holdfast.core.events import DebounceTerms, ErrorInfo, RunQueued
from holdfast.core.index_rows import ActivityRecord, Task, Wait
from holdfast.core.instants import Instant
from holdfast.core.messages import (
    OUTCOME_SIGNAL,
    ActivityOutcome,
    Message,
    MessageType,
    SignalRequest,
    activity_completed,
    control_request,
)
from holdfast.core.restarts import RESTART_MARK, is_restart_of, next_restart, restart_number
from holdfast.core.search import Condition, Operator, Order
from holdfast.core.state import RunStatus, retry_token
from holdfast.core.streams import StreamAppend, StreamChunks, StreamRead
from holdfast.store.port import (
    EventQuery,
    Heartbeat,
    Job,
    MailboxQuery,
    NewRun,
    Plan,
    PurgePolicy,
    RunHead,
    RunQuery,
    TaskQuery,
    WaitQuery,
)
from holdfast.store.queries import DeadLetterQuery, FinishedRunQuery
from holdfast.store.types import Reuse, ReusePolicy
from holdfast.testing.samples import job, message, new_run, record
from holdfast.testing.store_suite.base import BAD_NAMES, STRANGE_IDS

T = TypeVar("T")

NODES = ("node-a", "knot:b#1", "knot:b#2")
NAMES = ("go", "Go", "g:o", "\u00e9", "e\u0301", "a/b")
STEPS = ("first", "second", "a|b", "%", "\u00e9", "e\u0301")
TENANTS = ("default", "acme", "Acme")
PLANS = ("order", "refund %")
VERSIONS = ("1", "1", "2")
TAGS = ("eu", "EU", "v_p", "vip", "日本")
ROLES = ("clerk", "boss", "Boss")
PEOPLE = (None, "ann", "bob'; --")
PAYLOADS = (b"null", b"1", b'"x"', b'{ "a": 1.50 }', '"é\u2028"'.encode())
LIMITS = (1, 2, 5, 100, 100, 100)
QUEUES = ("mail", "Mail", "\u00e9")
LIMITED_QUEUES = tuple(limited_queue(queue) for queue in ("", *QUEUES[:1]))
LIMIT_NAMES = ("api", "API", "a'b")
STREAM_NAMES = ("tokens", "T'okens", "\u00e9")
ACTIVITIES = ("charge", "refund", "a:b")
VISIBLE_MS = (1, 1_000, 30_000)
KINDS: tuple[MessageType, ...] = ("TimerDue", "RetryDue", "InternalContinue")
MISSING = "missing"
ATTRIBUTE_KINDS: dict[str, RowKind] = {"cents": "n", "region": "s", "vip": "b", "due": "t", "parts": "s"}

Spec = dict[str, Any]
"""The options of `new_run`: what was asked for, so that it can be asked for again."""


class Values:
    """Draws arguments. Everything comes from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.made: list[Spec] = []
        self.sent: list[SignalRequest] = []
        self.ids = self._random.sample(STRANGE_IDS, 5)
        self._count = 0
        self._tasks: dict[str, list[Task]] = {}

    def happens(self, probability: float) -> bool:
        """Say yes this often."""
        return self._random.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        """Draw one."""
        return self._random.choice(options)

    def number(self, least: int, most: int) -> int:
        """Draw a number, both ends included."""
        return self._random.randint(least, most)

    def weighted(self, options: Sequence[tuple[int, T]]) -> T:
        """Draw one by its weight."""
        return self._random.choices([option for _, option in options], [weight for weight, _ in options])[0]

    def some(self, options: Sequence[T], most: int) -> list[T]:
        """Draw none, one or more, each at most once."""
        return self._random.sample(options, self.number(0, min(most, len(options))))

    def fresh(self, what: str) -> str:
        """Return a text that was not there before, with something strange in it."""
        self._count += 1
        return f"{self.pick(('', '', 'é', ':', '/', '..', '%2F'))}{what}-{self._count}"

    # --- runs

    def new_run(self, now: Instant, is_full: bool) -> NewRun:
        """Draw a run to create: new, one that was asked for before, or a wrong one."""
        if self.happens(0.12):
            return self._spoiled(new_run(self.fresh("run"), now=now), now)
        if self.made and (is_full or self.happens(0.35)):
            spec = self._variation(self.pick(self.made))
        else:
            spec = self._spec()
            self.made.append(spec)
        new = new_run(now=now, attributes=changed({}, self.attributes()) if self.happens(0.3) else None, **spec)
        if self.happens(0.5):
            new = replace(new, admission=self.admission_request())
        if self.happens(0.2):
            signals = [self.signal([spec["run_id"]], ()) for _ in range(self.number(1, 2))]
            new = replace(new, signals=tuple(signals))
        return self._adorned(new, now) if self.happens(0.2) else new

    def reusing(self, heads: Sequence[RunHead], now: Instant, *, may_restart: bool) -> NewRun:
        """Draw a start with an id that is taken, or was; the run that it proposes may not be the next by now."""
        head = self.pick(heads)
        of = head.run_id.partition(RESTART_MARK)[0]
        own = sorted(each.run_id for each in heads if restart_number(of, each.run_id))
        latest = own[-1] if own else of
        policies: tuple[ReusePolicy, ...] = ("return", "reject")
        if may_restart:
            policies += ("restart-if-finished", "terminate-and-restart", "terminate-and-restart")
        policy = self.pick(policies)
        run_id = next_restart(of, latest) if self.happens(0.8) else self.pick((of, latest))
        place: dict[str, Any] = {"tenant": head.tenant, "project": head.project, "environment": head.environment}
        plan_id = head.plan_id if self.happens(0.9) or head.plan_id.startswith("plan:") else "other"
        new = new_run(run_id, now=now, request_id=self.fresh("reuse"), plan_id=plan_id, **place)
        if may_restart and self.happens(0.3):
            return self._debounced(new, of)
        stop = control_request(self.pick((latest, of)), "EMERGENCY_STOP", "", signal_id=self.fresh("stop"))
        stops = policy == "terminate-and-restart" and is_restart_of(run_id, stop.run_id) and self.happens(0.9)
        return replace(new, reuse=Reuse(run_id=of, policy=policy, stop=stop if stops else None))

    def _debounced(self, new: NewRun, of: str) -> NewRun:
        """Return a start that is debounced by a key, some of whose runs may have begun."""
        [first, *others] = new.events
        assert isinstance(first.data, RunQueued)
        terms = DebounceTerms(1_000, self.number(1, 10_000_000))
        later = offer(of, first.data.input, self.pick((new.request_key, "start again")))
        events = (replace(first, data=replace(first.data, debounce=terms)), *others)
        return replace(new, events=events, signals=(later,), reuse=Reuse(run_id=of, policy="debounce"))

    def admission_request(self) -> AdmissionRequest:
        """Draw with what a run is queued for admission."""
        return AdmissionRequest(limit=self.run_limit(), key=self.pick(("", "k", "l")), priority=self.number(-1, 2))

    def attributes(self) -> dict[str, Value | None]:
        """Draw what is set of a run's search attributes; None takes one away."""
        drawn: dict[str, Value | None] = {
            "cents": self.pick((None, 0, 7, 7.5, -3, 10**15)),
            "region": self.pick((None, "eu", "us", "%")),
            "vip": self.pick((None, True, False)),
            "due": self.pick((None, At(0), At(5))),
            "parts": self.pick((None, (), ("eu", "us"), ("us", "us"))),
        }
        return {name: drawn[name] for name in self.some(list(drawn), 3)}

    def conditions(self) -> tuple[Condition, ...]:
        """Draw conditions on search attributes."""
        drawn: list[Condition] = []
        for _ in range(self.pick((0, 0, 1, 1, 2))):
            name = self.pick(("cents", "region", "vip", "due", "parts", MISSING))
            operator: Operator = self.pick(("=", "!=", "<", "<=", ">", ">=", "exists", "missing"))
            if operator in ("exists", "missing"):
                drawn.append(Condition(name, operator, self.pick((None, *ATTRIBUTE_KINDS.get(name, "s")))))
            else:
                kind: RowKind = ATTRIBUTE_KINDS.get(name, "s") if self.happens(0.9) else self.pick(("s", "n"))
                value = self.pick(("eu", "us", "")) if kind == "s" else self.pick((0.0, 1.0, 7.0, 7.5))
                drawn.append(Condition(name, operator, kind, value))
        return tuple(drawn)

    def order(self) -> Order | None:
        """Draw an order of an answer, or none."""
        if self.happens(0.7):
            return None
        name = self.pick(("cents", "region", "vip", "due", "finished_at", "created_at"))
        return Order(name, ATTRIBUTE_KINDS.get(name), self.happens(0.5))

    def run_limit(self) -> RunLimit:
        """Draw the limit of a workflow."""
        rate = RunLimit(starts=self.pick((1, 2)), period_ms=self.pick((1, 30_000)), overload="delay")
        if self.happens(0.2):
            return rate
        limit = rate if self.happens(0.4) else RunLimit()
        overload: Overload = self.pick(("queue", "queue", "queue", "reject"))
        return replace(limit, at_once=self.pick((None, 1, 1, 2)), per_key=self.pick((None, 1, 2)), overload=overload)

    def plans(self) -> list[Plan] | None:
        """Draw what a node can run; None says nothing."""
        known = [(plan, version) for plan in PLANS for version in ("1", "2", MISSING)]
        return None if self.happens(0.3) else self.some(known, 6)

    def _spec(self) -> Spec:
        return {
            "run_id": self.fresh("run"),
            "request_id": self.fresh("request") if self.happens(0.7) else "",
            "value": self.pick((None, 1, "x")),
            "tenant": self.pick(TENANTS),
            "plan_id": self.pick(PLANS),
            "plan_version": self.pick(VERSIONS),
            "parent": self.pick(self.made)["run_id"] if self.made and self.happens(0.4) else None,
            "reference_key": self.pick((None, "order 7", "order")),
            "tags": tuple(self.some(TAGS, 3)),
        }

    def _variation(self, spec: Spec) -> Spec:
        match self.number(0, 5):
            case 0:
                return {**spec, "value": "another"}
            case 1:
                return {**spec, "request_id": self.fresh("request")}
            case 2:
                return {**spec, "run_id": self.fresh("run")}
            case _:
                return spec

    def _spoiled(self, new: NewRun, now: Instant) -> NewRun:
        task = Task(task_id=self.fresh("task"), run_id=new.run_id, step_id="s", name="n", status="OPEN", created_at=now)
        fields = ("run_id", "tenant", "project", "environment", "plan_id", "plan_version", "run_request_id")
        match self.number(0, 6):
            case 0:
                return replace(new, events=())
            case 1:
                return replace(new, events=new.events * 2)
            case 2:
                return replace(new, snapshot=replace(new.snapshot, status=RunStatus.FAILED))
            case 3:
                return replace(new, tasks=(task, replace(task, task_id=self.fresh("task"))))
            case 4:
                return replace(new, tags=("fine", self.pick(("", "\ud800"))))
            case _:
                return replace(new, **{self.pick(fields): self.pick(BAD_NAMES)})

    def _adorned(self, new: NewRun, now: Instant) -> NewRun:
        """Return the run with waits, tasks and other messages than the first."""
        steps = self.some(STEPS, 2)
        return replace(
            new,
            messages=tuple(self.plain_message(new.run_id, now) for _ in range(self.number(0, 2))),
            waits_opened=tuple(
                Wait(run_id=new.run_id, step_id=step, name=self.pick(NAMES), token="t", since=now) for step in steps
            ),
            tasks=tuple(self.task(new.run_id, step, now) for step in steps),
        )

    def task(self, run_id: str, step_id: str, now: Instant) -> Task:
        """Draw an open task."""
        return Task(
            task_id=self.fresh("task"),
            run_id=run_id,
            step_id=step_id,
            name=step_id,
            status="OPEN",
            created_at=now,
            payload=Raw(self.pick(PAYLOADS)),
            roles=tuple(self.some(ROLES, 2)),
            assignee=self.pick(PEOPLE),
            due_at=self.pick((None, now + 1)),
        )

    def task_in_hand(self, run_id: str, now: Instant) -> Task:
        """Draw a task of a run: a new one, or one from before that changes hands or ends."""
        known = self._tasks.setdefault(run_id, [])
        if known and self.happens(0.7):
            old = self.pick(known)
            status = self.pick((old.status, "COMPLETED", "CANCELLED"))
            return replace(old, status=status, assignee=self.pick(PEOPLE), roles=tuple(self.some(ROLES, 2)))
        known.append(self.task(run_id, self.fresh("step"), now))
        return known[-1]

    def record(self, run_id: str, now: Instant) -> ActivityRecord:
        """Draw what is known about an activity."""
        known = record(run_id, self.pick(STEPS), activity_name=self.pick(NAMES), idempotency_key=self.pick(self.ids))
        if self.happens(0.5):
            return replace(known, status="failed", result=UNSET, updated_at=now)
        return replace(known, result=Raw(self.pick(PAYLOADS)), updated_at=now)

    # --- what is delivered

    def signal(self, run_ids: Sequence[str], waits: Sequence[Wait]) -> SignalRequest:
        """Draw a signal: new, sent before, meant for an open wait, or a wrong one."""
        if self.sent and self.happens(0.3):
            again = self.pick(self.sent)
            return replace(again, payload=Raw(b'"other"')) if self.happens(0.2) else again
        request = SignalRequest(
            run_id=self.pick(run_ids) if run_ids and self.happens(0.95) else MISSING,
            name=self.pick(NAMES),
            payload=Raw(self.pick(PAYLOADS)),
            signal_id=self.pick((None, self.pick(self.ids), self.pick(self.ids))),
            step_id=self.pick(STEPS) if self.happens(0.15) else None,
            require_waiting=self.happens(0.25),
        )
        if waits and self.happens(0.5):
            wait = self.pick(waits)
            step_id = wait.step_id if self.happens(0.3) else None
            request = replace(request, run_id=wait.run_id, name=wait.name, step_id=step_id)
        if self.happens(0.12):
            return self._spoiled_signal(request)
        self.sent.append(request)
        return request

    def outcome(self, heads: Sequence[RunHead], now: Instant) -> SignalRequest:
        """Draw the outcome of a step, for a version and an instant that may be the right ones."""
        head = self.pick(heads)
        step_id = self.pick(STEPS)
        outcome = ActivityOutcome(logical_attempt_id=1, engine_attempt_id=self.number(1, 2))
        return SignalRequest(
            run_id=head.run_id,
            name=OUTCOME_SIGNAL,
            payload=codec.encode(outcome),
            signal_id=f"{step_id} {self.number(1, 2)}",
            step_id=step_id,
            expected_version=head.version - (self.number(0, 2) if self.happens(0.2) else 0),
            accept_before=self.pick((None, None, now + 1, now)),
        )

    def end_of(self, job: Job, now: Instant) -> Message:
        """Draw how an attempt of a job has ended; the job may have been acquired again, or be gone."""
        error = ErrorInfo("Broken", "it broke") if self.happens(0.5) else None
        outcome = ActivityOutcome(
            logical_attempt_id=job.logical_attempt_id,
            engine_attempt_id=job.engine_attempt_id,
            error=error,
            is_detached=error is None and self.happens(0.2),
        )
        token = retry_token(job.step_id, job.engine_attempt_id)
        opened_at = self.pick((0, job.scheduled_at, job.scheduled_at, job.scheduled_at + 1))
        return activity_completed(job.run_id, job.step_id, token, outcome, now, opened_at)

    def _spoiled_signal(self, request: SignalRequest) -> SignalRequest:
        match self.number(0, 3):
            case 0:
                return replace(request, payload=Raw(b'"%s"' % (b"x" * 200)))
            case 1:
                return replace(request, payload=Raw(self.pick((b"{", b"\xff", b""))))
            case 2:
                return replace(request, signal_id=self.pick(("", "x" * 129, "a\x00b", "\ud800", 7)))
            case _:
                return replace(request, **{self.pick(("name", "run_id")): self.pick(BAD_NAMES)})

    def message(self, run_ids: Sequence[str], now: Instant) -> Message:
        """Draw a message to deliver, sometimes a wrong one."""
        drawn = self.plain_message(self.pick(run_ids) if run_ids and self.happens(0.93) else MISSING, now)
        if self.happens(0.06):
            return replace(drawn, **{self.pick(("signal_id", "run_id")): self.pick(BAD_NAMES)})
        if self.happens(0.03):
            return replace(drawn, type="Surprise")
        return drawn

    def plain_message(self, run_id: str, now: Instant) -> Message:
        """Draw a message that nobody objects to."""
        due_at = self.pick((None, now, now - 5_000, now + 1, now + 1_000_000, now + 60_000_000))
        kind = self.pick(KINDS)
        drawn = message(run_id, f"m-{self.number(1, 5)}{self.pick(('', 'é'))}", due_at=due_at, kind=kind)
        return replace(drawn, payload=Raw(self.pick(PAYLOADS)), occurred_at=now, waiting_token=self.pick((None, "t")))

    # --- jobs

    def dead_letter(self, run_id: str, now: Instant) -> DeadLetter:
        """Return a letter, often of a message that died before; some cannot be read, and a few cannot be kept."""
        reason: Any = self.pick((*get_args(Reason), "boredom" if self.happens(0.2) else "undecodable"))
        letter = to_dead_letter(self.plain_message(run_id, now), reason, "why", self.pick(NODES), now)
        return replace(letter, envelope=b"\xff{") if self.happens(0.2) else letter

    def letter_query(self, run_ids: Sequence[str]) -> DeadLetterQuery:
        """Return a question for dead letters."""
        return DeadLetterQuery(
            run_id=self.pick((None, None, *run_ids, MISSING)),
            reason=self.pick((None, None, *get_args(Reason))),
            settled=self.happens(0.5),
            limit=self.limit(),
        )

    def finished_query(self, now: Instant) -> FinishedRunQuery:
        """Return a question for the runs that retention could delete."""
        return FinishedRunQuery(
            until=self.pick((now, now - 1_000_000)),
            status=self.pick((None, None, RunStatus.COMPLETED, RunStatus.FAILED)),
            look=self.pick((None, None, 1, 2)),
            limit=self.limit(),
        )

    def job(self, run_id: str, now: Instant) -> Job:
        """Draw an activity for a queue, rarely one that cannot be stored."""
        drawn = job(
            run_id,
            self.pick(STEPS),
            self.pick(QUEUES),
            activity_name=self.pick(ACTIVITIES),
            attempt=self.number(1, 3),
            due_at=self.pick((None, None, now, now - 5_000, now + 1_000_000)),
        )
        if self.happens(0.2):
            drawn = replace(drawn, details=Raw(self.pick(PAYLOADS)), input=Raw(self.pick(PAYLOADS)))
        if self.happens(0.5):
            drawn = self._limited(drawn)
        if self.happens(0.03):
            field = self.pick(("run_id", "step_id", "queue", "activity"))
            return replace(drawn, **{field: self.pick(BAD_NAMES)})
        return replace(drawn, input=Raw(b"{oops")) if self.happens(0.02) else drawn

    def _limited(self, drawn: Job) -> Job:
        limit = LimitedBy(self.pick(LIMIT_NAMES), self.pick(("", "k", "K", "é")))
        options = Raw(codec.encode({"limit": limit}))
        return replace(drawn, queue=self.pick(LIMITED_QUEUES), options=options, tenant=self.pick(TENANTS))

    def call_limits(self) -> dict[str, CallLimit]:
        """Draw the numbers of limits that a node knows, rarely impossible ones."""
        drawn = {name: self._call_limit() for name in self.some(LIMIT_NAMES, 3)}
        return drawn | {"api": CallLimit(at_once=0)} if self.happens(0.03) else drawn

    def _call_limit(self) -> CallLimit:
        return CallLimit(
            at_once=self.pick((None, 1, 2)),
            per_key=self.pick((None, 1)),
            calls=self.pick((None, 1, 2)),
            period_ms=self.pick((1_000, 30_000)),
            key_calls=self.pick((None, 1)),
            key_period_ms=self.pick((1, 5_000)),
        )

    # --- streams

    def chunks(self) -> StreamChunks:
        """Draw what a turn appends to a stream."""
        count, body = self._body()
        return StreamChunks(name=self.pick(STREAM_NAMES), count=count, body=body, closes=self.happens(0.1))

    def append(self, run_id: str, node: str, step_id: str, attempt: int, epoch: int | None) -> StreamAppend:
        """Draw what an attempt appends to a stream: it may be late, out of order, or wrong."""
        count, body = self._body()
        drawn = StreamAppend(
            run_id=run_id,
            name=self.pick(STREAM_NAMES),
            step_id=step_id,
            attempt=attempt + self.pick((0, 0, 0, 0, 1, -1)),
            node=node if self.happens(0.9) else self.pick(NODES),
            epoch=epoch if epoch is None or self.happens(0.9) else epoch - 1,
            position=self.pick((0, 0, 1, 2, 3)),
            count=count,
            body=body,
            closes=self.happens(0.05),
        )
        if self.happens(0.1):
            drawn = replace(drawn, count=0, body=Raw(b"[]"), position=0, closes=False, resumes=True)
        return replace(drawn, name=self.pick(BAD_NAMES)) if self.happens(0.03) else drawn

    def stream_read(self, run_id: str) -> StreamRead:
        """Draw which part of a stream to read."""
        after, most = self.pick((0, 0, 1, 3)), self.pick((1, 1_000_000))
        return StreamRead(run_id=run_id, name=self.pick(STREAM_NAMES), after=after, most_bytes=most)

    def _body(self) -> tuple[int, Raw]:
        chunks = [self.pick(PAYLOADS) if self.happens(0.9) else b'"%s"' % (b"x" * 40) for _ in range(self.number(1, 3))]
        return len(chunks), Raw(b"[%s]" % b",".join(chunks))

    def beat(self, run_ids: Sequence[str], taken: Sequence[Job]) -> Heartbeat:
        """Draw a beat: of a job that was taken at some time, of an activity of a run's owner, or a wrong one."""
        if taken and self.happens(0.7):
            one = self.pick(taken)
            drawn = Heartbeat(
                run_id=one.run_id, step_id=one.step_id, queue=one.queue, engine_attempt_id=one.engine_attempt_id
            )
        else:
            queue = self.pick(("", "", "", "mail"))
            drawn = Heartbeat(run_id=self.pick((*run_ids, MISSING)), step_id=self.pick(STEPS), queue=queue)
        if self.happens(0.02):
            return replace(drawn, details=Raw(b"{oops"))
        return replace(drawn, details=Raw(self.pick(PAYLOADS))) if self.happens(0.6) else drawn

    # --- what is asked

    def limit(self) -> int:
        """Draw a limit, rarely an impossible one."""
        return self.pick((0, -1)) if self.happens(0.06) else self.pick(LIMITS)

    def run_query(self, run_ids: Sequence[str], now: Instant) -> RunQuery:
        """Draw a question about runs."""
        return RunQuery(
            tenant=self._maybe(TENANTS),
            workflow=self._maybe(PLANS),
            status=self._maybe(tuple(RunStatus)),
            reference_key=self._maybe(("order", "order 7", "or%")),
            tag=self._maybe((*TAGS, "v%p")),
            parent_run_id=self._maybe(run_ids),
            created_from=self._maybe((now, now - 60_000_000)),
            created_until=self._maybe((now, now + 1)),
            run_ids=tuple(self.some(run_ids, 3)) if self.happens(0.2) else None,
            text=self._maybe(("o", "ORDER 7", "v", "%", "error")),
            newest=self.happens(0.3),
            after=self._maybe(run_ids) or "",
            finished_from=self._maybe((now, now - 60_000_000)) if self.happens(0.3) else None,
            finished_until=self._maybe((now, now + 1)) if self.happens(0.3) else None,
            where=self.conditions(),
            order=self.order(),
            limit=self.limit(),
        )

    def wait_query(self, run_ids: Sequence[str]) -> WaitQuery:
        """Draw a question about waits."""
        after = (self._maybe(run_ids) or "", self._maybe(STEPS) or "")
        return WaitQuery(run_id=self._maybe(run_ids), name=self._maybe(NAMES), after=after, limit=self.limit())

    def mailbox_query(self, run_ids: Sequence[str]) -> MailboxQuery:
        """Draw a question about signals."""
        return MailboxQuery(
            run_id=None if self.happens(0.3) else self.pick((*run_ids, MISSING)),
            tenant=self._maybe(TENANTS),
            name=self._maybe(NAMES),
            signal_id=self._maybe(self.ids),
            consumed=self.happens(0.5),
            unfinished=self.happens(0.3),
            after_run=self._maybe((*run_ids, MISSING)) or "",
            after=self.number(0, 3),
            limit=self.limit(),
        )

    def event_query(self, run_ids: Sequence[str]) -> EventQuery:
        """Draw a question about events of several runs."""
        places = [(run_id, self.number(-1, 5)) for run_id in (*self.some(run_ids, 4), MISSING)]
        return EventQuery(after=tuple(places), only_ends=self.happens(0.3), limit=self.limit())

    def task_query(self, run_ids: Sequence[str], tasks: Sequence[Task]) -> TaskQuery:
        """Draw a question about tasks."""
        task_ids = [task.task_id for task in tasks]
        return TaskQuery(
            run_id=self._maybe(run_ids),
            task_id=self._maybe(task_ids),
            status=self._maybe(("OPEN", "COMPLETED", "CANCELLED")),
            assignee=self._maybe(("ann", "bob'; --")),
            role=self._maybe((*ROLES, "b%", "", "0")),
            workflow=self._maybe(PLANS),
            due_before=self._maybe([0, 2**61, *(task.due_at for task in tasks if task.due_at is not None)]),
            actor=self._maybe(("ann", "bob'; --", "eve")),
            actor_roles=tuple(self.some(ROLES, 2)),
            after=self._maybe(task_ids) or "",
            limit=self.limit(),
        )

    def purge_policy(self, run_ids: Sequence[str]) -> PurgePolicy:
        """Draw what to keep for how long, of all, of one tenant, or of some runs."""
        windows = (None, 0, 0, 1_000, 30_000)
        limit = self.pick((0, -1)) if self.happens(0.08) else self.pick((1, 1, 2, 100))
        return PurgePolicy(
            sink_hold_ms=self.pick((0, 1_000, 30_000)),
            outbox_ms=self.pick((None, 0, 30_000)) if limit == 100 else None,
            finished_run_ms=self.pick((None, *windows)),
            task_ms=self.pick(windows),
            runtime_state_ms=self.pick(windows),
            stale_run_ms=self.pick(windows),
            dead_letter_ms=self.pick((None, None, 0, 1_000)),
            tenant=self._maybe(TENANTS),
            run_ids=(*self.some(run_ids, 3), *self.some((MISSING,), 1)) if self.happens(0.2) else None,
            limit=limit,
        )

    def _maybe(self, options: Sequence[T]) -> T | None:
        return self.pick(options) if options and self.happens(0.2) else None
