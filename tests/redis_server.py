"""A real Redis server for tests: the one that is installed, or the one in the wheel of the development tools."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

from tests.postgres_server import NoServer, free_port
from tests.server_folder import ServerFolder

READY = "Ready to accept connections"


def find_server() -> Path:
    """Return the program."""
    found = shutil.which("redis-server") or shutil.which("redis-server", path=sysconfig.get_path("scripts"))
    if found is None:
        raise NoServer("no Redis server to test with: `make dev` installs one in the virtual environment")
    return Path(found).resolve()


class RedisServer:
    """A server on a port of 127.0.0.1. It dies with the test session."""

    def __init__(self, password: str) -> None:
        self._program = find_server()
        self._folder = ServerFolder.make()
        self.port = free_port()
        self._password = password
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder.path), "--save", ""]
        command = [str(self._program), *options, "--requirepass", self._password]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = ""
        while READY not in said:
            line = self._process.stdout.readline()
            said += line
            assert line, f"the server ended: {said}"

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            assert self._process.stdout is not None
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None

    def remove(self) -> None:
        """Leave nothing of it."""
        self.kill()
        self._folder.remove()
