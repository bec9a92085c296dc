"""Names, with the checks that all layers share, and the keys made from them, which make retries harmless.

**Names** are compared byte by byte and never normalised. `check_name` applies to every stored name and id,
`check_step_name` to names from which the engine makes step ids, and `check_signal_name` to signals that people send.

**Keys** identify events, start requests and records in any store; tokens identify attempts of activities. **Tags** name
the runs that a run descends from.

**The separator.** The contract fixes two keys as the SHA256 of parts joined by ``|``. Joining is ambiguous if any
part may hold a ``|``, so exactly one part of each key may: the step id of an event, and the request id of a start.
Every other part is refused with `InvalidInput` if it contains one. The free part can then always be distinguished from
the others (count the parts before and after it from both ends), so two different tuples never share a key, and the
key is still exactly the SHA256 of the plain join.

**Event ids** are derived from the event's key (a UUID of version 8), not drawn: the same event has the same id on
every retry, on every node and in every replay, and a consumer of the event bus can drop duplicates by it.

**Activity tokens** report the outcome of an activity from outside, after the activity itself has ended. A token is text
for URLs and e-mails. It names the run, the step and the attempt, which anyone may read, and carries an authentication
code made with a key of the store. Without that key a token cannot be made or changed, so its bearer got it from the
activity. A token is a secret. It grants the right to report one outcome of one attempt, and nothing else.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from hmac import digest as hmac_digest
from operator import itemgetter
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from holdfast.core import codec
from holdfast.core.codec import digest, format_instant
from holdfast.core.plans import is_plan
from holdfast.errors import CallerError, InvalidInput
from holdfast.limits import (
    ACTIVITY_NAME_BYTES,
    ERROR_TEXT_CHARS,
    IDEMPOTENCY_KEY_BYTES,
    NAME_BYTES,
    SIGNAL_ID_BYTES,
)

ATTEMPT_MARK = "~"
"""Separates the step id from the attempt in the token of an attempt."""

RESERVED_PREFIX = "holdfast."
"""The prefix of the engine's own signals. They do not count against a run's rate limit."""

LOCK_PREFIX = "lock:"
"""The prefix of the workflow names of locks. No other workflow has such a name."""

CALLBACK = "holdfast.callback"
"""The activity that ends immediately without an outcome and is completed by a callback."""

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_LIKE_A_STEP_ID = re.compile(r"#[0-9]+$|^[0-9]+(?:/|$)|^(?:update|patched|cut):|:(?:taken|skipped)$|!reconcile")
"""Step ids that the engine makes: the second `act`, `act` after a rotation, updates, markers, the engine's tasks."""


def check_name(field: str, value: Any) -> InvalidInput | None:
    """Return why `value` cannot be a name or an id, or None. Names are never normalised."""
    if type(value) is str and value.isascii() and value.isprintable() and 0 < len(value) <= NAME_BYTES:
        return None  # fast path for the usual name
    if not isinstance(value, str) or value == "":
        return InvalidInput(f"{field} must be a string that is not empty, not {value!r}", field=field)
    problem = _check_text(field, value, NAME_BYTES)
    if problem is not None:
        return problem
    if _CONTROL_CHARACTER.search(value):
        return InvalidInput(f"{field} may not contain control characters: {value!r}", field=field)
    return None


def check_step_name(field: str, name: Any) -> CallerError | None:
    """Return why `name` cannot be a name that step ids are made from, or None.

    This rule applies to names of activities, workflows, tasks, signals, queries, updates, patches and queues. The
    engine makes step ids from them (`act#2`, `1/act`), so no name may look like one, and names leave room for that.
    """
    problem = check_name(field, name)
    if problem is not None:
        return problem
    if _LIKE_A_STEP_ID.search(name):
        return InvalidInput(
            f"{field} {name!r} looks like a step id of the engine's own: it may not end in # and a number, :taken or "
            ":skipped, nor be a number, nor begin with a number and /, update:, patched: or cut:, nor contain "
            "!reconcile",
            field=field,
        )
    size = len(name.encode())
    if size > ACTIVITY_NAME_BYTES:
        return InvalidInput(f"{field} has {size} UTF-8 bytes; the most is {ACTIVITY_NAME_BYTES}", field=field)
    return None


def require_step_name(field: str, name: Any) -> None:
    """Raise `InvalidInput` if `check_step_name` finds a problem."""
    problem = check_step_name(field, name)
    if problem is not None:
        raise problem


def is_lock(workflow: str) -> bool:
    """Return whether a workflow belongs to a lock: its runs hold the lock for their parents."""
    return workflow.startswith(LOCK_PREFIX)


def require_workflow_name(field: str, name: Any) -> None:
    """Raise `InvalidInput` if a user's workflow cannot have this name. Names of locks and plans are reserved."""
    require_step_name(field, name)
    if is_lock(name) or is_plan(name):
        kind, way = ("a lock", "app.lock") if is_lock(name) else ("a plan", "a PlanRef")
        raise InvalidInput(f"{field} {name!r} is that of {kind}, which is made by {way}", field=field)
    _refuse_separator(**{field: name})


