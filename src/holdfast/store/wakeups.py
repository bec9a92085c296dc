"""Wake-ups: hints that some run may have become ready.

A node that has nothing to do waits here until the next due instant, or until somebody rings. Losing a wake-up costs
latency, never correctness; a false one costs a look.
"""

import asyncio
from typing import Protocol


class Listener(Protocol):
    """One who waits for the bell."""

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for the bell; return False if the time ran out first. A ring since the last wait is not lost."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class Wakeups(Protocol):
    """The bell of one store."""

    def notify(self) -> None:
        """Wake everybody who listens, here and in other processes. Never blocks, never raises."""
        ...

    def listen(self) -> Listener:
        """Begin to listen."""
        ...

    def close(self) -> None:
        """Give back every resource; those who still wait are woken."""
        ...


class LocalListener:
    """One who waits for a bell in the same event loop."""

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
        self._wakeups.listeners.discard(self)


class LocalWakeups:
    """Wake-ups within one event loop."""

    def __init__(self) -> None:
        self.listeners: set[LocalListener] = set()

    def notify(self) -> None:
        for listener in self.listeners:
            listener.notified.set()

    def listen(self) -> LocalListener:
        listener = LocalListener(self)
        self.listeners.add(listener)
        return listener

    def close(self) -> None:
        self.notify()
        self.listeners.clear()
