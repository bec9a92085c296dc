"""Every command as a user runs it: a process of its own, that asks a real server, or a real store."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.commands import spec_of
from holdfast.cli.main import all_commands, with_stdin_last
from holdfast.service.operations import OPERATIONS
from tests.cli.command_process import MOST_SECONDS, command, environment
from tests.cli.forked_commands import ForkedCommands
from tests.cli.shop import SHOP

pytestmark = pytest.mark.process

Done = subprocess.CompletedProcess[str]


class CommandSetup:
    """A folder with an app, a store, and a server that runs it."""

    def __init__(self, folder: Path, url: str, forks: ForkedCommands) -> None:
        self.folder = folder
        self.url = url
        self.forks = forks

    def hf(self, *words: str, code: int = 0) -> Done:
        """Run a command that asks the server; it must end with this code."""
        done = self.run(*words, HOLDFAST_SERVER=self.url)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done

    def run(self, *words: str, **more: str) -> Done:
        """Run a command."""
        return self.forks.run(self.folder, environment(**more), *words)

    def json(self, *words: str, code: int = 0) -> Any:
        """Run a command, and return what it writes for programs."""
        return json.loads(self.hf(*words, "--json", code=code).stdout)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, forks: ForkedCommands) -> Iterator[CommandSetup]:
    """Return a folder whose server is running: all tests of this module share it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "shop.py").write_text(SHOP)
    with serving(folder, "--store", "sqlite:///shop.db", "--open") as (url, said):
        assert "access is open" in said
        setup = CommandSetup(folder, url, forks)
        setup.hf("run", "start", "echo", "--run-id", "run-0", "--wait")
        yield setup


@contextmanager
def serving(folder: Path, *words: str, **more: str) -> Iterator[tuple[str, str]]:
    """Run a server, and give its address and what it has said; then let it end in order."""
    started = command("server", "shop.py", "--port", "0", *words)
    process = subprocess.Popen(started, cwd=folder, env=environment(**more), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while not (found := re.search(r"is served at (http://\S+)", said)):
        line = process.stderr.readline()
        assert line, said
        said += line
    try:
        yield found[1], said
    except BaseException:
        process.kill()
        process.communicate()
        raise
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=MOST_SECONDS)
    assert process.returncode == 0
    assert "the service has stopped" in rest


def start(setup: CommandSetup, *words: str, run_id: str) -> str:
    assert setup.json("run", "start", *words, "--run-id", run_id)["run_id"] == run_id
    return run_id


def until(ask: Callable[[], Any], is_it: Callable[[Any], bool]) -> Any:
    """Ask until the answer is as it should be. Each question is a process, which is pause enough."""
    end = time.monotonic() + MOST_SECONDS
    while not is_it(answer := ask()):
        assert time.monotonic() < end, answer
    return answer


@pytest.mark.contract("API-1", "SIG-12")
def test_a_run_from_its_start_to_its_end(setup: CommandSetup) -> None:
    run_id = start(setup, "order", "order_id=o-1", "cents:=4200", "--tag", "web", "--tag", "new", run_id="run-1")
    until(lambda: setup.json("run", "waits", run_id), lambda page: page["items"])
    shown = setup.hf("run", "show", run_id).stdout
    assert re.search(r"^status +RUNNING$", shown, re.MULTILINE)
    assert re.search(r"^tags +web, new$", shown, re.MULTILINE)
    assert re.search(r"^created at +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(\d+ s ago\)$", shown, re.MULTILINE)
    assert re.search(r"^approval +RUNNING +signal", shown, re.MULTILINE)
    assert setup.hf("run", "query", run_id, "progress").stdout == '{"order_id":"o-1"}\n'
    assert "progress" in setup.hf("run", "handlers", run_id).stdout
    assert setup.hf("run", "update", run_id, "double", "number:=21", "--update-id", "u-1").stdout == "42\n"
    assert run_id in setup.hf("signal", "waiting", "--name", "approval").stdout
    assert "run-1" in setup.hf("run", "list", "--tag", "web", "--created-from", "1h").stdout
    accepted = setup.json("run", "signal", run_id, "approval", "approved:=true", "--signal-id", "click-1")
    assert (accepted["accepted"], accepted["signal_id"]) == (True, "click-1")
    assert setup.hf("run", "result", run_id).stdout == '"o-1: true"\n'.replace("true", "True")
    tail = setup.hf("run", "tail", run_id).stdout.splitlines()
    assert (tail[0].split()[2], tail[-1].split()[2]) == ("RunQueued", "RunCompleted")
    lines = [json.loads(line) for line in setup.hf("run", "tail", run_id, "--json", "--after", "2").stdout.splitlines()]
    assert [event["run_seq"] for event in lines] == list(range(3, len(tail) + 1))
    assert setup.json("signal", "receipt", run_id, "approval", "click-1")["status"] == "consumed"
    assert setup.json("signal", "mailbox", run_id) == {"items": [], "next": None, "as_of": None}
    assert setup.json("signal", "unconsumed", "--finished")["items"] == []
    assert [event["run_seq"] for event in setup.json("run", "events", run_id, "--limit", "2")["items"]] == [1, 2]
    assert setup.json("run", "get", run_id)["status"] == setup.json("run", "snapshot", run_id)["status"] == "COMPLETED"
    assert setup.json("run", "graph", run_id, "--expand", "a", "--expand", "b")["kind"] == "code"
    again = setup.json("run", "retry", run_id, "--signal-id", "again-1")
    assert again["run_id"] != run_id
    assert setup.hf("run", "start", "echo", "value=x", "--wait").stdout == '"x"\n'
    assert setup.hf("run", "start", "failing", "--wait", code=1).stderr.endswith(": ValueError: by design\n")


