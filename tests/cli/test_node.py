"""`holdfast node`: works until it is told to end, and then leaves nothing behind that others would wait for."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import processes
from holdfast.core import codec
from holdfast.core import events as e
from holdfast.engine.options import NodeOptions
from holdfast.engine.turns.draft import prepare_run
from holdfast.settings import without_password
from holdfast.store.port import Created
from holdfast.store.sqlite import SqliteStore
from tests.cli.command_process import MOST_SECONDS, ActivityServer, Running, environment, running
from tests.cli.forked_commands import ForkedCommands

pytestmark = pytest.mark.process

SHOP = """
import asyncio, os, socket
import holdfast as hf

app = hf.App("shop")


@app.activity
async def pack(number: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["DESK"]))
    try:
        writer.write(f"pack {number}\\n".encode())
        return (await reader.readline()).decode().strip()
    finally:
        writer.close()


@app.activity
def stamp(number: int) -> str:
    with socket.create_connection(("127.0.0.1", int(os.environ["DESK"]))) as desk:
        desk.sendall(f"stamp {number}\\n".encode())
        return desk.makefile().readline().strip()


@app.activity
async def freeze(number: int) -> str:
    return stamp.definition.function(number)  # blocks the event loop


@app.workflow
async def order(number: int) -> str:
    return await pack(number) + ", " + await pack(number + 1)


@app.workflow
async def letter(number: int) -> str:
    return await stamp(number)


@app.workflow
async def stuck(number: int) -> str:
    return await freeze(number)
"""

LEASE_S = NodeOptions().lease_ms / 1_000


class Shop:
    """A store, and nodes of their own processes that work on it."""

    def __init__(self, folder: Path, store: SqliteStore, activities: ActivityServer) -> None:
        self._folder = folder
        self._desk = activities
        self.store = store

    def node(self, *arguments: str) -> AbstractAsyncContextManager[Running]:
        """Run a node."""
        return running(
            self._folder, "node", "shop.py", "--store", "sqlite:///shop.db", *arguments, DESK=str(self._desk.port)
        )

    async def start(self, workflow: str = "order", run_id: str = "r") -> None:
        """Start a run. No node is here: it is for whoever finds it."""
        queued = e.RunQueued(workflow, "1", input=codec.encode({"number": 1}))
        [answer] = await self.store.create([prepare_run(run_id, queued, await self.store.now(), "test")])
        assert isinstance(answer, Created)

    async def types(self) -> list[str]:
        """Return the types of the run's events."""
        return [event.event_type for event in await self.store.read_events("r")]

    async def owner(self) -> str | None:
        """Return which node holds the run."""
        [loaded] = await self.store.load(["r"])
        assert loaded is not None
        return loaded.head.lease_owner


@pytest.fixture
async def activities() -> AsyncIterator[ActivityServer]:
    """Return where activities call."""
    async with ActivityServer.opened() as activities:
        yield activities


@pytest.fixture
async def shop(tmp_path: Path, activities: ActivityServer) -> AsyncIterator[Shop]:
    """Return a shop without a node."""
    (tmp_path / "shop.py").write_text(SHOP)
    store = await SqliteStore.open(tmp_path / "shop.db")
    await store.migrate()
    yield Shop(tmp_path, store, activities)
    await store.close()


@pytest.mark.contract("MSG-4", "OWN-3")
async def test_a_node_that_is_told_to_end_records_what_was_under_way_and_another_goes_on_at_once(
    shop: Shop, activities: ActivityServer
) -> None:
    async with shop.node("--drain-s", "1000", "--name", "first") as first, shop.node("--name", "second") as second:
        await first.until("works on")
        await second.until("works on")
        await shop.start()
        under_way = await activities.call()
        told, other = (first, second) if (await shop.owner() or "").startswith("first") else (second, first)
        told.send(signal.SIGTERM)
        await told.until("activities under way: 1")
        assert not (await shop.types()).count("StepCompleted")
        under_way.answer("box")
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        following = await activities.call()
        assert loop.time() - answered_at < LEASE_S / 2, "nobody waits for the lease to end"
        assert await told.ended() == 0
        following.answer("bag")
        other.send(signal.SIGTERM)
        assert await other.ended() == 0
    assert "activities cancelled" not in told.said
    types = await shop.types()
    assert (types.count("StepCompleted"), types[-1]) == (2, "RunCompleted")
    assert (await shop.store.read_events("r"))[-1].data == e.RunCompleted(result=codec.encode("box, bag"))


