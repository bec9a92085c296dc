"""What one caller can make a service read and answer: so many rows, so many bytes, so often, and no more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.codec import encode
from holdfast.core.messages import SignalRequest
from holdfast.limits import SEARCH_WORDS
from holdfast.service.auth.throttle import SEARCH_COST
from holdfast.service.live import changefeed
from holdfast.service.live.subscriptions import RESET, ListSubscription
from holdfast.service.options import ServiceOptions
from holdfast.store.port import RunQuery
from tests.service.in_process import InProcessServer, make_app, serve_in_process
from tests.service.token_callers import bearer_header, serve_with_tokens, store_of, token_for

LARGE = "x" * 50_000
SMALL_ANSWERS = ServiceOptions(answer_bytes=256 * 1024)


def rpc(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a batch."""
    return [{"jsonrpc": "2.0", "id": id, "method": name, "params": ask} for id, (name, ask) in enumerate(calls)]


@asynccontextmanager
async def crowded(options: ServiceOptions, mails: int = 30) -> AsyncIterator[tuple[InProcessServer, str]]:
    """Serve an app with a run that has large signals in its mailbox, and so in its history."""
    async with serve_in_process(options=options) as server:
        run_id = await server.start("patient")
        store = store_of(server)
        for number in range(mails):
            request = SignalRequest(run_id=run_id, name="later", payload=encode(LARGE), signal_id=f"s{number}")
            await store.deliver([request])
        yield server, run_id


# --- searching


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("is_rpc", [False, True])
@pytest.mark.parametrize("order", ["id", "newest"])
async def test_a_search_looks_at_so_many_rows_and_says_where_to_go_on(is_rpc: bool, order: str) -> None:
    async with serve_in_process(options=ServiceOptions(search_rows=5)) as server:
        for number in range(21):
            tags = ["rare"] if number in (0, 20) else []
            await server.rest("runs.start", {"workflow": "echo", "tags": tags})
        ask = server.rpc if is_rpc else server.rest
        found, cursor, requests = [], "", 0
        while cursor is not None:
            status, page = await ask("runs.list", {"text": "rare", "order": order, "cursor": cursor})
            assert status == 200
            found += page["items"]
            cursor, requests = page["next"], requests + 1
        assert len(found) == 2
        assert 4 <= requests <= 8, "each request looked at five runs"


@pytest.mark.contract("API-2", "TSK-1")
async def test_a_search_for_tasks_looks_at_so_many_rows() -> None:
    async with serve_in_process(options=ServiceOptions(search_rows=5)) as server:
        for number in range(12):
            await server.start("asking", who="Rare Bird" if number == 7 else "x")
        await server.until("tasks.list", {"status": "OPEN"}, lambda page: len(page["items"]) == 12)
        found, cursor, requests = [], "", 0
        while cursor is not None:
            _, page = await server.rest("tasks.list", {"text": "bird rare", "cursor": cursor})
            found += page["items"]
            cursor, requests = page["next"], requests + 1
        assert [task["payload"] for task in found] == [{"who": "Rare Bird"}]
        assert requests >= 3


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("name", ["runs.list", "tasks.list"])
async def test_a_search_has_so_many_words(name: str) -> None:
    async with serve_in_process() as server:
        for text in ("a " * (SEARCH_WORDS + 1), "a" * 1_000):
            for ask in (server.rest, server.rpc):
                status, problem = await ask(name, {"text": text})
                assert (status, problem["code"]) == (422, "InvalidInput")


@pytest.mark.contract("API-2", "STO-1")
@pytest.mark.parametrize("name", ["runs.list", "tasks.list"])
async def test_others_are_served_while_somebody_searches(tmp_path: Path, name: str) -> None:
    """A batch of searches through a large store: the loop comes round, and runs go on."""
    app = make_app()
    async with serve_in_process(f"sqlite:///{tmp_path}/s.db", app=app) as server:
        run_id = await server.start("asking", who="x" * 20_000)
        await server.until("tasks.list", {"run_id": run_id}, lambda page: page["items"])
        db = store_of(server).inner._database.connection  # type: ignore[attr-defined]
        db.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000) "
            "INSERT INTO tasks SELECT printf('zz-%06d', i), run_no, 'copy', 'COMPLETED', NULL, '[]', task FROM tasks, n"
        )
        text = " ".join(f"nothing{number}" for number in range(SEARCH_WORDS))
        batch = rpc(*[(name, {"text": text})] * 20)
        searching = asyncio.create_task(server.http.post("/rpc", json=batch))
        served = 0
        while not searching.done():
            await server.start("echo")
            assert (await server.http.get("/v1/health")).status_code == 200
            served += 1
        assert served >= 3
        assert all("result" in answer for answer in (await searching).json())


