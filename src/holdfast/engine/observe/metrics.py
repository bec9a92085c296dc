"""Metrics of a process, counted where every operation passes: at the store.

An `ObservedStore` forwards every verb, and counts. It counts once per call, that is, once for a whole batch of turns or
signals, and reading the counts adds no cost there. Other parts may subscribe to commits: event streams learn
immediately what happens here, and traces learn which runs have finished. Requests that a store cannot serve are also
refused here, for every class of store.

**The write latency budget** is how long a write may take before operators are alerted (LAT-1). Every write is measured.
A write that has not been answered within the budget counts at that moment, whether it is answered later, fails, or
never ends. At most one in ten seconds is logged and becomes an alert; all are counted.
"""

import asyncio
import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from msgspec import Struct

from holdfast.core.audit import AuditEntry
from holdfast.core.dead_letters import DeadLetter
from holdfast.core.messages import Message, SignalRequest
from holdfast.core.state import TERMINAL
from holdfast.engine.observe.alerts import AlertForwarder
from holdfast.store import validation
from holdfast.store.port import (
    CommitConflict,
    Committed,
    Created,
    Delivered,
    Duplicate,
    Existing,
    LoadedRun,
    NewRun,
    Plan,
    PurgePolicy,
    PurgeReport,
    Refused,
    Store,
    Turn,
)
from holdfast.store.proxy import StoreProxy

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 3.0, 5.0, 10.0, 30.0)
BUDGET_MS = 3_000
"""How long a write may take before operators are alerted, unless the node's options differ."""

QUIET_S = 10.0
"""The pause after a log line and an alert before the next one."""

RECENT_S = 3_600.0
"""How long a node publishes that its writes were over the budget."""

MOST_ALERTS = 100
"""How many alerts are kept until a service asks for them."""

SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

logger = logging.getLogger("holdfast.node")

CommitObserver = Callable[[Sequence[Turn]], None]
"""Called with the turns that were committed here, before anything else is done with them."""


