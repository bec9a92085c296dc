"""What pages show in passing is executed too: each excerpt of a how-to, among the names that it takes for granted."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import runpy
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import holdfast as hf
from holdfast.client import Client
from holdfast.service import ServiceOptions, serve
from tests.cli.command_process import environment, run
from tests.examples.excerpts import DOCS, excerpts_of, free_port, function, play, with_parts

EXECUTED_ELSEWHERE = {
    "activity-limits.md": "test_activity_limits_page.py",
    "agents.md": "test_howto_pages.py",
    "flows.md": "test_howto_pages.py",
    "locks.md": "test_locks_page.py",
    "schedules.md": "test_schedules_page.py",
    "starting.md": "test_starting_page.py",
    "testing.md": "../testing/test_docs.py",
    "transactions.md": "test_transactions_page.py",
    "workflows.md": "test_pages.py",
}
"""Pages whose excerpts another module executes."""

EXECUTED_HERE = {
    "activities.md": 6,
    "bus.md": 1,
    "client.md": 1,
    "frameworks.md": 1,
    "limits.md": 1,
    "observing.md": 2,
    "operating.md": 5,
    "plans.md": 1,
    "postgresql.md": 1,
    "reconciliation.md": 1,
    "search.md": 1,
    "secrets.md": 5,
    "service.md": 1,
    "signals.md": 2,
    "streams.md": 2,
    "tasks.md": 3,
}
"""How many excerpts a page has that tests below execute."""

MOST_S = 20.0


def test_every_excerpt_is_executed_by_some_test() -> None:
    there = {str(page.relative_to(DOCS)): len(excerpts_of(str(page.relative_to(DOCS)))) for page in DOCS.rglob("*.md")}
    left = {page: count for page, count in there.items() if count and page not in EXECUTED_ELSEWHERE}
    assert left == EXECUTED_HERE
    here = Path(__file__).parent
    for page, module in EXECUTED_ELSEWHERE.items():
        assert page.partition("/")[0] in (here / module).read_text(encoding="utf-8")


def names(app: hf.App | None = None, **more: Any) -> dict[str, Any]:
    """Return what pages take for granted."""
    return {"hf": hf, "app": app or hf.App("shop"), "timedelta": timedelta, "dataclass": dataclass, **more}


async def result_of(run: hf.RunHandle[Any]) -> Any:
    """Wait for a run."""
    async with asyncio.timeout(MOST_S):
        return await run.result()


async def eventually(look: Callable[[], Awaitable[Any]]) -> Any:
    """Look until there is something, and return it."""
    async with asyncio.timeout(MOST_S):
        while not (found := await look()):  # noqa: ASYNC110 - what happens elsewhere has no event here
            await asyncio.sleep(0.002)
    return found


async def run_of(here: dict[str, Any], workflow: str, *args: Any) -> Any:
    """Start a workflow in memory, and return its result."""
    async with here["app"].node("memory://"):
        return await result_of(await here["app"].start(here[workflow], *args))


# --- activities


async def test_options_of_activities() -> None:
    here = names()
    defined, called = excerpts_of("activities.md")[0].split("\n\n")
    await play(with_parts(defined, {": ...": ": return f'{order_id} {cents}'"}), here)
    flow = function("@app.workflow\nasync def sell(order_id: str, cents: int) -> str:", f"return {called}")
    await play(flow, here)
    app: hf.App = here["app"]
    async with app.node("memory://", options=hf.NodeOptions(queues=("slow",))):
        assert await result_of(await app.start(here["sell"], "o-1", 4200)) == "o-1 4200"


async def test_errors_of_activities() -> None:
    class SoldOut(Exception):
        """There are no seats."""

    here = names(SoldOut=SoldOut)
    defined, called = excerpts_of("activities.md")[1].split("\n\n")
    await play(with_parts(defined, {": ...": ": raise SoldOut(seat)"}), here)
    body = with_parts(called, {"    ...": "    return f'{type(error).__name__}: {error.info.message}'"})
    await play(function("@app.workflow\nasync def sell() -> str:", body), here)
    assert await run_of(here, "sell") == "SoldOut: 12a"


async def test_an_activity_goes_on_where_its_heartbeats_end() -> None:
    copied: list[int] = []

    async def copy(page: Any) -> None:
        if page.number == 3 and copied.count(3) == 0:
            copied.append(3)
            raise ConnectionError
        copied.append(page.number)

    here = names(copy=copy, pages=[SimpleNamespace(number=number) for number in range(1, 5)])
    retry = "@app.activity(retry=hf.Retry(initial_ms=1))\nasync def copy_all() -> None:"
    await play(function(retry, excerpts_of("activities.md")[2]), here)
    await play(function("@app.workflow\nasync def backup() -> None:", "await copy_all()"), here)
    await run_of(here, "backup")
    assert copied == [1, 2, 3, 3, 4]


async def test_a_node_consumes_a_queue_only() -> None:
    store, is_open = hf.MemoryStore(), asyncio.Event()
    here = names(store=store, done=is_open)
    code = with_parts(
        excerpts_of("activities.md")[3],
        {
            "(scene: str) -> str: ...": '(scene: str) -> str: return f"{scene} is rendered"',
            "): ...": "): await done.wait()",
        },
    )
    await play(function("@app.workflow\nasync def film() -> str:", 'return await render("a house")'), here)
    worker = asyncio.create_task(play(code, here))
    await asyncio.sleep(0)
    other = hf.App("shop")
    other.registry = here["app"].registry
    async with other.node(store):
        assert await result_of(await other.start(here["film"])) == "a house is rendered"
    is_open.set()
    await worker


async def test_an_activity_is_completed_later() -> None:
    links: asyncio.Queue[str] = asyncio.Queue()

    async def send_mail(paper: str, link: str) -> None:
        links.put_nowait(link)

    here = names(send_mail=send_mail)
    code, completed = excerpts_of("activities.md")[4].split("\n\n")
    await play(
        with_parts(code, {"timeout=timedelta(days=2)": "timeout=timedelta(days=2), retry=hf.Retry(initial_ms=1)"}), here
    )
    await play(function("@app.workflow\nasync def contract() -> str:", 'return await sign("lease")'), here)
    complete, fail = completed.splitlines()
    app: hf.App = here["app"]
    async with asyncio.timeout(MOST_S), app.node("memory://"):
        run = await app.start(here["contract"])
        for line in (fail, complete):  # after a failure there is a new attempt, with a new token
            here["token"] = (await links.get()).partition("token=")[2]
            await play(line, here)
        assert await run.result() == "ann"


async def test_a_callback_is_made_before_it_is_submitted() -> None:
    answers: asyncio.Queue[str] = asyncio.Queue()

    async def pay(order: str, answer_to: str) -> None:
        answers.put_nowait(answer_to)

    @dataclass
    class Receipt:
        number: int

    here = names(bank=SimpleNamespace(pay=pay), Receipt=Receipt)
    code = with_parts(
        excerpts_of("activities.md")[5],
        {"receipt = await paid": "receipt = await paid\n    return str(receipt.number)"},
    )
    await play(code, here)
    app: hf.App = here["app"]
    async with asyncio.timeout(MOST_S), app.node("memory://"):
        run = await app.start(here["order"], "o-1")
        await app.complete_activity(await answers.get(), Receipt(7))
        assert await run.result() == "7"


# --- runs


async def test_sinks_can_be_declared() -> None:
    here = names()
    await play(excerpts_of("bus.md")[0], here)
    assert {sink.name for sink in here["app"].registry.sinks.values()} == {"billing", "orders", "log"}


async def test_limits_on_runs() -> None:
    here = names()
    code = with_parts(excerpts_of("limits.md")[0], {"-> int: ...": "-> int: return 7"})
    async with here["app"].node("memory://"):
        await play(code, here)
        assert await result_of(here["run"]) == 7


async def is_paused(run: hf.RunHandle[Any]) -> bool:
    """Return whether a run is paused."""
    return await run.status() == "PAUSED"


async def test_an_operator_pauses_a_run_and_retries_a_step() -> None:
    control, _, on_failure, _, _ = excerpts_of("operating.md")
    here = names(is_down=True)
    body = ": ...", ":\n    if is_down: raise ConnectionError\n    return order_id"
    await play(with_parts(on_failure, {"max_attempts=5": "max_attempts=2, initial_ms=1", body[0]: body[1]}), here)
    await play(function("@app.workflow\nasync def order(order_id: str) -> str:", "return await charge(order_id)"), here)
    app: hf.App = here["app"]
    async with asyncio.timeout(MOST_S), app.node("memory://"):
        run = await app.start(here["order"], "o-1", run_id="order-77")
        await eventually(lambda: is_paused(run))
        here["is_down"] = False
        await play(control, here)
        if await run.status() == "PAUSED":
            await run.resume()
        assert await run.result() == "o-1"


@pytest.mark.contract("SIG-13")
async def test_an_authoriser_says_who_may_do_what() -> None:
    async def admins(tenant: str) -> set[str]:
        return {"ann"}

    here = names(admins=admins)
    await play(excerpts_of("operating.md")[1], here)
    app: hf.App = here["app"]
    await play(function("@app.workflow\nasync def order() -> None:", 'await hf.wait_signal("note")'), here)
    async with app.node("memory://"):
        with pytest.raises(hf.errors.NotPermitted, match="is no admin of default"):
            await app.start(here["order"])


@pytest.mark.contract("MSG-3")
async def test_dead_letters_are_listed_and_requeued(capsys: pytest.CaptureFixture[str]) -> None:
    here = names()
    await play(function("@app.workflow\nasync def order() -> int:", 'return await hf.wait_signal("count", int)'), here)
    app: hf.App = here["app"]
    async with asyncio.timeout(MOST_S), app.node("memory://"):
        run = await app.start(here["order"], run_id="order-77")
        await run.signal("count", "many")
        await eventually(lambda: app.dead_letters(run_id="order-77"))
        await play(excerpts_of("operating.md")[3], here)
        assert capsys.readouterr().out.startswith("payload does not fit")
        await run.signal("count", 7)
        assert await run.result() == 7


async def test_limits_can_be_made() -> None:
    here = names()
    await play(excerpts_of("operating.md")[4], here)
    assert here["limits"].poison_retries == 5
    assert here["limits"].dead_letters.pauses_run


async def test_plans_are_registered_and_started() -> None:
    here = names()
    [text] = re.findall(r"```yaml\n(plan: etl\n.*?)```", (DOCS / "plans.md").read_text(), re.DOTALL)
    here["app"] = runpy.run_path(str(DOCS.parent / "examples" / "etl.py"))["app"]
    here["text"] = text
    async with asyncio.timeout(MOST_S), here["app"].node("memory://"):
        await play(excerpts_of("plans.md")[0], here)


@pytest.mark.postgres
async def test_a_node_on_postgresql(postgres_url: str) -> None:
    code = with_parts(excerpts_of("postgresql.md")[0], {"postgresql://orders@db.example/orders": postgres_url})
    await play(code, names())


async def test_operators_answer_what_is_unresolved() -> None:
    @dataclass
    class Charged:
        receipt: str

    app = hf.App("bank")
    calls: list[str] = []

    async def find(order: str) -> hf.Indeterminate:
        return hf.Indeterminate("the bank is closed")

    soon = hf.Retry(initial_ms=1)

    @app.activity(idempotency_key=lambda order: order, verify=find, verify_retry=soon, retry=soon)
    async def charge(order: str) -> str:
        calls.append(order)
        if calls.count(order) == 1:
            raise ConnectionError
        return f"second {order}"

    @app.workflow(failures=hf.errors.ActivityFailed)
    async def pay(order: str) -> str:
        return await charge(order)

    async with asyncio.timeout(MOST_S), app.node("memory://"):
        outcomes = []
        for number, line in enumerate(excerpts_of("reconciliation.md")[0].splitlines()):
            run = await app.start(pay, f"o-{number}")
            [task] = await eventually(partial(app.tasks.list, run_id=run.run_id, status="OPEN"))
            await play(line, names(app, task_id=task.task_id, ann=hf.Actor("ann", roles=("operator",))))
            try:
                outcomes.append(await run.result())
            except hf.errors.RunFailed as problem:
                outcomes.append(str(problem))
    assert outcomes[:2] == ["receipt-7", "second o-1"]
    assert "too old" in outcomes[2]


async def test_runs_are_found_and_counted() -> None:
    app = hf.App("shop", attributes={"cents": int})
    here = names(app, yesterday=datetime.now(UTC) - timedelta(days=1))
    await play(function("@app.workflow\nasync def order() -> None:", "pass"), here)
    async with app.node("memory://"), Client(app) as client:
        await result_of(await app.start(here["order"], attributes={"cents": 1_500}))
        here["client"] = client
        await play(excerpts_of("search.md")[0], here)
    assert len(here["page"].items) == here["counts"].total == 1


async def test_votes_are_counted_and_signals_sent_in_batches() -> None:
    @dataclass
    class Vote:
        count: int

    loop, batch = excerpts_of("signals.md")
    here = names(Vote=Vote)
    code = with_parts(loop, {"timeout=timedelta(hours=1)": "timeout=0.2"})
    await play(function("@app.workflow\nasync def poll(total: int = 0) -> int:", f"{code}\nreturn total"), here)
    await play(function("@app.workflow\nasync def go() -> int:", 'return await hf.wait_signal("go", int)'), here)
    await play(function("@app.workflow\nasync def basket() -> str:", 'return await hf.wait_signal("add", str)'), here)
    app: hf.App = here["app"]
    async with asyncio.timeout(MOST_S), app.node("memory://"):
        run = await app.start(here["poll"])
        for _ in range(3):
            await run.signal("vote", Vote(2))
        assert await run.result() == 6
        gone = await app.start(here["go"], run_id="r-1")
        await play(with_parts(batch, {", ...]": "]"}), here)
        assert await gone.result() == 1
        assert await result_of(here["run"]) == "pear"
        assert [answer.signal_id for answer in here["answers"]] == ["a"]


async def test_a_stream_is_resumed() -> None:
    tries: list[int] = []

    async def page(number: int) -> str:
        tries.append(number)
        if tries.count(2) == 1 and number == 2:
            raise ConnectionError
        return f"page {number}"

    here = names(page=page)
    code = with_parts(excerpts_of("streams.md")[0], {"@app.activity": "@app.activity(retry=hf.Retry(initial_ms=1))"})
    await play(code, here)
    await play(function("@app.workflow\nasync def book() -> None:", "await export(4)"), here)
    app: hf.App = here["app"]
    async with asyncio.timeout(MOST_S), app.node("memory://"):
        run = await app.start(here["book"])
        assert [chunk.value async for chunk in run.stream("pages")] == [f"page {number}" for number in range(4)]
        await run.result()


async def test_tasks_are_asked_claimed_and_completed(capsys: pytest.CaptureFixture[str]) -> None:
    asked, answered, allowed = excerpts_of("tasks.md")
    here = names()
    await play(asked, here)
    body = with_parts(allowed, {'    return "rejected"': '    return "nobody"'}) + "return approval.note"
    await play(function("@app.workflow\nasync def second() -> str:", body), here)
    app: hf.App = here["app"]
    ann = hf.Actor("ann", roles=("manager",))
    async with asyncio.timeout(MOST_S), app.node("memory://"):
        run = await app.start(here["order"], "o-1", 4200)
        await eventually(lambda: app.tasks.list(actor=ann, status="OPEN"))
        await play(answered, here)
        assert await run.result() == "paid"
        assert "approve" in capsys.readouterr().out
        skipped = await app.start(here["second"])
        [task] = await eventually(lambda: app.tasks.list(actor=ann, status="OPEN"))
        await skipped.skip_step(task.step_id)
        assert await skipped.result() == "nobody"


# --- secrets


@pytest.mark.contract("SEC-1")
async def test_secrets_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    declared, vault, filtered, spans, tested = excerpts_of("secrets.md")
    monkeypatch.setenv("SECRET_STRIPE_KEY", "sk_test_1234")

    async def paid(cents: int, api_key: str) -> str:
        return "ok" if api_key == "sk_test_1234" else api_key

    async def read(path: str, refs: Sequence[str]) -> Mapping[str, str]:
        return {ref: f"{path}:{ref}" for ref in refs}

    here = names(hf.App("shop", secrets="env://SECRET_"), stripe=SimpleNamespace(charge=paid))
    await play(declared, here)
    await play(function("@app.workflow\nasync def order() -> str:", "return await charge(100)"), here)
    assert await run_of(here, "order") == "ok"

    here = names(Sequence=Sequence, Mapping=Mapping)
    await play(vault, here)
    resolver = here["Vault"]()
    resolver.client = SimpleNamespace(read=read)
    own = hf.App("shop", secrets=resolver)

    @own.activity
    async def show(secret: hf.Secret) -> int:
        return len(secret.reveal())

    @own.workflow
    async def shown() -> int:
        return await show(hf.Secret("key"))

    async with own.node("memory://"):
        assert await result_of(await own.start(shown)) == len("default/default:key")

    written = io.StringIO()
    await play(filtered, names(handler=logging.StreamHandler(written)))
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    await play(spans, names(provider=provider, exporter=exporter, BatchSpanProcessor=BatchSpanProcessor))
    provider.shutdown()

    here = names()

    async def charge(cents: int, key: hf.Secret) -> str:
        return await paid(cents, key.reveal())

    await play(tested, names(charge=charge))


# --- what is observed


@pytest.mark.process
def test_logs_are_lines_of_json(tmp_path: Path) -> None:
    script = f"import logging\nimport holdfast as hf\n{excerpts_of('observing.md')[0]}\n"
    script += 'hf.App("shop").logger.info("it has begun", extra={"order": "o-1"})\n'
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    line = json.loads(done.stderr)
    assert (line["message"], line["order"]) == ("it has begun", "o-1")


async def test_runs_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exporter = InMemorySpanExporter()
    here = names(OTLPSpanExporter=lambda: exporter)
    await play(function("@app.workflow\nasync def order() -> str:", 'return "done"'), here)
    code = with_parts(excerpts_of("observing.md")[1], {"    ...": "    await (await app.start(order)).result()"})
    async with asyncio.timeout(MOST_S):
        await play(code, here)
    assert [span.name for span in exporter.get_finished_spans()] == ["run order"]


# --- over the service


SHOP = """
from dataclasses import dataclass
import holdfast as hf
app = hf.App("shop")

