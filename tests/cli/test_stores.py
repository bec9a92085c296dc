"""`holdfast store` and `holdfast bench`: a store as a whole, while nodes work on it and while they do not."""

from __future__ import annotations

import json
import os
import pty
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import Conflict, StoreCorrupt, StoreUnavailable
from holdfast.store.sqlite import backup
from holdfast.store.sqlite.backup import copy_store, file_info
from holdfast.store.sqlite.migrate import latest_version
from tests.cli.command_process import MOST_SECONDS, command, environment, run
from tests.cli.forked_commands import ForkedCommands

pytestmark = pytest.mark.process


def make_app() -> tuple[hf.App, Any]:
    """Return an app whose runs are done at once."""
    app = hf.App("shop")

    @app.workflow
    async def echo(value: str) -> str:
        return value

    return app, echo


async def fill(path: Path, count: int) -> None:
    """Put finished runs into a store."""
    app, echo = make_app()
    async with app.node(f"sqlite:///{path}"):
        for number in range(count):
            await (await app.start(echo, "x" * 1_000, run_id=f"run-{number}")).result()


async def test_a_store_is_made_looked_at_copied_and_put_back(forks: ForkedCommands, tmp_path: Path) -> None:
    env = environment(HOLDFAST_STORE="sqlite:///shop.db")
    done = forks.run(tmp_path, env, "store", "migrate", "--json")
    made = {"store": "sqlite:///shop.db", "schema_version": latest_version()}
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, made, "")
    await fill(tmp_path / "shop.db", 3)
    info = json.loads(forks.run(tmp_path, env, "store", "info", "--json").stdout)
    assert (info["runs"], info["schema_version"], info["latest_version"]) == (3, latest_version(), latest_version())
    done = forks.run(tmp_path, env, "store", "backup", "copy.db")
    assert done.returncode == 0, done.stderr
    assert "runs            3\n" in done.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"shop.db", "copy.db"}
    done = forks.run(tmp_path, env, "store", "backup", "copy.db")
    assert (done.returncode, done.stdout) == (4, "")
    assert "copy.db: this is there already, and nothing is overwritten" in done.stderr
    done = forks.run(tmp_path, env, "store", "restore", "copy.db")
    assert (done.returncode, "shop.db: this is there already" in done.stderr) == (4, True)
    done = forks.run(tmp_path, env, "store", "restore", "copy.db", "--store", "sqlite:///other.db", "--json")
    assert json.loads(done.stdout)["runs"] == 3
    listed = forks.run(tmp_path, env, "run", "list", "--store", "sqlite:///other.db", "--json")
    assert [run["run_id"] for run in json.loads(listed.stdout)["items"]] == ["run-2", "run-1", "run-0"]


async def test_a_store_of_a_server_is_looked_at(forks: ForkedCommands, tmp_path: Path, postgres_url: str) -> None:
    """Without its password."""
    app, echo = make_app()
    async with app.node(postgres_url):
        await (await app.start(echo, "x")).result()
    done = forks.run(tmp_path, environment(), "store", "info", "--store", postgres_url, "--json")
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert info["software"].startswith("PostgreSQL ")
    assert (info["runs"], info["by_status"], info["schema_version"]) == (1, {"COMPLETED": 1}, info["latest_version"])


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["store", "backup", "copy.db"], b"copying"),
        (["doctor"], b"reading runs"),
        (["run", "bulk", "retry", "--status", "COMPLETED", "--yes"], b"retry"),
    ],
)
async def test_long_work_shows_how_far_it_has_come_on_a_terminal(
    tmp_path: Path, words: list[str], shown: bytes
) -> None:
    await fill(tmp_path / "shop.db", 3)
    screen, terminal = pty.openpty()
    env = environment(HOLDFAST_STORE="sqlite:///shop.db", TERM="xterm")
    with subprocess.Popen(
        command(*words), cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=terminal, text=True
    ) as process:
        os.close(terminal)
        said, _ = process.communicate(timeout=MOST_SECONDS)
    with open(screen, "rb") as written:
        assert shown in written.read1(100_000), said