# --- rates


@pytest.mark.contract("API-2", "API-4")
async def test_a_batch_costs_the_sum_of_its_parts() -> None:
    async with serve_with_tokens(options=ServiceOptions(reads_per_minute=3 * SEARCH_COST)) as server:
        viewer = bearer_header(await token_for(server, "viewer"))
        batch = rpc(*[("runs.list", {"text": "x"})] * 5)
        answers = (await server.http.post("/rpc", json=batch, headers=viewer)).json()
        codes = [answer["error"]["data"]["code"] if "error" in answer else "" for answer in answers]
        assert codes == ["", "", "", "RateLimited", "RateLimited"]
        refused = await server.http.get("/v1/runs", headers=viewer)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        other = bearer_header(await token_for(server, "viewer", name="bob"))
        assert (await server.http.get("/v1/runs", headers=other)).status_code == 200
        assert (await server.http.post("/v1/runs", json={"workflow": "echo"}, headers=viewer)).status_code == 403


@pytest.mark.contract("API-2", "API-4")
async def test_a_tenant_reads_so_much_whoever_asks() -> None:
    async with serve_with_tokens(options=ServiceOptions(tenant_reads_per_minute=4)) as server:
        tokens = [await token_for(server, "viewer", tenant="acme", name=f"n{number}") for number in range(3)]
        seen = [
            (await server.http.get("/v1/runs", headers=bearer_header(tokens[number % 3]))).status_code
            for number in range(6)
        ]
        assert seen == [200, 200, 200, 200, 429, 429]
        other = bearer_header(await token_for(server, "viewer", tenant="other"))
        assert (await server.http.get("/v1/runs", headers=other)).status_code == 200


@pytest.mark.contract("API-4")
async def test_one_tenant_does_not_keep_the_readers_to_itself() -> None:
    async with serve_with_tokens(options=ServiceOptions(lists_at_once=2)) as server:
        mine = bearer_header(await token_for(server, "viewer", tenant="acme"))
        theirs = bearer_header(await token_for(server, "viewer", tenant="other"))
        store = store_of(server)
        find, reading, may_read = store.find, 0, asyncio.Event()

        async def slow(query: Any) -> Any:
            nonlocal reading
            if isinstance(query, RunQuery) and query.tenant == "acme" and query.run_ids is None:
                reading += 1
                await may_read.wait()
            return await find(query)

        store.find = slow  # type: ignore[method-assign]
        asked = [asyncio.create_task(server.http.get("/v1/runs", headers=mine)) for _ in range(6)]
        while reading < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert (await server.http.get("/v1/runs", headers=theirs)).status_code == 200
        assert reading == 2
        may_read.set()
        assert [(await each).status_code for each in asked] == [200] * 6


# --- bytes


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("is_rpc", [False, True])
async def test_pages_end_where_they_are_large_enough(is_rpc: bool) -> None:
    async with crowded(SMALL_ANSWERS) as (server, run_id):
        ask = server.rpc if is_rpc else server.rest
        for name, fields in [("signals.mailbox", {"run_id": run_id}), ("signals.unconsumed", {})]:
            found, cursor = [], ""
            while cursor is not None:
                status, page = await ask(name, {**fields, "cursor": cursor, "limit": 500})
                assert status == 200
                assert len(page["items"]) <= 5
                found += [mail["signal_id"] for mail in page["items"]]
                cursor = page["next"]
            assert sorted(found) == sorted(f"s{number}" for number in range(30))


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("is_rpc", [False, True])
async def test_histories_come_in_pages_of_bytes(is_rpc: bool) -> None:
    async with serve_in_process(options=SMALL_ANSWERS) as server:
        ask = server.rpc if is_rpc else server.rest
        run_id = await server.start("patient")
        for number in range(12):
            await server.rest(
                "signals.send", {"run_id": run_id, "name": "go", "payload": LARGE, "signal_id": str(number)}
            )
        await server.until("runs.get", {"run_id": run_id}, lambda run: run["last_event_seq"] >= 12)
        seen = 0
        while True:
            status, page = await ask("runs.events", {"run_id": run_id, "after": seen, "limit": 500})
            assert status == 200
            if not page["items"]:
                break
            assert [event["run_seq"] for event in page["items"]] == list(range(seen + 1, seen + 1 + len(page["items"])))
            assert sum(len(str(event["data"])) for event in page["items"]) < 256 * 1024
            seen = page["items"][-1]["run_seq"]
        assert seen == page["last_event_seq"]