@dataclass
class Approval:
    approved: bool
    by: str = ""

@app.activity
async def ask(question: str) -> str:
    for token in ("It", " is"):
        await hf.stream("tokens").write(token)
    return "It is"

@app.workflow(signals={"approval": Approval})
async def order(order_id: str, cents: int = 0) -> str:
    await ask(order_id)
    approval = await hf.wait_signal("approval", Approval)
    return f"{order_id}: {approval.approved}"
"""


@asynccontextmanager
async def served(app: hf.App, url: str) -> AsyncIterator[str]:
    """Serve an app with a node, in this process."""
    port = free_port()
    task = asyncio.create_task(serve(app, url, options=ServiceOptions(is_open=True, port=port)))
    try:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except OSError:
                assert not task.done(), task.result()
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_the_service_of_the_page_is_served_and_asked(tmp_path: Path) -> None:
    """Its program and the lines for the terminal, at another port."""
    port = free_port()
    page = (DOCS / "service.md").read_text()
    [lines] = re.findall(r"^```sh\n(curl.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "shop.py").write_text(SHOP)
    code = with_parts(excerpts_of("service.md")[0], {"is_open=True": f"is_open=True, port={port}"})
    (tmp_path / "main.py").write_text(code)
    server = subprocess.Popen([sys.executable, "-W", "error", "main.py"], cwd=tmp_path, env=environment())
    try:
        typed(f"curl -s --retry 60 --retry-delay 1 --retry-connrefused http://127.0.0.1:{port}/v1/health")
        start, approve, ask = re.split(r"\n(?=curl)", lines.strip().replace("localhost:8321", f"127.0.0.1:{port}"))
        run_id = json.loads(typed(start))["run_id"]
        typed(approve, RUN=run_id)
        assert json.loads(typed(ask, RUN=run_id))["result"] == "o-1: True"
    finally:
        server.terminate()
        assert server.wait(MOST_S) in (0, -15)


def typed(line: str, **more: str) -> str:
    """Type a line, and return what comes."""
    done = subprocess.run(
        ["bash", "-c", line], env={**os.environ, **more}, capture_output=True, text=True, timeout=MOST_S, check=False
    )
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


async def test_a_service_in_a_process_that_takes_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    monkeypatch.setenv("HOLDFAST_STORE", url)
    for words in (("store", "migrate"), ("token", "create", "ann", "--role", "admin")):
        assert run(tmp_path, *words, "--store", url).returncode == 0
    here = names(os=os)
    await play(function("@app.workflow\nasync def order() -> None:", "pass"), here)
    await play(excerpts_of("frameworks.md")[0], here)
    async with here["service"].lifespan():
        started = await here["app"].start(here["order"])
        assert await started.status() == "PENDING"


@pytest.mark.contract("API-1")
async def test_the_client_of_the_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made: dict[str, Any] = {}
    exec(SHOP, made)
    async with asyncio.timeout(MOST_S), served(made["app"], f"sqlite:///{tmp_path}/shop.db") as address:
        [code] = excerpts_of("client.md")
        here = names(made["app"])
        await play(with_parts(code, {"http://localhost:8321": address, ', token="…"': ""}), here)
        shown = capsys.readouterr().out.splitlines()
        assert (shown[0], shown[-1]) == ("1 RunQueued", "o-1: True")
        assert shown[-2].endswith("RunCompleted")
        code = with_parts(excerpts_of("streams.md")[1], {"http://127.0.0.1:8321": address, ', token="…"': ""})
        await play(code, names(made["app"], Client=Client, run_id=here["run"].run_id))
        assert capsys.readouterr().out == "It is"