TALKING = """
import logging
import holdfast as hf

app = hf.App("talking")


@app.activity
async def pack(number: int) -> int:
    logging.getLogger("elsewhere").info("packing", extra={"number": number})
    return number


@app.workflow
async def order(number: int) -> int:
    app.logger.info("an order")
    return await pack(number)
"""


async def test_programs_read_the_log_as_lines_of_json(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(TALKING)
    await shop.start()
    async with shop.node("--json") as node:
        await node.until("packing")
        node.send(signal.SIGTERM)
        assert await node.ended() == 0
    lines = {line["message"]: line for line in map(json.loads, node.said.splitlines())}
    assert lines["an order"]["run_id"] == lines["packing"]["run_id"] == "r"
    assert (lines["packing"]["step_id"], lines["packing"]["number"]) == ("pack", 1)
    assert lines["packing"]["logger"] == "elsewhere"


LEAKING = """
import logging
import holdfast as hf

app = hf.App("leaking")
KEY = hf.Secret("stripe/key")


@app.activity(secrets=[KEY], retry=hf.Retry(max_attempts=1))
def pack(number: int) -> str:
    logging.getLogger("elsewhere").info("packing with %s", KEY.reveal(), extra={"header": [KEY.reveal()]})
    try:
        raise ValueError(KEY.reveal())
    except ValueError:
        logging.getLogger("elsewhere").exception("failed")
        raise


@app.workflow
async def order(number: int) -> str:
    return await pack(number)
"""


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["plain", "json"])
@pytest.mark.contract("SEC-1")
async def test_the_command_resolves_secrets_by_its_settings_and_redacts_its_log(
    shop: Shop, tmp_path: Path, form: tuple[str, ...]
) -> None:
    value = "sk_live_51HxYzAbC"
    (tmp_path / "shop.py").write_text(LEAKING)
    (tmp_path / "mounted" / "stripe").mkdir(parents=True)
    (tmp_path / "mounted" / "stripe" / "key").write_text(f"{value}\n")
    await shop.start()
    address = f"file://{tmp_path}/mounted"
    arguments = ("node", "shop.py", "--store", "sqlite:///shop.db", *form)
    async with running(tmp_path, *arguments, HOLDFAST_SECRETS=address) as node:
        await node.until("has failed: ")
        node.send(signal.SIGTERM)
        assert await node.ended() == 0
    assert "packing with [redacted: stripe/key]" in node.said
    assert "ValueError: [redacted: stripe/key]" in node.said
    assert value not in node.said
    assert not any(value.encode() in file.read_bytes() for file in tmp_path.glob("shop.db*") if file.is_file())


@pytest.mark.contract("MSG-4")
async def test_a_node_that_is_told_to_end_claims_nothing_more(shop: Shop, activities: ActivityServer) -> None:
    async with shop.node() as node:
        await shop.start("letter")
        under_way = await activities.call()
        node.send(signal.SIGTERM)
        await node.until("activities under way: 1")
        await shop.start("letter", "late")
        under_way.answer("stamped")
        assert await node.ended() == 0
    assert (await shop.types())[-2:] == ["StepCompleted", "RunCompleted"]
    assert [event.event_type for event in await shop.store.read_events("late")] == ["RunQueued"]


@pytest.mark.contract("MSG-4", "OWN-3", "ACT-1")
async def test_what_takes_too_long_is_given_back_to_a_node_that_is_waiting(
    shop: Shop, activities: ActivityServer
) -> None:
    async with shop.node("--drain-s", "0.2", "--name", "first") as first:
        await shop.start()
        await activities.call()
        assert (await shop.owner() or "").startswith("first#")
        async with shop.node("--name", "second") as second:
            await second.until("works on")
            loop = asyncio.get_running_loop()
            told_at = loop.time()
            first.send(signal.SIGTERM)
            again = await activities.call()
            assert loop.time() - told_at < LEASE_S / 2, "nobody waits for the lease to end"
            assert (await shop.owner() or "").startswith("second#")
            assert await first.ended() == 0
            again.answer("box")
            (await activities.call()).answer("bag")
            second.send(signal.SIGTERM)
            assert await second.ended() == 0
    assert "activities cancelled because they took too long: 1" in first.said
    assert "runs released: 1" in first.said
    types = await shop.types()
    assert (types.count("StepCompleted"), types.count("StepRetried"), types[-1]) == (2, 1, "RunCompleted")


