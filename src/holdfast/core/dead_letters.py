"""Dead letters: messages that could not be handled, kept with the reason until an operator settles them.

* A message that cannot be handled is deferred: for one second, two, four, and so on, at most a minute, unless the
  limits say otherwise. When it has been deferred too often it becomes a dead letter, in the commit that would have
  deferred it once more.
* A signal whose payload does not fit its wait becomes a dead letter immediately.
* A message or signal that cannot be decoded becomes one when the store reads it.
* A message that another run refused becomes a dead letter of the sending run.
"""

from hashlib import sha256
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.instants import Instant
from holdfast.core.keys import event_id
from holdfast.core.messages import Message, Signal, dead_signal
from holdfast.limits import Limits

Reason = Literal[
    "undecodable", "definition missing", "history irreparable", "retries exhausted", "refused", "payload does not fit"
]
Settlement = Literal["requeue", "drop"]

DETAIL_CHARS = 500


class DeadLetter(Struct, frozen=True, kw_only=True, gc=False):
    """A message that could not be handled. `envelope` is what was stored: its JSON, or other bytes.

    `detail` is the text of an error and never holds a payload. A settled letter is kept until its run is deleted.
    """

    letter_id: str
    run_id: str
    envelope: bytes
    reason: Reason
    detail: str
    node: str
    died_at: Instant
    settled: Settlement | None = None
    settled_by: str = ""
    settled_at: Instant | None = None


class Settled(Struct, frozen=True, gc=False):
    """The letter is settled in this way: by this call, or by an earlier one with the same action."""

    letter_id: str
    action: Settlement


def letter_id(run_id: str, *parts: object) -> str:
    """Return the id of a letter. It is derived from the message and, if that can become a letter again, the time."""
    return event_id(sha256("|".join(map(str, (run_id, "letter", *parts))).encode()).hexdigest())


def unreadable_payload(name: str, signal_id: str) -> str:
    """Return the detail of the letter for a signal with an unreadable payload. The signal is found by this text."""
    return f"the payload of signal {name!r}, {signal_id!r} cannot be read"


def to_dead_letter(message: Message, reason: Reason, detail: str, node: str, now: Instant) -> DeadLetter:
    """Return a message as a dead letter."""
    return DeadLetter(
        letter_id=letter_id(message.run_id, message.signal_id, now),
        run_id=message.run_id,
        envelope=bytes(codec.encode(replace(message, attempts=0))),
        reason=reason,
        detail=detail[:DETAIL_CHARS],
        node=node,
        died_at=now,
    )


def signal_to_dead_letter(signal: Signal, node: str, now: Instant) -> DeadLetter:
    """Return a signal that did not fit its wait as a dead letter."""
    return DeadLetter(
        letter_id=letter_id(signal.run_id, signal.id),
        run_id=signal.run_id,
        envelope=bytes(codec.encode(dead_signal(signal, now))),
        reason="payload does not fit",
        detail=f"signal {signal.name!r}, {signal.signal_id!r}: {signal.misfit}"[:DETAIL_CHARS],
        node=node,
        died_at=now,
    )


def defer(
    message: Message, limits: Limits, reason: Reason, detail: str, node: str, now: Instant
) -> Message | DeadLetter:
    """Return a message that could not be handled, due later, or as a dead letter if it was deferred too often."""
    if message.attempts >= limits.poison_retries:
        return to_dead_letter(message, reason, detail, node, now)
    policy = limits.dead_letters
    wait_ms = min(policy.first_ms << min(message.attempts, 62), policy.most_ms)
    return replace(message, due_at=now + wait_ms * 1_000, attempts=message.attempts + 1)
