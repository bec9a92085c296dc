"""`holdfast mcp`: the operations as tools of the Model Context Protocol, for assistants, over stdin and stdout.

Each tool is an operation of the catalogue with the same schema, sent to a server with the caller's token, or to a
store. An assistant may do what its token permits, and the audit log records it under the name of that token. Each line
is one JSON-RPC 2.0 message. This module must not offer operations on tokens, or write anything but messages to stdout.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping
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
"""The supported revisions of the protocol, the newest first."""

RESOURCES = ("runs", "signals", "tasks", "workflows", "plans", "schedules", "letters", "system")
"""The resources that have tools. Tokens, tenants and the audit log are for people."""

LINE_BYTES = 4 * 1024 * 1024
"""The maximum size of a message."""

READ_BYTES = 64 * 1024

AT_ONCE = 16
"""The maximum number of concurrent tool calls."""

BATCH = 100
"""The maximum number of messages in a batch, if the client's revision of the protocol has batches."""

NO_REQUEST = "this is not a JSON-RPC 2.0 request"

PARSE_ERROR, INVALID_REQUEST, NO_METHOD, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603

Json = dict[str, Any]

logger = logging.getLogger("holdfast.mcp")


def tools_of(*, read_only: bool) -> dict[str, Operation]:
    """Return the operations that are tools, by tool name."""
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
    """Answers messages of one client. `send` receives each answer."""

    def __init__(self, connection: Connection, tools: Mapping[str, Operation], send: Callable[[bytes], None]) -> None:
        self._connection = connection
        self._tools = tools
        self._send = send
        self._room = asyncio.Semaphore(AT_ONCE)
        self._requests: dict[str, asyncio.Task[Json]] = {}
        self._working: set[asyncio.Task[None]] = set()

    def take(self, line: bytes) -> None:
        """Handle a message, or a batch. Responses are written as soon as they are ready, in any order."""
        try:
            message = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            self._say(_refused(None, PARSE_ERROR, "this is not JSON"))
            return
        is_batch = isinstance(message, list)
        if is_batch and not 1 <= len(message) <= BATCH:
            self._say(_refused(None, INVALID_REQUEST, f"a batch has 1 to {BATCH} messages"))
            return
        begun = [self._begin(each) for each in (message if is_batch else [message])]
        task = asyncio.create_task(self._finish(begun, is_batch=is_batch), name="mcp")
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    def refuse_long(self) -> None:
        """Refuse a message that is too long to be read."""
        self._say(_refused(None, INVALID_REQUEST, f"a message has at most {LINE_BYTES} bytes"))

    async def finish(self) -> None:
        """Wait for the running calls: the client sends nothing more."""
        while self._working:
            await asyncio.wait([*self._working])

    def _begin(self, message: Any) -> "asyncio.Task[Json] | Json | None":
        """Start to answer a message; return the task for that, or the answer, or None if there is none."""
        if not isinstance(message, dict):
            return _refused(None, INVALID_REQUEST, NO_REQUEST)
        id, method, params = message.get("id"), message.get("method"), message.get("params") or {}
        if not isinstance(id, str | int) or isinstance(id, bool):
            id = None
        if message.get("jsonrpc") != "2.0" or not isinstance(method, str):
            is_answer = method is None and ("result" in message or "error" in message)
            return None if is_answer else _refused(id, INVALID_REQUEST, NO_REQUEST)
        if "id" not in message:
            if method == "notifications/cancelled" and isinstance(params, dict):
                self._cancel(params.get("requestId"))
            return None
        if id is None:
            return _refused(None, INVALID_REQUEST, "an id is a text or a whole number")
        if not isinstance(params, dict):
            return _refused(id, INVALID_PARAMS, "params are an object")
        if _key(id) in self._requests:
            return _refused(id, INVALID_REQUEST, "a request with this id is not answered yet")
        task = asyncio.create_task(self._answer(id, method, params), name=f"mcp {method}")
        self._requests[_key(id)] = task
        task.add_done_callback(lambda _: self._requests.pop(_key(id), None))
        return task

    async def _finish(self, begun: "list[asyncio.Task[Json] | Json | None]", *, is_batch: bool) -> None:
        """Send the answers to a message, or to all of a batch. A cancelled request has no answer."""
        tasks = [each for each in begun if isinstance(each, asyncio.Task)]
        if tasks:
            await asyncio.wait(tasks)
        answers: list[Json] = []
        for each in begun:
            if not isinstance(each, asyncio.Task):
                answers += [] if each is None else [each]
            elif not each.cancelled():
                answers.append(each.result())
        if answers:
            self._say(answers if is_batch else answers[0])

    def _cancel(self, id: Any) -> None:
        task = self._requests.get(_key(id))
        if task is not None:
            task.cancel()

    async def _answer(self, id: str | int, method: str, params: Json) -> Json:
        if method == "initialize":
            return _result(id, self._initialize(params))
        if method == "ping":
            return _result(id, {})
        if method == "tools/list":
            return _result(id, {"tools": [describe_tool(name, each) for name, each in self._tools.items()]})
        if method == "tools/call":
            return await self._call(id, params)
        return _refused(id, NO_METHOD, f"there is no method {method!r}")

    def _initialize(self, params: Json) -> Json:
        asked = params.get("protocolVersion")
        return {
            "protocolVersion": asked if asked in PROTOCOLS else PROTOCOLS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "holdfast", "version": version("holdfast")},
        }

    async def _call(self, id: str | int, params: Json) -> Json:
        name, arguments = params.get("name"), params.get("arguments") or {}
        operation = self._tools.get(name) if isinstance(name, str) else None
        if operation is None:
            return _refused(id, INVALID_PARAMS, f"there is no tool {name!r}")
        if not isinstance(arguments, dict):
            return _refused(id, INVALID_PARAMS, "arguments: an object")
        async with self._room:
            try:
                answer = await self._connection(operation.name, arguments)
            except HoldfastError as problem:
                return _result(id, _content(problem.as_dict(), is_error=True))
            except Exception:  # without an answer the client would wait forever
                logger.exception("tool %s has failed", name)
                return _refused(
                    id, INTERNAL_ERROR, f"tool {name!r} has failed here; stderr of `holdfast mcp` has the error"
                )
        return _result(id, _content(answer))

    def _say(self, answer: Json | list[Json]) -> None:
        self._send(msgspec.json.encode(answer))


