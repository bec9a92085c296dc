"""Snapshots that are kept: they go on from their watermark, and a gap is said and never skipped."""

from typing import Any

import pytest

from holdfast.core.events import Event
from tests.service.in_process import serve_in_process

pytestmark = pytest.mark.contract("EVT-6", "PRJ-3")


async def test_a_snapshot_goes_on_from_its_watermark() -> None:
    async with serve_in_process() as server:
        run_id = await server.start("order", order_id="o-1")
        await server.until("signals.waits", {"run_id": run_id}, lambda page: page["items"])
        first = (await server.rest("runs.snapshot", {"run_id": run_id}))[1]
        store: Any = server.app.runtime().store
        begins: list[int] = []
        read_events = store.read_events

        async def watched(run_id: str, after: int, limit: int, most_bytes: int) -> list[Event]:
            assert limit <= 1_000
            assert most_bytes <= 8 * 1024 * 1024, "a long history is read in parts"
            begins.append(after)
            return list(await read_events(run_id, after, limit, most_bytes))

        store.read_events = watched
        assert (await server.rest("runs.snapshot", {"run_id": run_id}))[1] == first
        assert begins == [first["last_event_seq"]]
        store.read_events = read_events
        await server.rest("runs.terminate", {"run_id": run_id, "wait": True})
        last = (await server.rest("runs.snapshot", {"run_id": run_id}))[1]
        assert (last["status"], last["is_stale"]) == ("CANCELLED", False)


async def test_a_gap_is_said_and_closes() -> None:
    async with serve_in_process() as server:
        run_id = await server.start("echo")
        await server.until("runs.result", {"run_id": run_id, "wait_s": 5}, lambda outcome: outcome["is_finished"])
        store: Any = server.app.runtime().store
        read_events = store.read_events

        async def with_a_gap(run_id: str, *bounds: int) -> list[Event]:
            return [event for event in await read_events(run_id, *bounds) if event.run_seq != 2]

        store.read_events = with_a_gap
        stale = (await server.rest("runs.snapshot", {"run_id": run_id}))[1]
        assert (stale["is_stale"], stale["last_event_seq"], stale["status"]) == (True, 1, "PENDING")
        [alert] = (await server.rest("system.alerts", {}))[1]["items"]
        assert (alert["code"], alert["priority"], alert["run_id"]) == ("PROJECTOR_GAP_DETECTED", 1, run_id)
        assert (await server.rest("system.alerts", {"after": alert["number"]}))[1]["items"] == []
        assert (await server.rest("system.stats", {}))[1]["alerts"] == {"PROJECTOR_GAP_DETECTED": 1}
        store.read_events = read_events
        fresh = (await server.rest("runs.snapshot", {"run_id": run_id}))[1]
        assert (fresh["is_stale"], fresh["status"]) == (False, "COMPLETED")
