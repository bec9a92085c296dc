"""The client: what it gives and raises, its streams, and what happens when the way is bad."""

import asyncio
import json
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import holdfast as hf
from holdfast.client import Client, SyncClient, resources
from holdfast.client.transports import Unreachable, error_of
from holdfast.errors import Conflict, EngineError, HoldfastError, InvalidInput, NotFound, RateLimited
from holdfast.service.http.problems import problem_of
from holdfast.service.operations import DOWNLOADS, OPERATIONS, STREAMS
from tests.service.callers import client_of
from tests.service.in_process import make_app, serve_in_process
from tests.service.stream_readers import served, settled
from tools.client_stubs import STUBS, flat, stubs

QUICKLY = hf.Retry(max_attempts=4, initial_ms=1)


@pytest.mark.contract("API-1")
def test_no_operation_is_missing_in_the_client() -> None:
    for name, operation in {**OPERATIONS, **STREAMS, **DOWNLOADS}.items():
        resource, _, verb = name.partition(".")
        for prefix in ("", "Sync"):
            method = getattr(getattr(resources, prefix + resource.title()), verb)
            assert method.__doc__ == operation.doc
    assert resources.STREAMED == STREAMS
    for kind in (Client, SyncClient):
        source = kind.__init__.__code__.co_names
        assert set(resources.RESOURCES) <= set(source), f"{kind.__name__} lacks one of {resources.RESOURCES}"


@pytest.mark.contract("API-1")
def test_the_stubs_are_those_of_the_catalogue() -> None:
    assert flat(stubs()) == flat(STUBS.read_text(encoding="utf-8")), "run `python -m tools.client_stubs`"


@pytest.mark.parametrize("how", ["client in process", "client over HTTP"])
async def test_answers_are_equal_and_typed_whatever_the_way(how: str) -> None:
    async with serve_in_process() as server:
        client, other = client_of(server, how), client_of(server, "client in process")
        run = await client.runs.start("order", input={"order_id": "o-1"}, request_id="r")
        assert run == await other.runs.start("order", input={"order_id": "o-1"}, request_id="r")
        receipt = await client.signals.send(run.run_id, "approval", payload={"approved": True}, signal_id="s")
        assert receipt == await other.signals.send(run.run_id, "approval", payload={"approved": True}, signal_id="s")
        assert await client.result(run.run_id, str) == "o-1: True"
        assert await client.runs.snapshot(run.run_id) == await other.runs.snapshot(run.run_id)
        with pytest.raises(Conflict):
            await client.runs.start("order", input={"order_id": "o-2"}, request_id="r")
        failing = await client.runs.start("failing")
        with pytest.raises(hf.errors.RunFailed, match="by design"):
            await client.result(failing.run_id)
        stopped = await client.runs.start("patient")
        await client.runs.terminate(stopped.run_id, wait=True)
        with pytest.raises(hf.errors.RunCancelled):
            await client.result(stopped.run_id)
        for bad in ({"colour": "red"}, {"workflow": "order", "colour": "red"}):
            with pytest.raises(InvalidInput):
                await client.runs.start("order", **bad)  # type: ignore[arg-type]


class BadWay(httpx.AsyncBaseTransport):
    """A way on which answers get lost, or somebody answers who should not."""

    def __init__(self, way: httpx.AsyncBaseTransport, *mishaps: str) -> None:
        self._way = way
        self._mishaps = list(mishaps)
        self.bodies: list[bytes] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(await request.aread())
        mishap = self._mishaps.pop(0) if self._mishaps else ""
        if mishap == "refused":
            raise httpx.ConnectError("nobody listens")
        if mishap == "proxy":
            return httpx.Response(502, content=b"<html>")
        response = await self._way.handle_async_request(request)
        if mishap == "lost":
            raise httpx.ReadError("the answer was lost")
        return response


@pytest.mark.contract("QUE-1", "SIG-5")
async def test_what_failed_on_its_way_is_asked_again_under_the_same_id_and_done_once() -> None:
    async with serve_in_process() as server:
        way = BadWay(server.http._transport, "refused", "lost", "proxy")
        client = Client("http://shop", transport=way, retry=QUICKLY)
        run = await client.runs.start("patient")
        assert len(way.bodies) == 4
        assert len(set(way.bodies)) == 1
        assert [each.run_id for each in (await client.runs.list()).items] == [run.run_id]
        way._mishaps = ["lost", "lost"]
        await client.signals.send(run.run_id, "other")
        way._mishaps = ["lost"]
        sent = await client.signals.send_many([{"run_id": run.run_id, "name": "other"}])
        assert sent.items[0].problem is None
        assert len((await client.signals.mailbox(run.run_id)).items) == 2
        way._mishaps = ["refused"] * 4
        with pytest.raises(Unreachable, match="nobody listens"):
            await client.runs.get(run.run_id)


