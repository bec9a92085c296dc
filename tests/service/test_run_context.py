"""The context of a run over HTTP: as a field, bound around a client's call, and as the caller's span."""

from typing import Any

import httpx
import pytest

import holdfast as hf
from holdfast.client import Client

pytestmark = pytest.mark.contract("CTX-1", "API-1")

SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_the_context_of_a_start_over_http() -> None:
    app = hf.App("seeing")

    @app.workflow
    async def see() -> dict[str, str]:
        return hf.context()

    service = hf.asgi(app, hf.MemoryStore(), options=hf.ServiceOptions(is_open=True))
    transport = httpx.ASGITransport(service)
    async with service.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

        async def seen(**ask: Any) -> Any:
            started = await http.post("/v1/runs", **ask)
            assert started.status_code == 201, started.text
            return await app.run(started.json()["run_id"]).result()

        plain = {"workflow": "see"}
        assert await seen(json=plain) == {}
        assert await seen(json={**plain, "context": {"user": "ann"}}) == {"user": "ann"}
        assert await seen(json=plain, headers={"traceparent": SPAN}) == {"traceparent": SPAN}
        assert await seen(json=plain, headers={"traceparent": "no span"}) == {}
        refused = await http.post("/v1/runs", json={**plain, "context": {"user": 5}})
        assert (refused.status_code, refused.json()["code"]) == (422, "InvalidInput")
        async with Client("http://localhost", transport=transport) as client:
            with hf.bind_context(user="ann"):
                started = await client.runs.start(workflow="see", context={"order": "7"})
            assert await client.result(started.run_id) == {"user": "ann", "order": "7"}