@pytest.mark.contract("API-1", "SIG-13")
def test_commands_to_runs(setup: CommandSetup) -> None:
    run_id = start(setup, "order", "order_id=o-2", run_id="run-2")
    assert setup.json("run", "pause", run_id, "--reason", "lunch", "--wait")["is_decided"]
    assert setup.json("run", "get", run_id)["status"] == "PAUSED"
    assert setup.json("run", "resume", run_id, "--wait")["command"] == "RESUME"
    assert "has started already" in setup.hf("run", "approve", run_id, "--wait", code=4).stderr
    assert setup.json("run", "cancel", run_id, "--wait")["is_decided"]
    assert "run-2 has been cancelled" in setup.hf("run", "result", run_id, code=1).stderr
    ended = start(setup, "order", "order_id=o-3", run_id="run-3")
    assert setup.json("run", "terminate", ended, "--wait")["command"] == "EMERGENCY_STOP"
    paying = start(setup, "paying", "order_id=o-4", run_id="run-4")
    until(lambda: setup.json("run", "get", paying), lambda run: run["status"] == "PAUSED")
    assert "step 'no-such-step' has not failed" in setup.hf("run", "retry-step", paying, "no-such-step", code=4).stderr
    done = setup.hf("run", "retry-step", paying, "charge")
    assert f"accepted; the run decides, and may refuse: see `holdfast run events {paying}`" in done.stderr
    until(lambda: setup.json("run", "get", paying), lambda run: run["status"] == "PAUSED")
    assert setup.json("run", "retry-step", paying, "charge", "--wait")["is_decided"]
    until(lambda: setup.json("run", "get", paying), lambda run: run["status"] == "PAUSED")
    assert setup.json("run", "skip", paying, "charge", '"paid in cash"', "--wait")["is_decided"]
    assert setup.hf("run", "result", paying).stdout == '"paid in cash"\n'


@pytest.mark.contract("SIG-13", "SIG-5")
@pytest.mark.parametrize("target", ["server", "store"])
def test_a_cancel_that_is_sent_again_with_its_id_is_decided_once(setup: CommandSetup, target: str) -> None:
    run_id = start(setup, "order", "order_id=o-5", run_id=f"run-5-{target}")
    asked = {"server": {"HOLDFAST_SERVER": setup.url}, "store": {"HOLDFAST_STORE": "sqlite:///shop.db"}}[target]
    sent = [setup.run("run", "cancel", run_id, "--signal-id", "stop-1", "--json", **asked) for _ in range(3)]
    assert [done.returncode for done in sent] == [0, 0, 0], [done.stderr for done in sent]
    assert sent[0].stdout == sent[1].stdout == sent[2].stdout
    assert "has been cancelled" in setup.hf("run", "result", run_id, code=1).stderr
    events = [event["event_type"] for event in setup.json("run", "events", run_id)["items"]]
    assert [events.count(kind) for kind in ("SignalAccepted", "RunCancelRequested", "RunCancelled")] == [1, 1, 1]


@pytest.mark.contract("API-1", "TSK-1")
def test_something_is_done_to_all_tasks_that_a_filter_finds(setup: CommandSetup) -> None:
    for number in range(3):
        start(setup, "asking", "who=everybody", run_id=f"bulk-{number}")
    wanted = ("--workflow", "asking", "--text", "everybody")
    page = until(lambda: setup.json("task", "list", *wanted, "--status", "OPEN"), lambda page: len(page["items"]) == 3)
    preview = setup.json("task", "bulk", "reassign", *wanted, "--preview")
    assert preview["tasks"] == [task["task_id"] for task in page["items"]]
    assert "has to be confirmed" in setup.hf("task", "bulk", "reassign", *wanted, code=2).stderr
    assert "takes no answer" in setup.hf("task", "bulk", "claim", "true", *wanted, code=2).stderr
    unanswered = setup.hf("task", "bulk", "complete", *wanted, "--yes", code=2)
    assert "takes the answer that all of them get" in unanswered.stderr
    assert "run id" in setup.hf("task", "list", *wanted).stdout.splitlines()[0]
    none = setup.hf("task", "bulk", "complete", "true", *wanted, "--overdue")
    assert "concerns 0 tasks" in none.stdout
    assert "none that concern you" in none.stderr
    assert "seen by an admin" in setup.hf("task", "list", *wanted, "--overdue").stderr
    assert setup.json("task", "list", *wanted, "--overdue")["items"] == []
    done = setup.hf("task", "bulk", "reassign", *wanted, "--to", "dora", "--yes")
    assert done.stdout == "reassign: 3 done, 0 refused\n"
    refused = setup.json("task", "bulk", "complete", "7", "--assignee", "dora", "--actor", "dora", "--yes", code=1)
    assert (refused["done"], len(refused["refused"])) == (0, 3)
    done = setup.hf("task", "bulk", "complete", "true", "--assignee", "dora", "--actor", "dora", "--yes")
    assert done.stdout == "complete: 3 done, 0 refused\n"


@pytest.mark.contract("API-1", "MSG-3")
def test_all_dead_letters_that_a_filter_finds_are_requeued_or_dropped(setup: CommandSetup) -> None:
    for number in range(3):
        run_id = start(setup, "trusting", run_id=f"trusting-{number}")
        until(functools.partial(setup.json, "run", "waits", run_id), lambda page: page["items"])
        setup.hf("run", "signal", run_id, "count", '"many"')
    found = until(lambda: setup.json("dead-letter", "list"), lambda page: len(page["items"]) == 3)["items"]
    bulk = ("dead-letter", "bulk")
    assert setup.json(*bulk, "drop", "--preview")["dead_letters"] == [letter["letter_id"] for letter in found]
    assert "concerns 0 dead letters" in setup.hf(*bulk, "drop", "--reason", "undecodable", "--yes").stdout
    refused = setup.hf(*bulk, "requeue", code=2)
    assert "requeue concerns 3 dead letters" in refused.stdout
    assert "has to be confirmed" in refused.stderr
    assert setup.hf(*bulk, "requeue", "--run-id", "trusting-0", "--yes").stdout == "requeue: 1 done, 0 refused\n"
    first = max(letter["died_at"] for letter in found)
    back = until(lambda: setup.json("dead-letter", "list"), lambda page: len(page["items"]) == 3)["items"]
    assert [letter["run_id"] for letter in back if letter["died_at"] > first] == ["trusting-0"], "it still does not fit"
    done = setup.hf(*bulk, "drop", "--reason", "payload does not fit", "--actor", "dora", "--yes")
    assert done.stdout == "drop: 3 done, 0 refused\n"
    assert setup.json("dead-letter", "list")["items"] == []
    assert {letter["settled"] for letter in setup.json("dead-letter", "list", "--settled")["items"]} >= {"drop"}