@pytest.mark.contract("API-2")
async def test_a_batch_has_as_large_an_answer_as_one_call() -> None:
    async with crowded(SMALL_ANSWERS) as (server, run_id):
        batch = rpc(*[("signals.mailbox", {"run_id": run_id, "limit": 500})] * 50)
        response = await server.http.post("/rpc", json=batch)
        assert len(response.content) <= SMALL_ANSWERS.answer_bytes
        answers = response.json()
        assert [answer["id"] for answer in answers] == list(range(50))
        codes = [answer["error"]["data"]["code"] for answer in answers if "error" in answer]
        assert set(codes) == {"AnswerTooLarge"}
        assert 1 <= 50 - len(codes) <= 5
        assert {answer["error"]["data"]["status"] for answer in answers if "error" in answer} == {413}


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("is_rpc", [False, True])
async def test_one_large_thing_does_not_fail_its_list(is_rpc: bool) -> None:
    """It is left out, and how large it is is said; by itself it is refused with a word of why."""
    async with serve_in_process(options=ServiceOptions(answer_bytes=60_000)) as server:
        ask = server.rpc if is_rpc else server.rest
        large = await server.start("echo", value=LARGE + LARGE)
        asking = await server.start("asking", who=LARGE)
        await server.start("asking", who="small")
        await server.until("runs.get", {"run_id": large}, lambda run: run["status"] == "COMPLETED")
        seen, left_out = 0, 0
        while True:
            status, page = await ask("runs.events", {"run_id": large, "after": seen})
            assert status == 200
            if not page["items"]:
                break
            seen = page["items"][-1]["run_seq"]
            left_out += sum((event["data_bytes"] or 0) > len(LARGE) for event in page["items"])
        assert left_out >= 1
        assert seen == page["last_event_seq"]
        status, problem = await ask("runs.result", {"run_id": large})
        assert (status, problem["code"], problem["details"]["limit_bytes"] > 0) == (413, "AnswerTooLarge", True)
        page = await server.until("tasks.list", {}, lambda page: len(page["items"]) >= 1)
        tasks, cursor = [], ""
        while cursor is not None:
            status, page = await ask("tasks.list", {"cursor": cursor})
            assert status == 200
            tasks += page["items"]
            cursor = page["next"]
        by_run = {task["run_id"] == asking: task for task in tasks}
        assert by_run[True]["payload"] is None
        assert by_run[True]["payload_bytes"] > len(LARGE)
        assert by_run[False]["payload"] == {"who": "small"}
        assert by_run[False]["payload_bytes"] is None


@pytest.mark.contract("TSK-1")
@pytest.mark.parametrize("is_rpc", [False, True])
async def test_what_happened_to_a_task_comes_in_pages(is_rpc: bool) -> None:
    async with serve_in_process() as server:
        ask = server.rpc if is_rpc else server.rest
        run_id = await server.start("asking", who="x")
        page = await server.until("tasks.list", {"run_id": run_id}, lambda page: page["items"])
        task_id = page["items"][0]["task_id"]
        for number in range(5):
            await server.rest("tasks.comment", {"task_id": task_id, "text": f"c{number}", "actor": "ann"})
        whole = (await ask("tasks.history", {"task_id": task_id}))[1]
        assert whole["next"] is None
        items, cursor = [], ""
        while cursor is not None:
            _, page = await ask("tasks.history", {"task_id": task_id, "cursor": cursor, "limit": 2})
            assert len(page["items"]) <= 2
            items += page["items"]
            cursor = page["next"]
        assert items == whole["items"]
        assert sum(event["event_type"] == "TaskCommented" for event in items) == 5


@pytest.mark.contract("API-3", "API-4")
async def test_who_watches_tasks_reads_their_list_when_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of one run that are large together are not put into one's stream, nor kept for it."""
    monkeypatch.setattr(changefeed, "TASKS_BYTES", 4_000)
    async with serve_in_process() as server:
        run_id = await server.start("asking", who="x" * 5_000)
        await server.until("tasks.list", {"run_id": run_id}, lambda page: page["items"])
        service = server.service
        watcher = service.change_feeds.of(server.app.runtime())
        listing = ListSubscription(frozenset({"tasks"}), lambda head: True, lambda told: True)
        watcher.subscribe(listing)
        await watcher.begun()
        assert listing.take() == RESET
        [task] = (await server.rest("tasks.list", {"run_id": run_id}))[1]["items"]
        await server.rest("tasks.comment", {"task_id": task["task_id"], "text": "c", "actor": "ann"})
        async with asyncio.timeout(60):
            await listing.wake.wait()
        assert listing.take() == RESET
        watcher.unsubscribe(listing)
