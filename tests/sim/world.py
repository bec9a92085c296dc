"""What the simulation knows and its nodes do not: effects in the world, promises made to clients, the true store.

Whatever must not be is noted in `violations`, and the simulation ends there. `trace` tells what led to it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextvars import Context
from hashlib import sha256
from pathlib import Path
from random import Random

import msgspec
from msgspec import Raw, Struct

import holdfast as hf
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.core.admission import RunLimit
from holdfast.core.call_limits import CallLimit
from holdfast.core.events import Event
from holdfast.core.invariants import RunView, check
from holdfast.core.messages import AcceptedSignalResult, Message, Signal
from holdfast.core.plans import STORE_PLAN
from holdfast.core.reconciliation import TASK_TYPE
from holdfast.core.state import retry_token, state_of
from holdfast.core.timing import step_options
from holdfast.engine.activities.async_completion import completion_key, report_result
from holdfast.engine.activities.context import ActivityContext, activity_context
from holdfast.engine.turns.fail_open import OVER_BUDGET, Begun
from holdfast.errors import CallerError, NotDurable, StoreError
from holdfast.limits import Limits
from holdfast.program.coroutine import current_program
from holdfast.program.definitions import START_RUN, UPDATE_RUN, decode_options
from holdfast.registry import Registry
from holdfast.store import port
from holdfast.store.memory import MemoryStore
from holdfast.store.memory.run import Run
from holdfast.testing.sim_loop import LoopClock, SimLoop, current_process
from tests.server_folder import memory_folder
from tests.sim.features import Features, is_copied
from tests.sim.sealed_values import SHARE, SealedView
from tests.sim.tries import Tries, is_of_poison

TRACE_LINES = 4_000
FAILING_OPEN = 0.25
"""How many of the seeds have nodes that begin activities while the commit of their start is slow."""

AT_ONCE, PER_KEY, RATE = 2, 1, (2, 0.5)
"""How many runs of the narrow workflow may be under way, and of one key, and may start within how many seconds."""


def key_of(script: list[object]) -> str:
    """Return the key of a run that plays a script in the narrow workflow."""
    return str(len(script) % 2)


OF_THE_ENGINE = frozenset({STORE_PLAN, START_RUN, UPDATE_RUN, "submit", "emit"})
"""The activities that do nothing in the world."""


class Effect(Struct, frozen=True):
    """Something that an activity did in the world: what it returned, or that it failed."""

    result: str | None
    by: str


class Account:
    """What a payment service knows of one key."""

    def __init__(self) -> None:
        self.receipts: list[str] = []
        self.lost: list[int] = []
        self.said: list[object] = []
        self.answers: list[str] = []
        self.ended_before = 0


class World:
    """The truth."""

    def __init__(self, loop: SimLoop, seed: int, *, has_features: bool = False) -> None:
        self.loop = loop
        self.seed = seed
        self.rng = Random(f"world {seed}")
        self.features = Features(self, seed) if has_features else None
        """What some stories have beside scripts."""
        self.effects: dict[tuple[str, str], list[Effect]] = {}
        self.accounts: dict[str, Account] = {}
        self.acknowledged: dict[str, list[AcceptedSignalResult]] = {}
        """What the senders of signals were told, by run."""
        self.violations: list[str] = []
        self.failed = asyncio.Event()
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.is_sealed = Random(f"seal {seed}").random() < SHARE
        """Whether nodes encrypt values, and keep large ones in a bucket."""
        self.counts: dict[str, int] = {"sealed stories": 1} if self.is_sealed else {}
        self.digest = sha256()
        self.objects: dict[str, tuple[int, bytes]] = {}
        fails_open = Random(f"fail open {seed}").random() < FAILING_OPEN
        self.journals = Path(tempfile.mkdtemp(prefix="sim-", dir=memory_folder())) if fails_open else None
        """Where nodes that fail open have their journals; None if they wait for every commit."""
        self.store = WatchedStore(self)
        self.sealed_view = SealedView(self.store, self.objects, self.violate)
        self.client: port.Store = self.store
        self.said: dict[tuple[str, str], list[object]] = {}
        self.taken: dict[tuple[str, str], dict[int, set[str]]] = {}
        self.processes: dict[str, str] = {}
        self.deaths: Counter[str] = Counter()
        self.ended_by: Counter[str] = Counter()
        self.tries = Tries(self)

    @property
    def opened(self) -> port.Store:
        """The true store, as one sees it who has the keys and the bucket."""
        return self.sealed_view.store if self.is_sealed else self.store

    def note(self, line: str, count: str | None = None) -> None:
        """Add a line to the trace, and count what it tells of."""
        process = current_process()
        entry = f"{self.loop.time():9.4f} {process.name if process else '-':8} {line}"
        self.trace.append(entry)
        self.digest.update(entry.encode())
        if count is not None:
            self.counts[count] = self.counts.get(count, 0) + 1

    def violate(self, problem: str) -> None:
        """Note something that must not be."""
        self.note(f"VIOLATION {problem}")
        self.violations.append(problem)
        self.failed.set()

    def die(self, bomb: str, times: int) -> None:
        """End the process that runs this, as a turn that is poison does, so many times."""
        process = current_process()
        if process is not None and process.is_alive and self.deaths[bomb] < times:
            program = current_program()
            assert program is not None
            self.deaths[bomb] += 1
            self.ended_by[program.run_id] += 1
            self.note(f"bomb   {program.run_id} {bomb} for the {self.deaths[bomb]}. time", "poison turns")
            self.tries.blame(program.run_id, process.name)
            process.kill()

    # --- effects

    async def effect(self, seconds: float, failures: int, is_later: bool) -> str:
        """Do something in the world, as an activity. Fails as many times as asked for, and then works.

        What is to come later is reported by somebody who is no node, after twice the time.
        """
        try:
            context = activity_context()
        except NotDurable:
            self.violate("an activity was called, and not by a node")
            raise
        process = current_process()
        by = process.name if process else ""
        run_id, step_id = context.run_id, context.step_id
        self._check_dispatch(context, by)
        self.note(f"work   {run_id} {step_id} attempt {context.attempt}", "effects")
        said = self.said.setdefault((run_id, step_id), [None])
        if context.details not in said:
            self.violate(f"{run_id} {step_id}: nobody has said {context.details!r} of its progress")
        said.append([by, context.attempt])
        context.heartbeat(said[-1])
        await asyncio.sleep(seconds)
        if is_later:
            report = self._report_later(context.token, run_id, step_id, 2 * seconds)
            self.loop.create_task(report, context=Context())  # outside of every process
            context.complete_later()
        done = self.effects.setdefault((run_id, step_id), [])
        if sum(effect.result is None for effect in done) < failures:
            done.append(Effect(None, by))
            raise ConnectionError("the world is not in the mood")
        done.append(Effect(f"{step_id}/{len(done)}", by))
        return done[-1].result or ""

    # --- payments: effects with a key, outside of all nodes

    async def charge(self, key: str, seconds: float, failures: int, mood: str) -> str:
        """Charge a card under a key, as an activity. The answer may be lost, before or after the charge.

        Whoever has asked about a key has ended all attempts before: a charge that is still on its way is refused.
        """
        context = activity_context()
        process = current_process()
        by = process.name if process else ""
        run_id, step_id, attempt = context.run_id, context.step_id, context.engine_attempt_id
        self._check_dispatch(context, by)
        if context.idempotency_key != key:
            self.violate(f"{run_id} {step_id}: the key {context.idempotency_key!r} is not {key!r}")
        self.note(f"charge {key} {run_id} {step_id} attempt {attempt}", "charges asked for")
        await asyncio.sleep(seconds / 2)
        account = self.accounts.setdefault(key, Account())
        if attempt < account.ended_before:
            raise ConnectionError("somebody has asked meanwhile, and was answered that nothing was charged")
        is_lost = len(account.lost) < failures
        if not is_lost or self.rng.random() < 0.5:
            account.receipts.append(f"{key}/{len(account.receipts)}")
            self.note(f"charged {key} {account.receipts}", "charges")
            if mood == "" and len(account.receipts) > 1:
                self.violate(f"{run_id} {step_id}: {key} was charged twice, and its verifier is truthful")
        if is_lost:
            account.lost.append(attempt)
            raise ConnectionError("the answer is lost")
        receipt = account.receipts[-1]
        await asyncio.sleep(seconds / 2)
        return receipt

    async def find_charge(self, key: str, mood: str) -> object:
        """Answer, as a verifier, whether a key was charged: truly, or as the mood is."""
        context = activity_context()
        account = self.accounts.setdefault(key, Account())
        await asyncio.sleep(0.05)
        self.note(f"verify {key} attempt {context.engine_attempt_id} {account.receipts}", "verifications")
        account.ended_before = max(account.ended_before, context.engine_attempt_id)
        lies = {
            "denies": hf.NotCompleted(),
            "invents": hf.Completed(f"{key}/invented"),
            "doubts": hf.Indeterminate("perhaps"),
            "babbles": "yes",
            "forgets": hf.CompletedWithoutResult("charged, as far as known"),
        }
        if mood == "raises":
            raise LookupError("no such account")
        if mood in lies:
            said = lies[mood]
        else:
            said = hf.Completed(account.receipts[-1]) if account.receipts else hf.NotCompleted()
        account.said.append(said)
        return said

    def asked(self, key: str, attempt: int) -> str | None:
        """Answer an operator truly: the receipt of a key, or None; no attempt up to this one charges it any more."""
        account = self.accounts.setdefault(key, Account())
        if account.receipts:
            return account.receipts[-1]
        account.ended_before = max(account.ended_before, attempt + 1)
        return None

    def _check_keyed(self, event: Event, started: e.StepStarted) -> None:
        """A keyed step succeeds only by what was charged, or by what its verifier or an operator has said."""
        body, where = event.data, f"{event.run_id} {event.step_id}"
        account = self.accounts.get(started.idempotency_key or "", Account())
        if isinstance(body, e.StepCompleted):
            result = codec.decode(body.result, str)
            said = [verdict.result for verdict in account.said if isinstance(verdict, hf.Completed)]
            known = {"": account.receipts, "verifier": said, "operator": [*account.receipts, *account.answers]}
            self.note(f"paid   {where} {body.confirmed_by or 'by itself'}", f"paid, by {body.confirmed_by or 'itself'}")
            if result not in known[body.confirmed_by]:
                self.violate(f"{where}: it is paid by {result!r}, which nobody has said: {known}")
        elif isinstance(body, e.StepFailed):
            self.note(f"unpaid {where} {body.error.code}", f"unpaid: {body.error.code}")
            if body.error.code == "ReconciliationFailed" and not (
                account.answers or any(isinstance(said, hf.CompletedWithoutResult) for said in account.said)
            ):
                self.violate(f"{where}: nobody has said what it failed with: {body.error}")
        elif isinstance(body, e.StepUnresolved):
            self.note(f"doubt  {where} {body.error.message}", "unresolved steps")

    async def submit(self, ref: hf.CallbackRef, seconds: float) -> None:
        """Ask somebody outside for an answer, as an activity: it comes by the token of the callback."""
        context = activity_context()
        self.note(f"submit {context.run_id} {ref.step_id}", "callbacks asked for")
        report = self._report_later(context.callback_token(ref), context.run_id, ref.step_id, seconds)
        self.loop.create_task(report, context=Context())

    async def _report_later(self, token: str, run_id: str, step_id: str, seconds: float) -> None:
        """Report an outcome by its token, until there is an answer."""
        await asyncio.sleep(seconds)
        done = self.effects.setdefault((run_id, step_id), [])
        done.append(Effect(f"{step_id}/{len(done)}", "outside"))
        while True:
            try:
                key = await completion_key(self.client)
                await report_result(self.client, key, token, done[-1].result, Limits(), Registry())
                self.note(f"later  {run_id} {step_id}", "reports")
            except StoreError:
                await asyncio.sleep(0.3)
                continue
            except CallerError as refusal:
                self.note(f"later  {run_id} {step_id} refused: {refusal.code}", "late reports")
            return

    def _check_dispatch(self, context: ActivityContext, by: str) -> None:
        """Work is begun only after the commit that scheduled it, and never before its time.

        A job that is taken again counts on by itself. It is begun by who has taken it, which was not too early then;
        by now it may have failed elsewhere, and be due later under the same number.
        """
        run_id, step_id, attempt = context.run_id, context.step_id, context._work.step.engine_attempt_id
        dispatches = [
            event
            for event in self.store.events_of(run_id)
            if event.step_id == step_id
            and isinstance(event.data, e.StepStarted | e.StepRetried)
            and (event.engine_attempt_id or 1) <= attempt
        ]
        first = dispatches[0].data if dispatches else None
        is_queued = isinstance(first, e.StepStarted) and first.queue != ""
        if not dispatches or (not is_queued and dispatches[-1].engine_attempt_id != attempt):
            if not self._is_begun_early(context):
                self.violate(f"{run_id} {step_id}: attempt {attempt} began before it was committed")
            return
        if is_queued:
            if by not in self.taken.get((run_id, step_id), {}).get(attempt, ()):
                self.violate(f"{run_id} {step_id}: attempt {attempt} began at {by}, which has not taken it")
            return
        last = dispatches[-1].data
        due_at = last.due_at if isinstance(last, e.StepRetried) else None
        if due_at is not None and due_at > self.store.time():
            self.violate(f"{run_id} {step_id}: attempt {attempt} began {due_at - self.store.time()} us early")

    def _is_begun_early(self, context: ActivityContext) -> bool:
        """Whether an attempt may begin before its start is durable: a journal names it, and it has no key."""
        if self.journals is None or context.idempotency_key is not None:
            return False
        for path in self.journals.glob("*.journal"):
            for line in path.read_bytes().splitlines():
                begun = msgspec.json.decode(line, type=Begun)
                if begun.run_id == context.run_id and context.step_id in begun.step_ids:
                    self.note(f"early  {context.run_id} {context.step_id}", "begun early")
                    return True
        return False

    # --- commits

    async def check_commit(self, turn: port.Turn, before: port.RunHead, answer: port.Committed) -> None:
        """Check everything that must be true of a run after a turn of it was committed."""
        run_id = turn.run_id
        history = self.store.events_of(run_id)
        new = history[turn.expected_version : answer.version]
        self.note(f"commit {run_id} v{turn.expected_version} e{turn.epoch} {_names(new)}", "commits")
        process = current_process()
        is_free_again = turn.release and not turn.events and before.lease_owner is None  # by the first of two calls
        is_retry = before.version != turn.expected_version or is_free_again
        owner = self.processes.get(before.lease_owner or "")
        if process is not None and not is_retry and owner != process.name:
            self.violate(f"{run_id}: {process.name} committed a turn of a run that belongs to {owner}")
        for event in new:
            self.counts[event.event_type] = self.counts.get(event.event_type, 0) + 1
            self._check_event(event, history)
            if self.features is not None and not (is_retry and before.version >= event.run_seq):
                self.features.check_event(event, history)
        if before.plan_id == "narrow" and any(isinstance(event.data, e.RunStarted) for event in new):
            self._check_room()
            self._check_rate()
        for violation in check(self.store.view_of(run_id, tuple(self.acknowledged.get(run_id, ())))):
            self.violate(f"{run_id}: {violation.invariant}: {violation.problem}")

    def _check_room(self) -> None:
        """No more runs are under way than the workflow allows, nor of one key of one tenant."""
        inside = self.store.under_way("narrow")
        self.note(f"inside {' '.join(sorted(inside))}", "admitted")
        keys = Counter(
            (queued.tenant, key_of(codec.decode(queued.input, dict[str, list[object]])["script"]))
            for queued in inside.values()
        )
        if len(inside) > AT_ONCE or any(count > PER_KEY for count in keys.values()):
            self.violate(f"more runs are under way than there is room for: {sorted(inside)}, {keys}")

    def _check_rate(self) -> None:
        """No period holds more starts than the workflow allows."""
        starts, period_us = RATE[0], round(RATE[1] * 1_000_000)
        last = self.store.starts_of("narrow")[-starts - 1 :]
        if len(last) > starts and last[-1] - last[0] < period_us:
            self.violate(f"more than {starts} runs have started within {period_us} us: {last}")

    def _check_event(self, event: Event, history: Sequence[Event]) -> None:
        body, where = event.data, f"{event.run_id} {event.step_id}"
        if isinstance(body, e.StepCompleted | e.StepFailed | e.StepUnresolved):
            started = _started(event, history)
            if started.idempotency_key is not None:
                self._check_keyed(event, started)
            if started.idempotency_key is not None or started.name in OF_THE_ENGINE:
                return
        effects = self.effects.get((event.run_id, event.step_id or ""), [])
        if isinstance(body, e.StepCompleted):
            results = [effect.result for effect in effects]
            if codec.decode(body.result, str) not in results:
                self.violate(f"{where}: the result {bytes(body.result)!r} was recorded and is none of {results}")
        elif isinstance(body, e.StepFailed) and body.error.code == "WorkerLost":
            self.note(f"given up {where}", "lost workers")
            self._check_given_up(event, history)
        elif isinstance(body, e.StepFailed) and body.error.code == "TimeoutError":
            self.note(f"too late {where}", "deadlines")
            self._check_deadline(event, history)
        elif isinstance(body, e.StepFailed) and body.error.code == "NodeLost":
            self.note(f"given up {where}", "lost nodes")
            self._check_bound(event, history)
        elif isinstance(body, e.StepFailed) and body.error.code == OVER_BUDGET and self.journals is not None:
            self.note(f"over budget {where}", "results over the budget")
        elif isinstance(body, e.StepFailed) and not any(effect.result is None for effect in effects):
            self.violate(f"{where}: a failure was recorded and nothing has failed")
        elif isinstance(body, e.StepRetried) and body.reason == "node lost":
            self._check_lost(event, history)
        elif isinstance(body, e.RunPaused) and body.error is not None and not is_of_poison(event):
            self.violate(f"{event.run_id}: its program could not go on: {body.error.code}: {body.error.message}")
        elif isinstance(body, e.TaskCompleted | e.TaskReminded | e.TaskAssigned | e.TaskRefused):
            self._check_task(event, history)
        elif isinstance(body, e.TimerFired | e.SignalTimedOut):
            opened = next(other for other in history if other.event_id == event.parent_event_id)
            due_at: int = getattr(opened.data, "due_at", None) or getattr(opened.data, "until", None) or 0
            if event.persisted_at < due_at:
                self.violate(f"{where}: fired {due_at - event.persisted_at} us early")

    def _check_bound(self, event: Event, history: Sequence[Event]) -> None:
        """A step is given up with its node when it has been tried as often as its policy allows, and not before."""
        retries = [
            other.data
            for other in history
            if other.step_id == event.step_id
            and other.logical_attempt_id == event.logical_attempt_id
            and isinstance(other.data, e.StepRetried)
            and not is_copied(other, history)
        ]
        attempts = sum(retried.reason != e.NOT_BEGUN for retried in retries)
        of_step = [other for other in history if other.step_id == event.step_id]
        started = [other for other in of_step if isinstance(other.data, e.StepStarted)][-1]
        attempts += 0 if is_copied(started, history) else 1  # a fork begins what was under way by a retry of its own
        most = step_options(started.data.options).retry.max_attempts  # type: ignore[attr-defined]
        if attempts != most:
            self.violate(f"{event.run_id} {event.step_id}: given up after {attempts} attempts of {most}")

    def _check_deadline(self, event: Event, history: Sequence[Event]) -> None:
        """The time of a step is over when it is, and not before. It begins anew when an operator has it tried again."""
        of_step = [other for other in history if other.step_id == event.step_id]
        started = of_step[0].data
        since = next(other for other in of_step if other.logical_attempt_id == event.logical_attempt_id)
        assert isinstance(started, e.StepStarted)
        limit_ms = step_options(started.options).schedule_to_close_ms
        if limit_ms is None or event.persisted_at < since.emitted_at + limit_ms * 1_000:
            self.violate(f"{event.run_id} {event.step_id}: it was not done within {limit_ms} ms, too early")

    def _check_task(self, event: Event, history: Sequence[Event]) -> None:
        """A task is completed by as many people as it asks for, and nothing happens to it by itself too early."""
        body, of_task = event.data, [other for other in history if other.step_id == event.step_id]
        task = of_task[0].data
        self.note(f"task   {event.run_id} {event.step_id}")
        assert isinstance(task, e.TaskCreated)
        if isinstance(body, e.TaskCompleted) and task.task_type != TASK_TYPE:
            answers = codec.decode(body.answer, list[str])
            if len(answers) != task.approvals or len(set(answers)) != task.approvals:
                self.violate(f"{event.run_id} {event.step_id}: completed with the answers {answers}")
        elif isinstance(body, e.TaskReminded):
            reminders = [other for other in of_task if isinstance(other.data, e.TaskReminded)]
            since = reminders[body.count - 2] if body.count > 1 else of_task[0]
            if event.persisted_at < since.emitted_at + (task.remind_ms or 0) * 1_000:
                self.violate(f"{event.run_id} {event.step_id}: reminded of {body.count} too early")
        elif isinstance(body, e.TaskAssigned) and body.action == "escalate":
            self.note(f"escalated {event.run_id} {event.step_id}", "escalations")

    def _check_lost(self, event: Event, history: Sequence[Event]) -> None:
        """An attempt is lost with its run's node only if it may have been made there.

        Then its message, if it had one, was taken; only an outcome may come just now, of an attempt that did not die. A
        job is not lost with its run's node, and neither is what somebody is to report later.
        """
        where, attempt = f"{event.run_id} {event.step_id}", (event.engine_attempt_id or 0) - 1
        token = retry_token(event.step_id or "", attempt)
        waiting = [message for message in self.store.messages_of(event.run_id) if message.type != "ActivityCompleted"]
        if any(message.waiting_token == token for message in waiting):
            self.violate(f"{where}: attempt {attempt} was given up and never made")
        if _started(event, history).queue:
            self.violate(f"{where}: attempt {attempt} is a job, and was given up with the node of its run")

    def _check_given_up(self, event: Event, history: Sequence[Event]) -> None:
        """Who took a job is lost as often as its policy allows, and then the job is found once more."""
        started = _started(event, history)
        most = decode_options(started.options).retry.max_attempts
        first = max(other.engine_attempt_id or 1 for other in history if other.data is started)
        taken = self.taken.get((event.run_id, event.step_id or ""), {})
        last = event.engine_attempt_id or 0
        if last not in taken or sum(first <= attempt < last for attempt in taken) < most:
            self.violate(
                f"{event.run_id} {event.step_id}: given up at attempt {last} of {most}, taken: {sorted(taken)}"
            )


class JumpingClock(LoopClock):
    """The store's clock, which may be ahead of the loop's."""

    ahead_us = 0

    def now(self) -> int:
        """Return the present instant."""
        return super().now() + self.ahead_us


class WatchedStore(MemoryStore):
    """The true store. Every commit is checked before anything else can happen."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._time = JumpingClock(world.loop)
        super().__init__(self._time)

    def time(self) -> int:
        """Return the present instant."""
        return self._time.now()

    def jump(self, seconds: float) -> None:
        """Let the clock jump ahead."""
        self._time.ahead_us += int(seconds * 1_000_000)

    def events_of(self, run_id: str) -> Sequence[Event]:
        """Return a run's history, with values that can be read."""
        events = self._runs[run_id].events
        return self._world.sealed_view.events_of(run_id, len(events)) if self._world.is_sealed else events

    def head_of(self, run_id: str) -> port.RunHead:
        """Return a run as it is."""
        return self._runs[run_id].head

    def under_way(self, plan_id: str) -> dict[str, e.RunQueued]:
        """Return how the runs of a plan began that have started and not finished. Limits do not hold back forks."""
        runs = {run_id: run for run_id, run in self._runs.items() if run.head.plan_id == plan_id and not _is_fork(run)}
        return {
            run_id: self.events_of(run_id)[0].data  # type: ignore[misc]
            for run_id, run in runs.items()
            if not run.is_finished and any(isinstance(event.data, e.RunStarted) for event in run.events)
        }

    def starts_of(self, plan_id: str) -> list[int]:
        """Return when the runs of a plan have started, in order."""
        runs = [run for run in self._runs.values() if run.head.plan_id == plan_id and not _is_fork(run)]
        return sorted(
            event.persisted_at for run in runs for event in run.events if isinstance(event.data, e.RunStarted)
        )

    def view_of(self, run_id: str, acknowledged: tuple[AcceptedSignalResult, ...]) -> RunView:
        """Return everything that is stored of a run, at this moment, as `testing.view_of` reads it verb by verb."""
        run, now = self._runs[run_id], self.time()
        head, snapshot, signals = run.head, run.head.snapshot, run.signals
        if self._world.is_sealed:
            snapshot, signals = self._world.sealed_view.snapshot_of(run_id), self._world.sealed_view.mailbox_of(run)
        loaded = run.loaded(now)
        return RunView(
            run_id=run_id,
            status=head.status,
            version=head.version,
            now=now,
            snapshot=snapshot,
            events=tuple(self.events_of(run_id)),
            messages=loaded.messages,
            signals=tuple(signals),
            acknowledged=acknowledged,
            waits=tuple(run.waits.values()),
            tasks=tuple(run.tasks.values()),
            records=loaded.records,
            parent_run_id=head.parent_run_id,
            tenant=head.tenant,
            project=head.project,
            environment=head.environment,
            letters=tuple(run.letters.values()),
            lease_owner=head.lease_owner,
            ready_at=head.ready_at,
            queued_at=head.queued_at,
        )

    def messages_of(self, run_id: str) -> list[Message]:
        """Return what waits for a run, due or not."""
        return [message for _, message in self._runs[run_id].messages.values()]

    def unconsumed(self, run_id: str) -> list[Signal]:
        """Return the signals that a run has not taken, with sealed values."""
        return [signal for signal in self._runs[run_id].signals if signal.consumed_seq is None]

    async def commit(self, turns: Sequence[port.Turn]) -> list[port.Committed | port.CommitConflict]:
        """Commit, and check what was committed."""
        before = [self._runs[turn.run_id].head for turn in turns]
        answers = await super().commit(turns)
        done = [place for place, answer in enumerate(answers) if isinstance(answer, port.Committed)]
        self._world.tries.note([turns[place] for place in done], [before[place] for place in done])
        for turn, head, answer in zip(turns, before, answers, strict=True):
            if isinstance(answer, port.CommitConflict):
                self._world.note(f"lost   {turn.run_id} v{turn.expected_version} e{turn.epoch} {answer}", "conflicts")
            else:
                await self._world.check_commit(turn, head, answer)
        return answers

    async def admit(
        self, limits: Mapping[str, RunLimit], limit: int, claim_for: str | None = None
    ) -> tuple[list[port.Admitted], int | None]:
        """Admit who waits, and note it."""
        admitted, next_at = await super().admit(limits, limit, claim_for)
        for each in admitted:
            self._world.note(f"admitted {each.run_id} {each.status}", f"admitted later: {each.status}")
        return admitted, next_at

    async def renew(
        self, node: str, lease_ms: int, plans: Sequence[port.Plan] | None = None, is_start: bool = False
    ) -> int:
        """Renew, and note which process a node is that starts."""
        process = current_process()
        if is_start and process is not None:
            self._world.processes[node] = process.name
        return await super().renew(node, lease_ms, plans, is_start)

    async def acquire_jobs(
        self, node: str, queues: Sequence[str], activities: Sequence[str], limit: int, visible_ms: int
    ) -> list[port.Job]:
        """Take jobs, and check that each is due, and to be done."""
        jobs = await super().acquire_jobs(node, queues, activities, limit, visible_ms)
        self._check_taken(node, jobs)
        return jobs

    async def acquire_limited_jobs(
        self,
        node: str,
        queues: Sequence[str],
        activities: Sequence[str],
        limits: Mapping[str, CallLimit],
        limit: int,
        visible_ms: int,
    ) -> tuple[list[port.Job], int | None]:
        """Take calls that have room, and check that, and each as a job."""
        jobs, again_at = await super().acquire_limited_jobs(node, queues, activities, limits, limit, visible_ms)
        self._check_taken(node, jobs)
        self._check_places(len(jobs))
        return jobs, again_at

    async def heartbeat(self, node: str, beats: Sequence[port.Heartbeat], visible_ms: int) -> list[bool]:
        """Keep jobs, and check that no place is kept that was lost."""
        answers = await super().heartbeat(node, beats, visible_ms)
        self._check_places(0)
        return answers

    def _check_places(self, begun: int) -> None:
        if self._world.features is not None:
            calls, _ = self._limited_calls()
            self._world.features.check_places(calls.get("seats", ()), begun, self.time())

    def _check_taken(self, node: str, jobs: Sequence[port.Job]) -> None:
        for job in jobs:
            where, attempt = f"{job.run_id} {job.step_id}", job.engine_attempt_id
            self._world.note(f"take   {where} attempt {attempt}", "takes")
            self._world.taken.setdefault((job.run_id, job.step_id), {}).setdefault(attempt, set()).add(
                self._world.processes[node]
            )
            step = state_of(job.run_id, self.events_of(job.run_id)).open_steps.get(job.step_id)
            if step is None or step.is_detached:
                self._world.violate(f"{where}: taken, and nobody waits for it to be carried out")
            elif step.due_at is not None and step.due_at > self.time():
                self._world.violate(f"{where}: attempt {attempt} taken {step.due_at - self.time()} us early")
            elif attempt < step.engine_attempt_id:
                self._world.violate(f"{where}: attempt {attempt} taken, which is over")


def _started(event: Event, history: Sequence[Event]) -> e.StepStarted:
    """Return how the activity was started that an event is of, in its present logical attempt."""
    bodies = [other.data for other in history if other.step_id == event.step_id and other.run_seq < event.run_seq]
    return [body for body in bodies if isinstance(body, e.StepStarted)][-1]


def _is_fork(run: Run) -> bool:
    queued = run.events[0].data
    return isinstance(queued, e.RunQueued) and queued.forked_from is not None


def _names(events: Sequence[Event]) -> str:
    return " ".join(f"{event.event_type}({event.step_id or ''})" for event in events)


def decoded(raw: Raw) -> object:
    """Return a value as Python knows it."""
    return codec.decode(raw, object)
