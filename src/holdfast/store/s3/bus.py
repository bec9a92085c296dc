"""The event bus, which a bucket does not support.

It has no outbox yet, so a sink is refused before anything would have to reach it. Every verb has a defined answer:
without sinks there is nothing to settle, to replay or to dead-letter.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from holdfast.core.audit import AuditEntry
from holdfast.core.bus import BusAlert, OutboxReplay, OutboxSettlement, Replayed, Sink, SinkProgress
from holdfast.core.dead_letters import Settled, Settlement
from holdfast.core.instants import Instant
from holdfast.limits import Limits
from holdfast.store import decisions, port, validation

OUTBOX = "outbox"


class WithoutBus:
    """The verbs of the event bus on a store that has none."""

    capabilities: port.Capabilities
    _limits: Limits
    _now: Callable[[], Awaitable[Instant]]

    async def put_sink(self, sink: Sink, audit: AuditEntry | None = None) -> Sink:
        validation.check_put_sink(sink, audit, self._limits)
        await self._now()
        raise validation.lacks(self, OUTBOX, f"the sink {sink.name!r}")

    async def remove_sink(self, name: str, audit: AuditEntry | None = None) -> bool:
        validation.check_sink_name(name, audit, self._limits)
        await self._now()
        return False

    async def settle_outbox(self, sink: str, items: Sequence[OutboxSettlement], progress: SinkProgress) -> list[bool]:
        validation.check_settle_outbox(sink, items, progress, self._limits)
        await self._now()
        return [False] * len(items)

    async def replay_outbox(self, asked: OutboxReplay, audit: AuditEntry | None = None) -> Replayed:
        validation.check_replay(asked, audit, self._limits)
        await self._now()
        raise decisions.no_such_sink(asked.sink)

    async def raise_alerts(self, alerts: Sequence[BusAlert]) -> int:
        validation.check_alerts(alerts, self._limits)
        await self._now()
        return 0

    async def settle_bus_dead_letters(
        self, ids: Sequence[str], action: Settlement, audit: AuditEntry | None = None
    ) -> list[Settled | port.Refused]:
        validation.check_settlement(ids, action, "", self._limits)
        validation.check_audit(() if audit is None else (audit,), self._limits)
        await self._now()
        return [port.Refused(decisions.no_such_letter(id_)) for id_ in ids]


async def nothing(query: Any) -> port.Found[Any]:
    """Return the empty result for something that the store does not have."""
    return port.Found()
