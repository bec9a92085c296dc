"""The service inside another application: mounted below a prefix of FastAPI and Starlette, and run by itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

import holdfast as hf
from holdfast.errors import InvalidInput, NotAuthenticated
from holdfast.service import AsgiService, Headers, Principal, make_token
from tests.service.in_process import make_app
from tests.service.stream_readers import settled

OPEN = hf.ServiceOptions(is_open=True)


def fastapi_host(service: AsgiService, prefix: str) -> Any:
    """Return an application of FastAPI that mounts the service."""
    host = FastAPI(lifespan=service.lifespan)

    @host.get("/own")
    async def own() -> str:
        return "the host's own"

    host.mount(prefix, service)
    return host


def starlette_host(service: AsgiService, prefix: str) -> Any:
    """Return an application of Starlette that mounts the service, below two levels of mounts."""
    outer, _, inner = prefix[1:].partition("/")
    if not inner:
        return Starlette(routes=[Mount(prefix, service)])
    return Starlette(routes=[Mount(f"/{outer}", routes=[Mount(f"/{inner}", service)])])


@asynccontextmanager
async def calling(host: Any, service: AsgiService, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Enter the lifespan as a server does, and call the host."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(service.lifespan())
        transport = httpx.ASGITransport(host)
        yield await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://localhost", **options)
        )


@pytest.mark.contract("API-1", "API-3")
@pytest.mark.parametrize(
    ("make_host", "prefix"),
    [(fastapi_host, "/ops"), (starlette_host, "/ops"), (starlette_host, "/team/ops"), (fastapi_host, "/v1")],
)
async def test_everything_works_below_a_prefix(make_host: Any, prefix: str) -> None:
    service = hf.asgi(make_app(), hf.MemoryStore(), options=OPEN)
    async with calling(make_host(service, prefix), service) as http:
        page = (await http.get(f"{prefix}/")).text
        assert f'<meta name="holdfast-mount" content="{prefix}">' in page
        script = page.partition('src="')[2].partition('"')[0]
        assert script.startswith(f"{prefix}/assets/")
        assert (await http.get(script)).status_code == 200
        assert (await http.get(f"{prefix}/runs/r-1")).text == page
        started = await http.post(f"{prefix}/v1/runs", json={"workflow": "order", "input": {"order_id": "a"}})
        assert started.status_code == 201
        run_id = started.json()["run_id"]
        assert started.headers["location"] == f"{prefix}/v1/runs/{run_id}"
        assert (await http.get(started.headers["location"])).json()["run_id"] == run_id
        described = (await http.get(f"{prefix}/openapi.json")).json()
        assert described["servers"] == [{"url": prefix}]
        answer = {"jsonrpc": "2.0", "id": 1, "method": "runs.get", "params": {"run_id": run_id}}
        assert (await http.post(f"{prefix}/rpc", json=answer)).json()["result"]["run_id"] == run_id
        sent = await http.post(f"{prefix}/v1/runs/{run_id}/signals/approval", json={"payload": {"approved": True}})
        assert sent.status_code == 202
        finished = await http.get(f"{prefix}/v1/runs/{run_id}/result", params={"wait_s": 20})
        assert finished.json()["is_finished"]
        events = (await http.get(f"{prefix}/v1/runs/{run_id}/stream", headers={"last-event-id": "1"})).text
        assert "id: 2" in events
        assert "id: 1\n" not in events
        assert events.rstrip().rpartition("event: ")[2].startswith("end")
        assert (await http.get(f"{prefix}/nothing")).status_code == 404
        assert (await http.get(f"{prefix}/metrics")).status_code == 200


async def test_an_id_with_a_slash_is_found_below_a_prefix() -> None:
    app = make_app()
    service = hf.asgi(app, hf.MemoryStore(), options=OPEN)
    async with calling(fastapi_host(service, "/my%20ops".replace("%20", " ")), service) as http:
        answer = await http.get("/my%20ops/v1/runs/a%2Fb")
        assert (answer.status_code, answer.json()["code"]) == (404, "NotFound")
        assert "a/b" in answer.json()["detail"]
        assert 'content="/my%20ops"' in (await http.get("/my%20ops/")).text


async def test_the_host_keeps_its_own_addresses() -> None:
    service = hf.asgi(make_app(), hf.MemoryStore(), options=OPEN)
    async with calling(fastapi_host(service, "/ops"), service) as http:
        assert (await http.get("/own")).json() == "the host's own"
        assert (await http.get("/v1/runs")).status_code == 404
        assert "x-frame-options" not in (await http.get("/own")).headers


@pytest.mark.contract("API-4")
async def test_sessions_and_their_protection_work_below_a_prefix() -> None:
    app, store = make_app(), hf.MemoryStore()
    text, _ = await make_token(store, "ann", scopes=["runs:read", "runs:write"])
    service = hf.asgi(app, store)
    async with calling(fastapi_host(service, "/ops"), service) as http:
        assert (await http.get("/ops/v1/runs")).status_code == 401
        signed_in = await http.post("/ops/session", json={"token": text}, headers={"origin": "http://localhost"})
        assert signed_in.status_code == 200
        assert "Path=/;" in signed_in.headers["set-cookie"]
        assert (await http.get("/ops/v1/runs")).status_code == 200
        start = {"workflow": "order", "input": {"order_id": "a"}}
        foreign = await http.post("/ops/v1/runs", json=start, headers={"origin": "http://elsewhere"})
        assert (foreign.status_code, foreign.json()["code"]) == (403, "NotPermitted")
        own = await http.post("/ops/v1/runs", json=start, headers={"origin": "http://localhost"})
        assert own.status_code == 201
        assert (await http.delete("/ops/session", headers={"x-holdfast-request": "page"})).status_code == 204
        assert (await http.get("/ops/v1/runs")).status_code == 401


async def test_the_callers_of_the_host_can_be_known_by_its_own_means() -> None:
    async def by_header(headers: Headers) -> Principal:
        if headers.get(b"x-user") != b"ann":
            raise NotAuthenticated("who are you?")
        return Principal(name="ann", scopes=frozenset({"runs:read"}))

    service = hf.asgi(make_app(), hf.MemoryStore(), authenticate=by_header)
    async with calling(fastapi_host(service, "/ops"), service) as http:
        assert (await http.get("/ops/v1/runs")).status_code == 401
        assert (await http.get("/ops/v1/runs", headers={"x-user": "ann"})).status_code == 200
        denied = await http.post("/ops/v1/runs", json={"workflow": "order"}, headers={"x-user": "ann"})
        assert denied.status_code == 403


async def test_access_is_closed_unless_it_is_chosen() -> None:
    with pytest.raises(InvalidInput, match="there is no token yet"):
        async with hf.asgi(make_app(), hf.MemoryStore()).lifespan():
            pass


async def test_a_server_runs_the_lifespan_by_the_protocol() -> None:
    app = make_app()
    service = hf.asgi(app, hf.MemoryStore(), options=OPEN)
    received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    serving = asyncio.create_task(service({"type": "lifespan"}, received.get, sent.put))
    received.put_nowait({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://localhost") as http:
        assert (await http.get("/v1/health")).status_code == 200
        assert '<meta name="holdfast-mount" content="">' in (await http.get("/")).text
    received.put_nowait({"type": "lifespan.shutdown"})
    assert (await sent.get())["type"] == "lifespan.shutdown.complete"
    await serving
    with pytest.raises(InvalidInput):
        app.runtime()


async def test_without_a_lifespan_what_the_app_has_open_is_served() -> None:
    app, store = make_app(), hf.MemoryStore()
    service = hf.asgi(app, options=OPEN)
    host = fastapi_host(service, "/ops")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(host), base_url="http://localhost") as http:
        closed = await http.get("/ops/v1/runs")
        assert (closed.status_code, closed.json()["code"]) == (503, "EngineError")
        for _ in range(2):  # each life of the node has its own service
            async with app.node(store):
                assert (await http.get("/ops/v1/runs")).status_code == 200


async def test_streams_end_when_the_lifespan_does() -> None:
    service = hf.asgi(make_app(), hf.MemoryStore(), options=OPEN)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://localhost") as http:
        async with service.lifespan():
            started = await http.post("/v1/runs", json={"workflow": "order", "input": {"order_id": "a"}})
            reading = asyncio.create_task(http.get(f"/v1/runs/{started.json()['run_id']}/stream"))
            feeds = service.service.change_feeds
            await settled(lambda: feeds.subscribers == 1)
        ended = await reading
    assert ended.status_code == 200
    assert "event: end" not in ended.text  # the run goes on, and a reader comes back
