"""Tokens with which the outcome of an activity is reported from outside, after the activity itself has ended.

A token is text for URLs and e-mails: it names the run, the step and the attempt, and nothing else. It is not a
secret and not signed; who may report an outcome is for the caller of `App.complete_activity` to decide.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode

from msgspec import Struct

from holdfast.core import codec
from holdfast.errors import InvalidInput


class ActivityToken(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which attempt of which step of which run."""

    run_id: str
    step_id: str
    logical_attempt_id: int
    engine_attempt_id: int


def write_token(token: ActivityToken) -> str:
    """Return the token as text."""
    return urlsafe_b64encode(bytes(codec.encode(token))).decode().rstrip("=")


def read_token(text: str) -> ActivityToken:
    """Return what the text names; raise `InvalidInput` if it is no token."""
    try:
        padded = text + "=" * (-len(text) % 4)
        token = codec.decode(urlsafe_b64decode(padded.encode("ascii")), ActivityToken)
    except (AttributeError, TypeError, ValueError, InvalidInput) as problem:
        raise InvalidInput("this is not the token of an activity", field="token") from problem
    if write_token(token) != text:
        raise InvalidInput("this is not the token of an activity", field="token")
    return token
