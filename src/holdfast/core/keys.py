"""Keys that make a retry harmless: of events, of start requests, and of records in any store; and tokens of activities.

**The separator.** The contract fixes two keys as the SHA256 of parts joined by ``|``. Joining is ambiguous if any
part may hold a ``|``, so exactly one part of each key may: the step id of an event, and the request id of a start.
Every other part is refused with `InvalidInput` if it holds one. The free part can then always be told from the others
(count the parts before and after it from both ends), so two different tuples never share a key, and the key is
still exactly the SHA256 of the plain join.

**Event ids** are derived from the event's key (a UUID of version 8), not drawn: the same event has the same id on
every retry, on every node and in every replay, and a consumer of the event bus can drop duplicates by it.

**Activity tokens** report the outcome of an activity from outside, after the activity itself has ended. A token is text
for URLs and e-mails. It names the run, the step and the attempt, which anyone may read, and carries an authentication
code made with a key of the store: a token cannot be made or changed without that key, so its bearer got it from the
activity. It is a secret. It gives the right to report one outcome of one attempt, and nothing else.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from hmac import compare_digest
from hmac import digest as hmac_digest
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from holdfast.core import codec
from holdfast.core.instants import format_instant
from holdfast.errors import InvalidInput

SEPARATOR = "|"
ANY_VERSION = ""
"""The version in the key of a start request that names none: the key is the same whichever version starts."""
_PLAIN = re.compile("[A-Za-z0-9_-]+")

# The digit that marks a UUID's variant keeps two bits of the digit that it replaces.
_VARIANT = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))


def event_key(run_id: str, step_id: str, logical_attempt_id: int, event_type: str, plan_version: str) -> str:
    """Return the idempotency key of an event: 64 hex digits.

    Events of the run itself have no step: the id of the signal that caused them, or the count of events of their
    type, takes the place of the step id, and their logical attempt is 0.
    """
    if SEPARATOR in run_id or SEPARATOR in plan_version or SEPARATOR in event_type:
        _refuse_separator(run_id=run_id, event_type=event_type, plan_version=plan_version)
    text = f"{run_id}|{step_id}|{logical_attempt_id}|{event_type}|{plan_version}"
    try:
        return sha256(text.encode()).hexdigest()
    except UnicodeEncodeError as problem:
        raise _not_unicode(text) from problem


def event_id(key: str) -> str:
    """Return the event id that belongs to an event's idempotency key: a UUID of version 8."""
    return f"{key[:8]}-{key[8:12]}-8{key[13:16]}-{_VARIANT[key[16]]}{key[17:20]}-{key[20:32]}"


def request_key(
    tenant: str, project: str, environment: str, plan_id: str, plan_version: str, run_request_id: str
) -> str:
    """Return the key under which a start request is recognised: 64 hex digits."""
    _refuse_separator(
        tenant=tenant, project=project, environment=environment, plan_id=plan_id, plan_version=plan_version
    )
    parts = (tenant, project, environment, plan_id, plan_version, run_request_id)
    try:
        return sha256(SEPARATOR.join(parts).encode()).hexdigest()
    except UnicodeEncodeError as problem:
        raise _not_unicode(run_request_id) from problem


def storage_key(*parts: str) -> str:
    """Join parts into a path that no other parts can produce, for any characters.

    Each part is percent-encoded byte by byte and never normalised. An empty part becomes a lone ``%``, which no
    encoded part can be; ``.`` and ``..`` are encoded too, because some stores resolve them.
    """
    return "/".join(_component(part) for part in parts)


def activity_record_key(run_id: str, activity_name: str, step_id: str, idempotency_key: str) -> str:
    """Return the storage key of an activity's reconciliation record."""
    return storage_key("workflow", run_id, "activities", activity_name, step_id, idempotency_key)


def signal_suffix(accepted_at: int, signal_uuid: str) -> str:
    """Return the last part of a signal's key, which is also the cursor: it sorts by time of acceptance."""
    return f"{format_instant(accepted_at)}_{signal_uuid}"


def signal_storage_key(run_id: str, name: str, suffix: str) -> str:
    """Return `workflow/{id}/signals/{name}/{timestamp}_{uuid}.json`."""
    return f"{storage_key('workflow', run_id, 'signals', name)}/{suffix}.json"


def signal_uuid(signal_storage_key: str) -> str:
    """Return the store's id of the signal that is kept under this key."""
    return signal_storage_key.rpartition("_")[2].removesuffix(".json")


def sent_signal_id(run_id: str, step_id: str, plan_version: str) -> str:
    """Return the id of the signal that a step of a run sends: no other step has it, and it is the same on a retry."""
    return event_id(event_key(run_id, step_id, 1, "SignalSent", plan_version))


def inbox_uuid(run_id: str, inbox_seq: int) -> str:
    """Return the UUID of the item with this number in a run's inbox."""
    return event_id(sha256(f"{run_id}|inbox|{inbox_seq}".encode()).hexdigest())


def _component(part: str) -> str:
    if _PLAIN.fullmatch(part):
        return part
    if part == "":
        return "%"
    if part in (".", ".."):
        return part.replace(".", "%2E")
    try:
        return quote(part, safe="", errors="strict")
    except UnicodeEncodeError as problem:
        raise _not_unicode(part) from problem


def _not_unicode(text: str) -> InvalidInput:
    return InvalidInput(f"a part of a key is not valid Unicode: {text!r}")


def _refuse_separator(**parts: str) -> None:
    for field, value in parts.items():
        if SEPARATOR in value:
            raise InvalidInput(f"{field} may not contain {SEPARATOR!r}: {value!r}", field=field)


# --- activity tokens

COMPLETION_KEY = "completion"
"""The name of the store's key for these tokens."""

ACTIVITY_TOKEN_CHARS = 2_000
"""No token is longer: its parts are bounded names."""

_TAG_BYTES = 24


class ActivityToken(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which attempt of which step of which run."""

    run_id: str
    step_id: str
    logical_attempt_id: int
    engine_attempt_id: int


def write_activity_token(token: ActivityToken, key: str) -> str:
    """Return the token as text, authenticated with the store's key."""
    body = _text(bytes(codec.encode(token)))
    return f"{body}.{_tag(body, key)}"


def read_activity_token(text: Any, key: str) -> ActivityToken:
    """Return the token that the text holds; raise `InvalidInput` if it was not made with this key."""
    refusal = InvalidInput("this is not the token of an activity", field="token")
    if not isinstance(text, str) or not text.isascii() or len(text) > ACTIVITY_TOKEN_CHARS:
        raise refusal
    body, _, tag = text.rpartition(".")
    if not compare_digest(tag, _tag(body, key)):
        raise refusal
    try:
        return codec.decode(urlsafe_b64decode(body + "=" * (-len(body) % 4)), ActivityToken)
    except (ValueError, InvalidInput) as problem:
        raise refusal from problem


def outcome_id(token: ActivityToken) -> str:
    """Return the id of the signal that carries the outcome of this attempt: an attempt has one."""
    name = f"{token.step_id}|{token.logical_attempt_id}|{token.engine_attempt_id}"
    return sha256(name.encode()).hexdigest()


def _tag(body: str, key: str) -> str:
    return _text(hmac_digest(bytes.fromhex(key), f"{COMPLETION_KEY}:{body}".encode(), "sha256")[:_TAG_BYTES])


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")
