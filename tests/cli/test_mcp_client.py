"""`holdfast mcp` as an assistant sees it: with the client of the protocol's own package, over stdin and stdout."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client

from tests.cli.command_process import command, environment, run, running
from tests.cli.shop import SHOP
from tests.examples.excerpts import free_port

pytestmark = [pytest.mark.process, pytest.mark.slow]

MOST_S = 60.0
STORE = "sqlite:///a.db"


PAGE = (Path(__file__).parents[2] / "docs" / "mcp.md").read_text()
MANAGED = """
import holdfast as hf

app = hf.App("shop")


@app.workflow
async def purchase(item: str) -> bool:
    return await hf.task("approve", bool, payload={"item": item}, roles=["manager"])
"""


@asynccontextmanager
async def assistant(folder: Path, port: int, token: str, *words: str) -> AsyncIterator[ClientSession]:
    """Give a client whose command has a token."""
    env = environment(HOLDFAST_SERVER=f"http://127.0.0.1:{port}", HOLDFAST_TOKEN=token)
    program, *arguments = command(*(words or ("mcp",)))
    server = StdioServerParameters(command=program, args=arguments, env=env, cwd=folder)
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        yield session


async def said(session: ClientSession, tool: str, **arguments: Any) -> tuple[bool, Any]:
    """Call a tool; return whether it failed, and what it says."""
    result: Any = await session.call_tool(tool, arguments)
    return bool(result.is_error), json.loads(result.content[0].text)


@pytest.mark.contract("API-1", "API-4")
async def test_a_client_of_the_protocol_works_with_the_rights_of_its_token(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    assert run(tmp_path, "store", "migrate", "--store", STORE).returncode == 0
    tokens = {
        role: run(tmp_path, "token", "create", role, "--role", role, "--store", STORE).stdout.strip()
        for role in ("engineer", "viewer")
    }
    port = free_port()
    serving = ("server", "shop.py", "--store", STORE, "--port", str(port))
    async with asyncio.timeout(2 * MOST_S), running(tmp_path, *serving) as server:
        await server.until("is served at")
        async with assistant(tmp_path, port, tokens["engineer"]) as engineer:
            listed = await engineer.list_tools()
            assert {"runs_start", "runs_list", "signals_send", "tasks_complete"} <= {each.name for each in listed.tools}
            _, order = await said(engineer, "runs_start", workflow="order", input={"order_id": "o-1"})
            await said(engineer, "signals_send", run_id=order["run_id"], name="approval", payload={"approved": True})
            _, outcome = await said(engineer, "runs_result", run_id=order["run_id"], wait_s=20)
            assert outcome["result"] == "o-1: True"
            _, asking = await said(engineer, "runs_start", workflow="asking", input={"who": "ann"})
            tasks: list[dict[str, Any]] = []
            while not tasks:
                _, page = await said(engineer, "tasks_list", run_id=asking["run_id"], status="OPEN")
                tasks = page["items"]
            failed, completed = await said(engineer, "tasks_complete", task_id=tasks[0]["task_id"], answer=True)
            assert not failed, completed
            _, outcome = await said(engineer, "runs_result", run_id=asking["run_id"], wait_s=20)
            assert outcome["result"] is True
        async with assistant(tmp_path, port, tokens["viewer"]) as viewer:
            failed, refusal = await said(viewer, "runs_start", workflow="order", input={"order_id": "o-2"})
            assert (failed, refusal["code"]) == (True, "NotPermitted")
            failed, page = await said(viewer, "runs_list")
            assert not failed
            assert order["run_id"] in {item["run_id"] for item in page["items"]}


@pytest.mark.contract("API-4")
async def test_an_assistant_with_the_configuration_of_the_page_looks_and_answers(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(MANAGED)
    assert run(tmp_path, "store", "migrate", "--store", "sqlite:///shop.db").returncode == 0
    [create] = re.findall(r"^\$ holdfast (.*)$", PAGE, re.MULTILINE)
    token = run(tmp_path, *create.split()).stdout.strip()
    [shown] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    server = json.loads(shown)["mcpServers"]["holdfast"]
    assert server["command"] == "holdfast"
    assert server["env"].keys() == {"HOLDFAST_SERVER", "HOLDFAST_TOKEN"}
    [only_looking] = re.findall(r'`"args": (\[.*?\])`', PAGE)
    port = free_port()
    serving = ("server", "shop.py", "--store", "sqlite:///shop.db", "--port", str(port))
    async with asyncio.timeout(2 * MOST_S), running(tmp_path, *serving) as process:
        await process.until("is served at")
        started = run(
            tmp_path, "run", "start", "purchase", "item=desk", "--store", "sqlite:///shop.db", "--app", "shop.py"
        )
        assert started.returncode == 0, started.stderr
        async with assistant(tmp_path, port, token, *server["args"]) as helper:
            tasks: list[dict[str, Any]] = []
            while not tasks:
                _, page = await said(helper, "tasks_list", status="OPEN")
                tasks = page["items"]
            failed, task = await said(helper, "tasks_complete", task_id=tasks[0]["task_id"], answer=True)
            assert (failed, task["completed_by"]) == (False, "assistant")
            failed, refusal = await said(helper, "runs_start", workflow="purchase", input={"item": "car"})
            assert (failed, refusal["code"]) == (True, "NotPermitted")
        async with assistant(tmp_path, port, token, *json.loads(only_looking)) as reader:
            names = {each.name for each in (await reader.list_tools()).tools}
            assert "runs_list" in names
            assert not names & {"runs_start", "tasks_complete", "tokens_create", "audit_list"}