def test_a_lone_hyphen_is_the_standard_input() -> None:
    assert with_stdin_last(["run", "start", "order", "-"]) == ["run", "start", "order", "--", "-"]
    assert with_stdin_last(["call", "runs.start", "-", "--json"]) == ["call", "runs.start", "--json", "--", "-"]
    assert with_stdin_last(["call", "runs.start", "--json", "-"]) == ["call", "runs.start", "--json", "--", "-"]
    assert with_stdin_last(["run", "start", "a", "--tag=x", "-"]) == ["run", "start", "a", "--tag=x", "--", "-"]
    assert with_stdin_last(["run", "start", "a", "--tag", "-"]) == ["run", "start", "a", "--tag", "-"]
    assert with_stdin_last(["--json", "-"]) == ["--json", "-"]
    for kept in (["artifact", "get", "a", "-o", "-"], ["run", "start", "order", "--", "-"], ["run", "list"]):
        assert with_stdin_last(kept) == kept


@pytest.mark.contract("API-1", "TSK-1")
def test_tasks(setup: CommandSetup) -> None:
    run_id = start(setup, "asking", "who=cleo", run_id="run-5")
    page = until(lambda: setup.json("task", "list", "--run-id", run_id), lambda page: page["items"])
    task_id = page["items"][0]["task_id"]
    assert setup.json("task", "claim", task_id, "--actor", "ann")["assignee"] == "ann"
    assert setup.json("task", "release", task_id, "--actor", "ann")["assignee"] is None
    assert setup.json("task", "assign", task_id, "bob")["assignee"] == "bob"
    assert setup.json("task", "reassign", task_id, "cleo", "--role", "boss")["roles"] == ["boss"]
    setup.hf("task", "comment", task_id, "I have asked.", "--actor", "cleo")
    assert re.search(r"^assignee +cleo$", setup.hf("task", "show", task_id).stdout, re.MULTILINE)
    assert setup.json("task", "complete", task_id, "true", "--actor", "cleo")["status"] == "COMPLETED"
    assert "cleo" in setup.hf("task", "complete", task_id, "true", "--actor", "ann", code=4).stderr
    assert len(setup.json("task", "history", task_id)["items"]) >= 6
    assert setup.hf("run", "result", run_id).stdout == "true\n"


@pytest.mark.contract("API-1", "MSG-3")
def test_the_installation_and_what_else_there_is(setup: CommandSetup) -> None:
    assert setup.json("system", "health")["status"] == "ok"
    start(setup, "far", run_id="run-6")
    queues = until(lambda: setup.json("queue", "list"), lambda page: page["items"])
    assert queues["items"] == [{"name": "gpu", "jobs": 1}]
    assert setup.json("system", "stats")["jobs"] == 1
    assert [each["level"] for each in setup.json("system", "doctor")["items"] if each["subject"] == "clock"] == ["fine"]
    assert [node["is_here"] for node in setup.json("system", "nodes")["items"]] == [True]
    assert setup.json("system", "alerts") == {"items": []}
    assert setup.json("system", "takeovers")["items"] == []
    assert "items" in setup.json("system", "samples")
    assert "echo" in setup.hf("workflow", "list").stdout
    assert setup.json("workflow", "show", "order", "--version", "1")["name"] == "order"
    many = json.dumps([{"run_id": "run-6", "name": "a"}, {"run_id": "nowhere", "name": "a"}])
    sent = setup.json("signal", "send-many", many)["items"]
    assert (sent[0]["result"]["accepted"], sent[1]["problem"]["code"]) == (True, "NotFound")
    payload = ("--signal-payload", '{"approved": true}')
    started = setup.json("signal", "start-with", "order", "approval", "order_id=o-7", *payload)
    assert started["signal"]["accepted"]
    assert setup.json("dead-letter", "list") == {"items": [], "next": None, "as_of": None}
    for words in (("dead-letter", "show"), ("dead-letter", "requeue"), ("dead-letter", "drop")):
        assert "there is no dead letter 'none'" in setup.hf(*words, "none", code=3).stderr
    assert setup.json("call", "runs.get", "run_id=run-6")["workflow"] == "far"
    assert re.search(r"^runs.start +run start ", setup.hf("call").stdout, re.MULTILINE)


@pytest.mark.contract("API-1", "API-4")
def test_tokens(setup: CommandSetup) -> None:
    done = setup.hf("token", "create", "ann", "--role", "operator", "--scope", "runs:write", "--tenant", "acme")
    assert re.fullmatch(r"holdfast_[0-9a-f]{16}_[0-9a-f]{72}\n", done.stdout), "a shell can take it as it is"
    assert done.stderr == "holdfast: this is shown once, and only its hash is kept\n"
    prefix = done.stdout[:25]
    assert re.search(
        rf"^{prefix} +ann +operator +acme +.*in 90 d.* +yes$", setup.hf("token", "list").stdout, re.MULTILINE
    )
    revoked = setup.json("token", "revoke", prefix)
    assert (revoked["is_valid"], revoked["name"], revoked["scopes"]) == (False, "ann", ["runs:write"])
    assert "a token needs a role (viewer, " in setup.hf("token", "create", "bob", code=2).stderr
    unknown = setup.hf("token", "create", "bob", "--scope", "tasks", code=2).stderr
    assert re.search(r"scopes\[0\]: this is not one of admin, .*tasks:read, tasks:write", unknown)


