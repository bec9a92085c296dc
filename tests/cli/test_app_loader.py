"""How an app is named on the command line, and what is said when that fails."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from holdfast.cli.app_loader import node_options
from holdfast.cli.exit_codes import run_command
from holdfast.cli.main import all_commands, main, run_process
from holdfast.engine.options import NodeOptions
from holdfast.errors import CorruptHistory, InvalidInput, NotFound, NotPermitted, RunTerminal, StoreError
from tests.cli.command_process import environment, run
from tests.cli.forked_commands import ForkedCommands

APP = "import holdfast as hf\napp = hf.App('shop')\n"
TOP = Path(__file__).parents[2]


def check(forks: ForkedCommands, folder: Path, target: str) -> CompletedProcess[str]:
    """Run a command on the target. If it is found, what is missing is the store."""
    done = forks.run(folder, environment(), "check-histories", target, "--store", "sqlite:///missing.db")
    assert done.stdout == ""
    return done


@pytest.mark.parametrize(
    "target", ["shop.py", "shop.py:app", "./shop.py", "shop", "shop:app", "pkg.deep:app", "pkg/deep.py"]
)
def test_an_app_is_named_by_file_or_by_module(forks: ForkedCommands, tmp_path: Path, target: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "helper.py").touch()
    (tmp_path / "shop.py").write_text(APP + "same = app\n")
    (tmp_path / "pkg" / "deep.py").write_text(APP + ("import helper\n" if "/deep" in target else "import pkg.helper\n"))
    done = check(forks, tmp_path, target)
    assert done.stderr == "holdfast: missing.db: there is no such store\n"
    assert done.returncode == 6


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.py", "nowhere.py: there is no such file"),
        ("nowhere", "there is no module 'nowhere' (a file is named with its .py)"),
        ("pkg.nowhere:app", "there is no module 'pkg.nowhere' (a file is named with its .py)"),
        ("pkg/notes.txt", "pkg/notes.txt is not a Python file: its name must end with .py"),
        ("", "the target '' names no file: use shop.py, shop.py:app or pkg.module:app"),
        (":app", "the target ':app' names no file: use shop.py, shop.py:app or pkg.module:app"),
        ("two.py", "two.py: its apps: app, other; say which one, such as two.py:app"),
        ("two.py:third", "two.py: it has no third; its apps: app, other"),
        ("two.py:number", "two.py: number is no App, its type is int; its apps: app, other"),
        ("none.py:app", "none.py: it has no app; it has no App at all"),
        ("none.py", "none.py: there is no App; make one with `app = holdfast.App('shop')`"),
        ("pkg/asyncio.py", "pkg/asyncio.py: there is another module 'asyncio' already; give the file another name"),
    ],
)
def test_a_target_that_is_wrong_is_told_in_one_line(
    forks: ForkedCommands, tmp_path: Path, target: str, said: str
) -> None:
    (tmp_path / "two.py").write_text(APP + "other = hf.App('other')\nnumber = 1\n")
    (tmp_path / "none.py").touch()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "asyncio.py").touch()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "notes.txt").touch()
    done = check(forks, tmp_path, target)
    assert done.stderr.replace(f"{tmp_path}/", "") == f"holdfast: {said}\n"
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "def fail():\n    1 / 0\n\nfail()\n",
            ["line 4, in <module>", "line 2, in fail", "    1 / 0", "ZeroDivisionError"],
        ),
        ("import nowhere\n", ["line 1, in <module>", "ModuleNotFoundError: No module named 'nowhere'"]),
        ("def fail(:\n", ["line 1", "def fail(:", "SyntaxError"]),
        ("import sys\nsys.exit(0)\n", ["line 2, in <module>", "SystemExit: 0"]),
        (
            APP + "async def order(): ...\napp.workflow(order)\napp.workflow(order)\n",
            ["line 5, in <module>", "InvalidInput: workflow 'order' is registered twice with version '1'"],
        ),
        (
            "try:\n    1 / 0\nexcept ZeroDivisionError as problem:\n    raise ValueError('no') from problem\n",
            ["line 2, in <module>", "ZeroDivisionError", "direct cause", "line 4, in <module>", "ValueError: no"],
        ),
    ],
    ids=["raises", "imports what is missing", "is no Python", "exits", "is refused by us", "has a cause"],
)
@pytest.mark.parametrize("target", ["shop.py", "shop:app"])
def test_a_file_that_cannot_be_imported_is_shown_by_its_own_lines(
    forks: ForkedCommands, tmp_path: Path, target: str, text: str, shown: list[str]
) -> None:
    (tmp_path / "shop.py").write_text(text)
    done = check(forks, tmp_path, target)
    assert done.returncode == 2
    assert "cannot be imported:\n" in done.stderr
    position = 0
    for part in shown:
        position = done.stderr.index(part, position)
    files = {line.split('"')[1] for line in done.stderr.splitlines() if line.strip().startswith('File "')}
    assert files == {str(tmp_path / "shop.py")}, "no line of ours"


@pytest.mark.parametrize(
    ("arguments", "said", "where"),
    [
        (["nod", "shop.py"], 'Unknown command "nod". Did you mean "node"?', "holdfast --help"),
        (["run", "lst"], 'Unknown command "lst". Did you mean "list"?', "holdfast run --help"),
        (["run", "list", "--statu", "PAUSED"], "--statu. Did you mean --status?", "holdfast run list --help"),
        (["node"], "TARGET requires an argument", "holdfast node --help"),
        (["node", "shop.py", "--stor", "x"], "--stor", "holdfast node --help"),
        (["node", "shop.py", "--drain-s", "soon"], "--drain-s", "holdfast node --help"),
        (["check-histories", "shop.py", "extra"], "extra", "holdfast check-histories --help"),
    ],
)
def test_bad_usage_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str, where: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.endswith(f" (see {where})\n")
    assert len(err.splitlines()) == 1


def test_each_command_and_each_of_its_options_is_on_the_page() -> None:
    page = (TOP / "docs" / "command-line.md").read_text()
    headings = re.findall(r"^## `holdfast (.*)`$", page, re.MULTILINE)
    rows = re.findall(r"^\| `holdfast (.*)` \| (.*) \| `[\w.]+` \|$", page, re.MULTILINE)
    told = {_words(heading): set(re.findall(r"--[a-z0-9-]+", heading)) for heading in headings}
    told |= {_words(head): set(re.findall(r"--[a-z0-9-]+", options)) for head, options in rows}
    shared = {"--server", "--token", "--store", "--app", "--json"}
    told = {words: options - shared if "--server" in options else options for words, options in told.items()}
    found = {words: options - shared if "--server" in options else options for words, options in _all_commands()}
    assert told == found, "python -m tools.commands writes the table"


def _words(head: str) -> str:
    return " ".join(itertools.takewhile(lambda word: word.islower() and word[0].isalpha(), head.split()))


def _all_commands() -> Iterator[tuple[str, set[str]]]:
    for name in (name for name in all_commands() if not name.startswith("-")):
        verbs = [verb for verb in all_commands()[name] if not verb.startswith("-")]
        for words in [[name, verb] for verb in verbs] or [[name]]:
            command = all_commands()
            for word in words:
                command = command[word]
            options = {option for each in command.assemble_argument_collection() for option in each.names}
            yield " ".join(words), {option for option in options if option[:2] == "--"}


@pytest.mark.process
def test_the_installed_command_is_the_one_that_is_tested(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["scripts"].items()
    assert name == "holdfast"
    assert EntryPoint(name, value, "console_scripts").load() is run_process
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == project["version"]
    assert run(tmp_path, "--version").stdout.strip() == project["version"]
    assert main([]) == main(["--help"]) == 0
    assert "check-histories" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (CorruptHistory("it"), 1),
        (InvalidInput("it"), 2),
        (NotFound("it"), 3),
        (RunTerminal("it"), 4),
        (NotPermitted("it"), 5),
        (StoreError("it"), 6),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    capsys: pytest.CaptureFixture[str], problem: BaseException, code: int
) -> None:
    def fail() -> int:
        raise problem

    assert run_command(fail) == code
    assert capsys.readouterr().err in ("holdfast: it\n", "holdfast: interrupted\n")


def test_what_nobody_expected_is_told_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise KeyError("a mistake of ours")

    with pytest.raises(SystemExit) as ended:
        run_command(fail)
    assert ended.value.code == 70
    assert "KeyError: 'a mistake of ours'" in capsys.readouterr().err


def test_options_of_a_node_come_from_flags_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_NODE__LEASE_MS", "4000")
    monkeypatch.setenv("HOLDFAST_NODE__CACHED_RUNS", "7")
    options = node_options("memory://", lease_ms=None, cached_runs=9)
    assert (options.lease_ms, options.cached_runs, options.drain_s) == (4_000, 9, NodeOptions().drain_s)
    monkeypatch.setenv("HOLDFAST_NODE__LEASE", "4000")
    with pytest.raises(InvalidInput, match="lease"):
        node_options("memory://")
