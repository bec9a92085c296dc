"""The code base keeps its own rules; `tidy_rules.py` says what they are.

Each rule is applied to the real tree, and is shown planted problems, which it must find, and honest code,
which it must let pass.
"""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

from tests import tidy_rules as rules
from tests.tidy_rules import Source

ROOT = Path(__file__).parent.parent
SOURCE_SUFFIXES = {".py", ".sql", ".js", ".css", ".html"}

# "path:function" -> why every exception may be caught there without being raised again.
SWALLOWING_ALLOWED: dict[str, str] = {
    "holdfast/engine/observe/logs.py:redact_record": "a record whose arguments do not fit is logged, redacted",
    "holdfast/engine/observe/hooks.py:_call": "a mistake in a hook of the app is logged, and no mistake of the run",
    "holdfast/client/sync.py:_LoopThread._run": "what opening raises is raised in the caller, what ends it by close",
    "holdfast/client/sync.py:_answer": "what a statement raises in the caller's thread is raised where it is awaited",
    "holdfast/engine/batcher.py:Batcher._answer_batch": "what the call raises is raised in every caller",
    "holdfast/engine/start/starter.py:Starter._create": "what a store raises is raised in every caller",
    "holdfast/engine/turns/execute.py:rebuild": "what user code raises where no task takes it pauses its run",
    "holdfast/engine/turns/execute.py:take_turn": "what user code raises where no task takes it pauses its run",
    "holdfast/engine/turns/execute.py:problem_of_resuming": "what user code raises there is the answer",
    "holdfast/engine/activities/slots.py:_carry_out": "its future has it as its exception",
    "holdfast/engine/activities/verification.py:ask": "an operator of its run gets it as the verifier's words",
    "holdfast/engine/observe/tracing.py:Tracing._work": "logged; losing a trace loses no run",
    "holdfast/program/api.py:Saga._undo_all": "failures are gathered, and raised together with the first error",
    "holdfast/program/definitions.py:ActivityDefinition.is_retried": "noted at the error, which ends it",
    "holdfast/program/outcomes.py:_attribute": "an exception whose own code fails is recorded without what it says",
    "holdfast/program/outcomes.py:_message": "an exception that cannot even be shown is recorded by its type",
    "holdfast/program/outcomes.py:_traceback": "an exception that cannot even be shown is recorded by its type",
    "holdfast/program/loop.py:_dispose_of": "what a coroutine raises while it is closed changes nothing for its run",
    "holdfast/program/loop.py:DeterministicLoop._run_ready": "its task has it as its exception, and ends with it",
    "holdfast/program/loop.py:settle": "raised in the workflow, where the condition is awaited",
    "holdfast/store/nats_wakeups.py:NatsWakeups._keep_connected": "logged; a wake-up that is lost costs latency only",
    "holdfast/service/http/jsonrpc.py:JsonRpc._call": "logged, and answered as InternalError",
    "holdfast/cli/mcp.py:McpServer._call": "logged, and answered as an internal error",
    "holdfast/program/outcomes.py:Handler.apply": "recorded, and raised in the workflow, where the signal is awaited",
}

# "path" -> why the test must wait for real time.
SLEEPING_ALLOWED: dict[str, str] = {}


@cache
def python_files(below: str) -> tuple[Source, ...]:
    """Every Python file below a folder, with paths relative to it."""
    return tuple(Source(path, text) for path, text in text_files(below) if path.suffix == ".py")


@cache
def text_files(below: str) -> tuple[tuple[PurePosixPath, str], ...]:
    """Every source file below a folder, with paths relative to it."""
    top = ROOT / below
    files = sorted(path for path in top.rglob("*") if path.suffix in SOURCE_SUFFIXES)
    return tuple((PurePosixPath(path.relative_to(top)), path.read_text(encoding="utf-8")) for path in files)


