"""Signals that any S3 client puts into the bucket: `workflow/{id}/signals/{name}/{timestamp}_{uuid}.json`.

Such an object, `{"id", "name", "payload", "created_at"}`, is a signal as soon as it exists. A node accepts it into its
run: at that point it gets its position in the run's order, and it stays in the bucket until the run is deleted. The
timestamp is the store's time in a fixed width. A signal whose suffix is not above the cursor of its name was written
too late: later ones have been consumed already. It is reported, and becomes a dead letter of its run. So does an object
that is not a signal.

Signals that are sent through the API are accepted directly into the head, by one conditional write, and have no object.
"""

import logging
import re
from collections.abc import Mapping
from urllib.parse import unquote

import msgspec
from msgspec import Raw, Struct

from holdfast.core import codec
from holdfast.core.dead_letters import DETAIL_CHARS, DeadLetter, Reason, letter_id
from holdfast.core.events import NULL
from holdfast.core.instants import Instant
from holdfast.core.keys import storage_key
from holdfast.core.messages import SignalRequest
from holdfast.limits import Limits
from holdfast.store import decisions, port, validation
from holdfast.store.s3.bucket import Bucket, for_each
from holdfast.store.s3.head import StoredRun
from holdfast.store.s3.heads import Heads
from holdfast.store.s3.mirror import Mirror

WORKFLOW = "workflow"
ENVELOPE_BYTES = 4_096
"""How many bytes an object has besides the payload, at most."""

_SUFFIX = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z_[A-Za-z0-9-]{1,100}")

logger = logging.getLogger("holdfast.signals")


class SignalObject(Struct, frozen=True):
    """The content of a signal's object."""

    id: str
    name: str
    payload: Raw = NULL
    created_at: str = ""


class SignalObjects:
    """The signals in the bucket, and which of them are known to be accepted."""

    def __init__(self, bucket: Bucket, mirror: Mirror, heads: Heads, limits: Limits) -> None:
        self._bucket = bucket
        self._mirror = mirror
        self._heads = heads
        self._limits = decisions.without_rate(limits)
        self._done: set[str] = set()

    async def keys_of(self, run_id: str) -> list[str]:
        """Return the keys of a run's signals in the bucket."""
        return [each.key for each in await self._bucket.list(storage_key(WORKFLOW, run_id))]

    async def collect(self, now: Instant) -> bool:
        """Accept all new signals in the bucket; return whether there were any.

        Those of unknown runs wait, and cost nothing.
        """
        listed = {each.key: each.size for each in await self._bucket.list(WORKFLOW)}
        self._done &= listed.keys()
        by_run: dict[str, list[str]] = {}
        for key in sorted(listed.keys() - self._done):
            run_id = _run_of(key)
            if run_id is None:
                logger.warning("the object %s is ignored: its key is not that of a signal", key)
                self._done.add(key)
            elif run_id in self._mirror.summaries and run_id not in self._mirror.unreadable:
                by_run.setdefault(run_id, []).append(key)
        taken = await for_each(lambda each: self._accept(*each, listed, now), by_run.items())
        return any(taken)

    async def _accept(self, run_id: str, keys: list[str], sizes: Mapping[str, int], now: Instant) -> bool:
        """Accept the signals of a run that it does not have yet; return whether there were any."""
        held = self._mirror.held(run_id)
        new = [key for key in keys if held is None or not _is_known(held.run, key)]
        self._done |= set(keys) - set(new)
        objects = dict(zip(new, await for_each(lambda key: self._read(key, sizes[key]), new), strict=True))

        def decide(run: StoredRun) -> list[DeadLetter]:
            return [letter for key, data in objects.items() if (letter := self._take(run, key, data, now)) is not None]

        letters = await self._heads.change_readable(run_id, decide) if new else None
        if letters is None:  # there are none, or the run may still be created: its signals are checked again
            return False
        self._done |= set(objects)
        for letter in letters:
            logger.warning("run %s: a signal in the bucket was not accepted: %s", run_id, letter.detail)
        return True

    async def _read(self, key: str, size: int) -> bytes:
        """Return the content of an object; empty if it is gone or larger than a signal can be."""
        found = await self._bucket.get(key) if size <= self._limits.signal_payload_bytes + ENVELOPE_BYTES else None
        return b"" if found is None else found.data

    def _take(self, run: StoredRun, key: str, data: bytes, now: Instant) -> DeadLetter | None:
        """Accept a signal into its run, once; return the dead letter if it cannot be accepted."""
        if _is_known(run, key):
            return None
        name, suffix = _names_in(key)
        problem = self._problem(run, name, suffix, data)
        if problem is None:
            content = msgspec.json.decode(data, type=SignalObject)
            signal_id = suffix.rpartition("_")[2]
            request = SignalRequest(run_id=run.head.run_id, name=name, payload=content.payload, signal_id=signal_id)
            answer = run.deliver_signal(request, self._limits, now)
            if not isinstance(answer, port.Refused):
                return None
            reason, detail = _refused(f"{answer.error.code}: {answer.error.message}")
        else:
            reason, detail = problem
        letter = DeadLetter(
            letter_id=_letter_id(run, key),
            run_id=run.head.run_id,
            envelope=data,
            reason=reason,
            detail=f"signal {key}: {detail}"[:DETAIL_CHARS],
            node="store",
            died_at=now,
        )
        run.letters[letter.letter_id] = letter
        return letter

    def _problem(self, run: StoredRun, name: str, suffix: str, data: bytes) -> tuple[Reason, str] | None:
        """Return why an object is not a signal that can be accepted now, or None."""
        if not _SUFFIX.fullmatch(suffix):
            return "undecodable", "its key does not end in a timestamp of fixed width, _, and an id"
        if not data:
            return "undecodable", "it is empty, or larger than a signal can be"
        try:
            content = msgspec.json.decode(data, type=SignalObject)
            value = msgspec.json.decode(content.payload)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
            return "undecodable", f"it is no signal: {problem}"
        if isinstance(value, dict) and codec.SEAL in value:  # however it is written
            return "undecodable", "its payload would be taken for a sealed one"
        request = SignalRequest(run_id=run.head.run_id, name=name, payload=content.payload, signal_id="object")
        unfit = validation.check_item(request, self._limits)
        if unfit is not None:
            return "undecodable", unfit.message
        if content.name != name:
            return "undecodable", "its name is not that of its key"
        cursor = "" if run.head.snapshot is None else run.head.snapshot.signals.get(name, "")
        if suffix <= cursor:
            return _refused(f"it lies behind the cursor {cursor}: later ones were consumed before it was written")
        return None


def _run_of(key: str) -> str | None:
    """Return the run of a signal from its key; None if the key is not that of a signal."""
    parts = key.split("/")
    return unquote(parts[1]) if len(parts) == 5 and parts[2] == "signals" and parts[4].endswith(".json") else None


def _names_in(key: str) -> tuple[str, str]:
    """Return the name and the suffix of a signal from its key."""
    _, _, _, name, file = key.split("/")
    return unquote(name), file.removesuffix(".json")


def _letter_id(run: StoredRun, key: str) -> str:
    return letter_id(run.head.run_id, "object", key)


def _is_known(run: StoredRun, key: str) -> bool:
    """Return whether a run has accepted or dead-lettered a signal."""
    name, suffix = _names_in(key)
    mine = (name, suffix.rpartition("_")[2])
    if mine in run.acceptances or _letter_id(run, key) in run.letters:
        return True
    return any((signal.name, signal.signal_id) == mine for signal in run.signals)


def _refused(detail: str) -> tuple[Reason, str]:
    return "refused", detail
