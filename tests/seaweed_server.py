"""A real object storage for tests: SeaweedFS, whose program is in the wheel of the development tools.

`SeaweedServer().start()` starts one to stop and to kill, in memory; it dies with the test session. What was written is
there when it starts again. `SharedSeaweed.join` is for tests that only write to it: a session has one of these.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import httpx

from tests.postgres_server import NoServer, free_ports
from tests.s3_server import KEY_ID, Endpoint
from tests.server_folder import ServerFolder

PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
ALL_RIGHTS = ("Admin", "Read", "Write", "List", "Tagging")
OPENED_WITHIN_S = 60.0
ASK_AGAIN_S = 0.1


def find_program() -> Path:
    """Return the program."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise NoServer("no object storage to test with: `make dev` installs one in the virtual environment")
    return Path(found).resolve()


class SeaweedServer(Endpoint):
    """A server on 127.0.0.1."""

    def __init__(self) -> None:
        super().__init__()
        self._program = find_program()
        self._folder = ServerFolder.make(in_memory=True)
        names = [name for port in PORTS for name in (port, f"{port}.grpc")]
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        # The program makes these whatever its options say, and leaves them if it is killed.
        sockets = {service: self._ports[f"{service}.port.grpc"] for service in ("master", "volume", "filer", "s3")}
        self._folder.also_remove(f"/tmp/seaweedfs-{service}-grpc-{port}.sock" for service, port in sockets.items())
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def folder(self) -> ServerFolder:
        """Where its files are. It ends with the last one who holds the folder."""
        return self._folder

    def start(self) -> None:
        """Start it, and wait until it takes requests."""
        log = self._folder.path / "log"
        with log.open("wb") as said:
            self._process = subprocess.Popen(self._command(), stderr=said, stdout=subprocess.DEVNULL)
        self._wait(log)

    def start_apart(self) -> None:
        """Start it as no child of this process, which may end before it."""
        log = self._folder.path / "log"
        apart = ["/bin/sh", "-c", '"$@" > /dev/null 2> "$0" &', str(log)]
        subprocess.run([*apart, *self._command()], check=True)
        self._wait(log)

    def _wait(self, log: Path) -> None:
        until = time.monotonic() + OPENED_WITHIN_S
        while not self._answers():
            said = log.read_text()[-2_000:]
            assert self._process is None or self._process.poll() is None, f"the server ended: {said}"
            assert time.monotonic() < until, f"the server does not answer: {said}"

    def _command(self) -> list[str]:
        """Write its configuration, and return how it is started."""
        folder = self._folder.path
        identity = {"accessKey": KEY_ID, "secretKey": self.secret}
        known = {"identities": [{"name": "tests", "credentials": [identity], "actions": ALL_RIGHTS}]}
        (folder / "s3.json").write_text(json.dumps(known))
        (folder / "data").mkdir(exist_ok=True)
        options: dict[str, object] = {
            "dir": folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "filer.localSocket": folder / "filer.sock",
            "s3.localSocket": folder / "s3.sock",
            "s3.config": folder / "s3.json",
            "s3.iam": "false",
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 64,
            "volume.max": 10_000,  # each bucket takes some
            **self._ports,
        }
        words = [f"-{name}={value}" for name, value in options.items()]
        return [str(self._program), "-logtostderr", "server", "-filer", "-s3", *words]

    def _answers(self) -> bool:
        """Return whether it makes a bucket. It takes connections some time before it can."""
        try:
            self.make_bucket()
        except httpx.HTTPError:
            signal.sigtimedwait((), ASK_AGAIN_S)
            return False
        return True

    def kill(self) -> None:
        """Kill it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def freeze(self) -> None:
        """Stop it where it is: connections are taken, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def remove(self) -> None:
        """Leave nothing of it."""
        if self._process is not None:
            self.kill()
        self._folder.remove()


class SharedSeaweed(Endpoint):
    """A part in the server that several processes share. It dies with the last of them."""

    def __init__(self, url: str, secret: str, folder: ServerFolder) -> None:
        super().__init__(url, secret)
        self._folder = folder

    @classmethod
    def join(cls, meeting_place: Path) -> SharedSeaweed:
        """Return the server of those who know this folder. The first one starts it."""
        with (meeting_place / "seaweed").open("a+") as notes:
            fcntl.flock(notes, fcntl.LOCK_EX)
            notes.seek(0)
            url, _, rest = notes.read().partition(" ")
            secret, _, path = rest.partition(" ")
            folder = ServerFolder.join(Path(path)) if path else None
            if folder is None:
                server = SeaweedServer()
                server.start_apart()
                url, secret, folder = server.url, server.secret, server.folder
                notes.truncate(0)
                notes.write(f"{url} {secret} {folder.path}")
            return cls(url, secret, folder)

    def leave(self) -> None:
        """Use it no longer."""
        self._folder.leave()
