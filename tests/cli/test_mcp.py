"""`holdfast mcp`: the operations as tools of an assistant, with the rights of its token."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli.connection import Connection
from holdfast.cli.mcp import LINE_BYTES, PROTOCOLS, McpServer, describe_tool, tools_of
from holdfast.client.transports import InProcess
from holdfast.service import Principal
from holdfast.service.auth.roles import ROLES
from tests.service.in_process import make_app

ENGINEER = Principal(name="assistant", token_id="t", scopes=ROLES["engineer"])


class Assistant:
    """A client of the protocol."""

    def __init__(
        self, principal: Principal, app: hf.App, *, read_only: bool = False, connecting: type[Connection] = Connection
    ) -> None:
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        connection = connecting(InProcess(app, principal))
        self.server = McpServer(
            connection, tools_of(read_only=read_only), lambda line: self._answers.put_nowait(json.loads(line))
        )
        self._next = 0

    async def raw(self, line: bytes) -> dict[str, Any]:
        """Send a line, and return the answer."""
        self.server.take(line)
        async with asyncio.timeout(60):
            return await self._answers.get()

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a request, and return the answer."""
        self._next += 1
        message = {"jsonrpc": "2.0", "id": self._next, "method": method, "params": params}
        answer = await self.raw(json.dumps(message).encode())
        assert answer["id"] == self._next
        return answer

    async def call(self, tool: str, **arguments: Any) -> tuple[bool, Any]:
        """Call a tool; return whether it failed, and what it says."""
        result = (await self.ask("tools/call", name=tool, arguments=arguments))["result"]
        return result["isError"], json.loads(result["content"][0]["text"])


@asynccontextmanager
async def assisted(
    principal: Principal = ENGINEER, *, read_only: bool = False, connecting: type[Connection] = Connection
) -> AsyncIterator[Assistant]:
    app = make_app()
    async with app.node(hf.MemoryStore()):
        yield Assistant(principal, app, read_only=read_only, connecting=connecting)


@pytest.mark.contract("API-1")
async def test_an_assistant_starts_looks_signals_and_answers() -> None:
    async with assisted() as assistant:
        hello = (await assistant.ask("initialize", protocolVersion="2025-06-18"))["result"]
        assert (hello["protocolVersion"], hello["serverInfo"]["name"]) == ("2025-06-18", "holdfast")
        assistant.server.take(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')
        tools = {tool["name"]: tool for tool in (await assistant.ask("tools/list"))["result"]["tools"]}
        assert {"runs_start", "runs_list", "signals_send", "tasks_complete"} <= tools.keys()
        assert tools["runs_start"]["inputSchema"]["required"] == ["workflow"]
        failed, run = await assistant.call("runs_start", workflow="order", input={"order_id": "o-1"})
        assert not failed
        await assistant.call("signals_send", run_id=run["run_id"], name="approval", payload={"approved": True})
        _, outcome = await assistant.call("runs_result", run_id=run["run_id"], wait_s=20)
        assert outcome["result"] == "o-1: True"


@pytest.mark.contract("API-4")
async def test_a_tool_may_do_what_the_caller_may() -> None:
    viewer = Principal(name="viewer", token_id="v", scopes=ROLES["viewer"])
    async with assisted(viewer) as assistant:
        failed, said = await assistant.call("runs_start", workflow="order", input={"order_id": "a"})
        assert (failed, said["code"]) == (True, "NotPermitted")
        assert (await assistant.call("runs_list"))[0] is False


@pytest.mark.contract("API-2")
async def test_refusals_are_answers_with_their_codes() -> None:
    async with assisted() as assistant:
        assert (await assistant.call("runs_get", run_id="nowhere"))[1]["code"] == "NotFound"
        assert (await assistant.call("runs_start"))[1]["code"] == "InvalidInput"
        assert (await assistant.call("runs_start", workflow="order", nonsense=1))[1]["code"] == "InvalidInput"
        assert (await assistant.ask("tools/call", name="tokens_create"))["error"]["code"] == -32602
        assert (await assistant.ask("tools/call", name=7))["error"]["code"] == -32602
        assert (await assistant.ask("nonsense"))["error"]["code"] == -32601
        for line in (b"{", b"[]", b"7", b'{"jsonrpc": "2.0", "id": {}, "method": "ping"}', b"\xff"):
            assert (await assistant.raw(line))["error"]["code"] in (-32700, -32600)
        assert (await assistant.ask("ping"))["result"] == {}


@pytest.mark.contract("API-2")
async def test_whatever_comes_is_answered_under_its_own_id_and_an_answer_is_not() -> None:
    async with assisted() as assistant:
        for line, id, code in (
            (b'{"jsonrpc": "2.0", "id": 7, "method": "ping", "params": [1]}', 7, -32602),
            (
                b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"runs_list","arguments":[1]}}',
                7,
                -32602,
            ),
            (b'{"jsonrpc": "1.0", "id": 7, "method": "ping"}', 7, -32600),
            (b'{"jsonrpc": "2.0", "id": 7}', 7, -32600),
            (b'{"jsonrpc": "2.0", "id": true, "method": "ping"}', None, -32600),
            (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', None, -32600),
            (b'{"jsonrpc": "2.0", "id": 1.5, "method": "ping"}', None, -32600),
        ):
            answer = await assistant.raw(line)
            assert (answer["id"], answer["error"]["code"]) == (id, code), line
        assistant.server.take(b'{"jsonrpc": "2.0", "id": 7, "result": {}}')
        assistant.server.take(b'{"jsonrpc": "2.0", "method": "nonsense"}')
        await assistant.server.finish()
        assert (await assistant.ask("ping"))["result"] == {}


