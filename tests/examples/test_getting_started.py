"""`docs/getting-started.md` is run as it stands: each line behind a `$`, and what it shows must be what comes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command_process import MOST_SECONDS, environment

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "getting-started.md").read_text()
PORT = "8321"


def sessions() -> Iterator[tuple[str, list[str]]]:
    """Go through the lines that are typed, each with the lines that it shows."""
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            typed, *shown = part.splitlines()
            yield typed, shown


def is_like(shown: list[str], found: list[str]) -> bool:
    """Say whether the lines are those on the page, where `…` stands for anything, and alone for any further lines."""
    if shown and shown[-1] == "…":
        shown, found = shown[:-1], found[: len(shown) - 1]
    patterns = [r"\s+".join(re.escape(word).replace("…", ".*") for word in line.split()) for line in shown]
    return len(found) == len(patterns) and all(
        re.fullmatch(r"\s*" + pattern, line) for pattern, line in zip(patterns, found, strict=True)
    )


def test_the_comparison_can_fail() -> None:
    assert is_like(["a  …  b", "…"], ["a x y b", "more", "and more"])
    assert not is_like(["a  …  b"], ["a x y c"])
    assert not is_like(["a"], ["a", "b"])
    assert not is_like(["a", "b", "…"], ["a"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as a checkout has it, with the command on the path."""
    shutil.copytree(TOP / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "holdfast"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W error -m holdfast "$@"\n')
    script.chmod(0o755)
    return tmp_path


def free_port() -> str:
    """Return the port of the page, or another one if somebody has it."""
    for port in (int(PORT), 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return str(probe.getsockname()[1])
    raise AssertionError("there is no port at all")


def test_every_line_of_the_page_does_what_it_shows(folder: Path) -> None:
    assert shutil.which("curl"), "the page uses curl: make commands"
    port = free_port()
    elsewhere = {} if port == PORT else {"HOLDFAST_SERVER": f"http://127.0.0.1:{port}"}
    env = environment(**elsewhere)
    env["PATH"] = f"{folder}/bin{os.pathsep}{env['PATH']}"
    (served, banner), *typed = sessions()
    words = served.split() + ([] if port == PORT else ["--port", port])
    process = subprocess.Popen(words, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = [process.stderr.readline().rstrip("\n") for _ in banner]
        assert is_like([line.replace(PORT, port) for line in banner], found), found
        while "is served at" not in (line := process.stderr.readline()):
            assert line, "it has ended"
        for line, shown in typed:
            assert is_like(shown, lines := run(line.replace(PORT, port), folder, env)), (line, lines)
        assert len(typed) >= 10
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=MOST_SECONDS)
    assert process.returncode == 0


def run(line: str, folder: Path, env: dict[str, str]) -> list[str]:
    """Type a line into a shell, and return what it shows."""
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), line
    return done.stdout.splitlines()