async def test_what_was_refused_is_not_asked_again() -> None:
    async with serve_in_process() as server:
        way = BadWay(server.http._transport)
        client = Client("http://shop", transport=way, retry=QUICKLY)
        with pytest.raises(NotFound) as caught:
            await client.runs.get("nowhere")
        assert caught.value.details["correlation_id"]
        assert len(way.bodies) == 1


@pytest.mark.contract("API-2")
def test_errors_are_rebuilt_by_their_codes() -> None:
    def kinds(of: type[HoldfastError]) -> list[type[HoldfastError]]:
        return [of, *(kind for child in of.__subclasses__() for kind in kinds(child))]

    for kind in kinds(HoldfastError):
        if kind.__module__ == "holdfast.errors" and kind is not HoldfastError and not kind.__name__.startswith("_"):
            problem = problem_of(kind("because", field="x"), "c-1")
            error = error_of(problem.status, msgspec.json.encode(problem))
            assert (type(error), error.message, error.details["field"]) == (kind, "because", "x")
    unknown = msgspec.structs.replace(problem_of(RateLimited("later"), "c"), code="Newfangled")
    assert type(error_of(503, msgspec.json.encode(unknown))) is EngineError
    assert isinstance(error_of(418, b"tea"), hf.errors.CallerError)


@asynccontextmanager
async def over(how: str, tmp_path: Path) -> AsyncIterator[tuple[Client, Callable[[], int]]]:
    """Give a client whose streams are real ones, and how many of them are open."""
    async with served(f"sqlite:///{tmp_path}/s.db") as shop:
        made = Client(shop.app) if how == "in process" else Client(f"http://127.0.0.1:{shop.port}", retry=QUICKLY)
        async with made as client:
            service = getattr(client._calls._transport, "_service", shop.service)
            yield client, lambda: service.change_feeds.subscribers


@pytest.mark.contract("API-1", "API-3")
@pytest.mark.parametrize("how", ["in process", "http"])
async def test_streams_are_read_to_their_end_or_left(how: str, tmp_path: Path) -> None:
    async with over(how, tmp_path) as (client, watching):
        run = await client.runs.start("order", input={"order_id": "o-1"})
        seen = []
        async for event in client.runs.stream(run.run_id):
            seen.append(event)
            if event.event_type == "SignalWaiting":
                await client.signals.send(run.run_id, "approval", payload={"approved": True})
        assert seen == (await client.runs.events(run.run_id)).items
        assert [event.run_seq async for event in client.runs.stream(run.run_id, after=2)] == list(
            range(3, len(seen) + 1)
        )
        with pytest.raises(NotFound):
            await anext(aiter(client.runs.stream("nowhere")))
        lists: Any = client.lists.stream(kinds="runs,tasks", workflow="asking")
        assert await anext(lists) == ("reset", {})
        asking = await client.runs.start("asking", input={"who": "bob"})
        told: dict[str, Any] = {}
        while not {"run", "task"} <= told.keys():
            kind, record = await anext(lists)
            told[kind] = record
        assert told["run"].run_id == told["task"]["run_id"] == asking.run_id
        await lists.aclose()
        await settled(lambda: watching() == 0)


@pytest.mark.contract("API-3")
async def test_a_stream_that_breaks_goes_on_where_it_broke(tmp_path: Path) -> None:
    app = make_app()
    address = f"sqlite:///{tmp_path}/s.db"
    seen: list[int] = []
    async with served(address, app=app) as first:
        run_id = await first.start("patient")
        port = first.port
    reading = asyncio.create_task(_follow(f"http://127.0.0.1:{port}", run_id, seen))
    for number in range(3):
        options = msgspec.structs.replace(first.service.options, port=port)
        async with served(address, app=make_app(), options=options) as shop:
            await settled(lambda number=number: len(seen) >= 3 + 2 * number)  # type: ignore[misc]
            await shop.send(run_id, "go")
            await settled(lambda number=number: len(seen) >= 5 + 2 * number)  # type: ignore[misc]
            if number == 2:
                await shop.http.post(f"/v1/runs/{run_id}/terminate", json={})
                await reading
    assert seen == list(range(1, len(seen) + 1))


async def _follow(address: str, run_id: str, seen: list[int]) -> None:
    async with Client(address, retry=hf.Retry(max_attempts=0, initial_ms=10, factor=1.0)) as client:
        async for event in client.runs.stream(run_id):
            seen.append(event.run_seq)  # noqa: PERF401 - each as it comes


async def test_scripts_have_the_same_without_waiting(tmp_path: Path) -> None:
    def script(address: str) -> tuple[Any, list[str]]:
        with SyncClient(address) as client:
            run = client.runs.start("echo", input={"value": 7})
            with pytest.raises(NotFound):
                client.runs.get("nowhere")
            return client.result(run.run_id, int), [event.event_type for event in client.runs.stream(run.run_id)]

    async with served() as shop:
        result, types = await asyncio.to_thread(script, f"http://127.0.0.1:{shop.port}")
        assert (result, types) == (7, ["RunQueued", "RunStarted", "RunCompleted"])
        with pytest.raises(InvalidInput):
            SyncClient(7)  # type: ignore[arg-type]