@pytest.mark.contract("MSG-4")
async def test_an_activity_in_a_thread_does_not_keep_the_process(shop: Shop, activities: ActivityServer) -> None:
    async with shop.node("--drain-s", "0") as node:
        await shop.start("letter")
        await activities.call()
        node.send(signal.SIGTERM)
        assert await node.ended() == 0
    assert "are abandoned" in node.said
    assert await shop.owner() is None


@pytest.mark.untraced  # coverage saves its file inside os._exit: not in a handler that may have interrupted it
@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize(
    ("workflow", "number", "code"),
    [("order", signal.SIGTERM, 143), ("order", signal.SIGINT, 130), ("letter", signal.SIGTERM, 143)],
)
async def test_a_second_signal_ends_at_once(
    shop: Shop, activities: ActivityServer, workflow: str, number: signal.Signals, code: int
) -> None:
    async with shop.node("--drain-s", "1000") as node:
        await shop.start(workflow)
        await activities.call()
        node.send(number)
        await node.until("a second signal ends it at once")
        node.send(number)
        assert await node.ended() == code
    assert await shop.owner() is not None, "nothing was given back"


async def _insist(node: Any) -> None:
    while True:
        with suppress(ProcessLookupError):
            node.send(signal.SIGINT)
        await asyncio.sleep(0.1)


@pytest.mark.untraced  # coverage saves its file inside os._exit: not in a handler that may have interrupted it
async def test_two_signals_end_a_node_whose_loop_is_stuck(shop: Shop, activities: ActivityServer) -> None:
    async with shop.node() as node:
        await shop.start("stuck")
        await activities.call()
        node.send(signal.SIGTERM)
        insisting = asyncio.create_task(_insist(node))  # one alone may be told to a thread that is not stuck
        assert await node.ended() in (130, 143)
        insisting.cancel()


@pytest.mark.contract("MSG-4")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_node_with_nothing_to_do_ends_at_once_and_says_what_it_did(shop: Shop, number: signal.Signals) -> None:
    async with shop.node("--name", "quiet") as node:
        await node.until("works on letter, order, stuck; store: sqlite:///shop.db\n")
        node.send(number)
        assert await node.ended() == 0
    lines = node.said.splitlines()
    assert [line[:2] for line in lines] == ["20"] * 3, "the time comes first"
    assert all("INFO holdfast.node: node quiet#" in line for line in lines)
    assert number.name in lines[1]
    assert lines[2].endswith("has stopped")
    assert (await shop.store.stats()).nodes == 0


async def test_a_node_says_which_queues_it_works_on_and_that_its_store_is_new(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    for arguments, said in [
        (
            ["--no-runs", "--queue", "gpu", "--queue", "cpu"],
            "works on queue gpu, cpu; store: sqlite:///holdfast.db (new)",
        ),
        (["--queue", "gpu"], "works on letter, order, stuck and queue gpu; store: sqlite:///holdfast.db\n"),
    ]:
        async with running(tmp_path, "node", "shop.py", *arguments) as node:
            await node.until(said)
            node.send(signal.SIGTERM)
            assert await node.ended() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-runs"], "--no-runs leaves nothing to do: name a queue with --queue"),
        (["--queue", ""], "--queue must be a string that is not empty, not ''"),
        (["--queue", "gpu, cpu"], "--queue gpu, cpu is one name with a comma in it: use --queue gpu --queue cpu"),
        (["--queue", ","], "--queue , is one name with a comma in it: use another name"),
        (["--queue", "a\nb"], "--queue may not contain control characters: 'a\\nb'"),
        (["--queue", "q" * 201], f"--queue has at most 200 UTF-8 bytes: '{'q' * 201}'"),
        (
            ["--processes", "2", "--store", "memory://"],
            "each process would have a store of its own: --processes needs one that they share",
        ),
        (["--processes", "2", "--name", "a#b"], "the name of a node has no '#' in it: 'a#b-2'"),
    ],
)
def test_a_node_that_would_have_nothing_to_do_is_refused(
    forks: ForkedCommands, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    done = forks.run(tmp_path, environment(), "node", "shop.py", *arguments)
    assert (done.returncode, done.stderr) == (2, f"holdfast: {said}\n")
    assert not (tmp_path / "holdfast.db").exists()


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db"),
        ("memory://", "memory://"),
        ("postgresql://ann:pa@ss/word@db:5432/orders?password=more", "postgresql://ann@db:5432/orders"),
        ("postgresql://db/orders", "postgresql://db/orders"),
        ("postgresql://ann:x@db/orders?connections=2&schema=shop&password=y", "postgresql://ann@db/orders?schema=shop"),
        ("orders.db", "orders.db"),
    ],
)
def test_an_address_is_shown_without_passwords(address: str, shown: str) -> None:
    assert without_password(address) == shown


