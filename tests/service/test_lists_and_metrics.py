"""What changes in lists is told as it happens, and what happens is counted."""

import asyncio
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from obstore.store import MemoryStore as ObjectsInMemory

import holdfast as hf
from holdfast.core.codec import parse_instant
from holdfast.engine.observe.samples import Sampler
from holdfast.service.context import Headers, Principal
from holdfast.service.live.subscriptions import MOST_PENDING, ListChange, ListSubscription
from holdfast.store.s3 import S3Store
from holdfast.store.s3.bucket import Bucket
from holdfast.store.types import PurgePolicy, new_head
from holdfast.testing import VirtualClock
from holdfast.testing.samples import message, new_run
from tests.service.in_process import InProcessServer, make_app, serve_in_process
from tests.service.operation_cases import expect_problem, finished, open_task, waiting_order
from tests.service.stream_readers import QUICK, served, settled

SAMPLE = re.compile(r"(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>[0-9.e+-]+)")


@pytest.mark.contract("API-3")
async def test_lists_tell_what_changes_and_what_leaves_them(tmp_path: Path) -> None:
    async with served(f"sqlite:///{tmp_path}/s.db") as shop:
        before = await shop.start("asking", who="bob")
        path = "/v1/stream?kinds=runs,tasks&workflow=asking&status=RUNNING&assignee=ann"
        async with shop.reading(path) as lists, shop.reading("/v1/stream?workflow=echo") as others:
            assert await lists.next() == await others.next() == ("reset", {})
            await shop.start("echo")
            run_id = await shop.start("asking", who="eve")
            read = await lists.until(lambda event, _: event == "task_left")
            task_id = read[-1][1]["task_id"]
            assert {data.get("run_id", run_id) for _, data in read} == {run_id}, "not of other workflows"
            await shop.http.post("/v1/tasks/" + task_id + "/reassign", json={"to": "ann"})
            assert (await lists.until(lambda event, _: event == "task"))[-1][1]["assignee"] == "ann"
            await shop.http.post(f"/v1/runs/{run_id}/terminate", json={})
            left = await lists.until(lambda event, _: event == "run_left")
            assert left[-1] == ("run_left", {"run_id": run_id})
            told = await others.until(lambda _, run: run["status"] == "COMPLETED")
            assert {run["workflow"] for _, run in told} == {"echo"}
        assert before not in str(read), "what does not change is not told"


@pytest.mark.contract("API-3", "QUE-4")
async def test_lists_are_watched_by_all_that_a_search_can_ask_for(tmp_path: Path) -> None:
    """Also by what no parameter of the stream is."""
    async with served(f"sqlite:///{tmp_path}/s.db") as shop:
        ended = "/v1/stream?where=finished_at>%3D2020-01-01 workflow:echo status:completed"
        never = "/v1/stream?where=created_at<2020-01-01"
        async with shop.reading(ended) as lists, shop.reading(never) as old:
            assert await lists.next() == await old.next() == ("reset", {})
            await shop.start("asking", who="eve")
            run_id = await shop.start("echo")
            told = await lists.until(lambda event, _: event == "run")
            assert [(run["run_id"], run["status"]) for event, run in told if event == "run"] == [(run_id, "COMPLETED")]
            await old.until(lambda event, run: (event, run["run_id"]) == ("run_left", run_id))
        refused = await shop.http.get("/v1/stream?where=status:odd")
        assert (refused.status_code, "is none of" in refused.json()["detail"]) == (422, True)


async def test_dead_letters_are_told_once() -> None:
    clock = VirtualClock()
    store = hf.MemoryStore(clock)
    async with served(store) as shop:
        run_id = await shop.start("order", order_id="o-1")
        async with shop.reading("/v1/stream?kinds=letters&reason=retries%20exhausted") as lists:
            assert await lists.next() == ("reset", {})
            await store.deliver([replace(message(run_id, "poison"), expected_version=99)])
            heard = asyncio.create_task(lists.next())
            while not heard.done():
                clock.advance(ms=61_000)
                store.wakeups.notify()
                await asyncio.sleep(0.01)
            letter_id = heard.result()[1]["letter_id"]
            assert heard.result()[1]["run_id"] == run_id
            await shop.http.post(f"/v1/runs/{run_id}/terminate", json={})
            again = asyncio.create_task(lists.next())
            await settled(lambda: shop.service.change_feeds._feed.polls > 5)  # type: ignore[union-attr]
            assert not again.done()
            async with shop.reading("/v1/stream?kinds=letters&settled=true") as all_letters:
                assert await all_letters.next() == ("reset", {})
                await shop.http.post(f"/v1/dead-letters/{letter_id}/drop", json={})
                assert await again == ("letter_left", {"letter_id": letter_id})
                name, letter = await all_letters.next()
                assert (name, letter["settled"]) == ("letter", "drop")


