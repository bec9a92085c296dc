"""What a victim was told before it died, and whether the store still says so.

An *intent* is a verb with its arguments, noted before the verb is called. An intent whose answer arrived is
acknowledged and goes into the ledger. The last intent of a victim may have no answer: whoever comes next repeats it
with the same arguments, and is answered as if it were the first, or as the first was. Then it is in the ledger too,
so that in the end the store must hold exactly what the ledger holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.core.events import Event
from holdfast.core.messages import AcceptedSignalResult, Message, SignalRequest
from holdfast.errors import RunTerminal
from holdfast.store import port
from holdfast.store.port import NewRun, RunQuery, Store, Turn
from holdfast.testing.samples import read_history, read_mailbox


@dataclass(frozen=True)
class Intent:
    """A verb that is about to be called."""

    verb: Literal["create", "deliver", "commit"]
    items: tuple[Any, ...]
    claim_for: str | None = None

    async def carry_out(self, store: Store) -> list[Any]:
        """Call the verb."""
        if self.verb == "create":
            return await store.create(self.items, self.claim_for)
        verb: Any = getattr(store, self.verb)
        answers: list[Any] = await verb(self.items)
        return answers


@dataclass
class Ledger:
    """Everything that was acknowledged."""

    runs: set[str] = field(default_factory=set)
    signals: dict[tuple[str, str, str], AcceptedSignalResult] = field(default_factory=dict)
    requests: dict[tuple[str, str, str], SignalRequest] = field(default_factory=dict)
    events: dict[str, dict[int, str]] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)

    def enter(self, intent: Intent, answers: list[Any], *, is_repeated: bool) -> None:
        """Note what was answered; complain if it cannot be so."""
        assert len(answers) == len(intent.items)
        for item, answer in zip(intent.items, answers, strict=True):
            if isinstance(item, NewRun):
                self._enter_run(item, answer, is_repeated)
            elif isinstance(item, SignalRequest):
                self._enter_signal(item, answer, is_repeated)
            elif isinstance(item, Turn):
                self._enter_turn(item, answer)
            else:
                assert isinstance(item, Message)
                is_too_late = isinstance(answer, port.Refused) and isinstance(answer.error, RunTerminal)
                assert isinstance(answer, port.Accepted) or is_too_late or is_repeated, answer
        if is_repeated:
            kind = f"{intent.verb}: {type(answers[0]).__name__}"
            self.repeated[kind] = self.repeated.get(kind, 0) + 1

    def _enter_run(self, new: NewRun, answer: Any, is_repeated: bool) -> None:
        allowed = (port.Created, port.Existing) if is_repeated else (port.Created,)
        assert isinstance(answer, allowed), answer
        assert answer.run_id == new.run_id
        assert new.run_id not in self.runs
        self.runs.add(new.run_id)
        self._enter_events(new.run_id, 0, new.events)

    def _enter_signal(self, request: SignalRequest, answer: Any, is_repeated: bool) -> None:
        if isinstance(answer, port.Refused):
            assert isinstance(answer.error, RunTerminal), answer.error
            return
        allowed = (port.Accepted, port.Duplicate) if is_repeated else (port.Accepted,)
        assert isinstance(answer, allowed), answer
        assert request.signal_id is not None
        assert answer.result is not None
        key = (request.run_id, request.name, request.signal_id)
        assert key not in self.signals
        self.signals[key] = answer.result
        self.requests[key] = request

    def _enter_turn(self, turn: Turn, answer: Any) -> None:
        assert isinstance(answer, port.Committed), answer
        assert answer.version == turn.expected_version + len(turn.events)
        self._enter_events(turn.run_id, turn.expected_version, turn.events)

    def _enter_events(self, run_id: str, version: int, events: tuple[Event, ...]) -> None:
        """Note where the events are. Lanes are read in any order, so a run's beginning may be read last."""
        keys = self.events.setdefault(run_id, {})
        for run_seq, event in enumerate(events, version + 1):
            assert run_seq not in keys, f"run {run_id}: two were told that they wrote event {run_seq}"
            keys[run_seq] = event.idempotency_key

    async def check(self, store: Store) -> None:
        """Compare with the store: nothing is missing, and nothing is there that nobody was told of."""
        stored: dict[str, int] = {}
        while heads := await store.find(RunQuery(after=max(stored, default=""))):
            stored |= {head.run_id: head.version for head in heads}
        assert stored == {run_id: len(keys) for run_id, keys in self.events.items()}
        accepted = 0
        for run_id, keys in self.events.items():
            assert {event.run_seq: event.idempotency_key for event in await read_history(store, run_id)} == keys
            for signal in await read_mailbox(store, run_id):
                result = self.signals[run_id, signal.name, signal.signal_id]
                assert (result.accepted_at, result.accepted) == (signal.accepted_at, True)
                accepted += 1
        assert accepted == len(self.signals)
        for key, request in self.requests.items():
            assert await store.deliver([request]) == [port.Duplicate(self.signals[key])]
