"""Every way to ask for an operation: REST, JSON-RPC, the client in process and over HTTP, and the command line.

All of them take a name and what is asked, and return a status and what was answered, so that one case runs on each.
"""

import asyncio
import io
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, asynccontextmanager, redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

import msgspec
import pydantic  # noqa: F401 - where an app has imported it, the command line checks with it what it is given

import holdfast as hf
from holdfast import errors
from holdfast.cli import call as call_module
from holdfast.cli import connection, generate, plans, runs
from holdfast.cli.commands import spec_of
from holdfast.cli.generate import arguments_of, fields_of
from holdfast.cli.main import main
from holdfast.client import Client
from holdfast.client.transports import Http, Transport
from holdfast.errors import HoldfastError
from holdfast.service.http.problems import problem_of, status_of
from holdfast.service.operations import OPERATIONS
from holdfast.service.registry import Operation
from tests.service.in_process import Answer, Caller, InProcessServer

CALLERS = ("REST", "JSON-RPC", "client in process", "client over HTTP", "command line")
ONCE = hf.Retry(max_attempts=1)


def caller_by_name(server: InProcessServer, name: str) -> Caller:
    """Return one of the ways."""
    if name == "REST":
        return server.rest
    if name == "JSON-RPC":
        return server.rpc
    return _Commands(server) if name == "command line" else _Asked(client_of(server, name))


def all_callers(server: InProcessServer) -> dict[str, Caller]:
    """Return all of them."""
    return {name: caller_by_name(server, name) for name in CALLERS}


def client_of(server: InProcessServer, how: str = "client over HTTP", retry: hf.Retry = ONCE) -> Client:
    """Return a client of a service."""
    if how == "client in process":
        return Client(server.app, retry=retry)
    return Client("http://shop", transport=server.http._transport, retry=retry)


class _Asked:
    """Asks by the methods of a client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __call__(self, name: str, ask: dict[str, Any]) -> Answer:
        resource, _, verb = name.partition(".")
        try:
            answer = await getattr(getattr(self._client, resource), verb)(**ask)
        except HoldfastError as error:
            problem = msgspec.to_builtins(problem_of(error, error.details.pop("correlation_id", "")))
            return problem["status"], problem
        assert isinstance(answer, OPERATIONS[name].response_type)
        return OPERATIONS[name].status, msgspec.json.decode(msgspec.json.encode(answer))


def words_of(operation: Operation, ask: dict[str, Any]) -> list[str]:
    """Return the words that stand for what is asked."""
    row, fields = spec_of(operation), fields_of(operation)
    first = arguments_of(row, fields)
    given = row.words.split() + [str(ask[name]) for name in first if name in ask]
    for name, value in ask.items():
        if name in first or name == row.rest or value is None:
            continue
        if isinstance(value, bool):
            given += [fields[name].option] if value else []
        else:
            for each in value if isinstance(value, list) else [value]:
                given += [fields[name].option, each if isinstance(each, str) else json.dumps(each)]
    return [*given, json.dumps(ask[row.rest])] if row.rest in ask else given


class _Commands:
    """Asks by the words of the command line, which is in another thread; what cannot be said so, by `call`."""

    def __init__(self, server: InProcessServer) -> None:
        self._over = Http("http://shop", None, 20.0, server.http._transport)

    async def __call__(self, name: str, ask: dict[str, Any]) -> Answer:
        loop = asyncio.get_running_loop()
        out, err = await asyncio.to_thread(self._run, _words(OPERATIONS[name], ask), loop)
        if out:
            return OPERATIONS[name].status, json.loads(out)
        told = json.loads(err)
        problem = {"code": told.pop("code"), "detail": told.pop("message")}
        problem["correlation_id"] = told.pop("correlation_id", "")
        return status_of(getattr(errors, problem["code"])), {**problem, "details": told}

    def _run(self, words: list[str], loop: asyncio.AbstractEventLoop) -> tuple[str, str]:
        @asynccontextmanager
        async def over_there(target: connection.Target) -> AsyncIterator[connection.Connection]:
            yield connection.Connection(_Elsewhere(self._over, loop))

        out, err = io.StringIO(), io.StringIO()
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, {"HOLDFAST_SERVER": "http://shop"}))
            for module in (generate, plans, runs, call_module):
                stack.enter_context(mock.patch.object(module, "connect", over_there))
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            main([*words, "--json"])
        return out.getvalue(), err.getvalue()


def _words(operation: Operation, ask: dict[str, Any]) -> list[str]:
    try:
        msgspec.convert(ask, operation.request_type)
    except msgspec.ValidationError:
        return ["call", operation.name, json.dumps(ask)]
    return words_of(operation, ask)


class _Elsewhere:
    """A transport that belongs to another loop."""

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop

    async def call(self, operation: Operation, fields: dict[str, Any]) -> bytes:
        asked = asyncio.run_coroutine_threadsafe(_awaited(self._transport, operation, fields), self._loop)
        return await asyncio.wrap_future(asked)

    def stream(self, operation: Operation, fields: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        raise NotImplementedError

    async def close(self) -> None:
        """Do nothing: it is closed where it is."""


async def _awaited(transport: Transport, operation: Operation, fields: dict[str, Any]) -> bytes:
    return await transport.call(operation, fields)
