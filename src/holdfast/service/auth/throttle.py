"""Refusals: logged, and counted, so that nobody fills logs or histories by asking for what they may not.

Who has been refused too much within a minute is told to come back later with commands, signals, updates and operations
on tasks, before a run hears of it. Lines of the log are bounded for each caller; how many were left out is logged.
"""

import asyncio
import logging

from starlette.types import Scope

from holdfast.errors import HoldfastError, RateLimited

logger = logging.getLogger("holdfast.service.auth.tokens")

MINUTE_S = 60.0
LINES_PER_MINUTE = 60
"""How many refusals of one caller are logged in a minute. What others do leaves no line of theirs out."""

ALL_LINES_PER_MINUTE = 6_000
"""How many are logged of all callers, so that many addresses cannot fill a disk."""

KEYS = 10_000
"""Of how many callers it is remembered how often they were counted within the minute."""

COUNTED = frozenset({"runs:control", "tasks:write", "signals:write"})
UPDATE = "runs.update"
"""Scopes of operations whose refusals the engine records, and the one operation of another scope."""


class Meter:
    """Counts by key, in windows of a minute."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, int]] = {}

    def count(self, key: str, by: int = 1) -> int:
        """Count one more, or so many, and return how many there were in the window."""
        now = asyncio.get_running_loop().time()
        if len(self._counts) >= KEYS:
            self._counts = {key: count for key, count in self._counts.items() if now - count[0] < MINUTE_S}
        since, so_far = self._counts.get(key, (now, 0))
        if now - since >= MINUTE_S:
            since, so_far = now, 0
        self._counts[key] = since, so_far + by
        return so_far + by

    def left_ms(self, key: str, most: int) -> int:
        """Return how long somebody has to wait who has been counted this often, or 0."""
        since, count = self._counts.get(key, (0.0, 0))
        if count < most:
            return 0
        return max(0, int((since + MINUTE_S - asyncio.get_running_loop().time()) * 1_000))


class RefusalLog:
    """What was refused in this process."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._refused = Meter()
        self._lines = Meter()
        self.failed_sign_ins = Meter()
        """How many sign-ins have failed, by address."""
        self._left_out: dict[str, int] = {}

    def check(self, key: str) -> None:
        """Raise `RateLimited` if this caller has been refused too often to be heard."""
        left_ms = self._refused.left_ms(key, self._per_minute)
        if left_ms:
            raise RateLimited("you have been refused too often; come back later", retry_after_ms=left_ms)

    def count(self, key: str) -> None:
        """Count that somebody may not do what they have asked a run for."""
        self._refused.count(key)

    def note(self, key: str, who: str, what: str, refusal: HoldfastError, correlation_id: str) -> None:
        """Log that somebody may not do this."""
        self.log(f"{who} ({key})" if key != who else who, what, refusal.message, correlation_id, key)

    def log(self, who: str, what: str, why: str, correlation_id: str, key: str) -> None:
        """Log who was refused what, and why; or count it, if this caller has been refused too often in the minute.

        `key` tells callers apart: the id of a token that is valid, or else the address that somebody calls from.
        """
        is_over = self._lines.count(key) > LINES_PER_MINUTE or self._lines.count("") > ALL_LINES_PER_MINUTE
        if is_over:
            if key in self._left_out or len(self._left_out) < KEYS:
                self._left_out[key] = self._left_out.get(key, 0) + 1
            return
        left_out = self._left_out.pop(key, 0)
        if left_out:
            logger.warning("%d more refusals of %r were not logged", left_out, key)
        logger.warning("refused: who=%r what=%r why=%r correlation_id=%s", who, what, why, correlation_id)


def client_of(scope: Scope) -> str:
    """Return the address that a request comes from."""
    return str((scope.get("client") or ("?",))[0])