def repository_texts() -> Iterator[tuple[PurePosixPath, str]]:
    """Every text file that is, or is about to be, in the repository."""
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, check=False, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        try:
            yield PurePosixPath(name), (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a binary file, or one that is deleted but not yet committed


def source(path: str, text: str) -> Source:
    """A planted file."""
    return Source(PurePosixPath(path), text)


def assert_clean(problems: Iterable[str]) -> None:
    """Fail with the list of problems."""
    found = list(problems)
    assert not found, "\n" + "\n".join(found)


def check_each(rule: Callable[[Source], Iterable[str]], below: str = "src") -> None:
    """Apply a rule to every Python file of a tree."""
    assert_clean(problem for file in python_files(below) for problem in rule(file))


def test_the_tree_is_found() -> None:
    assert PurePosixPath("holdfast/__init__.py") in {file.path for file in python_files("src")}
    assert PurePosixPath("test_tidy.py") in {file.path for file in python_files("tests")}


# --- Layers ---


def test_imports_point_downwards_only() -> None:
    check_each(rules.upward_imports)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("holdfast/core/state.py", "import holdfast.store.port"),
        ("holdfast/core/state.py", "from holdfast.engine.node import Node"),
        ("holdfast/core/state.py", "from holdfast import store"),
        ("holdfast/core/state.py", "from ..store import port"),
        ("holdfast/core/state.py", "from .. import program"),
        ("holdfast/core/deep/er.py", "from ...store import port"),
        ("holdfast/core/__init__.py", "from ..store import port"),
        ("holdfast/core/state.py", "def late():\n    from holdfast.service import rest"),
        ("holdfast/store/memory.py", "from holdfast import App"),
        ("holdfast/store/memory.py", "import holdfast"),
        ("holdfast/errors.py", "from holdfast import limits"),
        ("holdfast/client.py", "from holdfast.web import page"),
        ("holdfast/settings.py", "from holdfast.core import codec"),
        ("holdfast/agents/pydantic_ai.py", "from holdfast.service import rest"),
        ("holdfast/engine/node.py", "from holdfast.agents import pydantic_ai"),
        ("holdfast/novelty.py", ""),
    ],
)
def test_layer_rule_finds(path: str, text: str) -> None:
    assert list(rules.upward_imports(source(path, text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("holdfast/core/state.py", "from .events import Event\nfrom holdfast.core import codec"),
        ("holdfast/core/state.py", "from holdfast.errors import Conflict\nfrom .. import limits"),
        ("holdfast/store/sqlite/store.py", "from ..port import Store\nimport holdfast.core.events"),
        ("holdfast/testing/suite.py", "from holdfast.store.port import Store"),
        ("holdfast/__init__.py", "from holdfast.client import Client"),
        ("holdfast/errors.py", "import holdfastening"),
    ],
)
def test_layer_rule_allows(path: str, text: str) -> None:
    assert_clean(rules.upward_imports(source(path, text)))


# --- A pure core ---


def test_core_is_pure() -> None:
    check_each(rules.impurities_of_core)


@pytest.mark.parametrize(
    "text",
    [
        "import asyncio",
        "import time",
        "from random import Random",
        "import os.path",
        "from pathlib import Path",
        "from urllib import request",
        "import logging",
        "import sqlite3",
        "import asyncpg",
        "from holdfast.clock import Clock",
        "from holdfast.settings import Settings",
        "from ..store import port",
        "def late():\n    import threading",
        "text = open('plan.json').read()",
    ],
)
def test_core_rule_finds(text: str) -> None:
    assert list(rules.impurities_of_core(source("holdfast/core/state.py", text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("holdfast/core/state.py", "from __future__ import annotations\nimport hashlib\nimport msgspec"),
        ("holdfast/core/state.py", "from datetime import datetime\nfrom urllib.parse import quote"),
        ("holdfast/core/state.py", "from .events import Event\nfrom holdfast import limits, errors"),
        ("holdfast/core/state.py", "class Started:\n    input: bytes"),
        ("holdfast/engine/node.py", "import asyncio"),
    ],
)
def test_core_rule_allows(path: str, text: str) -> None:
    assert_clean(rules.impurities_of_core(source(path, text)))


# --- One place for clock and chance ---


def test_only_the_ports_know_clock_and_chance() -> None:
    check_each(rules.clock_and_chance)


@pytest.mark.parametrize(
    "text",
    [
        "import time\nnow = time.time()",
        "import time as t\nnow = t.monotonic()",
        "from time import time_ns\nnow = time_ns()",
        "from time import time as now\nnow()",
        "import datetime\ndatetime.datetime.now(datetime.UTC)",
        "from datetime import datetime as D\nD.utcnow()",
        "from datetime import date\ndate.today().isoformat()",
        "import uuid\nmake = uuid.uuid4",
        "from uuid import uuid1\nfield = dict(default_factory=uuid1)",
        "import random\nrandom.Random(7).random()",
        "from random import choice\nchoice([1, 2])",
        "import random\nsource = random",
        "def late():\n    import secrets\n    return secrets.token_hex()",
        "import os\nos.urandom(8)",
    ],
)
def test_clock_rule_finds(text: str) -> None:
    assert list(rules.clock_and_chance(source("holdfast/engine/node.py", text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("holdfast/clock.py", "import time\nnow = time.time()"),
        ("holdfast/testing/sim_loop.py", "import random\nrandom.Random(7)"),
        ("holdfast/engine/node.py", "def run(clock, random):\n    return clock.time(), random.choice([1])"),
        ("holdfast/engine/node.py", "from datetime import datetime\ndatetime.fromisoformat('2020-01-01')"),
        ("holdfast/engine/node.py", "import uuid\nuuid.UUID(int=1)"),
    ],
)
def test_clock_rule_allows(path: str, text: str) -> None:
    assert_clean(rules.clock_and_chance(source(path, text)))


# --- Documentation and public names ---


def test_everything_public_has_a_docstring() -> None:
    assert_clean(rules.missing_docstrings(python_files("src")))


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        '"""M."""\ndef run(): ...',
        '"""M."""\nasync def run(): ...',
        '"""M."""\nclass Run: ...',
        '"""M."""\nclass Run:\n    """R."""\n    def start(self): ...',
        '"""M."""\nif True:\n    def run(): ...',
        '"""M."""\nclass Run:\n    """R."""\n    class Inner: ...',
        '"""M."""\ndef start():\n    """A function."""\nclass Run:\n    """R."""\n    def start(self): ...',
    ],
)
def test_docstring_rule_finds(text: str) -> None:
    assert list(rules.missing_docstrings([source("holdfast/core/state.py", text)]))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("holdfast/core/_hidden.py", "def run(): ..."),
        ("holdfast/core/state.py", '"""M."""\ndef _run(): ...\nclass _Run:\n    def start(self): ...'),
        ("holdfast/core/state.py", '"""M."""\nclass Run:\n    """R."""\n    def __len__(self): ...'),
        ("holdfast/core/state.py", '"""M."""\ndef run():\n    """R."""\n    def inner(): ...'),
        ("holdfast/core/state.py", '"""M."""\n@overload\ndef run(x): ...\ndef run(x):\n    """R."""'),
    ],
)
def test_docstring_rule_allows(path: str, text: str) -> None:
    assert_clean(rules.missing_docstrings([source(path, text)]))


