"""What pages show in passing is true as well: code parses, `hf.…` exists, and so do commands and their options."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import holdfast as hf
from holdfast.cli.main import all_commands

TOP = Path(__file__).parents[2]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
GLOBAL = {"--help", "-h", "--version"}


def written_commands(text: str) -> Iterator[str]:
    """Return each `holdfast …` on a page: typed in a terminal, or within a sentence, here or in a container."""
    for block in re.findall(r"^```(?:console|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            yield from re.findall(
                r"(?<!-[og] )\bholdfast [^|;&)]*", line if line.startswith("$") else re.sub(r"^holdfast:.*", "", line)
            )
            yield from (f"holdfast {words}" for words in re.findall(r"^docker compose .* run --rm migrate (.+)", line))
    yield from re.findall(r"`(?:kubectl exec \S+ -- |manage\.py )?(holdfast [^`]+)`", prose_of(text))


def prose_of(text: str) -> str:
    """Return a page without its blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def problem_of(line: str) -> str | None:
    """Say which command or option of a line does not exist."""
    try:
        words = shlex.split(line.partition(" # ")[0], comments=False)[1:]
    except ValueError:
        words = line.split()[1:]
    names: list[str] = []
    app = all_commands()
    while words and not words[0].startswith("-"):
        # `pause|resume` and `pause`, `…` or ID stand for several, or for any.
        alternatives = words[0].strip("…").split("|")
        missing = [each for each in alternatives if each and each not in app]
        if missing:
            is_group = bool([each for each in app if not each.startswith("-")])
            return (
                f"there is no command {' '.join([*names, *missing])!r}" if is_group and missing[0].islower() else None
            )
        if not alternatives[0]:
            return None
        names.append(words.pop(0))
        app = app[alternatives[0]]
    return None


def options_of(line: str) -> Iterator[str]:
    """Return the options of a line that its command does not have."""
    words = line.split()[1:]
    app = all_commands()
    while words and words[0] in app and not words[0].startswith("-"):
        app = app[words.pop(0)]
    if app.default_command is None:
        return
    known = GLOBAL | {name for argument in app.assemble_argument_collection() for name in argument.names}
    for word in words:
        option = re.match(r"--[a-z][a-z0-9-]*", word)
        if option and option[0] not in known:
            yield option[0]


def test_code_on_the_pages_parses() -> None:
    blocks = [
        (page, block)
        for page in PAGES
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert len(blocks) > 50, "so many are found"
    for page, block in blocks:
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)


def test_every_name_of_the_package_on_the_pages_exists() -> None:
    wrong = []
    for page in PAGES:
        for name in set(re.findall(r"\bhf\.([A-Za-z_][\w.]*\w)", page.read_text())):
            try:
                reduce(getattr, name.split("."), hf)
            except AttributeError:
                wrong.append(f"{page.name}: hf.{name}")
    assert wrong == []


def test_every_command_on_the_pages_exists() -> None:
    count, wrong = 0, []
    for page in PAGES:
        for line in written_commands(page.read_text()):
            count += 1
            problems = [problem_of(line), *(f"there is no option {option}" for option in options_of(line))]
            wrong += [f"{page.name}: {line}: {problem}" for problem in problems if problem]
    assert count > 200
    assert wrong == []


def all_options() -> set[str]:
    """Return the options of all commands."""
    found, groups = set(GLOBAL), [all_commands()]
    while groups:
        app = groups.pop()
        groups += [app[name] for name in app if not name.startswith("-")]
        if app.default_command is not None:
            found |= {name for argument in app.assemble_argument_collection() for name in argument.names}
    return found


def test_every_option_in_a_sentence_exists() -> None:
    """Some options belong to the benchmark, on pages that name it."""
    known = all_options()
    of_the_benchmark = set(re.findall(r'"(--[a-z-]+)"', (TOP / "bench" / "__main__.py").read_text()))
    count, wrong = 0, []
    for page in PAGES:
        text = prose_of(page.read_text())
        here = known | (of_the_benchmark if "`python -m bench" in text else set())
        written = re.findall(r"`(--[a-z][a-z0-9-]*)[^`]*`", text)
        count += len(written)
        wrong += [f"{page.name}: {option}" for option in written if option not in here]
    assert count > 100
    assert wrong == []


def test_the_checks_can_fail() -> None:
    assert list(written_commands("```console\n$ holdfast run lst | cat\n```\nand `holdfast store cpy A B`")) == [
        "holdfast run lst ",
        "holdfast store cpy A B",
    ]
    continued = "`kubectl exec x -- holdfast run lst`\n```console\n$ holdfast server a.py \\\n  --no\n```\n"
    assert [" ".join(each.split()) for each in written_commands(continued)] == [
        "holdfast server a.py --no",
        "holdfast run lst",
    ]
    in_a_container = "```sh\ndocker compose -f deploy/compose.yaml run --rm migrate token mke\n```\n"
    assert [problem_of(each) for each in written_commands(in_a_container)] == ["there is no command 'token mke'"]
    assert problem_of("holdfast run lst") is not None
    assert problem_of("holdfast run list") is None
    assert list(options_of("holdfast run list --sttus X --status=PAUSED")) == ["--sttus"]
