"""Tokens with which the outcome of an activity is reported from outside, after the activity itself has ended.

A token is text for URLs and e-mails. It names the run, the step and the attempt, which anybody may read, and carries
an authentication code made with a key of the store: a token cannot be made or changed without the key, so its bearer
got it from the activity. It is a secret, and gives the right to report one outcome of one attempt, and nothing else.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from hmac import compare_digest
from hmac import digest as hmac_digest
from typing import Any

from msgspec import Struct

from holdfast.core import codec
from holdfast.errors import InvalidInput

COMPLETION_KEY = "completion"
"""The name of the store's key for these tokens."""

TOKEN_CHARS = 2_000
"""No token is longer: its parts are bounded names."""

_TAG_BYTES = 24


class ActivityToken(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which attempt of which step of which run."""

    run_id: str
    step_id: str
    logical_attempt_id: int
    engine_attempt_id: int


def write_token(token: ActivityToken, key: str) -> str:
    """Return the token as text, authenticated with the store's key."""
    body = _text(bytes(codec.encode(token)))
    return f"{body}.{_tag(body, key)}"


def read_token(text: Any, key: str) -> ActivityToken:
    """Return what the text names; raise `InvalidInput` if it is no token that was made with this key."""
    refusal = InvalidInput("this is not the token of an activity", field="token")
    if not isinstance(text, str) or not text.isascii() or len(text) > TOKEN_CHARS:
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
