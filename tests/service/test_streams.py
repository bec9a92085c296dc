"""Event streams of runs: everything once and in order, whatever happens to reader, server and store."""

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.core.events import Event
from holdfast.service.auth.tokens import TokenAccess, make_token, revoke_token
from holdfast.service.context import Headers, Principal
from holdfast.service.live.changefeed import FollowedRun
from holdfast.service.live.projections import Alerts
from holdfast.testing import VirtualClock
from holdfast.testing.samples import SampleNode, marker, wait
from tests.machine_load import slowdown
from tests.service.in_process import make_app
from tests.service.server_process import Server
from tests.service.stream_readers import QUICK, served, settled

SHOP = """
import asyncio
import holdfast as hf
from holdfast.service.options import ServiceOptions
from holdfast.service.http.server import serve
app = hf.App("shop")

@app.workflow
async def patient(count: int) -> None:
    for _ in range(count):
        await hf.wait_signal("go")

if __name__ == "__main__":
    import logging, sys
    logging.basicConfig(level=logging.INFO)
    asyncio.run(serve(app, "sqlite:///shop.db", options=ServiceOptions(port=int(sys.argv[1]), is_open=True)))
"""


def seqs(read: list[tuple[str, Any]]) -> list[int]:
    """Return the numbers of the events that were read."""
    return [data["run_seq"] for event, data in read if not event]


@pytest.mark.contract("API-3", "EVT-6")
async def test_a_reader_gets_every_event_once_in_order_and_as_it_happens(tmp_path: Path) -> None:
    async with served(f"sqlite:///{tmp_path}/s.db") as shop:
        run_id = await shop.start("order", order_id="o-1")
        async with shop.reading(f"/v1/runs/{run_id}/stream") as reading:
            assert reading.response.headers["content-type"] == "text/event-stream"
            read = await reading.until(lambda _, data: data["event_type"] == "SignalWaiting")
            await shop.send(run_id, "approval", {"approved": True})
            read += await reading.rest()
        history = await shop.history(run_id)
        assert [data for event, data in read if not event] == history
        assert read[-1] == ("end", {"last_event_seq": len(history)})
        await settled(lambda: shop.service.change_feeds.subscribers == 0)


@pytest.mark.contract("API-3")
async def test_a_reader_goes_on_behind_the_number_that_it_has() -> None:
    async with served() as shop:
        run_id = await shop.start("echo", value="x")
        async with shop.reading(f"/v1/runs/{run_id}/stream") as reading:
            whole = await reading.rest()
        asked: list[tuple[str, dict[str, str]]] = [
            ("?after=1", {}),
            ("", {"last-event-id": "1"}),
            ("?after=9", {"last-event-id": "1"}),
            ("?after=1", {"last-event-id": ""}),
        ]
        for address, headers in asked:
            async with shop.reading(f"/v1/runs/{run_id}/stream{address}", **headers) as reading:
                assert await reading.rest() == whole[1:]
        async with shop.reading(f"/v1/runs/{run_id}/stream?after=3") as reading:
            assert await reading.rest() == whole[3:]
        again = await shop.http.get(f"/v1/runs/{run_id}/stream", headers={"last-event-id": "3-end"})
        assert again.status_code == 204, "a browser that had the end does not come back for ever"


@pytest.mark.contract("API-2", "API-3")
async def test_what_cannot_be_streamed_is_refused_as_elsewhere() -> None:
    async with served(options=replace(QUICK, streams=1)) as shop:
        run_id = await shop.start("patient")
        for path, headers, code in (
            ("/v1/runs/nowhere/stream", {}, "NotFound"),
            (f"/v1/runs/{run_id}/stream?after=-1", {}, "InvalidInput"),
            (f"/v1/runs/{run_id}/stream?colour=red", {}, "InvalidInput"),
            (f"/v1/runs/{run_id}/stream", {"last-event-id": "yesterday"}, "InvalidInput"),
            (f"/v1/runs/{run_id}/stream?after=1000", {}, "InvalidInput"),
            (f"/v1/runs/{run_id}/stream", {"last-event-id": "9999999999999999"}, "InvalidInput"),
            ("/v1/stream?kinds=runs,cats", {}, "InvalidInput"),
        ):
            response = await shop.http.get(path, headers=headers)
            assert response.json()["code"] == code, path
        assert (await shop.http.post(f"/v1/runs/{run_id}/stream")).json()["code"] == "MethodNotAllowed"
        assert (await shop.http.options("/v1/stream")).headers["allow"] == "GET, OPTIONS"
        async with shop.reading(f"/v1/runs/{run_id}/stream"):
            refused = await shop.http.get("/v1/stream")
            assert (refused.status_code, refused.json()["code"]) == (429, "RateLimited")
            assert refused.headers["retry-after"]


