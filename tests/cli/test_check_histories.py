"""`holdfast check-histories`: what new code would do to the runs of a store, before it is deployed."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.check_histories import check_runs, check_store, count_runs
from holdfast.store.port import Found
from holdfast.store.proxy import StoreProxy
from tests.cli.command_process import MOST_SECONDS, command, environment
from tests.cli.forked_commands import ForkedCommands
from tests.engine.harness import wait_for_event

pytestmark = pytest.mark.process

SHOP = """
import holdfast as hf

app = hf.App("shop")


@app.activity
async def pack(number: int) -> int:
    open("carried out", "w").close()
    return number


@app.workflow
async def order(number: int) -> int:
    await pack(number)
    await hf.wait_signal("go", str)
    return number
"""
CHANGED = SHOP.replace(
    "    await pack(number)\n", "    if number < 2:\n        await hf.sleep(1)\n    await pack(number)\n"
)
OUTGROWN = SHOP.replace("@app.workflow\n", '@app.workflow(version="2")\n')


def shop() -> tuple[hf.App, Any]:
    """Return the app as it is in `SHOP`."""
    app = hf.App("shop")

    @app.activity
    async def pack(number: int) -> int:
        return number

    @app.workflow
    async def order(number: int) -> int:
        await pack(number)
        await hf.wait_signal("go", str)
        return number

    return app, order


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Return a folder with a store of four runs: run-0 to run-2 wait, run-9 has finished."""
    app, order = shop()
    async with app.node(f"sqlite:///{tmp_path}/shop.db"):
        for number in (0, 1, 2, 9):
            started = await app.start(order, number % 9, run_id=f"run-{number}")
            await wait_for_event(started, "SignalWaiting")
        await started.signal("go", "")
        await started.result()
    (tmp_path / "same.py").write_text(SHOP)
    (tmp_path / "changed.py").write_text(CHANGED)
    (tmp_path / "outgrown.py").write_text(OUTGROWN)
    return tmp_path


def check(forks: ForkedCommands, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command on the folder's store; it leaves everything as it was."""
    before = (folder / "shop.db").read_bytes()
    done = forks.run(folder, environment(HOLDFAST_STORE="sqlite:///shop.db"), "check-histories", *arguments)
    assert (folder / "shop.db").read_bytes() == before
    assert not (folder / "carried out").exists()
    assert {file.name for file in folder.iterdir()} <= {
        "shop.db",
        "same.py",
        "changed.py",
        "outgrown.py",
        "__pycache__",
    }
    return done


@pytest.mark.contract("WF-3")
def test_code_that_fits_is_fine(forks: ForkedCommands, folder: Path) -> None:
    done = check(forks, folder, "same.py")
    assert (done.returncode, done.stderr) == (0, "runs checked: 3; would be paused: 0; store: sqlite:///shop.db\n")
    assert "order" in done.stdout
    done = check(forks, folder, "same.py:app", "--json", "--finished")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "runs checked: 4; would be paused: 0; store: sqlite:///shop.db\n"


@pytest.mark.contract("WF-3")
def test_code_that_has_changed_is_a_problem_of_the_runs_that_have_passed_it(
    forks: ForkedCommands, folder: Path
) -> None:
    done = check(forks, folder, "changed.py")
    assert (done.returncode, done.stderr) == (1, "runs checked: 3; would be paused: 2; store: sqlite:///shop.db\n")
    for run_id in ("run-0", "run-1"):
        assert f"{run_id}  order version 1: NondeterminismError at event 3\n" in done.stdout
    assert "    history:  StepStarted of step 'pack' (pack)\n    code:     StartTimer for step 'sleep'" in done.stdout
    assert f"    source:   {folder}/changed.py:" in done.stdout
    assert "run-2" not in done.stdout
    assert "run-9" not in done.stdout


@pytest.mark.contract("WF-3")
def test_json_is_one_object_for_each_problem(forks: ForkedCommands, folder: Path) -> None:
    done = check(forks, folder, "changed.py", "--json", "--finished")
    assert done.returncode == 1
    problems = [json.loads(line) for line in done.stdout.splitlines()]
    assert [problem["run_id"] for problem in problems] == ["run-0", "run-1", "run-9"]
    for problem in problems:
        variant, _, line = problem.pop("source").rpartition(":")
        assert (variant, CHANGED.splitlines()[int(line) - 1].strip()[:5]) == (f"{folder}/changed.py", "await")
        assert problem.pop("message").startswith("event 3: the history has StepStarted")
        assert problem == {
            "run_id": problem["run_id"],
            "plan_id": "order",
            "plan_version": "1",
            "code": "NondeterminismError",
            "run_seq": 3,
            "expected": "StepStarted of step 'pack' (pack)",
            "found": "StartTimer for step 'sleep'",
        }


@pytest.mark.contract("WF-3")
def test_a_version_that_is_gone_is_a_problem(forks: ForkedCommands, folder: Path) -> None:
    done = check(forks, folder, "outgrown.py")
    assert done.returncode == 1
    assert "run-0  order version 1: VersionMismatch\n    run run-0 needs version '1' of 'order'" in done.stdout


@pytest.mark.contract("WF-3")
def test_a_damaged_run_is_a_problem_and_the_others_are_checked(forks: ForkedCommands, folder: Path) -> None:
    with closing(sqlite3.connect(folder / "shop.db")) as db:
        number = "(SELECT run_no FROM runs WHERE run_id = ?)"
        db.execute("UPDATE runs SET snapshot = '{' WHERE run_id = 'run-0'")
        db.execute(f"UPDATE events SET idempotency_key = 'text' WHERE run_seq = 3 AND run_no = {number}", ("run-1",))
        db.execute(f"DELETE FROM events WHERE run_seq = 4 AND run_no = {number}", ("run-2",))
        db.execute(f"DELETE FROM events WHERE run_no = {number}", ("run-9",))
        db.commit()
    done = check(forks, folder, "same.py", "--json", "--finished")
    assert done.returncode == 1
    problems = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(problem["run_id"], problem["code"], problem["run_seq"]) for problem in problems] == [
        ("run-0", "StoreCorrupt", 0),
        ("run-1", "StoreCorrupt", 0),
        ("run-2", "HistoryGap", 0),
        ("run-9", "HistoryGap", 1),
    ]
    assert [problem["plan_id"] for problem in problems] == ["", "order", "order", "order"]
    done = check(forks, folder, "same.py", "--finished")
    assert done.stderr == "runs checked: 4; would be paused: 4; store: sqlite:///shop.db\n"
    assert "(unreadable)" in done.stdout


