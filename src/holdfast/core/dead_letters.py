"""Dead letters: messages that could not be handled, kept with the reason until an operator has looked.

A message that cannot be handled is put aside and comes again: after a second, two, four, and so on, at most a minute,
unless the limits say otherwise.
A signal whose payload does not fit the wait for it becomes one at once.
What has been put aside too often becomes a dead letter, with the commit that would have put it aside once more. What
cannot even be read becomes one when the store comes across it. What a run had for another run, and that one refused,
becomes one of the run that sent it.
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
    """A message that nobody could handle. `envelope` is what was stored: its JSON, or whatever was there instead.

    `detail` is the text of an error and never holds a payload. A letter that was settled stays until its run goes.
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
    """The letter is settled in this way: by this call, or by an earlier one that asked for the same."""

    letter_id: str
    action: Settlement


def letter_id(run_id: str, *parts: object) -> str:
    """Return the id of a letter, which follows from what died and, for what can die again, when."""
    return event_id(sha256("|".join(map(str, (run_id, "letter", *parts))).encode()).hexdigest())


def unreadable_payload(name: str, signal_id: str) -> str:
    """Return the detail of the letter of a signal whose payload nobody can read. By it the signal is found."""
    return f"the payload of signal {name!r}, {signal_id!r} cannot be read"


def to_dead_letter(message: Message, reason: Reason, detail: str, node: str, now: Instant) -> DeadLetter:
    """Return the letter that a message becomes."""
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
    """Return the letter that a signal becomes which did not fit the wait for it."""
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
    """Return what is left of a message that could not be handled: itself, for later, or a dead letter."""
    if message.attempts >= limits.poison_retries:
        return to_dead_letter(message, reason, detail, node, now)
    policy = limits.dead_letters
    wait_ms = min(policy.first_ms << min(message.attempts, 62), policy.most_ms)
    return replace(message, due_at=now + wait_ms * 1_000, attempts=message.attempts + 1)
