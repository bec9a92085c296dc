"""`holdfast mcp`: the operations as tools of the Model Context Protocol, for assistants, over stdin and stdout.

Each tool is an operation of the catalogue, with its own schema, asked of a server with the caller's token, or of a
store. So an assistant may do what its token may do, and what it does is in the audit log under that token's name. One
line is one message of JSON-RPC 2.0. May not: offer operations on tokens, or write anything but messages to stdout.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from holdfast.cli.connection import Connection, Target, connect
from holdfast.cli.exit_codes import OK
from holdfast.errors import HoldfastError
from holdfast.service.operations import OPERATIONS
from holdfast.service.registry import Operation

PROTOCOLS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""The revisions of the protocol whose messages these are, the newest first."""

RESOURCES = ("runs", "signals", "tasks", "workflows", "plans", "schedules", "letters", "system")
"""What tools are about. Tokens, tenants and the audit log are for people."""

LINE_BYTES = 4 * 1024 * 1024
"""How large a message may be."""

AT_ONCE = 16
"""How many tools may be at work at the same time."""

PARSE_ERROR, INVALID_REQUEST, NO_METHOD, INVALID_PARAMS = -32700, -32600, -32601, -32602

Json = dict[str, Any]


def tools_of(*, read_only: bool) -> dict[str, Operation]:
    """Return the operations that are tools, by the names of these."""
    shown = (each for each in OPERATIONS.values() if each.resource in RESOURCES)
    return {each.name.replace(".", "_"): each for each in shown if each.verb == "GET" or not read_only}


def describe_tool(name: str, operation: Operation) -> Json:
    """Return a tool as `tools/list` shows it."""
    (schema,), components = msgspec.json.schema_components([operation.request_type], ref_template="#/$defs/{name}")
    own = components.pop(operation.request_type.__name__, schema)
    described = {key: value for key, value in own.items() if key != "title"}
    if components:
        described["$defs"] = components
    return {
        "name": name,
        "description": operation.doc,
        "inputSchema": {"type": "object", "properties": {}, **described},
        "annotations": {"readOnlyHint": operation.verb == "GET"},
    }


class McpServer:
    """Answers messages of one client. `send` takes each answer."""

    def __init__(self, connection: Connection, tools: Mapping[str, Operation], send: Callable[[bytes], None]) -> None:
        self._connection = connection
        self._tools = tools
        self._send = send
        self._room = asyncio.Semaphore(AT_ONCE)
        self._working: dict[Any, asyncio.Task[None]] = {}

    def take(self, line: bytes) -> None:
        """Take a message. It is answered when its answer is there, whatever came before it."""
        try:
            message = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            self._refuse(None, PARSE_ERROR, "this is no JSON")
            return
        if (
            not isinstance(message, dict)
            or message.get("jsonrpc") != "2.0"
            or not isinstance(message.get("method"), str)
        ):
            self._refuse(None, INVALID_REQUEST, "this is no request of JSON-RPC 2.0")
            return
        params = message.get("params") or {}
        if "id" not in message:
            if message["method"] == "notifications/cancelled" and isinstance(params, dict):
                self._cancel(params.get("requestId"))
            return
        id = message["id"]
        if not isinstance(id, str | int) or not isinstance(params, dict):
            self._refuse(None, INVALID_REQUEST, "an id is a text or a number, and params are an object")
            return
        task = asyncio.create_task(self._answer(id, message["method"], params), name=f"mcp {message['method']}")
        self._working[id] = task
        task.add_done_callback(lambda _: self._working.pop(id, None))

    async def finish(self) -> None:
        """Wait for what is at work: the client sends nothing more."""
        while self._working:
            await asyncio.wait([*self._working.values()])

    def _cancel(self, id: Any) -> None:
        task = self._working.get(id) if isinstance(id, str | int) else None
        if task is not None:
            task.cancel()

    async def _answer(self, id: str | int, method: str, params: Json) -> None:
        if method == "initialize":
            self._result(id, self._initialize(params))
        elif method == "ping":
            self._result(id, {})
        elif method == "tools/list":
            self._result(id, {"tools": [describe_tool(name, each) for name, each in self._tools.items()]})
        elif method == "tools/call":
            await self._call(id, params)
        else:
            self._refuse(id, NO_METHOD, f"there is no method {method!r}")

    def _initialize(self, params: Json) -> Json:
        asked = params.get("protocolVersion")
        return {
            "protocolVersion": asked if asked in PROTOCOLS else PROTOCOLS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "holdfast", "version": version("holdfast")},
        }

    async def _call(self, id: str | int, params: Json) -> None:
        name, arguments = params.get("name"), params.get("arguments") or {}
        operation = self._tools.get(name) if isinstance(name, str) else None
        if operation is None or not isinstance(arguments, dict):
            self._refuse(
                id, INVALID_PARAMS, f"there is no tool {name!r}" if operation is None else "arguments: an object"
            )
            return
        async with self._room:
            try:
                answer = await self._connection(operation.name, arguments)
            except HoldfastError as problem:
                self._result(id, _content(problem.as_dict(), is_error=True))
                return
        self._result(id, _content(answer))

    def _result(self, id: str | int, result: Json) -> None:
        self._send(msgspec.json.encode({"jsonrpc": "2.0", "id": id, "result": result}))

    def _refuse(self, id: str | int | None, code: int, text: str) -> None:
        self._send(msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": text}}))


def _content(value: Any, *, is_error: bool = False) -> Json:
    text = msgspec.json.encode(value).decode()
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def mcp(
    *,
    read_only: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    target: Target | None = None,
) -> int:
    """Offer the operations as tools of the Model Context Protocol, over stdin and stdout, until stdin ends.

    A token decides what the tools may do: `--token`, or HOLDFAST_TOKEN.

    Parameters
    ----------
    read_only: bool
        Offer only tools that change nothing.
    """
    asyncio.run(_serve(target or Target(), tools_of(read_only=read_only)))
    return OK


async def _serve(target: Target, tools: Mapping[str, Operation]) -> None:
    def send(line: bytes) -> None:
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    try:
        async with connect(target) as connection:
            server = McpServer(connection, tools, send)
            while line := await reader.readline():
                if line.strip():
                    server.take(line)
            await server.finish()
    finally:
        transport.close()
