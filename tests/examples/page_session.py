"""A page of the documentation as a session: its files are written, its lines are typed, and what it shows must come.

A block whose first line is `python title="NAME"` is a file. In a block of `console`, each line behind a `$` is typed;
in one of `sh`, every line, and it does not matter what they show. A line that starts a server or a node goes on in the
background, as in another terminal, and is waited for until it works. `pip install` looks for what is installed
already: it fetches nothing and changes nothing.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.cli.command_process import MOST_SECONDS, environment

PORT = "8321"
"""The port that pages use. Tests take another one."""

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DRY_RUN": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""By these `pip install` succeeds only with what is there."""

_SERVES = ("holdfast dev", "holdfast server", "holdfast node")
_KILL = "pkill -9 -f holdfast"
_STOP = "pkill -INT -f holdfast"
_ASSIGNS = re.compile(r"(?:export )?([A-Z_]+)=(.*)")
_READY = ("is served at", " works on ")


def typed_lines(page: str) -> Iterator[tuple[str, list[str]]]:
    """Go through the lines that are typed, each with the lines that it shows."""
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            typed, *shown = part.splitlines()
            yield typed, shown


def script_lines(page: str) -> Iterator[str]:
    """Go through the lines of scripts, those that go on in the next line as one."""
    for block in re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        yield from re.sub(r"\\\n|(?<=\|)\n", " ", block).splitlines()


def is_like(shown: list[str], found: list[str]) -> bool:
    """Return whether the lines are those on the page; `…` stands for anything, and alone for any further lines."""
    if shown and shown[-1] == "…":
        shown, found = shown[:-1], found[: len(shown) - 1]
    patterns = [r"\s+".join(re.escape(word).replace("…", ".*") for word in line.split()) for line in shown]
    return len(found) == len(patterns) and all(
        re.fullmatch(r"\s*" + pattern, line) for pattern, line in zip(patterns, found, strict=True)
    )


class PageSession:
    """A folder and some terminals in which the lines of a page are typed."""

    def __init__(self, folder: Path, **more: str) -> None:
        self._folder = folder
        self._port = _free_port()
        self._servers: list[subprocess.Popen[str]] = []
        self._last: list[str] = []
        (folder / "bin").mkdir()
        for name, module in (("holdfast", "holdfast"), ("pip", "pip"), ("python", None), ("python3", None)):
            options = f"-W error -m {module}" if module else ""
            self.add_command(name, f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
        self._env = environment(HOLDFAST_SERVER=f"http://127.0.0.1:{self._port}", **OFFLINE, **more)
        self._env["PATH"] = f"{folder}/bin{os.pathsep}{self._env['PATH']}"

    def add_command(self, name: str, script: str) -> None:
        """Give the terminals another command."""
        program = self._folder / "bin" / name
        program.write_text(script)
        program.chmod(0o755)

    def write_files(self, page: str) -> None:
        """Write the files that the page shows."""
        for name, text in re.findall(r'```python title="([\w.]+)"\n(.*?)```', page, re.DOTALL):
            (self._folder / name).write_text(text)

    def play(self, page: str) -> int:
        """Type every line of the page; return how many there were. What is shown must be what comes."""
        typed = list(typed_lines(page))
        for line, shown in typed:
            found = self.type(line)
            assert is_like([text.replace(PORT, self._port) for text in shown], found), (line, found)
        return len(typed)

    def play_scripts(self, page: str) -> int:
        """Type every line of the page's scripts; return how many there were."""
        typed = list(script_lines(page))
        for line in typed:
            self.type(line)
        return len(typed)

    def type(self, line: str) -> list[str]:
        """Type a line, and return what it shows."""
        if line == _KILL:
            for server in self._servers:
                os.killpg(server.pid, signal.SIGKILL)
                server.communicate(timeout=MOST_SECONDS)
            self._servers.clear()
            return []
        if line == _STOP:
            self.close()
            self._servers.clear()
            return []
        if assigns := _ASSIGNS.fullmatch(line):
            name, value = assigns.groups()
            [self._env[name]] = self._run(f'{name}={value} || exit; echo "${name}"')
            return []
        if line.startswith(_SERVES):
            return self._serve(line)
        if "TASK_ID" in line:
            line = line.replace("TASK_ID", self._last[-1].split()[0])
        self._last = self._run(line.replace(PORT, self._port))
        return self._last

    def close(self) -> None:
        """End what runs in the background."""
        for server in self._servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGINT)
        for server in self._servers:
            server.communicate(timeout=MOST_SECONDS)
            assert server.returncode == 0

    def _serve(self, line: str) -> list[str]:
        words = line.removesuffix("&").split()
        words += ["--port", self._port] if words[1] != "node" else []
        server = subprocess.Popen(
            words, cwd=self._folder, env=self._env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self._servers.append(server)
        assert server.stderr is not None
        lines = list[str]()
        for text in server.stderr:
            if any(ready in text for ready in _READY):
                return lines
            lines.append(text.rstrip("\n"))
        raise AssertionError(f"it has ended: {lines}")

    def _run(self, line: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=False,
        )
        assert done.returncode == 0, (line, done.returncode, done.stdout, done.stderr)
        return done.stdout.splitlines()


def _free_port() -> str:
    """Return a port that is free, so that pages can be played side by side."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