@pytest.mark.contract("API-4", "FMT-2")
def test_what_is_leaked_or_to_be_forgotten_goes(setup: CommandSetup) -> None:
    token = setup.hf("token", "create", "lost", "--role", "viewer").stdout.strip()
    assert setup.json("token", "revoke-leaked", token)["is_valid"] is False
    assert "there is no run 'none'" in setup.hf("run", "delete", "none", code=3).stderr
    assert setup.json("tenant", "delete", "nobody", "--yes")["runs"] == 0
    assert "confirm with true" in setup.hf("tenant", "delete", "nobody", code=2).stderr


@pytest.mark.contract("API-4")
def test_the_audit_log_is_listed_and_exported(setup: CommandSetup) -> None:
    setup.hf("token", "create", "auditor", "--role", "viewer")
    newest = setup.json("audit", "list", "--limit", "1")["items"][0]
    assert (newest["operation"], newest["actor"], newest["by"]) == ("tokens.create", "anonymous", None), "it is open"
    assert "tokens.create" in setup.hf("audit", "list").stdout
    lines = [json.loads(line) for line in setup.hf("audit", "export").stdout.splitlines()]
    assert lines[-1] == newest
    assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    assert setup.hf("audit", "export", "--operation", "nothing").stdout == ""


@pytest.mark.contract("FMT-2", "API-1")
def test_what_is_over_is_archived_and_found_again(setup: CommandSetup, tmp_path: Path) -> None:
    """On a copy of the store, with the policy from the environment."""
    history = setup.json("run", "events", "run-0")["items"]
    assert setup.json("retention", "show")["history"] == []
    with closing(sqlite3.connect(setup.folder / "shop.db")) as db, closing(sqlite3.connect(tmp_path / "copy.db")) as to:
        db.backup(to)
    policy = {
        "HOLDFAST_RETENTION__FINISHED_DAYS": "0",
        "HOLDFAST_RETENTION__ARCHIVE": f"file://{tmp_path}/archive",
        "HOLDFAST_STORE": f"sqlite:///{tmp_path}/copy.db",
    }

    def lines(*words: str, code: int = 0) -> list[Any]:
        done = setup.run(*words, "--json", **policy)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    [preview] = lines("retention", "preview")
    [report] = lines("retention", "run")
    assert report["runs"] == report["archived"] == preview["runs"] > 0
    [page] = lines("archive", "list")
    assert "run-0" in [run["run_id"] for run in page["items"]]
    assert lines("archive", "show", "run-0")[0]["workflow"] == "echo"
    assert lines("archive", "events", "run-0")[0]["items"] == history
    head, *events = lines("archive", "export", "run-0")
    assert (head["run_id"], events) == ("run-0", history)
    assert len([line for line in lines("archive", "export") if "archived_at" in line]) == report["runs"]
    lines("archive", "export", "nowhere", code=3)


@pytest.mark.contract("API-4")
def test_the_first_token_is_made_on_the_store_and_opens_the_server(tmp_path: Path, setup: CommandSetup) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    direct = {"HOLDFAST_STORE": "sqlite:///own.db"}

    def run(*words: str, **more: str) -> Done:
        return setup.forks.run(tmp_path, environment(**more), *words)

    assert run("store", "migrate", **direct).returncode == 0
    token = run("token", "create", "ann", "--role", "viewer", **direct).stdout.strip()
    given: list[tuple[dict[str, str], int, str]] = [
        ({}, 5, "this needs a token, as `Authorization: Bearer holdfast_…`"),
        ({"HOLDFAST_TOKEN": f"{token[:-1]}x"}, 5, "this token is not valid"),
        ({"HOLDFAST_TOKEN": token}, 0, ""),
    ]
    with serving(tmp_path, "--store", "sqlite:///own.db") as (url, said):
        assert "access is open" not in said
        for more, code, told in given:
            done = run("workflow", "list", HOLDFAST_SERVER=url, **more)
            assert (done.returncode, told in done.stderr) == (code, True), done.stderr
        done = run("run", "start", "echo", "--token", token, HOLDFAST_SERVER=url)
        assert (done.returncode, done.stderr) == (5, "holdfast: this needs the scope 'runs:write'\n")


def test_what_is_wrong_is_told_in_one_line_with_its_exit_code(setup: CommandSetup) -> None:
    for words, code, said in [
        (["run", "show", "nowhere"], 3, "there is no run 'nowhere'"),
        (
            ["run", "start", "nothing"],
            3,
            "lists them; without a server, name the app with --app)",
        ),
        (["run", "start", "order", "order_id=x", "cents=500"], 2, "got `str` (name=TEXT is a text; what is none is"),
        (["run", "start", "order", "order_id:=7"], 2, "order_id"),
        (["run", "start", "order", "hello"], 2, "input: this is not JSON"),
        (["run", "list", "--status", "ASLEEP"], 2, "--status"),
        (["run", "list", "--limit", "501"], 2, "limit"),
        (["run", "list", "--created-from", "soon"], 2, "--created-from: 'soon' is not a time"),
        (["call", "runs.dance"], 3, "there is no operation 'runs.dance'"),
        (["call", "runs.get", "7"], 2, "a JSON object"),
        (
            ["run", "list", "--server", "127.0.0.1:8321"],
            2,
            "begins with http:// or https://, such as http://127.0.0.1:8",
        ),
        (["run", "list", "--server", "http://"], 2, "'http://' is not an address such as http://127.0.0.1:8321"),
        (["run", "list", "--server", "http://127.0.0.1:1"], 6, "no server answers at http://127.0.0.1:1"),
        (["run", "list", "--server", "http://x", "--store", "sqlite:///shop.db"], 2, "give one or the other"),
    ]:
        done = setup.hf(*words, code=code)
        assert done.stdout == ""
        assert done.stderr.startswith("holdfast: ")
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.contract("API-1")
def test_outcomes_by_token(setup: CommandSetup) -> None:
    def token_of(file: str) -> str:
        start(setup, "measuring", f"file={file}", run_id=file)
        until(lambda: (setup.hf("run", "get", file), (setup.folder / file).exists()), lambda seen: seen[1])
        return (setup.folder / file).read_text()

    token = token_of("measured")
    assert "takes no heartbeats" in setup.hf("activity", "heartbeat", token, code=4).stderr
    assert setup.json("activity", "complete", token, "42") == {"accepted": True}
    assert setup.hf("run", "result", "measured").stdout == "42\n"
    assert "takes no outcome any more" in setup.hf("activity", "complete", token, "43", code=4).stderr
    token = token_of("unmeasured")
    assert setup.json("activity", "fail", token, "--message", "out of order", "--no-retryable") == {"accepted": True}
    assert "out of order" in setup.hf("run", "result", "unmeasured", code=1).stderr