@pytest.mark.contract("WF-3")
async def test_every_page_is_read_and_damage_costs_only_the_damaged(tmp_path: Path) -> None:
    app, order = shop()
    address = f"sqlite:///{tmp_path}/many.db"
    async with app.node(address):
        for number in range(230):
            await app.start(order, number, run_id=f"run-{number:03}")
    with closing(sqlite3.connect(tmp_path / "many.db")) as db:
        db.execute("UPDATE runs SET snapshot = '{' WHERE run_id IN ('run-000', 'run-120', 'run-121', 'run-229')")
        db.commit()
    store = await hf.open_store(hf.Settings(store=address))
    try:
        checked = [run async for run in check_runs(app.registry, store)]
        assert [run.run_id for run in checked] == [f"run-{number:03}" for number in range(230)]
        damaged = ["run-000", "run-120", "run-121", "run-229"]
        assert [problem.run_id for problem in await check_store(app.registry, store)] == damaged
        assert await count_runs(store) == 230
    finally:
        await store.close()


async def test_a_history_is_taken_as_far_as_it_went_when_the_run_was_found() -> None:
    app, order = shop()
    store = hf.MemoryStore(limits=hf.Limits(page_items=3))  # a page ends in the middle of a turn
    async with app.node(store):
        run = await app.start(order, 1)
        found = await store.load([run.run_id])
        await wait_for_event(run, "SignalWaiting")
        assert found[0] is not None
        late = _Late(store, found[0].head)
        assert await check_store(app.registry, late) == []


class _Late(StoreProxy):
    """A store that found its run a while ago."""

    def __init__(self, store: hf.MemoryStore, head: Any) -> None:
        super().__init__(store)
        self._head = head

    async def find(self, query: Any) -> Any:
        return Found([] if query.after else [self._head])


