"""`holdfast dev`: code that changes is taken up, code that is broken is waited with, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from holdfast.cli import dev_child
from holdfast.cli.dev_child import DevOptions
from holdfast.termination import LIFE
from tests.cli.command_process import MOST_SECONDS, Running, environment, running
from tests.cli.forked_commands import ForkedCommands

pytestmark = pytest.mark.process

SHOP = """
import holdfast as hf
import prices

app = hf.App("shop")


@app.activity(queue="slow")
async def price() -> str:
    return prices.PRICE


@app.workflow
async def order() -> str:
    await hf.wait_signal("go")
    return await price()
"""


async def address(process: Running) -> str:
    """Wait until it is served, and return where."""
    await process.until("is served at")
    found = re.search(r"is at (http://127\.0\.0\.1:\d+),", process.said)
    assert found is not None
    return found[1]


@pytest.mark.contract("API-4")
async def test_code_that_changes_is_taken_up_and_runs_go_on(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "prices.py").write_text("PRICE = 'old'\n")
    async with asyncio.timeout(MOST_SECONDS), running(tmp_path, "dev", "shop.py", "--port", "0") as process:
        url = await address(process)
        assert "ACCESS IS OPEN" in process.said
        assert "the store is sqlite:///holdfast.db (new)" in process.said
        async with httpx.AsyncClient(base_url=url, timeout=MOST_SECONDS) as http:
            await http.post("/v1/runs", json={"workflow": "order", "run_id": "r-1"})
            (tmp_path / "prices.py").write_text("PRICE = 'brand new'\n")
            await process.until("prices.py has changed: starting again")
            await http.post("/v1/runs/r-1/signals/go", json={})
            outcome = (await http.get("/v1/runs/r-1/result?wait_s=20")).json()
            assert outcome["result"] == "brand new", "which also shows that every queue is served"

            (tmp_path / "shop.py").write_text(SHOP + "def broken(:\n")
            await process.until("waiting for the code to change")
            assert "SyntaxError" in process.said
            waiting = asyncio.create_task(http.get("/v1/workflows"))
            (tmp_path / "shop.py").write_text(SHOP.replace("async def order", "async def mended"))
            [workflow] = (await waiting).json()["items"]
            assert workflow["name"] == "mended", "what was asked meanwhile is answered by the new code"
        process.send(signal.SIGINT)
        assert await process.ended() == 0
        assert process.said.count("the service has stopped") == 3


async def test_who_serves_ends_with_who_started_it(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "prices.py").write_text("PRICE = 'old'\n")
    async with asyncio.timeout(MOST_SECONDS), running(tmp_path, "dev", "shop.py", "--port", "0") as process:
        await address(process)
        process.send(signal.SIGKILL)
        await process.ended()  # its stderr is closed when nobody has it any more
        assert "the service has stopped" in process.said


DEADLY = """
import os
import holdfast as hf

app = hf.App("shop")


@app.workflow
async def thumbnail() -> None:
    os._exit(139)


@app.workflow
async def order() -> str:
    return "sent"
"""


@pytest.mark.contract("OWN-3")
async def test_a_run_that_ends_its_process_is_set_aside_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(DEADLY)
    async with asyncio.timeout(MOST_SECONDS), running(tmp_path, "dev", "shop.py", "--port", "0") as process:
        url = await address(process)
        async with httpx.AsyncClient(base_url=url, timeout=MOST_SECONDS) as http:
            with suppress(httpx.TransportError):  # the process may be gone before it has answered
                await http.post("/v1/runs", json={"workflow": "thumbnail", "run_id": "deadly"})
            await process.until("the process of the app has ended with 139, without stopping: starting it again")
            await process.until("takes over at once from")
            await process.until("run deadly is paused: PoisonTurn")
            await http.post("/v1/runs", json={"workflow": "order", "run_id": "r-1"})
            assert (await http.get("/v1/runs/r-1/result?wait_s=20")).json()["result"] == "sent"
        process.send(signal.SIGINT)
        assert await process.ended() == 0


@pytest.mark.parametrize("has_come", [True, False])
async def test_code_that_cannot_be_imported_is_waited_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_come: bool
) -> None:
    monkeypatch.setattr(dev_child, "POLL_S", 0.01)
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(dev_child, "note", lambda text: loop.call_soon_threadsafe(begun.set))
    (tmp_path / "stall.py").write_text("import missing_part\n")
    life, theirs = os.pipe()
    given = DevOptions(target=f"{tmp_path}/stall.py", store="memory://", host="", port=0, listener=0)
    monkeypatch.setenv(LIFE, str(life))
    waiting = asyncio.create_task(asyncio.to_thread(dev_child.run, given))
    async with asyncio.timeout(MOST_SECONDS):
        await begun.wait()
        if has_come:
            (tmp_path / "missing_part.py").touch()
        else:
            os.close(theirs)
        assert await waiting == (dev_child.RELOAD if has_come else 0)
    os.close(life)
    if has_come:
        os.close(theirs)


def test_what_dev_and_server_refuse(forks: ForkedCommands, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP.replace("import prices\n", ""))
    done = forks.run(tmp_path, environment(), "dev", "shop.py", "--host", "0.0.0.0")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "others can reach 0.0.0.0: use `holdfast server`" in done.stderr
    done = forks.run(tmp_path, environment(), "dev", "nowhere.py")
    assert (done.returncode, done.stderr) == (2, "holdfast: nowhere.py: there is no such file\n")
    done = forks.run(tmp_path, environment(), "server", "shop.py", "--port", "0")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert (
        "there is no token yet: `holdfast token create NAME --role admin --store sqlite:///holdfast.db`" in done.stderr
    )
    done = forks.run(tmp_path, environment(), "dev", "shop.py", "--port", "0", "--store", "sqlite:///nowhere/x.db")
    assert done.returncode == 6
    assert "nowhere does not exist" in done.stderr
