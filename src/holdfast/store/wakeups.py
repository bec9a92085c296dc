"""Wake-ups: hints that a run may have become ready, within a process and between processes that share a file.

An idle node waits here until the next due instant or a notification. Losing a wake-up costs latency, never correctness;
a spurious one costs one query.

A notification has a topic, so that other listeners keep sleeping, and names the runs that have ended, so that a caller
waiting for one of them reads its result immediately, and callers waiting for other runs read nothing. Runs are named by
digests, because ids may be names of people, and every user of a database may listen there.
"""

import asyncio
import errno
import itertools
import os
import socket
import stat
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol
from zlib import crc32

from holdfast.core.events import StepCompleted
from holdfast.core.state import TERMINAL
from holdfast.core.tasks import DECISIONS
from holdfast.store.types import NewRun, Turn

PRIVATE_FOLDER = 0o700
PRIVATE_SOCKET = 0o600
"""Other users can neither wake the nodes of a file nor see their identities."""

DATAGRAM_BYTES = 8_192

LONGEST_ADDRESS = 100
"""Unix socket addresses are limited to some hundred bytes; a longer path is reached through the folder's descriptor."""


Topic = Literal["runs", "changes", "streams"]
"""What a notification is about: runs that may have become ready or have a new due time; runs that have changed without
becoming ready; or streams."""

Interest = Literal["runs", "changes", "ends", "streams"]
"""What wakes a listener. Nodes: `runs`. Callers that wait for runs to end: `ends`. Others: `changes`, which includes
everything about runs, or `streams`, which includes everything."""

HEARD: dict[Interest, frozenset[Topic]] = {
    "runs": frozenset({"runs"}),
    "changes": frozenset({"runs", "changes"}),
    "ends": frozenset({"runs", "changes"}),
    "streams": frozenset({"runs", "changes", "streams"}),
}

NOTHING: frozenset[int] = frozenset()
"""No run has ended."""

MOST_ENDS = 20_000
"""How many ended runs a listener or a pending message remembers. Beyond that they count as unknown."""

Ended = frozenset[int] | None
"""Digests of the runs that have ended; None if it is unknown which have, if any."""


News = tuple[Topic, Ended]
"""The content of a notification."""

READY: News = "runs", NOTHING


def digest_of(run_id: str) -> int:
    """Return the number by which a notification names a run. Two runs may share a number: that costs a query."""
    return crc32(run_id.encode())


class Listener(Protocol):
    """Waits for notifications."""

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for a notification; return False on time-out. A notification since the last wait is not lost."""
        ...

    def take_ended(self) -> Ended:
        """Return the runs that have ended according to the notifications received; for the interest `ends` only."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class Wakeups(Protocol):
    """The notifications of one store."""

    def notify(self, topic: Topic = "runs", ended: Ended = None) -> None:
        """Wake the interested listeners, here and in other processes. Never blocks, never raises."""
        ...

    def listen(self, interest: Interest = "changes") -> Listener:
        """Start to listen."""
        ...

    def close(self) -> None:
        """Release every resource, and wake the listeners that are still waiting."""
        ...


class Pending:
    """A notification to be sent: several notifications are merged into one."""

    def __init__(self) -> None:
        self._topics: set[Topic] = set()
        self._ended: set[int] | None = set()

    def __bool__(self) -> bool:
        return bool(self._topics)

    def add(self, topic: Topic, ended: Ended) -> None:
        """Add a notification."""
        self._topics.add(topic)
        if topic != "streams":
            self._ended = _joined(self._ended, ended)

    def take(self) -> News:
        """Return the merged notification, and start over."""
        topics, ended = self._topics, self._ended
        self._topics, self._ended = set(), set()
        topic: Topic = "runs" if "runs" in topics else "changes" if "changes" in topics else "streams"
        return topic, None if ended is None else frozenset(ended)


def _joined(ended: set[int] | None, more: Ended) -> set[int] | None:
    if ended is None or more is None or len(ended) > MOST_ENDS:
        return None
    if more:
        ended.update(more)
    return ended


class LocalListener:
    """Waits for notifications in the same event loop."""

    def __init__(self, wakeups: "LocalWakeups", interest: Interest = "changes") -> None:
        self._wakeups = wakeups
        self.interest = interest
        self.notified = asyncio.Event()
        self._ended: set[int] | None = set()

    def hear(self, topic: Topic, ended: Ended) -> None:
        """Accept a notification, if it is of interest."""
        if topic not in HEARD[self.interest]:
            return
        if self.interest == "ends":
            if ended is not None and not ended:
                return
            self._ended = _joined(self._ended, ended)
        self.notified.set()

    async def wait(self, timeout_s: float | None) -> bool:
        if not self.notified.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self.notified.wait()
            except TimeoutError:
                return False
        self.notified.clear()
        return True

    def take_ended(self) -> Ended:
        ended, self._ended = self._ended, set()
        return None if ended is None else frozenset(ended)

    def close(self) -> None:
        self._wakeups.listeners.pop(self, None)


