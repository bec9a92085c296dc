"""How pages install Holdfast: the lines are typed, with what a package index would give already there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cli.command_process import MOST_SECONDS, environment
from tests.examples.page_session import OFFLINE, script_lines

TOP = Path(__file__).parents[2]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
FIRST_PAGE = TOP / "docs" / "tutorial" / "1-first-run.md"
CHECKOUT = "/path/to/the/checkout"

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_the_first_page_of_the_tutorial_installs_the_command(tmp_path: Path) -> None:
    """Hatchling and the dependencies come from this environment. The package and its command come from the checkout."""
    make, install = script_lines(FIRST_PAGE.read_text())
    assert CHECKOUT in install
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    offline = {**OFFLINE, "PIP_DRY_RUN": "0", "PIP_NO_BUILD_ISOLATION": "0"}  # pip reads this 0 as "do not isolate"
    environ = environment(**offline) | {"PYTHONPATH": sysconfig.get_path("purelib")}
    environ["PATH"] = f"{tmp_path}{os.pathsep}{environ['PATH']}"
    lines = [make, install.replace(CHECKOUT, str(TOP)), "command -v holdfast", "holdfast --version"]
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    where, version = done.stdout.splitlines()[-2:]
    assert where == f"{tmp_path}/.venv/bin/holdfast"
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    [package] = (tmp_path / ".venv").glob("lib/*/site-packages/holdfast")
    for path in (TOP / "src" / "holdfast").rglob("*.py"):
        assert (package / path.relative_to(TOP / "src" / "holdfast")).read_bytes() == path.read_bytes()


def test_the_extras_that_pages_install_exist_and_are_what_tests_have() -> None:
    """All in one command: pip says of each what is missing."""
    texts = [page.read_text() for page in PAGES] + [path.read_text() for path in (TOP / "src").rglob("*.py")]
    extras = {each for text in texts for each in re.findall(r"pip install ['\"][^'\"\[]*\[([\w,-]+)\]['\"]", text)}
    assert {"postgres", "s3", "django", "otel"} <= extras
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *(f"holdfast[{extra}]" for extra in sorted(extras))],
        env=environment(**OFFLINE),
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "Would install" not in done.stdout