def test_docstring_rule_lets_implementations_inherit_the_words_of_the_port() -> None:
    method = '"""M."""\nclass Store:\n    """S."""\n    def now(self):\n        '
    port = source("holdfast/store/port.py", method + '"""Say the time."""')
    memory = source("holdfast/store/memory.py", method + "...")
    assert_clean(rules.missing_docstrings([port, memory]))
    assert list(rules.missing_docstrings([memory]))


def test_the_package_offers_few_names_and_all_exist() -> None:
    assert_clean(rules.public_name_problems(importlib.import_module("holdfast")))


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"__all__": ["App"]},
    ],
    ids=["no __all__", "name that does not exist"],
)
def test_public_name_rule_finds(members: dict[str, object]) -> None:
    package = ModuleType("planted")
    vars(package).update(members)
    assert list(rules.public_name_problems(package))


# --- Size ---


def test_functions_are_short() -> None:
    check_each(rules.long_functions)


@pytest.mark.parametrize("opening", ["def f():\n", "async def f():\n"])
def test_function_length_rule_finds(opening: str) -> None:
    body = "    x = 1\n" * (rules.FUNCTION_LINES_MAX - 1)
    assert not list(rules.long_functions(source("holdfast/core/state.py", opening + body)))
    assert list(rules.long_functions(source("holdfast/core/state.py", opening + body + "    x = 1\n")))


