"""Wake-ups: hints that some run may have become ready, within a process and between those that share a file.

An idle node waits here until the next due instant, or until it is notified. Losing a wake-up costs latency, never
correctness; a spurious one costs one query.
"""

import asyncio
import errno
import itertools
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

from holdfast.core.state import TERMINAL
from holdfast.core.tasks import DECISIONS
from holdfast.store.types import Turn

PRIVATE_FOLDER = 0o700
PRIVATE_SOCKET = 0o600
"""Other users can neither wake the nodes of a file nor see who they are."""

LONGEST_ADDRESS = 100
"""Unix socket addresses are limited to some hundred bytes; a longer path is reached through the folder's descriptor."""


Topic = Literal["runs", "streams"]
"""What a notification is about. Who listens for streams hears all of them; nodes only those about runs."""

OF_STREAMS = b"s"
"""The content of a notification about streams; any other one is about runs."""


class Listener(Protocol):
    """Waits for notifications."""

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for a notification; return False on time-out. A notification since the last wait is not lost."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class Wakeups(Protocol):
    """The notifications of one store."""

    def notify(self, topic: Topic = "runs") -> None:
        """Wake the listeners of the topic, here and in other processes. Never blocks, never raises."""
        ...

    def listen(self, topic: Topic = "runs") -> Listener:
        """Begin to listen: for what is about runs, or for everything (`streams`)."""
        ...

    def close(self) -> None:
        """Release every resource, and wake the listeners that still wait."""
        ...


class LocalListener:
    """Waits for notifications in the same event loop."""

    def __init__(self, wakeups: "LocalWakeups", topic: Topic = "runs") -> None:
        self._wakeups = wakeups
        self.topic = topic
        self.notified = asyncio.Event()

    async def wait(self, timeout_s: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self.notified.wait()
        except TimeoutError:
            return False
        self.notified.clear()
        return True

    def close(self) -> None:
        self._wakeups.listeners.pop(self, None)


class LocalWakeups:
    """Wake-ups within one event loop, in the order in which listeners came, so that a simulation can be repeated."""

    def __init__(self) -> None:
        self.listeners: dict[LocalListener, None] = {}

    def notify(self, topic: Topic = "runs") -> None:
        for listener in self.listeners:
            if topic == "runs" or listener.topic == topic:
                listener.notified.set()

    def listen(self, topic: Topic = "runs") -> LocalListener:
        listener = LocalListener(self, topic)
        self.listeners[listener] = None
        return listener

    def close(self) -> None:
        self.notify()
        self.listeners.clear()


class SocketWakeups:
    """Wake-ups between processes that share a file: a datagram to each of them, no scanning loop.

    Each process that listens binds a Unix datagram socket in the folder `NAME-wake` beside the file. A notification is
    an empty datagram to every socket there, or one of a byte if it is about streams. A socket whose owner was killed
    refuses it, and the sender removes the socket. Correctness does not depend on any of this, so errors of the
    operating system are ignored.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path.with_name(path.name + "-wake")
        self._local = LocalWakeups()
        self._socket: socket.socket | None = None
        self._name = ""
        self._folder_fd = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    def notify(self, topic: Topic = "runs") -> None:
        self._local.notify(topic)
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)]
        except OSError:
            return  # there are no listeners
        for name in names:
            if name != self._name:
                self._send(name, OF_STREAMS if topic == "streams" else b"")

    def listen(self, topic: Topic = "runs") -> LocalListener:
        if self._socket is None:
            self._loop = asyncio.get_running_loop()
            with suppress(OSError):
                self._bind()
        return self._local.listen(topic)

    def close(self) -> None:
        self._local.close()
        if self._socket is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            with suppress(OSError):
                (self._folder / self._name).unlink()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1
        with suppress(OSError):
            self._folder.rmdir()

    def _bind(self) -> None:
        self._folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        wakeups = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        wakeups.setblocking(False)
        for number in itertools.count():
            self._name = f"{os.getpid()}-{number}"
            try:
                wakeups.bind(self._address(self._name))
                os.chmod(self._folder / self._name, PRIVATE_SOCKET)  # until now the folder keeps others out
                break
            except OSError as problem:
                if problem.errno != errno.EADDRINUSE:
                    wakeups.close()
                    raise
        self._socket = wakeups
        assert self._loop is not None
        self._loop.add_reader(wakeups, self._heard)

    def _heard(self) -> None:
        topic: Topic = "streams"
        with suppress(OSError):
            while self._socket is not None:
                if self._socket.recv(1) != OF_STREAMS:
                    topic = "runs"
        self._local.notify(topic)

    def _send(self, name: str, content: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(content, self._address(name))
            except ConnectionRefusedError:
                with suppress(OSError):
                    (self._folder / name).unlink()  # its owner was killed
            except OSError:
                pass  # its buffer is full, so it has been notified; or it is gone

    def _address(self, name: str) -> str:
        address = str(self._folder / name)
        if len(os.fsencode(address)) <= LONGEST_ADDRESS:
            return address
        if self._folder_fd < 0:
            self._folder_fd = os.open(self._folder, os.O_RDONLY)
        return f"/proc/self/fd/{self._folder_fd}/{name}"


# --- what others are notified of; of creations, see `creations_may_wake_others`


def may_wake_others(turn: Turn) -> bool:
    """Return whether another process than the run's owner can be waiting for what this turn does."""
    if turn.release or turn.messages or turn.starts or turn.sends or turn.jobs or turn.streams:
        return True
    if turn.snapshot.status in TERMINAL:
        return True
    for event in turn.events:  # noqa: SIM110 - a generator would take longer than the loop
        if event.data.IS_AWAITED or (turn.received and isinstance(event.data, DECISIONS)):
            return True
    return False