def _key(id: Any) -> str:
    """Return an id as a key: 1 and "1" are two requests."""
    return repr(id)


def _result(id: str | int, result: Json) -> Json:
    return {"jsonrpc": "2.0", "id": id, "result": result}


def _refused(id: str | int | None, code: int, text: str) -> Json:
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": text}}


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
    transport: asyncio.ReadTransport | asyncio.Task[None]
    try:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    except ValueError:  # stdin is a file, which can be read directly
        transport = asyncio.create_task(_feed(reader), name="stdin")
    try:
        async with connect(target) as connection:
            server = McpServer(connection, tools, send)
            async for line in _lines(reader):
                if line is None:
                    server.refuse_long()
                elif line.strip():
                    server.take(line)
            await server.finish()
    finally:
        if isinstance(transport, asyncio.Task):
            transport.cancel()
        else:
            transport.close()


async def _feed(reader: asyncio.StreamReader) -> None:
    while part := await asyncio.to_thread(sys.stdin.buffer.read, READ_BYTES):
        reader.feed_data(part)
    reader.feed_eof()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes | None]:
    """Yield the lines as they arrive, and None for a line that is too long, which is discarded."""
    is_long = False
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as over:
            await reader.readexactly(over.consumed)
            if not is_long:
                yield None
            is_long = True
            continue
        except asyncio.IncompleteReadError as end:
            if end.partial and not is_long:
                yield end.partial
            return
        if not is_long:
            yield line
        is_long = False