def test_no_module_is_a_fragment_of_another() -> None:
    assert_clean(rules.fragments(python_files("src")))
    pages = {path: text for path, text in text_files("src/holdfast/web") if path.suffix in {".js", ".html"}}
    assert_clean(rules.script_fragments(pages))


def test_fragment_rule_finds() -> None:
    importer = source("holdfast/core/state.py", "from holdfast.core.small import x\n")
    small = source("holdfast/core/small.py", "x = 1\n" * (rules.MODULE_LINES_MIN - 1))
    assert list(rules.fragments([importer, small]))
    page = {PurePosixPath("run/log.js"): 'import { x } from "../lib/x.js";\n', PurePosixPath("lib/x.js"): "let x;\n"}
    assert list(rules.script_fragments(page))


def test_fragment_rule_allows_larger_modules_and_those_with_more_importers() -> None:
    importer = source("holdfast/core/state.py", "from holdfast.core import small\n")
    other = source("holdfast/core/decide.py", "from holdfast.core.small import x\n")
    small = source("holdfast/core/small.py", "x = 1\n")
    large = source("holdfast/core/small.py", "x = 1\n" * rules.MODULE_LINES_MIN)
    assert_clean(rules.fragments([importer, other, small]))
    assert_clean(rules.fragments([importer, large]))


# --- Unfinished and careless ---


def test_nothing_is_left_for_later() -> None:
    assert_clean(problem for path, text in text_files("src") for problem in rules.unfinished_marks(path, text))


@pytest.mark.parametrize("text", ["# TODO: more", "-- FIXME", "x = 1  # XXX", '"""A HACK."""'])
def test_unfinished_rule_finds(text: str) -> None:
    assert list(rules.unfinished_marks(PurePosixPath("holdfast/core/state.py"), text))


def test_unfinished_rule_allows_words_that_contain_a_mark() -> None:
    assert_clean(rules.unfinished_marks(PurePosixPath("holdfast/core/state.py"), "TODOS = 1  # hacking"))


def test_code_and_docs_are_written_in_the_words_of_the_field() -> None:
    pages = [(PurePosixPath(f"docs/{page.name}"), page.read_text()) for page in (ROOT / "docs").rglob("*.md")]
    pages += [(PurePosixPath(page.name), page.read_text()) for page in ROOT.glob("*.md") if page.stem != "CHANGELOG"]
    texts = [*text_files("src"), *(page for page in pages if page[0].stem != "contract")]  # whose words are agreed on
    assert_clean(problem for path, text in texts for problem in rules.dialect(path, text))
    others = [file for folder in ("tests", "tools", "bench", "examples") for file in python_files(folder)]
    others = [file for file in others if file.path.name not in {"test_tidy.py", "tidy_rules.py"}]
    phrases = rules.DIALECT_OF_TESTS
    assert_clean(problem for file in others for problem in rules.dialect(file.path, file.text, phrases))


@pytest.mark.parametrize(
    "text",
    ["# Say whether it is due", "it is put aside", "the store rings", "lets in callers", "nobody knows", "who is told"],
)
def test_dialect_rule_finds(text: str) -> None:
    assert list(rules.dialect(PurePosixPath("holdfast/core/state.py"), text))


def test_dialect_rule_allows_words_that_contain_a_phrase() -> None:
    assert_clean(rules.dialect(PurePosixPath("holdfast/core/state.py"), "strings, during, outlets into"))


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_the_guides_name_exist(page: str) -> None:
    files = {f"/{folder}/{path}" for folder in ("src", "tests", "tools") for path, _ in text_files(folder)}
    named = rules.FILE_NAME.findall((ROOT / page).read_text(encoding="utf-8"))
    assert named
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


def test_nothing_pretends_to_exist() -> None:
    check_each(rules.not_implemented)


@pytest.mark.parametrize("text", ["raise NotImplementedError", "def f():\n    raise NotImplementedError('soon')"])
def test_not_implemented_rule_finds(text: str) -> None:
    assert list(rules.not_implemented(source("holdfast/core/state.py", text)))


