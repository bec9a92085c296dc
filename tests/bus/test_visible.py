"""What waits for sinks is visible: in the metrics, and to the doctor."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.clock import SystemClock
from holdfast.core.bus import OutboxSettlement, Sink, SinkProgress, letter_of
from holdfast.engine.observe.doctor import examine
from holdfast.store.queries import OutboxQuery
from holdfast.testing.samples import new_run
from tests.service.in_process import serve_in_process

HOOK = Sink(name="hook", kind="webhook", address="https://example.com", secret="x", is_paused=True)


@pytest.mark.contract("BUS-1")
async def test_backlog_failures_and_dead_letters_are_seen() -> None:
    """By sink."""
    store = hf.MemoryStore()
    async with serve_in_process(store) as server:
        await store.put_sink(HOOK)
        await store.create([new_run(f"run-{number}", now=await store.now()) for number in (1, 2)])
        entry, *_ = await store.find(OutboxQuery(sink="hook"))
        letter = letter_of(HOOK, entry, "410", await store.now())
        progress = SinkProgress(failures=3, error="no route", delivered=7)
        await store.settle_outbox("hook", [OutboxSettlement(entry=entry, letter=letter)], progress)
        text = (await server.http.get("/metrics")).text
        for line in ("backlog", "dead_letters", "delivered_total"):
            assert f'holdfast_bus_{line}{{sink="hook"}}' in text
        assert 'holdfast_bus_failures{sink="hook"} 3.0' in text
        report = await examine(store, SystemClock())
        said = [finding.sentence for finding in report.findings if finding.subject == "bus"]
        assert said[0] == "sink hook has 1 dead letters"
        assert "has failed 3 times in a row: no route; 1 entries wait" in said[1]
