"""Callers with tokens, on a service that asks for them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
from msgspec.structs import replace

from holdfast.app import App
from holdfast.core.access import write_token
from holdfast.service.auth.tokens import TokenAccess, make_token, revoke_token
from holdfast.service.operations import OPERATIONS
from holdfast.service.options import ServiceOptions
from holdfast.store.port import Store
from tests.service.in_process import InProcessServer, make_app, serve_in_process

TRANSPORTS = ("rest", "rpc")


def bearer_header(token: str) -> dict[str, str]:
    """Return the headers of somebody with a token."""
    return {"authorization": f"Bearer {token}"}


@asynccontextmanager
async def serve_with_tokens(
    store: str | Store = "memory://", *, app: App | None = None, options: ServiceOptions | None = None
) -> AsyncIterator[InProcessServer]:
    """Serve an app to those who have tokens."""
    app = app or make_app()
    options = options or ServiceOptions()
    async with serve_in_process(
        store, app=app, options=options, authenticate=TokenAccess(app, options.tokens_s)
    ) as server:
        yield server


def store_of(server: InProcessServer) -> Store:
    """Return the store behind a service."""
    return server.app.runtime().store


async def token_for(server: InProcessServer, role: str = "admin", **fields: Any) -> str:
    """Make a token on the store, as the command line does."""
    return (await make_token(store_of(server), fields.pop("name", "ann"), role=role, **fields))[0]


async def useless_tokens(server: InProcessServer) -> dict[str, str]:
    """Return tokens that were good, look good, or are not good enough."""
    store = store_of(server)
    revoked, record = await make_token(store, "rita", role="admin")
    await revoke_token(store, record, "ann")
    expired, record = await make_token(store, "ed", role="admin", expires_in_s=1)
    ended = replace(record, token_id="e" * 16, expires_at=record.created_at)
    await store.put_tokens([ended])
    good = await token_for(server)
    return {
        "revoked": revoked,
        "expired": write_token(ended.token_id, expired[26:-8]),
        "unknown": write_token("0" * 16, "f" * 64),
        "another's secret": write_token(good[9:25], revoked[26:-8]),
        "cut short": good[:-1],
    }


async def call_operation(
    server: InProcessServer, transport: str, name: str, fields: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    """Ask for an operation on a transport."""
    if transport == "rpc":
        call = {"jsonrpc": "2.0", "id": 1, "method": name, "params": fields}
        return await server.http.post("/rpc", json=call, headers=headers)
    operation, left = OPERATIONS[name], dict(fields)
    path = operation.path
    for field in operation.path_fields:
        path = path.replace(f"{{{field}}}", quote(str(left.pop(field)), safe=""))
    if operation.has_body:
        return await server.http.request(operation.verb, path, headers=headers, json=left)
    return await server.http.request(operation.verb, path, headers=headers, params=left)


async def status_at(server: InProcessServer, address: str, headers: dict[str, str]) -> int:
    """Return how an address is answered to a reader who goes away at once, so that streams end too."""
    path, _, query = address.partition("?")
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    transport: Any = server.http._transport
    await transport.app(scope, receive, send)
    return statuses[0]


def problem_in(response: httpx.Response) -> dict[str, Any] | None:
    """Return the problem that an answer holds, if it is a refusal."""
    body = response.json()
    if response.status_code >= 400:
        return dict(body)
    return dict(body["error"]["data"]) if "jsonrpc" in body and "error" in body else None


def code_in(response: httpx.Response) -> str:
    """Return the code of the problem in an answer, or nothing."""
    problem = problem_in(response)
    return "" if problem is None else str(problem["code"])