def test_no_exception_is_swallowed() -> None:
    found = [swallow for file in python_files("src") for swallow in rules.swallowed_exceptions(file)]
    assert_clean(swallow.problem for swallow in found if swallow.where not in SWALLOWING_ALLOWED)
    unused = SWALLOWING_ALLOWED.keys() - {swallow.where for swallow in found}
    assert not unused, f"no longer needed in SWALLOWING_ALLOWED: {sorted(unused)}"


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    f()\nexcept:\n    pass",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept BaseException as error:\n    print(error)",
        "try:\n    f()\nexcept (ValueError, Exception):\n    pass",
        "try:\n    f()\nexcept* Exception:\n    pass",
        "try:\n    f()\nexcept Exception:\n    def later():\n        raise",
        "with contextlib.suppress(Exception):\n    f()",
    ],
)
def test_swallow_rule_finds(text: str) -> None:
    assert list(rules.swallowed_exceptions(source("holdfast/core/state.py", text)))


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    f()\nexcept ValueError:\n    pass",
        "try:\n    f()\nexcept Exception:\n    clean()\n    raise",
        "try:\n    f()\nexcept Exception as error:\n    raise StoreError from error",
        "with contextlib.suppress(KeyError):\n    f()",
    ],
)
def test_swallow_rule_allows(text: str) -> None:
    assert not list(rules.swallowed_exceptions(source("holdfast/core/state.py", text)))


def test_swallow_rule_names_the_place_for_the_allow_list() -> None:
    text = "class Pump:\n  def run(self):\n    try:\n      f()\n    except Exception:\n      pass"
    (swallow,) = rules.swallowed_exceptions(source("holdfast/engine/pump.py", text))
    assert swallow.where == "holdfast/engine/pump.py:Pump.run"


def test_tests_do_not_sleep() -> None:
    sleeping = {str(file.path): list(rules.sleeps(file)) for file in python_files("tests")}
    assert_clean(problem for path, problems in sleeping.items() if path not in SLEEPING_ALLOWED for problem in problems)
    unused = [path for path in SLEEPING_ALLOWED if not sleeping.get(path)]
    assert not unused, f"no longer needed in SLEEPING_ALLOWED: {unused}"


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.sleep(1)",
        "import time as t\nt.sleep(1)",
        "from time import sleep\nsleep(1)",
        "from time import sleep as nap\nnap(1)",
    ],
)
def test_sleep_rule_finds(text: str) -> None:
    assert list(rules.sleeps(source("test_planted.py", text)))


def test_no_cancellation_is_swallowed() -> None:
    check_each(rules.swallowed_cancellations)


@pytest.mark.parametrize(
    "text", ["import asyncio\nasyncio.wait_for(f(), 1)", "from asyncio import wait_for as soon\nsoon(f(), 1)"]
)
def test_cancellation_rule_finds(text: str) -> None:
    assert list(rules.swallowed_cancellations(source("holdfast/engine/planted.py", text)))


@pytest.mark.process
def test_no_file_names_a_registry_or_a_folder_of_one_machine() -> None:
    assert_clean(problem for path, text in repository_texts() for problem in rules.places_of_this_machine(path, text))


# Put together from pieces, so that this file does not name what it forbids.
@pytest.mark.parametrize(
    "pieces",
    [
        ("https://pypi", ".org/simple"),
        ("https://files.pythonhosted", ".org/packages"),
        ("FROM ghcr", ".io/thing"),
        ("pip install --index", "-url=https://mirror"),
        ("PIP_INDEX", "_URL=https://mirror"),
        ("cd /", "work"),
        ("cd /", "work/main"),
        ("sqlite:////", "root/orders.db"),
        ("'/", "root'"),
        ("open(/", "home/ann/x)"),
        ("/", "Users/ann"),
    ],
)
def test_machine_rule_finds(pieces: tuple[str, ...]) -> None:
    assert list(rules.places_of_this_machine(PurePosixPath("README.md"), "".join(pieces)))


@pytest.mark.parametrize(
    "text",
    [
        "GET /workflows/7 and /work-items",
        "src/work/root.py",
        "https://root.example.com/home/page",
        "a happy organisation",
    ],
)
def test_machine_rule_allows(text: str) -> None:
    assert_clean(rules.places_of_this_machine(PurePosixPath("README.md"), text))
