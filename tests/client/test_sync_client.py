"""The client for code without an event loop: in process, by many threads, across forks, and how it ends."""

import asyncio
import gc
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.client import SyncClient
from holdfast.errors import EngineError, InvalidInput, NotDurable, NotFound, RunFailed, UpdateFailed

WHO: ContextVar[str] = ContextVar("who", default="nobody")


def make_app() -> hf.App:
    """Return an app with a run that waits, answers and ends."""
    app = hf.App("shop")

    @app.workflow
    async def order(item: str, count: int = 1) -> str:
        seen = [item]
        hf.publish(item=item)
        hf.on_query("seen", lambda: seen)

        def rename(name: str) -> None:
            seen.append(name)

        hf.on_update("rename", rename)
        approved = await hf.wait_signal("approval", bool)
        return f"{count} {seen[-1]} {approved}"

    @app.workflow
    async def failing() -> None:
        raise hf.WorkflowFailed("by design")

    return app


def workflow(app: hf.App, name: str) -> hf.Workflow[..., str]:
    """Return a registered workflow."""
    return hf.Workflow(app.registry.workflow(name))


@pytest.fixture
def app() -> hf.App:
    return make_app()


@pytest.fixture
def client(app: hf.App, tmp_path: Path) -> Iterator[SyncClient]:
    with SyncClient(app, f"sqlite:///{tmp_path}/shop.db", node=hf.NodeOptions()) as client:
        yield client


@pytest.mark.contract("API-1")
def test_a_run_is_started_signalled_and_awaited_without_a_loop(app: hf.App, client: SyncClient) -> None:
    run = client.start(workflow(app, "order"), "lamp", count=2, request_id="r-1", tags=("a",))
    assert client.start(workflow(app, "order"), "lamp", count=2, request_id="r-1").run_id == run.run_id
    assert run.query("seen") == ["lamp"]
    run.update("rename", name="desk")
    run.signal("approval", True, signal_id="s-1")
    assert run.result() == "2 desk True"
    assert run.status() == "COMPLETED"
    assert run.published() == {"item": "lamp"}
    assert run.events()[-1].event_type == "RunCompleted"
    assert client.runs.get(run.run_id).tags == ("a",)
    assert client.run(run.run_id).snapshot().status == "COMPLETED"
    assert [each.event_type for each in client.runs.stream(run.run_id)][-1] == "RunCompleted"


def test_errors_are_those_of_the_app(app: hf.App, client: SyncClient) -> None:
    with pytest.raises(RunFailed, match="by design"):
        client.start(workflow(app, "failing")).result()
    with pytest.raises(NotFound):
        client.run("nowhere").status()
    run = client.start(workflow(app, "order"), "lamp")
    with pytest.raises(UpdateFailed):
        run.update("unknown")
    run.cancel("enough", wait=True)
    with pytest.raises(hf.errors.RunCancelled, match="enough"):
        run.result()


def test_threads_share_a_client(app: hf.App, client: SyncClient) -> None:
    def play(number: int) -> str:
        run = client.start(workflow(app, "order"), f"item {number}")
        run.signal("approval", True)
        return run.result()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(40))) == [f"1 item {number} True" for number in range(40)]


def test_the_first_call_opens_it_once_whichever_thread_it_is_in(app: hf.App, tmp_path: Path) -> None:
    client = SyncClient(app, f"sqlite:///{tmp_path}/shop.db")
    before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: id(client._open()), range(8)))) == 1
    client.close()
    assert threading.active_count() <= before + 1


def test_what_was_closed_says_so(app: hf.App, tmp_path: Path) -> None:
    client = SyncClient(app, f"sqlite:///{tmp_path}/shop.db")
    client.close()
    client.close()
    for ask in (lambda: client.runs.list(), lambda: client.start(workflow(app, "order"), "a")):
        with pytest.raises(EngineError, match="closed"):
            ask()