@pytest.mark.contract("API-2")
def test_errors_are_objects_for_programs(setup: CommandSetup) -> None:
    done = setup.hf("run", "get", "nowhere", "--json", code=3)
    assert json.loads(done.stderr)["code"] == "NotFound"
    assert done.stdout == ""
    for words in (["run", "get"], ["run", "lst"], ["run", "list", "--limit", "x"], ["run", "list", "--limit", "0"]):
        assert json.loads(setup.hf(*words, "--json", code=2).stderr)["code"] == "InvalidInput"


@pytest.mark.contract("API-1")
def test_a_store_answers_as_its_server_does(setup: CommandSetup) -> None:
    start(setup, "echo", "value=same", run_id="run-8")
    setup.hf("run", "result", "run-8")
    direct = {"HOLDFAST_STORE": "sqlite:///shop.db"}
    for words in (
        ["run", "get", "run-8"],
        ["run", "events", "run-8"],
        ["run", "show", "run-8"],
        ["run", "result", "run-8"],
    ):
        done = setup.run(*words, "--json", **direct)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout) == setup.json(*words)
    done = setup.run("run", "start", "echo", "value=x", **direct)
    assert done.returncode == 3
    assert done.stderr.startswith("holdfast: there is no workflow 'echo' here (")
    assert done.stderr.endswith("name the app with --app)\n")
    setup.run("token", "create", "viewer", "--role", "viewer", **direct)
    by = setup.json("audit", "list", "--limit", "1")["items"][0]["by"]
    assert f"  {by['name']} ({by['token_id']})  " in setup.hf("audit", "list", "--limit", "1").stdout
    done = setup.run("run", "start", "echo", "value=x", "--app", "shop.py", "--wait", **direct)
    assert (done.returncode, done.stdout) == (0, '"x"\n'), "the server's node has done it"
    done = setup.run("run", "tail", "run-8", **direct)
    assert done.stdout.splitlines()[-1].split()[2] == "RunCompleted"
    done = setup.run("run", "get", "nowhere", **direct)
    assert (done.returncode, done.stderr) == (3, "holdfast: there is no run 'nowhere'\n")


