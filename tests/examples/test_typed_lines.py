"""The lines for a terminal that pages show in passing: typed as they stand, at a server that has what they ask for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from holdfast.settings import load_settings
from tests.cli.command_process import SOURCES, running
from tests.examples.excerpts import DOCS, free_port, with_parts
from tests.service.openid_provider import openid_provider

pytestmark = [pytest.mark.process, pytest.mark.slow]

MOST_S = 60.0

APP = """
from datetime import timedelta
from pathlib import Path
import holdfast as hf

app = hf.App("shop", attributes={"cents": int, "region": str}, artifacts=hf.Artifacts(Path.cwd() / "artifacts"))


accounts = app.lock("account")


@app.activity
async def step(number: int) -> int:
    return number


@app.activity
async def report() -> hf.Artifact:
    return await hf.put_artifact(b"a report", kind="report")


@app.workflow(failures=ValueError)
async def order(fails: bool = False) -> str:
    for number in range(6):
        await step(number)
    await hf.stream("tokens").write("It is durable.")
    await report()
    if fails:
        raise ValueError("by design")
    return "done"


@app.workflow
async def transfer(account: str) -> None:
    async with accounts(account):
        await hf.wait_signal("end")


@app.workflow
async def asking() -> str:
    answer = await hf.task("approve", dict)
    return answer["note"]


@app.activity
async def extract(day: str) -> list[str]:
    return [day]


@app.activity
async def load(file: str) -> int:
    return len(file)


@app.activity
async def unload(file: str) -> None: ...


