"""Whom a command asks: a server over HTTP, or a store directly. The operations are the same either way."""

import asyncio
import getpass
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol
from urllib.parse import quote

import msgspec
from cyclopts import Group, Parameter

from holdfast import errors
from holdfast.cli.target import load_app, settings_at
from holdfast.engine.app import App
from holdfast.errors import EngineError, HoldfastError, InvalidInput, NotFound, StoreUnavailable
from holdfast.service.asking import Reader
from holdfast.service.calling import Principal, Service, make_service
from holdfast.service.operations import CATALOGUE
from holdfast.service.problems import METHOD_NOT_FOUND
from holdfast.store.opening import open_existing

DEFAULT_SERVER = "http://127.0.0.1:8321"
ANSWER_S = 45.0
"""How long an answer may take, beside what is asked to be waited for. A server gives up before that."""

LOOK_S = 0.25
"""How often to look for news of a run that is being followed, where nobody rings."""

logger = logging.getLogger("holdfast.cli")

SHARED = Group("Whom to ask, and how to answer", sort_key=100)


class Caller(Protocol):
    """Asks for operations, of whoever the target names."""

    async def __call__(self, name: str, ask: dict[str, Any]) -> Any:
        """Return the answer of an operation as plain values; raise the error that it is refused with."""
        ...

    def bell(self, run_id: str) -> AsyncGenerator[None, None]:
        """Ring at once, and then whenever something may have happened in a run. It may ring too often."""
        ...


@Parameter(name="*", group=SHARED)
@dataclass(frozen=True)
class Target:
    """What every command that asks something takes."""

    server: Annotated[
        str | None, Parameter(help=f"The address of a server; otherwise HOLDFAST_SERVER, then {DEFAULT_SERVER}.")
    ] = None
    token: Annotated[str | None, Parameter(help="What the server knows you by; otherwise HOLDFAST_TOKEN.")] = None
    store: Annotated[
        str | None, Parameter(help="The address of a store, to ask it directly; otherwise HOLDFAST_STORE.")
    ] = None
    app: Annotated[
        str | None, Parameter(help="With a store, the app: for what needs the code of workflows, such as starting one.")
    ] = None
    json: Annotated[bool, Parameter(negative="", show_default=False, help="Answer with JSON.")] = False


@asynccontextmanager
async def calling(target: Target) -> AsyncIterator[Caller]:
    """Open the way to whom the target names: arguments first, then the environment."""
    if target.server is not None and (target.store is not None or target.app is not None):
        raise InvalidInput("--server is asked over HTTP, --store and --app are not: give one or the other")
    environment = os.environ
    server = target.server
    if server is None and target.store is None and target.app is None:
        server = environment.get("HOLDFAST_SERVER")
        if server is None and "HOLDFAST_STORE" not in environment:
            server = DEFAULT_SERVER
    if server is not None:
        async with _over_http(server, target.token or environment.get("HOLDFAST_TOKEN")) as caller:
            yield caller
    else:
        async with _in_process(target) as caller:
            yield caller


@asynccontextmanager
async def _in_process(target: Target) -> AsyncIterator[Caller]:
    settings = settings_at(target.store)
    app = load_app(target.app) if target.app is not None else App("holdfast")
    try:
        store = await open_existing(settings)
    except StoreUnavailable as problem:
        told = f"{problem.message} (make one with `holdfast store migrate`, or name another with --store)"
        raise StoreUnavailable(told, **problem.details) from problem
    try:
        async with app.connect(store):
            yield _InProcess(make_service(app))
    finally:
        await store.close()


class _InProcess:
    """Asks a service in this process, as somebody who may do everything."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._principal = Principal(name=_user(), is_admin=True)

    async def __call__(self, name: str, ask: dict[str, Any]) -> Any:
        if name not in CATALOGUE:
            raise _unknown(name)
        operation = CATALOGUE[name]
        asked = Reader(operation).from_json(msgspec.json.encode(ask))
        call = self._service.call(self._principal, self._service.ids.new_id())
        answer = await operation.carry_out(call, asked)
        return msgspec.json.decode(msgspec.json.encode(answer))

    def bell(self, run_id: str) -> AsyncGenerator[None, None]:
        return _every(LOOK_S)


async def _every(seconds: float) -> AsyncGenerator[None, None]:
    while True:
        yield
        await asyncio.sleep(seconds)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return "operator"


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no operation {name!r}: `holdfast call` lists them", operation=name)


@asynccontextmanager
async def _over_http(server: str, token: str | None) -> AsyncIterator[Caller]:
    import httpx  # here, because it takes longer to import than most commands take

    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    try:
        is_address = bool(httpx.URL(server).host) and server.startswith(("http://", "https://"))
    except httpx.InvalidURL:
        is_address = False
    if not is_address:
        raise InvalidInput(f"the server {server!r} is no address such as {DEFAULT_SERVER}")
    is_secret = server.startswith("https://")  # certificates are read only where some are checked
    async with httpx.AsyncClient(base_url=server, headers=headers, verify=is_secret) as http:
        yield _OverHttp(server, http, httpx.HTTPError)


class _OverHttp:
    """Asks a server, by JSON-RPC; where it streams events, it is told by them that there is something new."""

    def __init__(self, server: str, http: Any, failures: type[Exception]) -> None:
        self._server = server
        self._http = http
        self._failures = failures

    async def __call__(self, name: str, ask: dict[str, Any]) -> Any:
        request = {"jsonrpc": "2.0", "id": 1, "method": name, "params": ask}
        try:
            response = await self._http.post("/rpc", json=request, timeout=ANSWER_S + ask.get("wait_s", 0.0))
        except self._failures as problem:
            told = "start one with `holdfast dev`, or name it with --server, or a store with --store"
            raise EngineError(f"no server answers at {self._server}: {told}") from problem
        return _answer(self._server, name, response.content)

    async def bell(self, run_id: str) -> AsyncGenerator[None, None]:
        try:
            path = f"/v1/runs/{quote(run_id, safe='')}/stream"
            async with self._http.stream("GET", path, timeout=ANSWER_S) as response:
                if response.status_code == 200:
                    async for _ in response.aiter_raw():
                        yield
        except self._failures as problem:  # the stream is only a bell: without it we look now and then
            logger.debug("the stream of run %s has ended: %r", run_id, problem)
        async for _ in _every(LOOK_S):
            yield


def _answer(server: str, name: str, content: bytes) -> Any:
    try:
        answer = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeError) as problem:
        raise EngineError(f"what answers at {server} is no Holdfast server") from problem
    if isinstance(answer, dict) and "result" in answer:
        return answer["result"]
    refusal = answer.get("error", answer) if isinstance(answer, dict) else {}
    if refusal.get("code") == METHOD_NOT_FOUND:
        raise _unknown(name)
    told = refusal.get("data") or refusal
    if "detail" not in told:
        raise EngineError(f"what answers at {server} is no Holdfast server")
    raise _error(told)


def _error(told: dict[str, Any]) -> HoldfastError:
    kind = getattr(errors, str(told.get("code")), None)
    if not (isinstance(kind, type) and issubclass(kind, HoldfastError)):
        kind = EngineError if int(told.get("status", 500)) >= 500 else errors.CallerError
    details = told.get("details") or {}
    return kind(told["detail"], **{field: value for field, value in details.items() if field != "message"})
