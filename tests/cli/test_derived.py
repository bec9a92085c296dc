"""Commands are derived from the catalogue: none is missing, and what they are given is what is asked."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from holdfast import errors
from holdfast.cli import call as call_module
from holdfast.cli import generate, runs
from holdfast.cli.commands import COMMAND_SPECS, spec_of
from holdfast.cli.connection import Connection, Target
from holdfast.cli.exit_codes import CODES, code_of
from holdfast.cli.generate import fields_of
from holdfast.cli.main import OWN, all_commands, main
from holdfast.errors import HoldfastError
from holdfast.service.http.openapi import EXAMPLES
from holdfast.service.http.problems import status_of
from holdfast.service.operations import OPERATIONS
from holdfast.service.registry import Request, operation
from tests.service.callers import words_of
from tools.commands import PAGE, page_with, table

Asked = list[tuple[str, dict[str, Any]]]
Script = Callable[[str, dict[str, Any]], Any]


@pytest.fixture
def ask_nobody(monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], Asked]:
    """Return a way to answer commands from a script, and to see what was asked."""

    def answer_with(script: Script) -> Asked:
        asked: Asked = []

        class Scripted(Connection):
            def __init__(self) -> None:
                pass

            async def __call__(self, name: str, ask: dict[str, Any]) -> Any:
                asked.append((name, ask))
                return script(name, ask)

            async def events(self, run_id: str, after: int) -> AsyncGenerator[Any, None]:
                for event in script("runs.stream", {"run_id": run_id, "after": after}):
                    yield event

        @asynccontextmanager
        async def calling(target: Target) -> AsyncIterator[Connection]:
            yield Scripted()

        for module in (generate, runs, call_module):
            monkeypatch.setattr(module, "connect", calling)
        return asked

    return answer_with


@pytest.mark.contract("API-1")
@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - set(OWN)))
def test_what_a_command_is_given_is_what_is_asked(ask_nobody: Callable[[Script], Asked], name: str) -> None:
    asked = ask_nobody(lambda name, ask: {"result": 1, "token": "holdfast_…", "schema": {}})
    assert main(words_of(OPERATIONS[name], EXAMPLES[name])) == 0
    [(found, ask)] = asked
    assert found == name
    read = msgspec.convert(ask, OPERATIONS[name].request_type)
    assert read == msgspec.convert(EXAMPLES[name], OPERATIONS[name].request_type)


@pytest.mark.contract("API-1")
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_can_be_called_by_its_name(
    ask_nobody: Callable[[Script], Asked], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    asked = ask_nobody(lambda name, ask: {"echo": ask})
    assert main(["call", name, json.dumps(EXAMPLES[name])]) == 0
    assert asked == [(name, EXAMPLES[name])]
    assert json.loads(capsys.readouterr().out) == {"echo": EXAMPLES[name]}


@pytest.mark.contract("API-1")
def test_every_operation_has_a_command() -> None:
    for each in OPERATIONS.values():
        resource, verb = spec_of(each).words.split()
        assert verb in all_commands()[resource]
    words = [spec_of(each).words for each in OPERATIONS.values()]
    assert len(set(words)) == len(words)
    assert set(COMMAND_SPECS) <= set(OPERATIONS)


def test_the_table_on_the_page_is_up_to_date() -> None:
    assert page_with(PAGE.read_text(), table()) == PAGE.read_text(), "run python -m tools.commands"


class Novel(Request, frozen=True, kw_only=True):
    """Something that no table knows."""

    thing_id: str
    role: str = ""
    roles: tuple[str, ...] = ()
    many: bool = False


def test_an_operation_that_no_table_knows_has_a_command_all_the_same() -> None:
    @operation("things.make_new", "POST /v1/things", scope=None)
    async def make_new(context: Any, request: Novel) -> Novel:
        """Make a thing."""
        return request

    row = spec_of(make_new)
    assert row.words == "things make-new"
    assert [given.option for given in fields_of(make_new).values()] == ["--thing-id", "--role", "--roles", "--many"]
    made = generate.command_of(make_new, row)
    assert list(made.__annotations__) == ["thing_id", "role", "roles", "many", "target"]
    assert made.__doc__ == "Make a thing."


def test_no_field_takes_the_name_of_a_shared_option() -> None:
    shared = {f"--{name}" for name in Target.__dataclass_fields__} | {"--all"}
    for each in OPERATIONS.values():
        row = spec_of(each)
        options = {given.option for given in fields_of(each).values() if given.field not in (*row.arguments, row.rest)}
        assert not options & shared


def test_all_pages_are_read_on_demand(
    ask_nobody: Callable[[Script], Asked], capsys: pytest.CaptureFixture[str]
) -> None:
    def pages(name: str, ask: dict[str, Any]) -> Any:
        number = int(ask.get("cursor", "1"))
        return {"items": [{"run_id": f"r-{number}"}], "next": str(number + 1) if number < 3 else None}

    asked = ask_nobody(pages)
    assert main(["run", "list", "--all", "--limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"items": [{"run_id": f"r-{n}"} for n in (1, 2, 3)], "next": None}
    newest = {"limit": 1, "order": "newest"}
    assert [ask for _, ask in asked] == [newest, {**newest, "cursor": "2"}, {**newest, "cursor": "3"}]
    assert main(["run", "list"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[1] == "r-1"
    assert said.err == "holdfast: there is more: use --all, or --cursor 2\n"


def outcome(status: str, **more: Any) -> dict[str, Any]:
    is_finished = status != "RUNNING"
    return {"run_id": "r", "status": status, "is_finished": is_finished, "result": None, "error": None, **more}


def test_a_result_is_asked_for_until_it_is_there(
    ask_nobody: Callable[[Script], Asked], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([outcome("RUNNING"), outcome("COMPLETED", result={"a": 1})])
    asked = ask_nobody(lambda name, ask: next(answers))
    assert main(["run", "result", "r"]) == 0
    assert capsys.readouterr().out == '{"a":1}\n'
    assert asked == [("runs.result", {"run_id": "r", "wait_s": runs.WAIT_S})] * 2


@pytest.mark.parametrize(
    ("arguments", "answer", "code", "said"),
    [
        (["--wait-s", "0"], outcome("RUNNING"), 7, "holdfast: run r has not finished, it is RUNNING\n"),
        ([], outcome("FAILED", error={"code": "E", "message": "no"}), 1, "holdfast: run r has failed: E: no\n"),
        ([], outcome("CANCELLED", error={"code": "E", "message": "no"}), 1, "holdfast: run r has been cancelled: E:"),
    ],
)
def test_a_result_that_is_none_has_its_exit_code(
    ask_nobody: Callable[[Script], Asked],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    answer: dict[str, Any],
    code: int,
    said: str,
) -> None:
    ask_nobody(lambda name, ask: answer)
    assert main(["run", "result", "r", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said)
    assert main(["run", "result", "r", "--json", *arguments]) == code
    assert json.loads(capsys.readouterr().out) == answer


@pytest.mark.parametrize(("status", "code"), [("COMPLETED", 0), ("FAILED", 1), ("CANCELLED", 1)])
def test_a_run_that_is_followed_is_told_event_by_event(
    ask_nobody: Callable[[Script], Asked], capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    def event(number: int, kind: str) -> dict[str, Any]:
        return {"run_seq": number, "event_type": kind, "step_id": None, "persisted_at": "2026-01-28T12:00:00Z"}

    events = [event(3, "RunStarted"), event(4, "RunEnded")]

    def script(name: str, ask: dict[str, Any]) -> Any:
        return {"status": status} if name == "runs.get" else events[ask["after"] - 2 :]

    asked = ask_nobody(script)
    assert main(["run", "tail", "r", "--json", "--after", "2"]) == code
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == events
    assert main(["run", "tail", "r", "--after", "4"]) == code
    assert capsys.readouterr().out == "", "there is nothing behind the end"
    assert asked == [("runs.get", {"run_id": "r"})] * 2


def kinds(kind: type[HoldfastError] = HoldfastError) -> list[type[HoldfastError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in kinds(child))]


BY_STATUS = {401: 5, 403: 5, 404: 3, 409: 4, 413: 5, 429: 5, 500: 70, 501: 6, 503: 6, 504: 6, 507: 6}


@pytest.mark.contract("API-2")
@pytest.mark.parametrize("kind", [each for each in kinds(errors.CallerError) if each.__module__ == errors.__name__])
def test_exit_codes_say_what_http_says(kind: type[HoldfastError]) -> None:
    assert code_of(kind) == BY_STATUS.get(status_of(kind), 2)


def test_exit_codes_are_those_in_the_table_on_the_page() -> None:
    told = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    known = {str(code) for code in CODES.values()} | {"0", "7", "130"}
    assert known == {cell for cell in told if cell.isdigit()}


@pytest.mark.contract("API-1")
def test_a_list_of_runs_says_what_each_does_and_takes_a_status_in_any_case(
    ask_nobody: Callable[[Script], Asked], capsys: pytest.CaptureFixture[str]
) -> None:
    again = {
        "step_id": "send",
        "activity": "send",
        "failures": 9,
        "error_code": "ConnectionError",
        "next_at": None,
    }
    error = {"code": "KeyError", "message": "'shelf'"}
    runs: dict[str, dict[str, Any]] = {
        "send failed 9 times, ConnectionError, again now": {"status": "RUNNING", "retrying": again},
        "KeyError: 'shelf'": {"status": "PAUSED", "last_error": error, "pause": {"actor": "", "reason": "KeyError"}},
        "by ann: the bank is down": {
            "status": "PAUSED",
            "last_error": error,
            "pause": {"actor": "ann", "reason": "the bank is down"},
        },
        "by an operator": {"status": "PAUSED", "last_error": error, "pause": {"actor": "", "reason": ""}},
        "waits for the signal approval": {
            "status": "RUNNING",
            "waiting_kind": "signal",
            "waiting_for": "approval",
        },
    }
    items = [{"run_id": f"r-{n}", "workflow": "order", **run} for n, run in enumerate(runs.values())]
    asked = ask_nobody(lambda name, ask: {"items": items, "next": None})
    assert main(["run", "list", "--status", "paused"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    column = head.index("now")
    assert [line[column:].strip() for line in lines] == list(runs)
    assert [ask for _, ask in asked] == [{"status": "PAUSED", "order": "newest"}]
    assert main(["run", "list", "--status", "stopped"]) == 2
    assert "PAUSED" in capsys.readouterr().err