def test_who_waits_when_it_is_closed_is_told(app: hf.App, tmp_path: Path) -> None:
    client = SyncClient(app, f"sqlite:///{tmp_path}/shop.db", node=hf.NodeOptions())
    run = client.start(workflow(app, "order"), "lamp")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.result)
        while not app.runtime().runs_awaited:
            assert not waiting.done()
        client.close()
        with pytest.raises(EngineError):
            waiting.result(30)


async def test_it_does_not_block_an_event_loop(app: hf.App, tmp_path: Path) -> None:
    client = SyncClient(app, f"sqlite:///{tmp_path}/shop.db")
    with pytest.raises(InvalidInput, match="event loop"):
        client.runs.list()
    with pytest.raises(InvalidInput, match="event loop"):
        client.start(workflow(app, "order"), "lamp")


async def test_an_app_is_open_in_two_loops_at_once(app: hf.App) -> None:
    store = hf.MemoryStore()

    def script(address: str) -> str:
        with SyncClient(app, address, node=hf.NodeOptions()) as client:
            run = client.start(workflow(app, "order"), "there")
            run.signal("approval", True)
            return run.result()

    async with app.node(store):
        here = await app.start(workflow(app, "order"), "here")
        there = asyncio.create_task(asyncio.to_thread(script, "memory://"))
        await here.signal("approval", False)
        assert (await here.result(), await there) == ("1 here False", "1 there True")
        assert (await app.run(here.run_id).status()) == "COMPLETED"


def test_a_workflow_cannot_use_it(app: hf.App, client: SyncClient) -> None:
    @app.workflow
    async def careless() -> str:
        try:
            client.runs.list()
        except NotDurable:
            return "refused"
        return "done"

    assert client.start(careless).result() == "refused"


def test_an_address_takes_no_store() -> None:
    with pytest.raises(InvalidInput, match="a service has its own"):
        SyncClient("http://localhost:1", "sqlite:///a.db")
    with pytest.raises(InvalidInput, match="begins with http"):
        SyncClient("nonsense")
    with pytest.raises(InvalidInput, match="calls a service"):
        SyncClient("http://localhost:1").run("r")


def test_a_store_that_cannot_be_opened_is_the_callers_error(app: hf.App, tmp_path: Path) -> None:
    client = SyncClient(app, f"sqlite:///{tmp_path}/no/such/folder/shop.db")
    for _ in range(2):
        with pytest.raises(hf.errors.HoldfastError):
            client.runs.list()


def _child(client: SyncClient, answers: "multiprocessing.Queue[tuple[str, str]]") -> None:
    order: hf.Workflow[..., str] = hf.Workflow(client._app().registry.workflow("order"))
    run = client.start(order, "from the child")
    gc.collect()
    answers.put((run.run_id, str(run.status())))
    client.close()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python warns of forks beside threads, which is the point
def test_a_forked_process_opens_its_own(app: hf.App, tmp_path: Path) -> None:
    with SyncClient(app, f"sqlite:///{tmp_path}/shop.db") as client:
        mine = client.start(workflow(app, "order"), "from the parent")
        context = multiprocessing.get_context("fork")
        answers: multiprocessing.Queue[tuple[str, str]] = context.Queue()
        children = [context.Process(target=_child, args=(client, answers)) for _ in range(2)]
        for child in children:
            child.start()
        theirs = [answers.get(timeout=60) for _ in children]
        for child in children:
            child.join(60)
            assert child.exitcode == 0
        assert {status for _, status in theirs} == {"PENDING"}
        assert {run.run_id for run in client.runs.list().items} == {mine.run_id, *(run_id for run_id, _ in theirs)}


SCRIPT = """
import holdfast as hf
from holdfast.client import SyncClient
app = hf.App("shop")

@app.workflow
async def hello(name: str) -> str:
    return f"hello {name}"

client = SyncClient(app, "sqlite:///shop.db", node=hf.NodeOptions())
print(client.start(hello, "you").result())
"""


@pytest.mark.process
def test_a_script_that_just_ends_ends_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello you\n", "")
