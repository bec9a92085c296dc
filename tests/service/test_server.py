"""The service behind a real socket: slow callers, long polls, and its end."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast as hf
from holdfast.errors import InvalidInput
from holdfast.service.context import Service, make_service
from holdfast.service.http.server import check_access, listening, serve
from holdfast.service.options import ServiceOptions
from tests.service.in_process import MOST_SECONDS, make_app

ROOT = Path(__file__).parents[2]

SERVED = """
import asyncio, logging, sys
from holdfast.engine.options import NodeOptions
from holdfast.service.options import ServiceOptions
from holdfast.service.http.server import serve
from tests.service.in_process import make_app

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
options = ServiceOptions(port=0, is_open=True)
asyncio.run(serve(make_app(), sys.argv[1], options=options, node=NodeOptions(takes_runs=sys.argv[2] == "works")))
"""


@asynccontextmanager
async def socketed(limits: hf.Limits | None = None, **options: Any) -> AsyncIterator[tuple[Service, int]]:
    """Serve on a socket in this process."""
    app = make_app(limits)
    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"):
        service = make_service(app, ServiceOptions(port=0, **options))
        async with listening(service) as port:
            yield service, port


@asynccontextmanager
async def process(
    address: str, role: str = "works", seconds: float = MOST_SECONDS
) -> AsyncIterator[tuple[Process, int]]:
    """Serve in another process; give its port."""
    command = [sys.executable, "-W", "error", "-c", SERVED, address, role]
    served = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE)
    assert served.stdout is not None
    try:
        async with asyncio.timeout(seconds):
            while "is served at" not in (line := (await served.stdout.readline()).decode()):
                assert line, "it ended before it served"
            yield served, int(line.rpartition(":")[2])
    finally:
        if served.returncode is None:
            served.kill()
        await served.wait()


async def test_it_answers_over_a_socket() -> None:
    async with socketed() as (_, port), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        assert (await http.get("/v1/health")).json()["status"] == "ok"
        assert "server" not in (await http.get("/v1/health")).headers
        head = await http.head("/v1/workflows")
        assert (head.status_code, head.content) == (200, b"")
        assert (await http.get("/v1/runs/a%2Fb")).json()["detail"].count("a/b") == 1


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("head", [b"", b"GET /v1/health HT", b"GET /v1/health HTTP/1.1\r\nHost: x\r\nX: "])
async def test_a_caller_who_does_not_finish_is_let_go(head: bytes) -> None:
    async with socketed(body_s=0.05) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        assert await reader.read() == b""
        writer.close()


async def test_a_caller_who_goes_on_may_stay() -> None:
    async with (
        socketed(body_s=0.05) as (_, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        run = (await http.post("/v1/runs", json={"workflow": "patient"})).json()["run_id"]
        outcome = await http.get(f"/v1/runs/{run}/result", params={"wait_s": 0.2})
        assert outcome.json()["is_finished"] is False, "the time to finish a head is not for answers"


async def test_garbage_is_answered_with_400() -> None:
    async with socketed() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01 what is this\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_a_long_poll_does_not_hold_up_the_end() -> None:
    app = make_app()
    async with asyncio.timeout(MOST_SECONDS), app.node("memory://"), httpx.AsyncClient(timeout=60) as http:
        service = make_service(app, ServiceOptions(port=0))
        async with listening(service) as port:
            place = f"http://127.0.0.1:{port}/v1/runs"
            run = (await http.post(place, json={"workflow": "patient"})).json()["run_id"]
            polling = asyncio.create_task(http.get(f"{place}/{run}/result", params={"wait_s": 60}, timeout=70))
            while not app.runtime().runs_awaited:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert (await polling).json()["is_finished"] is False


async def test_a_long_poll_hears_of_the_end_at_once() -> None:
    async with socketed() as (service, port), httpx.AsyncClient(timeout=60) as http:
        place = f"http://127.0.0.1:{port}/v1/runs"
        run = (await http.post(place, json={"workflow": "order", "input": {"order_id": "o"}})).json()["run_id"]
        polling = asyncio.create_task(http.get(f"{place}/{run}/result", params={"wait_s": 60}, timeout=70))
        while not service.app.runtime().runs_awaited:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await http.post(f"{place}/{run}/signals/approval", json={"payload": {"approved": True}})
        assert (await polling).json()["result"] == "o: True"


@pytest.mark.parametrize("is_rpc", [False, True])
async def test_nothing_is_kept_for_a_caller_who_went_away(is_rpc: bool) -> None:
    async with socketed() as (service, port), httpx.AsyncClient(timeout=60) as http:
        place = f"http://127.0.0.1:{port}/v1/runs"
        run = (await http.post(place, json={"workflow": "patient"})).json()["run_id"]
        runtime = service.app.runtime()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        if is_rpc:
            call = {"jsonrpc": "2.0", "id": 1, "method": "runs.result", "params": {"run_id": run, "wait_s": 60}}
            body = json.dumps([call, call])
            head = f"POST /rpc HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            writer.write(f"{head}\r\n\r\n{body}".encode())
        else:
            writer.write(f"GET /v1/runs/{run}/result?wait_s=60 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        while not runtime.runs_awaited:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        writer.close()
        while runtime.runs_awaited:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert not runtime.runs_awaited


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.contract("MSG-4", "API-1")
async def test_sigterm_ends_it_in_order(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/s.db"
    async with process(address) as (served, port), httpx.AsyncClient(timeout=60) as http:
        place = f"http://127.0.0.1:{port}/v1/runs"
        runs = [(await http.post(place, json={"workflow": "patient"})).json()["run_id"] for _ in range(3)]
        polling = asyncio.create_task(http.get(f"{place}/{runs[0]}/result", params={"wait_s": 60}, timeout=70))
        await asyncio.sleep(0)
        served.send_signal(signal.SIGTERM)
        assert served.stdout is not None
        said = (await served.stdout.read()).decode()
        assert await served.wait() == 0, said
        assert "because of SIGTERM" in said
        assert said.rstrip().endswith("the service has stopped")
        await asyncio.wait([polling])
    store = await hf.open_store(hf.Settings(store=address))
    assert (await store.stats()).leases == {}
    assert [run.head.lease_owner for run in await store.load(runs) if run is not None] == [None] * 3
    await store.close()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.contract("API-1")
async def test_a_service_without_workflows_hands_work_to_a_node(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/s.db"
    async with process(address, "connects") as (_, port), httpx.AsyncClient(timeout=60) as http:
        place = f"http://127.0.0.1:{port}/v1/runs"
        run = (await http.post(place, json={"workflow": "echo", "input": {"value": 7}})).json()["run_id"]
        assert (await http.get(f"{place}/{run}/result")).json()["status"] == "PENDING"
        async with make_app().node(address):
            outcome = await http.get(f"{place}/{run}/result", params={"wait_s": 10}, timeout=20)
        assert outcome.json()["result"] == 7


@pytest.mark.contract("API-4")
async def test_open_access_is_chosen_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidInput, match="open access"):
        await serve(make_app(), "memory://", options=ServiceOptions(port=0))
    check_access(ServiceOptions(is_open=True), None)
    assert "access is open" in caplog.text


async def test_a_port_that_is_taken_is_said() -> None:
    async with socketed() as (service, port):
        other = make_service(service.app, ServiceOptions(port=port))
        with pytest.raises(InvalidInput, match="cannot listen"):
            async with listening(other):
                pass


@pytest.mark.parametrize("wrong", [{"port": -1}, {"body_bytes": 0}, {"request_s": -1}, {"drain_s": "x"}])
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ServiceOptions(**wrong)