@pytest.mark.contract("API-4")
async def test_each_kind_needs_the_scope_of_its_list() -> None:
    async def ask(headers: Headers) -> Principal:
        return Principal(name="ann", scopes=frozenset({"runs:read", "tasks:read"}))

    async with served(authenticate=ask) as shop:
        assert (await shop.http.get("/v1/stream?kinds=letters")).status_code == 403
        assert (await shop.http.get("/metrics")).status_code == 403
        async with shop.reading("/v1/stream?kinds=runs,tasks") as lists:
            assert await lists.next() == ("reset", {})


def test_who_falls_behind_is_told_to_read_again() -> None:
    head = new_head(new_run(), None, 0)
    listing = ListSubscription(frozenset({"runs"}), lambda head: True, lambda told: True)
    assert b"reset" in listing.take()
    for number in range(MOST_PENDING):
        listing.offer(ListChange("runs", head, replace(head, run_id=f"run-{number % 7}")))
    assert listing.take().count(b"event: run\n") == 7, "what changes again is told once"
    for number in range(MOST_PENDING + 1):
        listing.offer(ListChange("runs", head, replace(head, run_id=f"run-{number}")))
    assert listing.take() == b"event: reset\ndata: {}\n\n"
    assert listing.take() == b""


async def test_nobody_looks_when_nobody_watches() -> None:
    async with served() as shop:
        run_id = await shop.start("patient")
        async with shop.reading(f"/v1/runs/{run_id}/stream") as reading:
            await reading.next()
            watcher: Any = shop.service.change_feeds._feed
        await settled(lambda: watcher.is_over)
        looks = watcher.polls
        await shop.send(run_id, "go")
        await shop.send(run_id, "go")
        assert watcher.polls == looks
        assert shop.app.runtime().store.observers == ()  # type: ignore[attr-defined]


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return what a scraper reads."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            found[sample["name"], sample["labels"] or ""] = float(sample["value"])
    return found


@pytest.mark.contract("PRJ-3")
async def test_a_server_alone_is_no_node_that_runs_workflows(tmp_path: Path) -> None:
    """So that the loss of all nodes is seen where it can be measured: at a server that is alive."""
    store, reads_only = f"sqlite:///{tmp_path}/s.db", hf.NodeOptions(takes_runs=False)
    async with serve_in_process(store, node=reads_only) as server:
        alone = samples((await server.http.get("/metrics")).text)
    async with serve_in_process(store, node=reads_only) as server, make_app().node(store):
        beside = samples((await server.http.get("/metrics")).text)
    assert (alone["holdfast_nodes", ""], alone["holdfast_workflow_nodes", ""]) == (1, 0)
    assert (beside["holdfast_nodes", ""], beside["holdfast_workflow_nodes", ""]) == (2, 1)


async def test_metrics_tell_what_was_done_and_what_is_there(tmp_path: Path) -> None:
    async with serve_in_process(f"sqlite:///{tmp_path}/s.db") as server:
        await finished(server, "echo")
        run_id = await waiting_order(server)
        await open_task(server)
        await server.start("far")
        await server.until("system.queues", {}, lambda queues: queues["items"])
        await server.rest("signals.send", {"run_id": run_id, "name": "other"})
        await expect_problem(server.rest, "signals.send", {"run_id": "nowhere", "name": "x"}, "NotFound", 404)
        response = await server.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(response.text)
    assert found["holdfast_runs", 'status="COMPLETED"'] == 1
    assert found["holdfast_runs", 'status="RUNNING"'] == 3
    assert found["holdfast_runs_created_total", ""] == 4
    assert found["holdfast_runs_finished_total", 'status="COMPLETED"'] == 1
    assert found["holdfast_events_total", 'type="TaskCreated"'] == 1
    assert found["holdfast_queue_jobs", 'queue="gpu"'] == 1
    assert found["holdfast_tasks_open", ""] == 1
    assert found["holdfast_nodes", ""] == found["holdfast_workflow_nodes", ""] == 1
    assert found["holdfast_signals_total", 'answer="accepted"'] == 1
    assert found["holdfast_http_requests_total", 'operation="runs.start",status="201"'] == 4
    assert found["holdfast_http_requests_total", 'operation="signals.send",status="404"'] == 1
    assert found["holdfast_commit_seconds_bucket", 'le="+Inf"'] == found["holdfast_commit_seconds_count", ""]
    assert found["holdfast_commit_turns_sum", ""] >= 4
    assert found["holdfast_claims_total", ""] >= 1
    for name in ("ready_lag_seconds", "dead_letters_open", "activities_running", "event_streams"):
        assert ("holdfast_" + name, "") in found
    assert QUICK.streams == 1_000