def workflow_of_lock(name: Any) -> str:
    """Return the workflow of a lock; raise `InvalidInput` if the lock cannot have this name."""
    require_step_name("a lock's name", name)
    workflow = f"{LOCK_PREFIX}{name}"
    require_step_name("a lock's name", workflow)
    _refuse_separator(name=name)
    return workflow


def check_signal_name(name: Any) -> None:
    """Raise `InvalidInput` if this cannot be the name of a signal that people send and wait for."""
    if type(name) is str:
        _check_known_signal_name(name)
    else:
        _check_known_signal_name.__wrapped__(name)


@lru_cache(maxsize=1_024)
def _check_known_signal_name(name: Any) -> None:
    """Check the name of a signal, with a cache: there are few different names and many signals."""
    require_step_name("signal name", name)
    if name.startswith(RESERVED_PREFIX):
        raise InvalidInput(
            f"signal {name!r}: names that begin with {RESERVED_PREFIX!r} are the engine's own", field="signal_name"
        )


def check_signal_id(value: Any, field: str = "signal_id") -> InvalidInput | None:
    """Return why `value` cannot be a signal id, or None: 1 to 128 UTF-8 bytes, case-sensitive, never normalised."""
    if not isinstance(value, str) or value == "":
        return InvalidInput(f"{field} must be a string that is not empty, not {value!r}", field=field)
    return _check_text(field, value, SIGNAL_ID_BYTES)


def check_idempotency_key(value: Any) -> InvalidInput | None:
    """Return why `value` cannot be the idempotency key of an activity call, or None. Keys are never normalised."""
    if not isinstance(value, str) or value == "":
        problem = f"idempotency_key must be a string that is not empty, not {value!r}"
        return InvalidInput(problem[:ERROR_TEXT_CHARS], field="idempotency_key")
    return _check_text("idempotency_key", value, IDEMPOTENCY_KEY_BYTES)


def fitting_id(id: str, most: int) -> str:
    """Return the id if it fits, else its digest."""
    return id if len(id.encode()) <= most else digest(id.encode())


def check_unicode(field: str, value: str) -> InvalidInput | None:
    """Return why a text cannot be stored as UTF-8, or None."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return InvalidInput(f"{field} is not valid Unicode: {value!r}", field=field)
    return None


def _check_text(field: str, value: str, most_bytes: int) -> InvalidInput | None:
    problem = check_unicode(field, value)
    if problem is not None:
        return problem
    size = len(value.encode())
    if size > most_bytes:
        return InvalidInput(f"{field} has {size} UTF-8 bytes; the most is {most_bytes}", field=field)
    if "\x00" in value:
        return InvalidInput(f"{field} may not contain a NUL character", field=field)
    return None


SEPARATOR = "|"
ANY_VERSION = ""
"""The version in the key of a start request that names none: the key does not depend on the version that starts."""
_PLAIN = re.compile("[A-Za-z0-9_-]+")

# The digit that marks a UUID's variant keeps two bits of the digit that it replaces.
_UUID_PARTS = itemgetter(slice(8), slice(8, 12), slice(13, 16), 16, slice(17, 20), slice(20, 32))
_VARIANT = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))


def event_key(run_id: str, step_id: str, logical_attempt_id: int, event_type: str, plan_version: str) -> str:
    """Return the idempotency key of an event: 64 hex digits.

    Events of the run itself have no step: the id of the signal that caused them, or the count of events of their
    type, replaces the step id, and their logical attempt is 0.
    """
    if SEPARATOR in run_id or SEPARATOR in plan_version or SEPARATOR in event_type:
        _refuse_separator(run_id=run_id, event_type=event_type, plan_version=plan_version)
    text = f"{run_id}|{step_id}|{logical_attempt_id}|{event_type}|{plan_version}"
    try:
        return sha256(text.encode()).hexdigest()
    except UnicodeEncodeError as problem:
        raise _not_unicode(text) from problem


def event_key_and_id(
    run_id: str, step_id: str, logical_attempt_id: int, event_type: str, plan_version: str
) -> tuple[str, str]:
    """Return the idempotency key of an event and its id, as `event_key` and `event_id` do, in one call."""
    if SEPARATOR in run_id or SEPARATOR in plan_version:
        _refuse_separator(run_id=run_id, plan_version=plan_version)
    text = f"{run_id}|{step_id}|{logical_attempt_id}|{event_type}|{plan_version}"
    try:
        key = sha256(text.encode()).hexdigest()
    except UnicodeEncodeError as problem:
        raise _not_unicode(text) from problem
    first, second, third, variant, fourth, last = _UUID_PARTS(key)
    return key, f"{first}-{second}-8{third}-{_VARIANT[variant]}{fourth}-{last}"


def event_id(key: str) -> str:
    """Return the event id for an event's idempotency key: a UUID of version 8."""
    first, second, third, variant, fourth, last = _UUID_PARTS(key)
    return f"{first}-{second}-8{third}-{_VARIANT[variant]}{fourth}-{last}"