def test_a_node_without_a_store_says_so(forks: ForkedCommands, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    done = forks.run(tmp_path, environment(), "node", "shop.py", "--store", "sqlite:///nowhere/shop.db")
    assert done.returncode == 6
    assert "nowhere does not exist" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = forks.run(tmp_path, environment(), "node", "shop.py", "--drain-s", "-1")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


SEVERAL = """
import asyncio, os, signal, time
from pathlib import Path
import holdfast as hf

app = hf.App("several")


@app.activity
async def where() -> int:
    return os.getpid()


@app.activity
async def crash_once() -> str:
    if not os.path.exists("crashed"):
        open("crashed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@app.activity
async def freeze() -> None:
    Path("frozen").write_text("\\n")
    while True:
        time.sleep(0.01)


@app.activity
async def wait_for_go() -> str:
    Path("begun").write_text(f"{os.getpid()}\\n")
    while not os.path.exists("go"):
        await asyncio.sleep(0.01)
    return "done"


@app.workflow
async def waiting() -> str:
    return await wait_for_go()


@app.workflow
async def ask() -> int:
    return await where()


@app.workflow
async def crashing() -> str:
    return await crash_once()


@app.workflow
async def freezing() -> None:
    await freeze()
"""


class Several:
    """Nodes of one command, on a store that the test looks into."""

    def __init__(self, folder: Path, store: SqliteStore) -> None:
        self.folder = folder
        self.store = store

    def command(self, *arguments: str) -> AbstractAsyncContextManager[Running]:
        """Run the command, with two nodes called pair-1 and pair-2."""
        options = ("--store", "sqlite:///shop.db", "--processes", "2", "--name", "pair")
        return running(self.folder, "node", "shop.py", *options, *arguments)

    async def start(self, workflow: str, run_id: str) -> None:
        """Start a run, for the node that claims it."""
        queued = e.RunQueued(workflow, "1", input=codec.encode({}))
        [answer] = await self.store.create([prepare_run(run_id, queued, await self.store.now(), "test")])
        assert isinstance(answer, Created)

    async def result(self, run_id: str) -> Any:
        """Wait for the result of a run."""
        async with asyncio.timeout(MOST_SECONDS):
            while True:
                last = (await self.store.read_events(run_id))[-1].data
                if isinstance(last, e.RunCompleted):
                    return codec.decode(last.result, object)
                await asyncio.sleep(0.02)

    async def content(self, name: str) -> str:
        """Wait for a line in a file that an activity writes."""
        async with asyncio.timeout(MOST_SECONDS):
            file = self.folder / name
            while not file.exists() or not file.read_text().endswith("\n"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            return file.read_text()

    async def until_nodes(self, count: int) -> None:
        """Wait until the store knows so many nodes."""
        async with asyncio.timeout(MOST_SECONDS):
            while (await self.store.stats()).nodes != count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture
async def several(tmp_path: Path) -> AsyncIterator[Several]:
    """Return a store for nodes of one command."""
    (tmp_path / "shop.py").write_text(SEVERAL)
    store = await SqliteStore.open(tmp_path / "shop.db")
    await store.migrate()
    yield Several(tmp_path, store)
    await store.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.contract("MSG-4")
async def test_several_nodes_share_the_work_and_end_together(several: Several, number: signal.Signals) -> None:
    async with several.command() as nodes:
        await several.until_nodes(2)
        processes: set[int] = set()
        numbers = itertools.count()
        async with asyncio.timeout(MOST_SECONDS):
            while len(processes) < 2:
                run_ids = [f"r-{next(numbers)}" for _ in range(20)]
                for run_id in run_ids:
                    await several.start("ask", run_id)
                processes |= {await several.result(run_id) for run_id in run_ids}
        nodes.send(number)
        assert await nodes.ended() == 0
    assert "node pair-1#" in nodes.said
    assert "node pair-2#" in nodes.said
    assert nodes.said.count("has stopped") == 2
    assert (await several.store.stats()).nodes == 0


@pytest.mark.contract("OWN-3")
async def test_a_node_that_crashes_is_started_again_and_takes_over_what_it_held_at_once(several: Several) -> None:
    async with several.command("--lease-ms", "600000") as nodes:
        await several.until_nodes(2)
        await several.start("crashing", "r")
        await nodes.until("by SIGKILL, without stopping: starting it again")
        assert await several.result("r") == "survived", "nobody waits ten minutes for the lease to end"
        nodes.send(signal.SIGTERM)
        assert await nodes.ended() == 0


async def test_nodes_that_cannot_work_end_together_with_the_reason_and_its_exit_code(several: Several) -> None:
    (several.folder / "shop.py").write_text("import holdfast\nraise RuntimeError('no settings')\n")
    async with several.command() as nodes:
        assert await nodes.ended() == 2
    assert "RuntimeError: no settings" in nodes.said
    assert "the others end with it" in nodes.said


@pytest.mark.contract("MSG-4")
async def test_a_service_manager_may_signal_every_process_of_the_command(several: Several) -> None:
    async with several.command() as nodes:
        await several.until_nodes(2)
        await several.start("waiting", "r")
        process = int(await several.content("begun"))
        os.kill(process, signal.SIGTERM)
        await nodes.until("activities under way: 1")
        os.kill(process, signal.SIGTERM)  # as the command does, too
        (several.folder / "go").touch()
        assert await several.result("r") == "done"
        assert await nodes.ended() == 1, (
            "a node that ends alone ends the command, which must not look as if all was well"
        )
    assert nodes.said.count("has stopped") == 2


async def test_no_node_is_left_behind_when_the_command_is_killed(several: Several) -> None:
    async with several.command("--drain-s", "0") as nodes:
        await several.until_nodes(2)
        nodes.send(signal.SIGKILL)
        assert await nodes.ended() == -signal.SIGKILL, "which waits until the last node has closed its stderr"
        assert nodes.said.count("has stopped") == 2
    assert (await several.store.stats()).nodes == 0


@pytest.mark.untraced  # coverage saves its file inside os._exit: not in a handler that may have interrupted it
async def test_a_second_signal_ends_all_nodes_at_once_also_one_whose_loop_is_stuck(several: Several) -> None:
    async with several.command("--drain-s", "1000") as nodes:
        await several.until_nodes(2)
        await several.start("freezing", "r")
        await several.content("frozen")
        nodes.send(signal.SIGTERM)
        await nodes.until("has stopped")
        nodes.send(signal.SIGTERM)
        assert await nodes.ended() == 143
    assert nodes.said.count("has stopped") == 1


@pytest.mark.parametrize(
    ("heeds", "code", "said"),
    [
        ('trap "exit 0" TERM', 0, ""),
        ("true", 0, ""),  # as Python does before there is a handler
        ('trap "exit 6" TERM', 6, ""),
        ('trap "kill -9 $$" TERM', 1, "node a has ended by SIGKILL, while it was stopping"),
    ],
)
async def test_a_process_that_is_lost_while_it_stops_has_not_ended_well(
    heeds: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start() -> asyncio.subprocess.Process:
        script = f"{heeds}; echo up; while :; do sleep 0.05; done"
        process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n"
        asked.set_result("SIGTERM")
        return process

    async with asyncio.timeout(MOST_SECONDS):
        assert await processes.keep_alive("node a", start, asked, patience_s=None) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("refused", "code"), [(2, 3), (processes.CRASHES, 1)])
async def test_a_process_that_cannot_be_started_for_the_moment_is_started_later(
    refused: int, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have no memory, or too many processes, when one that has crashed is to be started again."""
    monkeypatch.setattr(processes, "PAUSE_S", 0.0)
    starts = itertools.count(1)

    async def start() -> asyncio.subprocess.Process:
        if next(starts) <= refused:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await asyncio.create_subprocess_exec("sh", "-c", "exit 3")

    asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(MOST_SECONDS):
        assert await processes.keep_alive("node a", start, asked, patience_s=None) == code
    said = capsys.readouterr().err
    assert said.count("node a could not be started: [Errno 11] Resource temporarily unavailable") == refused


async def test_a_process_that_has_just_ended_by_itself_is_no_error_to_who_ends_it() -> None:
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    ended = asyncio.ensure_future(process.wait())  # which is known at the next turn of the loop
    await processes._end(process, ended, None)
    assert ended.result() == 0
