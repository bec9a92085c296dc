"""Processes of a user without rights, in a plain folder, as containers and units run them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_process import SOURCES, environment

NOBODY = 65534
IS_ROOT = os.geteuid() == 0
RIGHTS: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if IS_ROOT else {}
"""What a process is started with, so that it has no rights. Without root it has none that we could take away."""


def interpreter() -> str:
    """Return a Python of this version that a user without rights can run: this one may be in the folder of another."""
    code = "import sys; print(sys.version_info[:2])"
    for program in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run([program, "-c", code], capture_output=True, text=True, check=False, **RIGHTS)
        except OSError:
            continue
        if done.stdout.strip() == str(sys.version_info[:2]):
            return program
    pytest.skip("there is no interpreter that a user without rights can run")


def installed(**more: str) -> dict[str, str]:
    """Return an environment in which that interpreter finds the package and what it needs."""
    path = os.pathsep.join([SOURCES, sysconfig.get_path("purelib")])
    return environment(PYTHONDONTWRITEBYTECODE="1", **more) | {"PYTHONPATH": path}


async def start(command: list[str], folder: Path, environ: dict[str, str]) -> asyncio.subprocess.Process:
    """Start a process of a user without rights."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, cwd=folder, env=environ, stdout=pipe, stderr=pipe, **RIGHTS)


async def run_until_up(command: list[str], folder: Path, environ: dict[str, str]) -> None:
    """Run a node or a server that logs lines of JSON until it says that it is up, and stop it."""
    process = await start(command, folder, environ)
    assert process.stderr is not None
    said = b""
    async for line in process.stderr:
        said += line
        if json.loads(line).get("level") == "INFO":  # it is up when it says where
            process.terminate()
            break
    _, rest = await process.communicate()
    assert process.returncode == 0, (said + rest).decode()