def request_key(
    tenant: str, project: str, environment: str, plan_id: str, plan_version: str, run_request_id: str
) -> str:
    """Return the key that identifies a start request: 64 hex digits."""
    place = f"{tenant}|{project}|{environment}|{plan_id}|{plan_version}"
    if place.count(SEPARATOR) > 4:
        _refuse_separator(
            tenant=tenant, project=project, environment=environment, plan_id=plan_id, plan_version=plan_version
        )
    try:
        return sha256(f"{place}|{run_request_id}".encode()).hexdigest()
    except UnicodeEncodeError as problem:
        raise _not_unicode(run_request_id) from problem


def storage_key(*parts: str) -> str:
    """Join parts into a path that no other parts can produce, for any characters.

    Each part is percent-encoded byte by byte and never normalised. An empty part becomes a lone ``%``, which no
    encoded part can be; ``.`` and ``..`` are encoded too, because some stores resolve them.
    """
    return "/".join(_component(part) for part in parts)


def signal_suffix(accepted_at: int, signal_uuid: str) -> str:
    """Return the last part of a signal's key, which is also the cursor and sorts by time of acceptance."""
    return f"{format_instant(accepted_at)}_{signal_uuid}"


def signal_storage_key(run_id: str, name: str, suffix: str) -> str:
    """Return `workflow/{id}/signals/{name}/{timestamp}_{uuid}.json`."""
    return f"{storage_key('workflow', run_id, 'signals', name)}/{suffix}.json"


def signal_uuid(signal_storage_key: str) -> str:
    """Return the store's id of the signal that is stored under this key."""
    return signal_storage_key.rpartition("_")[2].removesuffix(".json")


def sent_signal_id(run_id: str, step_id: str, plan_version: str) -> str:
    """Return the id of the signal that a step of a run sends: unique to the step, and the same on a retry."""
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

RETRY_TAG = "retry_of:"
FORK_TAG = "forked_from:"
SCHEDULE_TAG = "schedule:"

OWN_TAGS = (RETRY_TAG, FORK_TAG, SCHEDULE_TAG)
"""The prefixes of tags that only the engine sets, because decisions depend on them."""

ANCESTORS = 20
"""How many ancestors a run has as tags: the last ones, and those whose artifacts it uses."""


def check_tag(value: Any) -> InvalidInput | None:
    """Return why a caller cannot give a run `value` as a tag, or None."""
    problem = check_name("tags", value)
    if problem is None and value.startswith(OWN_TAGS):
        return InvalidInput(f"tag {value!r}: tags that begin with {', '.join(OWN_TAGS)} are the engine's", field="tags")
    return problem


def retry_tag(run_id: str) -> str:
    """Return the tag by which the retries of this run are found, and their retries."""
    return prefixed(RETRY_TAG, run_id)


def fork_tag(run_id: str) -> str:
    """Return the tag by which the forks of a run are found, and their forks."""
    return prefixed(FORK_TAG, run_id)


def descended(tags: Sequence[str], tag: str, needed: Callable[[], Collection[str]]) -> tuple[str, ...]:
    """Return the tags of a run that descends, by `tag`, from a run with these tags.

    `needed` returns the runs whose artifacts it uses. It is called only if the tags of some ancestors must be omitted.
    """
    ancestors = [each for each in tags if each.startswith((RETRY_TAG, FORK_TAG)) and each != tag]
    others = [each for each in tags if each not in ancestors and each != tag]
    if len(ancestors) >= ANCESTORS:
        stay = {name(run_id) for run_id in needed() for name in (retry_tag, fork_tag)}
        stay.update(ancestors[1 - ANCESTORS :])
        ancestors = [each for each in ancestors if each in stay]
    return (*others, *ancestors, tag)


def prefixed(prefix: str, name: str) -> str:
    """Return the name with a prefix. If that is too long for a name, the digest replaces the name."""
    whole = prefix + name
    return whole if len(whole.encode()) <= NAME_BYTES else prefix + sha256(name.encode()).hexdigest()


ACTIVITY_TOKEN_CHARS = 2_000
"""No token is longer: its parts are bounded names."""

_TAG_BYTES = 24


class ActivityToken(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The run, step and attempt that a token names.

    `opened_at`, when the step was opened, distinguishes a run from a later one with the same id; 0 in older tokens.
    """

    run_id: str
    step_id: str
    logical_attempt_id: int
    engine_attempt_id: int
    opened_at: int = 0

    @property
    def is_callback(self) -> bool:
        """Whether it belongs to a callback: then it is valid for all attempts and names none."""
        return self.engine_attempt_id == 0


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
    """Return the id of the signal with the outcome of this attempt: an attempt has one outcome."""
    name = f"{token.step_id}|{token.logical_attempt_id}|{token.engine_attempt_id}"
    return sha256(name.encode()).hexdigest()


def _tag(body: str, key: str) -> str:
    return _text(hmac_digest(bytes.fromhex(key), f"{COMPLETION_KEY}:{body}".encode(), "sha256")[:_TAG_BYTES])


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")