class LocalWakeups:
    """Wake-ups within one event loop, in the order in which listeners were added: a simulation must be repeatable."""

    def __init__(self) -> None:
        self.listeners: dict[LocalListener, None] = {}

    def notify(self, topic: Topic = "runs", ended: Ended = None) -> None:
        for listener in self.listeners:
            listener.hear(topic, ended)

    def listen(self, interest: Interest = "changes") -> LocalListener:
        listener = LocalListener(self, interest)
        self.listeners[listener] = None
        return listener

    def close(self) -> None:
        self.notify()
        self.listeners.clear()


# --- messages to other processes

_STREAMS, _RUNS, _CHANGES = b"s", b"r", b"c"
_UNKNOWN = b""
"""Runs may have become ready, and it is unknown which have ended. Earlier releases send only this about runs, and treat
every message that they do not know as this one."""

ENDS_A_MESSAGE = 1_400
"""How many ended runs one message names: the message stays below PostgreSQL's limit of 8,000 bytes."""


def encoded(topic: Topic, ended: Ended) -> list[bytes]:
    """Return the messages that carry this notification to other processes."""
    if topic == "streams":
        return [_STREAMS]
    if ended is None:
        return [_UNKNOWN]
    digests, letter = sorted(ended), _RUNS if topic == "runs" else _CHANGES
    messages = []
    for first in range(0, len(digests) or 1, ENDS_A_MESSAGE):
        named = digests[first : first + ENDS_A_MESSAGE]
        messages.append(letter + b64encode(struct.pack(f">{len(named)}I", *named)))
        letter = _CHANGES
    return messages


def decoded(message: bytes) -> News:
    """Return the notification in a message of another process."""
    if message == _STREAMS:
        return "streams", None
    letter, named = message[:1], message[1:]
    if letter not in (_RUNS, _CHANGES):
        return "runs", None
    try:
        digests = [digest for (digest,) in struct.iter_unpack(">I", b64decode(named, validate=True))]
    except (ValueError, struct.error):
        return "runs", None
    return "runs" if letter == _RUNS else "changes", frozenset(digests)


class SocketWakeups:
    """Wake-ups between processes that share a file: a datagram to each of them, no polling loop.

    Each process that listens binds a Unix datagram socket in the folder `NAME-wake` next to the file. A notification is
    a datagram to every socket there. A socket whose owner was killed refuses it, and the sender removes the socket.
    Correctness does not depend on any of this, so errors of the operating system are ignored.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path.with_name(path.name + "-wake")
        self._local = LocalWakeups()
        self._socket: socket.socket | None = None
        self._name = ""
        self._folder_fd = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    def notify(self, topic: Topic = "runs", ended: Ended = None) -> None:
        self._local.notify(topic, ended)
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)]
        except OSError:
            return  # there are no listeners
        messages = encoded(topic, ended) if len(names) > (self._name in names) else []
        for message in messages:
            for name in names:
                if name != self._name:
                    self._send(name, message)

    def listen(self, interest: Interest = "changes") -> LocalListener:
        if self._socket is None:
            self._loop = asyncio.get_running_loop()
            with suppress(OSError):
                self._bind()
        return self._local.listen(interest)

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
        heard = Pending()
        with suppress(OSError):
            while self._socket is not None:
                heard.add(*decoded(self._socket.recv(DATAGRAM_BYTES)))
        if heard:
            self._local.notify(*heard.take())

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


# --- what others are notified of; for creations, see `creations_may_wake_others`


def news_of(turns: Iterable[Turn]) -> News | None:
    """Return the news of turns for which processes other than the runs' owners can be waiting, or None."""
    topic: Topic | None = None
    ended: list[int] = []
    for turn in turns:
        if turn.snapshot.status in TERMINAL:
            ended.append(digest_of(turn.run_id))
        if topic == "runs":
            continue
        if makes_ready(turn):
            topic = "runs"
        elif topic is None and (turn.snapshot.status in TERMINAL or _may_be_awaited(turn)):
            topic = "changes"
    return None if topic is None else (topic, frozenset(ended) if ended else NOTHING)


def news_of_starts(runs: Iterable[NewRun]) -> News:
    """Return the news of created runs for which others can be waiting. A new run may have replaced one that ended."""
    return ("runs", None) if any(new.reuse is not None for new in runs) else READY


def may_wake_others(turn: Turn) -> bool:
    """Return whether a process other than the run's owner can be waiting for an effect of this turn."""
    return makes_ready(turn) or turn.snapshot.status in TERMINAL or _may_be_awaited(turn)


def makes_ready(turn: Turn) -> bool:
    """Return whether a turn creates work for other nodes, now or at a due time.

    If a signal arrives while the turn releases the run, the run is ready: its owner was notified of the signal, and
    claims the run.
    """
    if turn.messages or turn.starts or turn.sends or turn.jobs:
        return True
    return turn.release and turn.snapshot.waiting_until is not None


def _may_be_awaited(turn: Turn) -> bool:
    if turn.release or turn.streams:
        return True
    if turn.jobs_closed and not any(isinstance(event.data, StepCompleted) for event in turn.events):
        return True  # it may close a call with a limit on which a node is still working: its place is free
    for event in turn.events:  # noqa: SIM110 - a generator would take longer than the loop
        if event.data.IS_AWAITED or (turn.received and isinstance(event.data, DECISIONS)):
            return True
    return False