async def test_a_copy_is_taken_while_a_node_works_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "STEP_PAGES", 20)
    app, echo = make_app()
    async with app.node(f"sqlite:///{tmp_path}/shop.db"):
        for number in range(30):
            await (await app.start(echo, "x" * 20_000, run_id=f"run-{number:03}")).result()
        other = sqlite3.connect(tmp_path / "shop.db", timeout=0, isolation_level=None)
        written: list[int] = []

        def write_meanwhile(done: int, of: int) -> None:
            other.execute("PRAGMA user_version = 0")  # a write transaction; it would raise if it had to wait
            other.execute("CREATE TABLE IF NOT EXISTS later (n)")
            written.append(done)

        with closing(other):
            copied = copy_store(tmp_path / "shop.db", tmp_path / "copy.db", write_meanwhile)
        assert len(written) > 1, "it is copied in several parts"
        assert copied.runs == 30
        await (await app.start(echo, "y", run_id="later")).result()
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("SELECT count(*) FROM sqlite_master WHERE name = 'later'").fetchone() == (0,)
        assert copy.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    async with app.node(f"sqlite:///{tmp_path}/copy.db"):
        assert await app.run("run-029").result() == "x" * 20_000


async def test_a_damaged_store_gives_no_copy(tmp_path: Path) -> None:
    await fill(tmp_path / "shop.db", 20)
    with (tmp_path / "shop.db").open("r+b") as file:
        file.seek(4_096 * 3)
        file.write(b"\xff" * 4_096 * 3)
    with pytest.raises((StoreCorrupt, StoreUnavailable)):
        copy_store(tmp_path / "shop.db", tmp_path / "copy.db")
    assert {file.name for file in tmp_path.iterdir()} <= {"shop.db", "shop.db-wal", "shop.db-shm"}


async def test_nothing_is_put_over_what_is_there(tmp_path: Path) -> None:
    await fill(tmp_path / "shop.db", 1)
    (tmp_path / "new.db-wal").touch()
    with pytest.raises(Conflict, match=r"new\.db-wal"):
        copy_store(tmp_path / "shop.db", tmp_path / "new.db")

    def race(done: int, of: int) -> None:
        (tmp_path / "late.db").write_text("mine")

    with pytest.raises(Conflict, match=r"late\.db"):
        copy_store(tmp_path / "shop.db", tmp_path / "late.db", race)
    assert (tmp_path / "late.db").read_text() == "mine"
    with pytest.raises(StoreUnavailable, match="nowhere does not exist"):
        copy_store(tmp_path / "shop.db", tmp_path / "nowhere" / "new.db")
    (tmp_path / "notes.txt").write_text("no store " * 100)
    with pytest.raises(StoreCorrupt):
        file_info(tmp_path / "notes.txt")


