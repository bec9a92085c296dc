"""What `docs/deployment.md` says about systemd: its commands are typed, and then the units' own commands run."""

from __future__ import annotations

import asyncio
import configparser
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.tools.plain_user import IS_ROOT, installed, interpreter, run_until_up

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deployment.md").read_text()
ADDRESS = "postgresql://shop:…@db.internal/shop"
PYTHON = """#!/bin/sh
# `python3 -m venv FOLDER`: with the package that is tested, which need not be installed.
mkdir -p "$3/bin" && printf '#!/bin/sh\\n' > "$3/bin/pip" && chmod 755 "$3/bin/pip"
printf '#!/bin/sh\\nexec %s -m holdfast "$@"\\n' {interpreter} > "$3/bin/holdfast" && chmod 755 "$3/bin/holdfast"
"""
WITHOUT_ROOT = {
    "runuser": 'shift 3; exec "$@"',
    "install": 'exec /usr/bin/install $(echo "$@" | sed "s/-[og] holdfast//g")',
}


class Machine:
    """A folder that stands for a machine: the paths of the page are below it, and its user is `nobody`."""

    def __init__(self, top: Path, address: str) -> None:
        self.top = top
        self.address = address
        stubs = {"useradd": "", "systemctl": f'echo "$@" >> {top}/systemctl', **({} if IS_ROOT else WITHOUT_ROOT)}
        (top / "bin").mkdir()
        for name, body in stubs.items():
            self._add_command(name, f"#!/bin/sh\n{body}\n")
        self._add_command("python3", PYTHON.replace("{interpreter}", interpreter()))
        (top / "etc/systemd/system").mkdir(parents=True)
        (top / "checkout").mkdir()
        (top / "checkout/deploy").symlink_to(ROOT / "deploy")
        shutil.copy(ROOT / "examples" / "approval.py", top / "checkout" / "app.py")

    def _add_command(self, name: str, text: str) -> None:
        path = self.top / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def here(self, text: str) -> str:
        """Return the text with the paths, the user and the address of this machine."""
        text = re.sub(r"(?<![\w.])/(srv|etc|var/lib)/", rf"{self.top}/\1/", text).replace(ADDRESS, self.address)
        if IS_ROOT:
            text = re.sub(r"-([ou]) holdfast\b", r"-\1 nobody", text).replace("-g holdfast", "-g nogroup")
        return text

    def type(self, script: str) -> str:
        """Type the lines in one shell; the first that fails ends it."""
        path = f"{self.top}/bin{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-e", "-c", self.here(script)],
            cwd=self.top / "checkout",
            env=installed() | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def run_unit(self, name: str, *more: str) -> None:
        """Run a unit's command with its environment, until it is up."""
        unit = configparser.RawConfigParser(strict=False, empty_lines_in_values=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        text = self.here((self.top / "etc/systemd/system" / name).read_text())
        unit.read_string(text)
        service = unit["Service"]
        lines = re.findall(r"^Environment=(.*)$", text, re.MULTILINE)
        lines += shlex.split(Path(service["EnvironmentFile"].removeprefix("-")).read_text())
        environ = installed(**dict(line.split("=", 1) for line in lines))
        await run_until_up([*shlex.split(service["ExecStart"]), *more], Path(service["WorkingDirectory"]), environ)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def test_the_commands_set_up_units_that_run(kind: str, request: pytest.FixtureRequest) -> None:
    section = PAGE[PAGE.index("## systemd") : PAGE.index("## Metrics and alerts")]
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
    assert lines.count(ADDRESS) == 1
    with tempfile.TemporaryDirectory() as top:  # pytest's own folders are closed to other users, again and again
        os.chmod(top, 0o755)
        sqlite = f"sqlite:///{top}/var/lib/holdfast/holdfast.db"
        machine = Machine(Path(top), request.getfixturevalue("postgres_url") if kind == "postgres" else sqlite)
        assert re.search(r"^holdfast_[0-9a-f]{16}_[0-9a-f]{72}$", machine.type(lines), re.MULTILINE)
        asked = (Path(top) / "systemctl").read_text().splitlines()
        assert asked == ["daemon-reload", "enable --now holdfast-node holdfast-server"]
        assert (Path(top) / "etc/holdfast/environment").stat().st_mode & 0o777 == 0o640
        async with asyncio.timeout(120):
            await machine.run_unit("holdfast-node.service")
            await machine.run_unit("holdfast-server.service", "--port", "0")
