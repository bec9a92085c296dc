"""Wake-ups: hints that some run may have become ready.

An idle node waits here until the next due instant, or until it is notified. Losing a wake-up costs latency, never
correctness; a spurious one costs one query.
"""

import asyncio
from typing import Protocol


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

    def notify(self) -> None:
        """Wake every listener, here and in other processes. Never blocks, never raises."""
        ...

    def listen(self) -> Listener:
        """Begin to listen."""
        ...

    def close(self) -> None:
        """Release every resource, and wake the listeners that still wait."""
        ...


class LocalListener:
    """Waits for notifications in the same event loop."""

    def __init__(self, wakeups: "LocalWakeups") -> None:
        self._wakeups = wakeups
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

    def notify(self) -> None:
        for listener in self.listeners:
            listener.notified.set()

    def listen(self) -> LocalListener:
        listener = LocalListener(self)
        self.listeners[listener] = None
        return listener

    def close(self) -> None:
        self.notify()
        self.listeners.clear()
