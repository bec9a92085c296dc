"""JSON-RPC 2.0 as its specification has it: batches, notifications, ids and numbers."""

from typing import Any

import pytest

from holdfast.service.options import ServiceOptions
from tests.service.in_process import InProcessServer, serve_in_process

pytestmark = pytest.mark.contract("API-1", "API-2")

HEADERS = {"content-type": "application/json"}


async def post(server: InProcessServer, content: bytes) -> Any:
    """Post a body, and return what is answered."""
    response = await server.http.post("/rpc", content=content, headers=HEADERS)
    assert response.status_code == 200, response.text
    return response.json()


def call(method: str, id: Any = 1, **params: Any) -> dict[str, Any]:
    """Return a call."""
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


@pytest.mark.parametrize(
    ("text", "code", "id"),
    [
        (b"{", -32_700, None),
        (b"\xff", -32_700, None),
        (b"", -32_700, None),
        (b"[" * 5_000 + b"]" * 5_000, -32_700, None),
        (b"7", -32_600, None),
        (b"[]", -32_600, None),
        (b"{}", -32_600, None),
        (b'{"jsonrpc":"1.0","method":"system.health","id":1}', -32_600, 1),
        (b'{"jsonrpc":"2.0","method":7,"id":"x"}', -32_600, "x"),
        (b'{"jsonrpc":"2.0","method":"system.health","id":{}}', -32_600, None),
        (b'{"jsonrpc":"2.0","method":"system.health","id":true}', -32_600, None),
        (b'{"jsonrpc":"2.0","method":"nothing","id":1}', -32_601, 1),
        (b'{"jsonrpc":"2.0","method":"runs.get","params":["a"],"id":1}', -32_602, 1),
        (b'{"jsonrpc":"2.0","method":"runs.get","params":"a","id":1}', -32_602, 1),
        (b'{"jsonrpc":"2.0","method":"runs.get","params":{},"id":1}', -32_602, 1),
        (b'{"jsonrpc":"2.0","method":"runs.get","params":{"run_id":"x","y":1},"id":1}', -32_602, 1),
        (b'{"jsonrpc":"2.0","method":"runs.get","params":{"run_id":"x"},"id":1.5}', -32_004, 1.5),
        (b'{"jsonrpc":"2.0","method":"runs.get","params":{"run_id":"x"},"id":null}', -32_004, None),
    ],
)
async def test_errors_have_numbers_and_ids(text: bytes, code: int, id: Any) -> None:
    async with serve_in_process() as server:
        answer = await post(server, text)
        assert (answer["jsonrpc"], answer["error"]["code"], answer["id"]) == ("2.0", code, id), answer
        assert "result" not in answer


async def test_parameters_may_be_left_out() -> None:
    async with serve_in_process() as server:
        for more in (b"", b',"params":{}', b',"params":[]'):
            answer = await post(server, b'{"jsonrpc":"2.0","method":"system.health","id":1' + more + b"}")
            assert answer["result"]["status"] == "ok"
            assert "error" not in answer


async def test_a_batch_is_answered_call_by_call() -> None:
    async with serve_in_process() as server:
        batch = [
            call("system.health", "a"),
            7,
            {"jsonrpc": "2.0", "method": "system.health"},
            call("runs.get", "b", run_id="nowhere"),
        ]
        response = await server.http.post("/rpc", json=batch)
        answers = {answer["id"]: answer for answer in response.json()}
        assert answers.keys() == {"a", None, "b"}
        assert answers["a"]["result"]["status"] == "ok"
        assert answers[None]["error"]["code"] == -32_600
        assert answers["b"]["error"]["data"]["code"] == "NotFound"


async def test_notifications_are_carried_out_and_not_answered() -> None:
    async with serve_in_process() as server:
        for body in (
            {"jsonrpc": "2.0", "method": "runs.start", "params": {"workflow": "echo", "run_id": "one"}},
            [{"jsonrpc": "2.0", "method": "runs.start", "params": {"workflow": "echo", "run_id": "two"}}],
            {"jsonrpc": "2.0", "method": "nothing"},
            {"jsonrpc": "2.0", "method": "runs.start", "params": {"workflow": "nothing"}},
        ):
            response = await server.http.post("/rpc", json=body)
            assert (response.status_code, response.content) == (204, b"")
        page = (await server.rest("runs.list", {}))[1]
        assert [run["run_id"] for run in page["items"]] == ["one", "two"]


async def test_batches_are_bounded() -> None:
    async with serve_in_process(options=ServiceOptions(batch_calls=3)) as server:
        assert len((await server.http.post("/rpc", json=[call("system.health")] * 3)).json()) == 3
        answer = (await server.http.post("/rpc", json=[call("system.health")] * 4)).json()
        assert answer["error"]["code"] == -32_600


async def test_calls_of_a_batch_share_commits() -> None:
    async with serve_in_process() as server:
        store: Any = server.app.runtime().store
        sizes: list[int] = []
        create = store.create

        async def counted(runs: Any, claim_for: str | None = None) -> Any:
            sizes.append(len(runs))
            return await create(runs, claim_for)

        store.create = counted
        batch = [call("runs.start", number, workflow="echo") for number in range(50)]
        answers = (await server.http.post("/rpc", json=batch)).json()
        assert len({answer["result"]["run_id"] for answer in answers}) == 50
        assert len(sizes) <= 3, sizes


async def test_what_http_refuses_is_a_problem() -> None:
    async with serve_in_process(options=ServiceOptions(body_bytes=50)) as server:
        assert (await server.http.post("/rpc", content=b"{}", headers={"content-type": "text/x"})).status_code == 415
        assert (await server.http.post("/rpc", content=b" " * 51, headers=HEADERS)).status_code == 413