def test_what_is_wrong_with_a_store_is_told_with_what_to_do(forks: ForkedCommands, tmp_path: Path) -> None:
    env = environment()
    with closing(sqlite3.connect(tmp_path / "other.db")) as db:
        db.execute("CREATE TABLE t (a)")
        db.commit()
    for address in ("old", "older", "new"):
        done = forks.run(tmp_path, env, "store", "migrate", "--store", f"sqlite:///{address}.db")
        assert done.returncode == 0
    with closing(sqlite3.connect(tmp_path / "old.db")) as db:
        db.execute("DELETE FROM holdfast_schema")
        db.commit()
    with closing(sqlite3.connect(tmp_path / "older.db")) as db:
        db.execute("DELETE FROM holdfast_schema WHERE version < (SELECT max(version) FROM holdfast_schema)")
        db.execute("UPDATE holdfast_schema SET version = 1, oldest_reader = 1")
        db.commit()
    with closing(sqlite3.connect(tmp_path / "new.db")) as db:
        db.execute("INSERT INTO holdfast_schema VALUES (999, 999, 0)")
        db.commit()
    for words, code, said in [
        (
            ["run", "list", "--store", "sqlite:///none.db"],
            6,
            "none.db: there is no such store (make one with `holdfast store migrate --store ADDRESS`, or name another)",
        ),
        (["run", "list", "--store", "sqlite:///old.db"], 6, "bring it up to date with `holdfast store migrate`"),
        (["run", "list", "--store", "sqlite:///older.db"], 6, "Finish its runs with the Holdfast that made it"),
        (["run", "list", "--store", "sqlite:///new.db"], 6, "Upgrade Holdfast."),
        (["run", "list", "--store", "sqlite:///other.db"], 6, "belongs to another program"),
        (["run", "list", "--store", "orders.db"], 2, "is not known"),
        (["run", "list", "--store", "memory://"], 2, "begins empty"),
        (["store", "info", "--store", "sqlite:///none.db"], 6, "none.db: there is no such store"),
        (["store", "info", "--store", "sqlite:///new.db"], 6, "Upgrade Holdfast."),
        (["store", "info", "--store", "sqlite:///other.db"], 6, "is not a Holdfast store"),
        (["store", "backup", "a.db", "--store", "sqlite:///none.db"], 6, "there is no such store"),
        (
            ["store", "backup", "a.db", "--store", "postgresql://ann:secret@db/x"],
            2,
            "postgresql://ann@db/x is not a file: use pg_dump",
        ),
        (["store", "restore", "a.db", "--store", "postgresql://db/x"], 2, "use pg_restore"),
        (["store", "backup", "a.db", "--store", "memory://"], 2, "is not a SQLite file"),
        (["store", "migrate", "--store", "memory://"], 2, "ends with this command"),
        (["store", "restore", "none.db", "--store", "sqlite:///b.db"], 6, "there is no such store"),
        (["bench", "--store", "postgresql://db/x"], 2, "use pgbench"),
        (["bench", "--store", "sqlite:///nowhere/x.db"], 6, "nothing can be written here"),
    ]:
        done = forks.run(tmp_path, env, *words)
        assert (done.returncode, done.stdout) == (code, ""), (words, done.stderr)
        assert said in done.stderr
        assert done.stderr.startswith("holdfast: ")
        assert len(done.stderr.splitlines()) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"old.db", "older.db", "new.db", "other.db"}
    info = forks.run(tmp_path, env, "store", "info", "--store", "sqlite:///old.db", "--json")
    assert json.loads(info.stdout)["schema_version"] == 0, "one without a schema can be looked at"


async def test_what_cannot_be_shown_is_no_reason_to_fail(tmp_path: Path) -> None:
    app, echo = make_app()
    async with app.node(f"sqlite:///{tmp_path}/shop.db"):
        await (await app.start(echo, "x", run_id="räum-1")).result()
    done = run(tmp_path, "run", "list", HOLDFAST_STORE="sqlite:///shop.db", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith(r"r\xe4um-1")


def test_variables_for_clients_are_no_settings(forks: ForkedCommands, tmp_path: Path) -> None:
    env = environment(HOLDFAST_SERVER="http://127.0.0.1:1", HOLDFAST_TOKEN="t")
    assert forks.run(tmp_path, env, "store", "migrate").returncode == 0
    assert forks.run(tmp_path, env, "run", "list", "--store", "sqlite:///holdfast.db").returncode == 0
    assert forks.run(tmp_path, env, "run", "list").returncode == 6


def test_a_machine_is_measured_without_a_trace(forks: ForkedCommands, tmp_path: Path) -> None:
    done = forks.run(tmp_path, environment(), "bench", "--seconds", "0.2", "--json")
    measured = json.loads(done.stdout)
    assert measured["runs"] > 0
    assert measured["runs_per_s"] > 0
    assert measured["fsync_ms"] > 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_written_for_shells(forks: ForkedCommands, tmp_path: Path, shell: str) -> None:
    done = forks.run(tmp_path, environment(), "completion", shell)
    assert done.returncode == 0
    assert "check-histories" in done.stdout
