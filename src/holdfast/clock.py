"""The sources of non-determinism: the clock, new ids, and random numbers.

Nothing else in Holdfast reads a clock or draws a random number, so that a simulator can control both. Stores take a
`Clock`. Everything above a store asks the store for the time, because only the store's time counts.
"""

import random
import secrets
import time
from random import Random as Random
from typing import Protocol


class Clock(Protocol):
    """Reads the time."""

    def now(self) -> int:
        """Return microseconds since 1970-01-01T00:00:00Z. The result never decreases."""
        ...


class Ids(Protocol):
    """Makes ids."""

    def new_id(self) -> str:
        """Return a new UUID that sorts as text by its time of creation, so that index inserts stay local."""
        ...


class Rng(Protocol):
    """Draws random numbers."""

    def fraction(self) -> float:
        """Return a number from 0 (included) to 1 (excluded)."""
        ...


class Secrets(Protocol):
    """Makes secrets that cannot be guessed."""

    def new_secret(self) -> str:
        """Return 256 random bits as 64 hex digits."""
        ...


class SystemClock:
    """The machine's wall clock. It stands still after the clock was set back."""

    def __init__(self) -> None:
        self._latest = 0

    def now(self) -> int:
        """Return the wall clock's instant, or the latest one returned if the clock has been set back."""
        self._latest = max(self._latest, time.time_ns() // 1_000)
        return self._latest


def elapsed_us() -> int:
    """Return microseconds since an arbitrary moment. It measures durations and is not a time of day."""
    return time.monotonic_ns() // 1_000


class SystemIds:
    """UUIDs of version 7: 48 bits of time, then random bits."""

    def new_id(self) -> str:
        """Return a new UUID of version 7."""
        milliseconds = time.time_ns() // 1_000_000
        value = (milliseconds << 80) | (random.getrandbits(80) & ~(0xF << 76) & ~(0x3 << 62))
        digits = f"{value | (0x7 << 76) | (0x2 << 62):032x}"
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


class SystemRng:
    """The interpreter's generator, seeded by the operating system."""

    def fraction(self) -> float:
        """Return a number from 0 (included) to 1 (excluded)."""
        return random.random()


class SystemSecrets:
    """The operating system's generator, which is suitable for secrets."""

    def new_secret(self) -> str:
        """Return 256 random bits as 64 hex digits."""
        return secrets.token_hex(32)


def seeded(seed: str) -> Random:
    """Return a generator that draws the same numbers for the same seed, on every machine."""
    return Random(seed)