@app.activity
async def check(rows: list[int]) -> None: ...
"""


TYPED_HERE = {"access", "artifacts", "fork", "locks", "plans", "retention", "search", "streams", "tasks"}
"""Pages whose lines are typed below."""

TYPED_ELSEWHERE = {
    "changing-code": "test_changing_page.py",
    "getting-started": "test_getting_started.py",
    "mcp": "../cli/test_mcp_client.py",
    "deployment": "../tools/test_systemd_page.py",
    "moving": "test_moving_page.py",
    "postgresql": "test_postgresql_page.py",
    "s3": "test_s3_page.py",
    "service": "test_excerpts.py",
    "tutorial/1-first-run": "test_tutorial.py",
    "tutorial/2-waiting": "test_tutorial.py",
    "tutorial/3-failure": "test_tutorial.py",
    "tutorial/4-tests": "test_tutorial.py",
    "tutorial/5-deployment": "test_tutorial.py",
}

NOT_TYPED = {
    "docker ": "there is no Docker; tests/tools/test_deploy.py lints what it reads, and runs what the containers run",
    "export POSTGRES_PASSWORD=": "only the containers read it",
}
"""Why some lines of typed pages are not typed. That their commands and options exist is checked all the same."""


def test_the_lines_of_every_page_are_typed_or_it_is_said_why_not() -> None:
    there = {
        str(page.relative_to(DOCS).with_suffix(""))
        for page in DOCS.rglob("*.md")
        if re.search(r"^```(?:sh|console)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert there == TYPED_HERE | TYPED_ELSEWHERE.keys()
    for page, module in TYPED_ELSEWHERE.items():
        assert page.partition("/")[0] in (Path(__file__).parent / module).read_text(encoding="utf-8")
    for page in TYPED_HERE:
        begins = ("curl ", "holdfast ", "HOLDFAST_")
        assert lines_of(f"{page}.md", begins) == lines_of(f"{page}.md", ""), "a line of another kind"
    not_typed = [page for page in there for _ in lines_of(f"{page}.md", tuple(NOT_TYPED))]
    assert not_typed == 5 * ["deployment"]


class Terminal:
    """A folder with an app that is served there, and a shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = str(free_port())
        (folder / "bin").mkdir()
        script = folder / "bin" / "holdfast"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W error -m holdfast "$@"\n')
        script.chmod(0o755)
        (folder / "orders.py").write_text(APP)
        mine = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        path = f"{folder}/bin{os.pathsep}{mine['PATH']}"
        address = f"http://127.0.0.1:{self.port}"
        self.env = {**mine, "PATH": path, "PYTHONPATH": SOURCES, "HOLDFAST_SERVER": address, "SERVER": address}
        self.type("holdfast store migrate --store sqlite:///orders.db")
        command = ["holdfast", "server", "orders.py", "--open", "--port", self.port, "--store", "sqlite:///orders.db"]
        with (folder / "log").open("w") as log:
            self._server = subprocess.Popen(command, cwd=folder, env=self.env, stderr=log, executable=str(script))
        self.type(f"curl -sf --retry 60 --retry-delay 1 --retry-connrefused {address}/v1/health")

    def type(self, line: str, code: int = 0) -> str:
        """Type a line that ends with this exit code, and return what comes."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=MOST_S,
            check=False,
        )
        assert done.returncode == code, (line, done.stdout, done.stderr)
        return done.stdout

    def start(self, workflow: str, *words: str) -> str:
        """Start a run, and return its id."""
        return str(json.loads(self.type(f"holdfast run start {workflow} {' '.join(words)} --json"))["run_id"])

    def until(self, line: str, text: str) -> str:
        """Type a line again until it shows a text; return the line that has it."""
        end = time.monotonic() + MOST_S
        while time.monotonic() < end:
            for shown in self.type(line).splitlines():
                if text in shown:
                    return shown
        raise AssertionError(f"{line} does not show {text!r}")

    def close(self) -> None:
        """Stop the server."""
        self._server.terminate()
        assert self._server.wait(MOST_S) == 0, (self.folder / "log").read_text()


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    assert shutil.which("curl"), "the pages use curl: make commands"
    made = Terminal(tmp_path_factory.mktemp("typed"))
    yield made
    made.close()


def lines_of(page: str, begins: str | tuple[str, ...] = "holdfast ") -> list[str]:
    """Return the lines for a terminal, those that go on in the next line as one."""
    text = (DOCS / page).read_text(encoding="utf-8").replace("\\\n", "")
    lines = []
    for kind, block in re.findall(r"^```(sh|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        mark = "$ " if kind == "console" else ""
        lines += [line.removeprefix(mark) for line in block.splitlines() if line.startswith(mark)]
    return [line for line in lines if line.startswith(begins)]


def test_access(terminal: Terminal) -> None:
    create, ask, *others = lines_of("access.md", ("holdfast token", "holdfast audit", "curl"))
    token = terminal.type(create).strip()
    assert token.startswith("holdfast_")
    ask = re.sub(r"Bearer \S+\"", f'Bearer {token}"', ask).replace(":8321", f":{terminal.port}")
    assert "items" in json.loads(terminal.type(ask))
    assert [line.split()[1] for line in others] == ["token", "audit", "audit"]
    for line in others:
        terminal.type(line)
    assert [json.loads(line) for line in (terminal.folder / "audit.jsonl").read_text().splitlines()]


async def test_access_behind_a_proxy_and_with_a_provider(terminal: Terminal) -> None:
    """Servers with the options of the page. A provider of this machine stands for `login.example.com`."""
    behind_a_proxy, with_a_provider = lines_of("access.md", "holdfast server")
    store = "sqlite:///orders.db"
    terminal.type(f"holdfast token create ann --role admin --store {store}")

    @asynccontextmanager
    async def serving(line: str) -> AsyncIterator[str]:
        words = shlex.split(line.replace("shop.py", "orders.py"))[1:]
        port = free_port()
        async with running(terminal.folder, *words, "--port", str(port), HOLDFAST_STORE=store) as server:
            await server.until("is served at")
            yield f"http://127.0.0.1:{port}/v1/runs"
            server.send(signal.SIGTERM)
            assert await server.ended() == 0, server.said

    async with httpx.AsyncClient() as client:
        async with serving(behind_a_proxy) as address:
            assert (await client.get(address)).status_code == 401
        async with openid_provider() as provider:
            provider.claims = {"sub": "ann", "aud": "holdfast", "groups": ["ops"], "org": "acme"}
            line = with_parts(with_a_provider, {"https://login.example.com/realms/ours": provider.issuer})
            async with serving(line) as address:
                for token, status in ((provider.token(), 200), (provider.token(groups=["cooks"]), 403)):
                    answer = await client.get(address, headers={"Authorization": f"Bearer {token}"})
                    assert answer.status_code == status, answer.text


def test_artifacts(terminal: Terminal) -> None:
    run_id = terminal.start("order", "--wait")
    [artifact] = json.loads(terminal.type(f"holdfast run snapshot {run_id} --json"))["artifacts"]
    [line] = lines_of("artifacts.md", "curl")
    terminal.env |= {"RUN": run_id, "ID": artifact["uri"].rpartition("/")[2], "HOLDFAST_TOKEN": ""}
    terminal.type(line.replace('-H "Authorization: Bearer $HOLDFAST_TOKEN"', "-f"))
    del terminal.env["HOLDFAST_TOKEN"]
    assert [path for path in terminal.folder.iterdir() if path.is_file() and path.read_bytes() == b"a report"]


def test_forks(terminal: Terminal) -> None:
    run_id = terminal.start("order", "--wait")
    failed = terminal.start("order", "fails:=true", '--attributes \'{"region": "eu"}\'')
    terminal.type(f"holdfast run result {failed} || true")
    fork, many, diff = lines_of("fork.md")
    answer = terminal.type(fork.replace("RUN-ID", run_id))
    [other] = re.findall(r"^run id\s+(\S+)", answer, re.MULTILINE)
    assert failed in terminal.type(many)
    terminal.type(diff.replace("OTHER-RUN-ID", other).replace("RUN-ID", run_id))


def test_locks(terminal: Terminal) -> None:
    first, second = terminal.start("transfer", "account=a"), terminal.start("transfer", "account=a")
    holders, waiting, take = lines_of("locks.md")
    lock = terminal.until(holders, "account").split()[0]
    terminal.until(waiting, "account")
    terminal.type(take.replace("RUN-ID", lock))
    assert lock != terminal.until(holders, "account").split()[0]
    assert {first, second}


def test_plans(terminal: Terminal) -> None:
    [text] = re.findall(r"```yaml\n(plan: etl\n.*?)```", (DOCS / "plans.md").read_text(), re.DOTALL)
    (terminal.folder / "etl.yaml").write_text(text)
    register, start, diff, several = lines_of("plans.md")
    terminal.type(register)
    (terminal.folder / "etl.yaml").write_text(text.replace('version: "1"', 'version: "2"'))
    terminal.type(register)
    terminal.type(diff)
    for verb in several.removeprefix("holdfast plan ").split("|"):
        terminal.type(f"holdfast plan {verb} {'' if verb in ('list', 'schema') else 'etl'}")
    terminal.type(start.replace("--wait", ""))


def test_retention() -> None:
    lines = lines_of("retention.md", "HOLDFAST_")
    environ = dict(line.split("=", 1) for line in lines)
    read = load_settings({name: value.strip("'") for name, value in environ.items()}).retention
    assert (read.finished_days, read.archive, len(read.rules)) == (90, "s3://backups/shop", 1)


def test_search(terminal: Terminal) -> None:
    run_id = terminal.start("order", '--attributes \'{"region": "eu", "cents": 1500}\'')
    found, counted = lines_of("search.md")
    assert run_id in terminal.type(found)
    terminal.type(counted)


def test_streams(terminal: Terminal) -> None:
    run_id = terminal.start("order", "--wait")
    listed, followed = lines_of("streams.md")
    assert "tokens" in terminal.type(listed.replace("RUN_ID", run_id))
    assert terminal.type(followed.replace("RUN_ID", run_id)).startswith("It is durable.")


def test_tasks(terminal: Terminal) -> None:
    run_id = terminal.start("asking")
    listed, completed = lines_of("tasks.md")
    task_id = terminal.until(listed, "approve").split()[0]
    terminal.type(completed.replace("TASK-ID", task_id))
    assert "a good customer" in terminal.type(f"holdfast run result {run_id}")


def test_the_runbook(terminal: Terminal) -> None:
    """Its commands are within its sentences. What they ask for need not be there."""
    text = (DOCS / "runbook.md").read_text(encoding="utf-8")
    typed = re.findall(r"`((?:holdfast|curl) [^`]+)`", text)
    assert len(typed) > 10
    run_id = terminal.start("asking")
    terminal.env["TOKEN"] = "none"
    for line in typed:
        line = line.replace("http://SERVER:8321", "$SERVER").replace("app.py", "orders.py").replace("NAME", "orders")
        line, code = line.replace(" STORE", " sqlite:///orders.db"), 0
        if re.search(r"requeue ID$", line):
            line, code = line.replace("ID", "2147483647"), 3
        terminal.type(line.replace("ID", run_id), code)