async def test_a_silent_stream_sends_comments_and_asks_again_who_reads() -> None:
    is_allowed = True

    async def ask(headers: Headers) -> Principal:
        if not is_allowed:
            raise hf.errors.NotPermitted("no longer")
        return Principal(name="ann", is_admin=True)

    async with served(options=replace(QUICK, heartbeat_s=0.01), authenticate=ask) as shop:
        run_id = await shop.start("patient")
        async with shop.reading(f"/v1/runs/{run_id}/stream") as reading:
            reader = asyncio.create_task(reading.rest())
            await settled(lambda: reading.comments >= 3)
            is_allowed = False
            with pytest.raises(Exception, match=r"incomplete|closed|peer"):
                await reader


@pytest.mark.contract("API-4")
@pytest.mark.parametrize("address", ["/v1/runs/{run_id}/stream", "/v1/stream"])
async def test_a_busy_stream_ends_when_its_reader_loses_the_right_to_it(address: str) -> None:
    options = replace(QUICK, heartbeat_s=60.0, tokens_s=0.02)
    app = make_app(hf.Limits(signals_per_run_per_minute=10_000))
    async with served(app=app, options=options, authenticate=TokenAccess(app, options.tokens_s)) as shop:
        store = app.runtime().store
        writer, _ = await make_token(store, "ann", role="admin")
        reader, record = await make_token(store, "eve", role="viewer")
        shop.http.headers["authorization"] = f"Bearer {writer}"
        run_id = await shop.start("patient")
        place = address.format(run_id=run_id)
        async with shop.reading(place, authorization=f"Bearer {reader}") as reading:
            await reading.next()
            await revoke_token(store, record, "ann")
            reading_on = asyncio.create_task(reading.rest())
            while not reading_on.done():  # it is never silent
                await shop.send(run_id, "go")
            with pytest.raises(Exception, match=r"incomplete|closed|peer"):
                await reading_on
        assert (await shop.http.get(place, headers={"authorization": f"Bearer {reader}"})).status_code == 401


@pytest.mark.contract("API-4")
async def test_who_may_not_read_a_stream_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    async with served(app=app, authenticate=TokenAccess(app, 2.0)) as shop:
        token, _ = await make_token(app.runtime().store, "eve", scopes=["tasks:write"])
        shop.http.headers["authorization"] = f"Bearer {token}"
        for place in ("/v1/runs/r-1/stream?colour=red", "/v1/stream?kinds=runs", "/metrics"):
            assert (await shop.http.get(place)).status_code == 403
        lines = [record.getMessage() for record in caplog.records if record.name == "holdfast.access"]
        told = ["runs.stream", "lists.stream", "metrics"]
        assert all(what in line and "eve" in line for what, line in zip(told, lines, strict=True))


@pytest.mark.contract("API-4")
async def test_other_tenants_runs_are_not_there() -> None:
    async def ask(headers: Headers) -> Principal:
        return Principal(name="ann", tenant=headers[b"x-tenant"].decode(), is_admin=True)

    async with served(authenticate=ask) as shop:
        shop.http.headers["x-tenant"] = "acme"
        async with shop.reading("/v1/stream?kinds=runs,tasks") as lists:
            assert await lists.next() == ("reset", {})
            shop.http.headers["x-tenant"] = "other"
            theirs = await shop.start("asking", who="bob")
            shop.http.headers["x-tenant"] = "acme"
            assert (await shop.http.get(f"/v1/runs/{theirs}/stream")).status_code == 404
            mine = await shop.start("echo")
            read = await lists.until(lambda _, run: run.get("status") == "COMPLETED")
        assert {data["run_id"] for _, data in read} == {mine}