@pytest.mark.contract("API-1")
async def test_a_batch_is_answered_as_one() -> None:
    async with assisted() as assistant:
        ping = {"jsonrpc": "2.0", "method": "ping"}
        call = {"method": "tools/call", "params": {"name": "runs_list"}}
        batch = [{**ping, "id": 1}, ping, {**ping, "id": "1"}, 7, {**ping, **call, "id": 2}]
        answers: Any = await assistant.raw(json.dumps(batch).encode())
        assert [answer["id"] for answer in answers] == [1, "1", None, 2]
        assert answers[3]["result"]["isError"] is False
        assert (await assistant.raw(json.dumps([{**ping, "id": 1}] * 101).encode()))["error"]["code"] == -32600


async def test_a_request_with_an_id_that_is_taken_leaves_the_first_alone() -> None:
    async with assisted() as assistant:
        _, run = await assistant.call("runs_start", workflow="order", input={"order_id": "o-1"})
        slow = {"name": "runs_result", "arguments": {"run_id": run["run_id"], "wait_s": 20}}
        wait = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": slow}
        assistant.server.take(json.dumps(wait).encode())
        refused = await assistant.raw(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}')
        assert (refused["id"], refused["error"]["code"]) == (1, -32600)
        assistant.server.take(b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}')
        await assistant.server.finish()
        assert (await assistant.ask("ping"))["result"] == {}


async def test_one_that_waits_holds_nobody_up_and_can_be_cancelled() -> None:
    async with assisted() as assistant:
        _, run = await assistant.call("runs_start", workflow="order", input={"order_id": "o-1"})
        slow = {"name": "runs_result", "arguments": {"run_id": run["run_id"], "wait_s": 20}}
        wait = {"jsonrpc": "2.0", "id": "slow", "method": "tools/call", "params": slow}
        assistant.server.take(json.dumps(wait).encode())
        assert (await assistant.ask("ping"))["result"] == {}
        cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "slow"}}
        assistant.server.take(json.dumps(cancel).encode())
        await assistant.server.finish()  # without an answer to it
        assert (await assistant.ask("ping"))["result"] == {}


class Broken(Connection):
    """A connection with a mistake in its code."""

    async def __call__(self, name: str, ask: dict[str, Any]) -> Any:
        raise RuntimeError(f"{name} is broken")


async def test_a_tool_that_fails_unexpectedly_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with assisted(connecting=Broken) as assistant:
        failed = await assistant.ask("tools/call", name="runs_list")
        assert failed["error"]["code"] == -32603
        assert "RuntimeError: runs.list is broken" in caplog.text
        assert (await assistant.ask("ping"))["result"] == {}


def test_tools_that_change_nothing_can_be_had_alone() -> None:
    every, reading = tools_of(read_only=False), tools_of(read_only=True)
    assert "runs_start" in every
    assert "runs_start" not in reading
    assert not [name for name in every if name.startswith(("tokens", "audit", "tenants"))]
    for name, operation in every.items():
        described = describe_tool(name, operation)
        assert described["inputSchema"]["type"] == "object"
        assert described["description"]
        assert described["annotations"]["readOnlyHint"] is (name in reading)


@pytest.mark.process
def test_the_command_speaks_over_stdin_and_stdout(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    command = [sys.executable, "-m", "holdfast"]
    subprocess.run([*command, "store", "migrate", "--store", store], check=True, capture_output=True)
    asked = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "1999-01-01"}},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "runs_list"}},
    ]
    lines = "".join(f"{json.dumps(each)}\n" for each in asked)
    lines += '"' + "x" * (LINE_BYTES + 1) + '"\n' + "x" * (LINE_BYTES * 2)  # too long, with an end and without
    done = subprocess.run(
        [*command, "mcp", "--store", store], input=lines, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["error"]["code"] for answer in answers if "error" in answer] == [-32600] * 2
    first, second = (answer for answer in answers if "result" in answer)
    assert first["result"]["protocolVersion"] == PROTOCOLS[0]
    assert json.loads(second["result"]["content"][0]["text"])["items"] == []


@pytest.mark.process
def test_the_command_reads_a_file_too(tmp_path: Path) -> None:
    store, asked = f"sqlite:///{tmp_path}/a.db", tmp_path / "asked"
    command = [sys.executable, "-m", "holdfast"]
    subprocess.run([*command, "store", "migrate", "--store", store], check=True, capture_output=True)
    asked.write_text('{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n', encoding="utf-8")
    with asked.open() as lines:
        done = subprocess.run(
            [*command, "mcp", "--store", store], stdin=lines, capture_output=True, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"jsonrpc": "2.0", "id": 1, "result": {}}