@pytest.mark.contract("FMT-2")
async def test_metrics_tell_what_retention_has_deleted(tmp_path: Path) -> None:
    async with serve_in_process(f"sqlite:///{tmp_path}/s.db") as server:
        await finished(server, "echo")
        store = server.app.runtime().store
        policy = PurgePolicy(finished_run_ms=0)
        assert (await store.purge(replace(policy, dry_run=True))).runs == 1
        assert not any(name == "holdfast_retention_deleted_total" for name, _ in await metrics_of(server))
        deleted = await store.purge(policy)
        found = await metrics_of(server)
    assert found["holdfast_retention_deleted_total", 'kind="runs"'] == deleted.runs == 1
    assert found["holdfast_retention_deleted_total", 'kind="events"'] == deleted.events > 0


async def metrics_of(server: InProcessServer) -> dict[tuple[str, str], float]:
    """Return what the service has counted."""
    return samples((await server.http.get("/metrics")).text)


async def test_metrics_tell_what_is_tried_again_and_overdue_as_it_was_sampled(tmp_path: Path) -> None:
    """Nothing is said of them where no sample was taken lately, which is no 0."""
    async with serve_in_process(f"sqlite:///{tmp_path}/s.db") as server:
        before = samples((await server.http.get("/metrics")).text)
        assert not [name for name, _ in before if name in ("holdfast_runs_retrying", "holdfast_tasks_overdue")]
        store = server.app.runtime().store

        @server.app.activity(retry=hf.Retry(initial_ms=3_600_000))
        async def call() -> None:
            raise ConnectionError("nobody answers")

        @server.app.workflow
        async def tries() -> None:
            await call()

        @server.app.workflow
        async def asks() -> None:
            await hf.task("review", bool, due=timedelta(milliseconds=1))

        for _ in range(2):
            run_id = await server.start("tries")
            await server.until("runs.get", {"run_id": run_id}, lambda run: run.get("retrying") is not None)
        run_id = await server.start("asks")
        await server.until("tasks.list", {"run_id": run_id, "overdue": True}, lambda tasks: tasks["items"])
        assert await Sampler(store, "node-1", 60.0, 3_600.0).come_round()
        found = samples((await server.http.get("/metrics")).text)
    assert (found["holdfast_runs_retrying", ""], found["holdfast_tasks_overdue", ""]) == (2, 1)


async def test_the_page_names_every_metric(tmp_path: Path) -> None:
    async with serve_in_process(f"sqlite:///{tmp_path}/s.db") as server:
        assert await Sampler(server.app.runtime().store, "node-1", 60.0, 3_600.0).come_round()
        text = (await server.http.get("/metrics")).text
    names = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text(encoding="utf-8")
    assert names
    assert names <= set(re.findall(r"holdfast_\w+", page))


@pytest.mark.contract("STO-2", "API-1")
async def test_lists_of_a_bucket_say_how_old_they_are() -> None:
    store = S3Store(Bucket(ObjectsInMemory()))
    async with serve_in_process(store) as server:
        began = await store.now()
        run_id = await waiting_order(server)
        lists: list[tuple[str, dict[str, Any]]] = [
            ("runs.list", {}),
            ("runs.list", {"order_by": "created_at"}),
            ("signals.waiting", {}),
            ("signals.mailbox", {"run_id": run_id}),
            ("signals.unconsumed", {}),
            ("tasks.list", {}),
            ("letters.list", {}),
        ]
        for name, ask in lists:
            for call in (server.rest, server.rpc):
                status, answer = await call(name, ask)
                assert status == 200, answer
                assert answer["as_of"], (name, answer)
                assert began <= parse_instant(answer["as_of"]) <= await store.now(), name
    async with serve_in_process() as server:
        assert (await server.rest("runs.list", {}))[1].get("as_of") is None