async def test_a_script_that_breaks_off_a_stream_holds_no_connection() -> None:
    is_over, may_end = threading.Event(), threading.Event()

    def script(address: str) -> str:
        with SyncClient(address) as client:
            run = client.runs.start("patient")
            first = next(event.event_type for event in client.runs.stream(run.run_id))
            is_over.set()
            may_end.wait(10)
            return str(first)

    async with served() as shop:
        running = asyncio.create_task(asyncio.to_thread(script, f"http://127.0.0.1:{shop.port}"))
        try:
            await asyncio.to_thread(is_over.wait, 10)
            await settled(lambda: shop.service.change_feeds.subscribers == 0)
        finally:
            may_end.set()
        assert await running == "RunQueued"


def test_a_stream_that_is_let_go_after_its_client_is_no_trouble() -> None:
    async def pieces() -> AsyncGenerator[int, None]:
        yield 1
        yield 2

    runner = asyncio.Runner()
    stream = vars(resources)["iterate"](pieces(), runner.run)
    assert next(stream) == 1
    runner.close()
    stream.close()


@pytest.mark.parametrize("token", ["", " ", "two\nlines"])
def test_a_token_that_is_none_is_refused_before_anything_is_asked(token: str) -> None:
    with pytest.raises(InvalidInput, match="HOLDFAST_TOKEN"):
        Client("http://127.0.0.1:1", token=token)


NO_JSON: dict[str, Any] = {
    "no number": math.nan,
    "endless": math.inf,
    "no number inside": {"cents": [1, -math.inf]},
    "keys that are no text": {1: "x"},
    "no Unicode": "\ud800",
    "a type that is not known": object(),
    "deep": json.loads("[" * 300 + "]" * 300),
}


@pytest.mark.contract("API-1", "API-2")
@pytest.mark.parametrize("how", ["client in process", "client over HTTP"])
@pytest.mark.parametrize("what", NO_JSON)
async def test_what_json_does_not_have_is_refused_and_never_sent_as_something_else(how: str, what: str) -> None:
    async with serve_in_process() as server:
        client = client_of(server, how)
        run = await client.runs.start("patient")
        with pytest.raises(InvalidInput, match="payload"):
            await client.signals.send(run.run_id, "other", payload=NO_JSON[what])
        with pytest.raises(InvalidInput, match="input"):
            await client.runs.start("echo", input={"value": NO_JSON[what]})
        with pytest.raises(InvalidInput, match="every_s"):
            await client.schedules.create("s", "patient", every_s=math.nan)
        assert (await client.signals.mailbox(run.run_id)).items == []
        assert len((await client.runs.list()).items) == 1


@pytest.mark.contract("API-1")
@pytest.mark.parametrize("how", ["client in process", "client over HTTP"])
@pytest.mark.parametrize("name", [".", "..", "...", "%2e", "a/../b"])
async def test_a_name_of_dots_reaches_what_it_names_and_nothing_else(how: str, name: str) -> None:
    async with serve_in_process() as server:
        client = client_of(server, how)
        run = await client.runs.start("patient", request_id="r")
        sent = await client.signals.send(run.run_id, name, payload=1, signal_id=name)
        assert sent.signal_name == sent.signal_id == name
        assert (await client.signals.receipt(run.run_id, name, name)).status == "accepted"
        for call in (client.runs.get, client.runs.cancel, client.runs.delete, client.runs.snapshot):
            with pytest.raises(NotFound, match="there is no run"):
                await call(name)
        if "/" not in name:
            assert (await client.runs.start("patient", run_id=name)).run_id == name
            assert (await client.runs.get(name)).run_id == name


@pytest.mark.contract("API-1", "API-2")
async def test_what_a_client_asks_is_refused_alike_in_process_and_over_http() -> None:
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        *(("list", {"limit": value}) for value in ("5", 5.0, True, None, -1, 10**30, math.nan)),
        *(("list", {"roots": value}) for value in (1, "true", None)),
        *(("list", {"workflow": value}) for value in ("\ud800", 7)),
        *(("get", {"run_id": value}) for value in (None, 7, "", "\ud800", "x" * 300)),
        *(("events", {"run_id": "r", "after": value}) for value in ("1", 2**53, 1.0)),
        *(("result", {"run_id": "r", "wait_s": value}) for value in (math.nan, math.inf, -1, 61, "1")),
        *(("cancel", {"run_id": value}) for value in ("", "\ud800")),
    )
    async with serve_in_process() as server:
        clients = client_of(server, "client in process"), client_of(server, "client over HTTP")
        for verb, fields in asked:
            said = []
            for client in clients:
                with pytest.raises(InvalidInput) as refused:
                    await getattr(client.runs, verb)(**fields)
                said.append((refused.value.message, refused.value.details.get("field")))
            assert said[0] == said[1], (verb, fields)