async def test_a_store_without_runs_is_no_green_light(forks: ForkedCommands, tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text(SHOP)
    app, order = shop()
    address = f"sqlite:///{tmp_path}/other.db"
    async with app.node(address):
        pass
    done = forks.run(tmp_path, environment(), "check-histories", "same.py", "--store", address)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"holdfast: there is no run at all in {address}" in done.stderr
    async with app.node(address):
        started = await app.start(order, 1)
        await started.signal("go", "")
        await started.result()
    done = forks.run(tmp_path, environment(), "check-histories", "same.py", "--store", address)
    assert (done.returncode, done.stderr) == (0, f"runs checked: 0; would be paused: 0; store: {address}\n")


THREE_WAYS = """
from dataclasses import dataclass
import holdfast as hf

app = hf.App("shop")


@dataclass
class Order:
    number: int
    packed: bool = False


@app.activity
async def pack(number: int) -> int:
    return number


@app.activity
async def pack_order(order: Order) -> Order:
    return Order(order.number, True)


@app.workflow
async def by_code(number: int) -> int:
    await pack(number)
    await hf.wait_signal("go", str)
    return number


by_flow = app.flow("by_flow", Order, hf.Scene(hf.Act(pack_order), hf.Signal("go")))
PLAN = {
    "plan": "by_plan",
    "version": "1",
    "inputs": {"number": {"type": "integer"}},
    "steps": [
        {"id": "pack", "activity": "pack", "input": {"number": "${inputs.number}"}},
        {"id": "go", "signal": "go", "depends_on": ["pack"]},
    ],
}
"""


def load_module(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the very file that the command loads."""
    spec = importlib.util.spec_from_file_location("three_ways", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "three_ways", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.contract("WF-1", "WF-3")
async def test_flows_and_plans_are_checked_as_code_is(
    forks: ForkedCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "same.py").write_text(THREE_WAYS)
    (tmp_path / "changed.py").write_text(
        THREE_WAYS.replace("hf.Act(pack_order), hf.Signal", "hf.Sleep(1), hf.Signal").replace(
            "    await pack(number)\n", ""
        )
    )
    module = load_module(tmp_path / "same.py", monkeypatch)
    app, address = module.app, f"sqlite:///{tmp_path}/shop.db"
    async with app.node(address):
        runs = [
            await app.start(module.by_code, 1, run_id="code"),
            await app.start(module.by_flow, module.Order(1), run_id="flow"),
            await app.plans.start(module.PLAN, {"number": 1}, run_id="plan"),
        ]
        for run in runs:
            await wait_for_event(run, "SignalWaiting")
    done = forks.run(tmp_path, environment(), "check-histories", "same.py", "--store", address)
    assert (done.returncode, done.stderr) == (0, f"runs checked: 3; would be paused: 0; store: {address}\n")
    done = forks.run(tmp_path, environment(), "check-histories", "changed.py", "--store", address, "--json")
    problems = {problem["run_id"]: problem for problem in map(json.loads, done.stdout.splitlines())}
    assert (done.returncode, set(problems)) == (1, {"code", "flow"})  # the plan is data: no code of it has changed
    assert {problem["code"] for problem in problems.values()} == {"NondeterminismError"}
    assert "pack_order" in problems["flow"]["message"]


def test_a_store_that_is_not_there_is_not_made(forks: ForkedCommands, tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text(SHOP)
    (tmp_path / "empty.db").touch()
    for address, code, reason in [
        ("sqlite:///missing.db", 6, "missing.db: there is no such store"),
        ("sqlite:///empty.db", 6, "empty.db: the file is empty"),
        ("sqlite:///same.py", 6, "same.py: the file is"),
        ("memory://", 2, "begins empty"),
        ("missing.db", 2, "is not known"),
    ]:
        done = forks.run(tmp_path, environment(), "check-histories", "same.py", "--store", address)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith("holdfast: ")
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "empty.db").read_bytes() == b""
    assert (tmp_path / "same.py").read_text() == SHOP
    assert {file.name for file in tmp_path.iterdir()} <= {"same.py", "empty.db", "__pycache__"}


def test_a_store_of_another_program_or_of_another_version_is_left_as_it_is(forks: ForkedCommands, folder: Path) -> None:
    with closing(sqlite3.connect(folder / "shop.db")) as db:
        db.execute("DELETE FROM holdfast_schema")
        db.commit()
    done = check(forks, folder, "same.py")
    assert (done.returncode, done.stdout) == (6, "")
    assert "the schema is missing or old" in done.stderr
    with closing(sqlite3.connect(folder / "shop.db")) as db:
        db.execute("PRAGMA application_id = 7")
        db.commit()
    done = check(forks, folder, "same.py")
    assert (done.returncode, done.stdout) == (6, "")
    assert "belongs to another program" in done.stderr


def test_progress_is_shown_on_a_terminal_and_kept_out_of_the_output(folder: Path) -> None:
    screen, terminal = pty.openpty()
    arguments = command("check-histories", "changed.py", "--store", "sqlite:///shop.db", "--json")
    with subprocess.Popen(
        arguments, cwd=folder, env=environment(TERM="xterm"), stdout=subprocess.PIPE, stderr=terminal, text=True
    ) as process:
        os.close(terminal)
        stdout, _ = process.communicate(timeout=MOST_SECONDS)
    with open(screen, "rb") as shown:
        assert b"checking" in shown.read1(100_000)
    assert process.returncode == 1
    assert [json.loads(line)["run_id"] for line in stdout.splitlines()] == ["run-0", "run-1"]


def test_a_reader_that_has_seen_enough_is_no_error(folder: Path) -> None:
    receiving, sending = os.pipe()
    os.close(receiving)
    done = subprocess.run(
        command("check-histories", "changed.py", "--store", "sqlite:///shop.db", "--json"),
        cwd=folder,
        env=environment(),
        stdout=sending,
        stderr=subprocess.PIPE,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    os.close(sending)
    assert (done.returncode, done.stderr) == (130, "")