def test_who_has_seen_enough_is_no_error(setup: CommandSetup) -> None:
    words = " ".join(command("run", "events", "run-0"))
    done = subprocess.run(
        f"{words} | head -1",
        shell=True,
        cwd=setup.folder,
        env=environment(HOLDFAST_SERVER=setup.url),
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert done.stdout.startswith("run seq")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "closed", "code", "said"),
    [
        (("run", "events", "run-0"), ">&-", 0, ""),
        (("run", "events", "run-0"), "<&- >&- 2>&-", 0, ""),
        (("run", "start", "echo", "-"), "<&-", 2, "input: this is not JSON"),
        (("run", "get", "nowhere"), "2>&-", 3, ""),
        (("run", "events", "run-0"), ">/dev/full", 6, "the output cannot be written: No space left on device"),
        (("run", "events", "run-0", "--json"), ">/dev/full", 6, "the output cannot be written"),
        (("completion", "bash"), ">/dev/full", 6, "the output cannot be written"),
    ],
)
def test_a_command_copes_with_streams_that_are_closed_or_full(
    setup: CommandSetup, words: tuple[str, ...], closed: str, code: int, said: str
) -> None:
    done = subprocess.run(
        f"{' '.join(command(*words))} {closed}",
        shell=True,
        cwd=setup.folder,
        env=environment(HOLDFAST_SERVER=setup.url),
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == bool(said)
    assert said in done.stderr


@pytest.mark.parametrize(("more", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_is_kept_within_its_width(setup: CommandSetup, more: dict[str, str], is_coloured: bool) -> None:
    screen, terminal = pty.openpty()
    env = environment(HOLDFAST_SERVER=setup.url, COLUMNS="60", TERM="xterm-256color", **more)
    process = subprocess.Popen(command("run", "list"), cwd=setup.folder, env=env, stdout=terminal)
    os.close(terminal)
    shown = _read_all(screen)
    assert process.wait(MOST_SECONDS) == 0
    assert ("\x1b[3" in shown) == is_coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, plain.splitlines())) <= 60
    assert "COMPLETED" in plain


def _read_all(screen: int) -> str:
    shown = b""
    while True:
        try:
            part = os.read(screen, 65_536)
        except OSError:  # whoever wrote has gone
            part = b""
        if not part:
            os.close(screen)
            return shown.decode()
        shown += part


def test_interrupting_is_clean(setup: CommandSetup) -> None:
    start(setup, "order", "order_id=o-9", run_id="run-9")
    env = environment(HOLDFAST_SERVER=setup.url)
    words = command("run", "tail", "run-9")
    process = subprocess.Popen(
        words, cwd=setup.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().split()[2] == "RunQueued"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=MOST_SECONDS)
    assert (process.returncode, err) == (130, "")


PLAN = """\
plan: etl
version: "{version}"
inputs:
  rows: {{type: integer, default: {version}}}
steps:
  - {{id: rest, sleep: 0.01}}
  - {{id: more, sleep: 0.0{version}, depends_on: [rest]}}
output: ${{inputs.rows}}
"""


@pytest.mark.contract("WF-1")
def test_a_plan_from_its_text_to_its_result(setup: CommandSetup, tmp_path: Path) -> None:
    for version in "12":
        (tmp_path / f"{version}.yaml").write_text(PLAN.format(version=version))
    (tmp_path / "wrong.yaml").write_text(PLAN.format(version="1").replace("[rest]", "[nothing]"))
    assert setup.json("plan", "validate", str(tmp_path / "1.yaml"))["is_valid"] is True
    wrong = setup.hf("plan", "validate", str(tmp_path / "wrong.yaml"), code=1)
    assert "nothing" in wrong.stdout + wrong.stderr
    for version in "12":
        assert setup.json("plan", "register", str(tmp_path / f"{version}.yaml"))["plan_version"] == version
    assert [plan["plan_version"] for plan in setup.json("plan", "list", "--plan-id", "etl")["items"]] == ["1", "2"]
    assert setup.json("plan", "show", "etl")["plan_version"] == "2"
    shown = setup.hf("plan", "show", "etl").stdout
    assert shown.endswith(f"\n\n{PLAN.format(version=2)}"), "the text as it was written"
    assert '"nodes"' not in shown
    changed = setup.json("plan", "diff", "etl", "1", "2")["changed"]
    assert [change["step_id"] for change in changed] == ["more"]
    lines = [line.split() for line in setup.hf("plan", "diff", "etl", "1", "2").stdout.splitlines()]
    assert ["more", "sleep", "0.01", "0.02"] in lines
    graph = setup.json("plan", "graph", "etl", "--from-version", "1")
    assert {node["id"]: node.get("change") for node in graph["nodes"]} == {"rest": None, "more": "changed"}
    lines = [line.split() for line in setup.hf("plan", "graph", "etl").stdout.splitlines()]
    assert ["more", "timer", "rest", "sleep", "0.02"] in lines
    assert json.loads(setup.hf("plan", "schema").stdout)["title"] == "Holdfast plan"
    assert "depends_on" in json.dumps(setup.json("plan", "schema"))
    run_id = setup.json("plan", "start", "etl", "rows:=7")["run_id"]
    assert setup.hf("run", "result", run_id, "--wait-s", "10").stdout == "7\n"


@pytest.mark.contract("BUS-1")
def test_a_sink_is_made_paused_replayed_and_removed(setup: CommandSetup) -> None:
    dead = "http://127.0.0.1:9/hook"  # where nothing listens
    words = ("--secret", "hook/key", "--allow-private", "--max-attempts", "1", "--workflow", "echo")
    made = setup.json("sink", "put", "hook", dead, *words)
    assert (made["name"], made["kind"]) == ("hook", "webhook")
    assert "hook" in setup.hf("sink", "list").stdout
    setup.hf("run", "start", "echo", "--run-id", "echo-bus", "--wait")
    of_sink = ("--sink", "hook", "--run-id", "echo-bus")
    recorded = len(setup.json("run", "events", "echo-bus")["items"])
    letters = until(
        lambda: setup.json("bus", "letters", *of_sink)["items"],
        lambda found: recorded in [letter["to_seq"] for letter in found],  # what was given up last
    )
    assert setup.json("system", "locks")["items"], "a relay has a lock"
    assert setup.json("sink", "pause", "hook")["is_paused"] is True
    preview = setup.json("bus", "bulk", "drop", *of_sink, "--preview")
    assert preview["dead_letters"] == [letter["letter_id"] for letter in letters]
    assert "has to be confirmed" in setup.hf("bus", "bulk", "requeue", *of_sink, code=2).stderr
    setup.hf("bus", "requeue", letters[0]["letter_id"])
    setup.hf("bus", "drop", letters[0]["letter_id"], code=3)
    rest = setup.json("bus", "bulk", "drop", *of_sink, "--yes")
    assert (rest.get("done", 0), setup.json("bus", "letters", *of_sink)["items"]) == (len(letters) - 1, [])
    setup.hf("bus", "replay", "hook", "--run-id", "echo-bus", "--from-seq", "1")
    assert setup.json("sink", "list")["items"][0]["backlog"] >= 1
    assert setup.json("sink", "resume", "hook")["is_paused"] is False
    setup.hf("sink", "remove", "hook")
    assert setup.json("sink", "list")["items"] == []


@pytest.mark.contract("QUE-4")
def test_runs_are_counted_forked_and_compared(setup: CommandSetup) -> None:
    setup.hf("run", "start", "echo", "--run-id", "echo-fork", "--wait")
    assert setup.json("run", "count", "--workflow", "echo")["total"] >= 1
    forked = setup.json("run", "fork", "echo-fork", "--at", "1", "--request-id", "again")["run_id"]
    assert setup.json("run", "fork", "echo-fork", "--at", "1", "--request-id", "again")["run_id"] == forked
    setup.hf("run", "result", forked, "--wait-s", "10")
    compared = setup.json("run", "diff", "echo-fork", forked)
    assert (compared["other_run_id"], compared["is_whole"]) == (forked, True)
    assert setup.json("run", "fork-many", "nightly", "--workflow", "nothing-of-the-kind")["items"] == []


@pytest.mark.contract("TMR-2", "API-1")
def test_a_run_is_shown_in_words_and_an_empty_list_says_so(setup: CommandSetup) -> None:
    done = start(setup, "echo", "value=hello", run_id="words-1")
    until(lambda: setup.json("run", "get", done), lambda run: run["status"] == "COMPLETED")
    shown = setup.hf("run", "show", done).stdout
    assert 'input:\n{"value":"hello"}' in shown
    assert 'result:\n"hello"' in shown
    paying = start(setup, "paying", "order_id=o-9", run_id="words-2")
    until(lambda: setup.json("run", "get", paying), lambda run: run["status"] == "PAUSED")
    shown = setup.hf("run", "show", paying).stdout
    assert "ValueError: the card was refused" in shown
    assert "-> `holdfast run retry-step words-2 charge` tries the failed step again" in shown
    nothing = setup.hf("run", "list", "--workflow", "nothing-of-the-kind")
    assert (nothing.stdout, nothing.stderr) == ("", "holdfast: there are none\n")


def test_a_workflow_that_is_misspelt_is_found(setup: CommandSetup) -> None:
    assert "did you mean 'echo'?" in setup.hf("run", "start", "ecco", code=3).stderr


def test_an_input_is_piped_into_a_command(setup: CommandSetup) -> None:
    """Wherever the options stand."""
    for words in (["-", "--wait"], ["--wait", "-"]):
        done = subprocess.run(
            command("run", "start", "echo", *words),
            cwd=setup.folder,
            env=environment(HOLDFAST_SERVER=setup.url),
            input='{"value": "piped"}\n',
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, '"piped"\n'), done.stderr


def test_a_list_that_is_watched_is_shown_again_until_it_is_interrupted(setup: CommandSetup) -> None:
    run_id = start(setup, "order", "order_id=o-w", run_id="run-watched")
    process = subprocess.Popen(
        command("run", "list", "--text", run_id, "--watch"),
        cwd=setup.folder,
        env=environment(HOLDFAST_SERVER=setup.url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any("RUNNING" in line for line in lines)
    setup.hf("run", "cancel", run_id, "--wait")
    assert any("CANCELLED" in line for line in lines)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=MOST_SECONDS)
    assert (process.returncode, err) == (130, "")


@pytest.mark.slow
@pytest.mark.contract("WF-6")
def test_a_server_without_a_node_takes_samples_and_has_its_queries_answered_by_a_node(
    tmp_path: Path, forks: ForkedCommands
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    store, pending = ("--store", "sqlite:///own.db"), {"PENDING": 1}
    with serving(tmp_path, *store, "--open", "--no-node", HOLDFAST_NODE__SAMPLE_S="0.2") as (url, _):
        here = CommandSetup(tmp_path, url, forks)
        run_id = start(here, "order", "order_id=o-1", run_id="run-1")
        until(lambda: here.json("system", "samples")["items"][-1:], lambda last: last and last[0]["runs"] == pending)
        node = subprocess.Popen(
            command("node", "shop.py", *store), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
        )
        assert node.stderr is not None
        try:
            assert any("works on" in line for line in node.stderr)
            until(lambda: here.json("run", "waits", run_id), lambda page: page["items"])
            assert here.hf("run", "query", run_id, "progress").stdout == '{"order_id":"o-1"}\n'
            nodes = {each["is_here"]: each["workflows"] for each in here.json("system", "nodes")["items"]}
            assert (nodes[True], "order" in nodes[False]) == ([], True)
        finally:
            node.terminate()
            node.communicate(timeout=MOST_SECONDS)
        assert node.returncode == 0


@pytest.mark.contract("SIG-13", "API-1")
def test_one_command_goes_to_all_runs_that_a_search_finds(setup: CommandSetup) -> None:
    for number in range(3):
        start(setup, "order", f"order_id=many-{number}", run_id=f"many-{number}")
    setup.hf("run", "cancel", "many-2", "--wait")
    misspelt = setup.hf("run", "bulk", "try-nov", "--preview", code=2).stderr
    assert 'Did you mean "try_now"?' in misspelt
    assert "try_now concerns 0 of" in setup.hf("run", "bulk", "try-now", "--text", "many-", "--preview").stdout
    ended = setup.json("run", "bulk", "retry", "--text", "many-", "--finished-from", "1h", "--preview")
    assert ended["concerned"] == ["many-2"]
    assert setup.json("run", "bulk", "retry", "--text", "many-", "--finished-until", "1h", "--preview")["found"] == 0
    preview = setup.json("run", "bulk", "pause", "--text", "many-", "--preview")
    assert (preview["found"], sorted(preview["concerned"])) == (3, ["many-0", "many-1"])
    refused = setup.hf("run", "bulk", "pause", "--text", "many-", code=2)
    assert "pause concerns 2 of 3 runs" in refused.stdout
    assert "1 not: it is not running" in refused.stdout
    assert "add --yes, or look with --preview" in refused.stderr
    done = setup.hf("run", "bulk", "pause", "--text", "many-", "--reason", "a bad deployment", "--yes")
    assert "pause: 2 done, 0 refused, 1 not concerned" in done.stdout
    assert "each run has recorded it, as request bulk-" in done.stderr
    assert "`holdfast doctor` says what is left" in done.stderr
    until(lambda: setup.json("run", "get", "many-0"), lambda run: run["status"] == "PAUSED")
    assert setup.json("run", "get", "many-0")["pause"]["reason"] == "a bad deployment"
    start(setup, "grave", run_id="many-grave")
    assert setup.json("run", "bulk", "approve", "--text", "many-", "--preview")["concerned"] == ["many-grave"]
    assert "3 not concerned" in setup.hf("run", "bulk", "approve", "--text", "many-", "--yes").stdout
    until(lambda: setup.json("run", "get", "many-grave"), lambda run: run["status"] == "COMPLETED")
    part = setup.json("run", "command-many", "pause", "again", "--text", "many-", "--preview")
    assert part["concerned"] == 0
    answers = setup.json("run", "bulk", "terminate", "--run-id", "many-0", "--run-id", "many-1", "--yes")
    assert sorted(item["run_id"] for item in answers["items"]) == ["many-0", "many-1"]
    until(lambda: setup.json("run", "get", "many-1"), lambda run: run["status"] == "CANCELLED")
    again = setup.hf("run", "bulk", "retry", "--run-id", "many-1", "--yes")
    assert (again.stdout, "each new run names the one before it" in again.stderr) == (
        "retry: 1 done, 0 refused\n",
        True,
    )


def test_a_schedule_is_made_paused_triggered_and_deleted(setup: CommandSetup) -> None:
    made = setup.json("schedule", "create", "yearly", "filming", "title=Solaris", "kinds:=[]", "--cron", "@yearly")
    assert (made["cron"], made["overlap"]) == ("@yearly", "skip")
    assert (
        setup.json("schedule", "update", "yearly", "title=Stalker", "kinds:=[]", "--cron", "@monthly")["revision"] == 2
    )
    assert setup.json("schedule", "pause", "yearly", "--note", "holidays")["is_paused"]
    assert setup.json("schedule", "resume", "yearly")["note"] == ""
    assert setup.json("schedule", "trigger", "yearly")["run_id"]
    period = ("2020-01-01T00:00:00Z", "2020-02-02T00:00:00Z")
    assert setup.json("schedule", "backfill", "yearly", *period)["ticks"] == 2
    assert setup.json("schedule", "get", "yearly")["workflow"] == "filming"
    assert "yearly" in setup.hf("schedule", "list").stdout
    assert setup.json("schedule", "delete", "yearly")["schedule_id"] == "yearly"


@pytest.mark.contract("STR-1", "API-1")
def test_streams_of_a_run_are_listed_read_and_followed(setup: CommandSetup) -> None:
    run_id = start(setup, "telling", run_id="told")
    setup.hf("run", "result", run_id, "--wait-s", "10")
    [stream] = setup.json("run", "streams", run_id)["items"]
    assert (stream["name"], stream["last_seq"]) == ("story", 3)
    assert [chunk["value"] for chunk in setup.json("run", "chunks", run_id, "story", "--after", "1")["items"]] == [
        "be",
        {"page": 2},
    ]
    for follow in ([], ["--follow"]):
        assert setup.hf("run", "stream", run_id, "story", *follow).stdout == 'To be\n{"page":2}\n'
    assert setup.json("run", "stream", run_id, "story", "--after", "2")["value"] == {"page": 2}
    assert setup.hf("run", "stream", run_id, "nothing").stdout == ""
    assert "there is no run" in setup.hf("run", "stream", "nobody", "story", code=3).stderr


def test_every_derived_command_is_run_in_this_file() -> None:
    resources = {spec_of(operation).words.split()[0] for operation in OPERATIONS.values()}
    known = {
        (resource, verb) for resource in resources for verb in all_commands()[resource] if not verb.startswith("-")
    }
    assert known - set(re.findall(r'"([a-z-]+)", "([a-z-]+)"', Path(__file__).read_text())) == set()


@pytest.mark.contract("SEC-2", "API-1")
def test_artifacts_are_listed_and_downloaded(setup: CommandSetup) -> None:
    content = "Solaris" * 100_000
    setup.hf("run", "start", "filming", "title=Solaris", 'kinds:=["film"]', "--run-id", "film-1", "--wait")
    setup.hf("run", "start", "filming", "title=Solaris", 'kinds:=["film","log","log"]', "--run-id", "film-3", "--wait")
    [artifact] = setup.json("artifact", "list", "film-1")["items"]
    assert (artifact["step_id"], artifact["kind"], artifact["size_bytes"]) == ("film", "film", len(content))
    assert "film" in setup.hf("artifact", "list", "film-1").stdout
    assert setup.hf("artifact", "get", "film-1", "-o", "-").stdout == content
    setup.hf("artifact", "get", "film-1", artifact["artifact_id"], "--output", "solaris.film")
    assert (setup.folder / "solaris.film").read_text() == content
    saved = setup.json("artifact", "get", "film-3", "film")
    assert (setup.folder / saved["path"]).read_text() == content
    setup.hf("artifact", "get", "film-3", "log", "--step", "film#2", "-o", "log")
    assert not list(setup.folder.glob("*.incomplete"))
    assert "has 2 of them" in setup.hf("artifact", "get", "film-3", "log", code=2).stderr
    assert "no such artifact" in setup.hf("artifact", "get", "film-1", "log", code=3).stderr
    assert "cannot be written" in setup.hf("artifact", "get", "film-1", "-o", "nowhere/film", code=2).stderr
    stored = setup.run("artifact", "get", "film-1", "-o", "direct", "--store", "sqlite:///shop.db", "--app", "shop.py")
    assert (stored.returncode, (setup.folder / "direct").read_text()) == (0, content), stored.stderr


@pytest.mark.contract("QUE-6")
def test_starts_are_debounced_and_the_run_is_shown_with_its_last_input(setup: CommandSetup) -> None:
    words = ("--debounce-key", "doc", "--debounce-quiet-s", "600", "--debounce-at-most-s", "3600")
    first = setup.json("run", "start", "echo", *words, "value=one")
    again = setup.json("run", "start", "echo", *words, "value=two")
    assert again == {**first, "is_reused": True}
    until = time.monotonic() + MOST_SECONDS
    while (found := setup.json("run", "show", first["run_id"])["input"]) != {"value": "two"}:
        assert time.monotonic() < until, found
    assert "starts at " in setup.hf("run", "list", "--status", "PENDING").stdout
    lacking = setup.hf("run", "start", "echo", "--debounce-key", "doc", "value=x", code=2)
    assert "all three" in lacking.stderr
