"""A service without the keys shows everything but the values, and says that they are encrypted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast as hf
from holdfast.service.context import make_service, open_access
from holdfast.service.http.server import listening
from tests.engine.harness import wait_for_event
from tests.service.in_process import MOST_SECONDS, InProcessServer, serve_in_process
from tests.service.stream_readers import QUICK, Reading

HUSH = "hush-4111"
ENCRYPTED = {"$holdfast": "encrypted"}
READS_ONLY = hf.NodeOptions(takes_runs=False)


def make_app(keys: dict[str, bytes | str] | None) -> hf.App:
    app = hf.App("shop", codecs=[] if keys is None else [hf.Encryption(keys)])

    @app.workflow
    async def approve(card: str) -> str:
        return f"{card} {await hf.task('review', str, payload={'card': card})}"

    @app.workflow(failures=ValueError)
    async def broken(card: str) -> str:
        raise ValueError(f"{card} is broken")

    return app


@asynccontextmanager
async def stored(path: Path) -> AsyncIterator[tuple[str, str]]:
    """Give a run that waits for a person, and one that has failed, with encrypted values."""
    app = make_app({"k1": b"1" * 32})
    workflows: dict[str, hf.Workflow[..., Any]] = {
        name: hf.Workflow(definition) for (name, _), definition in app.registry.workflows.items()
    }
    async with asyncio.timeout(MOST_SECONDS), app.node(f"sqlite:///{path}"):
        waiting: hf.RunHandle[Any] = await app.start(workflows["approve"], HUSH)
        failed: hf.RunHandle[Any] = await app.start(workflows["broken"], HUSH)
        await wait_for_event(waiting, "TaskCreated")
        await wait_for_event(failed, "RunFailed")
        await waiting.signal("later", HUSH)
    yield waiting.run_id, failed.run_id


async def everything(server: InProcessServer, waiting: str, failed: str) -> dict[str, Any]:
    """Return what the API says of two runs."""
    addresses = {
        "runs": "/v1/runs",
        "events": f"/v1/runs/{waiting}/events",
        "failed": f"/v1/runs/{failed}/events",
        "result": f"/v1/runs/{failed}/result",
        "snapshot": f"/v1/runs/{failed}/snapshot",
        "tasks": "/v1/tasks",
        "mailbox": f"/v1/runs/{waiting}/mailbox",
    }
    answers = {}
    for name, address in addresses.items():
        response = await server.http.get(address)
        assert response.status_code == 200, (name, response.text)
        answers[name] = response.json()
    return answers


@pytest.mark.contract("SEC-2", "API-4")
@pytest.mark.parametrize("keys", [None, {"k2": b"2" * 32}], ids=["no keys", "another key"])
async def test_what_cannot_be_opened_is_said_to_be_encrypted(
    tmp_path: Path, keys: dict[str, bytes | str] | None
) -> None:
    path = tmp_path / "shop.db"
    async with stored(path) as (waiting, failed):
        store = await hf.SqliteStore.open(path)
        try:
            async with serve_in_process(store, app=make_app(keys), node=hf.NodeOptions(takes_runs=False)) as server:
                said = await everything(server, waiting, failed)
        finally:
            await store.close()
    assert HUSH not in str(said)
    assert "aes-gcm" not in str(said), "no bytes are shown"
    assert said["events"]["items"][0]["data"]["input"] == ENCRYPTED
    [task] = said["tasks"]["items"]
    assert (task["name"], task["payload"]) == ("review", ENCRYPTED)
    assert [mail["payload"] for mail in said["mailbox"]["items"]] == [ENCRYPTED]
    assert said["result"]["error"]["code"] == "ValueError"
    assert "encrypted" in said["result"]["error"]["message"]
    assert {run["workflow"] for run in said["runs"]["items"]} == {"approve", "broken"}


@pytest.mark.contract("SEC-2", "API-4")
async def test_a_service_with_the_keys_shows_the_values(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    async with stored(path) as (waiting, failed):
        store = await hf.SqliteStore.open(path)
        try:
            async with serve_in_process(
                store, app=make_app({"k1": b"1" * 32}), node=hf.NodeOptions(takes_runs=False)
            ) as server:
                said = await everything(server, waiting, failed)
        finally:
            await store.close()
    assert said["events"]["items"][0]["data"]["input"] == {"card": HUSH}
    assert said["tasks"]["items"][0]["payload"] == {"card": HUSH}
    assert said["result"]["error"]["message"] == f"{HUSH} is broken"


@pytest.mark.contract("SEC-2", "API-4")
@pytest.mark.parametrize(
    "keys", [{"k1": b"1" * 32}, {"k2": b"2" * 32}, None], ids=["the key", "another key", "no keys"]
)
async def test_streams_and_searches_show_what_the_keys_open(
    tmp_path: Path, keys: dict[str, bytes | str] | None
) -> None:
    path = tmp_path / "shop.db"
    has_key = keys is not None and "k1" in keys
    async with stored(path) as (waiting, failed):
        app = make_app(keys)
        async with (
            asyncio.timeout(MOST_SECONDS),
            app.node(f"sqlite:///{path}", options=READS_ONLY),
            listening(make_service(app, QUICK, open_access)) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=MOST_SECONDS) as http,
        ):
            async with http.stream("GET", f"/v1/runs/{failed}/stream") as response:
                streamed = await Reading(response).rest()
            found = (await http.get("/v1/runs", params={"text": HUSH})).json()["items"]
    said = str(streamed)
    assert (HUSH in said) is has_key
    assert "aes-gcm" not in said, "no bytes are shown"
    assert "RunFailed" in said
    assert found == [], "what is encrypted is not searched, by anyone"
    assert waiting != failed


@pytest.mark.contract("SEC-2", "API-4", "MSG-4")
@pytest.mark.parametrize("keys", [{"k1": b"1" * 32}, None], ids=["the key", "no keys"])
async def test_a_dead_letter_is_shown_and_requeued_also_where_it_cannot_be_opened(
    tmp_path: Path, keys: dict[str, bytes | str] | None
) -> None:
    """The service only moves it: a node with the key delivers it."""
    path = tmp_path / "shop.db"
    address = f"sqlite:///{path}"

    def waiting_app(expected: Any, keys: dict[str, bytes | str] | None) -> hf.App:
        app = hf.App("shop", codecs=[] if keys is None else [hf.Encryption(keys)])

        @app.workflow(name="wait", signals={"card": expected})
        async def wait() -> str:
            return str(await hf.wait_signal("card", expected))

        return app

    right, wrong = waiting_app(str, {"k1": b"1" * 32}), waiting_app(int, {"k1": b"1" * 32})
    async with asyncio.timeout(MOST_SECONDS):
        async with right.node(address):
            [definition] = right.registry.workflows.values()
            run: hf.RunHandle[Any] = await right.start(hf.Workflow(definition))
            await wait_for_event(run, "SignalWaiting")
        async with right.connect(address):
            await right.run(run.run_id).signal("card", HUSH)
        async with wrong.node(address):
            await wait_for_event(wrong.run(run.run_id), "SignalDeadLettered")
        store = await hf.SqliteStore.open(path)
        try:
            app = waiting_app(str, keys)
            async with serve_in_process(store, app=app, node=READS_ONLY) as server:
                [letter] = (await server.http.get("/v1/dead-letters")).json()["items"]
                shown = (await server.http.get(f"/v1/dead-letters/{letter['letter_id']}")).text
                requeued = await server.http.post(f"/v1/dead-letters/{letter['letter_id']}/requeue", json={})
                assert requeued.status_code == 200, requeued.text
        finally:
            await store.close()
        assert (HUSH in shown) is (keys is not None)
        assert "aes-gcm" not in shown
        async with right.node(address):
            assert await right.run(run.run_id).result() == HUSH
