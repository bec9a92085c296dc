"""A secret's bytes are nowhere: not in the store's files and tables, logs, traces and answers of the service.

Activities leak their secret in every form and by every way that there is. A search that shares nothing with the
redaction looks for it. If the redaction is switched off, the same search finds every form everywhere.
"""

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import holdfast as hf
from holdfast.core.redaction import Redactor
from holdfast.service.operations import OPERATIONS
from tests.secret_forms import FORMS, leaks
from tests.service.in_process import InProcessServer, serve_in_process

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytestmark = pytest.mark.contract("SEC-1")

VALUE = 'sk/+ "live" ñ€ 51HxYz'
KEY = hf.Secret("stripe/key")
TWICE = hf.Retry(max_attempts=2, initial_ms=1, factor=1.0, jitter=0.0)
foreign = logging.getLogger("somebody.elses.client")


class Nested(Exception):
    """An error that shows the value wherever an error can show something."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = f"code {text}"
        self.response = {"headers": {"authorization": text}}


class Vault:
    """The one provider of this test."""

    async def resolve(self, refs: Any, scope: Any) -> dict[str, str]:
        """Return the value of every secret."""
        return dict.fromkeys(refs, VALUE)


class Leaks:
    """An app that leaks, and what it has leaked to beside its store."""

    def __init__(self) -> None:
        self.app = hf.App("leaky", secrets=Vault())
        self.logs = io.StringIO()
        self.spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(hf.RedactingSpanProcessor(SimpleSpanProcessor(self.spans)))
        self._tracer = provider.get_tracer("somebody.elses")
        activities = [
            self.app.activity(retry=TWICE)(each)
            for each in (self.succeed_async, self.succeed_in_a_thread, self.fail_async, self.fail_in_a_thread)
        ]

        @self.app.workflow
        async def leaking(queue: str, key: hf.Secret) -> list[Any]:
            found: list[Any] = []
            for activity in activities:
                try:
                    found.append(await activity.options(queue=queue)(key))
                except hf.errors.ActivityFailed as failure:
                    found.append(str(failure))
            return found

        self.leaking = leaking

    async def succeed_async(self, key: hf.Secret) -> dict[str, Any]:
        """Leak, and return the value."""
        self._leak(key)
        await asyncio.sleep(0)
        return {"forms": _forms(key), key.reveal(): [key.reveal().encode()]}

    def succeed_in_a_thread(self, key: hf.Secret) -> list[str]:
        """Leak, and return the value, at the second attempt."""
        self._leak(key)
        if hf.activity_context().attempt == 1:
            raise ValueError(key.reveal())
        return list(_forms(key).values())

    async def fail_async(self, key: hf.Secret) -> None:
        """Leak, and fail."""
        await asyncio.sleep(0)
        self.fail_in_a_thread(key)

    def fail_in_a_thread(self, key: hf.Secret) -> None:
        """Leak, and fail with errors in errors."""
        self._leak(key)
        try:
            try:
                raise KeyError(_forms(key))
            except KeyError as problem:
                raise Nested(key.reveal()) from problem
        except Nested as problem:
            problem.add_note(f"note: {key.reveal()}")
            others = [ValueError(form) for form in _forms(key).values()]
            raise ExceptionGroup(f"group {key.reveal()}", [problem, *others]) from problem

    def _leak(self, key: hf.Secret) -> None:
        hf.activity_context().heartbeat(_forms(key))
        for log in (self.app.logger, foreign):
            for form in _forms(key).values():
                log.warning("calling with %s", form, extra={"header": {"authorization": form}})
            try:
                raise Nested(key.reveal())
            except Nested:
                log.exception("failed", extra={"header": None})
        with self._tracer.start_as_current_span(f"call {key.reveal()}") as span:
            span.set_attributes({"key": key.reveal(), key.reveal(): list(_forms(key).values())})
            span.add_event(key.reveal(), {"key": key.reveal()})
            span.record_exception(Nested(key.reveal()))


def _forms(key: hf.Secret) -> dict[str, str]:
    return {name: form(key.reveal()) for name, form in FORMS.items()}


@pytest.fixture
def leaky() -> Iterator[Leaks]:
    """Return an app that leaks, with its log."""
    leaky = Leaks()
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
async def test_the_bytes_of_a_secret_are_nowhere(leaky: Leaks, address: str, redacts: bool, queue: str) -> None:
    places: dict[str, bytes] = {}
    async with serve_in_process(address, app=leaky.app, node=hf.NodeOptions(queues=("far",))) as service:
        async with hf.traced(leaky.app, leaky.spans):
            run = await leaky.app.start(leaky.leaking, queue, KEY)
            assert len(await run.result()) == 4
        places["answers"] = b"\n".join([answer async for answer in answers(service, run.run_id)])
        places["store"] = await stored(address)
    places["store"] += await stored(address)
    places["log"] = leaky.logs.getvalue().encode()
    places["spans"] = "\n".join(span.to_json() for span in leaky.spans.get_finished_spans()).encode()
    found = {place: leaks(data, VALUE) for place, data in places.items()}
    if redacts:
        assert not any(found.values()), found
        assert all(b"[redacted: stripe/key]" in data for data in places.values())
    else:
        unseen = {place: FORMS.keys() - forms for place, forms in found.items()}
        assert not any(unseen.values()), unseen
    assert all(b"$secret" in places[place] for place in ("answers", "store"))