@pytest.mark.contract("API-3")
async def test_a_reader_that_does_not_read_is_dropped_holds_nobody_up_and_catches_up(tmp_path: Path) -> None:
    app = make_app(hf.Limits(signals_per_run_per_minute=1_000))

    @app.workflow
    async def chatty() -> None:
        while (await hf.wait_signal("talk")) != "stop":
            pass

    # The keen reader is in the same process: what holds that up must not make it the one that does not read.
    options = replace(QUICK, stall_s=1.0 * slowdown())
    async with served(f"sqlite:///{tmp_path}/s.db", app=app, options=options) as shop:
        run_id = await shop.start("chatty")
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            lazy.connect(("127.0.0.1", shop.port))
            lazy.sendall(f"GET /v1/runs/{run_id}/stream HTTP/1.1\r\nhost: shop\r\n\r\n".encode())
            await settled(lambda: shop.service.change_feeds.subscribers == 1)
            async with shop.reading(f"/v1/runs/{run_id}/stream") as reading:
                keen = asyncio.create_task(reading.rest())
                for _ in range(40):
                    await shop.http.post(
                        "/v1/signals",
                        json={"signals": [{"run_id": run_id, "name": "talk", "payload": "x" * 50_000}] * 4},
                    )
                await settled(lambda: shop.service.change_feeds.subscribers == 1)
                assert not keen.done()
                got = await asyncio.to_thread(_read_to_end, lazy)
                await shop.send(run_id, "talk", "stop")
                assert seqs(await keen) == [event["run_seq"] for event in await shop.history(run_id)]
        last = max((int(line[4:]) for line in got.split(b"\n") if line.startswith(b"id: ")), default=0)
        async with shop.reading(f"/v1/runs/{run_id}/stream", **{"last-event-id": str(last)}) as again:
            assert seqs(await again.rest()) == list(range(last + 1, len(await shop.history(run_id)) + 1))


def _read_to_end(lazy: socket.socket) -> bytes:
    """Read what was sent before the reader was dropped; the last line may be cut."""
    lazy.settimeout(5)
    got = b""
    try:
        while chunk := lazy.recv(1 << 20):
            got += chunk
    except OSError:
        pass
    return got[: got.rfind(b"\n\n") + 2]


@pytest.mark.contract("EVT-6", "PRJ-3")
async def test_at_a_gap_a_stream_is_stale_until_the_gap_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = hf.MemoryStore()
    hidden: set[int] = {3}
    read_events = store.read_events

    async def with_gap(run_id: str, *bounds: int | None) -> list[Event]:
        return [event for event in await read_events(run_id, *bounds) if event.run_seq not in hidden]  # type: ignore[arg-type]

    async with served(store) as shop:
        run_id = await shop.start("order", order_id="o-1")
        await settled(lambda: len(store._runs[run_id].events) == 3)
        monkeypatch.setattr(store, "read_events", with_gap)
        await shop.send(run_id, "approval", {"approved": True})
        await settled(lambda: len(store._runs[run_id].events) > 4)
        async with shop.reading(f"/v1/runs/{run_id}/stream") as reading:
            read = await reading.until(lambda event, _: event == "stale")
            assert seqs(read) == [1, 2], "what is behind the gap is not shown"
            assert read[-1] == ("stale", {"last_event_seq": 2})
            hidden.clear()
            read = await reading.rest()
        assert seqs(read) == list(range(3, len(store._runs[run_id].events) + 1))
        alerts = (await shop.http.get("/v1/alerts")).json()["items"]
        assert [(alert["code"], alert["run_id"]) for alert in alerts] == [("PROJECTOR_GAP_DETECTED", run_id)]
        assert 'holdfast_alerts_total{code="PROJECTOR_GAP_DETECTED"} 1' in (await shop.http.get("/metrics")).text


@pytest.mark.contract("PRJ-3")
async def test_events_that_are_late_raise_an_alert_and_old_ones_that_somebody_catches_up_with_do_not() -> None:
    clock = VirtualClock()
    store = hf.MemoryStore(clock)
    node, alerts = SampleNode(store), Alerts()
    run = await node.start("run-1", wait("go"))
    clock.advance(ms=60_000)
    followed = FollowedRun(store, alerts, run.head)
    assert [frame.seq for frame in await followed.after(0)] == [1, 2, 3]
    assert not alerts.counts
    for _ in range(2):  # one alert for each time that it falls behind
        before = followed.version
        run = await node.step("run-1", marker(f"m-{before}"))
        clock.advance(ms=5_001)
        followed.grow(run.head.version)
        assert len(await followed.after(before)) == 1
    assert alerts.counts == {"PROJECTOR_LAG_HIGH": 1}