class Histogram:
    """The distribution of values: how many are at most as large as each bound, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Counts:
    """The counters of a process."""

    def __init__(self) -> None:
        self.runs_created = 0
        self.events: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.conflicts: Counter[str] = Counter()
        self.signals: Counter[str] = Counter()
        self.dead_letters: Counter[str] = Counter()
        self.commit_s = Histogram(SECONDS)
        self.batch_turns = Histogram(SIZES)
        self.deleted: Counter[str] = Counter()
        self.claims = 0
        self.runs_claimed = 0
        self.renewals = 0
        self.on_dead_letter: Callable[[DeadLetter], None] = lambda letter: None
        """Called for each dead letter of a turn."""

    def add(self, turns: Sequence[Turn]) -> None:
        """Count turns that were committed together."""
        self.batch_turns.add(len(turns))
        self.events.update([event.event_type for turn in turns for event in turn.events])
        self.finished.update([turn.snapshot.status for turn in turns if turn.snapshot.status in TERMINAL])
        for turn in turns:
            if turn.dead:
                self.dead_letters.update(letter.reason for letter in turn.dead)
                for letter in turn.dead:
                    self.on_dead_letter(letter)
            if turn.starts:
                self.runs_created += len(turn.starts)
                self.events.update([event.event_type for new in turn.starts for event in new.events])


# --- the write latency budget


class LateWrites(Struct, frozen=True):
    """The writes within the last hour that took longer than the budget, as a node publishes them."""

    count: int
    slowest_ms: int
    budget_ms: int


class WriteAlert(Struct, frozen=True):
    """An alert, and the time of the event loop at which it was raised."""

    detail: str
    at_s: float


class WriteLatency:
    """Measures the writes of one process against a budget."""

    def __init__(self, budget_ms: int) -> None:
        self.budget_ms = budget_ms
        self.over_budget: Counter[str] = Counter()
        """How many writes took longer than the budget, by verb."""
        self.slowest_s = 0.0
        """How long the slowest completed one of them took."""
        self.alerts: deque[WriteAlert] = deque(maxlen=MOST_ALERTS)
        self.on_alert: Callable[[str], None] = lambda detail: None
        self._recent: deque[tuple[float, float]] = deque(maxlen=1_000)
        self._quiet_until = 0.0
        self._unsaid = 0

    def measure(self, verb: str, items: int) -> "Write":
        """Return a context manager that measures a write."""
        return Write(self, verb, items)

    def recent(self) -> LateWrites | None:
        """Return the writes of the last hour that were over the budget; None if there were none."""
        now = asyncio.get_running_loop().time()
        while self._recent and self._recent[0][0] < now - RECENT_S:
            self._recent.popleft()
        if not self._recent:
            return None
        slowest_ms = round(max(took_s for _, took_s in self._recent) * 1_000)
        return LateWrites(len(self._recent), max(slowest_ms, self.budget_ms), self.budget_ms)

    def _notice(self, verb: str, items: int, now: float) -> None:
        """Record a write that is over the budget."""
        self.over_budget[verb] += 1
        if now < self._quiet_until:
            self._unsaid += 1
            return
        more = f"; {self._unsaid} more since the last alert" if self._unsaid else ""
        detail = f"a {verb} of {items} is not answered after {self.budget_ms} ms{more}"
        logger.warning("writes to the store exceed write_latency_budget_ms: %s", detail)
        self.alerts.append(WriteAlert(detail, now))
        self.on_alert(detail)
        self._quiet_until, self._unsaid = now + QUIET_S, 0

    def _ended(self, took_s: float, now: float) -> None:
        self.slowest_s = max(self.slowest_s, took_s)
        self._recent.append((now, took_s))


class Write:
    """One write in progress."""

    __slots__ = ("_began", "_is_over", "_items", "_latency", "_loop", "_timer", "_verb", "took_s")

    def __init__(self, latency: WriteLatency, verb: str, items: int) -> None:
        self._latency = latency
        self._verb = verb
        self._items = items
        self._is_over = False
        self.took_s = 0.0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer = self._loop.call_later(self._latency.budget_ms / 1_000, self._notice)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = self._loop.time()
        self.took_s = now - self._began
        self._timer.cancel()
        if self.took_s >= self._latency.budget_ms / 1_000:
            if not self._is_over:  # the loop was blocked, and runs the timer only now
                self._notice()
            self._latency._ended(self.took_s, now)

    def _notice(self) -> None:
        self._is_over = True
        self._latency._notice(self._verb, self._items, self._loop.time())


# --- the store


class ObservedStore(StoreProxy):
    """A store that counts its calls and lets others observe its commits."""

    def __init__(self, store: Store, budget_ms: int = BUDGET_MS) -> None:
        super().__init__(store)
        self.now = store.now  # type: ignore[method-assign]  # asked for each batch: there is nothing to note of it
        self.counts = Counts()
        self.observers: tuple[CommitObserver, ...] = ()
        self.write_latency = WriteLatency(budget_ms)
        self.alerts = AlertForwarder(self.raise_alerts)
        """Puts alerts of this process on the bus."""
        self.write_latency.on_alert = lambda detail: self.alerts.note("WRITE_LATENCY_HIGH", 2, detail)
        self.counts.on_dead_letter = lambda letter: self.alerts.note(
            "DEAD_LETTER", 2, f"{letter.reason}: {letter.detail}", letter.run_id
        )

    def subscribe(self, observer: CommitObserver) -> Callable[[], None]:
        """Call this observer after each commit, until the returned function is called."""
        self.observers += (observer,)

        def end() -> None:
            self.observers = tuple(other for other in self.observers if other is not observer)

        return end

    async def create(self, runs: Sequence[NewRun], claim_for: str | None = None) -> list[Created | Existing | Refused]:
        validation.require_for_signals(self._store, (signal for new in runs for signal in new.signals))
        validation.require_for_records(self._store, runs)
        with self.write_latency.measure("create", len(runs)):
            answers = await self._store.create(runs, claim_for)
        created = [new for new, answer in zip(runs, answers, strict=True) if isinstance(answer, Created)]
        self.counts.runs_created += len(created)
        self.counts.events.update([event.event_type for new in created for event in new.events])
        return answers

    async def deliver(self, items: Sequence[SignalRequest | Message]) -> list[Delivered]:
        validation.require_for_signals(self._store, (item for item in items if isinstance(item, SignalRequest)))
        with self.write_latency.measure("deliver", len(items)):
            answers = await self._store.deliver(items)
        self.counts.signals.update(
            _answer_word(answer) for item, answer in zip(items, answers, strict=True) if isinstance(item, SignalRequest)
        )
        return answers

    async def commit(self, turns: Sequence[Turn]) -> list[Committed | CommitConflict]:
        validation.require_for_records(self._store, turns)
        write = self.write_latency.measure("commit", len(turns))
        try:
            with write:
                answers = await self._store.commit(turns)
        finally:
            self.counts.commit_s.add(write.took_s)
        lost = [answer for answer in answers if isinstance(answer, CommitConflict)]
        if lost:
            self.counts.conflicts.update(conflict.reason for conflict in lost)
            turns = [turn for turn, answer in zip(turns, answers, strict=True) if isinstance(answer, Committed)]
        self.counts.add(turns)
        for observe in self.observers:
            observe(turns)
        return answers

    async def claim(self, node: str, limit: int, plans: Sequence[Plan] | None = None) -> list[LoadedRun]:
        claimed = await self._store.claim(node, limit, plans)
        self.counts.claims += 1
        self.counts.runs_claimed += len(claimed)
        return claimed

    async def purge(self, policy: PurgePolicy, audit: AuditEntry | None = None) -> PurgeReport:
        report = await self._store.purge(policy, audit)
        if not policy.dry_run:
            kinds = [field for field in report.__struct_fields__ if field not in ("has_more", "stale_runs")]
            self.counts.deleted.update({kind: count for kind in kinds if (count := getattr(report, kind))})
        return report

    async def renew(self, node: str, lease_ms: int, plans: Sequence[Plan] | None = None, is_start: bool = False) -> int:
        self.counts.renewals += 1
        if is_start:
            return await self._store.renew(node, lease_ms, plans, is_start)
        return await self._store.renew(node, lease_ms, plans)


def _answer_word(answer: Delivered) -> str:
    """Return the label of an answer to a signal: accepted, duplicate, or the code of the refusal."""
    if isinstance(answer, Refused):
        return answer.error.code
    return "duplicate" if isinstance(answer, Duplicate) else "accepted"


def observed(store: Store, budget_ms: int = BUDGET_MS) -> Store:
    """Return a store that counts its calls and measures its writes against a budget."""
    return store if isinstance(store, ObservedStore) else ObservedStore(store, budget_ms)


def observer_of(store: Store) -> ObservedStore:
    """Return the `ObservedStore` of a store that an app has opened."""
    assert isinstance(store, ObservedStore), "an app opens no store without observing it"
    return store
