"""Streams of runs over the service: every chunk once and in order, within the bounds of their readers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.client import Client, SyncClient
from holdfast.errors import NotFound
from holdfast.service.auth.tokens import TokenAccess, make_token
from holdfast.service.context import Headers, Principal
from holdfast.service.live.sse import MEDIA_TYPE
from holdfast.service.operations.run_streams import ChunkView
from holdfast.store.port import StreamQuery
from tests.service.in_process import make_app
from tests.service.stream_readers import QUICK, Served, served, settled

Words = list[tuple[int, Any]]


def words(read: list[tuple[str, Any]]) -> Words:
    """Return the numbers and values of chunks that were read."""
    return [(data["seq"], data["value"]) for event, data in read if not event]


def address(run_id: str, name: str = "words", rest: str = "") -> str:
    """Return where a stream is followed."""
    return f"/v1/runs/{run_id}/streams/{name}/follow{rest}"


@pytest.mark.contract("STR-1", "API-3")
async def test_a_reader_gets_every_chunk_once_in_order_and_as_it_is_written(tmp_path: Path) -> None:
    async with served(f"sqlite:///{tmp_path}/s.db") as shop:
        run_id = await shop.start("talking", words=["a", {"b": "\n\n"}, "ü"], waits=True)
        async with shop.reading(address(run_id)) as reading:
            assert reading.response.headers["content-type"] == MEDIA_TYPE
            read = await reading.until(lambda _, data: data["seq"] == 3)
            assert {(data["step_id"], data["attempt"]) for _, data in read} == {("talk", 1)}
            await shop.send(run_id, "go")
            read.append(await reading.next())
            assert (read[-1][1]["value"], read[-1][1]["step_id"]) == ("last", "")
            await shop.send(run_id, "go")
            read += await reading.rest()
        assert words(read) == [(1, "a"), (2, {"b": "\n\n"}), (3, "ü"), (4, "last")]
        assert read[-1] == ("end", {"last_seq": 4, "dropped": 0})
        await settled(lambda: shop.app.runtime().streams.readers == 0)


@pytest.mark.contract("STR-1", "API-3")
async def test_a_reader_goes_on_behind_the_number_that_it_has() -> None:
    async with served() as shop:
        run_id = await shop.start("talking", words=["a", "b", "c"])
        async with shop.reading(address(run_id)) as reading:
            whole = await reading.rest()
        asked: list[tuple[str, dict[str, str]]] = [
            ("?after=1", {}),
            ("", {"last-event-id": "1"}),
            ("?after=9", {"last-event-id": "1"}),
        ]
        for rest, headers in asked:
            async with shop.reading(address(run_id, rest=rest), **headers) as reading:
                assert await reading.rest() == whole[1:]
        async with shop.reading(address(run_id, rest="?after=3")) as reading:
            assert await reading.rest() == whole[3:]
        async with shop.reading(address(run_id, "other")) as reading:
            assert await reading.rest() == [("end", {"last_seq": 0, "dropped": 0})]
        again = await shop.http.get(address(run_id), headers={"last-event-id": "3-end"})
        assert again.status_code == 204, "a browser that had the end does not come back for ever"


@pytest.mark.contract("API-2", "API-3", "API-4")
async def test_what_cannot_be_followed_is_refused_and_readers_are_bounded() -> None:
    async with served(options=replace(QUICK, streams=1)) as shop:
        run_id = await shop.start("talking", words=["a"], waits=True)
        for path, headers, code in (
            (address("nowhere"), {}, "NotFound"),
            (address(run_id, rest="?after=-1"), {}, "InvalidInput"),
            (address(run_id, rest="?after=1000"), {}, "InvalidInput"),
            (address(run_id, rest="?colour=red"), {}, "InvalidInput"),
            (address(run_id), {"last-event-id": "yesterday"}, "InvalidInput"),
            (address(run_id, "a%00b"), {}, "NotFound"),
            (address(run_id, "x" * 2_000), {}, "InvalidInput"),
        ):
            response = await shop.http.get(path, headers=headers)
            assert response.json()["code"] == code, path
        async with shop.reading(address(run_id)) as reading:
            await reading.next()
            refused = await shop.http.get(address(run_id))
            assert (refused.status_code, refused.json()["code"]) == (429, "RateLimited")
            assert (await shop.http.get("/v1/stream")).status_code == 429, "they count together with other streams"
        await settled(lambda: shop.app.runtime().streams.readers == 0)
        async with shop.reading(address(run_id)) as reading:
            await reading.next()


@pytest.mark.contract("API-4")
async def test_streams_of_other_tenants_are_not_there_and_tokens_are_bounded() -> None:
    app = make_app()
    options = replace(QUICK, streams_per_token=2)
    async with served(app=app, options=options, authenticate=TokenAccess(app, options.tokens_s)) as shop:
        store = app.runtime().store
        mine, _ = await make_token(store, "ann", scopes=["runs:read"], tenant="a")
        theirs, _ = await make_token(store, "bob", scopes=["runs:read"], tenant="b")
        blind, _ = await make_token(store, "cy", scopes=["tasks:read"], tenant="a")
        writer, _ = await make_token(store, "dan", scopes=["runs:write"], tenant="a")
        shop.http.headers["authorization"] = f"Bearer {writer}"
        run_id = await shop.start("talking", words=["secret"], waits=True)
        while not await app.runtime().store.find(StreamQuery(run_id=run_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        for token, status in ((mine, 200), (theirs, 404), (blind, 403)):
            headers = {"authorization": f"Bearer {token}"}
            for path in ("", "/words"):
                answer = await shop.http.get(f"/v1/runs/{run_id}/streams{path}", headers=headers)
                assert answer.status_code == status, path
                assert ("secret" in answer.text) is (status == 200 and path == "/words")
            if status != 200:
                assert (await shop.http.get(address(run_id), headers=headers)).status_code == status
        headers = {"authorization": f"Bearer {mine}"}
        path = address(run_id)
        async with shop.reading(path, **headers) as one, shop.reading(path, **headers) as two:
            assert await one.next() == await two.next()
            assert (await shop.http.get(address(run_id), headers=headers)).status_code == 429


async def test_readers_end_with_the_service_and_with_their_permission() -> None:
    is_allowed = True

    async def ask(headers: Headers) -> Principal:
        if not is_allowed:
            raise hf.errors.NotPermitted("no longer")
        return Principal(name="ann", is_admin=True)

    async with served(options=replace(QUICK, heartbeat_s=0.01), authenticate=ask) as shop:
        run_id = await shop.start("talking", words=["a"], waits=True)
        async with shop.reading(address(run_id)) as reading:
            reader = asyncio.create_task(reading.rest())
            await settled(lambda: reading.comments >= 3)
            is_allowed = False
            with pytest.raises(Exception, match=r"incomplete|closed|peer"):
                await reader
        is_allowed = True
        async with shop.reading(address(run_id)) as reading:
            await reading.next()
            shop.service.stopping.set()
            assert await reading.rest() == [("stopped", {})]


@pytest.mark.contract("STR-1")
async def test_what_begins_anew_is_marked_and_pages_are_bounded() -> None:
    app = make_app()

    @app.activity(retry=hf.Retry(max_attempts=2, initial_ms=1))
    async def flaky() -> None:
        out = hf.stream("words")
        for number in range(5):
            await out.write(number)
        if hf.activity_context().attempt == 1:
            raise ValueError("once")

    @app.workflow
    async def again() -> None:
        await flaky()

    async with served(app=app) as shop, Client(f"http://127.0.0.1:{shop.port}") as client:
        run_id = await shop.start("again")
        await client.result(run_id)
        chunks = [chunk async for chunk in client.streams.follow(run_id, "words")]
        assert [chunk.seq for chunk in chunks] == list(range(1, 11))
        marks = [(chunk.seq, chunk.restarted_from) for chunk in chunks if isinstance(chunk.restarted_from, int)]
        assert marks == [(6, 1)]
        read: list[ChunkView] = []
        is_last = False
        while not is_last:
            page = await client.streams.read(run_id, "words", after=len(read), limit=3)
            assert 0 < len(page.items) <= 3
            read += page.items
            is_last = page.is_last
        assert read == chunks


@pytest.mark.contract("API-1", "STR-1")
async def test_clients_go_on_when_the_service_comes_back_and_scripts_read_too(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    seen: Words = []

    async def follow(port: int, run_id: str) -> None:
        retry = hf.Retry(max_attempts=0, initial_ms=10, factor=1.0)
        async with Client(f"http://127.0.0.1:{port}", retry=retry) as client:
            async for chunk in client.streams.follow(run_id, "words"):
                seen.append((chunk.seq, chunk.value))

    async with served(store) as shop:
        run_id = await shop.start("talking", words=["a", "b"], waits=True)
        port = shop.port
        reader = asyncio.create_task(follow(port, run_id))
        await settled(lambda: len(seen) == 2)
    async with served(store, options=replace(QUICK, port=port)) as shop:
        for _ in range(2):
            await shop.send(run_id, "go")
        await reader
        assert seen == [(1, "a"), (2, "b"), (3, "last")]

        def script() -> Words:
            with SyncClient(f"http://127.0.0.1:{port}") as client:
                return [(chunk.seq, chunk.value) for chunk in client.streams.follow(run_id, "words", after=1)]

        assert await asyncio.to_thread(script) == seen[1:]
        async with Client(shop.app) as client:
            assert [chunk.value async for chunk in client.streams.follow(run_id, "words")] == ["a", "b", "last"]
            with pytest.raises(NotFound):
                await anext(aiter(client.streams.follow("nowhere", "words")))


def test_a_script_reads_a_stream_in_its_own_process(tmp_path: Path) -> None:
    app = hf.App("talk")

    @app.workflow
    async def talk() -> None:
        for word in ("a", "b"):
            await hf.stream("words").write(word)

    with SyncClient(app, f"sqlite:///{tmp_path}/s.db", node=hf.NodeOptions()) as client:
        run = client.start(talk)
        assert [chunk.value for chunk in run.stream("words")] == ["a", "b"]
        assert [chunk.value for chunk in run.stream("words", after=1, value_type=str)] == ["b"]


@pytest.mark.contract("STR-1", "API-4")
async def test_many_readers_of_a_stream_cost_few_reads_of_the_store(tmp_path: Path) -> None:
    count = 60
    async with served(f"sqlite:///{tmp_path}/s.db") as shop:
        run_id = await shop.start("talking", words=["a"], waits=True)
        hub = shop.app.runtime().streams

        async def read(_: int) -> Words:
            async with shop.reading(address(run_id)) as reading:
                return words(await reading.rest())

        readers = [asyncio.create_task(read(number)) for number in range(count)]
        await settled(lambda: hub.readers == count)
        await asyncio.sleep(0.1)
        before = hub.reads
        for _ in range(2):
            await shop.send(run_id, "go")
        assert await asyncio.gather(*readers) == [[(1, "a"), (2, "last")]] * count
        assert hub.reads - before < 20


async def test_a_run_of_another_service_is_followed_through_the_store(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    async with served(store) as writing, served(store, app=make_app()) as reading_elsewhere:
        run_id = await writing.start("talking", words=["a"], waits=True)
        await _seen(writing, run_id)
        async with reading_elsewhere.reading(address(run_id)) as reading:
            await reading.next()
            await writing.send(run_id, "go")
            assert (await reading.next())[1]["value"] == "last"


async def _seen(shop: Served, run_id: str) -> None:
    async with shop.reading(address(run_id)) as reading:
        await reading.next()