async def test_what_many_follow_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = hf.MemoryStore()
    async with served(store) as shop:
        run_id = await shop.start("order", order_id="o-1")
        await settled(lambda: len(store._runs[run_id].events) == 3)
        readings = [shop.reading(f"/v1/runs/{run_id}/stream?after=3") for _ in range(20)]
        opened = [await reading.__aenter__() for reading in readings]
        await settled(lambda: shop.service.change_feeds.subscribers == 20)
        reads: list[int] = []
        read_events = store.read_events

        async def counted(run_id: str, after: int = 0, *bounds: int | None) -> list[Event]:
            reads.append(after)
            return await read_events(run_id, after, *bounds)

        monkeypatch.setattr(store, "read_events", counted)
        await shop.send(run_id, "approval", {"approved": True})
        for reading in opened:
            assert (await reading.rest())[-1][0] == "end"
        assert reads == [3]
        for context in readings:
            await context.__aexit__(None, None, None)


@pytest.mark.contract("API-3")
async def test_what_another_process_does_is_streamed_here(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/s.db"
    elsewhere = make_app()
    async with served(address, options=replace(QUICK, watch_poll_s=60.0)) as shop:
        run_id = await shop.start("order", order_id="o-1")
        async with (
            shop.reading(f"/v1/runs/{run_id}/stream") as reading,
            elsewhere.node(address, name="elsewhere"),
        ):
            await reading.until(lambda _, data: data["event_type"] == "SignalWaiting")
            await elsewhere.run(run_id).signal("approval", {"approved": True})
            assert (await reading.rest())[-1][0] == "end"


@pytest.mark.process
@pytest.mark.contract("API-3", "MSG-4")
@pytest.mark.slow
async def test_a_reader_survives_the_servers_end_and_its_restart(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    read: list[tuple[str, Any]] = []
    async with asyncio.timeout(60):
        async with Server(tmp_path, port) as server:
            run_id = await server.start_run("patient", count=6)
            async with server.reading(f"/v1/runs/{run_id}/stream") as reading:
                read += await reading.until(lambda _, data: data["event_type"] == "SignalWaiting")
                for _ in range(2):
                    await server.send(run_id, "go")
                    read += await reading.until(lambda _, data: data["event_type"] == "SignalWaiting")
                server.signal(signal.SIGTERM)
                rest = await reading.rest()
                assert rest[-1] == ("stopped", {}), "the stream is ended, not cut"
                read += rest[:-1]
            assert await server.ended() == 0
        async with Server(tmp_path, port) as server:
            await server.send(run_id, "go")
            last = {"last-event-id": str(read[-1][1]["run_seq"])}
            async with server.reading(f"/v1/runs/{run_id}/stream", **last) as reading:
                read += await reading.until(lambda _, data: data["event_type"] == "SignalWaiting")
                server.signal(signal.SIGKILL)
                with pytest.raises(Exception, match=r"incomplete|closed|peer|reset"):
                    await reading.rest()
            await server.ended()
        async with Server(tmp_path, port) as server:
            for _ in range(3):
                await server.send(run_id, "go")
            last = {"last-event-id": str(read[-1][1]["run_seq"])}
            async with server.reading(f"/v1/runs/{run_id}/stream", **last) as reading:
                read += await reading.rest()
            history = await server.history(run_id)
    assert read[-1][0] == "end"
    assert [data for event, data in read if not event] == history


async def test_a_child_whose_id_holds_a_slash_can_be_followed() -> None:
    app = hf.App("shop")

    @app.workflow
    async def child() -> int:
        return 1

    @app.workflow
    async def parent() -> int:
        return await child()

    async with served(app=app) as shop:
        run_id = await shop.start("parent")
        await shop.http.get(f"/v1/runs/{run_id}/result?wait_s=10")
        [found] = (await shop.http.get(f"/v1/runs?parent_run_id={run_id}")).json()["items"]
        assert "/" in found["run_id"]
        async with shop.reading(f"/v1/runs/{quote(found['run_id'], safe='')}/stream") as reading:
            assert (await reading.rest())[-1][0] == "end"
