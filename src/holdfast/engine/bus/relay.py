"""A relay: sends the entries of the outbox for one sink, in order for each run, and settles them.

It runs under the sink's host lock, so usually one relay works for a sink. Correctness does not depend on that: an entry
is deleted after its events have arrived, and only if it is unchanged, so a relay that crashes or is overtaken sends
some events twice and loses none. Runs take turns, whatever their backlog. After a failure, nothing of that run is sent
before its retry is due.

While the node executes runs, its relays send at most `relay_events_s` events per second: runs have priority.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from holdfast.clock import Rng
from holdfast.core.bus import (
    ALERTS,
    REJECTIONS,
    BusAlert,
    OutboxEntry,
    OutboxSettlement,
    OutgoingEvent,
    Sink,
    SinkProgress,
    SinkStatus,
    alert_of,
    by_run,
    first_missing,
    letter_of,
    outgoing_alert,
    outgoing_event,
    pause_ms,
)
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.engine.bus.targets import Target
from holdfast.engine.bus.webhook import SendFailed
from holdfast.engine.host_locks import HeldLock
from holdfast.errors import SecretNotFound, SecretsUnavailable, StoreCorrupt
from holdfast.limits import PROJECTOR_LAG_MS
from holdfast.store.payloads import concealed
from holdfast.store.port import Store
from holdfast.store.queries import AlertQuery, EventQuery, OutboxQuery, SinkQuery

PAGE_ENTRIES = 200
"""How many entries are read at a time."""

PAGE_EVENTS = 100
PAGE_BYTES = 1024 * 1024
"""How many bytes of a history are read at a time."""

AHEAD_EVENTS = 1_000
"""How many events are read by one query for all runs of a page. Longer histories are read one by one."""

RUNS_AT_ONCE = 8
"""For how many runs events are sent concurrently."""

SETTLE_S = 1.0
"""The longest time between two settlements of what has arrived, unless sending one event takes longer."""

START = (-1, 0)
LAST = 2**61

logger = logging.getLogger("holdfast.bus")


class BusCounts:
    """What the relays of a process have sent, by sink."""

    def __init__(self) -> None:
        self.delivered: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.dead_letters: Counter[str] = Counter()


class _Outcome(Struct):
    """The result of sending the entries of one run."""

    settlements: list[OutboxSettlement]
    delivered: int = 0
    failure: str = ""
    is_rejected: bool = False
    is_unread: bool = False
    """Whether the history could not be read, which is no evidence against the sink."""


class _Gap(SendFailed):
    """An event is missing in a history. It is never skipped: the events behind it wait until it is there."""


def _is_down(outcomes: Sequence[_Outcome]) -> bool:
    """Return whether nothing has arrived, for reasons other than the content of the events or an unreadable history."""
    is_up = any(each.delivered or each.is_rejected or each.is_unread or not each.failure for each in outcomes)
    return bool(outcomes) and not is_up


def _following(events: Sequence[Event], after: int, until: int) -> list[Event]:
    """Return the consecutive events of a run from one number (exclusive) to another."""
    found = list[Event]()
    for event in events:
        if event.run_seq == after + 1 and after < until:
            found.append(event)
            after += 1
    return found


class Relay:
    """Sends the events of one sink."""

    def __init__(
        self,
        sink: str,
        store: Store,
        concealing: Store,
        open_target: Callable[[Sink], Target],
        rng: Rng,
        counts: BusCounts,
        safety_poll_s: float,
        pace: Callable[[int], float],
    ) -> None:
        self.name = sink
        self.wake = asyncio.Event()
        self._store = store
        self._concealing = concealing
        self._open_target = open_target
        self._rng = rng
        self._counts = counts
        self._safety_poll_s = safety_poll_s
        self._pace = pace
        self._target: tuple[Sink, Target] | None = None
        self._after = START
        self._is_late = False

    async def work(self, held: HeldLock) -> None:
        """Send the existing entries, then new ones, until the sink is deleted or paused, or this is cancelled."""
        try:
            while True:
                self.wake.clear()
                found = await self._store.find(SinkQuery(name=self.name))
                if not found or found[0].sink.is_paused:
                    return
                status, now = found[0], await self._store.now()
                if status.due_at > now:
                    await self._wait(status.due_at, now)
                    continue
                held.check()
                next_at = await self._round(status, now)
                if next_at != 0:
                    await self._wait(next_at, now)
        finally:
            await self._close()

    async def _wait(self, until: Instant | None, now: Instant) -> None:
        wait_s = self._safety_poll_s if until is None else min(self._safety_poll_s, max(until - now, 0) / 1_000_000)
        try:
            async with asyncio.timeout(wait_s):
                await self.wake.wait()
        except TimeoutError:
            return

    async def _close(self) -> None:
        if self._target is not None:
            (_, target), self._target = self._target, None
            await target.close()

    async def _target_of(self, sink: Sink) -> Target:
        """Return the target of the sink in its current configuration."""
        if self._target is None or self._target[0] != sink:
            await self._close()
            self._target = sink, self._open_target(sink)
        return self._target[1]

    async def _round(self, status: SinkStatus, now: Instant) -> Instant | None:
        """Send one page of entries. Return when to continue: 0 means immediately, None when a new entry arrives."""
        limit = 1 if status.failures else PAGE_ENTRIES  # after a failure a sink is tried with one run
        began, next_at = self._after, None
        while True:
            page = await self._store.find(OutboxQuery(sink=self.name, after=self._after, limit=limit))
            groups = [group for group in by_run(page) if group[0].due_at <= now]
            waiting = [group[0].due_at for group in by_run(page) if group[0].due_at > now]
            next_at = min([*waiting, *([] if next_at is None else [next_at])], default=None)
            if groups:
                break
            if page:
                self._after = (page[-1].number, LAST)  # never in the middle of a run
            elif self._after == START:
                return next_at
            elif began == START:
                self._after = START
                return next_at
            else:
                self._after, began = START, START
        found = await self._store.find(SinkQuery(name=self.name))
        if not found or found[0].number != status.number or found[0].sink.is_paused:
            return 0  # these entries may belong to another sink of this name, which sends them elsewhere
        status = found[0]
        last = await self._send_page(status, groups, now)
        self._after = (page[-1].number if last is groups[-1] else last[0].number, LAST)
        return 0

    async def _send_page(
        self, status: SinkStatus, groups: Sequence[list[OutboxEntry]], now: Instant
    ) -> list[OutboxEntry]:
        """Send the events of some runs, run by run, and settle them; return the last entries that were sent.

        If the sink is slow, the rest waits for the next round, so that arrived events are settled soon; also if it is
        down.
        """
        sink = status.sink
        target = await self._target_of(sink)
        loop = asyncio.get_running_loop()
        ahead = await self._read_ahead(sink, groups)
        until, waiting, outcomes = loop.time() + SETTLE_S, iter(groups), list[_Outcome]()
        sent = [groups[0]]

        async def send() -> None:
            for group in waiting:
                sent[0] = group
                outcomes.append(await self._send_run(sink, target, group, ahead, until))
                if loop.time() > until or _is_down(outcomes):
                    return

        await asyncio.gather(*(send() for _ in range(RUNS_AT_ONCE)))
        delivered = sum(outcome.delivered for outcome in outcomes)
        failed = [outcome for outcome in outcomes if outcome.failure]
        failures = status.failures + 1 if _is_down(outcomes) else 0
        now = await self._store.now()
        progress = SinkProgress(
            number=status.number,
            failures=failures,
            due_at=now + pause_ms(sink, failures, self._rng.fraction()) * 1_000 if failures else 0,
            error=failed[0].failure if failed else "",
            delivered=delivered,
        )
        items = [item for outcome in outcomes for item in outcome.settlements]
        await self._store.settle_outbox(self.name, items, progress)
        self._counts.delivered[self.name] += delivered
        self._counts.failures[self.name] += len(failed)
        await self._alert(sink, failures, progress.error, items, groups, now)
        pause_s = self._pace(delivered)
        if pause_s:
            await asyncio.sleep(pause_s)
        return sent[0]

    async def _read_ahead(self, sink: Sink, groups: Sequence[Sequence[OutboxEntry]]) -> dict[str, list[Event]]:
        """Return the next events of the runs of a page, as many as fit into one query."""
        places, room = list[tuple[str, int]](), AHEAD_EVENTS
        for group in groups:
            count = group[-1].to_seq - group[0].from_seq + 1
            if group[0].run_id != ALERTS and count <= room:
                places.append((group[0].run_id, group[0].from_seq - 1))
                room -= count
        found = dict[str, list[Event]]()
        if len(places) > 1:
            query = EventQuery(after=tuple(places), limit=AHEAD_EVENTS, most_bytes=PAGE_BYTES)
            for event in await self._reading(sink).find(query):
                found.setdefault(event.run_id, []).append(event)
        return found

    def _reading(self, sink: Sink) -> Store:
        return self._store if sink.payloads == "opened" else self._concealing

    async def _send_run(
        self,
        sink: Sink,
        target: Target,
        group: Sequence[OutboxEntry],
        ahead: Mapping[str, Sequence[Event]],
        until: float,
    ) -> _Outcome:
        """Send the entries of one run, up to the first event that cannot be sent, or until the time is up."""
        outcome = _Outcome([])
        time = asyncio.get_running_loop().time
        for entry in group:
            after = entry.from_seq - 1
            try:
                while after < entry.to_seq:
                    last, events = await self._read(sink, entry, after, ahead.get(entry.run_id, ()))
                    if last is None:  # the run was deleted
                        break
                    try:
                        if events:
                            await target.send(events)
                    except SendFailed as problem:
                        after = events[problem.sent].sequence - 1
                        outcome.delivered += problem.sent
                        raise
                    outcome.delivered += len(events)
                    after = last
                    if after < entry.to_seq and time() > until:
                        rest = replace(entry, from_seq=after + 1, attempts=0)
                        outcome.settlements.append(OutboxSettlement(entry=entry, rest=rest))
                        return outcome
            except (SendFailed, SecretNotFound, SecretsUnavailable, StoreCorrupt) as problem:
                outcome.failure = problem.detail if isinstance(problem, SendFailed) else problem.message
                outcome.is_rejected = isinstance(problem, SendFailed) and problem.is_rejected
                outcome.is_unread = isinstance(problem, _Gap | StoreCorrupt)
                may_end = not isinstance(problem, _Gap)
                outcome.settlements.append(await self._failed(sink, entry, after, outcome, may_end=may_end))
                return outcome
            outcome.settlements.append(OutboxSettlement(entry=entry))
            if time() > until:
                break
        return outcome

    async def _failed(
        self, sink: Sink, entry: OutboxEntry, after: int, outcome: _Outcome, *, may_end: bool
    ) -> OutboxSettlement:
        """Return the settlement of an entry whose events up to `after` were sent.

        It is retried, or becomes a dead letter if it may.
        """
        has_advanced = after >= entry.from_seq
        attempts = 1 if has_advanced else entry.attempts + 1
        rest = replace(entry, from_seq=after + 1, attempts=attempts)
        most = min(REJECTIONS, sink.max_attempts) if outcome.is_rejected else sink.max_attempts
        now = await self._store.now()
        if attempts >= most and may_end:
            self._counts.dead_letters[self.name] += 1
            logger.error(
                "sink %s: events %d to %d of run %s are given up after %d attempts: %s",
                *(sink.name, rest.from_seq, rest.to_seq, rest.run_id or "(alerts)", attempts, outcome.failure),
            )
            return OutboxSettlement(entry=entry, letter=letter_of(sink, rest, outcome.failure, now))
        due_at = now + pause_ms(sink, attempts, self._rng.fraction()) * 1_000
        return OutboxSettlement(entry=entry, rest=replace(rest, due_at=due_at))

    async def _read(
        self, sink: Sink, entry: OutboxEntry, after: int, ahead: Sequence[Event]
    ) -> tuple[int | None, list[OutgoingEvent]]:
        """Return the next events of an entry that the sink wants, and the number of the last event that was read.

        They are taken from `ahead`, as far as that has no gap. The number is None for a run that was deleted. Raise
        `_Gap` at a gap, which is never skipped.
        """
        limit = min(PAGE_EVENTS, entry.to_seq - after)
        if entry.number == 0:
            alerts = await self._store.find(AlertQuery(after=after, limit=limit))
            wanted = [alert for alert in alerts if alert.number <= entry.to_seq]
            return entry.to_seq, [outgoing_alert(alert) for alert in wanted]
        events = _following(ahead, after, after + limit)
        if not events and entry.run_id != ALERTS:
            events = await self._reading(sink).read_events(entry.run_id, after, limit, PAGE_BYTES)
        if not events:
            if entry.run_id != ALERTS and (await self._store.load([entry.run_id]))[0] is not None:
                await self._note_gap(entry, after + 1)
            return None, []
        missing = first_missing(events, after + 1)
        if missing is not None:
            await self._note_gap(entry, missing)
        sent = [outgoing_event(concealed(event), entry) for event in events if sink.wants_event(event.event_type)]
        return events[-1].run_seq, sent

    async def _note_gap(self, entry: OutboxEntry, missing: int) -> None:
        detail = f"event {missing} is missing, and the run has events up to {entry.to_seq}"
        await self._raise([alert_of("PROJECTOR_GAP_DETECTED", 1, detail, run_id=entry.run_id, of=missing)])
        raise _Gap(detail)

    async def _alert(
        self,
        sink: Sink,
        failures: int,
        error: str,
        items: Sequence[OutboxSettlement],
        groups: Sequence[list[OutboxEntry]],
        now: Instant,
    ) -> None:
        """Raise the alerts that result from a page."""
        alerts = [
            alert_of("BUS_DEAD_LETTER", 2, item.letter.detail, run_id=item.letter.run_id, sink=sink.name, of=now)
            for item in items
            if item.letter is not None and item.letter.run_id != ALERTS
        ]
        if failures == sink.max_attempts:
            alerts.append(alert_of("BUS_SINK_FAILING", 1, f"{failures} failures: {error}", sink=sink.name, of=now))
        if sink.kind == "projection":
            lag_ms = max((now - entry.at) // 1_000 for group in groups for entry in group)
            if lag_ms > PROJECTOR_LAG_MS and not self._is_late:
                logger.warning("projection %s is %d ms behind", sink.name, lag_ms)
                alerts.append(alert_of("PROJECTOR_LAG_HIGH", 2, f"{lag_ms} ms behind", sink=sink.name, of=now))
            self._is_late = lag_ms > PROJECTOR_LAG_MS
        await self._raise(alerts)

    async def _raise(self, alerts: Sequence[BusAlert]) -> None:
        if alerts:
            await self._store.raise_alerts(alerts)
