"""Limits on activities: how many calls may be under way, and how often they may begin, over all nodes.

A limit has a name. A call of a limited activity waits in a queue (`limited_queue`) with the limit's name and its key.
A node with capacity for the call acquires it there, in one transaction of the store that counts and decides.

**A place** is held by each attempt from when a node acquires it until its outcome is delivered, its step is closed, or
its node has been silent for the visibility time-out. So places need not be released, and none can leak. When the
time-out expires the attempt loses its place: its heartbeat is too late, whether or not another attempt has the place.

**Room.** A call has room while fewer than `at_once` places of the limit are held, fewer than `per_key` of them by its
tenant and key, fewer than `calls` attempts have begun within the last `period_ms`, and fewer than `key_calls` of its
tenant and key within the last `key_period_ms`. Each attempt counts as begun when it is acquired, even if it is
returned or its node is lost: whatever crashes, no window of one period holds more.

**Order.** The calls of one tenant and key form a *line*, and the one that has been due longest is first. Tenants take
turns, and so do the keys of each tenant, round robin in the order of their names by code points. A line without room
is skipped. So no call waits behind a thousand calls of another tenant or key.

**Numbers** are not stored. The caller passes the numbers that its code has now; a limit that it does not name has
none. A call keeps the name and key with which it was scheduled.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from holdfast.core.instants import Instant
from holdfast.errors import InvalidInput
from holdfast.limits import DURATION_MS

Id = TypeVar("Id")

LIMITED = "limited:"
"""The prefix of queues in which calls wait for a place. The rest of the name is the queue of the activity."""


class CallLimit(Struct, frozen=True, kw_only=True):
    """The numbers of a limit: attempts under way, and attempts that begin within any period, in total and per key."""

    at_once: int | None = None
    per_key: int | None = None
    calls: int | None = None
    period_ms: int = 1_000
    key_calls: int | None = None
    key_period_ms: int = 1_000


UNLIMITED = CallLimit()


class LimitedBy(Struct, frozen=True, omit_defaults=True):
    """The limit of a call: the limit's name and the call's key. It is stored with the options of the step."""

    name: str
    key: str = ""


class _Options(Struct, frozen=True):
    limit: LimitedBy | None = None


_options = msgspec.json.Decoder(_Options)


def limited_by(queue: str, options: Raw) -> LimitedBy | None:
    """Return the limit of a call in this queue with these options, or None if it does not wait for a place."""
    return _options.decode(options).limit if is_limited(queue) else None


class Line(Struct, Generic[Id], frozen=True, kw_only=True):
    """The calls of one tenant and key that are due. `first` is the one that has been due longest."""

    tenant: str
    key: str
    first: Id
    inside: int = 0
    nth_last_begin: Instant | None = None
    """The begin of the attempt of this tenant and key that must be a period ago before another one may begin."""


class LimitState(Struct, frozen=True, kw_only=True):
    """What a store knows about a limit besides its lines."""

    inside: int = 0
    nth_last_begin: Instant | None = None
    """The begin of the attempt that must be a period ago before another one may begin."""


class CallDecision(Struct, Generic[Id], frozen=True):
    """The line whose first call gets a place now, or None. `free_at`: when the rates allow one, if calls wait."""

    line: Line[Id] | None
    free_at: Instant | None = None


def limited_queue(queue: str) -> str:
    """Return the queue in which calls for this queue wait for a place. Empty: calls for the nodes that execute runs."""
    return LIMITED + queue


def is_limited(queue: str) -> bool:
    """Return whether calls wait for a place in this queue."""
    return queue.startswith(LIMITED)


def shown_queue(queue: str) -> str:
    """Return the queue as its author named it, without the prefix of limited queues."""
    return queue.removeprefix(LIMITED)


def in_turn(lines: Iterable[Line[Id]], last_tenant: str, last_keys: Mapping[str, str]) -> list[Line[Id]]:
    """Return the lines in round-robin order. `last_keys` are the keys that were served last, by tenant."""

    def turn(line: Line[Id]) -> tuple[bool, str, bool, str]:
        last_key = last_keys.get(line.tenant)
        return line.tenant <= last_tenant, line.tenant, last_key is not None and line.key <= last_key, line.key

    return sorted(lines, key=turn)


def decide_call(limit: CallLimit, state: LimitState, lines: Iterable[Line[Id]], now: Instant) -> CallDecision[Id]:
    """Decide which call gets a place. All stores follow this rule; the header of this file states it in words.

    `lines` are in the order of their turns. Only as many of them are read as needed.
    """
    if limit.at_once is not None and state.inside >= limit.at_once:
        return CallDecision(None)
    free_at = _free_at(state.nth_last_begin, limit.period_ms) if limit.calls is not None else 0
    earliest: Instant | None = None
    for line in lines:
        if limit.per_key is not None and line.inside >= limit.per_key:
            continue
        of_key = _free_at(line.nth_last_begin, limit.key_period_ms) if limit.key_calls is not None else 0
        line_free_at = max(free_at, of_key)
        if line_free_at <= now:
            return CallDecision(line)
        earliest = line_free_at if earliest is None else min(earliest, line_free_at)
        if earliest == free_at:  # no line can be free earlier
            break
    return CallDecision(None, earliest)


def _free_at(nth_last: Instant | None, period_ms: int) -> Instant:
    return 0 if nth_last is None else nth_last + period_ms * 1_000


def check_call_limit(limit: Any) -> InvalidInput | None:
    """Return why these cannot be the numbers of a limit, or None."""
    if not isinstance(limit, CallLimit):
        return InvalidInput(f"a limit is a CallLimit, not {type(limit).__qualname__}")
    for field in ("at_once", "per_key", "calls", "key_calls"):
        value = getattr(limit, field)
        if value is not None and (type(value) is not int or not 1 <= value < 2**31):
            return InvalidInput(f"{field} is a whole number from 1, not {value!r}", field=field)
    for field in ("period_ms", "key_period_ms"):
        value = getattr(limit, field)
        if type(value) is not int or not 1 <= value <= DURATION_MS:
            return InvalidInput(f"a period is from 1 ms to a thousand years, not {value!r}", field=field)
    return None
