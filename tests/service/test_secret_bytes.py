"""A secret's bytes are nowhere: not in the store's files and tables, logs, traces and answers of the service.

Activities leak their secret in every form and by every way that there is. A search that shares nothing with the
redaction looks for it. If the redaction is switched off, the same search finds every form everywhere.
"""

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

import holdfast as hf
from holdfast.core.redaction import Redactor
from holdfast.service.context import make_service, open_access
from holdfast.service.http.server import listening
from holdfast.service.operations import OPERATIONS
from tests.leaky_app import VALUE, LeakyApp
from tests.postgres_server import Installation
from tests.secret_forms import FORMS, leaks
from tests.service.in_process import InProcessServer, serve_in_process
from tests.service.stream_readers import QUICK

pytestmark = pytest.mark.contract("SEC-1")


@pytest.fixture
def leaky() -> Iterator[LeakyApp]:
    """Return an app that leaks, with its log."""
    leaky = LeakyApp()
    handlers = [logging.StreamHandler(leaky.logs), logging.StreamHandler(leaky.logs)]
    handlers[0].setFormatter(hf.JsonFormatter())
    handlers[1].setFormatter(logging.Formatter("%(message)s"))
    handlers[1].addFilter(hf.SecretFilter())
    for handler in handlers:
        logging.getLogger().addHandler(handler)
    yield leaky
    for handler in handlers:
        logging.getLogger().removeHandler(handler)


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a store that is empty."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/secrets.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(params=[True, False], ids=["redacted", "switched off"])
def redacts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether values are redacted."""
    if not request.param:
        monkeypatch.setattr(Redactor, "text", lambda self, text: text)
        monkeypatch.setattr(Redactor, "json", lambda self, raw: raw)
    return bool(request.param)


async def stored(address: str) -> bytes:
    """Return everything that a store has written."""
    if address.startswith("sqlite:///"):
        folder = Path(address.removeprefix("sqlite:///")).parent
        return b"\n".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    connection = await asyncpg.connect(address)
    try:
        tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'holdfast'")
        assert tables
        rows = [row for (table,) in tables for row in await connection.fetch(f'SELECT * FROM holdfast."{table}"')]
        assert rows
        values = [value for row in rows for value in row.values()]
        return b"\n".join(value if isinstance(value, bytes) else str(value).encode() for value in values)
    finally:
        await connection.close()


async def streamed(app: hf.App, run_id: str) -> bytes:
    """Return what a reader of the run's event stream is sent."""
    read = b""
    async with (
        listening(make_service(app, QUICK, open_access)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
        http.stream("GET", f"/v1/runs/{run_id}/stream") as response,
    ):
        async for chunk in response.aiter_raw():
            read += chunk
            if b"RunCompleted" in read:
                break
    return read


async def answers(service: InProcessServer, run_id: str) -> AsyncIterator[bytes]:
    """Return everything that a service answers about a run."""
    for name, operation in OPERATIONS.items():
        if operation.verb == "GET" and set(operation.path_fields) <= {"run_id"}:
            asked = {"run_id": run_id} if operation.path_fields else {}
            path = operation.path.replace("{run_id}", run_id)
            yield f"{name} {asked}".encode() + (await service.http.get(path)).content
    for path in ("/", "/metrics", f"/v1/runs/{run_id}/events?limit=1000"):
        yield (await service.http.get(path)).content


@pytest.mark.parametrize("queue", ["", "far"], ids=["local", "queued"])
async def test_the_bytes_of_a_secret_are_nowhere(leaky: LeakyApp, address: str, redacts: bool, queue: str) -> None:
    places: dict[str, bytes] = {}
    async with serve_in_process(address, app=leaky.app, node=hf.NodeOptions(queues=("far",))) as service:
        async with hf.traced(leaky.app, leaky.spans):
            run, letter_id = await leaky.leak(queue)
        places["answers"] = b"\n".join([answer async for answer in answers(service, run.run_id)])
        places["dead letter"] = (await service.http.get(f"/v1/dead-letters/{letter_id}")).content
        places["stream"] = await streamed(leaky.app, run.run_id)
        await service.http.post(f"/v1/dead-letters/{letter_id}/drop", json={"actor": "ann"})
        places["audit log"] = (await service.http.get("/v1/audit")).content
        assert b"letters.drop" in places["audit log"]
        places["store"] = await stored(address)
    places["store"] += await stored(address)
    places["log"] = leaky.logs.getvalue().encode()
    places["spans"] = "\n".join(span.to_json() for span in leaky.spans.get_finished_spans()).encode()
    found = {place: leaks(data, VALUE) for place, data in places.items()}
    assert not found.pop("audit log"), "no audit entry shows a value, redacted or not"
    if redacts:
        assert not any(found.values()), found
        assert all(b"[redacted: stripe/key]" in places[place] for place in found)
    else:
        unseen = {place: FORMS.keys() - forms for place, forms in found.items()}
        assert not any(unseen.values()), unseen
    assert all(b"$secret" in places[place] for place in ("answers", "store"))


@pytest.mark.slow
async def test_the_bytes_of_a_secret_are_in_no_file_of_postgresql(
    leaky: LeakyApp, redacts: bool, postgres: Installation
) -> None:
    """Tables as they are on the disk, and the write-ahead log with everything that was ever written to them."""
    server = postgres.server()
    store = await hf.PostgresStore.open(server.dsn)
    try:
        await store.migrate()
        server.keep_uncompressed()
        async with leaky.app.node(store, options=hf.NodeOptions(queues=("far",))):
            await leaky.leak("far")
    finally:
        await store.close()
    files = server.files()
    found = {name: leaks(data, VALUE) for name, data in files.items()}
    written = {"tables", "write-ahead log"}
    if redacts:
        assert not any(found.values()), found
        assert all(b"[redacted: stripe/key]" in files[name] for name in written)
    else:
        unseen = {name: FORMS.keys() - found[name] for name in written}
        assert not any(unseen.values()), unseen
