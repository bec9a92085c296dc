"""`holdfast doctor`, as an operator runs it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.store.sqlite.connection import APPLICATION_ID
from tests.cli.command_process import environment
from tests.cli.forked_commands import ForkedCommands
from tests.postgres_server import sql

pytestmark = pytest.mark.process


async def fill(store: str, count: int) -> None:
    """Leave runs that wait for a signal, and as many that have ended."""
    app = hf.App("shop")

    @app.workflow
    async def order() -> bool:
        return await hf.wait_signal("go", bool)

    async with app.node(store):
        for number in range(count):
            await app.start(order, run_id=f"open-{number}")
            done = await app.start(order, run_id=f"done-{number}")
            await done.signal("go", True)
            await done.result()


def findings(report: dict[str, Any], subject: str) -> list[dict[str, Any]]:
    return [one for one in report["findings"] if one["subject"] == subject]


async def test_a_healthy_store_is_fine(forks: ForkedCommands, tmp_path: Path) -> None:
    await fill(f"sqlite:///{tmp_path}/shop.db", 3)
    done = forks.run(tmp_path, environment(), "doctor", "--store", "sqlite:///shop.db", "--thorough")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == "sqlite:///shop.db: all is well"
    note = next(number for number, line in enumerate(lines) if not line.startswith("fine "))
    assert lines[note].split(maxsplit=2)[:2] == ["note", "nodes"], "the node has stopped"
    assert "3 runs are not finished, and no node that runs workflows is alive" in lines[note]
    assert all(line.startswith("fine ") for line in [*lines[:note], *lines[note + 2 : -1]])
    assert "6 runs were read in full, and nothing is amiss" in done.stdout
    assert "SQLite" in lines[0]
    done = forks.run(tmp_path, environment(HOLDFAST_STORE="sqlite:///shop.db"), "doctor", "--sample", "2", "--json")
    report = json.loads(done.stdout)
    assert (report["store"], report["looked"], report["is_fine"]) == ("sqlite:///shop.db", True, True)
    assert report["runs_read"] == 2


@pytest.mark.contract("INV")
async def test_a_stuck_run_ends_with_1_and_says_what_to_do(forks: ForkedCommands, tmp_path: Path) -> None:
    await fill(f"sqlite:///{tmp_path}/shop.db", 2)
    app = hf.App("shop")

    @app.workflow
    async def nap() -> None:
        await hf.sleep(timedelta(days=1))

    async with app.node(f"sqlite:///{tmp_path}/shop.db"):
        asleep = await app.start(nap, run_id="asleep")
        while "TimerStarted" not in [event.event_type for event in await asleep.events()]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as db:
        db.execute("DELETE FROM messages WHERE run_no = (SELECT run_no FROM runs WHERE run_id = 'asleep')")
        db.execute("UPDATE runs SET ready_at = NULL WHERE run_id = 'asleep'")
    done = forks.run(tmp_path, environment(), "doctor", "--store", "sqlite:///shop.db", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["is_fine"]
    [stuck] = findings(report, "stuck runs")
    assert (stuck["level"], stuck["run_ids"]) == ("wrong", ["asleep"])
    done = forks.run(tmp_path, environment(), "doctor", "--store", "sqlite:///shop.db")
    assert done.returncode == 1
    assert "runs: asleep\n" in done.stdout
    assert "-> skip or retry the step" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("things are wrong")


def test_a_store_that_cannot_be_looked_at_ends_with_2(forks: ForkedCommands, tmp_path: Path) -> None:
    for address, said, advice in (
        ("sqlite:///none.db", "there is no such store", "name another with --store"),
        ("postgresql://ann:secret@127.0.0.1:1/shop", "cannot be reached", "see that it can be reached"),
    ):
        done = forks.run(tmp_path, environment(), "doctor", "--store", address, "--json")
        report = json.loads(done.stdout)
        assert (done.returncode, report["looked"], report["is_fine"]) == (2, False, False)
        assert said in report["findings"][0]["sentence"]
        assert report["findings"][0]["advice"] == advice
        assert "secret" not in done.stdout + done.stderr
        done = forks.run(tmp_path, environment(), "doctor", "--store", address)
        assert done.stdout.splitlines()[-1].endswith(": could not look")
    assert list(tmp_path.iterdir()) == [], "and none is made"
    done = forks.run(tmp_path, environment(), "doctor", "--store", "memory://")
    assert (done.returncode, "begins empty" in done.stderr) == (2, True)


def test_a_store_that_is_old_or_damaged_ends_with_1(forks: ForkedCommands, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "old.db")) as db:
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute("CREATE TABLE holdfast_schema (version INTEGER, oldest_reader INTEGER, applied_at INTEGER)")
    (tmp_path / "other.db").write_bytes(b"something else" * 100)
    for name, advice in (("old.db", "holdfast store migrate"), ("other.db", "restore a backup")):
        done = forks.run(tmp_path, environment(), "doctor", "--store", f"sqlite:///{name}", "--json")
        report = json.loads(done.stdout)
        assert (done.returncode, report["looked"], report["is_fine"]) == (1, True, False), name
        assert advice in report["findings"][0]["advice"]


@pytest.mark.parametrize("sample", ["-1", "100001", "many"])
def test_a_sample_has_a_sensible_size(forks: ForkedCommands, tmp_path: Path, sample: str) -> None:
    done = forks.run(tmp_path, environment(), "doctor", "--sample", sample)
    assert (done.returncode, "--sample" in done.stderr) == (2, True)


@pytest.mark.contract("STO-1")
def test_it_looks_at_a_server_too(forks: ForkedCommands, tmp_path: Path, empty_database: str) -> None:
    done = forks.run(tmp_path, environment(), "doctor", "--store", empty_database, "--json")
    assert (done.returncode, "store migrate" in json.loads(done.stdout)["findings"][0]["advice"]) == (1, True)
    assert sql(empty_database, "SELECT to_regnamespace('holdfast')") == [(None,)], "and changes nothing"
    assert forks.run(tmp_path, environment(), "store", "migrate", "--store", empty_database).returncode == 0
    done = forks.run(tmp_path, environment(), "doctor", "--store", empty_database)
    assert done.returncode == 0, done.stdout
    assert "PostgreSQL" in done.stdout
