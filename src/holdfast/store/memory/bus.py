"""The event bus in the reference model: sinks, the outbox, alerts, and dead letters of the bus."""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.bus import (
    ALERTS,
    BusAlert,
    BusDeadLetter,
    OutboxEntry,
    OutboxReplay,
    OutboxSettlement,
    Replayed,
    Sink,
    SinkProgress,
    SinkStatus,
)
from holdfast.core.dead_letters import Settled, Settlement
from holdfast.core.events import Event
from holdfast.core.instants import Instant
from holdfast.errors import NotFound
from holdfast.store import decisions
from holdfast.store.memory.run import Run
from holdfast.store.queries import COUNTED_ENTRIES, AlertQuery, BusDeadLetterQuery, Found, OutboxQuery, SinkQuery
from holdfast.store.types import PurgePolicy, Refused, RunHead

Key = tuple[int, int]
"""The number of a run, and the first `run_seq` of an entry."""


class _Stored(Struct):
    status: SinkStatus
    outbox: dict[Key, OutboxEntry]


class Bus:
    """The sinks, with their pending entries."""

    def __init__(self, runs: dict[str, Run]) -> None:
        self._runs = runs
        self._sinks: dict[str, _Stored] = {}
        self._letters: dict[str, BusDeadLetter] = {}
        self._alerts: list[BusAlert] = []
        self._raised = 0
        self._made = 0
        self._numbers: dict[str, int] = {ALERTS: 0}

    def note(self, head: RunHead, new: Sequence[Event], now: Instant) -> None:
        """Write the entries of events that were appended to a run."""
        for stored in self._sinks.values() if new else ():
            if stored.status.sink.wants(head.tenant, head.plan_id):
                self._put(stored, self._entry(head, new[0].run_seq, new[-1].run_seq, now))

    def _number_of(self, head: RunHead) -> int:
        return self._numbers.setdefault(head.run_id, len(self._numbers))

    def _entry(self, head: RunHead, from_seq: int, to_seq: int, now: Instant) -> OutboxEntry:
        return OutboxEntry(
            number=self._number_of(head),
            run_id=head.run_id,
            from_seq=from_seq,
            to_seq=to_seq,
            at=now,
            due_at=now,
            tenant=head.tenant,
            project=head.project,
            environment=head.environment,
            workflow=head.plan_id,
            workflow_version=head.plan_version,
        )

    def _put(self, stored: _Stored, entry: OutboxEntry) -> None:
        """Put an entry; of two that begin with the same event, the longer one stays."""
        known = stored.outbox.get((entry.number, entry.from_seq))
        to_seq = entry.to_seq if known is None else max(known.to_seq, entry.to_seq)
        stored.outbox[entry.number, entry.from_seq] = replace(entry, to_seq=to_seq)

    def put_sink(self, sink: Sink, now: Instant) -> Sink:
        """Store a sink, or replace it."""
        known = self._sinks.get(sink.name)
        if known is None:
            sink = replace(sink, created_at=now)
            self._made += 1
            self._sinks[sink.name] = _Stored(SinkStatus(sink=sink, number=self._made), {})
            return sink
        if known.status.sink.tenant != sink.tenant:
            raise decisions.sink_of_another(sink.name)
        sink = replace(sink, created_at=known.status.sink.created_at)
        known.status = replace(known.status, sink=sink, failures=0, due_at=0, error="")
        return sink

    def remove_sink(self, name: str) -> bool:
        """Delete a sink with everything that belongs to it."""
        self._letters = {id_: letter for id_, letter in self._letters.items() if letter.sink != name}
        return self._sinks.pop(name, None) is not None

    def settle(self, name: str, items: Sequence[OutboxSettlement], progress: SinkProgress, now: Instant) -> list[bool]:
        """Settle entries of a sink."""
        stored = self._sinks.get(name)
        if stored is None or progress.number not in (None, stored.status.number):
            return [False] * len(items)
        answers = [self._settle(stored, item) for item in items]
        status = stored.status
        stored.status = replace(
            status,
            failures=progress.failures,
            due_at=progress.due_at,
            error=progress.error,
            failed_at=now if progress.failures else status.failed_at,
            delivered_at=now if progress.delivered else status.delivered_at,
            delivered=status.delivered + progress.delivered,
        )
        return answers

    def _settle(self, stored: _Stored, item: OutboxSettlement) -> bool:
        entry = item.entry
        known = stored.outbox.get((entry.number, entry.from_seq))
        if known is None or (known.to_seq, known.attempts) != (entry.to_seq, entry.attempts):
            return False
        del stored.outbox[entry.number, entry.from_seq]
        if item.rest is not None:
            self._put(stored, item.rest)
        if item.letter is not None:
            self._letters[item.letter.letter_id] = item.letter
        return True

    def replay(self, asked: OutboxReplay, now: Instant) -> Replayed:
        """Put entries for events that a sink gets again."""
        stored, run_id, limit = self._sinks.get(asked.sink), asked.run_id, asked.limit
        if stored is None:
            raise decisions.no_such_sink(asked.sink)
        if run_id is not None and run_id not in self._runs:
            raise decisions.no_such_run(run_id)
        chosen: list[OutboxEntry] = []
        for run in self._runs.values():
            wanted = [
                event.run_seq
                for event in run.events
                if event.persisted_at >= asked.since and event.run_seq >= asked.from_seq
            ]
            if (
                wanted
                and run_id in (None, run.head.run_id)
                and stored.status.sink.wants(run.head.tenant, run.head.plan_id)
            ):
                chosen.append(self._entry(run.head, wanted[0], wanted[-1], now))
        numbers = sorted(number for run in self._runs.values() if (number := self._number_of(run.head)) > asked.after)
        until = numbers[asked.look - 1] if run_id is None and len(numbers) >= asked.look else decisions.LAST_RUN
        chosen = sorted(
            (entry for entry in chosen if asked.after < entry.number <= until), key=lambda entry: entry.number
        )
        for entry in chosen[:limit]:
            self._put(stored, entry)
        after = chosen[limit - 1].number if len(chosen) > limit else decisions.after_replay(asked, until)
        return Replayed(len(chosen[:limit]), after)

    def raise_alerts(self, alerts: Sequence[BusAlert], now: Instant) -> int:
        """Put alerts on the bus."""
        takers = [stored for stored in self._sinks.values() if stored.status.sink.alerts]
        new = 0
        for alert in alerts if takers else ():
            if any(alert.alert_id == known.alert_id for known in self._alerts):
                continue
            self._raised += 1
            new += 1
            self._alerts.append(replace(alert, number=self._raised, raised_at=now))
            entry = OutboxEntry(number=0, run_id=ALERTS, from_seq=self._raised, to_seq=self._raised, at=now, due_at=now)
            for stored in takers:
                if stored.status.sink.name != alert.sink:
                    self._put(stored, entry)
        return new

    def settle_letters(
        self, ids: Sequence[str], action: Settlement, now: Instant, note: Callable[[str], None]
    ) -> list[Settled | Refused]:
        """Settle dead letters; `note` is called with the id of each settled one."""
        answers: list[Settled | Refused] = []
        for id_ in ids:
            letter = self._letters.get(id_)
            refusal = decisions.no_such_letter(id_) if letter is None else self._refusal(letter, action)
            if letter is None or refusal is not None:
                answers.append(Refused(refusal or decisions.no_such_letter(id_)))
                continue
            del self._letters[id_]
            if action == "requeue":
                self._requeue(letter, now)
            note(id_)
            answers.append(Settled(id_, action))
        return answers

    def _refusal(self, letter: BusDeadLetter, action: Settlement) -> NotFound | None:
        is_gone = letter.run_id != ALERTS and letter.run_id not in self._runs
        return decisions.no_such_run(letter.run_id) if action == "requeue" and is_gone else None

    def _requeue(self, letter: BusDeadLetter, now: Instant) -> None:
        entry = OutboxEntry(number=0, run_id=ALERTS, from_seq=letter.from_seq, to_seq=letter.to_seq, at=now, due_at=now)
        if letter.run_id != ALERTS:
            entry = self._entry(self._runs[letter.run_id].head, letter.from_seq, letter.to_seq, now)
        self._put(self._sinks[letter.sink], entry)

    # --- searches

    def find_sinks(self, query: SinkQuery) -> Found[SinkStatus]:
        """Return the sinks that match the query."""
        names = sorted(
            name
            for name, stored in self._sinks.items()
            if name > query.after and query.name in (None, name) and query.tenant in (None, stored.status.sink.tenant)
        )
        return Found(self._counted(self._sinks[name]) if query.counted else self._sinks[name].status for name in names)

    def _counted(self, stored: _Stored) -> SinkStatus:
        entries = [entry for _, entry in sorted(stored.outbox.items())][:COUNTED_ENTRIES]
        return replace(
            stored.status,
            backlog=len(entries),
            oldest_at=min((entry.at for entry in entries), default=None),
            dead_letters=sum(letter.sink == stored.status.sink.name for letter in self._letters.values()),
        )

    def find_outbox(self, query: OutboxQuery) -> Found[OutboxEntry]:
        """Return the entries of a sink."""
        stored = self._sinks.get(query.sink)
        entries = [] if stored is None else sorted(stored.outbox.items())
        return Found(entry for key, entry in entries if key > query.after)

    def find_alerts(self, query: AlertQuery) -> Found[BusAlert]:
        """Return alerts, ordered by number."""
        return Found(alert for alert in self._alerts if alert.number > query.after)

    def find_letters(self, query: BusDeadLetterQuery) -> Found[BusDeadLetter]:
        """Return the dead letters that match the query."""
        found = Found[BusDeadLetter]()
        for letter in sorted(self._letters.values(), key=lambda letter: (letter.died_at, letter.letter_id)):
            named = all(
                getattr(query, field) in (None, getattr(letter, field))
                for field in ("tenant", "sink", "run_id", "letter_id")
            )
            if named and (letter.died_at, letter.letter_id) > query.after:
                found.append(letter)
        return found

    # --- retention

    def holds(self, run_id: str, after: Instant) -> bool:
        """Return whether a run has events, put into the outbox after an instant, that a sink has not received."""
        return any(
            entry.run_id == run_id and entry.at > after
            for stored in self._sinks.values()
            for entry in stored.outbox.values()
        )

    def purge(self, policy: PurgePolicy, gone: Sequence[str], now: Instant) -> tuple[int, bool]:
        """Delete what a policy names, or with `dry_run` only count it; return the count, and whether there is more."""
        letters = [id_ for id_, letter in self._letters.items() if letter.run_id in gone]
        with_runs = sum(entry.run_id in gone for stored in self._sinks.values() for entry in stored.outbox.values())
        entries: list[tuple[str, Key]] = []
        alerts: list[int] = []
        until = decisions.outbox_until(policy, now)
        if until is not None:
            mine = {name for name, stored in self._sinks.items() if policy.tenant in (None, stored.status.sink.tenant)}
            letters += [
                id_
                for id_, letter in self._letters.items()
                if id_ not in letters and letter.died_at <= until and letter.sink in mine
            ]
            entries = [
                (name, key)
                for name in mine
                for key, entry in self._sinks[name].outbox.items()
                if entry.at <= until and entry.run_id not in gone
            ]
            if policy.tenant is None:
                alerts = [alert.number for alert in self._alerts if alert.raised_at <= until]
        has_more = len(entries) > policy.limit
        sinks = [
            name for name, stored in self._sinks.items() if policy.sinks and stored.status.sink.tenant == policy.tenant
        ]
        if not policy.dry_run:
            self._letters = {id_: letter for id_, letter in self._letters.items() if id_ not in letters}
            self._alerts = [alert for alert in self._alerts if alert.number not in alerts]
            for name, key in entries[: policy.limit]:
                del self._sinks[name].outbox[key]
            for stored in self._sinks.values():
                stored.outbox = {key: entry for key, entry in stored.outbox.items() if entry.run_id not in gone}
            for name in sinks:
                self.remove_sink(name)
        return with_runs + len(letters) + len(alerts) + len(sinks) + len(entries[: policy.limit]), has_more
